"""Products of a layer with a packed FP4 weight: the forward product and dX read the
same codes.

    forward   y[m, n]  = outer * x[m, k] . (code * scale)[n, k]ᵀ
    dgrad     dx[m, k] = outer * g[m, n] . (code * scale)[n, k]

The recipe says how x and g are rounded: to BF16, to E4M3 with a float32 scale for each
row, or, x alone, to NVFP4. An E2M1 code times its E4M3 scale has at most 6 significant
bits and is exact in BF16. So a product of two NVFP4 operands is a BF16 product of
`code * scale`, which rounds nothing but its float32 sums.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from pallas_kernels.explicit import with_automatic_axes
from pallas_kernels.fp4_matmul.api import fp4_matmul
from pallas_kernels.fp4_matmul.reference import ActivationFormat
from pallas_kernels.operands import Operand, Quantized
from pallas_kernels.specs import (
    Sharding,
    entries,
    entries_of,
    moved,
    sharding_of,
    with_entries,
)
from tcfp_jax.formats.nvfp4_arrays import Nvfp4Values, quantize_values
from tcfp_jax.products.fp8_weights import Asked, Rule, Saved
from tcfp_jax.recipes import Arithmetic, Recipe
from tcfp_jax.weights.fp4_packing import quantize_fp4
from tcfp_jax.weights.stored import Stored


def _forward(
    asked: Asked, x: Array, x_quantized: Quantized | None, weight: Array | Stored
) -> Array:
    # Only wgrad reads an FP8 x: codes are decoded to exact BF16 numbers.
    recipe = asked.recipe
    codes = _codes(weight)
    has_fp4_x = recipe.forward == "full" and recipe.activation == "float4_e2m1fn"
    if has_fp4_x and recipe.backend == "cudnn":
        return _of_codes(asked, x, codes)
    if has_fp4_x:
        rounded_x = _in_nvfp4(x)
        # `along` fills k with zeros up to whole blocks, and codes of an odd k up to a
        # whole byte.
        y = fp4_matmul(
            rounded_x.values[..., : codes.shape[-1]],
            codes,
            out_dtype=jnp.float32,
            out_sharding=asked.out_sharding,
            backend=recipe.backend,
        )
        return (y * rounded_x.outer).astype(x.dtype)
    if codes.shape[-1] != x.shape[-1]:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, 1)])
    return fp4_matmul(
        x,
        codes,
        activation=_rounded_to(recipe.forward),
        out_sharding=asked.out_sharding,
        backend=recipe.backend,
    )


def _of_codes(asked: Asked, x: Array, w: Operand) -> Array:
    """Return the product of x in codes, which tensor cores of four bits read."""
    rows = x.reshape(-1, x.shape[-1])
    y = fp4_matmul(
        quantize_fp4(jnp.pad(rows, [(0, 0), (0, w.shape[-1] - rows.shape[-1])])),
        w,
        activation="float4_e2m1fn",
        out_dtype=x.dtype,
        out_sharding=asked.out_sharding,
        backend=asked.recipe.backend,
    )
    return y.reshape(*x.shape[:-1], -1)


def _dgrad(
    recipe: Recipe, saved: Saved, g: Array, g_quantized: Quantized | None
) -> Array:
    codes = _codes(saved.weight)
    x_type = saved.x_type
    k = x_type.shape[-1]
    sharding = sharding_of(x_type)
    is_odd = codes.shape[-1] != k
    wanted: Sharding = sharding
    if is_odd:
        wanted = with_entries(sharding, (*entries(sharding, g.ndim)[:-1], None))
    dx = fp4_matmul(
        g,
        codes,
        contracts="n",
        activation=_rounded_to(recipe.dgrad),
        out_dtype=x_type.dtype,
        out_sharding=wanted,
        backend=recipe.backend,
    )
    if not is_odd:
        return dx
    dx = dx[..., :k]
    if sharding_of(dx) is None or sharding is None:
        return dx
    return moved(dx, entries(sharding, g.ndim))


RULE = Rule(_forward, _dgrad, reads_fp8=False)


def _codes(w: Array | Stored) -> Operand:
    # `quantize_params` by name cannot know that a layer stores [n, k]
    if not isinstance(w, Stored) or w.forward is None:
        raise ValueError(
            f"the FP4 codes of w{list(w.shape)} are packed along n, but products read"
            " them along k; quantize its floats by"
            " tcfp_jax.conversion.find_weights(model, ...), which knows layers that"
            " store [n, k]"
        )
    return w.forward


def _rounded_to(how: Arithmetic) -> ActivationFormat:
    return "bfloat16" if how == "bf16" else "float8_e4m3fn"


def _in_nvfp4(x: Array) -> Nvfp4Values:
    """Round x `[..., k]` to NVFP4 in blocks of 16 along k; its `values` are BF16."""
    # An infinity would saturate to the largest value of its block; NaN is seen.
    x = jnp.where(jnp.isfinite(x), x, jnp.nan)
    # Blocks are cut along k, which an explicit sharding of k refuses; the other axes
    # stay where they are.
    spec = PartitionSpec(*entries_of(x)[:-1], None)

    def of_result(made: jax.ShapeDtypeStruct) -> PartitionSpec:
        return spec if made.ndim else PartitionSpec()

    return with_automatic_axes(lambda x: quantize_values(x, -1), of_result, x)
