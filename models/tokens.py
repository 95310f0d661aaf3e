"""Tokenizers in the form of Hugging Face, with the chat template of their folder, and
one trained on our own text.

    tokenizer = read_tokenizer(Path("folder/tokenizer.json"))
    tokenizer.encode("text"), tokenizer.rendered([{"role": "user", "content": "Hi"}])

    python -m models.tokens --out tokenizer.json --size 32768

trains a byte-level BPE on the training part of the source of Python's standard library.
`models/python-bpe-32768.json` is its result on Python 3.11.7, of the text whose digest
begins with 551f11d4812bee51.

    python -m models.tokens --encode novels/ --out ids.npy

writes the ids of text, which `models.train --data ids.npy --vocabulary 32768` reads.
"""

import argparse
import functools
import hashlib
import itertools
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2.ext
import jinja2.sandbox
import numpy as np
import tokenizers
from tqdm import tqdm

from models.data import load_data
from models.progress import shown
from models.text import SEPARATOR, Corpus, load_corpus

OWN = Path(__file__).with_name("python-bpe-32768.json")
FILE, SETTINGS, TEMPLATE = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
GENERATION = "generation_config.json"
# Texts; with their offsets, tokens take a hundred times the bytes of their ids
AT_ONCE = 256
# Files next to a tokenizer.json that belong to it.
COMPANIONS = (
    FILE,
    SETTINGS,
    TEMPLATE,
    "special_tokens_map.json",
    GENERATION,
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer and the settings in its folder.

    Attributes:
      path: Its file.
      model: The `tokenizers.Tokenizer`.
      specials: Names such as "eos_token" and their text.
      template: Chat template, or None.
      stops: Ids at which an answer ends, besides `end`.
    """

    path: Path
    model: tokenizers.Tokenizer
    specials: Mapping[str, str]
    template: str | None
    stops: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Number of ids: the largest one and 1."""
        return max(self.model.get_vocab().values()) + 1

    @property
    def end(self) -> int | None:
        """The id that ends a text, or None."""
        text = self.specials.get("eos_token")
        found: int | None = None if text is None else self.model.token_to_id(text)
        return found

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, with those that the tokenizer puts before and
        behind it.
        """
        return list(self.model.encode(text).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special ones included."""
        return str(
            self.model.decode([int(one) for one in ids], skip_special_tokens=False)
        )

    def rendered(
        self, messages: Sequence[Mapping[str, Any]], *, opened: bool = False
    ) -> str:
        """Return a conversation as the chat template writes it, `opened` with the
        beginning of an answer.

        Raises:
          ValueError: the tokenizer has no template, or the template refuses the
            conversation.
        """
        if self.template is None:
            raise ValueError(
                f'{self.path.parent} has no chat template; give {{"text": ...}} instead'
                " of messages"
            )
        try:
            found: str = _compiled(self.template).render(
                messages=messages, add_generation_prompt=opened, **self.specials
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(
                f"the chat template refuses the conversation: {error}"
            ) from error
        return found

    def prompt(self, text: str) -> list[int]:
        """Return the ids that ask a model: a question if there is a chat template, else
        the text itself.
        """
        if self.template is None:
            return self.encode(text)
        whole = self.rendered([{"role": "user", "content": text}], opened=True)
        return list(self.model.encode(whole, add_special_tokens=False).ids)


@functools.lru_cache(maxsize=8)
def read_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer of a `tokenizer.json`, with the settings that lie next to
    it.

    Raises:
      FileNotFoundError: the file does not exist.
      ValueError: a file is damaged.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no tokenizer {path}; name a tokenizer.json of Hugging Face's"
            " tokenizers"
        )
    try:
        model = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises bare exceptions
        raise ValueError(
            f"{path} is not a tokenizer.json of Hugging Face's tokenizers: {error}"
        ) from error
    model.no_padding()
    model.no_truncation()
    template, found = path.with_name(TEMPLATE), _object(path.with_name(SETTINGS))
    # one id, or several
    stops = _object(path.with_name(GENERATION)).get("eos_token_id", ())
    texts = {
        name: one["content"] if isinstance(one, dict) else one
        for name, one in found.items()
        if "token" in name
    }
    specials = {name: text for name, text in texts.items() if isinstance(text, str)}
    written = (
        template.read_text(encoding="utf-8")
        if template.is_file()
        else found.get("chat_template")
    )
    if isinstance(written, list):  # several by name
        written = next(
            (one["template"] for one in written if one["name"] == "default"), None
        )
    return Tokenizer(
        path, model, specials, written, tuple(np.ravel(stops).astype(int).tolist())
    )


def _object(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file, empty if there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise ValueError(
            f"{path} is not JSON: {error}; copy the model's own"
        ) from error
    if not isinstance(found, dict):
        raise ValueError(
            f"{path} holds a {type(found).__name__} instead of an object; copy the"
            " model's own"
        )
    return found


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    """Return a template in the environment of Transformers."""

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    # The template comes with a downloaded model, so it runs in a sandbox.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(
        value, ensure_ascii=False, **options
    )
    # Without today's date, of which templates ask if it is there: the tokens of a file
    # would change every day.
    environment.globals["raise_exception"] = refuse
    # Transformers' own tags around answers; `models.examples` finds them without.
    plain = re.sub(
        r"generation\s*(-?%})",
        r"if true \1",
        re.sub(r"endgeneration\s*(-?%})", r"endif \1", template),
    )
    return environment.from_string(plain)


def tokenized(corpus: Corpus, tokenizer: Tokenizer) -> Corpus:
    """Return a corpus of bytes as ids, file by file; bytes that are not UTF-8 become
    the replacement character.
    """
    parts, sizes = [], []
    for part in (corpus.train, corpus.heldout):
        ids, size, texts = (
            [],
            0,
            iter(tqdm(_texts(part), "tokens", unit=" files", leave=False, delay=3)),
        )
        while some := list(itertools.islice(texts, AT_ONCE)):
            found = tokenizer.model.encode_batch_fast(some, add_special_tokens=False)
            ids += [np.asarray(one.ids, np.uint32) for one in found]
            size += sum(len(text.encode()) for text in some)
        parts.append(np.concatenate(ids))
        sizes.append(size)
    ratio = sizes[1] / max(1, len(parts[1]))
    return Corpus(parts[0], parts[1], corpus.train_files, corpus.heldout_files, ratio)


def _texts(part: np.ndarray) -> Iterator[str]:
    for text in part.tobytes().split(SEPARATOR):
        if text:
            yield (text + SEPARATOR).decode("utf-8", "replace")


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
    model.train_from_iterator(_texts(corpus.train), trainer)
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
