"""The evaluation: a traced program runs again, by a plan, with products of parameters
in low precision.

The census and the policy agreed on the plan: which equations are products to convert,
and by which recipe. A parameter is a `Shown`, a view with its arrays. An equation that
moves a view computes nothing, a planned product multiplies the parameter itself, and
any other equation is bound unchanged. JAX's own functions (`lax.scan`, `lax.switch`,
`jax.checkpoint`) rebuild control flow, so that stored weights travel through it.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax
from jax import Array, lax
from jax.extend import core, source_info_util
from jax.sharding import NamedSharding, Sharding

from pallas_kernels.operands import Fp4, Quantized, Row
from pallas_kernels.specs import has_explicit_axes
from tcfp_jax.conversion.bodies import RUNS, Body, Plan, RandomKey
from tcfp_jax.conversion.shown import Shown, Values, bare
from tcfp_jax.conversion.shown_products import multiply, multiply_head
from tcfp_jax.conversion.views import Equation, move, operand_number
from tcfp_jax.products.annotations import head_of
from tcfp_jax.products.fp8_weights import quantize_operand
from tcfp_jax.recipes import Recipe

PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general")
# Calls whose body runs once, with the operands of the call as its inputs.
CHECKPOINTS = ("remat2", "checkpoint", "remat")
CALLS = ("jit", "pjit", "closed_call", "core_call", *CHECKPOINTS)
# Functions with a derivative of their own, which a rule may open.
CUSTOM = ("custom_vjp_call", "custom_vjp_call_jaxpr", "custom_jvp_call")

# The step of rows that come from the stored form of their table.
LOOKUP = "lookup"
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
    >>> def count_inputs(number, eqn, values):
    ...     return [sum(values)]
    >>> eval_jaxpr(program.jaxpr, [1, 1], count_inputs, literal=lambda _: 0)
    [2]
    """
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], inputs, strict=True))

    def read(var: Any) -> _Value:
        return literal(var.val) if isinstance(var, core.Literal) else known[var]

    for number, eqn in enumerate(jaxpr.eqns):
        # The operations of a rule keep the equation's named scope, source line and
        # context (mesh, compute type).
        info = eqn.source_info
        stack = source_info_util.current_name_stack() + info.name_stack
        around = source_info_util.user_context(info.traceback, name_stack=stack)
        with around, eqn.ctx.manager:
            outputs = rule(number, eqn, list(map(read, eqn.invars)))
        known.update(zip(eqn.outvars, outputs, strict=True))
    return list(map(read, jaxpr.outvars))


