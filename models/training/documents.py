"""Files of documents: JSON lines, or an array in one `.json`.

    chats.jsonl  chats.JSONL  chats.ndjson  chats.json  a folder of such files

The name of a file says that it holds documents; for a `.json` in a folder, its content
does. So conversations are never learned as plain text, with their JSON.
"""

import codecs
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tqdm import tqdm

from .text import stable_hash

LINES = (".jsonl", ".ndjson")
ARRAY = ".json"
MOST = 2**24  # bytes of a document; a long novel has a quarter of them
MOST_OF_ARRAY = 2**28
SNIFFED = 2**16
HELDOUT_SHARE = 20
# Entries that make an object a document, here or for other trainers.
KINDS: dict[str, Any] = {
    "messages": list,
    "conversations": list,
    "text": str,
    "chosen": (str, list),
}
CHATS = ("messages", "conversations")
_Made = TypeVar("_Made")


class Document(NamedTuple):
    """A document: its place for messages, its text, and its value."""

    where: str
    text: str
    value: Any


def is_named_documents(path: str) -> bool:
    """Return whether the name of a file alone says that it holds documents.

    >>> is_named_documents("chats.JSONL"), is_named_documents("novel.txt")
    (True, False)
    """
    return path.lower().endswith((*LINES, ARRAY))


def document_files(data: Sequence[str]) -> list[Path]:
    """Return the files of documents among files and folders, or none if all are text.

    Raises:
      ValueError: some are documents, and others are not.
    """
    found: list[Path] = []
    others: list[Path] = []
    for root in map(Path, data):
        if root.is_dir():
            for path in visible_files(root):
                (found if _is_documents(path) else others).append(path)
        else:
            (found if is_named_documents(root.name) else others).append(root)
    if found and others:
        raise ValueError(
            f"{found[0]} holds documents, and {others[0]} does not; give files of"
            f" documents ({', '.join((*LINES, ARRAY))}), or text, alone"
        )
    return list(dict.fromkeys(found))


def visible_files(root: Path) -> Iterator[Path]:
    """Yield the files below a folder in order, without hidden ones."""
    for path in sorted(root.rglob("*")):
        parts = path.relative_to(root).parts
        if path.is_file() and not any(part.startswith(".") for part in parts):
            yield path


def _is_documents(path: Path) -> bool:
    """Return whether a file in a folder holds documents."""
    name = path.name.lower()
    if not name.endswith(ARRAY):
        return name.endswith(LINES)
    with path.open("rb") as file:
        return holds_documents(file.read(SNIFFED), tuple(KINDS))


def holds_documents(begin: bytes, keys: Sequence[str] = CHATS) -> bool:
    """Return whether a file, of which this is the beginning, is JSON whose first object
    is a document by one of the keys.

    >>> holds_documents(b'[{"messages": []}, {'), holds_documents(b'"messages"')
    (True, False)
    """
    begin = begin.removeprefix(codecs.BOM_UTF8).lstrip()
    begin = begin.removeprefix(b"[").lstrip()
    if not begin.startswith(b"{"):
        return False
    text = begin.decode("utf-8", "replace")
    try:
        first, _ = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):  # cut, or damaged
        return any(re.search(rf'"{key}"\s*:\s*\[', text) for key in CHATS)
    return any(isinstance(first.get(key), KINDS[key]) for key in keys)


def check_paths(data: Sequence[str]) -> None:
    """Check that files and folders exist, and have an end.

    Raises:
      FileNotFoundError: a path does not exist.
      ValueError: a path is a device or a pipe.
    """
    for path in map(Path, data):
        if not path.exists():
            raise FileNotFoundError(
                f"data {path} does not exist (looked from {Path.cwd()}); correct the"
                " path"
            )
        if not (path.is_file() or path.is_dir()):
            raise ValueError(
                f"data {path} is a device or a pipe, which may have no end; give files"
                " and folders"
            )


def read_documents(path: Path) -> Iterator[Document]:
    """Yield the documents of a file.

    Raises:
      ValueError: a document is longer than `MOST` bytes or is not JSON. The message
        names the file and the place.
    """
    with path.open("rb") as file:
        begin = file.peek(SNIFFED).removeprefix(codecs.BOM_UTF8).lstrip()
        if path.suffix.lower() == ARRAY and begin.startswith(b"["):
            yield from _items(path, file)
        else:
            yield from _lines(path, file)


def made_of(
    paths: Sequence[str], make: Callable[[Any], _Made]
) -> Iterator[tuple[Document, _Made]]:
    """Yield each document of files and folders with the result of a function of its
    value.

    Raises:
      FileNotFoundError: a file does not exist.
      ValueError: a document is not JSON, or the function raised it; the message names
        the place.
    """
    check_paths(paths)
    for path in document_files(paths):
        for one in tqdm(read_documents(path), path.name, leave=False, delay=3):
            try:
                made = make(one.value)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{one.where}: {error}") from error
            yield one, made


def split(found: Mapping[str, _Made]) -> tuple[list[_Made], list[_Made]]:
    """Return the results to learn from and those held out, every twentieth by its text
    and at least one. So no copy of a document is held out.
    """
    order = sorted(found, key=stable_hash)
    held = max(1, len(order) // HELDOUT_SHARE)
    results = [found[text] for text in order]
    return results[held:], results[:held]


def _lines(path: Path, file: BufferedReader) -> Iterator[Document]:
    lines = iter(functools.partial(file.readline, MOST + 1), b"")
    for number, line in enumerate(lines, 1):
        where = f"{path}, line {number}"
        _check_size(where, len(line))
        text, value = _parsed(where, line)
        if text:
            yield Document(where, text, value)


def _items(path: Path, file: BufferedReader) -> Iterator[Document]:
    content = file.read(MOST_OF_ARRAY + 1)
    if len(content) > MOST_OF_ARRAY:
        raise ValueError(
            f"{path}: an array has at most {MOST_OF_ARRAY:,} bytes; write JSON lines"
        )
    _, values = _parsed(str(path), content)
    for number, value in enumerate(values, 1):
        where = f"{path}, item {number}"
        text = json.dumps(value)
        _check_size(where, len(text))
        yield Document(where, text, value)


def _check_size(where: str, size: int) -> None:
    if size > MOST:
        raise ValueError(
            f"{where}: it is longer than {MOST:,} bytes; split it into documents"
        )


def _parsed(where: str, content: bytes) -> tuple[str, Any]:
    """Return JSON as text and as a value; nothing of an empty line."""
    try:
        # Editors of Windows put a mark before the first character
        text = content.removeprefix(codecs.BOM_UTF8).decode("utf-8").rstrip("\r\n")
        return (text, json.loads(text)) if text.strip() else ("", None)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{where}: {error}; give one object of JSON in each line"
        ) from error
