"""Blocks of an FP4 matrix: the numbers that a scale gives them, and the scales that may be chosen.

    number = E2M1 nearest to w / (scale * outer)           by the format library: ties to the even code
    a rule's scales       as in `tcfp_jax.formats.scale_rules`: one, or several of which the best is taken
    every useful scale    all that the format has within amax / (12 outer) ... amax / (3 outer)

A scale above amax / 3 maps a block to 0, 0.5, 1, 1.5, 2 and 3 at most; half of it has the same values and more. One
below amax / 12 cuts the largest value to less than half. So an exhaustive search needs no others.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.fp4 import E2M1, pack
from pallas_kernels.operands import Fp4, Operand
from tcfp_jax.formats import nvfp4_xla
from tcfp_jax.formats.float_bits import TINY
from tcfp_jax.formats.numbers import number
from tcfp_jax.formats.scale_rules import CLIPPED_FROM, IN_E4M3, LEAST_FOLDED, round_scale

_LARGEST = 6.0  # E2M1 number
_SMALLEST_PART, _LARGEST_PART = 12.0, 3.0
_E4M3 = np.arange(1, 127, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float32)
# Mantissas 1, 1.25 and 1.5: times any E2M1 number, over 2**3, they are E4M3 numbers.
_FOLDS = np.array([value >= LEAST_FOLDED and math.frexp(value)[0] * 2 in (1.0, 1.25, 1.5) for value in _E4M3])
# For each scale byte, whether E4M3 holds its products with all codes; a NaN stays NaN.
_SCALES = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float32)
_PRODUCTS = np.multiply.outer(_SCALES, E2M1) * np.float32(IN_E4M3)
_HELD = (_PRODUCTS.astype(jnp.float8_e4m3fn).astype(np.float32) == _PRODUCTS).all(axis=1) | np.isnan(_SCALES)
_POWERS = np.ldexp(np.float32(1), np.arange(-126, 126)).astype(np.float32)


class Blocks(NamedTuple):
    """A matrix `[n, k]` in tiles that share a scale.

    Attributes:
      values: float32 `[tiles along n, rows of a tile, blocks along k, block]`, padded with zeros; 0 for NaN and inf.
      lost: bool `[tiles along n, blocks along k]`, whether a tile holds NaN or inf.
    """

    values: jax.Array
    lost: jax.Array


def split(w: jax.Array, scaling: Fp4) -> Blocks:
    """Split a matrix into tiles.

    >>> split(jnp.ones((2, 20)), Fp4()).values.shape, split(jnp.ones((2, 20)), Fp4(tile="square")).values.shape
    ((2, 1, 2, 16), (1, 16, 2, 16))
    """
    block = scaling.block
    rows = block if scaling.tile == "square" else 1
    n, k = w.shape
    padded = jnp.pad(w.astype(jnp.float32), ((0, -n % rows), (0, -k % block)))
    tiles = padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // block, block)
    finite = jnp.isfinite(tiles)
    return Blocks(jnp.where(finite, tiles, 0), ~finite.all(axis=(1, 3)))


def rounded(values: jax.Array, factor: jax.Array) -> jax.Array:
    """Return the E2M1 numbers of values under a factor, scale times outer, that broadcasts; a factor of 0 gives 0.

    >>> rounded(jnp.array([3.0, -1.0, 0.125, 1.25]), jnp.float32(0.5)).tolist()
    [6.0, -2.0, 0.0, 2.0]
    """
    return jnp.where(factor > 0, jnp.copysign(nvfp4_xla.nearest(jnp.abs(values), factor), values), 0)


def unit_of(amax: jax.Array) -> jax.Array:
    """Return the power of two that brings a largest magnitude to 1 to 2, or to 4 if its own inverse is subnormal.

    Squares of values times it lie in float32's range, however large or small the values are.

    >>> unit_of(jnp.array([3.0, 1e-30])).tolist() == [0.5, 2.0**100]
    True
    """
    exponent = (lax.bitcast_convert_type(amax, jnp.int32) >> 23) - 127
    return lax.bitcast_convert_type((127 - jnp.clip(exponent, -126, 126)) << 23, jnp.float32)


def table(scaling: Fp4) -> np.ndarray:
    """Return the positive scales that a block may have, in order.

    >>> len(table(Fp4())), table(Fp4(rule="fold_exact"))[-3:].tolist()
    (126, [256.0, 320.0, 384.0])
    """
    if scaling.format == "mxfp4":
        return _POWERS
    return _E4M3[_FOLDS] if scaling.rule == "fold_exact" else _E4M3


def check_rule(name: str, weight: Operand, repair: str) -> None:
    """Raise if an operand names the rule "fold_exact" and its scales do not keep to it: FP8 products rely on it.

    No product depends on the other rules. `gptq` and `search_scales` keep to it. Operands from elsewhere are looked at,
    unless they are traced or other processes hold a part of them.

    Args:
      name: name of the weight, for the message.
      weight: an operand.
      repair: advice for the message.

    Raises:
      ValueError: E4M3 does not hold the product of a scale and a code over 2**3.

    >>> check_rule("w", Operand(jnp.zeros((1, 8), jnp.uint8), jnp.ones((1, 1), jnp.float8_e4m3fn), scaling=Fp4()), "")
    """
    scale = weight.scale
    unknown = isinstance(scale, jax.core.Tracer) or not getattr(scale, "is_fully_addressable", True)
    if getattr(weight.scaling, "rule", None) != "fold_exact" or unknown:
        return
    share = _HELD[np.asarray(scale).view(np.uint8)].mean()
    if share < 1:
        raise ValueError(
            f"{name} has {weight.scaling}, but only {share:.1%} of its scales are of that rule: FP8 products would "
            f"round what the others multiply; {repair}"
        )


def outers(amax: jax.Array, scaling: Fp4, *, search: bool) -> jax.Array:
    """Return the scales of the scales to try, float32 `[count]`; 1 if the format has none.

    A rule has one. A search has `amax / (6 m)` for each m of E4M3's largest binade, which includes all rules' scales.
    `amax` is the largest magnitude of the matrix.
    """
    if scaling.format == "mxfp4" or scaling.rule == "one_level":
        return jnp.ones(1, jnp.float32)
    most = table(scaling)
    largest = most[most >= 256.0]
    if not search:
        largest = largest[-1:] if scaling.rule == "amax" else largest[:1]
    divided = amax / (_LARGEST * jnp.asarray(largest))
    return jnp.where(amax > 0, jnp.maximum(divided, TINY), 1)


def candidates(amax: jax.Array, outer: jax.Array, scaling: Fp4, *, search: bool) -> jax.Array:
    """Return the scales of blocks to try, float32 `[count, ...]`, before `outer` multiplies them.

    `amax` `[...]` has the largest magnitude of each block. A search tries all useful scales, otherwise the rule's.
    """
    allowed = table(scaling)
    values = jnp.asarray(allowed)
    wanted = lambda part: amax / (part * outer)
    at = lambda index: values[jnp.clip(index, 0, len(values) - 1)]
    if search:
        octaves = math.log2(_SMALLEST_PART / _LARGEST_PART)
        count = round(octaves * np.count_nonzero((allowed >= 1) & (allowed < 2))) + 1
        first = jnp.searchsorted(values, wanted(_SMALLEST_PART))
        return at(first + jnp.arange(count).reshape(-1, *[1] * amax.ndim))
    if scaling.format == "mxfp4":  # OCP's rule: the largest power of two that is not above amax / 4
        return at(jnp.searchsorted(values, wanted(4.0), side="right") - 1)[None]
    if scaling.rule == "fold_exact":
        first = jnp.searchsorted(values, wanted(CLIPPED_FROM))
        return at(first + jnp.arange(3).reshape(-1, *[1] * amax.ndim))
    parts = (_LARGEST, 4.0) if scaling.rule == "four_over_six" else (_LARGEST,)
    return jnp.stack([round_scale(wanted(part), number("e4m3fn")) for part in parts])


def operand(
    numbers: jax.Array, scale: jax.Array, outer: jax.Array, lost: jax.Array, like: tuple[jax.Array, Fp4]
) -> Operand:
    """Store E2M1 numbers and their scales as an operand.

    Args:
      numbers: float32 in the tiles of `split`.
      scale: float32 `[tiles along n, blocks along k]`.
      outer: float32 `[]`.
      lost: the tiles whose scale is NaN.
      like: the matrix `[n, k]`, k even, and its scaling.
    """
    w, scaling = like
    n, k = w.shape
    groups, rows, blocks, block = numbers.shape
    wide = numbers.reshape(groups * rows, blocks * block)[:n, :k]
    size = jnp.abs(wide)
    # Codes 0 to 4 are steps of a half; 3, 4 and 6 are the codes 5, 6 and 7.
    code = jnp.where(size <= 2, 2 * size, jnp.where(size <= 4, size + 2, 7)).astype(jnp.uint8)
    code = code | (jnp.signbit(wide).astype(jnp.uint8) << 3)
    scale = jnp.where(lost, jnp.nan, scale)
    if scaling.format == "mxfp4":
        byte = (lax.bitcast_convert_type(scale, jnp.uint32) >> 23).astype(jnp.uint8)
        return Operand(pack(code), lax.bitcast_convert_type(byte, jnp.float8_e8m0fnu), scaling=scaling)
    # Each scale is an E4M3 number already, so the cast rounds nothing.
    return Operand(pack(code), scale.astype(jnp.float8_e4m3fn), scaling=scaling, outer=outer)
