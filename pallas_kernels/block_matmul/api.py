"""`block_matmul`: the product of block-scaled FP8 tensors, one or two of them for the weight."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.block_matmul import cudnn, mosaic, reference, triton
from pallas_kernels.blocks import SCALE_DTYPE, Blocked, ResidualBlocks, Tile, check_block, reject_explicit, scales_shape
from pallas_kernels.dispatch import Backend, Implementation, dispatch
from pallas_kernels.matmul.api import check_operands
from pallas_kernels.matmul.triton import decline as decline_triton

IMPLEMENTATIONS = (
    Implementation("mosaic", mosaic.block_matmul, mosaic.reject, mosaic.decline, mosaic.configure),
    Implementation("triton", triton.block_matmul, triton.reject, decline_triton),
    Implementation("cudnn", cudnn.block_matmul, cudnn.reject),
    Implementation("xla", reference.block_matmul, reject_explicit),
)


def block_matmul(
    x: Blocked,
    w: Blocked,
    w_lo: Blocked | None = None,
    *,
    block: int,
    tile: Tile = "square",
    residual_blocks: ResidualBlocks = "all",
    out_dtype: DTypeLike = jnp.bfloat16,
    backend: Backend | None = None,
) -> jax.Array:
    """`(x s_x) @ (w s_w + w_lo s_lo).T`, both operands contracted along their last axes, scales along them, too.

    `out[..., n] = sum_k x[..., k] s_x[..., k / b] * (w[n, k] s_w[n', k / b] + w_lo[n, k] s_lo[n', k / b])`, where n' is
    n for vectors and n / b for squares.

    Args:
      x: FP8 `[..., k]`, with a scale for every vector of `block` values along k.
      w, w_lo: FP8 `[n, k]`, one format; `tile` is the form of their blocks. The scales of `w_lo` are those of `w` but
        for blocks that are zero (see `block_dual_quantize`).
      block: 32, 64 or 128.
      residual_blocks: of `w_lo`, those that are multiplied. "nonzero" leaves out blocks whose scale is E8M0's code 0,
        which is how `block_dual_quantize` marks a residual of zeros: the result is that of "all" but for the order of
        sums, and a kernel neither loads nor multiplies a k-block where all of an n-tile's are zero.
      out_dtype: a real float; sums are float32.

    Returns:
      `[..., n]` in `out_dtype`.

    Raises:
      TypeError: an operand is not FP8, scales are not E8M0, or the two halves of the weight differ in format.
      ValueError: contracted sizes differ, scales do not have one value a block, `block`, `tile`, `residual_blocks` or
        `backend` is unknown, or "nonzero" blocks of no `w_lo`.
      NotImplementedError: E5M2 x E5M2, which no tensor core multiplies; or what the named backend cannot run.

    >>> one, scale = jnp.ones((32, 64), jnp.float8_e4m3fn), jnp.full((1, 2), 0.5, jnp.float8_e8m0fnu)
    >>> x = Blocked(one, jnp.ones((32, 2), jnp.float8_e8m0fnu))
    >>> float(block_matmul(x, Blocked(one, scale), block=32)[0, 0])
    32.0
    """
    check_block(block, tile)
    if residual_blocks not in ("all", "nonzero"):
        raise ValueError(f'residual_blocks={residual_blocks!r} is unknown; use "all" or "nonzero"')
    if residual_blocks == "nonzero" and w_lo is None:
        raise ValueError('residual_blocks="nonzero" chooses among the blocks of w_lo; pass w_lo, or use "all"')
    check_operands(x.values, w.values, None if w_lo is None else w_lo.values)
    _check_scales("x", x, block, "vector")
    _check_scales("w", w, block, tile)
    if w_lo is not None:
        _check_scales("w_lo", w_lo, block, tile)
    options = dict(block=block, tile=tile, residual_blocks=residual_blocks, out_dtype=jnp.dtype(out_dtype))
    return dispatch("block_matmul", IMPLEMENTATIONS, backend, x, w, w_lo, **options)


def _check_scales(name: str, blocked: Blocked, block: int, tile: Tile) -> None:
    values, scales = blocked
    if scales.dtype != SCALE_DTYPE:
        raise TypeError(f"the scales of {name} have dtype {scales.dtype}, not float8_e8m0fnu; use block_quantize")
    expected = scales_shape(values.shape, block, tile)
    if scales.shape != expected:
        raise ValueError(
            f"{name}{list(values.shape)} in {tile} blocks of {block} has scales {list(expected)}, but these are "
            f"{list(scales.shape)}; quantize it with this block and tile"
        )
