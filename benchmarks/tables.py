"""Tables for the terminal and for Markdown."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal


def print_rows(rows: Sequence[Any], *columns: str) -> None:
    """Print fields of dataclasses as columns; floats have four digits.

    Without a choice all fields that have a value are shown, those of the class itself
    before the fields of a timing that it inherits.
    """
    if not rows:
        return
    shown = columns or _columns_with_values(rows)
    cells = [[_cell(getattr(row, column)) for column in shown] for row in rows]
    print_table(shown, cells)


def _columns_with_values(rows: Sequence[Any]) -> tuple[str, ...]:
    inherited_last = sorted(
        (field.name for field in fields(rows[0])),
        key=lambda name: name not in type(rows[0]).__annotations__,
    )
    return tuple(
        name
        for name in inherited_last
        if any(_is_plain(getattr(row, name)) for row in rows)
    )


def _is_plain(value: object) -> bool:
    return value is not None and not isinstance(value, list | tuple | Mapping)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def print_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns, the first one left-aligned."""
    lines = [titles, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        cells[0] = line[0].ljust(widths[0])
        print("  ".join(cells))


def markdown_table(
    titles: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    last: Literal["left", "right"] = "right",
) -> str:
    """Return a Markdown table with a left-aligned first column.

    `last="left"` is for a last column of text.

    >>> print(markdown_table(["a", "b"], [["1", "2"]]))
    | a | b |
    |---|--:|
    | 1 | 2 |
    """
    lines = ["| " + " | ".join(line) + " |" for line in (titles, *rows)]
    end = {"left": "---|", "right": "--:|"}[last]
    rule = "|---|" + "--:|" * (len(titles) - 2) + end
    return "\n".join([lines[0], rule, *lines[1:]])


def times(shape: str) -> str:
    """Return a shape for readers.

    >>> times("8x16x32")
    '8 × 16 × 32'
    """
    return shape.replace("x", " × ")
