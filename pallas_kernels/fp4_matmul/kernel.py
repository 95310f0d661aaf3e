"""A product with an FP4 weight on Hopper.

For few rows of x it is bound by the bytes of the weight, which are read once.

    sums[n, m] = sum_k (code[n, k] * scale[n, k]) x[m, k]
    out[m, n]  = sums[n, m] * factor[m]                            unless k is split

The weight is the operand that `wgmma` takes from registers, because nothing else can be
decoded without a trip through shared memory. So the tensor core computes the transposed
product, 64 outputs n for every warpgroup and all of m. One warpgroup copies codes,
scales and x ahead; the others decode (`decode.py`) and multiply. The rows of x are read
by every block, so a block has as many warpgroups as fit, which share them. If there are
too few outputs to fill the chip, blocks have parts of k, whose sums XLA adds. If there
are many rows, blocks have bands of them: decoding a weight anew for each band costs
less than writing and reading it.

Copies are bound by how many bytes of a row they ask for at a time; `docs/decisions.md`
lists the attempts to do better.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, Ref, ShapeDtypeStruct, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.fp4_matmul import decode, rows
from pallas_kernels.fp4_matmul.decode import BLOCKS
from pallas_kernels.fp4_matmul.reference import E4M3_FACTOR
from pallas_kernels.hopper.sums import load_global
from pallas_kernels.scaling import Fp4Format
from pallas_kernels.specs import Shape, varying

# Outputs of a warpgroup.
OUTPUTS = 64
# Registers of a thread that copies, if those that compute need more than an even share.
COPYING = 24
# The widest swizzle of shared memory.
_SWIZZLE = 128


@dataclass(frozen=True)
class Config:
    """Sizes of the kernel.

    Attributes:
      warpgroups: number of warpgroups that compute, each 64 outputs.
      stages: number of steps of k in flight.
      splits: number of blocks that share the steps of k.
      rows: rows of x of a block; None is all of them.
      rounds_rows: whether every block rounds x to E4M3 itself (`rows.round_rows`), for
        at most 8 rows.
    """

    warpgroups: int = 4
    stages: int = 4
    splits: int = 1
    rows: int | None = None
    rounds_rows: bool = False

    @property
    def height(self) -> int:
        """Outputs n of a block."""
        return OUTPUTS * self.warpgroups

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread that computes: (an even share, the largest share).

        The second one is left if threads that copy give theirs away. A block has the
        registers that it was started with: a thread that asked for one more would wait
        for ever.
        """
        threads = self.warpgroups + 1
        even = 512 // threads // 8 * 8
        return even, min(240, (even * threads - COPYING) // self.warpgroups // 8 * 8)

    def weight_bytes(self, step: int) -> int:
        """Return the bytes of shared memory that codes and scales take."""
        return self.height * self.stages * (step // 2 + BLOCKS)

    def holds(self, m: int, *, evenly: bool = False) -> bool:
        """Return whether registers suffice: m / 2 for sums, and 64 to decode them."""
        return m // 2 + 64 <= (self.registers[0] if evenly else max(self.registers))


def call(
    config: Config,
    form: Fp4Format,
    x: Array,
    codes: Array,
    scales: Array,
    table: Array,
    factors: Array | None = None,
    out: ShapeDtypeStruct | None = None,
) -> Array:
    """Return the product, `out`, or sums to be added if k is split.

    Sums of parts of k are float32 `[splits, n, m]`. Sums without factors are still to
    be multiplied by `decode.BF16_FACTOR`. E4M3 is added in the tensor core's own
    accumulator, which keeps about 14 bits: `accumulation="fast"` of `matmul`.

    Args:
      config: sizes; its splits divide the steps of k, and blocks that round x have two
        steps at least.
      form: the format of the weight; "nvfp4" if x is E4M3.
      x: bfloat16 or float8_e4m3fn `[m, k]` in the order of `decode.permuted`. The rows
        of a block are a multiple of 8, at most 256; m is a multiple of them and k of
        `decode.step_of(form)`. For blocks that round it: bfloat16 as it is, at most 8
        rows.
      codes: uint8 `[n, k / 2]`; n is a multiple of 64 times the warpgroups.
      scales: their bytes, uint8 `[n, k / block]`.
      table: `decode.table_of`.
      factors: float32 `[m]`, or `[1]`, which is multiplied by the factor that the table
        leaves and by the scales of rows that blocks round; None if x is bfloat16 and k
        is split.
      out: bfloat16 or float32 `[rows, n]`, of the first rows of x, which padding
        follows; None if k is split.
    """
    m = _rows_of(config, x)
    k = x.shape[1]
    n = codes.shape[0]
    tiles = n // config.height
    bands = m // (config.rows or m)
    steps = k // decode.step_of(form)
    assert steps % config.splits == 0, "blocks have equal parts of k"
    assert (out is None) == (config.splits > 1), (
        "parts of k are added before they are rounded"
    )
    written = ShapeDtypeStruct((config.splits, n, m), jnp.float32)
    if out is not None:
        # Copies of numbers of four bytes move tiles of 8 rows, of which only the first
        # may be cut.
        exactly = out.shape[0] <= 8 or out.dtype.itemsize == 2
        written = out if exactly else ShapeDtypeStruct((m, n), out.dtype)
    operands = [x, codes, scales, table]
    if factors is not None:
        operands.append(factors)
    product = plgpu.kernel(
        partial(_kernel, config, form),
        out_type=written,
        # Neighbouring blocks multiply the same part of the weight, which then comes
        # from memory once.
        grid=(tiles * config.splits * bands,),
        grid_names=("block",),
        num_threads=config.warpgroups + 1,
        thread_name="warpgroup",
        kernel_name=f"matmul_{form}_{x.dtype}",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
    )(*operands)
    product = varying(product, *operands)
    return product if out is None else product[: out.shape[0]]


def _rows_of(config: Config, x: Array | Ref) -> int:
    """Return the number of multiplied rows: x's own, then zeros that blocks add."""
    m = int(x.shape[0])
    return -(-m // rows.ROWS) * rows.ROWS if config.rounds_rows else m


class _Operands(NamedTuple):
    """The operands of the kernel in global memory."""

    x: Ref
    codes: Ref
    scales: Ref
    table: Ref
    factors: Ref | None = None


def _kernel(config: Config, form: Fp4Format, *refs: Ref) -> None:
    *inputs, out = refs
    operands = _Operands(*inputs)
    step = decode.step_of(form)
    steps = operands.x.shape[1] // step // config.splits
    # The copy into a single buffer would wait for a release that comes after it.
    stages = max(2, min(config.stages, steps))

    def scope(**smem: Ref) -> None:
        block = _Block(config, form, steps, stages, operands, out, smem)
        copies = lax.axis_index("warpgroup") == config.warpgroups
        lax.cond(copies, block.fill, block.consume)

    rows_of_block = config.rows or _rows_of(config, operands.x)
    buffers: dict[str, object] = {
        "codes": plgpu.SMEM(
            (stages, config.height, step // 2), jnp.uint8, transforms=_swizzled(128)
        ),
        "scales": plgpu.SMEM((stages, config.height, BLOCKS), jnp.uint8),
        "table": plgpu.SMEM(operands.table.shape, operands.table.dtype),
        "ready": plgpu.Barrier(),
        "filled": plgpu.Barrier(
            num_arrivals=2 if config.rounds_rows else 3, num_barriers=stages
        ),
        "consumed": plgpu.Barrier(num_arrivals=config.warpgroups, num_barriers=stages),
    }
    if config.rounds_rows:
        buffers |= _rounding_buffers(config.warpgroups, (steps, rows_of_block, step))
    else:
        dtype = operands.x.dtype
        buffers["x"] = _buffer_of_x((stages, rows_of_block, step), dtype)
    if config.splits == 1:
        buffers["out"] = _output_buffers(config.warpgroups, rows_of_block, out.dtype)
    pl.run_scoped(scope, **buffers, collective_axes="warpgroup")


def _swizzled(
    size: int,
) -> tuple[plgpu.TilingTransform, plgpu.SwizzleTransform]:
    """Return the order of tiles of 8 rows of so many values, 128 bytes."""
    return plgpu.TilingTransform((8, size)), plgpu.SwizzleTransform(_SWIZZLE)


def _buffer_of_x(shape: Shape, dtype: DTypeLike) -> plgpu.SMEM:
    size = _SWIZZLE // jnp.dtype(dtype).itemsize
    return plgpu.SMEM(shape, dtype, transforms=_swizzled(size))


def _rounding_buffers(
    warpgroups: int, shape: tuple[int, int, int]
) -> dict[str, object]:
    """Return the buffers of a block that rounds x: all its values, and their scales."""
    _, m, _ = shape
    return {
        "x": _buffer_of_x(shape, jnp.float8_e4m3fn),
        "largest": plgpu.SMEM((m, 4 * warpgroups), jnp.uint32),
        "scales_of_rows": plgpu.SMEM((m,), jnp.float32),
        "met": plgpu.Barrier(num_arrivals=warpgroups, num_barriers=2),
    }


def piece(m: int) -> int:
    """Return how many of m rows a warpgroup writes at a time.

    A quarter of them if that is a multiple of 8, else 16 or 8.
    """
    for count in (m // 4, 16):
        if count and count % 8 == 0 and m % count == 0:
            return count
    return 8


def _output_buffers(warpgroups: int, m: int, dtype: DTypeLike) -> plgpu.SMEM:
    """Return a buffer for each warpgroup: a piece of the rows times 64 outputs."""
    width = _SWIZZLE // jnp.dtype(dtype).itemsize
    # 64 outputs that are as wide as the swizzle need no tiles, so a copy may end at any
    # row of the output.
    tiles = () if width == OUTPUTS else (plgpu.TilingTransform((8, width)),)
    return plgpu.SMEM(
        (warpgroups, piece(m), OUTPUTS),
        dtype,
        transforms=(*tiles, plgpu.SwizzleTransform(_SWIZZLE)),
    )


@dataclass(frozen=True)
class _Block:
    """A block at work, which takes `steps` of k through `stages` buffers.

    `smem` has buffers and barriers, by the names that `_kernel` gives them.
    """

    config: Config
    form: Fp4Format
    steps: int
    stages: int
    gmem: _Operands
    out_gmem: Ref
    smem: dict[str, Ref]

    @property
    def rows(self) -> int:
        """Rows of x that this block multiplies."""
        return self.config.rows or _rows_of(self.config, self.gmem.x)

    @property
    def _place(self) -> tuple[Array, Array, Array]:
        """The band of x, the tile of outputs and the part of k that this block has."""
        bands = _rows_of(self.config, self.gmem.x) // self.rows
        splits = self.config.splits
        block = lax.axis_index("block")
        return (
            lax.rem(block, bands),
            lax.div(block, bands * splits),
            lax.rem(lax.div(block, bands), splits),
        )

    @property
    def _band(self) -> pl.Slice:
        return pl.ds(self._place[0] * self.rows, self.rows)

    def _hand_over(self, registers: int, action: str) -> None:
        """Give registers of threads that copy to others if an even share is too few."""
        if not self.config.holds(self.rows, evenly=True):
            plgpu.set_max_registers(registers, action=action)

    def fill(self) -> None:
        """Copy the table, and codes, scales and x of each step.

        This is the work of one warpgroup.
        """
        smem = self.smem
        self._hand_over(COPYING, "decrease")
        plgpu.copy_gmem_to_smem(self.gmem.table, smem["table"], smem["ready"])
        step = decode.step_of(self.form)
        outputs = pl.ds(self._place[1] * self.config.height, self.config.height)

        @pl.loop(0, self.steps)
        def _steps(k: Array) -> None:
            @pl.when(k >= self.stages - 1)
            def _wait() -> None:
                plgpu.barrier_wait(smem["consumed"].at[lax.rem(k, self.stages)])

            slot = lax.rem(k, self.stages)
            at = self._place[2] * self.steps + k
            codes = pl.ds(at * (step // 2), step // 2)
            sources = {
                "codes": self.gmem.codes.at[outputs, codes],
                "scales": self.gmem.scales.at[outputs, pl.ds(at * BLOCKS, BLOCKS)],
            }
            if not self.config.rounds_rows:
                sources["x"] = self.gmem.x.at[self._band, pl.ds(at * step, step)]
            for name, source in sources.items():
                plgpu.copy_gmem_to_smem(
                    source, smem[name].at[slot], smem["filled"].at[slot]
                )

    def consume(self) -> None:
        """Decode and multiply the steps of 64 outputs, and write them.

        This is the work of each other warpgroup.
        """
        self._hand_over(self.config.registers[1], "increase")
        if self.config.rounds_rows:
            first = self._place[2] * self.steps
            rows.round_rows(self.gmem.x, first, self.smem, self._meet)
        plgpu.barrier_wait(self.smem["ready"])
        multiply = partial(self._multiply, decode.places(self.form))
        pl.run_scoped(multiply, plgpu.ACC((OUTPUTS, self.rows), jnp.float32))

    def _meet(self, time: int) -> None:
        plgpu.barrier_arrive(self.smem["met"].at[time])
        plgpu.barrier_wait(self.smem["met"].at[time])

    def _multiply(self, places: tuple[Array, Array], acc: Ref) -> None:
        warpgroup = lax.axis_index("warpgroup")
        own = pl.ds(warpgroup * OUTPUTS, OUTPUTS)
        x_smem = self.smem["x"]
        step = decode.step_of(self.form)
        size = _SWIZZLE // x_smem.dtype.itemsize

        @pl.loop(0, self.steps)
        def _steps(k: Array) -> None:
            slot = lax.rem(k, self.stages)
            plgpu.barrier_wait(self.smem["filled"].at[slot])
            operand = decode.decoder(
                self.form,
                str(x_smem.dtype),
                places,
                self.smem["codes"].at[slot, own],
                self.smem["scales"].at[slot, own],
                self.smem["table"],
            )
            x = x_smem.at[k if self.config.rounds_rows else slot]
            for chunk in range(step // size):
                of_chunk = x.at[:, pl.ds(chunk * size, size)]
                plgpu.wgmma(acc, operand(chunk), of_chunk.T)
                # One product runs while the next operand is decoded; the one before has
                # read its registers.
                plgpu.wgmma_wait(1)
                if chunk == 0:
                    # The buffers of the step before are free. "Step -1" arrives, too,
                    # because `fill` waits for it before it fills the last of the
                    # buffers for the first time: with a branch here ptxas would wait
                    # for every product.
                    before = lax.rem(k - 1 + self.stages, self.stages)
                    plgpu.barrier_arrive(self.smem["consumed"].at[before])

        plgpu.wgmma_wait(0)
        self._write(warpgroup, acc[...])

    def _write(self, warpgroup: Array, sums: Array) -> None:
        """Write sums of 64 outputs."""
        if self.gmem.factors is not None:
            sums = sums * self._factors(self.gmem.factors)
        first = self._place[1] * self.config.height + warpgroup * OUTPUTS
        outputs = pl.ds(first, OUTPUTS)
        if self.config.splits > 1:
            self.out_gmem[self._place[2], outputs, self._band] = sums
            return
        out_smem = self.smem["out"].at[warpgroup]
        _store(sums, out_smem, self.out_gmem.at[self._band, outputs])

    def _factors(self, factors: Ref) -> Array:
        """Return the factors of the sums: a number, or one for each row of x."""
        if factors.shape == (1,) and self.smem["x"].dtype == jnp.bfloat16:
            return factors[0] * jnp.float32(decode.BF16_FACTOR[self.form])
        if self.config.rounds_rows:
            of_rows = self.smem["scales_of_rows"]
        else:
            of_rows = factors.at[self._band]
        found = load_global(of_rows, 0)
        if self.config.rounds_rows:
            found = found * (factors[0] * jnp.float32(1 / E4M3_FACTOR))
        return lax.broadcast_in_dim(found, (OUTPUTS, self.rows), (1,))


def _store(sums: Array, out_smem: Any, out_gmem: Ref) -> None:
    """Write 64 outputs of all rows, `sums` `[64, m]`, piece by piece.

    Copies leave out rows that the output lacks.
    """
    count = out_smem.shape[0]
    out = sums.astype(out_gmem.dtype)
    out = plgpu.layout_cast(out, plgpu.Layout.WGMMA_TRANSPOSED)
    for first in range(0, sums.shape[1], count):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        out_smem.T[...] = out[:, first : first + count]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, out_gmem.at[pl.ds(first, count)])
    plgpu.wait_smem_to_gmem(0)
