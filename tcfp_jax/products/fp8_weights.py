"""Products of a layer whose weight is stored in FP8, or not at all: each of the three
is FP8 or BF16, as the recipe says.

    forward   y[m, n]  = x_q[m, k]  . (W_hi + W_lo)ᵀ[n, k]    scale s_x s_w
    dgrad     dx[m, k] = g_q[m, n]  . (W_hi + W_lo)[k, n]     scale s_g s_w
    wgrad     dW[k, n] = x_qᵀ[k, m] . g_qᵀ[n, m]              scale s_x s_g

Dgrad may read W_hi alone (ABD), and wgrad may multiply x and g in BF16.

x and g are quantized once each. If wgrad is FP8, one pass makes both orientations, so
the backward pass keeps x in one byte per value and nothing is transposed.

`fp4_weights` shares the parts of this rule that do not read the weight.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from pallas_kernels.matmul.api import add_product, skip_matmul
from pallas_kernels.matmul.api import matmul as multiply_fp8
from pallas_kernels.operands import Accumulation, Operand, Orientation, Quantized
from pallas_kernels.quantize.api import quantize
from pallas_kernels.specs import Sharding, sharding_of
from pallas_kernels.wire import Wire
from tcfp_jax.paths import PyTree
from tcfp_jax.products import bf16
from tcfp_jax.products.annotations import (
    ACTIVATION_NAME,
    differentiated_once,
    site,
)
from tcfp_jax.recipes import Arithmetic, Halves, Recipe
from tcfp_jax.weights.small_blocks import without_small_blocks
from tcfp_jax.weights.stored import Stored

# An operand as its product reads it: BF16 values, or FP8 with scales.
Read: TypeAlias = Array | Operand


@dataclass(frozen=True)
class Asked:
    """The static options of a product.

    Attributes:
      recipe: how to multiply.
      out_sharding: how the result is sharded under explicit axes.
    """

    recipe: Recipe
    out_sharding: Sharding = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Saved:
    """The residuals of the backward pass.

    Attributes:
      x: x as wgrad reads it: BF16 `[..., k]`, or FP8 `[k, ...]`.
      weight: the weight that dgrad reads: its stored form, or floats if there is none.
      x_type: the type of x, which its gradient must have.
      w_type: the type of the float weight or slot; None for a frozen weight.
    """

    x: Read
    weight: Array | Stored
    x_type: jax.core.ShapedArray = field(metadata=dict(static=True))
    w_type: jax.core.ShapedArray | None = field(metadata=dict(static=True))


# The gradients of x, w, the stored weight and the quantized x; the last two have none.
Gradients: TypeAlias = tuple[Array, Array | None, None, None]


class Rule:
    """A product `x @ w` with its gradients, of weights in one form.

    Attributes:
      multiply: returns the product, from the options, x, x in FP8 and the weight.
      dgrad: returns the gradient of x, from the recipe, the residuals, the gradient of
        the result and the same in FP8.
      reads_fp8: whether both read x and g in FP8; wgrad does so in each rule.
      product: the product, which JAX differentiates by `forward` and `backward`.
    """

    def __init__(
        self,
        multiply: Callable[[Asked, Array, Quantized | None, Array | Stored], Array],
        dgrad: Callable[[Recipe, Saved, Array, Quantized | None], Array],
        *,
        reads_fp8: bool,
    ) -> None:
        self.multiply = multiply
        self.dgrad = dgrad
        self.reads_fp8 = reads_fp8
        self.product = jax.custom_vjp(self._product, nondiff_argnums=(0,))
        self.product.defvjp(self._saving, self.backward)

    def _product(self, asked: Asked, *operands: PyTree) -> Array:
        # JAX runs this body only if nobody differentiates; otherwise it takes the rule
        # below, without the site.
        y, _ = self.forward(asked, *operands)
        return site(y, asked.recipe, operands)

    def _saving(
        self,
        asked: Asked,
        x: Array,
        w: Array | None,
        quantized: Stored | None,
        x_quantized: Quantized | None,
    ) -> tuple[Array, Saved]:
        if quantized is not None:
            # Nothing reads w then, and JAX would drop an unread operand together with
            # this check.
            quantized, w = differentiated_once((quantized, w))
        x = rounded(asked.recipe, x)
        return self.forward(asked, x, w, quantized, x_quantized)

    def forward(
        self,
        asked: Asked,
        x: Array,
        w: Array | None,
        quantized: Stored | None,
        x_quantized: Quantized | None,
    ) -> tuple[Array, Saved]:
        """Return (the product, the residuals of its backward pass).

        The residuals are the operand of wgrad and the weight that dgrad reads. x takes
        one byte per value in FP8 and two in BF16. A float copy of a quantized weight
        need not live until the backward pass.
        """
        recipe = asked.recipe
        weight = read_weight(w, quantized)
        # One pass serves the forward product and wgrad; if neither is FP8, x is not
        # quantized.
        in_fp8 = self.reads_fp8 and recipe.forward != "bf16"
        if x_quantized is None and (in_fp8 or recipe.wgrad != "bf16"):
            with jax.named_scope("quantize_x"):
                x_quantized = quantize_operand(x, recipe.activation, recipe)
        with jax.named_scope("forward"):
            y = self.multiply(asked, x, x_quantized, weight)
        kept = columns_of(x, x_quantized, recipe.wgrad)
        kept = jax.tree.map(lambda leaf: checkpoint_name(leaf, ACTIVATION_NAME), kept)
        w_type = None if w is None else jax.typeof(w)
        return y, Saved(kept, weight, jax.typeof(x), w_type)

    def backward(
        self,
        asked: Asked,
        saved: Saved,
        g: Array,
        g_quantized: Quantized | None = None,
        total: Array | None = None,
    ) -> Gradients:
        """Return the gradients of x and w from the result's, g.

        Args:
          asked: the options of the product.
          saved: its residuals.
          g: the gradient of the result.
          g_quantized: the same in FP8, if the caller has quantized it.
          total: a sum of weight gradients, to which this one is added.
        """
        recipe = asked.recipe
        g = rounded(recipe, g)
        in_fp8 = self.reads_fp8 and recipe.dgrad != "bf16"
        wgrad_in_fp8 = recipe.wgrad != "bf16" and saved.w_type is not None
        # As in the forward pass, one quantization of g serves dgrad (rows) and wgrad
        # (columns).
        if g_quantized is None and (in_fp8 or wgrad_in_fp8):
            with jax.named_scope("quantize_g"):
                g_quantized = quantize_operand(g, recipe.gradient, recipe)
        with jax.named_scope("dgrad"):
            dx = self.dgrad(recipe, saved, g, g_quantized)
        columns = columns_of(g, g_quantized, recipe.wgrad)
        return dx, weight_gradient(recipe, saved, columns, total), None, None


def rounded(recipe: Recipe, x: Array) -> Array:
    """Return activations or gradients; only products of BF16 ones have true second
    derivatives.
    """
    if recipe.forward == recipe.dgrad == recipe.wgrad == "bf16":
        return x
    return differentiated_once(x)


def read_weight(w: Array | None, quantized: Stored | None) -> Array | Stored:
    """Return the form of a weight that products read: the stored one if it exists."""
    weight = w if quantized is None else quantized
    if weight is None:
        raise ValueError("w is None, and so is quantized; pass one of them")
    return weight


def halves_read(recipe: Recipe, product: Literal["forward", "dgrad"]) -> Halves:
    """Return the halves of a weight that a product reads."""
    return "hi+lo" if recipe.stored is None else getattr(recipe.stored, product)


def quantize_operand(x: Array, dtype: DTypeLike, recipe: Recipe) -> Quantized:
    """Quantize x or g `[..., c]`, in one pass and only in the orientations that its
    products read.

    Rows `[..., c]` are contracted along c, in forward and dgrad; columns `[c, ...]`
    along all other axes, in wgrad.
    """
    orientation: Orientation = "rows" if recipe.wgrad == "bf16" else "both"
    return quantize(
        x,
        dtype,
        recipe.scaling.along_rows,
        orientation=orientation,
        backend=recipe.quantize_backend,
    )


def rows_of(x: Array, quantized: Quantized | None, how: Arithmetic) -> Read:
    """Return x or g as a product along its last axis reads it."""
    if quantized is None or how == "bf16":
        return x.astype(jnp.bfloat16)
    return quantized.rows


def columns_of(x: Array, quantized: Quantized | None, how: Arithmetic) -> Read:
    """Return x or g as a product along all other axes reads it; BF16 is not turned."""
    if quantized is None or quantized.columns is None or how == "bf16":
        return x.astype(jnp.bfloat16)
    return quantized.columns


def weight_gradient(
    recipe: Recipe,
    saved: Saved,
    columns: Read,
    total: Array | None,
) -> Array | None:
    """Return the gradient of w, added to `total`; `columns` is g as wgrad reads it.

    A frozen weight, such as one for inference or under LoRA adapters, has none, and
    costs no product.
    """
    if saved.w_type is None:
        return None
    dtype = saved.w_type.dtype
    sharding = sharding_of(saved.w_type)
    with jax.named_scope("wgrad"):
        x = saved.x
        if isinstance(x, Operand) and isinstance(columns, Operand):
            if total is not None and recipe.wire is None:
                accumulation = _accumulation(recipe.wgrad)
                return add_product(total, x, columns, accumulation, recipe.backend)
            dw = multiply(
                x,
                columns,
                recipe,
                recipe.wgrad,
                out_dtype=dtype,
                out_sharding=sharding,
                wire=recipe.wire,
            )
        elif isinstance(x, Operand) or isinstance(columns, Operand):
            raise TypeError("x and g of a weight gradient are both FP8, or both BF16")
        elif recipe.wire is not None:
            dw = bf16.weight_gradient(x, columns, dtype, sharding, recipe.wire)
        else:
            tokens = tuple(range(columns.ndim - 1))
            dw = bf16.dot(x, columns, tokens, tokens, dtype, sharding)
    return dw if total is None else total + dw


def multiply(
    a: Operand,
    b: Operand,
    recipe: Recipe,
    how: Arithmetic,
    *,
    out_dtype: DTypeLike,
    out_sharding: Sharding = None,
    wire: Wire | None = None,
) -> Array:
    """Return `a @ b.T` of dequantized operands `[..., *c]` and `[n, *c]`, as
    `[..., n]`.
    """
    form = recipe.stored
    if form is not None and form.blocks == "nonzero" and b.lo is not None:
        # Its kernel reads values that are contracted along their last axis.
        return skip_matmul(
            a,
            without_small_blocks(b.settled(), form.sparse_threshold),
            out_dtype=out_dtype,
            out_sharding=out_sharding,
            backend=recipe.backend,
        )
    return multiply_fp8(
        a,
        b,
        out_dtype=out_dtype,
        out_sharding=out_sharding,
        accumulation=_accumulation(how),
        backend=recipe.backend,
        wire=wire,
    )


def _accumulation(how: Arithmetic) -> Accumulation:
    return "full" if how == "full" else "fast"


def _forward(
    asked: Asked, x: Array, x_quantized: Quantized | None, weight: Array | Stored
) -> Array:
    recipe = asked.recipe
    halves = halves_read(recipe, "forward")
    rows = rows_of(x, x_quantized, recipe.forward)
    if not isinstance(rows, Operand):
        kernel = bf16.weight(weight, halves)
        axes = (x.ndim - 1,)
        return bf16.dot(rows, kernel, axes, (0,), x.dtype, asked.out_sharding)
    return multiply(
        rows,
        _stored(weight).for_forward(halves),
        recipe,
        recipe.forward,
        out_dtype=x.dtype,
        out_sharding=asked.out_sharding,
    )


def _dgrad(
    recipe: Recipe, saved: Saved, g: Array, g_quantized: Quantized | None
) -> Array:
    halves = halves_read(recipe, "dgrad")
    dtype = saved.x_type.dtype
    sharding = sharding_of(saved.x_type)
    rows = rows_of(g, g_quantized, recipe.dgrad)
    if not isinstance(rows, Operand):
        kernel = bf16.weight(saved.weight, halves)
        return bf16.dot(rows, kernel, (g.ndim - 1,), (1,), dtype, sharding)
    return multiply(
        rows,
        _stored(saved.weight).for_dgrad(halves),
        recipe,
        recipe.dgrad,
        out_dtype=dtype,
        out_sharding=sharding,
    )


def _stored(weight: Array | Stored) -> Stored:
    if isinstance(weight, Stored):
        return weight
    raise TypeError("an FP8 product reads a stored weight; quantize it first")


RULE = Rule(_forward, _dgrad, reads_fp8=True)
