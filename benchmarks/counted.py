"""What a way to train a Llama has of state and sends over the wire, in bytes counted from shapes: for the plan."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import tcfp_jax
from benchmarks import llama
from models.families import learner
from models.llama import Block, Llama, LlamaConfig, rotations
from tcfp_jax.paths import path_names
from tcfp_jax.weights.stored import Stored

BASELINE, STORED = llama.BASELINE, llama.STORED
WAYS = (BASELINE, "tensorwise", "tcfp12_fast", STORED)
# The recipe whose products a way multiplies with.
RECIPES = {way: "tcfp12_single" if way == STORED else way for way in WAYS}
# What remat="block" does not multiply again: the result of the last product is no input of the backward pass.
LAST_PRODUCT = "down"
BF16_BYTES = 2


class Counted(NamedTuple):
    """Bytes of one way to train a model, from shapes alone.

    Attributes:
      weights: how many are in layers.
      state: parameters and the optimizer's state.
      forward: of weights that a forward pass gathers for all layers.
      backward: of weights that a backward pass gathers, which multiplies forward again.
      shared: of embedding and head in BF16, each way of their gathers.
      shared_weights: how many they are.
      kept: of the inputs of blocks, of one sequence.
      block: what one block keeps for its backward pass, of one sequence.
    """

    weights: int
    state: int
    forward: int
    backward: int
    shared: int
    shared_weights: int
    kept: int
    block: int


def count(config: LlamaConfig, way: str, positions: int) -> Counted:
    """The bytes of a way, counted from `jax.eval_shape`.

    >>> size = LlamaConfig(layers=2, width=32, heads=4, kv_heads=2, hidden=48, context=8)
    >>> counted = count(size, "bf16", 8)
    >>> counted.forward == 2 * counted.weights, counted.state == 12 * (counted.weights + counted.shared_weights) + 4
    (True, True)
    """
    params, state = state_of(config, way)
    leaves = jax.tree_util.tree_flatten_with_path(params, is_leaf=_is_stored)[0]
    of_layers = [(path_names(path), leaf) for path, leaf in leaves if path_names(path)[0] == "layers"]
    shared_weights = sum(math.prod(leaf.shape) for path, leaf in leaves if path_names(path)[0] != "layers")
    travelling = [wire_bytes(config, way, names[1], leaf) for names, leaf in of_layers]
    return Counted(
        weights=sum(math.prod(leaf.shape) for _, leaf in of_layers), state=_bytes(state),
        forward=sum(one for one, _ in travelling), backward=sum(other for _, other in travelling),
        shared=BF16_BYTES * shared_weights, shared_weights=shared_weights,
        kept=config.layers * positions * config.width * BF16_BYTES, block=_block_bytes(config, positions),
    )  # fmt: skip


def state_of(config: LlamaConfig, way: str) -> tuple[Any, Any]:
    """(the parameters, all of the state), as shapes."""
    key, plain = jax.random.key(0), Llama(config)
    floats = lambda: plain.init(key, jnp.zeros((1, 8), jnp.int32))["params"]

    def make() -> tuple[Any, Any]:
        params: Any = floats()
        if way == BASELINE:
            return params, optax.adamw(1e-4).init(params)
        weights = learner(config, tcfp_jax.recipe(RECIPES[way]), "bfloat16").weights
        if way == STORED:
            params = tcfp_jax.store(params, weights, key=key, gradient_dtype=jnp.bfloat16)
            return params, tcfp_jax.optim.adamw(1e-4, moments="8bit", key=key).init(params)
        return params, optax.chain(optax.adamw(1e-4), tcfp_jax.error_feedback(weights)).init(params)

    params, opt_state = jax.eval_shape(make)
    return params, (params, opt_state)


def wire_bytes(config: LlamaConfig, way: str, name: str, leaf: Any) -> tuple[int, int]:
    """(what a forward pass gathers of all layers' weights of one name, what a backward pass gathers).

    The backward pass multiplies forward again, but for the last product, so it gathers what both read.
    """
    size = math.prod(leaf.shape)
    weight = None if way == BASELINE else tcfp_jax.recipe(RECIPES[way]).weight
    if weight is None or len(leaf.shape) < 3:  # BF16, or the norms, which no recipe changes
        return BF16_BYTES * size, BF16_BYTES * size
    halves = lambda reads: jnp.dtype(weight.dtype).itemsize * (2 if reads == "hi+lo" else 1)
    forward, dgrad = getattr(weight, "forward", "hi"), getattr(weight, "dgrad", "hi")
    backward = halves(dgrad) if name == LAST_PRODUCT else max(halves(forward), halves(dgrad))
    return halves(forward) * size, backward * size


def _block_bytes(config: LlamaConfig, positions: int) -> int:
    """What one block keeps for its backward pass, of one sequence: activations among the residuals of `jax.vjp`.

    Scores of attention are left out, which flash attention never keeps. They are BF16's: FP8 products keep less.
    """
    one = dataclasses.replace(config, layers=1, remat="none", attention="products")
    block, x = Block(one, "bfloat16"), jax.ShapeDtypeStruct((1, positions, config.width), jnp.bfloat16)
    rotation = jax.eval_shape(lambda: rotations(positions, config.head_size, config.rope_theta))
    params = jax.eval_shape(block.init, jax.random.key(0), x, rotation)
    kept = jax.eval_shape(lambda p, x, r: jax.vjp(lambda p, x: block.apply(p, x, r)[0], p, x)[1], params, x, rotation)
    has_positions = lambda shape: len(shape) >= 3 and positions in shape and shape[-2:] != (positions, positions)
    return _bytes([leaf for leaf in jax.tree.leaves(kept) if has_positions(leaf.shape)])


def _bytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _is_stored(node: Any) -> bool:
    return isinstance(node, Stored)
