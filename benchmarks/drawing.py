"""Plots of the pages: SVGs on a transparent ground, for light and dark pages."""

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import large, memory
from benchmarks.convergence_tables import Row, rows_of
from benchmarks.records import RESULTS, Result, read_result
from benchmarks.variants import BASELINE
from models.extras import require

INK = "#808080"
BLUE = "#3b82c4"
ORANGE = "#e08214"
GRAY = "#a0a0a0"
# Text is drawn as paths, so that it looks alike everywhere, and ids are the same in
# every run.
STYLE: dict[Any, Any] = {
    "svg.fonttype": "path",
    "svg.hashsalt": "tcfp_jax",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "grid.color": INK,
    "grid.alpha": 0.25,
}
FROM_SCRATCH = "convergence-bpe-6x640"  # a Llama of 6 layers of width 640


@dataclass(frozen=True)
class Picture:
    """A plot: its text for readers who do not see it, its JSON files, its function."""

    alt: str
    sources: tuple[str, ...]
    draw: Callable[..., None]


def draw_whole_model(figure: Any, counted: Result, timed: Result) -> None:
    """Draw the bytes of Llama-3-8B's state and the time of a step of its layers."""
    sizes = counted.by("name")
    steps = timed.by("recipe")
    gigabytes = [sizes[name]["state_bytes"] / 1e9 for name in (memory.STORED, BASELINE)]
    milliseconds = [steps[name]["median_ms"] for name in ("stored", BASELINE)]
    figure.set_size_inches(7.2, 1.9)
    left, right = figure.subplots(1, 2, sharey=True)
    _draw_bars(left, "state of Llama-3-8B, GB", gigabytes)
    _draw_bars(right, f"step of 8 of its layers, ms ({timed.card})", milliseconds)
    left.axvline(80, color=ORANGE, linewidth=1.2, linestyle="--")
    left.text(82, 0.5, "one 80 GB card", color=ORANGE, va="center")


def _draw_bars(axes: Any, title: str, values: Sequence[float]) -> None:
    names = ["stored", "BF16, float32\nmaster weights"]
    bars = axes.barh(names, values, color=[BLUE, GRAY], height=0.62)
    axes.bar_label(bars, fmt="{:,.0f}", padding=4, color=INK)
    axes.set_title(title, loc="left")
    axes.set_xlim(0, 1.25 * max(values))
    axes.tick_params(left=False)
    axes.spines["left"].set_visible(False)


def draw_curves(figure: Any, result: Result) -> None:
    """Draw the losses of a long run of `benchmarks.large`, and means over ten steps."""
    figure.set_size_inches(7.2, 2.8)
    axes = figure.add_subplot()
    for row, color in zip(result.rows, (GRAY, BLUE, ORANGE), strict=False):
        losses = np.asarray(row["losses"])
        steps = np.arange(1, len(losses) + 1)
        axes.plot(steps, losses, color=color, linewidth=0.7, alpha=0.3)
        means = np.convolve(losses, np.full(10, 0.1), "valid")
        last = losses[-large.LAST :].mean()
        axes.plot(
            np.arange(len(means)) + 5.5,
            means,
            color=color,
            # BF16's line is wide, so that a curve on top of it leaves it visible.
            linewidth=4.0 if row["recipe"] == BASELINE else 1.4,
            label=f"{row['recipe']}, last {large.LAST} steps {last:.3f}",
        )
    axes.set_xlabel("step")
    axes.set_ylabel("nats per token")
    axes.grid(axis="y")
    axes.legend(frameon=False, labelcolor=INK)


