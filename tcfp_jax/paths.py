"""Names along the paths of a tree."""

from typing import Any

import jax


def path_names(path: Any) -> list[str]:
    """Names along a path, without the `value` of the box (`nn.Partitioned`, `nnx.Param`) that a leaf may be in."""
    if path and isinstance(path[-1], jax.tree_util.GetAttrKey) and path[-1].name == "value":
        path = path[:-1]
    return [_entry_name(entry) for entry in path]


def _entry_name(entry: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    raise TypeError(f"parameter path entry {entry!r} has no name; use nested dicts, lists or dataclasses")
