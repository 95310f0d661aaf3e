"""`value_and_grad` with readings: the effect of rounding on x, weight and gradient in
every low-precision product.

    (loss, gradients), readings = monitor.value_and_grad(loss_fn)(params, batch)

The function is traced, and annotations in its program mark the products
(`products.annotations`). The program is then evaluated with a probe at each product: an
array of zeros that nothing reads, and whose gradient carries the readings out. The
forward pass saves the readings of x and w, and the backward pass adds those of the
gradient that arrives. In a loop a probe has an entry for each round, which tells layers
of a scanned stack apart. A step without readings uses `tcfp_jax.value_and_grad` and
contains none of this.

Products are found through jit, scan, cond, checkpoint and vmap. No probe can reach
those in a while loop, `jax.shard_map` or another custom derivative: their readings are
NaN.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Sharding

from tcfp_jax import paths
from tcfp_jax.conversion import evaluate as programs
from tcfp_jax.conversion.bodies import Body, Scan, opened
from tcfp_jax.conversion.transform import arrays_in, trace
from tcfp_jax.conversion.views import Equation
from tcfp_jax.monitor.readings import (
    OPERANDS,
    Reading,
    operands,
    read_gradients,
    read_product,
)
from tcfp_jax.optim.gradients import with_slots
from tcfp_jax.paths import PyTree
from tcfp_jax.products.annotations import ACTIVATION_NAME, Site, site_of
from tcfp_jax.products.fp4_training import OperandName
from tcfp_jax.weights.parameter import is_quantized

Readings = dict[str, dict[OperandName, Reading]]
_FIELDS = len(Reading._fields) + 1  # the last one says that the product ran

# The arguments that a value was computed from: pairs of a kind (0 for parameters, 1 for
# others) and a path.
_Origin = frozenset[tuple[int, str]]


class _Found(NamedTuple):
    """A product in a program: its weight's path, and the first axes of its probe."""

    site: Site
    path: str
    axes: tuple[int, ...]


class _Unread(NamedTuple):
    """Products in the body of an equation that no probe can reach.

    Their probes stay zero.
    """

    inside: str
    found: tuple[_Found, ...]


# The functions that users call, by the primitive that they become.
_BODIES = {
    "while": "jax.lax.while_loop",
    "shard_map": "jax.shard_map",
    "custom_vjp_call": "jax.custom_vjp",
    "custom_jvp_call": "jax.custom_jvp",
}
# By the number of an equation: its product, its unreachable products, or the plan of
# its body or of its branches.
_Plan: TypeAlias = dict[int, "_Step"]
# Readings of the forward pass, and the words of FP4 training's key
_Saved: TypeAlias = tuple[Array, Array | None]
_Step: TypeAlias = _Found | _Unread | _Plan


def value_and_grad(
    fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., tuple[Any, Readings]]:
    """Return `tcfp_jax.value_and_grad` of a function, with readings of its products.

    Use this now and then during training, to see which layers lose their gradients or
    saturate. Use `tcfp_jax.conversion.diagnose` before training.

    Readings are indexed by the path of the weight, then by operand: "x" and "w" of the
    forward product, and "g", the gradient of its result, in dgrad. FP4 training adds
    "x_wgrad" and "g_wgrad", and "w_dgrad" if dgrad quantizes the weight again. A weight
    that is an argument itself is "argument 0". Further products of a weight have "#2",
    "#3" after its path. No probe reaches products in `jax.shard_map`, a while loop or
    another custom derivative: their readings are NaN.

    Args:
      fun: a function with a scalar result.
      argnums: positions of the arguments to differentiate; they hold the weights.
      has_aux: whether `fun` returns a pair whose second part is not differentiated.

    Returns:
      A function of the same arguments that returns `((value, gradients), readings)`. It
        composes with jit and scan.

    Raises:
      ValueError: the function has no low-precision product, or none that can be read;
        or the call lacks an argument.
      NotImplementedError: a product under `jax.vmap` over another axis than the first,
        or that `fun` differentiates.

    >>> import tcfp_jax
    >>> def loss(w, x):
    ...     return jnp.sum(tcfp_jax.matmul(x, w["kernel"], recipe="tcfp12"))
    >>> step = jax.jit(value_and_grad(loss))
    >>> w = {"kernel": jnp.ones((4, 2))}
    >>> (value, gradients), readings = step(w, jnp.full((3, 4), 0.5))
    >>> {name: float(reading.amax) for name, reading in readings["kernel"].items()}
    {'g': 1.0, 'w': 1.0, 'x': 0.5}
    """

    @functools.wraps(fun)
    def observed(*args: Any, **kwargs: Any) -> Any:
        chosen, slots, given = with_slots(argnums, args)
        program = trace(fun, given(slots), kwargs)
        body = program.jaxpr.jaxpr, program.jaxpr.consts
        _, plan = _find(body, _origins(given(slots), kwargs, chosen), ())
        found = [product for product, _ in _products_of(plan)]
        _check_read(getattr(fun, "__name__", "the function"), plan)

        def watched(slots: Sequence[PyTree], probes: PyTree) -> PyTree:
            inputs = arrays_in((given(slots), kwargs))
            return program.rebuild(_run(body, inputs, plan, probes))

        differentiate = jax.value_and_grad(watched, (0, 1), has_aux)
        result, (gradients, probes) = differentiate(slots, _probes(plan))
        if isinstance(argnums, int):
            gradients = gradients[0]
        return (result, gradients), _named(found, jax.tree.leaves(probes))

    return observed


