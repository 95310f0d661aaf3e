"""Quantized arrays: values on the grid of their number, scales of tiles, the remainder.

`quantize` makes them, `assemble` multiplies them out, `packing` stores them; for
subnormals, NaN and inf see `casting`.
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tcfp_jax.formats import codebooks, float_bits, scale_rules
from tcfp_jax.formats.codebooks import CodebookSpec
from tcfp_jax.formats.datatypes import DataType
from tcfp_jax.formats.float_bits import (
    INFINITY,
    NAN,
    TINY,
    Rounding,
    RoundMode,
    flushed,
    from_bits,
    magnitude_of,
    sign_of,
    to_bits,
)
from tcfp_jax.formats.numbers import NumberSpec
from tcfp_jax.formats.rounding import Modes, round_units, round_values
from tcfp_jax.formats.scale_rules import finite_magnitude
from tcfp_jax.formats.scales import ScaleMode, ScaleSpec, Shape, Tiling

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

    value: Array
    exponent: Array | None = None
    scale: Array | None = None
    nan: Array | None = None
    zero: Array | None = None
    offset: Array | None = None
    selector: Array | None = None
    outer: Array | None = None
    residual: "QuantizedArray | None" = None


# Quantize
# --------------------------------------------------------------------------------------


def quantize(
    bits: Array,
    datatype: DataType,
    modes: Modes,
    random: Array | None,
    amax: Array | None = None,
) -> QuantizedArray:
    """Quantize an array that is given by its float32 bits.

    `random` are uniform uint32 for stochastic rounding. If there is a residual, only
    the residual is rounded stochastically, which makes the sum unbiased. `amax` are the
    bits of the largest magnitude of the whole tensor, for two levels; None computes it
    from `bits`.
    """
    if datatype.residual is None:
        return _quantize_value(bits, datatype, modes, random, amax)
    nearest = modes
    if modes.roundmode == "stochastic":
        nearest = replace(modes, roundmode="even")
    parts = _quantize_value(bits, datatype, nearest, None, None)
    layout = datatype.layout(bits.shape)
    rounded = _assemble_value(parts, datatype)
    rest = layout.join(_rest_of(layout.split(bits), rounded, _unit(parts)))
    return parts._replace(residual=quantize(rest, datatype.residual, modes, random))


def _quantize_value(
    bits: Array,
    datatype: DataType,
    modes: Modes,
    random: Array | None,
    amax: Array | None,
) -> QuantizedArray:
    """Return the parts of an array without a residual."""
    number = datatype.number
    scale = datatype.scale
    if scale is None:
        return _quantize_unscaled(bits, number, modes, random)
    layout = datatype.layout(bits.shape)
    if random is not None:
        random = layout.split(random)
    tiles = _Tiles(layout.split(bits), number, scale, layout, modes, random)
    if scale.zero is not None:
        return tiles.with_zero_points(scale.zero)
    if scale.number.kind == "exponent":
        return tiles.with_powers_of_two()
    return tiles.with_float_scales(amax)


def _quantize_unscaled(
    bits: Array,
    number: NumberSpec | CodebookSpec,
    modes: Modes,
    random: Array | None,
) -> QuantizedArray:
    if isinstance(number, NumberSpec):
        return QuantizedArray(round_values(bits, number, modes, random))
    # No index means NaN; `pack` stores the index of 0.
    nan = magnitude_of(bits) > INFINITY
    value = jnp.where(nan, 0, flushed(bits))
    index, _ = codebooks.search(value, number, (), modes.roundmode, random)
    return QuantizedArray(index, nan=nan)


@dataclass(frozen=True)
class _Tiles:
    """The bits of an array, split into tiles, and all that decides their rounding."""

    bits: Array
    number: NumberSpec | CodebookSpec
    scale: ScaleSpec
    layout: Tiling
    modes: Modes
    random: Array | None

    @functools.cached_property
    def magnitude(self) -> Array:
        """The bits of |x|."""
        return magnitude_of(self.bits)

    def amax(self, axes: Shape) -> Array:
        """Return the bits of the largest finite magnitude over `axes`."""
        finite = finite_magnitude(self.magnitude)
        return jnp.max(finite, axis=axes, keepdims=True, initial=0)

    def lost(self) -> Array:
        """Return the tiles that a NaN makes NaN, because the number has none."""
        nan = self.magnitude > INFINITY
        if self.number.has_nan:
            nan = jnp.zeros_like(nan)
        return jnp.any(nan, axis=self.layout.tile_axes, keepdims=True)

    def rounded(self, units: Array) -> QuantizedArray:
        """Return the values of |x| / scale, without their scales."""
        number = self.number
        if isinstance(number, NumberSpec):
            return QuantizedArray(
                round_units(units, self.bits, number, self.modes, self.random)
            )
        largest = number.max
        units = jnp.where(self.magnitude >= INFINITY, largest, units)
        signed = jnp.where(self.bits < 0, -units, units)
        axes = self.layout.subtile_axes
        index, selector = codebooks.search(
            signed, number, axes, self.modes.roundmode, self.random
        )
        return QuantizedArray(index, selector=selector)

    def with_powers_of_two(self) -> QuantizedArray:
        """Return values with exponent scales."""
        number = self.number
        mode = self.modes.of_scale(self.scale)
        amax = self.amax(self.layout.tile_axes)
        exponent, _ = scale_rules.choose_exponent(amax, number, self.scale.number, mode)
        offset = None
        if self.scale.offset:
            amax = self.amax(self.layout.subtile_axes)
            _, wanted = scale_rules.choose_exponent(
                amax, number, self.scale.number, mode
            )
            offset = jnp.clip(exponent - wanted, 0, (1 << self.scale.offset) - 1)
        nan = self.lost()

        def at(exponent: Array) -> QuantizedArray:
            unit = _without(exponent, offset) - number.fixed_point
            parts = self.rounded(float_bits.scale_down(self.magnitude, unit))
            return parts._replace(exponent=exponent, offset=offset, nan=nan)

        covering = at(exponent)
        if mode != "mse" or self.modes.roundmode == "stochastic":
            return covering
        # Only tiles of zeros have the smallest exponent.
        half = jnp.maximum(exponent - 1, self.scale.number.emin + 1)
        narrow = at(half)
        unit = exponent - number.fixed_point
        better = float_bits.is_smaller(
            self._error_of_power(narrow, _without(half, offset) - exponent, unit),
            self._error_of_power(covering, _without(exponent, offset) - exponent, unit),
        )
        return jax.tree.map(functools.partial(jnp.where, better), narrow, covering)

    def _error_of_power(
        self, parts: QuantizedArray, shift: Array, unit: Array
    ) -> tuple[Array, Array]:
        """Return the squared error of each tile, in units of 2**unit.

        The values of the parts count times 2**shift.
        """
        axes = self.layout.tile_axes
        count = math.prod(self.bits.shape[axis] for axis in axes)
        limit, steps = _error_steps(self.number, count)
        finite = self.magnitude < INFINITY
        x = _in_units(jnp.where(finite, self.bits, 0), unit)
        value = _look_up(parts, self.number) * float_bits.power_of_two(shift)
        error = jnp.where(finite, x - value, 0) * steps
        error = lax.round(error, lax.RoundingMethod.TO_NEAREST_EVEN)
        whole = jnp.clip(error, -limit, limit).astype(jnp.int32)
        return float_bits.sum_squares(whole, axes, limit)

    def with_float_scales(self, amax_tensor: Array | None) -> QuantizedArray:
        """Return values with float scales, by two levels if the scale has them."""
        outer, candidates = self._float_scales(amax_tensor)
        digits = self.modes.digits(self.number)

        def at(scale: Array) -> QuantizedArray:
            divisor = to_bits(_factor(scale, outer))
            units = float_bits.divide_to_odd(self.magnitude, divisor, digits)
            return self.rounded(units)

        scale, *others = candidates
        parts = at(scale)
        for other_scale in others:
            other = at(other_scale)
            better = self._error_of_scale(other, other_scale, outer) < (
                self._error_of_scale(parts, scale, outer)
            )
            scale = jnp.where(better, other_scale, scale)
            value = jnp.where(better, other.value, parts.value)
            parts = parts._replace(value=value)
        scale = jnp.where(self.lost(), jnp.nan, scale)
        return parts._replace(scale=scale, outer=outer)

    def _float_scales(
        self, amax_tensor: Array | None
    ) -> tuple[Array | None, list[Array]]:
        """Return (the tensor's scale or None, those among which tiles choose)."""
        scale = self.scale
        amax = self.amax(self.layout.tile_axes)
        largest = _largest(self.number)
        covers = self.modes.roundmode == "stochastic"
        if scale.outer is None:
            mode: Rounding = "up" if covers else "even"
            return None, [scale_rules.choose_scale(amax, largest, scale.number, mode)]
        rule: ScaleMode = "max"
        if self.number.name == "e2m1f":
            rule = self.modes.of_scale(scale)
        if amax_tensor is None:
            amax_tensor = jnp.max(amax, initial=0)
        outer = scale_rules.choose_outer(
            amax_tensor, largest, scale.number, scale.outer, rule
        )
        return outer, scale_rules.tile_scales(
            amax, outer, largest, scale.number, rule, covers
        )

    def _error_of_scale(
        self, parts: QuantizedArray, scale: Array, outer: Array | None
    ) -> Array:
        """Return the squared error of each tile.

        It is the sum of (round(256 |x| / scale) - 256 value)**2, an integer, times
        scale**2.
        """
        finite = self.magnitude < INFINITY
        x = flushed(jnp.where(finite, self.magnitude, 0))
        # The kernel rounds this quotient twice; here it only has to be the same on
        # every backend.
        one = to_bits(jnp.float32(1))
        inverse = float_bits.divide(one, to_bits(_factor(scale, outer)))
        value = jnp.where(finite, jnp.abs(parts.value), 0)
        # Units beyond 8, under an amax that is too small, count as 8: then 256 squares
        # fit int32.
        steps = jnp.minimum(x * inverse * _STEPS_OF_ERROR, 2048.0)
        steps = lax.round(steps, lax.RoundingMethod.TO_NEAREST_EVEN)
        errors = (steps - value * _STEPS_OF_ERROR).astype(jnp.int32)
        total = jnp.sum(jnp.square(errors), axis=self.layout.tile_axes, keepdims=True)
        return total.astype(jnp.float32) * jnp.square(scale)

    def with_zero_points(self, zero_number: NumberSpec) -> QuantizedArray:
        """Return unsigned integers with float scales and zero points.

        A value is `round((x + zero) / scale)` with a float zero, and
        `round(x / scale) + zero` otherwise.
        """
        number = self.number
        assert isinstance(number, NumberSpec), "datatypes refuse codebooks with zeros"
        largest = number.max
        axes = self.layout.tile_axes
        x = flushed(jnp.where(self.magnitude < INFINITY, self.bits, 0))
        low = jnp.min(x, axis=axes, keepdims=True, initial=0)
        high = jnp.max(x, axis=axes, keepdims=True, initial=0)
        span = jnp.minimum(high - low, _LARGEST_FLOAT)
        factor = scale_rules.choose_scale(to_bits(span), number.max, self.scale.number)
        digits = self.modes.digits(number)

        def divided(values: Array, mode: RoundMode) -> Array:
            units = float_bits.divide_to_odd(
                to_bits(jnp.abs(values)), to_bits(factor), digits
            )
            steps = float_bits.round_to_grid(units, number.grid, mode, self.random)
            return jnp.minimum(steps, 2 * largest)

        if zero_number.is_integer:
            zero = jnp.minimum(divided(low, "even"), largest)
            steps = divided(x, self.modes.roundmode)
            codes = jnp.where(x < 0, -steps, steps) + zero
        else:
            zero = scale_rules.round_scale(-low, zero_number)
            shifted = x + zero
            steps = divided(shifted, self.modes.roundmode)
            codes = jnp.where(shifted < 0, 0, steps)
        infinite = jnp.where(self.bits < 0, 0.0, largest)
        codes = jnp.clip(codes, 0, number.max)
        codes = jnp.where(self.magnitude == INFINITY, infinite, codes)
        factor = jnp.where(self.lost(), jnp.nan, factor)
        return QuantizedArray(codes, scale=factor, zero=zero)


def _largest(number: NumberSpec | CodebookSpec) -> float:
    """Return the value that scales map the largest magnitude of a tile to."""
    return number.maxfloat if isinstance(number, CodebookSpec) else number.max


def _error_steps(number: NumberSpec | CodebookSpec, count: int) -> tuple[int, float]:
    """Return (the largest error that counts, the steps in a unit) for tiles of `count`.

    Errors count in 1/256 of a unit, or the power of two above it that keeps the sum of
    their squares below 2**31. That holds for errors of at most largest / 2, as half the
    scale makes them; a larger error counts as the limit. If that leaves less than 64
    steps between the largest values, each square has 31 bits, and their sum 64.
    """
    largest = _largest(number)
    if isinstance(number, CodebookSpec):
        apart = largest / 16
    else:
        apart = 2.0 ** (math.frexp(largest)[1] - 1 - number.grid.mbits)
    limit = math.isqrt((2**31 - 1) // max(count, 1))
    steps = _steps_within(limit, largest)
    if steps < min(_STEPS_OF_ERROR, 64 / apart):
        limit = math.isqrt(2**31 - 1)
        steps = _steps_within(limit, largest)
    return limit, steps


def _steps_within(limit: int, largest: float) -> float:
    """Return the most steps in a unit, such that largest / 2 is within `limit`."""
    steps = 2.0 ** math.floor(math.log2(max(limit, 1) / (largest / 2)))
    return min(_STEPS_OF_ERROR, steps)


def _without(exponent: Array, offset: Array | None) -> Array:
    """Return the exponent of a value: its tile's, minus its subtile's offset."""
    return exponent if offset is None else exponent - offset


def _factor(scale: Array, outer: Array | None) -> Array:
    """Return the factor of the values of each tile."""
    return scale if outer is None else _settled(scale * outer)


def _settled(values: Array) -> Array:
    """Return products with subnormals as zero and inf as the largest float32.

    NaN and the sign of zero stay.
    """
    small = jnp.abs(values) < TINY
    clipped = jnp.clip(values, -_LARGEST_FLOAT, _LARGEST_FLOAT)
    return jnp.where(small, jnp.copysign(jnp.float32(0), values), clipped)


# Assemble
# --------------------------------------------------------------------------------------


def assemble(parts: QuantizedArray, datatype: DataType, shape: Shape) -> Array:
    """Return the float32 bits of the array of `shape` that parts stand for."""
    layout = datatype.layout(shape)
    bits = _assemble_value(parts, datatype)
    if parts.residual is not None and datatype.residual is not None:
        rest = assemble(parts.residual, datatype.residual, shape)
        bits = _add_rest(bits, layout.split(rest), _unit(parts))
    return layout.join(bits)


def _look_up(parts: QuantizedArray, number: NumberSpec | CodebookSpec) -> Array:
    """Return the float32 values of a number in its own units."""
    if isinstance(number, NumberSpec):
        return parts.value
    tables = number.levels()
    if parts.selector is None:
        return tables[0][parts.value]
    # A damaged selector may name a table that does not exist.
    index = parts.value + parts.selector * tables.shape[1]
    return tables.reshape(-1).at[index].get(mode="fill", fill_value=jnp.nan)


def _assemble_value(parts: QuantizedArray, datatype: DataType) -> Array:
    """Return the float32 bits of values without their residual, split into tiles."""
    number = datatype.number
    value = _look_up(parts, number)
    if parts.scale is not None:
        zero = None if datatype.scale is None else datatype.scale.zero
        result = _multiplied(value, parts.scale, parts, zero)
        if not number.has_negative_zero:
            result = jnp.where(result == 0, 0, result)
        return jnp.where(jnp.isnan(result), NAN, to_bits(result))
    if parts.exponent is None:
        bits = to_bits(value)
    else:
        exponent = _without(parts.exponent, parts.offset)
        bits = float_bits.scale_up(value, exponent - number.fixed_point)
    return bits if parts.nan is None else jnp.where(parts.nan, NAN, bits)


def _multiplied(
    value: Array, scale: Array, parts: QuantizedArray, zero: NumberSpec | None
) -> Array:
    """Return values times their float scales, without their zero points."""
    if parts.zero is None or zero is None:
        product = _settled(value * _factor(scale, parts.outer))
        # An inf stays inf under every scale, even 0, which is the scale of a tile
        # without other values.
        return jnp.where(jnp.isinf(value), value, product)
    if zero.is_integer:
        return _settled((value - parts.zero) * scale)
    # abs keeps the compiler from fusing product and difference into one rounding.
    return _settled(jnp.abs(value * scale) - parts.zero)


# Remainder
# --------------------------------------------------------------------------------------

# rest = x / 2**unit - value and result = (value + round(rest)) * 2**unit, with the
# exponent of the scale as unit, or 0. So the rest is a normal float32 however small x
# is, and the sum is rounded to float32 once.


def _unit(parts: QuantizedArray) -> Array:
    return jnp.int32(0) if parts.exponent is None else parts.exponent


def _rest_of(bits: Array, rounded: Array, unit: Array) -> Array:
    """Return the bits of (x - rounded) / 2**unit.

    They are 0 for a subnormal, and if `x` or `rounded` is not finite.
    """
    difference = _in_units(bits, unit) - _in_units(rounded, unit)
    larger = jnp.maximum(magnitude_of(bits), magnitude_of(rounded))
    keep = larger < INFINITY
    keep = keep & jnp.isfinite(difference) & (jnp.abs(difference) >= TINY)
    return to_bits(jnp.where(keep, difference, 0))


def _add_rest(rounded: Array, rest: Array, unit: Array) -> Array:
    """Return the bits of rounded + rest * 2**unit, at most the largest float32.

    If `rounded` is not finite, its own bits are returned.
    """
    total = _in_units(rounded, unit) + flushed(rest)
    total = jnp.where(jnp.abs(total) < TINY, 0, total)
    bits = float_bits.scale_up(total, unit)
    overflow = jnp.isfinite(total) & (magnitude_of(bits) >= INFINITY)
    largest = jnp.int32(INFINITY - 1) | sign_of(bits)
    bits = jnp.where(overflow, largest, bits)
    return jnp.where(magnitude_of(rounded) >= INFINITY, rounded, bits)


def _in_units(bits: Array, unit: Array) -> Array:
    """Return the signed float32 values of bits, divided by 2**unit."""
    units = to_bits(float_bits.scale_down(magnitude_of(bits), unit))
    return from_bits(units | sign_of(bits))
