"""`quantize` with one scale or in blocks as one pass over tiles: x is read once, both
orientations are written.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import numerics
from pallas_kernels.operands import SCALE_DTYPE, Block, Operand, Quantization, Quantized
from pallas_kernels.quantize import reference
from pallas_kernels.specs import has_explicit_axes
from pallas_kernels.tiled import (
    WIDE,
    Engine,
    Operations,
    Output,
    Tiling,
    by_triton,
    map_tiles,
)


def reject(options: Quantization, x: jax.Array, amax: jax.Array | None) -> str | None:
    """Return the reason why this kernel cannot quantize x, or None."""
    if x.ndim < 2:
        return f'x{list(x.shape)} has no tiles; use backend="xla"'
    tiling = (
        Tiling.of_blocks(options.scaling.size)
        if isinstance(options.scaling, Block)
        else Tiling()
    )
    return tiling.misfit("x", x.size // max(1, x.shape[-1]), x.shape[-1])


def quantize(
    options: Quantization,
    x: jax.Array,
    amax: jax.Array | None,
    engine: Engine | None = by_triton,
) -> Quantized:
    """Return the quantized tensor, see `api.quantize`; without an engine the
    definition.
    """
    dtype, scaling = options.dtype, options.scaling
    # JAX does not cut explicit axes into blocks, so there each device computes the
    # definition of its part.
    if engine is None and not (has_explicit_axes() and isinstance(scaling, Block)):
        return reference.quantize(options, x, amax)
    if isinstance(scaling, Block):
        return _in_blocks(options, scaling, x, engine)
    scale, inverse = scaling.find(x, dtype, amax)

    def body(do: Operations, x: jax.Array, inverse: jax.Array) -> tuple[jax.Array]:
        return (
            numerics.saturating_cast(
                do.scaled(x.astype(jnp.float32), inverse, dtype), dtype
            ),
        )

    outputs = [Output(dtype, transposed=options.orientation == "both")]
    values = map_tiles(
        body, [x], [inverse], outputs, name="quantize", tiling=WIDE, engine=engine
    )
    rows, *columns = (Operand(x, scale, scaling=scaling) for x in values)
    return Quantized(rows, columns[0] if columns else None)


def _in_blocks(
    options: Quantization, block: Block, x: jax.Array, engine: Engine | None
) -> Quantized:
    """Return the quantized tensor from tiles that are blocks, whose values and scales
    stay in registers.
    """
    dtype, both, squares = (
        options.dtype,
        options.orientation == "both",
        block.tile == "square",
    )
    axes: tuple[int | None, ...] = (None,) if squares else (1, 0) if both else (1,)

    def body(do: Operations, x: jax.Array) -> tuple[jax.Array, ...]:
        wide, results = x.astype(jnp.float32), list[jax.Array]()
        for amax in do.largest(wide, axes):
            scales, inverses = numerics.scale_and_inverse(amax, dtype, "pow2")
            # Nothing to clip: the scale of a block covers its largest value, and is NaN
            # if that is not finite.
            results += [
                do.scaled(wide, inverses, dtype).astype(dtype),
                numerics.e8m0_code(scales),
            ]
        return tuple(results)

    def whole(x: jax.Array) -> tuple[jax.Array, ...]:
        rows, columns, _ = reference.quantize(options, x, None)
        vectors = (
            () if squares or columns is None else (columns.values.T, columns.scale)
        )
        results = (rows.values, rows.scale, *vectors)
        return tuple(
            x if x.dtype == dtype else lax.bitcast_convert_type(x, jnp.uint8)
            for x in results
        )

    outputs = [
        Output(dtype, transposed=both and squares),
        Output(jnp.uint8, form="one" if squares else "rows"),
    ]
    if both and not squares:
        outputs += [Output(dtype, form="transposed"), Output(jnp.uint8, form="columns")]
    # Few warps, because each thread finds the scales of all rows and columns that it
    # touches. Measured on an H200, both orientations of vectors of 128 and 64: 2.7
    # TB/s; with 16 values a thread 1.1 and 1.5.
    tiling = Tiling.of_blocks(block.size, block.size)
    results = map_tiles(
        body,
        [x],
        [],
        outputs,
        name="block_quantize",
        reference=whole,
        tiling=tiling,
        engine=engine,
    )
    scales = [
        lax.bitcast_convert_type(r, SCALE_DTYPE)
        for r in results
        if r.dtype == jnp.uint8
    ]
    values = [r for r in results if r.dtype != jnp.uint8]
    # Squares have no scales of columns, but those of the rows serve them.
    pairs = zip(values, [*scales, scales[0].T], strict=False)
    rows, *columns = (Operand(x, scale, scaling=block) for x, scale in pairs)
    return Quantized(rows, columns[0] if columns else None)
