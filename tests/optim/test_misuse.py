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
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tcfp_jax
from pallas_kernels.operands import Block
from tcfp_jax import optim
from tcfp_jax.optim.suited import suited
from tests.helpers import mesh_of, same_bits, store_at_once

pytestmark = pytest.mark.usefixtures("standard_promotion")
KEY = jax.random.key(7)
RNG = np.random.default_rng(0)
BLOCKS = tcfp_jax.recipe("tcfp12_single", scaling=Block(32, "square"))
BOTH = tcfp_jax.recipe("tcfp12_single", copies="both")
# A kernel with a sample of its codes, one that is compared whole, and a stack.
SHAPES = {"sampled": (64, 64), "small": (16, 32), "stack": (2, 64, 64)}


def floats(shape, seed=0):
    return {
        "kernel": jnp.asarray(
            np.random.default_rng(seed).standard_normal(shape), jnp.float32
        )
    }


@functools.cache
def stored(shape=(64, 64), seed=0, recipe="tcfp12_single", remainder="stochastic"):
    key = jax.random.fold_in(KEY, seed) if remainder == "stochastic" else None
    return store_at_once(floats(shape, seed), recipe, key=key, remainder=remainder)


def kernel(params):
    return tcfp_jax.dequantize(params)["kernel"]


ARITHMETIC = {
    "incremental_update": lambda old, new: optax.incremental_update(new, old, 0.01),
    "mean": lambda old, new: jax.tree.map(lambda a, b: (a + b) / 2, old, new),
    "factor": lambda old, new: jax.tree.map(lambda x: x * 0.5, old),
    "sign": lambda old, new: jax.tree.map(jnp.negative, old),
    "clip": lambda old, new: jax.tree.map(lambda x: jnp.clip(x, -1, 1), old),
    "cast": lambda old, new: jax.tree.map(lambda x: x.astype(jnp.bfloat16), old),
}


@pytest.mark.slow_except(
    "incremental_update-sampled",
    "mean-sampled",
    "factor-small",
    "clip-stack",
    "cast-sampled",
)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic_on_codes_raises_or_is_nan(name, shape):
    old, new = (stored(SHAPES[shape], seed) for seed in (0, 1))
    changed = ARITHMETIC[name](old, new)
    with pytest.raises(
        ValueError, match=r"not numbers to average.*tcfp_jax.optim.incremental_update"
    ):
        tcfp_jax.dequantize(changed)
    if name == "cast":  # a dtype is known while a program is traced
        with pytest.raises(
            ValueError, match="bfloat16 where float8_e4m3fn was written"
        ):
            jax.jit(tcfp_jax.dequantize)(changed)
    else:
        assert np.isnan(jax.jit(kernel)(changed)).all()


def of_codes(change):
    """The change of the codes alone, in their dtype."""
    return lambda old: jax.tree.map(
        lambda x: change(x) if x.dtype.itemsize == 1 else x, old
    )


# (change, if a kernel that is compared by its largest value shows it)
SMALL = {
    "half": (lambda old: jax.tree.map(lambda x: x * 0.5, old), True),
    "signs": (lambda old: jax.tree.map(lambda x: -x, old), True),
    "half of the codes": (
        of_codes(lambda x: (x.astype(jnp.float32) / 2).astype(x.dtype)),
        True,
    ),
    "codes below 1": (of_codes(lambda x: jnp.clip(x, -1, 1)), True),
    "signs of the codes": (of_codes(lambda x: -x), False),
    "other places": (of_codes(lambda x: x[::-1]), False),
}


@pytest.mark.parametrize("remainder", ["stochastic", "dropped"])
@pytest.mark.parametrize("name", SMALL)
def test_small_kernels_show_changes_of_their_largest_value_alone(name, remainder):
    """The page of stored weights names the others, which a sample shows."""
    change, shown = SMALL[name]
    for shape, raises in ((SHAPES["small"], shown), (SHAPES["sampled"], True)):
        changed = change(stored(shape, remainder=remainder))
        if raises:
            with pytest.raises(
                ValueError, match="other codes than its last rounding wrote"
            ):
                kernel(changed)
        else:
            assert np.isfinite(kernel(changed)).all()


