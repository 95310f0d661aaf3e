"""Two helpers of `fp4_matmul` in Pallas-Triton.

One unpacks a weight to E4M3. The other rounds the rows of x and writes them in the
order in which the Hopper kernel reads them.

XLA would compute each value of a weight by some twenty instructions, and store a
transpose one byte at a time. The kernel looks up a block's eight magnitudes once and
takes nine instructions for eight values (`decode.py`).

XLA would take three kernels to round rows and order them, which with 64 rows cost a
tenth of the product. The bits are those of the definitions.
"""

from functools import partial

import jax.numpy as jnp
from jax import Array, Ref, ShapeDtypeStruct, lax

from pallas_kernels import numerics
from pallas_kernels import pallas_triton as plgpu
from pallas_kernels.dispatch import Implementation, lacks_fp8
from pallas_kernels.fp4_matmul import reference
from pallas_kernels.fp4_matmul.devices import letters_of
from pallas_kernels.fp4_matmul.reference import scaling_of
from pallas_kernels.operands import Operand
from pallas_kernels.partition import partitioned
from pallas_kernels.quantize.triton_rows import LONGEST_ROW, scales_of, warps_of
from pallas_kernels.specs import varying

# (rows, blocks of 16 values of each) of a program that unpacks; transposed, its rows
# lie side by side in memory.
_SIDES = {False: (16, 32), True: (128, 4)}
_BLOCK_BYTES = 8  # codes of a block

# Unpack a weight
# --------------------------------------------------------------------------------------


def _reject_weight(turned: bool, w: Operand) -> str | None:
    """Return the reason why the kernel cannot unpack this weight, or None."""
    n, k = w.shape
    whole = n > 0 and n % 16 == 0 and k > 0 and k % 64 == 0
    if whole and scaling_of(w).format == "nvfp4":
        return None
    return (
        f"w{[n, k]} with {w.scaling} must be NVFP4, with n a multiple of 16 and k of"
        ' 64; use backend="xla"'
    )


def _unpack(turned: bool, w: Operand) -> Array:
    """Return `reference.unpack(turned, w)`.

    Each device unpacks its part, by XLA if the kernel rejects it.
    """
    scaling = scaling_of(w)

    def local(
        codes: Array,
        scales: Array,
        table: Array,
        *,
        summed_over: tuple[str, ...],
    ) -> Array:
        assert not summed_over, "every device has whole values"
        part = Operand(codes, scales, scaling=scaling)
        if _reject_weight(turned, part) is not None:
            return reference.unpack(turned, part)
        return plgpu.on_platform(partial(_call_unpack, turned), part, table)

    result = "k n" if turned else "n k"
    letters, blocks = letters_of(w)
    rule = f"{', '.join(letters)}, t -> {result}"
    table = jnp.asarray(reference.e4m3_table())
    run = partitioned(local, rule, blocks)
    return run(w.values, w.scale, table)


UNPACK = Implementation("triton", _unpack, _reject_weight, lacks_fp8)


