"""The rows of x in E4M3, rounded by each block of the Hopper kernel itself.

Values and scales equal those of `reference.quantize_rows`, bit for bit.

This is for few rows. A kernel before the product takes 2 to 3 us, mostly for being a
kernel, and a weight of 4096 x 4096 is multiplied in 8. So each block of the product
rounds all rows itself while its first codes arrive, 16 KB of bfloat16 from the cache at
k = 8192, and keeps them in shared memory. At m = 1 that is 11 % faster in the geometric
mean over Llama-3-8B's weights on an H100
(`benchmarks/results/fp4_variants-h100.json`).

A unit is two steps of a row, four values for each thread of a warpgroup; the units of a
row go to warpgroups in turn:

    largest[row, warp] = max |x| of the units of the warp's group   then warpgroups meet
    word of four E4M3  = x * multiplier(max over warps)             then they meet again
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, Ref, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import FragmentedArray
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector
from jaxlib.mlir.ir import Value

from pallas_kernels import numerics
from pallas_kernels.fp4_matmul import decode

# Rows of a product at least; those behind the last row of x are zeros.
ROWS = 8
_STEP = decode.step_of("nvfp4")
_UNIT = 2 * _STEP
_FOURS = plgpu.Layout.WG_STRIDED((_UNIT,), 4)
_WARPS = 4  # a warpgroup has 4

_LARGEST = 448.0
_FLOOR = np.float32(numerics.FLOAT32_SCALE_FLOOR)
_OF_FLOOR = np.float32(_LARGEST / numerics.FLOAT32_SCALE_FLOOR)

# $0, the larger magnitudes of the two bfloat16 of $1, which are magnitudes, and of $2:
# bits of NaN are the largest.
_LARGER = "{.reg .b32 t; and.b32 t, $2, 0x7FFF7FFF; max.u16x2 $0, $1, t;}"
# The largest of a warp's pairs $0, written at $1 by its first thread.
_WRITE_LARGEST = """{.reg .b32 low, high; .reg .pred first;
and.b32 low, $0, 0xFFFF; shr.u32 high, $0, 16;
max.u32 low, low, high; redux.sync.max.u32 low, low, 0xFFFFFFFF;
mov.u32 high, %laneid; setp.eq.u32 first, high, 0;
@first st.shared.b32 [$1], low;}"""
# $0, the larger of the words $1 and that at $2 + $3.
_LARGER_AT = (
    "{.reg .b32 t; add.u32 t, $2, $3; ld.shared.b32 t, [t]; max.u32 $0, $1, t;}"
)
# Multiplier $0 and scale $1 of the magnitude with the upper bits $2, see
# `numerics.scale_and_inverse`: 448 / max(amax, floor) and its reciprocal, both rounded
# to nearest, NaN if amax is not finite.
_SCALE = f"""{{.reg .f32 amax, multiplier, scale;
.reg .b32 bits; .reg .pred small, broken;
shl.b32 bits, $2, 16; mov.b32 amax, bits;
setp.le.f32 small, amax, 0f{_FLOOR.view(np.uint32):08X};
div.rn.f32 multiplier, 0f{np.float32(_LARGEST).view(np.uint32):08X}, amax;
selp.f32 multiplier, 0f{_OF_FLOOR.view(np.uint32):08X}, multiplier, small;
rcp.rn.f32 scale, multiplier;
setp.ge.u32 broken, $2, 0x7F80;
selp.f32 multiplier, 0f7FC00000, multiplier, broken;
selp.f32 scale, 0f7FC00000, scale, broken;
mov.b32 $0, multiplier; mov.b32 $1, scale;}}"""
# Four E4M3 at $0 of the pairs of bfloat16 $1 and $2 times the multiplier $3; subnormals
# are read as zeros.
WRITE_ROUNDED = """{.reg .f32 a, b, c, d, by; .reg .b32 t, word; .reg .b16 low, high;
mov.b32 by, $3;
shl.b32 t, $1, 16; mov.b32 a, t;
and.b32 t, $1, 0xFFFF0000; mov.b32 b, t;
shl.b32 t, $2, 16; mov.b32 c, t;
and.b32 t, $2, 0xFFFF0000; mov.b32 d, t;
mul.rn.ftz.f32 a, a, by; mul.rn.ftz.f32 b, b, by;
mul.rn.ftz.f32 c, c, by; mul.rn.ftz.f32 d, d, by;
cvt.rn.satfinite.e4m3x2.f32 low, b, a; cvt.rn.satfinite.e4m3x2.f32 high, d, c;
mov.b32 word, {low, high}; st.shared.b32 [$0], word;}"""
_WRITE = "st.shared.b32 [$0], $1;"
# Where thread $1 of a block writes its four values of a unit of row $2: in two steps of
# 2048 bytes, each two tiles of 8 rows of 128 bytes. Word 16 q + i of a step lies at 4 i
# + q, and 16 bytes lie where their row says.
_PLACE = """{.reg .b32 t;
and.b32 $0, $1, 7; shl.b32 $0, $0, 4;
and.b32 t, $1, 8; mad.lo.u32 $0, t, 128, $0;
and.b32 t, $1, 64; mad.lo.u32 $0, t, 32, $0;
bfe.u32 t, $1, 4, 2; mad.lo.u32 $0, t, 4, $0;
shl.b32 t, $2, 4; xor.b32 $0, $0, t;
mad.lo.u32 $0, $2, 128, $0;}"""


def round_rows(
    x: Ref,
    first_step: Array,
    smem: dict[str, Ref],
    meet: Callable[[int], None],
) -> None:
    """Write the E4M3 values of a block's part of k, and the scales of its rows.

    All warpgroups of the block share this work.

    Args:
      x: bfloat16 `[m, k]` in global memory, at most `ROWS` rows.
      first_step: number of the first step of the block's part.
      smem: "x", E4M3 `[steps of the part, ROWS, step]`; "largest", uint32
        `[ROWS, warps]`; and "scales_of_rows", float32 `[ROWS]`.
      meet: lets a warpgroup wait for the others, for the first and the second time.
    """
    m, k = x.shape
    warpgroups = smem["largest"].shape[1] // _WARPS
    for row in range(m):
        found = _load(x, row, _share_of(k // _STEP, warpgroups))
        run = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *[_FOURS] * len(found)))
        run(partial(_write_largest, row))(smem["largest"], *found)
    meet(0)
    for row in range(ROWS):
        share = _share_of(smem["x"].shape[0], warpgroups)
        found = []
        if row < m:
            found = _load(x, row, [first_step + step for step in share])
        units = [smem["x"].at[step] for step in share]
        refs = [plgpu.RefType(), plgpu.RefType(), *[decode.CODES] * len(units)]
        run = plgpu.inline_mgpu(arg_types=(*refs, *[_FOURS] * len(found)))
        run(partial(_write_rounded, row, len(units)))(
            smem["largest"], smem["scales_of_rows"], *units, *found
        )
    plgpu.commit_smem()
    meet(1)


def _share_of(steps: int, warpgroups: int) -> list[Array]:
    """Return the first steps of a warpgroup's units.

    A unit behind the last step is the last one again.
    """
    turns = range(-(-steps // (2 * warpgroups)))
    return [
        jnp.minimum(2 * (lax.axis_index("warpgroup") + turn * warpgroups), steps - 2)
        for turn in turns
    ]


def _load(x: Ref, row: int, steps: list[Array]) -> list[Array]:
    """Return the units of a row that begin at these steps."""
    return [
        plgpu.load(
            x.at[row, pl.ds(step * _STEP, _UNIT)], layout=_FOURS, optimized=False
        )
        for step in steps
    ]


def _write_largest(
    row: int,
    _: object,
    largest: Value,
    *found: FragmentedArray,
) -> None:
    pairs = []
    for fours in found:
        pairs += _pairs_of(fours)
    place = decode.address(largest)
    thread = mgpu.utils.thread_idx()
    _store_largest(row, pairs, place, _warps_in(largest), thread)


def _write_rounded(
    row: int,
    turns: int,
    _: object,
    largest: Value,
    scales: Value,
    *operands: Any,
) -> None:
    """Write a row: `operands` are its units, then their values, or none for zeros."""
    units = [decode.address(unit) for unit in operands[:turns]]
    found = operands[turns:]
    places = _places_of(row, units, mgpu.utils.thread_idx())
    if not found:
        for at in places:
            decode.effect([at, decode.constant(0)], _WRITE)
        return
    multiplier, scale = _scale_of(row, decode.address(largest), _warps_in(largest))
    for at, fours in zip(places, found, strict=True):
        decode.effect([at, *_pairs_of(fours), multiplier], WRITE_ROUNDED)
    # Every thread writes the same.
    place = _sum(decode.address(scales), decode.constant(4 * row))
    decode.effect([place, scale], _WRITE)


def _pairs_of(fours: FragmentedArray) -> list[Value]:
    """Return a thread's four bfloat16 as two words."""
    (register,) = fours.registers.reshape(-1)
    words = ir.VectorType.get((2,), ir.IntegerType.get_signless(32))
    both = vector.bitcast(words, register)
    return [vector.extract(both, [], [i]) for i in range(2)]


