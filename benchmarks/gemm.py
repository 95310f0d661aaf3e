"""Time of one product: BF16, one FP8 product, and the two of a residual weight, by
every backend, in one run.

    python -m benchmarks.gemm --json     # products, products with a scale per row or block, then quantizers
    python -m benchmarks.gemm --tune     # times tile sizes, writes pallas_kernels/tuned.json (benchmarks.tune)

Operands are quantized beforehand, so this is the time of the tensor cores and not of a
layer. Every product is compared with float64 before it is timed. The ratio is BF16's
median divided by the product's, both from this run.
"""

import argparse
import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax

from benchmarks import common, products, timing, tune
from benchmarks.common import Result, markdown_table, times
from benchmarks.products import Form, Product
from benchmarks.shapes import (
    CPU_SHAPES,
    H200_SHAPES,
    SMOKE_SHAPES,
    GemmShape,
    parse_shapes,
    random_operands,
)
from pallas_kernels.dispatch import Backend
from pallas_kernels.operands import Accumulation

NAME = "gemm"
CASES = (
    "of --tune: those not yet timed; those that include='measured' interpolates"
    " between, small models' among them"
)
MEASURES = {"products": NAME, "scales": "scaled_products", "quantizers": "quantizers"}
KINDS: dict[str, Literal[1, 2]] = {"fp8 single": 1, "fp8 dual": 2}
BACKEND_NAMES = {"xla": "XLA", "triton": "Triton", "mosaic": "Mosaic"}
# Dense tensor-core rates, NVIDIA's data sheets.
SMOKE_OPTIONS = {"measure": "products"}
PEAK_TFLOPS = {
    name: {"bf16": 989.5, "fp8": 1979.0}
    for name in ("NVIDIA H100 80GB HBM3", "NVIDIA H200")
}


@dataclass(frozen=True)
class Config:
    """Settings of a run."""

    shapes: tuple[GemmShape, ...]
    backends: tuple[Backend, ...] = ("xla",)
    rounds: int = 5
    calls: int = 5
    checked_rows: int = 64
    seed: int = 0


@dataclass(frozen=True)
class Row(timing.Timing):
    """One product at one shape.

    `tflops` counts 2 m k n for each FP8 or BF16 product, so twice that for a dual one.
    `part_of_peak` is the part of the device's published dense rate, None if it is not
    known. `speed_over_bf16` is the ratio of medians. `bound_used` is the largest error
    divided by its bound.
    """

    shape: str
    kind: str
    accumulation: Accumulation
    backend: Backend
    tflops: float
    part_of_peak: float | None
    speed_over_bf16: float
    bound_used: float


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add shapes, backends, parts, and the options of --tune."""
    add_shape_options(parser)
    parser.add_argument(
        "--measure",
        help=f"of {','.join(MEASURES)} (default: all); scales: products with more",
    )
    parser.add_argument(
        "--tune",
        action="store_true",
        help="time tile sizes, write pallas_kernels/tuned.json and stop",
    )
    parser.add_argument(
        "--only",
        default="",
        help="of --tune: cases whose op and variant contain this text",
    )
    parser.add_argument(
        "--cases", choices=list(get_args(tune.Cases)), default="all", help=CASES
    )
    parser.add_argument(
        "--budget-seconds",
        type=float,
        default=math.inf,
        help="of --tune: start nothing after this",
    )


def add_shape_options(parser: argparse.ArgumentParser) -> None:
    """Add --shapes and --backends."""
    parser.add_argument(
        "--shapes", help="MxKxN,MxKxN,... (default: three of a Transformer's on a GPU)"
    )
    parser.add_argument(
        "--backends", help="of the FP8 products (default: xla, on a GPU xla,mosaic)"
    )


def check_options(options: argparse.Namespace) -> None:
    """Raise `ValueError` if an option of --tune is given without it, or another one
    with it.
    """
    common.chosen_of("measure", options.measure, tuple(MEASURES))
    budget = options.budget_seconds < math.inf
    tuning = {
        "--only": options.only,
        "--cases": options.cases != "all",
        "--budget-seconds": budget,
    }
    timing = {
        f"--{name}": getattr(options, name)
        for name in ("measure", "shapes", "backends", "json", "out", "smoke")
    }
    ignored = next(
        (name for name, given in (timing if options.tune else tuning).items() if given),
        None,
    )
    if ignored is not None and options.tune:
        raise ValueError(
            f"{ignored} with --tune, which has cases and a file of its own; leave one"
            " of them out"
        )
    if ignored is not None:
        raise ValueError(
            f"{ignored} is an option of --tune; add --tune, or leave it out"
        )


def beside(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the benchmarks that the command runs; none with --tune, which runs
    here.
    """
    if options.tune:
        tune.run(options.budget_seconds, options.only, options.cases)
        return ()
    return tuple(
        MEASURES[name]
        for name in common.chosen_of("measure", options.measure, tuple(MEASURES))
    )


