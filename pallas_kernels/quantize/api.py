"""`quantize`: a tensor as FP8 values and one scale, optionally in both orientations from one pass."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import numerics
from pallas_kernels.dispatch import Backend, Implementation, dispatch
from pallas_kernels.quantize import reference, triton

Scale = Literal["pow2", "float32"]
Orientation = Literal["rows", "both"]

IMPLEMENTATIONS = (
    Implementation("triton", triton.quantize, triton.reject, triton.decline),
    Implementation("xla", reference.quantize),
)


class Quantized(NamedTuple):
    """x ~ values * scale. `transposed` is `moveaxis(values, -1, 0)`, or None if only rows were asked for."""

    values: jax.Array
    scale: jax.Array
    transposed: jax.Array | None


def check_orientation(orientation: str) -> None:
    """Raise a ValueError unless `orientation` is known."""
    if orientation not in ("rows", "both"):
        raise ValueError(f'orientation={orientation!r} is unknown; use "rows" or "both"')


def check_scale(scale: str) -> None:
    """Raise a ValueError unless `scale` is known."""
    if scale not in ("pow2", "float32"):
        raise ValueError(f'scale={scale!r} is unknown; use "pow2" or "float32"')


def check_real(name: str, x: jax.Array) -> None:
    """Raise a TypeError unless `x` holds real floating-point numbers."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(
            f"{name} has dtype {x.dtype}, but only real floats have an FP8 form; use {name}.astype(jnp.float32)"
        )


def quantize(
    x: jax.Array,
    dtype: DTypeLike,
    *,
    scale: Scale = "pow2",
    amax: jax.Array | None = None,
    orientation: Orientation = "rows",
    backend: Backend | None = None,
) -> Quantized:
    """Round `x / scale` to an FP8 format, with one scale for the whole tensor.

    `values = saturate(round(x / scale))`, where `scale` is the smallest power of two with
    `amax / scale <= largest(dtype)`, or, for `scale="float32"`, `max(amax, 1e-12) / largest(dtype)` (the rule of
    nanochat and torchao: multiply by `largest / amax`, keep the float32 reciprocal).

    Args:
      x: real floats, `[..., k]`; arithmetic is float32.
      dtype: `float8_e4m3fn` or `float8_e5m2`.
      amax: float32 scalar to scale by instead of `max |x|`; values beyond it saturate.
      orientation: "both" also returns the copy with the last axis first, which FP8 products over the other
        axes need (Hopper's FP8 tensor cores read both operands along the contraction).

    Returns:
      `Quantized(values, scale, transposed)`. A NaN or inf in `x` makes everything NaN.

    Raises:
      TypeError: `x` is not real floating point, or `dtype` is not FP8.
      ValueError: an unknown `scale`, `orientation` or `backend`.
      NotImplementedError: the named backend cannot run it; the message says why.

    >>> values, scale, _ = quantize(jnp.array([1.0, -3.0]), jnp.float8_e4m3fn)
    >>> [float(v) for v in values], float(scale)
    ([128.0, -384.0], 0.0078125)
    """
    check_real("x", x)
    check_orientation(orientation)
    check_scale(scale)
    options = dict(dtype=numerics.float8_dtype(dtype), scale=scale, amax=amax, orientation=orientation)
    return Quantized(*dispatch("quantize", IMPLEMENTATIONS, backend, x, **options))
