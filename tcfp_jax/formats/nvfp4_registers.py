"""NVFP4's arithmetic for tiles of 16 values in registers: the kernel runs it, and a CPU
can run it in tests.

A thread holds whole tiles, so the rotation, the largest magnitude, the errors of two or
three candidates and the bytes never leave its registers. `compute` works on 16 arrays,
each with one value of every tile. It has the bits of `quantization.quantize`, with
fewer operations:

* E2M1 and E4M3 are the top bits of a float32 whose exponent is moved down so that the
  number's smallest normal value is float32's: x / s * 2**-126 >> 22 is the code of the
  value below x / s. The quotient may be a product by a reciprocal.
* The decision is then exact: x lies above the middle m of two values if x - m * s > 0.
  A GPU has that sign from one fused operation, a CPU from (x - m * high) - m * low for
  the two halves of s, 12 digits each.

Magnitudes are multiplied by the power of two that brings the scale of the tensor to
2**-9 ("lifted"), so that products and remainders stay in float32's normal range.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.arithmetic import Instruct
from pallas_kernels.counter import begin, finish, keys
from tcfp_jax.formats import float_bits
from tcfp_jax.formats.float_bits import INFINITY, MANTISSA_BITS, TINY
from tcfp_jax.formats.rotation import rotate_arrays
from tcfp_jax.formats.scale_rules import CLIPPED_FROM, NEGLIGIBLE
from tcfp_jax.formats.scales import ScaleMode

SIDE = 16
# The place of E2M1's and of E4M3's last bit in a float32, and the distance by which
# exponents move down.
_VALUE, _SCALE = (22, 126), (20, 120)
_LARGEST, _LARGEST_CODE = 6.0, 0x7E  # E2M1's value, E4M3's code
_LEAST_FOLDED_CODE, _LARGEST_FOLDED_CODE = 0x20, 0x7C
_WORDS = 16

Place = Literal["last", "first", "squares"]
Key = tuple[jax.Array, jax.Array]
Arrays = list[jax.Array]
Random = Callable[[int], jax.Array]  # random bits by the place of a value in its tile


class Options(NamedTuple):
    """One kind of pass: the rule of scales, the rounding, a rotation of tiles before
    it, the output, and tiles' axis.

    The output "codes" is uint8 `[..., k / 2]` and scales `[..., k / 16]`, not down the
    first axis. "bfloat16" is code times scale of every value, and "amax" the int32 bits
    of the largest finite magnitude after the rotation, `[]`. Squares have no kernel.
    """

    rule: ScaleMode
    rounding: Literal["even", "stochastic"]
    rotated: bool
    output: Literal["codes", "bfloat16", "amax"] = "codes"
    place: Place = "last"

    @property
    def divisors(self) -> tuple[float, ...]:
        """For each candidate the factor f: the scale is amax / (f * outer) of a
        tile.
        """
        if self.rounding == "stochastic":
            return (_LARGEST,)
        return {
            "max": (_LARGEST,),
            "four_over_six": (_LARGEST, 4.0),
            "fold_exact": (CLIPPED_FROM,),
        }[self.rule]

    def words(
        self, outer: jax.Array, signs: jax.Array | None, key: Key | None
    ) -> jax.Array:
        """Return the scalars of a call as uint32 `[16 or 32]`: the tensor's scale, its
        multiples, key and signs.
        """
        # The lift brings the scale of the tensor into the binade of 2**-9; it is 1 for
        # a tensor of zeros.
        exponent = (lax.bitcast_convert_type(outer, jnp.int32) >> MANTISSA_BITS) - 127
        lift = float_bits.power_of_two(jnp.where(outer > 0, -9 - exponent, 0))
        lifted = outer * lift
        parts = [outer * jnp.float32(divisor) * lift for divisor in self.divisors]
        parts = [
            part
            for value in parts
            for part in (value, 1 / jnp.where(value == 0, 1.0, value))
        ]
        floats = jnp.stack([lifted, lift, jnp.float32(TINY) * lift, *parts]).astype(
            jnp.float32
        )
        floats = jnp.pad(floats, (0, _WORDS - 2 - floats.size))
        found = [
            lax.bitcast_convert_type(floats, jnp.uint32),
            jnp.stack(keys(0) if key is None else key),
        ]
        if signs is not None:
            found.append(
                lax.bitcast_convert_type(signs.astype(jnp.float32), jnp.uint32)
            )
        return jnp.concatenate(found)


class _Divisor(NamedTuple):
    """A positive float32 divisor in two halves of 12 digits, and its approximate
    reciprocal.

    On a device `high` is the divisor times 2**moved, `low` is unused, and `inverse` is
    times 2**-moved.
    """

    high: jax.Array
    low: jax.Array
    inverse: jax.Array


class _Portable:
    """Elementary operations under flushed subnormals, as XLA has them on CPUs;
    `_Device` uses instructions of a GPU.
    """

    def multiply(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """Return a * b, rounded before anything is added; subnormals are zeros, in and
        out.
        """
        return a * b

    def lift(self, x: jax.Array, by: jax.Array) -> jax.Array:
        """Return |x| * by; subnormals are zeros, in and out."""
        return jnp.abs(x) * by

    def largest_finite(self, values: list[jax.Array]) -> jax.Array:
        """Return the largest finite magnitude, elementwise; 0 if none is finite."""
        return _largest([jnp.where(value < jnp.inf, value, 0.0) for value in values])

    def divisor(self, value: jax.Array, inverse: jax.Array, moved: int) -> _Divisor:
        """Prepare a divisor for a number whose exponents move down by `moved`."""
        high = lax.bitcast_convert_type(
            lax.bitcast_convert_type(value, jnp.int32) & jnp.int32(-(1 << 12)),
            jnp.float32,
        )
        return _Divisor(high, value - high, inverse)

    def quotient(self, x: jax.Array, divisor: _Divisor, moved: int) -> jax.Array:
        """Return the approximate bits of x / divisor * 2**-moved, subnormals included;
        meaningless for inf and NaN.
        """
        return float_bits.scale_up(x * divisor.inverse, jnp.int32(-moved))

    def rest(
        self, x: jax.Array, value: jax.Array, divisor: _Divisor, moved: int
    ) -> jax.Array:
        """Return a float with the sign of x - value * 2**moved * divisor, for bits of a
        value of five digits.
        """
        wide = self.widen(value, moved)
        return (x - wide * divisor.high) - wide * divisor.low

    def widen(self, bits: jax.Array, moved: int) -> jax.Array:
        """Return the float32 of bits times 2**moved."""
        return float_bits.scale_down(bits, jnp.int32(-moved))

    def reciprocal(self, x: jax.Array, exactly: bool) -> jax.Array:
        """Return 1 / x, correctly rounded if `exactly`; meaningless for zero."""
        return float_bits.divide(
            jnp.full(x.shape, 127 << 23, jnp.int32),
            lax.bitcast_convert_type(x, jnp.int32),
        )

    def divide_to_odd(
        self, a: jax.Array, b: jax.Array, inverse: jax.Array
    ) -> jax.Array:
        """Return `float_bits.divide_to_odd` with 23 digits, for floats a >= 0 and b >
        0.
        """
        as_bits = lambda x: lax.bitcast_convert_type(x, jnp.int32)
        return float_bits.divide_to_odd(as_bits(a), as_bits(b), MANTISSA_BITS)

    def ceil(self, x: jax.Array) -> jax.Array:
        """Return the int32 not below x, for 0 <= x < 2**31."""
        return jnp.ceil(x).astype(jnp.int32)

    def flushed(self, x: jax.Array) -> jax.Array:
        """Return x with +0 for subnormals and zeros."""
        return float_bits.flushed(lax.bitcast_convert_type(x, jnp.int32))

    def nearest(self, x: jax.Array) -> jax.Array:
        """Return the nearest multiple of 2**-8, ties to even, for 0 <= x < 2**14."""
        return lax.round(
            x * jnp.float32(256), lax.RoundingMethod.TO_NEAREST_EVEN
        ) * jnp.float32(2.0**-8)


class _Device(_Portable):
    """The same operations by instructions of a GPU, which keep subnormals unless an
    instruction says `ftz`.
    """

    def __init__(self, run: Instruct) -> None:
        self.run = run

    def multiply(self, a: jax.Array, b: jax.Array) -> jax.Array:
        return self.run("mul.rn.ftz.f32 $0, $1, $2;", a, b)

    def lift(self, x: jax.Array, by: jax.Array) -> jax.Array:
        return self.run(
            "{ .reg .f32 t; abs.f32 t, $1; mul.rn.ftz.f32 $0, t, $2; }", x, by
        )

    def largest_finite(self, values: list[jax.Array]) -> jax.Array:
        # x * 0 + x turns inf into NaN, which the device's maximum ignores.
        found = [
            self.run("fma.rn.f32 $0, $1, 0f00000000, $1;", value) for value in values
        ]
        return functools.reduce(
            lambda a, b: self.run("max.f32 $0, $1, $2;", a, b),
            [jnp.zeros_like(found[0]), *found],
        )

    def divisor(self, value: jax.Array, inverse: jax.Array, moved: int) -> _Divisor:
        # 2**-9 and its like, times 2**126, are float32.
        return _Divisor(
            value * jnp.float32(2.0**moved), value, inverse * jnp.float32(2.0**-moved)
        )

    def quotient(self, x: jax.Array, divisor: _Divisor, moved: int) -> jax.Array:
        return lax.bitcast_convert_type(
            self.run("mul.rn.f32 $0, $1, $2;", x, divisor.inverse), jnp.int32
        )

    def rest(
        self, x: jax.Array, value: jax.Array, divisor: _Divisor, moved: int
    ) -> jax.Array:
        # The sign of a fused operation is exact.
        small = lax.bitcast_convert_type(value, jnp.float32)
        return self.run(
            "{ .reg .f32 n; neg.f32 n, $2; fma.rn.f32 $0, n, $3, $1; }",
            x,
            small,
            divisor.high,
        )

    def widen(self, bits: jax.Array, moved: int) -> jax.Array:
        return self.run(
            f"mul.rn.f32 $0, $1, 0f{(127 + moved) << 23:08X};",
            lax.bitcast_convert_type(bits, jnp.float32),
        )

    def reciprocal(self, x: jax.Array, exactly: bool) -> jax.Array:
        return self.run(
            "rcp.rn.f32 $0, $1;" if exactly else "rcp.approx.ftz.f32 $0, $1;", x
        )

    def divide_to_odd(
        self, a: jax.Array, b: jax.Array, inverse: jax.Array
    ) -> jax.Array:
        # From a quotient with an error below its last digit, and the sign of the
        # remainder.
        quotient = self.run(
            "{ .reg .f32 q, n, e; mul.rn.f32 q, $1, $3; neg.f32 n, $2; fma.rn.f32 e, n,"
            " q, $1; fma.rn.f32 $0, e, $3, q; }",
            a,
            b,
            inverse,
        )
        rest = self.run(
            "{ .reg .f32 n; neg.f32 n, $2; fma.rn.f32 $0, n, $3, $1; }", a, b, quotient
        )
        bits = lax.bitcast_convert_type(quotient, jnp.int32)
        below = bits + (lax.bitcast_convert_type(rest, jnp.int32) >> 31)
        return lax.bitcast_convert_type(
            below | (rest != 0).astype(jnp.int32), jnp.float32
        )

    def ceil(self, x: jax.Array) -> jax.Array:
        found = self.run("{ .reg .s32 t; cvt.rpi.s32.f32 t, $1; mov.b32 $0, t; }", x)
        return lax.bitcast_convert_type(found, jnp.int32)

    def flushed(self, x: jax.Array) -> jax.Array:
        return self.run("add.rn.ftz.f32 $0, $1, 0f00000000;", x)

    def nearest(self, x: jax.Array) -> jax.Array:
        return self.run(
            "{ .reg .f32 t; add.rn.f32 t, $1, 0f47000000; sub.rn.f32 $0, t,"
            " 0f47000000; }",
            x,
        )


class Scalars(NamedTuple):
    """The contents of `Options.words`: the lifted scale of the tensor, the lift, the
    least product, and so on.
    """

    outer: jax.Array
    lift: jax.Array
    tiny: jax.Array
    divisors: list[tuple[jax.Array, _Divisor]]
    key: Key
    signs: list[jax.Array]
    do: _Portable

    @staticmethod
    def of(
        options: Options, read: Callable[[int], jax.Array], instruct: Instruct | None
    ) -> "Scalars":
        """Read them by a function that returns one word; a kernel on a GPU computes by
        `instruct`.
        """
        do = _Portable() if instruct is None else _Device(instruct)
        wide = lambda at: lax.bitcast_convert_type(read(at), jnp.float32)
        values = [
            (wide(3 + 2 * i), wide(4 + 2 * i)) for i in range(len(options.divisors))
        ]
        divisors = [
            (value, do.divisor(value, inverse, _SCALE[1])) for value, inverse in values
        ]
        signs = [wide(_WORDS + i) for i in range(SIDE)] if options.rotated else []
        return Scalars(
            wide(0),
            wide(1),
            wide(2),
            divisors,
            (read(_WORDS - 2), read(_WORDS - 1)),
            signs,
            do,
        )

    def random(self, first: jax.Array) -> Random:
        """Return `counter.random_bits` of each value: the indices in a tile differ in
        their last four bits only.
        """
        begun = begin(first ^ self.key[0])
        return lambda at: finish(begun ^ jnp.uint32(at), self.key[1])


def _largest(values: list[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.maximum, values)


def compute(
    options: Options,
    words: Any,
    x: Arrays,
    first: jax.Array,
    instruct: Instruct | None = None,
) -> Arrays:
    """Return the results for tiles in 16 arrays, in arrays of the same shape.

    Codes are two int32 of eight codes, and the scale; numbers are 16 arrays, a largest
    magnitude is one. A tile with NaN is NaN; as numbers one with inf is, too. `first`
    is the index of each tile's first value.
    """
    scalars = Scalars.of(options, lambda at: words[at], instruct)
    random, x = scalars.random(first), [value.astype(jnp.float32) for value in x]
    do, as_bits = scalars.do, lambda x: lax.bitcast_convert_type(x, jnp.int32)
    if options.rotated:
        x = rotate_arrays(x, scalars.signs, do.flushed)
    if options.output == "amax":
        return [as_bits(do.largest_finite([jnp.abs(value) for value in x]))]
    lifted = [do.lift(value, scalars.lift) for value in x]
    largest = _largest([as_bits(value) for value in lifted])
    if options.output == "codes":
        lost = largest > INFINITY
        signs = [lax.shift_right_logical(as_bits(value), jnp.int32(31)) for value in x]
        codes, factor, product = _encoded(options, scalars, lifted, random)
        packed = [
            _packed(codes[s : s + 8], signs[s : s + 8], product > 0) for s in (0, 8)
        ]
        words = [jnp.where(lost, 0, word) for word in packed]
        return [*words, jnp.where(lost, jnp.float32(jnp.nan), factor)]
    lost = largest >= INFINITY
    codes, factor, product = _encoded(options, scalars, lifted, random)
    factor = jnp.where(product > 0, factor, jnp.float32(0))
    factor = jnp.where(lost, jnp.float32(jnp.nan), factor)
    values = [do.widen(code << _VALUE[0], _VALUE[1]) * factor for code in codes]
    signed = [
        as_bits(value) | as_bits(of) & jnp.int32(-(1 << 31))
        for value, of in zip(values, x, strict=True)
    ]
    values = [lax.bitcast_convert_type(bits, jnp.float32) for bits in signed]
    return [value.astype(jnp.bfloat16) for value in values]


def _encoded(
    options: Options, scalars: Scalars, x: Arrays, random: Random
) -> tuple[Arrays, jax.Array, jax.Array]:
    """Return (codes, the tile's scale, its product with the tensor's); if the product
    is 0, codes are meaningless.
    """
    do = scalars.do
    scale, *others = _scale_codes(options, scalars, x)
    if others:
        finite = [jnp.where(value < jnp.inf, value, 0.0) for value in x]
        least = _error(scalars, finite, scale)
        for other in others:
            error = _error(scalars, finite, other)
            scale, least = (
                jnp.where(error < least, other, scale),
                jnp.minimum(error, least),
            )
    factor, product = _factors(scalars, scale)
    inverse = do.reciprocal(product, False)
    if options.rounding == "stochastic":
        odd = [do.divide_to_odd(value, product, inverse) for value in x]
        codes = [_stochastic_code(do, q, random(at)) for at, q in enumerate(odd)]
    else:
        divisor = do.divisor(product, inverse, _VALUE[1])
        codes = [_code(do, value, divisor, _VALUE) for value in x]
    # As unsigned, because the code of a NaN may be negative.
    return (
        [jnp.minimum(code.astype(jnp.uint32), 7).astype(jnp.int32) for code in codes],
        factor,
        product,
    )


def _factors(scalars: Scalars, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (the scale of a code, its product with the tensor's)."""
    do = scalars.do
    factor = do.widen(scale << _SCALE[0], _SCALE[1])
    product = do.multiply(factor, scalars.outer)
    return factor, jnp.where(product < scalars.tiny, jnp.float32(0), product)


