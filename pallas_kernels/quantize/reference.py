"""The definition of `quantize` in plain jax.numpy: the CPU path and the oracle of every kernel."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import numerics

# nanochat's rule (and torchao's): a floor under amax, so that a zero tensor has a finite multiplier. It is a float64,
# which lies between the float32 below and its neighbour.
_FLOAT32_SCALE_FLOOR = 1e-12


def scale_and_inverse(amax: jax.Array, dtype: Any, scale: str) -> tuple[jax.Array, jax.Array]:
    """(scale, multiplier that replaces the division by it); both NaN where `amax` is not finite."""
    if scale == "pow2":
        power = numerics.pow2_scale(amax, dtype)
        return power, numerics.reciprocal_pow2(power)
    finite = jnp.isfinite(amax)
    floor = np.float32(_FLOAT32_SCALE_FLOOR)
    multiplier = numerics.divide(numerics.largest(dtype), jnp.maximum(amax, floor))
    multiplier = jnp.where(amax <= floor, np.float32(numerics.largest(dtype) / _FLOAT32_SCALE_FLOOR), multiplier)
    reciprocal = numerics.divide(1.0, multiplier)
    nan = jnp.float32(jnp.nan)
    return jnp.where(finite, reciprocal, nan), jnp.where(finite, multiplier, nan)


def quantize(
    x: jax.Array, *, dtype: Any, scale: str, amax: jax.Array | None, orientation: str
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """(values, scale, transposed or None); see `api.quantize`."""
    x = x.astype(jnp.float32)
    factor, inverse = scale_and_inverse(numerics.amax(x) if amax is None else amax, dtype, scale)
    values = numerics.saturating_cast(numerics.flush_subnormal(x) * inverse, dtype)
    return values, factor, jnp.moveaxis(values, -1, 0) if orientation == "both" else None
