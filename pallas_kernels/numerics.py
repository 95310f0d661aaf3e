"""The arithmetic of 8-bit floats: casts that saturate, scales that are powers of two, rounding by hand.

Everything here is elementwise `jax.numpy` on float32, so it means the same inside a kernel body, outside one, and on
every backend. Three decisions carry the file:

* **Powers of two are built from integer bits.** `exp2` and `log2` are approximations (XLA:CPU's `exp2` misses most
  integer exponents by an ulp), and a scale that is off by one ulp makes `x / scale` inexact.
* **Rounding is arithmetic, casting is storage.** `round_to` yields the float32 *value* that a format would hold.
  XLA on the GPU deletes a cast to float8 and back (it calls the pair redundant), which turns a residual
  `x - float32(float8(x))` into zeros. A residual computed from `round_to` has no such pair to delete, and where XLA
  deletes the pair `float32(float8(round_to(x)))` the value does not change. `residual` below is the one place
  where a residual is formed.
* **Subnormal float32 is zero.** XLA:CPU flushes it and XLA:GPU keeps it; treating it as zero everywhere keeps
  quantization bit-identical. Scales therefore stay in the normal range, 2**-126 to 2**127.

Source of the formats: Micikevicius et al. 2022 (E4M3, E5M2); OCP Microscaling Formats 1.0, 2023 (E8M0).
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

FLOAT8_DTYPES = (jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2))

_MANTISSA_BITS = 23
_MANTISSA_MASK = (1 << _MANTISSA_BITS) - 1
_BIAS = 127
_SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)
_SMALLEST_EXPONENT, _LARGEST_EXPONENT = -126, 127
# A floor under amax, so that a zero tensor has a finite multiplier. It is a float64, which lies between the float32 of
# the same digits and that one's neighbour.
FLOAT32_SCALE_FLOOR = 1e-12


def float8_dtype(dtype: DTypeLike) -> jnp.dtype:
    """`dtype` as a NumPy dtype, if it is E4M3 or E5M2; otherwise a TypeError that names the two.

    >>> float8_dtype("float8_e5m2")
    dtype(float8_e5m2)
    """
    resolved = jnp.dtype(dtype)
    if resolved not in FLOAT8_DTYPES:
        raise TypeError(f"dtype={resolved} is not an FP8 format; use float8_e4m3fn or float8_e5m2")
    return resolved


def largest(dtype: DTypeLike) -> float:
    """The largest finite value of a format: 448 for E4M3, 57344 for E5M2.

    >>> largest("float8_e4m3fn"), largest("float8_e5m2")
    (448.0, 57344.0)
    """
    return float(jnp.finfo(_rounded_dtype(dtype)).max)


def _rounded_dtype(dtype: DTypeLike) -> jnp.dtype:
    """`dtype`, if values are rounded to it: also E3M4, which no product reads, for errors, which need no range."""
    resolved = jnp.dtype(dtype)
    return resolved if resolved == jnp.float8_e3m4 else float8_dtype(resolved)


def largest_rounding_error(dtype: DTypeLike, *, halves: int = 1) -> float:
    """The largest error that rounding makes of a value within a format's range: half its widest spacing.

    With `halves=2` a second tensor of the same format and scale has rounded that error, and this is the largest error
    that remains. A larger one shows that a value lay beyond the range and was clipped.

    >>> largest_rounding_error("float8_e4m3fn"), largest_rounding_error("float8_e4m3fn", halves=2)
    (16.0, 0.5)
    """
    mantissa_bits = int(jnp.finfo(float8_dtype(dtype)).nmant)
    _, exponent = np.frexp(largest(dtype))
    first = int(exponent) - 1 - mantissa_bits - 1
    # A residual of 2**first tops the binade below it, whose neighbours are 2**(first - 1 - mantissa_bits) apart.
    return float(2.0 ** (first - (halves - 1) * (mantissa_bits + 2)))


def scale_and_inverse(
    amax: jax.Array, dtype: DTypeLike, scale: str, *, division: Callable[..., jax.Array] | None = None
) -> tuple[jax.Array, jax.Array]:
    """(scale, the multiplier that replaces a division by it) for magnitudes up to `amax`; NaN where it is not finite.

    "pow2": `pow2_scale` and its exact reciprocal. "float32": the multiplier is `largest / max(amax, 1e-12)` and the
    scale its float32 reciprocal, as nanochat and torchao have it. Kernels may give another `division` that
    rounds correctly.

    >>> [float(v) for v in scale_and_inverse(jnp.float32(896.0), "float8_e4m3fn", "pow2")]
    [2.0, 0.5]
    """
    if scale == "pow2":
        power = pow2_scale(amax, dtype)
        return power, reciprocal_pow2(power)
    correctly_rounded = division or divide
    finite = jnp.isfinite(amax)
    floor = np.float32(FLOAT32_SCALE_FLOOR)
    multiplier = correctly_rounded(largest(dtype), jnp.maximum(amax, floor))
    multiplier = jnp.where(amax <= floor, np.float32(largest(dtype) / FLOAT32_SCALE_FLOOR), multiplier)
    reciprocal = correctly_rounded(1.0, multiplier)
    nan = jnp.float32(jnp.nan)
    return jnp.where(finite, reciprocal, nan), jnp.where(finite, multiplier, nan)


def e8m0_scale_and_inverse(amax: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """(the "pow2" scale as E8M0, its float32 inverse); see `scale_and_inverse`.

    >>> scale, inverse = e8m0_scale_and_inverse(jnp.float32(896.0), "float8_e4m3fn")
    >>> float(decode_e8m0(scale)), float(inverse)
    (2.0, 0.5)
    """
    scale, inverse = scale_and_inverse(amax, dtype, "pow2")
    return encode_e8m0(scale), inverse


def flush_subnormal(x: jax.Array) -> jax.Array:
    """float32 `x` with its subnormals set to zero of their sign (NaN stays NaN)."""
    # Not times 0: where a step holds an array of zeros of this shape, as its backward pass does for gradients that it
    # stacks, XLA takes them for the factor and keeps them until then. This factor underflows to zeros of the same sign.
    return jnp.where(jnp.abs(x) < _SMALLEST_NORMAL, x * _SMALLEST_NORMAL, x)


def scaled_cast(x: jax.Array, multiplier: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return `saturating_cast(flush_subnormal(x) * multiplier, dtype)`, the rounding of every quantizer."""
    return saturating_cast(flush_subnormal(x) * multiplier, dtype)


