"""Products of computed weights, rewritten as products of the parameters themselves.

    x @ (2 W)      ->  2 (x @ W)
    x @ (W + A B)  ->  x @ W + (x @ A) @ B    merged LoRA
    x @ [W, V]     ->  [x @ W, x @ V]         likewise a weight with zeros around it

The weight has to be linear in parameters. Haliax multiplies each weight by a scale of
1, Keras merges LoRA, other models join or pad their weights. Such a weight shows no
parameter, so no stored weight fits it; each product of the new program reads one. The
census marks these products and the operations behind them, and `unfolded` makes the new
program.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax import Array, lax
from jax.extend import core

from tcfp_jax.conversion.bodies import Body, opened
from tcfp_jax.conversion.evaluate import bind, bodies_of, eval_jaxpr, is_inlined
from tcfp_jax.conversion.factors import Numbers
from tcfp_jax.conversion.views import Equation, Place

# By the place of each marked equation, which operand is the weight; -1 for a product of
# two weights.
Marks = Mapping[Place, int]
# The equations that act on a weight as on its parts.
_MOVES = {
    "dot": ("convert_element_type", "transpose"),
    "joined": ("convert_element_type", "copy", "transpose"),
    "scaled": (
        "convert_element_type",
        "copy",
        "transpose",
        "reshape",
        "squeeze",
        "broadcast_in_dim",
        "slice",
        "sharding_constraint",
    ),
}


def linearity(
    eqn: Equation, levels: Sequence[str], uniform: Sequence[str]
) -> tuple[str, int]:
    """Return how a computed weight is linear in parameters, and which operand it is.

    The answer is "scaled" by a constant, "joined" of views or padded, "dot" of two
    matrices, or "". A sum of a weight and a product of two matrices counts, because x A
    B is cheap. Other sums do not: two products take the time of two.

    Args:
      eqn: the equation, whose operands are weights or constants.
      levels: the same answer for each operand; "scaled" for a view.
      uniform: "zero" or "number" for each operand that is one number.
    """
    name = eqn.primitive.name
    if name in ("mul", "div"):
        for side in (0, 1) if name == "mul" else (0,):
            if levels[side] and uniform[1 - side]:
                return levels[side], side
        return "", 0
    if name == "neg":
        return levels[0], 0
    if name in ("add", "add_any", "sub"):
        bases = [level for level in levels if level not in ("", "dot")]
        return (bases[0] if len(bases) == 1 and "dot" in levels else ""), 0
    if name == "concatenate":
        return "joined" if not {"", "dot"} & set(levels) else "", 0
    if name == "pad":
        zeros = uniform[1] == "zero"
        for low, high, inner in eqn.params["padding_config"]:
            zeros = zeros and low >= 0 and high >= 0 and inner == 0
        return "joined" if zeros and levels[0] in ("scaled", "joined") else "", 0
    return (levels[0] if name in _MOVES.get(levels[0], ()) else ""), 0


class _Linear(NamedTuple):
    """A weight that is not computed yet.

    Attributes:
      kind: the operation.
      parts: its operands that are weights.
      of: its constant: a factor, an axis, a padding, or the equation of a product of
        two parameters.
    """

    kind: str
    parts: tuple["_Value", ...]
    of: Any = None


_Value = Array | _Linear


def unfolded(program: core.ClosedJaxpr, marks: Marks) -> core.ClosedJaxpr:
    """Return the program with the marked products written over parameters.

    >>> w, x = jax.numpy.ones((4, 2)), jax.numpy.ones((3, 4))
    >>> program = jax.make_jaxpr(lambda w, x: x @ (2 * w))(w, x)
    >>> [eqn.primitive.name for eqn in unfolded(program, {(0,): 1, (1,): 1}).jaxpr.eqns]
    ['dot_general', 'broadcast_in_dim', 'mul']
    """

    def run(*inputs: Array) -> list[Array]:
        body = (program.jaxpr, program.consts)
        return list(map(_array, _evaluated(body, inputs, marks)))

    return jax.make_jaxpr(run)(*(var.aval for var in program.jaxpr.invars))


def _evaluated(body: Body, inputs: Sequence[_Value], marks: Marks) -> list[_Value]:
    """Return the outputs of a program, some of which may be `_Linear`."""
    jaxpr, consts = body

    def rule(number: int, eqn: Equation, given: list[_Value]) -> Sequence[_Value]:
        inner = _below(marks, number)
        if () in inner:
            return [_linear(eqn, given, inner[()])]
        if inner and is_inlined(eqn):
            return _evaluated(bodies_of(eqn)[0], given, inner)
        if inner:
            eqn = _with_bodies(eqn, inner)
        return bind(eqn, list(map(_array, given)))

    return eval_jaxpr(jaxpr, [*consts, *inputs], rule)


def _below(marks: Marks, number: int) -> Marks:
    """Return the marks at an equation, or in a body, by their places inside."""
    inner = {}
    for (first, *rest), side in marks.items():
        if first == number:
            inner[tuple(rest)] = side
    return inner


def _linear(eqn: Equation, given: list[_Value], side: int) -> _Value:
    """Return the output of a marked equation, whose operand `side` is the weight."""
    name = eqn.primitive.name
    if name in ("mul", "div"):
        factor = _array(given[1 - side])
        if getattr(factor, "shape", ()):
            factor = factor.ravel()[0]
        return _Linear(name, (given[side],), factor)
    if name == "dot_general" and side >= 0:
        numbers = eqn.params["dimension_numbers"]
        return _product(eqn, _array(given[1 - side]), given[side], side, numbers)
    if name in ("neg", "add", "add_any", "dot_general"):
        return _Linear(name, tuple(given), eqn)
    if name == "sub":
        return _Linear("add", (given[0], _Linear("neg", (given[1],))))
    if name == "concatenate":
        return _Linear(name, tuple(given), eqn.params["dimension"])
    if name == "pad":
        return _Linear(name, (given[0],), tuple(eqn.params["padding_config"]))
    return _moved(eqn, given[0])


def _with_bodies(eqn: Equation, inner: Marks) -> Equation:
    """Return an equation with unfolded bodies, of the same inputs and outputs."""

    def again(body: Any, own: Marks) -> Any:
        if not own:
            return body
        made = unfolded(core.ClosedJaxpr(*opened(body)), own)
        return made if hasattr(body, "consts") else made.jaxpr

    params = dict(eqn.params)
    if eqn.primitive.name == "cond":
        branches = enumerate(params["branches"])
        params["branches"] = tuple(
            again(body, _below(inner, number)) for number, body in branches
        )
    elif eqn.primitive.name == "while":
        for number, key in enumerate(("cond_jaxpr", "body_jaxpr")):
            params[key] = again(params[key], _below(inner, number))
    else:
        key = "jaxpr" if "jaxpr" in params else "call_jaxpr"
        params[key] = again(params[key], inner)
    return eqn.replace(params=params)


def _array(value: _Value) -> Array:
    """Return a weight as an array, computed as the original program does."""
    if not isinstance(value, _Linear):
        return value
    parts = [_array(part) for part in value.parts]
    if value.kind == "concatenate":
        return lax.concatenate(parts, value.of)
    if value.kind == "pad":
        return lax.pad(parts[0], parts[0].dtype.type(0), value.of)
    if value.kind == "dot_general":
        return bind(value.of, parts)[0]
    return _scaled(value, parts)


def _scaled(value: _Linear, parts: Sequence[Array]) -> Array:
    """Apply an operation that is alike for a weight and for its product."""
    if value.kind == "neg":
        return lax.neg(parts[0])
    if value.kind in ("add", "add_any"):
        return lax.add(*parts)
    if isinstance(value.of, float | int) and value.of == 1:
        return parts[0]
    factor = lax.convert_element_type(value.of, parts[0].dtype)
    apply = lax.mul if value.kind == "mul" else lax.div
    return apply(parts[0], lax.broadcast(factor, parts[0].shape))


def _moved(eqn: Equation, value: _Value) -> _Value:
    """Apply an equation that moves or casts a weight to the weight's parts."""
    if not isinstance(value, _Linear):
        return bind(eqn, [value])[0]
    name = eqn.primitive.name
    is_dot = value.kind == "dot_general"
    if is_dot and name not in _MOVES["dot"]:
        return bind(eqn, [_array(value)])[0]
    of = value.of
    parts = [_moved(eqn, part) for part in value.parts]
    if is_dot and name == "transpose":
        parts.reverse()
    elif is_dot:
        dtype = dict(preferred_element_type=eqn.params["new_dtype"])
        of = of.replace(params=of.params | dtype)
    elif name == "transpose" and value.kind == "concatenate":
        of = eqn.params["permutation"].index(of)
    elif name == "transpose" and value.kind == "pad":
        of = tuple(of[axis] for axis in eqn.params["permutation"])
    return _Linear(value.kind, tuple(parts), of)


