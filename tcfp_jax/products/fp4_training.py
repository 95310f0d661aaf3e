"""FP4 training, emulated: the three products of `y = x W`, each of two NVFP4 operands.

    forward   y[m, n]  = x_q[m, k]  W_q[k, n]      blocks of 16 along k
    dgrad     dx[m, k] = g_q[m, n]  W_q[k, n]ᵀ     blocks of 16 along n
    wgrad     dW[k, n] = x_q[m, k]ᵀ g_q[m, n]      blocks of 16 along the tokens m

Only Blackwell multiplies FP4. Here the format library quantizes each operand and
dequantizes it exactly: a value times the scale of its block is a BF16 number. Products
of such numbers are exact in float32, and the two tensor scales multiply the float32
sum. So each product equals the product of the dequantized operands, except for the
order of the float32 sums. Nothing is packed: the emulation learns as FP4 does, and runs
slower than BF16.

The recipe follows NVIDIA 2025, "Pretraining Large Language Models with NVFP4". x has
blocks of 16. W has squares of 16 x 16, so that dgrad reads the same numbers as the
forward product. g is rounded stochastically in both products. A random Hadamard matrix
of 16 rotates both operands of wgrad. Two things differ:

* NVIDIA draws one vector of signs for the whole run; here each step draws a new one.
* NVIDIA rounds the scales of g to the nearest E4M3 number, which clips the largest
  value of some blocks. Here they are rounded up, because clipping would bias the
  gradient.

NVIDIA keeps the last blocks of a model in BF16: choose recipes with
`tcfp_jax.conversion.last_blocks`.

The random bits of a value depend on the key and on the index of the value
(`pallas_kernels.counter`). So the forward and backward pass of one call agree under jit
and remat, calls with other keys differ, and a mesh changes nothing. The key is saved
for the backward pass. Rounding has the straight-through gradient.
"""

import functools
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from pallas_kernels.counter import bits_of, keys
from pallas_kernels.numerics import scaled_by_both
from tcfp_jax.formats.nvfp4_arrays import Nvfp4Values, quantize_values
from tcfp_jax.products import bf16
from tcfp_jax.products.annotations import (
    ACTIVATION_NAME,
    WEIGHT_NAME,
    differentiated_once,
    site,
)
from tcfp_jax.recipes import Recipe, describe

# The numbers of the streams from which a product draws: another number gives other
# bits.
_SIGNS_WGRAD, _G_DGRAD, _G_WGRAD = 1, 3, 4
_HADAMARD = 16
# The forward product and dgrad read one W, unless the former is in BF16.
OperandName = Literal["x", "w", "g", "w_dgrad", "x_wgrad", "g_wgrad"]
Words = tuple[Array, Array]


def _words_of(key: Array) -> Array:
    """Return a random key, typed or not, as one array of words from which streams of
    bits are made.
    """
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    return (jax.random.key_data(key) if typed else key).astype(jnp.uint32).reshape(-1)


def _stream(words: Array, number: int) -> Words:
    return keys(*(words[i] for i in range(words.shape[0])), number)


def product(recipe: Recipe, x: Array, w: Array, key: Array | None) -> Array:
    """Return `x @ w` as the recipe's `Fp4Training` says, x `[..., m, k]` and w
    `[k, n]`.

    Without a key the product can be computed and not differentiated, because the
    backward pass draws random bits.

    Raises:
      ValueError: a gradient is computed without a key.

    >>> from tcfp_jax.recipes import recipe
    >>> multiply = jax.jit(functools.partial(product, recipe("nvfp4_training")))
    >>> multiply(jnp.ones((2, 16)), jnp.full((16, 3), 0.5), jax.random.key(0)).tolist()
    [[8.0, 8.0, 8.0], [8.0, 8.0, 8.0]]
    """
    if key is None:
        x = _keyless(recipe, x)
        w = _keyless(recipe, w)
        return _product(recipe, x, w, None)
    return _product(recipe, x, w, _words_of(key))


# A rule of its own and not a check in the rule of `_product`, for the reason that
# `tcfp_jax.weights.stored._constant` states.
@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _keyless(recipe: Recipe, operand: Array) -> Array:
    """Return the operand; asking for its gradient raises."""
    return operand


