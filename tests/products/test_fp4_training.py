"""FP4 training: products of dequantized operands, unbiased gradients, and random bits
that a key decides.
"""

from functools import cache, partial
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_array_equal

import tcfp_jax
from tcfp_jax.conversion import convert_to_tcfp, export
from tcfp_jax.conversion.transform import transform
from tcfp_jax.formats import nvfp4_arrays
from tcfp_jax.formats.nvfp4_arrays import Nvfp4Values
from tcfp_jax.linen import TCFPDense
from tcfp_jax.nnx import TCFPLinear
from tcfp_jax.products import fp4_training
from tcfp_jax.recipes import Fp4Training, recipe
from tests.formats_oracles import QUICK
from tests.fp4_cases import rounded
from tests.helpers import (
    assert_all_close,
    mesh_of,
    normal,
    parametrize,
    putting,
    refused,
    slow,
    slow_except,
    value_and_gradients,
    variables_of,
)

KEY = jax.random.key(3)
FP4 = recipe("nvfp4_training")
FORWARD_IN_BF16 = recipe("nvfp4_training", forward_operands="bf16")
OPERANDS = get_args(fp4_training.OperandName)
EVERY_LAYER = ("linear", "small", "head")
jit = partial(jax.jit, compiler_options=QUICK)
convert = partial(convert_to_tcfp, include=EVERY_LAYER)
multiply = partial(tcfp_jax.matmul, recipe=FP4)
assert_near = partial(assert_all_close, rtol=1e-5, atol=1e-4)


def operands(m=32, k=32, n=32):
    x = normal(0, (m, k)).astype(jnp.bfloat16)  # as which the backward pass has it
    x = jnp.float32(x).at[3, 7].set(20)
    g = normal(2, (m, n)) * jnp.exp(normal(9, (m, 1)))
    return x, normal(1, (k, n)) / 7, g


X, W, G = operands()
# Each quantizer is compiled once for all tests, instead of once in each product.
quantize_values = jit(nvfp4_arrays.quantize_values, static_argnums=1)


def rule(how, x, w, g, key):
    """(y, dx, dw) by the rule of `tcfp_jax.matmul`, without the program that it would
    make of them.
    """
    y, saved = fp4_training._forward(how, x, w, fp4_training._words_of(key))
    return y, *fp4_training._backward(how, saved, g)[:2]