def bind(eqn: Equation, arrays: Sequence[Array]) -> list[Array]:
    """Return the outputs of an equation, unchanged."""
    found = eqn.primitive.get_bind_params(eqn.params)
    # jax 0.11 returns the parameters alone
    functions, params = found if isinstance(found, tuple) else ((), found)
    out = eqn.primitive.bind(*functions, *arrays, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def bodies_of(eqn: Equation) -> list[Body]:
    """Return the programs that an equation holds, each with its constants."""
    bodies: list[Body] = []
    for value in eqn.params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            jaxpr: Any = getattr(one, "jaxpr", one)
            if hasattr(jaxpr, "eqns") and hasattr(jaxpr, "invars"):
                bodies.append((jaxpr, getattr(one, "consts", ())))
    return bodies


@dataclass(frozen=True)
class AtUse:
    """The step of a product whose weight was computed: each use quantizes it.

    Attributes:
      recipe: the recipe.
      side: the operand that is the weight.
    """

    recipe: Recipe
    side: int

    def shown(self, eqn: Equation, given: Values) -> Values:
        """Return the operands of the product with the weight as a view of itself."""
        operands = list(given)
        (weight,) = bare([given[self.side]], [eqn.invars[self.side]])
        operands[self.side] = Shown.of(weight, None, None)
        return operands


@dataclass(frozen=True)
class Machine:
    """Evaluator of programs by plans.

    Attributes:
      product: the planned products, `multiply` or a function with its arguments.
      traced: traces of jitted blocks, so that equal ones share one.
    """

    product: Callable[..., Array] = multiply
    traced: dict[Hashable, tuple[Body, Callable[..., Values]]] = field(
        default_factory=dict
    )

    def run(
        self, body: Body, inputs: Values, plan: Plan, key: RandomKey = None
    ) -> Values:
        """Return the outputs of a program, some of which may be `Shown`.

        Each product draws its random bits from the key and from its place in the
        program.
        """
        jaxpr, consts = body
        steps = dict(plan)
        readers = _readers_of_one_x(jaxpr, steps)
        x_quantized: dict[Hashable, Quantized] = {}

        def shared_x(number: int, x: Any, recipe: Recipe) -> Quantized | None:
            """Return the quantized x of several products, made at the first one."""
            reader = readers.get(number)
            if reader is None or isinstance(x, Shown):
                return None
            if reader not in x_quantized:
                with jax.named_scope("quantize_x"):
                    x_quantized[reader] = quantize_operand(
                        lax.stop_gradient(x), recipe.activation, recipe
                    )
            return x_quantized[reader]

        def rule(number: int, eqn: Equation, given: Values) -> Values:
            name = eqn.primitive.name
            step = steps.get(number, ())
            # Bits depend on the place alone, so that another plan does not change the
            # bits of a product.
            own = jax.random.fold_in(key, number) if step and key is not None else None
            if isinstance(step, AtUse):
                given = step.shown(eqn, given)
                step = step.recipe
            if isinstance(step, Recipe) and name in CUSTOM:  # a head with its loss
                return multiply_head(eqn, given, step, head_of(bodies_of(eqn)[0][0]))
            if isinstance(step, Recipe):
                shared = shared_x(number, given[0], step)
                return [self.product(eqn, given, step, x_quantized=shared, drawn=own)]
            if not step and not any(isinstance(value, Shown) for value in given):
                return bind(eqn, given)
            is_call = name in CALLS and not eqn.params.get("differentiated")
            if is_call or (name in CUSTOM and step):
                return _call(self, eqn, given, step, own)
            # A loop over a stack needs its rule even if nothing in it is planned: the
            # stack may pass through it.
            if name in RUNS and (step or name == "scan"):
                return RUNS[name](self.arrays, eqn, given, step, own)
            return _moved(eqn, given, step)

        return eval_jaxpr(jaxpr, [*consts, *inputs], rule)

    def arrays(
        self, body: Body, inputs: Values, plan: Plan, key: RandomKey = None
    ) -> list[Array]:
        """Return the outputs of a program as arrays."""
        return bare(self.run(body, inputs, plan, key), body[0].outvars)


def _moved(eqn: Equation, inputs: Values, step: object) -> Values:
    """Return the outputs of an ordinary equation.

    They are views where the equation only moves one, and arrays otherwise.
    """
    moved = [_view(eqn, inputs, number) for number in range(len(eqn.outvars))]
    if None not in moved:
        return moved
    if step == LOOKUP:
        rows = inputs[0].rows(eqn, inputs[1])
        if rows is not None:
            return [rows]
    # An equation of several outputs may move some of them only
    outputs: Values = bind(eqn, bare(inputs, eqn.invars))
    for number, view in enumerate(moved):
        if view is not None:
            outputs[number] = view
    return outputs


def _view(eqn: Equation, inputs: Values, number: int) -> Shown | None:
    """Return the view that output `number` is, or None."""
    at = operand_number(eqn, number)
    if at is None or not isinstance(inputs[at], Shown):
        return None
    starts = [inputs[1][..., 0]] if eqn.primitive.name == "gather" else inputs[1:]
    return move(inputs[at], eqn, number, starts)


# Calls
# --------------------------------------------------------------------------------------


def _call(
    machine: Machine, eqn: Equation, inputs: Values, plan: Plan, key: RandomKey
) -> Values:
    params = eqn.params
    body = bodies_of(eqn)[0]

    # The key is an argument, so recomputation in the backward pass draws the same bits.
    def run(inputs: Values, key: RandomKey) -> Values:
        return machine.run(body, inputs, plan, key)

    if eqn.primitive.name in CHECKPOINTS:
        again = jax.checkpoint(
            run, prevent_cse=params["prevent_cse"], policy=params["policy"]
        )
        return _passed_on(body[0], inputs, again(inputs, key))
    shardings = [*params.get("in_shardings", ()), *params.get("out_shardings", ())]
    if any(isinstance(sharding, Sharding) for sharding in shardings):
        outputs = run(list(map(placed, inputs, params["in_shardings"])), key)
        return list(map(placed, outputs, params["out_shardings"]))
    # Equal blocks of a model share one trace. Outside of a trace there is none to
    # share: each would be compiled.
    traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(inputs))
    if not traced or "name" not in params or not _multiplies(body[0]):
        return run(inputs, key)
    block = (id(body[0]), plan, key is None)
    if block not in machine.traced:
        run.__name__ = params["name"]
        # the body is kept, because its id is in the key
        machine.traced[block] = body, jax.jit(run)
    _, again = machine.traced[block]
    return _passed_on(body[0], inputs, again(inputs, key))


