"""Flax NNX layers: `nnx.Linear`, `LinearGeneral`, `Einsum`, `LayerNorm` and `Embed` with low precision.

Each is a subclass of Flax's own with the same `Param`s, so states are interchangeable both ways. A layer multiplies by
the quantized kernel in `stored`, which `tcfp_jax.conversion.sync(model, optimizer)` makes the optimizer's own variable,
and quantizes its parameter on the fly where there is none. No forward pass writes a variable.
"""

import contextvars
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels.checks import check_real
from tcfp_jax.layers import CHOICES, Multiply, Stored, common_dtype, dense_general_equation
from tcfp_jax.products.contraction import contract
from tcfp_jax.recipes import Recipe
from tcfp_jax.recipes import recipe as named_recipe
from tcfp_jax.weights.layout import Layout, parse
from tcfp_jax.weights.packed import PackedTCFP12, fake_quantize

Products = Literal["recipe", "flax"]
Lookup = Literal["packed", "float"]

# A function that `survey` puts here is told of every product: (layer, name of the kernel, equation, x).
WATCHER: contextvars.ContextVar[Callable[..., Any] | None] = contextvars.ContextVar("tcfp_nnx_watcher", default=None)


class LowPrecision:
    """What the layers share: `recipe`, `products` ("recipe", or "flax" for Flax's own code) and `stored`.

    Named last among the bases, and without slots of its own: the layout of an object then stays that of Flax's class,
    so that conversion can change a layer's class in place.
    """

    __slots__ = ()
    recipe: Recipe | None
    products: Products
    stored: nnx.Variable | None
    forward: Callable[..., jax.Array]


def call(self: Any, *args: Any, **options: Any) -> jax.Array:
    """The layer's output; arguments are those of Flax's own layer, the class before `LowPrecision`.

    Raises:
      NotImplementedError: `out_sharding`.
    """
    if self.products == "flax":
        kinds = type(self).__mro__
        flax_call: Any = kinds[next(i for i, kind in enumerate(kinds) if "forward" in vars(kind)) + 1].__call__
        return flax_call(self, *args, **options)
    if options.pop("out_sharding", None) is not None:
        raise NotImplementedError("out_sharding: the product follows the sharding of x; constrain its result")
    return type(self).forward(self, multiplier(self), *args, **options)


def multiplier(layer: Any) -> Multiply:
    """The products of an NNX layer: with its stored kernel where there is one.

    >>> layer = TCFPLinear(3, 4, rngs=nnx.Rngs(0))
    >>> multiplier(layer)("bk,kn->bn", jnp.ones((2, 3)), layer.kernel[...]).shape
    (2, 4)
    """

    def multiply(equation: str, x: jax.Array, kernel: Any, *, name: str = "kernel") -> jax.Array:
        watch = WATCHER.get()
        if watch is not None:
            watch(layer, name, equation, x)
        is_variable = lambda leaf: isinstance(leaf, nnx.Variable)
        stored: Any = jax.tree.map(lambda leaf: leaf[...], layer.stored, is_leaf=is_variable)
        quantized, shape = stored, None
        if isinstance(kernel, Stored):
            # Under nnx.scan and nnx.vmap arrays lose their stacked axes; what stands for one keeps them.
            axes = len(equation.replace(" ", "").split("->")[0].split(",")[1])
            kernel, shape = None, kernel.shape[len(kernel.shape) - axes :]
        if isinstance(stored, PackedTCFP12):
            quantized, kernel = None, stored.dequantize()
        recipe = layer.recipe
        key = jax.random.key(0) if quantized is None and recipe.stochastic else None
        return contract(equation, x, kernel, recipe=recipe, quantized=quantized, key=key, shape=shape)

    return multiply


def prepare(layer: Any, recipe: Recipe | str | None) -> None:
    """Give a layer the attributes of `LowPrecision`.

    Raises:
      ValueError: a choice of the layer that the recipe would override, such as `precision`.
    """
    reason = refusal(layer)
    if reason is not None and recipe is not None:
        raise ValueError(f"{type(layer).__name__}({reason}): the recipe decides how the product is computed; unset it")
    layer.recipe = None if recipe is None else named_recipe(recipe)
    layer.products = "recipe"
    layer.stored = nnx.data(None)


def refusal(layer: Any) -> str | None:
    """Why the layer's own way to multiply keeps it from a recipe, or None.

    >>> refusal(nnx.Linear(2, 2, precision="highest", rngs=nnx.Rngs(0)))
    "precision='highest'"
    """
    usual = (None, jax.lax.dot_general, jnp.einsum, nnx.nn.dtypes.promote_dtype)
    for name in CHOICES:
        value = getattr(layer, name, None)
        if not any(value is one for one in usual):
            return f"{name}={value!r}"
    return None


