"""E2M1 codes in registers as an operand of `wgmma`: the PTX of the Hopper kernel.

A step of k has 16 blocks. Within a step the sum has no order, so each of the four
threads that share a row takes four neighbouring blocks of it: their scales are one
word, and each scale is looked up once. `permuted` brings x into the order in which the
codes are then multiplied. A thread decodes 8 codes, 32 bits, at a time, for its rows r
and r + 8.

To BF16 code i and code i + 4 share a register, so that one mask serves both:

    code s|ee|m -> bfloat16 s|000000ee|m000000
    scale -> scale * 2**118

Two masks and a multiplication make the first, which is the number times 2**-126. The
product of both is right but for 2**-8, and exact, since it has 6 bits at most. That is
two masks and two multiplications a pair, and no shift: a decode kernel is bound by the
integer pipe, which has half the width of the others. A table of 256 in shared memory
holds the scales.

To E4M3 a scale byte selects 8 bytes of a table, the magnitudes of E2M1 times the scale,
and codes choose among them:

    magnitudes of 4 codes = prmt(low, high, codes & 0x7777)
    signs of 4 codes      = prmt(codes << 4, codes, ...)
    operand               = magnitudes ^ (signs & 0x80808080)

The second `prmt` reads bytes whose highest bits are the signs of even and of odd codes.
That is 9 instructions for 8 values, where BF16 takes 17, and 3 for each look-up.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, Ref
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import FragmentedArray
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector
from jaxlib.mlir.ir import Value

from pallas_kernels.fp4_matmul import reference
from pallas_kernels.scaling import Fp4Format

# Blocks of a step of k: their scales are the 16 bytes of a row that a copy moves at
# least.
BLOCKS = 16
# Values of k that a `wgmma` chunk multiplies.
CHUNK = {"bfloat16": 64, "float8_e4m3fn": 128}
# Factor by which decoded BF16 weights must still be multiplied.
BF16_FACTOR: dict[Fp4Format, float] = {"nvfp4": 2.0**8, "mxfp4": 1.0}
# Codes in shared memory have the widest swizzle: tiles of 8 rows of 128 bytes, one
# after the other along k.
CODES = plgpu.RefType((plgpu.TilingTransform((8, 128)), plgpu.SwizzleTransform(128)))
_TILE_BYTES = 1024
# A word for each thread of a warpgroup, two, and eight.
SINGLE = plgpu.Layout.WG_STRIDED((128,), 1)
PAIRS = plgpu.Layout.WG_STRIDED((128 * 2,), 2)
EIGHTS = plgpu.Layout.WG_STRIDED((128 * 8,), 8)
_WORDS = {SINGLE: 1, PAIRS: 2, EIGHTS: 8}

# $0, the place of thread $1's codes. 16 bytes lie where the lowest bits of their row
# say, so that the 8 threads that read at a time do so from all banks. A step of NVFP4
# is one tile wide, a step of MXFP4 two.
_PLACE = """{{.reg .b32 low, warp, quarter, unit;
and.b32 quarter, $1, 3;
shr.u32 low, $1, 2; and.b32 low, low, 7;
shr.u32 warp, $1, 1; and.b32 warp, warp, 0x30;
{unit}
xor.b32 unit, unit, low; mul.lo.u32 unit, unit, 16;
mad.lo.u32 $0, low, 128, unit; mad.lo.u32 $0, warp, {row}, $0;
{half}}}"""
PLACES: dict[Fp4Format, str] = {
    "nvfp4": _PLACE.format(row=128, unit="mul.lo.u32 unit, quarter, 2;", half=""),
    "mxfp4": _PLACE.format(
        row=256,
        unit="and.b32 unit, quarter, 1;\nmul.lo.u32 unit, unit, 4;",
        half=(
            f"shr.u32 quarter, quarter, 1;\nmad.lo.u32 $0, quarter, {_TILE_BYTES},"
            " $0;\n"
        ),
    ),
}
# $0, the place of the scales of thread $1's first row: rows have the 16 bytes of a
# step.
SCALE_PLACE = """{.reg .b32 low, row, quarter;
shr.u32 low, $1, 2; and.b32 low, low, 7;
shr.u32 row, $1, 1; and.b32 row, row, 0x30; or.b32 row, row, low;
and.b32 quarter, $1, 3; mul.lo.u32 quarter, quarter, 4;
mad.lo.u32 $0, row, 16, quarter;}"""
# Rows r and r + 8.
_LOAD_SCALES = (
    "{.reg .b32 t; add.u32 t, $2, $3; ld.shared.b32 $0, [t]; ld.shared.b32 $1, [t +"
    " 128];}"
)
# The unit $10 / 16 of a thread's codes: its lowest bits are free in `PLACES`.
_LOAD_CODES = """{{.reg .b32 t; xor.b32 t, $9, $10; add.u32 t, t, $8;
ld.shared.v4.b32 {{$0, $1, $2, $3}}, [t];
ld.shared.v4.b32 {{$4, $5, $6, $7}}, [t + {below}];}}"""


def _bf16_text(rescaled: bool) -> str:
    """Return PTX of $0..$3, pairs of bfloat16, of the 8 codes $4 and the scale $5.

    They are the codes (0, 4), (1, 5), (2, 6) and (3, 7). The scale is a pair, too.
    """
    # A code alone in its half of a register, times 2**12 + 2**6, has its sign at bit 15
    # and the rest at bits 8 to 6. The bytes of each half trade places, so that its
    # upper two codes lie where the lower two did.
    lines = ["prmt.b32 t, $4, 0, 0x2301;"]
    low = ("0x000F000F", 4160)
    high = ("0x00F000F0", 260)
    pairs = [("$4", low), ("$4", high), ("t", low), ("t", high)]
    for i, (source, (mask, factor)) in enumerate(pairs):
        lines.append(
            f"and.b32 a, {source}, {mask}; mul.lo.u32 a, a, {factor}; and.b32 a, a,"
            " 0x81C081C0;"
        )
        if rescaled:
            lines.append("mul.rn.bf16x2 a, a, $6;")
        lines.append(f"mul.rn.bf16x2 ${i}, a, $5;")
    return "{.reg .b32 a, t;\n" + "\n".join(lines) + "\n}"


# Times 2**118 an E4M3 scale makes codes right but for `BF16_FACTOR`. An E8M0 scale may
# be 2**127, so 2**126 follows it.
BF16_TEXT: dict[Fp4Format, str] = {
    "nvfp4": _bf16_text(rescaled=False),
    "mxfp4": _bf16_text(rescaled=True),
}
RESCALE: dict[Fp4Format, list[int]] = {"nvfp4": [], "mxfp4": [0x7E807E80]}
# $0, the entry of the table at $2 for the byte $3 of the word $1.
_LOOK_UP_BF16 = (
    "{.reg .b32 t; prmt.b32 t, $1, 0, $3; mad.lo.u32 t, t, 4, $2; ld.shared.b32 $0,"
    " [t];}"
)
# $0 and $1, the row of the table at $3 for the byte $4 of the word $2.
_LOOK_UP_E4M3 = (
    "{.reg .b32 t; prmt.b32 t, $2, 0, $4; mad.lo.u32 t, t, 8, $3; ld.shared.v2.b32 {$0,"
    " $1}, [t];}"
)
# $0 and $1, four E4M3 values each, of the 8 codes $2 and their block's row of the
# table, $3 and $4.
E4M3_TEXT = """{.reg .b32 m, p, s, even;
and.b32 m, $2, 0x77777777; mul.lo.u32 even, $2, 16;
prmt.b32 p, $3, $4, m; prmt.b32 s, even, $2, 0x5140;
lop3.b32 $0, p, s, 0x80808080, 0x78;
shr.u32 m, m, 16;
prmt.b32 p, $3, $4, m; prmt.b32 s, even, $2, 0x7362;
lop3.b32 $1, p, s, 0x80808080, 0x78;}"""


def step_of(form: Fp4Format) -> int:
    """Return how many values of k a step has."""
    return BLOCKS * (16 if form == "nvfp4" else 32)


def table_of(form: Fp4Format, dtype: str) -> np.ndarray:
    """Return the table of scale bytes for activations in a format.

    It is pairs of equal bfloat16, uint32 `[256]`, or `reference.e4m3_table()`.
    """
    if dtype == "float8_e4m3fn":
        return reference.e4m3_table()
    if form == "nvfp4":
        of_bytes = jnp.dtype(jnp.float8_e4m3fn)
        factor = 2.0**118
    else:
        of_bytes = jnp.dtype(jnp.float8_e8m0fnu)
        factor = 1.0
    scale = np.arange(256, dtype=np.uint8).view(of_bytes).astype(np.float64)
    in_bf16 = (scale * factor).astype(jnp.dtype(jnp.bfloat16))
    bits = in_bf16.view(np.uint16).astype(np.uint32)
    return bits | bits << 16


def permuted(x: Array, form: Fp4Format) -> Array:
    """Return x `[m, k]` with each step in the order in which decoded codes meet it.

    In BF16, place 32 w + 16 p + 8 h + 2 q + e of NVFP4 is value 64 q + 8 w + 2 p + h +
    4 e: thread q, its word w, code e. In E4M3, place 32 t + 16 h + 4 q + e is value 64
    q + 8 t + 4 h + e.

    >>> x = jnp.arange(256).astype(jnp.bfloat16)[None]
    >>> permuted(x, "nvfp4")[0, :10].astype(int).tolist()
    [0, 4, 64, 68, 128, 132, 192, 196, 1, 5]
    """
    m, k = x.shape
    step = step_of(form)
    if x.dtype == jnp.float8_e4m3fn:
        parts = x.reshape(m, k // step, 4, 8, 2, 4)
        return parts.transpose(0, 1, 3, 4, 2, 5).reshape(m, k)
    parts = x.reshape(m, k // step, 4, step // 32, 2, 2, 2)
    return parts.transpose(0, 1, 3, 5, 6, 2, 4).reshape(m, k)


def places(form: Fp4Format) -> tuple[Array, Array]:
    """Return the places of a thread's codes and scales in a buffer of 64 rows.

    They are the same for all steps.
    """
    of_codes = partial(_place_of_thread, PLACES[form])
    of_scales = partial(_place_of_thread, SCALE_PLACE)
    return (
        _in_registers(of_codes, layout=SINGLE)(),
        _in_registers(of_scales, layout=SINGLE)(),
    )


def _place_of_thread(text: str, _: object) -> FragmentedArray:
    return _together(words(1, [mgpu.utils.thread_idx()], text))


def decoder(
    form: Fp4Format,
    dtype: str,
    where: tuple[Array, Array],
    codes: Ref,
    scales: Ref,
    table: Ref,
) -> Callable[[int], Array]:
    """Return a function that makes the operand of `wgmma` for a chunk of a step.

    The operand is `[64, CHUNK[dtype]]` in registers. In shared memory are codes, uint8
    `[64, step / 2]` as `CODES` says, scales, uint8 `[64, BLOCKS]`, and the table of
    `table_of(form, dtype)`; `where` are the thread's `places`. For E4M3 the form is
    "nvfp4".
    """
    place, place_of_scales = where
    load = _in_registers(_load_scales, plgpu.RefType(), SINGLE)
    of_blocks = load(scales, place_of_scales)
    in_bf16 = dtype == "bfloat16"
    layout = plgpu.Layout.WGMMA if in_bf16 else plgpu.Layout.WGMMA_8BIT
    made = plgpu.ShapeDtypeStruct((64, CHUNK[dtype]), jnp.dtype(dtype), layout)
    loaded: dict[int, Array] = {}

    def bf16_operand(chunk: int) -> Array:
        unit = chunk // 2  # 32 codes of each row, of which a chunk takes 16
        if unit not in loaded:
            load = partial(_load_codes, form, unit)
            run = _in_registers(load, CODES, SINGLE, layout=EIGHTS)
            loaded[unit] = run(codes, place)
        run = plgpu.inline_mgpu(
            arg_types=(EIGHTS, plgpu.RefType(), PAIRS), return_type=made
        )(partial(_decode_bf16, form, chunk))
        return run(loaded[unit], table, of_blocks)

    def e4m3_operand(chunk: int) -> Array:
        run = plgpu.inline_mgpu(
            arg_types=(CODES, plgpu.RefType(), PAIRS, SINGLE), return_type=made
        )(partial(_decode_e4m3, chunk))
        return run(codes, table, of_blocks, place)

    return bf16_operand if in_bf16 else e4m3_operand


def _load_scales(_: object, scales: Value, place: FragmentedArray) -> FragmentedArray:
    return _together(_scale_words(_apart(place)[0], address(scales)))


def _load_codes(
    form: Fp4Format,
    unit: int,
    _: object,
    codes: Value,
    place: FragmentedArray,
) -> FragmentedArray:
    return _together(_code_words(form, unit, _apart(place)[0], address(codes)))


def _decode_bf16(
    form: Fp4Format,
    chunk: int,
    _: object,
    codes: FragmentedArray,
    table: Value,
    scales: FragmentedArray,
) -> FragmentedArray:
    values = _bf16_words(form, chunk, _apart(codes), address(table), _apart(scales))
    two = ir.VectorType.get((2,), ir.BF16Type.get())
    return _operand_of(values, two, mgpu.WGMMA_LAYOUT, CHUNK["bfloat16"])


def _decode_e4m3(
    chunk: int,
    _: object,
    codes: Value,
    table: Value,
    scales: FragmentedArray,
    place: FragmentedArray,
) -> FragmentedArray:
    loaded = _code_words("nvfp4", chunk, _apart(place)[0], address(codes))
    values = _e4m3_words(chunk, loaded, address(table), _apart(scales))
    four = ir.VectorType.get((4,), ir.Float8E4M3FNType.get())
    return _operand_of(values, four, mgpu.WGMMA_LAYOUT_8BIT, CHUNK["float8_e4m3fn"])


def _operand_of(
    values: np.ndarray,
    kind: ir.Type,
    layout: mgpu.TiledLayout,
    chunk: int,
) -> FragmentedArray:
    """Return an operand of `wgmma`, 64 rows of a chunk, from words of a thread.

    Each word is a vector of this kind.
    """
    registers = np.empty(values.shape, object)
    for at, word in np.ndenumerate(values):
        one = vector.broadcast(ir.VectorType.get((1,), word.type), word)
        registers[at] = vector.bitcast(kind, one)
    registers = registers.reshape(layout.registers_shape((64, chunk)))
    return FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


# The words of a thread
# --------------------------------------------------------------------------------------


def _scale_words(place: Value, scales: Value) -> list[Value]:
    """Return the scales of a thread's four blocks: a word for row r, one for r + 8."""
    return words(2, [scales, place], _LOAD_SCALES, effects=True)


