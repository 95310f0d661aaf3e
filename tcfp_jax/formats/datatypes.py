"""Datatypes: `datatype(number, scale)` is a number and the rule that shares scales."""

import math
import numbers
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from numpy.typing import DTypeLike

from tcfp_jax.formats.codebooks import CodebookSpec, codebook
from tcfp_jax.formats.numbers import NumberSpec, number
from tcfp_jax.formats.scales import ScaleSpec, Shape, Tiling
from tcfp_jax.formats.scales import scale as parse_scale


@dataclass(frozen=True)
class DataType:
    """A format that arrays are cast to and packed in, made by `datatype`.

    It is frozen, hashable and equal by content.

    Attributes:
      number: the format of a value.
      scale: the rule by which values share scales, or None.
      residual: the datatype of the remainder of rounding, which is stored too and
        added, or None. Under an exponent scale it counts in units of that scale: (value
        + residual) * scale.
      name: a name for people; datatypes with different names may be equal.
    """

    number: NumberSpec | CodebookSpec
    scale: ScaleSpec | None
    residual: "DataType | None"
    name: str = field(compare=False)

    def bits_per_value(self, shape: Sequence[int] | None = None) -> float:
        """Return the stored bits per value, with scales.

        They are exact for a `shape`, otherwise the limit of large arrays. Scales of a
        tensor or a channel count only if the shape is known. Tables of a codebook never
        count.

        Raises:
          ValueError: `stored_bits` refuses the shape.

        >>> datatype("e2m1f", "e8m0_t32").bits_per_value()
        4.25
        >>> datatype("int8", "float32").bits_per_value((4, 4))
        10.0
        """
        if shape is not None:
            size = math.prod(_sizes(shape))
            stored = sum(self.stored_bits(shape).values())
            return float(Fraction(stored, size)) if size else 0.0
        bits = Fraction(self.number.bits)
        scale = self.scale
        if scale is not None and scale.tiles and all(t.size for t in scale.tiles):
            tile = math.prod(tile.size for tile in scale.tiles)
            subtile = math.prod(tile.subtile or tile.size for tile in scale.tiles)
            shared = scale.number.bits + (scale.zero.bits if scale.zero else 0)
            bits += Fraction(shared, tile)
            bits += Fraction(scale.offset + self.number.selector_bits, subtile)
        if self.residual is None:
            return float(bits)
        return float(bits) + self.residual.bits_per_value()

    def layout(self, shape: Shape) -> Tiling:
        """Return how an array of this shape splits into tiles."""
        if self.scale is None:
            return Tiling(shape, shape, shape, (), ())
        return self.scale.tiling(shape)

    def fields(self, shape: Sequence[int]) -> dict[str, tuple[int, Shape]]:
        """Return (bits of a code, shape of the codes) of values and kinds of scales."""
        sizes = _sizes(shape)
        found = {"values": (self.number.bits, sizes)}
        scale = self.scale
        if scale is None:
            return found
        layout = scale.tiling(sizes)
        found["scales"] = (scale.number.bits, layout.scale_shape)
        if scale.zero:
            found["zeros"] = (scale.zero.bits, layout.scale_shape)
        if scale.offset:
            found["offsets"] = (scale.offset, layout.subscale_shape)
        if self.number.selector_bits:
            found["selectors"] = (self.number.selector_bits, layout.subscale_shape)
        if scale.outer:
            found["outer"] = (scale.outer.bits, ())
        return found

    def stored_bits(self, shape: Sequence[int]) -> dict[str, int]:
        """Return the bits of each part that there is.

        Parts are values, scales, zeros, offsets, selectors, outer and residual.

        Raises:
          ValueError: this is not a shape, or a tile does not fit it.

        >>> datatype("e2m1f", "e8m0_t32").stored_bits((2, 40))
        {'values': 320, 'scales': 32}
        """
        found = {}
        for name, (bits, codes) in self.fields(shape).items():
            found[name] = bits * math.prod(codes)
        if self.residual is not None:
            found["residual"] = sum(self.residual.stored_bits(shape).values())
        return {name: bits for name, bits in found.items() if bits}


# The datatypes that have names, which `tcfp_jax.formats.catalog` adds.
CATALOG: dict[str, DataType] = {}

# A number's code, and a scale's behind an underscore. Some numbers have one, too.
_JOINED = re.compile(
    r"((?:torch\.)?float[468]_[^_]+(?:_x2)?|icb[^_]*_[^_]+|[^_]+)(?:_(.+))?",
    re.IGNORECASE,
)


def _sizes(shape: Sequence[int]) -> Shape:
    sizes = tuple(shape) if isinstance(shape, Sequence) else (shape,)
    if not all(isinstance(size, numbers.Integral) and size >= 0 for size in sizes):
        raise ValueError(
            f"shape={shape!r} is not the shape of an array; give sizes of 0 or more,"
            " such as x.shape"
        )
    return tuple(map(int, sizes))


