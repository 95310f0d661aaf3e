"""What rounding leaves of a value: how it is formed, and how it is added again.

The rest is counted in units of the value's exponent scale 2**unit, as the packed TCFP-12 format counts it. Where there
is no exponent scale, unit is 0 and the rest is counted in units of x:

    rest = x / 2**unit - value             result = (value + round(rest)) * 2**unit

So the rest is a normal float32 however small x is, and the sum is rounded to float32 once.
"""

import jax
import jax.numpy as jnp
from jax import lax

from tcfp_jax.formats import float_bits
from tcfp_jax.formats.float_bits import INFINITY, TINY
from tcfp_jax.formats.rounding import SIGN, flushed, scaled_up


def rest_of(bits: jax.Array, rounded: jax.Array, unit: jax.Array) -> jax.Array:
    """Bits of (x - rounded) / 2**unit; 0 for a subnormal, and where `x` or `rounded` is not finite.

    >>> bits = rest_of(*map(float_bits.to_bits, jnp.float32([[17], [16]])), jnp.int32(2))
    >>> lax.bitcast_convert_type(bits, jnp.float32)
    Array([0.25], dtype=float32)
    """
    difference = _in_units(bits, unit) - _in_units(rounded, unit)
    infinite = jnp.maximum(bits & ~jnp.int32(SIGN), rounded & ~jnp.int32(SIGN)) >= INFINITY
    keep = ~infinite & jnp.isfinite(difference) & (jnp.abs(difference) >= TINY)
    return lax.bitcast_convert_type(jnp.where(keep, difference, jnp.float32(0)), jnp.int32)


def add_rest(rounded: jax.Array, rest: jax.Array, unit: jax.Array) -> jax.Array:
    """Bits of rounded + rest * 2**unit, at most the largest float32; `rounded` alone where it is not finite.

    >>> bits = add_rest(*map(float_bits.to_bits, jnp.float32([[16], [0.25]])), jnp.int32(2))
    >>> lax.bitcast_convert_type(bits, jnp.float32)
    Array([17.], dtype=float32)
    """
    total = _in_units(rounded, unit) + flushed(rest)
    total = jnp.where(jnp.abs(total) < TINY, jnp.float32(0), total)
    bits = lax.bitcast_convert_type(scaled_up(total, unit), jnp.int32)
    largest = jnp.int32(INFINITY - 1) | (bits & jnp.int32(SIGN))
    bits = jnp.where(jnp.isfinite(total) & ((bits & ~jnp.int32(SIGN)) >= INFINITY), largest, bits)
    return jnp.where((rounded & ~jnp.int32(SIGN)) >= INFINITY, rounded, bits)


def _in_units(bits: jax.Array, unit: jax.Array) -> jax.Array:
    """Signed float32 values of bits over 2**unit."""
    magnitude, sign = bits & ~jnp.int32(SIGN), bits & jnp.int32(SIGN)
    units = lax.bitcast_convert_type(float_bits.scale_down(magnitude, unit), jnp.int32)
    return lax.bitcast_convert_type(units | sign, jnp.float32)
