"""`normed`: a function of rows before products, such as a norm, whose gradients take one pass over memory.

    forward    y = function(x, *vectors)                           as it was, by XLA
    backward   dx = carried + J_xᵀ (dy_1 + ... + dy_n),  dv        x, every dy and what is carried are read once

y comes once for every product that reads it, so that their gradients arrive one by one and nobody has to write their
sum; and x comes back for those that read it later, a residual connection, whose gradient is carried.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from pallas_kernels.dispatch import Backend, judge
from pallas_kernels.row_gradient.api import IMPLEMENTATIONS, row_gradient
from pallas_kernels.row_gradient.reference import Options
from pallas_kernels.row_gradient.rows import ELEMENTWISE

_REDUCTIONS: dict[str, Any] = {"reduce_sum": jnp.sum, "reduce_max": jnp.max, "reduce_min": jnp.min}
_MOVES = frozenset({"broadcast_in_dim", "reshape", "squeeze"})
# What means no more than its body. A function with a derivative of its own is not among them: its rule would be lost.
_BODIES = frozenset({"jit", "pjit", "closed_call"})


def problem(eqn: Any, shape: tuple[int, ...]) -> str | None:
    """Why an equation is not of a function of the rows of x `shape`, or None."""
    name = eqn.primitive.name
    if name in _BODIES:
        closed = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        body = getattr(closed, "jaxpr", closed)
        return next((found for inner in body.eqns if (found := problem(inner, shape))), None)
    if name in _REDUCTIONS:
        before = eqn.invars[0].aval.shape
        known = before == shape and tuple(eqn.params["axes"]) == (len(shape) - 1,)
        return None if known else f"{name} over other axes"
    if name not in ELEMENTWISE | _MOVES:
        return f"{name} is not of rows"
    for var in (*eqn.invars, *eqn.outvars):
        floats = jnp.issubdtype(var.aval.dtype, jnp.floating) and jnp.dtype(var.aval.dtype).itemsize in (2, 4)
        if not (floats or var.aval.dtype == bool) or _form(var.aval.shape, shape) is None:
            return f"{name} of {var.aval.str_short()}"
    return None


def _form(of: tuple[int, ...], shape: tuple[int, ...]) -> str | None:
    """What an array of this shape is beside x: it, a value for each of its rows or columns, or one value."""
    if math.prod(of) == 1:
        return "one"
    if of == shape:
        return "matrix"
    if of in (shape[:-1], (*shape[:-1], 1)):
        return "rows"
    return "columns" if of == (1,) * (len(of) - 1) + shape[-1:] else None


@dataclass(frozen=True)
class RowFunction:
    """A program of x `[..., k]` and vectors `[k]` as a function of rows `[r, k]`; equal where its text is.

    Attributes:
      program: the closed jaxpr.
      text: what decides equality.
    """

    program: Any = field(compare=False, repr=False)
    text: str

    def __call__(self, x: jax.Array, *vectors: jax.Array) -> jax.Array:
        """The result for some rows."""
        jaxpr = self.program.jaxpr
        inputs = [x, *(vector[None] for vector in vectors)]
        (result,) = _run(jaxpr, jaxpr.invars[0].aval.shape, inputs)
        return jnp.broadcast_to(result, x.shape)


def _run(jaxpr: Any, shape: tuple[int, ...], inputs: Sequence[Any]) -> list[Any]:
    env = dict(zip(jaxpr.invars, inputs, strict=True))
    read = lambda var: jnp.asarray(var.val) if isinstance(var, core.Literal) else env[var]
    for eqn in jaxpr.eqns:
        values, name = [read(var) for var in eqn.invars], eqn.primitive.name
        if name in _BODIES:
            closed = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            results = _run(getattr(closed, "jaxpr", closed), shape, values)
        elif name in _REDUCTIONS:
            results = [_REDUCTIONS[name](values[0], axis=-1, keepdims=True)]
        elif name in _MOVES:
            results = values
        else:
            common = jnp.broadcast_shapes(*(value.shape for value in values))
            results = [eqn.primitive.bind(*(jnp.broadcast_to(value, common) for value in values), **eqn.params)]
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(var) for var in jaxpr.outvars]


@dataclass(frozen=True)
class Norm:
    """What `normed` computes.

    Attributes:
      function: of x and vectors.
      readers: how many products read the result.
      backend: of its gradients.
    """

    function: RowFunction
    readers: int
    backend: Backend | None

    @classmethod
    def of(cls, program: Any, readers: int, backend: Backend | None) -> "Norm":
        """That of a closed jaxpr of x and vectors, with one result."""
        return cls(RowFunction(program, str(program.jaxpr)), readers, backend)

    def refuses(self) -> str | None:
        """Why its gradients are not computed so here, or None: where no kernel runs, XLA does what it always did."""
        x, *vectors = (jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in self.function.program.in_avals)
        operands = x, tuple(vectors), (x,) * self.readers, x
        verdicts = judge(IMPLEMENTATIONS, self.backend, Options(self.function), *operands)
        chosen = next((verdict.backend for verdict in verdicts if verdict.reason is None), None)
        if chosen in (None, "xla"):
            return next((f"{v.backend}: {v.reason}" for v in verdicts if v.reason is not None), "XLA was asked for")
        return None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def normed(asked: Norm, x: jax.Array, vectors: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """X itself, for who reads it later, and the result once for every product that reads it."""
    return _forward(asked, x, vectors)[0]


def _forward(asked: Norm, x: jax.Array, vectors: tuple[jax.Array, ...]) -> tuple[Any, Any]:
    (y,) = _with_sums_apart(asked.function.program.jaxpr, (x, *vectors))
    return (x, (y,) * asked.readers), (x, vectors)


def _with_sums_apart(jaxpr: Any, inputs: Sequence[Any]) -> list[Any]:
    """The results of a program whose sums over rows come from passes of their own.

    XLA (0.11.2, on a GPU) would make one kernel of a norm: an H200 then takes 46 us to write x, the sum of a block and
    its residual, 39 for the norm and 21 for the largest magnitude of its result. Apart, the sums are found where x is
    written and the magnitude where the norm is: 45 and 33.
    """
    env = dict(zip(jaxpr.invars, inputs, strict=True))
    read = lambda var: var.val if isinstance(var, core.Literal) else env[var]
    for eqn in jaxpr.eqns:
        values, name = [read(var) for var in eqn.invars], eqn.primitive.name
        if name in _BODIES:
            closed = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            results = _with_sums_apart(getattr(closed, "jaxpr", closed), values)
        else:
            results = [eqn.primitive.bind(*values, **eqn.params)]
        env.update(zip(eqn.outvars, lax.optimization_barrier(results) if name in _REDUCTIONS else results, strict=True))
    return [read(var) for var in jaxpr.outvars]


def _backward(asked: Norm, saved: Any, gradients: Any) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    (x, vectors), (carried, dys) = saved, gradients
    with jax.named_scope("norm_gradient"):
        return row_gradient(asked.function, x, vectors, tuple(dys), carried, backend=asked.backend)


normed.defvjp(_forward, _backward)
