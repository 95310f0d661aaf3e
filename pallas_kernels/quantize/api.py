"""`quantize` and `dual_quantize`: a tensor as one or two FP8 tensors with their scales.

Both can return the result for products over either side from one pass over the input.
"""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from pallas_kernels.derivatives import OF_CODES, without_gradient
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
    check_real,
)
from pallas_kernels.quantize import dual_tiles, mosaic, reference, tiles, triton_rows
from pallas_kernels.tuning import Key

if TYPE_CHECKING:  # shapes for readers, editors and tests
    from jaxtyping import Float, UInt32


def _key(options: Quantization, x: Array, amax: Array | None) -> Key | None:
    """Return the name of a quantization in `tuned.json`, or None if x has no rows."""
    if not x.ndim or not x.shape[-1]:
        return None
    shape = x.size // x.shape[-1], x.shape[-1]
    orientation = options.orientation
    scaling = options.scaling
    if isinstance(scaling, Block):
        form = f"{orientation} {scaling.tile} {scaling.size} {x.dtype}"
        return Key("block_quantize", form, shape)
    op = "row_quantize" if isinstance(scaling, Row) else "quantize"
    return Key(op, f"{orientation} {x.dtype}", shape)


def _dual_key(
    options: Quantization,
    w: Array,
    error: Array | None,
    bits: Array | None,
    amax: Array | None,
) -> Key:
    """Return the name of a split in `tuned.json`."""
    rounding = "nearest" if bits is None else "stochastic"
    of_error = "no error" if error is None else f"error {error.dtype}"
    rest = f"{rounding} {of_error}"
    if isinstance(options.scaling, Block):
        form = f"{options.orientation} {options.scaling.size} {rest}"
        return Key("block_dual_quantize", form, w.shape)
    return Key("dual_quantize", f"{options.orientation} {rest}", w.shape)


_XLA = Implementation("xla", reference.quantize, key=_key)
_DUAL = (
    mosaic.DUAL,
    dual_tiles.TRITON,
    Implementation("xla", partial(dual_tiles.dual_quantize, None), key=_dual_key),
)
IMPLEMENTATIONS: dict[type[Scaling], tuple[Implementation, ...]] = {
    Tensor: (mosaic.TILES, tiles.TRITON, _XLA),
    Row: (mosaic.ROWS, triton_rows.TRITON, _XLA),
    Block: (mosaic.TILES, tiles.TRITON, replace(tiles.XLA_BLOCKS, key=_key)),
}
DUAL_IMPLEMENTATIONS: dict[type[Scaling], tuple[Implementation, ...]] = {
    Tensor: _DUAL,
    Block: _DUAL,
}


def quantize(
    x: "Float[jax.Array, '*rows k']",
    dtype: DTypeLike,
    scaling: Scaling = Tensor(),
    *,
    amax: "Float[jax.Array, ''] | None" = None,
    orientation: Orientation = "rows",
    backend: Backend | None = None,
) -> Quantized:
    """Round `x / scale` to an FP8 format, with a scale per tensor, row or block.

    Use this for the operands of FP8 products. Use `dual_quantize` for a weight that
    needs more than three bits of mantissa.

    `values = saturate(round(x / s))`. Here amax is the largest magnitude among the
    values that share s, and s is the smallest power of two with
    `amax / s <= largest(dtype)`, or `max(amax, 1e-12) / largest(dtype)` with
    `scale="float32"` in the scaling.

    Args:
      x: real floats `[..., k]`, or a matrix `[m, k]` for squares; arithmetic is
        float32.
      dtype: `float8_e4m3fn` or `float8_e5m2`.
      amax: float32 scalar to scale a whole tensor by instead of `max |x|`; values
        beyond it saturate.
      scaling: `Tensor()`, `Row()` or `Block(size, tile)`.
      orientation: "both" also returns x with its last axis first, which FP8 products
        over the other axes need (Hopper's FP8 tensor cores read both operands along the
        contraction). With rows and vectors this is a second quantization, along the
        other axes; with one scale or squares the values are the same.
      backend: None for the fastest one, or a name.

    Returns:
      `Quantized(rows, columns)`. A NaN or inf makes every value that shares its scale
        NaN, and no other.

    Raises:
      TypeError: `x` is not real floating point, `dtype` is not FP8, or a gradient is
        asked for.
      ValueError: x has no such rows or blocks, `amax` without one scale, or an unknown
        `orientation` or `backend`.
      NotImplementedError: the named backend cannot run it; the message says why.

    >>> q = quantize(jnp.array([1.0, -3.0]), jnp.float8_e4m3fn).rows
    >>> [float(v) for v in q.values], float(q.scale)
    ([128.0, -384.0], 0.0078125)
    """
    options = check_quantizer("x", x, Quantization(dtype, scaling, orientation), amax)
    table = IMPLEMENTATIONS[type(scaling)]
    operands = (x, amax)
    fixed = lax.stop_gradient(operands)
    made = dispatch("quantize", table, backend, options, *fixed)
    return without_gradient(OF_CODES, made, operands)


