"""What a product on a Hopper GPU is compiled for: tile sizes, which of them fit a shape, and the best guesses.

Hopper's FP8 `wgmma` reads both operands along k, which is the layout of `matmul`. The kernel needs jax 0.11; on CPUs
it runs interpreted. Which of the configs that fit is fastest, `tuning.py` knows where somebody measured it.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch, tuning
from pallas_kernels.operands import Block
from pallas_kernels.tuning import Key

SMALLEST_JAX = (0, 11)
# A row of 128 FP8 values is the widest swizzle of shared memory; k comes in multiples of it.
SWIZZLE = 128
COMPUTE_WARPGROUPS = 2
SHARED_MEMORY = 227 * 1024
# A piece of the output on its way to memory: 64 rows of one warpgroup, 128 bytes wide (the widest swizzle).
EPILOGUE_ROWS, EPILOGUE_ROW_BYTES = 64, 128
_BARRIERS = 1024  # bytes at most, and what alignment of the buffers takes
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
      pipeline: "steady" lets the copies run ahead into the next output tile, "drained" ends with each tile, "ring" runs
        ahead whatever the number of steps, and needs scales of blocks or full accumulation.
      store_buffers: pieces of the output, for each warpgroup, that may be on their way to memory while it goes on.
      chunks: of the columns of a sum that vectors scale one after the other, at most as many as pieces of the output.
    """

    tile_m: int = 256
    tile_n: int = 128
    tile_k: Literal[32, 64, 128, 256] = 128
    stages: int = 3
    cluster: int = 2
    inner: Literal["m", "n"] = "m"
    snake: int = 8
    pipeline: Literal["steady", "drained", "ring"] = "drained"
    store_buffers: int = 2
    chunks: Literal[1, 2, 4] = 1


@dataclass(frozen=True)
class Plan:
    """What a kernel is compiled for; `blocks` is the size of the persistent grid in clusters.

    `scaling` says what promoted sums are scaled by: nothing ("tensor", whose scale is the epilogue's), a vector of x
    and a number for every tile_k columns of W ("square"), or a vector of each ("vector").
    """

    config: Config
    halves: int
    promote: bool
    has_bias: bool
    blocks: int
    scaling: Literal["tensor", "square", "vector"] = "tensor"

    @property
    def memory_registers(self) -> int:
        """Of a thread that copies: few where vectors of scales fill those that compute, enough for ptxas elsewhere."""
        return 24 if self.scaling == "vector" else 40

    @property
    def compute_registers(self) -> int:
        """Of a thread that computes: all warpgroups share 512 for each of their threads, given out in eights."""
        return (512 - self.memory_registers) // COMPUTE_WARPGROUPS // 8 * 8


def candidates(m: int, k: int, n: int, halves: int, accumulation: str) -> list[Config]:
    """Configs that this shape divides into with one scale an operand, the best guess first."""
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


def block_candidates(m: int, k: int, n: int, halves: int, block: Block) -> list[Config]:
    """Configs that this shape divides into with a scale for every block of k, the best guess first."""
    # Two halves take twice the columns of W in a stage.
    stages = {128: 4 - halves, 64: 7 - halves, 32: 8}[block.size]
    tile_k: Any = block.size
    make: Any = functools.partial(Config, tile_n=128, tile_k=tile_k)
    tall = make(tile_m=256, stages=stages, pipeline="ring", cluster=1)
    if scaled_by_squares(block, tall.tile_n):
        guesses = [tall]
    else:
        drained = dataclasses.replace(tall, pipeline="drained")
        guesses = [dataclasses.replace(start, chunks=chunks) for chunks in (2, 4) for start in (drained, tall)]
    # Clusters of two were slower wherever they were timed with a single weight.
    guesses += [dataclasses.replace(tall, cluster=2)]
    guesses += [make(tile_m=128, stages=5 - halves, cluster=cluster, pipeline="ring") for cluster in (1, 2)]
    return [config for config in guesses if block_misfit(config, m, k, n, halves) is None]


def scaled_by_squares(block: Block, tile_n: int) -> bool:
    """Whether a kernel scales by a number for every square of W in a tile, not by the same number for each column.

    A square is at least as wide as a piece of the output of 2-byte values.
    """
    return block.tile == "square" and tile_n % block.size == 0 and block.size >= EPILOGUE_ROW_BYTES // 2


