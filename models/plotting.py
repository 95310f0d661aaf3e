"""Loss curves of runs as a PNG."""

from pathlib import Path

import numpy as np


def plot_losses(path: Path, curves: dict[str, np.ndarray], *, title: str) -> None:
    """Write a plot of training losses (nats per byte, by step) to `path`: each curve faint, its running mean on top."""
    # Imported here: it costs a second, which training without a plot need not pay.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for index, (name, losses) in enumerate(curves.items()):
        steps = np.arange(1, len(losses) + 1)
        axes.plot(steps, losses, color=f"C{index}", alpha=0.25, linewidth=0.8)
        smooth, width = running_mean(losses)
        axes.plot(steps[width - 1 :], smooth, color=f"C{index}", linewidth=1.6, label=name)
    axes.set(xlabel="step", ylabel="training loss (nats per byte)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=140)


def running_mean(losses: np.ndarray) -> tuple[np.ndarray, int]:
    """(mean over the last `width` steps of every step from `width` on, `width`): a fiftieth of the run.

    >>> running_mean(np.arange(3.0))
    (array([0., 1., 2.]), 1)
    """
    width = max(1, len(losses) // 50)
    return np.convolve(losses, np.ones(width) / width, mode="valid"), width
