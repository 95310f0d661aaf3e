"""A warp-specialized pipeline whose later steps go without one operand, for residual weights that are partly zero.

`plgpu.emit_pipeline_warp_specialized` copies every operand in every step, in the order of its grid. Here, too, one
warpgroup copies and the others compute, with a ring of `stages` buffers and two barriers for each, but a list says
which blocks a step takes, and only the first steps have all operands. In the others a barrier is arrived at in place
of the copy, which keeps the count of arrivals. A branch inside a step costs registers (ptxas spills 400 bytes either
way of writing it), so the two kinds of steps are two loops, one after the other. The ring turns on from loop to loop
and from one output tile to the next, for any number of steps: only after the last tile is it emptied.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.kernel import MEMORY_REGISTERS, Tile, specs
from pallas_kernels.hopper.plan import COMPUTE_WARPGROUPS, Plan

# A multiprocessor has 512 registers for each of a warpgroup's 128 threads; they are given out in eights.
COMPUTE_REGISTERS = (512 - MEMORY_REGISTERS) // COMPUTE_WARPGROUPS // 8 * 8


@dataclass(frozen=True)
class SkippingSteps:
    """The steps of an output tile, those with a residual first; takes the place of `hopper.kernel.Steps`.

    Its own operands are the work list of every tile of n, int32: how many of its steps need W_lo, `[n / tile_n]`, and
    which block of k each step multiplies, those that need W_lo first, `[n / tile_n, k / tile_k]`. Scales of squares are
    in that order.

    Attributes:
      plan: of the kernel, with two halves.
      count: steps of tile_k of every output tile.
    """

    plan: Plan
    count: int

    extra = 2
    suffix = "_nonzero"

    @property
    def _stages(self) -> int:
        return min(self.plan.config.stages, self.count)

    @property
    def _optional(self) -> int:
        """The index of W_lo among the operands: after x and W_hi."""
        return self.plan.halves

    def allocations(self, operands: Sequence[Any]) -> dict[str, Any]:
        """What `pl.run_scoped` must allocate for operands of these dtypes, once for all tiles."""
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
        """All steps of one output tile, by all warpgroups of a block."""
        # The work list is the same in all blocks of a cluster, which share W.
        complete, scope, halves = own[0][tile.column], tile.buffers, self.plan.halves
        before = tile.loop.local_index * self.count

        def fill() -> None:
            plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")

            @pl.loop(0, self.count)
            def _fill(step: Any) -> None:
                k, slot = own[1][tile.column, step], lax.rem(before + step, self._stages)

                @pl.when(before + step >= self._stages)
                def _wait() -> None:
                    plgpu.barrier_wait(scope["consumed"].at[slot])

                self._copy(k, step < complete, slot, tile.operands, scope)

            # A block of a cluster must not end while others still arrive at its barriers.
            @pl.when(tile.loop.local_index == tile.loop.num_local_steps - 1)
            def _empty() -> None:
                @pl.loop(0, self._stages)
                def _wait(i: Any) -> None:
                    plgpu.barrier_wait(scope["consumed"].at[lax.rem(before + self.count + i, self._stages)])

        def consume() -> None:
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")

            def step(present: int, index: Any, carry: Any) -> Any:
                slot = lax.rem(before + index, self._stages)
                plgpu.barrier_wait(scope["filled"].at[slot])
                x_smem, *rest = (buffer.at[slot] for buffer in scope["buffers"])
                release = lambda: plgpu.barrier_arrive(scope["consumed"].at[slot])
                return tile.add(index, x_smem, rest[:present], rest[halves:], release, carry)

            def run(carry: Any) -> Any:
                carry = lax.fori_loop(0, complete, functools.partial(step, halves), carry)
                return lax.fori_loop(complete, self.count, functools.partial(step, halves - 1), carry)

            tile.compute(run)

        lax.cond(lax.axis_index("warpgroup") == COMPUTE_WARPGROUPS, fill, consume)

    def _copy(self, k: Any, complete: Any, slot: Any, operands: Sequence[Any], scope: Any) -> None:
        filled = scope["filled"].at[slot]
        for i, (spec, operand, buffer) in enumerate(zip(specs(self.plan), operands, scope["buffers"], strict=True)):

            def copy(spec: Any = spec, operand: Any = operand, buffer: Any = buffer) -> None:
                corner = zip(spec.index_map(k), spec.block_shape, strict=True)
                block = operand.at[tuple(pl.ds(index * size, size) for index, size in corner)]
                axes = spec.collective_axes or None
                plgpu.copy_gmem_to_smem(block, buffer.at[slot], filled, collective_axes=axes)

            if i == self._optional:
                lax.cond(complete, copy, lambda: plgpu.barrier_arrive(filled))
            else:
                copy()
