"""`Examined.of` applies a policy to a census.

It makes the plan of the evaluation, the weights to store, and the `Report`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
from jax import Array
from jax.extend import core

from tcfp_jax import paths
from tcfp_jax.conversion.bodies import Plan
from tcfp_jax.conversion.census import Census
from tcfp_jax.conversion.evaluate import LOOKUP, AtUse
from tcfp_jax.conversion.factors import CLOSED, NO_MATRIX, Product
from tcfp_jax.conversion.facts import Facts
from tcfp_jax.conversion.policy import Policy, Record
from tcfp_jax.conversion.unfold import unfolded
from tcfp_jax.conversion.views import Place
from tcfp_jax.paths import PyTree
from tcfp_jax.recipes import Recipe, describe
from tcfp_jax.weights.layout import Weight, Weights

Step = Recipe | AtUse | str  # of a planned product
Leaves = Mapping[str, Array | jax.ShapeDtypeStruct]  # parameters by path


@dataclass(frozen=True)
class Storage:
    """The storage of one parameter of a product, a line of a `Report`.

    Use this to find the weights that `tcfp_jax.store` leaves float.

    Attributes:
      path: path of the parameter.
      kind: "stored" if only products of the stored form read it; "converted only" if
        products of it are converted, and its floats are needed; "float" if none is.
      reason: why it stays float, with the place in the program; "" if it is stored.
    """

    path: str
    kind: Literal["stored", "converted only", "float"]
    reason: str = ""

    def __str__(self) -> str:
        """One line of a report."""
        if self.kind == "float":
            return f"{self.path:40} {self.reason}"
        note = f", {self.reason}" if self.reason else ""
        return f"{self.path:40} {self.kind}{note}"


@dataclass(frozen=True)
class Report:
    """The products of a model's parameters. Print it to see a table.

    Use this in a test of your model, to assert which layers `survey` found converted.

    Attributes:
      converted, skipped: a `Record` for each product.
      unmatched_rules: rules that no product matched.
      rounded: paths of parameters that are rounded to the packed format
        (`include="norm"`).
      parameters: a `Storage` for each parameter of a product.
    """

    converted: tuple[Record, ...]
    skipped: tuple[Record, ...]
    unmatched_rules: tuple[str, ...] = ()
    rounded: tuple[str, ...] = ()
    parameters: tuple[Storage, ...] = ()

    @property
    def impossible(self) -> tuple[Record, ...]:
        """Skipped products that have no low-precision form, and that no rule names."""
        # An array that the function closes over may be a constant, such as a table of
        # rotations.
        return tuple(
            r
            for r in self.skipped
            if r.product.reason not in ("", CLOSED) and r.rule is None
        )

    @property
    def weighed(self) -> bool:
        """True if measured times decided about a product.

        A model in which nothing pays then runs unchanged.
        """
        return any(record.speed is not None for record in self.records)

    @property
    def records(self) -> tuple[Record, ...]:
        """The converted products, then the skipped ones."""
        return self.converted + self.skipped

    def __str__(self) -> str:
        """The table."""
        count = f"{len(self.converted)} products converted, {len(self.skipped)} skipped"
        runs = self.converted or self.rounded or self.weighed
        if not runs and not any(record.is_off for record in self.skipped):
            count += ": nothing is converted, and a call raises"
        lines = [count, *map(str, self.converted)]
        lines += [f"skipped: {record}" for record in self.skipped]
        heads = [one.product for one in self.records if one.product.softmax]
        for head in heads:
            megabytes = 2 * head.rows * head.n / 1e6
            lines.append(
                f"a softmax follows {head.path}: losses.cross_entropy saves its logits,"
                f" {megabytes:,.3g} MB in BF16"
            )
        lines += map(str, self.parameters)
        lines += [f"rounded to the packed format: {path}" for path in self.rounded]
        lines += [f"rule that matched nothing: {rule}" for rule in self.unmatched_rules]
        return "\n".join(lines)

    def check_strict(self) -> None:
        """Raise a ValueError if a product was left alone without a rule.

        A rule that matches nothing raises, too.
        """
        if self.impossible:
            raise ValueError(
                f"strict=True: {len(self.impossible)} products of parameters have no"
                " low-precision form; leave them alone by rules, such as"
                f' {{"patch": None}}:{_by_reason(self.impossible)}'
            )
        if self.unmatched_rules:
            raise ValueError(
                f"strict=True: no product matches the rule {self.unmatched_rules[0]};"
                " survey lists them"
            )


class Program(NamedTuple):
    """A traced function.

    `rebuild` makes its result from arrays like `outputs` and the Python values of the
    trace.
    """

    jaxpr: core.ClosedJaxpr
    outputs: list[jax.ShapeDtypeStruct]
    rebuild: Callable[[Sequence[Array | jax.ShapeDtypeStruct]], PyTree]


@dataclass(frozen=True)
class Traced:
    """A traced function, before the decisions about it.

    Attributes:
      program: the trace.
      facts: the facts of its inputs.
      leaves: the parameters by path.
      prefix: path of the function's part of a model, if a part is called by itself.
    """

    program: Program
    facts: Facts
    leaves: Leaves
    prefix: str

    def examined(self, chosen: Policy) -> "Examined":
        """Return the decisions of a policy.

        A product of a weight that is linear in parameters is rewritten over these if
        that converts some of them. Otherwise it runs as it was written.
        """
        jaxpr = self.program.jaxpr
        found = self._census(jaxpr, chosen)
        judged: list[Record] = []
        if found.linear:
            marks = found.marks
            whole, origins = unfolded(jaxpr, marks)
            every = self._census(whole, chosen)
            choices = chosen.choices(every.products, self.prefix)
            judged += choices.values()
            left = found.linear - _rewritten(origins, choices)
            if left == found.linear:
                whole = jaxpr
            elif left:
                kept = {
                    place: side for place, side in marks.items() if place not in left
                }
                whole, _ = unfolded(jaxpr, kept)
            jaxpr = whole
            found = self._census(jaxpr, chosen) if left else every
        program = self.program._replace(jaxpr=jaxpr)
        weights = None
        if chosen.off:  # a layer that is switched off keeps its state
            weights = self.examined(dataclasses.replace(chosen, off=())).weights
        return Examined.of(self, program, found, chosen, judged, weights)

    def _census(self, jaxpr: core.ClosedJaxpr, chosen: Policy) -> Census:
        def inline(path: str, scope: str) -> str | None:
            return chosen.opens(paths.join(self.prefix, path), scope)

        return Census.of(jaxpr, self.facts, inline)


def _rewritten(
    origins: Mapping[Place, Place], choices: Mapping[Place, Record]
) -> set[Place]:
    """Return the places of old products whose parts convert.

    A part of another computed weight, or of a vector that is copied to a matrix, is as
    large as the old product: it would add work.
    """
    converted = set()
    half = set()
    for place, origin in origins.items():
        choice = choices.get(place)
        if choice is None:
            continue
        product = choice.product
        if product.computed or product.reason not in ("", NO_MATRIX):
            half.add(origin)
        elif choice.recipe is not None:
            converted.add(origin)
    return converted - half


@dataclass(frozen=True)
class Examined:
    """A traced function and the decisions about it.

    Attributes:
      traced: the function before the decisions.
      program: its program, whose products may be rewritten.
      census: the products of the program.
      judged: choices for all products of the program, also before it was rewritten.
      plan: the plan of the evaluation.
      report: the report of the products.
      weights: the weights that `error_feedback` can store, by path.
      rounded: paths of parameters that are rounded to the packed format as they come
        in.
    """

    traced: Traced
    program: Program
    census: Census
    judged: tuple[Record, ...]
    plan: Plan
    report: Report
    weights: Weights
    rounded: frozenset[str]

    @property
    def leaves(self) -> Leaves:
        """The parameters by path."""
        return self.traced.leaves

    @staticmethod
    def of(
        traced: Traced,
        program: Program,
        found: Census,
        chosen: Policy,
        judged: Sequence[Record],
        weights: dict[str, Weight] | None = None,
    ) -> "Examined":
        """Return the decisions of a policy about a program, from its census."""
        products = dict(found.products)
        if "embed" in chosen.include:
            products |= found.lookups
        choices = chosen.choices(products, traced.prefix)
        if weights is None:
            weights = _weights_of(found, products, choices)
        steps: dict[Place, Step] = {}
        decided: dict[Place, Record] = {}
        for place, product in products.items():
            choice = dataclasses.replace(choices[place], product=product)
            weight = weights.get(product.path)
            if choice.recipe is not None and place in found.lookups:
                if weight is not None and weight.float_reads != "lookup":
                    steps[place] = LOOKUP
                    decided[place] = choice
                    continue
                why = "float: other code reads the table's floats"
                choice = dataclasses.replace(choice, recipe=None, reason=why)
            here = (choice.recipe, product.layout)
            fits = weight is not None and (weight.recipe, weight.layout) == here
            decided[place] = dataclasses.replace(choice, stored=fits)
            if choice.recipe is not None and product.recipe is None:
                steps[place] = choice.recipe
                if product.computed:
                    steps[place] = AtUse(choice.recipe, product.side)
        records = list(decided.values())
        gains: frozenset[str] = frozenset()
        if "norm" in chosen.include:
            gains = _gains(found, traced.leaves)
        judged = (*judged, *choices.values())
        unmatched = chosen.unmatched(judged)
        unused = [repr(rule) for rule in chosen.inline if rule not in found.opened]
        report = Report(
            tuple(record for record in records if record.recipe is not None),
            tuple(record for record in records if record.recipe is None),
            (*unmatched, *unused),
            tuple(sorted(gains)),
            _storages(found, decided, weights),
        )
        stored = Weights(weights)
        stored.floats = _floats_of(found, decided, report)
        plan = _plan_of(steps)
        return Examined(traced, program, found, judged, plan, report, stored, gains)

    def by(self, chosen: Policy) -> "Examined":
        """Return the decisions of another policy about the same function."""
        return self.traced.examined(chosen)

    def check_converted(self, name: str) -> None:
        """Raise a ValueError if nothing is converted.

        Nothing raises if measured times advised against every product.
        """
        report = self.report
        if report.converted or report.rounded or report.weighed:
            return
        if report.skipped:
            raise ValueError(
                f"no product of {name} was converted; name them in rules or widen"
                f" include:{_by_reason(report.skipped)}"
            )
        found = [f"{path} {list(leaf.shape)}" for path, leaf in self.leaves.items()]
        raise ValueError(
            f"no product of {name} was converted: its program multiplies none of its"
            " parameters by an input; the parameters are"
            f" {', '.join(found[:8]) or 'none'}; pass the parameters that are"
            " multiplied, and inputs that reach them"
        )


def _by_reason(records: Sequence[Record]) -> str:
    """Return lines for a message: each reason, and below it a product per line."""
    lines = [""]
    for reason in dict.fromkeys(record.reason for record in records):
        lines.append(f"  {reason}")
        products = [record.product for record in records if record.reason == reason]
        for product in products[:8]:
            lines.append(f"    {product.path or '(root)'} {list(product.shape)}")
        if len(products) > 8:
            lines.append(f"    and {len(products) - 8} more")
    return "\n".join(lines)


def _weights_of(
    found: Census, products: Mapping[Place, Product], choices: Mapping[Place, Record]
) -> dict[str, Weight]:
    """Return the weights to store, each as its first converted product reads it."""
    # Products that stay float read the float weight, too.
    float_reads = {path for reader in found.reads.values() for path in reader.paths}
    for place in (*found.products, *found.lookups):
        if place not in choices or choices[place].recipe is None:
            float_reads |= found.feeds[place].paths
    weights: dict[str, Weight] = {}
    for place, product in products.items():
        recipe = choices[place].recipe
        layout = product.layout
        if layout is None:
            continue
        is_lookup = place in found.lookups
        reads: Literal["lookup", "none"] = "none"
        if product.path in float_reads:
            reads = "lookup"
        weight = weights.get(product.path)
        if is_lookup and weight is not None and weight.layout.stack != layout.stack:
            weights[product.path] = dataclasses.replace(weight, float_reads="lookup")
        elif is_lookup and reads == "lookup":
            continue  # nothing would read its stored form
        elif recipe is not None and recipe.stored is not None:
            weights.setdefault(product.path, Weight(recipe, layout, reads))
    return weights


def _storages(
    found: Census, records: Mapping[Place, Record], weights: Mapping[str, Weight]
) -> tuple[Storage, ...]:
    """Return the storage of each parameter of the products with a record."""
    places: dict[str, list[Place]] = {}
    for place in records:
        for path in sorted(found.feeds[place].paths):
            places.setdefault(path, []).append(place)
    lines = []
    for path, own in places.items():
        weight = weights.get(path)
        kept = weight is not None and weight.float_reads == "none"
        if kept:
            lines.append(Storage(path, "stored"))
            continue
        converted = [place for place in own if records[place].recipe is not None]
        if not converted:
            why = records[own[0]].reason_at(found.feeds[own[0]].place)
            lines.append(Storage(path, "float", f"stays float: {why}"))
            continue
        why = _reader(found, path)
        if not why and weight is None:
            why = _unstored(found, records, converted[0])
        if not why:
            why = _other_product(found, records, path, own)
        lines.append(Storage(path, "converted only", f"stays float: {why}"))
    return tuple(lines)


def _reader(found: Census, path: str) -> str:
    """Return the first code that reads the floats of a parameter, or ""."""
    for reader in found.reads.values():
        if path in reader.paths:
            return f"read by {reader}"
    return ""


def _unstored(found: Census, records: Mapping[Place, Record], place: Place) -> str:
    """Return why a converted product has no stored weight."""
    record = records[place]
    if record.recipe is not None and record.recipe.stored is None:
        return f"{describe(record.recipe)} stores no weight"
    part = "a part without a stored form is multiplied"
    return f"{record.product.computed or part}{found.feeds[place].place}"


def _other_product(
    found: Census, records: Mapping[Place, Record], path: str, own: Sequence[Place]
) -> str:
    """Return the product or the lookup that reads the floats of a stored weight."""
    for place in own:
        if records[place].recipe is None:
            why = records[place].reason_at(found.feeds[place].place)
            return f"another product of it does: {why}"
    places = [place for place in found.lookups if path in found.feeds[place].paths]
    reader = found.feeds[places[0]]
    return f'its rows are looked up by {reader}; include="embed" stores them'


def _floats_of(
    found: Census, records: Mapping[Place, Record], report: Report
) -> dict[str, str]:
    """Return why parameters stay float although their recipe stores weights."""
    storable: set[str] = set()
    for place, record in records.items():
        if record.recipe is not None and record.recipe.stored is not None:
            storable |= found.feeds[place].paths
    floats = {}
    for line in report.parameters:
        if line.kind == "converted only" and line.path in storable:
            floats[line.path] = line.reason
    return floats


def _gains(found: Census, leaves: Leaves) -> frozenset[str]:
    """Return vectors that multiply an input, and the others of the same layer.

    The others are added to one: a layer whose parameters have one shape is a norm. The
    vectors may be stacks that a loop takes apart.
    """
    gains: set[str] = set()
    for place, reader in found.reads.items():
        if reader.eqn.primitive.name != "mul":
            continue
        sizes = [var.aval.size for var in reader.eqn.invars]
        for path in reader.paths & leaves.keys():
            shape = leaves[path].shape
            # As many axes in front as bodies of loops around the equation
            if 1 <= len(shape) <= len(place) and shape[-1] in sizes:
                gains.add(path)
    layers: dict[str, set[str]] = {}
    for path in leaves:
        layers.setdefault(path.rpartition("/")[0], set()).add(path)
    norms = set(gains)
    for paths_of_layer in layers.values():
        shapes = {leaves[path].shape for path in paths_of_layer}
        if len(shapes) == 1 and paths_of_layer & gains:
            norms |= paths_of_layer
    return frozenset(norms)


def _plan_of(steps: Mapping[Place, Step]) -> Plan:
    """Return the plan for steps by place.

    >>> _plan_of({(3,): "packed", (1, 0): "packed"})
    ((1, ((0, 'packed'),)), (3, 'packed'))
    """
    own: dict[int, Any] = {}
    bodies: dict[int, dict[Place, Step]] = {}
    for (number, *inner), step in steps.items():
        if inner:
            bodies.setdefault(number, {})[tuple(inner)] = step
        else:
            own[number] = step
    plans = {number: _plan_of(below) for number, below in bodies.items()} | own
    return tuple(sorted(plans.items()))
