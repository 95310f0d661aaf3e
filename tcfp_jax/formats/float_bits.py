"""Arithmetic on the bits of float32: powers of two, exact division, rounding to grids.

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

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

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
    """The values of a number in its own units.

    Steps are 2**(max(exponent, emin) - mbits), up to `largest`.
    """

    emin: int
    mbits: int
    largest: float


def sum_squares(x: Array, axes: tuple[int, ...], limit: int) -> tuple[Array, Array]:
    """Return the exact sum of squares over `axes` in two parts, (upper, lower).

    The values are int32 of at most `limit`, which is below 2**15.5. Parts of equal
    shapes compare like numbers: the upper ones first, then the lower ones.
    """
    count = math.prod(x.shape[axis] for axis in axes)
    squares = jnp.square(x)

    def total(terms: Array) -> Array:
        return jnp.sum(terms, axis=axes, keepdims=True, dtype=jnp.int32)

    if count * limit**2 < 2**31:
        lower = total(squares)
        return jnp.zeros_like(lower), lower
    width = _digit_width(count)
    mask = 2**width - 1
    *places, last = range(0, 32, width)
    lower = jnp.int32(0)
    carry = jnp.int32(0)
    for place in places:
        digit = carry + total((squares >> place) & mask)
        lower = lower + ((digit & mask) << place)
        carry = digit >> width
    return carry + total((squares >> last) & mask), lower


def is_smaller(one: tuple[Array, Array], other: tuple[Array, Array]) -> Array:
    """Return whether the first of two results of `sum_squares` is smaller."""
    return (one[0] < other[0]) | ((one[0] == other[0]) & (one[1] < other[1]))


def _digit_width(count: int) -> int:
    """Return the bits of a digit, such that a sum of `count` of them fits int32."""
    if count < 2**23:
        return 8
    return 4 if count < 2**27 else 2


def to_bits(x: Array) -> Array:
    """Return the int32 bits of float32(x) for any float dtype; only float64 rounds."""
    if x.dtype == jnp.bfloat16:  # by integers: a conversion flushes subnormals on a CPU
        half = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
        return lax.bitcast_convert_type(half << 16, jnp.int32)
    return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)


def from_bits(bits: Array, dtype: DTypeLike = jnp.float32) -> Array:
    """Return the values of float32 bits in `dtype`, rounded to nearest even.

    A finite value stays finite.
    """
    if dtype == jnp.bfloat16:
        magnitude = magnitude_of(bits)
        rounded = magnitude + 0x7FFF + ((magnitude >> 16) & 1)
        finite = jnp.minimum(rounded, 0x7F7FFFFF)
        rounded = jnp.where(magnitude < INFINITY, finite, magnitude)
        signed = rounded | sign_of(bits)
        half = lax.bitcast_convert_type(signed, jnp.uint32) >> 16
        return lax.bitcast_convert_type(half.astype(jnp.uint16), jnp.bfloat16)
    values = lax.bitcast_convert_type(bits, jnp.float32)
    if dtype in (jnp.float32, jnp.float64):
        return values.astype(dtype)
    limit = float(jnp.finfo(dtype).max)
    clipped = jnp.clip(values, -limit, limit)
    return jnp.where(jnp.isfinite(values), clipped, values).astype(dtype)


def magnitude_of(bits: Array) -> Array:
    """Return the bits of |x|."""
    return bits & ~jnp.int32(SIGN)


def sign_of(bits: Array) -> Array:
    """Return the sign bit of x alone."""
    return bits & jnp.int32(SIGN)


def power_of_two(exponent: Array) -> Array:
    """Return float32 2**exponent for int32; 0 below -126, and 2**127 above 127."""
    biased = jnp.clip(exponent + 127, 0, 254)
    return from_bits(biased << MANTISSA_BITS)


def normalize(magnitude: Array) -> tuple[Array, Array]:
    """Return (floor(log2), the 23 mantissa bits) of magnitudes; -150 for zero.

    Subnormals are exact, too.
    """
    # A subnormal counts in steps of 2**-149, as an integer; Mosaic has no instruction
    # for leading zeros.
    steps = to_bits(magnitude.astype(jnp.float32))
    tiny = jnp.maximum((steps >> MANTISSA_BITS) - 276, -150)
    exponent = jnp.where(magnitude < HIDDEN, tiny, (magnitude >> MANTISSA_BITS) - 127)
    return exponent, jnp.where(magnitude < HIDDEN, steps, magnitude) & _MANTISSA


def scale_down(magnitude: Array, exponent: Array) -> Array:
    """Return |x| * 2**-exponent in float32, exact within the range of normal numbers.

    Below 2**-126 it is 0, and from 2**128 on the largest float32.
    """
    shifted = magnitude - (exponent << MANTISSA_BITS)
    shifted = jnp.where(shifted < HIDDEN, jnp.zeros_like(shifted), shifted)
    # The exponent alone decides, because the difference may leave int32: a narrow scale
    # may lie far below x.
    beyond = (magnitude >> MANTISSA_BITS) - exponent > 254
    shifted = jnp.where(beyond, INFINITY - 1, shifted)
    # A subnormal counts in steps of 2**-149, as an integer: XLA multiplies the factors
    # of a product first, which may be subnormal as well. The difference fits int32 if
    # the exponent does, though its terms may not.
    steps = to_bits(magnitude.astype(jnp.float32))
    subnormal = steps - ((149 + exponent) << MANTISSA_BITS)
    nothing = (steps >> MANTISSA_BITS) - (149 + exponent) < 1
    subnormal = jnp.where(nothing, jnp.zeros_like(subnormal), subnormal)
    return from_bits(jnp.where(magnitude < HIDDEN, subnormal, shifted))


def scale_up(value: Array, exponent: Array) -> Array:
    """Return the bits of value * 2**exponent; inf and NaN stay.

    The product is exact, or a subnormal that is rounded to nearest even.
    """
    bits = to_bits(value)
    magnitude = magnitude_of(bits)
    moved = magnitude + (exponent << MANTISSA_BITS)
    steps = jnp.abs(value) * power_of_two(126 + exponent)
    steps = steps * jnp.float32(2.0**MANTISSA_BITS)
    steps = lax.round(steps, lax.RoundingMethod.TO_NEAREST_EVEN)
    subnormal = jnp.minimum(steps, jnp.float32(HIDDEN)).astype(jnp.int32)
    scaled = jnp.where(moved < HIDDEN, subnormal, moved)
    scaled = jnp.where(value == 0, 0, scaled)
    return jnp.where(magnitude >= INFINITY, bits, scaled | sign_of(bits))


def flushed(bits: Array) -> Array:
    """Return the float32 values of bits, with +0 for subnormals and zeros.

    CPUs drop some subnormals that GPUs keep, and a code has the sign of its zero.
    """
    return from_bits(jnp.where(magnitude_of(bits) < HIDDEN, 0, bits))


def divide_to_odd(magnitude: Array, divisor: Array, digits: int) -> Array:
    """Return |x| / |y| in float32 with `digits` mantissa bits, rounded to odd.

    The last bit is set if the quotient is not exact. A quotient that is rounded so, and
    then to fewer bits, is rounded once. This is a long division in integers, 12 bits at
    a time, because a GPU's float32 division is not correctly rounded. Subnormals and
    x / 0 are 0.

    Source: Boldo and Melquiond 2008, "Emulation of a FMA and correctly rounded sums:
    proved algorithms using rounding to odd".
    """
    exponent, quotient, remainder, _ = _divide(magnitude, divisor, digits)
    sticky = (remainder != 0).astype(jnp.int32)
    quotient = (quotient << (MANTISSA_BITS - digits)) | sticky
    return _quotient(magnitude, divisor, exponent, quotient)


def divide(magnitude: Array, divisor: Array) -> Array:
    """Return |x| / |y| in float32, rounded to nearest; see `divide_to_odd`."""
    exponent, quotient, remainder, denominator = _divide(
        magnitude, divisor, MANTISSA_BITS
    )
    # The quotient of two floats of 24 bits never lies halfway between two others, so
    # ties cannot occur.
    quotient = quotient + (2 * remainder > denominator).astype(jnp.int32)
    return _quotient(magnitude, divisor, exponent, quotient)


def _divide(
    magnitude: Array, divisor: Array, digits: int
) -> tuple[Array, Array, Array, Array]:
    """Return (biased exponent, quotient, remainder, denominator) of a long division."""
    numerator = (magnitude & _MANTISSA) | HIDDEN
    denominator = (divisor & _MANTISSA) | HIDDEN
    smaller = (numerator < denominator).astype(jnp.int32)
    exponent = (magnitude >> MANTISSA_BITS) - (divisor >> MANTISSA_BITS) - smaller + 127
    remainder = (numerator << smaller) - denominator
    quotient = jnp.ones_like(remainder)
    inverse = 1 / denominator.astype(jnp.float32)
    for place in range(0, digits, _DIGITS_AT_ONCE):
        count = min(digits - place, _DIGITS_AT_ONCE)
        # The guess may be off by one. Products may wrap around; their small difference
        # is right.
        guess = remainder.astype(jnp.float32) * inverse * jnp.float32(2.0**count)
        digit = guess.astype(jnp.int32)
        rest = (remainder << count) - digit * denominator
        change = (rest >= denominator).astype(jnp.int32) - (rest < 0).astype(jnp.int32)
        quotient = (quotient << count) + (digit + change)
        remainder = rest - change * denominator
    return exponent, quotient, remainder, denominator


def _quotient(
    magnitude: Array, divisor: Array, exponent: Array, quotient: Array
) -> Array:
    """Return the float32 of a quotient's exponent and digits."""
    # No float32 has an exponent field above 254; capping it keeps the sum within int32.
    bits = (jnp.minimum(exponent, 254) << MANTISSA_BITS) + (quotient - HIDDEN)
    largest = INFINITY - 1
    bits = jnp.where(exponent > 254, largest, jnp.minimum(bits, largest))
    nothing = (magnitude < HIDDEN) | (divisor < HIDDEN) | (exponent < 1)
    return from_bits(jnp.where(nothing, 0, bits))


