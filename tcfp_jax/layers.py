"""How each Flax Linen layer computes its output, with the product left open: `forward(layer, multiply, *inputs)`.

`multiply(equation, x, kernel)` is an einsum whose product follows a recipe. The same functions are the bodies of the
layers in `tcfp_jax.linen` and what conversion runs in the place of Flax's own, so both give the same bits. They read
parameters through the layer, with its own names, shapes and initializers, and never write a variable.

A layer finds its quantized kernel as a parameter beside its own (`kernel@tcfp`, where a converted model puts it, so
that `nn.scan`, `nn.vmap` and `nn.remat` treat it as they treat the kernel), or in the `tcfp` collection.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.dtypes import canonicalize_dtype

from pallas_kernels.checks import check_real
from tcfp_jax.products.contraction import contract
from tcfp_jax.recipes import Recipe
from tcfp_jax.weights.packed import PackedTCFP12, fake_quantize

COLLECTION = "tcfp"
RNG = "tcfp"
BESIDE = "@tcfp"  # no Python identifier holds it, so no layer has a parameter of that name

# Fields by which a Flax layer computes its product in another way; a recipe decides that, so they must be unset.
CHOICES = (
    "precision", "dot_general", "dot_general_cls", "promote_dtype", "preferred_element_type", "einsum_op",
)  # fmt: skip


class Multiply(Protocol):
    """An einsum of x and a kernel, the kernel's name being that of the parameter."""

    def __call__(self, equation: str, x: jax.Array, kernel: Any, *, name: str = "kernel") -> jax.Array:
        """`einsum(equation, x, kernel)`."""


def multiplier(layer: nn.Module, recipe: Recipe) -> Multiply:
    """The products of a bound Linen layer: with its stored kernel if the caller passed one.

    >>> class Layer(nn.Module):
    ...     def __call__(self, x):
    ...         return multiplier(self, Recipe())("bk,kn->bn", x, jnp.ones((3, 4)))
    >>> Layer().apply({}, jnp.ones((2, 3))).shape
    (2, 4)
    """

    def multiply(equation: str, x: jax.Array, kernel: Any, *, name: str = "kernel") -> jax.Array:
        stored, key = stored_weight(layer, name), None
        quantized = stored
        shape = None
        if isinstance(kernel, Stored):
            kernel, shape = None, kernel.shape
        if isinstance(stored, PackedTCFP12):
            quantized, kernel = None, stored.dequantize()
        if quantized is None and recipe.stochastic:
            key = layer.make_rng(RNG) if layer.has_rng(RNG) else jax.random.key(0)
        return contract(equation, x, kernel, recipe=recipe, quantized=quantized, key=key, shape=shape)

    return multiply


def stored_weight(layer: nn.Module, name: str) -> Any:
    """The quantized parameter of a bound layer, or None."""
    if layer.has_variable("params", name + BESIDE):
        return layer.get_variable("params", name + BESIDE)
    return layer.get_variable(COLLECTION, name) if layer.has_variable(COLLECTION, name) else None


@dataclass(frozen=True)
class Stored:
    """Stands for a kernel of which only the quantized form exists: its shape and the parameter's dtype.

    Indexed, as NNX layers read their parameters, it is itself; as an operand of anything but `multiply` it raises.

    >>> Stored((3, 4), jnp.dtype("float32"))[...].shape
    (3, 4)
    """

    shape: tuple[int, ...]
    dtype: Any

    def __getitem__(self, index: Any) -> "Stored":
        """The same, for `kernel[...]`."""
        return self

    def __jax_array__(self) -> Any:
        """Raise: there is no float kernel.

        Raises:
          NotImplementedError: always.
        """
        raise NotImplementedError(
            f"a kernel of shape {list(self.shape)} exists in quantized form only, but code reads the float one; pass "
            "it to multiply alone, or load the float parameters before to_bf16 or export"
        )


