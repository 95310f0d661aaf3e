"""`matmul` for Hopper in Pallas Mosaic GPU: which shapes it takes, with which tiles. The kernel is `mosaic_kernel.py`.

Hopper's FP8 `wgmma` reads both operands along k, which is the layout of `api.matmul`. Needs jax 0.11; runs interpreted
on CPUs.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels import tuning
from pallas_kernels.dispatch import device_cores, device_kind
from pallas_kernels.matmul.parts import on_each_device
from pallas_kernels.matmul.reference import sizes

SMALLEST_JAX = (0, 11)
# A row of 128 FP8 values is the widest swizzle of shared memory; k comes in multiples of it.
SWIZZLE = 128
COMPUTE_WARPGROUPS = 2
SHARED_MEMORY = 227 * 1024
# A piece of the output on its way to memory: 64 rows of one warpgroup, 128 bytes wide (the widest swizzle).
EPILOGUE_ROWS, EPILOGUE_ROW_BYTES = 64, 128
_HOPPER = ("H100", "H200", "H800", "H20", "GH200")
_H100_MULTIPROCESSORS = 132


@dataclass(frozen=True)
class Config:
    """Tile sizes and order of one kernel.

    Attributes:
      tile_m, tile_n: of an output tile; each of two warpgroups computes half of its rows.
      tile_k: of one step of the sum, after which full accumulation promotes.
      stages: buffers between copies and products.
      cluster: blocks along m that share W by multicast.
      inner: the dimension along which neighbouring tiles follow each other, and `snake` how many before the turn.
      pipeline: "steady" lets the copies run ahead into the next output tile, "drained" ends with each tile.
      store_buffers: pieces of the output, for each warpgroup, that may be on their way to memory while it goes on.
    """

    tile_m: int = 256
    tile_n: int = 128
    tile_k: Literal[128, 256] = 128
    stages: int = 3
    cluster: int = 2
    inner: Literal["m", "n"] = "m"
    snake: int = 8
    pipeline: Literal["steady", "drained"] = "drained"
    store_buffers: int = 2


@dataclass(frozen=True)
class Plan:
    """What a kernel is compiled for; `blocks` is the size of the persistent grid in clusters."""

    config: Config
    halves: int
    promote: bool
    has_bias: bool
    blocks: int


def candidates(m: int, k: int, n: int, halves: int, accumulation: str) -> list[Config]:
    """Configs that this shape divides into, best guess first; see `tuning.py` for measured choices."""
    # Two steps of 64 to 96 KiB in flight; both halves of a weight make a step as long as 256 of k.
    shape: dict[str, Any] = dict(tile_k=256 // halves, stages=2, store_buffers=2 * halves)
    tall, wide = Config(256, 128, **shape), Config(128, 256, **shape)
    small = Config(128, 128, stages=4)
    # Promotion has registers for 64 x 256 only with spills; without it, fewer and wider W tiles suit one half.
    guesses = [tall, small] if accumulation == "full" else [wide, tall, small] if halves == 1 else [tall, wide, small]
    configs = [
        dataclasses.replace(guess, pipeline=pipeline, cluster=cluster)
        for guess in guesses
        for pipeline in ("steady", "drained")
        for cluster in (1, 2)
    ]
    return [config for config in configs if misfit(config, m, k, n, halves) is None]


def misfit(config: Config, m: int, k: int, n: int, halves: int) -> str | None:
    """Why a config cannot compute this shape, or None."""
    rows = config.tile_m * config.cluster
    for name, size, unit in (("m", m, rows), ("n", n, config.tile_n), ("k", k, config.tile_k)):
        if size == 0 or size % unit:
            return f"{name}={size} must be a multiple of {unit}"
    pieces = config.tile_m * config.tile_n // (COMPUTE_WARPGROUPS * EPILOGUE_ROWS * EPILOGUE_ROW_BYTES // 2)
    if pieces % config.store_buffers:
        return f"{pieces} pieces of an output tile must be a multiple of store_buffers={config.store_buffers}"
    if _shared_bytes(config, halves) > SHARED_MEMORY:
        return f"{_shared_bytes(config, halves)} bytes of shared memory exceed {SHARED_MEMORY}"
    steps, tiles = k // config.tile_k, (m // rows) * (n // config.tile_n)
    if config.pipeline == "steady":
        if steps % config.stages:
            return f"a steady pipeline needs k / {config.tile_k} = {steps} to be a multiple of stages={config.stages}"
        if tiles < 2 * _blocks(config):
            return f"a steady pipeline needs two output tiles for every block, but there are {tiles}"
    return None


def _blocks(config: Config) -> int:
    """Clusters that fill the device once."""
    return device_cores(otherwise=_H100_MULTIPROCESSORS) // config.cluster


def _shared_bytes(config: Config, halves: int) -> int:
    buffers = config.stages * (config.tile_m + halves * config.tile_n) * config.tile_k
    return buffers + config.store_buffers * COMPUTE_WARPGROUPS * EPILOGUE_ROWS * EPILOGUE_ROW_BYTES


def reject(
    x: jax.Array, w: jax.Array, w_lo: jax.Array | None, *, out_dtype: Any, accumulation: str, **options: Any
) -> str | None:
    """Why this kernel cannot multiply these operands here, or None."""
    if jax.__version_info__[:2] < SMALLEST_JAX:
        return f'jax {jax.__version__} is older than 0.11, which has FP8 wgmma; use backend="xla" or a newer jax'
    kind = device_kind()
    if kind != "cpu" and not any(name in kind for name in _HOPPER):
        return f'{kind} is no Hopper GPU, whose wgmma this kernel is made of; use backend="xla"'
    if out_dtype not in (jnp.bfloat16, jnp.float32):
        return f'out_dtype={out_dtype} must be bfloat16 or float32; use backend="xla"'
    if jax.sharding.AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
        return 'the mesh has explicit axes, under which only lax.dot_general is partitioned; use backend="xla"'
    m, k, n = sizes(x, w)
    halves = 1 if w_lo is None else 2
    if not candidates(m, k, n, halves, accumulation):
        smallest = Config(128, 128, stages=2, cluster=1)
        return f'{misfit(smallest, m, k, n, halves)} for backend="mosaic"; use backend="xla" or pad'
    return None


def decline(
    x: jax.Array, w: jax.Array, w_lo: jax.Array | None, *, out_dtype: Any, accumulation: str, **options: Any
) -> str | None:
    """Why this kernel is not the first choice, or None."""
    return tuning.decline("matmul", "mosaic", variant(w_lo is not None, accumulation, out_dtype), sizes(x, w))


def variant(dual: bool, accumulation: str, out_dtype: Any) -> str:
    """How `tuned.json` names a product."""
    return f"{'dual' if dual else 'single'} {accumulation} {jnp.dtype(out_dtype)}"


def configure(
    x: jax.Array, w: jax.Array, w_lo: jax.Array | None, *, out_dtype: Any, accumulation: str, **options: Any
) -> Config | None:
    """The tile sizes of this product: those that were measured near its shape, else the best guess that fits."""
    return _choose(sizes(x, w), 1 if w_lo is None else 2, accumulation, out_dtype)


def _choose(shape: tuple[int, int, int], halves: int, accumulation: str, out_dtype: Any) -> Config | None:
    entry = tuning.find("matmul", variant(halves == 2, accumulation, out_dtype), shape)
    if entry is not None and "mosaic" in entry.configs:
        tuned = Config(**entry.configs["mosaic"])
        if misfit(tuned, *shape, halves) is None:
            return tuned
    return next(iter(candidates(*shape, halves, accumulation)), None)


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
    config: Config | None = None,
) -> jax.Array:
    """The product, see `api.matmul`; `config` overrides the tuned or guessed tile sizes where a part fits it."""
    halves = 1 if w_lo is None else 2

    def choose(m: int, k: int, n: int) -> Config | None:
        if config is not None and misfit(config, m, k, n, halves) is None:
            return config
        return _choose((m, k, n), halves, accumulation, out_dtype)

    def fits(m: int, k: int, n: int) -> bool:
        return choose(m, k, n) is not None

    def multiply(x: jax.Array, w: Any, scale: jax.Array, bias: jax.Array | None, out_dtype: Any) -> jax.Array:
        chosen = choose(x.shape[0], x.shape[1], w[0].shape[0])
        assert chosen is not None, "fits() came first"
        # Imported where it is used: a second that a program without this kernel need not pay, and needs jax 0.11.
        from pallas_kernels.matmul import mosaic_kernel

        plan = Plan(chosen, halves, accumulation == "full", bias is not None, _blocks(chosen))
        return mosaic_kernel.call(plan, out_dtype, x, *w, scale, *([] if bias is None else [bias]))

    return on_each_device(
        multiply, fits, (x, w, w_lo), scale=scale, bias=bias, out_dtype=out_dtype, accumulation=accumulation,
        interpreter="calls back",
    )  # fmt: skip
