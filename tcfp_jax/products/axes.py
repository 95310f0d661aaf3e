"""Merging and splitting neighbouring axes under meshes with explicit axes, where the sharding is part of the type.

A kernel `[k, heads, d]` is multiplied as `[k, heads d]`. An array whose first axis of such a group is split over
devices stays where it is when the group becomes one axis; where another one is split, its parts are not neighbours, and
JAX asks to say what shall happen: they are brought together first.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

Sharding = NamedSharding | PartitionSpec | None


def entries(sharding: Sharding, ndim: int) -> tuple[Any, ...]:
    """What a spec says of each of `ndim` axes.

    Raises:
      ValueError: it describes more axes.

    >>> entries(PartitionSpec("data"), 3)
    ('data', None, None)
    """
    spec = tuple(sharding.spec if isinstance(sharding, NamedSharding) else sharding or ())
    if len(spec) > ndim:
        raise ValueError(f"out_sharding={sharding} describes {len(spec)} axes, but the result has {ndim}")
    return spec + (None,) * (ndim - len(spec))


def with_entries(sharding: Sharding, changed: Sequence[Any]) -> Sharding:
    """A sharding as users give it, of the same mesh and with another spec; None stays None.

    >>> with_entries(PartitionSpec("data"), (None, "data")) == PartitionSpec(None, "data")
    True
    """
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec(*changed))
    return None if sharding is None else PartitionSpec(*changed)


def sharding_of(x: jax.Array) -> NamedSharding | None:
    """The sharding in the type of x, where its mesh has explicit axes."""
    sharding = jax.typeof(x).sharding
    return sharding if AxisType.Explicit in sharding.mesh.axis_types else None


def regrouped(x: jax.Array, groups: Sequence[Sequence[int]]) -> jax.Array:
    """`x` with each run of neighbouring axes merged: groups hold the sizes of its axes, in order.

    >>> regrouped(jax.numpy.ones((2, 3, 4)), [[2], [3, 4]]).shape
    (2, 12)
    """
    shape = tuple(math.prod(group) for group in groups)
    sharding = sharding_of(x)
    if sharding is None:
        return x.reshape(shape)
    kept, merged = merged_entries(entries(sharding, x.ndim), groups)
    return lax.reshape(resharded(x, kept), shape, out_sharding=with_entries(sharding, merged))


def ungrouped(x: jax.Array, groups: Sequence[Sequence[int]]) -> jax.Array:
    """The opposite: each axis of x split into those of its group; the first that is longer than one stays split.

    >>> ungrouped(jax.numpy.ones((2, 12)), [[2], [3, 4]]).shape
    (2, 3, 4)
    """
    shape = tuple(size for group in groups for size in group)
    sharding = sharding_of(x)
    if sharding is None:
        return x.reshape(shape)
    split = split_entries(sharding, entries(sharding, x.ndim), groups)
    return lax.reshape(x, shape, out_sharding=with_entries(sharding, split))


def split_entries(sharding: Sharding, spec: Sequence[Any], groups: Sequence[Sequence[int]]) -> tuple[Any, ...]:
    """The spec of the axes that a spec's axes are split into: the first of a group that is longer than one has it.

    >>> split_entries(None, ("a", "b"), [[2], [1, 4]])
    ('a', None, 'b')
    """
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    split: list[Any] = []
    for entry, group in zip(spec, groups, strict=True):
        first = _first(group)
        parts = math.prod(mesh.shape[name] for name in names(entry)) if mesh is not None else 1
        fits = bool(group) and group[first] % parts == 0
        split += [entry if fits and i == first else None for i in range(len(group))]
    return tuple(split)


def resharded(x: jax.Array, spec: Sequence[Any]) -> jax.Array:
    """`x` with this spec, moved only where it has another one; for arrays of a mesh with explicit axes."""
    sharding = sharding_of(x)
    if sharding is None or entries(sharding, x.ndim) == tuple(spec):
        return x
    return jax.sharding.reshard(x, with_entries(sharding, spec))


def merged_entries(spec: Sequence[Any], groups: Sequence[Sequence[int]]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """(what stays split of each axis, what is then split of each group): of a group the first that is longer than one.

    >>> merged_entries(("a", "b", "c"), [[2], [3, 4]])
    (('a', 'b', None), ('a', 'b'))
    """
    kept: list[Any] = []
    merged: list[Any] = []
    for group in groups:
        start, first = len(kept), _first(group)
        kept += [spec[start + i] if i == first else None for i in range(len(group))]
        merged.append(kept[start + first] if group else None)
    return tuple(kept), tuple(merged)


def _first(group: Sequence[int]) -> int:
    return next((i for i, size in enumerate(group) if size > 1), 0)


def names(entry: Any) -> tuple[str, ...]:
    """The axes of the mesh that an entry of a spec names."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
