"""`quantize` with one scale or in blocks as one pass over tiles.

x is read once, and both orientations are written.
"""

from dataclasses import dataclass
from functools import partial

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from pallas_kernels import numerics, triton_passes
from pallas_kernels.arithmetic import Portable
from pallas_kernels.dispatch import Implementation
from pallas_kernels.operands import SCALE_DTYPE, Block, Operand, Quantization, Quantized
from pallas_kernels.quantize import reference
from pallas_kernels.specs import has_explicit_axes
from pallas_kernels.tiled import (
    WIDE,
    Arrays,
    Axis,
    Body,
    Engine,
    Operands,
    Output,
    Tiling,
    map_tiles,
)


def _reject(options: Quantization, x: Array, amax: Array | None) -> str | None:
    """Return the reason why no tile divides x, or None."""
    if x.ndim < 2:
        return f'x{list(x.shape)} has no tiles; use backend="xla"'
    scaling = options.scaling
    tiling = Tiling.of_blocks(scaling.size) if isinstance(scaling, Block) else Tiling()
    return tiling.misfit("x", x.size // max(1, x.shape[-1]), x.shape[-1])


def quantize(
    engine: Engine,
    options: Quantization,
    x: Array,
    amax: Array | None,
) -> Quantized:
    """Return the quantized tensor, see `api.quantize`."""
    scaling = options.scaling
    if isinstance(scaling, Block):
        return _in_blocks(options, scaling, x, engine)
    scale, inverse = scaling.find(x, options.dtype, amax)
    rows, *columns = map_tiles(
        Scaled(options.dtype),
        [x],
        [Output(options.dtype, transposed=options.orientation == "both")],
        name="quantize",
        engine=engine,
        scalars=[inverse],
        tiling=WIDE,
    )
    of_rows = Operand(rows, scale, scaling=scaling)
    if not columns:
        return Quantized(of_rows)
    return Quantized(of_rows, Operand(columns[0], scale, scaling=scaling))


TRITON = Implementation(
    "triton", partial(quantize, triton_passes.TRITON), _reject, timed=True
)


def _define_blocks(options: Quantization, x: Array, amax: Array | None) -> Quantized:
    """Return the definition of a tensor in blocks.

    JAX does not cut explicit axes into blocks, so there each device computes the
    definition of its part.
    """
    scaling = options.scaling
    if isinstance(scaling, Block) and has_explicit_axes():
        return _in_blocks(options, scaling, x, None)
    return reference.quantize(options, x, amax)


XLA_BLOCKS = Implementation("xla", _define_blocks)


@dataclass(frozen=True)
class Scaled(Body):
    """Values of x in FP8 under inverse scales that are known.

    There is a result for each inverse scale.
    """

    dtype: DTypeLike

    def values(self, do: Portable, operands: Operands, maxima: Arrays) -> Arrays:
        """Return the values of a tile, see `Body`."""
        x, *inverses = operands
        wide = x.astype(jnp.float32)
        results = []
        for inverse in inverses:
            scaled = do.scaled(wide, inverse, self.dtype)
            results.append(numerics.saturating_cast(scaled, self.dtype))
        return tuple(results)


@dataclass(frozen=True)
class _Blocks(Body):
    """Values of x in FP8 and the E8M0 codes of its blocks.

    Blocks are squares, or rows and, for both orientations, columns. Values and scales
    of a tile, which is a block, stay in registers.
    """

    options: Quantization
    squares: bool

    @property
    def axes(self) -> tuple[Axis, ...]:
        if self.squares:
            return (None,)
        return (1, 0) if self.options.orientation == "both" else (1,)

    def measured(self, operands: Operands) -> Array:
        (x,) = operands
        return x.astype(jnp.float32)

    def values(self, do: Portable, operands: Operands, maxima: Arrays) -> Arrays:
        dtype = self.options.dtype
        wide = self.measured(operands)
        results = []
        for amax in maxima:
            scales, inverses = numerics.scale_and_inverse(amax, dtype, "pow2")
            # Nothing to clip: the scale of a block covers its largest value, and is NaN
            # if that is not finite.
            results.append(do.scaled(wide, inverses, dtype).astype(dtype))
            results.append(numerics.e8m0_code(scales))
        return tuple(results)

    def whole(self, operands: Operands) -> Arrays:
        (x,) = operands
        rows, columns, _ = reference.quantize(self.options, x, None)
        results = (rows.values, lax.bitcast_convert_type(rows.scale, jnp.uint8))
        if self.squares or columns is None:
            return results
        codes = lax.bitcast_convert_type(columns.scale, jnp.uint8)
        return (*results, columns.values.T, codes)


def _in_blocks(
    options: Quantization,
    block: Block,
    x: Array,
    engine: Engine | None,
) -> Quantized:
    """Return the quantized tensor from tiles that are blocks."""
    dtype = options.dtype
    both = options.orientation == "both"
    squares = block.tile == "square"
    outputs = [
        Output(dtype, transposed=both and squares),
        Output(jnp.uint8, form="one" if squares else "rows"),
    ]
    if both and not squares:
        outputs.append(Output(dtype, form="transposed"))
        outputs.append(Output(jnp.uint8, form="columns"))
    results = map_tiles(
        _Blocks(options, squares),
        [x],
        outputs,
        name="block_quantize",
        engine=engine,
        # Few warps, because each thread finds the scales of all rows and columns that
        # it touches. Measured on an H200, both orientations of vectors of 128 and 64:
        # 2.7 TB/s; with 16 values a thread 1.1 and 1.5.
        tiling=Tiling.of_blocks(block.size, block.size),
    )
    values = [x for x in results if x.dtype != jnp.uint8]
    codes = [x for x in results if x.dtype == jnp.uint8]
    scales = [lax.bitcast_convert_type(x, SCALE_DTYPE) for x in codes]
    rows = Operand(values[0], scales[0], scaling=block)
    if not both:
        return Quantized(rows)
    # Squares have no scales of columns, but those of the rows serve them.
    of_columns = scales[0].T if squares else scales[1]
    return Quantized(rows, Operand(values[1], of_columns, scaling=block))
