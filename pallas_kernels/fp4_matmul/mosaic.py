"""`fp4_matmul` on Hopper for few rows of x: which shapes the kernel takes, with which sizes."""

import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.dispatch import device_cores, device_kind
from pallas_kernels.fp4_matmul import reference, unpacked
from pallas_kernels.fp4_matmul.parts import on_each_device
from pallas_kernels.fp4_matmul.reference import Activation, Options
from pallas_kernels.hopper.plan import reject_here
from pallas_kernels.operands import Fp4, Operand, Row
from pallas_kernels.partition import device_count

# Above it the tensor cores are what a product waits for: XLA unpacks the weight once. On an H200 with 28672 x 8192 the
# kernel in BF16 took 46 us at m = 16, 62 at 64 and 124 at 128, BF16's product 117, 111 and 120. 256 rows are the most
# that `wgmma` takes.
MOST_ROWS: dict[Activation, int] = {"bfloat16": 64, "float8_e4m3fn": 256}
ROWS = 64
_SHARED_BYTES = 228_000
# Up to so many rows, (warpgroups, cluster), the fastest first on an H200 with 28672 x 8192: a block reads all of x,
# which the more outputs share the better. In E4M3 60 us without a cluster and 64 with one at m = 128, and 126 and 124
# at 256.
_SHAPES: dict[int, tuple[tuple[int, Literal[1, 2]], ...]] = {
    128: ((4, 1), (2, 1), (1, 1)), 256: ((4, 1), (2, 2), (2, 1), (1, 1))
}  # fmt: skip


def reject(options: Options, x: jax.Array, w: Operand) -> str | None:
    """Why this kernel cannot multiply these operands here, or None."""
    reason = reject_here(options.out_dtype)
    if reason is not None:
        return reason
    if device_kind() == "cpu":
        return 'codes are decoded in PTX, which has no interpreter; use backend="xla"'
    if options.contracts != "k":
        return f'contracts={options.contracts!r} for backend="mosaic", which multiplies along "k"; use backend="xla"'
    scaling = w.scaling
    if options.activation != "bfloat16" and not unpacked.folds(scaling):
        return (
            f'activation={options.activation!r} with {scaling} for backend="mosaic", which multiplies codes times '
            'scales in E4M3, where those of Fp4(rule="fold_exact") alone are exact; quantize so, or use backend="xla"'
        )
    (n, k), m = w.shape, math.prod(x.shape[:-1])
    if choose(options, scaling, m, k, n) is None:
        step, most = _step(scaling), MOST_ROWS[options.activation]
        return (
            f"m={m}, k={k}, n={n} must be at most {most}, a multiple of {step} and a multiple of {ROWS} for "
            f'backend="mosaic" with activation={options.activation!r}; use backend="xla" or pad'
        )
    return None


def _step(scaling: Any) -> int:
    return 16 * scaling.block


