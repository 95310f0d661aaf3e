"""Texts of runs that compare ways to train, read once by each process."""

import functools
import hashlib
import os
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.forks import Tokens
from benchmarks.records import ROOT
from models.huggingface.tokenizer import read_tokenizer
from models.nets.shapes import ModelConfig
from models.tokens import OWN
from models.training.data import IDS_SUFFIX, load_data
from models.training.text import Corpus, load_installed
from models.training.tokenized import tokenized

# Ids of longer texts are kept for later calls: encoding takes half a minute.
LONG = 2**24
KEPT = ROOT / "runs" / "texts"


@functools.lru_cache(maxsize=2)
def corpus_of(data: tuple[str, ...], byte_limit: int, tokens: Tokens) -> Corpus:
    """Return installed Python, or the text of files and folders, as bytes or ids."""
    if data[:1] and data[0].endswith(IDS_SUFFIX):
        return _encoded(data, byte_limit)
    if data:
        text = load_data(data, byte_limit=byte_limit)
    else:
        text = load_installed(byte_limit=byte_limit)
    return text if tokens == "bytes" else in_ids(text)


def in_ids(text: Corpus, folder: Path = KEPT) -> Corpus:
    """Return a corpus of bytes as ids of `OWN`; those of a long text are kept."""
    if len(text.train) < LONG:
        return tokenized(text, read_tokenizer(OWN))
    name = hashlib.sha256(OWN.read_bytes() + text.digest.encode()).hexdigest()[:16]
    path = folder / f"{name}.npz"
    if not path.exists():
        made = tokenized(text, read_tokenizer(OWN))
        folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{name}.{os.getpid()}.npz")
        np.savez(
            partial,
            train=made.train,
            heldout=made.heldout,
            bytes_per_token=np.float64(made.bytes_per_token or 0),
        )
        partial.replace(path)
        return made
    with np.load(path) as kept:
        return replace(
            text,
            train=kept["train"],
            heldout=kept["heldout"],
            bytes_per_token=float(kept["bytes_per_token"]),
        )


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
