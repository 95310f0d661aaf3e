"""Check of an argument that takes one of a few words, for both libraries."""

from collections.abc import Iterable


def check_choice(
    name: str,
    value: object,
    choices: Iterable[str],
    hint: str = "",
) -> None:
    """Raise a ValueError unless `value` is one of the words `choices`.

    Use this for an argument whose type is a `Literal`, with `get_args` of it. A value
    that is not a string, such as an array, is unknown too.

    Args:
      name: the argument.
      value: the value that the user gave.
      choices: the words that it may be.
      hint: text that ends the message, such as " or None".

    >>> check_choice("tile", "row", ("vector", "square"))
    Traceback (most recent call last):
    ValueError: tile='row' is unknown; use one of ['vector', 'square']
    """
    words = list(choices)
    if not isinstance(value, str) or value not in words:
        raise ValueError(f"{name}={value!r} is unknown; use one of {words}{hint}")
