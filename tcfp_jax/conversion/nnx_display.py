"""Displays of converted NNX models: a stored parameter counts as its kernel does.

Flax counts the values of all arrays in a variable. A stored parameter has two halves,
scales and a state, which are more values than the kernel has. So a converted module
shows a copy of itself. Its arrays are the same, and its stored parameters are one array
for Flax. `nnx.display`, `print` and notebooks then give the kernel's shape and the
bytes of all its arrays.
"""

import math
from typing import Any

import jax
from flax import nnx

from tcfp_jax.conversion.nnx_modules import is_variable, modules_of
from tcfp_jax.paths import Function
from tcfp_jax.weights.parameter import Parameter


class _Format:
    """The dtype of a stored parameter, as Flax's count reads it."""

    def __init__(self, parameter: Parameter) -> None:
        self.name = f"{parameter.dtype} hi + lo"
        # Bytes per value, with the shares of scales and state
        self.itemsize = parameter.nbytes / math.prod(parameter.kernel_shape)

    def __repr__(self) -> str:
        return self.name


class _Kernel:
    """A stored parameter, as Flax's count and its displays read it."""

    def __init__(self, parameter: Parameter) -> None:
        self.shape = parameter.kernel_shape
        self.dtype = _Format(parameter)

    def __repr__(self) -> str:
        return f"Parameter(shape={self.shape}, dtype={self.dtype})"


def _is_stored(node: Any) -> bool:
    return is_variable(node) and isinstance(node.get_raw_value(), Parameter)


def _counted(variable: Any) -> Any:
    """Return a variable of a `_Kernel` instead of one of a stored parameter."""
    if not _is_stored(variable):
        return variable
    return variable.replace(_Kernel(variable.get_raw_value()))


def _shown(module: nnx.Module) -> nnx.Module:
    """Return the module, or a copy with a `_Kernel` for each stored parameter."""
    if not any(_is_stored(node) for _, node in nnx.iter_graph(module)):
        return module
    graph, state = nnx.split(module)
    copy = nnx.merge(graph, jax.tree.map(_counted, state, is_leaf=is_variable))
    copies = modules_of(copy)
    for path, original in modules_of(module).items():
        # A merge sorts attributes by name
        attributes = vars(copies[path])
        for name in vars(original):
            attributes[name] = attributes.pop(name)
    return copy


def displays_of(base: type) -> dict[str, Function]:
    """Return the methods by which Flax and treescope show modules of a class."""
    kind: Any = base

    def text(self: nnx.Module) -> Any:
        return kind.__nnx_repr__(_shown(self))

    def tree(self: nnx.Module, path: str | None, subtree_renderer: Any) -> Any:
        return kind.__treescope_repr__(_shown(self), path, subtree_renderer)

    return {"__nnx_repr__": text, "__treescope_repr__": tree}