def choose(options: Options, scaling: Any, m: int, k: int, n: int) -> Any:
    """The sizes of the kernel for a product, or None where none fit."""
    step = _step(scaling)
    if not 0 < m <= MOST_ROWS[options.activation] or not k or k % step or not n or n % ROWS:
        return None
    from pallas_kernels.fp4_matmul.kernel import Config

    wide = jnp.dtype(options.activation).itemsize
    for warpgroups, cluster in next(shapes for most, shapes in _SHAPES.items() if m <= most):
        if n % (ROWS * warpgroups * cluster):
            continue
        share = _share(n // (ROWS * warpgroups * cluster), k // step, max(1, device_cores(132) // cluster), wide)
        config = Config(warpgroups, share=share, cluster=cluster)
        rows = _padded(m, config)
        # In E4M3 the kernel writes the product itself where each block has all of k.
        writes = wide == 1 and config.share is None
        of_output = config.piece(rows) * ROWS * warpgroups * options.out_dtype.itemsize if writes else 0
        of_stage = config.height * (step // 2 + 16) + rows * step * wide
        stages = min(config.stages, (_SHARED_BYTES - of_output) // of_stage)
        if stages >= 2 and config.holds(rows):
            return dataclasses.replace(config, stages=stages)
    return None


def _share(tiles: int, steps: int, places: int, itemsize: int) -> int | None:
    """Steps that a block takes, None for all of a tile.

    A block has a multiprocessor to itself. Where tiles fill most of the chip, E4M3 has a block a tile, which writes the
    product: 40.6 us at m = 16 and 28672 x 8192, and 45.6 with equal shares, whose parts are added. BF16 writes sums,
    and has equal shares, 45.3 us and not 46.7. Else each tile has as many blocks as fit: 16.4 us at 14336 x 4096 with 8
    of 16 steps each, and 18.4 with 7, as equal shares have.
    """
    if 2 * tiles > places:
        share = steps if itemsize == 1 else -(-tiles * steps // places)
    else:
        share = steps // max(count for count in range(1, places // tiles + 1) if steps % count == 0)
    return None if share == steps else share


def _padded(m: int, config: Any) -> int:
    rows = 8 * config.cluster
    return -(-m // rows) * rows


def configure(options: Options, x: jax.Array, w: Operand) -> Any:
    """The sizes of this product."""
    n, k = w.shape
    return choose(options, w.scaling, math.prod(x.shape[:-1]), k, n)


def fp4_matmul(options: Options, x: jax.Array, w: Operand, *, config: Any = None) -> jax.Array:
    """The product, see `api.fp4_matmul`; a device's part that no sizes fit is multiplied by XLA."""
    # Imported where it is used: a second that a program without this kernel need not pay, and needs jax 0.11.
    from pallas_kernels.fp4_matmul import decode, decode_fp8, ordered_rows

    def chosen_for(x: jax.Array, w: Operand) -> Any:
        return config or choose(options, w.scaling, x.shape[0], *w.shape[::-1])

    def in_bfloat16(options: Options, x: jax.Array, w: Operand, table: jax.Array) -> jax.Array:
        chosen = chosen_for(x, w)
        if chosen is None:
            return reference.fp4_matmul(options, x, w)
        # That the kernel writes BF16's product has not run on a GPU yet: named sizes ask for it.
        return _in_bfloat16(chosen, options, x, w, table, writes=config is not None)

    def in_fp8(
        options: Options, x: jax.Array, w: Operand, table: jax.Array, scale: jax.Array | None = None
    ) -> jax.Array:
        rows, chosen = None if scale is None else Operand(x, scale, scaling=Row("float32")), chosen_for(x, w)
        if chosen is None:
            return unpacked.in_fp8(options, rows or reference.quantize_rows(x), w)
        return _in_fp8(chosen, options, rows or x, w, table)

    assert isinstance(w.scaling, Fp4), "api checked it"
    if options.activation == "bfloat16":
        table = jnp.asarray(decode.table(w.scaling.format))
        return on_each_device(in_bfloat16, options, x, w, {"table": ("t", table)})
    arrays = {"table": ("t", jnp.asarray(decode_fp8.table()))}
    if device_count() == 1 and ordered_rows.serves(x.shape[-1]):
        return on_each_device(in_fp8, options, x, w, arrays)
    # Rounded before devices have parts of a row, whose scale is found from all of it.
    rows = reference.quantize_rows(x)
    return on_each_device(in_fp8, options, rows.values, w, arrays | {"scale": ("m", rows.scale)})


def _in_bfloat16(
    config: Any, options: Options, x: jax.Array, w: Operand, table: jax.Array, *, writes: bool
) -> jax.Array:
    from pallas_kernels.fp4_matmul import decode, kernel

    scaling = w.scaling
    assert isinstance(scaling, Fp4), "api checked it"
    m = x.shape[0]
    rows = jnp.pad(x.astype(jnp.bfloat16), ((0, _padded(m, config) - m), (0, 0)))
    ordered = decode.permuted(rows, scaling.format)
    call = functools.partial(kernel.call, config, scaling.format, ordered, w.values, _scale_bytes(w), table)
    shares = kernel.Shares.of(config, scaling.format, *w.shape)
    if writes and shares.whole:
        return call(jnp.full(1, 1.0) if w.outer is None else w.outer.reshape(1), options.out_dtype)[:m]
    out = kernel.added(shares, call())[:, :m].T * decode.FACTOR[scaling.format]
    return reference.scale_sum(out, None, w.outer).astype(options.out_dtype)


def _in_fp8(config: Any, options: Options, x: jax.Array | Operand, w: Operand, table: jax.Array) -> jax.Array:
    """The product of the rows of x, which may be rounded already."""
    from pallas_kernels.fp4_matmul import decode_fp8, kernel, ordered_rows

    (m, _), outer = x.shape, jnp.float32(1) if w.outer is None else w.outer
    count = _padded(m, config)
    if isinstance(x, Operand):
        rows = decode_fp8.permuted(jnp.pad(x.values, ((0, count - m), (0, 0))))
        factors = jnp.pad(outer / decode_fp8.FACTOR * x.scale, (0, count - m))
    else:
        rows, factors = ordered_rows.ordered(x, count, outer)
    # 256 values are the most that a dimension of a copy has.
    call = functools.partial(kernel.call, config, "nvfp4", rows, w.values, _scale_bytes(w), table.reshape(2, 256))
    shares = kernel.Shares.of(config, "nvfp4", *w.shape)
    if shares.whole:
        return call(factors, options.out_dtype)[:m]
    return (kernel.added(shares, call()).T * factors[:, None]).astype(options.out_dtype)[:m]


def _scale_bytes(w: Operand) -> jax.Array:
    """The bytes of the scales of every row, uint8 `[n, k / block]`."""
    scales, scaling = lax.bitcast_convert_type(w.scale, jnp.uint8), w.scaling
    assert isinstance(scaling, Fp4), "api checked it"
    if scaling.tile == "square":
        # A square's scale is read by every row of it: the kernel wants it once a row, 0.5 bits a value more.
        scales = jnp.repeat(scales, scaling.block, axis=0)[: w.shape[0]]
    return scales
