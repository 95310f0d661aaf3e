"""NVFP4's numbers in one pass on a GPU: bits of the definition, which XLA computes on a
CPU.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from pallas_kernels import counter
from pallas_kernels.hopper import plan
from tcfp_jax.formats import nvfp4_arrays
from tests.formats.test_nvfp4_numbers import CASES, awkward
from tests.helpers import parametrize

pytestmark = pytest.mark.gpu
SHAPE = (256, 1024)
draw = partial(awkward, shape=SHAPE)
ENGINES = ("triton", "mosaic") if plan.reject(jnp.bfloat16) is None else ("triton",)
every_case = parametrize("name", CASES)


def quantizer(backend):
    return jax.jit(
        partial(nvfp4_arrays.quantize_values, backend=backend),
        static_argnums=1,
    )


def check(x, name):
    """The kernels on the GPU and the definition on the CPU give the same numbers."""
    axis, key, signs = CASES[name]
    with jax.default_device(jax.devices("cpu")[0]):
        on_cpu = jax.tree.map(np.asarray, (x, key, signs))
        expected = jax.device_get(quantizer("xla")(on_cpu[0], axis, *on_cpu[1:]))
    for backend in ENGINES:
        got = jax.device_get(quantizer(backend)(x, axis, key, signs))
        assert_array_equal(got.outer, expected.outer)
        # As numbers: the sign of a zero is nothing that a product shows.
        assert_array_equal(
            got.values.astype(np.float32), expected.values.astype(np.float32), backend
        )


@every_case
@parametrize("dtype", ["bfloat16", "float32"])
def test_kernels_have_the_bits_of_the_definition(name, dtype):
    check(draw(dtype), name)


@every_case
@parametrize("exponents", [(-120, -100), (100, 120), (-30, 30)])
def test_magnitudes_far_from_one(exponents, name):
    x = draw("float32", exponents=exponents)
    check(jnp.where(jnp.arange(SHAPE[0])[:, None] < 128, x, x[:1]), name)


@every_case
def test_every_bfloat16_in_blocks_of_neighbours(name):
    """65536 codes, as they follow each other and shuffled: NaN, infinities, subnormals
    and all scales of E4M3.
    """
    codes = np.arange(2**16, dtype=np.uint16)
    for order in (codes, np.random.default_rng(1).permutation(codes)):
        x = jax.lax.bitcast_convert_type(jnp.asarray(order), jnp.bfloat16)
        x = x.reshape(64, 1024)
        # With all magnitudes in it most blocks are zeros; below 1e3 they are not.
        check(jnp.where(jnp.abs(x) > 1e3, jnp.bfloat16(1), x), name)
        check(x, name)


def test_quotients_next_to_the_middle_of_two_codes():
    """A million float32 values within two ulps of a middle of their block's scale,
    which tensors of any outer have.
    """
    random = np.random.default_rng(2)
    amax = random.uniform(1, 2, (4096, 1)).astype(np.float32) * 448
    x = np.repeat(amax, 256, 1)
    made = jax.jit(nvfp4_arrays.observe, static_argnums=1)(jnp.asarray(x), -1)
    factor = np.asarray(made.largest)[:, :1] / 6 * np.asarray(made.found.outer)
    middles = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])
    near = (random.choice(middles, x.shape) * factor).astype(np.float32)
    near = near.view(np.int32) + random.integers(-2, 3, x.shape, np.int32)
    near = near.view(np.float32)
    near[:, ::16] = x[:, ::16]
    check(jnp.asarray(near), "last")


def test_under_vmap_and_scan():
    x = draw("bfloat16").reshape(4, 64, 1024)

    def one(x):
        return nvfp4_arrays.quantize_values(x, -1, counter.keys(3)).values

    stacked = jax.jit(jax.vmap(one))(x)
    scanned = jax.jit(partial(jax.lax.map, one))(x)
    for i in range(4):
        expected = np.asarray(jax.jit(one)(x[i])).view(np.uint16)
        assert_array_equal(np.asarray(stacked[i]).view(np.uint16), expected)
        assert_array_equal(np.asarray(scanned[i]).view(np.uint16), expected)
