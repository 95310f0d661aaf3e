"""Losses of tokens from their logits, and the gradients of logits, in FP8 too.

Weights of tokens are relative: the largest is 1. The share of that weight in the mean,
1 / tokens in the plain case, multiplies the gradients in float32 after the products.

A gradient of logits is at most the token's weight, so its FP8 scale is known before it
is computed, without a pass. Its format is E5M2 with every recipe. Most of 32768
probabilities are below 4e-6, which E4M3 rounds to 0 under the scale of a 1, so nothing
would lower the logits of rare ids.

The largest gradient of a token is its target's. It is about the same for all tokens of
equal weight, so FP8 would round it in the same direction for all, by up to 11 %.
`balance` is the factor of each token that leaves a power of two of it, which FP8 holds
exactly.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels import numerics
from pallas_kernels.operands import Operand, Quantized, Row, Tensor
from pallas_kernels.quantize.computed import quantize_computed
from tcfp_jax.recipes import Recipe

_LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Chunks:
    """How `cross_entropy` cuts tokens, if devices split them.

    Attributes:
      tokens: tokens whose logits exist at a time; None is the default.
      axes: axes of the current mesh that split the tokens. Devices then gather the
        kernel once and send their part of its gradient once, in its dtype. Without them
        XLA does both for every chunk, and sends float32.

    >>> Chunks(axes=("data", "fsdp")).tokens is None
    True
    """

    tokens: int | None = None
    axes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Loss:
    """The static options of a `cross_entropy`.

    Raises:
      ValueError: an option is out of range.
    """

    recipe: Recipe
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    soft_cap: float | None = None
    chunks: Chunks = Chunks()

    def __post_init__(self) -> None:
        cap = 1.0 if self.soft_cap is None else self.soft_cap
        chunk = 1 if self.chunks.tokens is None else self.chunks.tokens
        is_chunk = isinstance(chunk, int | np.integer) and chunk > 0
        for name, is_fine, range in (
            ("label_smoothing", 0 <= self.label_smoothing < 1, "from 0 to below 1"),
            ("z_loss", 0 <= self.z_loss < math.inf, "0 or more"),
            ("soft_cap", 0 < cap < math.inf, "positive, or None"),
            ("chunk", is_chunk, "positive, or None"),
        ):
            if not is_fine:
                value = chunk if name == "chunk" else getattr(self, name)
                raise ValueError(f"{name}={value!r} must be {range}")


class Tokens(NamedTuple):
    """Numbers of each token, `[tokens]`.

    Attributes:
      targets: their ids.
      weights: relative weights in the mean.
      losses: 0 for tokens without a weight.
      total: the logsumexp of their logits, NaN if the target is out of range.
      picked: the product of the target, before it is capped.
    """

    targets: Array
    weights: Array
    losses: Array
    total: Array
    picked: Array


def tokens_of(asked: Loss, products: Array, targets: Array, weights: Array) -> Tokens:
    """Return the losses of tokens, from their products `[tokens, vocabulary]`."""
    vocabulary = products.shape[-1]
    smoothing = asked.label_smoothing
    logits = _capped(asked, products)
    total = jax.nn.logsumexp(logits, axis=-1)
    total = jnp.where((targets >= 0) & (targets < vocabulary), total, jnp.nan)
    # A masked sum instead of a gather: devices that split the vocabulary add it up, and
    # XLA fuses it.
    is_target = jnp.arange(vocabulary, dtype=jnp.int32) == targets[:, None]
    picked = jnp.sum(jnp.where(is_target, products.astype(jnp.float32), 0.0), axis=-1)
    losses = total - (1 - smoothing) * _capped(asked, picked)
    if smoothing:
        losses = losses - smoothing * jnp.mean(logits, axis=-1)
    # In this order the square of a huge logit does not overflow.
    losses = losses + asked.z_loss * total * total
    losses = jnp.where(weights == 0, 0.0, losses)
    return Tokens(targets, weights, losses, total, picked)


def _capped(asked: Loss, products: Array) -> Array:
    """Return float32 logits below the cap, if there is one."""
    logits = products.astype(jnp.float32)
    cap = asked.soft_cap
    return logits if cap is None else cap * jnp.tanh(logits / cap)


@dataclass(frozen=True)
class _Gradient:
    """The gradients of logits times factors, which are weights of tokens, over scales
    if they have any.
    """

    asked: Loss
    vocabulary: int

    def __call__(
        self, products: Array, targets: Array, total: Array, *rest: Array
    ) -> tuple[Array, ...]:
        """Return a gradient for each of the factors, which the ids `[1, vocabulary]`
        follow.
        """
        *factors, ids = rest
        asked = self.asked
        smoothing = asked.label_smoothing
        logits = _capped(asked, products)
        # A power of two is one instruction of a GPU. Its exponent has an error of
        # 2**-20 for logits below 16.
        g = jnp.exp2(_LOG2_E * (logits - total))
        if asked.z_loss:
            g = (1 + 2 * asked.z_loss * total) * g
        g = g - jnp.where(ids == targets, 1 - smoothing, 0.0)
        if smoothing:
            g = g - smoothing / self.vocabulary
        if asked.soft_cap is not None:
            g = g * (1 - jnp.square(logits / asked.soft_cap))
        return tuple(jnp.where(factor == 0, 0.0, g * factor) for factor in factors)


def balance_of(asked: Loss, tokens: Tokens, vocabulary: int) -> Array:
    """Return the factor of each token, from 0.75 to 1.5, that leaves a power of two of
    its target's gradient.

    BF16 rounds the target's gradient by 0.4 % at most, so its factors are 1.
    """
    if asked.recipe.dgrad == asked.recipe.wgrad == "bf16":
        return jnp.ones_like(tokens.weights)
    (g,) = _Gradient(asked, vocabulary)(
        tokens.picked, tokens.targets, tokens.total, tokens.weights, tokens.targets
    )
    size = jnp.abs(g)
    balance = size * numerics.reciprocal_pow2(numerics.pow2_cover(size, 1.5))
    return jnp.where(balance >= 0.75, balance, 1.0)  # also for 0 and NaN


def gradients(asked: Loss, products: Array, tokens: Tokens, balance: Array) -> Array:
    """Return float32 gradients of logits over their token's balance."""
    ids = jnp.arange(products.shape[-1], dtype=jnp.int32)[None]
    of_tokens = (tokens.targets, tokens.total, tokens.weights / balance)
    rows = [vector[:, None] for vector in of_tokens]
    return _Gradient(asked, products.shape[-1])(products, *rows, ids)[0]


