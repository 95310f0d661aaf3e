"""Functions of rows: what they may be made of, and their values in float32 on blocks that are wider than a row.

A function takes x `[r, k]` and vectors `[k]` and returns `[r, k]`; each row of its result depends on the same row of x.
It is traced, and its operations are run again with two differences: numbers narrower than float32 are float32, so that
nothing is rounded between, and a block may have more rows or columns than there are, which a kernel needs. What lies
outside has no part in any reduction, nor, as every mask is differentiated with the rest, in any gradient.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

Function = Callable[..., jax.Array]

ELEMENTWISE = frozenset({
    "abs", "add", "and", "atan2", "clamp", "convert_element_type", "copy", "cos", "div", "eq", "exp", "exp2",
    "expm1", "ge", "gt", "integer_pow", "is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul",
    "ne", "neg", "not", "or", "pow", "rem", "rsqrt", "select_n", "sign", "sin", "sqrt", "square",
    "stop_gradient", "sub", "tanh", "xor",
})  # fmt: skip
# Of each reduction, what changes nothing.
_NEUTRAL = {"reduce_sum": 0.0, "reduce_max": -jnp.inf, "reduce_min": jnp.inf}
_MOVES = ("broadcast_in_dim", "reshape", "squeeze")
_NARROW = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


@dataclass(frozen=True)
class Frame:
    """How the axes of a block differ from those that a function was traced with, by their traced lengths.

    Attributes:
      padded: of an axis that the block has longer, its length there.
      limits: of an axis that holds more than there is, how many elements there are.
    """

    padded: Mapping[int, int] = field(default_factory=dict)
    limits: Mapping[int, Any] = field(default_factory=dict)

    def shape(self, traced: Sequence[int]) -> tuple[int, ...]:
        """The shape in the block of what had the shape `traced`."""
        return tuple(self.padded.get(size, size) for size in traced)

    def keep(self, x: jax.Array, traced: Sequence[int], axes: Sequence[int], otherwise: float = 0.0) -> jax.Array:
        """X where there is something, along `axes`, and `otherwise` elsewhere."""
        for axis in axes:
            if traced[axis] in self.limits:
                inside = lax.broadcasted_iota(jnp.int32, x.shape, axis) < self.limits[traced[axis]]
                x = lax.select(inside, x, lax.full_like(x, otherwise))
        return x


def widen(dtype: Any) -> Any:
    """The dtype in which a number of `dtype` is calculated."""
    return jnp.dtype(jnp.float32) if jnp.dtype(dtype) in _NARROW else jnp.dtype(dtype)


def trace(function: Function, rows: int, x: Any, vectors: Sequence[Any]) -> core.ClosedJaxpr:
    """The function's operations on so many rows of x."""
    k = x.shape[-1]
    wanted = jax.ShapeDtypeStruct((rows, k), x.dtype), *(jax.ShapeDtypeStruct((k,), v.dtype) for v in vectors)
    return jax.make_jaxpr(function)(*wanted)


def check_function(function: Function, x: Any, vectors: Sequence[Any]) -> None:
    """Raise a ValueError unless `function` is one of rows, made of what is known here."""
    k = x.shape[-1]
    rows = 2 if k != 2 else 3  # no axis of columns is taken for one of rows
    traced = trace(function, rows, x, vectors)
    results: list[Any] = [(jnp.shape(aval), jnp.dtype(cast(Any, aval).dtype)) for aval in traced.out_avals]
    if len(results) != 1 or results[0][0] != (rows, k) or not jnp.issubdtype(results[0][1], jnp.floating):
        raise ValueError(f"function must turn rows [r, {k}] into one array of floats [r, {k}]; it returns {results}")
    _check(traced, k)


