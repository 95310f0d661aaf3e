"""`cross_entropy`: the loss of a language model's head, `x @ kernel` and softmax as one
operation.

    logits[t] = cap(x[t] @ kernel)
    cap(a)    = soft_cap tanh(a / soft_cap)
    q[t]      = (1 - label_smoothing) one_hot(target[t]) + label_smoothing / vocabulary
    loss[t]   = logsumexp(logits[t]) - q[t] . logits[t] + z_loss logsumexp(logits[t])**2

With 128256 ids the logits of 16384 tokens take 4.2 GB in BF16, and their gradient as
much again. Here both exist for some tokens at a time. A gradient needs nothing but the
weight of each token in the mean, so the forward pass computes the gradients of a chunk
as soon as it has the chunk's logits, and keeps the gradients of x and the kernel alone.
The backward pass multiplies them by a number.

A gradient of logits is at most the token's weight, so its FP8 scale is known before it
is computed, without a pass. Its format is E5M2 with every recipe. Most of 32768
probabilities are below 4e-6, which E4M3 rounds to 0 under the scale of a 1, so nothing
would lower the logits of rare ids.

Sources: Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models"; Hsu
et al. 2024, "Liger Kernel".

Left out: other losses of logits, such as distillation, and samples from them: compute
the logits of a few tokens by `tcfp_jax.matmul`. Left out, too: a function of the
single losses with another gradient than the mean's: pass `weights`.
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import AxisType

from pallas_kernels import numerics
from pallas_kernels.operands import Operand, Quantized, Row, Tensor
from pallas_kernels.quantize.computed import quantize_computed
from pallas_kernels.specs import sharding_of, varying, varying_alike
from tcfp_jax.products.annotations import differentiated_once, head
from tcfp_jax.products.fp8_weights import Asked, rounded
from tcfp_jax.products.matmul import RULES, operands_of, weight_of
from tcfp_jax.recipes import Recipe
from tcfp_jax.recipes import recipe as named_recipe
from tcfp_jax.weights.parameter import Parameter
from tcfp_jax.weights.stored import Stored

if TYPE_CHECKING:  # shapes for readers, editors and tests
    from jaxtyping import Bool, Float, Int

# Tokens of a chunk, for each device. Every chunk reads and writes the kernel's float32
# gradient once, so more tokens cost less time; with 128256 ids the logits of these take
# 1.05 GB.
TOKENS_AT_ONCE = 4096
_LOG2_E = math.log2(math.e)
# Largest relative difference of a cotangent of losses from a multiple of the weights:
# float32 sums of many tokens.
_ALIKE = 1e-4
_INT = int | np.integer


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
    chunk: int | None = None,
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
      chunk: tokens whose logits exist at a time; None takes `TOKENS_AT_ONCE` for each
        device.

    Returns:
      float32 `[]`, NaN if all weights are zero, and float32 `[...]`. The forward pass
      computes the gradients of the mean, and has to know the weight of every token for
      it. So differentiate the mean. The losses are for logs. A function of them has the
      right gradient only if its derivatives are in proportion to the weights, as those
      of `losses.mean()` are without `weights`. Any other function has NaN gradients.

    Raises:
      TypeError: x or kernel is not real floating point, weights are complex, targets or
        `ignore` are not integers, or rounding is differentiated twice.
      ValueError: shapes do not fit, an option is out of range, or another function of
        the losses is differentiated.
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
    asked = Loss(recipe, label_smoothing, z_loss, soft_cap, chunk)
    targets, weights = _checked(np.shape(x), targets, weights)
    if weights is None:
        weights = jnp.ones(targets.shape)
    shares = weights.astype(jnp.float32)
    if not isinstance(ignore, _INT | Array | None):
        raise TypeError(f"ignore={ignore!r} is no target; pass an integer, or None")
    # A weight of 0 leaves its token out, also for the derivative by the weight, which
    # would need the token's loss.
    left_out = (shares == 0) if ignore is None else (shares == 0) | (targets == ignore)
    shares = jnp.where(left_out, 0.0, shares)
    return loss_of(asked, x, w, quantized, targets, shares / jnp.sum(shares))


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
    chunk: int | None = None

    def __post_init__(self) -> None:
        cap = 1.0 if self.soft_cap is None else self.soft_cap
        chunk = 1 if self.chunk is None else self.chunk
        is_chunk = isinstance(chunk, _INT) and chunk > 0
        for name, is_fine, range in (
            ("label_smoothing", 0 <= self.label_smoothing < 1, "from 0 to below 1"),
            ("z_loss", 0 <= self.z_loss < math.inf, "0 or more"),
            ("soft_cap", 0 < cap < math.inf, "positive, or None"),
            ("chunk", is_chunk, "positive, or None"),
        ):
            if not is_fine:
                raise ValueError(f"{name}={getattr(self, name)!r} must be {range}")


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
    # Values of a token without a share, which may be NaN, must not reach the kernel's
    # gradient or a scale.
    x = jnp.where((shares == 0)[..., None], jnp.zeros((), x.dtype), x)
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
    mean, losses, *_ = _by_chunks(asked, (), *operands)
    return head(mean, asked), losses


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
    mean, losses, *gradients = _by_chunks(
        asked, wanted, rounded(asked.recipe, x), w, quantized, targets, shares
    )
    # A value of each dtype, because residuals are arrays; None has no leaf.
    types = jax.tree.map(lambda leaf: jnp.zeros((), leaf.dtype), (x, w))
    return (mean, losses), (*gradients, types, shares, losses)


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
    factor = of_mean + jnp.where(alike, total, jnp.nan)

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


def _devices() -> int:
    """Return the number of devices over which XLA may split the tokens and the
    vocabulary.
    """
    mesh = jax.sharding.get_abstract_mesh()
    automatic = [
        mesh.shape[name]
        for name, kind in zip(mesh.axis_names, mesh.axis_types)
        if kind == AxisType.Auto
    ]
    return math.prod(automatic) if mesh.axis_names else jax.device_count()


def _by_chunks(
    asked: Loss,
    wanted: tuple[str, ...],
    x: Array,
    w: Array | None,
    quantized: Stored | None,
    targets: Array,
    shares: Array,
) -> tuple[Array, Array, Array | None, Array | None]:
    """Return (mean, losses, gradient of x, gradient of w) of x `[tokens, k]`; unwanted
    gradients are None.
    """
    tokens = x.shape[0]
    limit = asked.chunk or TOKENS_AT_ONCE * _devices()
    # `jax.export` may leave the number open
    count = -(-tokens // limit) if isinstance(tokens, int) else 1
    size = -(-tokens // count)

    def cut(array: Array) -> Array:
        # A chunk has every count-th token, so that devices that split the tokens share
        # the work of each chunk.
        rest = [(0, 0)] * (array.ndim - 1)
        padded = jnp.pad(array, [(0, size * count - tokens), *rest])
        return padded.reshape(size, count, *array.shape[1:]).swapaxes(0, 1)

    # Outside of the loop, for products that read floats.
    read = w if w is None or quantized is not None else w.astype(jnp.bfloat16)

    def of_chunk(dw: Array | None, given: tuple[Array, ...]) -> tuple[Any, Any]:
        losses, dx, dw = _chunk(asked, dw, "x" in wanted, read, quantized, *given)
        return dw, (losses, dx)

    dw = None
    if "w" in wanted and w is not None:
        dw = varying(jnp.zeros(w.shape, jnp.float32), x)
    dw, (losses, dx) = lax.scan(of_chunk, dw, tuple(map(cut, (x, targets, shares))))

    def joined(chunks: Array) -> Array:
        whole = chunks.swapaxes(0, 1).reshape(size * count, *chunks.shape[2:])
        return whole[:tokens]

    losses = joined(losses)
    mean = jnp.sum(jnp.where(shares == 0, 0.0, losses * shares))
    if dx is not None:
        dx = _kept(joined(dx), x)
    if dw is not None and w is not None:
        dw = _kept(dw, w)
    return mean, losses, dx, dw


def _kept(g: Array, like: Array) -> Array:
    """Return a gradient as it waits for the backward pass, in half the memory.

    float16 has too little range before it is scaled.
    """
    return g if like.dtype == jnp.float16 else g.astype(like.dtype)


def _chunk(
    asked: Loss,
    total_dw: Array | None,
    wants_dx: bool,
    w: Array | None,
    quantized: Stored | None,
    x: Array,
    targets: Array,
    shares: Array,
) -> tuple[Array, Array | None, Array | None]:
    """Return (losses, gradient of x or None, the float32 gradient of w so far or None)
    of tokens `[tokens, k]`.
    """
    recipe = asked.recipe
    smoothing = asked.label_smoothing
    if recipe.dgrad == "fast":
        # One accumulator for all ids keeps 14 bits of the target's product, below which
        # most probabilities are.
        recipe = replace(recipe, dgrad="full")
    rule = RULES[recipe.mode]
    narrow, saved = rule.forward(Asked(recipe), x, w, quantized, None)
    vocabulary = narrow.shape[-1]
    logits = _capped(asked, narrow)
    ids = jnp.arange(vocabulary, dtype=jnp.int32)[None]
    is_target = ids == targets[:, None]
    with jax.named_scope("loss"):
        total = jax.nn.logsumexp(logits, axis=-1)
        # A masked sum instead of a gather: devices that split the vocabulary add it up,
        # and XLA fuses it.
        picked = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
        total = jnp.where((targets >= 0) & (targets < vocabulary), total, jnp.nan)
        if smoothing:
            picked = (1 - smoothing) * picked + smoothing * jnp.mean(logits, axis=-1)
        losses = jnp.where(
            shares == 0, 0.0, total - picked + asked.z_loss * jnp.square(total)
        )
    if total_dw is None and not wants_dx:
        return losses, None, None
    with jax.named_scope("quantize_g"):
        # |softmax (1 + 2 z_loss logsumexp) - q| <= 1 + 2 z_loss |logsumexp|, and the
        # slope of a cap is at most 1.
        bound = jnp.where(
            shares == 0, 0.0, jnp.abs(shares) * (1 + 2 * asked.z_loss * jnp.abs(total))
        )
        g_q = _quantized(asked, narrow, targets, total, shares, bound)
    g = _Gradient(asked, vocabulary)(
        narrow, targets[:, None], total[:, None], shares[:, None], ids
    )[0]
    # Gradients keep float32 until they are summed, and in float16 until they are
    # scaled.
    kept = jnp.float32 if x.dtype == jnp.float16 else x.dtype
    saved = replace(
        saved,
        x_type=jax.core.ShapedArray(x.shape, kept),
        w_type=(
            None
            if total_dw is None
            else jax.core.ShapedArray(total_dw.shape, jnp.float32)
        ),
    )
    g = g.astype(jnp.bfloat16 if x.dtype.itemsize == 2 else jnp.float32)
    dx, dw, *_ = rule.backward(Asked(recipe), saved, g, g_q, total_dw)
    return losses, dx if wants_dx else None, dw


def _capped(asked: Loss, logits: Array) -> Array:
    """Return float32 logits below the cap, if there is one."""
    logits = logits.astype(jnp.float32)
    cap = asked.soft_cap
    return logits if cap is None else cap * jnp.tanh(logits / cap)


@dataclass(frozen=True)
class _Gradient:
    """The gradients of logits times factors, which are weights of tokens in the mean,
    over scales if they have any.
    """

    asked: Loss
    vocabulary: int

    def __call__(
        self, narrow: Array, targets: Array, total: Array, *rest: Array
    ) -> tuple[Array, ...]:
        """Return a gradient for each of the factors, which the ids `[1, vocabulary]`
        follow.
        """
        *factors, ids = rest
        asked = self.asked
        smoothing = asked.label_smoothing
        logits = _capped(asked, narrow)
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


def _quantized(
    asked: Loss,
    narrow: Array,
    targets: Array,
    total: Array,
    shares: Array,
    bound: Array,
) -> Quantized | None:
    """Return gradients of logits `[tokens, vocabulary]` in FP8 by bounds of their rows,
    or None for other scalings.
    """
    recipe = asked.recipe
    vocabulary = narrow.shape[-1]
    scaling = recipe.scaling
    dtype = jnp.float8_e5m2
    if recipe.dgrad == "bf16" or not isinstance(scaling, Tensor | Row):
        return None
    amax = numerics.amax(bound)
    scale, inverse = numerics.scale_and_inverse(amax, dtype, scaling.scale)
    of_rows = of_columns = scale
    factors = [shares * inverse]
    if isinstance(scaling, Row):
        of_rows, inverses = numerics.scale_and_inverse(bound, dtype, scaling.scale)
        of_columns = jnp.broadcast_to(scale, (vocabulary,))
        factors = [shares * inverses, *factors]
    values, turned = quantize_computed(
        _Gradient(asked, vocabulary),
        narrow,
        dtype,
        rows=(targets, total, *factors),
        columns=(jnp.arange(vocabulary, dtype=jnp.int32),),
        results=len(factors),
        backend=recipe.quantize_backend,
    )
    columns = None
    if recipe.wgrad != "bf16":
        columns = Operand(turned, of_columns, scaling=scaling)
    return Quantized(Operand(values, of_rows, scaling=scaling), columns)
