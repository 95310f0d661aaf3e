"""Plots of the pages: SVGs on a transparent ground, in colors that light and dark pages
show.
"""

import hashlib
import math
import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import large, memory
from benchmarks.common import RESULTS, Result, read_result
from benchmarks.convergence_tables import ratios, rows_of, standard_error
from benchmarks.variants import BASELINE, OTHER_BATCHES, RECOMMENDED, RERUN

INK, BLUE, ORANGE, GRAY = "#808080", "#3b82c4", "#e08214", "#a0a0a0"
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
# Rows of the plot of forks. The table has the others; emulated FP4 training, at 1.003,
# would squeeze these.
FORKED = {
    "BF16 again": {
        RERUN: "from almost equal weights",
        OTHER_BATCHES: "on other batches",
    },
    "Stored weights": {
        RECOMMENDED: "weights' gradients in BF16 (default)",
        "stored": "weights' gradients in float32",
        "stored_e5m2": "incoming gradients in E5M2",
        "stored_float32_moments": "moments in float32",
        "stored_feedback": "FP8 error, no random bits",
    },
    "Float32 weights": {
        "tcfp12_single": "tcfp12_single",
        "tensorwise": "tensorwise",
        "rowwise": "rowwise",
        "blockwise": "blockwise",
        "mxfp8": "mxfp8",
        "tcfp12_fast": "tcfp12_fast",
        "tcfp12": "tcfp12",
    },
}


WHOLE_RUNS = ("6x640",)  # layers and width of Llamas from scratch


@dataclass(frozen=True)
class Picture:
    """A plot: its text for readers who do not see it, its JSON files, and the function
    of them that draws it.
    """

    alt: str
    sources: tuple[str, ...]
    draw: Callable[..., None]


def draw_whole_model(figure: Any, counted: Result, timed: Result) -> None:
    """Draw the bytes of Llama-3-8B's state and the time of a step of its layers, stored
    and in BF16.
    """
    sizes, steps = counted.by("name"), timed.by("recipe")
    names = ["stored", "BF16, float32\nmaster weights"]
    card = timed.header["device"].removeprefix("NVIDIA ").split()[0]
    figure.set_size_inches(7.2, 1.9)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, title, values in (
        (
            panels[0],
            "state of Llama-3-8B, GB",
            [sizes[n]["state_bytes"] / 1e9 for n in (memory.STORED, BASELINE)],
        ),
        (
            panels[1],
            f"step of 8 of its layers, ms ({card})",
            [steps[n]["median_ms"] for n in ("stored", BASELINE)],
        ),
    ):
        bars = axes.barh(names, values, color=[BLUE, GRAY], height=0.62)
        axes.bar_label(bars, fmt="{:,.0f}", padding=4, color=INK)
        axes.set_title(title, loc="left")
        axes.set_xlim(0, 1.25 * max(values))
        axes.tick_params(left=False)
        axes.spines["left"].set_visible(False)
    panels[0].axvline(80, color=ORANGE, linewidth=1.2, linestyle="--")
    panels[0].text(82, 0.5, "one 80 GB card", color=ORANGE, va="center")


def draw_curves(figure: Any, result: Result) -> None:
    """Draw the losses of a long run of `benchmarks.large`: each step as a faint line,
    and means over ten steps.
    """
    figure.set_size_inches(7.2, 2.8)
    axes = figure.add_subplot()
    for row, color in zip(result.rows, (GRAY, BLUE, ORANGE), strict=False):
        losses = np.asarray(row["losses"])
        axes.plot(
            np.arange(1, len(losses) + 1), losses, color=color, linewidth=0.7, alpha=0.3
        )
        means = np.convolve(losses, np.full(10, 0.1), "valid")
        label = (
            f"{row['recipe']}, last {large.LAST} steps"
            f" {losses[-large.LAST :].mean():.3f}"
        )
        # BF16's line is wide, so that a curve that lies on it leaves it visible.
        width = 4.0 if row["recipe"] == BASELINE else 1.4
        axes.plot(
            np.arange(len(means)) + 5.5,
            means,
            color=color,
            linewidth=width,
            label=label,
        )
    axes.set_xlabel("step")
    axes.set_ylabel("nats per token")
    axes.grid(axis="y")
    axes.legend(frameon=False, labelcolor=INK)


