"""The packed format stores what it claims and keeps what it promises."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tcfp_jax
from tcfp_jax.weights.tcfp12 import LEVELS

GAUSSIAN = jax.random.normal(jax.random.key(0), (512, 512))
SMALL = jax.random.normal(jax.random.key(1), (3, 64))
every_residual = pytest.mark.parametrize("residual", ["linear", "nf4"])
# One program; that it is the one of single operations is a test of its own.
pack = jax.jit(
    tcfp_jax.quantize_tcfp12, static_argnames=("block", "residual", "scale", "sigma")
)
unpack = jax.jit(tcfp_jax.dequantize_tcfp12)
fake = jax.jit(tcfp_jax.fake_quantize, static_argnames="residual")


def decibels(x, y):
    x, y = (np.asarray(a, np.float64) for a in (x, y))
    return 10 * np.log10(np.sum(x**2) / np.sum((x - y) ** 2))


def leaves_equal(a, b):
    return all(
        np.asarray(x).tobytes() == np.asarray(y).tobytes()
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


@pytest.mark.parametrize("residual, floor", [("linear", 46.0), ("nf4", 50.1)])
def test_signal_to_noise_at_twelve_and_a_half_bits(residual, floor):
    packed = pack(GAUSSIAN, residual=residual)
    assert decibels(GAUSSIAN, unpack(packed)) >= floor
    assert (
        sum(leaf.nbytes for leaf in jax.tree.leaves(packed)) * 8
        == 12.5 * GAUSSIAN.size
        == packed.nbytes * 8
    )


@pytest.mark.slow_except("2")
@pytest.mark.parametrize("block", [2, 32, 128])
def test_bits_a_value_follow_from_the_block(block):
    packed = pack(GAUSSIAN, block)
    assert packed.nbytes * 8 / GAUSSIAN.size == 12 + 16 / block


@pytest.mark.slow_except("(1,)-linear", "(2, 3, 70)-nf4", "(0, 32)-linear")
@every_residual
@pytest.mark.parametrize(
    "shape", [(1,), (31,), (33,), (2, 3, 70), (0, 32), (4, 0)], ids=str
)
def test_any_shape_comes_back(residual, shape):
    x = jax.random.normal(jax.random.key(2), shape)
    packed = pack(x, residual=residual)
    y = unpack(packed)
    assert packed.shape == y.shape == shape
    np.testing.assert_allclose(y, x, rtol=2.0**-4, atol=1e-5)


@every_residual
def test_error_is_within_half_a_step_of_e4m3(residual):
    packed = pack(SMALL, residual=residual)
    e4m3_step = 2.0**-3 * 2 * np.abs(SMALL).max()
    assert np.abs(unpack(packed) - SMALL).max() <= 0.5 * e4m3_step


def test_levels_are_the_published_ones():
    assert len(LEVELS["nf4"]) == len(LEVELS["linear"]) == 16
    for levels in LEVELS.values():
        assert 0.0 in levels and np.all(np.diff(levels) > 0)
    # QLoRA's construction: quantiles of N(0, 1), 8 below and 9 above that share zero,
    # divided by the largest.
    from statistics import NormalDist

    offset = 0.5 * ((1 - 1 / 32) + (1 - 1 / 30))
    quantile = NormalDist().inv_cdf
    positive = [quantile(p) for p in np.linspace(offset, 0.5, 9)[:-1]]
    negative = [-quantile(p) for p in np.linspace(offset, 0.5, 8)[:-1]]
    expected = np.sort(np.array([*positive, 0.0, *negative])) / max(positive)
    np.testing.assert_allclose(LEVELS["nf4"], expected, atol=1e-6)


@pytest.mark.slow_except("nf4")
@every_residual
def test_zero_residual_is_exactly_zero(residual):
    exact = tcfp_jax.quantize(SMALL).dequantize()
    packed = pack(exact, 64, residual=residual)
    assert jnp.array_equal(unpack(packed), exact)
    assert not np.asarray(packed.residual_scale).view(np.uint8).any()
    assert jnp.array_equal(
        unpack(pack(jnp.zeros(64), residual=residual)), jnp.zeros(64)
    )


@pytest.mark.slow_except("nf4")
@every_residual
@pytest.mark.optimized("slow")
def test_jit_vmap_and_scan_change_no_bit(residual):
    pack = lambda x: tcfp_jax.quantize_tcfp12(x, residual=residual)
    expected = pack(SMALL)
    assert leaves_equal(jax.jit(pack)(SMALL), expected)
    assert leaves_equal(jax.vmap(pack)(SMALL), expected)
    assert leaves_equal(
        jax.lax.scan(lambda c, row: (c, pack(row)), 0, SMALL)[1], expected
    )
    assert jnp.array_equal(
        jax.jit(tcfp_jax.dequantize_tcfp12)(expected), expected.dequantize()
    )


@every_residual
@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf], ids=str)
def test_a_bad_value_makes_its_block_nan_and_no_other(residual, bad):
    y = unpack(pack(SMALL.at[1, 40].set(bad), residual=residual))
    assert jnp.isnan(y[1, 32:]).all() and jnp.isfinite(y).sum() == SMALL.size - 32
    sigma = unpack(pack(SMALL.at[1, 40].set(bad), residual=residual, scale="sigma"))
    assert jnp.isnan(sigma[1, 32:]).all()


@pytest.mark.parametrize("size", [1e-45, 1e-38, 1e-30, 1e30, 3e38], ids=str)
@pytest.mark.parametrize("scale", ["amax", "sigma"])
def test_extreme_magnitudes(size, scale):
    x = jnp.full(32, size, jnp.float32)
    y = unpack(pack(x, scale=scale))
    assert jnp.isfinite(y).all()
    if size > 2e-38:
        np.testing.assert_allclose(y, x, rtol=2.0**-6)


def test_sigma_spends_the_range_on_the_bulk():
    x = SMALL.at[:, 0].set(100.0)
    plain, sigma = pack(x, 64), pack(x, 64, scale="sigma", sigma=1.0)
    assert (
        np.asarray(sigma.scale, np.float32) < np.asarray(plain.scale, np.float32)
    ).all()


@every_residual
def test_stochastic_residual_is_unbiased_and_repeats(residual):
    pack = jax.jit(
        lambda key: tcfp_jax.quantize_tcfp12(
            SMALL, residual=residual, key=key
        ).dequantize()
    )
    samples = np.asarray(
        jax.vmap(pack)(jax.random.split(jax.random.key(3), 2000)), np.float64
    )
    error, deviation = samples.mean(0) - np.asarray(SMALL), samples.std(0)
    assert np.all(np.abs(error) <= 5 * deviation / np.sqrt(len(samples)) + 1e-6)
    assert jnp.array_equal(pack(jax.random.key(4)), pack(jax.random.key(4)))


@every_residual
def test_fake_quantize_is_the_format_with_the_gradient_of_the_identity(residual):
    y, vjp = jax.vjp(lambda x: fake(x, residual=residual), SMALL)
    assert jnp.array_equal(y, unpack(pack(SMALL, residual=residual)))
    assert jnp.array_equal(vjp(2 * SMALL)[0], 2 * SMALL)
    assert fake(SMALL.astype(jnp.bfloat16)).dtype == jnp.bfloat16
    assert jnp.isnan(fake(SMALL.at[0, 0].set(jnp.nan))[0, :32]).all()


@pytest.mark.parametrize(
    "error, match, arguments",
    [
        (TypeError, "astype", dict(x=jnp.ones(32, jnp.int32))),
        (TypeError, "astype", dict(x=jnp.ones(32, jnp.complex64))),
        (ValueError, "scalar", dict(x=jnp.float32(1))),
        (ValueError, "block=31", dict(block=31)),
        (ValueError, "block=0", dict(block=0)),
        (ValueError, "residual='log'", dict(residual="log")),
        (ValueError, "scale='max'", dict(scale="max")),
        (ValueError, "sigma=-1", dict(sigma=-1.0, scale="sigma")),
        (ValueError, "sigma=2.0 with scale='amax'", dict(sigma=2.0)),
        (ValueError, "biased", dict(scale="sigma", key=jax.random.key(0))),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_bad_input_raises(error, match, arguments):
    with pytest.raises(error, match=match):
        tcfp_jax.quantize_tcfp12(**{"x": SMALL, **arguments})
