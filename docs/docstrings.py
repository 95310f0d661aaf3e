"""Docstrings as the site shows them; griffe, which reads the sources for mkdocstrings, runs it as an extension.

A doctest in the middle of a docstring becomes a block of code: Markdown would take its `>>>` for three quotations.
"""

import re
from typing import Any

import griffe

_DOCTEST = re.compile(r"^(?P<indent>[ ]*)>>> .*(?:\n(?P=indent)(?! *$).+)*", re.MULTILINE)


def fence_doctests(text: str) -> str:
    """The text with every doctest between fences.

    >>> print(fence_doctests("Add.\\n\\n>>> 1 + 1\\n2"))
    Add.
    <BLANKLINE>
    ```pycon
    >>> 1 + 1
    2
    ```
    """

    def fence(match: re.Match[str]) -> str:
        lines = match[0].replace("  # doctest: +ELLIPSIS", "").splitlines()
        indent = match["indent"]
        shown = [line for line in lines if line.strip() != "<BLANKLINE>"]
        return "\n".join([f"{indent}```pycon", *shown, f"{indent}```"])

    return _DOCTEST.sub(fence, text)


class Doctests(griffe.Extension):
    """Fences the doctests of every object."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of a module, class, function or attribute before anybody parses it."""
        if obj.docstring is not None:
            obj.docstring.value = fence_doctests(obj.docstring.value)
