"""Grouped products on Hopper: one persistent kernel for rows of groups and for sums
within groups.

A block walks output tiles. One warpgroup copies steps of tile_k into a ring of `stages`
buffers, which runs on from one output tile to the next, and two warpgroups multiply, as
in `hopper/kernel.py`. Two small XLA operations before the kernel say where groups
begin, because sizes are known only on the device, and which group a row tile belongs
to. Sums within a group begin at a multiple of tile_k: columns of other groups are
zeroed in shared memory, in the first and the last step alone. A block reads these
numbers for its next output tile while it computes one.

Row tiles begin at any row, so the last tile of a group may end with it and overlap the
tile before, which writes the same bits. Only groups smaller than a tile have rows that
must not be written. Shared memory is [rows][128 bytes], swizzled by its address. Copies
see it in tiles of one row, which may begin anywhere, and `wgmma` in tiles of eight.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.dispatch import device_kind
from pallas_kernels.explicit import one_at_a_time
from pallas_kernels.grouped_matmul.tiles import Index, Lists, Plan, Ref, Tile, walk
from pallas_kernels.hopper.kernel import Factors, multiply, promoting
from pallas_kernels.hopper.plan import (
    COMPUTE_WARPGROUPS,
    EPILOGUE_ROW_BYTES,
    EPILOGUE_ROWS,
    Config,
)
from pallas_kernels.specs import varying

_MEMORY_REGISTERS, _COMPUTE_REGISTERS = 40, 232


def call(plan: Plan, out: jax.ShapeDtypeStruct, *operands: jax.Array) -> jax.Array:
    """Return the product of x and w by the lists of `mosaic.py`.

    Args:
      plan: everything for which the kernel is compiled.
      out: `[m, n]` for rows, `[e, k, n]` within groups.
      operands: x `[m, k]`, one or two halves of w `[e, n, k]`, or x `[k, m]` and g
        `[n, m]`; the arrays of `Lists`; the scales `[1]` and `[e]` or `[1]`, or those
        of rows and of columns `[e, n]`, or those of blocks `[k / tile_k, m]` and
        `[e, k / tile_k, n]` (squares: n / tile_k), long enough for whole tiles.
    """
    interpret = device_kind() == "cpu"
    accumulation = "full" if plan.promote else "fast"
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan, interpret),
        out_type=out,
        # two blocks show every path of the persistent grid
        grid=(2 if interpret else plan.blocks,),
        grid_names=("block",),
        num_threads=COMPUTE_WARPGROUPS + 1,
        thread_name="warpgroup",
        interpret=plgpu.InterpretGPUParams() if interpret else None,
        kernel_name=f"grouped_matmul_{plan.kind}_{operands[0].dtype}_{accumulation}_{plan.halves}_{plan.scales}",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
    )
    return varying(one_at_a_time(kernel)(*operands), *operands)


def _kernel(plan: Plan, interpret: bool, *refs: Ref) -> None:
    """Walk the output tiles of one block, in the warpgroup that copies and in those
    that compute.
    """
    config, operands, out = plan.config, refs[: 1 + plan.halves], refs[-1]
    rest = refs[1 + plan.halves : -1]
    lists, scales = (
        (Lists(rest[0], rest[1], rest[2:6]), rest[6:])
        if plan.kind == "rows"
        else (Lists(rest[0]), rest[1:])
    )
    rings = [
        _ring(config, operand, rows, interpret)
        for operand, rows in zip(operands, _heights(plan), strict=True)
    ]
    barrier = functools.partial(plgpu.Barrier, num_barriers=config.stages)

    @functools.partial(
        pl.run_scoped,
        buffers=rings,
        store=_views(
            (COMPUTE_WARPGROUPS, config.store_buffers, *_piece(out.dtype)),
            out.dtype,
            interpret,
        ),
        filled=barrier(num_arrivals=len(operands)),
        consumed=barrier(num_arrivals=COMPUTE_WARPGROUPS),
        collective_axes="warpgroup",
    )
    def _scope(buffers: Ref, store: Ref, filled: Ref, consumed: Ref) -> None:
        # (as copies see it, as registers and wgmma see it)
        views = [
            (both, both) if interpret else tuple(both) for both in (*buffers, store)
        ]
        copied, read = zip(*views, strict=True)
        warpgroup = lax.axis_index("warpgroup")

        read_tiles = functools.partial(walk, plan, operands, out, lists, scales)

        def fill() -> None:
            plgpu.set_max_registers(_MEMORY_REGISTERS, action="decrease")
            read_tiles(
                functools.partial(_fill, plan, operands, copied[:-1], filled, consumed)
            )

        def compute() -> None:
            plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
            pieces = copied[-1].at[warpgroup], read[-1].at[warpgroup]

            def visit(tile: Tile, before: Index) -> None:
                first_row = warpgroup * (config.tile_m // COMPUTE_WARPGROUPS)
                finish = functools.partial(
                    _store, plan, tile, first_row, scales, pieces, out
                )
                _consume(
                    plan,
                    tile,
                    before,
                    first_row,
                    read[:-1],
                    scales,
                    filled,
                    consumed,
                    finish,
                )

            read_tiles(visit)
            plgpu.wait_smem_to_gmem(0)

        lax.cond(warpgroup == COMPUTE_WARPGROUPS, fill, compute)


def _heights(plan: Plan) -> tuple[int, ...]:
    return (plan.config.tile_m, *[plan.config.tile_n] * plan.halves)


def _ring(config: Config, operand: Ref, rows: int, interpret: bool) -> Ref:
    return _views((config.stages, rows, config.tile_k), operand.dtype, interpret)


def _piece(dtype: DTypeLike) -> tuple[int, int]:
    return EPILOGUE_ROWS, EPILOGUE_ROW_BYTES // jnp.dtype(dtype).itemsize


def _views(shape: tuple[int, ...], dtype: DTypeLike, interpret: bool) -> Ref:
    """Return one allocation in two views: tiles of one row, which copies may begin at
    any row, and tiles of eight.

    Rows have the width of the swizzle, so both are the same bytes. The interpreter has
    no tiles, and its unions no common bytes.
    """
    width = shape[-1]
    swizzle = plgpu.SwizzleTransform(width * jnp.dtype(dtype).itemsize)
    views = [
        plgpu.SMEM(
            shape, dtype, transforms=(plgpu.TilingTransform((rows, width)), swizzle)
        )
        for rows in (1, 8)
    ]
    return views[1] if interpret else plgpu.RefUnion(*views)


def _fill(
    plan: Plan,
    operands: Sequence[Ref],
    buffers: Ref,
    filled: Ref,
    consumed: Ref,
    tile: Tile,
    before: Index,
) -> None:
    """Copy the steps of one output tile."""
    config, x, ws = plan.config, operands[0], operands[1:]
    rows = pl.ds(tile.row, config.tile_m), pl.ds(tile.column, config.tile_n)

    @pl.loop(0, tile.steps)
    def _steps(step: Index) -> None:
        slot = lax.rem(before + step, config.stages)

        @pl.when(before + step >= config.stages)
        def _wait() -> None:
            plgpu.barrier_wait(consumed.at[slot])

        first = (
            pl.multiple_of(tile.first, config.tile_k) if plan.kind == "within" else 0
        )
        k = pl.ds(first + step * config.tile_k, config.tile_k)
        of_w = [
            w.at[tile.group, rows[1], k] if plan.kind == "rows" else w.at[rows[1], k]
            for w in ws
        ]
        for block, buffer in zip((x.at[rows[0], k], *of_w), buffers, strict=True):
            plgpu.copy_gmem_to_smem(block, buffer.at[slot], filled.at[slot])


def _consume(
    plan: Plan,
    tile: Tile,
    before: Index,
    first_row: Index,
    buffers: Ref,
    scales: Sequence[Ref],
    filled: Ref,
    consumed: Ref,
    finish: Callable[[list[list[jax.Array]]], None],
) -> None:
    """Multiply the steps of one output tile, and give `finish` the sums as lines of
    parts.
    """
    config = plan.config
    height = config.tile_m // COMPUTE_WARPGROUPS
    rows = pl.ds(first_row, height)

    def take(step: Index) -> tuple[Ref, Sequence[Ref], Callable[[], None]]:
        slot = lax.rem(before + step, config.stages)
        plgpu.barrier_wait(filled.at[slot])
        x, *ws = (buffer.at[slot] for buffer in buffers)
        if plan.kind == "within":
            _mask(tile, step, x, first_row, height)
        return x, ws, lambda: plgpu.barrier_arrive(consumed.at[slot])

    if plan.promote:

        def add(count: int, step: Index, carry: Ref) -> Ref:
            xs, ws, releases = zip(*[take(step + i) for i in range(count)], strict=True)
            block = lax.div(tile.first, config.tile_k) + step
            return adding(
                step, xs, ws, block, lambda: [release() for release in releases], carry
            )

        def add_all(carry: Ref) -> Ref:
            pairs = lax.div(tile.steps, 2) if plan.in_pairs else 0
            carry = lax.fori_loop(
                0, pairs, lambda i, carry: add(2, 2 * i, carry), carry
            )
            return lax.fori_loop(
                2 * pairs, tile.steps, functools.partial(add, 1), carry
            )

        factors: Factors = Factors((), "tensor", config.tile_n, 0, 0)
        if plan.in_blocks:
            columns = (
                config.tile_k if plan.scales == "square" else EPILOGUE_ROW_BYTES // 2
            )
            of_w = scales[1].at[tile.group if plan.kind == "rows" else 0]
            first = lax.div(tile.column, columns)
            factors = _OfBlocks(
                (scales[0], of_w), plan.scales, columns, first, tile.steps, tile.row
            )
        adding, compute = promoting(
            finish, factors, first_row, height, config.tile_n, _multiply_steps
        )
        return compute(add_all)

    def accumulate(acc: Ref) -> jax.Array:
        # A step's buffers are given back a step later, so that the tensor cores always
        # have the next products.
        release = lambda step: plgpu.barrier_arrive(
            consumed.at[lax.rem(before + step, config.stages)]
        )

        def add(step: Index, carry: None) -> None:
            x, ws, _ = take(step)
            multiply(acc, x, ws, rows)
            plgpu.wgmma_wait(1)
            pl.when(step > 0)(lambda: release(step - 1))

        lax.fori_loop(0, tile.steps, add, None)
        plgpu.wgmma_wait(0)
        pl.when(tile.steps > 0)(lambda: release(tile.steps - 1))
        return acc[...]

    finish(
        [[pl.run_scoped(accumulate, plgpu.ACC((height, config.tile_n), jnp.float32))]]
    )


@dataclass(frozen=True)
class _OfBlocks(Factors):
    """Factors of blocks, read from global memory: rows of a group begin anywhere, and
    bulk copies do not.
    """

    row: Index

    def find(
        self, copied: Index, of_squares: Sequence[Index], rows: Ref, chunk: int
    ) -> jax.Array:
        """Return the factor of these rows of the tile and one chunk of its columns;
        instead of copies, k's block.
        """
        load, shape = (
            functools.partial(plgpu.load, optimized=False),
            (rows.size, self.columns),
        )
        at = pl.ds(self.row + rows.start, rows.size)
        of_x = load(self.scales[0].at[copied, at], layout=plgpu.Layout.WGMMA.reduce(1))
        if of_squares:
            return lax.broadcast_in_dim(of_x * of_squares[chunk], shape, (0,))
        at = pl.ds((self.first + chunk) * self.columns, self.columns)
        of_w = load(self.scales[1].at[copied, at], layout=plgpu.Layout.WGMMA.reduce(0))
        return lax.broadcast_in_dim(of_x, shape, (0,)) * lax.broadcast_in_dim(
            of_w, shape, (1,)
        )


def _multiply_steps(
    acc: Ref, xs: Sequence[Ref], ws: Sequence[Sequence[Ref]], rows: Ref
) -> None:
    for x, halves in zip(xs, ws, strict=True):
        multiply(acc, x, halves, rows)


def _mask(tile: Tile, step: Index, x: Ref, first_row: Index, height: int) -> None:
    """Zero the columns of other groups in a warpgroup's own rows of x."""
    width = x.shape[1]
    begin, end = tile.begin - step * width, tile.end - step * width

    @pl.when((begin > 0) | (end < width))
    def _zero() -> None:
        for i in range(0, height, EPILOGUE_ROWS):
            part = x.at[pl.ds(first_row + i, EPILOGUE_ROWS)]
            column = lax.broadcasted_iota(jnp.int32, part.shape, 1)
            # Mosaic selects no values of 8 bits, but has bitwise operations of any
            # width.
            bits = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
            kept = jnp.where((column >= begin) & (column < end), 0xFFFF, 0).astype(bits)
            part[...] = lax.bitcast_convert_type(
                lax.bitcast_convert_type(part[...], bits) & kept, x.dtype
            )
        plgpu.commit_smem()


