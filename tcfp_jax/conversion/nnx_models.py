"""Converted NNX models: modules with a subclass of their class, whose methods run as
transformed functions.

Classes change in place, so that references to modules and to their `Param`s stay valid.
A call from outside splits the method into a pure function of the model's variables and
the arguments, transforms it, and writes its changes back. The pure function works on
copies of the modules, which have their own classes again: the program of the original
model runs inside, and caches of traced functions find it under the model's own types.
"""

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from tcfp_jax import paths
from tcfp_jax.conversion.policy import Policy
from tcfp_jax.conversion.report import Examined
from tcfp_jax.conversion.transform import Transformed
from tcfp_jax.layers import Absent
from tcfp_jax.paths import PyTree
from tcfp_jax.weights.parameter import is_quantized

# The attributes that conversion adds to a module. They are gone inside of a call, and
# after `export`.
_PATH, _STORED, _SAMPLE, _KEYS = _ADDED = (
    "tcfp_path",
    "tcfp_stored",
    "tcfp_sample",
    "tcfp_keys",
)
# One class for equal conversions: nnx.jit compiles again for another class.
_CLASSES: dict[tuple[type, Policy], type] = {}
# Policies whose weights `find_weights` gave out, to be kept in an optimizer, and that
# no optimizer has given back yet.
AWAITED: set[Policy | None] = set()
_GONE = object()  # stands for an attribute that a method deleted
# The path of a node in a model: names of attributes and numbers in lists.
Path = tuple[Any, ...]


class _Sample:
    """The sample arguments of a conversion as shapes, equal if these are equal: it is
    part of a model's graph.
    """

    def __init__(self, args: tuple[PyTree, ...], options: Mapping[str, PyTree]) -> None:
        shape = lambda leaf: (
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            if hasattr(leaf, "dtype")
            else leaf
        )
        self.args, self.options = jax.tree.map(shape, (args, dict(options)))

    def _key(self) -> tuple[object, ...]:
        leaves, treedef = jax.tree.flatten((self.args, self.options))
        return treedef, tuple(
            leaf if isinstance(leaf, jax.ShapeDtypeStruct) else repr(leaf)
            for leaf in leaves
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Sample) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())


def _nodes_of(model: nnx.Module | list[nnx.Module], kind: type) -> dict[Path, Any]:
    """Return the nodes of a kind by path, each one once: shared nodes have the first of
    their paths.
    """
    return {
        path: node for path, node in nnx.iter_graph(model) if isinstance(node, kind)
    }


def modules_of(model: nnx.Module) -> dict[str, nnx.Module]:
    """Return the modules of a model by path, each one once.

    >>> list(modules_of(nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))))
    ['layers/0', 'layers', '']
    """
    return {
        "/".join(map(str, path)): module
        for path, module in _nodes_of(model, nnx.Module).items()
    }


def conversion_of(module: object) -> Policy | None:
    """Return the policy of a converted module, or None; raise if another package made
    its own class of that one.
    """
    chosen = getattr(type(module), "tcfp_policy", None)
    if chosen is not None and "tcfp_policy" not in vars(type(module)):
        raise ValueError(
            f"the class {type(module).__name__} of this module was made of a converted"
            " one by another package; export(model) first, let that package change it,"
            " and convert it then"
        )
    return chosen


def convert(
    model: nnx.Module,
    chosen: Policy,
    held: list[str] | None,
    sample: Any,
    keys: nnx.RngStream | None,
) -> None:
    """Give converted classes to the modules that hold weights at these paths, or any
    parameter if they are unknown.

    `sample` is the arguments and the options of the conversion, if it had some.
    """
    if held is None:
        held = ["/".join(map(str, path)) for path in _nodes_of(model, nnx.Param)]
    above = {
        "/".join(path.split("/")[:i])
        for path in held
        for i in range(len(path.split("/")))
    }
    # All classes are made before the first module changes: an error leaves the model
    # unchanged. Flax's lists and dicts of modules multiply nothing themselves.
    planned = {
        path: (module, _class_of(_own_class(module), chosen))
        for path, module in modules_of(model).items()
        if (path in above or not path) and not isinstance(module, nnx.List | nnx.Dict)
    }
    export(model)  # a second conversion replaces the first
    for path, (module, kind) in planned.items():
        object.__setattr__(module, "__class__", kind)
        setattr(module, _PATH, path)
        if keys is not None:
            setattr(module, _KEYS, keys.fork())  # as Flax's Dropout does
    if sample is not None:
        setattr(model, _SAMPLE, nnx.static(_Sample(*sample)))


