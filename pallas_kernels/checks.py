"""Checks of arguments that several ops share; each error names the broken rule, what was given, and the repair."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import numerics
from pallas_kernels.operands import Operand


def check_real(name: str, x: jax.Array) -> None:
    """Raise a TypeError unless `x` holds real floating-point numbers."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(
            f"{name} has dtype {x.dtype}, but only real floats have an FP8 form; use {name}.astype(jnp.float32)"
        )


def check_orientation(orientation: str) -> None:
    """Raise a ValueError unless `orientation` is known."""
    if orientation not in ("rows", "both"):
        raise ValueError(f'orientation={orientation!r} is unknown; use "rows" or "both"')


def check_error_and_bits(w: jax.Array, error: jax.Array | None, bits: jax.Array | None) -> None:
    """Raise a TypeError or ValueError unless both, where given, belong to `w`."""
    if error is not None:
        check_real("error", error)
        _check_shape("error", error, w)
    if bits is not None:
        if bits.dtype != jnp.uint32:
            raise TypeError(f"bits has dtype {bits.dtype}, not uint32; use jax.random.bits(key, w.shape)")
        _check_shape("bits", bits, w)


def check_operands(x: Operand, w: Operand) -> None:
    """Raise unless these are operands of a product that tensor cores have, with shapes that agree.

    Raises:
      TypeError: an operand is not FP8, or the halves of one differ in format.
      ValueError: the contracted sizes differ, or an operand's halves or scales do not fit its values.
      NotImplementedError: E5M2 x E5M2, or two scalings that no product combines.
    """
    contracted = w.values.ndim - 1
    a, b = x.shape, w.shape
    if contracted < 1 or len(a) < contracted or a[len(a) - contracted :] != b[1:]:
        raise ValueError(f"x{list(a)} and w{list(b)} must agree in the axes after w's first; transpose or reshape one")
    for name, operand in (("x", x), ("w", w)):
        numerics.float8_dtype(operand.values.dtype)
        _check_halves(name, operand)
    e5m2 = jnp.dtype(jnp.float8_e5m2)
    if x.values.dtype == e5m2 and w.values.dtype == e5m2:
        raise NotImplementedError(
            "float8_e5m2 x float8_e5m2: no tensor core multiplies it; make one operand float8_e4m3fn"
        )
    if w.scaling.along_rows != x.scaling:
        raise NotImplementedError(
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


def check_scales(name: str, operand: Operand, dtype: Any) -> None:
    """Raise unless the scales of an operand have this dtype and one value for each block.

    Raises:
      TypeError: another dtype.
      ValueError: another shape.
    """
    for scale in (operand.scale, operand.lo_scale):
        if scale is None:
            continue
        if scale.dtype != dtype:
            raise TypeError(f"the scales of {name} have dtype {scale.dtype}, not {jnp.dtype(dtype)}; use quantize")
        expected = operand.scaling.scale_shape(operand.shape)
        if scale.shape != expected:
            raise ValueError(
                f"{name}{list(operand.shape)} with {operand.scaling} has scales {list(expected)}, but these are "
                f"{list(scale.shape)}; quantize it with this scaling"
            )


def _check_shape(name: str, x: jax.Array, w: jax.Array) -> None:
    if x.shape != w.shape:
        raise ValueError(f"{name} has shape {x.shape}, but w has {w.shape}; they must be equal")


def has_explicit_axes() -> bool:
    """Whether the mesh in use has explicit axes, under which a kernel is not partitioned."""
    return jax.sharding.AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types


def reject_explicit(*args: Any) -> str | None:
    """Why a kernel cannot run under the mesh in use, or None."""
    if has_explicit_axes():
        return 'the mesh has explicit axes, under which kernels are not partitioned; use backend="xla"'
    return None
