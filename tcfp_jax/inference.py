"""`quantize_params`: weights for inference, in which the float kernels no longer exist."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax

from tcfp_jax.layout import Weight
from tcfp_jax.optim import error_feedback, layer_state, path_names
from tcfp_jax.recipe import Recipe, TCFPMode
from tcfp_jax.recipe import recipe as named_recipe
from tcfp_jax.tcfp12 import quantize_tcfp12

Storage = Literal["recipe", "packed"]


def quantize_params(
    params: Any, recipe: Recipe | str | Mapping[str, Weight], *, storage: Storage = "recipe"
) -> dict[str, Any]:
    """The variables of a Linen model whose kernels are stored quantized: `{"params": ..., "tcfp": ...}`.

    Kernels leave `params`; embeddings stay, because tokens are looked up in them, and so does everything else. A
    converted model, or one of `tcfp_jax.linen`'s layers, applies the result as it applies float variables, and orbax
    saves it. A stochastic residual is rounded to nearest here.

    Args:
      params: the parameters, nested dicts of arrays.
      recipe: that of the model, or `tcfp_jax.conversion.find_weights(model)`, which a model needs that has kernels of
        more than two axes, several recipes, or layers that stay in BF16. A recipe alone takes every `kernel`.
      storage: "recipe" stores what the products read, one FP8 tensor or two, in the recipe's `weight_copies`; "packed"
        the 12.5-bit format, which is unpacked and quantized again at every use.

    Raises:
      ValueError: an unknown `storage`, a recipe that does not quantize weights, or no weight among the parameters.

    >>> import jax.numpy as jnp
    >>> variables = quantize_params({"kernel": jnp.ones((32, 4)), "bias": jnp.zeros(4)}, "tensorwise")
    >>> sorted(variables["params"]), type(variables["tcfp"]["kernel"]).__name__
    (['bias'], 'QArray')
    """
    if storage not in ("recipe", "packed"):
        raise ValueError(f'storage={storage!r} is unknown; use "recipe" or "packed"')
    chosen: Any = _plain(named_recipe(recipe)) if not isinstance(recipe, Mapping) else _plain_weights(recipe)
    quantized = layer_state(jax.eval_shape(error_feedback(chosen).init, params))
    if not quantized:
        raise ValueError('the recipe keeps weights in BF16, so there is nothing to quantize; use recipe("tcfp12")')
    if storage == "recipe":
        quantized = layer_state(jax.jit(error_feedback(chosen).init)(params))
    entries, _ = jax.tree_util.tree_flatten_with_path(params)
    rest: dict[str, Any] = {}
    for path, leaf in entries:
        names = path_names(path)
        node = _find(quantized, names)
        if node is not None and storage == "packed":
            _put(quantized, names, jax.jit(quantize_tcfp12)(leaf))
        if node is None or names[-1] != "kernel":
            _put(rest, names, leaf)
    return {"params": rest, "tcfp": quantized}


def _plain(recipe: Recipe) -> Recipe:
    """The recipe without what only training needs."""
    if recipe.mode is TCFPMode.BF16:
        return recipe
    residual = "nearest" if recipe.residual == "stochastic" else recipe.residual
    return dataclasses.replace(recipe, residual=residual, error_feedback=False, delayed_scaling=False)


def _plain_weights(weights: Mapping[str, Weight]) -> dict[str, Weight]:
    return {path: dataclasses.replace(weight, recipe=_plain(weight.recipe)) for path, weight in weights.items()}


def _find(tree: Any, names: list[str]) -> Any:
    for name in names:
        if not isinstance(tree, Mapping) or name not in tree:
            return None
        tree = tree[name]
    return tree


def _put(tree: dict[str, Any], names: list[str], value: Any) -> None:
    for name in names[:-1]:
        tree = tree.setdefault(name, {})
    tree[names[-1]] = value
