"""Plots of a run as PNGs: loss curves, and heat maps of its observed numerics."""

from pathlib import Path
from typing import Any

import numpy as np

from tcfp_jax.monitor import OPERANDS

_ABSENT = object()


def plot_losses(path: Path, curves: dict[str, np.ndarray], *, title: str) -> None:
    """Write a plot of training losses (nats per byte, by step): each curve faint, with
    its running mean on top.

    Two curves usually coincide, so a second panel shows the first minus the second.
    Both saw the same batches, whose effect cancels in the difference.
    """
    # Imported here, because it takes a second that training without a plot can save.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5.2 if len(curves) == 2 else 4.2), layout="constrained")
    panels = figure.subplots(
        2 if len(curves) == 2 else 1,
        sharex=True,
        squeeze=False,
        height_ratios=_heights(curves),
    )
    axes = panels[0, 0]
    for index, (name, losses) in enumerate(curves.items()):
        _draw(
            axes,
            losses,
            color=f"C{index}",
            style="-" if index == 0 else "--",
            label=name,
        )
    axes.set(ylabel="training loss (nats per byte)", title=title)
    axes.legend()
    if len(curves) == 2:
        (first, ours), (second, theirs) = curves.items()
        _draw(
            panels[1, 0],
            ours - theirs,
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


def _heights(curves: dict[str, np.ndarray]) -> list[int]:
    return [3, 2] if len(curves) == 2 else [1]


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


# Numbers of an operand that are drawn: title, and limits of the colors, of which None
# is open.
_OF_OPERANDS: dict[str, tuple[str, tuple[float | None, float | None]]] = {
    "snr": ("SNR of {} (dB)", (None, None)),
    "underflow": ("underflow of {}", (0.0, None)),
    "saturation": ("saturation of {}", (0.0, None)),
}
_OF_UPDATES: dict[str, tuple[str, tuple[float | None, float | None]]] = {
    "moved": ("entries moved", (0.0, 1.0)),
    "edq": ("effective descent", (0.0, 1.0)),
    "stale": ("second moments at rest", (0.0, 1.0)),
}
# Colors span at least this much, so that noise does not look like a pattern.
_LEAST = {"snr": 10.0, "underflow": 0.01, "saturation": 0.01}


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
    from matplotlib.figure import Figure

    weights = [weight for report in reports.values() for weight in report.values()]
    operands = [name for name in OPERANDS if any(name in weight for weight in weights)]
    lines: list[Any] = [
        [((name, what), form) for name in operands]
        for what, form in _OF_OPERANDS.items()
    ]
    lines.append([((what,), form) for what, form in _OF_UPDATES.items()])
    found = [
        [(place, form, matrix_of(reports, place)) for place, form in line]
        for line in lines
    ]
    rows = max(len(names) for line in found for _, _, (names, _) in line)
    columns = max(map(len, found))
    figure = Figure(
        figsize=(5 * columns, 4 * (1.2 + 0.14 * rows)), layout="constrained"
    )
    steps = list(reports)
    for panels, line in zip(
        figure.subplots(len(lines), columns, squeeze=False), found, strict=True
    ):
        for axes in panels[len(line) :]:
            axes.set_axis_off()
        for axes, (place, (name, limits), (names, values)) in zip(
            panels, line, strict=False
        ):
            axes.set_title(name.format(place[0]), fontsize=9)
            _draw_map(
                figure,
                axes,
                steps,
                names,
                values,
                color_range(values, limits, _LEAST.get(place[-1], 0.0)),
            )
    figure.suptitle(title)
    figure.savefig(path, dpi=140)


def _draw_map(
    figure: Any,
    axes: Any,
    steps: list[int],
    names: list[str],
    values: np.ndarray,
    limits: Any,
) -> None:
    axes.tick_params(labelsize=6)
    if not names:
        axes.set_axis_off()
        return
    edges = [*range(len(steps) + 1)], [*range(len(names) + 1)]
    image = axes.pcolormesh(
        *edges, values, vmin=limits[0], vmax=limits[1], cmap="viridis"
    )
    figure.colorbar(image, ax=axes).ax.tick_params(labelsize=6)
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
    first, last = (float(known.min()), float(known.max())) if known.size else (0.0, 0.0)
    low, high = limits
    missing = max(
        0.0,
        least - ((last if high is None else high) - (first if low is None else low)),
    )
    if low is None:
        low, missing = first - (missing / 2 if high is None else missing), missing / 2
    return low, last + missing if high is None else high


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
            short = path.removesuffix("/kernel")
            entries = np.asarray(value, np.float64)
            named = (
                [(short, entries)] if entries.ndim == 0 else _numbered(short, entries)
            )
            for row, entry in named:
                rows.setdefault(row, [np.nan] * len(reports))[column] = float(entry)
    return list(rows), np.asarray(list(rows.values()), np.float64).reshape(
        len(rows), len(reports)
    )


def _numbered(name: str, entries: np.ndarray) -> list[tuple[str, Any]]:
    return [
        (f"{name} {'.'.join(map(str, place))}", entries[place])
        for place in np.ndindex(entries.shape)
    ]
