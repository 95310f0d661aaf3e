"""`Policy`: the recipe of each product and why it was chosen.

Rules come first, then known losses of time and known harm.

A product of a small matrix loses to BF16. With "measured", times decide if they are
known: the three products of a layer and the quantization around them, at the layer's
own shape on this chip, against the three products of BF16 (`tcfp_jax.explain`).
`report.Examined` applies a policy to a census.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from pallas_kernels.dispatch import device_kind, surroundings
from pallas_kernels.operands import Tensor
from pallas_kernels.specs import has_explicit_axes
from pallas_kernels.tuning import is_timed, load
from tcfp_jax import paths
from tcfp_jax.conversion.factors import GROUPED, Product
from tcfp_jax.conversion.views import Place
from tcfp_jax.explanation import Explanation, explain
from tcfp_jax.products.grouped import unsupported
from tcfp_jax.recipes import Recipe, describe
from tcfp_jax.recipes import recipe as named_recipe

Include = Literal["linear", "head", "small", "measured", "norm", "layer_norm", "embed"]
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
    """The decision about one product, a line of a `Report`.

    Use this to read the recipe of a layer, or the reason why it has none.

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

    def reason_at(self, place: str) -> str:
        """Return the reason with a place in the program, before the advice."""
        fact, semicolon, advice = self.reason.partition(";")
        return f"{fact}{place}{semicolon}{advice}"

    @property
    def path(self) -> str:
        """Path of the layer, or paths of layers, without the parameters' own names."""
        sources = self.product.path.split(" + ")
        layers = [source.rpartition("/")[0] for source in sources]
        return " + ".join(dict.fromkeys(layers))

    def __str__(self) -> str:
        """One line of a report."""
        if self.recipe is None:
            return f"{self.product} {self.reason}"
        notes = [self.reason] if self.reason else []
        if self.recipe.stored is not None and not self.stored:
            why = "the stored form of its weight is another one"
            if self.product.computed:
                why = self.product.computed
            elif self.product.layout is None:
                why = (
                    "its weight is a part of a parameter (a slice, or a device's in"
                    " shard_map) without a stored form"
                )
            notes.append(f"quantized at each use: {why}")
        line = f"{self.product} {describe(self.recipe)}"
        return f"{line} ({'; '.join(notes)})" if notes else line


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

        >>> side = 4096
        >>> path = "block/mlp/kernel"
        >>> big = Product(path, (side, side), "dot_general", k=side, n=side)
        >>> policy("tcfp12").choose(big).recipe == Recipe()
        True
        >>> policy("tcfp12").choose(dataclasses.replace(big, head=True)).reason
        'output head; include=("linear", "head"), or name it in rules'
        """
        off = Record(product, None, _SWITCHED_OFF)
        if product.recipe is not None:  # a layer that the model's author gave a recipe
            if self.is_off(product.path):
                return off
            return Record(product, product.recipe, "low-precision by hand")
        if self.recipe is None:
            return Record(product, None, "float, in a model that is not converted")
        number, chosen = self._rule(product)
        if product.reason:
            return Record(product, None, product.reason, number)
        if self.is_off(product.path):
            return off
        if number is not None:
            recipe = None if chosen is None else named_recipe(chosen)
            reason = f"rule {_rule_name(self.rules[number])}"
            return _storable(Record(product, recipe, reason, number))
        if product.primitive == "gather":
            return _storable(Record(product, self.recipe))
        reason = self._left(product)
        if reason:
            return Record(product, None, reason)
        settled = dict(self.settled).get(product.path)
        if settled is not None:
            return dataclasses.replace(settled, product=product)
        decide = self._weighed if self._measures else self._sized
        return _storable(decide(product))

    @property
    def _measures(self) -> bool:
        """True if measured times decide on this device."""
        return "measured" in self.include and is_timed(device_kind())

    def _rule(self, product: Product) -> tuple[int | None, Recipe | str | None]:
        """Return the number of the rule that decides, and its recipe.

        A weight that is computed from several parameters stays float if a rule leaves
        one of them alone.
        """
        decided: tuple[int | None, Recipe | str | None] = (None, None)
        for path in dict.fromkeys([product.path, *product.path.split(" + ")]):
            number, chosen = self._first_rule(path, product)
            if number is not None and chosen is None:
                return number, None
            if decided[0] is None:
                decided = number, chosen
        return decided

    def _first_rule(
        self, path: str, product: Product
    ) -> tuple[int | None, Recipe | str | None]:
        """Return the first rule that matches one parameter of a product."""
        for number, rule in enumerate(self.rules):
            if not callable(rule):
                if _matches(rule[0], path, product.scope):
                    return number, rule[1]
                continue
            chosen = rule(product.path, product)
            if isinstance(chosen, bool):
                raise ValueError(
                    f"rule {_rule_name(rule)} returned {chosen} for {path!r}: a rule"
                    " returns a recipe, or None for no opinion. The True of a torchao"
                    ' filter is None here, and its False is "bf16"'
                )
            if chosen is not None:
                return number, chosen
        return None, None

    def _left(self, product: Product) -> str:
        """Return why a product is left alone unless a rule names it, or ""."""
        if product.precision:
            return (
                f"precision={product.precision!r}, which a recipe would override; name"
                " it in rules"
            )
        group = "head" if product.head else "linear"
        if group in self.include:
            return ""
        kind = "output head" if product.head else "linear"
        return f"{kind}; {self._with(group)}"

    def _with(self, group: str) -> str:
        """Return the whole `include` that converts a product that is left alone."""
        wanted = {*self.include, group}
        groups = tuple(name for name in get_args(Include) if name in wanted)
        return f"include={groups!r}, or name it in rules".replace("'", '"')

    def _sized(self, product: Product) -> Record:
        """Choose by the sides of the matrix."""
        side = min(product.k, product.n)
        least = _SMALL_OF_EXPERTS if product.primitive == GROUPED else _SMALL
        if "small" in self.include or side >= least:
            return Record(product, self.recipe)
        return Record(
            product,
            None,
            f"too small to win: a side of {side}, below {least}; {self._with('small')}",
        )

    def _weighed(self, product: Product) -> Record:
        """Choose by measured times of the layer at its own shape.

        The reason says so if its size decides instead.
        """
        sized = self._sized(product)
        if product.primitive == GROUPED:  # its times are not those of one matrix
            return sized
        assert self.recipe is not None, "a model that is converted has one"
        rows = max(1, product.rows // self.devices)
        around = (surroundings(), load(), has_explicit_axes())
        found = _weighed(rows, product.k, product.n, self.recipe, around)
        speed = found.speed_over_bf16
        if speed is not None:
            recipe = self.recipe if speed >= WORTHWHILE else None
            why = f"{found.summary} at {rows}x{product.k}x{product.n}"
            return Record(product, recipe, why, speed=speed)
        if sized.recipe is None:
            return sized
        why = f"{found.summary}: its size decided"
        return dataclasses.replace(sized, reason=why)

    def choices(
        self, products: Mapping[Place, Product], prefix: str
    ) -> dict[Place, Record]:
        """Return the choice for each product of a part of a model.

        Rules know a parameter by its path in the whole model; `prefix` is the part's.
        """
        choices = {}
        for place, product in products.items():
            sources = product.path.split(" + ")
            path = " + ".join(paths.join(prefix, source) for source in sources)
            choices[place] = self.choose(dataclasses.replace(product, path=path))
        return choices

    def settle(self, products: Iterable[Product]) -> "Policy":
        """Return the policy with its choices by measured times settled.

        A path's first product decides. Calls with other numbers of rows then choose
        alike: a weight stays stored as its product reads it.
        """
        if not self._measures:
            return self
        settled: dict[str, Record] = {}
        for product in products:
            free = product.recipe is None and not product.reason
            if free and product.path not in settled and not self._left(product):
                settled[product.path] = self._weighed(product)
        return dataclasses.replace(self, settled=tuple(settled.items()))

    def opens(self, path: str, scope: str) -> str | None:
        """Return the first pattern of `inline` that finds a weight or a scope."""
        for pattern in self.inline:
            if _matches(pattern, path, scope):
                return pattern
        return None

    def unmatched(self, choices: Iterable[Record]) -> tuple[str, ...]:
        """Return the rules, as reports show them, that decided none of the choices."""
        rules = dict(enumerate(self.rules))
        for choice in choices:
            if choice.rule is not None:
                rules.pop(choice.rule, None)
        return tuple(map(_rule_name, rules.values()))

    def is_off(self, path: str) -> bool:
        """Return whether `to_bf16` switched off the layer."""
        return any(finds_any(pattern, path) for pattern in self.off)


def _storable(record: Record) -> Record:
    """Return the choice, or none if the recipe cannot serve such a product."""
    if record.recipe is None:
        return record
    why = _refusal(record.recipe, record.product.primitive)
    return dataclasses.replace(record, recipe=None, reason=why) if why else record


def _refusal(recipe: Recipe, primitive: str) -> str:
    """Return why a recipe cannot serve lookups, experts or a head with its loss."""
    if primitive == GROUPED:
        return unsupported(recipe)
    one_scale = recipe.stored and isinstance(recipe.scaling, Tensor)
    if primitive == "gather" and not one_scale:
        return f"{describe(recipe)} stores no table with one scale"
    if primitive == "cross_entropy" and recipe.fp4 is not None:
        return f"{describe(recipe)} has no head with its loss"
    return ""


# The policy of a model whose author wrote low-precision layers: nothing else takes a
# recipe.
BY_HAND = Policy(None, (), frozenset())


def finds(pattern: str, path: str) -> bool:
    """Return whether a pattern finds a parameter, by its path or its layer's path.

    Raises:
      ValueError: the pattern is not a regular expression.

    >>> path = "block/mlp/kernel"
    >>> finds("mlp$", path), finds("mlp/kernel", path), finds("norm", path)
    (True, True, False)
    """
    layer, _, _ = path.rpartition("/")
    try:
        return bool(re.search(pattern, path) or re.search(pattern, layer))
    except (re.error, TypeError) as error:
        raise ValueError(
            f"{pattern!r} is not a regular expression over paths like 'block_0/mlp':"
            f" {error}"
        ) from error


def finds_any(pattern: str, path: str) -> bool:
    """Return whether a pattern finds one of the parameters that a path joins.

    >>> finds_any("^b$", "a + b")
    True
    """
    return any(finds(pattern, one) for one in {path, *path.split(" + ")})


def _matches(pattern: str, path: str, scope: str) -> bool:
    """Return whether a pattern finds a parameter or the named scope of its product."""
    return finds_any(pattern, path) or re.search(pattern, scope) is not None


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
    pairs: Iterable[object] = rules or ()
    if isinstance(rules, Mapping):
        pairs = rules.items()
    elif callable(rules) or isinstance(rules, str):
        pairs = (rules,)
    groups = {include} if isinstance(include, str) else set(include)
    unknown = sorted(groups.difference(get_args(Include)))
    if unknown:
        raise ValueError(
            f"include={unknown[0]!r} is unknown; use some of {list(get_args(Include))}"
        )
    if "measured" in groups:
        groups.add("linear")
    if "layer_norm" in groups:  # another name of "norm"
        groups.remove("layer_norm")
        groups.add("norm")
    chosen: list[Rule] = []
    inline: list[str] = []
    for rule in map(_checked, pairs):
        if not callable(rule) and rule[1] == "inline":
            inline.append(rule[0])
        else:
            chosen.append(rule)
    return Policy(
        named_recipe(recipe), tuple(chosen), frozenset(groups), inline=tuple(inline)
    )


def last_blocks(
    count: int, blocks: int, recipe: Recipe | str | None = "bf16"
) -> Callable[..., Recipe | str | None]:
    """Return a rule that gives a model's last blocks another recipe.

    Use this for FP4 training, which needs its last blocks in a higher precision. The
    rule finds the products of the last `count` of `blocks`.

        convert_to_tcfp(model, "nvfp4_training", tokens, rules=[last_blocks(2, 12)])

    The first number in a parameter's path is that of its block, counted from 0. A rule
    treats scanned blocks as one.

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
    """Return `explain` of bfloat16 activations and a float32 weight `[k, n]`."""
    return explain((rows, k), (k, n), recipe)


def _rule_name(rule: Rule) -> str:
    """Return a rule as reports show it."""
    if callable(rule):
        return getattr(rule, "__name__", repr(rule))
    return repr(rule[0])


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
