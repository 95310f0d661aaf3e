"""`matmul(x, w, recipe=...)`: the product of a layer, with the backward pass that the recipe describes.

The three products of `y = x W`, as FP8 tensor cores want them (both operands read along the contraction):

    forward   y[m, n]  = x_q[m, k]  . (W_hi + W_lo)ᵀ[n, k]    scale s_x s_w
    dgrad     dx[m, k] = g_q[m, n]  . (W_hi + W_lo)[k, n]      scale s_g s_w   (W_hi alone: ABD)
    wgrad     dW[k, n] = x_qᵀ[k, m] . g_qᵀ[n, m]               scale s_x s_g   (or BF16 x and g)

each scale one for the tensor, the row or the block, as the recipe's scaling says.

x and g are quantized once each, in both orientations in one pass where wgrad is FP8, so the backward pass keeps x in
one byte per value and no transpose is left. The weight is quantized outside the `custom_vjp`, or was quantized by the
optimizer (`tcfp_jax.error_feedback`) and comes in as `quantized`; no product needs its float copy.

The gradient is the straight-through one: that of the products above, as if rounding were the identity.
"""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.dispatch import shared
from pallas_kernels.matmul.api import matmul as multiply
from pallas_kernels.operands import Fp4, Operand, Quantized
from pallas_kernels.partition import partitioned
from pallas_kernels.skip_matmul.api import skip_matmul
from pallas_kernels.specs import Sharding, entries, sharding_of, with_entries
from pallas_kernels.wire import Wire, reduced
from tcfp_jax.products import bf16, fp4_training, fp4_weights
from tcfp_jax.products.operands import (
    ACTIVATION_NAME,
    WEIGHT_NAME,
    check_input,
    check_shapes,
    check_stored,
    differentiated_once,
    quantize_operand,
)  # fmt: skip
from tcfp_jax.products.sites import named
from tcfp_jax.recipes import Arithmetic, Dual, Halves, Recipe, Single
from tcfp_jax.recipes import recipe as named_recipe
from tcfp_jax.weights.quantization import quantize_weight
from tcfp_jax.weights.stored import Stored, constant, of_operand
from tcfp_jax.weights.training import values_of


def matmul(
    x: jax.Array,
    w: Any,
    *,
    recipe: Recipe | str,
    quantized: Stored | None = None,
    key: jax.Array | None = None,
    out_sharding: Sharding = None,
) -> jax.Array:
    """`x @ w` with the operands, products and gradients that `recipe` describes.

    Args:
      x: real floats `[..., k]` of 16 bits or more.
      w: the weight `[k, n]`, real floats; its gradient is that of the straight-through product. Or a `Stored` weight
        (or what `split` and `quantize` made of it), of which no float copy exists: a parameter that `tcfp_jax.store`
        made has a gradient under `tcfp_jax.value_and_grad`, any other is a constant.
      recipe: a `Recipe` or the name of one.
      quantized: `w` as `error_feedback` stored it (`layer_state`); without it `w` is quantized here.
      key: random key for a stochastic residual where `w` is quantized here, and for FP4 training, another at each step.
      out_sharding: of the result under a mesh with explicit axes, as in `lax.dot_general`.

    Returns:
      `[..., n]` in the dtype of x. A NaN or inf in x or w makes NaN what shares a scale with it: all of the result, or
      with a scale a row or block, the outputs that read it; one in the output's gradient does the same to the
      gradients. k or n that are not multiples of 16 work; on a GPU each FP8 product then pads copies of its operands,
      which costs about as much as quantizing them once more.

    Raises:
      TypeError: integer, complex or 8-bit x or w; or a gradient with respect to a stored weight is asked for, or a
        second derivative where operands are rounded.
      ValueError: k differs, w is not `[k, n]`, or `quantized` is not what the recipe stores.

    >>> x, w = jnp.ones((2, 3)), jnp.full((3, 4), 0.5)
    >>> matmul(x, w, recipe="tcfp12")[0].tolist()
    [1.5, 1.5, 1.5, 1.5]
    """
    if not isinstance(recipe, Recipe):
        recipe = named_recipe(recipe)
    if isinstance(w, Operand):
        w = of_operand(w)
    if isinstance(w, Stored):
        if quantized is not None:
            raise ValueError("w is quantized already and quantized= is given too; pass one of them")
        quantized, w = opened(w)
    if isinstance(quantized, Operand):
        quantized = of_operand(quantized)
    if w is None and quantized is not None:
        fp4_weights.check_width(jnp.shape(x), quantized)
    return _shared_product(Asked(recipe, out_sharding), x, w, quantized, key)


