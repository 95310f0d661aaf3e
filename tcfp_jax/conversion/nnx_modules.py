"""The modules of an NNX model, and the attributes that a conversion adds to them."""

from typing import Any

import jax
from flax import nnx
from jax import Array

from tcfp_jax import paths
from tcfp_jax.conversion.policy import Policy
from tcfp_jax.layers import Absent
from tcfp_jax.paths import PyTree, Tree

# The attributes that conversion adds to a module. They are gone inside of a call, and
# after `export`.
PATH = "tcfp_path"
STORED = "tcfp_stored"
SAMPLE = "tcfp_sample"
KEYS = "tcfp_keys"
# The path of a node in a model: names of attributes and numbers in lists.
Path = tuple[Any, ...]


def nodes_of(model: nnx.Module | list[nnx.Module], kind: type) -> dict[Path, Any]:
    """Return the nodes of a kind by path, each one once.

    Shared nodes have the first of their paths.
    """
    return {
        path: node for path, node in nnx.iter_graph(model) if isinstance(node, kind)
    }


def modules_of(model: nnx.Module) -> dict[str, nnx.Module]:
    """Return the modules of a model by path, each one once.

    >>> list(modules_of(nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))))
    ['layers/0', 'layers', '']
    """
    modules = nodes_of(model, nnx.Module)
    return {"/".join(map(str, path)): module for path, module in modules.items()}


def conversion_of(module: object) -> Policy | None:
    """Return the policy of a converted module, or None.

    Raises:
      ValueError: another package made its own class of a converted one.
    """
    kind = type(module)
    chosen = getattr(kind, "tcfp_policy", None)
    if chosen is not None and "tcfp_policy" not in vars(kind):
        raise ValueError(
            f"the class {kind.__name__} of this module was made of a converted one by"
            " another package; export(model) first, let that package change it, and"
            " convert it then"
        )
    return chosen


def converted_parts(model: nnx.Module) -> dict[str, nnx.Module]:
    """Return the converted modules that no converted module holds, by path.

    A model that was converted as a whole is its own one part.
    """
    parts: dict[str, nnx.Module] = {}
    # Modules come after the modules that they hold
    for path, module in reversed(modules_of(model).items()):
        is_held = any(is_below(path, part) for part in parts)
        if conversion_of(module) is not None and not is_held:
            parts[path] = module
    return parts


def is_below(path: str, part: str) -> bool:
    """Return whether a path is that of a part of a model, or leads into it.

    >>> is_below("ab/kernel", "a"), is_below("a/kernel", "a"), is_below("a", "")
    (False, True, True)
    """
    return part == "" or path == part or path.startswith(f"{part}/")


def own_class(module: object) -> type:
    """Return the class that a module had before its conversion."""
    kind = type(module)
    return kind if conversion_of(module) is None else kind.__mro__[1]


def strip(model: nnx.Module | list[nnx.Module]) -> int:
    """Give modules their own classes again, and remove all that was added.

    Returns how many changed.
    """
    converted = list(filter(conversion_of, nodes_of(model, nnx.Module).values()))
    for module in converted:
        for name in {PATH, STORED, SAMPLE, KEYS} & set(vars(module)):
            delattr(module, name)
        object.__setattr__(module, "__class__", own_class(module))
    return len(converted)


def is_variable(leaf: object) -> bool:
    """Return whether a leaf is a variable of NNX."""
    return isinstance(leaf, nnx.Variable)


def stored_weights(model: nnx.Module) -> dict[str, PyTree]:
    """Return the stored weights that the modules hold now, by path."""

    def read(leaf: Any) -> Array:
        return leaf[...] if is_variable(leaf) else leaf

    weights = {}
    for path, module in modules_of(model).items():
        held: Tree = getattr(module, STORED, {})
        for name, weight in held.items():
            values = jax.tree.map(read, weight, is_leaf=is_variable)
            weights[paths.join(path, name)] = values
    return weights


def absent_of(model: nnx.Module) -> dict[str, tuple[Absent, list[Path]]]:
    """Return parameters that exist as shapes, by the path of their first place.

    Each has its shape and all of its places.
    """
    found: dict[str, tuple[Absent, list[Path]]] = {}
    first: dict[int, str] = {}
    for path, node in nnx.iter_graph(model):
        if isinstance(node, Absent):
            name = first.setdefault(id(node), "/".join(map(str, path)))
            _, places = found.setdefault(name, (node, []))
            places.append(path)
    return found


def put(owner: Any, name: str | int, value: object) -> None:
    """Set an attribute of a module, or an entry of a list or a dict of modules."""
    if isinstance(name, int) or isinstance(owner, dict):
        owner[name] = value
        return
    setattr(owner, name, nnx.data(value) if is_variable(value) else value)