def quantized_gradients(
    asked: Loss, products: Array, tokens: Tokens, balance: Array
) -> Quantized | None:
    """Return `gradients` in FP8 by bounds of their rows, or None for other scalings."""
    recipe = asked.recipe
    vocabulary = products.shape[-1]
    scaling = recipe.scaling
    dtype = jnp.float8_e5m2
    if recipe.dgrad == "bf16" or not isinstance(scaling, Tensor | Row):
        return None
    weights = tokens.weights / balance
    # |softmax (1 + 2 z_loss logsumexp) - q| <= 1 + 2 z_loss |logsumexp|, and the slope
    # of a cap is at most 1.
    bound = jnp.abs(weights) * (1 + 2 * asked.z_loss * jnp.abs(tokens.total))
    bound = jnp.where(weights == 0, 0.0, bound)
    # A power of two over a float32 scale of another one is exact, too.
    bound = numerics.pow2_cover(bound, 1.0)
    amax = numerics.amax(bound)
    scale, inverse = numerics.scale_and_inverse(amax, dtype, scaling.scale)
    of_rows = of_columns = scale
    factors = [weights * inverse]
    if isinstance(scaling, Row):
        of_rows, inverses = numerics.scale_and_inverse(bound, dtype, scaling.scale)
        of_columns = jnp.broadcast_to(scale, (vocabulary,))
        factors = [weights * inverses, *factors]
    values, turned = quantize_computed(
        _Gradient(asked, vocabulary),
        products,
        dtype,
        rows=(tokens.targets, tokens.total, *factors),
        columns=(jnp.arange(vocabulary, dtype=jnp.int32),),
        results=len(factors),
        backend=recipe.quantize_backend,
    )
    columns = None
    if recipe.wgrad != "bf16":
        columns = Operand(turned, of_columns, scaling=scaling)
    return Quantized(Operand(values, of_rows, scaling=scaling), columns)
