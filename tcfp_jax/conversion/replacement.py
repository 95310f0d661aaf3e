"""NNX conversion: layers change their class in place, so that references to them and to their `Param`s stay valid."""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from flax import nnx as flax_nnx

from tcfp_jax import nnx, paths
from tcfp_jax.conversion.interception import TRACE_KEY, nothing_converted
from tcfp_jax.conversion.policy import SWITCHED_OFF, Choice, Policy
from tcfp_jax.conversion.registry import Adapter, nnx_adapter
from tcfp_jax.conversion.report import Record
from tcfp_jax.conversion.tracing import SCOPE
from tcfp_jax.layers import Multiply
from tcfp_jax.products.contraction import Contraction

LAYERS = (nnx.LowPrecision, nnx.TCFPEmbed, nnx.TCFPLayerNorm)
KERNELS: dict[type, str] = {nnx.TCFPEmbed: "embedding", nnx.TCFPLayerNorm: "scale"}
_MADE: dict[tuple[type, Any], type] = {}
_SCOPED: dict[type, type] = {}


def layers(model: Any) -> list[tuple[str, Any]]:
    """(path, module) of every module of an NNX model, each once.

    >>> [path for path, _ in layers(flax_nnx.Sequential(flax_nnx.Linear(2, 2, rngs=flax_nnx.Rngs(0))))]
    ['layers/0', 'layers', '']
    """
    return [(paths.join(*map(str, path)), module) for path, module in flax_nnx.iter_modules(model)]


def replace(model: Any, policy: Policy) -> list[Record]:
    """Convert the layers of an NNX model in place; a record each.

    Raises:
      ValueError: no layer takes a recipe; the model is unchanged then.
    """
    planned = [entry for path, module in layers(model) for entry in _plan(path, module, policy)]
    if not any(record.recipe is not None for *_, record in planned):
        raise nothing_converted(
            type(model).__name__, {record.weight_path: record.choice.reason for *_, record in planned}
        )
    for module, change, record in planned:
        if record.recipe is not None:
            change(module, record.recipe)
    return [record for *_, record in planned]


def records(model: Any, seen: Mapping[tuple[str, str], tuple[Any, int]]) -> list[Record]:
    """A record of every low-precision layer; layouts and tokens as `watching` saw them, else what the layer says."""
    found = []
    for path, module in layers(model):
        if not isinstance(module, LAYERS):
            continue
        name = KERNELS.get(type(module), "kernel")
        recipe = getattr(module, "recipe", None)
        reason = "rounded to the packed format" if recipe is None else ""
        if getattr(module, "products", "recipe") == "flax":
            reason = SWITCHED_OFF
        parameter = getattr(module, name)
        shape = () if parameter is None else tuple(parameter.shape)
        layout, tokens = seen.get((path, name), (nnx.layout(module), 0))
        kept = layout.stacked(len(shape)) if recipe is not None and layout is not None else None
        found.append(Record(path, name, type(module).__name__, Choice(recipe, reason), shape, kept, tokens))
    return found


@contextlib.contextmanager
def watching(model: Any, seen: dict[tuple[str, str], tuple[Any, int]]) -> Iterator[Any]:
    """Note the layout and tokens of every product of the model's layers in `seen`.

    `model` is a copy to throw away: every layer that conversion knows, converted or not, runs under `SCOPE` from now
    on, so that a trace tells its products from those that the model's author wrote.
    """
    known = {id(module): path for path, module in layers(model)}
    for _, module in layers(model):
        if isinstance(module, (*LAYERS, flax_nnx.Embed)) or nnx_adapter(type(module)) is not None:
            object.__setattr__(module, "__class__", _scoped(type(module)))

    def watch(layer: Any, name: str, contraction: Contraction, x: jax.Array) -> None:
        if id(layer) in known:  # nnx transforms hand out copies: those say their own layout
            seen[known[id(layer)], name] = (contraction.layout, contraction.tokens(x.shape))

    token = nnx.WATCHER.set(watch)
    try:
        with TRACE_KEY((0, id(seen))):  # a cached trace would hide layers
            yield model
    finally:
        nnx.WATCHER.reset(token)


