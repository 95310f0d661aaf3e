"""The definition of `dual_quantize` in plain jax.numpy: the CPU path and the oracle of every kernel."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import numerics


def dual_quantize(
    w: jax.Array,
    *,
    dtype: Any,
    error: jax.Array | None,
    bits: jax.Array | None,
    amax: jax.Array | None,
    orientation: str,
) -> tuple[jax.Array | None, ...]:
    """(hi, lo, scale, new error, hi transposed, lo transposed); see `api.dual_quantize`."""
    target = w.astype(jnp.float32)
    if error is not None:
        target = target + error.astype(jnp.float32)
    scale = numerics.pow2_scale(numerics.amax(target) if amax is None else amax, dtype)
    scaled = numerics.flush_subnormal(target) * numerics.reciprocal_pow2(scale)
    hi = numerics.round_to(scaled, dtype)
    rest = numerics.residual(scaled, hi)
    lo = numerics.round_to(rest, dtype) if bits is None else numerics.stochastic_round_to(rest, dtype, bits)
    new_error = None if error is None else numerics.residual(rest, lo) * scale
    # Exact: hi and lo are values of the format already.
    hi, lo = hi.astype(dtype), lo.astype(dtype)
    if orientation == "rows":
        return hi, lo, scale, new_error, None, None
    return hi, lo, scale, new_error, hi.T, lo.T
