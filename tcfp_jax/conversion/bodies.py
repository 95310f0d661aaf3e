"""Bodies of equations: loops, branches and devices, in the census and the evaluation.

JAX writes the operands of a scan or a while loop in one list: constants first, then the
values that the loop carries. A rule of `WALKS` takes the facts of an equation's
operands through its bodies, and a rule of `RUNS` runs these bodies again by their
plans. Both get the function that does this for one body.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend import core
from jax.sharding import PartitionSpec

from tcfp_jax.conversion.facts import Fact, Facts
from tcfp_jax.conversion.shown import Parts, Shown, Values, bare
from tcfp_jax.conversion.views import Equation, Place, Shape

# A program and its constants.
Body = tuple[core.Jaxpr, Sequence[Any]]
# The step of each equation of a body, by its number: the recipe of a product, "lookup"
# for rows that come from the stored form of a table, or the plan of the equation's own
# body. Tuples, because a plan is part of a cache's key.
Plan = tuple[tuple[int, Any], ...]
RandomKey = Array | None
Walk = Callable[[Body, Sequence[Fact], Place], Facts]
Run = Callable[[Body, Values, Plan, RandomKey], list[Array]]
_T = TypeVar("_T")
_Entry = Callable[[Any], Any]
_Split = tuple[Parts, tuple[PartitionSpec, PartitionSpec], Callable[[Parts], Shown]]


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


@dataclass(frozen=True)
class _While:
    """A while loop: its test and its body, each with constants, and carried values."""

    test: Body
    body: Body
    test_consts: list[Any]
    body_consts: list[Any]
    carry: list[Any]

    @staticmethod
    def of(eqn: Equation, operands: list[Any]) -> "_While":
        """Return the loop that an equation is, with these operands."""
        params = eqn.params
        first = params["cond_nconsts"]
        carry = first + params["body_nconsts"]
        return _While(
            opened(params["cond_jaxpr"]),
            opened(params["body_jaxpr"]),
            operands[:first],
            operands[first:carry],
            operands[carry:],
        )


# Facts of bodies
# --------------------------------------------------------------------------------------


def _walk_scan(walk: Walk, eqn: Equation, inputs: Facts, place: Place) -> Facts:
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
    stacked = [fact.outside("scan") for fact in outputs[loop.carried :]]
    for number, operand in loop.returned.items():
        stacked[number] = inputs[operand]
    return [*carry, *stacked]


def _walk_while(walk: Walk, eqn: Equation, inputs: Facts, place: Place) -> Facts:
    loop = _While.of(eqn, inputs)

    def one_round(carry: Facts) -> Facts:
        return walk(loop.body, [*loop.body_consts, *carry], (*place, 1))

    # A body need not run once, and no output of it is known to be unchanged: a carried
    # weight loses its view.
    begin = [fact.carried() for fact in loop.carry]
    carry, _ = _settled(one_round, begin, set())
    walk(loop.test, [*loop.test_consts, *carry], (*place, 0))
    return carry


def _settled(
    one_round: Callable[[Facts], Facts], carry: Facts, kept: set[int]
) -> tuple[Facts, Facts]:
    """Walk a loop's body until its facts no longer change.

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


def _walk_cond(walk: Walk, eqn: Equation, inputs: Facts, place: Place) -> Facts:
    chosen = Fact(input=inputs[0].input)
    branches = []
    for number, branch in enumerate(eqn.params["branches"]):
        branches.append(walk(opened(branch), inputs[1:], (*place, number)))
    # A choice between two weights is not a view, even if both are the same weight:
    # branches hand over numbers.
    outputs = []
    for facts in zip(*branches, strict=True):
        joined = Fact.join([chosen, *facts])
        if joined.is_weight:
            matrix = all(fact.is_matrix for fact in facts)
            joined = joined.opaque("a lax.cond chooses its weight", matrix=matrix)
        outputs.append(joined)
    return outputs


WALKS: dict[str, Callable[[Walk, Equation, Facts, Place], Facts]] = {
    "scan": _walk_scan,
    "while": _walk_while,
    "cond": _walk_cond,
}


# Bodies that run again
# --------------------------------------------------------------------------------------


def _run_scan(
    run: Run, eqn: Equation, inputs: Values, plan: Plan, key: RandomKey
) -> Values:
    loop = Scan.of(eqn)
    consts, carry, arrays = loop.groups(inputs)
    _, carry_vars, array_vars = loop.groups(eqn.invars)
    # A view that every round hands on unchanged stays outside of the loop. So does a
    # stack of which the loop returns every entry as it got it.
    kept = {number for number in loop.kept if isinstance(carry[number], Shown)}
    moving = [number for number in range(loop.carried) if number not in kept]
    returned = loop.returned
    stacks = range(len(eqn.outvars) - loop.carried)
    made = [number for number in stacks if number not in returned]
    runs = list(map(_runs_over, arrays, array_vars))

    def one_round(moved: Values, numbered: tuple[Any, Values]) -> tuple[Values, Values]:
        turn, items = numbered
        # each layer of a stack draws bits of its own
        drawn = None if key is None else jax.random.fold_in(key, turn)
        own = list(carry)
        for number, value in zip(moving, moved, strict=True):
            own[number] = value
        entries = [make(item) for (_, make), item in zip(runs, items, strict=True)]
        outputs = run(loop.body, [*consts, *own, *entries], plan, drawn)
        after = [outputs[number] for number in moving]
        return after, [outputs[loop.carried + number] for number in made]

    begin = bare(
        [carry[number] for number in moving], [carry_vars[number] for number in moving]
    )
    turns = None if key is None else jnp.arange(eqn.params["length"])
    stacked = [array for array, _ in runs]
    last, rest = lax.scan(one_round, begin, (turns, stacked), **loop.options)
    for number, value in zip(moving, last, strict=True):
        carry[number] = value
    for number, operand in returned.items():
        rest.insert(number, inputs[operand])
    return [*carry, *rest]


