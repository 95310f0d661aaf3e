"""E2M1 codes in registers as the BF16 operand of `wgmma`: the inner part of the Hopper kernel, in PTX.

A thread decodes 8 codes of a row, 32 bits, with their block's scale (`owned.py`). The order of k is free, so it makes
the pairs that cost least: code i beside code i + 4 in one register, which needs one mask for both.

    code s|ee|m -> bfloat16 s|000000ee|m000000, which is the number times 2**-126, by two masks and a multiplication
    scale * 2**118 -> one multiplication makes both right but for 2**-8: exact, since 6 bits are enough for the product

Two masks and two multiplications a pair, and no shift: the integer pipe, which has half the width of the others, is
what a decode kernel is bound by. Scales come from a table of 256 in shared memory.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from pallas_kernels.fp4_matmul import owned
from pallas_kernels.fp4_matmul.owned import Form

# What a decoded weight must still be multiplied by.
FACTOR: dict[str, float] = {"nvfp4": 2.0**8, "mxfp4": 1.0}
CHUNK = 64

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


# By 2**118 an E4M3 scale makes codes right but for `FACTOR`; an E8M0 scale may be 2**127, and 2**126 comes after it.
DECODE: dict[Form, str] = {"nvfp4": _decode_text(rescaled=False), "mxfp4": _decode_text(rescaled=True)}
RESCALE: dict[Form, list[int]] = {"nvfp4": [], "mxfp4": [0x7E807E80]}
# $0, the entry of the table at $2 for the byte $3 of the word $1.
_LOOK_UP = "{.reg .b32 t; prmt.b32 t, $1, 0, $3; mad.lo.u32 t, t, 4, $2; ld.shared.b32 $0, [t];}"


def table(form: Form) -> np.ndarray:
    """What each scale byte multiplies codes by, a pair of equal bfloat16, uint32 `[256]`; NaN stays NaN."""
    dtype = jnp.dtype(jnp.float8_e4m3fn if form == "nvfp4" else jnp.float8_e8m0fnu)
    scale = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float64) * (2.0**118 if form == "nvfp4" else 1.0)
    bits = scale.astype(jnp.dtype(jnp.bfloat16)).view(np.uint16).astype(np.uint32)
    return bits | bits << 16


def permuted(x: jax.Array, form: Form) -> jax.Array:
    """X `[m, k]` with the values of each step in the order in which decoded codes meet them.

    Of NVFP4, place 32 w + 16 p + 8 h + 2 q + e is value 64 q + 8 w + 2 p + h + 4 e: thread q, its word w, code e.

    >>> permuted(jnp.arange(256)[None], "nvfp4")[0, :10].tolist()
    [0, 4, 64, 68, 128, 132, 192, 196, 1, 5]
    """
    (m, k), step = x.shape, owned.step_of(form)
    parts = x.reshape(m, k // step, 4, step // 32, 2, 2, 2)
    return parts.transpose(0, 1, 3, 5, 6, 2, 4).reshape(m, k)


def decode(form: Form, place: jax.Array, codes_ref: Any, scales: jax.Array, table_ref: Any) -> Any:
    """The operands of one step of 64 rows: codes times scales, bfloat16 `[64, 64]` as `wgmma` takes it from registers.

    Args:
      form: the format.
      place: of `owned.place`.
      codes_ref: in shared memory, uint8 `[64, bytes]` with the widest swizzle.
      scales: of `owned.load_scales`.
      table_ref: `table(form)`, in shared memory.

    Returns:
      A function of the chunk, which 64 values of k: its operand is made where it is called, chunk after chunk.
    """
    made = plgpu.ShapeDtypeStruct((64, CHUNK), jnp.bfloat16, plgpu.Layout.WGMMA)
    loaded: dict[int, Any] = {}

    def operand(chunk: int) -> Any:
        unit = chunk // 2  # 32 codes of each row, of which a chunk takes 16
        if unit not in loaded:
            load = functools.partial(_load_codes, unit)
            loaded[unit] = owned.in_registers(load, owned.CODES, owned.SINGLE, layout=owned.EIGHTS)(codes_ref, place)
        run = plgpu.inline_mgpu(arg_types=(owned.EIGHTS, plgpu.RefType(), owned.PAIRS), return_type=made)
        return run(functools.partial(_decode, form, chunk))(loaded[unit], table_ref, scales)

    return operand


def _load_codes(unit: int, context: Any, codes: Any, place: Any) -> Any:
    return owned.together(owned.code_words(owned.tiles_of(codes), unit, owned.apart(place)[0], owned.address(codes)))


def _decode(form: Form, chunk: int, context: Any, codes: Any, table: Any, scales: Any) -> Any:
    pair = ir.VectorType.get((2,), ir.BF16Type.get())
    values = value_words(form, chunk, owned.apart(codes), owned.address(table), owned.apart(scales))
    return owned.operand_of(values, pair, mgpu.WGMMA_LAYOUT, CHUNK)


def value_words(form: Form, chunk: int, codes: list[Any], table: Any, scales: list[Any]) -> np.ndarray:
    """A thread's values of a chunk, words of two: `[8, 2]`, one for each 8 values of k and each of its rows.

    Args:
      form: the format.
      chunk: of the step.
      codes: of `owned.code_words`, with the unit that the chunk is half of.
      table: address in shared memory.
      scales: of `owned.scale_words`.
    """
    block = chunk if form == "nvfp4" else chunk // 2
    values = np.empty((8, 2), object)
    for half in range(2):
        (scale,) = owned.words(1, [scales[half], table, owned.constant(0x4440 | block)], _LOOK_UP)
        for i in range(2):
            word = codes[4 * half + 2 * (chunk % 2) + i]
            operands = [word, scale, *map(owned.constant, RESCALE[form])]
            values[4 * i : 4 * i + 4, half] = owned.words(4, operands, DECODE[form])
    return values
