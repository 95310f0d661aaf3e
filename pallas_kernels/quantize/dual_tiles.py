"""`dual_quantize` as one pass over tiles: W (and error, and random bits) is read once.

Inside a kernel a float8 cast and back is kept. XLA deletes such a pair, and with it the residual (see `numerics`), but
XLA never sees the body of a compiled kernel. It does see the interpreter's on CPUs, where it has no such rule.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels import numerics
from pallas_kernels.operands import SCALE_DTYPE, ZERO_BLOCK, Block, Operand, Quantization, Quantized
from pallas_kernels.quantize import reference
from pallas_kernels.specs import has_explicit_axes
from pallas_kernels.tiled import Engine, Operations, Output, Tiling, by_triton, map_tiles


def reject(options: Quantization, w: jax.Array, *arrays: jax.Array | None) -> str | None:
    """Return the reason why this kernel cannot split w, or None."""
    scaling = options.scaling
    if isinstance(scaling, Block) and scaling.tile != "square":
        return f'{scaling.tile} blocks of w{list(w.shape)}: only squares of a matrix; use backend="xla"'
    if w.ndim != 2:
        return f'w{list(w.shape)} is not a matrix; use backend="xla" or jax.vmap'
    return (Tiling.of_blocks(scaling.size) if isinstance(scaling, Block) else Tiling()).misfit("w", *w.shape)


def dual_quantize(
    options: Quantization, w: jax.Array, error: jax.Array | None, bits: jax.Array | None, amax: jax.Array | None,
    engine: Engine = by_triton,
) -> Quantized:  # fmt: skip
    """Return both halves, see `api.dual_quantize`."""
    if isinstance(options.scaling, Block):
        return _in_blocks(options, options.scaling, w, error, bits, engine)
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

    def body(do: Operations, *tiles: jax.Array) -> tuple[jax.Array, ...]:
        *matrices, inverse, scale = tiles
        target = reference.target(matrices[0], matrices[1] if has_error else None)
        if has_error or has_bits:
            scaled = numerics.flush_subnormal(target) * inverse
        else:
            scaled = do.scaled(target, inverse, dtype)
        hi, lo, rest = _split(do, scaled, numerics.saturating_cast, dtype, matrices[-1] if has_bits else None)
        if not has_error:
            return hi, lo
        left = numerics.residual(rest, lo.astype(jnp.float32)) * scale
        return hi, lo, left.astype(matrices[1].dtype)

    inputs = [operand for operand in (w, error, bits) if operand is not None]
    # Stochastic rounding computes more a value, and wants more threads (`Tiling`).
    tiling = Tiling(values_per_thread=8 if has_bits else 16)
    outputs = _outputs(dtype, both, error)
    run = functools.partial(map_tiles, name="dual_quantize", reference=whole, tiling=tiling, engine=engine)
    results = run(body, inputs, [inverse, scale], outputs)
    each = 1 + both  # results of hi, and of lo
    rows, *columns = (Operand(hi, scale, lo, scaling=options.scaling) for hi, lo in zip(results[:each], results[each:]))
    return Quantized(rows, columns[0] if both else None, results[-1] if has_error else None)


def by_reference(
    options: Quantization, w: jax.Array, error: jax.Array | None, bits: jax.Array | None, amax: jax.Array | None
) -> Quantized:
    """Return the definition; with explicit axes, which JAX does not cut into blocks, on each device's part."""
    if has_explicit_axes() and isinstance(options.scaling, Block):
        return _in_blocks(options, options.scaling, w, error, bits, None)
    return reference.dual_quantize(options, w, error, bits, amax)


def _in_blocks(
    options: Quantization, block: Block, w: jax.Array, error: jax.Array | None, bits: jax.Array | None,
    engine: Engine | None,
) -> Quantized:  # fmt: skip
    """Return both halves from tiles that are square blocks."""
    dtype, both = options.dtype, options.orientation == "both"
    has_error, has_bits = error is not None, bits is not None

    def body(do: Operations, *tiles: jax.Array) -> tuple[jax.Array, ...]:
        wanted = reference.target(tiles[0], tiles[1] if has_error else None)
        scale, inverse = numerics.scale_and_inverse(do.largest(wanted), dtype, "pow2")
        scaled = numerics.flush_subnormal(wanted) * inverse
        # Nothing to clip: the scale of a block covers its largest value, and is NaN if that is not finite.
        hi, lo, rest = _split(do, scaled, lambda x, dtype: x.astype(dtype), dtype, tiles[-1] if has_bits else None)
        back = lo.astype(jnp.float32)
        code = numerics.e8m0_code(scale)
        # NaN is not zero: the comparison is false, and the block keeps its scale.
        residual_code = jnp.where(do.largest(back) == 0, jnp.full_like(code, ZERO_BLOCK), code)
        if not has_error:
            return hi, lo, code, residual_code
        return hi, lo, code, residual_code, (numerics.residual(rest, back) * scale).astype(tiles[1].dtype)

    def whole(*tensors: jax.Array) -> tuple[jax.Array, ...]:
        rows, _, left = reference.dual_quantize(
            Quantization(dtype, block), tensors[0], tensors[1] if has_error else None,
            tensors[-1] if has_bits else None, None,
        )  # fmt: skip
        assert rows.lo is not None and rows.lo_scale is not None
        codes = [lax.bitcast_convert_type(s, jnp.uint8) for s in (rows.scale, rows.lo_scale)]
        return (rows.values, rows.lo, *codes) if left is None else (rows.values, rows.lo, *codes, left)

    codes = Output(jnp.uint8, form="one" if block.tile == "square" else "rows")
    outputs = _outputs(dtype, both, error, codes, codes)
    inputs = [operand for operand in (w, error, bits) if operand is not None]
    # Measured on an H200: without an error squares of 128 run at 3.1 TB/s with 128 values a thread, and at 2.8 with 32.
    # With an error they run out of registers at 128, 1.9 TB/s, and 64 values give 2.6.
    values = (64 if has_error or has_bits else 128) if block.size == 128 else 32
    tiling = Tiling.of_blocks(block.size, values)
    run = functools.partial(map_tiles, name="block_dual_quantize", reference=whole, tiling=tiling, engine=engine)
    results = run(body, inputs, [], outputs)
    each = 1 + both
    scale, lo_scale = (lax.bitcast_convert_type(x, SCALE_DTYPE) for x in results[2 * each : 2 * each + 2])
    rows = Operand(results[0], scale, results[each], lo_scale, block)
    columns = Operand(results[1], scale.T, results[each + 1], lo_scale.T, block) if both else None
    return Quantized(rows, columns, results[-1] if has_error else None)


def _split(
    do: Operations, scaled: jax.Array, cast: Callable[[jax.Array, DTypeLike], jax.Array], dtype: DTypeLike,
    bits: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Return (hi, lo, the rest that lo rounds), elementwise."""
    hi = cast(scaled, dtype)
    rest = numerics.residual(scaled, hi.astype(jnp.float32))
    lo = cast(rest, dtype) if bits is None else numerics.stochastic_round_to(rest, dtype, bits, do.floor).astype(dtype)
    return hi, lo, rest


def _outputs(dtype: DTypeLike, both: bool, error: jax.Array | None, *codes: Output) -> list[Output]:
    # The new error is written over the old one, tile by tile.
    return [
        Output(dtype, both),
        Output(dtype, both),
        *codes,
        *([] if error is None else [Output(error.dtype, replaces=1)]),
    ]
