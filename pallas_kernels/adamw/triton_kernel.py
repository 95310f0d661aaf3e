"""The AdamW step as one Pallas-Triton pass in place, which reads and writes all once.

It reads 4 bytes and a gradient for each value, and writes 4 bytes. A program holds 16
blocks of 128 values. Without a transposed copy the blocks are consecutive in memory,
across the ends of rows. With one they lie below each other, so that the tile can be
transposed. Random bits are hashed in registers from the global index, so a device that
holds a part of the weight is told the first row and column of its part.

The compiled kernel uses `arithmetic.Instructions`, and the interpreter
`arithmetic.Portable`; the bits are the same.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, ShapeDtypeStruct, lax
from jax.experimental import pallas as pl

from pallas_kernels import counter, numerics
from pallas_kernels import pallas_triton as plgpu
from pallas_kernels.adamw import reference
from pallas_kernels.adamw.arithmetic import Instructions, Portable
from pallas_kernels.adamw.launch import ROWS, STATE, Kernel, Numbers, Ref
from pallas_kernels.adamw.reference import AdamWOptions, State
from pallas_kernels.moments import BLOCK
from pallas_kernels.specs import varying

_WARPS = 4


def call(options: AdamWOptions, columns: int, *operands: Array) -> list[Array]:
    """Run the kernel on a stack of matrices, see `launch`."""
    run = partial(_call, options, columns)
    if plgpu.unreachable(*operands[1:]):
        run = partial(_by_parts, run)
    return plgpu.on_platform(run, *operands)


def _by_parts(run: Kernel, *operands: Array, interpret: bool) -> list[Array]:
    """Run the kernel on parts of a stack in turn.

    Each part is copied out and in again, and the state stays in place.
    """
    entries = operands[: 2 + STATE]
    places = operands[2 + STATE :]
    size = entries[1].shape[0]
    parts = _fewest_parts(entries[1:])
    cut = [x.reshape(parts, size // parts, *x.shape[1:]) for x in entries]

    def step(
        state: list[Array], given: tuple[Array, ...]
    ) -> tuple[list[Array], list[Array]]:
        i, *read = given
        old = [lax.dynamic_index_in_dim(x, i, keepdims=False) for x in state]
        new = run(*read, *old, *places, interpret=interpret)
        after = [
            lax.dynamic_update_index_in_dim(x, y, i, 0)
            for x, y in zip(state, new[:STATE], strict=True)
        ]
        return after, new[STATE:]

    state, rest = lax.scan(step, cut[2:], (jnp.arange(parts), *cut[:2]))
    return [x.reshape(size, *x.shape[2:]) for x in (*state, *rest)]


def _fewest_parts(stacks: Sequence[Array]) -> int:
    """Return the fewest equal parts of stacks that a kernel can address."""
    size = stacks[0].shape[0]
    for parts in range(1, size):
        if size % parts:
            continue
        shapes = [
            ShapeDtypeStruct((size // parts, *x.shape[1:]), x.dtype) for x in stacks
        ]
        if plgpu.unreachable(*shapes) is None:
            return parts
    return size


class _Tiles(NamedTuple):
    """The tiles of a stack, one for each program.

    Attributes:
      rows: rows of a tile.
      grid: programs of the kernel.
      values, scales: blocks of arrays of values and of their scales.
      maxima: shape of the largest magnitudes of tiles.
      maximum: block of these.
      flat: whether the arrays are seen as `[blocks, 128]` and `[blocks, 1]`.
    """

    rows: int
    grid: tuple[int, ...]
    values: pl.BlockSpec
    scales: pl.BlockSpec
    maxima: tuple[int, ...]
    maximum: pl.BlockSpec
    flat: bool

    @staticmethod
    def in_memory_order(l: int, k: int, n: int) -> "_Tiles":
        """Return tiles of consecutive blocks."""
        count = k * n // (ROWS * BLOCK)
        values, scales = [
            pl.BlockSpec((ROWS, width), lambda i, s: (i + s * count, 0))
            for width in (BLOCK, 1)
        ]
        maximum = pl.BlockSpec((None, 1), lambda i, s: (s, i))
        return _Tiles(ROWS, (count, l), values, scales, (l, count), maximum, flat=True)

    @staticmethod
    def below_each_other(l: int, k: int, n: int) -> "_Tiles":
        """Return tiles whose blocks lie in neighbouring rows."""
        rows = ROWS if k % (2 * ROWS) else 2 * ROWS
        values, scales = [
            pl.BlockSpec((None, rows, width), lambda j, i, s: (s, i, j))
            for width in (BLOCK, 1)
        ]
        maximum = pl.BlockSpec((None, rows // ROWS, 1), lambda j, i, s: (s, i, j))
        grid = (n // BLOCK, k // rows, l)
        maxima = (l, k // ROWS, n // BLOCK)
        return _Tiles(rows, grid, values, scales, maxima, maximum, flat=False)


def _call(
    options: AdamWOptions,
    columns: int,
    *operands: Array,
    interpret: bool,
) -> list[Array]:
    """Run the kernel on arrays that it can address, see `launch`."""
    # A result in place has the type of its operand.
    operands = varying(operands, *operands)
    words, gradient, *state = operands[: 2 + STATE]
    places = operands[2 + STATE :]
    l, k, n = gradient.shape
    turned = options.orientation == "both"
    make = _Tiles.below_each_other if turned else _Tiles.in_memory_order
    tiles = make(l, k, n)

    def view(x: Array) -> Array:
        if not tiles.flat:
            return x
        return x.reshape(-1, BLOCK if x.shape == gradient.shape else 1)

    viewed = [view(x) for x in state]
    results = [ShapeDtypeStruct(x.shape, x.dtype) for x in viewed]
    results.append(ShapeDtypeStruct(tiles.maxima, jnp.int32))
    values = tiles.values
    of_state = [values, values, values, tiles.scales, values, tiles.scales]
    of_results = [*of_state, tiles.maximum]
    if turned:
        results.append(ShapeDtypeStruct((l, n, k), state[0].dtype))
        of_results.append(
            pl.BlockSpec((None, BLOCK, tiles.rows), lambda j, i, s: (s, j, i))
        )
    of_words = pl.BlockSpec((None, words.shape[1]), lambda *at: (at[-1], 0))
    of_place = pl.BlockSpec((1,), lambda *at: (0,))
    new = plgpu.pallas_call(
        partial(_kernel, options, (tiles.rows, n, columns), interpret, len(places)),
        out_shape=varying(results, *operands),
        grid=tiles.grid,
        in_specs=[of_words, values, *of_state, *[of_place] * len(places)],
        out_specs=of_results,
        input_output_aliases={2 + i: i for i in range(STATE)},
        compiler_params=plgpu.CompilerParams(
            num_warps=_WARPS * tiles.rows // ROWS, num_stages=1
        ),
        interpret=interpret,
        name="adamw",
    )(words, view(gradient), *viewed, *places)
    after = [x.reshape(old.shape) for x, old in zip(new[:STATE], state, strict=True)]
    maxima = new[STATE].reshape(l, k // ROWS, n // BLOCK)
    return [*after, maxima, *new[STATE + 1 :]]


def _kernel(
    options: AdamWOptions,
    sizes: tuple[int, int, int],
    interpret: bool,
    places: int,
    words: Ref,
    gradient_ref: Ref,
    *refs: Ref,
) -> None:
    """Compute one tile.

    Results overwrite the operands, so a step that is not taken writes nothing.
    """
    old_refs = refs[:STATE]
    place = refs[STATE : STATE + places]
    new_refs = refs[STATE + places :]
    numbers = Numbers.read(lambda i: words[i])
    gradient = gradient_ref[...].astype(jnp.float32)
    old = State._make([ref[...] for ref in old_refs])
    old = old._replace(
        m_scale=old.m_scale.astype(jnp.int32), v_scale=old.v_scale.astype(jnp.int32)
    )
    first = _first_indices(options, sizes, [ref[0] for ref in place])
    # A block begins at a multiple of 128, so adding a column is setting its bits.
    lanes = lax.broadcasted_iota(jnp.uint32, gradient.shape, 1)
    start = counter.begin(first ^ numbers.k0)
    bits = counter.finish(start ^ lanes, numbers.k1)
    do = Portable(gradient) if interpret else Instructions(plgpu.instruct)
    new, weight = reference.update(
        do, options, numbers.coefficients, gradient, old, bits
    )

    unit = numerics.from_bits(numbers.unit)
    largest = do.multiply(do.largest(weight), unit)

    # Masked stores, because a branch would keep everything in registers across it.
    for ref, x in zip(new_refs[:STATE], new, strict=True):
        stored = x.astype(ref.dtype)
        mask = jnp.broadcast_to(numbers.keep != 0, ref.shape)
        plgpu.store(ref, stored, mask=mask)
    _summarize(new_refs[STATE:], new.hi, largest)

    @pl.when(numbers.keep == 0)
    def _leave() -> None:
        hi = old_refs[0][...]
        lo = old_refs[1][...]
        weight = hi.astype(jnp.float32) + lo.astype(jnp.float32)
        _summarize(new_refs[STATE:], hi, do.multiply(do.largest(weight), unit))


def _summarize(refs: Sequence[Ref], hi: Array, largest: Array) -> None:
    """Write the results that are not in place.

    They are the bits of the tile's largest magnitude, and perhaps hi transposed.
    """
    top, *turned = refs
    bits = numerics.bits(largest)
    top[...] = jnp.broadcast_to(jnp.max(bits), top.shape)
    for ref in turned:
        ref[...] = hi.T


def _first_indices(
    options: AdamWOptions,
    sizes: tuple[int, int, int],
    place: Sequence[Array],
) -> Array:
    """Return the index of the first value of each block in the whole weight.

    Args:
      options: static options of the step.
      sizes: rows of a tile, columns of the part, and columns of the weight.
      place: first row and column of the part, if it is not the whole weight.
    """
    rows, n, columns = sizes
    width = jnp.uint32(columns % 2**32)
    below = lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
    if options.orientation == "both":
        of_row = (pl.program_id(1) * rows + below).astype(jnp.uint32) * width
        first = of_row + pl.program_id(0).astype(jnp.uint32) * jnp.uint32(BLOCK)
    else:
        number = (pl.program_id(0) * rows + below).astype(jnp.uint32)
        if n == columns:
            # Rows are whole, so blocks are consecutive as in the weight.
            first = number * jnp.uint32(BLOCK)
        else:
            across = jnp.uint32(n // BLOCK)
            first = number // across * width + number % across * jnp.uint32(BLOCK)
    return first + place[0] * width + place[1] if place else first
