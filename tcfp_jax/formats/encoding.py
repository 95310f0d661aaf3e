"""Values as codes, codes as bytes, and back.

Codes are uint32 with the layout of ml_dtypes: sign, exponent and mantissa from the top,
and integers in two's complement. Bytes hold codes without gaps, the first code in the
lowest bits: a byte holds two 4-bit codes, and three bytes hold four 6-bit codes. Only
the last byte of an array is filled up, with zeros.
"""

import jax
import jax.numpy as jnp
from jax import lax

from tcfp_jax.formats import float_bits
from tcfp_jax.formats.float_bits import HIDDEN, INFINITY, MANTISSA_BITS, NAN, SIGN
from tcfp_jax.formats.numbers import NumberSpec


def encode(value: jax.Array, number: NumberSpec) -> jax.Array:
    """Return the uint32 codes of float32 values that a number holds; NaN becomes 0 if
    it has no code.

    The lowest code of a signed integer, which no value has, stands for NaN.
    """
    bits = lax.bitcast_convert_type(value, jnp.int32)
    magnitude = bits & ~jnp.int32(SIGN)
    nan = magnitude > INFINITY
    if number.is_integer:
        lost = 1 << (number.bits - 1) if number.kind == "int" else 0
        whole = jnp.where(nan, jnp.float32(0), value).astype(jnp.int32) & (
            (1 << number.bits) - 1
        )
        return jnp.where(nan, lost, whole).astype(jnp.uint32)
    if number.kind == "exponent":
        exponent, _ = float_bits.normalize(magnitude)
        return jnp.where(nan, (1 << number.bits) - 1, exponent + number.bias).astype(
            jnp.uint32
        )
    if number.is_wide:
        code = magnitude >> (MANTISSA_BITS - number.mbits)
    else:
        shift = number.unit_shift
        units = float_bits.scale_down(
            jnp.where(magnitude < INFINITY, magnitude, 0), jnp.int32(shift)
        )
        exponent = (lax.bitcast_convert_type(units, jnp.int32) >> MANTISSA_BITS) - 127
        emin = number.emin - shift
        steps = units * float_bits.power_of_two(
            number.mbits - jnp.maximum(exponent, emin)
        )
        code = steps.astype(jnp.int32) + (
            jnp.maximum(exponent - emin, 0) << number.mbits
        )
    inf_code, nan_code = _special_codes(number)
    code = jnp.where(magnitude == INFINITY, inf_code, code).astype(jnp.uint32)
    code = code | ((bits < 0).astype(jnp.uint32) << (number.bits - 1))
    return jnp.where(nan, jnp.uint32(nan_code), code)


def decode(code: jax.Array, number: NumberSpec) -> jax.Array:
    """Return the float32 values of uint32 codes."""
    if number.kind == "uint":
        return code.astype(jnp.float32)
    if number.kind == "int":
        unused = 32 - number.bits
        whole = lax.bitcast_convert_type(code << unused, jnp.int32) >> unused
        lowest = jnp.int32(-(1 << (number.bits - 1)))
        return jnp.where(
            whole == lowest, jnp.float32(jnp.nan), whole.astype(jnp.float32)
        )
    if number.kind == "exponent":
        exponent = code.astype(jnp.int32) - number.bias
        bits = jnp.where(
            exponent < -126, HIDDEN >> 1, (exponent + 127) << MANTISSA_BITS
        )
        bits = jnp.where(code == (1 << number.bits) - 1, NAN, bits)
        return lax.bitcast_convert_type(bits, jnp.float32)
    magnitude = (code & ((1 << (number.bits - 1)) - 1)).astype(jnp.int32)
    if number.is_wide:
        bits = magnitude << (MANTISSA_BITS - number.mbits)
    else:
        shift = number.unit_shift
        field, mantissa = (
            magnitude >> number.mbits,
            magnitude & ((1 << number.mbits) - 1),
        )
        steps = mantissa + ((field > 0).astype(jnp.int32) << number.mbits)
        step = float_bits.power_of_two(
            jnp.maximum(field, 1) - 1 + number.emin - shift - number.mbits
        )
        bits = float_bits.scale_up(steps.astype(jnp.float32) * step, jnp.int32(shift))
    inf_code, nan_code = _special_codes(number)
    if number.has_inf:
        bits = jnp.where(magnitude == inf_code, INFINITY, bits)
    nan = jnp.zeros_like(magnitude, bool)
    if number.infnan == "ieee":
        nan = magnitude > inf_code
    elif number.infnan == "fn":
        nan = magnitude == nan_code
    elif number.infnan in ("fnuz", "inuz"):
        nan = code == nan_code
    sign = lax.bitcast_convert_type((code >> (number.bits - 1)) << 31, jnp.int32)
    return lax.bitcast_convert_type(jnp.where(nan, NAN, bits | sign), jnp.float32)


def _special_codes(number: NumberSpec) -> tuple[int, int]:
    """Return (the code of inf, the code of NaN); 0 if there is none."""
    ones = (1 << (number.bits - 1)) - 1
    if number.infnan == "ieee":
        infinity = ((1 << number.ebits) - 1) << number.mbits
        return infinity, infinity | (1 << (number.mbits - 1))
    if number.infnan == "fn":
        return 0, ones
    if number.infnan == "f":
        return 0, 0
    return (ones if number.has_inf else 0), ones + 1


def to_bytes(codes: jax.Array, bits: int) -> jax.Array:
    """Return the codes of any shape as uint8, without gaps."""
    pieces = codes.reshape(-1).astype(jnp.uint32)
    if bits in _WHOLE:
        return lax.bitcast_convert_type(pieces.astype(_WHOLE[bits]), jnp.uint8).reshape(
            -1
        )
    width = _piece(bits)
    if width < bits:
        pieces = ((pieces[:, None] >> jnp.arange(bits, dtype=jnp.uint32)) & 1).reshape(
            -1
        )
    places = jnp.arange(0, 8, width, dtype=jnp.uint32)
    pieces = jnp.pad(pieces, (0, -pieces.size % places.size)).reshape(-1, places.size)
    return jnp.sum(pieces << places, axis=-1, dtype=jnp.uint32).astype(jnp.uint8)


def from_bytes(data: jax.Array, bits: int, count: int) -> jax.Array:
    """Return the uint32 codes that `to_bytes` wrote, `[count]`."""
    if bits in _WHOLE:
        whole = (
            data
            if bits == 8
            else lax.bitcast_convert_type(data.reshape(count, bits // 8), _WHOLE[bits])
        )
        return whole.astype(jnp.uint32)
    width = _piece(bits)
    places = jnp.arange(0, 8, width, dtype=jnp.uint32)
    pieces = (data[:, None].astype(jnp.uint32) >> places) & jnp.uint32((1 << width) - 1)
    pieces = pieces.reshape(-1)[: count * bits // width]
    if width == bits:
        return pieces
    return jnp.sum(
        pieces.reshape(count, bits) << jnp.arange(bits, dtype=jnp.uint32),
        axis=-1,
        dtype=jnp.uint32,
    )


_WHOLE = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}


def _piece(bits: int) -> int:
    """Return the bits that enter a byte at once: a whole code, or one bit if codes
    straddle bytes.
    """
    return bits if 8 % bits == 0 else 1