def layout(layer: Any) -> Layout | None:
    """The layout of the layer's kernel, or None where only a call shows it.

    >>> layout(TCFPEmbed(8, 4, rngs=nnx.Rngs(0)))
    Layout(inputs=(1,), outputs=(0,), stack=())
    """
    if isinstance(layer, nnx.Linear):
        return Layout((0,), (1,))
    if isinstance(layer, nnx.Embed):
        return Layout((1,), (0,))
    if isinstance(layer, nnx.LinearGeneral):
        batch, inputs = len(layer.batch_axis), len(layer.in_features)
        stop = batch + inputs + len(layer.out_features)
        axes = tuple(range(stop))
        return Layout(axes[batch : batch + inputs], axes[batch + inputs :], axes[:batch])
    if isinstance(layer, nnx.Einsum) and layer.einsum_str is not None:
        return parse(layer.einsum_str, len(layer.einsum_str.split(",")[0].replace("...", "").replace(" ", "")))[3]
    return None


def linear(layer: Any, multiply: Multiply, inputs: jax.Array) -> jax.Array:
    """`nnx.Linear`: `y = x W + b`, x `[..., k]`, W `[k, n]`."""
    inputs, kernel, bias, dtype = _operands(layer, inputs)
    y = multiply("...k,kn->...n", inputs.astype(dtype), kernel)
    return y if bias is None else y + bias.astype(dtype)


def linear_general(layer: Any, multiply: Multiply, inputs: jax.Array) -> jax.Array:
    """`nnx.LinearGeneral`: contracts `axis`, keeps `batch_axis` apart; W `[*batch, *in, *out]`."""
    inputs, kernel, bias, dtype = _operands(layer, inputs)
    axes = tuple(sorted(axis % inputs.ndim for axis in layer.axis))
    batch = tuple(sorted(axis % inputs.ndim for axis in layer.batch_axis))
    features = tuple(layer.out_features)
    y = multiply(dense_general_equation(inputs.ndim, axes, batch, len(features)), inputs.astype(dtype), kernel)
    if bias is None:
        return y
    ones = (1,) * (inputs.ndim - len(axes) - len(batch))
    return y + bias.astype(dtype).reshape(*(inputs.shape[axis] for axis in batch), *ones, *features)


def einsum(layer: Any, multiply: Multiply, inputs: jax.Array, einsum_str: str | None = None) -> jax.Array:
    """`nnx.Einsum`: the equation of the call or of the layer."""
    inputs, kernel, bias, dtype = _operands(layer, inputs)
    equation = einsum_str or layer.einsum_str
    if equation is None:
        raise ValueError("Einsum has no einsum_str, neither in the layer nor in the call; pass one")
    equation = equation.replace(" ", "")
    y = multiply(equation, inputs.astype(dtype), kernel)
    if bias is None:
        return y
    _, letters, result, kept = parse(equation, inputs.ndim)
    sizes = dict(zip(letters, kernel.shape[len(kernel.shape) - kept.ndim :]))
    return y + bias.astype(dtype).reshape([sizes.get(letter, 1) for letter in result])


class TCFPLinear(nnx.Linear, LowPrecision):
    """`nnx.Linear` whose product follows a recipe: `y = x W + b`, x `[..., k]`, W `[k, n]`.

    Arguments are those of `nnx.Linear`, plus `recipe`, a `Recipe` or the name of one.

    Raises:
      TypeError: integer or complex inputs.
      ValueError: an argument that the recipe decides (`precision`, `dot_general`, ...), or an unknown recipe.

    >>> jax.eval_shape(lambda: TCFPLinear(3, 4, recipe="tcfp12_fast", rngs=nnx.Rngs(0))(jnp.ones((2, 3)))).shape
    (2, 4)
    """

    forward = staticmethod(linear)
    __call__ = call

    def __init__(self, *args: Any, recipe: Recipe | str = "tcfp12", **options: Any) -> None:
        super().__init__(*args, **options)
        prepare(self, recipe)


class TCFPLinearGeneral(nnx.LinearGeneral, LowPrecision):
    """`nnx.LinearGeneral` whose product follows a recipe; errors as in `TCFPLinear`.

    >>> jax.eval_shape(lambda: TCFPLinearGeneral(3, (2, 4), rngs=nnx.Rngs(0))(jnp.ones((5, 3)))).shape
    (5, 2, 4)
    """

    forward = staticmethod(linear_general)
    __call__ = call

    def __init__(self, *args: Any, recipe: Recipe | str = "tcfp12", **options: Any) -> None:
        super().__init__(*args, **options)
        prepare(self, recipe)


