"""Kernels under a mesh with explicit axes: a `jax.shard_map` by the rule that
`partition` gives to XLA elsewhere.

With explicit axes the type of each array holds its sharding, so the parts are known
while the program is traced. Operands are moved to the parts that the rule asks for, and
each device runs the kernel on its own part.

One axis of a matrix may stand for several axes of an array, as the rows of `[m, k]`
stand for `[batch, length]`. Each device merges these axes itself. If a batch and a
length are both split, merging them outside would gather one of them.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

import jax
from jax import lax
from jax.custom_batching import custom_vmap
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from pallas_kernels.specs import Entry, entries_of, first_long, moved, names, shards

# jax 0.11 and 0.12 compile no `custom_partitioning` inside of `auto_axes` ("No
# registered implementation for ... Sharding").
_PARTITIONS_INSIDE = jax.__version_info__ < (0, 11)

Side: TypeAlias = list[str]


class BlocksOf(NamedTuple):
    """The axis whose blocks a letter counts: its letter, the values of a block, and the
    length of the axis.
    """

    letter: str
    size: int
    length: int


@dataclass(frozen=True)
class Letters:
    """How an op splits: a letter for each axis of its operands and results, as in an
    einsum.

    Attributes:
      inputs, outputs: letters of each operand and result.
      merged: sizes of the neighbouring axes of an array for which one letter of a
        matrix stands.
      blocks: letters that count blocks.
      whole: letters that no mesh axis may split.
      scattered: whether partial sums may be handed out in parts.
    """

    inputs: list[Side]
    outputs: list[Side]
    merged: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    blocks: Mapping[str, BlocksOf] = field(default_factory=dict)
    whole: tuple[str, ...] = ()
    scattered: bool = False

    @classmethod
    def read(
        cls, rule: str, merged: Mapping[str, tuple[int, ...]] | None = None
    ) -> "Letters":
        """Read a rule such as "m k, n k -> m n".

        >>> Letters.read("m k, n k -> m n").inputs
        [['m', 'k'], ['n', 'k']]
        """
        inputs, outputs = (
            [side.split() for side in part.split(",")] for part in rule.split("->")
        )
        return cls(inputs, outputs, merged or {})

    @property
    def named(self) -> set[str]:
        """All letters of operands and results."""
        return {letter for side in (*self.inputs, *self.outputs) for letter in side}

    @property
    def kept(self) -> set[str]:
        """The letters of results; all others are summed."""
        return {letter for side in self.outputs for letter in side}

    def axes_of(self, letter: str) -> Side:
        """Return a letter for each axis of the array for which a letter of the matrix
        stands.

        >>> Letters([], [], {"m": (2, 3)}).axes_of("m")
        ['m.0', 'm.1']
        """
        return (
            [f"{letter}.{i}" for i in range(len(self.merged[letter]))]
            if letter in self.merged
            else [letter]
        )

    def of_arrays(self) -> "Letters":
        """Return the same rule with a letter for each axis of the arrays."""
        wide = lambda sides: [
            [axis for letter in side for axis in self.axes_of(letter)] for side in sides
        ]
        blocks = {
            letter: of._replace(letter=self._first(of.letter))
            for letter, of in self.blocks.items()
        }
        # Blocks run over merged axes, and only the first of these can be split without
        # cutting a block.
        inner = {
            axis for of in self.blocks.values() for axis in self.axes_of(of.letter)[1:]
        }
        inner -= {of.letter for of in blocks.values()}
        whole = (
            *(axis for letter in self.whole for axis in self.axes_of(letter)),
            *inner,
        )
        return Letters(
            wide(self.inputs), wide(self.outputs), {}, blocks, whole, self.scattered
        )

    def _first(self, letter: str) -> str:
        sizes = self.merged.get(letter)
        return f"{letter}.{first_long(sizes)}" if sizes else letter

    def flatten(self, side: Side, x: jax.Array) -> jax.Array:
        """Return an array, or a part of one, as its matrix."""
        sizes = iter(x.shape)
        return x.reshape(
            [math.prod([next(sizes) for _ in self.axes_of(letter)]) for letter in side]
        )

    def over_arrays(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of matrices as a function of their arrays."""

        def unflatten(side: Side, matrix: jax.Array) -> jax.Array:
            axes = zip(side, matrix.shape, strict=True)
            return matrix.reshape(
                [
                    wide
                    for letter, size in axes
                    for wide in self.merged.get(letter, (size,))
                ]
            )

        def call(*operands: jax.Array) -> Any:
            results = function(
                *(
                    self.flatten(side, x)
                    for side, x in zip(self.inputs, operands, strict=True)
                )
            )
            leaves, tree = jax.tree.flatten(results)
            return jax.tree.unflatten(tree, map(unflatten, self.outputs, leaves))

        return call


