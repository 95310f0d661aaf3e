"""`cross_entropy`: its arguments, and its derivatives from those of chunks."""

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.custom_derivatives import SymbolicZero

from pallas_kernels import numerics
from pallas_kernels.specs import sharding_of, varying_alike
from tcfp_jax.losses.chunks import by_chunks
from tcfp_jax.losses.logits import Chunks, Loss
from tcfp_jax.products.annotations import differentiated_once, head
from tcfp_jax.products.fp8_weights import rounded
from tcfp_jax.products.matmul import operands_of, weight_of
from tcfp_jax.recipes import Recipe
from tcfp_jax.recipes import recipe as named_recipe
from tcfp_jax.weights.parameter import Parameter
from tcfp_jax.weights.stored import Stored

if TYPE_CHECKING:  # shapes for readers, editors and tests
    from jaxtyping import Bool, Float, Int

# Largest relative difference of a cotangent of losses from a multiple of the weights:
# float32 sums of many tokens.
_ALIKE = 1e-4


def cross_entropy(
    x: "Float[jax.Array, '*tokens k']",
    kernel: "Float[jax.Array, 'k vocabulary'] | Stored | Parameter",
    targets: "Int[jax.Array, '*tokens']",
    *,
    recipe: Recipe | str = "bf16",
    weights: "Float[jax.Array, '*tokens'] | Bool[jax.Array, '*tokens'] | None" = None,
    ignore: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    chunk: int | Chunks | None = None,
) -> "tuple[Float[jax.Array, ''], Float[jax.Array, '*tokens']]":
    """Return (the weighted mean of the losses, the loss of every token) of a head.

    It never holds all logits. Use it instead of `x @ kernel` and a softmax cross
    entropy, if the vocabulary is large. Logits are rounded to the dtype of x, as
    results of `tcfp_jax.matmul` are. Sums and losses are float32.

    Args:
      x: real floats `[..., k]`.
      kernel: real floats `[k, vocabulary]`, or a `Stored` weight. A tied table is
        `table.T`, stored `table.swap()`.
      targets: integers `[...]`. A token whose target is not below the vocabulary makes
        the mean NaN.
      recipe: a `Recipe` or the name of one, as for `tcfp_jax.matmul`; but dgrad, a sum
        over all ids, accumulates fully.
      weights: weight of each token in the mean, real floats or bools `[...]`; None
        weighs all alike.
      ignore: target of tokens that have no weight, such as -100. A token without a
        weight adds nothing to the mean or to a gradient, whatever its values are. Its
        loss is 0, and so is the derivative by a weight of 0.
      label_smoothing: share of the target that all ids divide equally.
      z_loss: factor of the squared logsumexp, which keeps logits small (1e-4 in PaLM).
      soft_cap: largest magnitude of a logit, as in Gemma 2.
      chunk: tokens whose logits exist at a time; None takes
        `chunks.TOKENS_AT_ONCE` for each device. `Chunks` also names the axes of a mesh
        that split the tokens.

    Returns:
      float32 `[]`, NaN if all weights are zero, and float32 `[...]`. The forward pass
      computes the gradients of the mean, and has to know the weight of every token for
      it. So differentiate the mean. The losses are for logs. A function of them has the
      right gradient only if its derivatives are in proportion to the weights, as those
      of `losses.mean()` are without `weights`. Any other function has NaN gradients.

    Raises:
      TypeError: x or kernel is not real floating point, weights are complex, targets or
        `ignore` are not integers, or rounding is differentiated twice.
      ValueError: shapes do not fit, an option is out of range, an axis of tokens is
        not of the mesh, or another function of the losses is differentiated.
      NotImplementedError: a mesh has explicit axes, or the recipe trains in FP4.

    Over a mesh with automatic axes, tokens and the vocabulary may be split. Inside
    `jax.shard_map` it is the loss of the device's own tokens, and the kernel must be
    whole. In a loop, differentiate inside the loop: a loop that is differentiated as a
    whole keeps a gradient of the kernel for each round.

    >>> x, kernel, targets = jnp.ones((2, 3)), jnp.zeros((3, 4)), jnp.array([0, -100])
    >>> loss, losses = cross_entropy(x, kernel, targets, ignore=-100)
    >>> float(loss) == float(losses[0]) == float(jnp.log(4.0)), float(losses[1])
    (True, 0.0)
    """
    recipe = named_recipe(recipe)
    w, quantized = weight_of(kernel, None)
    chunks = chunk if isinstance(chunk, Chunks) else Chunks(chunk)
    asked = Loss(recipe, label_smoothing, z_loss, soft_cap, chunks)
    targets, weights = _checked(np.shape(x), targets, weights)
    if weights is None:
        weights = jnp.ones(targets.shape)
    shares = weights.astype(jnp.float32)
    if not isinstance(ignore, int | np.integer | Array | None):
        raise TypeError(f"ignore={ignore!r} is no target; pass an integer, or None")
    # A weight of 0 leaves its token out, also for the derivative by the weight, which
    # would need the token's loss.
    left_out = (shares == 0) if ignore is None else (shares == 0) | (targets == ignore)
    shares = jnp.where(left_out, 0.0, shares)
    # Weights near the end of float32 have an infinite sum, unless they become small.
    size = numerics.pow2_cover(_unit(jax.lax.stop_gradient(shares)), 4.0)
    shares = shares * numerics.reciprocal_pow2(size)
    shares = jnp.where(left_out, 0.0, shares / jnp.sum(shares))
    return loss_of(asked, x, w, quantized, targets, shares)


