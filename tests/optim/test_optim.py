"""The optimizer's state: what error feedback converges to, under every optax wrapper,
and delayed scaling.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tcfp_jax
from tcfp_jax.weights.quantization import quantize_weight
from tcfp_jax.weights.stored import Stored
from tests.helpers import (
    drawn,
    parametrize,
    refusals,
    same_bits,
    slow_except,
    unwatched,
)

pytestmark = pytest.mark.usefixtures("standard_promotion")
W = drawn(64, 32) * 0.02
PARAMS = {"dense": {"kernel": W, "bias": jnp.zeros(32)}}
STILL = jax.tree.map(jnp.zeros_like, PARAMS)
GRADIENTS = jax.tree.map(lambda p: jnp.full_like(p, 0.01), PARAMS)
NO_FEEDBACK = tcfp_jax.recipe("tcfp12", remainder="dropped")
STOCHASTIC = tcfp_jax.recipe("tcfp12", remainder="stochastic")


def decibels(x, y):
    return 10 * jnp.log10(jnp.sum(x**2) / jnp.sum((x - y) ** 2))


def stored(state):
    return tcfp_jax.layer_state(state)["dense"]["kernel"]


def floats(state):
    """The kernel alone of a state, as floats."""
    return tcfp_jax.layer_state(state)["kernel"].dequantize()


@parametrize("name", ["tcfp12", "tensorwise"])
def test_mean_of_a_still_weight_converges(name):
    tx = tcfp_jax.error_feedback(tcfp_jax.recipe(name, remainder="feedback"))

    def step(state, _):
        return tx.update(STILL, state, PARAMS)[1], stored(state).dequantize()

    _, seen = jax.lax.scan(step, tx.init(PARAMS), None, length=200)
    one_step = jnp.sqrt(jnp.mean((seen[0] - W) ** 2))
    assert float(jnp.sqrt(jnp.mean((seen.mean(0) - W) ** 2))) <= 0.01 * float(one_step)


@slow_except("float8_e5m2")
@pytest.mark.optimized
@parametrize("error_dtype", ["float32", "bfloat16", "float8_e5m2"])
def test_moving_weight_stays_at_60_decibels(error_dtype):
    tx = tcfp_jax.error_feedback("tcfp12", error_dtype=error_dtype)

    def step(carry, key):
        params, state = carry
        updates = {"kernel": 1e-5 * jax.random.normal(key, W.shape)}
        _, state = tx.update(updates, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), decibels(params["kernel"], floats(state))

    @jax.jit
    def run(params):
        keys = jax.random.split(jax.random.key(1), 3000)
        return jax.lax.scan(step, (params, tx.init(params)), keys)

    (_, state), quality = run({"kernel": W})
    assert float(quality[-1]) >= 60
    kept = state.scaled_errors if error_dtype == "float8_e5m2" else state.errors
    assert kept["kernel"].dtype == jnp.dtype(error_dtype)


@parametrize("remainder", ["feedback", "dropped"])
@parametrize("growth", ["5x", "jump"])
def test_delayed_scaling_is_above_50_decibels_after_a_step(remainder, growth):
    recipe = tcfp_jax.recipe("tcfp12", amax="delayed", remainder=remainder)
    tx = tcfp_jax.error_feedback(recipe)
    steps = jnp.arange(301)
    factor = 5 ** (steps / 300)
    if growth == "jump":
        factor = jnp.where(steps < 150, 1.0, 3.0)

    def step(state, now_and_next):
        now, after = now_and_next
        updates = {"kernel": W * (after - now)}
        _, state = tx.update(updates, state, {"kernel": W * now})
        return state, decibels(W * after, floats(state))

    factors = (factor[:-1], factor[1:])
    _, quality = jax.lax.scan(step, tx.init({"kernel": W}), factors)
    low = np.flatnonzero(np.asarray(quality) < 50)
    assert len(low) <= (1 if growth == "jump" else 0)


def chain(*inner):
    return optax.chain(*inner, tcfp_jax.error_feedback("tcfp12"))


WRAPPERS = {
    "chain": chain(optax.adamw(1e-2)),
    "named_chain": optax.named_chain(
        ("adam", optax.adam(1e-2)), ("tcfp", tcfp_jax.error_feedback("tcfp12"))
    ),
    "masked": optax.masked(
        chain(optax.sgd(1e-2)), {"dense": {"kernel": True, "bias": False}}
    ),
    "partition": optax.partition(
        {"w": chain(optax.sgd(1e-2)), "b": optax.sgd(1e-2)},
        {"dense": {"kernel": "w", "bias": "b"}},
    ),
    "MultiSteps": optax.MultiSteps(chain(optax.sgd(1e-2)), every_k_schedule=2),
    "inject_hyperparams": chain(
        optax.inject_hyperparams(optax.adam)(learning_rate=1e-2)
    ),
    "inject_around": optax.inject_hyperparams(
        lambda learning_rate: chain(optax.sgd(learning_rate))
    )(learning_rate=1e-2),
    "apply_if_finite": optax.apply_if_finite(chain(optax.sgd(1e-2)), 3),
}


@slow_except("named_chain", "apply_if_finite")
@parametrize("tx", WRAPPERS.values(), ids=WRAPPERS.keys())
def test_state_follows_the_weights_under_every_wrapper(tx):
    params = PARAMS
    state = tx.init(PARAMS)
    first = stored(state)
    for _ in range(2):
        updates, state = jax.jit(tx.update)(GRADIENTS, state, params)
        params = optax.apply_updates(params, updates)
    kernel = params["dense"]["kernel"]
    assert set(tcfp_jax.layer_state(state)) == {"dense"}
    assert isinstance(stored(state), Stored)
    assert not same_bits(stored(state).backward.hi, first.backward.hi)
    assert float(decibels(kernel, stored(state).dequantize())) > 50


def test_updates_pass_unchanged_and_bias_is_left_alone():
    tx = tcfp_jax.error_feedback("tcfp12")
    updates, state = tx.update(GRADIENTS, tx.init(PARAMS), PARAMS)
    assert updates is GRADIENTS
    assert set(state.weights["dense"]) == {"kernel"}
    assert state.errors["dense"]["bias"] == optax.MaskedNode()


def test_a_delayed_amax_rises_at_once_and_falls_slowly():
    tx = tcfp_jax.error_feedback(tcfp_jax.recipe("tcfp12", amax="delayed"))
    largest = float(jnp.abs(W).max())
    for factor, wanted in ((2.0, 2 * largest), (0.5, (0.999 + 0.001 * 0.5) * largest)):
        change = jax.tree.map(lambda w, factor=factor: (factor - 1) * w, PARAMS)
        _, state = tx.update(change, tx.init(PARAMS), PARAMS)
        assert float(state.amax["dense"]["kernel"]) == pytest.approx(wanted, rel=1e-3)


def test_update_is_the_textbook_rule():
    tx = tcfp_jax.error_feedback("tcfp12")
    state = tx.init(PARAMS)
    error = state.errors["dense"]["kernel"]
    assert jnp.array_equal(error, W - tcfp_jax.split(W).dequantize())
    _, state = tx.update(GRADIENTS, state, PARAMS)
    target = (W + GRADIENTS["dense"]["kernel"]) + error
    assert jnp.array_equal(
        stored(state).dequantize(), tcfp_jax.split(target).dequantize()
    )
    assert jnp.array_equal(
        state.errors["dense"]["kernel"], target - stored(state).dequantize()
    )


def test_stack_of_layers_has_a_scale_each():
    stack = jnp.stack([W, 100 * W, W / 100])
    state = tcfp_jax.error_feedback("tcfp12").init({"kernel": stack})
    stacked = tcfp_jax.layer_state(state)["kernel"]
    assert stacked.stack == (3,)
    assert stacked.forward.scale.shape == stacked.backward.scale.shape == (3,)
    # Weights that were quantized alone have no samples.
    alone = [quantize_weight(w, tcfp_jax.recipe("tcfp12"))[0] for w in stack]
    wanted = jax.tree.map(lambda *leaves: jnp.stack(leaves), *alone)
    assert same_bits(unwatched(stacked), wanted)


def stochastic(seed=1):
    return tcfp_jax.error_feedback(STOCHASTIC, key=jax.random.key(seed))


def test_a_stochastic_residual_repeats_from_its_key():
    def run(seed):
        tx = stochastic(seed)
        states = [tx.init(PARAMS)]
        for _ in range(2):
            states.append(tx.update(STILL, states[-1], PARAMS)[1])
        return states

    one = run(1)
    assert same_bits(one, run(1))
    assert not same_bits(stored(one[0]), stored(run(2)[0]))
    for before, after in itertools.pairwise(one):  # it changes every step
        assert not same_bits(stored(before).backward.lo, stored(after).backward.lo)
    assert not jax.tree.leaves(one[0].errors)


def test_equal_weights_and_layers_have_bits_of_their_own():
    params = {name: {"kernel": W} for name in ("a", "b")}
    params["layers"] = {"kernel": jnp.stack([W, W])}
    found = tcfp_jax.layer_state(stochastic().init(params))
    lows = [found[name]["kernel"].backward.lo for name in ("a", "b")]
    lows.extend(found["layers"]["kernel"].backward.lo)
    for one, other in itertools.combinations(lows, 2):
        assert 0.2 < float((one.view(jnp.uint8) != other.view(jnp.uint8)).mean()) < 0.8


@parametrize("copies, values, scales", [("one", 2, 1), ("both", 4, 2)])
def test_bytes_of_the_state(copies, values, scales):
    recipe = tcfp_jax.recipe(NO_FEEDBACK, copies=copies)
    state = tcfp_jax.error_feedback(recipe).init(PARAMS)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert size == values * W.size + 4 * scales + 64  # of the sample


MASK = {"a": {"kernel": False}, "table": True}


@parametrize("mask", [MASK, lambda params: MASK], ids=["tree", "function"])
def test_mask_chooses_the_weights(mask):
    state = tcfp_jax.error_feedback("tcfp12", mask=mask).init(
        {"a": {"kernel": W}, "table": W}
    )
    assert set(tcfp_jax.layer_state(state)) == {"table"}


def test_bfloat16_parameters_are_stored():
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    still = jax.tree.map(jnp.zeros_like, params)
    tx = tcfp_jax.error_feedback("tcfp12")
    _, state = tx.update(still, tx.init(params), params)
    kernel = params["dense"]["kernel"].astype(jnp.float32)
    assert float(decibels(kernel, stored(state).dequantize())) > 60


def test_a_bf16_recipe_stores_nothing():
    assert tcfp_jax.layer_state(tcfp_jax.error_feedback("bf16").init(PARAMS)) == {}


make = functools.partial(tcfp_jax.error_feedback, "tcfp12")
BOTH = {"dense": {"kernel": True, "bias": True}}
test_bad_calls_raise = refusals(
    {
        ValueError: {
            "opt_state, params": lambda: make().update(GRADIENTS, make().init(PARAMS)),
            "found no weight": lambda: make().init({"scale": jnp.ones(3)}),
            "error_dtype=float16": lambda: make(error_dtype="float16"),
            "no error is kept; leave error_dtype": lambda: tcfp_jax.error_feedback(
                "tensorwise", error_dtype="bfloat16"
            ),
            "no error is kept; leave .*": lambda: tcfp_jax.error_feedback(
                "bf16", error_dtype="bfloat16"
            ),
            "key=jax.random.key": lambda: tcfp_jax.error_feedback(STOCHASTIC),
            "key is a int, not one JAX random key": lambda: tcfp_jax.error_feedback(
                STOCHASTIC, key=0
            ),
            "drop the key": lambda: make(key=jax.random.key(0)),
            "two axes": lambda: make(mask=BOTH).init(PARAMS),
            "two error_feedback": lambda: tcfp_jax.layer_state(
                optax.chain(make(), make()).init(PARAMS)
            ),
        }
    }
)


@parametrize(
    "kernel",
    [jnp.zeros((32, 16)), jnp.zeros((32, 16)).at[:16].set(1.0)],
    ids=["all", "blocks"],
)
def test_errors_of_packed_zeros_are_zeros(kernel):
    """The scale of a block of zeros is zero, and no unit of an error."""
    tx = tcfp_jax.error_feedback(
        tcfp_jax.recipe("nvfp4", remainder="feedback"), error_dtype="float8_e5m2"
    )
    params = {"kernel": kernel}
    still = jax.tree.map(jnp.zeros_like, params)
    state = tx.init(params)
    for _ in range(2):
        _, state = tx.update(still, state, params)
    assert not jnp.any(state.scaled_errors["kernel"].astype(jnp.float32)[16:])
    assert not jnp.any(floats(state)[16:])
