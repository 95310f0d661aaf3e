"""Rounding of values to the grid of a number.

Values are given by their float32 bits, int32. Integer operations mean the same on every
backend, also for subnormals, which float operations of XLA:CPU read as zero.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tcfp_jax.formats import float_bits, scale_rules
from tcfp_jax.formats.codebooks import CodebookSpec
from tcfp_jax.formats.float_bits import HIDDEN, INFINITY, NAN, SIGN, Grid, RoundMode
from tcfp_jax.formats.numbers import NumberSpec
from tcfp_jax.formats.scales import TWO_LEVEL_MODES, ScaleMode, ScaleSpec


@dataclass(frozen=True)
class Modes:
    """Modes of a cast: how it rounds, chooses scales, and treats values that are too
    large; see `formats.cast`.
    """

    roundmode: RoundMode = "even"
    scalemode: ScaleMode = "max"
    saturate: bool = True

    def of_scale(self, scale: ScaleSpec) -> ScaleMode:
        """Return the rule for a scale: its own if it names one, and "max" if
        `scalemode` is for other scales.
        """
        fits = (
            scale.number.kind == "exponent"
            if self.scalemode not in TWO_LEVEL_MODES[1:]
            else scale.is_nvfp4
        )
        return scale.mode or (self.scalemode if fits else "max")

    def digits(self, number: NumberSpec | CodebookSpec) -> int:
        """Return the mantissa bits that a quotient needs, so that rounding it to the
        number rounds it only once.
        """
        if isinstance(number, CodebookSpec) or self.roundmode == "stochastic":
            return float_bits.MANTISSA_BITS
        # One digit to round by, and the sticky one below it.
        return min(number.mbits + 2, float_bits.MANTISSA_BITS)


def round_values(
    bits: jax.Array,
    number: NumberSpec,
    modes: Modes,
    random: jax.Array | None,
    units: jax.Array | None = None,
) -> jax.Array:
    """Return float32 values of a number without scale, or in its own units if these are
    given: |x| / scale.
    """
    magnitude = bits & ~jnp.int32(SIGN)
    if units is not None:
        return _round_units(units, bits, number, modes, random)
    if number.kind == "exponent":
        return _round_exponent(bits, number, modes, random)
    if number.is_wide:
        rounded = float_bits.round_bits(
            scale_rules.finite_magnitude(magnitude),
            number.mbits,
            modes.roundmode,
            random,
        )
        largest = int(np.float32(number.max).view(np.int32))
        return _finish(
            rounded, rounded > largest, jnp.int32(largest), bits, number, modes
        )
    shift = number.unit_shift
    if shift == 0:
        return _round_units(float_bits.flushed(magnitude), bits, number, modes, random)
    # The cap keeps the exponent within float32 when it moves up.
    units = float_bits.scale_down(
        jnp.minimum(magnitude, ((254 + shift) << 23) | (HIDDEN - 1)), jnp.int32(shift)
    )
    rounded = float_bits.scale_up(
        _round_units(units, bits, number, modes, random, shift), jnp.int32(shift)
    )
    return lax.bitcast_convert_type(rounded, jnp.float32)


def _round_exponent(
    bits: jax.Array, number: NumberSpec, modes: Modes, random: jax.Array | None
) -> jax.Array:
    """Return powers of two; NaN for values that are not positive. Ties go up, because a
    significand of 1 is odd.
    """
    magnitude = bits & ~jnp.int32(SIGN)
    exponent, mantissa = float_bits.normalize(magnitude)
    significand = lax.bitcast_convert_type(mantissa + (127 << 23), jnp.float32)
    rounded = float_bits.round_to_grid(
        significand, Grid(0, 0, 2.0), modes.roundmode, random
    )
    exponent = jnp.where(
        magnitude >= INFINITY, 128, exponent + (rounded >= 2).astype(jnp.int32)
    )
    over = (exponent > number.emax) & (
        (modes.roundmode != "zero") | (magnitude == INFINITY)
    )
    exponent = jnp.clip(exponent, number.emin, number.emax)
    power = jnp.where(exponent < -126, 1 << 22, (exponent + 127) << 23)
    nan = (magnitude > INFINITY) | (bits < 0) | (magnitude == 0)
    nan = nan if modes.saturate else nan | over
    return lax.bitcast_convert_type(jnp.where(nan, NAN, power), jnp.float32)


def _round_units(
    units: jax.Array,
    bits: jax.Array,
    number: NumberSpec,
    modes: Modes,
    random: jax.Array | None,
    shift: int = 0,
) -> jax.Array:
    """Return values in units of the number times 2**-shift."""
    grid = number.grid
    grid = Grid(grid.emin - shift, grid.mbits, grid.largest * 2.0**-shift)
    rounded = float_bits.round_to_grid(units, grid, modes.roundmode, random)
    largest = jnp.float32(grid.largest)
    as_bits = lambda x: lax.bitcast_convert_type(x, jnp.int32)
    return _finish(
        as_bits(rounded), rounded > largest, as_bits(largest), bits, number, modes
    )


def _finish(
    rounded: jax.Array,
    over: jax.Array,
    largest: jax.Array,
    bits: jax.Array,
    number: NumberSpec,
    modes: Modes,
) -> jax.Array:
    """Return signed values: clip magnitudes `over` the largest, and treat inf and NaN
    of x, whose bits are given.
    """
    magnitude, sign = bits & ~jnp.int32(SIGN), bits & jnp.int32(SIGN)
    infinite = magnitude == INFINITY
    value = jnp.where(over | infinite, largest, rounded)
    if not modes.saturate and (number.has_inf or number.has_nan):
        beyond = infinite if modes.roundmode == "zero" else over | infinite
        value = jnp.where(beyond, INFINITY if number.has_inf else NAN, value)
    if not number.has_negative_zero:
        sign = jnp.where(value == 0, 0, sign)
    if number.kind == "uint":
        value, sign = jnp.where(sign < 0, 0, value), jnp.zeros_like(sign)
    signed = jnp.where(
        magnitude > INFINITY, NAN, jnp.where(value > INFINITY, value, value | sign)
    )
    return lax.bitcast_convert_type(signed, jnp.float32)
