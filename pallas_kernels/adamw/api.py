"""`adamw`: one step of AdamW on a weight of two FP8 tensors, with 8-bit moments."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from pallas_kernels import moments as codec
from pallas_kernels.adamw import mosaic, reference, triton
from pallas_kernels.adamw.reference import AdamWOptions, Moments, Rates, Step
from pallas_kernels.dispatch import Backend, Implementation, dispatch, judge
from pallas_kernels.operands import SCALE_DTYPE, check_real
from pallas_kernels.specs import entries_of, has_explicit_axes

if TYPE_CHECKING:  # shapes for readers, editors and tests
    from jaxtyping import Float

__all__ = [
    "IMPLEMENTATIONS",
    "AdamWOptions",
    "Moments",
    "Rates",
    "Step",
    "adamw",
    "adamw_entry",
]


def _by_reference(
    options: AdamWOptions,
    g: Array,
    hi: Array,
    lo: Array,
    state: Moments,
    rates: Rates,
    key: Array,
) -> Step:
    """Take the step by the definition.

    XLA partitions it even with explicit axes, because it cuts axes into blocks.
    """
    step = partial(reference.adamw, options)
    if not has_explicit_axes():
        return step(g, hi, lo, state, rates, key)
    columns: Any = None
    if options.orientation == "both":
        columns = PartitionSpec(*entries_of(hi)[::-1])
    amax: Any = PartitionSpec()
    moments = jax.tree.map(_spec, state)
    results = Step(_spec(hi), _spec(lo), columns, moments, amax)
    return jax.sharding.auto_axes(step, out_sharding=results)(
        g, hi, lo, state, rates, key
    )


def _spec(x: Array) -> Any:
    return jax.typeof(x).sharding.spec


IMPLEMENTATIONS = (
    triton.KERNEL,
    mosaic.KERNEL,
    Implementation("xla", _by_reference),
)


def adamw(
    g: "Float[jax.Array, 'k n']",
    hi: "Float[jax.Array, 'k n']",
    lo: "Float[jax.Array, 'k n']",
    moments: Moments,
    rates: Rates,
    key: Array,
    *,
    backend: Backend | None = None,
    **options: str,
) -> Step:
    """Take one step of AdamW, as optax has it, on `W = (hi + lo) * scale`.

    Use it to write an optimizer of weights that exist in FP8 alone.
    `tcfp_jax.optim.adamw` is one.

    With decoupled decay, corrected bias, eps and eps_root: `m' = b1 m + (1 - b1) g`,
    `v' = b2 v + (1 - b2) g**2` and, in units of the new scale, `W' = W * decay - (rate
    m' [+ rate_g g]) / (sqrt(correction v' + eps_root) + eps)`, in float32. hi' is W' in
    E4M3, and lo' is the rest, rounded stochastically so that `E[hi' + lo'] = W'`. The
    moments are rounded stochastically to the formats of `pallas_kernels.moments`.
    Random bits come from `key` and each element's place in the weight. The factors b1
    and b2 of m and v are rounded to 20 bits, by 5e-7 at most.

    Args:
      g: the gradient, real floats [k, n].
      hi, lo: E4M3 [k, n]. Like the moments, they are overwritten if their buffers are
        donated.
      moments: moments of the weight.
      rates: float32 scalars of this step, and `keep`, whether it is taken.
      key: uint32 [2], from `counter.keys` of seed, step and leaf.
      backend: None for the fastest one, or a name.
      options: fields of `AdamWOptions`: `momentum="classic"` or "nesterov";
        `orientation="rows"`, or "both" for `columns`, the transpose of the new hi;
        `remainder="stochastic"` or "nearest", the rounding of lo.

    Returns:
      `Step(hi, lo, columns, moments, amax)`. A NaN makes W' NaN, and the moments of its
        block of 128, never a number.

    Raises:
      TypeError: `g` is not real floating point, or the dtype of an array is not the one
        of its format.
      ValueError: shapes differ, the weight is not a matrix (use `jax.vmap` over a
        stack), or an option is unknown.
      NotImplementedError: the named backend cannot run it; the message says why.

    >>> hi = jnp.ones((1, 2), jnp.float8_e4m3fn)
    >>> numbers = dict(
    ...     b1=0.9, b2=0.999, rate=0.125 / 0.1, rate_g=0, correction=1000, eps=1e-8,
    ...     eps_root=0, decay=1, gradient_scale=1, scale=1, new_scale=1)
    >>> numbers = {name: jnp.float32(x) for name, x in numbers.items()}
    >>> rates = Rates(**numbers, keep=jnp.bool_(True))
    >>> g, key = jnp.array([[3.0, 0.0]]), jnp.zeros(2, jnp.uint32)
    >>> step = jax.jit(adamw)(g, hi, hi * 0, Moments.zeros((1, 2)), rates, key)
    >>> weight = step.hi.astype(jnp.float32) + step.lo.astype(jnp.float32)
    >>> weight.tolist(), float(step.amax)
    ([[0.875, 1.0]], 1.0)
    """
    chosen = AdamWOptions(**options)  # type: ignore[arg-type]
    check_real("g", g)
    if g.dtype.itemsize == 1:
        raise TypeError(
            f"g has dtype {g.dtype}, whose numbers have no scale; give the gradient in"
            " bfloat16 or float32"
        )
    _check_arrays(g, hi, lo, moments)
    for name, x in rates._asdict().items():
        dtype = jnp.dtype(bool if name == "keep" else jnp.float32)
        if getattr(x, "dtype", None) != dtype or x.shape:
            raise TypeError(
                f"rates.{name} is {x!r}, not a {dtype} scalar; use jnp.asarray(x,"
                f" jnp.{dtype})"
            )
    if key.dtype != jnp.uint32 or key.shape != (2,):
        raise TypeError(
            f"key is {key.dtype}{list(key.shape)}, not uint32[2]; use"
            " jnp.stack(counter.keys(seed, step))"
        )
    return dispatch(
        "adamw", IMPLEMENTATIONS, backend, chosen, g, hi, lo, moments, rates, key
    )


def adamw_entry(
    entry: Array,
    g: "Float[jax.Array, '*stack k n']",
    hi: jax.Ref,
    lo: jax.Ref,
    moments: Moments,
    rates: Rates,
    key: Array,
    **options: Any,
) -> tuple[Array | None, Array]:
    """Take the step of `adamw` on one entry of stacks of weights in references.

    Use it in a loop over layers: Mosaic's kernel reads and writes the entry where it
    is, so that nothing copies it out of the stack and back. Otherwise the entry is
    read, takes its step by `adamw`, and is written.

    Args:
      entry: the number of the entry, int32.
      g: the gradient of the entry, a matrix or a stack of matrices.
      hi, lo, moments: references to `[layers, *stack, k, n]`, and to the numbers of
        their blocks.
      rates: the numbers of the step, an array `[*stack]` for each.
      key: uint32 `[*stack, 2]`.
      options: as in `adamw`.

    Returns:
      (columns, amax) of the entry, as in `Step`.
    """
    chosen = AdamWOptions(**options)
    operands = (chosen, entry, g, hi, lo, moments, rates, key)
    (verdict,) = judge((mosaic.OF_ENTRIES,), None, *operands)
    if verdict.reason is None:
        found: tuple[Array | None, Array] = dispatch(
            "adamw", (mosaic.OF_ENTRIES,), None, *operands
        )
        return found
    one: Callable[..., Step] = partial(adamw, **options)
    for _ in g.shape[:-2]:
        one = jax.vmap(one)
    places = (hi, lo, moments)
    old = jax.tree.map(lambda ref: ref[entry], places)
    after = one(g, *old, rates, key)

    def write(ref: jax.Ref, new: Array) -> None:
        ref[entry] = new

    jax.tree.map(write, places, (after.hi, after.lo, after.moments))
    return after.columns, after.amax


def _check_arrays(g: Array, hi: Array, lo: Array, moments: Moments) -> None:
    if hi.ndim != 2:
        raise ValueError(
            f"hi{list(hi.shape)} is not a matrix; use jax.vmap over a stack of them"
        )
    few = (hi.shape[0], -(-hi.shape[1] // codec.BLOCK))
    expected = {
        "g": (g, None, hi.shape),
        "hi": (hi, codec.E4M3, hi.shape),
        "lo": (lo, codec.E4M3, hi.shape),
        "moments.m": (moments.m, codec.E4M3, hi.shape),
        "moments.m_scale": (moments.m_scale, SCALE_DTYPE, few),
        "moments.v": (moments.v, jnp.uint8, hi.shape),
        "moments.v_scale": (moments.v_scale, jnp.uint8, few),
    }
    for name, (x, dtype, shape) in expected.items():
        if dtype is not None and x.dtype != jnp.dtype(dtype):
            raise TypeError(
                f"{name} has dtype {x.dtype}, not {jnp.dtype(dtype)}; encode it anew, a"
                " cast changes it"
            )
        if x.shape != shape:
            raise ValueError(
                f"{name} has shape {list(x.shape)}, but a weight hi{list(hi.shape)} has"
                f" {list(shape)} there; give the arrays of one weight"
            )