def scaled_for_rounding(x: jax.Array, inverse: jax.Array, dtype: DTypeLike) -> jax.Array:
    """`flush_subnormal(x) * inverse` as far as its nearest value in `dtype` can tell, for a scalar `inverse`.

    For kernels: unless `inverse` is huge, what is subnormal rounds to zero anyway, so one comparison for a whole tile
    saves two operations a value (2.9 TB/s become 3.6 on an H200). Not for stochastic rounding or errors, which see
    more of a value than what it rounds to.
    """
    info = jnp.finfo(float8_dtype(dtype))
    # Half of the format's smallest subnormal, over float32's smallest normal.
    harmless = 2.0 ** (int(info.minexp) - int(info.nmant) - 1 - _SMALLEST_EXPONENT)
    return lax.cond(inverse <= harmless, lambda: x * inverse, lambda: flush_subnormal(x) * inverse)


def amax(x: jax.Array, axis: int | tuple[int, ...] | None = None) -> jax.Array:
    """Max |x| over `axis` (None: all) in float32; 0 where there is nothing, NaN or inf where `x` holds one.

    Kernels call `amax_by_bits`.

    XLA:CPU's vectorized maximum of float32 values skips NaN (jaxlib 0.10 to 0.12), so there the bit patterns are
    compared, whose order is that of magnitudes and in which NaN is above inf.

    >>> float(amax(jnp.array([1.0, -3.0]))), float(amax(jnp.ones((64, 64)).at[3, 3].set(jnp.nan)))
    (3.0, nan)
    """

    def by_value(x: jax.Array) -> jax.Array:
        return jnp.max(jnp.abs(x), axis=axis, initial=0)

    by_bits = functools.partial(amax_by_bits, axis=axis)
    return lax.platform_dependent(x, cpu=by_bits, default=by_value).astype(jnp.float32)


def amax_by_bits(x: jax.Array, axis: int | tuple[int, ...] | None = None, *, keepdims: bool = False) -> jax.Array:
    """Max |x| over `axis`, in the dtype of x, found among bit patterns: NaN is the largest, also in an interpreter.

    >>> float(amax_by_bits(jnp.array([1.0, -jnp.inf, jnp.nan])))
    nan
    """
    bits = lax.bitcast_convert_type(jnp.abs(x), jnp.dtype(f"int{8 * x.dtype.itemsize}"))
    return lax.bitcast_convert_type(jnp.max(bits, axis=axis, initial=0, keepdims=keepdims), x.dtype)


def power_of_two(exponent: ArrayLike) -> jax.Array:
    """2**exponent in float32, exact, for integer exponents in [-126, 127].

    >>> float(power_of_two(-3))
    0.125
    """
    bits = (jnp.asarray(exponent, jnp.int32) + _BIAS) << _MANTISSA_BITS
    return lax.bitcast_convert_type(bits, jnp.float32)


