"""The definition of `row_quantize` in plain jax.numpy."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import numerics
from pallas_kernels.quantize.reference import scale_and_inverse


def row_quantize(
    x: jax.Array, *, dtype: Any, scale: str, orientation: str
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """(values, scales, transposed values or None, their scales or None); see `api.row_quantize`."""
    x = x.astype(jnp.float32)
    values, scales = _quantize(x, tuple(range(x.ndim - 1, x.ndim)), dtype, scale)
    if orientation == "rows":
        return values, scales, None, None
    columns, column_scales = _quantize(x, tuple(range(x.ndim - 1)), dtype, scale)
    return values, scales, jnp.moveaxis(columns, -1, 0), column_scales


def _quantize(x: jax.Array, axes: tuple[int, ...], dtype: Any, scale: str) -> tuple[jax.Array, jax.Array]:
    """One scale for all values along `axes`."""
    scales, inverses = scale_and_inverse(numerics.amax(x, axis=axes), dtype, scale)
    scaled = numerics.flush_subnormal(x) * jnp.expand_dims(inverses, axes)
    return numerics.saturating_cast(scaled, dtype), scales
