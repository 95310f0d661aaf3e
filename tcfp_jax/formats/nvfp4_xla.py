"""NVFP4 by comparisons, as XLA computes it on matrices: nothing is divided, so one pass finds scales and one rounds.

E2M1's magnitudes are 0, 0.5, 1, 1.5, 2, 3, 4 and 6. A difference of two floats within a factor of two of each other is
exact, and every other difference has the right sign, so each comparison here is right for the real numbers.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.counter import bits_of
from tcfp_jax.formats import float_bits, scale_rules
from tcfp_jax.formats.float_bits import INFINITY, MANTISSA_BITS, TINY
from tcfp_jax.formats.numbers import number
from tcfp_jax.formats.nvfp4_registers import Key

Blocks = Callable[[jax.Array], list[jax.Array]]


class Coded(NamedTuple):
    """Blocks of float32 `x`, the E2M1 magnitude `units` of each value, and the scales of blocks and of the tensor."""

    x: jax.Array
    units: jax.Array
    scale: jax.Array
    outer: jax.Array


def quantize(x: jax.Array, axes: tuple[int, ...], blocks: Blocks = lambda x: [x], key: Key | None = None) -> Coded:
    """Round x to E2M1 numbers under scales amax / 6.

    Args:
      x: bfloat16 or float32.
      axes: the axes along which a block extends.
      blocks: a function that gives the blocks of x, in parts along the first of `axes`. It is computed twice, because a
        pass over x that computes it costs less than one over its result.
      key: the key of random bits for stochastic rounding. The bits of a value depend on its index, which counts the
        values within a block first.

    Returns:
      `Coded` of the shape of all blocks. A NaN or inf in x makes the scale of its block NaN.

    >>> coded = jax.jit(lambda x: quantize(x, (1,)))(jnp.arange(16.0)[None] - 6)
    >>> (coded.units * coded.scale * coded.outer)[0, :8].round(2).tolist()
    [6.0, 4.5, 4.5, 3.0, 2.25, 0.75, 0.0, 0.75]
    """
    bits = [lax.bitcast_convert_type(jnp.abs(part.astype(jnp.float32)), jnp.int32) for part in blocks(x)]
    amax = _largest([scale_rules.finite_magnitude(part) for part in bits], axes)
    lost = _largest(bits, axes) >= INFINITY
    # Without a barrier XLA finds the maximum of x in a pass of its own, and writes the rotated array to memory.
    amax, lost, x = lax.optimization_barrier((amax, lost, x))
    x = jnp.concatenate(blocks(x), axis=axes[0]).astype(jnp.float32)
    # Subnormals are zero, as casts read them: by integers, because XLA writes the operands of `where` to memory.
    magnitude = lax.bitcast_convert_type(jnp.abs(x), jnp.int32)
    magnitude &= -jnp.minimum(magnitude >> MANTISSA_BITS, 1)
    magnitude = lax.bitcast_convert_type(magnitude, jnp.float32)
    e4m3 = number("e4m3fn")
    outer = scale_rules.choose_outer(jnp.max(amax), 6.0, e4m3, number("float32"), "max")
    (scale,) = scale_rules.tile_scales(amax, outer, 6.0, e4m3, "max", key is not None)
    product = scale * outer
    if key is not None:
        units = stochastic(magnitude, product, bits_of(x.shape, *key, fastest=axes[0]))
    else:
        # A divisor above every value rounds all of them to zero.
        units = nearest(magnitude, jnp.where(product < TINY, jnp.float32(2.0**120), product))
    return Coded(x, units, jnp.where(lost, jnp.float32(jnp.nan), scale), outer)


def _largest(parts: list[jax.Array], axes: tuple[int, ...]) -> jax.Array:
    return functools.reduce(jnp.maximum, [jnp.max(part, axis=axes, keepdims=True) for part in parts])


def nearest(m: jax.Array, f: jax.Array) -> jax.Array:
    """Return the E2M1 number nearest to m / f, ties to even, at most 6."""
    one, two, four = m - f, m - 2 * f, m - 4 * f
    step = lambda up, size: jnp.where(up, jnp.float32(size), 0)
    units = step(m > 0.25 * f, 0.5) + step(one >= -0.25 * f, 0.5) + step(one > 0.25 * f, 0.5)
    units += step(two >= -0.25 * f, 0.5) + step(two > 0.5 * f, 1)
    return units + step(four >= -0.5 * f, 1) + step(four > f, 2)


def stochastic(m: jax.Array, f: jax.Array, random: jax.Array) -> jax.Array:
    """Return one of the two E2M1 numbers around m / f, by distance, at most 6; 0 if f is 0.

    `float_bits.round_to_grid` takes the upper number if a random k * 2**-24 of 24 bits is below (m / f - lower) / step,
    for a quotient that is rounded to odd. The last digit of that quotient is k's bit of value `last`. So a k that ends
    at an odd digit decides as the even k above it does, and then equality counts as below.
    """
    # Without f's exponent no product leaves float32's range; casts round a quotient outside it to zero as well.
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
    """Return (high, low) floats of integers up to 2**24, in twelve bits each. GPUs convert slowly; this does not."""
    small = lambda k: lax.bitcast_convert_type(k | jnp.uint32(0x4B000000), jnp.float32) - jnp.float32(2.0**23)
    return small(k >> 12) * jnp.float32(2.0**12), small(k & 0xFFF)


def _exact_product(a: tuple[jax.Array, jax.Array], b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (product, error) whose sum is a * b, for `a` in halves (Dekker 1971): the other products are exact."""
    high = lax.bitcast_convert_type(lax.bitcast_convert_type(b, jnp.int32) & jnp.int32(-(1 << 12)), jnp.float32)
    low = b - high
    # abs keeps the compiler from fusing this product with a difference, which would leave it unrounded.
    product = jnp.abs((a[0] + a[1]) * b)
    return product, ((a[0] * high - product) + a[0] * low + a[1] * high) + a[1] * low
