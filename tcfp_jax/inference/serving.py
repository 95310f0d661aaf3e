"""Weights for inference, without their float kernels; `tcfp_jax.inference` shows their
use.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
from flax import linen as nn
from flax import nnx as flax_nnx

from pallas_kernels.operands import Fp4, Operand
from tcfp_jax import paths
from tcfp_jax.conversion import nnx_modules
from tcfp_jax.conversion.convert import hand_out
from tcfp_jax.inference.checks import check_operand, check_scales
from tcfp_jax.inference.shared_scales import check_rule, store_together
from tcfp_jax.layers import Absent
from tcfp_jax.optim.feedback import error_feedback, layer_state
from tcfp_jax.paths import PyTree
from tcfp_jax.recipes import Recipe
from tcfp_jax.recipes import recipe as named_recipe
from tcfp_jax.weights.layout import Layout, Weight
from tcfp_jax.weights.parameter import is_quantized
from tcfp_jax.weights.stored import Stored
from tcfp_jax.weights.tcfp12 import PackedTCFP12, quantize_tcfp12


def quantize_params(
    params: PyTree,
    recipe: Recipe | str | Mapping[str, Weight],
    *,
    storage: Literal["recipe", "packed"] = "recipe",
    fused: Sequence[Sequence[str]] = (),
) -> dict[str, PyTree]:
    """Return the variables of a model with quantized kernels:
    `{"params": ..., "tcfp": ...}`.

    Every stored weight leaves `params`, whatever its name, except a table in which rows
    are looked up (`Weight.float_reads`). Everything else stays, and a layer that loses
    all its parameters keeps an empty dict. A converted Linen model, or a layer of
    `tcfp_jax.linen`, applies the result like float variables; a converted NNX model
    takes it by `load_quantized`. Orbax saves it. A stochastic residual is rounded to
    nearest here.

    Args:
      params: the parameters, nested dicts of arrays or an `nnx.State`, which may hold
        other state as well (`nnx.state(model, (nnx.Param, nnx.BatchStat))`); in the
        result, dicts by name.
      recipe: the recipe of the model, which takes every `kernel`; or
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
    >>> variables = quantize_params({"kernel": jnp.ones((32, 4)), "bias": jnp.zeros(4)}, "tensorwise")
    >>> sorted(variables["params"]), type(variables["tcfp"]["kernel"]).__name__
    (['bias'], 'Stored')
    """
    if storage not in ("recipe", "packed"):
        raise ValueError(f'storage={storage!r} is unknown; use "recipe" or "packed"')
    _check_recipe(recipe)
    if not isinstance(fused, Sequence) or any(
        isinstance(g, str) or not isinstance(g, Sequence) for g in fused
    ):
        raise ValueError(
            f'fused={fused!r} is not a sequence of groups of names; use [("query",'
            ' "key", "value")]'
        )
    chosen: Recipe | dict[str, Weight]
    if isinstance(recipe, Mapping):
        chosen = {
            path: dataclasses.replace(weight, recipe=_plain(weight.recipe))
            for path, weight in recipe.items()
        }
        looked_up = {
            path for path, weight in recipe.items() if weight.float_reads == "lookup"
        }
    else:
        chosen, looked_up = _plain(named_recipe(recipe)), set()
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
    quantized = layer_state(jax.eval_shape(error_feedback(chosen).init, params))
    if not quantized:
        raise ValueError(_nothing_stored(recipe))
    fp4 = {
        path: one.scaling
        for path, one in paths.entries(quantized).items()
        if isinstance(one.scaling, Fp4)
    }
    if storage == "packed" and fp4:
        first, scaling = next(iter(fp4.items()))
        raise ValueError(
            'storage="packed" is the format of 12.5 bits a value, but the recipe'
            f' stores {first} in four by {scaling}; use storage="recipe", which is'
            " smaller, or a recipe of FP8"
        )
    if storage == "recipe":
        quantized = layer_state(jax.jit(error_feedback(chosen).init)(params))
    if fused:
        shared = (
            chosen
            if isinstance(chosen, dict)
            else dict.fromkeys(fp4, Weight(chosen, Layout((0,), (1,))))
        )
        for path, one in store_together(
            fp4, paths.leaves(params), shared, fused
        ).items():
            paths.put(quantized, path.split("/"), one)
    rest: dict[str, PyTree] = {}
    for own, leaf in paths.named_leaves(params)[0]:
        # A name may be a path itself, as in Haiku's modules: parameters keep it, the
        # state is nested by it.
        names = paths.join(*own).split("/")
        node = paths.find(quantized, names)
        if node is None or paths.join(*names) in looked_up:
            paths.put(rest, own, leaf)
        elif own[:-1] and paths.find(rest, own[:-1]) is None:
            paths.put(rest, own[:-1], {})  # Flax finds a layer by its parameters
        if node is not None:
            # No float parameter remains with which the sample could be compared.
            served = (
                jax.jit(quantize_tcfp12)(leaf)
                if storage == "packed"
                else dataclasses.replace(node, sample=None)
            )
            paths.put(quantized, names, served)
    return {"params": rest, "tcfp": quantized}


def choose_codes(
    served: Mapping[str, PyTree],
    params: PyTree,
    weights: Mapping[str, Weight],
    choose: Callable[[str, jax.Array], Operand],
    *,
    fused: Sequence[Sequence[str]] = (),
) -> dict[str, PyTree]:
    """Return variables of `quantize_params` in which your function has chosen the codes
    of every FP4 weight.

    Products read these codes and scales like any others.

    Args:
      served: from `quantize_params(params, weights)`.
      params: the float parameters, nested dicts.
      weights: from `find_weights`.
      choose: takes a path and a float32 matrix, or stack of matrices, `[..., n, k]`,
        such as `lambda path, w: gptq(w, moments[path], Fp4(rule="four_over_six"))`. The
        result has the format and tile of the recipe. It keeps its own rule, because
        products follow the rule of the codes; but FP8 products of a recipe with the
        rule "fold_exact" rely on it, so there the result must have it, too.
      fused: as in `quantize_params`; the rows of a group are chosen as one matrix, by
        the path of the first.

    Raises:
      ValueError: no weight is FP4, one has an odd k, a group is not there, or a chosen
        operand does not fit: its shape, its format, a rule other than the recipe's
        "fold_exact", or scales that break that rule.

    >>> import jax.numpy as jnp
    >>> from tcfp_jax.inference import quantize_params, search_scales
    >>> from tcfp_jax.recipes import recipe
    >>> from tcfp_jax.weights.layout import Layout
    >>> params, weights = {"w": jnp.ones((32, 4))}, {"w": Weight(recipe("nvfp4"), Layout((0,), (1,)))}
    >>> served = quantize_params(params, weights)
    >>> chosen = choose_codes(served, params, weights, lambda path, w: search_scales(w))
    >>> chosen["tcfp"]["w"].shape
    (32, 4)
    """
    stored = paths.entries(_part(served, "tcfp"))
    packed = {
        path: one
        for path, one in stored.items()
        if isinstance(one, Stored) and isinstance(one.scaling, Fp4)
    }
    if not packed:
        raise ValueError(
            "no stored weight is FP4; make some by quantize_params(params, weights)"
            ' with recipe("nvfp4")'
        )
    chosen: dict[str, PyTree] = {}
    for path, one in (
        stored | store_together(packed, paths.leaves(params), weights, fused, choose)
    ).items():
        paths.put(chosen, path.split("/"), one)
    return {**served, "tcfp": chosen}


def _nothing_stored(recipe: Recipe | str | Mapping[str, Weight]) -> str:
    """Return the message for a recipe, or for weights, of which none is stored."""
    if isinstance(recipe, Mapping) and not recipe:
        return (
            "the mapping of weights is empty: the model was converted by a recipe that"
            ' stores none, such as "bf16" or one of FP4 training, or not at all;'
            ' convert it by a recipe to serve with, such as "tensorwise" or "nvfp4"'
        )
    recipes = (
        [one.recipe for one in recipe.values()]
        if isinstance(recipe, Mapping)
        else [named_recipe(recipe)]
    )
    training = next((one.fp4 for one in recipes if one.fp4 is not None), None)
    if training is not None:
        return (
            f"the recipe trains with {training}, which quantizes float weights anew at"
            ' each product and stores none; serve with recipe("nvfp4"), for the model'
            " and here: the numbers that were multiplied forward are those of"
            ' recipe("nvfp4", tile="square", rule="amax")'
        )
    return (
        "the recipe keeps weights in BF16, so there is nothing to quantize; use"
        ' recipe("tcfp12")'
    )


def unpack(
    variables: Mapping[str, PyTree], recipe: Recipe | str | Mapping[str, Weight]
) -> dict[str, PyTree]:
    """Turn variables of `storage="packed"` into `storage="recipe"`, once after loading
    instead of at every use.

    Products have the same bits either way. Memory grows from 12.5 bits per value to 8
    or 16 per copy.

    Args:
      variables: from `quantize_params(..., storage="packed")`.
      recipe: the argument of `quantize_params`.

    Raises:
      ValueError: nothing in `variables` is packed.

    >>> import jax.numpy as jnp
    >>> served = quantize_params({"kernel": jnp.ones((32, 4))}, "tensorwise", storage="packed")
    >>> type(unpack(served, "tensorwise")["tcfp"]["kernel"]).__name__
    'Stored'
    """
    packed = lambda node: isinstance(node, PackedTCFP12)
    if not any(map(packed, jax.tree.leaves(_part(variables, "tcfp"), is_leaf=packed))):
        raise ValueError(
            'nothing is packed here; layers read storage="recipe" directly'
        )
    floats = jax.jit(
        lambda tree: jax.tree.map(lambda leaf: leaf.dequantize(), tree, is_leaf=packed)
    )
    return {
        **variables,
        "tcfp": quantize_params(floats(variables["tcfp"]), recipe)["tcfp"],
    }


def restored(
    variables: Mapping[str, PyTree], recipe: Recipe | str | Mapping[str, Weight]
) -> dict[str, PyTree]:
    """Return variables of `quantize_params` from the plain dicts that a checkpointer
    loads without a template.

    Orbax then makes dicts of stored weights. The recipe says which values share a
    scale, and the rule of FP4's scales.

    Args:
      variables: `{"params": ..., "tcfp": ...}`, nested dicts.
      recipe: the argument of `quantize_params`.

    Raises:
      ValueError: the variables are not such dicts, the recipe does not name a weight,
        weights are packed (a dict does not hold their length), arrays do not fit each
        other, scales have another scaling than the recipe, have values that no
        quantizer makes, or break its rule "fold_exact".

    >>> import jax.numpy as jnp
    >>> served = quantize_params({"kernel": jnp.ones((32, 4))}, "tensorwise")
    >>> one = served["tcfp"]["kernel"].forward
    >>> plain = {"kernel": {"forward": {"values": one.values, "scale": one.scale}, "backward": None}}
    >>> restored({"params": {}, "tcfp": plain}, "tensorwise")["tcfp"]["kernel"].shape
    (32, 4)
    """
    _check_recipe(recipe)
    is_weight = lambda node: (
        not isinstance(node, Mapping)
        or any(str(name).startswith(("forward", "backward", "codes")) for name in node)
    )
    found: dict[str, PyTree] = {}
    for path, node in paths.leaves(_part(variables, "tcfp"), is_weight).items():
        paths.put(
            found,
            path.split("/"),
            _stored_of(path, node, recipe) if isinstance(node, Mapping) else node,
        )
    return {**variables, "tcfp": found}


def _part(variables: Mapping[str, PyTree], name: str) -> PyTree:
    """Return the parameters or the stored weights of variables of `quantize_params`."""
    if not isinstance(variables, Mapping) or not isinstance(
        variables.get(name), Mapping
    ):
        raise ValueError(
            f'the variables have no dict "{name}"; pass the result of quantize_params,'
            ' {"params", "tcfp"}'
        )
    return variables[name]


def _check_recipe(recipe: object) -> None:
    """Raise a ValueError unless this is a recipe, a name, or a mapping from
    `find_weights`.
    """
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


def _stored_of(
    path: str, node: Mapping[str, Any], recipe: Recipe | str | Mapping[str, Weight]
) -> Stored:
    """Return a stored weight from the dict that a checkpointer made of it."""
    if "codes" in node:
        raise ValueError(
            f"{path} is packed, and its length is not in the checkpoint; restore it"
            " with a template: checkpointer.restore(path, jax.eval_shape(lambda:"
            " quantize_params(params, recipe, storage='packed')))"
        )
    if isinstance(recipe, Mapping) and path not in recipe:
        raise ValueError(
            f"{path} is stored, but the weights given have only {sorted(recipe)[:8]};"
            " pass find_weights"
        )
    scaling = (
        recipe[path].recipe if isinstance(recipe, Mapping) else named_recipe(recipe)
    ).scaling
    repair = "pass the recipe that the weights were quantized by"

    def operand(side: str) -> Operand | None:
        # A format other than E4M3 is part of the name, see `Stored`.
        entry: Any = next(
            (
                node[name]
                for name in node
                if str(name).startswith(side) and node[name] is not None
            ),
            {},
        )
        if isinstance(entry, Mapping) and not entry:
            return None
        arrays = {"values", "scale", "lo", "lo_scale", "outer"}
        found = (
            {k: v for k, v in entry.items() if v is not None}
            if isinstance(entry, Mapping)
            else {}
        )
        whole = {"values", "scale"} <= set(found) <= arrays and all(
            hasattr(part, "dtype") for part in found.values()
        )
        if not whole or len(found["values"].shape) < 2:
            has = sorted(map(str, found)) or type(entry).__name__
            raise ValueError(
                f"{path} has {has} as {side}, which is no stored weight; restore the"
                " whole file again"
            )
        made = Operand(**found, scaling=scaling)
        check_operand(path, made, repair)
        check_rule(path, made, repair)
        return made

    forward, backward = operand("forward"), operand("backward")
    if forward is None and backward is None:
        raise ValueError(
            f"{path} has neither the operand forward nor backward; restore the whole"
            " file"
        )
    return Stored(forward, backward)


def load_quantized(model: flax_nnx.Module, variables: Mapping[str, PyTree]) -> None:
    """Put inference weights into a converted NNX model, in place, and free its float
    kernels.

    The model may hold no arrays at all (`nnx.eval_shape(lambda: Model(rngs))`, then
    `convert_to_tcfp`). Each float kernel is replaced by its shape: `export` raises, and
    code that reads the kernel reads the stored weight.

    Args:
      model: converted by the recipe and rules of the weights.
      variables: from `quantize_params` or `unpack`.

    Raises:
      TypeError: the model is not an NNX model; a Linen model applies `variables`
        itself.
      ValueError: the layer of a weight is not low-precision here, the variables or the
        model lack a parameter, or scales have values that no quantizer makes.

    >>> from tcfp_jax.nnx import TCFPLinear
    >>> model = TCFPLinear(4, 2, rngs=flax_nnx.Rngs(0))
    >>> load_quantized(model, quantize_params(flax_nnx.state(model, flax_nnx.Param), "tcfp12"))
    >>> model.kernel
    Absent(shape=(4, 2), dtype=dtype('float32'))
    """
    if not isinstance(model, flax_nnx.Module):
        kind = (
            "; a Linen model applies the variables itself"
            if isinstance(model, nn.Module)
            else ""
        )
        raise TypeError(f"{type(model).__name__} is not a flax.nnx.Module{kind}")
    stored, params = (
        paths.entries(_part(variables, name)) for name in ("tcfp", "params")
    )
    if not all(isinstance(weight, Stored | PackedTCFP12) for weight in stored.values()):
        raise ValueError(
            "the weights are the plain dicts of a checkpoint that was loaded without a"
            " template; pass restored(variables, find_weights(model))"
        )
    for path, weight in stored.items():
        for one in (
            (weight.forward, weight.backward) if isinstance(weight, Stored) else ()
        ):
            if one is not None:
                check_scales(path, one)
    nodes = dict(flax_nnx.iter_graph(model))
    held = {
        "/".join(map(str, path)): node
        for path, node in nodes.items()
        if isinstance(node, flax_nnx.Variable)
    }
    absent = nnx_modules.absent_of(model)  # kernels that an earlier call replaced
    kinds = {
        path for path, node in held.items() if isinstance(node, flax_nnx.Param)
    } | set(absent)
    if set(stored) - kinds:
        raise ValueError(
            f"no parameter of the model is {min(set(stored) - kinds)}; convert the"
            " model by the recipe and rules of the weights"
        )
    # An attribute may be an array without a variable, such as a table of rotations. It
    # is a part of the state as well.
    arrays: dict[str, tuple[Any, ...]] = {
        "/".join(map(str, path)): path
        for path, node in nodes.items()
        if hasattr(node, "dtype") and not isinstance(node, flax_nnx.Variable | Absent)
    }
    wrong = (kinds - set(stored)) - set(params) or set(params) - set(held) - set(arrays)
    if wrong:
        has, lacks = (
            ("model", "variables") if min(wrong) in kinds else ("variables", "model")
        )
        raise ValueError(
            f"the {has} has {min(wrong)}, which the {lacks} lacks; pass the weights of"
            " this very model"
        )
    empty = [
        p
        for p in set(held) - kinds - set(params)
        if isinstance(held[p].get_raw_value(), jax.ShapeDtypeStruct)
    ]
    streams = [path for path in empty if isinstance(held[path], flax_nnx.RngState)]
    if set(empty) - set(streams):
        raise ValueError(
            f"the model has no value for {min(set(empty) - set(streams))}; quantize"
            " nnx.state(model), which holds all variables, instead of nnx.state(model,"
            " nnx.Param)"
        )
    own: dict[str, Any] = {
        path: variable.get_raw_value() for path, variable in held.items()
    }
    own |= {path: kernel for path, (kernel, _) in absent.items()}
    _check_sizes({**stored, **params}, own)
    if hand_out(model, stored) < len(stored):
        raise ValueError(
            "a stored weight has no low-precision layer here; convert the model by the"
            " recipe and rules of the weights"
        )
    for path in set(stored) - set(params) - set(absent):
        kernel = flax_nnx.static(
            Absent(tuple(held[path].shape), np.dtype(held[path].dtype))
        )
        # Layers may share a parameter, so it is replaced wherever it is
        for owner in nodes.values():
            entries = (
                owner
                if isinstance(owner, dict)
                else vars(owner)
                if isinstance(owner, flax_nnx.Pytree)
                else {}
            )
            for name in [
                name for name, value in entries.items() if value is held[path]
            ]:
                nnx_modules.put(owner, name, kernel)
    # Dropout is off in inference; a stream that is used draws from a fixed key
    for path in streams:
        fixed = (
            jax.random.key(0)
            if isinstance(held[path], flax_nnx.RngKey)
            else jax.numpy.uint32(0)
        )
        held[path].set_raw_value(fixed)
    for path, value in params.items():
        if path in held:
            held[path].set_raw_value(value)
        else:
            *above, name = arrays[path]
            nnx_modules.put(nodes[tuple(above)], name, flax_nnx.data(value))


def _check_sizes(given: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise a ValueError if a weight or parameter is not of the size that the model has
    at its path.
    """
    for path in given.keys() & own.keys():
        size, wanted = (
            math.prod(getattr(tree[path], "shape", (-1,))) for tree in (given, own)
        )
        # a zero code may follow an odd k
        odd = isinstance(getattr(given[path], "scaling", None), Fp4)
        if size != wanted >= 0 and not (odd and wanted < size <= 2 * wanted):
            has = getattr(given[path], "shape", type(given[path]).__name__)
            raise ValueError(
                f"{path} is {has}, in the model {own[path].shape}; pass the weights of"
                " this very model"
            )


def _plain(recipe: Recipe) -> Recipe:
    """Return the recipe without the fields that only training needs."""
    return (
        recipe
        if recipe.stored is None
        else named_recipe(recipe, remainder="dropped", amax="fresh")
    )
