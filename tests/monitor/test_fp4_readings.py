"""FP4 training is read operand by operand, as its products read them; weights of four
bits clip, which is counted.
"""

from functools import partial

import jax
import jax.numpy as jnp
from numpy.testing import assert_allclose

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
from tests.helpers import decibels, drawn, parametrize, same_bits, slow_except

KEY = jax.random.key(3)
FORWARD_IN_BF16 = recipe("nvfp4_training", forward_operands="bf16")


def operands(m, k, n):
    return drawn(m, k).at[3, 7].set(20), drawn(k, n, seed=1) / 6


@partial(jax.jit, compiler_options=QUICK)
def rounded(x):
    """x as the product reads it, without its padding."""
    return nvfp4_arrays.quantize_values(x, -1).dequantize()[:, : x.shape[1]]


@slow_except("fp4")
@parametrize(
    "how", [recipe("nvfp4_training"), FORWARD_IN_BF16], ids=["fp4", "forward in bf16"]
)
def test_operands_of_fp4_training_are_read_and_nothing_changes(how):
    x, w = operands(20, 37, 25)  # nothing is a multiple of a block
    params = {"first": w, "last": jnp.ones((25, 3))}

    def loss(params, x):
        x = tcfp_jax.matmul(x, params["first"], recipe=how, key=KEY)
        return jnp.sum(tcfp_jax.matmul(x, params["last"], recipe="tensorwise") ** 2)

    compiled = partial(jax.jit, compiler_options=QUICK)
    result, readings = compiled(monitor.value_and_grad(loss))(params, x)
    assert same_bits(result, compiled(tcfp_jax.value_and_grad(loss))(params, x))
    found = readings["first"]
    assert set(found) == set(operands_of(how))
    assert set(readings["last"]) == {"x", "w", "g"}
    for name, of in (("x", x), ("x_wgrad", x), ("w", w)):
        assert_allclose(found[name].amax, jnp.abs(of).max())
    exact = ("x", "w") if how == FORWARD_IN_BF16 else ()
    for name, reading in found.items():
        assert reading.snr > 50 if name in exact else 15 < reading.snr < 27
    if exact:
        return
    q = rounded(x)
    reading = found["x"]
    assert_allclose(reading.snr, decibels(x, q), rtol=1e-4)
    lost = jnp.mean((x != 0) & (q == 0))
    assert_allclose(reading.underflow, lost, rtol=1e-5)
    clipped = jnp.mean(jnp.abs(x) > jnp.abs(q) * 1.001)
    assert 0 < reading.saturation < clipped


@parametrize("name, which", [("x_wgrad", 0), ("w", 1)])
def test_products_multiply_the_values_that_are_observed(name, which):
    values = operands(20, 37, 25)[which]

    @partial(jax.jit, compiler_options=QUICK)
    def both(values):
        use = quantization(name, _words_of(KEY))
        made = nvfp4_arrays.quantize_values(values, *use)
        return made, nvfp4_arrays.observe(values, *use)

    made, seen = both(values)
    assert same_bits(made, seen.found)
    assert (jnp.abs(seen.found.values.astype(jnp.float32)) <= seen.largest).all()
    # A rotation keeps the sum of squares.
    norm = jnp.linalg.norm(seen.exact)
    assert_allclose(norm, jnp.linalg.norm(values), rtol=1e-5)


def test_which_operands_are_quantized_anew():
    named = partial(recipe, "nvfp4_training")
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


@slow_except("nvfp4")
@parametrize(
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


@slow_except("37")
@parametrize("k", [37, 48])
def test_an_activation_in_nvfp4_is_read_as_its_product_rounds_it(k):
    x, w = operands(20, k, 25)
    how = recipe("nvfp4", activation="float4_e2m1fn")

    def loss(params, x):
        return jnp.sum(tcfp_jax.matmul(x, params["w"], recipe=how) ** 2)

    run = jax.jit(monitor.value_and_grad(loss), compiler_options=QUICK)
    _, readings = run({"w": w}, x)
    snr = readings["w"]["x"].snr
    assert_allclose(snr, decibels(x, rounded(x)), rtol=1e-4)
