"""A product with an FP4 weight on Hopper for few rows of x: bound by the bytes of the weight, which are read once.

    sums[split, n, m] = sum over a part of k of (code[n, k] * scale[n, k]) x[m, k]
    out[m, n]         = sums[n, m] * factor[m]                                        where k is not split

The weight is the operand that `wgmma` takes from registers, because nothing else can be decoded without a trip through
shared memory: the tensor core computes the transposed product, 64 outputs n for every warpgroup and all of m. One
warpgroup copies codes, scales and x ahead; the others decode (bfloat16: `decode.py`, E4M3: `decode_fp8.py`, as x is)
and multiply. The rows of x are read by every block, so a block has as many warpgroups as fit, which share them, and
blocks of a cluster share one copy. Where the tiles of n do not fill the chip, blocks split k and their sums are added
behind the kernel, in a fixed order.

On an H200, 8192 x 28672 with cold weights at m = 16, over BF16's product in the same run: 2.28 with scales converted by
arithmetic and a wait behind every step, 2.37 with one product in flight, 2.57 with codes placed by a multiplication
(the integer pipe was 60 % busy) and scales from a table, 2.72 with scales in 16-byte loads. What is left: 3.5
instructions a value, at 62 % of what the integer pipe could do. E4M3 needs 1.9, and has not run on a GPU yet.
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

from pallas_kernels.fp4_matmul import decode, decode_fp8

ROWS = 64
BLOCKS = 16
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
      splits: parts of k.
      cluster: blocks along n that share one copy of x.
    """

    warpgroups: int = 4
    stages: int = 4
    splits: int = 1
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


