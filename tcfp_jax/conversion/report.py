"""`Report`: every product of a parameter, the recipe that it was given, and the reason where it was given none."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import linen as nn

from tcfp_jax.conversion.trace import Equation
from tcfp_jax.conversion.views import View, factors, layout_of
from tcfp_jax.products.annotations import Mark
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


def product_of(
    eqn: Equation, side: int, path: str, reason: str, view: View | None = None, no_view: str = ""
) -> Product:
    """Return the product of operand `side`, over the axes of the parameter that it shows, or with a reason.

    Args:
      eqn: the equation of the product.
      side: 0 or 1, the operand that is a weight.
      path: path of the weight.
      reason: why the product cannot be converted, if that is known already.
      view: the view that the weight is, if it is one.
      no_view: why the weight is not a view. The equation may have another reason, which comes first.
    """
    shapes = [tuple(var.aval.shape) for var in eqn.invars[:2]]
    described = Product(
        path, shapes[side] if view is None else view.shape, eqn.primitive.name, precision=_precision(eqn),
        scope=str(eqn.source_info.name_stack), reason=reason or _refusal(eqn, side, view) or no_view,
    )  # fmt: skip
    if described.reason or view is None:
        return described
    found = factors(eqn.params["dimension_numbers"], shapes, side, view)
    if isinstance(found, str):
        return dataclasses.replace(described, reason=found)
    sizes = {role: math.prod(s for s, r in zip(view.sizes, found.roles, strict=True) if r == role) for role in "io"}
    return dataclasses.replace(
        described, equation=found.equation(), k=sizes["i"], n=sizes["o"], rows=found.rows,
        layout=layout_of(view, found.roles),
    )  # fmt: skip


def _refusal(eqn: Equation, side: int, view: View | None) -> str:
    """Return why a product has no low-precision form, whatever its operands are, or ""."""
    # A function that differentiates itself multiplies by parameters backward, too: not its forward products.
    if {getattr(entry, "name", "") for entry in eqn.source_info.name_stack.stack} & {"jvp", "transpose"}:
        return "inside jax.grad or jax.jvp; transform the function that is differentiated, and differentiate that"
    if eqn.primitive.name != "dot_general":
        return {"conv_general_dilated": "a convolution"}.get(eqn.primitive.name, f"a {eqn.primitive.name}")
    types = [jnp.dtype(var.aval.dtype) for var in (*eqn.invars, *eqn.outvars)]
    if view is None or all(jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 1 for dtype in types):
        return ""
    return f"a product of {types[1 - side]} by {types[side]}"


def _precision(eqn: Equation) -> str:
    """Return the precision that a product's author asked for beyond the default, or ""."""
    asked = eqn.params.get("precision")
    names = [getattr(one, "name", one) for one in (asked if isinstance(asked, tuple | list) else (asked,))]
    return "" if all(name is None or str(name).upper() == "DEFAULT" for name in names) else str(names[0])


def product_by_hand(eqn: Equation, mark: Mark, path: str, view: View) -> Product:
    """Return the product that a layer of this library is about to compute with the kernel that it marked."""
    shape = eqn.invars[0].aval.shape
    layout = mark.layout.stacked(len(shape))
    size = lambda axes: math.prod(shape[axis] for axis in axes)
    # The mark has the layout of the array that the layer multiplies; the weight is stored by the parameter's layout.
    roles = ["o"] * len(view.sizes)
    for role, axes in (("i", layout.inputs), ("b", layout.stack)):
        for atom in (atom for axis in axes for atom in view.axes[axis]):
            roles[atom] = role
    return Product(
        path, view.shape, "dot_general", k=size(layout.inputs), n=size(layout.outputs), rows=mark.rows,
        scope=str(eqn.source_info.name_stack), layout=layout_of(view, tuple(roles)), recipe=mark.recipe,
    )  # fmt: skip


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
