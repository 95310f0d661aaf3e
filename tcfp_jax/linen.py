"""Flax Linen layers: `TCFPDense`, a drop-in for `nn.Dense`, and `TCFPDotGeneral` for `nn.Dense(dot_general_cls=...)`.

A layer creates `params` only, with the names and shapes of Flax's own, so checkpoints are interchangeable both ways.
It reads its quantized kernel from the `tcfp` collection if the caller passes one (`tcfp_jax.layer_state`) and
otherwise quantizes its parameter on the fly, so that `init`, evaluation and plain use need nothing. No forward pass
writes a variable.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.dtypes import canonicalize_dtype

from pallas_kernels.quantize.api import check_real
from tcfp_jax.gemm import matmul
from tcfp_jax.quantization import Quantized
from tcfp_jax.recipe import Recipe
from tcfp_jax.recipe import recipe as named_recipe

COLLECTION = "tcfp"
RNG = "tcfp"


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
    >>> variables = layer.init(jax.random.key(0), jnp.ones((2, 3)))
    >>> jax.tree.map(jnp.shape, variables)
    {'params': {'bias': (4,), 'kernel': (3, 4)}}
    """

    recipe: Recipe | str = "tcfp12"

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """`inputs` `[..., k]` to `[..., features]`."""
        _check_unused(self)
        inputs = jnp.asarray(inputs)
        check_real("inputs", inputs)
        kernel = self.param("kernel", self.kernel_init, (inputs.shape[-1], self.features), self.param_dtype)
        bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype) if self.use_bias else None
        dtype = canonicalize_dtype(inputs, kernel, bias, dtype=self.dtype)
        y = _multiply(self, inputs.astype(dtype), kernel, named_recipe(self.recipe))
        return y if bias is None else y + bias.astype(dtype)


class TCFPDotGeneral(nn.Module):
    """The product of a recipe in the place of `lax.dot_general`: `nn.Dense(n, dot_general_cls=...)`.

    Reads the quantized kernel of the layer that owns it. The layer casts its kernel to `dtype` before the product:
    with `dtype=jnp.bfloat16` and no state the residual of a float32 kernel is lost, which `TCFPDense` avoids.

    Raises:
      NotImplementedError: a product other than `x[..., k] @ w[k, n]`, or a `precision` or
        `preferred_element_type` other than None, which the recipe decides.

    >>> import functools
    >>> layer = nn.Dense(4, dot_general_cls=functools.partial(TCFPDotGeneral, recipe="tensorwise"))
    >>> y, variables = layer.init_with_output(jax.random.key(0), jnp.ones((2, 3)))
    >>> y.shape, jax.tree.map(jnp.shape, variables)
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
        return _multiply(owner, lhs, rhs, named_recipe(self.recipe))


def _multiply(owner: nn.Module, x: jax.Array, kernel: jax.Array, recipe: Recipe) -> jax.Array:
    """The product of a layer: with its stored kernel if the caller passed one."""
    quantized: Quantized | None = None
    key = None
    if owner.has_variable(COLLECTION, "kernel"):
        quantized = owner.get_variable(COLLECTION, "kernel")
    elif recipe.residual == "stochastic":
        key = owner.make_rng(RNG) if owner.has_rng(RNG) else jax.random.key(0)
    return matmul(x, kernel, recipe=recipe, quantized=quantized, key=key)


def _check_unused(layer: TCFPDense) -> None:
    default = nn.Dense(layer.features)
    for name in ("precision", "dot_general", "dot_general_cls", "promote_dtype"):
        if getattr(layer, name) is not getattr(default, name):
            raise ValueError(
                f"TCFPDense({name}={getattr(layer, name)!r}): the recipe decides how the product is computed; "
                f"leave {name} unset, or use nn.Dense"
            )
