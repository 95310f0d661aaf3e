"""Matrices in the registers of a warpgroup: `jax.numpy` computes with them in a kernel,
and PTX where it must be exact.

A lane has four neighbours of a row, and the next lane the next four. Tiles in shared
memory lie row after row, so that lanes read and write them without bank conflicts.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import ArrayLike, DTypeLike
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, memref, vector

from pallas_kernels.dispatch import device_kind

Ref: TypeAlias = Any  # reference to memory, or a tree of references


@dataclass(frozen=True)
class Registers:
    """Matrices of one shape, of 512 values: four rows of 128, so that each warp has a
    row, or eight of 64.

    With fewer values `each` lane they are arrays of 128 times as many values.
    """

    shape: tuple[int, ...]
    each: int = 4

    @property
    def layout(self) -> Any:
        """The layout, for `plgpu.layout_cast`."""
        return plgpu.Layout.WG_STRIDED(self.shape, vec_size=self.each)

    def spread(self, x: ArrayLike) -> jax.Array:
        """Return a number as a matrix of float32."""
        return plgpu.layout_cast(
            jnp.broadcast_to(jnp.asarray(x, jnp.float32), self.shape), self.layout
        )

    def instruct(self, assembly: str, *values: ArrayLike) -> jax.Array:
        """Return the result of instructions on float32 values, elementwise; no compiler
        replaces them by others.
        """
        return self._by_lanes(
            lambda *lane: [_asm(assembly, *x) for x in zip(*lane, strict=True)], *values
        )

    def largest(self, maximum: str, x: jax.Array) -> jax.Array:
        """Return the largest number of the row of each warp, none negative, by a
        maximum of numbers or of bits.
        """
        lines = [
            "{ .reg .b32 t; mov.b32 t, 0",
            *(f"{maximum} t, t, ${i}" for i in (1, 2, 3, 4)),
        ]
        text = "; ".join([*lines, "redux.sync.max.s32 $0, t, 0xFFFFFFFF", "}"])
        return self._by_lanes(lambda lane: [_asm(text, *lane)] * 4, x)

    def largest_of_blocks(
        self, size: int, axis: int | None, tops: Sequence[jax.Array], memory: Ref
    ) -> list[jax.Array]:
        """Return the largest float32 of squares, or of their columns (0) or rows (1),
        from bits, where the values are.

        Squares and columns have a matrix for a band of squares. `memory` is int32
        `[warps, squares or columns]`, or None for rows.
        """
        columns, lanes = self.shape[1], self.shape[1] // 4
        lines, each = (columns, 4) if axis == 0 else (columns // size, 1)
        # Lanes at these distances hold values of the same line.
        apart = [
            2**i
            for i in range(5)
            if (axis != 0 and 2**i < size // 4) or (axis != 1 and 2**i >= lanes)
        ]

        def run(
            arrays: list[mgpu.FragmentedArray], refs: list[ir.Value]
        ) -> list[mgpu.FragmentedArray]:
            found = [[_value(x, i) for i in range(4)] for x in arrays]
            found = (
                found
                if axis == 0
                else [[functools.reduce(arith.maxsi, x)] for x in found]
            )
            # Of all matrices in turn, because each step waits for the one before
            for distance in apart:
                found = [
                    [arith.maxsi(top, mgpu.utils.shfl_bfly(top, distance)) for top in x]
                    for x in found
                ]
            if axis != 1:
                warp, lane = _split(
                    gpu.thread_id(gpu.Dimension.x), mgpu.utils.WARP_SIZE
                )
                line, _ = _split(
                    arith.muli(_split(lane, lanes)[1], _index(4)),
                    size if each == 1 else 1,
                )
                kind = ir.VectorType.get((each,), found[0][0].type)
                places = [
                    arith.addi(line, _index(band * lines)) for band in range(len(found))
                ]
                for x, place in zip(found, places, strict=True):
                    vector.store(vector.from_elements(kind, x), refs[0], [warp, place])
                mgpu.utils.warpgroup_barrier()
                of_warps = [
                    [vector.load(kind, refs[0], [_index(i), place]) for i in range(4)]
                    for place in places
                ]
                joined = [functools.reduce(arith.maxsi, x) for x in of_warps]
                found = [
                    [vector.extract(x, [], [i]) for i in range(each)] for x in joined
                ]
            return [
                self._array(
                    [arith.bitcast(ir.F32Type.get(), top) for top in x] * (4 // each)
                )
                for x in found
            ]

        if device_kind() != "cpu":
            return self._inline(
                run, tops, [] if axis == 1 else [memory], [jnp.float32] * len(tops)
            )
        blocks, over = (
            [top.reshape(-1, columns // size, size) for top in tops],
            ((0, 2) if axis is None else 2 * axis),
        )
        bits = [
            jnp.broadcast_to(jnp.max(x, over, keepdims=True), x.shape).reshape(
                self.shape
            )
            for x in blocks
        ]
        return [lax.bitcast_convert_type(x, jnp.float32) for x in bits]

    def write_of_blocks(
        self, size: int, form: str, numbers: Sequence[jax.Array], ref: Ref
    ) -> None:
        """Write the numbers of all "rows", or of squares ("one") or columns, which have
        a matrix for a band.
        """
        step = self.shape[0] if form == "rows" else 1

        def run(arrays: list[mgpu.FragmentedArray], refs: list[ir.Value]) -> None:
            row, lane = _split(gpu.thread_id(gpu.Dimension.x), self.shape[1] // 4)
            square, within = _split(lane, size // 4)
            others = {"rows": within, "columns": row, "one": arith.addi(row, within)}[
                form
            ]
            with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.eq, others, _index(0))):
                for line, x in zip(
                    range(0, len(arrays) * step, step), arrays, strict=True
                ):
                    place = [[arith.addi(row, _index(line)), square]]
                    places = [
                        [
                            arith.addi(arith.muli(lane, _index(4)), _index(i)),
                            _index(line),
                        ]
                        for i in range(4)
                    ]
                    for i, at in enumerate(places if form == "columns" else place):
                        memref.store(_value(x, i), refs[0], at)

        if device_kind() != "cpu":
            return self._inline(run, numbers, [ref])
        lines = jnp.concatenate([x[:step] for x in numbers])
        ref[...] = lines.T if form == "columns" else lines[:, ::size]

    def load(self, ref: Ref) -> jax.Array:
        """Read a matrix from a tile; interpreters know no layouts."""
        return (
            ref[...]
            if device_kind() == "cpu"
            else plgpu.layout_cast(ref[...], self.layout)
        )

    def read_vector(self, ref: Ref, axis: Literal[0, 1], first: int = 0) -> jax.Array:
        """Return numbers of a vector from `first` on, each in its row (axis 0) or
        column.
        """

        def read(
            _: list[mgpu.FragmentedArray], refs: list[ir.Value]
        ) -> list[mgpu.FragmentedArray]:
            place = _split(
                arith.muli(gpu.thread_id(gpu.Dimension.x), _index(4)), self.shape[1]
            )[axis]
            values = [
                memref.load(refs[0], [arith.addi(place, _index(first + axis * i))])
                for i in range(4)
            ]
            return [self._array(values, None if ref.dtype == jnp.float32 else True)]

        if device_kind() != "cpu":
            return self._inline(read, [], [ref], [ref.dtype])[0]
        return jnp.broadcast_to(
            jnp.expand_dims(ref[pl.ds(first, self.shape[axis])], 1 - axis), self.shape
        )

    def read_lines(self, ref: Ref) -> list[jax.Array]:
        """Return the values of `[lanes, values]`, each lane's own, as an array for each
        column.
        """

        def read(
            _: list[mgpu.FragmentedArray], refs: list[ir.Value]
        ) -> list[mgpu.FragmentedArray]:
            lane, kind = (
                gpu.thread_id(gpu.Dimension.x),
                ir.MemRefType(refs[0].type).element_type,
            )
            line = vector.load(
                ir.VectorType.get((ref.shape[1],), kind), refs[0], [lane, _index(0)]
            )
            return [
                self._array([vector.extract(line, [], [i])])
                for i in range(ref.shape[1])
            ]

        count = ref.shape[1]
        return (
            [ref[:, i] for i in range(count)]
            if device_kind() == "cpu"
            else self._inline(read, [], [ref], [ref.dtype] * count)
        )

    def write_lines(self, arrays: Sequence[jax.Array], ref: Ref) -> None:
        """Write the bytes of each lane's values to its own line of
        `[lanes, values]`.
        """

        def write(arrays: list[mgpu.FragmentedArray], refs: list[ir.Value]) -> None:
            lane, kind = (
                gpu.thread_id(gpu.Dimension.x),
                ir.MemRefType(refs[0].type).element_type,
            )
            values = [_value(x, 0) for x in arrays]
            line = vector.from_elements(
                ir.VectorType.get((len(values),), values[0].type), values
            )
            vector.store(
                vector.bitcast(ir.VectorType.get((ref.shape[1],), kind), line),
                refs[0],
                [lane, _index(0)],
            )

        if device_kind() != "cpu":
            return self._inline(write, arrays, [ref])
        ref[...] = lax.bitcast_convert_type(jnp.stack(arrays, 1), ref.dtype).reshape(
            ref.shape
        )

    def store(self, arrays: Sequence[jax.Array], refs: Sequence[Ref]) -> None:
        """Write matrices to tiles, in their dtypes."""

        def write(arrays: list[mgpu.FragmentedArray], refs: list[ir.Value]) -> None:
            for x, ref in zip(arrays, refs, strict=True):
                x.store_untiled(ref, optimized=False)

        arrays = [x.astype(ref.dtype) for x, ref in zip(arrays, refs, strict=True)]
        if device_kind() != "cpu":
            return self._inline(write, arrays, refs)
        for x, ref in zip(arrays, refs, strict=True):
            ref[...] = x

    def read_bytes(self, first: ArrayLike, refs: Sequence[Ref]) -> list[jax.Array]:
        """Return a byte for the row of each warp, from `first` on, as int32."""

        def read(
            arrays: list[mgpu.FragmentedArray], refs: list[ir.Value]
        ) -> list[mgpu.FragmentedArray]:
            (row, _), i32 = _place(*arrays), ir.IntegerType.get_signless(32)
            return [
                self._array(
                    [arith.extui(i32, memref.load(ref, [row]))] * 4, signed=True
                )
                for ref in refs
            ]

        return self._inline(read, [jnp.int32(first)], refs, [jnp.int32] * len(refs))

    def copy_bytes(self, sources: Sequence[Ref], targets: Sequence[Ref]) -> None:
        """Copy columns of bytes: each warp its own rows, all at once."""

        def copy(arrays: list[mgpu.FragmentedArray], refs: list[ir.Value]) -> None:
            warp, lane = _split(gpu.thread_id(gpu.Dimension.x), mgpu.utils.WARP_SIZE)
            mgpu.utils.warp_barrier()
            for source, target in zip(
                refs[: len(sources)], refs[len(sources) :], strict=True
            ):
                _, turn = _split(
                    lane, ir.MemRefType(source.type).shape[0] // self.shape[0]
                )
                row = arith.addi(arith.muli(turn, _index(self.shape[0])), warp)
                memref.store(memref.load(source, [row]), target, [row])

        self._inline(copy, [], [*sources, *targets])

    def write_numbers(
        self, first: ArrayLike, numbers: Sequence[jax.Array], refs: Sequence[Ref]
    ) -> None:
        """Write an int32 for the row of each warp, from row `first` on, as a byte or an
        int32.
        """

        def write(arrays: list[mgpu.FragmentedArray], refs: list[ir.Value]) -> None:
            row, lane = _place(arrays[0])
            with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.eq, lane, _index(0))):
                for x, ref in zip(arrays[1:], refs, strict=True):
                    kind, number = ir.MemRefType(ref.type).element_type, _value(x, 0)
                    memref.store(
                        number if number.type == kind else arith.trunci(kind, number),
                        ref,
                        [row],
                    )

        self._inline(write, [jnp.int32(first), *numbers], refs)

    def _by_lanes(
        self, function: Callable[..., list[ir.Value]], *values: ArrayLike
    ) -> jax.Array:
        """Return float32, whose values in a lane are a function of the lane's values of
        each matrix.
        """

        def run(
            arrays: list[mgpu.FragmentedArray], refs: list[ir.Value]
        ) -> list[mgpu.FragmentedArray]:
            return [
                self._array(
                    function(
                        *([_value(x, i) for i in range(self.each)] for x in arrays)
                    )
                )
            ]

        return self._inline(run, [self.spread(x) for x in values], (), [jnp.float32])[0]

    def _inline(
        self,
        function: Callable[..., Any],
        arrays: Sequence[jax.Array],
        refs: Sequence[Ref],
        dtypes: Sequence[Any] = (),
    ) -> Any:
        kinds = [self.layout if x.shape else plgpu.Layout.WG_SPLAT(()) for x in arrays]
        results = [
            plgpu.ShapeDtypeStruct(self.shape, dtype, layout=self.layout)
            for dtype in dtypes
        ]
        run = plgpu.inline_mgpu(
            arg_types=(kinds, [plgpu.RefType()] * len(refs)),
            return_type=results or None,
        )
        return run(lambda _, *given: function(*given))(list(arrays), list(refs))

    def _array(
        self, values: Sequence[ir.Value], signed: bool | None = None
    ) -> mgpu.FragmentedArray:
        lane = vector.from_elements(
            ir.VectorType.get((self.each,), values[0].type), values
        )
        return mgpu.FragmentedArray(
            _registers=np.full((1,), lane),
            _layout=self.layout.to_mgpu(),
            _is_signed=signed,
        )

    @staticmethod
    def turned(rows: int, columns: int, dtype: DTypeLike) -> Any:
        """Return shared memory for the transpose of a tile of bytes, `[columns, rows]`,
        as bulk copies read it.
        """
        transforms = plgpu.TilingTransform((8, rows)), plgpu.SwizzleTransform(rows)
        return plgpu.SMEM((columns, rows), jnp.dtype(dtype), transforms=transforms)


def write_back(
    results: Sequence[tuple[Ref, Ref]], transposes: Sequence[tuple[Ref, Ref, Ref]]
) -> None:
    """Copy tiles to their places, and transposes of tiles by memory from
    `Registers.turned`: (tile, memory, place).
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
    for source, target in [*results, *(pair for _, *pair in transposes)]:
        plgpu.copy_smem_to_gmem(source, target, commit_group=False)
    plgpu.commit_smem_to_gmem_group()
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _turn(tile: Ref, memory: Ref) -> None:
    """Write the transpose of a tile: a thread has 16 bytes of a column at a time."""
    (rows, columns), pieces = tile.shape, tile.shape[0] // 16

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.RefType(),
            plgpu.RefType(Registers.turned(rows, columns, tile.dtype).transforms),
        )
    )
    def run(_: object, tile: ir.Value, memory: ir.Value) -> None:
        kind = ir.VectorType.get((16,), ir.MemRefType(tile.type).element_type)
        for first in range(0, columns * pieces, mgpu.utils.WARPGROUP_SIZE):
            piece, column = _split(
                arith.addi(gpu.thread_id(gpu.Dimension.x), _index(first)), columns
            )
            row, (above, within) = arith.muli(piece, _index(16)), _split(column, 8)
            codes = [
                memref.load(tile, [arith.addi(row, _index(i)), column])
                for i in range(16)
            ]
            # The swizzle: pieces of 16 bytes trade places by the line of 128 bytes (PTX
            # ISA).
            line, _ = _split(arith.muli(column, _index(rows)), 128)
            at = arith.muli(arith.xori(piece, _split(line, pieces)[1]), _index(16))
            vector.store(
                vector.from_elements(kind, codes),
                memory,
                [above, _index(0), within, at],
            )

    run(tile, memory)


def _asm(text: str, *values: ir.Value) -> ir.Value:
    """Return the result of instructions on float32 values; one that joins lanes stays
    where it is.
    """
    kind, constraints = ir.F32Type.get(), "=f" + ",f" * len(values)
    return llvm.inline_asm(
        kind, values, text, constraints, has_side_effects="sync" in text
    )  # type: ignore[return-value]


def _value(x: mgpu.FragmentedArray, i: int) -> ir.Value:
    return vector.extract(x.registers.flat[0], [], [i])


def _index(number: int) -> ir.Value:
    return mgpu.utils.c(number, ir.IndexType.get())


def _split(number: ir.Value, by: int) -> tuple[ir.Value, ir.Value]:
    return arith.divui(number, _index(by)), arith.remui(number, _index(by))


def _place(first: mgpu.FragmentedArray) -> tuple[ir.Value, ir.Value]:
    """Return the row of this warp, and the lane."""
    warp, lane = _split(gpu.thread_id(gpu.Dimension.x), mgpu.utils.WARP_SIZE)
    return arith.addi(
        arith.index_cast(ir.IndexType.get(), first.registers.flat[0]), warp
    ), lane
