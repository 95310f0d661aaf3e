"""`block_matmul` for Hopper in Pallas Mosaic GPU: which shapes it takes, with which tiles.

The kernel is that of `matmul/mosaic_kernel.py` with full accumulation: a sum over one block of k is scaled by the
scales of x and w where it is promoted, in float32 registers (DeepSeek-V3, 2024). Both halves of a weight share a scale,
so they share the sum. Blocks of 64 and 32 promote two and four times as often as those of 128.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import numerics, tuning
from pallas_kernels.block_matmul import reference
from pallas_kernels.blocks import Blocked, Tile
from pallas_kernels.dispatch import device_kind
from pallas_kernels.matmul import mosaic
from pallas_kernels.matmul.mosaic import Config, Plan
from pallas_kernels.matmul.reference import sizes
from pallas_kernels.partition import BlocksOf, partitioned


def candidates(m: int, k: int, n: int, halves: int, block: int) -> list[Config]:
    """Configs that this shape divides into, best guess first."""
    stages = {128: 4 - halves, 64: 6 - 2 * halves, 32: 8}[block]
    guesses = [
        Config(256, 128, tile_k=_tile_k(block), stages=stages, pipeline=pipeline, cluster=cluster)
        for pipeline in ("steady", "drained")
        for cluster in (1, 2)
    ]
    guesses += [Config(128, 128, tile_k=_tile_k(block), stages=4, cluster=cluster) for cluster in (1, 2)]
    return [config for config in guesses if mosaic.misfit(config, m, k, n, halves) is None]


def reject(
    x: Blocked, w: Blocked, w_lo: Blocked | None, *, block: int, tile: Tile, out_dtype: Any, out_sharding: Any = None
) -> str | None:
    """Why this kernel cannot multiply these operands here, or None."""
    reason = mosaic.reject_here(out_dtype)
    if reason is not None:
        return reason
    (m, k, n), halves = _shape(x, w, w_lo)
    if not candidates(m, k, n, halves, block):
        smallest = Config(128, 128, tile_k=_tile_k(block), stages=2, cluster=1)
        return f'{mosaic.misfit(smallest, m, k, n, halves)} for backend="mosaic"; use backend="xla" or pad'
    return None


def decline(x: Blocked, w: Blocked, w_lo: Blocked | None, **options: Any) -> str | None:
    """Why this kernel is not the first choice, or None."""
    shape, halves = _shape(x, w, w_lo)
    return tuning.decline("block_matmul", "mosaic", variant(halves, **options), shape)


def configure(
    x: Blocked, w: Blocked, w_lo: Blocked | None, *, block: int, tile: Tile, out_dtype: Any, **options: Any
) -> Config | None:
    """The tile sizes of this product: those that were measured near its shape, else the best guess that fits."""
    return _choose(*_shape(x, w, w_lo), block=block, tile=tile, out_dtype=out_dtype)


def _shape(x: Blocked, w: Blocked, w_lo: Blocked | None) -> tuple[tuple[int, int, int], int]:
    """((m, k, n), halves of the weight)."""
    return sizes(x.values, w.values), 1 if w_lo is None else 2


def _tile_k(block: int) -> Any:
    return block


def variant(halves: int, *, block: int, tile: Tile, out_dtype: Any, **options: Any) -> str:
    """How `tuned.json` names a product."""
    return f"{'dual' if halves == 2 else 'single'} {tile} {block} {jnp.dtype(out_dtype)}"


def _choose(shape: tuple[int, int, int], halves: int, *, block: int, tile: Tile, out_dtype: Any) -> Config | None:
    entry = tuning.find("block_matmul", variant(halves, block=block, tile=tile, out_dtype=out_dtype), shape)
    if entry is not None and "mosaic" in entry.configs:
        tuned = Config(**entry.configs["mosaic"])
        if mosaic.misfit(tuned, *shape, halves) is None:
            return tuned
    return next(iter(candidates(*shape, halves, block)), None)


def block_matmul(
    x: Blocked,
    w: Blocked,
    w_lo: Blocked | None,
    *,
    block: int,
    tile: Tile,
    out_dtype: Any,
    out_sharding: Any = None,
    config: Config | None = None,
) -> jax.Array:
    """The product, see `api.block_matmul`; `config` overrides the tuned or guessed tile sizes where a part fits it.

    The scales of `w_lo` say only which residual blocks are zero, and zeros add nothing.
    """
    (m, k, n), halves = _shape(x, w, w_lo)

    def local(x: jax.Array, of_x: jax.Array, of_w: jax.Array, *weights: jax.Array, summed_over: Any) -> jax.Array:
        part = (x.shape[0], x.shape[1], weights[0].shape[0])
        chosen = _choose(part, halves, block=block, tile=tile, out_dtype=out_dtype)
        if config is not None and mosaic.misfit(config, *part, halves) is None:
            chosen = config
        dtype = jnp.float32 if summed_over else out_dtype
        if chosen is None:
            blocked = [Blocked(weight, of_w) for weight in weights]
            out = reference.block_matmul(
                Blocked(x, of_x), blocked[0], blocked[1] if halves == 2 else None, block=block, tile=tile,
                out_dtype=dtype, out_sharding=None,
            )  # fmt: skip
        else:
            out = _run(chosen, x, of_x, of_w, weights, tile, dtype)
        return jax.lax.psum(out, summed_over).astype(out_dtype) if summed_over else out

    rows = "i" if tile == "square" else "n"
    rule = f"m k, m j, {rows} j" + ", n k" * halves + " -> m n"
    blocks = {"j": BlocksOf("k", block, k), "i": BlocksOf("n", block, n)}
    # Its interpreter calls back, see matmul/parts.py.
    whole = device_kind() == "cpu"
    call = functools.partial(local, summed_over=()) if whole else partitioned(local, rule, blocks)
    weights = [half.values for half in (w, w_lo) if half is not None]
    out = call(x.values.reshape(m, k), x.scales.reshape(m, -1), w.scales, *weights)
    return out.reshape(*x.values.shape[:-1], n)


def _run(
    config: Config, x: jax.Array, x_scales: jax.Array, w_scales: jax.Array, weights: Any, tile: Tile, out_dtype: Any
) -> jax.Array:
    # Imported where it is used: a second that a program without this kernel need not pay, and needs jax 0.11.
    from pallas_kernels.matmul import mosaic_kernel

    of_x, of_w = (numerics.decode_e8m0(scales).T for scales in (x_scales, w_scales))
    scaling: Any = "square" if tile == "square" and config.tile_k == config.tile_n else "vector"
    if tile == "square" and scaling == "vector":
        of_w = jnp.repeat(of_w, config.tile_k, axis=1)
    plan = Plan(config, len(weights), True, False, mosaic.blocks(config), scaling)
    return mosaic_kernel.call(plan, out_dtype, x, *weights, jnp.ones(1), of_x, of_w)