def export(model: nnx.Module) -> int:
    """Give modules Flax's own classes again, and remove all that was added; return how
    many changed.
    """
    converted = list(filter(conversion_of, modules_of(model).values()))
    for module in converted:
        _strip(module)
    return len(converted)


def _own_class(module: object) -> type:
    """Return the class that a module had before its conversion."""
    return (
        type(module).__mro__[1] if conversion_of(module) is not None else type(module)
    )


def sample_of(model: object) -> _Sample | None:
    """Return the sample inputs of a converted model, if it had some."""
    return getattr(model, _SAMPLE, None)


def store(model: nnx.Module, weights: Mapping[str, PyTree]) -> int:
    """Let the modules of a model hold stored weights, by the path of the parameter;
    return how many were taken.
    """
    AWAITED.discard(conversion_of(model))
    modules, taken = modules_of(model), 0
    for path, weight in weights.items():
        names = path.split("/")
        above = ("/".join(names[:i]) for i in range(len(names) - 1, -1, -1))
        owner = next((name for name in above if name in modules), None)
        if owner is None:
            continue
        # An optimizer's variables are held and not copied, so the model reads every
        # update.
        variables = jax.tree.map(
            lambda a: a if _is_variable(a) else nnx.Variable(a),
            weight,
            is_leaf=_is_variable,
        )
        held = getattr(modules[owner], _STORED, {})
        setattr(
            modules[owner],
            _STORED,
            nnx.data({**held, path.removeprefix(owner).lstrip("/"): variables}),
        )
        taken += 1
    return taken


def forget(model: nnx.Module) -> int:
    """Let the modules hold no stored weights; return how many modules did."""
    held = [module for module in modules_of(model).values() if _STORED in vars(module)]
    for module in held:
        delattr(module, _STORED)
    return len(held)


def stored_weights(model: nnx.Module) -> dict[str, PyTree]:
    """Return the stored weights that the modules hold now, by path."""
    read = lambda variable: variable[...] if _is_variable(variable) else variable
    return {
        paths.join(path, name): jax.tree.map(read, weight, is_leaf=_is_variable)
        for path, module in modules_of(model).items()
        for name, weight in getattr(module, _STORED, {}).items()
    }


def rename(model: nnx.Module, chosen: Policy) -> None:
    """Give the converted modules of a model another policy; the stored weights that
    they hold stay.
    """
    for module in filter(conversion_of, modules_of(model).values()):
        object.__setattr__(module, "__class__", _class_of(_own_class(module), chosen))


def examine(
    model: nnx.Module,
    chosen: Policy,
    args: tuple[PyTree, ...],
    options: Mapping[str, PyTree],
) -> Examined:
    """Return the decisions of a policy about a call of the model."""
    call = _Call(model, _own_class(model).__call__, args, options)
    return call.transformed(chosen).examine(*call.arguments)


def _class_of(base: type, chosen: Policy) -> type:
    key = (base, chosen)
    if key not in _CLASSES:
        namespace: dict[str, Any] = {
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "__doc__": base.__doc__,
            "tcfp_policy": chosen,
            "__reduce_ex__": _reduce,
        }
        for kind in reversed(base.__mro__[: base.__mro__.index(nnx.Module)]):
            for name, value in vars(kind).items():
                if (name == "__call__" or not name.startswith("_")) and _is_method(
                    value
                ):
                    namespace[name] = _method(getattr(base, name), name)
                else:
                    # a class below replaces a method by something else
                    namespace.pop(name, None)
        make: Any = type(base)
        made = make(base.__name__, (base,), namespace)
        # A class with `pytree=False` does not note which of its attributes hold arrays.
        # Its subclass has to say so again: as a pytree it would have no leaves, and
        # `jax.jit` would take the parameters for constants.
        own = base._pytree__is_pytree  # type: ignore[attr-defined]  # of every module
        if made._pytree__is_pytree != own:
            made = make(base.__name__, (base,), namespace, pytree=own)
        _CLASSES[key] = made
    return _CLASSES[key]


def _is_method(value: object) -> bool:
    """Return whether an attribute of a class is a method that computes with its model
    when it is called.
    """
    if isinstance(value, staticmethod | classmethod | type) or not (
        callable(value) and hasattr(value, "__get__")
    ):
        return False
    # A generator computes later, when it calls converted modules
    inner = inspect.unwrap(value)
    return not (
        inspect.isgeneratorfunction(inner) or inspect.iscoroutinefunction(inner)
    )


def _method(original: Callable[..., PyTree], name: str) -> Callable[..., PyTree]:
    def method(self: Any, *args: PyTree, **options: PyTree) -> PyTree:
        chosen = conversion_of(self)
        assert chosen is not None
        return _Call(self, original, args, options).run(chosen)

    method.__name__, method.__qualname__ = name, getattr(original, "__qualname__", name)
    method.__doc__, method.__wrapped__ = original.__doc__, original  # type: ignore[attr-defined]
    return method


