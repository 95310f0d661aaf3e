"""NVFP4 operands of training: blocks of 16 values, rounded and dequantized in as few passes over memory as XLA can.

    x ~ values * outer,   values = E2M1 * scale          16 values share an E4M3 scale, all of x the float32 outer

`values` have at most 6 significant bits, so they are exact in BF16. Rounding is the format library's
(`formats.datatype("e2m1f", "e4m3fn_t16_float32")`), bit for bit where it is to nearest, and it is written as
comparisons with multiples of the block's scale: differences of nearby floats are exact, so nothing is divided, and XLA
fuses all of it into the pass that writes the values. `tests/products/test_fp4_rounding.py` compares the two.

Arrays come in blocks: `axes` are the axes along which a block extends, 16 values of one or 16 x 16 of two.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.counter import bits_of, keys
from tcfp_jax.formats import float_bits, number, scale_choice
from tcfp_jax.formats.float_bits import INFINITY, TINY
from tcfp_jax.recipes.forms import ScaleRule

BLOCK = 16
_LARGEST = 6.0  # of E2M1
_E4M3 = number("e4m3fn")
_GRID = scale_choice.grid_of(_E4M3)
# The largest scale of each rule. Where a block may take amax/4, the tensor's amax must leave room for it (Cook et al.
# 2025); fold-exact scales s have values 0.5 s to 6 s that are E4M3 numbers of four significant bits.
_TOP = {"amax": 448.0, "four_over_six": 256.0, "fold_exact": 64.0}
_FOLD_LEAST = 2.0**-5
# MS-EDEN: the best step of nearest rounding for normal values is smaller than amax/6, and its corrections need room
# above the scales (Panferov et al. 2026, section 4 and their code).
_EDEN_LARGEST = _LARGEST / (17 / 16 * 0.93)
_EDEN_TOP = 256.0

Rounding = Literal["nearest", "stochastic", "eden"]
Words = tuple[jax.Array, jax.Array]


class Fp4Values(NamedTuple):
    """`values * outer`: bfloat16 of any shape, each an E2M1 number times an E4M3 scale, and a float32 scalar."""

    values: jax.Array
    outer: jax.Array

    def dequantize(self) -> jax.Array:
        """What they stand for, float32."""
        return self.values.astype(jnp.float32) * self.outer


def words_of(key: jax.Array) -> jax.Array:
    """A random key, typed or not, as one array of words from which streams of bits are made.

    >>> words_of(jax.random.key(3)).shape
    (2,)
    """
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    return (jax.random.key_data(key) if typed else key).astype(jnp.uint32).reshape(-1)


def stream(words: jax.Array, number: int) -> Words:
    """The key words of one of a product's streams of bits."""
    return keys(*(words[i] for i in range(words.shape[0])), number)


def signs(words: Words, size: int) -> jax.Array:
    """Random signs, float32 1 or -1.

    >>> sorted(set(signs(stream(words_of(jax.random.key(0)), 1), 64).tolist()))
    [-1.0, 1.0]
    """
    return 1.0 - 2.0 * (bits_of((size,), *words) >> 31).astype(jnp.float32)


