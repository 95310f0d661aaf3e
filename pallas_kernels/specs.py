"""The one reader of `PartitionSpec`: which mesh axes split each axis of an array.

A spec has an entry for each axis of an array: None, a name of a mesh axis, or a tuple
of names. Trailing entries may be missing. The functions here hide these spellings.
`names` turns an entry into a tuple, `entries` fills up the rest, and others follow a
reshape.

Axes of a mesh are automatic or explicit. With explicit ones the sharding is part of an
array's type, and JAX asks for a sharding if an operation is ambiguous. Merging axes is:
the parts of a merged axis are contiguous only if its first axis longer than one is the
one that is split. `regrouped` and `ungrouped` keep that one where it is, and gather the
others.
"""

import itertools
import math
from collections.abc import Sequence
from typing import TypeAlias, TypeVar

import jax
from jax import Array, ShapeDtypeStruct, lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

Sharding: TypeAlias = NamedSharding | PartitionSpec | None
Entry: TypeAlias = str | tuple[str, ...] | None
Axes: TypeAlias = tuple[str, ...]  # of a mesh
Shape: TypeAlias = tuple[int, ...]
T = TypeVar("T")


def names(entry: Entry) -> Axes:
    """Return the mesh axes that an entry names, the slowest first.

    >>> names(None), names("data"), names(("data", "fsdp"))
    ((), ('data',), ('data', 'fsdp'))
    """
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def shards(mesh: Mesh | AbstractMesh, entry: Entry) -> int:
    """Return the number of parts into which an entry cuts its axis."""
    return math.prod(mesh.shape[name] for name in names(entry))


def entries(sharding: Sharding, ndim: int) -> tuple[Entry, ...]:
    """Return the entries of a spec for all `ndim` axes.

    Raises:
      ValueError: the spec describes more axes.

    >>> entries(PartitionSpec("data"), 3)
    ('data', None, None)
    """
    if isinstance(sharding, NamedSharding):
        spec = tuple(sharding.spec)
    else:
        spec = tuple(sharding or ())
    if len(spec) > ndim:
        raise ValueError(
            f"{sharding} describes {len(spec)} axes, but the array has {ndim}; drop the"
            " surplus entries"
        )
    return spec + (None,) * (ndim - len(spec))


def entries_of(x: Array) -> tuple[Entry, ...]:
    """Return the entries of the spec in the type of x.

    All are None unless its mesh has explicit axes.
    """
    return entries(jax.typeof(x).sharding, x.ndim)


def with_entries(sharding: Sharding, changed: Sequence[Entry]) -> Sharding:
    """Return a sharding of the same kind and mesh with another spec; None stays None.

    >>> changed = with_entries(PartitionSpec("data"), (None, "data"))
    >>> changed == PartitionSpec(None, "data")
    True
    """
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec(*changed))
    return None if sharding is None else PartitionSpec(*changed)


def sharding_of(x: Array | jax.core.ShapedArray) -> NamedSharding | None:
    """Return the sharding in the type of x, or in a type, if axes are explicit."""
    kind = x if isinstance(x, jax.core.ShapedArray) else jax.typeof(x)
    sharding = kind.sharding
    return sharding if AxisType.Explicit in sharding.mesh.axis_types else None


def has_explicit_axes() -> bool:
    """Return whether the mesh in use has explicit axes."""
    return AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types


def device_count() -> int:
    """Return the number of devices of the mesh in use, or of this program."""
    return jax.sharding.get_abstract_mesh().size or jax.device_count()


def hidden_shards() -> int:
    """Return into how many parts XLA may cut an axis that its type shows as whole.

    It is one part if axes are explicit.
    """
    return 1 if has_explicit_axes() else device_count()


def moved(x: Array, spec: Sequence[Entry]) -> Array:
    """Return x with this spec in its type, moved only if it has another one.

    Without explicit axes nothing moves.
    """
    sharding = sharding_of(x)
    own = [names(entry) for entry in entries_of(x)]
    wanted = [names(entry) for entry in spec]
    if own == wanted or (sharding is None and not has_explicit_axes()):
        return x
    return jax.sharding.reshard(x, with_entries(sharding or PartitionSpec(), spec))