def _code_words(form: Fp4Format, unit: int, place: Value, codes: Value) -> list[Value]:
    """Return the 32 codes of a unit of 16 bytes, four words for rows r and r + 8."""
    text = _LOAD_CODES.format(below=_TILE_BYTES * (1 if form == "nvfp4" else 2))
    return words(8, [codes, place, constant(16 * unit)], text, effects=True)


def _bf16_words(
    form: Fp4Format,
    chunk: int,
    codes: list[Value],
    table: Value,
    scales: list[Value],
) -> np.ndarray:
    """Return a thread's values of a chunk, words of two, `[8, 2]`.

    There is a word for each 8 values of k and each of its rows. `codes` are the
    `_code_words` of the unit that the chunk is half of, and `table` is an address in
    shared memory.
    """
    block = chunk if form == "nvfp4" else chunk // 2
    values = np.empty((8, 2), object)
    for half in range(2):
        at = constant(0x4440 | block)
        (scale,) = words(1, [scales[half], table, at], _LOOK_UP_BF16)
        for i in range(2):
            eight = codes[4 * half + 2 * (chunk % 2) + i]
            rescale = [constant(factor) for factor in RESCALE[form]]
            found = words(4, [eight, scale, *rescale], BF16_TEXT[form])
            values[4 * i : 4 * i + 4, half] = found
    return values