@_keyless.defjvp
def _refuse(recipe: Recipe, primals: object, tangents: object) -> NoReturn:
    raise ValueError(
        f'recipe "{describe(recipe)}" draws random bits, and got no key; pass one that'
        ' differs at each step: key= of tcfp_jax.matmul, rngs={"tcfp": key} of a'
        " Linen model's apply, product_key= of a transformed function; of NNX"
        " rngs=nnx.Rngs(tcfp=seed) of a layer or of convert_to_tcfp, which draw at"
        " each call"
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Saved:
    """Residuals of the backward pass: x in BF16, W in NVFP4, key words, k, and the
    dtypes of x and w.
    """

    x: Array
    w: Nvfp4Values
    words: Array | None
    k: int = field(metadata=dict(static=True))
    dtypes: tuple[DTypeLike, DTypeLike] = field(metadata=dict(static=True))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(recipe: Recipe, x: Array, w: Array, words: Array | None) -> Array:
    return site(_forward(recipe, x, w, words)[0], recipe, (x, w, None, None), words)


class _Quantization(NamedTuple):
    """How an operand is quantized: the arguments of `along`, or of `squares` if the
    axis is None.
    """

    axis: int | None
    key: Words | None = None
    signs: Array | None = None


def quantization(operand: OperandName, words: Array | None) -> _Quantization:
    """Return how an operand of a product with these key words is quantized; x and g of
    wgrad are `[tokens, ...]`.
    """
    if operand in ("w", "w_dgrad"):
        return _Quantization(None)
    if operand == "x":
        return _Quantization(-1)
    assert words is not None, "the backward pass has a key"
    if operand == "g":
        return _Quantization(-1, _stream(words, _G_DGRAD))
    # Random signs, 1 or -1. Both operands of wgrad are turned by the same, so their
    # product is not.
    turn = 1.0 - 2.0 * (
        bits_of((_HADAMARD,), *_stream(words, _SIGNS_WGRAD)) >> 31
    ).astype(jnp.float32)
    if operand == "x_wgrad":
        return _Quantization(0, signs=turn)
    return _Quantization(0, _stream(words, _G_WGRAD), turn)


def _quantized(operand: OperandName, values: Array, words: Array | None) -> Nvfp4Values:
    return quantize_values(values, *quantization(operand, words))


def _forward(
    recipe: Recipe, x: Array, w: Array, words: Array | None
) -> tuple[Array, _Saved]:
    with jax.named_scope("quantize_w"):
        w_q = jax.tree.map(
            lambda leaf: checkpoint_name(leaf, WEIGHT_NAME), _quantized("w", w, None)
        )
    kept_x = x.astype(jnp.bfloat16)
    assert recipe.fp4 is not None, "the caller looked"
    if recipe.fp4.forward_operands == "bf16":
        with jax.named_scope("forward"):
            y = _dot(kept_x, w, x.ndim - 1, 0)
    else:
        with jax.named_scope("quantize_x"):
            x_q = _quantized("x", x, words)
        with jax.named_scope("forward"):
            y = _multiply(x_q, w_q, (x.ndim - 1, 0), x.dtype)[..., : w.shape[1]]
    kept_x = checkpoint_name(kept_x, ACTIVATION_NAME)
    return y.astype(x.dtype), _Saved(kept_x, w_q, words, w.shape[0], (x.dtype, w.dtype))


def _forward_rule(
    recipe: Recipe, x: Array, w: Array, words: Array | None
) -> tuple[Array, _Saved]:
    x, w = differentiated_once((x, w))
    return _forward(recipe, x, w, words)


def _backward(recipe: Recipe, saved: _Saved, g: Array) -> tuple[Array, Array, None]:
    g = differentiated_once(g)
    words = saved.words
    with jax.named_scope("dgrad"):
        g_q = _quantized("g", g, words)
        dx = _multiply(g_q, saved.w, (g.ndim - 1, 1), saved.dtypes[0])
    with jax.named_scope("wgrad"):
        g_tokens = g.reshape(-1, g.shape[-1])
        x_tokens = saved.x.reshape(-1, saved.x.shape[-1])
        g_q = _quantized("g_wgrad", g_tokens, words)
        x_q = _quantized("x_wgrad", x_tokens, words)
        dw = _multiply(x_q, g_q, (0, 0), saved.dtypes[1])
    return dx[..., : saved.k], dw, None


_product.defvjp(_forward_rule, _backward)


def _multiply(
    a: Nvfp4Values, b: Nvfp4Values, axes: tuple[int, int], dtype: DTypeLike
) -> Array:
    """Return the product of dequantized operands over an axis of each, summed in
    float32.
    """
    total = _dot(a.values, b.values, *axes)
    return scaled_by_both(total, a.outer, b.outer).astype(dtype)


def _dot(a: Array, b: Array, a_axis: int, b_axis: int) -> Array:
    return bf16.dot(a, b, (a_axis,), (b_axis,), jnp.float32)
