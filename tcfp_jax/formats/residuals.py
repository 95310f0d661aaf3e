"""What rounding leaves of a value: how it is formed, and how it is added again.

It is counted in units of the value's exponent scale, as the packed TCFP-12 format counts it, and in those of x where
there is no such scale:

    rest = x / 2**unit - value             result = (value + round(rest)) * 2**unit

So the rest of a tile is a normal float32 whatever the magnitude of x, and the sum is rounded to float32 once.
"""

import jax
import jax.numpy as jnp
from jax import lax

from tcfp_jax.formats import float_bits
from tcfp_jax.formats.float_bits import INFINITY, TINY
from tcfp_jax.formats.rounding import SIGN, flushed, scaled_up


def rest_of(bits: jax.Array, rounded: jax.Array, unit: jax.Array) -> jax.Array:
    """Bits of (x - rounded) / 2**unit, subnormals as zero; 0 where that is not finite, which `rounded` already says."""
    difference = _in_units(bits, unit) - _in_units(rounded, unit)
    infinite = jnp.maximum(bits & ~jnp.int32(SIGN), rounded & ~jnp.int32(SIGN)) >= INFINITY
    keep = ~infinite & jnp.isfinite(difference) & (jnp.abs(difference) >= TINY)
    return lax.bitcast_convert_type(jnp.where(keep, difference, jnp.float32(0)), jnp.int32)


def add_rest(rounded: jax.Array, rest: jax.Array, unit: jax.Array) -> jax.Array:
    """Bits of rounded + rest * 2**unit, of which what is finite stays finite; `rounded` alone where that is not."""
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
