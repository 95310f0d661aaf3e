"""Scales: `scale(code)` describes which values share a scale, and its number.

`ScaleSpec.tiling` splits an array. Grammar of codes: segments joined by underscores, in
this order.

    NUMBER              the scale: an exponent (powers of two) or a float
    [NUMBER]            a zero point, an integer or a float: asymmetric, for unsigned
                        integers
    [tX[sS][oO][dY]]    a tile of X values, X = 2, 4, ... 1024, or 0 for a whole
                        channel, along axis Y (-1 without it)
    [tX...]             the other side of a 2-D block; without dY the two are the axes
                        -2 and -1
    [NUMBER]            after the tiles: a float scale of the whole tensor above the
                        tiles' scales (two levels)
    [MODE]              the rule that chooses an exponent: "max", "midmax", "ceil" or
                        "mse"

Without a tile one scale serves the whole tensor. `sS` are subtiles of S values, and
`oO` gives each an offset of O bits by which its power of two is smaller than the
tile's. A channel `t0dY` is a tile as long as axis Y: one scale for every index of the
other axes. A scale that names its mode ignores the `scalemode` of a cast.
`tcfp_jax.formats.scale_rules` has the formulas of the modes.
"""

import functools
import math
import re
from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from jax import Array

from pallas_kernels.specs import Shape
from tcfp_jax.formats.numbers import _DTYPE_CODES, NumberSpec, number

SCALE_GRAMMAR = (
    "NUMBER[_ZERO][_tX[sS][oO][dY]][_tX[sS][dY]][_NUMBER][_MODE], such as e8m0_t32,"
    " float16_int8_t32 or float32"
)
ScaleMode = Literal[
    "max", "midmax", "ceil", "mse", "auto", "four_over_six", "fold_exact"
]

# "auto" means one of them
_MODES: tuple[ScaleMode, ...] = ("max", "midmax", "ceil", "mse")
TWO_LEVEL_MODES: tuple[ScaleMode, ...] = ("max", "four_over_six", "fold_exact")
_TILES = (0, *(1 << power for power in range(1, 11)))


@dataclass(frozen=True)
class BlockAxis:
    """One side of a block: `size` values along axis `dim`, in subtiles of `subtile`.

    A size of 0 is the whole axis, and a subtile of 0 is none.
    """

    size: int
    dim: int
    subtile: int = 0


@dataclass(frozen=True)
class Tiling:
    """The split of an array into tiles, made by `ScaleSpec.tiling`.

    The last tiles are filled with zeros. An axis of n values becomes three axes,
    `[count, subtiles, subtile]`, so nothing is transposed, and a reduction over a tile
    that keeps its axes broadcasts over the tile.

    Attributes:
      shape: the shape of the array.
      padded: that shape with full last tiles.
      split_shape: `padded` with three axes instead of each tiled axis.
      tile_axes: the axes of `split_shape` within a tile.
      subtile_axes: the axes of `split_shape` within a subtile.
    """

    shape: Shape
    padded: Shape
    split_shape: Shape
    tile_axes: Shape
    subtile_axes: Shape

    def split(self, x: Array) -> Array:
        """Return `x` in `split_shape`, with its last tiles filled with zeros."""
        if self.padded != self.shape:
            sizes = zip(self.padded, self.shape, strict=True)
            x = jnp.pad(x, [(0, full - size) for full, size in sizes])
        return x.reshape(self.split_shape)

    def join(self, x: Array) -> Array:
        """Return the array of `shape` that was split."""
        x = x.reshape(self.padded)
        if self.padded == self.shape:
            return x
        return x[tuple(slice(size) for size in self.shape)]

    @property
    def scale_shape(self) -> Shape:
        """The shape of an array with one value per tile."""
        return self._reduced(self.tile_axes)

    @property
    def subscale_shape(self) -> Shape:
        """The shape of an array with one value per subtile."""
        return self._reduced(self.subtile_axes)

    def _reduced(self, axes: Shape) -> Shape:
        sizes = list(self.split_shape)
        for axis in axes:
            sizes[axis] = 1
        return tuple(sizes)


