"""The evaluation of a program whose products of parameters are low-precision ones: a jaxpr is run again, by a plan.

The plan is what the census and the policy agreed on: which equations are products to convert, and by which recipe. A
parameter is a `Shown`, an array with the view that it is; what only moves a view is followed without computing
anything, and a planned product multiplies the parameter itself. Any other equation is bound as it was. Control flow is
rebuilt by JAX's own functions (`lax.scan`, `lax.switch`, `jax.checkpoint`), so that stored weights travel through it.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core, source_info_util
from jax.sharding import NamedSharding, Sharding

from pallas_kernels.operands import Fp4, Quantized, Row
from pallas_kernels.specs import entries, has_explicit_axes, regrouped, split_entries, ungrouped, with_entries
from tcfp_jax.conversion.programs import INLINED, multiplies, opened, scan_counts
from tcfp_jax.conversion.shown import Shown, gathered
from tcfp_jax.conversion.views import factors, layout_of, move
from tcfp_jax.products.contraction import contract, matrix_of, matrix_product
from tcfp_jax.products.operands import quantize_operand
from tcfp_jax.recipes import Recipe
from tcfp_jax.weights.packed import fake_quantize

# What to do at an equation: a product's recipe, "packed" for a table whose rows are rounded when they are looked up, or
# the plan of the equation's body; by the equation's number. Tuples, so that a plan is part of a cache's key.
Plan = tuple[tuple[int, Any], ...]


def plan_of(steps: Mapping[tuple[int, ...], Any]) -> Plan:
    """A plan from what to do by place.

    >>> plan_of({(3,): "packed", (1, 0): "packed"})
    ((1, ((0, 'packed'),)), (3, 'packed'))
    """
    numbers = sorted({place[0] for place in steps})
    inner = lambda number: {place[1:]: step for place, step in steps.items() if place[0] == number}
    return tuple((n, steps[n,] if (n,) in steps else plan_of(inner(n))) for n in numbers)


class Machine:
    """Runs programs by plans; programs and products that agree are traced once."""

    def __init__(self, product: Callable[..., Any] | None = None) -> None:
        self._calls: dict[Any, Any] = {}
        self._product = _product if product is None else product

    def run(self, jaxpr: Any, consts: Any, inputs: list[Any], plan: Plan, key: jax.Array | None = None) -> list[Any]:
        """The outputs, some of which may be `Shown`; each product draws from the key and from where it stands."""
        env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))
        read = lambda var: var.val if isinstance(var, core.Literal) else env[var]
        steps = dict(plan)
        readers = _readers_of_one_x(jaxpr, steps) if self._product is _product and not has_explicit_axes() else {}
        x_quantized: dict[int, Quantized] = {}
        for number, eqn in enumerate(jaxpr.eqns):
            stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
            with source_info_util.user_context(eqn.source_info.traceback, name_stack=stack), eqn.ctx.manager:
                given, step = [read(var) for var in eqn.invars], steps.get(number, ())
                own = None if key is None or not step else jax.random.fold_in(key, number)
                if isinstance(step, Recipe):
                    options: dict[str, Any] = {} if own is None else dict(drawn=own)
                    if number in readers and not isinstance(given[0], Shown):
                        if number not in x_quantized:
                            with jax.named_scope("quantize_x"):
                                found = quantize_operand(lax.stop_gradient(given[0]), step.activation, step)
                            x_quantized.update(dict.fromkeys(readers[number], found))
                        options["x_quantized"] = x_quantized[number]
                    outputs = [self._product(eqn, given, step, **options)]
                else:
                    outputs = self._equation(eqn, given, step, own)
                env.update(zip(eqn.outvars, outputs, strict=True))
        return [read(var) for var in jaxpr.outvars]

    def _equation(self, eqn: Any, inputs: list[Any], step: Any, key: jax.Array | None) -> list[Any]:
        name = eqn.primitive.name
        shown = any(isinstance(value, Shown) for value in inputs)
        if not shown:
            return bind(eqn, inputs)
        rules = {"scan": self._scan, "while": self._while, "cond": self._cond, "shard_map": self._shard_map}
        if name in rules and (step or name == "scan"):
            return rules[name](eqn, inputs, step, key)
        if name in INLINED and not eqn.params.get("differentiated"):
            return self._call(eqn, inputs, step, key)
        moved = [self._moved(eqn, inputs, i) for i in range(len(eqn.outvars))]
        if any(value is None for value in moved):
            bound = bind(eqn, inputs)
            moved = [old if new is None else new for new, old in zip(moved, bound, strict=True)]
        return [fake_quantize(value) for value in moved] if step == "packed" else moved

    def _moved(self, eqn: Any, inputs: list[Any], number: int) -> Any:
        name = eqn.primitive.name
        several = name in ("optimization_barrier", "device_put", "mesh_cast") and len(inputs) > 1
        source = inputs[number] if several else inputs[0]
        if not isinstance(source, Shown):
            return None
        if not (several or name in ("dynamic_slice", "gather") or len(inputs) == 1):
            return None
        starts = inputs[1][..., 0] if name == "gather" else inputs[1:]
        return move(source, eqn, number, [starts] if name == "gather" else starts)

    # Bodies ----------------------------------------------------------------------------------------------------------

    def _call(self, eqn: Any, inputs: list[Any], plan: Plan, own: jax.Array | None) -> list[Any]:
        name, params = eqn.primitive.name, eqn.params
        body, consts = opened(params.get("jaxpr", params.get("call_jaxpr")))
        run = lambda inputs, own=own: self.run(body, consts, inputs, plan, own)
        if name in ("remat2", "checkpoint", "remat"):
            again = jax.checkpoint(run, prevent_cse=params["prevent_cse"], policy=params["policy"])
            return _passed_on(body, inputs, again(inputs, own))
        shardings = [*params.get("in_shardings", ()), *params.get("out_shardings", ())]
        if any(isinstance(sharding, Sharding) for sharding in shardings):
            outputs = run(list(map(placed, inputs, eqn.invars, params["in_shardings"])))
            return list(map(placed, outputs, eqn.outvars, params["out_shardings"]))
        # Equal blocks share one trace; there is none to share outside of one, where a new function would be compiled.
        traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(inputs))
        if not traced or "name" not in params or not multiplies(body):
            return run(inputs)
        key = (id(body), plan, own is None)
        if key not in self._calls:
            run.__name__ = params["name"]
            self._calls[key] = body, jax.jit(run)  # the body too: its id is the key
        return _passed_on(body, inputs, self._calls[key][1](inputs, own))

    def _shard_map(self, eqn: Any, inputs: list[Any], plan: Plan, own: jax.Array | None) -> list[Any]:
        params, (body, consts) = eqn.params, opened(eqn.params["jaxpr"])
        views = [
            value.view.local(var.aval.shape) if isinstance(value, Shown) else None
            for value, var in zip(inputs, body.invars, strict=True)
        ]
        arrays = list(map(_bare, inputs, [var.aval for var in eqn.invars]))

        def run(*parts: Any) -> tuple[Any, ...]:
            given = [
                part if view is None else dataclasses.replace(Shown.of(part, None, None), view=view)
                for part, view in zip(parts, views, strict=True)
            ]
            return tuple(bare(self.run(body, consts, given, plan, own), body))

        names = params.get("newly_manual_axes", params.get("manual_axes"))
        options = dict(mesh=params["mesh"], in_specs=params["in_specs"], out_specs=tuple(params["out_specs"]))
        return list(jax.shard_map(run, **options, check_vma=params["check_vma"], axis_names=names)(*arrays))

    def _scan(self, eqn: Any, inputs: list[Any], plan: Plan, key: jax.Array | None) -> list[Any]:
        (body, consts), options = opened(eqn.params["jaxpr"]), eqn.params
        first, count = scan_counts(options)
        fixed, carry, xs = inputs[:first], inputs[first : first + count], inputs[first + count :]
        avals = [var.aval for var in eqn.invars]
        still = [
            isinstance(value, Shown) and body.outvars[i] is body.invars[first + i] for i, value in enumerate(carry)
        ]
        moving = [i for i in range(count) if not still[i]]
        runs, entries = zip(*map(_runs_over, xs, avals[first + count :]), strict=True) if xs else ((), ())
        passed = {var: i for i, var in enumerate(body.invars)}
        same = [not isinstance(v, core.Literal) and passed.get(v, -1) >= first + count for v in body.outvars[count:]]

        def step(carried: list[Any], numbered: Any) -> tuple[list[Any], list[Any]]:
            turn, items = numbered
            drawn = None if key is None else jax.random.fold_in(key, turn)
            own = list(carry)
            for i, value in zip(moving, carried, strict=True):
                own[i] = value
            given = [*fixed, *own, *(entry(item) for entry, item in zip(entries, items, strict=True))]
            outs = list(map(_bare, self.run(body, consts, given, plan, drawn), [var.aval for var in body.outvars]))
            return [outs[i] for i in moving], [y for y, skip in zip(outs[count:], same, strict=True) if not skip]

        begin = [_bare(carry[i], avals[first + i]) for i in moving]
        kept = {name: options[name] for name in ("length", "reverse", "unroll", "_split_transpose") if name in options}
        turns = None if key is None else jnp.arange(options["length"])
        last, ys = lax.scan(step, begin, (turns, list(runs)), **kept)
        carried, made = iter(last), iter(ys)
        outputs = [value if held else next(carried) for value, held in zip(carry, still, strict=True)]
        return outputs + [
            inputs[passed[var]] if skip else next(made) for var, skip in zip(body.outvars[count:], same, strict=True)
        ]

    def _while(self, eqn: Any, inputs: list[Any], plan: Plan, key: jax.Array | None) -> list[Any]:
        params, plans = eqn.params, dict(plan)
        first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        (test, test_consts), (body, consts) = opened(params["cond_jaxpr"]), opened(params["body_jaxpr"])
        go_on = lambda carry: _bare(
            self.run(test, test_consts, [*inputs[:first], *carry], plans.get(0, ()), key)[0], test.outvars[0].aval
        )
        types = [var.aval for var in body.outvars]
        step = lambda carry: list(
            map(_bare, self.run(body, consts, [*inputs[first:second], *carry], plans.get(1, ()), key), types)
        )
        return lax.while_loop(go_on, step, list(map(_bare, inputs[second:], types)))

    def _cond(self, eqn: Any, inputs: list[Any], plan: Plan, key: jax.Array | None) -> list[Any]:
        plans, types = dict(plan), [var.aval for var in eqn.outvars]

        def branch(number: int, body: Any, consts: Any) -> Callable[[], list[Any]]:
            return lambda: list(map(_bare, self.run(body, consts, inputs[1:], plans.get(number, ()), key), types))

        branches = [branch(number, *opened(closed)) for number, closed in enumerate(eqn.params["branches"])]
        return lax.switch(_bare(inputs[0], eqn.invars[0].aval), branches)


def bare(values: list[Any], jaxpr: Any) -> list[Any]:
    """The outputs of a program as arrays."""
    return list(map(_bare, values, [var.aval for var in jaxpr.outvars]))


def _readers_of_one_x(jaxpr: Any, steps: Mapping[int, Any]) -> dict[int, tuple[int, ...]]:
    """Map the number of each product that shares its quantized x with others to the numbers of all that share it.

    XLA finds equal quantizations by itself on one device. On several, each one has an all-reduce of its own amax, and
    XLA takes no two of these for equal. Products in BF16 and products with a scale per row have nothing to share.
    """
    groups: dict[Any, list[int]] = {}
    for number, recipe in steps.items():
        eqn = jaxpr.eqns[number]
        if not isinstance(recipe, Recipe) or eqn.primitive.name != "dot_general":
            continue
        (axes, batch), (x, w) = eqn.params["dimension_numbers"], (var.aval for var in eqn.invars)
        plain = axes[0] == (x.ndim - 1,) and w.ndim == 2 and not any(batch) and eqn.outvars[0].aval.dtype == x.dtype
        fp8 = "bf16" not in (recipe.forward, recipe.dgrad, recipe.wgrad)
        if plain and fp8 and not isinstance(recipe.scaling, Row | Fp4):
            how = (recipe.activation, recipe.scaling.along_rows, recipe.quantize_backend)
            groups.setdefault((eqn.invars[0], how), []).append(number)
    return {number: tuple(group) for group in groups.values() if len(group) > 1 for number in group}


def _product(
    eqn: Any,
    inputs: list[Any],
    recipe: Recipe,
    *,
    x_quantized: Quantized | None = None,
    drawn: jax.Array | None = None,
) -> jax.Array:
    """Return the product of an equation, computed as the recipe says."""
    side = next(i for i in (0, 1) if isinstance(inputs[i], Shown))
    weight, x, out = inputs[side], inputs[1 - side], eqn.outvars[0].aval
    view = weight.view
    found: Any = factors(eqn.params["dimension_numbers"], [var.aval.shape for var in eqn.invars], side, view)
    # What the product returns is rounded to the dtype of x: one that asks for more gets it.
    x = ungrouped(x.astype(jnp.promote_types(x.dtype, out.dtype)), found.x_groups)
    how = weight.weight
    fits = how is not None and (how.recipe, how.layout) == (recipe, layout_of(view, found.roles))
    stored = weight.stored if fits else None
    asked = eqn.params.get("out_sharding")
    kernel = weight.root if stored is not None else weight.numbers()
    if stored is None and weight.local is not None:
        stored = gathered(weight, found, recipe)
    fixed = stored is None and recipe.stochastic
    key = jax.random.key(0) if fixed else drawn if recipe.draws else None  # in evaluation: calls repeat
    if x_quantized is not None:
        return _matrix_product(inputs[1 - side], kernel, found, recipe, stored, key, x_quantized)
    if asked is not None:
        asked = with_entries(asked, split_entries(asked, entries(asked, out.ndim), found.out_groups))
    y = contract(
        found.contraction, x, kernel, recipe=recipe, quantized=stored, key=key, shape=view.sizes, out_sharding=asked,
    )  # fmt: skip
    return regrouped(y, found.out_groups).astype(out.dtype)


def _matrix_product(
    x: jax.Array, kernel: Any, found: Any, recipe: Recipe, stored: Any, key: Any, x_quantized: Quantized
) -> jax.Array:
    """Multiply x `[..., k]` by a kernel as a matrix, whatever the kernel's own axes are."""
    layout = found.contraction.layout
    matrix = None if kernel is None else matrix_of(kernel, layout)
    contraction = matrix_product(x.ndim, transposed=layout.transposed)
    shape = None if stored is None else stored.shape
    return contract(
        contraction, x, matrix, recipe=recipe, quantized=stored, key=key, shape=shape, x_quantized=x_quantized
    )


