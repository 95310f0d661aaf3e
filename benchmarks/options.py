"""Values of options, and a counter on the terminal, for the commands of benchmarks."""

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from models.training.progress import shown


def positive(text: str) -> int:
    """Return the value of an option that counts; use it as the type of an argument.

    >>> positive("3")
    3

    Raises:
      ArgumentTypeError: the text is not an integer of at least 1.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"{text} is not an integer of at least 1; give one"
        )
    return int(text)


def chosen_of(option: str, text: str | None, allowed: Sequence[Any]) -> tuple[Any, ...]:
    """Return the names in "NAME,NAME", or all allowed names without a text.

    >>> chosen_of("recipes", "tcfp12, error bfloat16,bf16", ["bf16", "tcfp12", "tcfp12, error bfloat16"])
    ('tcfp12, error bfloat16', 'bf16')

    Raises:
      ValueError: a name is not allowed.
    """
    names: list[Any] = [] if text else [*allowed]
    for name in map(str.strip, text.split(",") if text else ()):
        joined = f"{names[-1]}, {name}" if names else None  # a name with a comma
        names = [*names[:-1], joined] if joined in allowed else [*names, name]
    if unknown := [name for name in names if name not in allowed]:
        raise ValueError(
            f"--{option} has {unknown}, which are unknown; use names of {list(allowed)}"
        )
    return tuple(names)


@contextlib.contextmanager
def counted() -> Iterator[Callable[[int], None]]:
    """Show how many rows there are after how long; the first one may take most of the
    time.
    """
    found = [0]
    with shown(lambda: f"{found[0]} rows"):
        yield lambda rows: found.__setitem__(0, rows)
