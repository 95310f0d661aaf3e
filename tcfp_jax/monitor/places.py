"""Places of low-precision products in a program: a plan of the equations that hold them.

Products are found by their annotations (`products.annotations`), through jit, scan, cond, checkpoint and vmap. The plan
also lists products that no probe can reach: those in a while loop, `jax.shard_map` or another custom derivative.
"""

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import jax

from tcfp_jax.conversion.trace import CALLS, Body, bodies_of, body_of, eval_jaxpr, opened, scan_counts
from tcfp_jax.conversion.views import Equation
from tcfp_jax.monitor.readings import forward_operands, gradient_operands
from tcfp_jax.products.annotations import ACTIVATION_NAME, Site, site_of
from tcfp_jax.products.fp4_training import OperandName

# The arguments that a value was computed from: pairs of a kind (0 for parameters, 1 for others) and a path.
Origin = frozenset[tuple[int, str]]


class Found(NamedTuple):
    """A product in a program: the path of its weight, and the leading axes of its probe."""

    site: Site
    path: str
    axes: tuple[int, ...]

    @property
    def operands(self) -> tuple[OperandName, ...]:
        """Operands of the rows of its probe."""
        return *forward_operands(self.site.recipe), *gradient_operands(self.site.recipe)


class Unread(NamedTuple):
    """Products in the body of an equation that no probe can reach; their probes stay zero."""

    inside: str
    found: tuple[Found, ...]


# The functions that users call, by the primitive that they become.
_BODIES = {
    "while": "jax.lax.while_loop", "shard_map": "jax.shard_map", "custom_vjp_call": "jax.custom_vjp",
    "custom_jvp_call": "jax.custom_jvp",
}  # fmt: skip
# By the number of an equation: its product, its unreachable products, or the plan of its body or of its branches.
Plan: TypeAlias = dict[int, "Step"]
Step: TypeAlias = Found | Unread | Plan


def find(body: Body, origins: list[Origin], axes: tuple[int, ...]) -> tuple[list[Origin], Plan]:
    """Return the origins of a program's outputs, and the products in it and in its bodies.

    Args:
      body: the program and its constants.
      origins: origins of its inputs.
      axes: lengths of the loops around it.
    """
    jaxpr, consts = body
    plan: Plan = {}

    def rule(number: int, eqn: Equation, inputs: list[Origin]) -> list[Origin]:
        outputs, step = _look(eqn, inputs, axes)
        if step:
            plan[number] = step
        if eqn.primitive.name == "name" and eqn.params["name"] == ACTIVATION_NAME:
            raise NotImplementedError(
                "the function differentiates a low-precision product itself, by jax.grad, jax.vjp or jax.jvp inside of "
                "it; of such a product only its derivative is left in the program, which cannot be read. Observe the "
                "function that is differentiated"
            )
        return outputs

    nothing: Origin = frozenset()
    return eval_jaxpr(jaxpr, [*(nothing for _ in consts), *origins], rule, literal=lambda _: nothing), plan


def _look(eqn: Equation, inputs: list[Origin], axes: tuple[int, ...]) -> tuple[list[Origin], Step | None]:
    name, params = eqn.primitive.name, eqn.params
    if name.startswith("custom_vjp_call") and (site := site_of(params["call_jaxpr"])) is not None:
        found = Found(site, _path_of(site, inputs), (*axes, *_vmapped(eqn, site)))
        return [frozenset().union(*inputs)] * len(eqn.outvars), found
    if name in CALLS and not params.get("differentiated"):
        return find(body_of(eqn), inputs, axes)
    if name == "scan":
        return _look_into_scan(eqn, inputs, axes)
    if name == "cond":
        looked = [find(opened(closed), inputs[1:], axes) for closed in params["branches"]]
        plans: Plan = {number: plan for number, (_, plan) in enumerate(looked) if plan}
        return [inputs[0].union(*origins) for origins in zip(*(outputs for outputs, _ in looked), strict=True)], plans
    whole: Origin = frozenset().union(*inputs)
    unread: list[Found] = []
    for body in bodies_of(eqn):
        count = len(body[0].invars)
        _, plan = find(body, inputs if len(inputs) == count else [whole] * count, axes)
        unread += products_of(plan)
    inside = _BODIES.get(name.removesuffix("_jaxpr"), name)
    return [whole] * len(eqn.outvars), Unread(inside, tuple(unread)) if unread else None


def _look_into_scan(eqn: Equation, inputs: list[Origin], axes: tuple[int, ...]) -> tuple[list[Origin], Plan]:
    body, (first, count) = opened(eqn.params["jaxpr"]), scan_counts(eqn.params)
    carry = inputs[first : first + count]
    while True:  # a carry may have more origins in the second round; origins only grow
        given = [*inputs[:first], *carry, *inputs[first + count :]]
        outputs, plan = find(body, given, (*axes, eqn.params["length"]))
        grown = [a | b for a, b in zip(carry, outputs[:count], strict=True)]
        if grown == carry:
            return outputs, plan
        carry = grown


def _path_of(site: Site, inputs: list[Origin]) -> str:
    """Return the paths of the parameters that a weight was computed from, otherwise those of other arguments."""
    _, w, quantized, *_ = site.structure.unflatten(inputs)
    whole: Origin = frozenset().union(*jax.tree.leaves((w, quantized)))
    kind = min((kind for kind, _ in whole), default=1)
    return " + ".join(sorted(path for k, path in whole if k == kind)) or "(constant)"


def _vmapped(eqn: Equation, site: Site) -> tuple[int, ...]:
    """Return the axes that `jax.vmap` added in front of the operands of a product."""
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


def check_read(name: str, plan: Plan) -> None:
    """Raise unless a product of a plan can be read.

    Raises:
      ValueError: there is none.
    """
    count = len(list(products_of(plan)))
    if not count:
        raise ValueError(
            f"{name} computes no low-precision product; observe the loss of a model with layers of tcfp_jax or "
            "converted by it"
        )
    unread = list(_unread_of(plan))
    if count == sum(len(step.found) for step in unread):
        raise ValueError(
            f"{name} computes {count} low-precision product(s), none of which can be read: they are inside of "
            f"{' and '.join(sorted({step.inside for step in unread}))}, where no probe can be. Products are read in "
            "plain code and inside of jax.jit, scan, cond, checkpoint and vmap; observe a function that computes its "
            "layers there"
        )


def products_of(plan: Step) -> Iterator[Found]:
    """Yield the products of a plan, in the order of `jax.tree.leaves` of its probes."""
    if isinstance(plan, Found):
        yield plan
    elif isinstance(plan, Unread):
        yield from plan.found
    else:
        for number in sorted(plan):
            yield from products_of(plan[number])


def _unread_of(plan: Step) -> Iterator[Unread]:
    """Yield the parts of a plan that cannot be read."""
    if isinstance(plan, Unread):
        yield plan
    elif not isinstance(plan, Found):
        for step in plan.values():
            yield from _unread_of(step)
