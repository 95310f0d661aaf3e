"""Products of weights that are linear in parameters, rewritten as products of the
parameters themselves.

    x @ (2 W)         ->  2 (x @ W)
    x @ (W + A B)     ->  x @ W + (x @ A) @ B           merged LoRA
    x @ [W, V]        ->  [x @ W, x @ V]                and a weight with zeros around it, likewise

Haliax multiplies each weight by a scale of 1, Keras merges LoRA, other models join or
pad their weights. Such a weight shows no parameter, so no stored weight fits it; each
product of the new program reads one. The census marks these products and the operations
behind them, and `unfolded` makes the new program.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend import core

from tcfp_jax.conversion.bodies import Body, opened
from tcfp_jax.conversion.evaluate import bind, bodies_of, eval_jaxpr, is_inlined
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
    """Return how the weight that an equation computes is linear in parameters, and the
    number of that operand.

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
        sides = (0, 1) if name == "mul" else (0,)
        return next(
            (
                (levels[side], side)
                for side in sides
                if levels[side] and uniform[1 - side]
            ),
            ("", 0),
        )
    if name == "neg":
        return levels[0], 0
    if name in ("add", "add_any", "sub"):
        base = next((level for level in levels if level not in ("", "dot")), "")
        return base if sorted(levels) == sorted((base, "dot")) else "", 0
    if name == "concatenate":
        return "joined" if not {"", "dot"} & set(levels) else "", 0
    if name == "pad":
        zeros = uniform[1] == "zero" and all(
            low >= 0 and high >= 0 and inner == 0
            for low, high, inner in eqn.params["padding_config"]
        )
        return "joined" if zeros and levels[0] in ("scaled", "joined") else "", 0
    return (levels[0] if name in _MOVES.get(levels[0], ()) else ""), 0


class _Linear(NamedTuple):
    """A weight that is not computed yet: an operation, its operands that are weights,
    and its constant.
    """

    kind: str
    parts: tuple[Any, ...]
    # A factor, an axis, a padding, or the equation of a product of two parameters
    of: Any = None


def unfolded(program: core.ClosedJaxpr, marks: Marks) -> core.ClosedJaxpr:
    """Return the program with the marked products written over parameters.

    >>> program = jax.make_jaxpr(lambda w, x: x @ (2 * w))(jax.numpy.ones((4, 2)), jax.numpy.ones((3, 4)))
    >>> [eqn.primitive.name for eqn in unfolded(program, {(0,): 1, (1,): 1}).jaxpr.eqns]
    ['dot_general', 'broadcast_in_dim', 'mul']
    """
    run = lambda *inputs: list(
        map(_array, _evaluated((program.jaxpr, program.consts), inputs, marks))
    )
    return jax.make_jaxpr(run)(*(var.aval for var in program.jaxpr.invars))


def _evaluated(body: Body, inputs: Sequence[Any], marks: Marks) -> list[Any]:
    def rule(number: int, eqn: Equation, given: list[Any]) -> list[Any]:
        inner = {place[1:]: side for place, side in marks.items() if place[0] == number}
        name = eqn.primitive.name
        if () not in inner:
            if inner and is_inlined(eqn):
                return _evaluated(bodies_of(eqn)[0], given, inner)
            return bind(
                _with_bodies(eqn, inner) if inner else eqn,
                [_array(value) for value in given],
            )
        side = inner[()]
        if name in ("mul", "div"):
            factor = given[1 - side]
            return [
                _Linear(
                    name,
                    (given[side],),
                    factor.ravel()[0] if getattr(factor, "shape", ()) else factor,
                )
            ]
        if name == "dot_general" and side >= 0:
            return [
                _product(
                    eqn,
                    given[1 - side],
                    given[side],
                    side,
                    eqn.params["dimension_numbers"],
                )
            ]
        if name in ("neg", "add", "add_any", "dot_general"):
            return [_Linear(name, tuple(given), eqn)]
        if name == "sub":
            return [_Linear("add", (given[0], _Linear("neg", (given[1],))))]
        if name == "concatenate":
            return [_Linear(name, tuple(given), eqn.params["dimension"])]
        if name == "pad":
            return [_Linear(name, (given[0],), tuple(eqn.params["padding_config"]))]
        return [_moved(eqn, given[0])]

    return eval_jaxpr(body[0], [*body[1], *inputs], rule)


def _with_bodies(eqn: Equation, inner: Marks) -> Equation:
    """Return an equation with unfolded bodies, of the same inputs and outputs."""

    def again(body: Any, *number: int) -> Any:
        own = {
            place[len(number) :]: side
            for place, side in inner.items()
            if place[: len(number)] == number
        }
        if not own:
            return body
        jaxpr, consts = opened(body)
        made = unfolded(core.ClosedJaxpr(jaxpr, consts), own)
        return made if hasattr(body, "consts") else made.jaxpr

    params, name = eqn.params, eqn.primitive.name
    if name == "cond":
        changed = dict(
            branches=tuple(
                again(body, number) for number, body in enumerate(params["branches"])
            )
        )
    elif name == "while":
        changed = dict(
            cond_jaxpr=again(params["cond_jaxpr"], 0),
            body_jaxpr=again(params["body_jaxpr"], 1),
        )
    else:
        key = "jaxpr" if "jaxpr" in params else "call_jaxpr"
        changed = {key: again(params[key])}
    return eqn.replace(params={**params, **changed})


