"""`Report`: what conversion did to every product of a parameter, and what it left alone and why."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flax import linen as nn

from tcfp_jax.conversion.census import Product
from tcfp_jax.conversion.policy import Choice
from tcfp_jax.recipes import Recipe, describe


@dataclass(frozen=True)
class Record:
    """One product, and what was chosen for it.

    Attributes:
      product: what the census found; its `path` is that of the parameter.
      choice: its recipe or None, and why.
      stored: whether it can read the stored weight; another product of the same weight may need another form.
    """

    product: Product
    choice: Choice
    stored: bool = True

    @property
    def recipe(self) -> Recipe | None:
        """The recipe, or None."""
        return self.choice.recipe

    @property
    def reason(self) -> str:
        """Why it was left alone, which rule chose, or what it gains by measured times."""
        return self.choice.reason

    @property
    def weight_path(self) -> str:
        """Path of the parameter."""
        return self.product.path

    @property
    def path(self) -> str:
        """Path of the layer: that of the parameter without its own name."""
        return self.product.path.rpartition("/")[0]

    def __str__(self) -> str:
        """One line."""
        what = self.reason
        if self.recipe is not None:
            notes = [what] if what else []
            other = self.recipe.stored is not None and not self.stored
            notes += ["quantized at each use: the stored form of its weight is another one"] if other else []
            what = describe(self.recipe) + (f" ({'; '.join(notes)})" if notes else "")
        return f"{self.product} {what}"


@dataclass(frozen=True)
class Report:
    """The products of a function's parameters; `str` of it is a table.

    Attributes:
      converted, skipped: one `Record` for each product.
      unmatched_rules: rules that no product matched.
      rounded: parameters that are rounded to the packed format (`include="embed"`, `"layer_norm"`), by path.
    """

    converted: tuple[Record, ...]
    skipped: tuple[Record, ...]
    unmatched_rules: tuple[str, ...] = ()
    rounded: tuple[str, ...] = ()

    @property
    def impossible(self) -> tuple[Record, ...]:
        """Skipped products that have no low-precision form, and that no rule names."""
        return tuple(r for r in self.skipped if r.product.reason and r.choice.rule is None)

    @property
    def weighed(self) -> bool:
        """Whether measured times decided of a product: where nothing pays, a model runs as it was written."""
        return any(record.choice.speed is not None for record in (*self.converted, *self.skipped))

    def __str__(self) -> str:
        """Converted products, then skipped ones, rounded parameters, and rules that matched nothing."""
        lines = [f"{len(self.converted)} products converted, {len(self.skipped)} skipped"]
        lines += [*map(str, self.converted), *(f"skipped: {record}" for record in self.skipped)]
        lines += [f"rounded to the packed format: {path}" for path in self.rounded]
        lines += [f"rule that matched nothing: {rule}" for rule in self.unmatched_rules]
        return "\n".join(lines)


def check_strict(report: Report) -> None:
    """Raise where something was left alone that no rule names.

    Raises:
      ValueError: names the products, or the rules that match nothing.
    """
    if report.impossible:
        lines = "; ".join(f"{record.product}: {record.reason}" for record in report.impossible[:5])
        raise ValueError(
            f"strict=True: {len(report.impossible)} products of parameters have no low-precision form: {lines}; leave "
            'them alone by rules, such as {"patch": None}'
        )
    if report.unmatched_rules:
        raise ValueError(f"strict=True: no product matches the rule {report.unmatched_rules[0]}; survey lists them")


def nothing_converted(name: str, report: Report, leaves: Mapping[str, Any]) -> ValueError:
    """The error of a conversion that would change nothing."""
    if not report.skipped:
        shapes = {path: list(leaf.shape) for path, leaf in leaves.items()}
        seen = ", ".join(f"{path} {shape}" for path, shape in list(shapes.items())[:8])
        return ValueError(
            f"no product of {name} was converted: its program multiplies none of its parameters by an input; the "
            f"parameters are {seen or 'none'}{f' and {len(shapes) - 8} more' if len(shapes) > 8 else ''}; pass those "
            "that are multiplied, and inputs that reach them"
        )
    lines = [
        f"{record.product.path or '(root)'} {list(record.product.shape)}: {record.reason}" for record in report.skipped
    ]
    return ValueError(
        f"no product of {name} was converted: {'; '.join(lines[:5])}"
        f"{f' and {len(lines) - 5} more' if len(lines) > 5 else ''}; name them in rules or widen include"
    )


def not_converted(model: Any) -> ValueError:
    """The error of a question about a conversion that was not made."""
    return ValueError(f"{type(model).__name__} is not converted; use convert_to_tcfp(model, recipe)")


def not_a_model(model: Any) -> TypeError:
    """The error of a model that no Flax module is."""
    kind, repair = f"{type(model).__module__}.{type(model).__qualname__}", "pass the model itself"
    if isinstance(getattr(model, "module", None), nn.Module):
        repair = "pass its .module, which is one"
    elif callable(model) or hasattr(model, "apply"):
        repair = "for any other function of parameters and inputs use tcfp_jax.transform(fn, recipe)"
    return TypeError(f"the model is a {kind}, which is neither a flax.linen.Module nor a flax.nnx.Module; {repair}")