def regrouped(x: Array, groups: Sequence[Sequence[int]]) -> Array:
    """Merge each run of neighbouring axes of x.

    `groups` has the sizes of the axes of each run.

    >>> regrouped(jax.numpy.ones((2, 3, 4)), [[2], [3, 4]]).shape
    (2, 12)
    """
    shape = tuple(math.prod(group) for group in groups)
    sharding = sharding_of(x)
    if sharding is None:
        return x.reshape(shape)
    kept, merged = merged_entries(entries_of(x), groups)
    out_sharding = with_entries(sharding, merged)
    return lax.reshape(moved(x, kept), shape, out_sharding=out_sharding)


def ungrouped(x: Array, groups: Sequence[Sequence[int]]) -> Array:
    """Split each axis of x into the axes of its group, the inverse of `regrouped`.

    >>> ungrouped(jax.numpy.ones((2, 12)), [[2], [3, 4]]).shape
    (2, 3, 4)
    """
    shape = tuple(itertools.chain(*groups))
    sharding = sharding_of(x)
    if sharding is None:
        return x.reshape(shape)
    split = split_entries(sharding, entries_of(x), groups)
    return lax.reshape(x, shape, out_sharding=with_entries(sharding, split))


def merged_entries(
    spec: Sequence[Entry], groups: Sequence[Sequence[int]]
) -> tuple[tuple[Entry, ...], tuple[Entry, ...]]:
    """Return (the entries that stay when groups are merged, those of merged axes).

    >>> merged_entries(("a", "b", "c"), [[2], [3, 4]])
    (('a', 'b', None), ('a', 'b'))
    """
    kept: list[Entry] = []
    merged: list[Entry] = []
    for group in groups:
        first = len(kept) + first_long(group)
        kept += [None] * len(group)
        if group:
            kept[first] = spec[first]
        merged.append(spec[first] if group else None)
    return tuple(kept), tuple(merged)


def split_entries(
    sharding: Sharding,
    spec: Sequence[Entry],
    groups: Sequence[Sequence[int]],
) -> tuple[Entry, ...]:
    """Return the entries of axes that are split into groups.

    An entry that does not divide its axis becomes None.

    >>> split_entries(None, ("a", "b"), [[2], [1, 4]])
    ('a', None, 'b')
    """
    split: list[Entry] = []
    for entry, group in zip(spec, groups, strict=True):
        parts = 1
        if isinstance(sharding, NamedSharding):
            parts = shards(sharding.mesh, entry)
        of_group: list[Entry] = [None] * len(group)
        first = first_long(group)
        if group and group[first] % parts == 0:
            of_group[first] = entry
        split += of_group
    return tuple(split)


def first_long(sizes: Sequence[int]) -> int:
    """Return the index of the first size above one, else 0.

    It is the axis of a merged one whose parts are contiguous.
    """
    return next((i for i, size in enumerate(sizes) if size > 1), 0)


def varying(results: T, *operands: Array) -> T:
    """Return a kernel's results, which vary between devices wherever an operand does.

    "Vary" is a part of types inside of a `jax.shard_map`. JAX infers this for its own
    operations but cannot look into a kernel. Where it checks (`check_vma=True`), Pallas
    reads it from the shapes of results, and the results of Mosaic's `kernel` vary
    nowhere.

    Args:
      results: a tree of `jax.ShapeDtypeStruct` before the kernel runs, or of arrays
        after it.
      operands: arrays that the kernel reads.
    """
    of_operands = [jax.typeof(x).manual_axis_type.varying for x in operands]
    axes = frozenset[str]().union(*of_operands)

    def vary(result: Array | ShapeDtypeStruct) -> object:
        if isinstance(result, ShapeDtypeStruct):
            kind = jax.sharding.ManualAxisType(varying=axes)
            return ShapeDtypeStruct(result.shape, result.dtype, manual_axis_type=kind)
        # Sorted, so that the program, and with it the key of the compilation cache,
        # does not depend on a set's order.
        missing = tuple(sorted(axes - jax.typeof(result).manual_axis_type.varying))
        return lax.pcast(result, missing, to="varying") if missing else result

    return jax.tree.map(vary, results)


def varying_alike(operands: T) -> T:
    """Return a tree of operands that vary over the same axes of a `jax.shard_map`."""
    # A custom_vjp must return gradients that vary as its operands do. Outside of it
    # JAX's own pcast sums the gradient of an operand that was the same on every device.
    return varying(operands, *jax.tree.leaves(operands))
