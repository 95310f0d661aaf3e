"""The output tiles of grouped products: lists from the sizes of groups before the
kernel, and the reads of them in it.

The lists are two small fusions, because sizes are known only on the device. They have
an item for every row tile of a group, so an empty group costs nothing. The rows behind
the last group are one more group, without a weight.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper.plan import Config

Ref: TypeAlias = Any  # of the GPU's memory, or a tree of such references
Index: TypeAlias = jax.Array | int


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
    scales: Literal["none", "tensor", "rows", "square", "vector"]
    blocks: int

    @property
    def in_pairs(self) -> bool:
        """Return whether two steps are promoted together; the two halves of a weight
        are as many products.
        """
        return self.halves == 1 and self.config.stages >= 4 and not self.in_blocks

    @property
    def in_blocks(self) -> bool:
        """Return whether every step has scales of its own."""
        return self.scales in ("square", "vector")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tile:
    """One output tile: its group, the rows and columns that it writes, the steps that
    it reads, and its scale.
    """

    group: Index
    row: Index
    rows: Index
    column: Index
    first: Index
    steps: Index
    begin: Index
    end: Index
    factor: jax.Array


@dataclass(frozen=True)
class Lists:
    """Where groups begin, `[e + 1]`; and for rows the row tiles before each group, and
    the facts of each row tile.

    The last group are the rows behind the others, which have no weight. `facts` are its
    group, the group's first tile, and the rows where the group begins and ends.
    """

    starts: Ref
    before: Ref = None
    facts: Sequence[Ref] = ()


def list_groups(sizes: jax.Array, m: int, tile_m: int) -> tuple[jax.Array, jax.Array]:
    """Return (first row of each group, row tiles before it), int32 `[e + 1]`, in one
    fusion.

    The last are sums over all groups. A size that is none counts as m + 1, so the sum
    is above m if sizes are wrong.

    >>> [found.tolist() for found in list_groups(jnp.array([5, 0, 3]), 9, 4)]
    [[0, 5, 5, 8], [0, 2, 2, 3]]
    """
    sizes = jnp.where((sizes < 0) | (sizes > m), m + 1, sizes).astype(jnp.int32)
    # Comparing all with all is one fusion; a sum over prefixes is several kernels.
    earlier = jnp.arange(len(sizes)) < jnp.arange(len(sizes) + 1)[:, None]
    total = lambda x: jnp.sum(jnp.where(earlier, x, 0), axis=1, dtype=jnp.int32)
    return total(sizes), total((sizes + tile_m - 1) // tile_m)


def list_tiles(
    starts: jax.Array, before: jax.Array, m: int, most: int
) -> tuple[jax.Array, ...]:
    """Return (group, first tile of the group, first row, last row + 1) of each row
    tile, int32 `[most]`, in one fusion.

    The last tile of a group that is larger than a tile ends with the group, and
    overlaps the tile before.

    >>> [found.tolist() for found in list_tiles(*list_groups(jnp.array([5, 0, 3]), 9, 4), 9, 4)]
    [[0, 0, 2, 3], [0, 0, 2, 3], [0, 0, 5, 8], [5, 5, 8, 9]]
    """
    here = before <= jnp.arange(most, dtype=jnp.int32)[:, None]
    # Groups begin one after the other, so the largest of those that have begun is the
    # last of them.
    largest = lambda x: jnp.max(jnp.where(here, x, 0), axis=1)
    return (
        largest(jnp.arange(len(before), dtype=jnp.int32)),
        largest(before),
        largest(starts),
        jnp.min(jnp.where(here, m, starts), axis=1),
    )


def walk(
    plan: Plan,
    operands: Sequence[Ref],
    out: Ref,
    lists: Lists,
    scales: Sequence[Ref],
    visit: Callable[[Tile, Index], None],
) -> None:
    """Call `visit` with each output tile of a block and the number of steps before
    it.
    """
    block, blocks = lax.axis_index("block"), lax.axis_size("block")
    total = _count(plan, out, lists)
    find = lambda index: _tile(
        plan, operands, out, lists, scales, jnp.minimum(index, total - 1)
    )
    turns = lax.div(total - block + blocks - 1, blocks)

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

    # totals leave no registers for a second tile
    if plan.promote and plan.kind == "within":
        lax.fori_loop(0, turns, visit_alone, jnp.int32(0))
    else:
        lax.fori_loop(0, turns, visit_next, (jnp.int32(0), find(block)))


def _count(plan: Plan, out: Ref, lists: Lists) -> Index:
    """Return the number of output tiles."""
    n_tiles = pl.cdiv(out.shape[-1], plan.config.tile_n)
    if plan.kind == "within":
        return jnp.int32(
            out.shape[0] * pl.cdiv(out.shape[1], plan.config.tile_m) * n_tiles
        )
    return _row_tiles(plan, out, lists) * n_tiles


def _row_tiles(plan: Plan, out: Ref, lists: Lists) -> Index:
    last, tile_m = lists.starts.shape[0] - 1, plan.config.tile_m
    behind = jnp.maximum(out.shape[0] - lists.starts[last], 0)
    return jnp.minimum(
        lists.before[last] + lax.div(behind + tile_m - 1, tile_m),
        lists.facts[0].shape[0],
    )


def _tile(
    plan: Plan,
    operands: Sequence[Ref],
    out: Ref,
    lists: Lists,
    scales: Sequence[Ref],
    index: Index,
) -> Tile:
    """Return the output tile with this index. Wrong sizes add up to more than the rows,
    and their scale is NaN.
    """
    config, n_tiles = plan.config, pl.cdiv(out.shape[-1], plan.config.tile_n)
    groups, zero = lists.starts.shape[0] - 1, jnp.int32(0)
    if plan.kind == "rows":
        m, k = operands[0].shape
        item, column = _place(
            index, _row_tiles(plan, out, lists), n_tiles, config.snake
        )
        group, before, start, end = (fact[item] for fact in lists.facts)
        row = start + jnp.minimum(
            (item - before) * config.tile_m, jnp.maximum(end - start - config.tile_m, 0)
        )
        steps = jnp.where(group < groups, k // config.tile_k, 0)
        rows = jnp.minimum(end - start, config.tile_m)
        place = (
            group,
            jnp.minimum(row, m),
            rows,
            column * config.tile_n,
            zero,
            steps,
            zero,
            zero,
        )
    else:
        m, height = operands[0].shape[1], pl.cdiv(out.shape[1], config.tile_m)
        group, rest = lax.div(index, height * n_tiles), lax.rem(index, height * n_tiles)
        row, column = _place(rest, height, n_tiles, config.snake)
        start, end = (jnp.minimum(lists.starts[group + i], m) for i in range(2))
        first = lax.div(start, config.tile_k) * config.tile_k
        steps = jnp.where(
            end > start, lax.div(end - first + config.tile_k - 1, config.tile_k), 0
        )
        rows = jnp.int32(config.tile_m)
        place = (
            group,
            row * rows,
            rows,
            column * config.tile_n,
            first,
            steps,
            start - first,
            end - first,
        )
    factor = jnp.where(lists.starts[groups] > m, jnp.float32(jnp.nan), jnp.float32(1))
    if plan.scales == "tensor":
        factor = (
            factor
            * scales[0][0]
            * scales[1][jnp.minimum(group, scales[1].shape[0] - 1)]
        )
        # Nothing but NaN for wrong sizes is a scale of the rows behind the groups
        if plan.kind == "rows":
            factor = jnp.where(
                (group < groups) | (lists.starts[groups] > m), factor, jnp.float32(0)
            )
    return Tile(*place, factor)


def _place(index: Index, height: Index, width: int, band: int) -> tuple[Index, Index]:
    """Return (row, column) of a tile, in bands of rows in which rows come before
    columns.

    Blocks that run at the same time then read a few panels of both operands, which stay
    in the L2 cache.
    """
    above = lax.div(index, band * width) * band
    rest = lax.rem(index, band * width)
    rows = jnp.minimum(band, height - above)
    return above + lax.rem(rest, rows), lax.div(rest, rows)
