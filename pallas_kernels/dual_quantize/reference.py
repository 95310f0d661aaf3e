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
    wanted = target(w, error)
    scale = numerics.pow2_scale(numerics.amax(wanted) if amax is None else amax, dtype)
    hi, lo, left = split(wanted, numerics.reciprocal_pow2(scale), scale, dtype, bits)
    new_error = None if error is None else left.astype(error.dtype)
    if orientation == "rows":
        return hi, lo, scale, new_error, None, None
    return hi, lo, scale, new_error, hi.T, lo.T


def target(w: jax.Array, error: jax.Array | None) -> jax.Array:
    """What hi + lo shall stand for, in float32."""
    wide = w.astype(jnp.float32)
    return wide if error is None else wide + error.astype(jnp.float32)


def split(
    target: jax.Array, inverse: jax.Array, scale: jax.Array, dtype: Any, bits: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(hi, lo, what is left), elementwise; `inverse` is 1 / scale."""
    scaled = numerics.flush_subnormal(target) * inverse
    hi = numerics.round_to(scaled, dtype)
    rest = numerics.residual(scaled, hi)
    lo = numerics.round_to(rest, dtype) if bits is None else numerics.stochastic_round_to(rest, dtype, bits)
    # The casts are exact: hi and lo are values of the format already.
    return hi.astype(dtype), lo.astype(dtype), numerics.residual(rest, lo) * scale