def kernel_of(layer: Any, name: str, init: Any, shape: tuple[int, ...]) -> Any:
    """The layer's parameter, or `Stored` where inference weights took its place; for adapters to pass to `multiply`."""
    dtype = getattr(layer, "param_dtype", jnp.float32)
    absent = not layer.is_initializing() and not layer.has_variable("params", name)
    if absent and stored_weight(layer, name) is not None:
        return Stored(tuple(shape), jnp.dtype(dtype))
    return layer.param(name, init, shape, dtype)


def common_dtype(inputs: jax.Array, kernel: Any, bias: jax.Array | None, dtype: Any) -> Any:
    """The dtype in which Flax would multiply."""
    typed = jnp.zeros((), kernel.dtype) if isinstance(kernel, Stored) else kernel
    return canonicalize_dtype(inputs, typed, bias, dtype=dtype)


def dense(layer: Any, multiply: Multiply, inputs: jax.Array) -> jax.Array:
    """`nn.Dense`: `y = x W + b`, x `[..., k]`, W `[k, features]`."""
    inputs = jnp.asarray(inputs)
    check_real("inputs", inputs)
    kernel = kernel_of(layer, "kernel", layer.kernel_init, (inputs.shape[-1], layer.features))
    bias = layer.param("bias", layer.bias_init, (layer.features,), layer.param_dtype) if layer.use_bias else None
    dtype = common_dtype(inputs, kernel, bias, layer.dtype)
    y = multiply("...k,kn->...n", inputs.astype(dtype), kernel)
    return y if bias is None else y + bias.astype(dtype)


def dense_general(layer: Any, multiply: Multiply, inputs: jax.Array) -> jax.Array:
    """`nn.DenseGeneral`: contracts `axis`, keeps `batch_dims` apart; W `[*batch, *in, *features]`."""
    inputs = jnp.asarray(inputs)
    check_real("inputs", inputs)
    as_tuple = lambda value: (value,) if isinstance(value, int) else tuple(value)
    features, batch = as_tuple(layer.features), as_tuple(layer.batch_dims)
    axes = tuple(sorted(axis % inputs.ndim for axis in as_tuple(layer.axis)))
    if batch != tuple(range(len(batch))):
        raise ValueError(f"batch_dims={batch} must be consecutive leading axes from 0")
    take = lambda indices: tuple(inputs.shape[axis] for axis in indices)
    shape = take(batch) + take(axes) + features
    flat = lambda init, rows, columns, shape: lambda key, _, dtype: _reshaped(init(key, (*rows, columns), dtype), shape)
    rows = (math.prod(take(batch)) * math.prod(take(axes)),)
    kernel = kernel_of(layer, "kernel", flat(layer.kernel_init, rows, math.prod(features), shape), shape)
    bias = None
    if layer.use_bias:
        bias_shape = take(batch) + features
        columns = math.prod(take(batch)) * math.prod(features)
        bias = layer.param("bias", flat(layer.bias_init, (), columns, bias_shape), bias_shape, layer.param_dtype)
    dtype = common_dtype(inputs, kernel, bias, layer.dtype)
    y = multiply(dense_general_equation(inputs.ndim, axes, batch, len(features)), inputs.astype(dtype), kernel)
    if bias is None:
        return y
    ones = (1,) * (inputs.ndim - len(axes) - len(batch))
    return y + bias.astype(dtype).reshape(*take(batch), *ones, *features)


def dense_general_equation(ndim: int, axes: tuple[int, ...], batch: tuple[int, ...], features: int) -> str:
    """The einsum of a `DenseGeneral`.

    >>> dense_general_equation(3, (1, 2), (), 1)
    'abc,bcd->ad'
    """
    letters = "abcdefghijklmnopqrstuvwxyz"
    x, out = letters[:ndim], letters[ndim : ndim + features]
    pick = lambda indices: "".join(x[i] for i in indices)
    rest = [i for i in range(ndim) if i not in axes and i not in batch]
    return f"{x},{pick(batch)}{pick(axes)}{out}->{pick(batch)}{pick(rest)}{out}"