def on_parts(
    partition: Callable[..., tuple[Any, ...]],
    automatic: Callable[..., Any],
    letters: Letters,
    operands: Sequence[jax.Array],
    wanted: Sequence[Entry] | None,
) -> Any:
    """Run each device's part of an op under the mesh in use, which has explicit axes.

    Args:
      partition: chooses the parts of arrays, as `custom_partitioning` calls it.
      automatic: the same op for automatic axes. It runs if the mesh has both kinds of
        axes and jax can compile it: XLA would gather a kernel inside a `shard_map` over
        the axes that the `shard_map` leaves out.
      letters: rule of the op on matrices.
      operands: arrays.
      wanted: entries of the one result, or None to take the entries of the operands.
    """
    mesh = jax.sharding.get_abstract_mesh()
    wide = letters.of_arrays()
    given = [entries_of(x) for x in operands]
    counts = {letter: -(-of.length // of.size) for letter, of in letters.blocks.items()}
    # A result may have an axis of which the operands have only the blocks.
    lacking = [
        of
        for of in letters.blocks.values()
        if all(of.letter not in side for side in letters.inputs)
    ]
    counts |= {of.letter: of.length for of in lacking}
    sizes = dict(counts)
    for side, x in zip(wide.inputs, operands, strict=True):
        sizes |= zip(side, x.shape, strict=True)
    asked = [()] * len(wide.outputs) if wanted is None else [wanted]
    # A shape with a sharding, as `partition` reads operands and results.
    typed = lambda shape, spec: SimpleNamespace(
        shape=shape, sharding=NamedSharding(mesh, PartitionSpec(*spec))
    )
    results = [
        typed([sizes[x] for x in side], spec)
        for side, spec in zip(wide.outputs, asked, strict=True)
    ]
    arguments = [typed(x.shape, spec) for x, spec in zip(operands, given, strict=True)]
    _, local, *found = partition(mesh, arguments, results)
    outs, ins = (
        [tuple(sharding.spec) for sharding in shardings] for shardings in found
    )
    # The first of each letter, but none for counted blocks: they follow their axis
    of_operands: dict[str, Entry] = {}
    for letter, entry in (
        pair
        for side, spec in zip(wide.inputs, given)
        for pair in zip(side, spec, strict=True)
    ):
        if entry and letter not in counts:
            of_operands.setdefault(letter, entry)
    finals = [
        _final(side, spec, wanted, of_operands)
        for side, spec in zip(wide.outputs, outs, strict=True)
    ]
    explicit = tuple(
        n
        for n, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Explicit
    )
    shapes = [
        [
            sizes[letter] // shards(mesh, entry)
            for letter, entry in zip(side, spec, strict=True)
        ]
        for side, spec in zip(wide.outputs, outs, strict=True)
    ]
    structure: list[jax.tree_util.PyTreeDef] = []

    def leaves(results: Any) -> tuple[jax.Array, ...]:
        flat, tree = jax.tree.flatten(results)
        structure[:] = [tree]
        return tuple(flat)

    def on_part(*parts: jax.Array) -> tuple[jax.Array, ...]:
        matrices = [
            letters.flatten(side, part)
            for side, part in zip(letters.inputs, parts, strict=True)
        ]
        # Under vmap a `shard_map` takes the new axis, and each device runs the kernel
        # once for each of its elements.
        made = leaves(one_at_a_time(_with_shapes(local, mesh, shapes))(*matrices))
        return tuple(x.reshape(shape) for x, shape in zip(made, shapes, strict=True))

    if AxisType.Auto in mesh.axis_types and _PARTITIONS_INSIDE:
        free = lambda *operands: leaves(automatic(*operands))
        specs = tuple(PartitionSpec(*spec) for spec in finals)
        made = jax.sharding.auto_axes(free, axes=explicit, out_sharding=specs)(
            *operands
        )
    else:
        specs_in, specs_out = (
            tuple(PartitionSpec(*spec) for spec in specs) for specs in (ins, outs)
        )
        # Axes are not named if all are explicit: under `vmap` a `shard_map` lacks those
        # that split the stack.
        options: Any = (
            {}
            if set(mesh.axis_types) == {AxisType.Explicit}
            else dict(axis_names=set(explicit))
        )
        run = jax.shard_map(
            on_part, in_specs=specs_in, out_specs=specs_out, check_vma=False, **options
        )
        made = run(*(moved(x, spec) for x, spec in zip(operands, ins, strict=True)))
        made = [moved(x, spec) for x, spec in zip(made, finals, strict=True)]
    return jax.tree.unflatten(structure[0], made)


def one_at_a_time(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return `call` with a rule for vmap: a loop over the stack.

    Without it vmap would add a batch axis, which neither the kernels nor the letters of
    their rules have.
    """

    @custom_vmap
    def mapped(*operands: jax.Array) -> Any:
        return call(*operands)

    @mapped.def_vmap
    def _rule(
        size: int, is_mapped: list[bool], *operands: jax.Array
    ) -> tuple[Any, Any]:
        def loop(*operands: jax.Array) -> Any:
            def one(parts: list[jax.Array]) -> Any:
                rest = iter(parts)
                return mapped(
                    *(
                        next(rest) if maps else x
                        for x, maps in zip(operands, is_mapped, strict=True)
                    )
                )

            return lax.map(
                one,
                [
                    operand
                    for operand, maps in zip(operands, is_mapped, strict=True)
                    if maps
                ],
            )

        results = _on_own_elements(loop, is_mapped, operands)
        return results, jax.tree.map(lambda _: True, results)

    return mapped


def _on_own_elements(
    loop: Callable[..., Any], is_mapped: Sequence[bool], operands: Sequence[jax.Array]
) -> Any:
    """Run a loop over a stack: each device over its own elements, if a mesh axis splits
    the stack.
    """
    stacks = [
        entries_of(x)[0] for x, maps in zip(operands, is_mapped, strict=True) if maps
    ]
    entry = next((entry for entry in stacks if entry is not None), None)
    if entry is None:
        return loop(*operands)
    specs = tuple(
        PartitionSpec(entry) if maps else PartitionSpec() for maps in is_mapped
    )
    # This runs inside a `shard_map` over the axes that split an element, so only the
    # stack is left to split.
    placed = [
        moved(x, (entry, *entries_of(x)[1:])) if maps else x
        for x, maps in zip(operands, is_mapped, strict=True)
    ]
    run = jax.shard_map(
        loop,
        in_specs=specs,
        out_specs=PartitionSpec(entry),
        axis_names=set(names(entry)),
        check_vma=False,
    )
    return run(*placed)


def under_own_mesh(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, called under the mesh of its operands if their axes are
    explicit and no mesh is in use.

    Arrays with explicit axes know their mesh, so users need no `jax.set_mesh`. Operands
    are trees of arrays.
    """

    @functools.wraps(function)
    def call(*operands: Any) -> Any:
        if not jax.sharding.get_abstract_mesh().empty:
            return function(*operands)
        meshes = (jax.typeof(leaf).sharding.mesh for leaf in jax.tree.leaves(operands))
        own = next(
            (mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), None
        )
        if own is None:
            return function(*operands)
        with jax.sharding.use_abstract_mesh(own):
            return function(*operands)

    return call


def with_automatic_axes(
    function: Callable[..., Any],
    spec: Callable[[jax.ShapeDtypeStruct], PartitionSpec],
    *operands: Any,
) -> Any:
    """Return `function(*operands)`, computed with all axes of the mesh automatic.

    Use this for code that cuts, merges or looks up axes, which JAX refuses to do with
    explicit ones.

    Args:
      function: takes and returns trees of arrays; XLA partitions it.
      spec: takes the shape of a result and returns its spec under explicit axes.
      operands: trees of arrays.
    """

    def automatic(*operands: Any) -> Any:
        mesh = jax.sharding.get_abstract_mesh()
        if AxisType.Explicit not in mesh.axis_types:
            return function(*operands)
        bare = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), operands)
        # Ask for the shapes under automatic axes, as `auto_axes` will: kernels take
        # another way under explicit ones.
        kinds = tuple(
            AxisType.Auto if kind == AxisType.Explicit else kind
            for kind in mesh.axis_types
        )
        with jax.sharding.use_abstract_mesh(mesh.update(axis_types=kinds)):
            specs = jax.tree.map(spec, jax.eval_shape(function, *bare))
        return jax.sharding.auto_axes(function, out_sharding=specs)(*operands)

    return under_own_mesh(automatic)(*operands)


def _final(
    side: Side,
    spec: tuple[Entry, ...],
    wanted: Sequence[Entry] | None,
    of_operands: Mapping[str, Entry],
) -> tuple[Entry, ...]:
    """Return the wanted entries of a result, else the entries of its operands, even if
    the op left an axis whole.
    """
    if wanted is not None:
        return tuple(wanted)
    final: list[Entry] = []
    used = {name for entry in spec for name in names(entry)}
    for letter, entry in zip(side, spec, strict=True):
        other = of_operands.get(letter)
        free = entry is None and not used & set(names(other))
        final.append(other if free else entry)
        used |= set(names(final[-1]))
    return tuple(final)


def _with_shapes(
    local: Any, mesh: AbstractMesh, shapes: list[list[int]]
) -> Callable[..., Any]:
    """Return `local` with the shape that its result has before it is handed out, in
    each `Scatter`.
    """
    scattered = local.keywords.get("scattered")
    if not scattered:
        return local
    shape = list(shapes[0])
    for handed in scattered:
        shape[handed.dimension] *= shards(mesh, handed.axes)
    asked = []
    for handed in scattered:
        asked.append(handed._replace(shape=tuple(shape)))
        shape[handed.dimension] //= shards(mesh, handed.axes)
    return lambda *matrices: local(*matrices, scattered=asked)
