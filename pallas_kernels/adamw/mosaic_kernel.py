"""The AdamW step in Pallas Mosaic, by `reference.update` in registers.

A block takes 32 rows of 128 columns. Bulk copies bring them into shared memory, results
replace them there, and bulk copies take them back. A multiprocessor holds several
blocks, so that one waits for its copies while others compute. In a turn each warp has a
row, so that a block of the moments is reduced inside a warp.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, ShapeDtypeStruct, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import counter, numerics
from pallas_kernels.adamw import launch, reference
from pallas_kernels.adamw.arithmetic import Instructions
from pallas_kernels.adamw.launch import STATE, WORDS, Numbers
from pallas_kernels.adamw.reference import AdamWOptions, State
from pallas_kernels.hopper.registers import Ref, Registers, write_back
from pallas_kernels.moments import BLOCK, E4M3
from pallas_kernels.specs import varying

ROWS = 2 * launch.ROWS  # of a block
_WARPS = 4
_TURNS = ROWS // _WARPS
_REGISTERS = Registers((_WARPS, BLOCK))  # of a turn


def call(options: AdamWOptions, columns: int, *operands: Array) -> list[Array]:
    """Run the kernel on a stack of matrices, see `launch`."""
    words, gradient, *state = varying(operands, *operands)
    # References, so that the state is replaced where it lies if its buffers are
    # donated.
    places = [jax.new_ref(x) for x in state]
    new = _run(options, words, gradient, places)
    return varying([*map(jax.freeze, places), *new], *operands)


def call_entry(
    options: AdamWOptions, columns: int, words: Array, gradient: Array, *places: Ref
) -> list[Array]:
    """Run the kernel on an entry of stacks in references, see `launch`."""
    return _run(options, words, gradient, places)


def _run(
    options: AdamWOptions, words: Array, gradient: Array, places: Sequence[Ref]
) -> list[Array]:
    """Run the kernel; `places` are those of all matrices, or of their entries."""
    l, k, n = gradient.shape
    results = [ShapeDtypeStruct((l, k // _TURNS, n // BLOCK), jnp.int32)]
    memory = []
    if options.orientation == "both":
        results.append(ShapeDtypeStruct((l, n, k), E4M3))
        memory.append(_REGISTERS.turned(ROWS, BLOCK, E4M3))
    tiles = [
        plgpu.SMEM((ROWS, BLOCK), x.dtype)
        for x in (gradient, *places)
        if x.shape[-2:] == (k, n)
    ]
    new: list[Array] = plgpu.kernel(
        partial(_kernel, options),
        out_type=results,
        grid=(l * (k // ROWS) * (n // BLOCK),),
        grid_names=("block",),
        scratch_types=dict(
            tiles=tiles,
            scales=[plgpu.SMEM((ROWS,), jnp.uint8)] * 2,
            memory=memory,
            filled=plgpu.Barrier(num_arrivals=len(tiles)),
        ),
        kernel_name="adamw",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )(words, gradient, *places)
    return new


class _Place(NamedTuple):
    """The place of a block in a stack: its matrix, and its part of the matrix."""

    entry: Array
    row: Array
    column: Array
    rows: pl.Slice
    columns: pl.Slice

    @staticmethod
    def of_block(block: Array, shape: tuple[int, int, int]) -> "_Place":
        """Return the place of the block with this number in a stack of this shape."""
        _, k, n = shape
        down = lax.div(block, n // BLOCK)
        column = lax.rem(block, n // BLOCK)
        entry = lax.div(down, k // ROWS)
        row = lax.rem(down, k // ROWS)
        rows = pl.ds(row * ROWS, ROWS)
        return _Place(entry, row, column, rows, pl.ds(column * BLOCK, BLOCK))


class _Device(Instructions):
    """Operations on a row of each warp.

    A number of a row has the shape of its values.
    """

    def largest(self, x: Array) -> Array:
        return _REGISTERS.largest("max.f32", jnp.abs(x))

    def largest_or_nan(self, v: Array) -> Array:
        return _REGISTERS.largest("max.s32", v)


def _kernel(
    options: AdamWOptions,
    words: Ref,
    gradient: Ref,
    *refs: Ref,
    tiles: Sequence[Ref],
    scales: Sequence[Ref],
    memory: Sequence[Ref],
    filled: Ref,
) -> None:
    """Compute a block: copy it, update its rows in turns, and copy it back."""
    tops, *columns = refs[STATE:]
    place = _Place.of_block(lax.axis_index("block"), gradient.shape)
    parts = [gradient.at[place.entry, place.rows, place.columns]]
    scale_parts = []
    for x in refs[:STATE]:
        stack = _in_stack(place, words, x)
        if x.shape[-1] == gradient.shape[-1]:
            parts.append(x.at[*stack, place.rows, place.columns])
        else:
            scale_parts.append(x.at[*stack, place.rows, place.column])
    for part, tile in zip(parts, tiles, strict=True):
        plgpu.copy_gmem_to_smem(part, tile, filled)
    # A warp that read a number from the GPU's memory in each turn would wait behind the
    # copies of other blocks.
    _REGISTERS.copy_bytes(scale_parts, scales)

    numbers = Numbers.read(lambda i: words[place.entry, i])
    zeros = _REGISTERS.spread(0)
    rows = _Rows(
        options, numbers, place, gradient.shape[2], tiles, scales, _iota(0), _iota(1)
    )
    plgpu.barrier_wait(filled)
    top = lax.fori_loop(0, _TURNS, rows.update, zeros)
    _REGISTERS.copy_bytes(scales, scale_parts)

    do = _Device(_REGISTERS.instruct)
    largest = do.largest(top)
    unit = numerics.from_bits(numbers.unit)
    amax = do.multiply(largest, unit)
    of_warps = tops.at[place.entry, pl.ds(place.row * _WARPS, _WARPS), place.column]
    bits = numerics.bits(amax)
    _REGISTERS.write_numbers(0, [bits], [of_warps])
    transposes = [
        (tiles[1], tile, ref.at[place.entry, place.columns, place.rows])
        for tile, ref in zip(memory, columns, strict=True)
    ]
    write_back(list(zip(tiles[1:], parts[1:], strict=True)), transposes)


def _in_stack(place: _Place, words: Ref, x: Ref) -> tuple[Array, ...]:
    """Return the place of a block's matrix in the stack of an array of the state."""
    if words.shape[-1] == WORDS:
        return (place.entry,)
    entry = words[place.entry, WORDS].astype(jnp.int32)
    return (entry,) if x.ndim == 3 else (entry, place.entry)


