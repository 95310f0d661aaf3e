"""Products of parameters: `Product` describes one, and `Factors` is one written over
the parameter's own axes.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tcfp_jax.conversion.views import Axes, Equation, Shape, View
from tcfp_jax.products.annotations import Mark
from tcfp_jax.products.einsum import Contraction
from tcfp_jax.recipes import Recipe
from tcfp_jax.weights.layout import Layout

# Dimension numbers of `x[t, k] @ w[k, n]`.
MATRIX = (((1,), (0,)), ((), ()))
# The primitive of `lax.ragged_dot`: rows in groups, each times a weight of its own.
GROUPED = "ragged_dot_general"
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class Product:
    """One product of a parameter.

    Attributes:
      path: path of the parameter; several paths are joined by " + ".
      shape: shape of the parameter, or of the operand that was computed from it.
      primitive: the operation, such as "dot_general"; "gather" if rows of the parameter
        are looked up, and "cross_entropy" if the product is inside
        `losses.cross_entropy`.
      equation: the product as an einsum of x and the parameter, over the parameter's
        own axes.
      k, n: sizes of the matrix that multiplies each row of x; 0 if there is no matrix.
      rows: number of rows of x that each matrix multiplies.
      scope: the named scopes around the product.
      reason: why the product cannot be converted; "" if it can.
      layout: layout of the whole parameter; None if the parameter cannot be stored for
        this product.
      head: whether the product makes the model's output. No product follows a head. Its
        result has as many features as a table that is looked up has rows (or the head
        multiplies that table), or as no other product contracts.
      recipe: recipe of a layer that computes the product in low precision by itself.
      precision: precision that the author asked for beyond the default.
      softmax: whether the program takes exponentials of a head's result, all of them.
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
    softmax: bool = False

    def __str__(self) -> str:
        """One line of a report."""
        return (
            f"{self.path:40} {list(self.shape)!s:20}"
            f" {self.equation or self.primitive:24}"
        )


@dataclass(frozen=True)
class Factors:
    """A product with a view, written over the parameter's own axes.

    Attributes:
      contraction: product of x, reshaped by `x_groups`, and the parameter in atoms.
      x_groups: sizes into which each axis of x is split, as the atoms are; none for an
        axis of size 1. () splits none.
      out_groups: sizes of the product's axes that make each axis of the result; () if
        each is one.
      roles: role of each atom: "i" is contracted, "o" is in the result alone, "b" is in
        all three arrays.
      rows: number of rows of x that each matrix multiplies.
      layout: layout of the whole parameter, from `layout_of`.
      equation: the product as an einsum equation, with the parameter's letters first in
        the alphabet.
    """

    contraction: Contraction
    x_groups: Axes
    out_groups: Axes
    roles: tuple[str, ...]
    rows: int
    layout: Layout | None
    equation: str


def factors(
    numbers: Any, shapes: Sequence[Shape], side: int, view: View
) -> "Factors | str":
    """Return the product of `lax.dot_general` with a view as operand `side`, or why the
    view's axes cannot express it.

    Args:
      numbers: the `dimension_numbers` of the product.
      shapes: shapes of its two operands.
      side: 0 or 1, the operand that the view is.
      view: the view.

    >>> factors((((1,), (0,)), ((), ())), [(2, 8), (8, 4)], 1, View.of((8, 4))).equation
    'ca,ab->cb'
    """
    w, x = side, 1 - side
    contracted, batch = numbers
    atoms = len(view.sizes)
    # a broadcast axis, which has no atoms
    copied = lambda axis: shapes[w][axis] > 1 and not view.axes[axis]
    roles = ["o"] * atoms
    # Each axis of x becomes a list of labels: numbers of atoms, or a new number for an
    # axis that x alone has.
    groups: list[Any] = [None] * len(shapes[x])
    own = iter(range(atoms, atoms + 2 * len(shapes[x]) + 2))
    size = dict(enumerate(view.sizes))
    for kind, pairs in (("i", contracted), ("b", batch)):
        for mine, other in zip(pairs[w], pairs[x], strict=True):
            if kind == "i" and copied(mine):
                return "its weight is broadcast along a contracted axis"
            groups[other] = [next(own)] if copied(mine) else list(view.axes[mine])
            size |= {
                label: shapes[x][other] for label in groups[other] if label >= atoms
            }
            for atom in view.axes[mine]:
                roles[atom] = kind
    w_rest = [
        axis
        for axis in range(len(shapes[w]))
        if axis not in (*contracted[w], *batch[w])
    ]
    if any(map(copied, w_rest)):
        return "its weight is broadcast along an axis of the result"
    if not {"i", "o"} <= set(roles):
        return (
            "it is not a matrix product: nothing is contracted, or nothing is left of"
            " the weight"
        )
    x_rest = [axis for axis, group in enumerate(groups) if group is None]
    for axis in x_rest:
        groups[axis] = [next(own)] if shapes[x][axis] != 1 else []
        size |= {label: shapes[x][axis] for label in groups[axis]}
    # The result of dot_general: batch axes, then the rest of its first operand, then of
    # its second.
    rest = {
        w: [view.axes[axis] for axis in w_rest],
        x: [groups[axis] for axis in x_rest],
    }
    return _factors(
        view,
        groups,
        roles,
        [*(groups[axis] for axis in batch[x]), *rest[0], *rest[1]],
        size,
    )


