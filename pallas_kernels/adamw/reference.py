"""The definition of the fused AdamW step in plain jax.numpy: the CPU path and the
oracle of the kernel.

The arithmetic is written once, in `update`, over a set of elementary operations.
`Portable` has them for XLA and interpreters, and a subclass in `triton` for the
compiled kernel. Both give the same bits, for which they need three properties:

* **No contraction.** A compiler may turn `a * b + c` into one instruction that rounds
  once, as XLA does on a CPU. So every product of `Portable` passes through an integer
  "or" with zeros that the compiler cannot know.
* **Correct rounding** of root and reciprocal, which CPUs have. A division `a / b` is
  `a * (1 / b)`, rounded twice.
* **Subnormals are zero**, as input and as result, as on CPUs under XLA.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import counter, moments, numerics
from pallas_kernels.operands import Orientation
from pallas_kernels.scaling import SCALE_DTYPE

# From here on the device computes a correctly rounded root in five instructions;
# smaller values need another path. Its root, 2**-50, is the smallest divisor, and any
# practical eps is large in comparison.
SMALLEST_RADICAND = 2.0**-100


@dataclass(frozen=True)
class Options:
    """Static options of `adamw`.

    Attributes:
      momentum: "classic", or "nesterov", which adds the gradient itself to the update.
      orientation: "both" also returns the transpose of the new hi.
      remainder: rounding of lo, "stochastic" or "nearest".

    Raises:
      ValueError: an unknown name.
    """

    momentum: Literal["classic", "nesterov"] = "classic"
    orientation: Orientation = "rows"
    remainder: Literal["stochastic", "nearest"] = "stochastic"

    def __post_init__(self) -> None:
        allowed = dict(
            momentum=("classic", "nesterov"),
            orientation=("rows", "both"),
            remainder=("stochastic", "nearest"),
        )
        for name, names in allowed.items():
            given = getattr(self, name)
            if given not in names:
                raise ValueError(
                    f'{name}={given!r} is unknown; use "{names[0]}" or "{names[1]}"'
                )


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
        """Return the moments before the first step; E8M0 has no zero, so
        `jnp.zeros_like` of `m_scale` would be NaN.

        >>> [str(x.dtype) for x in Moments.zeros((2, 200))], Moments.zeros((2, 200)).m_scale.tolist()
        (['float8_e4m3fn', 'float8_e8m0fnu', 'uint8', 'uint8'], [[1.0, 1.0], [1.0, 1.0]])
        """
        k, n = shape
        few = (k, -(-n // moments.BLOCK))
        one, zero = jnp.ones(few, SCALE_DTYPE), jnp.zeros(few, jnp.uint8)
        return Moments(
            jnp.zeros(shape, moments.E4M3), one, jnp.zeros(shape, jnp.uint8), zero
        )


class Rates(NamedTuple):
    """The numbers of one step: float32 scalars, and a bool.

    Attributes:
      b1, b2: decay of the moments.
      rate: factor of m, `lr / (1 - b1**t) / new_scale` (with Nesterov's momentum
        `lr * b1 / (1 - b1**(t + 1)) / new_scale`).
      rate_g: factor of the gradient itself with Nesterov's momentum,
        `lr * (1 - b1) / (1 - b1**t) / new_scale`.
      correction: factor of v, `1 / (1 - b2**t)`.
      eps, eps_root: as in optax. eps_root is at least 2**-100 here.
      decay: `1 - lr * weight_decay`; 1 for a weight that does not decay.
      gradient_scale: factor of the gradient, applied first.
      scale, new_scale: scale of the weight before and after the step, powers of two.
      keep: whether the step is taken. False leaves hi, lo and moments unchanged, bit
        for bit; `new_scale` must be `scale` then.
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
      columns: hi.T, or None if only rows were asked for.
      moments: the new moments.
      amax: float32 scalar, the largest magnitude of the new weight before it was
        rounded, NaN aside.
    """

    hi: jax.Array
    lo: jax.Array
    columns: jax.Array | None
    moments: Moments
    amax: jax.Array


class Coefficients(NamedTuple):
    """Coefficients of the arithmetic of an element, float32 scalars in the order in
    which a kernel gets them.

    The factors of the gradient contain its scale.
    """

    b1: jax.Array
    one_minus_b1: jax.Array
    b2: jax.Array
    one_minus_b2: jax.Array
    correction: jax.Array
    eps_root: jax.Array
    eps: jax.Array
    rate: jax.Array
    rate_g: jax.Array
    decay: jax.Array

    @staticmethod
    def of(rates: Rates) -> "Coefficients":
        """Return the coefficients of a step; they have the same bits on every
        backend.
        """

        def twenty_bits(x: jax.Array) -> jax.Array:
            bits = lax.bitcast_convert_type(x, jnp.int32)
            return lax.bitcast_convert_type((bits + 8) & jnp.int32(-16), jnp.float32)

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
            # Only decay rounds here: the scales are powers of two.
            decay=rates.scale * numerics.reciprocal_pow2(rates.new_scale) * rates.decay,
        )


class State(NamedTuple):
    """Blocks of 128 values along the last axis of all arrays that a step replaces.

    Scales have an axis of one instead and are int32: the E8M0 code of m's scale, and
    the base of v.
    """

    hi: jax.Array
    lo: jax.Array
    m: jax.Array
    m_scale: jax.Array
    v: jax.Array
    v_scale: jax.Array


class Portable:
    """Elementary operations of `update` on float32, each rounded once, for XLA on a CPU
    and for interpreters.

    The kernel on a device has a subclass with the same results.
    """

    def __init__(self, gradient: jax.Array) -> None:
        # Zero except for a NaN, which stays a NaN after any "or" with its mantissa.
        bits = lax.bitcast_convert_type(gradient, jnp.int32) & 0x7FFFFFFF
        self._zeros = (bits > moments.INFINITY).astype(jnp.int32)

    def _guard(self, x: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(
            lax.bitcast_convert_type(x, jnp.int32) | self._zeros, jnp.float32
        )

    def multiply(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """Return a * b, never contracted with an addition."""
        return self._guard(a * b)

    def add_exact_product(self, a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
        """Return a * b + c for an a * b that float32 holds exactly, so that contraction
        changes nothing.
        """
        return a * b + c

    def add(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """Return a + b."""
        return a + b

    def subtract(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """Return a - b."""
        return a - b

    def root(self, x: jax.Array) -> jax.Array:
        """Return the root of x >= 2**-100; NaN for an infinite x."""
        return jnp.where(jnp.isfinite(x), jnp.sqrt(x), jnp.nan)

    def reciprocal(self, x: jax.Array) -> jax.Array:
        """Return 1 / x for x in [2**-50, 2**125], guarded, or XLA would turn the
        product with it into a division.
        """
        return self._guard(1.0 / x)

    def e4m3(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return (x in E4M3, the same value as float32): to nearest, ties to even; an
        infinity saturates as well.
        """
        value = numerics.round_to(
            jnp.where(jnp.isnan(x), x, jnp.clip(x, -448.0, 448.0)), moments.E4M3
        )
        return value.astype(moments.E4M3), value

    def stochastic_e4m3(
        self, x: jax.Array, inverse: jax.Array | None, random: jax.Array
    ) -> jax.Array:
        """Return `moments.stochastic_e4m3` of x, or of x * inverse, a power of two or
        NaN.
        """
        return moments.stochastic_e4m3(x if inverse is None else x * inverse, random)

    def add_v_bits(self, v: jax.Array, bits: jax.Array) -> jax.Array:
        """Return `moments.magnitude_bits` of v >= 0, plus `moments.v_bits`."""
        return moments.magnitude_bits(v) + moments.v_bits(bits)

    def largest(self, x: jax.Array) -> jax.Array:
        """Return the largest |x| of each block that is not NaN."""
        return self.largest_or_nan(jnp.where(jnp.isnan(x), 0.0, x))

    def largest_or_nan(self, v: jax.Array) -> jax.Array:
        """Return the largest |v| of each block, or NaN if it has one."""
        bits = jnp.max(moments.magnitude_bits(v), axis=-1, keepdims=True)
        return lax.bitcast_convert_type(bits, jnp.float32)


