"""A call of a converted NNX module, as a pure function of variables and arguments.

A call from outside splits the method into a pure function of the model's variables and
the arguments, transforms it, and writes its changes back. The pure function works on
copies of the modules, which have their own classes again: the program of the original
model runs inside, and caches of traced functions find it under the model's own types.
"""

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from flax import nnx

from tcfp_jax.conversion.nnx_modules import (
    KEYS,
    PATH,
    Path,
    absent_of,
    is_variable,
    nodes_of,
    own_class,
    put,
    stored_weights,
    strip,
)
from tcfp_jax.conversion.policy import Policy
from tcfp_jax.conversion.transform import Transformed, warn_if_forgotten
from tcfp_jax.paths import Args, Function, PyTree, Tree

_GONE = object()  # stands for an attribute that a method deleted
_Values = dict[Path, tuple[list[Any], Any]]  # flattened values of variables by path
_Attributes = dict[Path, dict[str, Any]]  # of modules by path


class _Entry(NamedTuple):
    """A variable among the nodes of a call.

    Attributes:
      path: its path.
      variable: the variable, or an array that is an attribute without one.
      is_parameter: whether it is a parameter of the model.
      name: its name among the parameters, or among the rest.
    """

    path: Path
    variable: Any
    is_parameter: bool
    name: str

    def filled(self, values: Tree) -> Any:
        """Return the variable with its value among these."""
        value = values[self.name]
        return self.variable.replace(value) if is_variable(self.variable) else value


@dataclass(frozen=True)
class _Node:
    """Reference to a module or a variable of the model that a method returned.

    It is a leaf and not a tree.
    """

    path: Path


class Call:
    """One call of a method: trees of its variables and arguments, and a pure function.

    Attributes:
      arguments: the arguments of the function: parameters, other state, and inputs.
    """

    def __init__(
        self,
        model: nnx.Module,
        original: Function,
        args: Args,
        options: Tree,
    ) -> None:
        """Split the call of `original`, a method of the model's own class."""
        self._model = model
        self._original = original
        leaves, self._treedef = jax.tree.flatten(
            (args, dict(options)), is_leaf=_is_node
        )
        # Modules among the arguments are split together with the model, because they
        # may share variables with it.
        self._places = [i for i, leaf in enumerate(leaves) if _is_node(leaf)]
        self._nodes = [model, *(leaves[i] for i in self._places)]
        for i in self._places:
            leaves[i] = None
        self._graphdef, state = nnx.split(self._nodes)
        params: dict[str, PyTree] = {}
        rest: dict[str, PyTree] = {}
        self._entries = []
        for path, variable in _flat_state(state):
            # node 0 is the model
            is_parameter = path[0] == 0 and isinstance(variable, nnx.Param)
            name = "/".join(map(str, path[1:] if is_parameter else path))
            _check_followed(variable, name)
            self._entries.append(_Entry(path, variable, is_parameter, name))
            (params if is_parameter else rest)[name] = _raw(variable)
        self._absent = absent_of(model)
        for name, (kernel, _) in self._absent.items():
            # only its stored form has values
            params[name] = jax.ShapeDtypeStruct(kernel.shape, kernel.dtype)
        self.arguments = (params, rest, leaves)

    def transformed(self, chosen: Policy) -> Transformed:
        """Return the method as a function of `arguments`."""
        return Transformed(
            self._pure,
            chosen,
            0,
            name=own_class(self._model).__name__,
            prefix=getattr(self._model, PATH, ""),
            stateful=True,
            must=False,
        )

    def run(self, chosen: Policy) -> PyTree:
        """Return the method's result, and write its changes back to the model."""
        stored = stored_weights(self._model)
        if not stored:
            warn_if_forgotten(
                chosen,
                self.arguments[0],
                "NNX",
                "but no tcfp_jax.nnx.Optimizer was made; weights are quantized at each"
                " use, without error feedback",
            )
        keys = getattr(self._model, KEYS, None)
        key = None if keys is None else keys()
        low = self.transformed(chosen)
        out, changes = low(*self.arguments, stored=stored, product_key=key)
        nodes = dict(nnx.iter_graph(self._nodes))
        values, attributes = changes
        for path, value in values:
            nodes[path].set_raw_value(value)
        for path, name, value in attributes:
            if value is _GONE:
                delattr(nodes[path], name)
            else:
                setattr(nodes[path], name, value)

        def own(leaf: Any) -> Any:
            return nodes[leaf.path] if isinstance(leaf, _Node) else leaf

        return jax.tree.map(own, out)

    def _pure(
        self,
        params: Tree,
        rest: Tree,
        inputs: list[PyTree],
    ) -> PyTree:
        """Return the method's result on copies of the modules, and their changes."""
        state = []
        for entry in self._entries:
            values = params if entry.is_parameter else rest
            state.append((entry.path, entry.filled(values)))
        nodes = nnx.merge(self._graphdef, nnx.from_flat_state(state))
        absent = self._materialize(nodes, params)
        strip(nodes)  # a call of a module inside runs its own class
        attributes = {}
        for path, module in nodes_of(nodes, nnx.Module).items():
            attributes[path] = dict(vars(module))
        before = _values_of(nodes)
        leaves = list(inputs)
        for place, node in zip(self._places, nodes[1:], strict=True):
            leaves[place] = node
        args, options = jax.tree.unflatten(self._treedef, leaves)
        out = self._original(nodes[0], *args, **options)
        # A method may return a part of its model, which is a copy in here: its path
        # leads to the original.
        path_of = {}
        for path, node in nnx.iter_graph(nodes):
            if _is_node(node):
                path_of[id(node)] = path

        def is_own(leaf: object) -> bool:
            return id(leaf) in path_of and _is_node(leaf)

        def reference(leaf: Any) -> Any:
            return _Node(path_of[id(leaf)]) if is_own(leaf) else leaf

        out = jax.tree.map(reference, out, is_leaf=is_own)
        return out, _changes(nodes, attributes, before, absent)

    def _materialize(self, nodes: Any, params: Tree) -> set[Path]:
        """Put traced parameters where the model has shapes, and return where.

        All places of a shared parameter get one.
        """
        owners = dict(nnx.iter_graph(nodes))
        found = set()
        for path, (_, places) in self._absent.items():
            parameter = nnx.Param(params[path])
            for *above, name in places:
                put(owners[0, *above], name, parameter)
                found.add((0, *above, name))
        return found


