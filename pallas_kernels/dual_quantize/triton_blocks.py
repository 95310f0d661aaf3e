"""`dual_quantize` as one Pallas-Triton pass over square blocks: W (and error, and random bits) is read once.

As in `triton.py`, a float8 cast and back is what it says inside a kernel.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import numerics
from pallas_kernels.dual_quantize import reference
from pallas_kernels.operands import SCALE_DTYPE, ZERO_BLOCK, Block, Operand, Quantization, Quantized
from pallas_kernels.specs import has_explicit_axes
from pallas_kernels.tiled import Output, Runs, Written, blocks_of, map_tiles, misfit


def reject(options: Quantization, w: jax.Array, *arrays: jax.Array | None) -> str | None:
    """Why this kernel cannot split w, or None."""
    block = _block(options)
    if block.tile != "square":
        return f'{block.tile} blocks of w{list(w.shape)}: only squares of a matrix; use backend="xla"'
    k, n = w.shape
    return misfit("w", k, n, block.size)


def dual_quantize(
    options: Quantization,
    w: jax.Array,
    error: jax.Array | None,
    bits: jax.Array | None,
    amax: jax.Array | None,
    *,
    runs: Runs = "kernel",
) -> Quantized:
    """See `api.dual_quantize`; where the "reference" runs, each device computes its part by the definition."""
    dtype, block, both = options.dtype, _block(options), options.orientation == "both"
    has_error, has_bits = error is not None, bits is not None

    def body(*tiles: jax.Array) -> tuple[jax.Array, ...]:
        wanted = reference.target(tiles[0], tiles[1] if has_error else None)
        scale, inverse = numerics.scale_and_inverse(_tile_amax(wanted), dtype, "pow2")
        scaled = numerics.flush_subnormal(wanted) * inverse
        # Nothing to clip: the scale of a block covers its largest value, and is NaN where that is not finite.
        hi = scaled.astype(dtype)
        rest = numerics.residual(scaled, hi.astype(jnp.float32))
        if has_bits:
            lo = numerics.stochastic_round_to(rest, dtype, tiles[-1]).astype(dtype)
        else:
            lo = rest.astype(dtype)
        back = lo.astype(jnp.float32)
        code = numerics.e8m0_code(scale)
        # NaN is not zero: the comparison is false, and the block keeps its scale.
        residual_code = jnp.where(_tile_amax(back) == 0, jnp.full_like(code, ZERO_BLOCK), code)
        if not has_error:
            return hi, lo, code, residual_code
        return hi, lo, code, residual_code, (numerics.residual(rest, back) * scale).astype(tiles[1].dtype)

    def whole(*tensors: jax.Array) -> tuple[jax.Array, ...]:
        rows, _, left = reference.dual_quantize(
            Quantization(dtype, block), tensors[0], tensors[1] if has_error else None,
            tensors[-1] if has_bits else None, None,
        )  # fmt: skip
        assert rows.lo is not None and rows.lo_scale is not None
        codes = [lax.bitcast_convert_type(s, jnp.uint8) for s in (rows.scale, rows.lo_scale)]
        return (rows.values, rows.lo, *codes) if left is None else (rows.values, rows.lo, *codes, left)

    of_block: Written = "one" if block.tile == "square" else "rows"
    outputs = [Output(dtype, both), Output(dtype, both), *[Output(jnp.uint8, form=of_block)] * 2]
    if error is not None:
        outputs.append(Output(error.dtype, replaces=1))
    inputs = [operand for operand in (w, error, bits) if operand is not None]
    # Measured on an H200: without an error squares of 128 run at 3.1 TB/s with 128 values a thread, where 32 give 2.8;
    # with one they are out of registers then, 1.9, and 64 give 2.6.
    values = (64 if has_error or has_bits else 128) if block.size == 128 else 32
    tiles = functools.partial(
        map_tiles, name="block_dual_quantize", tiling=dataclasses.replace(blocks_of(block.size, values), runs=runs)
    )
    results = iter(tiles(body, inputs, [], outputs, reference=whole))
    hi, hi_turned = next(results), next(results) if both else None
    lo, lo_turned = next(results), next(results) if both else None
    scale, lo_scale = (lax.bitcast_convert_type(next(results), SCALE_DTYPE) for _ in range(2))
    left = next(results) if has_error else None
    rows = Operand(hi, scale, lo, lo_scale, block)
    if hi_turned is None:
        return Quantized(rows, None, left)
    return Quantized(rows, Operand(hi_turned, scale.T, lo_turned, lo_scale.T, block), left)


def by_reference(
    options: Quantization,
    w: jax.Array,
    error: jax.Array | None,
    bits: jax.Array | None,
    amax: jax.Array | None,
) -> Quantized:
    """The definition, which cuts and merges axes: with explicit ones on each device's part."""
    if has_explicit_axes():
        return dual_quantize(options, w, error, bits, amax, runs="reference")
    return reference.dual_quantize(options, w, error, bits, amax)


def _tile_amax(x: jax.Array) -> jax.Array:
    return numerics.amax_by_bits(numerics.amax_by_bits(x, 1, keepdims=True), 0, keepdims=True)


def _block(options: Quantization) -> Block:
    assert isinstance(options.scaling, Block), "api's table has this kernel for blocks alone"
    return options.scaling
