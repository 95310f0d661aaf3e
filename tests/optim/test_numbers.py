"""Numbers of optimizers: checked when they are known, and at the step otherwise."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tcfp_jax
from tcfp_jax import optim
from tests.helpers import assert_close, drawn, parametrize, refusals, refused, same_bits
from tests.optim.zoo import KEY, stepped, stored_of

pytestmark = pytest.mark.usefixtures("standard_promotion")
KERNEL = {"kernel": drawn(64, 128)}
GRADS = {"kernel": drawn(64, 128, seed=1)}
NAN = float("nan")
INF = float("inf")
adamw = functools.partial(optim.adamw, key=KEY)


def average(step_size, new=KERNEL, old=KERNEL):
    return optim.incremental_update(new, old, step_size)


# (name, number): one row for each end of each rule
BAD = [
    ("learning_rate", INF),
    ("learning_rate", NAN),
    ("b1", 1.0),
    ("b1", -0.1),
    ("b1", NAN),
    ("b2", 1.0 - 1e-9),
    ("b2", 1.5),
    ("b2", -1e-9),
    ("eps", -1e-8),
    ("eps", INF),
    ("eps_root", -1e-8),
    ("eps_root", NAN),
    ("weight_decay", -0.1),
    ("weight_decay", INF),
    ("max_norm", -1.0),
    ("max_norm", 0.0),
    ("max_norm", NAN),
]


def made(**numbers):
    return adamw(**{"learning_rate": 0.1, **numbers})


@parametrize("name, number", BAD)
@parametrize("of", [float, np.float64, jnp.float32])
def test_a_number_out_of_range_is_refused(name, number, of):
    with refused(f"^{name}=.* must be "):
        made(**{name: of(number)})


test_other_bad_numbers_are_refused = refusals(
    {
        ValueError: {
            r"b1 has shape \[2\], but it is one number": lambda: made(b1=np.zeros(2)),
            r"eps=1e\+39 must be 0 or more and, in float32, finite": lambda: made(
                eps=1e39
            ),
            "step_size=1.1 must be from 0 to 1": lambda: average(1.1),
            "step_size=nan must be from 0 to 1": lambda: average(NAN),
            "step_size=-0.1 must be from 0 to 1": lambda: average(-0.1),
        }
    }
)


@parametrize("numbers", [dict(b1=0.0, b2=0.0), dict(max_norm=INF)])
def test_the_ends_of_the_ranges_are_taken(numbers):
    _, state = stepped(made(**numbers), KERNEL, n=1, grads=GRADS)
    assert int(state.skipped) == 0


@functools.cache
def step_with(names):
    """A step of adamw whose numbers of these names are arguments of the program."""
    params = stored_of(KERNEL)

    @jax.jit
    def step(*numbers):
        tx = made(**dict(zip(names, numbers, strict=True)))
        updates, state = tx.update(GRADS, tx.init(params), params)
        return tcfp_jax.apply_updates(params, updates), state

    return params, step


GOOD = dict(
    learning_rate=0.1,
    b1=0.9,
    b2=0.9,
    eps=1e-8,
    eps_root=0.0,
    weight_decay=0.0,
    max_norm=1.0,
)


@parametrize("name, number", BAD)
def test_a_traced_number_out_of_range_skips_the_step(name, number):
    params, step = step_with(tuple(GOOD))
    after, state = step(*{**GOOD, name: number}.values())
    assert (int(state.skipped), int(state.count)) == (1, 0)
    assert same_bits(after, params)
    assert not np.any(state.mu["kernel"].astype(jnp.float32))
    after, state = step(*GOOD.values())
    assert (int(state.skipped), int(state.count)) == (0, 1)
    assert not same_bits(after, params)


def test_a_schedule_that_is_not_finite_skips_the_step():
    tx = adamw(lambda count: 1 / count)
    params = stored_of(KERNEL)
    after, state = stepped(tx, params, n=2, grads=GRADS)
    assert (int(state.skipped), int(state.count)) == (2, 0)
    assert same_bits(after, params)


# Decays without a bound
# --------------------------------------------------------------------------------------
DECAYS = [(0.9, 0.0), (0.9, 1e-20), (0.9, 1e-12), (0.9, 0.5), (0.9, 0.81), (0.0, 0.0)]


@functools.cache
def decayed(tx_of):
    """Three steps as a program of both decays."""

    @jax.jit
    def run(params, b1, b2):
        tx = tx_of(1e-2, b1=b1, b2=b2, weight_decay=0.0)
        state = tx.init(params)
        for i in range(3):
            grads = {"kernel": GRADS["kernel"] * 0.5**i}
            updates, state = tx.update(grads, state, params)
            params = tcfp_jax.apply_updates(params, updates)
        return params

    return run


@parametrize("b1, b2", DECAYS)
def test_decays_without_a_bound_lose_no_stored_weight(b1, b2):
    """A bound that divides by b2 would be infinite, and so would the scale."""
    params = stored_of(KERNEL, remainder="dropped")
    floats = tcfp_jax.dequantize(params)
    exact = decayed(optax.adamw)(floats, b1, b2)["kernel"]
    ours = tcfp_jax.dequantize(decayed(adamw)(params, b1, b2))["kernel"]
    # Eight-bit m, of steps of 0.01 to 0.04, and half a step of a weight of 4
    assert float(jnp.max(jnp.abs(ours - exact))) < 0.02
    tx = adamw(1e-2, b1=b1, b2=b2, weight_decay=0.0)
    alone, _ = stepped(tx, params, n=3, grads=GRADS)
    moved = tcfp_jax.dequantize(alone)["kernel"] - floats["kernel"]
    assert 0.02 < float(jnp.mean(jnp.abs(moved))) < 0.04


# Averages
# --------------------------------------------------------------------------------------
def tree(*values, dtype="float32"):
    return {"x": jnp.array(values, dtype)}


@parametrize(
    "new, old, step_size, wanted",
    [
        (tree(-INF, NAN, 1e38), tree(-INF, 1.0, -3e38), 1.0, tree(-INF, NAN, 1e38)),
        (tree(2.0, 3.0), tree(INF, NAN), 1.0, tree(2.0, 3.0)),
        (tree(1.0, INF), tree(-INF, NAN), 0.0, tree(-INF, NAN)),
        (tree(-INF, 2.0, 3e38), tree(-INF, INF, -3e38), 0.5, tree(-INF, INF, 0.0)),
        (
            tree(2**24 + 1, -7, dtype="int32"),
            tree(0, 5, dtype="int32"),
            1.0,
            tree(2**24 + 1, -7, dtype="int32"),
        ),
        (tree(8, dtype="int32"), tree(5, dtype="int32"), 0.01, tree(8, dtype="int32")),
        (tree(8, dtype="int32"), tree(5, dtype="int32"), 0.0, tree(5, dtype="int32")),
        (
            tree(True, dtype="bool"),
            tree(False, dtype="bool"),
            0.5,
            tree(True, dtype="bool"),
        ),
        (
            tree(3.0, dtype="bfloat16"),
            tree(1.0, dtype="bfloat16"),
            0.25,
            tree(1.5, dtype="bfloat16"),
        ),
    ],
)
def test_averages_of_float_leaves_are_exact_at_both_ends(new, old, step_size, wanted):
    for share in (step_size, jnp.float32(step_size)):
        found = jax.jit(average)(share, new, old)
        assert found["x"].dtype == wanted["x"].dtype
        np.testing.assert_array_equal(found["x"], wanted["x"])


def test_averages_of_mixed_trees_are_taken_leaf_by_leaf():
    floats = {"kernel": drawn(16, 32), "bias": drawn(32), "none": None}
    old = stored_of({"kernel": jnp.zeros((16, 32)), "bias": jnp.zeros(32)})
    old["none"] = None
    found = tcfp_jax.dequantize(average(0.5, floats, old))
    assert found["none"] is None
    assert_close(found["bias"], floats["bias"] / 2)
    assert_close(found["kernel"], floats["kernel"] / 2, 4e-3, 4e-3)
