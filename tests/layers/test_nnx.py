"""NNX layers and conversion in place: the same `Param`s, and the way back."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx as flax_nnx

import tcfp_jax
from tcfp_jax.conversion import (
    convert_to_tcfp,
    export,
    find_weights,
    restore,
    survey,
    to_bf16,
)
from tcfp_jax.nnx import (
    Optimizer,
    TCFPEmbed,
    TCFPLayerNorm,
    TCFPLinear,
)
from tests.helpers import (
    MLP,
    assert_near,
    drawn,
    nnx_model,
    parametrize,
    refused,
    same_bits,
    slow_except,
)

X = drawn(2, 4, 16, seed=1)
TOKENS = jnp.arange(8).reshape(2, 4)
ALL = ("linear", "small", "head")


class Block(flax_nnx.Module):
    def __init__(self, rngs):
        self.norm = flax_nnx.LayerNorm(16, rngs=rngs)
        self.attention = flax_nnx.MultiHeadAttention(
            num_heads=2, in_features=16, decode=False, rngs=rngs
        )
        self.up = flax_nnx.Linear(16, 32, rngs=rngs)
        self.down = flax_nnx.Einsum("btk,kn->btn", (32, 16), (16,), rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(flax_nnx.gelu(self.up(x)))


class GPT(flax_nnx.Module):
    def __init__(self, rngs):
        self.embedding = flax_nnx.Embed(32, 16, rngs=rngs)
        self.blocks = flax_nnx.List([Block(rngs) for _ in range(1)])

    def __call__(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = flax_nnx.remat(lambda block, x: block(x))(block, x)
        return self.embedding.attend(x)


def held(module):
    """The stored kernel of a converted layer, as arrays."""

    def is_variable(node):
        return isinstance(node, flax_nnx.Variable)

    return jax.tree.map(
        lambda variable: variable[...],
        module.tcfp_stored["kernel"],
        is_leaf=is_variable,
    )


def pure(model):
    return flax_nnx.as_pure(flax_nnx.state(model, flax_nnx.Param))


@flax_nnx.jit
def forward(model, x):
    return model(x)


TRACES = []


@flax_nnx.jit
def train(model, optimizer, tokens):
    TRACES.append(type(model))
    loss, gradients = flax_nnx.value_and_grad(
        lambda model: jnp.mean(model(tokens) ** 2)
    )(model)
    optimizer.update(model, gradients)
    return loss


def test_a_gpt_converts_in_place_trains_and_comes_back():
    model = nnx_model(GPT)
    float_model = nnx_model(GPT)
    before = forward(model, TOKENS)
    params = pure(model)
    converted = convert_to_tcfp(
        model, "tcfp12_fast", TOKENS, include=ALL, rules={"nothing": "bf16"}
    )
    report = survey(model)
    assert converted is model
    assert len(report.converted) == 7
    assert report.unmatched_rules == ("'nothing'",)
    assert not report.skipped
    assert type(model.blocks[0].up).__mro__[1] is flax_nnx.Linear
    assert same_bits(params, pure(model))
    assert not jnp.array_equal(forward(model, TOKENS), before)
    assert jnp.array_equal(forward(float_model, TOKENS), before)
    optimizer = Optimizer(model, optax.sgd(0.01))
    TRACES.clear()
    losses = [float(train(model, optimizer, TOKENS)) for _ in range(3)]
    assert len(TRACES) == 1  # state before and after the first update has one structure
    assert losses[2] < losses[0]
    assert all(np.isfinite(losses))
    # The layer reads what the optimizer wrote last: the weight of now, rounded.
    layer = model.blocks[0].up
    values = jax.jit(lambda stored: stored.dequantize())(held(layer))
    assert_near(values, layer.kernel[...], 4e-3)
    trained = pure(model)
    # a checkpoint goes both ways
    flax_nnx.update(float_model, flax_nnx.state(model, flax_nnx.Param))
    assert export(model) is model
    assert type(model.blocks[0].up) is flax_nnx.Linear
    assert same_bits(pure(model), trained)
    assert jnp.array_equal(forward(model, TOKENS), forward(float_model, TOKENS))
    assert jax.tree.structure(flax_nnx.state(model)) == jax.tree.structure(
        flax_nnx.state(float_model)
    )


@slow_except("TCFPLinear")
@parametrize(
    "theirs, mine, arguments",
    [
        (flax_nnx.Linear, TCFPLinear, (16, 8)),
        (flax_nnx.LayerNorm, TCFPLayerNorm, (16,)),
    ],
    ids=["TCFPLinear", "TCFPLayerNorm"],
)
def test_layers_have_flax_parameters_and_nearly_its_results(theirs, mine, arguments):
    layer, exact = (
        nnx_model(lambda rngs, kind=kind: kind(*arguments, rngs=rngs))
        for kind in (mine, theirs)
    )
    assert same_bits(pure(layer), pure(exact))
    y, wanted = flax_nnx.jit(lambda layer, exact: (layer(X), exact(X)))(layer, exact)
    assert y.shape == wanted.shape
    assert float(jnp.sum((y - wanted) ** 2) / jnp.sum(wanted**2)) < 1e-2


def test_embed_rounds_rows_and_attends():
    layer = nnx_model(lambda rngs: TCFPEmbed(32, 16, rngs=rngs))
    model = nnx_model(lambda rngs: flax_nnx.Embed(32, 16, rngs=rngs))
    convert_to_tcfp(model, "tcfp12", include=ALL)

    @flax_nnx.jit
    def results(layer, model):
        table = layer.embedding[...]
        scores = tcfp_jax.matmul(X, table.T, recipe="tcfp12")
        rounded = tcfp_jax.fake_quantize(table)[TOKENS]
        found = layer(TOKENS), model(TOKENS), layer.attend(X), model.attend(X)
        return (rounded, table[TOKENS], scores, scores), found

    assert same_bits(*results(layer, model))


def test_layers_that_are_switched_off_are_flax_bit_for_bit():
    model = nnx_model(
        lambda rngs: flax_nnx.Sequential(flax_nnx.Linear(16, 16, rngs=rngs))
    )
    exact = forward(model, X)
    convert_to_tcfp(model, "tensorwise", X, include=ALL)
    low = forward(model, X)
    weights = find_weights(model)
    assert same_bits(forward(to_bf16(model, "layers"), X), exact)
    assert not same_bits(low, exact)
    assert not survey(model).converted
    assert "switched off" in str(survey(model))
    assert find_weights(model) == weights
    assert same_bits(forward(restore(model, "layers"), X), low)
    with refused("finds no"):
        to_bf16(model, "blocks")


@slow_except("tensorwise")
@pytest.mark.optimized("slow")
@parametrize("recipe", ["tcfp12", "tensorwise", "blockwise"])
def test_a_step_is_that_of_the_model_written_by_hand(recipe):
    def linear(*sizes, rngs):
        return TCFPLinear(*sizes, recipe=recipe, rngs=rngs)

    models = [nnx_model(MLP), nnx_model(lambda rngs: MLP(rngs, linear))]
    convert_to_tcfp(models[0], recipe, include=ALL)
    results = []
    for model in models:
        tx = optax.chain(
            optax.sgd(0.1), tcfp_jax.error_feedback(find_weights(model, X))
        )
        optimizer = Optimizer(model, tx)
        results.append(
            (
                train(model, optimizer, X),
                pure(model),
                flax_nnx.as_pure(flax_nnx.state(optimizer)),
            )
        )
    assert same_bits(*results)
    assert not survey(models[1], X).skipped


@parametrize("recipe", ["bf16", "nvfp4_training"])
@parametrize("converted", [True, False])
def test_an_optimizer_of_a_model_that_stores_no_weights(recipe, converted):
    model = TCFPLinear(32, 16, recipe=recipe, rngs=flax_nnx.Rngs(0))
    if converted:
        streams = {"rngs": flax_nnx.Rngs(1)} if recipe == "nvfp4_training" else {}
        plain = flax_nnx.Linear(32, 16, rngs=flax_nnx.Rngs(0))
        x = jnp.ones((2, 32))
        model = convert_to_tcfp(
            plain, recipe, x, include=("linear", "small", "head"), **streams
        )
    tx = optax.chain(
        optax.sgd(0.1), tcfp_jax.error_feedback(find_weights(model, jnp.ones((2, 32))))
    )
    Optimizer(model, tx)
    assert model(jnp.ones((2, 32))).shape == (2, 16)


def test_bad_input():
    rngs = flax_nnx.Rngs(0)
    sgd = optax.sgd(0.1)
    layer = TCFPLinear(16, 8, rngs=rngs)
    plain = flax_nnx.Linear(2, 2, rngs=rngs)
    for message, call in (
        ("precision", lambda: TCFPLinear(16, 8, precision="highest", rngs=rngs)),
        ("unknown", lambda: TCFPLinear(16, 8, recipe="tcfp13", rngs=rngs)),
        ("find_weights needs sample inputs", lambda: Optimizer(layer, sgd)),
        ("not converted", lambda: Optimizer(plain, sgd)),
        ("no low-precision layer", lambda: export(plain)),
        ("not converted", lambda: survey(plain)),
    ):
        with refused(message):
            call()


@slow_except("32")
@parametrize("block", [32, 64])
def test_blocks_keep_their_size_on_narrow_layers(block):
    """A layer as narrow as a block has one scale with any block size."""
    recipe = tcfp_jax.recipe("blockwise", block=block)

    def make(rngs):
        return TCFPLinear(64, 32, recipe=recipe, rngs=rngs)

    model = nnx_model(make)
    without_state = nnx_model(make)
    x = drawn(4, 64, seed=2)
    fresh = forward(model, x)
    optimizer = Optimizer(model, tcfp_jax.error_feedback(recipe))
    assert same_bits(forward(model, x), fresh)
    before = jax.tree.structure(flax_nnx.state((model, optimizer)))
    train(model, optimizer, x)
    flax_nnx.update(without_state, flax_nnx.state(model, flax_nnx.Param))
    assert same_bits(forward(model, x), forward(without_state, x))
    assert jax.tree.structure(flax_nnx.state((model, optimizer))) == before


class Shared(flax_nnx.Module):
    def __init__(self, rngs):
        self.first = flax_nnx.Linear(16, 16, rngs=rngs)
        self.second = self.first

    def __call__(self, x):
        return self.second(flax_nnx.tanh(self.first(x)))


def test_shared_layers_and_accumulation_have_one_state():
    model = convert_to_tcfp(
        nnx_model(Shared), "tensorwise", X, include=ALL, strict=True
    )
    assert list(find_weights(model)) == ["first/kernel"]
    tx = optax.MultiSteps(
        optax.chain(optax.sgd(0.1), tcfp_jax.error_feedback(find_weights(model))), 2
    )
    optimizer = Optimizer(model, tx)
    assert model.second is model.first

    def values():
        return np.asarray(jax.tree.leaves(held(model.first))[0])

    stored = [values()]
    TRACES[:] = []
    with jax.numpy_dtype_promotion("standard"):
        for _ in range(2):
            train(model, optimizer, X)
            stored.append(values())
    assert len(TRACES) == 1
    assert same_bits(stored[0], stored[1])
    assert not same_bits(stored[1], stored[2])


def test_an_optimizer_refuses_what_layer_state_refuses():
    layer = TCFPLinear(16, 32, recipe="tensorwise", rngs=flax_nnx.Rngs(0))
    one = tcfp_jax.error_feedback("tensorwise")
    with refused("two error_feedback transformations hold kernel"):
        Optimizer(layer, optax.chain(one, one))
    assert layer.stored is None