def _array(value: Any) -> Any:
    """Return a weight as an array, computed as the original program does."""
    if not isinstance(value, _Linear):
        return value
    parts = [_array(part) for part in value.parts]
    if value.kind == "concatenate":
        return lax.concatenate(parts, value.of)
    if value.kind == "pad":
        return lax.pad(parts[0], parts[0].dtype.type(0), value.of)
    return (
        bind(value.of, parts)[0]
        if value.kind == "dot_general"
        else _scaled(value, parts)
    )


def _scaled(value: _Linear, parts: Sequence[Any]) -> Any:
    """Apply an operation that is alike for a weight and for its product."""
    if value.kind == "neg":
        return lax.neg(parts[0])
    if value.kind in ("add", "add_any"):
        return lax.add(*parts)
    if isinstance(value.of, float | int) and value.of == 1:
        return parts[0]
    factor = lax.convert_element_type(value.of, parts[0].dtype)
    return (lax.mul if value.kind == "mul" else lax.div)(
        parts[0], lax.broadcast(factor, parts[0].shape)
    )


def _moved(eqn: Equation, value: Any) -> Any:
    """Apply an equation that moves or casts a weight to the weight's parts."""
    if not isinstance(value, _Linear):
        return bind(eqn, [value])[0]
    if value.kind == "dot_general" and eqn.primitive.name not in _MOVES["dot"]:
        return bind(eqn, [_array(value)])[0]
    of, parts = value.of, [_moved(eqn, part) for part in value.parts]
    if eqn.primitive.name == "transpose" and value.kind in ("concatenate", "pad"):
        order = eqn.params["permutation"]
        of = (
            order.index(of)
            if value.kind == "concatenate"
            else tuple(of[axis] for axis in order)
        )
    if eqn.primitive.name == "transpose" and value.kind == "dot_general":
        parts.reverse()
    if eqn.primitive.name == "convert_element_type" and value.kind == "dot_general":
        of = of.replace(
            params={**of.params, "preferred_element_type": eqn.params["new_dtype"]}
        )
    return _Linear(value.kind, tuple(parts), of)


def _product(eqn: Equation, x: Any, weight: Any, side: int, numbers: Any) -> Any:
    """Return the product of x and a weight, which is operand `side`, over the parts of
    the weight.
    """
    contracted, batch = numbers
    matrix = len(contracted[side]) == 1 and not batch[side]
    if not isinstance(weight, _Linear) or (weight.kind == "dot_general" and not matrix):
        operands = (x, _array(weight)) if side else (_array(weight), x)
        return eqn.primitive.bind(
            *operands, **{**eqn.params, "dimension_numbers": numbers}
        )
    if weight.kind == "dot_general":
        # x (A B) is (x A) B, or (x B) A if x contracts B's own axis. The axis that x
        # gets is its last or its first one.
        first = contracted[side][0]
        a, b = weight.parts if first == 0 else weight.parts[::-1]
        inner = _product(eqn, x, a, side, numbers)
        at = inner.ndim - 1 if side else 0
        pairs = ((at,), (first,)) if side else ((first,), (at,))
        return _product(
            eqn, lax.convert_element_type(inner, x.dtype), b, side, (pairs, ((), ()))
        )
    again = lambda part, x=x: _product(eqn, x, part, side, numbers)
    if weight.kind not in ("concatenate", "pad"):
        return _scaled(weight, [again(part) for part in weight.parts])
    # Where each axis of the weight is found: in x, in the result, or in both.
    in_x = dict(
        zip(
            (*contracted[side], *batch[side]),
            (*contracted[1 - side], *batch[1 - side]),
            strict=True,
        )
    )
    free = [axis for axis in range(len(_shape(weight))) if axis not in in_x]
    first = len(batch[0]) + (x.ndim - len(in_x) if side else 0)
    in_result = {
        **{axis: first + number for number, axis in enumerate(free)},
        **{axis: number for number, axis in enumerate(batch[side])},
    }
    if weight.kind == "pad":
        (part,), low = weight.parts, [low for low, _, _ in weight.of]
        for axis, size in enumerate(_shape(part)):
            if axis in in_x:
                x = lax.slice_in_dim(x, low[axis], low[axis] + size, axis=in_x[axis])
        y = again(part, x)
        config = [(0, 0, 0)] * y.ndim
        for axis, place in in_result.items():
            config[place] = weight.of[axis]
        return lax.pad(y, y.dtype.type(0), config)
    axis, start, made = weight.of, 0, []
    for part in weight.parts:
        size = _shape(part)[axis]
        made.append(
            again(
                part,
                (
                    lax.slice_in_dim(x, start, start + size, axis=in_x[axis])
                    if axis in in_x
                    else x
                ),
            )
        )
        start += size
    return (
        lax.concatenate(made, in_result[axis])
        if axis in in_result
        else sum(made[1:], made[0])
    )


def _shape(value: Any) -> tuple[int, ...]:
    """Return the shape of a weight."""
    return (
        jax.eval_shape(lambda: _array(value)).shape
        if isinstance(value, _Linear)
        else value.shape
    )
