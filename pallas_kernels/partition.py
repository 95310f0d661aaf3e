"""Kernels under a mesh and under vmap: each device runs its kernel on its own part, and nothing is gathered.

XLA cannot look into a kernel: a bare `pallas_call` under a mesh gathers its operands onto every device. `partitioned`
tells it which axes of operands and results belong together, in the letters of an einsum:

    "m k, n k, u -> m n"      a product: m and n may be split, k may be split and is then summed, u is a scalar

Each device gets parts whose axes agree; only where two operands split different axes in the same way is one of them
brought together. Where both split what is summed, as the tokens of a weight gradient are over devices that share a
batch, each device sums its own, and a result that is asked for in parts is added and handed out in one (a
reduce-scatter): neither activations nor gradients are gathered.

Under vmap a kernel runs once for every element, in a loop; it has no batch axis of its own.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.dispatch import has_explicit_axes
from pallas_kernels.explicit import Merged, Rule, Wanted, on_own_elements, on_parts, under_own_mesh

Axes = tuple[str, ...]
# Runs on one device's part: (operands..., axes of the mesh over which its result must be summed) -> results.
Local = Callable[..., Any]


class Scatter(NamedTuple):
    """An axis of a result that is handed out over the mesh axes by which its partial sums are split.

    Attributes:
      axes: of the mesh.
      dimension: of the result, in `shape`.
      shape: what the result must be reshaped to first, where it has more axes than the matrix; None where it has not.
    """

    axes: Axes
    dimension: int
    shape: tuple[int, ...] | None = None


class BlocksOf(NamedTuple):
    """An axis that counts blocks: the letter of the axis they are blocks of, their size, and that axis's length."""

    letter: str
    size: int
    length: int


