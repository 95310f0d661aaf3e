"""Sites: what a program says of the low-precision products in it, for those who observe it.

The body of a product's custom derivative passes its result through `checkpoint_name` with a name that stands for the
product. A program that is differentiated has the rule in the place of that body, and in one that is not the equation is
gone when it is lowered: no compiled program has anything of it.
"""

from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name

from tcfp_jax.recipes import Recipe

PREFIX = "tcfp_site_"


class Site(NamedTuple):
    """A product: its recipe, and the tree and the shapes of its operands.

    The operands are `(x, w, quantized, x_quantized)` as `products.layer` has them, and the words of FP4 training's key.
    """

    recipe: Recipe
    structure: Any
    shapes: tuple[tuple[int, ...], ...]


# Interned, as the marks of layers are.
_SITES: list[Site] = []
_NUMBERS: dict[Site, int] = {}


def named(result: jax.Array, recipe: Recipe, operands: Any, words: jax.Array | None = None) -> jax.Array:
    """The result itself, with the product in its name.

    >>> from tcfp_jax.recipes import recipe
    >>> program = jax.make_jaxpr(lambda y: named(y, recipe("bf16"), (y, y, None, None)))(jax.numpy.ones(2))
    >>> site_of(program).recipe == recipe("bf16"), site_of(jax.make_jaxpr(abs)(1.0))
    (True, None)
    """
    leaves, structure = jax.tree.flatten((*operands, words))
    found = Site(recipe, structure, tuple(leaf.shape for leaf in leaves))
    number = _NUMBERS.setdefault(found, len(_SITES))
    if number == len(_SITES):
        _SITES.append(found)
    return checkpoint_name(result, f"{PREFIX}{number}")


def site_of(program: Any) -> Site | None:
    """The product that a program computes, or None."""
    for eqn in reversed(getattr(program, "jaxpr", program).eqns):
        if eqn.primitive.name == "name" and eqn.params["name"].startswith(PREFIX):
            return _SITES[int(eqn.params["name"].removeprefix(PREFIX))]
    return None
