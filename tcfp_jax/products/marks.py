"""Marks: what a layer of ours says in the traced program of the product that it is about to compute.

The census of a model reads programs. A product of Flax's own is there to be read; one of ours is FP8 operands behind a
custom derivative. So the kernel passes through `checkpoint_name` with a name that stands for the product's layout and
recipe. It costs nothing: the equation is gone when the program is lowered.
"""

from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name

from tcfp_jax.products.contraction import Contraction
from tcfp_jax.recipes import Recipe
from tcfp_jax.weights.layout import Layout

PREFIX = "tcfp_product_"


class Mark(NamedTuple):
    """A product: the layout of the kernel that the layer sees, its recipe, and rows of x for each matrix."""

    layout: Layout
    recipe: Recipe
    rows: int


# Interned: equal products have equal names, so that marks add no programs to caches.
_MARKS: list[Mark] = []
_NUMBERS: dict[Mark, int] = {}


def mark(kernel: jax.Array, contraction: Contraction, recipe: Recipe, x_shape: tuple[int, ...]) -> Any:
    """The kernel itself, with the product in its name.

    >>> from tcfp_jax.products.contraction import matrix_product
    >>> jax.make_jaxpr(lambda w: mark(w, matrix_product(2), Recipe(), (8, 4)))(jax.numpy.ones((4, 2))).eqns[0].primitive
    name
    """
    found = Mark(contraction.layout, recipe, contraction.tokens(x_shape))
    number = _NUMBERS.setdefault(found, len(_MARKS))
    if number == len(_MARKS):
        _MARKS.append(found)
    return checkpoint_name(kernel, f"{PREFIX}{number}")


def marked(name: str) -> Mark | None:
    """The mark that a name stands for, or None."""
    return _MARKS[int(name.removeprefix(PREFIX))] if name.startswith(PREFIX) else None
