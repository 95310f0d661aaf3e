"""`Fact`: what the census knows of one value of a program, and how facts meet."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tcfp_jax.conversion.views import View

COMPUTED = "its weight is computed from parameters, and is not a view of one"


@dataclass(frozen=True)
class Fact:
    """What is known of one value.

    Attributes:
      params: the parameters that it was computed from, by path.
      path, view: of the one parameter that it shows, or None.
      input: whether an input took part.
      closed: an array that the function closes over: it counts as an input, and may be a parameter that was forgotten.
      why: of a weight that is no view, the reason, where one is known; of an input, that a weight was mixed into it.
      follows: the products that it was computed from with no other product of a parameter between.
    """

    params: frozenset[str] = frozenset()
    path: str | None = None
    view: View | None = None
    input: bool = False
    closed: bool = False
    why: str = ""
    follows: frozenset[Any] = frozenset()

    @property
    def is_weight(self) -> bool:
        """From parameters alone."""
        return bool(self.params) and not self.input

    def opaque(self, why: str = "") -> "Fact":
        """The same without its view."""
        return dataclasses.replace(self, path=None, view=None, why=why or self.why)


def join(facts: Sequence[Fact]) -> Fact:
    """What is known of a value that was computed from all of these."""
    params: frozenset[str] = frozenset().union(*(fact.params for fact in facts))
    follows: frozenset[Any] = frozenset().union(*(fact.follows for fact in facts))
    used = [fact for fact in facts if fact.input]
    why = next((fact.why for fact in facts if fact.why), "")
    closed = bool(used) and all(fact.closed for fact in used)
    return Fact(params, None, None, bool(used), closed, why, follows)


def closed_over(consts: Any) -> list[Fact]:
    """Arrays that a function closes over: inputs, as far as anyone can tell, or parameters that were forgotten."""
    return [Fact(input=True, closed=True) if getattr(const, "ndim", 0) else Fact() for const in consts]


def item(fact: Fact) -> Fact:
    """One entry of what a scan runs over."""
    view = fact.view
    if view is None:
        return fact
    if len(view.axes[0]) == 1:
        return dataclasses.replace(fact, view=view.drop(0))
    return fact.opaque(COMPUTED) if view.axes[0] else dataclasses.replace(fact, view=view.squeeze((0,)))


def carried(fact: Fact) -> str:
    """Why a value that a loop carries is no view."""
    return "its weight is carried, and changed, by a loop" if fact.is_weight else fact.why


def grow(fact: Fact, other: Fact) -> Fact:
    """What is known of a carried value after one more round."""
    joined = join([fact, other])
    why = fact.why or other.why
    if fact.is_weight and joined.input and fact.view is None:
        why = "its weight is carried by a loop, which mixes it with an input"
    return dataclasses.replace(joined, why=why)


def mixed(eqn: Any, number: int, inputs: list[Fact]) -> str:
    """Why the result of an ordinary equation may still be a weight, although an input took part; "" if it is none.

    Rows looked up in a table are activations, and so is x plus a bias. What keeps the size of a weight of two axes or
    more is still a weight: one that was gathered by an array, or that an input changed.
    """
    name, out = eqn.primitive.name, eqn.outvars[number].aval
    if name in ("gather", "dynamic_slice") and inputs[0].is_weight:
        sizes = eqn.params["slice_sizes"]
        if sum(size > 1 for size in sizes) >= 2:
            return "its weight is gathered by an array of indices"
        return ""
    for fact, var in zip(inputs, eqn.invars, strict=True):
        shape = getattr(var.aval, "shape", ())
        wide = sum(size > 1 for size in shape) >= 2
        if fact.is_weight and wide and math.prod(shape) == math.prod(out.shape) and _is_matrix(fact):
            return "its weight is mixed with an input before the product"
    return ""


def same_size(eqn: Any, number: int, inputs: list[Fact]) -> bool:
    """Whether the operand that a weight was mixed into keeps its size."""
    size = math.prod(eqn.outvars[number].aval.shape)
    return any(fact.why and fact.params and math.prod(var.aval.shape) == size
               for fact, var in zip(inputs, eqn.invars, strict=True))  # fmt: skip


def _is_matrix(fact: Fact) -> bool:
    """Whether a weight has two axes of its own: a bias or a gain that was broadcast has one."""
    return fact.view is None or sum(len(axes) > 0 for axes in fact.view.axes) >= 2
