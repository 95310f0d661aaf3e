"""Converted Linen models: instances of a subclass of the model's class.

The subclass runs each method as a transformed function. A method of a bound module is a
pure function of its variables, its rngs and its arguments. The subclass splits the
module, transforms that function, and writes back what changed. It overrides the single
method through which Linen runs every method of a module, so that `apply`, `bind`,
`nn.apply`, and a converted model inside a model that is not converted, all go the same
way. It also overrides `apply`, which takes functions that are not methods of the
module. The original class runs inside: no call of it is intercepted, and no cache of
traced functions can tell the difference.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import Scope
from flax.linen import module as linen_module
from jax import Array

from tcfp_jax import paths
from tcfp_jax.conversion.policy import Policy
from tcfp_jax.conversion.report import Examined
from tcfp_jax.conversion.transform import Transformed, trace, warn_if_forgotten
from tcfp_jax.layers.linen import COLLECTION, OFF, RNG, switched_off
from tcfp_jax.paths import Args, Function, PyTree, Tree
from tcfp_jax.weights.stored import Stored


@dataclasses.dataclass(eq=False)
class Conversion:
    """Origin of a converted class, and the findings of its sample inputs.

    Attributes:
      base: the model's own class.
      policy: the request.
      found: the decisions for the sample inputs, if some were given.
      shapes: shapes of the parameters for these inputs.
    """

    base: type[nn.Module]
    policy: Policy
    found: Examined | None = None
    shapes: Tree | None = None


def converted(model: nn.Module, conversion: Conversion) -> Any:
    """Return the model as an instance of a subclass of its class.

    The subclass has the same name.
    """
    base = conversion.base
    names = ("__module__", "__qualname__", "__doc__")
    namespace = {name: getattr(base, name) for name in names}
    metaclass: Any = type(base)
    kind = metaclass(base.__name__, (base,), namespace)
    # Set after the class is made: Linen would take these functions for methods of a
    # layer and wrap them.
    kind.tcfp_conversion = conversion
    kind._call_wrapped_method = _call
    kind.__reduce__ = _reduce
    kind.apply = _apply
    return kind(**_fields_of(model), parent=None)


def plain(model: nn.Module, base: type[nn.Module] | None = None) -> nn.Module:
    """Return the model, unbound, as an instance of the class that it had before.

    With a `base`, Flax's class of a layer of ours, it is an instance of that.
    """
    fields = _fields_of(model)
    if base is not None:
        fields.pop("recipe")
        return base(**fields, parent=None)
    conversion = conversion_of(model)
    return model if conversion is None else conversion.base(**fields, parent=None)


def _fields_of(model: nn.Module) -> dict[str, Any]:
    """Return the arguments that make the same model again."""
    return {
        field.name: getattr(model, field.name)
        for field in dataclasses.fields(model)
        if field.init and field.name != "parent"
    }


def conversion_of(model: object) -> Conversion | None:
    """Return the conversion of a converted Linen model, or None."""
    return getattr(type(model), "tcfp_conversion", None)


def examine(
    model: nn.Module, policy: Policy, inputs: Args, options: Tree
) -> tuple[Examined, Tree]:
    """Return the decisions about a call of an unconverted model.

    The shapes of its parameters come with them.
    """
    rngs = {name: jax.random.key(0) for name in ("params", "dropout", "tcfp")}

    def init(*args: PyTree, **kwargs: PyTree) -> PyTree:
        return model.init(rngs, *args, **kwargs)

    def call(params: Tree, rest: Tree, *args: PyTree, **kwargs: PyTree) -> PyTree:
        mutable = nn.DenyList("params")
        with switched_off(policy.off, policy.is_off):
            return model.apply(
                {"params": params, **rest}, *args, rngs=rngs, mutable=mutable, **kwargs
            )

    variables = dict(nn.meta.unbox(_shapes(init, inputs, options)))
    params = variables.pop("params", {})
    run = Transformed(call, policy, 0, stateful=True)
    return run.examine(params, variables, *inputs, **options), params


def _own(self: Any) -> Any:
    """Return the converted class of a module.

    `nn.map_variables` and others make classes of it.
    """
    return next(kind for kind in type(self).__mro__ if "tcfp_conversion" in vars(kind))


def _apply(
    self: Any, variables: Tree, *args: PyTree, method: Any = None, **kwargs: PyTree
) -> PyTree:
    """Run `nn.Module.apply`, and convert a function that is not a method of the module.

    Models of transformers encode and decode by such functions, which take a part of the
    module and call it.
    """
    if isinstance(method, str) and isinstance(getattr(self, method), nn.Module):
        name = method

        def method(module: nn.Module, *args: PyTree, **kwargs: PyTree) -> PyTree:
            return getattr(module, name)(*args, **kwargs)

    if callable(method) and not hasattr(method, "method_handler_wrapped"):
        given = method

        @functools.wraps(given)
        def method(module: nn.Module, *args: PyTree, **kwargs: PyTree) -> PyTree:
            return _call(module, given, args, kwargs)

    return super(_own(self), self).apply(variables, *args, method=method, **kwargs)


def _call(
    self: Any,
    fun: Function,
    args: Args,
    kwargs: dict[str, PyTree],
) -> PyTree:
    """Run any method of a converted module.

    It overrides `nn.Module._call_wrapped_method`.
    """
    name = getattr(fun, "__name__", "function")
    scope = self.scope
    if scope is None or self.is_initializing() or name == "setup":
        # `init` runs Flax's own code, so that it makes the float model's parameters
        return super(_own(self), self)._call_wrapped_method(fun, args, kwargs)
    conversion = type(self).tcfp_conversion
    policy = conversion.policy
    # The clone runs the original class on its own scope, and so cannot come back here.
    model = self.clone(parent=None, _deep_clone=True, _reset_names=True)
    object.__setattr__(model, "__class__", conversion.base)
    # `capture_intermediates` of an `apply` around this call
    stack = linen_module._context.capture_stack
    captured = stack[-1] if stack else False
    pure = nn.apply(
        _unwrapped(fun), model, mutable=scope.mutable, capture_intermediates=captured
    )

    def call(params: Tree, rest: Tree, rngs: Tree, args: Args, kwargs: Tree) -> PyTree:
        # Patterns of a converted model around this one are not for layers of this one:
        # having none is a choice, too.
        off: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if policy.off or OFF.get() is not None:
            off = switched_off(policy.off, policy.is_off)
        with off:
            return pure({**rest, "params": params}, *args, rngs=rngs, **kwargs)

    variables = dict(self.variables)
    state: Mapping[str, Stored] = {}
    if COLLECTION in variables:
        state = paths.entries(variables.pop(COLLECTION))
    params = variables.pop("params", {})
    rngs = _rngs(scope)
    warn_if_forgotten(
        conversion,
        (params, state),
        "Linen",
        'and apply got no "tcfp" collection; weights are quantized at each use, without'
        ' error feedback. Use model.apply({"params": params, "tcfp":'
        " layer_state(opt_state)}, x)",
    )
    if state:
        shapes_of_call = functools.partial(
            _shapes_of_call, model, fun, rngs, args, kwargs
        )
        params, state = _with_absent(conversion, params, state, shapes_of_call)
    # A helper method may multiply nothing, and sample inputs have shown already that
    # the call itself does.
    must = conversion.found is None and name == "__call__"
    kind = type(self).__name__
    run = Transformed(call, policy, 0, name=kind, stateful=True, must=must)
    result = run(
        params, variables, rngs, args, kwargs, stored=state, product_key=rngs.get(RNG)
    )
    _check_result(kind, name, result)
    if scope.mutable is False and not captured:
        return result
    result, changed = result
    for collection, tree in changed.items():
        if scope.is_mutable_collection(collection):
            for variable, value in tree.items():
                scope.put_variable(collection, variable, value)
    return result


def _unwrapped(fun: Function) -> Function:
    """Return a method as a function that Flax's own code runs."""

    def method(module: nn.Module, *args: PyTree, **kwargs: PyTree) -> PyTree:
        return nn.Module._call_wrapped_method(module, fun, args, kwargs)

    return method


