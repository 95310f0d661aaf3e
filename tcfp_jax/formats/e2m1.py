"""E2M1 by comparisons: magnitudes rounded to 0, 0.5, 1, 1.5, 2, 3, 4 and 6 times a scale, without a division.

A difference of two floats within a factor of two of each other is exact, and others have the right sign, so each
comparison below is that of the real numbers.
"""

import jax
import jax.numpy as jnp
from jax import lax

from tcfp_jax.formats import float_bits
from tcfp_jax.formats.float_bits import MANTISSA_BITS, TINY


def nearest(m: jax.Array, f: jax.Array) -> jax.Array:
    """The E2M1 number nearest to m / f, ties to even, at most 6."""
    one, two, four = m - f, m - 2 * f, m - 4 * f
    step = lambda up, size: jnp.where(up, jnp.float32(size), 0)
    units = step(m > 0.25 * f, 0.5) + step(one >= -0.25 * f, 0.5) + step(one > 0.25 * f, 0.5)
    units += step(two >= -0.25 * f, 0.5) + step(two > 0.5 * f, 1)
    return units + step(four >= -0.5 * f, 1) + step(four > f, 2)


def stochastic(m: jax.Array, f: jax.Array, random: jax.Array) -> jax.Array:
    """One of the two E2M1 numbers around m / f, by distance, at most 6; 0 where f is.

    As `float_bits.round_to_grid` has it, the upper one where a random number of 24 bits, k * 2**-24, is below
    (m / f - lower) / step for the quotient that is rounded to odd. Its last digit is k's bit of value `last`, so that a
    k that ends at an odd digit is as good as the even one above it, and there equal ones are below, too.
    """
    # Without f's exponent no product leaves float32's range; a quotient that does is zero in casts, too.
    exponent = (lax.bitcast_convert_type(f, jnp.int32) >> MANTISSA_BITS) - 127
    power = jnp.where(f < TINY, 0, float_bits.power_of_two(-exponent))
    m, f = m * power, jnp.where(f < TINY, 1, f * power)
    half, one, two, four = 0.5 * f, m - f, m - 2 * f, m - 4 * f
    lower, rest, step = jnp.where(four < 0, 3.0, 4.0), jnp.where(four < 0, two - f, four), jnp.where(four < 0, 1.0, 2.0)
    for below, value, beyond, size in (
        (two < f, 2.0, two, 1.0), (two < 0, 1.5, one - half, 0.5), (one < half, 1.0, one, 0.5),
        (one < 0, 0.5, m - half, 0.5), (m < half, 0.0, m, 0.5),
    ):  # fmt: skip
        lower, rest, step = jnp.where(below, value, lower), jnp.where(below, beyond, rest), jnp.where(below, size, step)
    k = random >> 8
    last, shorter = jnp.uint32(4), jnp.uint32(3)
    for below, digit in ((one < 0, 2), (m < half, 1), (m < 0.5 * half, 0)):
        last = jnp.where(below, jnp.uint32(digit), last)
        shorter = jnp.where(below, jnp.uint32(max(digit - 1, 0)), shorter)
    odd = k & last
    product, error = _exact_product(_halves((k & ~shorter) + odd), step * f * jnp.float32(2.0**-24))
    over = rest - product
    return lower + jnp.where(jnp.where(odd > 0, over >= error, over > error), step, 0)


def _halves(k: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(high, low) floats of integers up to 2**24, in twelve bits each. Conversions are slow on a GPU; this has none."""
    small = lambda k: lax.bitcast_convert_type(k | jnp.uint32(0x4B000000), jnp.float32) - jnp.float32(2.0**23)
    return small(k >> 12) * jnp.float32(2.0**12), small(k & 0xFFF)


def _exact_product(a: tuple[jax.Array, jax.Array], b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(product, error) whose sum is a * b, `a` in halves (Dekker 1971): every other product here is exact."""
    high = lax.bitcast_convert_type(lax.bitcast_convert_type(b, jnp.int32) & jnp.int32(-(1 << 12)), jnp.float32)
    low = b - high
    # abs keeps the compiler from fusing this product with a difference, without rounding it.
    product = jnp.abs((a[0] + a[1]) * b)
    return product, ((a[0] * high - product) + a[0] * low + a[1] * high) + a[1] * low
