"""Your own text to train on: files and folders as bytes, or one NumPy file of token
ids.

    python -m models.train --data novels/ notes.txt
        any UTF-8 text, folders recursively, as bytes
    python -m models.train --model llama-tiny --data ids.npy --vocabulary 50257
    python -m models.train --model llama-tiny --data novels/ --tokenizer tokenizer.json
        text as ids
    python -m models.train --model FOLDER --data chats.jsonl
        see `models.training.documents` and `models.training.examples`

Files are in the order of a hash of their names, each text once, and the last twentieth
is held out: some of many files, or the end of one. If a limit is reached, the files
that stay are a sample of all. Ids keep their order.
"""

import codecs
import datetime
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ..huggingface.tokenizer import Tokenizer, read_tokenizer
from .documents import (
    HELDOUT_SHARE,
    SNIFFED,
    check_paths,
    document_files,
    holds_documents,
    is_named_documents,
    visible_files,
)
from .text import SEPARATOR, Corpus, stable_hash

IDS_SUFFIX = ".npy"
MOST_TOKENS = 2**31 - 1  # the start of a window is an int32


@dataclass(frozen=True)
class Data:
    """Text of a run.

    Attributes:
      paths: Files and folders of text, read as bytes, or one `.npy` of token ids
        (`load_data`). Empty means the source of Python's standard
        library.
      vocabulary: Number of token ids. The model gets rows for them if it has fewer.
      tokenizer: A `tokenizer.json` that makes ids of text. Files of documents
        (`models.training.documents`) then hold texts and conversations, packed into
        rows (`models.training.examples`).
      corpus_bytes: Largest size of the text in bytes; of token ids, of their file.
      date: Day that chat templates take for today, such as "2026-11-28"; None is the
        day on which they are asked. A resumed run needs the day of its beginning.

    Raises:
      ValueError: the names contradict each other, token ids have no vocabulary, the
        size is below 1, or the date is none.
    """

    paths: tuple[str, ...] = ()
    vocabulary: int | None = None
    tokenizer: str | None = None
    corpus_bytes: int = 16 * 2**20
    date: str | None = None

    def __post_init__(self) -> None:
        check_names(self.paths, self.vocabulary, self.tokenizer)
        if self.date is not None:
            _check_date(self.date)
        if not isinstance(self.paths, tuple):
            raise ValueError(
                f"data={self.paths!r} is not a tuple; write data={tuple(self.paths)}"
            )
        if self.corpus_bytes < 1:
            raise ValueError(f"corpus_bytes={self.corpus_bytes} must be at least 1")

    @property
    def packs(self) -> bool:
        """If the data are documents that are packed into rows."""
        return bool(document_files(self.paths))

    def read_tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer of the text, for which today is the date of the run.

        Raises:
          FileNotFoundError: its file does not exist.
          ValueError: a file is damaged, or the tokenizer has more ids than the
            vocabulary.
        """
        if self.tokenizer is None:
            return None
        found = read_tokenizer(Path(self.tokenizer))
        if self.vocabulary is not None and self.vocabulary < found.size:
            raise ValueError(
                f"vocabulary={self.vocabulary} is less than the {found.size} ids of"
                f" {self.tokenizer}; leave it, or set vocabulary={found.size} or more"
            )
        return replace(found, date=self.date)


def _check_date(date: str) -> None:
    try:
        datetime.date.fromisoformat(date)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"date={date!r} is not a day; write it as in 2026-11-28"
        ) from error


def check_names(
    data: Sequence[str], vocabulary: int | None, tokenizer: str | None = None
) -> None:
    """Raise `ValueError` if names of files and a vocabulary do not fit together;
    nothing is read.

    >>> check_names(("ids.npy",), 50257)
    """
    if isinstance(data, str) or not all(isinstance(path, str) for path in data):
        raise ValueError(
            f"data={data!r} is not a sequence of paths as strings; write"
            f" data=({str(data)!r},)"
        )
    ids = [path for path in data if path.endswith(IDS_SUFFIX)]
    if ids and len(data) > 1:
        raise ValueError(
            f"data={list(data)} is more than {ids[0]}; give one {IDS_SUFFIX} of token"
            " ids, or text alone"
        )
    if ids and vocabulary is None:
        raise ValueError(
            f"{ids[0]} holds token ids, but no vocabulary is given; set vocabulary to"
            " their number"
        )
    if ids and tokenizer is not None:
        raise ValueError(
            f"{ids[0]} holds token ids already, and tokenizer={tokenizer!r} is for"
            " text; leave it"
        )
    if vocabulary is not None and not ids and tokenizer is None:
        raise ValueError(
            f"vocabulary={vocabulary} is for token ids, and text is bytes; leave it, or"
            f" give one {IDS_SUFFIX} as data"
        )
    if tokenizer is not None and vocabulary is None:
        raise ValueError(
            f"tokenizer={tokenizer!r} without a vocabulary; set it to the tokenizer's"
            " number of ids"
        )
    documents = [path for path in data if is_named_documents(path)]
    if documents and tokenizer is None:
        raise ValueError(_without_tokenizer(documents[0]))
    if documents:
        document_files([path for path in data if not Path(path).is_dir()])
    if vocabulary is not None and vocabulary < 1:
        raise ValueError(f"vocabulary={vocabulary} must be at least 1")


def _without_tokenizer(path: str) -> str:
    return (
        f"{path} holds documents for a tokenizer; name one, or a model's folder that"
        " has one"
    )


def load_data(
    data: Sequence[str], *, vocabulary: int | None = None, byte_limit: int = 2**63 - 1
) -> Corpus:
    """Read text, or map token ids, and hold the last twentieth out.

    Args:
      data: Files and folders of UTF-8 text, without hidden files and files that are not
        text; or one `.npy` of integers, which is mapped and not read at once.
      vocabulary: Number of token ids of an `.npy`.
      byte_limit: Largest size in bytes of the text or of the array, about; nothing
        after it is read.

    Raises:
      FileNotFoundError: a path does not exist, or a folder holds no text.
      ValueError: names do not fit together, or a path is a device or a pipe. A named
        file is not text, or an array is not a row of integers. An id is out of range,
        or there are more tokens than an int32 can count.
    """
    check_names(data, vocabulary)
    check_paths(data)
    for path in document_files(data):
        raise ValueError(_without_tokenizer(str(path)))
    if vocabulary is not None:
        tokens = _ids(Path(data[0]), vocabulary, byte_limit)
        names = [Path(data[0]).name]
        ends = np.array([len(tokens)])
    else:
        names, texts = _texts(data, byte_limit)
        ends = np.cumsum([len(text) for text in texts])
        tokens = np.frombuffer(b"".join(texts), np.uint8)
    if len(tokens) > MOST_TOKENS:
        raise ValueError(
            f"{len(tokens)} tokens exceed {MOST_TOKENS}, a run's limit; give less or"
            " lower corpus_bytes"
        )
    border = len(tokens) - len(tokens) // HELDOUT_SHARE
    begins = ends - np.diff(ends, prepend=0)
    return Corpus(
        tokens[:border],
        tokens[border:],
        tuple(
            name for name, begin in zip(names, begins, strict=True) if begin < border
        ),
        tuple(name for name, end in zip(names, ends, strict=True) if end > border),
        1.0 if vocabulary is None else None,
    )


def _ids(path: Path, vocabulary: int, byte_limit: int) -> np.ndarray:
    try:
        ids: np.ndarray = np.lib.format.open_memmap(path, mode="r")
    except (ValueError, OverflowError) as error:
        raise ValueError(
            f"{path} is not an array of numbers ({error}); write one with numpy.save"
        ) from error
    if ids.dtype.kind not in "iu" or ids.ndim != 1:
        raise ValueError(
            f"{path} holds {ids.dtype} {list(ids.shape)}, but token ids are a row of"
            " integers; save them as uint16 or uint32, flattened"
        )
    ids = ids[: byte_limit // ids.dtype.itemsize]
    if len(ids) and int(ids.min()) < 0:
        raise ValueError(f"{path} has the id {ids.min()}; token ids are not negative")
    if len(ids) and int(ids.max()) >= vocabulary:
        raise ValueError(
            f"{path} has ids up to {ids.max()}, but vocabulary={vocabulary} and every"
            f" id must be below it; use vocabulary={int(ids.max()) + 1} or the"
            " tokenizer's own"
        )
    return ids


def _texts(data: Sequence[str], byte_limit: int) -> tuple[list[str], list[bytes]]:
    """Return (names, texts) in order, up to the limit."""
    found: dict[Path, str] = {}
    for root in map(Path, data):
        if root.is_dir():
            found |= {
                path: f"{root.name}/{path.relative_to(root).as_posix()}"
                for path in visible_files(root)
            }
        else:
            found[root] = root.name
    named = {Path(path).resolve() for path in data}
    texts: dict[Path, bytes] = {}
    total = 0
    seen: set[bytes] = set()
    for path in sorted(found, key=lambda path: (stable_hash(found[path]), path)):
        if total >= byte_limit:
            break
        if path.resolve() in texts:
            continue
        text = _read_text(path, byte_limit - total)
        if text is None:
            if path.resolve() in named:
                raise ValueError(
                    f"{path} is not text: not UTF-8 or with zero bytes; give text, or"
                    f" {IDS_SUFFIX} of ids"
                )
            continue
        if holds_documents(text[:SNIFFED]):
            raise ValueError(
                f"{path} holds conversations, whose JSON would be learned as text; give"
                " it a name that ends in .jsonl or .json, and a tokenizer"
            )
        # no copy of a training file is held out
        digest = hashlib.sha256(text).digest()
        if digest in seen:
            continue
        seen.add(digest)
        texts[path.resolve()] = text + SEPARATOR
        total += len(text) + 1
    if not texts:
        raise FileNotFoundError(
            f"{', '.join(data)} holds no text: looked recursively at {len(found)}"
            " files, hidden ones left out, for UTF-8 without zero bytes; name a folder"
            " or files with text"
        )
    names = {path.resolve(): name for path, name in found.items()}
    return [names[path] for path in texts], list(texts.values())


def _read_text(path: Path, most: int) -> bytes | None:
    """Return the first `most` bytes of a file; None if they are not text."""
    parts: list[bytes] = []
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        with path.open("rb") as file:
            # A read of no bytes, at the limit, ends the loop, too
            while part := file.read(min(most, 2**20)):
                if SEPARATOR in part:
                    return None
                decoder.decode(part)
                parts.append(part)
                most -= len(part)
            decoder.decode(b"", final=most > 0)  # the limit may cut a character
    except UnicodeDecodeError:
        return None
    return b"".join(parts) or None
