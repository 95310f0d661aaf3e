"""The steps of an output tile on Hopper: one warpgroup copies, and two compute.

Two pipelines have the same interface. `Steps` is Pallas's own. `Ring` continues from
one output tile to the next for any number of steps, and a step gives its buffers back
by one barrier, whereas Pallas has one for each operand. Squares of 128 run 6 % faster
in the ring, vectors of 64 up to 7 % slower, so `benchmarks.tune` times both pipelines.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.plan import COMPUTE_WARPGROUPS, SWIZZLE, Index, Plan, Ref
from pallas_kernels.hopper.sums import Accumulated, Carry, Promoted


@dataclass(frozen=True)
class OutputTile:
    """One output tile.

    Attributes:
      loop: state of `plgpu.nd_loop` over the tiles of this block.
      column: index of the tile along n.
      operands: references to global memory: x, the halves of W, and the scales that are
        copied.
      buffers: the allocated `allocations` of the steps.
      sum: the sum to which the steps are added.
    """

    loop: plgpu.NDLoopInfo
    column: Index
    operands: Sequence[Ref]
    buffers: Any
    sum: Accumulated | Promoted


@dataclass(frozen=True)
class Slots:
    """A ring of buffers between the warpgroup that copies and those that compute.

    Steps are counted over all tiles of a block.

    Attributes:
      stages: number of slots; each holds the operands of a step.
      filled: barriers at which the copies to a slot arrive.
      consumed: barriers at which the readers of a slot arrive.
    """

    stages: int
    filled: Ref
    consumed: Ref

    def claim(self, step: Index) -> Index:
        """Return the slot of a step once it may be filled."""
        slot = lax.rem(step, self.stages)

        @pl.when(step >= self.stages)
        def _wait() -> None:
            plgpu.barrier_wait(self.consumed.at[slot])

        return slot

    def read(self, step: Index) -> Index:
        """Return the slot of a step once it is full."""
        slot = lax.rem(step, self.stages)
        plgpu.barrier_wait(self.filled.at[slot])
        return slot

    def release(self, slot: Index) -> None:
        """Give a slot back."""
        plgpu.barrier_arrive(self.consumed.at[slot])


def _specs(plan: Plan) -> list[plgpu.BlockSpec]:
    """Return the blocks of all operands that are copied, in steps of tile_k.

    They are x, the halves of W, and scales.
    """
    config = plan.config
    # Rows of shared memory are permuted in pieces of 16 bytes, or wgmma's reads would
    # hit the same banks. Copies and wgmma must agree on the width (PTX ISA, "Shared
    # Memory Matrix Layout").
    swizzle = min(config.tile_k, SWIZZLE)
    block = partial(plgpu.BlockSpec, memory_space=plgpu.SMEM, delay_release=0)
    matrix = partial(
        block,
        index_map=lambda step: (0, step),
        transforms=(
            plgpu.TilingTransform((8, swizzle)),
            plgpu.SwizzleTransform(swizzle),
        ),
    )
    x = matrix((config.tile_m, config.tile_k))
    multicast = ("member",) if config.cluster > 1 else ()
    w = matrix((config.tile_n, config.tile_k), collective_axes=multicast)
    widths = {
        "tensor": (),
        "square": (config.tile_m,),
        "vector": (config.tile_m, config.tile_n),
    }
    scales = [
        block((1, width), lambda step: (step, 0)) for width in widths[plan.scaling]
    ]
    return [x, *[w] * plan.halves, *scales]


@dataclass(frozen=True)
class Steps:
    """The steps of an output tile in the order of k, each with all operands.

    The pipeline is Pallas's own.

    Attributes:
      plan: plan of the kernel.
      count: number of steps of tile_k.
    """

    plan: Plan
    count: int

    def allocations(self, operands: Sequence[Ref]) -> Any:
        """Return the buffers that `pl.run_scoped` must allocate, once for all tiles."""

        def nothing(*args: object) -> None:
            pass

        return self._pipeline(nothing, nothing).get_allocations(*operands)

    def run(self, tile: OutputTile, lists: Sequence[Ref]) -> None:
        """Run all steps of one output tile in all warpgroups of a block.

        `lists` are the work lists of a plan that skips, see `Ring`.
        """
        state = None
        if self.plan.config.pipeline == "steady":
            phase = plgpu.PipelinePipeline
            is_last = tile.loop.local_index == tile.loop.num_local_steps - 1
            middle = jnp.where(is_last, int(phase.STOP), int(phase.STEADY))
            state = jnp.where(tile.loop.local_index == 0, int(phase.START), middle)
        halves = self.plan.halves

        def add(index: Sequence[Index], x: Ref, *rest: Any) -> Carry:
            *refs, carry = rest
            # A plan that promotes gives back each operand by a barrier of its own.
            count = (len(refs) - 1) // 2 if self.plan.promote else len(refs)
            consumed = refs[count:]

            def release() -> None:
                for barrier in consumed:
                    plgpu.barrier_arrive(barrier)

            w = refs[:halves]
            return tile.sum.add(index[0], x, w, refs[halves:count], release, carry)

        pipeline = self._pipeline(add, tile.sum.compute, state)
        pipeline(*tile.operands, allocations=tile.buffers)

    def _pipeline(
        self,
        body: Callable[..., Any],
        compute: Callable[..., None],
        state: Any = None,
    ) -> Any:
        """Return the pipeline: copies of all operands, and `body` on full buffers."""
        return plgpu.emit_pipeline_warp_specialized(
            body,
            grid=(self.count,),
            memory_registers=self.plan.memory_registers,
            wg_axis="warpgroup",
            num_compute_wgs=COMPUTE_WARPGROUPS,
            max_concurrent_steps=self.plan.config.stages,
            compute_context=compute,
            in_specs=_specs(self.plan),
            manual_consumed_barriers=self.plan.promote,
            pipeline_state=state,
        )


@dataclass(frozen=True)
class Ring(Steps):
    """The same steps through a ring of `stages` buffers with two barriers each.

    The ring is emptied after the last tile.

    If the plan skips, `lists` are the work of every tile of n, int32: the number of
    steps that need W_lo, `[n / tile_n]`, and the block of k of each step,
    `[n / tile_n, k / tile_k]`, with those steps first. Scales of squares are in that
    order. The other steps arrive at the barrier instead of copying W_lo. A branch
    inside a step costs registers (ptxas spills 400 bytes for either form of it), so the
    two kinds of steps are two loops. The list is the same in all blocks of a cluster,
    which share W.
    """

    @property
    def _stages(self) -> int:
        return min(self.plan.config.stages, self.count)

    def allocations(self, operands: Sequence[Ref]) -> dict[str, Any]:
        """Return the buffers that `pl.run_scoped` must allocate, once for all tiles."""
        specs = _specs(self.plan)
        barrier = partial(plgpu.Barrier, num_barriers=self._stages)
        if self.plan.config.cluster == 1:
            consumed = barrier(num_arrivals=COMPUTE_WARPGROUPS)
        else:
            consumed = plgpu.ClusterBarrier(
                collective_axes=("member",),
                num_arrivals=COMPUTE_WARPGROUPS,
                num_barriers=self._stages,
            )
        buffers = [
            plgpu.SMEM(
                (self._stages, *spec.block_shape),
                operand.dtype,
                transforms=spec.transforms,
            )
            for spec, operand in zip(specs, operands, strict=True)
        ]
        filled = barrier(num_arrivals=len(specs))
        return dict(buffers=buffers, filled=filled, consumed=consumed)

    def run(self, tile: OutputTile, lists: Sequence[Ref]) -> None:
        """Run all steps of one output tile in all warpgroups of a block."""
        complete = None
        if self.plan.skips:
            complete = lists[0][tile.column]  # which both sides read
        before = tile.loop.local_index * self.count
        slots = Slots(self._stages, tile.buffers["filled"], tile.buffers["consumed"])
        lax.cond(
            lax.axis_index("warpgroup") == COMPUTE_WARPGROUPS,
            partial(self._fill, tile, slots, before, complete, lists),
            partial(self._consume, tile, slots, before, complete),
        )

    def _fill(
        self,
        tile: OutputTile,
        slots: Slots,
        before: Index,
        complete: Index | None,
        lists: Sequence[Ref],
    ) -> None:
        """Copy the operands of all steps."""
        plgpu.set_max_registers(self.plan.memory_registers, action="decrease")
        residual = self.plan.halves  # W_lo is the operand after x and W_hi

        @pl.loop(0, self.count)
        def _steps(step: Index) -> None:
            k = step if complete is None else lists[1][tile.column, step]
            needed = None if complete is None else step < complete
            slot = slots.claim(before + step)
            for i in range(len(tile.operands)):
                copy = partial(self._copy, tile, slots, i, k, slot)
                if needed is None or i != residual:
                    copy()
                else:
                    # An arrival instead of the copy keeps the barrier's count.
                    arrive = partial(plgpu.barrier_arrive, slots.filled.at[slot])
                    lax.cond(needed, copy, arrive)

        # A block of a cluster must not end while other blocks still arrive at its
        # barriers.
        @pl.when(tile.loop.local_index == tile.loop.num_local_steps - 1)
        def _empty() -> None:
            @pl.loop(0, self._stages)
            def _wait(i: Index) -> None:
                slot = lax.rem(before + self.count + i, self._stages)
                plgpu.barrier_wait(slots.consumed.at[slot])

    def _copy(
        self,
        tile: OutputTile,
        slots: Slots,
        i: int,
        k: Index,
        slot: Index,
    ) -> None:
        """Copy block k of operand i to a slot."""
        spec = _specs(self.plan)[i]
        place = [
            pl.ds(index * size, size)
            for index, size in zip(spec.index_map(k), spec.block_shape, strict=True)
        ]
        plgpu.copy_gmem_to_smem(
            tile.operands[i].at[tuple(place)],
            tile.buffers["buffers"][i].at[slot],
            slots.filled.at[slot],
            collective_axes=spec.collective_axes or None,
        )

    def _consume(
        self,
        tile: OutputTile,
        slots: Slots,
        before: Index,
        complete: Index | None,
    ) -> None:
        """Multiply all steps."""
        halves = self.plan.halves
        plgpu.set_max_registers(self.plan.compute_registers, action="increase")

        def add(present: int, step: Index, carry: Carry) -> Carry:
            slot = slots.read(before + step)
            x, *rest = [buffer.at[slot] for buffer in tile.buffers["buffers"]]
            release = partial(slots.release, slot)
            w = rest[:present]
            return tile.sum.add(step, x, w, rest[halves:], release, carry)

        def add_all(carry: Carry) -> Carry:
            add_whole = partial(add, halves)
            if complete is None:
                return lax.fori_loop(0, self.count, add_whole, carry)
            carry = lax.fori_loop(0, complete, add_whole, carry)
            add_partial = partial(add, halves - 1)
            return lax.fori_loop(complete, self.count, add_partial, carry)

        tile.sum.compute(add_all)