def _product(
    eqn: Equation, x: Array, weight: _Value, side: int, numbers: Numbers
) -> Array:
    """Return the product of x and a weight over the parts of the weight.

    The weight is operand `side`.
    """
    contracted, batch = numbers
    if isinstance(weight, _Linear):
        if weight.kind in ("concatenate", "pad"):
            return _product_of_joined(eqn, x, weight, side, numbers)
        if weight.kind != "dot_general":
            products = [_product(eqn, x, part, side, numbers) for part in weight.parts]
            return _scaled(weight, products)
        if len(contracted[side]) == 1 and not batch[side]:
            # x (A B) is (x A) B, or (x B) A if x contracts B's own axis. The axis that
            # x gets is its last or its first one.
            (axis,) = contracted[side]
            first, second = weight.parts if axis == 0 else weight.parts[::-1]
            inner = _product(eqn, x, first, side, numbers)
            summed = ((axis,), (0,))
            if side:
                summed = ((inner.ndim - 1,), (axis,))
            inner = lax.convert_element_type(inner, x.dtype)
            return _product(eqn, inner, second, side, (summed, ((), ())))
    operands = (x, _array(weight)) if side else (_array(weight), x)
    params = eqn.params | dict(dimension_numbers=numbers)
    return eqn.primitive.bind(*operands, **params)


