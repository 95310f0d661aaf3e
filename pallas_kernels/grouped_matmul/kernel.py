"""The kernel of grouped products on Hopper: rows of groups, and sums within groups.

A block of a persistent grid walks output tiles. One warpgroup copies steps of tile_k
into a ring of `stages` buffers, which runs on from one output tile to the next, and two
warpgroups multiply, as in `hopper/kernel.py`. Two small XLA operations before the
kernel say where groups begin, because sizes are known only on the device, and which
group a row tile belongs to. Sums within a group begin at a multiple of tile_k: columns
of other groups are zeroed in shared memory, in the first and the last step alone. A
block reads these numbers for its next output tile while it computes one.

Row tiles begin at any row, so the last tile of a group may end with it and overlap the
tile before, which writes the same bits. Only groups smaller than a tile have rows that
must not be written. Shared memory is [rows][128 bytes], swizzled by its address. Copies
see it in tiles of one row, which may begin anywhere, and `wgmma` in tiles of eight.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.dispatch import device_kind
from pallas_kernels.explicit import one_at_a_time
from pallas_kernels.grouped_matmul.tiles import Plan, Tile, Work
from pallas_kernels.hopper.plan import (
    COMPUTE_WARPGROUPS,
    EPILOGUE_ROW_BYTES,
    EPILOGUE_ROWS,
    Index,
    Ref,
)
from pallas_kernels.hopper.steps import Slots
from pallas_kernels.hopper.sums import (
    Carry,
    Factors,
    Parts,
    Promoted,
    load_global,
    multiply,
    pieces_of,
)
from pallas_kernels.specs import Shape, varying

_MEMORY_REGISTERS = 40
_COMPUTE_REGISTERS = 232


def call(plan: Plan, out: jax.ShapeDtypeStruct, *operands: Array) -> Array:
    """Return the product of x and w by the lists of `mosaic.py`.

    Args:
      plan: everything for which the kernel is compiled.
      out: `[m, n]` for rows, `[e, k, n]` within groups.
      operands: matrices, lists and scales. For rows, x is `[m, k]` with one or two
        halves of w `[e, n, k]`, and the lists are `starts`, `before` and the facts of
        tiles. Within groups, x is `[k, m]` and g `[n, m]`, and the list is `starts`.
        The scales are `[1]` and `[e]` or `[1]`, or those of rows and of columns
        `[e, n]`. Those of blocks are `[k / tile_k, m]` and `[e, k / tile_k, n]`
        (squares: n / tile_k), long enough for whole tiles.
    """
    interpret = device_kind() == "cpu"
    accumulation = "full" if plan.promote else "fast"
    kernel = plgpu.kernel(
        partial(_kernel, plan, interpret),
        out_type=out,
        # two blocks show every path of the persistent grid
        grid=(2 if interpret else plan.blocks,),
        grid_names=("block",),
        num_threads=COMPUTE_WARPGROUPS + 1,
        thread_name="warpgroup",
        interpret=plgpu.InterpretGPUParams() if interpret else None,
        kernel_name=(
            f"grouped_matmul_{plan.kind}_{operands[0].dtype}_{accumulation}"
            f"_{plan.halves}_{plan.scales}"
        ),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
    )
    return varying(one_at_a_time(kernel)(*operands), *operands)


def _kernel(plan: Plan, interpret: bool, *refs: Ref) -> None:
    """Walk the output tiles of one block."""
    config = plan.config
    work = Work.of(plan, refs)
    heights = [config.tile_m, *[config.tile_n] * plan.halves]
    buffers = [
        _views((config.stages, rows, config.tile_k), operand.dtype, interpret)
        for operand, rows in zip(work.operands, heights, strict=True)
    ]
    width = EPILOGUE_ROW_BYTES // work.out.dtype.itemsize
    pieces = (COMPUTE_WARPGROUPS, config.store_buffers, EPILOGUE_ROWS, width)
    barrier = partial(plgpu.Barrier, num_barriers=config.stages)

    def run(buffers: Sequence[Ref], pieces: Ref, filled: Ref, consumed: Ref) -> None:
        slots = Slots(config.stages, filled, consumed)
        if interpret:
            block = _Block(work, slots, buffers, buffers, pieces, pieces)
        else:
            copied = [both[0] for both in buffers]
            read = [both[1] for both in buffers]
            block = _Block(work, slots, copied, read, pieces[0], pieces[1])
        warpgroup = lax.axis_index("warpgroup")
        compute = partial(block.compute, warpgroup)
        lax.cond(warpgroup == COMPUTE_WARPGROUPS, block.copy, compute)

    pl.run_scoped(
        run,
        buffers=buffers,
        pieces=_views(pieces, work.out.dtype, interpret),
        filled=barrier(num_arrivals=len(buffers)),
        consumed=barrier(num_arrivals=COMPUTE_WARPGROUPS),
        collective_axes="warpgroup",
    )


def _views(shape: Shape, dtype: DTypeLike, interpret: bool) -> Ref:
    """Return one allocation in two views, for copies and for `wgmma`.

    They are tiles of one row, which copies may begin at any row, and tiles of eight.
    Rows have the width of the swizzle, so both are the same bytes. The interpreter has
    no tiles, and its unions no common bytes.
    """
    width = shape[-1]
    swizzle = plgpu.SwizzleTransform(width * jnp.dtype(dtype).itemsize)
    of_copies, of_wgmma = [
        plgpu.SMEM(
            shape, dtype, transforms=(plgpu.TilingTransform((rows, width)), swizzle)
        )
        for rows in (1, 8)
    ]
    return of_wgmma if interpret else plgpu.RefUnion(of_copies, of_wgmma)


@dataclass(frozen=True)
class _Block:
    """A block of the grid: the stages of an output tile, and their shared memory.

    Attributes:
      work: the work of all blocks.
      slots: the ring of buffers.
      copied, read: buffers of the operands, as copies see them, and as wgmma does.
      sent, written: pieces of the output, as copies see them, and as registers do.
    """

    work: Work
    slots: Slots
    copied: Sequence[Ref]
    read: Sequence[Ref]
    sent: Ref
    written: Ref

    def copy(self) -> None:
        """Load all tiles, in the warpgroup that copies."""
        plgpu.set_max_registers(_MEMORY_REGISTERS, action="decrease")
        self.work.walk(self._load)

    def compute(self, warpgroup: Index) -> None:
        """Multiply and store all tiles, in a warpgroup that computes."""
        plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
        self.work.walk(partial(self._multiply, warpgroup))
        plgpu.wait_smem_to_gmem(0)

    def _load(self, tile: Tile, before: Index) -> None:
        """Copy the steps of one output tile."""

        @pl.loop(0, tile.steps)
        def _steps(step: Index) -> None:
            slot = self.slots.claim(before + step)
            parts = self.work.parts(tile, step)
            for part, buffer in zip(parts, self.copied, strict=True):
                filled = self.slots.filled.at[slot]
                plgpu.copy_gmem_to_smem(part, buffer.at[slot], filled)

    def _multiply(self, warpgroup: Index, tile: Tile, before: Index) -> None:
        """Multiply the steps of one output tile, and store their sum."""
        plan = self.work.plan
        height = plan.config.tile_m // COMPUTE_WARPGROUPS
        rows = pl.ds(warpgroup * height, height)
        store = partial(self._store, warpgroup, tile, rows)
        if plan.promote:
            factors = self._factors(tile)
            width = plan.config.tile_n
            total = Promoted(store, rows, width, factors, _multiply_steps)
            total.compute(partial(self._promote, total, tile, before))
        else:
            add_all = partial(self._accumulate, tile, before, rows)
            accumulator = plgpu.ACC((height, plan.config.tile_n), jnp.float32)
            store([[pl.run_scoped(add_all, accumulator)]])

    def _take(
        self,
        tile: Tile,
        before: Index,
        step: Index,
        rows: pl.Slice,
    ) -> tuple[Index, Ref, Sequence[Ref]]:
        """Return (slot, x, halves of w) of a step when they are there."""
        slot = self.slots.read(before + step)
        x, *ws = [buffer.at[slot] for buffer in self.read]
        if self.work.plan.kind == "within":
            _mask(tile, step, x, rows)
        return slot, x, ws

    def _promote(
        self,
        total: Promoted,
        tile: Tile,
        before: Index,
        carry: Carry,
    ) -> Carry:
        """Add all steps of a tile, alone or in pairs, to totals in registers."""
        plan = self.work.plan

        def add(count: int, step: Index, carry: Carry) -> Carry:
            taken = [
                self._take(tile, before, step + i, total.rows) for i in range(count)
            ]
            slots, xs, ws = zip(*taken, strict=True)
            block = lax.div(tile.first, plan.config.tile_k) + step

            def release() -> None:
                for slot in slots:
                    self.slots.release(slot)

            return total.add(step, xs, ws, block, release, carry)

        def add_pair(i: Index, carry: Carry) -> Carry:
            return add(2, 2 * i, carry)

        pairs = lax.div(tile.steps, 2) if plan.in_pairs else 0
        carry = lax.fori_loop(0, pairs, add_pair, carry)
        add_one = partial(add, 1)
        return lax.fori_loop(2 * pairs, tile.steps, add_one, carry)

    def _accumulate(self, tile: Tile, before: Index, rows: pl.Slice, acc: Ref) -> Array:
        """Return the sum of all steps of a tile from the tensor core's accumulator.

        A step's buffers are given back a step later, so that the tensor cores always
        have the next products.
        """

        def release(step: Index) -> None:
            self.slots.release(lax.rem(before + step, self.slots.stages))

        def add(step: Index, carry: None) -> None:
            _, x, ws = self._take(tile, before, step, rows)
            multiply(acc, x, ws, rows)
            plgpu.wgmma_wait(1)
            pl.when(step > 0)(lambda: release(step - 1))

        lax.fori_loop(0, tile.steps, add, None)
        plgpu.wgmma_wait(0)
        pl.when(tile.steps > 0)(lambda: release(tile.steps - 1))
        return acc[...]

    def _factors(self, tile: Tile) -> Factors:
        """Return the factors of a promoted sum."""
        plan = self.work.plan
        config = plan.config
        if not plan.in_blocks:
            return Factors((), "tensor", config.tile_n, 0, 0)
        of_x, of_w = self.work.scales
        columns = config.tile_k if plan.scales == "square" else EPILOGUE_ROW_BYTES // 2
        return _OfBlocks(
            scales=(of_x, of_w.at[tile.group if plan.kind == "rows" else 0]),
            scaling=plan.scales,
            columns=columns,
            first=lax.div(tile.column, columns),
            steps=tile.steps,
            row=tile.row,
        )

    def _store(
        self,
        warpgroup: Index,
        tile: Tile,
        rows: pl.Slice,
        parts: Parts,
    ) -> None:
        """Scale the sums of a warpgroup, and write the rows that belong to the tile."""
        plan = self.work.plan
        written = self.written.at[warpgroup]
        sent = self.sent.at[warpgroup]
        buffers, height, width = written.shape
        is_whole = plan.kind == "within"
        out = self.work.out.at[tile.group] if is_whole else self.work.out
        left = pl.multiple_of(tile.column, plan.config.tile_n)
        for turn, (i, j, piece) in enumerate(pieces_of(parts, height, width)):
            row = rows.start + i
            column = left + j
            scaled = piece * tile.factor
            if plan.scales == "rows":
                scaled = self._scale_rows(tile, scaled, tile.row + row, column)
            plgpu.wait_smem_to_gmem(buffers - 1, wait_read_only=True)
            slot = turn % buffers
            written[slot] = scaled.astype(out.dtype)
            plgpu.commit_smem()
            count = None if is_whole else tile.rows - row
            _copy_rows(sent.at[slot], out, tile.row + row, column, count)
            plgpu.commit_smem_to_gmem_group()

    def _scale_rows(self, tile: Tile, piece: Array, row: Index, column: Index) -> Array:
        """Scale a piece of the output by the scales of its rows and columns."""
        of_x, of_w = self.work.scales
        height, width = piece.shape
        group = tile.group if self.work.plan.kind == "rows" else 0
        down = load_global(of_x.at[pl.ds(row, height)], 1)
        across = load_global(of_w.at[group, pl.ds(column, width)], 0)
        scaled = piece * lax.broadcast_in_dim(down, piece.shape, (0,))
        return scaled * lax.broadcast_in_dim(across, piece.shape, (1,))


@dataclass(frozen=True)
class _OfBlocks(Factors):
    """Factors of blocks, read from global memory.

    Rows of a group begin anywhere, and bulk copies do not. Instead of copies in shared
    memory, the block of k is the place of the scales.
    """

    row: Index

    def of_rows(self, at: Index, rows: pl.Slice) -> Array:
        """Return x's scales of these rows of the tile."""
        lines = pl.ds(self.row + rows.start, rows.size)
        return load_global(self.scales[0].at[at, lines], 1)

    def of_columns(self, at: Index, chunk: int) -> Array:
        """Return W's scales of the columns of a chunk."""
        columns = pl.ds((self.first + chunk) * self.columns, self.columns)
        return load_global(self.scales[1].at[at, columns], 0)


