"""The FP8 product on Hopper: one program for a single or a residual weight, one
accumulator for both halves.

A persistent grid with one cluster for every `cluster` multiprocessors walks the output
tiles in a snake, so that operands stay in the L2 cache. In each block one warpgroup
only copies: it fills `stages` buffers of x, W_hi and W_lo with the bulk copy engine,
while two compute warpgroups issue `wgmma` on full buffers:

    fast : acc += x W_hiᵀ + x W_loᵀ          in the tensor core's accumulator over all of k
    full : acc  = that over tile_k;  total += acc     in float32 registers (the promotion of DeepSeek-V3, 2024)

W_lo shares the scale of W_hi, so one accumulator serves both and a residual product is
one product over 2k: x is read once for both halves. The blocks of a cluster take
neighbouring rows and share W by multicast. The epilogue scales, adds a bias, rounds to
the output's dtype and stores through shared memory.

Scales of blocks multiply a sum where it is promoted, in chunks of its columns. A square
of W is a chunk with one scale, read from global memory a step ahead because the load
takes longer than the products of a step. Scales of vectors are loaded chunk by chunk,
so that registers hold few columns at a time. The steps (`steps.py`) decide which block
of k a step takes, and whether it takes all operands.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import device_kind
from pallas_kernels.hopper.plan import (
    COMPUTE_WARPGROUPS,
    EPILOGUE_ROW_BYTES,
    EPILOGUE_ROWS,
    Plan,
)
from pallas_kernels.hopper.steps import OutputTile, Ring, Steps
from pallas_kernels.specs import varying

_WAVE_ROWS = 64


def call(plan: Plan, out_dtype: Any, *operands: jax.Array) -> jax.Array:
    """Return the product of x `[m, k]`, weights `[n, k]`, scale `[1]` and perhaps bias
    `[n]`.

    Args:
      plan: everything for which the kernel is compiled.
      out_dtype: dtype of the result.
      operands: x, one or two halves of the weight, and the scale. With blocks of tile_k
        then the scales of x, float32 `[k / tile_k, m]`, and of the weight,
        `[k / tile_k, n / tile_k]` for squares and `[k / tile_k, n]` for vectors. The
        bias follows, and then the work lists of a plan that skips (`steps.Ring`).
    """
    (m, k), (n, _) = operands[0].shape, operands[1].shape
    if plan.config.pipeline == "ring" and not plan.promote:
        raise ValueError(
            'pipeline="ring" adds in registers, not with accumulation="fast"; use'
            ' "steady" or "drained"'
        )
    steps = Ring if plan.config.pipeline == "ring" else Steps
    # Not lax.platform_dependent: the interpreter calls back into Python, which it
    # cannot lower for a GPU.
    interpret = device_kind() == "cpu"
    if interpret:
        # Two clusters show every path of the persistent grid.
        plan = replace(plan, blocks=2)
    halves, accumulation = (
        "dual" if plan.halves == 2 else "single",
        "full" if plan.promote else "fast",
    )
    product = plgpu.kernel(
        functools.partial(_kernel, plan, steps(plan, k // plan.config.tile_k)),
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
        kernel_name=(
            f"matmul_fp8_{halves}_{accumulation}_{plan.scaling}{'_nonzero' if plan.skips else ''}"
        ),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
    )(*operands)
    return varying(product, *operands)


def _kernel(plan: Plan, steps: Any, x_gmem: Any, *refs: Any) -> None:
    """Compute the output tiles of one block: the copies and products of each."""
    config, halves = plan.config, plan.halves
    w_gmem, scale_gmem, out_gmem = refs[:halves], refs[halves], refs[-1]
    block_scales = refs[halves + 1 : halves + 3] if plan.scaling != "tensor" else ()
    own = refs[-3:-1] if plan.skips else ()
    bias_gmem = refs[-2] if plan.has_bias else None
    (m, _), n = x_gmem.shape, out_gmem.shape[1]
    tile_m, tile_n, cluster = config.tile_m, config.tile_n, config.cluster
    own_rows = tile_m // COMPUTE_WARPGROUPS
    m_tiles, n_tiles = m // (tile_m * cluster), n // tile_n
    # The scale of a square is one number a step, so it is read where it is used.
    copied_scales = block_scales[: 1 if plan.scaling == "square" else 2]

    @functools.partial(
        pl.run_scoped,
        buffers=steps.allocations([x_gmem, *w_gmem, *copied_scales]),
        out_smem=_epilogue_buffers(config.store_buffers, out_gmem.dtype),
        collective_axes="warpgroup",
    )
    def _scope(buffers: Any, out_smem: Any) -> None:
        warpgroup, member = lax.axis_index("warpgroup"), lax.axis_index("member")

        @plgpu.nd_loop((m_tiles * n_tiles,), collective_axes="block")
        def _tiles(loop: Any) -> None:
            # Neighbouring blocks take neighbouring tiles, so that they read the same
            # panels of x and W from L2.
            mi, ni = plgpu.planar_snake(
                loop.index[0],
                (m_tiles, n_tiles),
                "mn".index(config.inner),
                config.snake,
            )
            mi = mi * cluster + member
            scale = scale_gmem[0]

            def store(parts: list[list[jax.Array]]) -> None:
                corner = (mi * tile_m + warpgroup * own_rows, ni * tile_n)
                scaled = [[part * scale for part in line] for line in parts]
                _store(scaled, bias_gmem, out_smem.at[warpgroup], out_gmem, corner)

            if plan.promote:
                columns = _chunk_columns(plan, out_gmem.dtype)
                factors = Factors(
                    block_scales,
                    plan.scaling,
                    columns,
                    ni * (tile_n // columns),
                    steps.count,
                )
                add, compute = promoting(
                    store, factors, warpgroup * own_rows, own_rows, tile_n
                )
            else:
                add, compute = _accumulating(
                    store, warpgroup * own_rows, own_rows, tile_n
                )
            rows, columns = pl.ds(mi * tile_m, tile_m), pl.ds(ni * tile_n, tile_n)
            operands = [x_gmem.at[rows, :], *(half.at[columns, :] for half in w_gmem)]
            operands += [
                scales.at[:, at]
                for scales, at in zip(copied_scales, (rows, columns), strict=False)
            ]
            steps.run(OutputTile(loop, ni, operands, buffers, add, compute), own)

    plgpu.wait_smem_to_gmem(0)


def _chunk_columns(plan: Plan, out_dtype: Any) -> int:
    """Return the columns of a sum that are scaled at a time: a square, or a chunk no
    narrower than a store.
    """
    if plan.scaling == "square":
        return plan.config.tile_k
    if plan.scaling == "tensor":
        return plan.config.tile_n
    return max(
        plan.config.tile_n // plan.config.chunks,
        EPILOGUE_ROW_BYTES // jnp.dtype(out_dtype).itemsize,
    )


@dataclass(frozen=True)
class Factors:
    """Factors of promoted sums: scales of x's rows times scales of W, in chunks of
    columns.

    `scales` are references to global memory, x's first; none with `scaling` "tensor".
    `first` is the index of the output tile's first chunk along n.
    """

    scales: Sequence[Any]
    scaling: str
    columns: int
    first: Any
    steps: Any

    def of_squares(self, step: Any, chunks: int) -> tuple[Any, ...]:
        """Return W's scales of one step if they are numbers; a step beyond the last one
        gets the scales of the last.
        """
        if self.scaling != "square":
            return ()
        step = jnp.minimum(step, self.steps - 1)
        return tuple(
            self.scales[1][step, self.first + chunk] for chunk in range(chunks)
        )

    def find(
        self, copied: Any, of_squares: Sequence[Any], rows: Any, chunk: int
    ) -> jax.Array | None:
        """Return the factor of these rows and one chunk, or None; `copied` are scales
        in shared memory.
        """
        if self.scaling == "tensor":
            return None
        shape = (rows.size, self.columns)
        of_x = plgpu.load(copied[0].at[0, rows], layout=plgpu.Layout.WGMMA.reduce(1))
        if of_squares:
            return lax.broadcast_in_dim(of_x * of_squares[chunk], shape, (0,))
        columns = pl.ds(chunk * self.columns, self.columns)
        of_w = plgpu.load(copied[1].at[0, columns], layout=plgpu.Layout.WGMMA.reduce(0))
        return lax.broadcast_in_dim(of_x, shape, (0,)) * lax.broadcast_in_dim(
            of_w, shape, (1,)
        )


def multiply(acc: Any, x_smem: Any, w_smem: Sequence[Any], rows: Any) -> None:
    """Add the products of some rows of x with all halves of W, asynchronously."""
    # W is [n, k] in memory and wgmma reads both operands along k: the transpose only
    # changes a descriptor.
    for half in w_smem:
        plgpu.wgmma(acc, x_smem.at[rows], half.T)


def _accumulating(
    store: Any, first_row: Any, height: int, width: int
) -> tuple[Any, Any]:
    """Return (add, compute) of fast accumulation: one accumulator over all of k."""

    def add(
        step: Any, x_smem: Any, w_smem: Any, scales_smem: Any, release: Any, acc: Any
    ) -> Any:
        multiply(acc, x_smem, w_smem, pl.ds(first_row, height))
        # The buffers are given back when this returns, and wgmma is asynchronous, so
        # wait until it has read them.
        plgpu.wgmma_wait(0)
        return acc

    def compute(run: Any) -> None:
        def with_accumulator(acc: Any) -> None:
            run(acc)
            store([[acc[...]]])

        pl.run_scoped(with_accumulator, plgpu.ACC((height, width), jnp.float32))

    return add, compute


def promoting(
    store: Any,
    factors: Factors,
    first_row: Any,
    height: int,
    width: int,
    multiply: Any = multiply,
) -> tuple[Any, Any]:
    """Return (add, compute) of full accumulation: an accumulator for every step, scaled
    and added to float32 totals.

    A warpgroup works in waves of 64 rows, because the totals leave no registers for a
    larger accumulator.
    """
    waves, chunks = height // _WAVE_ROWS, width // factors.columns

    def add(
        step: Any, x_smem: Any, w_smem: Any, scales_smem: Any, release: Any, carry: Any
    ) -> Any:
        totals, of_squares = carry
        following = factors.of_squares(step + 1, chunks)
        new: list[jax.Array] = []
        for wave in range(waves):
            rows = pl.ds(first_row + wave * _WAVE_ROWS, _WAVE_ROWS)

            def partial_sum(acc: Any, rows: Any = rows) -> jax.Array:
                multiply(acc, x_smem, w_smem, rows)
                return acc[...]

            find = functools.partial(factors.find, scales_smem, of_squares, rows)
            # Scales of the first chunk are loaded before the products, which hide the
            # latency. The others are loaded afterwards, or they would occupy registers
            # all the time.
            found = [find(0)]
            part = pl.run_scoped(
                partial_sum, plgpu.ACC((_WAVE_ROWS, width), jnp.float32)
            )
            found += [find(chunk) for chunk in range(1, chunks)]
            if wave == waves - 1:
                # Free the buffers before the additions, which do not read them.
                release()
            for chunk, factor in enumerate(found):
                piece = part[:, chunk * factors.columns : (chunk + 1) * factors.columns]
                new.append(
                    totals[len(new)] + (piece if factor is None else piece * factor)
                )
        return tuple(new), following

    def compute(run: Any) -> None:
        # In the accumulator's layout, or every addition would move values between
        # threads.
        zero = plgpu.layout_cast(
            jnp.zeros((_WAVE_ROWS, factors.columns), jnp.float32), plgpu.Layout.WGMMA
        )
        totals, _ = run(((zero,) * waves * chunks, factors.of_squares(0, chunks)))
        store([list(totals[wave * chunks :][:chunks]) for wave in range(waves)])

    return add, compute


def _epilogue_buffers(count: int, dtype: Any) -> Any:
    """Return buffers for pieces of the output of each warpgroup: one is filled while
    others are copied out.
    """
    columns = EPILOGUE_ROW_BYTES // jnp.dtype(dtype).itemsize
    transforms = (
        plgpu.TilingTransform((8, columns)),
        plgpu.SwizzleTransform(EPILOGUE_ROW_BYTES),
    )
    return plgpu.SMEM(
        (COMPUTE_WARPGROUPS, count, EPILOGUE_ROWS, columns),
        dtype,
        transforms=transforms,
    )


def _store(
    parts: list[list[jax.Array]],
    bias_gmem: Any,
    out_smem: Any,
    out_gmem: Any,
    corner: tuple[Any, Any],
) -> None:
    """Write lines of `parts`, which have one shape, to `out_gmem` from `corner` on,
    through the buffers in turn.

    The pieces of a tile are a multiple of the buffers, so the turn continues from tile
    to tile. A buffer is free when all copies but the newest `buffers - 1` have been
    read.
    """
    buffers, height, width = out_smem.shape
    (rows, columns), count = parts[0][0].shape, 0
    for down, line in enumerate(parts):
        for across, part in enumerate(line):
            for i, j in itertools.product(
                range(0, rows, height), range(0, columns, width)
            ):
                first = corner[0] + down * rows + i
                at = pl.ds(corner[1] + across * columns + j, width)
                piece = part[i : i + height, j : j + width]
                if bias_gmem is not None:
                    # "Optimized" loads are made for swizzled shared memory and refuse
                    # global memory.
                    bias = plgpu.load(
                        bias_gmem.at[at],
                        layout=plgpu.Layout.WGMMA.reduce(0),
                        optimized=False,
                    )
                    piece = piece + lax.broadcast_in_dim(bias, (height, width), (1,))
                plgpu.wait_smem_to_gmem(buffers - 1, wait_read_only=True)
                buffer = out_smem.at[count % buffers]
                buffer[...] = piece.astype(out_gmem.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(buffer, out_gmem.at[pl.ds(first, height), at])
                count += 1
