"""The rows of x as the E4M3 kernel reads them: rounded, in the order of decoded codes, with their factors.

XLA takes three kernels for it, which with 64 rows cost a tenth of the product. Here a program of one kernel has a row.
Values and scales are those of `reference.quantize_rows`, bit for bit.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import numerics
from pallas_kernels.fp4_matmul import decode_fp8, reference
from pallas_kernels.partition import varying
from pallas_kernels.quantize.triton_rows import LONGEST_ROW, multiplied, scale_and_inverse, warps_of


def serves(k: int) -> bool:
    """Whether a program can hold a row."""
    return 0 < k <= LONGEST_ROW


def ordered(x: jax.Array, rows: int, outer: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(E4M3 values `[rows, k]` of x `[m, k]` as `decode_fp8.permuted` has them, float32 factors `[rows]`).

    A factor is the scale of a row times `outer`, the float32 scale of the weight. Rows from m on are zeros.
    """
    call = functools.partial(_call, rows)
    return lax.platform_dependent(
        x, outer, cpu=functools.partial(call, interpret=True), cuda=functools.partial(call, interpret=False)
    )


def _call(rows: int, x: jax.Array, outer: jax.Array, *, interpret: bool) -> tuple[jax.Array, jax.Array]:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plgpu

    m, k = x.shape
    width = pl.next_power_of_2(k)
    # Four values lie beside each other before and behind: with an axis of their own they are loaded and stored at once.
    sides = width // 4, 4

    def kernel(x_ref: Any, outer_ref: Any, values_ref: Any, factor_ref: Any) -> None:
        row, word, value = pl.program_id(0), *(lax.broadcasted_iota(jnp.int32, sides, axis) for axis in range(2))
        mask = None if k == width else word < k // 4
        # Rows that are not there read the last one.
        at = jnp.minimum(row, m - 1), 4 * decode_fp8.word_at(word) + value
        found = plgpu.load(x_ref.at[at], mask=mask, other=None if mask is None else 0).astype(jnp.float32)
        wide = jnp.where(row < m, found, 0)
        amax = numerics.amax_by_bits(numerics.amax_by_bits(wide, 1), 0, keepdims=True)
        scale, inverse = scale_and_inverse(reference.ROWS, amax, interpret)
        values = multiplied(wide, inverse, interpret).astype(values_ref.dtype)
        plgpu.store(values_ref.at[row, 4 * word + value], values, mask=mask)
        factor = outer_ref[...] * jnp.float32(1 / decode_fp8.FACTOR) * scale
        plgpu.store(factor_ref.at[row + lax.broadcasted_iota(jnp.int32, (1,), 0)], factor)

    shapes = (
        jax.ShapeDtypeStruct((rows, k), jnp.float8_e4m3fn), jax.ShapeDtypeStruct((rows,), jnp.float32),
    )  # fmt: skip
    values, factors = pl.pallas_call(
        kernel,
        out_shape=varying(shapes, x, outer),
        grid=(rows,),
        compiler_params=plgpu.CompilerParams(num_warps=warps_of((1, width)), num_stages=1),
        interpret=interpret,
        name="ordered_row_quantize",
    )(x, outer.reshape(1))
    return values, factors