def configure(options: argparse.Namespace) -> Config:
    """Return the settings of a command line."""
    on_gpu = jax.default_backend() == "gpu"
    backends: Any = tuple(
        (options.backends or ("xla,mosaic" if on_gpu else "xla")).split(",")
    )
    if options.smoke:
        return Config(SMOKE_SHAPES, backends, rounds=2, calls=2)
    return Config(
        parse_shapes(options.shapes) or (H200_SHAPES if on_gpu else CPU_SHAPES),
        backends,
    )


def measure(config: Config) -> Iterator[Row]:
    """Check and time every product of operands with one scale, at every shape."""
    return measure_products(config, _find_products)


def measure_products(
    config: Config, find: Callable[[GemmShape, Config], list[Product]]
) -> Iterator[Row]:
    """Check and time the products that `find` returns for every shape; the first is the
    baseline.

    Raises:
      ArithmeticError: a product misses its bound, so nothing is timed at that shape.
    """
    for shape in config.shapes:
        found = find(shape, config)
        used = {
            p.name: products.check_product(p, config.checked_rows, config.seed)
            for p in found
        }
        timed = timing.time_interleaved(
            {p.name: (p.function, p.args) for p in found},
            rounds=config.rounds,
            calls=config.calls,
        )
        baseline = timed[found[0].name].median_ms
        for p in found:
            t = timed[p.name]
            tflops, peak = (
                p.gemms * shape.operations / (t.median_ms * 1e-3) / 1e12,
                _peak(p.kind),
            )
            yield Row(
                **dataclasses.asdict(t),
                shape=str(shape),
                kind=p.kind,
                accumulation=p.accumulation,
                backend=p.backend,
                tflops=tflops,
                part_of_peak=None if peak is None else tflops / peak,
                speed_over_bf16=baseline / t.median_ms,
                bound_used=used[p.name],
            )


def _find_products(shape: GemmShape, config: Config) -> list[Product]:
    x, w = random_operands(shape, config.seed)
    pairs = {kind: Form(halves).quantize(x, w) for kind, halves in KINDS.items()}
    found = [products.bf16_product(x, w)]
    for backend in config.backends:
        forms = [
            (kind, Form(halves, how))
            for how in get_args(Accumulation)
            for kind, halves in KINDS.items()
        ]
        found += products.possible(
            [
                products.fp8_product(kind, form, pairs[kind], backend)
                for kind, form in forms
            ]
        )
    return found


def _peak(kind: str) -> float | None:
    rates = PEAK_TFLOPS.get(jax.devices()[0].device_kind)
    return None if rates is None else rates["bf16" if kind == "bf16" else "fp8"]


def describe(row: dict[str, Any]) -> str:
    """Return the name of a row in tables."""
    if row["kind"] == "bf16":
        return "BF16"
    return (
        f"{row['kind'].replace('fp8', 'FP8')}, {row['accumulation']} accumulation,"
        f" {BACKEND_NAMES[row['backend']]}"
    )


def table(result: Result) -> str:
    """Return the page's table: one line per product, one column per shape."""
    shapes = result.distinct("shape")
    cells = {(describe(row), row["shape"]): row for row in result.rows}
    lines = []
    for name in dict.fromkeys(map(describe, result.rows)):
        rows = [cells[name, shape] for shape in shapes]
        lines.append(
            [
                name,
                *(
                    f"{r['median_ms']:.3f} ms · {r['tflops']:.4g} ·"
                    f" **{r['speed_over_bf16']:.2f}**"
                    for r in rows
                ),
            ]
        )
    spread = max(
        (row["max_ms"] - row["min_ms"]) / row["median_ms"] for row in result.rows
    )
    return (
        f"{markdown_table(['m × k × n', *map(times, shapes)], lines)}\n\nA cell holds"
        " the median time, the rate in TFLOP/s, and **the speed over BF16 in the same"
        f" run** ({result.rows[0]['timer']}; samples spread over at most"
        f" {100 * spread:.0f} % of the median)."
    )


if __name__ == "__main__":
    common.command(NAME)