def call(
    config: Config,
    form: Literal["nvfp4", "mxfp4"],
    x: jax.Array,
    codes: jax.Array,
    scales: jax.Array,
    table: jax.Array | np.ndarray,
    factors: jax.Array | None = None,
    out_dtype: Any = jnp.float32,
) -> jax.Array:
    """The sums, float32 `[splits, n, m]`, or with factors the product, `[m, n]` in `out_dtype`.

    Sums are still to be multiplied by what the table leaves, `FACTOR` of the module that made it, and by `outer`.
    E4M3 is added in the tensor core's own accumulator, which keeps about 14 bits: `accumulation="fast"` of `matmul`.

    Args:
      config: sizes; k is split only without factors.
      form: the format; "nvfp4" where x is E4M3.
      x: bfloat16 or float8_e4m3fn `[m, k]`, `permuted` by the module of its dtype; m is a multiple of 8 times the
        cluster, at most 256, k one of `splits * step_of(form)`.
      codes: uint8 `[n, k / 2]`; n is a multiple of 64 times the warpgroups times the cluster.
      scales: their bytes, uint8 `[n, k / block]`.
      table: that of the module.
      factors: float32 `[m]`.
      out_dtype: bfloat16 or float32.
    """
    (m, k), n = x.shape, codes.shape[0]
    assert factors is None or config.splits == 1, "parts of k are added before they are scaled"
    sums = jax.ShapeDtypeStruct((config.splits, n, m), jnp.float32)
    return plgpu.kernel(
        functools.partial(_kernel, config, form, k // (step_of(form) * config.splits)),
        out_type=sums if factors is None else jax.ShapeDtypeStruct((m, n), out_dtype),
        grid=(n // (config.height * config.cluster), config.splits),
        grid_names=("tile", "split"),
        cluster=(config.cluster,),
        cluster_names=("member",),
        num_threads=config.warpgroups + 1,
        thread_name="warpgroup",
        kernel_name=f"matmul_{form}_{x.dtype}",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(x, codes, scales, table, *([] if factors is None else [factors]))


def step_of(form: str) -> int:
    """How much of k a step takes: 16 blocks, whose scales are the 16 bytes of a row that are copied at least."""
    return BLOCKS * (16 if form == "nvfp4" else 32)


def _kernel(config: Config, form: Any, steps: int, *refs: Any) -> None:
    x_gmem, _, _, table_gmem, *factors_gmem, out_gmem = refs
    m, step, stages = x_gmem.shape[0], step_of(form), min(config.stages, steps)
    width = CHUNK_BYTES // x_gmem.dtype.itemsize
    swizzled = lambda size: (plgpu.TilingTransform((8, size)), plgpu.SwizzleTransform(CHUNK_BYTES))
    released: dict[str, Any] = dict(num_arrivals=config.warpgroups, num_barriers=stages)
    together: Any = functools.partial(plgpu.ClusterBarrier, collective_axes=("member",))

    def scope(**smem: Any) -> None:
        block = _Block(config, form, steps, stages, refs, smem)
        lax.cond(lax.axis_index("warpgroup") == config.warpgroups, block.fill, block.consume)

    pl.run_scoped(
        scope,
        codes=plgpu.SMEM((stages, config.height, step // 2), jnp.uint8, transforms=swizzled(128)),
        scales=plgpu.SMEM((stages, config.height, BLOCKS), jnp.uint8),
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
      steps: of this block's part of k.
      stages: buffers of a step.
      gmem: references to global memory: x, codes, scales, table, perhaps factors, and the output.
      smem: buffers and barriers, by the names that `_kernel` gives them.
    """

    config: Config
    form: Any
    steps: int
    stages: int
    gmem: Any
    smem: dict[str, Any]

    @property
    def _first_row(self) -> Any:
        tile = lax.axis_index("tile") * self.config.cluster + lax.axis_index("member")
        return tile * self.config.height

    def _hand_over(self, registers: int, action: Any) -> None:
        """Give registers of the threads that copy to those that compute, where an even share is too few."""
        if not self.config.holds(self.gmem[0].shape[0], evenly=True):
            plgpu.set_max_registers(registers, action=action)

    def fill(self) -> None:
        """Copy the table, and codes, scales and x of each step: the work of one warpgroup."""
        x_gmem, codes_gmem, scales_gmem, table_gmem, *_ = self.gmem
        smem, filled, consumed = self.smem, self.smem["filled"], self.smem["consumed"]
        step, first_step = step_of(self.form), lax.axis_index("split") * self.steps
        rows, shared = pl.ds(self._first_row, self.config.height), "member" if self.config.cluster > 1 else None
        # (global memory, rows, how many columns a step takes, where to, which blocks share the copy)
        copies = (
            (codes_gmem, rows, step // 2, smem["codes"], None), (scales_gmem, rows, BLOCKS, smem["scales"], None),
            (x_gmem, slice(None), step, smem["x"], shared),
        )  # fmt: skip
        self._hand_over(_COPYING, "decrease")
        plgpu.copy_gmem_to_smem(table_gmem, smem["table"], smem["ready"])

        @pl.loop(0, self.steps)
        def _steps(k: Any) -> None:
            slot = lax.rem(k, self.stages)

            @pl.when(k >= self.stages)
            def _wait() -> None:
                plgpu.barrier_wait(consumed.at[slot])

            for source, at, columns, buffer, axes in copies:
                block = source.at[at, pl.ds((first_step + k) * columns, columns)]
                plgpu.copy_gmem_to_smem(block, buffer.at[slot], filled.at[slot], collective_axes=axes)

        if shared is not None:
            # A block of a cluster must not end while the other still arrives at its barriers.
            @pl.loop(0, self.stages)
            def _empty(i: Any) -> None:
                plgpu.barrier_wait(consumed.at[lax.rem(self.steps + i, self.stages)])

    def consume(self) -> None:
        """Decode and multiply the steps of 64 outputs, and write them: the work of each other warpgroup."""
        self._hand_over(self.config.registers[1], "increase")
        plgpu.barrier_wait(self.smem["ready"])
        pl.run_scoped(self._multiply, plgpu.ACC((ROWS, self.gmem[0].shape[0]), jnp.float32))

    def _multiply(self, acc: Any) -> None:
        warpgroup, x_smem = lax.axis_index("warpgroup"), self.smem["x"]
        step, width = step_of(self.form), CHUNK_BYTES // x_smem.dtype.itemsize
        place = decode_fp8.place() if x_smem.dtype == jnp.float8_e4m3fn else None

        @pl.loop(0, self.steps)
        def _steps(k: Any) -> None:
            slot = lax.rem(k, self.stages)
            plgpu.barrier_wait(self.smem["filled"].at[slot])
            operand = self._operand(slot, warpgroup * ROWS, place)
            for chunk in range(step // width):
                plgpu.wgmma(acc, operand(chunk), x_smem.at[slot, :, pl.ds(chunk * width, width)].T)
                # One product runs while the next operand is decoded; that before has read its registers.
                plgpu.wgmma_wait(1)
                if chunk == 0:

                    @pl.when(k > 0)
                    def _release_before() -> None:
                        self._release(k - 1)

        plgpu.wgmma_wait(0)
        if self.config.cluster > 1:
            self._release(self.steps - 1)
        rows, out_gmem = pl.ds(self._first_row + warpgroup * ROWS, ROWS), self.gmem[-1]
        if self.smem["out"] is None:
            out_gmem[lax.axis_index("split"), rows] = acc[...]
        else:
            _store(acc[...], self.gmem[-2], self.smem["out"].at[warpgroup], out_gmem, rows)

    def _release(self, k: Any) -> None:
        """Give the buffers of a step back: all threads of a warpgroup do, or two for all of them in a cluster."""
        if self.config.cluster > 1:
            # They must not speak for warps that still load codes.
            plgpu.inline_mgpu()(lambda context: mgpu.utils.warpgroup_barrier())()
        plgpu.barrier_arrive(self.smem["consumed"].at[lax.rem(k, self.stages)])

    def _operand(self, slot: Any, first_row: Any, place: Any) -> Any:
        """A function of the chunk: the weight's values as the dtype of x."""
        codes, scales, table = self.smem["codes"], self.smem["scales"], self.smem["table"]
        own = pl.ds(first_row, ROWS)
        if place is not None:
            return decode_fp8.decode(place, codes.at[slot, own], scales.at[slot, own], table)
        loaded = plgpu.load(codes.at[slot, own], layout=plgpu.Layout.WGMMA_8BIT, optimized=False)
        return decode.decode(loaded, scales.at[slot], table, self.form, first_row)


def _out_buffers(config: Config, m: int, dtype: Any) -> Any:
    """A piece of the output for each warpgroup: some rows of m times 64 outputs."""
    transforms = (plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM((config.warpgroups, config.piece(m), ROWS), dtype, transforms=transforms)


def _store(sums: jax.Array, factors_gmem: Any, out_smem: Any, out_gmem: Any, rows: Any) -> None:
    """Write the products of the sums of 64 outputs and the factors, transposed, in pieces of m through a buffer."""
    # Straight from global memory, which "optimized" loads, made for swizzled shared memory, refuse.
    factor = plgpu.load(factors_gmem, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
    out = (sums * lax.broadcast_in_dim(factor, sums.shape, (1,))).astype(out_gmem.dtype)
    out, piece = plgpu.layout_cast(out, plgpu.Layout.WGMMA_TRANSPOSED), out_smem.shape[0]
    for first in range(0, sums.shape[1], piece):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        out_smem.T[...] = out[:, first : first + piece]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, out_gmem.at[pl.ds(first, piece), rows])
    plgpu.wait_smem_to_gmem(0)
