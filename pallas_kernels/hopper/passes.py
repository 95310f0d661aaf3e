"""One pass over matrices on Hopper in Pallas Mosaic GPU, which writes FP8 results in both orientations.

A block takes one tile, and a multiprocessor holds several blocks: one waits for its copy while others compute. A pass
whose blocks walk tiles takes 6 % longer. Bulk copies bring a tile into shared memory and take the results from there.
`pass_text.py` has the instructions in between.
"""

import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, memref

from pallas_kernels.dispatch import device_kind
from pallas_kernels.hopper.pass_text import COLUMNS, ROWS, TURNS, Pass, text
from pallas_kernels.specs import varying

Ref: TypeAlias = Any  # of the GPU's memory, or a tree of such references


def _swizzled(width: int, dtype: Any) -> tuple[Any, ...]:
    """Return the transforms of rows of `width` values: pieces as wide as the swizzle, of 8 rows."""
    size = jnp.dtype(dtype).itemsize
    swizzle = min(128, width * size)
    return plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle)


def call(one: Pass, matrices: Sequence[jax.Array], scalars: jax.Array) -> list[jax.Array]:
    """Return for each FP8 result its matrix `[m, k]`, and `[k, m]` if it is turned; then the replaced matrix, if any.

    `scalars` are float32 `[n]`.
    """
    (m, k), interpret = matrices[0].shape, device_kind() == "cpu"
    shapes = [jax.ShapeDtypeStruct((k, m) if turns else (m, k), one.dtype) for turns in one.results]

    def smem(box: tuple[int, ...], dtype: str) -> Any:
        return plgpu.SMEM(box, jnp.dtype(dtype), transforms=_swizzled(box[1], dtype))

    kernel = plgpu.kernel(
        functools.partial(_kernel, one, k // COLUMNS, interpret),
        out_type=shapes,
        grid=((m // ROWS) * (k // COLUMNS),),
        grid_names=("tile",),
        scratch_types=dict(
            tiles=[smem((ROWS, COLUMNS), dtype) for dtype in one.dtypes],
            codes=[smem((COLUMNS, ROWS) if turns else (ROWS, COLUMNS), one.dtype) for turns in one.results],
            filled=plgpu.Barrier(num_arrivals=len(matrices)),
        ),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
        kernel_name=one.name,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    if one.replaced is None:
        return varying(kernel(*matrices, scalars), *matrices, scalars)
    # A reference, so that the matrix is replaced where it lies if its buffer is donated.
    place = jax.new_ref(matrices[one.replaced])
    operands = [place if i == one.replaced else matrix for i, matrix in enumerate(matrices)]
    return varying([*kernel(*operands, scalars), jax.freeze(place)], *matrices, scalars)


def _kernel(one: Pass, across: int, interpret: bool, *refs: Ref, tiles: Ref, codes: Ref, filled: Ref) -> None:
    """Compute one tile."""
    count, tile = len(one.dtypes), lax.axis_index("tile")
    matrices, scalars, outs = refs[:count], refs[count], refs[count + 1 :]
    at = pl.ds(lax.div(tile, across) * ROWS, ROWS), pl.ds(lax.rem(tile, across) * COLUMNS, COLUMNS)
    for matrix, here in zip(matrices, tiles, strict=True):
        plgpu.copy_gmem_to_smem(matrix.at[at], here, filled)
    plgpu.barrier_wait(filled)
    (_by_numbers if interpret else _by_instructions)(one, tiles, codes, scalars)
    # All threads have read the matrices and written the results.
    plgpu.commit_smem()
    results = list(zip(codes, outs, (at[::-1] if turns else at for turns in one.results), strict=True))
    if one.replaced is not None:
        results.append((tiles[one.replaced], matrices[one.replaced], at))
    for source, out, where in results:
        plgpu.copy_smem_to_gmem(source, out.at[where], commit_group=False)
    plgpu.commit_smem_to_gmem_group()
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _by_numbers(one: Pass, matrices: list[Ref], codes: list[Ref], scalars: Ref) -> None:
    """Compute a tile as the interpreter can."""
    found = one.by_numbers(*(ref[...] for ref in matrices), *(scalars[i] for i in range(scalars.shape[0])))
    targets = iter(codes)
    for result, turns in zip(found, one.turned, strict=False):
        next(targets)[...] = result
        if turns:
            next(targets)[...] = result.T
    if one.replaced is not None:
        matrices[one.replaced][...] = found[-1]


def _by_instructions(one: Pass, matrices: list[Ref], codes: list[Ref], scalars: Ref) -> None:
    """Compute a tile by PTX."""
    refs = [plgpu.RefType(_swizzled(ref.shape[1], ref.dtype)) for ref in (*matrices, *codes)]

    @plgpu.inline_mgpu(arg_types=(*refs, plgpu.RefType()))
    def run(_: object, *operands: ir.Value) -> None:
        *smem, gmem = operands
        index, i32 = ir.IndexType.get(), ir.IntegerType.get_signless(32)
        count = ir.MemRefType(gmem.type).shape[0]
        values = [memref.load(gmem, [mgpu.utils.c(i, index)]) for i in range(count)]
        places = [llvm.ptrtoint(i32, mgpu.utils.memref_ptr(ref)) for ref in smem]
        constraints = ",".join(["r"] * (len(places) + 1) + ["f"] * count + ["~{memory}"])
        for turn in range(TURNS):
            llvm.inline_asm(
                ir.Type.parse("!llvm.void"), [*places, mgpu.utils.thread_idx(), *values], text(one, turn, count),
                constraints, asm_dialect=0, has_side_effects=True,
            )  # fmt: skip

    run(*matrices, *codes, scalars)
