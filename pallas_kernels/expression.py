"""`Expression`: an elementwise part of a program, as data: a kernel computes it on a tile, its definition on matrices.

    silu(gate) * up         (dh, gate, up) -> (dgate, dup)         x * (rsqrt(mean(x²) + eps) * gain)

What stands between two products of a program is mostly elementwise. As an expression it can be computed where the next
product's operand is quantized, so that no tensor is written between them.

**What it means** does not depend on who computes it: every operation takes float32 and rounds its result to the dtype
that the program gives it, one operation after the other. XLA alone would keep bfloat16 intermediates in float32
where it fuses them, and round them where it does not.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

# What an array is beside a matrix `[m, k]`: of its shape, a value for each row, for each column, or one value.
Form = Literal["matrix", "rows", "columns", "one"]
# How a result is rounded to a narrower float: by arithmetic that XLA keeps, or by storing and reading it, which is one
# instruction of a GPU, and which XLA deletes.
Rounding = Literal["arithmetic", "storage"]

_BINARY: dict[str, Callable[..., Any]] = {
    "add": lax.add, "sub": lax.sub, "mul": lax.mul, "div": lax.div, "max": lax.max, "min": lax.min, "add_any": lax.add,
    "gt": lax.gt, "ge": lax.ge, "lt": lax.lt, "le": lax.le, "eq": lax.eq, "ne": lax.ne,
    "and": lax.bitwise_and, "or": lax.bitwise_or,
}  # fmt: skip
_UNARY: dict[str, Callable[..., Any]] = {
    "neg": lax.neg, "abs": lax.abs, "exp": lax.exp, "log": lax.log, "tanh": lax.tanh,
    "rsqrt": lax.rsqrt, "sqrt": lax.sqrt, "logistic": lax.logistic, "square": lambda x: x * x, "not": lax.bitwise_not,
}  # fmt: skip
# Results of these need no rounding: they are one of their operands, or booleans.
_EXACT = frozenset({"max", "min", "gt", "ge", "lt", "le", "eq", "ne", "and", "or", "not", "neg", "abs", "select_n"})
# What hands a value on: shapes are those of tiles, which are broadcast where they meet.
_SAME = frozenset({"copy", "copy_p", "stop_gradient", "name", "reshape", "squeeze", "broadcast_in_dim"})
BODIES = frozenset({"pjit", "jit", "closed_call", "custom_jvp_call", "custom_vjp_call"})
ELEMENTWISE = frozenset({*_BINARY, *_UNARY, *_SAME, "select_n", "integer_pow", "convert_element_type"})


def form_of(shape: Sequence[int], m: int, k: int) -> Form | None:
    """What an array of this shape is beside matrices of m rows and k columns, or None.

    >>> [form_of(shape, 8, 8) for shape in ((2, 4, 8), (1, 8), (2, 4, 1), (), (4,))]
    ['matrix', 'columns', 'rows', 'one', None]
    """
    size, last = math.prod(shape), shape[-1] if shape else 1
    if size == 1:
        return "one"
    if last == k and size in (k, m * k):
        return "columns" if size == k else "matrix"
    return "rows" if last == 1 and size == m else None


@dataclass(frozen=True)
class Expression:
    """An elementwise program; two with the same text are equal.

    Attributes:
      jaxpr: whose inputs and outputs have forms, the outputs that of a matrix.
      m, k: of the matrices it was written for.
      text: what decides equality.
    """

    jaxpr: Any = field(compare=False, repr=False)
    m: int
    k: int
    text: str

    @classmethod
    def of(cls, closed: Any, m: int, k: int) -> "Expression":
        """That of a closed jaxpr.

        Raises:
          ValueError: it is not elementwise over matrices `[m, k]`; names the equation.

        >>> import numpy as np
        >>> twice = jax.make_jaxpr(lambda x: x * 2)(np.ones((2, 3), np.float32))
        >>> Expression.of(twice, 2, 3)(np.float32([[1, 2, 3]]))[0].tolist()
        [[2.0, 4.0, 6.0]]
        """
        if closed.consts:
            raise ValueError(f"the program holds {len(closed.consts)} arrays; pass them as inputs")
        problem = _problem(closed.jaxpr, m, k)
        if problem is not None:
            raise ValueError(problem)
        return cls(closed.jaxpr, m, k, str(closed.jaxpr))

    @property
    def forms(self) -> tuple[Form, ...]:
        """Those of the inputs."""
        return tuple(form_of(var.aval.shape, self.m, self.k) or "matrix" for var in self.jaxpr.invars)

    @property
    def dtypes(self) -> tuple[Any, ...]:
        """Those of the results, in the program."""
        return tuple(var.aval.dtype for var in self.jaxpr.outvars)

    def __call__(self, *inputs: jax.Array, rounding: Rounding = "arithmetic") -> tuple[jax.Array, ...]:
        """The results in float32, as the values that the program's dtypes hold.

        Args:
          inputs: a tile `[r, c]` for a matrix, `[r, 1]` for rows, `[1, c]` for columns, or one value.
          rounding: how results are rounded on their way.
        """
        return tuple(_run(self.jaxpr, inputs, rounding))


def _run(jaxpr: Any, inputs: Sequence[Any], rounding: Rounding) -> list[Any]:
    env = {var: _wide(x) for var, x in zip(jaxpr.invars, inputs, strict=True)}
    # A number of the program belongs to no mesh: it may have been traced in a `jax.shard_map` and be run outside of it.
    number = lambda literal: jnp.asarray(np.asarray(literal.val, literal.aval.dtype))
    read = lambda var: _wide(number(var)) if isinstance(var, core.Literal) else env[var]
    for eqn in jaxpr.eqns:
        values = [read(var) for var in eqn.invars]
        if eqn.primitive.name in BODIES:
            results = _run(_body(eqn), values, rounding)
        else:
            results = [_apply(eqn, values, rounding)]
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(var) for var in jaxpr.outvars]


def _wide(x: Any) -> jax.Array:
    return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else jnp.asarray(x)


def _apply(eqn: Any, values: list[Any], rounding: Rounding) -> jax.Array:
    name, dtype = eqn.primitive.name, eqn.outvars[0].aval.dtype
    if name in _SAME:
        return values[0]
    if name == "convert_element_type":
        out = values[0].astype(dtype if not jnp.issubdtype(dtype, jnp.floating) else jnp.float32)
        return out if eqn.invars[0].aval.dtype == dtype else _rounded(out, dtype, rounding)
    shape = jnp.broadcast_shapes(*(jnp.shape(x) for x in values))
    values = [jnp.broadcast_to(x, shape) for x in values]
    if name == "select_n":
        out = lax.select_n(*values)
    elif name == "integer_pow":
        out = lax.integer_pow(values[0], eqn.params["y"])
    else:
        out = {**_BINARY, **_UNARY}[name](*values)
    return out if name in _EXACT else _rounded(out, dtype, rounding)


def _rounded(x: jax.Array, dtype: Any, rounding: Rounding) -> jax.Array:
    if not jnp.issubdtype(dtype, jnp.floating) or jnp.dtype(dtype).itemsize > 2:
        return x
    if rounding == "storage":
        return x.astype(dtype).astype(jnp.float32)
    info = jnp.finfo(dtype)
    return lax.reduce_precision(x, int(info.nexp), int(info.nmant))


def _body(eqn: Any) -> Any:
    closed = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    return getattr(closed, "jaxpr", closed)


def _problem(jaxpr: Any, m: int, k: int) -> str | None:
    """Why a program is not an expression, or None."""
    for var in (*jaxpr.invars, *jaxpr.outvars):
        if form_of(var.aval.shape, m, k) is None:
            return f"{var.aval.str_short()} is neither a matrix [{m}, {k}] nor one value for its rows or columns"
    for eqn in jaxpr.eqns:
        if (problem := equation_problem(eqn, m, k)) is not None:
            return problem
    return None


@functools.lru_cache(maxsize=4096)
def _is_float(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating)) and 2 <= jnp.dtype(dtype).itemsize <= 4


def equation_problem(eqn: Any, m: int, k: int) -> str | None:
    """Why an equation cannot be part of an expression over matrices `[m, k]`, or None."""
    name = eqn.primitive.name
    if name in BODIES:
        body = _body(eqn)
        closed = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        return "a body that holds arrays" if getattr(closed, "consts", ()) else _problem(body, m, k)
    if name not in ELEMENTWISE:
        return f"{name} is not elementwise"
    forms = []
    for var in (*eqn.invars, *eqn.outvars):
        aval = var.aval
        if not (_is_float(aval.dtype) or aval.dtype == bool):
            return f"{name} of {aval.dtype}"
        forms.append(form_of(aval.shape, m, k))
    if None in forms:
        return f"{name} of {eqn.outvars[0].aval.str_short()}"
    if name == "broadcast_in_dim" and forms[0] != "one":
        # Each axis must stay what it is, counted from the last.
        places, before, after = eqn.params["broadcast_dimensions"], eqn.invars[0].aval.ndim, eqn.outvars[0].aval.ndim
        if [after - place for place in places] != list(range(before, 0, -1)):
            return "a broadcast along other axes"
    if name == "reshape" and (forms[0] != forms[-1] or eqn.params.get("dimensions") is not None):
        return "a reshape of rows or columns"
    return None
