"""What a block of the FP4 kernel writes: sums of 64 outputs for each warpgroup, transposed through shared memory."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fp4_matmul.sizes import ROWS

# The widest swizzle.
CHUNK_BYTES = 128


def piece(m: int) -> int:
    """Rows of m that a warpgroup writes at a time: a quarter of them, in eights."""
    return next(rows for rows in (m // 4, 16, 8) if rows and rows % 8 == 0 and m % rows == 0)


def buffers(warpgroups: int, m: int, dtype: Any) -> Any:
    """A piece of the output for each warpgroup: some rows of m times 64 outputs.

    Where those are as wide as the swizzle no tiles are needed, so that a copy may end at any row of the output.
    """
    width = CHUNK_BYTES // jnp.dtype(dtype).itemsize
    tiles = () if width == ROWS else (plgpu.TilingTransform((8, width)),)
    return plgpu.SMEM((warpgroups, piece(m), ROWS), dtype, transforms=(*tiles, plgpu.SwizzleTransform(CHUNK_BYTES)))


def store(sums: jax.Array, out_smem: Any, out_gmem: Any) -> None:
    """Write 64 outputs of all rows, `sums` `[64, m]`, in pieces of m through one of `buffers`.

    Rows behind the last of the output are not written: copies leave out what lies beyond it.
    """
    out, count = sums.astype(out_gmem.dtype), out_smem.shape[0]
    out = plgpu.layout_cast(out, plgpu.Layout.WGMMA_TRANSPOSED)
    for first in range(0, sums.shape[1], count):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        out_smem.T[...] = out[:, first : first + count]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, out_gmem.at[pl.ds(first, count)])
    plgpu.wait_smem_to_gmem(0)
