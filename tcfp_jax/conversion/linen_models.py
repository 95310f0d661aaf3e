"""Converted Linen models: instances of a subclass of the model's class, whose methods
run as transformed functions.

A method of a bound module is a pure function of its variables, its rngs and its
arguments. The subclass splits the module, transforms that function, and writes back
what changed. It overrides the single method through which Linen runs every method of a
module, so that `apply`, `bind`, `nn.apply`, and a converted model inside a model that
is not converted, all go the same way. It also overrides `apply`, which takes functions
that are not methods of the module. The original class runs inside: no call of it is
intercepted, and no cache of traced functions can tell the difference.
"""

import contextlib
import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import Scope
from flax.linen import module as linen_module

from tcfp_jax import paths
from tcfp_jax.conversion.policy import Policy
from tcfp_jax.conversion.report import Examined
from tcfp_jax.conversion.transform import Transformed, trace
from tcfp_jax.layers.linen import COLLECTION, OFF, RNG, switched_off
from tcfp_jax.paths import PyTree
from tcfp_jax.weights.parameter import is_quantized
from tcfp_jax.weights.stored import Stored

# Nested mappings, of arrays or of shapes.
_Tree = Mapping[str, PyTree]


@dataclasses.dataclass(eq=False)
class Conversion:
    """Origin of a converted class, and the findings of its sample inputs.

    Attributes:
      base: the model's own class.
      policy: the request.
      found: the decisions for the sample inputs, if some were given.
      shapes: shapes of the parameters for these inputs.
      awaited: whether `find_weights` gave out the weights, and no call has had their
        stored form since.
    """

    base: type[nn.Module]
    policy: Policy
    found: Examined | None = None
    shapes: _Tree | None = None
    awaited: bool = False


def converted(model: nn.Module, conversion: Conversion) -> Any:
    """Return the model as an instance of a subclass of its class, with the same
    name.
    """
    base = conversion.base
    names = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }
    metaclass: Any = type(base)
    kind = metaclass(base.__name__, (base,), names)
    # Set after the class is made: Linen would take these functions for methods of a
    # layer and wrap them.
    kind.tcfp_conversion, kind._call_wrapped_method, kind.__reduce__ = (
        conversion,
        _call,
        _reduce,
    )
    kind.apply = _apply
    return kind(**_fields_of(model), parent=None)


def plain(model: nn.Module, base: type[nn.Module] | None = None) -> nn.Module:
    """Return the model, unbound, as an instance of the class that it had before, or of
    Flax's class of a layer.
    """
    conversion, fields = conversion_of(model), _fields_of(model)
    if base is not None:
        return base(
            **{name: fields[name] for name in fields if name != "recipe"}, parent=None
        )
    return model if conversion is None else conversion.base(**fields, parent=None)


def _fields_of(model: nn.Module) -> dict[str, Any]:
    """Return the arguments that make the same model again."""
    return {
        f.name: getattr(model, f.name)
        for f in dataclasses.fields(model)
        if f.init and f.name != "parent"
    }


def conversion_of(model: object) -> Conversion | None:
    """Return the conversion of a converted Linen model, or None."""
    return getattr(type(model), "tcfp_conversion", None)


def examine(
    model: nn.Module, policy: Policy, inputs: tuple[PyTree, ...], options: _Tree
) -> tuple[Examined, _Tree]:
    """Return the decisions about a call of an unconverted model, and the shapes of its
    parameters.
    """
    rngs = {name: jax.random.key(0) for name in ("params", "dropout", "tcfp")}
    variables = nn.meta.unbox(
        _shapes(
            lambda *args, **kwargs: model.init(rngs, *args, **kwargs), inputs, options
        )
    )
    rest = {name: value for name, value in variables.items() if name != "params"}

    def call(params: _Tree, rest: _Tree, *args: PyTree, **kwargs: PyTree) -> PyTree:
        with switched_off(policy.off, policy.is_off):
            return model.apply(
                {"params": params, **rest},
                *args,
                rngs=rngs,
                mutable=nn.DenyList("params"),
                **kwargs,
            )

    params = variables.get("params", {})
    return (
        Transformed(call, policy, 0, stateful=True).examine(
            params, rest, *inputs, **options
        ),
        params,
    )


def _own(self: Any) -> Any:
    """Return the converted class of a module; `nn.map_variables` and others make
    classes of it.
    """
    return next(kind for kind in type(self).__mro__ if "tcfp_conversion" in vars(kind))


