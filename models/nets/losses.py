"""Cross-entropy of tokens, from logits, or from a head without ever holding all of
them.

loss[token] = logsumexp(logits[token]) - logits[token, target]
"""

from typing import Literal

import jax
import jax.numpy as jnp

from models.nets.meshes import batch_axes
from tcfp_jax import losses

IGNORED = -100  # target of a token without a loss, as in Transformers


def capped(logits: jax.Array, cap: float | None) -> jax.Array:
    """Return `cap * tanh(logits / cap)`, or the logits without a cap."""
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Return `logsumexp(logits) - logits[target]`, float32 `[...]`, of logits
    `[..., vocabulary]` and integers `[...]`.

    >>> losses = cross_entropy(jnp.zeros((2, 4)), jnp.array([0, 3]))
    >>> losses.tolist() == [jnp.log(4.0)] * 2
    True
    """
    logits = logits.astype(jnp.float32)
    # The gradient of a masked sum is not a scatter, as that of take_along_axis: it is
    # deterministic and fuses.
    is_target = jnp.arange(logits.shape[-1]) == targets[..., None]
    return jax.nn.logsumexp(logits, axis=-1) - jnp.sum(
        jnp.where(is_target, logits, 0.0), axis=-1
    )


def head_losses(
    x: jax.Array,
    matrix: jax.Array,
    targets: jax.Array,
    *,
    kept: Literal["logits", "inputs"] = "inputs",
    ignore: int | None = None,
    cap: float | None = None,
) -> jax.Array:
    """Return `cross_entropy(x @ matrix, targets)`, float32 `[...]`, without float32
    logits.

    Args:
      x: Activations `[..., width]`. BF16 ones go through
        `tcfp_jax.losses.cross_entropy`, whose product a conversion can change. Only the
        mean of the losses can then be differentiated.
      matrix: float32 `[width, vocabulary]`, which is rounded to the dtype of x.
      targets: Integers `[...]`.
      kept: "logits" holds the logits of all tokens at once, "inputs" those of some
        tokens.
      ignore: Target of tokens whose loss is 0, over which no mean may be taken.
      cap: Largest magnitude of a logit, by tanh.

    >>> x, targets = jnp.ones((2, 3, 4)), jnp.zeros((2, 3), int)
    >>> head_losses(x, jnp.eye(4), targets).shape
    (2, 3)
    """
    if x.dtype != jnp.bfloat16:
        found = cross_entropy(
            capped((x @ matrix.astype(x.dtype)).astype(jnp.float32), cap), targets
        )
        return found if ignore is None else jnp.where(targets == ignore, 0.0, found)
    at_once = targets.size if kept == "logits" else None
    chunks = losses.Chunks(at_once, batch_axes())
    return losses.cross_entropy(
        x, matrix, targets, ignore=ignore, soft_cap=cap, chunk=chunks
    )[1]
