"""FP4 training, emulated: the three products of `y = x W`, each of two NVFP4 operands.

    forward   y[m, n]  = x_q[m, k]  W_q[k, n]      blocks of 16 along k
    dgrad     dx[m, k] = g_q[m, n]  W_q[k, n]ᵀ     along n
    wgrad     dW[k, n] = x_q[m, k]ᵀ g_q[m, n]      along the tokens m

No chip but Blackwell multiplies FP4. Here every operand is quantized as it would be there, by the format library
(`formats.nvfp4_values`), and dequantized exactly: a value times its block's scale is a BF16 number (and under
"fold_exact" scales 2**-3 of it an E4M3 number, which FP8 products read), products of such numbers are exact in float32,
and the two tensor scales multiply the float32 sum. So a product is that of the dequantized operands, but for the order
in which float32 adds. Nothing is packed: this trains as FP4 does, not as fast.

What a recipe (`tcfp_jax.recipes.Fp4Training`) does, and what its source does otherwise:

* NVIDIA 2025 ("nvfp4_training"): x in blocks of 16, W in squares of 16 x 16 so that dgrad reads the same numbers, g
  rounded stochastically in both products, both operands of wgrad rotated by a random Hadamard matrix of 16. NVIDIA
  draws one vector of signs for ever, here each step draws its own. NVIDIA scales g's blocks to the nearest E4M3 number,
  which clips the largest value of some; here g's scales are rounded up, because clipping would bias the gradient.
  Keeping the last blocks of a model in BF16 is for whoever chooses recipes (`tcfp_jax.conversion.last_blocks`).
* Four over six (Cook et al. 2025): every operand that is rounded to nearest takes amax/6 or amax/4, block by block.
* Quartet II (Panferov et al. 2026, "quartet2"): forward with four over six and blocks of 16 for x and W. For dgrad and
  wgrad the forward's *quantized* x and W, and g, are rotated by a Hadamard matrix of 128 with signs of this step, the
  same for both operands, and quantized by MS-EDEN: to nearest, with steps of 0.93 * 17/16 amax/6; then a factor for
  each 128 values, <x, x> / <x, Q(x)>, multiplies their block scales, which are rounded stochastically to E4M3. The
  factor is that of the values themselves; the authors' emulation weights blocks by the inverse of their scales, and
  their kernels correct each block alone. Not implemented: tensor scales from the step before, and FP4 kernels.

Random bits come from a key and the index of a value (`pallas_kernels.counter`): forward and backward pass of one call
agree under jit and remat, calls with other keys differ, and no mesh changes them. The key is saved for the backward
pass. Rounding has the straight-through gradient.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.counter import bits_of, keys
from pallas_kernels.matmul.api import matmul as multiply
from pallas_kernels.operands import Operand, Tensor
from tcfp_jax.formats.nvfp4_arrays import Rule
from tcfp_jax.formats.nvfp4_kernel import Numbers
from tcfp_jax.formats.nvfp4_values import Nvfp4Values, Rounding, along, squares
from tcfp_jax.products import bf16
from tcfp_jax.products.operands import ACTIVATION_NAME, WEIGHT_NAME, differentiated_once
from tcfp_jax.products.sites import named
from tcfp_jax.recipes import Fp4Training, Product, Recipe, describe

# The streams of a product's bits.
_SIGNS_DGRAD, _SIGNS_WGRAD, _X_FORWARD, _G_DGRAD, _G_WGRAD, _W_DGRAD, _X_WGRAD = range(7)
# What is quantized: of the forward product x and w, and what dgrad and wgrad quantize anew.
OperandName = Literal["x", "w", "g", "w_dgrad", "x_wgrad", "g_wgrad"]


def words_of(key: jax.Array) -> jax.Array:
    """A random key, typed or not, as one array of words from which streams of bits are made.

    >>> words_of(jax.random.key(3)).shape
    (2,)
    """
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    return (jax.random.key_data(key) if typed else key).astype(jnp.uint32).reshape(-1)


def stream(words: jax.Array, number: int) -> tuple[jax.Array, jax.Array]:
    """The key words of one of a product's streams of bits."""
    return keys(*(words[i] for i in range(words.shape[0])), number)


def signs(words: tuple[jax.Array, jax.Array], size: int) -> jax.Array:
    """Random signs, float32 1 or -1.

    >>> sorted(set(signs(stream(words_of(jax.random.key(0)), 1), 64).tolist()))
    [-1.0, 1.0]
    """
    return 1.0 - 2.0 * (bits_of((size,), *words) >> 31).astype(jnp.float32)


