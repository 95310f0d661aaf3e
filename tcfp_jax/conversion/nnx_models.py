"""Converted NNX models: modules whose class is a subclass of their own, with methods that run as transformed functions.

Classes change in place, so that references to modules and to their `Param`s stay valid. A method that is called from
outside is split into a pure function of the model's variables and the arguments, transformed, and its changes are
written back. Inside, on the copies that the pure function works on, every module has its own class again: what runs is
the program of the model as it was, and every cache of traced functions finds it under the model's own types.
"""

import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

from tcfp_jax import paths
from tcfp_jax.conversion.examination import Examined
from tcfp_jax.conversion.nnx_values import Gone, changes, flat_state, raw_value, tree_of
from tcfp_jax.conversion.policy import Policy
from tcfp_jax.conversion.transform import Transformed
from tcfp_jax.layers import Absent
from tcfp_jax.nnx import RNG
from tcfp_jax.weights.training import is_stored

# What conversion adds to a module; gone inside, and after `export`.
_PATH, _STORED, _SAMPLE, _KEYS = "tcfp_path", "tcfp_stored", "tcfp_sample", "tcfp_keys"
_ADDED = (_PATH, _STORED, _SAMPLE, _KEYS)
_CLASSES: dict[tuple[type, Policy], type] = {}
# Policies whose weights somebody asked for, to keep them in an optimizer, and that never got them back by `sync`.
_AWAITED: set[Policy | None] = set()


class Sample:
    """The sample arguments of a conversion as shapes, equal where these are: it is part of a model's graph."""

    def __init__(self, args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        shape = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if hasattr(leaf, "dtype") else leaf
        self.args, self.options = jax.tree.map(shape, (args, dict(options)))

    def _key(self) -> Any:
        leaves, treedef = jax.tree.flatten((self.args, self.options))
        return treedef, tuple(leaf if isinstance(leaf, jax.ShapeDtypeStruct) else repr(leaf) for leaf in leaves)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sample) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())


def modules_of(model: Any) -> dict[str, Any]:
    """The modules of a model by path, each once.

    >>> list(modules_of(nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))))
    ['layers/0', 'layers', '']
    """
    found = ((path, node) for path, node in nnx.iter_graph(model) if isinstance(node, nnx.Module))
    return {"/".join(map(str, path)): node for path, node in found}


def conversion_of(module: Any) -> Policy | None:
    """The policy of a converted module, or None.

    Raises:
      ValueError: another package made its own class of the converted one.
    """
    chosen = getattr(type(module), "tcfp_policy", None)
    if chosen is not None and "tcfp_policy" not in vars(type(module)):
        raise ValueError(
            f"the class {type(module).__name__} of this module was made of a converted one by another package; "
            "export(model) first, let that package change it, and convert it then"
        )
    return chosen


def keys_of(model: Any, rngs: Any, chosen: Policy, found: Examined | None) -> Any:
    """The stream from which products of a converted model draw random bits, or None where none draws or is there.

    Raises:
      TypeError: `rngs` is neither an `nnx.Rngs` nor an `nnx.RngStream`.
    """
    if not isinstance(rngs, nnx.Rngs | nnx.RngStream | None):
        raise TypeError(f"rngs is a {type(rngs).__name__}; pass nnx.Rngs({RNG}=seed)")
    assert chosen.recipe is not None, "a conversion has one"
    # Without a sample nobody knows what rules will choose.
    draws = {chosen.recipe.draws} if found is None else {r.recipe.draws for r in found.report.converted if r.recipe}
    if True not in draws and (found is not None or rngs is None):
        return None
    if rngs is None:
        streams = (node for _, node in nnx.iter_graph(model) if isinstance(node, nnx.RngStream) and node.tag == RNG)
        rngs = next(streams, None)
    return rngs[RNG] if isinstance(rngs, nnx.Rngs) else rngs


