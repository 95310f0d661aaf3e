"""`block_matmul` for Hopper in Pallas Mosaic GPU: which shapes it takes, with which tiles.

The kernel is that of `matmul/mosaic_kernel.py` with full accumulation: a sum over one block of k is scaled by the
scales of x and w where it is promoted, in float32 registers (DeepSeek-V3, 2024). Both halves of a weight share a scale,
so they share the sum. Blocks of 64 and 32 promote two and four times as often as those of 128.

With `residual_blocks="nonzero"` a step whose tile of W_lo, `tile_n` rows by one block of k, is all zero neither loads
nor multiplies it. Which ones those are follows from the residual's scales, on each device from those of its own part.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import numerics, tuning
from pallas_kernels.block_matmul import reference
from pallas_kernels.blocks import ZERO_BLOCK, Blocked, ResidualBlocks, Tile
from pallas_kernels.dispatch import device_kind
from pallas_kernels.matmul import mosaic
from pallas_kernels.matmul.mosaic import SHARED_MEMORY, Config, Plan
from pallas_kernels.matmul.reference import sizes
from pallas_kernels.partition import BlocksOf, partitioned

# Of a product that skips residual blocks: (stages, store_buffers, cluster). Totals and accumulator fill the registers,
# and what ptxas makes of the rest turns on such constants: it keeps these within 128 bytes of stack, others take 250.
SKIPPING_BUFFERS = {
    128: ((2, 2, 2), (2, 2, 1), (3, 1, 1)),
    64: ((5, 2, 1), (5, 1, 2), (6, 1, 1)),
    32: ((10, 2, 2), (7, 2, 2), (8, 1, 1)),
}


_BARRIERS = 1024  # at most, and what alignment of the buffers takes


def candidates(
    m: int, k: int, n: int, halves: int, block: int, residual_blocks: ResidualBlocks = "all"
) -> list[Config]:
    """Configs that this shape divides into, best guess first."""
    if residual_blocks == "nonzero":
        return _skipping_candidates(m, k, n, block)
    stages = {128: 4 - halves, 64: 6 - 2 * halves, 32: 8}[block]
    guesses = [
        Config(256, 128, tile_k=_tile_k(block), stages=stages, pipeline=pipeline, cluster=cluster)
        for pipeline in ("steady", "drained")
        for cluster in (1, 2)
    ]
    guesses += [Config(128, 128, tile_k=_tile_k(block), stages=5 - halves, cluster=cluster) for cluster in (1, 2)]
    return [config for config in guesses if misfit(config, m, k, n, halves) is None]


def misfit(config: Config, m: int, k: int, n: int, halves: int) -> str | None:
    """Why a config cannot compute this shape, or None; counts the buffers of scales, float32, and of barriers, too."""
    reason = mosaic.misfit(config, m, k, n, halves)
    of_scales = config.stages * 4 * (config.tile_m + config.tile_n) + _BARRIERS
    if reason is None and mosaic.shared_bytes(config, halves) + of_scales > SHARED_MEMORY:
        return f"{mosaic.shared_bytes(config, halves)} bytes of shared memory and {of_scales} of scales exceed it"
    return reason


def _skipping_candidates(m: int, k: int, n: int, block: int) -> list[Config]:
    # Their pipeline runs ahead whatever `pipeline` says; "drained" is what asks nothing of the shape.
    guesses = [
        Config(256, 128, tile_k=_tile_k(block), stages=stages, store_buffers=stores, cluster=cluster)
        for stages, stores, cluster in SKIPPING_BUFFERS[block]
    ]
    # Lower tiles have registers for anything; where W_lo is absent, its buffers are too, so it takes more of them.
    lower = [Config(128, 128, tile_k=_tile_k(block), stages=4, store_buffers=1, cluster=cluster) for cluster in (2, 1)]
    lower += [Config(128, 128, tile_k=_tile_k(block), stages=3, cluster=cluster) for cluster in (2, 1)]
    return [config for config in [*guesses, *lower] if misfit(config, m, k, n, 2) is None]


def reject(
    x: Blocked,
    w: Blocked,
    w_lo: Blocked | None,
    *,
    block: int,
    tile: Tile,
    out_dtype: Any,
    residual_blocks: ResidualBlocks = "all",
) -> str | None:
    """Why this kernel cannot multiply these operands here, or None."""
    reason = mosaic.reject_here(out_dtype)
    if reason is not None:
        return reason
    (m, k, n), halves = _shape(x, w, w_lo)
    if not candidates(m, k, n, halves, block, residual_blocks):
        smallest = Config(128, 128, tile_k=_tile_k(block), stages=2, cluster=1)
        return f'{misfit(smallest, m, k, n, halves)} for backend="mosaic"; use backend="xla" or pad'
    return None


def decline(x: Blocked, w: Blocked, w_lo: Blocked | None, **options: Any) -> str | None:
    """Why this kernel is not the first choice, or None."""
    shape, halves = _shape(x, w, w_lo)
    return tuning.decline("block_matmul", "mosaic", variant(halves, **options), shape)


def configure(x: Blocked, w: Blocked, w_lo: Blocked | None, **options: Any) -> Config | None:
    """The tile sizes of this product: those that were measured near its shape, else the best guess that fits."""
    return _choose(*_shape(x, w, w_lo), **options)


def _shape(x: Blocked, w: Blocked, w_lo: Blocked | None) -> tuple[tuple[int, int, int], int]:
    """((m, k, n), halves of the weight)."""
    return sizes(x.values, w.values), 1 if w_lo is None else 2


def _tile_k(block: int) -> Any:
    return block


def variant(halves: int, *, block: int, tile: Tile, out_dtype: Any, residual_blocks: ResidualBlocks = "all") -> str:
    """How `tuned.json` names a product."""
    weight = {"all": "dual", "nonzero": "dual nonzero"}[residual_blocks] if halves == 2 else "single"
    return f"{weight} {tile} {block} {jnp.dtype(out_dtype)}"


def _choose(
    shape: tuple[int, int, int], halves: int, *, block: int, residual_blocks: ResidualBlocks = "all", **options: Any
) -> Config | None:
    name = variant(halves, block=block, residual_blocks=residual_blocks, **options)
    entry = tuning.find("block_matmul", name, shape)
    if entry is not None and "mosaic" in entry.configs:
        tuned = Config(**entry.configs["mosaic"])
        if misfit(tuned, *shape, halves) is None:
            return tuned
    return next(iter(candidates(*shape, halves, block, residual_blocks)), None)


def block_matmul(
    x: Blocked,
    w: Blocked,
    w_lo: Blocked | None,
    *,
    block: int,
    tile: Tile,
    out_dtype: Any,
    residual_blocks: ResidualBlocks = "all",
    config: Config | None = None,
) -> jax.Array:
    """The product, see `api.block_matmul`; `config` overrides the tuned or guessed tile sizes where a part fits it.

    The scales of `w_lo` say only which residual blocks are zero: "all" does without them.
    """
    (m, k, n), halves = _shape(x, w, w_lo)
    skips = w_lo is not None and residual_blocks == "nonzero"

    def local(x: jax.Array, of_x: jax.Array, of_w: jax.Array, *rest: jax.Array, summed_over: Any) -> jax.Array:
        *of_lo, weights = (*rest[:-halves], rest[-halves:])
        part = (x.shape[0], x.shape[1], weights[0].shape[0])
        chosen = _choose(part, halves, block=block, residual_blocks=residual_blocks, tile=tile, out_dtype=out_dtype)
        if config is not None and misfit(config, *part, halves) is None:
            chosen = config
        dtype = jnp.float32 if summed_over else out_dtype
        if chosen is None:
            blocked = [Blocked(weight, of_w) for weight in weights]
            out = reference.block_matmul(
                Blocked(x, of_x), blocked[0], blocked[1] if halves == 2 else None, block=block, tile=tile,
                out_dtype=dtype,
            )  # fmt: skip
        else:
            out = _run(chosen, (x, *weights), of_x, of_w, of_lo[0] if of_lo else None, tile, dtype)
        return jax.lax.psum(out, summed_over).astype(out_dtype) if summed_over else out

    rows = "i" if tile == "square" else "n"
    rule = f"m k, m j, {rows} j" + f", {rows} j" * skips + ", n k" * halves + " -> m n"
    blocks = {"j": BlocksOf("k", block, k), "i": BlocksOf("n", block, n)}
    # Its interpreter calls back, see matmul/parts.py.
    whole = device_kind() == "cpu"
    call = functools.partial(local, summed_over=()) if whole else partitioned(local, rule, blocks)
    weights = [half.values for half in (w, w_lo) if half is not None]
    of_lo = [w_lo.scales] if w_lo is not None and skips else []
    out = call(x.values.reshape(m, k), x.scales.reshape(m, -1), w.scales, *of_lo, *weights)
    return out.reshape(*x.values.shape[:-1], n)


def _run(
    config: Config,
    values: Any,
    x_scales: jax.Array,
    w_scales: jax.Array,
    lo_scales: jax.Array | None,
    tile: Tile,
    out_dtype: Any,
) -> jax.Array:
    # Imported where it is used: a second that a program without this kernel need not pay, and needs jax 0.11.
    from pallas_kernels.matmul import mosaic_kernel

    of_x, of_w = (numerics.decode_e8m0(scales).T for scales in (x_scales, w_scales))
    scaling: Any = "square" if tile == "square" and config.tile_k == config.tile_n else "vector"
    if tile == "square" and scaling == "vector":
        of_w = jnp.repeat(of_w, config.tile_k, axis=1)
    plan = Plan(config, len(values) - 1, True, False, mosaic.blocks(config), scaling)
    if lo_scales is None:
        return mosaic_kernel.call(plan, out_dtype, *values, jnp.ones(1), of_x, of_w)
    count, order = list_work(lo_scales, values[1].shape[0] // config.tile_n)
    if scaling == "square":
        of_w = jnp.take_along_axis(of_w, order.T, axis=0)
    plan = dataclasses.replace(plan, residual_blocks="nonzero")
    return mosaic_kernel.call(plan, out_dtype, *values, jnp.ones(1), of_x, of_w, count, order)


def list_work(residual_scales: jax.Array, n_tiles: int) -> tuple[jax.Array, jax.Array]:
    """The steps of every tile of n by what they need: int32 (how many need the residual, blocks of k with those first).

    Args:
      residual_scales: of W_lo, `[n or n / block, k / block]`.

    Returns:
      `[n_tiles]` and `[n_tiles, k / block]`, the latter in ascending order within both groups.

    >>> codes = jnp.array([[0, 127, 0, 127], [0, 0, 0, 0]], jnp.uint8)
    >>> list_work(jax.lax.bitcast_convert_type(codes, jnp.float8_e8m0fnu), 2)[1].tolist()
    [[1, 3, 0, 2], [0, 1, 2, 3]]
    """
    codes = jax.lax.bitcast_convert_type(residual_scales, jnp.uint8)
    steps = codes.shape[-1]
    needed = jnp.any((codes != ZERO_BLOCK).reshape(n_tiles, -1, steps), axis=1)
    count = jnp.sum(needed, axis=1, dtype=jnp.int32)
    before = jnp.cumsum(needed, axis=1, dtype=jnp.int32)
    block = jnp.arange(steps, dtype=jnp.int32)
    place = jnp.where(needed, before - 1, count[:, None] + block - before)
    # The inverse of a permutation by comparing all with all: one fusion, where a sort is a kernel that takes longer.
    at_place = place[:, :, None] == block
    return count, jnp.sum(jnp.where(at_place, block[:, None], 0), axis=1, dtype=jnp.int32)
