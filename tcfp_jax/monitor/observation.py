"""`value_and_grad` with readings: what rounding made of x, weight and gradient in every low-precision product.

    (loss, gradients), readings = monitor.value_and_grad(loss_fn)(params, batch)

The function is traced; its program says where a product is (`products.annotations`). It is evaluated again with a probe
at each product: zeros of which nothing is read, whose gradient is what is known in the backward pass. The forward pass
keeps a few numbers of x and w for it, and the gradient of the result is read where it arrives. In a loop a probe has an
entry for each round, so that layers of a scanned stack are told apart. A step that asks for no readings is traced as it
always was, by `tcfp_jax.value_and_grad`: nothing of this is in its program.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Sharding

from tcfp_jax import paths
from tcfp_jax.conversion.evaluate import placed
from tcfp_jax.conversion.trace import (
    CHECKPOINTS,
    Body,
    Equation,
    arrays_in,
    bind,
    body_of,
    eval_jaxpr,
    opened,
    scan_counts,
    scan_options,
    trace,
)
from tcfp_jax.monitor.places import Found, Origin, Plan, Unread, check_read, find, products_of
from tcfp_jax.monitor.readings import OPERANDS, Reading, read_gradients, read_product
from tcfp_jax.optim.gradients import filled, places_of, slots_of
from tcfp_jax.products.annotations import Site
from tcfp_jax.products.fp4_training import OperandName
from tcfp_jax.weights.training import is_stored

Readings = dict[str, dict[OperandName, Reading]]
_FIELDS = len(Reading._fields) + 1  # and that the product ran


def value_and_grad(
    fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., tuple[Any, Readings]]:
    """`tcfp_jax.value_and_grad` of a function, and beside its result the readings of its products.

    Readings are by the path of the weight, then "x", "w" and "g", the gradient of the product's result, as the forward
    product and dgrad read them; of FP4 training also "x_wgrad" and "g_wgrad", and "w_dgrad" where dgrad quantizes the
    weight anew. A weight that is an argument itself is "argument 0". One that is multiplied again has its further
    readings under its path and "#2", "#3". Products inside of `jax.shard_map`, a while loop or another custom
    derivative have no probe: their readings are NaN.

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
    >>> step = jax.jit(value_and_grad(loss))
    >>> (value, gradients), readings = step({"kernel": jnp.ones((4, 2))}, jnp.full((3, 4), 0.5))
    >>> float(value), {name: float(reading.amax) for name, reading in readings["kernel"].items()}
    (12.0, {'g': 1.0, 'w': 1.0, 'x': 0.5})
    """

    @functools.wraps(fun)
    def observed(*args: Any, **kwargs: Any) -> Any:
        chosen = places_of(argnums, args)

        def given(slots: Any) -> tuple[Any, ...]:
            own = dict(zip(chosen, slots, strict=True))
            return tuple(filled(arg, own[i]) if i in own else arg for i, arg in enumerate(args))

        slots = tuple(slots_of(args[place]) for place in chosen)
        program = trace(fun, given(slots), kwargs)
        body = program.jaxpr.jaxpr, program.jaxpr.consts
        _, plan = find(body, _origins(given(slots), kwargs, chosen), ())
        found = list(products_of(plan))
        check_read(getattr(fun, "__name__", "the function"), plan)

        def of(slots: Any, probes: Any) -> Any:
            return program.rebuild(_run(body, arrays_in((given(slots), kwargs)), plan, probes))

        result, (gradients, probes) = jax.value_and_grad(of, (0, 1), has_aux)(slots, _probes(plan))
        gradients = gradients[0] if isinstance(argnums, int) else gradients
        return (result, gradients), _named(found, jax.tree.leaves(probes))

    return observed


def _origins(args: Any, kwargs: Any, chosen: Sequence[int]) -> list[Origin]:
    """Of each array among the arguments its name; a stored weight is one thing."""
    found: list[Origin] = []
    for i, tree in enumerate([*args, kwargs]):
        kind = int(i not in chosen)
        for path, leaf in paths.leaves(tree, is_stored).items():
            # What is an argument itself has no path.
            found += [frozenset({(kind, path or f"argument {i}")}) for _ in arrays_in(leaf)]
    return found


# Probes --------------------------------------------------------------------------------------------------------------


def _probes(plan: Any) -> Any:
    if isinstance(plan, Found):
        return jnp.zeros((*plan.axes, len(plan.operands), _FIELDS), jnp.float32)
    if isinstance(plan, Unread):
        return [_probes(found) for found in plan.found]
    return {number: _probes(step) for number, step in plan.items()}


def _named(found: Sequence[Found], probes: Sequence[jax.Array]) -> Readings:
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

    def of_one(g: jax.Array, words: jax.Array | None) -> jax.Array:
        return _rows(read_gradients(site.recipe, g, words))

    for _ in range(forward.ndim - 2):
        of_one = jax.vmap(of_one, in_axes=(0, 0 if words is not None and words.ndim > 1 else None))
    rows = of_one(gradients[0], words)
    return gradients, jnp.concatenate([forward, rows], axis=-2), jnp.zeros_like(forward), None


_watched.defvjp(_watched_forward, _watched_backward)


def _rows(readings: Sequence[Reading]) -> jax.Array:
    return jnp.stack([jnp.stack([*reading, jnp.ones_like(reading.amax)]) for reading in readings])


# The program again ---------------------------------------------------------------------------------------------------


def _run(body: Body, inputs: Sequence[Any], plan: Plan, probes: Any) -> list[Any]:
    """Return the outputs of a program with a probe at each product of its plan."""
    jaxpr, consts = body

    def rule(number: int, eqn: Equation, given: list[Any]) -> Sequence[Any]:
        return _evaluate(eqn, given, plan[number], probes[number]) if number in plan else bind(eqn, given)

    return eval_jaxpr(jaxpr, [*consts, *inputs], rule)


def _evaluate(eqn: Equation, inputs: list[Any], step: Any, probes: Any) -> Sequence[Any]:
    """Return the outputs of an equation that is a product, or that holds some."""
    name, params = eqn.primitive.name, eqn.params
    if isinstance(step, Found):
        return _product(eqn, inputs, step.site, probes)
    if isinstance(step, Unread):
        return bind(eqn, inputs)
    if name == "scan":
        return _scan(eqn, inputs, step, probes)
    if name == "cond":
        branches = [
            functools.partial(_branch, opened(closed), step.get(number, {}), number)
            for number, closed in enumerate(params["branches"])
        ]
        return lax.switch(inputs[0], branches, inputs[1:], probes)
    run = lambda inputs, probes: _run(body_of(eqn), inputs, step, probes)
    if name in CHECKPOINTS:
        return jax.checkpoint(run, prevent_cse=params["prevent_cse"], policy=params["policy"])(inputs, probes)
    shardings = [*params.get("in_shardings", ()), *params.get("out_shardings", ())]
    if any(isinstance(sharding, Sharding) for sharding in shardings):
        outputs = run(list(map(placed, inputs, params["in_shardings"])), probes)
        return list(map(placed, outputs, params["out_shardings"]))
    return run(inputs, probes)


def _branch(body: Body, plan: Plan, number: int, inputs: list[Any], probes: Mapping[int, Any]) -> list[Any]:
    return _run(body, inputs, plan, probes.get(number, {}))


def _scan(eqn: Equation, inputs: list[Any], plan: Plan, probes: Any) -> list[Any]:
    body, (first, count) = opened(eqn.params["jaxpr"]), scan_counts(eqn.params)
    fixed, xs = inputs[:first], inputs[first + count :]

    def one(carry: list[Any], items: Any) -> tuple[list[Any], list[Any]]:
        own, own_probes = items
        outputs = _run(body, [*fixed, *carry, *own], plan, own_probes)
        return outputs[:count], outputs[count:]

    last, ys = lax.scan(one, inputs[first : first + count], (xs, probes), **scan_options(eqn.params))
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
