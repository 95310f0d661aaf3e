"""Signal-to-noise of what is stored and of what comes out; the pytrees."""

import jax
import jax.numpy as jnp
import numpy as np

import tcfp_jax
from tcfp_jax.products import pack_fp4
from tcfp_jax.weights.quantization import quantize_weight
from tests.helpers import decibels, normal, parametrize, refused, same_bits

W = normal(0, (1024, 1024))


def test_weights_in_decibels():
    assert abs(decibels(W, tcfp_jax.quantize(W).dequantize()) - 31.5) <= 0.1
    assert decibels(W, tcfp_jax.split(W).dequantize()) >= 64.0
    assert decibels(W, tcfp_jax.split(W, key=jax.random.key(1)).dequantize()) >= 60.0


def test_outputs_in_decibels():
    x = normal(2, (256, 1024))
    exact = np.float64(x) @ np.float64(W)
    assert decibels(exact, tcfp_jax.matmul(x, W, recipe="tcfp12")) >= 31.4
    assert decibels(exact, tcfp_jax.matmul(x, W, recipe="tensorwise")) >= 28.4


def test_stochastic_residual_is_unbiased_over_the_whole_range():
    grid = np.concatenate([[0.0], np.geomspace(1e-9, 1.0, 63)]).astype(np.float32)
    w = jnp.asarray(np.concatenate([grid, -grid]))
    sample = jax.jit(jax.vmap(lambda key: tcfp_jax.split(w, key=key).dequantize()))
    samples = np.float64(sample(jax.random.split(jax.random.key(3), 4096)))
    error = samples.mean(0) - np.float64(w)
    deviation = samples.std(0)
    assert np.all(np.abs(error) <= 4.5 * deviation / np.sqrt(len(samples)) + 1e-8)


def test_split_adds_the_error():
    error = jnp.full_like(W, 1e-3)
    assert jnp.array_equal(
        tcfp_jax.split(W, error=error).dequantize(),
        tcfp_jax.split(W + error).dequantize(),
    )


@parametrize("make", [tcfp_jax.quantize, tcfp_jax.split])
def test_pytrees_pass_through_transformations(make):
    x = W[:8, :8]
    stored = make(x)
    leaves, treedef = jax.tree.flatten(stored)
    assert jnp.array_equal(treedef.unflatten(leaves).dequantize(), stored.dequantize())
    assert stored.shape == x.shape
    assert stored.dequantize(jnp.bfloat16).dtype == jnp.bfloat16
    assert jnp.array_equal(
        jax.jit(lambda s: s.dequantize())(stored), stored.dequantize()
    )
    rows = jax.vmap(make)(x)
    assert rows.scale.shape == (8,)
    assert jnp.array_equal(
        rows.dequantize(), jax.vmap(lambda r: make(r).dequantize())(x)
    )
    assert jnp.isfinite(
        jax.grad(lambda v: jnp.sum(v * make(jax.lax.stop_gradient(v)).dequantize()))(x)
    ).all()


def test_dropping_a_residual_drops_nothing_else():
    w = W[:32, :32]
    packed = pack_fp4(w)
    assert same_bits(packed.drop_residual(), packed)
    late = tcfp_jax.split(w).turn_late()
    assert jnp.array_equal(
        late.drop_residual().dequantize(),
        tcfp_jax.split(w).drop_residual().dequantize().T,
    )


@parametrize("recipe", ["rowwise", "mxfp8"])
def test_one_orientation_of_rows_or_vectors_serves_no_product(recipe):
    stored, _ = quantize_weight(W[:64, :64], tcfp_jax.recipe(recipe), copies="one")
    with refused(
        r"in both orientations, but quantized is a weight .* in one orientation"
    ):
        tcfp_jax.matmul(W[:8, :64], stored, recipe=recipe)


def test_codes_of_four_bits_have_no_amax_of_the_tensor():
    with refused("amax= scales a whole tensor"):
        quantize_weight(W[:32, :32], tcfp_jax.recipe("nvfp4"), amax=jnp.float32(1))
