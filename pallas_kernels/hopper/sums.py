"""The sum of an output tile on Hopper: accumulated fast, or promoted and scaled.

    fast : acc += x W_hiᵀ + x W_loᵀ               in the accumulator, over all of k
    full : acc  = that over tile_k;  total += acc     in float32 registers

Both have the same methods: `add` adds a step, and `compute` takes a function that runs
all steps of the tile, and stores the result. `full` is the promotion of DeepSeek-V3
(2024).

Scales of blocks multiply a sum where it is promoted, in chunks of its columns. A square
of W is a chunk with one scale, read from global memory a step ahead because the load
takes longer than the products of a step. Scales of vectors are loaded chunk by chunk,
so that registers hold few columns at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.plan import Index, Ref

# Lines of the parts of a sum, from top to bottom and from left to right
Parts: TypeAlias = list[list[Array]]
Store: TypeAlias = Callable[[Parts], None]
Release: TypeAlias = Callable[[], None]
Carry: TypeAlias = Any  # the accumulator, or the totals and the scales of squares
_WAVE_ROWS = 64


def load_global(vector: Ref, axis: int) -> Array:
    """Load a vector of rows (reduced axis 1) or of columns (0) from global memory."""
    # "Optimized" loads are made for swizzled shared memory and refuse global memory.
    layout = plgpu.Layout.WGMMA.reduce(axis)
    return plgpu.load(vector, layout=layout, optimized=False)


def multiply(acc: Ref, x: Ref, w: Sequence[Ref], rows: pl.Slice) -> None:
    """Add the products of some rows of x with all halves of W, asynchronously."""
    # W is [n, k] in memory and wgmma reads both operands along k: the transpose only
    # changes a descriptor.
    for half in w:
        plgpu.wgmma(acc, x.at[rows], half.T)


@dataclass(frozen=True)
class Accumulated:
    """The sum of fast accumulation: one accumulator over all of k.

    Attributes:
      store: function that stores the sum.
      rows: rows of the tile that belong to this warpgroup.
      width: columns of the tile.
    """

    store: Store
    rows: pl.Slice
    width: int

    def add(
        self,
        step: Index,
        x: Ref,
        w: Sequence[Ref],
        scales: Sequence[Ref],
        release: Release,
        acc: Carry,
    ) -> Carry:
        """Add a step; its buffers are given back when this returns."""
        multiply(acc, x, w, self.rows)
        # wgmma is asynchronous, so wait until it has read the buffers.
        plgpu.wgmma_wait(0)
        return acc

    def compute(self, run: Callable[[Carry], Carry]) -> None:
        """Run all steps of the tile, and store the sum."""

        def with_accumulator(acc: Ref) -> None:
            run(acc)
            self.store([[acc[...]]])

        accumulator = plgpu.ACC((self.rows.size, self.width), jnp.float32)
        pl.run_scoped(with_accumulator, accumulator)


@dataclass(frozen=True)
class Factors:
    """Factors of promoted sums: scales of x's rows times scales of W.

    Attributes:
      scales: references to global memory, x's first; none with `scaling` "tensor".
      scaling: scales of W, as in `Plan`.
      columns: columns of a chunk.
      first: index of the output tile's first chunk along n.
      steps: number of steps of the tile.
    """

    scales: Sequence[Ref]
    scaling: str
    columns: int
    first: Index
    steps: Index

    def of_squares(self, step: Index, chunks: int) -> tuple[Array, ...]:
        """Return W's scales of one step if they are numbers, else none.

        A step beyond the last one gets the scales of the last.
        """
        if self.scaling != "square":
            return ()
        step = jnp.minimum(step, self.steps - 1)
        scales = self.scales[1]
        return tuple(scales[step, self.first + chunk] for chunk in range(chunks))

    def find(
        self,
        at: Ref,
        of_squares: Sequence[Array],
        rows: pl.Slice,
        chunk: int,
    ) -> Array | None:
        """Return the factor of these rows of the tile and one chunk, or None.

        Args:
          at: place of the step's scales, see `of_rows`.
          of_squares: W's scales of the step if they are numbers.
          rows: rows of the tile.
          chunk: number of the chunk.
        """
        if self.scaling == "tensor":
            return None
        shape = (rows.size, self.columns)
        of_x = self.of_rows(at, rows)
        if of_squares:
            return lax.broadcast_in_dim(of_x * of_squares[chunk], shape, (0,))
        of_w = lax.broadcast_in_dim(self.of_columns(at, chunk), shape, (1,))
        return lax.broadcast_in_dim(of_x, shape, (0,)) * of_w

    def of_rows(self, at: Ref, rows: pl.Slice) -> Array:
        """Return x's scales of these rows; `at` are copies in shared memory."""
        return plgpu.load(at[0].at[0, rows], layout=plgpu.Layout.WGMMA.reduce(1))

    def of_columns(self, at: Ref, chunk: int) -> Array:
        """Return W's scales of the columns of a chunk."""
        columns = pl.ds(chunk * self.columns, self.columns)
        return plgpu.load(at[1].at[0, columns], layout=plgpu.Layout.WGMMA.reduce(0))


