"""The plan of a product on a Hopper GPU: tile sizes, and the shapes that they fit.

Hopper's FP8 `wgmma` reads both operands along k, which is the layout of `matmul`. The
kernel needs jax 0.11; on CPUs it runs interpreted. `tuning` knows the fastest config
for shapes that were measured.
"""

import dataclasses
import itertools
import warnings
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels import dispatch, tuning
from pallas_kernels.operands import Accumulation, Block, Operand, sizes
from pallas_kernels.tuning import Key

SMALLEST_JAX = (0, 11)
# A row of 128 FP8 values is the widest swizzle of shared memory; k comes in multiples
# of it.
SWIZZLE = 128
COMPUTE_WARPGROUPS = 2
SHARED_MEMORY = 227 * 1024
ROWS, COLUMNS = 128, 64  # fewest of a tile in passes.py, which has whole squares
# A piece of the output on its way to memory: 64 rows of one warpgroup, 128 bytes wide
# (the widest swizzle).
EPILOGUE_ROWS, EPILOGUE_ROW_BYTES = 64, 128
_BARRIERS = 1024  # bytes at most, with the alignment of the buffers
# (stages, store_buffers, cluster) of a kernel that skips. Totals and accumulator fill
# the registers, and the rest depends on how ptxas treats these constants: it keeps
# these within 80 bytes of stack, others take 250.
_SKIPPING = {
    128: ((2, 1, 2), (3, 1, 2), (2, 4, 1)),
    64: ((5, 2, 1), (4, 2, 2), (6, 1, 1)),
    32: ((10, 2, 2), (7, 2, 2), (8, 2, 1)),
}
_CHUNKS: tuple[Literal[2, 4], ...] = (2, 4)
_PIPELINES: tuple[Literal["steady", "drained"], ...] = ("steady", "drained")
_HOPPER = ("H100", "H200", "H800", "H20", "GH200")
_H100_MULTIPROCESSORS = 132


Ref: TypeAlias = Any  # reference to a GPU's memory, or a tree of references
Index: TypeAlias = Array | int


@dataclass(frozen=True)
class Config:
    """Tile sizes and order of one kernel.

    Attributes:
      tile_m, tile_n: sides of an output tile; each of two warpgroups computes half of
        its rows.
      tile_k: length of one step of the sum, after which full accumulation promotes: 32,
        64, 128 or 256.
      stages: buffers between copies and products.
      cluster: blocks along m that share W by multicast.
      inner: dimension along which consecutive tiles are neighbours.
      snake: tiles along it before the order turns around.
      pipeline: "steady" lets the copies run ahead into the next output tile, "drained"
        ends with each tile, "ring" runs ahead for any number of steps, and needs scales
        of blocks or full accumulation.
      store_buffers: pieces of the output, for each warpgroup, that may be on their way
        to memory while it goes on.
      chunks: parts of the columns of a sum that are scaled in turn by vectors, at most
        as many as output pieces.
    """

    tile_m: int = 256
    tile_n: int = 128
    tile_k: int = 128
    stages: int = 3
    cluster: int = 2
    inner: Literal["m", "n"] = "m"
    snake: int = 8
    pipeline: Literal["steady", "drained", "ring"] = "drained"
    store_buffers: int = 2
    chunks: Literal[1, 2, 4] = 1

    def misfit_of_pieces(self, columns: int) -> str | None:
        """Return the reason why pieces of these columns do not fit a tile, or None."""
        values = COMPUTE_WARPGROUPS * EPILOGUE_ROWS * columns
        pieces = self.tile_m * self.tile_n // values
        if pieces % self.store_buffers == 0:
            return None
        return (
            f"{pieces} pieces of an output tile must be a multiple of"
            f" store_buffers={self.store_buffers}"
        )

    def shared_memory(self, halves: int, row: int) -> int:
        """Return the bytes of all buffers; a row of an operand has `row` bytes."""
        operands = self.stages * (self.tile_m + halves * self.tile_n) * row
        piece = EPILOGUE_ROWS * EPILOGUE_ROW_BYTES
        return operands + self.store_buffers * COMPUTE_WARPGROUPS * piece


