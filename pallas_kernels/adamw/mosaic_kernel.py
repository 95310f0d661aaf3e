"""The AdamW step in Pallas Mosaic, by the arithmetic of `reference.update` in
registers.

A block takes 32 rows of 128 columns. Bulk copies bring them into shared memory, results
replace them there, and bulk copies take them back. A multiprocessor holds several
blocks, so that one waits for its copies while others compute. In a turn each warp has a
row, so that a block of the moments is reduced inside a warp.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import counter
from pallas_kernels.adamw import reference, triton
from pallas_kernels.adamw.reference import Coefficients, Options, State
from pallas_kernels.hopper.registers import Ref, Registers, write_back
from pallas_kernels.moments import BLOCK, E4M3
from pallas_kernels.specs import varying

ROWS = 2 * triton.ROWS  # of a block
_WARPS = 4
_TURNS = ROWS // _WARPS
_REGISTERS = Registers((_WARPS, BLOCK))  # of a turn


def call(options: Options, columns: int, *operands: jax.Array) -> list[jax.Array]:
    """Run the kernel on a stack of matrices."""
    words, gradient, *state = varying(operands, *operands)
    l, k, n = gradient.shape
    outs, memory = [jax.ShapeDtypeStruct((l, k // _TURNS, n // BLOCK), jnp.int32)], []
    if options.orientation == "both":
        outs.append(jax.ShapeDtypeStruct((l, n, k), E4M3))
        memory.append(_REGISTERS.turned(ROWS, BLOCK, E4M3))
    # References, so that the state is replaced where it lies if its buffers are
    # donated.
    places = [jax.new_ref(x) for x in state]
    results = plgpu.kernel(
        functools.partial(_kernel, options),
        out_type=outs,
        grid=(l * (k // ROWS) * (n // BLOCK),),
        grid_names=("block",),
        scratch_types=dict(
            tiles=[
                plgpu.SMEM((ROWS, BLOCK), x.dtype)
                for x in (gradient, *state)
                if x.shape == gradient.shape
            ],
            numbers=[plgpu.SMEM((ROWS,), jnp.uint8)] * 2,
            memory=memory,
            filled=plgpu.Barrier(num_arrivals=5),
        ),
        kernel_name="adamw",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )(words, gradient, *places)
    return varying([*map(jax.freeze, places), *results], *operands)


def _kernel(
    options: Options,
    words: Ref,
    *refs: Ref,
    tiles: Ref,
    numbers: Ref,
    memory: Ref,
    filled: Ref,
) -> None:
    """Compute a block."""
    arrays, (tops, *columns) = refs[:7], refs[7:]
    (_, k, n), block = arrays[0].shape, lax.axis_index("block")
    row, column = lax.div(block, n // BLOCK), lax.rem(block, n // BLOCK)
    entry, row = lax.div(row, k // ROWS), lax.rem(row, k // ROWS)
    below, beside = pl.ds(row * ROWS, ROWS), pl.ds(column * BLOCK, BLOCK)
    parts = [x.at[entry, below, beside] for x in arrays if x.shape == arrays[0].shape]
    scales = [x.at[entry, below, column] for x in arrays if x.shape != arrays[0].shape]
    for part, tile in zip(parts, tiles, strict=True):
        plgpu.copy_gmem_to_smem(part, tile, filled)
    # A warp that read a number from the GPU's memory in each turn would wait behind the
    # copies of other blocks.
    _REGISTERS.copy_bytes(scales, numbers)

    count = len(Coefficients._fields)
    c = Coefficients(
        *(lax.bitcast_convert_type(words[entry, i], jnp.float32) for i in range(count))
    )
    unit, keep, k0, k1 = (words[entry, count + i] for i in range(4))
    layout, zeros = _REGISTERS.layout, _REGISTERS.spread(0)
    warps, lanes = (
        plgpu.layout_cast(lax.broadcasted_iota(jnp.uint32, _REGISTERS.shape, i), layout)
        for i in (0, 1)
    )
    do = _Device(zeros)

    def turn(i: jax.Array, top: jax.Array) -> jax.Array:
        at = pl.ds(i * _WARPS, _WARPS)
        m_scale, v_scale = _REGISTERS.read_bytes(i * _WARPS, numbers)
        g, hi, lo, m, v = (_REGISTERS.load(tile.at[at]) for tile in tiles)
        first = ((row * ROWS + i * _WARPS).astype(jnp.uint32) + warps) * n + (
            column * BLOCK
        ).astype(jnp.uint32)
        bits = counter.finish(counter.begin(first ^ k0) ^ lanes, k1)
        old = State(hi, lo, m, m_scale, v, v_scale)
        new, weight = reference.update(do, options, c, g.astype(jnp.float32), old, bits)

        @pl.when(keep != 0)
        def _replace() -> None:
            _REGISTERS.store(
                [new.hi, new.lo, new.m, new.v], [tile.at[at] for tile in tiles[1:]]
            )
            _REGISTERS.write_numbers(i * _WARPS, [new.m_scale, new.v_scale], numbers)

        weight = jnp.where(
            keep != 0, weight, hi.astype(jnp.float32) + lo.astype(jnp.float32)
        )
        # This maximum ignores NaN.
        return _REGISTERS.instruct("max.f32 $0, $1, $2;", top, jnp.abs(weight))

    plgpu.barrier_wait(filled)
    top = lax.fori_loop(0, _TURNS, turn, zeros)
    _REGISTERS.copy_bytes(numbers, scales)
    largest = do.multiply(do.largest(top), lax.bitcast_convert_type(unit, jnp.float32))
    of_block = tops.at[entry, pl.ds(row * _WARPS, _WARPS), column]
    _REGISTERS.write_numbers(
        0, [lax.bitcast_convert_type(largest, jnp.int32)], [of_block]
    )
    transposes = [
        (tiles[1], tile, ref.at[entry, beside, below])
        for tile, ref in zip(memory, columns, strict=True)
    ]
    write_back(list(zip(tiles[1:], parts[1:], strict=True)), transposes)


class _Device(triton._Device):
    """The operations of Triton's kernel on a row of each warp; a number of a row has
    the shape of its values.
    """

    _run = staticmethod(_REGISTERS.instruct)

    def largest(self, x: jax.Array) -> jax.Array:
        return _REGISTERS.largest("max.f32", jnp.abs(x))

    def largest_or_nan(self, v: jax.Array) -> jax.Array:
        return _REGISTERS.largest("max.s32", v)
