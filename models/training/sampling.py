"""Greedy continuation of a prompt by a model in training; each token computes the whole
text again.
"""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

import tcfp_jax
from models.huggingface.tokenizer import read_tokenizer
from models.training.settings import TrainConfig
from models.training.steps import TrainState, model_of

NEW_TOKENS, STEP = 64, 64


def continued(
    config: TrainConfig, state: TrainState, prompt: str, count: int = NEW_TOKENS
) -> str:
    """Return up to `count` new tokens as text, the likeliest each time, without the one
    that ends the answer.
    """
    tokenizer = (
        None if config.tokenizer is None else read_tokenizer(Path(config.tokenizer))
    )
    ids = list(prompt.encode()) if tokenizer is None else tokenizer.prompt(prompt)
    ids = ids[-max(1, config.size.context - count) :]
    length = min(config.size.context, -(-(len(ids) + count) // STEP) * STEP)
    tokens = (
        jnp.zeros((1, length), jnp.int32)
        .at[0, : len(ids)]
        .set(jnp.asarray(ids, jnp.int32))
    )
    ends = (
        []
        if tokenizer is None
        else [*tokenizer.stops, *([] if tokenizer.end is None else [tokenizer.end])]
    )
    limit = min(length, len(ids) + count)
    variables = {"params": state.params, "tcfp": tcfp_jax.layer_state(state.opt_state)}
    tokens, stopped = _greedy(model_of(config))(
        variables, tokens, len(ids), limit, jnp.asarray(ends, jnp.int32)
    )
    new = [
        one for one in tokens[0, len(ids) : int(stopped)].tolist() if one not in ends
    ]
    return (
        bytes(new).decode("utf-8", "replace")
        if tokenizer is None
        else tokenizer.decode(new)
    )


@functools.lru_cache(maxsize=4)
def _greedy(model: nn.Module) -> Any:
    @jax.jit
    def run(
        variables: Any, tokens: jax.Array, begin: int, limit: int, ends: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        def more(held: tuple[jax.Array, jax.Array]) -> jax.Array:
            tokens, n = held
            return (n < limit) & ((n == begin) | ~jnp.isin(tokens[0, n - 1], ends))

        def one(held: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            tokens, n = held
            logits: Any = model.apply(variables, tokens)
            return tokens.at[0, n].set(
                jnp.argmax(logits[0, n - 1]).astype(tokens.dtype)
            ), n + 1

        return jax.lax.while_loop(more, one, (tokens, jnp.asarray(begin, jnp.int32)))

    return run