@pytest.mark.parametrize("remainder", ["stochastic", "dropped", "feedback"])
def test_an_average_of_small_kernels_goes_few_steps_before_it_shows(remainder):
    old, new = (stored(SHAPES["small"], seed, remainder=remainder) for seed in (0, 1))

    def averaged(old):
        for _ in range(30):
            old = optax.incremental_update(new, old, 0.01)
            kernel(old)

    with pytest.raises(ValueError, match="other codes than its last rounding wrote"):
        averaged(old)


X = jnp.asarray(RNG.standard_normal((4, 64)), jnp.float32)
SQUARE = lambda params: jnp.sum(
    tcfp_jax.matmul(X, params["kernel"], recipe="tcfp12_single") ** 2
)
ADAMW = optim.adamw(1e-2, key=KEY)
USES = {
    "product": SQUARE,
    "gradient": tcfp_jax.grad(SQUARE),
    "apply_updates": lambda params: kernel(
        tcfp_jax.apply_updates(params, floats((64, 64), 3))
    ),
    "read": lambda params: params["kernel"].dequantize(),
    "adamw": lambda params: (
        ADAMW.update(floats((64, 64), 3), ADAMW.init(params), params)[0]["kernel"]
        .onto(params["kernel"])
        .dequantize()
    ),
}


@pytest.mark.parametrize("name", USES)
def test_every_use_of_changed_codes_says_so(name):
    params = stored()
    half = jax.tree.map(lambda x: x * 0.5, params)
    assert all(
        np.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.jit(USES[name])(params))
    )
    with pytest.raises(ValueError, match="other codes than its last rounding wrote"):
        USES[name](half)
    assert all(
        np.isnan(leaf).any() for leaf in jax.tree.leaves(jax.jit(USES[name])(half))
    )


@pytest.mark.slow_except("both orientations-feedback")
@pytest.mark.parametrize("remainder", ["stochastic", "feedback"])
@pytest.mark.parametrize(
    "recipe",
    ["tcfp12_single", BLOCKS, BOTH],
    ids=["one scale", "blocks", "both orientations"],
)
def test_codes_that_were_written_are_never_taken_for_changed_ones(recipe, remainder):
    reads = (kernel, lambda params: params["kernel"].swap().dequantize())
    for shape in SHAPES.values():
        params = stored(shape, recipe=recipe, remainder=remainder)
        for scale in (1.0, 1e-20, 1e30):
            change = jax.tree.map(lambda x, scale=scale: scale * x, floats(shape, 5))
            params = jax.jit(tcfp_jax.apply_updates)(params, change)
            for read in reads:
                assert (
                    np.isfinite(read(params)).all()
                    and np.isfinite(jax.jit(read)(params)).all()
                )


@pytest.mark.parametrize(
    "kind",
    [pytest.param(AxisType.Auto, marks=pytest.mark.slow), AxisType.Explicit],
    ids=str,
)
def test_a_mesh_changes_nothing_of_it(kind):
    mesh = mesh_of(2, 2, axis_type=kind)
    with jax.set_mesh(mesh):
        put = lambda leaf: jax.device_put(leaf, NamedSharding(mesh, P(None, "a", "b")))
        params = jax.jit(lambda p: tcfp_jax.store(p, "tcfp12_single", key=KEY))(
            jax.tree.map(put, floats((2, 64, 64)))
        )
        assert (
            same_bits(kernel(params), jax.jit(kernel)(params))
            and np.isfinite(kernel(params)).all()
        )
        half = jax.tree.map(lambda x: x * 0.5, params)
        assert np.isnan(jax.jit(kernel)(half)).all()
        text = (
            jax.jit(lambda p: p["kernel"].read().backward.scale)
            .lower(params)
            .compile()
            .as_text()
        )
        assert "all-gather" not in text


