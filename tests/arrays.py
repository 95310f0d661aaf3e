"""Parameters without XLA: shapes are traced and numpy fills them, so that a test compiles what it is about."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


def filled(tree, seed=0):
    """Arrays in the place of shapes: normal values, as large as an initializer would make them."""
    rng = np.random.default_rng(seed)

    def fill(leaf):
        fan_in = leaf.shape[-2] if len(leaf.shape) > 1 else 1
        return jnp.asarray((rng.standard_normal(leaf.shape) / np.sqrt(fan_in)).astype(leaf.dtype))

    return jax.tree.map(fill, tree)


def variables_of(model, *inputs, seed=0):
    """Variables of a Linen model, of its own names and shapes."""
    return filled(jax.eval_shape(model.init, jax.random.key(0), *inputs), seed)


def nnx_model(make, seed=0):
    """`make(rngs)`, an NNX model, with numpy's values."""
    graphdef, params, rest = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))), nnx.Param, ...)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), rest)
    return nnx.merge(graphdef, filled(params, seed), zeros)


def same(a, b):
    """Whether two trees hold the same bits."""
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )
