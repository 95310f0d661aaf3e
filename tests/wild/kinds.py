"""How each parameter of a program can be kept, counted by flows through its equations.

It is an independent check of the lines that a report has for parameters, and uses no
code of the library. A program (a jaxpr) is walked once for each call. Every value knows
the parameters behind it, whether an input took part, and the one parameter that it
shows, if it is a view. A product whose weight is a view can read a stored form; any
other equation that reads a view needs floats.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from tests.wild.counting import scan_counts

PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general")
KEEPS = (
    "convert_element_type",
    "copy",
    "copy_p",
    "stop_gradient",
    "sharding_constraint",
    "name",
    "reduce_precision",
)
SPREADS = ("broadcast_in_dim", "reshape", "convert_element_type", "squeeze")
CALLS = ("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2")
Kind = str  # "stored", "converted only" or "float"


@dataclass(frozen=True)
class Flow:
    """The origin of a value.

    Attributes:
      parameters: Paths of the parameters that it was computed from; none for an
        activation.
      of_input: If an input took part.
      view: Path of the one parameter that it shows, or paths of joined ones.
      part: If only a part of that parameter is shown.
      linear: If the view was multiplied by one number, or joined with others.
      whole_axes: For each axis, if it is one whole axis of that parameter.
      multiplied: If a product of parameters took part.
      single: If all entries are one number.
      products: Products without an input that it was computed from.
    """

    parameters: frozenset[str] = frozenset()
    of_input: bool = False
    view: frozenset[str] = frozenset()
    part: bool = False
    linear: bool = False
    whole_axes: tuple[bool, ...] = ()
    multiplied: bool = False
    single: bool = False
    products: frozenset[tuple[int, ...]] = frozenset()

    @property
    def is_weight(self) -> bool:
        """If it was computed from parameters, and from no input."""
        return bool(self.parameters) and not self.of_input

    def hidden(self) -> "Flow":
        """The same value where nobody can tell that it is a view."""
        return Flow(
            self.parameters,
            self.of_input,
            multiplied=self.multiplied,
            single=self.single,
            products=self.products,
        )


Flows = list[Flow]


@dataclass
class Walk:
    """What one walk finds.

    Attributes:
      activations: Products without an input that count as products of an activation.
      fed: Parameters of all products.
      converted: Parameters of products that are converted.
      served: Parameters that a product reads as a whole.
      read: Parameters whose floats an equation reads.
      constant: Products of a parameter and a constant.
      mixed: Products whose results are mixed with an input.
    """

    activations: frozenset[tuple[int, ...]] = frozenset()
    fed: set[str] = field(default_factory=set)
    converted: set[str] = field(default_factory=set)
    served: set[str] = field(default_factory=set)
    read: set[str] = field(default_factory=set)
    constant: set[tuple[int, ...]] = field(default_factory=set)
    mixed: set[tuple[int, ...]] = field(default_factory=set)

    def body(
        self, jaxpr: Any, given: Flows, place: tuple[int, ...], own: bool
    ) -> Flows:
        """Walk a body; `own` says that it has a derivative of its own."""
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        known: dict[Any, Flow] = dict.fromkeys(jaxpr.constvars, Flow())
        known |= dict(zip(jaxpr.invars, given, strict=True))

        def flow_of(variable: Any) -> Flow:
            is_literal = hasattr(variable, "val")
            return Flow(single=True) if is_literal else known[variable]

        for number, equation in enumerate(jaxpr.eqns):
            inputs = list(map(flow_of, equation.invars))
            outputs = self.equation(equation, inputs, (*place, number), own)
            known |= dict(zip(equation.outvars, outputs, strict=True))
        return list(map(flow_of, jaxpr.outvars))

    def equation(
        self, equation: Any, inputs: Flows, place: tuple[int, ...], own: bool
    ) -> Flows:
        """Return the flows of an equation's results."""
        name = equation.primitive.name
        if name in PRODUCTS:
            return [self.product(equation, inputs, place, own)]
        if name in CALLS:
            return self.enter(_bodies(equation)[0], inputs, place, own)
        if name == "scan":
            return self.scan(equation, inputs, place, own)
        if name == "while":
            return self.while_loop(equation, inputs, place, own)
        if name == "cond":
            return self.cond(equation, inputs, place, own)
        bodies = _bodies(equation)
        if bodies:  # a derivative of its own
            self.needs_floats(inputs)
            outputs = self.enter(bodies[0], inputs, place, True)
            return [flow.hidden() for flow in outputs]
        moved = _moved(equation, inputs)
        if moved is not None:
            return [moved] * len(equation.outvars)
        return [self.ordinary(equation, inputs)] * len(equation.outvars)

    def needs_floats(self, inputs: Flows) -> None:
        """Note that an equation reads the parameters behind its operands."""
        for flow in inputs:
            self.read |= flow.parameters

    def ordinary(self, equation: Any, inputs: Flows) -> Flow:
        """Return the flow of a result that is no view."""
        self.needs_floats(inputs)
        joined = _joined(inputs)
        if joined.of_input:
            for flow in inputs:
                if flow.is_weight and not flow.single:
                    self.mixed |= flow.products
            return Flow(of_input=True)
        size = equation.outvars[0].aval.size
        spread = equation.primitive.name in SPREADS and inputs[0].single
        sizes = [variable.aval.size for variable in equation.invars]
        # W / norm of a product: W itself is none
        plain = [
            flow.is_weight and not flow.multiplied and own_size == size
            for flow, own_size in zip(inputs, sizes, strict=True)
        ]
        multiplied = joined.multiplied and not any(plain)
        return replace(joined, single=size == 1 or spread, multiplied=multiplied)

    def product(
        self, equation: Any, inputs: Flows, place: tuple[int, ...], own: bool
    ) -> Flow:
        """Note a product of a weight, and return the flow of its result."""
        if place in self.activations:
            inputs = [
                flow if flow.parameters else replace(flow, of_input=True)
                for flow in inputs
            ]
        joined = _joined(inputs)
        weights = [flow for flow in inputs[:2] if flow.is_weight]
        if joined.of_input:
            for weight in weights:
                self.weight(equation, weight, own)
            return Flow(of_input=True)
        if not weights:
            return joined
        self.fed |= joined.parameters
        self.needs_floats(inputs)
        if len(weights) == 1:
            self.constant.add(place)
        products = joined.products | {place}
        return replace(joined, multiplied=True, products=products)

    def weight(self, equation: Any, weight: Flow, own: bool) -> None:
        """Note a product of a weight and an activation."""
        is_matrix_product = True
        if equation.primitive.name == "dot_general":
            is_matrix_product = bool(equation.params["dimension_numbers"][0][0])
        is_convolution = equation.primitive.name == "conv_general_dilated"
        self.fed |= weight.parameters
        if own or is_convolution or weight.multiplied or not is_matrix_product:
            self.read |= weight.parameters
            return
        self.converted |= weight.parameters
        if weight.view and not weight.part:
            self.served |= weight.view

    def enter(
        self, jaxpr: Any, inputs: Flows, place: tuple[int, ...], own: bool
    ) -> Flows:
        """Walk the body of a call, which gets and returns arrays."""
        given = []
        for flow in inputs:
            if flow.linear:
                self.needs_floats([flow])
                flow = flow.hidden()
            given.append(flow)
        return self.body(jaxpr, given, place, own)

    def settled(
        self, one_round: Callable[["Walk", Flows], Flows], carry: Flows
    ) -> Flows:
        """Return the carry of a loop when one more round adds nothing to it."""
        while True:
            after = one_round(Walk(self.activations), carry)
            grown = [
                flow if flow == other else _joined([flow, other]).hidden()
                for flow, other in zip(carry, after, strict=True)
            ]
            grown = [Flow(of_input=True) if flow.of_input else flow for flow in grown]
            if grown == carry:
                return carry
            carry = grown

    def scan(
        self, equation: Any, inputs: Flows, place: tuple[int, ...], own: bool
    ) -> Flows:
        jaxpr = equation.params["jaxpr"]
        consts, carried = scan_counts(equation)
        first = consts + carried
        entries = list(map(_entry, inputs[first:]))

        def run(walk: Walk, carry: Flows) -> Flows:
            return walk.enter(jaxpr, [*inputs[:consts], *carry, *entries], place, own)

        def one_round(walk: Walk, carry: Flows) -> Flows:
            return run(walk, carry)[:carried]

        carry = self.settled(one_round, inputs[consts:first])
        outputs = run(self, carry)[carried:]
        return [*carry, *(flow.hidden() for flow in outputs)]

    def while_loop(
        self, equation: Any, inputs: Flows, place: tuple[int, ...], own: bool
    ) -> Flows:
        params = equation.params
        first = params["cond_nconsts"]
        consts = first + params["body_nconsts"]

        def one_round(walk: Walk, carry: Flows) -> Flows:
            tested = [*inputs[:first], *carry]
            walk.enter(params["cond_jaxpr"], tested, (*place, 0), own)
            given = [*inputs[first:consts], *carry]
            return walk.enter(params["body_jaxpr"], given, (*place, 1), own)

        carry = self.settled(one_round, [flow.hidden() for flow in inputs[consts:]])
        one_round(self, carry)
        return carry

    def cond(
        self, equation: Any, inputs: Flows, place: tuple[int, ...], own: bool
    ) -> Flows:
        outputs = []
        for number, branch in enumerate(equation.params["branches"]):
            outputs.append(self.enter(branch, inputs[1:], (*place, number), own))
        return [
            _joined([*flows, inputs[0]]).hidden()
            for flows in zip(*outputs, strict=True)
        ]


