"""Pairs of answers to a prompt, of which one is chosen, as rows of tokens.

    {"prompt": "Hi", "chosen": "Hello", "rejected": "Go away"}
    {"prompt": [{"role": "user", "content": "Hi"}],
     "chosen": [{"role": "assistant", "content": "Hello"}],
     "rejected": [{"role": "assistant", "content": "Go away"}]}

Fields and forms are those of TRL. Other keys are ignored. Each answer has a row of its
own, after its prompt, and the tokens of the answer count, with the mark that ends it.
A row that is too long loses its end, as with TRL's `truncation_mode="keep_start"`: the
prompt stays, and the answer is cut. A pair from which nothing can be learned is left
out, and its place is told.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..huggingface.tokenizer import Tokenizer
from ..nets.shapes import LlamaConfig, ModelConfig
from .documents import document_files, made_of, read_documents, split
from .examples import (
    Example,
    chat,
    check_halves,
    checked_messages,
    is_answer,
    packed,
)
from .text import Corpus

FIELDS = ("prompt", "chosen", "rejected")
EMPTY = "an answer is empty"
LONG = "the prompt fills the row"
EQUAL = "the answers are equal"
SHOWN_PLACES = 5


@dataclass(frozen=True)
class Preferences:
    """Direct preference optimization (DPO), with the names and defaults of TRL.

    Attributes:
      beta: Strength of the pull towards the reference.
      label_smoothing: Share of pairs whose answers are taken for exchanged (cDPO).

    Raises:
      ValueError: a value is out of its range.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.beta < math.inf:
            raise ValueError(f"beta={self.beta} must be positive and finite")
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(
                f"label_smoothing={self.label_smoothing} must be at least 0 and below"
                " 0.5, from which on the rejected answer is preferred"
            )


# Their names in settings and options.
NAMES = tuple(vars(Preferences()))


def preferences_of(settings: Mapping[str, Any]) -> Preferences | None:
    """Return the preferences of settings by name, of which None are not given.

    >>> preferences_of({"beta": 0.5, "label_smoothing": None})
    Preferences(beta=0.5, label_smoothing=0.0)
    """
    given = {name: value for name, value in settings.items() if value is not None}
    return Preferences(**given) if given else None


def check_run(model: str | ModelConfig, size: ModelConfig, monitor: int) -> None:
    """Raise `ValueError` if a run cannot learn from pairs."""
    if not isinstance(size, LlamaConfig):
        raise ValueError(
            f"pairs of answers with model {model!r}, whose loss is of single tokens;"
            " use a Llama"
        )
    if monitor:
        raise ValueError(
            f"monitor={monitor} with pairs of answers: an observed step would mix the"
            " products of policy and reference; leave monitor"
        )


