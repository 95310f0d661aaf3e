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

# Above it the tensor cores are what a product waits for: XLA unpacks the weight once. On an H200 with 28672 x 8192 the
# kernel in BF16 took 46 us at m = 16, 62 at 64 and 124 at 128, BF16's product 117, 111 and 120. 256 rows are the most
# that `wgmma` takes.
MOST_ROWS: dict[Activation, int] = {"bfloat16": 64, "float8_e4m3fn": 256}
ROWS = 64
_SHARED_BYTES = 228_000
# (warpgroups, cluster), the best guess first: a block reads all of x, which the more outputs share the better.
_SHAPES: tuple[tuple[int, Literal[1, 2]], ...] = ((4, 1), (2, 2), (2, 1), (1, 1))


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


def decline(options: Options, x: jax.Array, w: Operand) -> str | None:
    """Why this kernel is not chosen unless it is named, or None."""
    if options.activation == "bfloat16":
        return None
    return f'activation={options.activation!r} has not run on a GPU yet; backend="mosaic" asks for it'


def _step(scaling: Any) -> int:
    return 16 * scaling.block


def choose(options: Options, scaling: Any, m: int, k: int, n: int) -> Any:
    """The sizes of the kernel for a product, or None where none fit."""
    step = _step(scaling)
    if not 0 < m <= MOST_ROWS[options.activation] or not k or k % step or not n or n % ROWS:
        return None
    from pallas_kernels.fp4_matmul.kernel import Config

    wide = jnp.dtype(options.activation).itemsize
    for warpgroups, cluster in _SHAPES:
        if n % (ROWS * warpgroups * cluster) or (cluster > 1 and wide > 1):
            continue
        tiles, steps = n // (ROWS * warpgroups), k // step
        # A block has a multiprocessor to itself. As many parts of k as fill the chip once, if steps divide into them.
        most = max(1, device_cores(132) // tiles)
        splits = max(count for count in range(1, most + 1) if steps % count == 0)
        config = Config(warpgroups, splits=splits, cluster=cluster)
        rows = _padded(m, config)
        # In E4M3 the kernel writes the product itself where k is whole.
        of_output = config.piece(rows) * ROWS * warpgroups * options.out_dtype.itemsize if wide == 1 else 0
        of_stage = config.height * (step // 2 + 16) + rows * step * wide
        stages = min(config.stages, (_SHARED_BYTES - of_output) // of_stage)
        if stages >= 2 and config.holds(rows):
            return dataclasses.replace(config, stages=stages)
    return None


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
    from pallas_kernels.fp4_matmul import decode, decode_fp8

    def chosen_for(x: jax.Array, w: Operand) -> Any:
        return config or choose(options, w.scaling, x.shape[0], *w.shape[::-1])

    def in_bfloat16(options: Options, x: jax.Array, w: Operand, table: jax.Array) -> jax.Array:
        chosen = chosen_for(x, w)
        return reference.fp4_matmul(options, x, w) if chosen is None else _in_bfloat16(chosen, options, x, w, table)

    def in_fp8(options: Options, x: jax.Array, w: Operand, table: jax.Array, scale: jax.Array) -> jax.Array:
        rows, chosen = Operand(x, scale, scaling=Row("float32")), chosen_for(x, w)
        return unpacked.in_fp8(options, rows, w) if chosen is None else _in_fp8(chosen, options, rows, w, table)

    assert isinstance(w.scaling, Fp4), "api checked it"
    if options.activation == "bfloat16":
        table = jnp.asarray(decode.table(w.scaling.format))
        return on_each_device(in_bfloat16, options, x, w, {"table": ("t", table)})
    # Rounded before devices have parts of a row, whose scale is found from all of it.
    rows, table = reference.quantize_rows(x), jnp.asarray(decode_fp8.table())
    return on_each_device(in_fp8, options, rows.values, w, {"table": ("t", table), "scale": ("m", rows.scale)})


def _in_bfloat16(config: Any, options: Options, x: jax.Array, w: Operand, table: jax.Array) -> jax.Array:
    from pallas_kernels.fp4_matmul import decode, kernel

    scaling = w.scaling
    assert isinstance(scaling, Fp4), "api checked it"
    m = x.shape[0]
    rows = jnp.pad(x.astype(jnp.bfloat16), ((0, _padded(m, config) - m), (0, 0)))
    sums = kernel.call(config, scaling.format, decode.permuted(rows), w.values, _scale_bytes(w), table)
    out = sum(sums[1:], sums[0])[:, :m].T * decode.FACTOR[scaling.format]
    return reference.scale_sum(out, None, w.outer).astype(options.out_dtype)


def _in_fp8(config: Any, options: Options, x: Operand, w: Operand, table: jax.Array) -> jax.Array:
    from pallas_kernels.fp4_matmul import decode_fp8, kernel

    m = x.shape[0]
    more = _padded(m, config) - m
    rows = decode_fp8.permuted(jnp.pad(x.values, ((0, more), (0, 0))))
    # 256 values are the most that a dimension of a copy has.
    call = functools.partial(kernel.call, config, "nvfp4", rows, w.values, _scale_bytes(w), table.reshape(2, 256))
    factors = reference.scale_sum(jnp.float32(1 / decode_fp8.FACTOR), None, w.outer) * x.scale
    if config.splits == 1:
        return call(jnp.pad(factors, (0, more)), options.out_dtype)[:m]
    sums = call()
    return (sum(sums[1:], sums[0])[:, :m].T * factors[:, None]).astype(options.out_dtype)


def _scale_bytes(w: Operand) -> jax.Array:
    """The bytes of the scales of every row, uint8 `[n, k / block]`."""
    scales, scaling = lax.bitcast_convert_type(w.scale, jnp.uint8), w.scaling
    assert isinstance(scaling, Fp4), "api checked it"
    if scaling.tile == "square":
        # A square's scale is read by every row of it: the kernel wants it once a row, 0.5 bits a value more.
        scales = jnp.repeat(scales, scaling.block, axis=0)[: w.shape[0]]
    return scales
