"""`Shown`: a view together with its arrays, as the evaluation of a program holds a
parameter.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from pallas_kernels import numerics
from pallas_kernels.operands import Operand, Quantized, Tensor
from pallas_kernels.specs import (
    entries,
    regrouped,
    sharding_of,
    split_entries,
    ungrouped,
    varying_alike,
    with_entries,
)
from tcfp_jax.conversion.factors import GROUPED, MATRIX, Factors, factors, factors_of
from tcfp_jax.conversion.views import Axes, Equation, Shape, Start, View, without_ones
from tcfp_jax.layers import Absent
from tcfp_jax.losses import Loss, loss_of
from tcfp_jax.products.einsum import contract, matrix_product
from tcfp_jax.products.grouped import grouped_matmul
from tcfp_jax.recipes import Recipe
from tcfp_jax.weights.layout import Layout, Weight
from tcfp_jax.weights.lookup import gathered, with_gradient
from tcfp_jax.weights.quantization import quantize_weight
from tcfp_jax.weights.stored import Stored, constant

# Shapes that stand for arrays without values.
SHAPES = (jax.ShapeDtypeStruct, Absent)
_static: Any = functools.partial(field, metadata=dict(static=True))
# The root and the stored form; inside `shard_map` a device's parts of them.
Parts = tuple[jax.Array | None, Stored | None]
Split = tuple[Parts, tuple[PartitionSpec, PartitionSpec], Callable[[Parts], "Shown"]]
# Values of variables: a `Shown`, or an array (or another value of JAX's, such as a
# token).
Values = list[Any]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Shown:
    """An array of the program that shows a parameter. It moves by the methods of
    `View`, and its arrays with it.

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

    root: jax.Array | None
    stored: Any
    view: View = _static()
    weight: Weight | None = _static()
    stacked: tuple[int, ...] = _static()
    dtype: str = _static()
    local: jax.Array | None = None
    gathers: tuple[tuple[int, Hashable], ...] = _static(default=())

    @staticmethod
    def of(
        leaf: Any,
        stored: Any,
        weight: Weight | None,
        gradient_dtype: DTypeLike | None = None,
    ) -> "Shown":
        """Return a parameter as it comes into the program; the leaf is a shape if only
        the stored form exists.

        `gradient_dtype` is the dtype of the gradient, if it is not the dtype of the
        parameter.
        """
        view, dtype = View.of(leaf.shape), jnp.dtype(leaf.dtype).name
        stack = () if stored is None or weight is None else weight.layout.stack
        kept = tuple(axis for axis in stack if leaf.shape[axis] > 1)
        if kept != stack:  # a stack of one layer: its axis has no atom
            sizes = tuple(leaf.shape[axis] for axis in kept)
            stored = jax.tree.map(
                lambda a: a.reshape(sizes + a.shape[len(stack) :]), stored
            )
        root = None if isinstance(leaf, SHAPES) else leaf
        if root is not None and view.sizes != leaf.shape:
            root = regrouped(root, without_ones(leaf.shape))
        only_products = (
            stored is not None and weight is not None and weight.float_reads == "none"
        )
        if root is not None and only_products and gradient_dtype is not None:
            # Nothing reads the numbers, and a loop stacks gradients in their dtype
            root = root.astype(gradient_dtype)
        return Shown(root, stored, view, weight, kept, dtype)

    @property
    def axes(self) -> Axes:
        """Atoms of each axis."""
        return self.view.axes

    def array(self, shape: Shape) -> jax.Array:
        """Return the numbers as an array of this shape."""
        groups = self.view.axes
        root = self.numbers().transpose([atom for group in groups for atom in group])
        out = regrouped(
            root, [[self.view.sizes[atom] for atom in group] for group in groups]
        )
        out = out if out.shape == tuple(shape) else jnp.broadcast_to(out, shape)
        for dtype in self.view.casts:
            out = out.astype(dtype)
        return out

    def numbers(self) -> jax.Array:
        """Return the root; of a weight that exists in its stored form alone, the
        dequantized weight.
        """
        # the gradient, in another dtype
        carries = self.root is not None and self.root.dtype.name != self.dtype
        if self.root is not None and not (carries and isinstance(self.stored, Stored)):
            return _here(self.root).astype(self.dtype)
        if self.stored is None or self.weight is None:
            raise ValueError(
                f"a parameter of shape {list(self.view.shape)} exists in quantized form"
                " only, but a part of it is read that has none; pass the float"
                " parameter, or leave its layer out of quantize_params"
            )
        values = self._as_root(self.stored.dequantize(self.dtype), self.weight.layout)
        return values if self.root is None else with_gradient(values, self.root)

    def _as_root(self, matrix: jax.Array, layout: Layout) -> jax.Array:
        """Return values `[*stacked, first, second]` of the stored form with the axes of
        the root.
        """
        view = self.view
        first, second = (
            (layout.outputs, layout.inputs)
            if layout.transposed
            else (layout.inputs, layout.outputs)
        )
        order = [
            a
            for a in (*self.stacked, *first, *second)
            if view.shape[a] > 1 and a not in view.taken
        ]
        held = lambda axis: math.prod(
            size for size, of in zip(view.sizes, view.origin, strict=True) if of == axis
        )
        size = lambda axes: math.prod(map(held, axes))
        # Packed codes of an odd k have a zero at their end.
        whole = matrix[..., : size(first), : size(second)].reshape(
            list(map(held, order))
        )
        return whole.transpose([order.index(axis) for axis in sorted(order)]).reshape(
            view.sizes
        )

    def rows(self, eqn: Equation, indices: jax.Array) -> jax.Array | None:
        """Return the result of a gather from the stored form; None if only the root has
        the numbers.
        """
        if not isinstance(self.stored, Stored) or self.weight is None:
            return None
        shape, layout = eqn.invars[0].aval.shape, self.weight.layout
        bare = dataclasses.replace(self.view, casts=())
        zero = eqn.params["fill_value"] == 0

        def gather(root: jax.Array, indices: jax.Array) -> jax.Array:
            array = Shown(root, None, bare, None, (), root.dtype.name).array(shape)
            outside = 0 if zero else 0x7F if root.dtype == jnp.uint8 else jnp.nan
            return eqn.primitive.bind(
                *varying_alike((array, indices)),
                **eqn.params | dict(fill_value=outside),
            )

        codes, slot = jax.tree.map(
            _here, (constant(self.stored).for_dgrad(), self.root)
        )
        lo = None if codes.lo is None else self._as_root(codes.lo, layout)
        codes = dataclasses.replace(
            codes, values=self._as_root(codes.values, layout), lo=lo
        )
        rows = gathered(codes, gather, indices, self.dtype, slot)
        for dtype in self.view.casts:
            rows = rows.astype(dtype)
        return rows

    def seen_as(self, view: View | None, **changes: Any) -> Any:
        """Return the arrays, or changed ones, under another view; None without one."""
        return None if view is None else dataclasses.replace(self, view=view, **changes)

    def arrange(self, axes: Sequence[int | None]) -> "Shown":
        """Return the array with other axes, see `View.arrange`."""
        return self.seen_as(self.view.arrange(axes))

    def cast(self, dtype: DTypeLike) -> "Shown":
        """Return the array in another dtype; the cast itself waits until something
        reads the numbers.
        """
        return self.seen_as(self.view.cast(dtype))

    def reshape(self, old: Shape, new: Shape) -> "Shown | None":
        """Return the array in another shape, or None if the shape cuts across axes."""
        view = self.view.reshape(old, new)
        if view is None:
            return None
        kept = self.local is not None and view.sizes == self.view.sizes
        root = None if self.root is None else _split(self.root, view.sizes)
        return self.seen_as(view, root=root, local=self.local if kept else None)

    def at(self, axis: int, index: Start) -> "Shown":
        """Return one entry of an axis, which stays with size 1."""
        if not self.axes[axis]:
            return self
        arrays, one = self.leading(axis)
        entry = one(
            jax.tree.map(
                lambda a: lax.dynamic_index_in_dim(a, index, 0, keepdims=False), arrays
            )
        )
        return entry.seen_as(self.view.at(axis, index))

    def part(self, axis: int, start: Start, size: int) -> "Shown":
        """Return some neighbouring entries of an axis; no stored form serves them."""
        if not self.axes[axis]:
            return self
        root = lax.dynamic_slice_in_dim(self.numbers(), start, size, self.axes[axis][0])
        return self.seen_as(
            self.view.part(axis, start, size),
            root=root,
            stored=None,
            stacked=(),
            local=None,
        )

    def gather(self, axis: int, name: Hashable, devices: int) -> "Shown | None":
        """Return all devices' parts of an axis; XLA gathers the float numbers only if
        something reads them.
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

    def split(self, shape: Shape, spec: PartitionSpec) -> "Split | None":
        """Return (arrays, their specs, the function that makes a `Shown` of a device's
        arrays) for `shard_map`.

        The stored form goes along if the devices split nothing but stacks, whose
        weights have scales of their own.

        Args:
          shape: shape of a device's part of the array; None comes back if it cuts
            merged axes.
          spec: the axes of the mesh that split the array.
        """
        view = self.view.local(shape)
        if view is None:
            return None
        entry = {
            atoms[0]: one
            for atoms, one in zip(self.axes, spec, strict=False)
            if len(atoms) == 1
        }
        cut = {*view.split, *view.taken} - {*self.view.taken}
        stored = self.stored if view.whole and cut <= {*self.stacked} else None
        root = self.numbers() if stored is None else self.root
        by_axis = {self.view.origin[atom]: one for atom, one in entry.items()}
        specs = (
            PartitionSpec(*map(entry.get, range(len(self.view.sizes)))),
            (
                PartitionSpec(*map(by_axis.get, self.stacked))
                if stored is not None
                else PartitionSpec()
            ),
        )
        alone = [
            atoms[0]
            for atoms, size in zip(self.axes, shape, strict=True)
            if len(atoms) == 1 == size
        ]
        gone = [
            number for number, axis in enumerate(self.stacked) if axis in view.taken
        ]
        stacked = (
            ()
            if stored is None
            else tuple(axis for axis in self.stacked if axis not in view.taken)
        )

        def part(arrays: Parts) -> "Shown":
            root = None if arrays[0] is None else lax.squeeze(arrays[0], alone)
            stored = jax.tree.map(lambda leaf: lax.squeeze(leaf, gone), arrays[1])
            return self.seen_as(view, root=root, stored=stored, stacked=stacked)

        return (root, stored), specs, part

    def same(self, eqn: Equation) -> "Shown":
        """Apply an equation that does not move the numbers: it may stop their gradient,
        place them or change a type.
        """
        name = eqn.primitive.name
        if name == "stop_gradient":
            return self.seen_as(
                self.view,
                root=None if self.root is None else lax.stop_gradient(self.root),
            )
        if name in ("pvary", "pcast"):
            bind = lambda array: (
                None if array is None else eqn.primitive.bind(array, **eqn.params)
            )
            return self.seen_as(self.view, root=bind(self.root), local=bind(self.local))
        if name in ("sharding_constraint", "reshard"):
            wanted = eqn.params.get("sharding", eqn.params.get("dst_sharding"))
            return self.constrain(wanted) if isinstance(wanted, NamedSharding) else self
        return self

    def constrain(self, sharding: NamedSharding) -> "Shown":
        """Place the parameter itself as the array is asked to be placed; views of
        merged axes stay where they are.
        """
        if self.root is None or any(len(axes) > 1 for axes in self.axes):
            return self
        if (
            sharding_of(self.root) is not None
            and AxisType.Explicit not in sharding.mesh.axis_types
        ):
            return self  # readers of the numbers take them there (`_here`)
        spec = entries(sharding, len(self.axes))
        place = {axes[0]: axis for axis, axes in enumerate(self.axes) if axes}
        own = NamedSharding(
            sharding.mesh,
            PartitionSpec(*(spec[place[a]] for a in range(len(self.view.sizes)))),
        )
        return self.seen_as(
            self.view, root=lax.with_sharding_constraint(self.root, own)
        )

    def leading(self, axis: int) -> tuple[Any, Callable[[Any], "Shown"]]:
        """Return the arrays with an axis of one atom in front, and the function that
        makes a `Shown` of an entry.
        """
        (atom,) = self.axes[axis]
        lost, stored = self.view.origin[atom], None
        if (
            self.stored is not None
            and lost in self.stacked
            and self.view.origin.count(lost) == 1
        ):
            place = self.stacked.index(lost)
            stored = jax.tree.map(lambda a: jnp.moveaxis(a, place, 0), self.stored)
        # A weight that exists in its stored form alone is dequantized only if an entry
        # of it has no stored form.
        root = self.numbers() if self.root is None and stored is None else self.root
        stacked = (
            ()
            if stored is None
            else tuple(axis for axis in self.stacked if axis != lost)
        )
        view = self.view.drop(axis)
        entry = lambda arrays: self.seen_as(
            view, root=arrays[0], stored=arrays[1], stacked=stacked, local=None
        )
        return (None if root is None else jnp.moveaxis(root, atom, 0), stored), entry


def bare(values: Values, variables: Values) -> list[jax.Array]:
    """Return the arrays of the values of some variables.

    A view becomes the array that it shows.
    """
    arrays = []
    for value, var in zip(values, variables, strict=True):
        shown = isinstance(value, Shown)
        arrays.append(value.array(var.aval.shape) if shown else value)
    return arrays


def _here(x: jax.Array) -> jax.Array:
    """Return an array of explicit axes with the automatic ones that a part of the
    program may have instead.
    """
    mesh = jax.sharding.get_abstract_mesh()
    was, now = (
        AxisType.Explicit in of.axis_types for of in (jax.typeof(x).sharding.mesh, mesh)
    )
    return (
        jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*[None] * x.ndim)))
        if was and not now
        else x
    )


def _split(x: jax.Array, sizes: Shape) -> jax.Array:
    """Split the axes of an array into these sizes, in order."""
    rest, groups = list(sizes), []
    for size in x.shape:
        group = [rest.pop(0)]
        while math.prod(group) < size:
            group.append(rest.pop(0))
        groups.append(group)
    return x if x.shape == tuple(sizes) else ungrouped(x, groups)


def _gathered(weight: Shown, found: Factors, recipe: Recipe) -> Stored | None:
    """Quantize a weight whose parts were gathered inside `shard_map` before it travels:
    its FP8 values are gathered.

    All devices share the scale of the whole weight, from one reduction of their amaxes.
    Returns None if the float weight has to travel: with a scale per row or block, or if
    the parts of an axis are not neighbours in the matrix.
    """
    layout = found.contraction.layout
    first = {layout.inputs[0]: "k", layout.outputs[0]: "n"}
    served = recipe.stored is not None and recipe.scaling == Tensor()
    served = served and recipe.amax == "fresh" and not recipe.stochastic
    if (
        not served
        or layout.stack
        or any(atom not in first for atom, _ in weight.gathers)
        or weight.local is None
    ):
        return None
    matrix = lax.stop_gradient(layout.matrix(weight.local))
    amax = numerics.amax(matrix)
    for _, name in weight.gathers:
        amax = lax.pmax(amax, name)
    stored, _ = quantize_weight(matrix, recipe, amax=amax)

    def whole(values: jax.Array, axes: str) -> jax.Array:
        # Every backend can send bytes, but not every one FP8
        codes = lax.bitcast_convert_type(values, jnp.uint8)
        for atom, name in weight.gathers:
            codes = lax.all_gather(
                codes, name, axis=axes.index(first[atom]), tiled=True
            )
        return lax.bitcast_convert_type(codes, values.dtype)

    def operand(one: Operand | None, axes: str) -> Operand | None:
        if one is None:
            return None
        lo = None if one.lo is None else whole(one.lo, axes)
        return dataclasses.replace(one, values=whole(one.values, axes), lo=lo)

    axes = "nk" if layout.transposed else "kn"
    return Stored(operand(stored.forward, axes[::-1]), operand(stored.backward, axes))


def multiply(
    eqn: Equation,
    inputs: Sequence[Any],
    recipe: Recipe,
    *,
    x_quantized: Quantized | None = None,
    drawn: jax.Array | None = None,
) -> jax.Array:
    """Return the product of an equation, computed as the recipe says."""
    side = 0 if isinstance(inputs[0], Shown) else 1
    weight, x, out = inputs[side], inputs[1 - side], eqn.outvars[0].aval
    view: View = weight.view
    found, kernel, stored = _taken(weight, factors_of(eqn, side, view), recipe)
    key = (
        jax.random.key(0)
        if _rounds_here(stored, recipe)
        else drawn
        if recipe.draws
        else None
    )
    # X[..., k] by the kernel as a matrix, whatever the kernel's own axes are
    if x_quantized is not None:
        layout = found.contraction.layout
        return contract(
            matrix_product(x.ndim, transposed=layout.transposed),
            x,
            None if kernel is None else layout.matrix(kernel),
            recipe=recipe,
            quantized=stored,
            key=key,
            shape=None if stored is None else stored.shape,
            x_quantized=x_quantized,
        )
    # A product rounds its result to the dtype of x, so x is cast to a dtype that the
    # program asks for beyond it.
    with jax.numpy_dtype_promotion("standard"):
        x = x.astype(jnp.promote_types(x.dtype, out.dtype))
    if eqn.primitive.name == GROUPED:
        matrix, stored = _as_experts(
            found.contraction.layout, kernel, stored, inputs[2].shape[0]
        )
        return grouped_matmul(
            x, matrix, inputs[2], recipe=recipe, quantized=stored, key=key
        ).astype(out.dtype)
    x = ungrouped(x, found.x_groups) if found.x_groups else x
    asked = eqn.params.get("out_sharding")
    if asked is not None and found.out_groups:
        asked = with_entries(
            asked, split_entries(asked, entries(asked, out.ndim), found.out_groups)
        )
    y = contract(
        found.contraction,
        x,
        kernel,
        recipe=recipe,
        quantized=stored,
        key=key,
        shape=view.sizes,
        out_sharding=asked,
    )
    return (regrouped(y, found.out_groups) if found.out_groups else y).astype(out.dtype)


def multiply_head(
    eqn: Equation, inputs: Sequence[Any], recipe: Recipe, options: Loss
) -> list[jax.Array]:
    """Return (mean, losses) of a `losses.cross_entropy` with these options, computed as
    the recipe says.
    """
    x, weight, targets, shares = inputs
    shapes = [tuple(var.aval.shape) for var in eqn.invars[:2]]
    found, kernel, stored = _taken(
        weight, factors(MATRIX, shapes, 1, weight.view), recipe
    )
    matrix, stored = found.contraction.layout.untransposed(kernel, stored)
    key = jax.random.key(0) if _rounds_here(stored, recipe) else None
    asked = dataclasses.replace(options, recipe=recipe)
    return list(loss_of(asked, x, matrix, stored, targets, shares, key))


def _as_experts(
    layout: Layout, kernel: jax.Array | None, stored: Stored | None, count: int
) -> tuple[jax.Array | None, Stored | None]:
    """Return the weights of a grouped product as `[e, k, n]`, floats and stored
    form.
    """
    matrix, stored = layout.untransposed(kernel, stored)
    # An axis of one expert has no atom, and a reshape may have cut the axis of several.
    if stored is not None:
        leading = len(stored.stack)
        stored = jax.tree.map(
            lambda leaf: leaf.reshape(count, *leaf.shape[leading:]), stored
        )
    return None if matrix is None else matrix.reshape(count, *matrix.shape[-2:]), stored


def _taken(
    weight: Shown, found: Factors | str, recipe: Recipe
) -> tuple[Factors, jax.Array | None, Stored | None]:
    """Return (a product with a weight over the weight's own axes, its float numbers,
    its stored form).
    """
    assert isinstance(found, Factors), "the census plans no other product"
    # The stored form serves the product that it was made for; another product of the
    # weight quantizes it here.
    how = weight.weight
    fits = how is not None and (how.recipe, how.layout) == (recipe, found.layout)
    stored = weight.stored if fits else None
    kernel = weight.root if stored is not None else weight.numbers()
    if stored is None and weight.local is not None:
        stored = _gathered(weight, found, recipe)
    return found, kernel, stored


def _rounds_here(stored: Stored | None, recipe: Recipe) -> bool:
    """Return whether a weight is rounded stochastically at its product: only in
    evaluation, whose calls repeat.
    """
    return stored is None and recipe.stochastic