def einsum(layer: Any, multiply: Multiply, inputs: jax.Array, einsum_str: str | None = None) -> jax.Array:
    """`nn.Einsum`: the equation of the layer or of the call, the kernel of shape `shape`."""
    inputs = jnp.asarray(inputs)
    check_real("inputs", inputs)
    equation = nn.merge_param("einsum_str", layer.einsum_str, einsum_str).replace(" ", "")
    kernel = kernel_of(layer, "kernel", layer.kernel_init, layer.shape)
    bias = None
    if layer.use_bias:
        plain = jax.ShapeDtypeStruct(kernel.shape, kernel.dtype)
        bias_shape, expanded = layer._get_bias_shape(equation, inputs, plain)
        bias = layer.param("bias", layer.bias_init, bias_shape, layer.param_dtype)
    dtype = common_dtype(inputs, kernel, bias, layer.dtype)
    y = multiply(equation, inputs.astype(dtype), kernel)
    return y if bias is None else y + bias.astype(dtype).reshape(expanded)


def attend(layer: Any, multiply: Multiply, query: jax.Array) -> jax.Array:
    """`nn.Embed.attend`: `y = q Eᵀ`, E `[num_embeddings, features]`."""
    query = jnp.asarray(query)
    check_real("query", query)
    dtype = canonicalize_dtype(query, layer.embedding, dtype=layer.dtype)
    return multiply("...k,nk->...n", query.astype(dtype), layer.embedding, name="embedding")


def layer_norm(layer: Any, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
    """`nn.LayerNorm` whose scale and bias are rounded to the packed TCFP-12 format, straight-through."""
    return body(nn.LayerNorm, "__call__")(_RoundedParams(layer), x, mask=mask)


def embed(layer: Any, inputs: jax.Array) -> jax.Array:
    """`nn.Embed` whose rows are rounded to the packed TCFP-12 format, straight-through."""
    if not jnp.issubdtype(inputs.dtype, jnp.integer):
        raise ValueError(f"Embed looks up integers, but got {inputs.dtype}; cast the tokens to int32")
    rows = layer.embedding
    if layer.num_embeddings == 1:
        rows = jnp.broadcast_to(rows, (*inputs.shape, layer.features))
    else:
        rows = jnp.take(rows, inputs, axis=0)  # blocks run along a row, so the rows looked up are all that matter
    return fake_quantize(rows).astype(layer.dtype or rows.dtype)


def body(kind: type, method: str) -> Callable[..., Any]:
    """The function that a class defines as a method, without the wrapper that Linen puts around it."""
    return inspect.unwrap(getattr(kind, method))


def refusal(layer: Any, kind: type) -> str | None:
    """Why the layer's own way to multiply keeps it from a recipe, or None.

    >>> refusal(nn.Dense(4, precision="highest"), nn.Dense)
    "precision='highest'"
    """
    fields = getattr(kind, "__dataclass_fields__", {})
    for name in CHOICES:
        if name in fields and getattr(layer, name) is not fields[name].default:
            return f"{name}={getattr(layer, name)!r}"
    return None


def check_unused(layer: Any, kind: type) -> None:
    """Raise if a field is set that the recipe decides.

    Raises:
      ValueError: names the field.
    """
    reason = refusal(layer, kind)
    if reason is not None:
        raise ValueError(
            f"{type(layer).__name__}({reason}): the recipe decides how the product is computed; "
            f"leave {reason.split('=')[0]} unset, or use nn.{kind.__name__}"
        )


class _RoundedParams:
    """A layer whose parameters are rounded when they are read."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def param(self, *args: Any, **options: Any) -> jax.Array:
        return fake_quantize(self._layer.param(*args, **options))


def _reshaped(value: Any, shape: tuple[int, ...]) -> Any:
    if isinstance(value, nn.meta.AxisMetadata):
        return nn.meta.replace_boxed(value, jnp.reshape(value.unbox(), shape))
    return jnp.reshape(value, shape)
