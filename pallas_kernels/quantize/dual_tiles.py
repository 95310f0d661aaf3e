"""`dual_quantize` as one pass over tiles: W (and error, and random bits) is read once.

Inside a kernel a float8 cast and back is kept. XLA deletes such a pair, and with it the
residual (see `numerics`), but XLA never sees the body of a compiled kernel. It does see
the interpreter's on CPUs, where it has no such rule.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import numerics
from pallas_kernels.operands import (
    SCALE_DTYPE,
    ZERO_BLOCK,
    Block,
    Operand,
    Quantization,
    Quantized,
)
from pallas_kernels.quantize import reference
from pallas_kernels.specs import has_explicit_axes
from pallas_kernels.tiled import (
    Engine,
    Operations,
    Output,
    Tiling,
    by_triton,
    map_tiles,
)


def reject(
    options: Quantization, w: jax.Array, *arrays: jax.Array | None
) -> str | None:
    """Return the reason why this kernel cannot split w, or None."""
    scaling = options.scaling
    if isinstance(scaling, Block) and scaling.tile != "square":
        return (
            f"{scaling.tile} blocks of w{list(w.shape)}: only squares of a matrix; use"
            ' backend="xla"'
        )
    if w.ndim != 2:
        return f'w{list(w.shape)} is not a matrix; use backend="xla" or jax.vmap'
    return (
        Tiling.of_blocks(scaling.size) if isinstance(scaling, Block) else Tiling()
    ).misfit("w", *w.shape)


def dual_quantize(
    options: Quantization,
    w: jax.Array,
    error: jax.Array | None,
    bits: jax.Array | None,
    amax: jax.Array | None,
    engine: Engine | None = by_triton,
) -> Quantized:
    """Return both halves, see `api.dual_quantize`; without an engine the definition."""
    if engine is None and not (
        has_explicit_axes() and isinstance(options.scaling, Block)
    ):
        return reference.dual_quantize(options, w, error, bits, amax)
    dtype, scaling, both = options.dtype, options.scaling, options.orientation == "both"
    block = scaling if isinstance(scaling, Block) else None
    has_error, has_bits, scalars = (
        error is not None,
        bits is not None,
        list[jax.Array](),
    )
    inputs = [operand for operand in (w, error, bits) if operand is not None]
    if block is None:
        amax = numerics.amax(reference.target(w, error)) if amax is None else amax
        scalars = [*numerics.scale_and_inverse(amax, dtype, "pow2")][::-1]

    def body(do: Operations, *operands: jax.Array) -> tuple[jax.Array, ...]:
        tiles, numbers = operands[: len(inputs)], operands[len(inputs) :]
        wanted = reference.target(tiles[0], tiles[1] if has_error else None)
        inverse, scale = (
            numbers
            or numerics.scale_and_inverse(do.largest(wanted)[0], dtype, "pow2")[::-1]
        )
        is_exact = block or has_error or has_bits
        scaled = (
            numerics.flush_subnormal(wanted) * inverse
            if is_exact
            else do.scaled(wanted, inverse, dtype)
        )
        # In a block nothing is to be clipped: its scale covers its largest value, and
        # is NaN if that is not finite.
        cast = (
            (lambda x: x.astype(dtype))
            if block
            else functools.partial(numerics.saturating_cast, dtype=dtype)
        )
        hi = cast(scaled)
        rest = numerics.residual(scaled, hi.astype(jnp.float32))
        lo = (
            numerics.stochastic_round_to(rest, dtype, tiles[-1], do.floor).astype(dtype)
            if has_bits
            else cast(rest)
        )
        results = [hi, lo]
        if block:
            code = numerics.e8m0_code(scale)
            # NaN is not zero: the comparison is false, and the block keeps its scale.
            is_zero = do.largest(lo.astype(jnp.float32))[0] == 0
            results += [
                code,
                jnp.where(is_zero, ZERO_BLOCK, code.astype(jnp.int32)).astype(
                    jnp.uint8
                ),
            ]
        if has_error:
            results.append(
                (numerics.residual(rest, lo.astype(jnp.float32)) * scale).astype(
                    tiles[1].dtype
                )
            )
        return tuple(results)

    def whole(*operands: jax.Array) -> tuple[jax.Array, ...]:
        tiles, numbers = operands[: len(inputs)], operands[len(inputs) :]
        given = (
            tiles[0],
            tiles[1] if has_error else None,
            tiles[-1] if has_bits else None,
        )
        if block is None:
            hi, lo, left = reference.split(
                reference.target(*given[:2]), numbers[0], numbers[1], dtype, given[2]
            )
            return (hi, lo, left.astype(tiles[1].dtype)) if has_error else (hi, lo)
        rows, _, error = reference.dual_quantize(
            Quantization(dtype, block), *given, None
        )
        assert rows.lo is not None and rows.lo_scale is not None
        codes = [
            lax.bitcast_convert_type(s, jnp.uint8) for s in (rows.scale, rows.lo_scale)
        ]
        return (
            (rows.values, rows.lo, *codes)
            if error is None
            else (rows.values, rows.lo, *codes, error)
        )

    # Stochastic rounding computes more a value, and wants more threads (`Tiling`).
    tiling, codes = Tiling(values_per_thread=8 if has_bits else 16), list[Output]()
    if block:
        # Measured on an H200: without an error squares of 128 run at 3.1 TB/s with 128
        # values a thread, and at 2.8 with
        # 32. With an error they run out of registers at 128, 1.9 TB/s, and 64 values
        #   give 2.6.
        tiling = Tiling.of_blocks(
            block.size, 32 if block.size < 128 else 64 if has_error or has_bits else 128
        )
        codes = [
            Output(jnp.uint8, form="one" if block.tile == "square" else "rows")
        ] * 2
    # The new error is written over the old one, tile by tile.
    outputs = [
        *[Output(dtype, both)] * 2,
        *codes,
        *([] if error is None else [Output(error.dtype, replaces=1)]),
    ]
    name = f"{'block_' if block else ''}dual_quantize"
    results = map_tiles(
        body,
        inputs,
        scalars,
        outputs,
        name=name,
        reference=whole,
        tiling=tiling,
        engine=engine,
    )
    hi, lo, rest = (
        results[: 1 + both],
        results[1 + both : 2 + 2 * both],
        results[2 + 2 * both :],
    )
    scales = (
        [lax.bitcast_convert_type(x, SCALE_DTYPE) for x in rest[:2]]
        if block
        else scalars[1:]
    )
    of_both = (scales, [scale.T for scale in scales])
    parts = zip(hi, lo, of_both, strict=False)
    rows, *columns = (
        Operand(h, s[0], l, s[1] if block else None, scaling) for h, l, s in parts
    )
    return Quantized(
        rows, columns[0] if both else None, rest[-1] if has_error else None
    )
