"""`row_quantize`: a tensor as FP8 values and one scale for every row, in XLA's fusions on every device."""

from typing import NamedTuple

import jax
from jax.typing import DTypeLike

from pallas_kernels import numerics
from pallas_kernels.dispatch import Backend, Implementation, dispatch
from pallas_kernels.quantize.api import Orientation, Scale, check_orientation, check_real, check_scale
from pallas_kernels.row_quantize import reference

IMPLEMENTATIONS = (Implementation("xla", reference.row_quantize),)


class RowQuantized(NamedTuple):
    """x ~ values * scales[..., None]; `transposed`, if asked for, is x with its last axis first, quantized anew."""

    values: jax.Array
    scales: jax.Array
    transposed: jax.Array | None
    transposed_scales: jax.Array | None


def row_quantize(
    x: jax.Array,
    dtype: DTypeLike,
    *,
    scale: Scale = "pow2",
    orientation: Orientation = "rows",
    backend: Backend | None = None,
) -> RowQuantized:
    """Round `x / scale` to an FP8 format, with one scale for every row (torchao's "rowwise").

    `values[..., k] = saturate(round(x[..., k] / s[...]))`, s as `quantize` finds it of that row alone.

    Args:
      x: real floats, `[..., k]`; arithmetic is float32.
      dtype: `float8_e4m3fn` or `float8_e5m2`.
      scale: "pow2" (torchao's default for this recipe) or "float32".
      orientation: "both" also returns `[k, ...]` with a scale for every k, over all other axes.

    Returns:
      `RowQuantized`; scales are float32, `[...]` and `[k]`. A NaN or inf makes its row NaN, and no other.

    Raises:
      TypeError: `x` is not real floating point, or `dtype` is not FP8.
      ValueError: `x` is a scalar, or an unknown `scale`, `orientation` or `backend`.
      NotImplementedError: the named backend has no kernel for it.

    >>> import jax.numpy as jnp
    >>> row_quantize(jnp.array([[1.0, 448.0], [2.0, 0.0]]), jnp.float8_e4m3fn).scales.tolist()
    [1.0, 0.0078125]
    """
    check_real("x", x)
    check_scale(scale)
    check_orientation(orientation)
    if x.ndim == 0:
        raise ValueError("x is a scalar, which has no rows; use quantize")
    options = dict(dtype=numerics.float8_dtype(dtype), scale=scale, orientation=orientation)
    return RowQuantized(*dispatch("row_quantize", IMPLEMENTATIONS, backend, x, **options))
