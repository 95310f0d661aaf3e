"""Extension of griffe, which reads the sources for mkdocstrings: adapts docstrings to
Markdown.

A doctest becomes a block of code, because Markdown reads `>>>` as three quotations.
Arguments that share a description get one each, because griffe knows one name per line.
"""

import re
from typing import Any

import griffe

_DOCTEST = re.compile(
    r"^(?P<indent>[ ]*)>>> .*(?:\n(?P=indent)(?! *$).+)*", re.MULTILINE
)
_SHARED = re.compile(
    r"^(?P<indent>[ ]+)(?P<names>\w+(?:, \w+)+): (?P<text>.*(?:\n(?P=indent)[ ]+.*)*)",
    re.MULTILINE,
)


def fence_doctests(text: str) -> str:
    """Return the text with every doctest between fences.

    >>> fence_doctests(">>> 1 + 1").splitlines()
    ['```pycon', '>>> 1 + 1', '```']
    """

    def fence(match: re.Match[str]) -> str:
        lines = match[0].replace("  # doctest: +ELLIPSIS", "").splitlines()
        indent = match["indent"]
        shown = [line for line in lines if line.strip() != "<BLANKLINE>"]
        return "\n".join([f"{indent}```pycon", *shown, f"{indent}```"])

    return _DOCTEST.sub(fence, text)


def split_names(text: str) -> str:
    """Return the text with one entry for each name of a shared entry.

    >>> print(split_names("  width, height: of the image"))
      width: of the image
      height: of the image
    """
    entry = lambda match, name: f"{match['indent']}{name}: {match['text']}"
    return _SHARED.sub(
        lambda match: "\n".join(
            entry(match, name) for name in match["names"].split(", ")
        ),
        text,
    )


class Docstrings(griffe.Extension):
    """Extension that rewrites the docstring of every object."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite a docstring before griffe parses it."""
        if obj.docstring is not None:
            obj.docstring.value = split_names(fence_doctests(obj.docstring.value))