def product(recipe: Recipe, x: jax.Array, w: jax.Array, key: jax.Array | None) -> jax.Array:
    """`x @ w` as the recipe's `Fp4Training` says, x `[..., m, k]` and w `[k, n]`.

    Args:
      key: of random bits; without it a product can be computed where the forward pass draws none, and not be
        differentiated where the backward pass does.

    Raises:
      ValueError: there is no key, and the forward pass draws bits; or it is asked for a gradient that draws some.

    >>> from tcfp_jax.recipes import recipe
    >>> multiply = jax.jit(functools.partial(product, recipe("nvfp4_training")))
    >>> multiply(jnp.ones((2, 16)), jnp.full((16, 3), 0.5), jax.random.key(0)).tolist()
    [[8.0, 8.0, 8.0], [8.0, 8.0, 8.0]]
    """
    if key is None and recipe.draws == "forward":
        raise ValueError(_missing_key(recipe))
    if key is None and recipe.draws == "backward":
        x, w = _keyless(recipe, x), _keyless(recipe, w)
    return _product(recipe, x, w, None if key is None else words_of(key))


def _missing_key(recipe: Recipe) -> str:
    return (
        f'recipe "{describe(recipe)}" draws random bits, and got no key; pass one that differs at each step: key= of '
        'tcfp_jax.matmul, rngs={"tcfp": key} of a Linen model\'s apply, product_key= of a transformed function; of NNX '
        "rngs=nnx.Rngs(tcfp=seed) of a layer or of convert_to_tcfp, which draw at each call"
    )


# Not a check in the rule of `_product`: see `tcfp_jax.products.layer._constant`.
@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _keyless(recipe: Recipe, operand: jax.Array) -> jax.Array:
    """The operand itself, of which no gradient may be asked."""
    return operand


@_keyless.defjvp
def _refuse(recipe: Recipe, primals: Any, tangents: Any) -> Any:
    raise ValueError(_missing_key(recipe))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Saved:
    """What the backward pass needs: numbers, BF16 or NVFP4, key words, and the shape of w and dtypes of x and w."""

    x: Any
    w: Any
    words: jax.Array | None
    shape: tuple[int, int] = field(metadata=dict(static=True))
    dtypes: tuple[Any, Any] = field(metadata=dict(static=True))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(recipe: Recipe, x: jax.Array, w: jax.Array, words: jax.Array | None) -> jax.Array:
    return named(_forward(recipe, x, w, words)[0], recipe, (x, w, None, None), words)


class Quantization(NamedTuple):
    """How an operand is quantized: the arguments of `along`; where the axis is None, the rule is that of `squares`."""

    axis: int | None
    rule: Rule
    rounding: Rounding
    key: Any
    signs: jax.Array | None


def quantization(recipe: Recipe, operand: OperandName, words: jax.Array | None) -> Quantization:
    """How an operand of a product with these key words is quantized; x and g of wgrad as `[tokens, ...]`."""
    how = _how(recipe)
    reused, of_g = how.backward == "reused", how.gradient_rounding
    of_x: Rounding = how.activation_rounding
    if operand == "w":
        return Quantization(None if reused else 0, how.scale_rule, "nearest", None, None)
    axis, rounding, drawn, turns = {
        "x": (-1, of_x, _X_FORWARD, None),
        "g": (-1, of_g, _G_DGRAD, _SIGNS_DGRAD),
        "w_dgrad": (1, of_g, _W_DGRAD, _SIGNS_DGRAD),
        "x_wgrad": (0, of_x if reused else of_g, _X_WGRAD, _SIGNS_WGRAD),
        "g_wgrad": (0, of_g, _G_WGRAD, _SIGNS_WGRAD),
    }[operand]
    turned = how.rotation == "backward" or (how.rotation == "wgrad" and turns == _SIGNS_WGRAD)
    turn = signs(_bits(words, turns), how.hadamard) if turned and turns is not None else None
    return Quantization(axis, how.scale_rule, rounding, _bits(words, drawn), turn)


def _quantized(recipe: Recipe, operand: OperandName, values: jax.Array, words: jax.Array | None) -> Nvfp4Values:
    how, numbers = quantization(recipe, operand, words), _numbers(recipe)
    axis = how.axis
    if axis is None:
        return squares(values, how.rule, numbers)
    in_blocks = lambda x: along(x, axis, how.rule, how.rounding, how.key, how.signs, numbers)
    rotated = how.signs is not None and values.dtype == jnp.bfloat16  # by a product
    return bf16.on_cpu_in_float32(in_blocks, values) if rotated else in_blocks(values)


