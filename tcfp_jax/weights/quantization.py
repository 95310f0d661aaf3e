"""`quantize` and `split`: arrays as FP8 operands. The arithmetic is that of
`pallas_kernels`, with defaults.
"""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from pallas_kernels.operands import Block, Operand, Scale, Scaling, Tensor, Tile
from pallas_kernels.quantize.api import dual_quantize
from pallas_kernels.quantize.api import quantize as quantize_values


def quantize(
    x: ArrayLike,
    dtype: DTypeLike = jnp.float8_e4m3fn,
    *,
    scale: Scale = "pow2",
    block: int | None = None,
    axis: int = -1,
    tile: Tile = "vector",
) -> Operand:
    """Return `x` as FP8 values with one scale, or one for each block:
    `values = saturate(round(x / scale))`.

    Args:
      x: real floats of any shape; arithmetic is float32.
      dtype: `float8_e4m3fn` (31.5 dB on Gaussian data) or `float8_e5m2` (25.5 dB, wider
        range).
      scale: "pow2", the smallest power of two that fits max |x|, or "float32", max |x|
        / largest.
      block: 32, 64 or 128 values share an E8M0 scale; None: all of x shares one.
      axis: the axis along which vectors of a block run. It is the last of the result,
        `moveaxis(x, axis, -1)`.
      tile: "vector", or "square" blocks of a matrix, which are the same for its
        transpose.

    Returns:
      An `Operand` with `values`, `scale` and `dequantize()`.

    Raises:
      TypeError: `x` is not real floating point, or `dtype` is not FP8.
      ValueError: `scale`, `block` or `tile` is unknown, `axis` is out of range; or
        blocks with `scale="float32"`, or `axis` or `tile` without blocks.

    >>> quantize(jnp.array([1.0, -3.0])).dequantize().tolist()
    [1.0, -3.0]
    >>> quantize(jnp.ones((4, 100)), block=32).scale.shape
    (4, 4)
    """
    x = jnp.asarray(x)
    scaling: Scaling = Tensor(scale)
    if block is None:
        if axis != -1 or tile != "vector":
            raise ValueError(
                f"axis={axis} and tile={tile!r} describe blocks, but block=None; pass"
                " block=32, 64 or 128"
            )
    else:
        if scale != "pow2":
            raise ValueError(
                f"scale={scale!r} with block={block}: the scales of blocks are powers"
                ' of two; use scale="pow2"'
            )
        scaling = Block(block, tile)
        if not -x.ndim <= axis < x.ndim:
            raise ValueError(
                f"axis={axis} is out of range for x{list(x.shape)}; use -{x.ndim} to"
                f" {x.ndim - 1}"
            )
        if tile == "square" and axis != -1:
            raise ValueError(
                f'axis={axis} with tile="square": squares have no direction; leave'
                " axis=-1"
            )
        x = jnp.moveaxis(x, axis, -1)
    return quantize_values(x, dtype, scaling).rows


def split(
    w: ArrayLike,
    *,
    error: ArrayLike | None = None,
    key: jax.Array | None = None,
    amax: ArrayLike | None = None,
    block: int | None = None,
    tile: Tile = "square",
) -> Operand:
    """Return `w + error` as two E4M3 tensors with one scale: `hi = round(w/s)`,
    `lo = round(w/s - hi)`.

    The pair holds Gaussian values with 64 dB, better than BF16's 56 in as many bits.

    Args:
      w: real floats of any shape; arithmetic is float32.
      error: the rounding error of earlier steps, of the shape of `w`.
      key: JAX random key; rounds `lo` stochastically, so that E[hi + lo] s = w + error,
        reproducibly.
      amax: the magnitude to scale by instead of max |w + error|; `lo` catches values
        that clip in `hi`.
      block: 32, 64 or 128 values share an E8M0 scale; None: all of w shares one.
      tile: "square" blocks of a matrix, or "vector" blocks along the last axis.

    Returns:
      An `Operand` with `hi`, `lo`, `scale`, `nbytes` and `dequantize()`.

    Raises:
      TypeError: `w` or `error` is not real floating point.
      ValueError: `error` and `w` differ in shape, `block` or `tile` is unknown, `amax`
        with blocks, or `tile` without.

    >>> w = jnp.array([1.0, 0.3])
    >>> q = split(w)
    >>> (w - q.dequantize()).tolist() == (w - split(w, error=jnp.zeros(2)).dequantize()).tolist()
    True
    """
    w = jnp.asarray(w)
    if block is None and tile != "square":
        raise ValueError(
            f"tile={tile!r} describes blocks, but block=None; pass block=32, 64 or 128"
        )
    bits = None if key is None else jax.random.bits(key, w.shape, jnp.uint32)
    error = None if error is None else jnp.asarray(error)
    amax = None if amax is None else jnp.asarray(amax, jnp.float32)
    scaling: Scaling = Tensor() if block is None else Block(block, tile)
    return dual_quantize(w, scaling, error=error, bits=bits, amax=amax).rows
