"""The evaluation of a program whose products of parameters are low-precision ones: a jaxpr is run again, by a plan.

The plan is what the census and the policy agreed on: which equations are products to convert, and by which recipe. A
parameter is a `Shown`, an array with the view that it is; what only moves a view is followed without computing
anything, and a planned product multiplies the parameter itself. Any other equation is bound as it was. Control flow is
rebuilt by JAX's own functions (`lax.scan`, `lax.switch`, `jax.checkpoint`), so that stored weights travel through it.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core, source_info_util
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from tcfp_jax.conversion.census import INLINED, multiplies, scan_counts
from tcfp_jax.conversion.views import View, factors, layout_of, move
from tcfp_jax.products.axes import entries, regrouped, split_entries, ungrouped, with_entries
from tcfp_jax.products.contraction import contract
from tcfp_jax.recipes import Recipe
from tcfp_jax.weights.layout import Weight
from tcfp_jax.weights.packed import fake_quantize

_static: Any = functools.partial(field, metadata=dict(static=True))

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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Shown:
    """An array of the program that shows a parameter.

    Attributes:
      root: the parameter's numbers, an axis for each atom of the view; None where only `stored` exists.
      stored: the same part of its stored form, or None.
      view: which array it is.
      weight: how the whole parameter is stored.
      stacked: the parameter's axes that lead the stored form.
      dtype: of the parameter.
    """

    root: Any
    stored: Any
    view: View = _static()
    weight: Weight | None = _static()
    stacked: tuple[int, ...] = _static()
    dtype: str = _static()

    @staticmethod
    def of(leaf: Any, stored: Any, weight: Weight | None) -> "Shown":
        """A parameter: an array, or a shape where only the stored form exists."""
        view, dtype = View.of(leaf.shape), jnp.dtype(leaf.dtype).name
        stack = () if stored is None or weight is None else weight.layout.stack
        kept = tuple(axis for axis in stack if leaf.shape[axis] > 1)
        if kept != stack:  # a loop over one layer: its axis is nobody's
            sizes = tuple(leaf.shape[axis] for axis in kept)
            stored = jax.tree.map(lambda a: a.reshape(sizes + a.shape[len(stack) :]), stored)
        root = leaf if isinstance(leaf, jax.Array) or hasattr(leaf, "__array__") else None
        if root is not None and view.sizes != leaf.shape:
            root = regrouped(root, _without_ones(leaf.shape))
        return Shown(root, stored, view, weight, kept, dtype)

    @property
    def axes(self) -> tuple[tuple[int, ...], ...]:
        """The atoms of each axis."""
        return self.view.axes

    def array(self, shape: tuple[int, ...]) -> jax.Array:
        """The numbers, as an array of this shape."""
        groups = self.view.axes
        root = self.numbers().transpose([atom for group in groups for atom in group])
        out = regrouped(root, [[self.view.sizes[atom] for atom in group] for group in groups])
        out = out if out.shape == tuple(shape) else jnp.broadcast_to(out, shape)
        for dtype in self.view.casts:
            out = out.astype(dtype)
        return out

    def numbers(self) -> jax.Array:
        """The root; of a weight that exists in its stored form alone, what that stands for."""
        if self.root is not None:
            return self.root
        if self.stored is None or self.weight is None:
            raise ValueError(
                f"a parameter of shape {list(self.view.shape)} exists in quantized form only, but a part of it is read "
                "that has none; pass the float parameter, or leave its layer out of quantize_params"
            )
        return _unfold(self.stored.dequantize(self.dtype), self)

    # How views move. Each is the method of `View`, and what it does to the arrays.

    def _with(self, view: View | None, **changes: Any) -> Any:
        return None if view is None else dataclasses.replace(self, view=view, **changes)

    def transpose(self, permutation: Any) -> Any:
        """The axes in another order."""
        return self._with(self.view.transpose(permutation))

    def squeeze(self, dimensions: Any) -> Any:
        """Without some axes of size 1."""
        return self._with(self.view.squeeze(dimensions))

    def broadcast(self, places: Any, ndim: int) -> Any:
        """With more axes."""
        return self._with(self.view.broadcast(places, ndim))

    def cast(self, dtype: Any) -> Any:
        """In another dtype."""
        return self._with(self.view.cast(dtype))

    def reshape(self, old: tuple[int, ...], new: tuple[int, ...]) -> Any:
        """Split and merged axes; None where they are cut across."""
        view = self.view.reshape(old, new)
        root = self.root if view is None or self.root is None else _split(self.root, view.sizes)
        return self._with(view, root=root)

    def at(self, axis: int, index: Any) -> Any:
        """One entry of an axis, which stays with size 1."""
        if not self.axes[axis]:
            return self
        arrays, one = self.leading(axis)
        entry = one(jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, index, 0, keepdims=False), arrays))
        return entry._with(self.view.at(axis, index))

    def part(self, axis: int, start: Any, size: int) -> Any:
        """Some entries of an axis; no stored form serves them."""
        if not self.axes[axis]:
            return self
        root = lax.dynamic_slice_in_dim(self.numbers(), start, size, self.axes[axis][0])
        return self._with(self.view.part(axis, start, size), root=root, stored=None, stacked=())

    def leading(self, axis: int) -> tuple[Any, Callable[[Any], "Shown"]]:
        """(arrays with an axis of one atom in front, what one entry of them is)."""
        (atom,) = self.axes[axis]
        lost, stored = self.view.origin[atom], None
        if self.stored is not None and lost in self.stacked and self.view.origin.count(lost) == 1:
            place = self.stacked.index(lost)
            stored = jax.tree.map(lambda a: jnp.moveaxis(a, place, 0), self.stored)
        # The numbers of a weight that is stored alone are only needed where an entry has no stored form.
        root = self.numbers() if self.root is not None or stored is None else None
        stacked = () if stored is None else tuple(axis for axis in self.stacked if axis != lost)
        view = self.view.drop(axis)
        entry = lambda arrays: self._with(view, root=arrays[0], stored=arrays[1], stacked=stacked)
        return (None if root is None else jnp.moveaxis(root, atom, 0), stored), entry

    def constrain(self, sharding: NamedSharding) -> Any:
        """Where its axes live, for the parameter itself."""
        if self.root is None or any(len(axes) > 1 for axes in self.axes):
            return self
        spec = (*sharding.spec, *(None,) * len(self.axes))
        place = {axes[0]: axis for axis, axes in enumerate(self.axes) if axes}
        own = NamedSharding(sharding.mesh, PartitionSpec(*(spec[place[a]] for a in range(len(self.view.sizes)))))
        return self._with(self.view, root=lax.with_sharding_constraint(self.root, own))

    def stop(self) -> Any:
        """Without a gradient."""
        return self._with(self.view, root=None if self.root is None else lax.stop_gradient(self.root))


class Machine:
    """Runs programs by plans; programs and products that agree are traced once."""

    def __init__(self) -> None:
        self._calls: dict[Any, Any] = {}

    def run(self, jaxpr: Any, consts: Any, inputs: list[Any], plan: Plan) -> list[Any]:
        """The outputs, some of which may be `Shown`."""
        env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))
        read = lambda var: var.val if isinstance(var, core.Literal) else env[var]
        steps = dict(plan)
        for number, eqn in enumerate(jaxpr.eqns):
            stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
            with source_info_util.user_context(eqn.source_info.traceback, name_stack=stack), eqn.ctx.manager:
                outputs = self._equation(eqn, [read(var) for var in eqn.invars], steps.get(number, ()))
            env.update(zip(eqn.outvars, outputs, strict=True))
        return [read(var) for var in jaxpr.outvars]

    def _equation(self, eqn: Any, inputs: list[Any], step: Any) -> list[Any]:
        name = eqn.primitive.name
        if isinstance(step, Recipe):
            return [_product(eqn, inputs, step)]
        shown = any(isinstance(value, Shown) for value in inputs)
        if not shown:
            return _bind(eqn, inputs)
        rules = {"scan": self._scan, "while": self._while, "cond": self._cond}
        if name in rules and (step or name == "scan"):
            return rules[name](eqn, inputs, step)
        if name in INLINED and not eqn.params.get("differentiated"):
            return self._call(eqn, inputs, step)
        moved = [self._moved(eqn, inputs, i) for i in range(len(eqn.outvars))]
        if any(value is None for value in moved):
            bound = _bind(eqn, inputs)
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

    def _call(self, eqn: Any, inputs: list[Any], plan: Plan) -> list[Any]:
        name, params = eqn.primitive.name, eqn.params
        body, consts = _open(params.get("jaxpr", params.get("call_jaxpr")))
        run = lambda inputs: self.run(body, consts, inputs, plan)
        if name in ("remat2", "checkpoint", "remat"):
            again = jax.checkpoint(run, prevent_cse=params["prevent_cse"], policy=params["policy"])
            return _passed_on(body, inputs, again(inputs))
        placed = [*params.get("in_shardings", ()), *params.get("out_shardings", ())]
        if any(isinstance(sharding, Sharding) for sharding in placed):
            outputs = run(list(map(_put, inputs, eqn.invars, params["in_shardings"])))
            return list(map(_put, outputs, eqn.outvars, params["out_shardings"]))
        # Equal blocks share one trace; there is none to share outside of one, where a new function would be compiled.
        traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(inputs))
        if not traced or "name" not in params or not multiplies(body):
            return run(inputs)
        key = (id(body), plan)
        if key not in self._calls:
            run.__name__ = params["name"]
            self._calls[key] = body, jax.jit(run)  # the body too: its id is the key
        return _passed_on(body, inputs, self._calls[key][1](inputs))

    def _scan(self, eqn: Any, inputs: list[Any], plan: Plan) -> list[Any]:
        (body, consts), options = _open(eqn.params["jaxpr"]), eqn.params
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

        def step(carried: list[Any], items: Any) -> tuple[list[Any], list[Any]]:
            own = list(carry)
            for i, value in zip(moving, carried, strict=True):
                own[i] = value
            given = [*fixed, *own, *(entry(item) for entry, item in zip(entries, items, strict=True))]
            outs = list(map(_bare, self.run(body, consts, given, plan), [var.aval for var in body.outvars]))
            return [outs[i] for i in moving], [y for y, skip in zip(outs[count:], same, strict=True) if not skip]

        begin = [_bare(carry[i], avals[first + i]) for i in moving]
        kept = {name: options[name] for name in ("length", "reverse", "unroll", "_split_transpose") if name in options}
        last, ys = lax.scan(step, begin, list(runs), **kept)
        last, ys = iter(last), iter(ys)
        outputs = [value if held else next(last) for value, held in zip(carry, still, strict=True)]
        return outputs + [
            inputs[passed[var]] if skip else next(ys) for var, skip in zip(body.outvars[count:], same, strict=True)
        ]

    def _while(self, eqn: Any, inputs: list[Any], plan: Plan) -> list[Any]:
        params, plans = eqn.params, dict(plan)
        first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        (test, test_consts), (body, consts) = _open(params["cond_jaxpr"]), _open(params["body_jaxpr"])
        go_on = lambda carry: _bare(
            self.run(test, test_consts, [*inputs[:first], *carry], plans.get(0, ()))[0], test.outvars[0].aval
        )
        types = [var.aval for var in body.outvars]
        step = lambda carry: list(
            map(_bare, self.run(body, consts, [*inputs[first:second], *carry], plans.get(1, ())), types)
        )
        return lax.while_loop(go_on, step, list(map(_bare, inputs[second:], types)))

    def _cond(self, eqn: Any, inputs: list[Any], plan: Plan) -> list[Any]:
        plans, types = dict(plan), [var.aval for var in eqn.outvars]

        def branch(number: int, body: Any, consts: Any) -> Callable[[], list[Any]]:
            return lambda: list(map(_bare, self.run(body, consts, inputs[1:], plans.get(number, ())), types))

        branches = [branch(number, *_open(closed)) for number, closed in enumerate(eqn.params["branches"])]
        return lax.switch(_bare(inputs[0], eqn.invars[0].aval), branches)


def bare(values: list[Any], jaxpr: Any) -> list[Any]:
    """The outputs of a program as arrays."""
    return list(map(_bare, values, [var.aval for var in jaxpr.outvars]))


def _product(eqn: Any, inputs: list[Any], recipe: Recipe) -> jax.Array:
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
    key = jax.random.key(0) if stored is None and recipe.stochastic else None  # in evaluation: calls repeat
    if asked is not None:
        asked = with_entries(asked, split_entries(asked, entries(asked, out.ndim), found.out_groups))
    y = contract(
        found.contraction, x, kernel, recipe=recipe, quantized=stored, key=key, shape=view.sizes, out_sharding=asked
    )
    return regrouped(y, found.out_groups).astype(out.dtype)


def _bind(eqn: Any, inputs: list[Any]) -> list[Any]:
    found = eqn.primitive.get_bind_params(eqn.params)
    functions, params = found if isinstance(found, tuple) else ((), found)
    arrays = map(_bare, inputs, [var.aval for var in eqn.invars])
    out = eqn.primitive.bind(*functions, *arrays, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def _bare(value: Any, aval: Any) -> Any:
    return value.array(aval.shape) if isinstance(value, Shown) else value


def _put(value: Any, var: Any, sharding: Any) -> Any:
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


def _unfold(matrix: jax.Array, weight: Shown) -> jax.Array:
    """The numbers of a stored weight, `[*stack, k, n]`, by atoms."""
    assert weight.weight is not None
    layout, view = weight.weight.layout, weight.view
    first, second = (layout.outputs, layout.inputs) if layout.transposed else (layout.inputs, layout.outputs)
    order = [a for a in (*weight.stacked, *first, *second) if weight.view.shape[a] > 1 and a not in view.taken]
    whole = matrix.reshape([view.shape[axis] for axis in order])
    return whole.transpose([order.index(axis) for axis in sorted(order)]).reshape(view.sizes)


def _split(x: jax.Array, sizes: tuple[int, ...]) -> jax.Array:
    """An array with its axes split into these sizes, in order."""
    if x.shape == tuple(sizes):
        return x
    rest, groups = list(sizes), []
    for size in x.shape:
        group = [rest.pop(0)]
        while math.prod(group) < size:
            group.append(rest.pop(0))
        groups.append(group)
    return ungrouped(x, groups)


def _without_ones(shape: tuple[int, ...]) -> list[list[int]]:
    """Neighbouring axes as groups, each with one axis that is longer than one."""
    groups: list[list[int]] = []
    for size in shape:
        if (size == 1 and groups) or (groups and max(groups[-1]) == 1):
            groups[-1].append(size)
        else:
            groups.append([size])
    return groups if max(shape, default=1) > 1 else []


def _open(body: Any) -> tuple[Any, Any]:
    return getattr(body, "jaxpr", body), getattr(body, "consts", ())
