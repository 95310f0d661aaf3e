"""Values as codes, codes as bytes, and back.

Codes are uint32 with the layout of ml_dtypes: sign, exponent and mantissa from the top,
and integers in two's complement. Bytes hold codes without gaps, the first code in the
lowest bits: a byte holds two 4-bit codes, and three bytes hold four 6-bit codes. Only
the last byte of an array is filled up, with zeros.
"""

import jax.numpy as jnp
from jax import Array, lax

from tcfp_jax.formats import float_bits
from tcfp_jax.formats.float_bits import (
    HIDDEN,
    INFINITY,
    MANTISSA_BITS,
    NAN,
    from_bits,
    magnitude_of,
    to_bits,
)
from tcfp_jax.formats.numbers import NumberSpec
from tcfp_jax.formats.scale_rules import finite_magnitude


def encode(value: Array, number: NumberSpec) -> Array:
    """Return the uint32 codes of float32 values that a number holds.

    NaN becomes 0 if it has no code. The lowest code of a signed integer, which no value
    has, stands for NaN.
    """
    bits = to_bits(value)
    magnitude = magnitude_of(bits)
    nan = magnitude > INFINITY
    ones = (1 << number.bits) - 1
    if number.is_integer:
        lost = 1 << (number.bits - 1) if number.kind == "int" else 0
        whole = jnp.where(nan, 0, value).astype(jnp.int32)
        return jnp.where(nan, lost, whole & ones).astype(jnp.uint32)
    if number.kind == "exponent":
        exponent, _ = float_bits.normalize(magnitude)
        return jnp.where(nan, ones, exponent + number.bias).astype(jnp.uint32)
    if number.is_wide:
        code = magnitude >> (MANTISSA_BITS - number.mbits)
    else:
        code = _float_code(finite_magnitude(magnitude), number)
    inf_code, nan_code = _special_codes(number)
    code = jnp.where(magnitude == INFINITY, inf_code, code).astype(jnp.uint32)
    code = code | ((bits < 0).astype(jnp.uint32) << (number.bits - 1))
    return jnp.where(nan, jnp.uint32(nan_code), code)


def _float_code(magnitude: Array, number: NumberSpec) -> Array:
    """Return the int32 codes of finite magnitudes of a float narrower than float32."""
    shift = number.unit_shift
    emin = number.emin - shift
    units = float_bits.scale_down(magnitude, jnp.int32(shift))
    exponent = (to_bits(units) >> MANTISSA_BITS) - 127
    step = number.mbits - jnp.maximum(exponent, emin)
    steps = (units * float_bits.power_of_two(step)).astype(jnp.int32)
    return steps + (jnp.maximum(exponent - emin, 0) << number.mbits)


def decode(code: Array, number: NumberSpec) -> Array:
    """Return the float32 values of uint32 codes."""
    if number.kind == "uint":
        return code.astype(jnp.float32)
    if number.kind == "int":
        whole = signed_integers(code, number.bits)
        lost = whole == -(1 << (number.bits - 1))
        return jnp.where(lost, jnp.nan, whole.astype(jnp.float32))
    if number.kind == "exponent":
        exponent = code.astype(jnp.int32) - number.bias
        power = (exponent + 127) << MANTISSA_BITS
        power = jnp.where(exponent < -126, HIDDEN >> 1, power)
        return from_bits(jnp.where(code == (1 << number.bits) - 1, NAN, power))
    magnitude = (code & ((1 << (number.bits - 1)) - 1)).astype(jnp.int32)
    if number.is_wide:
        bits = magnitude << (MANTISSA_BITS - number.mbits)
    else:
        bits = _bits_of_float(magnitude, number)
    inf_code, nan_code = _special_codes(number)
    if number.has_inf:
        bits = jnp.where(magnitude == inf_code, INFINITY, bits)
    if number.infnan == "ieee":
        nan = magnitude > inf_code
    elif number.infnan == "fn":
        nan = magnitude == nan_code
    elif number.infnan == "f":
        nan = jnp.zeros_like(magnitude, bool)
    else:
        nan = code == nan_code
    sign = (code >> (number.bits - 1)) << 31
    bits = bits | lax.bitcast_convert_type(sign, jnp.int32)
    return from_bits(jnp.where(nan, NAN, bits))


def signed_integers(code: Array, bits: int) -> Array:
    """Return the int32 values of uint32 codes in two's complement of `bits` bits."""
    unused = 32 - bits
    return lax.bitcast_convert_type(code << unused, jnp.int32) >> unused


def _bits_of_float(code: Array, number: NumberSpec) -> Array:
    """Return the float32 bits of finite int32 codes without their sign."""
    shift = number.unit_shift
    field = code >> number.mbits
    mantissa = code & ((1 << number.mbits) - 1)
    steps = mantissa + ((field > 0).astype(jnp.int32) << number.mbits)
    exponent = jnp.maximum(field, 1) - 1 + number.emin - shift - number.mbits
    units = steps.astype(jnp.float32) * float_bits.power_of_two(exponent)
    return float_bits.scale_up(units, jnp.int32(shift))


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


def to_bytes(codes: Array, bits: int) -> Array:
    """Return the codes of any shape as uint8, without gaps."""
    pieces = codes.reshape(-1).astype(jnp.uint32)
    if bits in _WHOLE:
        whole = pieces.astype(_WHOLE[bits])
        return lax.bitcast_convert_type(whole, jnp.uint8).reshape(-1)
    width = _piece(bits)
    if width < bits:
        single = (pieces[:, None] >> _places(bits, 1)) & 1
        pieces = single.reshape(-1)
    places = _places(8, width)
    pieces = jnp.pad(pieces, (0, -pieces.size % places.size))
    return _joined(pieces.reshape(-1, places.size), places).astype(jnp.uint8)


def from_bytes(data: Array, bits: int, count: int) -> Array:
    """Return the uint32 codes that `to_bytes` wrote, `[count]`."""
    if bits in _WHOLE:
        # A cast to another width adds an axis, a cast to the same one does not
        groups = data if bits == 8 else data.reshape(count, bits // 8)
        return lax.bitcast_convert_type(groups, _WHOLE[bits]).astype(jnp.uint32)
    width = _piece(bits)
    moved = data[:, None].astype(jnp.uint32) >> _places(8, width)
    pieces = moved & jnp.uint32((1 << width) - 1)
    pieces = pieces.reshape(-1)[: count * bits // width]
    if width == bits:
        return pieces
    return _joined(pieces.reshape(count, bits), _places(bits, 1))


def _places(bits: int, width: int) -> Array:
    """Return the places of pieces of a width in a row of bits, `[1, pieces]`."""
    return jnp.arange(0, bits, width, dtype=jnp.uint32)[None]


def _joined(pieces: Array, places: Array) -> Array:
    """Return the sum of pieces on the last axis, each moved to its place."""
    return jnp.sum(pieces << places, axis=-1, dtype=jnp.uint32)


_WHOLE = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}


def _piece(bits: int) -> int:
    """Return the bits that enter a byte at once.

    That is a whole code, or one bit if codes straddle bytes.
    """
    return bits if 8 % bits == 0 else 1
