"""Checks of the arguments that say how weights are stored."""

from collections.abc import Mapping

from tcfp_jax.paths import PyTree, Tree
from tcfp_jax.recipes import Recipe
from tcfp_jax.weights.layout import Weight

# A recipe or its name, or weights by path, from `find_weights`.
RecipeOrWeights = Recipe | str | Mapping[str, Weight]


def part_of(variables: Tree, name: str) -> PyTree:
    """Return the parameters or the stored weights of variables of `quantize_params`."""
    part = variables.get(name) if isinstance(variables, Mapping) else None
    if not isinstance(part, Mapping):
        raise ValueError(
            f'the variables have no dict "{name}"; pass the result of quantize_params,'
            ' {"params", "tcfp"}'
        )
    return part


def check_weights(recipe: object) -> None:
    """Raise a ValueError unless this is a recipe, a name, or from `find_weights`."""
    if isinstance(recipe, Mapping) and not all(
        isinstance(weight, Weight) for weight in recipe.values()
    ):
        raise ValueError(
            "recipe= is a mapping, but not from paths to Weight; pass"
            " find_weights(model)"
        )
    if not isinstance(recipe, Recipe | str | Mapping):
        raise ValueError(
            f"recipe= is a {type(recipe).__name__}; pass a recipe, its name, or"
            " find_weights(model)"
        )
