"""`quantize` with a scale for every row in Pallas-Triton, and for every column if both
orientations are asked for.

Bytes that move for each value of bfloat16 (XLA's passes in brackets):

    "rows"   3     a program holds whole rows: x is read once, and its FP8 values are written          (5)
    "both"   6.1   the scale of a column needs every row, so x is read twice: one kernel finds the
                   largest magnitude of each row and column of every tile, another scales and turns    (10)

Between these two, one small kernel for rows and one for columns turn the magnitudes, a
byte for every 13 values, into scales. The last kernel takes the tiles in the opposite
order of the first, so that it first reads the tiles that were read last and may still
be in the cache.

Under a mesh each device runs these kernels on its own part, and only the largest
magnitude of each line that devices share crosses the mesh. If rows are split, "rows"
takes two passes as well.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels import numerics
from pallas_kernels import pallas_triton as plgpu
from pallas_kernels.operands import Operand, Quantization, Quantized
from pallas_kernels.partition import BlocksOf, partitioned
from pallas_kernels.specs import device_count, varying
from pallas_kernels.tiled import WIDE

# Sides and warps of a tile of magnitudes: 64 values a thread, in 45 registers. It takes
# 6.7 instructions a value and 128 x 128 takes 7.7. A thread with 128 values would take
# 5.5, but leave half as many programs.
_ROWS, _COLUMNS, _WARPS = (64, 32), (256, 128, 64, 32), 8
# Lines whose scales one program finds, and the most tiles whose magnitudes it can
# compare.
_LINES, MOST_TILES = 32, 1024
# Longest row, and fewest values, of a program that holds whole rows.
LONGEST_ROW, _FEWEST = 32768, 4096
# Values that a thread holds in both, and the most warps of a program; beyond these a
# thread holds more values.
_VALUES_PER_THREAD, _MOST_WARPS = 32, 16


def reject(options: Quantization, x: jax.Array, amax: jax.Array | None) -> str | None:
    """Return the reason why this kernel cannot quantize x, or None."""
    return None if x.size else f'x{list(x.shape)} has no values; use backend="xla"'


def quantize(options: Quantization, x: jax.Array, amax: jax.Array | None) -> Quantized:
    """Return the quantized tensor, see `api.quantize`."""
    *leading, k = x.shape
    m, split = (
        math.prod(leading),
        functools.partial(partitioned, merged={"i": tuple(leading)}),
    )
    if options.orientation == "rows":
        values, scale = split(functools.partial(_rows, options), "i j -> i j, i")(x)
        return Quantized(Operand(values, scale, scaling=options.scaling))
    sides = _side(m, _ROWS), _side(k, _COLUMNS)
    blocks = {"p": BlocksOf("i", sides[0], m), "q": BlocksOf("j", sides[1], k)}
    of_tiles, of_lines = split(
        functools.partial(_tops, sides), "i j -> q i, p j", blocks
    )(x)
    find = functools.partial(_scales, options)
    row_inverses, of_rows = split(find, "q i -> i, i")(of_tiles)
    column_inverses, of_columns = split(find, "p j -> j, j")(of_lines)
    apply = split(functools.partial(_apply, options.dtype), "i j, i, j -> i j, j i")
    values, turned = apply(x, row_inverses, column_inverses)
    rows = Operand(values, of_rows, scaling=options.scaling)
    return Quantized(rows, Operand(turned, of_columns, scaling=options.scaling))


def _side(size: int, sides: tuple[int, ...]) -> int:
    """Return the largest side of a tile that gives every device of a mesh whole tiles,
    else the largest.
    """
    return next(
        (side for side in sides if size % (side * device_count()) == 0), sides[0]
    )


def _rows(
    options: Quantization, x: jax.Array, *, summed_over: tuple[str, ...]
) -> list[jax.Array]:
    """Return values `[m, k]` and scales `[m]`; axes `summed_over` hold the rest of x's
    rows.
    """
    if not summed_over and x.shape[1] <= LONGEST_ROW:
        return plgpu.on_platform(functools.partial(_call_rows, options), x)
    inverse, scale = _scales_by_xla(options, x, 1, summed_over)
    return [_apply(options.dtype, x, inverse)[0], scale]


def _tops(
    sides: tuple[int, int], x: jax.Array, *, summed_over: tuple[str, ...] = ()
) -> list[jax.Array]:
    """Return the largest magnitudes of the rows of every tile, `[k / side, m]`, and of
    its columns, `[m / side, k]`.
    """
    return plgpu.on_platform(functools.partial(_call_tops, sides), x)


def _scales(
    options: Quantization, tops: jax.Array, *, summed_over: tuple[str, ...]
) -> list[jax.Array]:
    """Return inverse scales and scales `[n]` of lines from `_tops`; axes `summed_over`
    hold tiles of the same lines.
    """
    if not summed_over and tops.shape[0] <= MOST_TILES:
        return plgpu.on_platform(functools.partial(_call_scales, options), tops)
    return _scales_by_xla(options, tops, 0, summed_over)


def _scales_by_xla(
    options: Quantization, x: jax.Array, axis: int, summed_over: tuple[str, ...]
) -> list[jax.Array]:
    amax = numerics.amax_by_bits(x.astype(jnp.float32), axis)
    if summed_over:
        # As integers, because a maximum over a network may drop NaN.
        bits = lax.pmax(lax.bitcast_convert_type(amax, jnp.int32), summed_over)
        amax = lax.bitcast_convert_type(bits, jnp.float32)
    scale, inverse = numerics.scale_and_inverse(
        amax, options.dtype, options.scaling.scale
    )
    return [inverse, scale]


def _apply(
    dtype: DTypeLike, *operands: jax.Array, summed_over: tuple[str, ...] = ()
) -> list[jax.Array]:
    """Return x times the inverse scales of its rows and, if given, x times the ones of
    its columns, transposed.
    """
    return plgpu.on_platform(functools.partial(_call_apply, dtype), *operands)


# Kernels
# --------------------------------------------------------------------------------------


def _call_tops(
    sides: tuple[int, int], x: jax.Array, *, interpret: bool
) -> list[jax.Array]:
    from jax.experimental import pallas as pl

    (m, k), (rows, columns) = x.shape, sides
    grid = pl.cdiv(m, rows), pl.cdiv(k, columns)
    dtype = x.dtype if x.dtype.itemsize == 2 else jnp.dtype(jnp.float32)

    def kernel(x_ref: Any, rows_ref: Any, columns_ref: Any) -> None:
        i, j = pl.program_id(0), pl.program_id(1)
        wide = _load(x_ref, _inside((m, k), sides, (i, j))).astype(jnp.float32)
        for axis, ref, size, place in ((1, rows_ref, m, i), (0, columns_ref, k, j)):
            top = numerics.amax_by_bits(wide, axis).astype(dtype)
            plgpu.store(ref, top, mask=_inside((size,), top.shape, (place,)))

    return plgpu.pallas_call(
        kernel,
        out_shape=varying(
            [
                jax.ShapeDtypeStruct((grid[1], m), dtype),
                jax.ShapeDtypeStruct((grid[0], k), dtype),
            ],
            x,
        ),
        grid=grid,
        in_specs=[pl.BlockSpec(sides, lambda i, j: (i, j))],
        out_specs=[
            pl.BlockSpec((None, rows), lambda i, j: (j, i)),
            pl.BlockSpec((None, columns), lambda i, j: (i, j)),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=_WARPS, num_stages=1),
        interpret=interpret,
        name="row_magnitudes",
    )(x)


def _call_apply(
    dtype: DTypeLike, x: jax.Array, *inverses: jax.Array, interpret: bool
) -> list[jax.Array]:
    from jax.experimental import pallas as pl

    m, k = x.shape
    rows, columns, warps = WIDE.fit(m, k) or (64, 64, 8)
    sides = rows, columns
    last = pl.cdiv(m, rows) - 1, pl.cdiv(k, columns) - 1
    # Places of scales and results of rows and columns, from the last tile to the first.
    at = lambda i, j: (last[0] - i, last[1] - j)
    turned = lambda i, j: at(i, j)[::-1]
    of_rows, of_columns = (lambda i, j: at(i, j)[:1]), (lambda i, j: at(i, j)[1:])
    vectors = [pl.BlockSpec(sides[:1], of_rows), pl.BlockSpec(sides[1:], of_columns)]
    results = [pl.BlockSpec(sides, at), pl.BlockSpec(sides[::-1], turned)]
    shapes = [jax.ShapeDtypeStruct((m, k), dtype), jax.ShapeDtypeStruct((k, m), dtype)]
    count = len(inverses)

    def kernel(x_ref: Any, *refs: Any) -> None:
        place = at(pl.program_id(0), pl.program_id(1))
        wide = _load(x_ref, _inside((m, k), sides, place)).astype(jnp.float32)
        for axis, (ref, out_ref) in enumerate(
            zip(refs[:count], refs[count:], strict=True)
        ):
            mask = _inside((m, k)[axis : axis + 1], ref.shape, place[axis : axis + 1])
            inverse = jnp.expand_dims(_load(ref, mask), 1 - axis)
            values = multiplied(wide, inverse, interpret).astype(dtype)
            values, where = (values.T, place[::-1]) if axis else (values, place)
            plgpu.store(
                out_ref,
                values,
                mask=_inside((k, m) if axis else (m, k), values.shape, where),
            )

    return plgpu.pallas_call(
        kernel,
        out_shape=varying(shapes[:count], x, *inverses),
        grid=(last[0] + 1, last[1] + 1),
        in_specs=[pl.BlockSpec(sides, at), *vectors[:count]],
        out_specs=results[:count],
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name="row_quantize",
    )(x, *inverses)


def _call_scales(
    options: Quantization, tops: jax.Array, *, interpret: bool
) -> list[jax.Array]:
    from jax.experimental import pallas as pl

    tiles, n = tops.shape
    sides = pl.next_power_of_2(tiles), _LINES

    def kernel(tops_ref: Any, inverse_ref: Any, scale_ref: Any) -> None:
        i = pl.program_id(0)
        amax = numerics.amax_by_bits(
            _load(tops_ref, _inside((tiles, n), sides, (0, i))).astype(jnp.float32), 0
        )
        scale, inverse = scale_and_inverse(options, amax, interpret)
        for ref, x in ((inverse_ref, inverse), (scale_ref, scale)):
            plgpu.store(ref, x, mask=_inside((n,), sides[1:], (i,)))

    vector = pl.BlockSpec(sides[1:], lambda i: (i,))
    return plgpu.pallas_call(
        kernel,
        out_shape=varying([jax.ShapeDtypeStruct((n,), jnp.float32)] * 2, tops),
        grid=(pl.cdiv(n, _LINES),),
        in_specs=[pl.BlockSpec(sides, lambda i: (0, i))],
        out_specs=[vector, vector],
        compiler_params=plgpu.CompilerParams(num_warps=warps_of(sides), num_stages=1),
        interpret=interpret,
        name="row_scales",
    )(tops)


def _call_rows(
    options: Quantization, x: jax.Array, *, interpret: bool
) -> list[jax.Array]:
    from jax.experimental import pallas as pl

    m, k = x.shape
    width = pl.next_power_of_2(k)
    rows = max(1, _FEWEST // width)
    sides = rows, width

    def kernel(x_ref: Any, values_ref: Any, scale_ref: Any) -> None:
        i = pl.program_id(0)
        inside = _inside((m, k), sides, (i, 0))
        wide = _load(x_ref, inside).astype(jnp.float32)
        scale, inverse = scale_and_inverse(
            options, numerics.amax_by_bits(wide, 1, keepdims=True), interpret
        )
        plgpu.store(
            values_ref,
            multiplied(wide, inverse, interpret).astype(options.dtype),
            mask=inside,
        )
        plgpu.store(scale_ref, scale.reshape(rows), mask=_inside((m,), (rows,), (i,)))

    matrix = pl.BlockSpec(sides, lambda i: (i, 0))
    return plgpu.pallas_call(
        kernel,
        out_shape=varying(
            [
                jax.ShapeDtypeStruct((m, k), options.dtype),
                jax.ShapeDtypeStruct((m,), jnp.float32),
            ],
            x,
        ),
        grid=(pl.cdiv(m, rows),),
        in_specs=[matrix],
        out_specs=[matrix, pl.BlockSpec((rows,), lambda i: (i,))],
        compiler_params=plgpu.CompilerParams(num_warps=warps_of(sides), num_stages=1),
        interpret=interpret,
        name="whole_row_quantize",
    )(x)


def warps_of(sides: tuple[int, int]) -> int:
    """Return the warps of a program that holds whole lines."""
    return min(_MOST_WARPS, max(1, sides[0] * sides[1] // (32 * _VALUES_PER_THREAD)))


def scale_and_inverse(
    options: Quantization, amax: jax.Array, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """Return (scales, inverse scales) of lines with these largest magnitudes, by the
    device's exact division.
    """
    division = (
        numerics.divide
        if interpret
        else functools.partial(plgpu.instruct, "div.rn.f32 $0, $1, $2;")
    )
    return numerics.scale_and_inverse(
        amax, options.dtype, options.scaling.scale, division=division
    )


def _inside(
    whole: tuple[int, ...], sides: tuple[int, ...], place: tuple[Any, ...]
) -> jax.Array | None:
    """Return a mask of the values of the tile at `place` that the array has, or None if
    its sides divide the array.
    """
    mask = None
    for axis, (size, side, index) in enumerate(zip(whole, sides, place, strict=True)):
        if size % side:
            within = index * side + lax.broadcasted_iota(jnp.int32, sides, axis) < size
            mask = within if mask is None else mask & within
    return mask


def _load(ref: Any, mask: jax.Array | None) -> jax.Array:
    """Return a tile, with zeros outside of the mask."""
    return ref[...] if mask is None else plgpu.load(ref, mask=mask, other=0)


def multiplied(x: jax.Array, inverse: jax.Array, interpret: bool) -> jax.Array:
    """Return `flush_subnormal(x) * inverse`; nothing is clipped, because the scale of a
    line covers its values.

    On the device the multiplication itself reads subnormals as zeros of their sign.
    """
    if interpret:
        return numerics.flush_subnormal(x) * inverse
    return plgpu.instruct("mul.rn.ftz.f32 $0, $1, $2;", x, inverse)
