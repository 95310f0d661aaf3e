"""What a thread of a warpgroup owns of a step: four neighbouring blocks of each of its rows r and r + 8, in PTX.

Within a step the sum over k has no order, so a thread may take whole blocks, and meets each scale once: those of four
blocks are one word, and their codes units of 16 bytes, which lie where `PLACES` says. `permuted` of `decode.py` and of
`decode_fp8.py` brings x into the order in which the codes are then multiplied.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from pallas_kernels.fp4_matmul.sizes import BLOCKS

Form = Literal["nvfp4", "mxfp4"]
# Codes in shared memory, with the widest swizzle.
CODES = plgpu.RefType((plgpu.TilingTransform((8, 128)), plgpu.SwizzleTransform(128)))

# 8 rows of 128 bytes, behind which lie the same rows' next ones.
TILE_BYTES = 1024
# Where the codes of thread $1 of a warpgroup are, in rows of $2 bytes. 16 bytes lie where the lowest bits of their row
# say, so that the 8 threads that read at a time do so from all banks. A step of NVFP4 is a tile wide, and one of MXFP4
# two.
_PLACE = """{{.reg .b32 low, warp, quarter, unit;
and.b32 quarter, $1, 3;
shr.u32 low, $1, 2;
and.b32 low, low, 7;
shr.u32 warp, $1, 1;
and.b32 warp, warp, 0x30;
{unit}
xor.b32 unit, unit, low;
mul.lo.u32 unit, unit, 16;
mad.lo.u32 $0, low, 128, unit;
mad.lo.u32 $0, warp, $2, $0;
{half}}}"""
PLACES: dict[Form, str] = {
    "nvfp4": _PLACE.format(unit="mul.lo.u32 unit, quarter, 2;", half=""),
    "mxfp4": _PLACE.format(
        unit="and.b32 unit, quarter, 1;\nmul.lo.u32 unit, unit, 4;",
        half=f"shr.u32 quarter, quarter, 1;\nmad.lo.u32 $0, quarter, {TILE_BYTES}, $0;\n",
    ),
}  # fmt: skip
# Where the scales of thread $1's first row are, of the first of as many steps as rows of $2 bytes have: units of 16
# bytes, one a step, which lie where the bits $3 of their row say.
SCALE_PLACE = """{.reg .b32 low, row, quarter;
shr.u32 low, $1, 2;
and.b32 low, low, 7;
shr.u32 row, $1, 1;
and.b32 row, row, 0x30;
or.b32 row, row, low;
and.b32 quarter, $1, 3;
shr.u32 low, low, $3;
mul.lo.u32 low, low, 16;
mad.lo.u32 low, quarter, 4, low;
mad.lo.u32 $0, row, $2, low;
}"""
# Rows r and r + 8.
_LOAD_SCALES = "{{.reg .b32 t; add.u32 t, $2, $3; ld.shared.b32 $0, [t]; ld.shared.b32 $1, [t + {below}];}}"
# The unit $10 / 16 of a thread's codes: its lowest bits are free in `PLACES`.
_LOAD_CODES = """{{.reg .b32 t; xor.b32 t, $9, $10; add.u32 t, t, $8;
ld.shared.v4.b32 {{$0, $1, $2, $3}}, [t];
ld.shared.v4.b32 {{$4, $5, $6, $7}}, [t + {below}];
}}"""

# A word for each thread, two, and eight.
SINGLE = plgpu.Layout.WG_STRIDED((128,), 1)
PAIRS = plgpu.Layout.WG_STRIDED((128 * 2,), 2)
EIGHTS = plgpu.Layout.WG_STRIDED((128 * 8,), 8)
_SIZES = {SINGLE: 1, PAIRS: 2, EIGHTS: 8}


def step_of(form: Form) -> int:
    """How much of k a step takes."""
    return BLOCKS * (16 if form == "nvfp4" else 32)


def place(form: Form, tiles: int) -> jax.Array:
    """Where a thread finds its codes in rows of so many tiles: once for all steps."""
    make = lambda: words(1, [mgpu.utils.thread_idx(), constant(128 * tiles)], PLACES[form])
    return in_registers(lambda context: together(make()), layout=SINGLE)()


def scale_place(steps: int) -> jax.Array:
    """Where a thread finds its scales in the first of so many steps, whose scales come together: 1, 2, 4 or 8.

    Those of step i are there with 16 i added to its bits without carries.
    """
    make = lambda: words(1, [mgpu.utils.thread_idx(), *scale_place_of(steps)], SCALE_PLACE)
    return in_registers(lambda context: together(make()), layout=SINGLE)()


def scale_place_of(steps: int) -> list[Any]:
    """What `SCALE_PLACE` is told of so many steps: bytes of a row, and how many of its number's bits choose no unit."""
    return [constant(16 * steps), constant(4 - steps.bit_length())]