def _packed(
    codes: list[jax.Array], signs: list[jax.Array], nonzero: jax.Array
) -> jax.Array:
    """Return eight codes and their signs in a word, the first in its lowest bits; zeros
    keep only their signs.
    """
    word = jnp.zeros_like(codes[0])
    for code, sign in zip(codes[::-1], signs[::-1], strict=True):
        word = (((word << 1) | sign) << 3) + code
    return jnp.where(nonzero, word, word & jnp.int32(-0x77777778))


def _scale_codes(
    options: Options, scalars: Scalars, x: list[jax.Array]
) -> list[jax.Array]:
    """Return the E4M3 codes of the scales among which each tile chooses; see
    `scale_rules.tile_scales`.
    """
    do = scalars.do
    amax = do.largest_finite(x)
    covering = options.rule == "fold_exact" or options.rounding == "stochastic"
    round_scale = _covering_code if covering else _code
    least = _LEAST_FOLDED_CODE if options.rule == "fold_exact" else 1
    found = []
    for value, divisor in scalars.divisors:
        code = jnp.clip(round_scale(do, amax, divisor, _SCALE), least, _LARGEST_CODE)
        # In a tensor of zeros every scale is zero.
        found.append(
            jnp.where((amax >= value * jnp.float32(NEGLIGIBLE)) & (value > 0), code, 0)
        )
    if options.rule != "fold_exact":
        return found
    found = [_folded(found[0])]
    while len(found) < (3 if options.rounding == "even" else 1):
        found.append(jnp.where(found[-1] > 0, _folded(found[-1] + 1), 0))
    return found


