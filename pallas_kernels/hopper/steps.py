"""The steps of an output tile on Hopper: one warpgroup copies operands to shared
memory, and two compute on them.

Two pipelines have the same interface. `Steps` is Pallas's own. `Ring` continues from
one output tile to the next for any number of steps, and a step gives its buffers back
by one barrier, whereas Pallas has one for each operand. Squares of 128 run 6 % faster
in the ring, vectors of 64 up to 7 % slower, so `benchmarks.tune` times both pipelines.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.plan import COMPUTE_WARPGROUPS, SWIZZLE, Plan


@dataclass(frozen=True)
class OutputTile:
    """One output tile: the loop that it is part of, its operands, and the functions
    that add a step and use the sum.

    Attributes:
      loop: state of `plgpu.nd_loop` over the tiles of this block.
      column: index of the tile along n.
      operands: references to global memory: x, the halves of W, and the scales that are
        copied.
      buffers: the allocated `allocations` of the steps.
      add: function of one step, `(step, x, halves of W, scales, release, carry) ->
        carry`; it calls `release()` after its last read.
      compute: function that takes all steps of the tile, `(carry) -> carry`, and calls
        them once.
    """

    loop: Any
    column: Any
    operands: Sequence[Any]
    buffers: Any
    add: Any
    compute: Any


def _specs(plan: Plan) -> list[plgpu.BlockSpec]:
    """Return the blocks of x, the halves of W and the scales that are copied, in steps
    of tile_k.
    """
    config = plan.config
    # Rows of shared memory are permuted in pieces of 16 bytes, or wgmma's reads would
    # hit the same banks. Copies and wgmma must agree on the width (PTX ISA, "Shared
    # Memory Matrix Layout").
    swizzle = min(config.tile_k, SWIZZLE)
    vector = dict(memory_space=plgpu.SMEM, delay_release=0)
    tiled = dict(
        **vector,
        transforms=(
            plgpu.TilingTransform((8, swizzle)),
            plgpu.SwizzleTransform(swizzle),
        ),
    )
    x_spec = plgpu.BlockSpec(
        (config.tile_m, config.tile_k), lambda step: (0, step), **tiled
    )
    multicast = ("member",) if config.cluster > 1 else ()
    w_spec = plgpu.BlockSpec(
        (config.tile_n, config.tile_k),
        lambda step: (0, step),
        collective_axes=multicast,
        **tiled,
    )
    widths = {
        "tensor": (),
        "square": (config.tile_m,),
        "vector": (config.tile_m, config.tile_n),
    }[plan.scaling]
    return [x_spec, *[w_spec] * plan.halves] + [
        plgpu.BlockSpec((1, width), lambda step: (step, 0), **vector)
        for width in widths
    ]


@dataclass(frozen=True)
class Steps:
    """The steps of an output tile in the order of k, each with all operands: Pallas's
    own pipeline.

    Attributes:
      plan: plan of the kernel.
      count: number of steps of tile_k.
    """

    plan: Plan
    count: int

    def allocations(self, operands: Sequence[Any]) -> Any:
        """Return the buffers that `pl.run_scoped` must allocate for these operands,
        once for all tiles.
        """
        nothing = lambda *_, **__: None
        return self._pipeline(nothing, nothing).get_allocations(*operands)

    def run(self, tile: OutputTile, own: Sequence[Any]) -> None:
        """Run all steps of one output tile in all warpgroups of a block; `own` are the
        steps' own operands.
        """
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

            return tile.add(
                index[0], x_smem, rest[:halves], rest[halves:count], release, rest[-1]
            )

        self._pipeline(body, tile.compute, state)(
            *tile.operands, allocations=tile.buffers
        )

    def _pipeline(self, body: Any, compute: Any, state: Any = None) -> Any:
        """Return the pipeline: copies of all operands, `count` times tile_k, and `body`
        on full buffers.
        """
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
    """The same steps through a ring of `stages` buffers with two barriers each, which
    is emptied after the last tile.

    If the plan skips, the operands `own` are the work of every tile of n, int32: the
    number of steps that need W_lo, `[n / tile_n]`, and the block of k of each step,
    `[n / tile_n, k / tile_k]`, with those steps first. Scales of squares are in that
    order. The other steps arrive at the barrier instead of copying W_lo. A branch
    inside a step costs registers (ptxas spills 400 bytes for either form of it), so the
    two kinds of steps are two loops. The list is the same in all blocks of a cluster,
    which share W.
    """

    @property
    def _stages(self) -> int:
        return min(self.plan.config.stages, self.count)

    def allocations(self, operands: Sequence[Any]) -> dict[str, Any]:
        """Return the buffers that `pl.run_scoped` must allocate for these operands,
        once for all tiles.
        """
        of_operands = _specs(self.plan)
        multicast = tuple(
            {axis for spec in of_operands for axis in spec.collective_axes or ()}
        )
        counts: dict[str, Any] = dict(
            num_arrivals=COMPUTE_WARPGROUPS, num_barriers=self._stages
        )
        consumed = (
            plgpu.ClusterBarrier(collective_axes=multicast, **counts)
            if multicast
            else plgpu.Barrier(**counts)
        )
        return dict(
            buffers=[
                plgpu.SMEM(
                    (self._stages, *spec.block_shape),
                    operand.dtype,
                    transforms=spec.transforms,
                )
                for spec, operand in zip(of_operands, operands, strict=True)
            ],
            filled=plgpu.Barrier(
                num_arrivals=len(of_operands), num_barriers=self._stages
            ),
            consumed=consumed,
        )

    def run(self, tile: OutputTile, own: Sequence[Any]) -> None:
        """Run all steps of one output tile in all warpgroups of a block; `own` are the
        steps' own operands.
        """
        # With the number of complete steps of this tile, which both sides read.
        own = (own[0][tile.column], own[1]) if self.plan.skips else ()
        lax.cond(
            lax.axis_index("warpgroup") == COMPUTE_WARPGROUPS,
            functools.partial(self._fill, tile, own),
            functools.partial(self._consume, tile, own),
        )

    def _fill(self, tile: OutputTile, own: Sequence[Any]) -> None:
        consumed, filled, before = (
            tile.buffers["consumed"],
            tile.buffers["filled"],
            self._before(tile),
        )
        plgpu.set_max_registers(self.plan.memory_registers, action="decrease")

        @pl.loop(0, self.count)
        def _steps(step: Any) -> None:
            # W_lo is the operand after x and W_hi.
            k, needed = (
                (own[1][tile.column, step], step < own[0])
                if self.plan.skips
                else (step, None)
            )
            slot = lax.rem(before + step, self._stages)

            @pl.when(before + step >= self._stages)
            def _wait() -> None:
                plgpu.barrier_wait(consumed.at[slot])

            for i in range(len(tile.operands)):
                copy = functools.partial(self._copy, tile, i, k, slot)
                if needed is None or i != self.plan.halves:
                    copy()
                else:
                    # An arrival instead of the copy keeps the barrier's count.
                    lax.cond(
                        needed,
                        copy,
                        lambda slot=slot: plgpu.barrier_arrive(filled.at[slot]),
                    )

        # A block of a cluster must not end while other blocks still arrive at its
        # barriers.
        @pl.when(tile.loop.local_index == tile.loop.num_local_steps - 1)
        def _empty() -> None:
            @pl.loop(0, self._stages)
            def _wait(i: Any) -> None:
                plgpu.barrier_wait(
                    consumed.at[lax.rem(before + self.count + i, self._stages)]
                )

    def _consume(self, tile: OutputTile, own: Sequence[Any]) -> None:
        scope, halves, before = tile.buffers, self.plan.halves, self._before(tile)
        plgpu.set_max_registers(self.plan.compute_registers, action="increase")

        def step(present: int, index: Any, carry: Any) -> Any:
            slot = lax.rem(before + index, self._stages)
            plgpu.barrier_wait(scope["filled"].at[slot])
            x_smem, *rest = (buffer.at[slot] for buffer in scope["buffers"])
            release = lambda: plgpu.barrier_arrive(scope["consumed"].at[slot])
            return tile.add(
                index, x_smem, rest[:present], rest[halves:], release, carry
            )

        def walk(carry: Any) -> Any:
            complete = own[0] if own else self.count
            carry = lax.fori_loop(0, complete, functools.partial(step, halves), carry)
            return (
                lax.fori_loop(
                    complete, self.count, functools.partial(step, halves - 1), carry
                )
                if own
                else carry
            )

        tile.compute(walk)

    def _before(self, tile: OutputTile) -> Any:
        """Return the number of steps of the tiles before this one."""
        return tile.loop.local_index * self.count

    def _copy(self, tile: OutputTile, i: int, k: Any, slot: Any) -> None:
        spec, buffer = _specs(self.plan)[i], tile.buffers["buffers"][i]
        corner = zip(spec.index_map(k), spec.block_shape, strict=True)
        block = tile.operands[i].at[
            tuple(pl.ds(index * size, size) for index, size in corner)
        ]
        axes = spec.collective_axes or None
        plgpu.copy_gmem_to_smem(
            block,
            buffer.at[slot],
            tile.buffers["filled"].at[slot],
            collective_axes=axes,
        )
