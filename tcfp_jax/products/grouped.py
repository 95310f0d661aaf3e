"""`grouped_matmul(x, w, group_sizes, recipe=...)`: rows in groups, each group times a
weight of its own.

A layer with a mixture of experts sorts its tokens by expert and multiplies each
expert's rows by its weight:

    forward   y[m, n]      = x_q[m, k]   . (W_hi + W_lo)[e, n, k]   of each row's group
    dgrad     dx[m, k]     = g_q[m, n]   . (W_hi + W_lo)[e, k, n]   of each row's group
    wgrad     dW[e, k, n]  = x_qᵀ[k, m]  . g_qᵀ[n, m]               over a group's rows

Scales, rounding and the straight-through gradient are as in `products.matmul`. Each
weight has scales of its own.
"""

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike

from pallas_kernels.dispatch import shared
from pallas_kernels.explicit import under_own_mesh
from pallas_kernels.grouped_matmul.api import check_sizes, grouped_weight_gradient
from pallas_kernels.grouped_matmul.api import grouped_matmul as multiply
from pallas_kernels.grouped_matmul.reference import rows_inside
from pallas_kernels.operands import Operand
from pallas_kernels.specs import Shape, has_explicit_axes, varying_alike
from tcfp_jax.paths import PyTree
from tcfp_jax.products import bf16
from tcfp_jax.products.annotations import ACTIVATION_NAME, differentiated_once, site
from tcfp_jax.products.fp8_weights import (
    Read,
    Saved,
    halves_read,
    quantize_operand,
    read_weight,
)
from tcfp_jax.products.matmul import check_input, floats_read, form_read, weight_of
from tcfp_jax.recipes import Arithmetic, Recipe, describe
from tcfp_jax.recipes import recipe as named_recipe
from tcfp_jax.weights.parameter import Parameter
from tcfp_jax.weights.stored import Stored

if TYPE_CHECKING:  # shapes for readers, editors and tests
    from jaxtyping import Float, Int


def grouped_matmul(
    x: "Float[jax.Array, 'm k']",
    w: "Float[jax.Array, 'e k n'] | Stored | Parameter | Operand | None",
    group_sizes: "Int[jax.Array, ' e']",
    *,
    recipe: Recipe | str,
    quantized: Stored | None = None,
    key: Array | None = None,
) -> "Float[jax.Array, 'm n']":
    """Return each row of x times the weight of its group, as `jax.lax.ragged_dot` with
    the arithmetic of `recipe`.

    The first `group_sizes[0]` rows belong to the first weight, the next
    `group_sizes[1]` to the second, and so on. Use it for experts, with tokens that are
    sorted by expert. On Hopper GPUs with jax 0.11 a kernel computes all three products,
    in FP8 or BF16, and multiplies each row only by its own weight. Elsewhere XLA
    multiplies every row by every weight, as in `jax.lax.ragged_dot`, and the gain is
    memory: weights are stored without a float copy.

    Args:
      x: real floats `[m, k]` of 16 bits or more. Rows after the last group are
        ignored, whatever they hold.
      w: the weights `[e, k, n]`: real floats, or a `Stored` stack as in
        `tcfp_jax.matmul`, such as a parameter that `tcfp_jax.store` made.
      group_sizes: integers, zero or more, that add up to at most m; they have no
        gradient.
      recipe: "bf16", or a recipe of FP8, such as "tcfp12_single", "tensorwise",
        "rowwise" or "blockwise".
      quantized: `w` as `error_feedback` stored it. Without it, `w` is quantized here,
        each weight with its own scale.
      key: as in `tcfp_jax.matmul`.

    Returns:
      `[m, n]` in the dtype of x. Rows after the last group are zero, and so are their
        gradients. If sizes are negative
      or add up to more than m, a compiled program cannot raise: result and gradients
        are NaN.

    Raises:
      TypeError: x or w is integer, complex or 8-bit, sizes are not integers, a gradient
        with respect to a stored weight is asked for by `jax.grad`, or a second
        derivative.
      ValueError: shapes do not fit, concrete sizes are negative or add up to more than
        m, or the recipe cannot read `quantized`.
      NotImplementedError: a recipe with FP4 or a `wire`, or a mesh with explicit axes.

    >>> x, w = jnp.ones((4, 2)), jnp.stack([jnp.ones((2, 1)), jnp.full((2, 1), 0.5)])
    >>> grouped_matmul(x, w, jnp.array([1, 2]), recipe="tensorwise")[:, 0].tolist()
    [2.0, 1.0, 1.0, 0.0]
    """
    recipe = named_recipe(recipe)
    reason = unsupported(recipe)
    if reason:
        raise NotImplementedError(
            f'{reason}; use "bf16", "tcfp12_single", "tensorwise" or "rowwise" for'
            " these weights"
        )
    if under_own_mesh(lambda *_: has_explicit_axes())(x, w, group_sizes):
        raise NotImplementedError(
            "a grouped product under a mesh with explicit axes: rows of a group may lie"
            " on several devices; call it inside jax.shard_map, or make the mesh with"
            " axis_types=jax.sharding.AxisType.Auto"
        )
    w, quantized = weight_of(w, quantized)
    check_input("x", x)
    if w is not None:
        check_input("w", w)
    shape = _check_shapes(x, w, quantized)
    sizes = check_sizes(group_sizes, x.shape[0], shape[0])
    if 0 in (*x.shape, *shape):
        # a scale needs at least one value
        return jnp.zeros((x.shape[0], shape[2]), x.dtype)
    return _shared_product(recipe, x, w, quantized, sizes, key)


