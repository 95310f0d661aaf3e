"""Layers and models with packed weights: drop-in, served, frozen next to adapters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx as flax_nnx
from numpy.testing import assert_allclose

from models.nets.gpt import GPT
from models.nets.shapes import GPTConfig
from tcfp_jax import linen, nnx, recipe
from tcfp_jax.conversion.convert import convert_to_tcfp, export, find_weights, survey
from tcfp_jax.inference import load_quantized, quantize_params
from tcfp_jax.layers.nnx import stored_weight
from tcfp_jax.products import fp4_linear, pack_fp4
from tests.helpers import (
    assert_near,
    drawn,
    nnx_model,
    parametrize,
    refused,
    same_bits,
    variables_of,
)

X = drawn(4, 33, seed=1)


def test_fp4_dense_is_a_drop_in_of_both_frameworks():
    """The number of inputs is odd. Codes are packed at each use, or once."""
    layer = linen.Fp4Dense(6)
    plain = nn.Dense(6)
    variables = variables_of(plain, X)
    model = nnx_model(lambda rngs: nnx.Fp4Dense(33, 6, rngs=rngs))
    assert model.recipe == recipe("nvfp4")
    assert isinstance(model, flax_nnx.Linear)
    params = variables["params"]
    state = flax_nnx.state(model)
    flax_nnx.replace_by_pure_dict(state, params)
    flax_nnx.update(model, state)
    y = jax.jit(layer.apply)(variables, X)
    stored = pack_fp4(params["kernel"]).dequantize()
    expected = X.astype(jnp.bfloat16).astype(jnp.float32) @ stored + params["bias"]
    assert_near(y, expected, 2e-6)
    assert_near(model(X), y, 1e-6)
    served = quantize_params(params, "nvfp4")
    assert set(served["params"]) == {"bias"}
    assert served["tcfp"]["kernel"].shape == (33, 6)
    assert_near(layer.apply(served, X), y, 1e-6)
    load_quantized(model, served)
    assert_near(model(X), y, 1e-6)
    assert type(export(layer)) is nn.Dense


def test_layers_round_x_as_their_recipe_says():
    how = recipe("nvfp4", activation="float4_e2m1fn")
    model = nnx_model(lambda rngs: nnx.Fp4Dense(33, 6, recipe=how, rngs=rngs))
    params = {"kernel": model.kernel[...], "bias": model.bias[...]}
    y = jax.jit(linen.Fp4Dense(6, recipe=how).apply)({"params": params}, X)
    assert same_bits(y, fp4_linear(X, params["kernel"], params["bias"], recipe=how))
    assert same_bits(model(X), y)
    assert not same_bits(y, linen.Fp4Dense(6).apply({"params": params}, X))
    # Under vmap each matrix of x has its own scale of the scales.
    stack = jnp.stack([X, 100 * X])
    many = jax.jit(
        jax.vmap(lambda x: fp4_linear(x, params["kernel"], params["bias"], recipe=how))
    )(stack)
    assert_allclose(many, jnp.stack([model(x) for x in stack]), rtol=1e-6, atol=1e-6)


@parametrize(
    "name, words",
    [("tensorwise", "not packed codes"), ("nvfp4_training", "packs no weight")],
)
def test_fp4_dense_refuses_recipes_that_pack_nothing(name, words):
    for make in (
        lambda: linen.Fp4Dense(6, recipe=name),
        lambda: nnx.Fp4Dense(33, 6, recipe=name, rngs=flax_nnx.Rngs(0)),
    ):
        with refused(f'recipe "{name}".*{words}'):
            make()
    assert linen.Fp4Dense(6, recipe=recipe("mxfp4")).clone().recipe == recipe("mxfp4")


TINY = GPTConfig(layers=1, width=32, heads=2, context=8)
TOKENS = jnp.asarray(np.random.default_rng(2).integers(0, 256, (2, 8)), jnp.int32)


def test_a_model_runs_on_codes_as_on_their_dequantized_weights():
    plain = GPT(TINY, None, dtype="float32")
    params = variables_of(plain, TOKENS)["params"]
    model = convert_to_tcfp(
        plain, "nvfp4", TOKENS, rules={"embedding": None}, include=("linear", "small")
    )
    assert len(survey(model).converted) == 4
    weights = find_weights(model)
    served = jax.jit(lambda params: quantize_params(params, weights))(params)
    logits = jax.jit(model.apply)(served, TOKENS)

    def dequantized(path, leaf):
        name = "/".join(key.key for key in path)
        if name not in weights:
            return leaf
        node = functools.reduce(
            lambda tree, key: tree[key], name.split("/"), served["tcfp"]
        )
        return node.dequantize().reshape(leaf.shape)

    floats = jax.tree_util.tree_map_with_path(dequantized, params)
    run = jax.jit(plain.apply)
    expected = run({"params": floats}, TOKENS)
    largest = float(jnp.abs(expected).max())
    # activations are BF16
    assert_near(logits, expected, 0.01 * largest)
    exact = run({"params": params}, TOKENS)
    # so the comparison tells one from the other
    assert float(jnp.abs(expected - exact).max()) > 0.02 * largest
    packed = sum(leaf.nbytes for leaf in jax.tree.leaves(served["tcfp"]))

    def size(tree):
        return sum(leaf.size for leaf in jax.tree.leaves(tree))

    count = size(params) - size(served["params"])
    assert packed * 8 / count < 4.5 + 32 * 4 / count + 1e-9


def trained(step, state, rounds=5):
    """Losses of some steps, which optax's own promotion needs."""
    losses = []
    with jax.numpy_dtype_promotion("standard"):
        for _ in range(rounds):
            value, state = step(state)
            losses.append(float(value))
    assert losses[-1] < 0.9 * losses[0]
    return state


