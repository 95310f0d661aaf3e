"""The fused step of a stored weight: updates larger than the weight itself, as the step
by XLA takes them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tcfp_jax import optim

KEY = jax.random.key(5)
SIGNS = jnp.where(jax.random.bernoulli(KEY, 0.5, (32, 128)), 1.0, -1.0)


def trained(start, moments, steps, **options):
    """The weight after some steps; with 8-bit moments the kernel's arithmetic,
    otherwise XLA's.
    """
    params = optim.store({"kernel": start}, "tcfp12_single", remainder="dropped")
    tx = optim.adamw(
        moments=moments, key=None if moments == "float32" else KEY, **options
    )
    state = tx.init(params)
    for i in range(steps):
        grads = {"kernel": jnp.broadcast_to(SIGNS * jnp.float32(0.5**i), start.shape)}
        updates, state = tx.update(grads, state, params)
        params = optim.apply_updates(params, updates)
    return np.asarray(optim.dequantize(params)["kernel"], np.float64)


@pytest.mark.parametrize(
    ("value", "steps", "options"),
    [
        (1e-4, 1, dict(learning_rate=1e-2)),
        (1e-4, 1, dict(learning_rate=1.0, nesterov=True, b1=0.5)),
        (0.0, 2, dict(learning_rate=0.5)),
        (1e-3, 1, dict(learning_rate=10.0, weight_decay=50.0)),
        (
            1e-4,
            2,
            dict(
                learning_rate=lambda count: jnp.where(count == 0, 1e-7, 30.0),
                b1=0.9,
                b2=0.81,
            ),
        ),
    ],
    ids=["rate", "nesterov", "zeros", "decay", "jump"],
)
@pytest.mark.parametrize(
    "stack", [(), pytest.param((2,), marks=pytest.mark.slow)], ids=["matrix", "stack"]
)
def test_an_update_larger_than_the_scale_of_the_weight_allows_is_not_clipped(
    value, steps, options, stack
):
    start = jnp.full((*stack, 32, 128), value, jnp.float32)
    ours, exact = (
        trained(start, moments, steps, **options) for moments in ("8bit", "float32")
    )
    largest = np.max(np.abs(exact))
    assert largest > 20 * value
    # Half a step of E4M3's residual, and the moments' three bits of mantissa after the
    # first step.
    assert np.max(np.abs(ours - exact)) <= largest * (
        2.0**-7 if steps == 1 else 2.0**-3
    )


def test_a_weight_without_updates_keeps_its_values_under_a_large_learning_rate():
    """Its scale covers updates that may come, and still holds values far below them."""
    start = jax.random.normal(KEY, (32, 128)) * 1e-4
    params = optim.store({"kernel": start}, "tcfp12_single", remainder="dropped")
    tx = optim.adamw(0.01, weight_decay=0.0, key=KEY)
    updates, _ = tx.update({"kernel": jnp.zeros((32, 128))}, tx.init(params), params)
    after = optim.dequantize(optim.apply_updates(params, updates))["kernel"]
    assert float(jnp.linalg.norm(after - start)) < 2.0**-8 * float(
        jnp.linalg.norm(start)
    )


@pytest.mark.parametrize("stored", [True, False], ids=["stored", "float"])
def test_every_step_rounds_moments_by_bits_of_its_own(stored):
    params = {"kernel": jnp.ones((32, 128))}
    params = optim.store(params, "tcfp12_single", key=KEY) if stored else params
    tx = optim.adamw(1e-3, key=KEY)
    state, grads = tx.init(params), {"kernel": jax.random.normal(KEY, (32, 128))}
    first, later = (
        tx.update(grads, state._replace(count=jnp.int32(count)), params)[1]
        for count in (0, 5)
    )
    for name in ("mu", "nu"):
        a, b = (
            np.asarray(getattr(state, name)["kernel"], np.float32)
            for state in (first, later)
        )
        assert 0.1 < np.mean(a != b) < 0.9
