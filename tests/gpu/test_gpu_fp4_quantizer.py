"""NVFP4 in one pass on a GPU: bits of the definition, which XLA computes on a CPU, for every rule and rounding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import counter
from tcfp_jax.formats import nvfp4_arrays, nvfp4_kernel, quantize_nvfp4
from tcfp_jax.formats.nvfp4_arrays import define

pytestmark = pytest.mark.gpu
RULES = ("amax", "four_over_six", "fold_exact")
SIGNS = np.where(np.arange(16) % 3, 1.0, -1.0).astype(np.float32)
SHAPE = (256, 1024)
every_rule = pytest.mark.parametrize("rule", RULES)
both_dtypes = pytest.mark.parametrize("dtype", ["bfloat16", "float32"])


def draw(dtype, exponents=(-14, 3)):
    """Rows of many magnitudes, every special value, tiles of zeros and of little, and exact ties."""
    random = np.random.default_rng(0)
    x = np.ldexp(random.standard_normal(SHAPE), random.integers(*exponents, (SHAPE[0], 1))).astype(np.float32)
    x[0], x[1, 3], x[2, 5], x[3, 7], x[4, :16], x[5, 1] = 0, np.nan, np.inf, 1e4, -0.0, -np.inf
    x[6, :16], x[7, :16], x[8, :16], x[9, ::16] = 1e-39, 1e-30, 1e-12, -np.nan
    x[128:] = random.integers(-12, 13, (128, SHAPE[1])) / np.float32(2)
    x[128:, ::16], x[255, 63] = 6, 2688
    return jnp.asarray(x).astype(dtype)


def check(x, rule, amax=None, signs=None, key=None):
    """The kernel on the GPU and the definition on the CPU give the same bytes."""
    assert nvfp4_kernel.serves(x.shape, x.dtype)
    run = jax.jit(functools.partial(quantize_nvfp4, rule=rule))
    if jax.default_backend() == "gpu":
        assert "quantize_nvfp4" in run.lower(x, amax=amax, signs=signs, key=key).as_text()
    got = jax.device_get(run(x, amax=amax, signs=signs, key=key))
    cpu = jax.devices("cpu")[0]
    on_cpu = jax.tree.map(lambda leaf: jax.device_put(leaf, cpu), (x, amax, signs, key))
    with jax.default_device(cpu):
        expected = jax.device_get(jax.jit(functools.partial(define, rule=rule))(*on_cpu))
    for name, a, b in zip(("codes", "scales", "outer"), got, expected, strict=True):
        a, b = (np.atleast_1d(np.asarray(v)).view(np.uint8) for v in (a, b))
        assert a.size == b.size and not (a != b).any(), f"{name}: {(a != b).sum()} of {a.size} bytes differ"


@both_dtypes
@every_rule
def test_kernel_has_the_bits_of_the_definition(rule, dtype):
    check(draw(dtype), rule)


@both_dtypes
@every_rule
def test_an_amax_that_is_given(rule, dtype):
    for amax in (3.0, 2688.0, 1e-35, 1e30):
        check(draw(dtype), rule, amax=jnp.float32(amax))


@both_dtypes
@every_rule
def test_stochastic_rounding_by_the_bits_of_each_index(rule, dtype):
    check(draw(dtype), rule, key=counter.keys(7))


@both_dtypes
@pytest.mark.parametrize("key", [None, counter.keys(7)], ids=["nearest", "stochastic"])
@pytest.mark.parametrize(("axis", "signs"), [(1, None), (0, None), (0, SIGNS)], ids=["last", "first", "rotated"])
def test_numbers_that_training_multiplies(axis, signs, key, dtype):
    x = draw(dtype)
    run = jax.jit(lambda x, key, signs: nvfp4_arrays.quantize_values(x, axis, key, signs))
    assert "quantize_nvfp4" in run.lower(x, key, signs).as_text()
    got = jax.device_get(run(x, key, signs))
    with jax.default_device(jax.devices("cpu")[0]):
        expected = jax.device_get(run(*jax.tree.map(np.asarray, (x, key, signs))))
    np.testing.assert_array_equal(got.outer, expected.outer)
    # As numbers: the sign of a zero is nothing that a product shows.
    np.testing.assert_array_equal(got.values.astype(np.float32), expected.values.astype(np.float32))


@every_rule
def test_rotated(rule):
    for dtype in ("bfloat16", "float32"):
        for key in (None, counter.keys(7)):
            check(draw(dtype), rule, signs=jnp.asarray(SIGNS), key=key)


@pytest.mark.parametrize("exponents", [(-120, -100), (100, 120), (-30, 30)])
@every_rule
def test_magnitudes_far_from_one(rule, exponents):
    x = draw("float32", exponents)
    x = jnp.where(jnp.arange(SHAPE[0])[:, None] < 128, x, x[:1])
    check(x, rule)


@every_rule
def test_every_bfloat16_in_tiles_of_neighbours(rule):
    """65536 codes, as they follow each other and shuffled: NaN, infinities, subnormals and all scales of E4M3."""
    codes = np.arange(2**16, dtype=np.uint16)
    for order in (codes, np.random.default_rng(1).permutation(codes)):
        x = jax.lax.bitcast_convert_type(jnp.asarray(order), jnp.bfloat16).reshape(64, 1024)
        # With all magnitudes in it most tiles are zeros; below 1e3 they are not.
        check(jnp.where(jnp.abs(x) > 1e3, jnp.bfloat16(1), x), rule)
        check(x, rule)


def test_quotients_next_to_the_middle_of_two_codes():
    """A million float32 values within two ulps of a middle of their tile's scale, which tensors of any outer have."""
    random = np.random.default_rng(2)
    amax = random.uniform(1, 2, (4096, 1)).astype(np.float32) * 448
    x = np.repeat(amax, 256, 1)
    outer = np.float32(amax.max() / np.float32(2688))
    middles = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])
    made = jax.jit(quantize_nvfp4)(jnp.asarray(x))
    factor = np.asarray(made.scales.astype(jnp.float32))[:, :1] * np.asarray(made.outer)
    assert abs(float(made.outer) / outer - 1) < 1e-6
    near = (random.choice(middles, x.shape) * factor).astype(np.float32).view(np.int32) + random.integers(
        -2, 3, x.shape
    )
    near = near.astype(np.int32).view(np.float32)
    near[:, ::16] = x[:, ::16]
    check(jnp.asarray(near), "amax")


def test_under_vmap_and_scan():
    x = draw("bfloat16").reshape(4, 64, 1024)
    stacked = jax.jit(jax.vmap(lambda x: quantize_nvfp4(x, key=counter.keys(3)).codes))(x)
    scanned = jax.jit(lambda x: jax.lax.map(lambda x: quantize_nvfp4(x, key=counter.keys(3)).codes, x))(x)
    for i in range(4):
        expected = np.asarray(jax.jit(lambda x: quantize_nvfp4(x, key=counter.keys(3)).codes)(x[i]))
        assert np.array_equal(stacked[i], expected) and np.array_equal(scanned[i], expected)
