"""NVFP4's arithmetic for blocks of 16 values in registers.

The kernel runs it, and a CPU can run it in tests. A thread holds whole blocks, so the
rotation and the largest magnitude never leave its registers. `numbers` works on 16
arrays, each with one value of every block. It has the bits of `nvfp4_arrays.observe`,
with fewer operations:

* E2M1 and E4M3 are the top bits of a float32 whose exponent is moved down so that the
  number's smallest normal value is float32's. The code of the value below x / s is then
  x / s * 2**-126 >> 22. The quotient may be a product by a reciprocal.
* The decision is then exact: x lies above the middle m of two values if x - m * s > 0.
  A GPU has that sign from one fused operation, a CPU from (x - m * high) - m * low for
  the two halves of s, 12 digits each.

Magnitudes are multiplied by the power of two that brings the scale of the tensor to
2**-9 ("lifted"), so that products and remainders stay in float32's normal range.
"""

import functools
from typing import NamedTuple, TypeAlias

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.arithmetic import Instruct, Instructions, Portable
from pallas_kernels.counter import begin, finish, keys
from tcfp_jax.formats import float_bits
from tcfp_jax.formats.float_bits import (
    INFINITY,
    MANTISSA_BITS,
    SIGN,
    TINY,
    from_bits,
    to_bits,
)
from tcfp_jax.formats.rotation import rotate_arrays
from tcfp_jax.formats.scale_rules import NEGLIGIBLE

SIDE = 16  # values of a block
LARGEST = 6.0  # E2M1's largest value
_LARGEST_BITS = 0x40C00000  # its float32
_LARGEST_SCALE = 0x7E  # E4M3's largest code
# Words of a call: floats from the first one on, then signs, then the key.
_SIGNS = 14
_KEY = _SIGNS + SIDE

KeyWords: TypeAlias = tuple[Array, Array]
Arrays: TypeAlias = list[Array]


class Kind(NamedTuple):
    """One kind of quantization to numbers.

    Attributes:
      axis: the axis of blocks, -1 for the last one, or None for squares.
      stochastic: whether random bits round; scales then cover, so nothing is clipped.
      rotated: whether blocks are rotated first.
    """

    axis: int | None
    stochastic: bool
    rotated: bool


class _Number(NamedTuple):
    """The codes of a number in the top bits of a float32.

    Attributes:
      place: the bit of the float32 that is the code's last one.
      moved: the distance by which exponents move down.
    """

    place: int
    moved: int


_E2M1 = _Number(22, 126)
_E4M3 = _Number(20, 120)


class _Portable(Portable):
    """Elementary operations under flushed subnormals, as XLA has them on CPUs.

    `_Device` uses instructions of a GPU.
    """

    def flushed(self, x: Array) -> Array:
        """Return x with +0 for subnormals and zeros."""
        return float_bits.flushed(to_bits(x))

    def reciprocal(self, x: Array) -> Array:
        """Return 1 / x, approximately; meaningless for zero."""
        return 1 / x

    def ceil(self, x: Array) -> Array:
        """Return the int32 not below x, for 0 <= x < 2**31."""
        return jnp.ceil(x).astype(jnp.int32)

    def widen(self, bits: Array, number: _Number) -> Array:
        """Return the float32 value of a code at its place in `bits`."""
        return float_bits.scale_down(bits, jnp.int32(-number.moved))

    def quotient(
        self,
        x: Array,
        inverse: Array,
        number: _Number,
    ) -> Array:
        """Return the approximate bits of x * inverse with exponents moved down.

        They include subnormals, and mean nothing for inf and NaN.
        """
        return float_bits.scale_up(x * inverse, jnp.int32(-number.moved))

    def rest(
        self,
        x: Array,
        bits: Array,
        divisor: Array,
        number: _Number,
    ) -> Array:
        """Return a float with the sign of x - value * divisor.

        The value has five digits; `bits` hold it with its exponent moved down.
        """
        value = self.widen(bits, number)
        high = from_bits(to_bits(divisor) & -(1 << 12))
        low = divisor - high
        return (x - value * high) - value * low

    def divide_to_odd(
        self,
        a: Array,
        b: Array,
        inverse: Array,
    ) -> Array:
        """Return `float_bits.divide_to_odd` with 23 digits, for floats a >= 0 and
        b > 0.
        """
        return float_bits.divide_to_odd(to_bits(a), to_bits(b), MANTISSA_BITS)


