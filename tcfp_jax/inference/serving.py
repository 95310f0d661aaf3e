"""Weights for inference, without float kernels; `tcfp_jax.inference` shows how."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

import jax

from pallas_kernels.checks import check_choice
from pallas_kernels.operands import Scaling
from tcfp_jax import paths
from tcfp_jax.inference.checks import RecipeOrWeights, check_weights, part_of
from tcfp_jax.inference.shared_scales import Choose, Groups, store_together
from tcfp_jax.optim.feedback import error_feedback, layer_state
from tcfp_jax.paths import PyTree, Tree
from tcfp_jax.recipes import Recipe
from tcfp_jax.recipes import recipe as named_recipe
from tcfp_jax.weights.layerwise import (
    OnHost,
    at_once,
    by_layers,
    is_on_host,
    on_device,
)
from tcfp_jax.weights.layout import Layout, Weight
from tcfp_jax.weights.parameter import is_quantized
from tcfp_jax.weights.stored import Stored
from tcfp_jax.weights.tcfp12 import PackedTCFP12, quantize_tcfp12

_MATRIX = Layout((0,), (1,))


def quantize_params(
    params: PyTree,
    recipe: RecipeOrWeights,
    *,
    storage: Literal["recipe", "packed"] = "recipe",
    fused: Groups = (),
) -> dict[str, PyTree]:
    """Return the variables of a model with quantized kernels.

    They are `{"params": ..., "tcfp": ...}`. Use this to serve a trained model, or to
    freeze its weights next to adapters. Use `tcfp_jax.store` to train without float
    weights.

    Every stored weight leaves `params`, whatever its name, except a table in which rows
    are looked up (`Weight.float_reads`). Everything else stays, and a layer that loses
    all its parameters keeps an empty dict. A converted Linen model, or a layer of
    `tcfp_jax.linen`, applies the result like float variables; a converted NNX model
    takes it by `load_quantized`. Orbax saves it. A stochastic residual is rounded to
    nearest here.

    Args:
      params: the parameters, nested dicts of arrays or an `nnx.State`, which may hold
        other state as well (`nnx.state(model, (nnx.Param, nnx.BatchStat))`); in the
        result, dicts by name. A stack of layers on the host, as `tcfp_jax.store` takes
        it, moves to the device layer by layer, except with "packed" and `fused`.
      recipe: the recipe of the model, which takes every `kernel`. Or
        `tcfp_jax.conversion.find_weights(model)`, which is needed if the model has
        kernels of more than two axes, several recipes, or layers that stay in BF16.
      storage: "recipe" stores the operands of the products, one FP8 tensor or two, in
        the recipe's `copies`. "packed" is the 12.5-bit format, for disks: layers unpack
        and quantize it at every use, `unpack` does so once. FP4 recipes have only
        "recipe", because their codes take 4.5 bits or less already.
      fused: groups of names of layers that other engines multiply as one matrix, such
        as `[("query", "key", "value"), ("gate", "up")]`. FP4 weights of a group under
        one parent are quantized as one, so that they share the scale of their scales,
        which `save_compressed` demands.

    Raises:
      ValueError: `storage` is unknown or "packed" for FP4, the recipe does not store
        weights, the parameters have no weight to store, or no FP4 weight belongs to a
        group of `fused`.

    >>> import jax.numpy as jnp
    >>> params = {"kernel": jnp.ones((32, 4)), "bias": jnp.zeros(4)}
    >>> variables = quantize_params(params, "tensorwise")
    >>> sorted(variables["params"]), type(variables["tcfp"]["kernel"]).__name__
    (['bias'], 'Stored')
    """
    check_choice("storage", storage, ("recipe", "packed"))
    check_weights(recipe)
    _check_params(params)
    _check_fused(fused)
    chosen: Recipe | dict[str, Weight]
    looked_up: set[str] = set()
    if isinstance(recipe, Mapping):
        chosen = {}
        for path, weight in recipe.items():
            chosen[path] = dataclasses.replace(weight, recipe=_plain(weight.recipe))
            if weight.float_reads == "lookup":
                looked_up.add(path)
    else:
        chosen = _plain(named_recipe(recipe))
    tx = error_feedback(chosen)
    quantized = layer_state(jax.eval_shape(tx.init, jax.tree.map(_shape, params)))
    if not quantized:
        raise ValueError(_nothing_stored(recipe))
    fp4 = _scalings_of_fp4(quantized)
    if storage == "packed" and fp4:
        first = next(iter(fp4))
        raise ValueError(
            'storage="packed" is the format of 12.5 bits per value, but the recipe'
            f' stores {first} in four by {fp4[first]}; use storage="recipe", which is'
            " smaller, or a recipe of FP8"
        )
    together: dict[str, Stored] = {}
    if fused:
        params = jax.tree.map(on_device, params)
        weights = chosen
        if isinstance(weights, Recipe):
            weights = dict.fromkeys(fp4, Weight(weights, _MATRIX))
        together = store_together(fp4, paths.leaves(params), weights, fused)
    rest: dict[str, PyTree] = {}
    for own, leaf in paths.named_leaves(params)[0]:
        # A name may be a path itself, as in Haiku's modules: parameters keep it, the
        # state is nested by it.
        names = paths.join(*own).split("/")
        node = paths.find(quantized, names)
        if node is None or paths.join(*names) in looked_up:
            paths.put(rest, own, on_device(leaf))
        elif own[:-1] and paths.find(rest, own[:-1]) is None:
            paths.put(rest, own[:-1], {})  # Flax finds a layer by its parameters
        if node is None:
            continue
        path = "/".join(own)
        if storage == "packed":
            served = jax.jit(quantize_tcfp12)(on_device(leaf))
        elif path in together:
            served = together[path]
        elif isinstance(chosen, Mapping):
            served = _served(leaf, chosen[path])
        else:
            served = _served(leaf, Weight(chosen, _MATRIX))
        paths.put(quantized, names, served)
    return {"params": rest, "tcfp": quantized}


def _shape(leaf: PyTree) -> PyTree:
    """Return the shape of a parameter on the host; others as they are."""
    if not is_on_host(leaf):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _served(kernel: jax.Array | OnHost, weight: Weight) -> Stored:
    """Return a weight as products read it.

    The device holds one float layer at a time of a stack on the host.
    """
    layout = weight.layout.unstacked
    stored = _Served(dataclasses.replace(weight, layout=layout))
    if is_on_host(kernel) and len(kernel.shape) > layout.ndim:
        return by_layers(stored, kernel)
    return at_once(stored, kernel)


@dataclasses.dataclass(frozen=True)
class _Served:
    """The function that makes a weight, or a layer of it, from its floats.

    Attributes:
      weight: recipe and layout of one layer.
    """

    weight: Weight

    def __call__(self, kernel: jax.Array) -> Stored:
        layout = self.weight.layout.stacked(kernel.ndim)
        weight = dataclasses.replace(self.weight, layout=layout)
        state = error_feedback({"kernel": weight}).init({"kernel": kernel})
        # No float parameter remains with which the sample could be compared.
        return dataclasses.replace(layer_state(state)["kernel"], sample=None)


def _check_params(params: PyTree) -> None:
    """Raise a ValueError if these are not float parameters."""
    if any(map(is_quantized, jax.tree.leaves(params, is_leaf=is_quantized))):
        raise ValueError(
            "params hold stored weights: apply the model to them, or pass"
            " tcfp_jax.dequantize(params)"
        )
    if isinstance(params, Mapping) and set(params) == {"params"}:
        raise ValueError(
            'params are the variables of a model, {"params": ...}; pass'
            ' variables["params"]'
        )


def _check_fused(fused: Groups) -> None:
    """Raise a ValueError unless these are groups of names."""
    groups = fused if isinstance(fused, Sequence) else [fused]
    for group in groups:
        if isinstance(group, str) or not isinstance(group, Sequence):
            raise ValueError(
                f'fused={fused!r} is not a sequence of groups of names; use [("query",'
                ' "key", "value")]'
            )


def _scalings_of_fp4(stored: PyTree) -> dict[str, Scaling]:
    """Return the scalings of the FP4 weights among stored ones, by path."""
    return {
        path: one.scaling
        for path, one in paths.entries(stored).items()
        if isinstance(one, Stored) and one.is_packed
    }


def choose_codes(
    served: Tree,
    params: PyTree,
    weights: Mapping[str, Weight],
    choose: Choose,
    *,
    fused: Groups = (),
) -> dict[str, PyTree]:
    """Return variables of `quantize_params` with FP4 codes that your function chose.

    Use this with `gptq` or `search_scales` if the codes of the recipe's rule lose too
    much. Products read these codes and scales like any others.

    Args:
      served: from `quantize_params(params, weights)`.
      params: the float parameters, nested dicts.
      weights: from `find_weights`.
      choose: takes a path and a float32 matrix, or stack of matrices, `[..., n, k]`,
        such as `lambda path, w: gptq(w, moments[path], Fp4(rule="four_over_six"))`. The
        result has the format and tile of the recipe. It keeps its own rule, because
        products follow the rule of the codes. If the recipe has the rule "fold_exact",
        its FP8 products rely on it, and the result must have it, too.
      fused: as in `quantize_params`; the rows of a group are chosen as one matrix, by
        the path of the first.

    Raises:
      ValueError: no weight is FP4, one has an odd k, or a group is not there. A chosen
        operand does not fit: its shape, its format, a rule other than the recipe's
        "fold_exact", or scales that break that rule.

    >>> import jax.numpy as jnp
    >>> from tcfp_jax.inference import quantize_params, search_scales
    >>> from tcfp_jax.recipes import recipe
    >>> from tcfp_jax.weights.layout import Layout
    >>> params = {"w": jnp.ones((32, 4))}
    >>> weights = {"w": Weight(recipe("nvfp4"), Layout((0,), (1,)))}
    >>> served = quantize_params(params, weights)
    >>> chosen = choose_codes(served, params, weights, lambda path, w: search_scales(w))
    >>> chosen["tcfp"]["w"].shape
    (32, 4)
    """
    stored = part_of(served, "tcfp")
    packed = _scalings_of_fp4(stored)
    if not packed:
        raise ValueError(
            "no stored weight is FP4; make some by quantize_params(params, weights)"
            ' with recipe("nvfp4")'
        )
    made = store_together(packed, paths.leaves(params), weights, fused, choose)
    chosen: dict[str, PyTree] = {}
    for path, one in {**paths.entries(stored), **made}.items():
        paths.put(chosen, path.split("/"), one)
    return {**served, "tcfp": chosen}


def _nothing_stored(recipe: RecipeOrWeights) -> str:
    """Return the message for a recipe, or for weights, of which none is stored."""
    if isinstance(recipe, Mapping) and not recipe:
        return (
            "the mapping of weights is empty: the model was converted by a recipe that"
            ' stores none, such as "bf16" or one of FP4 training, or not at all;'
            ' convert it by a recipe to serve with, such as "tensorwise" or "nvfp4"'
        )
    if isinstance(recipe, Mapping):
        recipes = [weight.recipe for weight in recipe.values()]
    else:
        recipes = [named_recipe(recipe)]
    for one in recipes:
        if one.fp4 is not None:
            return (
                f"the recipe trains with {one.fp4}, which quantizes float weights anew"
                " at each product and stores none; serve with"
                ' recipe("nvfp4"), for the model and here: the numbers that were'
                " multiplied forward are those of"
                ' recipe("nvfp4", tile="square", rule="amax")'
            )
    return (
        "the recipe keeps weights in BF16, so there is nothing to quantize; use"
        ' recipe("tcfp12")'
    )


def unpack(variables: Tree, recipe: RecipeOrWeights) -> dict[str, PyTree]:
    """Turn variables of `storage="packed"` into those of `storage="recipe"`.

    Use this once after loading, unless memory is scarce: otherwise layers unpack their
    weights at every use. Products have the same bits either way. Memory grows from 12.5
    bits per value to 8 or 16 per copy.

    Args:
      variables: from `quantize_params(..., storage="packed")`.
      recipe: the argument of `quantize_params`.

    Raises:
      ValueError: nothing in `variables` is packed.

    >>> import jax.numpy as jnp
    >>> params = {"kernel": jnp.ones((32, 4))}
    >>> served = quantize_params(params, "tensorwise", storage="packed")
    >>> type(unpack(served, "tensorwise")["tcfp"]["kernel"]).__name__
    'Stored'
    """
    stored = part_of(variables, "tcfp")
    if not any(map(_is_packed, jax.tree.leaves(stored, is_leaf=_is_packed))):
        raise ValueError(
            'nothing is packed here; layers read storage="recipe" directly'
        )

    @jax.jit
    def floats(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: leaf.dequantize(), tree, is_leaf=_is_packed)

    return {**variables, "tcfp": quantize_params(floats(stored), recipe)["tcfp"]}


def _is_packed(node: object) -> bool:
    return isinstance(node, PackedTCFP12)


def _plain(recipe: Recipe) -> Recipe:
    """Return the recipe without the fields that only training needs."""
    if recipe.stored is None:
        return recipe
    return named_recipe(recipe, remainder="dropped", amax="fresh")
