"""Casts, scales and rounding against oracles: ml_dtypes for every code, `math.frexp`
for every exponent.
"""

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import numerics
from tests.formats_oracles import EVERY_BFLOAT16, same

FORMATS = {
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}
# errors of weights have it, and no product reads it
ROUNDED = FORMATS | {"float8_e3m4": ml_dtypes.float8_e3m4}
every_format = pytest.mark.parametrize("dtype", FORMATS)


def oracle(x, dtype):
    """Clip, then ml_dtypes' cast; NaN for what is not finite."""
    limit = float(ml_dtypes.finfo(ROUNDED[dtype]).max)
    x = np.asarray(x, np.float32)
    finite = np.where(np.isfinite(x), x, np.float32(0))
    return np.where(
        np.isfinite(x),
        np.clip(finite, -limit, limit).astype(ROUNDED[dtype]).astype(np.float32),
        np.nan,
    )


@every_format
def test_cast_of_every_bfloat16(dtype):
    """All values of the format are among them, and both zeros."""
    x = jnp.asarray(EVERY_BFLOAT16)
    assert same(
        numerics.saturating_cast(x, dtype).astype(jnp.float32),
        oracle(EVERY_BFLOAT16, dtype),
    )


@pytest.mark.parametrize("dtype", ROUNDED)
def test_round_to_is_the_cast_without_the_cast(dtype):
    random = np.random.default_rng(0)
    wide = (
        random.standard_normal(2**16) * 10.0 ** random.uniform(-12, 8, 2**16)
    ).astype(np.float32)
    for x in (EVERY_BFLOAT16.astype(np.float32), wide):
        assert same(
            jax.jit(numerics.round_to, static_argnums=1)(jnp.asarray(x), dtype),
            oracle(x, dtype),
        )


@every_format
def test_scale_is_the_smallest_power_of_two_that_fits(dtype):
    limit = numerics.largest(dtype)
    mantissas = np.array(
        [1.0, 1.25, 1.75, np.nextafter(np.float32(1.75), np.float32(2)), 1.999],
        np.float32,
    )
    amax = np.concatenate([np.ldexp(mantissas, e) for e in range(-126, 128)]).astype(
        np.float32
    )
    got = np.asarray(numerics.pow2_cover(jnp.asarray(amax), limit), np.float64)
    for a, s in zip(amax.astype(np.float64), got, strict=True):
        mantissa, exponent = math.frexp(a / limit)
        expected = max(-126, exponent - 1 if mantissa == 0.5 else exponent)
        assert s == 2.0**expected


def test_scale_of_zero_subnormal_and_non_finite_amax():
    amax = jnp.array([0.0, 1e-40, jnp.nan, jnp.inf, 3e38], jnp.float32)
    scale = np.asarray(numerics.pow2_cover(amax, 448.0))
    assert (
        scale[0] == scale[1] == 1
        and np.isnan(scale[2:4]).all()
        and 224 < 3e38 / scale[4] <= 448
    )
    inverse = numerics.reciprocal_pow2(jnp.asarray(scale))
    assert same(inverse, 1 / scale)


def test_divide_is_correctly_rounded():
    random = np.random.default_rng(1)
    a, b = (np.exp(random.uniform(-30, 30, 2**14)).astype(np.float32) for _ in range(2))
    assert np.array_equal(jax.jit(numerics.divide)(a, b), a / b)


def test_every_e8m0_code():
    codes = np.arange(256, dtype=np.uint8)
    decoded = np.asarray(
        numerics.decode_e8m0(jnp.asarray(codes.view(ml_dtypes.float8_e8m0fnu)))
    )
    expected = np.ldexp(np.float32(1), codes[:255].astype(int) - 127)
    assert np.array_equal(decoded.view(np.uint32)[:255], expected.view(np.uint32))
    assert np.isnan(decoded[255])
    again = np.asarray(numerics.encode_e8m0(jnp.asarray(decoded[1:]))).view(np.uint8)
    assert np.array_equal(again, codes[1:])


@every_format
def test_stochastic_rounding_takes_a_neighbour_by_distance(dtype):
    limit, draws = numerics.largest(dtype), 4096
    grid = np.concatenate(
        [[0.0, 2.0**-20, 2.0**-10, 3e-4], np.geomspace(2.0**-17, limit, 60)]
    ).astype(np.float32)
    x = np.concatenate([grid, -grid])[:, None]
    bits = jax.random.bits(jax.random.key(0), (x.size, draws))
    rounded = jax.jit(numerics.stochastic_round_to, static_argnums=1)
    got = np.asarray(
        rounded(jnp.asarray(x) + jnp.zeros_like(bits, jnp.float32), dtype, bits),
        np.float64,
    )
    codes = np.arange(256, dtype=np.uint8).view(FORMATS[dtype]).astype(np.float64)
    values = np.unique(codes[np.isfinite(codes)])
    lower = values[np.searchsorted(values, x[:, 0], side="right") - 1]
    upper = values[
        np.minimum(np.searchsorted(values, x[:, 0], side="left"), len(values) - 1)
    ]
    assert np.all((got == lower[:, None]) | (got == upper[:, None]))
    variance = (x[:, 0] - lower) * (upper - x[:, 0])
    assert np.all(
        np.abs(got.mean(1) - x[:, 0])
        <= 4 * np.sqrt(variance / draws) + 1e-7 * np.abs(x[:, 0])
    )
    assert (
        np.mean((got - x) / np.maximum(upper - lower, 1e-9)[:, None]) ** 2
        <= 16 * 0.25 / got.size
    )


@pytest.mark.slow_except("(64, 64)-float16", "(128, 4, 32)-bfloat16")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(3,), (64, 64), (128, 4, 32)], ids=str)
def test_amax_sees_every_nan(shape, dtype):
    """XLA:CPU's own maximum skips NaN in float32 arrays that it vectorizes."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=shape), dtype)
    assert numerics.amax(x) == jnp.abs(x).astype(jnp.float32).ravel().sort()[-1]
    bad = x.at[(1,) * x.ndim].set(jnp.nan)
    for call in (numerics.amax, jax.jit(numerics.amax)):
        assert jnp.isnan(call(bad))
        assert (
            call(bad.at[(0,) * x.ndim].set(jnp.inf).at[(1,) * x.ndim].set(0)) == jnp.inf
        )
    assert jnp.isnan(numerics.amax(bad, axis=-1)).sum() == 1
    assert numerics.amax(jnp.zeros((0, 3), dtype)) == 0
