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
from tests.helpers import nnx_model, same_bits

pytestmark = pytest.mark.usefixtures("standard_promotion")
WEIGHT = Weight(tcfp_jax.recipe("tcfp12"), Layout((0,), (1,)))
RNG = np.random.default_rng(0)
PARAMS = {
    name: {
        "kernel": jnp.asarray(RNG.standard_normal((32, 32)), jnp.float32),
        "bias": jnp.zeros(32),
    }
    for name in ("base", "head")
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


def step(tx, params=PARAMS):
    updates, state = jax.jit(tx.update)(GRADIENTS, tx.init(params), params)
    return optax.apply_updates(params, updates), tcfp_jax.layer_state(state)


@pytest.mark.parametrize(
    "tx, held",
    [
        (
            optax.partition({"train": TRAIN, "frozen": optax.set_to_zero()}, LABELS),
            {"head"},
        ),
        (
            optax.partition({"train": TRAIN, "frozen": optax.set_to_zero()}, LEAVES),
            {"head"},
        ),
        (
            optax.partition(
                {"train": TRAIN, "frozen": optax.chain(optax.set_to_zero(), FEEDBACK)},
                LEAVES,
            ),
            {"base", "head"},
        ),
        (
            optax.masked(TRAIN, jax.tree.map(lambda label: label == "train", LEAVES)),
            {"head"},
        ),
        (
            optax.masked(
                TRAIN, {"base": {"kernel": False, "bias": True}, "head": False}
            ),
            set(),
        ),
    ],
    ids=[
        "partition by branch",
        "partition by leaf",
        "frozen and stored",
        "masked",
        "no weight at all",
    ],
)
def test_a_masked_part_holds_its_own_weights(tx, held):
    params, stored = step(tx)
    assert set(stored) == held
    for name in held:
        now = current(stored[name]["kernel"], params[name]["kernel"]).dequantize()
        np.testing.assert_allclose(now, params[name]["kernel"], atol=1e-2)
    assert (
        same_bits(params["base"]["kernel"], PARAMS["base"]["kernel"])
        or "base" not in held
    )


def test_a_part_of_the_tree_holds_its_own_weights():
    params = {"head": PARAMS["head"]}
    assert set(tcfp_jax.layer_state(FEEDBACK.init(params))) == {"head"}


@pytest.mark.parametrize(
    "params", [{"params": PARAMS}, {"lora": {"kernel": jnp.ones((32, 4))}}, {}], ids=str
)
def test_none_of_the_weights_is_a_mistake(params):
    with pytest.raises(
        ValueError, match=r"none of the 2 weights.*base/kernel is not.*on the fly"
    ):
        FEEDBACK.init(params)


class Trained(nnx.Param):
    """What one optimizer trains."""


class Model(nnx.Module):
    def __init__(self, rngs):
        self.base, self.head = (nnx.Linear(64, 64, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        return self.head(nnx.relu(self.base(x)))


def test_nnx_optimizer_of_some_parameters():
    x = jnp.asarray(RNG.standard_normal((4, 64)), jnp.float32)
    model = nnx_model(Model)
    model.head.kernel = Trained(model.head.kernel[...])
    convert_to_tcfp(model, "tcfp12_fast", x, include=("linear", "small", "head"))
    weights = find_weights(model)
    assert set(weights) == {"base/kernel", "head/kernel"}
    optimizer = Optimizer(model, optax.adam(1e-2), wrt=Trained)
    assert set(stored_weights(model)) == {"head/kernel"}

    @nnx.jit
    def train(model, optimizer, x):
        loss = lambda model: jnp.mean(model(x) ** 2)
        value, gradients = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, Trained))(
            model
        )
        optimizer.update(model, gradients)
        return value

    losses = [float(train(model, optimizer, x)) for _ in range(5)]
    assert losses[-1] < losses[0]
    current(stored_weights(model)["head/kernel"], model.head.kernel[...])
    # What sees no parameter at all, as an optimizer of the matrices of a LoRA that the
    # model lacks does.
    with pytest.raises(ValueError, match=r"none of the 2 weights.*LoRA"):
        Optimizer(model, optax.adam(1e-2), wrt=nnx.LoRAParam)