def opened(stored: Stored) -> tuple[Stored, jax.Array | None]:
    """(what a product reads, `[k, n]`, the matrix of zeros to which the gradient goes, or None).

    A kernel that its layer stores transposed is turned around.
    """
    if stored.training is None:
        return stored, None
    layout, slot, values = stored.training.weight.layout, stored.training.slot, values_of(stored)
    matrix = None if slot is None else layout.stacked(slot.ndim).matrix(slot)
    if not layout.transposed:
        return values, matrix
    return values.swap(), None if matrix is None else matrix.swapaxes(-1, -2)


@dataclass(frozen=True)
class Asked:
    """What a product is asked for.

    Attributes:
      recipe: how to multiply.
      out_sharding: of the result, or None.
    """

    recipe: Recipe
    out_sharding: Sharding = None


def product(
    asked: Asked,
    x: jax.Array,
    w: jax.Array | None,
    quantized: Stored | None,
    key: jax.Array | None,
    x_quantized: Quantized | None = None,
) -> jax.Array:
    """`matmul`, for callers that share a larger part of the program than it does, or have quantized x already."""
    recipe = asked.recipe
    check_input("x", x)
    if w is not None:
        check_input("w", w)
    check_shapes(x.shape, None if w is None else w.shape, quantized)
    n = (quantized if w is None else w).shape[-1]  # type: ignore[union-attr]
    empty = 0 in (*x.shape, n)
    if quantized is None and recipe.stored is not None and not empty:
        assert w is not None, "one of w and quantized is there"
        form, read = recipe.stored, recipe
        if isinstance(form, Dual) and "hi+lo" not in (form.forward, form.dgrad):
            read = dataclasses.replace(recipe, weight=Single(form.dtype))
        with jax.named_scope("quantize_w"):
            quantized, _ = quantize_weight(lax.stop_gradient(w), read, key=key)
    elif quantized is not None:
        quantized = constant(quantized)
    if quantized is not None:
        check_stored(recipe, quantized)
    quantized = jax.tree.map(lambda leaf: checkpoint_name(leaf, WEIGHT_NAME), quantized)
    x, w, quantized = _varying_alike((x, w, quantized))
    if empty:
        return _empty_product(asked, x, jnp.zeros((x.shape[-1], n), x.dtype) if w is None else w)
    if recipe.fp4 is not None:
        return _fp4_product(asked, x, w, key)
    if x.ndim > 1:
        return _product(asked, x, w, quantized, x_quantized)
    # The weight gradient contracts the tokens, so there must be an axis of them.
    asked = Asked(recipe, with_entries(asked.out_sharding, (None, *entries(asked.out_sharding, 1))))
    return _product(asked, x[None], w, quantized, None)[0]


def _fp4_product(asked: Asked, x: jax.Array, w: jax.Array | None, key: jax.Array | None) -> jax.Array:
    assert w is not None, "nothing is stored for a recipe without weights"
    if sharding_of(x) is not None or sharding_of(w) is not None:
        raise NotImplementedError(
            "FP4 training under a mesh with explicit axes: its blocks and rotations are not laid out for them; make "
            'the mesh with axis_types=jax.sharding.AxisType.Auto, or use recipe="bf16" there'
        )
    return fp4_training.product(asked.recipe, x, w, key) if x.ndim > 1 else _fp4_product(asked, x[None], w, key)[0]


def _empty_product(asked: Asked, x: jax.Array, w: jax.Array) -> jax.Array:
    """The product where an axis has no values: there are none to find a scale of, and all sums are zero."""
    x, w, dtype = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), x.dtype
    return _dot_bf16(x, w, (x.ndim - 1,), (0,), dtype, asked.out_sharding)


_shared_product = shared(product)