def _values_of(nodes: PyTree) -> _Values:
    """Return the flattened values of all variables.

    A variable may hold a tree that changes in place, so its leaves tell whether it
    changed.
    """
    variables = nodes_of(nodes, nnx.Variable)
    return {path: jax.tree.flatten(_raw(node)) for path, node in variables.items()}


def _changes(
    nodes: PyTree, attributes: _Attributes, values: _Values, absent: set[Path]
) -> PyTree:
    """Return the changes of a method, of variables and of attributes of modules.

    They are `[(path, value)]` and `[(path, name, value)]`: lists and not dicts, because
    a path mixes names and numbers, and JAX sorts the keys of dicts. `attributes` and
    `values` are from before the method ran. Parameters at `absent` were put there for
    the call and are not changes.
    """
    changed = {}
    for path, (leaves, treedef) in _values_of(nodes).items():
        held, held_treedef = values.get(path, (leaves, treedef))
        same = treedef == held_treedef and all(map(operator.is_, leaves, held))
        if not same:
            changed[path] = jax.tree.unflatten(treedef, leaves)
    replaced = []
    for path, module in nodes_of(nodes, nnx.Module).items():
        now = vars(module)
        old = attributes.get(path, now)
        for name in {*now, *old}:
            value = now.get(name, _GONE)
            unchanged = value is old.get(name, _GONE) or (*path, name) in absent
            if unchanged or name.startswith("_pytree__"):
                continue
            if isinstance(value, nnx.Module):
                raise NotImplementedError(
                    f"{type(module).__name__}.{name} is a module that the method makes"
                    " while it runs; call the model once before conversion, so that it"
                    " exists"
                )
            replaced.append((path, name, value))
            # A new variable replaces the old one, whatever that holds
            changed.pop((*path, name), None)
    return list(changed.items()), replaced


def _flat_state(state: Any, path: Path = ()) -> Iterator[tuple[Path, PyTree]]:
    """Yield the variables of a state by path, in its own order.

    Paths mix names and numbers, which have no order.
    """
    for name, value in state.items():
        if isinstance(value, Mapping) and not is_variable(value):
            yield from _flat_state(value, (*path, name))
        else:
            yield (*path, name), value


def _check_followed(variable: Any, name: str) -> None:
    """Raise unless a trace can follow the values of a variable."""
    for kind in ("hijax", "ref"):
        if is_variable(variable) and getattr(variable, kind, False):
            raise ValueError(
                f"{name!r} is a variable with {kind}=True, whose values a conversion"
                " cannot follow; make the model under nnx.var_defaults(hijax=False,"
                " ref=False)"
            )


def _raw(variable: Any) -> PyTree:
    """Return the value of a variable.

    An array that is an attribute without a variable is its own value.
    """
    return variable.get_raw_value() if is_variable(variable) else variable


def _is_node(leaf: object) -> bool:
    return isinstance(leaf, nnx.Module | nnx.Rngs | nnx.RngStream | nnx.Variable)
