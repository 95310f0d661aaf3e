"""Rounding of values to the grid of a number.

`round_unscaled` takes magnitudes of x, and `round_units` takes magnitudes that a scale has divided. Magnitudes and
signs are int32 with the bits of |x| and the sign bit alone. Integer operations mean the same on every backend, also for
subnormals, which float operations of XLA:CPU read as zero.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tcfp_jax.formats import float_bits, scale_rules
from tcfp_jax.formats.codebooks import CodebookSpec
from tcfp_jax.formats.float_bits import HIDDEN, INFINITY, NAN, Grid, RoundMode
from tcfp_jax.formats.numbers import NumberSpec
from tcfp_jax.formats.scales import TWO_LEVEL_MODES, ScaleMode, ScaleSpec

SIGN = -(2**31)


@dataclass(frozen=True)
class Modes:
    """Modes of a cast: how it rounds, chooses scales, and treats values that are too large; see `formats.cast`."""

    roundmode: RoundMode = "even"
    scalemode: ScaleMode = "max"
    saturate: bool = True

    def of_scale(self, scale: ScaleSpec) -> ScaleMode:
        """Return the rule for a scale: its own if it names one, and "max" if `scalemode` is for other scales."""
        fits = scale.number.kind == "exponent" if self.scalemode not in TWO_LEVEL_MODES[1:] else scale.is_nvfp4
        return scale.mode or (self.scalemode if fits else "max")

    def digits(self, number: NumberSpec | CodebookSpec) -> int:
        """Return the mantissa bits that a quotient needs, so that rounding it to the number rounds it only once."""
        if isinstance(number, CodebookSpec) or self.roundmode == "stochastic":
            return float_bits.MANTISSA_BITS
        # One digit to round by, and the sticky one below it.
        return min(number.mbits + 2, float_bits.MANTISSA_BITS)


def round_unscaled(
    magnitude: jax.Array, sign: jax.Array, number: NumberSpec, modes: Modes, random: jax.Array | None
) -> jax.Array:
    """Return float32 values of a number without scale, from the bits of |x| and the sign bits of x."""
    if number.kind == "exponent":
        return _round_exponent(magnitude, sign, number, modes, random)
    if number.is_wide:
        rounded = float_bits.round_bits(scale_rules.finite_magnitude(magnitude), number.mbits, modes.roundmode, random)
        largest = int(np.float32(number.max).view(np.int32))
        return _finish(rounded, rounded > largest, jnp.int32(largest), magnitude, sign, number, modes)
    shift = number.unit_shift
    if shift == 0:
        units = lax.bitcast_convert_type(jnp.where(magnitude < HIDDEN, 0, magnitude), jnp.float32)
    else:
        # The cap keeps the exponent within float32 when it moves up.
        units = float_bits.scale_down(jnp.minimum(magnitude, ((254 + shift) << 23) | (HIDDEN - 1)), jnp.int32(shift))
    rounded = round_units(units, magnitude, sign, number, modes, random, shift)
    return scaled_up(rounded, jnp.int32(shift)) if shift else rounded


def _round_exponent(
    magnitude: jax.Array, sign: jax.Array, number: NumberSpec, modes: Modes, random: jax.Array | None
) -> jax.Array:
    """Return powers of two; NaN for values that are not positive. Ties go up, because a significand of 1 is odd."""
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


def round_units(
    units: jax.Array,
    magnitude: jax.Array,
    sign: jax.Array,
    number: NumberSpec,
    modes: Modes,
    random: jax.Array | None,
    shift: int = 0,
) -> jax.Array:
    """Return float32 values of a number in its own units, times 2**-shift.

    Args:
      units: float32 |x| / scale, or |x| * 2**-shift for an unscaled number.
      magnitude, sign: the bits of |x| and the sign bit of x, for NaN, inf and the sign of the result.
      number, modes: the number, and how to round to it.
      random: uniform uint32, for stochastic rounding only.
      shift: log2 of the unit.
    """
    grid = number.grid
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
    """Return signed values: clip magnitudes `over` the largest, and treat inf and NaN of x."""
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


def scaled_up(value: jax.Array, exponent: jax.Array) -> jax.Array:
    """Return float32 value * 2**exponent; inf, NaN and the sign of zero stay."""
    bits = lax.bitcast_convert_type(value, jnp.int32)
    magnitude, sign = bits & ~jnp.int32(SIGN), bits & jnp.int32(SIGN)
    scaled = float_bits.scale_up(lax.bitcast_convert_type(magnitude, jnp.float32), exponent)
    return lax.bitcast_convert_type(jnp.where(magnitude >= INFINITY, bits, scaled | sign), jnp.float32)


def flushed(bits: jax.Array) -> jax.Array:
    """Return the float32 values of bits, subnormals as zero."""
    return lax.bitcast_convert_type(jnp.where((bits & ~jnp.int32(SIGN)) < HIDDEN, 0, bits), jnp.float32)