def products(how, x, w, g, key):
    """The same with compiled quantizers, which no other program can hold."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fp4_training, "quantize_values", quantize_values)
        return rule(how, x, w, g, key)


def quantizations():
    """How each operand is quantized."""
    words = fp4_training._words_of(KEY)
    return {name: fp4_training.quantization(name, words) for name in OPERANDS}


def assert_product(got, a, b):
    """`got` is the product of exact numbers, but for the order in which float32
    adds.
    """
    a = np.float64(a)
    b = np.float64(b)
    bound = 2.0**-20 * (np.abs(a) @ np.abs(b)) + 1e-30
    assert (np.abs(np.float64(got) - a @ b) <= bound).all()


@parametrize("how", [FP4, FORWARD_IN_BF16], ids=["fp4", "forward in bf16"])
def test_products_are_those_of_the_format_librarys_values(how):
    m, k, n = 20, 37, 25
    x, w, g = operands(m, k, n)
    y, dx, dw = products(how, x, w, g, KEY)
    use = quantizations()

    def read(name, values):
        return quantize_values(values, *use[name]).dequantize()

    w_q = quantize_values(w, None).dequantize()[:k, :n]
    if how == FP4:
        assert_product(y, read("x", x)[:, :k], w_q)
    else:
        assert_product(y, rounded(x), rounded(w))
    assert_product(dx, read("g", g)[:, :n], w_q.T)
    assert_product(dw, read("x_wgrad", x).T, read("g_wgrad", g))


def test_rotations_cancel_where_nothing_is_rounded(monkeypatch):
    def exact(chosen, x, signs, key):
        seen = nvfp4_arrays.observe(x, chosen[0].axis, key, signs)
        return Nvfp4Values(seen.exact, jnp.float32(1))

    monkeypatch.setattr(nvfp4_arrays, "_dispatched", exact)
    x, w, g = operands(m=128)
    _, dx, dw = jit(partial(rule, FP4))(x, w, g, KEY)
    # Products round these operands to BF16. A rotation that stays would leave an error
    # as large as the gradient.
    for got, exact in ((dx, g @ w.T), (dw, x.T @ g)):
        assert jnp.linalg.norm(got - exact) < 0.01 * jnp.linalg.norm(exact)


@cache
def many():
    """(keys, products of each)."""
    keys = jax.random.split(KEY, 256)
    return keys, jax.vmap(lambda key: products(FP4, X, W, G, key))(keys)


def test_gradients_are_unbiased():
    y, *gradients = [np.float64(part) for part in many()[1]]
    assert (y == y[0]).all()  # the forward pass draws nothing
    exact = (G @ quantize_values(W, None).dequantize().T, X.T @ G)
    for got, want in zip(gradients, exact, strict=True):
        noise = np.linalg.norm(got - got.mean(0), axis=(1, 2)).mean()
        left = np.linalg.norm(got.mean(0) - np.asarray(want))
        # 256 draws leave a sixteenth of the noise; x in NVIDIA's wgrad is rounded to
        # nearest, over random rotations.
        assert left < 0.1 * noise, (left, noise)


def test_rounding_gradients_to_nearest_would_be_biased():  # the control
    w_q = quantize_values(W, None).dequantize().T
    want = G @ w_q
    bias = quantize_values(G, -1).dequantize() @ w_q - want
    assert float(jnp.linalg.norm(bias)) > 0.05 * float(jnp.linalg.norm(want))


@parametrize("place", [0, 1])
def test_without_a_key_only_the_forward_pass_exists(place):
    y = multiply(X, W, recipe="nvfp4_training")
    assert_array_equal(y, products(FP4, X, W, G, KEY)[0])
    draws = r'recipe "nvfp4_training" draws random bits, and got no key; .*key= of'
    with refused(draws):
        jax.grad(lambda x, w: multiply(x, w).sum(), place)(X, W)


def test_remat_and_scan_draw_the_same_bits_and_every_step_others():
    @jax.checkpoint
    def loss(w, key):
        return (multiply(X, w, key=key) * G).sum()

    def step(w, i):
        return w, jax.value_and_grad(loss)(w, jax.random.fold_in(KEY, i))

    _, (losses, gradients) = jit(lambda w: jax.lax.scan(step, w, jnp.arange(3)))(W)
    for i in range(3):
        y, _, gradient = products(FP4, X, W, G, jax.random.fold_in(KEY, i))
        assert_near([losses[i]], [(y * G).sum()])
        assert_near([gradients[i]], [gradient], rtol=1e-4)
    assert float(jnp.abs(gradients[0] - gradients[1]).max()) > 0.1
    assert len(set(losses.tolist())) == 1


def test_vmap_and_meshes_are_the_same_products():
    keys, drawn = many()
    assert_near(products(FP4, X, W, G, keys[1]), [both[1] for both in drawn])
    put = putting(mesh_of(2))
    on_two = jit(partial(rule, FP4))(put(X, "a"), W, put(G, "a"), KEY)
    assert_near(products(FP4, X, W, G, KEY), on_two)


@slow
def test_in_shard_map_each_device_has_its_tokens_products():
    x, w, g = operands(m=64)

    def inside(x, w, g):
        return value_and_gradients(multiply, x, w, g, key=KEY)

    data = P("a")
    split = dict(in_specs=(data, P(), data), out_specs=(data, data, P()))
    parts = jax.shard_map(inside, mesh=mesh_of(2), **split)
    y, dx, dw = jit(parts)(x, w, g)
    first = products(FP4, x[:32], w, g[:32], KEY)
    last = products(FP4, x[32:], w, g[32:], KEY)
    assert_near((y[:32], dx[:32]), first[:2])
    assert_near((y[32:], dx[32:], dw - first[2]), last)


def test_no_two_operands_are_rounded_by_the_same_bits():
    """Roundings of one value by the same bits err alike, and errors that are not
    independent add up.
    """
    found = quantizations()
    keys = {name: each.key for name, each in found.items() if each.key is not None}
    assert set(keys) == {"g", "g_wgrad"}
    assert (np.asarray(keys["g"]) != np.asarray(keys["g_wgrad"])).any()
    signs = {name for name, each in found.items() if each.signs is not None}
    assert signs == {"x_wgrad", "g_wgrad"}
    assert np.array_equal(found["x_wgrad"].signs, found["g_wgrad"].signs)


def multiply_stored(w):
    return multiply(X, tcfp_jax.quantize(w.T), key=KEY)


training = partial(recipe, "nvfp4_training")
A_FLOAT_WEIGHT = "FP4 training quantizes a float weight"


@parametrize(
    "call, message",
    [
        (partial(Fp4Training, "fp8"), "forward_operands='fp8' is unknown"),
        (partial(training, wgrad="full"), A_FLOAT_WEIGHT),
        (partial(training, quantize_backend="xla"), A_FLOAT_WEIGHT),
        (partial(recipe, "tcfp12", forward_operands="bf16"), "has no such field"),
        (partial(jax.eval_shape, multiply_stored, W), "multiplies float weights"),
    ],
)
def test_contradictions_are_refused(call, message):
    with refused(message):
        call()


# Layers and converted models
# --------------------------------------------------------------------------------------


def mean_square(model):
    return jnp.square(model(X)).mean()


def of_linen(model):
    """The gradient of a Linen model by its variables, for a key or None."""

    def loss(variables, key):
        rngs = None if key is None else {"tcfp": key}
        return jnp.square(model.apply(variables, X, rngs=rngs)).sum()

    return jax.grad(loss)


def differ(a, b):
    return (np.asarray(a) != np.asarray(b)).any()


def test_linen_layers_take_keys_from_rngs():
    layer = partial(TCFPDense, 32, recipe=FORWARD_IN_BF16)
    model = nn.Sequential([layer(), layer()])
    variables = variables_of(model, X)
    gradient = jit(of_linen(model))
    first = gradient(variables, jax.random.key(1))
    again = gradient(variables, jax.random.key(1))
    jax.tree.map(assert_array_equal, first, again)
    other = gradient(variables, jax.random.key(2))
    for name in ("layers_0", "layers_1"):
        assert differ(first["params"][name]["kernel"], other["params"][name]["kernel"])
    with refused(r'rngs=\{"tcfp": key\}'):
        of_linen(model)(variables, None)


def test_each_call_of_an_nnx_layer_has_a_key_of_its_own():
    layer = TCFPLinear(32, 32, recipe=FORWARD_IN_BF16, rngs=nnx.Rngs(0))
    gradient = nnx.grad(mean_square)
    assert differ(gradient(layer).kernel[...], gradient(layer).kernel[...])


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.relu(nn.Dense(32)(x)), None


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        split = dict(variable_axes={"params": 0}, split_rngs={"params": True})
        layers = nn.scan(nn.remat(Layer), length=2, **split)
        return layers()(x, None)[0]


def test_converted_models_draw_by_place_and_turn():
    model = convert(Scanned(), FORWARD_IN_BF16, X)
    variables = variables_of(Scanned(), X)
    gradient = jit(of_linen(model))

    def kernels(key):
        return np.asarray(jax.tree.leaves(gradient(variables, key))[-1])

    first = kernels(jax.random.key(1))
    assert_array_equal(first, kernels(jax.random.key(1)))
    assert (first != kernels(jax.random.key(2))).any(axis=(1, 2)).all()
    with refused("got no key"):
        of_linen(model)(variables, None)


def test_equal_products_are_rounded_by_bits_of_their_own():
    """Of two places in a program, and of two rounds of a loop: equal operands, other
    gradients.
    """

    def loss(params, x):
        def turn(carry, w):
            return carry, (x @ w) * G

        y = jnp.sum((x @ params["first"]) * G) + jnp.sum((x @ params["second"]) * G)
        return y + jnp.sum(jax.lax.scan(turn, 0.0, params["stack"])[1])

    params = {"first": W, "second": W, "stack": jnp.stack([W, W])}
    converted = transform(loss, FORWARD_IN_BF16, include=EVERY_LAYER)
    gradient = jax.jit(jax.grad(partial(converted, product_key=jax.random.key(1))))
    found = gradient(params, X)
    for a, b in ((found["first"], found["second"]), found["stack"]):
        assert np.mean(np.asarray(a) != np.asarray(b)) > 0.1


class Two(nnx.Module):
    """Two layers, and perhaps the rngs that they were made with."""

    def __init__(self, rngs, keep=False):
        self.first = nnx.Linear(32, 32, use_bias=False, rngs=rngs)
        self.second = nnx.Linear(32, 32, use_bias=False, rngs=rngs)
        if keep:
            self.rngs = rngs

    def __call__(self, x):
        return self.second(nnx.relu(self.first(x)))


def test_converted_nnx_models_draw_from_streams_of_their_own():
    model = convert(Two(nnx.Rngs(0)), FORWARD_IN_BF16, X, rngs=nnx.Rngs(tcfp=3))
    optimizer = nnx.Optimizer(model, optax.sgd(0.0), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        loss, gradients = nnx.value_and_grad(mean_square)(model)
        optimizer.update(model, gradients)
        return loss, nnx.to_pure_dict(gradients)

    held = nnx.to_pure_dict(nnx.state(model, nnx.RngState))
    # checkpoints have them
    assert set(held["tcfp_keys"]) == set(held["first"]["tcfp_keys"]) == {"key", "count"}
    loss, first = step(model, optimizer)
    again, second = step(model, optimizer)
    assert loss == again  # no parameter changed, and the forward pass draws nothing
    for name in ("first", "second"):
        assert differ(first[name]["kernel"], second[name]["kernel"])
    assert model.tcfp_keys.count[...] == 2
    # a part draws from its own
    nnx.grad(lambda model: mean_square(model.first))(model)
    assert (model.tcfp_keys.count[...], model.first.tcfp_keys.count[...]) == (2, 1)

    export(model)
    assert not jax.tree.leaves(nnx.state(model, nnx.RngState))


def test_converted_nnx_models_without_keys():
    model = convert(Two(nnx.Rngs(0)), FORWARD_IN_BF16, X)
    assert jnp.isfinite(mean_square(model))  # an evaluation needs none
    draws = r"draws random bits, and got no key; .*rngs=nnx.Rngs\(tcfp=seed\)"
    with refused(draws):
        nnx.grad(mean_square)(model)


@parametrize(
    "model, rngs, error, message",
    [
        (
            Two,
            jax.random.key,
            TypeError,
            r"rngs is a .*; pass nnx.Rngs\(tcfp=seed\)",
        ),
        (
            lambda rngs: nn.Dense(32),
            nnx.Rngs,
            ValueError,
            r'a Linen model gets them at apply, as rngs=\{"tcfp": key\}',
        ),
    ],
    ids=["key", "linen"],
)
def test_streams_of_another_kind_are_refused(model, rngs, error, message):
    with refused(message, error):
        convert(model(nnx.Rngs(0)), FORWARD_IN_BF16, X, rngs=rngs(0))


@slow_except("the model's own")
@parametrize(
    "kept", [True, False], ids=["the model's own", "the default of what is given"]
)
def test_where_converted_nnx_models_find_a_stream(kept):
    given = None if kept else nnx.Rngs(5)
    model = convert(Two(nnx.Rngs(0, tcfp=1), kept), FORWARD_IN_BF16, rngs=given)
    gradient = nnx.grad(mean_square)
    first = gradient(model).second.kernel[...]
    assert differ(first, gradient(model).second.kernel[...])
    assert model.tcfp_keys.count[...] == 2
    plain = convert(Two(nnx.Rngs(0, tcfp=1), kept), "tensorwise", X, rngs=given)
    assert not hasattr(plain, "tcfp_keys")  # nothing draws
