"""`Shown`: a view together with its arrays, and the products that read it.

The evaluation of a program holds a parameter as a `Shown`.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from pallas_kernels.specs import (
    Entry,
    entries,
    regrouped,
    sharding_of,
    ungrouped,
    varying_alike,
)
from tcfp_jax.conversion.views import Axes, Equation, Shape, Start, View
from tcfp_jax.layers import Absent
from tcfp_jax.weights.deferred import Deferred
from tcfp_jax.weights.layout import Layout, Weight
from tcfp_jax.weights.lookup import gathered, with_gradient
from tcfp_jax.weights.stored import Stored, constant

# Shapes that stand for arrays without values.
SHAPES = (jax.ShapeDtypeStruct, Absent)
_static: Any = functools.partial(field, metadata=dict(static=True))
# The root and the stored form of a parameter, or a device's parts of them.
Parts = tuple[Array | None, Stored | None]
# Values of variables: a `Shown`, or an array (or another value of JAX's, such as a
# token).
Values = list[Any]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Shown:
    """An array of the program that shows a parameter.

    It moves by the methods of `View`, and its arrays with it.

    Attributes:
      root: the parameter's numbers, with an axis for each atom of the view; None if
        only `stored` exists.
      stored: the same part of the parameter's stored form, or None.
      view: the view.
      weight: recipe and layout by which the whole parameter is stored.
      stacked: the parameter's axes that lead the stored form.
      dtype: dtype of the parameter.
      local: inside `shard_map`, the device's own part before all parts were gathered.
      gathers: the gathered atoms, each with the mesh axis that it was gathered over.
    """

    root: Array | None
    stored: Any
    view: View = _static()
    weight: Weight | None = _static()
    stacked: tuple[int, ...] = _static()
    dtype: str = _static()
    local: Array | None = None
    gathers: tuple[tuple[int, Hashable], ...] = _static(default=())

    @staticmethod
    def of(
        leaf: Any,
        stored: Any,
        weight: Weight | None,
        gradient_dtype: DTypeLike | None = None,
    ) -> "Shown":
        """Return a parameter as it comes into the program.

        The leaf is a shape if only the stored form exists.
        `gradient_dtype` is the dtype of the gradient, if it is not the dtype of the
        parameter.
        """
        view = View.of(leaf.shape)
        stack = () if stored is None or weight is None else weight.layout.stack
        kept = tuple(axis for axis in stack if leaf.shape[axis] > 1)
        if kept != stack:  # a stack of one layer: its axis has no atom
            sizes = tuple(leaf.shape[axis] for axis in kept)
            stored = jax.tree.map(
                lambda a: a.reshape(sizes + a.shape[len(stack) :]), stored
            )
        root = None if isinstance(leaf, SHAPES) else leaf
        if root is not None and view.sizes != leaf.shape:
            root = regrouped(root, _without_ones(leaf.shape))
        # If nothing reads the numbers, a loop stacks gradients in their dtype
        reads = "" if stored is None or weight is None else weight.float_reads
        if root is not None and reads == "none" and gradient_dtype is not None:
            root = root.astype(gradient_dtype)
        return Shown(root, stored, view, weight, kept, jnp.dtype(leaf.dtype).name)

    @property
    def axes(self) -> Axes:
        """Atoms of each axis."""
        return self.view.axes

    def array(self, shape: Shape) -> Array:
        """Return the numbers as an array of this shape."""
        groups = []
        for atoms in self.axes:
            groups.append([self.view.sizes[atom] for atom in atoms])
        order = list(itertools.chain(*self.axes))
        out = regrouped(self.numbers().transpose(order), groups)
        if out.shape != tuple(shape):
            out = jnp.broadcast_to(out, shape)
        return self._cast(out)

    def _cast(self, array: Array) -> Array:
        """Return numbers of the parameter in the dtypes that they went through."""
        for dtype in self.view.casts:
            array = array.astype(dtype)
        return array

    def numbers(self) -> Array:
        """Return the root, or the dequantized weight if only the stored form exists."""
        root = self.slot()
        stored = self.values()
        # the gradient, in another dtype
        carries = root is not None and root.dtype.name != self.dtype
        carries = carries or isinstance(self.stored, Deferred)
        if root is not None and not (carries and isinstance(stored, Stored)):
            return _here(root).astype(self.dtype)
        if stored is None or self.weight is None:
            raise ValueError(
                f"a parameter of shape {list(self.view.shape)} exists in quantized form"
                " only, but a part of it is read that has none; pass the float"
                " parameter, or leave its layer out of quantize_params"
            )
        matrix = stored.dequantize(self.dtype)
        values = self._as_root(matrix, self.weight.layout)
        return values if root is None else with_gradient(values, root)

    def values(self) -> Stored | None:
        """Return the stored form; an entry of a stack reads it here."""
        deferred = self.stored
        return deferred.values() if isinstance(deferred, Deferred) else deferred

    def read(self) -> "Shown":
        """Return it with the arrays of a deferred parameter, read here."""
        return dataclasses.replace(self, root=self.slot(), stored=self.values())

    def slot(self) -> Array | None:
        """Return the root; that of a deferred parameter takes its gradient."""
        deferred = self.stored
        if self.root is not None or not isinstance(deferred, Deferred):
            return self.root
        if deferred.is_stack or self.weight is None:
            return None
        return self._as_root(deferred.matrix_slot(), self.weight.layout)

    def _as_root(self, matrix: Array, layout: Layout) -> Array:
        """Return values `[*stacked, first, second]` of the stored form as the root."""
        sizes: dict[int, int] = {}  # of the parameter's axes that the view has
        for size, axis in zip(self.view.sizes, self.view.origin, strict=True):
            sizes[axis] = sizes.get(axis, 1) * size
        first, second = layout.groups[-2:]
        rows = math.prod(sizes.get(axis, 1) for axis in first)
        columns = math.prod(sizes.get(axis, 1) for axis in second)
        order = [axis for axis in (*self.stacked, *first, *second) if axis in sizes]
        # Packed codes of an odd k have a zero at their end.
        shape = [sizes[axis] for axis in order]
        whole = matrix[..., :rows, :columns].reshape(shape)
        in_order = whole.transpose([order.index(axis) for axis in sorted(order)])
        return in_order.reshape(self.view.sizes)

    def rows(self, eqn: Equation, indices: Array) -> Array | None:
        """Return the result of a gather from the stored form.

        None: only the root has the numbers.
        """
        stored = self.values()
        if not isinstance(stored, Stored) or self.weight is None:
            return None
        layout = self.weight.layout
        shape = eqn.invars[0].aval.shape
        without_casts = dataclasses.replace(self.view, casts=())

        def gather(root: Array, indices: Array) -> Array:
            shown = Shown(root, None, without_casts, None, (), root.dtype.name)
            outside: float = jnp.nan
            if eqn.params["fill_value"] == 0:
                outside = 0
            elif root.dtype == jnp.uint8:
                outside = 0x7F  # NaN in FP8
            operands = varying_alike((shown.array(shape), indices))
            params = eqn.params | dict(fill_value=outside)
            return eqn.primitive.bind(*operands, **params)

        codes, slot = jax.tree.map(_here, (constant(stored).for_dgrad(), self.slot()))
        lo = None if codes.lo is None else self._as_root(codes.lo, layout)
        values = self._as_root(codes.values, layout)
        codes = dataclasses.replace(codes, values=values, lo=lo)
        return self._cast(gathered(codes, gather, indices, self.dtype, slot))

    def seen_as(self, view: View, **changes: Any) -> "Shown":
        """Return the arrays, or changed ones, under another view."""
        return dataclasses.replace(self, view=view, **changes)

    def arrange(self, axes: Sequence[int | None]) -> "Shown":
        """Return the array with other axes, see `View.arrange`."""
        return self.seen_as(self.view.arrange(axes))

    def cast(self, dtype: DTypeLike) -> "Shown":
        """Return the array in another dtype.

        The cast itself waits until something reads the numbers.
        """
        return self.seen_as(self.view.cast(dtype))

    def reshape(self, old: Shape, new: Shape) -> "Shown | None":
        """Return the array in another shape, or None if the shape cuts across axes."""
        view = self.view.reshape(old, new)
        if view is None:
            return None
        root = None if self.root is None else _split(self.root, view.sizes)
        local = self.local if view.sizes == self.view.sizes else None
        return self.seen_as(view, root=root, local=local)

    def at(self, axis: int, index: Start) -> "Shown":
        """Return one entry of an axis, which stays with size 1."""
        if not self.axes[axis]:
            return self
        arrays, entry = self.leading(axis)
        one = jax.tree.map(
            lambda a: lax.dynamic_index_in_dim(a, index, 0, keepdims=False), arrays
        )
        return entry(one).seen_as(self.view.at(axis, index))

    def part(self, axis: int, start: Start, size: int) -> "Shown":
        """Return some neighbouring entries of an axis; no stored form serves them."""
        if not self.axes[axis]:
            return self
        (atom,) = self.axes[axis]
        root = lax.dynamic_slice_in_dim(self.numbers(), start, size, atom)
        view = self.view.part(axis, start, size)
        return self.seen_as(view, root=root, stored=None, stacked=(), local=None)

    def gather(self, axis: int, name: Hashable, devices: int) -> "Shown | None":
        """Return all devices' parts of an axis.

        XLA gathers the float numbers only if something reads them.
        """
        view = self.view.gather(axis, name, devices)
        if view is None or (self.gathers and self.local is None):
            return None
        (atom,) = self.axes[axis]
        root = lax.all_gather(self.numbers(), name, axis=atom, tiled=True)
        local = self.root if self.local is None else self.local
        gathers = (*self.gathers, (atom, name))
        return self.seen_as(
            view, root=root, stored=None, stacked=(), local=local, gathers=gathers
        )

    def same(self, eqn: Equation) -> "Shown":
        """Apply an equation that does not move the numbers.

        It may stop their gradient, place them or change a type.
        """
        name = eqn.primitive.name
        if name == "stop_gradient":
            root = jax.tree.map(lax.stop_gradient, self.slot())
            return self.seen_as(self.view, root=root)
        if name in ("pvary", "pcast"):
            bind = functools.partial(eqn.primitive.bind, **eqn.params)
            root, local = jax.tree.map(bind, (self.root, self.local))
            return self.seen_as(self.view, root=root, local=local)
        if name in ("sharding_constraint", "reshard"):
            wanted = eqn.params.get("sharding", eqn.params.get("dst_sharding"))
            if isinstance(wanted, NamedSharding):
                return self.constrain(wanted)
        return self

    def constrain(self, sharding: NamedSharding) -> "Shown":
        """Place the parameter itself as the array is asked to be placed.

        Views of merged axes stay where they are.
        """
        root = self.root
        if root is None or any(len(atoms) > 1 for atoms in self.axes):
            return self
        explicit = AxisType.Explicit in sharding.mesh.axis_types
        if sharding_of(root) is not None and not explicit:
            return self  # readers of the numbers take them there (`_here`)
        own: list[Entry] = [None] * len(self.view.sizes)
        for atoms, entry in zip(self.axes, entries(sharding, len(self.axes))):
            for atom in atoms:
                own[atom] = entry
        placed = NamedSharding(sharding.mesh, PartitionSpec(*own))
        root = lax.with_sharding_constraint(root, placed)
        return self.seen_as(self.view, root=root)

    def leading(self, axis: int) -> tuple[Parts, Callable[[Parts], "Shown"]]:
        """Return the arrays with an axis of one atom in front, and a function.

        The function makes a `Shown` of an entry.
        """
        (atom,) = self.axes[axis]
        lost = self.view.origin[atom]
        # Only the first axis of a stack has entries that are read later.
        deferred = self.stored
        if isinstance(deferred, Deferred) and not (
            deferred.is_stack and self.stacked[:1] == (lost,)
        ):
            return self.read().leading(axis)
        alone = self.view.origin.count(lost) == 1
        stored = None
        if self.stored is not None and alone and lost in self.stacked:
            place = self.stacked.index(lost)
            stored = jax.tree.map(lambda a: jnp.moveaxis(a, place, 0), self.stored)
        root = self.root
        if root is None and stored is None:
            # A weight that exists in its stored form alone is dequantized only if an
            # entry of it has no stored form.
            root = self.numbers()
        if root is not None:
            root = jnp.moveaxis(root, atom, 0)
        view = self.view.drop(axis)
        stacked = tuple(other for other in self.stacked if other != lost)

        def entry(parts: Parts) -> "Shown":
            root, stored = parts
            one = self.seen_as(
                view, root=root, stored=stored, stacked=stacked, local=None
            )
            return dataclasses.replace(one, root=one.slot())

        return (root, stored), entry


def bare(values: Values, variables: Values) -> list[Array]:
    """Return the arrays of the values of some variables.

    A view becomes the array that it shows.
    """
    arrays = []
    for value, var in zip(values, variables, strict=True):
        shown = isinstance(value, Shown)
        arrays.append(value.array(var.aval.shape) if shown else value)
    return arrays


def _here(x: Array) -> Array:
    """Return an array of explicit axes with automatic ones, if the program has these.

    A part of a program may have other axes than the parameters.
    """
    mesh = jax.sharding.get_abstract_mesh()
    was_explicit = AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types
    if not was_explicit or AxisType.Explicit in mesh.axis_types:
        return x
    whole = NamedSharding(mesh, PartitionSpec(*[None] * x.ndim))
    return jax.sharding.reshard(x, whole)


def _without_ones(shape: Shape) -> list[list[int]]:
    """Return neighbouring axes as groups, each with one axis that is longer than one.

    >>> _without_ones((1, 8, 1, 4))
    [[1, 8, 1], [4]]
    """
    if max(shape, default=1) == 1:
        return []
    groups: list[list[int]] = [[]]
    for size in shape:
        if size > 1 and max(groups[-1], default=1) > 1:
            groups.append([])
        groups[-1].append(size)
    return groups


def _split(x: Array, sizes: Shape) -> Array:
    """Split the axes of an array into these sizes, in order."""
    if x.shape == tuple(sizes):
        return x
    rest = list(sizes)
    groups = []
    for size in x.shape:
        group = [rest.pop(0)]
        while math.prod(group) < size:
            group.append(rest.pop(0))
        groups.append(group)
    return ungrouped(x, groups)
