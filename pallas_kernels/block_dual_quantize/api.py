"""`block_dual_quantize`: a weight as the sum of two FP8 tensors with one E8M0 scale for every block."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import numerics
from pallas_kernels.block_dual_quantize import reference, triton
from pallas_kernels.blocks import Tile, check_block, reject_explicit
from pallas_kernels.dispatch import Backend, Implementation, dispatch
from pallas_kernels.dual_quantize.api import check_error_and_bits
from pallas_kernels.quantize.api import Orientation, check_orientation, check_real

IMPLEMENTATIONS = (
    Implementation("triton", triton.block_dual_quantize, triton.reject, triton.decline),
    Implementation("xla", reference.block_dual_quantize, reject_explicit),
)


class BlockDualQuantized(NamedTuple):
    """W ~ hi * scales + lo * residual_scales, block by block; `error` is what was left over, if an error came in.

    Transposed copies are `[n, k]`; the scales of their squares are those of `w`, transposed.
    """

    hi: jax.Array
    lo: jax.Array
    scales: jax.Array
    residual_scales: jax.Array
    error: jax.Array | None
    hi_transposed: jax.Array | None
    lo_transposed: jax.Array | None


def block_dual_quantize(
    w: jax.Array,
    *,
    block: int,
    tile: Tile = "square",
    dtype: DTypeLike = jnp.float8_e4m3fn,
    error: jax.Array | None = None,
    bits: jax.Array | None = None,
    orientation: Orientation = "rows",
    backend: Backend | None = None,
) -> BlockDualQuantized:
    """Split `w + error` into two FP8 tensors that share one power-of-two scale a block, and say what is left.

    `hi = round((w + e) / s)`, `lo = round((w + e) / s - hi)`, `new error = (w + e) - (hi + lo) * s`. The scale of a
    block whose `lo` is all zeros is E8M0's code 0 in `residual_scales`, by which a product may skip it; all others are
    those of `hi`.

    Args:
      w: real floats `[..., k]`, or `[k, n]` for squares; arithmetic is float32.
      block, tile: as in `block_quantize`; squares also make `hi`, `lo` and the scales of `w.T`, transposed.
      dtype: the format of both halves.
      error: the error that earlier roundings left, shape of `w`, in units of `w`.
      bits: uint32 random bits, shape of `w`: `lo` is rounded stochastically, so `E[(hi + lo) * s] = w + e`.
      orientation: "both" also returns `hi` and `lo` as `[n, k]`, of squares only.

    Returns:
      `BlockDualQuantized`; `error` in the dtype of the one that came in, or None. A NaN or inf makes its block NaN.

    Raises:
      TypeError: `w` or `error` is not real floating point, `bits` is not uint32, `dtype` is not FP8.
      ValueError: shapes differ, `block` is not 32, 64 or 128, squares of what is no matrix, an unknown `tile`.

    >>> q = block_dual_quantize(jnp.full((32, 64), 0.5).at[0, 40].set(0.3), block=32)
    >>> q.residual_scales.astype(jnp.float32)[0, 0] < q.residual_scales.astype(jnp.float32)[0, 1]
    Array(True, dtype=bool)
    """
    check_real("w", w)
    check_block(block, tile)
    if w.ndim == 0 or (tile == "square" and w.ndim != 2):
        raise ValueError(f"w{list(w.shape)} has no {tile} blocks; vectors need an axis, squares a matrix")
    check_error_and_bits(w, error, bits)
    check_orientation(orientation)
    if orientation == "both" and tile == "vector":
        raise ValueError('orientation="both" with tile="vector": w.T has other vectors; quantize it, or use squares')
    options = dict(
        dtype=numerics.float8_dtype(dtype), block=block, tile=tile, error=error, bits=bits, orientation=orientation
    )
    return BlockDualQuantized(*dispatch("block_dual_quantize", IMPLEMENTATIONS, backend, w, **options))