def dual_quantize(
    w: "Float[jax.Array, '*n k']",
    scaling: Scaling = Tensor(),
    *,
    dtype: DTypeLike = jnp.float8_e4m3fn,
    error: "Float[jax.Array, '*n k'] | None" = None,
    bits: "UInt32[jax.Array, '*n k'] | None" = None,
    amax: "Float[jax.Array, ''] | None" = None,
    orientation: Orientation = "rows",
    backend: Backend | None = None,
) -> Quantized:
    """Split `w + error` into two FP8 tensors that share power-of-two scales.

    Use this for weights: the pair is more exact than BF16, and a product may read `hi`
    alone. The remaining error is returned for error feedback.

    `hi = round((w + e) / s)`, `lo = round((w + e) / s - hi)`,
    `new error = (w + e) - (hi + lo) * s`. After scaling, the residual is at most half
    of the widest spacing (16 for E4M3), so it needs no scale of its own and both
    products add in one accumulator. If a stale `amax` clips `hi`, `lo` catches the
    rest. A block whose `lo` is all zeros has E8M0's code 0 in `lo_scale`, so that a
    product can skip it.

    Args:
      w: real floats `[..., k]`, or a matrix for squares; arithmetic is float32.
      scaling: `Tensor()` or `Block(size, tile)`.
      dtype: format of both halves.
      error: error of earlier roundings, shape of `w`, in units of `w`.
      bits: uint32 random bits, shape of `w`. With them `lo` is rounded stochastically,
        so `E[(hi + lo) * s] = w + e`.
      amax: float32 scalar to scale a whole tensor by instead of `max |w + e|`.
      orientation: "both" also returns the transpose of a matrix as `columns`.
      backend: None for the fastest one, or a name.

    Returns:
      `Quantized(rows, columns, error)`; `error` has the dtype of the one that came in,
      or is None. A NaN or inf makes every value that shares its scale NaN.

    Raises:
      TypeError: `w` or `error` is not real floating point, `bits` is not uint32,
        `dtype` is not FP8, or a gradient is asked for.
      ValueError: shapes differ, w has no such blocks, scales are not powers of two, the
        scaling is rows (which have no residual) or has several scales for one `amax`,
        columns of vectors, or an unknown `orientation` or `backend`.
      NotImplementedError: the named backend cannot run it; the message says why.

    >>> q = dual_quantize(jnp.array([[1.0, 0.3]]), error=jnp.zeros((1, 2)))
    >>> q.rows.dequantize()[0].tolist()
    [1.0, 0.2998046875]
    """
    options = check_quantizer("w", w, Quantization(dtype, scaling, orientation), amax)
    _check_scaling(scaling, orientation)
    if error is not None:
        check_real("error", error)
    if bits is not None and bits.dtype != jnp.uint32:
        raise TypeError(
            f"bits has dtype {bits.dtype}, not uint32; use jax.random.bits(key,"
            " w.shape)"
        )
    for name, x in (("error", error), ("bits", bits)):
        if x is not None and x.shape != w.shape:
            raise ValueError(
                f"{name} has shape {x.shape}, but w has {w.shape}; they must be equal"
            )
    table = DUAL_IMPLEMENTATIONS[type(scaling)]
    operands = (w, error, bits, amax)
    fixed = lax.stop_gradient(operands)
    made = dispatch("dual_quantize", table, backend, options, *fixed)
    return without_gradient(OF_CODES, made, (w, error, amax))


def _check_scaling(scaling: Scaling, orientation: str) -> None:
    if isinstance(scaling, Row):
        raise ValueError(
            f"scaling={scaling}: a residual needs scales that both orientations share;"
            " use Tensor()"
        )
    if scaling.scale != "pow2":
        raise ValueError(
            f"scaling={scaling}: a residual is exact only under a power-of-two scale;"
            ' use scale="pow2"'
        )
    if orientation == "both" and not scaling.serves_both:
        raise ValueError(
            f'orientation="both" with {scaling}: w.T has other vectors; quantize it, or'
            " use squares"
        )
