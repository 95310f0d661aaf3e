"""The kernel of passes of `tiled.py` on Hopper, in Pallas Mosaic GPU.

A block takes one tile, and a multiprocessor holds several blocks: one waits for its
copy while others compute. A pass whose blocks walk tiles takes 6 % longer. Bulk copies
bring a tile into shared memory and take the results from there. The body of a pass gets
a few rows at a time. If it needs the largest values of squares, rows or columns, they
are found first, and the rows are then read anew from shared memory.
"""

from collections.abc import Sequence
from functools import partial, reduce

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import numerics
from pallas_kernels.arithmetic import Instructions, Portable
from pallas_kernels.dispatch import device_kind
from pallas_kernels.hopper.plan import ROWS, columns_of
from pallas_kernels.hopper.registers import Ref, Registers, write_back
from pallas_kernels.specs import varying
from pallas_kernels.tiled import Arrays, Axis, Form, Pass, Sorted, shape_of


def call(one: Pass, *operands: Array) -> list[Array]:
    """Return the outputs of a pass over matrices `[m, k]`."""
    given = one.sort(operands)
    m, k = given.matrices[0].shape
    size = one.tiling.rows[0]
    columns = columns_of(size)
    written = []
    for output in one.outputs:
        if output.replaces is None:
            for form in output.forms:
                shape = shape_of(form, m, k, size, size)
                written.append(jax.ShapeDtypeStruct(shape, output.dtype))
    kernel = plgpu.kernel(
        partial(_kernel, one),
        out_type=written,
        grid=((m // ROWS) * (k // columns),),
        grid_names=("tile",),
        scratch_types=_memory(one, given.matrices),
        interpret=plgpu.InterpretGPUParams() if device_kind() == "cpu" else None,
        kernel_name=one.name,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )
    # A reference, so that the matrix is replaced where it lies if its buffer is
    # donated.
    arguments: list[Ref] = list(operands)
    replaced = []
    for output in one.outputs:
        if output.replaces is not None:
            place = jax.new_ref(operands[output.replaces])
            arguments[output.replaces] = place
            replaced.append(place)
    results = kernel(*arguments)
    found: list[Array] = varying([*results, *map(jax.freeze, replaced)], *operands)
    return found


def _memory(one: Pass, matrices: Sequence[Array]) -> dict[str, object]:
    """Return the shared memory of a block."""
    size = one.tiling.rows[0]
    columns = columns_of(size)
    codes = []
    turned = []
    for output in one.outputs:
        if output.is_matrix and output.replaces is None:
            codes.append(plgpu.SMEM((ROWS, columns), jnp.dtype(output.dtype)))
            if "transposed" in output.forms:
                turned.append(Registers.turned(ROWS, columns, output.dtype))
    # Warps exchange the maxima of squares and columns; a row lies in one warp.
    sides = [size if axis is None else 1 for axis in one.body.axes if axis != 1]
    sides += [size for output in one.outputs if output.zero_with is not None]
    tops = []
    for side in sides:
        numbers = ROWS // size * columns // side
        tops.append(plgpu.SMEM((4, numbers), jnp.int32))
    return dict(
        tiles=[plgpu.SMEM((ROWS, columns), matrix.dtype) for matrix in matrices],
        codes=codes,
        memory=turned,
        tops=tops,
        filled=plgpu.Barrier(num_arrivals=len(matrices)),
    )


def _kernel(
    one: Pass,
    *refs: Ref,
    tiles: list[Ref],
    codes: list[Ref],
    memory: list[Ref],
    tops: list[Ref],
    filled: Ref,
) -> None:
    """Compute one tile."""
    columns = tiles[0].shape[1]
    tile = lax.axis_index("tile")
    across = refs[0].shape[1] // columns
    place = lax.div(tile, across), lax.rem(tile, across)
    at = pl.ds(place[0] * ROWS, ROWS), pl.ds(place[1] * columns, columns)
    written = sum(len(x.forms) for x in one.outputs if x.replaces is None)
    given = one.sort(refs[: len(refs) - written])
    for matrix, here in zip(given.matrices, tiles, strict=True):
        plgpu.copy_gmem_to_smem(matrix.at[at], here, filled)
    registers = Registers((512 // columns, columns))
    # Read before the tile is there.
    numbers = _numbers(registers, given, at)

    outs = iter(refs[len(refs) - written :])
    free_codes = iter(codes)
    free_memory = iter(memory)
    targets = []
    results = []
    transposes = []
    of_blocks = []
    for output in one.outputs:
        if output.replaces is not None:
            target = tiles[output.replaces]
            results.append((target, given.matrices[output.replaces].at[at]))
            targets.append(target)
        elif output.is_matrix:
            target = next(free_codes)
            for form in output.forms:
                if form == "tile":
                    results.append((target, next(outs).at[at]))
                else:
                    turned = next(outs).at[at[::-1]]
                    transposes.append((target, next(free_memory), turned))
            targets.append(target)
        else:
            few = _few(output.form, one.tiling.rows[0], place, columns)
            of_blocks.append(next(outs).at[few])
    plgpu.barrier_wait(filled)
    _Tile(one, registers, tiles, numbers, tops).compute(targets, of_blocks)
    write_back(results, transposes)


def _numbers(
    registers: Registers,
    given: Sorted[Ref],
    at: tuple[pl.Slice, pl.Slice],
) -> list[list[Array]]:
    """Return the vectors and scalars of a tile for each few rows."""
    rest = [registers.read_vector(ref.at[at[1]], 1) for ref in given.columns]
    rest += [ref[0] for ref in given.scalars]
    numbers = []
    for first in range(0, ROWS, registers.shape[0]):
        of_rows = [registers.read_vector(ref.at[at[0]], 0, first) for ref in given.rows]
        numbers.append([*of_rows, *rest])
    return numbers


def _few(
    form: Form,
    size: int,
    place: tuple[Array, Array],
    columns: int,
) -> tuple[pl.Slice, ...]:
    """Return where the numbers of a tile lie in a result of one number a block."""
    height = ROWS if form == "rows" else ROWS // size
    width = columns if form == "columns" else columns // size
    at = pl.ds(place[0] * height, height), pl.ds(place[1] * width, width)
    return at[::-1] if form == "columns" else at


class _Tile:
    """A tile in shared memory, of which registers hold a few rows at a time.

    Args:
      one: the pass.
      registers: the few rows, of a step.
      tiles: the matrices of the tile.
      numbers: vectors and scalars for each step.
      memory: for each maximum, memory by which warps exchange it.
    """

    def __init__(
        self,
        one: Pass,
        registers: Registers,
        tiles: list[Ref],
        numbers: list[list[Array]],
        memory: list[Ref],
    ) -> None:
        self.one = one
        self.registers = registers
        self.tiles = tiles
        self.numbers = numbers
        self.memory = iter(memory)
        self.size = one.tiling.rows[0]
        self.steps = len(numbers)
        self.of_band = self.size // registers.shape[0]  # steps of a band of squares

    def compute(self, targets: list[Ref], of_blocks: list[Ref]) -> None:
        """Write matrices to `targets`, and a number for each block or line of one."""
        do = _operations(self.registers)
        maxima = self._maxima()
        found: list[list[Array]] = []
        zeros: list[list[Array]] = []
        for step in range(self.steps):
            values = self.one.body.values(do, self._load(step), maxima[step])
            at = self._at(step)
            matrices: list[Array] = []
            few: list[Array] = []
            measured = []
            for output, x in zip(self.one.outputs, values, strict=True):
                if output.is_matrix:
                    matrices.append(x)
                else:
                    few.append(x)
                if output.zero_with is not None:
                    wide = values[output.zero_with].astype(jnp.float32)
                    measured.append(_magnitude(wide))
            self.registers.store(matrices, [target.at[at] for target in targets])
            found.append(few)
            zeros.append(measured)
        outputs = [output for output in self.one.outputs if not output.is_matrix]
        tops = iter(zip(*zeros, strict=True))
        for i, (output, ref) in enumerate(zip(outputs, of_blocks, strict=True)):
            numbers = [few[i] for few in found]
            if output.form != "rows":
                numbers = numbers[self.of_band - 1 :: self.of_band]
            if output.zero_with is not None:
                largest = self._largest(None, next(tops))
                numbers = [
                    jnp.where(top == 0, 0, x.astype(jnp.int32)).astype(output.dtype)
                    for top, x in zip(largest, numbers, strict=True)
                ]
            self.registers.write_of_blocks(self.size, output.form, numbers, ref)

    def _maxima(self) -> list[Arrays]:
        """Return the maxima of the body for each step."""
        body = self.one.body
        if not body.axes:
            return [()] * self.steps
        bits = []
        for step in range(self.steps):
            bits.append(_magnitude(body.measured(self._load(step))))
        known = []
        for axis in body.axes:
            tops = self._largest(axis, bits)
            steps = self.steps // len(tops)
            of_steps: list[Array] = []
            for top in tops:
                of_steps += [top] * steps
            known.append(of_steps)
        return list(zip(*known, strict=True))

    def _largest(self, axis: Axis, bits: Sequence[Array]) -> list[Array]:
        """Return the largest of the values that share a maximum, from bits.

        There is an array for each step if rows share them, else for each band.
        """
        if axis == 1:
            return self.registers.largest_of_blocks(self.size, axis, bits, None)
        bands = []
        for first in range(0, self.steps, self.of_band):
            band = bits[first : first + self.of_band]
            bands.append(reduce(jnp.maximum, band))
        memory = next(self.memory)
        return self.registers.largest_of_blocks(self.size, axis, bands, memory)

    def _load(self, step: int) -> list[Array]:
        """Return the operands of the body."""
        at = self._at(step)
        tiles = [self.registers.load(tile.at[at]) for tile in self.tiles]
        return [*tiles, *self.numbers[step]]

    def _at(self, step: int) -> pl.Slice:
        rows = self.registers.shape[0]
        return pl.ds(step * rows, rows)


def _operations(registers: Registers) -> Portable:
    """Return the operations in which engines differ."""
    return Portable() if device_kind() == "cpu" else Instructions(registers.instruct)


def _magnitude(x: Array) -> Array:
    """Return bits without their sign, which are ordered like magnitudes.

    NaN is the largest.
    """
    return numerics.bits(x) & 0x7FFFFFFF