def _multiply_steps(
    acc: Ref,
    xs: Sequence[Ref],
    ws: Sequence[Sequence[Ref]],
    rows: pl.Slice,
) -> None:
    """Add the products of several steps."""
    for x, halves in zip(xs, ws, strict=True):
        multiply(acc, x, halves, rows)


def _mask(tile: Tile, step: Index, x: Ref, rows: pl.Slice) -> None:
    """Zero the columns of other groups in a warpgroup's own rows of x."""
    width = x.shape[1]
    begin = tile.begin - step * width
    end = tile.end - step * width
    # Mosaic selects no values of 8 bits, but has bitwise operations of any width.
    bits = jnp.dtype(f"uint{8 * x.dtype.itemsize}")

    @pl.when((begin > 0) | (end < width))
    def _zero() -> None:
        for i in range(0, rows.size, EPILOGUE_ROWS):
            part = x.at[pl.ds(rows.start + i, EPILOGUE_ROWS)]
            column = lax.broadcasted_iota(jnp.int32, part.shape, 1)
            is_own = (column >= begin) & (column < end)
            mask = jnp.where(is_own, 0xFFFF, 0).astype(bits)
            kept = lax.bitcast_convert_type(part[...], bits) & mask
            part[...] = lax.bitcast_convert_type(kept, x.dtype)
        plgpu.commit_smem()


def _copy_rows(
    piece: Ref,
    out: Ref,
    row: Index,
    column: Index,
    count: Index | None,
) -> None:
    """Copy the first `count` rows of a piece to rows of `out`, or all.

    A copy has a fixed height, so there is one for each bit of the count.
    """
    height, width = piece.shape
    columns = pl.ds(column, width)

    def copy(done: Index, size: int) -> None:
        source = piece.at[pl.ds(done, size)]
        target = out.at[pl.ds(row + done, size), columns]
        plgpu.copy_smem_to_gmem(source, target, commit_group=False)

    def copy_all() -> None:
        target = out.at[pl.ds(row, height), columns]
        plgpu.copy_smem_to_gmem(piece, target, commit_group=False)

    if count is None:
        copy_all()
        return
    pl.when(count >= height)(copy_all)

    @pl.when((count > 0) & (count < height))
    def _some() -> None:
        size = height // 2
        while size:
            done = lax.bitwise_and(count, -2 * size)
            has_bit = lax.bitwise_and(count, size) != 0
            pl.when(has_bit)(partial(copy, done, size))
            size //= 2
