"""Values that the variables of an NNX model hold: read, compared, and listed by path."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
from flax import nnx


def raw_value(variable: Any) -> Any:
    """The value of a variable; an array that is an attribute without a variable is its own."""
    return variable.get_raw_value() if isinstance(variable, nnx.Variable) else variable


def flat_state(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """What a state holds by path, in its own order: names and numbers beside each other, as in a list, have none."""
    for name, value in state.items():
        if isinstance(value, Mapping) and not isinstance(value, nnx.Variable):
            yield from flat_state(value, (*path, name))
        else:
            yield (*path, name), value


def tree_of(variable: Any) -> tuple[Any, list[Any]]:
    """What tells whether a variable's value changed: it may be a tree, changed in place."""
    leaves, treedef = jax.tree.flatten(raw_value(variable))
    return treedef, leaves


def is_same(one: tuple[Any, list[Any]], other: tuple[Any, list[Any]]) -> bool:
    """Whether two values of `tree_of` are one."""
    return one[0] == other[0] and all(a is b for a, b in zip(one[1], other[1], strict=True))