def _exponent(x: jax.Array) -> jax.Array:
    """floor(log2 |x|) of normal float32 values, from the bits; -127 for zero and subnormals."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return ((bits >> _MANTISSA_BITS) & 0xFF) - _BIAS


def pow2_cover(amax: ArrayLike, limit: float) -> jax.Array:
    """The smallest power of two `s` with `amax / s <= limit`, for a positive `limit`.

    float32, the shape of `amax`. The exponent is clamped to [-126, 127], E8M0's range less its one subnormal.
    `amax = 0` gives 1; a NaN or infinite `amax` gives NaN, so that what is scaled by it is NaN too.

    >>> [float(pow2_cover(jnp.float32(a), 7.0)) for a in (7.0, 7.1, 0.0)]
    [1.0, 2.0, 1.0]
    """
    values = jnp.asarray(amax, jnp.float32)
    mantissa, exponent = np.frexp(np.float32(limit))  # 448 = 0.875 * 2**9 = 1.75 * 2**8
    limit_bits = int(np.float32(2 * mantissa).view(np.int32)) & _MANTISSA_MASK
    bits = lax.bitcast_convert_type(values, jnp.int32)
    carry = ((bits & _MANTISSA_MASK) > limit_bits).astype(jnp.int32)
    wanted = _exponent(values) - (int(exponent) - 1) + carry
    scale = power_of_two(jnp.clip(wanted, _SMALLEST_EXPONENT, _LARGEST_EXPONENT))
    scale = jnp.where(values < _SMALLEST_NORMAL, jnp.ones_like(scale), scale)
    return jnp.where(jnp.isfinite(values), scale, jnp.full_like(scale, jnp.nan))


def pow2_scale(amax: ArrayLike, dtype: DTypeLike) -> jax.Array:
    """The smallest power of two `s` with `amax / s <= largest(dtype)`; see `pow2_cover`.

    >>> [float(pow2_scale(jnp.float32(a), "float8_e4m3fn")) for a in (448.0, 449.0, 0.0)]
    [1.0, 2.0, 1.0]
    """
    return pow2_cover(amax, largest(dtype))


def reciprocal_pow2(scale: jax.Array) -> jax.Array:
    """1 / scale for powers of two in [2**-126, 2**126], exact, by integer subtraction; NaN stays NaN.

    A float division would do, but its result for 2**127 is subnormal and flushed; such scales are not produced
    by `pow2_scale` for any finite float32 `amax`.

    >>> float(reciprocal_pow2(jnp.float32(8.0)))
    0.125
    """
    inverse = power_of_two(-_exponent(scale))
    return jnp.where(jnp.isnan(scale), scale, inverse)


def divide(a: ArrayLike, b: ArrayLike) -> jax.Array:
    """A / b, correctly rounded, for positive normal float32 scalars whose quotient is normal; by integer long division.

    XLA's float32 division on a GPU is up to 2 ulp off, and XLA rewrites 1 / (a / b) to b / a: a scale that is
    defined by a division would differ between backends. Meant for scales, not for tensors: about a hundred operations.

    >>> float(divide(1.0, 3.0)) == float(np.float32(1) / np.float32(3))
    True
    """
    hidden = 1 << _MANTISSA_BITS
    bits_a, bits_b = (lax.bitcast_convert_type(jnp.asarray(v, jnp.float32), jnp.int32) for v in (a, b))
    numerator, denominator = ((bits & _MANTISSA_MASK) | hidden for bits in (bits_a, bits_b))
    smaller = (numerator < denominator).astype(jnp.int32)
    exponent = (bits_a >> _MANTISSA_BITS) - (bits_b >> _MANTISSA_BITS) - smaller
    remainder = (numerator << smaller) - denominator
    quotient = jnp.ones_like(remainder)
    for _ in range(_MANTISSA_BITS):
        remainder = remainder << 1
        bit = (remainder >= denominator).astype(jnp.int32)
        quotient = (quotient << 1) | bit
        remainder = remainder - bit * denominator
    # A quotient of two floats is never halfway between two floats, so there is no tie to break.
    quotient = quotient + (2 * remainder > denominator).astype(jnp.int32)
    # Adding, not or-ing, lets a mantissa that rounds up to 2 carry into the exponent.
    return lax.bitcast_convert_type(((exponent + _BIAS) << _MANTISSA_BITS) + (quotient - hidden), jnp.float32)


def clip_finite(x: jax.Array, limit: float) -> jax.Array:
    """Finite values clipped to [-limit, limit]; NaN and inf become NaN, so that an overflow upstream stays visible."""
    clipped = jnp.minimum(jnp.maximum(x, -limit), limit)
    return jnp.where(jnp.isfinite(x), clipped, jnp.full_like(x, jnp.nan))


def saturating_cast(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """`x` in an FP8 format, round to nearest even; finite values beyond the range become the largest one.

    `astype(float8_e4m3fn)` alone gives NaN above 464, so every cast of the project goes through here.
    NaN and inf give NaN. `x` is float32 (wider and narrower floats are converted first).

    >>> [float(v) for v in saturating_cast(jnp.array([1.06, 1e9, -500.0]), "float8_e4m3fn")]
    [1.0, 448.0, -448.0]
    """
    return clip_finite(x.astype(jnp.float32), largest(dtype)).astype(float8_dtype(dtype))


def _grid(x: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """The distance between `dtype`'s neighbours around each value of `x`, and its inverse; both powers of two."""
    info = jnp.finfo(_rounded_dtype(dtype))
    # At most 126, that of a NaN less two bits of mantissa, so both powers exist.
    exponent = jnp.maximum(_exponent(x), int(info.minexp)) - int(info.nmant)
    return power_of_two(exponent), power_of_two(-exponent)


