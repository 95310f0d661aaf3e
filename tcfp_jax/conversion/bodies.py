"""Bodies of equations: the programs that loops and branches run, and their operands.

JAX writes the operands of a scan or a while loop in one list: constants first, then the
values that the loop carries. The census and the evaluation read these lists here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from jax.extend import core

from tcfp_jax.conversion.views import Equation

# A program and its constants.
Body = tuple[core.Jaxpr, Sequence[Any]]
# The step of each equation of a body, by its number: the recipe of a product, "lookup"
# for rows that come from the stored form of a table, or the plan of the equation's own
# body. Tuples, because a plan is part of a cache's key.
Plan = tuple[tuple[int, Any], ...]
_T = TypeVar("_T")


def opened(body: Any) -> Body:
    """Return the jaxpr and the constants of a body, which may be closed or not."""
    return getattr(body, "jaxpr", body), getattr(body, "consts", ())


@dataclass(frozen=True)
class Scan:
    """A scan, whose operands are constants, carried values and the arrays it runs over.

    Attributes:
      body: the program of one round.
      consts: number of constants.
      carried: number of carried values.
      options: keyword arguments that `lax.scan` needs to make the same loop again.
    """

    body: Body
    consts: int
    carried: int
    options: dict[str, Any]

    @staticmethod
    def of(eqn: Equation) -> "Scan":
        """Return the scan that an equation is."""
        params = eqn.params
        if "num_consts" in params:
            consts = params["num_consts"]
            carried = params["num_carry"]
        else:  # jax 0.11 keeps flat trees instead of numbers
            const_tree, carry_tree, _ = params["ft_in"].unpack()
            consts = len(list(const_tree))
            carried = len(list(carry_tree))
        names = {"length", "reverse", "unroll", "_split_transpose"} & set(params)
        options = {name: params[name] for name in names}
        return Scan(opened(params["jaxpr"]), consts, carried, options)

    def groups(self, operands: list[_T]) -> tuple[list[_T], list[_T], list[_T]]:
        """Return the constants, the carried values and the arrays."""
        first = self.consts
        arrays = first + self.carried
        return operands[:first], operands[first:arrays], operands[arrays:]

    @property
    def kept(self) -> set[int]:
        """Numbers of carried values that every round hands on unchanged."""
        jaxpr, _ = self.body
        _, carry, _ = self.groups(jaxpr.invars)
        pairs = enumerate(zip(carry, jaxpr.outvars, strict=False))
        return {number for number, (before, after) in pairs if before is after}

    @property
    def returned(self) -> dict[int, int]:
        """Operand whose entries are returned untouched, by the number of an output.

        The stacked output is then the operand itself.
        """
        jaxpr, _ = self.body
        place = {var: number for number, var in enumerate(jaxpr.invars)}
        found = {}
        for number, var in enumerate(jaxpr.outvars[self.carried :]):
            if isinstance(var, core.Literal):
                continue
            operand = place.get(var, -1)
            if operand >= self.consts + self.carried:
                found[number] = operand
        return found


def groups_of_while(
    eqn: Equation, operands: list[_T]
) -> tuple[list[_T], list[_T], list[_T]]:
    """Return the constants of the test and of the body, and the carried values."""
    first = eqn.params["cond_nconsts"]
    carry = first + eqn.params["body_nconsts"]
    return operands[:first], operands[first:carry], operands[carry:]