def misfit(config: Config, m: int, k: int, n: int, halves: int) -> str | None:
    """Why a config cannot compute this shape, or None."""
    rows = config.tile_m * config.cluster
    for name, size, unit in (("m", m, rows), ("n", n, config.tile_n), ("k", k, config.tile_k)):
        if size == 0 or size % unit:
            return f"{name}={size} must be a multiple of {unit}"
    pieces = config.tile_m * config.tile_n // (COMPUTE_WARPGROUPS * EPILOGUE_ROWS * EPILOGUE_ROW_BYTES // 2)
    if pieces % config.store_buffers:
        return f"{pieces} pieces of an output tile must be a multiple of store_buffers={config.store_buffers}"
    if shared_bytes(config, halves) > SHARED_MEMORY:
        return f"{shared_bytes(config, halves)} bytes of shared memory exceed {SHARED_MEMORY}"
    steps, tiles = k // config.tile_k, (m // rows) * (n // config.tile_n)
    if config.pipeline == "steady":
        if steps % config.stages:
            return f"a steady pipeline needs k / {config.tile_k} = {steps} to be a multiple of stages={config.stages}"
        if tiles < 2 * blocks(config):
            return f"a steady pipeline needs two output tiles for every block, but there are {tiles}"
    return None


def block_misfit(config: Config, m: int, k: int, n: int, halves: int) -> str | None:
    """Why a config cannot compute this shape with scales for blocks, whose buffers (float32) and barriers count."""
    reason = misfit(config, m, k, n, halves)
    of_scales = config.stages * 4 * (config.tile_m + config.tile_n) + _BARRIERS
    values = shared_bytes(config, halves)
    if reason is None and values + of_scales > SHARED_MEMORY:
        return f"{values} bytes of shared memory and {of_scales} of scales exceed the {SHARED_MEMORY} bytes of a block"
    return reason


def blocks(config: Config) -> int:
    """Clusters that fill the device once."""
    return dispatch.device_cores(otherwise=_H100_MULTIPROCESSORS) // config.cluster


def shared_bytes(config: Config, halves: int) -> int:
    """Of the buffers of operands and of the output."""
    buffers = config.stages * (config.tile_m + halves * config.tile_n) * config.tile_k
    return buffers + config.store_buffers * COMPUTE_WARPGROUPS * EPILOGUE_ROWS * EPILOGUE_ROW_BYTES


def choose(key: Key, guesses: Sequence[Config], fits: Callable[[Config], str | None]) -> Config | None:
    """The config that was measured near this shape (`tuning.py`), if it fits, else the best guess, or None.

    Args:
      key: how `tuned.json` names the product; its shape is (m, k, n).
      guesses: configs that fit, the best first.
      fits: why a config does not fit, or None.
    """
    entry = tuning.find(dispatch.device_kind(), key, "mosaic")
    if entry is not None and "mosaic" in entry.configs:
        tuned = Config(**entry.configs["mosaic"])
        if fits(tuned) is None:
            return tuned
    return next(iter(guesses), None)


def reject_here(out_dtype: Any) -> str | None:
    """Why the kernel serves no product of this dtype on the device in use, or None."""
    kind = dispatch.device_kind()
    is_hopper = any(name in kind for name in _HOPPER)
    if jax.__version_info__[:2] < SMALLEST_JAX:
        if is_hopper:
            _warn_of_old_jax(kind)
        return f'jax {jax.__version__} is older than 0.11, which has FP8 wgmma; use backend="xla" or a newer jax'
    if kind != "cpu" and not is_hopper:
        return f'{kind} is not a Hopper GPU, whose wgmma this kernel is made of; use backend="xla"'
    if out_dtype not in (jnp.bfloat16, jnp.float32):
        return f'out_dtype={out_dtype} must be bfloat16 or float32; use backend="xla"'
    return None


@functools.cache
def _warn_of_old_jax(kind: str) -> None:
    """Warn, once in a process, that a Hopper GPU runs without the kernels that are made for it."""
    warnings.warn(
        f"{kind} runs without this library's fast kernels: they need jax 0.11 or newer, and this is jax "
        f'{jax.__version__}. Upgrade with: pip install -U "jax[cuda13]" (Python 3.12 or newer)',
        stacklevel=2,
    )