def _multiplies(jaxpr: core.Jaxpr) -> bool:
    """Return whether a program, or a body in it, has a product."""
    for eqn in jaxpr.eqns:
        inner = any(_multiplies(body) for body, _ in bodies_of(eqn))
        if inner or eqn.primitive.name in PRODUCTS:
            return True
    return False


def is_inlined(eqn: Equation) -> bool:
    """Return whether a call multiplies nothing, such as `jnp.pad`.

    Its body is then read as part of the program.
    """
    if eqn.primitive.name not in ("jit", "pjit"):
        return False
    return not _multiplies(bodies_of(eqn)[0][0])


def _passed_on(jaxpr: core.Jaxpr, inputs: Values, outputs: Values) -> Values:
    """Replace outputs that are an input of the body by that input.

    A parameter is then not copied on its way.
    """
    place = {var: number for number, var in enumerate(jaxpr.invars)}
    passed = list(outputs)
    for number, var in enumerate(jaxpr.outvars):
        if not isinstance(var, core.Literal) and var in place:
            passed[number] = inputs[place[var]]
    return passed


def placed(value: Any, sharding: object) -> Any:
    """Return a value where a jitted function asks for it.

    Views follow named shardings only.
    """
    if not isinstance(sharding, Sharding):
        return value
    if not isinstance(value, Shown):
        return lax.with_sharding_constraint(value, sharding)
    return value.constrain(sharding) if isinstance(sharding, NamedSharding) else value


# Products
# --------------------------------------------------------------------------------------


def _readers_of_one_x(
    jaxpr: core.Jaxpr, steps: Mapping[int, object]
) -> dict[int, Hashable]:
    """Map each product that shares its quantized x with others to a key of that x.

    XLA finds equal quantizations by itself on one device. On several, each one has an
    all-reduce of its own amax, and XLA takes no two of these for equal.
    """
    readers: dict[int, Hashable] = {}
    for number, recipe in steps.items():
        eqn: Any = jaxpr.eqns[number]
        if isinstance(recipe, Recipe) and _can_share_x(eqn, recipe):
            rows = recipe.scaling.along_rows
            how = (recipe.activation, rows, recipe.quantize_backend)
            readers[number] = (eqn.invars[0], how)
    several = Counter(readers.values())
    shared = {number: x for number, x in readers.items() if several[x] > 1}
    return {} if shared and has_explicit_axes() else shared


def _can_share_x(eqn: Equation, recipe: Recipe) -> bool:
    """Return whether a product could share its quantized x with others.

    Products in BF16 and products with a scale per row have nothing to share.
    """
    if eqn.primitive.name != "dot_general" or isinstance(recipe.scaling, Row | Fp4):
        return False
    contracted, batch = eqn.params["dimension_numbers"]
    x, w = (var.aval for var in eqn.invars)
    is_matrix = contracted[0] == (x.ndim - 1,) and w.ndim == 2 and not any(batch)
    is_fp8 = "bf16" not in (recipe.forward, recipe.dgrad, recipe.wgrad)
    return is_matrix and is_fp8 and eqn.outvars[0].aval.dtype == x.dtype
