"""One pass over matrices on Hopper in Pallas Mosaic GPU, which writes FP8 results in
both orientations.

A block takes one tile, and a multiprocessor holds several blocks: one waits for its
copy while others compute. A pass whose blocks walk tiles takes 6 % longer. Bulk copies
bring a tile into shared memory and take the results from there. The body of a pass gets
a few rows at a time. If it asks for the largest value of a square, row or column, all
rows run up to there first and then anew, from shared memory.
"""

import contextlib
import functools
import itertools
from collections.abc import Sequence

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


def call(one: Pass, *operands: jax.Array) -> list[jax.Array]:
    """Return the outputs of a pass over matrices `[m, k]`; scalars are float32
    `[1]`.
    """
    matrices, rest, size = (
        operands[: one.count],
        operands[one.count :],
        one.tiling.rows[0],
    )
    (m, k), columns = matrices[0].shape, max(COLUMNS, size)
    written = [output for output in one.outputs if output.replaces is None]
    coded = [output for output in written if output.form in ("tile", "transposed")]
    # Maxima that a body asks for, those of rows aside: each gives results of one of
    # these forms.
    sides = [
        {"one": size, "columns": 1}[output.form]
        for output in written
        if output.form in ("one", "columns")
    ]
    forms = {"tile": (m, k), "transposed": (k, m), "one": (m // size, k // size)}
    forms |= {"rows": (m, k // size), "columns": (k, m // size)}
    shape = lambda form, x: jax.ShapeDtypeStruct(forms[form], x.dtype)
    kernel = plgpu.kernel(
        functools.partial(_kernel, one),
        out_type=[
            shape(form, x)
            for x in written
            for form in (x.form, "transposed")[: 1 + x.transposed]
        ],
        grid=((m // ROWS) * (k // columns),),
        grid_names=("tile",),
        scratch_types=dict(
            tiles=[plgpu.SMEM((ROWS, columns), matrix.dtype) for matrix in matrices],
            codes=[
                plgpu.SMEM((ROWS, columns), jnp.dtype(output.dtype)) for output in coded
            ],
            memory=[
                Registers.turned(ROWS, columns, x.dtype)
                for x in coded
                if x.transposed or x.form == "transposed"
            ],
            tops=[
                plgpu.SMEM((4, ROWS // size * columns // side), jnp.int32)
                for side in sides
            ],
            filled=plgpu.Barrier(num_arrivals=len(matrices)),
        ),
        interpret=plgpu.InterpretGPUParams() if device_kind() == "cpu" else None,
        kernel_name=one.name,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )
    # A reference, so that the matrix is replaced where it lies if its buffer is
    # donated.
    places = {
        i: jax.new_ref(matrices[i])
        for i in (output.replaces for output in one.outputs)
        if i is not None
    }
    results = kernel(
        *(places.get(i, matrix) for i, matrix in enumerate(matrices)), *rest
    )
    return varying([*results, *map(jax.freeze, places.values())], *operands)


def _kernel(
    one: Pass, *refs: Ref, tiles: Ref, codes: Ref, memory: Ref, tops: Ref, filled: Ref
) -> None:
    """Compute one tile."""
    matrices, size, columns, tile = (
        refs[: one.count],
        one.tiling.rows[0],
        tiles[0].shape[1],
        lax.axis_index("tile"),
    )
    place = (
        lax.div(tile, refs[0].shape[1] // columns),
        lax.rem(tile, refs[0].shape[1] // columns),
    )
    at = pl.ds(place[0] * ROWS, ROWS), pl.ds(place[1] * columns, columns)
    for matrix, here in zip(matrices, tiles, strict=True):
        plgpu.copy_gmem_to_smem(matrix.at[at], here, filled)
    first_out = len(refs) - sum(
        1 + x.transposed for x in one.outputs if x.replaces is None
    )
    starts = (
        one.count,
        one.count + one.vectors[0],
        one.count + sum(one.vectors),
        first_out,
    )
    of_rows, of_columns, scalars = (
        refs[first:last] for first, last in itertools.pairwise(starts)
    )
    registers, outs = Registers((512 // columns, columns)), iter(refs[first_out:])
    # Read before the tile is there.
    rest = [
        *(registers.read_vector(ref.at[at[1]], 1) for ref in of_columns),
        *(ref[0] for ref in scalars),
    ]
    numbers = [
        [*(registers.read_vector(ref.at[at[0]], 0, first) for ref in of_rows), *rest]
        for first in range(0, ROWS, registers.shape[0])
    ]
    free, targets, results, transposes, of_blocks = (
        (iter(codes), iter(memory)),
        [],
        [],
        [],
        [],
    )
    for output in one.outputs:
        if output.form in ("one", "rows", "columns"):
            each = (
                1 if output.form == "rows" else size,
                1 if output.form == "columns" else size,
            )
            counts = ROWS // each[0], columns // each[1]
            few = [
                pl.ds(i * count, count) for i, count in zip(place, counts, strict=True)
            ]
            of_blocks.append(
                (
                    output.form,
                    next(outs).at[tuple(few[:: -1 if output.form == "columns" else 1])],
                )
            )
        elif output.replaces is not None:
            targets.append(tiles[output.replaces])
            results.append((targets[-1], matrices[output.replaces].at[at]))
        else:
            targets.append(next(free[0]))
            if output.form == "tile":
                results.append((targets[-1], next(outs).at[at]))
            if output.transposed or output.form == "transposed":
                transposes.append((targets[-1], next(free[1]), next(outs).at[at[::-1]]))
    plgpu.barrier_wait(filled)
    _compute(one, tiles, numbers, targets, of_blocks, tops)
    write_back(results, transposes)


def _compute(
    one: Pass,
    tiles: Ref,
    numbers: list[list[jax.Array]],
    targets: list[Ref],
    of_blocks: Sequence[tuple[str, Ref]],
    memory: Ref,
) -> None:
    """Compute a tile: matrices in `targets`, and a number for each of its squares, or
    of their rows or columns.
    """
    (rows, columns), size = tiles[0].shape, one.tiling.rows[0]
    registers, turn = Registers((512 // columns, columns)), 512 // columns
    is_few = [output.form not in ("tile", "transposed") for output in one.outputs]
    # The ones that the body has asked for, for each step
    maxima: list[list[tuple[jax.Array, ...]]] = []
    while True:
        found, seen, do = [], [], _Operations(registers, [])
        for band in range(0, rows, size):
            values, of_band, tops = tuple[jax.Array, ...](), [], []
            # Matrices are written once the first maximum is known, if there is one;
            # then only numbers are left.
            for first in range(band, band + (size if len(maxima) < 2 else turn), turn):
                do, at = (
                    _Operations(registers, [known[first // turn] for known in maxima]),
                    pl.ds(first, turn),
                )
                with contextlib.suppress(StopIteration):
                    values = one.body(
                        do,
                        *(registers.load(tile.at[at]) for tile in tiles),
                        *numbers[first // turn],
                    )
                if len(do.asked) > len(maxima):
                    tops.append(do.asked[-1][0])
                if len(maxima) == min(1, len(do.asked)):
                    matrices = [
                        x for x, skip in zip(values, is_few, strict=True) if not skip
                    ]
                    registers.store(matrices, [ref.at[at] for ref in targets])
                of_band.append(list(itertools.compress(values, is_few)))
            found.append(of_band)
            seen.append(tops)
        if len(do.asked) == len(maxima):
            for i, (form, ref) in enumerate(of_blocks):
                few = [
                    x[i]
                    for of_band in found
                    for x in (of_band if form == "rows" else of_band[-1:])
                ]
                registers.write_of_blocks(size, form, few, ref)
            return
        known = []
        for axis in do.asked[-1][1]:
            bits = [
                x
                for tops in seen
                for x in (tops if axis == 1 else [functools.reduce(jnp.maximum, tops)])
            ]
            tops = registers.largest_of_blocks(
                size, axis, bits, None if axis == 1 else memory[len(maxima)]
            )
            known.append([x for x in tops for _ in range(rows // turn // len(tops))])
        maxima.append(list(zip(*known, strict=True)))


class _Operations(Operations):
    """The operations on some rows of a tile, with the maxima of their squares and lines
    as far as they are known.
    """

    def __init__(
        self, registers: Registers, known: list[tuple[jax.Array, ...]]
    ) -> None:
        self.registers, self.known, self.asked = (
            registers,
            known,
            list[tuple[jax.Array, Sequence[int | None]]](),
        )

    def floor(self, x: jax.Array) -> jax.Array:
        return (
            jnp.floor(x)
            if device_kind() == "cpu"
            else self.registers.instruct("cvt.rmi.f32.f32 $0, $1;", x)
        )

    def scaled(self, x: jax.Array, inverse: jax.Array, dtype: DTypeLike) -> jax.Array:
        if device_kind() == "cpu":
            return numerics.flush_subnormal(x) * inverse
        return self.registers.instruct("mul.rn.ftz.f32 $0, $1, $2;", x, inverse)

    def largest(
        self, x: jax.Array, axes: Sequence[int | None] = (None,)
    ) -> list[jax.Array]:
        # Bits without their sign are ordered like magnitudes, and NaN is the largest.
        self.asked.append((lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF, axes))
        if not self.known:
            raise StopIteration  # the rest of the body needs these maxima
        is_known = len(self.asked) <= len(self.known)
        return (
            list(self.known[len(self.asked) - 1])
            if is_known
            else [self.registers.spread(0)] * len(axes)
        )
