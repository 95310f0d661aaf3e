"""Time of one product: BF16, one FP8 product, and the two of a residual weight.

    python -m benchmarks.gemm --json

Every backend runs in one run. Operands are quantized beforehand, so this is the time of
the tensor cores and not of a layer. Every product is compared with float64 before it is
timed. The ratio is BF16's median divided by the product's, both from this run.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax

from benchmarks import timing
from benchmarks.harness import Benchmark, chosen_of
from benchmarks.products import (
    CPU_SHAPES,
    H200_SHAPES,
    SMOKE_SHAPES,
    Candidate,
    Form,
    GemmShape,
    bf16_product,
    check_product,
    fp8_product,
    random_operands,
)
from benchmarks.records import Result, markdown_table, shown, times
from pallas_kernels.dispatch import BACKENDS, Backend
from pallas_kernels.operands import Accumulation

KINDS: dict[str, Literal[1, 2]] = {"fp8 single": 1, "fp8 dual": 2}
CUBE = GemmShape(4096, 4096, 4096)  # its FP8 operands fit into the L2 cache
# Dense tensor-core rates of an H100 or H200, NVIDIA's data sheets.
PEAK_TFLOPS = {"bf16": 989.5, "fp8": 1979.0}


@dataclass(frozen=True)
class Config(timing.Repetitions):
    """Settings of a run."""

    shapes: tuple[GemmShape, ...]
    backends: tuple[Backend, ...] = ("xla",)


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
    """Add --backends."""
    parser.add_argument(
        "--backends", help="of the FP8 products (default: xla, on a GPU xla,mosaic)"
    )


def shapes_here(options: argparse.Namespace) -> tuple[GemmShape, ...]:
    """Return the shapes to measure: three of a Transformer's on a GPU."""
    if options.smoke:
        return SMOKE_SHAPES
    return H200_SHAPES if jax.default_backend() == "gpu" else CPU_SHAPES


def configure(options: argparse.Namespace) -> Config:
    """Return the settings of a command line."""
    usual = "xla,mosaic" if jax.default_backend() == "gpu" else "xla"
    backends = chosen_of("backends", options.backends or usual, BACKENDS)
    few = {"rounds": 2, "calls": 2} if options.smoke else {}
    shapes = shapes_here(options)
    if shapes == H200_SHAPES:
        shapes = CUBE, *shapes
    return Config(shapes, backends, **few)


def measure(config: Config) -> Iterator[Row]:
    """Check and time every product of operands with one scale, at every shape.

    Raises:
      ArithmeticError: a product misses its bound, so nothing is timed at that shape.
    """
    for shape in config.shapes:
        found = _find_products(shape, config)
        used = {product.name: check_product(product) for product in found}
        timed = config.interleaved(
            {product.name: (product.function, product.args) for product in found}
        )
        baseline = timed[found[0].name].median_ms
        for product in found:
            taken = timed[product.name]
            tflops = product.gemms * shape.operations / taken.median_ms / 1e9
            yield Row(
                **vars(taken),
                shape=str(shape),
                kind=product.kind,
                accumulation=product.accumulation,
                backend=product.backend,
                tflops=tflops,
                part_of_peak=_part_of_peak(product.kind, tflops),
                speed_over_bf16=baseline / taken.median_ms,
                bound_used=used[product.name],
            )


def _find_products(shape: GemmShape, config: Config) -> list[Candidate]:
    x, w = random_operands(shape)
    pairs = {kind: Form(halves).quantize(x, w) for kind, halves in KINDS.items()}
    found = [bf16_product(x, w)]
    for backend in config.backends:
        for accumulation in get_args(Accumulation):
            for kind, halves in KINDS.items():
                form = Form(halves, accumulation)
                found.append(fp8_product(kind, form, pairs[kind], backend))
    return found


def _part_of_peak(kind: str, tflops: float) -> float | None:
    device = jax.devices()[0].device_kind
    if device not in ("NVIDIA H100 80GB HBM3", "NVIDIA H200"):
        return None
    return tflops / PEAK_TFLOPS["bf16" if kind == "bf16" else "fp8"]


def describe(row: dict[str, Any]) -> str:
    """Return the name of a row in tables."""
    if row["kind"] == "bf16":
        return "BF16"
    return (
        f"{row['kind'].replace('fp8', 'FP8')}, {row['accumulation']} accumulation,"
        f" `{row['backend']}`"
    )


def table(result: Result) -> str:
    """Return the page's table: one line per product, one column per shape."""
    cell = "{median_ms:.3f} ms · {tflops:.4g} · **{speed_over_bf16:.2f}**"
    shapes = result.distinct("shape")
    found = {(describe(row), row["shape"]): shown(row, cell) for row in result.rows}
    names = dict.fromkeys(describe(row) for row in result.rows)
    lines = [[name, *(found[name, shape] for shape in shapes)] for name in names]
    spread = max(
        (row["max_ms"] - row["min_ms"]) / row["median_ms"] for row in result.rows
    )
    return (
        f"{markdown_table(['m × k × n', *map(times, shapes)], lines)}\n\nA cell holds"
        " the median time, the rate in TFLOP/s, and **the speedup over BF16 in the same"
        f" run** ({result.rows[0]['timer']}; samples spread over at most"
        f" {100 * spread:.0f} % of the median)."
    )


BENCHMARK = Benchmark("gemm", __doc__, configure, measure, table, options=add_options)

if __name__ == "__main__":
    BENCHMARK.command()
