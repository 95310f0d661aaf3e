"""Linen conversion: a model of the same class whose methods run under `nn.intercept_methods`.

Nothing of jax or flax is patched. An interceptor lives on the thread while a converted model's method runs, so other
models in the process never see it; and because caches of traced functions (`jax.jit`, `jax.checkpoint`, `nn.jit`) do
not know interceptors, each conversion also sets a `jax.make_user_context`, which is part of their keys.
"""

import contextlib
import contextvars
import dataclasses
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from flax import errors
from flax import linen as nn

from tcfp_jax import linen, paths
from tcfp_jax.conversion.policy import OWN, SWITCHED_OFF, Choice, Policy
from tcfp_jax.conversion.registry import Adapter, linen_adapter
from tcfp_jax.conversion.report import Record
from tcfp_jax.conversion.tracing import SCOPE
from tcfp_jax.layers import as_contraction
from tcfp_jax.products.contraction import Contraction
from tcfp_jax.recipes import recipe as named_recipe

# Part of the key of every cache of traced functions: without it a function that was traced inside one model would be
# replayed inside another one, past the interceptor.
TRACE_KEY = jax.make_user_context(None)
_NUMBERS = itertools.count(1)
_RUNNING: contextvars.ContextVar[Any] = contextvars.ContextVar("tcfp_linen_run", default=None)


@dataclasses.dataclass(eq=False)
class Conversion:
    """What a converted class was baked with, and what is known of its layers."""

    base: type[nn.Module]
    policy: Policy
    report: Any = None  # the Report of sample inputs, if conversion had some
    shapes: Any = None  # parameters of those inputs, as shapes
    number: int = dataclasses.field(default_factory=lambda: next(_NUMBERS))
    ever: set[str] = dataclasses.field(default_factory=set)  # low-precision layers of any call, switched off or not


