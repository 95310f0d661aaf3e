"""FP4 training is read operand by operand, as its products read them; weights of four
bits clip, which is counted.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tcfp_jax
from pallas_kernels.operands import Fp4
from tcfp_jax import monitor
from tcfp_jax.formats import nvfp4_arrays
from tcfp_jax.monitor.readings import operands as operands_of
from tcfp_jax.monitor.readings import read
from tcfp_jax.products.fp4_training import _words_of, quantization
from tcfp_jax.recipes import recipe
from tcfp_jax.weights.fp4_packing import quantize_fp4
from tests.formats_oracles import QUICK
from tests.helpers import decibels, same_bits

KEY = jax.random.key(3)
FORWARD_IN_BF16 = recipe("nvfp4_training", forward_operands="bf16")


def operands(m, k, n):
    x, w = (
        jax.random.normal(jax.random.key(i), shape)
        for i, shape in enumerate([(m, k), (k, n)])
    )
    return x.at[3, 7].set(20), w / 6


@pytest.mark.slow_except("fp4")
@pytest.mark.parametrize(
    "how", [recipe("nvfp4_training"), FORWARD_IN_BF16], ids=["fp4", "forward in bf16"]
)
def test_every_operand_of_fp4_training_is_read_and_training_is_what_it_was(how):
    x, w = operands(20, 37, 25)  # nothing is a multiple of a block
    params = {"first": w, "last": jnp.ones((25, 3))}

    def loss(params, x):
        x = tcfp_jax.matmul(x, params["first"], recipe=how, key=KEY)
        return jnp.sum(tcfp_jax.matmul(x, params["last"], recipe="tensorwise") ** 2)

    result, readings = jax.jit(monitor.value_and_grad(loss), compiler_options=QUICK)(
        params, x
    )
    assert same_bits(
        result,
        jax.jit(tcfp_jax.value_and_grad(loss), compiler_options=QUICK)(params, x),
    )
    found = readings["first"]
    anew = {"w_dgrad"} if how == FORWARD_IN_BF16 else set()
    assert set(found) == {"x", "w", "g", "x_wgrad", "g_wgrad"} | anew and set(
        readings["last"]
    ) == {"x", "w", "g"}
    for name, of in (("x", x), ("x_wgrad", x), ("w", w)):
        np.testing.assert_allclose(found[name].amax, jnp.abs(of).max())
    exact = {"x", "w"} if how == FORWARD_IN_BF16 else set()
    assert all(
        15 < reading.snr < 27 for name, reading in found.items() if name not in exact
    )
    if exact:
        assert all(found[name].snr > 50 for name in exact)
        return
    made = jax.jit(
        lambda x: nvfp4_arrays.quantize_values(x, -1), compiler_options=QUICK
    )(x)
    rounded, exact_x = np.asarray(made.dequantize())[:, :37], np.asarray(x)
    np.testing.assert_allclose(found["x"].snr, decibels(exact_x, rounded), rtol=1e-4)
    np.testing.assert_allclose(
        found["x"].underflow, np.mean((exact_x != 0) & (rounded == 0)), rtol=1e-5
    )
    assert (
        0 < found["x"].saturation < np.mean(np.abs(exact_x) > np.abs(rounded) * 1.001)
    )


def test_what_is_observed_is_what_products_multiply():
    (x, w), words = operands(20, 37, 25), _words_of(KEY)

    def both(x, w):
        pairs = []
        for name, values in (("x_wgrad", x), ("w", w)):
            use = quantization(name, words)
            pairs.append(
                (
                    nvfp4_arrays.quantize_values(values, *use),
                    nvfp4_arrays.observe(values, *use),
                )
            )
        return pairs

    for values, (made, seen) in zip(
        (x, w), jax.jit(both, compiler_options=QUICK)(x, w), strict=True
    ):
        assert same_bits(made, seen.found)
        assert (jnp.abs(seen.found.values.astype(jnp.float32)) <= seen.largest).all()
        # A rotation keeps the sum of squares.
        np.testing.assert_allclose(
            jnp.linalg.norm(seen.exact), jnp.linalg.norm(values), rtol=1e-5
        )


def test_which_operands_are_quantized_anew():
    named = functools.partial(recipe, "nvfp4_training")
    assert operands_of(named(forward_operands="bf16")) == (
        "x",
        "w",
        "w_dgrad",
        "x_wgrad",
        "g",
        "g_wgrad",
    )
    assert operands_of(named()) == ("x", "w", "x_wgrad", "g", "g_wgrad")
    assert operands_of(recipe("bf16")) == ("x", "w", "g")


@pytest.mark.slow_except("nvfp4")
@pytest.mark.parametrize(
    "scaling, clipped", [(Fp4("mxfp4"), 2), (Fp4("nvfp4"), 1)], ids=["mxfp4", "nvfp4"]
)
def test_weights_of_four_bits_clip(scaling, clipped):
    # MXFP4's scale is 1 here, so that 6 is the largest number; NVFP4's are E4M3
    # numbers, of which one is a little less than a sixth of its block's largest value.
    w = jnp.ones((2, 32)).at[0, 0].set(7.9).at[0, 1].set(6.5).at[1, 0].set(6.0)
    if scaling.format == "nvfp4":
        w = w.at[0, 1].set(1.0).at[0, 0].set(450.0).at[1, 0].set(6.2)
    found = read(w, quantize_fp4(w, scaling))
    assert float(found.saturation) == clipped / w.size


@pytest.mark.slow_except("37")
@pytest.mark.parametrize("k", [37, 48])
def test_an_activation_in_nvfp4_is_read_as_its_product_rounds_it(k):
    x, w = operands(20, k, 25)
    how = recipe("nvfp4", activation="float4_e2m1fn")
    loss = lambda w, x: jnp.sum(tcfp_jax.matmul(x, w, recipe=how) ** 2)
    _, readings = jax.jit(monitor.value_and_grad(loss), compiler_options=QUICK)(w, x)
    (found,) = jax.tree.leaves(
        readings, is_leaf=lambda node: isinstance(node, dict) and "x" in node
    )
    made = jax.jit(
        lambda x: nvfp4_arrays.quantize_values(x, -1), compiler_options=QUICK
    )(x)
    np.testing.assert_allclose(
        found["x"].snr, decibels(np.asarray(x), made.dequantize()[:, :k]), rtol=1e-4
    )
