"""Products of parameters: `Product` describes one, `Factors` writes it over its axes.

The axes are the parameter's own, so the weight that an optimizer stores fits the
product, however the program reshapes the parameter.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from tcfp_jax.conversion.facts import Facts
from tcfp_jax.conversion.views import Axes, Equation, Shape, View
from tcfp_jax.products.annotations import Mark, head_of
from tcfp_jax.products.einsum import Contraction
from tcfp_jax.recipes import Recipe
from tcfp_jax.weights.layout import Layout

# Dimension numbers of a product: the contracted and the batch axes of both operands.
Numbers = tuple[tuple[Shape, Shape], tuple[Shape, Shape]]
# The dimension numbers of `x[t, k] @ w[k, n]`.
MATRIX: Numbers = (((1,), (0,)), ((), ()))
# The primitive of `lax.ragged_dot`: rows in groups, each times a weight of its own.
GROUPED = "ragged_dot_general"
CLOSED = "the function closes over its weight; pass it in params"
NO_MATRIX = (
    "it is not a matrix product: nothing is contracted, or nothing is left of the"
    " weight"
)
NO_INPUT = (
    "no input takes part: its other operand comes from parameters, constants or state"
)
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class Product:
    """One product of a parameter.

    Use this in a rule that is a function `(path, product)`: sizes, rows, scope and
    place of the product decide there.

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
      computed: how the weight was computed from parameters, if it is not one itself;
        each use quantizes it.
      side: the operand that the weight is.
    """

    path: str
    shape: Shape
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
    computed: str = ""
    side: int = 1

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
    numbers: Numbers, shapes: Sequence[Shape], side: int, view: View
) -> Factors | str:
    """Return a product with a view over the parameter's axes, or why there is none.

    Args:
      numbers: the `dimension_numbers` of the product.
      shapes: shapes of its two operands.
      side: 0 or 1, the operand that the view is.
      view: the view.

    >>> factors((((1,), (0,)), ((), ())), [(2, 8), (8, 4)], 1, View.of((8, 4))).equation
    'ca,ab->cb'
    """
    w = side
    x = 1 - side
    contracted, batch = numbers
    copied = [
        axis for axis, size in enumerate(shapes[w]) if size > 1 and not view.axes[axis]
    ]
    roles = ["o"] * len(view.sizes)
    # Each axis of x becomes a group of labels: numbers of atoms, or a new number for an
    # axis that x alone has.
    groups: dict[int, Shape] = {}
    sizes = list(view.sizes)  # sizes of the labels

    def new_label(axis: int) -> Shape:
        sizes.append(shapes[x][axis])
        return (len(sizes) - 1,)

    for mine, other in zip(contracted[w], contracted[x], strict=True):
        if mine in copied:
            return "its weight is broadcast along a contracted axis"
        groups[other] = view.axes[mine]
        _set_role(roles, view.axes[mine], "i")
    for mine, other in zip(batch[w], batch[x], strict=True):
        groups[other] = new_label(other) if mine in copied else view.axes[mine]
        _set_role(roles, view.axes[mine], "b")
    rest = [set(range(len(shape))) for shape in shapes]
    for operand in (0, 1):
        rest[operand] -= {*contracted[operand], *batch[operand]}
    if rest[w].intersection(copied):
        return "its weight is broadcast along an axis of the result"
    if not {"i", "o"} <= set(roles):
        return NO_MATRIX
    for axis in sorted(rest[x]):
        groups[axis] = new_label(axis) if shapes[x][axis] != 1 else ()
    # The result of dot_general: batch axes, then the rest of its first operand, then of
    # its second.
    result = [groups[axis] for axis in batch[x]]
    for operand in (0, 1):
        of = view.axes if operand == w else groups
        result += [of[axis] for axis in sorted(rest[operand])]
    x_groups = [groups[axis] for axis in range(len(shapes[x]))]
    return _written(view, roles, x_groups, result, sizes)


def _set_role(roles: list[str], atoms: Shape, role: str) -> None:
    for atom in atoms:
        roles[atom] = role


def _with_role(role: str, roles: Sequence[str | None]) -> Shape:
    """Return the numbers of the axes, or atoms, that have a role."""
    return tuple(number for number, own in enumerate(roles) if own == role)


def _written(
    view: View,
    roles: list[str],
    x_groups: list[Shape],
    result_groups: list[Shape],
    sizes: list[int],
) -> Factors:
    """Write a product whose axes are groups of labels, of these sizes."""
    x = list(itertools.chain(*x_groups))
    result = list(itertools.chain(*result_groups))
    atoms = range(len(roles))
    own = [label for label in x if label not in atoms]
    layout = Layout(
        _with_role("i", roles), _with_role("o", roles), _with_role("b", roles)
    )
    natural = [*layout.stack, *own, *layout.outputs]
    contraction = Contraction(
        layout,
        len(x),
        inputs=tuple(map(x.index, layout.inputs)),
        stack=tuple(map(x.index, layout.stack)),
        order=None if natural == result else tuple(map(natural.index, result)),
    )
    letters = dict(zip([*atoms, *own], _LETTERS, strict=False))
    x_text, w_text, out_text = (
        "".join(map(letters.__getitem__, labels)) for labels in (x, atoms, result)
    )
    return Factors(
        contraction,
        _sizes_of(x_groups, sizes),
        _sizes_of(result_groups, sizes),
        tuple(roles),
        math.prod(sizes[label] for label in own),
        _layout_of(view, roles),
        f"{x_text},{w_text}->{out_text}",
    )


def _sizes_of(groups: list[Shape], sizes: list[int]) -> Axes:
    """Return the sizes of the labels of each axis; () if each axis is one label."""
    if all(len(group) == 1 for group in groups):
        return ()
    return tuple(tuple(map(sizes.__getitem__, group)) for group in groups)


def factors_of(eqn: Equation, side: int, view: View) -> Factors | str:
    """Return the product of an equation with a view as operand `side`, or why not.

    A grouped product is written as the one of a stack, as if each weight multiplied an
    `x[e, m, k]` of its own.
    """
    shapes = [tuple(var.aval.shape) for var in eqn.invars[:2]]
    if eqn.primitive.name != GROUPED:
        return factors(eqn.params["dimension_numbers"], shapes, side, view)
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (of_x, of_w), batch = numbers.dot_dimension_numbers
    ragged = tuple(numbers.lhs_ragged_dimensions)
    ndims = [len(var.aval.shape) for var in eqn.invars]
    by_rows = ndims == [2, 3, 1] and tuple(of_x) == (1,) and ragged == (0,)
    if side != 1 or not by_rows or any(batch):
        return (
            "a ragged_dot_general other than x[m, k] with rows in groups and one weight"
            " for each group"
        )
    (group,) = numbers.rhs_group_dimensions
    copied = shapes[1][group] > 1 and not view.axes[group]
    if copied or any(tuple(sorted(atoms)) != atoms for atoms in view.axes):
        return (
            "the weights of its groups are copies, or merge axes in another order than"
            " the parameter's"
        )
    shapes[0] = (shapes[1][group], *shapes[0])
    contracted = ((2,), tuple(of_w))
    found = factors((contracted, ((0,), (group,))), shapes, side, view)
    if isinstance(found, str):
        return found
    stack = {ord(_LETTERS[atom]): None for atom in _with_role("b", found.roles)}
    x, rest = found.equation.split(",")
    w, out = rest.split("->")
    equation = f"{x.translate(stack)},{w}->{out.translate(stack)} in groups"
    return dataclasses.replace(found, equation=equation)


def _layout_of(view: View, roles: Sequence[str]) -> Layout | None:
    """Return the layout of the whole parameter, from the roles of the view's atoms.

    The axes that loops and indices removed are its stack. None: the parameter cannot be
    stored, because two parts of the product share one of its axes, or only a part is
    multiplied. A device's part of a stack is whole: each weight has a scale of its own.
    """
    if not view.whole:
        return None
    found: list[str | None] = []
    for axis in range(len(view.shape)):
        parts = {roles[atom] for atom, of in enumerate(view.origin) if of == axis}
        if axis in view.taken:
            parts.add("b")
        if len(parts) > 1 or (axis in view.split and parts != {"b"}):
            return None
        found.append(parts.pop() if parts else None)
    # An axis of size 1 has no role. With the role of its neighbour it keeps the
    # matrix's orientation.
    axes = range(len(found))
    for axis in [*reversed(axes), *axes]:
        after = found[axis + 1 : axis + 2]
        before = found[max(axis - 1, 0) : axis]
        near = [role for role in after + before if role in ("i", "o")]
        if found[axis] is None and near:
            found[axis] = near[0]
    if None in found:
        return None
    kept = [axis for axis in _with_role("b", found) if axis not in view.taken]
    stack = (*view.taken, *kept)
    return Layout(_with_role("i", found), _with_role("o", found), stack)


def product_of(
    eqn: Equation,
    side: int,
    path: str,
    reason: str,
    view: View | None = None,
    why: str = "",
) -> Product:
    """Return the product of operand `side`, over its parameter's axes or with a reason.

    `reason` says why the product cannot be converted, if that is known already, and
    `why` tells why the weight is not a view: the equation may have another reason,
    which comes first.
    """
    shape = tuple(eqn.invars[side].aval.shape) if view is None else view.shape
    described = Product(
        path,
        shape,
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
    return dataclasses.replace(
        described,
        equation=found.equation,
        k=_size_of("i", found, view),
        n=_size_of("o", found, view),
        rows=found.rows,
        layout=found.layout,
    )


def computed_product(
    eqn: Equation, side: int, path: str, reason: str, computed: str
) -> Product:
    """Return the product of operand `side`, which was computed from parameters.

    Each use quantizes it, so it has no layout.
    """
    whole = View.of(tuple(eqn.invars[side].aval.shape))
    found = product_of(eqn, side, path, reason, whole)
    return dataclasses.replace(found, layout=None, computed=computed, side=side)


def other_product(
    eqn: Equation, facts: Facts, contracted: Sequence[Shape]
) -> Product | None:
    """Return a product that is not one of a weight and an input, with its reason.

    None: neither operand was meant to be a weight.
    """
    sides = facts[:2]
    for side, fact in enumerate(sides):
        if fact.is_weight:
            return product_of(eqn, side, fact.source, NO_INPUT)
    for side, fact in enumerate(sides):
        if fact.why and fact.params:
            return product_of(eqn, side, fact.source, fact.why)
    closed = [side for side, fact in enumerate(sides) if fact.closed]
    # A constant that sums nothing, such as a table of rotations, is not a weight that
    # was forgotten.
    sums = not contracted or bool(contracted[0])
    if len(closed) != 1 or not sums:
        return None
    (side,) = closed
    return product_of(eqn, side, facts[side].source or "(closed over)", CLOSED)


def _size_of(role: str, found: Factors, view: View) -> int:
    """Return the number of entries along the atoms of a role."""
    return math.prod(view.sizes[atom] for atom in _with_role(role, found.roles))


def _refusal(eqn: Equation, side: int, view: View | None) -> str:
    """Return why no operands give a product a low-precision form, or ""."""
    # A function that differentiates itself multiplies by parameters backward, too: not
    # its forward products.
    scopes = {getattr(entry, "name", "") for entry in eqn.source_info.name_stack.stack}
    if scopes & {"jvp", "transpose"}:
        return (
            "inside jax.grad or jax.jvp; transform the function that is differentiated,"
            " and differentiate that"
        )
    name = eqn.primitive.name
    if name == "conv_general_dilated":
        return "a convolution"
    if name not in ("dot_general", GROUPED):
        return f"a {name}"
    variables = (*eqn.invars[:2], *eqn.outvars)
    types = [jnp.dtype(var.aval.dtype) for var in variables]
    if view is None or all(map(_is_float, types)):
        return ""
    return f"a product of {types[1 - side]} by {types[side]}"


def _is_float(dtype: jnp.dtype) -> bool:
    """Return whether numbers of a dtype can be quantized: floats of 16 bits or more."""
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 1


def _precision(eqn: Equation) -> str:
    """Return the precision that an author asked for beyond the default, or ""."""
    asked = eqn.params.get("precision")
    both = asked if isinstance(asked, tuple | list) else (asked,)
    for one in both:
        name = str(getattr(one, "name", one))
        if name.upper() not in ("NONE", "DEFAULT"):
            return name
    return ""


def product_by_hand(eqn: Equation, mark: Mark, path: str, view: View) -> Product:
    """Return the product that a layer of this library computes with its marked kernel.

    The mark has the layout of the array that the layer multiplies. The weight is stored
    by the parameter's layout.
    """
    shape = eqn.invars[0].aval.shape
    layout = mark.layout.stacked(len(shape))
    roles = ["o"] * len(view.sizes)
    for axis in layout.inputs:
        _set_role(roles, view.axes[axis], "i")
    for axis in layout.stack:
        _set_role(roles, view.axes[axis], "b")
    return Product(
        path,
        view.shape,
        "dot_general",
        k=math.prod(shape[axis] for axis in layout.inputs),
        n=math.prod(shape[axis] for axis in layout.outputs),
        rows=mark.rows,
        scope=str(eqn.source_info.name_stack),
        layout=_layout_of(view, roles),
        recipe=mark.recipe,
    )


def head_of_loss(eqn: Equation, body: core.Jaxpr) -> Equation | None:
    """Return `x[t, k] @ w[k, n]` inside a `losses.cross_entropy` as an equation.

    None: the equation is something else, or a loss with a stored weight, whose recipe
    cannot change.
    """
    if [len(var.aval.shape) for var in eqn.invars] != [2, 2, 1, 1]:
        return None
    options = head_of(body)
    if options is None or options.recipe.stored is not None:
        return None
    operands = []
    for var in eqn.invars[:2]:
        operands.append(jax.ShapeDtypeStruct(var.aval.shape, jnp.float32))
    product = functools.partial(lax.dot_general, dimension_numbers=MATRIX)
    program = jax.make_jaxpr(product)(*operands)
    return program.eqns[0].replace(source_info=eqn.source_info)
