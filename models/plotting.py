"""Loss curves of runs as a PNG."""

from pathlib import Path
from typing import Any

import numpy as np


def plot_losses(path: Path, curves: dict[str, np.ndarray], *, title: str) -> None:
    """Write a plot of training losses (nats per byte, by step) to `path`: each curve faint, its running mean on top.

    Of two curves, which usually lie on each other, a second panel shows the first minus the second, step by step: both
    saw the same batches, so what the batches do cancels.
    """
    # Imported here: it costs a second, which training without a plot need not pay.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5.2 if len(curves) == 2 else 4.2), layout="constrained")
    panels = figure.subplots(2 if len(curves) == 2 else 1, sharex=True, squeeze=False, height_ratios=_heights(curves))
    axes = panels[0, 0]
    for index, (name, losses) in enumerate(curves.items()):
        _draw(axes, losses, color=f"C{index}", style="-" if index == 0 else "--", label=name)
    axes.set(ylabel="training loss (nats per byte)", title=title)
    axes.legend()
    if len(curves) == 2:
        (first, ours), (second, theirs) = curves.items()
        _draw(panels[1, 0], ours - theirs, color="C2", style="-", label=f"{first} minus {second}")
        panels[1, 0].set_ylabel("difference (nats)")
        panels[1, 0].legend()
    panels[-1, 0].set_xlabel("step")
    figure.savefig(path, dpi=140)  # a bare Figure draws with Agg, without a display


def running_mean(losses: np.ndarray) -> tuple[np.ndarray, int]:
    """(mean over the last `width` steps of every step from `width` on, `width`): a fiftieth of the run.

    >>> [float(value) for value in running_mean(np.arange(3.0))[0]]
    [0.0, 1.0, 2.0]
    """
    width = max(1, len(losses) // 50)
    return np.convolve(losses, np.ones(width) / width, mode="valid"), width


def _heights(curves: dict[str, np.ndarray]) -> list[int]:
    return [3, 2] if len(curves) == 2 else [1]


def _draw(axes: Any, losses: np.ndarray, *, color: str, style: str, label: str) -> None:
    axes.plot(np.arange(1, len(losses) + 1), losses, color=color, alpha=0.25, linewidth=0.8)
    smooth, width = running_mean(losses)
    axes.plot(np.arange(width, len(losses) + 1), smooth, color=color, linestyle=style, linewidth=1.6, label=label)
    axes.grid(alpha=0.3)


# Of each panel: its title, where its numbers are in a report, and the range of its colors.
_PANELS: tuple[tuple[str, tuple[str, ...], tuple[float | None, float | None]], ...] = (
    *((f"SNR of {name} (dB)", (name, "snr"), (None, None)) for name in ("x", "w", "g")),
    *((f"underflow of {name}", (name, "underflow"), (0.0, None)) for name in ("x", "w", "g")),
    ("entries moved", ("moved",), (0.0, 1.0)),
    ("effective descent", ("edq",), (0.0, 1.0)),
    ("second moments at rest", ("stale",), (0.0, 1.0)),
)


def plot_reports(path: Path, reports: dict[int, Any], *, title: str) -> None:
    """Write heat maps over weights and steps of what steps said of their numerics, by step, to `path`.

    What is not known is white.

    Raises:
      ValueError: there are no reports.
    """
    if not reports:
        raise ValueError("no step was observed: the run is shorter than monitor says; observe more often")
    from matplotlib.figure import Figure

    found = [(name, matrix_of(reports, place), limits) for name, place, limits in _PANELS]
    rows = max(len(names) for _, (names, _), _ in found)
    figure = Figure(figsize=(15, 3 * (1.2 + 0.14 * rows)), layout="constrained")
    for axes, (name, (names, values), (low, high)) in zip(figure.subplots(3, 3).flat, found, strict=True):
        axes.set_title(name, fontsize=9)
        axes.tick_params(labelsize=6)
        if not names:
            axes.set_axis_off()
            continue
        edges = [*range(len(reports) + 1)], [*range(len(names) + 1)]
        image = axes.pcolormesh(*edges, values, vmin=low, vmax=high, cmap="viridis")
        figure.colorbar(image, ax=axes).ax.tick_params(labelsize=6)
        shown = range(0, len(reports), max(1, len(reports) // 8))
        axes.set_xticks([i + 0.5 for i in shown], [str(list(reports)[i]) for i in shown])
        axes.set_yticks([i + 0.5 for i in range(len(names))], names)
        axes.invert_yaxis()
    figure.suptitle(title)
    figure.savefig(path, dpi=140)


def matrix_of(reports: dict[int, Any], place: tuple[str, ...]) -> tuple[list[str], np.ndarray]:
    """(names of rows, `[rows, steps]`) of one number of reports; a stack of layers has a row for each.

    >>> matrix_of({10: {"up": {"x": {"snr": [1.0, 2.0]}}}}, ("x", "snr"))
    (['up 0', 'up 1'], array([[1.],
           [2.]]))
    """
    rows: dict[str, list[float]] = {}
    for column, report in enumerate(reports.values()):
        for path, value in report.items():
            for name in place:
                value = value.get(name) if isinstance(value, dict) else None
            short = path.removesuffix("/kernel")
            entries = np.asarray(value, np.float64)
            named = [(short, entries)] if entries.ndim == 0 else _numbered(short, entries)
            for row, entry in named:
                rows.setdefault(row, [np.nan] * len(reports))[column] = float(entry)
    known = {name: values for name, values in rows.items() if not np.isnan(values).all()}
    return list(known), np.asarray(list(known.values()), np.float64).reshape(len(known), len(reports))


def _numbered(name: str, entries: np.ndarray) -> list[tuple[str, Any]]:
    return [(f"{name} {'.'.join(map(str, place))}", entries[place]) for place in np.ndindex(entries.shape)]
