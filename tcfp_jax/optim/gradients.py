"""`value_and_grad` and `grad` for trees with stored weights: JAX's own, with a float gradient for each stored weight.

The gradient of a float8 array is float8: three bits without a scale. So each stored weight gets a `slot`, zeros of the
kernel's shape, and the function is differentiated with respect to the slots. Products read the FP8 values and send the
gradient to the slot. Nothing reads the zeros, so the compiled program has none.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.specs import Sharding, entries, sharding_of, split_entries, with_entries
from tcfp_jax.paths import PyTree
from tcfp_jax.weights.stored import Stored
from tcfp_jax.weights.training import is_stored, kernel_shape, training_of, with_slot


def value_and_grad(
    fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False, holomorphic: bool = False
) -> Callable[..., Any]:
    """Return `jax.value_and_grad` of a function of stored parameters: their gradients are floats of the kernel's shape.

    Args:
      fun: a function with a scalar result.
      argnums: positions of the arguments to differentiate, as in JAX.
      has_aux: whether `fun` returns a pair whose second part is not differentiated, as in JAX.
      holomorphic: must be False, because FP8 products are real.

    Returns:
      A function of the same arguments with the results of JAX's. It composes with jit, vmap, scan and remat.

    Raises:
      ValueError: `holomorphic=True`, or the call lacks an argument that `argnums` names.

    >>> from tcfp_jax.optim.stored import store
    >>> from tcfp_jax.products.matmul import matmul
    >>> params = store({"kernel": jnp.ones((4, 2))}, "tcfp12_single", key=jax.random.key(0))
    >>> loss = lambda params, x: jnp.sum(matmul(x, params["kernel"], recipe="tcfp12_single"))
    >>> value, gradients = value_and_grad(loss)(params, jnp.ones((3, 4)))
    >>> float(value), gradients["kernel"].shape, float(gradients["kernel"][0, 0])
    (24.0, (4, 2), 3.0)
    """
    if holomorphic:
        raise ValueError("holomorphic=True, but products of stored weights are real; leave it False")

    @functools.wraps(fun)
    def with_gradients(*args: Any, **kwargs: Any) -> Any:
        chosen = places_of(argnums, args)

        def of_slots(*slots: Any) -> Any:
            given = list(args)
            for place, slot in zip(chosen, slots, strict=True):
                given[place] = filled(args[place], slot)
            return fun(*given, **kwargs)

        every = tuple(range(len(chosen)))
        result, gradients = jax.value_and_grad(of_slots, every, has_aux)(*(slots_of(args[place]) for place in chosen))
        return result, gradients[0] if isinstance(argnums, int) else gradients

    return with_gradients


def grad(
    fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False, holomorphic: bool = False
) -> Callable[..., Any]:
    """Return `jax.grad` of a function of stored parameters; see `value_and_grad`.

    >>> from tcfp_jax.optim.stored import dequantize, store
    >>> params = store({"kernel": jnp.ones((4, 2))}, "tcfp12_single", key=jax.random.key(0))
    >>> grad(lambda params: jnp.sum(dequantize(params)["kernel"] ** 2))(params)["kernel"][0].tolist()
    [2.0, 2.0]
    """
    both = value_and_grad(fun, argnums, has_aux, holomorphic)

    @functools.wraps(fun)
    def gradients_alone(*args: Any, **kwargs: Any) -> Any:
        result, gradients = both(*args, **kwargs)
        return (gradients, result[1]) if has_aux else gradients

    return gradients_alone


def places_of(argnums: int | Sequence[int], args: Sequence[Any]) -> list[int]:
    """Return the places of the arguments that `argnums` names, counted from the first.

    Raises:
      ValueError: there is no such argument.

    >>> places_of((0, -1), "abc")
    [0, 2]
    """
    places = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    for place in places:
        if not -len(args) <= place < len(args):
            raise ValueError(f"argnums={argnums}, but the function was called with {len(args)} arguments")
    return [place % len(args) for place in places]


def slots_of(tree: PyTree) -> PyTree:
    """Return the tree with zeros of the kernel's shape instead of stored weights, sharded as those are."""

    def zeros(leaf: Stored) -> jax.Array:
        return jnp.zeros(kernel_shape(leaf), training_of(leaf).gradient_dtype, out_sharding=_sharding_of_kernel(leaf))

    return jax.tree.map(lambda leaf: zeros(leaf) if is_stored(leaf) else leaf, tree, is_leaf=is_stored)


def _sharding_of_kernel(stored: Stored) -> Sharding:
    """Return how the kernel of a stored weight lies on a mesh with explicit axes; None on any other mesh."""
    assert stored.backward is not None, "a stored parameter has its own orientation"
    sharding, shape = sharding_of(stored.backward.values), kernel_shape(stored)
    if sharding is None:
        return None
    groups = training_of(stored).weight.layout.stacked(len(shape)).groups
    spec = split_entries(sharding, entries(sharding, len(groups)), [[shape[axis] for axis in g] for g in groups])
    by_axis = dict(zip(sum(groups, ()), spec, strict=True))
    return with_entries(sharding, [by_axis[axis] for axis in range(len(shape))])


def filled(tree: PyTree, slots: PyTree) -> PyTree:
    """Return the tree with `slots` in its stored weights, and with the leaves of `slots` elsewhere."""
    fill = lambda leaf, slot: with_slot(leaf, slot) if is_stored(leaf) else slot
    return jax.tree.map(fill, tree, slots, is_leaf=is_stored)