def _call_unpack(turned: bool, w: Operand, table: Array, *, interpret: bool) -> Array:
    from jax.experimental import pallas as pl

    n, k = w.shape
    blocks = k // 16
    most_rows, most_blocks = _SIDES[turned]
    rows = min(most_rows, _power_of_two_in(n))
    count = min(most_blocks, _power_of_two_in(blocks))
    codes = w.values.reshape(n, blocks, _BLOCK_BYTES)
    scales = reference.scale_bytes(w)

    def kernel(codes_ref: Ref, scales_ref: Ref, table_ref: Ref, out_ref: Ref) -> None:
        # The two words of each scale byte lie in the cache nearest to the threads.
        at = 2 * scales_ref[...].astype(jnp.int32)
        words = [plgpu.load(table_ref.at[at + i])[:, :, None] for i in range(2)]
        pairs = _decoded(codes_ref[...], words, interpret)
        if not turned:
            plgpu.store(out_ref, pairs)
            return
        flat = pairs.reshape(rows, count * _BLOCK_BYTES)
        for i in range(2):
            one = ((flat >> (8 * i)) & 0xFF).astype(jnp.uint8)
            plgpu.store(out_ref.at[:, pl.ds(i, 1), :], one.T[:, None, :])

    of_codes = pl.BlockSpec((rows, count, _BLOCK_BYTES), lambda i, j: (i, j, 0))
    of_scales = pl.BlockSpec((rows, count), lambda i, j: (i, j))
    of_table = pl.BlockSpec((512,), lambda i, j: (0,))
    if turned:
        out_shape = ShapeDtypeStruct((k // 2, 2, n), jnp.uint8)
        sides = (count * _BLOCK_BYTES, 2, rows)
        out_specs = pl.BlockSpec(sides, lambda i, j: (j, 0, i))
    else:
        out_shape = ShapeDtypeStruct(codes.shape, jnp.int16)
        out_specs = of_codes
    values = plgpu.pallas_call(
        kernel,
        out_shape=varying(out_shape, codes, scales, table),
        grid=(n // rows, blocks // count),
        in_specs=[of_codes, of_scales, of_table],
        out_specs=out_specs,
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="unpack_fp4",
    )(codes, scales, table)
    whole = (k, n) if turned else (n, k)
    return lax.bitcast_convert_type(values, jnp.float8_e4m3fn).reshape(whole)


def _power_of_two_in(size: int) -> int:
    """Return the largest power of two that divides a size."""
    return size & -size


def _decoded(codes: Array, words: list[Array], interpret: bool) -> Array:
    """Return the two E4M3 values of each byte of codes as a word of 16 bits.

    `words` are the magnitudes of the byte's block, two words of 32 bits.
    """
    low, high = (jnp.broadcast_to(word, codes.shape) for word in words)
    if not interpret:
        from pallas_kernels.fp4_matmul.decode import E4M3_TEXT

        # The compiler packs four codes into a register, and hands over the words of
        # each of the four.
        text = E4M3_TEXT.replace("$4", "$7")
        return plgpu.elementwise_inline_asm(
            text,
            args=[codes, low, high],
            pack=4,
            constraints="=r,=r" + ",r" * 9,
            result_shape_dtypes=[ShapeDtypeStruct(codes.shape, jnp.int16)],
        )[0]

    def value(code: Array) -> Array:
        word = jnp.where(code & 4, high, low)
        return ((word >> (8 * (code & 3))) & 0xFF) ^ ((code & 8) << 4)

    code = codes.astype(jnp.uint32)
    return (value(code & 15) | value(code >> 4) << 8).astype(jnp.int16)


# Round and order rows
# --------------------------------------------------------------------------------------


def _reject_rows(rows: int, x: Array, outer: Array) -> str | None:
    """Return the reason why the kernel cannot round these rows, or None."""
    k = x.shape[1]
    if 0 < k <= LONGEST_ROW:
        return None
    return f'k={k} must be 1 to {LONGEST_ROW}; use backend="xla"'


def _ordered_rows(rows: int, x: Array, outer: Array) -> tuple[Array, Array]:
    """Return the rows of x in E4M3 and their factors, see `mosaic.ordered_rows`."""
    return plgpu.on_platform(partial(_call_rows, rows), x, outer)


ROWS = Implementation("triton", _ordered_rows, _reject_rows)


def _call_rows(
    rows: int,
    x: Array,
    outer: Array,
    *,
    interpret: bool,
) -> tuple[Array, Array]:
    from jax.experimental import pallas as pl

    m, k = x.shape
    width = pl.next_power_of_2(k)
    # Four values lie side by side before and after: with an axis of their own they are
    # loaded and stored at once.
    sides = (width // 4, 4)
    do = plgpu.operations(interpret)

    def kernel(x_ref: Ref, outer_ref: Ref, values_ref: Ref, factor_ref: Ref) -> None:
        row = pl.program_id(0)
        word, value = (lax.broadcasted_iota(jnp.int32, sides, axis) for axis in (0, 1))
        mask = None if k == width else word < k // 4
        zero = None if mask is None else 0
        # Rows behind the last one of x read it again.
        at = jnp.minimum(row, m - 1), 4 * _word_at(word) + value
        found = plgpu.load(x_ref.at[at], mask=mask, other=zero).astype(jnp.float32)
        wide = jnp.where(row < m, found, 0)
        of_words = numerics.amax_by_bits(wide, 1)
        amax = numerics.amax_by_bits(of_words, 0, keepdims=True)
        scale, inverse = scales_of(reference.ROWS, amax, do)
        dtype = values_ref.dtype
        values = do.scaled(wide, inverse, dtype).astype(dtype)
        plgpu.store(values_ref.at[row, 4 * word + value], values, mask=mask)
        factor = outer_ref[...] * jnp.float32(1 / reference.E4M3_FACTOR) * scale
        one = row + lax.broadcasted_iota(jnp.int32, (1,), 0)
        plgpu.store(factor_ref.at[one], factor)

    shapes = (
        ShapeDtypeStruct((rows, k), jnp.float8_e4m3fn),
        ShapeDtypeStruct((rows,), jnp.float32),
    )
    warps = warps_of((1, width))
    values, factors = plgpu.pallas_call(
        kernel,
        out_shape=varying(shapes, x, outer),
        grid=(rows,),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name="ordered_row_quantize",
    )(x, outer.reshape(1))
    return values, factors


def _word_at(place: Array) -> Array:
    """Return which four values of k stand at a place of E4M3's order.

    Both count fours: place 8 t + 4 h + q has word 16 q + 2 t + h.

    >>> _word_at(jnp.arange(9)).tolist()
    [0, 16, 32, 48, 1, 17, 33, 49, 2]
    """
    return (
        (place & ~0x3F) | (place & 0x3) << 4 | (place & 0x38) >> 2 | (place & 0x4) >> 2
    )
