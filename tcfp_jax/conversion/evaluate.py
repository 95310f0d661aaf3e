"""The evaluation: a traced program runs again, by a plan, with products of parameters
in low precision.

The census and the policy agreed on the plan: which equations are products to convert,
and by which recipe. A parameter is a `Shown`, a view with its arrays. An equation that
moves a view computes nothing, a planned product multiplies the parameter itself, and
any other equation is bound unchanged. JAX's own functions (`lax.scan`, `lax.switch`,
`jax.checkpoint`) rebuild control flow, so that stored weights travel through it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core, source_info_util
from jax.sharding import NamedSharding, Sharding

from pallas_kernels.operands import Fp4, Quantized, Row
from pallas_kernels.specs import has_explicit_axes
from tcfp_jax.conversion.shown import Shown, multiply, multiply_head
from tcfp_jax.conversion.views import Equation, move, operand_number
from tcfp_jax.products.annotations import head_of
from tcfp_jax.products.matmul import quantize_operand
from tcfp_jax.recipes import Recipe

PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general")
# Calls whose body runs once, with the operands of the call as its inputs.
CALLS = ("jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "remat")
CHECKPOINTS = ("remat2", "checkpoint", "remat")
# Functions with a derivative of their own, which a rule may open.
CUSTOM = ("custom_vjp_call", "custom_vjp_call_jaxpr", "custom_jvp_call")

# A program and its constants.
Body = tuple[core.Jaxpr, Sequence[Any]]
# The step of each equation, by its number: the recipe of a product, `LOOKUP` for rows
# that come from the stored form of a table, or the plan of the equation's body. Tuples,
# because a plan is part of a cache's key.
LOOKUP = "lookup"
Plan = tuple[tuple[int, Any], ...]
# Values of variables: a `Shown`, or an array (or another value of JAX's, such as a
# token).
Values = list[Any]
Key = jax.Array | None
_Value = TypeVar("_Value")


def eval_jaxpr(
    jaxpr: core.Jaxpr,
    inputs: Sequence[_Value],
    rule: Callable[[int, Equation, list[_Value]], Sequence[_Value]],
    literal: Callable[[Any], _Value] = lambda value: value,
) -> list[_Value]:
    """Return the values of a jaxpr's outputs.

    Args:
      jaxpr: the program.
      inputs: a value of any kind for each constant and each input.
      rule: `(number, equation, values of its operands)` to the values of its outputs.
      literal: value of a number that is written in the program.

    >>> program = jax.make_jaxpr(lambda x, y: (x + y) * 2.0)(1.0, 1.0)
    >>> count = lambda number, eqn, values: [sum(values)]
    >>> eval_jaxpr(program.jaxpr, [1, 1], count, literal=lambda _: 0)  # how many inputs each output depends on
    [2]
    """
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], inputs, strict=True))
    read = lambda var: literal(var.val) if isinstance(var, core.Literal) else known[var]
    for number, eqn in enumerate(jaxpr.eqns):
        # The operations of a rule keep the equation's named scope, source line and
        # context (mesh, compute type).
        stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
        with (
            source_info_util.user_context(eqn.source_info.traceback, name_stack=stack),
            eqn.ctx.manager,
        ):
            known.update(
                zip(
                    eqn.outvars,
                    rule(number, eqn, [read(var) for var in eqn.invars]),
                    strict=True,
                )
            )
    return [read(var) for var in jaxpr.outvars]


def bind(eqn: Equation, arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Return the outputs of an equation, unchanged."""
    found = eqn.primitive.get_bind_params(eqn.params)
    # jax 0.11 returns the parameters alone
    functions, params = found if isinstance(found, tuple) else ((), found)
    out = eqn.primitive.bind(*functions, *arrays, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def opened(body: Any) -> Body:
    """Return the jaxpr and the constants of a body, which may be closed or not."""
    return getattr(body, "jaxpr", body), getattr(body, "consts", ())


def bodies_of(eqn: Equation) -> list[Body]:
    """Return the programs that an equation holds, each with its constants."""
    values = [
        one
        for value in eqn.params.values()
        for one in (value if isinstance(value, tuple | list) else (value,))
    ]
    return [
        (body, consts)
        for body, consts in map(opened, values)
        if hasattr(body, "eqns") and hasattr(body, "invars")
    ]


def is_head(eqn: Equation, bodies: Sequence[Body]) -> bool:
    """Return whether an equation is a `losses.cross_entropy` with matrices whose recipe
    may change.
    """
    options = head_of(bodies[0][0])
    dims = [len(var.aval.shape) for var in eqn.invars]
    return (
        options is not None and options.recipe.stored is None and dims == [2, 2, 1, 1]
    )


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """Return the numbers of constants and of carried values of a scan."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    # jax 0.11 keeps flat trees instead of numbers
    consts, carry, _ = params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))


def scan_options(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments that `lax.scan` needs to make the same loop
    again.
    """
    return {
        name: params[name]
        for name in ("length", "reverse", "unroll", "_split_transpose")
        if name in params
    }


class Machine:
    """Evaluator of programs by plans. It traces equal bodies once."""

    def __init__(self, product: Callable[..., jax.Array] | None = None) -> None:
        """Use `product(eqn, inputs, recipe, drawn=key)` for planned products instead of
        the recipe's own.
        """
        self.traced: dict[Any, Any] = {}
        self._product = multiply if product is None else product

    def run(self, body: Body, inputs: Values, plan: Plan, key: Key = None) -> Values:
        """Return the outputs of a program, some of which may be `Shown`.

        Each product draws its random bits from the key and from its place in the
        program.
        """
        (jaxpr, consts), steps = body, dict(plan)
        shares_x = self._product is multiply and not has_explicit_axes()
        readers = _readers_of_one_x(jaxpr, steps) if shares_x else {}
        x_quantized: dict[int, Quantized] = {}

        def rule(number: int, eqn: Equation, given: Values) -> Values:
            name, step = eqn.primitive.name, steps.get(number, ())
            # Bits depend on the place alone, so that another plan does not change the
            # bits of a product.
            own = None if key is None or not step else jax.random.fold_in(key, number)
            if isinstance(step, Recipe) and name in CUSTOM:  # `is_head`, by the plan
                return multiply_head(eqn, given, step, head_of(bodies_of(eqn)[0][0]))
            if isinstance(step, Recipe):
                options: dict[str, Any] = {} if own is None else dict(drawn=own)
                if number in readers and not isinstance(given[0], Shown):
                    if number not in x_quantized:
                        with jax.named_scope("quantize_x"):
                            found = quantize_operand(
                                lax.stop_gradient(given[0]), step.activation, step
                            )
                        x_quantized.update(dict.fromkeys(readers[number], found))
                    options["x_quantized"] = x_quantized[number]
                return [self._product(eqn, given, step, **options)]
            if not any(isinstance(value, Shown) for value in given):
                return bind(eqn, given)
            # A loop over a stack needs its rule even if nothing in it is planned: the
            # stack may pass through it.
            if (
                name in _RULES
                and (step or name in ("scan", *CALLS))
                and not eqn.params.get("differentiated")
            ):
                return _RULES[name](self, eqn, given, step, own)
            return _moved(eqn, given, step)

        return eval_jaxpr(jaxpr, [*consts, *inputs], rule)


def bare(values: Values, variables: Values) -> Values:
    """Return the arrays of the values of some variables: a view becomes the array that
    it shows.
    """
    return [
        value.array(var.aval.shape) if isinstance(value, Shown) else value
        for value, var in zip(values, variables, strict=True)
    ]


def _moved(eqn: Equation, inputs: Values, step: object) -> Values:
    """Return the outputs of an ordinary equation: views where it only moves one, and
    arrays otherwise.
    """
    moved: Values = []
    for number in range(len(eqn.outvars)):
        at = operand_number(eqn, number)
        if at is None or not isinstance(inputs[at], Shown):
            moved.append(None)
            continue
        starts = [inputs[1][..., 0]] if eqn.primitive.name == "gather" else inputs[1:]
        moved.append(move(inputs[at], eqn, number, starts))
    if (
        step == LOOKUP
        and moved == [None]
        and (rows := inputs[0].rows(eqn, inputs[1])) is not None
    ):
        return [rows]
    # An equation of several outputs may move some of them only
    if any(value is None for value in moved):
        bound = bind(eqn, bare(inputs, eqn.invars))
        moved = [
            old if new is None else new for new, old in zip(moved, bound, strict=True)
        ]
    return moved


# Bodies
# --------------------------------------------------------------------------------------


def _call(
    machine: Machine, eqn: Equation, inputs: Values, plan: Plan, own: Key
) -> Values:
    params, body = eqn.params, bodies_of(eqn)[0]
    run = lambda inputs, own=own: machine.run(body, inputs, plan, own)
    if eqn.primitive.name in CHECKPOINTS:
        # The key is an argument, so recomputation in the backward pass draws the same
        # bits.
        again = jax.checkpoint(
            run, prevent_cse=params["prevent_cse"], policy=params["policy"]
        )
        return _passed_on(body[0], inputs, again(inputs, own))
    shardings = [*params.get("in_shardings", ()), *params.get("out_shardings", ())]
    if any(isinstance(sharding, Sharding) for sharding in shardings):
        outputs = run(list(map(placed, inputs, params["in_shardings"])))
        return list(map(placed, outputs, params["out_shardings"]))
    # Equal blocks of a model share one trace. Outside of a trace there is none to
    # share: each would be compiled.
    traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(inputs))
    if not traced or "name" not in params or not _multiplies(body[0]):
        return run(inputs)
    key = (id(body[0]), plan, own is None)
    if key not in machine.traced:
        run.__name__ = params["name"]
        # the body is kept, because its id is in the key
        machine.traced[key] = body, jax.jit(run)
    return _passed_on(body[0], inputs, machine.traced[key][1](inputs, own))


