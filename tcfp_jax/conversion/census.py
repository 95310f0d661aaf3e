"""The census of a function: one walk over its program, and from it every product of a parameter.

Nothing is evaluated. Every variable of the jaxpr carries a `Fact`: which parameters it was computed from, whether an
input took part, the view that it is of one parameter, and which products it follows from. The same list is the report,
what `find_weights` returns, and what the evaluation multiplies, so that none of them can claim what another does not
do. Products that are left alone are in it too, each with its reason.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from tcfp_jax.conversion.facts import COMPUTED, Fact, carried, closed_over, grow, item, join, mixed, same_size
from tcfp_jax.conversion.programs import (
    INLINED,
    PRODUCTS,
    bodies_of,
    has_rows,
    inside_gradient,
    opened,
    precision_of,
    scan_counts,
    sums,
)
from tcfp_jax.conversion.views import Factors, View, factors, layout_of, move
from tcfp_jax.products.layer import WEIGHT_NAME
from tcfp_jax.products.marks import Mark, marked
from tcfp_jax.recipes import Recipe
from tcfp_jax.weights.layout import Layout

Place = tuple[int, ...]
_CLOSED = "the function closes over its weight; pass it in params"
_NO_INPUT = "no input takes part: its other operand comes from parameters or constants alone"


@dataclass(frozen=True)
class Product:
    """One product of a parameter.

    Attributes:
      path: of the parameter; of several, joined by " + ".
      shape: of the parameter, or of the operand that was computed from it.
      equation: x, parameter -> result, over the parameter's own axes.
      k, n: the matrix that each row of x meets; 0 where there is no matrix.
      rows: how many rows of x each matrix meets.
      scope: the named scopes around it.
      reason: why it cannot be converted; "" where it can.
      layout: of the whole parameter; None where it cannot be stored for this product.
      head: it makes the model's output: no product follows it, and its result has as many features as a table that is
        looked up (or is multiplied by that table), or as nothing in the model contracts.
      recipe: of a product that a layer computes in low precision by itself.
      precision: what its author asked for, beyond the default.
    """

    path: str
    shape: tuple[int, ...]
    primitive: str
    equation: str = ""
    k: int = 0
    n: int = 0
    rows: int = 0
    scope: str = ""
    reason: str = ""
    layout: Layout | None = None
    head: bool = False
    recipe: Recipe | None = None
    precision: str = ""

    def __str__(self) -> str:
        """One line."""
        return f"{self.path:40} {list(self.shape)!s:20} {self.equation or self.primitive:24}"


@dataclass(frozen=True)
class Census:
    """What one walk found.

    Attributes:
      products: by place, in the program's order: the numbers of the equations around one, outermost first.
      lookups: by place, tables of which rows are looked up, by path.
      reads: by parameter, the primitives that read its numbers, other than products that can be converted.
    """

    products: dict[Place, Product]
    lookups: dict[Place, str]
    reads: dict[str, set[str]]


def census(jaxpr: Any, facts: Sequence[Fact]) -> Census:
    """The products of parameters in a closed jaxpr whose inputs are known by these facts.

    >>> import jax
    >>> jaxpr = jax.make_jaxpr(lambda w, x: x @ w.T)(jnp.ones((3, 2)), jnp.ones((4, 2)))
    >>> facts = [Fact(frozenset({"w"}), "w", View.of((3, 2))), Fact(input=True)]
    >>> [(product.path, product.equation) for product in census(jaxpr, facts).products.values()]
    [('w', 'cb,ab->ca')]
    """
    walk = _Walk()
    outputs = walk.run(jaxpr.jaxpr, [*closed_over(jaxpr.consts), *facts], ())
    final = frozenset().union(*(fact.follows for fact in outputs)) - walk.consumed
    contracted = {entry.k for entry in walk.found.values() if not entry.reason}
    tables = {fact.path: fact.view.shape[0] for fact in facts if fact.path in set(walk.lookups.values()) and fact.view}
    products = {}
    for place, product in walk.found.items():
        # A model without a head ends in its hidden width, which something contracts.
        counts = product.path in tables or product.n in tables.values() or product.n not in contracted
        last = place in final and place in walk.hidden and product.n > 1
        products[place] = dataclasses.replace(product, head=last and counts)
    return Census(products, walk.lookups, walk.reads)


class _Walk:
    """Facts through a program. `found` is by place, so that a loop's body, walked until its facts rest, counts once."""

    def __init__(self) -> None:
        self.found: dict[Place, Product] = {}
        self.lookups: dict[Place, str] = {}
        self.reads: dict[str, set[str]] = {}
        self.consumed: set[Any] = set()  # products whose result another product reads
        self.hidden: set[Any] = set()  # products that read what another product or a table made
        self.inside = ""  # why nothing in this body can be converted

    def run(self, jaxpr: Any, facts: list[Fact], place: Place) -> list[Fact]:
        """The facts of the outputs, from those of the constants and inputs."""
        known: dict[Any, Fact] = dict(zip([*jaxpr.constvars, *jaxpr.invars], facts, strict=True))
        read = lambda var: Fact() if isinstance(var, core.Literal) else known[var]
        for number, eqn in enumerate(jaxpr.eqns):
            inputs = [read(var) for var in eqn.invars]
            known.update(zip(eqn.outvars, self._equation(eqn, inputs, (*place, number)), strict=True))
        return [read(var) for var in jaxpr.outvars]

    def _equation(self, eqn: Any, inputs: list[Fact], place: Place) -> list[Fact]:
        name = eqn.primitive.name
        if name == "name" and eqn.params["name"] == WEIGHT_NAME:
            return [Fact(input=inputs[0].input)]  # quantized: what multiplies it is ours
        if name == "name" and (mark := marked(eqn.params["name"])) is not None:
            return [self._own(eqn, mark, inputs[0], place)]
        if name in PRODUCTS:
            return [self._product(eqn, inputs, place)]
        rules = {"scan": self._scan, "while": self._while, "cond": self._cond, "shard_map": self._shard_map}
        if name in INLINED and not eqn.params.get("differentiated"):
            return self.run(*_body_and_facts(eqn.params.get("jaxpr", eqn.params.get("call_jaxpr")), inputs), place)
        if name in rules:
            return rules[name](eqn, inputs, place)
        if any(True for _ in bodies_of(eqn)):
            return self._opaque(eqn, inputs, place)
        return [self._moved(eqn, inputs, number, place) for number in range(len(eqn.outvars))]

    def _moved(self, eqn: Any, inputs: list[Fact], number: int, place: Place) -> Fact:
        """What an ordinary equation makes: a view of its operand, or a mixture of all of them."""
        name = eqn.primitive.name
        several = name in ("optimization_barrier", "device_put", "mesh_cast") and len(inputs) > 1
        source = inputs[number] if several else inputs[0] if inputs else Fact()
        view = None
        if source.view is not None and (several or name in ("dynamic_slice", "gather") or len(inputs) == 1):
            view = move(source.view, eqn, number, [None] * len(eqn.invars[0].aval.shape))
        if view is not None:
            return dataclasses.replace(source, view=view)
        joined = join(inputs)
        for fact in inputs:
            if fact.path is not None:
                self.reads.setdefault(fact.path, set()).add(name)
        if joined.is_weight:
            return dataclasses.replace(joined, why=joined.why or COMPUTED)
        if name == "gather" and inputs[0].is_weight:  # a lookup: what follows works on what the model has learned
            joined = dataclasses.replace(joined, follows=joined.follows | {"lookup"})
            if inputs[0].path is not None:
                self.lookups[place] = inputs[0].path
        why = mixed(eqn, number, inputs) or (joined.why if same_size(eqn, number, inputs) else "")
        return dataclasses.replace(joined, params=joined.params if why else frozenset(), why=why)

    # Bodies ----------------------------------------------------------------------------------------------------------

    def _opaque(self, eqn: Any, inputs: list[Fact], place: Place) -> list[Fact]:
        """Bodies that the evaluation binds as they are: their products are listed and stay what they are."""
        before, self.inside = self.inside, self.inside or f"inside {eqn.primitive.name}"
        outputs: list[Fact] | None = None
        for number, (body, consts) in enumerate(bodies_of(eqn)):
            if len(body.invars) == len(inputs):
                found = self.run(body, [*closed_over(consts), *inputs], (*place, number))
                outputs = found if outputs is None and len(found) == len(eqn.outvars) else outputs
        self.inside = before
        for fact in inputs:
            if fact.path is not None:
                self.reads.setdefault(fact.path, set()).add(eqn.primitive.name)
        joined = join(inputs)
        return [fact.opaque(COMPUTED) if fact.is_weight else fact for fact in outputs or [joined] * len(eqn.outvars)]

    def _shard_map(self, eqn: Any, inputs: list[Fact], place: Place) -> list[Fact]:
        """Each device multiplies its part of a weight, or all parts gathered: no stored form fits either."""
        body, consts = opened(eqn.params["jaxpr"])
        local = []
        for fact, var in zip(inputs, body.invars, strict=True):
            view = None if fact.view is None else fact.view.local(var.aval.shape)
            local.append(
                fact.opaque(COMPUTED) if view is None and fact.is_weight else dataclasses.replace(fact, view=view)
            )
        outputs = self.run(body, [*closed_over(consts), *local], place)
        return [fact.opaque(COMPUTED if fact.is_weight else "") for fact in outputs]

    # What a loop carries may come from more in its second round than in its first. Facts only grow, and there are
    # finitely many of them, so walking the body until nothing changes ends.
    def _scan(self, eqn: Any, inputs: list[Fact], place: Place) -> list[Fact]:
        (body, consts), (first, count) = opened(eqn.params["jaxpr"]), scan_counts(eqn.params)
        second = first + count
        fixed, carry, xs = inputs[:first], inputs[first:second], [item(fact) for fact in inputs[second:]]
        still = [body.outvars[i] is body.invars[first + i] for i in range(count)]
        carry = [fact if same else fact.opaque(carried(fact)) for fact, same in zip(carry, still, strict=True)]
        while True:
            outputs = self.run(body, [*closed_over(consts), *fixed, *carry, *xs], place)
            grown = [a if same else grow(a, b) for a, b, same in zip(carry, outputs, still, strict=False)]
            if grown == carry:
                break
            carry = grown
        passed = {var: i for i, var in enumerate(body.invars)}
        ys = [
            inputs[passed[var]] if passed.get(var, -1) >= second else fact.opaque(COMPUTED if fact.is_weight else "")
            for var, fact in zip(body.outvars[count:], outputs[count:], strict=True)
        ]
        return [*carry, *ys]

    def _while(self, eqn: Any, inputs: list[Fact], place: Place) -> list[Fact]:
        first, second = eqn.params["cond_nconsts"], eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
        (body, consts), (test, test_consts) = opened(eqn.params["body_jaxpr"]), opened(eqn.params["cond_jaxpr"])
        fixed, carry = inputs[first:second], [fact.opaque(carried(fact)) for fact in inputs[second:]]
        while True:
            outputs = self.run(body, [*closed_over(consts), *fixed, *carry], (*place, 1))
            grown = [grow(a, b) for a, b in zip(carry, outputs, strict=True)]
            if grown == carry:
                break
            carry = grown
        self.run(test, [*closed_over(test_consts), *inputs[:first], *carry], (*place, 0))
        return carry

    def _cond(self, eqn: Any, inputs: list[Fact], place: Place) -> list[Fact]:
        branches = []
        for number, closed in enumerate(eqn.params["branches"]):
            body, consts = opened(closed)
            branches.append(self.run(body, [*closed_over(consts), *inputs[1:]], (*place, number)))
        chosen = Fact(input=inputs[0].input)
        # A choice between two weights is not a view, even of the same one: branches hand over numbers.
        merged = [join([chosen, *facts]) for facts in zip(*branches, strict=True)]
        return [dataclasses.replace(fact, why=COMPUTED if fact.is_weight else fact.why) for fact in merged]

    # Products --------------------------------------------------------------------------------------------------------

    def _product(self, eqn: Any, inputs: list[Fact], place: Place) -> Fact:
        sides = [i for i in (0, 1) if inputs[i].is_weight]
        joined = join(inputs)
        result = Fact(input=joined.input, follows=joined.follows)
        self.found.pop(place, None)  # of an earlier walk of the same body
        if not joined.input:  # of parameters and constants: a weight that is computed, such as A B of LoRA
            for fact in inputs:
                if fact.path is not None:
                    self.reads.setdefault(fact.path, set()).add(eqn.primitive.name)
            return dataclasses.replace(joined, why=COMPUTED) if joined.params else joined
        if has_rows(eqn):
            self.consumed |= joined.follows
        if not sides:
            hidden = next((fact for fact in inputs[:2] if fact.why and fact.params), None)
            # A constant that sums nothing, such as a table of rotations, is no weight that was forgotten.
            closed = next((fact for fact in inputs[:2] if fact.closed and sums(eqn)), None)
            if hidden is not None:
                self._refuse(eqn, inputs, inputs.index(hidden), place, hidden.why)
            elif closed is not None and not all(fact.closed for fact in inputs[:2]):
                self._refuse(eqn, inputs, inputs.index(closed), place, _CLOSED)
            return result
        side = sides[0]
        other = inputs[1 - side]
        if not other.input:
            self._refuse(eqn, inputs, side, place, _NO_INPUT)
            return result
        self.found[place] = self._judged(eqn, inputs, side)
        if other.follows:
            self.hidden.add(place)
        if inputs[side].path is not None and self.found[place].reason:
            self.reads.setdefault(inputs[side].path or "", set()).add(eqn.primitive.name)
        return dataclasses.replace(result, follows=frozenset({place}))

    def _judged(self, eqn: Any, inputs: list[Fact], side: int) -> Product:
        fact, shapes = inputs[side], [var.aval.shape for var in eqn.invars[:2]]
        reason = self.inside or inside_gradient(eqn) or unconvertible(eqn, fact.view, side) or ""
        base = Product(
            fact.path or " + ".join(sorted(fact.params)), shapes[side] if fact.view is None else fact.view.shape,
            eqn.primitive.name, scope=str(eqn.source_info.name_stack), precision=precision_of(eqn),
        )  # fmt: skip
        if reason or fact.view is None:
            return dataclasses.replace(base, reason=reason or fact.why or COMPUTED)
        found = factors(eqn.params["dimension_numbers"], shapes, side, fact.view)
        assert isinstance(found, Factors), "unconvertible says when there are none"
        size = lambda role: math.prod(s for s, r in zip(fact.view.sizes, found.roles, strict=True) if r == role)
        return dataclasses.replace(
            base, equation=written(found, len(shapes[side])), k=size("i"), n=size("o"), rows=found.rows,
            layout=layout_of(fact.view, found.roles),
        )  # fmt: skip

    def _refuse(self, eqn: Any, inputs: list[Fact], side: int, place: Place, reason: str) -> None:
        fact, shape = inputs[side], eqn.invars[side].aval.shape
        path = fact.path or " + ".join(sorted(fact.params)) or "(closed over)"
        self.found[place] = Product(
            path, tuple(shape), eqn.primitive.name, scope=str(eqn.source_info.name_stack), reason=reason
        )

    def _own(self, eqn: Any, mark: Mark, fact: Fact, place: Place) -> Fact:
        """A kernel on its way to a product that a layer of ours computes."""
        layout = mark.layout.stacked(eqn.invars[0].aval.ndim)
        if fact.is_weight and fact.view is not None:
            size = lambda axes: math.prod(eqn.invars[0].aval.shape[axis] for axis in axes)
            self.found[place] = Product(
                fact.path or "", fact.view.shape, "dot_general", k=size(layout.inputs), n=size(layout.outputs),
                rows=mark.rows, scope=str(eqn.source_info.name_stack), layout=_own_layout(fact.view, layout),
                recipe=mark.recipe,
            )  # fmt: skip
        return Fact(input=fact.input)