def convert(model: Any, chosen: Policy, weights: list[str] | None, sample: Sample | None, keys: Any = None) -> None:
    """Give the modules that hold these parameters, or any where they are not known, their converted classes.

    Each gets a fork of `keys`, as Flax's Dropout does. The whole change is planned before the first class changes.
    """
    modules = modules_of(model)
    params = [path for path, node in _variables(model).items() if isinstance(node, nnx.Param)]
    held = params if weights is None else weights
    above = {"/".join(path.split("/")[:i]) for path in held for i in range(len(path.split("/")))}
    # Flax's lists and dicts of modules multiply nothing themselves.
    planned = {
        path: module for path, module in modules.items()
        if (path in above or not path) and not isinstance(module, nnx.List | nnx.Dict)
    }  # fmt: skip
    classes = {path: _class_of(own_class(module), chosen) for path, module in planned.items()}
    export(model)
    for path, module in planned.items():
        object.__setattr__(module, "__class__", classes[path])
        setattr(module, _PATH, path)
        if keys is not None:
            setattr(module, _KEYS, keys.fork())
    if sample is not None:
        setattr(model, _SAMPLE, nnx.static(sample))


def export(model: Any) -> int:
    """Flax's own classes again, and nothing of this project left in the modules; how many changed."""
    count = 0
    for module in modules_of(model).values():
        if conversion_of(module) is not None:
            _strip(module)
            count += 1
    return count


def own_class(module: Any) -> type:
    """The class that a module had before its conversion."""
    return type(module).__mro__[1] if conversion_of(module) is not None else type(module)


def sample_of(model: Any) -> Sample | None:
    """The sample inputs of a converted model, if it had some."""
    return getattr(model, _SAMPLE, None)


def store(model: Any, weights: Mapping[str, Any]) -> int:
    """Let the modules of a model hold stored weights, by the path of the parameter; how many were taken."""
    modules, taken = modules_of(model), 0
    by_module: dict[str, dict[str, Any]] = {}
    for path, weight in weights.items():
        owner = _owner(path, modules)
        if owner is not None:
            by_module.setdefault(owner, {})[path.removeprefix(owner).lstrip("/")] = weight
            taken += 1
    variable = lambda leaf: leaf if isinstance(leaf, nnx.Variable) else nnx.Variable(leaf)
    _AWAITED.discard(conversion_of(model))
    for owner, own in by_module.items():
        kept = jax.tree.map(variable, own, is_leaf=lambda node: isinstance(node, nnx.Variable))
        setattr(modules[owner], _STORED, nnx.data({**getattr(modules[owner], _STORED, {}), **kept}))
    return taken


def forget(model: Any) -> int:
    """Let the modules hold no stored weights; how many did."""
    held = [module for module in modules_of(model).values() if _STORED in vars(module)]
    for module in held:
        delattr(module, _STORED)
    return len(held)


def rename(model: Any, chosen: Policy) -> None:
    """Give the converted modules of a model another policy; what they hold stays."""
    for module in modules_of(model).values():
        if conversion_of(module) is not None:
            object.__setattr__(module, "__class__", _class_of(own_class(module), chosen))


def stored_weights(model: Any) -> dict[str, Any]:
    """The stored weights that the modules hold now, by path."""
    found = {}
    for path, module in modules_of(model).items():
        for name, weight in getattr(module, _STORED, {}).items():
            read = lambda variable: variable[...] if isinstance(variable, nnx.Variable) else variable
            found[paths.join(path, name)] = jax.tree.map(read, weight, is_leaf=lambda n: isinstance(n, nnx.Variable))
    return found


def examine(model: Any, chosen: Policy, args: tuple[Any, ...], options: Mapping[str, Any]) -> Examined:
    """What a call of the model holds, by a policy."""
    call = _Call(model, own_class(model).__call__, args, dict(options))
    return call.transformed(chosen).examine(*call.arguments)


def await_sync(chosen: Policy) -> None:
    """Note that somebody asked for the weights of a model, to keep them in an optimizer."""
    _AWAITED.add(chosen)


def _class_of(base: type, chosen: Policy) -> type:
    key = (base, chosen)
    if key not in _CLASSES:
        namespace: dict[str, Any] = {
            "__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__,
            "tcfp_policy": chosen, "__reduce_ex__": _reduce,
        }  # fmt: skip
        for kind in reversed(base.__mro__[: base.__mro__.index(nnx.Module)]):
            for name, value in vars(kind).items():
                if (name == "__call__" or not name.startswith("_")) and _is_method(value):
                    namespace[name] = _method(getattr(base, name), name)
                else:
                    namespace.pop(name, None)  # a class below has something else of this name
        _CLASSES[key] = _subclass(base, namespace)
    return _CLASSES[key]


