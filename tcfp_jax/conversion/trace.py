"""Programs: functions traced to jaxprs, `eval_jaxpr`, the one loop that reads them, and their products.

The census, the evaluation and the monitor walk the same programs. They differ in the values that they carry (facts,
arrays, origins) and in their rule for an equation, so `eval_jaxpr` takes both as arguments.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.extend import core, source_info_util

from tcfp_jax.conversion.report import Product
from tcfp_jax.conversion.views import Equation, View, factors, layout_of
from tcfp_jax.layers import Absent
from tcfp_jax.paths import PyTree
from tcfp_jax.products.annotations import Mark

PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general")
# Calls whose body runs once, with the operands of the call as its inputs.
CALLS = ("jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "remat")
CHECKPOINTS = ("remat2", "checkpoint", "remat")

# Shapes that stand for arrays without values.
SHAPES = (jax.ShapeDtypeStruct, Absent)
_Value = TypeVar("_Value")
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
    rebuild: Callable[[Sequence[jax.Array | jax.ShapeDtypeStruct]], PyTree]


def trace(function: Callable[..., PyTree], args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]) -> Program:
    """Trace a function whose arguments and result may hold strings, modules and other values besides arrays.

    >>> program = trace(lambda x, how: (x + 1, how), (jax.numpy.ones(2), "up"), {})
    >>> program.rebuild(["the sum"])
    ('the sum', 'up')
    """
    arrays, rebuild_arguments = _split((args, dict(kwargs)))
    rebuild: Any = None

    # A new function for every call: no cache holds a trace of it, so none can be stale.
    def run(arrays: list[jax.Array]) -> list[jax.Array]:
        nonlocal rebuild
        args, kwargs = rebuild_arguments(arrays)
        outputs, rebuild = _split(function(*args, **kwargs))
        return outputs

    jaxpr, outputs = jax.make_jaxpr(run, return_shape=True)(arrays)
    return Program(jaxpr, outputs, rebuild)


def _split(tree: PyTree) -> tuple[list[jax.Array], Callable[[Sequence[jax.Array | jax.ShapeDtypeStruct]], PyTree]]:
    """Return the arrays of a tree, and the function that puts other arrays in their places."""
    treedef: Any
    leaves, treedef = jax.tree.flatten(tree)
    others = [None if is_array(leaf) else leaf for leaf in leaves]
    places = [place for place, leaf in enumerate(leaves) if is_array(leaf)]

    def rebuild(arrays: Sequence[jax.Array | jax.ShapeDtypeStruct]) -> PyTree:
        filled = list(others)
        for place, array in zip(places, arrays, strict=True):
            filled[place] = array
        return treedef.unflatten(filled)

    # make_jaxpr knows shapes by JAX's own class only.
    shape: Callable[[Any], Any] = lambda leaf: (
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, Absent) else leaf
    )
    return [shape(leaves[place]) for place in places], rebuild


def arrays_in(tree: PyTree) -> list[jax.Array]:
    """Return the arrays of a tree, in the order of the inputs of a `Program`."""
    return [leaf for leaf in jax.tree.leaves(tree) if is_array(leaf)]


def is_array(leaf: object) -> bool:
    """Return whether a leaf is an array, or a shape that stands for one."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


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


def bind(eqn: Equation, arrays: Sequence[jax.Array]) -> list[jax.Array]:
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


def product_of(
    eqn: Equation, side: int, path: str, reason: str, view: View | None = None, no_view: str = ""
) -> Product:
    """Return the product of operand `side`, over the axes of the parameter that it shows, or with a reason.

    Args:
      eqn: the equation of the product.
      side: 0 or 1, the operand that is a weight.
      path: path of the weight.
      reason: why the product cannot be converted, if that is known already.
      view: the view that the weight is, if it is one.
      no_view: why the weight is not a view. The equation may have another reason, which comes first.
    """
    shapes = [tuple(var.aval.shape) for var in eqn.invars[:2]]
    described = Product(
        path, shapes[side] if view is None else view.shape, eqn.primitive.name, precision=_precision(eqn),
        scope=str(eqn.source_info.name_stack), reason=reason or _refusal(eqn, side, view) or no_view,
    )  # fmt: skip
    if described.reason or view is None:
        return described
    found = factors(eqn.params["dimension_numbers"], shapes, side, view)
    if isinstance(found, str):
        return dataclasses.replace(described, reason=found)
    sizes = {role: math.prod(s for s, r in zip(view.sizes, found.roles, strict=True) if r == role) for role in "io"}
    return dataclasses.replace(
        described, equation=found.equation, k=sizes["i"], n=sizes["o"], rows=found.rows, layout=found.layout
    )


def _refusal(eqn: Equation, side: int, view: View | None) -> str:
    """Return why a product has no low-precision form, whatever its operands are, or ""."""
    # A function that differentiates itself multiplies by parameters backward, too: not its forward products.
    if {getattr(entry, "name", "") for entry in eqn.source_info.name_stack.stack} & {"jvp", "transpose"}:
        return "inside jax.grad or jax.jvp; transform the function that is differentiated, and differentiate that"
    if eqn.primitive.name != "dot_general":
        return {"conv_general_dilated": "a convolution"}.get(eqn.primitive.name, f"a {eqn.primitive.name}")
    types = [jnp.dtype(var.aval.dtype) for var in (*eqn.invars, *eqn.outvars)]
    if view is None or all(jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 1 for dtype in types):
        return ""
    return f"a product of {types[1 - side]} by {types[side]}"


def _precision(eqn: Equation) -> str:
    """Return the precision that a product's author asked for beyond the default, or ""."""
    asked = eqn.params.get("precision")
    names = [getattr(one, "name", one) for one in (asked if isinstance(asked, tuple | list) else (asked,))]
    return "" if all(name is None or str(name).upper() == "DEFAULT" for name in names) else str(names[0])


def product_by_hand(eqn: Equation, mark: Mark, path: str, view: View) -> Product:
    """Return the product that a layer of this library is about to compute with the kernel that it marked."""
    shape = eqn.invars[0].aval.shape
    layout = mark.layout.stacked(len(shape))
    size = lambda axes: math.prod(shape[axis] for axis in axes)
    # The mark has the layout of the array that the layer multiplies; the weight is stored by the parameter's layout.
    roles = ["o"] * len(view.sizes)
    for role, axes in (("i", layout.inputs), ("b", layout.stack)):
        for atom in (atom for axis in axes for atom in view.axes[axis]):
            roles[atom] = role
    return Product(
        path, view.shape, "dot_general", k=size(layout.inputs), n=size(layout.outputs), rows=mark.rows,
        scope=str(eqn.source_info.name_stack), layout=layout_of(view, tuple(roles)), recipe=mark.recipe,
    )  # fmt: skip
