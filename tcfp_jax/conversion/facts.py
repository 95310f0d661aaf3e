"""`Fact`: the knowledge that the census has of one value of a program."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from tcfp_jax.conversion.views import Place, Shape, View

MULTIPLIED = "its weight is a product of parameters"


@dataclass(frozen=True)
class Fact:
    """The knowledge of one value.

    Attributes:
      params: paths of the parameters that the value was computed from.
      path, view: the one parameter that the value shows, or None.
      input: whether an input took part.
      closed: whether the function closes over the value. It counts as an input, and may
        be a forgotten parameter.
      why: why a weight is not a view, or how a weight was mixed into an input.
      matrix: whether a weight without a view was made of matrices of parameters, entry
        by entry or by moving entries. A product can quantize it at each use. Latents
        times a matrix are no such weight, but activations.
      follows: places of the products that the value was computed from, with no other
        product of a parameter between.
      linear: how a weight without a view is linear in parameters: "scaled" by a
        constant, "joined" of views or padded, "dot" of two matrices; "" if it is not,
        or not known here.
      uniform: "zero" or "number" if the value is one number, which may be spread over
        an array.
      is_weight: whether the value was computed from parameters alone.
    """

    params: frozenset[str] = frozenset()
    path: str | None = None
    view: View | None = None
    input: bool = False
    closed: bool = False
    why: str = ""
    matrix: bool = False
    follows: frozenset[Place] = frozenset()
    linear: str = ""
    uniform: str = ""
    is_weight: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_weight", bool(self.params) and not self.input)

    @staticmethod
    def join(facts: Sequence["Fact"]) -> "Fact":
        """Return the fact of a value that was computed from all of these."""
        inputs = [fact for fact in facts if fact.input]
        reasons = [fact.why for fact in facts if fact.why]
        return Fact(
            params=frozenset().union(*(fact.params for fact in facts)),
            input=bool(inputs),
            closed=bool(inputs) and all(fact.closed for fact in inputs),
            why=reasons[0] if reasons else "",
            follows=frozenset().union(*(fact.follows for fact in facts)),
        )

    @property
    def source(self) -> str:
        """Path of the parameter, or paths of all parameters in the value."""
        return self.path or " + ".join(sorted(self.params))

    @property
    def is_matrix(self) -> bool:
        """True if a weight is a matrix of parameters, or was made of some."""
        view = self.view
        return self.matrix or (view is not None and sum(map(bool, view.axes)) >= 2)

    @property
    def one_number(self) -> str:
        """The attribute `uniform`; "number" for a parameter of one number, too."""
        is_number = self.view is not None and not self.view.sizes
        return "number" if is_number else self.uniform

    def fills(self, size: int) -> bool:
        """Return whether an array of this size is no more than the weight it shows.

        A bias that was broadcast has fewer entries.
        """
        if self.view is None:
            return self.matrix
        return self.is_matrix and math.prod(self.view.sizes) == size

    def opaque(self, why: str = "", *, matrix: bool = False) -> "Fact":
        """Return the same fact without its view."""
        return dataclasses.replace(
            self, path=None, view=None, why=why or self.why, linear="", matrix=matrix
        )

    def outside(self, body: str) -> "Fact":
        """Return the fact of a value that leaves a body; a weight has no view then."""
        if not self.is_weight:
            return self.opaque()
        return self.opaque(f"its weight comes out of a {body}", matrix=self.is_matrix)

    def entry(self) -> "Fact":
        """Return the fact of one entry of an array that a scan runs over."""
        view = self.view
        if view is None:
            return self
        if len(view.axes[0]) == 1:
            return dataclasses.replace(self, view=view.drop(0))
        if view.axes[0]:
            why = "its weight is an entry of an axis that merges several stacks"
            return self.opaque(why, matrix=self.is_matrix)
        return dataclasses.replace(self, view=view.arrange(range(1, len(view.axes))))

    def local(self, shape: Shape) -> "Fact":
        """Return the fact of one device's part, of this shape, inside `shard_map`."""
        view = None if self.view is None else self.view.local(shape)
        if view is None and self.view is not None:
            why = "its weight is a device's part that cuts merged axes"
            return self.opaque(why, matrix=self.is_matrix)
        return dataclasses.replace(self, view=view)

    def carried(self) -> "Fact":
        """Return the fact of a value that a loop carries and changes."""
        why = "its weight is carried, and changed, by a loop" if self.is_weight else ""
        return self.opaque(why)

    def grown(self, other: "Fact") -> "Fact":
        """Return the fact of a carried value after one more round."""
        joined = Fact.join([self, other])
        why = self.why or other.why
        if self.is_weight and joined.input and self.view is None:
            why = "its weight is carried by a loop, which mixes it with an input"
        return dataclasses.replace(joined, why=why)


Facts = list[Fact]  # facts of an equation's operands or outputs