def test_averages_of_stored_weights_follow_those_of_floats():
    old, new = stored(seed=0), stored(seed=1)
    average = jax.jit(lambda average: optim.incremental_update(new, average, 0.01))
    found = old
    for _ in range(100):
        found = average(found)
    wanted = 0.99**100 * kernel(old) + (1 - 0.99**100) * kernel(new)
    assert np.linalg.norm(kernel(found) - wanted) < 0.01 * np.linalg.norm(wanted)


LEAVES = {
    "all": lambda params: jax.tree.leaves(params),
    "codes": lambda params: [params["kernel"].rows.values],
    "residual": lambda params: [params["kernel"].rows.lo],
    "scale": lambda params: [params["kernel"].rows.scale],
    "in a scan": lambda params: [
        jax.lax.scan(
            lambda c, x: (c + jnp.sum(x.astype(jnp.float32)), None),
            0.0,
            params["kernel"].rows.values,
        )[0]
    ],
}


@pytest.mark.parametrize("name", LEAVES)
def test_a_loss_over_leaves_raises_while_it_is_traced(name):
    params = stored()
    loss = lambda params: sum(
        jnp.sum(leaf.astype(jnp.float32) ** 2) for leaf in LEAVES[name](params)
    )
    for run in (
        tcfp_jax.value_and_grad(loss),
        jax.jit(tcfp_jax.grad(loss)),
        lambda p: jax.eval_shape(tcfp_jax.grad(loss), p),
    ):
        with pytest.raises(
            TypeError,
            match=(
                r"FP8 codes and"
                r" scales.*jax.tree.leaves\(tcfp_jax.dequantize\(params\)\)"
            ),
        ):
            run(params)


def test_a_loss_over_floats_and_reads_without_a_gradient_are_right():
    params = stored()
    square = lambda params: sum(
        jnp.sum(leaf**2) for leaf in jax.tree.leaves(tcfp_jax.dequantize(params))
    )
    np.testing.assert_allclose(
        tcfp_jax.grad(square)(params)["kernel"], 2 * kernel(params), rtol=1e-6
    )
    both = lambda params: (
        SQUARE(params) + jax.lax.stop_gradient(jnp.sum(params["kernel"].state.amax))
    )
    assert same_bits(tcfp_jax.grad(both)(params), tcfp_jax.grad(SQUARE)(params))


AFTER = {
    "clip": (optax.clip(1.0), "raises"),
    "centralize": (optax.centralize(), "raises"),
    "scale": (optax.scale(0.5), "raises"),
    "scale_by_sign": (optax.scale_by_sign(), "nan"),
    "schedule": (optax.scale_by_schedule(lambda count: 0.5), "nan"),
}


@pytest.mark.slow_except("centralize", "scale", "scale_by_sign", "schedule")
@pytest.mark.parametrize("name", AFTER)
def test_a_transformation_after_adamw_is_never_silent(name):
    after, traced = AFTER[name]
    params, grads = stored((32, 128)), floats((32, 128), 3)
    tx = optax.chain(ADAMW, after)

    def step(params, state):
        updates, state = tx.update(grads, state, params)
        return tcfp_jax.apply_updates(params, updates)

    message = (
        r"changed after tcfp_jax.optim.adamw.*put that part before adamw, or use"
        r" tcfp_jax.optim.on_stored"
    )
    with pytest.raises(ValueError, match=message):
        step(params, tx.init(params))
    if traced == "raises":
        with pytest.raises(ValueError, match=message):
            jax.jit(step)(params, tx.init(params))
    else:
        assert np.isnan(kernel(jax.jit(step)(params, tx.init(params)))).all()


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


