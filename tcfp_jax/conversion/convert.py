"""Every way in and out for a model: convert it, see the report, switch layers off and
on, take it back.

The same functions serve models written with this library's own layers, and functions
from `transform`.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeVar, overload

import jax
from flax import linen as nn
from flax import nnx as flax_nnx

from tcfp_jax import paths
from tcfp_jax.conversion import linen_models, nnx_models
from tcfp_jax.conversion.linen_models import Conversion
from tcfp_jax.conversion.policy import BY_HAND, Include, Policy, Rules, finds, policy
from tcfp_jax.conversion.report import Examined, Report
from tcfp_jax.conversion.transform import Transformed
from tcfp_jax.layers import linen, nnx
from tcfp_jax.paths import PyTree
from tcfp_jax.recipes import Recipe
from tcfp_jax.recipes import recipe as named_recipe
from tcfp_jax.weights.layout import Weight

_Model = TypeVar("_Model")


def convert_to_tcfp(
    model: _Model,
    recipe: Recipe | str,
    *inputs: PyTree,
    rules: Rules = None,
    include: Iterable[Include] | Include | None = None,
    strict: bool = False,
    options: Mapping[str, PyTree] | None = None,
    rngs: flax_nnx.Rngs | flax_nnx.RngStream | None = None,
) -> _Model:
    """Return the model with every product of a parameter and an input computed by
    `recipe`.

    It converts any Linen or NNX model, including ones that you import. An NNX model
    changes in place. A Linen model stays as it is, and the result is another model of
    the same class. Parameters keep their names, shapes and values.

    Args:
      model: a `flax.linen.Module` that is not bound, or a `flax.nnx.Module`. A
        converted one is converted anew.
      recipe: a `Recipe` or the name of one.
      inputs: sample arguments of the model, arrays or `jax.ShapeDtypeStruct`. With
        them, or with `options`, the model is traced now, so that errors come now and
        `survey(model)` and `find_weights(model)` need no inputs.
      rules: as in `transform`; a path is a parameter's, such as "block_0/mlp/kernel".
      include: as in `transform`; None is "measured" with sample arguments, and "linear"
        without. "measured" weighs each product once, at the rows that the sample
        arguments give it on one device (an argument with a sharding has its share of
        the rows), and the choice holds for every call. Pass the arguments of a training
        step.
      strict: as in `transform`; needs sample arguments.
      options: keyword arguments for the call with `inputs`.
      rngs: random bits of an NNX model for recipes that draw some (FP4 training): each
        converted module gets a fork of the stream "tcfp", as Flax's Dropout does, and
        each of its calls draws another key. None: the model may hold such a stream
        itself. To Linen's `apply` pass `rngs={"tcfp": key}`.

    Raises:
      TypeError: not a Flax module, an argument that the model's call does not have, or
        `rngs` of another type.
      ValueError: a bound model, `rngs` of a Linen model, an unknown recipe or group, a
        rule that is not a regex, "measured" without sample arguments, nothing to
        convert (without sample arguments: when the model is called; if measured times
        advise against it, it runs unchanged), or a product that `strict` forbids. Then
        nothing changes.

    >>> model = convert_to_tcfp(nn.Dense(4), "tcfp12", jax.numpy.ones((2, 3)), include=("linear", "small"))
    >>> isinstance(model, nn.Dense)
    True
    """
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
    name, found = type(model).__name__, None
    if isinstance(model, nn.Module):
        if model.scope is not None:
            raise ValueError(
                f"{name} is bound to variables; convert it before bind, or unbind it"
            )
        if rngs is not None:
            raise ValueError(
                "rngs= is for NNX models; a Linen model gets them at apply, as"
                ' rngs={"tcfp": key}'
            )
        base, shapes = linen_models.plain(model), None
        if sampled:
            found, shapes = linen_models.examine(base, chosen, inputs, options)
            chosen, found = _settled(name, found, chosen, strict=strict)
        return linen_models.converted(
            base, Conversion(type(base), chosen, found, shapes)
        )
    if isinstance(model, flax_nnx.Module):
        sample = held = None
        # Without sample inputs, the recipes that rules will choose are unknown.
        draws = rngs is not None or named_recipe(recipe).draws
        if sampled:
            found, sample = (
                nnx_models.examine(model, chosen, inputs, options),
                (inputs, options),
            )
            chosen, found = _settled(name, found, chosen, strict=strict)
            held = [record.weight_path for record in found.report.converted]
            draws = any(
                record.recipe is not None and record.recipe.draws
                for record in found.report.converted
            )
        nnx_models.convert(
            model, chosen, held, sample, nnx.stream_of(model, rngs, draws=draws)
        )
        return model
    raise _not_a_model(model)


def survey(
    model: object, *inputs: PyTree, options: Mapping[str, PyTree] | None = None
) -> Report:
    """Return the report of every product of a parameter: its recipe, or the reason why
    it was left alone.

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

    >>> model = convert_to_tcfp(nn.Dense(4), "tcfp12", jax.numpy.ones((2, 3)), include=("linear", "small"))
    >>> print(survey(model))
    1 products converted, 0 skipped
    kernel                                   [3, 4]               ca,ab->cb                tcfp12
    """
    return _examined(model, inputs, options, "survey")[0].report


def find_weights(
    model: object, *inputs: PyTree, options: Mapping[str, PyTree] | None = None
) -> dict[str, Weight]:
    """Return the weights of a converted model by parameter path, for
    `tcfp_jax.error_feedback` and `quantize_params`.

    Each weight has its own recipe, and the axes that its first converted product
    contracts; layers of a loop are a stack. A product that reads the weight in another
    form quantizes it at each use, and `survey` says so.

    `inputs` and `options` are as in `survey`.

    Raises:
      TypeError: neither a Flax module nor from `transform`.
      ValueError: nothing in the model is low-precision, or no inputs.

    >>> model = convert_to_tcfp(nn.Dense(4), "tcfp12", jax.numpy.ones((2, 3)), include=("linear", "small"))
    >>> find_weights(model)["kernel"].layout
    Layout(inputs=(0,), outputs=(1,), stack=())
    """
    found, chosen = _examined(model, inputs, options, "find_weights")
    if (
        found.weights
        and isinstance(model, flax_nnx.Module)
        and nnx_models.conversion_of(model) is not None
    ):
        nnx_models.AWAITED.add(chosen)
    if found.weights and (conversion := linen_models.conversion_of(model)) is not None:
        conversion.awaited = True
    return found.weights


def detach(model: flax_nnx.Module) -> None:
    """Let an NNX model quantize its own parameters at each use, instead of reading an
    optimizer's quantized weights.

    Those fit the parameters that the optimizer has just updated. To evaluate others,
    such as averages, call it for a copy: `detach(copy := nnx.clone(model))`, and give
    the copy its parameters by `nnx.update`.

    Raises:
      ValueError: the model holds no quantized weights, or no float parameters.

    >>> from tcfp_jax.optim.feedback import error_feedback, layer_state
    >>> model = nnx.TCFPLinear(4, 4, rngs=flax_nnx.Rngs(0))
    >>> weights = layer_state(error_feedback("tcfp12").init(flax_nnx.state(model, flax_nnx.Param)))
    >>> hand_out(model, weights)
    1
    >>> detach(model)
    >>> nnx.stored_weight(model) is None
    True
    """
    if nnx_models.absent_of(model):
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
def export(model: Transformed) -> Callable[..., PyTree]: ...
@overload
def export(model: _Model) -> _Model: ...
def export(model: Any) -> Any:
    """Return the original model or function: an NNX model in place, with its parameters
    as they are now.

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
        conversion, own = linen_models.conversion_of(model), linen.OWN.get(type(model))
        if own is not None:
            return linen_models.plain(model, own)
        if conversion is None or conversion.policy.recipe is None:
            raise ValueError(
                f"{type(model).__name__} was not converted; if it has low-precision"
                " layers, write Flax's own instead (the parameters fit unchanged), or"
                ' run Flax\'s code in them by to_bf16(model, "")'
            )
        return linen_models.plain(model)
    if not isinstance(model, flax_nnx.Module):
        raise _not_a_model(model)
    if nnx_models.absent_of(model):
        raise ValueError(
            "the model holds quantized kernels only; export a model with the float"
            " parameters"
        )
    by_hand_layers = [
        module
        for module in nnx_models.modules_of(model).values()
        if isinstance(module, nnx.OWN)
    ]
    if not nnx_models.export(model) + len(by_hand_layers):
        raise ValueError(f"{type(model).__name__} has no low-precision layer to export")
    for layer in by_hand_layers:
        base = next(
            kind for kind in type(layer).__mro__ if kind.__module__.startswith("flax.")
        )
        for name in {"recipe", "products", "stored", "keys"} & set(vars(layer)):
            delattr(layer, name)
        object.__setattr__(layer, "__class__", base)
    return model


