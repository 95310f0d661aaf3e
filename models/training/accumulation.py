"""Gradients of a batch in parts, one after another, for less memory."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .examples import COUNTED


def in_parts(differentiate: Callable[..., Any], parts: int) -> Callable[..., Any]:
    """Return a function like `differentiate` that computes a batch in parts, and
    returns the means of values and gradients in float32.

    Each part counts as its tokens do, so the result is that of the whole batch up to
    rounding. Row i is in part `i % parts`, so that each device has its share of a part.

    Args:
      differentiate: Function of parameters, quantized weights, the batch, a random key
        or None, and anything else.
      parts: Their number, which divides the rows of the batch.
    """
    if parts == 1:
        return differentiate

    def run(params: Any, quantized: Any, batch: jax.Array, key: Any, *rest: Any) -> Any:
        rows = batch.reshape(-1, parts, *batch.shape[1:]).swapaxes(0, 1)

        def of_part(number: jax.Array) -> Any:
            own = None if key is None else jax.random.fold_in(key, number)
            return differentiate(params, quantized, rows[number], own, *rest)

        def add(sums: Any, part: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
            number, share = part

            def added(total: jax.Array, value: jax.Array) -> jax.Array:
                # The mean of a part without tokens is NaN
                return total + jnp.where(share > 0, share * value, 0.0)

            return jax.tree.map(added, sums, of_part(number)), None

        zeros = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, jnp.float32),
            jax.eval_shape(of_part, jnp.zeros((), jnp.int32)),
        )
        return jax.lax.scan(add, zeros, (jnp.arange(parts), _shares(rows)))[0]

    return run


def _shares(rows: jax.Array) -> jax.Array:
    """Return the share of each part in the tokens that the loss counts, float32."""
    if rows.ndim != 4:  # of documents, `[parts, rows, 3, sequence + 1]`
        return jnp.full(len(rows), 1 / len(rows))
    counted = jnp.sum(rows[:, :, COUNTED, 1:] > 0, axis=(1, 2))
    return counted / jnp.maximum(counted.sum(), 1)
