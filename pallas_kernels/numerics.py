"""The arithmetic of 8-bit floats: saturating casts, scales, and rounding by hand.

Everything here is elementwise `jax.numpy` on float32, so it means the same inside a
kernel body, outside one, and on every backend. Three decisions carry the file:

* **Powers of two are built from integer bits.** `exp2` and `log2` are approximations
  (XLA:CPU's `exp2` misses most integer exponents by an ulp), and a scale that is off by
  one ulp makes `x / scale` inexact.
* **Rounding is arithmetic, casting is storage.** `round_to` returns the float32 *value*
  that a format would hold. XLA on the GPU deletes a cast to float8 and back (it calls
  the pair redundant), which turns a residual `x - float32(float8(x))` into zeros. A
  residual computed from `round_to` has no such pair, and the value of
  `float32(float8(round_to(x)))` does not change if XLA deletes the pair. Residuals are
  formed only in `residual`.
* **Subnormal float32 is zero.** XLA:CPU flushes it and XLA:GPU keeps it. Treating it as
  zero everywhere keeps quantization bit-identical. Scales therefore stay in the normal
  range, 2**-126 to 2**127.

Source of the formats: Micikevicius et al. 2022 (E4M3, E5M2); OCP Microscaling Formats
1.0, 2023 (E8M0).
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike

FLOAT8_DTYPES = (jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2))

_MANTISSA_BITS = 23
_MANTISSA_MASK = (1 << _MANTISSA_BITS) - 1
_BIAS = 127
_SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)
_SMALLEST_EXPONENT = -126
_LARGEST_EXPONENT = 127
# A floor under amax, so that a zero tensor has a finite multiplier. This float64 lies
# between two float32 neighbours.
FLOAT32_SCALE_FLOOR = 1e-12


def float8_dtype(dtype: DTypeLike) -> jnp.dtype:
    """Return `dtype` as a NumPy dtype, or raise a TypeError unless it is FP8.

    >>> float8_dtype("float8_e5m2")
    dtype(float8_e5m2)
    """
    resolved = jnp.dtype(dtype)
    if resolved not in FLOAT8_DTYPES:
        raise TypeError(
            f"dtype={resolved} is not an FP8 format; use float8_e4m3fn or float8_e5m2"
        )
    return resolved


def largest(dtype: DTypeLike) -> float:
    """Return the largest finite value of a format: 448 for E4M3, 57344 for E5M2.

    >>> largest("float8_e4m3fn"), largest("float8_e5m2")
    (448.0, 57344.0)
    """
    return float(jnp.finfo(_rounded_dtype(dtype)).max)


def _rounded_dtype(dtype: DTypeLike) -> jnp.dtype:
    """Return a dtype to which values are rounded.

    It may be E3M4 as well, for errors, which need no range and no product.
    """
    resolved = jnp.dtype(dtype)
    return resolved if resolved == jnp.float8_e3m4 else float8_dtype(resolved)


def largest_rounding_error(dtype: DTypeLike, *, halves: int = 1) -> float:
    """Return the largest rounding error of a value within a format's range.

    It is half of the widest spacing. With `halves=2` a second tensor of the same format
    and scale has rounded that error, and this is the largest error that remains. A
    larger error shows that a value lay beyond the range and was clipped.

    >>> [largest_rounding_error("float8_e4m3fn", halves=halves) for halves in (1, 2)]
    [16.0, 0.5]
    """
    mantissa_bits = int(jnp.finfo(float8_dtype(dtype)).nmant)
    _, exponent = np.frexp(largest(dtype))
    first = int(exponent) - mantissa_bits - 2
    # A residual of 2**first tops the binade below it, whose neighbours are 2**(first -
    # 1 - mantissa_bits) apart.
    return float(2.0 ** (first - (halves - 1) * (mantissa_bits + 2)))


def scale_and_inverse(
    amax: Array,
    dtype: DTypeLike,
    scale: str,
    *,
    division: Callable[..., Array] | None = None,
) -> tuple[Array, Array]:
    """Return (scale, its inverse as a multiplier) for magnitudes up to `amax`.

    Both are NaN if it is not finite. "pow2" is `pow2_cover` and its exact reciprocal.
    With "float32" the multiplier is `largest / max(amax, 1e-12)` and the scale its
    float32 reciprocal, as in nanochat and torchao. Kernels may give another correctly
    rounded `division`.

    >>> both = scale_and_inverse(jnp.float32(896.0), "float8_e4m3fn", "pow2")
    >>> [float(v) for v in both]
    [2.0, 0.5]
    """
    if scale == "pow2":
        power = pow2_cover(amax, largest(dtype))
        return power, reciprocal_pow2(power)
    correctly_rounded = division or divide
    finite = jnp.isfinite(amax)
    floor = np.float32(FLOAT32_SCALE_FLOOR)
    of_floor = np.float32(largest(dtype) / FLOAT32_SCALE_FLOOR)
    multiplier = correctly_rounded(largest(dtype), jnp.maximum(amax, floor))
    multiplier = jnp.where(amax <= floor, of_floor, multiplier)
    reciprocal = correctly_rounded(1.0, multiplier)
    nan = jnp.float32(jnp.nan)
    of_values = jnp.where(finite, reciprocal, nan)
    return of_values, jnp.where(finite, multiplier, nan)


def find_scale(
    x: Array,
    dtype: DTypeLike,
    scale: str,
    axis: int | tuple[int, ...] | None = None,
) -> tuple[Array, Array]:
    """Return `scale_and_inverse` for the magnitudes of x over `axis` (None: all)."""
    return scale_and_inverse(amax(x, axis), dtype, scale)


def flush_subnormal(x: Array) -> Array:
    """Return float32 `x` with its subnormals set to zero of their sign."""
    # Not times 0: if a program has an array of zeros of this shape (a backward pass
    # stacks gradients into one), XLA uses it as the factor and keeps it alive until
    # here. This factor underflows to zeros of the same sign instead.
    return jnp.where(jnp.abs(x) < _SMALLEST_NORMAL, x * _SMALLEST_NORMAL, x)


def scaled_for_rounding(x: Array, inverse: Array, dtype: DTypeLike) -> Array:
    """Return `flush_subnormal(x) * inverse`, or a value that `dtype` rounds alike.

    Use it with one `inverse` in kernels that round to nearest. Unless `inverse` is
    huge, subnormals round to zero anyway, so one comparison for a whole tile saves two
    operations a value (2.9 TB/s become 3.6 on an H200). Do not use it for stochastic
    rounding or errors, which depend on more of a value than its nearest neighbour.
    """
    info = jnp.finfo(float8_dtype(dtype))
    # Half of the format's smallest subnormal over the smallest normal of float32.
    smallest = int(info.minexp) - int(info.nmant)
    harmless = 2.0 ** (smallest - 1 - _SMALLEST_EXPONENT)
    if inverse.ndim:  # one for each row or column
        return flush_subnormal(x) * inverse
    return lax.cond(
        inverse <= harmless, lambda: x * inverse, lambda: flush_subnormal(x) * inverse
    )


def amax(x: Array, axis: int | tuple[int, ...] | None = None) -> Array:
    """Return max |x| over `axis` (None: all) in float32.

    It is 0 for an empty x, and NaN or inf if `x` has one. Kernels call `amax_by_bits`.
    XLA:CPU's vectorized maximum of float32 values skips NaN (jaxlib 0.10 to 0.12), so a
    CPU compares bit patterns, which are ordered like magnitudes and have NaN above inf.

    >>> float(amax(jnp.array([1.0, -3.0])))
    3.0
    >>> float(amax(jnp.ones((64, 64)).at[3, 3].set(jnp.nan)))
    nan
    """

    def by_value(x: Array) -> Array:
        return jnp.max(jnp.abs(x), axis=axis, initial=0)

    by_bits = partial(amax_by_bits, axis=axis)
    return lax.platform_dependent(x, cpu=by_bits, default=by_value).astype(jnp.float32)


def amax_by_bits(
    x: Array,
    axis: int | tuple[int, ...] | None = None,
    *,
    keepdims: bool = False,
) -> Array:
    """Return max |x| over `axis` in the dtype of x, from bit patterns.

    NaN is the largest, in interpreters as well.

    >>> float(amax_by_bits(jnp.array([1.0, -jnp.inf, jnp.nan])))
    nan
    """
    integer = jnp.dtype(f"int{8 * x.dtype.itemsize}")
    bits = lax.bitcast_convert_type(jnp.abs(x), integer)
    top = jnp.max(bits, axis=axis, initial=0, keepdims=keepdims)
    return lax.bitcast_convert_type(top, x.dtype)


def bits(x: Array) -> Array:
    """Return the bits of float32 or uint32 values as int32."""
    return lax.bitcast_convert_type(x, jnp.int32)


def from_bits(bits: Array) -> Array:
    """Return the float32 values of 32 bits."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def _bits(x: ArrayLike) -> Array:
    return bits(jnp.asarray(x, jnp.float32))


