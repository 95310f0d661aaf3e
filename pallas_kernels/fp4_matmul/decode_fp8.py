"""E2M1 codes in registers as the E4M3 operand of `wgmma`: the inner part of the Hopper kernel for W4A8, in PTX.

A thread owns four whole blocks of each of its rows (`owned.py`). A scale byte is looked up once a block, in a table of
256 rows of 8 bytes in shared memory: the magnitudes of E2M1 times the scale, in E4M3. The 16 codes of a block then
choose among 8 bytes that are in registers:

    magnitudes of 4 codes = prmt(low, high, codes & 0x7777)
    signs of 4 codes      = prmt(codes << 4, codes, ...), whose bytes have the signs of even and of odd codes on top
    operand               = magnitudes ^ (signs & 0x80808080)

9 instructions for 8 values, and 3 for each 16 to look up; `decode.py`, which makes BF16, takes 17 and 3.
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

from pallas_kernels.fp4 import E2M1
from pallas_kernels.fp4_matmul import owned

# The largest value, 6 * 448, is in E4M3's range when multiplied by it.
FACTOR = 2.0**-3
STEP = owned.step_of("nvfp4")
CHUNK = 128

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

    >>> permuted(jnp.arange(256)[None])[0, :36:4].tolist()
    [0, 64, 128, 192, 4, 68, 132, 196, 8]
    """
    m, k = x.shape
    return x.reshape(m, k // STEP, 4, 8, 2, 4).transpose(0, 1, 3, 4, 2, 5).reshape(m, k)


def word_at(place: jax.Array) -> jax.Array:
    """Which four values of k are at a place of that order, counted in fours, int32: 16 q + 2 t + h at 8 t + 4 h + q.

    >>> word_at(jnp.arange(9)).tolist()
    [0, 16, 32, 48, 1, 17, 33, 49, 2]
    """
    return (place & ~0x3F) | (place & 0x3) << 4 | (place & 0x38) >> 2 | (place & 0x4) >> 2


def decode(place: jax.Array, codes_ref: Any, scales: jax.Array, table_ref: Any) -> Any:
    """The operands of one step of 64 rows: codes times their scales, E4M3 `[64, 128]` as `wgmma` takes registers.

    Args:
      place: of `owned.place`.
      codes_ref: in shared memory, uint8 `[64, 128]` with the widest swizzle.
      scales: of `owned.load_scales`.
      table_ref: `table()`, in shared memory.

    Returns:
      A function of the chunk, which half of the step: its operand is made where it is called.
    """
    made = plgpu.ShapeDtypeStruct((64, CHUNK), jnp.float8_e4m3fn, plgpu.Layout.WGMMA_8BIT)

    def operand(chunk: int) -> Any:
        run = plgpu.inline_mgpu(arg_types=(owned.CODES, plgpu.RefType(), owned.PAIRS, owned.SINGLE), return_type=made)
        return run(functools.partial(_decode, chunk))(codes_ref, table_ref, scales, place)

    return operand


def _decode(chunk: int, context: Any, codes: Any, table: Any, scales: Any, place: Any) -> Any:
    four = ir.VectorType.get((4,), ir.Float8E4M3FNType.get())
    loaded = owned.code_words(owned.tiles_of(codes), chunk, owned.apart(place)[0], owned.address(codes))
    values = value_words(chunk, loaded, owned.address(table), owned.apart(scales))
    return owned.operand_of(values, four, mgpu.WGMMA_LAYOUT_8BIT, CHUNK)


def value_words(chunk: int, codes: list[Any], table: Any, scales: list[Any]) -> np.ndarray:
    """A thread's values of a chunk, words of four: `[8, 2]`, one for each 16 values of k and each of its rows.

    Args:
      chunk: 0 or 1.
      codes: of `owned.code_words`, with the chunk as the unit.
      table: address in shared memory.
      scales: of `owned.scale_words`.
    """
    values = np.empty((8, 2), object)
    for half in range(2):
        for block in range(2):
            row = owned.words(2, [scales[half], table, owned.constant(0x4440 | 2 * chunk + block)], LOOK_UP)
            for i in (2 * block, 2 * block + 1):
                made = owned.words(2, [codes[4 * half + i], *row], DECODE)
                values[2 * i, half], values[2 * i + 1, half] = made
    return values
