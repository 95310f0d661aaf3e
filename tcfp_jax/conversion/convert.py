"""Every way in and out for a model: convert it, see the report, take it back.

The same functions serve models written with this library's own layers, and functions
from `transform`.

Left out: convolutions, and products whose operands are both activations, such as
attention scores. They run as they were written. Nothing here trains or stores a weight:
give `find_weights(model)` to `tcfp_jax.error_feedback`, or make stored parameters with
`tcfp_jax.store`. A model that is a plain function is for `tcfp_jax.transform`.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable
from typing import Any, TypeVar, overload

import jax
from flax import linen as nn
from flax import nnx as flax_nnx

from tcfp_jax import paths
from tcfp_jax.conversion import linen_models, nnx_models, nnx_modules
from tcfp_jax.conversion.linen_models import Conversion
from tcfp_jax.conversion.policy import BY_HAND, Include, Policy, Rules, policy
from tcfp_jax.conversion.report import Examined, Report
from tcfp_jax.conversion.transform import AWAITED, Transformed
from tcfp_jax.layers import linen, nnx
from tcfp_jax.optim.stored import dequantize
from tcfp_jax.paths import Args, Function, PyTree, Tree
from tcfp_jax.recipes import Recipe, TCFPMode
from tcfp_jax.recipes import recipe as named_recipe
from tcfp_jax.recipes.flags import refuses_flags
from tcfp_jax.weights.layout import Weights

_Model = TypeVar("_Model")


@refuses_flags
def convert_to_tcfp(
    model: _Model,
    recipe: Recipe | str | None = None,
    *inputs: PyTree,
    mode: TCFPMode | None = None,
    rules: Rules = None,
    include: Iterable[Include] | Include | None = None,
    strict: bool = False,
    options: Tree | None = None,
    rngs: flax_nnx.Rngs | flax_nnx.RngStream | None = None,
) -> _Model:
    """Return the model with its products of parameters computed by `recipe`.

    Use this for any Linen or NNX model, including ones that you import. Use the layers
    of `tcfp_jax.linen` and `tcfp_jax.nnx` instead to write a model with recipes of its
    own, and `transform` for a model that is a plain function. An NNX model
    changes in place. A Linen model does not change; the result is another model of
    the same class. Parameters keep their names, shapes and values.

    Args:
      model: a `flax.linen.Module` that is not bound, or a `flax.nnx.Module`. A
        converted one is converted anew.
      recipe: a `Recipe`, the name of one, or a `TCFPMode`. None is "tcfp12".
      inputs: sample arguments of the model, arrays or `jax.ShapeDtypeStruct`. With
        them, or with `options`, the model is traced now, so that errors come now and
        `survey(model)` and `find_weights(model)` need no inputs.
      mode: the recipe, as PyTorch TCFP names it, for calls without `inputs`.
      rules: as in `transform`; a path is a parameter's, such as "block_0/mlp/kernel".
      include: as in `transform`; None is "measured" with sample arguments, and "linear"
        without. "measured" weighs each product once, at the rows that the sample
        arguments give it on one device; an argument with a sharding has its share of
        the rows. The choice holds for every call. Pass the arguments of a training
        step.
      strict: as in `transform`; needs sample arguments.
      options: keyword arguments for the call with `inputs`.
      rngs: random bits of an NNX model for recipes that draw some (FP4 training). Each
        converted module gets a fork of the stream "tcfp", as Flax's Dropout does, and
        each of its calls draws another key. None: the model may hold such a stream
        itself. To Linen's `apply` pass `rngs={"tcfp": key}`.

    Raises:
      TypeError: not a Flax module, an argument that the model's call does not have,
        flags of PyTorch TCFP (they go into `Recipe.from_flags`), or `rngs` of another
        type.
      ValueError: both `recipe` and `mode`, a bound model, or `rngs` of a Linen model.
        An unknown recipe or group, or a rule that is not a regex. "measured" without
        sample arguments, or a product that `strict` forbids. Nothing to convert;
        without sample arguments this raises when the model is called. If measured times
        advise against every product, nothing raises, and the model runs unchanged.
        After an error the model is as it was.

    >>> x = jax.numpy.ones((2, 3))
    >>> every = ("linear", "small")
    >>> model = convert_to_tcfp(nn.Dense(4), "tcfp12", x, include=every)
    >>> isinstance(model, nn.Dense)
    True
    """
    if recipe is not None and mode is not None:
        raise ValueError(
            f"recipe={recipe!r:.80} and mode={mode!r}: both say how products are"
            " computed; pass the recipe (or mode) as the second argument, and sample"
            " inputs after it"
        )
    if recipe is None:
        recipe = TCFPMode.TCFP12 if mode is None else mode
    options = dict(options or {})
    sampled = bool(inputs or options)
    if include is None:
        include = "measured" if sampled else "linear"
    chosen = dataclasses.replace(
        policy(recipe, rules, include), devices=_devices_of((inputs, options))
    )
    _check_inputs(inputs)
    if "measured" in chosen.include and not sampled:
        raise ValueError(
            'include="measured" weighs products at the rows that sample inputs give'
            " them; pass sample inputs after the recipe"
        )
    if strict and not sampled:
        raise ValueError(
            "strict=True looks for products in a trace; pass sample inputs after the"
            " recipe"
        )
    sample = (inputs, options) if sampled else None
    if isinstance(model, nn.Module):
        if rngs is not None:
            raise ValueError(
                "rngs= is for NNX models; a Linen model gets them at apply, as"
                ' rngs={"tcfp": key}'
            )
        return _converted_linen(model, chosen, sample, strict=strict)
    if not isinstance(model, flax_nnx.Module):
        raise _not_a_model(model)
    # Without sample inputs, the recipes that rules will choose are unknown.
    draws = rngs is not None or named_recipe(recipe).draws
    held = None
    if sample is not None:
        found = nnx_models.examine(model, chosen, *sample)
        chosen, found = _settled(model, found, chosen, strict=strict)
        records = found.report.converted
        joined = [record.weight_path.split(" + ") for record in records]
        held = list(itertools.chain(*joined))
        draws = any(record.recipe and record.recipe.draws for record in records)
    keys = nnx.stream_of(model, rngs, draws=draws)
    nnx_models.convert(model, chosen, held, sample, keys)
    return model


def _converted_linen(
    model: nn.Module, chosen: Policy, sample: nnx_models.Sample | None, *, strict: bool
) -> Any:
    if model.scope is not None:
        raise ValueError(
            f"{type(model).__name__} is bound to variables; convert it before bind, or"
            " unbind it"
        )
    base = linen_models.plain(model)
    found = shapes = None
    if sample is not None:
        found, shapes = linen_models.examine(base, chosen, *sample)
        chosen, found = _settled(model, found, chosen, strict=strict)
    return linen_models.converted(base, Conversion(type(base), chosen, found, shapes))


def survey(model: object, *inputs: PyTree, options: Tree | None = None) -> Report:
    """Return the report of every product of a parameter, and of these parameters.

    Use this when you want to know which layers were converted, to which recipe, and why
    others did not change. A line for each parameter says whether it stays float, and
    which code reads it. `diagnose` answers before a conversion.

    Args:
      model: from `convert_to_tcfp` or `transform`, or a model written with this
        library's layers.
      inputs: sample arguments, traced and never computed (all of a function's). Without
        any, the conversion's own.
      options: keyword arguments for the call with `inputs`.

    Raises:
      TypeError: neither a Flax module nor from `transform`.
      ValueError: nothing in the model is low-precision, or there are no inputs, neither
        now nor at conversion.

    >>> x = jax.numpy.ones((2, 3))
    >>> every = ("linear", "small")
    >>> model = convert_to_tcfp(nn.Dense(4), "tcfp12", x, include=every)
    >>> print(survey(model))  # doctest: +NORMALIZE_WHITESPACE
    1 products converted, 0 skipped
    kernel                        [3, 4]               ca,ab->cb                tcfp12
    kernel                        stored
    """
    return _examined(model, inputs, options, "survey")[0].report


def find_weights(
    model: object, *inputs: PyTree, options: Tree | None = None
) -> Weights:
    """Return the weights of a converted model by parameter path.

    Use this for `tcfp_jax.error_feedback`, which keeps them in the optimizer's state,
    and for `quantize_params`. Without it each product quantizes its weight at each use.

    Each weight has its own recipe, and the axes that its first converted product
    contracts; layers of a loop are a stack. A product that reads the weight in another
    form quantizes it at each use, and `survey` says so. An NNX model of which only
    parts were converted has the weights of its parts.

    `inputs` and `options` are as in `survey`. The result also knows why other converted
    parameters stay float; `tcfp_jax.store` says it.

    Raises:
      TypeError: neither a Flax module nor from `transform`.
      ValueError: nothing in the model is low-precision, no inputs, or layers by hand
        next to converted parts.

    >>> x = jax.numpy.ones((2, 3))
    >>> every = ("linear", "small")
    >>> model = convert_to_tcfp(nn.Dense(4), "tcfp12", x, include=every)
    >>> find_weights(model)["kernel"].layout
    Layout(inputs=(0,), outputs=(1,), stack=())
    """
    if isinstance(model, flax_nnx.Module) and not inputs and not options:
        parts = nnx_modules.converted_parts(model)
        if parts and "" not in parts:
            return _weights_of_parts(model, parts)
    found, _ = _examined(model, inputs, options, "find_weights")
    if not found.weights:
        return found.weights
    conversion: object = linen_models.conversion_of(model)
    if isinstance(model, flax_nnx.Module):
        conversion = nnx_modules.conversion_of(model)
    if conversion is not None:
        AWAITED.add(conversion)
    return found.weights


def _weights_of_parts(
    model: flax_nnx.Module, parts: dict[str, flax_nnx.Module]
) -> Weights:
    for path in _own_layers(model):
        if not any(nnx_modules.is_below(path, part) for part in parts):
            raise ValueError(
                f"{path!r} is a low-precision layer outside of the converted"
                f" {sorted(parts)}; convert the whole {type(model).__name__} instead of"
                " parts of it"
            )
    weights = Weights()
    floats = {}
    for path, part in parts.items():
        own = find_weights(part)
        for name, weight in own.items():
            weights[paths.join(path, name)] = weight
        for name, why in own.floats.items():
            floats[paths.join(path, name)] = why
    weights.floats = floats
    return weights


def detach(model: flax_nnx.Module) -> None:
    """Let an NNX model quantize its own parameters at each use.

    Use this to evaluate other parameters than the optimizer's, such as averages. The
    optimizer's quantized weights fit only the parameters that it has just updated. Call
    it for a copy, `detach(copy := nnx.clone(model))`, and give the copy its parameters
    by `nnx.update`.

    Raises:
      ValueError: the model holds no quantized weights, or no float parameters.

    >>> from tcfp_jax.optim.feedback import error_feedback, layer_state
    >>> model = nnx.TCFPLinear(4, 4, rngs=flax_nnx.Rngs(0))
    >>> params = flax_nnx.state(model, flax_nnx.Param)
    >>> hand_out(model, layer_state(error_feedback("tcfp12").init(params)))
    1
    >>> detach(model)
    >>> nnx.stored_weight(model) is None
    True
    """
    if nnx_modules.absent_of(model):
        raise ValueError(
            "the model holds quantized kernels only; load the float parameters into a"
            " new model"
        )
    held = [layer for layer in _own_layers(model).values() if layer.stored is not None]
    for layer in held:
        layer.stored = flax_nnx.data(None)
    if not nnx_models.forget(model) + len(held):
        raise ValueError(
            f"{type(model).__name__} holds no stored weight; there is nothing to undo"
        )


@overload
def export(model: Transformed) -> Function: ...
@overload
def export(model: _Model) -> _Model: ...
def export(model: Any) -> Any:
    """Return the original model or function, with its current parameters.

    Use this to save or hand on a model without this library. An NNX model changes in
    place, and its stored parameters become float. Use `to_bf16` instead to switch
    layers off for a while.

    Raises:
      TypeError: neither a Flax module nor from `transform`.
      ValueError: nothing in the model was converted, or its float kernels are gone
        (`load_quantized`).

    >>> type(export(convert_to_tcfp(nn.Dense(4), "tcfp12"))) is nn.Dense
    True
    """
    if isinstance(model, Transformed):
        return model.function
    if isinstance(model, nn.Module):
        return _exported_linen(model)
    if not isinstance(model, flax_nnx.Module):
        raise _not_a_model(model)
    if nnx_modules.absent_of(model):
        raise ValueError(
            "the model holds quantized kernels only; export a model with the float"
            " parameters"
        )
    modules = nnx_modules.modules_of(model).values()
    by_hand = [module for module in modules if isinstance(module, nnx.OWN)]
    if not nnx_modules.strip(model) + len(by_hand):
        raise ValueError(f"{type(model).__name__} has no low-precision layer to export")
    flax_nnx.update(model, dequantize(flax_nnx.state(model, flax_nnx.Param)))
    for layer in by_hand:
        kinds = type(layer).__mro__
        base = next(kind for kind in kinds if kind.__module__.startswith("flax."))
        for name in {"recipe", "products", "stored", "keys"} & set(vars(layer)):
            delattr(layer, name)
        object.__setattr__(layer, "__class__", base)
    return model


def _exported_linen(model: nn.Module) -> nn.Module:
    own = linen.OWN.get(type(model))
    if own is not None:
        return linen_models.plain(model, own)
    conversion = linen_models.conversion_of(model)
    if conversion is None or conversion.policy.recipe is None:
        raise ValueError(
            f"{type(model).__name__} was not converted; if it has low-precision layers,"
            " write Flax's own instead (the parameters fit unchanged), or run Flax's"
            ' code in them by to_bf16(model, "")'
        )
    return linen_models.plain(model)


def _settled(
    model: object, found: Examined, chosen: Policy, *, strict: bool
) -> tuple[Policy, Examined]:
    """Return the policy with its choices by measured times settled, and its decisions.

    Raises:
      ValueError: nothing is converted, or a product that `strict` forbids.
    """
    chosen = chosen.settle(record.product for record in found.judged)
    found = found.by(chosen)
    found.check_converted(type(model).__name__)
    if strict:
        found.report.check_strict()
    return chosen, found


def _examined(
    model: object,
    inputs: Args,
    options: Tree | None,
    asked: str,
) -> tuple[Examined, Policy]:
    """Return the decisions about a call of a model, and the policy of the model."""
    _check_inputs(inputs)
    sample: nnx_models.Sample = (inputs, dict(options or {}))
    sampled = any(sample)
    if isinstance(model, Transformed):
        return model.examine(*inputs, **sample[1]), model.policy
    found: Examined | None = None
    if isinstance(model, flax_nnx.Module):
        chosen = nnx_modules.conversion_of(model) or BY_HAND
        known = nnx_models.sample_of(model)
        if known is not None and not sampled:
            sample = known
            sampled = True
        if not sampled and chosen is BY_HAND and not _own_layers(model):
            raise _not_converted(model)
        if sampled:
            found = nnx_models.examine(model, chosen, *sample)
    else:
        base, conversion = linen_conversion(model)
        chosen = conversion.policy
        found = conversion.found
        if sampled:
            found, _ = linen_models.examine(base, chosen, *sample)
    if found is None:
        raise ValueError(
            f"{asked} needs sample inputs: {asked}(model, *inputs), or pass them to"
            " convert_to_tcfp"
        )
    if chosen.recipe is None and not found.report.converted and not found.weights:
        raise _not_converted(model)
    return found, chosen


def linen_conversion(model: object) -> tuple[nn.Module, Conversion]:
    """Return the unconverted model, and its conversion.

    A model that is not converted may have layers of ours.
    """
    if not isinstance(model, nn.Module):
        raise _not_a_model(model)
    by_hand = Conversion(type(model), BY_HAND)
    return linen_models.plain(model), linen_models.conversion_of(model) or by_hand


def hand_out(model: flax_nnx.Module, weights: Tree) -> int:
    """Give stored weights to the layers of an NNX model; return how many were taken.

    They go to layers written by hand and to converted modules.
    """
    rest = dict(weights)
    for path, layer in _own_layers(model).items():
        name = "embedding" if isinstance(layer, nnx.TCFPEmbed) else "kernel"
        weight = rest.pop(paths.join(path, name), None)
        if weight is not None:
            nnx.store(layer, weight)
    taken = len(weights) - len(rest)
    for path, part in nnx_modules.converted_parts(model).items():
        own = {}
        for name, weight in rest.items():
            if nnx_modules.is_below(name, path):
                own[name.removeprefix(path).lstrip("/")] = weight
        taken += nnx_models.store(part, own)
    return taken


def _own_layers(model: flax_nnx.Module) -> dict[str, Any]:
    own = {}
    for path, module in nnx_modules.modules_of(model).items():
        if isinstance(module, nnx.MULTIPLYING):
            own[path] = module
    return own


def _devices_of(tree: PyTree) -> int:
    """Return the largest number of shards of any array in the tree.

    An array without a sharding counts as one.
    """
    devices = 1
    for leaf in jax.tree.leaves(tree):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, jax.sharding.Sharding):
            shard = math.prod(sharding.shard_shape(leaf.shape))
            devices = max(devices, math.prod(leaf.shape) // max(1, shard))
    return devices


def _check_inputs(inputs: Args) -> None:
    for value in jax.tree.leaves(inputs):
        if isinstance(value, str):
            raise TypeError(
                f"the input {value[:40]!r} is a string; pass arrays, such as the tokens"
                " that it stands for"
            )


def _not_converted(model: object) -> ValueError:
    """Return the error of a question about a model that is not converted."""
    repair = "use convert_to_tcfp(model, recipe)"
    if isinstance(model, flax_nnx.Module):
        parts = nnx_modules.converted_parts(model)
        if parts:
            repair = f"ask for one of its converted parts: {sorted(parts)}"
    return ValueError(f"{type(model).__name__} is not converted; {repair}")


def _not_a_model(model: object) -> TypeError:
    """Return the error of an object that is not a Flax module."""
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    repair = "pass the model itself"
    if isinstance(getattr(model, "module", None), nn.Module):
        repair = "pass its .module, which is one"
    elif callable(model) or hasattr(model, "apply"):
        repair = (
            "for any other function of parameters and inputs use tcfp_jax.transform(fn,"
            " recipe)"
        )
    return TypeError(
        f"the model is a {kind}, which is neither a flax.linen.Module nor a"
        f" flax.nnx.Module; {repair}"
    )