def _power_of_two(exponent: Array) -> Array:
    """Return 2**exponent in float32, exactly, for integer exponents in [-126, 127]."""
    return from_bits((exponent + _BIAS) << _MANTISSA_BITS)


def _exponent(x: Array) -> Array:
    """Return floor(log2 |x|) of normal float32 values; -127 for zero and subnormals."""
    return ((_bits(x) >> _MANTISSA_BITS) & 0xFF) - _BIAS


def _nan_like(x: Array) -> Array:
    # Outside jit `jax_debug_nans` would report this array, although a choice follows
    # that may take nothing of it.
    with jax.debug_nans(False):
        return jnp.full_like(x, jnp.nan)


def pow2_cover(amax: ArrayLike, limit: float) -> Array:
    """Return the smallest power of two `s` with `amax / s <= limit`, a positive number.

    The result is float32 in the shape of `amax`. The exponent is clamped to [-126,
    127], E8M0's range less its one subnormal. `amax = 0` gives 1. A NaN or infinite
    `amax` gives NaN, so that all values with this scale become NaN.

    >>> [float(pow2_cover(jnp.float32(a), 7.0)) for a in (7.0, 7.1, 0.0)]
    [1.0, 2.0, 1.0]
    """
    values = jnp.asarray(amax, jnp.float32)
    mantissa, exponent = np.frexp(np.float32(limit))  # 448 = 0.875 * 2**9 = 1.75 * 2**8
    limit_bits = int(np.float32(2 * mantissa).view(np.int32)) & _MANTISSA_MASK
    above = (_bits(values) & _MANTISSA_MASK) > limit_bits
    carry = above.astype(jnp.int32)
    wanted = _exponent(values) - (int(exponent) - 1) + carry
    scale = _power_of_two(jnp.clip(wanted, _SMALLEST_EXPONENT, _LARGEST_EXPONENT))
    scale = jnp.where(values < _SMALLEST_NORMAL, jnp.ones_like(scale), scale)
    # Mosaic lacks `isfinite`
    return jnp.where(jnp.abs(values) < jnp.inf, scale, _nan_like(scale))


