"""A decoder-only Transformer on bytes, with GPT-2's architecture: pre-LN, learned
positions, tied head.

    x = E[token] + P[position]
    x = x + attention(LN(x));  x = x + W_2 gelu(W_1 LN(x))      (layers times)
    logits = LN(x) Eᵀ

Every dense layer (qkv, projection and the two of the MLP) is a `TCFPDense`, whose
recipe decides how it multiplies. With the recipe None it is Flax's `Dense` with the
same parameters, which can be converted. Embeddings, LayerNorm, attention and the tied
head stay in `dtype` (LayerNorm and softmax in float32), as in every published FP8
recipe. Tokens are bytes, so only 256 of `gpt2`'s 50304 embedding rows are used. The
others give it GPT-2's 124M parameters and the cost of its head.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
"""

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from pallas_kernels.checks import check_choice
from tcfp_jax.linen import TCFPDense
from tcfp_jax.recipes import Recipe

from .attention import Start, causal_attention, kept
from .losses import cross_entropy
from .meshes import split_batch
from .shapes import BYTES, ComputeDtype, GPTConfig


class ByteEmbedding(nn.Embed):
    """`nn.Embed` with the same parameter, whose lookup and head are products.

    The lookup multiplies by one-hot rows, which is exact. Its backward pass is a
    product, too. `nn.Embed` has a scatter-add there, whose float atomics on a GPU add
    in a different order each time and would break bit-for-bit resuming. It reads only
    the first 256 rows, so tokens must be bytes. `attend` multiplies in `dtype` and
    keeps the float32 sums.
    """

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Embed integer tokens below 256 `[...]` as `[..., features]`."""
        table = jnp.asarray(self.embedding, self.dtype)[:BYTES]
        return jnp.dot(jax.nn.one_hot(inputs, BYTES, dtype=table.dtype), table)

    def attend(self, query: jax.Array) -> jax.Array:
        """Return logits `[..., num_embeddings]`, float32, of `[..., features]`."""
        table = jnp.asarray(self.embedding, self.dtype)
        return jnp.dot(
            query.astype(table.dtype), table.T, preferred_element_type=jnp.float32
        )


class Block(nn.Module):
    """One pre-LN Transformer block, `[batch, positions, width]` to the same."""

    config: GPTConfig
    recipe: Recipe | str | None
    dtype: ComputeDtype

    @nn.compact
    def __call__(self, x: jax.Array, start: Start = None) -> jax.Array:
        """Apply causal attention and the MLP, each around a residual connection."""
        config = self.config
        width = config.width
        x = split_batch(x)
        batch, positions, _ = x.shape
        qkv = self._dense("qkv", 3 * width)(_normalize("attention_norm", x))
        q, k, v = jnp.split(
            qkv.reshape(batch, positions, 3 * config.heads, width // config.heads),
            3,
            axis=2,
        )
        k, v = kept(self, k, v, start)
        attended = causal_attention(q, k, v, config.attention, start=start)
        attended = attended.reshape(x.shape)
        x = x + self._dense("projection", width, scaled="residual")(attended)
        hidden = self._dense("mlp_in", 4 * width)(_normalize("mlp_norm", x))
        # Recomputed in the backward pass, which takes one pass over memory; a kept tanh
        # would take three.
        hidden = jax.checkpoint(jax.nn.gelu)(hidden)
        return x + self._dense("mlp_out", width, scaled="residual")(hidden)

    def _dense(
        self,
        name: str,
        features: int,
        *,
        scaled: Literal["plain", "residual"] = "plain",
    ) -> nn.Dense:
        # GPT-2: layers that write to the residual stream start smaller, so that its
        # variance does not grow with depth.
        deviation = initial_deviation(self.config.width)
        if scaled == "residual":
            deviation /= (2 * self.config.layers) ** 0.5
        normal = nn.initializers.normal(deviation)
        options: Any = dict(dtype=jnp.dtype(self.dtype), kernel_init=normal, name=name)
        return (
            nn.Dense(features, **options)
            if self.recipe is None
            else TCFPDense(features, recipe=self.recipe, **options)
        )


class GPT(nn.Module):
    """Bytes `[batch, positions]` to float32 logits `[batch, positions, vocabulary]`.

    With `targets`, integers `[batch, positions]`, the result is the cross-entropy of
    each, float32 `[batch, positions]`. With `start`, the position of the first token,
    keys and values stay in the collection "cache", which must be mutable.

    Attributes:
      config: The size.
      recipe: Recipe of every dense layer, or its name; None for Flax's layers.
      dtype: Dtype of activations, and of the products of embedding and head.

    Raises:
      ValueError: the sequence is longer than `config.context`, or the dtype is unknown.
    """

    config: GPTConfig
    recipe: Recipe | str | None = "tcfp12"
    dtype: ComputeDtype = "bfloat16"

    @nn.compact
    def __call__(
        self,
        tokens: jax.Array,
        targets: jax.Array | None = None,
        start: Start = None,
    ) -> jax.Array:
        """Predict the byte after each position, or return the loss of the
        prediction.
        """
        config = self.config
        check_choice("dtype", self.dtype, get_args(ComputeDtype))
        if tokens.shape[-1] > config.context:
            raise ValueError(
                f"{tokens.shape[-1]} positions exceed the model's context of"
                f" {config.context}; shorten the sequence"
            )
        normal = nn.initializers.normal(initial_deviation(config.width))
        embedding = ByteEmbedding(
            config.vocabulary,
            config.width,
            dtype=jnp.dtype(self.dtype),
            embedding_init=normal,
            name="embedding",
        )
        positions = self.param(
            "positions", normal, (config.context, config.width), jnp.float32
        )
        if start is None:
            placed = positions[: tokens.shape[-1]]
        else:
            placed = lax.dynamic_slice_in_dim(positions, start, tokens.shape[-1])
        x = split_batch(embedding(tokens)) + placed.astype(self.dtype)
        for layer in range(config.layers):
            block = Block(config, self.recipe, self.dtype, name=f"block_{layer}")
            x = block(x, start)
        logits = embedding.attend(_normalize("final_norm", x))
        return logits if targets is None else cross_entropy(logits, targets)


def initial_deviation(width: int) -> float:
    """Return the standard deviation of initial weights: GPT-2's 0.02 at width 768, and
    as 1/sqrt(width).

    >>> initial_deviation(768)
    0.02
    """
    return 0.02 * (768 / width) ** 0.5


def _normalize(name: str, x: jax.Array) -> jax.Array:
    """Apply LayerNorm in float32, and return the dtype of x."""
    return nn.LayerNorm(epsilon=1e-5, dtype=jnp.float32, name=name)(
        x.astype(jnp.float32)
    ).astype(x.dtype)