def uniform(bits: Array | None) -> Array:
    """Return uniform float32 values from 0 to 1, exact to 2**-24, of uniform uint32."""
    assert bits is not None, "stochastic rounding has random bits"
    return (bits >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)


def round_to_grid(
    value: Array, grid: Grid, mode: Rounding, bits: Array | None = None
) -> Array:
    """Round values >= 0 to a grid whose steps are normal float32.

    The grid continues beyond `largest`. `bits` are uniform uint32 for "stochastic": it
    rounds up with probability (value - lower) / step, exact to 2**-24.
    """
    emax = int(np.frexp(grid.largest)[1]) - 1
    # A value of twice the largest binade is beyond the grid whatever its digits are;
    # the cap keeps its step finite.
    capped = jnp.minimum(value, jnp.float32(2.0 ** min(emax + 1, 127)))
    exponent = to_bits(capped) & INFINITY
    step_bits = jnp.maximum(exponent, (grid.emin + 127) << MANTISSA_BITS)
    step_bits = step_bits - (grid.mbits << MANTISSA_BITS)
    step = from_bits(step_bits)
    units = capped * from_bits((254 << MANTISSA_BITS) - step_bits)
    if mode == "even":
        return lax.round(units, lax.RoundingMethod.TO_NEAREST_EVEN) * step
    if mode == "nearest":
        return lax.round(units, lax.RoundingMethod.AWAY_FROM_ZERO) * step
    if mode == "up":
        return jnp.ceil(units) * step
    lower = jnp.floor(units)
    if mode == "stochastic":
        lower = lower + (uniform(bits) < units - lower).astype(jnp.float32)
    return lower * step


def round_bits(
    magnitude: Array, mbits: int, mode: Rounding, bits: Array | None = None
) -> Array:
    """Round magnitudes to `mbits` bits of mantissa, with the exponents of float32."""
    drop = MANTISSA_BITS - mbits
    if drop == 0:
        return magnitude
    ones = (1 << drop) - 1
    half = 1 << (drop - 1)
    added: Array | int
    if mode == "stochastic":  # a carry if the draw is below the dropped bits
        assert bits is not None
        added = ones - (bits >> (32 - drop)).astype(jnp.int32)
    elif mode == "even":
        added = half - 1 + ((magnitude >> drop) & 1)
    else:
        added = {"nearest": half, "up": ones, "zero": 0}[mode]
    return (magnitude + added) & ~ones
