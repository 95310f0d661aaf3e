"""The census: one walk over a program that finds every product of a parameter.

Nothing is evaluated. Each variable of the jaxpr carries a `Fact`: the parameters that
it was computed from, whether an input took part, the view that it is of one parameter,
and the products that it follows. `_RULES` holds the rule of each primitive; `_ordinary`
is the rule of all others. The report, `find_weights` and the evaluation all come from
this one list, so that none of them can claim what another does not do. Products that
are left alone are in it with a reason.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend import core

from tcfp_jax.conversion import evaluate as programs
from tcfp_jax.conversion.evaluate import Body, bodies_of, opened
from tcfp_jax.conversion.factors import (
    Product,
    head_of_loss,
    lookup_of,
    product_by_hand,
    product_of,
)
from tcfp_jax.conversion.unfold import linearity
from tcfp_jax.conversion.views import (
    COMPUTED,
    Equation,
    Fact,
    Place,
    move,
    operand_number,
)
from tcfp_jax.products.annotations import WEIGHT_NAME, marked

CLOSED = "the function closes over its weight; pass it in params"
_NO_INPUT = (
    "no input takes part: its other operand comes from parameters or constants alone"
)
# Among the products that a value follows: rows of a table, which the model has learned,
# too
_LOOKUP: Place = (-1,)


@dataclass
class Census:
    """The products of a program, and the state of the walk that finds them.

    Attributes:
      products: the products by place, in the program's order. A loop's body is walked
        until its facts rest; its products are found again at the same places, and count
        once.
      lookups: gathers of rows of tables by place, as products that contract the axis
        that is looked up.
      reads: by parameter, the primitives that read its numbers, other than products
        that can be converted.
      consumed: places of products whose result another product reads.
      hidden: places of products that read the result of another product, or rows of a
        table.
      inside: why nothing in the current body can be converted; "" if something can.
      marks: by place, the operand that is a weight, of equations that `unfold` may
        rewrite.
      linear: places of products of weights that are linear in parameters: the reason to
        rewrite the program.
      inline: function of a weight's path and a scope to the rule that opens a custom
        derivative there, or None.
      opened: the rules that opened one.
      exponents: pairs of a place and the size of an exponential of values that follow
        it.
    """

    products: dict[Place, Product] = field(default_factory=dict)
    lookups: dict[Place, Product] = field(default_factory=dict)
    reads: dict[str, set[str]] = field(default_factory=dict)
    consumed: set[Place] = field(default_factory=set)
    hidden: set[Place] = field(default_factory=set)
    inside: str = ""
    marks: dict[Place, int] = field(default_factory=dict)
    linear: set[Place] = field(default_factory=set)
    inline: Callable[[str, str], str | None] = lambda path, scope: None
    opened: set[str] = field(default_factory=set)
    exponents: set[tuple[Place, int]] = field(default_factory=set)

    def walk(
        self, body: Body, facts: Sequence[Fact], place: Place, *, inline: bool = False
    ) -> list[Fact]:
        """Walk a body, and return the facts of its outputs."""
        (jaxpr, consts), number = body, Fact(uniform="number")
        # Nobody can tell whether an array that the function closes over is an input or
        # a parameter that was forgotten.
        closed = [
            Fact(input=True, closed=True) if getattr(const, "ndim", 0) else number
            for const in consts
        ]

        def rule(at: int, eqn: Equation, inputs: list[Fact]) -> list[Fact]:
            # An earlier walk of the same body may have known less
            self.forget((*place, at))
            return _RULES.get(eqn.primitive.name, _ordinary)(
                self, eqn, inputs, (*place, at)
            )

        # A body takes and returns weights as arrays, unless it is read as part of the
        # program.
        plain = lambda fact: (
            fact if inline or not fact.linear else dataclasses.replace(fact, linear="")
        )
        whole = lambda facts: list(map(plain, facts))
        literal = lambda value: Fact(uniform="number" if value else "zero")
        return whole(
            programs.eval_jaxpr(jaxpr, [*closed, *whole(facts)], rule, literal)
        )

    def forget(self, place: Place) -> None:
        """Forget the marks at a place."""
        self.marks.pop(place, None)
        self.lookups.pop(place, None)
        self.linear.discard(place)

    def read(self, eqn: Equation, facts: Sequence[Fact]) -> None:
        """Note that an equation reads the numbers of parameters: inference has to keep
        their floats.
        """
        for fact in facts:
            if fact.path is not None:
                self.reads.setdefault(fact.path, set()).add(eqn.primitive.name)


def census(
    jaxpr: core.ClosedJaxpr,
    facts: Sequence[Fact],
    inline: Callable[[str, str], str | None] = lambda path, scope: None,
) -> Census:
    """Return the products of parameters in a closed jaxpr, from the facts of its
    inputs; for `inline` see `Census`.

    >>> import jax
    >>> from tcfp_jax.conversion.views import View
    >>> jaxpr = jax.make_jaxpr(lambda w, x: x @ w.T)(jax.numpy.ones((3, 2)), jax.numpy.ones((4, 2)))
    >>> facts = [Fact(frozenset({"w"}), "w", View.of((3, 2))), Fact(input=True)]
    >>> [(product.path, product.equation) for product in census(jaxpr, facts).products.values()]
    [('w', 'cb,ab->ca')]
    """
    found = Census(inline=inline)
    outputs = found.walk((jaxpr.jaxpr, jaxpr.consts), facts, ())
    last = frozenset().union(*(fact.follows for fact in outputs)) - found.consumed
    contracted = {
        product.k for product in found.products.values() if not product.reason
    }
    looked_up = {lookup.path for lookup in found.lookups.values()}
    tables = {
        fact.path: fact.view.shape[0]
        for fact in facts
        if fact.path in looked_up and fact.view is not None
    }
    for place, product in found.products.items():
        # A model without a head ends in its hidden width, which some other product
        # contracts.
        as_wide = (
            product.path in tables
            or product.n in tables.values()
            or product.n not in contracted
        )
        if place in last and place in found.hidden and product.n > 1 and as_wide:
            softmax = (place, product.rows * product.n) in found.exponents
            found.products[place] = dataclasses.replace(
                product, head=True, softmax=softmax
            )
    return found


# Values
# --------------------------------------------------------------------------------------


def _is_weight(fact: Fact) -> bool:
    """Return whether a value was computed from parameters alone."""
    return bool(fact.params) and not fact.input


def _join(facts: Sequence[Fact]) -> Fact:
    """Return the fact of a value that was computed from all of these."""
    used = [fact for fact in facts if fact.input]
    return Fact(
        frozenset().union(*(fact.params for fact in facts)),
        None,
        None,
        bool(used),
        bool(used) and all(fact.closed for fact in used),
        next((fact.why for fact in facts if fact.why), ""),
        frozenset().union(*(fact.follows for fact in facts)),
    )


def _ordinary(
    found: Census, eqn: Equation, inputs: list[Fact], place: Place
) -> list[Fact]:
    """Return the facts of an ordinary equation: views of its operand, or mixtures of
    all of its operands.
    """
    bodies = bodies_of(eqn)
    if bodies and eqn.primitive.name in programs.CUSTOM:
        if programs.is_head(eqn, bodies):
            return _head(found, eqn, inputs, place)
        scope = str(eqn.source_info.name_stack)
        rules = {
            found.inline(fact.source, scope) for fact in inputs if _is_weight(fact)
        }
        if rules - {None}:
            found.opened.update(filter(None, rules))
            return found.walk(bodies[0], inputs, place)
    if bodies:
        return _opaque(found, eqn, bodies, inputs, place)
    return [
        _output(found, eqn, inputs, number, place) for number in range(len(eqn.outvars))
    ]


def _output(
    found: Census, eqn: Equation, inputs: list[Fact], number: int, place: Place
) -> Fact:
    name, at = eqn.primitive.name, operand_number(eqn, number)
    if at is not None and (source := inputs[at]).view is not None:
        # The start of a slice makes no difference to the view, so 0 stands for one that
        # is not known yet.
        view = move(
            source.view, eqn, number, [0] * max(1, len(eqn.invars[0].aval.shape))
        )
        if view is not None:
            return dataclasses.replace(source, view=view)
    if (
        name == "gather"
        and inputs[0].path is not None
        and inputs[0].view is not None
        and inputs[1].input
    ):
        found.lookups[place] = lookup_of(
            eqn, inputs[0].path, inputs[0].view, found.inside
        )
    else:
        found.read(eqn, inputs)
    joined = _join(inputs)
    if name == "exp":
        found.exponents |= {(place, _size(eqn.outvars[0])) for place in joined.follows}
    if _is_weight(joined):
        levels = ["scaled" if fact.view is not None else fact.linear for fact in inputs]
        alone = not found.inside and len(eqn.outvars) == 1 and any(levels)
        linear, side = (
            linearity(eqn, levels, [fact.uniform for fact in inputs])
            if alone
            else ("", 0)
        )
        if linear:
            found.marks[place] = side
        return dataclasses.replace(joined, why=joined.why or COMPUTED, linear=linear)
    if not joined.input:
        spread = (
            inputs[0].uniform
            if name in ("broadcast_in_dim", "reshape", "convert_element_type")
            else ""
        )
        return dataclasses.replace(
            joined,
            uniform=spread or ("number" if _size(eqn.outvars[number]) == 1 else ""),
        )
    if name == "gather" and _is_weight(inputs[0]):
        joined = dataclasses.replace(joined, follows=joined.follows | {_LOOKUP})
    why = _mixed(eqn, number, inputs)
    if why and joined.closed:
        why = "its weight is computed from parameters and constants"
    if not why and any(
        fact.why and fact.params and _size(var) == _size(eqn.outvars[number])
        for fact, var in zip(inputs, eqn.invars, strict=True)
    ):
        # A weight that an input changed keeps its size: it is that weight still
        why = joined.why
    return dataclasses.replace(
        joined, params=joined.params if why else frozenset(), why=why
    )


def _mixed(eqn: Equation, number: int, inputs: list[Fact]) -> str:
    """Return why the result of an equation may still be a weight, although an input
    took part; "" if it is none.

    Rows that are looked up in a table are activations, and so is x plus a bias. A value
    of the size of a weight with two axes or more is still a weight: it was gathered by
    an array of indices, or an input changed it.
    """
    if eqn.primitive.name in ("gather", "dynamic_slice") and _is_weight(inputs[0]):
        matrix = sum(size > 1 for size in eqn.params["slice_sizes"]) >= 2
        return "its weight is gathered by an array of indices" if matrix else ""
    for fact, var in zip(inputs, eqn.invars, strict=True):
        if _is_weight(fact) and _size(var) == _size(eqn.outvars[number]):
            wide = sum(size > 1 for size in var.aval.shape) >= 2
            # A bias or a gain that was broadcast has fewer values, or one axis of its
            # own.
            of, axes = (fact.view.sizes, fact.view.axes) if fact.view else ((), ())
            if wide and (
                not fact.view
                or (math.prod(of) == _size(var) and sum(map(bool, axes)) >= 2)
            ):
                return "its weight is mixed with an input before the product"
    return ""


def _size(var: Any) -> int:
    return math.prod(getattr(var.aval, "shape", ()))


def _named(
    found: Census, eqn: Equation, inputs: list[Fact], place: Place
) -> list[Fact]:
    """Return the fact of an array that `checkpoint_name` names; some names are set by
    the layers of this library.
    """
    if eqn.params["name"] == WEIGHT_NAME:
        # A quantized weight: the product that reads it is converted already
        return [Fact(input=inputs[0].input)]
    mark = marked(eqn.params["name"])
    if mark is None:
        return _ordinary(found, eqn, inputs, place)
    fact = inputs[0]
    if _is_weight(fact) and fact.view is not None:
        found.products[place] = product_by_hand(eqn, mark, fact.source, fact.view)
    return [Fact(input=fact.input)]


# Bodies
# --------------------------------------------------------------------------------------


def _call(found: Census, eqn: Equation, inputs: list[Fact], place: Place) -> list[Fact]:
    # A checkpoint inside a derivative: its body is not evaluated again
    if eqn.params.get("differentiated"):
        return _opaque(found, eqn, bodies_of(eqn), inputs, place)
    inline = any(fact.params for fact in inputs) and programs.is_inlined(eqn)
    return found.walk(bodies_of(eqn)[0], inputs, place, inline=inline)


def _opaque(
    found: Census, eqn: Equation, bodies: list[Body], inputs: list[Fact], place: Place
) -> list[Fact]:
    """Walk bodies that the evaluation binds unchanged: their products are listed with
    that reason.
    """
    before, found.inside = found.inside, found.inside or f"inside {eqn.primitive.name}"
    outputs: list[Fact] | None = None
    for number, body in enumerate(bodies):
        if len(body[0].invars) == len(inputs):
            facts = found.walk(body, inputs, (*place, number))
            outputs = (
                facts if outputs is None and len(facts) == len(eqn.outvars) else outputs
            )
    found.inside = before
    found.read(eqn, inputs)
    return [
        fact.computed() if _is_weight(fact) else fact
        for fact in outputs or [_join(inputs)] * len(eqn.outvars)
    ]


def _shard_map(
    found: Census, eqn: Equation, inputs: list[Fact], place: Place
) -> list[Fact]:
    """Each device multiplies its part of a stack, whose stored form is split alike, or
    of a weight, which has none.
    """
    body, local = bodies_of(eqn)[0], []
    variables: list[Any] = body[0].invars
    for fact, var in zip(inputs, variables, strict=True):
        view = None if fact.view is None else fact.view.local(var.aval.shape)
        opaque = view is None and _is_weight(fact)
        local.append(
            fact.opaque(COMPUTED) if opaque else dataclasses.replace(fact, view=view)
        )
    outputs = [fact.computed() for fact in found.walk(body, local, place)]
    for inner in [inner for inner in found.marks if inner[: len(place)] == place]:
        found.forget(inner)  # a body of one device's parts cannot be traced alone
    return outputs


def _scan(found: Census, eqn: Equation, inputs: list[Fact], place: Place) -> list[Fact]:
    body, (first, count) = opened(eqn.params["jaxpr"]), programs.scan_counts(eqn.params)
    jaxpr, second = body[0], first + count
    fixed, carry, xs = (
        inputs[:first],
        inputs[first:second],
        [fact.entry() for fact in inputs[second:]],
    )
    # A value that every round hands on unchanged keeps its view.
    still = [jaxpr.outvars[i] is jaxpr.invars[first + i] for i in range(count)]
    carry = [
        fact if same else _carried(fact)
        for fact, same in zip(carry, still, strict=True)
    ]
    run = lambda carry: found.walk(body, [*fixed, *carry, *xs], place)
    carry, outputs = _settled(run, carry, still)
    # An input that the body returns untouched is stacked as it came, so the whole array
    # keeps its view.
    passed: dict[Any, int] = {var: i for i, var in enumerate(jaxpr.invars)}
    ys = [
        inputs[passed[var]] if passed.get(var, -1) >= second else fact.computed()
        for var, fact in zip(jaxpr.outvars[count:], outputs[count:], strict=True)
    ]
    return [*carry, *ys]


def _while(
    found: Census, eqn: Equation, inputs: list[Fact], place: Place
) -> list[Fact]:
    first, second = (
        eqn.params["cond_nconsts"],
        eqn.params["cond_nconsts"] + eqn.params["body_nconsts"],
    )
    body, test = opened(eqn.params["body_jaxpr"]), opened(eqn.params["cond_jaxpr"])
    run = lambda carry: found.walk(body, [*inputs[first:second], *carry], (*place, 1))
    # A body need not run once, and no output of it is known to be unchanged: a carried
    # weight loses its view.
    carry = list(map(_carried, inputs[second:]))
    carry, _ = _settled(run, carry, [False] * len(carry))
    found.walk(test, [*inputs[:first], *carry], (*place, 0))
    return carry


def _settled(
    run: Callable[[list[Fact]], list[Fact]], carry: list[Fact], still: list[bool]
) -> tuple[list[Fact], list[Fact]]:
    """Walk a loop's body until its facts rest, and return the facts of the carry and of
    the outputs.
    """
    # A carried value may come from more in the second round; facts only grow, so this
    # ends
    while True:
        outputs = run(carry)
        grown = [
            a if same else _grow(a, b)
            for a, b, same in zip(carry, outputs, still, strict=False)
        ]
        if grown == carry:
            return carry, outputs
        carry = grown


def _carried(fact: Fact) -> Fact:
    return fact.opaque(
        "its weight is carried, and changed, by a loop"
        if _is_weight(fact)
        else fact.why
    )


def _grow(fact: Fact, other: Fact) -> Fact:
    """Return the fact of a carried value after one more round."""
    joined = _join([fact, other])
    why = fact.why or other.why
    if _is_weight(fact) and joined.input and fact.view is None:
        why = "its weight is carried by a loop, which mixes it with an input"
    return dataclasses.replace(joined, why=why)


def _cond(found: Census, eqn: Equation, inputs: list[Fact], place: Place) -> list[Fact]:
    bodies = enumerate(map(opened, eqn.params["branches"]))
    branches = [
        found.walk(body, inputs[1:], (*place, number)) for number, body in bodies
    ]
    chosen = Fact(input=inputs[0].input)
    # A choice between two weights is not a view, even if both are the same weight:
    # branches hand over numbers.
    merged = [_join([chosen, *facts]) for facts in zip(*branches, strict=True)]
    return [
        dataclasses.replace(fact, why=COMPUTED if _is_weight(fact) else fact.why)
        for fact in merged
    ]


# Products
# --------------------------------------------------------------------------------------


def _product(
    found: Census, eqn: Equation, inputs: list[Fact], place: Place
) -> list[Fact]:
    joined = _join(inputs)
    # An earlier walk of the same body may have known less
    found.products.pop(place, None)
    contracted, batch = (
        eqn.params["dimension_numbers"]
        if eqn.primitive.name == "dot_general"
        else ((), ())
    )
    if not joined.input:  # a weight that is computed, such as A B of LoRA
        found.read(eqn, inputs)
        matrices = all(fact.params for fact in inputs) and [
            var.aval.ndim for var in eqn.invars
        ] == [2, 2]
        if (
            matrices
            and (contracted, batch) == (((1,), (0,)), ((), ()))
            and not found.inside
        ):
            found.marks[place] = -1
            joined = dataclasses.replace(joined, linear="dot")
        return [dataclasses.replace(joined, why=COMPUTED) if joined.params else joined]
    # A sum of x times one-hot labels, in which an operand has no axis of its own, is a
    # loss: a head may precede it.
    if all(
        var.aval.ndim > len(c) + len(b)
        for var, c, b in zip(eqn.invars, contracted, batch, strict=False)
    ):
        found.consumed |= joined.follows
    result = Fact(input=True, follows=joined.follows)
    side = next((i for i in (0, 1) if _is_weight(inputs[i])), None)
    if side is None:
        hidden = next((i for i in (0, 1) if inputs[i].why and inputs[i].params), None)
        # A constant that sums nothing, such as a table of rotations, is not a weight
        # that was forgotten.
        sums = not contracted or bool(contracted[0])
        closed = next((i for i in (0, 1) if inputs[i].closed and sums), None)
        if hidden is not None:
            found.products[place] = product_of(
                eqn, hidden, inputs[hidden].source, inputs[hidden].why
            )
        elif closed is not None and not all(fact.closed for fact in inputs[:2]):
            found.products[place] = product_of(
                eqn, closed, inputs[closed].source or "(closed over)", CLOSED
            )
        return [result]
    weight, other = inputs[side], inputs[1 - side]
    if not other.input:
        found.products[place] = product_of(eqn, side, weight.source, _NO_INPUT)
        return [result]
    if weight.linear in ("scaled", "joined") and contracted and not found.inside:
        found.marks[place] = side
        found.linear.add(place)
    no_view = "" if weight.view is not None else weight.why or COMPUTED
    path = weight.path or weight.source
    found.products[place] = product_of(
        eqn, side, path, found.inside, weight.view, no_view
    )
    if other.follows:
        found.hidden.add(place)
    if found.products[place].reason:
        found.read(eqn, [weight])
    return [Fact(input=True, follows=frozenset({place}))]


def _head(found: Census, eqn: Equation, inputs: list[Fact], place: Place) -> list[Fact]:
    """Return the facts of a `losses.cross_entropy`, whose product is converted like
    others.
    """
    x, w = inputs[:2]
    merged = w.view is not None and any(len(axes) != 1 for axes in w.view.axes)
    facts = _product(
        found,
        head_of_loss(eqn),
        [x, w.opaque("its table has merged axes") if merged else w],
        place,
    )
    found.forget(place)  # `unfold` rewrites products, and not this
    if place in found.products:
        found.products[place] = dataclasses.replace(
            found.products[place], primitive="cross_entropy"
        )
    return facts * 2


_Rule = Callable[[Census, Equation, list[Fact], Place], list[Fact]]
_RULES: dict[str, _Rule] = {
    **dict.fromkeys(programs.PRODUCTS, _product),
    **dict.fromkeys(programs.CALLS, _call),
    "name": _named,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
}
