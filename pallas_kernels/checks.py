"""Checks of arguments that several ops share; each error names the broken rule, what was given, and the repair."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import numerics
from pallas_kernels.operands import SCALE_DTYPE, Block, Operand, Quantization, Scaling, Tensor


def check_real(name: str, x: jax.Array) -> None:
    """Raise a TypeError unless `x` is an array of real floating-point numbers."""
    if not hasattr(x, "dtype"):
        raise TypeError(f"{name} is a {type(x).__name__}, not an array; use jnp.asarray({name})")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(
            f"{name} has dtype {x.dtype}, but only real floats are multiplied or rounded in FP8 and FP4; use "
            f"{name}.astype(jnp.float32)"
        )


def check_quantizer(
    name: str, x: jax.Array, dtype: DTypeLike, scaling: Scaling, amax: jax.Array | None, orientation: Any
) -> Quantization:
    """What a quantizer is asked for, if `x` may be quantized so.

    Raises:
      TypeError: `x` is not real floating point, or `dtype` is not FP8.
      ValueError: x has no such rows or blocks, `amax` without one scale, or an unknown orientation.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        check_real(name, x)
    if orientation not in ("rows", "both"):
        raise ValueError(f'orientation={orientation!r} is unknown; use "rows" or "both"')
    resolved = jnp.dtype(dtype)
    if resolved not in numerics.FLOAT8_DTYPES:
        numerics.float8_dtype(resolved)
    if not isinstance(scaling, Tensor):
        _check_parts(name, x, scaling, amax)
    return Quantization(resolved, scaling, orientation)


def _check_parts(name: str, x: jax.Array, scaling: Scaling, amax: jax.Array | None) -> None:
    if amax is not None:
        raise ValueError(f"amax= scales a whole tensor, but scaling={scaling} has several scales; drop one of them")
    if x.ndim == 0:
        raise ValueError(f"{name} is a scalar, which has no rows or blocks; use scaling=Tensor()")
    if isinstance(scaling, Block) and scaling.tile == "square" and x.ndim != 2:
        raise ValueError(
            f"{name}{list(x.shape)} has no square blocks, which are cut from a matrix; use jax.vmap over a stack, or "
            'tile="vector"'
        )


def check_error_and_bits(w: jax.Array, error: jax.Array | None, bits: jax.Array | None) -> None:
    """Raise a TypeError or ValueError unless both, where given, belong to `w`."""
    if error is not None:
        check_real("error", error)
        _check_shape("error", error, w)
    if bits is not None:
        if bits.dtype != jnp.uint32:
            raise TypeError(f"bits has dtype {bits.dtype}, not uint32; use jax.random.bits(key, w.shape)")
        _check_shape("bits", bits, w)


def check_operands(x: Operand, w: Operand) -> tuple[Operand, Operand]:
    """The operands of a product, if tensor cores have such a product.

    Raises:
      TypeError: an operand is not FP8, or scales of blocks are not E8M0.
      ValueError: the contracted sizes differ, or an operand's halves or scales do not fit its values.
      NotImplementedError: E5M2 x E5M2, two scalings that no product combines, or an x with a residual.
    """
    a, b = x.values, w
    contracted = len(b.shape) - 1
    if contracted < 1 or a.ndim < contracted or a.shape[a.ndim - contracted :] != b.shape[1:]:
        raise ValueError(
            f"x{list(a.shape)} and w{list(b.shape)} must agree in the axes after w's first; transpose or reshape one"
        )
    for name, operand in (("x", x), ("w", w)):
        if operand.values.dtype not in numerics.FLOAT8_DTYPES:
            numerics.float8_dtype(operand.values.dtype)
        _check_halves(name, operand)
    if x.lo is not None:
        raise NotImplementedError("x has a residual, which takes a product of its own; multiply x_hi and x_lo apart")
    if a.dtype == b.values.dtype == jnp.dtype(jnp.float8_e5m2):
        raise NotImplementedError(
            "float8_e5m2 x float8_e5m2: no tensor core multiplies it; make one operand float8_e4m3fn"
        )
    if not isinstance(w.scaling, Block):
        if x.scaling != w.scaling:
            raise NotImplementedError(_mixed(x, w))
        return x, w
    if not (isinstance(x.scaling, Block) and x.scaling.tile == "vector" and x.scaling.size == w.scaling.size):
        raise NotImplementedError(_mixed(x, w))
    for name, operand in (("x", x), ("w", w)):
        _check_scales(name, operand, contracted)
    return x, w


def _mixed(x: Operand, w: Operand) -> str:
    return (
        f"x has the scaling {x.scaling} and w {w.scaling}: no product combines them; quantize x with "
        f"scaling={w.scaling.along_rows}"
    )


def _check_halves(name: str, operand: Operand) -> None:
    values, lo = operand.values, operand.lo
    if lo is not None and (lo.shape != values.shape or lo.dtype != values.dtype):
        raise ValueError(
            f"{name}.lo is {lo.dtype}{list(lo.shape)}, but {name} is {values.dtype}{list(values.shape)}; both halves "
            "must match"
        )


def _check_scales(name: str, operand: Operand, contracted: int) -> None:
    # Blocks run along all contracted axes as one.
    shape = operand.values.shape
    kept = len(shape) - contracted
    expected = operand.scaling.scale_shape((*shape[:kept], math.prod(shape[kept:])))
    for scale in (operand.scale, operand.lo_scale):
        if scale is None:
            continue
        if scale.dtype != SCALE_DTYPE:
            raise TypeError(f"the scales of {name} have dtype {scale.dtype}, not float8_e8m0fnu; use quantize")
        if scale.shape != expected:
            raise ValueError(
                f"{name}{list(operand.values.shape)} with {operand.scaling} has scales {list(expected)}, but these are "
                f"{list(scale.shape)}; quantize it with this scaling"
            )


def _check_shape(name: str, x: jax.Array, w: jax.Array) -> None:
    if x.shape != w.shape:
        raise ValueError(f"{name} has shape {x.shape}, but w has {w.shape}; they must be equal")
