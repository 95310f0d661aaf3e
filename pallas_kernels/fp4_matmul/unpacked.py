"""`fp4_matmul` of a weight that is unpacked once, which pays for many rows of x and for
the gradient of x.

BF16 activations are multiplied by the weight in BF16. If codes times scales are E4M3
numbers (the rule "fold_exact"), E4M3 activations are multiplied on FP8 tensor cores,
and one kernel writes the E4M3 weight in the orientation that the product reads. XLA
would compute each value by some twenty instructions, and store a transpose one byte at
a time; the kernel looks up a block's eight magnitudes once and takes nine instructions
for eight values (`decode.py`).
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import pallas_triton as plgpu
from pallas_kernels.fp4_matmul import reference
from pallas_kernels.fp4_matmul.reference import E4M3_FACTOR, Options
from pallas_kernels.matmul.api import matmul
from pallas_kernels.matmul.devices import result_spec
from pallas_kernels.operands import Fp4, Operand, Row
from pallas_kernels.partition import BlocksOf, partitioned
from pallas_kernels.quantize.api import quantize
from pallas_kernels.specs import has_explicit_axes, varying

# (rows, blocks of 16 values of each) of a program that unpacks; transposed, its rows
# lie side by side in memory.
_SIDES = {False: (16, 32), True: (128, 4)}
_BLOCK_BYTES = 8  # codes of a block


def fp4_matmul(options: Options, x: jax.Array, w: Operand) -> jax.Array:
    """Return the product; under a mesh with explicit axes each device multiplies its
    part, because blocks cut axes.
    """
    if not has_explicit_axes():
        return multiply(options, x, w)
    # A row's scale is found from all of it, so rows are rounded before devices have
    # parts of them.
    return on_each_device(
        multiply,
        options,
        x if options.activation == "bfloat16" else quantize_rows(x),
        w,
    )


def multiply(options: Options, x: jax.Array | Operand, w: Operand) -> jax.Array:
    """Return the product on one device; the rows of x may be rounded already.

    The format library's "fold_exact" scales begin at 2**-3, where the smallest number
    times `E4M3_FACTOR` is still an E4M3 number. Smaller scales that someone else found
    make values round.
    """
    if (
        reference.scaling_of(w).rule != "fold_exact"
        or options.activation != "float8_e4m3fn"
    ):
        return reference.fp4_matmul(options, x, w)
    rows, outer = (
        x if isinstance(x, Operand) else quantize_rows(x),
        jnp.float32(1) if w.outer is None else w.outer,
    )
    # FP8 tensor cores of Hopper read both operands along the summed axis.
    values = unpack(w, turned=options.contracts == "n")
    scale = jnp.full(values.shape[0], 1 / E4M3_FACTOR) * outer
    unpacked = Operand(values, scale, scaling=Row("float32"))
    return matmul(
        rows, unpacked, out_dtype=options.out_dtype, out_sharding=options.out_sharding
    )


def quantize_rows(x: jax.Array) -> Operand:
    """Return `reference.quantize_rows(x)`, by a kernel if one was measured to be
    faster.
    """
    return (
        quantize(x, reference.ROWS.dtype, reference.ROWS.scaling).rows
        if x.size
        else reference.quantize_rows(x)
    )


def on_each_device(
    multiply: Callable[..., jax.Array],
    options: Options,
    x: jax.Array | Operand,
    w: Operand,
    *table: jax.Array,
) -> jax.Array:
    """Run `multiply(options, x, w, *table)` on the rows of x, each device on its part
    of x and w.

    The rows of x may be rounded already. A partitioned function cannot close over
    arrays, so a table is an argument.
    """
    (n, k), leading, scaling = w.shape, x.shape[:-1], reference.scaling_of(w)
    values, row_scale = (x.values, x.scale) if isinstance(x, Operand) else (x, None)
    more = {
        "t": table[0] if table else None,
        "m": row_scale,
        "u": None if w.outer is None else w.outer.reshape(1),
    }
    more = {axis: array for axis, array in more.items() if array is not None}

    def local(
        x: jax.Array,
        values: jax.Array,
        scale: jax.Array,
        *given: jax.Array,
        summed_over: tuple[str, ...],
    ) -> jax.Array:
        named = dict(zip(more, given, strict=True))
        part = Operand(
            values,
            scale,
            scaling=scaling,
            outer=named["u"][0] if "u" in named else None,
        )
        rows = (
            Operand(x, named["m"], scaling=reference.ROWS.scaling)
            if "m" in named
            else x
        )
        run = lambda dtype: multiply(
            dataclasses.replace(options, out_sharding=None, out_dtype=dtype),
            rows,
            part,
            *given[: len(table)],
        )
        if not summed_over:
            return run(options.out_dtype)
        return lax.psum(run(jnp.dtype(jnp.float32)), summed_over).astype(
            options.out_dtype
        )

    summed, kept = ("k", "n") if options.contracts == "k" else ("n", "k")
    rule = (
        ", ".join([f"m {summed}, n h, {_scale_axes(scaling)}", *more]) + f" -> m {kept}"
    )
    axes = (((values.ndim - 1,), (1 if options.contracts == "k" else 0,)), ((), ()))
    like = lambda shape, array: jax.ShapeDtypeStruct(
        shape, jnp.bfloat16, sharding=jax.typeof(array).sharding
    )
    wanted = result_spec(
        like(x.shape, values), like(w.shape, w.values), axes, options.out_sharding
    )
    run = partitioned(
        local, rule, _blocks(scaling, n, k), merged={"m": leading}, wanted=wanted
    )
    return run(values, w.values, w.scale, *more.values())


def _scale_axes(scaling: Fp4) -> str:
    return "n j" if scaling.tile == "vector" else "i j"


def _blocks(scaling: Fp4, n: int, k: int) -> dict[str, BlocksOf]:
    return {
        "h": BlocksOf("k", 2, k),
        "j": BlocksOf("k", scaling.block, k),
        "i": BlocksOf("n", scaling.block, n),
    }


def unpack(w: Operand, *, turned: bool = False) -> jax.Array:
    """Return `reference.decode(w, float8_e4m3fn, E4M3_FACTOR)`, `[n, k]`, or its
    transpose.

    A kernel does it on a GPU if `_serves(w)`; there the signs of NaN are the device's
    own.
    """
    scaling, (n, k) = reference.scaling_of(w), w.shape

    def by_xla(w: Operand, table: jax.Array) -> jax.Array:
        values = reference.decode(w, jnp.float8_e4m3fn, E4M3_FACTOR)
        return values.T if turned else values

    def local(
        codes: jax.Array,
        scales: jax.Array,
        table: jax.Array,
        *,
        summed_over: tuple[str, ...] = (),
    ) -> jax.Array:
        assert not summed_over, "every device has whole values"
        part = Operand(codes, scales, scaling=scaling)
        on_gpu = (
            functools.partial(_unpack_by_kernel, turned=turned)
            if _serves(part)
            else by_xla
        )
        return lax.platform_dependent(part, table, cuda=on_gpu, default=by_xla)

    rule = f"n h, {_scale_axes(scaling)}, t -> " + ("k n" if turned else "n k")
    return partitioned(local, rule, _blocks(scaling, n, k))(
        w.values, w.scale, jnp.asarray(reference.e4m3_table())
    )


def _serves(w: Operand) -> bool:
    """Return whether the kernel takes this weight: NVFP4, of whole programs."""
    (n, k), scaling = w.shape, reference.scaling_of(w)
    fits = scaling.format == "nvfp4" and n > 0 and n % 16 == 0 and k > 0 and k % 64 == 0
    return fits and plgpu.missing() is None


def _unpack_by_kernel(
    w: Operand, table: jax.Array, *, turned: bool, interpret: bool = False
) -> jax.Array:
    """Run the kernel of `unpack` on a weight that it `_serves`, with
    `reference.e4m3_table()`.
    """
    from jax.experimental import pallas as pl

    n, k = w.shape
    # The largest powers of two that divide the sizes, and at most `_SIDES`.
    rows, count = (
        min(most, size & -size)
        for most, size in zip(_SIDES[turned], (n, k // 16), strict=True)
    )
    scales = reference.scale_bytes(w)
    codes = w.values.reshape(n, k // 16, _BLOCK_BYTES)

    def kernel(
        codes_ref: jax.Ref, scales_ref: jax.Ref, table_ref: jax.Ref, out_ref: jax.Ref
    ) -> None:
        # The two words of each scale byte lie in the cache nearest to the threads.
        at = 2 * scales_ref[...].astype(jnp.int32)
        low, high = (plgpu.load(table_ref.at[at + i])[:, :, None] for i in range(2))
        pairs = _decoded(codes_ref[...], low, high, interpret)
        if not turned:
            plgpu.store(out_ref, pairs)
            return
        flat = pairs.reshape(rows, count * _BLOCK_BYTES)
        for i in range(2):
            one = ((flat >> (8 * i)) & 0xFF).astype(jnp.uint8)
            plgpu.store(out_ref.at[:, pl.ds(i, 1), :], one.T[:, None, :])

    block = lambda *sides: pl.BlockSpec(sides, lambda i, j: (i, j, 0)[: len(sides)])
    if turned:
        out_shape = jax.ShapeDtypeStruct((k // 2, 2, n), jnp.uint8)
        out_specs = pl.BlockSpec(
            (count * _BLOCK_BYTES, 2, rows), lambda i, j: (j, 0, i)
        )
    else:
        out_shape, out_specs = (
            jax.ShapeDtypeStruct(codes.shape, jnp.int16),
            block(rows, count, _BLOCK_BYTES),
        )
    values = plgpu.pallas_call(
        kernel,
        out_shape=varying(out_shape, codes, scales, table),
        grid=(n // rows, k // 16 // count),
        in_specs=[
            block(rows, count, _BLOCK_BYTES),
            block(rows, count),
            pl.BlockSpec((512,), lambda i, j: (0,)),
        ],
        out_specs=out_specs,
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="unpack_fp4",
    )(codes, scales, table)
    return lax.bitcast_convert_type(values, jnp.float8_e4m3fn).reshape(
        (k, n) if turned else (n, k)
    )


def _decoded(
    codes: jax.Array, low: jax.Array, high: jax.Array, interpret: bool
) -> jax.Array:
    """Return the two E4M3 values of each byte of codes as a word of 16 bits, from
    magnitudes in two words of 32.
    """
    low, high = (jnp.broadcast_to(word, codes.shape) for word in (low, high))
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
            result_shape_dtypes=[jax.ShapeDtypeStruct(codes.shape, jnp.int16)],
        )[0]

    def value(code: jax.Array) -> jax.Array:
        word = jnp.where(code & 4, high, low)
        return ((word >> (8 * (code & 3))) & 0xFF) ^ ((code & 8) << 4)

    code = codes.astype(jnp.uint32)
    return (value(code & 15) | value(code >> 4) << 8).astype(jnp.int16)
