"""Losses of scanned models, for tests of the update inside the backward pass."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

import tcfp_jax
from models.nets.families import learner
from models.nets.sizes import LLAMAS, MOES
from tcfp_jax.conversion import find_weights
from tcfp_jax.linen import TCFPDense
from tcfp_jax.nnx import TCFPLinear
from tests.helpers import drawn

RECIPE = "tcfp12_single"
KEY = jax.random.key(0)
LAYERS = 3
WIDTH = 128
X = drawn(16, WIDTH)


class Case(NamedTuple):
    """A loss of stored parameters and a batch.

    Attributes:
      inside: names of parameters that are updated inside.
    """

    loss: Callable
    params: object
    batch: jax.Array
    inside: tuple[str, ...]


def stack(seed=1, layers=LAYERS):
    return drawn(layers, WIDTH, WIDTH, seed=seed) / WIDTH**0.5


def store(params, recipe=RECIPE):
    return tcfp_jax.store(params, recipe, key=KEY, gradient_dtype=jnp.bfloat16)


def product(x, kernel):
    return tcfp_jax.matmul(x, kernel, recipe=RECIPE)


def plain():
    """A scan that somebody wrote by hand; the head is no stack."""

    def loss(params, x):
        @jax.checkpoint
        def layer(x, own):
            h = jnp.tanh(product(x * own["scale"][:, None, :], own["up"]["kernel"])[0])
            return x + product(h, own["down"]["kernel"]), None

        layers = {**params["layers"], "scale": params["scale"][:, None]}
        x, _ = jax.lax.scan(layer, x, layers)
        return jnp.mean(product(x, params["head"]["kernel"]) ** 2)

    kernels = {"up": {"kernel": stack(1)}, "down": {"kernel": stack(2)}}
    params = {
        "layers": kernels,
        "scale": jnp.ones((LAYERS, WIDTH)),
        "head": {"kernel": stack(3)[0]},
    }
    inside = ("layers/up/kernel", "layers/down/kernel", "head/kernel")
    return Case(loss, store(params), X, inside)


def _loss_of(model):
    def loss(params, tokens):
        logits = model.apply({"params": params}, tokens[:, :-1])
        chosen = jax.nn.log_softmax(logits.astype(jnp.float32))
        return -jnp.mean(jnp.take_along_axis(chosen, tokens[:, 1:, None], -1))

    return loss


def network(sizes, name, **changes):
    """A converted model of `models`, whose tables are stored."""
    size = dataclasses.replace(sizes[name], layers=LAYERS, **changes)
    recipe = tcfp_jax.recipe(RECIPE)
    model, weights = learner(size, recipe, "bfloat16", None, "stored")
    # Each token once: a GPU adds the gradients of one row in no fixed order.
    tokens = np.random.default_rng(0).permutation(size.vocabulary)[:66].reshape(2, 33)
    tokens = jnp.asarray(tokens)
    params = model.init(KEY, tokens[:, :-1])["params"]
    stacks = ("layers/up/kernel",) if sizes is LLAMAS else ()
    return Case(_loss_of(model), store(params, weights), tokens, stacks)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        h = jnp.tanh(TCFPDense(WIDTH, recipe=RECIPE, name="up")(x))
        return x + TCFPDense(WIDTH, recipe=RECIPE, name="down")(h), None


class Layers(nn.Module):
    """Layers of this library in `nn.scan`, without a conversion."""

    @nn.compact
    def __call__(self, x):
        scanned = nn.scan(
            nn.remat(Layer, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=LAYERS,
        )
        return scanned(name="layers")(x, None)[0]


def linen():
    model = Layers()

    def loss(params, x):
        return jnp.mean(model.apply({"params": params}, x) ** 2)

    params = model.init(KEY, X)["params"]
    return Case(loss, store(params), X, ("layers/up/kernel", "layers/down/kernel"))


class NNXLayer(nnx.Module):
    def __init__(self, rngs, linear):
        self.up = linear(WIDTH, WIDTH, rngs=rngs)
        self.down = linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x)))


class NNXLayers(nnx.Module):
    """Layers in `nnx.scan`."""

    def __init__(self, rngs, linear=nnx.Linear):
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs):
            return NNXLayer(rngs, linear)

        self.layers = make(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def run(layer, x):
            return layer(x)

        return run(self.layers, x)


def nnx_model():
    graph, params = nnx.split(NNXLayers(nnx.Rngs(0)))

    def floats(params, x):
        return jnp.mean(nnx.merge(graph, params)(x) ** 2)

    low = tcfp_jax.transform(floats, RECIPE, include=("linear", "small"))
    weights = find_weights(low, params, X)
    inside = ("layers/up/kernel", "layers/down/kernel")
    return Case(low, store(params, weights), X, inside)


def nnx_layers():
    """Layers of this library, which `nnx.scan` returns."""
    linear = functools.partial(TCFPLinear, recipe=RECIPE)
    graph, params = nnx.split(NNXLayers(nnx.Rngs(0), linear))

    def loss(params, x):
        return jnp.mean(nnx.merge(graph, params)(x) ** 2)

    return Case(loss, store(params), X, ("layers/up/kernel", "layers/down/kernel"))


def groups():
    """A scan in a scan, and a head that is also read without a gradient."""

    def floats(params, x):
        def layer(x, kernel):
            return x + jnp.tanh(x @ kernel), None

        @jax.checkpoint
        def group(x, kernels):
            return jax.lax.scan(layer, x, kernels)[0], None

        x, _ = jax.lax.scan(group, x, params["kernel"])
        fixed = jax.lax.stop_gradient(params["head"])
        return jnp.mean((x @ params["head"]) ** 2) + jnp.mean(x @ fixed)

    params = {"kernel": jnp.stack([stack(1, 2), stack(2, 2)]), "head": stack(3)[0]}
    low = tcfp_jax.transform(floats, RECIPE, include=("linear", "small"))
    weights = find_weights(low, params, X)
    return Case(low, store(params, weights), X, ("kernel",))


def parts():
    """Parts of a layer read its weight: without a gradient, in a loop, in vmap."""

    def loss(params, x):
        def layer(x, kernel):
            def chunk(rows):
                return jnp.tanh(product(rows, kernel))

            @jax.checkpoint
            def fixed(x):
                values = jax.lax.stop_gradient(kernel.read().dequantize())
                return x * jnp.cos(jnp.mean(values**2) * jnp.sum(x))

            rows = jax.lax.map(jax.checkpoint(chunk), fixed(x).reshape(2, 8, WIDTH))
            rows = jax.vmap(functools.partial(product, kernel=kernel))(rows)
            return x + rows.reshape(x.shape), None

        x, _ = jax.lax.scan(layer, x, params["kernel"])
        return jnp.mean(x**2)

    return Case(loss, store({"kernel": stack()}), X, ("kernel",))


def branches():
    """Layers that are left out in a branch, and weights without a gradient."""

    def floats(params, x):
        def layer(x, given):
            kernel, fixed, is_on = given
            x = x + jax.lax.stop_gradient(jnp.tanh(x @ fixed))

            def apply(x):
                return x + jnp.tanh(x @ kernel)

            return jax.lax.cond(is_on, apply, jnp.copy, x), None

        is_on = jnp.arange(LAYERS) != 1
        layers = (params["kernel"], params["fixed"], is_on)
        x, _ = jax.lax.scan(jax.checkpoint(layer), x, layers)
        return jnp.mean(x**2)

    params = {"kernel": stack(1), "fixed": stack(2)}
    low = tcfp_jax.transform(floats, RECIPE, include=("linear", "small"))
    return Case(low, store(params, find_weights(low, params, X)), X, ("kernel",))


CASES = {
    "plain": plain,
    "linen": linen,
    "nnx": nnx_model,
    "layers of nnx": nnx_layers,
    "groups": groups,
    "parts": parts,
    "branches": branches,
    "untied": lambda: network(LLAMAS, "llama-tiny", remat="block", head="untied"),
    "tied, nothing recomputed": lambda: network(LLAMAS, "llama-tiny"),
    "experts": lambda: network(MOES, "moe-tiny", remat="block"),
}
