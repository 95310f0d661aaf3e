"""`quantize` with one scale or in blocks as one pass over tiles: x is read once, both orientations are written."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import numerics
from pallas_kernels.operands import SCALE_DTYPE, Block, Operand, Quantization, Quantized
from pallas_kernels.quantize import reference
from pallas_kernels.specs import has_explicit_axes
from pallas_kernels.tiled import WIDE, Engine, Operations, Output, Tiling, by_triton, map_tiles


def reject(options: Quantization, x: jax.Array, amax: jax.Array | None) -> str | None:
    """Return the reason why this kernel cannot quantize x, or None."""
    if x.ndim < 2:
        return f'x{list(x.shape)} has no tiles; use backend="xla"'
    tiling = Tiling.of_blocks(options.scaling.size) if isinstance(options.scaling, Block) else Tiling()
    return tiling.misfit("x", x.size // max(1, x.shape[-1]), x.shape[-1])


def quantize(options: Quantization, x: jax.Array, amax: jax.Array | None, engine: Engine = by_triton) -> Quantized:
    """Return the quantized tensor, see `api.quantize`."""
    dtype, scaling = options.dtype, options.scaling
    if isinstance(scaling, Block):
        return _in_blocks(options, scaling, x, engine)
    scale, inverse = scaling.find(x, dtype, amax)

    def body(do: Operations, x: jax.Array, inverse: jax.Array) -> tuple[jax.Array]:
        return (numerics.saturating_cast(do.scaled(x.astype(jnp.float32), inverse, dtype), dtype),)

    outputs = [Output(dtype, transposed=options.orientation == "both")]
    values, *turned = map_tiles(body, [x], [inverse], outputs, name="quantize", tiling=WIDE, engine=engine)
    rows = Operand(values, scale, scaling=scaling)
    return Quantized(rows, Operand(turned[0], scale, scaling=scaling) if turned else None)


def by_reference(options: Quantization, x: jax.Array, amax: jax.Array | None) -> Quantized:
    """Return the definition; with explicit axes, which JAX does not cut into blocks, on each device's part."""
    if has_explicit_axes() and isinstance(options.scaling, Block):
        return _in_blocks(options, options.scaling, x, None)
    return reference.quantize(options, x, amax)


def _in_blocks(options: Quantization, block: Block, x: jax.Array, engine: Engine | None) -> Quantized:
    """Return the quantized tensor from tiles that are blocks, whose values and scales stay in registers."""
    dtype, both, squares = options.dtype, options.orientation == "both", block.tile == "square"

    def scaled(x: jax.Array, amax: jax.Array) -> tuple[jax.Array, jax.Array]:
        scales, inverses = numerics.scale_and_inverse(amax, dtype, "pow2")
        # Nothing to clip: the scale of a block covers its largest value, and is NaN if that is not finite.
        return (x * inverses).astype(dtype), numerics.e8m0_code(scales)

    def body(do: Operations, x: jax.Array) -> tuple[jax.Array, ...]:
        wide = numerics.flush_subnormal(x.astype(jnp.float32))
        if squares:
            return scaled(wide, do.largest(wide))
        along_k = scaled(wide, numerics.amax_by_bits(wide, 1, keepdims=True))
        return (*along_k, *scaled(wide, numerics.amax_by_bits(wide, 0, keepdims=True))) if both else along_k

    def whole(x: jax.Array) -> tuple[jax.Array, ...]:
        rows, columns, _ = reference.quantize(options, x, None)
        code = lambda operand: lax.bitcast_convert_type(operand.scale, jnp.uint8)
        if squares or columns is None:
            return rows.values, code(rows)
        return rows.values, code(rows), columns.values.T, code(columns)

    if squares:
        outputs = [Output(dtype, transposed=both), Output(jnp.uint8, form="one")]
    else:
        outputs = [Output(dtype), Output(jnp.uint8, form="rows")]
        if both:
            outputs += [Output(dtype, form="transposed"), Output(jnp.uint8, form="columns")]
    # Few warps, because each thread finds the scales of all rows and columns that it touches. Measured on an H200, both
    # orientations of vectors of 128 and 64: 2.7 TB/s; with 16 values a thread 1.1 and 1.5.
    tiling = Tiling.of_blocks(block.size, block.size)
    results = map_tiles(body, [x], [], outputs, name="block_quantize", reference=whole, tiling=tiling, engine=engine)
    scales = [lax.bitcast_convert_type(r, SCALE_DTYPE) for r in results if r.dtype == jnp.uint8]
    values, *turned = (r for r in results if r.dtype != jnp.uint8)
    rows = Operand(values, scales[0], scaling=block)
    if not both:
        return Quantized(rows)
    return Quantized(rows, Operand(turned[0], scales[0].T if squares else scales[1], scaling=block))
