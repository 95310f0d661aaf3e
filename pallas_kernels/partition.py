"""Kernels under a mesh and under vmap: each device runs one on its own part.

Nothing is gathered. XLA cannot look into a kernel: a bare `pallas_call` under a mesh
gathers its operands onto every device. `partitioned` tells XLA which axes of operands
and results belong together, by the letters of `parts`. If operands split the summed
axis, as a weight gradient splits its tokens, each device sums its own part. The partial
sums are then added, and handed out in one reduce-scatter if the result is wanted in
parts: neither activations nor gradients are gathered.

Under vmap a kernel runs once for every element, in a loop, because kernels have no
batch axis.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, TypeAlias, TypeVar

import jax
from jax import Array
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from pallas_kernels.explicit import on_parts, one_at_a_time, under_own_mesh
from pallas_kernels.parts import BlocksOf, Letters, Spec
from pallas_kernels.specs import Entry, Shape, device_count, entries, has_explicit_axes

__all__ = ["BlocksOf", "Letters", "partitioned"]

T = TypeVar("T")


class _Leaf(Protocol):
    """An operand or result as XLA describes it."""

    shape: Shape
    sharding: object


# A tree of `_Leaf`.
_Leaves: TypeAlias = object


def partitioned(
    local: Callable[..., T],
    rule: str,
    blocks: Mapping[str, BlocksOf] | None = None,
    *,
    whole: tuple[str, ...] = (),
    scattered: bool = False,
    merged: Mapping[str, tuple[int, ...]] | None = None,
    wanted: tuple[Entry, ...] | None = None,
) -> Callable[..., T]:
    """Return `local` as a function of whole arrays: each device computes its part.

    With automatic axes XLA partitions it at compile time. With explicit axes it is a
    `jax.shard_map` (`explicit`).

    Args:
      local: takes one device's parts of the operands, and `summed_over=`, the mesh axes
        that split an axis which some result lacks. The result is partial there, and
        `local` must `lax.psum` (or `lax.pmax`) it.
      rule: letters of the axes of each operand and result, see `parts`. A letter has
        one size everywhere.
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
    named = letters.named
    # Callers may name letters that only some of their rules have.
    used = {letter: of for letter, of in (blocks or {}).items() if letter in named}
    letters = replace(letters, blocks=used, whole=whole, scattered=scattered)

    def automatic(*operands: Array) -> T:
        return letters.over_arrays(_by_xla(local, rule, letters))(*operands)

    one_by_one = one_at_a_time(automatic)

    def call(*operands: Array) -> T:
        if has_explicit_axes():
            return on_parts(local, automatic, letters, operands, wanted)
        # Without a mesh `custom_partitioning` costs nothing: XLA inlines `local` into
        # the program.
        return one_by_one(*operands)

    return under_own_mesh(call)


def _by_xla(local: Callable[..., T], rule: str, letters: Letters) -> Callable[..., T]:
    """Return the function of matrices that XLA partitions by `rule`."""

    # XLA calls `partition` at compile time, when it knows the shardings that the rest
    # of the program prefers, and replaces the whole call by `local` (JAX docs,
    # jax.experimental.custom_partitioning).
    @custom_partitioning
    def call(*operands: Array) -> T:
        return local(*operands, summed_over=())

    def partition(
        mesh: Mesh | AbstractMesh,
        operands: _Leaves,
        results: _Leaves,
    ) -> tuple[object, ...]:
        made, tree = jax.tree.flatten(results)
        inputs = [_spec_of(leaf) for leaf in jax.tree.leaves(operands)]
        outputs = [_spec_of(leaf) for leaf in made]
        parts = letters.parts(mesh, inputs, outputs, made[0].shape)
        of_results = jax.tree.unflatten(tree, _shardings(mesh, parts.outputs))
        of_operands = tuple(_shardings(mesh, parts.inputs))
        return mesh, parts.bind(local), of_results, of_operands

    sizes = {}
    for letter, of in letters.blocks.items():
        # The rule says that an axis of values is (blocks) x (values of a block), so
        # that a sharding of one implies a sharding of the other. It may say so only if
        # every mesh of these devices divides the blocks. Otherwise XLA splits one mesh
        # axis between the two factors, which JAX cannot read.
        if of.letter not in sizes and of.length % (of.size * device_count()) == 0:
            rule = rule.replace(of.letter, f"({letter} {of.letter})")
            sizes[of.letter] = of.size
    kept = {
        letter for letter, of in letters.blocks.items() if of.letter in letters.kept
    }
    kept |= letters.kept | {"u", *letters.whole}
    call.def_partition(
        partition=partition,
        sharding_rule=rule,
        # Shardy wants reduction factors in the order in which the rule names them.
        reduction_factors=tuple(sorted(letters.named - kept, key=rule.index)),
        need_replication_factors=letters.whole,
        **sizes,
    )
    return call


def _spec_of(leaf: _Leaf) -> Spec:
    """Return the entries of an operand or result; XLA may know no sharding of it."""
    return entries(getattr(leaf.sharding, "spec", None), len(leaf.shape))


def _shardings(mesh: Mesh | AbstractMesh, specs: Sequence[Spec]) -> list[NamedSharding]:
    return [NamedSharding(mesh, PartitionSpec(*spec)) for spec in specs]
