"""Flax NNX layers: `nnx.Linear`, `LinearGeneral`, `Einsum`, `LayerNorm` and `Embed`
with low precision.

Each is a subclass of Flax's own with the same `Param`s, so states of both are
interchangeable. A layer multiplies by the quantized kernel in `stored`, or else
quantizes its parameter at each call. `tcfp_jax.nnx.Optimizer` makes the arrays of
`stored` the optimizer's own variables. No forward pass writes a variable.
"""

import inspect
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels.specs import Sharding
from tcfp_jax import layers
from tcfp_jax.layers import CHOICES, Absent, Multiply
from tcfp_jax.products.einsum import Contraction
from tcfp_jax.products.fp4_api import of_fp4
from tcfp_jax.recipes import Recipe
from tcfp_jax.recipes import recipe as named_recipe
from tcfp_jax.weights.stored import Stored

RNG = "tcfp"


class _LowPrecision:
    """Attributes of all layers: `recipe`, `products` ("recipe", or "flax" for Flax's
    own code) and `stored`.

    It is the last base class and has no slots: objects keep the memory layout of Flax's
    class, and may change class.
    """

    __slots__ = ()
    recipe: Recipe
    products: Literal["recipe", "flax"]
    stored: Stored | None  # its arrays are `nnx.Variable`s
    keys: nnx.RngStream  # only if products draw random bits
    forward: Callable[..., jax.Array]


def _call(self: Any, *args: Any, **options: Any) -> jax.Array:
    """Return the layer's output; it takes the arguments of the Flax layer, the class
    before `_LowPrecision`.
    """
    # Users may subclass a layer of ours, so Flax's class is found by its place behind
    # the class that has `forward`.
    kinds = type(self).__mro__
    flax_call: Any = kinds[
        next(i for i, kind in enumerate(kinds) if "forward" in vars(kind)) + 1
    ].__call__
    if self.products == "flax":
        return flax_call(self, *args, **options)
    # By name, as forward passes take them; where the result lies is the product's own
    # argument.
    given = dict(inspect.signature(flax_call).bind(self, *args, **options).arguments)
    given.pop("self")
    return type(self).forward(
        _Reader(self), _multiplier(self, given.pop("out_sharding", None)), **given
    )


def _multiplier(layer: Any, out_sharding: Sharding = None) -> Multiply:
    """Return the product of an NNX layer, which reads its stored kernel if there is
    one.
    """

    def multiply(
        equation: str | Contraction,
        x: jax.Array,
        kernel: jax.Array | Absent,
        *,
        name: str = "kernel",
    ) -> jax.Array:
        keys = getattr(layer, "keys", None)
        key = lambda: None if keys is None else keys()
        options: Any = dict(recipe=layer.recipe, stored=stored_weight(layer), key=key)
        return layers.product(equation, x, kernel, out_sharding=out_sharding, **options)

    return multiply


def stored_weight(layer: Any) -> Stored | None:
    """Return the stored weight of a layer, with the present arrays of its variables, or
    None.
    """
    # Read at each call, because the optimizer writes new arrays into the same
    # variables.
    is_variable = lambda node: isinstance(node, nnx.Variable)
    return jax.tree.map(
        lambda variable: variable[...], layer.stored, is_leaf=is_variable
    )


def store(layer: Any, weight: Stored) -> None:
    """Let a layer multiply by a stored weight; its arrays become variables unless they
    are already.
    """
    # The optimizer's own variables stay the same objects, so its next update is what
    # the layer reads.
    variable = lambda leaf: (
        leaf if isinstance(leaf, nnx.Variable) else nnx.Variable(leaf)
    )
    layer.stored = nnx.data(
        jax.tree.map(
            variable, weight, is_leaf=lambda node: isinstance(node, nnx.Variable)
        )
    )


def _prepare(layer: Any, recipe: Recipe | str, rngs: Any) -> None:
    """Give a layer the attributes of `_LowPrecision`, and a stream of keys if its
    products draw random bits.
    """
    # Flax sets these if the user chose nothing: Linear's product, Einsum's, and the
    # promotion of both.
    usual = (None, jax.lax.dot_general, jnp.einsum, nnx.nn.dtypes.promote_dtype)
    for name in CHOICES:
        if not any((value := getattr(layer, name, None)) is one for one in usual):
            raise ValueError(
                f"{type(layer).__name__}({name}={value!r}): the recipe decides how the"
                " product is computed; unset it"
            )
    layer.recipe = named_recipe(recipe)
    layer.products = "recipe"
    # NNX must know that variables may come, or the first split would fix None
    layer.stored = nnx.data(None)
    if layer.recipe.draws and rngs is not None:
        # As in Flax's Dropout, each call takes another key by a count in the layer's
        # state.
        layer.keys = rngs[RNG].fork() if isinstance(rngs, nnx.Rngs) else rngs.fork()


