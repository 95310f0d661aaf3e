"""The output tiles of grouped products: lists before the kernel, and their reads in it.

The lists are two small fusions, because sizes of groups are known only on the device.
They have an item for every row tile of a group, so an empty group costs nothing. The
rows behind the last group are one more group, without a weight.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper.plan import Config, Index, Ref

Scales: TypeAlias = Literal["none", "tensor", "rows", "square", "vector"]


@dataclass(frozen=True)
class Plan:
    """Everything for which a kernel is compiled.

    Attributes:
      config: tile sizes and order; `snake` row tiles make a band, whose tiles are
        neighbours in time.
      kind: "rows" for rows times the weight of their group, "within" for sums over the
        rows of each group.
      halves: 2 for a weight with a residual, else 1.
      promote: whether sums are promoted to float32 registers, after 256 values if the
        ring holds two steps more.
      scales: "none", one of x and one for each group ("tensor"), one for each row
        ("rows"), or one for each row of x and each "square" or row ("vector") of w in
        every step of k.
      blocks: blocks of the persistent grid.
    """

    config: Config
    kind: Literal["rows", "within"]
    halves: int
    promote: bool
    scales: Scales
    blocks: int

    @property
    def in_pairs(self) -> bool:
        """True if two steps are promoted together.

        The two halves of a weight are as many products.
        """
        return self.halves == 1 and self.config.stages >= 4 and not self.in_blocks

    @property
    def in_blocks(self) -> bool:
        """True if every step has scales of its own."""
        return self.scales in ("square", "vector")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tile:
    """One output tile.

    Attributes:
      group: its group.
      row, rows: first row that it writes, and their number.
      column: its first column.
      first: first value of k that it reads.
      steps: number of steps that it reads.
      begin, end: values of k that belong to the group, counted from `first`.
      factor: scale of its sum.
    """

    group: Index
    row: Index
    rows: Index
    column: Index
    first: Index
    steps: Index
    begin: Index
    end: Index
    factor: Array


def list_groups(sizes: Array, m: int, tile_m: int) -> tuple[Array, Array]:
    """Return (first row of each group, row tiles before it), int32 `[e + 1]`.

    It is one fusion. The last are sums over all groups. A size that is none counts as
    m + 1, so the sum is above m if sizes are wrong.

    >>> [found.tolist() for found in list_groups(jnp.array([5, 0, 3]), 9, 4)]
    [[0, 5, 5, 8], [0, 2, 2, 3]]
    """
    sizes = jnp.where((sizes < 0) | (sizes > m), m + 1, sizes).astype(jnp.int32)
    # Comparing all with all is one fusion; a sum over prefixes is several kernels.
    earlier = jnp.arange(len(sizes)) < jnp.arange(len(sizes) + 1)[:, None]

    def total(x: Array) -> Array:
        return jnp.sum(jnp.where(earlier, x, 0), axis=1, dtype=jnp.int32)

    return total(sizes), total((sizes + tile_m - 1) // tile_m)


def list_tiles(starts: Array, before: Array, m: int, most: int) -> tuple[Array, ...]:
    """Return facts of each row tile, int32 `[most]`, in one fusion.

    They are its group, the first tile of the group, the group's first row, and its last
    row + 1. The last tile of a group that is larger than a tile ends with the group,
    and overlaps the tile before.

    >>> starts, before = list_groups(jnp.array([5, 0, 3]), 9, 4)
    >>> [found.tolist() for found in list_tiles(starts, before, 9, 4)]
    [[0, 0, 2, 3], [0, 0, 2, 3], [0, 0, 5, 8], [5, 5, 8, 9]]
    """
    has_begun = before <= jnp.arange(most, dtype=jnp.int32)[:, None]

    def largest(x: Array) -> Array:
        # Groups begin one after the other, so the largest of those that have begun is
        # the last of them.
        return jnp.max(jnp.where(has_begun, x, 0), axis=1)

    return (
        largest(jnp.arange(len(before), dtype=jnp.int32)),
        largest(before),
        largest(starts),
        jnp.min(jnp.where(has_begun, m, starts), axis=1),
    )


@dataclass(frozen=True)
class Work:
    """The work of a kernel: references to its arrays in global memory.

    Attributes:
      plan: plan of the kernel.
      operands: x and the halves of w, or x and g.
      starts: where groups begin, `[e + 1]`. The last group are the rows behind the
        others, which have no weight.
      before: for rows, the row tiles before each group.
      facts: for rows, the facts of each row tile (`list_tiles`).
      scales: scales of both operands, or none.
      out: the result.
    """

    plan: Plan
    operands: Sequence[Ref]
    starts: Ref
    before: Ref
    facts: Sequence[Ref]
    scales: Sequence[Ref]
    out: Ref

    @staticmethod
    def of(plan: Plan, refs: Sequence[Ref]) -> "Work":
        """Return the work from the references of a kernel, in the order of `call`."""
        *rest, out = refs
        operands = rest[: 1 + plan.halves]
        starts, *rest = rest[1 + plan.halves :]
        if plan.kind == "within":
            return Work(plan, operands, starts, None, [], rest, out)
        before, *rest = rest
        return Work(plan, operands, starts, before, rest[:4], rest[4:], out)

    @property
    def groups(self) -> int:
        """Number of groups with a weight."""
        return self.starts.shape[0] - 1

    @property
    def n_tiles(self) -> int:
        """Number of tiles next to each other."""
        return pl.cdiv(self.out.shape[-1], self.plan.config.tile_n)

    def walk(self, visit: Callable[[Tile, Index], None]) -> None:
        """Call `visit` with each output tile of a block and the steps before it."""
        block = lax.axis_index("block")
        blocks = lax.axis_size("block")
        total = self._count()

        def find(index: Index) -> Tile:
            return self._tile(jnp.minimum(index, total - 1))

        def visit_next(i: Index, carry: tuple[Index, Tile]) -> tuple[Index, Tile]:
            before, tile = carry
            # loads that the products of this tile hide
            following = find(block + (i + 1) * blocks)
            visit(tile, before)
            return before + tile.steps, following

        def visit_alone(i: Index, before: Index) -> Index:
            tile = find(block + i * blocks)
            visit(tile, before)
            return before + tile.steps

        turns = lax.div(total - block + blocks - 1, blocks)
        # totals leave no registers for a second tile
        if self.plan.promote and self.plan.kind == "within":
            lax.fori_loop(0, turns, visit_alone, jnp.int32(0))
        else:
            lax.fori_loop(0, turns, visit_next, (jnp.int32(0), find(block)))

    def parts(self, tile: Tile, step: Index) -> list[Ref]:
        """Return the parts of the operands that a step of a tile reads."""
        config = self.plan.config
        rows = pl.ds(tile.row, config.tile_m)
        columns = pl.ds(tile.column, config.tile_n)
        x, *ws = self.operands
        if self.plan.kind == "rows":
            k = pl.ds(step * config.tile_k, config.tile_k)
            return [x.at[rows, k], *[w.at[tile.group, columns, k] for w in ws]]
        first = pl.multiple_of(tile.first, config.tile_k)
        k = pl.ds(first + step * config.tile_k, config.tile_k)
        return [x.at[rows, k], *[w.at[columns, k] for w in ws]]

    def _count(self) -> Index:
        """Return the number of output tiles."""
        if self.plan.kind == "rows":
            return self._row_tiles() * self.n_tiles
        groups, height, _ = self.out.shape
        m_tiles = pl.cdiv(height, self.plan.config.tile_m)
        return jnp.int32(groups * m_tiles * self.n_tiles)

    def _row_tiles(self) -> Index:
        """Return the number of row tiles of all groups."""
        tile_m = self.plan.config.tile_m
        rows_behind = jnp.maximum(self.out.shape[0] - self.starts[self.groups], 0)
        count = self.before[self.groups] + lax.div(rows_behind + tile_m - 1, tile_m)
        return jnp.minimum(count, self.facts[0].shape[0])

    def _tile(self, index: Index) -> Tile:
        """Return the output tile with this index."""
        if self.plan.kind == "rows":
            return self._tile_of_rows(index)
        return self._tile_within(index)

    def _tile_of_rows(self, index: Index) -> Tile:
        config = self.plan.config
        m, k = self.operands[0].shape
        item, column = _place(index, self._row_tiles(), self.n_tiles, config.snake)
        group, before, start, end = [fact[item] for fact in self.facts]
        in_order = (item - before) * config.tile_m
        row = start + jnp.minimum(in_order, jnp.maximum(end - start - config.tile_m, 0))
        steps = jnp.where(group < self.groups, k // config.tile_k, 0)
        rows = jnp.minimum(end - start, config.tile_m)
        zero = jnp.int32(0)
        return Tile(
            group=group,
            row=jnp.minimum(row, m),
            rows=rows,
            column=column * config.tile_n,
            first=zero,
            steps=steps,
            begin=zero,
            end=zero,
            factor=self._factor(group, m),
        )

    def _tile_within(self, index: Index) -> Tile:
        config = self.plan.config
        m = self.operands[0].shape[1]
        m_tiles = pl.cdiv(self.out.shape[1], config.tile_m)
        group = lax.div(index, m_tiles * self.n_tiles)
        rest = lax.rem(index, m_tiles * self.n_tiles)
        row, column = _place(rest, m_tiles, self.n_tiles, config.snake)
        start, end = [jnp.minimum(self.starts[group + i], m) for i in range(2)]
        first = lax.div(start, config.tile_k) * config.tile_k
        steps = jnp.where(
            end > start, lax.div(end - first + config.tile_k - 1, config.tile_k), 0
        )
        rows = jnp.int32(config.tile_m)
        return Tile(
            group=group,
            row=row * rows,
            rows=rows,
            column=column * config.tile_n,
            first=first,
            steps=steps,
            begin=start - first,
            end=end - first,
            factor=self._factor(group, m),
        )

    def _factor(self, group: Index, m: int) -> Array:
        """Return the scale of a tile's sum: NaN if sizes add up to more than m rows."""
        is_wrong = self.starts[self.groups] > m
        factor = jnp.where(is_wrong, jnp.float32(jnp.nan), jnp.float32(1))
        if self.plan.scales != "tensor":
            return factor
        of_x, of_w = self.scales
        last = of_w.shape[0] - 1
        factor = factor * of_x[0] * of_w[jnp.minimum(group, last)]
        if self.plan.kind == "within":
            return factor
        # Nothing but NaN for wrong sizes is a scale of the rows behind the groups
        is_scaled = (group < self.groups) | is_wrong
        return jnp.where(is_scaled, factor, jnp.float32(0))


def _place(index: Index, height: Index, width: int, band: int) -> tuple[Index, Index]:
    """Return (row, column) of a tile, in bands in which rows come before columns.

    Blocks that run at the same time then read a few panels of both operands, which stay
    in the L2 cache.
    """
    above = lax.div(index, band * width) * band
    rest = lax.rem(index, band * width)
    rows = jnp.minimum(band, height - above)
    return above + lax.rem(rest, rows), lax.div(rest, rows)