def test_adapters_train_beside_frozen_codes_in_nnx():
    base = nnx_model(lambda rngs: nnx.Fp4Dense(32, 16, use_bias=False, rngs=rngs))
    load_quantized(base, quantize_params(flax_nnx.state(base, flax_nnx.Param), "nvfp4"))
    model = flax_nnx.LoRA(32, 4, 16, base_module=base, rngs=flax_nnx.Rngs(0))
    optimizer = flax_nnx.Optimizer(model, optax.adam(0.05), wrt=flax_nnx.LoRAParam)
    before = jax.tree.map(jnp.copy, stored_weight(base))

    @flax_nnx.jit
    def update(model, optimizer):
        def loss(model):
            return jnp.mean((model(X[:, :32]) - 1) ** 2)

        value, gradients = flax_nnx.value_and_grad(
            loss, argnums=flax_nnx.DiffState(0, flax_nnx.LoRAParam)
        )(model)
        optimizer.update(model, gradients)
        return value

    first = jnp.copy(model.lora_a[...])
    trained(lambda _: (update(model, optimizer), None), None)
    assert same_bits(stored_weight(base), before)
    assert not same_bits(model.lora_a[...], first)


class Adapted(nn.Module):
    """A frozen layer of four bits and the two matrices of its adapter."""

    @nn.compact
    def __call__(self, x):
        down = nn.Dense(4, use_bias=False, name="down")(x)
        up = nn.Dense(16, use_bias=False, name="up", kernel_init=nn.initializers.zeros)(
            down
        )
        return linen.Fp4Dense(16, name="base")(x) + up


def test_adapters_train_beside_frozen_codes_in_linen():
    model = Adapted()
    x = X[:, :32]
    params = variables_of(model, x)["params"]
    packed = quantize_params({"base": params["base"]}, "nvfp4")
    frozen = jax.tree.map(jnp.copy, packed)
    adapters = {name: params[name] for name in ("down", "up")}
    tx = optax.adam(0.05)

    @jax.jit
    def step(state):
        adapters, moments = state

        def loss(adapters):
            variables = {
                "params": {**packed["params"], **adapters},
                "tcfp": packed["tcfp"],
            }
            return jnp.mean((model.apply(variables, x) - 1) ** 2)

        value, gradients = jax.value_and_grad(loss)(adapters)
        updates, moments = tx.update(gradients, moments)
        return value, (optax.apply_updates(adapters, updates), moments)

    after, _ = trained(step, (adapters, tx.init(adapters)))
    assert same_bits(packed, frozen)
    assert not same_bits(after["up"], adapters["up"])