def stream_of(model: nnx.Module, rngs: Any, *, draws: bool) -> nnx.RngStream | None:
    """Return the stream from which products of a converted model draw random bits:
    `rngs`, or the model's own.

    It is None if no product draws or there is no stream: a model can be evaluated
    without one, but has no gradient.
    """
    if not isinstance(rngs, nnx.Rngs | nnx.RngStream | None):
        raise TypeError(f"rngs is a {type(rngs).__name__}; pass nnx.Rngs({RNG}=seed)")
    if not draws:
        return None
    if rngs is None:
        streams = (
            node
            for _, node in nnx.iter_graph(model)
            if isinstance(node, nnx.RngStream) and node.tag == RNG
        )
        rngs = next(streams, None)
    return rngs[RNG] if isinstance(rngs, nnx.Rngs) else rngs


class _Reader:
    """The `Reader` of an NNX layer; its parameters exist, so it ignores the shapes."""

    def __init__(self, layer: Any) -> None:
        self._layer, self.dtype = layer, layer.dtype
        # Each kind of layer has some of these fields; only its own function reads them.
        self.features, self.kernel_shape = (
            getattr(layer, "out_features", ()),
            getattr(layer, "kernel_shape", ()),
        )
        self.axis: int | tuple[int, ...] = getattr(layer, "axis", ())
        self.batch = tuple(getattr(layer, "batch_axis", ()))

    def equation(self, given: str | None) -> str:
        equation = given or self._layer.einsum_str
        if equation is None:
            raise ValueError(
                "Einsum has no einsum_str, neither in the layer nor in the call;"
                " pass one"
            )
        return equation

    def kernel(
        self, shape: tuple[int, ...], flat: tuple[int, ...] | None = None
    ) -> jax.Array | Absent:
        return Absent.of(self._layer.kernel[...])

    def bias(
        self, shape: tuple[int, ...], flat: tuple[int, ...] | None = None
    ) -> jax.Array | None:
        return None if self._layer.bias is None else self._layer.bias[...]

    def embedding(self) -> jax.Array | Absent:
        return self._layer.embedding[...]

    def normalize(
        self, layer: Any, x: jax.Array, *, mask: jax.Array | None
    ) -> jax.Array:
        return nnx.LayerNorm.__call__(layer, x, mask=mask)

    def changed(self, name: str, change: Callable[[jax.Array], jax.Array]) -> Any:
        # an attribute is a parameter or a plain field
        value = getattr(self._layer, name)
        return nnx.Param(change(value[...])) if isinstance(value, nnx.Param) else value


class TCFPLinear(nnx.Linear, _LowPrecision):
    """`nnx.Linear` whose product follows a recipe: `y = x W + b`, x `[..., k]`, W
    `[k, n]`.

    Arguments are `nnx.Linear`'s, plus `recipe`, a `Recipe` or the name of one.

    Raises:
      TypeError: integer or complex inputs.
      ValueError: an argument that the recipe decides (`precision`, `dot_general`, ...),
        or an unknown recipe.

    >>> jax.eval_shape(lambda: TCFPLinear(3, 4, recipe="tcfp12_fast", rngs=nnx.Rngs(0))(jnp.ones((2, 3)))).shape
    (2, 4)
    """

    forward = staticmethod(layers.dense)
    __call__ = _call

    def __init__(
        self, *args: Any, recipe: Recipe | str = "tcfp12", **options: Any
    ) -> None:
        super().__init__(*args, **options)
        _prepare(self, recipe, options.get("rngs"))


