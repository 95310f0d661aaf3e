"""`View`: an array of a traced program that shows one parameter and nothing else, as static data.

Reshaped, transposed, cast, broadcast, sliced or taken out of a stack, a parameter is still the parameter. A view says
which of its axes each axis of the array runs over, so that a product with the array can be written over the
parameter's own axes: there the stored weight fits, and the gradient goes straight to the parameter.

    parameter [8, 4, 2]  --reshape-->  [8, 8]       axes ((0,), (1, 2))
                         --transpose-->  [8, 8]     axes ((1, 2), (0,))

Axes are split into *atoms*, the finest pieces that reshapes have cut; axes of size 1 have none. `move` takes a view
through one equation. It asks only for the methods of `View`, so that the evaluation, whose views hold arrays, moves by
the same rules as the census.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.sharding import NamedSharding

from tcfp_jax.products.contraction import Contraction
from tcfp_jax.weights.layout import Layout

# What hands a value on: the numbers may be rounded on the way, but they are the parameter's.
_SAME = {
    "convert_element_type", "copy", "copy_p", "stop_gradient", "sharding_constraint", "reshard", "name",
    "optimization_barrier", "device_put", "mesh_cast", "pvary", "pcast", "reduce_precision",
}  # fmt: skip


@dataclass(frozen=True)
class View:
    """An array that shows one parameter.

    Attributes:
      shape: of the parameter.
      sizes: of the atoms, in the parameter's order.
      origin: the parameter's axis that each atom is part of.
      axes: the atoms of each axis of the array, major first; none where it has size 1, or is broadcast.
      taken: the parameter's axes that loops and indices took away, outermost first.
      whole: whether no axis was cut: a part of a parameter has no stored form.
      casts: the dtypes that the numbers went through.
    """

    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    origin: tuple[int, ...]
    axes: tuple[tuple[int, ...], ...]
    taken: tuple[int, ...] = ()
    whole: bool = True
    casts: tuple[str, ...] = ()

    @staticmethod
    def of(shape: tuple[int, ...]) -> "View":
        """A parameter itself.

        >>> View.of((8, 1, 4)).axes
        ((0,), (), (1,))
        """
        wide = [axis for axis, size in enumerate(shape) if size > 1]
        axes = tuple((wide.index(axis),) if axis in wide else () for axis in range(len(shape)))
        return View(tuple(shape), tuple(shape[axis] for axis in wide), tuple(wide), axes)

    def transpose(self, permutation: Any) -> "View":
        """The axes in another order."""
        return dataclasses.replace(self, axes=tuple(self.axes[axis] for axis in permutation))

    def squeeze(self, dimensions: Any) -> "View":
        """Without some axes of size 1."""
        return dataclasses.replace(self, axes=tuple(a for i, a in enumerate(self.axes) if i not in dimensions))

    def broadcast(self, places: Any, ndim: int) -> "View":
        """Its axes at `places` of an array of `ndim` axes."""
        at = dict(zip(places, self.axes, strict=True))
        return dataclasses.replace(self, axes=tuple(at.get(axis, ()) for axis in range(ndim)))

    def cast(self, dtype: Any) -> "View":
        """In another dtype."""
        name = jnp.dtype(dtype).name
        return self if self.casts[-1:] == (name,) else dataclasses.replace(self, casts=(*self.casts, name))

    def reshape(self, old: tuple[int, ...], new: tuple[int, ...]) -> "View | None":
        """None where the new axes cut across the old ones, or an axis is a broadcast one.

        >>> View.of((8, 4)).reshape((8, 4), (2, 4, 4)).sizes
        (2, 4, 4)
        """
        if any(size > 1 and not axes for size, axes in zip(old, self.axes, strict=True)):
            return None
        flat = [(atom, self.sizes[atom]) for axes in self.axes for atom in axes]
        parts: list[tuple[int, int]] = []
        axes: list[list[int]] = []
        for size in new:
            axes.append([])
            while size > 1:
                if not flat:
                    return None
                atom, have = flat.pop(0)
                take = have if size % have == 0 else size
                if have % take:
                    return None
                flat[:0] = [(atom, have // take)] if take < have else []
                axes[-1].append(len(parts))
                parts.append((atom, take))
                size //= take
        order = sorted(range(len(parts)), key=lambda i: (parts[i][0], i))
        return dataclasses.replace(
            self, sizes=tuple(parts[i][1] for i in order), origin=tuple(self.origin[parts[i][0]] for i in order),
            axes=tuple(tuple(order.index(i) for i in group) for group in axes),
        )  # fmt: skip

    def drop(self, axis: int) -> "View":
        """Without an axis of one atom, of which a loop takes one entry after the other."""
        (atom,) = self.axes[axis]
        lost = self.origin[atom]
        keep = lambda values: values[:atom] + values[atom + 1 :]
        rest = tuple(tuple(a - (a > atom) for a in axes) for i, axes in enumerate(self.axes) if i != axis)
        alone = self.origin.count(lost) == 1
        return dataclasses.replace(
            self, sizes=keep(self.sizes), origin=keep(self.origin), axes=rest,
            taken=(*self.taken, lost) if alone else self.taken, whole=self.whole and alone,
        )  # fmt: skip

    def at(self, axis: int, index: Any) -> "View":
        """One entry of an axis, which stays with size 1."""
        if not self.axes[axis]:
            return self
        moved = self.drop(axis)
        return dataclasses.replace(moved, axes=(*moved.axes[:axis], (), *moved.axes[axis:]))

    def local(self, shape: tuple[int, ...]) -> "View | None":
        """What one device has of it inside `shard_map`, where it is a parameter as it came; None where it is not."""
        if self != dataclasses.replace(View.of(self.shape), casts=self.casts):
            return None
        return dataclasses.replace(View.of(shape), shape=self.shape, whole=False, casts=self.casts)

    def gather(self, axis: int, name: Any, devices: int) -> "View | None":
        """All devices' parts of an axis, one after the other."""
        if len(self.axes[axis]) != 1:
            return None
        (atom,) = self.axes[axis]
        sizes = (*self.sizes[:atom], self.sizes[atom] * devices, *self.sizes[atom + 1 :])
        return dataclasses.replace(self, sizes=sizes)

    def part(self, axis: int, start: Any, size: int) -> "View":
        """Some entries of an axis."""
        if not self.axes[axis]:
            return self
        (atom,) = self.axes[axis]
        sizes = (*self.sizes[:atom], size, *self.sizes[atom + 1 :])
        return dataclasses.replace(self, sizes=sizes, whole=False)

    def constrain(self, sharding: Any) -> "View":
        """Where its axes live."""
        return self

    def stop(self) -> "View":
        """Without a gradient."""
        return self

    def vary(self, eqn: Any) -> "View":
        """The same numbers, in a type that may differ between devices."""
        return self


