"""Values that nobody may differentiate, because the gradient would silently be wrong.

not_differentiated    raises as soon as its operands are differentiated
without_gradient      raises if a gradient flows back to its operands, so code may
                      stop the gradient behind it
"""

import functools
from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

_T = TypeVar("_T")

OF_CODES = (
    "a gradient through a quantized array is asked for, but its values are FP8 or"
    " codes: their gradient would be FP8 without a scale, or zero. Use"
    " tcfp_jax.fake_quantize or formats.cast, whose gradient is that of the identity,"
    " or quantize jax.lax.stop_gradient(x)"
)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def not_differentiated(message: str, operands: _T) -> _T:
    """Return a tree of operands; raise a TypeError with this message if they are
    differentiated, in either mode.

    >>> fixed = functools.partial(not_differentiated, "x is a code")
    >>> jax.grad(fixed)(2.0)  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    TypeError: x is a code
    """
    return operands


@not_differentiated.defjvp
def _refuse(message: str, primals: object, tangents: object) -> NoReturn:
    raise TypeError(message)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def without_gradient(message: str, made: _T, operands: object) -> _T:
    """Return a tree that was made of operands. Its tangents are NaN, and a gradient
    that flows back to the operands raises a TypeError.

    >>> fixed = lambda x: without_gradient("x is a code", jax.lax.stop_gradient(x), x)
    >>> jax.grad(lambda x: x + jax.lax.stop_gradient(fixed(x)))(2.0).item()
    1.0
    >>> jax.grad(fixed)(2.0)  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    TypeError: x is a code
    """
    return made


@without_gradient.defjvp
def _without_tangent(
    message: str, primals: tuple[_T, object], tangents: tuple[object, object]
) -> tuple[_T, Any]:
    made, _ = primals
    of_operands = jax.tree.leaves(tangents[1])

    def tangent(value: Array) -> Array:
        return _tangent.bind(value, *of_operands, message=message)

    return made, jax.tree.map(tangent, made)


def _nan(made: Array, *tangents: Array, message: str) -> Array:
    return jnp.full_like(made, jnp.nan)


def _of_tangent(
    values: Sequence[Array], tangents: Sequence[Array], *, message: str
) -> tuple[Array, Array]:
    made, *others = values
    primal = _tangent.bind(*values, message=message)
    return primal, _tangent.bind(made, *others, message=message)


def _refuse_gradient(gradient: Array, *operands: object, message: str) -> NoReturn:
    raise TypeError(message)


def _batched(
    operands: Sequence[Array], axes: Sequence[int | None], *, message: str
) -> tuple[Array, int]:
    made, *tangents = operands
    size = 0
    for operand, axis in zip(operands, axes, strict=True):
        if axis is not None:
            size = operand.shape[axis]
    made = batching.bdim_at_front(made, axes[0], size)
    return _tangent.bind(made, *tangents, message=message), 0


_tangent = Primitive("tangent_of_codes")
_tangent.def_impl(jax.jit(_nan, static_argnames="message"))
_tangent.def_abstract_eval(lambda made, *tangents, message: made)
ad.primitive_jvps[_tangent] = _of_tangent
ad.primitive_transposes[_tangent] = _refuse_gradient
batching.primitive_batchers[_tangent] = _batched
mlir.register_lowering(_tangent, mlir.lower_fun(_nan, multiple_results=False))
