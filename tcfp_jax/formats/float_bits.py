"""Arithmetic on the bits of float32: powers of two, exact division, and rounding to any
grid.

Casts are made of these functions. They share no code with `pallas_kernels.numerics` on
purpose: each is the other's oracle in tests. Magnitudes are int32 with the bits of |x|,
which are ordered as the values are.

XLA:CPU reads and writes subnormal float32 as zero, and XLA:GPU does not. So no float
operation here meets a subnormal: integers take it apart and make it. Products and
quotients by powers of two are integer additions to the exponent, which are exact and
the same on every backend, with and without jit.
"""

import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

RoundMode = Literal["nearest", "even", "zero", "stochastic"]
# "up" is for scales that must cover; no cast offers it.
Rounding = RoundMode | Literal["up"]

MANTISSA_BITS = 23
HIDDEN = 1 << MANTISSA_BITS
INFINITY = 0x7F800000
NAN = 0x7FC00000
SIGN = -(2**31)
TINY = float(np.finfo(np.float32).tiny)
_MANTISSA = HIDDEN - 1
_DIGITS_AT_ONCE = 12


class Grid(NamedTuple):
    """The values of a number in its own units: steps of 2**(max(exponent, emin) -
    mbits), up to `largest`.
    """

    emin: int
    mbits: int
    largest: float


def sum_squares(
    x: jax.Array, axes: tuple[int, ...], limit: int
) -> tuple[jax.Array, jax.Array]:
    """Return the upper and the lower part of the exact sum of squares of int32 values
    up to `limit`, below 2**15.5.
    """
    count, square = math.prod(x.shape[axis] for axis in axes), jnp.square(x)
    if count * limit**2 < 2**31:
        total = jnp.sum(square, axis=axes, keepdims=True)
        return jnp.zeros_like(total), total
    # bits of a digit, whose sum fits with its carry
    width = 8 if count < 2**23 else 4 if count < 2**27 else 2
    mask, places = 2**width - 1, range(0, 32, width)
    sums = [jnp.sum((square >> at) & mask, axis=axes, keepdims=True) for at in places]
    for i in range(1, len(sums)):
        sums[i - 1], sums[i] = sums[i - 1] & mask, sums[i] + (sums[i - 1] >> width)
    return sums[-1], sum(
        (digit << at for digit, at in zip(sums[:-1], places)),
        start=jnp.zeros_like(sums[0]),
    )


def to_bits(x: jax.Array) -> jax.Array:
    """Return the int32 bits of float32(x) for any float dtype; only float64 is
    rounded.
    """
    if x.dtype == jnp.bfloat16:  # by integers: a conversion flushes subnormals on a CPU
        half = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
        return lax.bitcast_convert_type(half << 16, jnp.int32)
    return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)