@dataclass(frozen=True)
class _Rows:
    """The rows of a block in shared memory, and the step that they take.

    Attributes:
      options: static options of the step.
      numbers: numbers of the step.
      place: place of the block.
      width: columns of the weight.
      tiles: gradient, hi, lo, m and v.
      scales: bytes of m and v.
      warps, lanes: row and column of each value in a turn.
    """

    options: AdamWOptions
    numbers: Numbers
    place: _Place
    width: int
    tiles: Sequence[Ref]
    scales: Sequence[Ref]
    warps: Array
    lanes: Array

    def update(self, i: Array, top: Array) -> Array:
        """Update a row of each warp; return the largest magnitudes, of `top` too."""
        keep = self.numbers.keep
        at = pl.ds(i * _WARPS, _WARPS)
        m_scale, v_scale = _REGISTERS.read_bytes(i * _WARPS, self.scales)
        g, hi, lo, m, v = [_REGISTERS.load(tile.at[at]) for tile in self.tiles]
        bits = self._random_bits(i)
        old = State(hi, lo, m, m_scale, v, v_scale)
        new, weight = reference.update(
            _Device(_REGISTERS.instruct),
            self.options,
            self.numbers.coefficients,
            g.astype(jnp.float32),
            old,
            bits,
        )

        @pl.when(keep != 0)
        def _replace() -> None:
            values = [new.hi, new.lo, new.m, new.v]
            _REGISTERS.store(values, [tile.at[at] for tile in self.tiles[1:]])
            numbers = [new.m_scale, new.v_scale]
            _REGISTERS.write_numbers(i * _WARPS, numbers, self.scales)

        is_taken = keep != 0
        before = hi.astype(jnp.float32) + lo.astype(jnp.float32)
        weight = jnp.where(is_taken, weight, before)
        # This maximum ignores NaN.
        return _REGISTERS.instruct("max.f32 $0, $1, $2;", top, jnp.abs(weight))

    def _random_bits(self, i: Array) -> Array:
        """Return the hash of each value in the rows of turn i."""
        row = (self.place.row * ROWS + i * _WARPS).astype(jnp.uint32) + self.warps
        before = row * self.width
        first = before + (self.place.column * BLOCK).astype(jnp.uint32)
        start = counter.begin(first ^ self.numbers.k0)
        return counter.finish(start ^ self.lanes, self.numbers.k1)


def _iota(axis: int) -> Array:
    """Return the row (axis 0) or the column (1) of each value in a turn."""
    number = lax.broadcasted_iota(jnp.uint32, _REGISTERS.shape, axis)
    return plgpu.layout_cast(number, _REGISTERS.layout)
