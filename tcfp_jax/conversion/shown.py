"""`Shown`: a view with its arrays, as the evaluation of a program holds it."""

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels import numerics
from pallas_kernels.operands import Operand, Tensor
from pallas_kernels.specs import entries, regrouped, ungrouped
from tcfp_jax.conversion.views import Factors, View
from tcfp_jax.recipes import Recipe
from tcfp_jax.weights.layout import Weight
from tcfp_jax.weights.quantization import quantize_weight
from tcfp_jax.weights.stored import Stored

_static: Any = functools.partial(field, metadata=dict(static=True))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Shown:
    """An array of the program that shows a parameter.

    Attributes:
      root: the parameter's numbers, an axis for each atom of the view; None where only `stored` exists.
      stored: the same part of its stored form, or None.
      view: which array it is.
      weight: how the whole parameter is stored.
      stacked: the parameter's axes that lead the stored form.
      dtype: of the parameter.
      local: inside `shard_map`, what the device had before all parts were gathered.
      gathers: the atoms that were gathered, and over which axis of the mesh.
    """

    root: Any
    stored: Any
    view: View = _static()
    weight: Weight | None = _static()
    stacked: tuple[int, ...] = _static()
    dtype: str = _static()
    local: Any = None
    gathers: tuple[tuple[int, Any], ...] = _static(default=())

    @staticmethod
    def of(leaf: Any, stored: Any, weight: Weight | None, gradient_dtype: Any = None) -> "Shown":
        """A parameter: an array, or a shape where only the stored form exists; gradients have their dtype in loops."""
        view, dtype = View.of(leaf.shape), jnp.dtype(leaf.dtype).name
        stack = () if stored is None or weight is None else weight.layout.stack
        kept = tuple(axis for axis in stack if leaf.shape[axis] > 1)
        if kept != stack:  # a loop over one layer: its axis is nobody's
            sizes = tuple(leaf.shape[axis] for axis in kept)
            stored = jax.tree.map(lambda a: a.reshape(sizes + a.shape[len(stack) :]), stored)
        root = leaf if isinstance(leaf, jax.Array) or hasattr(leaf, "__array__") else None
        if root is not None and view.sizes != leaf.shape:
            root = regrouped(root, _without_ones(leaf.shape))
        only_products = stored is not None and weight is not None and weight.float_reads == "none"
        if root is not None and only_products and gradient_dtype is not None:
            root = root.astype(gradient_dtype)  # nothing reads it; a loop stacks gradients in its dtype
        return Shown(root, stored, view, weight, kept, dtype)

    @property
    def axes(self) -> tuple[tuple[int, ...], ...]:
        """The atoms of each axis."""
        return self.view.axes

    def array(self, shape: tuple[int, ...]) -> jax.Array:
        """The numbers, as an array of this shape."""
        groups = self.view.axes
        root = self.numbers().transpose([atom for group in groups for atom in group])
        out = regrouped(root, [[self.view.sizes[atom] for atom in group] for group in groups])
        out = out if out.shape == tuple(shape) else jnp.broadcast_to(out, shape)
        for dtype in self.view.casts:
            out = out.astype(dtype)
        return out

    def numbers(self) -> jax.Array:
        """The root; of a weight that exists in its stored form alone, what that stands for."""
        if self.root is not None:
            return self.root.astype(self.dtype)
        if self.stored is None or self.weight is None:
            raise ValueError(
                f"a parameter of shape {list(self.view.shape)} exists in quantized form only, but a part of it is read "
                "that has none; pass the float parameter, or leave its layer out of quantize_params"
            )
        return _unfold(self.stored.dequantize(self.dtype), self)

    # How views move. Each is the method of `View`, and what it does to the arrays.

    def _with(self, view: View | None, **changes: Any) -> Any:
        return None if view is None else dataclasses.replace(self, view=view, **changes)

    def transpose(self, permutation: Any) -> Any:
        """The axes in another order."""
        return self._with(self.view.transpose(permutation))

    def squeeze(self, dimensions: Any) -> Any:
        """Without some axes of size 1."""
        return self._with(self.view.squeeze(dimensions))

    def broadcast(self, places: Any, ndim: int) -> Any:
        """With more axes."""
        return self._with(self.view.broadcast(places, ndim))

    def cast(self, dtype: Any) -> Any:
        """In another dtype."""
        return self._with(self.view.cast(dtype))

    def reshape(self, old: tuple[int, ...], new: tuple[int, ...]) -> Any:
        """Split and merged axes; None where they are cut across."""
        view = self.view.reshape(old, new)
        root = self.root if view is None or self.root is None else _split(self.root, view.sizes)
        kept = self.local is not None and view is not None and view.sizes == self.view.sizes
        return self._with(view, root=root, local=self.local if kept else None)

    def at(self, axis: int, index: Any) -> Any:
        """One entry of an axis, which stays with size 1."""
        if not self.axes[axis]:
            return self
        arrays, one = self.leading(axis)
        entry = one(jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, index, 0, keepdims=False), arrays))
        return entry._with(self.view.at(axis, index))

    def part(self, axis: int, start: Any, size: int) -> Any:
        """Some entries of an axis; no stored form serves them."""
        if not self.axes[axis]:
            return self
        root = lax.dynamic_slice_in_dim(self.numbers(), start, size, self.axes[axis][0])
        return self._with(self.view.part(axis, start, size), root=root, stored=None, stacked=(), local=None)

    def gather(self, axis: int, name: Any, devices: int) -> Any:
        """All devices' parts of an axis; the float numbers are only gathered where something reads them."""
        view = self.view.gather(axis, name, devices)
        if view is None or (self.gathers and self.local is None):
            return None
        (atom,) = self.axes[axis]
        root = lax.all_gather(self.numbers(), name, axis=atom, tiled=True)
        local = self.root if self.local is None else self.local
        return self._with(view, root=root, local=local, gathers=(*self.gathers, (atom, name)))

    def leading(self, axis: int) -> tuple[Any, Callable[[Any], "Shown"]]:
        """(arrays with an axis of one atom in front, what one entry of them is)."""
        (atom,) = self.axes[axis]
        lost, stored = self.view.origin[atom], None
        if self.stored is not None and lost in self.stacked and self.view.origin.count(lost) == 1:
            place = self.stacked.index(lost)
            stored = jax.tree.map(lambda a: jnp.moveaxis(a, place, 0), self.stored)
        # The numbers of a weight that is stored alone are only needed where an entry has no stored form.
        root = self.numbers() if self.root is None and stored is None else self.root
        stacked = () if stored is None else tuple(axis for axis in self.stacked if axis != lost)
        view = self.view.drop(axis)
        entry = lambda arrays: self._with(view, root=arrays[0], stored=arrays[1], stacked=stacked, local=None)
        return (None if root is None else jnp.moveaxis(root, atom, 0), stored), entry

    def constrain(self, sharding: NamedSharding) -> Any:
        """Where its axes live, for the parameter itself."""
        if self.root is None or any(len(axes) > 1 for axes in self.axes):
            return self
        spec = entries(sharding, len(self.axes))
        place = {axes[0]: axis for axis, axes in enumerate(self.axes) if axes}
        own = NamedSharding(sharding.mesh, PartitionSpec(*(spec[place[a]] for a in range(len(self.view.sizes)))))
        return self._with(self.view, root=lax.with_sharding_constraint(self.root, own))

    def vary(self, eqn: Any) -> Any:
        """The same numbers, in a type that may differ between devices."""
        bind = lambda array: None if array is None else eqn.primitive.bind(array, **eqn.params)
        return self._with(self.view, root=bind(self.root), local=bind(self.local))

    def stop(self) -> Any:
        """Without a gradient."""
        return self._with(self.view, root=None if self.root is None else lax.stop_gradient(self.root))