def _subclass(base: type, namespace: dict[str, Any]) -> type:
    """A subclass that is a pytree if its base is one.

    A class that says `pytree=False` does not note which of its attributes hold arrays. A subclass has to say it again,
    unless the base does: as a pytree it has no leaves, and `jax.jit` takes the parameters for constants.
    """
    make: Any = type(base)
    made = make(base.__name__, (base,), namespace)
    own = base._pytree__is_pytree  # type: ignore[attr-defined]  # of every module
    return made if made._pytree__is_pytree == own else make(base.__name__, (base,), namespace, pytree=own)


def _is_method(value: Any) -> bool:
    """Whether an attribute of a class is a method that computes when it is called.

    A static or class method has no model, a property is read; a generator computes later, and calls converted modules
    then.
    """
    if isinstance(value, staticmethod | classmethod | type) or not (callable(value) and hasattr(value, "__get__")):
        return False
    inner = inspect.unwrap(value)
    return not (inspect.isgeneratorfunction(inner) or inspect.iscoroutinefunction(inner))


def _method(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **options: Any) -> Any:
        chosen = conversion_of(self)
        assert chosen is not None
        return _Call(self, original, args, options).run(chosen)

    method.__name__, method.__qualname__ = name, getattr(original, "__qualname__", name)
    method.__doc__, method.__wrapped__ = original.__doc__, original  # type: ignore[attr-defined]
    return method


class _Call:
    """One call of a method: its variables and arguments as trees of arrays, and the function of them that it is."""

    def __init__(self, model: Any, original: Callable[..., Any], args: Any, options: Any) -> None:
        self.model, self.original = model, original
        leaves, self._treedef = jax.tree.flatten((args, options), is_leaf=_is_node)
        self._nodes = [model, *(leaf for leaf in leaves if _is_node(leaf))]
        self._places = [i for i, leaf in enumerate(leaves) if _is_node(leaf)]
        inputs = [None if _is_node(leaf) else leaf for leaf in leaves]
        self._graphdef, state = nnx.split(self._nodes)
        self._state = list(flat_state(state))
        params: dict[str, Any] = {}
        rest: dict[str, Any] = {}
        for path, variable in self._state:
            name = "/".join(map(str, path))
            own = path[0] == 0 and isinstance(variable, nnx.Param)
            (params if own else rest)[name[2:] if own else name] = raw_value(variable)
        self._absent = absent_of(model)
        for at, (kernel, _) in self._absent.items():
            params[at] = jax.ShapeDtypeStruct(kernel.shape, kernel.dtype)
        self.arguments = (params, rest, inputs)

    def transformed(self, chosen: Policy) -> Transformed:
        """The method as a function of `arguments`."""
        prefix = getattr(self.model, _PATH, "")
        return Transformed(self._pure, chosen, 0, name=own_class(self.model).__name__, prefix=prefix, state=1)

    def run(self, chosen: Policy) -> Any:
        """The method's result; what it changed is written back."""
        stored = stored_weights(self.model)
        held = stored or any(map(is_stored, self.arguments[0].values()))
        if not held and chosen in _AWAITED and _differentiated(self.arguments[0]):
            _AWAITED.discard(chosen)
            warnings.warn(
                "a converted NNX model is trained without its optimizer's stored weights: find_weights was called, and "
                "sync(model, optimizer) was not; weights are quantized at each use, without error feedback",
                stacklevel=3,
            )
        keys = getattr(self.model, _KEYS, None)
        out, values, attributes = self.transformed(chosen).evaluate(
            *self.arguments, stored=stored, product_key=None if keys is None else keys()
        )
        nodes = dict(nnx.iter_graph(self._nodes))
        out = jax.tree.map(lambda leaf: nodes[leaf.path] if isinstance(leaf, _Node) else leaf, out)
        for path, value in values:
            nodes[path].set_raw_value(value)
        for path, name, value in attributes:
            if isinstance(value, Gone):
                delattr(nodes[path], name)
            else:
                setattr(nodes[path], name, value)
        return out

    def _pure(self, params: Any, rest: Any, inputs: list[Any]) -> Any:
        state = []
        for path, variable in self._state:
            name = "/".join(map(str, path))
            own = path[0] == 0 and isinstance(variable, nnx.Param)
            value = params[name[2:]] if own else rest[name]
            state.append((path, variable.replace(value) if isinstance(variable, nnx.Variable) else value))
        nodes = nnx.merge(self._graphdef, nnx.from_flat_state(state))
        modules = {path: node for path, node in nnx.iter_graph(nodes) if isinstance(node, nnx.Module)}
        absent = self._materialize(nodes, params)
        for module in modules.values():
            if conversion_of(module) is not None:
                _strip(module)
        before = {path: dict(vars(module)) for path, module in modules.items()}
        values = {path: tree_of(node) for path, node in nnx.iter_graph(nodes) if isinstance(node, nnx.Variable)}
        leaves = list(inputs)
        for place, node in zip(self._places, nodes[1:], strict=True):
            leaves[place] = node
        args, options = jax.tree.unflatten(self._treedef, leaves)
        out = self.original(nodes[0], *args, **options)
        places = {id(node): path for path, node in nnx.iter_graph(nodes) if _is_node(node)}
        own = lambda leaf: _is_node(leaf) and id(leaf) in places
        out = jax.tree.map(lambda leaf: _Node(places[id(leaf)]) if own(leaf) else leaf, out, is_leaf=own)
        return out, *changes(nodes, before, values, absent)

    def _materialize(self, nodes: Any, params: Mapping[str, Any]) -> set[Any]:
        """Put traced parameters in the place of shapes, one for all places of a shared one; where."""
        owners, found = dict(nnx.iter_graph(nodes)), set()
        for path, (_, places) in self._absent.items():
            parameter = nnx.Param(params[path])
            for place in places:
                put(owners[0, *place[:-1]], place[-1], parameter)
                found.add(((0, *place[:-1]), place[-1]))
        return found


