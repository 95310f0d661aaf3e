"""Batches of a run: windows of a text or rows of documents, on the device, as functions
of the step.

text  integers `[tokens]`  windows `[batch, sequence + 1]` that begin anywhere
documents  int32 `[rows, 3, sequence + 1]`
    rows in an order that each epoch draws anew (`models.training.examples`)
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from ..nets.losses import IGNORED
from ..nets.meshes import split_batch
from .examples import COUNTED, DOCUMENTS, TOKENS
from .settings import TrainConfig
from .text import Corpus


def windows(
    config: TrainConfig, step: jax.Array, text: jax.Array, key: jax.Array
) -> jax.Array:
    """Return the windows of the next step."""
    if text.ndim > 1:
        return windows_at(text, _shuffled(config, step, len(text), key), config)
    step_key = jax.random.fold_in(key, step)
    offsets = jax.random.randint(
        step_key, (config.batch,), 0, text.shape[0] - config.sequence
    )
    return windows_at(text, offsets, config)


def _shuffled(
    config: TrainConfig, step: jax.Array, rows: int, key: jax.Array
) -> jax.Array:
    """Return the rows of the next step, of an order that each epoch draws anew."""
    first = step * config.batch // rows
    epochs = first + jnp.arange(config.batch // rows + 2)
    orders = jax.vmap(
        lambda epoch: jax.random.permutation(jax.random.fold_in(key, epoch), rows)
    )(epochs)
    places = step * config.batch - first * rows + jnp.arange(config.batch)
    return orders.reshape(-1)[places]


def windows_at(text: jax.Array, offsets: jax.Array, config: TrainConfig) -> jax.Array:
    """Return int32 `[batch, sequence + 1]`: inputs without the last token, targets
    without the first.

    Rows of documents are `[batch, 3, sequence + 1]`, as they are in the text.
    """
    if text.ndim > 1:
        return split_batch(text[split_batch(offsets)])
    places = split_batch(offsets)[:, None] + jnp.arange(config.sequence + 1)
    return split_batch(text[places].astype(jnp.int32))


def heldout_windows(config: TrainConfig, text: jax.Array) -> int:
    """Return the number of windows of the evaluation; of documents, at most all
    rows.
    """
    if text.ndim == 1:
        return config.heldout_windows
    return min(config.heldout_windows, len(text))


def heldout_offsets(config: TrainConfig, text: jax.Array) -> jax.Array:
    """Return the first token, or the row, of every window, int32 `[batches, rows]`;
    zeros fill up the last batch.
    """
    last = len(text) - config.sequence - 1 if text.ndim == 1 else len(text) - 1
    offsets = np.linspace(0, last, heldout_windows(config, text)).astype(np.int32)
    padded = np.pad(offsets, (0, -len(offsets) % config.rows))
    return jnp.asarray(padded.reshape(-1, config.rows))


def check_corpus(corpus: Corpus, config: TrainConfig) -> None:
    """Raise `ValueError` if the training or the held-out text is shorter than one
    window.
    """
    read = corpus.train.nbytes + corpus.heldout.nbytes
    # A file of ids is cut at a whole id, so up to one id fewer than asked for may be
    # read.
    cut = read + corpus.train.itemsize > config.data.corpus_bytes
    more = (
        f"raise corpus_bytes (now {config.data.corpus_bytes})"
        if cut
        else "give more text"
    )
    for name, text in (("training", corpus.train), ("held-out", corpus.heldout)):
        check_text(name, text, config, more)


def check_text(
    name: str, text: Any, config: TrainConfig, more: str = "give more text"
) -> None:
    """Raise `ValueError`, which says how to get more, if `text` is shorter than one
    window.
    """
    if text.ndim == 1 and len(text) <= config.sequence:
        raise ValueError(
            f"the {name} text has {len(text)} tokens, but one window needs"
            f" {config.sequence + 1}; {more}, or shorten the sequence (now"
            f" {config.sequence})"
        )


def window_losses(
    model: nn.Module,
    params: Any,
    quantized: Any,
    windows: jax.Array,
    key: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Return the cross-entropy of every predicted token, float32 `[batch, sequence]`,
    and which count; None is all.
    """
    rngs = None if key is None else {"tcfp": key}
    variables = {"params": params, "tcfp": quantized}
    of_tokens: Any
    if windows.ndim == 2:
        of_tokens = model.apply(variables, windows[:, :-1], windows[:, 1:], rngs=rngs)
        return of_tokens, None
    inputs = windows[:, TOKENS, :-1]
    documents = windows[:, DOCUMENTS, :-1]
    counted = windows[:, COUNTED, 1:] > 0
    targets = jnp.where(counted, windows[:, TOKENS, 1:], IGNORED)
    of_tokens = model.apply(variables, inputs, targets, documents, rngs=rngs)
    return jnp.where(counted, of_tokens, 0.0), counted