def move(view: Any, eqn: Any, number: int, starts: Any) -> Any:
    """The view that output `number` of an equation of a view is, or None if it is none.

    Args:
      view: of the first operand (of operand `number` where the equation has an output for each operand).
      eqn: an equation of a jaxpr.
      number: which output.
      starts: of a dynamic slice and a gather, the operands that say where.
    """
    name, params = eqn.primitive.name, eqn.params
    old, out = eqn.invars[0].aval.shape, eqn.outvars[number].aval
    if name in _SAME:
        if not jnp.issubdtype(out.dtype, jnp.floating):
            return None
        if name == "stop_gradient":
            view = view.stop()
        if name in ("pvary", "pcast"):
            view = view.vary(eqn)
        if name in ("sharding_constraint", "reshard"):
            wanted = params.get("sharding", params.get("dst_sharding"))
            view = view.constrain(wanted) if isinstance(wanted, NamedSharding) else view
        return view.cast(out.dtype)
    if name == "transpose":
        return view.transpose(params["permutation"])
    if name == "squeeze":
        return view.squeeze(params["dimensions"])
    if name == "broadcast_in_dim":
        return view.broadcast(params["broadcast_dimensions"], len(out.shape))
    if name == "reshape":
        return view.reshape(old, out.shape) if params.get("dimensions") is None else None
    if name == "gather":
        return _gathered(view, eqn, starts)
    if name in ("all_gather", "all_gather_invariant"):
        whole = params["tiled"] and params["axis_index_groups"] is None
        return view.gather(params["all_gather_dimension"], params["axis_name"], params["axis_size"]) if whole else None
    return _sliced(view, eqn, number, starts)


def _sliced(view: Any, eqn: Any, number: int, starts: Any) -> Any:
    name, params, old = eqn.primitive.name, eqn.params, eqn.invars[0].aval.shape
    found: Any = None
    if name == "slice" and params["strides"] in (None, (1,) * len(old)):
        found = params["start_indices"]
    if name == "dynamic_slice":
        found = starts
    if name == "split":
        found = [sum(params["sizes"][:number]) if axis == params["axis"] else 0 for axis in range(len(old))]
    if found is None:
        return None
    for axis, (before, after) in enumerate(zip(old, eqn.outvars[number].aval.shape, strict=True)):
        if before != after:
            if len(view.axes[axis]) > 1:
                return None
            view = view.at(axis, found[axis]) if after == 1 else view.part(axis, found[axis], after)
    return view


