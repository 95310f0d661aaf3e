"""Names of the leaves of a tree, and nested dicts indexed by them.

This is the only place that reads JAX's key paths. Parameters, states and collections
are trees. People and checkpoints name a leaf by its path, such as "blocks/0/up/kernel".
The box that Flax may put around a leaf (`nn.Partitioned`, `nnx.Param`) is not part of
its name.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, TypeAlias

import jax

# Parameters, gradients or states; the type says that a function takes any tree
PyTree: TypeAlias = Any
Tree: TypeAlias = Mapping[str, PyTree]  # by path, or nested
Args: TypeAlias = tuple[PyTree, ...]
Function: TypeAlias = Callable[..., PyTree]
_SERIALIZED: list[type] = []


def path_names(path: Iterable[object]) -> list[str]:
    """Return the names along a JAX key path.

    The `value` of a box around the leaf is not among them.

    >>> from jax.tree_util import DictKey, GetAttrKey, SequenceKey
    >>> path_names((DictKey("up"), SequenceKey(0), GetAttrKey("value")))
    ['up', '0']
    """
    entries = list(path)
    if entries and entries[-1] == jax.tree_util.GetAttrKey("value"):
        entries.pop()
    return [_entry_name(entry) for entry in entries]


def join(*parts: str) -> str:
    """Join paths into one; the path of a root is empty and adds nothing.

    >>> join("", "mlp/up", "kernel")
    'mlp/up/kernel'
    """
    return "/".join(filter(None, parts))


def named_leaves(
    tree: PyTree, is_leaf: Callable[[PyTree], bool] | None = None
) -> tuple[list[tuple[list[str], PyTree]], jax.tree_util.PyTreeDef]:
    """Return every leaf in order, after the names along its path, and the structure.

    >>> found, structure = named_leaves({"up": {"kernel": 1, "bias": 2}})
    >>> found, structure.num_leaves
    ([(['up', 'bias'], 2), (['up', 'kernel'], 1)], 2)
    """
    entries, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return [(path_names(path), leaf) for path, leaf in entries], treedef


def leaves(
    tree: PyTree, is_leaf: Callable[[PyTree], bool] | None = None
) -> dict[str, PyTree]:
    """Return the leaves of a tree by path.

    >>> leaves({"up": {"kernel": 1, "bias": 2}})
    {'up/bias': 2, 'up/kernel': 1}
    """
    return {"/".join(names): leaf for names, leaf in named_leaves(tree, is_leaf)[0]}


def entries(collection: PyTree) -> dict[str, PyTree]:
    """Return the values of nested mappings by path.

    A tree that is not a mapping, such as a stored weight, stays whole.

    >>> entries({"up": {"kernel": (1, 2)}})
    {'up/kernel': (1, 2)}
    """
    return leaves(collection, lambda node: not isinstance(node, Mapping))


def find(tree: PyTree, names: Sequence[str]) -> PyTree:
    """Return the value at a path of nested mappings, or None.

    >>> find({"up": {"kernel": 1}}, ["up", "kernel"])
    1
    >>> find({"up": 1}, ["up", "kernel"]) is None
    True
    """
    for name in names:
        if not isinstance(tree, Mapping) or name not in tree:
            return None
        tree = tree[name]
    return tree


def put(tree: MutableMapping[str, PyTree], names: Sequence[str], value: object) -> None:
    """Set the value at a path of nested dicts, and make the dicts on the way.

    >>> tree = {}
    >>> put(tree, ["up", "kernel"], 1)
    >>> tree
    {'up': {'kernel': 1}}
    """
    if not names:
        raise ValueError(
            "the tree is a bare array without a name; put it in a dict, as Flax does"
        )
    for name in names[:-1]:
        tree = tree.setdefault(name, {})
    tree[names[-1]] = value


def serialize_with_flax(*kinds: type) -> None:
    """Let `flax.serialization` save these registered pytrees by their children's names.

    Nothing here imports Flax: classes that come before it are registered by the next
    call (of `tcfp_jax.layers`).
    """
    _SERIALIZED.extend(kinds)
    flax = sys.modules.get("flax.serialization")
    while flax is not None and _SERIALIZED:
        flax.register_serialization_state(_SERIALIZED.pop(), _to_state, _from_state)


def _children(
    node: PyTree,
) -> tuple[dict[str, PyTree], jax.tree_util.PyTreeDef]:
    entries, treedef = jax.tree_util.tree_flatten_with_path(
        node, is_leaf=lambda child: child is not node
    )
    return {_entry_name(path[0]): child for path, child in entries}, treedef


def _to_state(node: PyTree) -> dict[str, PyTree]:
    flax = sys.modules["flax.serialization"]
    children, _ = _children(node)
    return {name: flax.to_state_dict(child) for name, child in children.items()}


def _from_state(node: PyTree, state: Mapping[str, PyTree]) -> PyTree:
    flax = sys.modules["flax.serialization"]
    children, treedef = _children(node)
    if set(children) != set(state) or _present(children) != _present(state):
        raise ValueError(
            f"the state of a {type(node).__name__} has {_present(state)}, the target"
            f" {_present(children)}; restore into a target with the format that was"
            " saved"
        )
    restored = []
    for name, child in children.items():
        restored.append(flax.from_state_dict(child, state[name], name))
    return treedef.unflatten(restored)


def _present(children: Mapping[str, PyTree]) -> list[str]:
    return sorted(name for name, child in children.items() if child is not None)


def _entry_name(entry: object) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    raise TypeError(
        f"entry {entry!r} of a path has no name; use nested dicts, lists or dataclasses"
    )
