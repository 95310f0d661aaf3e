"""Values of ordinary equations: views of a parameter, activations, changed weights.

The census lists a product of a weight that an input changed, with that reason. A value
that only looks like such a weight would be listed without need.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from tcfp_jax.conversion.facts import MULTIPLIED, Fact, Facts
from tcfp_jax.conversion.views import Equation, Place, move, operand_number

# Among the products that a value follows: rows of a table, which the model has learned,
# too
_LOOKUP: Place = (-1,)


def moved_view(eqn: Equation, inputs: Facts, number: int) -> Fact | None:
    """Return the fact of an output that is a view of an operand, or None."""
    at = operand_number(eqn, number)
    if at is None:
        return None
    shown = inputs[at].view
    if shown is None:
        return None
    # The start of a slice makes no difference to the view, so 0 stands for one that is
    # not known yet.
    starts = [0] * max(1, len(eqn.invars[0].aval.shape))
    view = move(shown, eqn, number, starts)
    return None if view is None else dataclasses.replace(inputs[at], view=view)


def activation(eqn: Equation, inputs: Facts, joined: Fact, number: int) -> Fact:
    """Return the fact of a value that an input took part in.

    It is an activation without parameters, or it may still be a weight, with a reason.
    """
    if eqn.primitive.name == "gather" and inputs[0].is_weight:
        joined = dataclasses.replace(joined, follows=joined.follows | {_LOOKUP})
    why = _mixed(eqn, number, inputs)
    if why and joined.closed:
        why = "its weight is computed from parameters and constants"
    size = size_of(eqn.outvars[number])
    for fact, var in zip(inputs, eqn.invars, strict=True):
        # A weight that an input changed keeps its size: it is that weight still
        if fact.input and fact.why and fact.params and size_of(var) == size:
            why = why or joined.why
    if not why:
        return dataclasses.replace(joined, params=frozenset(), why="")
    return dataclasses.replace(joined, why=why)


def _mixed(eqn: Equation, number: int, inputs: Facts) -> str:
    """Return why the result may still be a weight, although an input took part, or "".

    Rows that are looked up in a table are activations, and so is x plus a bias. A value
    of the size of a weight with two axes or more is still a weight: it was gathered by
    an array of indices, or an input changed it.
    """
    if eqn.primitive.name in ("gather", "dynamic_slice") and inputs[0].is_weight:
        if _is_matrix(eqn.params["slice_sizes"]):
            return "its weight is gathered by an array of indices"
        return ""
    size = size_of(eqn.outvars[number])
    for fact, var in zip(inputs, eqn.invars, strict=True):
        same_size = fact.is_weight and size_of(var) == size
        if same_size and _is_matrix(var.aval.shape) and _fills(fact, size):
            return "its weight is mixed with an input before the product"
    return ""


def _is_matrix(shape: Sequence[int]) -> bool:
    """Return whether two axes or more are longer than one."""
    return sum(size > 1 for size in shape) >= 2


def _fills(fact: Fact, size: int) -> bool:
    return fact.fills(size) or fact.why == MULTIPLIED


def size_of(var: Any) -> int:
    """Return the number of values of a variable."""
    return math.prod(getattr(var.aval, "shape", ()))
