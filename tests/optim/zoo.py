"""Parameters and transformations of optax that the tests of optimizers share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib

import tcfp_jax
from tests.helpers import drawn, filled, shapes_of, step_of

RECIPE = "tcfp12_single"
KEY = jax.random.key(3)
X = drawn(2, 6, 16)
KERNEL = 0.1 * drawn(16, 32, seed=1)
# Two layers that are stored and differentiated.
TWO_LAYERS = {
    "up": {"kernel": KERNEL, "bias": jnp.zeros(32)},
    "down": {"kernel": 0.1 * drawn(32, 16, seed=2)},
}
# A kernel whose moments are narrow, and leaves whose moments stay float32.
SHAPES = {
    "up": {"kernel": (64, 128), "bias": (128,)},
    "small": {"kernel": (32, 32)},
    "embed": {"table": (64, 128)},
}
PARAMS = filled(shapes_of(SHAPES))
GRADS = filled(PARAMS, seed=1)


def stored_of(params=TWO_LAYERS, recipe=RECIPE, remainder="stochastic", **options):
    key = KEY if remainder == "stochastic" else None
    return tcfp_jax.store(params, recipe, key=key, remainder=remainder, **options)


def kernel_of(params):
    return tcfp_jax.dequantize(params)["kernel"]


def loss(params, x, recipe=RECIPE):
    matmul = functools.partial(tcfp_jax.matmul, recipe=recipe)
    h = jax.nn.relu(matmul(x, params["up"]["kernel"]) + params["up"]["bias"])
    return jnp.mean((matmul(h, params["down"]["kernel"]) - 1) ** 2)


@functools.cache
def _program(tx, n):
    step = step_of(tx)

    @jax.jit
    def run(grads, *carry):
        def one(carry, _):
            return step(grads, *carry), None

        return jax.lax.scan(one, carry, length=n)[0]

    return run


def stepped(tx, params=PARAMS, n=4, grads=GRADS, state=None):
    """(parameters, state) after n steps with the same gradients, in one program."""
    state = jax.jit(tx.init)(params) if state is None else state
    return _program(tx, n)(grads, params, state)


def distance(exact, ours, start, *path):
    """How far a leaf is from the exact one, as a part of the exact change."""

    def leaf(tree):
        for name in path:
            tree = tree[name]
        return np.asarray(tree, np.float64)

    moved = np.linalg.norm(leaf(exact) - leaf(start))
    return np.linalg.norm(leaf(exact) - leaf(ours)) / moved


def matrices(tree):
    """A mask of all matrices."""
    return jax.tree.map(lambda leaf: len(leaf.shape) > 1, tree)


def labels(tree):
    return jax.tree.map(lambda leaf: "matrix" if leaf.ndim > 1 else "vector", tree)


SCHEDULE = optax.linear_schedule(1e-2, 0, 9)
TRANSFORMATIONS = {
    "adamw": optax.adamw(1e-2),
    "momentum": optax.sgd(0.1, 0.9),
    "lion": optax.lion(1e-3),
    "factored": optax.adafactor(1e-2, min_dim_size_to_factor=8, momentum=0.9),
    "muon": contrib.muon(1e-2),
    "steps": optax.MultiSteps(optax.adamw(1e-2), 2).gradient_transformation(),
    "masked": optax.masked(optax.adam(1e-2), matrices),
    "partition": optax.partition(
        {"matrix": optax.adamw(1e-2), "vector": optax.sgd(0.1, 0.9)}, labels
    ),
    "injected": optax.inject_hyperparams(optax.adamw)(SCHEDULE),
    "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(SCHEDULE)),
}
