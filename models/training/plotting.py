"""Plots of a run as PNGs: loss curves, and heat maps of its observed numerics."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tcfp_jax.monitor import OPERANDS

from ..extras import require

_ABSENT = object()


def plot_losses(path: Path, curves: dict[str, np.ndarray], *, title: str) -> None:
    """Write a plot of training losses (nats per token, by step): each curve faint, with
    its running mean on top.

    Two curves usually coincide, so a second panel shows the first minus the second.
    Both saw the same batches, whose effect cancels in the difference.
    """
    # Imported here, because it takes a second that training without a plot can save.
    require("train", "matplotlib")
    from matplotlib.figure import Figure

    heights = [3, 2] if len(curves) == 2 else [1]
    figure = Figure(figsize=(7, 3.2 + len(heights)), layout="constrained")
    panels = figure.subplots(
        len(heights), sharex=True, squeeze=False, height_ratios=heights
    )
    axes = panels[0, 0]
    for index, (name, losses) in enumerate(curves.items()):
        style = "-" if index == 0 else "--"
        _draw(axes, losses, color=f"C{index}", style=style, label=name)
    axes.set(ylabel="training loss (nats per token)", title=title)
    axes.legend()
    if len(curves) == 2:
        first, second = curves
        _draw(
            panels[1, 0],
            curves[first] - curves[second],
            color="C2",
            style="-",
            label=f"{first} minus {second}",
        )
        panels[1, 0].set_ylabel("difference (nats)")
        panels[1, 0].legend()
    panels[-1, 0].set_xlabel("step")
    figure.savefig(path, dpi=140)  # a bare Figure draws with Agg, without a display


def running_mean(losses: np.ndarray) -> tuple[np.ndarray, int]:
    """Return (mean of the last `width` steps, from step `width` on, and `width`), a
    fiftieth of the run.

    >>> [float(value) for value in running_mean(np.arange(3.0))[0]]
    [0.0, 1.0, 2.0]
    """
    width = max(1, len(losses) // 50)
    return np.convolve(losses, np.ones(width) / width, mode="valid"), width


def _draw(axes: Any, losses: np.ndarray, *, color: str, style: str, label: str) -> None:
    axes.plot(
        np.arange(1, len(losses) + 1), losses, color=color, alpha=0.25, linewidth=0.8
    )
    smooth, width = running_mean(losses)
    axes.plot(
        np.arange(width, len(losses) + 1),
        smooth,
        color=color,
        linestyle=style,
        linewidth=1.6,
        label=label,
    )
    axes.grid(alpha=0.3)


class Panel(NamedTuple):
    """One heat map.

    Attributes:
      place: Names of its number in a report, such as ("x", "snr").
      title: Text above it.
      limits: Limits of the colors, of which None is open.
      least: Least width of the colors, so that noise does not look like a pattern.
    """

    place: tuple[str, ...]
    title: str
    limits: tuple[float | None, float | None]
    least: float = 0.0


def panels_of(operands: Sequence[str]) -> list[list[Panel]]:
    """Return the lines of panels of some operands, and a last line of updates."""
    return [
        [Panel((x, "snr"), f"SNR of {x} (dB)", (None, None), 10.0) for x in operands],
        [
            Panel((x, "underflow"), f"underflow of {x}", (0.0, None), 0.01)
            for x in operands
        ],
        [
            Panel((x, "saturation"), f"saturation of {x}", (0.0, None), 0.01)
            for x in operands
        ],
        [
            Panel(("moved",), "entries moved", (0.0, 1.0)),
            Panel(("edq",), "effective descent", (0.0, 1.0)),
            Panel(("stale",), "second moments at rest", (0.0, 1.0)),
        ],
    ]


def plot_reports(path: Path, reports: dict[int, Any], *, title: str) -> None:
    """Write heat maps of the reports of a run over weights and steps.

    Each operand has a column of SNR, underflow and saturation. The last line is of
    updates. Unknown values are white.

    Raises:
      ValueError: there are no reports.
    """
    if not reports:
        raise ValueError(
            "no step was observed: the run is shorter than monitor says; observe more"
            " often"
        )
    require("train", "matplotlib")
    from matplotlib.figure import Figure

    seen: set[str] = set()
    for report in reports.values():
        seen.update(*report.values())
    lines = panels_of([name for name in OPERANDS if name in seen])
    columns = max(map(len, lines))
    figure = Figure(layout="constrained")
    axes = figure.subplots(len(lines), columns, squeeze=False)
    rows = 0
    for line, panels in enumerate(lines):
        for column in range(columns):
            names: list[str] = []
            if column < len(panels):
                panel = panels[column]
                names, values = matrix_of(reports, panel.place)
                axes[line, column].set_title(panel.title, fontsize=9)
            if names:
                _draw_map(axes[line, column], list(reports), names, values, panel)
            else:
                axes[line, column].set_axis_off()
            rows = max(rows, len(names))
    figure.set_size_inches(5 * columns, 4 * (1.2 + 0.14 * rows))
    figure.suptitle(title)
    figure.savefig(path, dpi=140)


def _draw_map(
    axes: Any, steps: list[int], names: list[str], values: np.ndarray, panel: Panel
) -> None:
    axes.tick_params(labelsize=6)
    low, high = color_range(values, panel.limits, panel.least)
    columns = range(len(steps) + 1)
    rows = range(len(names) + 1)
    image = axes.pcolormesh(columns, rows, values, vmin=low, vmax=high, cmap="viridis")
    axes.figure.colorbar(image, ax=axes).ax.tick_params(labelsize=6)
    shown = range(0, len(steps), max(1, len(steps) // 8))
    axes.set_xticks([i + 0.5 for i in shown], [str(steps[i]) for i in shown])
    axes.set_yticks([i + 0.5 for i in range(len(names))], names)
    axes.invert_yaxis()


def color_range(
    values: np.ndarray, limits: tuple[float | None, float | None], least: float
) -> tuple[float, float]:
    """Return the range of colors: limits if given, otherwise the range of the values,
    at least `least` wide.

    >>> color_range(np.array([31.5, 31.7, np.nan]), (None, None), 10.0)
    (26.6, 36.6)
    >>> color_range(np.array([0.0, 1e-6]), (0.0, None), 0.01)
    (0.0, 0.01)
    """
    known = values[np.isfinite(values)]
    first, last = (known.min(), known.max()) if known.size else (0.0, 0.0)
    low, high = limits
    begin = float(first) if low is None else low
    end = float(last) if high is None else high
    missing = max(0.0, least - (end - begin))
    if low is None and high is None:
        return begin - missing / 2, end + missing / 2
    if low is None:
        return begin - missing, end
    return (begin, end + missing) if high is None else (begin, end)


def matrix_of(
    reports: dict[int, Any], place: tuple[str, ...]
) -> tuple[list[str], np.ndarray]:
    """Return (names of rows, `[rows, steps]`) of one number of the reports; a stack has
    one row per layer.

    A weight without the number has no row. A value that is not known is NaN.

    >>> matrix_of({10: {"up": {"x": {"snr": [1.0, 2.0]}}}}, ("x", "snr"))
    (['up 0', 'up 1'], array([[1.],
           [2.]]))
    """
    rows: dict[str, list[float]] = {}
    for column, report in enumerate(reports.values()):
        for path, value in report.items():
            for name in place:
                value = value.get(name, _ABSENT) if isinstance(value, dict) else _ABSENT
            if value is _ABSENT:
                continue
            entries = np.asarray(value, np.float64)
            for index in np.ndindex(entries.shape):  # of a number, one empty index
                row = path.removesuffix("/kernel")
                if index:
                    row += f" {'.'.join(map(str, index))}"
                values = rows.setdefault(row, [np.nan] * len(reports))
                values[column] = float(entries[index])
    matrix = np.asarray(list(rows.values()), np.float64)
    return list(rows), matrix.reshape(len(rows), len(reports))
