"""E2M1 codes in registers as the E4M3 operand of `wgmma`: the inner part of the Hopper kernel for W4A8, in PTX.

A thread owns 64 neighbouring values of its two rows r and r + 8 in a step of 256: four whole blocks of NVFP4, whose
scales are one word. A scale byte is looked up once a block, in a table of 256 rows of 8 bytes in shared memory: the
magnitudes of E2M1 times the scale, in E4M3. The 16 codes of a block then choose among 8 bytes that are in registers:

    magnitudes of 4 codes = prmt(low, high, codes & 0x7777)
    signs of 4 codes      = prmt(codes << 4, codes, ...), whose bytes have the signs of even and of odd codes on top
    operand               = magnitudes ^ (signs & 0x80808080)

9 instructions for 8 values, and 3 for each 16 to look up; `decode.py`, which makes BF16, takes 17 and 3 for each 8.
Within a step the sum has no order: `permuted` brings x into that of the codes.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from pallas_kernels.fp4 import E2M1
from pallas_kernels.fp4_matmul.decode import assembly, constant

# The largest value, 6 * 448, is in E4M3's range when multiplied by it.
FACTOR = 2.0**-3
STEP = 256
CHUNK = 128

# Of thread $2 of a warpgroup: $0, where the scales of its first row are, and $1, where its codes are. 16 bytes lie
# where the lowest bits of their row say, so that the 8 threads that read at a time do so from all banks.
PLACE = """{.reg .b32 row, low, quarter, unit;
and.b32 quarter, $2, 3;
shr.u32 low, $2, 2;
and.b32 low, low, 7;
shr.u32 row, $2, 1;
and.b32 row, row, 0x30;
or.b32 row, row, low;
mul.lo.u32 unit, quarter, 4;
mad.lo.u32 $0, row, 16, unit;
mul.lo.u32 unit, quarter, 2;
xor.b32 unit, unit, low;
mul.lo.u32 unit, unit, 16;
mad.lo.u32 $1, row, 128, unit;
}"""
# Rows r and r + 8. The second half of a thread's codes lies beside the first, as `PLACE` says, in a unit of 16 bytes.
LOAD_SCALES = "{.reg .b32 t; add.u32 t, $2, $3; ld.shared.b32 $0, [t]; ld.shared.b32 $1, [t + 128];}"
LOAD_CODES = """{.reg .b32 t; xor.b32 t, $9, $10; add.u32 t, t, $8;
ld.shared.v4.b32 {$0, $1, $2, $3}, [t];
ld.shared.v4.b32 {$4, $5, $6, $7}, [t + 1024];
}"""
# $0 and $1, the row of the table at $3 for the byte $4 of the word $2.
LOOK_UP = "{.reg .b32 t; prmt.b32 t, $2, 0, $4; mad.lo.u32 t, t, 8, $3; ld.shared.v2.b32 {$0, $1}, [t];}"
# $0 and $1, four E4M3 values each, of the 8 codes $2 and their block's row of the table, $3 and $4.
DECODE = """{.reg .b32 m, p, s, even;
and.b32 m, $2, 0x77777777;
mul.lo.u32 even, $2, 16;
prmt.b32 p, $3, $4, m;
prmt.b32 s, even, $2, 0x5140;
lop3.b32 $0, p, s, 0x80808080, 0x78;
shr.u32 m, m, 16;
prmt.b32 p, $3, $4, m;
prmt.b32 s, even, $2, 0x7362;
lop3.b32 $1, p, s, 0x80808080, 0x78;
}"""


def table() -> np.ndarray:
    """Rows of 8 bytes, uint32 `[512]`, two a scale byte: E4M3 of each magnitude times the scale times `FACTOR`.

    Rounded to nearest even, as `reference.decode` rounds them; of fold-exact scales only what is subnormal rounds.
    """
    e4m3 = jnp.dtype(jnp.float8_e4m3fn)
    scale = np.arange(256, dtype=np.uint8).view(e4m3).astype(np.float32)
    rows = np.multiply.outer(scale * np.float32(FACTOR), E2M1[:8]).astype(e4m3)
    return rows.view(np.uint32).reshape(-1)


def permuted(x: jax.Array) -> jax.Array:
    """X `[m, k]` with each 256 values of k in the order in which decoded codes meet them.

    Place 32 t + 16 h + 4 q + j is value 64 q + 8 t + 4 h + j.

    >>> permuted(jnp.arange(256)[None])[0, :36:4].tolist()
    [0, 64, 128, 192, 4, 68, 132, 196, 8]
    """
    m, k = x.shape
    return x.reshape(m, k // STEP, 4, 8, 2, 4).transpose(0, 1, 3, 4, 2, 5).reshape(m, k)


def place() -> jax.Array:
    """Where a thread finds what it decodes, two words for each: once for all steps."""
    return _in_registers(lambda context: _pairs(_words(2, [mgpu.utils.thread_idx()], PLACE)))()


def decode(place: jax.Array, codes_ref: Any, scales_ref: Any, table_ref: Any) -> Any:
    """The operands of one step of 64 rows: codes times their scales, E4M3 `[64, 128]` as `wgmma` takes registers.

    Args:
      place: of `place()`.
      codes_ref: in shared memory, uint8 `[64, 128]` with the widest swizzle.
      scales_ref: their bytes, `[64, 16]`, without a swizzle.
      table_ref: `table()`, in shared memory.

    Returns:
      A function of the chunk, which half of the step: its operand is made where it is called.
    """
    scales = _in_registers(_load_scales, plgpu.RefType(), _PAIRS)(scales_ref, place)
    made = plgpu.ShapeDtypeStruct((64, CHUNK), jnp.float8_e4m3fn, plgpu.Layout.WGMMA_8BIT)
    swizzled = plgpu.RefType((plgpu.TilingTransform((8, 128)), plgpu.SwizzleTransform(128)))

    def operand(chunk: int) -> Any:
        run = plgpu.inline_mgpu(arg_types=(swizzled, plgpu.RefType(), _PAIRS, _PAIRS), return_type=made)
        return run(functools.partial(_decode, chunk))(codes_ref, table_ref, scales, place)

    return operand


# Two words for each thread.
_PAIRS = plgpu.Layout.WG_STRIDED((128 * 2,), 2)


def _in_registers(function: Any, *arguments: Any) -> Any:
    words = plgpu.ShapeDtypeStruct((128 * 2,), jnp.uint32, _PAIRS)
    return plgpu.inline_mgpu(arg_types=arguments, return_type=words)(function)


def _load_scales(context: Any, scales: Any, place: Any) -> Any:
    return _pairs(scale_words(_of_pairs(place)[0], _address(scales)))


def _decode(chunk: int, context: Any, codes: Any, table: Any, scales: Any, place: Any) -> Any:
    words = value_words(chunk, _of_pairs(place)[1], _address(codes), _address(table), _of_pairs(scales))
    registers = np.empty(words.shape, object)
    for at, word in np.ndenumerate(words):
        registers[at] = _as_e4m3(word)
    layout = mgpu.WGMMA_LAYOUT_8BIT
    shape = layout.registers_shape((64, CHUNK))
    return mgpu.FragmentedArray(_registers=registers.reshape(shape), _layout=layout, _is_signed=None)


def scale_words(place: Any, scales: Any) -> list[Any]:
    """The scales of a thread's four blocks in a step, a word for each of its rows r and r + 8."""
    return _words(2, [scales, place], LOAD_SCALES, effects=True)


