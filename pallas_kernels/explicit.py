"""Kernels under a mesh with explicit axes: a `jax.shard_map` by the letters of an op.

With explicit axes the type of each array holds its sharding, so the parts are known
while the program is traced. Operands are moved to the parts that the rule asks for, and
each device runs the kernel on its own part. `partition` gives the same rule to XLA
elsewhere.

Each device merges axes itself, if one axis of a matrix stands for several of an array.
If a batch and a length are both split, merging them outside would gather one of them.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import ParamSpec, TypeVar

import jax
from jax import Array, ShapeDtypeStruct, lax
from jax.custom_batching import custom_vmap
from jax.sharding import AxisType, PartitionSpec

from pallas_kernels.parts import Letters, Side, Spec
from pallas_kernels.specs import Entry, entries, entries_of, moved, names, shards

P = ParamSpec("P")
T = TypeVar("T")

# jax 0.11 and 0.12 compile no `custom_partitioning` inside of `auto_axes` ("No
# registered implementation for ... Sharding").
_PARTITIONS_INSIDE = jax.__version_info__ < (0, 11)


def on_parts(
    local: Callable[..., T],
    automatic: Callable[..., T],
    letters: Letters,
    operands: Sequence[Array],
    wanted: Sequence[Entry] | None,
) -> T:
    """Run each device's part of an op under the mesh in use, which has explicit axes.

    Args:
      local: computes a device's part of matrices, see `partition.partitioned`.
      automatic: the same op for automatic axes. It runs if the mesh has both kinds of
        axes and jax can compile it: XLA would gather a kernel inside a `shard_map` over
        the axes that the `shard_map` leaves out.
      letters: rule of the op on matrices.
      operands: arrays.
      wanted: entries of the one result, or None to take the entries of the operands.
    """
    mesh = jax.sharding.get_abstract_mesh()
    explicit = _explicit_axes(mesh)
    wide = letters.of_arrays()
    sizes = _sizes(wide, operands)
    given = [entries_of(x) for x in operands]
    asked = [entries(None, len(side)) for side in wide.outputs]
    if wanted is not None:
        asked = [tuple(wanted)]
    results = [[*map(sizes.__getitem__, side)] for side in wide.outputs]
    parts = wide.parts(mesh, given, asked, results[0])
    finals = [tuple(wanted or ())]
    if wanted is None:
        of_operands = _entries_of_letters(wide, given)
        finals = [
            _final(side, spec, of_operands)
            for side, spec in zip(wide.outputs, parts.outputs, strict=True)
        ]
    shapes = []
    for shape, spec in zip(results, parts.outputs, strict=True):
        counts = [shards(mesh, entry) for entry in spec]
        shapes.append([*map(operator.floordiv, shape, counts)])
    own = parts.with_shapes(mesh, shapes[0]).bind(local)
    trees: list[jax.tree_util.PyTreeDef] = []

    def leaves(results: T) -> tuple[Array, ...]:
        flat, tree = jax.tree.flatten(results)
        trees.append(tree)
        return tuple(flat)

    def on_part(*arrays: Array) -> tuple[Array, ...]:
        matrices = map(letters.flatten, letters.inputs, arrays)
        # Under vmap a `shard_map` takes the new axis, and each device runs the kernel
        # once for each of its elements.
        made = leaves(one_at_a_time(own)(*matrices))
        return tuple(x.reshape(shape) for x, shape in zip(made, shapes, strict=True))

    def by_xla(*arrays: Array) -> tuple[Array, ...]:
        return leaves(automatic(*arrays))

    if AxisType.Auto in mesh.axis_types and _PARTITIONS_INSIDE:
        specs = _partition_specs(finals)
        run = jax.sharding.auto_axes(by_xla, axes=explicit, out_sharding=specs)
        made = run(*operands)
        return jax.tree.unflatten(trees[0], made)
    # Axes are not named if all are explicit: under `vmap` a `shard_map` lacks those
    # that split the stack.
    every = set(mesh.axis_types) == {AxisType.Explicit}
    run = jax.shard_map(
        on_part,
        in_specs=_partition_specs(parts.inputs),
        out_specs=_partition_specs(parts.outputs),
        axis_names=set() if every else set(explicit),
        check_vma=False,
    )
    made = map(moved, run(*map(moved, operands, parts.inputs)), finals)
    return jax.tree.unflatten(trees[0], made)


def _explicit_axes(mesh: jax.sharding.AbstractMesh) -> tuple[str, ...]:
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in kinds if kind == AxisType.Explicit)


def _sizes(wide: Letters, operands: Sequence[Array]) -> dict[str, int]:
    """Return the size of each axis of operands and results."""
    sizes = {}
    for letter, of in wide.blocks.items():
        sizes[letter] = -(-of.length // of.size)
        # A result may have an axis of which the operands have only the blocks.
        sizes[of.letter] = of.length
    for side, x in zip(wide.inputs, operands, strict=True):
        sizes |= zip(side, x.shape, strict=True)
    return sizes


def _entries_of_letters(wide: Letters, given: Sequence[Spec]) -> dict[str, Entry]:
    """Return the first entry of each letter; counted blocks follow their axis."""
    found: dict[str, Entry] = {}
    for side, spec in zip(wide.inputs, given, strict=True):
        for letter, entry in zip(side, spec, strict=True):
            if entry and letter not in wide.blocks:
                found.setdefault(letter, entry)
    return found


def _final(side: Side, spec: Spec, of_operands: Mapping[str, Entry]) -> Spec:
    """Return the entries of a result: those of its operands if the op left it whole."""
    final = list(spec)
    used = set().union(*map(names, spec))
    for place, letter in enumerate(side):
        other = of_operands.get(letter)
        if spec[place] is None and used.isdisjoint(names(other)):
            final[place] = other
            used.update(names(other))
    return tuple(final)


def _partition_specs(specs: Sequence[Spec]) -> tuple[PartitionSpec, ...]:
    return tuple(PartitionSpec(*spec) for spec in specs)


def one_at_a_time(call: Callable[..., T]) -> Callable[..., T]:
    """Return `call` with a rule for vmap: a loop over the stack.

    Without it vmap would add a batch axis, which neither the kernels nor the letters of
    their rules have.
    """

    @custom_vmap
    def mapped(*operands: Array) -> T:
        return call(*operands)

    @mapped.def_vmap
    def _rule(size: int, is_mapped: list[bool], *operands: Array) -> tuple[T, T]:
        places = [place for place, maps in enumerate(is_mapped) if maps]

        def loop(*operands: Array) -> T:
            def one(elements: list[Array]) -> T:
                own = list(operands)
                for place, element in zip(places, elements, strict=True):
                    own[place] = element
                return mapped(*own)

            return lax.map(one, [operands[place] for place in places])

        results = _on_own_elements(loop, places, operands)
        return results, jax.tree.map(lambda _: True, results)

    return mapped


def _on_own_elements(
    loop: Callable[..., T],
    places: Sequence[int],
    operands: Sequence[Array],
) -> T:
    """Run a loop over stacks, the operands at these places.

    Each device runs it over its own elements, if a mesh axis splits the stacks.
    """
    stacks = [entries_of(operands[place])[0] for place in places]
    entry = next((entry for entry in stacks if entry is not None), None)
    if entry is None:
        return loop(*operands)
    specs = [PartitionSpec()] * len(operands)
    placed = list(operands)
    # This runs inside a `shard_map` over the axes that split an element, so only the
    # stack is left to split.
    for place in places:
        x = operands[place]
        specs[place] = PartitionSpec(entry)
        placed[place] = moved(x, (entry, *entries_of(x)[1:]))
    run = jax.shard_map(
        loop,
        in_specs=tuple(specs),
        out_specs=PartitionSpec(entry),
        axis_names=set(names(entry)),
        check_vma=False,
    )
    return run(*placed)


def under_own_mesh(function: Callable[P, T]) -> Callable[P, T]:
    """Return `function`, called under the mesh of its operands if that is explicit.

    A mesh that is in use comes first. Arrays with explicit axes know their mesh, so
    users need no `jax.set_mesh`. Operands are trees of arrays.
    """

    @wraps(function)
    def call(*operands: P.args, **options: P.kwargs) -> T:
        if not jax.sharding.get_abstract_mesh().empty:
            return function(*operands, **options)
        for leaf in jax.tree.leaves(operands):
            mesh = jax.typeof(leaf).sharding.mesh
            if AxisType.Explicit in mesh.axis_types:
                with jax.sharding.use_abstract_mesh(mesh):
                    return function(*operands, **options)
        return function(*operands, **options)

    return call


def with_automatic_axes(
    function: Callable[..., T],
    spec: Callable[[ShapeDtypeStruct], PartitionSpec],
    *operands: object,
) -> T:
    """Return `function(*operands)`, computed with all axes of the mesh automatic.

    Use this for code that cuts, merges or looks up axes, which JAX refuses to do with
    explicit ones.

    Args:
      function: takes and returns trees of arrays; XLA partitions it.
      spec: takes the shape of a result and returns its spec under explicit axes.
      operands: trees of arrays.
    """

    def automatic(*operands: object) -> T:
        mesh = jax.sharding.get_abstract_mesh()
        if AxisType.Explicit not in mesh.axis_types:
            return function(*operands)
        bare = jax.tree.map(lambda x: ShapeDtypeStruct(x.shape, x.dtype), operands)
        # Ask for the shapes under automatic axes, as `auto_axes` will: kernels take
        # another way under explicit ones.
        kinds = list(mesh.axis_types)
        for i, kind in enumerate(kinds):
            if kind == AxisType.Explicit:
                kinds[i] = AxisType.Auto
        with jax.sharding.use_abstract_mesh(mesh.update(axis_types=tuple(kinds))):
            specs = jax.tree.map(spec, jax.eval_shape(function, *bare))
        return jax.sharding.auto_axes(function, out_sharding=specs)(*operands)

    return under_own_mesh(automatic)(*operands)
