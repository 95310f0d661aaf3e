"""The evaluation of loops, branches and devices: bodies run again by their plans.

Each rule gets the function that runs a body, the equation, the values of its operands,
the plan of its bodies and a key, and returns the equation's outputs.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from tcfp_jax.conversion.bodies import Body, Plan, Scan, groups_of_while, opened
from tcfp_jax.conversion.shown import Parts, Shown, Values, bare
from tcfp_jax.conversion.views import Equation, Shape

Key = Array | None
Run = Callable[[Body, Values, Plan, Key], list[Array]]
_Entry = Callable[[Any], Any]
_Split = tuple[Parts, tuple[PartitionSpec, PartitionSpec], Callable[[Parts], Shown]]


def _scan(run: Run, eqn: Equation, inputs: Values, plan: Plan, key: Key) -> Values:
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


def _while(run: Run, eqn: Equation, inputs: Values, plan: Plan, key: Key) -> Values:
    test = opened(eqn.params["cond_jaxpr"])
    body = opened(eqn.params["body_jaxpr"])
    test_consts, body_consts, carry = groups_of_while(eqn, inputs)
    plans = dict(plan)

    def goes_on(carry: Values) -> Array:
        return run(test, [*test_consts, *carry], plans.get(0, ()), key)[0]

    def one_round(carry: Values) -> Values:
        return run(body, [*body_consts, *carry], plans.get(1, ()), key)

    return lax.while_loop(goes_on, one_round, bare(carry, eqn.outvars))


def _cond(run: Run, eqn: Equation, inputs: Values, plan: Plan, key: Key) -> Values:
    plans = dict(plan)
    # Branches return arrays: a choice between two views is not a view.
    branches = []
    for number, body in enumerate(eqn.params["branches"]):
        own = plans.get(number, ())
        branches.append(functools.partial(run, opened(body), inputs[1:], own, key))
    (chosen,) = bare(inputs[:1], eqn.invars[:1])
    return lax.switch(chosen, branches)


def _shard_map(run: Run, eqn: Equation, inputs: Values, plan: Plan, key: Key) -> Values:
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


RULES: dict[str, Callable[[Run, Equation, Values, Any, Key], Values]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
}
