"""`dual_quantize`: a weight as the sum of two FP8 tensors with one scale, `W ~ (hi + lo) * scale`."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import numerics
from pallas_kernels.dispatch import Backend, Implementation, dispatch
from pallas_kernels.dual_quantize import reference, triton
from pallas_kernels.quantize.api import Orientation, check_orientation, check_real

IMPLEMENTATIONS = (
    Implementation("triton", triton.dual_quantize, triton.reject, triton.decline),
    Implementation("xla", reference.dual_quantize),
)


class DualQuantized(NamedTuple):
    """W ~ (hi + lo) * scale; `error` is what was left over, if an error came in; transposed copies are `[n, k]`."""

    hi: jax.Array
    lo: jax.Array
    scale: jax.Array
    error: jax.Array | None
    hi_transposed: jax.Array | None
    lo_transposed: jax.Array | None


def dual_quantize(
    w: jax.Array,
    *,
    dtype: DTypeLike = jnp.float8_e4m3fn,
    error: jax.Array | None = None,
    bits: jax.Array | None = None,
    amax: jax.Array | None = None,
    orientation: Orientation = "rows",
    backend: Backend | None = None,
) -> DualQuantized:
    """Split `w + error` into two FP8 tensors that share one power-of-two scale, and say what is left.

    `hi = round((w + e) / s)`, `lo = round((w + e) / s - hi)`, `new error = (w + e) - (hi + lo) * s`.
    After scaling, the residual is at most half of the widest spacing (16 for E4M3), so it needs no scale of its own and
    both products add in one accumulator. What a stale `amax` clips in `hi` is caught by `lo`.

    Args:
      w: real floats `[k, n]`; arithmetic is float32.
      dtype: the format of both halves.
      error: the error that earlier roundings left, shape of `w`, in units of `w`.
      bits: uint32 random bits, shape of `w`: `lo` is rounded stochastically, so `E[(hi + lo) * s] = w + e`.
      amax: float32 scalar to scale by instead of `max |w + e|`.
      orientation: "both" also returns `hi` and `lo` as `[n, k]`.

    Returns:
      `DualQuantized`; `error` in the dtype of the one that came in, or None. A NaN or inf makes everything NaN.

    Raises:
      TypeError: `w` or `error` is not real floating point, `bits` is not uint32, `dtype` is not FP8.
      ValueError: shapes differ, or an unknown `orientation` or `backend`.
      NotImplementedError: the named backend cannot run it; the message says why.

    >>> q = dual_quantize(jnp.array([[1.0, 0.3]]), error=jnp.zeros((1, 2)))
    >>> [float(v) for v in (q.hi.astype(jnp.float32) + q.lo.astype(jnp.float32))[0] * q.scale]
    [1.0, 0.2998046875]
    """
    check_real("w", w)
    check_orientation(orientation)
    check_error_and_bits(w, error, bits)
    options = dict(dtype=numerics.float8_dtype(dtype), error=error, bits=bits, amax=amax, orientation=orientation)
    return DualQuantized(*dispatch("dual_quantize", IMPLEMENTATIONS, backend, w, **options))


def check_error_and_bits(w: jax.Array, error: jax.Array | None, bits: jax.Array | None) -> None:
    """Raise a TypeError or ValueError unless both, where given, belong to `w`."""
    if error is not None:
        check_real("error", error)
        _check_shape("error", error, w)
    if bits is not None:
        if bits.dtype != jnp.uint32:
            raise TypeError(f"bits has dtype {bits.dtype}, not uint32; use jax.random.bits(key, w.shape)")
        _check_shape("bits", bits, w)


def _check_shape(name: str, x: jax.Array, w: jax.Array) -> None:
    if x.shape != w.shape:
        raise ValueError(f"{name} has shape {x.shape}, but w has {w.shape}; they must be equal")
