"""Losses and gradients of a head, computed for a chunk of tokens at a time."""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels.operands import Row, Tensor
from pallas_kernels.specs import varying
from tcfp_jax.losses.logits import (
    Loss,
    balance_of,
    gradients,
    quantized_gradients,
    tokens_of,
)
from tcfp_jax.products.fp8_weights import (
    Asked,
    Read,
    Saved,
    columns_of,
    quantize_operand,
    weight_gradient,
)
from tcfp_jax.products.matmul import RULES
from tcfp_jax.recipes import Recipe
from tcfp_jax.weights.stored import Stored

# Tokens of a chunk, for each device. Every chunk reads and writes the kernel's float32
# gradient once, so more tokens cost less time; with 128256 ids the logits of these take
# 1.05 GB.
TOKENS_AT_ONCE = 4096


def _automatic() -> dict[str, int]:
    """Return the sizes of the axes of the current mesh that XLA may split arrays
    over.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return {
        name: mesh.shape[name]
        for name, kind in zip(mesh.axis_names, mesh.axis_types)
        if kind == AxisType.Auto
    }


def _devices() -> int:
    """Return the number of devices over which XLA may split the tokens and the
    vocabulary.
    """
    if not jax.sharding.get_abstract_mesh().axis_names:
        return jax.device_count()
    return math.prod(_automatic().values())


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
    limit = asked.chunks.tokens or TOKENS_AT_ONCE * _devices()
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
    parts = _parts(asked, size)
    if parts:
        read, quantized = _gathered((read, quantized), x.shape[-1])

    def of_chunk(dw: Array | None, given: tuple[Array, ...]) -> tuple[Any, Any]:
        losses, dx, dw = _chunk(asked, dw, "x" in wanted, read, quantized, *given)
        return dw, (losses, dx)

    dw = None
    if "w" in wanted and w is not None:
        dw = varying(jnp.zeros((*parts, *w.shape), jnp.float32), x)
        if parts:
            dw = _split(dw, P(asked.chunks.axes, *[P.UNCONSTRAINED] * w.ndim))
    dw, (losses, dx) = lax.scan(of_chunk, dw, tuple(map(cut, (x, targets, weights))))

    def joined(chunks: Array) -> Array:
        whole = chunks.swapaxes(0, 1).reshape(size * count, *chunks.shape[2:])
        return whole[:tokens]

    if dx is not None:
        dx = joined(dx)
    if dw is not None and w is not None:
        dw = _kept(dw, w)
        if parts:
            # In this dtype, which `jnp.sum` would widen.
            dw = lax.reduce(dw, jnp.zeros((), dw.dtype), lax.add, (0,))
    return joined(losses), dx, dw


def _parts(asked: Loss, size: int) -> tuple[int, ...]:
    """Return (the number of devices that split a chunk of so many tokens,), or () if
    XLA sums the kernel's gradient over them in each chunk.

    Raises:
      ValueError: an axis of tokens is not an automatic one of the current mesh.
    """
    sizes = _automatic()
    if not sizes.keys() >= {*asked.chunks.axes}:
        raise ValueError(
            f"chunk={asked.chunks}, but the current mesh has the automatic axes"
            f" {list(sizes)}; call it under jax.set_mesh(mesh), or name no axes"
        )
    count = math.prod(sizes[name] for name in asked.chunks.axes)
    recipe = asked.recipe
    # `jax.export` may leave the number open.
    is_cut = count > 1 and isinstance(size, int) and size % count == 0
    # Blocks of tokens share a scale.
    is_alike = isinstance(recipe.scaling, Tensor | Row) and recipe.dgrad != "bf16"
    can_wait = recipe.wire is None and (is_alike or recipe.wgrad == "bf16")
    return (count,) if is_cut and can_wait else ()


def _gathered(weight: Any, k: int) -> Any:
    """Return a weight, floats or stored, whose axis of size k is whole."""

    def whole(leaf: Array) -> Array:
        if leaf.ndim != 2:
            return leaf
        spec: list[Any] = [P.UNCONSTRAINED] * 2
        spec[leaf.shape.index(k)] = None
        return _split(leaf, P(*spec))

    return jax.tree.map(whole, weight)


def _split(x: Array, spec: P) -> Array:
    return lax.with_sharding_constraint(x, spec)


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
    if total_dw is None or total_dw.ndim == 2:
        dx, dw, *_ = rule.backward(Asked(recipe), saved, g, g_q, total_dw)
    else:
        dx, *_ = rule.backward(Asked(recipe), replace(saved, w_type=None), g, g_q)
        columns = columns_of(g, g_q, recipe.wgrad)
        dw = _added_in_parts(recipe, saved, columns, total_dw)
    return tokens.losses, _kept(dx * balance[:, None], x) if wants_dx else None, dw


def _added_in_parts(
    recipe: Recipe, saved: Saved, columns: Read, totals: Array
) -> Array:
    """Return sums `[parts, k, vocabulary]` plus the weight gradients of each part of
    the tokens.
    """
    parts = totals.shape[0]

    def cut(read: Read) -> tuple[Read, Any]:
        """Return an operand whose tokens are cut, and its new axis."""
        if isinstance(read, Array):  # [tokens, columns]
            return read.reshape(parts, -1, read.shape[1]), 0
        values = read.values  # [columns, tokens]
        values = values.reshape(values.shape[0], parts, -1)
        axes: Any = dict(values=1, scale=None)
        return replace(read, values=values), replace(read, **axes)

    def added(x: Read, columns: Read, total: Array) -> Any:
        return weight_gradient(recipe, replace(saved, x=x), columns, total)

    x, x_axis = cut(saved.x)
    columns, columns_axis = cut(columns)
    return jax.vmap(added, (x_axis, columns_axis, 0))(x, columns, totals)


def _read_by_wgrad(recipe: Recipe, x: Array) -> Read:
    """Return x as a weight gradient reads it."""
    in_fp8 = None
    if recipe.wgrad != "bf16":
        with jax.named_scope("quantize_x"):
            in_fp8 = quantize_operand(x, recipe.activation, recipe)
    return columns_of(x, in_fp8, recipe.wgrad)
