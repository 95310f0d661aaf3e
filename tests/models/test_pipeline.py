"""Layers over stages: loss and gradients of the unsplit model, state that stays on its
stage, and errors.

The unsplit model runs on each device's part of a microbatch in turn, because scales are
of these rows.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

import tcfp_jax
from models.nets import families
from models.nets.llama import Llama
from models.nets.pipeline import STAGE, Pipeline
from models.nets.shapes import LlamaConfig
from tests.helpers import (
    decibels,
    mesh_of,
    parametrize,
    refused,
    slow,
    slow_except,
    variables_of,
)

pytestmark = [
    # `nn.RMSNorm` mixes dtypes in bfloat16
    pytest.mark.usefixtures("standard_promotion"),
    # Float weights without a state of the optimizer, on purpose.
    pytest.mark.filterwarnings("ignore:a converted Linen model is trained without"),
]
TINY = LlamaConfig(layers=4, width=32, heads=4, kv_heads=2, hidden=48, context=8)
UNTIED = dataclasses.replace(TINY, head="untied", remat="block")
WINDOWS = np.random.default_rng(0).integers(0, 256, (8, 9))
MICROBATCHES = 4
# The gradient of a head in bfloat16 is one product of all tokens, or one of each
# microbatch, rounded to bfloat16.
OF_BFLOAT16_SUMS = ("embedding", "head")


def pipeline(
    *shape, config=TINY, recipe="bf16", dtype="float32", microbatches=MICROBATCHES
):
    mesh = mesh_of(*shape, names=(STAGE, "data")[: len(shape)])
    return Pipeline(config, tcfp_jax.recipe(recipe), mesh, microbatches, dtype)


def parameters(model, weights="float"):
    params = variables_of(
        Llama(model.config, model.dtype), jnp.zeros((1, 8), jnp.int32)
    )["params"]
    return (
        params
        if weights == "float"
        else tcfp_jax.store(params, model.weights, key=jax.random.key(0))
    )


def gradients_of(model):
    """Return the gradients of the mean loss; `quantized` is the optimizer's
    collection.
    """

    @jax.jit
    @tcfp_jax.value_and_grad
    def loss(params, windows, quantized):
        variables = {"params": params, **quantized}
        return model.apply(variables, windows[:, :-1], windows[:, 1:]).mean()

    return loss


@slow_except("shape0-config0-bf16-bfloat16-float")
@parametrize(
    "shape, config, recipe, dtype, weights",
    [
        ((2,), UNTIED, "bf16", "bfloat16", "float"),
        ((2,), TINY, "tensorwise", "bfloat16", "float"),
        ((4,), UNTIED, "tcfp12_single", "bfloat16", "stored"),
        ((2, 2), TINY, "tcfp12_fast", "float32", "error feedback"),
        ((2, 2), UNTIED, "tensorwise", "bfloat16", "float"),
    ],
)
def test_loss_and_gradients_are_those_of_the_unsplit_model(
    shape, config, recipe, dtype, weights
):
    model = pipeline(*shape, config=config, recipe=recipe, dtype=dtype)
    params = parameters(model, "stored" if weights == "stored" else "float")

    def quantized_of(params):
        if weights != "error feedback":
            return {}
        state = tcfp_jax.error_feedback(model.weights).init(params)
        return {"tcfp": tcfp_jax.layer_state(state)}

    quantized = quantized_of(params)
    unsplit = families.learner(config, tcfp_jax.recipe(recipe), dtype).model
    placed = jax.device_put(
        (params, quantized),
        (model.shardings(params), model.shardings(params, quantized_of)),
    )
    value, gradients = gradients_of(model)(placed[0], WINDOWS, placed[1])
    of_unsplit = gradients_of(unsplit)
    parts = MICROBATCHES * (shape[1] if len(shape) > 1 else 1)
    ones = [of_unsplit(params, WINDOWS[i::parts], quantized) for i in range(parts)]
    assert_allclose(value, np.mean([one[0] for one in ones]), rtol=1e-5)

    def mean(*parts):
        return np.mean([np.asarray(part, np.float64) for part in parts], axis=0)

    wanted = jax.tree.leaves(jax.tree.map(mean, *[one[1] for one in ones]))
    for (path, gradient), exact in zip(
        jax.tree.leaves_with_path(gradients), wanted, strict=True
    ):
        bound = 40 if dtype == "bfloat16" and path[0].key in OF_BFLOAT16_SUMS else 100
        with np.errstate(divide="ignore"):  # some are equal
            assert decibels(exact, gradient) > bound, jax.tree_util.keystr(path)
        if path[0].key == "layers":
            assert (
                gradient.sharding.shard_shape(gradient.shape)[0]
                == config.layers // shape[0]
            ), path


@slow
def test_a_step_keeps_stages_and_has_the_bits_of_the_unsplit():
    model = pipeline(2, recipe="tcfp12_single")
    unsplit = families.learner(TINY, model.recipe, "float32").model
    tx = tcfp_jax.optim.adamw(1e-2, moments="8bit", key=jax.random.key(1))
    params = parameters(model, "stored")
    # The same for both: bits of equal gradients are compared
    gradients = gradients_of(unsplit)(params, WINDOWS, {})[1]

    def state_of(params):
        return params, tx.init(params)

    state = jax.jit(state_of)(params)
    shardings = model.shardings(params, state_of)

    def update(state, gradients):
        updates, opt_state = tx.update(gradients, state[1], state[0])
        return tcfp_jax.apply_updates(state[0], updates), opt_state

    split = jax.jit(update, out_shardings=shardings)(
        jax.device_put(state, shardings),
        jax.device_put(gradients, model.shardings(gradients)),
    )
    whole = jax.jit(update)(state, gradients)
    paths = jax.tree.leaves_with_path(split)
    of_layers = [
        (path, leaf)
        for path, leaf in paths
        if "layers" in jax.tree_util.keystr(path) and leaf.ndim
    ]
    assert len(of_layers) > 40
    for path, leaf in of_layers:
        assert {shard.data.shape[0] for shard in leaf.addressable_shards} == {
            TINY.layers // 2
        }, path
    for (path, a), b in zip(paths, jax.tree.leaves(whole), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), path


@slow
def test_only_activations_travel_between_stages():
    """A stage sends one microbatch to the next one, and no array of all layers ever
    exists.
    """
    model = pipeline(2, recipe="tcfp12_single")
    params = parameters(model, "stored")
    placed = jax.device_put(params, model.shardings(params))
    text = gradients_of(model).lower(placed, WINDOWS, {}).compile().as_text()
    moved = [
        line
        for line in text.splitlines()
        if any(f" {name}" in line for name in ("all-gather(", "all-reduce("))
    ]
    assert "collective-permute" in text
    assert "f8e4m3fn" in text
    assert not [line for line in moved if "f8e4m3fn" in line.split("metadata")[0]]


@parametrize(
    "make, message",
    [
        (
            lambda: Pipeline(
                TINY, tcfp_jax.recipe("bf16"), mesh_of(2, names=("data",)), 2
            ),
            "'stage'.*'data'.*make_mesh",
        ),
        (lambda: pipeline(8), "8 stages do not divide 4 layers.*divisor"),
        (lambda: pipeline(2, microbatches=0), "microbatches=0 is below 1"),
        (
            lambda: pipeline(2, microbatches=3).apply(
                {}, WINDOWS[:, 1:], WINDOWS[:, 1:]
            ),
            "3 do not divide a batch of 8",
        ),
        (
            lambda: pipeline(2, 4).apply({}, WINDOWS[:, 1:], WINDOWS[:, 1:]),
            "of 4 devices do not divide the 2 rows",
        ),
        (
            lambda: pipeline(4).apply({}, WINDOWS[:, :7], WINDOWS[:, :7]),
            "4 stages do not divide 7 positions",
        ),
        (
            lambda: pipeline(2).apply({}, np.ones((4, 10)), np.ones((4, 10))),
            "10 positions exceed .* context of 8",
        ),
    ],
)
def test_what_cannot_be_split_is_refused(make, message):
    with refused(message):
        make()