def _e4m3_words(
    chunk: int,
    codes: list[Value],
    table: Value,
    scales: list[Value],
) -> np.ndarray:
    """Return a thread's values of a chunk, words of four, `[8, 2]`.

    There is a word for each 16 values of k and each of its rows. `codes` are the
    `_code_words` of the unit `chunk`, and `table` is an address in shared memory.
    """
    values = np.empty((8, 2), object)
    for half in range(2):
        for block in range(2):
            at = constant(0x4440 | 2 * chunk + block)
            row = words(2, [scales[half], table, at], _LOOK_UP_E4M3)
            for i in (2 * block, 2 * block + 1):
                found = words(2, [codes[4 * half + i], *row], E4M3_TEXT)
                values[2 * i : 2 * i + 2, half] = found
    return values


# PTX in Mosaic
# --------------------------------------------------------------------------------------


def _in_registers(
    function: Callable[..., object],
    *arguments: object,
    layout: object = PAIRS,
) -> Callable[..., Array]:
    """Return a function, made of PTX, whose result is words of each thread."""
    made = plgpu.ShapeDtypeStruct((128 * _WORDS[layout],), jnp.uint32, layout)
    return plgpu.inline_mgpu(arg_types=arguments, return_type=made)(function)


def words(
    count: int,
    operands: list[Value],
    text: str,
    *,
    effects: bool = False,
) -> list[Value]:
    """Run PTX whose results are `$0` on, followed by the operands.

    Without effects the compiler may move and share it.
    """
    i32 = ir.IntegerType.get_signless(32)
    constraints = ",".join(["=r"] * count + ["r"] * len(operands))
    kind = i32 if count == 1 else llvm.StructType.get_literal([i32] * count)
    made: Any = llvm.inline_asm(
        kind, operands, text, constraints, asm_dialect=0, has_side_effects=effects
    )
    if count == 1:
        return [made]
    return [llvm.extractvalue(i32, made, [i]) for i in range(count)]


