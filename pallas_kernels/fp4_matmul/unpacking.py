"""A weight of E2M1 codes as E4M3 numbers, in either orientation, by one pass: what FP8 products of many rows read.

XLA makes one fusion of it, which computes every value by some twenty instructions, and stores a transpose one byte at
a time. Here a thread has whole blocks: it looks up the eight magnitudes of a block's scale once, and chooses among them
as the kernel does that decodes in registers (`decode_fp8.py`), nine instructions for eight values.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.fp4_matmul import decode_fp8, reference
from pallas_kernels.operands import Fp4, Operand
from pallas_kernels.partition import BlocksOf, partitioned, varying

# Rows of a program, and the blocks of each; turned, its rows lie side by side in memory.
_SIDES = {False: (16, 32), True: (128, 4)}
_WARPS = 4
_BYTES = 8  # of a block's codes
# Codes of four bytes, which the compiler packs into a register, and the table's words of each of them.
_DECODE_OPERANDS = {"$2": "$2", "$3": "$3", "$4": "$7"}


def unpack(w: Operand, *, turned: bool = False) -> jax.Array:
    """`reference.decode(w, float8_e4m3fn, 2**-3)`, `[n, k]`, or its transpose.

    A kernel does it on a GPU where blocks of 16 are whole; signs of NaN are the device's own.
    """
    scaling = w.scaling
    assert isinstance(scaling, Fp4), "only E2M1 codes are unpacked"
    n, k = w.shape

    def local(codes: jax.Array, scales: jax.Array, table: jax.Array, *, summed_over: Any = ()) -> jax.Array:
        assert not summed_over, "every device has whole values"
        part = Operand(codes, scales, scaling=scaling)
        ways = (functools.partial(way, turned=turned) for way in (_on_gpu, _by_xla))
        return lax.platform_dependent(part, table, **dict(zip(("cuda", "default"), ways, strict=True)))

    of_scales = "n j" if scaling.tile == "vector" else "i j"
    blocks = {"h": BlocksOf("k", 2, k), "j": BlocksOf("k", scaling.block, k), "i": BlocksOf("n", scaling.block, n)}
    rule = f"n h, {of_scales}, t -> " + ("k n" if turned else "n k")
    return partitioned(local, rule, blocks)(w.values, w.scale, jnp.asarray(decode_fp8.table()))


def serves(w: Operand) -> bool:
    """Whether the kernel takes this weight: NVFP4, of whole programs."""
    n, k = w.shape
    return (
        isinstance(w.scaling, Fp4) and w.scaling.format == "nvfp4" and n > 0 and n % 16 == 0 and k > 0 and k % 64 == 0
    )


def _by_xla(w: Operand, table: jax.Array, *, turned: bool) -> jax.Array:
    values = reference.decode(w, jnp.float8_e4m3fn, decode_fp8.FACTOR)
    return values.T if turned else values


def _on_gpu(w: Operand, table: jax.Array, *, turned: bool) -> jax.Array:
    return (call if serves(w) else _by_xla)(w, table, turned=turned)


def call(w: Operand, table: jax.Array, *, turned: bool, interpret: bool = False) -> jax.Array:
    """The kernel's values of a weight that it `serves`, by `decode_fp8.table()`."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plgpu

    (n, k), (rows, count) = w.shape, _SIDES[turned]
    rows, count = _dividing(n, rows), _dividing(k // 16, count)
    scales = reference.scale_bytes(w)
    codes = w.values.reshape(n, k // 16, _BYTES)

    def kernel(codes_ref: Any, scales_ref: Any, table_ref: Any, out_ref: Any) -> None:
        # Two words for each scale byte, which lie in the cache nearest to the threads.
        at = 2 * scales_ref[...].astype(jnp.int32)
        low, high = (plgpu.load(table_ref.at[at + i])[:, :, None] for i in range(2))
        pairs = _decoded(codes_ref[...], low, high, interpret)
        if not turned:
            plgpu.store(out_ref, pairs)
            return
        flat = pairs.reshape(rows, count * _BYTES)
        for i in range(2):
            one = ((flat >> (8 * i)) & 0xFF).astype(jnp.uint8)
            plgpu.store(out_ref.at[:, pl.ds(i, 1), :], one.T[:, None, :])

    block = lambda *sides: pl.BlockSpec(sides, lambda i, j: (i, j, 0)[: len(sides)])
    if turned:
        out_shape = jax.ShapeDtypeStruct((k // 2, 2, n), jnp.uint8)
        out_specs = pl.BlockSpec((count * _BYTES, 2, rows), lambda i, j: (j, 0, i))
    else:
        out_shape, out_specs = jax.ShapeDtypeStruct(codes.shape, jnp.int16), block(rows, count, _BYTES)
    values = pl.pallas_call(
        kernel,
        out_shape=varying(out_shape, codes, scales, table),
        grid=(n // rows, k // 16 // count),
        in_specs=[block(rows, count, _BYTES), block(rows, count), pl.BlockSpec((512,), lambda i, j: (0,))],
        out_specs=out_specs,
        compiler_params=plgpu.CompilerParams(num_warps=_WARPS, num_stages=1),
        interpret=interpret,
        name="unpack_fp4",
    )(codes, scales, table)
    return lax.bitcast_convert_type(values, jnp.float8_e4m3fn).reshape((k, n) if turned else (n, k))


def _dividing(size: int, most: int) -> int:
    """The largest power of two that divides a size, and at most so many."""
    return min(most, size & -size)


def _decoded(codes: jax.Array, low: jax.Array, high: jax.Array, interpret: bool) -> jax.Array:
    """Two E4M3 values of each byte of codes, a word of 16 bits, of magnitudes in two words of 32."""
    from jax.experimental.pallas import triton as plgpu

    low, high = (jnp.broadcast_to(word, codes.shape) for word in (low, high))
    if not interpret:
        text = decode_fp8.DECODE
        for name, other in reversed(_DECODE_OPERANDS.items()):
            text = text.replace(name, other)
        return plgpu.elementwise_inline_asm(
            text, args=[codes, low, high], pack=4, constraints="=r,=r" + ",r" * 9,
            result_shape_dtypes=[jax.ShapeDtypeStruct(codes.shape, jnp.int16)],
        )[0]  # fmt: skip

    def value(code: jax.Array) -> jax.Array:
        word = jnp.where(code & 4, high, low)
        return ((word >> (8 * (code & 3))) & 0xFF) ^ ((code & 8) << 4)

    code = codes.astype(jnp.uint32)
    return (value(code & 15) | value(code >> 4) << 8).astype(jnp.int16)
