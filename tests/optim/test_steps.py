"""The fused step of a stored weight: updates larger than the weight itself, scales that
follow, and random bits of its own for each weight, layer, moment and step.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tcfp_jax
from pallas_kernels import counter
from pallas_kernels.operands import Block
from tcfp_jax import monitor, optim
from tcfp_jax.optim.encoding import encode
from tests.helpers import decibels, drawn, parametrize, slow, slow_except, step_of
from tests.optim.zoo import GRADS, KEY, PARAMS, RECIPE, kernel_of, stepped, stored_of

pytestmark = pytest.mark.usefixtures("standard_promotion")
SIGNS = jnp.sign(drawn(32, 128))
KERNEL = drawn(64, 128) / 8
GRADIENT = drawn(64, 128, seed=1)
ADAMW = optim.adamw(1e-3, key=KEY)


# Large steps
# --------------------------------------------------------------------------------------
def trained(start, moments, steps, **options):
    """The weight after some steps; with 8-bit moments the kernel's arithmetic,
    otherwise XLA's.
    """
    params = stored_of({"kernel": start}, remainder="dropped")
    key = None if moments == "float32" else KEY
    tx = optim.adamw(moments=moments, key=key, **options)
    state = tx.init(params)
    for i in range(steps):
        grads = {"kernel": jnp.broadcast_to(SIGNS * jnp.float32(0.5**i), start.shape)}
        params, state = step_of(tx)(grads, params, state)
    return np.asarray(kernel_of(params), np.float64)


def jump(count):
    return jnp.where(count == 0, 1e-7, 30.0)


@parametrize(
    ("value", "steps", "options"),
    [
        (1e-4, 1, dict(learning_rate=1e-2)),
        (1e-4, 1, dict(learning_rate=1.0, nesterov=True, b1=0.5)),
        (0.0, 2, dict(learning_rate=0.5)),
        (1e-3, 1, dict(learning_rate=10.0, weight_decay=50.0)),
        (1e-4, 2, dict(learning_rate=jump, b1=0.9, b2=0.81)),
        (1e-4, 1, dict(learning_rate=-1.0)),
        (1.0, 1, dict(learning_rate=0.1, weight_decay=400.0)),
        (1e-4, 1, dict(learning_rate=1.0, b1=0.9, b2=0.0)),
    ],
    ids=["rate", "nesterov", "zeros", "decay", "jump", "negative", "turned", "one g"],
)
@parametrize("stack", [(), pytest.param((2,), marks=slow)], ids=["matrix", "stack"])
def test_an_update_beyond_the_scale_of_its_weight_is_not_clipped(
    value, steps, options, stack
):
    start = jnp.full((*stack, 32, 128), value, jnp.float32)
    ours = trained(start, "8bit", steps, **options)
    exact = trained(start, "float32", steps, **options)
    largest = np.max(np.abs(exact))
    assert largest > 20 * value
    # Half a step of E4M3's residual, and the moments' three bits of mantissa after the
    # first step.
    bound = 2.0**-7 if steps == 1 else 2.0**-3
    assert np.max(np.abs(ours - exact)) <= largest * bound


def test_a_step_of_older_gradients_alone_is_not_clipped():
    """m / sqrt(v) may be 2.3 with these decays, and 0.32 by the newest gradient."""
    tx = optim.adamw(1.0, b1=0.99, b2=0.999, weight_decay=0.0, key=KEY)
    params = stored_of({"kernel": jnp.full((32, 128), 1e-4)}, remainder="dropped")
    state = tx.init(params)
    moments = {}
    for name, form, value in (("mu", "float8_e4m3fn", 1.0), ("nu", "ue5m3", 0.1901)):
        keys = counter.keys(jnp.uint32(0))
        made = encode(form, jnp.full((32, 128), value), keys)
        moments[name] = {"kernel": made.values}
        moments[f"{name}_scale"] = {"kernel": made.scale}
    state = state._replace(count=jnp.int32(100_000), **moments)
    zeros = {"kernel": jnp.zeros((32, 128))}
    after, _ = step_of(tx)(zeros, params, state)
    np.testing.assert_allclose(kernel_of(after), -0.99 / 0.1899**0.5, rtol=0.07)


def test_a_weight_without_updates_keeps_its_values():
    """Its scale covers updates that may come, and still holds values far below them."""
    start = drawn(32, 128) * 1e-4
    params = stored_of({"kernel": start}, remainder="dropped")
    tx = optim.adamw(0.01, weight_decay=0.0, key=KEY)
    zeros = {"kernel": jnp.zeros((32, 128))}
    after, _ = step_of(tx)(zeros, params, tx.init(params))
    assert decibels(start, kernel_of(after)) > 48


@functools.cache
def grown(moments):
    """A program that takes steps of decay alone and returns the least SNR of any step,
    and the weight.
    """

    @jax.jit
    def run(params, decay, steps):
        # a larger rate would ask for larger scales
        key = None if moments == "float32" else KEY
        # Weights grow by a negative rate, because a decay is not negative.
        rate = 1e-3 * jnp.sign(decay)
        decays = 1e3 * jnp.abs(decay)
        tx = optim.adamw(rate, weight_decay=decays, moments=moments, key=key)
        zeros = {"kernel": jnp.zeros_like(KERNEL)}

        def one(_, carry):
            params, state, least = carry
            after, state = step_of(tx)(zeros, params, state)
            wanted = kernel_of(params) * (1 - decay)
            lost = jnp.sum((wanted - kernel_of(after)) ** 2)
            snr = 10 * jnp.log10(jnp.sum(wanted**2) / lost)
            return after, state, jnp.minimum(least, snr)

        start = (params, tx.init(params), jnp.float32(jnp.inf))
        params, _, least = jax.lax.fori_loop(0, steps, one, start)
        return least, params

    return run


@slow_except("8bit-0.2-300", "8bit-3.0-1", "8bit-3.0-4", "float32-3.0-1")
@parametrize("growth, steps", [(2.0, 300), (5.0, 300), (0.2, 300), (3.0, 1), (3.0, 4)])
@parametrize("moments", ["8bit", "float32"])
def test_scales_follow_weights_that_grow(growth, steps, moments):
    stored = stored_of({"kernel": KERNEL})
    decay = jnp.float32(1 - growth ** (1 / steps))
    least, after = grown(moments)(stored, decay, steps)
    assert least > 55
    grew = np.linalg.norm(kernel_of(after)) / np.linalg.norm(kernel_of(stored))
    assert abs(grew / growth - 1) < 2e-3
    weight = after["kernel"]
    assert 0.02 < float(weight.state.amax / weight.rows.scale) / 448 <= 1
    roundings = weight.state.rounding[2] - stored["kernel"].state.rounding[2]
    assert float(roundings) == steps


# Random bits
# --------------------------------------------------------------------------------------
def differ(a, b):
    """Whether some of two arrays' codes differ, and not all."""
    share = float((a.view(jnp.uint8) != b.view(jnp.uint8)).mean())
    return 0.02 < share < 0.95