def unsupported(recipe: Recipe) -> str:
    """Return why a recipe has no grouped product, or "".

    >>> unsupported(named_recipe("blockwise"))
    ''
    >>> unsupported(named_recipe("nvfp4_training"))
    'nvfp4_training has no grouped product, which multiplies FP8 or BF16'
    """
    if recipe.fp4 is not None:
        return (
            f"{describe(recipe)} has no grouped product, which multiplies FP8 or BF16"
        )
    if recipe.wire is None:
        return ""
    return f"{describe(recipe)} has no grouped product: nothing sums it over a wire"


def _check_shapes(x: Array, w: Array | None, quantized: Stored | None) -> Shape:
    """Return the shape `[e, k, n]` of the weights."""
    shapes = [tuple(one.shape) for one in (w, quantized) if one is not None]
    is_one_stack = len(set(shapes)) == 1 and len(shapes[0]) == 3
    if not is_one_stack or x.ndim != 2 or x.shape[1] != shapes[0][1]:
        given = " and ".join(f"w{list(shape)}" for shape in shapes) or "no weight"
        raise ValueError(
            f"x{list(x.shape)} and {given} must be [m, k] and one weight [e, k, n];"
            " merge the tokens' axes"
        )
    if quantized is not None and quantized.stack != shapes[0][:1]:
        raise ValueError(
            f"the stored weight {list(shapes[0])} has scales for a stack"
            f" {list(quantized.stack)}, but each of the {shapes[0][0]} weights needs"
            " its own; quantize it by jax.vmap"
        )
    return shapes[0]


def _prepared(
    recipe: Recipe,
    x: Array,
    w: Array | None,
    quantized: Stored | None,
    sizes: Array,
    key: Array | None,
) -> Array:
    quantized = form_read(recipe, w, quantized, key)
    w = floats_read(recipe, w)
    x, w, quantized, sizes = varying_alike((x, w, quantized, sizes))
    if recipe.forward == recipe.dgrad == recipe.wgrad == "bf16":
        return _product(recipe, x, w, quantized, sizes)
    # A scale covers the rows behind the last group, too. XLA fuses both masks with the
    # operations that make x and the gradient, whose rows the second mask clears in the
    # backward pass. They cost at most one more write of each.
    is_inside = rows_inside(sizes, x.shape[0])[:, None]
    y = _product(recipe, jnp.where(is_inside, x, 0), w, quantized, sizes)
    return jnp.where(is_inside, y, 0)


