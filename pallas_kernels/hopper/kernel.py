"""The FP8 product on Hopper: one program for a single or a residual weight, one accumulator for both halves.

A persistent grid of one cluster for every `cluster` multiprocessors walks the output tiles in a snake, so that
operands stay in the L2 cache. In each block one warpgroup only copies: it fills `stages` buffers of x, W_hi and W_lo
with the bulk copy engine while two compute warpgroups issue `wgmma` on the buffers that are full:

    fast : acc += x W_hiᵀ + x W_loᵀ          in the tensor core's accumulator over all of k
    full : acc  = that over tile_k;  total += acc     in float32 registers (the promotion of DeepSeek-V3, 2024)

W_lo shares the scale of W_hi, so one accumulator serves both and a residual product is one product over 2k: x is
read once for both halves. The blocks of a cluster take neighbouring rows and share W by multicast. The epilogue
scales, adds a bias, rounds to the output's dtype and stores through shared memory.

Which block of k a step takes, and whether it takes all operands, is up to `Steps`: every step takes all of them here,
and `skip_matmul` has steps that go without a residual of zeros.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import device_kind
from pallas_kernels.hopper.plan import COMPUTE_WARPGROUPS, EPILOGUE_ROW_BYTES, EPILOGUE_ROWS, SWIZZLE, Plan

MEMORY_REGISTERS = 40
X = dict(turns="free", memory=MEMORY_REGISTERS, prefetch=False, ring=False, chunks=1, squares=False)
import json, os
X.update(json.loads(os.environ.get("X", "{}")))


@dataclass(frozen=True)
class Tile:
    """What one output tile needs: the loop it is part of, its operands, and what it does with a step and a sum.

    Attributes:
      loop: of `plgpu.nd_loop`, over the tiles of this block.
      column: the index of the tile along n.
      operands: references to global memory of x, the halves of W and the scales that are copied.
      buffers: what the `allocations` of the steps became.
      add: `(step, x, halves of W, scales, release, carry) -> carry` of one step; it calls `release()` after its last
        read.
      compute: takes `(carry) -> carry`, all steps of the tile, and calls it once.
    """

    loop: Any
    column: Any
    operands: Sequence[Any]
    buffers: Any
    add: Any
    compute: Any


@dataclass(frozen=True)
class Steps:
    """The steps of an output tile in the order of k, each with all operands: Pallas's own pipeline.

    Attributes:
      plan: of the kernel.
      count: steps of tile_k.
    """

    plan: Plan
    count: int

    # Operands of its own, after all others, and what the kernel's name ends with.
    extra = 0
    suffix = ""

    def allocations(self, operands: Sequence[Any]) -> Any:
        """What `pl.run_scoped` must allocate for operands of these dtypes, once for all tiles."""
        nothing = lambda *_, **__: None
        return self._pipeline(nothing, nothing).get_allocations(*operands)

    def run(self, tile: Tile, own: Sequence[Any]) -> None:
        """All steps of one output tile, by all warpgroups of a block; `own` are the steps' own operands."""
        state = None
        if self.plan.config.pipeline == "steady":
            phase = plgpu.PipelinePipeline
            last = tile.loop.local_index == tile.loop.num_local_steps - 1
            middle = jnp.where(last, int(phase.STOP), int(phase.STEADY))
            state = jnp.where(tile.loop.local_index == 0, int(phase.START), middle)
        halves = self.plan.halves

        def body(index: Any, x_smem: Any, *rest: Any) -> Any:
            if not self.plan.promote:
                *w_smem, carry = rest
                return tile.add(index[0], x_smem, w_smem, (), lambda: None, carry)
            count = (len(rest) - 2) // 2
            consumed = rest[count:-1]

            def release() -> None:
                for barrier in consumed:
                    plgpu.barrier_arrive(barrier)

            return tile.add(index[0], x_smem, rest[:halves], rest[halves:count], release, rest[-1])

        self._pipeline(body, tile.compute, state)(*tile.operands, allocations=tile.buffers)

    def _pipeline(self, body: Any, compute: Any, state: Any = None) -> Any:
        """Copies of all operands, `count` times tile_k, and `body` on the buffers that are full."""
        return plgpu.emit_pipeline_warp_specialized(
            body,
            grid=(self.count,),
            memory_registers=X["memory"],
            wg_axis="warpgroup",
            num_compute_wgs=COMPUTE_WARPGROUPS,
            max_concurrent_steps=self.plan.config.stages,
            compute_context=compute,
            in_specs=specs(self.plan),
            manual_consumed_barriers=self.plan.promote,
            pipeline_state=state,
        )


