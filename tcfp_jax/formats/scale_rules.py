"""The rules that choose the scale of a tile.

Powers of two follow from the bits of max |x|, float scales from exact division. For an
exponent scale s = 2**e, with amax = max |x| over the finite values of the tile and a
number's emax and maxfloat:

    "max"       e = floor(log2(amax)) - emax
                OCP; the largest values of a tile may saturate
    "midmax"    the same, + 1 if amax / s > midmax
                avoids only values that round beyond maxfloat
    "auto"      "midmax", as in TensorCast
    "ceil"      the smallest e with amax / 2**e <= maxfloat
                nothing saturates; JAX, TE, DeepGEMM
    "mse"       that e, or e - 1 if that leaves a smaller sum of squared errors in the
                tile

e is clipped to the range of the scale's number, and from above so that every value of
the number is a float32. A tile of zeros gets the smallest e, which "mse" gives to no
other tile. A float scale is `amax / max` rounded to the scale's number, at least its
smallest positive value.

NVFP4 has two levels, float scales of tiles below one of the tensor, and two more rules.
`a` is amax / tensor. Among several candidates each tile takes the one with the smallest
sum of squared errors, the first one among equals:

    "max"            tensor = amax / (6 * 448), and a / 6
    "four_over_six"  tensor = amax / (6 * 256), and a / 6 or a / 4: E2M1 has no 5, so a
                     tile with large values may gain by ending at 4 (Cook et al. 2025,
                     "Four Over Six")
    "fold_exact"     tensor = amax / (6 * 256), and scales of 1, 1.25 and 1.5 times a
                     power of two, from 2**-3 on: the smallest that is not below
                     a / 6.375, and the next two. Their products with E2M1, over 2**3,
                     are E4M3 numbers (`exact_share`), and they clip no more than "max"
                     does

The 256 leaves room above the tile with the largest value: its amax / 4 needs the scale
384, and "fold_exact" needs its candidates above 256. FP8 tensor cores have one factor
for a whole operand, so its products must lie within E4M3's range together: twelve
binades of scales, 2**-3 to 384. A tile that is more than 2**11 below the largest gets
2**-3.

Use "mse" if most values of a tile lie far below its largest one, as in the remainder of
rounding to a float. Half the step for all of them then gains more than clipping a few
loses. Stochastic rounding takes the covering e of "mse", because clipping would bias
it. For the same reason it rounds float scales up and takes the first candidate. By
"max" and "midmax" it clips as other rounding does. Errors are summed as integers: the
order of the sum changes nothing.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array

from tcfp_jax.formats import float_bits
from tcfp_jax.formats.codebooks import CodebookSpec
from tcfp_jax.formats.float_bits import (
    HIDDEN,
    INFINITY,
    TINY,
    Rounding,
    from_bits,
    to_bits,
)
from tcfp_jax.formats.numbers import NumberSpec, number
from tcfp_jax.formats.scales import ScaleMode

_MANTISSA = HIDDEN - 1
# The largest E4M3 scale for which the candidates of "four_over_six" and "fold_exact"
# are E4M3 numbers as well.
_LARGEST_BELOW = 256.0
LEAST_FOLDED = 2.0**-3
LARGEST_FOLDED = 384.0
# This factor brings 6 * LARGEST_FOLDED into E4M3's range, and 0.5 * LEAST_FOLDED to its
# last digit.
IN_E4M3 = 2.0**-3
# Rounding a scale to the nearest E4M3 leaves quotients of at most 6 times 1 + 1/16.
CLIPPED_FROM = 6.375
# A smaller scale, before it is rounded, is zero: all values of its tile round to zero.
NEGLIGIBLE = 2.0**-100


def finite_magnitude(magnitude: Array) -> Array:
    """Return magnitudes with 0 for inf and NaN, which do not influence a scale."""
    return jnp.where(magnitude < INFINITY, magnitude, 0)


def choose_exponent(
    amax: Array,
    number: NumberSpec | CodebookSpec,
    scale: NumberSpec,
    mode: ScaleMode,
) -> tuple[Array, Array]:
    """Return (e, e before it is clipped) of the scale 2**e for magnitudes `amax`.

    The module has the formulas. For "mse" it is the larger candidate; only the values
    of a tile can decide between the two.
    """
    exponent, mantissa = float_bits.normalize(amax)
    wanted = exponent - number.emax
    if mode != "max":
        limit = number.midmax if mode in ("midmax", "auto") else number.maxfloat
        limit_mantissa = _bits_of(limit) & _MANTISSA
        wanted = wanted + (mantissa > limit_mantissa).astype(jnp.int32)
    smallest: Array | int = scale.emin
    if mode == "mse":
        smallest = jnp.where(amax == 0, scale.emin, scale.emin + 1)
    # The largest value of the number, times the scale, must be a float32.
    return jnp.clip(wanted, smallest, min(scale.emax, 127 - number.emax)), wanted


def _bits_of(value: float) -> int:
    return int(np.float32(value).view(np.int32))


def round_scale(quotient: Array, scale: NumberSpec, mode: Rounding = "even") -> Array:
    """Round a float32 scale >= 0 to its number.

    0 stays 0, and a positive scale stays positive.
    """
    if scale.is_wide:
        bits = float_bits.round_bits(to_bits(quotient), scale.mbits, mode)
        rounded = from_bits(bits)
    else:
        rounded = float_bits.round_to_grid(quotient, scale.grid, mode)
    smallest = max(scale.smallest_subnormal, TINY)
    clipped = jnp.clip(rounded, smallest, scale.max)
    return jnp.where(quotient > 0, clipped, jnp.float32(0))


def choose_scale(
    amax: Array, largest: float, scale: NumberSpec, mode: Rounding = "even"
) -> Array:
    """Return `amax / largest` rounded to the scale's number, for magnitudes `amax`.

    It is 0 if amax is 0 or subnormal.
    """
    quotient = float_bits.divide(amax, jnp.int32(_bits_of(largest)))
    # `divide` gives 0 for a quotient below the smallest normal, but a nonzero tile
    # needs a positive scale.
    lost = (amax >= HIDDEN) & (quotient == 0)
    quotient = jnp.where(lost, jnp.float32(TINY), quotient)
    return round_scale(quotient, scale, mode)


def choose_outer(
    amax: Array,
    largest: float,
    scale: NumberSpec,
    outer: NumberSpec,
    rule: ScaleMode,
) -> Array:
    """Return the scale of a tensor above the scales of its tiles.

    `amax` are the bits of its largest magnitude.
    """
    largest_below = scale.max if rule == "max" else _LARGEST_BELOW
    return choose_scale(amax, largest * largest_below, outer)


def tile_scales(
    amax: Array,
    whole: Array,
    largest: float,
    scale: NumberSpec,
    rule: ScaleMode,
    covers: bool,
) -> list[Array]:
    """Return the scales among which each tile chooses, below the tensor's, `whole`.

    `amax` are int32 bits, `largest` is the number's largest value. With `covers` the
    one candidate clips nothing.

    Source: NVIDIA 2025, "Pretraining Large Language Models with NVFP4", appendix C;
    Cook et al. 2025, "Four Over Six".
    """

    def over(largest: float, mode: Rounding) -> Array:
        divisor = to_bits(whole * jnp.float32(largest))
        quotient = float_bits.divide_to_odd(amax, divisor, float_bits.MANTISSA_BITS)
        quotient = jnp.where(quotient < NEGLIGIBLE, jnp.float32(0), quotient)
        return round_scale(quotient, scale, mode)

    if rule == "fold_exact":
        first = _folded(over(largest if covers else CLIPPED_FROM, "up"))
        if covers:
            return [first]
        second = _next_folded(first)
        return [first, second, _next_folded(second)]
    if covers:
        return [over(largest, "up")]
    first = over(largest, "even")
    return [first, over(4.0, "even")] if rule == "four_over_six" else [first]


def _folded(value: Array) -> Array:
    """Return the smallest scale of "fold_exact" that is not below `value`.

    It is at most the largest one; 0 stays 0.
    """
    bits = to_bits(value)
    mantissa = bits & _MANTISSA
    quarter = HIDDEN >> 2
    up = jnp.where(mantissa > 0, -(-mantissa // quarter) * quarter, 0)
    up = jnp.where(mantissa > 2 * quarter, HIDDEN, up)
    found = from_bits(bits - mantissa + up)
    clipped = jnp.clip(found, LEAST_FOLDED, LARGEST_FOLDED)
    return jnp.where(value > 0, clipped, jnp.float32(0))


def _next_folded(value: Array) -> Array:
    """Return the next scale of "fold_exact"; 0 and the largest one stay."""
    binade = from_bits(to_bits(value) & INFINITY)
    return _folded(value + binade * jnp.float32(0.125))


def exact_share(scales: Array) -> Array:
    """Return the share of tiles whose products code * scale / 2**e are E4M3 numbers.

    2**e brings the largest scale into the binade of 32, so that six times any scale is
    at most 448. FP8 tensor cores multiply such tiles without rounding. All tiles of
    "fold_exact" are such, and zeros; NaN is not.

    Use this on the scales of `quantize_nvfp4` to see how much FP8 products would round.

    Raises:
      ValueError: scales are not a float8_e4m3fn array, or an empty one.

    >>> scales = jnp.array([384.0, 1.25, 1.125, 0.015625], jnp.float8_e4m3fn)
    >>> float(exact_share(scales))
    0.5
    """
    if getattr(scales, "dtype", None) != jnp.float8_e4m3fn or scales.size == 0:
        raise ValueError(
            "scales are not a float8_e4m3fn array with values, as"
            " quantize_nvfp4(x).scales is"
        )
    values = scales.astype(jnp.float32)
    largest = to_bits(jnp.max(jnp.where(values > 0, values, 0)))
    exponent, _ = float_bits.normalize(largest)
    scaled = values * float_bits.power_of_two(5 - exponent)
    grid = number("e4m3fn").grid
    exact = jnp.ones(values.shape, bool)
    # The other codes are these times powers of two, and only the smallest products can
    # fall between E4M3's steps.
    for code in (0.5, 1.5):
        product = scaled * code
        exact &= float_bits.round_to_grid(product, grid, "even") == product
    return jnp.mean(exact.astype(jnp.float32))
