"""Memory of the backward pass: keep as many values as fit, some of them in FP8.

    x = checkpoint_in_fp8(x, "hidden")  # x; a policy that keeps "hidden" keeps FP8
    policy = jax.checkpoint_policies.save_only_these_names("hidden")
    fit = save_what_fits(make_step, levels)  # the last level whose compiled step fits

`jax.checkpoint`, `nn.remat` and `nnx.remat` compute a block again in its backward pass,
except the values that their policy keeps. More kept values are a faster step, until the
device is full.

Left out: nothing here chooses the levels, moves values to the host, or watches the
memory of a running step. Write the policies yourself, use
`jax.checkpoint_policies.save_and_offload_only_these_names` for the host, and
`jax.profiler.device_memory_profile` to see which arrays fill a device.
"""

import functools
import numbers
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, partial_eval
from jax.typing import DTypeLike

from pallas_kernels import numerics
from pallas_kernels.derivatives import not_differentiated
from pallas_kernels.operands import Row, check_real
from pallas_kernels.quantize.api import quantize

__all__ = ["Fit", "checkpoint_in_fp8", "device_budget", "save_what_fits", "step_bytes"]

T = TypeVar("T")
MARGIN = 0.05
_NO_GRADIENT_OF_COPIES = (
    "a second derivative of a remat that keeps a copy in FP8 is asked for: the copy has"
    " no gradient, so terms would silently be FP8 without a scale, or zero; give"
    " jax.checkpoint a policy without the names of checkpoint_in_fp8"
)
# (forward, backward, unknown results, results that are there, residuals)
_Divided: TypeAlias = tuple[Any, Any, list[bool], list[bool], list[Any]]


class Fit(NamedTuple, Generic[T]):
    """The step that `save_what_fits` chose.

    Attributes:
      level: Its level.
      compiled: The compiled step. Call it: a call of the jitted function may compile it
        once more.
      needed: Bytes of one device that it needs, see `step_bytes`.
      budget: Bytes that it may need.
      tried: Pairs of each level that was compiled and the bytes that it needs; None if
        its compiler ran out of memory.
    """

    level: T
    compiled: jax.stages.Compiled
    needed: int
    budget: int
    tried: tuple[tuple[T, int | None], ...] = ()


def save_what_fits(
    make_step: Callable[[T], jax.stages.Lowered],
    levels: Sequence[T],
    budget: int | None = None,
) -> Fit[T]:
    """Return the last of `levels` whose compiled step needs at most `budget` bytes.

    Use this before the first step to choose the policy of a remat. If every value fits,
    no remat is needed, and the step is fastest without one. It compiles the last level
    first. If that does not fit, it bisects, so n levels take at most
    `2 + log2(n)` compiles. A level that runs its compiler out of memory does not fit.

    Args:
      make_step: Function of a level that returns the lowered training step,
        `jax.jit(step).lower(...)`. Shapes serve as arguments, so no state has to exist.
      levels: Policies, names of values, or anything else that `make_step` understands;
        the ones that keep least first.
      budget: Bytes of one device; None is `device_budget()`.

    Raises:
      TypeError: the budget is not a number.
      ValueError: `levels` is empty, or the first level does not fit.
      NotImplementedError: no budget is given, and the device does not report its
        memory, as CPUs do not.

    >>> x = jax.ShapeDtypeStruct((4,), jnp.float32)
    >>> make_step = lambda copies: jax.jit(lambda x: jnp.tile(x, copies)).lower(x)
    >>> fit = save_what_fits(make_step, [1, 4, 64], budget=100)
    >>> fit.level, fit.needed  # 16 bytes come in, and 64 go out
    (4, 80)
    """
    if not levels:
        raise ValueError(
            "save_what_fits has no levels; give at least one, the one that keeps the"
            " least"
        )
    if budget is not None and not isinstance(budget, numbers.Real):
        raise TypeError(
            f"budget={budget!r} must be a number of bytes, such as 80_000_000_000"
        )
    budget = device_budget() if budget is None else budget
    found = None
    tried: list[tuple[T, int | None]] = []
    first = 0
    last = at = len(levels) - 1
    while first <= last:
        compiled = _compiled(make_step(levels[at]))
        needed = None if compiled is None else step_bytes(compiled)
        tried.append((levels[at], needed))
        if compiled is not None and needed is not None and needed <= budget:
            found = Fit(levels[at], compiled, needed, budget)
            first = at + 1
        else:
            last = at - 1
        at = (first + last) // 2
    if found is None:
        needs = "more memory than the compiler could get"
        if needed is not None:
            needs = f"{needed:,} bytes ({needed / 1e9:.2f} GB) of a device"
        raise ValueError(
            f"no level fits: the step that keeps the least, {levels[0]!r}, needs"
            f" {needs}, and the budget is"
            f" {budget:,} ({budget / 1e9:.2f} GB); shorten the batch, store the weights"
            " (tcfp_jax.store), split the state over more devices, or raise the budget"
        )
    return found._replace(tried=tuple(tried))