def settings_for(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of `Preferences` if the data of settings are pairs, else
    nothing.

    Raises:
      ValueError: a setting of pairs is given for other data.
    """
    if are_pairs(given.get("data", ())):
        return vars(Preferences())
    for name in NAMES:
        if given.get(name) is not None:
            raise ValueError(
                f"{name}={given[name]} is for pairs of answers, and the data have none;"
                f' give lines with "prompt", "chosen" and "rejected", or leave {name}'
            )
    return {}


def are_pairs(paths: Sequence[str]) -> bool:
    """Return whether files hold pairs of answers, by the first document."""
    for path in document_files(paths):
        if path.is_file():
            for one in read_documents(path):
                return isinstance(one.value, Mapping) and _is_pair(one.value)
    return False


def _is_pair(line: Mapping[str, Any]) -> bool:
    """Return whether an object is meant as a pair: it has both answers, or has one of
    them and is not another document.

    >>> _is_pair({"prompt": "Hi", "chosen": "Hello"})
    True
    """
    answers = {"chosen", "rejected"} & line.keys()
    is_other = {"text", "messages"} & line.keys()
    return len(answers) == 2 or bool(answers and not is_other)


def load_pairs(paths: Sequence[str], tokenizer: Tokenizer, sequence: int) -> Corpus:
    """Read files of pairs, and hold every twentieth pair out, at least one.

    Returns:
      Parts int32 `[pairs, 2, 3, sequence + 1]`: the chosen answer after its prompt,
        and the rejected one, each a row of `models.training.examples.load_examples`.

    Raises:
      FileNotFoundError: a file does not exist.
      ValueError: a line is not a pair, or fewer than two pairs are left.
    """
    found = {}
    left_out: dict[str, list[str]] = {}
    for one, made in made_of(paths, lambda line: pair(line, tokenizer, sequence + 1)):
        if isinstance(made, str):
            left_out.setdefault(made, []).append(one.where)
        else:
            found[one.text] = made
    notes = tuple(_note(reason, places) for reason, places in left_out.items())
    if len(found) < 2:
        raise ValueError(
            f"{', '.join(paths)} holds {len(found)} pair(s) to learn from, and one is"
            f" held out; {''.join(f'{note}; ' for note in notes)}give at least 2"
        )
    train, heldout = map(np.stack, split(found))
    files = tuple(map(str, document_files(paths)))
    return Corpus(train, heldout, files, files, None, notes)


def _note(reason: str, places: Sequence[str]) -> str:
    """Describe the pairs that are left out for a reason."""
    shown = "; ".join(places[:SHOWN_PLACES])
    more = len(places) - SHOWN_PLACES
    rest = f"; and {more} more" if more > 0 else ""
    return f"{len(places)} pair(s) left out because {reason} ({shown}{rest})"


def pair(line: Any, tokenizer: Tokenizer, length: int) -> np.ndarray | str:
    """Return the rows of a pair, int32 `[2, 3, length]`, or the reason why nothing can
    be learned from it.

    Raises:
      ValueError: it is not a pair.
    """
    prompt, *texts = _fields(line)
    if not all(map(_has_words, texts)):
        return EMPTY
    rows = []
    for text in texts:
        made = _example(prompt, text, tokenizer)
        counted = made.counted[:length]
        if not counted.any():
            return LONG
        rows.append(packed([Example(made.ids[:length], counted, 0)], length)[0])
    if np.array_equal(*rows):
        return EQUAL
    return np.stack(rows)


def _fields(line: Any) -> list[Any]:
    """Return prompt, chosen and rejected: three strings, or three lists of messages."""
    has = sorted(line) if isinstance(line, Mapping) else type(line).__name__
    if not isinstance(line, Mapping) or not {*FIELDS} <= {*line}:
        advice = "give each line all three"
        if isinstance(line, Mapping) and {*FIELDS} - {*line} == {"prompt"}:
            advice = "move the beginning that both answers share into the prompt"
        raise ValueError(
            'a pair is an object with "prompt", "chosen" and "rejected", and this one'
            f" has {has}; {advice}"
        )
    values = [line[name] for name in FIELDS]
    check_halves(values)
    if all(isinstance(value, str) for value in values):
        return values
    if not all(isinstance(value, list) for value in values):
        kinds = ", ".join(type(value).__name__ for value in values)
        raise ValueError(
            "prompt, chosen and rejected must be three strings, or three lists of"
            f" messages, and these are {kinds}"
        )
    for name, value in zip(FIELDS, values, strict=True):
        if name == "prompt" or value:
            checked_messages(value, name)
        if name != "prompt" and value and not any(map(is_answer, value)):
            raise ValueError(
                f'"{name}" has no message with the role "assistant", whose answers are'
                " learned"
            )
    return values


def _has_words(answer: Any) -> bool:
    """Return whether an answer says something."""
    if isinstance(answer, str):
        return bool(answer.strip())
    return any(is_answer(one) and one["content"].strip() for one in answer)


def _example(prompt: Any, answer: Any, tokenizer: Tokenizer) -> Example:
    """Return a prompt with its answer, which counts."""
    if isinstance(prompt, list):
        if tokenizer.template is None:
            raise ValueError(
                f"{tokenizer.path.parent} has no chat template; give the prompt and"
                " the answers as strings instead of messages"
            )
        return chat([*prompt, *answer], tokenizer, len(prompt))
    ids, _, ends = tokenizer.places(prompt + answer)
    # The tokenizer puts these before any text.
    before = [one for one in tokenizer.encode("") if one != tokenizer.end]
    behind = [] if tokenizer.end is None else [tokenizer.end]
    whole = np.array([*before, *ids.tolist(), *behind], np.int32)
    counted = np.ones(len(whole), bool)
    counted[: len(before)] = False
    counted[len(before) : len(before) + len(ids)] = ends > len(prompt)
    counted[:1] = False  # nothing predicts it
    return Example(whole, counted, len(answer.encode()))


def in_rows(text: np.ndarray) -> np.ndarray:
    """Return the rows of documents or of pairs one after another, `[rows, 3, length]`.

    >>> in_rows(np.zeros((5, 2, 3, 9))).shape
    (10, 3, 9)
    """
    return text.reshape(-1, *text.shape[-2:])
