"""`Policy`: the recipe of each product and why it was chosen: by rules first, then by
known losses and harm.

A product of a small matrix loses to BF16. With "measured", times decide if they are
known: the three products of a layer and the quantization around them, at the layer's
own shape on this chip, against the three products of BF16 (`tcfp_jax.explain`). `judge`
applies a policy to a census.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from pallas_kernels.dispatch import device_kind, surroundings
from pallas_kernels.operands import Tensor
from pallas_kernels.specs import has_explicit_axes
from pallas_kernels.tuning import is_timed, load
from tcfp_jax.conversion.factors import GROUPED, Product
from tcfp_jax.explanation import Explanation, explain
from tcfp_jax.products.grouped import unsupported
from tcfp_jax.recipes import Recipe, describe
from tcfp_jax.recipes import recipe as named_recipe

Include = Literal["linear", "head", "small", "measured", "layer_norm", "embed"]
Rule = tuple[str, Recipe | str | None] | Callable[[str, Product], Recipe | str | None]
Rules = Mapping[str, Recipe | str | None] | Iterable[Rule] | None

# The traffic of its operands bounds a matrix with a side below this, whatever its other
# side is. Products of 4096 and a side of 1024 were measured at 1.19 of BF16's speed for
# tensorwise, of 768 at 0.99, of 512 at 0.81 (H200,
# benchmarks/results/nvidia-h200/train_step-narrow.json).
_SMALL = 1024
# Both passes of experts of 2048 x 768 have 1.22 of the BF16 kernel's speed with
# quantization, and far more of that of XLA's `ragged_dot`, which is left otherwise
# (benchmarks/results/nvidia-h100-80gb-hbm3/grouped-up.json).
_SMALL_OF_EXPERTS = 768
# Least measured gain for which a product is converted: interpolation between measured
# times may be wrong by as much.
WORTHWHILE = 1.02
_SWITCHED_OFF = "switched off by to_bf16"


@dataclass(frozen=True)
class Record:
    """The decision about one product.

    Attributes:
      product: the product; its `path` is the path of the parameter.
      recipe: the recipe, or None to leave the product alone.
      reason: why the product was left alone, the rule that chose, or the measured
        speed.
      rule: number of the rule that decided.
      speed: measured speed over BF16, if it decided.
      stored: whether the product reads the stored weight. A second product of the same
        weight may need another form.
    """

    product: Product
    recipe: Recipe | None
    reason: str = ""
    rule: int | None = None
    speed: float | None = None
    stored: bool = True

    @property
    def weight_path(self) -> str:
        """Path of the parameter."""
        return self.product.path

    @property
    def is_off(self) -> bool:
        """True if `to_bf16` switched off the layer."""
        return self.reason == _SWITCHED_OFF

    @property
    def path(self) -> str:
        """Path of the layer: the path of the parameter without the parameter's own
        name.
        """
        return self.product.path.rpartition("/")[0]

    def __str__(self) -> str:
        """One line of a report."""
        if self.recipe is None:
            return f"{self.product} {self.reason}"
        notes = [self.reason] if self.reason else []
        if self.recipe.stored is not None and not self.stored:
            why = "the stored form of its weight is another one"
            if self.product.layout is None:
                why = (
                    "its weight is a part of a parameter (a slice, or a device's in"
                    " shard_map) without a stored form"
                )
            notes.append(f"quantized at each use: {why}")
        return f"{self.product} {describe(self.recipe)}" + (
            f" ({'; '.join(notes)})" if notes else ""
        )


@dataclass(frozen=True)
class Policy:
    """The request of a conversion.

    Attributes:
      recipe: recipe of products that no rule names; None for a model that is not
        converted, in which only the author's own low-precision layers are known.
      rules: pairs of a pattern and a recipe or None, and functions. The first match
        wins.
      include: groups of products that take `recipe` without a rule.
      off: patterns of layers that run as they were written for now (`to_bf16`).
      devices: number of devices that share the rows of x; measured times are those of
        one device.
      inline: patterns of weights or scopes whose functions with a derivative of their
        own are opened.
      settled: choices by measured times for the sample inputs, by path; they hold for
        every number of rows.
    """

    recipe: Recipe | None
    rules: tuple[Rule, ...] = ()
    include: frozenset[str] = frozenset({"linear"})
    off: tuple[str, ...] = ()
    devices: int = 1
    inline: tuple[str, ...] = ()
    settled: tuple[tuple[str, Record], ...] = ()

    def choose(self, product: Product) -> Record:
        """Return the choice for one product.

        >>> big = Product("block/mlp/kernel", (4096, 4096), "dot_general", k=4096, n=4096)
        >>> policy("tcfp12").choose(big).recipe == Recipe()
        True
        >>> policy("tcfp12").choose(dataclasses.replace(big, head=True)).reason
        'output head; include=("linear", "head"), or name it in rules'
        """
        if product.recipe is not None:  # a layer that the model's author gave a recipe
            by_hand = Record(product, product.recipe, "low-precision by hand")
            return (
                Record(product, None, _SWITCHED_OFF)
                if self.is_off(product.path)
                else by_hand
            )
        if self.recipe is None:
            return Record(product, None, "float, in a model that is not converted")
        number, chosen = self._rule(product)
        if product.reason:
            return Record(product, None, product.reason, number)
        if self.is_off(product.path):
            return Record(product, None, _SWITCHED_OFF)
        if number is not None:
            recipe = None if chosen is None else named_recipe(chosen)
            return _storable(
                Record(
                    product, recipe, f"rule {_rule_name(self.rules[number])}", number
                )
            )
        if product.primitive == "gather":
            return _storable(Record(product, self.recipe))
        if reason := self._left(product):
            return Record(product, None, reason)
        settled = dict(self.settled).get(product.path)
        if settled is not None:
            return dataclasses.replace(settled, product=product)
        measured = "measured" in self.include and is_timed(device_kind())
        return _storable(self._weighed(product) if measured else self._sized(product))

    def _rule(self, product: Product) -> tuple[int | None, Recipe | str | None]:
        for number, rule in enumerate(self.rules):
            if callable(rule):
                if (chosen := rule(product.path, product)) is not None:
                    return number, chosen
            elif finds(rule[0], product.path) or re.search(rule[0], product.scope):
                return number, rule[1]
        return None, None

    def _left(self, product: Product) -> str:
        """Return why a product that could be converted is left alone without a rule, or
        "".
        """
        if product.precision:
            return (
                f"precision={product.precision!r}, which a recipe would override; name"
                " it in rules"
            )
        group, kind = ("head", "output head") if product.head else ("linear", "linear")
        return "" if group in self.include else f"{kind}; {self._with(group)}"

    def _with(self, group: str) -> str:
        """Return the repair of a product that is left alone: the whole `include` that
        converts it.
        """
        groups = tuple(
            name for name in get_args(Include) if name in self.include or name == group
        )
        return f"include={groups!r}, or name it in rules".replace("'", '"')

    def _sized(self, product: Product) -> Record:
        """Choose by the sides of the matrix."""
        side, least = (
            min(product.k, product.n),
            _SMALL_OF_EXPERTS if product.primitive == GROUPED else _SMALL,
        )
        if "small" in self.include or side >= least:
            return Record(product, self.recipe)
        return Record(
            product,
            None,
            f"too small to win: a side of {side}, below {least}; {self._with('small')}",
        )

    def _weighed(self, product: Product) -> Record:
        """Choose by measured times of the layer at its own shape; the reason says so if
        size decides instead.
        """
        assert self.recipe is not None, "a model that is converted has one"
        if product.primitive == GROUPED:  # its times are not those of one matrix
            return self._sized(product)
        rows = max(1, product.rows // self.devices)
        around = (surroundings(), load(), has_explicit_axes())
        found = _weighed(rows, product.k, product.n, self.recipe, around)
        speed = found.speed_over_bf16
        if speed is None:
            sized = self._sized(product)
            return (
                sized
                if sized.recipe is None
                else Record(product, self.recipe, f"{found.summary}: its size decided")
            )
        why = f"{found.summary} at {rows}x{product.k}x{product.n}"
        return Record(
            product, self.recipe if speed >= WORTHWHILE else None, why, speed=speed
        )

    def settle(self, products: Iterable[Product]) -> "Policy":
        """Return the policy with its choices by measured times settled; a path's first
        product decides.

        Calls with other numbers of rows then choose alike: a weight stays stored as its
        product reads it.
        """
        if "measured" not in self.include or not is_timed(device_kind()):
            return self
        weighed = [
            p
            for p in products
            if p.recipe is None and not p.reason and not self._left(p)
        ]
        found = {product.path: self._weighed(product) for product in reversed(weighed)}
        return dataclasses.replace(self, settled=tuple(found.items()))

    def opens(self, path: str, scope: str) -> str | None:
        """Return the first pattern of `inline` that finds a weight or a scope, or
        None.
        """
        return next(
            (
                pattern
                for pattern in self.inline
                if finds(pattern, path) or re.search(pattern, scope)
            ),
            None,
        )

    def unmatched(self, choices: Iterable[Record]) -> tuple[str, ...]:
        """Return the rules, as reports show them, that decided none of these
        choices.
        """
        matched = {choice.rule for choice in choices}
        return tuple(
            _rule_name(rule)
            for number, rule in enumerate(self.rules)
            if number not in matched
        )

    def is_off(self, path: str) -> bool:
        """Return whether `to_bf16` switched off the layer."""
        return any(finds(pattern, path) for pattern in self.off)


def _storable(record: Record) -> Record:
    """Return the choice for rows that are looked up, experts or a head with its loss,
    if its recipe can serve it.
    """
    recipe, primitive = record.recipe, record.product.primitive
    if recipe is not None and primitive == GROUPED and (why := unsupported(recipe)):
        return dataclasses.replace(record, recipe=None, reason=why)
    if recipe is None or primitive not in ("gather", "cross_entropy"):
        return record
    if primitive == "gather":
        fits, why = (
            recipe.stored and isinstance(recipe.scaling, Tensor),
            "stores no table with one scale",
        )
    else:
        fits, why = recipe.fp4 is None, "has no head with its loss"
    return (
        record
        if fits
        else dataclasses.replace(
            record, recipe=None, reason=f"{describe(recipe)} {why}"
        )
    )


# The policy of a model whose author wrote low-precision layers: nothing else takes a
# recipe.
BY_HAND = Policy(None, (), frozenset())


def finds(pattern: str, path: str) -> bool:
    """Return whether a pattern finds a parameter, by its path or its layer's path.

    Raises:
      ValueError: the pattern is not a regular expression.

    >>> finds("mlp$", "block/mlp/kernel"), finds("mlp/kernel", "block/mlp/kernel"), finds("norm", "block/mlp/kernel")
    (True, True, False)
    """
    try:
        return bool(
            re.search(pattern, path) or re.search(pattern, path.rpartition("/")[0])
        )
    except (re.error, TypeError) as error:
        raise ValueError(
            f"{pattern!r} is not a regular expression over paths like 'block_0/mlp':"
            f" {error}"
        ) from error


def policy(
    recipe: Recipe | str, rules: Rules = None, include: Iterable[str] = ("linear",)
) -> Policy:
    """Return a checked policy.

    Raises:
      ValueError: an unknown recipe, a rule that is neither a (regex, recipe) pair nor a
        function, an unknown group.

    >>> policy("tcfp12", {"mlp": "tensorwise"}).rules
    (('mlp', 'tensorwise'),)
    """
    pairs: Iterable[Any] = (
        rules.items() if isinstance(rules, Mapping) else (rules or ())
    )
    if callable(rules) or isinstance(rules, str):
        pairs = (rules,)
    wanted = (include,) if isinstance(include, str) else tuple(include)
    unknown = sorted(set(wanted) - set(get_args(Include)))
    if unknown:
        raise ValueError(
            f"include={unknown[0]!r} is unknown; use some of {list(get_args(Include))}"
        )
    groups = frozenset(wanted) | ({"linear"} if "measured" in wanted else set())
    checked = [_checked(rule) for rule in pairs]
    inline = tuple(
        str(rule[0]) for rule in checked if not callable(rule) and rule[1] == "inline"
    )
    rules = tuple(rule for rule in checked if callable(rule) or rule[1] != "inline")
    return Policy(named_recipe(recipe), rules, groups, inline=inline)


def last_blocks(
    count: int, blocks: int, recipe: Recipe | str | None = "bf16"
) -> Callable[..., Recipe | str | None]:
    """Return a rule by depth: products of the last `count` of a model's `blocks` take
    another recipe.

    Use it for FP4 training, which needs its last blocks in a higher precision.

        convert_to_tcfp(model, "nvfp4_training", tokens, rules=[last_blocks(2, 12)])

    The first number in a parameter's path is that of its block, counted from 0. Scanned
    blocks are one to a rule.

    Raises:
      ValueError: not 0 < count <= blocks.

    >>> rule = last_blocks(2, 12)
    >>> product = Product("block_10/mlp/kernel", (4, 4), "dot_general")
    >>> rule("block_10/mlp/kernel", product), rule("block_9/mlp/kernel", product)
    ('bf16', None)
    """
    if not 0 < count <= blocks:
        raise ValueError(
            f"count={count} of blocks={blocks}: some of the blocks are the last ones;"
            f" use 1 to {blocks}"
        )

    def last(path: str, product: Product) -> Recipe | str | None:
        found = re.search(r"\d+", path)
        return recipe if found and blocks - count <= int(found[0]) < blocks else None

    return last


@functools.lru_cache(maxsize=1024)
def _weighed(rows: int, k: int, n: int, recipe: Recipe, around: object) -> Explanation:
    """Return `explain` of a layer with bfloat16 activations and a float32 weight
    `[k, n]`.
    """
    return explain((rows, k), (k, n), recipe)


def _rule_name(rule: Rule) -> str:
    """Return a rule as reports show it."""
    return getattr(rule, "__name__", repr(rule)) if callable(rule) else repr(rule[0])


def _checked(rule: object) -> Rule:
    if callable(rule):
        return rule
    if not isinstance(rule, tuple | list) or len(rule) != 2:
        raise ValueError(
            f"rule {rule!r} is neither a (regex, recipe) pair nor a function (path,"
            " product) -> recipe"
        )
    pattern, chosen = rule
    if chosen not in (None, "inline"):
        named_recipe(chosen)
    if callable(pattern):
        raise ValueError(
            f"rule {rule!r}: a function returns the recipe itself; pass it without a"
            " second value"
        )
    finds(pattern, "")
    return pattern, chosen
