"""`tcfp_jax.optim.adamw` on float and stored parameters: optax's arithmetic, rounding,
skipped steps, bits.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tcfp_jax
from pallas_kernels import dispatch
from pallas_kernels.operands import Block
from tcfp_jax import monitor, optim
from tcfp_jax.optim.encoding import Blocks, decode
from tcfp_jax.weights.layout import Layout, Weight
from tests.helpers import decibels, filled, mesh_of, same_bits, store_at_once

pytestmark = pytest.mark.usefixtures("standard_promotion")
SHAPES = {
    "up": {"kernel": (64, 128), "bias": (128,)},
    "layers": {"kernel": (2, 64, 128)},
    "small": {"kernel": (32, 32)},
    "embed": {"table": (64, 128)},
}
PARAMS = filled(
    jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, jnp.float32),
        SHAPES,
        is_leaf=lambda node: isinstance(node, tuple),
    )
)
GRADS = filled(PARAMS, seed=1)
KEY = jax.random.key(3)
# For a few tests only, because it doubles the compile time
STACK = {"layers": PARAMS.pop("layers")}
STACK_GRADS = {"layers": GRADS.pop("layers")}
STORED = jax.jit(lambda params: optim.store(params, "tcfp12_single", key=KEY))(PARAMS)
MOMENTS = ("8bit", "bfloat16", "float32")
PRODUCTS = ("forward", "dgrad", "wgrad")


def adamw(*args, moments="8bit", **options):
    return optim.adamw(
        *args, moments=moments, key=None if moments == "float32" else KEY, **options
    )


def steps(tx, n, params, state, grads):
    """Return (parameters, state) after n steps with the same gradients."""

    def one(carry, _):
        params, state = carry
        updates, state = tx.update(grads, state, params)
        return (optim.apply_updates(params, updates), state), None

    return jax.lax.scan(one, (params, state), length=n)[0]


@functools.cache
def program(tx, n):
    return jax.jit(functools.partial(steps, tx, n)), jax.jit(tx.init)


def stepped(tx, params, n=4, grads=GRADS, state=None):
    run, init = program(tx, n)
    return run(params, init(params) if state is None else state, grads)


def wide(moments, scales):
    """Moments of any format in float32."""
    up = moments["up"]["kernel"]
    up = (
        decode(Blocks(up, scales["up"]["kernel"])) if scales else up.astype(jnp.float32)
    )
    return {**moments, "up": {**moments["up"], "kernel": up}}


def distance(exact, ours, start, *path):
    """Return how far a leaf is from the exact one, as a part of the exact change."""
    a, b, c = (
        np.asarray(functools.reduce(lambda node, name: node[name], path, t))
        for t in (exact, ours, start)
    )
    return np.linalg.norm(a - b) / np.linalg.norm(a - c)


def m_of(state):
    return np.asarray(wide(state.mu, state.mu_scale)["up"]["kernel"], np.float64)


OPTIONS = {
    "decay": dict(b1=0.8, b2=0.95, eps=1e-6, eps_root=1e-12, weight_decay=0.1),
    "nesterov": dict(
        nesterov=True,
        weight_decay=0.5,
        mask={"up": True, "small": False, "embed": True},
    ),
    "mask by function": dict(
        weight_decay=0.5,
        mask=lambda tree: jax.tree.map(lambda leaf: len(leaf.shape) > 1, tree),
    ),
}


@pytest.mark.slow_except("decay", "nesterov")
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.optimized("slow")
def test_float_parameters_take_the_steps_of_optax(name):
    rate = optax.linear_schedule(1e-2, 0.0, 5) if name == "decay" else 1e-2
    exact, _ = stepped(optax.adamw(rate, **OPTIONS[name]), PARAMS)
    ours, state = stepped(adamw(rate, moments="float32", **OPTIONS[name]), PARAMS)
    for a, b, start in zip(*map(jax.tree.leaves, (exact, ours, PARAMS)), strict=True):
        # Two programs: one may contract a product and a sum where the other does not, a
        # unit in the last place each.
        moved = np.abs(np.asarray(a) - start)
        assert (np.abs(np.asarray(a) - b) <= 4e-6 * moved + 2.0**-22 * np.abs(a)).all()
    assert int(state.count) == 4 and int(state.skipped) == 0 and state.key is None


@pytest.mark.slow_except("decay-8bit")
@pytest.mark.parametrize(
    "name, moments",
    [
        ("decay", "bfloat16"),
        ("decay", "8bit"),
        ("nesterov", "8bit"),
        ("mask by function", "float32"),
    ],
)
def test_stored_parameters_take_the_steps_of_optax(name, moments):
    floats = optim.dequantize(STORED)
    exact, _ = stepped(optax.adamw(1e-2, **OPTIONS[name]), floats)
    after, state = stepped(adamw(1e-2, moments=moments, **OPTIONS[name]), STORED)
    ours = optim.dequantize(after)
    # Four steps: hi + lo of a weight has 60 dB, and the update is large; m has 2**-4 of
    # rounding at most.
    for path in ("up", "small"):
        assert distance(exact, ours, floats, path, "kernel") < (
            0.05 if moments == "8bit" else 0.02
        )
    for path, leaf in (("up", "bias"), ("embed", "table")):
        np.testing.assert_allclose(
            ours[path][leaf], exact[path][leaf], rtol=1e-5, atol=1e-7
        )
    assert (
        list(state.mu_scale)
        == list(state.nu_scale)
        == (["up"] if moments == "8bit" else [])
    )
    assert (
        state.mu["embed"]["table"].dtype
        == state.mu["small"]["kernel"].dtype
        == jnp.float32
    )


@pytest.mark.slow_except("8bit")
@pytest.mark.parametrize("moments", MOMENTS)
def test_one_step_is_within_rounding_of_the_arithmetic(moments):
    tx = adamw(1e-2, weight_decay=0.1, moments=moments)
    before, state = stepped(tx, STORED, 1)
    after, _ = stepped(tx, before, 1, state=state)
    floats = optim.dequantize(before)
    inner = optax.ScaleByAdamState(
        state.count, wide(state.mu, state.mu_scale), wide(state.nu, state.nu_scale)
    )
    reference = optax.adamw(1e-2, weight_decay=0.1)
    updates, _ = reference.update(GRADS, (inner, *reference.init(floats)[1:]), floats)
    exact = optax.apply_updates(floats, updates)
    ours = optim.dequantize(after)
    for path in ("up", "small"):
        stored = after[path]["kernel"].rows
        units = np.asarray(stored.scale_of_values())
        # Below 448 units hi is within 16, and stochastic rounding of 16 within one.
        assert (
            np.abs(np.asarray(ours[path]["kernel"]) - exact[path]["kernel"])
            <= 1.001 * units
        ).all()
        assert decibels(exact[path]["kernel"], ours[path]["kernel"]) > 55


def test_what_the_kernel_takes_goes_through_it():
    params, grads = {**PARAMS, **STACK}, {**GRADS, **STACK_GRADS}

    def calls(store, **options):
        def run(params, grads):
            params, tx = store(params), adamw(1e-2, **options)
            return tx.update(grads, tx.init(params), params)

        with dispatch.recording() as found:
            jax.eval_shape(run, params, grads)
        return len([call for call in found if call.op == "adamw"])

    stochastic = lambda params: optim.store(params, "tcfp12_single", key=KEY)
    without = lambda remainder: (
        lambda params: optim.store(params, "tcfp12_single", remainder=remainder)
    )
    assert calls(stochastic) == calls(without("dropped")) == 2
    assert (
        calls(lambda params: params)
        == calls(stochastic, moments="bfloat16")
        == calls(without("feedback"))
        == 0
    )


@pytest.mark.slow_except("tcfp12-dropped")
@pytest.mark.parametrize(
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
    chosen = {
        "in blocks": tcfp_jax.recipe("tcfp12", scaling=Block(32)),
        "in both orientations": tcfp_jax.recipe("tcfp12_single", copies="both"),
    }.get(recipe, recipe)
    params = store_at_once(
        STACK,
        chosen,
        key=KEY if remainder == "stochastic" else None,
        remainder=remainder,
    )
    floats = optim.dequantize(params)
    after, state = stepped(adamw(1e-2), params, grads=STACK_GRADS)
    exact, _ = stepped(optax.adamw(1e-2), floats, grads=STACK_GRADS)
    assert distance(exact, optim.dequantize(after), floats, "layers", "kernel") < 0.05
    weight = after["layers"]["kernel"]
    if weight.stored.forward is not None:  # the copy that the forward product reads
        turned = weight.stored.forward.turn()
        assert same_bits(
            (turned.values, turned.scale),
            (weight.rows.values, weight.rows.scale),
        )
        assert turned.lo is None or same_bits(turned.lo, weight.rows.lo)
    assert jax.tree.structure(after) == jax.tree.structure(params)
    assert state.nu["layers"]["kernel"].dtype == jnp.uint8


@pytest.mark.slow_except(str(Layout((1, 2), (0,))))
@pytest.mark.parametrize(
    "layout", [Layout((1, 2), (0,)), Layout((0,), (1, 2))], ids=str
)
def test_kernels_of_any_layout(layout):
    params, grads = (
        {"w": tree["up"]["kernel"].reshape(64, 8, 16)} for tree in (PARAMS, GRADS)
    )
    stored = store_at_once(
        params, {"w": Weight(tcfp_jax.recipe("tcfp12_single"), layout)}, key=KEY
    )
    floats = optim.dequantize(stored)
    exact, _ = stepped(optax.adamw(1e-2), floats, grads=grads)
    ours = optim.dequantize(stepped(adamw(1e-2), stored, grads=grads)[0])
    assert distance(exact, ours, floats, "w") < 0.05


@pytest.mark.parametrize(
    "bad, path",
    [
        (np.nan, "up/bias"),
        (np.nan, "up/kernel"),
        (-np.inf, "small/kernel"),
        (np.inf, "embed/table"),
    ],
)
def test_a_step_that_is_not_finite_changes_nothing(bad, path):
    tx, update = _skipping()
    params, state = stepped(tx, STORED, 1)
    first, second = path.split("/")
    broken = jax.tree.map(lambda g: g, GRADS)
    broken[first][second] = (
        broken[first][second].at[(0,) * broken[first][second].ndim].set(bad)
    )
    for times in range(1, 4):
        updates, after = update(broken, state, params)
        assert same_bits(optim.apply_updates(params, updates), params)
        assert same_bits(updates["up"]["bias"], jnp.zeros(128))
        assert int(after.skipped) == times
        assert same_bits(after._replace(skipped=state.skipped), state)
        state = after
    _, after = update(GRADS, state, params)
    assert int(after.count) == 2 and int(after.skipped) == 3


def test_a_step_that_is_left_out_moves_no_scale():
    """Not even where the weights have grown, so that the next step would move it."""
    _, update = _skipping()
    params, state = stepped(adamw(2.0), STORED, 1)
    weight = params["up"]["kernel"]
    assert float(weight.state.amax) > 112 * float(weight.rows.scale)
    broken = jax.tree.map(lambda g: g.at[(0,) * g.ndim].set(jnp.nan), GRADS)
    updates, _ = update(broken, state, params)
    assert same_bits(optim.apply_updates(params, updates), params)


@functools.cache
def _skipping():
    tx = adamw(1e-2)
    return tx, jax.jit(tx.update)


@pytest.mark.slow_except("8bit")
@pytest.mark.parametrize("moments", ["8bit", "float32"])
def test_clipping(moments):
    norm = float(optax.tree.norm(GRADS))
    options = dict(weight_decay=0.1, moments=moments)
    plain, clipping = adamw(1e-2, **options), adamw(1e-2, max_norm=norm / 8, **options)
    unclipped, _ = stepped(plain, STORED, 1)
    same, _ = stepped(adamw(1e-2, max_norm=2 * norm, **options), STORED, 1)
    assert same_bits(unclipped, same)
    scaled = jax.tree.map(lambda g: g / 8, GRADS)
    _, by_hand = stepped(plain, STORED, 1, grads=scaled)
    _, clipped = stepped(clipping, STORED, 1)
    a, b = (m_of(state) for state in (by_hand, clipped))
    # The factor may be an ulp off an eighth, which rounds differently where a random
    # number is that near.
    assert np.linalg.norm(a - b) <= (
        1e-3 if moments == "8bit" else 1e-6
    ) * np.linalg.norm(a)
    exact, _ = stepped(
        optax.chain(
            optax.clip_by_global_norm(norm / 8), optax.adamw(1e-2, weight_decay=0.1)
        ),
        PARAMS,
    )
    ours, _ = stepped(
        adamw(1e-2, weight_decay=0.1, max_norm=norm / 8, moments="float32"), PARAMS
    )
    for a, b in zip(jax.tree.leaves(exact), jax.tree.leaves(ours), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    broken = {
        **GRADS,
        "embed": {"table": GRADS["embed"]["table"].at[0, 0].set(jnp.nan)},
    }
    after, state = stepped(clipping, STORED, 1, grads=broken)
    assert same_bits(after, STORED) and int(state.skipped) == 1


@pytest.mark.slow_except("8bit")
@pytest.mark.parametrize("moments", ["8bit", "float32"])
def test_eps_root_is_added_under_the_root(moments):
    options = dict(eps_root=4.0, weight_decay=0.0)
    floats = optim.dequantize(STORED)
    exact, _ = stepped(optax.adamw(0.5, **options), floats, 1)
    ours = optim.dequantize(
        stepped(adamw(0.5, moments=moments, **options), STORED, 1)[0]
    )
    assert distance(exact, ours, floats, "up", "kernel") < 0.1


def test_learning_rate_zero_changes_no_value():
    after, state = stepped(adamw(0.0, weight_decay=0.1), STORED)
    assert same_bits(optim.dequantize(after), optim.dequantize(STORED))
    assert m_of(state).any() and int(state.count) == 4


def qualities(rate, params, steps=4, **options):
    """The effect of the last of some steps on each stored weight."""
    tx = adamw(rate, **options)
    exact = adamw(rate, moments="float32", **options)
    before, state = stepped(tx, params, steps - 1)

    @jax.jit
    def last(params, state):
        updates, _ = tx.update(GRADS, state, params)
        wanted = monitor.float_updates(exact, GRADS, state, params)
        after = optim.apply_updates(params, updates)
        return monitor.update_quality(params, after, wanted)

    return last(before, state)


@pytest.mark.slow
def test_quality_shows_the_updates_that_rounding_loses():
    for found in qualities(1e-2, STORED).values():
        assert float(found.moved) > 0.95 and abs(float(found.edq) - 1) < 0.02
    # Far below the grid: rounding to nearest moves next to nothing, stochastic rounding
    # keeps the mean of the few.
    dropped = optim.store(PARAMS, "tcfp12_single", remainder="dropped")
    for found in qualities(1e-8, dropped, 2, weight_decay=0.0).values():
        assert float(found.edq) < 0.05
    found = qualities(1e-6, STORED, 2, weight_decay=0.0)["up/kernel"]
    assert 0.001 < float(found.moved) < 0.5 and abs(float(found.edq) - 1) < 0.5
    for found in qualities(0.0, STORED, 2).values():
        assert (float(found.moved), float(found.edq)) == (0.0, 0.0)


@pytest.mark.slow_except("8bit-0.2-300", "8bit-3.0-1", "8bit-3.0-4", "float32-3.0-1")
@pytest.mark.parametrize(
    "growth, steps", [(2.0, 300), (5.0, 300), (0.2, 300), (3.0, 1), (3.0, 4)]
)
@pytest.mark.parametrize("moments", ["8bit", "float32"])
def test_scales_follow_weights_that_grow(growth, steps, moments):
    stored = {"kernel": STORED["up"]["kernel"]}
    least, after = _grown(moments)(
        stored, jnp.float32(1 - growth ** (1 / steps)), steps
    )
    assert least > 55
    a, b = (
        np.linalg.norm(optim.dequantize(tree)["kernel"]) for tree in (stored, after)
    )
    assert abs(b / a / growth - 1) < 2e-3
    weight = after["kernel"]
    assert 0.02 < float(weight.state.amax / weight.rows.scale) / 448 <= 1
    assert float(weight.state.rounding[2] - stored["kernel"].state.rounding[2]) == steps


@functools.cache
def _grown(moments):
    """Return a program that takes steps of decay alone and returns the least SNR of any
    step, and the weight.
    """

    @jax.jit
    def run(params, decay, steps):
        # a larger rate would ask for larger scales
        tx = adamw(1e-3, weight_decay=1e3 * decay, moments=moments)

        def one(_, carry):
            params, state, least = carry
            updates, state = tx.update({"kernel": jnp.zeros((64, 128))}, state, params)
            new = optim.apply_updates(params, updates)
            wanted = optim.dequantize(params)["kernel"] * (1 - decay)
            lost = jnp.sum((wanted - optim.dequantize(new)["kernel"]) ** 2)
            return (
                new,
                state,
                jnp.minimum(least, 10 * jnp.log10(jnp.sum(wanted**2) / lost)),
            )

        params, _, least = jax.lax.fori_loop(
            0, steps, one, (params, tx.init(params), jnp.float32(jnp.inf))
        )
        return least, params

    return run


def test_bytes_a_weight():
    params = {**STORED, **optim.store(STACK, "tcfp12_single", key=KEY)}
    state = adamw(1e-2).init(params)
    for path in ("up", "layers"):
        weight = params[path]["kernel"]
        trees = state.mu, state.nu, state.mu_scale, state.nu_scale
        parts = weight, [tree[path]["kernel"] for tree in trees]
        sizes = {
            jax.tree_util.keystr(place): leaf.nbytes
            for place, leaf in jax.tree_util.tree_flatten_with_path(parts)[0]
        }
        assert sum(sizes.values()) / np.prod(weight.shape) <= 4.1, sizes
    assert all(leaf.dtype != jnp.float64 for leaf in jax.tree.leaves(state))


@jax.jit
def _mesh_program(params, grads):
    tx = adamw(1e-2, weight_decay=0.1)
    return steps(tx, 20, params, tx.init(params), grads)


@pytest.mark.slow_except("P('a', 'b')")
@pytest.mark.parametrize("spec", [P("a", "b"), P(None, ("a", "b"))], ids=str)
@pytest.mark.optimized
def test_bits_are_the_same_on_every_mesh(spec):
    params = {"stored": STORED["up"], "plain": PARAMS["up"]}
    grads = {"stored": GRADS["up"], "plain": GRADS["up"]}
    alone = _mesh_program(params, grads)
    mesh = mesh_of(2, 2)
    place = lambda leaf, dims: jax.device_put(
        leaf, NamedSharding(mesh, spec if leaf.ndim == dims else P())
    )
    split = jax.tree.map(lambda leaf: place(leaf, 2), (params, grads))
    assert same_bits(alone, _mesh_program(*split))


def test_a_run_resumes_bit_for_bit(tmp_path):
    tx = adamw(optax.linear_schedule(1e-2, 0, 9))
    step = jax.jit(
        lambda params, state: (lambda u, s: (optim.apply_updates(params, u), s))(
            *tx.update(GRADS, state, params)
        ),
        donate_argnums=(0, 1),
    )
    run = jax.tree.map(jnp.copy, STORED), tx.init(STORED)
    run = step(*step(*run))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "run", run)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "run", jax.eval_shape(lambda: run))
    assert same_bits(run, restored)
    assert same_bits(step(*step(*run)), step(*step(*restored)))
    tx.init(STORED)  # the key of the donated state was its own


WRAPPED = {
    "injected": lambda tx: optax.inject_hyperparams(
        tx, static_args=("key", "mask"), hyperparam_dtype=jnp.float32
    )(learning_rate=optax.linear_schedule(1e-2, 0, 9), key=KEY),
    "masked": lambda tx: optax.masked(
        tx(1e-2, key=KEY), {"up": True, "small": True, "embed": False}
    ),
    "partition": lambda tx: optax.partition(
        {"a": tx(1e-2, key=KEY), "b": optax.sgd(0.1)},
        {"up": "a", "small": "a", "embed": "b"},
    ),
    "chain": lambda tx: optax.chain(
        optax.scale(2.0), tx(optax.linear_schedule(1e-2, 0, 9), key=KEY)
    ),
}


@pytest.mark.slow_except("injected")
@pytest.mark.parametrize("name", WRAPPED)
def test_inside_of_optax(name):
    after, _ = stepped(WRAPPED[name](optim.adamw), STORED)
    floats = optim.dequantize(STORED)
    exact, _ = stepped(WRAPPED[name](_optax_adamw), floats)
    assert distance(exact, optim.dequantize(after), floats, "up", "kernel") < 0.05


def _optax_adamw(learning_rate, mask=None, key=None):
    return optax.adamw(learning_rate, mask=mask)


@pytest.mark.slow  # quicker tests have its steps beside those of optax
def test_training_converges_as_with_floats():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((256, 64)), jnp.float32)
    teacher = jnp.asarray(rng.standard_normal((64, 16)) / 8, jnp.float32)
    y = jnp.tanh(x @ teacher)
    params = {
        "up": {"kernel": PARAMS["up"]["kernel"]},
        "down": {"kernel": PARAMS["up"]["kernel"].T[:, :32] / 4},
    }

    def loss(params, x, y):
        hidden = jnp.tanh(
            tcfp_jax.matmul(x, params["up"]["kernel"], recipe="tcfp12_single")
        )
        out = tcfp_jax.matmul(hidden, params["down"]["kernel"], recipe="tcfp12_single")
        return jnp.mean((out[:, :16] - y) ** 2)

    def trained(tx, params, gradient):
        @jax.jit
        def run(params):
            def one(carry, _):
                params, state = carry
                value, grads = gradient(loss)(params, x, y)
                updates, state = tx.update(grads, state, params)
                return (optim.apply_updates(params, updates), state), value

            return jax.lax.scan(one, (params, tx.init(params)), length=150)[1]

        return np.asarray(run(params))

    rate = optax.cosine_decay_schedule(3e-3, 150)
    exact = trained(optax.adamw(rate), params, jax.value_and_grad)
    stored = jax.jit(lambda params: optim.store(params, "tcfp12_single", key=KEY))(
        params
    )
    ours = trained(optim.adamw(rate, key=KEY), stored, tcfp_jax.value_and_grad)
    assert ours[-1] < 0.1 * ours[0] and abs(ours[-1] / exact[-1] - 1) < 0.1


def test_mistakes():
    with pytest.raises(ValueError, match=r"moments='4bit' is unknown"):
        optim.adamw(0.1, moments="4bit")
    with pytest.raises(ValueError, match=r"moments='8bit' rounds.*key=jax.random.key"):
        optim.adamw(0.1)
    with pytest.raises(
        ValueError,
        match=r"key is a int, not one JAX random key; use jax.random.key\(seed\)",
    ):
        optim.adamw(0.1, key=0)
    with pytest.raises(
        ValueError, match=r"moments='float32' rounds nothing.*drop the key"
    ):
        optim.adamw(0.1, moments="float32", key=KEY)
    tx = adamw(0.1)
    state = tx.init(STORED)
    with pytest.raises(ValueError, match=r"tx.update\(grads, opt_state, params\)"):
        tx.update(GRADS, state)
    with pytest.raises(
        ValueError,
        match=r"gradient of up/kernel is \[128, 64\].*parameter is \[64, 128\]",
    ):
        tx.update(
            {**GRADS, "up": {**GRADS["up"], "kernel": GRADS["up"]["kernel"].T}},
            state,
            STORED,
        )
    with pytest.raises(
        ValueError, match=r"gradient of small/kernel is a stored weight.*value_and_grad"
    ):
        tx.update({**GRADS, "small": STORED["small"]}, state, STORED)
    with pytest.raises(ValueError, match=r"mask must be a tree of bools"):
        adamw(0.1, mask={"up": True}).init(STORED)
    copy = {"up": {"kernel": STORED["up"]["kernel"].stored}}
    with pytest.raises(TypeError, match=r"cannot be trained.*tcfp_jax.store"):
        adamw(0.1).init(copy)


@pytest.mark.parametrize("recipe", ["tcfp12_single", "blockwise"])
def test_equal_layers_of_a_stack_are_rounded_by_bits_of_their_own(recipe):
    """By one pass over a stack, and by XLA where scales are of blocks."""
    if recipe == "blockwise":
        recipe = tcfp_jax.recipe(
            "tcfp12_single",
            scaling=Block(32, "square"),
            **dict.fromkeys(PRODUCTS, "full"),
        )
    twice = lambda tree: jax.tree.map(lambda leaf: jnp.stack([leaf[0], leaf[0]]), tree)
    params, grads = store_at_once(twice(STACK), recipe, key=KEY), twice(STACK_GRADS)
    params, state = stepped(adamw(1e-3), params, 1, grads)
    mu, values = state.mu["layers"]["kernel"], params["layers"]["kernel"].rows
    for pair in (
        mu.view(jnp.uint8),
        state.nu["layers"]["kernel"],
        values.lo.view(jnp.uint8),
    ):
        assert 0.02 < float((pair[0] != pair[1]).mean()) < 0.9


def test_equal_weights_are_rounded_by_bits_of_their_own():
    """By one pass over a stored weight, and by XLA over a float one."""
    twice = lambda tree: {name: tree["up"]["kernel"] for name in ("a", "b")}
    for params in (twice(STORED), twice(PARAMS)):
        _, state = stepped(adamw(1e-3), params, 1, twice(GRADS))
        for moments in (state.mu, state.nu):
            first, second = (moments[name].view(jnp.uint8) for name in ("a", "b"))
            assert 0.02 < float((first != second).mean()) < 0.9


def test_both_moments_of_a_weight_are_rounded_by_bits_of_their_own():
    params = {"kernel": jnp.ones((64, 128))}
    tx = adamw(1e-3, b1=0.9, b2=0.9, moments="bfloat16")
    # m = v = 0.1, between two numbers
    _, state = tx.update(params, tx.init(params), params)
    of_m, of_v = (
        np.asarray(moment["kernel"], np.float32) for moment in (state.mu, state.nu)
    )
    assert len(np.unique(of_m)) == 2 and np.array_equal(
        np.unique(of_m), np.unique(of_v)
    )
    assert 0.1 < np.mean(of_m != of_v) < 0.9


def test_a_mask_leaves_stored_weights_undecayed():
    """With a gradient of zeros, a step does nothing but decay."""
    grads = jax.tree.map(jnp.zeros_like, GRADS)
    masks = {
        "all": None,
        "small": lambda params: jax.tree.map(lambda leaf: leaf.size < 4096, params),
    }
    sizes = {}
    for name, mask in masks.items():
        params, _ = stepped(adamw(0.1, weight_decay=1.0, mask=mask), STORED, 1, grads)
        ratio = lambda leaf: float(jnp.linalg.norm(leaf) / jnp.linalg.norm(before))
        for path in ("up", "small"):
            before = optim.dequantize(STORED)[path]["kernel"]
            sizes[name, path] = ratio(optim.dequantize(params)[path]["kernel"])
    assert sizes == pytest.approx(
        {
            ("all", "up"): 0.9,
            ("all", "small"): 0.9,
            ("small", "up"): 1,
            ("small", "small"): 0.9,
        },
        abs=0.01,
    )