class TCFPEinsum(nnx.Einsum, LowPrecision):
    """`nnx.Einsum` whose product follows a recipe; errors as in `TCFPLinear`.

    Raises:
      NotImplementedError: an equation that is no stack of matrix products.

    >>> jax.eval_shape(lambda: TCFPEinsum("bk,khd->bhd", (3, 2, 4), rngs=nnx.Rngs(0))(jnp.ones((5, 3)))).shape
    (5, 2, 4)
    """

    forward = staticmethod(einsum)
    __call__ = call

    def __init__(self, *args: Any, recipe: Recipe | str = "tcfp12", **options: Any) -> None:
        super().__init__(*args, **options)
        prepare(self, recipe)


class TCFPLayerNorm(nnx.LayerNorm):
    """`nnx.LayerNorm` whose scale and bias are rounded to the packed TCFP-12 format, with a straight-through gradient.

    >>> jax.eval_shape(lambda: TCFPLayerNorm(4, rngs=nnx.Rngs(0))(jnp.arange(8.0).reshape(2, 4))).shape
    (2, 4)
    """

    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalize x; `mask` as in `nnx.LayerNorm`."""
        rounded: Any = _Rounded(self)
        return nnx.LayerNorm.__call__(rounded, x, mask=mask)


class TCFPEmbed(nnx.Embed):
    """`nnx.Embed` whose rows are rounded to the packed TCFP-12 format, and whose `attend` follows a recipe.

    Arguments are those of `nnx.Embed`, plus `recipe` (None: `attend` runs Flax's own code) and `lookup`: "packed"
    rounds the rows, straight-through; "float" leaves them.

    Raises:
      ValueError: tokens that are no integers, an unknown `lookup`, or an argument that the recipe decides.

    >>> layer = TCFPEmbed(8, 4, rngs=nnx.Rngs(0))
    >>> [y.shape for y in jax.eval_shape(lambda: (layer(jnp.arange(3)), layer.attend(jnp.ones((2, 4)))))]
    [(3, 4), (2, 8)]
    """

    recipe: Recipe | None
    products: Products
    stored: nnx.Variable | None
    lookup: Lookup

    def __init__(
        self, *args: Any, recipe: Recipe | str | None = "tcfp12", lookup: Lookup = "packed", **options: Any
    ) -> None:
        super().__init__(*args, **options)
        prepare(self, recipe)
        if lookup not in ("packed", "float"):
            raise ValueError(f'lookup={lookup!r} is unknown; use "packed" or "float"')
        self.lookup = lookup

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Integer tokens `[...]` to `[..., features]`."""
        if self.products == "flax" or self.lookup == "float":
            return super().__call__(inputs, out_sharding)
        if out_sharding is not None:
            raise NotImplementedError("out_sharding with packed rows: constrain the result instead")
        if not jnp.issubdtype(inputs.dtype, jnp.integer):
            raise ValueError(f"Embed looks up integers, but got {inputs.dtype}; cast the tokens to int32")
        rows = self.embedding[...]
        if self.num_embeddings == 1:
            rows = jnp.broadcast_to(rows, (*inputs.shape, self.features))
        else:
            rows = jnp.take(rows, inputs, axis=0)
        return fake_quantize(rows).astype(self.dtype)

    def attend(self, query: jax.Array, out_sharding: Any = None) -> jax.Array:
        """`query` `[..., features]` to scores `[..., num_embeddings]`."""
        if self.products == "flax" or self.recipe is None:
            return super().attend(query, out_sharding)
        if out_sharding is not None:
            raise NotImplementedError("out_sharding: the product follows the sharding of query; constrain its result")
        check_real("query", query)
        query = query.astype(self.dtype)
        return multiplier(self)("...k,nk->...n", query, self.embedding[...], name="embedding")


TYPES: dict[type, type] = {
    nnx.Linear: TCFPLinear, nnx.LinearGeneral: TCFPLinearGeneral, nnx.Einsum: TCFPEinsum,
}  # fmt: skip
FORWARDS: dict[type, Callable[..., jax.Array]] = {
    nnx.Linear: linear, nnx.LinearGeneral: linear_general, nnx.Einsum: einsum,
}  # fmt: skip


def _operands(layer: Any, inputs: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array | None, Any]:
    inputs = jnp.asarray(inputs)
    check_real("inputs", inputs)
    kernel, bias = layer.kernel[...], None if layer.bias is None else layer.bias[...]
    return inputs, kernel, bias, common_dtype(inputs, kernel, bias, layer.dtype)


class _Rounded:
    """A layer whose parameters are rounded when they are read."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._layer, name)
        return nnx.Param(fake_quantize(value[...])) if isinstance(value, nnx.Param) else value