def reciprocal_pow2(scale: Array) -> Array:
    """Return 1 / scale for powers of two in [2**-126, 2**126], exactly.

    It is an integer subtraction, and NaN stays NaN. The inverse of 2**127 would be
    subnormal, but `pow2_cover` returns no such scale for a finite float32 `amax`.

    >>> float(reciprocal_pow2(jnp.float32(8.0)))
    0.125
    """
    inverse = _power_of_two(-_exponent(scale))
    return jnp.where(jnp.isnan(scale), scale, inverse)


def divide(a: ArrayLike, b: ArrayLike) -> Array:
    """Return a / b, correctly rounded, by integer long division.

    Use it for positive normal float32 with a normal quotient. XLA's float32 division on
    a GPU is up to 2 ulp off, and XLA rewrites 1 / (a / b) to b / a, so a scale that is
    defined by a division would differ between backends. Use it for scales only: it
    takes about a hundred operations.

    >>> float(divide(1.0, 3.0)) == float(np.float32(1) / np.float32(3))
    True
    """
    hidden = 1 << _MANTISSA_BITS
    bits_a = _bits(a)
    bits_b = _bits(b)
    numerator = (bits_a & _MANTISSA_MASK) | hidden
    denominator = (bits_b & _MANTISSA_MASK) | hidden
    smaller = (numerator < denominator).astype(jnp.int32)
    exponent = (bits_a >> _MANTISSA_BITS) - (bits_b >> _MANTISSA_BITS) - smaller
    remainder = (numerator << smaller) - denominator
    quotient = jnp.ones_like(remainder)
    for _ in range(_MANTISSA_BITS):
        remainder = remainder << 1
        bit = (remainder >= denominator).astype(jnp.int32)
        quotient = (quotient << 1) | bit
        remainder = remainder - bit * denominator
    # The quotient of two floats is never halfway between two floats, so ties cannot
    # happen.
    quotient = quotient + (2 * remainder > denominator).astype(jnp.int32)
    # Addition, unlike "or", lets a mantissa that rounds up to 2 carry into the
    # exponent.
    return from_bits(((exponent + _BIAS) << _MANTISSA_BITS) + (quotient - hidden))