@dataclass(frozen=True)
class Ring(Steps):
    """A ring of buffers that turns on from tile to tile, with one barrier for all operands of a step to be read."""

    @property
    def _stages(self) -> int:
        return min(self.plan.config.stages, self.count)

    def allocations(self, operands: Sequence[Any]) -> dict[str, Any]:
        of_operands = specs(self.plan)
        multicast = tuple({axis for spec in of_operands for axis in spec.collective_axes or ()})
        counts: dict[str, Any] = dict(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=self._stages)
        consumed = plgpu.ClusterBarrier(collective_axes=multicast, **counts) if multicast else plgpu.Barrier(**counts)
        return dict(
            buffers=[
                plgpu.SMEM((self._stages, *spec.block_shape), operand.dtype, transforms=spec.transforms)
                for spec, operand in zip(of_operands, operands, strict=True)
            ],
            filled=plgpu.Barrier(num_arrivals=len(of_operands), num_barriers=self._stages),
            consumed=consumed,
        )

    def run(self, tile: Tile, own: Sequence[Any]) -> None:
        scope, halves = tile.buffers, self.plan.halves
        before = tile.loop.local_index * self.count
        # A power of two of stages needs no division: slots go on from tile to tile.
        memory = X["memory"]

        def fill() -> None:
            plgpu.set_max_registers(memory, action="decrease")

            @pl.loop(0, self.count)
            def _fill(step: Any) -> None:
                slot = lax.rem(before + step, self._stages)

                @pl.when(before + step >= self._stages)
                def _wait() -> None:
                    plgpu.barrier_wait(scope["consumed"].at[slot])

                filled = scope["filled"].at[slot]
                for spec, operand, buffer in zip(specs(self.plan), tile.operands, scope["buffers"], strict=True):
                    corner = zip(spec.index_map(step), spec.block_shape, strict=True)
                    block = operand.at[tuple(pl.ds(index * size, size) for index, size in corner)]
                    axes = spec.collective_axes or None
                    plgpu.copy_gmem_to_smem(block, buffer.at[slot], filled, collective_axes=axes)

            # A block of a cluster must not end while others still arrive at its barriers.
            @pl.when(tile.loop.local_index == tile.loop.num_local_steps - 1)
            def _empty() -> None:
                @pl.loop(0, self._stages)
                def _wait(i: Any) -> None:
                    plgpu.barrier_wait(scope["consumed"].at[lax.rem(before + self.count + i, self._stages)])

        def consume() -> None:
            plgpu.set_max_registers((512 - memory) // COMPUTE_WARPGROUPS // 8 * 8, action="increase")

            def step(index: Any, carry: Any) -> Any:
                slot = lax.rem(before + index, self._stages)
                plgpu.barrier_wait(scope["filled"].at[slot])
                x_smem, *rest = (buffer.at[slot] for buffer in scope["buffers"])
                release = lambda: plgpu.barrier_arrive(scope["consumed"].at[slot])
                return tile.add(index, x_smem, rest[:halves], rest[halves:], release, carry)

            tile.compute(lambda carry: lax.fori_loop(0, self.count, step, carry))

        lax.cond(lax.axis_index("warpgroup") == COMPUTE_WARPGROUPS, fill, consume)


def call(plan: Plan, out_dtype: Any, *operands: jax.Array, steps: Any = Steps) -> jax.Array:
    """The product of x `[m, k]`, weights `[n, k]`, scale `[1]` and perhaps bias `[n]`, as `plan` says.

    With blocks of tile_k, after the scale: those of x, float32 `[k / tile_k, m]`, and those of the weight,
    `[k / tile_k, n / tile_n]` for squares and `[k / tile_k, n]` for vectors; the bias follows them. Then what `steps`
    reads itself.
    """
    (m, k), (n, _) = operands[0].shape, operands[1].shape
    if X["ring"] and plan.promote and steps is Steps:
        steps = Ring
    # Not by lax.platform_dependent: the interpreter calls back into Python, which that cannot lower for a GPU.
    interpret = device_kind() == "cpu"
    if interpret:
        # Two clusters show every path of the persistent grid.
        plan = replace(plan, blocks=2)
    halves, accumulation = "dual" if plan.halves == 2 else "single", "full" if plan.promote else "fast"
    return plgpu.kernel(
        functools.partial(_kernel, plan, steps(plan, k // plan.config.tile_k)),
        out_type=jax.ShapeDtypeStruct((m, n), out_dtype),
        # As many clusters as the chip holds at once. Each walks several output tiles, so copies of one tile may start
        # before the products of another end.
        grid=(plan.blocks,),
        grid_names=("block",),
        cluster=(plan.config.cluster,),
        cluster_names=("member",),
        # One warpgroup of 128 threads more than compute: it only copies (warp specialization, as in CUTLASS's kernels).
        num_threads=COMPUTE_WARPGROUPS + 1,
        thread_name="warpgroup",
        interpret=plgpu.InterpretGPUParams() if interpret else None,
        kernel_name=f"matmul_fp8_{halves}_{accumulation}_{plan.scaling}{steps.suffix}",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(*operands)


def _kernel(plan: Plan, steps: Any, x_gmem: Any, *refs: Any) -> None:
    """The body of one block: output tiles, and the copies and products of each."""
    config, halves = plan.config, plan.halves
    w_gmem, scale_gmem, out_gmem = refs[:halves], refs[halves], refs[-1]
    block_scales = refs[halves + 1 : halves + 3] if plan.scaling != "tensor" else ()
    own = refs[len(refs) - 1 - steps.extra : -1]
    bias_gmem = refs[-2] if plan.has_bias else None
    (m, _), n = x_gmem.shape, out_gmem.shape[1]
    tile_m, tile_n, cluster = config.tile_m, config.tile_n, config.cluster
    own_rows = tile_m // COMPUTE_WARPGROUPS
    m_tiles, n_tiles = m // (tile_m * cluster), n // tile_n
    # A promoting warpgroup works in waves of 64 rows: the float32 totals leave no registers for more.
    wave_rows = 64 if plan.promote else own_rows
    waves = own_rows // wave_rows
    # A square's scale is one number a step, read where it is used.
    copied_scales = block_scales[: 1 if plan.scaling == "square" else 2]

    @functools.partial(
        pl.run_scoped,
        buffers=steps.allocations([x_gmem, *w_gmem, *copied_scales]),
        out_smem=_epilogue_buffers(config.store_buffers, out_gmem.dtype),
        turns=plgpu.Barrier(num_arrivals=1, num_barriers=COMPUTE_WARPGROUPS),
        collective_axes="warpgroup",
    )
    def _scope(buffers: Any, out_smem: Any, turns: Any) -> None:
        warpgroup, member = lax.axis_index("warpgroup"), lax.axis_index("member")
        order = X["turns"]
        if plan.promote and order != "free":

            @pl.when(warpgroup == 1)
            def _first() -> None:
                plgpu.barrier_arrive(turns.at[0])

        def take_turn() -> None:
            if order != "free":
                plgpu.barrier_wait(turns.at[warpgroup])

        def give_turn(when: str) -> None:
            if order == when:
                plgpu.barrier_arrive(turns.at[1 - warpgroup])

        def multiply(acc: Any, x_smem: Any, w_smem: Any, wave: int) -> None:
            rows = x_smem.at[pl.ds(warpgroup * own_rows + wave * wave_rows, wave_rows)]
            # W is [n, k] in memory and wgmma reads both operands along k: the transpose is a descriptor, not a move.
            for half in w_smem:
                plgpu.wgmma(acc, rows, half.T)

        @plgpu.nd_loop((m_tiles * n_tiles,), collective_axes="block")
        def _tiles(loop: Any) -> None:
            # Neighbouring blocks take neighbouring tiles, so that panels of x and W are read from L2 by many at once.
            mi, ni = plgpu.planar_snake(loop.index[0], (m_tiles, n_tiles), "mn".index(config.inner), config.snake)
            mi = mi * cluster + member
            scale = scale_gmem[0]

            def store(parts: list[jax.Array], chunks: int = 1) -> None:
                first_row = mi * tile_m + warpgroup * own_rows
                _store(parts, bias_gmem, out_smem.at[warpgroup], out_gmem, (first_row, ni * tile_n), chunks)

            chunks = {"vector": X["chunks"], "square": tile_n // config.tile_k}.get(plan.scaling, 1)
            width = tile_n // chunks

            def find_factor(of_tile: Any, scales_smem: Any, wave: int, chunk: int) -> Any:
                if plan.scaling == "tensor":
                    return None
                rows = pl.ds(warpgroup * own_rows + wave * wave_rows, wave_rows)
                of_tile = of_tile[chunk] if plan.scaling == "square" else None
                return _factor(scales_smem, rows, of_tile, pl.ds(chunk * width, width), (wave_rows, width))

            def scale_of_tile(step: Any) -> Any:
                if plan.scaling != "square":
                    return None
                step = jnp.minimum(step, steps.count - 1)
                return tuple(block_scales[1][step, ni * chunks + chunk] for chunk in range(chunks))

            if plan.promote:
                add, compute = _promoting(
                    multiply, find_factor, store, scale, waves, (wave_rows, tile_n), take_turn, give_turn, chunks, scale_of_tile
                )
            else:
                add, compute = _accumulating(multiply, store, scale, (own_rows, tile_n))
            rows, columns = pl.ds(mi * tile_m, tile_m), pl.ds(ni * tile_n, tile_n)
            operands = [x_gmem.at[rows, :], *(half.at[columns, :] for half in w_gmem)]
            operands += [scales.at[:, at] for scales, at in zip(copied_scales, (rows, columns), strict=False)]
            steps.run(Tile(loop, ni, operands, buffers, add, compute), own)

    plgpu.wait_smem_to_gmem(0)


def specs(plan: Plan) -> list[Any]:
    """Blocks of x, of the halves of W and of the scales that are copied, in steps of tile_k."""
    config = plan.config
    # Rows of shared memory are permuted in pieces of 16 bytes, or wgmma's reads would meet in the same banks; copies
    # and wgmma must agree on the width (PTX ISA, "Shared Memory Matrix Layout").
    swizzle = min(config.tile_k, SWIZZLE)
    vector = dict(memory_space=plgpu.SMEM, delay_release=0)
    tiled = dict(**vector, transforms=(plgpu.TilingTransform((8, swizzle)), plgpu.SwizzleTransform(swizzle)))
    x_spec = plgpu.BlockSpec((config.tile_m, config.tile_k), lambda step: (0, step), **tiled)
    multicast = ("member",) if config.cluster > 1 else ()
    w_spec = plgpu.BlockSpec((config.tile_n, config.tile_k), lambda step: (0, step), collective_axes=multicast, **tiled)
    widths = {"tensor": (), "square": (config.tile_m,), "vector": (config.tile_m, config.tile_n)}[plan.scaling]
    return [x_spec, *[w_spec] * plan.halves] + [
        plgpu.BlockSpec((1, width), lambda step: (step, 0), **vector) for width in widths
    ]


def _factor(scales_smem: Any, rows: Any, of_tile: Any, columns: Any, shape: tuple[int, int]) -> jax.Array:
    """What a promoted sum is multiplied by: the scales of x's rows times that of W's tile, or those of its columns."""
    of_x = plgpu.load(scales_smem[0].at[0, rows], layout=plgpu.Layout.WGMMA.reduce(1))
    if of_tile is not None:
        return lax.broadcast_in_dim(of_x * of_tile, shape, (0,))
    of_w = plgpu.load(scales_smem[1].at[0, columns], layout=plgpu.Layout.WGMMA.reduce(0))
    return lax.broadcast_in_dim(of_x, shape, (0,)) * lax.broadcast_in_dim(of_w, shape, (1,))


def _accumulating(multiply: Any, store: Any, scale: Any, shape: tuple[int, int]) -> tuple[Any, Any]:
    """(add, compute) of fast accumulation: one accumulator over all of k."""

    def add(step: Any, x_smem: Any, w_smem: Any, scales_smem: Any, release: Any, acc: Any) -> Any:
        multiply(acc, x_smem, w_smem, 0)
        # The buffers are given back when this returns, so wgmma, which runs on by itself, must have read them.
        plgpu.wgmma_wait(0)
        return acc

    def compute(run: Any) -> None:
        def with_accumulator(acc: Any) -> None:
            run(acc)
            store([acc[...] * scale])

        pl.run_scoped(with_accumulator, plgpu.ACC(shape, jnp.float32))

    return add, compute


def _promoting(
    multiply: Any,
    find_factor: Any,
    store: Any,
    scale: Any,
    waves: int,
    shape: tuple[int, int],
    take: Any,
    give: Any,
    chunks: int,
    scale_of_tile: Any,
) -> tuple[Any, Any]:
    """(add, compute) of full accumulation: an accumulator for every tile_k, scaled and added to float32 totals."""
    height, width = shape[0], shape[1] // chunks
    prefetch = X["prefetch"]

    def add(step: Any, x_smem: Any, w_smem: Any, scales_smem: Any, release: Any, carry: Any) -> Any:
        totals, of_tile = carry
        following = None
        if prefetch:
            following = scale_of_tile(step + 1)
        else:
            of_tile = scale_of_tile(step)
        new = []
        for wave in range(waves):

            def partial_sum(acc: Any, wave: int = wave) -> jax.Array:
                multiply(acc, x_smem, w_smem, wave)
                give("issue")
                return acc[...]

            factors = [find_factor(of_tile, scales_smem, wave, 0)]
            take()
            part = pl.run_scoped(partial_sum, plgpu.ACC(shape, jnp.float32))
            give("done")
            factors += [find_factor(of_tile, scales_smem, wave, chunk) for chunk in range(1, chunks)]
            if wave == waves - 1:
                # The buffers are free before the additions, not after.
                release()
            for chunk, factor in enumerate(factors):
                piece = part if chunks == 1 else part[:, chunk * width : (chunk + 1) * width]
                new.append(totals[wave * chunks + chunk] + (piece if factor is None else piece * factor))
        return tuple(new), following

    def compute(run: Any) -> None:
        # In the accumulator's own layout, or every addition would move values between threads.
        zero = plgpu.layout_cast(jnp.zeros((height, width), jnp.float32), plgpu.Layout.WGMMA)
        totals, _ = run(((zero,) * waves * chunks, scale_of_tile(0) if prefetch else None))
        store([total * scale for total in totals], chunks)

    return add, compute


def _epilogue_buffers(count: int, dtype: Any) -> Any:
    """Pieces of the output for each warpgroup, so that one is filled while others are copied out."""
    columns = EPILOGUE_ROW_BYTES // jnp.dtype(dtype).itemsize
    transforms = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(EPILOGUE_ROW_BYTES))
    return plgpu.SMEM((COMPUTE_WARPGROUPS, count, EPILOGUE_ROWS, columns), dtype, transforms=transforms)


def _store(parts: list[jax.Array], bias_gmem: Any, out_smem: Any, out_gmem: Any, corner: tuple[Any, Any], chunks: int = 1) -> None:
    """Write `parts`, stacked along the rows, to `out_gmem` from `corner` on, through the buffers in turn.

    A tile has a multiple of as many pieces as there are buffers, so the turn goes on from tile to tile, and a buffer
    is free again when all but the newest `buffers - 1` copies have been read.
    """
    buffers, height, width = out_smem.shape
    row, column = corner
    count = 0
    for index, part in enumerate(parts):
        for i in range(0, part.shape[0], height):
            for j in range(0, part.shape[1], width):
                first = row + index // chunks * part.shape[0] + i
                columns = pl.ds(column + index % chunks * part.shape[1] + j, width)
                piece = part[i : i + height, j : j + width]
                if bias_gmem is not None:
                    # Straight from global memory, which "optimized" loads, made for swizzled shared memory, refuse.
                    bias = plgpu.load(bias_gmem.at[columns], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
                    piece = piece + lax.broadcast_in_dim(bias, (height, width), (1,))
                plgpu.wait_smem_to_gmem(buffers - 1, wait_read_only=True)
                buffer = out_smem.at[count % buffers]
                buffer[...] = piece.astype(out_gmem.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(buffer, out_gmem.at[pl.ds(first, height), columns])
                count += 1
