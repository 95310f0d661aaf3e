"""`Policy`: which recipe a layer takes, and why: rules first, then what is known to lose or to harm."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from tcfp_jax.recipes import Recipe
from tcfp_jax.recipes import recipe as named_recipe

Include = Literal["linear", "head", "small", "layer_norm", "embed"]
Rule = tuple[str, Recipe | str | None] | Callable[[str, Any], Recipe | str | None]

# benchmarks/train_step, H200: a kernel of 1024 x 4096 is the smallest that was measured to win (1.13 for tcfp12_fast);
# below 1024 x 1024 a step is launches and quantization traffic.
SMALL = 1024 * 1024
HEAD = re.compile(
    r"((lm|mlm|output|vocab|classification)_?)?head|logits(_dense)?|classifier|decoder|score|seq_relationship|"
    r"qa_outputs|output_(layer|projection)|unembed(ding)?"
)

SWITCHED_OFF = "switched off by to_bf16"
OWN = "low-precision by hand"


@dataclass(frozen=True)
class Choice:
    """A layer's recipe or None, why, and which rule said so."""

    recipe: Recipe | None
    reason: str
    rule: int | None = None


@dataclass(frozen=True)
class Policy:
    """What `convert_to_tcfp` was asked for.

    Attributes:
      recipe: of layers that no rule names; None for a model that is not converted, only its author's own
        low-precision layers are known then.
      rules: (pattern, recipe or None) pairs and functions, first match wins.
      include: the groups of layers that take `recipe` without a rule.
      off: patterns of layers that run Flax's own code for now (`to_bf16`).
    """

    recipe: Recipe | None
    rules: tuple[Any, ...]
    include: frozenset[str]
    off: tuple[str, ...] = ()

    def choose(self, path: str, module: Any, group: str, size: int) -> Choice:
        """The choice for one layer; `size` is the number of its kernel's values.

        >>> policy("tcfp12").choose("block/mlp", None, "linear", 4096 * 4096).recipe == Recipe()
        True
        >>> policy("tcfp12").choose("lm_head", None, "linear", 4096 * 4096).reason
        'output head; include "head" or name it in rules'
        """
        if self.recipe is None:
            return Choice(None, "float, in a model that is not converted")
        if self.is_off(path):
            return Choice(None, SWITCHED_OFF)
        for number, rule in enumerate(self.rules):
            matched, chosen = _match(rule, path, module)
            if matched:
                reason = f"rule {rule_name(rule)}"
                return Choice(None if chosen is None else named_recipe(chosen), reason, number)
        if group == "linear" and HEAD.fullmatch(path.rsplit("/", 1)[-1]):
            group = "head"
        if group not in self.include:
            what = {"head": "output head", "layer_norm": "LayerNorm", "embed": "embedding"}.get(group, group)
            return Choice(None, f'{what}; include "{group}" or name it in rules')
        if size < SMALL and "small" not in self.include and group in ("linear", "head"):
            return Choice(None, f'too small to win: {size} values of {SMALL}; include "small" or name it in rules')
        return Choice(self.recipe, "")

    def is_off(self, path: str) -> bool:
        """Whether `to_bf16` switched off the layer."""
        return any(re.search(pattern, path) for pattern in self.off)


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
    return Policy(named_recipe(recipe), tuple(_checked(rule) for rule in pairs), frozenset(wanted))


def by_hand() -> Policy:
    """Of a model whose author wrote low-precision layers: nothing else takes a recipe.

    >>> by_hand().choose("mlp", None, "linear", 1).recipe is None
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
        raise ValueError(f"rule {rule!r} is neither a (regex, recipe) pair nor a function (path, module) -> recipe")
    pattern, chosen = rule
    if chosen is not None:
        named_recipe(chosen)
    if callable(pattern):
        raise ValueError(f"rule {rule!r}: a function returns the recipe itself; pass it without a second value")
    return (check_pattern(pattern), chosen)


def _match(rule: Any, path: str, module: Any) -> tuple[bool, Any]:
    if callable(rule):
        chosen = rule(path, module)
        return chosen is not None, chosen
    return re.search(rule[0], path) is not None, rule[1]