def datatype(
    number: "str | DTypeLike | NumberSpec | CodebookSpec",
    scale: str | ScaleSpec | None = None,
    name: str | None = None,
    *,
    residual: DataType | None = None,
) -> DataType:
    """Make a datatype of a number format and, optionally, a rule that shares scales.

    Use this for a format that the catalog does not have. The catalog's are attributes,
    such as `formats.mxfp4e2`.

    Args:
      number: the code or spec of a number, or a codebook or its code. Alone, it may
        also be a name of the catalog, or the codes of a number and a scale, joined by
        an underscore.
      scale: the code or spec of a scale; None leaves the number unscaled.
      name: a name for people; the default joins the codes by an underscore.
      residual: the datatype of the remainder, which is stored too and added:
        `x / scale - value` for exponent scales, `x - value * scale` otherwise.

    Raises:
      ValueError: a bad code, a number and a scale that contradict each other, or a
        residual with a residual.

    >>> datatype("e4m3fn").name, datatype("e2m1f", "e8m0_t32").name
    ('e4m3fn', 'e2m1f_e8m0_t32')
    >>> datatype("e2m1f_e8m0_t32") == datatype("mxfp4e2")
    True
    """
    if isinstance(number, str) and scale is None:
        if number in CATALOG and name is None and residual is None:
            return CATALOG[number]
        joined = _JOINED.fullmatch(number)
        if joined:
            number, scale = joined.groups()
    spec = _number(number)
    shared = parse_scale(scale) if isinstance(scale, str) else scale
    if shared is not None and not isinstance(shared, ScaleSpec):
        raise ValueError(
            f"scale= is a {type(scale).__name__}, neither a scale's code nor a"
            " ScaleSpec; use e8m0_t32"
        )
    if not isinstance(name, str | None) or not isinstance(residual, DataType | None):
        raise ValueError(
            f"name= is a {type(name).__name__} and residual= a"
            f" {type(residual).__name__}; give text, and a DataType such as"
            ' datatype("linear4", "e8m0_t32_mse")'
        )
    if not name:
        name = spec.name if shared is None else f"{spec.name}_{shared.name}"
    made = DataType(spec, shared, residual, name)
    if residual is not None and residual.residual is not None:
        raise ValueError(
            f"{made.name}: its residual {residual.name} has a residual of its own; use"
            " one level"
        )
    _check(made)
    return made


def _number(
    code: "str | DTypeLike | NumberSpec | CodebookSpec",
) -> NumberSpec | CodebookSpec:
    if isinstance(code, CodebookSpec):
        return code
    if isinstance(code, str) and code.lower().startswith(("nf", "linear", "icb")):
        return codebook(code)
    return number(code)


def _check(made: DataType) -> None:
    """Raise a ValueError if number and scale contradict each other."""
    name = made.name
    spec = made.number
    shared = made.scale
    if spec.is_integer and spec.bits - spec.signed > 24:
        raise ValueError(
            f"{name}: {spec.name} has more digits than float32's 24, in which casts"
            " work; use int25"
        )
    if shared is None:
        if spec.selector_bits:
            raise ValueError(
                f"{name}: a tile selects among a codebook's tables, so there must be"
                " tiles; add a scale"
            )
    elif isinstance(spec, CodebookSpec):
        _check_codebook(name, spec, shared)
    else:
        _check_zero_point(name, spec, shared)
        _check_number(name, spec, shared)


def _check_codebook(name: str, spec: CodebookSpec, shared: ScaleSpec) -> None:
    if shared.offset or shared.zero:
        raise ValueError(
            f"{name}: a codebook takes neither subtile offsets nor a zero point"
        )
    if shared.is_subtile and not spec.selector_bits:
        raise ValueError(
            f"{name}: subtiles select among tables, and {spec.name} has one; drop sS"
        )


def _check_number(name: str, spec: NumberSpec, shared: ScaleSpec) -> None:
    if spec.kind == "exponent":
        raise ValueError(
            f"{name}: an exponent is a scale, not a scaled value; use a float or"
            " integer number"
        )
    if shared.is_subtile and not shared.offset:
        raise ValueError(
            f"{name}: subtiles need an offset (oO) or a codebook to select from;"
            " drop sS"
        )
    if spec.kind == "float" and spec.smallest_subnormal < 2.0**-100:
        raise ValueError(
            f"{name}: {spec.name} has float32's range, so a scale does nothing; drop it"
        )


def _check_zero_point(name: str, spec: NumberSpec, shared: ScaleSpec) -> None:
    zero = shared.zero
    if zero is None:
        if spec.kind == "uint":
            raise ValueError(
                f"{name}: unsigned integers need a zero point; add one, such as"
                " float16_int8"
            )
        return
    if spec.kind != "uint":
        raise ValueError(
            f"{name}: a zero point shifts unsigned integers, not {spec.name}; drop it,"
            " or use uint"
        )
    if zero.is_integer and zero.bits < spec.bits:
        raise ValueError(
            f"{name}: zero point {zero.name} is narrower than {spec.name}; use"
            f" int{spec.bits}"
        )
