"""The measurements that PyTorch TCFP publishes, made with this library: one table.

    python -m benchmarks.card --json --only gemm,train_step-original
    python -m benchmarks.convergence --protocol scratch --variants flags --json

Both commands write its JSON, and `benchmarks.report` the table.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks import convergence_tables
from benchmarks.gemm import CUBE
from benchmarks.products import GemmShape
from benchmarks.records import (
    RESULTS,
    Result,
    markdown_table,
    read_result,
    shown,
    times,
)
from benchmarks.train_step import STOCHASTIC
from benchmarks.variants import BASELINE


@dataclass(frozen=True)
class Column:
    """A column of the table, and the names of its numbers in each JSON."""

    title: str
    step: str
    product: str | None = None
    learned: str | None = None


COLUMNS = (
    Column("BF16", BASELINE, "bf16", BASELINE),
    Column("`tcfp12`, error feedback", "tcfp12", "fp8 dual", "flags_tcfp12"),
    Column("`tcfp12`, SRR", STOCHASTIC, None, "flags_srr"),
    Column("`tcfp12_fast`", "tcfp12_fast"),
    Column("stored", "stored", "fp8 single"),
)
TIME = "{median_ms:.3f} · **{speed_over_bf16:.2f}**"
MEMORY = "{state_gigabytes:.3f} · {step_gigabytes:.3f}"
NOTE = (
    "Times are milliseconds with **the speedup over BF16 in the same run**. The product"
    " has operands that were quantized beforehand, and the fastest accumulation and"
    " backend: of both halves for `tcfp12`, and of `W_hi` for stored weights. A step has"
    " loss, gradients, AdamW and the quantization of weights. Memory is the state that"
    " outlives the step, and all that its compiled program needs with 8,192 tokens,"
    " in GB. The GPT has 4 layers of width 256 and trains for 1,000 steps on bytes; its"
    " numbers are held-out perplexity divided by BF16's, with the standard error of"
    " three seeds."
)


def table(results: Path = RESULTS) -> str:
    """Return the table, with a line for each measurement that has JSON."""
    titles = ["", "card", *(column.title for column in COLUMNS)]
    lines: list[list[str]] = []
    product = read_result("gemm", results)
    if product is not None:
        lines += _products(product)
    steps = read_result("train_step-original", results)
    if steps is not None:
        lines += _steps(steps)
    learned = read_result("convergence-flags", results)
    if learned is not None:
        lines.append(_learned(learned))
    return f"{markdown_table(titles, lines)}\n\n{NOTE}\n"


def _products(result: Result) -> Iterator[list[str]]:
    """Yield the line of the product, unless the file is older than its shape."""
    fastest: dict[str, dict[str, object]] = {}
    for row in sorted(result.rows, key=_speed):
        if row["shape"] == str(CUBE):
            fastest[row["kind"]] = row
    if fastest:
        cells = [shown(fastest.get(str(one.product)), TIME) for one in COLUMNS]
        yield [f"one product, {times(str(CUBE))}", result.card, *cells]


def _speed(row: dict[str, float]) -> float:
    return row["speed_over_bf16"]


def _steps(result: Result) -> Iterator[list[str]]:
    """Yield the times of all MLPs, and then their memory."""
    rows = result.by("shape", "recipe")
    for what, form in (("a step", TIME), ("memory of the step", MEMORY)):
        for text in result.distinct("shape"):
            shape = GemmShape.parse(text)
            cells = [shown(rows.get((text, one.step)), form) for one in COLUMNS]
            mlp = f"MLP {shape.k} → {shape.n} → {shape.k}"
            yield [f"{mlp}, {what}", result.card, *cells]


def _learned(result: Result) -> list[str]:
    found = convergence_tables.ratios_of(result)
    cells = [found.get(str(one.learned), "–") for one in COLUMNS]
    return ["GPT, perplexity", result.card, *cells]