@pytest.mark.parametrize("name", REFUSED)
def test_a_transformation_that_cannot_stand_after_adamw_is_loud_and_has_its_place_in_on_stored(
    name,
):
    params, grads = stored((32, 128)), floats((32, 128), 3)

    def step(tx):
        more = {"value": 1.0} if name == "reduce_on_plateau" else {}
        return tcfp_jax.apply_updates(
            params, tx.update(grads, tx.init(params), params, **more)[0]
        )

    for run in (step, lambda tx: jax.jit(lambda: step(tx))()):
        with pytest.raises((ValueError, TypeError), match=r"dtype|Rewritten"):
            run(optax.chain(ADAMW, REFUSED[name]))
    after = kernel(step(optim.on_stored(optax.chain(optax.adamw(1e-2), REFUSED[name]))))
    assert np.isfinite(after).all() and not same_bits(after, kernel(params))


MISTAKES = {  # what reads the arrays of weights, or a state of another optimizer
    "labels": (
        lambda p: optax.multi_transform(
            {True: ADAMW}, jax.tree.map(lambda x: x.ndim > 1, p)
        ).init(p),
        "labels",
    ),
    "mask": (
        lambda p: optim.adamw(
            1e-2, key=KEY, mask=jax.tree.map(lambda x: x.ndim > 1, p)
        ).init(p),
        "values for 1",
    ),
    "state": (
        lambda p: ADAMW.update(p, optim.on_stored(optax.sgd(0.1)).init(p), p),
        "not adamw's",
    ),
    "moments": (
        lambda p: ADAMW.update(
            floats((64, 64)), optim.adamw(1e-2, moments="float32").init(p), p
        ),
        "a moment of",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_optax_on_the_arrays_of_weights_and_states_of_others_are_named(name):
    call, message = MISTAKES[name]
    with pytest.raises((ValueError, TypeError), match=message):
        call(stored())


@pytest.mark.parametrize(
    "remainder, restored", [("stochastic", "feedback"), ("feedback", "stochastic")]
)
def test_a_checkpoint_of_another_remainder_is_named(remainder, restored):
    into, of = (stored(remainder=name)["kernel"] for name in (restored, remainder))
    arrays = dataclasses.replace(
        into.state, rounding=of.state.rounding, error=of.state.error
    )
    with pytest.raises(ValueError, match="arrays of another: restore"):
        ADAMW.update(
            floats((64, 64)),
            ADAMW.init(stored()),
            {"kernel": dataclasses.replace(into, state=arrays)},
        )


def test_the_moments_of_any_optimizer_may_be_narrow():
    tx = suited(optim.low_precision_moments(optax.lion(1e-3), key=KEY), stored(), dict)
    updates, _ = tx.update(floats((64, 64), 3), tx.init(stored()), stored())
    assert not same_bits(
        kernel(tcfp_jax.apply_updates(stored(), updates)), kernel(stored())
    )
    tx = optax.sgd(0.1)
    assert suited(tx, {"bias": jnp.ones(4)}, lambda: {"up/kernel": None}).init(
        {"bias": jnp.ones(4)}
    ) == tx.init({})


@pytest.mark.slow_except(f"one pass-{2.0**63}", "by XLA--3e+38")
@pytest.mark.parametrize("size", [2.0**63, -3e38])
@pytest.mark.parametrize("shape", [(32, 128), (16, 32)], ids=["one pass", "by XLA"])
def test_a_gradient_whose_square_overflows_changes_nothing_and_is_counted(shape, size):
    params, grads = stored(shape), floats(shape, 3)
    large = {"kernel": grads["kernel"].at[1, 2].set(size)}
    for tx in (
        ADAMW,
        optim.on_stored(optax.adamw(1e-2)),
        optim.on_stored(optim.low_precision_moments(optax.adam(1e-2), key=KEY)),
    ):
        state = tx.init(params)
        updates, after = jax.jit(tx.update)(large, state, params)
        assert (
            same_bits(tcfp_jax.apply_updates(params, updates), params)
            and int(after.skipped) == 1
        )
        # The largest one whose square is a number moves the weight as any other does.
        updates, after = jax.jit(tx.update)(
            {"kernel": grads["kernel"].at[1, 2].set(0.999 * 2.0**63)}, state, params
        )
        assert (
            np.isfinite(kernel(tcfp_jax.apply_updates(params, updates))).all()
            and int(after.skipped) == 0
        )
