"""Losses and gradients of a head, computed for a chunk of tokens at a time."""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AxisType

from pallas_kernels.specs import varying
from tcfp_jax.losses.logits import (
    Loss,
    balance_of,
    gradients,
    quantized_gradients,
    tokens_of,
)
from tcfp_jax.products.fp8_weights import Asked, Read, columns_of, quantize_operand
from tcfp_jax.products.matmul import RULES
from tcfp_jax.recipes import Recipe
from tcfp_jax.weights.stored import Stored

# Tokens of a chunk, for each device. Every chunk reads and writes the kernel's float32
# gradient once, so more tokens cost less time; with 128256 ids the logits of these take
# 1.05 GB.
TOKENS_AT_ONCE = 4096


def _devices() -> int:
    """Return the number of devices over which XLA may split the tokens and the
    vocabulary.
    """
    mesh = jax.sharding.get_abstract_mesh()
    automatic = [
        mesh.shape[name]
        for name, kind in zip(mesh.axis_names, mesh.axis_types)
        if kind == AxisType.Auto
    ]
    return math.prod(automatic) if mesh.axis_names else jax.device_count()


def by_chunks(
    asked: Loss,
    wanted: tuple[str, ...],
    x: Array,
    w: Array | None,
    quantized: Stored | None,
    targets: Array,
    weights: Array,
) -> tuple[Array, Array | None, Array | None]:
    """Return (losses, gradient of x, gradient of w) of x `[tokens, k]`.

    The gradients are those of the sum of losses times relative weights; unwanted ones
    are None.
    """
    # Values of a token without a weight, which may be NaN, must not reach the kernel's
    # gradient or a scale.
    x = jnp.where((weights == 0)[:, None], jnp.zeros((), x.dtype), x)
    tokens = x.shape[0]
    limit = asked.chunk or TOKENS_AT_ONCE * _devices()
    # `jax.export` may leave the number open
    count = -(-tokens // limit) if isinstance(tokens, int) else 1
    size = -(-tokens // count)

    def cut(array: Array) -> Array:
        # A chunk has every count-th token, so that devices that split the tokens share
        # the work of each chunk.
        rest = [(0, 0)] * (array.ndim - 1)
        padded = jnp.pad(array, [(0, size * count - tokens), *rest])
        return padded.reshape(size, count, *array.shape[1:]).swapaxes(0, 1)

    # Outside of the loop, for products that read floats.
    read = w if w is None or quantized is not None else w.astype(jnp.bfloat16)

    def of_chunk(dw: Array | None, given: tuple[Array, ...]) -> tuple[Any, Any]:
        losses, dx, dw = _chunk(asked, dw, "x" in wanted, read, quantized, *given)
        return dw, (losses, dx)

    dw = None
    if "w" in wanted and w is not None:
        dw = varying(jnp.zeros(w.shape, jnp.float32), x)
    dw, (losses, dx) = lax.scan(of_chunk, dw, tuple(map(cut, (x, targets, weights))))

    def joined(chunks: Array) -> Array:
        whole = chunks.swapaxes(0, 1).reshape(size * count, *chunks.shape[2:])
        return whole[:tokens]

    if dx is not None:
        dx = joined(dx)
    if dw is not None and w is not None:
        dw = _kept(dw, w)
    return joined(losses), dx, dw


def _kept(g: Array, like: Array) -> Array:
    """Return a gradient as it waits for the backward pass, in half the memory.

    float16 has too little range before it is scaled.
    """
    return g if like.dtype == jnp.float16 else g.astype(like.dtype)


def _chunk(
    asked: Loss,
    total_dw: Array | None,
    wants_dx: bool,
    w: Array | None,
    quantized: Stored | None,
    x: Array,
    targets: Array,
    weights: Array,
) -> tuple[Array, Array | None, Array | None]:
    """Return (losses, gradient of x or None, the float32 gradient of w so far or None)
    of tokens `[tokens, k]`.
    """
    recipe = asked.recipe
    if recipe.dgrad == "fast":
        # One accumulator for all ids keeps 14 bits of the target's product, below which
        # most probabilities are.
        recipe = replace(recipe, dgrad="full")
    rule = RULES[recipe.mode]
    # wgrad reads x times the balance, which the logits decide.
    forward = Asked(replace(recipe, wgrad="bf16"))
    products, saved = rule.forward(forward, x, w, quantized, None)
    with jax.named_scope("loss"):
        tokens = tokens_of(asked, products, targets, weights)
    if total_dw is None and not wants_dx:
        return tokens.losses, None, None
    with jax.named_scope("quantize_g"):
        balance = balance_of(asked, tokens, products.shape[-1])
        g_q = quantized_gradients(asked, products, tokens, balance)
    g = gradients(asked, products, tokens, balance)
    saved = replace(
        saved, x_type=jax.core.ShapedArray(x.shape, jnp.float32), w_type=None
    )
    if total_dw is not None:
        balanced = x.astype(jnp.float32) * balance[:, None]
        w_type = jax.core.ShapedArray(total_dw.shape, jnp.float32)
        saved = replace(saved, x=_read_by_wgrad(recipe, balanced), w_type=w_type)
    g = g.astype(jnp.bfloat16 if x.dtype.itemsize == 2 else jnp.float32)
    dx, dw, *_ = rule.backward(Asked(recipe), saved, g, g_q, total_dw)
    return tokens.losses, _kept(dx * balance[:, None], x) if wants_dx else None, dw


def _read_by_wgrad(recipe: Recipe, x: Array) -> Read:
    """Return x as a weight gradient reads it."""
    in_fp8 = None
    if recipe.wgrad != "bf16":
        with jax.named_scope("quantize_x"):
            in_fp8 = quantize_operand(x, recipe.activation, recipe)
    return columns_of(x, in_fp8, recipe.wgrad)
