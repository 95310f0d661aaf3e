"""The operands of a layer's products as a recipe asks for them, and one product of two operands."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dual_quantize.api import dual_quantize
from pallas_kernels.matmul.api import matmul
from pallas_kernels.operands import Operand, Orientation, Quantized
from pallas_kernels.quantize.api import quantize
from pallas_kernels.skip_matmul.api import skip_matmul
from tcfp_jax.recipes import Halves, Product, Recipe


def quantize_operand(x: jax.Array, dtype: str, recipe: Recipe, *, halves: Halves = "hi") -> Quantized:
    """X or g, in the orientations that its products read and no other, from one pass.

    Rows `[..., c]` are contracted along c, in forward and dgrad; columns `[c, ...]` along all other axes, in wgrad, and
    have no residual.
    """
    orientation: Orientation = "rows" if recipe.wgrad == "bf16" else "both"
    options: Any = dict(orientation=orientation, backend=recipe.quantize_backend)
    scaling = recipe.scaling.along_rows
    if halves == "hi":
        return quantize(x, dtype, scaling, **options)
    parts = dual_quantize(x, scaling, dtype=dtype, **options)
    return Quantized(parts.rows, None if parts.columns is None else parts.columns.drop_residual())


def product(
    a: Operand, b: Operand, recipe: Recipe, how: Product, *, out_dtype: Any, out_sharding: Any = None
) -> jax.Array:
    """`a @ b.T` of dequantized operands: a `[..., c]` or, with b of more axes, `[r, *c]`; b `[n, *c]` to `[..., n]`.

    With a residual of a it is `(a_hi + a_lo) (b_hi + b_lo)` without the smallest of the four products.
    """
    assert how != "bf16", "a BF16 product has no FP8 operands"
    options: Any = dict(out_sharding=out_sharding, accumulation=how, backend=recipe.backend)
    if recipe.weight is not None and recipe.weight.blocks == "nonzero" and b.lo is not None:
        return skip_matmul(a, b, out_dtype=out_dtype, backend=recipe.backend)
    if a.lo is None:
        return matmul(a, b, out_dtype=out_dtype, **options)
    # Both in float32: rounding one of them to bfloat16 would cost the quality that the third product is for.
    out = matmul(a.drop_residual(), b, out_dtype=jnp.float32, **options)
    low = Operand(a.lo, a.scale, scaling=a.scaling)
    return (out + matmul(low, b.drop_residual(), out_dtype=jnp.float32, **options)).astype(out_dtype)