def update(
    do: Portable,
    options: Options,
    c: Coefficients,
    gradient: jax.Array,
    old: State,
    bits: jax.Array,
) -> tuple[State, jax.Array]:
    """Return (the new state, the weight before rounding, in units of the new scale);
    `bits` are one hash an element.

    Codes have four significant bits and b1 and b2 twenty, so the products of both are
    exact.
    """
    wide = lambda x: x.astype(jnp.float32)
    exponent_to_float = lambda e: lax.bitcast_convert_type(e << 23, jnp.float32)
    m = do.add_exact_product(
        wide(old.m),
        exponent_to_float(old.m_scale) * c.b1,
        do.multiply(gradient, c.one_minus_b1),
    )
    v = do.add_exact_product(
        moments.v_value(old.v.astype(jnp.int32), old.v_scale),
        c.b2,
        do.multiply(do.multiply(gradient, c.one_minus_b2), gradient),
    )
    step = do.multiply(m, c.rate)
    if options.momentum == "nesterov":
        step = do.add(step, do.multiply(gradient, c.rate_g))
    divisor = do.add(do.root(do.add(do.multiply(v, c.correction), c.eps_root)), c.eps)
    weight = do.subtract(
        do.multiply(do.add(wide(old.hi), wide(old.lo)), c.decay),
        do.multiply(step, do.reciprocal(divisor)),
    )

    hi, rounded = do.e4m3(weight)
    rest = do.subtract(weight, rounded)
    if options.remainder == "stochastic":
        # The 20 highest bits of the hash; m uses the lowest 8 of them as its highest.
        lo = do.stochastic_e4m3(rest, None, (bits >> 12).astype(jnp.int32))
    else:
        lo, _ = do.e4m3(rest)
    largest_m, largest_v = (
        lax.bitcast_convert_type(x, jnp.int32)
        for x in (do.largest(m), do.largest_or_nan(v))
    )
    # A NaN gradient makes both moments NaN, so one flag for both needs to search only v
    # for NaN.
    finite = (
        (largest_m < moments.INFINITY)
        & (largest_v < moments.INFINITY)
        & (old.m_scale != moments.NOT_FINITE)
    )
    m_scale, inverse = moments.m_scale(largest_m, finite)
    base = moments.v_base(largest_v, finite)
    codes = do.stochastic_e4m3(
        m, inverse, (bits & jnp.uint32(moments.LOW_20)).astype(jnp.int32)
    )
    v_codes = moments.v_code(do.add_v_bits(v, bits), base)
    return State(hi, lo, codes, m_scale, v_codes, base), weight


def adamw(
    options: Options,
    g: jax.Array,
    hi: jax.Array,
    lo: jax.Array,
    state: Moments,
    rates: Rates,
    key: jax.Array,
) -> Step:
    """Take the step, see `api.adamw`."""
    n, index = hi.shape[-1], counter.indices(hi.shape)
    codes = lambda x: lax.bitcast_convert_type(x, jnp.uint8)[..., None].astype(
        jnp.int32
    )
    blocks = moments.to_blocks
    gradient = blocks(g.astype(jnp.float32))
    old = State(
        blocks(hi),
        blocks(lo),
        blocks(state.m),
        codes(state.m_scale),
        blocks(state.v),
        codes(state.v_scale),
    )
    bits = counter.random_bits(blocks(index), key[0], key[1])
    new, weight = update(
        Portable(gradient), options, Coefficients.of(rates), gradient, old, bits
    )

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
    # Padding of the last block is not part of the weight.
    values = kept(whole(weight), hi.astype(jnp.float32) + lo.astype(jnp.float32))
    largest = jnp.max(Portable(values).largest(values))
    columns = new_hi.T if options.orientation == "both" else None
    return Step(
        new_hi, new_lo, columns, after, largest * kept(rates.new_scale, rates.scale)
    )
