"""Products of parameters in a traced program: dot products and convolutions of a parameter and an activation.

Every variable of the jaxpr carries the parameters that it was computed from and whether an input took part. A product
is a parameter product if one operand comes from parameters alone and the other one from an input. What leaves the
quantizer of `tcfp_jax.matmul` (`checkpoint_name` "tcfp_weight") no longer counts as a parameter: its product is ours.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend import core

from tcfp_jax.products.layer import WEIGHT_NAME

SCOPE = "tcfp_layer"  # a `jax.named_scope` with this prefix says that an adapter saw what is inside
_PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general")


@dataclass(frozen=True)
class Origin:
    """Where a value comes from: paths of parameters, and whether an input took part."""

    parameters: frozenset[str] = frozenset()
    from_input: bool = False

    def __or__(self, other: "Origin") -> "Origin":
        return Origin(self.parameters | other.parameters, self.from_input or other.from_input)

    @property
    def is_weight(self) -> bool:
        """From parameters alone."""
        return bool(self.parameters) and not self.from_input


@dataclass(frozen=True)
class Product:
    """A product of a parameter.

    Attributes:
      parameters: paths of the parameters that its kernel was computed from.
      shapes: of both operands.
      primitive: "dot_general" or a convolution.
      seen: an adapter ran around it.
    """

    parameters: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    primitive: str
    seen: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        """One line."""
        return f"{self.primitive} of {' and '.join(map(str, map(list, self.shapes)))} with {', '.join(self.parameters)}"


def parameter_products(jaxpr: Any, origins: Sequence[Origin]) -> list[Product]:
    """The parameter products of a closed jaxpr whose inputs have these origins, each body once.

    >>> import jax, jax.numpy as jnp
    >>> jaxpr = jax.make_jaxpr(lambda w, x: x @ w.T)(jnp.ones((3, 2)), jnp.ones((4, 2)))
    >>> [str(p) for p in parameter_products(jaxpr, [Origin(frozenset({"w"})), Origin(from_input=True)])]
    ['dot_general of [4, 2] and [2, 3] with w']
    """
    walk = _Walk()
    walk.jaxpr(jaxpr.jaxpr, list(origins), seen=False)
    return list(walk.products.values())


def arrays_of(tree: Any) -> tuple[list[Any], Any]:
    """(arrays of a tree, a function that puts arrays back): what is not an array stays a Python value when traced."""
    treedef: Any
    leaves, treedef = jax.tree.flatten(tree)
    is_array = [hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves]

    def rebuild(arrays: list[Any]) -> Any:
        rest = iter(arrays)
        return treedef.unflatten([next(rest) if array else leaf for array, leaf in zip(is_array, leaves, strict=True)])

    return [leaf for array, leaf in zip(is_array, leaves, strict=True) if array], rebuild


class _Walk:
    def __init__(self) -> None:
        self.products: dict[Any, Product] = {}

    def jaxpr(self, jaxpr: Any, origins: list[Origin], *, seen: bool, path: tuple[int, ...] = ()) -> list[Origin]:
        known: dict[Any, Origin] = dict(zip(jaxpr.invars, origins, strict=True))
        read = lambda var: Origin() if isinstance(var, core.Literal) else known.get(var, Origin())
        for number, eqn in enumerate(jaxpr.eqns):
            inside = seen or SCOPE in str(eqn.source_info.name_stack)
            inputs = [read(var) for var in eqn.invars]
            outputs = self._equation(eqn, inputs, inside, (*path, number))
            known.update(zip(eqn.outvars, outputs, strict=True))
        return [read(var) for var in jaxpr.outvars]

    def _equation(self, eqn: Any, inputs: list[Origin], seen: bool, path: tuple[int, ...]) -> list[Origin]:
        name = eqn.primitive.name
        joined = _union(inputs)
        if name == "name" and eqn.params["name"] == WEIGHT_NAME:  # `name` is the primitive of checkpoint_name
            return [Origin(frozenset(), joined.from_input)]
        if name in _PRODUCTS:
            weights = [origin for origin in inputs[:2] if origin.is_weight]
            if len(weights) == 1 and any(origin.from_input for origin in inputs[:2]):
                shapes = tuple(var.aval.shape for var in eqn.invars[:2])
                # By place: a loop's body is walked until its origins stand still, and later passes know more.
                self.products[path] = Product(tuple(sorted(weights[0].parameters)), shapes, name, seen)
            return [joined] * len(eqn.outvars)
        go = lambda body, origins, step: self.jaxpr(_open(body), origins, seen=seen, path=(*path, step))
        if name == "while":
            return self._while(eqn, inputs, go)
        if name == "scan":
            return self._scan(eqn, inputs, go)
        if name == "cond":
            branches = [go(body, inputs[1:], i) for i, body in enumerate(eqn.params["branches"])]
            return [_union(origins) | inputs[0] for origins in zip(*branches, strict=True)]
        # Every other primitive with one inner program (jit, remat, custom_vjp, ...) passes its operands on in order.
        # What does not fit that mixes its inputs, as far as this walk can tell: every output has every origin.
        bodies = [value for value in eqn.params.values() if hasattr(_open(value), "eqns")]
        if len(bodies) == 1 and len(_open(bodies[0]).invars) == len(inputs):
            outputs = go(bodies[0], inputs, 0)
            if len(outputs) == len(eqn.outvars):
                return outputs
        return [joined] * len(eqn.outvars)

    # What a loop carries may come from more parameters in its second round than in its first. Origins only grow, and
    # there are finitely many, so walking the body until nothing changes ends.
    def _scan(self, eqn: Any, inputs: list[Origin], go: Any) -> list[Origin]:
        consts, carries = _scan_counts(eqn.params)
        while True:
            outputs = go(eqn.params["jaxpr"], inputs, 0)
            carry = inputs[consts : consts + carries]
            joined = [a | b for a, b in zip(carry, outputs[:carries], strict=True)]
            if joined == carry:
                return outputs
            inputs = [*inputs[:consts], *joined, *inputs[consts + carries :]]

    def _while(self, eqn: Any, inputs: list[Origin], go: Any) -> list[Origin]:
        first, second = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        consts, carry = inputs[first : first + second], inputs[first + second :]
        while True:
            outputs = go(eqn.params["body_jaxpr"], [*consts, *carry], 0)
            joined = [a | b for a, b in zip(carry, outputs, strict=True)]
            if joined == carry:
                return outputs
            carry = joined


def _scan_counts(params: Any) -> tuple[int, int]:
    """How many constants and carried values a scan has; jax 0.11 keeps flat trees of them instead of numbers."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))


def _open(body: Any) -> Any:
    return getattr(body, "jaxpr", body)  # a ClosedJaxpr holds the jaxpr


def _union(origins: Sequence[Origin]) -> Origin:
    joined = Origin()
    for origin in origins:
        joined = joined | origin
    return joined
