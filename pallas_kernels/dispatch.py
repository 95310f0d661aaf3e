"""The choice of an implementation of an op, the record of each choice, and one trace
for equal calls.

Every op has a table of implementations, the best first and XLA last. Each can say that
it cannot serve given arguments (`reject`), or that it could but is not the first choice
(`decline`, or `timed`, by measured times), with the reason. `backend=None` takes the
first that neither rejects nor declines. A named backend runs unless it rejects, and
then raises `NotImplementedError` with the reason. There is no silent fallback: the
requested backend runs, or the caller reads why it cannot.

On a CPU a named kernel runs in its interpreter: the same program, slowly. A kernel
without an interpreter, because it is written in PTX, rejects. `backend=None` never
interprets, and asks no kernel on a CPU.

The options of an op travel as one frozen value and its arrays in order, so that `api`,
`reference` and every kernel have the same signature, `(options, *arrays)`.
"""

import contextlib
import contextvars
import functools
import itertools
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
from jax.extend import source_info_util

from pallas_kernels import pallas_triton, tuning
from pallas_kernels.tuning import Key

Backend = Literal["xla", "triton", "mosaic"]
BACKENDS: tuple[Backend, ...] = ("mosaic", "triton", "xla")


def _no_objection(*args: Any) -> None:
    return None


@dataclass(frozen=True)
class Implementation:
    """One way to run an op. All functions but `run` look at shapes and dtypes only.

    Attributes:
      backend: its name.
      run: takes the op's options and arrays, as the functions below do.
      reject: returns the reason why it cannot run, or None.
      decline: returns the reason why it is not the first choice, or None.
      configure: returns the tile sizes that would run, or None if there are none to
        choose.
      key: returns the name of the call in `tuned.json`, or None. XLA's implementation
        has it for the whole table.
      timed: whether it is the first choice only if it was measured to be the fastest.
      replaces: a backend where it comes first untimed, too, if that one cannot run.
    """

    backend: Backend
    run: Callable[..., Any]
    reject: Callable[..., str | None] = _no_objection
    decline: Callable[..., str | None] = _no_objection
    configure: Callable[..., object] = _no_objection
    key: Callable[..., Key | None] = _no_objection
    timed: bool = False
    replaces: Backend | None = None


@dataclass(frozen=True)
class Verdict:
    """The judgement of one implementation: `reason` is None for the one that runs, with
    its `config`.
    """

    backend: Backend
    reason: str | None
    config: Any = None


@dataclass(frozen=True)
class Call:
    """One call of `dispatch` in a program.

    Attributes:
      step: name of the innermost `jax.named_scope`, which says the purpose of the op.
      op: name of the op.
      operands: dtypes and shapes of its arrays, in words.
      verdicts: one for each implementation in the table's order; empty for an op of XLA
        alone, such as a BF16 product.
      key: name of its times, or None.
    """

    step: str
    op: str
    operands: str
    verdicts: tuple[Verdict, ...] = ()
    key: Key | None = None

    @property
    def chosen(self) -> Verdict | None:
        """The verdict of the implementation that runs, or None."""
        return next(
            (verdict for verdict in self.verdicts if verdict.reason is None), None
        )


_CALLS: contextvars.ContextVar[list[Call] | None] = contextvars.ContextVar(
    "pallas_kernels_calls", default=None
)
# Part of the key of every cache of traced functions. A function that was traced before
# would hide its calls from a recording, and one that was traced in a recording has
# references instead of kernels.
_RECORDING_KEY = jax.make_user_context(0)
_RECORDINGS = itertools.count(1)


@contextlib.contextmanager
def recording() -> Iterator[list[Call]]:
    """Record every call of an op that is traced inside.

    A named backend that cannot run is recorded with its reason, and the reference is
    traced instead. Functions that were traced elsewhere are traced anew, and traces
    made here are not reused.
    """
    calls: list[Call] = []
    token = _CALLS.set(calls)
    try:
        with _RECORDING_KEY(next(_RECORDINGS)):
            yield calls
    finally:
        _CALLS.reset(token)