@dataclass(frozen=True)
class Plan:
    """Everything for which a kernel is compiled.

    Attributes:
      config: tile sizes and order.
      halves: 2 for a weight with a residual, else 1.
      promote: whether sums are promoted to float32 registers after each tile_k.
      has_bias: whether a bias is added before the result is rounded.
      blocks: clusters of the persistent grid.
      scaling: scales of promoted sums: none ("tensor", whose scale is the epilogue's),
        a vector of x and a number for every tile_k columns of W ("square"), or a vector
        of each ("vector").
      skips: whether steps without a residual leave it out, by a list that the kernel is
        given.
    """

    config: Config
    halves: int
    promote: bool
    has_bias: bool
    blocks: int
    scaling: Literal["tensor", "square", "vector"] = "tensor"
    skips: bool = False

    @property
    def memory_registers(self) -> int:
        """Registers of a thread that copies.

        They are few if vectors of scales fill the other threads, else enough for ptxas.
        """
        return 24 if self.scaling == "vector" else 40

    @property
    def compute_registers(self) -> int:
        """Registers of a thread that computes.

        Warpgroups share 512 for each of their threads, given out in eights.
        """
        return (512 - self.memory_registers) // COMPUTE_WARPGROUPS // 8 * 8


@dataclass(frozen=True)
class Problem:
    """Sizes of a product `[m, k] x [n, k]` with `halves` of W.

    Attributes:
      block: blocks of W, or None for one scale an operand.
      skips: whether the zero blocks of the residual are left out.
    """

    m: int
    k: int
    n: int
    halves: int
    block: Block | None = None
    skips: bool = False

    @classmethod
    def of(cls, x: Operand, w: Operand) -> "Problem":
        """Return the sizes of `x @ w.T`."""
        m, k, n = sizes(x, w)
        halves = 1 if w.lo is None else 2
        block = w.scaling if isinstance(w.scaling, Block) else None
        return cls(m, k, n, halves, block, skips=w.lo_scale is not None)

    def by_squares(self, tile_n: int) -> bool:
        """Return whether one number scales every square of W in a tile.

        Otherwise each column has a scale. A square must be at least as wide as a piece
        of the output of 2-byte values.
        """
        block = self.block
        return (
            block is not None
            and block.tile == "square"
            and tile_n % block.size == 0
            and block.size >= EPILOGUE_ROW_BYTES // 2
        )


def columns_of(size: int) -> int:
    """Return the columns of a tile of a pass that holds whole blocks of this size."""
    return max(COLUMNS, size)


def candidates(problem: Problem, accumulation: Accumulation) -> list[Config]:
    """Return the configs that fit a product, the best guess first."""
    if problem.block is None:
        guesses = _of_tensors(problem.halves, accumulation)
    elif problem.skips:
        guesses = _of_skipping(problem.block.size)
    else:
        guesses = _of_blocks(problem, problem.block.size)
    return [config for config in guesses if misfit(config, problem) is None]