def _multiplies(jaxpr: core.Jaxpr) -> bool:
    """Return whether a program, or a body in it, has a product."""
    bodies = (body for eqn in jaxpr.eqns for body, _ in bodies_of(eqn))
    return any(eqn.primitive.name in PRODUCTS for eqn in jaxpr.eqns) or any(
        map(_multiplies, bodies)
    )


def is_inlined(eqn: Equation) -> bool:
    """Return whether a call multiplies nothing, such as `jnp.pad`, so that its body is
    read as part of the program.
    """
    return eqn.primitive.name in ("jit", "pjit") and not _multiplies(
        bodies_of(eqn)[0][0]
    )


def _passed_on(jaxpr: core.Jaxpr, inputs: Values, outputs: Values) -> Values:
    """Replace outputs that are an input of the body by that input: a parameter is not
    copied on its way.
    """
    place = {var: i for i, var in enumerate(jaxpr.invars)}
    known = [
        None if isinstance(var, core.Literal) else place.get(var)
        for var in jaxpr.outvars
    ]
    return [
        out if i is None else inputs[i] for i, out in zip(known, outputs, strict=True)
    ]


def placed(value: Any, sharding: object) -> Any:
    """Return a value where a jitted function asks for it; views follow named shardings
    only.
    """
    if not isinstance(sharding, Sharding):
        return value
    if isinstance(value, Shown):
        return (
            value.constrain(sharding) if isinstance(sharding, NamedSharding) else value
        )
    return lax.with_sharding_constraint(value, sharding)


