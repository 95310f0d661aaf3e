"""Flax NNX layers: `nnx.Linear`, `LayerNorm` and `Embed` with low precision.

Each is a subclass of Flax's own with the same `Param`s, so states of both are
interchangeable. A layer multiplies by the quantized kernel in `stored`, or else
quantizes its parameter at each call. `tcfp_jax.nnx.Optimizer` makes the arrays of
`stored` the optimizer's own variables. No forward pass writes a variable.
"""

import functools
from typing import Any, Literal

import jax
from flax import nnx
from jax import Array

from pallas_kernels.specs import Sharding
from tcfp_jax import layers
from tcfp_jax.layers import CHOICES, Absent, Multiply
from tcfp_jax.products.fp4_api import of_fp4
from tcfp_jax.recipes import Recipe
from tcfp_jax.recipes import recipe as named_recipe
from tcfp_jax.recipes.flags import refuses_flags
from tcfp_jax.weights.stored import Stored
from tcfp_jax.weights.tcfp12 import fake_quantize

RNG = "tcfp"
# Values that Flax sets in a layer if the user chose nothing.
_UNSET = (None, jax.lax.dot_general, nnx.nn.dtypes.promote_dtype)


class _LowPrecision(nnx.Module):
    """Attributes of layers that multiply; the first base class, before Flax's layer.

    Attributes:
      recipe: how the layer multiplies.
      products: "recipe", or "flax" for Flax's own code.
      stored: the quantized kernel, whose arrays are `nnx.Variable`s.
      keys: a stream of keys, only if products draw random bits.
    """

    recipe: Recipe
    products: Literal["recipe", "flax"]
    stored: Stored | None
    keys: nnx.RngStream

    @refuses_flags
    def __init__(
        self, *args: Any, recipe: Recipe | str = "tcfp12", **options: Any
    ) -> None:
        super().__init__(*args, **options)
        for name in CHOICES:
            value = getattr(self, name, None)
            if not any(value is unset for unset in _UNSET):
                raise ValueError(
                    f"{type(self).__name__}({name}={value!r}): the recipe decides how"
                    " the product is computed; unset it"
                )
        self.recipe = named_recipe(recipe)
        self.products = "recipe"
        # NNX must know that variables may come, or the first split would fix None
        self.stored = nnx.data(None)
        rngs = options.get("rngs")
        if self.recipe.draws and rngs is not None:
            # As in Flax's Dropout, each call takes another key by a count in the
            # layer's state.
            stream = rngs[RNG] if isinstance(rngs, nnx.Rngs) else rngs
            self.keys = stream.fork()

    def _multiplier(self, out_sharding: Sharding) -> Multiply:
        """Return the product of the layer, which reads its stored kernel if it can."""

        def key() -> Array | None:
            keys = getattr(self, "keys", None)
            return None if keys is None else keys()

        return functools.partial(
            layers.product,
            recipe=self.recipe,
            stored=stored_weight(self),
            key=key,
            out_sharding=out_sharding,
        )


def is_variable(node: object) -> bool:
    """Return whether a node of a tree is a variable of NNX; use it as `is_leaf`."""
    return isinstance(node, nnx.Variable)


def stored_weight(layer: _LowPrecision) -> Stored | None:
    """Return a layer's stored weight with the present arrays of its variables.

    Use this to compare the quantized kernel with the parameter. It is None if the layer
    quantizes its parameter at each call.
    """
    # Read at each call, because the optimizer writes new arrays into the same
    # variables.
    return jax.tree.map(
        lambda variable: variable[...], layer.stored, is_leaf=is_variable
    )


def store(layer: _LowPrecision, weight: Stored) -> None:
    """Let a layer multiply by a stored weight, whose arrays become variables."""

    # The optimizer's own variables stay the same objects, so the layer reads its next
    # update.
    def as_variable(leaf: Array | nnx.Variable) -> nnx.Variable:
        return leaf if isinstance(leaf, nnx.Variable) else nnx.Variable(leaf)

    variables = jax.tree.map(as_variable, weight, is_leaf=is_variable)
    layer.stored = nnx.data(variables)


def stream_of(
    model: nnx.Module, rngs: nnx.Rngs | nnx.RngStream | None, *, draws: bool
) -> nnx.RngStream | None:
    """Return the stream from which a converted model draws: `rngs`, or its own.

    It is None if no product draws or there is no stream: a model can be evaluated
    without one, but has no gradient.
    """
    if not isinstance(rngs, nnx.Rngs | nnx.RngStream | None):
        raise TypeError(f"rngs is a {type(rngs).__name__}; pass nnx.Rngs({RNG}=seed)")
    if not draws:
        return None
    if isinstance(rngs, nnx.Rngs):
        return rngs[RNG]
    if rngs is not None:
        return rngs
    for _, node in nnx.iter_graph(model):
        if isinstance(node, nnx.RngStream) and node.tag == RNG:
            return node
    return None


