"""`block_matmul`: the product of block-scaled FP8 tensors, one or two of them for the weight."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.block_matmul import mosaic, reference
from pallas_kernels.blocks import SCALE_DTYPE, Tile, check_block, scales_shape
from pallas_kernels.dispatch import Backend, Implementation, dispatch
from pallas_kernels.matmul.api import check_operands

IMPLEMENTATIONS = (
    Implementation("mosaic", mosaic.block_matmul, mosaic.reject, mosaic.decline, mosaic.configure),
    Implementation("xla", reference.block_matmul),
)


def block_matmul(
    x: jax.Array,
    x_scales: jax.Array,
    w: jax.Array,
    w_scales: jax.Array,
    w_lo: jax.Array | None = None,
    w_lo_scales: jax.Array | None = None,
    *,
    block: int,
    tile: Tile = "square",
    out_dtype: DTypeLike = jnp.bfloat16,
    backend: Backend | None = None,
) -> jax.Array:
    """`(x s_x) @ (w s_w + w_lo s_lo).T`, both operands contracted along their last axes, scales along them, too.

    `out[..., n] = sum_k x[..., k] s_x[..., k / b] * (w[n, k] s_w[n', k / b] + w_lo[n, k] s_lo[n', k / b])`, where n' is
    n for vectors and n / b for squares.

    Args:
      x: FP8 `[..., k]`, with a scale for every vector of `block` values along k.
      w, w_lo: FP8 `[n, k]`, one format; `tile` is the form of their blocks. `w_lo_scales` are those of `w` but for
        blocks that are zero (see `block_dual_quantize`).
      x_scales, w_scales, w_lo_scales: `float8_e8m0fnu`.
      block: 32, 64 or 128.
      out_dtype: a real float; sums are float32.

    Returns:
      `[..., n]` in `out_dtype`.

    Raises:
      TypeError: an operand is not FP8, scales are not E8M0, or the two halves of the weight differ in format.
      ValueError: contracted sizes differ, scales do not have one value a block, or `block`, `tile` or `backend` is
        unknown.
      NotImplementedError: E5M2 x E5M2, which no tensor core multiplies; or what the named backend cannot run.

    >>> one, scale = jnp.ones((32, 64), jnp.float8_e4m3fn), jnp.full((1, 2), 0.5, jnp.float8_e8m0fnu)
    >>> x_scales = jnp.ones((32, 2), jnp.float8_e8m0fnu)
    >>> float(block_matmul(one, x_scales, one, scale, block=32)[0, 0])
    32.0
    """
    check_block(block, tile)
    check_operands(x, w, w_lo)
    _check_scales("x", x, x_scales, block, "vector")
    _check_scales("w", w, w_scales, block, tile)
    if (w_lo is None) != (w_lo_scales is None):
        raise ValueError("w_lo and w_lo_scales go together; pass both or neither")
    if w_lo is not None and w_lo_scales is not None:
        _check_scales("w_lo", w_lo, w_lo_scales, block, tile)
    options = dict(block=block, tile=tile, out_dtype=jnp.dtype(out_dtype))
    operands = (x, x_scales, w, w_scales, w_lo, w_lo_scales)
    return dispatch("block_matmul", IMPLEMENTATIONS, backend, *operands, **options)


def _check_scales(name: str, values: jax.Array, scales: jax.Array, block: int, tile: Tile) -> None:
    if scales.dtype != SCALE_DTYPE:
        raise TypeError(f"{name}_scales has dtype {scales.dtype}, not float8_e8m0fnu; use block_quantize")
    expected = scales_shape(values.shape, block, tile)
    if scales.shape != expected:
        raise ValueError(
            f"{name}{list(values.shape)} in {tile} blocks of {block} has scales {list(expected)}, but {name}_scales "
            f"has {list(scales.shape)}; quantize it with this block and tile"
        )
