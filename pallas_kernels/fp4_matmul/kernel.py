"""A product with an FP4 weight on Hopper for few rows of x: bound by the bytes of the weight, which are read once.

    sums[n, m] = sum_k (code[n, k] * scale[n, k]) x[m, k]
    out[m, n]  = sums[n, m] * factor[m]                            where each block has all of k

The weight is the operand that `wgmma` takes from registers, because nothing else can be decoded without a trip through
shared memory: the tensor core computes the transposed product, 64 outputs n for every warpgroup and all of m. One
warpgroup copies codes, scales and x ahead; the others decode (bfloat16: `decode.py`, E4M3: `decode_fp8.py`, as x is)
and multiply. The rows of x are read by every block, so a block has as many warpgroups as fit, which share them, and
blocks of a cluster share one copy. Where tiles of n do not fill the chip evenly, blocks share the steps of all tiles
("stream-K", Osama et al. 2023): one ends a tile and begins the next, and `added` adds the parts, in a fixed order.

On an H200, 8192 x 28672 with cold weights at m = 16, over BF16's product in the same run, the kernel alone: 2.28 with
scales converted by arithmetic and a wait behind every step, 2.37 with one product in flight, 2.57 with codes placed by
a multiplication (the integer pipe was 60 % busy) and scales from a table, 2.72 with scales in 16-byte loads, E4M3 3.1.
112 of 132 multiprocessors have a tile, and issue in 72 % of their cycles (E4M3: 57 %, at 70 % of the memory's rate).
With the permutation of x and what follows, BF16 had 2.54, and with equal shares of all steps 2.62.
"""

import functools
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fp4_matmul import decode, decode_fp8, owned

ROWS = 64
# A row of x in shared memory, the widest swizzle: what is decoded and multiplied at a time.
CHUNK_BYTES = 128
# Registers of a thread that copies, where those that compute need more than an even share.
_COPYING = 24


