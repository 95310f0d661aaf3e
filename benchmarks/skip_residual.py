"""Time of a residual product that leaves out zero blocks, on weights that FP8 represents exactly in part of them.

    python -m benchmarks.skip_residual --json
    python -m benchmarks.skip_residual --json --every-config    # of each product, the fastest of all its tile sizes

The weight is random everywhere: in a random part of its blocks of 128 x 128 it is rounded to E4M3 under the block's
power of two, so that their residual is zero. BF16, the residual product with all blocks and the one with those that are
not zero run in turn; each is compared with float64 before anything is timed. Operands are quantized beforehand; making
the kernel's work list is part of its time.
"""

import dataclasses
import functools
import sys
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from pallas_kernels.block_dual_quantize.api import block_dual_quantize
from pallas_kernels.block_matmul import mosaic
from pallas_kernels.block_matmul.api import block_matmul
from pallas_kernels.block_matmul.reference import dequantize
from pallas_kernels.block_quantize.api import block_quantize

from benchmarks.common import (
    Timer,
    announce,
    make_header,
    make_parser,
    print_header,
    print_table,
    result_path,
    time_interleaved,
    write_result,
)
from benchmarks.shapes import H200_SHAPES, GemmShape, dot_bf16, random_operands
from pallas_kernels.blocks import Blocked, ResidualBlocks
from pallas_kernels.dispatch import Backend

NAME = "skip_residual"
BLOCK = 128
Kind = Literal["bf16", "all blocks", "nonzero blocks"]

# Per unit of |x| @ |w|. A tensor core keeps about 14 bits of the addends of one block; then sums are float32.
SUM_BOUND: dict[str, float] = {"bf16": 2.0**-16, "mosaic": 2.0**-11, "xla": 2.0**-13}
# Of the output's rounding to bfloat16, XLA's sum of two products included.
OUTPUT_BOUND = 2.0**-7


@dataclass(frozen=True)
class Config:
    """Settings of a run; `exact_parts` are the parts of the blocks whose residual is zero."""

    shape: GemmShape = H200_SHAPES[1]
    exact_parts: tuple[float, ...] = (0.5,)
    backend: Backend = "mosaic"
    configs: Literal["chosen", "every"] = "chosen"
    rounds: int = 5
    calls: int = 5
    checked_rows: int = 64
    seed: int = 0


# Blocks of 128 and the smallest tile of the kernel, which an interpreter still runs in a second.
SMOKE = Config(GemmShape(256, 512, 256), backend="xla", rounds=2, calls=2)


@dataclass(frozen=True)
class Row:
    """One product on one weight.

    `skipped` is the part of the residual's tiles (of one output tile and one block of k) that are zero;
    `speed_over_all` and `speed_over_bf16` are ratios of medians of this run; `bound_used` is the largest error over its
    bound.
    """

    shape: str
    kind: Kind
    backend: Backend
    config: str | None
    exact_part: float
    skipped: float
    median_ms: float
    min_ms: float
    max_ms: float
    samples: int
    timer: Timer
    speed_over_all: float
    speed_over_bf16: float
    bound_used: float


def round_blocks(w: jax.Array, exact: jax.Array) -> jax.Array:
    """`w`, rounded to what FP8 represents in those blocks of 128 x 128 that `exact` says."""
    rounded = dequantize(
        Blocked(*block_quantize(w, jnp.float8_e4m3fn, block=BLOCK, tile="square")[:2]), BLOCK, "square"
    )
    return jnp.where(jnp.repeat(jnp.repeat(exact, BLOCK, 0), BLOCK, 1), rounded, w)


def draw_weight(shape: tuple[int, int], exact_part: float, seed: int) -> jax.Array:
    """A random float32 weight; of its blocks, a random choice of `exact_part` has no residual. It has no zeros."""
    key, of_blocks = jax.random.split(jax.random.key(seed))
    w = jax.random.normal(key, shape, jnp.float32) * 0.02
    # What FP8 would round to zero becomes its smallest normal number under a block's usual scale.
    w = jnp.where(jnp.abs(w) < 2.0**-18, jnp.float32(2.0**-18), w)
    rows, columns = shape[0] // BLOCK, shape[1] // BLOCK
    order = jax.random.permutation(of_blocks, rows * columns).reshape(rows, columns)
    return jax.jit(round_blocks)(w, order < round(exact_part * rows * columns))


@dataclass(frozen=True)
class _Product:
    kind: Kind
    config: mosaic.Config | None
    function: Any
    args: tuple[Any, ...]


def measure(config: Config) -> list[Row]:
    """Check and time every product.

    Raises:
      ArithmeticError: a product misses its bound; nothing is timed then.
    """
    rows = []
    for exact_part in config.exact_parts:
        products, skipped = _products(config, exact_part)
        used = [_check(product, config) for product in products]
        times = time_interleaved(
            {str(i): (p.function, p.args) for i, p in enumerate(products)}, rounds=config.rounds, calls=config.calls
        )
        if config.configs == "every":
            for i, product in enumerate(products):
                print(f"{product.kind}: {times[str(i)].median_ms:.4f} ms, {product.config}")
        best: dict[Kind, int] = {}
        for i, product in enumerate(products):
            if product.kind not in best or times[str(i)].median_ms < times[str(best[product.kind])].median_ms:
                best[product.kind] = i
        medians = {kind: times[str(i)].median_ms for kind, i in best.items()}
        for kind, i in best.items():
            t = times[str(i)]
            rows.append(
                Row(
                    shape=str(config.shape),
                    kind=kind,
                    backend="xla" if kind == "bf16" else config.backend,
                    config=None if products[i].config is None else str(products[i].config),
                    exact_part=exact_part,
                    skipped=skipped,
                    **dataclasses.asdict(t),
                    speed_over_all=medians["all blocks"] / t.median_ms,
                    speed_over_bf16=medians["bf16"] / t.median_ms,
                    bound_used=used[i],
                )
            )
    return rows