def bind(eqn: Any, inputs: list[Any]) -> list[Any]:
    """The outputs of an equation as it is."""
    found = eqn.primitive.get_bind_params(eqn.params)
    functions, params = found if isinstance(found, tuple) else ((), found)
    arrays = map(_bare, inputs, [var.aval for var in eqn.invars])
    out = eqn.primitive.bind(*functions, *arrays, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def _bare(value: Any, aval: Any) -> Any:
    return value.array(aval.shape) if isinstance(value, Shown) else value


def placed(value: Any, var: Any, sharding: Any) -> Any:
    """A value that lies as a jitted function asks."""
    if not isinstance(sharding, Sharding):
        return value
    if isinstance(value, Shown):
        return value.constrain(sharding) if isinstance(sharding, NamedSharding) else value
    return lax.with_sharding_constraint(value, sharding)


def _runs_over(value: Any, aval: Any) -> tuple[Any, Callable[[Any], Any]]:
    """(what a scan runs over, what one entry of it is)."""
    if not isinstance(value, Shown):
        return value, lambda item: item
    if len(value.axes[0]) == 1:
        return value.leading(0)
    if not value.axes[0]:  # the same in every round
        return None, lambda item: value.squeeze((0,))
    return value.array(aval.shape), lambda item: item


def _passed_on(body: Any, inputs: list[Any], outputs: list[Any]) -> list[Any]:
    """Outputs, those that are an input of the body as that input: a parameter is not copied on its way."""
    place = {var: i for i, var in enumerate(body.invars)}
    known = [None if isinstance(var, core.Literal) else place.get(var) for var in body.outvars]
    return [out if i is None else inputs[i] for i, out in zip(known, outputs, strict=True)]