def _compiled(step: jax.stages.Lowered) -> jax.stages.Compiled | None:
    """Return the compiled step, or None if its compiler runs out of memory.

    Compilers allocate what a step needs to time its kernels.
    """
    try:
        return step.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
    return None


def step_bytes(compiled: jax.stages.Compiled) -> int:
    """Return the bytes of one device that a compiled step needs.

    They are its arguments, other results and temporary memory. Use this to compare
    policies yourself; `save_what_fits` does it for a list of them.

    Raises:
      NotImplementedError: the device's compiler does not report them.

    >>> x = jax.ShapeDtypeStruct((256,), jnp.float32)
    >>> step_bytes(jax.jit(lambda x: x + 1, donate_argnums=0).lower(x).compile())
    1024
    """
    memory = compiled.memory_analysis()
    if memory is None:
        raise NotImplementedError(
            "the compiler of this device does not report the memory of a program"
        )
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + results + memory.temp_size_in_bytes


def device_budget(margin: float = MARGIN) -> int:
    """Return the bytes that JAX may allocate on a device, less a margin.

    Use this as the budget of your own search; `save_what_fits` uses it by default. It
    is the smallest budget of this process's devices. By default JAX takes three
    quarters of a GPU. Set `XLA_PYTHON_CLIENT_MEM_FRACTION=0.95` to let it take more.

    Args:
      margin: Part that stays free for everything that is not an argument of the step,
        and for gaps between arrays.

    Raises:
      NotImplementedError: a device does not report its memory, as CPUs do not.
    """
    limits = []
    for device in jax.local_devices():
        statistics = device.memory_stats() or {}
        limits.append(statistics.get("bytes_limit", 0))
    if 0 in limits:
        raise NotImplementedError(
            f"{jax.devices()[0]} does not report its memory; give a budget in bytes"
        )
    return int((1 - margin) * min(limits))


# Copies in FP8
# --------------------------------------------------------------------------------------


def checkpoint_in_fp8(x: Array, name: str) -> Array:
    """Return x, of which a remat whose policy keeps `name` keeps a copy in FP8.

    Use this like `jax.ad_checkpoint.checkpoint_name`, for values of which elementwise
    functions compute a gradient, such as gate and up of a SwiGLU. The forward pass does
    not change by a bit. The backward pass computes everything after x again from
    `q s`. Here q is x / s rounded to E4M3, and s is the smallest power of two with
    `max |x| / s <= 448` in a row along the last axis. The error of a value is at most
    1/16 of it, or 2**-10 s. A NaN or inf makes its row NaN. Without a policy that keeps
    the name, gradients do not change by a bit, either, and second derivatives exist.

    Args:
      x: Real floats `[..., k]`.
      name: Name for policies such as `jax.checkpoint_policies.save_only_these_names`.

    Raises:
      TypeError: x is not real floating point, or a copy in FP8 is differentiated, as a
        second derivative does.
      ValueError: x is a scalar.

    >>> policy = jax.checkpoint_policies.save_only_these_names("x")
    >>> cube = lambda x: checkpoint_in_fp8(2 * x, "x") ** 3
    >>> cube = jax.checkpoint(cube, policy=policy)
    >>> x = jnp.array([1.0, 1.03])
    >>> [float(y) for y in cube(x)] == [float(y) for y in (2 * x) ** 3]
    True
    >>> jax.grad(lambda x: cube(x).sum())(x).tolist()  # 2.06 is kept as 2
    [24.0, 24.0]
    """
    check_real("x", x)
    if not x.ndim:
        raise ValueError(
            "x is a scalar, but a copy in FP8 has one scale per row; pass an array of"
            " at least one axis"
        )
    return _in_fp8.bind(x, name=name)


