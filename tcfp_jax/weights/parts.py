"""How an array lies on a mesh, and what follows for arrays that are made of it: transposes, merged axes, blocks.

A mesh cuts each axis of an array into equal parts. What a state keeps of a kernel has other axes than the kernel: the
matrix that it is has some of them merged, the transposed copy has them swapped, a scale has one entry for each block.
Where the parts of the one are parts of the other, nothing crosses the mesh when it is made; where they are not, an
error says so, before a program does it in every step.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.scaling import Block, Fp4, Row, Scaling
from pallas_kernels.specs import entries, names, sharding_of, shards


@dataclass(frozen=True)
class Parts:
    """An array on a mesh.

    Attributes:
      name: of the array, for messages.
      shape: of the whole array.
      mesh: a mesh or an abstract one.
      axes: of each axis of the array the names of the mesh axes that cut it, the slowest first.

    Raises:
      ValueError: the parts of an axis are not equal.

    >>> import jax
    >>> mesh = jax.sharding.AbstractMesh((2,), ("fsdp",))
    >>> Parts("kernel", (4, 6), mesh, (("fsdp",), ())).turned().axes
    ((), ('fsdp',))
    """

    name: str
    shape: tuple[int, ...]
    mesh: Any
    axes: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        for axis, size in enumerate(self.shape):
            if size % self.count(axis):
                raise ValueError(
                    f"{self.name}: axis {axis} of {list(self.shape)} has {size} values, which {self.count(axis)} "
                    f"devices of {self._over(axis)} do not share evenly; leave that axis whole, split another one, or "
                    f"choose a size that {self.count(axis)} divides"
                )

    @property
    def sharding(self) -> NamedSharding:
        """The same as JAX has it."""
        spec = [None if not axes else axes[0] if len(axes) == 1 else axes for axes in self.axes]
        while spec and spec[-1] is None:
            spec.pop()
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    def count(self, axis: int) -> int:
        """In how many parts an axis is cut."""
        return shards(self.mesh, self.axes[axis])

    def taken(self, places: Sequence[int | None], shape: Sequence[int], name: str | None = None) -> "Parts":
        """An array with these axes of this one, and with whole ones where None is."""
        chosen = tuple(() if place is None else self.axes[place] for place in places)
        return replace(self, name=name or self.name, shape=tuple(shape), axes=chosen)

    def turned(self) -> "Parts":
        """The transposed matrix."""
        *stack, first, second = range(len(self.shape))
        order = (*stack, second, first)
        return self.taken(order, [self.shape[axis] for axis in order])

    def merged(self, groups: Sequence[Sequence[int]]) -> "Parts":
        """The array whose axes are those of each group merged, after a transposition to their order.

        Raises:
          ValueError: an axis is cut whose parts are no neighbours in the merged one.
        """
        axes, shape = [], []
        for group in groups:
            whole = next((axis for axis in group if self.count(axis) < self.shape[axis]), None)
            for axis in group[group.index(whole) + 1 :] if whole is not None else ():
                if self.count(axis) > 1:
                    raise ValueError(
                        f"{self.name} {list(self.shape)}: its axes {list(group)} are stored as one, and "
                        f"{self._over(axis)} splits axis {axis}, whose parts are no neighbours there; split axis "
                        f"{whole} in its place, or leave both whole"
                    )
            axes.append(tuple(name for axis in group for name in self.axes[axis]))
            shape.append(math.prod(self.shape[axis] for axis in group))
        return replace(self, shape=tuple(shape), axes=tuple(axes))

    def counted(self, sizes: Sequence[int], what: str) -> "Parts":
        """The array of one value for each block of these sizes, of which the last one of an axis may be short.

        Args:
          sizes: of a block along each axis.
          what: has the blocks, for messages, with how to be without them.

        Raises:
          ValueError: a block is cut.
        """
        for axis, (size, length) in enumerate(zip(sizes, self.shape, strict=True)):
            count = self.count(axis)
            if count > 1 and length % (count * size):
                most = max(i for i in range(1, count + 1) if length % (i * size) == 0 or i == 1)
                raise ValueError(
                    f"{self.name}: blocks of {size} values along axis {axis} of {list(self.shape)} are cut, as each of "
                    f"the {count} devices of {self._over(axis)} has {length / count:g} of its {length} values; split "
                    f"it over {most} at most, split another axis, or use {what}"
                )
        return replace(self, shape=tuple(-(-n // size) for n, size in zip(self.shape, sizes, strict=True)))

    def scales(self, scaling: Scaling) -> "Parts":
        """The scales of values that lie like this.

        Raises:
          ValueError: a block is cut.
        """
        kept = scaling.scale_shape(self.shape)
        if isinstance(scaling, Block):
            sides = (1, scaling.size) if scaling.tile == "vector" else (scaling.size, scaling.size)
            sizes = (*[1] * (len(self.shape) - 2), *sides)
            return self.counted(sizes, "a recipe with smaller blocks, rows or one scale")
        if isinstance(scaling, Fp4):
            sides = (1 if scaling.tile == "vector" else scaling.block, scaling.block)
            other = "a recipe of 8 bits" if scaling.format == "nvfp4" else 'recipe("nvfp4"), whose blocks are of 16'
            return self.counted((*[1] * (len(self.shape) - 2), *sides), other)
        assert isinstance(scaling, Row) or len(kept) <= len(self.shape)
        return self.taken(range(len(kept)), kept)

    def _over(self, axis: int) -> str:
        return "x".join(repr(name) for name in self.axes[axis])


def parts_of(name: str, shape: Sequence[int], sharding: NamedSharding) -> Parts:
    """An array of this shape with this sharding.

    Raises:
      ValueError: the sharding describes more axes, or does not fit; see `Parts`.
    """
    if len(sharding.spec) > len(shape):
        raise ValueError(
            f"{name}: {sharding.spec} describes {len(sharding.spec)} axes, but the array is {list(shape)}; give the "
            "sharding of this parameter"
        )
    return Parts(name, tuple(shape), sharding.mesh, tuple(names(entry) for entry in entries(sharding, len(shape))))


def explicit_parts(name: str, array: jax.Array) -> Parts | None:
    """How the type of an array says that it lies, where its mesh has explicit axes, which programs must follow."""
    sharding = sharding_of(array)
    return None if sharding is None else parts_of(name, array.shape, sharding)


def known_parts(name: str, array: jax.Array) -> Parts | None:
    """How an array lies, where that is known: by its type, or because it is there and no tracer."""
    sharding = None if isinstance(array, jax.core.Tracer) else getattr(array, "sharding", None)
    return parts_of(name, array.shape, sharding) if isinstance(sharding, NamedSharding) else explicit_parts(name, array)


def check_blocks(name: str, matrix: jax.Array, scaling: Scaling, *, turned: bool) -> None:
    """Raise where it is known that a mesh cuts a block of a matrix, or of its transpose where that is made too.

    Raises:
      ValueError: it does.
    """
    if isinstance(scaling, Block | Fp4):
        parts = known_parts(name, matrix)
        if parts is None:
            return
        once = isinstance(scaling, Fp4)  # codes lie one way: as the matrix, or as its transpose
        for each in (parts.turned(),) if turned and once else (parts, parts.turned()) if turned else (parts,):
            each.scales(scaling)


def neighbours(shape: Sequence[int], merged: Sequence[int]) -> list[list[int]] | None:
    """The runs of neighbouring axes of a shape whose products are the other shape; None where there are none.

    >>> neighbours((8, 4, 2), (8, 8)), neighbours((3, 4), (4, 3))
    ([[0], [1, 2]], None)
    """
    for cuts in itertools.combinations(range(1, len(shape)), len(merged) - 1) if merged else ():
        borders = [0, *cuts, len(shape)]
        runs = [list(range(*pair)) for pair in itertools.pairwise(borders)]
        if all(math.prod(shape[i] for i in run) == size for run, size in zip(runs, merged, strict=True)):
            return runs
    return None
