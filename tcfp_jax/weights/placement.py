"""`Placement`: how a mesh splits an array, its merged axes and its blocks.

A mesh cuts each axis of an array into equal parts. A stored weight keeps other arrays
than the kernel: its matrix merges axes, the transposed copy swaps them, and a scale has
one entry for each block. If their parts come from the parts of the kernel, making them
moves nothing across the mesh. If not, an error says so, before a program moves data at
each step.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import jax
from jax import Array
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from pallas_kernels.scaling import Row, Scaling, Tensor
from pallas_kernels.specs import Entry, Shape, entries, names, sharding_of, shards

AnyMesh: TypeAlias = Mesh | AbstractMesh
# Repairs if a mesh cuts a block, by the format of FP4 codes
_REPAIRS = {
    None: "a recipe with smaller blocks, rows or one scale",
    "nvfp4": "a recipe of 8 bits",
    "mxfp4": 'recipe("nvfp4"), whose blocks are of 16',
}


@dataclass(frozen=True)
class Placement:
    """An array on a mesh.

    Attributes:
      name: the array's name in messages.
      shape: the shape of the whole array.
      mesh: a mesh or an abstract one.
      axes: the names of the mesh axes that cut each axis of the array, the slowest
        first.

    Raises:
      ValueError: the mesh does not divide an axis.

    >>> mesh = jax.sharding.AbstractMesh((2,), ("fsdp",))
    >>> Placement("kernel", (4, 6), mesh, (("fsdp",), ())).merged([[1], [0]]).axes
    ((), ('fsdp',))
    """

    name: str
    shape: Shape
    mesh: AnyMesh
    axes: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        for axis, size in enumerate(self.shape):
            if size % self.count(axis):
                raise ValueError(
                    f"{self.name}: axis {axis} of {list(self.shape)} has {size} values,"
                    f" which {self.count(axis)} devices of {self._over(axis)} do not"
                    " share evenly; leave that axis whole, split another one, or"
                    f" choose a size that {self.count(axis)} divides"
                )

    @staticmethod
    def of(name: str, shape: Sequence[int], sharding: NamedSharding) -> "Placement":
        """Return the placement of an array of this shape with this sharding.

        Raises:
          ValueError: the sharding describes more axes, or does not divide one.
        """
        if len(sharding.spec) > len(shape):
            raise ValueError(
                f"{name}: {sharding.spec} describes {len(sharding.spec)} axes, but the"
                f" array is {list(shape)}; give the sharding of this parameter"
            )
        axes = tuple(names(entry) for entry in entries(sharding, len(shape)))
        return Placement(name, tuple(shape), sharding.mesh, axes)

    @staticmethod
    def known(name: str, array: Array | jax.ShapeDtypeStruct) -> "Placement | None":
        """Return the placement of an array by its type or devices, None if unknown."""
        sharding = None
        if not isinstance(array, jax.core.Tracer):
            sharding = getattr(array, "sharding", None)
        if not isinstance(sharding, NamedSharding) and isinstance(array, Array):
            sharding = sharding_of(array)
        return None if sharding is None else Placement.of(name, array.shape, sharding)

    @property
    def sharding(self) -> NamedSharding:
        """JAX's form of the placement."""
        return NamedSharding(self.mesh, shortest(self.axes))

    def count(self, axis: int) -> int:
        """Return the number of parts of an axis."""
        return shards(self.mesh, self.axes[axis])

    def merged(self, groups: Sequence[Sequence[int]]) -> "Placement":
        """Return the placement of the array whose axes are merged by groups, in order.

        Raises:
          ValueError: the parts of a merged axis would not be contiguous.
        """
        axes = []
        shape = []
        for group in groups:
            self._check_contiguous(group)
            merged: tuple[str, ...] = ()
            for axis in group:
                merged += self.axes[axis]
            axes.append(merged)
            shape.append(math.prod(self.shape[axis] for axis in group))
        return replace(self, shape=tuple(shape), axes=tuple(axes))

    def _check_contiguous(self, group: Sequence[int]) -> None:
        """Raise if an axis is split behind one with several values on a device."""
        whole = None
        for axis in group:
            if whole is not None and self.count(axis) > 1:
                raise ValueError(
                    f"{self.name} {list(self.shape)}: its axes {list(group)} are stored"
                    f" as one, and {self._over(axis)} splits axis {axis}, whose parts"
                    f" are not contiguous there; split axis {whole} instead, or leave"
                    " both whole"
                )
            if whole is None and self.count(axis) < self.shape[axis]:
                whole = axis

    def counted(self, sizes: Sequence[int], repair: str) -> "Placement":
        """Return the placement of an array with one value per block of these sizes.

        The last block of an axis may be short. `repair` is the advice of the error.

        Raises:
          ValueError: the mesh cuts a block.
        """
        counts = []
        for axis, (size, length) in enumerate(zip(sizes, self.shape, strict=True)):
            parts = self.count(axis)
            if parts > 1 and length % (parts * size):
                raise ValueError(
                    f"{self.name}: blocks of {size} values along axis {axis} of"
                    f" {list(self.shape)} are cut, as each of the {parts} devices of"
                    f" {self._over(axis)} has {length / parts:g} of its {length}"
                    f" values; split it over {_most_parts(length, size, parts)} at"
                    f" most, split another axis, or use {repair}"
                )
            counts.append(-(-length // size))
        return replace(self, shape=tuple(counts))

    def check_blocks(self, scaling: Scaling, *, turned: bool) -> None:
        """Raise a ValueError if the mesh cuts a block of values that share a scale.

        The array is a matrix or a stack of them; `turned` says whether the transpose of
        the matrix is stored: next to it, or instead of it if the codes have four bits.
        """
        if isinstance(scaling, Tensor | Row):
            return
        kept = [[axis] for axis in range(len(self.shape))]
        transposed = [*kept[:-2], kept[-1], kept[-2]]
        if not turned:
            orders = [kept]
        elif scaling.packed:
            orders = [transposed]
        else:
            orders = [kept, transposed]
        rows = scaling.block if scaling.squares else 1
        sizes = (*[1] * len(kept[:-2]), rows, scaling.block)
        repair = _REPAIRS[getattr(scaling, "format", None)]
        for order in orders:
            self.merged(order).counted(sizes, repair)

    def _over(self, axis: int) -> str:
        return "x".join(repr(name) for name in self.axes[axis])


def shortest(spec: Sequence[Entry]) -> PartitionSpec:
    """Return the spec in its shortest spelling, so that equal specs compare equal.

    >>> shortest([("data",), None, ()]) == PartitionSpec("data")
    True
    """
    found: list[Entry] = []
    for entry in map(names, spec):
        found.append(entry[0] if len(entry) == 1 else entry or None)
    while found and found[-1] is None:
        found.pop()
    return PartitionSpec(*found)


def check_blocks(name: str, matrix: Array, scaling: Scaling, *, turned: bool) -> None:
    """Raise a ValueError if a mesh is known to cut a block of a matrix.

    See `Placement.check_blocks`.
    """
    parts = Placement.known(name, matrix)
    if parts is not None:
        parts.check_blocks(scaling, turned=turned)


def _most_parts(length: int, size: int, parts: int) -> int:
    """Return the largest number of devices, up to `parts`, that hold whole blocks."""
    fitting = [count for count in range(2, parts) if length % (count * size) == 0]
    return max(fitting, default=1)
