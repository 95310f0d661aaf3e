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
    x = jax.random.normal(jax.random.key(0), (512, 1024)) * jnp.exp(
        3 * jax.random.normal(jax.random.key(1), (512, 1))
    )
    return x, jax.random.normal(jax.random.key(2), (256, 1024)) * 0.02


@pytest.mark.parametrize("tile", ["vector", "square"])
@pytest.mark.parametrize("block", [32, 64, 128])
def test_quantizing_is_the_same_on_every_backend_and_on_the_cpu(data, block, tile):
    x = data[0].at[3, 5].set(jnp.nan).at[200:264, :128].set(0.0).astype(jnp.bfloat16)
    call = functools.partial(
        quantize, dtype=E4M3, scaling=Block(block, tile), orientation="both"
    )
    expected = jax.jit(functools.partial(call, backend="xla"))(x)
    for backend in ("triton", "mosaic"):
        assert same_bits(jax.jit(functools.partial(call, backend=backend))(x), expected)
    with jax.default_device(jax.devices("cpu")[0]):
        assert same_bits(
            call(jax.device_put(x, jax.devices("cpu")[0]), backend="xla"), expected
        )


@pytest.mark.parametrize("with_bits", [False, True])
@pytest.mark.parametrize("block", [32, 64, 128])
def test_the_residual_of_blocks_is_there_and_the_same(data, block, with_bits):
    w, error = data[1].at[:128, :128].set(0.5), data[1] * 1e-3
    given = (
        dict(bits=jax.random.bits(jax.random.key(3), w.shape))
        if with_bits
        else dict(error=error)
    )
    call = functools.partial(dual_quantize, scaling=Block(block), orientation="both")
    parts = [
        jax.jit(functools.partial(call, backend=b))(w, **given)
        for b in ("xla", "triton", "mosaic")
    ]
    assert same_bits(parts[0], parts[1]) and same_bits(parts[0], parts[2])
    assert np.mean(np.asarray(parts[0].rows.lo[128:].astype(jnp.float32)) != 0) > 0.95


@pytest.mark.parametrize("backend", ["xla", "mosaic", "triton"])
@pytest.mark.parametrize("block, tile, halves", FORMS)
def test_products_stay_in_bounds(data, block, tile, halves, backend):
    scaling = Block(block, tile)
    x, w = (
        quantize(data[0], E4M3, scaling.along_rows).rows,
        dual_quantize(data[1], scaling).rows,
    )
    w = w if halves == 2 else w.drop_residual()
    got = jax.jit(functools.partial(matmul, out_dtype=jnp.float32, backend=backend))(
        x, w
    )
    a, b = float64_of(x), float64_of(w)
    bound = SUM_BOUND[backend, "full"] * (np.abs(a) @ np.abs(b).T)
    assert np.all(np.abs(np.asarray(got, np.float64) - a @ b.T) <= bound)


@pytest.mark.parametrize("part", [0.0, 0.5, 1.0])
def test_zero_blocks_of_a_residual_may_be_left_out(data, part):
    x, w = data
    blocks = jax.random.permutation(jax.random.key(3), 16).reshape(2, 8) < round(
        16 * part
    )
    rounded = quantize(w, E4M3, Block(128)).rows.dequantize()
    w = jnp.where(jnp.repeat(jnp.repeat(blocks, 128, 0), 128, 1), rounded, w)
    x, w = (
        quantize(x, E4M3, Block(128, "vector")).rows,
        dual_quantize(w, Block(128)).rows,
    )
    every = np.asarray(
        jax.jit(functools.partial(matmul, out_dtype=jnp.float32, backend="mosaic"))(
            x, w
        )
    )
    close = functools.partial(
        np.testing.assert_allclose,
        desired=every,
        rtol=1e-3,
        atol=1e-3 * np.max(np.abs(every)),
    )
    close(
        np.asarray(
            jax.jit(
                functools.partial(skip_matmul, out_dtype=jnp.float32, backend="mosaic")
            )(x, w)
        )
    )
    options = Product(jnp.dtype(jnp.float32), "full")
    for config in candidates(
        Problem(512, 1024, 256, 2, Block(128), skips=True), "full"
    ):
        close(
            np.asarray(
                jax.jit(
                    functools.partial(mosaic.matmul, options, bias=None, config=config)
                )(x, w)
            )
        )


@pytest.mark.parametrize("name", ["blockwise", "tcfp12_blockwise", "mxfp8", "rowwise"])
def test_a_recipe_and_its_gradients_are_those_of_the_cpu(data, name):
    x, w, g = (
        data[0].astype(jnp.bfloat16),
        data[1].T,
        jnp.ones((512, 256), jnp.bfloat16),
    )

    def run(x, w, g):
        y, pull = jax.vjp(lambda x, w: tcfp_jax.matmul(x, w, recipe=name), x, w)
        return (y, *pull(g))

    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        expected = jax.jit(run)(*(jax.device_put(v, cpu) for v in (x, w, g)))
    for got, exact in zip(jax.jit(run)(x, w, g), expected, strict=True):
        got, exact = (np.asarray(v).astype(np.float64) for v in (got, exact))
        assert np.linalg.norm(got - exact) <= 0.01 * np.linalg.norm(exact)
