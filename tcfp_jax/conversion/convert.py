"""Every way in and out for a model: convert it, see what happened, switch layers off and on, take it back.

    model = convert_to_tcfp(model, "tcfp12_fast", tokens)                    # Linen: a new model; NNX: in place
    tx = optax.chain(optax.adamw(3e-4), error_feedback(find_weights(model)))
    model.apply({"params": params, "tcfp": layer_state(opt_state)}, tokens)  # Linen; NNX: sync(model, optimizer), once

Parameters keep their names, shapes and values: a float checkpoint loads before and after. What `transform` made of a
function is surveyed, switched and exported by the same functions.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
from flax import linen as nn
from flax import nnx as flax_nnx

from tcfp_jax import linen, nnx, paths
from tcfp_jax.conversion import linen_models, nnx_models
from tcfp_jax.conversion.arrays import devices_of
from tcfp_jax.conversion.examination import Examined
from tcfp_jax.conversion.linen_models import Conversion
from tcfp_jax.conversion.policy import Include, Policy, by_hand, check_pattern, finds, policy
from tcfp_jax.conversion.report import Report, check_strict, not_a_model, not_converted, nothing_converted
from tcfp_jax.conversion.transform import Transformed
from tcfp_jax.optim.feedback import layer_state
from tcfp_jax.recipes import Recipe
from tcfp_jax.weights.layout import Weight


def convert_to_tcfp(
    model: Any,
    recipe: Recipe | str,
    *inputs: Any,
    rules: Any = None,
    include: Iterable[Include] | Include | None = None,
    strict: bool = False,
    options: Mapping[str, Any] | None = None,
    rngs: flax_nnx.Rngs | flax_nnx.RngStream | None = None,
) -> Any:
    """The model with every product of a parameter and an input computed as `recipe` says, whoever wrote its layers.

    An NNX model is changed in place and returned. For a Linen model the result is another one of the same class; the
    original is untouched. Both are thin users of `transform`, which see for what is found and what is left alone.

    Args:
      model: a `flax.linen.Module` that is not bound, or a `flax.nnx.Module`. Converting a converted model converts the
        original one anew.
      recipe: a `Recipe` or the name of one.
      inputs: sample arguments of the model, arrays or `jax.ShapeDtypeStruct`: with them, or with `options`, the model
        is traced now, so that errors come now and `survey(model)` and `find_weights(model)` need no inputs.
      rules: as in `transform`; paths are those of parameters, such as "block_0/mlp/kernel".
      include: as in `transform`; None is "measured" with sample arguments, and "linear" without. "measured" weighs each
        product once, at the rows that the sample arguments give it on one device (an argument that says how it is split
        over devices has that part of its rows), and the choice holds for every call. Pass what a training step has.
      strict: as in `transform`; needs sample arguments.
      options: keyword arguments for the call with `inputs`.
      rngs: of an NNX model, for recipes that draw random bits (FP4 training): each module that is converted gets a fork
        of the stream "tcfp", as Flax's Dropout gets one, and a call of it draws another key. None: the model may hold
        such a stream itself. To Linen's `apply` pass `rngs={"tcfp": key}`.

    Raises:
      TypeError: not a Flax module, an argument that the model's call does not have, or `rngs` that is none.
      ValueError: a bound model, `rngs` of a Linen model, an unknown recipe or group, a rule that is not a regex,
        "measured" without sample arguments, nothing to convert (without sample arguments: when the model is called;
        where measured times say that nothing pays, the model runs as it is), or what `strict` forbids. An NNX model is
        unchanged then.

    >>> model = convert_to_tcfp(nn.Dense(4), "tcfp12", jax.numpy.ones((2, 3)), include=("linear", "small"))
    >>> isinstance(model, nn.Dense)
    True
    """
    options = dict(options or {})
    sampled = bool(inputs or options)
    if include is None:
        include = "measured" if sampled else "linear"
    chosen = dataclasses.replace(policy(recipe, rules, include), devices=devices_of((inputs, options)))
    _check_inputs(inputs)
    if "measured" in chosen.include and not sampled:
        raise ValueError(
            'include="measured" weighs products at the rows that sample inputs give them; pass sample inputs after the '
            "recipe"
        )
    if strict and not sampled:
        raise ValueError("strict=True looks for products in a trace; pass sample inputs after the recipe")
    if isinstance(model, nn.Module):
        if model.scope is not None:
            raise ValueError(f"{type(model).__name__} is bound to variables; convert it before bind, or unbind it")
        if rngs is not None:
            raise ValueError('rngs= is for NNX models; a Linen model gets them at apply, as rngs={"tcfp": key}')
        base = linen_models.plain(model)
        found, shapes = linen_models.examine(base, chosen, inputs, options) if sampled else (None, None)
        chosen, found = (chosen, None) if found is None else found.settled(chosen)
        _check(type(model).__name__, found, shapes, strict=strict)
        return linen_models.converted(base, Conversion(type(base), chosen, found, shapes))
    if isinstance(model, flax_nnx.Module):
        found = nnx_models.examine(model, chosen, inputs, options) if sampled else None
        chosen, found = (chosen, None) if found is None else found.settled(chosen)
        _check(type(model).__name__, found, flax_nnx.state(model, flax_nnx.Param), strict=strict)
        held = None if found is None else [record.weight_path for record in found.report.converted]
        keys = nnx_models.keys_of(model, rngs, chosen, found)
        nnx_models.convert(model, chosen, held, nnx_models.Sample(inputs, options) if sampled else None, keys)
        return model
    raise not_a_model(model)


def survey(model: Any, *inputs: Any, options: Mapping[str, Any] | None = None) -> Report:
    """What became of every product of a parameter: recipes, and what was left alone and why.

    Args:
      model: from `convert_to_tcfp` or `transform`, or one written with this project's layers.
      inputs: sample arguments, traced and never computed (of a function all of its arguments). Without them those of
        the conversion are taken.
      options: keyword arguments for the call with `inputs`.

    Raises:
      TypeError: neither a Flax module nor from `transform`.
      ValueError: nothing in the model is low-precision, or there are no inputs, neither now nor at conversion.

    >>> model = convert_to_tcfp(nn.Dense(4), "tcfp12", jax.numpy.ones((2, 3)), include=("linear", "small"))
    >>> print(survey(model))
    1 products converted, 0 skipped
    kernel                                   [3, 4]               ca,ab->cb                tcfp12
    """
    return _examined(model, inputs, options, "survey")[0].report


def find_weights(model: Any, *inputs: Any, options: Mapping[str, Any] | None = None) -> dict[str, Weight]:
    """The weights of a converted model by parameter path, for `tcfp_jax.error_feedback` and `quantize_params`.

    Each with its own recipe, and with the axes that its first converted product contracts; layers of a loop are a
    stack. A product that reads the weight in another form quantizes it at each use, and `survey` says so.

    Args:
      model: from `convert_to_tcfp` or `transform`, or one written with this project's layers.
      inputs: sample arguments, as in `survey`.
      options: keyword arguments for the call with `inputs`.

    Raises:
      TypeError: neither a Flax module nor from `transform`.
      ValueError: nothing in the model is low-precision, or no inputs.

    >>> model = convert_to_tcfp(nn.Dense(4), "tcfp12", jax.numpy.ones((2, 3)), include=("linear", "small"))
    >>> find_weights(model)["kernel"].layout
    Layout(inputs=(0,), outputs=(1,), stack=())
    """
    found, chosen = _examined(model, inputs, options, "find_weights")
    if found.weights and isinstance(model, flax_nnx.Module) and nnx_models.conversion_of(model) is not None:
        nnx_models.await_sync(chosen)
    return found.weights


def sync(model: Any, optimizer: flax_nnx.Optimizer | None) -> None:
    """Let an NNX model read the quantized weights in the optimizer's state.

    Once, after the optimizer is made: modules then hold the optimizer's own variables, which `optimizer.update` writes.
    Parameters that change in any other way (`nnx.update`, a moving average) no longer fit them, and the next product
    says so: an error, or NaN where it is traced. For evaluation with averaged or restored parameters,
    `sync(nnx.clone(model), None)`: with None the model quantizes its own parameters again, whatever they are.

    Raises:
      ValueError: the optimizer holds no quantized weight of this model, whose recipe stores some, or holds them where
        `layer_state` refuses them; or None, and the model holds none, or it is for inference and has no float ones.

    >>> model = nnx.TCFPLinear(4, 4, rngs=flax_nnx.Rngs(0))
    >>> import optax, tcfp_jax
    >>> sync(model, flax_nnx.Optimizer(model, tcfp_jax.error_feedback("tcfp12"), wrt=flax_nnx.Param))
    >>> nnx.stored_weight(model).shape
    (4, 4)
    """
    if optimizer is None:
        _forget(model)
        return
    found = hand_out(model, paths.entries(layer_state(optimizer.opt_state)))
    if not found and not _stores_nothing(model):
        raise ValueError(
            "the optimizer holds no quantized weight of this model; end its optax.chain with tcfp_jax.error_feedback"
        )


def export(model: Any) -> Any:
    """The model, or the function, as it was: an NNX model in place, with its parameters as they are now.

    Raises:
      TypeError: neither a Flax module nor from `transform`.
      ValueError: nothing in the model was converted, or its float kernels are gone (`load_quantized`).

    >>> type(export(convert_to_tcfp(nn.Dense(4), "tcfp12"))) is nn.Dense
    True
    """
    if isinstance(model, Transformed):
        return model.function
    if isinstance(model, nn.Module):
        conversion, own = linen_models.conversion_of(model), linen.OWN.get(type(model))
        if own is not None:
            fields = linen_models.fields_of(model)
            fields.pop("recipe", None)
            return own(**fields, parent=None)
        if conversion is None or conversion.policy.recipe is None:
            raise ValueError(
                f"{type(model).__name__} was not converted; if it has low-precision layers, write Flax's own in their "
                'place (the parameters fit as they are), or run Flax\'s code in them by to_bf16(model, "")'
            )
        return linen_models.plain(model)
    if not isinstance(model, flax_nnx.Module):
        raise not_a_model(model)
    if nnx_models.absent_of(model):
        raise ValueError("the model holds quantized kernels only; export a model with the float parameters")
    by_hand_layers = [module for module in nnx_models.modules_of(model).values() if isinstance(module, nnx.OWN)]
    if not nnx_models.export(model) + len(by_hand_layers):
        raise ValueError(f"{type(model).__name__} has no low-precision layer to export")
    for module in by_hand_layers:
        nnx.restore_class(module)
    return model


def to_bf16(model: Any, *patterns: str) -> Any:
    """Layers whose path a pattern finds run the model's own code, in their own dtype, until `restore`.

    A Linen model and a function are returned anew, an NNX model is changed in place; state and parameters stay as they
    are. Models that were not converted but written with this project's layers are switched alike.

    Raises:
      TypeError: neither a Flax module nor from `transform`.
      ValueError: no pattern, one that is not a regex, or one that finds no low-precision product (where no sample
        inputs were given, nothing is looked for).

    >>> model = to_bf16(convert_to_tcfp(nn.Dense(4), "tcfp12", include=("linear", "small")), "")
    >>> x = jax.numpy.ones((2, 3))
    >>> variables = model.init(jax.random.key(0), x)
    >>> bool((model.apply(variables, x) == nn.Dense(4).apply(variables, x)).all())
    True
    """
    return _switch(model, patterns, "off")


def restore(model: Any, *patterns: str) -> Any:
    """Undo `to_bf16` for the patterns that were given to it.

    Raises:
      TypeError: neither a Flax module nor from `transform`.
      ValueError: no pattern, one that is not a regex, or one that was not switched off.

    >>> model = to_bf16(convert_to_tcfp(nn.Dense(4), "tcfp12"), "mlp")
    >>> linen_models.conversion_of(restore(model, "mlp")).policy.off
    ()
    """
    return _switch(model, patterns, "on")


def _switch(model: Any, patterns: tuple[str, ...], how: str) -> Any:
    if not patterns:
        raise ValueError('name layers by patterns over their paths, such as "block_0/.*"; "" is all of them')
    for pattern in patterns:
        check_pattern(pattern)
    if isinstance(model, flax_nnx.Module):
        return _switch_nnx(model, patterns, how)
    if isinstance(model, Transformed):
        return model.with_policy(_switched(model.policy, patterns, how, None))
    conversion = _linen_conversion(model)
    report = None if conversion.found is None else conversion.found.report
    chosen = _switched(conversion.policy, patterns, how, report)
    found = conversion.found and conversion.found.by(chosen)
    return linen_models.converted(
        linen_models.plain(model), dataclasses.replace(conversion, policy=chosen, found=found)
    )


def _switch_nnx(model: Any, patterns: tuple[str, ...], how: str) -> Any:
    own = {path: module for path, module in nnx_models.modules_of(model).items() if hasattr(module, "products")}
    chosen, sample = nnx_models.conversion_of(model), nnx_models.sample_of(model)
    mine = []
    for pattern in patterns:
        found = [module for path, module in own.items() if finds(pattern, paths.join(path, "kernel"))]
        if found and any(module.products != ("flax" if how == "off" else "recipe") for module in found):
            mine.append((found, "flax" if how == "off" else "recipe"))
        elif chosen is None:
            state = "switched off" if how == "off" else "on"
            raise ValueError(f"{pattern!r} finds no low-precision layer that is not {state} already")
    if chosen is not None:
        report = None
        if sample is not None:
            report = nnx_models.examine(model, chosen, sample.args, sample.options).report
        wanted = _switched(chosen, patterns, how, report)
        nnx_models.rename(model, wanted)
    for found, products in mine:
        for module in found:
            module.products = products
    return model


def _switched(chosen: Policy, patterns: tuple[str, ...], how: str, report: Report | None) -> Policy:
    if how == "off":
        for pattern in patterns if report is not None else ():
            if not any(finds(pattern, record.weight_path) for record in report.converted):  # type: ignore[union-attr]
                raise ValueError(f"{pattern!r} finds no low-precision product; survey(model) lists them")
        return chosen.switched((*chosen.off, *(pattern for pattern in patterns if pattern not in chosen.off)))
    unknown = [pattern for pattern in patterns if pattern not in chosen.off]
    if unknown:
        raise ValueError(f"{unknown[0]!r} was not switched off; to_bf16 was given {list(chosen.off)}")
    return chosen.switched(tuple(pattern for pattern in chosen.off if pattern not in patterns))


def _examined(model: Any, inputs: tuple[Any, ...], options: Any, what: str) -> tuple[Examined, Policy]:
    """(what a call of a model holds, the policy of the model)."""
    options, sampled = dict(options or {}), bool(inputs or options)
    _check_inputs(inputs)
    needs = ValueError(f"{what} needs sample inputs: {what}(model, *inputs), or pass them to convert_to_tcfp")
    if isinstance(model, Transformed):
        return model.examine(*inputs, **options), model.policy
    if isinstance(model, flax_nnx.Module):
        chosen, sample = nnx_models.conversion_of(model), nnx_models.sample_of(model)
        if not sampled and sample is not None:
            inputs, options, sampled = sample.args, sample.options, True
        if not sampled:
            raise not_converted(model) if chosen is None and not _own_layers(model) else needs
        found = nnx_models.examine(model, chosen or by_hand(), inputs, options)
    else:
        conversion = _linen_conversion(model)
        chosen, known = conversion.policy, conversion.found
        if sampled:
            known, _ = linen_models.examine(linen_models.plain(model), chosen, inputs, options)
        if known is None:
            raise needs
        found = known
    if not found.report.converted and (chosen is None or chosen.recipe is None) and not found.weights:
        raise not_converted(model)
    return found, chosen or by_hand()


def _linen_conversion(model: Any) -> Conversion:
    if not isinstance(model, nn.Module):
        raise not_a_model(model)
    return linen_models.conversion_of(model) or Conversion(type(model), by_hand())


def hand_out(model: Any, weights: Mapping[str, Any]) -> int:
    """Stored weights to the layers written by hand and to the converted modules; how many were taken."""
    own = {paths.join(path, nnx.kernel_name(layer)): layer for path, layer in _own_layers(model).items()}
    taken = 0
    for path in set(weights) & set(own):
        nnx.store(own[path], weights[path])
        taken += 1
    rest = {path: weight for path, weight in weights.items() if path not in own}
    return taken + (nnx_models.store(model, rest) if nnx_models.conversion_of(model) is not None else 0)


def _stores_nothing(model: Any) -> bool:
    """Whether no product of a model has a stored weight: those of "bf16" and of FP4 training have none."""
    chosen, sample = nnx_models.conversion_of(model), nnx_models.sample_of(model)
    if chosen is not None and sample is not None:
        return not nnx_models.examine(model, chosen, sample.args, sample.options).weights
    own = _own_layers(model).values()
    return bool(own) and all(layer.recipe is None or layer.recipe.stored is None for layer in own)


def _forget(model: Any) -> None:
    if nnx_models.absent_of(model):
        raise ValueError("the model holds quantized kernels only; load the float parameters into a new model")
    own = [layer for layer in _own_layers(model).values() if layer.stored is not None]
    for layer in own:
        layer.stored = flax_nnx.data(None)
    if not nnx_models.forget(model) + len(own):
        raise ValueError(f"{type(model).__name__} holds no stored weight; there is nothing to undo")


def _own_layers(model: Any) -> dict[str, Any]:
    return {p: m for p, m in nnx_models.modules_of(model).items() if isinstance(m, nnx.LowPrecision | nnx.TCFPEmbed)}


def _check(name: str, found: Examined | None, shapes: Any, *, strict: bool) -> None:
    if found is None:
        return
    if not (found.report.converted or found.report.rounded or found.report.weighed):
        raise nothing_converted(name, found.report, paths.leaves(shapes))
    if strict:
        check_strict(found.report)


def _check_inputs(inputs: tuple[Any, ...]) -> None:
    for value in jax.tree.leaves(inputs):
        if isinstance(value, str):
            raise TypeError(f"the input {value[:40]!r} is a string; pass arrays, such as the tokens that it stands for")