def _shard_map(
    machine: Machine, eqn: Equation, inputs: Values, plan: Plan, own: Key
) -> Values:
    params, body = eqn.params, opened(eqn.params["jaxpr"])
    variables: Values = body[0].invars
    split = [
        value.split(var.aval.shape, spec) if isinstance(value, Shown) else None
        for value, var, spec in zip(inputs, variables, params["in_specs"], strict=True)
    ]
    given = [
        (bare([value], [var])[0], spec) if one is None else one[:2]
        for one, value, var, spec in zip(
            split, inputs, eqn.invars, params["in_specs"], strict=True
        )
    ]

    def run(*parts: Any) -> tuple[jax.Array, ...]:
        values = [
            part if one is None else one[2](part)
            for part, one in zip(parts, split, strict=True)
        ]
        return tuple(bare(machine.run(body, values, plan, own), body[0].outvars))

    in_specs = tuple(spec for _, spec in given)
    options = dict(
        mesh=params["mesh"], in_specs=in_specs, out_specs=tuple(params["out_specs"])
    )
    mapped = jax.shard_map(
        run,
        **options,
        check_vma=params["check_vma"],
        axis_names=params["newly_manual_axes"],
    )
    return list(mapped(*(arrays for arrays, _ in given)))


def _scan(
    machine: Machine, eqn: Equation, inputs: Values, plan: Plan, key: Key
) -> Values:
    body, (first, count) = opened(eqn.params["jaxpr"]), scan_counts(eqn.params)
    jaxpr, second = body[0], first + count
    fixed, carry, xs = inputs[:first], inputs[first:second], inputs[second:]
    # A view that every round hands on unchanged stays outside of the loop.
    still = [
        isinstance(value, Shown) and jaxpr.outvars[i] is jaxpr.invars[first + i]
        for i, value in enumerate(carry)
    ]
    moving = [i for i in range(count) if not still[i]]
    runs, entries = (
        zip(*map(_runs_over, xs, eqn.invars[second:]), strict=True) if xs else ((), ())
    )
    # So does a stack of which the loop returns every entry as it got it.
    passed: dict[Any, int] = {var: i for i, var in enumerate(jaxpr.invars)}
    same = [
        not isinstance(v, core.Literal) and passed.get(v, -1) >= second
        for v in jaxpr.outvars[count:]
    ]

    def step(carried: Values, numbered: tuple[Any, Values]) -> tuple[Values, Values]:
        turn, items = numbered
        # each layer of a stack draws bits of its own
        drawn = None if key is None else jax.random.fold_in(key, turn)
        own = list(carry)
        for i, value in zip(moving, carried, strict=True):
            own[i] = value
        given = [
            *fixed,
            *own,
            *(entry(item) for entry, item in zip(entries, items, strict=True)),
        ]
        outs = bare(machine.run(body, given, plan, drawn), jaxpr.outvars)
        return [outs[i] for i in moving], [
            y for y, skip in zip(outs[count:], same, strict=True) if not skip
        ]

    begin = [bare([carry[i]], [eqn.invars[first + i]])[0] for i in moving]
    turns = None if key is None else jnp.arange(eqn.params["length"])
    last, ys = lax.scan(step, begin, (turns, list(runs)), **scan_options(eqn.params))
    carried, made = iter(last), iter(ys)
    # The outputs in the order of the original loop: views that stayed outside, and the
    # arrays that the loop made.
    outputs = [
        value if held else next(carried)
        for value, held in zip(carry, still, strict=True)
    ]
    pairs = zip(jaxpr.outvars[count:], same, strict=True)
    return outputs + [
        inputs[passed[var]] if skip else next(made) for var, skip in pairs
    ]


