"""Texts of runs that compare ways to train, read once by each process."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp

from benchmarks.forks import Tokens
from models.huggingface.tokenizer import read_tokenizer
from models.nets.shapes import ModelConfig
from models.tokens import OWN
from models.training.data import IDS_SUFFIX, load_data
from models.training.text import Corpus, load_installed
from models.training.tokenized import tokenized


@functools.lru_cache(maxsize=2)
def corpus_of(data: tuple[str, ...], byte_limit: int, tokens: Tokens) -> Corpus:
    """Return installed Python, or the text of files and folders, as bytes or ids."""
    if data[:1] and data[0].endswith(IDS_SUFFIX):
        return _encoded(data, byte_limit)
    if data:
        text = load_data(data, byte_limit=byte_limit)
    else:
        text = load_installed(byte_limit=byte_limit)
    return text if tokens == "bytes" else tokenized(text, read_tokenizer(OWN))


def corpus_for(size: ModelConfig, byte_limit: int) -> Corpus:
    """Return installed Python as ids, or as bytes for the smallest models."""
    reads_ids = size.vocabulary >= read_tokenizer(OWN).size
    return corpus_of((), byte_limit, "bpe" if reads_ids else "bytes")


def _encoded(data: tuple[str, ...], byte_limit: int) -> Corpus:
    """Return ids that `models.tokens --encode` wrote, with the bytes of a token."""
    tokenizer = read_tokenizer(OWN)
    corpus = load_data(data, vocabulary=tokenizer.size, byte_limit=byte_limit)
    some = corpus.heldout[: 2**20].tolist()
    size = len(tokenizer.decode(some).encode())
    return replace(corpus, bytes_per_token=size / max(1, len(some)))


@functools.lru_cache(maxsize=1)
def on_device(data: tuple[str, ...], byte_limit: int, tokens: Tokens) -> jax.Array:
    """Return its part for training on the device, where runs share it."""
    return jnp.asarray(corpus_of(data, byte_limit, tokens).train)
