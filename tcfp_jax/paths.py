"""Names of the leaves of a tree, and nested dicts by name: the only place that turns a JAX key path into words.

Parameters, states and collections of Flax and Optax are trees; people and checkpoints name a leaf by its path, such as
"blocks/0/up/kernel". Flax may put a leaf in a box (`nn.Partitioned`, `nnx.Param`), which is not part of its name.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax


def path_names(path: Iterable[Any]) -> list[str]:
    """The names along a JAX key path, without the `value` of a box that the leaf is in.

    Raises:
      TypeError: an entry of the path has no name.

    >>> path_names((jax.tree_util.DictKey("up"), jax.tree_util.SequenceKey(0), jax.tree_util.GetAttrKey("value")))
    ['up', '0']
    """
    entries = list(path)
    if entries and isinstance(entries[-1], jax.tree_util.GetAttrKey) and entries[-1].name == "value":
        entries.pop()
    return [_entry_name(entry) for entry in entries]


def join(*parts: str) -> str:
    """One path of several; the path of a root is empty and adds nothing.

    >>> join("", "mlp/up", "kernel")
    'mlp/up/kernel'
    """
    return "/".join(filter(None, parts))


def leaves(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """The leaves of a tree by path.

    >>> leaves({"up": {"kernel": 1, "bias": 2}})
    {'up/bias': 2, 'up/kernel': 1}
    """
    entries, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return {"/".join(path_names(path)): leaf for path, leaf in entries}


def entries(collection: Any) -> dict[str, Any]:
    """What nested mappings hold, by path: a value that is a tree but not a mapping, such as a stored weight, is whole.

    >>> entries({"up": {"kernel": (1, 2)}})
    {'up/kernel': (1, 2)}
    """
    return leaves(collection, lambda node: not isinstance(node, Mapping))


def find(tree: Any, names: Sequence[str]) -> Any:
    """What nested mappings hold at a path, or None.

    >>> find({"up": {"kernel": 1}}, ["up", "kernel"]), find({"up": 1}, ["up", "kernel"])
    (1, None)
    """
    for name in names:
        if not isinstance(tree, Mapping) or name not in tree:
            return None
        tree = tree[name]
    return tree


def put(tree: dict[str, Any], names: Sequence[str], value: Any) -> None:
    """Set the value at a path of nested dicts, which are made on the way.

    Raises:
      ValueError: the path is empty.

    >>> tree = {}
    >>> put(tree, ["up", "kernel"], 1)
    >>> tree
    {'up': {'kernel': 1}}
    """
    if not names:
        raise ValueError("the tree is a bare array without a name; put it in a dict, as Flax does")
    for name in names[:-1]:
        tree = tree.setdefault(name, {})
    tree[names[-1]] = value


def _entry_name(entry: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    raise TypeError(f"entry {entry!r} of a path has no name; use nested dicts, lists or dataclasses")
