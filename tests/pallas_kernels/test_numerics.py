"""Casts, scales and rounding against ml_dtypes and `math.frexp`."""

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels import numerics
from tests.formats_oracles import EVERY_BFLOAT16, same
from tests.helpers import parametrize, slow_except

FORMATS = {
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}
# errors of weights have it, and no product reads it
ROUNDED = FORMATS | {"float8_e3m4": ml_dtypes.float8_e3m4}
every_format = parametrize("dtype", FORMATS)


def oracle(x, dtype):
    """Clip, then ml_dtypes' cast; NaN for what is not finite."""
    limit = float(ml_dtypes.finfo(ROUNDED[dtype]).max)
    x = np.float32(x)
    clipped = np.clip(np.nan_to_num(x), -limit, limit)
    rounded = clipped.astype(ROUNDED[dtype]).astype(np.float32)
    return np.where(np.isfinite(x), rounded, np.nan)


@every_format
def test_cast_of_every_bfloat16(dtype):
    """All values of the format are among them, and both zeros."""
    got = numerics.saturating_cast(jnp.asarray(EVERY_BFLOAT16), dtype)
    assert same(got.astype(jnp.float32), oracle(EVERY_BFLOAT16, dtype))


@parametrize("dtype", ROUNDED)
def test_round_to_is_the_cast_without_the_cast(dtype):
    random = np.random.default_rng(0)
    wide = random.standard_normal(2**16) * 10.0 ** random.uniform(-12, 8, 2**16)
    run = jax.jit(numerics.round_to, static_argnums=1)
    for x in (EVERY_BFLOAT16.astype(np.float32), wide.astype(np.float32)):
        assert same(run(jnp.asarray(x), dtype), oracle(x, dtype))


@every_format
def test_scale_is_the_smallest_power_of_two_that_fits(dtype):
    limit = numerics.largest(dtype)
    above = np.nextafter(np.float32(1.75), np.float32(2))
    mantissas = np.array([1.0, 1.25, 1.75, above, 1.999], np.float32)
    amax = np.ldexp(mantissas, np.arange(-126, 128)[:, None]).reshape(-1)
    got = np.float64(numerics.pow2_cover(jnp.asarray(amax), limit))
    for a, s in zip(amax.astype(np.float64), got, strict=True):
        mantissa, exponent = math.frexp(a / limit)
        expected = max(-126, exponent - 1 if mantissa == 0.5 else exponent)
        assert s == 2.0**expected


def test_scale_of_zero_subnormal_and_non_finite_amax():
    amax = jnp.array([0.0, 1e-40, jnp.nan, jnp.inf, 3e38], jnp.float32)
    scale = np.asarray(numerics.pow2_cover(amax, 448.0))
    assert scale[0] == scale[1] == 1
    assert np.isnan(scale[2:4]).all()
    assert 224 < 3e38 / scale[4] <= 448
    inverse = numerics.reciprocal_pow2(jnp.asarray(scale))
    assert same(inverse, 1 / scale)


def test_divide_is_correctly_rounded():
    random = np.random.default_rng(1)
    a, b = np.exp(random.uniform(-30, 30, (2, 2**14))).astype(np.float32)
    assert np.array_equal(jax.jit(numerics.divide)(a, b), a / b)


def test_every_e8m0_code():
    codes = np.arange(256, dtype=np.uint8)
    stored = jnp.asarray(codes.view(ml_dtypes.float8_e8m0fnu))
    decoded = np.asarray(numerics.decode_e8m0(stored))
    expected = np.ldexp(np.float32(1), codes[:255].astype(int) - 127)
    assert np.array_equal(decoded.view(np.uint32)[:255], expected.view(np.uint32))
    assert np.isnan(decoded[255])
    again = np.asarray(numerics.encode_e8m0(jnp.asarray(decoded[1:]))).view(np.uint8)
    assert np.array_equal(again, codes[1:])


@every_format
def test_stochastic_rounding_takes_a_neighbour_by_distance(dtype):
    draws = 4096
    wide = np.geomspace(2.0**-17, numerics.largest(dtype), 60)
    grid = np.append([0.0, 2.0**-20, 2.0**-10, 3e-4], wide).astype(np.float32)
    x = np.append(grid, -grid)
    bits = jax.random.bits(jax.random.key(0), (draws, x.size))
    rounded = jax.jit(numerics.stochastic_round_to, static_argnums=1)
    repeated = jnp.broadcast_to(jnp.asarray(x), bits.shape)
    got = np.float64(rounded(repeated, dtype, bits))
    codes = np.arange(256, dtype=np.uint8).view(FORMATS[dtype]).astype(np.float64)
    values = np.unique(codes[np.isfinite(codes)])
    lower = values[np.searchsorted(values, x, side="right") - 1]
    last = len(values) - 1
    upper = values[np.minimum(np.searchsorted(values, x, side="left"), last)]
    assert np.all((got == lower) | (got == upper))
    error = np.sqrt((x - lower) * (upper - x) / draws)
    assert np.all(np.abs(got.mean(0) - x) <= 4 * error + 1e-7 * np.abs(x))
    relative = (got - x) / np.maximum(upper - lower, 1e-9)
    assert np.mean(relative) ** 2 <= 16 * 0.25 / got.size


@every_format
@parametrize("bits", [0, 1 << 8, 2**32 - 1])
def test_stochastic_rounding_keeps_every_value_of_the_format(dtype, bits):
    codes = np.arange(256, dtype=np.uint8).view(FORMATS[dtype]).astype(np.float32)
    values = jnp.asarray(codes[np.isfinite(codes)])
    random = jnp.full(values.shape, bits, jnp.uint32)
    rounded = numerics.stochastic_round_to(values, dtype, random)
    assert np.array_equal(rounded, values)


@slow_except("(64, 64)-float16", "(128, 4, 32)-bfloat16")
@parametrize("dtype", ["float32", "bfloat16", "float16"])
@parametrize("shape", [(3,), (64, 64), (128, 4, 32)], ids=str)
def test_amax_sees_every_nan(shape, dtype):
    """XLA:CPU's own maximum skips NaN in float32 arrays that it vectorizes."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=shape), dtype)
    assert numerics.amax(x) == jnp.abs(x).astype(jnp.float32).ravel().sort()[-1]
    place = (1,) * x.ndim
    bad = x.at[place].set(jnp.nan)
    infinite = x.at[place].set(jnp.inf)
    for call in (numerics.amax, jax.jit(numerics.amax)):
        assert jnp.isnan(call(bad))
        assert call(infinite) == jnp.inf
    assert jnp.isnan(numerics.amax(bad, axis=-1)).sum() == 1
    assert numerics.amax(jnp.zeros((0, 3), dtype)) == 0
