"""`Policy`: which recipe a product takes, and why: rules first, then what is known to lose or to harm.

A product loses where its matrix is small. With "measured" that is not guessed where it is known: it loses where its
three products and the quantization around them were measured to take longer on this chip, at its own shape, than the
three products of BF16 do (`tcfp_jax.explanation.weigh`).
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from pallas_kernels.dispatch import device_kind
from pallas_kernels.tuning import is_timed, written
from tcfp_jax.conversion.census import Product
from tcfp_jax.explanation import weigh
from tcfp_jax.recipes import Recipe
from tcfp_jax.recipes import recipe as named_recipe

Include = Literal["linear", "head", "small", "measured", "layer_norm", "embed"]
Rule = tuple[str, Recipe | str | None] | Callable[[str, Product], Recipe | str | None]

# A matrix with a side below this is bound by the traffic of its operands, whatever its other side is. Products of 4096
# and a side of 1024 were measured at 1.19 of BF16's speed for tensorwise, of 768 at 0.99, of 512 at 0.81 (H200,
# benchmarks/results/nvidia-h200/train_step-narrow.json).
SMALL = 1024
# The least gain by measured times for which a product is converted: what interpolation between them may be wrong by.
WORTHWHILE = 1.02

SWITCHED_OFF = "switched off by to_bf16"
OWN = "low-precision by hand"


@dataclass(frozen=True)
class Choice:
    """A product's recipe or None, why, which rule said so, and its speed over BF16 where that decided."""

    recipe: Recipe | None
    reason: str
    rule: int | None = None
    speed: float | None = None