def unconvertible(eqn: Any, view: View | None, side: int) -> str:
    """Why a product with a view on one side has no low-precision form, or ""."""
    if eqn.primitive.name != "dot_general":
        return {"conv_general_dilated": "a convolution"}.get(eqn.primitive.name, f"a {eqn.primitive.name}")
    if view is None:
        return ""
    types = [var.aval.dtype for var in (*eqn.invars, *eqn.outvars)]
    if not all(jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize > 1 for dtype in types):
        return f"a product of {types[1 - side]} by {types[side]}"
    found = factors(eqn.params["dimension_numbers"], [var.aval.shape for var in eqn.invars], side, view)
    return found if isinstance(found, str) else ""


def written(found: Factors, ndim: int) -> str:
    """A product as an einsum equation, the parameter's letters first in the alphabet.

    >>> written(factors((((1,), (0,)), ((), ())), [(2, 8), (8, 4)], 1, View.of((8, 4))), 2)
    'ca,ab->cb'
    """
    contraction = found.contraction
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    layout, rest = contraction.layout, iter(letters[contraction.layout.ndim :])
    kernel = letters[: layout.ndim]
    x = [""] * contraction.ndim
    for mine, theirs in ((layout.inputs, contraction.inputs), (layout.stack, contraction.stack)):
        for axis, place in zip(mine, theirs, strict=True):
            x[place] = kernel[axis]
    x = [letter or next(rest) for letter in x]
    natural = [
        *(kernel[a] for a in layout.stack),
        *(x[a] for a in contraction.rest),
        *(kernel[a] for a in layout.outputs),
    ]
    result = natural if contraction.order is None else [natural[place] for place in contraction.order]
    return f"{''.join(x)},{kernel}->{''.join(result)}"


def _own_layout(view: View, layout: Layout) -> Layout | None:
    """Of the whole parameter, from that of the array that a layer multiplies."""
    atoms = ["o"] * len(view.sizes)
    for role, axes in (("i", layout.inputs), ("b", layout.stack)):
        for atom in (atom for axis in axes for atom in view.axes[axis]):
            atoms[atom] = role
    return layout_of(view, tuple(atoms))


def _body_and_facts(closed: Any, inputs: list[Fact]) -> tuple[Any, list[Fact]]:
    body, consts = opened(closed)
    return body, [*closed_over(consts), *inputs]
