"""Text as the ids of a tokenizer."""

import itertools
from collections.abc import Iterator

import numpy as np
from tqdm import tqdm

from ..huggingface.tokenizer import Tokenizer
from .text import SEPARATOR, Corpus

# Texts; with their offsets, tokens take a hundred times the bytes of their ids
AT_ONCE = 256


def tokenized(corpus: Corpus, tokenizer: Tokenizer) -> Corpus:
    """Return a corpus of bytes as ids, file by file.

    Bytes that are not UTF-8 become the replacement character.
    """
    parts = []
    size = 0
    for part in (corpus.train, corpus.heldout):
        ids = [np.zeros(0, np.uint32)]  # a part may be empty
        size = 0
        progress = tqdm(texts_of(part), "tokens", unit=" files", leave=False, delay=3)
        texts = iter(progress)
        while some := list(itertools.islice(texts, AT_ONCE)):
            ids += tokenizer.encode_plain(some)
            size += sum(len(text.encode()) for text in some)
        parts.append(np.concatenate(ids))
    train, heldout = parts
    ratio = size / max(1, len(heldout))
    return Corpus(train, heldout, corpus.train_files, corpus.heldout_files, ratio)


def texts_of(part: np.ndarray) -> Iterator[str]:
    """Yield the files in a part of a corpus, without empty ones."""
    for text in part.tobytes().split(SEPARATOR):
        if text:
            yield (text + SEPARATOR).decode("utf-8", "replace")
