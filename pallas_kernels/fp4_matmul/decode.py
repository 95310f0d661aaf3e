"""E2M1 codes in registers as the BF16 operand of `wgmma`: the inner part of the Hopper kernel, in PTX.

A thread of a warpgroup holds 8 codes of a row in 32 bits, as `WGMMA_8BIT` gives them, and their block's scale. Within
32 values of k the tensor core may add in any order, so the thread makes the pairs that cost least: code i beside code
i + 4 in one register, which needs one mask for both. `permuted` brings the values of x into that order.

    code s|ee|m -> bfloat16 s|000000ee|m000000, which is the number times 2**-126, by two masks and a multiplication
    scale * 2**118 -> one multiplication makes both right but for 2**-8: exact, since 6 bits are enough for the product

Two masks and two multiplications a pair, and no shift: the integer pipe, which has half the width of the others, is
what a decode kernel is bound by. Scales come from a table of 256 in shared memory.
"""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

# What a decoded weight must still be multiplied by.
FACTOR: dict[str, float] = {"nvfp4": 2.0**8, "mxfp4": 1.0}
GROUP = 32
CHUNK = 64
GROUPS = CHUNK // GROUP
ROWS_OF_WARP = 16
WORDS = 4

# $0..$3 of the 8 codes $4 and the scale $5, a pair of equal bfloat16: codes (0, 4), (1, 5), (2, 6) and (3, 7). A code
# alone in its half, times 2**12 + 2**6, has its sign at bit 15 and the rest at bits 8 to 6, and more elsewhere.
_PAIR = """and.b32 a, {source}, {mask}; mul.lo.u32 a, a, {factor}; and.b32 a, a, 0x81C081C0;"""


def _decode_text(rescaled: bool) -> str:
    # The bytes of each half trade places, so that its upper two codes lie where the lower two did.
    lines = ["prmt.b32 t, $4, 0, 0x2301;"]
    low, high = ("0x000F000F", 4160), ("0x00F000F0", 260)
    for i, (source, (mask, factor)) in enumerate((("$4", low), ("$4", high), ("t", low), ("t", high))):
        lines.append(_PAIR.format(source=source, mask=mask, factor=factor))
        if rescaled:
            lines.append("mul.rn.bf16x2 a, a, $6;")
        lines.append(f"mul.rn.bf16x2 ${i}, a, $5;")
    return "{.reg .b32 a, t;\n" + "\n".join(lines) + "\n}"


# $0, the entry of the table at $2 for the byte $3 of the word $1.
_LOOK_UP = "{.reg .b32 t; prmt.b32 t, $1, 0, $3; mad.lo.u32 t, t, 4, $2; ld.shared.b32 $0, [t];}"


def table(form: Literal["nvfp4", "mxfp4"]) -> np.ndarray:
    """What each scale byte multiplies codes by, a pair of equal bfloat16, uint32 `[256]`; NaN stays NaN.

    It is 2**118 times an E4M3 scale, which makes codes right but for `FACTOR`, and an E8M0 scale itself.
    """
    dtype = jnp.dtype(jnp.float8_e4m3fn if form == "nvfp4" else jnp.float8_e8m0fnu)
    scale = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float64) * (2.0**118 if form == "nvfp4" else 1.0)
    bits = scale.astype(jnp.dtype(jnp.bfloat16)).view(np.uint16).astype(np.uint32)
    return bits | bits << 16


def permuted(x: jax.Array) -> jax.Array:
    """X `[m, k]` with each 32 values of k in the order in which decoded codes meet them.

    Place 8 i + 2 q + h is value 8 q + i + 4 h.

    >>> permuted(jnp.arange(32)[None])[0, :10].tolist()
    [0, 4, 8, 12, 16, 20, 24, 28, 1, 5]
    """
    m, k = x.shape
    return x.reshape(m, k // GROUP, 4, 2, 4).transpose(0, 1, 4, 2, 3).reshape(m, k)


def decode(codes: jax.Array, scales_ref: Any, table_ref: Any, form: Literal["nvfp4", "mxfp4"], first_row: Any) -> Any:
    """The operands of one step: codes times their scales, bfloat16 `[64, 64]` as `wgmma` takes it from registers.

    Args:
      codes: of 64 rows, uint8 `[64, bytes]` in `WGMMA_8BIT`.
      scales_ref: the bytes of the step's scales in shared memory, `[rows, 16]`, without a swizzle.
      table_ref: `table(form)`, in shared memory.
      form: the format.
      first_row: of the warpgroup in `scales_ref`.

    Returns:
      A function of the chunk, which 32 bytes of the step: its operand is made where it is called.
    """
    split = plgpu.Layout.WG_STRIDED((128 * WORDS,), WORDS)
    words = plgpu.ShapeDtypeStruct((128 * WORDS,), jnp.uint32, split)
    load = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())), return_type=(words, words))
    loaded = load(_load_scales)(scales_ref, first_row)
    made = plgpu.ShapeDtypeStruct((codes.shape[0], CHUNK), jnp.bfloat16, plgpu.Layout.WGMMA)
    arguments = (plgpu.Layout.WGMMA_8BIT, plgpu.RefType(), split, split)

    def operand(chunk: int) -> Any:
        run = plgpu.inline_mgpu(arg_types=arguments, return_type=made)(functools.partial(_decode, form, chunk))
        return run(codes, table_ref, *loaded)

    return operand