def _varying_alike(operands: Any) -> Any:
    """Operands that vary over the same axes of a `jax.shard_map`: all those over which one of them varies.

    Outside the `custom_vjp`, so that the gradient of an operand which was the same on every device is summed over them.
    """
    varying = lambda leaf: jax.typeof(leaf).manual_axis_type.varying
    axes = frozenset[str]().union(*map(varying, jax.tree.leaves(operands)))

    def vary(leaf: jax.Array) -> jax.Array:
        missing = tuple(sorted(axes - varying(leaf)))
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(vary, operands) if axes else operands


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Saved:
    """What the backward pass needs: arrays, and the types and shardings that its results must have."""

    x: Any  # BF16 [..., k], or an Operand [k, ...] where wgrad is FP8
    w: Any  # only where no quantized form exists
    quantized: Any
    # (dtype, sharding under a mesh with explicit axes or None): what the cotangents must have.
    x_type: Any = field(metadata=dict(static=True))
    w_type: Any = field(metadata=dict(static=True))
    k: int = field(metadata=dict(static=True))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(
    asked: Asked, x: jax.Array, w: jax.Array | None, quantized: Stored | None, x_quantized: Quantized | None
) -> Any:
    result = _forward(asked, x, w, quantized, x_quantized)[0]
    return named(result, asked.recipe, (x, w, quantized, x_quantized))


def _forward(asked: Asked, x: jax.Array, w: Any, quantized: Any, x_quantized: Any) -> tuple[Any, _Saved]:
    recipe = asked.recipe
    x_q: Any = x_quantized
    if isinstance(recipe.scaling, Fp4):
        with jax.named_scope("forward"):
            y = fp4_weights.forward(x, quantized, recipe, asked.out_sharding)
    elif recipe.forward == "bf16":
        with jax.named_scope("forward"):
            kernel = _bf16_weight(w, quantized, "hi+lo" if recipe.stored is None else recipe.stored.forward)
            y = _dot_bf16(x.astype(jnp.bfloat16), kernel, (x.ndim - 1,), (0,), x.dtype, asked.out_sharding)
    else:
        assert recipe.stored is not None, "a recipe without a stored weight has BF16 products"
        if x_q is None:
            with jax.named_scope("quantize_x"):
                x_q = quantize_operand(x, recipe.activation, recipe)
        with jax.named_scope("forward"):
            y = _multiply(x_q.rows, quantized.for_forward(recipe.stored.forward), recipe, recipe.forward,
                        out_dtype=x.dtype, out_sharding=asked.out_sharding)  # fmt: skip
    if x_q is None and recipe.wgrad != "bf16":
        with jax.named_scope("quantize_x"):
            x_q = quantize_operand(x, recipe.activation, recipe)
    kept = x.astype(jnp.bfloat16) if recipe.wgrad == "bf16" else x_q.columns
    kept = jax.tree.map(lambda leaf: checkpoint_name(leaf, ACTIVATION_NAME), kept)
    types = [None if v is None else (v.dtype, sharding_of(v)) for v in (x, w)]
    saved = _Saved(kept, w if quantized is None else None, quantized, types[0], types[1], x.shape[-1])
    return y, saved


def _forward_rule(asked: Asked, x: jax.Array, w: Any, quantized: Any, x_quantized: Any) -> tuple[Any, _Saved]:
    # w beside what the product reads: what nobody reads would be left out of the program, and the check with it.
    if quantized is not None:
        quantized, w = differentiated_once((quantized, w))
    x = differentiated_once(x) if _rounds(asked.recipe) else x
    return _forward(asked, x, w, quantized, x_quantized)


def _rounds(recipe: Recipe) -> bool:
    """Whether a product rounds activations or gradients to fewer bits than BF16."""
    return any(how != "bf16" for how in (recipe.forward, recipe.dgrad, recipe.wgrad))