def _origins(
    args: Sequence[PyTree], kwargs: PyTree, chosen: Sequence[int]
) -> list[_Origin]:
    """Return the origin of each array among the arguments.

    All arrays of a stored weight have one path.
    """
    found: list[_Origin] = []
    for i, tree in enumerate([*args, kwargs]):
        kind = int(i not in chosen)
        for path, leaf in paths.leaves(tree, is_quantized).items():
            # A leaf that is an argument itself has no path.
            origin = frozenset({(kind, path or f"argument {i}")})
            found += [origin] * len(arrays_in(leaf))
    return found


def _find(
    body: Body, origins: list[_Origin], axes: tuple[int, ...]
) -> tuple[list[_Origin], _Plan]:
    """Return the origins of a program's outputs, and its products.

    `axes` are the lengths of the loops around it.
    """
    jaxpr, consts = body
    plan: _Plan = {}

    def rule(number: int, eqn: Equation, inputs: list[_Origin]) -> list[_Origin]:
        outputs, step = _look(eqn, inputs, axes)
        if step:
            plan[number] = step
        if eqn.primitive.name == "name" and eqn.params["name"] == ACTIVATION_NAME:
            raise NotImplementedError(
                "the function differentiates a low-precision product itself, by"
                " jax.grad, jax.vjp or jax.jvp inside of it; of such a product only its"
                " derivative is left in the program, which cannot be read. Observe the"
                " function that is differentiated"
            )
        return outputs

    nothing: _Origin = frozenset()
    inputs = [nothing] * len(consts) + origins
    outputs = programs.eval_jaxpr(jaxpr, inputs, rule, literal=lambda _: nothing)
    return outputs, plan


def _look(
    eqn: Equation, inputs: list[_Origin], axes: tuple[int, ...]
) -> tuple[list[_Origin], _Step | None]:
    """Return the origins of an equation's outputs, and the products inside of it."""
    name = eqn.primitive.name
    whole: _Origin = frozenset().union(*inputs)
    site = None
    if name in programs.CUSTOM:
        site = site_of(eqn.params["call_jaxpr"])
    if site is not None:
        axes = (*axes, *_vmapped(eqn, site))
        found = _Found(site, _path_of(site, inputs), axes)
        return [whole] * len(eqn.outvars), found
    if name in programs.CALLS and not eqn.params.get("differentiated"):
        return _find(programs.bodies_of(eqn)[0], inputs, axes)
    if name == "scan":
        return _look_into_scan(eqn, inputs, axes)
    if name == "cond":
        return _look_into_branches(eqn, inputs, axes)
    unread: list[_Found] = []
    for body in programs.bodies_of(eqn):
        count = len(body[0].invars)
        given = inputs if len(inputs) == count else [whole] * count
        _, plan = _find(body, given, axes)
        unread += [found for found, _ in _products_of(plan)]
    outputs = [whole] * len(eqn.outvars)
    if not unread:
        return outputs, None
    inside = _BODIES.get(name.removesuffix("_jaxpr"), name)
    return outputs, _Unread(inside, tuple(unread))


def _look_into_branches(
    eqn: Equation, inputs: list[_Origin], axes: tuple[int, ...]
) -> tuple[list[_Origin], _Plan]:
    chosen, *operands = inputs
    outputs = [chosen] * len(eqn.outvars)
    plans: _Plan = {}
    for number, branch in enumerate(eqn.params["branches"]):
        of_branch, plan = _find(opened(branch), operands, axes)
        outputs = [a | b for a, b in zip(outputs, of_branch, strict=True)]
        if plan:
            plans[number] = plan
    return outputs, plans


