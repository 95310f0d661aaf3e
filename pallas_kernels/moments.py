"""Moments of an optimizer in 8 bits, rounded stochastically.

There is a code for each value, and a byte for each block of 128.

Two formats, for blocks along the last axis (the last block may be shorter):

* **m** has either sign: E4M3 with an E8M0 scale. The scale is the smallest power of two
  from 2**-87 to 2**29 by which 448 covers the block's largest |m|; 1 for a block of
  zeros, NaN if a value is not finite. An m beyond 2.4e11 saturates.
* **v** is never negative: "UE5M3", five bits of exponent and three of mantissa, without
  a code for zero. The bits of the float32 value are
  `(base << 23) + ((code + 1) << 20)`. The block's byte `base` is the biased exponent of
  the largest v less 31, at least 8, so the largest v rounds to code 255 at most, and
  code 0 is the floor, 32 binades below. A v below the floor is stored as the floor, so
  the root that divides an update never vanishes. Zeros are stored only if the whole
  block is zero (`base` 0). `base` 255 says that a v of the block was not finite, and
  all of it is NaN.

Both grids are evenly spaced within every binade. Adding random bits below the last kept
bit and truncating therefore rounds to one of the two neighbours with exactly the
probability that keeps the mean. 20 bits are added, from one hash a value: m takes its
20 lowest bits, and v the 20 highest bits of a multiple of it. Rounding to nearest would
freeze an average: with b2 = 0.999 every v moves by less than half a spacing a step.

The file has two layers: `encode_m`, `decode_m`, `encode_v`, `decode_v` for arrays, and
the integer formulas of one block, which the fused optimizer shares.
"""

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import numerics
from pallas_kernels.scaling import SCALE_DTYPE

BLOCK = 128
E4M3 = jnp.float8_e4m3fn
RANDOM_BITS = 20  # for each rounding
LOW_20 = (1 << 20) - 1  # the bits of a hash that round m
INFINITY = 0x7F800000  # its bits
NOT_FINITE = 255  # byte of a block with a NaN or inf

_MANTISSA_BITS = 23
_DROPPED = _MANTISSA_BITS - 3  # bits of a float32's mantissa that a code lacks
_NAN = 0x7FFFFFFF
_SMALLEST_NORMAL = 0x00800000
# Exponents of m's scales. A device multiplies by 2**-120 / scale, and 2**-149 is the
# smallest number of float32. Values that are subnormal on one backend and zero on
# another are then below the last random bit of the smallest one.
_SMALLEST_SCALE = -87
_LARGEST_SCALE = 29
# Smallest base of v: b2 * v is not subnormal for any b2 from 2**-7 on
_SMALLEST_BASE = 8
_SPAN = 31  # binades from the largest v to the floor
_GOLDEN = 0x9E3779B1  # an odd number near 2**32 over the golden ratio


# Arrays
# --------------------------------------------------------------------------------------


def encode_m(m: Array, bits: Array) -> tuple[Array, Array]:
    """Return (E4M3 codes `[..., n]`, E8M0 scales `[..., ceil(n / 128)]`) of float32 m.

    They are rounded stochastically by `bits`: `E[decode_m(*encode_m(m, bits))] = m` to
    2**-20 of the distance between neighbours. A block with a NaN or inf is NaN
    throughout. `bits` are uint32.

    >>> codes, scale = encode_m(jnp.array([1.0, -896.0, 0.0]), jnp.zeros(3, jnp.uint32))
    >>> decode_m(codes, scale).tolist(), scale.astype(jnp.float32).tolist()
    ([1.0, -896.0, 0.0], [2.0])
    """
    blocks = to_blocks(m.astype(jnp.float32))
    amax_bits = jnp.max(magnitude_bits(blocks), axis=-1, keepdims=True)
    scale, inverse = m_scale(amax_bits, amax_bits < INFINITY)
    random = (to_blocks(bits) & jnp.uint32(LOW_20)).astype(jnp.int32)
    codes = stochastic_e4m3(blocks * inverse, random)
    stored = lax.bitcast_convert_type(scale.astype(jnp.uint8), SCALE_DTYPE)
    return from_blocks(codes, m.shape[-1]), stored[..., 0]


def decode_m(codes: Array, scale: Array) -> Array:
    """Return the values of the codes, float32 `[..., n]`: code * scale, exactly."""
    spread = numerics.decode_e8m0(scale)[..., None]
    values = to_blocks(codes).astype(jnp.float32) * spread
    return from_blocks(values, codes.shape[-1])


def encode_v(v: Array, bits: Array) -> tuple[Array, Array]:
    """Return (uint8 codes `[..., n]`, bases `[..., ceil(n / 128)]`) of float32 v >= 0.

    They are rounded stochastically by `bits`: `E[decode_v(*encode_v(v, bits))] = v` to
    2**-20 of the distance between neighbours, for a v above its block's floor, 2**-32
    to 2**-30 of the largest; subnormal v count as zero. A block with a NaN or inf is
    NaN throughout.

    >>> v = jnp.array([1.0, 2.0**-40, 0.0])
    >>> codes, base = encode_v(v, jnp.zeros(3, jnp.uint32))
    >>> codes.tolist(), base.tolist(), decode_v(codes, base).tolist()
    ([247, 0, 0], [96], [1.0, 5.238689482212067e-10, 5.238689482212067e-10])
    """
    blocks = magnitude_bits(to_blocks(v.astype(jnp.float32)))
    amax_bits = jnp.max(blocks, axis=-1, keepdims=True)
    base = v_base(amax_bits, amax_bits < INFINITY)
    codes = v_code(blocks + v_bits(to_blocks(bits)), base)
    stored = base[..., 0].astype(jnp.uint8)
    return from_blocks(codes.astype(jnp.uint8), v.shape[-1]), stored


