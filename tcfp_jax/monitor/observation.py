"""`value_and_grad` with readings: what rounding made of x, weight and gradient in every low-precision product.

    (loss, gradients), readings = monitor.value_and_grad(loss_fn)(params, batch)

The function is traced; its program says where a product is (`products.sites`). It is evaluated again with a probe at
each product: zeros of which nothing is read, whose gradient is what is known in the backward pass. The forward pass
keeps a few numbers of x and w for it, and the gradient of the result is read where it arrives. In a loop a probe has an
entry for each round, so that layers of a scanned stack are told apart. A step that asks for no readings is traced as it
always was, by `tcfp_jax.value_and_grad`: nothing of this is in its program.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core, source_info_util
from jax.sharding import Sharding

from tcfp_jax import paths
from tcfp_jax.conversion.arrays import arrays_of, is_array, on_arrays
from tcfp_jax.conversion.evaluation import bind, placed
from tcfp_jax.conversion.programs import INLINED, bodies_of, opened, scan_counts
from tcfp_jax.monitor.readings import (
    OPERANDS,
    Reading,
    forward_operands,
    gradient_operands,
    read_gradients,
    read_product,
)
from tcfp_jax.optim.gradients import filled, slots_of
from tcfp_jax.products.fp4_training import OperandName
from tcfp_jax.products.operands import ACTIVATION_NAME, Carrier
from tcfp_jax.products.sites import Site, site_of
from tcfp_jax.weights.training import is_stored

Readings = dict[str, dict[OperandName, Reading]]
# Of which arguments a value was computed: pairs of 0 for parameters or 1 for others, and the path.
Origin = frozenset[tuple[int, str]]
_FIELDS = len(Reading._fields) + 1  # and that the product ran


class _Found(NamedTuple):
    """A product in a program: the path of its weight, and the leading axes of its probe."""

    site: Site
    path: str
    axes: tuple[int, ...]

    @property
    def operands(self) -> tuple[OperandName, ...]:
        """What the rows of its probe are of."""
        return *forward_operands(self.site.recipe), *gradient_operands(self.site.recipe)


class _Unread(NamedTuple):
    """Products in the body of an equation that no probe reaches. They have one, to which nothing arrives."""

    inside: str
    found: tuple[_Found, ...]


# What programs that hold products are called where users write them.
_BODIES = {
    "while": "jax.lax.while_loop", "shard_map": "jax.shard_map", "custom_vjp_call": "jax.custom_vjp",
    "custom_jvp_call": "jax.custom_jvp",
}  # fmt: skip
# What to do at an equation, by its number: `_Found`, `_Unread`, or the plan of its body, of branches by their numbers.
_Plan = dict[int, Any]


def value_and_grad(
    fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., tuple[Any, Readings]]:
    """`tcfp_jax.value_and_grad` of a function, and beside its result the readings of its products.

    Readings are by the path of the weight, then "x", "w" and "g", the gradient of the product's result, as the forward
    product and dgrad read them; of FP4 training also "x_wgrad" and "g_wgrad", and "w_dgrad" where dgrad quantizes the
    weight anew. A weight that is multiplied again has its further readings under its path and "#2", "#3". Products
    inside of `jax.shard_map`, a while loop or another custom derivative have no probe: their readings are NaN.

    Args:
      fun: a function with a scalar result.
      argnums: the positional arguments to differentiate; they hold the weights.
      has_aux: whether `fun` returns a pair of which the second is not differentiated.

    Returns:
      A function of the same arguments that returns `((value, gradients), readings)`. It composes with jit and scan.

    Raises:
      ValueError: no low-precision product was found, none of them can be read, or an argument that the call lacks.
      NotImplementedError: a product under `jax.vmap` over an axis that is not the first, or one that the function
        differentiates itself.

    >>> import tcfp_jax
    >>> loss = lambda params, x: jnp.sum(tcfp_jax.matmul(x, params["kernel"], recipe="tcfp12"))
    >>> (value, gradients), readings = value_and_grad(loss)({"kernel": jnp.ones((4, 2))}, jnp.full((3, 4), 0.5))
    >>> float(value), {name: float(reading.amax) for name, reading in readings["kernel"].items()}
    (12.0, {'x': 0.5, 'w': 1.0, 'g': 1.0})
    """
    places = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    @functools.wraps(fun)
    def observed(*args: Any, **kwargs: Any) -> Any:
        for place in places:
            if not -len(args) <= place < len(args):
                raise ValueError(f"argnums={argnums}, but the function was called with {len(args)} arguments")
        chosen = [place % len(args) for place in places]

        def given(slots: Any) -> tuple[Any, ...]:
            own = dict(zip(chosen, slots, strict=True))
            return tuple(filled(arg, own[i]) if i in own else arg for i, arg in enumerate(args))

        slots = tuple(slots_of(args[place]) for place in chosen)
        arrays, rebuild = arrays_of((given(slots), kwargs))
        # A new function each time: its trace is in no cache, so that it cannot be stale.
        program, out = jax.make_jaxpr(on_arrays(fun, rebuild), return_shape=True)(arrays)
        origins = [*(frozenset() for _ in program.consts), *_origins(given(slots), kwargs, chosen)]
        _, plan = _find(program.jaxpr, origins, ())
        found = list(_founds(plan))
        _check_read(getattr(fun, "__name__", "the function"), plan, len(found))

        def of(slots: Any, probes: Any) -> Any:
            arrays, _ = arrays_of((given(slots), kwargs))
            return out.rebuild(_run(program.jaxpr, program.consts, arrays, plan, probes))

        result, (gradients, probes) = jax.value_and_grad(of, (0, 1), has_aux)(slots, _probes(plan))
        gradients = gradients[0] if isinstance(argnums, int) else gradients
        return (result, gradients), _named(found, jax.tree.leaves(probes))

    return observed


def _origins(args: Any, kwargs: Any, chosen: Sequence[int]) -> list[Origin]:
    """Of each array among the arguments its name; a stored weight is one thing."""
    found: list[Origin] = []
    for kind, tree in [*((int(i not in chosen), arg) for i, arg in enumerate(args)), (1, kwargs)]:
        for path, leaf in paths.leaves(tree, is_stored).items():
            found += [frozenset({(kind, path)}) for array in jax.tree.leaves(leaf) if is_array(array)]
    return found


def _check_read(name: str, plan: _Plan, count: int) -> None:
    """Raise unless a product can be read."""
    if not count:
        raise ValueError(
            f"{name} computes no low-precision product; observe the loss of a model with layers of tcfp_jax or "
            "converted by it"
        )
    unread = list(_unread(plan))
    if count == sum(len(step.found) for step in unread):
        raise ValueError(
            f"{name} computes {count} low-precision product(s), none of which can be read: they are inside of "
            f"{' and '.join(sorted({step.inside for step in unread}))}, where no probe can be. Products are read in "
            "plain code and inside of jax.jit, scan, cond, checkpoint and vmap; observe a function that computes its "
            "layers there"
        )


# Where products are --------------------------------------------------------------------------------------------------


def _find(jaxpr: Any, origins: list[Origin], axes: tuple[int, ...]) -> tuple[list[Origin], _Plan]:
    """(the origins of the outputs, the products in a program and its bodies); `axes` are those of loops around it."""
    known: dict[Any, Origin] = dict(zip([*jaxpr.constvars, *jaxpr.invars], origins, strict=True))
    read = lambda var: frozenset() if isinstance(var, core.Literal) else known[var]
    plan: _Plan = {}
    for number, eqn in enumerate(jaxpr.eqns):
        outputs, step = _look(eqn, [read(var) for var in eqn.invars], axes)
        known.update(zip(eqn.outvars, outputs, strict=True))
        if step:
            plan[number] = step
        if eqn.primitive.name == "name" and eqn.params["name"] == ACTIVATION_NAME:
            raise NotImplementedError(
                "the function differentiates a low-precision product itself, by jax.grad, jax.vjp or jax.jvp inside of "
                "it; of such a product only its derivative is left in the program, which cannot be read. Observe the "
                "function that is differentiated"
            )
    return [read(var) for var in jaxpr.outvars], plan


def _look(eqn: Any, inputs: list[Origin], axes: tuple[int, ...]) -> tuple[list[Origin], Any]:
    name, params = eqn.primitive.name, eqn.params
    if name.startswith("custom_vjp_call") and (site := site_of(params["call_jaxpr"])) is not None:
        found = _Found(site, _path_of(site, inputs), (*axes, *_vmapped(eqn, site)))
        return [frozenset().union(*inputs)] * len(eqn.outvars), found
    if name in INLINED and not params.get("differentiated"):
        body, consts = opened(params.get("jaxpr", params.get("call_jaxpr")))
        return _find(body, [*(frozenset() for _ in consts), *inputs], axes)
    if name == "scan":
        return _look_into_scan(eqn, inputs, axes)
    if name == "cond":
        bodies = [opened(closed) for closed in params["branches"]]
        looked = [_find(body, [*(frozenset() for _ in consts), *inputs[1:]], axes) for body, consts in bodies]
        plans = {number: plan for number, (_, plan) in enumerate(looked) if plan}
        return [inputs[0].union(*origins) for origins in zip(*(outputs for outputs, _ in looked), strict=True)], plans
    whole: Origin = frozenset().union(*inputs)
    unread: list[_Found] = []
    for body, consts in bodies_of(eqn):
        given = inputs if len(inputs) == len(body.invars) else [whole] * len(body.invars)
        _, plan = _find(body, [*(frozenset() for _ in consts), *given], axes)
        unread += _founds(plan)
    inside = _BODIES.get(name.removesuffix("_jaxpr"), name)
    return [whole] * len(eqn.outvars), _Unread(inside, tuple(unread)) if unread else None


def _look_into_scan(eqn: Any, inputs: list[Origin], axes: tuple[int, ...]) -> tuple[list[Origin], _Plan]:
    (body, consts), (first, count) = opened(eqn.params["jaxpr"]), scan_counts(eqn.params)
    carry = inputs[first : first + count]
    while True:  # what a loop carries may come from more in its second round; origins only grow
        given = [*(frozenset() for _ in consts), *inputs[:first], *carry, *inputs[first + count :]]
        outputs, plan = _find(body, given, (*axes, eqn.params["length"]))
        grown = [a | b for a, b in zip(carry, outputs[:count], strict=True)]
        if grown == carry:
            return outputs, plan
        carry = grown


def _path_of(site: Site, inputs: list[Origin]) -> str:
    """The parameters that the weight of a product was computed from, or else the arguments that it came from."""
    _, w, quantized, *_ = site.structure.unflatten(inputs)
    whole: Origin = frozenset().union(*jax.tree.leaves((w, quantized)))
    kind = min((kind for kind, _ in whole), default=1)
    return " + ".join(sorted(path for k, path in whole if k == kind)) or "(constant)"


def _vmapped(eqn: Any, site: Site) -> tuple[int, ...]:
    """The axes that `jax.vmap` has put in front of the operands of a product."""
    shapes = [var.aval.shape for var in eqn.invars]
    extra = {len(shape) - len(own) for shape, own in zip(shapes, site.shapes, strict=True)}
    leading = {shape[: len(shape) - len(own)] for shape, own in zip(shapes, site.shapes, strict=True)} - {()}
    fits = all(shape[len(shape) - len(own) :] == own for shape, own in zip(shapes, site.shapes, strict=True))
    if not fits or len(extra - {0}) > 1 or len(leading) > 1:
        raise NotImplementedError(
            f"a product of {[list(own) for own in site.shapes[:2]]} is computed under jax.vmap as "
            f"{[list(shape) for shape in shapes[:2]]}, and only axes in front of all operands can be read; give "
            "jax.vmap in_axes of 0 and None"
        )
    return next(iter(leading), ())


# Probes --------------------------------------------------------------------------------------------------------------


def _founds(plan: Any) -> Any:
    """The products of a plan, in the order of `jax.tree.leaves` of its probes."""
    if isinstance(plan, _Found):
        yield plan
    elif isinstance(plan, _Unread):
        yield from plan.found
    else:
        for number in sorted(plan):
            yield from _founds(plan[number])


def _unread(plan: Any) -> Any:
    """What of a plan is not read."""
    if isinstance(plan, _Unread):
        yield plan
    elif not isinstance(plan, _Found):
        for step in plan.values():
            yield from _unread(step)


def _probes(plan: Any) -> Any:
    if isinstance(plan, _Found):
        return jnp.zeros((*plan.axes, len(plan.operands), _FIELDS), jnp.float32)
    if isinstance(plan, _Unread):
        return [_probes(found) for found in plan.found]
    return {number: _probes(step) for number, step in plan.items()}


def _named(found: Sequence[_Found], probes: Sequence[jax.Array]) -> Readings:
    """Readings by path, from what arrived at the probes."""
    readings: Readings = {}
    for product, probe in zip(found, probes, strict=True):
        ran = probe[..., -1:] > 0
        fields = jnp.moveaxis(jnp.where(ran, probe[..., :-1], jnp.nan), -1, 0)
        path, again = product.path, 2
        while path in readings:
            path, again = f"{product.path}#{again}", again + 1
        rows = product.operands
        readings[path] = {name: Reading(*fields[..., rows.index(name)]) for name in OPERANDS if name in rows}
    return readings


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _watched(
    site: Site, outputs: tuple[jax.Array, ...], probe: jax.Array, forward: jax.Array, words: jax.Array | None
) -> Any:
    """The outputs of a product; what is known of its operands is the gradient of the probe."""
    return outputs


def _watched_forward(site: Site, outputs: Any, probe: jax.Array, forward: jax.Array, words: Any) -> Any:
    return outputs, (forward, words)


def _watched_backward(site: Site, saved: tuple[jax.Array, Any], gradients: Any) -> Any:
    forward, words = saved
    made = Carrier(tuple(gradients[1:])) if site.gradient == "quantized" else None

    def of_one(g: jax.Array, made: Carrier | None, words: jax.Array | None) -> jax.Array:
        quantized = None if made is None else made.quantized(site.recipe)
        return _rows(read_gradients(site.recipe, g, quantized, words))

    for _ in range(forward.ndim - 2):
        of_one = jax.vmap(of_one, in_axes=(0, 0, 0 if words is not None and words.ndim > 1 else None))
    rows = of_one(gradients[0], made, words)
    return gradients, jnp.concatenate([forward, rows], axis=-2), jnp.zeros_like(forward), None


_watched.defvjp(_watched_forward, _watched_backward)


def _rows(readings: Sequence[Reading]) -> jax.Array:
    return jnp.stack([jnp.stack([*reading, jnp.ones_like(reading.amax)]) for reading in readings])


# The program again ---------------------------------------------------------------------------------------------------


def _run(jaxpr: Any, consts: Any, inputs: Sequence[Any], plan: _Plan, probes: Any) -> list[Any]:
    """The outputs of a program with a probe at each product of its plan."""
    env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))
    read = lambda var: var.val if isinstance(var, core.Literal) else env[var]
    for number, eqn in enumerate(jaxpr.eqns):
        stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
        with source_info_util.user_context(eqn.source_info.traceback, name_stack=stack), eqn.ctx.manager:
            given = [read(var) for var in eqn.invars]
            if number in plan:
                outputs = _evaluate(eqn, given, plan[number], probes[number])
            else:
                outputs = bind(eqn, given)
        env.update(zip(eqn.outvars, outputs, strict=True))
    return [read(var) for var in jaxpr.outvars]


def _evaluate(eqn: Any, inputs: list[Any], step: Any, probes: Any) -> Sequence[Any]:
    """The outputs of an equation that is a product, or that holds some."""
    name, params = eqn.primitive.name, eqn.params
    if isinstance(step, _Found):
        return _product(eqn, inputs, step.site, probes)
    if isinstance(step, _Unread):
        return bind(eqn, inputs)
    if name == "scan":
        return _scan(eqn, inputs, step, probes)
    if name == "cond":
        branches = []
        for number, (body, consts) in enumerate(map(opened, params["branches"])):
            own = functools.partial(_branch, body, consts, step.get(number, {}), number)
            branches.append(own)
        return lax.switch(inputs[0], branches, inputs[1:], probes)
    body, consts = opened(params.get("jaxpr", params.get("call_jaxpr")))
    run = lambda inputs, probes: _run(body, consts, inputs, step, probes)
    if name in ("remat2", "checkpoint", "remat"):
        return jax.checkpoint(run, prevent_cse=params["prevent_cse"], policy=params["policy"])(inputs, probes)
    shardings = [*params.get("in_shardings", ()), *params.get("out_shardings", ())]
    if any(isinstance(sharding, Sharding) for sharding in shardings):
        outputs = run(list(map(placed, inputs, eqn.invars, params["in_shardings"])), probes)
        return list(map(placed, outputs, eqn.outvars, params["out_shardings"]))
    return run(inputs, probes)


def _branch(body: Any, consts: Any, plan: _Plan, number: int, inputs: list[Any], probes: Mapping[int, Any]) -> Any:
    return _run(body, consts, inputs, plan, probes.get(number, {}))


def _scan(eqn: Any, inputs: list[Any], plan: _Plan, probes: Any) -> list[Any]:
    (body, consts), options = opened(eqn.params["jaxpr"]), eqn.params
    first, count = scan_counts(options)
    fixed, xs = inputs[:first], inputs[first + count :]

    def one(carry: list[Any], items: Any) -> tuple[list[Any], list[Any]]:
        own, own_probes = items
        outputs = _run(body, consts, [*fixed, *carry, *own], plan, own_probes)
        return outputs[:count], outputs[count:]

    kept = {name: options[name] for name in ("length", "reverse", "unroll", "_split_transpose") if name in options}
    last, ys = lax.scan(one, inputs[first : first + count], (xs, probes), **kept)
    return [*last, *ys]


def _product(eqn: Any, inputs: list[Any], site: Site, probe: jax.Array) -> Sequence[jax.Array]:
    """A product, and what is known of its operands."""
    leaves = [lax.stop_gradient(leaf) for leaf in inputs]

    def of_one(*leaves: Any) -> jax.Array:
        return _rows(read_product(site.recipe, *site.structure.unflatten(leaves)))

    in_axes = [0 if leaf.ndim > len(own) else None for leaf, own in zip(leaves, site.shapes, strict=True)]
    for _ in range(probe.ndim - 2):
        of_one = jax.vmap(of_one, in_axes=in_axes)
    with jax.named_scope("monitor"):
        forward, (*_, words) = of_one(*leaves), site.structure.unflatten(leaves)
        return _watched(site, tuple(bind(eqn, inputs)), probe, forward, words)