def effect(operands: list[Value], text: str) -> None:
    """Run PTX that writes to shared memory and has no result."""
    constraints = ",".join([*["r"] * len(operands), "~{memory}"])
    llvm.inline_asm(
        ir.Type.parse("!llvm.void"),
        operands,
        text,
        constraints,
        asm_dialect=0,
        has_side_effects=True,
    )


def _together(separate: list[Value]) -> FragmentedArray:
    """Return words as an array in registers."""
    count = len(separate)
    i32 = ir.IntegerType.get_signless(32)
    whole = llvm.mlir_undef(ir.VectorType.get((count,), i32))
    for i, word in enumerate(separate):
        whole = vector.insert(word, whole, [], [i])
    layout = mgpu.WGStridedFragLayout((128 * count,), count)
    return FragmentedArray(
        _registers=np.array([whole], object), _layout=layout, _is_signed=False
    )


def _apart(array: FragmentedArray) -> list[Value]:
    """Return the words of an array in registers."""
    (whole,) = array.registers.reshape(-1)
    return [vector.extract(whole, [], [i]) for i in range(whole.type.shape[0])]


def address(reference: Value) -> Value:
    """Return an address in shared memory as a word."""
    pointer = mgpu.utils.memref_ptr(reference)
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), pointer)


def constant(value: int) -> Value:
    """Return a number as a word."""
    return mgpu.utils.c(value, ir.IntegerType.get_signless(32))
