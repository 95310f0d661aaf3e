"""Conversion where kernels run: converted models on a GPU give the bits of models
written by hand.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx as flax_nnx

import tcfp_jax
from tcfp_jax.conversion import (
    convert_to_tcfp,
    export,
    find_weights,
    survey,
    to_bf16,
)
from tcfp_jax.inference import load_quantized, quantize_params
from tcfp_jax.linen import TCFPDense
from tcfp_jax.nnx import Optimizer, TCFPLinear
from tests.helpers import nnx_model, parametrize, same_bits, variables_of

# Flax's LayerNorm in bfloat16 multiplies by its float32 scale, which strict dtype
# promotion refuses.
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("standard_promotion")]
WIDTH, HEADS = 256, 4
# Each once: the gradient of a lookup adds rows in no fixed order on a GPU, so no row
# may be looked up twice.
TOKENS = jnp.asarray(np.random.default_rng(0).permutation(512)[:256].reshape(2, 128))
KERNELS = {
    "chosen": tcfp_jax.recipe("tcfp12_fast"),
    "kernels": tcfp_jax.recipe(
        "tcfp12_fast", backend="mosaic", quantize_backend="triton"
    ),
    "single": tcfp_jax.recipe("tensorwise"),
}
# XLA computes what stands between two products, so every bit is that of the model
# written by hand. Where a kernel does, each operation is rounded as the program says,
# and XLA keeps float32 between them.
APART = {
    name: dataclasses.replace(recipe, quantize_backend="xla")
    for name, recipe in KERNELS.items()
}
convert = partial(convert_to_tcfp, include=("linear", "small"))
named = parametrize("name", KERNELS)


class Block(nn.Module):
    dense: type

    @nn.compact
    def __call__(self, x, _=None):
        dense = partial(self.dense, dtype=jnp.bfloat16)
        h = nn.LayerNorm(dtype=jnp.bfloat16, name="norm")(x)
        q, k, v = (
            dense(WIDTH, name=name)(h).reshape(*x.shape[:-1], HEADS, -1)
            for name in ("query", "key", "value")
        )
        x = x + dense(WIDTH, name="out")(
            nn.dot_product_attention(q, k, v).reshape(x.shape)
        )
        return x + dense(WIDTH, name="down")(
            nn.gelu(dense(4 * WIDTH, name="up")(x))
        ), None


class GPT(nn.Module):
    dense: type = nn.Dense

    @nn.compact
    def __call__(self, tokens):
        embedding = nn.Embed(512, WIDTH, dtype=jnp.bfloat16, name="embedding")
        axes = {
            "variable_axes": {"params": 0, "tcfp": 0},
            "split_rngs": {"params": True},
            "length": 2,
        }
        x, _ = nn.scan(nn.remat(Block), **axes)(self.dense, name="blocks")(
            embedding(tokens), None
        )
        return embedding.attend(nn.LayerNorm(dtype=jnp.bfloat16, name="norm")(x))


def step(model, params, weights):
    tx = optax.chain(optax.sgd(0.1), tcfp_jax.error_feedback(weights))

    @jax.jit
    def run(params):
        state = tx.init(params)

        def loss(params):
            variables = {"params": params, "tcfp": tcfp_jax.layer_state(state)}
            return jnp.mean(
                jnp.square(model.apply(variables, TOKENS).astype(jnp.float32))
            )

        value, gradients = jax.value_and_grad(loss)(params)
        updates, after = tx.update(gradients, state, params)
        return value, optax.apply_updates(params, updates), after

    return run(params)


def stepped(model, params):
    return step(model, params, find_weights(model, TOKENS))


@named
def test_a_converted_gpt_steps_like_the_handwritten_one(name):
    recipe = APART[name]
    params = variables_of(GPT(), TOKENS)["params"]
    dense = type(
        "Dense",
        (TCFPDense,),
        {"recipe": recipe, "__annotations__": {"recipe": tcfp_jax.Recipe}},
    )
    converted = convert(GPT(), recipe, TOKENS)
    by_hand = GPT(dense)
    assert len(survey(converted).converted) == 6
    result = stepped(converted, params)
    assert same_bits(result, stepped(by_hand, params))
    for leaf in jax.tree.leaves(result):
        assert np.isfinite(leaf.astype(np.float32)).all()
    assert not same_bits(result[1], step(GPT(), params, {})[1])


@named
def test_activations_in_kernels_change_only_roundings(name):
    params = variables_of(GPT(), TOKENS)["params"]

    def moved(recipe):
        _, after, _ = stepped(convert(GPT(), recipe, TOKENS), params)
        return jax.tree.map(jnp.subtract, after, params)

    def part(got, expected):
        error = jnp.linalg.norm((got - expected).ravel())
        return float(error / jnp.linalg.norm(expected.ravel()))

    lost = jax.tree.map(part, moved(KERNELS[name]), moved(APART[name]))
    # A key's bias moves every score of a query alike, which softmax takes away: its
    # gradient is rounding and no more.
    lost["blocks"]["key"].pop("bias")
    # FP8 itself loses 0.03 to 0.06 of each operand, and a query's gradient is a
    # difference of larger numbers.
    assert max(jax.tree.leaves(lost)) < 0.25, lost


def test_the_base_model_and_layers_that_are_off_run_flax():
    variables = variables_of(GPT(), TOKENS)

    def run(model):
        return jax.jit(lambda v: model.apply(v, TOKENS))(variables)

    exact = run(GPT())
    converted = convert(GPT(), "tcfp12_fast", TOKENS)
    assert not same_bits(run(converted), exact)
    assert all(
        same_bits(run(model), exact)
        for model in (GPT(), to_bf16(converted, ""), export(converted))
    )


class MLP(flax_nnx.Module):
    def __init__(self, rngs, linear=flax_nnx.Linear):
        linear = partial(linear, dtype=jnp.bfloat16, rngs=rngs)
        self.up = linear(WIDTH, 4 * WIDTH)
        self.down = linear(4 * WIDTH, WIDTH)

    def __call__(self, x):
        return self.down(flax_nnx.relu(self.up(x)))


X = jnp.asarray(np.random.default_rng(1).standard_normal((256, WIDTH)), jnp.bfloat16)
forward = flax_nnx.jit(lambda model, x: model(x))


@flax_nnx.jit
def train(model, optimizer, x):
    def loss(model):
        return jnp.mean(jnp.square(model(x).astype(jnp.float32)))

    value, gradients = flax_nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return value


@named
def test_a_converted_nnx_model_steps_like_the_handwritten_one(name):
    linear = partial(TCFPLinear, recipe=APART[name])
    models = [
        convert(nnx_model(MLP), APART[name]),
        nnx_model(lambda rngs: MLP(rngs, linear)),
    ]
    results = []
    for model in models:
        tx = optax.chain(
            optax.sgd(0.1), tcfp_jax.error_feedback(find_weights(model, X))
        )
        optimizer = Optimizer(model, tx)
        losses = [train(model, optimizer, X) for _ in range(2)]
        results.append((losses, flax_nnx.as_pure(flax_nnx.state(optimizer))))
    assert same_bits(*results)
    assert float(results[0][0][1]) < float(results[0][0][0])


@named
def test_inference_weights_replace_the_float_ones(name):
    model, bare = (convert(nnx_model(MLP, seed), KERNELS[name]) for seed in (0, 1))
    expected = forward(model, X)
    load_quantized(
        bare,
        quantize_params(flax_nnx.state(model, flax_nnx.Param), find_weights(model, X)),
    )
    error = jnp.linalg.norm(
        forward(bare, X).astype(jnp.float32) - expected.astype(jnp.float32)
    )
    # The same quantized operands; only the order of float32 sums may differ, and
    # bfloat16's last bit with it.
    assert float(error) < 1e-2 * float(jnp.linalg.norm(expected.astype(jnp.float32)))
