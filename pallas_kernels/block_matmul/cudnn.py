"""`block_matmul` by `jax.nn.scaled_matmul`: the block-scaled tensor cores of Blackwell, through cuDNN.

They multiply vectors of 32 along the contraction of both operands, with E8M0 scales (OCP MX), one weight tensor. On
other devices `jax.nn.scaled_matmul` would dequantize, as the reference does, so this steps aside there.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.blocks import Blocked, Tile
from pallas_kernels.dispatch import compute_capability

MX_BLOCK = 32
BLACKWELL = 10
# cuDNN's tiles of scales.
_MULTIPLE_OF_ROWS, _MULTIPLE_OF_K = 128, 128


def reject(
    x: Blocked, w: Blocked, w_lo: Blocked | None, *, block: int, tile: Tile, out_dtype: Any, **options: Any
) -> str | None:
    """Why these tensor cores cannot multiply these operands here, or None."""
    found = compute_capability()
    if found < BLACKWELL:
        return f'compute capability {found:g} is below {BLACKWELL}, the first with block scales; use backend="xla"'
    if block != MX_BLOCK or tile != "vector" or w_lo is not None:
        form = "two" if w_lo is not None else "one"
        return f'{tile} blocks of {block} and {form} weight tensor(s): only one, in vectors of {MX_BLOCK}; use "xla"'
    if jnp.dtype(out_dtype) not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f'out_dtype={out_dtype} must be bfloat16, float16 or float32; use backend="xla"'
    (n, k), m = w.values.shape, x.values.size // max(1, x.values.shape[-1])
    for name, size, multiple in (("m", m, _MULTIPLE_OF_ROWS), ("n", n, _MULTIPLE_OF_ROWS), ("k", k, _MULTIPLE_OF_K)):
        if size == 0 or size % multiple:
            return f'{name}={size} must be a multiple of {multiple} for backend="cudnn"; use backend="xla" or pad'
    return None


def block_matmul(
    x: Blocked, w: Blocked, w_lo: Blocked | None, *, block: int, tile: Tile, out_dtype: Any, **options: Any
) -> jax.Array:
    """The product, see `api.block_matmul`; the scales of x and w are read as they are."""
    (n, k), leading = w.values.shape, x.values.shape[:-1]
    m = x.values.size // k
    out = jax.nn.scaled_matmul(
        x.values.reshape(1, m, k), w.values[None], x.scales.reshape(1, m, k // block), w.scales[None],
        preferred_element_type=out_dtype,
    )  # fmt: skip
    return out.reshape(*leading, n)