def _forward(recipe: Recipe, x: jax.Array, w: jax.Array, words: jax.Array | None) -> tuple[jax.Array, _Saved]:
    how = _how(recipe)
    reused = how.backward == "reused"
    kept_x: Any
    kept_w: Any
    with jax.named_scope("quantize_w"):
        w_q: Any = _quantized(recipe, "w", w, None)
        w_q = jax.tree.map(lambda leaf: checkpoint_name(leaf, WEIGHT_NAME), w_q)
    if how.forward_operands == "bf16":
        with jax.named_scope("forward"):
            kept_x, kept_w = x.astype(jnp.bfloat16), w_q if reused else w.astype(jnp.bfloat16)
            y = _dot(kept_x, w.astype(jnp.bfloat16), x.ndim - 1, 0)
    else:
        with jax.named_scope("quantize_x"):
            x_q = _quantized(recipe, "x", x, words)
        with jax.named_scope("forward"):
            axes = (x.ndim - 1, 0 if reused else _first(recipe))
            y = _multiply(x_q, w_q, axes, recipe, recipe.forward, x.dtype)[..., : w.shape[1]]
        kept_x, kept_w = x.astype(jnp.bfloat16) if reused else x_q, w_q
    kept_x = jax.tree.map(lambda leaf: checkpoint_name(leaf, ACTIVATION_NAME), kept_x)
    return y.astype(x.dtype), _Saved(kept_x, kept_w, words, (w.shape[0], w.shape[1]), (x.dtype, w.dtype))


def _forward_rule(recipe: Recipe, x: jax.Array, w: jax.Array, words: jax.Array | None) -> tuple[jax.Array, _Saved]:
    x, w = differentiated_once((x, w))
    return _forward(recipe, x, w, words)


def _backward(recipe: Recipe, saved: _Saved, g: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    g = differentiated_once(g)
    words, (k, n), reused = saved.words, saved.shape, _how(recipe).backward == "reused"
    quantized = lambda operand, values: _quantized(recipe, operand, values, words)
    with jax.named_scope("dgrad"):
        g_q = quantized("g", g)
        w_q = saved.w if reused else _again(saved.w, 0, lambda w: quantized("w_dgrad", w[:, :n]))
        dx = _multiply(g_q, w_q, (g.ndim - 1, 1), recipe, recipe.dgrad, saved.dtypes[0])
    with jax.named_scope("wgrad"):
        tokens = lambda x: x.reshape(-1, x.shape[-1])
        g_q, of_x = quantized("g_wgrad", tokens(g)), lambda x: quantized("x_wgrad", tokens(x))
        x_q = of_x(saved.x) if reused else _again(saved.x, -1, of_x)
        dw = _multiply(x_q, g_q, (_first(recipe), _first(recipe)), recipe, recipe.wgrad, saved.dtypes[1])
    return dx[..., :k], dw[:k], None


_product.defvjp(_forward_rule, _backward)


def _how(recipe: Recipe) -> Fp4Training:
    assert recipe.fp4 is not None, "the caller looked"
    return recipe.fp4


def _numbers(recipe: Recipe) -> Numbers:
    """What products multiply; all three are BF16's, or none is."""
    return "bfloat16" if recipe.forward == "bf16" else "float8_e4m3fn"


def _first(recipe: Recipe) -> int:
    """Where `along` writes the first axis, down which it quantizes: E4M3 numbers are written as their transpose."""
    return 0 if _numbers(recipe) == "bfloat16" else -1


def _bits(words: jax.Array | None, number: int) -> Any:
    return None if words is None else stream(words, number)


def _again(numbers: Any, axis: int, quantized: Callable[[jax.Array], Nvfp4Values]) -> Nvfp4Values:
    """Numbers of the forward pass, there in blocks along an axis, quantized again; their tensor scale is kept apart."""
    if not isinstance(numbers, Nvfp4Values):
        return quantized(numbers)
    values = numbers.values
    if values.dtype == jnp.float8_e4m3fn:
        values = jnp.moveaxis(values, -1, axis).astype(jnp.bfloat16)
    found = quantized(values)
    return Nvfp4Values(found.values, found.outer * numbers.outer)


def _multiply(
    a: Nvfp4Values, b: Nvfp4Values, axes: tuple[int, int], recipe: Recipe, how: Product, dtype: Any
) -> jax.Array:
    """The product of dequantized operands over an axis of each, summed in float32."""
    if how == "bf16":
        return (_dot(a.values, b.values, *axes) * a.outer * b.outer).astype(dtype)
    left, right = (
        Operand(jnp.moveaxis(operand.values, axis, -1), operand.outer, scaling=Tensor("float32"))
        for operand, axis in zip((a, b), axes, strict=True)
    )
    return multiply(left, right, out_dtype=dtype, accumulation=how, backend=recipe.backend)


def _dot(a: jax.Array, b: jax.Array, a_axis: int, b_axis: int) -> jax.Array:
    """A BF16 product over an axis of each, float32."""
    return bf16.dot(a, b, (a_axis,), (b_axis,), jnp.float32)