def note(key: Key, *arrays: Any) -> None:
    """Record a call of an op without a table, which XLA alone computes."""
    calls = _CALLS.get()
    if calls is not None:
        calls.append(Call(_scope(), key.op, _describe(*arrays), key=key))


def _scope() -> str:
    # The innermost name, without the names of transformations: dgrad of
    # transpose(jvp(dgrad)).
    names = re.findall(r"[^()/]+", str(source_info_util.current().name_stack))
    return names[-1].replace("_", " ") if names else ""


def _describe(*arrays: Any) -> str:
    """Return dtypes and shapes of arrays and pytrees of them, in words.

    >>> import jax.numpy as jnp
    >>> _describe(jnp.ones((2, 3)), None, jnp.ones(4))
    'float32[2, 3] x float32[4]'
    """
    leaves = [
        leaf for leaf in jax.tree.leaves(arrays) if hasattr(leaf, "shape") and leaf.ndim
    ]
    return " x ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves)


def check_backend(backend: Backend | None) -> None:
    """Raise a ValueError unless `backend` is None or a known name."""
    if backend is not None and backend not in BACKENDS:
        raise ValueError(
            f"backend={backend!r} is unknown; use None or one of"
            f" {', '.join(map(repr, BACKENDS))}"
        )


def device_kind() -> str:
    """Return the kind of device for which programs are traced, such as "NVIDIA H200" or
    "cpu".

    The mesh in use decides (it may describe a device that this machine lacks), else
    JAX's default device.
    """
    return str(_device().device_kind)


def device_cores(otherwise: int) -> int:
    """Return the number of multiprocessors of that device, or `otherwise` if it does
    not say.
    """
    device = _device()
    return (
        getattr(device, "num_cores", None)
        or getattr(device, "core_count", None)
        or otherwise
    )


def compute_capability() -> float:
    """Return the compute capability of that device, such as 9.0 for Hopper, or 0 unless
    it is an NVIDIA GPU.
    """
    try:
        return float(_device().compute_capability)
    except (AttributeError, ValueError):
        return 0.0


def lacks_fp8() -> str | None:
    """Return the reason why that device cannot convert to FP8 in a kernel, or None:
    NVIDIA GPUs can from 8.9 on.

    A device that is only described, for a program that is compiled elsewhere, has a
    name but no capability.
    """
    kind, capability = device_kind(), compute_capability()
    return (
        f"{kind} has no instructions for FP8"
        if "NVIDIA" not in kind or 0 < capability < 8.9
        else None
    )


def _device() -> Any:
    described = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if described is not None:
        return described
    default = getattr(jax.config, "jax_default_device", None)
    return default if isinstance(default, jax.Device) else jax.devices(default)[0]


def judge(
    table: Sequence[Implementation],
    backend: Backend | None,
    options: Hashable,
    *arrays: Any,
) -> tuple[Verdict, ...]:
    """Return for each implementation the reason why it does not run, and None for the
    first that does.

    Raises:
      ValueError: `backend` is not a backend.
    """
    check_backend(backend)
    verdicts: list[Verdict] = []
    chosen: Backend | None = None
    device = device_kind()
    for implementation in table:
        kernel, reason, config = implementation.backend != "xla", None, None
        if backend not in (None, implementation.backend):
            reason = f"backend={backend!r} was asked for"
        elif kernel and backend is None and device == "cpu":
            reason = (
                "a CPU runs a kernel only where it is named, in its interpreter if it"
                " has one"
            )
        else:
            reason = _reject(implementation, options, *arrays)
            if reason is None and backend is None:
                reason = implementation.decline(options, *arrays)
                if reason is None and implementation.timed:
                    able = {
                        other.backend
                        for other in table
                        if _reject(other, options, *arrays) is None
                    }
                    key, name = table[-1].key(options, *arrays), implementation.backend
                    if implementation.replaces in {None, *able} or (
                        key and tuning.find(device, key, name)
                    ):
                        reason = tuning.decline(device, key, name, able)
        if reason is None and chosen is not None:
            reason = f"{chosen} comes first"
        if reason is None:
            chosen, config = (
                implementation.backend,
                implementation.configure(options, *arrays),
            )
        verdicts.append(Verdict(implementation.backend, reason, config))
    return tuple(verdicts)


