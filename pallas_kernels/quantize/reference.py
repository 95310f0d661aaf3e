"""The definition of `quantize` in plain jax.numpy: the CPU path and the oracle of every kernel."""

import jax
import jax.numpy as jnp

from pallas_kernels import numerics
from pallas_kernels.operands import Block, Operand, Quantization, Quantized, Row
from pallas_kernels.tuning import Key


def quantize(options: Quantization, x: jax.Array, amax: jax.Array | None) -> Quantized:
    """Return the quantized tensor, see `api.quantize`."""
    rows = _quantize(options, x.astype(jnp.float32), amax)
    if options.orientation == "rows":
        return Quantized(rows)
    if options.scaling.serves_both:
        turned = jnp.moveaxis(rows.values, -1, 0)
        return Quantized(rows, Operand(turned, options.scaling.turn(rows.scale), scaling=options.scaling))
    # A second quantization, along all other axes as one.
    if isinstance(options.scaling, Row):
        # Scaled before it is turned: XLA then turns one byte a value.
        wide = x.astype(jnp.float32)
        amax = numerics.amax(wide, axis=tuple(range(x.ndim - 1)))
        scale, inverse = numerics.scale_and_inverse(amax, options.dtype, options.scaling.scale)
        values = numerics.scaled_cast(wide, inverse, options.dtype)
        return Quantized(rows, Operand(jnp.moveaxis(values, -1, 0), scale, scaling=options.scaling))
    turned = jnp.moveaxis(x, -1, 0)
    columns = _quantize(options, turned.reshape(x.shape[-1], -1).astype(jnp.float32), None)
    return Quantized(rows, Operand(columns.values.reshape(turned.shape), columns.scale, scaling=options.scaling))


def key(options: Quantization, x: jax.Array, amax: jax.Array | None) -> Key | None:
    """Return the name of a quantization in `tuned.json`, or None if x has no rows."""
    if not x.ndim or not x.shape[-1]:
        return None
    shape, scaling = (x.size // x.shape[-1], x.shape[-1]), options.scaling
    if isinstance(scaling, Block):
        return Key("block_quantize", f"{options.orientation} {scaling.tile} {scaling.size} {x.dtype}", shape)
    return Key("row_quantize" if isinstance(scaling, Row) else "quantize", f"{options.orientation} {x.dtype}", shape)


def _quantize(options: Quantization, x: jax.Array, amax: jax.Array | None) -> Operand:
    scale, multiplier = options.scaling.find(x, options.dtype, amax)
    return Operand(numerics.scaled_cast(x, multiplier, options.dtype), scale, scaling=options.scaling)
