"""The definition of grouped products by `lax.ragged_dot_general`.

It multiplies in float32 on a CPU, and on a GPU on BF16 tensor cores.
XLA has no grouped product on a CPU or a Hopper GPU. It masks x once for each group and
multiplies densely. So the forward product of e groups costs e times the multiplications
and reads e copies of x. It takes 7 to 170 times the time of a grouped kernel on an
H100. No weight is gathered for a row. FP8 values are exact in bfloat16 and their
products in float32, so the result has the rounding of float32 sums alone.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import numerics
from pallas_kernels.dispatch import Implementation
from pallas_kernels.operands import Block, MatmulOptions, Operand
from pallas_kernels.tuning import Key

# FP8 with scales, or BF16
Matrix: TypeAlias = Operand | Array
# x[m, k] . w[e, n, k] of the rows' groups, and x[k, m] . g[n, m] within each group.
_ROWS = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])
_WITHIN = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [1], [])


def _grouped_matmul(
    options: MatmulOptions,
    x: Matrix,
    w: Matrix,
    group_sizes: Array,
) -> Array:
    """Return the product of each row with the weight of its group, see `api`."""
    x = _without_blocks(x)
    w = _without_blocks(w)
    out = _unscaled(_ROWS, x, w, group_sizes)
    m = out.shape[0]
    if isinstance(w, Operand) and isinstance(x, Operand):
        of_w = jnp.take(
            w.scale, _group_of_rows(group_sizes, m), axis=0, mode="fill", fill_value=0
        )
        of_x = x.scaling.spread(x.scale, (m, 1))
        out = numerics.scaled_by_both(out, of_x, of_w.reshape(m, -1))
    # Rows behind the last group are zero, also next to a weight that is not finite.
    out = jnp.where(rows_inside(group_sizes, m)[:, None], out, 0)
    return _checked(out, group_sizes, m).astype(options.out_dtype)


def _grouped_weight_gradient(
    options: MatmulOptions,
    x: Matrix,
    g: Matrix,
    group_sizes: Array,
) -> Array:
    """Return the product over the rows of each group, see `api`."""
    x = _without_blocks(x)
    g = _without_blocks(g)
    out = _unscaled(_WITHIN, x, g, group_sizes)
    if isinstance(x, Operand) and isinstance(g, Operand):
        of_x = x.scaling.spread(x.scale, (x.shape[0], 1))
        of_g = g.scaling.spread(g.scale, (g.shape[0], 1))
        out = numerics.scaled_by_both(out, of_x, of_g[..., 0])
    return _checked(out, group_sizes, values_of(x).shape[1]).astype(options.out_dtype)


def key(
    options: MatmulOptions,
    x: Matrix,
    w: Matrix,
    group_sizes: Array,
) -> Key:
    """Return the name of a product in `tuned.json`, with the shape `(e, m, k, n)`."""
    e = group_sizes.shape[0]
    m, k = values_of(x).shape
    values = values_of(w)
    n = values.shape[-2]
    halves = "dual" if isinstance(w, Operand) and w.lo is not None else "single"
    out = jnp.dtype(options.out_dtype)
    variant = f"{halves} {options.accumulation} {values.dtype} {out}"
    if isinstance(w, Operand) and isinstance(w.scaling, Block):
        variant += f" {w.scaling.tile} {w.scaling.size}"
    if values.ndim == 2:
        return Key("grouped_weight_gradient", variant, (e, k, m, n))
    return Key("grouped_matmul", variant, (e, m, k, n))


DEFINITION = Implementation("xla", _grouped_matmul, key=key)
GRADIENT = Implementation("xla", _grouped_weight_gradient, key=key)


def rows_inside(group_sizes: Array, m: int) -> Array:
    """Return which of m rows belong to a group, `[m]`; all of them for wrong sizes,
    whose result is NaN.
    """
    is_inside = jnp.arange(m) < jnp.sum(group_sizes)
    return is_inside | ~_are_sound(group_sizes, m)


def values_of(x: Matrix) -> Array:
    """Return the values of an operand, which is an array itself if it is BF16."""
    return x.values if isinstance(x, Operand) else x


def _without_blocks(x: Matrix) -> Matrix:
    """Return an operand in blocks with one scale of 1.

    An FP8 value times a power of two is exact in bfloat16.
    """
    if not isinstance(x, Operand) or not x.scaling.in_blocks:
        return x
    scale = x.scale_of_values()

    def scaled(half: Array) -> Array:
        wide = lax.optimization_barrier(half).astype(jnp.float32) * scale
        return wide.astype(jnp.bfloat16)

    values = scaled(x.values)
    one = jnp.ones(x.values.shape[:-2])
    return Operand(values, one, None if x.lo is None else scaled(x.lo))


def _unscaled(
    numbers: lax.RaggedDotDimensionNumbers,
    x: Matrix,
    w: Matrix,
    group_sizes: Array,
) -> Array:
    """Return the float32 product of the values without their scales."""
    operands = [values_of(x), values_of(w)]
    if isinstance(w, Operand) and w.lo is not None:
        operands.append(w.lo)

    def in_float32(x: Array, *halves: Array) -> Array:
        w = sum(half.astype(jnp.float32) for half in halves)  # exact: 18 bits at most
        return _ragged(numbers, True)(x.astype(jnp.float32), w, group_sizes)

    def on_tensor_cores(*operands: Array) -> Array:
        # The barrier keeps XLA from cancelling the cast against the one that made the
        # values, in the same jit.
        x, *halves = [
            values.astype(jnp.bfloat16) for values in lax.optimization_barrier(operands)
        ]
        multiply = _ragged(numbers, False)
        return sum(multiply(x, half, group_sizes) for half in halves)  # type: ignore[return-value]

    return lax.platform_dependent(*operands, cuda=on_tensor_cores, default=in_float32)


@cache
def _ragged(
    numbers: lax.RaggedDotDimensionNumbers,
    precise: bool,
    stacked: bool = False,
) -> Callable[..., Array]:
    """Return the product of arrays, or of stacks of them.

    `jax.vmap` may add an axis to any operand. JAX's own rule wants every operand to
    have the new axis, and fails for a second one (jax 0.10 to 0.12).
    """
    options: Any = dict(
        preferred_element_type=jnp.float32,
        precision=lax.Precision.HIGHEST if precise else None,
    )

    def one(x: Array, w: Array, group_sizes: Array) -> Array:
        if numbers is _WITHIN:
            return lax.ragged_dot_general(x, w, group_sizes, numbers, **options)
        # XLA multiplies every weight by zeros for the rows of other groups, which makes
        # NaN of a weight that is not finite.
        is_finite = jnp.isfinite(w)
        finite = jnp.where(is_finite, w, 0)
        out = lax.ragged_dot_general(x, finite, group_sizes, numbers, **options)
        group = _group_of_rows(group_sizes, x.shape[0])
        is_sound = jnp.take(jnp.all(is_finite, axis=-1), group, axis=0, mode="clip")
        return jnp.where(is_sound, out, jnp.nan)

    product = jax.custom_batching.custom_vmap(jax.vmap(one) if stacked else one)

    @product.def_vmap
    def of_stack(size: int, batched: list[bool], *arrays: Array) -> tuple[Array, bool]:
        alike = []
        for a, own in zip(arrays, batched, strict=True):
            alike.append(a if own else jnp.broadcast_to(a, (size, *a.shape)))
        stack = alike[0].shape[: 2 if stacked else 1]
        flat = [a.reshape(-1, *a.shape[len(stack) :]) for a in alike]
        out = _ragged(numbers, precise, True)(*flat)
        return out.reshape(*stack, *out.shape[1:]), True

    return product


def _group_of_rows(group_sizes: Array, m: int) -> Array:
    """Return the group of each of m rows, `[m]`; behind the last one, their number."""
    rows = jnp.arange(m, dtype=group_sizes.dtype)
    # The right side skips empty groups.
    return jnp.searchsorted(jnp.cumsum(group_sizes), rows, side="right")


def _checked(out: Array, group_sizes: Array, m: int) -> Array:
    """Return the result, or NaN for wrong sizes: a compiled program cannot raise."""
    return jnp.where(_are_sound(group_sizes, m), out, jnp.nan)


def _are_sound(group_sizes: Array, m: int) -> Array:
    """Return whether sizes are zero or more and add up to at most m."""
    ends = jnp.cumsum(group_sizes)
    # The first sum that overflows is negative.
    return jnp.all((group_sizes >= 0) & (ends >= 0) & (ends <= m))
