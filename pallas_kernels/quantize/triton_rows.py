"""`quantize` with a scale for every row, and for every column, in Pallas-Triton.

Bytes that move for each value of bfloat16 (XLA's passes in brackets):

    "rows"   3     a program holds whole rows: x is read once, and its FP8 values are
                   written (5)
    "both"   6.1   the scale of a column needs every row, so x is read twice: one kernel
                   finds the largest magnitude of each row and column of every tile,
                   another scales and turns (10)

Between these two, one small kernel for rows and one for columns turn the magnitudes, a
byte for every 13 values, into scales. The last kernel takes the tiles in the opposite
order of the first, so that it first reads the tiles that were read last and may still
be in the cache.

Under a mesh each device runs these kernels on its own part, and only the largest
magnitude of each line that devices share crosses the mesh. If rows are split, "rows"
takes two passes as well.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import jax.numpy as jnp
from jax import Array, Ref, ShapeDtypeStruct, lax
from jax.typing import ArrayLike, DTypeLike

from pallas_kernels import numerics
from pallas_kernels import pallas_triton as plgpu
from pallas_kernels.arithmetic import Portable
from pallas_kernels.dispatch import Implementation
from pallas_kernels.operands import Operand, Quantization, Quantized
from pallas_kernels.partition import BlocksOf, partitioned
from pallas_kernels.specs import Axes, device_count, varying
from pallas_kernels.tiled import WIDE

_Place: TypeAlias = tuple[ArrayLike, ...]

# Sides and warps of a tile of magnitudes: 64 values a thread, in 45 registers. It takes
# 6.7 instructions a value and 128 x 128 takes 7.7. A thread with 128 values would take
# 5.5, but leave half as many programs.
_ROWS = (64, 32)
_COLUMNS = (256, 128, 64, 32)
_WARPS = 8
# Lines whose scales one program finds, and the most tiles whose magnitudes it can
# compare.
_LINES = 32
MOST_TILES = 1024
# Longest row, and fewest values, of a program that holds whole rows.
LONGEST_ROW = 32768
_FEWEST = 4096
# Values that a thread holds in both, and the most warps of a program; beyond these a
# thread holds more values.
_VALUES_PER_THREAD = 32
_MOST_WARPS = 16


def _reject(options: Quantization, x: Array, amax: Array | None) -> str | None:
    """Return the reason why this kernel cannot quantize x, or None."""
    return None if x.size else f'x{list(x.shape)} has no values; use backend="xla"'


def _quantize(options: Quantization, x: Array, amax: Array | None) -> Quantized:
    """Return the quantized tensor, see `api.quantize`."""
    *leading, k = x.shape
    m = math.prod(leading)
    scaling = options.scaling
    split = partial(partitioned, merged={"i": tuple(leading)})
    if options.orientation == "rows":
        values, scale = split(partial(_rows, options), "i j -> i j, i")(x)
        return Quantized(Operand(values, scale, scaling=scaling))
    sides = _side(m, _ROWS), _side(k, _COLUMNS)
    blocks = {"p": BlocksOf("i", sides[0], m), "q": BlocksOf("j", sides[1], k)}
    find_tops = split(partial(_tops, sides), "i j -> q i, p j", blocks)
    row_tops, column_tops = find_tops(x)
    find = partial(_scales, options)
    row_inverses, of_rows = split(find, "q i -> i, i")(row_tops)
    column_inverses, of_columns = split(find, "p j -> j, j")(column_tops)
    apply = split(partial(_apply, options.dtype), "i j, i, j -> i j, j i")
    values, turned = apply(x, row_inverses, column_inverses)
    rows = Operand(values, of_rows, scaling=scaling)
    return Quantized(rows, Operand(turned, of_columns, scaling=scaling))


TRITON = Implementation("triton", _quantize, _reject, timed=True)


def _side(size: int, sides: tuple[int, ...]) -> int:
    """Return the largest side of a tile that gives every device of a mesh whole tiles.

    Return the largest one if none does.
    """
    for side in sides:
        if size % (side * device_count()) == 0:
            return side
    return sides[0]


def _rows(
    options: Quantization,
    x: Array,
    *,
    summed_over: Axes,
) -> list[Array]:
    """Return values `[m, k]` and scales `[m]`.

    Axes `summed_over` hold the rest of x's rows.
    """
    if not summed_over and x.shape[1] <= LONGEST_ROW:
        return plgpu.on_platform(partial(_call_rows, options), x)
    inverse, scale = _scales_by_xla(options, x, 1, summed_over)
    return [_apply(options.dtype, x, inverse)[0], scale]


def _tops(
    sides: tuple[int, int],
    x: Array,
    *,
    summed_over: Axes = (),
) -> list[Array]:
    """Return the largest magnitudes of the rows of every tile and of its columns.

    They are `[k / side, m]` and `[m / side, k]`.
    """
    return plgpu.on_platform(partial(_call_tops, sides), x)


def _scales(
    options: Quantization,
    tops: Array,
    *,
    summed_over: Axes,
) -> list[Array]:
    """Return inverse scales and scales `[n]` of lines from `_tops`.

    Axes `summed_over` hold tiles of the same lines.
    """
    if not summed_over and tops.shape[0] <= MOST_TILES:
        return plgpu.on_platform(partial(_call_scales, options), tops)
    return _scales_by_xla(options, tops, 0, summed_over)


def _scales_by_xla(
    options: Quantization,
    x: Array,
    axis: int,
    summed_over: Axes,
) -> list[Array]:
    amax = numerics.amax_by_bits(x.astype(jnp.float32), axis)
    if summed_over:
        # As integers, because a maximum over a network may drop NaN.
        bits = lax.pmax(numerics.bits(amax), summed_over)
        amax = numerics.from_bits(bits)
    scale, inverse = scales_of(options, amax, Portable())
    return [inverse, scale]


def _apply(
    dtype: DTypeLike,
    *operands: Array,
    summed_over: Axes = (),
) -> list[Array]:
    """Return x times the inverse scales of its rows.

    If inverse scales of columns are given, also return x times these, transposed.
    """
    return plgpu.on_platform(partial(_call_apply, dtype), *operands)


# Kernels
# --------------------------------------------------------------------------------------


def _call_tops(sides: tuple[int, int], x: Array, *, interpret: bool) -> list[Array]:
    from jax.experimental import pallas as pl

    m, k = x.shape
    rows, columns = sides
    grid = pl.cdiv(m, rows), pl.cdiv(k, columns)
    dtype = x.dtype if x.dtype.itemsize == 2 else jnp.dtype(jnp.float32)

    def kernel(x_ref: Ref, rows_ref: Ref, columns_ref: Ref) -> None:
        i = pl.program_id(0)
        j = pl.program_id(1)
        inside = _inside((m, k), sides, (i, j))
        wide = _load(x_ref, inside).astype(jnp.float32)
        of_rows = numerics.amax_by_bits(wide, 1)
        inside = _inside((m,), (rows,), (i,))
        plgpu.store(rows_ref, of_rows.astype(dtype), mask=inside)
        of_columns = numerics.amax_by_bits(wide, 0)
        inside = _inside((k,), (columns,), (j,))
        plgpu.store(columns_ref, of_columns.astype(dtype), mask=inside)

    shapes = [
        ShapeDtypeStruct((grid[1], m), dtype),
        ShapeDtypeStruct((grid[0], k), dtype),
    ]
    return _launch(
        kernel,
        shapes,
        [x],
        grid=grid,
        in_specs=[pl.BlockSpec(sides, lambda i, j: (i, j))],
        out_specs=[
            pl.BlockSpec((None, rows), lambda i, j: (j, i)),
            pl.BlockSpec((None, columns), lambda i, j: (i, j)),
        ],
        warps=_WARPS,
        interpret=interpret,
        name="row_magnitudes",
    )


def _call_apply(
    dtype: DTypeLike,
    x: Array,
    *inverses: Array,
    interpret: bool,
) -> list[Array]:
    from jax.experimental import pallas as pl

    m, k = x.shape
    rows, columns, warps = WIDE.fit(m, k) or (64, 64, 8)
    grid = pl.cdiv(m, rows), pl.cdiv(k, columns)
    do = plgpu.operations(interpret)
    has_columns = len(inverses) > 1

    # Tiles are taken from the last one to the first.
    def at(i: ArrayLike, j: ArrayLike) -> tuple[ArrayLike, ArrayLike]:
        return grid[0] - 1 - i, grid[1] - 1 - j

    def turned(i: ArrayLike, j: ArrayLike) -> _Place:
        return at(i, j)[::-1]

    def of_rows(i: ArrayLike, j: ArrayLike) -> _Place:
        return at(i, j)[:1]

    def of_columns(i: ArrayLike, j: ArrayLike) -> _Place:
        return at(i, j)[1:]

    def scaled(wide: Array, inverse: Array) -> Array:
        # Nothing is clipped, because the scale of a line covers its values.
        return do.scaled(wide, inverse, dtype).astype(dtype)

    def kernel(x_ref: Ref, *refs: Ref) -> None:
        i, j = at(pl.program_id(0), pl.program_id(1))
        inside = _inside((m, k), (rows, columns), (i, j))
        wide = _load(x_ref, inside).astype(jnp.float32)
        inside_rows = _inside((m,), (rows,), (i,))
        inverse = _load(refs[0], inside_rows)
        values = scaled(wide, inverse[:, None])
        plgpu.store(refs[len(inverses)], values, mask=inside)
        if has_columns:
            inside_columns = _inside((k,), (columns,), (j,))
            inverse = _load(refs[1], inside_columns)
            values = scaled(wide, inverse[None, :]).T
            inside = _inside((k, m), (columns, rows), (j, i))
            plgpu.store(refs[3], values, mask=inside)

    count = len(inverses)
    vectors = [pl.BlockSpec((rows,), of_rows), pl.BlockSpec((columns,), of_columns)]
    matrix = pl.BlockSpec((rows, columns), at)
    results = [matrix, pl.BlockSpec((columns, rows), turned)]
    shapes = [ShapeDtypeStruct((m, k), dtype), ShapeDtypeStruct((k, m), dtype)]
    return _launch(
        kernel,
        shapes[:count],
        [x, *inverses],
        grid=grid,
        in_specs=[matrix, *vectors[:count]],
        out_specs=results[:count],
        warps=warps,
        interpret=interpret,
        name="row_quantize",
    )


def _call_scales(options: Quantization, tops: Array, *, interpret: bool) -> list[Array]:
    from jax.experimental import pallas as pl

    tiles, n = tops.shape
    sides = pl.next_power_of_2(tiles), _LINES
    do = plgpu.operations(interpret)

    def kernel(tops_ref: Ref, inverse_ref: Ref, scale_ref: Ref) -> None:
        i = pl.program_id(0)
        inside = _inside((tiles, n), sides, (0, i))
        found = _load(tops_ref, inside).astype(jnp.float32)
        amax = numerics.amax_by_bits(found, 0)
        scale, inverse = scales_of(options, amax, do)
        inside = _inside((n,), (_LINES,), (i,))
        plgpu.store(inverse_ref, inverse, mask=inside)
        plgpu.store(scale_ref, scale, mask=inside)

    vector = pl.BlockSpec((_LINES,), lambda i: (i,))
    return _launch(
        kernel,
        [ShapeDtypeStruct((n,), jnp.float32)] * 2,
        [tops],
        grid=(pl.cdiv(n, _LINES),),
        in_specs=[pl.BlockSpec(sides, lambda i: (0, i))],
        out_specs=[vector, vector],
        warps=warps_of(sides),
        interpret=interpret,
        name="row_scales",
    )


def _call_rows(options: Quantization, x: Array, *, interpret: bool) -> list[Array]:
    from jax.experimental import pallas as pl

    m, k = x.shape
    dtype = options.dtype
    width = pl.next_power_of_2(k)
    rows = max(1, _FEWEST // width)
    sides = rows, width
    do = plgpu.operations(interpret)

    def kernel(x_ref: Ref, values_ref: Ref, scale_ref: Ref) -> None:
        i = pl.program_id(0)
        inside = _inside((m, k), sides, (i, 0))
        wide = _load(x_ref, inside).astype(jnp.float32)
        amax = numerics.amax_by_bits(wide, 1, keepdims=True)
        scale, inverse = scales_of(options, amax, do)
        # Nothing is clipped, because the scale of a row covers its values.
        values = do.scaled(wide, inverse, dtype).astype(dtype)
        plgpu.store(values_ref, values, mask=inside)
        inside = _inside((m,), (rows,), (i,))
        plgpu.store(scale_ref, scale.reshape(rows), mask=inside)

    matrix = pl.BlockSpec(sides, lambda i: (i, 0))
    shapes = [
        ShapeDtypeStruct((m, k), dtype),
        ShapeDtypeStruct((m,), jnp.float32),
    ]
    return _launch(
        kernel,
        shapes,
        [x],
        grid=(pl.cdiv(m, rows),),
        in_specs=[matrix],
        out_specs=[matrix, pl.BlockSpec((rows,), lambda i: (i,))],
        warps=warps_of(sides),
        interpret=interpret,
        name="whole_row_quantize",
    )


def _launch(
    kernel: Callable[..., None],
    shapes: list[ShapeDtypeStruct],
    operands: list[Array],
    *,
    warps: int,
    **options: object,
) -> list[Array]:
    """Run a kernel on operands; `shapes` are those of the results."""
    run = plgpu.pallas_call(
        kernel,
        out_shape=varying(shapes, *operands),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
        **options,
    )
    results: list[Array] = run(*operands)
    return results


def warps_of(sides: tuple[int, int]) -> int:
    """Return the warps of a program that holds whole lines."""
    warps = sides[0] * sides[1] // (32 * _VALUES_PER_THREAD)
    return min(_MOST_WARPS, max(1, warps))


def scales_of(options: Quantization, amax: Array, do: Portable) -> tuple[Array, Array]:
    """Return (scales, inverse scales) of lines with these largest magnitudes."""
    scale = options.scaling.scale
    return numerics.scale_and_inverse(amax, options.dtype, scale, division=do.divide)


def _inside(
    whole: tuple[int, ...],
    sides: tuple[int, ...],
    place: _Place,
) -> Array | None:
    """Return a mask of the values of the tile at `place` that the array has.

    Return None if its sides divide the array.
    """
    mask: Array | None = None
    for axis, (size, side, index) in enumerate(zip(whole, sides, place, strict=True)):
        if size % side:
            within = index * side + lax.broadcasted_iota(jnp.int32, sides, axis)
            is_inside = jnp.less(within, size)
            mask = is_inside if mask is None else mask & is_inside
    return mask


def _load(ref: Ref, mask: Array | None) -> Array:
    """Return a tile, with zeros outside of the mask."""
    return ref[...] if mask is None else plgpu.load(ref, mask=mask, other=0)
