"""`Placement`: how an array lies on a mesh, and how its transposes, merged axes and
scales lie then.

A mesh cuts each axis of an array into equal parts. A state keeps other arrays than the
kernel: its matrix merges axes, the transposed copy swaps them, and a scale has one
entry for each block. If their parts come from the parts of the kernel, making them
moves nothing across the mesh. If not, an error says so, before a program moves data at
each step.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.scaling import Block, Fp4, Scaling
from pallas_kernels.specs import entries, names, sharding_of, shards


@dataclass(frozen=True)
class Placement:
    """An array on a mesh.

    Attributes:
      name: the array's name in messages.
      shape: the shape of the whole array.
      mesh: a mesh or an abstract one.
      axes: the names of the mesh axes that cut each axis of the array, the slowest
        first.

    >>> import jax
    >>> mesh = jax.sharding.AbstractMesh((2,), ("fsdp",))
    >>> Placement("kernel", (4, 6), mesh, (("fsdp",), ())).turned().axes
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
                    f"{self.name}: axis {axis} of {list(self.shape)} has {size} values,"
                    f" which {self.count(axis)} devices of {self._over(axis)} do not"
                    " share evenly; leave that axis whole, split another one, or"
                    f" choose a size that {self.count(axis)} divides"
                )

    @staticmethod
    def of(name: str, shape: Sequence[int], sharding: NamedSharding) -> "Placement":
        """Return the placement of an array of this shape with this sharding, which may
        not describe more axes.
        """
        if len(sharding.spec) > len(shape):
            raise ValueError(
                f"{name}: {sharding.spec} describes {len(sharding.spec)} axes, but the"
                f" array is {list(shape)}; give the sharding of this parameter"
            )
        axes = tuple(names(entry) for entry in entries(sharding, len(shape)))
        return Placement(name, tuple(shape), sharding.mesh, axes)

    @property
    def sharding(self) -> NamedSharding:
        """JAX's form of the placement."""
        spec = [
            None if not axes else axes[0] if len(axes) == 1 else axes
            for axes in self.axes
        ]
        # Trailing entries of None mean nothing, and would make equal specs differ.
        while spec and spec[-1] is None:
            spec.pop()
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    def count(self, axis: int) -> int:
        """Return the number of parts of an axis."""
        return shards(self.mesh, self.axes[axis])

    def taken(self, places: Sequence[int | None], shape: Sequence[int]) -> "Placement":
        """Return the placement of an array with these axes of this one; None stands for
        a whole axis.
        """
        chosen = tuple(() if place is None else self.axes[place] for place in places)
        return replace(self, shape=tuple(shape), axes=chosen)

    def turned(self) -> "Placement":
        """Return the placement of the transposed matrix."""
        *stack, first, second = range(len(self.shape))
        order = (*stack, second, first)
        return self.taken(order, [self.shape[axis] for axis in order])

    def merged(self, groups: Sequence[Sequence[int]]) -> "Placement":
        """Return the placement of the array transposed to the order of the groups, with
        each group merged.
        """
        axes, shape = [], []
        for group in groups:
            whole = next(
                (axis for axis in group if self.count(axis) < self.shape[axis]), None
            )
            for axis in group[group.index(whole) + 1 :] if whole is not None else ():
                if self.count(axis) > 1:
                    raise ValueError(
                        f"{self.name} {list(self.shape)}: its axes {list(group)} are"
                        f" stored as one, and {self._over(axis)} splits axis {axis},"
                        f" whose parts are not contiguous there; split axis {whole}"
                        " instead, or leave both whole"
                    )
            axes.append(tuple(name for axis in group for name in self.axes[axis]))
            shape.append(math.prod(self.shape[axis] for axis in group))
        return replace(self, shape=tuple(shape), axes=tuple(axes))

    def counted(self, sizes: Sequence[int], repair: str) -> "Placement":
        """Return the placement of an array with one value for each block of these
        sizes; the last may be short.

        A block that is cut raises, with `repair` as advice.
        """
        for axis, (size, length) in enumerate(zip(sizes, self.shape, strict=True)):
            count = self.count(axis)
            if count > 1 and length % (count * size):
                # The largest number of devices that would still hold whole blocks, for
                # the message.
                most = max(
                    i for i in range(1, count + 1) if length % (i * size) == 0 or i == 1
                )
                raise ValueError(
                    f"{self.name}: blocks of {size} values along axis {axis} of"
                    f" {list(self.shape)} are cut, as each of the {count} devices of"
                    f" {self._over(axis)} has {length / count:g} of its {length}"
                    f" values; split it over {most} at most, split another axis, or use"
                    f" {repair}"
                )
        return replace(
            self,
            shape=tuple(
                -(-n // size) for n, size in zip(self.shape, sizes, strict=True)
            ),
        )

    def scales(self, scaling: Scaling) -> "Placement":
        """Return the placement of the scales of values with this one; a block that is
        cut raises.
        """
        kept = scaling.scale_shape(self.shape)
        if isinstance(scaling, Block):
            size, repair = (
                scaling.size,
                "a recipe with smaller blocks, rows or one scale",
            )
        elif isinstance(scaling, Fp4):
            size = scaling.block
            repair = (
                "a recipe of 8 bits"
                if scaling.format == "nvfp4"
                else 'recipe("nvfp4"), whose blocks are of 16'
            )
        else:
            return self.taken(range(len(kept)), kept)
        return self.counted(
            (
                *[1] * (len(self.shape) - 2),
                1 if scaling.tile == "vector" else size,
                size,
            ),
            repair,
        )

    def _over(self, axis: int) -> str:
        return "x".join(repr(name) for name in self.axes[axis])


def known_placement(name: str, array: jax.Array) -> Placement | None:
    """Return the placement of an array by its type or, if it is concrete, by its
    devices; None if it is unknown.
    """
    sharding = (
        None if isinstance(array, jax.core.Tracer) else getattr(array, "sharding", None)
    )
    sharding = sharding if isinstance(sharding, NamedSharding) else sharding_of(array)
    return None if sharding is None else Placement.of(name, array.shape, sharding)


def check_blocks(
    name: str, matrix: jax.Array, scaling: Scaling, *, turned: bool
) -> None:
    """Raise a ValueError if a mesh is known to cut a block of a matrix, or of its
    transpose if `turned` makes one.
    """
    if isinstance(scaling, Block | Fp4):
        parts = known_placement(name, matrix)
        if parts is None:
            return
        # Codes have one orientation: the matrix, or its transpose
        once = isinstance(scaling, Fp4)
        for each in (
            (parts.turned(),)
            if turned and once
            else (parts, parts.turned())
            if turned
            else (parts,)
        ):
            each.scales(scaling)


def neighbours(shape: Sequence[int], merged: Sequence[int]) -> list[list[int]] | None:
    """Return the runs of neighbouring axes of a shape whose products are the other
    shape, or None.

    >>> neighbours((8, 4, 2), (8, 8)), neighbours((3, 4), (4, 3))
    ([[0], [1, 2]], None)
    """
    for cuts in (
        itertools.combinations(range(1, len(shape)), len(merged) - 1) if merged else ()
    ):
        borders = [0, *cuts, len(shape)]
        runs = [list(range(*pair)) for pair in itertools.pairwise(borders)]
        if all(
            math.prod(shape[i] for i in run) == size
            for run, size in zip(runs, merged, strict=True)
        ):
            return runs
    return None
