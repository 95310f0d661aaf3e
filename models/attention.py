"""Causal attention of all models."""

from typing import Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

Attention = Literal["auto", "products", "xla", "cudnn"]


def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array, how: Attention) -> jax.Array:
    """Return `softmax(q kᵀ / sqrt(d) + causal mask) v`; q is `[batch, positions, heads, d]`, k and v have `kv_heads`.

    Scores and softmax are float32. Query head i reads head `i // (heads / kv_heads)` of k and v. The result has the
    name "attended" for policies of a remat, except cuDNN's: its backward pass needs sums, too, which have no name.

    Args:
      q: Queries.
      k: Keys.
      v: Values.
      how: "products" writes all scores, and repeats bit for bit everywhere. "xla" and "cudnn" are implementations of
        `jax.nn.dot_product_attention`, which raises in bfloat16 under strict dtype promotion. cuDNN is flash attention
        on GPUs in bfloat16: several times as fast, with gradients that differ in their last bits each time. "auto" is
        cuDNN on GPUs with bfloat16, and XLA elsewhere.
    """
    if how == "auto":
        how = "cudnn" if jax.default_backend() == "gpu" and q.dtype == jnp.bfloat16 else "xla"
    if how == "cudnn":
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=how)
    if how == "xla":
        return checkpoint_name(jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=how), "attended")
    # Without groups there must be no axis of size 1 for them, with which XLA would add in another order.
    g, grouped = ("", q) if k.shape[2] == q.shape[2] else ("g", q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1]))
    scores = jnp.einsum(f"bqh{g}d,bkhd->bh{g}qk", grouped, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1).astype(v.dtype)
    return checkpoint_name(jnp.einsum(f"bh{g}qk,bkhd->bqh{g}d", weights, v).reshape(q.shape), "attended")
