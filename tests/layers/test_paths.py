"""Paths: one name for a leaf, boxed or not, in every tree that holds it."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from tcfp_jax import paths
from tests.helpers import refused


class Model(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([nnx.Linear(2, 2, rngs=rngs)])


def test_a_leaf_has_one_name_in_a_dict_a_box_and_a_state():
    plain = {"blocks": {"0": {"bias": jnp.zeros(2), "kernel": jnp.zeros((2, 2))}}}
    boxed = jax.tree.map(lambda leaf: nn.Partitioned(leaf, (None,) * leaf.ndim), plain)
    state = nnx.state(nnx.eval_shape(lambda: Model(nnx.Rngs(0))), nnx.Param)
    names = ["blocks/0/bias", "blocks/0/kernel"]
    assert all(
        sorted(paths.leaves(tree)) == names
        for tree in (plain, boxed, state, nnx.as_pure(state))
    )
    assert sorted(paths.leaves([{"value": 1}])) == ["0/value"]  # a name, not a box


def test_entries_keep_a_stored_weight_whole():
    tree = {"up": {"kernel": (1, 2)}, "scale": None, "empty": {}}
    assert paths.entries(tree) == {"up/kernel": (1, 2), "scale": None}
    assert paths.find(tree, ["up", "kernel"]) == (1, 2)
    assert paths.find(tree, ["up", "bias"]) is None
    with refused("bare array"):
        paths.put({}, [], 1)
    with refused("has no name", TypeError):
        paths.path_names([object()])
