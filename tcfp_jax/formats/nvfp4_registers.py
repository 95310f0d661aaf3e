"""NVFP4's arithmetic for tiles of 16 values in registers: what a kernel runs, and what a CPU can run to check it.

A thread holds whole tiles, so that the rotation, the largest magnitude, the errors of two or three candidates and the
bytes are all made in its registers: `quantized` is written over 16 arrays, each with one value of every tile, and so is
`dequantized`, for products that multiply numbers instead of codes. They have the bits of `quantization.quantize`, with
fewer operations:

* E2M1 and E4M3 are the top bits of a float32 whose exponent is moved down so that the number's smallest normal value is
  float32's: x / s * 2**-126 >> 22 is the code of the value below x / s. The quotient may be a product by a reciprocal.
* What decides is then exact: whether x lies above the middle m of two values is the sign of x - m * s, which a GPU has
  from one fused operation, and a CPU from (x - m * high) - m * low for the two halves of s, 12 digits each.

Magnitudes are lifted by the power of two that brings the scale of the tensor to 2**-9, where neither products nor rests
leave float32's normal range.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.counter import begin, finish, keys
from tcfp_jax.formats import float_bits
from tcfp_jax.formats.float_bits import INFINITY, MANTISSA_BITS, TINY
from tcfp_jax.formats.rotation import flushed
from tcfp_jax.formats.scale_rules import CLIPPED_FROM, NEGLIGIBLE, lift_of
from tcfp_jax.formats.scales import ScaleMode

SIDE = 16
_VALUE, _SCALE = (22, 126), (20, 120)  # E2M1's and E4M3's last bit in a float32, and how far exponents move down
_LARGEST, _LARGEST_CODE = 6.0, 0x7E  # of E2M1, and E4M3's code
_LEAST_FOLDED_CODE, _LARGEST_FOLDED_CODE = 0x20, 0x7C
_WORDS = 16

Random = Callable[[int], jax.Array]  # of each of the 16 values of a tile its bits


class Options(NamedTuple):
    """How tiles find scales and are rounded, and whether they are rotated first."""

    rule: ScaleMode
    rounding: Literal["even", "stochastic"]
    rotated: bool

    @property
    def divisors(self) -> tuple[float, ...]:
        """What the scale of the tensor is multiplied by, to divide the largest magnitude of a tile."""
        if self.rounding == "stochastic":
            return (_LARGEST,)
        return {"max": (_LARGEST,), "four_over_six": (_LARGEST, 4.0), "fold_exact": (CLIPPED_FROM,)}[self.rule]

    @property
    def chooses(self) -> bool:
        """Whether a tile chooses among several scales."""
        return self.rounding == "even" and self.rule != "max"


class Divisor(NamedTuple):
    """A positive float32 to divide by, as `Portable` or `Device` wants it for one number; zero divides into nonsense.

    Attributes:
      high, low: two halves of 12 digits; on a device the divisor times 2**moved, and nothing.
      inverse: the reciprocal, roughly; on a device times 2**-moved.
    """

    high: jax.Array
    low: jax.Array
    inverse: jax.Array


def words(options: Options, outer: jax.Array, signs: jax.Array | None, key: Any) -> jax.Array:
    """The scalars of a call, uint32 `[16 or 32]`: of the tensor's scale, the key's words, and the signs."""
    lift = lift_of(outer)
    lifted = outer * lift
    parts = [outer * jnp.float32(divisor) * lift for divisor in options.divisors]
    parts = [part for value in parts for part in (value, 1 / jnp.where(value == 0, 1.0, value))]
    floats = jnp.stack([lifted, lift, jnp.float32(TINY) * lift, *parts]).astype(jnp.float32)
    floats = jnp.pad(floats, (0, _WORDS - 2 - floats.size))
    found = [lax.bitcast_convert_type(floats, jnp.uint32), jnp.stack(keys(0) if key is None else key)]
    if options.rotated:
        flips = jnp.ones(SIDE) if signs is None else signs
        found.append(lax.bitcast_convert_type(flips.astype(jnp.float32), jnp.uint32))
    return jnp.concatenate(found)


class Portable:
    """Elementary operations where subnormals are flushed, as under XLA on CPUs; `Device` has those of a GPU."""

    def multiply(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """A * b, rounded here and not with what is added later; subnormals are zeros, in and out."""
        return a * b

    def lift(self, x: jax.Array, by: jax.Array) -> jax.Array:
        """|x| * by; subnormals are zeros, in and out."""
        return jnp.abs(x) * by

    def largest_finite(self, values: list[jax.Array]) -> jax.Array:
        """Of magnitudes, elementwise; 0 where none is finite."""
        return largest([jnp.where(value < jnp.inf, value, 0.0) for value in values])

    def divisor(self, value: jax.Array, inverse: jax.Array, moved: int) -> Divisor:
        """The divisor for a number whose exponents are moved so far."""
        high = lax.bitcast_convert_type(lax.bitcast_convert_type(value, jnp.int32) & jnp.int32(-(1 << 12)), jnp.float32)
        return Divisor(high, value - high, inverse)

    def quotient(self, x: jax.Array, divisor: Divisor, moved: int) -> jax.Array:
        """int32 bits of x / divisor * 2**-moved, roughly, subnormals included; of anything where x is not finite."""
        return float_bits.scale_up(x * divisor.inverse, jnp.int32(-moved))

    def rest(self, x: jax.Array, value: jax.Array, divisor: Divisor, moved: int) -> jax.Array:
        """A float of the sign of x - value * 2**moved * divisor for bits of a value of five digits; +0 for none."""
        wide = self.widen(value, moved)
        return (x - wide * divisor.high) - wide * divisor.low

    def widen(self, bits: jax.Array, moved: int) -> jax.Array:
        """The float32 of bits times 2**moved."""
        return float_bits.scale_down(bits, jnp.int32(-moved))

    def reciprocal(self, x: jax.Array, exactly: bool) -> jax.Array:
        """1 / x, correctly rounded if `exactly`; of zero anything."""
        return float_bits.divide(jnp.full(x.shape, 127 << 23, jnp.int32), lax.bitcast_convert_type(x, jnp.int32))

    def divide_to_odd(self, a: jax.Array, b: jax.Array, inverse: jax.Array) -> jax.Array:
        """See `float_bits.divide_to_odd`, of 23 digits, for floats a >= 0 and b > 0."""
        as_bits = lambda x: lax.bitcast_convert_type(x, jnp.int32)
        return float_bits.divide_to_odd(as_bits(a), as_bits(b), MANTISSA_BITS)

    def ceil(self, x: jax.Array) -> jax.Array:
        """The integer not below x >= 0, int32; of x >= 2**31 anything."""
        return jnp.ceil(x).astype(jnp.int32)

    def flushed(self, x: jax.Array) -> jax.Array:
        """X with zeros of one sign for subnormals and zeros."""
        return flushed(x)

    def nearest(self, x: jax.Array) -> jax.Array:
        """The nearest multiple of 2**-8, ties to even, of 0 <= x < 2**14."""
        return lax.round(x * jnp.float32(256), lax.RoundingMethod.TO_NEAREST_EVEN) * jnp.float32(2.0**-8)


class Device(Portable):
    """The same by a GPU's own instructions, which keep subnormals unless they are told not to."""

    def run(self, assembly: str, *values: jax.Array) -> jax.Array:
        """What an instruction, or several, make of float32 values, elementwise."""
        from jax.experimental.pallas import triton as plgpu

        shape = jnp.broadcast_shapes(*(jnp.shape(x) for x in values))
        return plgpu.elementwise_inline_asm(
            assembly, args=[jnp.broadcast_to(x, shape) for x in values], pack=1,
            constraints="=f" + ",f" * len(values), result_shape_dtypes=[jax.ShapeDtypeStruct(shape, jnp.float32)],
        )[0]  # fmt: skip

    def multiply(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """A * b, rounded here; subnormals are zeros, in and out."""
        return self.run("mul.rn.ftz.f32 $0, $1, $2;", a, b)

    def lift(self, x: jax.Array, by: jax.Array) -> jax.Array:
        """|x| * by; subnormals are zeros, in and out."""
        return self.run("{ .reg .f32 t; abs.f32 t, $1; mul.rn.ftz.f32 $0, t, $2; }", x, by)

    def largest_finite(self, values: list[jax.Array]) -> jax.Array:
        """Of magnitudes, elementwise; x * 0 + x makes NaN of infinities, which the device's maximum leaves aside."""
        found = [self.run("fma.rn.f32 $0, $1, 0f00000000, $1;", value) for value in values]
        return functools.reduce(lambda a, b: self.run("max.f32 $0, $1, $2;", a, b), [jnp.zeros_like(found[0]), *found])

    def divisor(self, value: jax.Array, inverse: jax.Array, moved: int) -> Divisor:
        """The divisor for a number whose exponents are moved so far: 2**-9 and its like times 2**126 are float32."""
        return Divisor(value * jnp.float32(2.0**moved), value, inverse * jnp.float32(2.0**-moved))

    def quotient(self, x: jax.Array, divisor: Divisor, moved: int) -> jax.Array:
        """int32 bits of x / divisor * 2**-moved, roughly, subnormals included."""
        return lax.bitcast_convert_type(self.run("mul.rn.f32 $0, $1, $2;", x, divisor.inverse), jnp.int32)

    def rest(self, x: jax.Array, value: jax.Array, divisor: Divisor, moved: int) -> jax.Array:
        """A float of the sign of x - value * 2**moved * divisor: of a fused operation the sign is exact."""
        small = lax.bitcast_convert_type(value, jnp.float32)
        return self.run("{ .reg .f32 n; neg.f32 n, $2; fma.rn.f32 $0, n, $3, $1; }", x, small, divisor.high)

    def widen(self, bits: jax.Array, moved: int) -> jax.Array:
        """The float32 of bits times 2**moved."""
        return self.run(f"mul.rn.f32 $0, $1, 0f{(127 + moved) << 23:08X};", lax.bitcast_convert_type(bits, jnp.float32))

    def reciprocal(self, x: jax.Array, exactly: bool) -> jax.Array:
        """1 / x, correctly rounded if `exactly`; infinite for zero."""
        return self.run("rcp.rn.f32 $0, $1;" if exactly else "rcp.approx.ftz.f32 $0, $1;", x)

    def divide_to_odd(self, a: jax.Array, b: jax.Array, inverse: jax.Array) -> jax.Array:
        """See `float_bits.divide_to_odd`: a quotient with an error below its last digit, and the sign of the rest."""
        quotient = self.run(
            "{ .reg .f32 q, n, e; mul.rn.f32 q, $1, $3; neg.f32 n, $2; fma.rn.f32 e, n, q, $1; "
            "fma.rn.f32 $0, e, $3, q; }", a, b, inverse,
        )  # fmt: skip
        rest = self.run("{ .reg .f32 n; neg.f32 n, $2; fma.rn.f32 $0, n, $3, $1; }", a, b, quotient)
        bits = lax.bitcast_convert_type(quotient, jnp.int32)
        below = bits + (lax.bitcast_convert_type(rest, jnp.int32) >> 31)
        return lax.bitcast_convert_type(below | (rest != 0).astype(jnp.int32), jnp.float32)

    def ceil(self, x: jax.Array) -> jax.Array:
        """The integer not below x >= 0, int32; of x >= 2**31 anything."""
        found = self.run("{ .reg .s32 t; cvt.rpi.s32.f32 t, $1; mov.b32 $0, t; }", x)
        return lax.bitcast_convert_type(found, jnp.int32)

    def flushed(self, x: jax.Array) -> jax.Array:
        """X with zeros of one sign for subnormals and zeros."""
        return self.run("add.rn.ftz.f32 $0, $1, 0f00000000;", x)

    def nearest(self, x: jax.Array) -> jax.Array:
        """The nearest multiple of 2**-8, ties to even, of 0 <= x < 2**14."""
        return self.run("{ .reg .f32 t; add.rn.f32 t, $1, 0f47000000; sub.rn.f32 $0, t, 0f47000000; }", x)


class Scalars(NamedTuple):
    """`words`, read: the lifted scale of the tensor, the lift, what is no product, divisors, the key and the signs."""

    outer: jax.Array
    lift: jax.Array
    tiny: jax.Array
    divisors: list[tuple[jax.Array, Divisor]]
    key: tuple[jax.Array, jax.Array]
    signs: list[jax.Array]

    @staticmethod
    def of(options: Options, do: Portable, read: Any) -> "Scalars":
        """From a function that reads one word."""
        wide = lambda at: lax.bitcast_convert_type(read(at), jnp.float32)
        values = [(wide(3 + 2 * i), wide(4 + 2 * i)) for i in range(len(options.divisors))]
        divisors = [(value, do.divisor(value, inverse, _SCALE[1])) for value, inverse in values]
        signs = [wide(_WORDS + i) for i in range(SIDE)] if options.rotated else []
        return Scalars(wide(0), wide(1), wide(2), divisors, (read(_WORDS - 2), read(_WORDS - 1)), signs)


def largest(values: list[jax.Array]) -> jax.Array:
    """Of several arrays, elementwise."""
    return functools.reduce(jnp.maximum, values)


def quantized(
    options: Options, do: Portable, scalars: Scalars, x: list[jax.Array], random: Random
) -> tuple[list[jax.Array], jax.Array]:
    """(8 bytes of codes as int32, the scale as float32) of tiles whose 16 values are `x`.

    Args:
      x: 16 arrays, float32.
      random: of one of them the bits for stochastic rounding, uint32.
    """
    lifted = [do.lift(value, scalars.lift) for value in x]
    lost = largest([lax.bitcast_convert_type(value, jnp.int32) for value in lifted]) > INFINITY
    signs = [lax.shift_right_logical(lax.bitcast_convert_type(value, jnp.int32), jnp.int32(31)) for value in x]
    codes, factor, product = _encoded(options, do, scalars, lifted, random)
    packed = [_packed(codes[s : s + 8], signs[s : s + 8], product > 0) for s in (0, 8)]
    found = [(jnp.where(lost, 0, word) >> place) & 255 for word in packed for place in (0, 8, 16, 24)]
    return found, jnp.where(lost, jnp.float32(jnp.nan), factor)


def dequantized(
    options: Options, do: Portable, scalars: Scalars, x: list[jax.Array], random: Random
) -> list[jax.Array]:
    """Code times scale of each of the 16 values, float32; NaN in a tile with NaN or inf."""
    lifted = [do.lift(value, scalars.lift) for value in x]
    lost = largest([lax.bitcast_convert_type(value, jnp.int32) for value in lifted]) >= INFINITY
    codes, factor, product = _encoded(options, do, scalars, lifted, random)
    factor = jnp.where(product > 0, factor, jnp.float32(0))
    factor = jnp.where(lost, jnp.float32(jnp.nan), factor)
    values = [do.widen(code << _VALUE[0], _VALUE[1]) * factor for code in codes]
    as_bits = lambda x: lax.bitcast_convert_type(x, jnp.int32)
    signed = [as_bits(value) | as_bits(of) & jnp.int32(-(1 << 31)) for value, of in zip(values, x, strict=True)]
    return [lax.bitcast_convert_type(bits, jnp.float32) for bits in signed]


def _encoded(
    options: Options, do: Portable, scalars: Scalars, x: list[jax.Array], random: Random
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    """(codes, any if the product is 0; the tile's scale; its product with the tensor's) of lifted magnitudes `x`."""
    scale, *others = _scale_codes(options, do, scalars, x)
    if options.chooses:
        finite = [jnp.where(value < jnp.inf, value, 0.0) for value in x]
        least = _error(do, scalars, finite, scale)
        for other in others:
            error = _error(do, scalars, finite, other)
            scale, least = jnp.where(error < least, other, scale), jnp.minimum(error, least)
    factor, product = _factors(do, scalars, scale)
    inverse = do.reciprocal(product, False)
    if options.rounding == "stochastic":
        odd = [do.divide_to_odd(value, product, inverse) for value in x]
        codes = [_stochastic_code(do, q, random(at)) for at, q in enumerate(odd)]
    else:
        divisor = do.divisor(product, inverse, _VALUE[1])
        codes = [_code(do, value, divisor, _VALUE) for value in x]
    # As unsigned: of NaN a code may be negative.
    return [jnp.minimum(code.astype(jnp.uint32), 7).astype(jnp.int32) for code in codes], factor, product


def _factors(do: Portable, scalars: Scalars, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(the scale of a code, its product with the tensor's)."""
    factor = do.widen(scale << _SCALE[0], _SCALE[1])
    product = do.multiply(factor, scalars.outer)
    return factor, jnp.where(product < scalars.tiny, jnp.float32(0), product)


def _packed(codes: list[jax.Array], signs: list[jax.Array], nonzero: jax.Array) -> jax.Array:
    """Eight codes and their signs in a word, the first in its lowest bits; of zeros only the signs."""
    word = jnp.zeros_like(codes[0])
    for code, sign in zip(codes[::-1], signs[::-1], strict=True):
        word = (((word << 1) | sign) << 3) + code
    return jnp.where(nonzero, word, word & jnp.int32(-0x77777778))


def _scale_codes(options: Options, do: Portable, scalars: Scalars, x: list[jax.Array]) -> list[jax.Array]:
    """The E4M3 codes of the scales among which each tile chooses; see `scale_rules.tile_scales`."""
    amax = do.largest_finite(x)
    covering = options.rule == "fold_exact" or options.rounding == "stochastic"
    round_scale = _covering_code if covering else _code
    least = _LEAST_FOLDED_CODE if options.rule == "fold_exact" else 1
    found = []
    for value, divisor in scalars.divisors:
        code = jnp.clip(round_scale(do, amax, divisor, _SCALE), least, _LARGEST_CODE)
        # Under a tensor of zeros nothing has a scale.
        found.append(jnp.where((amax >= value * jnp.float32(NEGLIGIBLE)) & (value > 0), code, 0))
    if options.rule != "fold_exact":
        return found
    found = [_folded(found[0])]
    while len(found) < (3 if options.rounding == "even" else 1):
        found.append(jnp.where(found[-1] > 0, _folded(found[-1] + 1), 0))
    return found


def _folded(code: jax.Array) -> jax.Array:
    """The smallest E4M3 code not below `code`, 0 or a normal number's, whose mantissa is 1, 1.25 or 1.5."""
    even = (code + 1) & ~1
    return jnp.minimum(even + jnp.where((even & 6) == 6, 2, 0), _LARGEST_FOLDED_CODE)


def _code(do: Portable, x: jax.Array, divisor: Divisor, number: tuple[int, int]) -> jax.Array:
    """Codes of x / divisor rounded to nearest even, as far as the number's exponents go and beyond its largest."""
    place, moved = number
    bits = do.quotient(x, divisor, moved)
    below = bits >> place
    middle = (bits & jnp.int32(-(1 << place))) | jnp.int32(1 << (place - 1))
    rest = lax.bitcast_convert_type(do.rest(x, middle, divisor, moved), jnp.int32)
    # Up where rest + (1 for an odd code) > 0: +0 is the middle itself, from which an odd code goes up; none is -0.
    return below + lax.shift_right_logical(-rest - (below & 1), jnp.int32(31))


def _covering_code(do: Portable, x: jax.Array, divisor: Divisor, number: tuple[int, int]) -> jax.Array:
    """Codes of x / divisor rounded up: the nearest one, roughly, or the next where x lies above it."""
    place, moved = number
    code = (do.quotient(x, divisor, moved) + (1 << (place - 1))) >> place
    return code + (do.rest(x, code << place, divisor, moved) > 0).astype(jnp.int32)


def bits_of_tiles(scalars: Scalars, first: jax.Array) -> Random:
    """`counter.random_bits` of each value, whose indices in a tile follow each other: the last four bits of one."""
    k0, k1 = scalars.key
    begun = begin(first ^ k0)
    return lambda at: finish(begun ^ jnp.uint32(at), k1)


def _stochastic_code(do: Portable, units: jax.Array, random: jax.Array) -> jax.Array:
    """`float_bits.round_to_grid` of E2M1, "stochastic", as codes.

    Up where a random k of 24 bits is below the 24 bits behind the code: where these and 2**24 - 1 - k carry.
    """
    capped = jnp.minimum(units, jnp.float32(_LARGEST))
    # Above 1 a float is code and bits already; below it are steps of a half.
    above = (lax.bitcast_convert_type(capped, jnp.int32) - (126 << 23)) << 2
    below = do.ceil(capped * jnp.float32(2.0**25))
    return (jnp.where(capped < 1, below, above) + (~random >> 8).astype(jnp.int32)) >> 24


def _error(do: Portable, scalars: Scalars, x: list[jax.Array], scale: jax.Array) -> jax.Array:
    """2**-16 of `scale_rules.score` of finite magnitudes under a scale; float32 holds the sum exactly in any order.

    Of a quotient that is rounded to 2**-8, on which all middles of codes lie, the nearest code is as far as its own.
    """
    factor, product = _factors(do, scalars, scale)
    inverse, one = do.reciprocal(product, True), do.divisor(jnp.float32(1), jnp.float32(1), _VALUE[1])
    total = jnp.zeros_like(x[0])
    for value in x:
        units = do.nearest(jnp.minimum(do.multiply(value, inverse), 8.0))
        code = (do.quotient(units, one, _VALUE[1]) + (1 << (_VALUE[0] - 1))) & jnp.int32(-(1 << _VALUE[0]))
        error = do.rest(units, jnp.minimum(code, 7 << _VALUE[0]), one, _VALUE[1])
        total = total + error * error
    return do.multiply(jnp.where(product > 0, total, 0.0), do.multiply(factor, factor))