def _gathered(view: Any, eqn: Any, starts: Any) -> Any:
    """`w[i]` with one index: all of the other axes."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    collapsed, old = tuple(numbers.collapsed_slice_dims), eqn.invars[0].aval.shape
    one = len(collapsed) == 1 and numbers.start_index_map == collapsed and eqn.invars[1].aval.shape == (1,)
    if not one or numbers.operand_batching_dims or len(view.axes[collapsed[0]]) > 1:
        return None
    axis = collapsed[0]
    if any(size != old[i] for i, size in enumerate(sizes) if i != axis):
        return None
    return view.at(axis, starts[0] if starts else None).squeeze((axis,))


@dataclass(frozen=True)
class Factors:
    """A product with a view, written over the parameter's own axes.

    Attributes:
      contraction: of x, reshaped to `x_shape`, and the parameter in atoms.
      x_groups: the sizes into which each axis of x is split, as the atoms are; none of an axis of size 1.
      out_groups: the sizes of the product's axes that make each axis of the result.
      roles: of each atom, "i" (contracted), "o" (in the result alone) or "b" (shared by both and the result).
      rows: how many rows of x each matrix multiplies.
    """

    contraction: Contraction
    x_groups: tuple[tuple[int, ...], ...]
    out_groups: tuple[tuple[int, ...], ...]
    roles: tuple[str, ...]
    rows: int


def factors(numbers: Any, shapes: Any, side: int, view: View) -> "Factors | str":
    """The product of `lax.dot_general` with a view on one side, or why the view's own axes cannot say it."""
    w, x = side, 1 - side
    contracted, batch = numbers
    atoms = len(view.sizes)
    wide = lambda axis: shapes[w][axis] > 1 and not view.axes[axis]
    roles = ["o"] * atoms
    # Axes of x as lists of labels: an atom's number, or a label of its own for what the kernel does not have.
    groups: list[Any] = [None] * len(shapes[x])
    own = iter(range(atoms, atoms + 2 * len(shapes[x]) + 2))
    size = dict(enumerate(view.sizes))
    for kind, pairs in (("i", contracted), ("b", batch)):
        for mine, other in zip(pairs[w], pairs[x], strict=True):
            if kind == "i" and wide(mine):
                return "its weight is broadcast along a contracted axis"
            groups[other] = [next(own)] if wide(mine) else list(view.axes[mine])
            size |= {label: shapes[x][other] for label in groups[other] if label >= atoms}
            for atom in view.axes[mine]:
                roles[atom] = kind
    w_rest = [axis for axis in range(len(shapes[w])) if axis not in (*contracted[w], *batch[w])]
    if any(map(wide, w_rest)):
        return "its weight is broadcast along an axis of the result"
    if not {"i", "o"} <= set(roles):
        return "it is not a matrix product: nothing is contracted, or nothing is left of the weight"
    rest = [axis for axis, group in enumerate(groups) if group is None]
    for axis in rest:
        groups[axis] = [next(own)] if shapes[x][axis] != 1 else []
        size |= {label: shapes[x][axis] for label in groups[axis]}
    sides = {w: [view.axes[axis] for axis in w_rest], x: [groups[axis] for axis in rest]}
    return _factors(groups, roles, [*(groups[axis] for axis in batch[x]), *sides[0], *sides[1]], size)


def _factors(x_groups: list[Any], roles: list[str], out_groups: list[Any], size: dict[int, int]) -> Factors:
    x, result = ([label for group in groups for label in group] for groups in (x_groups, out_groups))
    sizes = lambda groups: tuple(tuple(size[label] for label in group) for group in groups)
    pick = lambda kind: tuple(atom for atom, role in enumerate(roles) if role == kind)
    inputs, outputs, stack = pick("i"), pick("o"), pick("b")
    rest = [label for label in x if label >= len(roles)]
    natural = [*stack, *rest, *outputs]
    order = None if natural == result else tuple(natural.index(label) for label in result)
    contraction = Contraction(
        Layout(inputs, outputs, stack), len(x), tuple(map(x.index, inputs)), tuple(map(x.index, stack)), order
    )
    rows = contraction.tokens(tuple(size[label] for label in x))
    return Factors(contraction, sizes(x_groups), sizes(out_groups), tuple(roles), rows)


def layout_of(view: View, roles: tuple[str, ...]) -> Layout | None:
    """The layout of the whole parameter, loops and indices included; None where it cannot be stored for this product.

    An axis that is split between two parts of the product, and a weight of which only a part is multiplied, have none.
    """
    if not view.whole:
        return None
    found: list[str | None] = []
    for axis in range(len(view.shape)):
        parts = {role for origin, role in zip(view.origin, roles, strict=True) if origin == axis}
        parts |= {"b" for taken in view.taken if taken == axis}
        if len(parts) > 1:
            return None
        found.append(parts.pop() if parts else None)
    # An axis of size 1 belongs to nobody; with its neighbour's part it keeps the matrix's orientation.
    for axis in [*reversed(range(len(found))), *range(len(found))]:
        near = [role for role in (*found[axis + 1 : axis + 2], *found[max(axis - 1, 0) : axis]) if role in ("i", "o")]
        found[axis] = found[axis] or (near[0] if near else None)
    pick = lambda kind: tuple(axis for axis, role in enumerate(found) if role == kind)
    rest = tuple(axis for axis in pick("b") if axis not in view.taken)
    return None if None in found else Layout(pick("i"), pick("o"), view.taken + rest)