@dataclass(frozen=True)
class ScaleSpec:
    """The rule by which values share scales, made by `scale`: frozen and hashable.

    Attributes:
      name: the code.
      number: the number format of a scale.
      zero: the number format of a zero point, or None.
      tiles: the sides of a block, one or two; none for one scale per tensor.
      offset: the bits of a subtile's offset, 0 for none.
      outer: the number format of the tensor's scale above the tiles' scales, or None.
      mode: the rule that always chooses an exponent, or None if each cast names it.
    """

    name: str
    number: NumberSpec
    zero: NumberSpec | None
    tiles: tuple[BlockAxis, ...]
    offset: int
    outer: NumberSpec | None
    mode: ScaleMode | None = None

    @property
    def is_tensor(self) -> bool:
        """True if the whole tensor shares one scale."""
        return not self.tiles

    @property
    def is_tile(self) -> bool:
        """True if a tile has a size."""
        return any(tile.size for tile in self.tiles)

    @property
    def is_subtile(self) -> bool:
        """True if tiles have subtiles."""
        return any(tile.subtile for tile in self.tiles)

    @property
    def is_nvfp4(self) -> bool:
        """True if tiles have e4m3fn scales below one of the tensor, as in NVFP4."""
        return self.outer is not None and self.number.name == "e4m3fn"

    def tiling(self, shape: Shape) -> Tiling:
        """Return how this scale splits an array.

        Raises:
          ValueError: the axis of a tile does not exist, is shorter than the tile, or is
            the axis of the other tile.
        """
        if self.is_tensor:
            axes = tuple(range(len(shape)))
            return Tiling(shape, shape, shape, axes, axes)
        by_axis = self._tiles_by_axis(shape)
        padded: list[int] = []
        split: list[int] = []
        tile_axes: list[int] = []
        subtile_axes: list[int] = []
        for axis, size in enumerate(shape):
            tile = by_axis.get(axis)
            if tile is None:
                padded.append(size)
                split.append(size)
                continue
            length = tile.size or max(size, 1)
            subtile = tile.subtile or length
            count = -(-size // length)
            padded.append(count * length)
            tile_axes += [len(split) + 1, len(split) + 2]
            subtile_axes.append(len(split) + 2)
            split += [count, length // subtile, subtile]
        return Tiling(
            shape, tuple(padded), tuple(split), tuple(tile_axes), tuple(subtile_axes)
        )

    def _tiles_by_axis(self, shape: Shape) -> dict[int, BlockAxis]:
        """Return the tile of each tiled axis, or raise the errors of `tiling`."""
        by_axis: dict[int, BlockAxis] = {}
        for tile in self.tiles:
            if not -len(shape) <= tile.dim < len(shape):
                raise ValueError(
                    f"{self.name}: axis {tile.dim} is not in shape {shape}; give"
                    " another one, such as d0"
                )
            axis = tile.dim % len(shape)
            if axis in by_axis:
                raise ValueError(
                    f"{self.name}: both tiles run along axis {axis} of shape {shape};"
                    " give them others"
                )
            if math.prod(shape) and tile.size > shape[axis]:
                raise ValueError(
                    f"{self.name}: a tile of {tile.size} is longer than its axis of"
                    f" {shape[axis]} values; use a smaller tile, or t0 for the whole"
                    " axis"
                )
            by_axis[axis] = tile
        return by_axis


def scale(code: str) -> ScaleSpec:
    """Return the scale that a code describes; the module's docstring has the grammar.

    Use this to look at a rule of sharing. `datatype` takes the code itself.

    Raises:
      ValueError: the code is outside the grammar, or its parts contradict each other.

    Source: TensorCast (AMD); OCP Microscaling Formats 1.0; Rouhani et al. 2023, "Shared
    Microexponents" (subtiles).

    >>> spec = scale("e8m0_t32")
    >>> spec.number.name, spec.tiles
    ('e8m0', (BlockAxis(size=32, dim=-1, subtile=0),))
    """
    if not isinstance(code, str):
        raise ValueError(
            f"a scale code is text, not a {type(code).__name__}; use {SCALE_GRAMMAR}"
        )
    return _parse(code)


_TILE = re.compile(r"t([0-9]{1,4})(?:s([0-9]{1,4}))?(?:o([0-9]))?(?:d(-?[0-9]{1,3}))?")


@functools.cache
def _parse(code: str) -> ScaleSpec:
    text = _with_number_codes(code.lower())
    segments = text.split("_")
    mode = next((mode for mode in _MODES if mode == segments[-1]), None)
    if mode is not None:
        segments.pop()
    numbers: list[NumberSpec] = []
    found_tiles: list[re.Match[str]] = []
    outer = None
    for segment in segments:
        tile = _TILE.fullmatch(segment)
        if tile and outer is not None:
            raise ValueError(
                f"{code!r}: tile {segment!r} follows the tensor's scale; use"
                f" {SCALE_GRAMMAR}"
            )
        if tile:
            found_tiles.append(tile)
            continue
        parsed = _number(segment, code)
        if not (found_tiles and numbers):
            numbers.append(parsed)
        elif outer is None:
            outer = parsed
        else:
            raise ValueError(
                f"{code!r} has two numbers after its tiles; use {SCALE_GRAMMAR}"
            )
    if not 1 <= len(numbers) <= 2 or len(found_tiles) > 2:
        raise ValueError(
            f"{code!r} needs one scale, at most one zero point and two tiles; use"
            f" {SCALE_GRAMMAR}"
        )
    first, *zeros = numbers
    zero = zeros[0] if zeros else None
    tiles = _tiles(code, found_tiles)
    offset = _offset(code, found_tiles)
    spec = ScaleSpec(text, first, zero, tiles, offset, outer, mode)
    _check(spec)
    return spec


def _with_number_codes(text: str) -> str:
    """Return a code with number codes instead of names of dtypes with underscores."""
    names = [name for name in _DTYPE_CODES if "_" in name]
    # A longer name first, because it may begin with another one
    for name in sorted(names, key=len, reverse=True):
        text = text.replace(name, _DTYPE_CODES[name])
    return text


def _number(segment: str, code: str) -> NumberSpec:
    try:
        return number(segment)
    except ValueError as error:
        raise ValueError(
            f"{code!r}: {segment!r} is neither a number nor a tile; use {SCALE_GRAMMAR}"
        ) from error


def _tiles(code: str, found: list[re.Match[str]]) -> tuple[BlockAxis, ...]:
    """Return the tiles that were found; those without an axis take the last axes."""
    given = [int(match[4]) for match in found if match[4] is not None]
    free = [dim for dim in (-2, -1) if dim not in given]
    free = free[len(given) - len(found) :]
    tiles: list[BlockAxis] = []
    for match in found:
        size = int(match[1])
        subtile = int(match[2] or 0)
        if size not in _TILES:
            raise ValueError(
                f"{code!r}: a tile of {size} is not a power of two from 2 to 1024, nor"
                " 0 for a channel"
            )
        if match[2] and (size == 0 or subtile < 2 or size % subtile):
            raise ValueError(
                f"{code!r}: subtiles of {subtile} do not divide a tile of {size}; use a"
                " smaller power of two"
            )
        dim = free.pop(0) if match[4] is None else int(match[4])
        tiles.append(BlockAxis(size, dim, subtile))
    if len({tile.dim for tile in tiles}) < len(tiles):
        raise ValueError(
            f"{code!r}: both tiles run along axis {tiles[0].dim}; give the second"
            " another, such as d-2"
        )
    return tuple(tiles)


def _offset(code: str, found: list[re.Match[str]]) -> int:
    """Return the bits of the offsets of subtiles, 0 for none."""
    offsets = {int(match[3]) for match in found if match[3]}
    if not offsets:
        return 0
    if len(offsets) > 1 or not offsets <= {1, 2}:
        raise ValueError(
            f"{code!r}: an offset has 1 or 2 bits and is given once, not"
            f" {sorted(offsets)}"
        )
    if not any(match[2] for match in found):
        raise ValueError(
            f"{code!r}: an offset belongs to subtiles; add sS, such as t16s2o1"
        )
    return offsets.pop()


def _check(spec: ScaleSpec) -> None:
    if spec.number.is_integer:
        raise ValueError(
            f"{spec.name!r}: a scale is an exponent or a float, not {spec.number.name}"
        )
    for number_spec in (spec.number, spec.outer):
        if number_spec is not None and not number_spec.has_nan:
            raise ValueError(
                f"{spec.name!r}: {number_spec.name} has no NaN, which a scale needs;"
                " use another suffix"
            )
    if spec.zero is not None:
        if spec.number.kind != "float":
            raise ValueError(
                f"{spec.name!r}: a zero point needs a float scale, not"
                f" {spec.number.name}; use float16"
            )
        if spec.zero.kind not in ("int", "float"):
            raise ValueError(
                f"{spec.name!r}: a zero point is a signed integer or a float, not"
                f" {spec.zero.name}"
            )
    if spec.outer is not None:
        kinds = {spec.number.kind, spec.outer.kind}
        if kinds != {"float"} or spec.zero is not None:
            raise ValueError(
                f"{spec.name!r}: two levels are a float scale above float scales,"
                " without zero point"
            )
        if not spec.is_tile:
            raise ValueError(
                f"{spec.name!r}: a tensor's scale needs tiles below it; add tX"
            )
    if spec.mode and spec.number.kind != "exponent":
        raise ValueError(
            f"{spec.name!r}: {spec.mode!r} chooses an exponent, not {spec.number.name};"
            " drop it"
        )
    if spec.offset and spec.number.kind != "exponent":
        raise ValueError(
            f"{spec.name!r}: offsets are steps of a power of two; use an exponent scale"
            " such as e8m0"
        )
