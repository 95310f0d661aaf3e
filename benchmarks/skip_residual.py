"""Time of a residual product that skips zero blocks, on weights that FP8 represents exactly in some blocks.

    python -m benchmarks.skip_residual --json
    python -m benchmarks.skip_residual --json --every-config    # the fastest of all tile sizes of each product

The weight is random. Some random blocks of 128 x 128 are rounded to E4M3 under the block's power of two, so that their
residual is zero. BF16, the residual product with all blocks and the product of nonzero blocks run in turn. Each is
compared with float64 before it is timed. Operands are quantized beforehand; the time includes the kernel's work list.
"""

import argparse
import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from benchmarks import common, products, timing
from benchmarks.common import Result, markdown_table, times
from benchmarks.products import Form, Product
from benchmarks.shapes import MIDDLE, GemmShape, parse_shapes, random_operands
from pallas_kernels.dispatch import Backend
from pallas_kernels.operands import Block

NAME = "skip_residual"
BLOCK = 128
FORMS = {
    "all blocks": Form(2, scaling=Block(BLOCK)),
    "nonzero blocks": Form(2, scaling=Block(BLOCK), residual_blocks="nonzero"),
}


@dataclass(frozen=True)
class Config:
    """Settings of a run; `exact_parts` are parts of the blocks with a zero residual."""

    shape: GemmShape = MIDDLE
    exact_parts: tuple[float, ...] = (0.5,)
    backend: Backend = "mosaic"
    configs: Literal["chosen", "every"] = "chosen"
    rounds: int = 5
    calls: int = 5
    checked_rows: int = 64
    seed: int = 0


# Blocks of 128 and the smallest tile of the kernel, which an interpreter runs in a second.
SMOKE = Config(GemmShape(256, 512, 256), backend="xla", rounds=2, calls=2)


@dataclass(frozen=True)
class Row(timing.Timing):
    """One product on one weight.

    `skipped` is the part of the residual's blocks that are zero. `speed_over_all` and `speed_over_bf16` are ratios of
    medians of this run. `bound_used` is the largest error divided by its bound.
    """

    shape: str
    kind: str
    backend: Backend
    config: str | None
    exact_part: float
    skipped: float
    speed_over_all: float
    speed_over_bf16: float
    bound_used: float


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the shape, the parts without a residual, and tile sizes."""
    parser.add_argument("--shape", default=None, help="MxKxN (default: 8192x4096x16384 on a GPU, else 256x512x256)")
    parser.add_argument("--exact-parts", default="0.5", help="parts of the blocks that have no residual (default: 0.5)")
    parser.add_argument("--every-config", action="store_true", help="time all tile sizes, keep each product's fastest")


def configure(options: argparse.Namespace) -> Config:
    """Return the settings of a command line."""
    config = Config() if jax.default_backend() == "gpu" and not options.smoke else SMOKE
    (shape,) = parse_shapes(options.shape) or (config.shape,)
    parts = tuple(float(part) for part in options.exact_parts.split(","))
    configs: Literal["chosen", "every"] = "every" if options.every_config else "chosen"
    return dataclasses.replace(config, shape=shape, exact_parts=parts, configs=configs)


def round_blocks(w: jax.Array, exact: jax.Array) -> jax.Array:
    """Return `w` with the blocks of 128 x 128 in `exact` rounded to FP8."""
    _, rounded = Form(1, scaling=Block(BLOCK)).quantize(w[:1], w)
    return jnp.where(jnp.repeat(jnp.repeat(exact, BLOCK, 0), BLOCK, 1), rounded.dequantize(), w)


def draw_weight(shape: tuple[int, int], exact_part: float, seed: int) -> jax.Array:
    """Return a random float32 weight without zeros, in which `exact_part` of the blocks have no residual."""
    key, of_blocks = jax.random.split(jax.random.key(seed))
    w = jax.random.normal(key, shape, jnp.float32) * 0.02
    # Values that FP8 would round to zero become its smallest normal number under a block's usual scale.
    w = jnp.where(jnp.abs(w) < 2.0**-18, jnp.float32(2.0**-18), w)
    rows, columns = shape[0] // BLOCK, shape[1] // BLOCK
    order = jax.random.permutation(of_blocks, rows * columns).reshape(rows, columns)
    return jax.jit(round_blocks)(w, order < round(exact_part * rows * columns))


def measure(config: Config) -> list[Row]:
    """Check and time every product.

    Raises:
      ArithmeticError: a product misses its bound, so nothing is timed.
    """
    return [row for exact_part in config.exact_parts for row in _measure_part(config, exact_part)]


def _measure_part(config: Config, exact_part: float) -> Iterator[Row]:
    found, skipped = find_products(config, exact_part)
    used = {p.name: products.check_product(p, config.checked_rows, config.seed) for p in found}
    timed = timing.time_interleaved(
        {p.name: (p.function, p.args) for p in found}, rounds=config.rounds, calls=config.calls
    )
    best: dict[str, Product] = {}
    for p in found:
        if config.configs == "every":
            print(f"{p.name}: {timed[p.name].median_ms:.4f} ms")
        if p.kind not in best or timed[p.name].median_ms < timed[best[p.kind].name].median_ms:
            best[p.kind] = p
    medians = {kind: timed[p.name].median_ms for kind, p in best.items()}
    for kind, p in best.items():
        yield Row(
            **dataclasses.asdict(timed[p.name]), shape=str(config.shape), kind=kind, backend=p.backend,
            config=None if p.config is None else str(p.config), exact_part=exact_part, skipped=skipped,
            speed_over_all=medians["all blocks"] / medians[kind], speed_over_bf16=medians["bf16"] / medians[kind],
            bound_used=used[p.name],
        )  # fmt: skip


def find_products(config: Config, exact_part: float) -> tuple[list[Product], float]:
    """Return the products, and the part of the residual's blocks that are zero."""
    shape = config.shape
    x, _ = random_operands(shape, config.seed)
    w = draw_weight((shape.n, shape.k), exact_part, config.seed)
    pair, found = FORMS["all blocks"].quantize(x, w), [products.bf16_product(x, w)]
    for kind, form in FORMS.items():
        every = config.configs == "every" and config.backend == "mosaic"
        for chosen in form.candidates(shape) if every else [None]:
            found.append(products.fp8_product(kind, form, pair, config.backend, chosen))
    _, lo = products.halves_of(pair[1])
    blocks = lo.reshape(shape.n // BLOCK, BLOCK, shape.k // BLOCK, BLOCK)
    return found, float(jnp.mean(jnp.all(blocks == 0, axis=(1, 3))))


def table(result: Result) -> str:
    """Return the page's table, one line per product."""
    first = result.rows[0]
    lines = [
        [r["kind"], f"{r['median_ms']:.3f} ms", f"**{r['speed_over_bf16']:.2f}**", f"{r['speed_over_all']:.2f}"]
        for r in result.rows
    ]
    return (
        f"{markdown_table([times(first['shape']), 'time', 'speed over BF16', 'speed over all blocks'], lines)}\n\n"
        f"FP8 holds {100 * first['exact_part']:.0f} % of this weight's blocks of {BLOCK} exactly, so that their "
        f"residual is zero ({first['timer']}; of each product the fastest tile sizes)."
    )


main = functools.partial(common.main, NAME)

if __name__ == "__main__":
    common.command(NAME)