@dataclass(frozen=True)
class Policy:
    """What a conversion was asked for.

    Attributes:
      recipe: of products that no rule names; None for a model that is not converted, only its author's own
        low-precision layers are known then.
      rules: (pattern, recipe or None) pairs and functions, first match wins.
      include: the groups of products that take `recipe` without a rule.
      off: patterns of layers that run as they were written for now (`to_bf16`).
      devices: how many share the rows of x; measured are those of one.
      settled: by path, choices by measured times that hold whatever the number of rows is: those of sample inputs.
    """

    recipe: Recipe | None
    rules: tuple[Any, ...] = ()
    include: frozenset[str] = frozenset({"linear"})
    off: tuple[str, ...] = ()
    devices: int = 1
    settled: tuple[tuple[str, Choice], ...] = ()

    def choose(self, product: Product) -> Choice:
        """The choice for one product.

        >>> big = Product("block/mlp/kernel", (4096, 4096), "dot_general", k=4096, n=4096)
        >>> policy("tcfp12").choose(big).recipe == Recipe()
        True
        >>> policy("tcfp12").choose(dataclasses.replace(big, head=True)).reason
        'output head; include "head" or name it in rules'
        """
        if product.recipe is not None:  # a layer that the model's author gave a recipe
            return Choice(None, SWITCHED_OFF) if self.is_off(product.path) else Choice(product.recipe, OWN)
        if self.recipe is None:
            return Choice(None, "float, in a model that is not converted")
        if product.reason:
            return Choice(None, product.reason, self._rule(product)[0])
        if self.is_off(product.path):
            return Choice(None, SWITCHED_OFF)
        number, chosen = self._rule(product)
        if number is not None:
            recipe = None if chosen is None else named_recipe(chosen)
            return Choice(recipe, f"rule {rule_name(self.rules[number])}", number)
        if reason := self._left(product):
            return Choice(None, reason)
        settled = dict(self.settled).get(product.path)
        if settled is not None:
            return settled
        measured = "measured" in self.include and is_timed(device_kind())
        return self._weighed(product) if measured else self._sized(product)

    def _rule(self, product: Product) -> tuple[int | None, Any]:
        for number, rule in enumerate(self.rules):
            if callable(rule):
                if (chosen := rule(product.path, product)) is not None:
                    return number, chosen
            elif finds(rule[0], product.path) or re.search(rule[0], product.scope):
                return number, rule[1]
        return None, None

    def _left(self, product: Product) -> str:
        """Why a product that could be converted is left alone without a rule, or ""."""
        if product.precision:
            return f"precision={product.precision!r}, which a recipe would override; name it in rules"
        group = "head" if product.head else "linear"
        if group not in self.include:
            what = "output head" if product.head else "linear"
            return f'{what}; include "{group}" or name it in rules'
        return ""

    def _sized(self, product: Product) -> Choice:
        """By the sides of the matrix."""
        side = min(product.k, product.n)
        if "small" not in self.include and side < SMALL:
            return Choice(
                None, f'too small to win: a side of {side}, below {SMALL}; include "small" or name it in rules'
            )
        return Choice(self.recipe, "")

    def _weighed(self, product: Product) -> Choice:
        """By measured times of the layer at its own shape, or by its size where it was not timed, which it says."""
        assert self.recipe is not None, "a model that is converted has one"
        rows = max(1, product.rows // self.devices)
        found = weigh(rows, product.k, product.n, self.recipe)
        speed, why = found.speed_over_bf16, f"{found.summary} at {written((rows, product.k, product.n))}"
        if speed is None:
            sized = self._sized(product)
            return sized if sized.recipe is None else Choice(self.recipe, f"{found.summary}: its size decided")
        return Choice(self.recipe if speed >= WORTHWHILE else None, why, speed=speed)

    def settle(self, products: Iterable[Product]) -> "Policy":
        """The same, with what measured times say of these products settled by path; a path's first product decides.

        Calls with other rows then choose alike: a weight is stored as its product was to read it.
        """
        if "measured" not in self.include or not is_timed(device_kind()):
            return self
        weighed = [p for p in products if p.recipe is None and not p.reason and not self._left(p)]
        found = {product.path: self._weighed(product) for product in reversed(weighed)}
        return dataclasses.replace(self, settled=tuple(found.items()))

    def is_off(self, path: str) -> bool:
        """Whether `to_bf16` switched off the layer."""
        return any(finds(pattern, path) for pattern in self.off)

    def switched(self, off: tuple[str, ...]) -> "Policy":
        """The same with other layers off."""
        return dataclasses.replace(self, off=off)


def finds(pattern: str, path: str) -> bool:
    """Whether a pattern finds a parameter, by its path or by that of its layer.

    >>> finds("mlp$", "block/mlp/kernel"), finds("mlp/kernel", "block/mlp/kernel"), finds("norm", "block/mlp/kernel")
    (True, True, False)
    """
    return bool(re.search(pattern, path) or re.search(pattern, path.rpartition("/")[0]))


def policy(recipe: Recipe | str, rules: Any = None, include: Iterable[str] = ("linear",)) -> Policy:
    """A checked policy.

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


def last_blocks(count: int, blocks: int, recipe: Recipe | str | None = "bf16") -> Callable[[str, Product], Any]:
    """A rule by depth: products of the last `count` of a model's `blocks` take another recipe, as in FP4 training.

        convert_to_tcfp(model, "nvfp4_training", tokens, rules=[last_blocks(2, 12)])

    A block is known by the first number in the path of its parameters, counted from 0. Blocks that are scanned are one
    block to a rule.

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
    """Of a model whose author wrote low-precision layers: nothing else takes a recipe.

    >>> by_hand().choose(Product("mlp", (2, 2), "dot_general")).recipe is None
    True
    """
    return Policy(None, (), frozenset())


def rule_name(rule: Any) -> str:
    """A rule as reports show it.

    >>> rule_name(("mlp", "tensorwise"))
    "'mlp'"
    """
    return getattr(rule, "__name__", repr(rule)) if callable(rule) else repr(rule[0])


def check_pattern(pattern: Any) -> str:
    """The pattern, if it is a regular expression.

    Raises:
      ValueError: it is not.
    """
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ValueError(f"{pattern!r} is not a regular expression over paths like 'block_0/mlp': {error}") from error
    return pattern


def _checked(rule: Any) -> Any:
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
