"""Kernels under a mesh with explicit axes, where an array's type says its sharding: `jax.shard_map` by the same rule.

`partition` says in letters how an op splits. With automatic axes XLA reads that when it compiles; with explicit ones
the shardings are known while the program is traced, so each device's part is written down: operands are moved to the
parts that the rule asks for, and each device runs the kernel on its own.

An axis of a matrix that stands for several of an array, as the rows `[m, k]` of x `[batch, length, k]`, is merged on
each device. So a batch and a length that are both split stay where they are; merged before, they would not be
neighbours.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

# jax 0.11 and 0.12 compile no `custom_partitioning` inside of `auto_axes` ("No registered implementation for ...
# Sharding").
_PARTITIONS_INSIDE = jax.__version_info__ < (0, 11)

Side = list[str]
# What one axis of a matrix stands for: the sizes of neighbouring axes of the array.
Merged = Mapping[str, tuple[int, ...]]
# The spec of a result, with an entry for every axis.
Wanted = Sequence[Any]


class Rule(NamedTuple):
    """How an op splits: letters of the axes of its operands and results, and what axes some of them stand for."""

    inputs: list[Side]
    outputs: list[Side]
    merged: Merged

    @classmethod
    def of(cls, text: str, merged: Merged | None = None) -> "Rule":
        """The rule that is written as an einsum is.

        >>> Rule.of("m k, n k -> m n").inputs
        [['m', 'k'], ['n', 'k']]
        """
        inputs, outputs = ([side.split() for side in part.split(",")] for part in text.split("->"))
        return cls(inputs, outputs, merged or {})

    def wide_of(self, letter: str) -> Side:
        """Of an axis of a matrix, a letter for each axis of the array that it stands for.

        >>> Rule([], [], {"m": (2, 3)}).wide_of("m")
        ['m.0', 'm.1']
        """
        return [f"{letter}.{i}" for i in range(len(self.merged[letter]))] if letter in self.merged else [letter]

    def wide(self, sides: list[Side]) -> list[Side]:
        """The letters of arrays, from those of matrices."""
        return [[wide for letter in side for wide in self.wide_of(letter)] for side in sides]

    def first(self, letter: str) -> str:
        """Of the axes that one stands for the first that is longer than one: split, it leaves neighbours together."""
        sizes = self.merged.get(letter)
        if not sizes:
            return letter
        return f"{letter}.{next((i for i, size in enumerate(sizes) if size > 1), 0)}"

    def flatten(self, side: Side, x: jax.Array) -> jax.Array:
        """An array, or a part of one, as the matrix that it stands for."""
        sizes = iter(x.shape)
        return x.reshape([math.prod([next(sizes) for _ in self.wide_of(letter)]) for letter in side])

    def unflatten(self, side: Side, matrix: jax.Array) -> jax.Array:
        """The array that a whole matrix stands for."""
        axes = zip(side, matrix.shape, strict=True)
        return matrix.reshape([wide for letter, size in axes for wide in self.merged.get(letter, (size,))])


def on_parts(
    split: Callable[..., Any],
    mapped: Callable[..., Any],
    automatic: Callable[..., Any],
    rule: Rule,
    counts: Mapping[str, int],
    operands: Sequence[jax.Array],
    wanted: Wanted | None,
) -> Any:
    """Each device's part of an op, under the mesh in use, which has explicit axes.

    Args:
      split: `partition` of the rule in the letters of arrays, as `custom_partitioning` calls it.
      mapped: gives a device's function of matrices a rule for `vmap`.
      automatic: the same op for automatic axes. It runs where the mesh has some of both kinds and jax can compile it: a
        kernel in a `shard_map` over some axes is gathered over the others.
      rule: how the op splits.
      counts: of letters that count blocks, how many.
      operands: arrays.
      wanted: the spec of the one result, or None for what the operands make of it.
    """
    mesh = jax.sharding.get_abstract_mesh()
    inputs, outputs = rule.wide(rule.inputs), rule.wide(rule.outputs)
    given = [entries_of(x) for x in operands]
    sizes = dict(counts)
    for side, x in zip(inputs, operands, strict=True):
        sizes |= zip(side, x.shape, strict=True)
    asked = [()] * len(outputs) if wanted is None else [wanted]
    results = [_Typed([sizes[x] for x in side], mesh, spec) for side, spec in zip(outputs, asked, strict=True)]
    arguments = [_Typed(x.shape, mesh, spec) for x, spec in zip(operands, given, strict=True)]
    _, local, *found = split(mesh, arguments, results)
    outs, ins = ([tuple(sharding.spec) for sharding in shardings] for shardings in found)
    of_operands = {} if wanted is not None else _first_entries(inputs, given, counts)
    finals = [_final(side, spec, wanted, of_operands) for side, spec in zip(outputs, outs, strict=True)]
    names = tuple(n for n, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit)
    shapes = [_part_shape(mesh, side, spec, sizes) for side, spec in zip(outputs, outs, strict=True)]
    structure: list[Any] = []

    def leaves(results: Any) -> tuple[jax.Array, ...]:
        flat, tree = jax.tree.flatten(results)
        structure[:] = [tree]
        return tuple(flat)

    def on_part(*parts: jax.Array) -> tuple[jax.Array, ...]:
        matrices = [rule.flatten(side, part) for side, part in zip(rule.inputs, parts, strict=True)]
        made = leaves(mapped(_with_shapes(local, mesh, shapes))(*matrices))
        return tuple(x.reshape(shape) for x, shape in zip(made, shapes, strict=True))

    if AxisType.Auto in mesh.axis_types and _PARTITIONS_INSIDE:
        free = lambda *operands: leaves(automatic(*operands))
        specs = tuple(PartitionSpec(*spec) for spec in finals)
        made = jax.sharding.auto_axes(free, axes=names, out_sharding=specs)(*operands)
    else:
        specs_in, specs_out = (tuple(PartitionSpec(*spec) for spec in specs) for specs in (ins, outs))
        # Not named where all axes are explicit: under `vmap` a `shard_map` lacks those that split the stack.
        options: Any = {} if set(mesh.axis_types) == {AxisType.Explicit} else dict(axis_names=set(names))
        run = jax.shard_map(on_part, in_specs=specs_in, out_specs=specs_out, check_vma=False, **options)
        made = run(*(_moved(x, spec) for x, spec in zip(operands, ins, strict=True)))
        made = [_moved(x, spec) for x, spec in zip(made, finals, strict=True)]
    return jax.tree.unflatten(structure[0], made)


def on_own_elements(loop: Callable[..., Any], is_mapped: Sequence[bool], operands: Sequence[jax.Array]) -> Any:
    """`loop(*operands)`, a function of each element of a stack, for those that a device has where axes split the stack.

    Args:
      loop: of the operands.
      is_mapped: which of them are stacks, along their first axis.
      operands: arrays.
    """
    stacks = [entries_of(x)[0] for x, maps in zip(operands, is_mapped, strict=True) if maps]
    entry = next((entry for entry in stacks if entry is not None), None)
    if entry is None:
        return loop(*operands)
    specs = tuple(PartitionSpec(entry) if maps else PartitionSpec() for maps in is_mapped)
    # Inside a `shard_map` over the axes that split an element: nothing else is left to split.
    moved = [_moved(x, (entry, *entries_of(x)[1:])) if maps else x for x, maps in zip(operands, is_mapped, strict=True)]
    run = jax.shard_map(
        loop, in_specs=specs, out_specs=PartitionSpec(entry), axis_names=set(_names(entry)), check_vma=False
    )
    return run(*moved)


def under_own_mesh(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function(*operands)` under the mesh in use, or where none is, as without `jax.set_mesh`, that of explicit types.

    Operands are trees of arrays, in whose types their mesh is where its axes are explicit.
    """

    @functools.wraps(function)
    def call(*operands: Any) -> Any:
        if not jax.sharding.get_abstract_mesh().empty:
            return function(*operands)
        meshes = (jax.typeof(leaf).sharding.mesh for leaf in jax.tree.leaves(operands))
        own = next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), None)
        if own is None:
            return function(*operands)
        with jax.sharding.use_abstract_mesh(own):
            return function(*operands)

    return call


