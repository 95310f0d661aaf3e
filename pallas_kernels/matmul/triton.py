"""`matmul` in Pallas-Triton: the portable kernel, which a CPU can interpret on any supported jax.

Each program computes one output tile: it walks k in steps, adds x W_hiᵀ and x W_loᵀ to one float32 accumulator, and
scales, adds the bias and rounds at the end. Triton lowers an FP8 product to F16 `mma.sync` (Pallas has no path to
Hopper's FP8 `wgmma`), so sums are float32 whatever `accumulation` says, and a Hopper GPU runs it four times slower than
cuBLASLt: the kernel is for GPUs and arguments that nothing else serves, and is never the first choice.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.matmul.parts import on_each_device
from pallas_kernels.matmul.reference import sizes

# What Triton's tensor-core products ask of a tile's side.
SMALLEST_SIDE = 16


@dataclass(frozen=True)
class Config:
    """Tile sizes, warps of 32 threads, and buffers between loads and products."""

    tile_m: int
    tile_n: int
    tile_k: int
    warps: int = 4
    stages: int = 3


def fit(m: int, k: int, n: int) -> Config | None:
    """The largest tiles up to 128 that divide the shape; None where a size is no multiple of 16."""
    sides = [next((s for s in (128, 64, 32, 16) if size and size % s == 0), 0) for size in (m, n, k)]
    if 0 in sides:
        return None
    return Config(sides[0], sides[1], sides[2], warps=8 if sides[0] * sides[1] >= 128 * 128 else 4)


def reject(x: jax.Array, w: jax.Array, w_lo: jax.Array | None, **options: Any) -> str | None:
    """Why this kernel cannot multiply these operands, or None."""
    if x.dtype != w.dtype:
        return f'Triton multiplies one format, not {x.dtype} x {w.dtype}; use backend="xla"'
    m, k, n = sizes(x, w)
    if fit(m, k, n) is None:
        return f'm={m}, k={k} and n={n} must be multiples of {SMALLEST_SIDE}; use backend="xla" or pad'
    return None


def decline(*args: Any, **options: Any) -> str | None:
    """Why this kernel is not the first choice."""
    return "F16 mma.sync is slower than the FP8 products of cuBLASLt"


def matmul(
    x: jax.Array,
    w: jax.Array,
    w_lo: jax.Array | None,
    *,
    scale: jax.Array,
    bias: jax.Array | None,
    out_dtype: Any,
    accumulation: str,
    out_sharding: Any,
) -> jax.Array:
    """The product, see `api.matmul`."""

    def fits(m: int, k: int, n: int) -> bool:
        return fit(m, k, n) is not None

    return on_each_device(
        _multiply, fits, (x, w, w_lo), scale=scale, bias=bias, out_dtype=out_dtype, accumulation=accumulation
    )


def _multiply(
    x: jax.Array, halves: Sequence[jax.Array], scale: jax.Array, bias: jax.Array | None, out_dtype: Any
) -> jax.Array:
    call = functools.partial(_call, len(halves), out_dtype)
    operands = [x, *halves, scale, *([] if bias is None else [bias])]
    return lax.platform_dependent(
        *operands, cpu=functools.partial(call, interpret=True), cuda=functools.partial(call, interpret=False)
    )


def _call(halves: int, out_dtype: Any, *operands: jax.Array, interpret: bool) -> jax.Array:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plgpu

    (m, k), (n, _) = operands[0].shape, operands[1].shape
    config = fit(m, k, n)
    assert config is not None, "fits() came first"
    tile_m, tile_n, tile_k = config.tile_m, config.tile_n, config.tile_k
    nt = (((1,), (1,)), ((), ()))

    def kernel(x_ref: Any, *refs: Any) -> None:
        w_refs, scale_ref, out_ref = refs[:halves], refs[halves], refs[-1]

        def step(i: Any, total: jax.Array) -> jax.Array:
            columns = pl.ds(i * tile_k, tile_k)
            x = x_ref[:, columns]
            for w_ref in w_refs:
                total = total + lax.dot_general(x, w_ref[:, columns], nt, preferred_element_type=jnp.float32)
            return total

        total = lax.fori_loop(0, k // tile_k, step, jnp.zeros((tile_m, tile_n), jnp.float32)) * scale_ref[0]
        if len(refs) == halves + 3:
            total = total + refs[halves + 1][...][None, :]
        out_ref[...] = total.astype(out_dtype)

    panel = pl.BlockSpec((tile_n, k), lambda i, j: (j, 0))
    specs = [pl.BlockSpec((tile_m, k), lambda i, j: (i, 0)), *[panel] * halves, pl.BlockSpec((1,), lambda i, j: (0,))]
    if len(operands) == halves + 3:
        specs.append(pl.BlockSpec((tile_n,), lambda i, j: (j,)))
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((m, n), out_dtype),
        grid=(m // tile_m, n // tile_n),
        in_specs=specs,
        out_specs=pl.BlockSpec((tile_m, tile_n), lambda i, j: (i, j)),
        compiler_params=plgpu.CompilerParams(num_warps=config.warps, num_stages=config.stages),
        interpret=interpret,
        name=f"matmul_fp8_{'dual' if halves == 2 else 'single'}",
    )(*operands)
