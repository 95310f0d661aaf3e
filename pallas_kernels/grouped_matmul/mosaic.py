"""Grouped products on Hopper: lists of work from the sizes of groups, scales, and tile sizes for `kernel.py`.

Both lists are a handful of small XLA operations on the device. `rows` has an item for every row tile of a group, so an
empty group costs nothing, and the rows behind the last group are one more group without a weight.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch, tuning
from pallas_kernels.grouped_matmul import reference
from pallas_kernels.hopper import plan as hopper
from pallas_kernels.hopper.plan import COMPUTE_WARPGROUPS, EPILOGUE_ROW_BYTES, EPILOGUE_ROWS, SHARED_MEMORY, Config
from pallas_kernels.operands import Operand, Product, Row

_SWIZZLE = 128  # bytes of a row of shared memory, at most; copies and wgmma agree on rows of one swizzle


@dataclasses.dataclass(frozen=True)
class Problem:
    """A grouped product `[m, k] x [e, n, k]`, or `[m, k] x [n, k]` over ranges of k, by sizes and bytes of a value."""

    m: int
    k: int
    n: int
    within: bool
    width: int
    out_width: int
    halves: int
    promote: bool

    @classmethod
    def of(cls, options: Product, x: Operand | jax.Array, w: Operand | jax.Array) -> "Problem":
        """Return the sizes of a product; BF16 is added in float32 anyway."""
        (m, k), values = reference.values_of(x).shape, reference.values_of(w)
        halves = 2 if isinstance(w, Operand) and w.lo is not None else 1
        promote = options.accumulation == "full" and isinstance(x, Operand)
        widths = values.dtype.itemsize, jnp.dtype(options.out_dtype).itemsize
        return cls(m, k, values.shape[-2], values.ndim == 2, *widths, halves, promote)


def candidates(problem: Problem) -> list[Config]:
    """Return the configs that fit a product, the best guess first."""
    found = []
    for rows in (_SWIZZLE, _SWIZZLE // 2):
        base = Config(tile_k=rows // problem.width, cluster=1, snake=16, pipeline="ring")  # type: ignore[arg-type]
        # Totals in registers leave no room for sums of 64 x 256.
        shapes = [(128, 256), (256, 128), (128, 128)] if not problem.promote else [(256, 128), (128, 128)]
        for tile_m, tile_n in shapes:
            stages = min(8, (SHARED_MEMORY - 33 * 1024) // ((tile_m + problem.halves * tile_n) * rows))
            found.append(dataclasses.replace(base, tile_m=tile_m, tile_n=tile_n, stages=stages))
    return [config for config in found if misfit(config, problem) is None]


def misfit(config: Config, problem: Problem) -> str | None:
    """Return the reason why a config cannot compute a product, or None."""
    rows, store = config.tile_k * problem.width, EPILOGUE_ROW_BYTES // problem.out_width
    if problem.k == 0 or problem.k % config.tile_k:
        return f"the contracted size {problem.k} must be a multiple of {config.tile_k}"
    if problem.n == 0 or problem.n % store:
        return f"n={problem.n} must be a multiple of {store}"
    if problem.m < config.tile_m:
        return f"{problem.m} rows are fewer than the {config.tile_m} of a tile"
    if rows not in (_SWIZZLE, _SWIZZLE // 2) or config.cluster != 1:
        return f"tile_k={config.tile_k} must be 64 or 128 bytes, not {rows}, and cluster={config.cluster} must be 1"
    pieces = config.tile_m * config.tile_n // (COMPUTE_WARPGROUPS * EPILOGUE_ROWS * store)
    if pieces % config.store_buffers:
        return f"{pieces} pieces of an output tile must be a multiple of store_buffers={config.store_buffers}"
    operands = config.stages * (config.tile_m + problem.halves * config.tile_n) * rows
    used = operands + config.store_buffers * COMPUTE_WARPGROUPS * EPILOGUE_ROWS * EPILOGUE_ROW_BYTES + 1024
    return f"{used} bytes of shared memory exceed {SHARED_MEMORY}" if used > SHARED_MEMORY else None


def reject(options: Product, x: Operand | jax.Array, w: Operand | jax.Array, group_sizes: jax.Array) -> str | None:
    """Return the reason why this kernel cannot multiply these operands here, or None."""
    if (reason := hopper.reject(options.out_dtype)) is not None:
        return reason
    problem = Problem.of(options, x, w)
    if group_sizes.shape[0] == 0:
        return "there are no groups"
    if candidates(problem):
        return None
    rows = _SWIZZLE // 2 // problem.width
    smallest = Config(128, 128, tile_k=rows, stages=2, cluster=1)  # type: ignore[arg-type]
    return f'{misfit(smallest, problem)} for backend="mosaic"; use backend="xla" or pad'


def configure(
    options: Product, x: Operand | jax.Array, w: Operand | jax.Array, group_sizes: jax.Array
) -> Config | None:
    """Return the tile sizes that were measured near this shape, else the best guess that fits."""
    problem = Problem.of(options, x, w)
    entry = tuning.find(dispatch.device_kind(), reference.key(options, x, w, group_sizes), "mosaic")
    if entry is not None and "mosaic" in entry.configs:
        tuned = Config(**entry.configs["mosaic"])
        if misfit(tuned, problem) is None:
            return tuned
    return next(iter(candidates(problem)), None)


def grouped_matmul(
    options: Product,
    x: Operand | jax.Array,
    w: Operand | jax.Array,
    group_sizes: jax.Array,
    *,
    config: Config | None = None,
) -> jax.Array:
    """Return the product of each row with the weight of its group, see `api.grouped_matmul`."""
    values, m = reference.values_of(w), reference.values_of(x).shape[0]
    experts, n = values.shape[:2]
    config = config or configure(options, x, w, group_sizes)
    assert config is not None, "rejected"
    sound, sizes = _sound(group_sizes, m)
    total = jnp.sum(sizes)
    tiles = list_tiles(jnp.append(sizes, m - total), config.tile_m, m // config.tile_m + experts + 1)
    poison = jnp.where(sound, 1.0, jnp.nan).astype(jnp.float32)
    if isinstance(x, Operand) and isinstance(w, Operand) and isinstance(w.scaling, Row):
        inside = jnp.arange(m + config.tile_m) < total
        of_x = jnp.where(inside, jnp.pad(x.scale, (0, config.tile_m)), 0) * poison
        scales = [of_x, jnp.pad(w.scale, ((0, 1), (0, config.tile_n)))]
    else:
        scale = x.scale * w.scale if isinstance(x, Operand) and isinstance(w, Operand) else jnp.ones(experts)
        scales = [jnp.append(scale.astype(jnp.float32), 0.0) * poison]
    return _run(options, config, x, w, jax.ShapeDtypeStruct((m, n), options.out_dtype), tiles, scales)


def grouped_weight_gradient(
    options: Product,
    x: Operand | jax.Array,
    g: Operand | jax.Array,
    group_sizes: jax.Array,
    *,
    config: Config | None = None,
) -> jax.Array:
    """Return the product over the rows of each group, see `api.grouped_weight_gradient`."""
    (k, m), n, experts = reference.values_of(x).shape, reference.values_of(g).shape[0], group_sizes.shape[0]
    config = config or configure(options, x, g, group_sizes)
    assert config is not None, "rejected"
    sound, sizes = _sound(group_sizes, m)
    ends = jnp.cumsum(sizes)
    first = (ends - sizes) // config.tile_k * config.tile_k
    listed = jnp.stack([first, ends - sizes - first, jnp.where(sizes > 0, ends - first, 0)])
    count = jnp.full(1, experts * -(-k // config.tile_m), jnp.int32)
    poison = jnp.where(sound, 1.0, jnp.nan).astype(jnp.float32)
    if isinstance(x, Operand) and isinstance(g, Operand) and isinstance(x.scaling, Row):
        of_x, of_g = jnp.pad(x.scale, (0, config.tile_m)) * poison, jnp.pad(g.scale, (0, config.tile_n))
        scales = [of_x, of_g[None]]
    else:
        scale = x.scale * g.scale if isinstance(x, Operand) and isinstance(g, Operand) else 1.0
        scales = [jnp.broadcast_to(scale * poison, experts)]
    out = jax.ShapeDtypeStruct((experts, k, n), options.out_dtype)
    return _run(options, config, x, g, out, (count, listed), scales)


def _run(
    options: Product,
    config: Config,
    x: Operand | jax.Array,
    w: Operand | jax.Array,
    out: jax.ShapeDtypeStruct,
    tiles: tuple[jax.Array, jax.Array],
    scales: list[jax.Array],
) -> jax.Array:
    # Imported where it is used: a second that a program without this kernel need not pay, and needs jax 0.11.
    from pallas_kernels.grouped_matmul import kernel

    problem = Problem.of(options, x, w)
    kind: Any = "within" if problem.within else "rows"
    by_rows, blocks = len(scales) == 2, hopper.blocks(config)
    plan = kernel.Plan(config, kind, problem.halves, problem.promote, by_rows, blocks)
    lo = [w.lo] if isinstance(w, Operand) and w.lo is not None else []
    values = [reference.values_of(x), reference.values_of(w), *lo]
    return kernel.call(plan, out, *values, *tiles, *scales)


def _sound(group_sizes: jax.Array, m: int) -> tuple[jax.Array, jax.Array]:
    """Return (whether sizes are such, sizes that are), so that a kernel stays in its arrays."""
    sound = reference.are_sound(group_sizes, m)
    return sound, jnp.where(sound, group_sizes, 0)


def list_tiles(sizes: jax.Array, tile_m: int, most: int) -> tuple[jax.Array, jax.Array]:
    """Return (number of row tiles `[1]`, (group, first row, rows) of each, `[3, most]`), int32.

    The last tile of a group that is larger than a tile ends with the group, and overlaps the tile before.

    >>> list_tiles(jnp.array([5, 0, 3]), 4, 4)[1].T.tolist()[:3]
    [[0, 0, 4], [0, 1, 4], [2, 5, 3]]
    """
    sizes = sizes.astype(jnp.int32)
    tiles = (sizes + tile_m - 1) // tile_m
    starts, behind = jnp.cumsum(sizes) - sizes, jnp.cumsum(tiles)
    tile = jnp.arange(most, dtype=jnp.int32)
    # Comparing all with all is one fusion; a search is a loop of small kernels.
    group = jnp.minimum(jnp.sum(behind <= tile[:, None], axis=1, dtype=jnp.int32), len(sizes) - 1)
    size, place = sizes[group], tile - (behind - tiles)[group]
    row = starts[group] + jnp.minimum(place * tile_m, jnp.maximum(size - tile_m, 0))
    return behind[-1:], jnp.stack([group, row, jnp.minimum(size, tile_m)])
