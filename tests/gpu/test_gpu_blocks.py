"""Blocks on a GPU: products stay in bounds, zero blocks may be left out, and recipes
agree with the CPU.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

import tcfp_jax
from pallas_kernels.hopper.plan import Problem, candidates
from pallas_kernels.matmul import mosaic
from pallas_kernels.matmul.api import SUM_BOUND, matmul, skip_matmul
from pallas_kernels.operands import Block, MatmulOptions
from pallas_kernels.quantize.api import dual_quantize, quantize
from tests.fp8_products import E4M3, drawn, within
from tests.helpers import normal, on_cpu, parametrize, value_and_gradients

pytestmark = pytest.mark.gpu
SHAPE = (512, 1024, 256)


@pytest.fixture(scope="module")
def data():
    """x `[512, 1024]`, whose rows have very different sizes, and w `[256, 1024]`."""
    x = normal(0, (512, 1024)) * jnp.exp(3 * normal(1, (512, 1)))
    return x, normal(2, (256, 1024)) * 0.02


@parametrize("backend", ["xla", "mosaic", "triton"])
@parametrize(
    "scaling, halves",
    [
        (Block(128), 2),
        (Block(128, "vector"), 1),
        (Block(64), 2),
        (Block(32), 1),
        (Block(32, "vector"), 2),
    ],
    ids=str,
)
def test_products_stay_in_bounds(scaling, halves, backend):
    x, w, exact, magnitude = drawn(scaling, halves, SHAPE)
    product = partial(matmul, out_dtype=jnp.float32, backend=backend)
    got = jax.jit(product)(x, w)
    assert within(got, exact, magnitude, SUM_BOUND[backend, "full"])


@parametrize("part", [0.0, 0.5, 1.0])
def test_zero_blocks_of_a_residual_may_be_left_out(data, part):
    x, w = data
    order = jax.random.permutation(jax.random.key(3), 16).reshape(2, 8)
    is_zero = order < round(16 * part)
    rounded = quantize(w, E4M3, Block(128)).rows.dequantize()
    w = jnp.where(jnp.repeat(jnp.repeat(is_zero, 128, 0), 128, 1), rounded, w)
    x = quantize(x, E4M3, Block(128, "vector")).rows
    w = dual_quantize(w, Block(128)).rows
    on_mosaic = {"out_dtype": jnp.float32, "backend": "mosaic"}
    every = np.asarray(jax.jit(partial(matmul, **on_mosaic))(x, w))

    def assert_close(product):
        atol = 1e-3 * np.max(np.abs(every))
        assert_allclose(jax.jit(product)(x, w), every, rtol=1e-3, atol=atol)

    assert_close(partial(skip_matmul, **on_mosaic))
    options = MatmulOptions(jnp.dtype(jnp.float32), "full")
    problem = Problem(*SHAPE, 2, Block(128), skips=True)
    for config in candidates(problem, "full"):
        assert_close(partial(mosaic.KERNEL.run, options, bias=None, config=config))


@parametrize("name", ["blockwise", "tcfp12_blockwise", "mxfp8", "rowwise"])
def test_a_recipe_and_its_gradients_are_those_of_the_cpu(data, name):
    x = data[0].astype(jnp.bfloat16)
    arrays = (x, data[1].T, jnp.ones((512, 256), jnp.bfloat16))
    product = partial(tcfp_jax.matmul, recipe=name)
    run = jax.jit(partial(value_and_gradients, product))
    for got, exact in zip(run(*arrays), on_cpu(run, *arrays), strict=True):
        exact = np.float64(exact)
        error = np.linalg.norm(np.float64(got) - exact)
        assert error <= 0.01 * np.linalg.norm(exact)
