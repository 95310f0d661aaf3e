"""Datatypes: `datatype(number, scale)` is a number format and the rule by which its
values share scales.
"""

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from numpy.typing import DTypeLike

from tcfp_jax.formats.codebooks import CodebookSpec, codebook
from tcfp_jax.formats.numbers import NumberSpec, number
from tcfp_jax.formats.scales import ScaleSpec, Tiling
from tcfp_jax.formats.scales import scale as parse_scale


@dataclass(frozen=True)
class DataType:
    """A format that arrays are cast to and packed in, made by `datatype`: frozen,
    hashable, equal by content.

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
        """Return the stored bits per value, with scales: exact for a `shape`, otherwise
        the limit of large arrays.

        Scales of a tensor or a channel count only if the shape is known. Tables of a
        codebook never count.

        Raises:
          ValueError: `stored_bits` refuses the shape.

        >>> datatype("e2m1f", "e8m0_t32").bits_per_value(), datatype("int8", "float32").bits_per_value((4, 4))
        (4.25, 10.0)
        """
        if shape is not None:
            stored, size = (
                sum(self.stored_bits(shape).values()),
                math.prod(_sizes(shape)),
            )
            return float(Fraction(stored, size)) if size else 0.0
        bits = Fraction(self.number.bits)
        if (
            self.scale is not None
            and self.scale.is_tile
            and all(tile.size for tile in self.scale.tiles)
        ):
            tile = math.prod(tile.size for tile in self.scale.tiles)
            subtile = math.prod(tile.subtile or tile.size for tile in self.scale.tiles)
            bits += Fraction(
                self.scale.number.bits
                + (self.scale.zero.bits if self.scale.zero else 0),
                tile,
            )
            bits += Fraction(self.scale.offset + self.number.selector_bits, subtile)
        return float(bits) + (self.residual.bits_per_value() if self.residual else 0.0)

    def layout(self, shape: tuple[int, ...]) -> Tiling:
        """Return how an array of this shape splits into tiles."""
        return (
            Tiling(shape, shape, shape, (), ())
            if self.scale is None
            else self.scale.tiling(shape)
        )

    def fields(self, shape: Sequence[int]) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Return (bits of a code, shape of the codes) of the values, and of each kind
        of scale that there is.
        """
        sizes = _sizes(shape)
        found = {"values": (self.number.bits, sizes)}
        if self.scale is not None:
            layout = self.scale.tiling(sizes)
            found |= {
                "scales": (self.scale.number.bits, layout.scale_shape),
                "zeros": (
                    self.scale.zero.bits if self.scale.zero else 0,
                    layout.scale_shape,
                ),
                "offsets": (self.scale.offset, layout.subscale_shape),
                "selectors": (self.number.selector_bits, layout.subscale_shape),
                "outer": (self.scale.outer.bits if self.scale.outer else 0, ()),
            }
        return {name: field for name, field in found.items() if field[0]}

    def stored_bits(self, shape: Sequence[int]) -> dict[str, int]:
        """Return the bits of each part: values, scales, zeros, offsets, selectors,
        outer, residual.

        Raises:
          ValueError: this is not a shape, or a tile does not fit it.

        >>> datatype("e2m1f", "e8m0_t32").stored_bits((2, 40))
        {'values': 320, 'scales': 32}
        """
        found = {
            name: bits * math.prod(codes)
            for name, (bits, codes) in self.fields(shape).items()
        }
        if self.residual is not None:
            found["residual"] = sum(self.residual.stored_bits(shape).values())
        return {name: bits for name, bits in found.items() if bits}


def _sizes(shape: Sequence[int]) -> tuple[int, ...]:
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
    """Make a datatype of a number format and, optionally, a rule by which its values
    share scales.

    Args:
      number: the code or spec of a number, or a codebook or its code.
      scale: the code or spec of a scale; None leaves the number unscaled.
      name: a name for people; the default joins the codes by an underscore.
      residual: the datatype of the remainder, which is stored too and added:
        `x / scale - value` for exponent scales, `x - value * scale` otherwise.

    Raises:
      ValueError: a bad code, a number and a scale that contradict each other, or a
        residual with a residual.

    >>> datatype("e4m3fn").name, datatype("e2m1f", "e8m0_t32").name
    ('e4m3fn', 'e2m1f_e8m0_t32')
    """
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
    made = DataType(
        spec,
        shared,
        residual,
        name or (spec.name if shared is None else f"{spec.name}_{shared.name}"),
    )
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
    spec, shared, name = made.number, made.scale, made.name
    if isinstance(spec, NumberSpec) and spec.is_integer and spec.mbits > 24:
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
        return
    if isinstance(spec, CodebookSpec):
        if shared.offset or shared.zero:
            raise ValueError(
                f"{name}: a codebook takes neither subtile offsets nor a zero point"
            )
        if shared.is_subtile and not spec.selector_bits:
            raise ValueError(
                f"{name}: subtiles select among tables, and {spec.name} has one;"
                " drop sS"
            )
        return
    if spec.kind == "exponent":
        raise ValueError(
            f"{name}: an exponent is a scale, not a scaled value; use a float or"
            " integer number"
        )
    if spec.kind == "uint" and shared.zero is None:
        raise ValueError(
            f"{name}: unsigned integers need a zero point; add one, such as"
            " float16_int8"
        )
    if spec.kind != "uint" and shared.zero is not None:
        raise ValueError(
            f"{name}: a zero point shifts unsigned integers, not {spec.name}; drop it,"
            " or use uint"
        )
    if (
        shared.zero is not None
        and shared.zero.is_integer
        and shared.zero.bits < spec.bits
    ):
        raise ValueError(
            f"{name}: zero point {shared.zero.name} is narrower than {spec.name}; use"
            f" int{spec.bits}"
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
