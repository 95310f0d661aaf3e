"""`Report`: what conversion did to every layer, what it left alone and why, and which products it never saw."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tcfp_jax.conversion.policy import Choice
from tcfp_jax.conversion.tracing import Product
from tcfp_jax.paths import join
from tcfp_jax.recipes import NAMES, Recipe
from tcfp_jax.recipes import recipe as named_recipe
from tcfp_jax.weights.layout import Layout


@dataclass(frozen=True)
class Record:
    """One layer.

    Attributes:
      path: of the layer; `parameter` is the name of its kernel.
      layer: type name.
      choice: its recipe or None, and why.
      shape: of the kernel as the layer sees it: inside `nn.scan` that of one layer.
      layout: of the kernel; None where the layer was skipped.
      tokens: rows of x in one call; 0 where the layer was skipped.
    """

    path: str
    parameter: str
    layer: str
    choice: Choice
    shape: tuple[int, ...]
    layout: Layout | None = None
    tokens: int = 0

    @property
    def recipe(self) -> Recipe | None:
        """The recipe, or None."""
        return self.choice.recipe

    @property
    def weight_path(self) -> str:
        """Path of the parameter."""
        return join(self.path, self.parameter)

    def __str__(self) -> str:
        """One line."""
        what = self.choice.reason
        if self.recipe is not None:
            what = describe(self.recipe) + (f" ({what})" if what else "")
        return f"{self.path or '(root)':40} {self.layer:16} {list(self.shape)!s:20} {what}"


@dataclass(frozen=True)
class Report:
    """The layers of a converted model; `str` of it is a table.

    Attributes:
      converted, skipped: one `Record` per layer.
      unseen: products of parameters that no adapter saw; they run as the model's author wrote them.
      unmatched_rules: rules that no layer matched.
    """

    converted: tuple[Record, ...]
    skipped: tuple[Record, ...]
    unseen: tuple[Product, ...] = ()
    unmatched_rules: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Converted layers, then skipped ones, then products and rules that met no layer."""
        lines = [f"{len(self.converted)} layers converted, {len(self.skipped)} skipped"]
        lines += [*map(str, self.converted), *(f"skipped: {record}" for record in self.skipped)]
        lines += [f"product that no adapter saw: {product}" for product in self.unseen]
        lines += [f"rule that matched nothing: {rule}" for rule in self.unmatched_rules]
        return "\n".join(lines)


def describe(recipe: Recipe) -> str:
    """The name of a recipe, or the fields in which it differs from "tcfp12".

    >>> describe(named_recipe("tcfp12", wgrad="full", dgrad_weight="hi"))
    "tcfp12 with weight.dgrad='hi', wgrad='full'"
    """
    for name in NAMES:
        if named_recipe(name) == recipe:
            return name
    return "tcfp12 with " + ", ".join(_differences(recipe, Recipe()))


def _differences(value: Any, base: Any, prefix: str = "") -> Iterator[str]:
    """`name=value` of every field in which two of a kind differ, down to the fields of their values."""
    for field in dataclasses.fields(value):
        mine, theirs = getattr(value, field.name), getattr(base, field.name)
        if dataclasses.is_dataclass(mine) and type(mine) is type(theirs):
            yield from _differences(mine, theirs, f"{prefix}{field.name}.")
        elif mine != theirs:
            yield f"{prefix}{field.name}={mine!r}"
