"""The definition of the block-scaled product in plain lax: float32 on a CPU, dequantized BF16 on a GPU.

The meaning is `out = sum_k (x s_x)[m, k] * (w s_w + w_lo s_lo)[n, k]` with float32 accumulation, where each s is that
of the value's block. An FP8 value times a power of two is exact in bfloat16, so on a GPU XLA multiplies the
dequantized operands on BF16 tensor cores: what a kernel has to beat.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import numerics
from pallas_kernels.blocks import Tile, spread


def dequantize(values: jax.Array, scales: jax.Array, block: int, tile: Tile) -> jax.Array:
    """Values times the scales of their blocks, float32."""
    wide = spread(numerics.decode_e8m0(scales), values.shape, block, tile)
    # The barrier keeps XLA on a GPU from cancelling the cast against the one that made the values, in the same jit.
    return lax.optimization_barrier(values).astype(jnp.float32) * wide


def block_matmul(
    x: jax.Array,
    x_scales: jax.Array,
    w: jax.Array,
    w_scales: jax.Array,
    w_lo: jax.Array | None,
    w_lo_scales: jax.Array | None,
    *,
    block: int,
    tile: Tile,
    out_dtype: Any,
) -> jax.Array:
    """The product on the platform that the program is lowered for; see `api.block_matmul`."""
    operands = [dequantize(x, x_scales, block, "vector"), dequantize(w, w_scales, block, tile)]
    if w_lo is not None and w_lo_scales is not None:
        operands.append(dequantize(w_lo, w_lo_scales, block, tile))
    dimensions = (((x.ndim - 1,), (1,)), ((), ()))

    def in_float32(x: jax.Array, w: jax.Array, *lo: jax.Array) -> jax.Array:
        wide = w + lo[0] if lo else w
        out = lax.dot_general(x, wide, dimensions, precision=lax.Precision.HIGHEST)
        return out.astype(out_dtype)

    def on_tensor_cores(x: jax.Array, *halves: jax.Array) -> jax.Array:
        x, *halves = (operand.astype(jnp.bfloat16) for operand in (x, *halves))
        products = [lax.dot_general(x, half, dimensions, preferred_element_type=jnp.float32) for half in halves]
        return sum(products[1:], products[0]).astype(out_dtype)

    return lax.platform_dependent(*operands, cuda=on_tensor_cores, default=in_float32)