def _apply(
    self: Any, variables: _Tree, *args: PyTree, method: Any = None, **kwargs: PyTree
) -> PyTree:
    """Run `nn.Module.apply`, with a function that is not a method of the module
    converted as if it were one.

    Models of transformers encode and decode by such functions, which take a part of the
    module and call it.
    """
    if isinstance(method, str) and isinstance(getattr(self, method), nn.Module):
        name = method
        method = lambda module, *args, **kwargs: getattr(module, name)(*args, **kwargs)
    if callable(method) and not hasattr(method, "method_handler_wrapped"):
        given = method

        @functools.wraps(given)
        def method(module: nn.Module, *args: PyTree, **kwargs: PyTree) -> PyTree:
            return _call(module, given, args, kwargs)

    return super(_own(self), self).apply(variables, *args, method=method, **kwargs)


def _call(
    self: Any,
    fun: Callable[..., PyTree],
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
) -> PyTree:
    """Run any method of a converted module; it overrides
    `nn.Module._call_wrapped_method`.
    """
    original, name = (
        super(_own(self), self)._call_wrapped_method,
        getattr(fun, "__name__", "function"),
    )
    if self.scope is None or self.is_initializing() or name == "setup":
        # `init` runs Flax's own code, so that it makes the float model's parameters
        return original(fun, args, kwargs)
    conversion, scope = type(self).tcfp_conversion, self.scope
    # The clone runs the original class on its own scope, and so cannot come back here.
    model = self.clone(parent=None, _deep_clone=True, _reset_names=True)
    object.__setattr__(model, "__class__", conversion.base)
    # `capture_intermediates` of an `apply` around this call
    stack = linen_module._context.capture_stack
    pure = nn.apply(
        lambda module, *args, **kwargs: nn.Module._call_wrapped_method(
            module, fun, args, kwargs
        ),
        model,
        mutable=scope.mutable,
        capture_intermediates=stack[-1] if stack else False,
    )
    variables = dict(self.variables)
    state, mutable = (
        paths.entries(variables.pop(COLLECTION, {})),
        scope.mutable is not False,
    )
    rngs, params = _rngs(scope), variables.pop("params", {})
    _warn_if_forgotten(conversion, params, state)
    absent = {
        path: weight
        for path, weight in state.items()
        if path not in paths.leaves(params)
    }
    if absent:
        # The sample inputs gave shapes, unless a stored weight has another size there.
        size, known = (
            lambda leaf: math.prod(leaf.shape),
            paths.leaves(conversion.shapes or {}),
        )
        fits = all(
            path in known and size(known[path]) == size(weight)
            for path, weight in absent.items()
        )
        shapes = conversion.shapes if fits else None
        if shapes is None:
            shapes = _shapes_of_call(model, fun, rngs, args, kwargs)
        _check_parameters(type(self).__name__, absent, params, shapes)
        params = _completed(
            params, shapes, _cast(paths.leaves(params), paths.leaves(shapes))
        )
        # Another method than `__call__` may have fewer parameters than the state has
        # weights.
        state = {
            path: weight
            for path, weight in state.items()
            if path in paths.leaves(params)
        }

    def call(
        params: _Tree, rest: _Tree, rngs: _Tree, args: tuple[PyTree, ...], kwargs: _Tree
    ) -> PyTree:
        # Patterns of a converted model around this one are not for layers of this one:
        # having none is a choice, too.
        switched = conversion.policy.off or OFF.get() is not None
        off = (
            switched_off(conversion.policy.off, conversion.policy.is_off)
            if switched
            else contextlib.nullcontext()
        )
        with off:
            return pure({**rest, "params": params}, *args, rngs=rngs, **kwargs)

    # A helper method may multiply nothing, and sample inputs have shown already that
    # the call itself does.
    must = conversion.found is None and name == "__call__"
    run = Transformed(
        call, conversion.policy, 0, name=type(self).__name__, stateful=True, must=must
    )
    result = run(
        params, variables, rngs, args, kwargs, stored=state, product_key=rngs.get(RNG)
    )
    _check_result(type(self).__name__, name, result)
    if not (mutable or (stack and stack[-1])):
        return result
    result, changed = result
    for collection, tree in changed.items():
        for name, value in tree.items():
            if scope.is_mutable_collection(collection):
                scope.put_variable(collection, name, value)
    return result


def _warn_if_forgotten(
    conversion: Conversion, params: _Tree, state: Mapping[str, Stored]
) -> None:
    """Say once that a model is trained without the stored weights that its optimizer
    keeps.
    """
    if not conversion.awaited:
        return
    leaves = jax.tree.leaves(params, is_leaf=is_quantized)
    # A tracer of a derivative is the one sign of training that a call can see.
    trains = any(
        type(leaf).__name__ in ("JVPTracer", "LinearizeTracer") for leaf in leaves
    )
    if state or any(map(is_quantized, leaves)):
        conversion.awaited = False
    elif trains:
        conversion.awaited = False
        warnings.warn(
            "a converted Linen model is trained without its optimizer's stored"
            ' weights: find_weights was called, and apply got no "tcfp" collection;'
            " weights are quantized at each use, without error feedback. Use"
            ' model.apply({"params": params, "tcfp": layer_state(opt_state)}, x)',
            stacklevel=2,
        )