def factors_of(eqn: Equation, side: int, view: View) -> "Factors | str":
    """Return the product of an equation with a view as operand `side`, or why it has no
    such form.

    A grouped product is written as the one of a stack, as if each weight multiplied an
    `x[e, m, k]` of its own.
    """
    shapes = [tuple(var.aval.shape) for var in eqn.invars[:2]]
    if eqn.primitive.name != GROUPED:
        return factors(eqn.params["dimension_numbers"], shapes, side, view)
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (of_x, of_w), batch = numbers.dot_dimension_numbers
    by_rows = (
        len(shapes[0]),
        len(shapes[1]),
        *of_x,
        *numbers.lhs_ragged_dimensions,
    ) == (2, 3, 1, 0)
    if side != 1 or not by_rows or any(batch) or len(eqn.invars[2].aval.shape) != 1:
        return (
            "a ragged_dot_general other than x[m, k] with rows in groups and one weight"
            " for each group"
        )
    (group,) = numbers.rhs_group_dimensions
    if any(tuple(sorted(axes)) != axes for axes in view.axes) or (
        shapes[1][group] > 1 and not view.axes[group]
    ):
        return (
            "the weights of its groups are copies, or merge axes in another order than"
            " the parameter's"
        )
    shapes[0] = (shapes[1][group], *shapes[0])
    found = factors((((2,), tuple(of_w)), ((0,), (group,))), shapes, side, view)
    if isinstance(found, str):
        return found
    stack = {
        letter
        for letter, role in zip(_LETTERS, found.roles, strict=False)
        if role == "b"
    }
    x, rest = found.equation.split(",")
    w, out = rest.split("->")
    without = lambda letters: "".join(
        letter for letter in letters if letter not in stack
    )
    return dataclasses.replace(
        found, equation=f"{without(x)},{w}->{without(out)} in groups"
    )


def _factors(
    view: View,
    x_groups: list[Any],
    roles: list[str],
    out_groups: list[Any],
    size: dict[int, int],
) -> Factors:
    x, result = (
        [label for group in groups for label in group]
        for groups in (x_groups, out_groups)
    )
    several = lambda groups: any(len(group) != 1 for group in groups)
    sizes = lambda groups: tuple(
        tuple(size[label] for label in group) for group in groups if several(groups)
    )
    pick = lambda kind: tuple(atom for atom, role in enumerate(roles) if role == kind)
    inputs, outputs, stack = pick("i"), pick("o"), pick("b")
    own = [label for label in x if label >= len(roles)]
    natural = [*stack, *own, *outputs]
    order = (
        None if natural == result else tuple(natural.index(label) for label in result)
    )
    places = tuple(map(x.index, inputs)), tuple(map(x.index, stack))
    contraction = Contraction(Layout(inputs, outputs, stack), len(x), *places, order)
    kernel = range(len(roles))
    letter = dict(zip([*kernel, *own], _LETTERS, strict=False))
    written = lambda labels: "".join(letter[label] for label in labels)
    return Factors(
        contraction,
        sizes(x_groups),
        sizes(out_groups),
        tuple(roles),
        math.prod(size[label] for label in own),
        _layout_of(view, tuple(roles)),
        f"{written(x)},{written(kernel)}->{written(result)}",
    )


def _layout_of(view: View, roles: tuple[str, ...]) -> Layout | None:
    """Return the layout of the whole parameter, with the axes that loops and indices
    removed as its stack.

    None: it cannot be stored, because two parts of the product share one of its axes,
    or only a part is multiplied. A device's part of a stack is whole: each weight has a
    scale of its own.
    """
    if not view.whole:
        return None
    found: list[str | None] = []
    for axis in range(len(view.shape)):
        parts = {
            role
            for origin, role in zip(view.origin, roles, strict=True)
            if origin == axis
        }
        parts |= {"b" for taken in view.taken if taken == axis}
        if len(parts) > 1 or (axis in view.split and parts != {"b"}):
            return None
        found.append(parts.pop() if parts else None)
    # An axis of size 1 has no role. With the role of its neighbour it keeps the
    # matrix's orientation.
    for axis in [*reversed(range(len(found))), *range(len(found))]:
        near = [
            role
            for role in (*found[axis + 1 : axis + 2], *found[max(axis - 1, 0) : axis])
            if role in ("i", "o")
        ]
        found[axis] = found[axis] or (near[0] if near else None)
    pick = lambda kind: tuple(axis for axis, role in enumerate(found) if role == kind)
    rest = tuple(axis for axis in pick("b") if axis not in view.taken)
    return None if None in found else Layout(pick("i"), pick("o"), view.taken + rest)