def _clip_finite(x: Array, limit: float) -> Array:
    """Clip finite values to [-limit, limit].

    NaN and inf become NaN, so that an overflow upstream stays visible.
    """
    clipped = jnp.minimum(jnp.maximum(x, -limit), limit)
    return jnp.where(jnp.abs(x) < jnp.inf, clipped, _nan_like(x))


def dequantized(values: Array, scale: Array, dtype: DTypeLike) -> Array:
    """Return float32 `values * scale` in a float dtype; a result of a finite value that
    lies beyond the range becomes the largest.

    FP8 rounds the last values of a dtype up to a number beyond it, such as 65,504 of
    float16 to 65,536.

    >>> dequantized(jnp.float32([256, -1]), jnp.float32(256), jnp.float16).tolist()
    [65504.0, -256.0]
    """
    largest = min(float(jnp.finfo(dtype).max), float(jnp.finfo(jnp.float32).max))
    product = values * scale
    clipped = jnp.clip(product, -largest, largest)
    return jnp.where(jnp.isinf(values), product, clipped).astype(dtype)


def saturating_cast(x: Array, dtype: DTypeLike) -> Array:
    """Return `x` in an FP8 format, rounded to nearest even, saturating.

    Finite values beyond the range become the largest one. `astype(float8_e4m3fn)` alone
    gives NaN above 464, so every cast of the project goes through this function. NaN
    and inf give NaN. Other floats than float32 are converted to it first.

    >>> x = jnp.array([1.06, 1e9, -500.0])
    >>> [float(v) for v in saturating_cast(x, "float8_e4m3fn")]
    [1.0, 448.0, -448.0]
    """
    clipped = _clip_finite(x.astype(jnp.float32), largest(dtype))
    return clipped.astype(float8_dtype(dtype))


def scaled_cast(x: Array, multiplier: Array, dtype: DTypeLike) -> Array:
    """Return `flush_subnormal(x) * multiplier` as an FP8 format stores it.

    This is the rounding of every quantizer.
    """
    return saturating_cast(flush_subnormal(x) * multiplier, dtype)


def _grid(x: Array, dtype: DTypeLike) -> tuple[Array, Array]:
    """Return (`dtype`'s spacing around each value of `x`, its inverse)."""
    info = jnp.finfo(_rounded_dtype(dtype))
    # At most 126, from the exponent of NaN less two bits of mantissa, so both powers
    # exist.
    exponent = jnp.maximum(_exponent(x), int(info.minexp)) - int(info.nmant)
    return _power_of_two(exponent), _power_of_two(-exponent)


def spacing(x: Array, dtype: DTypeLike) -> Array:
    """Return the distance between `dtype`'s neighbours around each float32 value.

    It is a power of two.

    >>> spacing(jnp.array([0.0, 1.0, -448.0]), "float8_e4m3fn").tolist()
    [0.001953125, 0.125, 32.0]
    """
    return _grid(x, dtype)[0]


