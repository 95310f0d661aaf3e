"""NVFP4 in one pass on a GPU: bits of the definition, which XLA computes on a CPU, for
every rule and rounding.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import counter
from pallas_kernels.hopper import plan
from tcfp_jax.formats import nvfp4_arrays, quantize_nvfp4
from tests.formats.test_nvfp4_arrays import SIGNS, awkward

pytestmark = pytest.mark.gpu
RULES = ("amax", "four_over_six", "fold_exact")
SHAPE = (256, 1024)
draw = functools.partial(awkward, shape=SHAPE)
ENGINES = ("triton", "mosaic") if plan.reject(jnp.bfloat16) is None else ("triton",)
every_rule = pytest.mark.parametrize("rule", RULES)
both_dtypes = pytest.mark.parametrize("dtype", ["bfloat16", "float32"])


def check(x, rule, amax=None, signs=None, key=None):
    """The kernels on the GPU and the definition on the CPU give the same bytes."""
    arrays, cpu = {"amax": amax, "key": key}, jax.devices("cpu")[0]
    run = lambda backend: jax.jit(
        functools.partial(quantize_nvfp4, rule=rule, signs=signs, backend=backend)
    )
    with jax.default_device(cpu):
        expected = jax.device_get(
            run("xla")(*jax.device_put((x,), cpu), **jax.device_put(arrays, cpu))
        )
    for backend in ENGINES:
        got = jax.device_get(run(backend)(x, **arrays))
        for name, a, b in zip(("codes", "scales", "outer"), got, expected, strict=True):
            a, b = (np.atleast_1d(np.asarray(v)).view(np.uint8) for v in (a, b))
            assert a.size == b.size and not (a != b).any(), (
                f"{backend}, {name}: {(a != b).sum()} of {a.size} bytes"
            )


@both_dtypes
@every_rule
def test_kernels_have_the_bits_of_the_definition(rule, dtype):
    """To nearest and by random bits, rotated or not, and with an amax that is given."""
    x = draw(dtype)
    for signs in (None, SIGNS):
        for key in (None, counter.keys(7)):
            check(x, rule, signs=signs, key=key)
    for amax in (3.0, 2688.0, 1e-35, 1e30):
        check(x, rule, amax=jnp.float32(amax))


@both_dtypes
@pytest.mark.parametrize("key", [None, counter.keys(7)], ids=["nearest", "stochastic"])
@pytest.mark.parametrize(
    ("axis", "signs"),
    [(1, None), (0, None), (0, SIGNS)],
    ids=["last", "first", "rotated"],
)
def test_numbers_that_training_multiplies(axis, signs, key, dtype):
    x = draw(dtype)
    run = lambda backend: jax.jit(
        lambda *of: nvfp4_arrays.quantize_values(of[0], axis, *of[1:], backend=backend)
    )
    with jax.default_device(jax.devices("cpu")[0]):
        expected = jax.device_get(
            run("xla")(*jax.tree.map(np.asarray, (x, key, signs)))
        )
    for backend in ENGINES:
        got = jax.device_get(run(backend)(x, key, signs))
        np.testing.assert_array_equal(got.outer, expected.outer)
        # As numbers: the sign of a zero is nothing that a product shows.
        np.testing.assert_array_equal(
            got.values.astype(np.float32), expected.values.astype(np.float32)
        )


@pytest.mark.parametrize("exponents", [(-120, -100), (100, 120), (-30, 30)])
@every_rule
def test_magnitudes_far_from_one(rule, exponents):
    x = draw("float32", exponents=exponents)
    x = jnp.where(jnp.arange(SHAPE[0])[:, None] < 128, x, x[:1])
    check(x, rule)


@every_rule
def test_every_bfloat16_in_tiles_of_neighbours(rule):
    """65536 codes, as they follow each other and shuffled: NaN, infinities, subnormals
    and all scales of E4M3.
    """
    codes = np.arange(2**16, dtype=np.uint16)
    for order in (codes, np.random.default_rng(1).permutation(codes)):
        x = jax.lax.bitcast_convert_type(jnp.asarray(order), jnp.bfloat16).reshape(
            64, 1024
        )
        # With all magnitudes in it most tiles are zeros; below 1e3 they are not.
        check(jnp.where(jnp.abs(x) > 1e3, jnp.bfloat16(1), x), rule)
        check(x, rule)


def test_quotients_next_to_the_middle_of_two_codes():
    """A million float32 values within two ulps of a middle of their tile's scale, which
    tensors of any outer have.
    """
    random = np.random.default_rng(2)
    amax = random.uniform(1, 2, (4096, 1)).astype(np.float32) * 448
    x = np.repeat(amax, 256, 1)
    outer = np.float32(amax.max() / np.float32(2688))
    middles = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])
    made = jax.jit(quantize_nvfp4)(jnp.asarray(x))
    factor = np.asarray(made.scales.astype(jnp.float32))[:, :1] * np.asarray(made.outer)
    assert abs(float(made.outer) / outer - 1) < 1e-6
    near = (random.choice(middles, x.shape) * factor).astype(np.float32).view(np.int32)
    near = (near + random.integers(-2, 3, x.shape)).astype(np.int32).view(np.float32)
    near[:, ::16] = x[:, ::16]
    check(jnp.asarray(near), "amax")


def test_under_vmap_and_scan():
    x = draw("bfloat16").reshape(4, 64, 1024)
    stacked = jax.jit(jax.vmap(lambda x: quantize_nvfp4(x, key=counter.keys(3)).codes))(
        x
    )
    scanned = jax.jit(
        lambda x: jax.lax.map(lambda x: quantize_nvfp4(x, key=counter.keys(3)).codes, x)
    )(x)
    for i in range(4):
        expected = np.asarray(
            jax.jit(lambda x: quantize_nvfp4(x, key=counter.keys(3)).codes)(x[i])
        )
        assert np.array_equal(stacked[i], expected) and np.array_equal(
            scanned[i], expected
        )
