"""The facts of loops and branches: how the census walks the bodies of an equation.

Each rule gets the function that walks a body, the equation, the facts of its operands
and the equation's place, and returns the facts of its outputs.
"""

import dataclasses
from collections.abc import Callable, Sequence

from tcfp_jax.conversion.bodies import Body, Scan, groups_of_while, opened
from tcfp_jax.conversion.views import COMPUTED, Equation, Fact, Facts, Place

Walk = Callable[[Body, Sequence[Fact], Place], Facts]


def _scan(walk: Walk, eqn: Equation, inputs: Facts, place: Place) -> Facts:
    loop = Scan.of(eqn)
    consts, carry, arrays = loop.groups(inputs)
    entries = [fact.entry() for fact in arrays]
    # A value that every round hands on unchanged keeps its view.
    kept = loop.kept
    for number, fact in enumerate(carry):
        if number not in kept:
            carry[number] = fact.carried()

    def one_round(carry: Facts) -> Facts:
        return walk(loop.body, [*consts, *carry, *entries], place)

    carry, outputs = _settled(one_round, carry, kept)
    # An input that the body returns untouched is stacked as it came, so the whole array
    # keeps its view.
    stacked = [fact.computed() for fact in outputs[loop.carried :]]
    for number, operand in loop.returned.items():
        stacked[number] = inputs[operand]
    return [*carry, *stacked]


def _while(walk: Walk, eqn: Equation, inputs: Facts, place: Place) -> Facts:
    test = opened(eqn.params["cond_jaxpr"])
    body = opened(eqn.params["body_jaxpr"])
    test_consts, body_consts, carry = groups_of_while(eqn, inputs)

    def one_round(carry: Facts) -> Facts:
        return walk(body, [*body_consts, *carry], (*place, 1))

    # A body need not run once, and no output of it is known to be unchanged: a carried
    # weight loses its view.
    carry, _ = _settled(one_round, [fact.carried() for fact in carry], set())
    walk(test, [*test_consts, *carry], (*place, 0))
    return carry


def _settled(
    one_round: Callable[[Facts], Facts], carry: Facts, kept: set[int]
) -> tuple[Facts, Facts]:
    """Walk a loop's body until its facts rest.

    Returns the facts of the carried values, and those of the body's outputs.
    """
    # A carried value may come from more in the second round; facts only grow, so this
    # ends
    while True:
        outputs = one_round(carry)
        grown = list(carry)
        for number, fact in enumerate(carry):
            if number not in kept:
                grown[number] = fact.grown(outputs[number])
        if grown == carry:
            return carry, outputs
        carry = grown


def _cond(walk: Walk, eqn: Equation, inputs: Facts, place: Place) -> Facts:
    chosen = Fact(input=inputs[0].input)
    branches = []
    for number, branch in enumerate(eqn.params["branches"]):
        branches.append(walk(opened(branch), inputs[1:], (*place, number)))
    # A choice between two weights is not a view, even if both are the same weight:
    # branches hand over numbers.
    outputs = [Fact.join([chosen, *facts]) for facts in zip(*branches, strict=True)]
    for number, fact in enumerate(outputs):
        if fact.is_weight:
            outputs[number] = dataclasses.replace(fact, why=COMPUTED)
    return outputs


RULES: dict[str, Callable[[Walk, Equation, Facts, Place], Facts]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
