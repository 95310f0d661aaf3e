"""Causal attention, as every model here calls it."""

from typing import Literal

import jax
import jax.numpy as jnp

Attention = Literal["auto", "products", "xla", "cudnn"]


def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array, how: Attention) -> jax.Array:
    """`softmax(q kᵀ / sqrt(d) + causal mask) v`, q `[batch, positions, heads, d]`, k and v of `kv_heads` heads.

    Scores and softmax are float32. Query head i reads head `i // (heads / kv_heads)` of k and v.

    Args:
      q: queries.
      k: keys.
      v: values.
      how: "products" writes all scores, and repeats bit for bit everywhere; "xla" and "cudnn" are those of
        `jax.nn.dot_product_attention` (cuDNN: flash attention, of GPUs and bfloat16 alone, several times as fast, with
        gradients that differ in their last bits each time), which raises under strict dtype promotion in bfloat16;
        "auto" is cuDNN on GPUs with bfloat16, and XLA elsewhere.
    """
    if how == "auto":
        how = "cudnn" if jax.default_backend() == "gpu" and q.dtype == jnp.bfloat16 else "xla"
    if how in ("xla", "cudnn"):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=how)
    # Without groups there is no axis of them: XLA adds in another order where there is one, be it of size 1.
    g, grouped = ("", q) if k.shape[2] == q.shape[2] else ("g", q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1]))
    scores = jnp.einsum(f"bqh{g}d,bkhd->bh{g}qk", grouped, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1).astype(v.dtype)
    return jnp.einsum(f"bh{g}qk,bkhd->bqh{g}d", weights, v).reshape(q.shape)