class TCFPLinear(_LowPrecision, nnx.Linear):
    """`nnx.Linear` whose product follows a recipe: `y = x W + b`, W `[k, n]`.

    Use this to write a model whose layers have low precision from the start. Use
    `tcfp_jax.conversion.convert_to_tcfp` instead for a model that exists, and for
    `nnx.LinearGeneral`, `nnx.Einsum` and attention.

    Arguments are `nnx.Linear`'s, plus `recipe`, a `Recipe` or the name of one.

    Raises:
      TypeError: integer or complex inputs.
      ValueError: an argument that the recipe decides (`precision`, `dot_general`, ...),
        or an unknown recipe.

    >>> layer = TCFPLinear(3, 4, recipe="tcfp12_fast", rngs=nnx.Rngs(0))
    >>> layer(jax.numpy.ones((2, 3))).shape
    (2, 4)
    """

    def __call__(self, inputs: Array, out_sharding: Sharding = None) -> Array:
        """Map `inputs` `[..., k]` to `[..., n]`."""
        if self.products == "flax":
            return super().__call__(inputs, out_sharding)
        kernel = Absent.of(self.kernel[...])
        bias = None if self.bias is None else self.bias[...]
        multiply = self._multiplier(out_sharding)
        return layers.dense(multiply, inputs, kernel, bias, self.dtype)


class Fp4Dense(TCFPLinear):
    """`TCFPLinear` with a weight of four bits, by the recipe "nvfp4" or another one.

    Use this to serve a layer from packed codes, or as the base of an `nnx.LoRA` to
    train adapters while the codes are frozen. Use the recipe "nvfp4_training" in
    `TCFPLinear` to train.

    The layer packs the parameter of `nnx.Linear` at each use;
    `tcfp_jax.inference.load_quantized` replaces it by packed codes.

    Raises:
      ValueError: the recipe packs no weight, or `TCFPLinear` raises it.

    >>> layer = Fp4Dense(3, 4, rngs=nnx.Rngs(0))
    >>> layer(jax.numpy.ones((2, 3))).shape
    (2, 4)
    """

    def __init__(
        self, *args: Any, recipe: Recipe | str = "nvfp4", **options: Any
    ) -> None:
        super().__init__(*args, recipe=of_fp4(recipe), **options)


class _Rounded:
    """A layer norm whose parameters Flax's own code reads rounded."""

    def __init__(self, layer: nnx.LayerNorm) -> None:
        self._layer = layer

    def __getattr__(self, name: str) -> object:
        value = getattr(self._layer, name)
        if not isinstance(value, nnx.Param):
            return value
        return nnx.Param(fake_quantize(value[...]))


class TCFPLayerNorm(nnx.LayerNorm):
    """`nnx.LayerNorm` whose scale and bias are rounded to the packed TCFP-12 format.

    Use this only to repeat a model of the original with rounded norms: it saves no
    time. The gradient is straight-through.

    >>> layer = TCFPLayerNorm(4, rngs=nnx.Rngs(0))
    >>> layer(jax.numpy.arange(8.0).reshape(2, 4)).shape
    (2, 4)
    """

    def __call__(self, x: Array, *, mask: Array | None = None) -> Array:
        """Normalize x; `mask` as in `nnx.LayerNorm`."""
        normalize: Any = nnx.LayerNorm.__call__
        return normalize(_Rounded(self), x, mask=mask)


class TCFPEmbed(_LowPrecision, nnx.Embed):
    """`nnx.Embed` with rows rounded to packed TCFP-12, and `attend` by a recipe.

    Use this for a table that is also the output head: `attend` multiplies like
    `TCFPLinear`. Use `nnx.Embed` if tokens are only looked up, which FP8 does not speed
    up. Arguments are `nnx.Embed`'s, plus `recipe`; the rounding has a straight-through
    gradient.

    Raises:
      ValueError: tokens that are not integers, or an argument that the recipe decides.

    >>> layer = TCFPEmbed(8, 4, rngs=nnx.Rngs(0))
    >>> layer(jax.numpy.arange(3)).shape, layer.attend(jax.numpy.ones((2, 4))).shape
    ((3, 4), (2, 8))
    """

    def __call__(self, inputs: Array, out_sharding: Sharding = None) -> Array:
        """Map integer tokens `[...]` to `[..., features]`."""
        if self.products == "flax":
            return super().__call__(inputs, out_sharding)
        return layers.embed(self.embedding[...], inputs, self.dtype, out_sharding)

    def attend(self, query: Array, out_sharding: Sharding = None) -> Array:
        """Map `query` `[..., features]` to scores `[..., num_embeddings]`.

        Use this for an output head that shares the table; use `TCFPLinear` for a head
        of its own.
        """
        if self.products == "flax":
            return super().attend(query, out_sharding)
        multiply = self._multiplier(out_sharding)
        return layers.attend(multiply, query, self.embedding[...], self.dtype)


# Layers that multiply and may hold a stored weight; layers that `export` gives Flax's
# class again.
MULTIPLYING = (TCFPLinear, TCFPEmbed)
OWN = (*MULTIPLYING, TCFPLayerNorm)