def _look_into_scan(
    eqn: Equation, inputs: list[_Origin], axes: tuple[int, ...]
) -> tuple[list[_Origin], _Plan]:
    loop = Scan.of(eqn)
    consts, carry, arrays = loop.groups(inputs)
    while True:  # a carry may have more origins in the second round; origins only grow
        given = [*consts, *carry, *arrays]
        outputs, plan = _find(loop.body, given, (*axes, eqn.params["length"]))
        grown = [a | b for a, b in zip(carry, outputs, strict=False)]
        if grown == carry:
            return outputs, plan
        carry = grown


def _path_of(site: Site, inputs: list[_Origin]) -> str:
    """Return the paths of the parameters that a weight was computed from.

    Without a parameter, return those of other arguments.
    """
    _, w, quantized, *_ = site.structure.unflatten(inputs)
    whole: _Origin = frozenset().union(*jax.tree.leaves((w, quantized)))
    kind = min((kind for kind, _ in whole), default=1)
    return " + ".join(sorted(path for k, path in whole if k == kind)) or "(constant)"


def _vmapped(eqn: Equation, site: Site) -> tuple[int, ...]:
    """Return the axes that `jax.vmap` added in front of the operands of a product."""
    shapes = [var.aval.shape for var in eqn.invars]
    leading = set()
    fits = True
    for shape, own in zip(shapes, site.shapes, strict=True):
        extra = len(shape) - len(own)
        fits &= shape[extra:] == own
        if extra:
            leading.add(shape[:extra])
    if not fits or len(leading) > 1:
        raise NotImplementedError(
            f"a product of {[list(own) for own in site.shapes[:2]]} is computed under"
            f" jax.vmap as {[list(shape) for shape in shapes[:2]]}, and only axes in"
            " front of all operands can be read; give jax.vmap in_axes of 0 and None"
        )
    return next(iter(leading), ())


def _check_read(name: str, plan: _Plan) -> None:
    """Raise a ValueError unless a product of a plan can be read."""
    found = list(_products_of(plan))
    if not found:
        raise ValueError(
            f"{name} computes no low-precision product; observe the loss of a model"
            " with layers of tcfp_jax or converted by it"
        )
    if all(inside for _, inside in found):
        places = sorted({inside for _, inside in found})
        raise ValueError(
            f"{name} computes {len(found)} low-precision product(s), none of which can"
            f" be read: they are inside of {' and '.join(places)}, where no probe"
            " can be. Products are read in plain code and inside of jax.jit, scan,"
            " cond, checkpoint and vmap; observe a function that computes its layers"
            " there"
        )


def _products_of(plan: _Step) -> Iterator[tuple[_Found, str]]:
    """Yield each product, and the body that hides it or "".

    The order is that of `jax.tree.leaves` of the plan's probes.
    """
    if isinstance(plan, _Found):
        yield plan, ""
    elif isinstance(plan, _Unread):
        yield from ((found, plan.inside) for found in plan.found)
    else:
        for number in sorted(plan):
            yield from _products_of(plan[number])


def _probes(plan: _Step) -> PyTree:
    if isinstance(plan, _Found):
        rows = len(operands(plan.site.recipe))
        return jnp.zeros((*plan.axes, rows, _FIELDS), jnp.float32)
    if isinstance(plan, _Unread):
        return [_probes(found) for found in plan.found]
    return {number: _probes(step) for number, step in plan.items()}


def _named(found: Sequence[_Found], probes: Sequence[Array]) -> Readings:
    """Return readings by path, from the gradients of the probes."""
    readings: Readings = {}
    for product, probe in zip(found, probes, strict=True):
        ran = probe[..., -1:] > 0
        fields = jnp.moveaxis(jnp.where(ran, probe[..., :-1], jnp.nan), -1, 0)
        path = product.path
        again = 2
        while path in readings:
            path = f"{product.path}#{again}"
            again += 1
        rows = operands(product.site.recipe)
        present = [name for name in OPERANDS if name in rows]
        readings[path] = {
            name: Reading(*fields[..., rows.index(name)]) for name in present
        }
    return readings


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _watched(
    site: Site,
    outputs: tuple[Array, ...],
    probe: Array,
    forward: Array,
    words: Array | None,
) -> tuple[Array, ...]:
    """Return the outputs of a product.

    The gradient of the probe is the readings of its operands.
    """
    return outputs


def _watched_forward(
    site: Site, outputs: tuple[Array, ...], probe: Array, *saved: Any
) -> tuple[tuple[Array, ...], _Saved]:
    return outputs, saved


