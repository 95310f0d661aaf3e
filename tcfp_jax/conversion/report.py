"""`judge` applies a policy to a census: the plan of the evaluation, the weights to
store, and the `Report`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
from jax.extend import core

from tcfp_jax import paths
from tcfp_jax.conversion.bodies import Plan
from tcfp_jax.conversion.census import Census
from tcfp_jax.conversion.evaluate import LOOKUP
from tcfp_jax.conversion.factors import CLOSED
from tcfp_jax.conversion.policy import Policy, Record
from tcfp_jax.conversion.views import Place
from tcfp_jax.paths import PyTree
from tcfp_jax.recipes import Recipe
from tcfp_jax.weights.layout import Weight

Leaves = Mapping[str, jax.Array | jax.ShapeDtypeStruct]  # parameters by path


@dataclass(frozen=True)
class Report:
    """The products of a model's parameters. Print it to see a table.

    Attributes:
      converted, skipped: a `Record` for each product.
      unmatched_rules: rules that no product matched.
      rounded: paths of parameters that are rounded to the packed format
        (`include="layer_norm"`).
    """

    converted: tuple[Record, ...]
    skipped: tuple[Record, ...]
    unmatched_rules: tuple[str, ...] = ()
    rounded: tuple[str, ...] = ()

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
        """True if measured times decided about a product: a model in which nothing pays
        runs unchanged.
        """
        return any(
            record.speed is not None for record in (*self.converted, *self.skipped)
        )

    def __str__(self) -> str:
        """The table."""
        lines = [
            f"{len(self.converted)} products converted, {len(self.skipped)} skipped"
        ]
        if not (
            self.converted
            or self.rounded
            or self.weighed
            or any(r.is_off for r in self.skipped)
        ):
            lines[0] += ": nothing is converted, and a call raises"
        lines += [
            *map(str, self.converted),
            *(f"skipped: {record}" for record in self.skipped),
        ]
        for head in (
            record.product
            for record in (*self.converted, *self.skipped)
            if record.product.softmax
        ):
            size = 2 * head.rows * head.n / 1e6
            lines += [
                f"a softmax follows {head.path}: losses.cross_entropy saves its logits,"
                f" {size:,.3g} MB in BF16"
            ]
        lines += [f"rounded to the packed format: {path}" for path in self.rounded]
        lines += [f"rule that matched nothing: {rule}" for rule in self.unmatched_rules]
        return "\n".join(lines)

    def check_strict(self) -> None:
        """Raise a ValueError if a product was left alone that no rule names, or if a
        rule matches nothing.
        """
        if self.impossible:
            raise ValueError(
                f"strict=True: {len(self.impossible)} products of parameters have no"
                " low-precision form; leave them "
                'alone by rules, such as {"patch":'
                f" None}}:{_by_reason(self.impossible)}"
            )
        if self.unmatched_rules:
            raise ValueError(
                f"strict=True: no product matches the rule {self.unmatched_rules[0]};"
                " survey lists them"
            )


class Program(NamedTuple):
    """A traced function: `rebuild` makes its result from arrays like `outputs` and the
    Python values of the trace.
    """

    jaxpr: core.ClosedJaxpr
    outputs: list[jax.ShapeDtypeStruct]
    rebuild: Callable[[Sequence[jax.Array | jax.ShapeDtypeStruct]], PyTree]


@dataclass(frozen=True)
class Examined:
    """A traced function and the decisions about it.

    Attributes:
      program: the trace.
      census: the products of the program.
      leaves: the parameters by path.
      prefix: path of the function's part of a model, if a part is called by itself.
      plan: the plan of the evaluation.
      report: the report of the products.
      weights: the weights that `error_feedback` can store, by path.
      rounded: paths of parameters that are rounded to the packed format as they come
        in.
    """

    program: Program
    census: Census
    leaves: Leaves
    prefix: str
    plan: Plan
    report: Report
    weights: dict[str, Weight]
    rounded: frozenset[str]

    def by(self, chosen: Policy) -> "Examined":
        """Return the decisions of another policy about the same program."""
        return judge(self.program, self.census, self.leaves, chosen, self.prefix)

    def check_converted(self, name: str) -> None:
        """Raise a ValueError if nothing is converted, although no measured time advised
        against it.
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
    """Return lines for a message: each reason, and below it a product a line."""
    text = ""
    for reason in dict.fromkeys(record.reason for record in records):
        of = [
            f"{r.product.path or '(root)'} {list(r.product.shape)}"
            for r in records
            if r.reason == reason
        ]
        text += f"\n  {reason}" + "".join(f"\n    {one}" for one in of[:8])
        text += f"\n    and {len(of) - 8} more" if len(of) > 8 else ""
    return text


