"""Grouped products on Hopper: scales, lists of groups and tile sizes for
`kernel.py`.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch, numerics, tuning
from pallas_kernels.grouped_matmul import reference
from pallas_kernels.grouped_matmul.tiles import Plan, list_groups, list_tiles
from pallas_kernels.hopper import plan as hopper
from pallas_kernels.hopper.plan import (
    COMPUTE_WARPGROUPS,
    EPILOGUE_ROW_BYTES,
    EPILOGUE_ROWS,
    SHARED_MEMORY,
    Config,
)
from pallas_kernels.operands import Block, Operand, Product, Row

# Bytes of a row of shared memory, at most; copies and wgmma agree on rows of one
# swizzle
_SWIZZLE = 128


@dataclasses.dataclass(frozen=True)
class Problem:
    """A grouped product `[m, k] x [e, n, k]`, or `[m, k] x [n, k]` over ranges of k, by
    sizes and bytes of a value.

    `block` is the side of blocks that share a scale, or 0.
    """

    m: int
    k: int
    n: int
    within: bool
    width: int
    out_width: int
    halves: int
    promote: bool
    groups: int
    block: int = 0

    @classmethod
    def of(
        cls,
        options: Product,
        x: Operand | jax.Array,
        w: Operand | jax.Array,
        groups: int,
    ) -> "Problem":
        """Return the sizes of a product; BF16 is added in float32 anyway."""
        (m, k), values = reference.values_of(x).shape, reference.values_of(w)
        halves = 2 if isinstance(w, Operand) and w.lo is not None else 1
        block = (
            x.scaling.size
            if isinstance(x, Operand) and isinstance(x.scaling, Block)
            else 0
        )
        promote = isinstance(x, Operand) and (
            options.accumulation == "full" or block > 0
        )
        widths = values.dtype.itemsize, jnp.dtype(options.out_dtype).itemsize
        return cls(
            m,
            k,
            values.shape[-2],
            values.ndim == 2,
            *widths,
            halves,
            promote,
            groups,
            block,
        )


def candidates(problem: Problem) -> list[Config]:
    """Return the configs that fit a product, the best guess first."""
    found = []
    for rows in (_SWIZZLE, _SWIZZLE // 2):
        base = Config(tile_k=rows // problem.width, cluster=1, snake=8, pipeline="ring")  # type: ignore[arg-type]
        shapes = [(128, 256), (256, 128), (128, 128)]
        if problem.halves == 2:
            shapes.reverse()  # wide tiles of two halves leave two stages
        if problem.promote:
            # Totals in registers leave no room for sums of 64 x 256, and small groups
            # fill no tiles of 256 rows.
            few = problem.block or (
                not problem.within and problem.m < 768 * problem.groups
            )
            shapes = [(128, 128), (256, 128)] if few else [(256, 128), (128, 128)]
        for tile_m, tile_n in shapes:
            stages = min(
                8,
                (SHARED_MEMORY - 33 * 1024)
                // ((tile_m + problem.halves * tile_n) * rows),
            )
            found.append(
                dataclasses.replace(base, tile_m=tile_m, tile_n=tile_n, stages=stages)
            )
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
    if problem.block not in (0, config.tile_k):
        return f"block={problem.block} must be tile_k={config.tile_k}"
    if rows not in (_SWIZZLE, _SWIZZLE // 2) or config.cluster != 1:
        return (
            f"tile_k={config.tile_k} must be 64 or 128 bytes, not {rows}, and"
            f" cluster={config.cluster} must be 1"
        )
    pieces = (
        config.tile_m * config.tile_n // (COMPUTE_WARPGROUPS * EPILOGUE_ROWS * store)
    )
    if pieces % config.store_buffers:
        return (
            f"{pieces} pieces of an output tile must be a multiple of"
            f" store_buffers={config.store_buffers}"
        )
    operands = config.stages * (config.tile_m + problem.halves * config.tile_n) * rows
    used = (
        operands
        + config.store_buffers * COMPUTE_WARPGROUPS * EPILOGUE_ROWS * EPILOGUE_ROW_BYTES
        + 1024
    )
    return (
        f"{used} bytes of shared memory exceed {SHARED_MEMORY}"
        if used > SHARED_MEMORY
        else None
    )


def reject(
    options: Product,
    x: Operand | jax.Array,
    w: Operand | jax.Array,
    group_sizes: jax.Array,
) -> str | None:
    """Return the reason why this kernel cannot multiply these operands here, or
    None.
    """
    if (reason := hopper.reject(options.out_dtype)) is not None:
        return reason
    problem = Problem.of(options, x, w, group_sizes.shape[0])
    groups, rows = group_sizes.shape[0], problem.k if problem.within else problem.m
    if groups == 0 or groups * (rows + 1) >= 2**31:
        return (
            f"{groups} groups of {rows} rows: their product must be above 0 and fit 31"
            ' bits; use backend="xla"'
        )
    if candidates(problem):
        return None
    rows = _SWIZZLE // 2 // problem.width
    smallest = Config(128, 128, tile_k=rows, stages=2, cluster=1)  # type: ignore[arg-type]
    return f'{misfit(smallest, problem)} for backend="mosaic"; use backend="xla" or pad'


def configure(
    options: Product,
    x: Operand | jax.Array,
    w: Operand | jax.Array,
    group_sizes: jax.Array,
) -> Config | None:
    """Return the tile sizes that were measured near this shape, else the best guess
    that fits.
    """
    problem = Problem.of(options, x, w, group_sizes.shape[0])
    key = reference.key(options, x, w, group_sizes)
    entry = tuning.find(dispatch.device_kind(), key, "mosaic")
    if entry is not None and "mosaic" in entry.configs and tuning.is_near(entry, key):
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
    """Return the product of each row with the weight of its group, see
    `api.grouped_matmul`.
    """
    values, m = reference.values_of(w), reference.values_of(x).shape[0]
    experts, n = values.shape[:2]
    config = config or configure(options, x, w, group_sizes)
    assert config is not None, "rejected"
    starts, before = list_groups(group_sizes, m, config.tile_m)
    scales = _scales(x, w)
    if isinstance(w, Operand) and isinstance(w.scaling, Block):
        scales = _by_steps(config, x, w)
        # read, and not used, for rows behind the groups
        scales[1] = jnp.pad(scales[1], ((0, 1), (0, 0), (0, 0)))
    elif len(scales) == 2 and isinstance(x, Operand) and isinstance(x.scaling, Row):
        # Rows behind the groups are zero, also if their scales are not finite.
        inside = jnp.arange(m + config.tile_m) < starts[-1]
        scales = [jnp.where(inside, jnp.pad(scales[0], (0, config.tile_m)), 0)]
        scales += [jnp.pad(w.scale, ((0, 1), (0, config.tile_n)))]  # type: ignore[union-attr]
    lists = (
        starts,
        before,
        *list_tiles(starts, before, m, m // config.tile_m + experts + 1),
    )
    return _run(
        options,
        config,
        x,
        w,
        jax.ShapeDtypeStruct((m, n), options.out_dtype),
        lists,
        scales,
    )


def grouped_weight_gradient(
    options: Product,
    x: Operand | jax.Array,
    g: Operand | jax.Array,
    group_sizes: jax.Array,
    *,
    config: Config | None = None,
) -> jax.Array:
    """Return the product over the rows of each group, see
    `api.grouped_weight_gradient`.
    """
    (k, m), n, experts = (
        reference.values_of(x).shape,
        reference.values_of(g).shape[0],
        group_sizes.shape[0],
    )
    config = config or configure(options, x, g, group_sizes)
    assert config is not None, "rejected"
    scales = _scales(x, g)
    if isinstance(g, Operand) and isinstance(g.scaling, Block):
        scales = _by_steps(config, x, g)
        scales[1] = scales[1][None]
    elif len(scales) == 2 and isinstance(x, Operand) and isinstance(x.scaling, Row):
        scales = [
            jnp.pad(scales[0], (0, config.tile_m)),
            jnp.pad(scales[1], (0, config.tile_n))[None],
        ]
    out = jax.ShapeDtypeStruct((experts, k, n), options.out_dtype)
    return _run(
        options,
        config,
        x,
        g,
        out,
        list_groups(group_sizes, m, config.tile_m)[:1],
        scales,
    )


def _scales(x: Operand | jax.Array, w: Operand | jax.Array) -> list[jax.Array]:
    """Return the float32 scales of both operands; none of BF16."""
    found = [
        one.scale.astype(jnp.float32) for one in (x, w) if isinstance(one, Operand)
    ]
    return [scale.reshape(1) if scale.ndim == 0 else scale for scale in found]


def _by_steps(config: Config, *operands: Operand | jax.Array) -> list[jax.Array]:
    """Return the float32 scales of blocks as `[..., steps of k, rows or squares]`, long
    enough for whole tiles.
    """
    found = []
    for operand, more in zip(operands, (config.tile_m, config.tile_n), strict=True):
        assert isinstance(operand, Operand), "blocks are FP8"
        scale = numerics.decode_e8m0(operand.scale).swapaxes(-1, -2)
        found.append(jnp.pad(scale, [(0, 0)] * (scale.ndim - 1) + [(0, more)]))
    return found


def _run(
    options: Product,
    config: Config,
    x: Operand | jax.Array,
    w: Operand | jax.Array,
    out: jax.ShapeDtypeStruct,
    lists: tuple[jax.Array, ...],
    scales: list[jax.Array],
) -> jax.Array:
    # Imported where it is used: a second that a program without this kernel need not
    # pay, and needs jax 0.11.
    from pallas_kernels.grouped_matmul import kernel

    groups, blocks = lists[0].shape[0] - 1, hopper.blocks(config)
    problem = Problem.of(options, x, w, groups)
    kind: Literal["rows", "within"] = "within" if problem.within else "rows"
    scaling: Literal["none", "tensor", "rows", "square", "vector"] = "none"
    if isinstance(w, Operand):
        scaling = "rows" if isinstance(w.scaling, Row) else "tensor"
        scaling = w.scaling.tile if isinstance(w.scaling, Block) else scaling
    plan = Plan(config, kind, problem.halves, problem.promote, scaling, blocks)
    lo = [w.lo] if isinstance(w, Operand) and w.lo is not None else []
    values = [reference.values_of(x), reference.values_of(w), *lo]
    return kernel.call(plan, out, *values, *lists, *scales)
