"""Values that the variables of an NNX model hold: read, listed by path, and what a method changed of them."""

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


class Gone:
    """Stands for an attribute that a method deleted."""


def changes(nodes: Any, before: Mapping[Any, Any], values: Mapping[Any, Any], absent: set[Any]) -> tuple[Any, Any]:
    """(new values of variables by path, attributes that are new, replaced or gone by module and name).

    Args:
      nodes: what a method ran on.
      before: the attributes of its modules before, by path.
      values: of its variables before (`tree_of`), by path.
      absent: places of parameters that exist as shapes.

    Raises:
      NotImplementedError: a module was made.
    """
    after = {path: node for path, node in nnx.iter_graph(nodes) if isinstance(node, nnx.Variable)}
    changed = {
        path: raw_value(after[path])
        for path, held in values.items()
        if path in after and not is_same(tree_of(after[path]), held)
    }
    modules = {path: node for path, node in nnx.iter_graph(nodes) if isinstance(node, nnx.Module) and path in before}
    attributes = {}
    for path, module in modules.items():
        now, old = vars(module), before[path]
        for name in {*now, *old}:
            if name.startswith("_pytree__") or now.get(name, Gone) is old.get(name, Gone) or (path, name) in absent:
                continue
            value = now.get(name, Gone())
            if isinstance(value, nnx.Module):
                raise NotImplementedError(
                    f"{type(module).__name__}.{name} is a module that the method makes while it runs; call the model "
                    "once before conversion, so that it exists"
                )
            attributes[path, name] = value
            changed.pop((*path, name), None)
    # Lists, because a path has names and numbers, which have no order.
    return list(changed.items()), [(path, name, value) for (path, name), value in attributes.items()]
