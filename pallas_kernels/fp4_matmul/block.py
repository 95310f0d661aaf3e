"""A block of the FP4 kernel: its sizes, which steps of which tiles it does, and how its warpgroups do them."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fp4_matmul import decode, decode_fp8, owned

ROWS = 64
# A row of x in shared memory, the widest swizzle: what is decoded and multiplied at a time.
CHUNK_BYTES = 128
# Registers of a thread that copies, where those that compute need more than an even share.
COPYING = 24


@dataclass(frozen=True)
class Config:
    """Sizes of the kernel.

    Attributes:
      warpgroups: that compute, each 64 outputs.
      stages: steps of k that are in flight.
      splits: blocks that share the steps of k.
      rows: of x, those of a block; None is all of them.
      helpers: blocks without a tile of outputs, which do the last steps of others' tiles; neither k nor rows of x are
        split then.
      helped: how many steps of a tile helpers do.
    """

    warpgroups: int = 4
    stages: int = 4
    splits: int = 1
    rows: int | None = None
    helpers: int = 0
    helped: int = 0

    @property
    def height(self) -> int:
        """Outputs n of a block."""
        return ROWS * self.warpgroups

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread that computes: an even share, and what is left of all shares where threads that copy give away.

        A block has what it was started with: asked for one register more, its threads would wait for ever.
        """
        threads = self.warpgroups + 1
        even = 512 // threads // 8 * 8
        return even, min(240, (even * threads - COPYING) // self.warpgroups // 8 * 8)

    def holds(self, m: int, *, evenly: bool = False) -> bool:
        """Whether registers suffice: half of m for sums, and 64 for what is decoded and what is multiplied."""
        return m // 2 + 64 <= (self.registers[0] if evenly else max(self.registers))

    def piece(self, m: int) -> int:
        """Rows of m that a warpgroup writes at a time: a quarter of them, in eights."""
        return next(rows for rows in (m // 4, 16, 8) if rows and rows % 8 == 0 and m % rows == 0)


@dataclass(frozen=True)
class Part:
    """Steps of a tile that a block does one after the other.

    Attributes:
      tile: which.
      first: of the steps.
      count: how many.
      before: steps that the block has done before, of other tiles.
      end: a function of the tile and the sums of 64 of its outputs, float32 `[64, rows]`.
    """

    tile: Any
    first: Any
    count: int
    before: Any
    end: Any


@dataclass(frozen=True)
class Block:
    """A block at work.

    Attributes:
      config, form: of the kernel.
      steps: of k, those of a tile, or of a part of it.
      stages: buffers of a step.
      gmem: references to global memory: x, codes, scales, table, perhaps factors, and the output.
      smem: buffers and barriers, by the names that `_kernel` gives them.
      left: what helpers leave to the block that has a tile: sums, float32 `[n, m]` in global memory, and semaphores
        `[tiles, warpgroups]`, zero before the kernel and after it; None without helpers.
    """

    config: Config
    form: Any
    steps: int
    stages: int
    gmem: Any
    smem: dict[str, Any]
    left: Any

    @property
    def rows(self) -> int:
        """Of x, how many this block multiplies."""
        return self.config.rows or self.gmem[0].shape[0]

    @property
    def _place(self) -> tuple[Any, Any, Any]:
        """Which band of x, which tile of outputs and which part of k this block has, if it is no helper."""
        block, splits = self._number - self.config.helpers, self.config.splits
        bands = self.gmem[0].shape[0] // self.rows
        return lax.rem(block, bands), lax.div(block, bands * splits), lax.rem(lax.div(block, bands), splits)

    @property
    def _number(self) -> Any:
        return lax.axis_index("block")

    @property
    def _band(self) -> Any:
        """Of x, the rows that this block multiplies."""
        return pl.ds(self._place[0] * self.rows, self.rows)

    def _do_parts(self, do: Any) -> None:
        """Call `do` with each part of this block, one after the other.

        Helpers are the blocks that start first. Others wait for them and they for none, so that all end, even where
        another kernel keeps multiprocessors to itself.
        """
        helpers, helped = self.config.helpers, self.config.helped
        _, tile, part = self._place
        own = Part(tile, part * self.steps, self.steps - helped, 0, self._write)
        if not helpers:
            do(own)
            return
        tiles = self.left[1].shape[0]

        def help_others() -> None:
            @pl.loop(0, lax.div(tiles - 1 - self._number, helpers) + 1)
            def _tiles(turn: Any) -> None:
                tile = self._number + turn * helpers
                do(Part(tile, self.steps - helped, helped, turn * helped, self._leave))

        lax.cond(self._number < helpers, help_others, functools.partial(do, own))

    def _hand_over(self, registers: int, action: Any) -> None:
        """Give registers of the threads that copy to those that compute, where an even share is too few."""
        if not self.config.holds(self.rows, evenly=True):
            plgpu.set_max_registers(registers, action=action)

    def fill(self) -> None:
        """Copy the table, and codes, scales and x of each step: the work of one warpgroup."""
        self._hand_over(COPYING, "decrease")
        plgpu.copy_gmem_to_smem(self.gmem[3], self.smem["table"], self.smem["ready"])
        self._do_parts(self._copy)

    def _copy(self, part: Part) -> None:
        (x_gmem, codes_gmem, scales_gmem, *_), smem, step = self.gmem, self.smem, owned.step_of(self.form)
        outputs = pl.ds(part.tile * self.config.height, self.config.height)
        # (global memory, rows, how many columns a step takes, where to)
        copies = (
            (codes_gmem, outputs, step // 2, smem["codes"]), (scales_gmem, outputs, owned.BLOCKS, smem["scales"]),
            (x_gmem, self._band, step, smem["x"]),
        )  # fmt: skip

        @pl.loop(0, part.count)
        def _steps(k: Any) -> None:
            slot = lax.rem(part.before + k, self.stages)

            @pl.when(part.before + k >= self.stages - 1)
            def _wait() -> None:
                plgpu.barrier_wait(smem["consumed"].at[slot])

            for source, at, columns, buffer in copies:
                block = source.at[at, pl.ds((part.first + k) * columns, columns)]
                plgpu.copy_gmem_to_smem(block, buffer.at[slot], smem["filled"].at[slot])

    def consume(self) -> None:
        """Decode and multiply the steps of 64 outputs, and write them: the work of each other warpgroup."""
        self._hand_over(self.config.registers[1], "increase")
        plgpu.barrier_wait(self.smem["ready"])
        place = owned.place(self.form)

        def add(part: Part) -> None:
            pl.run_scoped(functools.partial(self._multiply, place, part), plgpu.ACC((ROWS, self.rows), jnp.float32))

        self._do_parts(add)

    def _multiply(self, place: Any, part: Part, acc: Any) -> None:
        warpgroup, x_smem = lax.axis_index("warpgroup"), self.smem["x"]
        step, width = owned.step_of(self.form), CHUNK_BYTES // x_smem.dtype.itemsize

        @pl.loop(0, part.count)
        def _steps(k: Any) -> None:
            slot = lax.rem(part.before + k, self.stages)
            plgpu.barrier_wait(self.smem["filled"].at[slot])
            operand = self._operand(slot, warpgroup * ROWS, place)
            for chunk in range(step // width):
                plgpu.wgmma(acc, operand(chunk), x_smem.at[slot, :, pl.ds(chunk * width, width)].T)
                # One product runs while the next operand is decoded; that before has read its registers.
                plgpu.wgmma_wait(1)
                if chunk == 0:
                    # Before the first step, too: with a branch here ptxas gives up running products beside the rest.
                    self._release(part.before + k - 1)

        plgpu.wgmma_wait(0)
        part.end(part.tile, acc[...])

    def _outputs(self, tile: Any) -> Any:
        """Of a tile, those of this warpgroup."""
        return pl.ds(tile * self.config.height + lax.axis_index("warpgroup") * ROWS, ROWS)

    def _leave(self, tile: Any, sums: jax.Array) -> None:
        """Write sums for the warpgroup that has the other steps, and say so."""
        left, semaphores = self.left
        left[self._outputs(tile)] = sums
        # After a barrier of this warpgroup one thread releases what all of them wrote.
        plgpu.semaphore_signal(semaphores.at[tile, lax.axis_index("warpgroup")], memory_scope="gpu")

    def _write(self, tile: Any, sums: jax.Array) -> None:
        """Add what a helper left, and write 64 outputs, or sums where k is split."""
        warpgroup, outputs, out_gmem = lax.axis_index("warpgroup"), self._outputs(tile), self.gmem[-1]
        if self.left is not None:
            left, semaphores = self.left
            # One thread acquires, and a barrier of this warpgroup follows; the semaphore is zero again.
            plgpu.semaphore_wait(semaphores.at[tile, warpgroup], memory_scope="gpu")
            sums = sums + plgpu.load(left.at[outputs], layout=plgpu.Layout.WGMMA, optimized=False)
        if self.smem["out"] is None:
            out_gmem[self._place[2], outputs, self._band] = sums
        else:
            _store(sums, self._factors(), self.smem["out"].at[warpgroup], out_gmem.at[self._band, outputs])

    def _release(self, k: Any) -> None:
        """Give the buffers of a step back.

        There is one arrival for step -1, for which `fill` waits before it fills the last of the buffers at first.
        """
        plgpu.barrier_arrive(self.smem["consumed"].at[lax.rem(k + self.stages, self.stages)])

    def _factors(self) -> Any:
        """What sums are multiplied by: a number, or one for each row of x."""
        factors = self.gmem[-2]
        if factors.shape == (1,):
            return factors[0] * jnp.float32(decode.FACTOR[self.form])
        # Straight from global memory, which "optimized" loads, made for swizzled shared memory, refuse.
        found = plgpu.load(factors.at[self._band], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
        return lax.broadcast_in_dim(found, (ROWS, self.rows), (1,))

    def _operand(self, slot: Any, first_row: Any, place: Any) -> Any:
        """A function of the chunk: the weight's values as the dtype of x."""
        own, table = pl.ds(first_row, ROWS), self.smem["table"]
        codes, scales = (self.smem[name].at[slot, own] for name in ("codes", "scales"))
        if self.smem["x"].dtype == jnp.float8_e4m3fn:
            return decode_fp8.decode(place, codes, scales, table)
        return decode.decode(self.form, place, codes, scales, table)


def _store(sums: jax.Array, factor: Any, out_smem: Any, out_gmem: Any) -> None:
    """Write the products of the sums of 64 outputs and their factors, transposed, in pieces of m through a buffer.

    Rows behind the last of the output are not written: copies leave out what lies beyond it.
    """
    out, piece = (sums * factor).astype(out_gmem.dtype), out_smem.shape[0]
    out = plgpu.layout_cast(out, plgpu.Layout.WGMMA_TRANSPOSED)
    for first in range(0, sums.shape[1], piece):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        out_smem.T[...] = out[:, first : first + piece]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, out_gmem.at[pl.ds(first, piece)])
    plgpu.wait_smem_to_gmem(0)