def _watched_backward(
    site: Site,
    saved: _Saved,
    gradients: tuple[Array, ...],
) -> tuple[tuple[Array, ...], Array, Array, None]:
    forward, words = saved

    def of_one(g: Array, words: Array | None) -> Array:
        return _rows(read_gradients(site.recipe, g, words))

    of_words = 0 if words is not None and words.ndim > 1 else None
    for _ in range(forward.ndim - 2):
        of_one = jax.vmap(of_one, in_axes=(0, of_words))
    readings = jnp.concatenate([forward, of_one(gradients[0], words)], axis=-2)
    return gradients, readings, jnp.zeros_like(forward), None


_watched.defvjp(_watched_forward, _watched_backward)


def _rows(readings: Sequence[Reading]) -> Array:
    rows = [jnp.stack([*one, jnp.ones_like(one.amax)]) for one in readings]
    return jnp.stack(rows)


def _run(
    body: Body, inputs: Sequence[Array], plan: _Plan, probes: PyTree
) -> list[Array]:
    """Return the outputs of a program with a probe at each product of its plan."""
    jaxpr, consts = body

    def rule(number: int, eqn: Equation, given: list[Array]) -> Sequence[Array]:
        if number not in plan:
            return programs.bind(eqn, given)
        return _evaluate(eqn, given, plan[number], probes[number])

    return programs.eval_jaxpr(jaxpr, [*consts, *inputs], rule)


def _evaluate(
    eqn: Equation, inputs: list[Array], step: _Step, probes: PyTree
) -> Sequence[Array]:
    """Return the outputs of an equation that is a product, or that holds some."""
    name = eqn.primitive.name
    params = eqn.params
    if isinstance(step, _Found):
        return _product(eqn, inputs, step.site, probes)
    if isinstance(step, _Unread):
        return programs.bind(eqn, inputs)
    if name == "scan":
        return _scan(eqn, inputs, step, probes)
    if name == "cond":
        return _switch(eqn, inputs, step, probes)

    def run(inputs: list[Array], probes: PyTree) -> list[Array]:
        return _run(programs.bodies_of(eqn)[0], inputs, step, probes)

    if name in programs.CHECKPOINTS:
        remat = {name: params[name] for name in ("prevent_cse", "policy")}
        return jax.checkpoint(run, **remat)(inputs, probes)
    shardings = [*params.get("in_shardings", ()), *params.get("out_shardings", ())]
    if not any(isinstance(sharding, Sharding) for sharding in shardings):
        return run(inputs, probes)
    placed = list(map(programs.placed, inputs, params["in_shardings"]))
    return list(map(programs.placed, run(placed, probes), params["out_shardings"]))


def _switch(
    eqn: Equation, inputs: list[Array], plan: _Plan, probes: PyTree
) -> Sequence[Array]:
    branches = []
    for number, branch in enumerate(eqn.params["branches"]):
        own: Any = plan.get(number, {})
        branches.append(functools.partial(_branch, opened(branch), own, number))
    return lax.switch(inputs[0], branches, inputs[1:], probes)


def _branch(
    body: Body, plan: _Plan, number: int, inputs: list[Array], probes: PyTree
) -> list[Array]:
    return _run(body, inputs, plan, probes.get(number, {}))


def _scan(
    eqn: Equation, inputs: list[Array], plan: _Plan, probes: PyTree
) -> list[Array]:
    loop = Scan.of(eqn)
    consts, carry, arrays = loop.groups(inputs)

    def one(carry: list[Array], items: PyTree) -> tuple[list[Array], list[Array]]:
        own, own_probes = items
        outputs = _run(loop.body, [*consts, *carry, *own], plan, own_probes)
        return outputs[: loop.carried], outputs[loop.carried :]

    last, ys = lax.scan(one, carry, (arrays, probes), **loop.options)
    return [*last, *ys]


def _product(
    eqn: Equation, inputs: list[Array], site: Site, probe: Array
) -> Sequence[Array]:
    """Return the outputs of a product, and send its readings to the probe."""
    leaves = [lax.stop_gradient(leaf) for leaf in inputs]

    def of_one(*leaves: Array) -> Array:
        return _rows(read_product(site.recipe, *site.structure.unflatten(leaves)))

    in_axes: list[int | None] = [None] * len(leaves)
    for i, own in enumerate(site.shapes):
        if leaves[i].ndim > len(own):
            in_axes[i] = 0
    for _ in range(probe.ndim - 2):
        of_one = jax.vmap(of_one, in_axes=in_axes)
    with jax.named_scope("monitor"):
        forward = of_one(*leaves)
        *_, words = site.structure.unflatten(leaves)
        return _watched(site, tuple(programs.bind(eqn, inputs)), probe, forward, words)