def _products(config: Config, exact_part: float) -> tuple[list[_Product], float]:
    """The products, and the part of the residual's tiles that are zero."""
    shape = config.shape
    x, _ = random_operands(shape, config.seed)
    w = draw_weight((shape.n, shape.k), exact_part, config.seed)
    x_q = jax.jit(functools.partial(block_quantize, dtype=jnp.float8_e4m3fn, block=BLOCK))(x)
    w_q = jax.jit(functools.partial(block_dual_quantize, block=BLOCK))(w)
    args = (Blocked(*x_q[:2]), Blocked(w_q.hi, w_q.scales), Blocked(w_q.lo, w_q.residual_scales))
    count, order = mosaic.list_work(w_q.residual_scales, shape.n // BLOCK)
    skipped = 1 - float(count.sum()) / order.size
    products = [_Product("bf16", None, jax.jit(dot_bf16), (x, w.astype(jnp.bfloat16)))]
    kinds: tuple[tuple[Kind, ResidualBlocks], ...] = (("all blocks", "all"), ("nonzero blocks", "nonzero"))
    for kind, blocks in kinds:
        for chosen in _configs(config, blocks):
            products.append(_Product(kind, chosen, jax.jit(_multiply(config.backend, blocks, chosen)), args))
    return products, skipped


def _configs(config: Config, blocks: ResidualBlocks) -> list[mosaic.Config | None]:
    shape = config.shape
    if config.configs == "chosen" or config.backend != "mosaic":
        return [None]
    return list(mosaic.candidates(shape.m, shape.k, shape.n, 2, BLOCK, blocks))


def _multiply(backend: Backend, blocks: ResidualBlocks, config: mosaic.Config | None) -> Any:
    if config is None:
        return functools.partial(block_matmul, block=BLOCK, residual_blocks=blocks, backend=backend)
    return functools.partial(
        mosaic.block_matmul, block=BLOCK, tile="square", out_dtype=jnp.dtype(jnp.bfloat16), residual_blocks=blocks,
        config=config,
    )  # fmt: skip


def _check(product: _Product, config: Config) -> float:
    """Largest error over its bound, on randomly chosen rows and columns, against float64."""
    out = product.function(*product.args)
    random = np.random.default_rng(config.seed)
    rows, columns = (random.choice(size, min(size, config.checked_rows), replace=False) for size in out.shape)
    if product.kind == "bf16":
        x, w = (np.asarray(v[at]).astype(np.float64) for v, at in zip(product.args, (rows, columns), strict=True))
        parts, sum_bound = [w], SUM_BOUND["bf16"]
    else:
        x_q, hi, lo = product.args
        x = _wide(x_q.values[rows], x_q.scales[rows])
        # Of both halves the scales of hi: those of lo say only where it is zero.
        parts = [_wide(half.values[columns], hi.scales[columns // BLOCK]) for half in (hi, lo)]
        sum_bound = SUM_BOUND[config.backend]
    whole = np.sum(parts, axis=0)
    exact, magnitude = x @ whole.T, np.abs(x) @ np.abs(whole).T
    bound = sum_bound * magnitude + OUTPUT_BOUND * sum(np.abs(x @ part.T) for part in parts)
    got = np.asarray(out[rows[:, None], columns[None, :]]).astype(np.float64)
    with np.errstate(divide="ignore"):
        used = float(np.max(np.abs(got - exact) / bound))
    if not used <= 1:
        raise ArithmeticError(
            f"{product.kind} {product.config}: the error is {used} of its bound; the product is wrong, so it is "
            "not timed"
        )
    return used


def _wide(values: jax.Array, scales: jax.Array) -> np.ndarray:
    wide = np.repeat(np.asarray(scales.astype(jnp.float32)).astype(np.float64), BLOCK, axis=1)
    return np.asarray(values).astype(np.float64) * wide


def main(arguments: list[str] | None = None) -> list[Row]:
    """Run the command and return its rows."""
    parser = make_parser(NAME, __doc__)
    parser.add_argument("--shape", default=None, help="MxKxN (default: 8192x4096x16384 on a GPU, else 256x512x256)")
    parser.add_argument("--exact-parts", default="0.5", help="parts of the blocks that have no residual (default: 0.5)")
    parser.add_argument("--every-config", action="store_true", help="time all tile sizes, keep each product's fastest")
    options = parser.parse_args(arguments)
    config = Config() if jax.default_backend() == "gpu" and not options.smoke else SMOKE
    parts = tuple(float(part) for part in options.exact_parts.split(","))
    config = dataclasses.replace(config, exact_parts=parts, configs="every" if options.every_config else "chosen")
    if options.shape is not None:
        config = dataclasses.replace(config, shape=GemmShape.parse(options.shape))
    header, path = make_header(), result_path(NAME, options)
    print_header(NAME, header)
    rows = measure(config)
    print_table(
        ["m x k x n", "product", "backend", "zero tiles", "median ms", "min..max", "all / this", "BF16 / this"],
        [
            (r.shape, r.kind, r.backend, f"{r.skipped:.3f}", f"{r.median_ms:.4f}", f"{r.min_ms:.4f}..{r.max_ms:.4f}",
             f"{r.speed_over_all:.3f}", f"{r.speed_over_bf16:.3f}")
            for r in rows
        ],
    )  # fmt: skip
    for r in rows:
        print(f"{r.kind}, {r.skipped:.3f} zero: {r.config or 'the chosen tile sizes'}")
    print(f"timer: {rows[0].timer}")
    write_result(path, NAME, header, config, rows)
    announce(path)
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