def spacing(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """The distance between `dtype`'s neighbours around each float32 value of `x`, a power of two.

    >>> spacing(jnp.array([0.0, 1.0, -448.0]), "float8_e4m3fn").tolist()
    [0.001953125, 0.125, 32.0]
    """
    return _grid(x, dtype)[0]


def round_to(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """The float32 values that `dtype` holds nearest to `x` (ties to even, saturating, NaN and inf to NaN).

    Equal to `saturating_cast(x, dtype).astype(float32)` bit for bit, but without the cast and back that XLA deletes.

    >>> [float(v) for v in round_to(jnp.array([1.06, 1.07, 1e9]), "float8_e4m3fn")]
    [1.0, 1.125, 448.0]
    """
    clipped = clip_finite(x, largest(dtype))
    spacing, inverse = _grid(clipped, dtype)
    return lax.round(clipped * inverse, lax.RoundingMethod.TO_NEAREST_EVEN) * spacing


def stochastic_round_to(x: jax.Array, dtype: DTypeLike, bits: jax.Array) -> jax.Array:
    """One of the two values of `dtype` around `x`, the upper one with probability (x - lower) / (upper - lower).

    `bits` are independent uniform uint32, one a value; the 24 highest are used, so E[result] = x to 2**-24 of the
    distance between the neighbours. Values that `dtype` holds come back unchanged; beyond the range it saturates.
    float32 in, float32 out.

    >>> halfway = jnp.float32(1.0625)
    >>> [float(stochastic_round_to(halfway, "float8_e4m3fn", jnp.uint32(b))) for b in (0, 2**32 - 1)]
    [1.125, 1.0]
    """
    clipped = clip_finite(x, largest(dtype))
    spacing, inverse = _grid(clipped, dtype)
    units = clipped * inverse
    lower = jnp.floor(units)
    # 24 bits are what float32 holds exactly: the comparison below has no rounding in it.
    uniform = (bits >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)
    upper = (uniform < units - lower).astype(jnp.float32)
    return (lower + upper) * spacing


def residual(scaled: jax.Array, rounded: jax.Array) -> jax.Array:
    """Scaled - rounded, exact in float32, for `rounded` from `round_to` or `stochastic_round_to`.

    The one place where the project forms a residual or an error. `rounded` must be a rounded *value*, never a float8
    array cast back: XLA on the GPU would replace that by `scaled` and return zeros.
    """
    return scaled - rounded


def encode_e8m0(scale: jax.Array) -> jax.Array:
    """Powers of two as E8M0 codes (`float8_e8m0fnu`, 1 byte): code = exponent + 127, NaN = 255.

    >>> encode_e8m0(jnp.float32(0.5)).dtype, float(decode_e8m0(encode_e8m0(jnp.float32(0.5))))
    (dtype(float8_e8m0fnu), 0.5)
    """
    return lax.bitcast_convert_type(e8m0_code(scale), jnp.float8_e8m0fnu)


def e8m0_code(scale: jax.Array) -> jax.Array:
    """The E8M0 codes of powers of two as uint8, for kernels, which have no such float.

    >>> int(e8m0_code(jnp.float32(0.5)))
    126
    """
    return jnp.where(jnp.isnan(scale), 255, _exponent(scale) + _BIAS).astype(jnp.uint8)


def decode_e8m0(code: jax.Array) -> jax.Array:
    """E8M0 codes as float32: 2**(code - 127), and NaN for 255.

    Code 0 is 2**-127, a float32 subnormal that arithmetic flushes to zero. The project writes code 0 only as the
    scale of a block that is exactly zero, where any scale gives the same result.
    """
    raw = lax.bitcast_convert_type(code, jnp.uint8).astype(jnp.int32)
    bits = jnp.where(raw == 0, 1 << (_MANTISSA_BITS - 1), raw << _MANTISSA_BITS)
    bits = jnp.where(raw == 255, 0x7FC00000, bits)
    return lax.bitcast_convert_type(bits, jnp.float32)
