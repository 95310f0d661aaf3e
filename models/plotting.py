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
