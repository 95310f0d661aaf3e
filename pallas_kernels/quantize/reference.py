"""The definition of `quantize` in plain jax.numpy: the CPU path and the oracle of every kernel."""

import jax
import jax.numpy as jnp

from pallas_kernels import numerics
from pallas_kernels.checks import has_explicit_axes
from pallas_kernels.operands import Block, Operand, Quantization, Quantized, Row


def reject(options: Quantization, x: jax.Array, *arrays: jax.Array | None) -> str | None:
    """Why XLA cannot do it here, or None."""
    if isinstance(options.scaling, Block) and has_explicit_axes():
        return "blocks cut and merge axes, which a mesh with explicit axes cannot follow; use AxisType.Auto"
    return None


def quantize(options: Quantization, x: jax.Array, amax: jax.Array | None) -> Quantized:
    """See `api.quantize`."""
    rows = _quantize(options, x.astype(jnp.float32), amax)
    if not options.both:
        return Quantized(rows)
    if options.scaling.serves_both:
        turned = jnp.moveaxis(rows.values, -1, 0)
        return Quantized(rows, Operand(turned, options.scaling.turn(rows.scale), scaling=options.scaling))
    # A quantization of its own along all other axes, as one.
    if isinstance(options.scaling, Row):
        # Scaled before it is turned: XLA then turns one byte a value.
        wide = x.astype(jnp.float32)
        amax = numerics.amax(wide, axis=tuple(range(x.ndim - 1)))
        scale, inverse = numerics.scale_and_inverse(amax, options.dtype, options.scaling.scale)
        values = numerics.saturating_cast(numerics.flush_subnormal(wide) * inverse, options.dtype)
        return Quantized(rows, Operand(jnp.moveaxis(values, -1, 0), scale, scaling=options.scaling))
    turned = jnp.moveaxis(x, -1, 0)
    columns = _quantize(options, turned.reshape(x.shape[-1], -1).astype(jnp.float32), None)
    return Quantized(rows, Operand(columns.values.reshape(turned.shape), columns.scale, scaling=options.scaling))


def _quantize(options: Quantization, x: jax.Array, amax: jax.Array | None) -> Operand:
    scaling, dtype = options.scaling, options.dtype
    scale, inverse = scaling.find(x, dtype, amax)
    values = numerics.saturating_cast(numerics.flush_subnormal(x) * scaling.spread(inverse, x.shape), dtype)
    return Operand(values, scaling.store(scale), scaling=scaling)