def decode_v(codes: Array, base: Array) -> Array:
    """Return the values of the codes, float32 `[..., n]`."""
    blocks = to_blocks(codes).astype(jnp.int32)
    values = v_value(blocks, base[..., None].astype(jnp.int32))
    return from_blocks(values, codes.shape[-1])


def to_blocks(x: Array) -> Array:
    """Return `[..., n]` as `[..., blocks, 128]`; zeros fill up the last block."""
    *leading, n = x.shape
    short = -n % BLOCK
    if short:
        sides = [(0, 0)] * len(leading)
        x = jnp.pad(x, [*sides, (0, short)])
    return x.reshape(*leading, -(-n // BLOCK), BLOCK)


def from_blocks(blocks: Array, n: int) -> Array:
    """Return the array `[..., n]` that `to_blocks` cut."""
    *leading, count, size = blocks.shape
    return blocks.reshape(*leading, count * size)[..., :n]


# One block, in integers
# --------------------------------------------------------------------------------------


def magnitude_bits(x: Array) -> Array:
    """Return the bits of |x| as int32, ordered like magnitudes.

    They are zero for subnormals. There is one NaN, the largest.
    """
    bits = numerics.bits(x) & _NAN
    bits = jnp.where(bits < _SMALLEST_NORMAL, 0, bits)
    # All NaN become the one that a GPU computes. A CPU computes another, which would
    # have another code.
    return jnp.where(bits > INFINITY, _NAN, bits)


def v_bits(bits: Array) -> Array:
    """Return 20 bits of a hash that round v.

    They are the highest bits of a product, each of which depends on all lower ones. 20
    bits are needed, although the hash has only 12 that m does not use: with b2 =
    0.999 a v falls by a hundredth of a spacing a step, and with 10 bits it would fall
    faster by 5 %.
    """
    return ((bits * jnp.uint32(_GOLDEN)) >> 12).astype(jnp.int32)


def m_scale(amax_bits: Array, finite: Array) -> tuple[Array, Array]:
    """Return (E8M0 code of the scale of a block, 1 / scale) from its largest |m|.

    The code is int32 and the inverse float32, and `amax_bits` are the bits of |m|. If
    the block is not finite, the code is 255 and the inverse NaN.
    """
    # 448 = 1.75 * 2**8: a mantissa above 0x600000 needs the next power of two.
    covering = amax_bits + (_SMALLEST_NORMAL - 1 - 0x600000)
    exponent = (covering >> _MANTISSA_BITS) - 8
    exponent = jnp.maximum(exponent, 127 + _SMALLEST_SCALE)
    exponent = jnp.minimum(exponent, 127 + _LARGEST_SCALE)
    exponent = jnp.where(amax_bits == 0, 127, exponent)
    inverse = jnp.where(finite, (254 - exponent) << _MANTISSA_BITS, _NAN)
    code = jnp.where(finite, exponent, NOT_FINITE)
    return code, numerics.from_bits(inverse)


def v_base(amax_bits: Array, finite: Array) -> Array:
    """Return the byte of a block, int32, from the bits of its largest v."""
    exponent = amax_bits >> _MANTISSA_BITS
    base = jnp.maximum(exponent - _SPAN, _SMALLEST_BASE)
    base = jnp.where(amax_bits == 0, 0, base)
    return jnp.where(finite, base, NOT_FINITE)


def v_code(rounded: Array, base: Array) -> Array:
    """Return the codes of values of v, int32.

    `rounded` are the sums of their bits and 20 random bits. A NaN's sum overflows or
    ends at code 6: with base 255 every code up to 6 is a NaN.
    """
    floor = (base << 3) + 1
    return jnp.maximum((rounded >> _DROPPED) - floor, 0)


def v_value(code: Array, base: Array) -> Array:
    """Return the float32 values of int32 codes; in a block of zeros all are zero."""
    smallest = (base << _MANTISSA_BITS) + (1 << _DROPPED)
    floor = jnp.where(base == 0, 0, smallest)
    return numerics.from_bits((code << _DROPPED) + floor)


def stochastic_e4m3(x: Array, random: Array) -> Array:
    """Return x in E4M3, rounded to one of its two neighbours by 20 random bits.

    It saturates. The result is `k * spacing` with the sign of x and `k = (round(|x| /
    spacing * 2**20) + random) >> 20`. Normal values are whole multiples before the
    rounding, so k is unbiased to the last of the 20 bits. A device computes the same
    bits by adding below the mantissa of x * 2**-120, whose subnormals have E4M3's
    spacing, and truncating. For a NaN that sum is minus zero unless the random bits are
    zero; a scale or a weight's other half records the NaN.
    """
    clipped = jnp.minimum(jnp.maximum(x, -448.0), 448.0)
    bits = numerics.bits(clipped)
    exponent = jnp.maximum((bits & INFINITY) >> _MANTISSA_BITS, 121) - 3
    spacing = numerics.from_bits(exponent << _MANTISSA_BITS)
    inverse = numerics.from_bits((254 - exponent) << _MANTISSA_BITS)
    # Two exact products, because 2**20 / spacing is beyond float32 for the smallest
    # spacing.
    units = jnp.abs(clipped) * inverse * 2.0**20
    whole = lax.round(units, lax.RoundingMethod.TO_NEAREST_EVEN).astype(jnp.int32)
    rounded = ((whole + random) >> RANDOM_BITS).astype(jnp.float32) * spacing
    sign = jnp.where(bits < 0, -1.0, 1.0)
    nan = jnp.where(random == 0, jnp.nan, -0.0)
    return jnp.where(jnp.isnan(x), nan, rounded * sign).astype(E4M3)
