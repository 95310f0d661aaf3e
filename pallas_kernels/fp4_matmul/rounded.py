"""Few rows of x, rounded by every block itself while its first codes arrive: W4A8 in a single kernel, in PTX.

A kernel that rounds a row before takes 2 to 3 us, most of which a kernel takes that does nothing, and a weight of
4096 x 4096 is multiplied in 8. So each block finds the scales and rounds all of its rows again, 16 KB of bfloat16 from
the cache at k = 8192, which stay in shared memory. Values and scales are those of `reference.quantize_rows`, bit for
bit, in the order of `decode_fp8.permuted`.

A unit is two steps of a row, four values for each thread of a warpgroup; the units of a row go to warpgroups in turn:

    largest[row, warp] = max |x| of the units of the warp's group     then warpgroups meet
    word of four E4M3  = x * multiplier(max over warps)               then they meet again
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector

from pallas_kernels import numerics
from pallas_kernels.fp4_matmul import decode_fp8, owned

# As many as a product has at least; those behind the last row of x are zeros.
ROWS = 8
_UNIT = 2 * decode_fp8.STEP
FOURS = plgpu.Layout.WG_STRIDED((_UNIT,), 4)
WARPS = 4  # of a warpgroup

_LARGEST = 448.0
_FLOOR = np.float32(numerics.FLOAT32_SCALE_FLOOR)
_OF_FLOOR = np.float32(_LARGEST / numerics.FLOAT32_SCALE_FLOOR)

# $0, the larger magnitudes of the two bfloat16 of $1, which are magnitudes, and of $2: bits of NaN are the largest.
_LARGER = "{.reg .b32 t; and.b32 t, $2, 0x7FFF7FFF; max.u16x2 $0, $1, t;}"
# The largest of a warp's pairs $0, written at $1 by its first thread.
_WRITE_LARGEST = """{.reg .b32 low, high; .reg .pred first;
and.b32 low, $0, 0xFFFF;
shr.u32 high, $0, 16;
max.u32 low, low, high;
redux.sync.max.u32 low, low, 0xFFFFFFFF;
mov.u32 high, %laneid;
setp.eq.u32 first, high, 0;
@first st.shared.b32 [$1], low;
}"""
# $0, the larger of the words $1 and that at $2 + $3.
_LARGER_AT = "{.reg .b32 t; add.u32 t, $2, $3; ld.shared.b32 t, [t]; max.u32 $0, $1, t;}"
# Multiplier $0 and scale $1 of the magnitude with the upper bits $2, see `numerics.scale_and_inverse`: 448 / max(amax,
# floor) and its reciprocal, both rounded to nearest, NaN where amax is not finite.
_SCALE = f"""{{.reg .f32 amax, multiplier, scale; .reg .b32 bits; .reg .pred small, broken;
shl.b32 bits, $2, 16;
mov.b32 amax, bits;
setp.le.f32 small, amax, 0f{_FLOOR.view(np.uint32):08X};
div.rn.f32 multiplier, 0f{np.float32(_LARGEST).view(np.uint32):08X}, amax;
selp.f32 multiplier, 0f{_OF_FLOOR.view(np.uint32):08X}, multiplier, small;
rcp.rn.f32 scale, multiplier;
setp.ge.u32 broken, $2, 0x7F80;
selp.f32 multiplier, 0f7FC00000, multiplier, broken;
selp.f32 scale, 0f7FC00000, scale, broken;
mov.b32 $0, multiplier;
mov.b32 $1, scale;
}}"""
# Four E4M3 at $0 of the pairs of bfloat16 $1 and $2 times the multiplier $3; subnormals are read as zeros.
WRITE_ROUNDED = """{.reg .f32 a, b, c, d, by; .reg .b32 t, word; .reg .b16 low, high;
mov.b32 by, $3;
shl.b32 t, $1, 16;
mov.b32 a, t;
and.b32 t, $1, 0xFFFF0000;
mov.b32 b, t;
shl.b32 t, $2, 16;
mov.b32 c, t;
and.b32 t, $2, 0xFFFF0000;
mov.b32 d, t;
mul.rn.ftz.f32 a, a, by;
mul.rn.ftz.f32 b, b, by;
mul.rn.ftz.f32 c, c, by;
mul.rn.ftz.f32 d, d, by;
cvt.rn.satfinite.e4m3x2.f32 low, b, a;
cvt.rn.satfinite.e4m3x2.f32 high, d, c;
mov.b32 word, {low, high};
st.shared.b32 [$0], word;
}"""
_WRITE = "st.shared.b32 [$0], $1;"
# Where thread $1 of a block writes its four values of a unit of row $2: in two steps of 2048 bytes, each two tiles of
# 8 rows of 128 bytes. Word 16 q + i of a step lies at 4 i + q, and 16 bytes lie where their row says.
_PLACE = """{.reg .b32 t;
and.b32 $0, $1, 7;
shl.b32 $0, $0, 4;
and.b32 t, $1, 8;
mad.lo.u32 $0, t, 128, $0;
and.b32 t, $1, 64;
mad.lo.u32 $0, t, 32, $0;
bfe.u32 t, $1, 4, 2;
mad.lo.u32 $0, t, 4, $0;
shl.b32 t, $2, 4;
xor.b32 $0, $0, t;
mad.lo.u32 $0, $2, 128, $0;
}"""


def serves(k: int) -> bool:
    """Whether so much of a row is units, the last of which may overlap."""
    return k >= _UNIT and k % decode_fp8.STEP == 0


def round_rows(x: Any, first_step: Any, smem: dict[str, Any], meet: Callable[[int], None]) -> None:
    """Write the values of this block's part of k, E4M3, and the scales of its rows: the work of all warpgroups.

    Args:
      x: in global memory, bfloat16 `[m, k]`, at most `ROWS` rows.
      first_step: of the part.
      smem: x, E4M3 `[steps of the part, ROWS, step]` as `decode_fp8` multiplies it, "largest", uint32 `[ROWS, warps]`,
        and "scales_of_rows", float32 `[ROWS]`.
      meet: where a warpgroup waits for the others, for the first and the second time.
    """
    (m, k), warps, size = x.shape, smem["largest"].shape[1], decode_fp8.STEP
    load = lambda row, step: plgpu.load(x.at[row, pl.ds(step * size, _UNIT)], layout=FOURS, optimized=False)
    for row in range(m):
        write_largest(row, smem["largest"], [load(row, step) for step in share_of(k // size, warps // WARPS)])
    meet(0)
    for row in range(ROWS):
        share = share_of(smem["x"].shape[0], warps // WARPS)
        found = [load(row, first_step + step) for step in share] if row < m else []
        refs = plgpu.RefType(), plgpu.RefType(), *[owned.CODES] * len(share)
        run = plgpu.inline_mgpu(arg_types=(*refs, *[FOURS] * len(found)))
        run(functools.partial(_write_rounded, row, len(share)))(
            smem["largest"], smem["scales_of_rows"], *(smem["x"].at[step] for step in share), *found
        )
    plgpu.commit_smem()
    meet(1)


def share_of(steps: int, warpgroups: int) -> list[Any]:
    """Where units of a warpgroup begin, of so many steps: those behind the last one are the last one again."""
    turns = range(-(-steps // (2 * warpgroups)))
    return [jnp.minimum(2 * (lax.axis_index("warpgroup") + turn * warpgroups), steps - 2) for turn in turns]


def pairs_of(fours: Any) -> list[Any]:
    """A thread's four bfloat16 as two words."""
    (register,) = fours.registers.reshape(-1)
    words = vector.bitcast(ir.VectorType.get((2,), ir.IntegerType.get_signless(32)), register)
    return [vector.extract(words, [], [i]) for i in range(2)]