def along(
    x: jax.Array,
    axis: int,
    rule: ScaleRule,
    rounding: Rounding = "nearest",
    words: Words | None = None,
    turn: jax.Array | None = None,
) -> Fp4Values:
    """X in blocks of 16 along an axis, the first or the last, rotated along it before where there are signs.

    Args:
      turn: `signs` of as many values as are rotated together.

    Returns:
      `Fp4Values` of the shape of x, the axis filled with zeros up to whole blocks and rotations.

    >>> along(jnp.ones((2, 20)), -1, "amax").values.shape
    (2, 32)
    """
    size = BLOCK if turn is None else turn.shape[0]
    short = -x.shape[axis] % size
    if short:
        x = jnp.pad(x, [(0, short if i == axis % x.ndim else 0) for i in range(x.ndim)])
    shape, first = x.shape, axis % x.ndim == 0
    place = 0 if first else x.ndim - 1

    apart = turn is not None and first and size == BLOCK  # as the rows of a block then are
    if turn is not None and not apart:
        x = _rotated(x, turn, first)

    def blocks(x: jax.Array) -> Sequence[jax.Array]:
        whole = x.reshape((-1, BLOCK, *shape[1:]) if first else (*shape[:-1], -1, BLOCK))
        if not apart:
            return (whole,)
        # Row by row: XLA would write what a rotation gives to memory before it finds its maxima.
        rows = [lax.slice_in_dim(whole, i, i + 1, axis=1).astype(jnp.float32) for i in range(BLOCK)]
        assert turn is not None, "only what is rotated is taken apart"
        return _butterflies(rows, turn)

    found = quantize(x, (place + 1,), rule, rounding, words, blocks, (place, size // BLOCK))
    return found._replace(values=found.values.reshape(shape))


def squares(w: jax.Array, rule: ScaleRule) -> Fp4Values:
    """A matrix in squares of 16 x 16, filled with zeros up to whole ones, rounded to nearest.

    >>> squares(jnp.ones((20, 3)), "amax").values.shape
    (32, 16)
    """
    padded = jnp.pad(w, [(0, -size % BLOCK) for size in w.shape])
    rows, columns = padded.shape
    blocks = lambda w: (w.reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK),)
    found = quantize(padded, (1, 3), rule, blocks=blocks)
    return found._replace(values=found.values.reshape(padded.shape))


def _rotated(x: jax.Array, turn: jax.Array, first: bool) -> jax.Array:
    """X times signs and Sylvester's matrix over sqrt(size), along its first or last axis, float32."""
    size, shape = turn.shape[0], x.shape
    matrix = jnp.asarray(_sylvester(size)) * turn[:, None]
    # 1 and -1 are exact in BF16, and so is what BF16 products add up in float32.
    dtype = jnp.bfloat16 if x.dtype == jnp.bfloat16 else jnp.float32
    options: Any = dict(precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    if first:
        groups = x.reshape(shape[0] // size, size, -1).astype(dtype)
        # One matrix for each group, so that what it gives lies as x does.
        matrices = jnp.broadcast_to(matrix.T.astype(dtype), (len(groups), size, size))
        turned = jnp.matmul(matrices, groups, **options)
    else:
        turned = jnp.einsum(
            "...i,ij->...j", x.reshape(*shape[:-1], -1, size).astype(dtype), matrix.astype(dtype), **options
        )
    return turned.reshape(shape) * jnp.float32(1 / math.sqrt(size))


def _butterflies(rows: list[jax.Array], turn: jax.Array) -> list[jax.Array]:
    """The same of rows that are rotated among each other, in an order of sums that is the same everywhere."""
    rows, half = [sign * row for sign, row in zip(turn, rows, strict=True)], 1
    while half < len(rows):
        rows = [rows[i ^ half] - row if i & half else row + rows[i ^ half] for i, row in enumerate(rows)]
        half *= 2
    return [row * jnp.float32(1 / math.sqrt(len(rows))) for row in rows]


def _sylvester(size: int) -> np.ndarray:
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < size:
        matrix = np.kron(np.array([[1, 1], [1, -1]], np.float32), matrix)
    return matrix


def quantize(
    x: jax.Array,
    axes: tuple[int, ...],
    rule: ScaleRule,
    rounding: Rounding = "nearest",
    words: Words | None = None,
    blocks: Callable[[jax.Array], Sequence[jax.Array]] = lambda x: (x,),
    group: tuple[int, int] = (0, 1),
) -> Fp4Values:
    """X as NVFP4.

    Args:
      x: real floats, bfloat16 and float32.
      axes: those along which a block extends.
      rule: how blocks are scaled where they are rounded to nearest.
      rounding: of values, or "eden", of corrected scales.
      words: of the random bits, for "stochastic" and "eden"; the bits of a value depend on its index.
      blocks: of x, what is quantized, in parts along the first of `axes`. It is computed twice, because a pass over x
        that computes it costs less than one over what it gives.
      group: for "eden", the axis and number of consecutive blocks that were rotated together.

    Returns:
      `Fp4Values` of the shape of all blocks. A NaN or inf in x makes its block NaN.

    >>> quantize(jnp.arange(16.0)[None] - 6, (1,), "amax").dequantize()[0, :8].round(2).tolist()
    [-6.0, -4.5, -4.5, -3.0, -2.25, -0.75, 0.0, 0.75]
    """
    bits = [lax.bitcast_convert_type(jnp.abs(part.astype(jnp.float32)), jnp.int32) for part in blocks(x)]
    amax = _largest([scale_choice.finite_magnitude(part) for part in bits], axes)
    lost = _largest(bits, axes) >= INFINITY
    # Otherwise XLA finds the maximum of all x in a pass of its own, and keeps what a rotation gives.
    amax, lost, x = lax.optimization_barrier((amax, lost, x))
    x = jnp.concatenate(blocks(x), axis=axes[0]).astype(jnp.float32)
    magnitude = jnp.abs(x)
    magnitude = jnp.where(magnitude < TINY, 0, magnitude)  # as the format library reads subnormals
    if rounding == "eden":
        outer, quotient = _quotients(amax, _EDEN_LARGEST, _EDEN_TOP)
        scale = scale_choice.round_scale(quotient, _E4M3)
        units = _nearest(magnitude, _factor(scale, outer))
        scale = _corrected(scale, _factor(scale, outer) * units, magnitude, axes, group, words)
    elif rounding == "stochastic":
        assert words is not None, "stochastic rounding has random bits"
        outer, quotient = _quotients(amax, _LARGEST, _TOP[rule])
        scale = _covering_fold(quotient) if rule == "fold_exact" else _covering(quotient)
        units = _stochastic(magnitude, _factor(scale, outer), bits_of(x.shape, *words))
    else:
        scale, outer = _nearest_scale(magnitude, amax, axes, rule)
        units = _nearest(magnitude, _factor(scale, outer))
    scale = jnp.where(lost, jnp.float32(jnp.nan), scale)
    return Fp4Values((jnp.copysign(units, x) * scale).astype(jnp.bfloat16), outer.reshape(()))


def _largest(parts: Sequence[jax.Array], axes: tuple[int, ...]) -> jax.Array:
    return functools.reduce(jnp.maximum, [jnp.max(part, axis=axes, keepdims=True) for part in parts])


# Scales ---------------------------------------------------------------------------------------------------------------


def _quotients(amax: jax.Array, largest: float, top: float) -> tuple[jax.Array, jax.Array]:
    """(outer, amax / (largest outer), to odd) of blocks, from bits of their amax; the quotient is at most `top`."""
    outer = scale_choice.choose_scale(jnp.max(amax), largest * top, number("float32"))
    divisor = lax.bitcast_convert_type(outer * jnp.float32(largest), jnp.int32)
    quotient = float_bits.divide_to_odd(amax, divisor, float_bits.MANTISSA_BITS)
    return outer, jnp.where((amax >= float_bits.HIDDEN) & (quotient == 0), jnp.float32(TINY), quotient)


def _factor(scale: jax.Array, outer: jax.Array) -> jax.Array:
    """What a block's values are divided by; where that is zero, more than any of its values."""
    factor = scale * outer
    return jnp.where(factor < TINY, jnp.float32(2.0**120), factor)


def _nearest_scale(
    magnitude: jax.Array, amax: jax.Array, axes: tuple[int, ...], rule: ScaleRule
) -> tuple[jax.Array, jax.Array]:
    """(scales, outer) for rounding to nearest."""
    outer, six = _quotients(amax, _LARGEST, _TOP[rule])
    four = six * jnp.float32(1.5)
    if rule == "amax":
        return scale_choice.round_scale(six, _E4M3), outer
    if rule == "fold_exact":
        wide, narrow = _fold(six), _fold(four)
        return jnp.where(jnp.abs(narrow / four - 1) < jnp.abs(wide / six - 1), narrow, wide), outer
    wide, narrow = scale_choice.round_scale(six, _E4M3), scale_choice.round_scale(four, _E4M3)
    errors = []
    for scale in (wide, narrow):
        factor = _factor(scale, outer)
        errors.append(jnp.sum(jnp.square(magnitude - _nearest(magnitude, factor) * factor), axis=axes, keepdims=True))
    return jnp.where(errors[1] < errors[0], narrow, wide), outer


def _binade(x: jax.Array) -> jax.Array:
    """The power of two of positive normal floats."""
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) & INFINITY, jnp.float32)


def _covering(quotient: jax.Array) -> jax.Array:
    """The smallest E4M3 number that is not below, for quotients up to its largest."""
    down = float_bits.round_to_grid(quotient, _GRID, "zero", None)
    step = jnp.maximum(_binade(quotient), jnp.float32(2.0**_GRID.emin)) * jnp.float32(2.0**-_GRID.mbits)
    return jnp.where(down < quotient, down + step, down)


def _fold(quotient: jax.Array) -> jax.Array:
    """The nearest of 1, 1.25 and 1.5 times a power of two, in the range where values are E4M3 numbers; 0 stays."""
    two = _binade(quotient)
    part = jnp.where(quotient < 1.125 * two, 1.0, jnp.where(quotient < 1.375 * two, 1.25, 1.5))
    return _in_fold_range(jnp.where(quotient < 1.75 * two, part, 2.0) * two, quotient)


def _covering_fold(quotient: jax.Array) -> jax.Array:
    """The smallest such number that is not below."""
    two = _binade(quotient)
    part = jnp.where(quotient <= two, 1.0, jnp.where(quotient <= 1.25 * two, 1.25, 1.5))
    return _in_fold_range(jnp.where(quotient <= 1.5 * two, part, 2.0) * two, quotient)


def _in_fold_range(scale: jax.Array, quotient: jax.Array) -> jax.Array:
    return jnp.where(quotient > 0, jnp.clip(scale, _FOLD_LEAST, _TOP["fold_exact"]), 0.0)


def _corrected(
    scale: jax.Array,
    rounded: jax.Array,
    magnitude: jax.Array,
    axes: tuple[int, ...],
    group: tuple[int, int],
    words: Words | None,
) -> jax.Array:
    """Scales times <x, x> / <x, rounded x> of what was rotated together, rounded stochastically to E4M3 (MS-EDEN)."""
    assert words is not None, "scales are rounded with random bits"
    axis, count = group

    def summed(products: jax.Array) -> jax.Array:
        blocks = jnp.sum(products, axis=axes, keepdims=True)
        apart = blocks.reshape(*blocks.shape[:axis], -1, count, *blocks.shape[axis + 1 :])
        sums = jnp.sum(apart, axis=axis + 1, keepdims=True)
        return jnp.broadcast_to(sums, apart.shape).reshape(blocks.shape)

    whole, along = summed(magnitude * magnitude), summed(magnitude * rounded)
    wanted = scale * jnp.where(along > 0, whole / jnp.where(along > 0, along, 1), 1)
    wanted = jnp.minimum(wanted, jnp.float32(_E4M3.max))
    return float_bits.round_to_grid(wanted, _GRID, "stochastic", bits_of(scale.shape, *words))


# Values ---------------------------------------------------------------------------------------------------------------
# E2M1 has 0, 0.5, 1, 1.5, 2, 3, 4 and 6. A difference of two floats within a factor of two of each other is exact, and
# others have the right sign, so each comparison below is that of the real numbers.


def _nearest(m: jax.Array, f: jax.Array) -> jax.Array:
    """The E2M1 number nearest to m / f, ties to even, at most 6."""
    one, two, four = m - f, m - 2 * f, m - 4 * f
    step = lambda up, size: jnp.where(up, jnp.float32(size), 0)
    units = step(m > 0.25 * f, 0.5) + step(one >= -0.25 * f, 0.5) + step(one > 0.25 * f, 0.5)
    units += step(two >= -0.25 * f, 0.5) + step(two > 0.5 * f, 1)
    return units + step(four >= -0.5 * f, 1) + step(four > f, 2)


def _stochastic(m: jax.Array, f: jax.Array, bits: jax.Array) -> jax.Array:
    """One of the two E2M1 numbers around m / f, by distance, at most 6."""
    half, one, two, four = 0.5 * f, m - f, m - 2 * f, m - 4 * f
    lower, rest, step = jnp.where(four < 0, 3.0, 4.0), jnp.where(four < 0, two - f, four), jnp.where(four < 0, 1.0, 2.0)
    for below, value, beyond, size in (
        (two < f, 2.0, two, 1.0), (two < 0, 1.5, one - half, 0.5), (one < half, 1.0, one, 0.5),
        (one < 0, 0.5, m - half, 0.5), (m < half, 0.0, m, 0.5),
    ):  # fmt: skip
        lower, rest, step = jnp.where(below, value, lower), jnp.where(below, beyond, rest), jnp.where(below, size, step)
    uniform = (bits >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)
    return lower + jnp.where(uniform * (step * f) < rest, step, 0)