def kinds(fn: Callable[..., Any], params: Any, *inputs: Any) -> dict[str, Kind]:
    """Return how each parameter that feeds a product of `fn(params, *inputs)` is kept.

    Arrays that `fn` closes over are constants.
    """
    leaves, structure = jax.tree.flatten((params, *inputs))
    places = [place for place, leaf in enumerate(leaves) if hasattr(leaf, "shape")]

    def flat(*arrays: Any) -> Any:
        filled = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            filled[place] = array
        return fn(*jax.tree.unflatten(structure, filled))

    closed = jax.make_jaxpr(flat)(*(leaves[place] for place in places))
    given = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        own = frozenset([name.removesuffix("/value")])
        given.append(Flow(own, view=own, whole_axes=(True,) * leaf.ndim))
    given += [Flow(of_input=True)] * (len(places) - len(given))
    walk = _walked(closed.jaxpr, given, frozenset())
    activations = frozenset(walk.constant & walk.mixed)
    if activations:
        walk = _walked(closed.jaxpr, given, activations)
    found = {}
    for path in walk.fed:
        found[path] = "float"
        if path in walk.converted:
            found[path] = "converted only"
        if path in walk.served - walk.read:
            found[path] = "stored"
    return found


def differences(report: Any, counted: dict[str, Kind]) -> dict[str, Any]:
    """Return the parameters that a report and the count judge in different ways."""
    found = {line.path: line.kind for line in report.parameters}
    return {
        path: (found.get(path), counted.get(path))
        for path in sorted({*found, *counted})
        if found.get(path) != counted.get(path)
    }