def _reject(
    implementation: Implementation, options: Hashable, *arrays: Any
) -> str | None:
    lacks_engine = (
        pallas_triton.missing() if implementation.backend == "triton" else None
    )
    return lacks_engine or implementation.reject(options, *arrays)


def dispatch(
    op: str,
    table: Sequence[Implementation],
    backend: Backend | None,
    options: Hashable,
    *arrays: Any,
) -> Any:
    """Choose an implementation and run it.

    A kernel runs inside a jitted function of its own. Calls with the same shapes,
    dtypes and options are then traced and lowered once in a program, however many
    layers make them; lowering a Mosaic kernel takes a third of a second.

    Raises:
      ValueError: `backend` is not a backend.
      NotImplementedError: the named backend cannot run this op or these arguments; the
        message says why.
    """
    verdicts = judge(table, backend, options, *arrays)
    chosen = next(
        (
            i
            for i, verdict in zip(table, verdicts, strict=True)
            if verdict.reason is None
        ),
        None,
    )
    calls = _CALLS.get()
    if calls is not None:
        calls.append(
            Call(
                _scope(),
                op,
                _describe(*arrays),
                verdicts,
                table[-1].key(options, *arrays),
            )
        )
        chosen = chosen or table[-1]
    if chosen is None:
        raise NotImplementedError(
            f"{op} cannot run with backend={backend!r}:"
            f" {_reasons(op, table, backend, verdicts)}"
        )
    if chosen.backend == "xla":
        return chosen.run(options, *arrays)
    return _jitted(chosen.run)(options, *arrays)


def _reasons(
    op: str,
    table: Sequence[Implementation],
    backend: Backend | None,
    verdicts: Sequence[Verdict],
) -> str:
    reasons = [
        f"{verdict.backend}: {verdict.reason}"
        for verdict in verdicts
        if backend in (None, verdict.backend)
    ]
    if reasons:
        return "; ".join(reasons)
    available = ", ".join(repr(implementation.backend) for implementation in table)
    return (
        f"{op} has no {backend!r} implementation (it has {available}); use backend=None"
        ' or backend="xla"'
    )


@functools.cache
def _jitted(run: Callable[..., Any]) -> Callable[..., Any]:
    return jax.jit(run, static_argnums=0)


def shared(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function(options, *arguments)`, traced once for options and arguments
    that agree.

    Use it for a part of a program that equal layers repeat. Without it a program with
    twelve layers has the arithmetic of its quantizers thirty-six times, and JAX traces,
    differentiates and lowers each copy. XLA inlines the jitted function before it
    optimizes, so the compiled program is the same.

    `options` is hashable. The arguments are pytrees of arrays, compared by shapes,
    dtypes, shardings and varying axes. Nothing is shared while calls are recorded, so
    that every call is seen.

    >>> double = shared(lambda factor, x: factor * x)
    >>> float(double(2, jax.numpy.float32(3)))
    6.0
    """

    @functools.wraps(function)
    def on_device(options: Hashable, around: Hashable, *arguments: Any) -> Any:
        return function(options, *arguments)

    traced = jax.jit(on_device, static_argnums=(0, 1))

    @functools.wraps(function)
    def call(options: Hashable, *arguments: Any) -> Any:
        if _CALLS.get() is not None:
            return function(options, *arguments)
        return traced(options, surroundings(), *arguments)

    return call


def surroundings() -> Hashable:
    """Return the inputs of the choice besides its arguments, which JAX does not know:
    the device and the times.
    """
    kind = device_kind()
    # A CPU runs no kernel that is not named, so times decide nothing there.
    return (
        kind,
        compute_capability(),
        device_cores(0),
        None if kind == "cpu" else tuning.load(),
    )
