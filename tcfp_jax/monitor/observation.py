"""`value_and_grad` with readings: the effect of rounding on x, weight and gradient in every low-precision product.

    (loss, gradients), readings = monitor.value_and_grad(loss_fn)(params, batch)

The function is traced, and annotations in its program mark the products (`products.annotations`). The program is then
evaluated with a probe at each product: an array of zeros that nothing reads, and whose gradient carries the readings
out. The forward pass saves the readings of x and w, and the backward pass adds those of the gradient that arrives. In a
loop a probe has an entry for each round, which tells layers of a scanned stack apart. A step without readings uses
`tcfp_jax.value_and_grad` and contains none of this.
"""

import functools
from collections.abc import Callable, Sequence
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
    arrays_in,
    bind,
    body_of,
    eval_jaxpr,
    opened,
    scan_counts,
    scan_options,
    trace,
)
from tcfp_jax.conversion.views import Equation
from tcfp_jax.monitor.places import Found, Origin, Plan, Step, Unread, check_read, find, products_of
from tcfp_jax.monitor.readings import OPERANDS, Reading, read_gradients, read_product
from tcfp_jax.optim.gradients import filled, places_of, slots_of
from tcfp_jax.paths import PyTree
from tcfp_jax.products.annotations import Site
from tcfp_jax.products.fp4_training import OperandName
from tcfp_jax.weights.training import is_stored

Readings = dict[str, dict[OperandName, Reading]]
_FIELDS = len(Reading._fields) + 1  # the last one says that the product ran