def _store(
    plan: Plan,
    tile: Tile,
    first_row: Index,
    scales: Sequence[Ref],
    pieces: Ref,
    out: Ref,
    parts: list[list[jax.Array]],
) -> None:
    """Scale the sums of a warpgroup, and write the rows that belong to the tile through
    the buffers in turn.
    """
    copied, written = pieces
    buffers, height, width = written.shape
    (rows, columns), turn = parts[0][0].shape, itertools.count()
    left = pl.multiple_of(tile.column, plan.config.tile_n)
    for down, line in enumerate(parts):
        for across, part in enumerate(line):
            for i, j in itertools.product(
                range(0, rows, height), range(0, columns, width)
            ):
                row, column = first_row + down * rows + i, left + across * columns + j
                piece = part[i : i + height, j : j + width] * tile.factor
                if plan.scales == "rows":
                    piece = _scaled_by_rows(
                        plan, tile, scales, piece, tile.row + row, column
                    )
                plgpu.wait_smem_to_gmem(buffers - 1, wait_read_only=True)
                slot = next(turn) % buffers
                written[slot] = piece.astype(out.dtype)
                plgpu.commit_smem()
                to = out.at[tile.group] if plan.kind == "within" else out
                _copy_rows(
                    copied.at[slot],
                    to,
                    tile.row + row,
                    column,
                    tile.rows - row,
                    plan.kind == "within",
                )
                plgpu.commit_smem_to_gmem_group()


