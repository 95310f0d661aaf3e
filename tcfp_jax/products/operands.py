"""One product of FP8 operands, whatever shares their scales, and the quantization of x and g for theirs.

Both operands of a product are contracted along their last axes. An `Operand` is what one of them is made of: values,
perhaps a residual, and scales, whose shape says what shares one:

    tensor   float32 scalar         out = s_a s_b (a . b)
    row      float32, one a row     out = s_a[m] s_b[n] (a . b)[m, n]
    block    E8M0, one a block      scaled inside of the product, see `pallas_kernels.block_matmul`
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.block_matmul.api import block_matmul
from pallas_kernels.block_quantize.api import block_quantize
from pallas_kernels.blocks import Blocked, Tile
from pallas_kernels.dual_quantize.api import dual_quantize
from pallas_kernels.matmul.api import Accumulation
from pallas_kernels.matmul.api import matmul as matmul_fp8
from pallas_kernels.quantize.api import Orientation
from pallas_kernels.quantize.api import quantize as quantize_values
from pallas_kernels.row_quantize.api import row_quantize
from tcfp_jax.recipes import Recipe, WeightForm
from tcfp_jax.weights.blocks import BlockArray, ResidualBlockArray, RowArray
from tcfp_jax.weights.quantization import QArray, Quantized, ResidualArray


class Operand(NamedTuple):
    """FP8 values `[..., c]` contracted along c, their residual (or None), and the scales of both."""

    values: jax.Array
    scale: jax.Array
    lo: jax.Array | None = None
    lo_scale: jax.Array | None = None  # of blocks, whose residuals may have a scale of their own


class Directions(NamedTuple):
    """An activation or gradient as its two products read it; `columns` is None where wgrad is BF16."""

    rows: Operand  # [..., c], contracted along c
    columns: Operand | None  # [c, ...], contracted along all axes but the first


def quantize_operand(x: jax.Array, dtype: str, recipe: Recipe, *, form: WeightForm = "single") -> Directions:
    """X or g, in the orientations that its products read and no other, from one pass."""
    orientation: Orientation = "both" if recipe.wgrad == "fp8" else "rows"
    options: Any = dict(orientation=orientation, backend=recipe.quantize_backend)
    if form == "dual":
        parts = dual_quantize(x, dtype=dtype, **options)
        turned = None if parts.hi_transposed is None else Operand(parts.hi_transposed, parts.scale)
        return Directions(Operand(parts.hi, parts.scale, parts.lo), turned)
    if recipe.granularity == "tensor":
        values, scale, transposed = quantize_values(x, dtype, scale=recipe.scale, **options)
        turned_scale: Any = scale
    elif recipe.granularity == "row":
        values, scale, transposed, turned_scale = row_quantize(x, dtype, scale=recipe.scale, **options)
    else:
        block = _block_of(recipe)
        values, scale, transposed, turned_scale = block_quantize(x, dtype, block=block, **options)
    return Directions(Operand(values, scale), None if transposed is None else Operand(transposed, turned_scale))


def weight_operand(weight: Quantized, form: WeightForm, contracted: str) -> Operand:
    """A weight `[k, n]` as the forward product reads it (`contracted="k"`, `[n, k]`), or dgrad ("n", `[k, n]`)."""
    if form == "single" and isinstance(weight, ResidualArray | ResidualBlockArray):
        weight = weight.drop_residual()
    turn = contracted == "k"
    if isinstance(weight, QArray):
        return Operand(_turned(weight.values, weight.transposed, turn), weight.scale)
    if isinstance(weight, RowArray):
        return _one_direction(weight.values, weight.scales, weight.transposed, weight.transposed_scales, turn)
    if isinstance(weight, BlockArray):
        if weight.tile == "vector":
            return _one_direction(weight.values, weight.scales, weight.transposed, weight.transposed_scales, turn)
        values = _turned(weight.values, weight.transposed, turn)
        return Operand(values, weight.scales.T if turn else weight.scales)
    hi, lo = _turned(weight.hi, weight.hi_transposed, turn), _turned(weight.lo, weight.lo_transposed, turn)
    if isinstance(weight, ResidualArray):
        return Operand(hi, weight.scale, lo)
    scales, residual_scales = weight.scales, weight.residual_scales
    return Operand(hi, scales.T, lo, residual_scales.T) if turn else Operand(hi, scales, lo, residual_scales)


def _turned(values: jax.Array, copy: jax.Array | None, turn: bool) -> jax.Array:
    if not turn:
        return values
    return values.T if copy is None else copy


def _one_direction(values: Any, scales: Any, transposed: Any, transposed_scales: Any, turn: bool) -> Operand:
    if not turn:
        return Operand(values, scales)
    if transposed is None:
        raise ValueError(
            "the forward product contracts k, but this weight was quantized along n only; build it with "
            "quantize_weight(w, recipe) or error_feedback, which quantize it along both"
        )
    return Operand(transposed, transposed_scales)


def product(
    a: Operand,
    b: Operand,
    recipe: Recipe,
    *,
    accumulation: Accumulation,
    out_dtype: Any,
    out_sharding: Any = None,
    b_tile: Tile = "vector",
) -> jax.Array:
    """`a @ b.T` of dequantized operands: a `[..., c]` or, with b of more axes, `[r, *c]`; b `[n, *c]` to `[..., n]`."""
    if recipe.granularity == "block":
        return _block_product(a, b, recipe, out_dtype, b_tile)
    options: Any = dict(accumulation=accumulation, out_sharding=out_sharding, backend=recipe.backend)
    if recipe.granularity == "row":
        return _row_product(a, b, recipe, out_dtype, options)
    scale = a.scale * b.scale
    if recipe.scale == "pow2":
        # Exact as bfloat16, which lets the GEMM apply it (see `matmul_fp8`).
        scale = scale.astype(jnp.bfloat16)
    if a.lo is None:
        return matmul_fp8(a.values, b.values, b.lo, scale=scale, out_dtype=out_dtype, **options)
    # Both in float32: rounding one of them to bfloat16 would cost the quality that the third product is for.
    out = matmul_fp8(a.values, b.values, b.lo, scale=scale, out_dtype=jnp.float32, **options)
    return (out + matmul_fp8(a.lo, b.values, scale=scale, out_dtype=jnp.float32, **options)).astype(out_dtype)


def _row_product(a: Operand, b: Operand, recipe: Recipe, out_dtype: Any, options: Any) -> jax.Array:
    # Powers of two scale a rounded bfloat16 exactly, so the product may be written as such; others round once.
    exact = recipe.scale == "pow2" and out_dtype == jnp.bfloat16
    unscaled = matmul_fp8(
        a.values, b.values, scale=jnp.ones((), jnp.bfloat16), out_dtype=jnp.bfloat16 if exact else jnp.float32,
        **options,
    )  # fmt: skip
    return (unscaled.astype(jnp.float32) * a.scale[..., None] * b.scale).astype(out_dtype)


def _block_product(a: Operand, b: Operand, recipe: Recipe, out_dtype: Any, b_tile: Tile) -> jax.Array:
    contracted = b.values.ndim - 1
    flat = lambda values: values.reshape(*values.shape[: values.ndim - contracted], -1) if contracted > 1 else values
    lo = None if b.lo is None or b.lo_scale is None else Blocked(b.lo, b.lo_scale)
    return block_matmul(
        Blocked(flat(a.values), a.scale), Blocked(flat(b.values), b.scale), lo, block=_block_of(recipe), tile=b_tile,
        residual_blocks="all" if lo is None else recipe.residual_blocks, out_dtype=out_dtype, backend=recipe.backend,
    )  # fmt: skip


def _block_of(recipe: Recipe) -> int:
    assert recipe.block is not None, "a Recipe with blocks has a size"
    return recipe.block