def draw_forks(figure: Any, result: Result) -> None:
    """Draw groups of variants: a faint dot per pair of runs, the mean, and its standard
    error if there are three.
    """
    rows, place = rows_of(result), 0.0
    ticks: list[float] = []
    labels: list[str] = []
    figure.set_size_inches(7.2, 5)
    axes = figure.add_subplot()
    for (group, members), color in zip(
        FORKED.items(), (INK, BLUE, ORANGE), strict=True
    ):
        axes.text(
            0.0,
            place,
            group,
            color=color,
            weight="bold",
            va="center",
            transform=axes.get_yaxis_transform(),
        )
        for name, label in members.items():
            values = [
                value for value in ratios(rows, name).values() if math.isfinite(value)
            ]
            place += 1
            ticks, labels = [*ticks, place], [*labels, label]
            if not values:
                continue
            axes.plot(
                values,
                [place] * len(values),
                "o",
                color=color,
                alpha=0.5,
                markersize=4,
                markeredgewidth=0,
            )
            error = standard_error(values)
            axes.errorbar(
                [statistics.fmean(values)],
                [place],
                xerr=[error] if math.isfinite(error) else None,
                fmt="D",
                color=color,
                markersize=5,
                capsize=3,
                elinewidth=1.4,
            )
        place += 1.5
    axes.axvline(1.0, color=INK, linewidth=0.8)
    axes.set_yticks(ticks, labels)
    axes.set_ylim(place - 1, -0.7)
    axes.tick_params(left=False)
    axes.spines["left"].set_visible(False)
    axes.locator_params(axis="x", nbins=6)
    axes.ticklabel_format(axis="x", useOffset=False)
    axes.grid(axis="x")
    axes.set_xlabel(
        "held-out perplexity over BF16's from the same start:\nruns, their mean and its"
        " standard error"
    )


def draw_whole_runs(figure: Any, result: Result) -> None:
    """Draw the losses of runs from scratch, and their differences from BF16's of the
    same seed, as means over seeds.
    """
    rows = rows_of(result)
    bf16 = {row.seed: np.asarray(row.curve) for row in rows if row.name == BASELINE}
    figure.set_size_inches(7.2, 3.2)
    losses, gaps = figure.subplots(1, 2)
    for name in dict.fromkeys(row.name for row in rows):
        curves = {
            row.seed: np.asarray(row.curve)
            for row in rows
            if row.name == name and row.seed in bf16
        }
        if not curves:
            continue
        percent = (
            100
            * np.arange(1, len(curve := np.mean([*curves.values()], axis=0)) + 1)
            / len(curve)
        )
        (line,) = losses.plot(
            percent, curve, linewidth=1.0, color=INK if name == BASELINE else None
        )
        gap = np.mean([values - bf16[seed] for seed, values in curves.items()], axis=0)
        gaps.plot(percent, gap, linewidth=1.2, label=name, color=line.get_color())
    for axes, title in (
        (losses, "training loss, nats per token"),
        (gaps, "over BF16's of the same batches"),
    ):
        axes.set_title(title, loc="left")
        axes.set_xlabel("% of the run")
        axes.grid(axis="y")
    gaps.legend(frameon=False, labelcolor=INK, fontsize=7)
    last = np.asarray([row.curve[-1] for row in rows if row.curve])
    if len(last):
        losses.set_ylim(last.min() - 0.1, last.min() + 2.5)
        # The first twentieth is all noise; without BF16's rows there is no line.
        later = np.concatenate(
            [np.zeros(1), *(line.get_ydata()[5:] for line in gaps.get_lines())]
        )
        gaps.set_ylim(later.min() - 0.005, later.max() + 0.005)


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
    **{
        f"convergence-bpe-{size}": Picture(
            f"Curves: training losses of a Llama of {size} from scratch by recipe, and"
            " their distances from BF16's",
            (f"convergence-bpe-{size}",),
            draw_whole_runs,
        )
        for size in WHOLE_RUNS
    },
    "convergence-fork-llama-124m": Picture(
        "Dots and error bars: the perplexities of all recipes are about as close to"
        " BF16's as BF16 is when it runs again",
        ("convergence-fork-llama-124m",),
        draw_forks,
    ),
}


def digest_of(name: str, results: Path = RESULTS) -> str | None:
    """Return the digest of the JSON files of a plot; None if one is missing."""
    found = [read_result(source, results) for source in PICTURES[name].sources]
    return (
        None
        if None in found
        else hashlib.sha256("".join(r.digest for r in found if r).encode()).hexdigest()[
            :16
        ]
    )


def save(name: str, path: Path, results: Path = RESULTS) -> None:
    """Write a plot with the digest of its JSON files, unless one of them is missing."""
    # Imported here: it costs a second, which tables need not pay.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    if (digest := digest_of(name, results)) is None:
        return
    with rc_context(STYLE):
        figure = Figure(layout="constrained")
        PICTURES[name].draw(
            figure, *(read_result(source, results) for source in PICTURES[name].sources)
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(
            path,
            format="svg",
            transparent=True,
            metadata={"Source": digest, "Date": None, "Creator": None},
        )


def read_source(path: Path) -> str | None:
    """Return the digest that `save` stored in an SVG; None if there is no such file or
    field.
    """
    found = (
        re.search(r"<dc:source>(\w+)</dc:source>", path.read_text(encoding="utf-8"))
        if path.exists()
        else None
    )
    return None if found is None else found[1]
