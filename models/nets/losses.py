"""Cross-entropy of tokens, from logits, or from a head without ever holding all of
them; and functions of it, such as a loss of preferences.

loss[token] = logsumexp(logits[token]) - logits[token, target]
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from tcfp_jax import losses
from tcfp_jax.recipes import recipe

from .meshes import batch_axes

IGNORED = -100  # target of a token without a loss, as in Transformers
# From the losses of tokens to (scalar, anything else).
Objective = Callable[[jax.Array], tuple[jax.Array, Any]]


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
    chunk = _chunks(targets, kept)
    return losses.cross_entropy(
        x, matrix, targets, ignore=ignore, soft_cap=cap, chunk=chunk
    )[1]


def _chunks(targets: jax.Array, kept: Literal["logits", "inputs"]) -> losses.Chunks:
    """Return the tokens whose logits exist at a time."""
    at_once = targets.size if kept == "logits" else None
    return losses.Chunks(at_once, batch_axes())


def head_objective(
    x: jax.Array,
    matrix: jax.Array,
    targets: jax.Array,
    objective: Objective,
    *,
    kept: Literal["logits", "inputs"] = "inputs",
    cap: float | None = None,
) -> tuple[jax.Array, Any]:
    """Return `objective(head_losses(x, matrix, targets))`, which has the right gradient
    for any function of the losses.

    Use this instead of `head_losses` if the loss is not a mean over tokens. The
    derivative by the loss of each token is its weight in the gradient. It is known
    after all losses, so BF16 logits are computed twice, some tokens at a time.

    Args:
      x: Activations `[..., width]`.
      matrix: float32 `[width, vocabulary]`, which is rounded to the dtype of x.
      targets: Integers `[...]`. The loss of `IGNORED` is 0, and has no gradient.
      objective: Function of float32 losses `[...]` that returns (scalar, anything
        else).
      kept: As in `head_losses`.
      cap: Largest magnitude of a logit, by tanh.

    >>> x, targets = jnp.ones((2, 3, 4)), jnp.zeros((2, 3), int)
    >>> twice = lambda losses: (2 * losses[0].sum(), losses.shape)
    >>> value, shape = head_objective(x, jnp.zeros((4, 8)), targets, twice)
    >>> bool(value == 6 * jnp.log(8.0)), shape
    (True, (2, 3))
    """
    constants = x, matrix
    if x.dtype == jnp.bfloat16:
        constants = jax.lax.stop_gradient(constants)
    found = head_losses(*constants, targets, kept=kept, ignore=IGNORED, cap=cap)
    if x.dtype != jnp.bfloat16:
        return objective(found)
    both = jax.value_and_grad(objective, has_aux=True)
    (value, other), weights = both(found)
    counted = targets != IGNORED
    weights = jnp.where(counted, weights, 0.0)
    # The derivative of a sum without any weight is NaN.
    moves = jnp.any(weights != 0)
    weights = jnp.where(moves, weights, counted.astype(jnp.float32))
    chunks = _chunks(targets, kept)
    asked = losses.Loss(recipe("bf16"), soft_cap=cap, chunks=chunks)
    total, _ = losses.loss_of(asked, x, matrix, None, targets, weights)
    total = jnp.where(moves, total, 0.0)
    return value + total - jax.lax.stop_gradient(total), other
