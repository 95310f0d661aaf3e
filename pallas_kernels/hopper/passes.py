"""One pass over matrices on Hopper in Pallas Mosaic GPU, which writes FP8 results in both orientations.

A block takes one tile, and a multiprocessor holds several blocks: one waits for its copy while others compute. A pass
whose blocks walk tiles takes 6 % longer. Bulk copies bring a tile into shared memory and take the results from there.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels import numerics
from pallas_kernels.dispatch import device_kind
from pallas_kernels.hopper.plan import COLUMNS, ROWS
from pallas_kernels.hopper.registers import Ref, Registers, write_back
from pallas_kernels.specs import varying
from pallas_kernels.tiled import Operations, Pass

_TURN = 8  # rows
_REGISTERS = Registers((_TURN, COLUMNS))


def call(one: Pass, *operands: jax.Array) -> list[jax.Array]:
    """Return the outputs of a pass over matrices `[m, k]`; scalars are float32 `[1]`."""
    matrices, scalars = operands[: one.count], operands[one.count :]
    m, k = matrices[0].shape
    written = [output for output in one.outputs if output.replaces is None]
    shapes = [jax.ShapeDtypeStruct(x, out.dtype) for out in written for x in ((m, k), (k, m))[: 1 + out.transposed]]
    kernel = plgpu.kernel(
        functools.partial(_kernel, one, k // COLUMNS),
        out_type=shapes,
        grid=((m // ROWS) * (k // COLUMNS),),
        grid_names=("tile",),
        scratch_types=dict(
            tiles=[plgpu.SMEM((ROWS, COLUMNS), matrix.dtype) for matrix in matrices],
            codes=[plgpu.SMEM((ROWS, COLUMNS), jnp.dtype(output.dtype)) for output in written],
            memory=[_REGISTERS.turned(ROWS, COLUMNS, output.dtype) for output in written if output.transposed],
            filled=plgpu.Barrier(num_arrivals=len(matrices)),
        ),
        interpret=plgpu.InterpretGPUParams() if device_kind() == "cpu" else None,
        kernel_name=one.name,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    # A reference, so that the matrix is replaced where it lies if its buffer is donated.
    places = {i: jax.new_ref(matrices[i]) for i in (output.replaces for output in one.outputs) if i is not None}
    results = kernel(*(places.get(i, matrix) for i, matrix in enumerate(matrices)), *scalars)
    return varying([*results, *map(jax.freeze, places.values())], *operands)


def _kernel(one: Pass, across: int, *refs: Ref, tiles: Ref, codes: Ref, memory: Ref, filled: Ref) -> None:
    """Compute one tile."""
    tile, places = lax.axis_index("tile"), len(memory) + len(codes)
    matrices, scalars, outs = refs[: one.count], refs[one.count : -places], iter(refs[-places:])
    at = pl.ds(lax.div(tile, across) * ROWS, ROWS), pl.ds(lax.rem(tile, across) * COLUMNS, COLUMNS)
    for matrix, here in zip(matrices, tiles, strict=True):
        plgpu.copy_gmem_to_smem(matrix.at[at], here, filled)
    numbers, free = [ref[0] for ref in scalars], (iter(codes), iter(memory))
    results, transposes = [], []
    for output in one.outputs:
        if output.replaces is not None:
            results.append((tiles[output.replaces], matrices[output.replaces].at[at]))
            continue
        results.append((next(free[0]), next(outs).at[at]))
        if output.transposed:
            transposes.append((results[-1][0], next(free[1]), next(outs).at[at[::-1]]))
    plgpu.barrier_wait(filled)
    for first in range(0, ROWS, _TURN):
        rows = pl.ds(first, _TURN)
        found = one.body(_Operations(), *(_REGISTERS.load(tile.at[rows]) for tile in tiles), *numbers)
        _REGISTERS.store(found, [ref.at[rows] for ref, _ in results])
    write_back(results, transposes)


class _Operations(Operations):
    """The operations on eight rows of a tile."""

    def floor(self, x: jax.Array) -> jax.Array:
        return jnp.floor(x) if device_kind() == "cpu" else _REGISTERS.instruct("cvt.rmi.f32.f32 $0, $1;", x)

    def scaled(self, x: jax.Array, inverse: jax.Array, dtype: DTypeLike) -> jax.Array:
        if device_kind() == "cpu":
            return numerics.flush_subnormal(x) * inverse
        return _REGISTERS.instruct("mul.rn.ftz.f32 $0, $1, $2;", x, inverse)