def _store_largest(
    row: int,
    pairs: list[Value],
    largest: Value,
    warps: int,
    thread: Value,
) -> None:
    """Write the largest magnitude of a warp's pairs of bfloat16.

    Its place is in a row of words, `[ROWS, warps]`.
    """
    top = decode.constant(0)
    for pair in pairs:
        (top,) = decode.words(1, [top, pair], _LARGER)
    (of_warp,) = decode.words(1, [thread], "{shr.u32 $0, $1, 5; shl.b32 $0, $0, 2;}")
    decode.effect([top, _sum(_of_row(row, largest, warps), of_warp)], _WRITE_LARGEST)


def _scale_of(row: int, largest: Value, warps: int) -> list[Value]:
    """Return the multiplier and the scale of a row, from the maxima of its warps."""
    top = decode.constant(0)
    for warp in range(warps):
        at = [_of_row(row, largest, warps), decode.constant(4 * warp)]
        (top,) = decode.words(1, [top, *at], _LARGER_AT, effects=True)
    return decode.words(2, [top], _SCALE)


def _places_of(row: int, units: list[Value], thread: Value) -> list[Value]:
    """Return the places of a thread's word of a row in each of these units."""
    (place,) = decode.words(1, [thread, decode.constant(row)], _PLACE)
    return [_sum(unit, place) for unit in units]


def _of_row(row: int, largest: Value, warps: int) -> Value:
    return _sum(largest, decode.constant(4 * row * warps))


def _sum(a: Value, b: Value) -> Value:
    return decode.words(1, [a, b], "add.u32 $0, $1, $2;")[0]


def _warps_in(largest: Value) -> int:
    return int(ir.MemRefType(largest.type).shape[1])
