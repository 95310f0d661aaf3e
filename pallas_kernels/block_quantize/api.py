"""`block_quantize`: a tensor as FP8 values and one E8M0 scale for every block of 32, 64 or 128."""

from typing import NamedTuple

import jax
from jax.typing import DTypeLike

from pallas_kernels import numerics
from pallas_kernels.block_quantize import reference, triton
from pallas_kernels.blocks import Tile, check_block, reject_explicit
from pallas_kernels.dispatch import Backend, Implementation, dispatch
from pallas_kernels.quantize.api import Orientation, check_orientation, check_real

IMPLEMENTATIONS = (
    Implementation("triton", triton.block_quantize, triton.reject, triton.decline),
    Implementation("xla", reference.block_quantize, reject_explicit),
)


class BlockQuantized(NamedTuple):
    """x ~ values * scales, block by block; `transposed`, if asked for, is x with its last axis first.

    For vectors `transposed` is quantized along its own last axes (all axes of x but the last, flattened).
    """

    values: jax.Array
    scales: jax.Array
    transposed: jax.Array | None
    transposed_scales: jax.Array | None


def block_quantize(
    x: jax.Array,
    dtype: DTypeLike,
    *,
    block: int,
    tile: Tile = "vector",
    orientation: Orientation = "rows",
    backend: Backend | None = None,
) -> BlockQuantized:
    """Round `x / scale` to an FP8 format, with the smallest power of two as the scale of each block that holds it.

    `values = saturate(round(x / s))`, `s = smallest power of two with max |block| / s <= largest(dtype)`.

    Args:
      x: real floats, `[..., k]`, or a matrix `[m, k]` for squares; arithmetic is float32.
      dtype: `float8_e4m3fn` or `float8_e5m2`.
      block: 32, 64 or 128; the last block of an axis may be short.
      tile: "vector", b values along k, or "square", b x b.
      orientation: "both" also returns what a product over the other axes reads: for vectors a second quantization,
        along those axes; for squares the transpose, whose values are the same.

    Returns:
      `BlockQuantized`; scales are `float8_e8m0fnu`, `[..., ceil(k / b)]` or `[ceil(m / b), ceil(k / b)]`. A block of
      zeros has scale 1; a NaN or inf makes its block NaN, and no other.

    Raises:
      TypeError: `x` is not real floating point, or `dtype` is not FP8.
      ValueError: `block` is not 32, 64 or 128, squares of what is no matrix, an unknown `tile` or `orientation`.

    >>> import jax.numpy as jnp
    >>> q = block_quantize(jnp.array([[1.0] * 32 + [1000.0] * 32]), jnp.float8_e4m3fn, block=32)
    >>> [float(s) for s in q.scales[0].astype(jnp.float32)]
    [0.00390625, 4.0]
    """
    check_real("x", x)
    check_block(block, tile)
    check_orientation(orientation)
    if x.ndim == 0 or (tile == "square" and x.ndim != 2):
        raise ValueError(f"x{list(x.shape)} has no {tile} blocks; vectors need an axis, squares a matrix")
    options = dict(dtype=numerics.float8_dtype(dtype), block=block, tile=tile, orientation=orientation)
    return BlockQuantized(*dispatch("block_quantize", IMPLEMENTATIONS, backend, x, **options))
