"""Smoke test of an installed wheel, far from the checkout: convert a model in three
lines, and train one step.

Run it as `cd / && PYTHON -I CHECKOUT/.ci/smoke.py` with the Python of an environment
that holds the wheel and what it requires, and nothing else.
"""

import importlib.metadata
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import linen as nn

import tcfp_jax
from tcfp_jax.conversion import convert_to_tcfp, find_weights

CHECKOUT = Path(__file__).resolve().parents[1]
assert not Path(tcfp_jax.__file__).is_relative_to(CHECKOUT / "tcfp_jax"), (
    "this is the checkout's library"
)
assert tcfp_jax.__version__ == importlib.metadata.version("tcfp_jax")

x = jax.random.normal(jax.random.key(0), (8, 32))
model = convert_to_tcfp(
    nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(32)]),
    "tcfp12_single",
    x,
    include=("linear", "small"),
)
params = tcfp_jax.store(
    model.init(jax.random.key(1), x)["params"],
    find_weights(model),
    key=jax.random.key(2),
)
tx = tcfp_jax.optim.adamw(1e-2, moments="8bit", key=jax.random.key(3))


@jax.jit
def step(params, state):
    loss, gradients = tcfp_jax.value_and_grad(
        lambda p: jnp.mean((model.apply({"params": p}, x) - x) ** 2)
    )(params)
    updates, state = tx.update(gradients, state, params)
    return tcfp_jax.apply_updates(params, updates), state, loss


params, state, before = step(params, tx.init(params))
_, _, after = step(params, state)
assert after < before, f"the loss went from {before} to {after}"
assert tcfp_jax.formats.cast(x, tcfp_jax.formats.mxfp4e2).shape == x.shape
print(
    f"wheel: tcfp_jax {tcfp_jax.__version__}, jax {jax.__version__}, loss {before:.4f}"
    f" to {after:.4f} in one step"
)
