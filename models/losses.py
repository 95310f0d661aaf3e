"""Cross-entropy of tokens, from logits or without ever holding all of them.

    loss[token] = logsumexp(logits[token]) - logits[token, target]

With a vocabulary of 128256, the float32 logits of 16384 tokens take 8.4 GB, and the usual backward pass holds several
arrays of that size. `head_losses` keeps the logits once, in the dtype of the head's product. Or it keeps none of them,
and computes the product again in the backward pass, for some tokens at a time.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from models.meshes import batch_parts

# For kept="inputs": 1 GB of float32 logits with 128256 ids, and a product that fills a GPU.
TOKENS_AT_ONCE = 2048


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Return `logsumexp(logits) - logits[target]`, float32 `[...]`, of logits `[..., vocabulary]` and integers `[...]`.

    >>> cross_entropy(jnp.zeros((2, 4)), jnp.array([0, 3])).tolist() == [jnp.log(4.0)] * 2
    True
    """
    total, picked = _parts(logits, targets)
    return total - picked


def head_losses(
    head: Callable[[jax.Array], jax.Array],
    x: jax.Array,
    targets: jax.Array,
    *,
    kept: Literal["logits", "inputs"] = "inputs",
) -> jax.Array:
    """Return `cross_entropy(head(x), targets)`, float32 `[...]`, with a backward pass that holds less.

    Args:
      head: Function of `[..., width]` that returns logits `[..., vocabulary]`, each row by itself.
      x: Activations `[..., positions, width]`.
      targets: Integers `[..., positions]`.
      kept: "logits" keeps the logits of `head` and multiplies once. "inputs" keeps x, computes `TOKENS_AT_ONCE` tokens
        of a device at a time, and multiplies again in the backward pass.

    >>> x, targets = jnp.ones((2, 3, 4)), jnp.zeros((2, 3), int)
    >>> head_losses(lambda x: x @ jnp.eye(4), x, targets).shape
    (2, 3)
    """
    if kept == "logits":
        return _lean(head(x), targets)
    # Chunks are positions of every sequence, so that each device of a mesh has its share of them.
    by_position = jnp.moveaxis(x, -2, 0), jnp.moveaxis(targets, -1, 0)
    at_once = max(1, TOKENS_AT_ONCE * batch_parts() // max(1, targets[..., 0].size))
    of_position = jax.checkpoint(lambda row: _lean(head(row[0]), row[1]))
    return jnp.moveaxis(lax.map(of_position, by_position, batch_size=at_once), 0, -1)


def _parts(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (logsumexp, the target's logit), float32."""
    logits = logits.astype(jnp.float32)
    # The gradient of a masked sum is not a scatter, as that of take_along_axis: it is deterministic and fuses.
    picked = jnp.sum(jnp.where(_is_target(logits, targets), logits, 0.0), axis=-1)
    return jax.nn.logsumexp(logits, axis=-1), picked


def _is_target(logits: jax.Array, targets: jax.Array) -> jax.Array:
    return jnp.arange(logits.shape[-1]) == targets[..., None]


@jax.custom_vjp
def _lean(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Return `cross_entropy`, and keep only the logits, of which autodiff would keep float32 exponentials.

    Their gradient, `(exp(logits - logsumexp) - is_target) g`, has their dtype and is made in one pass.
    """
    return _lean_forward(logits, targets)[0]


def _lean_forward(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, Any]:
    # Without the barrier XLA computes `picked`, which no gradient needs, at the end of the step, and keeps the
    # logits until then.
    total, picked = lax.optimization_barrier(_parts(logits, targets))
    return total - picked, (logits, targets, total)


def _lean_backward(saved: Any, g: jax.Array) -> tuple[jax.Array, None]:
    logits, targets, total = saved
    shares = jnp.exp(logits.astype(jnp.float32) - total[..., None])
    return ((shares - _is_target(logits, targets)) * g[..., None]).astype(logits.dtype), None


_lean.defvjp(_lean_forward, _lean_backward)
