"""Tiles of an array: any axes, any sizes; a last tile that is not full is filled with zeros.

An axis of n values becomes three axes in its place, `[count, subtiles, subtile]`, so that nothing is transposed, and a
scale that was reduced over a tile with its axes kept broadcasts over the tile.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from tcfp_jax.formats.scales import ScaleSpec


@dataclass(frozen=True)
class Tiling:
    """How an array of `shape` splits; made by `tiling`.

    Attributes:
      shape: the shape of the array.
      padded: that shape with its last tiles full.
      split_shape: `padded` with three axes in place of each tiled axis.
      tile_axes: axes of `split_shape` within a tile.
      subtile_axes: axes of `split_shape` within a subtile.
    """

    shape: tuple[int, ...]
    padded: tuple[int, ...]
    split_shape: tuple[int, ...]
    tile_axes: tuple[int, ...]
    subtile_axes: tuple[int, ...]

    def split(self, x: jax.Array) -> jax.Array:
        """`x` in `split_shape`, its last tiles filled with zeros."""
        if self.padded != self.shape:
            x = jnp.pad(x, [(0, full - size) for full, size in zip(self.padded, self.shape, strict=True)])
        return x.reshape(self.split_shape)

    def join(self, x: jax.Array) -> jax.Array:
        """The array of `shape` that was split."""
        x = x.reshape(self.padded)
        return x[tuple(slice(size) for size in self.shape)] if self.padded != self.shape else x

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """The shape of an array with one value per tile."""
        return tuple(1 if axis in self.tile_axes else size for axis, size in enumerate(self.split_shape))

    @property
    def subscale_shape(self) -> tuple[int, ...]:
        """The shape of an array with one value per subtile."""
        return tuple(1 if axis in self.subtile_axes else size for axis, size in enumerate(self.split_shape))


def tiling(shape: tuple[int, ...], spec: ScaleSpec) -> Tiling:
    """How a scale divides an array.

    Raises:
      ValueError: a tile's axis is not there, or shorter than the tile, or the axis of the other one.

    >>> from tcfp_jax.formats.scales import scale
    >>> tiling((3, 40), scale("e8m0_t32")).split_shape
    (3, 2, 1, 32)
    """
    if spec.is_tensor:
        axes = tuple(range(len(shape)))
        return Tiling(shape, shape, shape, axes, axes)
    by_axis = {}
    for tile in spec.tiles:
        if not -len(shape) <= tile.dim < len(shape):
            raise ValueError(f"{spec.name}: axis {tile.dim} is not in shape {shape}; give another one, such as d0")
        axis = tile.dim % len(shape)
        if axis in by_axis:
            raise ValueError(f"{spec.name}: both tiles run along axis {axis} of shape {shape}; give them other axes")
        if math.prod(shape) and tile.size > shape[axis]:
            raise ValueError(
                f"{spec.name}: a tile of {tile.size} is larger than axis {axis} of shape {shape}; "
                "use a smaller tile, or t0 for the whole axis"
            )
        by_axis[axis] = tile
    padded: list[int] = []
    split: list[int] = []
    tile_axes: list[int] = []
    subtile_axes: list[int] = []
    for axis, size in enumerate(shape):
        if axis not in by_axis:
            padded.append(size)
            split.append(size)
            continue
        tile = by_axis[axis]
        length = tile.size or max(size, 1)
        subtile = tile.subtile or length
        count = -(-size // length)
        padded.append(count * length)
        tile_axes += [len(split) + 1, len(split) + 2]
        subtile_axes.append(len(split) + 2)
        split += [count, length // subtile, subtile]
    return Tiling(shape, tuple(padded), tuple(split), tuple(tile_axes), tuple(subtile_axes))