def _product_of_joined(
    eqn: Equation, x: Array, weight: _Linear, side: int, numbers: Numbers
) -> Array:
    """Return the product of x and a weight that is joined of parts, or padded."""
    contracted, batch = numbers
    shape = _shape(weight)
    # Where each axis of the weight is found: in x, in the result, or in both.
    own = (*contracted[side], *batch[side])
    of_x = (*contracted[1 - side], *batch[1 - side])
    in_x = dict(zip(own, of_x, strict=True))
    free = [axis for axis in range(len(shape)) if axis not in in_x]
    first = len(batch[0]) + (x.ndim - len(in_x) if side else 0)
    in_result = {axis: first + number for number, axis in enumerate(free)}
    in_result |= {axis: number for number, axis in enumerate(batch[side])}

    def product_of_part(part: _Value, starts: Mapping[int, int]) -> Array:
        """Multiply the entries of x that meet a part, which starts there."""
        rows = x
        for axis, start in starts.items():
            if axis in in_x:
                end = start + _shape(part)[axis]
                rows = lax.slice_in_dim(rows, start, end, axis=in_x[axis])
        return _product(eqn, rows, part, side, numbers)

    if weight.kind == "pad":
        (part,) = weight.parts
        low = {axis: low for axis, (low, _, _) in enumerate(weight.of)}
        y = product_of_part(part, low)
        config = [(0, 0, 0)] * y.ndim
        for axis, place in in_result.items():
            config[place] = weight.of[axis]
        return lax.pad(y, y.dtype.type(0), config)
    axis = weight.of
    start = 0
    products = []
    for part in weight.parts:
        products.append(product_of_part(part, {axis: start}))
        start += _shape(part)[axis]
    if axis in in_result:
        return lax.concatenate(products, in_result[axis])
    return sum(products[1:], products[0])


def _shape(value: _Value) -> tuple[int, ...]:
    """Return the shape of a weight."""
    if not isinstance(value, _Linear):
        return value.shape
    return jax.eval_shape(lambda: _array(value)).shape
