"""One pass over matrices on Hopper in Pallas Mosaic GPU, which writes FP8 results in both orientations.

A block walks tiles of 128 rows. Bulk copies bring each tile into shared memory and take the results from there, so no
thread waits for global memory. `pass_text.py` has the instructions in between.
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

from pallas_kernels.dispatch import device_cores, device_kind
from pallas_kernels.hopper.pass_text import ROWS, Pass, text
from pallas_kernels.specs import varying

Ref: TypeAlias = Any  # of the GPU's memory, or a tree of such references

_H100_MULTIPROCESSORS = 132


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
    across, tiles = k // one.columns, (m // ROWS) * (k // one.columns)
    blocks = min(tiles, 2 if interpret else one.blocks * device_cores(otherwise=_H100_MULTIPROCESSORS))
    turned = one.results
    shapes = [jax.ShapeDtypeStruct((k, m) if turns else (m, k), one.dtype) for turns in turned]
    box = (ROWS, one.columns)

    def smem(count: int, box: tuple[int, ...], dtype: str) -> Any:
        return plgpu.SMEM((count, *box), jnp.dtype(dtype), transforms=_swizzled(box[1], dtype))

    kernel = plgpu.kernel(
        functools.partial(_kernel, one, across, tiles, interpret),
        out_type=shapes,
        grid=(blocks,),
        grid_names=("block",),
        scratch_types=dict(
            rings=[smem(one.stages, box, dtype) for dtype in one.dtypes],
            codes=[smem(1, box[::-1] if turns else box, one.dtype) for turns in turned],
            filled=plgpu.Barrier(num_arrivals=len(matrices), num_barriers=one.stages),
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


def _kernel(
    one: Pass, across: int, tiles: int, interpret: bool, *refs: Ref, rings: Ref, codes: Ref, filled: Ref
) -> None:
    """Walk the tiles of one block."""
    count = len(one.dtypes)
    matrices, scalars, outs = refs[:count], refs[count], refs[count + 1 :]
    block, grid = lax.axis_index("block"), lax.axis_size("block")

    def place(turn: Any) -> tuple[Any, Any]:
        tile = block + turn * grid
        row, column = lax.div(tile, across), lax.rem(tile, across)
        return pl.ds(row * ROWS, ROWS), pl.ds(column * one.columns, one.columns)

    def fill(turn: Any) -> None:
        @pl.when(block + turn * grid < tiles)
        def _copy() -> None:
            slot = lax.rem(turn, one.stages)
            for matrix, ring in zip(matrices, rings, strict=True):
                plgpu.copy_gmem_to_smem(matrix.at[place(turn)], ring.at[slot], filled.at[slot])

    for turn in range(one.stages):
        fill(jnp.int32(turn))

    @pl.loop(0, lax.div(tiles - block + grid - 1, grid))
    def _turns(turn: Any) -> None:
        slot = lax.rem(turn, one.stages)
        plgpu.barrier_wait(filled.at[slot])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        own = [ring.at[slot] for ring in rings], [code.at[0] for code in codes]
        (_by_numbers if interpret else _by_instructions)(one, *own, scalars)
        # All threads have read the matrices and written the results.
        plgpu.commit_smem()
        at = place(turn)
        results = [(source, at[::-1] if turns else at) for source, turns in zip(own[1], one.results, strict=True)]
        if one.replaced is not None:
            results.append((own[0][one.replaced], at))
        targets = outs if one.replaced is None else [*outs, matrices[one.replaced]]
        for (source, where), out in zip(results, targets, strict=True):
            plgpu.copy_smem_to_gmem(source, out.at[where], commit_group=False)
        plgpu.commit_smem_to_gmem_group()
        if one.replaced is not None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        fill(turn + one.stages)

    plgpu.wait_smem_to_gmem(0)


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
        for turn in range(one.turns):
            llvm.inline_asm(
                ir.Type.parse("!llvm.void"), [*places, mgpu.utils.thread_idx(), *values], text(one, turn, count),
                constraints, asm_dialect=0, has_side_effects=True,
            )  # fmt: skip

    run(*matrices, *codes, scalars)
