"""`dual_quantize`: a tensor as the sum of two FP8 tensors that share their scales, `W ~ (hi + lo) * scale`."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.checks import check_error_and_bits, check_quantizer
from pallas_kernels.dispatch import Backend, Implementation, dispatch
from pallas_kernels.dual_quantize import reference, triton, triton_blocks
from pallas_kernels.operands import Block, Orientation, Quantized, Row, Scaling, Tensor

IMPLEMENTATIONS = {
    Tensor: (
        Implementation("triton", triton.dual_quantize, triton.reject, timed=True),
        Implementation("xla", reference.dual_quantize, key=reference.key),
    ),
    Block: (
        Implementation("triton", triton_blocks.dual_quantize, triton_blocks.reject, timed=True),
        Implementation("xla", triton_blocks.by_reference, key=reference.key),
    ),
}


def dual_quantize(
    w: jax.Array,
    scaling: Scaling = Tensor(),
    *,
    dtype: DTypeLike = jnp.float8_e4m3fn,
    error: jax.Array | None = None,
    bits: jax.Array | None = None,
    amax: jax.Array | None = None,
    orientation: Orientation = "rows",
    backend: Backend | None = None,
) -> Quantized:
    """Split `w + error` into two FP8 tensors that share power-of-two scales, and say what is left.

    `hi = round((w + e) / s)`, `lo = round((w + e) / s - hi)`, `new error = (w + e) - (hi + lo) * s`.
    After scaling, the residual is at most half of the widest spacing (16 for E4M3), so it needs no scale of its own and
    both products add in one accumulator. What a stale `amax` clips in `hi` is caught by `lo`. A block whose `lo` is all
    zeros has E8M0's code 0 in `lo_scale`, by which a product may skip it.

    Args:
      w: real floats `[..., k]`, or a matrix for squares; arithmetic is float32.
      scaling: `Tensor()` or `Block(size, tile)`.
      dtype: the format of both halves.
      error: the error that earlier roundings left, shape of `w`, in units of `w`.
      bits: uint32 random bits, shape of `w`: `lo` is rounded stochastically, so `E[(hi + lo) * s] = w + e`.
      amax: float32 scalar to scale a whole tensor by instead of `max |w + e|`.
      orientation: "both" also returns the transpose of a matrix as `columns`.

    Returns:
      `Quantized(rows, columns, error)`; `error` in the dtype of the one that came in, or None. A NaN or inf makes NaN
      what shares a scale with it.

    Raises:
      TypeError: `w` or `error` is not real floating point, `bits` is not uint32, `dtype` is not FP8.
      ValueError: shapes differ, w has no such blocks, scales that are not powers of two, rows (which have no residual),
        `amax` without one scale, columns of vectors, or an unknown `orientation` or `backend`.
      NotImplementedError: the named backend cannot run it; the message says why.

    >>> q = dual_quantize(jnp.array([[1.0, 0.3]]), error=jnp.zeros((1, 2)))
    >>> q.rows.dequantize()[0].tolist()
    [1.0, 0.2998046875]
    """
    options = check_quantizer("w", w, dtype, scaling, amax, orientation)
    _check_scaling(scaling, orientation)
    check_error_and_bits(w, error, bits)
    return dispatch("dual_quantize", IMPLEMENTATIONS[type(scaling)], backend, options, w, error, bits, amax)


def _check_scaling(scaling: Scaling, orientation: str) -> None:
    if isinstance(scaling, Row):
        raise ValueError(f"scaling={scaling}: a residual needs scales that both orientations share; use Tensor()")
    if scaling.scale != "pow2":
        raise ValueError(f'scaling={scaling}: a residual is exact only under a power-of-two scale; use scale="pow2"')
    if orientation == "both" and not scaling.serves_both:
        raise ValueError(f'orientation="both" with {scaling}: w.T has other vectors; quantize it, or use squares')
