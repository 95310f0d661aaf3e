"""Sizes of the Hopper kernel: what a block holds, and which of them there can be."""

from dataclasses import dataclass
from typing import Literal

# Outputs of a warpgroup.
ROWS = 64
# Blocks of NVFP4 or MXFP4 of a step of k, whose scales are the 16 bytes of a row that are copied at least.
BLOCKS = 16
# Registers of a thread that copies, where those that compute need more than an even share.
COPYING = 24


@dataclass(frozen=True)
class Config:
    """Sizes of the kernel.

    Attributes:
      warpgroups: that compute, each 64 outputs.
      stages: steps of k that are in flight.
      splits: blocks that share the steps of k.
      rows: of x, those of a block; None is all of them.
      x: "copied" step by step, or in E4M3, of at most 8 rows, "rounded" by every block (`rounded.py`).
      scale_steps: copies of codes that share one of scales: 1, 2, 4 or 8, which divide a block's steps.
      prefetch: so many steps before a part of the weight is copied the cache asks for it; 0 is not at all.
      abreast: steps of k that are copied together, as wider parts of fewer rows, and multiplied by warpgroups of their
        own. A block then does its outputs in as many passes, and adds the sums of these warpgroups.
    """

    warpgroups: int = 4
    stages: int = 4
    splits: int = 1
    rows: int | None = None
    x: Literal["copied", "rounded"] = "copied"
    scale_steps: int = 1
    prefetch: int = 0
    abreast: int = 1

    @property
    def height(self) -> int:
        """Outputs n of a block."""
        return ROWS * self.warpgroups

    @property
    def pass_height(self) -> int:
        """Outputs of a pass."""
        return self.height // self.abreast

    def serves_abreast(self, steps: int) -> bool:
        """Whether so many steps are passes: none of its warpgroups is a pass ahead of another, whose sums it has."""
        turns = steps // self.abreast
        divided = steps % self.abreast == 0 == self.warpgroups % self.abreast and turns % self.scale_steps == 0
        return self.abreast == 1 or (divided and turns >= self.stages and self.splits == 1 and not self.prefetch)

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread that computes: an even share, and what is left of all shares where threads that copy give away.

        A block has what it was started with: asked for one register more, its threads would wait for ever.
        """
        threads = self.warpgroups + 1
        even = 512 // threads // 8 * 8
        return even, min(240, (even * threads - COPYING) // self.warpgroups // 8 * 8)

    @property
    def scale_buffers(self) -> int:
        """So many that one is free when codes of its first step have room."""
        return 1 + -(-(self.stages - 1) // self.scale_steps)

    def weight_bytes(self, step: int) -> int:
        """Of shared memory, what codes and scales take."""
        return self.height * (self.stages * step // 2 + self.scale_buffers * self.scale_steps * BLOCKS)

    def holds(self, m: int, *, evenly: bool = False) -> bool:
        """Whether registers suffice: half of m for sums, and 64 for what is decoded and what is multiplied."""
        return m // 2 + 64 <= (self.registers[0] if evenly else max(self.registers))
