"""`quantize` in blocks as one Pallas-Triton pass: each tile is a block, whose values and scales stay in registers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import numerics
from pallas_kernels.operands import SCALE_DTYPE, Block, Operand, Quantization, Quantized
from pallas_kernels.quantize import reference
from pallas_kernels.specs import has_explicit_axes
from pallas_kernels.tiled import Output, Runs, blocks_of, map_tiles, misfit


def reject(options: Quantization, x: jax.Array, amax: jax.Array | None) -> str | None:
    """Why this kernel cannot quantize x, or None."""
    if x.ndim < 2:
        return f'x{list(x.shape)} has no tiles; use backend="xla"'
    return misfit("x", x.size // max(1, x.shape[-1]), x.shape[-1], _block(options).size)


def quantize(options: Quantization, x: jax.Array, amax: jax.Array | None, *, runs: Runs = "kernel") -> Quantized:
    """See `api.quantize`; where the "reference" runs, each device computes its part by the definition."""
    block, both = _block(options), options.orientation == "both"
    squares = block.tile == "square"

    def whole(x: jax.Array) -> tuple[jax.Array, ...]:
        rows, columns, _ = reference.quantize(options, x, None)
        code = lambda operand: lax.bitcast_convert_type(operand.scale, jnp.uint8)
        if squares or columns is None:
            return rows.values, code(rows)
        return rows.values, code(rows), columns.values.T, code(columns)

    # Few warps: every thread finds the scales of the rows and columns it touches anew. Measured on an H200, both
    # orientations of vectors of 128 and 64: 2.7 TB/s, where 16 values a thread give 1.1 and 1.5.
    results = map_tiles(
        functools.partial(of_tile, options), [x], [], outputs_of(options), name="block_quantize",
        reference=whole, tiling=dataclasses.replace(blocks_of(block.size, block.size), runs=runs),
    )  # fmt: skip
    scales = [lax.bitcast_convert_type(r, SCALE_DTYPE) for r in results if r.dtype == jnp.uint8]
    values, *turned = (r for r in results if r.dtype != jnp.uint8)
    rows = Operand(values, scales[0], scaling=block)
    if not both:
        return Quantized(rows)
    of_columns = scales[0].T if squares else scales[1]
    return Quantized(rows, Operand(turned[0], of_columns, scaling=block))


def by_reference(options: Quantization, x: jax.Array, amax: jax.Array | None) -> Quantized:
    """The definition, which cuts and merges axes: with explicit ones on each device's part."""
    if has_explicit_axes():
        return quantize(options, x, amax, runs="reference")
    return reference.quantize(options, x, amax)


def of_tile(options: Quantization, x: jax.Array) -> tuple[jax.Array, ...]:
    """Values and E8M0 codes of a tile that is a block of rows, and of columns where both orientations are asked for."""
    block, both = _block(options), options.orientation == "both"

    def scaled(x: jax.Array, amax: jax.Array) -> tuple[jax.Array, jax.Array]:
        scales, inverses = numerics.scale_and_inverse(amax, options.dtype, "pow2")
        # Nothing to clip: the scale of a block covers its largest value, and is NaN where that is not finite.
        return (x * inverses).astype(options.dtype), numerics.e8m0_code(scales)

    wide = numerics.flush_subnormal(x.astype(jnp.float32))
    of_rows = numerics.amax_by_bits(wide, 1, keepdims=True)
    if block.tile == "square":
        return scaled(wide, numerics.amax_by_bits(of_rows, 0, keepdims=True))
    along_k = scaled(wide, of_rows)
    return (*along_k, *scaled(wide, numerics.amax_by_bits(wide, 0, keepdims=True))) if both else along_k


def outputs_of(options: Quantization) -> list[Output]:
    """What is written of the results of `of_tile`."""
    both = options.orientation == "both"
    if _block(options).tile == "square":
        return [Output(options.dtype, transposed=both), Output(jnp.uint8, form="one")]
    rows = [Output(options.dtype), Output(jnp.uint8, form="rows")]
    return [*rows, Output(options.dtype, form="transposed"), Output(jnp.uint8, form="columns")] if both else rows


def _block(options: Quantization) -> Block:
    assert isinstance(options.scaling, Block), "api's table has this kernel for blocks alone"
    return options.scaling
