"""The tables of README, each from the committed JSON of one benchmark."""

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import (
    casts,
    convergence,
    gemm,
    memory,
    plots,
    quality,
    quantizers,
    recipes,
    scan,
    skip_residual,
    train_step,
)
from benchmarks.common import RESULTS

WORTH_A_COLUMN = (1, 7, 70)  # of the billions in the arithmetic of benchmarks.memory


def command(name: str) -> str:
    """What writes the JSON of a benchmark."""
    return f"python -m benchmarks.{gemm.NAME if name in (quantizers.NAME, gemm.SCALED) else name} --json"


@dataclass(frozen=True)
class Result:
    """One JSON file."""

    name: str
    path: Path
    header: dict[str, Any]
    config: dict[str, Any]
    rows: list[dict[str, Any]]
    digest: str

    @property
    def caption(self) -> str:
        """Where the numbers come from, and the command."""
        h = self.header
        commit = f"commit {h['commit']}, " if h["commit"] else ""
        return f"*{h['device']}, jax {h['jax']}, {commit}sources {h['sources']}, {h['date']}; `{command(self.name)}`*"


def read_result(name: str, results: Path = RESULTS) -> Result | None:
    """The JSON of a benchmark, of an accelerator where there is one."""
    paths = sorted(results.glob(f"*/{name}.json"), key=lambda path: (path.parent.name == "cpu", path.parent.name))
    if not paths:
        return None
    data = paths[0].read_bytes()
    content = json.loads(data)
    digest = hashlib.sha256(data).hexdigest()[:16]
    return Result(name, paths[0], content["header"], content["config"], content["rows"], digest)