def draw_whole_runs(figure: Any, result: Result) -> None:
    """Draw the losses of BF16 from scratch, and the differences of other runs from it.

    Both are means over seeds; a difference is from BF16's of the same seed. The curves
    of the others would lie on BF16's, so only their differences are drawn.
    """
    rows = rows_of(result)
    bf16 = _curves(rows, BASELINE)
    figure.set_size_inches(7.2, 3.6)
    losses, gaps = figure.subplots(1, 2, width_ratios=(1, 2))
    _name_axes(losses, "BF16's loss, nats per token")
    _name_axes(gaps, "loss above BF16's of the same batches, nats per token")
    if bf16:
        mean = np.mean(list(bf16.values()), axis=0)
        losses.plot(_percent_of(mean), mean, color=INK)
        losses.set_ylim(mean[-1] - 0.1, mean[-1] + 1.5)
    for name in dict.fromkeys(row.name for row in rows if row.name != BASELINE):
        differences = [
            curve - bf16[seed]
            for seed, curve in _curves(rows, name).items()
            if seed in bf16
        ]
        if differences:
            gap = np.mean(differences, axis=0)
            gaps.plot(_percent_of(gap), gap, linewidth=1.2, label=name)
    _leave_out_the_first_tenth(gaps)
    gaps.axhline(0, color=INK, linewidth=1.0)
    # Below the panels, because curves fill them.
    figure.legend(
        *gaps.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=3,
        frameon=False,
        labelcolor=INK,
        fontsize=8,
    )


def _percent_of(curve: np.ndarray) -> np.ndarray:
    """Return where each value of a curve is, in percent of the run."""
    return 100 * np.arange(1, len(curve) + 1) / len(curve)


def _curves(rows: Sequence[Row], name: str) -> dict[int, np.ndarray]:
    return {
        row.seed: np.asarray(row.curve)
        for row in rows
        if row.name == name and row.curve
    }


def _name_axes(axes: Any, title: str) -> None:
    axes.set_title(title, loc="left")
    axes.set_xlabel("% of the run")
    axes.grid(axis="y")


def _leave_out_the_first_tenth(gaps: Any) -> None:
    """Choose limits without the first tenth of a run, where differences are noise."""
    curves = [np.asarray(line.get_ydata()) for line in gaps.get_lines()]
    later = [curve[len(curve) // 10 :] for curve in curves]
    values = np.concatenate([*later, np.zeros(1)])
    gaps.set_ylim(values.min() - 0.003, values.max() + 0.003)


PICTURES = {
    "large-8-layers": Picture(
        "Bars: with stored weights the state of Llama-3-8B takes a third of BF16's and"
        " fits on a card of 80 GB, and a step takes less time",
        ("memory-llama-8b", "large-8-layers"),
        draw_whole_model,
    ),
    "large-curves": Picture(
        "Curves: the losses of 8 layers of Llama-3-8B's width with stored weights and"
        " in BF16, on the same batches",
        ("large-curves",),
        draw_curves,
    ),
    "large-curves-llama-1b": Picture(
        "Curves: the losses of Llama-3.2-1B with stored weights and in BF16 over 1,000"
        " steps, on the same batches",
        ("large-curves-llama-1b",),
        draw_curves,
    ),
    FROM_SCRATCH: Picture(
        "Curves: the training loss of a Llama of 6x640 from scratch in BF16, and by"
        " recipe how far above it other runs are",
        (FROM_SCRATCH,),
        draw_whole_runs,
    ),
}


def digest_of(name: str, results: Path = RESULTS) -> str | None:
    """Return the digest of the JSON files of a plot; None if one is missing."""
    digests = [found.digest for found in _sources(name, results)]
    if not digests:
        return None
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:16]


def _sources(name: str, results: Path) -> list[Result]:
    """Return the JSON files of a plot, or none of them if one is missing."""
    found = [read_result(source, results) for source in PICTURES[name].sources]
    present = [result for result in found if result is not None]
    return present if len(present) == len(found) else []


def save(name: str, path: Path, results: Path = RESULTS) -> None:
    """Write a plot with the digest of its JSON files, unless one of them is missing."""
    # Imported here: it costs a second, which tables need not pay.
    require("bench", "matplotlib")
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    digest = digest_of(name, results)
    if digest is None:
        return
    with rc_context(STYLE):
        figure = Figure(layout="constrained")
        PICTURES[name].draw(figure, *_sources(name, results))
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(
            path,
            format="svg",
            transparent=True,
            metadata={"Source": digest, "Date": None, "Creator": None},
        )


def read_source(path: Path) -> str | None:
    """Return the digest that `save` stored in an SVG; None without one."""
    if not path.exists():
        return None
    text = path.read_text(encoding="utf-8")
    found = re.search(r"<dc:source>(\w+)</dc:source>", text)
    return None if found is None else found[1]