def to_bf16(model: _Model, *patterns: str) -> _Model:
    """Let layers whose path a pattern finds run the model's own code, in their own
    dtype, until `restore`.

    Use it to find the layer that a recipe harms. It returns a new Linen model or
    function and changes an NNX model in place; state and parameters stay. Models
    written with this library's layers are switched in the same way.

    Raises:
      TypeError: neither a Flax module nor from `transform`.
      ValueError: no pattern, one that is not a regex, or one that finds no product (if
        there were sample inputs).

    >>> model = to_bf16(convert_to_tcfp(nn.Dense(4), "tcfp12", include=("linear", "small")), "")
    >>> x = jax.numpy.ones((2, 3))
    >>> variables = model.init(jax.random.key(0), x)
    >>> bool((model.apply(variables, x) == nn.Dense(4).apply(variables, x)).all())
    True
    """
    return _switch(model, patterns, "off")


def restore(model: _Model, *patterns: str) -> _Model:
    """Undo `to_bf16` for the patterns that were given to it.

    Raises:
      TypeError: neither a Flax module nor from `transform`.
      ValueError: no pattern, one that is not a regex, or one that was not switched off.

    >>> model = to_bf16(convert_to_tcfp(nn.Dense(4), "tcfp12"), "mlp")
    >>> linen_models.conversion_of(restore(model, "mlp")).policy.off
    ()
    """
    return _switch(model, patterns, "on")