@parametrize("stored", [True, False], ids=["stored", "float"])
def test_equal_weights_are_rounded_by_bits_of_their_own(stored):
    """By one pass over a stored weight, and by XLA over a float one."""
    params = {"a": {"kernel": KERNEL}, "b": {"kernel": KERNEL}}
    if stored:
        params = stored_of(params)
        params["b"] = params["a"]
    grads = {name: {"kernel": GRADIENT} for name in params}
    _, state = stepped(ADAMW, params, 1, grads)
    for moments in (state.mu, state.nu):
        assert differ(moments["a"]["kernel"], moments["b"]["kernel"])


@parametrize("blocks", [False, True], ids=["one pass", "by XLA"])
def test_equal_layers_are_rounded_by_bits_of_their_own(blocks):
    options = {}
    if blocks:
        options = dict.fromkeys(("forward", "dgrad", "wgrad"), "full")
        options["scaling"] = Block(32, "square")
    stack = {"kernel": jnp.stack([KERNEL, KERNEL])}
    params = stored_of(stack, tcfp_jax.recipe(RECIPE, **options))
    grads = {"kernel": jnp.stack([GRADIENT, GRADIENT])}
    params, state = stepped(ADAMW, params, 1, grads)
    for found in (state.mu["kernel"], state.nu["kernel"], params["kernel"].rows.lo):
        assert differ(*found)


def test_both_moments_are_rounded_by_bits_of_their_own():
    params = {"kernel": jnp.ones((64, 128))}
    tx = optim.adamw(1e-3, b1=0.9, b2=0.9, moments="bfloat16", key=KEY)
    # m = v = 0.1, between two numbers
    _, state = tx.update(params, tx.init(params), params)
    m = state.mu["kernel"]
    v = state.nu["kernel"]
    assert len(jnp.unique(m)) == 2
    assert jnp.array_equal(jnp.unique(m), jnp.unique(v))
    assert 0.1 < float((m != v).mean()) < 0.9


@parametrize("stored", [True, False], ids=["stored", "float"])
def test_every_step_rounds_moments_by_bits_of_its_own(stored):
    params = {"kernel": KERNEL}
    if stored:
        params = stored_of(params)
    state = ADAMW.init(params)
    first, later = (
        ADAMW.update({"kernel": GRADIENT}, state._replace(count=count), params)[1]
        for count in (jnp.int32(0), jnp.int32(5))
    )
    assert differ(first.mu["kernel"], later.mu["kernel"])
    assert differ(first.nu["kernel"], later.nu["kernel"])


# Quality of updates
# --------------------------------------------------------------------------------------
def qualities(rate, params, steps=4, **options):
    """The effect of the last of some steps on each stored weight."""
    tx = optim.adamw(rate, key=KEY, **options)
    exact = optim.adamw(rate, moments="float32", **options)
    before, state = stepped(tx, params, steps - 1)

    @jax.jit
    def last(params, state):
        after, _ = step_of(tx)(GRADS, params, state)
        wanted = monitor.float_updates(exact, GRADS, state, params)
        return monitor.update_quality(params, after, wanted)

    return last(before, state)


@slow
def test_quality_shows_the_updates_that_rounding_loses():
    stored = stored_of(PARAMS)
    for found in qualities(1e-2, stored).values():
        assert float(found.moved) > 0.95
        assert abs(float(found.edq) - 1) < 0.02
    # Far below the grid: rounding to nearest moves next to nothing, stochastic rounding
    # keeps the mean of the few.
    dropped = stored_of(PARAMS, remainder="dropped")
    for found in qualities(1e-8, dropped, 2, weight_decay=0.0).values():
        assert float(found.edq) < 0.05
    found = qualities(1e-6, stored, 2, weight_decay=0.0)["up/kernel"]
    assert 0.001 < float(found.moved) < 0.5
    assert abs(float(found.edq) - 1) < 0.5
    for found in qualities(0.0, stored, 2).values():
        assert (float(found.moved), float(found.edq)) == (0.0, 0.0)
