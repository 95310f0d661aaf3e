"""The definition of the fused AdamW step in plain jax.numpy.

It is the path on CPUs and the oracle of the kernels. The arithmetic is written once, in
`update`, over the elementary operations of `arithmetic.py`.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import counter, moments, numerics
from pallas_kernels.adamw.arithmetic import SMALLEST_RADICAND, Portable
from pallas_kernels.checks import check_choice
from pallas_kernels.operands import Orientation
from pallas_kernels.scaling import SCALE_DTYPE


@dataclass(frozen=True)
class AdamWOptions:
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
        check_choice("momentum", self.momentum, ("classic", "nesterov"))
        check_choice("orientation", self.orientation, ("rows", "both"))
        check_choice("remainder", self.remainder, ("stochastic", "nearest"))


class Moments(NamedTuple):
    """Both moments of a weight [k, n] in 8 bits (`pallas_kernels.moments`).

    Attributes:
      m: E4M3 [k, n].
      m_scale: float8_e8m0fnu [k, ceil(n / 128)].
      v: uint8 [k, n].
      v_scale: uint8 [k, ceil(n / 128)].
    """

    m: Array
    m_scale: Array
    v: Array
    v_scale: Array

    @staticmethod
    def zeros(shape: tuple[int, int]) -> "Moments":
        """Return the moments before the first step.

        Use it instead of `jnp.zeros_like`: E8M0 has no zero, so m_scale would be NaN.

        >>> zeros = Moments.zeros((2, 200))
        >>> [str(x.dtype) for x in zeros]
        ['float8_e4m3fn', 'float8_e8m0fnu', 'uint8', 'uint8']
        >>> zeros.m_scale.tolist()
        [[1.0, 1.0], [1.0, 1.0]]
        """
        k, n = shape
        blocks = (k, -(-n // moments.BLOCK))
        return Moments(
            m=jnp.zeros(shape, moments.E4M3),
            m_scale=jnp.ones(blocks, SCALE_DTYPE),
            v=jnp.zeros(shape, jnp.uint8),
            v_scale=jnp.zeros(blocks, jnp.uint8),
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

    b1: Array
    b2: Array
    rate: Array
    rate_g: Array
    correction: Array
    eps: Array
    eps_root: Array
    decay: Array
    gradient_scale: Array
    scale: Array
    new_scale: Array
    keep: Array


class Step(NamedTuple):
    """A weight and its moments after a step.

    Attributes:
      hi, lo: E4M3 [k, n], in units of `new_scale`.
      columns: hi.T, or None if only rows were asked for.
      moments: the new moments.
      amax: float32 scalar, the largest magnitude of the new weight before it was
        rounded, NaN aside.
    """

    hi: Array
    lo: Array
    columns: Array | None
    moments: Moments
    amax: Array


class Coefficients(NamedTuple):
    """Coefficients of the arithmetic of an element, in the order of a kernel's operand.

    They are float32 scalars. The factors of the gradient contain its scale.
    """

    b1: Array
    one_minus_b1: Array
    b2: Array
    one_minus_b2: Array
    correction: Array
    eps_root: Array
    eps: Array
    rate: Array
    rate_g: Array
    decay: Array

    @staticmethod
    def of(rates: Rates) -> "Coefficients":
        """Return the coefficients of a step, with the same bits on every backend."""

        def twenty_bits(x: Array) -> Array:
            bits = numerics.bits(x)
            return numerics.from_bits((bits + 8) & jnp.int32(-16))

        one = jnp.float32(1)
        by = rates.gradient_scale
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
    """All arrays that a step replaces, in blocks of 128 values along the last axis.

    Scales have an axis of one instead and are int32: the E8M0 code of m's scale, and
    the base of v.
    """

    hi: Array
    lo: Array
    m: Array
    m_scale: Array
    v: Array
    v_scale: Array

    @staticmethod
    def of(hi: Array, lo: Array, state: Moments) -> "State":
        """Return the blocks of a whole weight and its moments."""
        return State(
            hi=moments.to_blocks(hi),
            lo=moments.to_blocks(lo),
            m=moments.to_blocks(state.m),
            m_scale=_byte_of_block(state.m_scale),
            v=moments.to_blocks(state.v),
            v_scale=_byte_of_block(state.v_scale),
        )


def _byte_of_block(scale: Array) -> Array:
    codes = lax.bitcast_convert_type(scale, jnp.uint8)
    return codes[..., None].astype(jnp.int32)


def update(
    do: Portable,
    options: AdamWOptions,
    c: Coefficients,
    gradient: Array,
    old: State,
    bits: Array,
) -> tuple[State, Array]:
    """Return (the new state, the weight before rounding in units of the new scale).

    Codes have four significant bits and b1 and b2 twenty, so the products of both are
    exact.

    Args:
      do: the elementary operations.
      options: static options of the step.
      c: coefficients of the step.
      gradient: float32 blocks.
      old: the state before the step.
      bits: one hash for each element.
    """
    old_m = old.m.astype(jnp.float32)
    old_m_scale = numerics.from_bits(old.m_scale << 23)
    m = do.add_exact_product(
        old_m, old_m_scale * c.b1, do.multiply(gradient, c.one_minus_b1)
    )
    old_v = moments.v_value(old.v.astype(jnp.int32), old.v_scale)
    square = do.multiply(do.multiply(gradient, c.one_minus_b2), gradient)
    v = do.add_exact_product(old_v, c.b2, square)
    step = do.multiply(m, c.rate)
    if options.momentum == "nesterov":
        step = do.add(step, do.multiply(gradient, c.rate_g))
    divisor = do.add(do.root(do.add(do.multiply(v, c.correction), c.eps_root)), c.eps)
    old_weight = do.add(old.hi.astype(jnp.float32), old.lo.astype(jnp.float32))
    decayed = do.multiply(old_weight, c.decay)
    weight = do.subtract(decayed, do.multiply(step, do.reciprocal(divisor)))

    hi, rounded = do.e4m3(weight)
    rest = do.subtract(weight, rounded)
    if options.remainder == "stochastic":
        # The 20 highest bits of the hash; m uses the lowest 8 of them as its highest.
        lo = do.stochastic_e4m3(rest, None, (bits >> 12).astype(jnp.int32))
    else:
        lo, _ = do.e4m3(rest)
    top_m = do.largest(m)
    top_v = do.largest_or_nan(v)
    largest_m = numerics.bits(top_m)
    largest_v = numerics.bits(top_v)
    # A NaN gradient makes both moments NaN, so one flag for both needs to search only v
    # for NaN.
    finite = (
        (largest_m < moments.INFINITY)
        & (largest_v < moments.INFINITY)
        & (old.m_scale != moments.NOT_FINITE)
    )
    m_scale, inverse = moments.m_scale(largest_m, finite)
    base = moments.v_base(largest_v, finite)
    random = (bits & jnp.uint32(moments.LOW_20)).astype(jnp.int32)
    m_codes = do.stochastic_e4m3(m, inverse, random)
    v_codes = moments.v_code(do.add_v_bits(v, bits), base)
    return State(hi, lo, m_codes, m_scale, v_codes, base), weight


def adamw(
    options: AdamWOptions,
    g: Array,
    hi: Array,
    lo: Array,
    state: Moments,
    rates: Rates,
    key: Array,
) -> Step:
    """Take the step, see `api.adamw`."""
    n = hi.shape[-1]
    index = counter.indices(hi.shape)
    gradient = moments.to_blocks(g.astype(jnp.float32))
    old = State.of(hi, lo, state)
    bits = counter.random_bits(moments.to_blocks(index), key[0], key[1])
    new, weight = update(
        Portable(gradient), options, Coefficients.of(rates), gradient, old, bits
    )

    def whole(blocks: Array) -> Array:
        return moments.from_blocks(blocks, n)

    def kept(new: Array, before: Array) -> Array:
        return jnp.where(rates.keep, new, before)

    new_hi = kept(whole(new.hi), hi)
    new_lo = kept(whole(new.lo), lo)
    m_scale = new.m_scale[..., 0].astype(jnp.uint8)
    v_scale = new.v_scale[..., 0].astype(jnp.uint8)
    after = Moments(
        m=kept(whole(new.m), state.m),
        m_scale=kept(
            lax.bitcast_convert_type(m_scale, state.m_scale.dtype), state.m_scale
        ),
        v=kept(whole(new.v).astype(jnp.uint8), state.v),
        v_scale=kept(v_scale, state.v_scale),
    )
    # Padding of the last block is not part of the weight.
    values = kept(whole(weight), hi.astype(jnp.float32) + lo.astype(jnp.float32))
    largest = jnp.max(Portable(values).largest(values))
    columns = new_hi.T if options.orientation == "both" else None
    amax = largest * kept(rates.new_scale, rates.scale)
    return Step(new_hi, new_lo, columns, after, amax)
