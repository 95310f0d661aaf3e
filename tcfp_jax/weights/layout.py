"""`Layout`: which axes of a kernel a product contracts. A kernel of any shape is a stack of matrices.

    einsum("...k,khd->...hd", x, w):  inputs (0,), outputs (1, 2)      w as a matrix: [k, h d]
    einsum("...hd,hdn->...n", x, w):  inputs (0, 1), outputs (2,)                     [h d, n]
    einsum("...k,nk->...n", x, w):    inputs (1,), outputs (0,)                       [n, k], read transposed
    einsum("...ek,ekn->...en", x, w): stack (0,), inputs (1,), outputs (2,)           [e, k, n], a scale each

The matrix keeps the order of the kernel's axes where it can, so that it is a view and not a copy.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax

from tcfp_jax.recipes import Recipe


@dataclass(frozen=True)
class Layout:
    """The axes of a kernel by their part in the product.

    Attributes:
      inputs: contracted with x; together k.
      outputs: axes of the result; together n.
      stack: shared by kernel, x and result, or the axis that `nn.scan` and `nn.vmap` add: one scale for each entry.

    Raises:
      ValueError: the axes are not those of an array, each once, or one of k and n has none.

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
                f"{self} names axes {axes}; a kernel's axes must be named once each, with at least one input and "
                "one output"
            )

    @property
    def transposed(self) -> bool:
        """Whether the matrix is `[n, k]`: the outputs come first in the kernel."""
        return self.outputs[0] < self.inputs[0]

    @property
    def ndim(self) -> int:
        """Axes of the kernel."""
        return len(self.stack) + len(self.inputs) + len(self.outputs)

    def stacked(self, ndim: int) -> "Layout":
        """The layout of the same kernel with axes added in front, up to `ndim`: layers of `nn.scan`.

        Raises:
          ValueError: `ndim` is less than the kernel has.

        >>> Layout((0,), (1,)).stacked(3)
        Layout(inputs=(1,), outputs=(2,), stack=(0,))
        """
        extra = ndim - self.ndim
        if extra < 0:
            raise ValueError(f"{self} describes {self.ndim} axes, but the kernel has {ndim}")
        shift = lambda axes: tuple(axis + extra for axis in axes)
        return Layout(shift(self.inputs), shift(self.outputs), tuple(range(extra)) + shift(self.stack))

    def matrix_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of `matrix(kernel)`: `[*stack, k, n]`, or `[*stack, n, k]` where `transposed`.

        Raises:
          ValueError: the kernel has another number of axes.
        """
        if len(shape) != self.ndim:
            raise ValueError(f"{self} describes {self.ndim} axes, but the kernel has shape {list(shape)}")
        size = lambda axes: math.prod(shape[axis] for axis in axes)
        first, second = self._groups()
        return (*(shape[axis] for axis in self.stack), size(first), size(second))

    def matrix(self, kernel: jax.Array) -> jax.Array:
        """The kernel as `[*stack, k, n]`, or `[*stack, n, k]` where `transposed`."""
        first, second = self._groups()
        return kernel.transpose(self.stack + first + second).reshape(self.matrix_shape(kernel.shape))

    def _groups(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (self.outputs, self.inputs) if self.transposed else (self.inputs, self.outputs)


@dataclass(frozen=True)
class Weight:
    """How one parameter is stored and multiplied: what `tcfp_jax.error_feedback` needs to know of it."""

    recipe: Recipe
    layout: Layout


def parse(equation: str, x_ndim: int) -> tuple[str, str, str, Layout]:
    """(letters of x, of the kernel, of the result, the kernel's layout) of a two-operand einsum; x comes first.

    Raises:
      ValueError: the equation is not `x,kernel->result`.
      NotImplementedError: a product that is no stack of matrix products.

    >>> parse("...k,kn->...n", 2)
    ('Ak', 'kn', 'An', Layout(inputs=(0,), outputs=(1,), stack=()))
    """
    text = equation.replace(" ", "")
    if text.count("->") != 1 or text.split("->")[0].count(",") != 1:
        raise ValueError(f"equation {equation!r} is not 'x,kernel->result' with two operands; write it out")
    operands, result = text.split("->")
    x, kernel = operands.split(",")
    explicit = len(x.replace("...", ""))
    if explicit > x_ndim or (explicit != x_ndim and "..." not in x):
        raise ValueError(f"equation {equation!r} has {explicit} letters for x, but x has {x_ndim} axes")
    free = [letter for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if letter not in text][: x_ndim - explicit]
    x, result = (part.replace("...", "".join(free)) for part in (x, result))
    repeated = any(len(set(part)) != len(part) for part in (x, kernel, result))
    lost = set(x) - set(kernel) - set(result) or set(kernel) - set(x) - set(result)
    unknown = set(result) - set(x) - set(kernel)
    if "..." in kernel or repeated or lost or unknown:
        raise NotImplementedError(
            f"equation {equation!r}: only a stack of products x[..., k] @ w[k, n] has an FP8 form, without diagonals "
            "and plain sums; keep the float layer"
        )
    axes = lambda keep: tuple(i for i, letter in enumerate(kernel) if keep(letter in x, letter in result))
    inputs, outputs = axes(lambda x, out: x and not out), axes(lambda x, out: out and not x)
    if not inputs or not outputs:
        raise NotImplementedError(f"equation {equation!r} contracts nothing or is no matrix product; keep the layer")
    return x, kernel, result, Layout(inputs, outputs, axes(lambda x, out: x and out))


def check_fits(quantized: Any, layout: Layout, shape: tuple[int, ...], name: str) -> None:
    """Raise unless `quantized` is a kernel of this shape, stored by this layout.

    Raises:
      ValueError: another shape, or scales that do not fit; the repair is in the message.
    """
    wanted = layout.matrix_shape(shape)
    if quantized.shape != wanted or quantized.stack != wanted[:-2]:
        raise ValueError(
            f"the stored {name} is {list(quantized.shape)} with scales {list(quantized.stack)}, but its layer "
            f"multiplies {list(wanted)} with scales {list(wanted[:-2])} (kernel {list(shape)}); build the state with "
            "error_feedback(tcfp_jax.conversion.find_weights(model, *inputs))"
        )
