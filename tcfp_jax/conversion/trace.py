"""Programs: functions traced to jaxprs, and `eval_jaxpr`, the one loop that reads the equations of a jaxpr.

The census, the evaluation and the monitor walk the same programs. They differ in the values that they carry (facts,
arrays, origins) and in their rule for an equation, so `eval_jaxpr` takes both as arguments.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
from jax.extend import core, source_info_util

from tcfp_jax.layers import Absent

PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general")
# Calls whose body runs once, with the operands of the call as its inputs.
CALLS = ("jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "remat")
CHECKPOINTS = ("remat2", "checkpoint", "remat")

_Value = TypeVar("_Value")


class Equation(Protocol):
    """An equation of a jaxpr. Its variables are Any, because JAX's type of an abstract value has no shape."""

    primitive: core.Primitive
    params: dict[str, Any]
    invars: list[Any]
    outvars: list[Any]
    source_info: Any
    ctx: Any


# A program and its constants.
Body = tuple[core.Jaxpr, Sequence[Any]]


class Program(NamedTuple):
    """A traced function.

    Attributes:
      jaxpr: the closed jaxpr; its inputs are the `arrays_in` the arguments.
      outputs: shapes and dtypes of the arrays in the result.
      rebuild: function that makes the result from these arrays; other leaves are the Python values of the trace.
    """

    jaxpr: core.ClosedJaxpr
    outputs: list[jax.ShapeDtypeStruct]
    rebuild: Callable[[Sequence[Any]], Any]


def trace(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Program:
    """Trace a function whose arguments and result may hold strings, modules and other values besides arrays.

    >>> program = trace(lambda x, how: (x + 1, how), (jax.numpy.ones(2), "up"), {})
    >>> program.rebuild(["the sum"])
    ('the sum', 'up')
    """
    arrays, rebuild_arguments = _split((args, dict(kwargs)))
    rebuild: Any = None

    # A new function for every call: no cache holds a trace of it, so none can be stale.
    def run(arrays: list[Any]) -> list[Any]:
        nonlocal rebuild
        args, kwargs = rebuild_arguments(arrays)
        outputs, rebuild = _split(function(*args, **kwargs))
        return outputs

    jaxpr, outputs = jax.make_jaxpr(run, return_shape=True)(arrays)
    return Program(jaxpr, outputs, rebuild)


def _split(tree: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """Return the arrays of a tree, and the function that puts other arrays in their places."""
    treedef: Any
    leaves, treedef = jax.tree.flatten(tree)
    others = [None if is_array(leaf) else leaf for leaf in leaves]
    places = [place for place, leaf in enumerate(leaves) if is_array(leaf)]

    def rebuild(arrays: Sequence[Any]) -> Any:
        filled = list(others)
        for place, array in zip(places, arrays, strict=True):
            filled[place] = array
        return treedef.unflatten(filled)

    # make_jaxpr knows shapes by JAX's own class only.
    shape = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, Absent) else leaf
    return [shape(leaves[place]) for place in places], rebuild


def arrays_in(tree: Any) -> list[Any]:
    """Return the arrays of a tree, in the order of the inputs of a `Program`."""
    return [leaf for leaf in jax.tree.leaves(tree) if is_array(leaf)]


def is_array(leaf: object) -> bool:
    """Return whether a leaf is an array, or a shape that stands for one."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def has_values(leaf: object) -> bool:
    """Return whether an array has values, and is not a shape alone."""
    return not isinstance(leaf, jax.ShapeDtypeStruct | Absent)


def eval_jaxpr(
    jaxpr: core.Jaxpr,
    inputs: Sequence[_Value],
    rule: Callable[[int, Equation, list[_Value]], Sequence[_Value]],
    literal: Callable[[Any], _Value] = lambda value: value,
) -> list[_Value]:
    """Return the values of a jaxpr's outputs.

    Args:
      jaxpr: the program.
      inputs: a value of any kind for each constant and each input.
      rule: `(number, equation, values of its operands)` to the values of its outputs.
      literal: value of a number that is written in the program.

    >>> program = jax.make_jaxpr(lambda x, y: (x + y) * 2.0)(1.0, 1.0)
    >>> count = lambda number, eqn, values: [sum(values)]
    >>> eval_jaxpr(program.jaxpr, [1, 1], count, literal=lambda _: 0)  # how many inputs each output depends on
    [2]
    """
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], inputs, strict=True))
    read = lambda var: literal(var.val) if isinstance(var, core.Literal) else known[var]
    for number, eqn in enumerate(jaxpr.eqns):
        # The operations of a rule keep the equation's named scope, source line and context (mesh, compute type).
        stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
        with source_info_util.user_context(eqn.source_info.traceback, name_stack=stack), eqn.ctx.manager:
            known.update(zip(eqn.outvars, rule(number, eqn, [read(var) for var in eqn.invars]), strict=True))
    return [read(var) for var in jaxpr.outvars]


def bind(eqn: Equation, arrays: Sequence[Any]) -> list[Any]:
    """Return the outputs of an equation, unchanged."""
    found = eqn.primitive.get_bind_params(eqn.params)
    functions, params = found if isinstance(found, tuple) else ((), found)  # jax 0.11 returns the parameters alone
    out = eqn.primitive.bind(*functions, *arrays, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def opened(body: Any) -> Body:
    """Return the jaxpr and the constants of a body, which may be closed or not."""
    return getattr(body, "jaxpr", body), getattr(body, "consts", ())


def body_of(eqn: Equation) -> Body:
    """Return the jaxpr and the constants of an equation with one body."""
    return opened(eqn.params.get("jaxpr", eqn.params.get("call_jaxpr")))


def bodies_of(eqn: Equation) -> list[Body]:
    """Return the programs that an equation holds, each with its constants."""
    values = [one for value in eqn.params.values() for one in (value if isinstance(value, tuple | list) else (value,))]
    return [(body, consts) for body, consts in map(opened, values) if hasattr(body, "eqns") and hasattr(body, "invars")]


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """Return the numbers of constants and of carried values of a scan."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # jax 0.11 keeps flat trees instead of numbers
    return len(list(consts)), len(list(carry))


def scan_options(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments that `lax.scan` needs to make the same loop again."""
    return {name: params[name] for name in ("length", "reverse", "unroll", "_split_transpose") if name in params}
