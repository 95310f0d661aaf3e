"""Arithmetic on stored weights, losses over their leaves, updates that are changed:
never wrong in silence.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import train_state
from jax.sharding import AxisType

import tcfp_jax
from pallas_kernels.operands import Block
from tcfp_jax import optim
from tcfp_jax.optim.suited import suited
from tests.helpers import (
    all_finite,
    assert_close,
    drawn,
    mesh_of,
    parametrize,
    placed,
    refusals,
    refused,
    same_bits,
    slow,
    slow_except,
    step_of,
    store_at_once,
)
from tests.optim.zoo import KEY, RECIPE, kernel_of, matrices, stored_of

pytestmark = pytest.mark.usefixtures("standard_promotion")
# A kernel with a sample of its codes, one that is compared whole, and a stack.
SHAPES = {"sampled": (64, 64), "small": (16, 32), "stack": (2, 64, 64)}
OTHER_CODES = "other codes than its last rounding wrote"


def floats(shape=(64, 64), seed=3):
    return {"kernel": drawn(*shape, seed=seed)}


@functools.cache
def stored(shape=(64, 64), seed=0, recipe=RECIPE, remainder="stochastic"):
    key = jax.random.fold_in(KEY, seed) if remainder == "stochastic" else None
    return store_at_once(floats(shape, seed), recipe, key=key, remainder=remainder)


def half_of(tree):
    return jax.tree.map(lambda x: x * 0.5, tree)


def negative(tree):
    return jax.tree.map(jnp.negative, tree)


ARITHMETIC = {
    "incremental_update": lambda old, new: optax.incremental_update(new, old, 0.01),
    "mean": lambda old, new: jax.tree.map(lambda a, b: (a + b) / 2, old, new),
    "factor": lambda old, new: half_of(old),
    "sign": lambda old, new: negative(old),
    "clip": lambda old, new: jax.tree.map(lambda x: jnp.clip(x, -1, 1), old),
    "cast": lambda old, new: jax.tree.map(lambda x: x.astype(jnp.bfloat16), old),
}
# One average may leave the largest value of a small kernel as it is; a test below
# repeats it.
AT_ONCE = [
    (name, shape)
    for name in ARITHMETIC
    for shape in SHAPES
    if (name, shape) != ("incremental_update", "small")
]


@slow_except(
    "incremental_update-sampled",
    "mean-sampled",
    "factor-small",
    "clip-stack",
    "cast-sampled",
)
@parametrize("name, shape", AT_ONCE)
def test_arithmetic_on_codes_raises_or_is_nan(name, shape):
    old = stored(SHAPES[shape], 0)
    new = stored(SHAPES[shape], 1)
    changed = ARITHMETIC[name](old, new)
    message = "not numbers to average.*tcfp_jax.optim.incremental_update"
    with refused(message):
        kernel_of(changed)
    read = jax.jit(kernel_of)
    if name == "cast":  # a dtype is known while a program is traced
        message = "bfloat16 where float8_e4m3fn was written"
        with refused(message):
            read(changed)
    else:
        assert np.isnan(read(changed)).all()


def of_codes(change):
    """The change of the codes alone, in their dtype."""

    def changed(x):
        return change(x) if x.dtype.itemsize == 1 else x

    return functools.partial(jax.tree.map, changed)


def halved(x):
    return (x.astype(jnp.float32) / 2).astype(x.dtype)


# (change, if a kernel that is compared by its largest value shows it)
SMALL = {
    "half": (half_of, True),
    "signs": (negative, True),
    "half of the codes": (of_codes(halved), True),
    "codes below 1": (of_codes(lambda x: jnp.clip(x, -1, 1)), True),
    "signs of the codes": (of_codes(jnp.negative), False),
    "other places": (of_codes(lambda x: x[::-1]), False),
}


@parametrize("remainder", ["stochastic", "dropped"])
@parametrize("name", SMALL)
def test_small_kernels_show_changes_of_their_largest_value(name, remainder):
    """The page of stored weights names the others, which a sample shows."""
    change, shown = SMALL[name]
    for shape, raises in (("small", shown), ("sampled", True)):
        changed = change(stored(SHAPES[shape], remainder=remainder))
        if raises:
            with refused(OTHER_CODES):
                kernel_of(changed)
        else:
            assert all_finite(kernel_of(changed))


@parametrize("remainder", ["stochastic", "dropped", "feedback"])
def test_an_average_of_small_kernels_shows_after_few_steps(remainder):
    old = stored(SHAPES["small"], 0, remainder=remainder)
    new = stored(SHAPES["small"], 1, remainder=remainder)

    def averaged(old):
        for _ in range(30):
            old = optax.incremental_update(new, old, 0.01)
            kernel_of(old)

    with refused(OTHER_CODES):
        averaged(old)


def test_a_chain_that_promotes_stored_weights_says_the_remedy():
    plateau = optax.contrib.reduce_on_plateau()
    chain = optax.chain(optim.adamw(1e-2, key=KEY), plateau)
    with refused(r"on_stored\(optax.chain\(optax.adamw"):
        suited(chain, stored(), dict)
    remedy = optim.on_stored(optax.chain(optax.adamw(1e-2), plateau))
    tx = suited(remedy, stored(), dict)
    _, state = tx.update(floats(), tx.init(stored()), stored(), value=1.0)
    assert int(state.skipped) == 0


def test_a_small_kernel_shows_a_largest_value_without_its_residual():
    """It is 5.7 % smaller, and rounding moves it by 0.8 % at most."""
    params = stored_of(
        {"kernel": jnp.full((16, 32), 0.5).at[3, 4].set(1.06)}, remainder="dropped"
    )
    kernel_of(params)
    whole = params["kernel"]
    rows = whole.rows
    cut = dataclasses.replace(rows, lo=jnp.zeros_like(rows.lo))
    stored = dataclasses.replace(whole.stored, backward=cut)
    with refused(OTHER_CODES):
        kernel_of({"kernel": dataclasses.replace(whole, stored=stored)})


X = drawn(4, 64)
ADAMW = optim.adamw(1e-2, key=KEY)


def square(params):
    return jnp.sum(tcfp_jax.matmul(X, params["kernel"], recipe=RECIPE) ** 2)


def after_adamw(params):
    updates, _ = ADAMW.update(floats(), ADAMW.init(params), params)
    return updates["kernel"].onto(params["kernel"]).dequantize()


USES = {
    "product": square,
    "gradient": tcfp_jax.grad(square),
    "apply_updates": lambda params: kernel_of(tcfp_jax.apply_updates(params, floats())),
    "read": lambda params: params["kernel"].dequantize(),
    "adamw": after_adamw,
}


@parametrize("name", USES)
def test_every_use_of_changed_codes_says_so(name):
    params = stored()
    half = half_of(params)
    run = jax.jit(USES[name])
    assert all_finite(run(params))
    with refused(OTHER_CODES):
        USES[name](half)
    assert all(np.isnan(leaf).any() for leaf in jax.tree.leaves(run(half)))


STORAGE = {
    "one scale": RECIPE,
    "blocks": tcfp_jax.recipe(RECIPE, scaling=Block(32, "square")),
    "both orientations": tcfp_jax.recipe(RECIPE, copies="both"),
}


@slow_except("both orientations-feedback")
@parametrize("remainder", ["stochastic", "feedback"])
@parametrize("recipe", STORAGE.values(), ids=STORAGE)
def test_written_codes_are_never_taken_for_changed_ones(recipe, remainder):
    def read(params):
        weight = params["kernel"]
        return weight.dequantize(), weight.swap().dequantize()

    for shape in SHAPES.values():
        params = stored(shape, recipe=recipe, remainder=remainder)
        for scale in (1.0, 1e-20, 1e30):
            change = {"kernel": scale * drawn(*shape, seed=5)}
            params = jax.jit(tcfp_jax.apply_updates)(params, change)
            assert all_finite((read(params), jax.jit(read)(params)))


@parametrize(
    "kind",
    [pytest.param(AxisType.Auto, marks=slow), AxisType.Explicit],
    ids=str,
)
def test_changed_codes_are_seen_on_a_mesh(kind):
    mesh = mesh_of(2, 2, axis_type=kind)
    read = jax.jit(kernel_of)
    with jax.set_mesh(mesh):
        params = jax.jit(stored_of)(placed(floats((2, 64, 64)), mesh, None, "a", "b"))
        assert same_bits(kernel_of(params), read(params))
        assert all_finite(read(params))
        assert np.isnan(read(half_of(params))).all()
        scale = jax.jit(lambda p: p["kernel"].read().backward.scale)
        assert "all-gather" not in scale.lower(params).compile().as_text()


def test_averages_of_stored_weights_follow_those_of_floats():
    old = stored(seed=0)
    new = stored(seed=1)
    average = jax.jit(lambda average: optim.incremental_update(new, average, 0.01))
    found = old
    for _ in range(100):
        found = average(found)
    share = 0.99**100
    wanted = share * kernel_of(old) + (1 - share) * kernel_of(new)
    error = np.linalg.norm(kernel_of(found) - wanted)
    assert error < 0.01 * np.linalg.norm(wanted)


# Losses over leaves
# --------------------------------------------------------------------------------------
def in_a_scan(params):
    def add(total, x):
        return total + jnp.sum(x.astype(jnp.float32)), None

    return [jax.lax.scan(add, 0.0, params["kernel"].rows.values)[0]]


def as_bfloat16_of_float32(leaf):
    return leaf.astype(jnp.bfloat16) if leaf.dtype == jnp.float32 else leaf


LEAVES = {
    "all": jax.tree.leaves,
    "codes": lambda params: [params["kernel"].rows.values],
    "residual": lambda params: [params["kernel"].rows.lo],
    "scale": lambda params: [params["kernel"].rows.scale],
    "in a scan": in_a_scan,
}


@parametrize("name", LEAVES)
def test_a_loss_over_leaves_raises_while_it_is_traced(name):
    def loss(params):
        leaves = LEAVES[name](params)
        return sum(jnp.sum(leaf.astype(jnp.float32) ** 2) for leaf in leaves)

    grad = tcfp_jax.grad(loss)
    message = r"FP8 codes and scales.*jax.tree.leaves\(tcfp_jax.dequantize\(params\)\)"
    for run in (grad, jax.jit(grad), functools.partial(jax.eval_shape, grad)):
        with refused(message, TypeError):
            run(stored())


CHANGES_IN_A_LOSS = {
    "factor": (lambda leaf: 2 * leaf, "jax.tree.map"),
    "noise": (lambda leaf: leaf + jnp.ones((), leaf.dtype), "jax.tree.map"),
    "cast": (lambda leaf: leaf.astype(jnp.bfloat16), "jax.tree.map"),
    "cast of scales": (as_bfloat16_of_float32, "holds bfloat16"),
}


@parametrize("name", CHANGES_IN_A_LOSS)
def test_a_loss_of_changed_leaves_raises_while_it_is_traced(name):
    change, message = CHANGES_IN_A_LOSS[name]

    def loss(params):
        return square(jax.tree.map(change, params))

    grad = tcfp_jax.grad(loss)
    for run in (grad, jax.jit(grad), functools.partial(jax.eval_shape, grad)):
        with pytest.raises((TypeError, ValueError), match=message):
            run(stored())


def test_an_error_of_the_loss_keeps_its_words():
    def loss(params):
        raise TypeError("abstract method f of A")

    with pytest.raises(TypeError, match=r"^abstract method f of A"):
        tcfp_jax.grad(loss)(stored())


def test_a_loss_may_move_leaves():
    def of_moved(params):
        moved = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf])[1], params)
        return square(jax.lax.stop_gradient(params)) * 0 + square(moved)

    found = tcfp_jax.grad(of_moved)(stored())
    assert same_bits(found, tcfp_jax.grad(square)(stored()))


def test_losses_over_floats_and_over_reads_are_right():
    params = stored()

    def of_floats(params):
        return jnp.sum(kernel_of(params) ** 2)

    def with_a_read(params):
        return square(params) + jax.lax.stop_gradient(params["kernel"].state.amax.sum())

    found = tcfp_jax.grad(of_floats)(params)["kernel"]
    assert_close(found, 2 * kernel_of(params), 1e-6)
    assert same_bits(tcfp_jax.grad(with_a_read)(params), tcfp_jax.grad(square)(params))


# Transformations after adamw
# --------------------------------------------------------------------------------------
AFTER = {
    "clip": (optax.clip(1.0), "raises"),
    "centralize": (optax.centralize(), "raises"),
    "scale": (optax.scale(0.5), "raises"),
    "scale_by_sign": (optax.scale_by_sign(), "nan"),
    "schedule": (optax.scale_by_schedule(lambda count: 0.5), "nan"),
}


@slow_except("centralize", "scale", "scale_by_sign", "schedule")
@parametrize("name", AFTER)
def test_a_changed_update_is_never_silent(name):
    after, traced = AFTER[name]
    params = stored((32, 128))
    tx = optax.chain(ADAMW, after)
    state = tx.init(params)
    step = functools.partial(step_of(tx), floats((32, 128)))
    message = (
        "changed after tcfp_jax.optim.adamw.*put that part before adamw, or use"
        " tcfp_jax.optim.on_stored"
    )
    with refused(message):
        step(params, state)
    if traced == "raises":
        with refused(message):
            jax.jit(step)(params, state)
    else:
        assert np.isnan(kernel_of(jax.jit(step)(params, state)[0])).all()


# optax itself refuses these, with its own message: their states have the structure or
# the dtypes of the parameters.
REFUSED = {
    "add_noise": optax.add_noise(0.01, 0.5, jax.random.key(0)),
    "reduce_on_plateau": optax.contrib.reduce_on_plateau(),
    "clip_by_global_norm": optax.clip_by_global_norm(1.0),
    "scale_by_adam": optax.scale_by_adam(),
    "scale_by_trust_ratio": optax.scale_by_trust_ratio(),
    "trace": optax.trace(0.9),
}


@parametrize("name", REFUSED)
def test_a_transformation_after_adamw_is_loud_and_has_a_place(name):
    """Its place is in `on_stored`."""
    params = stored((32, 128))
    grads = floats((32, 128))
    more = {"value": 1.0} if name == "reduce_on_plateau" else {}

    def step(tx):
        updates, _ = tx.update(grads, tx.init(params), params, **more)
        return kernel_of(tcfp_jax.apply_updates(params, updates))

    after_adamw = optax.chain(ADAMW, REFUSED[name])
    for run in (step, lambda tx: jax.jit(lambda: step(tx))()):
        with refused(r"dtype|Rewritten", (ValueError, TypeError)):
            run(after_adamw)
    after = step(optim.on_stored(optax.chain(optax.adamw(1e-2), REFUSED[name])))
    assert all_finite(after)
    assert not same_bits(after, kernel_of(params))


# Reads of the arrays of weights, and states of another optimizer.
def init_with_labels():
    params = stored()
    optax.multi_transform({True: ADAMW}, matrices(params)).init(params)


def init_with_mask():
    params = stored()
    optim.adamw(1e-2, key=KEY, mask=matrices(params)).init(params)


def update_with_state_of(tx):
    params = stored()
    ADAMW.update(floats(), tx.init(params), params)


def update_across_remainders(remainder, restored):
    into = stored(remainder=restored)["kernel"]
    state = stored(remainder=remainder)["kernel"].state
    arrays = dataclasses.replace(into.state, rounding=state.rounding, error=state.error)
    params = {"kernel": dataclasses.replace(into, state=arrays)}
    ADAMW.update(floats(), ADAMW.init(stored()), params)


FLOAT32 = optim.adamw(1e-2, moments="float32")
OUTSIDE = {
    "steps": optax.MultiSteps(ADAMW, 2),
    "steps of a chain": optax.MultiSteps(
        optax.chain(optax.clip(1.0), optim.on_stored(optax.adam(1e-2))), 2
    ),
    "finite": optax.apply_if_finite(ADAMW, 3),
}


@parametrize("name", OUTSIDE)
def test_wrappers_that_take_floats_belong_inside_of_on_stored(name):
    tx = OUTSIDE[name]
    params = stored()
    with refused(r"write.*on_stored\(optax"):
        tx.init(params)
    with refused(r"write.*on_stored\(optax"):
        train_state.TrainState.create(apply_fn=None, params=params, tx=tx)
    jax.eval_shape(tx.init, floats())
    jax.eval_shape(optim.on_stored(tx).init, params)


EITHER = (ValueError, TypeError)
test_arrays_of_weights_and_states_of_others_are_named = refusals(
    {
        EITHER: {
            "labels": init_with_labels,
            "values for 1": init_with_mask,
            "not adamw's": lambda: update_with_state_of(
                tx=optim.on_stored(optax.sgd(0.1))
            ),
            "a moment of": lambda: update_with_state_of(tx=FLOAT32),
        },
        ValueError: {
            "arrays of another: restore": lambda: update_across_remainders(
                remainder="stochastic", restored="feedback"
            ),
            "of another: restore": lambda: update_across_remainders(
                remainder="feedback", restored="stochastic"
            ),
        },
    }
)


def test_the_moments_of_any_optimizer_may_be_narrow():
    params = stored()
    tx = suited(optim.low_precision_moments(optax.lion(1e-3), key=KEY), params, dict)
    after, _ = step_of(tx)(floats(), params, tx.init(params))
    assert not same_bits(kernel_of(after), kernel_of(params))
    tx = optax.sgd(0.1)
    bias = {"bias": jnp.ones(4)}
    assert suited(tx, bias, lambda: {"up/kernel": None}).init(bias) == tx.init({})


NARROW = optim.low_precision_moments(optax.adam(1e-2), key=KEY)
SKIPPING = {
    "adamw": ADAMW,
    "on_stored": optim.on_stored(optax.adamw(1e-2)),
    "narrow": optim.on_stored(NARROW),
}
# The largest float whose square is a number moves a weight as any other does.
LARGEST = 0.999 * 2.0**63


@slow_except("one pass-adamw", "one pass-on_stored", "by XLA-narrow")
@parametrize("name", SKIPPING)
@parametrize("shape", [(32, 128), (16, 32)], ids=["one pass", "by XLA"])
def test_a_gradient_whose_square_overflows_is_skipped(shape, name):
    tx = SKIPPING[name]
    step = jax.jit(step_of(tx))
    params = stored(shape) | {"bias": jnp.ones(4)}
    state = tx.init(params)
    grads = floats(shape) | {"bias": jnp.ones(4)}
    for leaf, bad in (
        ("kernel", 2.0**63),
        ("kernel", -3e38),
        ("bias", jnp.nan),
        ("bias", jnp.inf),
    ):
        one = (1,) * grads[leaf].ndim
        same, after = step(grads | {leaf: grads[leaf].at[one].set(bad)}, params, state)
        assert same_bits(same, params)
        assert int(after.skipped) == 1
        zero = jnp.zeros_like(after.skipped)
        assert same_bits(after._replace(skipped=zero), state)
    large = grads | {"kernel": grads["kernel"].at[1, 2].set(LARGEST)}
    moved, after = step(large, params, state)
    assert all_finite(kernel_of(moved))
    assert int(after.skipped) == 0