def in_registers(function: Any, *arguments: Any, layout: Any = PAIRS) -> Any:
    """A function of arrays and references whose result is words of each thread, made of PTX."""
    made = plgpu.ShapeDtypeStruct((128 * _SIZES[layout],), jnp.uint32, layout)
    return plgpu.inline_mgpu(arg_types=arguments, return_type=made)(function)


def load_scales(scales: Any, place: jax.Array) -> jax.Array:
    """The scales of a thread's four blocks in a step, a word for each of its rows r and r + 8.

    Args:
      scales: in shared memory, uint8 `[64, 16 steps]`, with `scale_transforms`.
      place: of `scale_place`, plus 16 times which of these steps.
    """
    steps = scales.shape[-1] // BLOCKS
    run = lambda context, scales, place: together(scale_words(steps, apart(place)[0], address(scales)))
    return in_registers(run, plgpu.RefType(scale_transforms(steps)), SINGLE)(scales, place)


def scale_transforms(steps: int) -> tuple[Any, ...]:
    """How scales of so many steps lie in shared memory: so that 8 rows are read at a time from all banks."""
    size = BLOCKS * steps
    return () if steps == 1 else (plgpu.TilingTransform((8, size)), plgpu.SwizzleTransform(size))


def scale_words(steps: int, place: Any, scales: Any) -> list[Any]:
    """The same from addresses, of rows with the scales of so many steps."""
    return words(2, [scales, place], _LOAD_SCALES.format(below=128 * steps), effects=True)


def tiles_of(codes: Any) -> int:
    """How many tiles a row of codes in shared memory has."""
    return int(ir.MemRefType(codes.type).shape[1])


def code_words(tiles: int, unit: int, place: Any, codes: Any) -> list[Any]:
    """32 codes of row r, four words, and of row r + 8: those of a unit of 16 bytes in rows of so many tiles."""
    text = _LOAD_CODES.format(below=TILE_BYTES * tiles)
    return words(8, [codes, place, constant(16 * unit)], text, effects=True)


def words(count: int, operands: list[Any], text: str, *, effects: bool = False) -> list[Any]:
    """PTX with results `$0` on and the operands behind them; without effects it may move, and run once for several."""
    i32 = ir.IntegerType.get_signless(32)
    constraints = ",".join(["=r"] * count + ["r"] * len(operands))
    kind = i32 if count == 1 else llvm.StructType.get_literal([i32] * count)
    made: Any = llvm.inline_asm(kind, operands, text, constraints, asm_dialect=0, has_side_effects=effects)
    return [made] if count == 1 else [llvm.extractvalue(i32, made, [i]) for i in range(count)]


def effect(operands: list[Any], text: str) -> None:
    """PTX with no result, which writes to memory; operands are words, or addresses in global memory."""
    kinds = ["l" if operand.type.width == 64 else "r" for operand in operands]
    constraints = ",".join([*kinds, "~{memory}"])
    nothing = ir.Type.parse("!llvm.void")
    llvm.inline_asm(nothing, operands, text, constraints, asm_dialect=0, has_side_effects=True)


def together(separate: list[Any]) -> Any:
    """Words as an array in registers."""
    count = len(separate)
    whole = llvm.mlir_undef(ir.VectorType.get((count,), ir.IntegerType.get_signless(32)))
    for i, word in enumerate(separate):
        whole = vector.insert(word, whole, [], [i])
    layout = mgpu.WGStridedFragLayout((128 * count,), count)
    return mgpu.FragmentedArray(_registers=np.array([whole], object), _layout=layout, _is_signed=False)


def apart(array: Any) -> list[Any]:
    """The words of such an array."""
    (whole,) = array.registers.reshape(-1)
    return [vector.extract(whole, [], [i]) for i in range(whole.type.shape[0])]


def address(reference: Any) -> Any:
    """Of shared memory."""
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), mgpu.utils.memref_ptr(reference))


def constant(value: int) -> Any:
    """A word."""
    return mgpu.utils.c(value, ir.IntegerType.get_signless(32))


def operand_of(values: np.ndarray, kind: Any, layout: Any, chunk: int) -> Any:
    """An operand of `wgmma`, 64 rows of a chunk, from words of a thread's values, each a vector of this kind."""
    registers = np.empty(values.shape, object)
    for at, word in np.ndenumerate(values):
        registers[at] = vector.bitcast(kind, vector.broadcast(ir.VectorType.get((1,), word.type), word))
    registers = registers.reshape(layout.registers_shape((64, chunk)))
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)