def product_of(
    eqn: Equation,
    side: int,
    path: str,
    reason: str,
    view: View | None = None,
    why: str = "",
) -> Product:
    """Return the product of operand `side`, over the axes of the parameter that it
    shows, or with a reason.

    `reason` says why the product cannot be converted, if that is known already, and
    `why` tells why the weight is not a view: the equation may have another reason,
    which comes first.
    """
    shapes = [tuple(var.aval.shape) for var in eqn.invars[:2]]
    described = Product(
        path,
        shapes[side] if view is None else view.shape,
        eqn.primitive.name,
        precision=_precision(eqn),
        scope=str(eqn.source_info.name_stack),
        reason=reason or _refusal(eqn, side, view) or why,
    )
    if described.reason or view is None:
        return described
    found = factors_of(eqn, side, view)
    if isinstance(found, str):
        return dataclasses.replace(described, reason=found)
    sizes = {
        role: math.prod(
            s for s, r in zip(view.sizes, found.roles, strict=True) if r == role
        )
        for role in "io"
    }
    return dataclasses.replace(
        described,
        equation=found.equation,
        k=sizes["i"],
        n=sizes["o"],
        rows=found.rows,
        layout=found.layout,
    )


def _refusal(eqn: Equation, side: int, view: View | None) -> str:
    """Return why a product has no low-precision form, whatever its operands are, or
    "".
    """
    # A function that differentiates itself multiplies by parameters backward, too: not
    # its forward products.
    if {getattr(entry, "name", "") for entry in eqn.source_info.name_stack.stack} & {
        "jvp",
        "transpose",
    }:
        return (
            "inside jax.grad or jax.jvp; transform the function that is differentiated,"
            " and differentiate that"
        )
    if eqn.primitive.name not in ("dot_general", GROUPED):
        return {"conv_general_dilated": "a convolution"}.get(
            eqn.primitive.name, f"a {eqn.primitive.name}"
        )
    types = [jnp.dtype(var.aval.dtype) for var in (*eqn.invars[:2], *eqn.outvars)]
    if view is None or all(
        jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 1 for dtype in types
    ):
        return ""
    return f"a product of {types[1 - side]} by {types[side]}"


def _precision(eqn: Equation) -> str:
    """Return the precision that a product's author asked for beyond the default, or
    "".
    """
    asked = eqn.params.get("precision")
    names = [
        getattr(one, "name", one)
        for one in (asked if isinstance(asked, tuple | list) else (asked,))
    ]
    return (
        ""
        if all(name is None or str(name).upper() == "DEFAULT" for name in names)
        else str(names[0])
    )


def product_by_hand(eqn: Equation, mark: Mark, path: str, view: View) -> Product:
    """Return the product that a layer of this library is about to compute with the
    kernel that it marked.
    """
    shape = eqn.invars[0].aval.shape
    layout = mark.layout.stacked(len(shape))
    size = lambda axes: math.prod(shape[axis] for axis in axes)
    # The mark has the layout of the array that the layer multiplies; the weight is
    # stored by the parameter's layout.
    roles = ["o"] * len(view.sizes)
    for role, axes in (("i", layout.inputs), ("b", layout.stack)):
        for atom in (atom for axis in axes for atom in view.axes[axis]):
            roles[atom] = role
    return Product(
        path,
        view.shape,
        "dot_general",
        k=size(layout.inputs),
        n=size(layout.outputs),
        rows=mark.rows,
        scope=str(eqn.source_info.name_stack),
        layout=_layout_of(view, tuple(roles)),
        recipe=mark.recipe,
    )


def head_of_loss(eqn: Equation) -> Equation:
    """Return the product `x[t, k] @ w[k, n]` inside a `losses.cross_entropy`, as an
    equation of its own.
    """
    x, w = (jax.ShapeDtypeStruct(var.aval.shape, jnp.float32) for var in eqn.invars[:2])
    program = jax.make_jaxpr(lambda x, w: lax.dot_general(x, w, MATRIX))(x, w)
    return program.eqns[0].replace(source_info=eqn.source_info)


def lookup_of(eqn: Equation, path: str, view: View, inside: str) -> Product:
    """Return a gather from a view as a product of one-hot rows: it contracts the first
    axis that is looked up.
    """
    fill = eqn.params["fill_value"]
    reason = inside or (
        ""
        if view.whole
        else "a part of the table is looked up, which has no stored form"
    )
    if fill is not None and fill == fill and fill != 0:
        reason = (
            reason or f"rows out of range are {fill}, which is neither NaN nor zero"
        )
    wanted = [
        view.origin[atom]
        for axis in eqn.params["dimension_numbers"].start_index_map
        for atom in view.axes[axis]
    ]
    rest = [axis for axis in range(len(view.shape)) if axis not in view.taken]
    first = wanted[0] if wanted else rest[0]
    rest.remove(first)
    k, layout = (
        view.shape[first],
        Layout((first,), tuple(rest), view.taken) if rest else None,
    )
    return Product(
        path,
        view.shape,
        "gather",
        k=k,
        n=math.prod(view.shape[axis] for axis in rest),
        rows=math.prod(eqn.invars[1].aval.shape[:-1]),
        scope=str(eqn.source_info.name_stack),
        reason=reason or ("" if layout else "numbers are looked up, not rows"),
        layout=layout,
    )
