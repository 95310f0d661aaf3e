"""Moments in 8 bits: every code by NumPy's formulas, and rounding that keeps the mean,
of values and of averages.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import counter, moments
from tests.helpers import same_bits

E4M3 = ml_dtypes.float8_e4m3fn
encode_m, decode_m = jax.jit(moments.encode_m), jax.jit(moments.decode_m)
encode_v, decode_v = jax.jit(moments.encode_v), jax.jit(moments.decode_v)
# All finite codes of E4M3 and all of v but 255 (a block that has one is coded anew), in
# blocks that have the largest.
SIGNED = np.array([c for c in range(256) if c & 0x7F != 0x7F], np.uint8)
CODES_M = np.stack(
    [np.append(SIGNED[:127], 0x7E), np.append(SIGNED[127:], 0x7E)]
).astype(np.uint8)
CODES_V = np.stack([np.append(np.arange(127), 254), np.arange(127, 255)]).astype(
    np.uint8
)
EXPONENTS = [-87, -40, -1, 0, 7, 29]
BASES = [8, 60, 96, 127, 222]


def random(shape, *words):
    return counter.bits_of(shape, *counter.keys(*words))


def test_all_codes_of_m_are_the_formula():
    codes = CODES_M.reshape(1, 256).view(E4M3)
    for exponent in EXPONENTS:
        scale = np.full((1, 2), 2.0**exponent, ml_dtypes.float8_e8m0fnu)
        got = np.asarray(decode_m(jnp.asarray(codes), jnp.asarray(scale)), np.float64)
        assert np.array_equal(got, codes.astype(np.float64) * 2.0**exponent)


def test_all_codes_of_v_are_the_formula():
    for base in BASES:
        codes = np.arange(256)
        got = decode_v(
            jnp.asarray(codes[None], jnp.uint8), jnp.full((1, 2), base, jnp.uint8)
        )
        # 1.xxx times a power of two, from the code less one's carry on.
        expected = (8 + (codes + 1) % 8) / 8 * 2.0 ** (base - 127 + (codes + 1) // 8)
        assert np.array_equal(np.asarray(got, np.float64)[0], expected)
        assert np.all(np.diff(expected) > 0) and expected[0] > 0


@pytest.mark.parametrize("draw", [0, 0xFFFFFFFF, None], ids=["zeros", "ones", "random"])
def test_what_is_stored_is_stored_unchanged(draw):
    for i, exponent in enumerate(EXPONENTS):
        bits = (
            random((1, 256), i)
            if draw is None
            else jnp.full((1, 256), draw, jnp.uint32)
        )
        stored = (
            jnp.asarray(CODES_M.reshape(1, 256).view(E4M3)),
            jnp.full((1, 2), 2.0**exponent, jnp.float8_e8m0fnu),
        )
        assert same_bits(encode_m(decode_m(*stored), bits), stored)
    for i, base in enumerate(BASES):
        bits = (
            random((1, 256), i, 1)
            if draw is None
            else jnp.full((1, 256), draw, jnp.uint32)
        )
        codes = jnp.asarray(
            np.where(CODES_V < 247, CODES_V[::-1], CODES_V).reshape(1, 256)
        )
        stored = codes, jnp.full((1, 2), base, jnp.uint8)
        assert same_bits(encode_v(decode_v(*stored), bits), stored)


def spread_values(low, high, count, seed):
    """Values from 2**low to 2**high, evenly in the logarithm."""
    rng = np.random.default_rng(seed)
    return np.float32(
        2.0 ** (low + (high - low) * (np.arange(count) + rng.random(count)) / count)
    )


def means(kind, draws=1 << 14):
    """(values, the mean of what is stored of each over many draws, distance of its two
    neighbours).
    """
    x = {
        # the scale is the next power of two
        "m": np.append(470.0, spread_values(-14, 8.8, 127, 0)) * 2.0**-20,
        "v": np.append(1.9, spread_values(-30.5, 0.9, 127, 1)),
        "lo": spread_values(-14, 8.8, 128, 2),
    }[kind].astype(np.float32)
    x[1::2] *= -1 if kind != "v" else 1

    def stored(i):
        bits = random((1, 128), 12, i)
        wide = jnp.asarray(x)[None]
        if kind == "lo":
            return moments.stochastic_e4m3(wide, (bits >> 12).astype(jnp.int32)).astype(
                jnp.float32
            )[0]
        encode, decode = (encode_m, decode_m) if kind == "m" else (encode_v, decode_v)
        return decode(*encode(wide, bits))[0]

    def block(i):
        # In units of each value, so that float32's sums keep what is asked for.
        rounded = jax.vmap(stored)(i * 64 + jnp.arange(64, dtype=jnp.uint32))
        return jnp.mean(rounded / x - 1, 0), jnp.min(rounded, 0), jnp.max(rounded, 0)

    mean, low, high = (
        np.asarray(a)
        for a in jax.jit(lambda i: jax.lax.map(block, i))(
            jnp.arange(draws // 64, dtype=jnp.uint32)
        )
    )
    return (
        np.float64(a) for a in (x, np.float64(mean).mean(0), low.min(0), high.max(0))
    )


@pytest.mark.parametrize("kind", ["m", "v", "lo"])
def test_the_mean_is_kept_over_the_whole_range(kind):
    draws = 1 << 14
    x, relative, low, high = means(kind, draws)
    part = np.where(high > low, (x - low) / np.where(high > low, high - low, 1), 0)
    assert np.all((low <= x) & (x <= high))
    error = np.sqrt(part * (1 - part) / draws) * (high - low)
    assert np.all(np.abs(relative * x) <= 4 * error + 2.0**-22 * np.abs(x))
    assert np.mean(high > low) > 0.9


@pytest.mark.slow_except("0.95-steps0")
@pytest.mark.optimized
@pytest.mark.parametrize(
    ("b2", "steps"), [(0.95, (20, 60, 120)), (0.999, (1000, 3000, 6000))]
)
def test_an_average_of_v_follows_a_gradient_that_falls_tenfold(b2, steps):
    """In the mean over values, against an average in float32, while it falls and where
    it stays.
    """
    shape = (16, 128)
    square = lambda i: jnp.square(
        jax.random.normal(jax.random.fold_in(jax.random.key(0), i), shape) * 0.1
    )

    def step(carry, i):
        stored, exact = carry
        g = square(i) * jnp.float32(1e-6)
        average = lambda v: v * jnp.float32(b2) + g * jnp.float32(1 - b2)
        stored = moments.encode_v(
            average(moments.decode_v(*stored)), random(shape, 3, i)
        )
        return (stored, average(exact)), None

    start = jnp.full(shape, 1e-6, jnp.float32)  # a hundred times the new mean
    carry = moments.encode_v(start, random(shape, 4)), start
    run = jax.jit(
        lambda kept, first, count: jax.lax.fori_loop(
            first, first + count, lambda i, c: step(c, i)[0], kept
        )
    )
    at = 0
    for until in steps:
        carry = run(carry, jnp.int32(at), jnp.int32(until - at))
        at = until
        ratio = float(jnp.mean(decode_v(*carry[0])) / jnp.mean(carry[1]))
        assert abs(ratio - 1) < 0.1, (until, ratio)
    assert float(jnp.mean(carry[1])) < 2e-8


def test_no_v_is_zero_unless_its_block_is():
    v = jnp.asarray(np.float32([[0.0] * 127 + [1.0] + [0.0] * 128 + [1e-45] * 100]))
    codes, base = encode_v(v, random(v.shape, 1))
    back = np.asarray(decode_v(codes, base))[0]
    assert base.tolist() == [[96, 0, 0]]
    assert np.all(back[:127] == 1.125 * 2.0**-31) and back[127] == 1
    assert np.all(back[128:] == 0) and not np.any(np.asarray(codes)[0, 128:])


def test_a_block_of_zeros_has_a_scale_of_one_and_signs():
    codes, scale = encode_m(
        jnp.zeros((2, 130)).at[1, 129].set(-0.0), random((2, 130), 1)
    )
    assert np.all(np.asarray(scale, np.float32) == 1) and not np.any(
        np.asarray(codes, np.float32)
    )


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf], ids=str)
def test_a_number_that_is_not_finite_makes_its_block_nan_and_no_other(bad):
    x = np.ones((3, 200), np.float32)
    x[1, 5] = bad
    bits = random(x.shape, 2)
    for back in (
        decode_m(*encode_m(jnp.asarray(x), bits)),
        decode_v(*encode_v(jnp.asarray(np.abs(x)), bits)),
    ):
        isnan = np.isnan(np.asarray(back))
        assert np.all(isnan[1, :128]) and np.sum(isnan) == 128


def test_what_is_beyond_the_range_saturates_or_is_the_floor():
    m, v = (
        jnp.float32([[3e38, 1.0], [1e-37, 0.0]]),
        jnp.float32([[3e38, 0.0], [2e-38, 0.0]]),
    )
    back = np.asarray(decode_m(*encode_m(m, random((2, 2), 3))))
    assert back[0, 0] == 448 * 2.0**29 and abs(back[1, 0]) <= 2.0**-96
    codes, base = encode_v(v, random((2, 2), 3))
    assert base.tolist() == [[254 - 31], [8]]
    assert float(decode_v(codes, base)[1, 0]) == 1.125 * 2.0**-119


@pytest.mark.parametrize("shape", [(1,), (2, 3, 129)], ids=str)
def test_scales_are_one_for_each_block_of_the_last_axis(shape):
    x = jnp.asarray(np.random.default_rng(0).standard_normal(shape).astype(np.float32))
    codes, scale = encode_m(x, random(shape, 1))
    assert codes.shape == shape and scale.shape == (*shape[:-1], -(-shape[-1] // 128))
    assert float(jnp.max(jnp.abs(decode_m(codes, scale) - x))) <= 2.0**-3 * float(
        jnp.max(jnp.abs(x))
    )
    # A last block is coded as if it were filled up with zeros, and blocks know nothing
    # of each other.
    filled = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -shape[-1] % 128)])
    assert same_bits(scale, encode_m(filled, random(filled.shape, 9))[1])
