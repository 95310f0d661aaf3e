"""A ring of buffers whose later steps lack one operand, for residual weights that are partly zero.

A list says which blocks a step takes, and only the first steps have all operands. The others arrive at the barrier
instead of copying W_lo. A branch inside a step costs registers (ptxas spills 400 bytes for either form of it), so the
two kinds of steps are two loops, and the ring continues from the first to the second.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax import lax

from pallas_kernels.hopper.steps import OutputTile, Ring


@dataclass(frozen=True)
class SkippingSteps(Ring):
    """The steps of an output tile, with the steps that need the residual first.

    Its own operands are the work list of every tile of n, int32: the number of steps that need W_lo, `[n / tile_n]`,
    and the block of k of each step, `[n / tile_n, k / tile_k]`. Scales of squares are in that order. The list is the
    same in all blocks of a cluster, which share W.
    """

    extra = 2
    suffix = "_nonzero"

    def run(self, tile: OutputTile, own: Sequence[Any]) -> None:
        """Run all steps of one output tile in all warpgroups of a block; `own` are the steps' own operands."""
        super().run(tile, (own[0][tile.column], own[1]))

    def copies(self, tile: OutputTile, own: Sequence[Any], step: Any) -> list[tuple[Any, Any]]:
        """Return (block of k, whether it is copied) of every operand at a step; None is always."""
        complete, order = own
        k, needed = order[tile.column, step], step < complete
        # W_lo is the operand after x and W_hi.
        return [(k, needed if i == self.plan.halves else None) for i in range(len(tile.operands))]

    def walk(self, tile: OutputTile, own: Sequence[Any], step: Any, carry: Any) -> Any:
        """Run all steps; `step(halves, index, carry)` multiplies this many halves of W."""
        complete, halves = own[0], self.plan.halves
        carry = lax.fori_loop(0, complete, functools.partial(step, halves), carry)
        return lax.fori_loop(complete, self.count, functools.partial(step, halves - 1), carry)
