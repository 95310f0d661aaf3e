"""Greedy continuation of a prompt by a model in training.

The prompt runs through the model once. Each new token then runs alone, and reads the
keys and values of the tokens before it from a cache.
"""

import functools
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from ..huggingface.tokenizer import Tokenizer
from ..nets.attention import CACHE

NEW_TOKENS = 64
STEP = 64  # lengths are multiples, which share a program


class Continuation(NamedTuple):
    """New text, and the number of new tokens per second, without the prompt's time."""

    text: str
    tokens_per_second: float


class Written(NamedTuple):
    """Tokens `[positions]`, the place after the last one, and the cache of those that
    the model has read.
    """

    tokens: jax.Array
    end: jax.Array
    cache: Any


def continued(
    model: nn.Module,
    variables: Mapping[str, Any],
    prompt: str,
    *,
    context: int,
    tokenizer: Tokenizer | None = None,
    count: int = NEW_TOKENS,
) -> Continuation:
    """Return up to `count` new tokens as text, the likeliest each time.

    The token that ends the answer is left out.

    Args:
      model: The model of a run.
      variables: Its parameters, and the quantized weights of `layer_state` as "tcfp".
      prompt: Text to continue, or a question if the tokenizer has a chat template.
      context: Longest sequence of the model, which may leave room for fewer tokens.
      tokenizer: None reads bytes.
      count: Number of tokens.

    Raises:
      ValueError: as `prompt_ids`.
    """
    ends: list[int] = []
    if tokenizer is not None:
        ends = list(tokenizer.stops)
        if tokenizer.end is not None:
            ends.append(tokenizer.end)
    ids = prompt_ids(prompt, context, tokenizer)
    begin = len(ids)
    length = min(context, -(-(begin + count) // STEP) * STEP)
    limit = min(length, begin + count)
    tokens = jnp.zeros(length, jnp.int32).at[:begin].set(jnp.asarray(ids, jnp.int32))
    stops = jnp.asarray(ends, jnp.int32)
    written = _first(model)(variables, tokens, begin)
    extend = _rest(model)
    # A reached limit allows no round: it compiles, which is then not timed.
    written = jax.block_until_ready(extend(variables, written, begin, stops))
    started = time.perf_counter()
    written = jax.block_until_ready(extend(variables, written, limit, stops))
    seconds = time.perf_counter() - started
    new = written.tokens[begin : int(written.end)].tolist()
    # The first one came with the prompt
    rate = max(0, len(new) - 1) / seconds
    new = [one for one in new if one not in ends]
    if tokenizer is None:
        return Continuation(bytes(new).decode("utf-8", "replace"), rate)
    return Continuation(tokenizer.decode(new), rate)


def prompt_ids(
    prompt: str, context: int, tokenizer: Tokenizer | None = None
) -> list[int]:
    """Return the ids of a prompt.

    Raises:
      ValueError: there are none, or they leave no room for a new token.
    """
    if tokenizer is None:
        ids = list(prompt.encode())
    else:
        ids = tokenizer.prompt(prompt)
    if not 0 < len(ids) < context:
        repair = "shorten the prompt" if ids else "write some text"
        raise ValueError(
            f"the prompt of a sample has {len(ids)} tokens, and the model reads 1 to"
            f" {context - 1} before a new one; {repair}"
        )
    return ids


@functools.lru_cache(maxsize=4)
def _first(model: nn.Module) -> Any:
    @jax.jit
    def run(variables: Any, tokens: jax.Array, begin: int) -> Written:
        """Read the prompt, and write the first token after it.

        Rows of the cache after the prompt are replaced before a token sees them.
        """
        logits, held = _applied(model, variables, tokens, 0)
        likeliest = jnp.argmax(logits[begin - 1]).astype(tokens.dtype)
        end = jnp.asarray(begin + 1, jnp.int32)
        return Written(tokens.at[begin].set(likeliest), end, held)

    return run


@functools.lru_cache(maxsize=4)
def _rest(model: nn.Module) -> Any:
    @jax.jit
    def run(variables: Any, written: Written, limit: int, ends: jax.Array) -> Written:
        """Write tokens until one ends the text, or there are as many as the limit."""

        def more(written: Written) -> jax.Array:
            ended = jnp.isin(written.tokens[written.end - 1], ends)
            return (written.end < limit) & ~ended

        def one(written: Written) -> Written:
            tokens, end, cache = written
            last = jax.lax.dynamic_slice_in_dim(tokens, end - 1, 1)
            logits, cache = _applied(model, {**variables, CACHE: cache}, last, end - 1)
            likeliest = jnp.argmax(logits[0]).astype(tokens.dtype)
            return Written(tokens.at[end].set(likeliest), end + 1, cache)

        return jax.lax.while_loop(more, one, written)

    return run


def _applied(
    model: nn.Module, variables: Any, tokens: jax.Array, start: int | jax.Array
) -> tuple[jax.Array, Any]:
    """Return the logits of tokens from a position on, and the cache that has them."""
    logits, held = model.apply(variables, tokens[None], start=start, mutable=[CACHE])
    return logits[0], held[CACHE]
