"""Blocks on a GPU: kernels that quantize are the reference bit for bit, products stay in bounds, recipes agree."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pallas_kernels.block_dual_quantize.api import block_dual_quantize
from pallas_kernels.block_matmul import mosaic
from pallas_kernels.block_matmul.api import block_matmul
from pallas_kernels.block_quantize.api import block_quantize

import tcfp_jax
from pallas_kernels.blocks import Blocked
from pallas_kernels.matmul.api import SUM_BOUND

pytestmark = [
    pytest.mark.gpu,
    # Deprecated since jax 0.11 and still the way to 16-byte stores.
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]
X = jax.random.normal(jax.random.key(0), (512, 1024)) * jnp.exp(3 * jax.random.normal(jax.random.key(1), (512, 1)))
W = jax.random.normal(jax.random.key(2), (256, 1024)) * 0.02
FORMS = [(128, "square", 2), (128, "vector", 1), (64, "square", 2), (32, "square", 1), (32, "vector", 2)]


def same_bits(got, expected):
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


@pytest.mark.parametrize("tile", ["vector", "square"])
@pytest.mark.parametrize("block", [32, 64, 128])
def test_quantizing_is_the_same_on_every_backend_and_on_the_cpu(block, tile):
    x = X.at[3, 5].set(jnp.nan).at[200:264, :128].set(0.0).astype(jnp.bfloat16)
    call = functools.partial(block_quantize, dtype=jnp.float8_e4m3fn, block=block, tile=tile, orientation="both")
    expected = jax.jit(functools.partial(call, backend="xla"))(x)
    assert same_bits(jax.jit(functools.partial(call, backend="triton"))(x), expected)
    with jax.default_device(jax.devices("cpu")[0]):
        assert same_bits(call(jax.device_put(x, jax.devices("cpu")[0]), backend="xla"), expected)


@pytest.mark.parametrize("block", [32, 64, 128])
def test_the_residual_of_blocks_is_there_and_the_same(block):
    w, error = W.at[:128, :128].set(0.5), W * 1e-3
    call = functools.partial(block_dual_quantize, block=block, orientation="both")
    parts = [jax.jit(functools.partial(call, backend=b))(w, error=error) for b in ("xla", "triton")]
    assert same_bits(*parts)
    assert np.mean(np.asarray(parts[0].lo[128:].astype(jnp.float32)) != 0) > 0.95


@pytest.mark.parametrize("backend", ["xla", "mosaic", "triton"])
@pytest.mark.parametrize("block, tile, halves", FORMS)
def test_products_stay_in_bounds(block, tile, halves, backend):
    x_q, w_q = block_quantize(X, jnp.float8_e4m3fn, block=block), block_dual_quantize(W, block=block, tile=tile)
    x, w, lo = Blocked(*x_q[:2]), Blocked(w_q.hi, w_q.scales), Blocked(w_q.lo, w_q.residual_scales)
    call = functools.partial(block_matmul, block=block, tile=tile, out_dtype=jnp.float32, backend=backend)
    got = jax.jit(call)(x, w, *([lo] if halves == 2 else []))
    wide = lambda q, t: np.asarray(tcfp_jax.weights.blocks.BlockArray(*q, block=block, tile=t).dequantize(), np.float64)
    a, b = wide(x, "vector"), wide(w, tile) + (wide(lo, tile) if halves == 2 else 0)
    bound = SUM_BOUND[backend, "full"] * (np.abs(a) @ np.abs(b).T)
    assert np.all(np.abs(np.asarray(got, np.float64) - a @ b.T) <= bound)


@pytest.mark.parametrize("part", [0.0, 0.5, 1.0])
def test_zero_blocks_of_a_residual_may_be_left_out(part):
    blocks = jax.random.permutation(jax.random.key(3), 16).reshape(2, 8) < round(16 * part)
    rounded = tcfp_jax.quantize(W, block=128, tile="square").dequantize()
    w = jnp.where(jnp.repeat(jnp.repeat(blocks, 128, 0), 128, 1), rounded, W)
    x_q, w_q = block_quantize(X, jnp.float8_e4m3fn, block=128), block_dual_quantize(w, block=128)
    arguments = Blocked(*x_q[:2]), Blocked(w_q.hi, w_q.scales), Blocked(w_q.lo, w_q.residual_scales)
    call = functools.partial(block_matmul, block=128, out_dtype=jnp.float32, backend="mosaic")
    every = np.asarray(jax.jit(call)(*arguments))
    close = functools.partial(np.testing.assert_allclose, desired=every, rtol=1e-3, atol=1e-3 * np.max(np.abs(every)))
    close(np.asarray(jax.jit(functools.partial(call, residual_blocks="nonzero"))(*arguments)))
    for config in mosaic.candidates(512, 1024, 256, 2, 128, "nonzero"):
        direct = functools.partial(
            mosaic.block_matmul, block=128, tile="square", out_dtype=jnp.dtype(jnp.float32), residual_blocks="nonzero",
            config=config,
        )  # fmt: skip
        close(np.asarray(jax.jit(direct)(*arguments)))


@pytest.mark.parametrize("name", ["blockwise", "tcfp12_blockwise", "mxfp8", "rowwise", "residual_activation"])
def test_a_recipe_and_its_gradients_are_those_of_the_cpu(name):
    x, w, g = X.astype(jnp.bfloat16), W.T, jnp.ones((512, 256), jnp.bfloat16)

    def run(x, w, g):
        y, pull = jax.vjp(lambda x, w: tcfp_jax.matmul(x, w, recipe=name), x, w)
        return (y, *pull(g))

    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        expected = jax.jit(run)(*(jax.device_put(v, cpu) for v in (x, w, g)))
    for got, exact in zip(jax.jit(run)(x, w, g), expected, strict=True):
        got, exact = (np.asarray(v).astype(np.float64) for v in (got, exact))
        assert np.linalg.norm(got - exact) <= 0.01 * np.linalg.norm(exact)
