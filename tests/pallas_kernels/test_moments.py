"""Moments in 8 bits: every code by NumPy's formulas, and rounding that keeps means."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import counter, moments
from tests.helpers import drawn, parametrize, same_bits, slow_except

E4M3 = ml_dtypes.float8_e4m3fn
encode_m = jax.jit(moments.encode_m)
decode_m = jax.jit(moments.decode_m)
encode_v = jax.jit(moments.encode_v)
decode_v = jax.jit(moments.decode_v)
# All finite codes of E4M3 and all of v but 255 (a block that has one is coded anew), in
# blocks that have the largest.
SIGNED = np.array([c for c in range(256) if c & 0x7F != 0x7F], np.uint8)
CODES_M = np.concatenate([SIGNED[:127], [0x7E], SIGNED[127:], [0x7E]])
CODES_M = CODES_M.astype(np.uint8)[None].view(E4M3)
CODES_V = np.concatenate([np.arange(127), [254], np.arange(127, 255)])
CODES_V = CODES_V.astype(np.uint8)[None]
EXPONENTS = [-87, -40, -1, 0, 7, 29]
BASES = [8, 60, 96, 127, 222]


def random(shape, *words):
    return counter.bits_of(shape, *counter.keys(*words))


def test_all_codes_of_m_are_the_formula():
    for exponent in EXPONENTS:
        scale = jnp.full((1, 2), 2.0**exponent, jnp.float8_e8m0fnu)
        got = np.float64(decode_m(jnp.asarray(CODES_M), scale))
        assert np.array_equal(got, CODES_M.astype(np.float64) * 2.0**exponent)


def test_all_codes_of_v_are_the_formula():
    codes = np.arange(256)
    # 1.xxx times a power of two, from the code less one's carry on.
    mantissa = (8 + (codes + 1) % 8) / 8
    exponent = (codes + 1) // 8 - 127
    for base in BASES:
        of_blocks = jnp.full((1, 2), base, jnp.uint8)
        got = decode_v(jnp.asarray(codes[None], jnp.uint8), of_blocks)
        expected = mantissa * 2.0 ** (base + exponent)
        assert np.array_equal(np.float64(got)[0], expected)
        assert np.all(np.diff(expected, prepend=0) > 0)


BITS = {
    "zeros": jnp.full((1, 256), 0, jnp.uint32),
    "ones": jnp.full((1, 256), 0xFFFFFFFF, jnp.uint32),
    "random": random((1, 256), 1),
}


@parametrize("bits", BITS)
def test_stored_values_are_stored_unchanged(bits):
    for exponent in EXPONENTS:
        scale = jnp.full((1, 2), 2.0**exponent, jnp.float8_e8m0fnu)
        stored = jnp.asarray(CODES_M), scale
        assert same_bits(encode_m(decode_m(*stored), BITS[bits]), stored)
    for base in BASES:
        stored = jnp.asarray(CODES_V), jnp.full((1, 2), base, jnp.uint8)
        assert same_bits(encode_v(decode_v(*stored), BITS[bits]), stored)


def spread_values(low, high, count, seed):
    """Values from 2**low to 2**high, evenly in the logarithm."""
    rng = np.random.default_rng(seed)
    place = (np.arange(count) + rng.random(count)) / count
    return np.float32(2.0 ** (low + (high - low) * place))


def round_trip(kind, x, bits):
    """The values of a block `[1, 128]` as they are stored."""
    if kind == "m":
        return decode_m(*encode_m(x, bits))
    if kind == "v":
        return decode_v(*encode_v(x, bits))
    random = (bits >> 12).astype(jnp.int32)
    return moments.stochastic_e4m3(x, random).astype(jnp.float32)


def means(kind, draws=1 << 14):
    """(values, mean of the relative errors of many draws, smallest, largest)."""
    x = {
        # the scale is the next power of two
        "m": np.append(470.0, spread_values(-14, 8.8, 127, 0)) * 2.0**-20,
        "v": np.append(1.9, spread_values(-30.5, 0.9, 127, 1)),
        "lo": spread_values(-14, 8.8, 128, 2),
    }[kind].astype(np.float32)
    x[1::2] *= -1 if kind != "v" else 1

    def stored(i):
        return round_trip(kind, jnp.asarray(x)[None], random((1, 128), 12, i))[0]

    def block(i):
        # In units of each value, so that float32's sums keep what is asked for.
        rounded = jax.vmap(stored)(i * 64 + jnp.arange(64, dtype=jnp.uint32))
        return jnp.mean(rounded / x - 1, 0), jnp.min(rounded, 0), jnp.max(rounded, 0)

    run = jax.jit(partial(jax.lax.map, block))
    found = run(jnp.arange(draws // 64, dtype=jnp.uint32))
    mean, low, high = (np.float64(array) for array in found)
    return np.float64(x), mean.mean(0), low.min(0), high.max(0)


@parametrize("kind", ["m", "v", "lo"])
def test_the_mean_is_kept_over_the_whole_range(kind):
    draws = 1 << 14
    x, relative, low, high = means(kind, draws)
    assert np.all((low <= x) & (x <= high))
    error = np.sqrt((x - low) * (high - x) / draws)
    assert np.all(np.abs(relative * x) <= 4 * error + 2.0**-22 * np.abs(x))
    assert np.mean(high > low) > 0.9


@slow_except("0.95-steps0")
@pytest.mark.optimized
@parametrize("b2, steps", [(0.95, (20, 60, 120)), (0.999, (1000, 3000, 6000))])
def test_an_average_of_v_follows_a_gradient_that_falls_tenfold(b2, steps):
    """The mean over values follows an average in float32, also where that stays."""
    shape = (16, 128)

    def step(i, carry):
        stored, exact = carry
        key = jax.random.fold_in(jax.random.key(0), i)
        g = jnp.square(jax.random.normal(key, shape) * 0.1) * jnp.float32(1e-6)
        both = jnp.stack([moments.decode_v(*stored), exact])
        average, exact = both * jnp.float32(b2) + g * jnp.float32(1 - b2)
        return moments.encode_v(average, random(shape, 3, i)), exact

    @jax.jit
    def run(carry, first, last):
        return jax.lax.fori_loop(first, last, step, carry)

    start = jnp.full(shape, 1e-6, jnp.float32)  # a hundred times the new mean
    carry = moments.encode_v(start, random(shape, 4)), start
    at = 0
    for until in steps:
        carry = run(carry, jnp.int32(at), jnp.int32(until))
        at = until
        ratio = float(jnp.mean(decode_v(*carry[0])) / jnp.mean(carry[1]))
        assert abs(ratio - 1) < 0.1, (until, ratio)
    assert float(jnp.mean(carry[1])) < 2e-8


def test_no_v_is_zero_unless_its_block_is():
    v = np.zeros((1, 356), np.float32)
    v[0, 127] = 1
    v[0, 256:] = 1e-45
    v = jnp.asarray(v)
    codes, base = encode_v(v, random(v.shape, 1))
    back = np.asarray(decode_v(codes, base))[0]
    assert base.tolist() == [[96, 0, 0]]
    assert np.all(back[:127] == 1.125 * 2.0**-31)
    assert back[127] == 1
    assert not np.any(back[128:])
    assert not np.any(np.asarray(codes)[0, 128:])


def test_a_block_of_zeros_has_a_scale_of_one_and_signs():
    m = jnp.zeros((2, 130)).at[1, 129].set(-0.0)
    codes, scale = encode_m(m, random(m.shape, 1))
    assert np.all(np.float32(scale) == 1)
    assert not np.any(np.float32(codes))


@parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf], ids=str)
def test_nan_spreads_within_its_block(bad):
    x = np.ones((3, 200), np.float32)
    x[1, 5] = bad
    bits = random(x.shape, 2)
    for kind, values in (("m", x), ("v", np.abs(x))):
        isnan = np.isnan(round_trip(kind, jnp.asarray(values), bits))
        assert np.all(isnan[1, :128])
        assert np.sum(isnan) == 128


def test_values_beyond_the_range_saturate_or_are_the_floor():
    bits = random((2, 2), 3)
    m = jnp.float32([[3e38, 1.0], [1e-37, 0.0]])
    back = np.asarray(decode_m(*encode_m(m, bits)))
    assert back[0, 0] == 448 * 2.0**29
    assert abs(back[1, 0]) <= 2.0**-96
    v = jnp.float32([[3e38, 0.0], [2e-38, 0.0]])
    codes, base = encode_v(v, bits)
    assert base.tolist() == [[254 - 31], [8]]
    assert float(decode_v(codes, base)[1, 0]) == 1.125 * 2.0**-119


@parametrize("shape", [(1,), (2, 3, 129)], ids=str)
def test_scales_are_one_for_each_block_of_the_last_axis(shape):
    x = drawn(*shape)
    codes, scale = encode_m(x, random(shape, 1))
    assert codes.shape == shape
    assert scale.shape == (*shape[:-1], -(-shape[-1] // 128))
    error = jnp.max(jnp.abs(decode_m(codes, scale) - x))
    assert float(error) <= 2.0**-3 * float(jnp.max(jnp.abs(x)))
    # A last block is coded as if it were filled up with zeros, and blocks know nothing
    # of each other.
    filled = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -shape[-1] % 128)])
    assert same_bits(scale, encode_m(filled, random(filled.shape, 9))[1])
