"""Blocks on a GPU: kernels that quantize are the reference bit for bit, products stay
in bounds, recipes agree.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tcfp_jax
from pallas_kernels.hopper.plan import Problem, candidates
from pallas_kernels.matmul import mosaic
from pallas_kernels.matmul.api import SUM_BOUND, matmul, skip_matmul
from pallas_kernels.operands import Block, Product
from pallas_kernels.quantize.api import dual_quantize, quantize
from tests.helpers import float64_of, same_bits

pytestmark = pytest.mark.gpu
E4M3 = jnp.float8_e4m3fn
FORMS = [
    (128, "square", 2),
    (128, "vector", 1),
    (64, "square", 2),
    (32, "square", 1),
    (32, "vector", 2),
]


@pytest.fixture(scope="module")
def data():
    """x `[512, 1024]`, whose rows have very different sizes, and w `[256, 1024]`."""
    x = jax.random.normal(jax.random.key(0), (512, 1024))
    x *= jnp.exp(3 * jax.random.normal(jax.random.key(1), (512, 1)))
    return x, jax.random.normal(jax.random.key(2), (256, 1024)) * 0.02


@pytest.mark.parametrize("tile", ["vector", "square"])
@pytest.mark.parametrize("block", [32, 64, 128])
def test_quantizing_is_the_same_on_every_backend(data, block, tile):
    x = data[0].at[3, 5].set(jnp.nan).at[200:264, :128].set(0.0).astype(jnp.bfloat16)
    call = jax.jit(
        functools.partial(
            quantize, dtype=E4M3, scaling=Block(block, tile), orientation="both"
        ),
        static_argnames="backend",
    )
    expected = call(x, backend="xla")
    for backend in ("triton", "mosaic"):
        assert same_bits(call(x, backend=backend), expected)
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        assert same_bits(call(jax.device_put(x, cpu), backend="xla"), expected)


@pytest.mark.parametrize("with_bits", [False, True])
@pytest.mark.parametrize("block", [32, 64, 128])
def test_the_residual_of_blocks_is_there_and_the_same(data, block, with_bits):
    w = data[1].at[:128, :128].set(0.5)
    if with_bits:
        given = dict(bits=jax.random.bits(jax.random.key(3), w.shape))
    else:
        given = dict(error=data[1] * 1e-3)
    call = jax.jit(
        functools.partial(dual_quantize, scaling=Block(block), orientation="both"),
        static_argnames="backend",
    )
    expected = call(w, backend="xla", **given)
    assert np.mean(np.asarray(expected.rows.lo[128:].astype(jnp.float32)) != 0) > 0.95
    assert same_bits(call(w, backend="triton", **given), expected)
    assert same_bits(call(w, backend="mosaic", **given), expected)


@pytest.mark.parametrize("backend", ["xla", "mosaic", "triton"])
@pytest.mark.parametrize("block, tile, halves", FORMS)
def test_products_stay_in_bounds(data, block, tile, halves, backend):
    scaling = Block(block, tile)
    x = quantize(data[0], E4M3, scaling.along_rows).rows
    w = dual_quantize(data[1], scaling).rows
    if halves == 1:
        w = w.drop_residual()
    product = functools.partial(matmul, out_dtype=jnp.float32, backend=backend)
    got = jax.jit(product)(x, w)
    a = float64_of(x)
    b = float64_of(w)
    bound = SUM_BOUND[backend, "full"] * (np.abs(a) @ np.abs(b).T)
    assert np.all(np.abs(np.asarray(got, np.float64) - a @ b.T) <= bound)


@pytest.mark.parametrize("part", [0.0, 0.5, 1.0])
def test_zero_blocks_of_a_residual_may_be_left_out(data, part):
    x, w = data
    order = jax.random.permutation(jax.random.key(3), 16).reshape(2, 8)
    is_zero = order < round(16 * part)
    rounded = quantize(w, E4M3, Block(128)).rows.dequantize()
    w = jnp.where(jnp.repeat(jnp.repeat(is_zero, 128, 0), 128, 1), rounded, w)
    x = quantize(x, E4M3, Block(128, "vector")).rows
    w = dual_quantize(w, Block(128)).rows
    on_mosaic = dict(out_dtype=jnp.float32, backend="mosaic")
    every = np.asarray(jax.jit(functools.partial(matmul, **on_mosaic))(x, w))

    def assert_close(product):
        got = np.asarray(jax.jit(product)(x, w))
        atol = 1e-3 * np.max(np.abs(every))
        np.testing.assert_allclose(got, every, rtol=1e-3, atol=atol)

    assert_close(functools.partial(skip_matmul, **on_mosaic))
    run = functools.partial(
        mosaic.KERNEL.run, Product(jnp.dtype(jnp.float32), "full"), bias=None
    )
    problem = Problem(512, 1024, 256, 2, Block(128), skips=True)
    for config in candidates(problem, "full"):
        assert_close(functools.partial(run, config=config))


@pytest.mark.parametrize("name", ["blockwise", "tcfp12_blockwise", "mxfp8", "rowwise"])
def test_a_recipe_and_its_gradients_are_those_of_the_cpu(data, name):
    x = data[0].astype(jnp.bfloat16)
    arrays = x, data[1].T, jnp.ones((512, 256), jnp.bfloat16)

    def run(x, w, g):
        y, pull = jax.vjp(lambda x, w: tcfp_jax.matmul(x, w, recipe=name), x, w)
        return (y, *pull(g))

    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        expected = jax.jit(run)(*jax.device_put(arrays, cpu))
    for got, exact in zip(jax.jit(run)(*arrays), expected, strict=True):
        exact = np.asarray(exact).astype(np.float64)
        difference = np.asarray(got).astype(np.float64) - exact
        assert np.linalg.norm(difference) <= 0.01 * np.linalg.norm(exact)