def value_and_grad(
    fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., tuple[Any, Readings]]:
    """Return `tcfp_jax.value_and_grad` of a function together with the readings of its products.

    Use it now and then during training, to see which layers lose their gradients or saturate. Readings are indexed by
    the path of the weight, then by operand: "x" and "w" of the forward product, and "g", the gradient of its result, in
    dgrad. FP4 training adds "x_wgrad" and "g_wgrad", and "w_dgrad" if dgrad quantizes the weight again. A weight that
    is an argument itself is "argument 0". Further products of a weight have "#2", "#3" after its path. No probe reaches
    products in `jax.shard_map`, a while loop or another custom derivative: their readings are NaN.

    Args:
      fun: a function with a scalar result.
      argnums: positions of the arguments to differentiate; they hold the weights.
      has_aux: whether `fun` returns a pair whose second part is not differentiated.

    Returns:
      A function of the same arguments that returns `((value, gradients), readings)`. It composes with jit and scan.

    Raises:
      ValueError: the function has no low-precision product, or none that can be read; or the call lacks an argument.
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

        def given(slots: Sequence[PyTree]) -> tuple[PyTree, ...]:
            own = dict(zip(chosen, slots, strict=True))
            return tuple(filled(arg, own[i]) if i in own else arg for i, arg in enumerate(args))

        slots = tuple(slots_of(args[place]) for place in chosen)
        program = trace(fun, given(slots), kwargs)
        body = program.jaxpr.jaxpr, program.jaxpr.consts
        _, plan = find(body, _origins(given(slots), kwargs, chosen), ())
        found = list(products_of(plan))
        check_read(getattr(fun, "__name__", "the function"), plan)

        def of(slots: Sequence[PyTree], probes: PyTree) -> PyTree:
            return program.rebuild(_run(body, arrays_in((given(slots), kwargs)), plan, probes))

        result, (gradients, probes) = jax.value_and_grad(of, (0, 1), has_aux)(slots, _probes(plan))
        gradients = gradients[0] if isinstance(argnums, int) else gradients
        return (result, gradients), _named(found, jax.tree.leaves(probes))

    return observed


def _origins(args: Sequence[PyTree], kwargs: PyTree, chosen: Sequence[int]) -> list[Origin]:
    """Return the origin of each array among the arguments; a stored weight has one path."""
    found: list[Origin] = []
    for i, tree in enumerate([*args, kwargs]):
        kind = int(i not in chosen)
        for path, leaf in paths.leaves(tree, is_stored).items():
            # A leaf that is an argument itself has no path.
            found += [frozenset({(kind, path or f"argument {i}")}) for _ in arrays_in(leaf)]
    return found


# Probes --------------------------------------------------------------------------------------------------------------


def _probes(plan: Step) -> PyTree:
    if isinstance(plan, Found):
        return jnp.zeros((*plan.axes, len(plan.operands), _FIELDS), jnp.float32)
    if isinstance(plan, Unread):
        return [_probes(found) for found in plan.found]
    return {number: _probes(step) for number, step in plan.items()}


def _named(found: Sequence[Found], probes: Sequence[jax.Array]) -> Readings:
    """Return readings by path, from the gradients of the probes."""
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
) -> tuple[jax.Array, ...]:
    """Return the outputs of a product; the gradient of the probe is the readings of its operands."""
    return outputs


def _watched_forward(
    site: Site, outputs: tuple[jax.Array, ...], probe: jax.Array, forward: jax.Array, words: jax.Array | None
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, jax.Array | None]]:
    return outputs, (forward, words)


def _watched_backward(
    site: Site, saved: tuple[jax.Array, jax.Array | None], gradients: tuple[jax.Array, ...]
) -> tuple[tuple[jax.Array, ...], jax.Array, jax.Array, None]:
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


def _run(body: Body, inputs: Sequence[jax.Array], plan: Plan, probes: PyTree) -> list[jax.Array]:
    """Return the outputs of a program with a probe at each product of its plan."""
    jaxpr, consts = body

    def rule(number: int, eqn: Equation, given: list[jax.Array]) -> Sequence[jax.Array]:
        return _evaluate(eqn, given, plan[number], probes[number]) if number in plan else bind(eqn, given)

    return eval_jaxpr(jaxpr, [*consts, *inputs], rule)


def _evaluate(eqn: Equation, inputs: list[jax.Array], step: Step, probes: PyTree) -> Sequence[jax.Array]:
    """Return the outputs of an equation that is a product, or that holds some."""
    name, params = eqn.primitive.name, eqn.params
    if isinstance(step, Found):
        return _product(eqn, inputs, step.site, probes)
    if isinstance(step, Unread):
        return bind(eqn, inputs)
    if name == "scan":
        return _scan(eqn, inputs, step, probes)
    if name == "cond":

        def branch(number: int, inputs: list[jax.Array], probes: PyTree) -> list[jax.Array]:
            body = opened(params["branches"][number])
            return _run(body, inputs, step.get(number, {}), probes.get(number, {}))  # type: ignore[arg-type]

        branches = [functools.partial(branch, number) for number in range(len(params["branches"]))]
        return lax.switch(inputs[0], branches, inputs[1:], probes)
    run = lambda inputs, probes: _run(body_of(eqn), inputs, step, probes)
    if name in CHECKPOINTS:
        return jax.checkpoint(run, prevent_cse=params["prevent_cse"], policy=params["policy"])(inputs, probes)
    shardings = [*params.get("in_shardings", ()), *params.get("out_shardings", ())]
    if any(isinstance(sharding, Sharding) for sharding in shardings):
        outputs = run(list(map(placed, inputs, params["in_shardings"])), probes)
        return list(map(placed, outputs, params["out_shardings"]))
    return run(inputs, probes)


def _scan(eqn: Equation, inputs: list[jax.Array], plan: Plan, probes: PyTree) -> list[jax.Array]:
    body, (first, count) = opened(eqn.params["jaxpr"]), scan_counts(eqn.params)
    fixed, xs = inputs[:first], inputs[first + count :]

    def one(carry: list[jax.Array], items: PyTree) -> tuple[list[jax.Array], list[jax.Array]]:
        own, own_probes = items
        outputs = _run(body, [*fixed, *carry, *own], plan, own_probes)
        return outputs[:count], outputs[count:]

    last, ys = lax.scan(one, inputs[first : first + count], (xs, probes), **scan_options(eqn.params))
    return [*last, *ys]


def _product(eqn: Equation, inputs: list[jax.Array], site: Site, probe: jax.Array) -> Sequence[jax.Array]:
    """Return the outputs of a product, and send the readings of its operands to the probe."""
    leaves = [lax.stop_gradient(leaf) for leaf in inputs]

    def of_one(*leaves: jax.Array) -> jax.Array:
        return _rows(read_product(site.recipe, *site.structure.unflatten(leaves)))

    in_axes = [0 if leaf.ndim > len(own) else None for leaf, own in zip(leaves, site.shapes, strict=True)]
    for _ in range(probe.ndim - 2):
        of_one = jax.vmap(of_one, in_axes=in_axes)
    with jax.named_scope("monitor"):
        forward, (*_, words) = of_one(*leaves), site.structure.unflatten(leaves)
        return _watched(site, tuple(bind(eqn, inputs)), probe, forward, words)
