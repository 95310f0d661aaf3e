"""Plots of the committed JSON as PNGs, each of which carries the digest of the file it was drawn from."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import convergence

SOURCE = "Source"  # the PNG text field of the digest
BACKEND_NAMES = {"xla": "XLA", "triton": "Triton", "mosaic": "Mosaic"}


def draw(name: str, config: dict[str, Any], rows: list[dict[str, Any]], path: Path, digest: str) -> None:
    """Write the plot of a benchmark.

    Raises:
      KeyError: the benchmark has none; `DRAWN` holds those that do.
    """
    # Imported here: it costs a second, which tables need not pay.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    FigureCanvasAgg(figure)
    DRAWN[name](figure, config, rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, metadata={SOURCE: digest})


def read_source(path: Path) -> str | None:
    """The digest that `draw` stored in a PNG; None where there is no such file or field."""
    if not path.exists():
        return None
    from PIL import Image

    with Image.open(path) as image:
        image.load()
        return image.info.get(SOURCE)


def gemm_line(row: dict[str, Any]) -> str:
    """How a table or plot names the product of a row."""
    if row["kind"] == "bf16":
        return "BF16"
    return f"{row['kind'].replace('fp8', 'FP8')}, {row['accumulation']} accumulation, {BACKEND_NAMES[row['backend']]}"


def _draw_gemm(figure: Any, config: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    kinds = list(dict.fromkeys(map(gemm_line, rows)))
    axes = figure.add_subplot()
    width = 0.8 / len(kinds)
    for i, label in enumerate(kinds):
        times = [r for r in rows if gemm_line(r) == label]
        at = np.arange(len(shapes)) + i * width - 0.4 + width / 2
        bars = axes.bar(at, [r["tflops"] for r in times], width * 0.92, label=label, color=f"C{i}")
        axes.bar_label(bars, [f"{r['speed_over_bf16']:.2f}" for r in times], fontsize=6, padding=1)
    axes.set_xticks(range(len(shapes)), shapes)
    axes.set(ylabel="TFLOP/s", title="One product (number on a bar: BF16's time over its time)")
    axes.margins(y=0.12)
    axes.legend(fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.1))


def _draw_train_step(figure: Any, config: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    steps = list(dict.fromkeys((row["part"], row["shape"]) for row in rows))
    names = [name for name in dict.fromkeys(row["recipe"] for row in rows) if name != "bf16"]
    speed = {(row["part"], row["shape"], row["recipe"]): row["speed_over_bf16"] for row in rows}
    axes = figure.add_subplot()
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        at = np.arange(len(steps)) + i * width - 0.4 + width / 2
        axes.bar(at, [speed.get((*step, name), np.nan) for step in steps], width * 0.92, label=name, color=f"C{i}")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(steps)), ["\n".join(step) for step in steps], fontsize=7)
    axes.set(ylabel="BF16's time ÷ time", title="Steps: tokens x d x d_ff")
    axes.legend(fontsize=8, ncols=len(names), loc="upper center", bbox_to_anchor=(0.5, -0.14))


def _draw_convergence(figure: Any, config: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    runs = [convergence.Row(**{**r, **convergence.diverged(r)}) for r in rows if r["name"] in convergence.VARIANTS]
    summaries = convergence.summarize(runs)
    tasks = list(dict.fromkeys(s.task for s in summaries))
    names = [n for n in convergence.VARIANTS if n != convergence.BASELINE and any(s.name == n for s in summaries)]
    figure.set_size_inches(4.2 + 3.4 * len(tasks), 1.2 + 0.3 * len(names))
    baseline = {(run.task, run.seed): run.heldout_loss for run in runs if run.name == convergence.BASELINE}
    for axes, task in zip(np.atleast_1d(figure.subplots(1, len(tasks), sharey=True)), tasks, strict=True):
        _draw_ratios(axes, task, names, runs, baseline)
    figure.suptitle("Held-out perplexity ÷ BF16's of the same seed; bar: mean", fontsize=10)


def _draw_ratios(
    axes: Any,
    task: convergence.Task,
    names: list[str],
    runs: list[convergence.Row],
    baseline: dict[tuple[convergence.Task, int], float],
) -> None:
    """One line of dots per variant, one dot per seed, a bar at the mean."""
    for i, name in enumerate(names):
        paired = [run for run in runs if (run.task, run.name) == (task, name) and (task, run.seed) in baseline]
        ratios = np.exp([run.heldout_loss - baseline[task, run.seed] for run in paired])
        color = "C7" if name == convergence.RERUN else "C0"
        axes.plot(ratios, np.full(len(ratios), i), "o", color=color, alpha=0.5, markersize=4)
        if len(ratios):
            axes.plot([ratios.mean()], [i], "|", color=color, markersize=14, markeredgewidth=2)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="x", labelsize=8)
    axes.set_title({"gpt": "GPT on real text", "digits": "MLP on digits"}[task], fontsize=9)
    axes.grid(axis="x", alpha=0.3)


DRAWN: dict[str, Callable[[Any, dict[str, Any], list[dict[str, Any]]], None]] = {
    "gemm": _draw_gemm,
    "train_step": _draw_train_step,
    "convergence": _draw_convergence,
}
