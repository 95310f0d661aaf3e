"""`dual_quantize` as one Pallas-Triton pass: W (and error, and random bits) read once, everything else written.

Inside a kernel a float8 cast and back is what it says. XLA, which deletes such a pair and with it the residual (see
`numerics`), never sees the kernel's body; only its interpreter on CPUs does, where XLA has no such rule.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import numerics, tuning
from pallas_kernels.dual_quantize import reference
from pallas_kernels.tiled import Output, map_tiles, misfit


def reject(w: jax.Array, **options: Any) -> str | None:
    """Why this kernel cannot split w, or None."""
    if w.ndim != 2:
        return f'w{list(w.shape)} is no matrix; use backend="xla" or jax.vmap'
    return misfit("w", *w.shape)


def decline(w: jax.Array, *, error: Any, bits: Any, orientation: str, **options: Any) -> str | None:
    """Why this kernel is not the first choice, or None."""
    rounding = "nearest" if bits is None else "stochastic"
    feedback = "no error" if error is None else f"error {error.dtype}"
    return tuning.decline("dual_quantize", "triton", f"{orientation} {rounding} {feedback}", w.shape)


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
    has_error, has_bits, both = error is not None, bits is not None, orientation == "both"
    if amax is None:
        amax = numerics.amax(reference.target(w, error))
    scale = numerics.pow2_scale(amax, dtype)

    def whole(*operands: jax.Array) -> tuple[jax.Array, ...]:
        *matrices, inverse, scale = operands
        target = reference.target(matrices[0], matrices[1] if has_error else None)
        hi, lo, left = reference.split(target, inverse, scale, dtype, matrices[-1] if has_bits else None)
        return (hi, lo, left.astype(matrices[1].dtype)) if has_error else (hi, lo)

    def body(*tiles: jax.Array) -> tuple[jax.Array, ...]:
        *matrices, inverse, scale = tiles
        target = reference.target(matrices[0], matrices[1] if has_error else None)
        if has_error or has_bits:
            scaled = numerics.flush_subnormal(target) * inverse
        else:
            scaled = numerics.scaled_for_rounding(target, inverse, dtype)
        hi = numerics.saturating_cast(scaled, dtype)
        rest = numerics.residual(scaled, hi.astype(jnp.float32))
        if has_bits:
            lo = numerics.stochastic_round_to(rest, dtype, matrices[-1]).astype(dtype)
        else:
            lo = numerics.saturating_cast(rest, dtype)
        if not has_error:
            return hi, lo
        left = numerics.residual(rest, lo.astype(jnp.float32)) * scale
        return hi, lo, left.astype(matrices[1].dtype)

    inputs = [operand for operand in (w, error, bits) if operand is not None]
    outputs = [Output(dtype, both), Output(dtype, both)]
    if error is not None:
        outputs.append(Output(error.dtype, replaces=1))
    scalars = [numerics.reciprocal_pow2(scale), scale]
    results = iter(
        map_tiles(
            body, inputs, scalars, outputs, name="dual_quantize", reference=whole,
            values_per_thread=8 if has_bits else 16,
        )
    )  # fmt: skip
    hi, hi_transposed = next(results), next(results) if both else None
    lo, lo_transposed = next(results), next(results) if both else None
    return hi, lo, scale, next(results) if has_error else None, hi_transposed, lo_transposed