def from_bits(bits: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return float32 bits as an array of `dtype`, rounded to nearest even; a finite
    value stays finite.
    """
    if dtype == jnp.bfloat16:
        magnitude = bits & ~jnp.int32(SIGN)
        rounded = magnitude + 0x7FFF + ((magnitude >> 16) & 1)
        rounded = jnp.where(
            magnitude < INFINITY, jnp.minimum(rounded, 0x7F7FFFFF), magnitude
        )
        half = (
            lax.bitcast_convert_type(rounded | (bits & jnp.int32(SIGN)), jnp.uint32)
            >> 16
        )
        return lax.bitcast_convert_type(half.astype(jnp.uint16), jnp.bfloat16)
    values = lax.bitcast_convert_type(bits, jnp.float32)
    if dtype in (jnp.float32, jnp.float64):
        return values.astype(dtype)
    limit = float(jnp.finfo(dtype).max)
    clipped = jnp.clip(values, -limit, limit)
    return jnp.where(jnp.isfinite(values), clipped, values).astype(dtype)


def power_of_two(exponent: jax.Array) -> jax.Array:
    """Return 2**exponent in float32 for int32 exponents; 0 below -126, 2**127 above
    127.
    """
    biased = jnp.clip(exponent + 127, 0, 254)
    return lax.bitcast_convert_type(biased << MANTISSA_BITS, jnp.float32)


def normalize(magnitude: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (floor(log2), the 23 mantissa bits) of magnitudes, subnormals included;
    -150 for zero.
    """
    # A subnormal counts in steps of 2**-149, as an integer; Mosaic has no instruction
    # for leading zeros.
    steps = lax.bitcast_convert_type(magnitude.astype(jnp.float32), jnp.int32)
    tiny = jnp.maximum((steps >> MANTISSA_BITS) - 276, -150)
    exponent = jnp.where(magnitude < HIDDEN, tiny, (magnitude >> MANTISSA_BITS) - 127)
    return exponent, jnp.where(magnitude < HIDDEN, steps, magnitude) & _MANTISSA


def scale_down(magnitude: jax.Array, exponent: jax.Array) -> jax.Array:
    """Return |x| * 2**-exponent in float32, exact; below 2**-126 it is 0, and from
    2**128 on the largest float32.
    """
    shifted = magnitude - (exponent << MANTISSA_BITS)
    shifted = jnp.where(shifted < HIDDEN, jnp.zeros_like(shifted), shifted)
    # The exponent alone decides, because the difference may leave int32: a narrow scale
    # may lie far below x.
    shifted = jnp.where(
        (magnitude >> MANTISSA_BITS) - exponent > 254, INFINITY - 1, shifted
    )
    # A subnormal counts in steps of 2**-149, as an integer: XLA multiplies the factors
    # of a product first, which may be subnormal as well. The difference fits int32 if
    # the exponent does, though its terms may not.
    steps = lax.bitcast_convert_type(magnitude.astype(jnp.float32), jnp.int32)
    subnormal = steps - ((149 + exponent) << MANTISSA_BITS)
    subnormal = jnp.where(
        (steps >> MANTISSA_BITS) - (149 + exponent) < 1,
        jnp.zeros_like(subnormal),
        subnormal,
    )
    return lax.bitcast_convert_type(
        jnp.where(magnitude < HIDDEN, subnormal, shifted), jnp.float32
    )


def scale_up(value: jax.Array, exponent: jax.Array) -> jax.Array:
    """Return the bits of value * 2**exponent: exact, or a subnormal rounded to nearest
    even; inf and NaN stay.
    """
    bits = lax.bitcast_convert_type(value, jnp.int32)
    magnitude, moved = (
        bits & ~jnp.int32(SIGN),
        (bits & ~jnp.int32(SIGN)) + (exponent << MANTISSA_BITS),
    )
    steps = (jnp.abs(value) * power_of_two(126 + exponent)) * jnp.float32(
        2.0**MANTISSA_BITS
    )
    steps = lax.round(steps, lax.RoundingMethod.TO_NEAREST_EVEN)
    subnormal = jnp.minimum(steps, jnp.float32(HIDDEN)).astype(jnp.int32)
    scaled = jnp.where(value == 0, 0, jnp.where(moved < HIDDEN, subnormal, moved))
    return jnp.where(magnitude >= INFINITY, bits, scaled | (bits & jnp.int32(SIGN)))


def flushed(bits: jax.Array) -> jax.Array:
    """Return the float32 values of bits, with +0 for subnormals and zeros.

    CPUs drop some subnormals that GPUs keep, and a code has the sign of its zero.
    """
    return lax.bitcast_convert_type(
        jnp.where((bits & ~jnp.int32(SIGN)) < HIDDEN, 0, bits), jnp.float32
    )


def divide_to_odd(magnitude: jax.Array, divisor: jax.Array, digits: int) -> jax.Array:
    """Return |x| / |y| in float32 with `digits` mantissa bits, and the last bit set if
    that is not exact.

    A quotient that is rounded so ("to odd"), and then to fewer bits, is rounded once.
    This is a long division in integers, 12 bits at a time, because a GPU's float32
    division is not correctly rounded. Subnormals and x / 0 are 0.

    Source: Boldo and Melquiond 2008, "Emulation of a FMA and correctly rounded sums:
    proved algorithms using rounding to odd".
    """
    exponent, quotient, remainder, _ = _divide(magnitude, divisor, digits)
    quotient = (quotient << (MANTISSA_BITS - digits)) | (remainder != 0).astype(
        jnp.int32
    )
    return _quotient(magnitude, divisor, exponent, quotient)


def divide(magnitude: jax.Array, divisor: jax.Array) -> jax.Array:
    """Return |x| / |y| in float32, rounded to nearest; see `divide_to_odd`."""
    exponent, quotient, remainder, denominator = _divide(
        magnitude, divisor, MANTISSA_BITS
    )
    # The quotient of two floats of 24 bits never lies halfway between two others, so
    # ties cannot occur.
    quotient = quotient + (2 * remainder > denominator).astype(jnp.int32)
    return _quotient(magnitude, divisor, exponent, quotient)


def _divide(
    magnitude: jax.Array, divisor: jax.Array, digits: int
) -> tuple[jax.Array, ...]:
    numerator, denominator = (
        (bits & _MANTISSA) | HIDDEN for bits in (magnitude, divisor)
    )
    smaller = (numerator < denominator).astype(jnp.int32)
    exponent = (magnitude >> MANTISSA_BITS) - (divisor >> MANTISSA_BITS) - smaller + 127
    remainder = (numerator << smaller) - denominator
    quotient = jnp.ones_like(remainder)
    inverse = 1 / denominator.astype(jnp.float32)
    for place in range(0, digits, _DIGITS_AT_ONCE):
        count = min(digits - place, _DIGITS_AT_ONCE)
        # The guess may be off by one. Products may wrap around; their small difference
        # is right.
        guess = (
            remainder.astype(jnp.float32) * inverse * jnp.float32(2.0**count)
        ).astype(jnp.int32)
        rest = (remainder << count) - guess * denominator
        change = (rest >= denominator).astype(jnp.int32) - (rest < 0).astype(jnp.int32)
        quotient = (quotient << count) + (guess + change)
        remainder = rest - change * denominator
    return exponent, quotient, remainder, denominator


def _quotient(
    magnitude: jax.Array, divisor: jax.Array, exponent: jax.Array, quotient: jax.Array
) -> jax.Array:
    # No float32 has an exponent field above 254; capping it keeps the sum within int32.
    bits = (jnp.minimum(exponent, 254) << MANTISSA_BITS) + (quotient - HIDDEN)
    bits = jnp.where(exponent > 254, INFINITY - 1, jnp.minimum(bits, INFINITY - 1))
    nothing = (magnitude < HIDDEN) | (divisor < HIDDEN) | (exponent < 1)
    return lax.bitcast_convert_type(jnp.where(nothing, 0, bits), jnp.float32)


def round_to_grid(
    value: jax.Array, grid: Grid, mode: Rounding, bits: jax.Array | None
) -> jax.Array:
    """Round values >= 0 to a grid whose steps are normal float32; the grid continues
    beyond `largest`.

    `bits` are uniform uint32 for "stochastic": it rounds up with probability (value -
    lower) / step, exact to 2**-24.
    """
    emax = int(np.frexp(grid.largest)[1]) - 1
    # A value of twice the largest binade is beyond the grid whatever its digits are;
    # the cap keeps its step finite.
    capped = jnp.minimum(value, jnp.float32(2.0 ** min(emax + 1, 127)))
    exponent = lax.bitcast_convert_type(capped, jnp.int32) & INFINITY
    step_bits = jnp.maximum(exponent, (grid.emin + 127) << MANTISSA_BITS) - (
        grid.mbits << MANTISSA_BITS
    )
    step = lax.bitcast_convert_type(step_bits, jnp.float32)
    units = capped * lax.bitcast_convert_type(
        (254 << MANTISSA_BITS) - step_bits, jnp.float32
    )
    if mode == "even":
        return lax.round(units, lax.RoundingMethod.TO_NEAREST_EVEN) * step
    if mode == "nearest":
        return lax.round(units, lax.RoundingMethod.AWAY_FROM_ZERO) * step
    if mode == "up":
        return jnp.ceil(units) * step
    lower = jnp.floor(units)
    if mode == "stochastic":
        assert bits is not None
        uniform = (bits >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)
        lower = lower + (uniform < units - lower).astype(jnp.float32)
    return lower * step


def round_bits(
    magnitude: jax.Array, mbits: int, mode: Rounding, bits: jax.Array | None
) -> jax.Array:
    """Round magnitudes to `mbits` bits of mantissa, for numbers with the exponents of
    float32.
    """
    drop = MANTISSA_BITS - mbits
    if drop == 0:
        return magnitude
    ones, half = (1 << drop) - 1, 1 << (drop - 1)
    added: jax.Array | int
    if mode == "stochastic":  # a carry if the draw is below the dropped bits
        assert bits is not None
        added = ones - (bits >> (32 - drop)).astype(jnp.int32)
    elif mode == "even":
        added = half - 1 + ((magnitude >> drop) & 1)
    else:
        added = {"nearest": half, "up": ones, "zero": 0}[mode]
    return (magnitude + added) & ~ones
