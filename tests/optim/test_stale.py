"""Freshness of stored weights: no false alarm in a training run, and never silence next
to other parameters.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import tcfp_jax
from tcfp_jax.optim.feedback import ErrorFeedbackState
from tcfp_jax.weights.freshness import current
from tcfp_jax.weights.stored import Stored
from tests.helpers import (
    all_finite,
    drawn,
    mesh_of,
    parametrize,
    placed,
    refused,
    slow_except,
    step_of,
    unwatched,
)

pytestmark = pytest.mark.usefixtures("standard_promotion")
RECIPE = tcfp_jax.recipe("tcfp12_fast")
PARAMS = {
    "up": {"kernel": drawn(32, 64) * 0.1, "bias": jnp.zeros(64)},
    "down": {"kernel": drawn(2, 64, 32, seed=1) * 0.1},
}
ONES = jax.tree.map(jnp.ones_like, PARAMS)
X = drawn(16, 32, seed=2)
Y = drawn(16, 32, seed=3)


def checked(params, opt_state):
    """The stored weights that layers would multiply."""
    stored = tcfp_jax.layer_state(opt_state)
    return {
        name: current(stored[name]["kernel"], params[name]["kernel"]) for name in stored
    }


def loss(params, opt_state):
    weights = checked(params, opt_state)
    matmul = functools.partial(tcfp_jax.matmul, recipe=RECIPE)
    up = params["up"]["kernel"]
    h = matmul(X.astype(up.dtype), up, quantized=weights["up"])
    h = jax.nn.relu(h + params["up"]["bias"])

    def down(w, stored):
        return matmul(h, w, quantized=stored)

    y = jax.vmap(down)(params["down"]["kernel"], weights["down"]).sum(0)
    return jnp.mean((y.astype(jnp.float32) - Y) ** 2)


def train(tx, params=PARAMS, steps=50):
    """(losses, params, opt_state) of a jitted training step, run as often."""
    step = step_of(tx)

    @jax.jit
    def run(params, state):
        value, gradients = jax.value_and_grad(loss)(params, state)
        return *step(gradients, params, state), value

    state = jax.jit(tx.init)(params)
    losses = []
    for _ in range(steps):
        params, state, value = run(params, state)
        losses.append(value)
    return np.asarray(losses), params, state


def feedback(*before, after=(), **options):
    return optax.chain(*before, tcfp_jax.error_feedback(RECIPE, **options), *after)


OPTIMIZERS = {
    "adamw": feedback(
        optax.clip_by_global_norm(1.0),
        optax.adamw(optax.cosine_decay_schedule(1e-2, 50)),
    ),
    "sgd": feedback(optax.sgd(0.3, momentum=0.9)),
    "large": feedback(optax.sign_sgd(0.5)),
    "MultiSteps": optax.MultiSteps(feedback(optax.adam(1e-2)), every_k_schedule=3),
}


@slow_except("MultiSteps-float32")
@pytest.mark.optimized
@parametrize(
    "name, dtype",
    [
        ("adamw", "float32"),
        ("adamw", "bfloat16"),
        ("sgd", "float32"),
        ("large", "bfloat16"),
        ("MultiSteps", "float32"),
    ],
)
def test_fifty_steps_without_a_false_alarm(name, dtype):
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), PARAMS)
    losses, params, state = train(OPTIMIZERS[name], params)
    assert np.isfinite(losses).all()
    checked(params, state)  # with concrete arrays


@slow_except("AxisType.Explicit")
@pytest.mark.optimized
@parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_sharded_steps_without_a_false_alarm(kind):
    mesh = mesh_of(2, names=("a",), axis_type=kind)
    tx = OPTIMIZERS["adamw"]
    with jax.set_mesh(mesh):
        params = {
            "up": placed(PARAMS["up"], mesh, "a"),
            "down": placed(PARAMS["down"], mesh, None, "a"),
        }
        if kind == AxisType.Auto:
            losses, params, state = train(tx, params)
            np.testing.assert_allclose(losses, train(tx)[0], rtol=1e-2)
        # Products of sharded operands need an out_sharding, which is a layer's business
        else:
            updates = jax.tree.map(lambda leaf: 0.01 * leaf, params)
            state = jax.jit(tx.init)(params)
            params, state = jax.jit(step_of(tx))(updates, params, state)
        for stored in checked(params, state).values():
            assert all_finite(stored.dequantize())


@pytest.fixture(scope="module")
def trained():
    with jax.numpy_dtype_promotion("standard"):
        return train(feedback(optax.adam(1e-2)), steps=3)[1:]


OTHERS = {
    "doubled": lambda params: jax.tree.map(lambda leaf: 2 * leaf, params),
    "averaged": lambda params: optax.incremental_update(params, PARAMS, 0.9),
    "restored": lambda params: PARAMS,
}


@parametrize("change", OTHERS.values(), ids=OTHERS.keys())
def test_other_parameters_beside_the_state_are_never_silent(trained, change):
    params, state = trained
    others = change(params)
    message = "pass layer_state of the optimizer that owns these parameters"
    with refused(message):
        checked(others, state)
    evaluate = jax.jit(loss)
    assert all_finite(evaluate(params, state))
    assert jnp.isnan(evaluate(others, state))
    # The repair for evaluation: a state of these parameters.
    assert all_finite(evaluate(others, feedback().init(others)))


AFTER = {
    "scale": optax.scale(0.5),
    "nonnegative": optax.keep_params_nonnegative(),
    "adam": optax.adam(1e-3),
    "trace": optax.trace(0.9),
}
# Wrappers that turn the update of the transformation inside into another one.
AROUND = {
    "sam": lambda tx: optax.contrib.sam(tx, optax.sgd(1e-2)),
    "mechanize": optax.contrib.mechanize,
    "conditionally_transform": lambda tx: optax.conditionally_transform(
        tx, lambda step: step % 2 == 1
    ),
    "schedule_free": lambda tx: optax.contrib.schedule_free(tx, 1e-2, b1=0.9),
}


@slow_except("scale", "schedule_free")
@parametrize(
    "tx",
    [feedback(optax.sgd(0.1), after=[after]) for after in AFTER.values()]
    + [around(feedback(optax.sgd(1e-2, momentum=0.9))) for around in AROUND.values()],
    ids=[*AFTER, *AROUND],
)
def test_a_changed_update_shows_in_the_next_product(tx):
    """No list of transformations is needed: the sample in each stored weight is not the
    parameter's.
    """
    params = PARAMS
    state = tx.init(params)
    step = jax.jit(step_of(tx))
    for _ in range(3):
        params, state = step(ONES, params, state)
    with refused("other parameters"):
        checked(params, state)
    assert jnp.isnan(jax.jit(loss)(params, state))


def test_a_mask_around_error_feedback_is_no_misuse():
    masks = [
        {"up": {"kernel": on, "bias": False}, "down": {"kernel": not on}}
        for on in (True, False)
    ]
    twice = optax.chain(*(tcfp_jax.error_feedback(RECIPE, mask=mask) for mask in masks))
    assert set(tcfp_jax.layer_state(twice.init(PARAMS))) == set(PARAMS)
    conditional = optax.conditionally_mask(
        feedback(optax.sgd(1e-2)), lambda step: step % 2 == 0
    )
    assert set(tcfp_jax.layer_state(conditional.init(PARAMS))) == set(PARAMS)


def test_the_next_update_fills_a_state_without_samples(trained):
    params, state = trained

    def is_stored(node):
        return isinstance(node, Stored)

    def without_sample(node):
        return unwatched(node) if is_stored(node) else node

    old = jax.tree.map(without_sample, state, is_leaf=is_stored)
    checked(jax.tree.map(lambda leaf: 2 * leaf, params), old)  # nothing to compare with
    params, new = step_of(feedback(optax.adam(1e-2)))(ONES, params, old)
    checked(params, new)
    assert jax.tree.structure(new) == jax.tree.structure(state)
    assert any(isinstance(part, ErrorFeedbackState) for part in new)
