"""Greedy continuation of a prompt by a model in training.

Each token computes the whole text again.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from models.huggingface.tokenizer import Tokenizer

NEW_TOKENS = 64
STEP = 64  # lengths are multiples, which share a program


def continued(
    model: nn.Module,
    variables: Mapping[str, Any],
    prompt: str,
    *,
    context: int,
    tokenizer: Tokenizer | None = None,
    count: int = NEW_TOKENS,
) -> str:
    """Return up to `count` new tokens as text, the likeliest each time.

    The token that ends the answer is left out.

    Args:
      model: The model of a run.
      variables: Its parameters, and the quantized weights of `layer_state` as "tcfp".
      prompt: Text to continue, or a question if the tokenizer has a chat template.
      context: Longest sequence of the model.
      tokenizer: None reads bytes.
      count: Number of tokens.
    """
    ends: list[int] = []
    if tokenizer is None:
        ids = list(prompt.encode())
    else:
        ids = tokenizer.prompt(prompt)
        ends = list(tokenizer.stops)
        if tokenizer.end is not None:
            ends.append(tokenizer.end)
    ids = ids[-max(1, context - count) :]
    begin = len(ids)
    length = min(context, -(-(begin + count) // STEP) * STEP)
    tokens = jnp.zeros((1, length), jnp.int32)
    tokens = tokens.at[0, :begin].set(jnp.asarray(ids, jnp.int32))
    limit = min(length, begin + count)
    tokens, stopped = _greedy(model)(
        variables, tokens, begin, limit, jnp.asarray(ends, jnp.int32)
    )
    new = [one for one in tokens[0, begin : int(stopped)].tolist() if one not in ends]
    if tokenizer is None:
        return bytes(new).decode("utf-8", "replace")
    return tokenizer.decode(new)


@functools.lru_cache(maxsize=4)
def _greedy(model: nn.Module) -> Any:
    @jax.jit
    def run(
        variables: Any, tokens: jax.Array, begin: int, limit: int, ends: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        def more(held: tuple[jax.Array, jax.Array]) -> jax.Array:
            tokens, n = held
            ended = jnp.isin(tokens[0, n - 1], ends) & (n != begin)
            return (n < limit) & ~ended

        def one(held: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            tokens, n = held
            logits: Any = model.apply(variables, tokens)
            likeliest = jnp.argmax(logits[0, n - 1]).astype(tokens.dtype)
            return tokens.at[0, n].set(likeliest), n + 1

        return jax.lax.while_loop(more, one, (tokens, jnp.asarray(begin, jnp.int32)))

    return run