def _strip(module: nnx.Module) -> None:
    for name in _ADDED:
        if name in vars(module):
            delattr(module, name)
    object.__setattr__(module, "__class__", _own_class(module))


def _reduce(self: Any, protocol: int) -> tuple[object, ...]:
    """Pickle a converted module without its class, which no Python module holds."""
    return _again, (_own_class(self), conversion_of(self)), dict(vars(self))


def _again(base: type, chosen: Policy) -> object:
    return object.__new__(_class_of(base, chosen))


class _Call:
    """One call of a method: its variables and arguments as trees of arrays, and the
    pure function of them.
    """

    def __init__(
        self,
        model: nnx.Module,
        original: Callable[..., PyTree],
        args: PyTree,
        options: PyTree,
    ) -> None:
        self.model, self.original = model, original
        leaves, self._treedef = jax.tree.flatten(
            (args, dict(options)), is_leaf=_is_node
        )
        # Modules among the arguments are split together with the model, because they
        # may share variables with it.
        self._places = [i for i, leaf in enumerate(leaves) if _is_node(leaf)]
        self._nodes = [model, *(leaves[i] for i in self._places)]
        self._graphdef, state = nnx.split(self._nodes)
        params: dict[str, PyTree] = {}
        rest: dict[str, PyTree] = {}
        self._state = []
        for path, variable in _flat_state(state):
            # node 0 is the model
            own = path[0] == 0 and isinstance(variable, nnx.Param)
            name = "/".join(map(str, path[1:] if own else path))
            (params if own else rest)[name] = _raw(variable)
            self._state.append((path, variable, own, name))
        self._absent = absent_of(model)
        for at, (kernel, _) in self._absent.items():
            # only its stored form has values
            params[at] = jax.ShapeDtypeStruct(kernel.shape, kernel.dtype)
        self.arguments = (
            params,
            rest,
            [None if _is_node(leaf) else leaf for leaf in leaves],
        )

    def transformed(self, chosen: Policy) -> Transformed:
        """Return the method as a function of `arguments`."""
        prefix = getattr(self.model, _PATH, "")
        name = _own_class(self.model).__name__
        return Transformed(
            self._pure, chosen, 0, name=name, prefix=prefix, stateful=True, must=False
        )

    def run(self, chosen: Policy) -> PyTree:
        """Return the method's result, and write its changes back to the model."""
        params, stored = self.arguments[0], stored_weights(self.model)
        # The warning is for training only; a tracer of a derivative is the one sign of
        # it that a call can see.
        trains = any(
            type(leaf).__name__ in ("JVPTracer", "LinearizeTracer")
            for leaf in params.values()
        )
        if (
            trains
            and chosen in AWAITED
            and not stored
            and not any(map(is_quantized, params.values()))
        ):
            AWAITED.discard(chosen)
            warnings.warn(
                "a converted NNX model is trained without its optimizer's stored"
                " weights: find_weights was called, but no tcfp_jax.nnx.Optimizer was"
                " made; weights are quantized at each use, without error feedback",
                stacklevel=3,
            )
        keys = getattr(self.model, _KEYS, None)
        out, (values, attributes) = self.transformed(chosen)(
            *self.arguments, stored=stored, product_key=None if keys is None else keys()
        )
        nodes = dict(nnx.iter_graph(self._nodes))
        for path, value in values:
            nodes[path].set_raw_value(value)
        for path, name, value in attributes:
            if value is _GONE:
                delattr(nodes[path], name)
            else:
                setattr(nodes[path], name, value)
        return jax.tree.map(
            lambda leaf: nodes[leaf.path] if isinstance(leaf, _Node) else leaf, out
        )

    def _pure(
        self,
        params: Mapping[str, PyTree],
        rest: Mapping[str, PyTree],
        inputs: list[PyTree],
    ) -> PyTree:
        state = []
        for path, variable, own, name in self._state:
            value = (params if own else rest)[name]
            state.append(
                (path, variable.replace(value) if _is_variable(variable) else value)
            )
        nodes = nnx.merge(self._graphdef, nnx.from_flat_state(state))
        modules = _nodes_of(nodes, nnx.Module)
        absent = self._materialize(nodes, params)
        for module in filter(conversion_of, modules.values()):
            _strip(module)  # a call of it inside runs its own class
        before = {path: dict(vars(module)) for path, module in modules.items()}
        # A variable may hold a tree that changes in place, so its leaves tell whether
        # it changed.
        values = {
            path: jax.tree.flatten(_raw(node))
            for path, node in _nodes_of(nodes, nnx.Variable).items()
        }
        leaves = list(inputs)
        for place, node in zip(self._places, nodes[1:], strict=True):
            leaves[place] = node
        args, options = jax.tree.unflatten(self._treedef, leaves)
        out = self.original(nodes[0], *args, **options)
        # A method may return a part of its model, which is a copy in here: its path
        # leads to the original.
        places = {
            id(node): path for path, node in nnx.iter_graph(nodes) if _is_node(node)
        }
        known = lambda leaf: _is_node(leaf) and id(leaf) in places
        out = jax.tree.map(
            lambda leaf: _Node(places[id(leaf)]) if known(leaf) else leaf,
            out,
            is_leaf=known,
        )
        return out, _changes(nodes, before, values, absent)

    def _materialize(self, nodes: Any, params: Mapping[str, PyTree]) -> set[Path]:
        """Put traced parameters where the model has shapes, one for all places of a
        shared parameter; return where.
        """
        owners, found = dict(nnx.iter_graph(nodes)), set()
        for path, (_, places) in self._absent.items():
            parameter = nnx.Param(params[path])
            for place in places:
                put(owners[0, *place[:-1]], place[-1], parameter)
                found.add((0, *place))
        return found


