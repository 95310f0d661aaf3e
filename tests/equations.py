"""Contractions as einsum equations, which tests can read."""

from tcfp_jax.products.einsum import Contraction
from tcfp_jax.weights.layout import Layout


def parse(equation, x_ndim):
    """Return the contraction of `x,kernel->result`, x with `x_ndim` axes."""
    operands, result = equation.split("->")
    x, kernel = operands.split(",")
    free = "ABCDEF"[: x_ndim - len(x.replace("...", ""))]
    x = x.replace("...", free)
    result = result.replace("...", free)

    def axes(in_x, in_result):
        wanted = (in_x, in_result)
        letters = enumerate(kernel)
        return tuple(i for i, one in letters if (one in x, one in result) == wanted)

    def places(axes):
        return tuple(x.index(kernel[axis]) for axis in axes)

    layout = Layout(axes(True, False), axes(False, True), axes(True, True))
    stack = [kernel[axis] for axis in layout.stack]
    outputs = [kernel[axis] for axis in layout.outputs]
    natural = [*stack, *(one for one in x if one not in kernel), *outputs]
    order = tuple(natural.index(letter) for letter in result)
    if order == tuple(range(len(order))):
        order = None
    return Contraction(
        layout, x_ndim, places(layout.inputs), places(layout.stack), order
    )
