"""Optimizers that see a part of a model's weights hold that part, and a mapping without
any match is an error.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tcfp_jax
from tcfp_jax.conversion import convert_to_tcfp, find_weights
from tcfp_jax.conversion.nnx_modules import stored_weights
from tcfp_jax.nnx import Optimizer
from tcfp_jax.weights.freshness import current
from tcfp_jax.weights.layout import Layout, Weight
from tests.helpers import (
    MLP,
    drawn,
    nnx_model,
    parametrize,
    refused,
    same_bits,
    step_of,
)

pytestmark = pytest.mark.usefixtures("standard_promotion")
WEIGHT = Weight(tcfp_jax.recipe("tcfp12"), Layout((0,), (1,)))
KERNELS = dict(zip(("base", "head"), drawn(2, 32, 32), strict=True))
PARAMS = {
    name: {"kernel": kernel, "bias": jnp.zeros(32)} for name, kernel in KERNELS.items()
}
WEIGHTS = {"base/kernel": WEIGHT, "head/kernel": WEIGHT}
GRADIENTS = jax.tree.map(jnp.ones_like, PARAMS)
FEEDBACK = tcfp_jax.error_feedback(WEIGHTS)
TRAIN = optax.chain(optax.sgd(0.1), FEEDBACK)
LABELS = {"base": "frozen", "head": "train"}  # a whole branch is masked at its top
LEAVES = {
    "base": {"kernel": "frozen", "bias": "frozen"},
    "head": {"kernel": "train", "bias": "train"},
}


FROZEN = {"train": TRAIN, "frozen": optax.set_to_zero()}
STORED = {"train": TRAIN, "frozen": optax.chain(optax.set_to_zero(), FEEDBACK)}
IS_TRAINED = jax.tree.map(lambda label: label == "train", LEAVES)
NO_WEIGHT = {"base": {"kernel": False, "bias": True}, "head": False}
PARTS = {
    "partition by branch": (optax.partition(FROZEN, LABELS), {"head"}),
    "partition by leaf": (optax.partition(FROZEN, LEAVES), {"head"}),
    "frozen and stored": (optax.partition(STORED, LEAVES), {"base", "head"}),
    "masked": (optax.masked(TRAIN, IS_TRAINED), {"head"}),
    "no weight at all": (optax.masked(TRAIN, NO_WEIGHT), set()),
}


@parametrize("name", PARTS)
def test_a_masked_part_holds_its_own_weights(name):
    tx, held = PARTS[name]
    params, state = jax.jit(step_of(tx))(GRADIENTS, PARAMS, tx.init(PARAMS))
    stored = tcfp_jax.layer_state(state)
    assert set(stored) == held
    for name in held:
        now = current(stored[name]["kernel"], params[name]["kernel"]).dequantize()
        np.testing.assert_allclose(now, params[name]["kernel"], atol=1e-2)
    if "base" in held:
        assert same_bits(params["base"]["kernel"], PARAMS["base"]["kernel"])


def test_a_part_of_the_tree_holds_its_own_weights():
    params = {"head": PARAMS["head"]}
    assert set(tcfp_jax.layer_state(FEEDBACK.init(params))) == {"head"}


@parametrize(
    "params", [{"params": PARAMS}, {"lora": {"kernel": jnp.ones((32, 4))}}, {}], ids=str
)
def test_none_of_the_weights_is_a_mistake(params):
    message = "none of the 2 weights.*base/kernel is not.*on the fly"
    with refused(message):
        FEEDBACK.init(params)


class Trained(nnx.Param):
    """What one optimizer trains."""


def test_nnx_optimizer_of_some_parameters():
    x = drawn(4, 16)
    model = nnx_model(MLP)
    model.down.kernel = Trained(model.down.kernel[...])
    convert_to_tcfp(model, "tcfp12_fast", x, include=("linear", "small", "head"))
    assert set(find_weights(model)) == {"up/kernel", "down/kernel"}
    optimizer = Optimizer(model, optax.adam(1e-2), wrt=Trained)
    assert set(stored_weights(model)) == {"down/kernel"}

    @nnx.jit
    def train(model, optimizer):
        square = nnx.value_and_grad(
            lambda model: jnp.mean(model(x) ** 2), argnums=nnx.DiffState(0, Trained)
        )
        value, gradients = square(model)
        optimizer.update(model, gradients)
        return value

    losses = [float(train(model, optimizer)) for _ in range(5)]
    assert losses[-1] < losses[0]
    current(stored_weights(model)["down/kernel"], model.down.kernel[...])
    # An optimizer that sees no parameter at all, as one of the matrices of a LoRA that
    # the model lacks does.
    with refused(r"none of the 2 weights.*LoRA"):
        Optimizer(model, optax.adam(1e-2), wrt=nnx.LoRAParam)
