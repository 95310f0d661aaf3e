"""Time of a residual product that skips zero blocks, on weights that FP8 represents exactly in half of their blocks.

    python -m benchmarks.skip_residual --json

The weight is random. Half of its blocks of 128 x 128 are rounded to E4M3 under the block's power of two, so that their
residual is zero. BF16, the residual product with all blocks and the product of nonzero blocks run in turn. Each is
compared with float64 before it is timed. Operands are quantized beforehand; the time includes the kernel's work list.
"""

import argparse
import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from benchmarks import common, products, timing
from benchmarks.common import Result, markdown_table, times
from benchmarks.products import Form, Product
from benchmarks.shapes import MIDDLE, GemmShape, random_operands
from pallas_kernels.dispatch import Backend
from pallas_kernels.operands import Block
from pallas_kernels.quantize.api import quantize

NAME = "skip_residual"
BLOCK = 128
FORMS = {
    "all blocks": Form(2, scaling=Block(BLOCK)),
    "nonzero blocks": Form(2, scaling=Block(BLOCK), residual_blocks="nonzero"),
}


@dataclass(frozen=True)
class Config:
    """Settings of a run."""

    shape: GemmShape = MIDDLE
    backend: Backend = "mosaic"
    rounds: int = 5
    calls: int = 5


SMOKE = Config(GemmShape(256, 512, 256), backend="xla", rounds=2, calls=2)


@dataclass(frozen=True)
class Row(timing.Timing):
    """One product: the part of the residual's blocks that are zero, and its error over its bound, too."""

    shape: str
    kind: str
    backend: Backend
    skipped: float
    speed_over_all: float
    speed_over_bf16: float
    bound_used: float


def configure(options: argparse.Namespace) -> Config:
    """Return the settings of a command line."""
    return Config() if jax.default_backend() == "gpu" and not options.smoke else SMOKE


@functools.partial(jax.jit, static_argnums=0)
def draw_weight(shape: tuple[int, int]) -> jax.Array:
    """Return a random float32 weight without zeros, half of whose blocks have no residual."""
    key, of_blocks = jax.random.split(jax.random.key(0))
    w = jax.random.normal(key, shape, jnp.float32) * 0.02
    # Values that FP8 would round to zero become its smallest normal number under a block's usual scale.
    w = jnp.where(jnp.abs(w) < 2.0**-18, jnp.float32(2.0**-18), w)
    rows, columns = shape[0] // BLOCK, shape[1] // BLOCK
    order = jax.random.permutation(of_blocks, rows * columns).reshape(rows, columns)
    exact = jnp.repeat(jnp.repeat(order < rows * columns // 2, BLOCK, 0), BLOCK, 1)
    return jnp.where(exact, quantize(w, jnp.float8_e4m3fn, Block(BLOCK)).rows.dequantize(), w)


def measure(config: Config) -> Iterator[Row]:
    """Check and time every product.

    Raises:
      ArithmeticError: a product misses its bound, so nothing is timed.
    """
    found, skipped = find_products(config)
    used = [products.check_product(p) for p in found]
    named = {p.kind: (p.function, p.args) for p in found}
    timed = timing.time_interleaved(named, rounds=config.rounds, calls=config.calls)
    for p, bound_used in zip(found, used, strict=True):
        over = {kind: timed[kind].median_ms / timed[p.kind].median_ms for kind in ("all blocks", "bf16")}
        yield Row(
            **dataclasses.asdict(timed[p.kind]), shape=str(config.shape), kind=p.kind, backend=p.backend,
            skipped=skipped, speed_over_all=over["all blocks"], speed_over_bf16=over["bf16"], bound_used=bound_used,
        )  # fmt: skip


def find_products(config: Config) -> tuple[list[Product], float]:
    """Return the products, and the part of the residual's blocks that are zero."""
    shape, (x, _) = config.shape, random_operands(config.shape)
    w = draw_weight((shape.n, shape.k))
    pair = FORMS["all blocks"].quantize(x, w)
    in_fp8 = [products.fp8_product(kind, form, pair, config.backend) for kind, form in FORMS.items()]
    blocks = products.halves_of(pair[1])[1].reshape(shape.n // BLOCK, BLOCK, shape.k // BLOCK, BLOCK)
    return [products.bf16_product(x, w), *in_fp8], float(jnp.mean(jnp.all(blocks == 0, axis=(1, 3))))


def table(result: Result) -> str:
    """Return the page's table, one line per product."""
    first = result.rows[0]
    lines = [
        [r["kind"], f"{r['median_ms']:.3f} ms", f"**{r['speed_over_bf16']:.2f}**", f"{r['speed_over_all']:.2f}"]
        for r in result.rows
    ]
    return (
        f"{markdown_table([times(first['shape']), 'time', 'speed over BF16', 'speed over all blocks'], lines)}\n\n"
        f"FP8 holds {100 * first['skipped']:.0f} % of this weight's blocks of {BLOCK} exactly, so that their "
        f"residual is zero ({first['timer']})."
    )


if __name__ == "__main__":
    common.command(NAME)