@dataclass(frozen=True)
class Promoted:
    """The sum of full accumulation: steps are scaled and added to float32 totals.

    A warpgroup works in waves of 64 rows, because the totals leave no registers for a
    larger accumulator.

    Attributes:
      store: function that stores the sum.
      rows: rows of the tile that belong to this warpgroup.
      width: columns of the tile.
      factors: factors of the steps.
      multiply: function that adds the products of a step.
    """

    store: Store
    rows: pl.Slice
    width: int
    factors: Factors
    multiply: Callable[[Ref, Any, Any, pl.Slice], None] = multiply

    @property
    def chunks(self) -> int:
        """Number of chunks of columns."""
        return self.width // self.factors.columns

    def add(
        self,
        step: Index,
        x: Any,
        w: Any,
        at: Ref,
        release: Release,
        carry: Carry,
    ) -> Carry:
        """Add a step, and release its buffers as soon as they are read."""
        totals, of_squares = carry
        following = self.factors.of_squares(step + 1, self.chunks)
        waves = self.rows.size // _WAVE_ROWS
        new: list[Array] = []
        for wave in range(waves):
            rows = pl.ds(self.rows.start + wave * _WAVE_ROWS, _WAVE_ROWS)

            def partial_sum(acc: Ref, rows: pl.Slice = rows) -> Array:
                self.multiply(acc, x, w, rows)
                return acc[...]

            # Scales of the first chunk are loaded before the products, which hide the
            # latency. The others are loaded afterwards, or they would occupy registers
            # all the time.
            found = [self.factors.find(at, of_squares, rows, 0)]
            accumulator = plgpu.ACC((_WAVE_ROWS, self.width), jnp.float32)
            part = pl.run_scoped(partial_sum, accumulator)
            for chunk in range(1, self.chunks):
                found.append(self.factors.find(at, of_squares, rows, chunk))
            if wave == waves - 1:
                # Free the buffers before the additions, which do not read them.
                release()
            for chunk, factor in enumerate(found):
                first = chunk * self.factors.columns
                piece = part[:, first : first + self.factors.columns]
                scaled = piece if factor is None else piece * factor
                new.append(totals[len(new)] + scaled)
        return tuple(new), following

    def compute(self, run: Callable[[Carry], Carry]) -> None:
        """Run all steps of the tile, and store the sum."""
        # In the accumulator's layout, or every addition would move values between
        # threads.
        zero = plgpu.layout_cast(
            jnp.zeros((_WAVE_ROWS, self.factors.columns), jnp.float32),
            plgpu.Layout.WGMMA,
        )
        chunks = self.chunks
        waves = self.rows.size // _WAVE_ROWS
        of_squares = self.factors.of_squares(0, chunks)
        totals, _ = run(((zero,) * waves * chunks, of_squares))
        self.store(
            [list(totals[wave * chunks : (wave + 1) * chunks]) for wave in range(waves)]
        )


def pieces_of(
    parts: Parts,
    height: int,
    width: int,
) -> Iterator[tuple[int, int, Array]]:
    """Yield (first row, first column, values) of each piece of a sum, in order."""
    top = 0
    for line in parts:
        left = 0
        for part in line:
            rows, columns = part.shape
            for i in range(0, rows, height):
                for j in range(0, columns, width):
                    yield top + i, left + j, part[i : i + height, j : j + width]
            left += columns
        top += rows
