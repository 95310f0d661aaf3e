"""Train a tokenizer on our own text, or write the ids of text.

    python -m models.tokens --out tokenizer.json --size 32768

trains a byte-level BPE on the training part of the source of Python's standard library.
`models/python-bpe-32768.json` is its result on Python 3.11.7, of the text whose digest
begins with 551f11d4812bee51.

    python -m models.tokens --encode novels/ --out ids.npy

writes the ids of text, which `models.train --data ids.npy --vocabulary 32768` reads.
"""

import argparse
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tokenizers

from .huggingface.tokenizer import Tokenizer, read_tokenizer
from .training.data import load_data
from .training.progress import shown
from .training.text import Corpus, load_corpus
from .training.tokenized import texts_of, tokenized

OWN = Path(__file__).with_name("python-bpe-32768.json")


def train_tokenizer(corpus: Corpus, size: int) -> tokenizers.Tokenizer:
    """Return a byte-level BPE of `size` ids, of the training part of a corpus. Equal
    corpora give equal tokenizers.
    """
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator(texts_of(corpus.train), trainer)
    return model


def write_ids(data: Sequence[str], tokenizer: Tokenizer, out: Path) -> Corpus:
    """Write the ids of text, files and folders as in `load_data`, to a `.npy`, and
    return them.
    """
    corpus = tokenized(load_data(data), tokenizer)
    dtype = np.uint16 if tokenizer.size <= 2**16 else np.uint32
    np.save(
        out, np.concatenate([corpus.train.astype(dtype), corpus.heldout.astype(dtype)])
    )
    return corpus


def main(arguments: list[str] | None = None) -> int:
    """Train a tokenizer and print the digests of text and file, or encode text and
    print the number of ids.
    """
    parser = argparse.ArgumentParser(
        prog="python -m models.tokens", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="tokenizer.json to write, or ids.npy"
    )
    parser.add_argument("--size", type=int, help="number of ids (default: 32768)")
    parser.add_argument("--corpus-bytes", type=int, help="of text (default: 16 MiB)")
    parser.add_argument(
        "--encode",
        nargs="+",
        default=[],
        metavar="PATH",
        help="train nothing, write ids of this text",
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        default=OWN,
        help="of --encode (default: this project's)",
    )
    options = parser.parse_args(arguments)
    if options.encode:
        if (options.size, options.corpus_bytes) != (None, None):
            parser.error(
                "--encode trains no tokenizer, and --size and --corpus-bytes are for"
                " training; leave them"
            )
        ids = write_ids(options.encode, read_tokenizer(options.tokenizer), options.out)
        print(
            f"{len(ids.train) + len(ids.heldout):,} ids, {ids.bytes_per_token:.3f}"
            " held-out bytes per token"
        )
        return 0
    with shown(lambda: "reading the text and training"):
        corpus = load_corpus(
            byte_limit=(
                16 * 2**20 if options.corpus_bytes is None else options.corpus_bytes
            )
        )
        train_tokenizer(corpus, 32_768 if options.size is None else options.size).save(
            str(options.out), pretty=False
        )
    held = tokenized(corpus, read_tokenizer(options.out))
    print(
        f"text {corpus.digest[:16]}, {options.out}"
        f" {hashlib.sha256(options.out.read_bytes()).hexdigest()[:16]},"
        f" {options.out.stat().st_size:,} bytes, {held.bytes_per_token:.3f} held-out"
        " bytes per token"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
