"""Every way in and out for a Flax model: convert it, see what happened, switch layers off and on, take it back.

    model = convert_to_tcfp(model, "tcfp12_fast", tokens)                    # Linen: a new model; NNX: in place
    tx = optax.chain(optax.adamw(3e-4), error_feedback(find_weights(model)))
    model.apply({"params": params, "tcfp": layer_state(opt_state)}, tokens)  # Linen; NNX: sync(model, optimizer), once

Parameters keep their names, shapes and values: a float checkpoint loads before and after.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax
from flax import linen as nn
from flax import nnx as flax_nnx

from tcfp_jax import nnx, paths
from tcfp_jax.conversion import census, interception, replacement
from tcfp_jax.conversion.interception import Conversion
from tcfp_jax.conversion.policy import Include, check_pattern, policy
from tcfp_jax.conversion.registry import own_base, register_adapter
from tcfp_jax.conversion.report import Report
from tcfp_jax.layers import Absent
from tcfp_jax.optim.feedback import ErrorFeedbackState
from tcfp_jax.recipes import Recipe
from tcfp_jax.weights.layout import Weight

__all__ = [
    "convert_to_tcfp", "export", "find_weights", "register_adapter", "restore", "survey", "sync", "to_bf16",
]  # fmt: skip


def convert_to_tcfp(
    model: Any,
    recipe: Recipe | str,
    *inputs: Any,
    rules: Any = None,
    include: Iterable[Include] | Include = ("linear",),
    strict: bool = False,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """The model with the products of its layers computed as `recipe` says.

    An NNX model is changed in place and returned. For a Linen model the result is another one of the same class, whose
    methods run their layers through adapters; the original is untouched. Dense, DenseGeneral, Einsum (and so the
    projections of attention), Embed.attend and registered layers are known, under scan, remat and vmap too.

    Args:
      model: a `flax.linen.Module` that is not bound, or a `flax.nnx.Module`.
      recipe: a `Recipe` or the name of one.
      inputs: sample arguments of the model, arrays or `jax.ShapeDtypeStruct`: with them the model is traced now, so
        that errors come now and `survey(model)` and `find_weights(model)` need no inputs.
      rules: pairs of a regex over paths such as "block_0/mlp" and a recipe (None: leave the layer alone), as a mapping
        or a sequence; or functions `(path, module)` to a recipe, or None where they have no opinion. The first match
        wins, also over `include`.
      include: layers that take `recipe` without a rule: "linear"; "head", the output head, known by its name or as
        `Embed.attend`; "small", kernels below 1024 x 1024, which are slower than in BF16; "layer_norm" and "embed",
        which are rounded to the packed format. What is left out runs Flax's own code, and `survey` says why.
      strict: raise where a parameter is multiplied by code that no adapter saw; needs `inputs`.
      options: keyword arguments for the call with `inputs`.

    Raises:
      TypeError: not a Flax module.
      ValueError: a bound model, an unknown recipe or group, a rule that is not a regex, nothing to convert (for Linen
        without `inputs`: when the model is first applied), or with `strict` a product that no adapter saw.

    >>> model = convert_to_tcfp(nn.Dense(4), "tcfp12", jax.numpy.ones((2, 3)), include=("linear", "small"))
    >>> isinstance(model, nn.Dense)
    True
    """
    chosen = policy(recipe, rules, include)
    if strict and not inputs:
        raise ValueError("strict=True looks for products in a trace; pass sample inputs after the recipe")
    if isinstance(model, nn.Module):
        if model.scope is not None:
            raise ValueError(f"{type(model).__name__} is bound to variables; convert it before bind, or unbind it")
        earlier = interception.conversion_of(model)
        base = type(model) if earlier is None else earlier.base
        conversion = Conversion(base, chosen)
        converted = interception.bake(model, conversion)
        if inputs:
            conversion.report, conversion.shapes = census.of_linen(converted, inputs, dict(options or {}))
            if not conversion.report.converted:
                skipped = {record.path: record.choice.reason for record in conversion.report.skipped}
                raise interception.nothing_converted(type(model).__name__, skipped)
    elif isinstance(model, flax_nnx.Module):
        converted = model
        census.REPORTS[model] = census.report(replacement.replace(model, chosen), (), chosen.rules)
        if inputs:
            census.REPORTS[model] = census.of_nnx(model, inputs, dict(options or {}))
    else:
        raise TypeError(f"{model!r} is neither a flax.linen.Module nor a flax.nnx.Module; pass the model itself")
    if strict:
        _check_strict(survey(converted))
    return converted


def survey(model: Any, *inputs: Any, options: Mapping[str, Any] | None = None) -> Report:
    """What became of every layer of a converted model, and the parameter products that no adapter saw.

    Args:
      model: from `convert_to_tcfp`, or one written with this project's layers.
      inputs: sample arguments, traced and never computed. Without them the report of the conversion is returned.
      options: keyword arguments for the call with `inputs`.

    Raises:
      TypeError: not a Flax module.
      ValueError: nothing in the model is low-precision, or there are no inputs, neither now nor at conversion.

    >>> model = convert_to_tcfp(nn.Dense(4), "tcfp12", jax.numpy.ones((2, 3)), include=("linear", "small"))
    >>> print(survey(model))
    1 layers converted, 0 skipped
    (root)                                   Dense            [3, 4]               tcfp12
    """
    if isinstance(model, flax_nnx.Module):
        report = census.of_nnx(model, inputs, dict(options or {}))
        if model not in census.REPORTS and not report.converted:
            raise census.not_converted(model)
        return report
    model, conversion = census.linen(model)
    if inputs:
        return census.of_linen(model, inputs, dict(options or {}))[0]
    if conversion.report is None:
        raise ValueError("survey needs sample inputs: survey(model, *inputs), or pass them to convert_to_tcfp")
    return census.switched(conversion.report, conversion.policy.off)


def find_weights(model: Any, *inputs: Any, options: Mapping[str, Any] | None = None) -> dict[str, Weight]:
    """The weights of a converted model by parameter path, for `tcfp_jax.error_feedback` and `quantize_params`.

    Each with its own recipe, and with the axes that its layer contracts; layers of `nn.scan` are a stack.

    Args:
      model: from `convert_to_tcfp`, or one written with this project's layers.
      inputs: sample arguments; not needed where the conversion of a Linen model had some.
      options: keyword arguments for the call with `inputs`.

    Raises:
      TypeError: not a Flax module.
      ValueError: nothing in the model is low-precision, no inputs, or two layers that share a weight and multiply it
        in different ways.
      NotImplementedError: layers stacked along another axis than the first.

    >>> model = convert_to_tcfp(nn.Dense(4), "tcfp12", jax.numpy.ones((2, 3)), include=("linear", "small"))
    >>> find_weights(model)["kernel"].layout
    Layout(inputs=(0,), outputs=(1,), stack=())
    """
    if isinstance(model, flax_nnx.Module):
        report: Report | None = census.of_nnx(model, inputs, dict(options or {}))
        params = flax_nnx.as_pure(flax_nnx.state(model, flax_nnx.Param))
    else:
        model, conversion = census.linen(model)
        report, params = conversion.report, conversion.shapes
        if inputs:
            report, params = census.of_linen(model, inputs, dict(options or {}))
    if report is None:
        raise ValueError("find_weights needs sample inputs: find_weights(model, *inputs)")
    shapes = {path: leaf.shape for path, leaf in paths.leaves(params).items()}
    weights: dict[str, Weight] = {}
    for record in (*report.converted, *report.skipped):  # layers of NNX that are switched off keep their state
        if record.layout is None or record.recipe is None or record.weight_path not in shapes:
            continue  # a rounded parameter, or a tied head applied by itself: its parameter belongs to another layer
        layout = census.outer_layout(record, shapes[record.weight_path])
        weight = Weight(record.recipe, layout, "lookup" if record.parameter == "embedding" else "none")
        if weights.setdefault(record.weight_path, weight) != weight:
            raise ValueError(
                f"{record.weight_path} is multiplied in two ways: {weights[record.weight_path]} and {weight}; give "
                "its layers one recipe and one equation, or leave one out by rules"
            )
    return weights


def sync(model: Any, optimizer: flax_nnx.Optimizer) -> None:
    """Let the low-precision layers of an NNX model read the quantized weights in the optimizer's state.

    Once, after the optimizer is made: layers then hold the optimizer's own variables, which `optimizer.update` writes.

    Raises:
      ValueError: the optimizer holds no quantized weight of this model.

    >>> model = nnx.TCFPLinear(4, 4, rngs=flax_nnx.Rngs(0))
    >>> import optax, tcfp_jax
    >>> sync(model, flax_nnx.Optimizer(model, tcfp_jax.error_feedback("tcfp12"), wrt=flax_nnx.Param))
    >>> nnx.stored_weight(model).shape
    (4, 4)
    """
    weights: dict[str, Any] = {}
    is_state = lambda node: isinstance(node, ErrorFeedbackState)
    for node in jax.tree.leaves(optimizer.opt_state, is_leaf=is_state):
        if isinstance(node, ErrorFeedbackState):
            weights.update(paths.entries(node.weights))
    found = 0
    for path, module in replacement.layers(model):
        if isinstance(module, nnx.LowPrecision | nnx.TCFPEmbed):
            name = replacement.KERNELS.get(type(module), "kernel")
            weight = weights.get(paths.join(path, name))
            if weight is not None:
                nnx.store(module, weight)
                found += 1
    if not found:
        raise ValueError(
            "the optimizer holds no quantized weight of this model; end its optax.chain with tcfp_jax.error_feedback"
        )


def export(model: Any) -> Any:
    """Flax's own layers again, sharing the parameters: an NNX model in place, a Linen model as the class it had.

    A Linen model written with `TCFPDense` by hand has no other class to return to: exported are its layers, one by
    one, and `to_bf16(model, "")` runs Flax's code in all of them.

    Raises:
      TypeError: not a Flax module.
      ValueError: nothing in the model was converted, or its float kernels are gone (`load_quantized`).

    >>> type(export(convert_to_tcfp(nn.Dense(4), "tcfp12"))) is nn.Dense
    True
    """
    if isinstance(model, flax_nnx.Module):
        found = [module for _, module in replacement.layers(model) if isinstance(module, replacement.LAYERS)]
        if not found:
            raise ValueError(f"{type(model).__name__} has no low-precision layer to export")
        if any(isinstance(getattr(module, "kernel", None), Absent) for module in found):
            raise ValueError("the model holds quantized kernels only; export a model with the float parameters")
        for module in found:
            replacement.restore_class(module)
        return model
    kind = own_base(type(model))
    if kind is not None:
        fields = interception.fields_of(model)
        fields.pop("recipe", None)
        return kind(**fields, parent=None)
    model, conversion = census.linen(model)
    if conversion.policy.recipe is None:
        raise ValueError(
            f"{type(model).__name__} was not converted; if it has low-precision layers, write Flax's own in their "
            'place (the parameters fit as they are), or run Flax\'s code in them by to_bf16(model, "")'
        )
    return interception.unbaked(model, conversion)


def to_bf16(model: Any, *patterns: str) -> Any:
    """Layers whose path a pattern finds run Flax's own code, in their own dtype, until `restore`.

    A Linen model is returned anew, an NNX model changed in place; state and parameters stay as they are. Models that
    were not converted but written with this project's layers are switched alike.

    Raises:
      TypeError: not a Flax module.
      ValueError: no pattern, one that is not a regex, or one that finds no low-precision layer (for a Linen model that
        was converted without inputs: if no pattern does, when it is applied).

    >>> model = to_bf16(convert_to_tcfp(nn.Dense(4), "tcfp12", include=("linear", "small")), "")
    >>> x = jax.numpy.ones((2, 3))
    >>> variables = model.init(jax.random.key(0), x)
    >>> bool((model.apply(variables, x) == nn.Dense(4).apply(variables, x)).all())
    True
    """
    return _switch(model, patterns, "flax")


def restore(model: Any, *patterns: str) -> Any:
    """Undo `to_bf16` for the layers whose path a pattern finds; for a Linen model the patterns given to `to_bf16`.

    Raises:
      TypeError: not a Flax module.
      ValueError: no pattern, one that is not a regex, or one that was not switched off.

    >>> model = to_bf16(convert_to_tcfp(nn.Dense(4), "tcfp12"), "mlp")
    >>> interception.conversion_of(restore(model, "mlp")).policy.off
    ()
    """
    return _switch(model, patterns, "recipe")


def _switch(model: Any, patterns: tuple[str, ...], products: nnx.Products) -> Any:
    if not patterns:
        raise ValueError('name layers by patterns over their paths, such as "block_0/.*"; "" is all of them')
    for pattern in patterns:
        check_pattern(pattern)
    if isinstance(model, flax_nnx.Module):
        replacement.switch(model, patterns, products)
        return model
    model, conversion = census.linen(model)
    off = conversion.policy.off
    if products == "flax":
        layers = () if conversion.report is None else conversion.report.converted
        for pattern in patterns if layers else ():
            if not any(re.search(pattern, record.path) for record in layers):
                raise ValueError(f"{pattern!r} finds no low-precision layer; survey(model) lists them")
        off = (*off, *(pattern for pattern in patterns if pattern not in off))
    else:
        unknown = [pattern for pattern in patterns if pattern not in off]
        if unknown:
            raise ValueError(f"{unknown[0]!r} was not switched off; to_bf16 was given {list(off)}")
        off = tuple(pattern for pattern in off if pattern not in patterns)
    changed = Conversion(
        conversion.base, dataclasses.replace(conversion.policy, off=off), conversion.report, conversion.shapes
    )
    return interception.bake(model, changed)


def _check_strict(report: Report) -> None:
    if report.unseen:
        raise ValueError(
            f"strict=True: {len(report.unseen)} products of parameters that no adapter saw: "
            f"{'; '.join(map(str, report.unseen[:5]))}; use register_adapter for their layers"
        )
