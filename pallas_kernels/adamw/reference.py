"""The definition of the fused AdamW step in plain jax.numpy: the CPU path and the oracle of the kernel.

The arithmetic is written once, in `update`, over a set of elementary operations. `Portable` has them for XLA and
interpreters, `triton.Device` for the compiled kernel; both give the same bits. That asks three things of them:

* **No contraction.** A compiler may turn `a * b + c` into one instruction that rounds once. XLA on a CPU does. So
  every product of `Portable` passes through an integer "or" with zeros that no compiler can know.
* **Correct rounding** of root and reciprocal, which CPUs give. A division `a / b` is `a * (1 / b)`, rounded twice.
* **Subnormals are zero**, in and out, as CPUs have it under XLA.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import counter, moments, numerics
from pallas_kernels.scaling import SCALE_DTYPE

Momentum = Literal["classic", "nesterov"]
Remainder = Literal["stochastic", "nearest"]
# The root is correctly rounded in five instructions from here on (below, the device's instructions want another path).
# Its own root, 2**-50, is the smallest divisor: beside it any eps that is used is large.
SMALLEST_RADICAND = 2.0**-100


@dataclass(frozen=True)
class Options:
    """What a step is asked for: the static options of `adamw`.

    Attributes:
      momentum: "classic", or "nesterov", which adds the gradient itself to the update.
      orientation: "both" also returns the transpose of the new hi.
      remainder: how lo is rounded.
    """

    momentum: Momentum = "classic"
    orientation: Literal["rows", "both"] = "rows"
    remainder: Remainder = "stochastic"


class Moments(NamedTuple):
    """Both moments of a weight [k, n] in 8 bits (`pallas_kernels.moments`).

    Attributes:
      m: E4M3 [k, n].
      m_scale: float8_e8m0fnu [k, ceil(n / 128)].
      v: uint8 [k, n].
      v_scale: uint8 [k, ceil(n / 128)].
    """

    m: jax.Array
    m_scale: jax.Array
    v: jax.Array
    v_scale: jax.Array

    @staticmethod
    def zeros(shape: tuple[int, int]) -> "Moments":
        """Those before the first step. (E8M0 has no zero, so `jnp.zeros_like` of `m_scale` would be NaN.)

        >>> [str(x.dtype) for x in Moments.zeros((2, 200))], Moments.zeros((2, 200)).m_scale.tolist()
        (['float8_e4m3fn', 'float8_e8m0fnu', 'uint8', 'uint8'], [[1.0, 1.0], [1.0, 1.0]])
        """
        k, n = shape
        few = (k, moments.block_count(n))
        one, zero = jnp.ones(few, SCALE_DTYPE), jnp.zeros(few, jnp.uint8)
        return Moments(jnp.zeros(shape, moments.E4M3), one, jnp.zeros(shape, jnp.uint8), zero)


class Rates(NamedTuple):
    """The numbers of one step: float32 scalars, and a bool.

    Attributes:
      b1, b2: decay of the moments.
      rate: of m, `lr / (1 - b1**t) / new_scale` (with Nesterov's momentum `lr * b1 / (1 - b1**(t + 1)) / new_scale`).
      rate_g: of the gradient itself, with Nesterov's momentum `lr * (1 - b1) / (1 - b1**t) / new_scale`.
      correction: of v, `1 / (1 - b2**t)`.
      eps, eps_root: as in optax. eps_root is at least 2**-100 here.
      decay: `1 - lr * weight_decay`; 1 where a weight does not decay.
      gradient_scale: what the gradient is multiplied by first.
      scale, new_scale: of the weight before and after the step, powers of two.
      keep: whether the step is taken. False leaves hi, lo and moments as they were, bit for bit; `new_scale` is to be
        `scale` then.
    """

    b1: jax.Array
    b2: jax.Array
    rate: jax.Array
    rate_g: jax.Array
    correction: jax.Array
    eps: jax.Array
    eps_root: jax.Array
    decay: jax.Array
    gradient_scale: jax.Array
    scale: jax.Array
    new_scale: jax.Array
    keep: jax.Array


class Step(NamedTuple):
    """A weight and its moments after a step.

    Attributes:
      hi, lo: E4M3 [k, n], in units of `new_scale`.
      columns: hi.T, or None where only rows were asked for.
      moments: the new ones.
      amax: float32 scalar, the largest magnitude of the new weight before it was rounded, NaN aside.
    """

    hi: jax.Array
    lo: jax.Array
    columns: jax.Array | None
    moments: Moments
    amax: jax.Array


class Coefficients(NamedTuple):
    """What the arithmetic of an element reads, float32 scalars in the order in which a kernel gets them.

    The scale of the gradient is part of what multiplies it.
    """

    b1: Any
    one_minus_b1: Any
    b2: Any
    one_minus_b2: Any
    correction: Any
    eps_root: Any
    eps: Any
    rate: Any
    rate_g: Any
    decay: Any


class Tile(NamedTuple):
    """Blocks of 128 values along the last axis, of all that a step reads and writes but the gradient.

    Scales have an axis of one there and are int32: E8M0's code of m's, the base of v's.
    """

    hi: jax.Array
    lo: jax.Array
    m: jax.Array
    m_scale: jax.Array
    v: jax.Array
    v_scale: jax.Array


class Arithmetic(Protocol):
    """The elementary operations of `update` on float32, each rounded once, to nearest."""

    def multiply(self, a: Any, b: Any) -> Any:
        """A * b, never contracted with an addition."""

    def add_exact_product(self, a: Any, b: Any, c: Any) -> Any:
        """A * b + c, where a * b has no more than float32's bits, so that contraction changes nothing."""

    def add(self, a: Any, b: Any) -> Any:
        """A + b."""

    def subtract(self, a: Any, b: Any) -> Any:
        """A - b."""

    def root(self, x: Any) -> Any:
        """The root of x >= 2**-100; NaN of an infinite x."""

    def reciprocal(self, x: Any) -> Any:
        """1 / x, of x in [2**-50, 2**125]."""

    def e4m3(self, x: Any) -> tuple[Any, Any]:
        """(x in E4M3, the same as float32): to nearest, ties to even, saturating."""

    def stochastic_e4m3(self, x: Any, inverse: Any | None, random: Any) -> Any:
        """`moments.stochastic_e4m3` of x, or of x * inverse, a power of two or NaN."""

    def add_v_bits(self, v: Any, bits: Any) -> Any:
        """`moments.magnitude_bits` of v >= 0, plus `moments.v_bits`."""

    def largest(self, x: Any) -> Any:
        """The largest |x| of each block, NaN aside."""

    def largest_or_nan(self, v: Any) -> Any:
        """The largest v >= 0 of each block, NaN above all."""


class Portable:
    """Elementary operations for XLA on a CPU and for interpreters."""

    def __init__(self, gradient: jax.Array) -> None:
        # Zero, but for a NaN, which stays a NaN whatever is or-ed to its mantissa.
        bits = lax.bitcast_convert_type(gradient, jnp.int32) & 0x7FFFFFFF
        self._zeros = (bits > moments.INFINITY).astype(jnp.int32)

    def _guard(self, x: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) | self._zeros, jnp.float32)

    def multiply(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """A * b, never contracted with an addition."""
        return self._guard(a * b)

    def add_exact_product(self, a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
        """A * b + c, contracted or not."""
        return a * b + c

    def add(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """A + b."""
        return a + b

    def subtract(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """A - b."""
        return a - b

    def root(self, x: jax.Array) -> jax.Array:
        """The root of x >= 2**-100; NaN of an infinite x."""
        return jnp.where(jnp.isfinite(x), jnp.sqrt(x), jnp.nan)

    def reciprocal(self, x: jax.Array) -> jax.Array:
        """1 / x, guarded, or XLA would make a division of the product that it is part of."""
        return self._guard(1.0 / x)

    def e4m3(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(x in E4M3, the same as float32); an infinity saturates as on the device."""
        value = numerics.round_to(jnp.where(jnp.isnan(x), x, jnp.clip(x, -448.0, 448.0)), moments.E4M3)
        return value.astype(moments.E4M3), value

    def stochastic_e4m3(self, x: jax.Array, inverse: jax.Array | None, random: jax.Array) -> jax.Array:
        """See `moments.stochastic_e4m3`."""
        return moments.stochastic_e4m3(x if inverse is None else x * inverse, random)

    def add_v_bits(self, v: jax.Array, bits: jax.Array) -> jax.Array:
        """`moments.magnitude_bits` of v >= 0, plus `moments.v_bits`."""
        return moments.magnitude_bits(v) + moments.v_bits(bits)

    def largest(self, x: jax.Array) -> jax.Array:
        """The largest |x| of each block, NaN aside."""
        return self.largest_or_nan(jnp.where(jnp.isnan(x), 0.0, x))

    def largest_or_nan(self, v: jax.Array) -> jax.Array:
        """The largest |v| of each block, NaN above all."""
        bits = jnp.max(moments.magnitude_bits(v), axis=-1, keepdims=True)
        return lax.bitcast_convert_type(bits, jnp.float32)


def update(
    do: Arithmetic, options: Options, c: Coefficients, gradient: jax.Array, old: Tile, bits: jax.Array
) -> tuple[Tile, jax.Array]:
    """(the new tile, its weight before it was rounded, in units of the new scale); `bits` are one hash an element.

    Codes have four significant bits and b1 and b2 twenty, so the products of both are exact.
    """
    wide = lambda x: x.astype(jnp.float32)
    exponent_to_float = lambda e: lax.bitcast_convert_type(e << 23, jnp.float32)
    m = do.add_exact_product(wide(old.m), exponent_to_float(old.m_scale) * c.b1, do.multiply(gradient, c.one_minus_b1))
    v = do.add_exact_product(
        moments.v_value(old.v.astype(jnp.int32), old.v_scale), c.b2,
        do.multiply(do.multiply(gradient, c.one_minus_b2), gradient),
    )  # fmt: skip
    step = do.multiply(m, c.rate)
    if options.momentum == "nesterov":
        step = do.add(step, do.multiply(gradient, c.rate_g))
    divisor = do.add(do.root(do.add(do.multiply(v, c.correction), c.eps_root)), c.eps)
    weight = do.subtract(
        do.multiply(do.add(wide(old.hi), wide(old.lo)), c.decay), do.multiply(step, do.reciprocal(divisor))
    )

    hi, rounded = do.e4m3(weight)
    rest = do.subtract(weight, rounded)
    lo = do.stochastic_e4m3(rest, None, lo_bits(bits)) if options.remainder == "stochastic" else do.e4m3(rest)[0]
    largest_m, largest_v = (lax.bitcast_convert_type(x, jnp.int32) for x in (do.largest(m), do.largest_or_nan(v)))
    # A gradient that is NaN makes both NaN; with one flag for both, only v's need be looked for.
    finite = (largest_m < moments.INFINITY) & (largest_v < moments.INFINITY) & (old.m_scale != moments.NOT_FINITE)
    m_scale, inverse = moments.m_scale(largest_m, finite)
    base = moments.v_base(largest_v, finite)
    codes = do.stochastic_e4m3(m, inverse, moments.m_bits(bits))
    v_codes = moments.v_code(do.add_v_bits(v, bits), base)
    return Tile(hi, lo, codes, m_scale, v_codes, base), weight


def lo_bits(bits: jax.Array) -> jax.Array:
    """The 20 bits of a hash that round lo: its highest. It shares 8 of them, its lowest, with m, as m's highest."""
    return (bits >> 12).astype(jnp.int32)


def twenty_bits(x: jax.Array) -> jax.Array:
    """Float32 `x` to nearest in 20 bits of mantissa, the leading one among them."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return lax.bitcast_convert_type((bits + 8) & jnp.int32(-16), jnp.float32)


def coefficients(rates: Rates) -> Coefficients:
    """What the elements' arithmetic reads of the rates; the same bits wherever they are computed."""
    one, by = jnp.float32(1), rates.gradient_scale
    return Coefficients(
        b1=twenty_bits(rates.b1),
        one_minus_b1=(one - rates.b1) * by,
        b2=twenty_bits(rates.b2),
        one_minus_b2=(one - rates.b2) * by * by,
        correction=rates.correction,
        eps_root=jnp.maximum(rates.eps_root, SMALLEST_RADICAND),
        eps=rates.eps,
        rate=rates.rate,
        rate_g=rates.rate_g * by,
        # Exact but for decay: the scales are powers of two.
        decay=rates.scale * numerics.reciprocal_pow2(rates.new_scale) * rates.decay,
    )


def adamw(
    options: Options, g: jax.Array, hi: jax.Array, lo: jax.Array, state: Moments, rates: Rates, key: jax.Array
) -> Step:
    """See `api.adamw`."""
    return at(options, g, hi, lo, state, rates, key, counter.indices(hi.shape))


def at(
    options: Options, g: jax.Array, hi: jax.Array, lo: jax.Array, state: Moments, rates: Rates, key: jax.Array,
    index: jax.Array,
) -> Step:  # fmt: skip
    """A step of a part of a weight, whose elements have these global indices; `state` is that of the part."""
    n = hi.shape[-1]
    codes = lambda x: lax.bitcast_convert_type(x, jnp.uint8)[..., None].astype(jnp.int32)
    blocks = moments.to_blocks
    gradient = blocks(g.astype(jnp.float32))
    old = Tile(blocks(hi), blocks(lo), blocks(state.m), codes(state.m_scale), blocks(state.v), codes(state.v_scale))
    bits = counter.random_bits(blocks(index), key[0], key[1])
    new, weight = update(Portable(gradient), options, coefficients(rates), gradient, old, bits)

    whole = lambda x: moments.from_blocks(x, n)
    kept = lambda new, before: jnp.where(rates.keep, new, before)
    new_hi, new_lo = kept(whole(new.hi), hi), kept(whole(new.lo), lo)
    m_scale, base = (x[..., 0].astype(jnp.uint8) for x in (new.m_scale, new.v_scale))
    after = Moments(
        kept(whole(new.m), state.m),
        kept(lax.bitcast_convert_type(m_scale, state.m_scale.dtype), state.m_scale),
        kept(whole(new.v).astype(jnp.uint8), state.v),
        kept(base, state.v_scale),
    )
    # What fills up a last block is no weight.
    values = kept(whole(weight), hi.astype(jnp.float32) + lo.astype(jnp.float32))
    largest = jnp.max(Portable(values).largest(values))
    columns = new_hi.T if options.orientation == "both" else None
    return Step(new_hi, new_lo, columns, after, largest * kept(rates.new_scale, rates.scale))
