"""A warp-specialized pipeline whose later steps go without one operand, for residual weights that are partly zero.

`plgpu.emit_pipeline_warp_specialized` copies every operand in every step, in the order of its grid. Here, too, one
warpgroup copies and the others compute, with a ring of `stages` buffers and two barriers for each, but a list says
which blocks a step takes, and only the first steps have all operands. In the others a barrier is arrived at in place
of the copy, which keeps the count of arrivals. A branch inside a step costs registers (ptxas spills 400 bytes either
way of writing it), so the two kinds of steps are two loops, one after the other. The ring turns on from loop to loop
and from one output tile to the next, for any number of steps: only after the last tile is it emptied.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.matmul.mosaic import COMPUTE_WARPGROUPS

MEMORY_REGISTERS = 40
# A multiprocessor has 512 registers for each of a warpgroup's 128 threads; they are given out in eights.
COMPUTE_REGISTERS = (512 - MEMORY_REGISTERS) // COMPUTE_WARPGROUPS // 8 * 8


@dataclass(frozen=True)
class SkippingPipeline:
    """Copies of operands in `steps` steps, and a body on the buffers that are full.

    Attributes:
      steps: of every output tile.
      stages: buffers of every operand; not more than `steps` are used.
      specs: block specs of the operands, whose index maps take a block of k.
      optional: the index of the operand that later steps go without.
    """

    steps: int
    stages: int
    specs: Sequence[plgpu.BlockSpec]
    optional: int

    @property
    def _stages(self) -> int:
        return min(self.stages, self.steps)

    def get_allocations(self, *operands: Any) -> dict[str, Any]:
        """What `pl.run_scoped` must allocate for operands of these dtypes, once for all tiles."""
        multicast = tuple({axis for spec in self.specs for axis in spec.collective_axes or ()})
        counts: dict[str, Any] = dict(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=self._stages)
        consumed = plgpu.ClusterBarrier(collective_axes=multicast, **counts) if multicast else plgpu.Barrier(**counts)
        return dict(
            buffers=[
                plgpu.SMEM((self._stages, *spec.block_shape), operand.dtype, transforms=spec.transforms)
                for spec, operand in zip(self.specs, operands, strict=True)
            ],
            filled=plgpu.Barrier(num_arrivals=len(self.specs), num_barriers=self._stages),
            consumed=consumed,
        )

    def run(
        self,
        body: Any,
        compute: Any,
        complete: Any,
        order: Callable[[Any], Any],
        loop: Any,
        operands: Sequence[Any],
        scope: Any,
    ) -> None:
        """The steps of one output tile, by all warpgroups of a block.

        Args:
          body: `(step, buffers, release, carry) -> carry`, which calls `release()` once, after its last read; a buffer
            of the optional operand is None where the step goes without.
          compute: takes `(carry) -> carry`, all steps of the tile, and calls it once.
          complete: the number of steps with all operands, 0 to `steps`. They come first.
          order: of a step, the block of k that it takes. It and `complete` are the same in all blocks of a cluster.
          loop: of `plgpu.nd_loop`, over the tiles of this block.
          operands: references to global memory, one for each spec.
          scope: what was allocated.
        """
        before = loop.local_index * self.steps

        def fill() -> None:
            plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")

            @pl.loop(0, self.steps)
            def _fill(step: Any) -> None:
                k, slot = order(step), lax.rem(before + step, self._stages)

                @pl.when(before + step >= self._stages)
                def _wait() -> None:
                    plgpu.barrier_wait(scope["consumed"].at[slot])

                self._copy(k, step < complete, slot, operands, scope)

            # A block of a cluster must not end while others still arrive at its barriers.
            @pl.when(loop.local_index == loop.num_local_steps - 1)
            def _empty() -> None:
                @pl.loop(0, self._stages)
                def _wait(i: Any) -> None:
                    plgpu.barrier_wait(scope["consumed"].at[lax.rem(before + self.steps + i, self._stages)])

        def consume() -> None:
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")

            def step(absent: Any, index: Any, carry: Any) -> Any:
                slot = lax.rem(before + index, self._stages)
                plgpu.barrier_wait(scope["filled"].at[slot])
                buffers = [None if i == absent else buffer.at[slot] for i, buffer in enumerate(scope["buffers"])]
                return body(index, buffers, lambda: plgpu.barrier_arrive(scope["consumed"].at[slot]), carry)

            def run(carry: Any) -> Any:
                carry = lax.fori_loop(0, complete, functools.partial(step, None), carry)
                return lax.fori_loop(complete, self.steps, functools.partial(step, self.optional), carry)

            compute(run)

        lax.cond(lax.axis_index("warpgroup") == COMPUTE_WARPGROUPS, fill, consume)

    def _copy(self, k: Any, complete: Any, slot: Any, operands: Sequence[Any], scope: Any) -> None:
        filled = scope["filled"].at[slot]
        for i, (spec, operand, buffer) in enumerate(zip(self.specs, operands, scope["buffers"], strict=True)):

            def copy(spec: Any = spec, operand: Any = operand, buffer: Any = buffer) -> None:
                corner = zip(spec.index_map(k), spec.block_shape, strict=True)
                block = operand.at[tuple(pl.ds(index * size, size) for index, size in corner)]
                axes = spec.collective_axes or None
                plgpu.copy_gmem_to_smem(block, buffer.at[slot], filled, collective_axes=axes)

            if i == self.optional:
                lax.cond(complete, copy, lambda: plgpu.barrier_arrive(filled))
            else:
                copy()