class Run:
    """One call of a converted model: the interceptor, and what it met."""

    def __init__(self, conversion: Conversion, records: list[Record] | None) -> None:
        self.conversion, self.records = conversion, records
        self.state: set[str] = set()
        self.skipped: dict[str, str] = {}
        self.stack: list[tuple[str, type, tuple[str, ...]]] = []

    def __call__(self, next_fun: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        """Run one method of one module, as `nn.intercept_methods` asks."""
        # Flax hands over a method, or a partial of one where a lifted transform wrapped it.
        module, function = context.module, getattr(context.orig_method, "func", context.orig_method)
        if module.scope is None or context.method_name == "setup":
            return next_fun(*args, **kwargs)
        path = self._path(module)
        self.stack.append((path, type(module), module.scope.path))
        try:
            adapter = linen_adapter(function)
            # `init` runs Flax's own code, so that parameters are those of the float model.
            if adapter is None or module.is_initializing():
                return next_fun(*args, **kwargs)
            return self._layer(adapter, module, path, next_fun, args, kwargs)
        finally:
            self.stack.pop()

    def _path(self, module: nn.Module) -> str:
        """The module's path; one that is applied by itself inside another (a tied head) is named below that one."""
        path = "/".join(module.scope.path) if module.scope is not None else ""
        # `layer.apply(...)` inside of a model has a root scope, whose path is empty; the stack knows who called it.
        if self.stack and not path:
            parent, kind, scope_path = self.stack[-1]
            if scope_path or type(module) is not kind:
                return paths.join(parent, module.name or type(module).__name__)
        return path

    def _layer(
        self, adapter: Adapter, module: Any, path: str, next_fun: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        shape = _kernel_shape(module, adapter.kernel)
        choice = self._choose(adapter, module, path, shape)
        record = Record(path, adapter.kernel, type(module).__name__, choice, shape)
        if choice.recipe is not None or choice.reason == SWITCHED_OFF:
            self.conversion.ever.add(path)
        scope = contextlib.nullcontext() if self.records is None else jax.named_scope(SCOPE)
        with scope:
            if choice.recipe is not None:
                return self._converted(adapter, module, record, args, kwargs)
            self.skipped[path] = choice.reason
            self._note(record)
            if adapter.base is not None:  # our own layer switched off: the method that it overrides is Flax's
                return linen.body(adapter.base, adapter.method)(module, *args, **kwargs)
            return next_fun(*args, **kwargs)

    def _choose(self, adapter: Adapter, module: Any, path: str, shape: tuple[int, ...]) -> Choice:
        policy = self.conversion.policy
        if adapter.base is not None:  # a layer that the model's author gave a recipe
            if policy.is_off(path):
                return Choice(None, SWITCHED_OFF)
            linen.check_unused(module, adapter.base)
            return Choice(named_recipe(getattr(module, "recipe", "tcfp12")), OWN)
        choice = policy.choose(path, module, adapter.group, math.prod(shape))
        reason = linen.refusal(module, adapter.module_type)
        if choice.recipe is not None and reason is not None:
            return Choice(None, f"{reason}, which a recipe would override", choice.rule)
        return choice

    def _converted(self, adapter: Adapter, module: Any, record: Record, args: Any, kwargs: Any) -> Any:
        recipe: Any = record.recipe
        plain, called = linen.multiplier(module, recipe), []

        def multiply(equation: str | Contraction, x: jax.Array, kernel: Any, *, name: str = "kernel") -> jax.Array:
            contraction = as_contraction(equation, x)
            called.append(contraction)
            tokens = contraction.tokens(x.shape)
            self._note(dataclasses.replace(record, layout=contraction.layout, tokens=tokens))
            # Multiplying by the float kernel instead would be silently slower and another model than the one trained.
            if record.weight_path in self.state and linen.stored_weight(module, name) is None:
                raise ValueError(
                    f"the state holds {record.weight_path}, but a lifted transform keeps it from the layer; pass it to "
                    'the converted model\'s own apply, or add "tcfp": 0 to variable_axes of the nn.scan or nn.vmap'
                )
            return plain(contraction, x, kernel, name=name)

        try:
            y = adapter.forward(module, multiply, *args, **kwargs)
        except errors.ScopeParamNotFoundError as error:
            if module.has_variable("params", adapter.kernel) or linen.stored_weight(module, adapter.kernel) is None:
                raise
            raise NotImplementedError(
                f"{record.path!r} has a quantized kernel only, but its adapter reads the float one; let the adapter "
                "take it from tcfp_jax.linen.kernel_of(layer, name, init, shape), or leave the layer float"
            ) from error
        if not called and adapter.group in ("linear", "head"):
            raise ValueError(
                f"the adapter of {adapter.module_type.__name__} never called multiply at {record.path!r}; it must "
                "compute the layer's product with it"
            )
        if adapter.group not in ("linear", "head"):
            self._note(record)
        return y

    def _note(self, record: Record) -> None:
        if self.records is not None:
            self.records.append(record)


@contextlib.contextmanager
def running(conversion: Conversion, records: list[Record] | None = None) -> Iterator[Run]:
    """Intercept layers as the conversion says; entering the running conversion again adds nothing."""
    current = _RUNNING.get()
    if current is not None and current.conversion is conversion and records is None:
        yield current
        return
    run = Run(conversion, records)
    # A recording call has a key of its own: a cached trace would hide layers from it.
    key = (conversion.number, next(_NUMBERS) if records is not None else 0)
    token = _RUNNING.set(run)
    try:
        with TRACE_KEY(key), nn.intercept_methods(run):
            yield run
    finally:
        _RUNNING.reset(token)


def beside(variables: Any) -> Any:
    """Variables with the `tcfp` collection moved beside the parameters, where every lifted transform carries it.

    Raises:
      ValueError: the state holds a parameter that the parameters lack.

    >>> beside({"params": {"a": {"bias": 1}}, "tcfp": {"a": {"kernel": 2}}})
    {'params': {'a': {'bias': 1, 'kernel@tcfp': 2}}}
    """
    if not isinstance(variables, Mapping) or not variables.get(linen.COLLECTION):
        return variables
    rest = {name: value for name, value in variables.items() if name != linen.COLLECTION}
    params, state = rest.get("params", {}), variables[linen.COLLECTION]
    missing = [name for name, value in state.items() if isinstance(value, Mapping) and name not in params]
    if missing:
        raise ValueError(
            f"the state holds {missing[0]!r}, but the parameters have only {sorted(params)}; pass the state of these "
            "parameters"
        )
    return {**rest, "params": _beside(params, state)}


def without_state(variables: Any) -> Any:
    """Variables that a model returned, without what `beside` added.

    >>> without_state({"params": {"a": {"bias": 1, "kernel@tcfp": 2}}})
    {'params': {'a': {'bias': 1}}}
    """
    if not isinstance(variables, Mapping):
        return variables
    return {name: without_state(value) for name, value in variables.items() if not name.endswith(linen.BESIDE)}


def _beside(params: Any, state: Any) -> dict[str, Any]:
    """Parameters with each stored weight beside the parameter that it is made of, under a name of its own.

    A lifted transform is told which collections it maps, and no model names `tcfp`; but every one names `params`, and
    stacks, slices and broadcasts what is beside a kernel exactly as it does the kernel.
    """
    merged = dict(params)
    for name, value in state.items():
        if not isinstance(value, Mapping):
            merged[name + linen.BESIDE] = value
        elif isinstance(merged.get(name, {}), Mapping):
            merged[name] = _beside(merged.get(name, {}), value)
    return merged


def _kernel_shape(module: Any, name: str) -> tuple[int, ...]:
    if module.has_variable("params", name):
        return tuple(jax.numpy.shape(nn.meta.unbox(module.get_variable("params", name))))
    stored = linen.stored_weight(module, name)
    return () if stored is None else tuple(stored.shape)


def bake(model: nn.Module, conversion: Conversion) -> Any:
    """The model as an instance of a subclass of its class, of the same name, that runs as the conversion says."""
    base = conversion.base
    namespace: dict[str, Any] = {
        "__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__,
        "tcfp_conversion": conversion, "apply": nn.nowrap(_apply_of(base)),
    }  # fmt: skip
    for kind in reversed(base.__mro__):
        if issubclass(kind, nn.Module) and kind is not nn.Module:
            for name, value in vars(kind).items():
                wrapped = getattr(value, "method_handler_wrapped", False)
                if wrapped and name != "setup" and (name == "__call__" or not name.startswith("__")):
                    namespace[name] = _method_of(base, name)
    metaclass: Any = type(base)
    return metaclass(base.__name__, (base,), namespace)(**fields_of(model), parent=None)


def unbaked(model: nn.Module, conversion: Conversion) -> Any:
    """The model as an instance of the class that it had."""
    return conversion.base(**fields_of(model), parent=None)


def fields_of(model: nn.Module) -> dict[str, Any]:
    """Arguments that make the same model again."""
    return {f.name: getattr(model, f.name) for f in dataclasses.fields(model) if f.init and f.name != "parent"}


def conversion_of(model: Any) -> Conversion | None:
    """The conversion of a converted Linen model, or None."""
    return getattr(type(model), "tcfp_conversion", None)


def _method_of(base: type[nn.Module], name: str) -> Callable[..., Any]:
    original = getattr(base, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        with running(type(self).tcfp_conversion) as run:
            if self.scope is not None:
                state = paths.entries(self.variables.get(linen.COLLECTION, {}))
                run.state |= {paths.join(*self.scope.path, path) for path in state}
            return original(self, *args, **kwargs)

    # Not functools.wraps: it would copy the mark by which Linen knows methods that it has wrapped already.
    method.__name__, method.__qualname__, method.__doc__ = name, original.__qualname__, original.__doc__
    method.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    return method


def _apply_of(base: type[nn.Module]) -> Callable[..., Any]:
    def apply(self: Any, variables: Any, *args: Any, **kwargs: Any) -> Any:
        """As `flax.linen.Module.apply`; the `tcfp` collection reaches every layer under lifted transforms too."""
        conversion = type(self).tcfp_conversion
        with running(conversion) as run:
            if isinstance(variables, Mapping):
                run.state |= set(paths.entries(variables.get(linen.COLLECTION, {})))
            result = base.apply(self, beside(variables), *args, **kwargs)
            # While records are taken, the one who takes them judges an empty conversion, with the whole report.
            whole = kwargs.get("method") in (None, "__call__") and run.records is None
            if whole and not conversion.ever:
                raise nothing_converted(type(self).__name__, run.skipped)
        if kwargs.get("mutable", False) is not False:
            return result[0], without_state(result[1])
        return result

    return apply


def nothing_converted(name: str, skipped: Mapping[str, str]) -> ValueError:
    """The error of a conversion that would change nothing."""
    reasons = [f"{path or '(root)'}: {reason}" for path, reason in skipped.items()] or ["it has no layer that is known"]
    return ValueError(
        f"no layer of {name} was converted: {'; '.join(reasons[:5])}"
        f"{f' and {len(reasons) - 5} more' if len(reasons) > 5 else ''}; name layers in rules, widen include, or use "
        "register_adapter"
    )
