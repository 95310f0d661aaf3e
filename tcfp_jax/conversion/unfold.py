"""Products of computed weights, rewritten as products of the parameters themselves.

    x @ (2 W)      ->  2 (x @ W)
    x @ (W + A B)  ->  x @ W + (x @ A) @ B    merged LoRA
    x @ [W, V]     ->  [x @ W, x @ V]         likewise a weight with zeros around it

The weight has to be linear in parameters. Haliax multiplies each weight by a scale of
1, Keras merges LoRA, other models join or pad their weights. Such a weight shows no
parameter, so no stored weight fits it; each product of the new program reads one. The
census marks these products and the operations after them, and `unfolded` makes the new
program. `report.examined` keeps the rewritten products of which a part converts; others
stay as they were.
"""

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
# The equations that move a weight's entries.
MOVES = (
    "convert_element_type",
    "copy",
    "transpose",
    "reshape",
    "squeeze",
    "broadcast_in_dim",
    "slice",
    "sharding_constraint",
)
# Those that join weights, or add zeros.
JOINS = ("concatenate", "stack", "pad")
# Those that act on a weight as on its parts.
_MOVES = {
    "dot": ("convert_element_type", "transpose", "reshape"),
    "joined": ("convert_element_type", "copy", "transpose"),
    "scaled": MOVES,
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


def is_low_rank(eqn: Equation) -> bool:
    """Return whether a product is A[..., r] B[r, ...], smaller than its result."""
    first, second = (tuple(var.aval.shape) for var in eqn.invars)
    last = len(first) - 1
    plain = eqn.params.get("dimension_numbers") == (((last,), (0,)), ((), ()))
    if not plain or last < 1 or len(second) < 2:
        return False
    whole = math.prod(eqn.outvars[0].aval.shape)
    return math.prod(first) + math.prod(second) <= whole


class _Linear(NamedTuple):
    """A weight that is not computed yet.

    Attributes:
      kind: the operation.
      parts: its operands that are weights.
      of: its constant: a factor, an axis or a padding.
      eqn: the equation that computes the weight.
      given: the operands of the equation.
    """

    kind: str
    parts: tuple["_Value", ...]
    of: Any
    eqn: Equation
    given: Sequence["_Value"]


_Value = Array | _Linear
# Results of equations of a new program, each with the places of the old products that
# the equation, or its body, belongs to.
_Made = list[tuple[Array, Mapping[Place, Place]]]


class Unfolded(NamedTuple):
    """A rewritten program.

    Attributes:
      program: the program.
      origins: the place of the marked product that each new product is a part of, by
        the new product's place.
    """

    program: core.ClosedJaxpr
    origins: dict[Place, Place]


def unfolded(program: core.ClosedJaxpr, marks: Marks) -> Unfolded:
    """Return the program with the marked products written over parameters.

    >>> w, x = jax.numpy.ones((4, 2)), jax.numpy.ones((3, 4))
    >>> program = jax.make_jaxpr(lambda w, x: x @ (2 * w))(w, x)
    >>> made, origins = unfolded(program, {(0,): 1, (1,): 1})
    >>> [eqn.primitive.name for eqn in made.jaxpr.eqns], origins
    (['dot_general', 'broadcast_in_dim', 'mul'], {(0,): (1,)})
    """
    made: _Made = []

    def run(*inputs: Array) -> list[Array]:
        body = (program.jaxpr, program.consts)
        outputs = _evaluated(body, inputs, marks, made)
        # More outputs, which tell the numbers of equations
        return [*map(_array, outputs), *(result for result, _ in made)]

    traced = jax.make_jaxpr(run)(*(var.aval for var in program.jaxpr.invars))
    jaxpr = traced.jaxpr
    numbers: dict[Any, int] = {}
    for number, eqn in enumerate(jaxpr.eqns):
        numbers |= dict.fromkeys(eqn.outvars, number)
    own = len(program.jaxpr.outvars)
    origins = {}
    for var, (_, below) in zip(jaxpr.outvars[own:], made, strict=True):
        for inner, place in below.items():
            if var in numbers:
                origins[numbers[var], *inner] = place
    jaxpr = jaxpr.replace(
        outvars=jaxpr.outvars[:own], debug_info=program.jaxpr.debug_info
    )
    return Unfolded(core.ClosedJaxpr(jaxpr, traced.consts), origins)


def _evaluated(
    body: Body, inputs: Sequence[_Value], marks: Marks, made: _Made
) -> list[_Value]:
    """Return the outputs of a program, some of which may be `_Linear`."""
    jaxpr, consts = body

    def rule(number: int, eqn: Equation, given: list[_Value]) -> Sequence[_Value]:
        inner = _below(marks, number)
        if () in inner:
            product = _Product(eqn, inner[()])
            output = _linear(eqn, given, product)
            made.extend((part, {(): (number,)}) for part in product.parts)
            return [output]
        if inner and is_inlined(eqn):  # it has no product
            return _evaluated(bodies_of(eqn)[0], given, inner, [])
        origins: dict[Place, Place] = {}
        if inner:
            eqn, below = _with_bodies(eqn, inner)
            for place, old in below.items():
                origins[place] = (number, *old)
        outputs = bind(eqn, list(map(_array, given)))
        if origins:
            made.extend((output, origins) for output in outputs)
        return outputs

    return eval_jaxpr(jaxpr, [*consts, *inputs], rule)


def _below(marks: Marks, number: int) -> Marks:
    """Return the marks at an equation, or in a body, by their places inside."""
    inner = {}
    for (first, *rest), side in marks.items():
        if first == number:
            inner[tuple(rest)] = side
    return inner


def _linear(eqn: Equation, given: list[_Value], product: "_Product") -> _Value:
    """Return the output of a marked equation.

    `product` is the equation as a product, if it is one of an input.
    """
    name = eqn.primitive.name
    side = product.side
    if name == "dot_general" and side >= 0:
        x = _array(given[1 - side])
        return product.of(x, given[side], eqn.params["dimension_numbers"])
    parts = tuple(given)
    of: Any = None
    if name in ("mul", "div"):
        parts = (given[side],)
        of = _array(given[1 - side])
        if getattr(of, "shape", ()):
            of = of.ravel()[0]
    elif name == "concatenate":
        of = eqn.params["dimension"]
    elif name == "pad":
        parts = parts[:1]
        of = tuple(eqn.params["padding_config"])
    elif name not in ("neg", "add", "add_any", "sub", "dot_general"):
        return _moved(eqn, given[0])
    return _Linear(name, parts, of, eqn, given)


def _with_bodies(eqn: Equation, inner: Marks) -> tuple[Equation, dict[Place, Place]]:
    """Return an equation with unfolded bodies, of the same inputs and outputs.

    The origins of the products in the bodies come with it.
    """
    origins: dict[Place, Place] = {}

    def again(body: Any, own: Marks, *number: int) -> Any:
        if not own:
            return body
        made, below = unfolded(core.ClosedJaxpr(*opened(body)), own)
        for place, old in below.items():
            origins[*number, *place] = (*number, *old)
        return made if hasattr(body, "consts") else made.jaxpr

    params = dict(eqn.params)
    if eqn.primitive.name == "cond":
        branches = []
        for number, body in enumerate(params["branches"]):
            branches.append(again(body, _below(inner, number), number))
        params["branches"] = tuple(branches)
    elif eqn.primitive.name == "while":
        for number, key in enumerate(("cond_jaxpr", "body_jaxpr")):
            params[key] = again(params[key], _below(inner, number), number)
    else:
        key = "jaxpr" if "jaxpr" in params else "call_jaxpr"
        params[key] = again(params[key], inner)
    return eqn.replace(params=params), origins


def _array(value: _Value) -> Array:
    """Return a weight as an array, computed as the original program does."""
    if not isinstance(value, _Linear):
        return value
    return bind(value.eqn, list(map(_array, value.given)))[0]


def _moved(eqn: Equation, value: _Value) -> _Value:
    """Apply an equation that moves or casts a weight to the weight's parts."""
    if not isinstance(value, _Linear):
        return bind(eqn, [value])[0]
    name = eqn.primitive.name
    of = value.of
    if value.kind == "dot_general":
        moves = _moves_of_factors(eqn, value)
        if moves is None:
            return bind(eqn, [_array(value)])[0]
        parts = list(map(_moved, moves, value.parts))
        if name == "transpose":
            parts.reverse()
    else:
        parts = [_moved(eqn, part) for part in value.parts]
    if name == "transpose" and value.kind == "concatenate":
        of = eqn.params["permutation"].index(of)
    elif name == "transpose" and value.kind == "pad":
        of = tuple(of[axis] for axis in eqn.params["permutation"])
    return _Linear(value.kind, tuple(parts), of, eqn, [value])


def _moves_of_factors(eqn: Equation, value: _Linear) -> list[Equation] | None:
    """Return how A and B move so that A B moves by an equation, or None."""
    name = eqn.primitive.name
    first, second = map(_shape, value.parts)
    if name not in _MOVES["dot"]:
        return None
    if name == "reshape":
        new = eqn.params["new_sizes"]
        # The new axes that A has: they have as many entries as A's own
        counts = itertools.accumulate(new, operator.mul, initial=1)
        found = [
            number
            for number, size in enumerate(counts)
            if size == math.prod(first[:-1])
        ]
        if not found or not 0 < found[0] < len(new):
            return None
        shapes = [(*new[: found[0]], first[-1]), (second[0], *new[found[0] :])]
        moves = []
        for shape in shapes:
            moves.append(eqn.replace(params=eqn.params | dict(new_sizes=shape)))
        return moves
    if name == "transpose" and len(first) + len(second) > 4:
        return None
    return [eqn, eqn]


@dataclass
class _Product:
    """A marked product that is written over the parts of its weight.

    Attributes:
      eqn: its equation.
      side: the operand that is the weight.
      parts: the products that were made of it, without the small ones of A B.
    """

    eqn: Equation
    side: int
    parts: list[Array] = field(default_factory=list)

    def of(self, x: Array, weight: _Value, numbers: Numbers) -> Array:
        """Return the product of x and a weight, or a part of it."""
        y: Array | None = None
        if isinstance(weight, _Linear):
            if weight.kind in ("concatenate", "pad"):
                return self.of_joined(x, weight, numbers)
            if weight.kind != "dot_general":
                terms = [self.of(x, part, numbers) for part in weight.parts]
                return _scaled(weight, terms)
            y = self.through_rank(x, weight, numbers)
        if y is None:
            operands = (x, _array(weight)) if self.side else (_array(weight), x)
            params = self.eqn.params | dict(dimension_numbers=numbers)
            y = self.eqn.primitive.bind(*operands, **params)
            self.parts.append(y)
        return y

    def through_rank(self, x: Array, weight: _Linear, numbers: Numbers) -> Array | None:
        """Return x (A B) as (x A) B, or as (x B) A if x contracts B's own axes.

        None: x contracts axes of both, or some of B's only, or asks for a sharding.
        """
        contracted, batch = numbers
        first, second = weight.parts
        own: Sequence[int] = contracted[self.side]
        rank = len(_shape(first)) - 1  # number of axes that A B has of A
        link = 0
        if batch[self.side] or not own or self.eqn.params.get("out_sharding"):
            return None
        if min(own) >= rank and len(own) == len(_shape(second)) - 1:
            first, second = second, first
            own = [axis - rank + 1 for axis in own]
            link = rank
        elif max(own) >= rank:
            return None
        product = _Product(self.eqn, 1)
        summed = (contracted[1 - self.side], tuple(own))
        inner = product.of(x, first, (summed, ((), ())))
        inner = lax.convert_element_type(inner, x.dtype)
        y = product.of(inner, second, (((inner.ndim - 1,), (link,)), ((), ())))
        if self.side:
            return y
        # The axes of x come first, and have to come last
        rest = x.ndim - len(own)
        return y.transpose(*range(rest, y.ndim), *range(rest))

    def of_joined(self, x: Array, weight: _Linear, numbers: Numbers) -> Array:
        """Return the product of x and a weight that is joined of parts, or padded."""
        contracted, batch = numbers
        side = self.side
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
            return self.of(rows, part, numbers)

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


def _scaled(weight: _Linear, terms: Sequence[Array]) -> Array:
    """Return the product of a weight from those of its parts."""
    (first, *_) = terms
    if weight.kind == "neg":
        return lax.neg(first)
    if weight.kind == "sub":
        return lax.sub(*terms)
    if weight.kind in ("add", "add_any"):
        return lax.add(*terms)
    if isinstance(weight.of, float | int) and weight.of == 1:
        return first
    factor = lax.convert_element_type(weight.of, first.dtype)
    apply = lax.mul if weight.kind == "mul" else lax.div
    return apply(first, lax.broadcast(factor, first.shape))


def _shape(value: _Value) -> tuple[int, ...]:
    """Return the shape of a weight."""
    if not isinstance(value, _Linear):
        return value.shape
    return jax.eval_shape(lambda: _array(value)).shape
