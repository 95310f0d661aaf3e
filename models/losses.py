"""Cross-entropy of tokens, from logits or without ever holding all of them.

    loss[token] = logsumexp(logits[token]) - logits[token, target]

With a vocabulary of 128256 the float32 logits of 16384 tokens have 8.4 GB, and a backward pass as usually written holds
several arrays of that size. `head_losses` keeps the logits once, in the dtype of the head's product, or not at all:
then the head's product is computed again in the backward pass, for some tokens at a time.
"""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

Kept = Literal["logits", "inputs"]
# Of kept="inputs": 1 GB of float32 logits with 128256 ids, and a product that fills a GPU.
TOKENS_AT_ONCE = 2048


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """`logsumexp(logits) - logits[target]`, float32 `[...]`, of logits `[..., vocabulary]` and integers `[...]`.

    >>> cross_entropy(jnp.zeros((2, 4)), jnp.array([0, 3])).tolist() == [jnp.log(4.0)] * 2
    True
    """
    logits = logits.astype(jnp.float32)
    # A masked sum instead of take_along_axis: its gradient is no scatter, so it is deterministic on GPUs and fuses.
    is_target = jnp.arange(logits.shape[-1]) == targets[..., None]
    return jax.nn.logsumexp(logits, axis=-1) - jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)


def head_losses(
    head: Callable[[jax.Array], jax.Array], x: jax.Array, targets: jax.Array, *, kept: Kept = "inputs"
) -> jax.Array:
    """`cross_entropy(head(x), targets)`, float32 `[...]`, with less for the backward pass to hold.

    Args:
      head: `[tokens, width]` to logits `[tokens, vocabulary]`, each row by itself.
      x: `[..., width]`.
      targets: integers `[...]`.
      kept: "logits" keeps those that `head` returns, and computes its product once; "inputs" keeps x, computes
        `TOKENS_AT_ONCE` rows at a time and their product again in the backward pass.

    >>> x, targets = jnp.ones((2, 3, 4)), jnp.zeros((2, 3), int)
    >>> head_losses(lambda x: x @ jnp.eye(4), x, targets).shape
    (2, 3)
    """
    if kept == "logits":
        return jax.checkpoint(cross_entropy)(head(x), targets)
    rows = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
    of_row = jax.checkpoint(lambda row: cross_entropy(head(row[0]), row[1]))
    return jax.lax.map(of_row, rows, batch_size=TOKENS_AT_ONCE).reshape(targets.shape)