def _folded(code: jax.Array) -> jax.Array:
    """Return the smallest E4M3 code not below `code` whose mantissa is 1, 1.25 or 1.5;
    `code` is 0 or normal.
    """
    even = (code + 1) & ~1
    return jnp.minimum(even + jnp.where((even & 6) == 6, 2, 0), _LARGEST_FOLDED_CODE)


def _code(
    do: _Portable, x: jax.Array, divisor: _Divisor, number: tuple[int, int]
) -> jax.Array:
    """Return the codes of x / divisor rounded to nearest even; they continue beyond the
    number's largest.
    """
    place, moved = number
    bits = do.quotient(x, divisor, moved)
    below = bits >> place
    middle = (bits & jnp.int32(-(1 << place))) | jnp.int32(1 << (place - 1))
    rest = lax.bitcast_convert_type(do.rest(x, middle, divisor, moved), jnp.int32)
    # Round up if rest + (1 for an odd code) > 0: a rest of +0 is the middle itself,
    # where odd codes go up.
    return below + lax.shift_right_logical(-rest - (below & 1), jnp.int32(31))


def _covering_code(
    do: _Portable, x: jax.Array, divisor: _Divisor, number: tuple[int, int]
) -> jax.Array:
    """Return the codes of x / divisor rounded up: about the nearest code, or the next
    one if x lies above it.
    """
    place, moved = number
    code = (do.quotient(x, divisor, moved) + (1 << (place - 1))) >> place
    return code + (do.rest(x, code << place, divisor, moved) > 0).astype(jnp.int32)