def _walked(jaxpr: Any, given: Flows, activations: frozenset[tuple[int, ...]]) -> Walk:
    walk = Walk(activations)
    outputs = walk.body(jaxpr, given, (), False)
    walk.needs_floats([flow for flow in outputs if flow.linear])
    return walk


def _joined(flows: Sequence[Flow]) -> Flow:
    """Return the flow of a value that was computed from all of these."""
    weights = [flow for flow in flows if flow.is_weight]
    return Flow(
        frozenset().union(*(flow.parameters for flow in flows)),
        any(flow.of_input for flow in flows),
        multiplied=any(flow.multiplied for flow in weights),
        products=frozenset().union(*(flow.products for flow in flows)),
    )


def _moved(equation: Any, inputs: Flows) -> Flow | None:
    """Return the flow of a result that is a view of its first operand, or None."""
    if not inputs or not any(flow.view for flow in inputs):
        return None
    name = equation.primitive.name
    if name in ("mul", "div"):
        for side in (0, 1) if name == "mul" else (0,):
            other = inputs[1 - side]
            if inputs[side].view and other.single and not other.of_input:
                return replace(inputs[side], linear=True)
        return None
    view = inputs[0]
    if name == "concatenate" and all(flow.view for flow in inputs):
        joined = _joined(inputs)
        part = any(flow.part for flow in inputs)
        axes = (False,) * len(view.whole_axes)
        return replace(
            joined, view=joined.parameters, part=part, linear=True, whole_axes=axes
        )
    if not view.view:
        return None
    if name == "neg":
        return replace(view, linear=True)
    if name in KEEPS:
        return view
    old = equation.invars[0].aval.shape
    new = equation.outvars[0].aval.shape
    axes = view.whole_axes
    params = equation.params
    if name == "transpose":
        return replace(view, whole_axes=tuple(axes[i] for i in params["permutation"]))
    if name == "squeeze":
        kept = [whole for i, whole in enumerate(axes) if i not in params["dimensions"]]
        return replace(view, whole_axes=tuple(kept))
    if name == "broadcast_in_dim":
        spread = [False] * len(new)
        for axis, place in enumerate(params["broadcast_dimensions"]):
            spread[place] = axes[axis]
        return replace(view, whole_axes=tuple(spread))
    if name == "reshape":
        return replace(view, whole_axes=(False,) * len(new))
    if name in ("slice", "dynamic_slice", "split"):
        cut = [axis for axis in range(len(old)) if old[axis] != new[axis]]
        entries = all(new[axis] == 1 and axes[axis] for axis in cut)
        return replace(view, part=view.part or not entries)
    return None


def _entry(flow: Flow) -> Flow:
    """Return the flow of one entry of an array that a scan runs over."""
    if not flow.view:
        return flow
    part = flow.part or not flow.whole_axes[0]
    return replace(flow, part=part, whole_axes=flow.whole_axes[1:])


def _bodies(equation: Any) -> list[Any]:
    """Return the programs that an equation holds."""
    found = []
    for value in equation.params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            if hasattr(getattr(one, "jaxpr", one), "eqns"):
                found.append(one)
    return found
