"""Products of x and a kernel of any shape, as `tcfp_jax.matmul` of the matrix that the
kernel is.

`Contraction` says which axes of x and of the kernel are multiplied. Layers and
conversion build it; `contract` computes the product.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import jax
from jax import Array

from pallas_kernels import specs
from pallas_kernels.dispatch import shared
from pallas_kernels.operands import Operand, Quantized
from pallas_kernels.specs import Entry, Sharding
from tcfp_jax.products.fp8_weights import Asked
from tcfp_jax.products.matmul import product
from tcfp_jax.recipes import Recipe
from tcfp_jax.weights.layout import Layout
from tcfp_jax.weights.stored import Stored

_T = TypeVar("_T")


@dataclass(frozen=True)
class Contraction:
    """The axes of x that meet axes of the kernel, and their places in the result.

    Use this for a kernel of several axes; use `matrix_product` for a plain matrix.

    Attributes:
      layout: the part that each axis of the kernel takes.
      ndim: the number of axes of x.
      inputs, stack: the axes of x that are contracted, and that run along a stack, in
        the order of the layout's.
      order: the axes of the result, as places in `[*stack, *rest, *outputs]`, of which
        `rest` is x's. None keeps that.
    """

    layout: Layout
    ndim: int
    inputs: tuple[int, ...]
    stack: tuple[int, ...] = ()
    order: tuple[int, ...] | None = None

    @property
    def rest(self) -> tuple[int, ...]:
        """The axes of x that the kernel does not have."""
        return tuple(
            axis for axis in range(self.ndim) if axis not in self.inputs + self.stack
        )

    def check(self, x_shape: tuple[int, ...], shape: tuple[int, ...]) -> None:
        """Raise a ValueError unless x and a kernel of these shapes can be
        multiplied.
        """
        layout = self.layout
        if len(x_shape) != self.ndim or len(shape) != layout.ndim:
            raise ValueError(
                f"x{list(x_shape)} and kernel{list(shape)} do not fit a product of"
                f" {self.ndim} and {layout.ndim} axes"
            )
        pairs = zip(self.stack + self.inputs, layout.stack + layout.inputs, strict=True)
        for axis, other in pairs:
            if x_shape[axis] != shape[other]:
                raise ValueError(
                    f"axis {axis} of x{list(x_shape)} does not fit axis {other} of"
                    f" kernel{list(shape)}: {x_shape[axis]} values are multiplied by"
                    f" {shape[other]}; check the sizes of the layer"
                )

    def tokens(self, x_shape: tuple[int, ...]) -> int:
        """Return the number of rows of x that each matrix of the kernel multiplies."""
        return math.prod(x_shape[axis] for axis in self.rest)


@functools.cache
def matrix_product(ndim: int, *, transposed: bool = False) -> Contraction:
    """Return the contraction `x[..., k] @ w[k, n]`, or with a `transposed` kernel
    `[n, k]`; x has `ndim` axes.

    Raises:
      ValueError: x is a scalar.

    >>> matrix_product(3).layout
    Layout(inputs=(0,), outputs=(1,), stack=())
    """
    if not ndim:
        raise ValueError(
            "x is a scalar, but a layer multiplies x[..., k]; give it an axis"
        )
    return Contraction(
        Layout((1,), (0,)) if transposed else Layout((0,), (1,)), ndim, (ndim - 1,)
    )


def contract(
    contraction: Contraction,
    x: Array,
    kernel: Array | None,
    *,
    recipe: Recipe,
    quantized: Stored | Operand | None = None,
    key: Array | None = None,
    shape: tuple[int, ...] | None = None,
    out_sharding: Sharding = None,
    x_quantized: Quantized | None = None,
) -> Array:
    """Return the product of x and a kernel, with the operands, products and gradients
    that `recipe` describes.

    Use this in a layer whose kernel is not a matrix; use `tcfp_jax.matmul` for one.

    Axes that x, kernel and result share are a stack of products, each with its own
    scales.

    Args:
      contraction: the axes that are multiplied.
      x, recipe: as in `tcfp_jax.matmul`.
      kernel: real floats, or None if only `quantized` exists.
      quantized: the kernel as `error_feedback` stored it (of `layout.matrix`), the
        result of `split` of that matrix, or of `quantize_fp4` of its transpose.
      key: random key for a stochastic residual if the kernel is quantized here.
      shape: the shape of the kernel if it is None.
      out_sharding: as in `tcfp_jax.matmul`. If several axes are multiplied as one, only
        the first that is longer than one stays split; the others are gathered first.
      x_quantized: x as the recipe quantizes it, if several products share it; of
        `x[..., k] @ w` only.

    Raises:
      ValueError: the contraction does not fit the operands, or `quantized` is another
        weight.

    >>> import jax.numpy as jnp
    >>> heads = Contraction(Layout(inputs=(0,), outputs=(1, 2)), ndim=2, inputs=(1,))
    >>> kernel = jnp.ones((3, 4, 5))
    >>> contract(heads, jnp.ones((2, 3)), kernel, recipe=Recipe()).shape
    (2, 4, 5)
    """
    shape = tuple(shape or ()) if kernel is None else kernel.shape
    contraction.check(x.shape, shape)
    stored = Stored.of(quantized) if isinstance(quantized, Operand) else quantized
    if stored is not None:
        contraction.layout.check(stored, shape)
    options = _Options(contraction, shape, Asked(recipe, out_sharding))
    return _shared_contraction(options, x, kernel, stored, key, x_quantized)


@dataclass(frozen=True)
class _Options:
    """The static options of `contract`: `shape` is the kernel's."""

    contraction: Contraction
    shape: tuple[int, ...]
    product: Asked


