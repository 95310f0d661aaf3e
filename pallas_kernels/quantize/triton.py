"""`quantize` as one Pallas-Triton pass: x is read once, and both orientations are written in 16-byte pieces."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import numerics, tuning
from pallas_kernels.quantize.reference import scale_and_inverse
from pallas_kernels.tiled import Output, map_tiles, misfit


def reject(x: jax.Array, **options: Any) -> str | None:
    """Why this kernel cannot quantize x, or None."""
    if x.ndim < 2:
        return f'x{list(x.shape)} has no tiles; use backend="xla"'
    return misfit("x", x.size // max(1, x.shape[-1]), x.shape[-1])


def decline(x: jax.Array, *, orientation: str, **options: Any) -> str | None:
    """Why this kernel is not the first choice, or None."""
    return tuning.decline("quantize", "triton", f"{orientation} {x.dtype}", (x.size // x.shape[-1], x.shape[-1]))


def quantize(
    x: jax.Array, *, dtype: Any, scale: str, amax: jax.Array | None, orientation: str
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """(values, scale, transposed or None); see `api.quantize`."""
    *leading, k = x.shape
    rows = x.reshape(-1, k)
    factor, inverse = scale_and_inverse(numerics.amax(x) if amax is None else amax, dtype, scale)

    def body(x: jax.Array, inverse: jax.Array) -> tuple[jax.Array]:
        return (numerics.saturating_cast(numerics.scaled_for_rounding(x.astype(jnp.float32), inverse, dtype), dtype),)

    both = orientation == "both"
    values, *transposed = map_tiles(body, [rows], [inverse], [Output(dtype, both)], name="quantize", reference=body)
    turned = transposed[0].reshape(k, *leading) if both else None
    return values.reshape(x.shape), factor, turned
