"""Texts and conversations of JSON, as rows of tokens that hold several documents each.

    {"text": "A whole document."}
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content":
    "Hello"}]}

Other keys are ignored. A text counts as a whole. A conversation is written by the
model's own chat template, and only the answers of the assistant count, each with the
mark that ends it. Rows are filled with the longest document that still fits, so that
little is padding. A document that is longer than a row goes on in a row of its own,
where it does not see its beginning.
"""

import bisect
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..huggingface.tokenizer import Messages, Tokenizer
from .answers import answers
from .documents import document_files, made_of, split
from .text import Corpus

# Planes of a row.
TOKENS, DOCUMENTS, COUNTED = range(3)
# Commands of terminals
GREEN = "\x1b[32m"
PLAIN = "\x1b[0m"


class Example(NamedTuple):
    """A document: its ids, which of them count, and the bytes of those that do."""

    ids: np.ndarray
    counted: np.ndarray
    size: int


def load_examples(paths: Sequence[str], tokenizer: Tokenizer, sequence: int) -> Corpus:
    """Read files of documents (`models.training.documents`), and hold every twentieth
    document out, at least one.

    Returns:
      Parts int32 `[rows, 3, sequence + 1]`: ids; the document of each, 0 for padding;
        and whether it counts.

    Raises:
      FileNotFoundError: a file does not exist.
      ValueError: a document is not such an object, or there are fewer than two of them.
    """
    found = {}
    for one, made in made_of(paths, lambda value: example(value, tokenizer)):
        found[one.text] = made
    if len(found) < 2:
        raise ValueError(
            f"{', '.join(paths)} holds {len(found)} document(s), and one is held out;"
            " give at least 2"
        )
    parts = split(found)
    train, heldout = (packed(part, sequence + 1) for part in parts)
    counted = int(heldout[:, COUNTED].sum())
    files = tuple(map(str, document_files(paths)))
    return Corpus(
        train,
        heldout,
        files,
        files,
        sum(one.size for one in parts[1]) / counted,
    )


def example(line: Any, tokenizer: Tokenizer) -> Example:
    """Return the document of an object.

    Raises:
      ValueError: it is not one of the two forms, or nothing of it counts.
    """
    keys = [
        key for key in ("text", "messages") if isinstance(line, Mapping) and key in line
    ]
    if len(keys) != 1:
        has = sorted(line) if isinstance(line, Mapping) else type(line).__name__
        advice = ""
        if {"chosen", "rejected"} & set(has):
            advice = "; give pairs of answers alone"
        raise ValueError(
            'a line is an object with either "text" or "messages", and this one has'
            f" {has}{advice}"
        )
    check_halves(line[keys[0]])
    if keys == ["text"]:
        made = _text(line["text"], tokenizer)
    else:
        messages = checked_messages(line["messages"])
        if not any(map(is_answer, messages)):
            raise ValueError(
                'no message has the role "assistant", whose answers are learned'
            )
        made = chat(messages, tokenizer)
    if not made.counted[1:].any():
        raise ValueError(
            f"{keys[0]!r} has no token to learn; give at least two tokens, or an answer"
        )
    return made


def check_halves(value: Any) -> None:
    """Raise `ValueError` if a text holds half of a surrogate pair, which no tokenizer
    reads. Text that was cut at a number of UTF-16 units has one.
    """
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ValueError(
            f"a text holds {half!r}, half of a character of two parts; remove it"
        ) from error


def _text(text: Any, tokenizer: Tokenizer) -> Example:
    if not isinstance(text, str):
        raise ValueError(f'"text" is a {type(text).__name__}, and must be a string')
    ids = tokenizer.encode(text)
    if tokenizer.end is not None and ids[-1:] != [tokenizer.end]:
        ids.append(tokenizer.end)
    counted = np.ones(len(ids), bool)
    counted[:1] = False  # nothing predicts it
    return Example(np.asarray(ids, np.int32), counted, len(text.encode()))