class Fp4Dense(TCFPLinear):
    """`TCFPLinear` with a weight of four bits, by the recipe "nvfp4" unless you give
    another one that packs.

    The layer packs the parameter of `nnx.Linear` at each use;
    `tcfp_jax.inference.load_quantized` replaces it by packed codes. Use it as the base
    of an `nnx.LoRA` to train adapters next to frozen codes.

    Raises:
      ValueError: the recipe packs no weight, or `TCFPLinear` raises it.

    >>> jax.eval_shape(lambda: Fp4Dense(3, 4, rngs=nnx.Rngs(0))(jnp.ones((2, 3)))).shape
    (2, 4)
    """

    def __init__(
        self, *args: Any, recipe: Recipe | str = "nvfp4", **options: Any
    ) -> None:
        super().__init__(*args, recipe=of_fp4(recipe), **options)


class TCFPLinearGeneral(nnx.LinearGeneral, _LowPrecision):
    """`nnx.LinearGeneral` whose product follows a recipe; errors as in `TCFPLinear`.

    >>> jax.eval_shape(lambda: TCFPLinearGeneral(3, (2, 4), rngs=nnx.Rngs(0))(jnp.ones((5, 3)))).shape
    (5, 2, 4)
    """

    forward = staticmethod(layers.dense_general)
    __call__ = _call

    def __init__(
        self, *args: Any, recipe: Recipe | str = "tcfp12", **options: Any
    ) -> None:
        super().__init__(*args, **options)
        _prepare(self, recipe, options.get("rngs"))


class TCFPEinsum(nnx.Einsum, _LowPrecision):
    """`nnx.Einsum` whose product follows a recipe; errors as in `TCFPLinear`.

    Raises:
      NotImplementedError: an equation that is not a stack of matrix products.

    >>> jax.eval_shape(lambda: TCFPEinsum("bk,khd->bhd", (3, 2, 4), rngs=nnx.Rngs(0))(jnp.ones((5, 3)))).shape
    (5, 2, 4)
    """

    forward = staticmethod(layers.einsum)
    __call__ = _call

    def __init__(
        self, *args: Any, recipe: Recipe | str = "tcfp12", **options: Any
    ) -> None:
        super().__init__(*args, **options)
        _prepare(self, recipe, options.get("rngs"))


class TCFPLayerNorm(nnx.LayerNorm):
    """`nnx.LayerNorm` whose scale and bias are rounded to the packed TCFP-12 format,
    with a straight-through gradient.

    >>> jax.eval_shape(lambda: TCFPLayerNorm(4, rngs=nnx.Rngs(0))(jnp.arange(8.0).reshape(2, 4))).shape
    (2, 4)
    """

    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalize x; `mask` as in `nnx.LayerNorm`."""
        return layers.layer_norm(_Reader(self), x, mask=mask)


class TCFPEmbed(nnx.Embed):
    """`nnx.Embed` whose rows are rounded to the packed TCFP-12 format, and whose
    `attend` follows a recipe.

    Arguments are `nnx.Embed`'s, plus `recipe`; the rounding has a straight-through
    gradient.

    Raises:
      ValueError: tokens that are not integers, or an argument that the recipe decides.

    >>> layer = TCFPEmbed(8, 4, rngs=nnx.Rngs(0))
    >>> [y.shape for y in jax.eval_shape(lambda: (layer(jnp.arange(3)), layer.attend(jnp.ones((2, 4)))))]
    [(3, 4), (2, 8)]
    """

    recipe: Recipe
    products: Literal["recipe", "flax"]
    stored: Stored | None

    def __init__(
        self, *args: Any, recipe: Recipe | str = "tcfp12", **options: Any
    ) -> None:
        super().__init__(*args, **options)
        _prepare(self, recipe, options.get("rngs"))

    def __call__(self, inputs: jax.Array, out_sharding: Sharding = None) -> jax.Array:
        """Map integer tokens `[...]` to `[..., features]`."""
        if self.products == "flax":
            return super().__call__(inputs, out_sharding)
        return layers.embed(_Reader(self), inputs, out_sharding)

    def attend(self, query: jax.Array, out_sharding: Sharding = None) -> jax.Array:
        """Map `query` `[..., features]` to scores `[..., num_embeddings]`."""
        if self.products == "flax":
            return super().attend(query, out_sharding)
        return layers.attend(_Reader(self), _multiplier(self, out_sharding), query)


# Layers that multiply and may hold a stored weight; layers that `export` gives Flax's
# class again.
MULTIPLYING = (TCFPLinear, TCFPLinearGeneral, TCFPEinsum, TCFPEmbed)
OWN = (*MULTIPLYING, TCFPLayerNorm)