def _load_scales(context: Any, scales: Any, first_row: Any) -> Any:
    """The 16 scale bytes of each of a thread's rows, r and r + 8, as four words."""
    i32 = ir.IntegerType.get_signless(32)
    thread = mgpu.utils.thread_idx()
    lane, warp = arith.andi(thread, constant(31)), arith.andi(arith.shrui(thread, constant(5)), constant(3))
    row = arith.addi(arith.muli(warp, constant(ROWS_OF_WARP)), arith.shrui(lane, constant(2)))
    row = arith.addi(row, first_row.registers.item())
    address = arith.addi(llvm.ptrtoint(i32, mgpu.utils.memref_ptr(scales)), arith.muli(row, constant(16)))
    layout = mgpu.WGStridedFragLayout((128 * WORDS,), WORDS)
    made = []
    for half in range(2):
        text = f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4 + {8 * 16 * half}];"
        words = assembly([i32] * WORDS, [address], text, effects=True)
        whole = llvm.mlir_undef(ir.VectorType.get((WORDS,), i32))
        for i, word in enumerate(words):
            whole = vector.insert(word, whole, [], [i])
        registers = np.array([whole], object)
        made.append(mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=False))
    return tuple(made)


def _decode(form: str, chunk: int, context: Any, codes: Any, table: Any, *words: Any) -> Any:
    i32 = ir.IntegerType.get_signless(32)
    pair = ir.VectorType.get((2,), ir.BF16Type.get())
    quarter = arith.andi(mgpu.utils.thread_idx(), constant(3))
    of_table = llvm.ptrtoint(i32, mgpu.utils.memref_ptr(table))
    registers = codes.registers.reshape(-1, 2)[GROUPS * chunk : GROUPS * (chunk + 1)]
    out = np.empty((GROUPS * 4, 2), object)
    text = _decode_text(form == "mxfp4")
    for half in range(2):  # a thread has rows r and r + 8
        of_groups = _scales_of(form, words[half].registers.item(), of_table, quarter, chunk)
        for group, scale in enumerate(of_groups):
            more = [constant(0x7E807E80)] if form == "mxfp4" else []  # a pair of 2**126
            four = assembly([i32] * 4, [_as(i32, registers[group, half]), scale, *more], text)
            for i, value in enumerate(four):
                out[4 * group + i, half] = _as(pair, value)
    layout = mgpu.WGMMA_LAYOUT
    shape = layout.registers_shape((64, CHUNK))
    return mgpu.FragmentedArray(_registers=out.reshape(shape), _layout=layout, _is_signed=None)


def _scales_of(form: str, words: Any, table: Any, quarter: Any, chunk: int) -> list[Any]:
    """The scale of the thread's 8 codes in each of the chunk's two groups, a pair of equal bfloat16."""
    i32 = ir.IntegerType.get_signless(32)
    # A chunk of 64 values has four of NVFP4's scales, a word, and two of MXFP4's, half of one.
    word, places = (chunk, (0, 2)) if form == "nvfp4" else (chunk // 2, (2 * (chunk % 2), 2 * (chunk % 2) + 1))
    bytes_ = vector.extract(words, [], [word])
    if form == "nvfp4":
        # Two blocks a group, the second of which the upper two quarters of the lanes have.
        bytes_ = arith.shrui(bytes_, arith.muli(arith.shrui(quarter, constant(1)), constant(8)))
    look_up = lambda place: assembly([i32], [bytes_, table, constant(0x4440 | place)], _LOOK_UP)[0]
    return [look_up(place) for place in places]


def constant(value: int) -> Any:
    """A word."""
    return mgpu.utils.c(value, ir.IntegerType.get_signless(32))


def _as(to: Any, value: Any) -> Any:
    if isinstance(to, ir.VectorType):
        one = vector.broadcast(ir.VectorType.get((1,), value.type), value)
        return vector.bitcast(to, one)
    return vector.extract(vector.bitcast(ir.VectorType.get((1,), to), value), [], [0])


def assembly(results: list[Any], operands: list[Any], text: str, *, effects: bool = False) -> list[Any]:
    """PTX with results `$0` on and the operands behind them."""
    constraints = ",".join(["=r"] * len(results) + ["r"] * len(operands))
    kind = results[0] if len(results) == 1 else llvm.StructType.get_literal(results)
    made: Any = llvm.inline_asm(kind, operands, text, constraints, asm_dialect=0, has_side_effects=effects)
    if len(results) == 1:
        return [made]
    return [llvm.extractvalue(result, made, [i]) for i, result in enumerate(results)]