class _Node:
    """Stands for a module or a variable of the model that a method returned: it is the same one outside."""

    def __init__(self, path: Any) -> None:
        self.path = path


def absent_of(model: Any) -> dict[str, tuple[Absent, list[Any]]]:
    """Parameters that exist as shapes: by the path of the first place, the shape and all of its places."""
    found: dict[int, tuple[Absent, list[Any]]] = {}
    for path, node in nnx.iter_graph(model):
        if isinstance(node, Absent):
            found.setdefault(id(node), (node, []))[1].append(path)
    return {"/".join(map(str, places[0])): (node, places) for node, places in found.values()}


def put(owner: Any, name: Any, value: Any) -> None:
    """Set an attribute of a module, or an entry of a list or a dict of modules."""
    if isinstance(name, int) or isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(owner, name, nnx.data(value) if isinstance(value, nnx.Variable) else value)


def _strip(module: Any) -> None:
    for name in _ADDED:
        if name in vars(module):
            delattr(module, name)
    object.__setattr__(module, "__class__", own_class(module))


def _variables(model: Any) -> dict[str, Any]:
    found = ((path, node) for path, node in nnx.iter_graph(model) if isinstance(node, nnx.Variable))
    return {"/".join(map(str, path)): node for path, node in found}


def _owner(path: str, modules: Mapping[str, Any]) -> str | None:
    names = path.split("/")
    above = ("/".join(names[:i]) for i in range(len(names) - 1, -1, -1))
    return next((name for name in above if name in modules), None)


def _is_node(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Module | nnx.Rngs | nnx.RngStream | nnx.Variable)


def _differentiated(params: Mapping[str, Any]) -> bool:
    return any(type(leaf).__name__ in ("JVPTracer", "LinearizeTracer") for leaf in params.values())


def _reduce(self: Any, protocol: Any) -> Any:
    return _again, (own_class(self), conversion_of(self)), dict(vars(self))


def _again(base: type, chosen: Policy) -> Any:
    return object.__new__(_class_of(base, chosen))
