"""Causal attention of all models."""

from typing import Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name


def causal_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    how: Literal["auto", "products", "xla", "cudnn"],
    *,
    mask: jax.Array | None = None,
    scale: float | None = None,
    cap: float | None = None,
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
    """
    if cap is not None:
        how = "products"
    if how == "auto":
        flash = jax.default_backend() == "gpu" and q.dtype == jnp.bfloat16
        how = "cudnn" if flash else "xla"
    if how != "products":
        attended = jax.nn.dot_product_attention(
            q, k, v, mask=mask, scale=scale, is_causal=True, implementation=how
        )
        return attended if how == "cudnn" else checkpoint_name(attended, "attended")
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
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    if mask is not None:
        causal = causal & (mask[:, :, None] if g else mask)
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
    attended = jnp.einsum(f"bh{g}qk,bkhd->bqh{g}d", weights.astype(v.dtype), v)
    return checkpoint_name(attended.reshape(q.shape), "attended")
