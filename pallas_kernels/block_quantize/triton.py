"""`block_quantize` as one Pallas-Triton pass: each tile is a block, whose values and scales never leave registers."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import numerics, tuning
from pallas_kernels.block_quantize import reference
from pallas_kernels.blocks import SCALE_DTYPE, Tile, find_scales
from pallas_kernels.tiled import Output, fit_tile, map_tiles


def reject(x: jax.Array, *, block: int, **options: Any) -> str | None:
    """Why this kernel cannot quantize x, or None."""
    if x.ndim < 2:
        return f'x{list(x.shape)} has no tiles; use backend="xla"'
    return misfit("x", x.size // max(1, x.shape[-1]), x.shape[-1], block)


def misfit(name: str, m: int, k: int, block: int) -> str | None:
    """Why `[m, k]` is not made of whole blocks, or None; also where kernels are not partitioned."""
    if fit_tile(m, k, sides=(block,)) is None:
        return f'{name}[{m}, {k}]: both sizes must be multiples of block={block}; use backend="xla" or pad'
    if jax.sharding.AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
        return 'the mesh has explicit axes, under which kernels are not partitioned; use backend="xla"'
    return None


def decline(x: jax.Array, *, block: int, tile: Tile, orientation: str, **options: Any) -> str | None:
    """Why this kernel is not the first choice, or None."""
    variant = f"{orientation} {tile} {block} {x.dtype}"
    return tuning.decline("block_quantize", "triton", variant, (x.size // x.shape[-1], x.shape[-1]))


def block_quantize(
    x: jax.Array, *, dtype: Any, block: int, tile: Tile, orientation: str
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """(values, scales, transposed values or None, their scales or None); see `api.block_quantize`."""
    *leading, k = x.shape
    both = orientation == "both"

    def scaled(x: jax.Array, amax: jax.Array) -> tuple[jax.Array, jax.Array]:
        scales, inverses = find_scales(amax, dtype)
        # Nothing to clip: the scale of a block covers its largest value, and is NaN where that is not finite.
        return (x * inverses).astype(dtype), numerics.e8m0_code(scales)

    def body(x: jax.Array) -> tuple[jax.Array, ...]:
        wide = numerics.flush_subnormal(x.astype(jnp.float32))
        of_rows = numerics.amax_by_bits(wide, 1, keepdims=True)
        if tile == "square":
            return scaled(wide, numerics.amax_by_bits(of_rows, 0, keepdims=True))
        along_k = scaled(wide, of_rows)
        return (*along_k, *scaled(wide, numerics.amax_by_bits(wide, 0, keepdims=True))) if both else along_k

    def whole(x: jax.Array) -> tuple[jax.Array, ...]:
        parts = reference.block_quantize(x, dtype=dtype, block=block, tile=tile, orientation=orientation)
        values, scales, turned, turned_scales = parts
        codes = lax.bitcast_convert_type(scales, jnp.uint8)
        if tile == "square" or turned is None or turned_scales is None:
            return values, codes
        return values, codes, turned.T, lax.bitcast_convert_type(turned_scales, jnp.uint8)

    outputs = [Output(dtype, transposed=both), Output(jnp.uint8, form="one")]
    if tile == "vector":
        outputs = [Output(dtype), Output(jnp.uint8, form="rows")]
        if both:
            outputs += [Output(dtype, form="transposed"), Output(jnp.uint8, form="columns")]
    # Few warps: every thread finds the scales of the rows and columns it touches anew. Measured on an H200, both
    # orientations of vectors of 128 and 64: 2.7 TB/s, where 16 values a thread give 1.1 and 1.5.
    results = map_tiles(
        body, [x.reshape(-1, k)], [], outputs, name="block_quantize", reference=whole, side=block,
        values_per_thread=block,
    )  # fmt: skip
    codes = [lax.bitcast_convert_type(r, SCALE_DTYPE) for r in results if r.dtype == jnp.uint8]
    values, *others = (r for r in results if r.dtype != jnp.uint8)
    scales = codes[0].reshape(*x.shape[:-1], -1) if tile == "vector" else codes[0]
    if not both:
        return values.reshape(x.shape), scales, None, None
    turned_scales = codes[1] if tile == "vector" else scales.T
    return values.reshape(x.shape), scales, others[0].reshape(k, *leading), turned_scales