def _of_tensors(halves: int, accumulation: Accumulation) -> list[Config]:
    """Return guesses for operands with one scale each."""
    # Two steps of 64 to 96 KiB in flight; both halves of a weight make a step as long
    # as 256 of k.
    large = partial(Config, tile_k=256 // halves, stages=2, store_buffers=2 * halves)
    tall = large(256, 128)
    wide = large(128, 256)
    small = Config(128, 128, stages=4)
    # Promotion has registers for 64 x 256 only with spills; without it, fewer and wider
    # W tiles suit one half.
    if accumulation == "full":
        guesses = [tall, small]
    elif halves == 1:
        guesses = [wide, tall, small]
    else:
        guesses = [tall, wide, small]
    return [
        dataclasses.replace(guess, pipeline=pipeline, cluster=cluster)
        for guess, pipeline, cluster in itertools.product(guesses, _PIPELINES, (1, 2))
    ]


def _of_skipping(size: int) -> list[Config]:
    """Return guesses for a kernel that skips zero blocks of this size."""
    ring = partial(Config, tile_n=128, tile_k=size, pipeline="ring", chunks=2)
    found = [
        ring(stages=stages, store_buffers=stores, cluster=cluster)
        for stages, stores, cluster in _SKIPPING[size]
    ]
    # Lower tiles have registers for anything. A step without W_lo leaves its buffer
    # empty, so more stages pay.
    lower = partial(ring, tile_m=128)
    found += [lower(stages=4, store_buffers=1, cluster=c) for c in (2, 1)]
    return found + [lower(stages=3, cluster=c) for c in (2, 1)]


def _of_blocks(problem: Problem, size: int) -> list[Config]:
    """Return guesses for operands in blocks of this size."""
    halves = problem.halves
    # Two halves take twice the columns of W in a stage.
    stages = {128: 4 - halves, 64: 7 - halves, 32: 8}[size]
    ring = partial(Config, tile_n=128, tile_k=size, pipeline="ring")
    tall = ring(tile_m=256, stages=stages, cluster=1)
    guesses = [tall]
    if not problem.by_squares(tall.tile_n):
        drained = dataclasses.replace(tall, pipeline="drained")
        guesses = [
            dataclasses.replace(guess, chunks=chunks)
            for chunks, guess in itertools.product(_CHUNKS, (drained, tall))
        ]
    # Clusters of two were slower for every shape that was timed with a single weight.
    guesses.append(dataclasses.replace(tall, cluster=2))
    lower = partial(ring, tile_m=128, stages=5 - halves)
    return [*guesses, lower(cluster=1), lower(cluster=2)]


def misfit(config: Config, problem: Problem) -> str | None:
    """Return the reason why a config cannot compute a product, or None."""
    rows = config.tile_m * config.cluster
    for name, size, unit in (
        ("m", problem.m, rows),
        ("n", problem.n, config.tile_n),
        ("k", problem.k, config.tile_k),
    ):
        if size == 0 or size % unit:
            return f"{name}={size} must be a multiple of {unit}"
    reason = config.misfit_of_pieces(EPILOGUE_ROW_BYTES // 2)
    if reason is not None:
        return reason
    used = config.shared_memory(problem.halves, row=config.tile_k)
    if used > SHARED_MEMORY:
        return f"{used} bytes of shared memory exceed {SHARED_MEMORY}"
    if config.pipeline == "steady":
        steps = problem.k // config.tile_k
        if steps % config.stages:
            return (
                f"a steady pipeline needs k / {config.tile_k} = {steps} to be a"
                f" multiple of stages={config.stages}"
            )
        tiles = (problem.m // rows) * (problem.n // config.tile_n)
        if tiles < 2 * blocks(config):
            return (
                "a steady pipeline needs two output tiles for every block, but there"
                f" are {tiles}"
            )
    # Buffers of scales, float32, and their barriers.
    of_scales = config.stages * 4 * (config.tile_m + config.tile_n) + _BARRIERS
    if problem.block is not None and used + of_scales > SHARED_MEMORY:
        return (
            f"{used} bytes of shared memory and {of_scales} of scales exceed the"
            f" {SHARED_MEMORY} bytes of a block"
        )
    return None


def blocks(config: Config) -> int:
    """Return the number of clusters that fill the device once."""
    return dispatch.device_cores(otherwise=_H100_MULTIPROCESSORS) // config.cluster


def choose(key: Key, problem: Problem, accumulation: Accumulation) -> Config | None:
    """Return the config that was measured near this shape, else the best guess.

    It is None if no config fits.
    """
    entry = tuning.find(dispatch.device_kind(), key, "mosaic")
    if entry is not None and "mosaic" in entry.configs:
        tuned = Config(**entry.configs["mosaic"])
        if misfit(tuned, problem) is None:
            return tuned
    return next(iter(candidates(problem, accumulation)), None)


def reject(
    out_dtype: DTypeLike,
    problem: Problem | None = None,
    accumulation: Accumulation = "fast",
) -> str | None:
    """Return the reason why the kernel cannot compute a product here, or None.

    Without a problem it says why the kernel computes no product of this dtype.
    """
    kind = dispatch.device_kind()
    is_hopper = any(name in kind for name in _HOPPER)
    if jax.__version_info__[:2] < SMALLEST_JAX:
        if is_hopper:
            _warn_of_old_jax(kind)
        return (
            f"jax {jax.__version__} is older than 0.11, which has FP8 wgmma; use"
            ' backend="xla" or a newer jax'
        )
    if kind != "cpu" and not is_hopper:
        return (
            f"{kind} is not a Hopper GPU, whose wgmma this kernel is made of; use"
            ' backend="xla"'
        )
    if out_dtype not in (jnp.bfloat16, jnp.float32):
        return f'out_dtype={out_dtype} must be bfloat16 or float32; use backend="xla"'
    if problem is None or candidates(problem, accumulation):
        return None
    tile_k = 128 if problem.block is None else problem.block.size
    smallest = Config(128, 128, tile_k=tile_k, stages=2, cluster=1)
    return f'{misfit(smallest, problem)} for backend="mosaic"; use backend="xla" or pad'


@cache
def _warn_of_old_jax(kind: str) -> None:
    """Warn, once in a process, that a Hopper GPU runs without its kernels."""
    warnings.warn(
        f"{kind} runs without this library's fast kernels: they need jax 0.11 or newer,"
        " and this is jax "
        f'{jax.__version__}. Upgrade with: pip install -U "jax[cuda13]" (Python 3.12 or'
        " newer)",
        stacklevel=2,
    )
