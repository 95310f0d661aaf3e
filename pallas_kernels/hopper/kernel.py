"""The FP8 product on Hopper: one program for a single or a residual weight.

A persistent grid with one cluster for every `cluster` multiprocessors walks the output
tiles in a snake, so that operands stay in the L2 cache. In each block one warpgroup
only copies: it fills `stages` buffers of x, W_hi and W_lo with the bulk copy engine,
while two compute warpgroups issue `wgmma` on full buffers and add the products up
(`sums.py`).

W_lo shares the scale of W_hi, so one accumulator serves both and a residual product is
one product over 2k: x is read once for both halves. The blocks of a cluster take
neighbouring rows and share W by multicast. The epilogue scales, adds a bias, rounds to
the output's dtype and stores through shared memory. The steps (`steps.py`) decide which
block of k a step takes, and whether it takes all operands.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.dispatch import device_kind
from pallas_kernels.hopper.plan import (
    COMPUTE_WARPGROUPS,
    EPILOGUE_ROW_BYTES,
    EPILOGUE_ROWS,
    Index,
    Plan,
    Ref,
)
from pallas_kernels.hopper.steps import OutputTile, Ring, Steps
from pallas_kernels.hopper.sums import (
    Accumulated,
    Factors,
    Parts,
    Promoted,
    Store,
    load_global,
    pieces_of,
)
from pallas_kernels.specs import varying


def call(plan: Plan, out_dtype: DTypeLike, *operands: Array) -> Array:
    """Return the product of x `[m, k]`, weights `[n, k]`, a scale and perhaps a bias.

    Args:
      plan: everything for which the kernel is compiled.
      out_dtype: dtype of the result.
      operands: x, one or two halves of the weight, and the scale `[1]`. With blocks of
        tile_k then the scales of x, float32 `[k / tile_k, m]`, and of the weight,
        `[k / tile_k, n / tile_k]` for squares and `[k / tile_k, n]` for vectors. The
        bias `[n]` follows, and then the work lists of a plan that skips (`steps.Ring`).
    """
    m, k = operands[0].shape
    n = operands[1].shape[0]
    if plan.config.pipeline == "ring" and not plan.promote:
        raise ValueError(
            'pipeline="ring" adds in registers, not with accumulation="fast"; use'
            ' "steady" or "drained"'
        )
    make = Ring if plan.config.pipeline == "ring" else Steps
    steps = make(plan, k // plan.config.tile_k)
    # Not lax.platform_dependent: the interpreter calls back into Python, which it
    # cannot lower for a GPU.
    interpret = device_kind() == "cpu"
    if interpret:
        # Two clusters show every path of the persistent grid.
        plan = replace(plan, blocks=2)
    halves = "dual" if plan.halves == 2 else "single"
    accumulation = "full" if plan.promote else "fast"
    skips = "_nonzero" if plan.skips else ""
    product = plgpu.kernel(
        partial(_kernel, plan, steps),
        out_type=jax.ShapeDtypeStruct((m, n), out_dtype),
        # As many clusters as the chip holds at once. Each walks several output tiles,
        # so the copies of a tile can start before the products of the previous tile
        # end.
        grid=(plan.blocks,),
        grid_names=("block",),
        cluster=(plan.config.cluster,),
        cluster_names=("member",),
        # One more warpgroup of 128 threads, which only copies (warp specialization, as
        # in CUTLASS's kernels).
        num_threads=COMPUTE_WARPGROUPS + 1,
        thread_name="warpgroup",
        interpret=plgpu.InterpretGPUParams() if interpret else None,
        kernel_name=f"matmul_fp8_{halves}_{accumulation}_{plan.scaling}{skips}",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
    )(*operands)
    return varying(product, *operands)


def _kernel(plan: Plan, steps: Steps, *refs: Ref) -> None:
    """Compute the output tiles of one block: the copies and products of each."""
    x, *rest, out = refs
    if plan.skips:
        *rest, count, order = rest
        lists = [count, order]
    else:
        lists = []
    bias = rest.pop() if plan.has_bias else None
    w = rest[: plan.halves]
    scale, *block_scales = rest[plan.halves :]
    product = _Product(plan, steps, x, w, scale, block_scales, bias, lists, out)
    pl.run_scoped(
        product.walk,
        buffers=steps.allocations([x, *w, *product.copied_scales]),
        pieces=_epilogue_buffers(plan.config.store_buffers, out.dtype),
        collective_axes="warpgroup",
    )
    plgpu.wait_smem_to_gmem(0)


@dataclass(frozen=True)
class _Product:
    """The kernel of a block, with references to its arrays in global memory.

    Attributes:
      plan: plan of the kernel.
      steps: steps of an output tile.
      x, w: operands, and `scale` of their product.
      block_scales: scales of blocks of x and of w, or none.
      bias: the bias, or None.
      lists: work lists of a plan that skips, or none.
      out: the result.
    """

    plan: Plan
    steps: Steps
    x: Ref
    w: Sequence[Ref]
    scale: Ref
    block_scales: Sequence[Ref]
    bias: Ref | None
    lists: Sequence[Ref]
    out: Ref

    @property
    def copied_scales(self) -> Sequence[Ref]:
        """Scales that are copied to shared memory with the operands."""
        # The scale of a square is one number a step, so it is read where it is used.
        return self.block_scales[: 1 if self.plan.scaling == "square" else 2]

    def walk(self, buffers: Any, pieces: Ref) -> None:
        """Compute one output tile after the other."""
        config = self.plan.config
        warpgroup = lax.axis_index("warpgroup")
        member = lax.axis_index("member")
        m_tiles = self.out.shape[0] // (config.tile_m * config.cluster)
        n_tiles = self.out.shape[1] // config.tile_n

        @plgpu.nd_loop((m_tiles * n_tiles,), collective_axes="block")
        def _tiles(loop: plgpu.NDLoopInfo) -> None:
            # Neighbouring blocks take neighbouring tiles, so that they read the same
            # panels of x and W from L2.
            row, column = plgpu.planar_snake(
                loop.index[0],
                (m_tiles, n_tiles),
                "mn".index(config.inner),
                config.snake,
            )
            row = row * config.cluster + member
            epilogue = partial(
                self._store, row, column, warpgroup, self.scale[0], pieces
            )
            total = self._sum(epilogue, warpgroup, column)
            operands = self._operands(row, column)
            tile = OutputTile(loop, column, operands, buffers, total)
            self.steps.run(tile, self.lists)

    def _operands(self, row: Index, column: Index) -> list[Ref]:
        """Return the parts of the operands and of the copied scales for a tile."""
        config = self.plan.config
        rows = pl.ds(row * config.tile_m, config.tile_m)
        columns = pl.ds(column * config.tile_n, config.tile_n)
        parts = [self.x.at[rows, :], *[half.at[columns, :] for half in self.w]]
        for scales, lines in zip(self.copied_scales, (rows, columns), strict=False):
            parts.append(scales.at[:, lines])
        return parts

    def _sum(
        self,
        store: Store,
        warpgroup: Index,
        column: Index,
    ) -> Accumulated | Promoted:
        """Return a warpgroup's sum of a tile in this column of tiles."""
        config = self.plan.config
        factors = self._factors(column) if self.plan.promote else None
        own_rows = config.tile_m // COMPUTE_WARPGROUPS
        rows = pl.ds(warpgroup * own_rows, own_rows)
        if factors is None:
            return Accumulated(store, rows, config.tile_n)
        return Promoted(store, rows, config.tile_n, factors)

    def _factors(self, column: Index) -> Factors:
        """Return the factors of the tiles in this column of tiles."""
        plan = self.plan
        tile_n = plan.config.tile_n
        if plan.scaling == "square":
            chunk = plan.config.tile_k
        elif plan.scaling == "tensor":
            chunk = tile_n
        else:
            # No narrower than a store
            piece = EPILOGUE_ROW_BYTES // self.out.dtype.itemsize
            chunk = max(tile_n // plan.config.chunks, piece)
        first = column * (tile_n // chunk)
        return Factors(self.block_scales, plan.scaling, chunk, first, self.steps.count)

    def _store(
        self,
        row: Index,
        column: Index,
        warpgroup: Index,
        scale: Array,
        buffers: Ref,
        parts: Parts,
    ) -> None:
        """Scale a sum, add the bias, and write it through the buffers in turn.

        The pieces of a tile are a multiple of the buffers, so the turn continues from
        tile to tile. A buffer is free when all copies but the newest `buffers - 1` have
        been read.
        """
        config = self.plan.config
        own = buffers.at[warpgroup]
        count, height, width = own.shape
        top = row * config.tile_m + warpgroup * (config.tile_m // COMPUTE_WARPGROUPS)
        left = column * config.tile_n
        scaled = []
        for line in parts:
            scaled.append([part * scale for part in line])
        for turn, (i, j, values) in enumerate(pieces_of(scaled, height, width)):
            rows = pl.ds(top + i, height)
            columns = pl.ds(left + j, width)
            if self.bias is not None:
                bias = load_global(self.bias.at[columns], 0)
                values += lax.broadcast_in_dim(bias, (height, width), (1,))
            plgpu.wait_smem_to_gmem(count - 1, wait_read_only=True)
            buffer = own.at[turn % count]
            buffer[...] = values.astype(self.out.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(buffer, self.out.at[rows, columns])


def _epilogue_buffers(count: int, dtype: DTypeLike) -> Ref:
    """Return buffers for pieces of the output of each warpgroup.

    One is filled while others are copied out.
    """
    columns = EPILOGUE_ROW_BYTES // jnp.dtype(dtype).itemsize
    return plgpu.SMEM(
        (COMPUTE_WARPGROUPS, count, EPILOGUE_ROWS, columns),
        dtype,
        transforms=(
            plgpu.TilingTransform((8, columns)),
            plgpu.SwizzleTransform(EPILOGUE_ROW_BYTES),
        ),
    )