def _runs_over(value: Any, var: Any) -> tuple[Any, _Entry]:
    """Return the array that a scan runs over, and the function of one of its entries.

    The function makes the entry a value of the body.
    """
    if not isinstance(value, Shown):
        return value, _same
    if len(value.axes[0]) == 1:
        return value.leading(0)
    if not value.axes[0]:  # the same in every round
        every = value.arrange(range(1, len(value.axes)))
        return None, lambda _: every
    return value.array(var.aval.shape), _same


def _same(item: Any) -> Any:
    return item


def _run_while(
    run: Run, eqn: Equation, inputs: Values, plan: Plan, key: RandomKey
) -> Values:
    loop = _While.of(eqn, inputs)
    plans = dict(plan)

    def goes_on(carry: Values) -> Array:
        operands = [*loop.test_consts, *carry]
        (again,) = run(loop.test, operands, plans.get(0, ()), key)
        return again

    def one_round(carry: Values) -> Values:
        operands = [*loop.body_consts, *carry]
        return run(loop.body, operands, plans.get(1, ()), key)

    return lax.while_loop(goes_on, one_round, bare(loop.carry, eqn.outvars))


def _run_cond(
    run: Run, eqn: Equation, inputs: Values, plan: Plan, key: RandomKey
) -> Values:
    plans = dict(plan)
    # JAX reads no reference inside a branch.
    inputs = [x.read() if isinstance(x, Shown) else x for x in inputs]
    # Branches return arrays: a choice between two views is not a view.
    branches = []
    for number, body in enumerate(eqn.params["branches"]):
        own = plans.get(number, ())
        branches.append(functools.partial(run, opened(body), inputs[1:], own, key))
    (chosen,) = bare(inputs[:1], eqn.invars[:1])
    return lax.switch(chosen, branches)


def _run_shards(
    run: Run, eqn: Equation, inputs: Values, plan: Plan, key: RandomKey
) -> Values:
    params = eqn.params
    body = opened(params["jaxpr"])
    variables: Values = body[0].invars
    given: Values = []
    in_specs: list[Any] = []
    value_of: list[_Entry] = []  # makes a device's arrays a value of the body
    for value, outer, inner, spec in zip(
        inputs, eqn.invars, variables, params["in_specs"], strict=True
    ):
        shown = isinstance(value, Shown)
        split = _split(value, inner.aval.shape, spec) if shown else None
        arrays, specs, part = split or (bare([value], [outer])[0], spec, _same)
        given.append(arrays)
        in_specs.append(specs)
        value_of.append(part)

    def on_a_device(*parts: Any) -> tuple[Array, ...]:
        values = [make(part) for make, part in zip(value_of, parts, strict=True)]
        return tuple(run(body, values, plan, key))

    out_specs: tuple[PartitionSpec, ...] = tuple(params["out_specs"])
    mapped = jax.shard_map(
        on_a_device,
        mesh=params["mesh"],
        in_specs=tuple(in_specs),
        out_specs=out_specs,
        check_vma=params["check_vma"],
        axis_names=params["newly_manual_axes"],
    )
    return list(mapped(*given))


def _split(value: Shown, shape: Shape, spec: PartitionSpec) -> _Split | None:
    """Split a parameter among devices.

    The stored form goes along if the devices split nothing but stacks, whose weights
    have scales of their own. None: a device's part cuts merged axes.

    Args:
      value: the parameter.
      shape: shape of a device's part of the array.
      spec: the axes of the mesh that split the array.

    Returns:
      The arrays, their specs, and the function that makes a `Shown` of a device's.
    """
    whole = value.view
    view = whole.local(shape)
    if view is None:
        return None
    by_atom = {}
    alone: list[int] = []  # atoms of which a device has one entry
    for atoms, size, one in itertools.zip_longest(value.axes, shape, spec):
        if len(atoms) == 1:
            by_atom[atoms[0]] = one
        if len(atoms) == 1 == size:
            alone += atoms
    by_axis = {whole.origin[atom]: one for atom, one in by_atom.items()}
    cut = {*view.split, *view.taken} - {*whole.taken}
    stored = value.stored if view.whole and cut <= {*value.stacked} else None
    root = value.numbers() if stored is None else value.root
    specs = (
        PartitionSpec(*map(by_atom.get, range(len(whole.sizes)))),
        PartitionSpec(*map(by_axis.get, value.stacked)),
    )
    kept = tuple(axis for axis in value.stacked if axis not in view.taken)
    gone = [i for i, axis in enumerate(value.stacked) if axis in view.taken]

    def part(arrays: Parts) -> Shown:
        root, stored = arrays
        root = jax.tree.map(lambda leaf: lax.squeeze(leaf, alone), root)
        stored = jax.tree.map(lambda leaf: lax.squeeze(leaf, gone), stored)
        return value.seen_as(view, root=root, stored=stored, stacked=kept)

    return (root, stored), specs, part


RUNS: dict[str, Callable[[Run, Equation, Values, Any, RandomKey], Values]] = {
    "scan": _run_scan,
    "while": _run_while,
    "cond": _run_cond,
    "shard_map": _run_shards,
}