def with_automatic_axes(function: Callable[..., Any], spec: Callable[[Any], Any], *operands: Any) -> Any:
    """`function(*operands)`, inside of which all axes of the mesh are automatic: for what cuts and looks up values.

    Args:
      function: of arrays; XLA partitions it.
      spec: of the shape of each of its results, with explicit axes.
      operands: arrays, or None.
    """
    return under_own_mesh(functools.partial(_with_automatic_axes, function, spec))(*operands)


def _with_automatic_axes(function: Callable[..., Any], spec: Callable[[Any], Any], *operands: Any) -> Any:
    mesh = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit not in mesh.axis_types:
        return function(*operands)
    bare = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), operands)
    # Shapes are asked as `auto_axes` will ask: kernels take another way where axes are explicit.
    kinds = tuple(AxisType.Auto if kind == AxisType.Explicit else kind for kind in mesh.axis_types)
    with jax.sharding.use_abstract_mesh(mesh.update(axis_types=kinds)):
        specs = jax.tree.map(spec, jax.eval_shape(function, *bare))
    return jax.sharding.auto_axes(function, out_sharding=specs)(*operands)


class _Typed:
    """A shape with a sharding, as `partition` reads operands and results."""

    def __init__(self, shape: Sequence[int], mesh: Any, spec: Sequence[Any]):
        self.shape, self.sharding = tuple(shape), NamedSharding(mesh, PartitionSpec(*spec))