def _stochastic_code(do: _Portable, units: jax.Array, random: jax.Array) -> jax.Array:
    """Return the codes of E2M1's `float_bits.round_to_grid`, "stochastic".

    Round up if a random k of 24 bits is below the 24 bits behind the code, so if these
    and 2**24 - 1 - k carry.
    """
    # As integers, of which a GPU's NaN from an infinity is the largest, too.
    bits = jnp.minimum(
        lax.bitcast_convert_type(units, jnp.int32), np.float32(_LARGEST).view(np.int32)
    )
    capped = lax.bitcast_convert_type(bits, jnp.float32)
    # Above 1 the bits of a float are the code and the bits behind it; below 1 the steps
    # are halves.
    above = (bits - (126 << 23)) << 2
    below = do.ceil(capped * jnp.float32(2.0**25))
    return (
        jnp.where(capped < 1, below, above) + (~random >> 8).astype(jnp.int32)
    ) >> 24


def _error(scalars: Scalars, x: list[jax.Array], scale: jax.Array) -> jax.Array:
    """Return 2**-16 of the error in `quantization._better_scale` for finite magnitudes;
    float32 holds sums exactly.

    Middles of codes are multiples of 2**-8. So a quotient that is rounded to 2**-8 is
    as far from its nearest code as from the code of the exact quotient.
    """
    do = scalars.do
    factor, product = _factors(scalars, scale)
    inverse, one = (
        do.reciprocal(product, True),
        do.divisor(jnp.float32(1), jnp.float32(1), _VALUE[1]),
    )
    total = jnp.zeros_like(x[0])
    for value in x:
        units = do.nearest(jnp.minimum(do.multiply(value, inverse), 8.0))
        code = (
            do.quotient(units, one, _VALUE[1]) + (1 << (_VALUE[0] - 1))
        ) & jnp.int32(-(1 << _VALUE[0]))
        error = do.rest(units, jnp.minimum(code, 7 << _VALUE[0]), one, _VALUE[1])
        total = total + error * error
    return do.multiply(jnp.where(product > 0, total, 0.0), do.multiply(factor, factor))
