"""The census of a model: one traced call, and from it every layer, its weights, and the products nobody saw."""

import dataclasses
import re
import weakref
from collections.abc import Iterable
from typing import Any

import jax
from flax import linen as nn
from flax import nnx as flax_nnx

from tcfp_jax.conversion import interception, replacement
from tcfp_jax.conversion.interception import Conversion
from tcfp_jax.conversion.policy import SWITCHED_OFF, Choice, by_hand, rule_name
from tcfp_jax.conversion.report import Record, Report
from tcfp_jax.conversion.tracing import Origin, Product, arrays_of, parameter_products
from tcfp_jax.paths import path_names

# What is known of converted NNX models; a Linen model's class holds its own.
REPORTS: weakref.WeakKeyDictionary[Any, Report] = weakref.WeakKeyDictionary()


def linen(model: Any) -> tuple[Any, Conversion]:
    """(a Linen model that is intercepted, its conversion); one written with our layers runs as it is, intercepted.

    Raises:
      TypeError: not a Flax module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"{model!r} is neither a flax.linen.Module nor a flax.nnx.Module; pass the model itself")
    conversion = interception.conversion_of(model)
    if conversion is not None:
        return model, conversion
    conversion = Conversion(type(model), by_hand())
    return interception.bake(model, conversion), conversion


def of_linen(model: Any, inputs: tuple[Any, ...], options: dict[str, Any]) -> tuple[Report, Any]:
    """(report, parameters as shapes) of one traced call.

    Raises:
      ValueError: the model is not converted, and no layer of it is low-precision by hand.
    """
    model, conversion = linen(model)
    original = interception.unbaked(model, conversion)
    rngs = {name: jax.random.key(0) for name in ("params", "dropout", "tcfp")}
    arrays, rebuild = arrays_of((inputs, options))
    variables = jax.eval_shape(lambda arrays: _call(original.init, rngs, rebuild(arrays)), arrays)
    variables = nn.meta.unbox(variables)
    records: list[Record] = []
    mutable = nn.DenyList("params")

    def run(variables: Any, arrays: Any) -> Any:
        args, kwargs = rebuild(arrays)
        with interception.running(conversion, records):
            return model.apply(variables, *args, rngs=rngs, mutable=mutable, **kwargs)

    jaxpr = jax.make_jaxpr(run)(variables, arrays)
    if conversion.policy.recipe is None and not conversion.ever:
        raise not_converted(model)
    found = report(dict.fromkeys(records), _unseen(jaxpr, variables, arrays), conversion.policy.rules)
    return found, variables.get("params", {})


def of_nnx(model: Any, inputs: tuple[Any, ...], options: dict[str, Any]) -> Report:
    """The report of the layers as they are now, with what one traced call shows where there are inputs.

    What an earlier call showed is remembered: layouts that only a call knows, and tokens.
    """
    before = REPORTS.get(model, Report((), ()))
    seen = {(r.path, r.parameter): (r.layout, r.tokens) for r in before.converted if r.layout is not None}
    unseen = before.unseen
    if inputs:
        graphdef, state = flax_nnx.split(model)
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
        arrays, rebuild = arrays_of((inputs, options))

        def run(state: Any, arrays: Any) -> Any:
            args, kwargs = rebuild(arrays)
            with replacement.watching(flax_nnx.merge(graphdef, state), seen) as merged:
                return jax.tree.leaves(flax_nnx.as_pure(merged(*args, **kwargs)))

        jaxpr = jax.make_jaxpr(run)(shapes, arrays)
        unseen = _unseen(jaxpr, {"params": flax_nnx.as_pure(shapes)}, arrays)
    records = replacement.records(model, seen)
    off = tuple(record for record in records if record.choice.reason == SWITCHED_OFF)
    on = tuple(record for record in records if record not in off)
    skipped = tuple(record for record in before.skipped if record.parameter)  # none: low-precision already
    found = Report(on, (*skipped, *off), unseen, before.unmatched_rules)
    if model in REPORTS and inputs:
        REPORTS[model] = dataclasses.replace(before, converted=tuple(records), unseen=unseen)
    return found


def not_converted(model: Any) -> ValueError:
    """The error of a model in which nothing is low-precision."""
    return ValueError(f"{type(model).__name__} is not converted; use convert_to_tcfp(model, recipe)")


def switched(report: Report, off: tuple[str, ...]) -> Report:
    """The report with layers that `to_bf16` switched off since among the skipped."""
    found = [record for record in report.converted if any(re.search(pattern, record.path) for pattern in off)]
    converted = tuple(record for record in report.converted if record not in found)
    moved = tuple(dataclasses.replace(record, choice=Choice(None, SWITCHED_OFF)) for record in found)
    return dataclasses.replace(report, converted=converted, skipped=(*report.skipped, *moved))


def report(records: Iterable[Record], unseen: tuple[Product, ...], rules: tuple[Any, ...]) -> Report:
    """The report of these records."""
    records = list(records)
    matched = {record.choice.rule for record in records}
    unmatched = tuple(rule_name(rule) for number, rule in enumerate(rules) if number not in matched)
    converted = tuple(record for record in records if record.recipe is not None)
    return Report(converted, tuple(record for record in records if record.recipe is None), unseen, unmatched)


def _unseen(jaxpr: Any, variables: Any, arrays: Any) -> tuple[Product, ...]:
    """Parameter products that ran outside every adapter."""
    origins = []
    for path, _ in jax.tree_util.tree_flatten_with_path((variables, arrays))[0]:
        names = path_names(path)
        from_params = names[0] == "0" and names[1] == "params"
        origins.append(Origin(frozenset({"/".join(names[2:])})) if from_params else Origin(from_input=True))
    return tuple(dict.fromkeys(product for product in parameter_products(jaxpr, origins) if not product.seen))


def outer_layout(record: Record, shape: tuple[int, ...]) -> Any:
    """The layout of the whole parameter, which `nn.scan` or `nn.vmap` may have stacked."""
    layout, extra = record.layout, len(shape) - len(record.shape)
    assert layout is not None
    if extra < 0 or tuple(shape[extra:]) != record.shape:
        raise NotImplementedError(
            f"{record.weight_path} has shape {list(shape)}, but its layer sees {list(record.shape)}: layers must be "
            'stacked along the first axis; use variable_axes={"params": 0}'
        )
    return layout.stacked(len(shape)) if extra else layout


def _call(function: Any, rngs: Any, arguments: Any) -> Any:
    args, kwargs = arguments
    return function(rngs, *args, **kwargs)
