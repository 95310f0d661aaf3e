"""`Layout`: the axes of a kernel that a product contracts, by which a kernel of any
shape is a stack of matrices.

    einsum                axes of the kernel w                      w as a matrix
    "...k,khd->...hd"     inputs (0,), outputs (1, 2)               [k, h d]
    "...hd,hdn->...n"     inputs (0, 1), outputs (2,)               [h d, n]
    "...k,nk->...n"       inputs (1,), outputs (0,)                 [n, k], transposed
    "...ek,ekn->...en"    stack (0,), inputs (1,), outputs (2,)     [e, k, n]

Each entry of a stack has its own scale.

The matrix keeps the order of the kernel's axes if possible, so that it is a view
instead of a copy. A matrix `[n, k]` is stored untransposed, and its layer multiplies by
its `Stored.swap()`.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from jax import Array

from pallas_kernels.checks import check_choice
from pallas_kernels.specs import (
    Shape,
    Sharding,
    entries,
    regrouped,
    split_entries,
    with_entries,
)
from tcfp_jax.recipes import Recipe
from tcfp_jax.weights.stored import Stored


@dataclass(frozen=True)
class Layout:
    """The axes of a kernel by their part in the product.

    Use this in a `Weight` that you write by hand; use
    `tcfp_jax.conversion.find_weights` instead for a model.

    Attributes:
      inputs: axes that are contracted with x; together k.
      outputs: axes of the result; together n.
      stack: axes that kernel, x and result share, or that `nn.scan` and `nn.vmap` add;
        each entry has its own scale.

    Raises:
      ValueError: the axes do not count up from 0, each once, or k or n has none.

    >>> Layout((0,), (1, 2)).matrix_shape((8, 4, 2))
    (8, 8)
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    stack: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        axes = sorted(self.stack + self.inputs + self.outputs)
        if axes != list(range(len(axes))) or not self.inputs or not self.outputs:
            raise ValueError(
                f"{self} names axes {axes}; a kernel's axes must be named once each,"
                " with at least one input and one output"
            )

    @functools.cached_property
    def transposed(self) -> bool:
        """True if the matrix is `[n, k]`, because the outputs come first in the
        kernel.
        """
        return self.outputs[0] < self.inputs[0]

    @functools.cached_property
    def ndim(self) -> int:
        """The number of axes of the kernel."""
        return len(self.stack) + len(self.inputs) + len(self.outputs)

    def stacked(self, ndim: int) -> "Layout":
        """Return the layout of the kernel with axes added in front, up to `ndim`, such
        as layers of `nn.scan`.

        >>> Layout((0,), (1,)).stacked(3)
        Layout(inputs=(1,), outputs=(2,), stack=(0,))
        """
        extra = ndim - self.ndim
        if extra < 0:
            raise ValueError(
                f"{self} describes {self.ndim} axes, but the kernel has {ndim}"
            )

        def shift(axes: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(axis + extra for axis in axes)

        return Layout(
            shift(self.inputs),
            shift(self.outputs),
            tuple(range(extra)) + shift(self.stack),
        )

    @property
    def unstacked(self) -> "Layout":
        """The layout of one layer, if the axes of the stack are the first ones; else
        this one.

        Trees with static fields such as a layout are taken apart by `nn.scan`, and the
        fields must fit the parts.

        >>> Layout((1,), (2,), (0,)).unstacked
        Layout(inputs=(0,), outputs=(1,), stack=())
        """
        count = len(self.stack)
        if self.stack != tuple(range(count)):
            return self
        inputs = tuple(axis - count for axis in self.inputs)
        outputs = tuple(axis - count for axis in self.outputs)
        return Layout(inputs, outputs)

    def matrix_shape(self, shape: Shape) -> Shape:
        """Return the shape of `matrix(kernel)`: `[*stack, k, n]`, or `[*stack, n, k]`
        if `transposed`.
        """
        if len(shape) != self.ndim:
            raise ValueError(
                f"{self} describes {self.ndim} axes, but the kernel has shape"
                f" {list(shape)}"
            )
        return tuple(map(math.prod, self._sizes(shape)))

    def matrix(self, kernel: Array) -> Array:
        """Return the kernel as `[*stack, k, n]`, or `[*stack, n, k]` if `transposed`,
        under explicit axes too.

        Use this to compare a float kernel with its stored weight.
        """
        self.matrix_shape(kernel.shape)  # raises if the kernel has other axes
        return regrouped(kernel.transpose(self._order), self._sizes(kernel.shape))

    def untransposed(
        self, kernel: Array | None, stored: Stored | None
    ) -> tuple[Array | None, Stored | None]:
        """Return a weight as `[*stack, k, n]`, floats and stored form."""
        matrix = None if kernel is None else self.matrix(kernel)
        if not self.transposed:
            return matrix, stored
        if matrix is not None:
            matrix = matrix.swapaxes(-1, -2)
        return matrix, None if stored is None else stored.swap()

    def kernel(self, matrix: Array, shape: Shape) -> Array:
        """Return the kernel of this shape from its `matrix`.

        Use this to give values of a stored matrix the kernel's shape again.

        >>> import jax.numpy as jnp
        >>> layout = Layout((0,), (1,), (2,))
        >>> kernel = jnp.arange(24.0).reshape(2, 3, 4)
        >>> bool((layout.kernel(layout.matrix(kernel), kernel.shape) == kernel).all())
        True
        """
        order = self._order
        parts = matrix.reshape([shape[axis] for axis in order])
        return parts.transpose([order.index(axis) for axis in range(self.ndim)])

    def kernel_sharding(self, sharding: Sharding, shape: Shape) -> Sharding:
        """Return the sharding of the kernel of this shape, given its matrix's."""
        sizes = self._sizes(shape)
        spec = split_entries(sharding, entries(sharding, len(sizes)), sizes)
        by_axis = dict(zip(self._order, spec, strict=True))
        return with_entries(sharding, [by_axis[axis] for axis in range(len(shape))])

    @functools.cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The axes of the kernel that make each axis of the matrix."""
        stack = [(axis,) for axis in self.stack]
        if self.transposed:
            return (*stack, self.outputs, self.inputs)
        return (*stack, self.inputs, self.outputs)

    @property
    def _order(self) -> tuple[int, ...]:
        return sum(self.groups, ())

    def _sizes(self, shape: Shape) -> list[list[int]]:
        """Return the sizes of the kernel's axes in each of the groups."""
        sizes = []
        for group in self.groups:
            sizes.append([shape[axis] for axis in group])
        return sizes

    def check(self, stored: Stored, shape: Shape) -> None:
        """Raise a ValueError unless `stored` is the matrix, or the stack of matrices,
        of a kernel of this shape.
        """
        wanted = self.matrix_shape(shape)
        if not stored.holds(wanted) or stored.stack != wanted[:-2]:
            raise ValueError(
                f"the stored weight is {list(stored.shape)}, quantized on its own for"
                f" each of the stack {list(stored.stack)}, but its layer multiplies"
                f" {list(wanted)} with the stack {list(wanted[:-2])} (kernel"
                f" {list(shape)}); build the state from"
                " tcfp_jax.conversion.find_weights(model, *inputs) instead of a recipe"
            )


@dataclass(frozen=True)
class Weight:
    """Storage and use of one parameter, as `tcfp_jax.error_feedback` needs it.

    Use this for a mapping of weights of your own; use
    `tcfp_jax.conversion.find_weights` instead for a model.

    Attributes:
      recipe: the recipe of the layer that multiplies by it.
      layout: the axes that this layer contracts.
      float_reads: "lookup" if rows of the parameter are also looked up as floats;
        "none" if inference needs no floats.

    >>> from tcfp_jax.recipes import recipe
    >>> Weight(recipe("tcfp12"), Layout((1,), (0,)), float_reads="lookup").float_reads
    'lookup'
    """

    recipe: Recipe
    layout: Layout
    float_reads: Literal["none", "lookup"] = "none"

    def __post_init__(self) -> None:
        check_choice("float_reads", self.float_reads, ("none", "lookup"))


class Weights(dict[str, Weight]):
    """The weights of a model by path, from `tcfp_jax.conversion.find_weights`.

    Use this as any mapping of weights.

    Attributes:
      floats: why other converted parameters stay float, by path; `tcfp_jax.store` warns
        of them.
    """

    floats: Mapping[str, str] = MappingProxyType({})
