"""Which layer types conversion knows, and `register_adapter`, which teaches it more."""

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from flax import linen as nn
from flax import nnx as flax_nnx

from tcfp_jax import layers, linen, nnx

Group = Literal["linear", "head", "layer_norm", "embed"]


@dataclass(frozen=True)
class Adapter:
    """How conversion runs one method of a layer type.

    Attributes:
      module_type: the layer.
      forward: `forward(layer, multiply, *args, **kwargs)`, the method with its product left open.
      method: the method that it replaces.
      kernel: name of the parameter that is multiplied.
      group: what `include=` of `convert_to_tcfp` calls it.
      base: Flax's class, where `module_type` is one of `tcfp_jax.linen`'s, which has a recipe of its own.
    """

    module_type: type
    forward: Callable[..., Any]
    method: str = "__call__"
    kernel: str = "kernel"
    group: Group = "linear"
    base: type | None = None


# By the function that runs, not by type: a subclass with its own `__call__` is another layer, and one without is not.
_LINEN: dict[Any, Adapter] = {}
_NNX: dict[type, Adapter] = {}
_OWN: dict[type, type] = {}


def register_adapter(
    module_type: type, forward: Callable[..., Any], *, method: str = "__call__", kernel: str = "kernel"
) -> None:
    """Teach conversion a layer of another package.

    `forward(layer, multiply, *args, **kwargs)` computes what the method does, and calls `multiply(equation, x, kernel)`
    for its product: an einsum of two operands, the kernel last and as the parameter is stored. It reads parameters as
    the layer does (`layer.param(...)` in Linen, `layer.kernel[...]` in NNX). Registering a type again replaces it.

    Args:
      module_type: a subclass of `flax.linen.Module` or `flax.nnx.Module`; for NNX exactly this type is converted, for
        Linen every class that runs this type's method.
      forward: the method with its product left open.
      method: name of the method that it replaces; for NNX only "__call__".
      kernel: name of the parameter that is multiplied; where it is not "kernel", pass `name=` to `multiply` too.

    Raises:
      TypeError: `module_type` is not a Flax module type, or `forward` cannot take a layer and `multiply`.
      ValueError: the type has no such method.
      NotImplementedError: another method of an NNX type.

    >>> class Transposed(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, x):
    ...         return x @ self.param("kernel", nn.initializers.normal(), (4, x.shape[-1])).T
    >>> def forward(layer, multiply, x):
    ...     kernel = layer.param("kernel", nn.initializers.normal(), (4, x.shape[-1]))
    ...     return multiply("...k,nk->...n", x, kernel)
    >>> register_adapter(Transposed, forward)
    """
    known = isinstance(module_type, type) and issubclass(module_type, nn.Module | flax_nnx.Module)
    if not known:
        raise TypeError(f"module_type={module_type!r} is not a subclass of flax.linen.Module or flax.nnx.Module")
    if not callable(forward):
        raise TypeError(f"forward={forward!r} is not callable; write forward(layer, multiply, *args)")
    try:
        inspect.signature(forward).bind(None, None, None)
    except TypeError as error:
        raise TypeError(
            f"forward{inspect.signature(forward)} does not fit: it is called as forward(layer, multiply, x, ...)"
        ) from error
    if not callable(getattr(module_type, method, None)):
        raise ValueError(f"{module_type.__name__} has no method {method!r}; pass method= one that it defines")
    adapter = Adapter(module_type, forward, method, kernel)
    if issubclass(module_type, flax_nnx.Module):
        if method != "__call__":
            raise NotImplementedError(f"method={method!r}: NNX layers are converted by __call__ only")
        _NNX[module_type] = adapter
    else:
        _LINEN[linen.body(module_type, method)] = adapter


def linen_adapter(function: Any) -> Adapter | None:
    """The adapter of the function that a Linen layer is about to run, or None."""
    return _LINEN.get(inspect.unwrap(function))


def nnx_adapter(module_type: type) -> Adapter | None:
    """The adapter registered for an NNX type, or None."""
    return _NNX.get(module_type)


def own_base(module_type: type) -> type | None:
    """Flax's class of one of `tcfp_jax.linen`'s layer types, or None.

    >>> own_base(linen.TCFPDense).__name__
    'Dense'
    """
    return _OWN.get(module_type)


def _register_flax() -> None:
    of = lambda function: layers.forward_of(function, linen.read)
    norm = lambda layer, multiply, x, **options: layers.layer_norm(linen.read(layer), x, **options)
    rows = lambda layer, multiply, inputs: layers.embed(linen.read(layer), inputs)
    for adapter in (
        Adapter(nn.Dense, of(layers.dense)),
        Adapter(nn.DenseGeneral, of(layers.dense_general)),
        Adapter(nn.Einsum, of(layers.einsum)),
        Adapter(nn.Embed, of(layers.attend), "attend", "embedding", "head"),
        Adapter(nn.Embed, rows, "__call__", "embedding", "embed"),
        Adapter(nn.LayerNorm, norm, "__call__", "scale", "layer_norm"),
    ):
        own: type = getattr(linen, f"TCFP{adapter.module_type.__name__}")
        _LINEN[linen.body(adapter.module_type, adapter.method)] = adapter
        _OWN[own] = adapter.module_type
        _LINEN[linen.body(own, adapter.method)] = dataclasses.replace(
            adapter, module_type=own, base=adapter.module_type
        )
    for kind, forward in nnx.FORWARDS.items():
        _NNX[kind] = Adapter(kind, forward)


_register_flax()
