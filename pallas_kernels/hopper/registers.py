"""Matrices in the registers of a warpgroup.

`jax.numpy` computes with them in a kernel, and PTX where it must be exact.
A lane has four neighbours of a row, and the next lane the next four. Tiles in shared
memory lie row after row, so that lanes read and write them without bank conflicts.

Functions of `plgpu.inline_mgpu` get MLIR values: arrays of registers, then references.
Interpreters, on CPUs, have no registers and take the `jax.numpy` next to them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import FragmentedArray
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import ArrayLike, DTypeLike
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, memref, vector
from jaxlib.mlir.ir import Value

from pallas_kernels import numerics
from pallas_kernels.dispatch import device_kind

Ref: TypeAlias = Any  # reference to memory, or a tree of references
_InLanes: TypeAlias = list[FragmentedArray]
_Values: TypeAlias = Sequence[Value]
_WARPS = 4  # of a warpgroup


@dataclass(frozen=True)
class Registers:
    """Matrices of one shape, of 512 values.

    They are four rows of 128, so that each warp has a row, or eight of 64. With fewer
    values `each` lane they are arrays of 128 times as many values.
    """

    shape: tuple[int, ...]
    each: int = 4

    @property
    def layout(self) -> plgpu.Layout:
        """The layout, for `plgpu.layout_cast`."""
        return plgpu.Layout.WG_STRIDED(self.shape, vec_size=self.each)

    def spread(self, x: ArrayLike) -> Array:
        """Return a number as a matrix of float32."""
        whole = jnp.broadcast_to(jnp.asarray(x, jnp.float32), self.shape)
        return plgpu.layout_cast(whole, self.layout)

    def instruct(self, assembly: str, *values: ArrayLike) -> Array:
        """Return the result of instructions on float32 values, elementwise.

        No compiler replaces them by others.
        """

        def of_lane(*lane: _Values) -> _Values:
            return [_asm(assembly, *x) for x in zip(*lane, strict=True)]

        return self._by_lanes(of_lane, *values)

    def largest(self, maximum: str, x: Array) -> Array:
        """Return the largest number of the row of each warp, none negative.

        `maximum` is the instruction, of numbers or of bits.
        """
        lines = ["{ .reg .b32 t; mov.b32 t, 0"]
        lines += [f"{maximum} t, t, ${i}" for i in (1, 2, 3, 4)]
        lines += ["redux.sync.max.s32 $0, t, 0xFFFFFFFF", "}"]
        text = "; ".join(lines)

        def of_lane(lane: _Values) -> _Values:
            return [_asm(text, *lane)] * 4

        return self._by_lanes(of_lane, x)

    def largest_of_blocks(
        self,
        size: int,
        axis: int | None,
        tops: Sequence[Array],
        memory: Ref,
    ) -> list[Array]:
        """Return the largest float32 of blocks, from bits, where the values are.

        Args:
          size: side of a square.
          axis: None for squares, 0 for their columns and 1 for their rows.
          tops: bits without signs: matrices of rows, or for squares and columns the
            largest ones of a band of squares.
          memory: int32 `[warps, squares or columns]`, or None for rows.
        """
        if device_kind() == "cpu":
            return [self._largest_of_block(size, axis, top) for top in tops]
        lanes = self.shape[1] // 4  # of a row
        apart = []  # lanes at these distances hold values of the same line
        for distance in (1, 2, 4, 8, 16):
            in_row = axis != 0 and distance < size // 4
            in_column = axis != 1 and distance >= lanes
            if in_row or in_column:
                apart.append(distance)

        def run(arrays: _InLanes, refs: _Values) -> _InLanes:
            found = [_values(x) for x in arrays]
            if axis != 0:
                found = [[_largest(values)] for values in found]
            # Of all matrices in turn, because each step waits for the one before
            for distance in apart:
                found = [_exchanged(values, distance) for values in found]
            if axis != 1:
                found = self._joined(size, axis, found, refs[0])
            f32 = ir.F32Type.get()
            results = []
            for values in found:
                floats = [arith.bitcast(f32, value) for value in values]
                results.append(self._array(floats * (4 // len(values))))
            return results

        refs = [] if axis == 1 else [memory]
        return self._inline(run, tops, refs, [jnp.float32] * len(tops))

    def _largest_of_block(self, size: int, axis: int | None, bits: Array) -> Array:
        """Return the same for one matrix in an interpreter."""
        blocks = bits.reshape(-1, self.shape[1] // size, size)
        over = (0, 2) if axis is None else 2 * axis
        top = jnp.max(blocks, over, keepdims=True)
        whole = jnp.broadcast_to(top, blocks.shape).reshape(self.shape)
        return numerics.from_bits(whole)

    def _joined(
        self,
        size: int,
        axis: int | None,
        found: list[_Values],
        memory: Value,
    ) -> list[_Values]:
        """Return the largest values over all warps, by way of shared memory."""
        each = len(found[0])
        columns = self.shape[1]
        lines = columns if axis == 0 else columns // size
        warp, lane = _warp_and_lane()
        _, in_row = _split(lane, columns // 4)
        column = arith.muli(in_row, _index(4))
        line, _ = _split(column, 1 if axis == 0 else size)
        kind = ir.VectorType.get((each,), found[0][0].type)
        places = []
        for band in range(len(found)):
            places.append(arith.addi(line, _index(band * lines)))
        for values, place in zip(found, places, strict=True):
            vector.store(vector.from_elements(kind, values), memory, [warp, place])
        mgpu.utils.warpgroup_barrier()
        of_warps = []
        for place in places:
            loads = [
                vector.load(kind, memory, [_index(i), place]) for i in range(_WARPS)
            ]
            of_warps.append(loads)
        joined = [_largest(loads) for loads in of_warps]
        return [_parts(x, each) for x in joined]

    def write_of_blocks(
        self,
        size: int,
        form: str,
        numbers: Sequence[Array],
        ref: Ref,
    ) -> None:
        """Write a number for each row, or square ("one") or column of each band."""
        step = self.shape[0] if form == "rows" else 1
        if device_kind() == "cpu":
            lines = jnp.concatenate([x[:step] for x in numbers])
            ref[...] = lines.T if form == "columns" else lines[:, ::size]
            return

        def run(arrays: _InLanes, refs: _Values) -> None:
            row, lane = _split(gpu.thread_id(gpu.Dimension.x), self.shape[1] // 4)
            square, within = _split(lane, size // 4)
            # One lane of those that hold the same number writes it: where this is 0.
            if form == "rows":
                other = within
            elif form == "columns":
                other = row
            else:
                other = arith.addi(row, within)
            with mgpu.utils.when(_is_zero(other)):
                for i, x in enumerate(arrays):
                    line = _index(i * step)
                    if form == "columns":
                        _write_column(x, refs[0], lane, line)
                    else:
                        at = [arith.addi(row, line), square]
                        memref.store(_value(x, 0), refs[0], at)

        self._inline(run, numbers, [ref])

    def load(self, ref: Ref) -> Array:
        """Read a matrix from a tile; interpreters know no layouts."""
        x: Array = ref[...]
        return x if device_kind() == "cpu" else plgpu.layout_cast(x, self.layout)

    def read_vector(self, ref: Ref, axis: Literal[0, 1], first: int = 0) -> Array:
        """Return a vector from `first` on, a number for each row (axis 0) or column."""
        if device_kind() == "cpu":
            line = jnp.expand_dims(ref[pl.ds(first, self.shape[axis])], 1 - axis)
            return jnp.broadcast_to(line, self.shape)

        def read(_: _InLanes, refs: _Values) -> _InLanes:
            value = arith.muli(gpu.thread_id(gpu.Dimension.x), _index(4))
            place = _split(value, self.shape[1])[axis]
            values = []
            for i in range(4):
                at = arith.addi(place, _index(first + axis * i))
                values.append(memref.load(refs[0], [at]))
            return [self._array(values, None if ref.dtype == jnp.float32 else True)]

        return self._inline(read, [], [ref], [ref.dtype])[0]

    def read_lines(self, ref: Ref) -> list[Array]:
        """Return an array for each column of `[lanes, values]`, each lane's own."""
        count = ref.shape[1]
        if device_kind() == "cpu":
            return [ref[:, i] for i in range(count)]

        def read(_: _InLanes, refs: _Values) -> _InLanes:
            lane = gpu.thread_id(gpu.Dimension.x)
            kind = ir.VectorType.get((count,), _dtype_of(refs[0]))
            line = vector.load(kind, refs[0], [lane, _index(0)])
            return [self._array([value]) for value in _parts(line, count)]

        return self._inline(read, [], [ref], [ref.dtype] * count)

    def write_lines(self, arrays: Sequence[Array], ref: Ref) -> None:
        """Write the bytes of each lane's values to its line of `[lanes, values]`."""
        if device_kind() == "cpu":
            lines = lax.bitcast_convert_type(jnp.stack(arrays, 1), ref.dtype)
            ref[...] = lines.reshape(ref.shape)
            return

        def write(arrays: _InLanes, refs: _Values) -> None:
            lane = gpu.thread_id(gpu.Dimension.x)
            stored = ir.VectorType.get((ref.shape[1],), _dtype_of(refs[0]))
            values = [_value(x, 0) for x in arrays]
            kind = ir.VectorType.get((len(values),), values[0].type)
            line = vector.bitcast(stored, vector.from_elements(kind, values))
            vector.store(line, refs[0], [lane, _index(0)])

        self._inline(write, arrays, [ref])

    def store(self, arrays: Sequence[Array], refs: Sequence[Ref]) -> None:
        """Write matrices to tiles, in their dtypes."""
        pairs = zip(arrays, refs, strict=True)
        arrays = [x.astype(ref.dtype) for x, ref in pairs]
        if device_kind() == "cpu":
            for x, tile in zip(arrays, refs, strict=True):
                tile[...] = x
            return

        def write(arrays: _InLanes, refs: _Values) -> None:
            for x, ref in zip(arrays, refs, strict=True):
                x.store_untiled(ref, optimized=False)

        self._inline(write, arrays, refs)

    def read_bytes(self, first: ArrayLike, refs: Sequence[Ref]) -> list[Array]:
        """Return a byte for the row of each warp, from `first` on, as int32."""

        def read(arrays: _InLanes, refs: _Values) -> _InLanes:
            row, _ = _place(*arrays)
            i32 = ir.IntegerType.get_signless(32)
            found = []
            for ref in refs:
                byte = arith.extui(i32, memref.load(ref, [row]))
                found.append(self._array([byte] * 4, signed=True))
            return found

        return self._inline(read, [jnp.int32(first)], refs, [jnp.int32] * len(refs))

    def copy_bytes(self, sources: Sequence[Ref], targets: Sequence[Ref]) -> None:
        """Copy columns of bytes: each warp its own rows, all at once."""
        count = len(sources)

        def copy(arrays: _InLanes, refs: _Values) -> None:
            warp, lane = _warp_and_lane()
            mgpu.utils.warp_barrier()
            for source, target in zip(refs[:count], refs[count:], strict=True):
                turns = ir.MemRefType(source.type).shape[0] // self.shape[0]
                _, turn = _split(lane, turns)
                row = arith.addi(arith.muli(turn, _index(self.shape[0])), warp)
                byte = arith.bitcast(_dtype_of(target), memref.load(source, [row]))
                memref.store(byte, target, [row])

        self._inline(copy, [], [*sources, *targets])

    def write_numbers(
        self,
        first: ArrayLike,
        numbers: Sequence[Array],
        refs: Sequence[Ref],
    ) -> None:
        """Write a byte or an int32 for the row of each warp, from row `first` on."""

        def write(arrays: _InLanes, refs: _Values) -> None:
            row, lane = _place(arrays[0])
            with mgpu.utils.when(_is_zero(lane)):
                for x, ref in zip(arrays[1:], refs, strict=True):
                    kind = _dtype_of(ref)
                    number = _value(x, 0)
                    if number.type != kind:
                        number = arith.trunci(kind, number)
                    memref.store(number, ref, [row])

        self._inline(write, [jnp.int32(first), *numbers], refs)

    def _by_lanes(self, function: Callable[..., _Values], *values: ArrayLike) -> Array:
        """Return float32: in each lane a function of its values of each matrix."""

        def run(arrays: _InLanes, refs: _Values) -> _InLanes:
            return [self._array(function(*(_values(x) for x in arrays)))]

        return self._inline(run, [self.spread(x) for x in values], (), [jnp.float32])[0]

    def _inline(
        self,
        function: Callable[[_InLanes, _Values], _InLanes | None],
        arrays: Sequence[Array],
        refs: Sequence[Ref],
        dtypes: Sequence[DTypeLike] = (),
    ) -> list[Array]:
        """Run a function of MLIR values, with a result of each dtype."""
        kinds = [self.layout if x.shape else plgpu.Layout.WG_SPLAT(()) for x in arrays]
        results = []
        for dtype in dtypes:
            results.append(
                plgpu.ShapeDtypeStruct(self.shape, dtype, layout=self.layout)
            )

        @plgpu.inline_mgpu(
            arg_types=(kinds, [plgpu.RefType()] * len(refs)),
            return_type=results or None,
        )
        def run(_: object, arrays: _InLanes, refs: _Values) -> _InLanes | None:
            return function(arrays, refs)

        made: list[Array] = run(list(arrays), list(refs))
        return made

    def _array(
        self,
        values: Sequence[Value],
        signed: bool | None = None,
    ) -> FragmentedArray:
        """Return a matrix from the values of each lane."""
        kind = ir.VectorType.get((self.each,), values[0].type)
        return FragmentedArray(
            _registers=np.full((1,), vector.from_elements(kind, values)),
            _layout=self.layout.to_mgpu(),
            _is_signed=signed,
        )

    @staticmethod
    def turned(rows: int, columns: int, dtype: DTypeLike) -> Any:
        """Return shared memory for a transpose of bytes, as bulk copies read it."""
        transforms = plgpu.TilingTransform((8, rows)), plgpu.SwizzleTransform(rows)
        return plgpu.SMEM((columns, rows), jnp.dtype(dtype), transforms=transforms)


