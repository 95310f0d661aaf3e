"""What a quantized array is made of: values on their number's grid, and the scales of its tiles.

`quantize` finds the parts and `assemble` multiplies them; `tcfp_jax.formats.casting` joins the two, `tcfp_jax.formats.packing`
stores what is between them. What happens to subnormals, NaN and inf is said in `tcfp_jax.formats.casting`.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tcfp_jax.formats import codebook_search, float_bits, scale_choice
from tcfp_jax.formats.codebooks import CodebookSpec
from tcfp_jax.formats.datatypes import DataType
from tcfp_jax.formats.float_bits import HIDDEN, INFINITY, NAN, TINY, Grid, RoundMode
from tcfp_jax.formats.numbers import NumberSpec
from tcfp_jax.formats.scale_choice import ScaleMode
from tcfp_jax.formats.tiles import Tiling, tiling

SIGN = -(2**31)
_LARGEST_FLOAT = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Modes:
    """How a cast rounds, scales and treats what is too large."""

    roundmode: RoundMode = "even"
    scalemode: ScaleMode = "max"
    saturate: bool = True


class Parts(NamedTuple):
    """A quantized array, split into tiles: what is stored, not yet as bits.

    Attributes:
      value: float32 values of the number in its own units; int32 indices for a codebook.
      exponent: int32, of an exponent scale, one a tile.
      scale: float32, a float scale, one a tile.
      nan: bool, whether a tile with an exponent scale is NaN.
      zero: float32, a zero point, one a tile.
      offset: int32, one a subtile.
      selector: int32, which table, one a subtile.
      outer: float32, the tensor's scale.
    """

    value: jax.Array
    exponent: jax.Array | None = None
    scale: jax.Array | None = None
    nan: jax.Array | None = None
    zero: jax.Array | None = None
    offset: jax.Array | None = None
    selector: jax.Array | None = None
    outer: jax.Array | None = None


def layout_of(shape: tuple[int, ...], datatype: DataType) -> Tiling:
    """How an array is split for a datatype."""
    if datatype.scale is None:
        return Tiling(shape, shape, shape, (), ())
    return tiling(shape, datatype.scale)


# Quantize -------------------------------------------------------------------------------------------------------------


def quantize(bits: jax.Array, datatype: DataType, layout: Tiling, modes: Modes, key: jax.Array | None) -> Parts:
    """The parts of an array given by its float32 bits; a residual is not among them."""
    random = None if key is None else layout.split(jax.random.bits(key, layout.shape, jnp.uint32))
    bits = layout.split(bits)
    magnitude, sign = bits & ~jnp.int32(SIGN), bits & jnp.int32(SIGN)
    number, scale = datatype.number, datatype.scale
    if scale is None:
        if isinstance(number, CodebookSpec):
            return Parts(codebook_search.nearest_index(flushed(bits), number, 0, modes.roundmode, random))
        return Parts(_round_unscaled(magnitude, sign, number, modes, random))
    if scale.zero is not None:
        assert isinstance(number, NumberSpec)
        return _quantize_asymmetric(bits, number, datatype, layout, modes, random)
    amax = jnp.max(scale_choice.finite_magnitude(magnitude), axis=layout.tile_axes, keepdims=True, initial=0)
    lost = None
    if not number.has_nan:
        lost = jnp.any(magnitude > INFINITY, axis=layout.tile_axes, keepdims=True)
    if scale.number.kind == "exponent":
        exponent, wanted = scale_choice.choose_exponent(amax, number, scale.number, modes.scalemode)
        parts = Parts(magnitude, exponent=exponent, nan=jnp.zeros_like(exponent, bool) if lost is None else lost)
        if scale.offset:
            sub = jnp.max(scale_choice.finite_magnitude(magnitude), axis=layout.subtile_axes, keepdims=True, initial=0)
            _, sub_wanted = scale_choice.choose_exponent(sub, number, scale.number, modes.scalemode)
            offset = jnp.clip(wanted - sub_wanted, 0, (1 << scale.offset) - 1)
            parts = parts._replace(offset=offset)
            exponent = exponent - offset
        units = float_bits.scale_down(magnitude, exponent + _fixed_point(number))
    else:
        parts, effective = _float_scales(magnitude, amax, datatype, lost)
        units = float_bits.divide_to_odd(
            magnitude, lax.bitcast_convert_type(effective, jnp.int32), _digits(number, modes)
        )
    if isinstance(number, CodebookSpec):
        signed = jnp.where(magnitude >= INFINITY, jnp.float32(number.max), units)
        signed = jnp.where(sign < 0, -signed, signed)
        index, selector = codebook_search.search(signed, number, layout.subtile_axes, modes.roundmode, random)
        return parts._replace(value=index, selector=selector)
    return parts._replace(value=_round_units(units, magnitude, sign, number, modes, random))


def _fixed_point(number: NumberSpec | CodebookSpec) -> int:
    """Integers are kept in steps of one, and exponent scales mean them in steps of 2**-(bits - 2)."""
    return 1 - number.mbits if isinstance(number, NumberSpec) and number.is_integer else 0


def _digits(number: NumberSpec | CodebookSpec, modes: Modes) -> int:
    if isinstance(number, CodebookSpec) or modes.roundmode == "stochastic":
        return float_bits.MANTISSA_BITS
    # One digit to round by, and the sticky one below it.
    return min(number.mbits + 2, float_bits.MANTISSA_BITS)


def _float_scales(
    magnitude: jax.Array, amax: jax.Array, datatype: DataType, lost: jax.Array | None
) -> tuple[Parts, jax.Array]:
    """(parts with the scales, the factor of each tile)."""
    scale, number = datatype.scale, datatype.number
    assert scale is not None
    largest = number.maxfloat if isinstance(number, CodebookSpec) else number.max
    if scale.outer is None:
        factor = scale_choice.choose_scale(amax, largest, scale.number)
        parts = Parts(magnitude, scale=factor if lost is None else jnp.where(lost, jnp.float32(jnp.nan), factor))
        return parts, factor
    tensor = jnp.max(amax, initial=0)
    factor, outer = scale_choice.choose_two_levels(amax, tensor, largest, scale.number, scale.outer)
    stored = factor if lost is None else jnp.where(lost, jnp.float32(jnp.nan), factor)
    return Parts(magnitude, scale=stored, outer=outer), _two_level(factor, outer)


def _two_level(factor: jax.Array, outer: jax.Array | None) -> jax.Array:
    return factor if outer is None else _settled(factor * outer)


def _settled(values: jax.Array) -> jax.Array:
    """Products with subnormals as zero and inf as the largest float32; NaN stays. The sign of zero is kept."""
    small = jnp.abs(values) < TINY
    clipped = jnp.clip(values, -_LARGEST_FLOAT, _LARGEST_FLOAT)
    return jnp.where(small, jnp.copysign(jnp.float32(0), values), clipped)


def _round_unscaled(
    magnitude: jax.Array, sign: jax.Array, number: NumberSpec, modes: Modes, random: jax.Array | None
) -> jax.Array:
    if number.kind == "exponent":
        return _round_exponent(magnitude, sign, number, modes, random)
    if scale_choice.is_wide(number):
        rounded = float_bits.round_bits(scale_choice.finite_magnitude(magnitude), number.mbits, modes.roundmode, random)
        largest = int(np.float32(number.max).view(np.int32))
        return _finish(rounded, rounded > largest, jnp.int32(largest), magnitude, sign, number, modes)
    shift = unit_shift(number)
    if shift == 0:
        units = lax.bitcast_convert_type(jnp.where(magnitude < HIDDEN, 0, magnitude), jnp.float32)
    else:
        # Capped so that moving the exponent up cannot leave float32.
        units = float_bits.scale_down(jnp.minimum(magnitude, ((254 + shift) << 23) | (HIDDEN - 1)), jnp.int32(shift))
    rounded = _round_units(units, magnitude, sign, number, modes, random, shift)
    return _scaled_up(rounded, jnp.int32(shift)) if shift else rounded


def unit_shift(number: NumberSpec) -> int:
    """The power of two, 1 or less, that an unscaled number is counted in, so that its smallest values are normal."""
    return 0 if number.is_integer else min(0, number.emin - number.mbits + 100)


def _round_exponent(
    magnitude: jax.Array, sign: jax.Array, number: NumberSpec, modes: Modes, random: jax.Array | None
) -> jax.Array:
    """Powers of two; NaN for what is not positive. Ties go up, since a significand of 1 is odd."""
    exponent, mantissa = float_bits.normalize(magnitude)
    significand = lax.bitcast_convert_type(mantissa + (127 << 23), jnp.float32)
    rounded = float_bits.round_to_grid(significand, Grid(0, 0, 2.0), modes.roundmode, random)
    exponent = jnp.where(magnitude >= INFINITY, 128, exponent + (rounded >= 2).astype(jnp.int32))
    over = (exponent > number.emax) & ((modes.roundmode != "zero") | (magnitude == INFINITY))
    exponent = jnp.clip(exponent, number.emin, number.emax)
    power = jnp.where(exponent < -126, 1 << 22, (exponent + 127) << 23)
    nan = (magnitude > INFINITY) | (sign < 0) | (magnitude == 0)
    nan = nan if modes.saturate else nan | over
    return lax.bitcast_convert_type(jnp.where(nan, NAN, power), jnp.float32)


def _round_units(
    units: jax.Array,
    magnitude: jax.Array,
    sign: jax.Array,
    number: NumberSpec | CodebookSpec,
    modes: Modes,
    random: jax.Array | None,
    shift: int = 0,
) -> jax.Array:
    assert isinstance(number, NumberSpec)
    grid = scale_choice.grid_of(number)
    grid = Grid(grid.emin - shift, grid.mbits, grid.largest * 2.0**-shift)
    rounded = float_bits.round_to_grid(units, grid, modes.roundmode, random)
    largest = jnp.float32(grid.largest)
    as_bits = lax.bitcast_convert_type(rounded, jnp.int32)
    largest_bits = lax.bitcast_convert_type(largest, jnp.int32)
    return _finish(as_bits, rounded > largest, largest_bits, magnitude, sign, number, modes)


def _finish(
    rounded: jax.Array,
    over: jax.Array,
    largest: jax.Array,
    magnitude: jax.Array,
    sign: jax.Array,
    number: NumberSpec,
    modes: Modes,
) -> jax.Array:
    """Signed values from magnitudes that may lie beyond the largest, and from where `x` was not finite."""
    infinite = magnitude == INFINITY
    value = jnp.where(over | infinite, largest, rounded)
    if not modes.saturate and (number.has_inf or number.has_nan):
        beyond = infinite if modes.roundmode == "zero" else over | infinite
        value = jnp.where(beyond, INFINITY if number.has_inf else NAN, value)
    if not number.has_negative_zero:
        sign = jnp.where(value == 0, 0, sign)
    if number.kind == "uint":
        value, sign = jnp.where(sign < 0, 0, value), jnp.zeros_like(sign)
    signed = jnp.where(magnitude > INFINITY, NAN, jnp.where(value > INFINITY, value, value | sign))
    return lax.bitcast_convert_type(signed, jnp.float32)


def _quantize_asymmetric(
    bits: jax.Array, number: NumberSpec, datatype: DataType, layout: Tiling, modes: Modes, random: jax.Array | None
) -> Parts:
    """Unsigned integers: `round((x + zero) / scale)` with a float zero, `round(x / scale) + zero` with an integer."""
    scale = datatype.scale
    assert scale is not None and scale.zero is not None
    magnitude = bits & ~jnp.int32(SIGN)
    x = jnp.where(magnitude < INFINITY, flushed(bits), jnp.float32(0))
    low = jnp.min(x, axis=layout.tile_axes, keepdims=True, initial=0)
    high = jnp.max(x, axis=layout.tile_axes, keepdims=True, initial=0)
    span = jnp.minimum(high - low, jnp.float32(_LARGEST_FLOAT))
    factor = scale_choice.choose_scale(lax.bitcast_convert_type(span, jnp.int32), number.max, scale.number)
    divisor, grid = lax.bitcast_convert_type(factor, jnp.int32), scale_choice.grid_of(number)

    def divided(values: jax.Array, mode: RoundMode) -> jax.Array:
        as_bits = lax.bitcast_convert_type(jnp.abs(values), jnp.int32)
        units = float_bits.divide_to_odd(as_bits, divisor, _digits(number, modes))
        return jnp.minimum(float_bits.round_to_grid(units, grid, mode, random), 2 * jnp.float32(number.max))

    if scale.zero.is_integer:
        zero = jnp.minimum(divided(low, "even"), jnp.float32(number.max))
        steps = divided(x, modes.roundmode)
        codes = jnp.where(x < 0, -steps, steps) + zero
    else:
        zero = scale_choice.round_scale(-low, scale.zero)
        shifted = x + zero
        codes = jnp.where(shifted < 0, jnp.float32(0), divided(shifted, modes.roundmode))
    infinite = jnp.where(bits < 0, jnp.float32(0), jnp.float32(number.max))
    codes = jnp.where(magnitude == INFINITY, infinite, jnp.clip(codes, 0, number.max))
    lost = jnp.any(magnitude > INFINITY, axis=layout.tile_axes, keepdims=True)
    return Parts(codes, scale=jnp.where(lost, jnp.float32(jnp.nan), factor), zero=zero)


# Assemble -------------------------------------------------------------------------------------------------------------


def assemble(parts: Parts, datatype: DataType) -> jax.Array:
    """float32 bits of the values that parts stand for, still split into tiles; without a residual."""
    number, scale = datatype.number, datatype.scale
    value = parts.value
    if isinstance(number, CodebookSpec):
        value = codebook_search.look_up(value, number, parts.selector)
    if scale is None:
        return lax.bitcast_convert_type(value, jnp.int32)
    if parts.exponent is not None:
        exponent = parts.exponent if parts.offset is None else parts.exponent - parts.offset
        bits = lax.bitcast_convert_type(_scaled_up(value, exponent + _fixed_point(number)), jnp.int32)
        return bits if parts.nan is None else jnp.where(parts.nan, NAN, bits)
    assert parts.scale is not None
    if parts.zero is None:
        result = _settled(value * _two_level(parts.scale, parts.outer))
    elif scale.zero is not None and scale.zero.is_integer:
        result = _settled((value - parts.zero) * parts.scale)
    else:
        # abs keeps the compiler from fusing product and difference into one rounding.
        result = _settled(jnp.abs(value * parts.scale) - parts.zero)
    if not number.has_negative_zero:
        result = jnp.where(result == 0, jnp.float32(0), result)
    bits = lax.bitcast_convert_type(result, jnp.int32)
    return jnp.where(jnp.isnan(result), NAN, bits)


def _scaled_up(value: jax.Array, exponent: jax.Array) -> jax.Array:
    """Signed float32 value * 2**exponent; what is not finite and the sign of zero stay."""
    bits = lax.bitcast_convert_type(value, jnp.int32)
    magnitude, sign = bits & ~jnp.int32(SIGN), bits & jnp.int32(SIGN)
    scaled = float_bits.scale_up(lax.bitcast_convert_type(magnitude, jnp.float32), exponent)
    return lax.bitcast_convert_type(jnp.where(magnitude >= INFINITY, bits, scaled | sign), jnp.float32)


def flushed(bits: jax.Array) -> jax.Array:
    """float32 values of bits, subnormals as zero."""
    return lax.bitcast_convert_type(jnp.where((bits & ~jnp.int32(SIGN)) < HIDDEN, 0, bits), jnp.float32)
