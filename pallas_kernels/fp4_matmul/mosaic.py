"""`fp4_matmul` on Hopper for few rows of x: which shapes the kernel takes, with which sizes."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.dispatch import device_cores, device_kind
from pallas_kernels.fp4_matmul import reference
from pallas_kernels.fp4_matmul.parts import on_each_device
from pallas_kernels.fp4_matmul.reference import Options
from pallas_kernels.hopper.plan import reject_here
from pallas_kernels.operands import Fp4, Operand

# Above it the tensor cores, which run BF16, are what a product waits for: XLA unpacks the weight once. On an H200 with
# 28672 x 8192 the kernel took 46 us at m = 16, 62 at 64 and 124 at 128, BF16's product 117, 111 and 120.
MOST_ROWS = 64
ROWS = 64
_SHARED_BYTES = 228_000


def reject(options: Options, x: jax.Array, w: Operand) -> str | None:
    """Why this kernel cannot multiply these operands here, or None."""
    reason = reject_here(options.out_dtype)
    if reason is not None:
        return reason
    if device_kind() == "cpu":
        return 'codes are decoded in PTX, which has no interpreter; use backend="xla"'
    if options.contracts != "k" or options.activation != "bfloat16":
        return (
            f'contracts={options.contracts!r} with activation={options.activation!r} for backend="mosaic", which '
            'multiplies bfloat16 along "k"; use backend="xla"'
        )
    (n, k), m = w.shape, math.prod(x.shape[:-1])
    if choose(w.scaling, m, k, n) is None:
        step = _step(w.scaling)
        return (
            f"m={m}, k={k}, n={n} must be at most {MOST_ROWS}, a multiple of {step} and a multiple of {ROWS} for "
            'backend="mosaic"; use backend="xla" or pad'
        )
    return None


def _step(scaling: Any) -> int:
    return 16 * scaling.block


def choose(scaling: Any, m: int, k: int, n: int) -> Any:
    """The sizes of the kernel for a product, or None where none fit."""
    step = _step(scaling)
    if not 0 < m <= MOST_ROWS or not k or k % step or not n or n % ROWS:
        return None
    from pallas_kernels.fp4_matmul.kernel import Config

    warpgroups = next(count for count in (4, 2, 1) if n % (ROWS * count) == 0)
    tiles, steps = n // (ROWS * warpgroups), k // step
    # A block has a multiprocessor to itself. As many parts of k as fill the chip once, if steps divide into them.
    most = max(1, device_cores(132) // tiles)
    splits = max(count for count in range(1, most + 1) if steps % count == 0)
    of_stage = ROWS * warpgroups * (step // 2 + 16) + _padded(m) * step * 2
    stages = min(4, _SHARED_BYTES // of_stage)
    return Config(warpgroups, stages, splits) if stages >= 2 else Config(min(2, warpgroups), 2, splits)


def _padded(m: int) -> int:
    return -(-m // 8) * 8


def configure(options: Options, x: jax.Array, w: Operand) -> Any:
    """The sizes of this product."""
    n, k = w.shape
    return choose(w.scaling, math.prod(x.shape[:-1]), k, n)


def fp4_matmul(options: Options, x: jax.Array, w: Operand, *, config: Any = None) -> jax.Array:
    """The product, see `api.fp4_matmul`; a device's part that no sizes fit is multiplied by the definition."""

    def multiply(options: Options, x: jax.Array, w: Operand, table: jax.Array) -> jax.Array:
        n, k = w.shape
        chosen = config or choose(w.scaling, x.shape[0], k, n)
        return reference.fp4_matmul(options, x, w) if chosen is None else _by_kernel(chosen, options, x, w, table)

    # Imported where it is used: a second that a program without this kernel need not pay, and needs jax 0.11.
    from pallas_kernels.fp4_matmul.decode import table

    assert isinstance(w.scaling, Fp4), "api checked it"
    return on_each_device(multiply, options, x, w, jnp.asarray(table(w.scaling.format)))


def _by_kernel(config: Any, options: Options, x: jax.Array, w: Operand, table: jax.Array) -> jax.Array:
    from pallas_kernels.fp4_matmul import decode, kernel

    scaling = w.scaling
    assert isinstance(scaling, Fp4), "api checked it"
    m, (n, _) = x.shape[0], w.shape
    scales = lax.bitcast_convert_type(w.scale, jnp.uint8)
    if scaling.tile == "square":
        # A square's scale is read by every row of it: the kernel wants it once a row, 0.5 bits a value more.
        scales = jnp.repeat(scales, scaling.block, axis=0)[:n]
    rows = jnp.pad(x.astype(jnp.bfloat16), ((0, _padded(m) - m), (0, 0)))
    sums = kernel.call(config, scaling.format, decode.permuted(rows), w.values, scales, table)
    out = sum(sums[1:], sums[0])[:, :m].T * decode.FACTOR[scaling.format]
    return reference.scale_sum(out, None, w.outer).astype(options.out_dtype)