def _runs_over(value: Any, var: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Return the array that a scan runs over, and the function that makes an entry of
    it a value of the body.
    """
    if not isinstance(value, Shown):
        return value, lambda item: item
    if len(value.axes[0]) == 1:
        return value.leading(0)
    if not value.axes[0]:  # the same in every round
        return None, lambda item: value.arrange(range(1, len(value.axes)))
    return value.array(var.aval.shape), lambda item: item


def _while(
    machine: Machine, eqn: Equation, inputs: Values, plan: Plan, key: Key
) -> Values:
    params, plans = eqn.params, dict(plan)
    first, second = (
        params["cond_nconsts"],
        params["cond_nconsts"] + params["body_nconsts"],
    )
    test, body = opened(params["cond_jaxpr"]), opened(params["body_jaxpr"])

    def go_on(carry: Values) -> jax.Array:
        return bare(
            machine.run(test, [*inputs[:first], *carry], plans.get(0, ()), key),
            test[0].outvars,
        )[0]

    def step(carry: Values) -> Values:
        return bare(
            machine.run(body, [*inputs[first:second], *carry], plans.get(1, ()), key),
            body[0].outvars,
        )

    return lax.while_loop(go_on, step, bare(inputs[second:], body[0].outvars))


def _cond(
    machine: Machine, eqn: Equation, inputs: Values, plan: Plan, key: Key
) -> Values:
    plans = dict(plan)

    # Branches return arrays: a choice between two views is not a view.
    def branch(number: int, body: Body) -> Callable[[], Values]:
        return lambda: bare(
            machine.run(body, inputs[1:], plans.get(number, ()), key), eqn.outvars
        )

    branches = [
        branch(number, opened(closed))
        for number, closed in enumerate(eqn.params["branches"])
    ]
    return lax.switch(bare(inputs[:1], eqn.invars[:1])[0], branches)


_RULES: dict[str, Callable[..., Values]] = {
    **dict.fromkeys((*CALLS, *CUSTOM), _call),
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
}


# Products
# --------------------------------------------------------------------------------------


def _readers_of_one_x(
    jaxpr: core.Jaxpr, steps: Mapping[int, object]
) -> dict[int, tuple[int, ...]]:
    """Map the number of each product that shares its quantized x with others to the
    numbers of all that share it.

    XLA finds equal quantizations by itself on one device. On several, each one has an
    all-reduce of its own amax, and XLA takes no two of these for equal. Products in
    BF16 and products with a scale per row have nothing to share.
    """
    groups: dict[Any, list[int]] = {}
    for number, recipe in steps.items():
        eqn: Any = jaxpr.eqns[number]
        if not isinstance(recipe, Recipe) or eqn.primitive.name != "dot_general":
            continue
        (axes, batch), (x, w) = (
            eqn.params["dimension_numbers"],
            (var.aval for var in eqn.invars),
        )
        plain = (
            axes[0] == (x.ndim - 1,)
            and w.ndim == 2
            and not any(batch)
            and eqn.outvars[0].aval.dtype == x.dtype
        )
        fp8 = "bf16" not in (recipe.forward, recipe.dgrad, recipe.wgrad)
        if plain and fp8 and not isinstance(recipe.scaling, Row | Fp4):
            how = (
                recipe.activation,
                recipe.scaling.along_rows,
                recipe.quantize_backend,
            )
            groups.setdefault((eqn.invars[0], how), []).append(number)
    return {
        number: tuple(group)
        for group in groups.values()
        if len(group) > 1
        for number in group
    }