def _scoped(kind: type) -> type:
    """The class with its products under `SCOPE`."""
    if kind not in _SCOPED:
        under = lambda method: lambda self, *args, **options: jax.named_scope(SCOPE)(method)(self, *args, **options)
        methods = {name: under(getattr(kind, name)) for name in ("__call__", "attend") if hasattr(kind, name)}
        _SCOPED[kind] = type(kind)(kind.__name__, (kind,), {**methods, "__module__": kind.__module__})
    return _SCOPED[kind]


def switch(model: Any, patterns: tuple[str, ...], products: nnx.Products) -> None:
    """Set `products` of the layers whose path a pattern finds.

    Raises:
      ValueError: a pattern finds no low-precision layer, or none that is not so already.
    """
    for pattern in patterns:
        found = [m for path, m in layers(model) if hasattr(m, "products") and re.search(pattern, path)]
        if not any(module.products != products for module in found):
            state = "switched off" if products == "flax" else "on"
            raise ValueError(f"{pattern!r} finds no low-precision layer that is not {state} already")
        for module in found:
            module.products = products


def restore_class(module: Any) -> None:
    """Flax's own class again, and nothing of this project left in the module."""
    base = next(kind for kind in type(module).__mro__[1:] if kind not in LAYERS and kind is not nnx.LowPrecision)
    for name in ("recipe", "products", "stored", "lookup"):
        if name in vars(module):
            delattr(module, name)
    object.__setattr__(module, "__class__", base)


def _plan(path: str, module: Any, policy: Policy) -> list[tuple[Any, Callable[[Any, Any], None], Record]]:
    """(module, how to change it, record) of what conversion may do to one module."""
    if isinstance(module, LAYERS):
        choice = Choice(None, "a low-precision layer already")
        return [(module, _leave, Record(path, "", type(module).__name__, choice, ()))]
    plan = []
    adapter = nnx_adapter(type(module))
    if adapter is not None:
        plan.append((adapter.kernel, "linear", lambda module, recipe: _become(module, _class_of(adapter), recipe)))
    elif type(module) is flax_nnx.Embed:
        plan.append(("embedding", "head", lambda module, recipe: _become_embed(module, recipe, None)))
        plan.append(("embedding", "embed", lambda module, recipe: _become_embed(module, None, "packed")))
    elif type(module) is flax_nnx.LayerNorm:
        become = lambda module, recipe: object.__setattr__(module, "__class__", nnx.TCFPLayerNorm)
        plan.append(("scale", "layer_norm", become))
    entries = []
    for kernel, group, change in plan:
        parameter = getattr(module, kernel, None)
        shape = () if parameter is None else tuple(parameter.shape)
        choice = policy.choose(path, module, group, parameter.size if parameter is not None else 0)
        reason = nnx.refusal(module)
        if choice.recipe is not None and reason is not None and group != "layer_norm":
            choice = Choice(None, f"{reason}, which a recipe would override", choice.rule)
        entries.append((module, change, Record(path, kernel, type(module).__name__, choice, shape)))
    return entries


def _leave(module: Any, recipe: Any) -> None:
    raise AssertionError("a layer without a recipe is never changed")


def _become(module: Any, kind: type, recipe: Any) -> None:
    nnx.prepare(module, recipe)
    object.__setattr__(module, "__class__", kind)


def _become_embed(module: Any, recipe: Any, lookup: nnx.Lookup | None) -> None:
    if isinstance(module, nnx.TCFPEmbed):  # both of its groups are converted, one after the other
        if lookup is not None:
            module.lookup = lookup
        return
    nnx.prepare(module, recipe)
    module.lookup = lookup or "float"
    object.__setattr__(module, "__class__", nnx.TCFPEmbed)


def _class_of(adapter: Adapter) -> type:
    """The class that a module of the adapter's type becomes."""
    if adapter.module_type in nnx.TYPES:
        return nnx.TYPES[adapter.module_type]
    key = (adapter.module_type, adapter.forward)
    if key not in _MADE:
        base = adapter.module_type
        forward: Callable[[Any, Multiply, Any], jax.Array] = adapter.forward
        namespace = {"forward": staticmethod(forward), "__call__": nnx.call, "__module__": base.__module__}
        _MADE[key] = type(base)(f"TCFP{base.__name__}", (base, nnx.LowPrecision), namespace)
    return _MADE[key]