_shared_product = shared(_prepared)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(
    recipe: Recipe,
    x: Array,
    w: Array | None,
    quantized: Stored | None,
    sizes: Array,
) -> Array:
    y, _ = _forward(recipe, x, w, quantized, sizes)
    return site(y, recipe, (x, w, quantized, None), sizes)


def _forward(
    recipe: Recipe,
    x: Array,
    w: Array | None,
    quantized: Stored | None,
    sizes: Array,
) -> tuple[Array, tuple[Saved, Array]]:
    """Return (the product, the residuals of its backward pass)."""
    with jax.named_scope("quantize_x"):
        rows, columns = _read(x, recipe.activation, recipe.forward, recipe)
    with jax.named_scope("forward"):
        halves = halves_read(recipe, "forward")
        weight = read_weight(w, quantized)
        operand: Read
        if recipe.forward != "bf16" and isinstance(weight, Stored):
            operand = weight.for_forward(halves)
        else:
            operand = bf16.weight(weight, halves).swapaxes(-1, -2)
        how = _how(recipe.forward, recipe)
        y = multiply(rows, operand, sizes, out_dtype=x.dtype, **how)
    columns = jax.tree.map(lambda leaf: checkpoint_name(leaf, ACTIVATION_NAME), columns)
    w_type = None if w is None else jax.typeof(w)
    return y, (Saved(columns, weight, jax.typeof(x), w_type), sizes)


def _forward_rule(
    recipe: Recipe, *operands: PyTree
) -> tuple[Array, tuple[Saved, Array]]:
    return _forward(recipe, *differentiated_once(operands))


def _backward(
    recipe: Recipe, residuals: tuple[Saved, Array], g: Array
) -> tuple[Array, Array | None, None, None]:
    saved, sizes = residuals
    with jax.named_scope("quantize_g"):
        g = differentiated_once(g)
        rows, columns = _read(g, recipe.gradient, recipe.dgrad, recipe)
    with jax.named_scope("dgrad"):
        halves = halves_read(recipe, "dgrad")
        operand: Read
        if recipe.dgrad != "bf16" and isinstance(saved.weight, Stored):
            operand = saved.weight.for_dgrad(halves)
        else:
            operand = bf16.weight(saved.weight, halves)
        how = _how(recipe.dgrad, recipe)
        dx = multiply(rows, operand, sizes, out_dtype=saved.x_type.dtype, **how)
    if saved.w_type is None:
        return dx, None, None, None
    with jax.named_scope("wgrad"):
        how = _how(recipe.wgrad, recipe)
        dtype = saved.w_type.dtype
        dw = grouped_weight_gradient(saved.x, columns, sizes, out_dtype=dtype, **how)
    return dx, dw, None, None


_product.defvjp(_forward_rule, _backward)


def _read(
    x: Array, dtype: DTypeLike, how: Arithmetic, recipe: Recipe
) -> tuple[Read, Read]:
    """Return x or g `[m, c]` as its product along c reads it, computed `how`, and
    `[c, m]` as wgrad does.
    """
    narrow = x.astype(jnp.bfloat16)
    if how == recipe.wgrad == "bf16":
        # XLA would make x transposed alone, in the kernel that gathers its rows, which
        # takes eight times as long.
        narrow = with_layout_constraint(narrow, Layout((0, 1)))
        return narrow, narrow.T
    made = quantize_operand(x, dtype, recipe)
    rows = narrow if how == "bf16" else made.rows
    columns = narrow.T if made.columns is None else made.columns
    return rows, columns


def _how(how: Arithmetic, recipe: Recipe) -> Any:
    return dict(
        accumulation="full" if how == "full" else "fast", backend=recipe.backend
    )
