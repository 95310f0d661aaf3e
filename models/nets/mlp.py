"""Multi-layer perceptrons of `TCFPDense` layers: a classifier, and the two-layer block
that benchmarks time.
"""

from typing import Literal, get_args

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from pallas_kernels.checks import check_choice
from tcfp_jax.linen import TCFPDense
from tcfp_jax.recipes import Recipe

Nonlinearity = Literal["gelu", "relu"]


class MLP(nn.Module):
    """`y = W_L gelu(... gelu(W_1 x))`: `[..., k]` to `[..., features[-1]]`.

    `features=(d_ff, d)` is a Transformer's MLP block, which benchmarks of training
    steps use; `features=(256, 256, 10)` classifies scikit-learn's 8 x 8 digits.

    Attributes:
      features: Outputs of each layer.
      recipe: Recipe of every layer, or its name.
      dtype: Dtype of activations; parameters are float32.
      use_bias: If layers add a bias, as in `nn.Dense`.
      activation: "gelu" (its approximation by tanh) or "relu".

    Raises:
      ValueError: there are no features, or the activation is unknown.

    >>> model = MLP(features=(32, 10), recipe="bf16", dtype=jnp.float32)
    >>> variables = model.init(jax.random.key(0), jnp.ones((2, 64)))
    >>> model.apply(variables, jnp.ones((2, 64))).shape
    (2, 10)
    """

    features: tuple[int, ...]
    recipe: Recipe | str = "tcfp12"
    dtype: DTypeLike = jnp.bfloat16
    use_bias: bool = True
    activation: Nonlinearity = "gelu"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply the layers; the last one has no nonlinearity."""
        if not self.features:
            raise ValueError(
                "features=() names no layer; give the outputs of each, such as"
                " (256, 10)"
            )
        check_choice("activation", self.activation, get_args(Nonlinearity))
        activation = jax.nn.gelu if self.activation == "gelu" else jax.nn.relu
        x = x.astype(self.dtype)
        for index, features in enumerate(self.features):
            if index:
                # Recomputed in the backward pass, which takes one pass over memory; a
                # kept tanh would take three.
                x = jax.checkpoint(activation)(x)
            x = TCFPDense(
                features,
                use_bias=self.use_bias,
                recipe=self.recipe,
                dtype=self.dtype,
                name=f"dense_{index}",
            )(x)
        return x
