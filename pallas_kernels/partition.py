"""Kernels under a mesh and under vmap: each device runs its kernel on its own part, and
nothing is gathered.

XLA cannot look into a kernel: a bare `pallas_call` under a mesh gathers its operands
onto every device. `partitioned` tells XLA which axes of operands and results belong
together, in the letters of an einsum:

    "m k, n k, u -> m n"      a product: m and n may be split, k may be split and is then summed, u is a scalar

Each device gets parts whose axes agree. An operand is gathered only if two operands
split different axes over the same mesh axis. If both split the summed axis, as a weight
gradient splits its tokens, each device sums its own part. The partial sums are then
added, and handed out in one reduce-scatter if the result is wanted in parts: neither
activations nor gradients are gathered.

Under vmap a kernel runs once for every element, in a loop, because kernels have no
batch axis.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from pallas_kernels.explicit import (
    BlocksOf,
    Letters,
    on_parts,
    one_at_a_time,
    under_own_mesh,
)
from pallas_kernels.specs import (
    Entry,
    device_count,
    entries,
    has_explicit_axes,
    names,
    shards,
)
from pallas_kernels.wire import Scatter

__all__ = ["BlocksOf", "Letters", "partitioned"]


def partitioned(
    local: Callable[..., Any],
    rule: str,
    blocks: Mapping[str, BlocksOf] | None = None,
    *,
    whole: tuple[str, ...] = (),
    scattered: bool = False,
    merged: Mapping[str, tuple[int, ...]] | None = None,
    wanted: tuple[Entry, ...] | None = None,
) -> Callable[..., Any]:
    """Return `local` as a function of whole arrays, of which each device computes its
    part.

    With automatic axes XLA partitions it at compile time. With explicit axes it is a
    `jax.shard_map` (`explicit`).

    Args:
      local: takes one device's parts of the operands, and `summed_over=`, the mesh axes
        that split an axis which some result lacks. The result is partial there, and
        `local` must `lax.psum` (or `lax.pmax`) it.
      rule: letters of the axes of each operand and result, as above. A letter has one
        size everywhere.
      blocks: letters that count blocks. They are split as the axis of the blocks is,
        and that axis is split only if every part holds whole blocks.
      whole: letters of axes that no mesh axis may split.
      scattered: whether `local` also takes `scattered=`, a list of `Scatter`, along
        which it must sum and hand out its one result (`wire.reduced`).
      merged: sizes of the neighbouring axes of the arrays for which a letter stands;
        `local` gets them as one axis.
      wanted: entries of the one result under explicit axes; None takes the entries of
        the operands.
    """
    letters = Letters.read(rule, merged)
    # Callers may name letters that only some of their rules have.
    blocks = {
        letter: of for letter, of in (blocks or {}).items() if letter in letters.named
    }
    letters = replace(letters, blocks=blocks, whole=whole, scattered=scattered)

    def automatic(*operands: jax.Array) -> Any:
        return letters.over_arrays(_by_xla(local, rule, letters))(*operands)

    def on_explicit_axes(*operands: jax.Array) -> Any:
        return on_parts(
            _partition(local, letters.of_arrays()), automatic, letters, operands, wanted
        )

    # Without a mesh `custom_partitioning` costs nothing: XLA inlines `local` into the
    # program.
    of_matrices = one_at_a_time(automatic)
    return under_own_mesh(
        lambda *operands: (on_explicit_axes if has_explicit_axes() else of_matrices)(
            *operands
        )
    )


def _partition(
    local: Callable[..., Any], letters: Letters
) -> Callable[..., tuple[Any, ...]]:
    """Return `partition(mesh, operands, results)` -> (mesh, one device's part,
    shardings of results, of operands).
    """
    inputs, outputs, blocks = letters.inputs, letters.outputs, letters.blocks

    def partition(
        mesh: Mesh | AbstractMesh, arguments: Any, results: Any
    ) -> tuple[Any, ...]:
        # Results come first: their readers have asked for a sharding, and operands can
        # follow it.
        given = [leaf.sharding for leaf in jax.tree.leaves(results)] + [
            a.sharding for a in jax.tree.leaves(arguments)
        ]
        # A letter that counts blocks stands for their axis: a result may have no other
        # axis that says how it is split.
        sides = [
            [blocks[x].letter if x in blocks else x for x in side]
            for side in (*outputs, *inputs)
        ]
        split = [
            _axes(sharding, side) for sharding, side in zip(given, sides, strict=True)
        ]
        # Partial sums come before all: a split that both operands share costs nothing,
        # and undoing it gathers both.
        partial = (
            _partial_sums(sides, split, len(outputs), letters.kept)
            if letters.scattered
            else {}
        )
        chosen = {
            x: axes
            for x, axes in _choose_axes(sides, split, partial).items()
            if x not in letters.whole
        }
        chosen = _between_blocks(mesh, chosen, blocks)
        # The result of a device is partial over these axes; `local` adds it up, since
        # only it knows how (psum or pmax).
        summed = _summed(chosen, letters)
        handed = (
            _scatters(mesh, results, chosen, summed, outputs[0])
            if letters.scattered
            else []
        )
        over = {axis for scatter in handed for axis in scatter.axes}
        options: dict[str, Any] = dict(
            summed_over=tuple(axis for axis in summed if axis not in over)
        )
        if letters.scattered:
            options["scattered"] = handed

        def shardings(
            sides: list[list[str]], handed: Mapping[int, tuple[str, ...]]
        ) -> list[NamedSharding]:
            entry = lambda place, x: handed.get(place) or chosen.get(x) or None
            return [
                NamedSharding(
                    mesh, PartitionSpec(*(entry(i, x) for i, x in enumerate(side)))
                )
                for side in sides
            ]

        # A result that is handed out is split by the axes of its sum, which split no
        # letter of it.
        handed_out = {scatter.dimension: scatter.axes for scatter in handed}
        result_shardings = jax.tree.unflatten(
            jax.tree.structure(results), shardings(outputs, handed_out)
        )
        return (
            mesh,
            functools.partial(local, **options),
            result_shardings,
            tuple(shardings(inputs, {})),
        )

    return partition


def _by_xla(
    local: Callable[..., Any], rule: str, letters: Letters
) -> Callable[..., Any]:
    """Return the function of matrices that XLA partitions by `rule`."""

    # XLA calls `partition` at compile time, when it knows the shardings that the rest
    # of the program prefers, and replaces the whole call by `local` (JAX docs,
    # jax.experimental.custom_partitioning).
    @custom_partitioning
    def call(*operands: jax.Array) -> Any:
        return local(*operands, summed_over=())

    sizes = {}
    for letter, of in letters.blocks.items():
        # The rule says that an axis of values is (blocks) x (values of a block), so
        # that a sharding of one implies a sharding of the other. It may say so only if
        # every mesh of these devices divides the blocks. Otherwise XLA splits one mesh
        # axis between the two factors, which JAX cannot read.
        if of.letter not in sizes and of.length % (of.size * device_count()) == 0:
            rule = rule.replace(of.letter, f"({letter} {of.letter})")
            sizes[of.letter] = of.size
    of_kept = {
        letter for letter, of in letters.blocks.items() if of.letter in letters.kept
    }
    # Shardy wants reduction factors in the order in which the rule names them.
    reduced = sorted(
        letters.named - letters.kept - of_kept - {"u", *letters.whole}, key=rule.index
    )
    call.def_partition(
        partition=_partition(local, letters),
        sharding_rule=rule,
        reduction_factors=tuple(reduced),
        need_replication_factors=letters.whole,
        **sizes,
    )
    return call


def _axes(sharding: Any, side: list[str]) -> list[tuple[str, ...]]:
    """Return the mesh axes that split each axis of an operand or result; XLA may know
    no sharding of it.
    """
    return [
        names(entry) for entry in entries(getattr(sharding, "spec", None), len(side))
    ]


def _partial_sums(
    sides: list[list[str]],
    split: list[list[tuple[str, ...]]],
    results: int,
    kept: set[str],
) -> dict[str, tuple[str, ...]]:
    """Return the mesh axes of each summed letter, if all operands that have the letter
    are split by the same ones.
    """
    found: dict[str, set[tuple[str, ...]]] = {}
    for side, axes in zip(sides[results:], split[results:], strict=True):
        for letter, entry in zip(side, axes, strict=True):
            # "u" marks scalars, one value for all: they are neither split nor summed.
            if letter not in kept and letter != "u":
                found.setdefault(letter, set()).add(entry)
    return {
        letter: one
        for letter, alike in found.items()
        if len(alike) == 1 and (one := next(iter(alike)))
    }


def _choose_axes(
    sides: list[list[str]],
    split: list[list[tuple[str, ...]]],
    first: Mapping[str, tuple[str, ...]],
) -> dict[str, tuple[str, ...]]:
    """Return the mesh axes of each letter: the first side that splits it decides, and
    an axis serves one letter.
    """
    chosen: dict[str, tuple[str, ...]] = dict(first)
    used = {axis for axes in first.values() for axis in axes}
    for side, axes in zip(sides, split, strict=True):
        for letter, entry in zip(side, axes, strict=True):
            # A mesh axis that splits two letters would give each device a diagonal
            # block of the result alone.
            if entry and letter not in chosen and not used & set(entry):
                chosen[letter] = entry
                used |= set(entry)
    return chosen


def _between_blocks(
    mesh: Mesh | AbstractMesh,
    chosen: Mapping[str, tuple[str, ...]],
    blocks: Mapping[str, BlocksOf],
) -> dict[str, tuple[str, ...]]:
    """Return the choice without splits inside a block.

    Two devices that share a block would find two scales for it, so an axis is split
    between whole blocks or not at all, and the axis that counts the blocks is split
    alike.
    """
    found = dict(chosen)
    for of in blocks.values():
        if of.length % (shards(mesh, found.get(of.letter, ())) * of.size):
            found[of.letter] = ()
    # Applied last: a byte packs two FP4 values, so a shard can hold whole bytes without
    # holding a whole scale block.
    return found | {letter: found.get(of.letter, ()) for letter, of in blocks.items()}


def _summed(chosen: Mapping[str, tuple[str, ...]], letters: Letters) -> tuple[str, ...]:
    """Return the mesh axes that split a letter which some result lacks: each device
    holds a part of that sum.
    """
    blocks = letters.blocks
    has = lambda side, letter: (
        letter in side
        or any(of.letter == letter and q in side for q, of in blocks.items())
    )
    lacking = [
        x
        for x in chosen
        if x not in blocks and not all(has(side, x) for side in letters.outputs)
    ]
    return tuple(axis for letter in lacking for axis in chosen[letter])


def _scatters(
    mesh: Mesh | AbstractMesh,
    results: Any,
    chosen: Mapping[str, tuple[str, ...]],
    summed: tuple[str, ...],
    side: list[str],
) -> list[Scatter]:
    """Return the axes of the one result that are wanted in parts over mesh axes by
    which sums are split.
    """
    (result,) = jax.tree.leaves(results)
    wanted = zip(side, result.shape, _axes(result.sharding, side), strict=True)
    return [
        Scatter(axes, dimension)
        for dimension, (letter, size, axes) in enumerate(wanted)
        # A reduce-scatter hands out equal parts; an axis that operands split is not the
        # sum's to hand out.
        if axes
        and set(axes) <= set(summed)
        and not chosen.get(letter)
        and size % shards(mesh, axes) == 0
    ]
