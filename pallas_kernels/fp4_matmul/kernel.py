"""A product with an FP4 weight on Hopper for few rows of x: bound by the bytes of the weight, which are read once.

    out[split, n, m] = sum over a part of k of (code[n, k] * scale[n, k]) x[m, k]

The weight is the operand that `wgmma` takes from registers, because nothing else can be decoded without a trip through
shared memory: the tensor core computes the transposed product, 64 outputs n for every warpgroup and all of m. One
warpgroup copies codes, scales and x ahead; the others decode (`decode.py`) and multiply. The rows of x are read by
every block, so a block has as many warpgroups as fit, which share them. Where the tiles of n do not fill the chip,
blocks split k and their sums are added behind the kernel, in a fixed order.

On an H200, 8192 x 28672 with cold weights at m = 16, over BF16's product in the same run: 2.28 with scales converted by
arithmetic and a wait behind every step, 2.37 with one product in flight, 2.57 with codes placed by a multiplication
(the integer pipe was 60 % busy) and scales from a table, 2.72 with scales in 16-byte loads. What is left: 3.3
instructions a value, at 62 % of what the integer pipe could do.
"""

import functools
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fp4_matmul import decode

ROWS = 64
BLOCKS = 16


@dataclass(frozen=True)
class Config:
    """Sizes of the kernel.

    Attributes:
      warpgroups: that compute, each 64 outputs.
      stages: steps of k that are in flight.
      splits: parts of k.
    """

    warpgroups: int = 4
    stages: int = 4
    splits: int = 1


def call(
    config: Config,
    form: Literal["nvfp4", "mxfp4"],
    x: jax.Array,
    codes: jax.Array,
    scales: jax.Array,
    table: jax.Array | np.ndarray,
) -> jax.Array:
    """The sums, float32 `[splits, n, m]`, still to be multiplied by `decode.FACTOR` and `outer`.

    Args:
      config: sizes.
      form: the format.
      x: bfloat16 `[m, k]`, `decode.permuted`; m is a multiple of 8, k one of `splits * step_of(form)`.
      codes: uint8 `[n, k / 2]`; n is a multiple of 64 times the warpgroups.
      scales: their bytes, uint8 `[n, k / block]`.
      table: `decode.table(form)`.
    """
    (m, k), n = x.shape, codes.shape[0]
    tiles = n // (ROWS * config.warpgroups)
    return plgpu.kernel(
        functools.partial(_kernel, config, form, k // (step_of(form) * config.splits)),
        out_type=jax.ShapeDtypeStruct((config.splits, n, m), jnp.float32),
        grid=(tiles, config.splits),
        grid_names=("tile", "split"),
        num_threads=config.warpgroups + 1,
        thread_name="warpgroup",
        kernel_name=f"matmul_{form}",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(x, codes, scales, table)


def step_of(form: str) -> int:
    """How much of k a step takes: 16 blocks, whose scales are the 16 bytes of a row that are copied at least."""
    return BLOCKS * (16 if form == "nvfp4" else 32)


def _kernel(config: Config, form: Any, steps: int, *refs: Any) -> None:
    x_gmem, codes_gmem, scales_gmem, table_gmem, out_gmem = refs
    m, step, height = x_gmem.shape[0], step_of(form), ROWS * config.warpgroups
    first_row, first_step = lax.axis_index("tile") * height, lax.axis_index("split") * steps
    warpgroup = lax.axis_index("warpgroup")
    stages = min(config.stages, steps)
    swizzled = lambda size, width: (plgpu.TilingTransform((8, size)), plgpu.SwizzleTransform(width))
    rows = pl.ds(first_row, height)
    # (global memory, rows, how many columns a step takes)
    operands = ((codes_gmem, rows, step // 2), (scales_gmem, rows, BLOCKS), (x_gmem, slice(None), step))

    def scope(
        codes_smem: Any, scales_smem: Any, x_smem: Any, table_smem: Any, ready: Any, filled: Any, consumed: Any
    ) -> None:
        buffers = (codes_smem, scales_smem, x_smem)

        def fill() -> None:
            plgpu.copy_gmem_to_smem(table_gmem, table_smem, ready)

            @pl.loop(0, steps)
            def _steps(k: Any) -> None:
                slot = lax.rem(k, stages)

                @pl.when(k >= stages)
                def _wait() -> None:
                    plgpu.barrier_wait(consumed.at[slot])

                for (source, at, columns), buffer in zip(operands, buffers, strict=True):
                    block = source.at[at, pl.ds((first_step + k) * columns, columns)]
                    plgpu.copy_gmem_to_smem(block, buffer.at[slot], filled.at[slot])

        def consume() -> None:
            own = pl.ds(warpgroup * ROWS, ROWS)
            plgpu.barrier_wait(ready)

            def multiply(acc: Any) -> None:
                @pl.loop(0, steps)
                def _steps(k: Any) -> None:
                    slot = lax.rem(k, stages)
                    plgpu.barrier_wait(filled.at[slot])
                    codes = plgpu.load(codes_smem.at[slot, own], layout=plgpu.Layout.WGMMA_8BIT, optimized=False)
                    operand = decode.decode(codes, scales_smem.at[slot], table_smem, form, warpgroup * ROWS)
                    for chunk in range(step // decode.CHUNK):
                        columns = pl.ds(chunk * decode.CHUNK, decode.CHUNK)
                        plgpu.wgmma(acc, operand(chunk), x_smem.at[slot, :, columns].T)
                        # One product runs while the next operand is decoded; that before has read its registers.
                        plgpu.wgmma_wait(1)
                        if chunk == 0:

                            @pl.when(k > 0)
                            def _release() -> None:
                                plgpu.barrier_arrive(consumed.at[lax.rem(k - 1, stages)])

                plgpu.wgmma_wait(0)
                out_gmem[lax.axis_index("split"), pl.ds(first_row + warpgroup * ROWS, ROWS)] = acc[...]

            pl.run_scoped(multiply, plgpu.ACC((ROWS, m), jnp.float32))

        lax.cond(warpgroup == config.warpgroups, fill, consume)

    # No registers are handed from the copies to the products: five warpgroups have 96 each, which are enough.
    pl.run_scoped(
        scope,
        codes_smem=plgpu.SMEM((stages, height, step // 2), jnp.uint8, transforms=swizzled(128, 128)),
        scales_smem=plgpu.SMEM((stages, height, BLOCKS), jnp.uint8),
        x_smem=plgpu.SMEM((stages, m, step), jnp.bfloat16, transforms=swizzled(64, 128)),
        table_smem=plgpu.SMEM((256,), jnp.uint32),
        ready=plgpu.Barrier(),
        filled=plgpu.Barrier(num_arrivals=3, num_barriers=stages),
        consumed=plgpu.Barrier(num_arrivals=config.warpgroups, num_barriers=stages),
        collective_axes="warpgroup",
    )
