"""Grouped products on Hopper: scales, lists of groups and tiles for `kernel.py`."""

import itertools
from dataclasses import dataclass, replace

import jax.numpy as jnp
from jax import Array, ShapeDtypeStruct

from pallas_kernels import dispatch, numerics, tuning
from pallas_kernels.dispatch import Implementation
from pallas_kernels.grouped_matmul import reference
from pallas_kernels.grouped_matmul.reference import Matrix, values_of
from pallas_kernels.grouped_matmul.tiles import Plan, Scales, list_groups, list_tiles
from pallas_kernels.hopper import plan as hopper
from pallas_kernels.hopper.plan import (
    EPILOGUE_ROW_BYTES,
    SHARED_MEMORY,
    SWIZZLE,
    Config,
)
from pallas_kernels.operands import Block, MatmulOptions, Operand, Row


@dataclass(frozen=True)
class Problem:
    """Sizes of a grouped product `[m, k] x [e, n, k]`.

    Within groups it is `[m, k] x [n, k]` over ranges of k.

    Attributes:
      m, k, n: sizes of the operands.
      within: whether it is a product within groups.
      width, out_width: bytes of a value of the operands and of the result.
      halves: 2 for a weight with a residual, else 1.
      promote: whether sums are promoted to float32 registers.
      groups: number of groups.
      block: side of blocks that share a scale, or 0.
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
        options: MatmulOptions,
        x: Matrix,
        w: Matrix,
        groups: int,
    ) -> "Problem":
        """Return the sizes of a product; BF16 is added in float32 anyway."""
        m, k = values_of(x).shape
        values = values_of(w)
        block = 0
        if isinstance(x, Operand) and isinstance(x.scaling, Block):
            block = x.scaling.size
        is_full = options.accumulation == "full" or block > 0
        return cls(
            m=m,
            k=k,
            n=values.shape[-2],
            within=values.ndim == 2,
            width=values.dtype.itemsize,
            out_width=jnp.dtype(options.out_dtype).itemsize,
            halves=2 if isinstance(w, Operand) and w.lo is not None else 1,
            promote=is_full and isinstance(x, Operand),
            groups=groups,
            block=block,
        )


def candidates(problem: Problem) -> list[Config]:
    """Return the configs that fit a product, the best guess first."""
    shapes = [(128, 256), (256, 128), (128, 128)]
    if problem.halves == 2:
        shapes.reverse()  # wide tiles of two halves leave two stages
    if problem.promote:
        # Totals in registers leave no room for sums of 64 x 256, and small groups
        # fill no tiles of 256 rows.
        has_few_rows = not problem.within and problem.m < 768 * problem.groups
        shapes = [(256, 128), (128, 128)]
        if problem.block or has_few_rows:
            shapes.reverse()
    found = []
    for row, (tile_m, tile_n) in itertools.product((SWIZZLE, SWIZZLE // 2), shapes):
        step = (tile_m + problem.halves * tile_n) * row
        config = Config(
            tile_m,
            tile_n,
            tile_k=row // problem.width,
            stages=min(8, (SHARED_MEMORY - 33 * 1024) // step),
            cluster=1,
            snake=8,
            pipeline="ring",
        )
        if misfit(config, problem) is None:
            found.append(config)
    return found


def misfit(config: Config, problem: Problem) -> str | None:
    """Return the reason why a config cannot compute a product, or None."""
    row = config.tile_k * problem.width
    columns = EPILOGUE_ROW_BYTES // problem.out_width
    if problem.k == 0 or problem.k % config.tile_k:
        return f"the contracted size {problem.k} must be a multiple of {config.tile_k}"
    if problem.n == 0 or problem.n % columns:
        return f"n={problem.n} must be a multiple of {columns}"
    if problem.m < config.tile_m:
        return f"{problem.m} rows are fewer than the {config.tile_m} of a tile"
    if problem.block not in (0, config.tile_k):
        return f"block={problem.block} must be tile_k={config.tile_k}"
    if row not in (SWIZZLE, SWIZZLE // 2) or config.cluster != 1:
        return (
            f"tile_k={config.tile_k} must be 64 or 128 bytes, not {row}, and"
            f" cluster={config.cluster} must be 1"
        )
    reason = config.misfit_of_pieces(columns)
    if reason is not None:
        return reason
    used = config.shared_memory(problem.halves, row) + 1024
    if used > SHARED_MEMORY:
        return f"{used} bytes of shared memory exceed {SHARED_MEMORY}"
    return None


def _reject(
    options: MatmulOptions,
    x: Matrix,
    w: Matrix,
    group_sizes: Array,
) -> str | None:
    """Return the reason why this kernel cannot multiply these operands, or None."""
    reason = hopper.reject(options.out_dtype)
    if reason is not None:
        return reason
    groups = group_sizes.shape[0]
    problem = Problem.of(options, x, w, groups)
    rows = problem.k if problem.within else problem.m
    if groups == 0 or groups * (rows + 1) >= 2**31:
        return (
            f"{groups} groups of {rows} rows: their product must be above 0 and fit 31"
            ' bits; use backend="xla"'
        )
    if candidates(problem):
        return None
    tile_k = SWIZZLE // 2 // problem.width
    smallest = Config(128, 128, tile_k, stages=2, cluster=1)
    return f'{misfit(smallest, problem)} for backend="mosaic"; use backend="xla" or pad'


def _configure(
    options: MatmulOptions,
    x: Matrix,
    w: Matrix,
    group_sizes: Array,
) -> Config | None:
    """Return the tile sizes that were measured near this shape, else a guess."""
    problem = Problem.of(options, x, w, group_sizes.shape[0])
    key = reference.key(options, x, w, group_sizes)
    entry = tuning.find(dispatch.device_kind(), key, "mosaic")
    if entry is not None and "mosaic" in entry.configs and entry.is_near(key):
        tuned = Config(**entry.configs["mosaic"])
        if misfit(tuned, problem) is None:
            return tuned
    return next(iter(candidates(problem)), None)


def _grouped_matmul(
    options: MatmulOptions,
    x: Matrix,
    w: Matrix,
    group_sizes: Array,
    *,
    config: Config | None = None,
) -> Array:
    """Return the product of each row with the weight of its group, see `api`."""
    m = values_of(x).shape[0]
    experts, n, _ = values_of(w).shape
    config = config or _configure(options, x, w, group_sizes)
    assert config is not None, "rejected"
    starts, before = list_groups(group_sizes, m, config.tile_m)
    if not isinstance(x, Operand) or not isinstance(w, Operand):
        scales = []
    elif w.scaling.in_blocks:
        of_x = _by_steps(x, config.tile_m)
        of_w = _by_steps(w, config.tile_n)
        # read, and not used, for rows behind the groups
        scales = [of_x, jnp.pad(of_w, ((0, 1), (0, 0), (0, 0)))]
    elif isinstance(w.scaling, Row):
        # Rows behind the groups are zero, also if their scales are not finite.
        is_inside = jnp.arange(m + config.tile_m) < starts[-1]
        of_x = jnp.where(is_inside, _padded(x.scale, config.tile_m), 0)
        of_w = jnp.pad(w.scale, ((0, 1), (0, config.tile_n)))
        scales = [of_x, of_w]
    else:
        scales = [x.scale.astype(jnp.float32).reshape(1), w.scale.astype(jnp.float32)]
    most = m // config.tile_m + experts + 1
    lists = [starts, before, *list_tiles(starts, before, m, most)]
    out = ShapeDtypeStruct((m, n), options.out_dtype)
    return _run(options, config, x, w, out, lists, scales)


def _grouped_weight_gradient(
    options: MatmulOptions,
    x: Matrix,
    g: Matrix,
    group_sizes: Array,
    *,
    config: Config | None = None,
) -> Array:
    """Return the product over the rows of each group, see `api`."""
    k, m = values_of(x).shape
    n = values_of(g).shape[0]
    config = config or _configure(options, x, g, group_sizes)
    assert config is not None, "rejected"
    if not isinstance(x, Operand) or not isinstance(g, Operand):
        scales = []
    elif g.scaling.in_blocks:
        scales = [_by_steps(x, config.tile_m), _by_steps(g, config.tile_n)[None]]
    elif isinstance(g.scaling, Row):
        of_x = _padded(x.scale, config.tile_m)
        scales = [of_x, _padded(g.scale, config.tile_n)[None]]
    else:
        scales = [one.scale.astype(jnp.float32).reshape(1) for one in (x, g)]
    starts, _ = list_groups(group_sizes, m, config.tile_m)
    out = ShapeDtypeStruct((group_sizes.shape[0], k, n), options.out_dtype)
    return _run(options, config, x, g, out, [starts], scales)


KERNEL = Implementation("mosaic", _grouped_matmul, _reject, configure=_configure)
GRADIENT = replace(KERNEL, run=_grouped_weight_gradient)


def _padded(scale: Array, more: int) -> Array:
    """Return scales of rows, long enough for whole tiles."""
    return jnp.pad(scale, (0, more))


def _by_steps(operand: Operand, more: int) -> Array:
    """Return the scales of blocks as `[..., steps of k, rows or squares]`.

    They are float32, and long enough for whole tiles.
    """
    scale = numerics.decode_e8m0(operand.scale).swapaxes(-1, -2)
    return jnp.pad(scale, [*[(0, 0)] * (scale.ndim - 1), (0, more)])


def _run(
    options: MatmulOptions,
    config: Config,
    x: Matrix,
    w: Matrix,
    out: ShapeDtypeStruct,
    lists: list[Array],
    scales: list[Array],
) -> Array:
    # Imported where it is used: a second that a program without this kernel need not
    # pay, and needs jax 0.11.
    from pallas_kernels.grouped_matmul import kernel

    groups = lists[0].shape[0] - 1
    problem = Problem.of(options, x, w, groups)
    plan = Plan(
        config,
        kind="within" if problem.within else "rows",
        halves=problem.halves,
        promote=problem.promote,
        scales=_scales_of(w),
        blocks=hopper.blocks(config),
    )
    operands = [values_of(x), values_of(w)]
    if isinstance(w, Operand) and w.lo is not None:
        operands.append(w.lo)
    return kernel.call(plan, out, *operands, *lists, *scales)


def _scales_of(w: Matrix) -> Scales:
    """Return the kind of the scales of an operand."""
    if not isinstance(w, Operand):
        return "none"
    if isinstance(w.scaling, Block):
        return w.scaling.tile
    return "rows" if isinstance(w.scaling, Row) else "tensor"