_in_fp8 = Primitive("checkpoint_in_fp8")
_in_fp8.def_impl(lambda x, *, name: x)
_in_fp8.def_abstract_eval(lambda x, *, name: x)
mlir.register_lowering(_in_fp8, lambda context, x, *, name: [x])


def _jvp(
    primals: list[Array], tangents: list[Array], *, name: str
) -> tuple[Array, Array]:
    return _in_fp8.bind(*primals, name=name), tangents[0]


def _batch(args: list[Array], axes: list[int], *, name: str) -> tuple[Array, int]:
    return _in_fp8.bind(*args, name=name), axes[0]


ad.primitive_jvps[_in_fp8] = _jvp
batching.primitive_batchers[_in_fp8] = _batch


def _partial_eval(
    saveable: Callable[..., Any],
    unknown: Sequence[bool],
    there: Sequence[bool],
    eqn: Any,
) -> _Divided:
    """Divide the equation between both passes.

    JAX asks this of every equation in a remat. A name would have the same value in both
    passes.
    """
    x = eqn.invars[0]
    missing = [] if there[0] else [x]
    if unknown[0]:
        return None, eqn, [True], [True], missing
    # a policy that keeps everything keeps x
    if _is_kept(saveable(_in_fp8, x.aval, **eqn.params)):
        return eqn, None, [False], [False], []
    if not _is_kept(saveable(_name(), x.aval, **eqn.params)):
        return eqn, eqn, [False], [True], missing
    # New functions, because a trace that is shared would share its variables.
    pack = jax.make_jaxpr(lambda x: _pack(x))(x.aval).eqns[0]
    kept: list[Any] = pack.outvars[1:]
    unpack = jax.make_jaxpr(lambda *kept: _unpack(*kept, dtype=x.aval.dtype))
    backward = unpack(*(var.aval for var in kept)).eqns[0]
    backward = backward.replace(invars=kept, outvars=eqn.outvars)
    forward = pack.replace(invars=eqn.invars, outvars=[*eqn.outvars, *kept])
    return forward, backward, [False], [True], kept


partial_eval.partial_eval_jaxpr_custom_rules[_in_fp8] = _partial_eval


def _is_kept(answer: object) -> bool:
    """Return whether a policy's answer is to keep a value on the device.

    The answer is a bool or one of JAX's three cases.
    """
    if isinstance(answer, bool):
        return answer
    case = type(answer).__name__
    if case not in ("SaveableType", "RecomputeType"):
        raise NotImplementedError(
            f"a policy answers {answer} for a copy in FP8, which can only be kept"
            " or not"
        )
    return case == "SaveableType"


@functools.cache
def _name() -> Primitive:
    """Return the primitive of `checkpoint_name`, for which policies know the names."""
    return jax.make_jaxpr(lambda x: checkpoint_name(x, ""))(1.0).eqns[0].primitive


@jax.jit
def _pack(x: Array) -> tuple[Array, Array, Array]:
    fixed = not_differentiated(_NO_GRADIENT_OF_COPIES, x)
    rows = quantize(fixed, jnp.float8_e4m3fn, Row()).rows
    return x, rows.values, rows.scale


@functools.partial(jax.jit, static_argnames="dtype")
def _unpack(values: Array, scale: Array, dtype: DTypeLike) -> Array:
    # Without the barrier of `Operand.dequantize`, so that XLA reads a slice of a stack
    # where it is. If XLA cancels both casts in a loop-free program, as
    # `prevent_cse=False` allows, the value is exact.
    wide = values.astype(jnp.float32)
    return numerics.dequantized(wide, scale[..., None], dtype)
