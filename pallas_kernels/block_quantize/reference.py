"""The definition of `block_quantize` in plain jax.numpy: the CPU path and the oracle of every kernel."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import numerics
from pallas_kernels.blocks import Tile, block_amax, find_scales, spread


def block_quantize(
    x: jax.Array, *, dtype: Any, block: int, tile: Tile, orientation: str
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """(values, scales, transposed values or None, their scales or None); see `api.block_quantize`."""
    values, scales = _quantize(x.astype(jnp.float32), dtype, block, tile)
    if orientation == "rows":
        return values, scales, None, None
    if tile == "square":
        return values, scales, values.T, scales.T
    turned = jnp.moveaxis(x, -1, 0)
    other, other_scales = _quantize(turned.reshape(x.shape[-1], -1).astype(jnp.float32), dtype, block, tile)
    return values, scales, other.reshape(turned.shape), other_scales


def _quantize(x: jax.Array, dtype: Any, block: int, tile: Tile) -> tuple[jax.Array, jax.Array]:
    scales, inverses = find_scales(block_amax(x, block, tile), dtype)
    scaled = numerics.flush_subnormal(x) * spread(inverses, x.shape, block, tile)
    return numerics.saturating_cast(scaled, dtype), numerics.encode_e8m0(scales)
