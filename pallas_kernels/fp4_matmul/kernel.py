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
With the permutation of x BF16 has 2.59, and E4M3 at m = 1, where blocks round x themselves, 2.9 to 3.0. What is copied
is bound by how much of a row is asked for at a time: scales of four steps in one copy take 35.3 us in the place of 37.2
where nothing is decoded, and codes of two steps 45.5 in the place of 47.4 on an H100, 2 KB of a row 43.7.

What is gone, with its times in LOG.md: equal shares of all steps on all multiprocessors ("stream-K", Osama et al. 2023)
and blocks that do the last steps of others' tiles, because parts of sums are written and added; clusters, whose blocks
share rows of x or round them for each other; asking the cache ahead where the ring is long; codes that give their
buffer back when they are in registers; blocks that begin at steps of their own; 224 outputs on 128 multiprocessors.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fp4_matmul import abreast_sums, decode, decode_fp8, owned, rounded, sizes, transposed
from pallas_kernels.fp4_matmul.sizes import BLOCKS, ROWS, Config
from pallas_kernels.fp4_matmul.transposed import CHUNK_BYTES
from pallas_kernels.partition import varying

# Operands where there are factors: x, codes, scales, their table, and factors.
_OPERANDS = 5


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
    assert (out is None) == (config.splits > 1), "parts of k are added before they are rounded"
    assert config.serves_abreast(k // owned.step_of(form)), "a pass has as many turns as there are stages"
    written = jax.ShapeDtypeStruct((config.splits, n, m), jnp.float32)
    if out is not None:
        # Copies of numbers of four bytes move tiles of 8 rows, of which only the first may be cut.
        exactly = out.shape[0] <= 8 or out.dtype.itemsize == 2
        written = out if exactly else jax.ShapeDtypeStruct((m, n), out.dtype)
    operands = [x, codes, scales, table, *([] if factors is None else [factors])]
    product = plgpu.kernel(
        functools.partial(_kernel, config, form, len(operands)),
        out_type=written,
        # Neighbouring blocks multiply the same part of the weight, which then comes from memory once.
        grid=(tiles * config.splits * bands,),
        grid_names=("block",),
        num_threads=config.warpgroups + 1,
        thread_name="warpgroup",
        kernel_name=f"matmul_{form}_{x.dtype}",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(*operands)
    product = varying(product, *operands)
    return product if out is None else product[: out.shape[0]]


def _rows_of(config: Config, x: Any) -> int:
    """Rows of x with those that blocks add."""
    return int(x.shape[0]) if config.x == "copied" else -(-int(x.shape[0]) // rounded.ROWS) * rounded.ROWS


def _kernel(config: Config, form: Any, inputs: int, *refs: Any) -> None:
    (x_gmem, _, _, table_gmem, *_), (out_gmem,) = refs[:inputs], refs[inputs:]
    m, step, copied = config.rows or _rows_of(config, x_gmem), owned.step_of(form), config.x == "copied"
    steps = x_gmem.shape[1] // step // config.splits
    # With a single buffer its copy would wait for a release that comes behind it.
    stages = max(2, min(config.stages, steps))
    x_dtype = x_gmem.dtype if copied else jnp.dtype(jnp.float8_e4m3fn)
    width = CHUNK_BYTES // x_dtype.itemsize
    swizzled = lambda size: (plgpu.TilingTransform((8, size)), plgpu.SwizzleTransform(CHUNK_BYTES))
    abreast, tall, groups = config.abreast, config.pass_height, config.warpgroups // config.abreast

    def scope(**smem: Any) -> None:
        block = _Block(config, form, steps, stages, refs[:inputs], out_gmem, smem)
        lax.cond(lax.axis_index("warpgroup") == config.warpgroups, block.fill, block.consume)

    pl.run_scoped(
        scope,
        codes=plgpu.SMEM((stages, tall, abreast * step // 2), jnp.uint8, transforms=swizzled(128)),
        scales=plgpu.SMEM(
            (config.scale_buffers, tall, BLOCKS * abreast * config.scale_steps),
            jnp.uint8,
            transforms=owned.scale_transforms(abreast * config.scale_steps),
        ),
        x=plgpu.SMEM((stages * abreast if copied else steps, m, step), x_dtype, transforms=swizzled(width)),
        table=plgpu.SMEM(table_gmem.shape, table_gmem.dtype),
        out=transposed.buffers(groups, m, out_gmem.dtype) if config.splits == 1 else None,
        largest=None if copied else plgpu.SMEM((m, 4 * config.warpgroups), jnp.uint32),
        scales_of_rows=None if copied else plgpu.SMEM((m,), jnp.float32),
        others=None if abreast == 1 else plgpu.SMEM((abreast - 1, groups, ROWS * m), jnp.float32),
        ready=plgpu.Barrier(),
        met=None if copied and abreast == 1 else plgpu.Barrier(num_arrivals=config.warpgroups, num_barriers=3),
        filled=plgpu.Barrier(num_arrivals=2 + copied * abreast, num_barriers=stages),
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
      out_gmem: the output there.
      smem: buffers and barriers, by the names that `_kernel` gives them.
    """

    config: Config
    form: Any
    steps: int
    stages: int
    gmem: Any
    out_gmem: Any
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
        return lax.rem(block, bands), lax.div(block, bands * splits), lax.rem(lax.div(block, bands), splits)

    @property
    def _band(self) -> Any:
        """Of x, the rows that this block multiplies."""
        return pl.ds(self._place[0] * self.rows, self.rows)

    @property
    def _turns(self) -> int:
        """Copies of codes for a pass; those of all passes are as many as steps."""
        return self.steps // self.config.abreast

    def _outputs(self, of_pass: Any) -> Any:
        """The first output of a pass."""
        return self._place[1] * self.config.height + of_pass * self.config.pass_height

    def _hand_over(self, registers: int, action: Any) -> None:
        """Give registers of the threads that copy to those that compute, where an even share is too few."""
        if not self.config.holds(self.rows, evenly=True):
            plgpu.set_max_registers(registers, action=action)

    def fill(self) -> None:
        """Copy the table, and codes, scales and x of each step: the work of one warpgroup."""
        smem = self.smem
        self._hand_over(sizes.COPYING, "decrease")
        plgpu.copy_gmem_to_smem(self.gmem[3], smem["table"], smem["ready"])

        @pl.loop(0, self.steps)
        def _steps(k: Any) -> None:
            @pl.when(k >= self.stages - 1)
            def _wait() -> None:
                plgpu.barrier_wait(smem["consumed"].at[lax.rem(k, self.stages)])

            # The first of the steps that this copy is of.
            first = self._place[2] * self.steps + lax.rem(k, self._turns) * self.config.abreast
            self._copy_weight(k, first)
            if self.config.x == "copied":
                self._copy_x(k, first)

    def _copy_weight(self, k: Any, first: Any) -> None:
        """Copy the codes of a turn, and with those of the first of several their scales."""
        (_, codes_gmem, scales_gmem, *_), smem = self.gmem, self.smem
        abreast, together, slot = self.config.abreast, self.config.scale_steps, lax.rem(k, self.stages)
        columns, filled = owned.step_of(self.form) // 2, smem["filled"].at[slot]
        outputs = pl.ds(self._outputs(lax.div(k, self._turns)), self.config.pass_height)
        block = codes_gmem.at[outputs, pl.ds(first * columns, abreast * columns)]
        plgpu.copy_gmem_to_smem(block, smem["codes"].at[slot], filled)

        def _scales() -> None:
            buffer, count = lax.rem(lax.div(k, together), self.config.scale_buffers), together * abreast
            block = scales_gmem.at[outputs, pl.ds(lax.div(first, count) * count * BLOCKS, count * BLOCKS)]
            plgpu.copy_gmem_to_smem(block, smem["scales"].at[buffer], filled)

        if self.config.prefetch:
            self._prefetch(first, k)
        # With every turn there is an arrival, so that those who wait need not branch.
        lax.cond(lax.rem(k, together) == 0, _scales, lambda: plgpu.barrier_arrive(filled))

    def _copy_x(self, k: Any, first: Any) -> None:
        step, abreast, slot = owned.step_of(self.form), self.config.abreast, lax.rem(k, self.stages)
        for i in range(abreast):
            block = self.gmem[0].at[self._band, pl.ds((first + i) * step, step)]
            plgpu.copy_gmem_to_smem(block, self.smem["x"].at[slot * abreast + i], self.smem["filled"].at[slot])

    def _prefetch(self, first: Any, k: Any) -> None:
        """Have the cache ask for what is copied some steps behind k: of a row 256 bytes of codes and 128 of scales."""
        outputs = pl.ds(self._outputs(0), self.config.height)

        def ask(source: Any, of_step: int, size: int) -> None:
            every = size // of_step
            ahead = max(every, self.config.prefetch // every * every)

            @pl.when((lax.rem(k, every) == 0) & (k + ahead + every <= self.steps))
            def _ask() -> None:
                plgpu.async_prefetch(source.at[outputs, pl.ds((first + ahead) * of_step, size)])

        ask(self.gmem[1], owned.step_of(self.form) // 2, 256)
        ask(self.gmem[2], BLOCKS, 128)

    def consume(self) -> None:
        """Decode and multiply the steps of 64 outputs, and write them: the work of each other warpgroup."""
        self._hand_over(self.config.registers[1], "increase")
        if self.config.x == "rounded":
            rounded.round_rows(self.gmem[0], self._place[2] * self.steps, self.smem, self._meet)
        plgpu.barrier_wait(self.smem["ready"])
        tiles = self.smem["codes"].shape[-1] // CHUNK_BYTES
        places = owned.place(self.form, tiles), owned.scale_place(self.config.abreast * self.config.scale_steps)

        @pl.loop(0, self.config.abreast)
        def _passes(of_pass: Any) -> None:
            multiply = functools.partial(self._multiply, places, of_pass)
            pl.run_scoped(multiply, plgpu.ACC((ROWS, self.rows), jnp.float32))

    def _meet(self, time: int) -> None:
        plgpu.barrier_arrive(self.smem["met"].at[time])
        plgpu.barrier_wait(self.smem["met"].at[time])

    def _multiply(self, places: Any, of_pass: Any, acc: Any) -> None:
        warpgroup, x_smem, abreast = lax.axis_index("warpgroup"), self.smem["x"], self.config.abreast
        group, which = lax.div(warpgroup, abreast), lax.rem(warpgroup, abreast)
        step, width = owned.step_of(self.form), CHUNK_BYTES // x_smem.dtype.itemsize

        @pl.loop(0, self._turns)
        def _turns(turn: Any) -> None:
            k = of_pass * self._turns + turn
            slot = lax.rem(k, self.stages)
            plgpu.barrier_wait(self.smem["filled"].at[slot])
            operand = self._operand(k, group * ROWS, which, places)
            x = x_smem.at[(turn if self.config.x == "rounded" else slot) * abreast + which]
            for chunk in range(step // width):
                plgpu.wgmma(acc, operand(chunk), x.at[:, pl.ds(chunk * width, width)].T)
                # One product runs while the next operand is decoded; that before has read its registers.
                plgpu.wgmma_wait(1)
                if chunk == 0:
                    # Before the first step, too: with a branch here ptxas gives up running products beside the rest.
                    self._release(k - 1)

        plgpu.wgmma_wait(0)
        outputs = pl.ds(self._outputs(of_pass) + group * ROWS, ROWS)
        if abreast == 1:
            self._write(outputs, group, acc[...])
            return

        @pl.when(which > 0)
        def _hand_on() -> None:
            abreast_sums.write(self.smem["others"].at[which - 1, group], acc[...])

        self._meet(2)

        @pl.when(which == 0)
        def _add() -> None:
            others = [self.smem["others"].at[i, group] for i in range(abreast - 1)]
            self._write(outputs, group, abreast_sums.add(acc[...], others))

    def _write(self, outputs: Any, group: Any, sums: Any) -> None:
        """Write sums of 64 outputs."""
        scaled = sums * self._factors() if len(self.gmem) == _OPERANDS else sums
        if self.smem["out"] is None:
            self.out_gmem[self._place[2], outputs, self._band] = scaled
        else:
            transposed.store(scaled, self.smem["out"].at[group], self.out_gmem.at[self._band, outputs])

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
        of_rows = factors.at[self._band] if copied else self.smem["scales_of_rows"]
        found = plgpu.load(of_rows, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
        found = found if copied else found * (factors[0] * jnp.float32(1 / decode_fp8.FACTOR))
        return lax.broadcast_in_dim(found, (ROWS, self.rows), (1,))

    def _operand(self, k: Any, first_row: Any, which: Any, places: Any) -> Any:
        """A function of the chunk: the weight's values of one of the steps of a turn as the dtype of x."""
        own, table, (place, scale_place) = pl.ds(first_row, ROWS), self.smem["table"], places
        abreast, together, buffers = self.config.abreast, self.config.scale_steps, self.config.scale_buffers
        scales_smem = self.smem["scales"].at[lax.rem(lax.div(k, together), buffers), own]
        within = (BLOCKS * (abreast * lax.rem(k, together) + which)).astype(jnp.uint32)
        scales = owned.load_scales(scales_smem, scale_place ^ within)
        codes = self.smem["codes"].at[lax.rem(k, self.stages), own]
        if abreast > 1:
            place = place + (owned.TILE_BYTES * which).astype(jnp.uint32)
        if self.smem["x"].dtype == jnp.float8_e4m3fn:
            return decode_fp8.decode(place, codes, scales, table)
        return decode.decode(self.form, place, codes, scales, table)
