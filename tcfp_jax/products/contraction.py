"""`contract`: an einsum of activations and a kernel of any shape, as `tcfp_jax.matmul` of the matrix that it is."""

import math

import jax

from pallas_kernels.operands import Operand
from tcfp_jax.products.layer import matmul
from tcfp_jax.recipes import Recipe
from tcfp_jax.weights.layout import check_fits, parse
from tcfp_jax.weights.stored import Stored


def contract(
    equation: str,
    x: jax.Array,
    kernel: jax.Array | None,
    *,
    recipe: Recipe,
    quantized: Stored | None = None,
    key: jax.Array | None = None,
    shape: tuple[int, ...] | None = None,
) -> jax.Array:
    """`einsum(equation, x, kernel)` with the operands, products and gradients that `recipe` describes.

    Letters that x, kernel and result share are a stack of products with a scale each.

    Args:
      equation: explicit, two operands, x first; an ellipsis may stand for leading axes of x and the result.
      x: real floats.
      kernel: real floats, or None where only `quantized` exists.
      recipe: how to multiply.
      quantized: the kernel as `error_feedback` stored it: `layout.matrix` of it.
      key: random key for a stochastic residual where the kernel is quantized here.
      shape: of the kernel where it is None.

    Raises:
      ValueError: the equation does not fit the operands, or `quantized` is another weight.
      NotImplementedError: a product that is no stack of matrix products.

    >>> import jax.numpy as jnp
    >>> contract("bk,khd->bhd", jnp.ones((2, 3)), jnp.ones((3, 4, 5)), recipe=Recipe()).shape
    (2, 4, 5)
    """
    x_letters, letters, result, layout = parse(equation, x.ndim)
    shape = tuple(shape or ()) if kernel is None else kernel.shape
    sizes = dict(zip(letters, shape))
    if len(shape) != len(letters) or any(sizes.get(c, s) != s for c, s in zip(x_letters, x.shape)):
        raise ValueError(f"equation {equation!r} does not fit x{list(x.shape)} and kernel{list(shape)}")
    if isinstance(quantized, Operand):
        quantized = Stored(None, quantized)
    matrix = None if kernel is None else layout.matrix(kernel)
    if quantized is not None:
        check_fits(quantized, layout, shape, "kernel")
    if layout.transposed:
        matrix = None if matrix is None else matrix.swapaxes(-1, -2)
        quantized = None if quantized is None else quantized.swap()
    pick = lambda axes: [letters[axis] for axis in axes]
    stack, inputs, outputs = pick(layout.stack), pick(layout.inputs), pick(layout.outputs)
    rest = [letter for letter in x_letters if letter not in stack + inputs]
    x = x.transpose([x_letters.index(letter) for letter in stack + rest + inputs])
    kept = x.shape[: len(stack) + len(rest)]
    # XLA's CPU (jax 0.11) cannot run a bfloat16 product over several axes whose result is turned over, as the gradient
    # of a transposed kernel is; over one axis it can.
    leading = (*kept[: len(stack)], -1) if layout.transposed else kept
    x = x.reshape(*leading, math.prod(sizes[letter] for letter in inputs))

    def multiply(x: jax.Array, w: jax.Array | None, quantized: Stored | None, key: jax.Array | None) -> jax.Array:
        if w is None:
            return matmul(x, quantized, recipe=recipe)
        return matmul(x, w, recipe=recipe, quantized=quantized, key=key)

    if key is not None and stack:
        key = jax.random.split(key, tuple(sizes[letter] for letter in stack))
    for _ in stack:
        multiply = jax.vmap(multiply)
    y = multiply(x, matrix, quantized, key)
    y = y.reshape(*kept, *(sizes[letter] for letter in outputs))
    order = stack + rest + outputs
    return y.transpose([order.index(letter) for letter in result])