def judge(
    program: Program, found: Census, leaves: Leaves, chosen: Policy, prefix: str = ""
) -> Examined:
    """Return the decisions of a policy about a program, from the census of the
    program.
    """
    # Rules know a parameter by its path in the whole model, also if a part of the model
    # is called by itself.
    products = found.products | (found.lookups if "embed" in chosen.include else {})
    named = products
    if prefix:
        named = {
            place: dataclasses.replace(p, path=paths.join(prefix, p.path))
            for place, p in named.items()
        }
    choices = {place: chosen.choose(product) for place, product in named.items()}
    # a layer that is switched off keeps its state
    on = dataclasses.replace(chosen, off=())
    recipes = {
        place: (on.choose(product) if chosen.off else choices[place]).recipe
        for place, product in named.items()
    }
    weights: dict[str, Weight] = {}
    # A weight is stored as its first converted product reads it. Products that stay
    # float read the float weight, too.
    float_reads = {path for path, primitives in found.reads.items() if primitives}
    float_reads |= {
        product.path for place, product in products.items() if recipes[place] is None
    }
    if "embed" not in chosen.include:
        float_reads |= {lookup.path for lookup in found.lookups.values()}
    for place, product in products.items():
        recipe = recipes[place]
        table = weights.get(product.path) if place in found.lookups else None
        if (
            table is not None
            and product.layout is not None
            and table.layout.stack != product.layout.stack
        ):
            weights[product.path] = dataclasses.replace(table, float_reads="lookup")
        elif place in found.lookups and product.path in float_reads:
            continue  # nothing would read its stored form
        elif (
            recipe is not None
            and recipe.stored is not None
            and product.layout is not None
        ):
            reads: Literal["lookup", "none"] = (
                "lookup" if product.path in float_reads else "none"
            )
            weights.setdefault(product.path, Weight(recipe, product.layout, reads))

    steps: dict[Place, Recipe | str] = {}
    converted: list[Record] = []
    skipped: list[Record] = []
    for place, product in products.items():
        choice, weight = choices[place], weights.get(product.path)
        if place in found.lookups and choice.recipe is not None:
            if weight is None or weight.float_reads == "lookup":
                choice = dataclasses.replace(
                    choice,
                    recipe=None,
                    reason="float: other code reads the table's floats",
                )
            else:
                steps[place] = LOOKUP
                converted.append(choice)
                continue
        stored = weight is not None and (weight.recipe, weight.layout) == (
            choice.recipe,
            product.layout,
        )
        record = dataclasses.replace(choice, product=product, stored=stored)
        (skipped if choice.recipe is None else converted).append(record)
        if choice.recipe is not None and product.recipe is None:
            steps[place] = choice.recipe
    gains = _gains(found, leaves) if "layer_norm" in chosen.include else frozenset()
    unused = tuple(
        repr(pattern) for pattern in chosen.inline if pattern not in found.opened
    )
    report = Report(
        tuple(converted),
        tuple(skipped),
        chosen.unmatched(choices.values()) + unused,
        tuple(sorted(gains)),
    )
    return Examined(
        program, found, leaves, prefix, _plan_of(steps), report, weights, gains
    )


def _gains(found: Census, leaves: Leaves) -> frozenset[str]:
    """Return vectors that multiply an input, and the other vectors of their layers,
    which are added to one.
    """
    vectors = {path for path, leaf in leaves.items() if len(leaf.shape) == 1}
    gains = {path for path in vectors if "mul" in found.reads.get(path, ())}
    layers = {path.rpartition("/")[0] for path in gains}
    return frozenset(
        gains
        | {
            path
            for path in vectors
            if path.rpartition("/")[0] in layers and "/" in path
        }
    )


def _plan_of(steps: Mapping[tuple[int, ...], Recipe | str]) -> Plan:
    """Return the plan for steps by place.

    >>> _plan_of({(3,): "packed", (1, 0): "packed"})
    ((1, ((0, 'packed'),)), (3, 'packed'))
    """
    numbers = sorted({place[0] for place in steps})
    inner = lambda number: {
        place[1:]: step for place, step in steps.items() if place[0] == number
    }
    return tuple(
        (n, steps[n,] if (n,) in steps else _plan_of(inner(n))) for n in numbers
    )
