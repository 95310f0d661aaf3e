"""The rows of x in E4M3, rounded before the Hopper kernel or inside it, in the order
that decoded codes meet.

Values and scales equal those of `reference.quantize_rows`, bit for bit.

`ordered` is a kernel of its own: a program rounds a row, and writes it in the order of
`decode.permuted`. XLA would take three kernels for it, which with 64 rows cost a tenth
of the product.

`round_rows` is for few rows. A kernel before the product takes 2 to 3 us, mostly for
being a kernel, and a weight of 4096 x 4096 is multiplied in 8. So each block of the
product rounds all rows itself while its first codes arrive, 16 KB of bfloat16 from the
cache at k = 8192, and keeps them in shared memory. At m = 1 that is 11 % faster in the
geometric mean over Llama-3-8B's weights on an H100
(`benchmarks/results/fp4_variants-h100.json`).

A unit is two steps of a row, four values for each thread of a warpgroup; the units of a
row go to warpgroups in turn:

    largest[row, warp] = max |x| of the units of the warp's group     then warpgroups meet
    word of four E4M3  = x * multiplier(max over warps)               then they meet again
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector

from pallas_kernels import numerics
from pallas_kernels import pallas_triton as pltriton
from pallas_kernels.fp4_matmul import decode, reference
from pallas_kernels.quantize.triton_rows import multiplied, scale_and_inverse, warps_of
from pallas_kernels.specs import varying

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
_SCALE = f"""{{.reg .f32 amax, multiplier, scale; .reg .b32 bits; .reg .pred small, broken;
shl.b32 bits, $2, 16; mov.b32 amax, bits;
setp.le.f32 small, amax, 0f{_FLOOR.view(np.uint32):08X};
div.rn.f32 multiplier, 0f{np.float32(_LARGEST).view(np.uint32):08X}, amax;
selp.f32 multiplier, 0f{_OF_FLOOR.view(np.uint32):08X}, multiplier, small; rcp.rn.f32 scale, multiplier;
setp.ge.u32 broken, $2, 0x7F80;
selp.f32 multiplier, 0f7FC00000, multiplier, broken; selp.f32 scale, 0f7FC00000, scale, broken;
mov.b32 $0, multiplier; mov.b32 $1, scale;}}"""
# Four E4M3 at $0 of the pairs of bfloat16 $1 and $2 times the multiplier $3; subnormals
# are read as zeros.
WRITE_ROUNDED = """{.reg .f32 a, b, c, d, by; .reg .b32 t, word; .reg .b16 low, high; mov.b32 by, $3;
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

# By a kernel before
# --------------------------------------------------------------------------------------


def ordered(x: jax.Array, rows: int, outer: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (E4M3 values `[rows, k]` of x `[m, k]` in the order of `decode.permuted`,
    float32 factors `[rows]`).

    A factor is the scale of a row times `outer`, the float32 scale of the weight, over
    `E4M3_FACTOR`. Rows from m on are zeros.
    """
    return pltriton.on_platform(functools.partial(_ordered, rows), x, outer)


def _ordered(
    rows: int, x: jax.Array, outer: jax.Array, *, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    m, k = x.shape
    width = pl.next_power_of_2(k)
    # Four values lie side by side before and after: with an axis of their own they are
    # loaded and stored at once.
    sides = width // 4, 4

    def kernel(
        x_ref: jax.Ref, outer_ref: jax.Ref, values_ref: jax.Ref, factor_ref: jax.Ref
    ) -> None:
        row, word, value = (
            pl.program_id(0),
            *(lax.broadcasted_iota(jnp.int32, sides, axis) for axis in range(2)),
        )
        mask = None if k == width else word < k // 4
        # Rows behind the last one of x read it again.
        at = jnp.minimum(row, m - 1), 4 * _word_at(word) + value
        found = pltriton.load(
            x_ref.at[at], mask=mask, other=None if mask is None else 0
        ).astype(jnp.float32)
        wide = jnp.where(row < m, found, 0)
        amax = numerics.amax_by_bits(numerics.amax_by_bits(wide, 1), 0, keepdims=True)
        scale, inverse = scale_and_inverse(reference.ROWS, amax, interpret)
        values = multiplied(wide, inverse, interpret).astype(values_ref.dtype)
        pltriton.store(values_ref.at[row, 4 * word + value], values, mask=mask)
        factor = outer_ref[...] * jnp.float32(1 / reference.E4M3_FACTOR) * scale
        pltriton.store(
            factor_ref.at[row + lax.broadcasted_iota(jnp.int32, (1,), 0)], factor
        )

    shapes = (
        jax.ShapeDtypeStruct((rows, k), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((rows,), jnp.float32),
    )
    values, factors = pltriton.pallas_call(
        kernel,
        out_shape=varying(shapes, x, outer),
        grid=(rows,),
        compiler_params=pltriton.CompilerParams(
            num_warps=warps_of((1, width)), num_stages=1
        ),
        interpret=interpret,
        name="ordered_row_quantize",
    )(x, outer.reshape(1))
    return values, factors


def _word_at(place: jax.Array) -> jax.Array:
    """Return which four values of k stand at a place of E4M3's order, both in fours: 16
    q + 2 t + h at 8 t + 4 h + q.

    >>> _word_at(jnp.arange(9)).tolist()
    [0, 16, 32, 48, 1, 17, 33, 49, 2]
    """
    return (
        (place & ~0x3F) | (place & 0x3) << 4 | (place & 0x38) >> 2 | (place & 0x4) >> 2
    )


# By every block
# --------------------------------------------------------------------------------------


def round_rows(
    x: jax.Ref,
    first_step: jax.Array,
    smem: dict[str, jax.Ref],
    meet: Callable[[int], None],
) -> None:
    """Write the E4M3 values of a block's part of k and the scales of its rows: the work
    of all its warpgroups.

    Args:
      x: bfloat16 `[m, k]` in global memory, at most `ROWS` rows.
      first_step: number of the first step of the block's part.
      smem: "x", E4M3 `[steps of the part, ROWS, step]`; "largest", uint32
        `[ROWS, warps]`; and "scales_of_rows", float32 `[ROWS]`.
      meet: lets a warpgroup wait for the others, for the first and the second time.
    """
    (m, k), warps = x.shape, smem["largest"].shape[1]
    load = lambda row, step: plgpu.load(
        x.at[row, pl.ds(step * _STEP, _UNIT)], layout=_FOURS, optimized=False
    )
    for row in range(m):
        found = [load(row, step) for step in _share_of(k // _STEP, warps // _WARPS)]
        run = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *[_FOURS] * len(found)))
        run(functools.partial(_write_largest, row))(smem["largest"], *found)
    meet(0)
    for row in range(ROWS):
        share = _share_of(smem["x"].shape[0], warps // _WARPS)
        found = [load(row, first_step + step) for step in share] if row < m else []
        refs = plgpu.RefType(), plgpu.RefType(), *[decode.CODES] * len(share)
        run = plgpu.inline_mgpu(arg_types=(*refs, *[_FOURS] * len(found)))
        run(functools.partial(_write_rounded, row, len(share)))(
            smem["largest"],
            smem["scales_of_rows"],
            *(smem["x"].at[step] for step in share),
            *found,
        )
    plgpu.commit_smem()
    meet(1)


def _share_of(steps: int, warpgroups: int) -> list[jax.Array]:
    """Return the first steps of a warpgroup's units; a unit behind the last step is the
    last one again.
    """
    turns = range(-(-steps // (2 * warpgroups)))
    return [
        jnp.minimum(2 * (lax.axis_index("warpgroup") + turn * warpgroups), steps - 2)
        for turn in turns
    ]


def _write_largest(
    row: int, _: object, largest: ir.Value, *found: mgpu.FragmentedArray
) -> None:
    pairs = [pair for fours in found for pair in _pairs_of(fours)]
    _store_largest(
        row, pairs, decode.address(largest), _warps_in(largest), mgpu.utils.thread_idx()
    )


def _write_rounded(
    row: int, turns: int, _: object, largest: ir.Value, scales: ir.Value, *operands: Any
) -> None:
    units, found = [decode.address(unit) for unit in operands[:turns]], operands[turns:]
    places = _places_of(row, units, mgpu.utils.thread_idx())
    if not found:
        for at in places:
            decode.effect([at, decode.constant(0)], _WRITE)
        return
    multiplier, scale = _scale_of(row, decode.address(largest), _warps_in(largest))
    for at, fours in zip(places, found, strict=True):
        decode.effect([at, *_pairs_of(fours), multiplier], WRITE_ROUNDED)
    # Every thread writes the same.
    decode.effect(
        [_sum(decode.address(scales), decode.constant(4 * row)), scale], _WRITE
    )


def _pairs_of(fours: mgpu.FragmentedArray) -> list[ir.Value]:
    """Return a thread's four bfloat16 as two words."""
    (register,) = fours.registers.reshape(-1)
    both = vector.bitcast(
        ir.VectorType.get((2,), ir.IntegerType.get_signless(32)), register
    )
    return [vector.extract(both, [], [i]) for i in range(2)]


def _store_largest(
    row: int, pairs: list[ir.Value], largest: ir.Value, warps: int, thread: ir.Value
) -> None:
    """Write the largest magnitude of a warp's pairs of bfloat16 to its place in a row
    of words, `[ROWS, warps]`.
    """
    top = decode.constant(0)
    for pair in pairs:
        (top,) = decode.words(1, [top, pair], _LARGER)
    (of_warp,) = decode.words(1, [thread], "{shr.u32 $0, $1, 5; shl.b32 $0, $0, 2;}")
    decode.effect([top, _sum(_of_row(row, largest, warps), of_warp)], _WRITE_LARGEST)


def _scale_of(row: int, largest: ir.Value, warps: int) -> list[ir.Value]:
    """Return the multiplier and the scale of a row, from the largest magnitudes of its
    warps.
    """
    top = decode.constant(0)
    for warp in range(warps):
        at = [_of_row(row, largest, warps), decode.constant(4 * warp)]
        (top,) = decode.words(1, [top, *at], _LARGER_AT, effects=True)
    return decode.words(2, [top], _SCALE)


def _places_of(row: int, units: list[ir.Value], thread: ir.Value) -> list[ir.Value]:
    """Return the places to which a thread writes its word of a row in each of these
    units.
    """
    (place,) = decode.words(1, [thread, decode.constant(row)], _PLACE)
    return [_sum(unit, place) for unit in units]


def _of_row(row: int, largest: ir.Value, warps: int) -> ir.Value:
    return _sum(largest, decode.constant(4 * row * warps))


def _sum(a: ir.Value, b: ir.Value) -> ir.Value:
    return decode.words(1, [a, b], "add.u32 $0, $1, $2;")[0]


def _warps_in(largest: ir.Value) -> int:
    return int(ir.MemRefType(largest.type).shape[1])