def scaled_by_both(x: Array, a: Array, b: Array) -> Array:
    """Return `x * a * b` for two positive scales; a large `a` comes last.

    `a * b` may be 0 and `x * a` inf although the result is neither.

    >>> float(scaled_by_both(jnp.float32(2e9), jnp.float32(1e34), jnp.float32(1e-34)))
    2000000000.0
    """
    is_large = a > 2.0**64  # x, a sum of products of codes, is below 2**64
    first = jnp.where(is_large, b, a)
    last = jnp.where(is_large, a, b)
    return x * first * last


def round_to(x: Array, dtype: DTypeLike) -> Array:
    """Return the nearest values of `dtype` to `x` as float32, saturating.

    Ties go to even, NaN and inf to NaN. It equals `saturating_cast(x,
    dtype).astype(float32)` bit for bit, without the cast and back that XLA deletes.

    >>> [float(v) for v in round_to(jnp.array([1.06, 1.07, 1e9]), "float8_e4m3fn")]
    [1.0, 1.125, 448.0]
    """
    clipped = _clip_finite(x, largest(dtype))
    spacing, inverse = _grid(clipped, dtype)
    return lax.round(clipped * inverse, lax.RoundingMethod.TO_NEAREST_EVEN) * spacing


def stochastic_round_to(
    x: Array,
    dtype: DTypeLike,
    bits: Array,
    floor: Callable[[Array], Array] = jnp.floor,
) -> Array:
    """Return one of the two values of `dtype` around `x`.

    The upper one has probability (x - lower) / (upper - lower). `bits` are independent
    uniform uint32, one for each value. The 24 highest are used, so E[result] = x to
    2**-24 of the distance between the neighbours. Values of `dtype` come back
    unchanged, and values beyond its range saturate. Input and result are float32. A
    kernel may give its own `floor`.

    >>> halfway = jnp.float32(1.0625)
    >>> float(stochastic_round_to(halfway, "float8_e4m3fn", jnp.uint32(0)))
    1.125
    >>> float(stochastic_round_to(halfway, "float8_e4m3fn", jnp.uint32(2**32 - 1)))
    1.0
    """
    clipped = _clip_finite(x, largest(dtype))
    spacing, inverse = _grid(clipped, dtype)
    units = clipped * inverse
    lower = floor(units)
    # float32 holds 24 bits exactly, so the comparison below does not round.
    uniform = (bits >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)
    upper = (uniform < units - lower).astype(jnp.float32)
    return (lower + upper) * spacing


def residual(scaled: Array, rounded: Array) -> Array:
    """Return `scaled - rounded`, exact in float32.

    `rounded` is from `round_to` or `stochastic_round_to`. Use it for every residual and
    error. `rounded` must be a rounded *value*, never a float8 array cast back: XLA on
    the GPU would replace that by `scaled` and return zeros.
    """
    return scaled - rounded


def encode_e8m0(scale: Array) -> Array:
    """Return powers of two as E8M0 codes: code = exponent + 127, NaN = 255.

    >>> code = encode_e8m0(jnp.float32(0.5))
    >>> code.dtype, float(decode_e8m0(code))
    (dtype(float8_e8m0fnu), 0.5)
    """
    return lax.bitcast_convert_type(e8m0_code(scale), jnp.float8_e8m0fnu)


def e8m0_code(scale: Array) -> Array:
    """Return the E8M0 codes of powers of two as uint8.

    Use it in kernels, which have no such float.

    >>> int(e8m0_code(jnp.float32(0.5)))
    126
    """
    code = jnp.where(jnp.isnan(scale), 255, _exponent(scale) + _BIAS)
    return code.astype(jnp.uint8)


def decode_e8m0(code: Array) -> Array:
    """Return E8M0 codes as float32: 2**(code - 127), and NaN for 255.

    Code 0 is 2**-127, a float32 subnormal that arithmetic flushes to zero. The project
    writes code 0 only as the scale of a block of zeros, for which any scale gives the
    same result.
    """
    raw = lax.bitcast_convert_type(code, jnp.uint8).astype(jnp.int32)
    bits = jnp.where(raw == 0, 1 << (_MANTISSA_BITS - 1), raw << _MANTISSA_BITS)
    return from_bits(jnp.where(raw == 255, 0x7FC00000, bits))