def partitioned(
    local: Local,
    rule: str,
    blocks: Mapping[str, BlocksOf] | None = None,
    *,
    whole: Axes = (),
    sums: Literal["everywhere", "scattered"] = "everywhere",
    merged: Merged | None = None,
    wanted: Wanted | None = None,
) -> Callable[..., Any]:
    """`local(*operands, summed_over=())` as a function of whole arrays, each device's part of it by `rule`.

    With automatic axes XLA partitions it when it compiles; with explicit ones it is a `jax.shard_map` (`explicit`).

    Args:
      local: takes the operands, or one device's parts of them, and in `summed_over` the mesh axes that split an axis
        which some result lacks; that result is partial there, and it must `lax.psum` (or `lax.pmax`) it.
      rule: letters of the axes of each operand and result, as above. A letter is one size everywhere.
      blocks: of letters that count blocks, what they count. They are split as that axis is, which is split only where
        every part holds whole blocks.
      whole: letters of axes that no mesh axis may split.
      sums: "scattered" where `local` also takes `scattered=`, `Scatter`s of its one result, which it must
        hand out and sum (`wire.reduced`).
      merged: of letters that stand for neighbouring axes of the arrays, the sizes of these; `local` has them as one.
      wanted: with explicit axes the spec of the one result; None for what the operands make of it.
    """
    letters = Rule.of(rule, merged)
    inputs, outputs, _ = letters
    named = {letter for side in (*inputs, *outputs) for letter in side}
    blocks = {letter: of for letter, of in (blocks or {}).items() if letter in named}

    def automatic(*operands: jax.Array) -> Any:
        return over_arrays(_by_xla(local, rule, letters, blocks, whole, sums), rule, merged)(*operands)

    def on_explicit_axes(*operands: jax.Array) -> Any:
        first = {letter: of._replace(letter=letters.first(of.letter)) for letter, of in blocks.items()}
        # Of several axes in blocks only the first can be split, and leave neighbours together.
        inner = {wide for of in blocks.values() for wide in letters.wide_of(of.letter)[1:]}
        kept = (
            *(wide for letter in whole for wide in letters.wide_of(letter)),
            *inner - {f.letter for f in first.values()},
        )
        # Under vmap a `shard_map` takes its axis, and each device runs the kernel for the elements that it has.
        split = _partition(local, letters.wide(inputs), letters.wide(outputs), first, kept, sums)
        counts = {letter: -(-of.length // of.size) for letter, of in blocks.items()}
        # A result may have an axis of which the operands have only the blocks.
        counts |= {of.letter: of.length for of in blocks.values() if all(of.letter not in side for side in inputs)}
        return on_parts(split, _one_at_a_time, automatic, letters, counts, operands, wanted)

    of_matrices = _one_at_a_time(automatic)
    return under_own_mesh(lambda *operands: (on_explicit_axes if has_explicit_axes() else of_matrices)(*operands))


def over_arrays(function: Callable[..., Any], rule: str, merged: Merged | None) -> Callable[..., Any]:
    """A function of matrices as one of the arrays that they stand for; `rule` and `merged` as in `partitioned`."""
    letters = Rule.of(rule, merged)

    def call(*operands: jax.Array) -> Any:
        results = function(*(letters.flatten(side, x) for side, x in zip(letters.inputs, operands, strict=True)))
        leaves, tree = jax.tree.flatten(results)
        return jax.tree.unflatten(tree, map(letters.unflatten, letters.outputs, leaves))

    return call


def _partition(
    local: Local,
    inputs: list[list[str]],
    outputs: list[list[str]],
    blocks: Mapping[str, BlocksOf],
    whole: Axes,
    sums: Literal["everywhere", "scattered"],
) -> Callable[..., tuple[Any, ...]]:
    """`partition(mesh, operands, results)` -> (mesh, one device's part, shardings of results, of operands)."""
    kept = {letter for side in outputs for letter in side}

    def partition(mesh: Any, arguments: Any, results: Any) -> tuple[Any, ...]:
        # Results come first: what reads them has asked for their sharding, and operands can follow.
        given = [leaf.sharding for leaf in jax.tree.leaves(results)] + [a.sharding for a in jax.tree.leaves(arguments)]
        # Where blocks are counted, the axis they are blocks of is meant: a result may have no other axis to say so.
        sides = [[blocks[x].letter if x in blocks else x for x in side] for side in (*outputs, *inputs)]
        partial = _partial_sums(sides[len(outputs) :], given[len(outputs) :], kept) if sums == "scattered" else {}
        chosen = {x: axes for x, axes in _choose_axes(sides, given, partial).items() if x not in whole}
        chosen = _between_blocks(mesh, chosen, blocks)
        summed = _summed(chosen, blocks, outputs)
        scattered = () if sums == "everywhere" else _scatters(mesh, results, chosen, summed, outputs[0])
        over = {axis for scatter in scattered for axis in scatter.axes}
        options: dict[str, Any] = dict(summed_over=tuple(axis for axis in summed if axis not in over))
        if sums == "scattered":
            options["scattered"] = scattered

        def shardings(sides: list[list[str]], handed: Mapping[int, Axes]) -> list[NamedSharding]:
            entry = lambda place, x: handed.get(place) or chosen.get(x) or None
            return [NamedSharding(mesh, PartitionSpec(*(entry(i, x) for i, x in enumerate(side)))) for side in sides]

        handed_out = {scatter.dimension: scatter.axes for scatter in scattered}
        result_shardings = jax.tree.unflatten(jax.tree.structure(results), shardings(outputs, handed_out))
        return mesh, functools.partial(local, **options), result_shardings, tuple(shardings(inputs, {}))

    return partition


def _by_xla(
    local: Local,
    rule: str,
    letters: Rule,
    blocks: Mapping[str, BlocksOf],
    whole: Axes,
    sums: Literal["everywhere", "scattered"],
) -> Callable[..., Any]:
    """The function of matrices that XLA partitions by `rule`."""
    inputs, outputs = letters.inputs, letters.outputs
    kept = {letter for side in outputs for letter in side}
    named = {letter for side in (*inputs, *outputs) for letter in side}

    # XLA calls `partition` at compile time, when it knows the shardings that the rest of the program prefers, and puts
    # `local` in the place of the whole call (JAX docs, jax.experimental.custom_partitioning).
    @custom_partitioning
    def call(*operands: jax.Array) -> Any:
        return local(*operands, summed_over=())

    sizes = {}
    for letter, of in blocks.items():
        # The rule says that an axis of values is (blocks) x (values of a block), so that a sharding of one implies that
        # of the other. It may say so only where every mesh of these devices divides the blocks, or XLA splits one
        # mesh axis between the two factors, which JAX cannot read.
        if of.letter not in sizes and of.length % (of.size * device_count()) == 0:
            rule = rule.replace(of.letter, f"({letter} {of.letter})")
            sizes[of.letter] = of.size
    # In the order in which the rule names them.
    of_kept = {letter for letter, of in blocks.items() if of.letter in kept}
    reduced = sorted(named - kept - of_kept - {"u", *whole}, key=rule.index)
    call.def_partition(
        partition=_partition(local, inputs, outputs, blocks, whole, sums), sharding_rule=rule,
        reduction_factors=tuple(reduced), need_replication_factors=whole, **sizes,
    )  # fmt: skip
    return call


def varying(results: Any, *operands: Any) -> Any:
    """A kernel's results as types know them in a `jax.shard_map`: they vary between devices wherever an operand does.

    JAX infers that for operations, and cannot look into a kernel. Where it checks (`check_vma=True`) Pallas asks for it
    in the shapes of results; what Mosaic's `kernel` returns is said to be the same everywhere.

    Args:
      results: a tree of `jax.ShapeDtypeStruct`, before the kernel runs, or of arrays, after it has.
      operands: of the kernel.
    """
    axes = frozenset[str]().union(*(jax.typeof(x).manual_axis_type.varying for x in operands))

    def vary(result: Any) -> Any:
        if isinstance(result, jax.ShapeDtypeStruct):
            kind = jax.sharding.ManualAxisType(varying=axes)
            return jax.ShapeDtypeStruct(result.shape, result.dtype, manual_axis_type=kind)
        missing = tuple(sorted(axes - jax.typeof(result).manual_axis_type.varying))
        return lax.pcast(result, missing, to="varying") if missing else result

    return jax.tree.map(vary, results)


def device_count() -> int:
    """Of the mesh in use, else of this program."""
    return jax.sharding.get_abstract_mesh().size or jax.device_count()


def _partial_sums(sides: list[list[str]], shardings: list[Any], kept: set[str]) -> dict[str, Axes]:
    """Of each letter that is summed the mesh axes by which every operand that has it is split, where they agree."""
    split: dict[str, set[Axes]] = {}
    for side, sharding in zip(sides, shardings, strict=True):
        for letter, entry in zip(side, _entries(sharding, len(side)), strict=True):
            if letter not in kept and letter != "u":
                split.setdefault(letter, set()).add(entry)
    return {letter: axes for letter, found in split.items() if len(found) == 1 and (axes := next(iter(found)))}


def _between_blocks(mesh: Mesh, chosen: Mapping[str, Axes], blocks: Mapping[str, BlocksOf]) -> dict[str, Axes]:
    """The same, with no block split.

    A block that two devices share would have two scales, so an axis is split between whole blocks or not at all, and
    the axis that counts its blocks is split alike.
    """
    found = dict(chosen)
    for of in blocks.values():
        parts = math.prod(mesh.shape[axis] for axis in found.get(of.letter, ()))
        if of.length % (parts * of.size):
            found[of.letter] = ()
    # Behind that of all: bytes are blocks of two values, which parts may hold where they hold no whole scale.
    return found | {letter: found.get(of.letter, ()) for letter, of in blocks.items()}


def _summed(chosen: Mapping[str, Axes], blocks: Mapping[str, BlocksOf], outputs: list[list[str]]) -> Axes:
    """The mesh axes that split what a result lacks: every device holds a part of that sum."""
    has = lambda side, letter: letter in side or any(of.letter == letter and q in side for q, of in blocks.items())
    letters = [letter for letter in chosen if letter not in blocks and not all(has(side, letter) for side in outputs)]
    return tuple(axis for letter in letters for axis in chosen[letter])


def _scatters(mesh: Mesh, results: Any, chosen: Mapping[str, Axes], summed: Axes, side: list[str]) -> list[Scatter]:
    """The axes of the one result that are asked for in parts over mesh axes that sums are split by."""
    (result,) = jax.tree.leaves(results)
    wanted = zip(side, result.shape, _entries(result.sharding, len(side)), strict=True)
    return [
        Scatter(entry, dimension)
        for dimension, (letter, size, entry) in enumerate(wanted)
        if entry and set(entry) <= set(summed) and not chosen.get(letter)
        and size % math.prod(mesh.shape[axis] for axis in entry) == 0
    ]  # fmt: skip


def _choose_axes(sides: list[list[str]], shardings: list[Any], first: Mapping[str, Axes]) -> dict[str, Axes]:
    """For each letter the mesh axes that split it: the first side that splits it decides; an axis serves one letter."""
    chosen: dict[str, Axes] = dict(first)
    used = {axis for axes in first.values() for axis in axes}
    for side, sharding in zip(sides, shardings, strict=True):
        for letter, entry in zip(side, _entries(sharding, len(side)), strict=True):
            if entry and letter not in chosen and not used & set(entry):
                chosen[letter] = entry
                used |= set(entry)
    return chosen


def _entries(sharding: Any, rank: int) -> list[Axes]:
    spec = tuple(getattr(sharding, "spec", None) or ())
    spec += (None,) * (rank - len(spec))
    return [() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in spec]


def _one_at_a_time(call: Callable[..., Any]) -> Callable[..., Any]:
    # Without a rule of its own, vmap would add a batch axis, which kernels lack and the letters of a rule do not name.
    @custom_vmap
    def mapped(*operands: jax.Array) -> Any:
        return call(*operands)

    @mapped.def_vmap
    def _rule(size: int, is_mapped: list[bool], *operands: jax.Array) -> tuple[Any, Any]:
        def loop(*operands: jax.Array) -> Any:
            def one(parts: list[jax.Array]) -> Any:
                rest = iter(parts)
                return mapped(*(next(rest) if maps else x for x, maps in zip(operands, is_mapped, strict=True)))

            return lax.map(one, [operand for operand, maps in zip(operands, is_mapped, strict=True) if maps])

        results = on_own_elements(loop, is_mapped, operands)
        return results, jax.tree.map(lambda _: True, results)

    return mapped