def _with_absent(
    conversion: Conversion,
    params: Tree,
    state: Mapping[str, Stored],
    shapes_of_call: Callable[[], Tree],
) -> tuple[Tree, Mapping[str, Stored]]:
    """Return the parameters, with shapes for those that only the state has.

    The state comes with them, without weights that are none of these parameters.
    """
    held = paths.leaves(params)
    absent = {path: weight for path, weight in state.items() if path not in held}
    if not absent:
        return params, state
    # The sample inputs gave shapes, unless a stored weight has another size there.
    shapes = conversion.shapes or {}
    leaves = paths.leaves(shapes)
    for path, weight in absent.items():
        known = leaves.get(path)
        if known is None or math.prod(known.shape) != math.prod(weight.shape):
            shapes = shapes_of_call()
            leaves = paths.leaves(shapes)
            break
    _check_parameters(conversion.base.__name__, absent, params, leaves)
    params = _completed(params, shapes, _cast(held, leaves))
    # Another method than `__call__` may have fewer parameters than the state has
    # weights.
    given = paths.leaves(params)
    return params, {path: weight for path, weight in state.items() if path in given}


def _check_result(model: str, method: str, result: object) -> None:
    """Raise a TypeError if a method returns a part of the model.

    The scope of the part ended with the method.
    """
    for part in jax.tree.leaves(result):
        if isinstance(part, nn.Module):
            raise TypeError(
                f"{method} of the converted {model} returns a {type(part).__name__},"
                " whose scope ended with the method; call it in the same function:"
                " model.apply(variables, x, method=lambda module, x:"
                f" module.{method}()(x))"
            )


