"""`matmul(x, w, recipe=...)`: the product of a layer, with the backward pass that the recipe describes.

The three products of `y = x W`, as FP8 tensor cores want them (both operands read along the contraction):

    forward   y[m, n]  = x_q[m, k]  . (W_hi + W_lo)ᵀ[n, k]    scale s_x s_w
    dgrad     dx[m, k] = g_q[m, n]  . (W_hi + W_lo)[k, n]      scale s_g s_w   (W_hi alone: ABD)
    wgrad     dW[k, n] = x_qᵀ[k, m] . g_qᵀ[n, m]               scale s_x s_g   (or BF16 x and g)

with one scale a tensor; `products.py` has the same three with a scale a row or a block.

x and g are quantized once each, in both orientations in one pass where wgrad is FP8, so the backward pass keeps x in
one byte a value and no transpose is left. The weight is quantized outside the `custom_vjp`, or was quantized by the
optimizer (`tcfp_jax.error_feedback`) and comes in as `quantized`; no product needs its float copy.

The gradient is the straight-through one: that of the products above, as if rounding were the identity.
"""

import functools
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType

from pallas_kernels.quantize.api import check_real
from tcfp_jax.products.operands import Operand, product, quantize_operand, weight_operand
from tcfp_jax.recipes import Recipe, TCFPMode, WeightForm
from tcfp_jax.recipes import recipe as named_recipe
from tcfp_jax.weights.blocks import BlockArray, ResidualBlockArray, RowArray
from tcfp_jax.weights.quantization import QArray, Quantized, ResidualArray, WithResidual, quantize_weight

# Names for remat policies, e.g. jax.checkpoint_policies.save_only_these_names(WEIGHT_NAME, ACTIVATION_NAME):
# without them a policy re-runs the quantization in the backward pass.
WEIGHT_NAME = "tcfp_weight"
ACTIVATION_NAME = "tcfp_activation"


def matmul(
    x: jax.Array,
    w: Any,
    *,
    recipe: Recipe | str,
    quantized: Quantized | None = None,
    key: jax.Array | None = None,
) -> jax.Array:
    """`x @ w` with the operands, products and gradients that `recipe` describes.

    Args:
      x: real floats `[..., k]` of 16 bits or more.
      w: the weight `[k, n]`, real floats; its gradient is that of the straight-through product. Or what
        `quantize_weight` made of it, alone: a constant, no float copy exists and only x has a gradient.
      recipe: a `Recipe` or the name of one.
      quantized: `w` as `error_feedback` stored it (`layer_state`); without it `w` is quantized here.
      key: random key for a stochastic residual where `w` is quantized here.

    Returns:
      `[..., n]` in the dtype of x. A NaN or inf in x or w makes NaN what shares a scale with it: all of the result, or
      with a scale a row or block, the outputs that read it; one in the output's gradient does the same to the
      gradients. k or n that are not multiples of 16 work; on a GPU each FP8 product then pads copies of its operands,
      which costs about as much as quantizing them once more.

    Raises:
      TypeError: integer, complex or 8-bit x or w.
      ValueError: k differs, w is not `[k, n]`, or `quantized` is not what the recipe stores.

    >>> x, w = jnp.ones((2, 3)), jnp.full((3, 4), 0.5)
    >>> matmul(x, w, recipe="tcfp12")[0].tolist()
    [1.5, 1.5, 1.5, 1.5]
    """
    recipe = named_recipe(recipe)
    if isinstance(w, Quantized):
        if quantized is not None:
            raise ValueError("w is quantized already and quantized= is given too; pass one of them")
        w, quantized = None, w
    _check_input("x", x)
    if w is not None:
        _check_input("w", w)
    _check_shapes(x, w if quantized is None else quantized, w)
    if recipe.mode is TCFPMode.BF16:
        if quantized is not None:
            raise ValueError(
                f'recipe("bf16") multiplies float weights, but got {type(quantized).__name__}; dequantize it'
            )
    elif quantized is None:
        quantized, _ = quantize_weight(lax.stop_gradient(w), recipe, key=key)
    _check_stored(recipe, quantized)
    quantized = jax.tree.map(lambda leaf: checkpoint_name(leaf, WEIGHT_NAME), quantized)
    return _product(recipe, x, w, quantized)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Saved:
    """What the backward pass needs: arrays, and the types and shardings that its results must have."""

    x: jax.Array  # BF16 [..., k], or FP8 [k, ...] where wgrad is FP8
    # Which of these are None follows from the recipe, which a type cannot say: hence Any.
    x_scale: Any
    w: Any  # only where no quantized form exists
    quantized: Any
    x_type: Any = field(metadata=dict(static=True))
    w_type: Any = field(metadata=dict(static=True))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(recipe: Recipe, x: jax.Array, w: jax.Array | None, quantized: Quantized | None) -> jax.Array:
    return _forward(recipe, x, w, quantized)[0]


