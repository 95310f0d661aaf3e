"""`dual_quantize` with one scale as one Pallas-Triton pass: W (and error, and random bits) is read once.

Inside a kernel a float8 cast and back is what it says. XLA, which deletes such a pair and with it the residual (see
`numerics`), never sees the kernel's body; only its interpreter on CPUs does, where XLA has no such rule.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import numerics
from pallas_kernels.dual_quantize import reference
from pallas_kernels.operands import Operand, Quantization, Quantized
from pallas_kernels.tiled import Output, Tiling, map_tiles, misfit


def reject(options: Quantization, w: jax.Array, *arrays: jax.Array | None) -> str | None:
    """Why this kernel cannot split w, or None."""
    if w.ndim != 2:
        return f'w{list(w.shape)} is not a matrix; use backend="xla" or jax.vmap'
    return misfit("w", *w.shape)


def dual_quantize(
    options: Quantization,
    w: jax.Array,
    error: jax.Array | None,
    bits: jax.Array | None,
    amax: jax.Array | None,
) -> Quantized:
    """See `api.dual_quantize`."""
    dtype, both = options.dtype, options.orientation == "both"
    has_error, has_bits = error is not None, bits is not None
    if amax is None:
        amax = numerics.amax(reference.target(w, error))
    scale, inverse = numerics.scale_and_inverse(amax, dtype, "pow2")

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
    results = iter(
        map_tiles(
            body, inputs, [inverse, scale], outputs, name="dual_quantize", reference=whole,
            tiling=Tiling(values_per_thread=8 if has_bits else 16),
        )
    )  # fmt: skip
    hi, hi_turned = next(results), next(results) if both else None
    lo, lo_turned = next(results), next(results) if both else None
    columns = None if hi_turned is None else Operand(hi_turned, scale, lo_turned, scaling=options.scaling)
    return Quantized(Operand(hi, scale, lo, scaling=options.scaling), columns, next(results) if has_error else None)
