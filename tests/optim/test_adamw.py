"""`tcfp_jax.optim.adamw` on float and stored parameters: optax's arithmetic, rounding,
skipped steps, bits.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tcfp_jax
from pallas_kernels import dispatch
from pallas_kernels.operands import Block
from tcfp_jax import optim
from tcfp_jax.optim.encoding import Blocks, decode
from tcfp_jax.weights.layout import Layout, Weight
from tests.helpers import (
    assert_close,
    decibels,
    drawn,
    filled,
    parametrize,
    refusals,
    restored,
    same_bits,
    shapes_of,
    slow,
    slow_except,
    step_of,
    store_at_once,
)
from tests.optim.zoo import (
    GRADS,
    KEY,
    PARAMS,
    RECIPE,
    SCHEDULE,
    distance,
    matrices,
    stepped,
    stored_of,
)

pytestmark = pytest.mark.usefixtures("standard_promotion")
# For a few tests only, because it doubles the compile time
STACK = filled(shapes_of({"layers": {"kernel": (2, 64, 128)}}), seed=2)
STACK_GRADS = filled(STACK, seed=3)
STORED = store_at_once(PARAMS, RECIPE, key=KEY)
FLOATS = jax.jit(optim.dequantize)(STORED)
MOMENTS = ("8bit", "bfloat16", "float32")


def adamw(*args, moments="8bit", **options):
    key = None if moments == "float32" else KEY
    return optim.adamw(*args, moments=moments, key=key, **options)


def wide(moments, scales):
    """Moments of any format in float32."""
    up = moments["up"]["kernel"]
    if scales:
        up = decode(Blocks(up, scales["up"]["kernel"]))
    up = up.astype(jnp.float32)
    return {**moments, "up": {**moments["up"], "kernel": up}}


def m_of(state):
    return np.asarray(wide(state.mu, state.mu_scale)["up"]["kernel"], np.float64)


def not_finite(path, bad=np.nan):
    """The gradients with one value that is not finite."""
    names = path.split("/")
    leaf = GRADS[names[0]][names[1]]
    leaf = leaf.at[(0,) * leaf.ndim].set(bad)
    return {**GRADS, names[0]: {**GRADS[names[0]], names[1]: leaf}}


# Steps of optax
# --------------------------------------------------------------------------------------
OPTIONS = {
    "decay": dict(b1=0.8, b2=0.95, eps=1e-6, eps_root=1e-12, weight_decay=0.1),
    "nesterov": dict(
        nesterov=True,
        weight_decay=0.5,
        mask={"up": True, "small": False, "embed": True},
    ),
    "mask by function": dict(weight_decay=0.5, mask=matrices),
}


@slow_except("decay", "nesterov")
@parametrize("name", OPTIONS)
@pytest.mark.optimized("slow")
def test_float_parameters_take_the_steps_of_optax(name):
    rate = optax.linear_schedule(1e-2, 0.0, 5) if name == "decay" else 1e-2
    exact, _ = stepped(optax.adamw(rate, **OPTIONS[name]))
    ours, state = stepped(adamw(rate, moments="float32", **OPTIONS[name]))
    for a, b, start in zip(*map(jax.tree.leaves, (exact, ours, PARAMS)), strict=True):
        # Two programs: one may contract a product and a sum where the other does not, a
        # unit in the last place each.
        bound = 4e-6 * np.abs(a - start) + 2.0**-22 * np.abs(a)
        assert (np.abs(a - b) <= bound).all()
    assert int(state.count) == 4
    assert int(state.skipped) == 0
    assert state.key is None


@slow_except("decay-8bit")
@parametrize(
    "name, moments",
    [
        ("decay", "bfloat16"),
        ("decay", "8bit"),
        ("nesterov", "8bit"),
        ("mask by function", "float32"),
    ],
)
def test_stored_parameters_take_the_steps_of_optax(name, moments):
    exact, _ = stepped(optax.adamw(1e-2, **OPTIONS[name]), FLOATS)
    after, state = stepped(adamw(1e-2, moments=moments, **OPTIONS[name]), STORED)
    ours = optim.dequantize(after)
    # Four steps: hi + lo of a weight has 60 dB, and the update is large; m has 2**-4 of
    # rounding at most.
    bound = 0.05 if moments == "8bit" else 0.02
    for path in ("up", "small"):
        assert distance(exact, ours, FLOATS, path, "kernel") < bound
    for path, leaf in (("up", "bias"), ("embed", "table")):
        assert_close(ours[path][leaf], exact[path][leaf], 1e-5, 1e-7)
    narrow = ["up"] if moments == "8bit" else []
    assert list(state.mu_scale) == list(state.nu_scale) == narrow
    assert state.mu["embed"]["table"].dtype == jnp.float32
    assert state.mu["small"]["kernel"].dtype == jnp.float32


@slow_except("8bit")
@parametrize("moments", MOMENTS)
def test_one_step_is_within_rounding_of_the_arithmetic(moments):
    tx = adamw(1e-2, weight_decay=0.1, moments=moments)
    before, state = stepped(tx, STORED, 1)
    after, _ = stepped(tx, before, 1, state=state)
    floats = optim.dequantize(before)
    mu = wide(state.mu, state.mu_scale)
    nu = wide(state.nu, state.nu_scale)
    reference = optax.adamw(1e-2, weight_decay=0.1)
    adam = optax.ScaleByAdamState(state.count, mu, nu)
    exact, _ = step_of(reference)(GRADS, floats, (adam, *reference.init(floats)[1:]))
    for path in ("up", "small"):
        weight = after[path]["kernel"]
        ours = weight.dequantize()
        wanted = exact[path]["kernel"]
        # Below 448 units hi is within 16, and stochastic rounding of 16 within one.
        units = weight.rows.scale_of_values()
        assert (jnp.abs(ours - wanted) <= 1.001 * units).all()
        assert decibels(wanted, ours) > 55


@slow_except("tcfp12-dropped")
@parametrize(
    "recipe, remainder",
    [
        ("tcfp12_fast", "stochastic"),
        ("tcfp12", "dropped"),
        ("tcfp12_single", "feedback"),
        ("in blocks", "stochastic"),
        ("in both orientations", "stochastic"),
    ],
)
def test_every_way_to_store_a_weight(recipe, remainder):
    if recipe == "in blocks":
        recipe = tcfp_jax.recipe("tcfp12", scaling=Block(32))
    elif recipe == "in both orientations":
        recipe = tcfp_jax.recipe(RECIPE, copies="both")
    params = jax.jit(lambda p: stored_of(p, recipe, remainder))(STACK)
    floats = optim.dequantize(params)
    after, state = stepped(adamw(1e-2), params, grads=STACK_GRADS)
    exact, _ = stepped(optax.adamw(1e-2), floats, grads=STACK_GRADS)
    assert distance(exact, optim.dequantize(after), floats, "layers", "kernel") < 0.05
    assert jax.tree.structure(after) == jax.tree.structure(params)
    assert state.nu["layers"]["kernel"].dtype == jnp.uint8
    weight = after["layers"]["kernel"]
    if weight.stored.forward is not None:  # the copy that the forward product reads
        turned = weight.stored.forward.turn()
        assert same_bits(turned.values, weight.rows.values)
        assert same_bits(turned.scale, weight.rows.scale)
        assert turned.lo is None or same_bits(turned.lo, weight.rows.lo)


@slow_except(str(Layout((1, 2), (0,))))
@parametrize("layout", [Layout((1, 2), (0,)), Layout((0,), (1, 2))], ids=str)
def test_kernels_of_any_layout(layout):
    weights = {"w": Weight(tcfp_jax.recipe(RECIPE), layout)}
    grads = {"w": drawn(64, 8, 16)}
    stored = store_at_once({"w": drawn(64, 8, 16, seed=1) / 8}, weights, key=KEY)
    floats = optim.dequantize(stored)
    exact, _ = stepped(optax.adamw(1e-2), floats, grads=grads)
    after, _ = stepped(adamw(1e-2), stored, grads=grads)
    assert distance(exact, optim.dequantize(after), floats, "w") < 0.05


WRAPPED = {
    "injected": lambda tx: optax.inject_hyperparams(
        tx, static_args=("key", "mask"), hyperparam_dtype=jnp.float32
    )(learning_rate=SCHEDULE, key=KEY),
    "masked": lambda tx: optax.masked(
        tx(1e-2, key=KEY), {"up": True, "small": True, "embed": False}
    ),
    "partition": lambda tx: optax.partition(
        {"a": tx(1e-2, key=KEY), "b": optax.sgd(0.1)},
        {"up": "a", "small": "a", "embed": "b"},
    ),
    "chain": lambda tx: optax.chain(optax.scale(2.0), tx(SCHEDULE, key=KEY)),
}


def adamw_of_optax(learning_rate, mask=None, key=None):
    return optax.adamw(learning_rate, mask=mask)


@slow_except("injected")
@parametrize("name", WRAPPED)
def test_inside_of_optax(name):
    after, _ = stepped(WRAPPED[name](optim.adamw), STORED)
    exact, _ = stepped(WRAPPED[name](adamw_of_optax), FLOATS)
    assert distance(exact, optim.dequantize(after), FLOATS, "up", "kernel") < 0.05


@slow  # quicker tests have its steps beside those of optax
def test_training_converges_as_with_floats():
    x = drawn(256, 64)
    y = jnp.tanh(x @ drawn(64, 16, seed=1) / 8)
    params = {"up": PARAMS["up"]["kernel"], "down": drawn(128, 16, seed=2) / 45}

    def loss(params):
        hidden = jnp.tanh(tcfp_jax.matmul(x, params["up"], recipe=RECIPE))
        out = tcfp_jax.matmul(hidden, params["down"], recipe=RECIPE)
        return jnp.mean((out - y) ** 2)

    def losses(tx, params):
        step = step_of(tx)

        def one(carry, _):
            value, grads = tcfp_jax.value_and_grad(loss)(carry[0])
            return step(grads, *carry), value

        return jax.lax.scan(one, (params, tx.init(params)), length=150)[1]

    rate = optax.cosine_decay_schedule(3e-3, 150)
    exact = jax.jit(functools.partial(losses, optax.adamw(rate)))(params)
    weight = Weight(tcfp_jax.recipe(RECIPE), Layout((0,), (1,)))
    stored = stored_of(params, dict.fromkeys(params, weight))
    ours = jax.jit(functools.partial(losses, adamw(rate)))(stored)
    assert ours[-1] < 0.1 * ours[0]
    assert abs(ours[-1] / exact[-1] - 1) < 0.1


# Options
# --------------------------------------------------------------------------------------
@slow_except("8bit")
@parametrize("moments", ["8bit", "float32"])
def test_clipping(moments):
    norm = float(optax.tree.norm(GRADS))
    make = functools.partial(adamw, 1e-2, weight_decay=0.1, moments=moments)
    plain = make()
    clipping = make(max_norm=norm / 8)
    unclipped, _ = stepped(plain, STORED, 1)
    same, _ = stepped(make(max_norm=2 * norm), STORED, 1)
    assert same_bits(unclipped, same)
    scaled = jax.tree.map(lambda g: g / 8, GRADS)
    by_hand = m_of(stepped(plain, STORED, 1, scaled)[1])
    clipped = m_of(stepped(clipping, STORED, 1)[1])
    # The factor may be an ulp off an eighth, which rounds differently where a random
    # number is that near.
    bound = 1e-3 if moments == "8bit" else 1e-6
    assert np.linalg.norm(by_hand - clipped) <= bound * np.linalg.norm(by_hand)
    after, state = stepped(clipping, STORED, 1, not_finite("embed/table"))
    assert same_bits(after, STORED)
    assert int(state.skipped) == 1


def test_a_step_whose_norm_overflows_is_skipped_and_counted():
    """Each square is finite, and their sum is not."""
    large = jax.tree.map(lambda g: jnp.full_like(g, 1e18), GRADS)
    after, state = stepped(adamw(1e-2, max_norm=1.0), STORED, 1, large)
    assert same_bits(after, STORED)
    assert int(state.skipped) == 1


def test_clipping_of_float_parameters_is_that_of_optax():
    norm = float(optax.tree.norm(GRADS)) / 8
    clip = optax.clip_by_global_norm(norm)
    exact, _ = stepped(optax.chain(clip, optax.adamw(1e-2, weight_decay=0.1)))
    ours, _ = stepped(adamw(1e-2, weight_decay=0.1, max_norm=norm, moments="float32"))
    assert_close(ours, exact, 1e-4, 1e-6)


@slow_except("8bit")
@parametrize("moments", ["8bit", "float32"])
def test_eps_root_is_added_under_the_root(moments):
    options = dict(eps_root=4.0, weight_decay=0.0)
    exact, _ = stepped(optax.adamw(0.5, **options), FLOATS, 1)
    after, _ = stepped(adamw(0.5, moments=moments, **options), STORED, 1)
    assert distance(exact, optim.dequantize(after), FLOATS, "up", "kernel") < 0.1


def test_learning_rate_zero_changes_no_value():
    after, state = stepped(adamw(0.0, weight_decay=0.1), STORED)
    assert same_bits(optim.dequantize(after), FLOATS)
    assert m_of(state).any()
    assert int(state.count) == 4


def small_ones(tree):
    return jax.tree.map(lambda leaf: leaf.size < 4096, tree)


@parametrize("mask, of_up", [(None, 0.9), (small_ones, 1)])
def test_a_mask_leaves_stored_weights_undecayed(mask, of_up):
    """With a gradient of zeros, a step does nothing but decay."""
    grads = jax.tree.map(jnp.zeros_like, GRADS)
    params, _ = stepped(adamw(0.1, weight_decay=1.0, mask=mask), STORED, 1, grads)
    after = optim.dequantize(params)
    for path, wanted in (("up", of_up), ("small", 0.9)):
        before = jnp.linalg.norm(FLOATS[path]["kernel"])
        ratio = jnp.linalg.norm(after[path]["kernel"]) / before
        assert float(ratio) == pytest.approx(wanted, abs=0.01)


# Skipped steps, kernels and bytes
# --------------------------------------------------------------------------------------
SKIPPING = adamw(1e-2)
UPDATE = jax.jit(SKIPPING.update)


@parametrize(
    "bad, path",
    [
        (np.nan, "up/bias"),
        (np.nan, "up/kernel"),
        (-np.inf, "small/kernel"),
        (np.inf, "embed/table"),
    ],
)
def test_a_step_that_is_not_finite_changes_nothing(bad, path):
    params, state = stepped(SKIPPING, STORED, 1)
    broken = not_finite(path, bad)
    for times in range(1, 4):
        updates, after = UPDATE(broken, state, params)
        assert same_bits(optim.apply_updates(params, updates), params)
        assert same_bits(updates["up"]["bias"], jnp.zeros(128))
        assert int(after.skipped) == times
        assert same_bits(after._replace(skipped=state.skipped), state)
        state = after
    _, after = UPDATE(GRADS, state, params)
    assert int(after.count) == 2
    assert int(after.skipped) == 3


def test_a_step_that_is_left_out_moves_no_scale():
    """Not even where the weights have grown, so that the next step would move it."""
    params, state = stepped(adamw(2.0), STORED, 1)
    weight = params["up"]["kernel"]
    assert float(weight.state.amax) > 112 * float(weight.rows.scale)
    updates, _ = UPDATE(not_finite("up/kernel"), state, params)
    assert same_bits(optim.apply_updates(params, updates), params)


@parametrize(
    "remainder, moments, calls",
    [
        ("stochastic", "8bit", 2),
        ("dropped", "8bit", 2),
        ("feedback", "8bit", 0),
        ("stochastic", "bfloat16", 0),
        (None, "8bit", 0),
    ],
)
def test_the_kernel_takes_what_it_can(remainder, moments, calls):
    def run(params, grads):
        if remainder is not None:
            params = stored_of(params, remainder=remainder)
        tx = adamw(1e-2, moments=moments)
        return tx.update(grads, tx.init(params), params)

    with dispatch.recording() as found:
        jax.eval_shape(run, PARAMS | STACK, GRADS | STACK_GRADS)
    assert [call.op for call in found].count("adamw") == calls


def test_bytes_a_weight():
    params = STORED | store_at_once(STACK, RECIPE, key=KEY)
    state = adamw(1e-2).init(params)
    trees = (params, state.mu, state.nu, state.mu_scale, state.nu_scale)
    for path in ("up", "layers"):
        parts = [tree[path]["kernel"] for tree in trees]
        sizes = [leaf.nbytes for leaf in jax.tree.leaves(parts)]
        assert sum(sizes) / np.prod(parts[0].shape) <= 4.1, sizes
    assert jnp.float64 not in [leaf.dtype for leaf in jax.tree.leaves(state)]


RUNS = {
    "adamw": (adamw(SCHEDULE), STORED),
    "on_stored": (optim.on_stored(optax.adamw(1e-2)), STORED),
    "floats": (optim.low_precision_moments(optax.adamw(1e-2), key=KEY), PARAMS),
}


@parametrize("name", RUNS)
def test_a_run_resumes_bit_for_bit(name, tmp_path):
    tx, params = RUNS[name]
    step = jax.jit(functools.partial(step_of(tx), GRADS), donate_argnums=(0, 1))
    run = step(*step(jax.tree.map(jnp.copy, params), tx.init(params)))
    again = restored(run, tmp_path)
    assert same_bits(run, again)
    assert same_bits(step(*run), step(*again))
    tx.init(params)  # the key of the donated state was its own


# Mistakes
# --------------------------------------------------------------------------------------
def update(gradients, *params):
    tx = adamw(0.1)
    tx.update(GRADS | gradients, tx.init(STORED), *params)


def init(params, **options):
    adamw(0.1, **options).init(params)


TURNED = {"up": {**GRADS["up"], "kernel": GRADS["up"]["kernel"].T}}
test_mistakes = refusals(
    {
        ValueError: {
            "moments='4bit' is unknown": lambda: optim.adamw(0.1, moments="4bit"),
            "moments='8bit' rounds.*key=jax.random.key": lambda: optim.adamw(0.1),
            r"key is a int, not one JAX random key; use jax.random.key\(": lambda: (
                optim.adamw(0.1, key=0)
            ),
            "moments='float32' rounds nothing.*drop the key": lambda: optim.adamw(
                0.1, moments="float32", key=KEY
            ),
            r"tx.update\(grads, opt_state, params\)": lambda: update({}),
            r"gradient of up/kernel is \[128, 64\].*parameter is \[64, 128\]": lambda: (
                update(TURNED, STORED)
            ),
            "hold a stored weight at small/kernel.*value_and_grad": lambda: update(
                {"small": STORED["small"]}, STORED
            ),
            "mask must be a tree of bools": lambda: init(STORED, mask={"up": True}),
        },
        TypeError: {
            "cannot be trained.*tcfp_jax.store": lambda: init(
                {"up": {"kernel": STORED["up"]["kernel"].stored}}
            ),
        },
    }
)
