"""`quantize`: a tensor as FP8 values with their scales, for products over either side from one pass."""

import jax
from jax.typing import DTypeLike

from pallas_kernels.dispatch import Backend, Implementation, dispatch
from pallas_kernels.operands import (
    Block,
    Orientation,
    Quantization,
    Quantized,
    Row,
    Scaling,
    Tensor,
    check_quantizer,
)
from pallas_kernels.quantize import reference, triton, triton_rows

_XLA = Implementation("xla", reference.quantize, key=reference.key)
_TILES = Implementation("triton", triton.quantize, triton.reject, timed=True)
IMPLEMENTATIONS = {
    Tensor: (_TILES, _XLA),
    Row: (Implementation("triton", triton_rows.quantize, triton_rows.reject, timed=True), _XLA),
    Block: (_TILES, Implementation("xla", triton.by_reference, key=reference.key)),
}


def quantize(
    x: jax.Array,
    dtype: DTypeLike,
    scaling: Scaling = Tensor(),
    *,
    amax: jax.Array | None = None,
    orientation: Orientation = "rows",
    backend: Backend | None = None,
) -> Quantized:
    """Round `x / scale` to an FP8 format, with a scale for all of x, for every row, or for every block.

    `values = saturate(round(x / s))`. Here amax is the largest magnitude among the values that share s, and s is the
    smallest power of two with `amax / s <= largest(dtype)`, or `max(amax, 1e-12) / largest(dtype)` with
    `scale="float32"` in the scaling.

    Args:
      x: real floats `[..., k]`, or a matrix `[m, k]` for squares; arithmetic is float32.
      dtype: `float8_e4m3fn` or `float8_e5m2`.
      amax: float32 scalar to scale a whole tensor by instead of `max |x|`; values beyond it saturate.
      scaling: `Tensor()`, `Row()` or `Block(size, tile)`.
      orientation: "both" also returns x with its last axis first, which FP8 products over the other axes need (Hopper's
        FP8 tensor cores read both operands along the contraction). With rows and vectors this is a second
        quantization, along the other axes; with one scale or squares the values are the same.
      backend: None for the fastest one, or a name.

    Returns:
      `Quantized(rows, columns)`. A NaN or inf makes every value that shares its scale NaN, and no other.

    Raises:
      TypeError: `x` is not real floating point, or `dtype` is not FP8.
      ValueError: x has no such rows or blocks, `amax` without one scale, or an unknown `orientation` or `backend`.
      NotImplementedError: the named backend cannot run it; the message says why.

    >>> import jax.numpy as jnp
    >>> q = quantize(jnp.array([1.0, -3.0]), jnp.float8_e4m3fn).rows
    >>> [float(v) for v in q.values], float(q.scale)
    ([128.0, -384.0], 0.0078125)
    """
    options = check_quantizer("x", x, Quantization(dtype, scaling, orientation), amax)
    return dispatch("quantize", IMPLEMENTATIONS[type(scaling)], backend, options, x, amax)
