"""Stacks of layers on the host, of which a device holds one layer at a time.

The floats of a model take twice the memory of its stored weights or more. If the host
has them, or files do, the stored stack is allocated once and each layer is written into
its place: no float stack exists on a device.

Left out: which functions run over the layers (`rounding`, `inference.serving`).
"""

import functools
import types
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Sharding

from tcfp_jax.paths import PyTree

Index: TypeAlias = int | types.EllipsisType


class OnHost(Protocol):
    """A float parameter that is not on a device: a NumPy array, or an object that reads
    files.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape, `[layers, ...]` for a stack."""
        ...

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the parameter.

        Values read from it may have another float dtype, which is converted on the
        device.
        """
        ...

    def __getitem__(self, index: Index, /) -> np.ndarray:
        """Return the values of a layer, or of the whole parameter (`...`)."""
        ...


def is_on_host(leaf: object) -> TypeGuard[OnHost]:
    """Return whether a leaf of a tree is a parameter on the host.

    >>> is_on_host(np.ones((2, 4, 4))), is_on_host(jnp.ones((2, 4, 4)))
    (True, False)
    """
    if isinstance(leaf, Array) or np.isscalar(leaf):
        return False
    return hasattr(leaf, "shape") and hasattr(leaf, "__getitem__")


def on_device(leaf: PyTree, sharding: Sharding | None = None) -> PyTree:
    """Return an array instead of a parameter on the host; other leaves do not change.

    >>> on_device(np.ones(3, np.float32)).shape
    (3,)
    """
    if not is_on_host(leaf):
        return leaf
    return jax.device_put(np.asarray(leaf[...], leaf.dtype), sharding)


def by_layers(
    function: Callable[..., PyTree],
    stack: OnHost,
    *others: PyTree,
    shardings: PyTree | None = None,
) -> PyTree:
    """Return `jax.vmap(function)(stack, *others)`, with one layer of the stack on the
    device at a time.

    Use this if the result is smaller than the stack. The function must give each layer
    the bits that it gives a stack of them. Equal functions share compiled programs.

    Args:
      function: takes a layer, in the dtype in which the host holds it, and a layer of
        each of the others.
      stack: the layers, `[layers, ...]`.
      others: trees of arrays `[layers, ...]` on the device.
      shardings: a tree of the shardings of the result, or None.

    >>> by_layers(jnp.sum, np.ones((2, 3, 4), np.float32)).tolist()
    [12.0, 12.0]
    """
    entries = jax.ShapeDtypeStruct(stack.shape, stack.dtype)
    shapes = jax.eval_shape(jax.vmap(function), entries, *others)
    places = _hashable(shardings)
    made = _zeros(shapes, places)
    for layer in range(stack.shape[0]):
        made = _put(function, places, made, layer, stack[layer], others)
        # Else the host would run ahead, and layers would wait on the device
        jax.block_until_ready(made)
    return made


def at_once(
    function: Callable[..., PyTree],
    whole: Array | OnHost,
    *others: PyTree,
    shardings: PyTree | None = None,
) -> PyTree:
    """Return `function(whole, *others)`, compiled as by `by_layers`.

    Use this for a parameter that is not a stack, or that is on the device.

    >>> at_once(jnp.sum, np.ones((3, 4), np.float32)).tolist()
    12.0
    """
    values = whole[...] if is_on_host(whole) else whole
    return _called(function, _hashable(shardings), values, others)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _put(
    function: Callable[..., PyTree],
    places: tuple[Sharding, ...],
    made: PyTree,
    layer: Array,
    entry: Array,
    others: tuple[PyTree, ...],
) -> PyTree:
    """Return the stacks with the results of a layer in their place."""

    def own(array: Array) -> Array:
        return lax.dynamic_index_in_dim(array, layer, keepdims=False)

    def written(array: Array, new: Array) -> Array:
        bits = lax.dynamic_update_index_in_dim(_bits(array), _bits(new), layer, axis=0)
        return lax.bitcast_convert_type(bits, array.dtype)

    found = function(entry, *jax.tree.map(own, others))
    return _placed(jax.tree.map(written, made, found), places)


def _bits(array: Array) -> Array:
    """Return FP8 codes as integers; other arrays do not change.

    To write one layer of FP8, a CPU would convert the whole stack to another dtype and
    back.
    """
    is_float = jnp.issubdtype(array.dtype, jnp.floating)
    if is_float and jnp.finfo(array.dtype).bits == 8:
        return lax.bitcast_convert_type(array, jnp.uint8)
    return array


@functools.partial(jax.jit, static_argnums=(0, 1))
def _called(
    function: Callable[..., PyTree],
    places: tuple[Sharding, ...],
    whole: Array,
    others: tuple[PyTree, ...],
) -> PyTree:
    return _placed(function(whole, *others), places)


def _hashable(shardings: PyTree | None) -> tuple[Sharding, ...]:
    return tuple(jax.tree.leaves(shardings))


def _zeros(shapes: PyTree, places: tuple[Sharding, ...]) -> PyTree:
    leaves: list[Any]
    leaves, treedef = jax.tree.flatten(shapes)
    made = []
    for leaf, place in zip(leaves, places or [None] * len(leaves), strict=True):
        made.append(jnp.zeros(leaf.shape, leaf.dtype, device=place))
    return jax.tree.unflatten(treedef, made)


def _placed(tree: PyTree, places: tuple[Sharding, ...]) -> PyTree:
    """Return arrays with these shardings; none leaves them to JAX."""
    if not places:
        return tree
    leaves, treedef = jax.tree.flatten(tree)
    return jax.tree.unflatten(
        treedef, map(lax.with_sharding_constraint, leaves, places)
    )
