"""`value_and_grad` and `grad` for trees with stored weights: JAX's own, with a float
gradient for each stored weight.

The gradient of a float8 array is float8: three bits without a scale. So each stored
weight gets a `slot`, zeros of the kernel's shape, and the function is differentiated
with respect to the slots. Products read the FP8 values and send the gradient to the
slot. Nothing reads the zeros, so the compiled program has none.

Codes and scales are arrays, which the function could take for numbers. Only the
optimizer reads the state of rounding (`Training.rounding`). So the function gets random
keys in its place: any code moves them, and JAX refuses arithmetic on them.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NoReturn

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.specs import Sharding, sharding_of
from tcfp_jax.paths import PyTree
from tcfp_jax.weights.deferred import Deferred
from tcfp_jax.weights.parameter import (
    Parameter,
    intact,
    is_parameter,
)

_NO_METHOD = "Cannot call abstract method"
_FLOATS = (
    "compute with the float parameters, jax.tree.leaves(tcfp_jax.dequantize(params)),"
    " whose gradients are those of the weights"
)


def value_and_grad(
    fun: Callable[..., PyTree], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., PyTree]:
    """Return `jax.value_and_grad` of a function of stored parameters.

    Use it instead of JAX's for parameters that `tcfp_jax.store` made; float parameters
    may be among them. The gradients are floats of the kernels' shapes.

    Args:
      fun: a function with a scalar result.
      argnums: positions of the arguments to differentiate, as in JAX.
      has_aux: whether `fun` returns a pair whose second part is not differentiated, as
        in JAX.

    Returns:
      A function of the same arguments with the results of JAX's. It composes with jit,
        vmap, scan and remat.

    Raises:
      TypeError: the result depends on codes or scales as numbers, such as by a sum over
        `jax.tree.leaves(params)`.
      ValueError: the call lacks an argument that `argnums` names, or codes changed
        after they were written.

    >>> from tcfp_jax.optim.stored import store
    >>> from tcfp_jax.products.matmul import matmul
    >>> recipe, key = "tcfp12_single", jax.random.key(0)
    >>> params = store({"kernel": jnp.ones((4, 2))}, recipe, key=key)
    >>> def loss(params, x):
    ...     return jnp.sum(matmul(x, params["kernel"], recipe=recipe))
    >>> value, gradients = value_and_grad(loss)(params, jnp.ones((3, 4)))
    >>> float(value), gradients["kernel"].shape, float(gradients["kernel"][0, 0])
    (24.0, (4, 2), 3.0)
    """

    @functools.wraps(fun)
    def with_gradients(*args: PyTree, **kwargs: PyTree) -> PyTree:
        _, slots, given = with_slots(argnums, args)

        def of_slots(slots: Sequence[PyTree]) -> PyTree:
            with arithmetic_named():
                return fun(*given(slots), **kwargs)

        result, gradients = jax.value_and_grad(of_slots, has_aux=has_aux)(slots)
        return result, gradients[0] if isinstance(argnums, int) else gradients

    return with_gradients


def grad(
    fun: Callable[..., PyTree], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., PyTree]:
    """Return `jax.grad` of a function of stored parameters.

    Use it if you do not need the value; see `value_and_grad`.

    >>> from tcfp_jax.optim.stored import dequantize, store
    >>> kernels = {"kernel": jnp.ones((4, 2))}
    >>> params = store(kernels, "tcfp12_single", remainder="dropped")
    >>> energy = lambda params: jnp.sum(dequantize(params)["kernel"] ** 2)
    >>> grad(energy)(params)["kernel"][0].tolist()
    [2.0, 2.0]
    """
    both = value_and_grad(fun, argnums, has_aux)

    @functools.wraps(fun)
    def gradients_alone(*args: PyTree, **kwargs: PyTree) -> PyTree:
        result, gradients = both(*args, **kwargs)
        return (gradients, result[1]) if has_aux else gradients

    return gradients_alone


def with_slots(
    argnums: int | Sequence[int], args: Sequence[PyTree]
) -> tuple[
    list[int], tuple[PyTree, ...], Callable[[Sequence[PyTree]], tuple[PyTree, ...]]
]:
    """Return places, slots and the function that makes the arguments of a call from the
    slots.

    The slots are the arguments that `argnums` names, with zeros of the kernel's shape
    instead of stored weights.

    >>> places, slots, given = with_slots((0, -1), (1.0, 2.0, 3.0))
    >>> places, slots, given((5.0, 6.0))
    ([0, 2], (1.0, 3.0), (5.0, 2.0, 6.0))
    """
    wanted = (argnums,) if isinstance(argnums, int) else argnums
    if not all(-len(args) <= place < len(args) for place in wanted):
        raise ValueError(
            f"argnums={argnums}, but the function was called with {len(args)} arguments"
        )
    places = [place % len(args) for place in wanted]
    own = [intact(args[place]) for place in places]

    def given(slots: Sequence[PyTree]) -> tuple[PyTree, ...]:
        arguments = list(args)
        for place, tree, slot in zip(places, own, slots, strict=True):
            arguments[place] = jax.tree.map(filled, tree, slot, is_leaf=is_parameter)
        return tuple(arguments)

    slots = tuple(jax.tree.map(slot_of, tree, is_leaf=is_parameter) for tree in own)
    return places, slots, given


def slot_of(leaf: PyTree) -> PyTree:
    """Return the zeros that take the gradient of a stored parameter, or a float one."""
    if not isinstance(leaf, Parameter):
        return leaf
    if isinstance(leaf, Deferred):
        raise TypeError(
            "the loss of train_step asks for the gradient of a stored weight"
            f" {list(leaf.shape)}, which exists only until the weight is updated: take"
            " the ordinary step (value_and_grad, update, apply_updates)"
        )
    return jnp.zeros(
        leaf.kernel_shape,
        leaf.state.gradient_dtype,
        out_sharding=_sharding_of_kernel(leaf),
    )


def filled(leaf: PyTree, slot: PyTree) -> PyTree:
    """Return a stored parameter with its slot; a float one is its slot."""
    if not isinstance(leaf, Parameter):
        return slot
    codes = _codes(leaf, slot)
    keys = guarding_keys(codes.state.amax.shape)
    return replace(codes, state=replace(codes.state, slot=slot, rounding=keys))


def guarding_keys(shape: tuple[int, ...]) -> Array:
    """Return random keys: any code moves them, and JAX refuses arithmetic on them."""
    bits = jnp.zeros((*shape, 2), jnp.uint32)
    return jax.random.wrap_key_data(bits, impl="threefry2x32")


@contextlib.contextmanager
def arithmetic_named(instead: str = _FLOATS) -> Iterator[None]:
    """Say what to do where JAX refuses arithmetic on the keys of a stored weight."""
    try:
        yield
    except (AssertionError, NotImplementedError, TypeError, ValueError) as error:
        # JAX's words for methods such as `astype`, which keys do not have
        if not any(words in str(error) for words in ("key<fry>", _NO_METHOD)):
            raise
        raise TypeError(
            "the function takes FP8 codes and scales of a stored weight for numbers,"
            " such as by jax.tree.map(lambda p: 0.5 * p, params) or a sum over"
            f" jax.tree.leaves(params); {instead}. Or it computes with a random key:"
            f" {error}"
        ) from error


@jax.custom_vjp
def _codes(leaf: Parameter, slot: Array) -> Parameter:
    """Return a stored weight whose arrays depend on its slot, so that a gradient that
    reaches the arrays is seen.
    """
    return leaf


def _codes_backward(saved: None, cotangents: object) -> NoReturn:
    raise TypeError(
        "the function reads FP8 codes and scales of a stored weight as numbers, such as"
        " by a sum over jax.tree.leaves(params), and a gradient with respect to them is"
        " asked for; read the float parameters,"
        " jax.tree.leaves(tcfp_jax.dequantize(params)), whose gradients are those of"
        " the weights"
    )


def _codes_forward(leaf: Parameter, slot: Array) -> tuple[Parameter, None]:
    return jax.tree.map(lambda given: given.value, leaf), None


_codes.defvjp(_codes_forward, _codes_backward, symbolic_zeros=True)


def _sharding_of_kernel(parameter: Parameter) -> Sharding:
    """Return how the kernel lies on a mesh with explicit axes; None on any other
    mesh.
    """
    sharding = sharding_of(parameter.rows.values)
    if sharding is None:
        return None
    return parameter.layout.kernel_sharding(sharding, parameter.kernel_shape)