@dataclass(frozen=True)
class Config:
    """Sizes of the kernel.

    Attributes:
      warpgroups: that compute, each 64 outputs.
      stages: steps of k that are in flight.
      share: steps of k that a block takes, of one tile or of the end of one and of those behind it; None is all steps
        of one.
      cluster: blocks along n that share one copy of x.
    """

    warpgroups: int = 4
    stages: int = 4
    share: int | None = None
    cluster: Literal[1, 2] = 1

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
        return even, min(240, (even * threads - _COPYING) // self.warpgroups // 8 * 8)

    def holds(self, m: int, *, evenly: bool = False) -> bool:
        """Whether registers suffice: half of m for sums, and 64 for what is decoded and what is multiplied."""
        return m // 2 + 64 <= (self.registers[0] if evenly else max(self.registers))

    def piece(self, m: int) -> int:
        """Rows of m that a warpgroup writes at a time: a quarter of them, in eights."""
        return next(rows for rows in (m // 4, 16, 8) if rows and rows % 8 == 0 and m % rows == 0)


@dataclass(frozen=True)
class Shares:
    """How blocks share the steps of all tiles: block b takes those from `share * b` on.

    Attributes:
      tiles, steps: how many, and of one.
      share: how many a block takes; the last one what is left.
    """

    tiles: int
    steps: int
    share: int

    @classmethod
    def of(cls, config: Config, form: owned.Form, n: int, k: int) -> "Shares":
        """Those of a product."""
        steps = k // owned.step_of(form)
        return cls(n // (config.height * config.cluster), steps, config.share or steps)

    @property
    def blocks(self) -> int:
        """How many blocks."""
        return -(-self.tiles * self.steps // self.share)

    @property
    def whole(self) -> bool:
        """Whether each block has one tile."""
        return self.share == self.steps

    @property
    def pieces(self) -> int:
        """Of how many tiles a block has a part, at most."""
        return max(_touched(block * self.share, self.share, self.steps) for block in range(self.blocks))

    @property
    def parts(self) -> tuple[int, int]:
        """Of how many blocks a tile is made, at least and at most."""
        counts = [_touched(tile * self.steps, self.steps, self.share) for tile in range(self.tiles)]
        return min(counts), max(counts)


def _touched(first: int, count: int, size: int) -> int:
    """How many intervals of a size hold some of `count` steps from the first on."""
    return (first + count - 1) // size - first // size + 1


def call(
    config: Config,
    form: owned.Form,
    x: jax.Array,
    codes: jax.Array,
    scales: jax.Array,
    table: jax.Array | np.ndarray,
    factors: jax.Array | None = None,
    out_dtype: Any = jnp.float32,
) -> jax.Array:
    """The parts of the sums, float32 `[parts, n, m]`, or with factors the product, `[m, n]` in `out_dtype`.

    Sums are still to be multiplied by what the table leaves, `FACTOR` of the module that made it, and by `outer`.
    E4M3 is added in the tensor core's own accumulator, which keeps about 14 bits: `accumulation="fast"` of `matmul`.

    Args:
      config: sizes; with factors, its blocks have all of k.
      form: the format; "nvfp4" where x is E4M3.
      x: bfloat16 or float8_e4m3fn `[m, k]`, `permuted` by the module of its dtype; m is a multiple of 8 times the
        cluster, at most 256, k one of `owned.step_of(form)`.
      codes: uint8 `[n, k / 2]`; n is a multiple of 64 times the warpgroups times the cluster.
      scales: their bytes, uint8 `[n, k / block]`.
      table: that of the module.
      factors: float32 `[m]`, and for bfloat16 `[1]`, which is multiplied by what the table leaves.
      out_dtype: bfloat16 or float32.
    """
    (m, k), n = x.shape, codes.shape[0]
    shares = Shares.of(config, form, n, k)
    assert factors is None or shares.whole, "parts of k are added before they are scaled"
    sums = jax.ShapeDtypeStruct((max(shares.parts), n, m), jnp.float32)
    return plgpu.kernel(
        functools.partial(_kernel, config, form, shares),
        out_type=sums if factors is None else jax.ShapeDtypeStruct((m, n), out_dtype),
        grid=(shares.blocks,),
        grid_names=("block",),
        cluster=(config.cluster,),
        cluster_names=("member",),
        num_threads=config.warpgroups + 1,
        thread_name="warpgroup",
        kernel_name=f"matmul_{form}_{x.dtype}",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(x, codes, scales, table, *([] if factors is None else [factors]))


def added(shares: Shares, written: jax.Array) -> jax.Array:
    """The sums `[n, m]` of what `call` returns without factors."""
    always, most = shares.parts
    total = sum(written[1:always], written[0])
    for i in range(always, most):
        # Of every value and not of every tile, which would be a kernel of its own.
        tile = lax.div(lax.broadcasted_iota(jnp.int32, total.shape, 0), written.shape[1] // shares.tiles)
        there = (lax.div(tile * shares.steps, shares.share) + i) * shares.share < (tile + 1) * shares.steps
        # What no block wrote is whatever memory held.
        total += jnp.where(there, written[i], 0)
    return total


def _kernel(config: Config, form: Any, shares: Shares, *refs: Any) -> None:
    x_gmem, _, _, table_gmem, *factors_gmem, out_gmem = refs
    m, step, stages = x_gmem.shape[0], owned.step_of(form), min(config.stages, shares.share)
    width = CHUNK_BYTES // x_gmem.dtype.itemsize
    swizzled = lambda size: (plgpu.TilingTransform((8, size)), plgpu.SwizzleTransform(CHUNK_BYTES))
    released: dict[str, Any] = dict(num_arrivals=config.warpgroups, num_barriers=stages)
    together: Any = functools.partial(plgpu.ClusterBarrier, collective_axes=("member",))

    def scope(**smem: Any) -> None:
        block = _Block(config, form, shares, stages, refs, smem)
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
        consumed=(plgpu.Barrier if config.cluster == 1 else together)(**released),
        collective_axes="warpgroup",
    )


@dataclass(frozen=True)
class _Block:
    """A block at work.

    Attributes:
      config, form: of the kernel.
      shares: how blocks share the steps of all tiles.
      stages: buffers of a step.
      gmem: references to global memory: x, codes, scales, table, perhaps factors, and the output.
      smem: buffers and barriers, by the names that `_kernel` gives them.
    """

    config: Config
    form: Any
    shares: Shares
    stages: int
    gmem: Any
    smem: dict[str, Any]

    def _own(self) -> tuple[Any, Any]:
        """The first of this block's steps, and how many they are."""
        shares, block = self.shares, lax.axis_index("block")
        if shares.tiles * shares.steps % shares.share == 0:
            return block * shares.share, shares.share
        first = block * shares.share
        return first, lax.min(shares.share, shares.tiles * shares.steps - first)

    def _pieces(self, action: Any) -> None:
        """Call `action(tile, begin, end)` for each tile that this block has steps of, those from begin to end."""
        shares, (first, count) = self.shares, self._own()
        if shares.whole:
            action(lax.axis_index("block"), 0, shares.steps)
            return
        first_tile = lax.div(first, shares.steps)

        @pl.loop(0, shares.pieces)
        def _each(piece: Any) -> None:
            start = (first_tile + piece) * shares.steps - first
            begin, end = lax.max(start, 0), lax.min(start + shares.steps, count)

            @pl.when(begin < end)
            def _there_are_some() -> None:
                action(first_tile + piece, begin, end)

    def _rows(self, tile: Any) -> Any:
        """The first row of n of this block's part of a tile."""
        return (tile * self.config.cluster + lax.axis_index("member")) * self.config.height

    def _hand_over(self, registers: int, action: Any) -> None:
        """Give registers of the threads that copy to those that compute, where an even share is too few."""
        if not self.config.holds(self.gmem[0].shape[0], evenly=True):
            plgpu.set_max_registers(registers, action=action)

    def fill(self) -> None:
        """Copy the table, and codes, scales and x of each step: the work of one warpgroup."""
        table_gmem, smem = self.gmem[3], self.smem
        self._hand_over(_COPYING, "decrease")
        plgpu.copy_gmem_to_smem(table_gmem, smem["table"], smem["ready"])
        self._pieces(self._copy)
        if self.config.cluster > 1:
            # A block of a cluster must not end while the other still arrives at its barriers.
            _, count = self._own()

            @pl.loop(lax.max(count, self.stages - 1), count + self.stages)
            def _empty(k: Any) -> None:
                plgpu.barrier_wait(smem["consumed"].at[lax.rem(k, self.stages)])

    def _copy(self, tile: Any, begin: Any, end: Any) -> None:
        (x_gmem, codes_gmem, scales_gmem, *_), smem = self.gmem, self.smem
        step, (first, _) = owned.step_of(self.form), self._own()
        rows, shared = pl.ds(self._rows(tile), self.config.height), "member" if self.config.cluster > 1 else None
        # (global memory, rows, how many columns a step takes, where to, which blocks share the copy)
        copies = (
            (codes_gmem, rows, step // 2, smem["codes"], None), (scales_gmem, rows, owned.BLOCKS, smem["scales"], None),
            (x_gmem, slice(None), step, smem["x"], shared),
        )  # fmt: skip

        @pl.loop(begin, end)
        def _steps(k: Any) -> None:
            slot, of_tile = lax.rem(k, self.stages), first + k - tile * self.shares.steps

            @pl.when(k >= self.stages - 1)
            def _wait() -> None:
                plgpu.barrier_wait(smem["consumed"].at[slot])

            for source, at, columns, buffer, axes in copies:
                block = source.at[at, pl.ds(of_tile * columns, columns)]
                plgpu.copy_gmem_to_smem(block, buffer.at[slot], smem["filled"].at[slot], collective_axes=axes)

    def consume(self) -> None:
        """Decode and multiply the steps of 64 outputs, and write them: the work of each other warpgroup."""
        self._hand_over(self.config.registers[1], "increase")
        plgpu.barrier_wait(self.smem["ready"])
        place, sums = owned.place(self.form), plgpu.ACC((ROWS, self.gmem[0].shape[0]), jnp.float32)
        self._pieces(lambda *piece: pl.run_scoped(functools.partial(self._multiply, place, *piece), sums))

    def _multiply(self, place: Any, tile: Any, begin: Any, end: Any, acc: Any) -> None:
        warpgroup, x_smem = lax.axis_index("warpgroup"), self.smem["x"]
        step, width = owned.step_of(self.form), CHUNK_BYTES // x_smem.dtype.itemsize

        @pl.loop(begin, end)
        def _steps(k: Any) -> None:
            slot = lax.rem(k, self.stages)
            plgpu.barrier_wait(self.smem["filled"].at[slot])
            operand = self._operand(slot, warpgroup * ROWS, place)
            for chunk in range(step // width):
                plgpu.wgmma(acc, operand(chunk), x_smem.at[slot, :, pl.ds(chunk * width, width)].T)
                # One product runs while the next operand is decoded; that before has read its registers.
                plgpu.wgmma_wait(1)
                if chunk == 0:
                    # Before the first step, too: with a branch here ptxas gives up running products beside the rest.
                    self._release(k - 1)

        plgpu.wgmma_wait(0)
        if self.config.cluster > 1:

            @pl.when(end == self._own()[1])
            def _last() -> None:
                self._release(end - 1)

        rows, out_gmem = pl.ds(self._rows(tile) + warpgroup * ROWS, ROWS), self.gmem[-1]
        if self.smem["out"] is None:
            part = lax.axis_index("block") - lax.div(tile * self.shares.steps, self.shares.share)
            out_gmem[part, rows] = acc[...]
        else:
            left = decode.FACTOR[self.form]
            _store(acc[...], self.gmem[-2], left, self.smem["out"].at[warpgroup], out_gmem, rows)

    def _release(self, k: Any) -> None:
        """Give the buffers of a step back: all threads of a warpgroup do, or two for all of them in a cluster.

        There is one arrival for step -1, for which `_copy` waits before it fills the last of the buffers at first.
        """
        if self.config.cluster > 1:
            # They must not speak for warps that still load codes.
            plgpu.inline_mgpu()(lambda context: mgpu.utils.warpgroup_barrier())()
        plgpu.barrier_arrive(self.smem["consumed"].at[lax.rem(k + self.stages, self.stages)])

    def _operand(self, slot: Any, first_row: Any, place: Any) -> Any:
        """A function of the chunk: the weight's values as the dtype of x."""
        own, table = pl.ds(first_row, ROWS), self.smem["table"]
        codes, scales = (self.smem[name].at[slot, own] for name in ("codes", "scales"))
        if self.smem["x"].dtype == jnp.float8_e4m3fn:
            return decode_fp8.decode(place, codes, scales, table)
        return decode.decode(self.form, place, codes, scales, table)


def _out_buffers(config: Config, m: int, dtype: Any) -> Any:
    """A piece of the output for each warpgroup: some rows of m times 64 outputs."""
    transforms = (plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM((config.warpgroups, config.piece(m), ROWS), dtype, transforms=transforms)


def _store(sums: jax.Array, factors_gmem: Any, left: float, out_smem: Any, out_gmem: Any, rows: Any) -> None:
    """Write the products of the sums of 64 outputs and the factors, transposed, in pieces of m through a buffer."""
    if factors_gmem.shape == (1,):
        factor = factors_gmem[0] * jnp.float32(left)
    else:
        # Straight from global memory, which "optimized" loads, made for swizzled shared memory, refuse.
        factor = plgpu.load(factors_gmem, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
        factor = lax.broadcast_in_dim(factor, sums.shape, (1,))
    out = (sums * factor).astype(out_gmem.dtype)
    out, piece = plgpu.layout_cast(out, plgpu.Layout.WGMMA_TRANSPOSED), out_smem.shape[0]
    for first in range(0, sums.shape[1], piece):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        out_smem.T[...] = out[:, first : first + piece]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, out_gmem.at[pl.ds(first, piece), rows])
    plgpu.wait_smem_to_gmem(0)
