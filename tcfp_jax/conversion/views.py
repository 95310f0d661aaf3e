"""`View`: static data that says how an array of a traced program shows one parameter.

A parameter that is reshaped, transposed, cast, broadcast, sliced or taken out of a
stack is still the parameter. A view says which of the parameter's axes each axis of the
array runs over. A product with the array can then be written over the parameter's own
axes: the stored weight fits there, and the gradient goes straight to the parameter.

    parameter [8, 4, 2]  --reshape-->  [8, 8]       axes ((0,), (1, 2))
                         --transpose-->  [8, 8]     axes ((1, 2), (0,))

Axes are split into *atoms*, the finest pieces that reshapes have cut; an axis of size 1
has no atom. `move` takes a view through one equation. It uses nothing but the methods
of `View`, which `shown.Shown` has too: the evaluation, whose views hold arrays,
therefore moves by the same rules as the census.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar

import jax.numpy as jnp
from jax import Array
from jax.extend import core
from jax.typing import DTypeLike

from pallas_kernels.specs import Shape

# Primitives that hand numbers on. They may round (a cast), but the numbers are still
# the parameter's.
_SAME = {
    "convert_element_type",
    "copy",
    "copy_p",
    "stop_gradient",
    "sharding_constraint",
    "reshard",
    "name",
    "optimization_barrier",
    "device_put",
    "mesh_cast",
    "pvary",
    "pcast",
    "reduce_precision",
}
# The ones of these primitives with an output for each operand.
_SEVERAL = ("optimization_barrier", "device_put", "mesh_cast")
Axes = tuple[Shape, ...]
# The numbers of the equations around an equation, outermost first, and its own.
Place = tuple[int, ...]
Start = Array | int  # where a slice begins
_Piece = tuple[int, int]  # the atom that it is cut from, and its size


class Equation(Protocol):
    """An equation of a jaxpr.

    Its variables are Any, because JAX's type of an abstract value has no shape.
    """

    primitive: core.Primitive
    params: dict[str, Any]
    invars: list[Any]
    outvars: list[Any]
    source_info: Any
    ctx: Any

    def replace(self, *, params: dict[str, Any]) -> "Equation": ...  # noqa: D102


class _Movable(Protocol):
    """The methods that `move` needs; each returns the moved view or None."""

    @property
    def axes(self) -> Axes: ...
    def arrange(self, axes: Sequence[int | None]) -> Self: ...
    def cast(self, dtype: DTypeLike) -> Self: ...
    def reshape(self, old: Shape, new: Shape) -> Self | None: ...
    def at(self, axis: int, index: Start) -> Self: ...
    def part(self, axis: int, start: Start, size: int) -> Self: ...
    def gather(self, axis: int, name: Hashable, devices: int) -> Self | None: ...
    def same(self, eqn: Equation) -> Self: ...


_V = TypeVar("_V", bound=_Movable)


@dataclass(frozen=True)
class View:
    """An array that shows one parameter.

    Attributes:
      shape: shape of the parameter.
      sizes: sizes of the atoms, in the parameter's order.
      origin: the parameter's axis that each atom is part of.
      axes: the atoms of each axis of the array, major first; none if the axis has size
        1 or is broadcast.
      taken: the parameter's axes that loops and indices removed, outermost first.
      whole: whether no axis was cut. A part of a parameter has no stored form.
      casts: the dtypes that the numbers went through.
      split: the parameter's axes of which a device has a part inside `shard_map`.
    """

    shape: Shape
    sizes: Shape
    origin: Shape
    axes: Axes
    taken: Shape = ()
    whole: bool = True
    casts: tuple[str, ...] = ()
    split: Shape = ()

    @staticmethod
    @functools.lru_cache(maxsize=4096)
    def of(shape: Shape) -> "View":
        """Return the view of a parameter that was not moved.

        >>> View.of((8, 1, 4)).axes
        ((0,), (), (1,))
        """
        wide = tuple(axis for axis, size in enumerate(shape) if size > 1)
        axes: list[Shape] = [()] * len(shape)
        for atom, axis in enumerate(wide):
            axes[axis] = (atom,)
        sizes = tuple(shape[axis] for axis in wide)
        return View(tuple(shape), sizes, wide, tuple(axes))

    def arrange(self, axes: Sequence[int | None]) -> "View":
        """Return the view whose axis i is axis `axes[i]` of this one.

        None is a new axis of one entry or of copies.

        >>> View.of((8, 4)).arrange([1, None, 0]).axes
        ((1,), (), (0,))
        """
        moved: list[Shape] = []
        for axis in axes:
            moved.append(() if axis is None else self.axes[axis])
        return dataclasses.replace(self, axes=tuple(moved))

    def cast(self, dtype: DTypeLike) -> "View":
        """Return the view in another dtype."""
        name = jnp.dtype(dtype).name
        if self.casts[-1:] == (name,):
            return self
        return dataclasses.replace(self, casts=(*self.casts, name))

    def reshape(self, old: Shape, new: Shape) -> "View | None":
        """Return the view in another shape, or None if there is no such view.

        None: the new axes cut across old ones, or an axis holds copies.

        >>> View.of((8, 4)).reshape((8, 4), (2, 4, 4)).sizes
        (2, 4, 4)
        """
        for size, atoms in zip(old, self.axes, strict=True):
            if size > 1 and not atoms:
                return None
        order = itertools.chain(*self.axes)
        left = [(atom, self.sizes[atom]) for atom in order]
        pieces: list[_Piece] = []
        axes: list[list[int]] = []
        for size in new:
            taken = _take(left, size)
            if taken is None:
                return None
            axes.append(list(range(len(pieces), len(pieces) + len(taken))))
            pieces += taken
        # Atoms are numbered in the parameter's order, which may not be the order of the
        # array's axes.
        by_atom = sorted(range(len(pieces)), key=lambda i: pieces[i][0])
        number = {piece: atom for atom, piece in enumerate(by_atom)}
        sizes = []
        origin = []
        for piece in by_atom:
            atom, size = pieces[piece]
            sizes.append(size)
            origin.append(self.origin[atom])
        return dataclasses.replace(
            self,
            sizes=tuple(sizes),
            origin=tuple(origin),
            axes=tuple(tuple(map(number.__getitem__, group)) for group in axes),
        )

    def drop(self, axis: int) -> "View":
        """Return the view of one entry of an axis of one atom, without the axis.

        A loop takes entry after entry.
        """
        (atom,) = self.axes[axis]
        lost = self.origin[atom]
        axes = []
        for atoms in (*self.axes[:axis], *self.axes[axis + 1 :]):
            axes.append(tuple(one - (one > atom) for one in atoms))
        # Otherwise a reshape cut the axis: an entry is a part of a parameter
        alone = self.origin.count(lost) == 1
        return dataclasses.replace(
            self,
            sizes=self.sizes[:atom] + self.sizes[atom + 1 :],
            origin=self.origin[:atom] + self.origin[atom + 1 :],
            axes=tuple(axes),
            taken=(*self.taken, lost) if alone else self.taken,
            whole=self.whole and alone,
        )

    def at(self, axis: int, index: Start) -> "View":
        """Return the view of one entry of an axis, which stays with size 1."""
        if not self.axes[axis]:
            return self
        moved = self.drop(axis)
        axes = list(moved.axes)
        axes.insert(axis, ())
        return dataclasses.replace(moved, axes=tuple(axes))

    def part(self, axis: int, start: Start, size: int) -> "View":
        """Return the view of some neighbouring entries of an axis."""
        return self._resized(axis, size, whole=False) if self.axes[axis] else self

    def gather(self, axis: int, name: Hashable, devices: int) -> "View | None":
        """Return the view of all devices' parts of an axis, joined in order.

        None: the axis has several atoms.
        """
        if len(self.axes[axis]) != 1:
            return None
        (atom,) = self.axes[axis]
        return self._resized(axis, self.sizes[atom] * devices, whole=False)

    def _resized(self, axis: int, size: int, *, whole: bool) -> "View":
        (atom,) = self.axes[axis]
        sizes = list(self.sizes)
        sizes[atom] = size
        return dataclasses.replace(self, sizes=tuple(sizes), whole=whole)

    def local(self, shape: Shape) -> "View | None":
        """Return one device's part of the array, of this shape, inside `shard_map`.

        None: the part cuts merged axes.

        >>> View.of((8, 4, 2)).local((2, 4, 2)).split
        (0,)
        >>> View.of((2, 4, 2)).local((1, 4, 2)).taken
        (0,)
        """
        view = self
        for axis, (atoms, size) in enumerate(zip(self.axes, shape, strict=True)):
            if math.prod(self.sizes[atom] for atom in atoms) in (1, size):
                continue
            if len(atoms) > 1:
                return None
            if size == 1:  # a stack of one weight: the device takes it out of the stack
                view = view.at(axis, 0)
                continue
            origin = self.origin[atoms[0]]
            alone = self.origin.count(origin) == 1
            view = view._resized(axis, size, whole=view.whole and alone)
            view = dataclasses.replace(view, split=(*view.split, origin))
        return view

    def same(self, eqn: Equation) -> "View":
        """Return the view itself: the equation does not move the numbers.

        It may place them or stop their gradient.
        """
        return self


def _take(left: list[_Piece], size: int) -> list[_Piece] | None:
    """Take (atom, size) pieces off the front until they fill an axis of this size.

    The last atom may be cut, and its rest stays in front for the next axis. None: an
    atom would have to be cut unevenly.
    """
    taken: list[_Piece] = []
    while size > 1:
        if not left:
            return None
        atom, have = left.pop(0)
        piece = have if size % have == 0 else size
        if have % piece:
            return None
        if piece < have:
            left.insert(0, (atom, have // piece))
        taken.append((atom, piece))
        size //= piece
    return taken


def operand_number(eqn: Equation, number: int) -> int | None:
    """Return which operand output `number` may be a view of.

    None: the equation mixes its operands.

    >>> import jax
    >>> add, neg = jax.make_jaxpr(lambda x, y: -(x + y))(1.0, 1.0).eqns
    >>> operand_number(add, 0), operand_number(neg, 0)
    (None, 0)
    """
    name = eqn.primitive.name
    if name in _SEVERAL and len(eqn.invars) > 1:
        return number
    return 0 if len(eqn.invars) == 1 or name in ("dynamic_slice", "gather") else None


def move(view: _V, eqn: Equation, number: int, starts: Sequence[Start]) -> _V | None:
    """Return the view that output `number` of an equation is, or None if it is none.

    Args:
      view: the view that operand `operand_number(eqn, number)` is.
      eqn: the equation.
      number: number of the output.
      starts: the start indices of a dynamic slice or a gather.
    """
    name = eqn.primitive.name
    params = eqn.params
    old = eqn.invars[0].aval.shape
    out = eqn.outvars[number].aval
    if name in _SAME:
        is_float = jnp.issubdtype(out.dtype, jnp.floating)
        return view.same(eqn).cast(out.dtype) if is_float else None
    if name == "transpose":
        return view.arrange(params["permutation"])
    if name == "squeeze":
        lost = params["dimensions"]
        return view.arrange([axis for axis in range(len(old)) if axis not in lost])
    if name == "broadcast_in_dim":
        place = {new: axis for axis, new in enumerate(params["broadcast_dimensions"])}
        return view.arrange([place.get(axis) for axis in range(len(out.shape))])
    if name == "reshape":
        in_order = params.get("dimensions") is None
        return view.reshape(old, out.shape) if in_order else None
    if name in ("all_gather", "all_gather_invariant"):
        if not params["tiled"] or params["axis_index_groups"] is not None:
            return None
        axis = params["all_gather_dimension"]
        return view.gather(axis, params["axis_name"], params["axis_size"])
    if name == "gather":
        return _gathered(view, eqn, starts)
    if name == "slice" and params["strides"] in (None, (1,) * len(old)):
        return _sliced(view, old, out.shape, params["start_indices"])
    if name == "dynamic_slice":
        return _sliced(view, old, out.shape, starts)
    if name == "split":
        first = [0] * len(old)
        first[params["axis"]] = sum(params["sizes"][:number])
        return _sliced(view, old, out.shape, first)
    return None


def _sliced(view: _V, old: Shape, new: Shape, starts: Sequence[Start]) -> _V | None:
    for axis, (before, after) in enumerate(zip(old, new, strict=True)):
        if before == after:
            continue
        if len(view.axes[axis]) > 1:
            return None
        if after == 1:
            view = view.at(axis, starts[axis])
        else:
            view = view.part(axis, starts[axis], after)
    return view


def _gathered(view: _V, eqn: Equation, starts: Sequence[Start]) -> _V | None:
    """Return the view of `w[i]` with a single index.

    A gather of several rows is a lookup and not a view.
    """
    numbers = eqn.params["dimension_numbers"]
    collapsed = tuple(numbers.collapsed_slice_dims)
    one_axis = len(collapsed) == 1 and numbers.start_index_map == collapsed
    one_index = eqn.invars[1].aval.shape == (1,)
    if not one_axis or not one_index or numbers.operand_batching_dims:
        return None
    (axis,) = collapsed
    old = eqn.invars[0].aval.shape
    rest = [other for other in range(len(old)) if other != axis]
    sizes = eqn.params["slice_sizes"]
    is_whole = all(sizes[other] == old[other] for other in rest)
    if len(view.axes[axis]) > 1 or not is_whole:
        return None
    return view.at(axis, starts[0]).arrange(rest)