def _rngs(scope: Scope) -> dict[str, Array]:
    """Return the rngs of a call.

    The first call gets the model's own, so that it draws as the float model does.
    """
    found = {}
    for name, lazy in scope.rngs.items():
        is_first = not scope.rng_counters[name]
        found[name] = lazy.as_jax_rng() if is_first else scope.make_rng(name)
        scope.rng_counters[name] += 1
    return found


def _shapes_of_call(
    model: nn.Module,
    fun: Function,
    rngs: Tree,
    args: Args,
    kwargs: Tree,
) -> Tree:
    """Return the shapes of the parameters that a method makes in `init`."""
    keys = {name: jax.random.key(0) for name in ("params", "dropout", *rngs)}
    init = functools.partial(nn.init(_unwrapped(fun), model), keys)
    try:
        # `init` may make float32 parameters for a bfloat16 input
        with jax.numpy_dtype_promotion("standard"):
            shapes = _shapes(init, args, kwargs)
    except Exception as error:
        error.add_note(
            f"{type(model).__name__} was initialized with these arguments to know the"
            " shapes of its stored weights; if it cannot be initialized with them, for"
            " example because they come with a cache, pass sample inputs to"
            " convert_to_tcfp"
        )
        raise
    return nn.meta.unbox(shapes).get("params", {})


def _shapes(function: Function, args: Args, kwargs: Tree) -> PyTree:
    """Run `jax.eval_shape` with arguments of which some are not arrays."""
    program = trace(function, args, kwargs)
    return program.rebuild(program.outputs)


def _check_parameters(
    name: str, absent: Iterable[str], params: Tree, leaves: Tree
) -> None:
    """Raise a ValueError if the state holds a weight that is not a parameter."""
    for path in absent:
        # A layer that lost its parameters to the state keeps its place among them, even
        # if this method does not reach it.
        has_place = paths.find(params, path.split("/")[:-1]) is not None
        if path not in leaves and not has_place:
            raise ValueError(
                f"the state holds {path!r}, which is not a parameter of {name}; its"
                f" parameters are {sorted(leaves)[:8]}; pass the state of these"
                " parameters"
            )


def _completed(
    params: PyTree, shapes: PyTree, cast: Mapping[jnp.dtype, jnp.dtype]
) -> PyTree:
    """Return the parameters, with a shape for each one that only the state has."""
    if isinstance(shapes, Mapping):
        tree = {} if params is None else dict(params)
        for name, below in shapes.items():
            tree[name] = _completed(tree.get(name), below, cast)
        return tree
    if params is not None:
        return params
    return jax.ShapeDtypeStruct(shapes.shape, cast.get(shapes.dtype, shapes.dtype))


def _cast(held: Tree, shapes: Tree) -> dict[jnp.dtype, jnp.dtype]:
    """Map each dtype of `init` to the one that all remaining parameters of it have now.

    A model whose parameters were cast to bfloat16 answers in bfloat16, and must still
    do so without its kernels.
    """
    became: dict[jnp.dtype, set[jnp.dtype]] = {}
    for path in set(held) & set(shapes):
        became.setdefault(shapes[path].dtype, set()).add(held[path].dtype)
    return {dtype: found.pop() for dtype, found in became.items() if len(found) == 1}


def _reduce(self: Any) -> tuple[object, ...]:
    """Pickle a converted model without its class, which no module holds."""
    conversion = type(self).tcfp_conversion
    return converted, (plain(self), Conversion(conversion.base, conversion.policy))
