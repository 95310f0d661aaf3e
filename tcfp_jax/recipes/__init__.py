"""`Recipe`: one frozen, hashable description of how a layer multiplies.

Layers and products take nothing else. A layer `y = x W` has three products: the forward
`x W`, the input gradient `g Wᵀ` (dgrad) and the weight gradient `xᵀ g` (wgrad). A
recipe names the form of the weight, the scaling of everything that is quantized, and
the arithmetic of each product. Fields that contradict each other raise when a recipe is
built; nothing is changed silently.

    recipe("tcfp12", wgrad="full", block=128)    a named recipe, with overrides
    Recipe(weight=Single(), dgrad="fast", ...)   from its parts
"""

from tcfp_jax.recipes.definition import (
    Arithmetic,
    Copies,
    Dual,
    Fp4Training,
    Halves,
    Recipe,
    Single,
    TCFPMode,
)
from tcfp_jax.recipes.named import NAMES, describe, recipe

__all__ = [
    "NAMES",
    "Arithmetic",
    "Copies",
    "Dual",
    "Fp4Training",
    "Halves",
    "Recipe",
    "Single",
    "TCFPMode",
    "describe",
    "recipe",
]
