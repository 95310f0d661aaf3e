"""Weights for inference, in which the float kernels no longer exist.

served = quantize_params(params, find_weights(model))   # params of Linen, or nnx.state(model, nnx.Param)
model.apply(served, x)                                  # Linen
load_quantized(model, served)                           # NNX, in place
restored(loaded, find_weights(model))                   # what orbax loads without a template, as `served` was
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
from flax import linen as nn
from flax import nnx as flax_nnx

from pallas_kernels.operands import SCALE_DTYPE, Block, Fp4, Operand
from tcfp_jax import paths
from tcfp_jax.conversion import nnx_models
from tcfp_jax.conversion.convert import hand_out
from tcfp_jax.inference.blocks import check_rule
from tcfp_jax.inference.shared_scales import families, store_together
from tcfp_jax.layers import Absent
from tcfp_jax.optim.feedback import error_feedback, layer_state
from tcfp_jax.recipes import Recipe
from tcfp_jax.recipes import recipe as named_recipe
from tcfp_jax.weights.layout import Layout, Weight
from tcfp_jax.weights.stored import Stored
from tcfp_jax.weights.tcfp12 import PackedTCFP12, quantize_tcfp12

Storage = Literal["recipe", "packed"]


def quantize_params(
    params: Any,
    recipe: Recipe | str | Mapping[str, Weight],
    *,
    storage: Storage = "recipe",
    fused: Sequence[Sequence[str]] = (),
) -> dict[str, Any]:
    """The variables of a model whose kernels are stored quantized: `{"params": ..., "tcfp": ...}`.

    Every weight that is stored leaves `params`, whatever its name, but for tables in which rows are looked up, too
    (`Weight.float_reads`); everything else stays, and a layer that loses all it has keeps an empty dict. A converted
    Linen model, or one of `tcfp_jax.linen`'s layers, applies the result as it applies float variables; a converted NNX
    model takes it by `load_quantized`. Orbax saves it. A stochastic residual is rounded to nearest here.

    Args:
      params: the parameters, nested dicts of arrays or an `nnx.State`, which may hold other state as well
        (`nnx.state(model, (nnx.Param, nnx.BatchStat))`); in the result, dicts by name.
      recipe: that of the model, or `tcfp_jax.conversion.find_weights(model)`, which a model needs that has kernels of
        more than two axes, several recipes, or layers that stay in BF16. A recipe alone takes every `kernel`.
      storage: "recipe" stores what the products read, one FP8 tensor or two, in the recipe's `copies`; "packed"
        the 12.5-bit format, for disks: layers unpack and quantize it at every use, `unpack` does so once. Not of FP4
        recipes, whose codes are 4.5 bits and less as they are.
      fused: groups of names of layers that other engines multiply as one matrix, such as
        `[("query", "key", "value"), ("gate", "up")]`: FP4 weights of a group under one parent are quantized as one, so
        that they share the scale of their scales, as files of `save_compressed` must have it.

    Raises:
      ValueError: an unknown `storage`, "packed" of FP4, a recipe that does not store weights, no weight among the
        parameters, or a group of `fused` that no FP4 weight belongs to.

    >>> import jax.numpy as jnp
    >>> variables = quantize_params({"kernel": jnp.ones((32, 4)), "bias": jnp.zeros(4)}, "tensorwise")
    >>> sorted(variables["params"]), type(variables["tcfp"]["kernel"]).__name__
    (['bias'], 'Stored')
    """
    if storage not in ("recipe", "packed"):
        raise ValueError(f'storage={storage!r} is unknown; use "recipe" or "packed"')
    mapped = isinstance(recipe, Mapping)
    chosen: Any = _plain_weights(recipe) if isinstance(recipe, Mapping) else _plain(named_recipe(recipe))
    quantized = layer_state(jax.eval_shape(error_feedback(chosen).init, params))
    if not quantized:
        raise ValueError(_nothing_stored(recipe))
    fp4 = {path: one.scaling for path, one in paths.entries(quantized).items() if isinstance(one.scaling, Fp4)}
    if storage == "packed" and fp4:
        first, scaling = next(iter(fp4.items()))
        raise ValueError(
            f'storage="packed" is the format of 12.5 bits a value, but the recipe stores {first} in four by {scaling}; '
            'use storage="recipe", which is smaller, or a recipe of FP8'
        )
    if storage == "recipe":
        quantized = layer_state(jax.jit(error_feedback(chosen).init)(params))
    if fused:
        _share(quantized, params, chosen, fused)
    looked_up = {path for path, weight in chosen.items() if weight.float_reads == "lookup"} if mapped else set()
    entries, _ = jax.tree_util.tree_flatten_with_path(params)
    rest: dict[str, Any] = {}
    for path, leaf in entries:
        # A name may be a path itself, as Haiku's modules have: parameters keep it, the state is nested by it.
        own = paths.path_names(path)
        names = paths.join(*own).split("/")
        node = paths.find(quantized, names)
        if node is None or paths.join(*names) in looked_up:
            paths.put(rest, own, leaf)
        elif own[:-1] and paths.find(rest, own[:-1]) is None:
            paths.put(rest, own[:-1], {})  # Flax tells by its parameters that a layer is there
        if node is not None:
            # No parameter stays beside it to compare with.
            served = jax.jit(quantize_tcfp12)(leaf) if storage == "packed" else dataclasses.replace(node, sample=None)
            paths.put(quantized, names, served)
    return {"params": rest, "tcfp": quantized}


def _nothing_stored(recipe: Recipe | str | Mapping[str, Weight]) -> str:
    """What to say of a recipe, or of weights, of which none is stored."""
    if isinstance(recipe, Mapping) and not recipe:
        return (
            'the weights given are none: the model was converted by a recipe that stores none, such as "bf16" or one '
            'of FP4 training, or not at all; convert it by the recipe to serve with, such as "tensorwise" or "nvfp4"'
        )
    recipes = [one.recipe for one in recipe.values()] if isinstance(recipe, Mapping) else [named_recipe(recipe)]
    training = next((one.fp4 for one in recipes if one.fp4 is not None), None)
    if training is not None:
        return (
            f"the recipe trains with {training}, which quantizes float weights anew at each product and stores none; "
            'serve with recipe("nvfp4"), for the model and here: the numbers that were multiplied forward are those of '
            'recipe("nvfp4", tile="square", rule="amax")'
        )
    return 'the recipe keeps weights in BF16, so there is nothing to quantize; use recipe("tcfp12")'


def _share(quantized: dict[str, Any], params: Any, recipe: Any, fused: Sequence[Sequence[str]]) -> None:
    """Quantize the FP4 weights of each group as one, in place."""
    entries, _ = jax.tree_util.tree_flatten_with_path(params)
    leaves = {paths.join(*paths.path_names(path)): leaf for path, leaf in entries}
    fp4 = [path for path, one in paths.entries(quantized).items() if isinstance(one.scaling, Fp4)]
    weights = recipe if isinstance(recipe, Mapping) else dict.fromkeys(fp4, Weight(recipe, Layout((0,), (1,))))
    for family in families(fp4, fused):
        if len(family) > 1:
            for path, one in store_together(family, leaves, weights).items():
                paths.put(quantized, path.split("/"), one)


def unpack(variables: Mapping[str, Any], recipe: Recipe | str | Mapping[str, Weight]) -> dict[str, Any]:
    """Variables of `storage="packed"` as those of `storage="recipe"`: after loading, once, instead of at every use.

    Products have the same bits either way. Memory grows from 12.5 bits per value to 8 or 16 per copy.

    Args:
      variables: from `quantize_params(..., storage="packed")`.
      recipe: as given to `quantize_params`.

    Raises:
      ValueError: nothing in `variables` is packed.

    >>> import jax.numpy as jnp
    >>> served = quantize_params({"kernel": jnp.ones((32, 4))}, "tensorwise", storage="packed")
    >>> type(unpack(served, "tensorwise")["tcfp"]["kernel"]).__name__
    'Stored'
    """
    packed = lambda node: isinstance(node, PackedTCFP12)
    if not any(map(packed, jax.tree.leaves(variables["tcfp"], is_leaf=packed))):
        raise ValueError('nothing is packed here; layers read storage="recipe" as it is')
    floats = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf.dequantize(), tree, is_leaf=packed))
    return {**variables, "tcfp": quantize_params(floats(variables["tcfp"]), recipe)["tcfp"]}


def restored(variables: Mapping[str, Any], recipe: Recipe | str | Mapping[str, Weight]) -> dict[str, Any]:
    """Variables of `quantize_params` that a checkpointer gave back without a template, as what they were.

    Orbax makes dicts of the classes of stored weights then; which values share a scale is known from the recipe, and by
    which rule the scales of FP4 were found.

    Args:
      variables: `{"params": ..., "tcfp": ...}`, nested dicts.
      recipe: as given to `quantize_params`.

    Raises:
      ValueError: a weight that the recipe does not name, packed weights, of which a dict does not hold the length,
        scales of another scaling than the recipe's, or such as are not of the rule "fold_exact" where it names it.

    >>> import jax.numpy as jnp
    >>> served = quantize_params({"kernel": jnp.ones((32, 4))}, "tensorwise")
    >>> one = served["tcfp"]["kernel"].forward
    >>> plain = {"kernel": {"forward": {"values": one.values, "scale": one.scale}, "backward": None}}
    >>> restored({"params": {}, "tcfp": plain}, "tensorwise")["tcfp"]["kernel"].shape
    (32, 4)
    """
    is_weight = lambda node: not isinstance(node, Mapping) or bool({"forward", "backward", "codes"} & set(node))
    found: dict[str, Any] = {}
    for path, node in paths.leaves(variables["tcfp"], is_weight).items():
        paths.put(found, path.split("/"), _stored_of(path, node, recipe) if isinstance(node, Mapping) else node)
    return {**variables, "tcfp": found}


def _stored_of(path: str, node: Mapping[str, Any], recipe: Any) -> Stored:
    """A stored weight from the dict that a checkpointer made of it."""
    if "codes" in node:
        raise ValueError(
            f"{path} is packed, and its length is not in the checkpoint; restore it with a template: "
            "checkpointer.restore(path, jax.eval_shape(lambda: quantize_params(params, recipe, storage='packed')))"
        )
    if isinstance(recipe, Mapping) and path not in recipe:
        raise ValueError(f"{path} is stored, but the weights given have only {sorted(recipe)[:8]}; pass find_weights")
    scaling = (recipe[path].recipe if isinstance(recipe, Mapping) else named_recipe(recipe)).scaling
    operand = lambda entry: None if not entry else Operand(**entry, scaling=scaling)
    made = Stored(operand(node.get("forward")), operand(node.get("backward")))
    repair = "pass the recipe that the weights were quantized by"
    for one in jax.tree.leaves(made, is_leaf=lambda node: isinstance(node, Operand)):
        _check_scales(path, one, repair)
        check_rule(path, one, repair)
    return made


def _check_scales(path: str, weight: Operand, repair: str) -> None:
    """Raise where values and scales are not those of the scaling: what they stand for would be another weight."""
    scaling, four = weight.scaling, isinstance(weight.scaling, Fp4)
    block = SCALE_DTYPE if isinstance(scaling, Block) else np.float32
    wanted = (np.dtype(scaling.scale_dtype if isinstance(scaling, Fp4) else block), scaling.scale_shape(weight.shape))
    found = (np.dtype(weight.scale.dtype), tuple(weight.scale.shape))
    if found != wanted or four != (weight.values.dtype == np.uint8):
        named = [f"{dtype}{list(shape)}" for dtype, shape in (wanted, found)]
        raise ValueError(
            f"{path} is {weight.values.dtype}{list(weight.values.shape)}, whose scales with {scaling} are {named[0]}, "
            f"but these are {named[1]}; {repair}"
        )


def load_quantized(model: Any, variables: Mapping[str, Any]) -> None:
    """Let a converted NNX model run on inference weights alone; in place, and its float kernels are freed.

    The model may hold no arrays at all (`nnx.eval_shape(lambda: Model(rngs))`, then `convert_to_tcfp`). In the place
    of each float kernel stands its shape: `export` raises, and code that reads the kernel reads what is stored for it.

    Args:
      model: converted by the recipe and rules of the weights.
      variables: from `quantize_params` or `unpack`.

    Raises:
      TypeError: not an NNX model; a Linen model applies `variables` as they are.
      ValueError: a weight whose layer is not low-precision here, or a parameter that the variables lack or the model
        lacks.

    >>> from tcfp_jax.nnx import TCFPLinear
    >>> model = TCFPLinear(4, 2, rngs=flax_nnx.Rngs(0))
    >>> load_quantized(model, quantize_params(flax_nnx.state(model, flax_nnx.Param), "tcfp12"))
    >>> model.kernel
    Absent(shape=(4, 2), dtype=dtype('float32'))
    """
    if not isinstance(model, flax_nnx.Module):
        kind = "; a Linen model applies the variables as they are" if isinstance(model, nn.Module) else ""
        raise TypeError(f"{type(model).__name__} is not a flax.nnx.Module{kind}")
    stored, params = (paths.entries(variables[name]) for name in ("tcfp", "params"))
    if not all(isinstance(weight, Stored | PackedTCFP12) for weight in stored.values()):
        raise ValueError(
            "the weights are dicts, as a checkpoint gives them back without a template; pass restored(variables, "
            "find_weights(model))"
        )
    nodes = dict(flax_nnx.iter_graph(model))
    held = {"/".join(map(str, path)): node for path, node in nodes.items() if isinstance(node, flax_nnx.Variable)}
    absent = nnx_models.absent_of(model)  # of an earlier call
    kinds = {path for path, node in held.items() if isinstance(node, flax_nnx.Param)} | set(absent)
    if set(stored) - kinds:
        raise ValueError(
            f"no parameter of the model is {min(set(stored) - kinds)}; convert the model as that of the weights was"
        )
    wrong = (kinds - set(stored)) - set(params) or set(params) - set(held)
    if wrong:
        has, lacks = ("model", "variables") if min(wrong) in kinds else ("variables", "model")
        raise ValueError(f"the {has} has {min(wrong)}, which the {lacks} lacks; pass the weights of this very model")
    empty = [p for p in set(held) - kinds - set(params) if isinstance(held[p].get_raw_value(), jax.ShapeDtypeStruct)]
    streams = [path for path in empty if isinstance(held[path], flax_nnx.RngState)]
    if set(empty) - set(streams):
        raise ValueError(
            f"the model has no value for {min(set(empty) - set(streams))}; quantize nnx.state(model), which holds all "
            "variables, in the place of nnx.state(model, nnx.Param)"
        )
    if hand_out(model, stored) < len(stored):
        raise ValueError(
            "a stored weight has no low-precision layer here; convert the model as that of the weights was"
        )
    for path in set(stored) - set(params) - set(absent):
        _replace(nodes, held[path], Absent(tuple(held[path].shape), np.dtype(held[path].dtype)))
    for path in streams:  # dropout is off in inference; a stream that is used draws from a fixed key
        fixed = jax.random.key(0) if isinstance(held[path], flax_nnx.RngKey) else jax.numpy.uint32(0)
        held[path].set_raw_value(fixed)
    for path, value in params.items():
        held[path].set_raw_value(value)


def _replace(nodes: Mapping[Any, Any], parameter: Any, kernel: Absent) -> None:
    """Put one object in every place of a parameter: layers may share it."""
    for owner in nodes.values():
        if isinstance(owner, flax_nnx.Pytree | dict):
            entries = owner if isinstance(owner, dict) else vars(owner)
            for name in [name for name, value in entries.items() if value is parameter]:
                nnx_models.put(owner, name, flax_nnx.static(kernel))


def _plain(recipe: Recipe) -> Recipe:
    """The recipe without what only training needs."""
    return recipe if recipe.stored is None else named_recipe(recipe, remainder="dropped", amax="fresh")


def _plain_weights(weights: Mapping[str, Weight]) -> dict[str, Weight]:
    return {path: dataclasses.replace(weight, recipe=_plain(weight.recipe)) for path, weight in weights.items()}