def _forward(recipe: Recipe, x: jax.Array, w: Any, quantized: Any) -> tuple[jax.Array, _Saved]:
    x_scale: Any = None
    if recipe.activation_dtype == "bfloat16":
        x_kept: Any = x.astype(jnp.bfloat16)
        y = _dot_bf16(x_kept, _bf16_weight(w, quantized, recipe.forward_weight), (x.ndim - 1,), (0,), x.dtype)
    else:
        x_q = quantize_operand(x, recipe.activation_dtype, recipe, form=recipe.forward_activation)
        y = product(
            x_q.rows, weight_operand(quantized, recipe.forward_weight, "k"), recipe,
            accumulation=recipe.forward_accumulation, out_dtype=x.dtype, b_tile=recipe.weight_tile,
        )  # fmt: skip
        x_kept = x.astype(jnp.bfloat16)
        if x_q.columns is not None:
            x_kept, x_scale = x_q.columns.values, checkpoint_name(x_q.columns.scale, ACTIVATION_NAME)
    saved = _Saved(
        checkpoint_name(x_kept, ACTIVATION_NAME), x_scale, w if quantized is None else None, quantized,
        _type_of(x), None if w is None else _type_of(w),
    )  # fmt: skip
    return y, saved


def _backward(recipe: Recipe, saved: _Saved, g: jax.Array) -> tuple[jax.Array, jax.Array | None, None]:
    (x_dtype, x_sharding), w_type = saved.x_type, saved.w_type
    g_q: Any = None
    if recipe.gradient_dtype == "bfloat16":
        kernel = _bf16_weight(saved.w, saved.quantized, recipe.dgrad_weight)
        dx = _dot_bf16(g.astype(jnp.bfloat16), kernel, (g.ndim - 1,), (1,), x_dtype, x_sharding)
    else:
        g_q = quantize_operand(g, recipe.gradient_dtype, recipe)
        dx = product(
            g_q.rows, weight_operand(saved.quantized, recipe.dgrad_weight, "n"), recipe,
            accumulation=recipe.dgrad_accumulation, out_dtype=x_dtype, out_sharding=x_sharding,
            b_tile=recipe.weight_tile,
        )  # fmt: skip
    if w_type is None:
        return dx, None, None
    w_dtype, w_sharding = w_type
    if recipe.wgrad == "fp8":
        dw = product(
            Operand(saved.x, saved.x_scale), g_q.columns, recipe, accumulation=recipe.wgrad_accumulation,
            out_dtype=w_dtype, out_sharding=w_sharding,
        )  # fmt: skip
    else:
        tokens = tuple(range(g.ndim - 1))
        dw = _dot_bf16(saved.x, g.astype(jnp.bfloat16), tokens, tokens, w_dtype, w_sharding)
    return dx, dw, None


_product.defvjp(_forward, _backward)


def _bf16_weight(w: Any, quantized: Quantized | None, form: WeightForm) -> jax.Array:
    if quantized is None:
        return w.astype(jnp.bfloat16)
    if form == "single" and isinstance(quantized, WithResidual):
        quantized = quantized.drop_residual()
    return quantized.dequantize(jnp.bfloat16)


def _dot_bf16(
    a: jax.Array, b: jax.Array, a_axes: tuple[int, ...], b_axes: tuple[int, ...], dtype: Any, sharding: Any = None
) -> jax.Array:
    product_dtype = jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32
    out = lax.dot_general(
        a, b, ((a_axes, b_axes), ((), ())), preferred_element_type=product_dtype, out_sharding=sharding
    )
    return out.astype(dtype)


def _type_of(x: jax.Array) -> tuple[Any, Any]:
    """(dtype, sharding under an explicit mesh or None): what the cotangent of x must have."""
    explicit = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
    return x.dtype, jax.typeof(x).sharding if explicit else None


def _check_input(name: str, x: jax.Array) -> None:
    check_real(name, x)
    if jnp.dtype(x.dtype).itemsize < 2:
        raise TypeError(
            f"{name} has dtype {x.dtype}; matmul quantizes by itself, pass bfloat16 or float32, or a QArray as w"
        )


def _check_shapes(x: jax.Array, weight: jax.Array | Quantized, w: jax.Array | None) -> None:
    if len(weight.shape) != 2:
        raise ValueError(
            f"w has shape {tuple(weight.shape)}, not [k, n]; reshape it or use jax.vmap over its leading axes"
        )
    if x.ndim == 0 or x.shape[-1] != weight.shape[0]:
        raise ValueError(f"x{list(x.shape)} @ w{list(weight.shape)}: the last axis of x must equal the first of w (k)")
    if w is not None and w.shape != weight.shape:
        raise ValueError(
            f"w has shape {list(w.shape)}, but quantized has {list(weight.shape)}; they must be the same weight"
        )


# (mode, granularity) -> what a recipe stores of a weight.
_STORED: dict[tuple[TCFPMode, str], type] = {
    (TCFPMode.FP8, "tensor"): QArray, (TCFPMode.TCFP12, "tensor"): ResidualArray, (TCFPMode.FP8, "row"): RowArray,
    (TCFPMode.FP8, "block"): BlockArray, (TCFPMode.TCFP12, "block"): ResidualBlockArray,
}  # fmt: skip


def _check_stored(recipe: Recipe, quantized: Quantized | None) -> None:
    expected = _STORED.get((recipe.mode, recipe.granularity), type(None))
    if not isinstance(quantized, expected):
        raise ValueError(
            f"the recipe (mode {recipe.mode.value}, granularity {recipe.granularity!r}) multiplies a "
            f"{expected.__name__}, but quantized is a {type(quantized).__name__}; build the state with the same recipe"
        )
    if isinstance(quantized, BlockArray | ResidualBlockArray):
        given, wanted = (quantized.block, quantized.tile), (recipe.block, recipe.weight_tile)
        if given != wanted:
            raise ValueError(
                f"the recipe has blocks of (block, weight_tile)={wanted}, but quantized of {given}; build the state "
                "with the same recipe"
            )
