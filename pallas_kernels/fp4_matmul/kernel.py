"""A product with an FP4 weight on Hopper: for few rows of x bound by the bytes of the weight, which are read once.

    sums[n, m] = sum_k (code[n, k] * scale[n, k]) x[m, k]
    out[m, n]  = sums[n, m] * factor[m]                            where k is not split

The weight is the operand that `wgmma` takes from registers, because nothing else can be decoded without a trip through
shared memory: the tensor core computes the transposed product, 64 outputs n for every warpgroup and all of m. One
warpgroup copies codes, scales and x ahead; the others decode (bfloat16: `decode.py`, E4M3: `decode_fp8.py`, as x is)
and multiply. The rows of x are read by every block, so a block has as many warpgroups as fit, which share them. Where
outputs are too few to fill the chip, blocks have parts of k, whose sums XLA adds. Where rows are many, blocks have
bands of them: a weight that is decoded anew for each costs less than one that is written and read.

On an H200, 8192 x 28672 with cold weights at m = 16, over BF16's product in the same run, the kernel alone: 2.28 with
scales converted by arithmetic and a wait behind every step, 2.37 with one product in flight, 2.57 with codes placed by
a multiplication (the integer pipe was 60 % busy) and scales from a table, 2.72 with scales in 16-byte loads, E4M3 3.1.
112 of 132 multiprocessors have a tile, and issue in 72 % of their cycles (E4M3: 57 %, at 70 % of the memory's rate).
With the permutation of x BF16 has 2.59, and E4M3 at m = 1, where blocks round x themselves, 2.9 to 3.0. Scales are
copied for several steps at a time, because 16 bytes of a row are less than memory is read in: where nothing is decoded
35.3 us in the place of 37.2, and with all 0.1 to 0.6 us of 36.6 to 39.5.

What is gone: equal shares of all steps on all multiprocessors ("stream-K", Osama et al. 2023) gained 3 % at first, and
lost 12 % in E4M3: parts of sums have to be written and added. Blocks on the other 20 that did the last 4 of 32 steps of
others' tiles, whose blocks waited for the sums (E4M3 46.0 us where it was 41.1, BF16 44.8 and 45.4). Clusters, whose
blocks shared a copy of x, gained nothing with 256 rows. Asking the cache for codes four steps before they are copied
takes 45.8 us where it was 40.9, so it is done where the ring is short alone. Codes that give their buffer back when
they are in registers, so that more is asked for ahead, take 41.1 us where it was 39.1. Blocks of 224 outputs on 128
multiprocessors, in the place of 256 on 112, gain nothing: 40.6 and 40.3.
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

from pallas_kernels.fp4_matmul import decode, decode_fp8, owned, rounded, shared, transposed
from pallas_kernels.fp4_matmul.transposed import CHUNK_BYTES, ROWS
from pallas_kernels.partition import varying

# Registers of a thread that copies, where those that compute need more than an even share.
_COPYING = 24
# Those where there are factors: x, codes, scales, their table, and factors.
_OPERANDS = 5


@dataclass(frozen=True)
class Config:
    """Sizes of the kernel.

    Attributes:
      warpgroups: that compute, each 64 outputs.
      stages: steps of k that are in flight.
      splits: blocks that share the steps of k.
      rows: of x, those of a block; None is all of them.
      x: "copied" step by step; in E4M3 also, of at most 8 rows, "rounded" by every block (`rounded.py`), or "shared": a
        cluster's blocks round rows for each other, and then copy them (`shared.py`).
      scale_steps: whose scales are copied together: 1, 2, 4 or 8, which divide a block's steps.
      prefetch: so many steps before a part of the weight is copied the cache asks for it; 0 is not at all.
      members: blocks of a cluster, which share rows.
    """

    warpgroups: int = 4
    stages: int = 4
    splits: int = 1
    rows: int | None = None
    x: Literal["copied", "rounded", "shared"] = "copied"
    scale_steps: int = 1
    prefetch: int = 0
    members: int = 1

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

    @property
    def scale_buffers(self) -> int:
        """So many that one is free when codes of its first step have room."""
        return 1 + -(-(self.stages - 1) // self.scale_steps)

    def weight_bytes(self, step: int) -> int:
        """Of shared memory, what codes and scales take."""
        return self.height * (self.stages * step // 2 + self.scale_buffers * self.scale_steps * owned.BLOCKS)

    def holds(self, m: int, *, evenly: bool = False) -> bool:
        """Whether registers suffice: half of m for sums, and 64 for what is decoded and what is multiplied."""
        return m // 2 + 64 <= (self.registers[0] if evenly else max(self.registers))


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

    Without factors those are still to be multiplied by what the table leaves, `FACTOR` of the module that made it.
    E4M3 is added in the tensor core's own accumulator, which keeps about 14 bits: `accumulation="fast"` of `matmul`.

    Args:
      config: sizes; its splits divide the steps of k.
      form: the format; "nvfp4" where x is E4M3.
      x: bfloat16 or float8_e4m3fn `[m, k]`, `permuted` by the module of its dtype; the rows of a block are a multiple
        of 8, at most 256, m is one of them, k one of `owned.step_of(form)`. Where blocks round it: bfloat16 as it is,
        at most 8 rows, which the sums have.
      codes: uint8 `[n, k / 2]`; n is a multiple of 64 times the warpgroups.
      scales: their bytes, uint8 `[n, k / block]`.
      table: that of the module.
      factors: float32 `[m]`, or `[1]`, which is multiplied by what the table leaves, and by the scales of rows that
        blocks round; None where x is multiplied in bfloat16 and k is split.
      out: bfloat16 or float32 `[rows, n]`, of the first rows of x, behind which is padding; None where k is split.
    """
    m, k, n = _rows_of(config, x), x.shape[1], codes.shape[0]
    tiles, bands = n // config.height, m // (config.rows or m)
    assert k // owned.step_of(form) % config.splits == 0, "blocks have equal parts of k"
    assert config.x != "rounded" or rounded.serves(k // config.splits), "a block rounds two steps of k at least"
    sizes = m, k, config.members, config.warpgroups
    assert config.x != "shared" or shared.serves(*sizes), "a block rounds a few rows of two steps at least"
    assert (out is None) == (config.splits > 1), "parts of k are added before they are rounded"
    written = jax.ShapeDtypeStruct((config.splits, n, m), jnp.float32)
    if out is not None:
        # Copies of numbers of four bytes move tiles of 8 rows, of which only the first may be cut.
        exactly = out.shape[0] <= 8 or out.dtype.itemsize == 2
        written = out if exactly else jax.ShapeDtypeStruct((m, n), out.dtype)
    operands = [x, codes, scales, table, *([] if factors is None else [factors])]
    clusters = {} if config.members == 1 else {"cluster": (config.members,), "cluster_names": ("member",)}
    product = plgpu.kernel(
        functools.partial(_kernel, config, form, len(operands)),
        out_type=[written, *(shared.buffers(m, k) if config.x == "shared" else [])],
        # Neighbouring blocks multiply the same part of the weight, which then comes from memory once.
        grid=(tiles * config.splits * bands // config.members,),
        grid_names=("block",),
        **clusters,
        num_threads=config.warpgroups + 1,
        thread_name="warpgroup",
        kernel_name=f"matmul_{form}_{x.dtype}",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(*operands)[0]
    product = varying(product, *operands)
    return product if out is None else product[: out.shape[0]]


def _rows_of(config: Config, x: Any) -> int:
    """Rows of x with those that blocks add."""
    return int(x.shape[0]) if config.x == "copied" else -(-int(x.shape[0]) // rounded.ROWS) * rounded.ROWS


def _kernel(config: Config, form: Any, inputs: int, *refs: Any) -> None:
    (x_gmem, _, _, table_gmem, *_), (out_gmem, *_) = refs[:inputs], refs[inputs:]
    m, step, copied = config.rows or _rows_of(config, x_gmem), owned.step_of(form), config.x != "rounded"
    steps = x_gmem.shape[1] // step // config.splits
    # With a single buffer its copy would wait for a release that comes behind it.
    stages = max(2, min(config.stages, steps))
    x_dtype = x_gmem.dtype if config.x == "copied" else jnp.dtype(jnp.float8_e4m3fn)
    width = CHUNK_BYTES // x_dtype.itemsize
    swizzled = lambda size: (plgpu.TilingTransform((8, size)), plgpu.SwizzleTransform(CHUNK_BYTES))

    def scope(**smem: Any) -> None:
        block = _Block(config, form, steps, stages, refs[:inputs], refs[inputs:], smem)
        lax.cond(lax.axis_index("warpgroup") == config.warpgroups, block.fill, block.consume)

    pl.run_scoped(
        scope,
        codes=plgpu.SMEM((stages, config.height, step // 2), jnp.uint8, transforms=swizzled(128)),
        scales=plgpu.SMEM(
            (config.scale_buffers, config.height, owned.BLOCKS * config.scale_steps),
            jnp.uint8,
            transforms=owned.scale_transforms(config.scale_steps),
        ),
        x=plgpu.SMEM((stages if copied else steps, m, step), x_dtype, transforms=swizzled(width)),
        table=plgpu.SMEM(table_gmem.shape, table_gmem.dtype),
        out=transposed.buffers(config.warpgroups, m, out_gmem.dtype) if config.splits == 1 else None,
        largest=None if config.x == "copied" else plgpu.SMEM((m // config.members, 4 * config.warpgroups), jnp.uint32),
        scales_of_rows=None if copied else plgpu.SMEM((m,), jnp.float32),
        ready=plgpu.Barrier(),
        met=None if config.x == "copied" else plgpu.Barrier(num_arrivals=config.warpgroups, num_barriers=2),
        filled=plgpu.Barrier(num_arrivals=3 if copied else 2, num_barriers=stages),
        consumed=plgpu.Barrier(num_arrivals=config.warpgroups, num_barriers=stages),
        collective_axes="warpgroup",
    )


@dataclass(frozen=True)
class _Block:
    """A block at work.

    Attributes:
      config, form: of the kernel.
      steps: of k, those of a block.
      stages: buffers of a step.
      gmem: references to global memory: x, codes, scales, table, and perhaps factors.
      made: the output, and where rows are shared these and their scales.
      smem: buffers and barriers, by the names that `_kernel` gives them.
    """

    config: Config
    form: Any
    steps: int
    stages: int
    gmem: Any
    made: Any
    smem: dict[str, Any]

    @property
    def rows(self) -> int:
        """Of x, how many this block multiplies."""
        return self.config.rows or _rows_of(self.config, self.gmem[0])

    @property
    def _place(self) -> tuple[Any, Any, Any]:
        """Which band of x, which tile of outputs and which part of k this block has."""
        bands, splits = _rows_of(self.config, self.gmem[0]) // self.rows, self.config.splits
        block = lax.axis_index("block")
        if self.config.members > 1:
            block = block * self.config.members + lax.axis_index("member")
        return lax.rem(block, bands), lax.div(block, bands * splits), lax.rem(lax.div(block, bands), splits)

    @property
    def _band(self) -> Any:
        """Of x, the rows that this block multiplies."""
        return pl.ds(self._place[0] * self.rows, self.rows)

    @property
    def _first_output(self) -> Any:
        return self._place[1] * self.config.height

    def _hand_over(self, registers: int, action: Any) -> None:
        """Give registers of the threads that copy to those that compute, where an even share is too few."""
        if not self.config.holds(self.rows, evenly=True):
            plgpu.set_max_registers(registers, action=action)

    def fill(self) -> None:
        """Copy the table, and codes, scales and x of each step: the work of one warpgroup."""
        smem, begun = self.smem, 0
        self._hand_over(_COPYING, "decrease")
        plgpu.copy_gmem_to_smem(self.gmem[3], smem["table"], smem["ready"])
        x_gmem = {"copied": self.gmem[0], "rounded": None, "shared": self.made[-2:][0]}[self.config.x]
        if self.config.x == "shared":
            # What has room without a wait comes while rows are rounded.
            shared.arrive()
            begun = self.stages - 1
            pl.loop(0, begun)(self._copy_weight)
            shared.wait()
            pl.loop(0, begun)(functools.partial(self._copy_x, x_gmem))

        @pl.loop(begun, self.steps)
        def _steps(k: Any) -> None:
            @pl.when(k >= self.stages - 1)
            def _wait() -> None:
                plgpu.barrier_wait(smem["consumed"].at[lax.rem(k, self.stages)])

            self._copy_weight(k)
            if x_gmem is not None:
                self._copy_x(x_gmem, k)

    def _copy_weight(self, k: Any) -> None:
        """Copy the codes of a step, and with those of the first of several their scales."""
        (_, codes_gmem, scales_gmem, *_), smem, together = self.gmem, self.smem, self.config.scale_steps
        columns, first, slot = owned.step_of(self.form) // 2, self._place[2] * self.steps, lax.rem(k, self.stages)
        outputs, filled = pl.ds(self._first_output, self.config.height), smem["filled"].at[slot]
        block = codes_gmem.at[outputs, pl.ds((first + k) * columns, columns)]
        plgpu.copy_gmem_to_smem(block, smem["codes"].at[slot], filled)

        def _scales() -> None:
            group, columns = lax.div(k, together), owned.BLOCKS * together
            block = scales_gmem.at[outputs, pl.ds((lax.div(first, together) + group) * columns, columns)]
            plgpu.copy_gmem_to_smem(block, smem["scales"].at[lax.rem(group, self.config.scale_buffers)], filled)

        if self.config.prefetch:
            self._prefetch(first, k)
        # With every step there is an arrival, so that those who wait need not branch.
        lax.cond(lax.rem(k, together) == 0, _scales, lambda: plgpu.barrier_arrive(filled))

    def _copy_x(self, x_gmem: Any, k: Any) -> None:
        step, slot = owned.step_of(self.form), lax.rem(k, self.stages)
        block = x_gmem.at[self._band, pl.ds((self._place[2] * self.steps + k) * step, step)]
        plgpu.copy_gmem_to_smem(block, self.smem["x"].at[slot], self.smem["filled"].at[slot])

    def _prefetch(self, first: Any, k: Any) -> None:
        """Have the cache ask for what is copied some steps behind k: of a row 256 bytes of codes and 128 of scales."""
        outputs = pl.ds(self._first_output, self.config.height)

        def ask(source: Any, of_step: int, size: int) -> None:
            every = size // of_step
            at = k + max(every, self.config.prefetch // every * every)

            @pl.when((lax.rem(k, every) == 0) & (at + every <= self.steps))
            def _ask() -> None:
                plgpu.async_prefetch(source.at[outputs, pl.ds((first + at) * of_step, size)])

        ask(self.gmem[1], owned.step_of(self.form) // 2, 256)
        ask(self.gmem[2], owned.BLOCKS, 128)

    def consume(self) -> None:
        """Decode and multiply the steps of 64 outputs, and write them: the work of each other warpgroup."""
        self._hand_over(self.config.registers[1], "increase")
        if self.config.x == "rounded":
            rounded.round_rows(self.gmem[0], self._place[2] * self.steps, self.smem, self._meet)
        if self.config.x == "shared":
            _, values, scales = self.made
            shared.round_rows(self.gmem[0], values, scales, self.smem["largest"], functools.partial(self._meet, 0))
            shared.arrive()
            shared.wait()
        plgpu.barrier_wait(self.smem["ready"])
        sums = plgpu.ACC((ROWS, self.rows), jnp.float32)
        places = owned.place(self.form), owned.scale_place(self.config.scale_steps)
        pl.run_scoped(functools.partial(self._multiply, places), sums)

    def _meet(self, time: int) -> None:
        plgpu.barrier_arrive(self.smem["met"].at[time])
        plgpu.barrier_wait(self.smem["met"].at[time])

    def _multiply(self, places: Any, acc: Any) -> None:
        warpgroup, x_smem = lax.axis_index("warpgroup"), self.smem["x"]
        step, width = owned.step_of(self.form), CHUNK_BYTES // x_smem.dtype.itemsize

        @pl.loop(0, self.steps)
        def _steps(k: Any) -> None:
            slot = lax.rem(k, self.stages)
            plgpu.barrier_wait(self.smem["filled"].at[slot])
            operand = self._operand(k, warpgroup * ROWS, places)
            x = x_smem.at[k if self.config.x == "rounded" else slot]
            for chunk in range(step // width):
                plgpu.wgmma(acc, operand(chunk), x.at[:, pl.ds(chunk * width, width)].T)
                # One product runs while the next operand is decoded; that before has read its registers.
                plgpu.wgmma_wait(1)
                if chunk == 0:
                    # Before the first step, too: with a branch here ptxas gives up running products beside the rest.
                    self._release(k - 1)

        plgpu.wgmma_wait(0)
        outputs, out_gmem = pl.ds(self._first_output + warpgroup * ROWS, ROWS), self.made[0]
        sums = acc[...] * self._factors() if len(self.gmem) == _OPERANDS else acc[...]
        if self.smem["out"] is None:
            out_gmem[self._place[2], outputs, self._band] = sums
        else:
            transposed.store(sums, self.smem["out"].at[warpgroup], out_gmem.at[self._band, outputs])

    def _release(self, k: Any) -> None:
        """Give the buffers of a step back.

        There is one arrival for step -1, for which `fill` waits before it fills the last of the buffers at first.
        """
        plgpu.barrier_arrive(self.smem["consumed"].at[lax.rem(k + self.stages, self.stages)])

    def _factors(self) -> Any:
        """What sums are multiplied by: a number, or one for each row of x."""
        factors = self.gmem[-1]
        if factors.shape == (1,) and self.smem["x"].dtype == jnp.bfloat16:
            return factors[0] * jnp.float32(decode.FACTOR[self.form])
        copied = self.config.x == "copied"
        # Straight from memory, which "optimized" loads, made for swizzled shared memory, refuse.
        rounded_here = self.made[-1] if self.config.x == "shared" else self.smem["scales_of_rows"]
        of_rows = factors.at[self._band] if copied else rounded_here
        found = plgpu.load(of_rows, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
        found = found if copied else found * (factors[0] * jnp.float32(1 / decode_fp8.FACTOR))
        return lax.broadcast_in_dim(found, (ROWS, self.rows), (1,))

    def _operand(self, k: Any, first_row: Any, places: Any) -> Any:
        """A function of the chunk: the weight's values of a step as the dtype of x."""
        own, table, (place, scale_place) = pl.ds(first_row, ROWS), self.smem["table"], places
        together, buffers = self.config.scale_steps, self.config.scale_buffers
        scales_smem = self.smem["scales"].at[lax.rem(lax.div(k, together), buffers), own]
        within = (owned.BLOCKS * lax.rem(k, together)).astype(jnp.uint32)
        scales = owned.load_scales(scales_smem, scale_place ^ within)
        codes = self.smem["codes"].at[lax.rem(k, self.stages), own]
        if self.smem["x"].dtype == jnp.float8_e4m3fn:
            return decode_fp8.decode(place, codes, scales, table)
        return decode.decode(self.form, place, codes, scales, table)
