"""The definition of `block_dual_quantize` in plain jax.numpy: the CPU path and the oracle of every kernel."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import numerics
from pallas_kernels.blocks import ZERO_BLOCK, Tile, block_amax, find_scales, spread
from pallas_kernels.dual_quantize.reference import split, target


def block_dual_quantize(
    w: jax.Array,
    *,
    dtype: Any,
    block: int,
    tile: Tile,
    error: jax.Array | None,
    bits: jax.Array | None,
    orientation: str,
) -> tuple[jax.Array | None, ...]:
    """(hi, lo, scales, residual scales, new error, hi transposed, lo transposed); see `api.block_dual_quantize`."""
    wanted = target(w, error)
    scales, inverses = find_scales(block_amax(wanted, block, tile), dtype)
    wide, wide_inverse = (spread(s, w.shape, block, tile) for s in (scales, inverses))
    hi, lo, left = split(wanted, wide_inverse, wide, dtype, bits)
    # From the bytes, signs aside, because XLA on a GPU may cancel a cast back to float32. A NaN's are not zero.
    codes = (jax.lax.bitcast_convert_type(lo, jnp.uint8) & 0x7F).astype(jnp.float32)
    empty = block_amax(codes, block, tile) == 0
    encoded = numerics.encode_e8m0(scales)
    as_bits = jnp.where(empty, jnp.uint8(ZERO_BLOCK), jax.lax.bitcast_convert_type(encoded, jnp.uint8))
    residual_scales = jax.lax.bitcast_convert_type(as_bits, encoded.dtype)
    new_error = None if error is None else left.astype(error.dtype)
    turned = (hi.T, lo.T) if orientation == "both" else (None, None)
    return hi, lo, encoded, residual_scales, new_error, *turned