@dataclass(frozen=True)
class _Node:
    """Reference to a module or a variable of the model that a method returned. It is a
    leaf and not a tree.
    """

    path: Path


def _changes(
    nodes: PyTree,
    before: dict[Path, PyTree],
    values: dict[Path, PyTree],
    absent: set[Path],
) -> PyTree:
    """Return `[(path, value)]` of changed variables and `[(path, name, value)]` of
    changed attributes of modules.

    `before` and `values` are the attributes and the flattened values from before the
    method ran. Parameters at `absent` were put there for the call and are not changes.
    """
    changed = {}
    for path, node in _nodes_of(nodes, nnx.Variable).items():
        leaves, treedef = jax.tree.flatten(_raw(node))
        held, held_treedef = values.get(path, (leaves, treedef))
        if treedef != held_treedef or any(
            a is not b for a, b in zip(leaves, held, strict=True)
        ):
            changed[path] = _raw(node)
    attributes = {}
    for path, module in _nodes_of(nodes, nnx.Module).items():
        now, old = vars(module), before.get(path, vars(module))
        for name in {*now, *old}:
            if (
                name.startswith("_pytree__")
                or now.get(name, _GONE) is old.get(name, _GONE)
                or (*path, name) in absent
            ):
                continue
            value = now.get(name, _GONE)
            if isinstance(value, nnx.Module):
                raise NotImplementedError(
                    f"{type(module).__name__}.{name} is a module that the method makes"
                    " while it runs; call the model once before conversion, so that it"
                    " exists"
                )
            attributes[path, name] = value
            # A new variable replaces the old one, whatever that holds
            changed.pop((*path, name), None)
    # Lists and not dicts: a path mixes names and numbers, and JAX sorts the keys of
    # dicts.
    return list(changed.items()), [
        (path, name, value) for (path, name), value in attributes.items()
    ]


def _flat_state(state: Any, path: Path = ()) -> Iterator[tuple[Path, PyTree]]:
    """Yield the variables of a state by path, in its own order: paths mix names and
    numbers, which have none.
    """
    for name, value in state.items():
        if isinstance(value, Mapping) and not isinstance(value, nnx.Variable):
            yield from _flat_state(value, (*path, name))
        else:
            yield (*path, name), value


def _raw(variable: Any) -> PyTree:
    """Return the value of a variable; an array that is an attribute without a variable
    is its own value.
    """
    return variable.get_raw_value() if _is_variable(variable) else variable


def _is_variable(leaf: object) -> bool:
    return isinstance(leaf, nnx.Variable)


def _is_node(leaf: object) -> bool:
    return isinstance(leaf, nnx.Module | nnx.Rngs | nnx.RngStream | nnx.Variable)


def absent_of(model: nnx.Module) -> dict[str, tuple[Absent, list[Path]]]:
    """Return parameters that exist as shapes: by the path of the first place, the shape
    and all of its places.
    """
    found: dict[int, tuple[Absent, list[Path]]] = {}
    for path, node in nnx.iter_graph(model):
        if isinstance(node, Absent):
            found.setdefault(id(node), (node, []))[1].append(path)
    return {
        "/".join(map(str, places[0])): (node, places) for node, places in found.values()
    }


def put(owner: Any, name: str | int, value: object) -> None:
    """Set an attribute of a module, or an entry of a list or a dict of modules."""
    if isinstance(name, int) or isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(
            owner, name, nnx.data(value) if isinstance(value, nnx.Variable) else value
        )
