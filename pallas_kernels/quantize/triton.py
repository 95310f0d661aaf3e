"""`quantize` with one scale as one Pallas-Triton pass: x is read once, and both orientations are written."""

import jax
import jax.numpy as jnp

from pallas_kernels import numerics
from pallas_kernels.operands import Operand, Quantization, Quantized
from pallas_kernels.tiled import WIDE, Output, map_tiles, misfit


def reject(options: Quantization, x: jax.Array, amax: jax.Array | None) -> str | None:
    """Why this kernel cannot quantize x, or None."""
    if x.ndim < 2:
        return f'x{list(x.shape)} has no tiles; use backend="xla"'
    return misfit("x", x.size // max(1, x.shape[-1]), x.shape[-1])


def quantize(options: Quantization, x: jax.Array, amax: jax.Array | None) -> Quantized:
    """See `api.quantize`."""
    dtype, scaling = options.dtype, options.scaling
    scale, inverse = scaling.find(x, dtype, amax)

    def body(x: jax.Array, inverse: jax.Array) -> tuple[jax.Array]:
        return (numerics.saturating_cast(numerics.scaled_for_rounding(x.astype(jnp.float32), inverse, dtype), dtype),)

    outputs = [Output(dtype, transposed=options.orientation == "both")]
    values, *turned = map_tiles(body, [x], [inverse], outputs, name="quantize", reference=body, tiling=WIDE)
    rows = Operand(values, scale, scaling=scaling)
    return Quantized(rows, Operand(turned[0], scale, scaling=scaling) if turned else None)