class _Device(_Portable, Instructions):
    """The same operations by instructions of a GPU.

    They keep subnormals unless an instruction says `ftz`.
    """

    def flushed(self, x: Array) -> Array:
        return self.run("add.rn.ftz.f32 $0, $1, 0f00000000;", x)

    def reciprocal(self, x: Array) -> Array:
        return self.run("rcp.approx.ftz.f32 $0, $1;", x)

    def ceil(self, x: Array) -> Array:
        text = "{ .reg .s32 t; cvt.rpi.s32.f32 t, $1; mov.b32 $0, t; }"
        return to_bits(self.run(text, x))

    def widen(self, bits: Array, number: _Number) -> Array:
        power = (127 + number.moved) << MANTISSA_BITS
        return self.run(f"mul.rn.f32 $0, $1, 0f{power:08X};", from_bits(bits))

    def quotient(
        self,
        x: Array,
        inverse: Array,
        number: _Number,
    ) -> Array:
        down = inverse * 2.0**-number.moved
        return to_bits(self.run("mul.rn.f32 $0, $1, $2;", x, down))

    def rest(
        self,
        x: Array,
        bits: Array,
        divisor: Array,
        number: _Number,
    ) -> Array:
        # A scale of 2**-9 and its like, times 2**126, are float32.
        up = divisor * 2.0**number.moved
        return self._fused_rest(x, from_bits(bits), up)

    def divide_to_odd(
        self,
        a: Array,
        b: Array,
        inverse: Array,
    ) -> Array:
        # From a quotient with an error below its last digit, and the sign of the
        # remainder.
        text = (
            "{ .reg .f32 q, n, e; mul.rn.f32 q, $1, $3; neg.f32 n, $2;"
            " fma.rn.f32 e, n, q, $1; fma.rn.f32 $0, e, $3, q; }"
        )
        quotient = self.run(text, a, b, inverse)
        rest = self._fused_rest(a, b, quotient)
        below = to_bits(quotient) + (to_bits(rest) >> 31)
        return from_bits(below | (rest != 0).astype(jnp.int32))

    def _fused_rest(self, x: Array, a: Array, b: Array) -> Array:
        """Return x - a * b; the sign of a fused operation is exact."""
        text = "{ .reg .f32 n; neg.f32 n, $2; fma.rn.f32 $0, n, $3, $1; }"
        return self.run(text, x, a, b)


# Blocks
# --------------------------------------------------------------------------------------


def words_of(
    outer: Array,
    signs: Array | None,
    key: KeyWords | None,
) -> Array:
    """Return the scalars of a call as uint32 `[32]`.

    They begin with the lifted scale of the tensor, the lift, the least product of that
    scale and another one, and the divisor of amax that gives a scale, with its
    reciprocal.
    """
    # The lift brings the scale of the tensor into the binade of 2**-9; it is 1 for a
    # tensor of zeros.
    exponent = (to_bits(outer) >> MANTISSA_BITS) - 127
    lift = float_bits.power_of_two(jnp.where(outer > 0, -9 - exponent, 0))
    divisor = outer * LARGEST * lift
    inverse = 1 / jnp.where(divisor == 0, 1.0, divisor)
    floats = jnp.stack([outer * lift, lift, TINY * lift, divisor, inverse])
    floats = jnp.pad(floats, (0, _SIGNS - floats.size))
    turn = jnp.ones(SIDE, jnp.float32) if signs is None else signs
    floats = jnp.concatenate([floats, turn.astype(jnp.float32)])
    words = lax.bitcast_convert_type(floats, jnp.uint32)
    return jnp.concatenate([words, jnp.stack(key or keys(0))])