def write_back(
    results: Sequence[tuple[Ref, Ref]], transposes: Sequence[tuple[Ref, Ref, Ref]]
) -> None:
    """Copy tiles to their places, and transposes of tiles.

    Args:
      results: (tile, place).
      transposes: (tile, memory from `Registers.turned`, place).
    """
    # All threads have read the tiles and written the results.
    plgpu.commit_smem()
    for tile, memory, _ in transposes:
        if device_kind() == "cpu":
            memory[...] = tile[...].T
        else:
            _turn(tile, memory)
    if transposes:
        plgpu.commit_smem()
    for source, target in results:
        plgpu.copy_smem_to_gmem(source, target, commit_group=False)
    for _, source, target in transposes:
        plgpu.copy_smem_to_gmem(source, target, commit_group=False)
    plgpu.commit_smem_to_gmem_group()
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _turn(tile: Ref, memory: Ref) -> None:
    """Write the transpose of a tile: a thread has 16 bytes of a column at a time."""
    rows, columns = tile.shape
    pieces = rows // 16
    transforms = Registers.turned(rows, columns, tile.dtype).transforms

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(transforms)))
    def run(_: object, tile: Value, memory: Value) -> None:
        kind = ir.VectorType.get((16,), _dtype_of(tile))
        for first in range(0, columns * pieces, mgpu.utils.WARPGROUP_SIZE):
            thread = gpu.thread_id(gpu.Dimension.x)
            piece, column = _split(arith.addi(thread, _index(first)), columns)
            row = arith.muli(piece, _index(16))
            above, within = _split(column, 8)
            codes = []
            for i in range(16):
                at = [arith.addi(row, _index(i)), column]
                codes.append(memref.load(tile, at))
            # The swizzle: pieces of 16 bytes trade places by the line of 128 bytes (PTX
            # ISA).
            line, _ = _split(arith.muli(column, _index(rows)), 128)
            swizzled = arith.xori(piece, _split(line, pieces)[1])
            place = [above, _index(0), within, arith.muli(swizzled, _index(16))]
            vector.store(vector.from_elements(kind, codes), memory, place)

    run(tile, memory)


