"""The text of a run, which is read once per process."""

import functools

from .batches import check_corpus
from .data import Data, load_data
from .examples import load_examples
from .preferences import load_pairs
from .settings import TrainConfig
from .text import Corpus, load_corpus
from .tokenized import tokenized


def corpus_of(config: TrainConfig) -> Corpus:
    """Return the text of a run, which is read once per process."""
    packed = config.sequence if config.data.packs else None
    return _corpus(config.data, packed, config.preferences is not None)


def checked_corpus(config: TrainConfig) -> Corpus:
    """Return the text of a run, after a check that both parts hold a window.

    Raises:
      ValueError: a part does not; the message says how to repair it.
    """
    corpus = corpus_of(config)
    check_corpus(corpus, config)
    return corpus


@functools.lru_cache(maxsize=4)
def _corpus(data: Data, packed: int | None, holds_pairs: bool) -> Corpus:
    """Return a text; `packed` is the length of rows of documents or of pairs."""
    limit = data.corpus_bytes
    tokenizer = data.read_tokenizer()
    if tokenizer is None:
        if not data.paths:
            return load_corpus(byte_limit=limit)
        return load_data(data.paths, vocabulary=data.vocabulary, byte_limit=limit)
    if packed is not None:
        reader = load_pairs if holds_pairs else load_examples
        return reader(data.paths, tokenizer, packed)
    if data.paths:
        text = load_data(data.paths, byte_limit=limit)
    else:
        text = load_corpus(byte_limit=limit)
    return tokenized(text, tokenizer)
