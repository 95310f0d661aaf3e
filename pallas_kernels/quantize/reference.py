"""The definition of `quantize` and `dual_quantize` in plain jax.numpy: the CPU path and
the oracle of every kernel.
"""

import jax
import jax.numpy as jnp
from jax import lax
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


def quantize(options: Quantization, x: jax.Array, amax: jax.Array | None) -> Quantized:
    """Return the quantized tensor, see `api.quantize`."""
    rows = _quantize(options, x.astype(jnp.float32), amax)
    if options.orientation == "rows":
        return Quantized(rows)
    if options.scaling.serves_both:
        turned = jnp.moveaxis(rows.values, -1, 0)
        return Quantized(
            rows,
            Operand(turned, options.scaling.turn(rows.scale), scaling=options.scaling),
        )
    # A second quantization, along all other axes as one.
    if isinstance(options.scaling, Row):
        # Scaled before it is turned: XLA then turns one byte a value.
        wide = x.astype(jnp.float32)
        amax = numerics.amax(wide, axis=tuple(range(x.ndim - 1)))
        scale, inverse = numerics.scale_and_inverse(
            amax, options.dtype, options.scaling.scale
        )
        values = numerics.scaled_cast(wide, inverse, options.dtype)
        return Quantized(
            rows, Operand(jnp.moveaxis(values, -1, 0), scale, scaling=options.scaling)
        )
    turned = jnp.moveaxis(x, -1, 0)
    columns = _quantize(
        options, turned.reshape(x.shape[-1], -1).astype(jnp.float32), None
    )
    return Quantized(
        rows,
        Operand(
            columns.values.reshape(turned.shape), columns.scale, scaling=options.scaling
        ),
    )


def _quantize(options: Quantization, x: jax.Array, amax: jax.Array | None) -> Operand:
    scale, multiplier = options.scaling.find(x, options.dtype, amax)
    return Operand(
        numerics.scaled_cast(x, multiplier, options.dtype),
        scale,
        scaling=options.scaling,
    )


# Two halves
# --------------------------------------------------------------------------------------


def dual_quantize(
    options: Quantization,
    w: jax.Array,
    error: jax.Array | None,
    bits: jax.Array | None,
    amax: jax.Array | None,
) -> Quantized:
    """Return both halves, see `api.dual_quantize`."""
    scaling, dtype = options.scaling, options.dtype
    wanted = target(w, error)
    scale, multiplier = scaling.find(wanted, dtype, amax)
    hi, lo, left = split(
        wanted, multiplier, scaling.spread(scale, w.shape), dtype, bits
    )
    lo_scale = (
        _skip_zero_blocks(scaling, scale, lo) if isinstance(scaling, Block) else None
    )
    rows = Operand(hi, scale, lo, lo_scale, scaling)
    return Quantized(
        rows,
        rows.turn() if options.orientation == "both" else None,
        None if error is None else left.astype(error.dtype),
    )


def target(w: jax.Array, error: jax.Array | None) -> jax.Array:
    """Return `w + error` in float32, which hi + lo shall approximate."""
    wide = w.astype(jnp.float32)
    return wide if error is None else wide + error.astype(jnp.float32)


def split(
    target: jax.Array,
    inverse: jax.Array,
    scale: jax.Array,
    dtype: DTypeLike,
    bits: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return (hi, lo, the remaining error), elementwise; `inverse` is 1 / scale."""
    scaled = numerics.flush_subnormal(target) * inverse
    hi = numerics.round_to(scaled, dtype)
    rest = numerics.residual(scaled, hi)
    lo = (
        numerics.round_to(rest, dtype)
        if bits is None
        else numerics.stochastic_round_to(rest, dtype, bits)
    )
    # The casts are exact: hi and lo are values of the format already.
    return hi.astype(dtype), lo.astype(dtype), numerics.residual(rest, lo) * scale


def _skip_zero_blocks(block: Block, stored: jax.Array, lo: jax.Array) -> jax.Array:
    """Return the scales of a residual: the scales of the values, but code 0 for blocks
    that are zero.
    """
    # Look at the bytes without signs, because XLA on a GPU may cancel a cast back to
    # float32. A NaN's are not zero.
    codes = (lax.bitcast_convert_type(lo, jnp.uint8) & 0x7F).astype(jnp.float32)
    empty = block.amax(codes) == 0
    as_bits = jnp.where(
        empty, jnp.uint8(ZERO_BLOCK), lax.bitcast_convert_type(stored, jnp.uint8)
    )
    return lax.bitcast_convert_type(as_bits, stored.dtype)
