"""Rounding of values to the grid of a number.

Values are given by their float32 bits, int32. Integer operations mean the same on every
backend, also for subnormals, which float operations of XLA:CPU read as zero.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import Array

from tcfp_jax.formats import float_bits
from tcfp_jax.formats.codebooks import CodebookSpec
from tcfp_jax.formats.float_bits import (
    HIDDEN,
    INFINITY,
    NAN,
    Grid,
    RoundMode,
    from_bits,
    magnitude_of,
    to_bits,
)
from tcfp_jax.formats.numbers import NumberSpec
from tcfp_jax.formats.scale_rules import finite_magnitude
from tcfp_jax.formats.scales import TWO_LEVEL_MODES, ScaleMode, ScaleSpec


@dataclass(frozen=True)
class Modes:
    """How a cast rounds, chooses scales, and treats values that are too large.

    `formats.cast` explains the modes.
    """

    roundmode: RoundMode = "even"
    scalemode: ScaleMode = "max"
    saturate: bool = True

    def of_scale(self, scale: ScaleSpec) -> ScaleMode:
        """Return the rule for a scale: its own if it names one, otherwise `scalemode`.

        The rule is "max" if `scalemode` is for another kind of scale.
        """
        if scale.mode:
            return scale.mode
        if self.scalemode in TWO_LEVEL_MODES[1:]:
            fits = scale.is_nvfp4
        else:
            fits = scale.number.kind == "exponent"
        return self.scalemode if fits else "max"

    def digits(self, number: NumberSpec | CodebookSpec) -> int:
        """Return the mantissa bits of a quotient that are enough to round it once."""
        if isinstance(number, CodebookSpec) or self.roundmode == "stochastic":
            return float_bits.MANTISSA_BITS
        # One digit to round by, and the sticky one below it.
        return min(number.mbits + 2, float_bits.MANTISSA_BITS)


def round_values(
    bits: Array, number: NumberSpec, modes: Modes, random: Array | None
) -> Array:
    """Return float32 values of a number without scale."""
    if number.kind == "exponent":
        return _round_exponent(bits, number, modes, random)
    if number.is_wide:
        return _round_wide(bits, number, modes, random)
    magnitude = magnitude_of(bits)
    shift = number.unit_shift
    if shift == 0:
        units = float_bits.flushed(magnitude)
        return round_units(units, bits, number, modes, random)
    # The cap keeps the exponent within float32 when it moves up.
    capped = jnp.minimum(magnitude, ((254 + shift) << 23) | (HIDDEN - 1))
    units = float_bits.scale_down(capped, jnp.int32(shift))
    rounded = round_units(units, bits, number, modes, random, shift)
    return from_bits(float_bits.scale_up(rounded, jnp.int32(shift)))


def _round_wide(
    bits: Array, number: NumberSpec, modes: Modes, random: Array | None
) -> Array:
    """Return values of a number with the exponents of float32."""
    magnitude = finite_magnitude(magnitude_of(bits))
    rounded = float_bits.round_bits(magnitude, number.mbits, modes.roundmode, random)
    largest = int(np.float32(number.max).view(np.int32))
    over = rounded > largest
    return _finish(rounded, over, jnp.int32(largest), bits, number, modes)


def _round_exponent(
    bits: Array, number: NumberSpec, modes: Modes, random: Array | None
) -> Array:
    """Return powers of two; NaN for values that are not positive.

    Ties go up, because a significand of 1 is odd.
    """
    magnitude = magnitude_of(bits)
    exponent, mantissa = float_bits.normalize(magnitude)
    significand = from_bits(mantissa + (127 << 23))
    grid = Grid(0, 0, 2.0)
    rounded = float_bits.round_to_grid(significand, grid, modes.roundmode, random)
    exponent = exponent + (rounded >= 2).astype(jnp.int32)
    exponent = jnp.where(magnitude >= INFINITY, 128, exponent)
    nan = (magnitude > INFINITY) | (bits < 0) | (magnitude == 0)
    if not modes.saturate:
        over = exponent > number.emax
        if modes.roundmode == "zero":
            over = over & (magnitude == INFINITY)
        nan = nan | over
    exponent = jnp.clip(exponent, number.emin, number.emax)
    power = jnp.where(exponent < -126, HIDDEN >> 1, (exponent + 127) << 23)
    return from_bits(jnp.where(nan, NAN, power))


def round_units(
    units: Array,
    bits: Array,
    number: NumberSpec,
    modes: Modes,
    random: Array | None,
    shift: int = 0,
) -> Array:
    """Return `units`, |x| / scale, rounded to a number, with the signs of x.

    Use it for scaled values, and `round_values` for others. `bits` are those of x,
    because a quotient does not show sign, inf and NaN. Values count in units of
    2**shift.
    """
    grid = number.grid
    grid = Grid(grid.emin - shift, grid.mbits, grid.largest * 2.0**-shift)
    rounded = float_bits.round_to_grid(units, grid, modes.roundmode, random)
    largest = jnp.float32(grid.largest)
    over = rounded > largest
    return _finish(to_bits(rounded), over, to_bits(largest), bits, number, modes)


def _finish(
    rounded: Array,
    over: Array,
    largest: Array,
    bits: Array,
    number: NumberSpec,
    modes: Modes,
) -> Array:
    """Return signed values, with magnitudes `over` the largest clipped.

    `bits` are those of x and show inf, NaN and the sign.
    """
    magnitude = magnitude_of(bits)
    infinite = magnitude == INFINITY
    value = jnp.where(over | infinite, largest, rounded)
    if not modes.saturate and (number.has_inf or number.has_nan):
        beyond = infinite if modes.roundmode == "zero" else over | infinite
        value = jnp.where(beyond, INFINITY if number.has_inf else NAN, value)
    sign = float_bits.sign_of(bits)
    if not number.has_negative_zero:
        sign = jnp.where(value == 0, 0, sign)
    if number.kind == "uint":
        value = jnp.where(sign < 0, 0, value)
        sign = jnp.zeros_like(sign)
    signed = jnp.where(value > INFINITY, value, value | sign)
    return from_bits(jnp.where(magnitude > INFINITY, NAN, signed))