def _backward(asked: Asked, saved: _Saved, g: Any) -> tuple[jax.Array, jax.Array | None, None, None]:
    recipe = asked.recipe
    g = differentiated_once(g) if _rounds(recipe) else g
    (x_dtype, x_sharding), w_type = saved.x_type, saved.w_type
    g_q: Any = None
    if isinstance(recipe.scaling, Fp4):
        with jax.named_scope("dgrad"):
            dx = fp4_weights.dgrad(g, saved.quantized, recipe, saved.k, x_dtype, x_sharding)
    elif recipe.dgrad == "bf16":
        with jax.named_scope("dgrad"):
            kernel = _bf16_weight(saved.w, saved.quantized, "hi+lo" if recipe.stored is None else recipe.stored.dgrad)
            dx = _dot_bf16(g.astype(jnp.bfloat16), kernel, (g.ndim - 1,), (1,), x_dtype, x_sharding)
    else:
        assert recipe.stored is not None, "a recipe without a stored weight has BF16 products"
        if g_q is None:
            with jax.named_scope("quantize_g"):
                g_q = quantize_operand(g, recipe.gradient, recipe)
        with jax.named_scope("dgrad"):
            dx = _multiply(g_q.rows, saved.quantized.for_dgrad(recipe.stored.dgrad), recipe, recipe.dgrad,
                         out_dtype=x_dtype, out_sharding=x_sharding)  # fmt: skip
    if w_type is None:
        return dx, None, None, None
    w_dtype, w_sharding = w_type
    if g_q is None and recipe.wgrad != "bf16":
        with jax.named_scope("quantize_g"):
            g_q = quantize_operand(g, recipe.gradient, recipe)
    with jax.named_scope("wgrad"):
        if recipe.wgrad == "bf16":
            tokens = tuple(range(g.ndim - 1))
            if recipe.wire is None:
                dw = _dot_bf16(saved.x, g.astype(jnp.bfloat16), tokens, tokens, w_dtype, w_sharding)
            else:
                dw = _wgrad_bf16(saved.x, g.astype(jnp.bfloat16), w_dtype, w_sharding, recipe.wire)
        else:
            options = dict(out_dtype=w_dtype, out_sharding=w_sharding, wire=recipe.wire)
            dw = _multiply(saved.x, g_q.columns, recipe, recipe.wgrad, **options)
    return dx, dw, None, None


_product.defvjp(_forward_rule, _backward)


def _multiply(
    a: Operand,
    b: Operand,
    recipe: Recipe,
    how: Arithmetic,
    *,
    out_dtype: Any,
    out_sharding: Any = None,
    wire: Any = None,
) -> jax.Array:
    """`a @ b.T` of dequantized operands: a `[..., c]` or, with b of more axes, `[r, *c]`; b `[n, *c]` to `[..., n]`."""
    assert how != "bf16", "a BF16 product has no FP8 operands"
    options: Any = dict(out_sharding=out_sharding, accumulation=how, backend=recipe.backend, wire=wire)
    if recipe.stored is not None and recipe.stored.blocks == "nonzero" and b.lo is not None:
        return skip_matmul(a, b.settled(), out_dtype=out_dtype, out_sharding=out_sharding, backend=recipe.backend)
    return multiply(a, b, out_dtype=out_dtype, **options)


def _wgrad_bf16(x: jax.Array, g: jax.Array, dtype: Any, sharding: Any, wire: Wire) -> jax.Array:
    """X `[*m, k]` and g `[*m, n]` to `[k, n]`; what devices add travels as `wire` says."""

    def local(x: jax.Array, g: jax.Array, *, summed_over: tuple[str, ...], scattered: Sequence[Any] = ()) -> jax.Array:
        out = lax.dot_general(x, g, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        return reduced(out, scattered, summed_over, wire).astype(dtype)

    wanted = None if sharding is None else entries(sharding, 2)
    call = partitioned(local, "m k, m n -> k n", scattered=True, merged={"m": x.shape[:-1]}, wanted=wanted)
    return call(x, g)


def _bf16_weight(w: Any, quantized: Stored | None, halves: Halves) -> jax.Array:
    if quantized is None:
        return w.astype(jnp.bfloat16)
    return (quantized.drop_residual() if halves == "hi" else quantized).dequantize(jnp.bfloat16)


def _dot_bf16(
    a: jax.Array, b: jax.Array, a_axes: tuple[int, ...], b_axes: tuple[int, ...], dtype: Any, sharding: Any = None
) -> jax.Array:
    product_dtype = jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32
    return bf16.dot(a, b, a_axes, b_axes, product_dtype, sharding).astype(dtype)
