"""`Recipe`: one frozen, hashable description of how a layer multiplies. It is passed whole, and nothing else is.

A layer `y = x W` has three products: the forward `x W`, the input gradient `g Wᵀ` (dgrad) and the weight gradient
`xᵀ g` (wgrad). A recipe is made of values that hold what belongs together: the form of the stored weight, the scaling
of everything that is quantized, and one choice for each product. What cannot be said cannot contradict itself; the few
rules that are left raise when a recipe is built, and no setting is changed on the user's behalf.

    recipe("tcfp12", wgrad="fast", block=128)         a named recipe, with overrides, see `recipe`
    Recipe(weight=Single(), dgrad="fast", ...)        from its parts
"""

from tcfp_jax.recipes.definition import Recipe
from tcfp_jax.recipes.forms import (
    Amax,
    Blocks,
    Copies,
    Dual,
    Format,
    Fp4Training,
    Halves,
    Product,
    Remainder,
    Single,
    TCFPMode,
    WeightFormat,
)  # fmt: skip
from tcfp_jax.recipes.named import NAMES, describe, recipe

__all__ = [
    "NAMES", "Amax", "Blocks", "Copies", "Dual", "Format", "Fp4Training", "Halves", "Product", "Recipe", "Remainder",
    "Single", "TCFPMode", "WeightFormat", "describe", "recipe",
]  # fmt: skip
