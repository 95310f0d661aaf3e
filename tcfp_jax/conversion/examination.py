"""`Examined`: a traced function, and what is to be done with it: the census and a policy together."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tcfp_jax import paths
from tcfp_jax.conversion.arrays import Result
from tcfp_jax.conversion.census import Census, Place, Product
from tcfp_jax.conversion.evaluation import Plan, plan_of
from tcfp_jax.conversion.policy import Choice, Policy, rule_name
from tcfp_jax.conversion.report import Record, Report
from tcfp_jax.weights.layout import Weight


@dataclass(frozen=True)
class Examined:
    """A traced function: its program, and what is to be done with it.

    Attributes:
      jaxpr: the closed jaxpr of its arrays.
      out: its result: shapes, and what is not an array.
      census: of the program.
      leaves: the parameters, by path.
      prefix: of their paths, where a part of a model is called by itself.
      plan: for the evaluation.
      report: of its products.
      weights: those that `error_feedback` can store, by path.
      rounded: parameters to round to the packed format as they come in.
    """

    jaxpr: Any
    out: Result
    census: Census
    leaves: Mapping[str, Any]
    prefix: str
    plan: Plan
    report: Report
    weights: dict[str, Weight]
    rounded: frozenset[str]

    def by(self, chosen: Policy) -> "Examined":
        """The same program by another policy."""
        return judge(self.jaxpr, self.out, self.census, self.leaves, chosen, self.prefix)

    def settled(self, chosen: Policy) -> tuple[Policy, "Examined"]:
        """(the policy, with what measured times say of these products settled for every call; the program by it)."""
        settled = chosen.settle(self.census.products.values())
        return settled, self.by(settled)


def judge(jaxpr: Any, out: Result, found: Census, leaves: Mapping[str, Any], chosen: Policy, prefix: str) -> Examined:
    """What a policy does to a program, of which this census was taken."""
    # Rules know a parameter by its path in the whole model, also where a part of the model is called by itself.
    named = {place: dataclasses.replace(p, path=paths.join(prefix, p.path)) for place, p in found.products.items()}
    choices = {place: chosen.choose(product) for place, product in named.items()}
    on = chosen.switched(())  # what is switched off keeps its state
    weights = _weights(found, {place: on.choose(product).recipe for place, product in named.items()})
    records = [
        Record(product, choices[place], _serves(weights.get(product.path), choices[place], product))
        for place, product in found.products.items()
    ]  # fmt: skip
    steps: dict[Place, Any] = {
        place: choice.recipe
        for place, choice in choices.items()
        if choice.recipe is not None and found.products[place].recipe is None
    }
    lookups = {place: path for place, path in found.lookups.items() if "embed" in chosen.include}
    steps |= dict.fromkeys(lookups, "packed")
    gains = _gains(found, leaves) if "layer_norm" in chosen.include else frozenset()
    matched = {choice.rule for choice in choices.values()}
    unmatched = tuple(rule_name(rule) for number, rule in enumerate(chosen.rules) if number not in matched)
    report = Report(
        tuple(record for record in records if record.recipe is not None),
        tuple(record for record in records if record.recipe is None),
        unmatched, tuple(sorted({*lookups.values(), *gains})),
    )  # fmt: skip
    return Examined(jaxpr, out, found, leaves, prefix, plan_of(steps), report, weights, gains)


def _serves(weight: Weight | None, choice: Choice, product: Product) -> bool:
    """Whether a product reads the weight as it is stored."""
    return weight is not None and (weight.recipe, weight.layout) == (choice.recipe, product.layout)


def _weights(found: Census, recipes: Mapping[Place, Any]) -> dict[str, Weight]:
    """How each parameter is stored: as its first converted product reads it."""
    weights: dict[str, Weight] = {}
    # Products that stay float read the float weight, too.
    float_reads = {path for path, kinds in found.reads.items() if kinds}
    float_reads |= {product.path for place, product in found.products.items() if recipes[place] is None}
    for place, product in found.products.items():
        recipe = recipes[place]
        if recipe is not None and recipe.stored is not None and product.layout is not None:
            reads: Any = "lookup" if product.path in float_reads else "none"
            weights.setdefault(product.path, Weight(recipe, product.layout, reads))
    return weights


def _gains(found: Census, leaves: Mapping[str, Any]) -> frozenset[str]:
    """Vectors that multiply an input, and vectors of the same layer that are added to one."""
    vectors = {path for path, leaf in leaves.items() if len(leaf.shape) == 1}
    gains = {path for path in vectors if "mul" in found.reads.get(path, ())}
    layers = {path.rpartition("/")[0] for path in gains}
    return frozenset(gains | {path for path in vectors if path.rpartition("/")[0] in layers and "/" in path})