def write_largest(row: int, largest: Any, found: list[Any]) -> None:
    """Write the largest magnitude of these units, of each warp, to a row of `largest`, uint32 `[rows, warps]`."""
    run = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *[FOURS] * len(found)))
    run(functools.partial(_write_largest, row))(largest, *found)


def _write_largest(row: int, context: Any, largest: Any, *found: Any) -> None:
    pairs = [pair for fours in found for pair in pairs_of(fours)]
    store_largest(row, pairs, owned.address(largest), warps_of(largest), mgpu.utils.thread_idx())


def _write_rounded(row: int, turns: int, context: Any, largest: Any, scales: Any, *operands: Any) -> None:
    units, found = [owned.address(unit) for unit in operands[:turns]], operands[turns:]
    places = places_of(row, units, mgpu.utils.thread_idx())
    if not found:
        for at in places:
            owned.effect([at, owned.constant(0)], _WRITE)
        return
    multiplier, scale = scale_of(row, owned.address(largest), warps_of(largest))
    for at, fours in zip(places, found, strict=True):
        owned.effect([at, *pairs_of(fours), multiplier], WRITE_ROUNDED)
    # Every thread writes the same.
    owned.effect([_sum(owned.address(scales), owned.constant(4 * row)), scale], _WRITE)


def store_largest(row: int, pairs: list[Any], largest: Any, warps: int, thread: Any) -> None:
    """Write the largest magnitude of a warp's pairs of bfloat16 to its place in a row of words, `[ROWS, warps]`."""
    top = owned.constant(0)
    for pair in pairs:
        (top,) = owned.words(1, [top, pair], _LARGER)
    (of_warp,) = owned.words(1, [thread], "{shr.u32 $0, $1, 5; shl.b32 $0, $0, 2;}")
    owned.effect([top, _sum(_of_row(row, largest, warps), of_warp)], _WRITE_LARGEST)


def scale_of(row: int, largest: Any, warps: int) -> list[Any]:
    """The multiplier and the scale of a row, from what its warps found."""
    top = owned.constant(0)
    for warp in range(warps):
        at = [_of_row(row, largest, warps), owned.constant(4 * warp)]
        (top,) = owned.words(1, [top, *at], _LARGER_AT, effects=True)
    return owned.words(2, [top], _SCALE)


def places_of(row: int, units: list[Any], thread: Any) -> list[Any]:
    """Where a thread writes its word of a row in each of these units."""
    (place,) = owned.words(1, [thread, owned.constant(row)], _PLACE)
    return [_sum(unit, place) for unit in units]


def _of_row(row: int, largest: Any, warps: int) -> Any:
    return _sum(largest, owned.constant(4 * row * warps))


def _sum(a: Any, b: Any) -> Any:
    return owned.words(1, [a, b], "add.u32 $0, $1, $2;")[0]


def warps_of(largest: Any) -> int:
    """Warps that have a place in a row of `largest`."""
    return int(ir.MemRefType(largest.type).shape[1])
