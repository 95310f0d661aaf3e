"""Quantized tensors as pytrees: `QArray` (one FP8 tensor) and `ResidualArray` (two that share a scale).

`quantize` and `split` make them, `.dequantize()` gives float32 back, `quantize_weight` makes what a recipe asks for.
The arithmetic is that of `pallas_kernels`; this module adds names, pytrees and the orientations of a weight.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from pallas_kernels import numerics
from pallas_kernels.dual_quantize.api import dual_quantize
from pallas_kernels.quantize.api import Orientation, Scale
from pallas_kernels.quantize.api import quantize as quantize_values
from tcfp_jax.recipe import Recipe, TCFPMode


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QArray:
    """One FP8 tensor: `x ~ values * scale`.

    Attributes:
      values: FP8, the shape of x.
      scale: float32, one per tensor; for a stack of weights the leading axes of `values`.
      transposed: `values` with its last two axes swapped, where products need it, else None.
    """

    values: jax.Array
    scale: jax.Array
    transposed: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor it stands for."""
        return self.values.shape

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> jax.Array:
        """Values * scale, in float32 and then `dtype`.

        >>> float(quantize(jnp.float32(0.3)).dequantize())
        0.3125
        """
        # Without the barrier XLA on the GPU would cancel the cast against the one in `quantize`, in the same jit.
        return _scaled(lax.optimization_barrier(self.values).astype(jnp.float32), self.scale, dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ResidualArray:
    """A weight as two FP8 tensors with one scale: `W ~ (hi + lo) * scale`.

    Attributes:
      hi, lo: FP8 `[..., k, n]`.
      scale: float32, one per weight; for a stack of weights the leading axes of `hi`.
      hi_transposed, lo_transposed: `[..., n, k]` copies, where products need them, else None.
    """

    hi: jax.Array
    lo: jax.Array
    scale: jax.Array
    hi_transposed: jax.Array | None = None
    lo_transposed: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor it stands for."""
        return self.hi.shape

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> jax.Array:
        """(hi + lo) * scale, in float32 (where the sum is exact) and then `dtype`.

        >>> float(split(jnp.float32(0.3)).dequantize())
        0.2998046875
        """
        # No barrier: hi and lo were rounded before they were cast, so cancelling the cast changes nothing.
        return _scaled(self.hi.astype(jnp.float32) + self.lo.astype(jnp.float32), self.scale, dtype)


Quantized = QArray | ResidualArray


def as_quantized(value: Any) -> Quantized | None:
    """`value` if it is a quantized tensor, or one from the mapping of its fields, which `nnx.Optimizer` makes of it.

    None where it is neither.

    >>> q = split(jnp.ones(2))
    >>> as_quantized({"hi": q.hi, "lo": q.lo, "scale": q.scale}).dequantize().tolist()
    [1.0, 1.0]
    """
    if isinstance(value, Quantized):
        return value
    if isinstance(value, Mapping) and "scale" in value:
        for kind in get_args(Quantized):
            names = [field.name for field in fields(kind)]
            if names[0] in value and set(value) <= set(names):
                return kind(**dict(value))
    return None


def _scaled(values: jax.Array, scale: jax.Array, dtype: DTypeLike) -> jax.Array:
    return (values * scale.reshape(scale.shape + (1,) * (values.ndim - scale.ndim))).astype(dtype)


def quantize(x: ArrayLike, dtype: DTypeLike = jnp.float8_e4m3fn, *, scale: Scale = "pow2") -> QArray:
    """`x` as FP8 values and one scale: `values = saturate(round(x / scale))`.

    Args:
      x: real floats of any shape; arithmetic is float32.
      dtype: `float8_e4m3fn` (31.5 dB on Gaussian data) or `float8_e5m2` (25.5 dB, wider range).
      scale: "pow2", the smallest power of two that fits max |x|, or "float32", max |x| / largest.

    Raises:
      TypeError: `x` is not real floating point, or `dtype` is not FP8.
      ValueError: `scale` is unknown.

    >>> quantize(jnp.array([1.0, -3.0])).dequantize().tolist()
    [1.0, -3.0]
    """
    values, factor, _ = quantize_values(jnp.asarray(x), dtype, scale=scale)
    return QArray(values, factor)


def split(
    w: ArrayLike,
    *,
    error: ArrayLike | None = None,
    key: jax.Array | None = None,
    amax: ArrayLike | None = None,
) -> ResidualArray:
    """`w + error` as two E4M3 tensors with one scale: `hi = round(w/s)`, `lo = round(w/s - hi)`; 64 dB on N(0, 1).

    Args:
      w: real floats of any shape; arithmetic is float32.
      error: what earlier roundings left, shape of `w`.
      key: JAX random key; rounds `lo` stochastically, so that E[hi + lo] s = w + error, reproducibly.
      amax: scale by this instead of max |w + error|; what clips in `hi` is caught by `lo`.

    Raises:
      TypeError: `w` or `error` is not real floating point.
      ValueError: the shape of `error` is not that of `w`.

    >>> w = jnp.array([1.0, 0.3])
    >>> q = split(w)
    >>> (w - q.dequantize()).tolist() == (w - split(w, error=jnp.zeros(2)).dequantize()).tolist()
    True
    """
    w = jnp.asarray(w)
    bits = None if key is None else jax.random.bits(key, w.shape, jnp.uint32)
    parts = dual_quantize(
        w,
        error=None if error is None else jnp.asarray(error),
        bits=bits,
        amax=None if amax is None else jnp.asarray(amax, jnp.float32),
    )
    return ResidualArray(parts.hi, parts.lo, parts.scale)


def quantize_weight(
    w: jax.Array,
    recipe: Recipe,
    *,
    error: jax.Array | None = None,
    key: jax.Array | None = None,
    amax: jax.Array | None = None,
    orientation: Orientation = "both",
) -> tuple[Quantized, jax.Array | None]:
    """(the weight `[k, n]` as the recipe stores it, the error left over in the dtype of the one that came in, or None).

    Raises:
      ValueError: a stochastic residual without a key, or a recipe that does not quantize weights.
    """
    if recipe.mode is TCFPMode.BF16:
        raise ValueError('this recipe keeps weights in BF16; there is nothing to quantize, use recipe("tcfp12")')
    if recipe.mode is TCFPMode.FP8:
        return _quantize_single(w, recipe, error=error, amax=amax, orientation=orientation)
    bits = None
    if recipe.residual == "stochastic":
        if key is None:
            raise ValueError('residual="stochastic" needs key=jax.random.key(seed) for its random bits')
        bits = jax.random.bits(key, w.shape, jnp.uint32)
    parts = dual_quantize(
        w,
        dtype=recipe.weight_dtype,
        error=error,
        bits=bits,
        amax=amax,
        orientation=orientation,
        backend=recipe.quantize_backend,
    )
    stored = ResidualArray(parts.hi, parts.lo, parts.scale, parts.hi_transposed, parts.lo_transposed)
    return stored, parts.error


def _quantize_single(
    w: jax.Array, recipe: Recipe, *, error: jax.Array | None, amax: jax.Array | None, orientation: Orientation
) -> tuple[QArray, jax.Array | None]:
    target = w.astype(jnp.float32)
    if error is not None:
        target = target + error.astype(jnp.float32)
    parts = quantize_values(
        target,
        recipe.weight_dtype,
        scale=recipe.scale,
        amax=amax,
        orientation=orientation,
        backend=recipe.quantize_backend,
    )
    stored = QArray(parts.values, parts.scale, parts.transposed)
    return stored, None if error is None else numerics.residual(target, stored.dequantize()).astype(error.dtype)
