"""Flax Linen layers: `nn.Dense`, `nn.DenseGeneral`, `nn.Einsum`, `nn.LayerNorm` and `nn.Embed` with low precision.

A layer creates `params` only, with the names and shapes of Flax's own, so checkpoints are interchangeable both ways.
It reads its quantized kernel from the `tcfp` collection if the caller passes one (`tcfp_jax.layer_state`) and
otherwise quantizes its parameter on the fly, so that `init`, evaluation and plain use need nothing. No forward pass
writes a variable.
"""

from typing import Any

import jax
from flax import linen as nn

from tcfp_jax import layers as adapters
from tcfp_jax.layers import COLLECTION, RNG, check_unused, multiplier
from tcfp_jax.recipes import Recipe
from tcfp_jax.recipes import recipe as named_recipe

__all__ = [
    "COLLECTION", "RNG", "TCFPDense", "TCFPDenseGeneral", "TCFPDotGeneral", "TCFPEinsum", "TCFPEmbed", "TCFPLayerNorm",
]  # fmt: skip


class TCFPDense(nn.Dense):
    """`nn.Dense` whose product follows a recipe: `y = x W + b`, x `[..., k]`, W `[k, features]`.

    Fields, parameter names, shapes and initial values are those of `nn.Dense`, plus:

    Attributes:
      recipe: a `tcfp_jax.Recipe` or the name of one.

    `dtype` is the dtype of x, y and b; the kernel is quantized from its own `param_dtype`, because rounding it to
    bfloat16 first would cost the residual's precision. A stochastic residual without state draws its bits from the
    rng stream "tcfp" if the caller passes one, and otherwise from a fixed key (evaluation, `init`).

    Raises:
      TypeError: integer or complex inputs.
      ValueError: `precision`, `dot_general`, `dot_general_cls` or `promote_dtype` is set; the recipe decides how the
        product is computed, so they would be ignored.

    >>> layer = TCFPDense(4, recipe="tcfp12")
    >>> variables = jax.eval_shape(layer.init, jax.random.key(0), jax.numpy.ones((2, 3)))
    >>> jax.tree.map(jax.numpy.shape, variables)
    {'params': {'bias': (4,), 'kernel': (3, 4)}}
    """

    recipe: Recipe | str = "tcfp12"

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """`inputs` `[..., k]` to `[..., features]`."""
        check_unused(self, nn.Dense)
        return adapters.dense(self, multiplier(self, named_recipe(self.recipe)), inputs)


class TCFPDenseGeneral(nn.DenseGeneral):
    """`nn.DenseGeneral` whose product follows a recipe; kernel `[*batch, *in, *features]`, a matrix a batch entry.

    Fields, parameter names, shapes and initial values are those of `nn.DenseGeneral`, plus `recipe`, as in
    `TCFPDense`. A kernel of more than two axes is stored as the matrix that it is only if
    `tcfp_jax.error_feedback(tcfp_jax.conversion.find_weights(model, *inputs))` builds the state.

    Raises:
      TypeError: integer or complex inputs.
      ValueError: a field is set that the recipe decides, as in `TCFPDense`.

    >>> layer = TCFPDenseGeneral((2, 4), recipe="tcfp12")
    >>> y, variables = jax.eval_shape(layer.init_with_output, jax.random.key(0), jax.numpy.ones((5, 3)))
    >>> y.shape, variables["params"]["kernel"].shape
    ((5, 2, 4), (3, 2, 4))
    """

    recipe: Recipe | str = "tcfp12"

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """`inputs` `[*batch, ..., *in]` to `[*batch, ..., *features]`."""
        check_unused(self, nn.DenseGeneral)
        return adapters.dense_general(self, multiplier(self, named_recipe(self.recipe)), inputs)


class TCFPEinsum(nn.Einsum):
    """`nn.Einsum` whose product follows a recipe; letters shared by x, kernel and result have a scale each.

    Fields, parameter names, shapes and initial values are those of `nn.Einsum`, plus `recipe`; state as in
    `TCFPDenseGeneral`.

    Raises:
      TypeError: integer or complex inputs.
      ValueError: a field is set that the recipe decides, or the equation does not fit.
      NotImplementedError: an equation that is no stack of matrix products.

    >>> layer = TCFPEinsum((3, 2, 4), "bk,khd->bhd", recipe="tcfp12")
    >>> y, variables = jax.eval_shape(layer.init_with_output, jax.random.key(0), jax.numpy.ones((5, 3)))
    >>> y.shape, variables["params"]["bias"].shape
    ((5, 2, 4), (2, 4))
    """

    recipe: Recipe | str = "tcfp12"

    @nn.compact
    def __call__(self, inputs: jax.Array, einsum_str: str | None = None) -> jax.Array:
        """The einsum of `inputs` and the kernel, plus the bias."""
        check_unused(self, nn.Einsum)
        return adapters.einsum(self, multiplier(self, named_recipe(self.recipe)), inputs, einsum_str)


class TCFPLayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` whose scale and bias are rounded to the packed TCFP-12 format, with a straight-through gradient.

    Block scales come from amax: sigma scales would clip gains. Fields and parameters are those of `nn.LayerNorm`.

    >>> layer = TCFPLayerNorm()
    >>> y, variables = jax.eval_shape(layer.init_with_output, jax.random.key(0), jax.numpy.ones((2, 4)))
    >>> sorted(variables["params"])
    ['bias', 'scale']
    """

    @nn.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalize x; `mask` as in `nn.LayerNorm`."""
        return adapters.layer_norm(self, x, mask=mask)


class TCFPEmbed(nn.Embed):
    """`nn.Embed` whose rows are rounded to the packed TCFP-12 format, and whose `attend` follows a recipe.

    Fields and the parameter are those of `nn.Embed`, plus `recipe`, of `attend` only. The rounding has a
    straight-through gradient.

    Raises:
      ValueError: tokens that are no integers, or `promote_dtype` is set.

    >>> layer = TCFPEmbed(8, 4)
    >>> variables = jax.eval_shape(layer.init, jax.random.key(0), jax.numpy.arange(3))
    >>> jax.eval_shape(lambda v: layer.apply(v, jax.numpy.ones((2, 4)), method="attend"), variables).shape
    (2, 8)
    """

    recipe: Recipe | str = "tcfp12"

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Integer tokens `[...]` to `[..., features]`."""
        check_unused(self, nn.Embed)
        return adapters.embed(self, inputs)

    def attend(self, query: jax.Array) -> jax.Array:
        """`query` `[..., features]` to scores `[..., num_embeddings]`."""
        check_unused(self, nn.Embed)
        return adapters.attend(self, multiplier(self, named_recipe(self.recipe)), query)


class TCFPDotGeneral(nn.Module):
    """The product of a recipe in the place of `lax.dot_general`: `nn.Dense(n, dot_general_cls=...)`.

    Reads the quantized kernel of the layer that owns it. The layer casts its kernel to `dtype` before the product:
    with `dtype=jnp.bfloat16` and no state the residual of a float32 kernel is lost, which `TCFPDense` avoids.

    Raises:
      NotImplementedError: a product other than `x[..., k] @ w[k, n]`, or a `precision` or
        `preferred_element_type` other than None, which the recipe decides.

    >>> import functools
    >>> layer = nn.Dense(4, dot_general_cls=functools.partial(TCFPDotGeneral, recipe="tensorwise"))
    >>> y, variables = jax.eval_shape(layer.init_with_output, jax.random.key(0), jax.numpy.ones((2, 3)))
    >>> y.shape, jax.tree.map(jax.numpy.shape, variables)
    ((2, 4), {'params': {'bias': (4,), 'kernel': (3, 4)}})
    """

    recipe: Recipe | str = "tcfp12"

    @nn.compact
    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
    ) -> jax.Array:
        """`lhs` `[..., k]` times `rhs` `[k, n]`."""
        wanted = (((lhs.ndim - 1,), (0,)), ((), ()))
        if jax.tree.map(int, dimension_numbers) != wanted or rhs.ndim != 2:
            raise NotImplementedError(
                f"dimension_numbers={dimension_numbers} of lhs{list(lhs.shape)} and rhs{list(rhs.shape)}: "
                f"only x[..., k] @ w[k, n], {wanted}, has an FP8 form; keep lax.dot_general for this layer"
            )
        if precision is not None or preferred_element_type is not None:
            raise NotImplementedError(
                f"precision={precision} and preferred_element_type={preferred_element_type}: the recipe decides both; "
                "leave them None"
            )
        owner = self.parent if isinstance(self.parent, nn.Module) else self
        return multiplier(owner, named_recipe(self.recipe))("...k,kn->...n", lhs, rhs)
