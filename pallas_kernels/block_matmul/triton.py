"""`block_matmul` in Pallas-Triton: the portable kernel, as `matmul/triton.py`, with the scales of a step at its sum.

Each program computes one output tile and walks k in steps of one block. Both halves of a weight share the scales of a
step: `total += (x W_hiᵀ + x W_loᵀ) s_x s_w`. Never the first choice, for the reasons given there.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import numerics
from pallas_kernels.block_matmul import reference
from pallas_kernels.blocks import Blocked, ResidualBlocks, Tile
from pallas_kernels.matmul import triton as unscaled
from pallas_kernels.matmul.reference import sizes
from pallas_kernels.matmul.triton import Config
from pallas_kernels.partition import BlocksOf, partitioned


def fit(m: int, k: int, n: int, block: int, tile: Tile) -> Config | None:
    """The largest tiles up to 128 that divide the shape, one block wide along k; None where there are none."""
    if k % block or not k or (tile == "square" and n % block):
        return None
    found = unscaled.fit(m, block, block if tile == "square" else n)
    return None if found is None else Config(found.tile_m, found.tile_n, block, found.warps)


def reject(
    x: Blocked,
    w: Blocked,
    w_lo: Blocked | None,
    *,
    block: int,
    tile: Tile,
    residual_blocks: ResidualBlocks = "all",
    **options: Any,
) -> str | None:
    """Why this kernel cannot multiply these operands, or None."""
    if residual_blocks == "nonzero":
        return 'residual_blocks="nonzero": this kernel multiplies all blocks; use backend="mosaic" or "xla"'
    if x.values.dtype != w.values.dtype:
        return f'Triton multiplies one format, not {x.values.dtype} x {w.values.dtype}; use backend="xla"'
    if jax.sharding.AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
        return 'the mesh has explicit axes, under which kernels are not partitioned; use backend="xla"'
    m, k, n = sizes(x.values, w.values)
    if fit(m, k, n, block, tile) is None:
        multiple = block if tile == "square" else unscaled.SMALLEST_SIDE
        return (
            f"m={m}, k={k} and n={n} must be multiples of {unscaled.SMALLEST_SIDE}, block={block} and {multiple}; "
            'use backend="xla" or pad'
        )
    return None


def block_matmul(
    x: Blocked, w: Blocked, w_lo: Blocked | None, *, block: int, tile: Tile, out_dtype: Any, **options: Any
) -> jax.Array:
    """The product, see `api.block_matmul`."""
    m, k, n = sizes(x.values, w.values)
    halves = 1 if w_lo is None else 2

    def local(x: jax.Array, of_x: jax.Array, of_w: jax.Array, *weights: jax.Array, summed_over: Any) -> jax.Array:
        dtype = jnp.float32 if summed_over else out_dtype
        if fit(x.shape[0], x.shape[1], weights[0].shape[0], block, tile) is not None:
            out = _multiply(x, of_x, of_w, weights, block, tile, dtype)
        else:
            hi, *lo = (Blocked(weight, of_w) for weight in weights)
            out = reference.block_matmul(
                Blocked(x, of_x), hi, lo[0] if lo else None, block=block, tile=tile, out_dtype=dtype
            )
        return lax.psum(out, summed_over).astype(out_dtype) if summed_over else out

    rows = "i" if tile == "square" else "n"
    rule = f"m k, m j, {rows} j" + ", n k" * halves + " -> m n"
    call = partitioned(local, rule, {"j": BlocksOf("k", block, k), "i": BlocksOf("n", block, n)})
    weights = [half.values for half in (w, w_lo) if half is not None]
    out = call(x.values.reshape(m, k), x.scales.reshape(m, k // block), w.scales, *weights)
    return out.reshape(*x.values.shape[:-1], n)


def _multiply(
    x: jax.Array, of_x: jax.Array, of_w: jax.Array, weights: Any, block: int, tile: Tile, out_dtype: Any
) -> jax.Array:
    scales = [numerics.decode_e8m0(s) for s in (of_x, of_w)]
    if tile == "square":
        # A column of scales for every tile of n: one number a step.
        scales[1] = scales[1][:, None, :]
    call = functools.partial(_call, block, tile, out_dtype)
    return lax.platform_dependent(
        x, *scales, *weights, cpu=functools.partial(call, interpret=True), cuda=functools.partial(call, interpret=False)
    )


def _call(block: int, tile: Tile, out_dtype: Any, *operands: jax.Array, interpret: bool) -> jax.Array:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plgpu

    (m, k), n, blocks = operands[0].shape, operands[3].shape[0], operands[1].shape[1]
    config = fit(m, k, n, block, tile)
    assert config is not None, "the caller checked"
    tile_m, tile_n = config.tile_m, config.tile_n
    nt = (((1,), (1,)), ((), ()))

    def kernel(x_ref: Any, of_x_ref: Any, of_w_ref: Any, *refs: Any) -> None:
        *w_refs, out_ref = refs

        def step(i: Any, total: jax.Array) -> jax.Array:
            columns = pl.ds(i * block, block)
            x = x_ref[:, columns]
            part = jnp.zeros((tile_m, tile_n), jnp.float32)
            for w_ref in w_refs:
                part = part + lax.dot_general(x, w_ref[:, columns], nt, preferred_element_type=jnp.float32)
            of_w = of_w_ref[0, 0, i] if tile == "square" else of_w_ref[:, i][None, :]
            return total + part * (of_x_ref[:, i][:, None] * of_w)

        total = lax.fori_loop(0, blocks, step, jnp.zeros((tile_m, tile_n), jnp.float32))
        out_ref[...] = total.astype(out_dtype)

    panel = pl.BlockSpec((tile_n, k), lambda i, j: (j, 0))
    of_w = pl.BlockSpec((tile_n, blocks), lambda i, j: (j, 0))
    if tile == "square":
        of_w = pl.BlockSpec((1, 1, blocks), lambda i, j: (j * tile_n // block, 0, 0))
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((m, n), out_dtype),
        grid=(m // tile_m, n // tile_n),
        in_specs=[
            pl.BlockSpec((tile_m, k), lambda i, j: (i, 0)),
            pl.BlockSpec((tile_m, blocks), lambda i, j: (i, 0)),
            of_w,
            *[panel] * (len(operands) - 3),
        ],
        out_specs=pl.BlockSpec((tile_m, tile_n), lambda i, j: (i, j)),
        compiler_params=plgpu.CompilerParams(num_warps=config.warps, num_stages=config.stages),
        interpret=interpret,
        name=f"block_matmul_{'dual' if len(operands) == 5 else 'single'}",
    )(*operands)