def _checked(
    x: tuple[int, ...], targets: Array, weights: Array | None
) -> tuple[Array, Array | None]:
    """Return int32 targets and weights, if they fit an x of this shape."""
    targets = jnp.asarray(targets)
    if weights is not None:
        weights = jnp.asarray(weights)
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise TypeError(
            f"targets have dtype {targets.dtype}, but a target is the number of an id;"
            " pass integers"
        )
    if weights is not None and jnp.iscomplexobj(weights):
        raise TypeError(
            f"weights have dtype {weights.dtype}; pass real floats or bools"
        )
    for name, given in (("targets", targets), ("weights", weights)):
        if given is not None and given.shape != x[:-1]:
            raise ValueError(
                f"{name}{list(given.shape)} of x{list(x)}: each token has one; pass"
                f" {list(x[:-1])}"
            )
    if targets.dtype.itemsize > 4:  # a cast would wrap a target that is out of range
        dtype = targets.dtype
        low = max(int(jnp.iinfo(dtype).min), -(2**31))
        high = 2**31 - 1
        targets = jnp.clip(targets, jnp.asarray(low, dtype), jnp.asarray(high, dtype))
    return targets.astype(jnp.int32), weights


def loss_of(
    asked: Loss,
    x: Array,
    w: Array | None,
    quantized: Stored | None,
    targets: Array,
    shares: Array,
    key: Array | None = None,
) -> tuple[Array, Array]:
    """Return `cross_entropy` of a weight `[k, vocabulary]` as floats, quantized or
    both, and shares in the mean.

    The key is for a stochastic residual if the weight is quantized here.
    """
    if asked.recipe.fp4 is not None:
        raise NotImplementedError(
            f"recipe with weight={asked.recipe.weight}: a head in emulated FP4 gains"
            " nothing; use bf16"
        )
    if any(
        sharding_of(leaf) is not None for leaf in jax.tree.leaves((x, w, quantized))
    ):
        raise NotImplementedError(
            "cross_entropy under a mesh with explicit axes: its chunks of tokens are"
            " not laid out for them; make the mesh with"
            " axis_types=jax.sharding.AxisType.Auto, or call it in jax.shard_map"
        )
    x, w, quantized = operands_of(asked.recipe, x, w, quantized, key)
    *tokens, k = x.shape
    if 0 in x.shape:
        return jnp.sum(shares) / 0, jnp.zeros(tokens, jnp.float32)
    mean, losses = _loss(
        asked,
        *varying_alike(
            (x.reshape(-1, k), w, quantized, targets.ravel(), shares.ravel())
        ),
    )
    return mean, losses.reshape(tokens)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(asked: Loss, *operands: Any) -> tuple[Array, Array]:
    # JAX runs this body only if nobody differentiates.
    x, w, quantized, targets, shares = operands
    losses, *_ = by_chunks(asked, (), x, w, quantized, targets, _relative(shares))
    return head(_mean(losses, shares), asked), losses


def _unit(shares: Array) -> Array:
    """Return the largest weight or share of a token."""
    return jnp.max(jnp.abs(shares), initial=0.0)


def _relative(shares: Array) -> Array:
    """Return the weights of tokens, of which the largest is 1."""
    return jnp.where(shares == 0, 0.0, shares / _unit(shares))


def _mean(losses: Array, shares: Array) -> Array:
    mean = jnp.sum(losses * shares)
    return jnp.where(_unit(shares) == 0, jnp.nan, mean)


def _forward(asked: Loss, *primals: Any) -> tuple[tuple[Array, Array], Any]:
    x, w, quantized, targets, shares = jax.tree.map(
        lambda leaf: leaf.value,
        primals,
        is_leaf=lambda leaf: hasattr(leaf, "perturbed"),
    )
    # A frozen head costs no wgrad, and a frozen model below it no dgrad.
    wanted = tuple(
        name
        for name, leaf in zip("xw", primals, strict=False)
        if leaf is not None and leaf.perturbed
    )
    if quantized is not None:
        quantized, w = differentiated_once((quantized, w))
    x = rounded(asked.recipe, x)
    losses, *gradients = by_chunks(
        asked, wanted, x, w, quantized, targets, _relative(shares)
    )
    # A value of each dtype, because residuals are arrays; None has no leaf.
    types = jax.tree.map(lambda leaf: jnp.zeros((), leaf.dtype), (x, w))
    return (_mean(losses, shares), losses), (*gradients, types, shares, losses)


def _backward(asked: Loss, saved: Any, cotangents: Any) -> tuple[Any, ...]:
    dx, dw, types, shares, losses = saved
    of_mean, of_losses = map(_instantiated, cotangents)
    counted = jnp.where(shares == 0, 0.0, of_losses)
    total = jnp.sum(counted)
    of_each = total * shares
    alike = jnp.all(jnp.abs(counted - of_each) <= _ALIKE * jnp.abs(of_each))
    if (
        not isinstance(alike, jax.core.Tracer)
        and not alike
        and jnp.isfinite(of_each).all()
    ):
        raise ValueError(
            "the losses of tokens are for logs; differentiate the mean, with a mask as"
            " weights= or ignore="
        )
    unit = _unit(shares)
    # The derivative of a mean over no tokens is NaN, as the mean is.
    factor = jnp.where((unit == 0) & (of_mean != 0), jnp.nan, of_mean)
    factor = unit * (factor + jnp.where(alike, total, jnp.nan))

    def scaled(g: Array | None, like: Array | None) -> Array | None:
        if g is None or like is None:
            return None
        return (g.astype(jnp.float32) * factor).astype(like.dtype)

    dx = scaled(dx, types[0])
    dw = scaled(dw, types[1])
    return dx, dw, None, None, of_mean * losses


def _instantiated(cotangent: Any) -> Array:
    if isinstance(cotangent, SymbolicZero):
        return jnp.zeros(cotangent.shape, cotangent.dtype)
    return cotangent


_loss.defvjp(_forward, _backward, symbolic_zeros=True)