def numbers(
    kind: Kind,
    words: Array,
    x: Arrays,
    first: Array,
    instruct: Instruct | None = None,
) -> Arrays:
    """Return the numbers of blocks in 16 arrays, in 16 bfloat16 arrays.

    Args:
      kind: the kind of quantization.
      words: `words_of`, an array or a reference.
      x: bfloat16 or float32; array i has value i of every block.
      first: the index of each block's first value, from which random bits follow.
      instruct: runs PTX in a compiled kernel.

    Returns:
      Codes times scales. A block with inf or NaN is NaN.
    """
    do = _Portable() if instruct is None else _Device(instruct)
    outer, lift, tiny, divisor, inverse = [from_bits(words[at]) for at in range(5)]
    x = [value.astype(jnp.float32) for value in x]
    if kind.rotated:
        signs = [from_bits(words[_SIGNS + at]) for at in range(SIDE)]
        x = rotate_arrays(x, signs, do.flushed)
    lifted = [do.scaled(jnp.abs(value), lift, jnp.float32) for value in x]
    largest = functools.reduce(jnp.maximum, [to_bits(value) for value in lifted])
    amax = from_bits(largest)
    code = _rounded(do, _E4M3, amax, divisor, inverse, covers=kind.stochastic)
    code = jnp.clip(code, 1, _LARGEST_SCALE)
    # In a tensor of zeros every scale is zero.
    kept = (amax >= divisor * NEGLIGIBLE) & (divisor > 0)
    scale = do.widen(jnp.where(kept, code, 0) << _E4M3.place, _E4M3)
    product = do.scaled(scale, outer, jnp.float32)
    product = jnp.where(product < tiny, 0, product)
    inverse = do.reciprocal(product)
    # If the product is zero, codes mean nothing.
    scale = jnp.where(product > 0, scale, 0)
    scale = jnp.where(largest >= INFINITY, jnp.nan, scale)
    # The indices in a block differ in their last four bits only.
    begun = begin(first ^ words[_KEY])
    found = []
    for at, value in enumerate(x):
        if kind.stochastic:
            random = finish(begun ^ jnp.uint32(at), words[_KEY + 1])
            units = do.divide_to_odd(lifted[at], product, inverse)
            code = _stochastic_code(do, units, random)
        else:
            code = _rounded(do, _E2M1, lifted[at], product, inverse)
        # As unsigned, because the code of a NaN may be negative.
        code = jnp.minimum(code.astype(jnp.uint32), 7).astype(jnp.int32)
        number = do.widen(code << _E2M1.place, _E2M1) * scale
        signed = from_bits(to_bits(number) | to_bits(value) & SIGN)
        found.append(signed.astype(jnp.bfloat16))
    return found


def _rounded(
    do: _Portable,
    number: _Number,
    x: Array,
    divisor: Array,
    inverse: Array,
    covers: bool = False,
) -> Array:
    """Return the codes of x / divisor, rounded to nearest even, or up with `covers`.

    They continue beyond the number's largest.
    """
    bits = do.quotient(x, inverse, number)
    half = 1 << (number.place - 1)
    if covers:
        # About the nearest code, or the next one if x lies above it.
        code = (bits + half) >> number.place
        rest = do.rest(x, code << number.place, divisor, number)
        return code + (rest > 0).astype(jnp.int32)
    below = bits >> number.place
    middle = below << number.place | half
    rest = to_bits(do.rest(x, middle, divisor, number))
    # Round up if rest + (1 for an odd code) > 0: a rest of +0 is the middle itself,
    # where odd codes go up.
    return below + lax.shift_right_logical(-rest - (below & 1), jnp.int32(31))


def _stochastic_code(do: _Portable, units: Array, random: Array) -> Array:
    """Return the codes of E2M1's `float_bits.round_to_grid`, "stochastic".

    `random` are `counter.random_bits`. Round up if a random k of 24 bits is below the
    24 bits after the code, so if these and 2**24 - 1 - k carry.
    """
    # As integers, of which a GPU's NaN from an infinity is the largest, too.
    bits = jnp.minimum(to_bits(units), _LARGEST_BITS)
    capped = from_bits(bits)
    # Above 1 the bits of a float are the code and the bits behind it; below 1 the steps
    # are halves.
    above = (bits - (126 << MANTISSA_BITS)) << 2
    below = do.ceil(capped * 2.0**25)
    behind = (~random >> 8).astype(jnp.int32)
    return (jnp.where(capped < 1, below, above) + behind) >> 24
