"""Converted NNX models: modules with a subclass of their class.

The subclass runs each method as a transformed function (`nnx_calls`). Classes change in
place, so that references to modules and to their `Param`s stay valid.
"""

import inspect
from typing import Any

import jax
from flax import nnx

from tcfp_jax.conversion.nnx_calls import Call
from tcfp_jax.conversion.nnx_display import displays_of
from tcfp_jax.conversion.nnx_modules import (
    KEYS,
    PATH,
    SAMPLE,
    STORED,
    conversion_of,
    is_variable,
    modules_of,
    nodes_of,
    own_class,
    strip,
)
from tcfp_jax.conversion.policy import Policy
from tcfp_jax.conversion.report import Examined
from tcfp_jax.conversion.transform import AWAITED
from tcfp_jax.paths import Args, Function, PyTree, Tree

Sample = tuple[Args, Tree]  # arguments and options of a call
# One class for equal conversions: nnx.jit compiles again for another class.
_CLASSES: dict[tuple[type, Policy], type] = {}


def _shape_of(leaf: Any) -> Any:
    if not hasattr(leaf, "dtype"):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def convert(
    model: nnx.Module,
    chosen: Policy,
    held: list[str] | None,
    sample: Sample | None,
    keys: nnx.RngStream | None,
) -> None:
    """Give converted classes to the modules that hold weights at these paths.

    Args:
      model: the model.
      chosen: the policy.
      held: paths of weights; None if they are unknown, for any parameter.
      sample: the arguments and the options of the conversion, if it had some.
      keys: the stream of random bits, if products draw some.
    """
    if held is None:
        held = ["/".join(map(str, path)) for path in nodes_of(model, nnx.Param)]
    above = {""}
    for path in held:
        names = path.split("/")
        above |= {"/".join(names[:count]) for count in range(len(names))}
    # All classes are made before the first module changes: an error leaves the model
    # unchanged. Flax's lists and dicts of modules multiply nothing themselves.
    planned = {}
    for path, module in modules_of(model).items():
        if path in above and not isinstance(module, nnx.List | nnx.Dict):
            planned[path] = module, _class_of(own_class(module), chosen)
    strip(model)  # a second conversion replaces the first
    for path, (module, kind) in planned.items():
        object.__setattr__(module, "__class__", kind)
        setattr(module, PATH, path)
        if keys is not None:
            setattr(module, KEYS, keys.fork())  # as Flax's Dropout does
    if sample is not None:
        leaves, treedef = jax.tree.flatten(sample)
        # A part of the model's graph, so samples of equal shapes have to be equal
        shapes = tuple(map(_shape_of, leaves))
        setattr(model, SAMPLE, nnx.static((treedef, shapes)))


def sample_of(model: object) -> Sample | None:
    """Return the arguments and options of a conversion as shapes, if it had some."""
    if not hasattr(model, SAMPLE):
        return None
    treedef, shapes = getattr(model, SAMPLE)
    return treedef.unflatten(shapes)


def store(model: nnx.Module, weights: Tree) -> int:
    """Let the modules of a model hold stored weights, by the path of the parameter.

    Returns how many were taken.
    """
    AWAITED.discard(conversion_of(model))
    modules = modules_of(model)
    taken = 0
    for path, weight in weights.items():
        owner = path.rpartition("/")[0]
        while owner and owner not in modules:
            owner = owner.rpartition("/")[0]
        if owner not in modules:
            continue
        # An optimizer's variables are held and not copied, so the model reads every
        # update.
        variables = jax.tree.map(_as_variable, weight, is_leaf=is_variable)
        name = path.removeprefix(owner).lstrip("/")
        held = getattr(modules[owner], STORED, {})
        setattr(modules[owner], STORED, nnx.data({**held, name: variables}))
        taken += 1
    return taken


def _as_variable(leaf: Any) -> nnx.Variable:
    return leaf if is_variable(leaf) else nnx.Variable(leaf)


def forget(model: nnx.Module) -> int:
    """Let the modules hold no stored weights; return how many modules did."""
    held = [module for module in modules_of(model).values() if STORED in vars(module)]
    for module in held:
        delattr(module, STORED)
    return len(held)


def rename(model: nnx.Module, chosen: Policy) -> None:
    """Give the converted modules of a model another policy.

    The stored weights that they hold stay.
    """
    for module in filter(conversion_of, modules_of(model).values()):
        object.__setattr__(module, "__class__", _class_of(own_class(module), chosen))


def examine(
    model: nnx.Module,
    chosen: Policy,
    args: Args,
    options: Tree,
) -> Examined:
    """Return the decisions of a policy about a call of the model."""
    call = Call(model, own_class(model).__call__, args, options)
    return call.transformed(chosen).examine(*call.arguments)


def _class_of(base: type, chosen: Policy) -> type:
    """Return the subclass of a class whose methods run by a policy."""
    key = (base, chosen)
    if key not in _CLASSES:
        names = ("__module__", "__qualname__", "__doc__")
        namespace = {name: getattr(base, name) for name in names}
        namespace |= {"tcfp_policy": chosen, "__reduce_ex__": _reduce}
        namespace |= _methods_of(base) | displays_of(base)
        make: Any = type(base)
        made = make(base.__name__, (base,), dict(namespace))
        # A class with `pytree=False` does not note which of its attributes hold arrays.
        # Its subclass has to say so again: as a pytree it would have no leaves, and
        # `jax.jit` would take the parameters for constants.
        own = base._pytree__is_pytree  # type: ignore[attr-defined]  # of every module
        if made._pytree__is_pytree != own:
            made = make(base.__name__, (base,), namespace, pytree=own)
        _CLASSES[key] = made
    return _CLASSES[key]


def _methods_of(base: type) -> dict[str, Function]:
    """Return the methods of a class and its bases, as transformed functions."""
    methods = {}
    for kind in reversed(base.__mro__[: base.__mro__.index(nnx.Module)]):
        for name, value in vars(kind).items():
            is_public = name == "__call__" or not name.startswith("_")
            if is_public and _is_method(value):
                methods[name] = _method(getattr(base, name), name)
            else:
                # a class below replaces a method by something else
                methods.pop(name, None)
    return methods


def _is_method(value: object) -> bool:
    """Return whether an attribute of a class is a method that computes when called."""
    if isinstance(value, staticmethod | classmethod | type):
        return False
    if not callable(value) or not hasattr(value, "__get__"):
        return False
    # A generator computes later, when it calls converted modules
    inner = inspect.unwrap(value)
    later = inspect.isgeneratorfunction(inner) or inspect.iscoroutinefunction(inner)
    return not later


def _method(original: Function, name: str) -> Function:
    def method(self: Any, *args: PyTree, **options: PyTree) -> PyTree:
        chosen = conversion_of(self)
        assert chosen is not None
        return Call(self, original, args, options).run(chosen)

    method.__name__ = name
    method.__qualname__ = getattr(original, "__qualname__", name)
    method.__doc__ = original.__doc__
    method.__wrapped__ = original  # type: ignore[attr-defined]
    return method


def _reduce(self: Any, protocol: int) -> tuple[object, ...]:
    """Pickle a converted module without its class, which no Python module holds."""
    return _again, (own_class(self), conversion_of(self)), dict(vars(self))


def _again(base: type, chosen: Policy) -> object:
    return object.__new__(_class_of(base, chosen))