def value_words(chunk: int, place: Any, codes: Any, table: Any, scales: list[Any]) -> np.ndarray:
    """A thread's values of a chunk, words of four: `[8, 2]`, one for each 16 values of k and each of its rows.

    Args:
      chunk: 0 or 1.
      place: of the thread's codes.
      codes, table: addresses in shared memory.
      scales: what `scale_words` loaded.
    """
    loaded = _words(8, [codes, place, constant(16 * chunk)], LOAD_CODES, effects=True)
    words = np.empty((8, 2), object)
    for half in range(2):
        for block in range(2):
            row = _words(2, [scales[half], table, constant(0x4440 | 2 * chunk + block)], LOOK_UP)
            for i in (2 * block, 2 * block + 1):
                words[2 * i, half], words[2 * i + 1, half] = _words(2, [loaded[4 * half + i], *row], DECODE)
    return words


def _words(count: int, operands: list[Any], text: str, *, effects: bool = False) -> list[Any]:
    return assembly([ir.IntegerType.get_signless(32)] * count, operands, text, effects=effects)


def _pairs(words: list[Any]) -> Any:
    whole = llvm.mlir_undef(ir.VectorType.get((2,), ir.IntegerType.get_signless(32)))
    for i, word in enumerate(words):
        whole = vector.insert(word, whole, [], [i])
    layout = mgpu.WGStridedFragLayout((128 * 2,), 2)
    return mgpu.FragmentedArray(_registers=np.array([whole], object), _layout=layout, _is_signed=False)


def _of_pairs(array: Any) -> list[Any]:
    return [vector.extract(array.registers.item(), [], [i]) for i in range(2)]


def _address(reference: Any) -> Any:
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), mgpu.utils.memref_ptr(reference))


def _as_e4m3(word: Any) -> Any:
    one = vector.broadcast(ir.VectorType.get((1,), word.type), word)
    return vector.bitcast(ir.VectorType.get((4,), ir.Float8E4M3FNType.get()), one)
