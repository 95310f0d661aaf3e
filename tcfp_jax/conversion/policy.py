"""`Policy`: the recipe of each product and why it was chosen: by rules first, then by known losses and harm.

A product of a small matrix loses to BF16. With "measured", times decide if they are known: the three products of a
layer and the quantization around them, at the layer's own shape on this chip, against the three products of BF16
(`tcfp_jax.explanation.weigh`). `judge` applies a policy to a census.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax

from pallas_kernels.dispatch import device_kind
from pallas_kernels.tuning import is_timed
from tcfp_jax import paths
from tcfp_jax.conversion.census import Census, Place
from tcfp_jax.conversion.evaluate import Plan, plan_of
from tcfp_jax.conversion.report import Choice, Product, Record, Report
from tcfp_jax.conversion.trace import Program
from tcfp_jax.explanation import weigh
from tcfp_jax.recipes import Recipe
from tcfp_jax.recipes import recipe as named_recipe
from tcfp_jax.weights.layout import Weight

Include = Literal["linear", "head", "small", "measured", "layer_norm", "embed"]
Rule = tuple[str, Recipe | str | None] | Callable[[str, Product], Recipe | str | None]
Leaves = Mapping[str, jax.Array | jax.ShapeDtypeStruct]  # parameters by path
Rules = Mapping[str, Recipe | str | None] | Iterable[Rule] | None

# The traffic of its operands bounds a matrix with a side below this, whatever its other side is. Products of 4096 and a
# side of 1024 were measured at 1.19 of BF16's speed for tensorwise, of 768 at 0.99, of 512 at 0.81 (H200,
# benchmarks/results/nvidia-h200/train_step-narrow.json).
_SMALL = 1024
# Least measured gain for which a product is converted: interpolation between measured times may be wrong by as much.
_WORTHWHILE = 1.02
_SWITCHED_OFF = "switched off by to_bf16"


@dataclass(frozen=True)
class Policy:
    """The request of a conversion.

    Attributes:
      recipe: recipe of products that no rule names; None for a model that is not converted, in which only the author's
        own low-precision layers are known.
      rules: pairs of a pattern and a recipe or None, and functions. The first match wins.
      include: groups of products that take `recipe` without a rule.
      off: patterns of layers that run as they were written for now (`to_bf16`).
      devices: number of devices that share the rows of x; measured times are those of one device.
      settled: choices by measured times for the sample inputs, by path; they hold for every number of rows.
    """

    recipe: Recipe | None
    rules: tuple[Rule, ...] = ()
    include: frozenset[str] = frozenset({"linear"})
    off: tuple[str, ...] = ()
    devices: int = 1
    settled: tuple[tuple[str, Choice], ...] = ()

    def choose(self, product: Product) -> Choice:
        """Return the choice for one product.

        >>> big = Product("block/mlp/kernel", (4096, 4096), "dot_general", k=4096, n=4096)
        >>> policy("tcfp12").choose(big).recipe == Recipe()
        True
        >>> policy("tcfp12").choose(dataclasses.replace(big, head=True)).reason
        'output head; include "head" or name it in rules'
        """
        if product.recipe is not None:  # a layer that the model's author gave a recipe
            by_hand = Choice(product.recipe, "low-precision by hand")
            return Choice(None, _SWITCHED_OFF) if self.is_off(product.path) else by_hand
        if self.recipe is None:
            return Choice(None, "float, in a model that is not converted")
        number, chosen = self._rule(product)
        if product.reason:
            return Choice(None, product.reason, number)
        if self.is_off(product.path):
            return Choice(None, _SWITCHED_OFF)
        if number is not None:
            recipe = None if chosen is None else named_recipe(chosen)
            return Choice(recipe, f"rule {_rule_name(self.rules[number])}", number)
        if reason := self._left(product):
            return Choice(None, reason)
        settled = dict(self.settled).get(product.path)
        if settled is not None:
            return settled
        measured = "measured" in self.include and is_timed(device_kind())
        return self._weighed(product) if measured else self._sized(product)

    def _rule(self, product: Product) -> tuple[int | None, Recipe | str | None]:
        for number, rule in enumerate(self.rules):
            if callable(rule):
                if (chosen := rule(product.path, product)) is not None:
                    return number, chosen
            elif finds(rule[0], product.path) or re.search(rule[0], product.scope):
                return number, rule[1]
        return None, None

    def _left(self, product: Product) -> str:
        """Return why a product that could be converted is left alone without a rule, or ""."""
        if product.precision:
            return f"precision={product.precision!r}, which a recipe would override; name it in rules"
        group, kind = ("head", "output head") if product.head else ("linear", "linear")
        return "" if group in self.include else f'{kind}; include "{group}" or name it in rules'

    def _sized(self, product: Product) -> Choice:
        """Choose by the sides of the matrix."""
        side = min(product.k, product.n)
        if "small" in self.include or side >= _SMALL:
            return Choice(self.recipe, "")
        small = f"too small to win: a side of {side}, below {_SMALL}"
        return Choice(None, f'{small}; include "small" or name it in rules')

    def _weighed(self, product: Product) -> Choice:
        """Choose by measured times of the layer at its own shape; the reason says so if size decides instead."""
        assert self.recipe is not None, "a model that is converted has one"
        rows = max(1, product.rows // self.devices)
        found = weigh(rows, product.k, product.n, self.recipe)
        speed = found.speed_over_bf16
        if speed is None:
            sized = self._sized(product)
            return sized if sized.recipe is None else Choice(self.recipe, f"{found.summary}: its size decided")
        why = f"{found.summary} at {rows}x{product.k}x{product.n}"
        return Choice(self.recipe if speed >= _WORTHWHILE else None, why, speed=speed)

    def settle(self, products: Iterable[Product]) -> "Policy":
        """Return the policy with its choices by measured times settled; a path's first product decides.

        Calls with other numbers of rows then choose alike: a weight stays stored as its product reads it.
        """
        if "measured" not in self.include or not is_timed(device_kind()):
            return self
        weighed = [p for p in products if p.recipe is None and not p.reason and not self._left(p)]
        found = {product.path: self._weighed(product) for product in reversed(weighed)}
        return dataclasses.replace(self, settled=tuple(found.items()))

    def is_off(self, path: str) -> bool:
        """Return whether `to_bf16` switched off the layer."""
        return any(finds(pattern, path) for pattern in self.off)

    def switched(self, off: tuple[str, ...]) -> "Policy":
        """Return the policy with other layers off."""
        return dataclasses.replace(self, off=off)


def finds(pattern: str, path: str) -> bool:
    """Return whether a pattern finds a parameter, by its path or its layer's path.

    >>> finds("mlp$", "block/mlp/kernel"), finds("mlp/kernel", "block/mlp/kernel"), finds("norm", "block/mlp/kernel")
    (True, True, False)
    """
    return bool(re.search(pattern, path) or re.search(pattern, path.rpartition("/")[0]))


def policy(recipe: Recipe | str, rules: Rules = None, include: Iterable[str] = ("linear",)) -> Policy:
    """Return a checked policy.

    Raises:
      ValueError: an unknown recipe, a rule that is neither a (regex, recipe) pair nor a function, an unknown group.

    >>> policy("tcfp12", {"mlp": "tensorwise"}).rules
    (('mlp', 'tensorwise'),)
    """
    pairs: Iterable[Any] = rules.items() if isinstance(rules, Mapping) else (rules or ())
    if callable(rules) or isinstance(rules, str):
        pairs = (rules,)
    wanted = (include,) if isinstance(include, str) else tuple(include)
    unknown = sorted(set(wanted) - set(get_args(Include)))
    if unknown:
        raise ValueError(f"include={unknown[0]!r} is unknown; use some of {list(get_args(Include))}")
    groups = frozenset(wanted) | ({"linear"} if "measured" in wanted else set())
    return Policy(named_recipe(recipe), tuple(_checked(rule) for rule in pairs), groups)


def last_blocks(count: int, blocks: int, recipe: Recipe | str | None = "bf16") -> Callable[..., Recipe | str | None]:
    """Return a rule by depth: products of the last `count` of a model's `blocks` take another recipe.

    Use it for FP4 training, which needs its last blocks in a higher precision.

        convert_to_tcfp(model, "nvfp4_training", tokens, rules=[last_blocks(2, 12)])

    The first number in the path of a parameter is the number of its block, counted from 0. Blocks that are scanned are
    one block to a rule.

    Raises:
      ValueError: not 0 < count <= blocks.

    >>> rule = last_blocks(2, 12)
    >>> product = Product("block_10/mlp/kernel", (4, 4), "dot_general")
    >>> rule("block_10/mlp/kernel", product), rule("block_9/mlp/kernel", product)
    ('bf16', None)
    """
    if not 0 < count <= blocks:
        raise ValueError(f"count={count} of blocks={blocks}: some of the blocks are the last ones; use 1 to {blocks}")

    def last(path: str, product: Product) -> Recipe | str | None:
        found = re.search(r"\d+", path)
        return recipe if found and blocks - count <= int(found[0]) < blocks else None

    return last


def by_hand() -> Policy:
    """Return the policy of a model whose author wrote low-precision layers: nothing else takes a recipe.

    >>> by_hand().choose(Product("mlp", (2, 2), "dot_general")).recipe is None
    True
    """
    return Policy(None, (), frozenset())


def _rule_name(rule: Rule) -> str:
    """Return a rule as reports show it.

    >>> _rule_name(("mlp", "tensorwise"))
    "'mlp'"
    """
    return getattr(rule, "__name__", repr(rule)) if callable(rule) else repr(rule[0])


def check_pattern(pattern: str) -> str:
    """Return the pattern, if it is a regular expression.

    Raises:
      ValueError: it is not.
    """
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ValueError(f"{pattern!r} is not a regular expression over paths like 'block_0/mlp': {error}") from error
    return pattern


def _checked(rule: object) -> Rule:
    if callable(rule):
        return rule
    if not isinstance(rule, tuple | list) or len(rule) != 2:
        raise ValueError(f"rule {rule!r} is neither a (regex, recipe) pair nor a function (path, product) -> recipe")
    pattern, chosen = rule
    if chosen is not None:
        named_recipe(chosen)
    if callable(pattern):
        raise ValueError(f"rule {rule!r}: a function returns the recipe itself; pass it without a second value")
    return (check_pattern(pattern), chosen)


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
      rounded: paths of parameters that are rounded to the packed format as they come in.
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

    def settled(self, chosen: Policy) -> tuple[Policy, "Examined"]:
        """Return the policy with its choices by measured times settled, and the decisions of that policy."""
        settled = chosen.settle(self.census.products.values())
        return settled, self.by(settled)


def judge(program: Program, found: Census, leaves: Leaves, chosen: Policy, prefix: str = "") -> Examined:
    """Return the decisions of a policy about a program, from the census of the program."""
    # Rules know a parameter by its path in the whole model, also if a part of the model is called by itself.
    named = found.products
    if prefix:
        named = {place: dataclasses.replace(p, path=paths.join(prefix, p.path)) for place, p in named.items()}
    choices = {place: chosen.choose(product) for place, product in named.items()}
    on = chosen.switched(()) if chosen.off else chosen  # a layer that is switched off keeps its state
    recipes = {place: (on.choose(product) if chosen.off else choices[place]).recipe for place, product in named.items()}
    weights: dict[str, Weight] = {}
    # A weight is stored as its first converted product reads it. Products that stay float read the float weight, too.
    float_reads = {path for path, primitives in found.reads.items() if primitives}
    float_reads |= {product.path for place, product in found.products.items() if recipes[place] is None}
    for place, product in found.products.items():
        recipe = recipes[place]
        if recipe is not None and recipe.stored is not None and product.layout is not None:
            reads: Literal["lookup", "none"] = "lookup" if product.path in float_reads else "none"
            weights.setdefault(product.path, Weight(recipe, product.layout, reads))

    steps: dict[Place, Recipe | str] = {}
    converted: list[Record] = []
    skipped: list[Record] = []
    for place, product in found.products.items():
        choice, weight = choices[place], weights.get(product.path)
        stored = weight is not None and (weight.recipe, weight.layout) == (choice.recipe, product.layout)
        (skipped if choice.recipe is None else converted).append(Record(product, choice, stored))
        if choice.recipe is not None and product.recipe is None:
            steps[place] = choice.recipe
    lookups = found.lookups if "embed" in chosen.include else {}
    steps |= dict.fromkeys(lookups, "packed")
    gains = _gains(found, leaves) if "layer_norm" in chosen.include else frozenset()
    matched = {choice.rule for choice in choices.values()}
    unmatched = tuple(_rule_name(rule) for number, rule in enumerate(chosen.rules) if number not in matched)
    report = Report(tuple(converted), tuple(skipped), unmatched, tuple(sorted({*lookups.values(), *gains})))
    return Examined(program, found, leaves, prefix, plan_of(steps), report, weights, gains)


def _gains(found: Census, leaves: Leaves) -> frozenset[str]:
    """Return vectors that multiply an input, and the other vectors of their layers, which are added to one."""
    vectors = {path for path, leaf in leaves.items() if len(leaf.shape) == 1}
    gains = {path for path in vectors if "mul" in found.reads.get(path, ())}
    layers = {path.rpartition("/")[0] for path in gains}
    return frozenset(gains | {path for path in vectors if path.rpartition("/")[0] in layers and "/" in path})