def _asm(text: str, *values: Value) -> Value:
    """Return the result of instructions on float32 values.

    One that joins lanes stays where it is.
    """
    kind = ir.F32Type.get()
    constraints = "=f" + ",f" * len(values)
    result: Any = llvm.inline_asm(
        kind, values, text, constraints, has_side_effects="sync" in text
    )
    return result


def _value(x: FragmentedArray, i: int) -> Value:
    return vector.extract(x.registers.flat[0], [], [i])


def _values(x: FragmentedArray) -> _Values:
    """Return the values of a lane."""
    lane = x.registers.flat[0]
    return _parts(lane, lane.type.shape[0])


def _parts(x: Value, count: int) -> _Values:
    return [vector.extract(x, [], [i]) for i in range(count)]


def _largest(values: _Values) -> Value:
    return reduce(arith.maxsi, values)


def _exchanged(values: _Values, distance: int) -> _Values:
    """Return the larger of a lane's values and those of the lane at a distance."""
    found: list[Value] = []
    for value in values:
        other = mgpu.utils.shfl_bfly(value, distance)
        found.append(arith.maxsi(value, other))
    return found


def _write_column(x: FragmentedArray, ref: Value, lane: Value, line: Value) -> None:
    """Write the four values of a lane to a column of a reference."""
    for i in range(4):
        row = arith.addi(arith.muli(lane, _index(4)), _index(i))
        memref.store(_value(x, i), ref, [row, line])


def _is_zero(number: Value) -> Value:
    return arith.cmpi(arith.CmpIPredicate.eq, number, _index(0))


def _dtype_of(ref: Value) -> ir.Type:
    return ir.MemRefType(ref.type).element_type


def _index(number: int) -> Value:
    return mgpu.utils.c(number, ir.IndexType.get())


def _split(number: Value, by: int) -> tuple[Value, Value]:
    """Return (quotient, remainder)."""
    return arith.divui(number, _index(by)), arith.remui(number, _index(by))


def _warp_and_lane() -> tuple[Value, Value]:
    return _split(gpu.thread_id(gpu.Dimension.x), mgpu.utils.WARP_SIZE)


def _place(first: FragmentedArray) -> tuple[Value, Value]:
    """Return the row of this warp, and the lane."""
    warp, lane = _warp_and_lane()
    start = arith.index_cast(ir.IndexType.get(), first.registers.flat[0])
    return arith.addi(start, warp), lane
