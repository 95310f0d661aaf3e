"""`Report`: every product of a parameter, the recipe that it was given, and the reason where it was given none."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
from flax import linen as nn

from tcfp_jax.recipes import Recipe, describe
from tcfp_jax.weights.layout import Layout


@dataclass(frozen=True)
class Product:
    """One product of a parameter.

    Attributes:
      path: path of the parameter; several paths are joined by " + ".
      shape: shape of the parameter, or of the operand that was computed from it.
      primitive: the operation, such as "dot_general".
      equation: the product as an einsum of x and the parameter, over the parameter's own axes.
      k, n: sizes of the matrix that multiplies each row of x; 0 if there is no matrix.
      rows: number of rows of x that each matrix multiplies.
      scope: the named scopes around the product.
      reason: why the product cannot be converted; "" if it can.
      layout: layout of the whole parameter; None if the parameter cannot be stored for this product.
      head: whether the product makes the model's output. No product follows a head. Its result has as many features as
        a table that is looked up has rows (or the head multiplies that table), or as no other product contracts.
      recipe: recipe of a layer that computes the product in low precision by itself.
      precision: precision that the author asked for beyond the default.
    """

    path: str
    shape: tuple[int, ...]
    primitive: str
    equation: str = ""
    k: int = 0
    n: int = 0
    rows: int = 0
    scope: str = ""
    reason: str = ""
    layout: Layout | None = None
    head: bool = False
    recipe: Recipe | None = None
    precision: str = ""

    def __str__(self) -> str:
        """One line of a report."""
        return f"{self.path:40} {list(self.shape)!s:20} {self.equation or self.primitive:24}"


@dataclass(frozen=True)
class Choice:
    """The decision about one product.

    Attributes:
      recipe: the recipe, or None to leave the product alone.
      reason: why.
      rule: number of the rule that decided.
      speed: measured speed over BF16, if it decided.
    """

    recipe: Recipe | None
    reason: str
    rule: int | None = None
    speed: float | None = None


@dataclass(frozen=True)
class Record:
    """One product and the decision about it.

    Attributes:
      product: the product; its `path` is the path of the parameter.
      choice: the decision.
      stored: whether the product reads the stored weight. A second product of the same weight may need another form.
    """

    product: Product
    choice: Choice
    stored: bool = True

    @property
    def recipe(self) -> Recipe | None:
        """Recipe of the product, or None."""
        return self.choice.recipe

    @property
    def reason(self) -> str:
        """Reason why the product was left alone, the rule that chose, or the measured speed."""
        return self.choice.reason

    @property
    def weight_path(self) -> str:
        """Path of the parameter."""
        return self.product.path

    @property
    def path(self) -> str:
        """Path of the layer: the path of the parameter without the parameter's own name."""
        return self.product.path.rpartition("/")[0]

    def __str__(self) -> str:
        """One line of a report."""
        if self.recipe is None:
            return f"{self.product} {self.reason}"
        notes = [self.reason] if self.reason else []
        if self.recipe.stored is not None and not self.stored:
            notes.append("quantized at each use: the stored form of its weight is another one")
        return f"{self.product} {describe(self.recipe)}" + (f" ({'; '.join(notes)})" if notes else "")


@dataclass(frozen=True)
class Report:
    """The products of a model's parameters. Print it to see a table.

    Attributes:
      converted, skipped: a `Record` for each product.
      unmatched_rules: rules that no product matched.
      rounded: paths of parameters that are rounded to the packed format (`include="embed"`, `"layer_norm"`).
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
        """True if measured times decided about a product: a model in which nothing pays runs unchanged."""
        return any(record.choice.speed is not None for record in (*self.converted, *self.skipped))

    def __str__(self) -> str:
        """The table: converted products, skipped products, rounded parameters, and rules that matched nothing."""
        lines = [f"{len(self.converted)} products converted, {len(self.skipped)} skipped"]
        lines += [*map(str, self.converted), *(f"skipped: {record}" for record in self.skipped)]
        lines += [f"rounded to the packed format: {path}" for path in self.rounded]
        lines += [f"rule that matched nothing: {rule}" for rule in self.unmatched_rules]
        return "\n".join(lines)


def check_strict(report: Report) -> None:
    """Raise if a product was left alone that no rule names.

    Raises:
      ValueError: lists the products, or names a rule that matches nothing.
    """
    if report.impossible:
        lines = "; ".join(f"{record.product}: {record.reason}" for record in report.impossible[:5])
        raise ValueError(
            f"strict=True: {len(report.impossible)} products of parameters have no low-precision form: {lines}; leave "
            'them alone by rules, such as {"patch": None}'
        )
    if report.unmatched_rules:
        raise ValueError(f"strict=True: no product matches the rule {report.unmatched_rules[0]}; survey lists them")


def nothing_converted(name: str, report: Report, leaves: Mapping[str, jax.Array | jax.ShapeDtypeStruct]) -> ValueError:
    """Return the error of a conversion that would change nothing."""
    if report.skipped:
        seen = [f"{r.product.path or '(root)'} {list(r.product.shape)}: {r.reason}" for r in report.skipped]
        return ValueError(f"no product of {name} was converted: {_some(seen, 5, '; ')}; name them in rules or widen "
                          "include")  # fmt: skip
    found = [f"{path} {list(leaf.shape)}" for path, leaf in leaves.items()]
    return ValueError(
        f"no product of {name} was converted: its program multiplies none of its parameters by an input; the "
        f"parameters are {_some(found, 8) or 'none'}; pass the parameters that are multiplied, and inputs that reach "
        "them"
    )


def check_state(stored: Mapping[str, object], leaves: Mapping[str, object], absent: list[str]) -> None:
    """Raise unless a state belongs to these parameters, and holds all parameters that have no values of their own.

    Args:
      stored: the state by path.
      leaves: the parameters by path.
      absent: paths of parameters without values.

    Raises:
      ValueError: a stored weight without a parameter, or a parameter without values that is not stored.
    """
    unknown = sorted(set(stored) - set(leaves))
    if unknown:
        raise ValueError(
            f"the state holds {unknown[0]!r}, but the parameters have only {_some(sorted(leaves), 8)}; pass the state "
            "of these parameters"
        )
    missing = [path for path in absent if path not in stored]
    if missing:
        raise ValueError(
            f"{missing[0]!r} is a shape without values, and the state does not hold it; pass the parameter"
        )


def _some(items: list[str], most: int, separator: str = ", ") -> str:
    """Return the first items and the number of the others, for a message."""
    others = f" and {len(items) - most} more" if len(items) > most else ""
    return separator.join(items[:most]) + others


def not_converted(model: object) -> ValueError:
    """Return the error of a question about a model that is not converted."""
    return ValueError(f"{type(model).__name__} is not converted; use convert_to_tcfp(model, recipe)")


def not_a_model(model: object) -> TypeError:
    """Return the error of an object that is not a Flax module."""
    kind, repair = f"{type(model).__module__}.{type(model).__qualname__}", "pass the model itself"
    if isinstance(getattr(model, "module", None), nn.Module):
        repair = "pass its .module, which is one"
    elif callable(model) or hasattr(model, "apply"):
        repair = "for any other function of parameters and inputs use tcfp_jax.transform(fn, recipe)"
    return TypeError(f"the model is a {kind}, which is neither a flax.linen.Module nor a flax.nnx.Module; {repair}")
