"""Tokens, a head and options of `cross_entropy`, and its gradients in one program."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from tcfp_jax.losses import cross_entropy
from tests.helpers import drawn

T = 21
K = 32
V = 50
RNG = np.random.default_rng(0)
X = drawn(T, K)
W = drawn(K, V, seed=1) * 0.3
TARGETS = jnp.asarray(RNG.integers(0, V, T))
WEIGHTS = jnp.asarray(RNG.uniform(0.5, 2, T), jnp.float32)
IGNORED = TARGETS.at[2].set(-100).at[20].set(-100)
STATIC = ("recipe", "ignore", "label_smoothing", "z_loss", "soft_cap", "chunk")


@functools.partial(jax.jit, static_argnames=STATIC)
def run(x, w, targets, **options):
    """((mean, losses), (gradient of x, gradient of w))."""

    def loss(x, w):
        return cross_entropy(x, w, targets, **options)

    return jax.value_and_grad(loss, (0, 1), has_aux=True)(x, w)


def mean_of(targets=TARGETS, **options):
    """The mean alone, as a function of x and w."""
    return lambda x, w: cross_entropy(x, w, targets, **options)[0]
