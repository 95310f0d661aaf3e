"""The packed format stores what it claims and keeps what it promises."""

from statistics import NormalDist

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

import tcfp_jax
from tcfp_jax.weights.tcfp12 import LEVELS
from tests.formats_oracles import assert_unbiased
from tests.helpers import decibels, normal, parametrize, refused, same_bits, slow_except

GAUSSIAN = normal(0, (512, 512))
SMALL = normal(1, (3, 64))
every_residual = parametrize("residual", ["linear", "nf4"])
# One program; that it is the one of single operations is a test of its own.
pack = jax.jit(
    tcfp_jax.quantize_tcfp12, static_argnames=("block", "residual", "scale", "sigma")
)
unpack = jax.jit(tcfp_jax.dequantize_tcfp12)
fake = jax.jit(tcfp_jax.fake_quantize, static_argnames="residual")


@parametrize("residual, floor", [("linear", 46.0), ("nf4", 50.1)])
def test_signal_to_noise_at_twelve_and_a_half_bits(residual, floor):
    packed = pack(GAUSSIAN, residual=residual)
    assert decibels(GAUSSIAN, unpack(packed)) >= floor
    stored = sum(leaf.nbytes for leaf in jax.tree.leaves(packed))
    assert stored * 8 == 12.5 * GAUSSIAN.size == packed.nbytes * 8


@slow_except("2")
@parametrize("block", [2, 32, 128])
def test_bits_a_value_follow_from_the_block(block):
    assert pack(GAUSSIAN, block).nbytes * 8 / GAUSSIAN.size == 12 + 16 / block


@slow_except("(1,)-linear", "(2, 3, 70)-nf4", "(0, 32)-linear")
@every_residual
@parametrize("shape", [(1,), (31,), (33,), (2, 3, 70), (0, 32), (4, 0)], ids=str)
def test_any_shape_comes_back(residual, shape):
    x = normal(2, shape)
    packed = pack(x, residual=residual)
    assert packed.shape == unpack(packed).shape == shape
    assert_allclose(unpack(packed), x, rtol=2.0**-4, atol=1e-5)


@every_residual
def test_error_is_within_half_a_step_of_e4m3(residual):
    error = np.abs(unpack(pack(SMALL, residual=residual)) - SMALL)
    assert error.max() <= 0.5 * 2.0**-3 * 2 * np.abs(SMALL).max()


def test_levels_are_the_published_ones():
    for levels in LEVELS.values():
        assert len(levels) == 16
        assert 0.0 in levels
        assert np.all(np.diff(levels) > 0)
    # QLoRA's construction: quantiles of N(0, 1), 8 below and 9 above that share zero,
    # divided by the largest.
    ends = 0.5 * ((1 - 1 / 32) + (1 - 1 / 30))
    above = [NormalDist().inv_cdf(p) for p in np.linspace(ends, 0.5, 9)]
    below = [-NormalDist().inv_cdf(p) for p in np.linspace(ends, 0.5, 8)[:-1]]
    expected = np.sort([*above, *below]) / max(above)
    assert_allclose(LEVELS["nf4"], expected, atol=1e-6)


@slow_except("nf4")
@every_residual
def test_zero_residual_is_exactly_zero(residual):
    exact = tcfp_jax.quantize(SMALL).dequantize()
    packed = pack(exact, 64, residual=residual)
    assert jnp.array_equal(unpack(packed), exact)
    assert not np.asarray(packed.residual_scale).view(np.uint8).any()
    assert not unpack(pack(jnp.zeros(64), residual=residual)).any()


@slow_except("nf4")
@every_residual
@pytest.mark.optimized("slow")
def test_jit_vmap_and_scan_change_no_bit(residual):
    def pack(x):
        return tcfp_jax.quantize_tcfp12(x, residual=residual)

    expected = pack(SMALL)
    assert same_bits(jax.jit(pack)(SMALL), expected)
    rows = [jax.vmap(pack)(SMALL), jax.lax.map(pack, SMALL)]
    for row in rows:
        assert same_bits(jax.tree.leaves(row), jax.tree.leaves(expected))
    assert jnp.array_equal(unpack(expected), expected.dequantize())


@every_residual
@parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf], ids=str)
def test_a_bad_value_makes_its_block_nan_and_no_other(residual, bad):
    x = SMALL.at[1, 40].set(bad)
    y = unpack(pack(x, residual=residual))
    assert jnp.isnan(y[1, 32:]).all()
    assert jnp.isfinite(y).sum() == SMALL.size - 32
    sigma = unpack(pack(x, residual=residual, scale="sigma"))
    assert jnp.isnan(sigma[1, 32:]).all()


@parametrize("size", [1e-45, 1e-38, 1e-30, 1e30, 3e38], ids=str)
@parametrize("scale", ["amax", "sigma"])
def test_extreme_magnitudes(size, scale):
    x = jnp.full(32, size, jnp.float32)
    y = unpack(pack(x, scale=scale))
    assert jnp.isfinite(y).all()
    if size > 2e-38:
        assert_allclose(y, x, rtol=2.0**-6)


def test_sigma_spends_the_range_on_the_bulk():
    x = SMALL.at[:, 0].set(100.0)
    plain = np.float32(pack(x, 64).scale)
    sigma = np.float32(pack(x, 64, scale="sigma", sigma=1.0).scale)
    assert (sigma < plain).all()


@every_residual
def test_stochastic_residual_is_unbiased_and_repeats(residual):
    @jax.jit
    def draw(key):
        packed = tcfp_jax.quantize_tcfp12(SMALL, residual=residual, key=key)
        return packed.dequantize()

    assert_unbiased(draw, SMALL)
    assert jnp.array_equal(draw(jax.random.key(4)), draw(jax.random.key(4)))


@every_residual
def test_fake_quantize_has_the_gradient_of_the_identity(residual):
    y, vjp = jax.vjp(lambda x: fake(x, residual=residual), SMALL)
    assert jnp.array_equal(y, unpack(pack(SMALL, residual=residual)))
    assert jnp.array_equal(vjp(2 * SMALL)[0], 2 * SMALL)
    assert fake(SMALL.astype(jnp.bfloat16)).dtype == jnp.bfloat16
    assert jnp.isnan(fake(SMALL.at[0, 0].set(jnp.nan))[0, :32]).all()


@parametrize(
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
    with refused(match, error):
        tcfp_jax.quantize_tcfp12(**{"x": SMALL, **arguments})