def _check_result(model: str, method: str, result: object) -> None:
    """Raise a TypeError if a method returns a part of the model: the scope of the part
    ended with the method.
    """
    part = next(
        (leaf for leaf in jax.tree.leaves(result) if isinstance(leaf, nn.Module)), None
    )
    if part is not None:
        raise TypeError(
            f"{method} of the converted {model} returns a {type(part).__name__}, whose"
            " scope ended with the method; call it in the same function:"
            f" model.apply(variables, x, method=lambda module, x: module.{method}()(x))"
        )


def _rngs(scope: Scope) -> dict[str, jax.Array]:
    """Return the rngs of a call. The first call gets the model's own, so that it draws
    as the float model does.
    """
    found = {}
    for name, lazy in scope.rngs.items():
        found[name] = (
            scope.make_rng(name) if scope.rng_counters[name] else lazy.as_jax_rng()
        )
        scope.rng_counters[name] += 1
    return found


def _shapes_of_call(
    model: nn.Module,
    fun: Callable[..., PyTree],
    rngs: _Tree,
    args: tuple[PyTree, ...],
    kwargs: _Tree,
) -> _Tree:
    """Return the shapes of the parameters that a method makes when it initializes the
    model.
    """
    init = nn.init(
        lambda module, *args, **kwargs: nn.Module._call_wrapped_method(
            module, fun, args, kwargs
        ),
        model,
    )
    keys = {name: jax.random.key(0) for name in ("params", "dropout", *rngs)}
    try:
        # `init` may make float32 parameters for a bfloat16 input
        with jax.numpy_dtype_promotion("standard"):
            shapes = _shapes(
                lambda *args, **kwargs: init(keys, *args, **kwargs), args, kwargs
            )
    except Exception as error:
        error.add_note(
            f"{type(model).__name__} was initialized with these arguments to know the"
            " shapes of its stored weights; if it cannot be initialized with them, for"
            " example because they come with a cache, pass sample inputs to"
            " convert_to_tcfp"
        )
        raise
    return nn.meta.unbox(shapes).get("params", {})


def _shapes(
    function: Callable[..., PyTree], args: tuple[PyTree, ...], kwargs: _Tree
) -> PyTree:
    """Run `jax.eval_shape` with arguments of which some are not arrays."""
    program = trace(function, args, kwargs)
    return program.rebuild(program.outputs)


def _check_parameters(
    name: str, absent: Mapping[str, Stored], params: _Tree, shapes: _Tree
) -> None:
    """Raise a ValueError if the state holds a weight that is not a parameter of the
    model.
    """
    leaves = paths.leaves(shapes)
    # A layer that lost its parameters to the state keeps its place among them, even if
    # this method does not reach it.
    has_place = lambda path: paths.find(params, path.split("/")[:-1]) is not None
    unknown = [path for path in absent if path not in leaves and not has_place(path)]
    if unknown:
        raise ValueError(
            f"the state holds {unknown[0]!r}, which is not a parameter of {name}; its"
            f" parameters are {sorted(leaves)[:8]}; pass the state of these parameters"
        )


def _completed(
    params: PyTree, shapes: PyTree, cast: Mapping[jnp.dtype, jnp.dtype]
) -> PyTree:
    """Return the parameters, with a shape for each one of which only the stored form
    exists.
    """
    if not isinstance(shapes, Mapping):
        return (
            jax.ShapeDtypeStruct(shapes.shape, cast.get(shapes.dtype, shapes.dtype))
            if params is None
            else params
        )
    held = {} if params is None else params
    return {
        **held,
        **{
            name: _completed(held.get(name), below, cast)
            for name, below in shapes.items()
        },
    }


def _cast(held: _Tree, shapes: _Tree) -> dict[jnp.dtype, jnp.dtype]:
    """Map each dtype of `init` to the dtype that all remaining parameters of it have
    now.

    A model whose parameters were cast to bfloat16 answers in bfloat16, and must still
    do so without its kernels.
    """
    became: dict[jnp.dtype, set[jnp.dtype]] = {}
    for path in set(held) & set(shapes):
        became.setdefault(shapes[path].dtype, set()).add(held[path].dtype)
    return {
        dtype: next(iter(found)) for dtype, found in became.items() if len(found) == 1
    }


def _reduce(self: Any) -> tuple[object, ...]:
    """Pickle a converted model without its class, which no module holds."""
    conversion = type(self).tcfp_conversion
    return converted, (plain(self), Conversion(conversion.base, conversion.policy))