def _switch(model: Any, patterns: tuple[str, ...], how: Literal["off", "on"]) -> Any:
    if not patterns:
        raise ValueError(
            'name layers by patterns over their paths, such as "block_0/.*"; "" is all'
            " of them"
        )
    for pattern in patterns:
        finds(pattern, "")
    if isinstance(model, Transformed):
        return dataclasses.replace(
            model, policy=_switched(model.policy, patterns, how, None)
        )
    if not isinstance(model, flax_nnx.Module):
        base, conversion = _linen_conversion(model)
        chosen = _switched(conversion.policy, patterns, how, conversion.found)
        found = conversion.found and conversion.found.by(chosen)
        return linen_models.converted(
            base, dataclasses.replace(conversion, policy=chosen, found=found)
        )
    converted, sample = nnx_models.conversion_of(model), nnx_models.sample_of(model)
    own = {
        path: module
        for path, module in nnx_models.modules_of(model).items()
        if hasattr(module, "products")
    }
    wanted, by_hand_layers = "flax" if how == "off" else "recipe", []
    for pattern in patterns:
        layers = [
            module
            for path, module in own.items()
            if finds(pattern, paths.join(path, "kernel"))
        ]
        if any(layer.products != wanted for layer in layers):
            by_hand_layers += layers
        elif converted is None:
            state = "switched off" if how == "off" else "on"
            raise ValueError(
                f"{pattern!r} finds no low-precision layer that is not {state} already"
            )
    if converted is not None:
        found = (
            None
            if sample is None
            else nnx_models.examine(model, converted, sample.args, sample.options)
        )
        nnx_models.rename(model, _switched(converted, patterns, how, found))
    for layer in by_hand_layers:
        layer.products = wanted
    return model


def _switched(
    chosen: Policy,
    patterns: tuple[str, ...],
    how: Literal["off", "on"],
    found: Examined | None,
) -> Policy:
    if how == "off":
        records = None if found is None else found.report.converted
        for pattern in patterns:
            if records is not None and not any(
                finds(pattern, record.weight_path) for record in records
            ):
                raise ValueError(
                    f"{pattern!r} finds no low-precision product; survey(model) lists"
                    " them"
                )
        return dataclasses.replace(
            chosen, off=tuple(dict.fromkeys((*chosen.off, *patterns)))
        )
    unknown = [pattern for pattern in patterns if pattern not in chosen.off]
    if unknown:
        raise ValueError(
            f"{unknown[0]!r} was not switched off; to_bf16 was given {list(chosen.off)}"
        )
    return dataclasses.replace(
        chosen, off=tuple(pattern for pattern in chosen.off if pattern not in patterns)
    )