def _unfold(matrix: jax.Array, weight: Shown) -> jax.Array:
    """The numbers of a stored weight, `[*stack, k, n]`, by atoms."""
    assert weight.weight is not None
    layout, view = weight.weight.layout, weight.view
    first, second = (layout.outputs, layout.inputs) if layout.transposed else (layout.inputs, layout.outputs)
    order = [a for a in (*weight.stacked, *first, *second) if weight.view.shape[a] > 1 and a not in view.taken]
    size = lambda axes: math.prod(view.shape[axis] for axis in axes)
    matrix = matrix[..., : size(first), : size(second)]  # packed codes of an odd k end in one of zero
    whole = matrix.reshape([view.shape[axis] for axis in order])
    return whole.transpose([order.index(axis) for axis in sorted(order)]).reshape(view.sizes)


def _split(x: jax.Array, sizes: tuple[int, ...]) -> jax.Array:
    """An array with its axes split into these sizes, in order."""
    if x.shape == tuple(sizes):
        return x
    rest, groups = list(sizes), []
    for size in x.shape:
        group = [rest.pop(0)]
        while math.prod(group) < size:
            group.append(rest.pop(0))
        groups.append(group)
    return ungrouped(x, groups)


def _without_ones(shape: tuple[int, ...]) -> list[list[int]]:
    """Neighbouring axes as groups, each with one axis that is longer than one."""
    groups: list[list[int]] = []
    for size in shape:
        if (size == 1 and groups) or (groups and max(groups[-1]) == 1):
            groups[-1].append(size)
        else:
            groups.append([size])
    return groups if max(shape, default=1) > 1 else []


def gathered(weight: Shown, found: Factors, recipe: Recipe) -> Stored | None:
    """A weight whose parts were gathered inside `shard_map`, quantized before it travelled: FP8 values are gathered.

    The scale is that of the whole weight, from one reduction of the devices' amaxes. None where the float weight has to
    travel: with a scale for each row or block, or where the parts of an axis would not be neighbours in the matrix.
    """
    layout = found.contraction.layout
    groups = (layout.inputs, layout.outputs)
    first = {groups[0][0]: "k", groups[1][0]: "n"}
    served = (
        recipe.stored is not None and recipe.scaling == Tensor() and recipe.amax == "fresh" and not recipe.stochastic
    )
    if not served or layout.stack or any(atom not in first for atom, _ in weight.gathers):
        return None
    matrix = lax.stop_gradient(layout.matrix(weight.local))
    amax = numerics.amax(matrix)
    for _, name in weight.gathers:
        amax = lax.pmax(amax, name)
    stored, _ = quantize_weight(matrix, recipe, amax=amax)

    def whole(values: jax.Array, axes: str) -> jax.Array:
        codes = lax.bitcast_convert_type(values, jnp.uint8)  # bytes travel, whatever a backend thinks of FP8
        for atom, name in weight.gathers:
            codes = lax.all_gather(codes, name, axis=axes.index(first[atom]), tiled=True)
        return lax.bitcast_convert_type(codes, values.dtype)

    def operand(one: Operand | None, axes: str) -> Operand | None:
        if one is None:
            return None
        return dataclasses.replace(
            one, values=whole(one.values, axes), lo=None if one.lo is None else whole(one.lo, axes)
        )

    axes = "nk" if layout.transposed else "kn"
    return Stored(operand(stored.forward, axes[::-1]), operand(stored.backward, axes))