def chat(messages: Messages, tokenizer: Tokenizer, asked: int = 0) -> Example:
    """Return a conversation, of which the answers after the first `asked` messages
    count.
    """
    whole, spans = answers(messages, tokenizer)
    spans = spans[sum(map(is_answer, messages[:asked])) :]
    ids, begins, ends = tokenizer.places(whole)
    counted = np.zeros(len(ids), bool)
    for begin, end in spans:
        counted |= (ends > begin) & (begins < end)
    counted[:1] = False
    size = sum(len(whole[begin:end].encode()) for begin, end in spans)
    return Example(ids, counted, size)


def is_answer(message: Mapping[str, Any]) -> bool:
    """Return whether the assistant says a message."""
    return bool(message["role"] == "assistant")


def checked_messages(messages: Any, name: str = "messages") -> list[dict[str, Any]]:
    """Return messages with a role and a content each.

    Raises:
      ValueError: they are not, or there are none.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError(f'"{name}" must be a list with at least one message')
    for place, one in enumerate(messages):
        if not isinstance(one, dict) or not all(
            isinstance(one.get(key), str) for key in ("role", "content")
        ):
            raise ValueError(
                f'message {place} must be an object whose "role" and "content" are'
                " strings"
            )
    return messages


def in_color(rows: np.ndarray, tokenizer: Tokenizer) -> str:
    """Return the first document of rows as text for a terminal, with the tokens that
    count in green.
    """
    document = rows[0][:, rows[0, DOCUMENTS] == 1]
    changes = np.flatnonzero(np.diff(document[COUNTED])) + 1
    parts: list[str] = []
    for part in np.split(document, changes, axis=1):
        text = tokenizer.decode(part[TOKENS].tolist())
        # A text may hold commands for the terminal
        plain = "".join(
            one if one.isprintable() or one == "\n" else "�" for one in text
        )
        parts.append(f"{GREEN}{plain}{PLAIN}" if part[COUNTED, 0] else plain)
    return "".join(parts)


def packed(examples: Sequence[Example], length: int) -> np.ndarray:
    """Return documents in rows, int32 `[rows, 3, length]`; planes are `TOKENS`,
    `DOCUMENTS` and `COUNTED`.

    >>> one = Example(np.array([7, 8, 9]), np.array([False, True, True]), 2)
    >>> packed([one, one], 6)[0].tolist()
    [[7, 8, 9, 7, 8, 9], [1, 1, 1, 2, 2, 2], [0, 1, 1, 0, 1, 1]]
    """
    pieces: list[Example] = []
    for one in examples:
        pieces += _pieces(one, length)
    pieces.sort(key=lambda piece: -len(piece.ids))
    rows: list[list[Example]] = []
    room: list[tuple[int, int]] = []  # (free places, row), sorted
    for piece in pieces:
        fit = bisect.bisect_left(room, (len(piece.ids), -1))
        free, row = room.pop(fit) if fit < len(room) else (length, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(piece)
        bisect.insort(room, (free - len(piece.ids), row))
    made = np.zeros((len(rows), 3, length), np.int32)
    for row, held in enumerate(rows):
        begin = 0
        for document, piece in enumerate(held, 1):
            place = slice(begin, begin + len(piece.ids))
            made[row, TOKENS, place] = piece.ids
            made[row, DOCUMENTS, place] = document
            made[row, COUNTED, place] = piece.counted
            begin = place.stop
    return made


def _pieces(one: Example, length: int) -> Iterator[Example]:
    """Yield a document in parts that fit a row and have a token that counts; each
    begins with the last one's end.
    """
    for begin in range(0, max(1, len(one.ids) - 1), length - 1):
        counted = one.counted[begin : begin + length].copy()
        counted[0] = False
        if counted.any():
            yield Example(one.ids[begin : begin + length], counted, 0)