def _settled(
    name: str, found: Examined, chosen: Policy, *, strict: bool
) -> tuple[Policy, Examined]:
    """Return the policy with its choices by measured times settled, and its decisions;
    raise if these are nothing.
    """
    chosen = chosen.settle(found.census.products.values())
    found = found.by(chosen)
    found.check_converted(name)
    if strict:
        found.report.check_strict()
    return chosen, found


def _examined(
    model: object,
    inputs: tuple[PyTree, ...],
    options: Mapping[str, PyTree] | None,
    asked: str,
) -> tuple[Examined, Policy]:
    """Return the decisions about a call of a model, and the policy of the model."""
    options, sampled = dict(options or {}), bool(inputs or options)
    _check_inputs(inputs)
    needs = ValueError(
        f"{asked} needs sample inputs: {asked}(model, *inputs), or pass them to"
        " convert_to_tcfp"
    )
    if isinstance(model, Transformed):
        return model.examine(*inputs, **options), model.policy
    if isinstance(model, flax_nnx.Module):
        chosen, sample = nnx_models.conversion_of(model), nnx_models.sample_of(model)
        if not sampled and sample is not None:
            inputs, options, sampled = sample.args, sample.options, True
        if not sampled:
            raise (
                _not_converted(model)
                if chosen is None and not _own_layers(model)
                else needs
            )
        found = nnx_models.examine(model, chosen or BY_HAND, inputs, options)
    else:
        base, conversion = _linen_conversion(model)
        chosen, known = conversion.policy, conversion.found
        if sampled:
            known, _ = linen_models.examine(base, chosen, inputs, options)
        if known is None:
            raise needs
        found = known
    if (
        not found.report.converted
        and (chosen is None or chosen.recipe is None)
        and not found.weights
    ):
        raise _not_converted(model)
    return found, chosen or BY_HAND


def _linen_conversion(model: object) -> tuple[nn.Module, Conversion]:
    """Return the unconverted model, and its conversion; a model that is not converted
    may have layers of ours.
    """
    if not isinstance(model, nn.Module):
        raise _not_a_model(model)
    return linen_models.plain(model), linen_models.conversion_of(model) or Conversion(
        type(model), BY_HAND
    )


def hand_out(model: flax_nnx.Module, weights: Mapping[str, PyTree]) -> int:
    """Give stored weights to the layers written by hand and to the converted modules;
    return how many were taken.
    """
    kernel = lambda layer: "embedding" if isinstance(layer, nnx.TCFPEmbed) else "kernel"
    own = {
        paths.join(path, kernel(layer)): layer
        for path, layer in _own_layers(model).items()
    }
    for path in set(weights) & set(own):
        nnx.store(own[path], weights[path])
    rest = {path: weight for path, weight in weights.items() if path not in own}
    taken = len(weights) - len(rest)
    return taken + (
        nnx_models.store(model, rest)
        if nnx_models.conversion_of(model) is not None
        else 0
    )


def _own_layers(model: flax_nnx.Module) -> dict[str, Any]:
    return {
        p: m
        for p, m in nnx_models.modules_of(model).items()
        if isinstance(m, nnx.MULTIPLYING)
    }


def _devices_of(tree: PyTree) -> int:
    """Return the largest number of shards of any array in the tree; an array without a
    sharding counts as one.
    """
    is_placed = lambda leaf: isinstance(
        getattr(leaf, "sharding", None), jax.sharding.Sharding
    )
    shards = lambda leaf: (
        math.prod(leaf.shape)
        // max(1, math.prod(leaf.sharding.shard_shape(leaf.shape)))
    )
    return max(map(shards, filter(is_placed, jax.tree.leaves(tree))), default=1)


def _check_inputs(inputs: tuple[PyTree, ...]) -> None:
    for value in jax.tree.leaves(inputs):
        if isinstance(value, str):
            raise TypeError(
                f"the input {value[:40]!r} is a string; pass arrays, such as the tokens"
                " that it stands for"
            )


def _not_converted(model: object) -> ValueError:
    """Return the error of a question about a model that is not converted."""
    return ValueError(
        f"{type(model).__name__} is not converted; use convert_to_tcfp(model, recipe)"
    )


def _not_a_model(model: object) -> TypeError:
    """Return the error of an object that is not a Flax module."""
    kind, repair = (
        f"{type(model).__module__}.{type(model).__qualname__}",
        "pass the model itself",
    )
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