def entries_of(x: jax.Array) -> tuple[Any, ...]:
    """The spec in the type of x, with an entry for every axis."""
    spec = tuple(jax.typeof(x).sharding.spec)
    return (*spec, *(None,) * (x.ndim - len(spec)))


def _first_entries(sides: list[Side], specs: list[tuple[Any, ...]], counts: Mapping[str, int]) -> dict[str, Any]:
    """Of each letter the first entry among operands; counted blocks have none, which follow what they are blocks of."""
    found: dict[str, Any] = {}
    for side, spec in zip(sides, specs, strict=True):
        found |= {x: entry for x, entry in zip(side, spec, strict=True) if entry and x not in found and x not in counts}
    return found


def _final(side: Side, spec: tuple[Any, ...], wanted: Wanted | None, of_operands: Mapping[str, Any]) -> tuple[Any, ...]:
    """The spec of a result: what was asked for; else that of the operands, though the op itself left an axis whole."""
    if wanted is not None:
        return tuple(wanted)
    entries, used = [], {name for entry in spec for name in _names(entry)}
    for letter, entry in zip(side, spec, strict=True):
        other = of_operands.get(letter)
        free = entry is None and not used & set(_names(other))
        entries.append(other if free else entry)
        used |= set(_names(entries[-1]))
    return tuple(entries)


def _part_shape(mesh: Any, side: Side, spec: Sequence[Any], sizes: Mapping[str, int]) -> list[int]:
    parts = [math.prod(mesh.shape[name] for name in _names(entry)) for entry in spec]
    return [sizes[letter] // count for letter, count in zip(side, parts, strict=True)]


def _with_shapes(local: Any, mesh: Any, shapes: list[list[int]]) -> Callable[..., Any]:
    """`local` with the shape of its result, before that is handed out, in each `Scatter`."""
    scattered = local.keywords.get("scattered")
    if not scattered:
        return local
    shape = list(shapes[0])
    for handed in scattered:
        shape[handed.dimension] *= math.prod(mesh.shape[name] for name in handed.axes)
    asked = []
    for handed in scattered:
        asked.append(handed._replace(shape=tuple(shape)))
        shape[handed.dimension] //= math.prod(mesh.shape[name] for name in handed.axes)
    return lambda *matrices: local(*matrices, scattered=asked)


def _moved(x: jax.Array, spec: Sequence[Any]) -> jax.Array:
    if [_names(entry) for entry in entries_of(x)] == [_names(entry) for entry in spec]:
        return x
    return jax.sharding.reshard(x, PartitionSpec(*spec))


def _names(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
