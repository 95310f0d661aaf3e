"""The measurements that PyTorch TCFP publishes, made with this library: one table.

    python -m benchmarks.card --json --only gemm,train_step-original
    python -m benchmarks.convergence --protocol scratch --variants flags --json

Both commands write its JSON, and `benchmarks.report` the table.
"""

import operator
from collections.abc import Iterator
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

# The names of a column's numbers in the JSON of products, steps and learning.
COLUMNS = {
    "BF16": ("bf16", BASELINE, BASELINE),
    "`tcfp12`, error feedback": ("fp8 dual", "tcfp12", "flags_tcfp12"),
    "`tcfp12`, SRR": ("", STOCHASTIC, "flags_srr"),
    "stored": ("fp8 single", "stored", ""),
}
TIME = "{median_ms:.3f} · **{speed_over_bf16:.2f}**"
NOTE = (
    "Times are milliseconds with **the speedup over BF16 in the same run**. The product"
    " has operands that were quantized beforehand, and the fastest accumulation and"
    " backend: of both halves for `tcfp12`, and of `W_hi` for stored weights. A step"
    " has loss, gradients, AdamW and the quantization of weights. Memory is the state"
    " that outlives the step, and all that its compiled program needs with 8,192"
    " tokens, in GB. The GPT has 4 layers of width 256 and trains for 1,000 steps on"
    " bytes; its numbers are held-out perplexity divided by BF16's, with the standard"
    " error of three seeds."
)


def table(results: Path = RESULTS) -> str:
    """Return the table, with a line for each measurement that has JSON."""
    lines: list[list[str]] = []
    for name, lines_of in LINES.items():
        found = read_result(name, results)
        if found is not None:
            lines += lines_of(found)
    return f"{markdown_table(['', 'card', *COLUMNS], lines)}\n\n{NOTE}\n"


def _products(result: Result) -> Iterator[list[str]]:
    """Yield the line of the product, unless the file is older than its shape."""
    rows = [row for row in result.rows if row["shape"] == str(CUBE)]
    rows.sort(key=operator.itemgetter("speed_over_bf16"))
    fastest = {row["kind"]: row for row in rows}
    if fastest:
        cells = [shown(fastest.get(kind), TIME) for kind, _, _ in COLUMNS.values()]
        yield [f"one product, {times(str(CUBE))}", result.card, *cells]


def _steps(result: Result) -> Iterator[list[str]]:
    """Yield the times of all MLPs, and then their memory."""
    rows = result.by("shape", "recipe")
    memory = "{state_gigabytes:.3f} · {step_gigabytes:.3f}"
    for what, form in (("a step", TIME), ("memory of the step", memory)):
        for text in result.distinct("shape"):
            shape = GemmShape.parse(text)
            mlp = f"MLP {shape.k} → {shape.n} → {shape.k}"
            cells = [shown(rows.get((text, of)), form) for _, of, _ in COLUMNS.values()]
            yield [f"{mlp}, {what}", result.card, *cells]


def _learned(result: Result) -> Iterator[list[str]]:
    found = convergence_tables.ratios_of(result)
    cells = [found.get(name, "–") for _, _, name in COLUMNS.values()]
    yield ["GPT, perplexity", result.card, *cells]


# The functions of the lines of each JSON
LINES = {
    "gemm": _products,
    "train_step-original": _steps,
    "convergence-flags": _learned,
}
