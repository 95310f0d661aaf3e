"""Blocks of a residual that products leave out because they are small."""

from dataclasses import replace

import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from pallas_kernels.explicit import with_automatic_axes
from pallas_kernels.operands import ZERO_BLOCK, Block, Operand
from pallas_kernels.specs import entries_of

# E8M0 codes of 1 and 2.
_ONE, _TWO = 127, 128


def without_small_blocks(w: Operand, threshold: float) -> Operand:
    """Return a weight in blocks without the blocks of `lo` up to a threshold.

    A block is dropped if its largest |lo| * scale is at most the threshold: its values
    are zero then, and its code in `lo_scale` is 0, so that `skip_matmul` skips it.

    Use this just before a product. The stored weight, and so the error that
    `error_feedback` keeps, has all blocks.

    >>> from pallas_kernels.quantize.api import dual_quantize
    >>> w = dual_quantize(jnp.full((32, 64), 0.3), Block(32)).rows
    >>> [float(skipped_share(without_small_blocks(w, t))) for t in (0.0, 1.0)]
    [0.0, 1.0]
    """
    scaling = w.scaling
    lo_scale = w.lo_scale
    if not threshold or not isinstance(scaling, Block) or lo_scale is None:
        return w
    specs = {}
    for array in (w.residual, lo_scale):
        specs[array.shape] = PartitionSpec(*entries_of(array))

    def kept(lo: Array, scale: Array, lo_scale: Array) -> tuple[Array, Array]:
        magnitudes = lo.astype(jnp.float32) * scaling.spread(scale, lo.shape)
        is_small = scaling.amax(magnitudes) <= threshold  # a NaN is kept
        codes = lax.bitcast_convert_type(lo_scale, jnp.uint8)
        codes = jnp.where(is_small, jnp.uint8(ZERO_BLOCK), codes)
        marks = jnp.where(is_small, jnp.uint8(_ONE), jnp.uint8(_TWO))
        marks = lax.bitcast_convert_type(marks, lo_scale.dtype)
        is_kept = scaling.spread(marks, lo.shape) == 2
        lo = jnp.where(is_kept, lo, jnp.zeros((), lo.dtype))
        return lo, lax.bitcast_convert_type(codes, lo_scale.dtype)

    lo, lo_scale = with_automatic_axes(
        kept, lambda leaf: specs[leaf.shape], w.residual, w.scale, lo_scale
    )
    return replace(w, lo=lo, lo_scale=lo_scale)


def skipped_share(w: Operand) -> Array:
    """Return the share of the blocks of `lo` that `skip_matmul` skips.

    Use this to see if skipping can pay; `tcfp_jax.conversion.diagnose` shows it.

    Raises:
      ValueError: the weight has no residual in blocks.
    """
    if w.lo_scale is None:
        raise ValueError(
            f"a weight with the scaling {w.scaling} has no residual in blocks; make it"
            " by dual_quantize(w, Block(128))"
        )
    codes = lax.bitcast_convert_type(w.lo_scale, jnp.uint8)
    return jnp.mean((codes == ZERO_BLOCK).astype(jnp.float32))