def _scaled_by_rows(
    plan: Plan,
    tile: Tile,
    scales: Sequence[Ref],
    piece: jax.Array,
    row: Index,
    column: Index,
) -> jax.Array:
    # "Optimized" loads are made for swizzled shared memory and refuse global memory.
    load = functools.partial(plgpu.load, optimized=False)
    of_x = load(
        scales[0].at[pl.ds(row, piece.shape[0])], layout=plgpu.Layout.WGMMA.reduce(1)
    )
    group = tile.group if plan.kind == "rows" else 0
    of_w = load(
        scales[1].at[group, pl.ds(column, piece.shape[1])],
        layout=plgpu.Layout.WGMMA.reduce(0),
    )
    spread = lambda vector, axis: lax.broadcast_in_dim(vector, piece.shape, (axis,))
    return piece * spread(of_x, 0) * spread(of_w, 1)


def _copy_rows(
    piece: Ref, out: Ref, row: Index, column: Index, count: Index, whole: bool
) -> None:
    """Copy the first `count` rows of a piece, or all: a copy has a fixed height, so one
    for each bit of the count.
    """
    height, width = piece.shape
    columns = pl.ds(column, width)
    copy = functools.partial(plgpu.copy_smem_to_gmem, commit_group=False)
    if whole:
        return copy(piece, out.at[pl.ds(row, height), columns])
    pl.when(count >= height)(lambda: copy(piece, out.at[pl.ds(row, height), columns]))

    @pl.when((count > 0) & (count < height))
    def _some() -> None:
        size = height // 2
        while size:
            done = lax.bitwise_and(count, -2 * size)

            @pl.when(lax.bitwise_and(count, size) != 0)
            def _bit(size: int = size, done: Index = done) -> None:
                copy(
                    piece.at[pl.ds(done, size)],
                    out.at[pl.ds(row + done, size), columns],
                )

            size //= 2

    return None
