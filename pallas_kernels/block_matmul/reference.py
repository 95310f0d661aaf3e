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
from pallas_kernels.blocks import Blocked, ResidualBlocks, Tile, spread


def dequantize(blocked: Blocked, block: int, tile: Tile) -> jax.Array:
    """Values times the scales of their blocks, float32."""
    wide = spread(numerics.decode_e8m0(blocked.scales), blocked.values.shape, block, tile)
    # The barrier keeps XLA on a GPU from cancelling the cast against the one that made the values, in the same jit.
    return lax.optimization_barrier(blocked.values).astype(jnp.float32) * wide


def block_matmul(
    x: Blocked,
    w: Blocked,
    w_lo: Blocked | None,
    *,
    block: int,
    tile: Tile,
    out_dtype: Any,
    residual_blocks: ResidualBlocks = "all",
) -> jax.Array:
    """The product on the platform that the program is lowered for; see `api.block_matmul`.

    All residual blocks are multiplied, whatever `residual_blocks` says: zeros add nothing.
    """
    operands = [dequantize(x, block, "vector"), dequantize(w, block, tile)]
    if w_lo is not None:
        operands.append(dequantize(w_lo, block, tile))
    dimensions = (((x.values.ndim - 1,), (1,)), ((), ()))

    def in_float32(x: jax.Array, w: jax.Array, *lo: jax.Array) -> jax.Array:
        wide = w + lo[0] if lo else w
        out = lax.dot_general(x, wide, dimensions, precision=lax.Precision.HIGHEST)
        return out.astype(out_dtype)

    def on_tensor_cores(x: jax.Array, *halves: jax.Array) -> jax.Array:
        narrow = x.astype(jnp.bfloat16)
        products = [
            lax.dot_general(narrow, half.astype(jnp.bfloat16), dimensions, preferred_element_type=jnp.float32)
            for half in halves
        ]
        return sum(products[1:], products[0]).astype(out_dtype)

    return lax.platform_dependent(*operands, cuda=on_tensor_cores, default=in_float32)
