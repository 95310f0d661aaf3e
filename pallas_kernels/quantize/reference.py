"""The definition of `quantize` and `dual_quantize` in plain jax.numpy.

It is the path on CPUs and the oracle of every kernel.
"""

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from pallas_kernels import numerics
from pallas_kernels.operands import (
    ZERO_BLOCK,
    Block,
    Operand,
    Quantization,
    Quantized,
    Row,
)


def quantize(options: Quantization, x: Array, amax: Array | None) -> Quantized:
    """Return the quantized tensor, see `api.quantize`."""
    wide = x.astype(jnp.float32)
    scaling = options.scaling
    rows = _quantize(options, wide, amax)
    if options.orientation == "rows":
        return Quantized(rows)
    if scaling.serves_both:
        values = jnp.moveaxis(rows.values, -1, 0)
        scale = rows.scale.T
    # A second quantization, along all other axes as one.
    elif isinstance(scaling, Row):
        # Scaled before it is turned: XLA then turns one byte a value.
        others = tuple(range(x.ndim - 1))
        scale, inverse = numerics.find_scale(wide, options.dtype, scaling.scale, others)
        scaled = numerics.scaled_cast(wide, inverse, options.dtype)
        values = jnp.moveaxis(scaled, -1, 0)
    else:
        turned = jnp.moveaxis(x, -1, 0)
        matrix = turned.reshape(x.shape[-1], -1).astype(jnp.float32)
        columns = _quantize(options, matrix, None)
        values = columns.values.reshape(turned.shape)
        scale = columns.scale
    return Quantized(rows, Operand(values, scale, scaling=scaling))


def _quantize(options: Quantization, x: Array, amax: Array | None) -> Operand:
    scale, multiplier = options.scaling.find(x, options.dtype, amax)
    values = numerics.scaled_cast(x, multiplier, options.dtype)
    return Operand(values, scale, scaling=options.scaling)


# Two halves
# --------------------------------------------------------------------------------------


def dual_quantize(
    options: Quantization,
    w: Array,
    error: Array | None,
    bits: Array | None,
    amax: Array | None,
) -> Quantized:
    """Return both halves, see `api.dual_quantize`."""
    scaling = options.scaling
    dtype = options.dtype
    wanted = target(w, error)
    scale, multiplier = scaling.find(wanted, dtype, amax)
    spread = scaling.spread(scale, w.shape)
    hi, lo, left = split(wanted, multiplier, spread, dtype, bits)
    lo_scale = None
    if isinstance(scaling, Block):
        lo_scale = _skip_zero_blocks(scaling, scale, lo)
    rows = Operand(hi, scale, lo, lo_scale, scaling)
    columns = rows.turn() if options.orientation == "both" else None
    left_over = None if error is None else left.astype(error.dtype)
    return Quantized(rows, columns, left_over)


def target(w: Array, error: Array | None) -> Array:
    """Return `w + error` in float32, which hi + lo shall approximate."""
    wide = w.astype(jnp.float32)
    return wide if error is None else wide + error.astype(jnp.float32)


def split(
    target: Array,
    inverse: Array,
    scale: Array,
    dtype: DTypeLike,
    bits: Array | None,
) -> tuple[Array, Array, Array]:
    """Return (hi, lo, the remaining error), elementwise; `inverse` is 1 / scale."""
    scaled = numerics.flush_subnormal(target) * inverse
    hi = numerics.round_to(scaled, dtype)
    rest = numerics.residual(scaled, hi)
    if bits is None:
        lo = numerics.round_to(rest, dtype)
    else:
        lo = numerics.stochastic_round_to(rest, dtype, bits)
    # The casts are exact: hi and lo are values of the format already.
    return hi.astype(dtype), lo.astype(dtype), numerics.residual(rest, lo) * scale


def _skip_zero_blocks(block: Block, stored: Array, lo: Array) -> Array:
    """Return the scales of a residual.

    They are the scales of the values, but code 0 for blocks that are zero.
    """
    # Look at the bytes without signs, because XLA on a GPU may cancel a cast back to
    # float32. A NaN's are not zero.
    magnitudes = lax.bitcast_convert_type(lo, jnp.uint8) & 0x7F
    is_zero = block.amax(magnitudes.astype(jnp.float32)) == 0
    codes = lax.bitcast_convert_type(stored, jnp.uint8)
    found = jnp.where(is_zero, jnp.uint8(ZERO_BLOCK), codes)
    return lax.bitcast_convert_type(found, stored.dtype)
