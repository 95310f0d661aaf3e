"""The census: one walk over a program that finds every product of a parameter.

Nothing is evaluated. Each variable of the jaxpr carries a `Fact`: the parameters that
it was computed from, whether an input took part, the view that it is of one parameter,
and the products that it follows. `_RULES` holds the rule of each primitive; `_ordinary`
is the rule of all others. The report, `find_weights` and the evaluation all come from
this one list, so that none of them can claim what another does not do. Products that
are left alone are in it with a reason.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend import core

from tcfp_jax.conversion import evaluate as programs
from tcfp_jax.conversion.bodies import WALKS, Body
from tcfp_jax.conversion.evaluate import bodies_of
from tcfp_jax.conversion.factors import (
    NO_INPUT,
    Numbers,
    Product,
    computed_product,
    head_of_loss,
    other_product,
    product_by_hand,
    product_of,
)
from tcfp_jax.conversion.facts import MULTIPLIED, Fact, Facts
from tcfp_jax.conversion.lookups import lookup_of
from tcfp_jax.conversion.sources import Reader, is_of_jax
from tcfp_jax.conversion.unfold import JOINS, MOVES, is_low_rank, linearity
from tcfp_jax.conversion.values import activation, moved_view, size_of
from tcfp_jax.conversion.views import Equation, Place
from tcfp_jax.products.annotations import WEIGHT_NAME, marked

# Function of a weight's path and a scope to the rule that opens a custom derivative
# there, or None.
Opens = Callable[[str, str], str | None]


@dataclass
class Census:
    """The products of a program, and the state of the walk that finds them.

    Attributes:
      inline: the rules that open custom derivatives.
      products: the products by place, in the program's order. A loop's body is walked
        until its facts no longer change; its products are found again at the same
        places, and count once.
      lookups: gathers of rows of tables by place, as products that contract the axis
        that is looked up.
      feeds: by place, the parameters of a product or of a lookup.
      reads: by place, other readers of numbers of parameters.
      alone: products by place of which no input is an operand.
      constant: the places of those with a constant, or with state of the model, also if
        that holds in a loop's first round only.
      mixed: places of products whose results were mixed with an input.
      activations: the places of both `constant` and `mixed`, by a first walk.
      consumed: places of products whose result another product reads.
      hidden: places of products that read the result of another product, or rows of a
        table.
      inside: why nothing in the current body can be converted; "" if something can.
      call: the call of a function of JAX around the current body, or None.
      marks: by place, the operand that is a weight, of equations that `unfold` may
        rewrite.
      linear: places of products of weights that are linear in parameters: the reason to
        rewrite the program.
      opened: the rules that opened one.
      exponents: pairs of a place and the size of an exponential of values that follow
        it.
    """

    inline: Opens
    activations: frozenset[Place] = frozenset()
    products: dict[Place, Product] = field(default_factory=dict)
    lookups: dict[Place, Product] = field(default_factory=dict)
    feeds: dict[Place, Reader] = field(default_factory=dict)
    reads: dict[Place, Reader] = field(default_factory=dict)
    alone: dict[Place, Product] = field(default_factory=dict)
    constant: set[Place] = field(default_factory=set)
    mixed: set[Place] = field(default_factory=set)
    consumed: set[Place] = field(default_factory=set)
    hidden: set[Place] = field(default_factory=set)
    inside: str = ""
    call: Equation | None = None
    marks: dict[Place, int] = field(default_factory=dict)
    linear: set[Place] = field(default_factory=set)
    opened: set[str] = field(default_factory=set)
    exponents: set[tuple[Place, int]] = field(default_factory=set)

    @staticmethod
    def of(jaxpr: core.ClosedJaxpr, facts: Sequence[Fact], inline: Opens) -> "Census":
        """Return the products of parameters in a closed jaxpr, from its inputs' facts.

        `inline` is the attribute of `Census`.

        >>> import jax
        >>> from tcfp_jax.conversion.views import View
        >>> w, x = jax.numpy.ones((3, 2)), jax.numpy.ones((4, 2))
        >>> jaxpr = jax.make_jaxpr(lambda w, x: x @ w.T)(w, x)
        >>> facts = [Fact(frozenset({"w"}), "w", View.of((3, 2))), Fact(input=True)]
        >>> found = Census.of(jaxpr, facts, inline=lambda path, scope: None)
        >>> (product,) = found.products.values()
        >>> product.path, product.equation
        ('w', 'cb,ab->ca')
        """
        body = (jaxpr.jaxpr, jaxpr.consts)
        found = Census(inline)
        outputs = found.walk(body, facts, ())
        activations = frozenset(found.constant & found.mixed)
        if activations:
            found = Census(inline, activations)
            outputs = found.walk(body, facts, ())
        found._list_products_without_input()
        followed = frozenset().union(*(fact.follows for fact in outputs))
        found._mark_heads(followed - found.consumed, facts)
        return found

    def walk(
        self, body: Body, facts: Sequence[Fact], place: Place, *, inline: bool = False
    ) -> Facts:
        """Walk a body, and return the facts of its outputs.

        A body takes and returns weights as arrays, unless it is read `inline`.
        """
        jaxpr, consts = body
        given = [*map(_of_constant, consts), *facts]
        if not inline:
            given = list(map(_as_array, given))
        known = dict(zip([*jaxpr.constvars, *jaxpr.invars], given, strict=True))

        def fact_of(var: Any) -> Fact:
            if isinstance(var, core.Literal):
                return Fact(uniform="number" if var.val else "zero")
            return known[var]

        for number, eqn in enumerate(jaxpr.eqns):
            own = (*place, number)
            # An earlier walk of the same body may have known less
            self.forget(own)
            rule = _RULES.get(eqn.primitive.name, _ordinary)
            outputs = rule(self, eqn, list(map(fact_of, eqn.invars)), own)
            known.update(zip(eqn.outvars, outputs, strict=True))
        found = list(map(fact_of, jaxpr.outvars))
        return found if inline else list(map(_as_array, found))

    def forget(self, place: Place) -> None:
        """Forget the knowledge of an earlier walk about a place."""
        self.unmark(place)
        self.products.pop(place, None)
        self.lookups.pop(place, None)
        self.reads.pop(place, None)
        self.alone.pop(place, None)

    def unmark(self, place: Place) -> None:
        """Let `unfold` leave an equation alone."""
        self.marks.pop(place, None)
        self.linear.discard(place)

    def reader(self, eqn: Equation, paths: frozenset[str]) -> Reader:
        """Return an equation as a reader of parameters."""
        return Reader(paths, eqn, self.call or eqn)

    def read(self, eqn: Equation, paths: frozenset[str], place: Place) -> None:
        """Note that an equation reads the numbers of parameters.

        Training and inference have to keep their floats.
        """
        if paths:
            self.reads[place] = self.reader(eqn, paths)

    def _list_products_without_input(self) -> None:
        """List products of which no input is an operand.

        Such a product needs no line if other products of all its parameters have lines:
        it may compute their weight, or a penalty.
        """
        known = frozenset().union(*(self.feeds[place].paths for place in self.products))
        for place, product in self.alone.items():
            if not self.feeds[place].paths <= known:
                self.products[place] = product

    def _mark_heads(self, last: frozenset[Place], inputs: Sequence[Fact]) -> None:
        """Mark the output heads among the `last` products, which no product follows."""
        looked_up = {lookup.path for lookup in self.lookups.values()}
        tables = {}
        for fact in inputs:
            if fact.path in looked_up and fact.view is not None:
                tables[fact.path] = fact.view.shape[0]
        products = self.products.values()
        # A model without a head ends in its hidden width, which some other product
        # contracts.
        hidden_widths = {product.k for product in products if not product.reason}
        hidden_widths -= set(tables.values())
        for place, product in self.products.items():
            features = product.path in tables or product.n not in hidden_widths
            follows = place in last and place in self.hidden
            if follows and features and product.n > 1:
                softmax = (place, product.rows * product.n) in self.exponents
                head = dataclasses.replace(product, head=True, softmax=softmax)
                self.products[place] = head


# Values
# --------------------------------------------------------------------------------------


def _of_constant(value: object) -> Fact:
    """Return the fact of a value that the function closes over."""
    # Nobody can tell whether an array is an input or a parameter that was forgotten.
    if getattr(value, "ndim", 0):
        return Fact(input=True, closed=True)
    return Fact(uniform="number")


def _as_array(fact: Fact) -> Fact:
    """Return the fact of a value that goes into a body or comes out of it."""
    return dataclasses.replace(fact, linear="") if fact.linear else fact


def _ordinary(found: Census, eqn: Equation, inputs: Facts, place: Place) -> Facts:
    """Return the facts of an ordinary equation: views, or mixtures of its operands."""
    bodies = bodies_of(eqn)
    if bodies:
        return _opaque(found, eqn, bodies, inputs, place)
    numbers = range(len(eqn.outvars))
    return [_output(found, eqn, inputs, number, place) for number in numbers]


def _output(
    found: Census, eqn: Equation, inputs: Facts, number: int, place: Place
) -> Fact:
    if any(fact.view for fact in inputs):
        moved = moved_view(eqn, inputs, number)
        if moved is not None:
            return moved
    name = eqn.primitive.name
    joined = Fact.join(inputs)
    table = inputs[0] if inputs else joined
    if name == "gather" and table.view is not None and inputs[1].input:
        found.lookups[place] = lookup_of(eqn, table.source, table.view, found.inside)
        found.feeds[place] = found.reader(eqn, table.params)
    else:
        found.read(eqn, joined.params, place)
    if name == "exp":
        size = size_of(eqn.outvars[0])
        found.exponents |= {(product, size) for product in joined.follows}
    if joined.input:
        for fact in inputs:
            # A statistic of a weight, such as its norm, is one number
            if fact.is_weight and not fact.uniform:
                found.mixed |= fact.follows
        return activation(eqn, inputs, joined, number) if joined.params else joined
    uniform = ""
    if name in ("broadcast_in_dim", "reshape", "convert_element_type"):
        uniform = inputs[0].uniform
    if not uniform and size_of(eqn.outvars[number]) == 1:
        uniform = "number"
    joined = dataclasses.replace(joined, uniform=uniform)
    if joined.is_weight:
        return _computed(found, eqn, inputs, joined, place)
    return joined


def _computed(
    found: Census, eqn: Equation, inputs: Facts, joined: Fact, place: Place
) -> Fact:
    """Return the fact of a weight that is computed, and mark it if that is linear."""
    linear = ""
    levels = [fact.linear or "scaled" * bool(fact.view) for fact in inputs]
    if any(levels) and len(eqn.outvars) == 1 and not found.inside:
        linear, side = linearity(eqn, levels, [fact.one_number for fact in inputs])
        if linear:
            found.marks[place] = side
    # A bias that was broadcast is smaller, and so is an operand of a joint matrix
    least = 0 if eqn.primitive.name in JOINS else size_of(eqn.outvars[0])
    matrix = False
    for fact, var in zip(inputs, eqn.invars, strict=True):
        size = size_of(var)
        matrix = matrix or (size >= least and fact.fills(size))
    why = joined.why
    if not why or (matrix and eqn.primitive.name not in MOVES):
        why = f"its weight is computed from parameters by {eqn.primitive.name}"
    return dataclasses.replace(joined, why=why, linear=linear, matrix=matrix)


def _named(found: Census, eqn: Equation, inputs: Facts, place: Place) -> Facts:
    """Return the fact of an array that `checkpoint_name` names.

    Some names are set by the layers of this library.
    """
    (fact,) = inputs
    name = eqn.params["name"]
    if name == WEIGHT_NAME:
        # A quantized weight: the product that reads it is converted already
        return [Fact(input=fact.input)]
    mark = marked(name)
    if mark is None:
        return _ordinary(found, eqn, inputs, place)
    if fact.is_weight and fact.view is not None:
        found.products[place] = product_by_hand(eqn, mark, fact.source, fact.view)
        found.feeds[place] = found.reader(eqn, fact.params)
    return [Fact(input=fact.input)]


# Bodies
# --------------------------------------------------------------------------------------


def _call(found: Census, eqn: Equation, inputs: Facts, place: Place) -> Facts:
    bodies = bodies_of(eqn)
    # A checkpoint inside a derivative: its body is not evaluated again
    if eqn.params.get("differentiated"):
        return _opaque(found, eqn, bodies, inputs, place)
    around = found.call
    inline = False
    if any(fact.params for fact in inputs):
        inline = programs.is_inlined(eqn)
        if around is None and is_of_jax(bodies[0][0]):
            found.call = eqn
    outputs = found.walk(bodies[0], inputs, place, inline=inline)
    found.call = around
    return outputs


def _custom(found: Census, eqn: Equation, inputs: Facts, place: Place) -> Facts:
    """Walk a function with a derivative of its own, which a rule may open."""
    bodies = bodies_of(eqn)
    head = head_of_loss(eqn, bodies[0][0])
    if head is not None:
        return _head(found, head, inputs, place)
    scope = str(eqn.source_info.name_stack)
    sources = [fact.source for fact in inputs if fact.is_weight]
    rules = set(filter(None, (found.inline(source, scope) for source in sources)))
    if not rules:
        return _opaque(found, eqn, bodies, inputs, place)
    found.opened |= rules
    return found.walk(bodies[0], inputs, place)


def _opaque(
    found: Census, eqn: Equation, bodies: list[Body], inputs: Facts, place: Place
) -> Facts:
    """Walk bodies that the evaluation binds unchanged.

    Their products are listed with that reason.
    """
    outputs: Facts | None = None
    around = found.inside
    found.inside = around or f"inside {eqn.primitive.name}"
    for number, body in enumerate(bodies):
        if len(body[0].invars) != len(inputs):
            continue
        facts = found.walk(body, inputs, (*place, number))
        if outputs is None and len(facts) == len(eqn.outvars):
            outputs = facts
    found.inside = around
    params = [fact.params for fact in inputs]
    found.read(eqn, frozenset().union(*params), place)
    if outputs is None:
        outputs = [Fact.join(inputs)] * len(eqn.outvars)
    return [fact.outside(eqn.primitive.name) for fact in outputs]


def _bodies(found: Census, eqn: Equation, inputs: Facts, place: Place) -> Facts:
    return WALKS[eqn.primitive.name](found.walk, eqn, inputs, place)


def _shard_map(found: Census, eqn: Equation, inputs: Facts, place: Place) -> Facts:
    """Walk the body of one device.

    Each device multiplies its part of a stack, whose stored form is split alike, or of
    a weight, which has none.
    """
    (body,) = bodies_of(eqn)
    variables: list[Any] = body[0].invars
    local = []
    for fact, var in zip(inputs, variables, strict=True):
        local.append(fact.local(var.aval.shape))
    walked = found.walk(body, local, place)
    outputs = [fact.outside("shard_map") for fact in walked]
    # a body of one device's parts cannot be traced alone
    for inner in list(found.marks):
        if inner[: len(place)] == place:
            found.unmark(inner)
    return outputs


# Products
# --------------------------------------------------------------------------------------


def _product(found: Census, eqn: Equation, inputs: Facts, place: Place) -> Facts:
    joined = Fact.join(inputs)
    if place in found.activations:
        for number, fact in enumerate(inputs):
            if not fact.params:
                inputs[number] = dataclasses.replace(fact, input=True)
        joined = Fact.join(inputs)
    if not joined.input:
        return [_product_without_input(found, eqn, inputs, joined, place)]
    contracted, batch = _numbers(eqn)
    # A sum of x times one-hot labels, in which an operand has no axis of its own, is a
    # loss: a head may precede it.
    sides = zip(eqn.invars, contracted, batch, strict=False)
    if all(var.aval.ndim > len(summed) + len(shared) for var, summed, shared in sides):
        found.consumed |= joined.follows
    weights = [side for side in (0, 1) if inputs[side].is_weight]
    if weights and inputs[1 - weights[0]].input:
        _weight_times_input(found, eqn, inputs, weights[0], place)
        return [Fact(input=True, follows=frozenset({place}))]
    described = other_product(eqn, inputs, contracted)
    if described is not None:
        found.products[place] = described
        found.feeds[place] = found.reader(eqn, joined.params)
    return [Fact(input=True, follows=joined.follows)]


def _numbers(eqn: Equation) -> Numbers | tuple[tuple[()], tuple[()]]:
    """Return the contracted and the batch axes of both operands; () if unknown."""
    if eqn.primitive.name != "dot_general":
        return (), ()
    return eqn.params["dimension_numbers"]


def _product_without_input(
    found: Census, eqn: Equation, inputs: Facts, joined: Fact, place: Place
) -> Fact:
    """Return the fact of a product that computes a weight, such as A B of LoRA.

    A product with a constant may compute an activation: the first walk cannot know.
    """
    if not joined.params:
        return joined
    found.read(eqn, joined.params, place)
    found.feeds[place] = found.reader(eqn, joined.params)
    sides = [side for side in (0, 1) if inputs[side].params]
    reason = found.inside or NO_INPUT
    found.alone[place] = product_of(eqn, sides[0], joined.source, reason)
    linear = ""
    if len(sides) == 1:
        found.constant.add(place)
    elif is_low_rank(eqn) and not found.inside:
        found.marks[place] = -1
        linear = "dot"
    follows = joined.follows | {place}
    return dataclasses.replace(joined, why=MULTIPLIED, linear=linear, follows=follows)


def _weight_times_input(
    found: Census, eqn: Equation, inputs: Facts, side: int, place: Place
) -> None:
    """Note a product of a weight, operand `side`, and an input."""
    weight = inputs[side]
    path = weight.path or weight.source
    if weight.linear in ("scaled", "joined") and _numbers(eqn)[0] and not found.inside:
        found.marks[place] = side
        found.linear.add(place)
    if weight.matrix:
        described = computed_product(eqn, side, path, found.inside, weight.why)
    else:
        no_view = "" if weight.view is not None else weight.why
        described = product_of(eqn, side, path, found.inside, weight.view, no_view)
    found.products[place] = described
    found.feeds[place] = found.reader(eqn, weight.params)
    if inputs[1 - side].follows:
        found.hidden.add(place)


def _head(found: Census, eqn: Equation, inputs: Facts, place: Place) -> Facts:
    """Return the facts of a `losses.cross_entropy`, from its product as an equation."""
    x, weight = inputs[:2]
    if weight.view is not None and any(len(axes) != 1 for axes in weight.view.axes):
        weight = weight.opaque("its table has merged axes")
    facts = _product(found, eqn, [x, weight], place)
    found.unmark(place)  # `unfold` rewrites products, and not this
    if place in found.products:
        head = dataclasses.replace(found.products[place], primitive="cross_entropy")
        found.products[place] = head
    return facts * 2


_Rule = Callable[[Census, Equation, Facts, Place], Facts]
_RULES: dict[str, _Rule] = {
    **dict.fromkeys(programs.PRODUCTS, _product),
    **dict.fromkeys(programs.CALLS, _call),
    **dict.fromkeys(programs.CUSTOM, _custom),
    **dict.fromkeys(WALKS, _bodies),
    "name": _named,
    "shard_map": _shard_map,
}