def markdown_table(titles: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, the first column left-aligned.

    >>> print(markdown_table(["a", "b"], [["1", "2"]]))
    | a | b |
    |---|--:|
    | 1 | 2 |
    """
    lines = [titles, *rows]
    text = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([text[0], "|---|" + "--:|" * (len(titles) - 1), *text[1:]])


def _gemm(result: Result) -> str:
    shapes = list(dict.fromkeys(row["shape"] for row in result.rows))
    lines = list(dict.fromkeys(plots.gemm_line(row) for row in result.rows))
    cells = {(plots.gemm_line(r), r["shape"]): r for r in result.rows}
    table = []
    for name in lines:
        line = [name]
        for shape in shapes:
            r = cells[name, shape]
            line.append(f"{r['median_ms']:.3f} ms · {r['tflops']:.4g} · **{r['speed_over_bf16']:.2f}**")
        table.append(line)
    titles = ["m × k × n", *(shape.replace("x", " × ") for shape in shapes)]
    timer = result.rows[0]["timer"]
    spread = max((row["max_ms"] - row["min_ms"]) / row["median_ms"] for row in result.rows)
    return (
        f"{markdown_table(titles, table)}\n\n"
        "Median time, TFLOP/s, and **BF16's time over it** in the same run (operands quantized beforehand; "
        f"{timer}; samples spread over at most {100 * spread:.0f} % of the median). A dual product is two FP8 products."
    )


def _quality(result: Result) -> str:
    formats = [row for row in result.rows if row["question"] == "format"]
    names = list(dict.fromkeys(row["name"] for row in formats))
    snr = {(row["name"], row["distribution"]): row["snr_db"] for row in formats}
    bits = {row["name"]: row["bits"] for row in formats}
    table = [
        [name, f"{bits[name]:.4g}", *(f"{snr[name, distribution]:.1f}" for distribution in quality.DISTRIBUTIONS)]
        for name in names
    ]
    outputs = ", ".join(f"{r['name']} {r['snr_db']:.1f}" for r in result.rows if r["question"] == "output")
    config = result.config
    still = next(row for row in result.rows if row["question"] == "still weight")
    moving = next(row for row in result.rows if row["question"] == "moving weight")
    return (
        f"{markdown_table(['SNR in dB', 'bits/value', *quality.DISTRIBUTIONS], table)}\n\n"
        f"Output of a product (activation × weight) against float64, in dB: {outputs}. The activation limits it.\n\n"
        f"{_outlier_channel(result)}"
        "Error feedback (its bits include a float32 error buffer): the mean of "
        f"{config['still_steps']} steps of a weight that stands still is off by {still['ratio']:.4f} of one "
        f"step's RMS error; of a weight that moves, step {config['moving_steps']} alone has "
        f"{moving['snr_db']:.1f} dB. Tensors have {config['size']}² values, those of error feedback "
        f"{config['moving_size']}²; scales are per tensor, except TCFP-12's, so larger outliers cost more."
    )


def _outlier_channel(result: Result) -> str:
    rows = [row for row in result.rows if row["question"] == "outlier channel"]
    if not rows:
        return ""
    figures = ", ".join(f"{row['name']} {row['snr_db']:.1f}" for row in rows)
    return f"One channel a thousand times as large, what is left of the others, in dB: {figures}.\n\n"


def _convergence(result: Result) -> str:
    rows = [
        convergence.Row(**{**r, **convergence.diverged(r)}) for r in result.rows if r["name"] in convergence.VARIANTS
    ]
    summaries = {(s.task, s.name): s for s in convergence.summarize(rows)}
    tasks = [task for task in convergence.TASKS if any(key[0] == task for key in summaries)]
    names = [name for name in convergence.VARIANTS if any((task, name) in summaries for task in tasks)]
    table = [[f"`{name}`", *(_ratio_cell(summaries.get((task, name))) for task in tasks)] for name in names]
    config = result.config
    titles = {
        "gpt": (
            f"GPT `{config['model']}`, {config['steps']} steps, real text, "
            f"learning rate {config['learning_rate']:g} to {config['learning_rate'] * config['final_fraction']:g}"
        ),
        "digits": f"MLP, {config['digits_steps']} steps, digits",
    }
    return (
        f"{markdown_table(['held-out perplexity ÷ BF16', *(titles[task] for task in tasks)], table)}\n\n"
        "Mean over seeds ± standard error (minimum to maximum, number of seeds), each run paired with BF16's from the "
        "same initial weights and batches; after the semicolon, the same trained parameters evaluated with BF16 "
        f"products. `{convergence.RERUN}` is BF16 with its initial weights perturbed by "
        f"{config['rerun_jitter']:g}: how far rounding alone moves a run."
    )


def _ratio_cell(summary: convergence.Summary | None) -> str:
    if summary is None:
        return "–"
    if not math.isfinite(summary.mean_ratio):
        return f"diverged ({summary.seeds})"
    if summary.name == convergence.BASELINE:
        return f"1 ({summary.mean_heldout_loss:.4f} nats, {summary.seeds})"
    spread = f"{summary.min_ratio:.4f} to {summary.max_ratio:.4f}, {summary.seeds}"
    mean = f"{summary.mean_ratio:.4f} ± {summary.standard_error:.4f}"
    return f"{mean} ({spread}); {summary.mean_ratio_bf16:.4f}"


def _memory(result: Result) -> str:
    measured = [row for row in result.rows if row["kind"] == "measured"]
    size = {(r["name"], r["parameters"]): r["state_bytes"] for r in result.rows if r["kind"] == "arithmetic"}
    table = []
    for row in measured:
        peak = "–" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:,.0f}"
        arithmetic = [f"{size[row['name'], b * 10**9] / 1e9:,.0f}" for b in WORTH_A_COLUMN]
        table.append(
            [row["name"], f"{row['bytes_per_weight']:.0f}", f"{row['state_bytes'] / 1e6:,.0f}", peak, *arithmetic]
        )
    titles = ["", "bytes/weight", "state, MB", "peak, MB", *(f"{b}B: GB, arithmetic" for b in WORTH_A_COLUMN)]
    config = result.config
    return (
        f"{markdown_table(titles, table)}\n\n"
        f"State: float32 weights, Adam's moments, quantized weights and error buffers, counted leaf by leaf; peak: the "
        f"allocator's, training `{config['model']}` ({measured[0]['parameters'] / 1e6:.4g}M parameters, "
        f"{config['batch']} × {config['sequence']} bytes a step). The columns marked arithmetic multiply bytes per "
        "weight by a model's size; no such model was run."
    )


def _quantizers(result: Result) -> str:
    shapes = list(dict.fromkeys(row["shape"] for row in result.rows))
    rates = {(r["name"], r["backend"], r["amax"], r["shape"]): r["terabytes_per_second"] for r in result.rows}
    table = [
        [f"{name}, {plots.BACKEND_NAMES[backend]}"]
        + [" · ".join(f"{rates[name, backend, amax, shape]:.2f}" for amax in ("apply", "whole")) for shape in shapes]
        for name, backend in dict.fromkeys((row["name"], row["backend"]) for row in result.rows)
    ]
    return (
        f"{markdown_table(['TB/s', *(shape.replace('x', ' × ') for shape in shapes)], table)}\n\n"
        "Bytes that must be read and written, over the kernels' time: with the amax given · with finding it. Every "
        "kernel's result equals XLA's bit for bit."
    )


def _train_step(result: Result) -> str:
    names = list(dict.fromkeys(row["recipe"] for row in result.rows))
    cells = {(row["part"], row["shape"], row["recipe"]): row for row in result.rows}
    table = []
    for part, shape in dict.fromkeys((row["part"], row["shape"]) for row in result.rows):
        baseline = cells[part, shape, train_step.BASELINE]
        line = [f"{part}, {shape.replace('x', ' × ')}", f"{baseline['median_ms']:.3f} ms"]
        for name in names[1:]:
            row = cells.get((part, shape, name))
            line.append("–" if row is None else f"**{row['speed_over_bf16']:.2f}**")
        table.append(line)
    peaks = [f"`{row['recipe']}` {row['peak_bytes'] / 1e6:,.0f}" for row in result.rows if row["peak_bytes"]]
    memory_line = f" Peak memory of an optimizer step at its first shape, in MB: {', '.join(peaks)}." if peaks else ""
    slowest = max(row["compile_seconds"] for row in result.rows)
    titles = ["tokens × d × d_ff", "BF16", *(f"`{name}`" for name in names[1:])]
    return (
        f"{markdown_table(titles, table)}\n\n"
        f"BF16's time over the recipe's in the same run ({result.rows[0]['timer']}). An MLP is two layers with a relu "
        "or a gelu between them, forward and backward with input gradients; a block is the GPT's; an optimizer step is "
        f"the first MLP's with AdamW and error feedback. No first compile took over {slowest:.0f} s.{memory_line}"
    )


def _recipes(result: Result) -> str:
    rows, shape = result.rows, result.rows[0]["shape"].replace("x", " × ")
    table = [
        [f"`{r['recipe']}`", f"{r['median_ms']:.3f} ms", f"**{r['speed_over_bf16']:.2f}**",
         "" if r["worst_snr_db"] is None else f"{r['worst_snr_db']:.1f}"]
        for r in rows
    ]  # fmt: skip
    return (
        f"{markdown_table([f'MLP, {shape}', 'forward + backward', 'BF16 ÷ this', 'dB'], table)}\n\n"
        f"In one run ({rows[0]['timer']}); dB: the worst of output and gradients against BF16's, which chain two "
        "products and cross relu's kink."
    )


def _scan(result: Result) -> str:
    table = []
    for row in result.rows:
        other = next(r for r in result.rows if r["recipe"] == row["recipe"] and r["form"] == "unrolled")
        compiled, unrolled = (r["trace_seconds"] + r["compile_seconds"] for r in (row, other))
        numbers = [f"{compiled:.1f} s", f"{row['median_ms']:.2f} ms"]
        ratios = [f"{compiled / unrolled:.2f}", f"{row['median_ms'] / other['median_ms']:.2f}"]
        table.append([f"`{row['recipe']}`", row["form"], *numbers, *ratios])
    c = result.config
    titles = ["recipe", "layers", "trace and compile", "step", "compile / unrolled", "step / unrolled"]
    cpu = " A CPU multiplies FP8 values in float32: its steps say nothing of a GPU's."
    return (
        f"{markdown_table(titles, table)}\n\n"
        f"{c['layers']} Transformer blocks of width {c['width']}, {c['batch']} × {c['sequence']} tokens; loss, "
        f"gradients, SGD and error feedback ({result.rows[0]['timer']}). `bf16` is Flax's own model, not converted."
        f"{cpu if result.header['platform'] == 'cpu' else ''}"
    )


def _skip_residual(result: Result) -> str:
    table = [
        [r["kind"], f"{r['median_ms']:.3f} ms", f"**{r['speed_over_bf16']:.2f}**", f"{r['speed_over_all']:.2f}"]
        for r in result.rows
    ]
    first = result.rows[0]
    titles = [first["shape"].replace("x", " × "), "time", "BF16 ÷ this", "all blocks ÷ this"]
    return (
        f"{markdown_table(titles, table)}\n\n"
        f"`residual_blocks` of a residual weight of which FP8 holds {100 * first['exact_part']:.0f} % of the blocks of "
        f"128 exactly ({first['timer']}; of each the fastest tile sizes)."
    )


def _casts(result: Result) -> str:
    def ratio(value: float | None) -> str:
        return "–" if value is None else f"{value:.2f}"

    table = [
        [r["name"], r["where"], f"{r['shape'].replace('x', ' × ')} {r['dtype']}", f"{r['median_ms']:.3f} ms",
         ratio(r["over_copy"]), ratio(r["over_eager"])]
        for r in result.rows
    ]  # fmt: skip
    return (
        f"{markdown_table(['cast', 'where', 'of', 'time', 'copy ÷ this', 'eager ÷ this'], table)}\n\n"
        "Against a copy of the array on the same device, and against microxcaling's operations in eager PyTorch on the "
        "same CPU."
    )


TABLES: dict[str, Callable[[Result], str]] = {
    gemm.NAME: _gemm,
    quantizers.NAME: _quantizers,
    gemm.SCALED: _gemm,
    train_step.NAME: _train_step,
    recipes.NAME: _recipes,
    quality.NAME: _quality,
    convergence.NAME: _convergence,
    memory.NAME: _memory,
    scan.NAME: _scan,
    skip_residual.NAME: _skip_residual,
    casts.NAME: _casts,
}