def _check(traced: core.ClosedJaxpr, k: int) -> None:
    equations: list[Any] = traced.jaxpr.eqns
    for held in (*traced.consts, *(x.val for e in equations for x in e.invars if isinstance(x, core.Literal))):
        if isinstance(held, jax.core.Tracer) or np.ndim(held):
            raise ValueError(
                f"function holds an array of its own, {jnp.shape(held)}, which would get no gradient; give it as one "
                "of vectors, or hold a Python number"
            )
    for equation in equations:
        name, inner = equation.primitive.name, _inner(equation)
        if inner is not None:
            _check(inner, k)
            continue
        aval = equation.invars[0].aval if equation.invars else equation.outvars[0].aval
        shape = aval.shape
        if name in _NEUTRAL:
            known = shape[-1:] == (k,) and tuple(equation.params["axes"]) == (len(shape) - 1,)
            known = known and jnp.issubdtype(aval.dtype, jnp.floating)
        elif name in _MOVES:
            dense = lambda shape: [size for size in shape if size != 1]
            known = name == "broadcast_in_dim" or dense(shape) == dense(equation.outvars[0].aval.shape)
        else:
            known = name in ELEMENTWISE
        if not known:
            raise ValueError(
                f"function uses {name} on {list(shape)}, which is neither elementwise nor a sum, maximum or minimum "
                f"along rows of k={k}; write it of those, or use jax.vjp"
            )


def _inner(equation: Any) -> core.ClosedJaxpr | None:
    """The function that an equation calls, where it means no more than its body."""
    if equation.primitive.name in ("jit", "pjit", "closed_call"):
        return equation.params.get("jaxpr") or equation.params["call_jaxpr"]
    return None


def evaluate(traced: core.ClosedJaxpr, frame: Frame, *operands: jax.Array) -> jax.Array:
    """The function of float32 operands, in blocks that `frame` describes."""
    return _evaluate(traced, frame, operands)[0]


def _evaluate(traced: core.ClosedJaxpr, frame: Frame, operands: Sequence[jax.Array]) -> list[jax.Array]:
    # NumPy's scalars become part of the program; a kernel could not hold an array.
    values = dict(zip(traced.jaxpr.constvars, (_literal(np.asarray(c)) for c in traced.consts), strict=True))
    values |= zip(traced.jaxpr.invars, operands, strict=True)
    read = lambda atom: _literal(atom.val) if isinstance(atom, core.Literal) else values[atom]
    for equation in traced.jaxpr.eqns:
        inner = _inner(equation)
        inputs = [read(atom) for atom in equation.invars]
        results = [_apply(equation, frame, inputs)] if inner is None else _evaluate(inner, frame, inputs)
        values |= zip(equation.outvars, results, strict=True)
    return [read(atom) for atom in traced.jaxpr.outvars]


def _literal(value: Any) -> Any:
    dtype = np.asarray(value).dtype
    return np.asarray(value, widen(dtype))[()]


def _apply(equation: Any, frame: Frame, inputs: list[Any]) -> jax.Array:
    """One operation: an elementwise one, a reduction or a move."""
    primitive, params, result = equation.primitive, dict(equation.params), equation.outvars[0].aval
    sources = [atom.aval.shape for atom in equation.invars]
    shape = frame.shape(result.shape)
    if primitive.name in _NEUTRAL:
        axes = params["axes"]
        return primitive.bind(frame.keep(inputs[0], sources[0], axes, _NEUTRAL[primitive.name]), **params)
    if primitive.name == "broadcast_in_dim":
        return _spread(frame, inputs[0], sources[0], result.shape, params["broadcast_dimensions"])
    if primitive.name in ("reshape", "squeeze"):
        return lax.reshape(inputs[0], shape)
    if primitive.name == "convert_element_type":
        return lax.convert_element_type(inputs[0], widen(params["new_dtype"]))
    if primitive.name == "copy":
        return inputs[0]
    if primitive.name == "stop_gradient":
        return lax.stop_gradient(inputs[0])
    for i, (atom, source) in enumerate(zip(equation.invars, sources, strict=True)):
        # Literals have no gradient, and stay the scalars that they are.
        if source != result.shape and not isinstance(atom, core.Literal):
            last = range(len(result.shape) - len(source), len(result.shape))
            inputs[i] = _spread(frame, inputs[i], source, result.shape, tuple(last))
    return primitive.bind(*inputs, **params)


def _spread(frame: Frame, x: Any, source: Sequence[int], target: Sequence[int], axes: Sequence[int]) -> jax.Array:
    """X broadcast; what is outside gets zeros, and so gives the gradient of x nothing."""
    wide = lax.broadcast_in_dim(x, frame.shape(target), axes)
    kept = {axis for size, axis in zip(source, axes, strict=True) if size == target[axis]}
    return frame.keep(wide, target, [axis for axis in range(len(target)) if axis not in kept])
