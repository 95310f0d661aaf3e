"""Causal attention of all models, and the keys and values that it keeps for later
tokens.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax
from jax.ad_checkpoint import checkpoint_name

CACHE = "cache"  # collection of keys and values
Start = int | jax.Array | None


def causal_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    how: Literal["auto", "products", "xla", "cudnn"],
    *,
    mask: jax.Array | None = None,
    scale: float | None = None,
    cap: float | None = None,
    start: Start = None,
) -> jax.Array:
    """Return `softmax(q kᵀ / sqrt(d) + causal mask) v`; q is
    `[batch, positions, heads, d]`, k and v have `kv_heads`.

    Scores and softmax are float32. Query head i reads head `i // (heads / kv_heads)` of
    k and v. The result has the name "attended" for policies of a remat, except cuDNN's:
    its backward pass needs sums, too, which have no name.

    Args:
      q: Queries.
      k: Keys.
      v: Values.
      how: "products" writes all scores, and repeats bit for bit everywhere. "xla" and
        "cudnn" are implementations of `jax.nn.dot_product_attention`, which raises in
        bfloat16 under strict dtype promotion. cuDNN is flash attention on GPUs in
        bfloat16: several times as fast, with gradients that differ in their last bits
        each time. "auto" is cuDNN on GPUs with bfloat16, and XLA elsewhere.
      mask: Tokens that a token sees if causality allows it, bools
        `[batch or 1, 1, positions, positions]`.
      scale: Factor of the scores instead of `1 / sqrt(d)`.
      cap: Largest magnitude of a score, by tanh. Only "products" has it, which then
        replaces the others.
      start: Position of the first query, if there are more keys than queries. Only
        "products" has it, too.
    """
    queries = q.shape[1]
    keys = k.shape[1]
    if cap is not None or keys != queries:
        how = "products"
    if how == "auto":
        flash = jax.default_backend() == "gpu" and q.dtype == jnp.bfloat16
        how = "cudnn" if flash else "xla"
    if how != "products":
        attended = jax.nn.dot_product_attention(
            q, k, v, mask=mask, scale=scale, is_causal=True, implementation=how
        )
        return attended if how == "cudnn" else checkpoint_name(attended, "attended")
    seen = jnp.tril(jnp.ones((queries, keys), bool))
    if start is not None and keys != queries:
        seen = jnp.arange(keys) <= start + jnp.arange(queries)[:, None]
    if mask is not None:
        seen = seen & mask
    return checkpoint_name(_by_products(q, k, v, seen, scale, cap), "attended")


def _by_products(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    seen: jax.Array,
    scale: float | None,
    cap: float | None,
) -> jax.Array:
    """Return attention over the keys that each query sees, bools
    `[..., queries, keys]`.
    """
    # Without groups there must be no axis of size 1 for them, with which XLA would add
    # in another order.
    g = "" if k.shape[2] == q.shape[2] else "g"
    grouped = q
    if g:
        grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1])
    scores = jnp.einsum(
        f"bqh{g}d,bkhd->bh{g}qk", grouped, k, preferred_element_type=jnp.float32
    )
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    if cap is not None:
        scores = cap * jnp.tanh(scores / cap)
    if g and seen.ndim > 2:
        seen = seen[:, :, None]
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    attended = jnp.einsum(f"bh{g}qk,bkhd->bqh{g}d", weights.astype(v.dtype), v)
    return attended.reshape(q.shape)


def kept(
    module: nn.Module, key: jax.Array, value: jax.Array, start: Start
) -> tuple[jax.Array, jax.Array]:
    """Return the keys and values of all positions so far, which stay in the collection
    "cache" of a block.

    Without a cache, these positions become one. Otherwise they are written into it, so
    it must have room for them.

    Args:
      module: The block.
      key: Keys of some positions, `[batch, positions, kv_heads, d]`.
      value: Their values.
      start: The first of these positions; None keeps nothing.
    """
    if start is None:
        return key, value
    arrays = dict(key=key, value=value)
    for name, new in arrays.items():
        if module.has_variable(CACHE, name):
            old: jax.Array = module.get_variable(CACHE, name)
            arrays[name] = lax.dynamic_update_slice_in_dim(old, new, start, axis=1)
        module.put_variable(CACHE, name, arrays[name])
    return arrays["key"], arrays["value"]


def kept_positions(module: nn.Module, new: int) -> int:
    """Return the number of positions in the cache of a model, or of the new ones that
    make it.
    """
    arrays = jax.tree.leaves(module.variables.get(CACHE, {}))
    return arrays[0].shape[-3] if arrays else new
