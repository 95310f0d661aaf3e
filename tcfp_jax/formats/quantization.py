"""Quantized arrays: values on the grid of their number, the scales of tiles, and the
remainder.

`quantize` makes them, `assemble` multiplies them out, `packing` stores them; for
subnormals, NaN and inf see `casting`.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tcfp_jax.formats import codebooks, float_bits, scale_rules
from tcfp_jax.formats.codebooks import CodebookSpec
from tcfp_jax.formats.datatypes import DataType
from tcfp_jax.formats.float_bits import INFINITY, NAN, SIGN, TINY, RoundMode, flushed
from tcfp_jax.formats.numbers import NumberSpec
from tcfp_jax.formats.rounding import Modes, round_values
from tcfp_jax.formats.scales import ScaleMode, Tiling

_STEPS_OF_ERROR = 256.0
_LARGEST_FLOAT = float(np.finfo(np.float32).max)


class QuantizedArray(NamedTuple):
    """A quantized array, split into tiles, before it is written as bits.

    Attributes:
      value: float32 values of the number in its own units; int32 indices for a
        codebook.
      exponent: int32 exponent scales, one per tile.
      scale: float32 scales, one per tile.
      nan: True for a NaN tile with an exponent scale, and for a NaN value of a codebook
        without a scale.
      zero: float32 zero points, one per tile.
      offset: int32, one per subtile.
      selector: int32 index of the table, one per subtile.
      outer: float32 scale of the tensor, above the scales of its tiles.
      residual: the parts of the remainder, or None.
    """

    value: jax.Array
    exponent: jax.Array | None = None
    scale: jax.Array | None = None
    nan: jax.Array | None = None
    zero: jax.Array | None = None
    offset: jax.Array | None = None
    selector: jax.Array | None = None
    outer: jax.Array | None = None
    residual: "QuantizedArray | None" = None


# Quantize
# --------------------------------------------------------------------------------------


def quantize(
    bits: jax.Array,
    datatype: DataType,
    modes: Modes,
    random: jax.Array | None,
    amax: jax.Array | None = None,
) -> QuantizedArray:
    """Quantize an array that is given by its float32 bits, with uniform uint32 `random`
    for stochastic rounding.

    If there is a residual, only the residual is rounded stochastically, which makes the
    sum unbiased. `amax` are the bits of the largest magnitude of the whole tensor, for
    two levels; None computes it from `bits`.
    """
    layout = datatype.layout(bits.shape)
    if datatype.residual is None:
        return _quantize_value(bits, datatype, layout, modes, random, amax)
    nearest = (
        replace(modes, roundmode="even") if modes.roundmode == "stochastic" else modes
    )
    parts = _quantize_value(bits, datatype, layout, nearest, None)
    rest = layout.join(
        _rest_of(layout.split(bits), _assemble_value(parts, datatype), _unit(parts))
    )
    return parts._replace(residual=quantize(rest, datatype.residual, modes, random))


def _quantize_value(
    bits: jax.Array,
    datatype: DataType,
    layout: Tiling,
    modes: Modes,
    random: jax.Array | None,
    amax_tensor: jax.Array | None = None,
) -> QuantizedArray:
    bits = layout.split(bits)
    random = None if random is None else layout.split(random)
    magnitude = bits & ~jnp.int32(SIGN)
    number, scale = datatype.number, datatype.scale
    if scale is None:
        if isinstance(number, CodebookSpec):
            # no index means NaN; `pack` stores the index of 0
            nan = magnitude > INFINITY
            value = jnp.where(nan, jnp.float32(0), flushed(bits))
            return QuantizedArray(
                codebooks.search(value, number, (), modes.roundmode, random)[0], nan=nan
            )
        return QuantizedArray(round_values(bits, number, modes, random))
    if scale.zero is not None:
        assert isinstance(number, NumberSpec)
        return _quantize_asymmetric(bits, number, datatype, layout, modes, random)
    amax = jnp.max(
        scale_rules.finite_magnitude(magnitude),
        axis=layout.tile_axes,
        keepdims=True,
        initial=0,
    )
    lost = None
    if not number.has_nan:
        lost = jnp.any(magnitude > INFINITY, axis=layout.tile_axes, keepdims=True)

    def rounded(parts: QuantizedArray, units: jax.Array) -> QuantizedArray:
        if isinstance(number, NumberSpec):
            return parts._replace(
                value=round_values(bits, number, modes, random, units)
            )
        signed = jnp.where(magnitude >= INFINITY, jnp.float32(number.max), units)
        signed = jnp.where(bits < 0, -signed, signed)
        index, selector = codebooks.search(
            signed, number, layout.subtile_axes, modes.roundmode, random
        )
        return parts._replace(value=index, selector=selector)

    if scale.number.kind == "exponent":
        parts = _exponent_scales(
            magnitude, amax, datatype, layout, modes.of_scale(scale)
        )
        parts = parts._replace(nan=jnp.zeros_like(amax, bool) if lost is None else lost)
        at = lambda parts: rounded(
            parts,
            float_bits.scale_down(magnitude, _exponent_of(parts) - number.fixed_point),
        )
        if modes.of_scale(scale) != "mse" or modes.roundmode == "stochastic":
            return at(parts)
        return _better_half(at, parts, bits, datatype, layout)
    candidates = _float_scales(magnitude, amax, amax_tensor, datatype, modes)

    def over(parts: QuantizedArray) -> QuantizedArray:
        divisor = lax.bitcast_convert_type(_factor_of(parts), jnp.int32)
        return rounded(
            parts, float_bits.divide_to_odd(magnitude, divisor, modes.digits(number))
        )

    parts = functools.reduce(
        functools.partial(_better_scale, magnitude, layout), map(over, candidates)
    )
    assert parts.scale is not None
    return (
        parts
        if lost is None
        else parts._replace(scale=jnp.where(lost, jnp.float32(jnp.nan), parts.scale))
    )


def _exponent_scales(
    magnitude: jax.Array,
    amax: jax.Array,
    datatype: DataType,
    layout: Tiling,
    mode: ScaleMode,
) -> QuantizedArray:
    scale, number = datatype.scale, datatype.number
    assert scale is not None
    exponent, _ = scale_rules.choose_exponent(amax, number, scale.number, mode)
    parts = QuantizedArray(magnitude, exponent=exponent)
    if not scale.offset:
        return parts
    sub = jnp.max(
        scale_rules.finite_magnitude(magnitude),
        axis=layout.subtile_axes,
        keepdims=True,
        initial=0,
    )
    _, sub_wanted = scale_rules.choose_exponent(sub, number, scale.number, mode)
    return parts._replace(
        offset=jnp.clip(exponent - sub_wanted, 0, (1 << scale.offset) - 1)
    )


def _exponent_of(parts: QuantizedArray) -> jax.Array:
    """Return the exponent of a value's scale: the exponent of its tile minus the offset
    of its subtile.
    """
    assert parts.exponent is not None
    return parts.exponent if parts.offset is None else parts.exponent - parts.offset


def _better_half(
    at: Callable[[QuantizedArray], QuantizedArray],
    parts: QuantizedArray,
    bits: jax.Array,
    datatype: DataType,
    layout: Tiling,
) -> QuantizedArray:
    """Return `at` with each tile's exponent, or with one less if that leaves the
    smaller squared error.
    """
    scale, number = datatype.scale, datatype.number
    assert scale is not None and parts.exponent is not None
    covering, finite = parts.exponent, (bits & ~jnp.int32(SIGN)) < INFINITY
    x = _in_units(jnp.where(finite, bits, 0), covering - number.fixed_point)
    largest = (
        number.maxfloat if isinstance(number, CodebookSpec) else number.grid.largest
    )
    # Errors count in 1/256 of a unit, or the power of two above it that keeps the sum
    # of their squares below 2**31. That holds for errors of at most largest / 2, as
    # half the scale makes them; a larger error counts as the limit. Where that leaves
    # less than 64 steps between the largest values, each square has 31 bits, and their
    # sum 64.
    count = math.prod(x.shape[axis] for axis in layout.tile_axes)
    steps_of = lambda limit: min(
        _STEPS_OF_ERROR, 2.0 ** math.floor(math.log2(max(limit, 1) / (largest / 2)))
    )
    limit = math.isqrt((2**31 - 1) // max(count, 1))
    top = math.frexp(largest)[1] - 1
    apart = (
        largest / 16
        if isinstance(number, CodebookSpec)
        else 2.0 ** (top - number.grid.mbits)
    )
    limit = 46340 if steps_of(limit) < min(_STEPS_OF_ERROR, 64 / apart) else limit
    steps = steps_of(limit)

    def error(rounded: QuantizedArray) -> tuple[jax.Array, jax.Array]:
        value = _look_up(rounded, number) * float_bits.power_of_two(
            _exponent_of(rounded) - covering
        )
        steps_off = jnp.where(finite, x - value, 0) * jnp.float32(steps)
        whole = jnp.clip(
            lax.round(steps_off, lax.RoundingMethod.TO_NEAREST_EVEN), -limit, limit
        )
        return float_bits.sum_squares(whole.astype(jnp.int32), layout.tile_axes, limit)

    wide = at(parts)
    # Only tiles of zeros have the smallest exponent.
    narrow = at(
        parts._replace(exponent=jnp.maximum(covering - 1, scale.number.emin + 1))
    )
    (high, low), (other, rest) = error(narrow), error(wide)
    better = (high < other) | ((high == other) & (low < rest))
    return jax.tree.map(
        lambda narrow, wide: jnp.where(better, narrow, wide), narrow, wide
    )


def _unit(parts: QuantizedArray) -> jax.Array:
    return jnp.int32(0) if parts.exponent is None else parts.exponent


def _float_scales(
    magnitude: jax.Array,
    amax: jax.Array,
    amax_tensor: jax.Array | None,
    datatype: DataType,
    modes: Modes,
) -> list[QuantizedArray]:
    """Return parts with each of the scales among which tiles choose, without rounded
    values.
    """
    scale, number = datatype.scale, datatype.number
    assert scale is not None
    largest = number.maxfloat if isinstance(number, CodebookSpec) else number.max
    covers = modes.roundmode == "stochastic"
    if scale.outer is None:
        chosen = scale_rules.choose_scale(
            amax, largest, scale.number, "up" if covers else "even"
        )
        return [QuantizedArray(magnitude, scale=chosen)]
    rule = modes.of_scale(scale) if number.name == "e2m1f" else "max"
    whole = jnp.max(amax, initial=0) if amax_tensor is None else amax_tensor
    outer = scale_rules.choose_outer(whole, largest, scale.number, scale.outer, rule)
    tiles = scale_rules.tile_scales(amax, outer, largest, scale.number, rule, covers)
    return [QuantizedArray(magnitude, scale=tile, outer=outer) for tile in tiles]


def _better_scale(
    magnitude: jax.Array, layout: Tiling, best: QuantizedArray, other: QuantizedArray
) -> QuantizedArray:
    """Return the parts with the smaller squared error for each tile, `best` if both are
    equal.

    The error of a tile is the sum of (round(256 |x| / scale) - 256 value)**2, an
    integer, times scale**2.
    """
    one, finite = float_bits.to_bits(jnp.float32(1)), magnitude < INFINITY
    x = flushed(jnp.where(finite, magnitude, 0))

    def error(parts: QuantizedArray) -> jax.Array:
        assert parts.scale is not None
        # The kernel rounds this quotient twice; here it only has to be the same on
        # every backend.
        inverse = float_bits.divide(
            one, lax.bitcast_convert_type(_factor_of(parts), jnp.int32)
        )
        value = jnp.where(finite, jnp.abs(parts.value), 0)
        # Units beyond 8, under an amax that is too small, count as 8: then 256 squares
        # fit int32.
        steps = jnp.minimum(x * inverse * jnp.float32(_STEPS_OF_ERROR), 2048.0)
        steps = lax.round(steps, lax.RoundingMethod.TO_NEAREST_EVEN)
        errors = (steps - value * jnp.float32(_STEPS_OF_ERROR)).astype(jnp.int32)
        total = jnp.sum(jnp.square(errors), axis=layout.tile_axes, keepdims=True)
        return total.astype(jnp.float32) * jnp.square(parts.scale)

    better = error(other) < error(best)
    chosen = lambda a, b: jnp.where(better, a, b)
    return best._replace(
        value=chosen(other.value, best.value), scale=chosen(other.scale, best.scale)
    )


def _factor_of(parts: QuantizedArray) -> jax.Array:
    """Return the factor of the values of each tile."""
    assert parts.scale is not None
    return parts.scale if parts.outer is None else _settled(parts.scale * parts.outer)


def _settled(values: jax.Array) -> jax.Array:
    """Return products with subnormals as zero and inf as the largest float32; NaN and
    the sign of zero stay.
    """
    small = jnp.abs(values) < TINY
    clipped = jnp.clip(values, -_LARGEST_FLOAT, _LARGEST_FLOAT)
    return jnp.where(small, jnp.copysign(jnp.float32(0), values), clipped)


def _quantize_asymmetric(
    bits: jax.Array,
    number: NumberSpec,
    datatype: DataType,
    layout: Tiling,
    modes: Modes,
    random: jax.Array | None,
) -> QuantizedArray:
    """Return unsigned integers: `round((x + zero) / scale)` with a float zero,
    `round(x / scale) + zero` otherwise.
    """
    scale = datatype.scale
    assert scale is not None and scale.zero is not None
    magnitude = bits & ~jnp.int32(SIGN)
    x = jnp.where(magnitude < INFINITY, flushed(bits), jnp.float32(0))
    low = jnp.min(x, axis=layout.tile_axes, keepdims=True, initial=0)
    high = jnp.max(x, axis=layout.tile_axes, keepdims=True, initial=0)
    span = jnp.minimum(high - low, jnp.float32(_LARGEST_FLOAT))
    factor = scale_rules.choose_scale(
        lax.bitcast_convert_type(span, jnp.int32), number.max, scale.number
    )
    divisor, grid = lax.bitcast_convert_type(factor, jnp.int32), number.grid

    def divided(values: jax.Array, mode: RoundMode) -> jax.Array:
        as_bits = lax.bitcast_convert_type(jnp.abs(values), jnp.int32)
        units = float_bits.divide_to_odd(as_bits, divisor, modes.digits(number))
        return jnp.minimum(
            float_bits.round_to_grid(units, grid, mode, random),
            2 * jnp.float32(number.max),
        )

    if scale.zero.is_integer:
        zero = jnp.minimum(divided(low, "even"), jnp.float32(number.max))
        steps = divided(x, modes.roundmode)
        codes = jnp.where(x < 0, -steps, steps) + zero
    else:
        zero = scale_rules.round_scale(-low, scale.zero)
        shifted = x + zero
        codes = jnp.where(
            shifted < 0, jnp.float32(0), divided(shifted, modes.roundmode)
        )
    infinite = jnp.where(bits < 0, jnp.float32(0), jnp.float32(number.max))
    codes = jnp.where(magnitude == INFINITY, infinite, jnp.clip(codes, 0, number.max))
    lost = jnp.any(magnitude > INFINITY, axis=layout.tile_axes, keepdims=True)
    return QuantizedArray(
        codes, scale=jnp.where(lost, jnp.float32(jnp.nan), factor), zero=zero
    )


# Assemble
# --------------------------------------------------------------------------------------


def assemble(
    parts: QuantizedArray, datatype: DataType, shape: tuple[int, ...]
) -> jax.Array:
    """Return the float32 bits of the array of `shape` that parts stand for."""
    layout = datatype.layout(shape)
    bits = _assemble_value(parts, datatype)
    if datatype.residual is not None:
        assert parts.residual is not None
        rest = layout.split(assemble(parts.residual, datatype.residual, shape))
        bits = _add_rest(bits, rest, _unit(parts))
    return layout.join(bits)


def _look_up(parts: QuantizedArray, number: NumberSpec | CodebookSpec) -> jax.Array:
    """Return the float32 values of a number in its own units."""
    if isinstance(number, CodebookSpec):
        tables = number.levels()
        if parts.selector is None:
            return tables[0][parts.value]
        # A damaged selector may name a table that does not exist.
        index = parts.value + parts.selector * tables.shape[1]
        return tables.reshape(-1).at[index].get(mode="fill", fill_value=jnp.nan)
    return parts.value


def _assemble_value(parts: QuantizedArray, datatype: DataType) -> jax.Array:
    """Return the float32 bits of values without their residual, still split into
    tiles.
    """
    number, scale = datatype.number, datatype.scale
    value = _look_up(parts, number)
    if scale is None:
        bits = lax.bitcast_convert_type(value, jnp.int32)
        return bits if parts.nan is None else jnp.where(parts.nan, NAN, bits)
    if parts.exponent is not None:
        exponent = _exponent_of(parts)
        bits = float_bits.scale_up(value, exponent - number.fixed_point)
        return bits if parts.nan is None else jnp.where(parts.nan, NAN, bits)
    assert parts.scale is not None
    if parts.zero is None:
        # An inf stays inf under every scale, even 0, which is the scale of a tile
        # without other values.
        result = jnp.where(jnp.isinf(value), value, _settled(value * _factor_of(parts)))
    elif scale.zero is not None and scale.zero.is_integer:
        result = _settled((value - parts.zero) * parts.scale)
    else:
        # abs keeps the compiler from fusing product and difference into one rounding.
        result = _settled(jnp.abs(value * parts.scale) - parts.zero)
    if not number.has_negative_zero:
        result = jnp.where(result == 0, jnp.float32(0), result)
    bits = lax.bitcast_convert_type(result, jnp.int32)
    return jnp.where(jnp.isnan(result), NAN, bits)


# Remainder
# --------------------------------------------------------------------------------------

# rest = x / 2**unit - value and result = (value + round(rest)) * 2**unit, with the
# exponent of the scale as unit, or 0. So the rest is a normal float32 however small x
# is, and the sum is rounded to float32 once.


def _rest_of(bits: jax.Array, rounded: jax.Array, unit: jax.Array) -> jax.Array:
    """Return the bits of (x - rounded) / 2**unit; 0 for a subnormal, and if `x` or
    `rounded` is not finite.
    """
    difference = _in_units(bits, unit) - _in_units(rounded, unit)
    infinite = (
        jnp.maximum(bits & ~jnp.int32(SIGN), rounded & ~jnp.int32(SIGN)) >= INFINITY
    )
    keep = ~infinite & jnp.isfinite(difference) & (jnp.abs(difference) >= TINY)
    return lax.bitcast_convert_type(
        jnp.where(keep, difference, jnp.float32(0)), jnp.int32
    )


def _add_rest(rounded: jax.Array, rest: jax.Array, unit: jax.Array) -> jax.Array:
    """Return the bits of rounded + rest * 2**unit, at most the largest float32; only
    `rounded` if it is not finite.
    """
    total = _in_units(rounded, unit) + flushed(rest)
    total = jnp.where(jnp.abs(total) < TINY, jnp.float32(0), total)
    bits = float_bits.scale_up(total, unit)
    largest = jnp.int32(INFINITY - 1) | (bits & jnp.int32(SIGN))
    bits = jnp.where(
        jnp.isfinite(total) & ((bits & ~jnp.int32(SIGN)) >= INFINITY), largest, bits
    )
    return jnp.where((rounded & ~jnp.int32(SIGN)) >= INFINITY, rounded, bits)


def _in_units(bits: jax.Array, unit: jax.Array) -> jax.Array:
    """Return the signed float32 values of bits, divided by 2**unit."""
    magnitude, sign = bits & ~jnp.int32(SIGN), bits & jnp.int32(SIGN)
    units = lax.bitcast_convert_type(float_bits.scale_down(magnitude, unit), jnp.int32)
    return lax.bitcast_convert_type(units | sign, jnp.float32)
