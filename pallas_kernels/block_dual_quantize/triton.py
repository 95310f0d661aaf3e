"""`block_dual_quantize` as one Pallas-Triton pass over square blocks: W (and error, and random bits) read once.

As in `dual_quantize/triton.py`, a float8 cast and back is what it says inside a kernel.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import numerics, tuning
from pallas_kernels.block_dual_quantize import reference
from pallas_kernels.block_quantize.triton import misfit
from pallas_kernels.blocks import SCALE_DTYPE, ZERO_BLOCK, Tile, find_scales
from pallas_kernels.dual_quantize.reference import target
from pallas_kernels.tiled import Output, map_tiles


def reject(w: jax.Array, *, block: int, tile: Tile, **options: Any) -> str | None:
    """Why this kernel cannot split w, or None."""
    if tile != "square":
        return f'{tile} blocks of w{list(w.shape)}: only squares of a matrix; use backend="xla"'
    k, n = w.shape
    return misfit("w", k, n, block)


def decline(
    w: jax.Array, *, block: int, tile: Tile, error: Any, bits: Any, orientation: str, **options: Any
) -> str | None:
    """Why this kernel is not the first choice, or None."""
    rounding = "nearest" if bits is None else "stochastic"
    feedback = "no error" if error is None else f"error {error.dtype}"
    variant = f"{orientation} {block} {rounding} {feedback}"
    return tuning.decline("block_dual_quantize", "triton", variant, w.shape)


def _tile_amax(x: jax.Array) -> jax.Array:
    return numerics.amax_by_bits(numerics.amax_by_bits(x, 1, keepdims=True), 0, keepdims=True)


def block_dual_quantize(
    w: jax.Array,
    *,
    dtype: Any,
    block: int,
    tile: Tile,
    error: jax.Array | None,
    bits: jax.Array | None,
    orientation: str,
) -> tuple[jax.Array | None, ...]:
    """(hi, lo, scales, residual scales, new error, hi transposed, lo transposed); see `api.block_dual_quantize`."""
    has_error, has_bits, both = error is not None, bits is not None, orientation == "both"

    def body(*tiles: jax.Array) -> tuple[jax.Array, ...]:
        wanted = target(tiles[0], tiles[1] if has_error else None)
        scale, inverse = find_scales(_tile_amax(wanted), dtype)
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

    def whole(*operands: jax.Array) -> tuple[jax.Array, ...]:
        parts: Any = reference.block_dual_quantize(
            operands[0], dtype=dtype, block=block, tile=tile, error=operands[1] if has_error else None,
            bits=operands[-1] if has_bits else None, orientation="rows",
        )  # fmt: skip
        hi, lo, *scales, left = parts[:5]
        codes = [lax.bitcast_convert_type(s, jnp.uint8) for s in scales]
        return (hi, lo, *codes, left) if has_error else (hi, lo, *codes)

    outputs = [Output(dtype, both), Output(dtype, both), Output(jnp.uint8, form="one"), Output(jnp.uint8, form="one")]
    if error is not None:
        outputs.append(Output(error.dtype, replaces=1))
    inputs = [operand for operand in (w, error, bits) if operand is not None]
    # Measured on an H200: without an error squares of 128 run at 3.1 TB/s with 128 values a thread, where 32 give 2.8;
    # with one they are out of registers then, 1.9, and 64 give 2.6.
    values = (64 if has_error or has_bits else 128) if block == 128 else 32
    tiles = functools.partial(map_tiles, name="block_dual_quantize", side=block, values_per_thread=values)
    results = iter(tiles(body, inputs, [], outputs, reference=whole))
    hi, hi_transposed = next(results), next(results) if both else None
    lo, lo_transposed = next(results), next(results) if both else None
    scales, residual_scales = (lax.bitcast_convert_type(next(results), SCALE_DTYPE) for _ in range(2))
    left = next(results) if has_error else None
    return hi, lo, scales, residual_scales, left, hi_transposed, lo_transposed