def _contracted(
    options: _Options,
    x: Array,
    kernel: Array | None,
    stored: Stored | None,
    key: Array | None,
    x_quantized: Quantized | None,
) -> Array:
    contraction = options.contraction
    layout = contraction.layout
    asked = options.product
    # The common case needs no transposes, and its program should not have any.
    if asked.out_sharding is None and contraction == matrix_product(x.ndim):
        return product(asked, x, kernel, stored, key, x_quantized)
    matrix, stored = layout.untransposed(kernel, stored)
    if x_quantized is not None:  # x[..., k] @ w.T, by the contract of `contract`
        return product(asked, x, matrix, stored, key, x_quantized)
    # x as [*stack, *rest, k], the result as [*stack, *rest, *outputs].
    x = x.transpose(contraction.stack + contraction.rest + contraction.inputs)
    stack = len(contraction.stack)
    inputs = [options.shape[axis] for axis in layout.inputs]
    outputs = [options.shape[axis] for axis in layout.outputs]
    leading = [[size] for size in x.shape[: -len(inputs)]]
    # Merged axes let one matrix product serve any number of them; groups of one axis
    # change nothing.
    if layout.transposed:
        leading = _one_of_rest(x, leading, stack)
    x = specs.regrouped(x, [*leading, inputs])
    if key is not None and stack:
        # So each matrix of the stack is rounded with its own bits
        key = jax.random.split(key, x.shape[:stack])
    spec = _result_spec(options, len(leading) + len(outputs))
    out_sharding = None
    if spec is not None:
        _, merged = specs.merged_entries(spec, [*leading, outputs])
        out_sharding = specs.with_entries(asked.out_sharding, merged[stack:])
    multiply: Callable[..., Array] = functools.partial(
        product, Asked(asked.recipe, out_sharding)
    )
    # vmap quantizes each matrix of the stack on its own, so that each has its own
    # scales.
    for _ in range(stack):
        multiply = jax.vmap(multiply)
    y = multiply(*_split_alike(stack, (x, matrix, stored, key)))
    y = specs.ungrouped(y, [*leading, outputs])
    if spec is not None:
        y = specs.moved(y, spec)
    return y if contraction.order is None else y.transpose(contraction.order)


_shared_contraction = shared(_contracted)


def _one_of_rest(x: Array, leading: list[list[int]], stack: int) -> list[list[int]]:
    """Return groups that merge all axes of x that the kernel lacks.

    XLA's CPU (jax 0.11) cannot run a bfloat16 product over several axes if its result
    is transposed, as the gradient of a transposed kernel is. Over one axis it can.
    """
    one = [*leading[:stack], list(x.shape[stack : len(leading)])]
    sharding = specs.sharding_of(x)
    if sharding is not None:
        spec = specs.entries(sharding, x.ndim)[: len(leading)]
        if specs.merged_entries(spec, one)[0] != spec:
            return leading  # as one they would have to be brought together
    return one


def _result_spec(options: _Options, ndim: int) -> tuple[Entry, ...] | None:
    """Return the spec that is asked of the result, for axes in the order
    `[*stack, *rest, *outputs]`.
    """
    asked = options.product.out_sharding
    if asked is None:
        return None
    spec = specs.entries(asked, ndim)
    order = options.contraction.order
    if order is None:
        return spec
    return tuple(spec[order.index(place)] for place in range(ndim))


def _split_alike(stack: int, operands: _T) -> _T:
    """Return operands whose leading axes are split over devices alike, as `jax.vmap`
    needs; the first one decides.
    """
    leaves = jax.tree.leaves(operands)
    if not stack or all(specs.sharding_of(leaf) is None for leaf in leaves):
        return operands
    held = [specs.entries(specs.sharding_of(leaf), leaf.ndim) for leaf in leaves]
    chosen: list[Entry] = []
    used: set[str] = set()
    for axis in range(stack):
        entry = next((spec[axis] for spec in held if spec[axis]), None)
        chosen.append(entry)
        used.update(specs.names(entry))

    def split(leaf: Array) -> Array:
        spec = list(chosen)
        for entry in specs.entries(specs.sharding_of(leaf), leaf.ndim)[stack:]:
            is_free = used.isdisjoint(specs.names(entry))
            spec.append(entry if is_free else None)
        return specs.moved(leaf, spec)

    return jax.tree.map(split, operands)
