"""Trees of arguments and results of which some leaves are arrays, and the others stay Python values in a trace."""

import math
from collections.abc import Callable
from typing import Any

import jax

from tcfp_jax.layers import Absent


def arrays_of(tree: Any) -> tuple[list[Any], Any]:
    """(arrays of a tree, a function that puts arrays back): what is not an array stays a Python value when traced."""
    treedef: Any
    leaves, treedef = jax.tree.flatten(tree)
    arrays = [is_array(leaf) for leaf in leaves]
    others = [None if array else leaf for array, leaf in zip(arrays, leaves, strict=True)]

    def rebuild(found: list[Any]) -> Any:
        rest = iter(found)
        return treedef.unflatten([next(rest) if array else leaf for array, leaf in zip(arrays, others, strict=True)])

    return [_abstract(leaf) for array, leaf in zip(arrays, leaves, strict=True) if array], rebuild


@jax.tree_util.register_pytree_node_class
class Result:
    """What a function returned: its arrays, and beside them what is not an array and stays a Python value."""

    def __init__(self, arrays: list[Any], rebuild: Any) -> None:
        self.arrays, self.rebuild = arrays, rebuild

    def tree_flatten(self) -> Any:
        """Arrays are the children; the rest is compared by identity."""
        return self.arrays, self.rebuild

    @classmethod
    def tree_unflatten(cls, rebuild: Any, arrays: Any) -> "Result":
        """The same with other arrays."""
        return cls(list(arrays), rebuild)


def on_arrays(fn: Callable[..., Any], rebuild: Any) -> Callable[[Any], Result]:
    """A function of the arrays of its arguments alone, whatever else they hold."""

    def run(arrays: Any) -> Result:
        args, kwargs = rebuild(arrays)
        return Result(*arrays_of(fn(*args, **kwargs)))

    return run


def _abstract(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, Absent) else leaf


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array, or a shape that stands for one."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def devices_of(tree: Any) -> int:
    """How many devices share the values of the array that is split the most, as far as arrays say how they are split.

    >>> devices_of(jax.ShapeDtypeStruct((8, 4), "float32"))
    1
    """
    parts = [1]
    for leaf in jax.tree.leaves(tree):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, jax.sharding.Sharding) and is_array(leaf):
            part = math.prod(sharding.shard_shape(leaf.shape))
            parts.append(math.prod(leaf.shape) // max(1, part))
    return max(parts)


def has_values(leaf: Any) -> bool:
    """Whether an array has values, and is not a shape alone."""
    return not isinstance(leaf, jax.ShapeDtypeStruct | Absent)
