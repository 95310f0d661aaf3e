"""A product with an FP4 weight on Hopper: for few rows of x bound by the bytes of the weight, which are read once.

    sums[n, m] = sum_k (code[n, k] * scale[n, k]) x[m, k]
    out[m, n]  = sums[n, m] * factor[m]                            where k is not split

The weight is the operand that `wgmma` takes from registers, because nothing else can be decoded without a trip through
shared memory: the tensor core computes the transposed product, 64 outputs n for every warpgroup and all of m. One
warpgroup copies codes, scales and x ahead; the others decode (bfloat16: `decode.py`, E4M3: `decode_fp8.py`, as x is)
and multiply. The rows of x are read by every block, so a block has as many warpgroups as fit, which share them. Where
tiles of outputs are too few to fill the chip, blocks have parts of k, whose sums XLA adds. Where they leave some
multiprocessors free, blocks there do the last steps of others' tiles and leave float32 sums in global memory, and the
block that has the tile waits for a semaphore and adds them: its own steps first, so that sums have one order. Where
rows are many, blocks have bands of them: a weight that is decoded anew for each costs less than one that is written and
read.

A row of x has the same bits whatever is multiplied beside it, as long as sums are cut alike: `splits` and `helped` are
functions of k, n, the format and the warpgroups. NVFP4 has the same warpgroups for 1 to 64 rows.

On an H200, 8192 x 28672 with cold weights at m = 16, over BF16's product in the same run, the kernel alone: 2.28 with
scales converted by arithmetic and a wait behind every step, 2.37 with one product in flight, 2.57 with codes placed by
a multiplication (the integer pipe was 60 % busy) and scales from a table, 2.72 with scales in 16-byte loads, E4M3 3.1.
112 of 132 multiprocessors had a tile, and issued in 72 % of their cycles (E4M3: 57 %, at 70 % of the memory's rate).
With the permutation of x BF16 has 2.59. Equal shares of all steps on all multiprocessors ("stream-K", Osama et al.
2023), whose parts a further kernel added, gained 3 % there at first, lost 12 % in E4M3, and are gone. So are clusters,
whose blocks shared a copy of x: with 256 rows they gained nothing. Helpers are younger than these numbers.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fp4_matmul import owned
from pallas_kernels.fp4_matmul.block import CHUNK_BYTES, ROWS, Block, Config


def call(
    config: Config,
    form: owned.Form,
    x: jax.Array,
    codes: jax.Array,
    scales: jax.Array,
    table: jax.Array | np.ndarray,
    factors: jax.Array | None = None,
    out: jax.ShapeDtypeStruct | None = None,
) -> jax.Array:
    """The product, `out`, or where k is split sums to be added, float32 `[splits, n, m]`.

    Those are still to be multiplied by what the table leaves, `FACTOR` of the module that made it, and by the factors.
    E4M3 is added in the tensor core's own accumulator, which keeps about 14 bits: `accumulation="fast"` of `matmul`.

    Args:
      config: sizes; its splits divide the steps of k.
      form: the format; "nvfp4" where x is E4M3.
      x: bfloat16 or float8_e4m3fn `[m, k]`, `permuted` by the module of its dtype; the rows of a block are a multiple
        of 8, at most 256, m is one of them, k one of `owned.step_of(form)`.
      codes: uint8 `[n, k / 2]`; n is a multiple of 64 times the warpgroups.
      scales: their bytes, uint8 `[n, k / block]`.
      table: that of the module.
      factors: float32 `[m]`, or `[1]`, which is multiplied by what the table leaves; None where k is split.
      out: bfloat16 or float32 `[rows, n]`, of the first rows of x, behind which is padding; None where k is split.
    """
    (m, k), n = x.shape, codes.shape[0]
    tiles, bands = n // config.height, m // (config.rows or m)
    assert k // owned.step_of(form) % config.splits == 0, "blocks have equal parts of k"
    assert (config.helpers > 0) == (config.helped > 0), "helpers do steps, and nobody else leaves sums"
    assert not config.helpers or config.splits == bands == 1, "a tile that is helped has a block of its own"
    assert config.helpers <= tiles, "a helper has a tile to help"
    assert config.helped < k // owned.step_of(form), "the block that has a tile does steps, too"
    assert (factors is None) == (out is None) == (config.splits > 1), "parts of k are added before they are scaled"
    written = jax.ShapeDtypeStruct((config.splits, n, m), jnp.float32)
    if out is not None:
        # Copies of numbers of four bytes move tiles of 8 rows, of which only the first may be cut.
        exactly = out.shape[0] <= 8 or out.dtype.itemsize == 2
        written = out if exactly else jax.ShapeDtypeStruct((m, n), out.dtype)
    left = [jax.ShapeDtypeStruct((n, m), jnp.float32)] if config.helpers else []
    product, *_ = plgpu.kernel(
        functools.partial(_kernel, config, form),
        out_type=[written, *left],
        # Neighbouring blocks multiply the same part of the weight, which then comes from memory once.
        grid=(config.helpers + tiles * config.splits * bands,),
        grid_names=("block",),
        num_threads=config.warpgroups + 1,
        thread_name="warpgroup",
        kernel_name=f"matmul_{form}_{x.dtype}",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(x, codes, scales, table, *([] if factors is None else [factors]))
    return product if out is None else product[: out.shape[0]]


def _kernel(config: Config, form: Any, *refs: Any) -> None:
    left = None
    if config.helpers:
        refs, sums = refs[:-1], refs[-1]
        tiles = sums.shape[0] // config.height
        left = sums, pl.get_global(plgpu.SemaphoreType.REGULAR((tiles, config.warpgroups)))
    x_gmem, _, _, table_gmem, *factors_gmem, out_gmem = refs
    m, step = config.rows or x_gmem.shape[0], owned.step_of(form)
    steps = x_gmem.shape[1] // step // config.splits
    # With a single buffer its copy would wait for a release that comes behind it.
    stages = max(2, min(config.stages, steps))
    width = CHUNK_BYTES // x_gmem.dtype.itemsize
    swizzled = lambda size: (plgpu.TilingTransform((8, size)), plgpu.SwizzleTransform(CHUNK_BYTES))

    def scope(**smem: Any) -> None:
        block = Block(config, form, steps, stages, refs, smem, left)
        lax.cond(lax.axis_index("warpgroup") == config.warpgroups, block.fill, block.consume)

    pl.run_scoped(
        scope,
        codes=plgpu.SMEM((stages, config.height, step // 2), jnp.uint8, transforms=swizzled(128)),
        scales=plgpu.SMEM((stages, config.height, owned.BLOCKS), jnp.uint8),
        x=plgpu.SMEM((stages, m, step), x_gmem.dtype, transforms=swizzled(width)),
        table=plgpu.SMEM(table_gmem.shape, table_gmem.dtype),
        out=_out_buffers(config, m, out_gmem.dtype) if factors_gmem else None,
        ready=plgpu.Barrier(),
        filled=plgpu.Barrier(num_arrivals=3, num_barriers=stages),
        consumed=plgpu.Barrier(num_arrivals=config.warpgroups, num_barriers=stages),
        collective_axes="warpgroup",
    )


def _out_buffers(config: Config, m: int, dtype: Any) -> Any:
    """A piece of the output for each warpgroup: some rows of m times 64 outputs.

    Where those are as wide as the swizzle no tiles are needed, so that a copy may end at any row of the output.
    """
    width = CHUNK_BYTES // jnp.dtype(dtype).itemsize
    tiles = () if width == ROWS else (plgpu.TilingTransform((8, width)),)
    return plgpu.SMEM(
        (config.warpgroups, config.piece(m), ROWS), dtype, transforms=(*tiles, plgpu.SwizzleTransform(CHUNK_BYTES))
    )
