"""Observation of a run's numerics every `config.monitor` steps: metrics, TensorBoard,
and a report to draw.

    {"step": 100, "loss": 4.2, "monitor": {"block_0/qkv/kernel": {
        "x": {"amax": ..., "underflow": ..., "saturation": ..., "snr": ...}, "w": ...,
        "g": ...,
        "moved": ..., "edq": ..., "stale": ...}, ...}}

x, w and g are the operands of a layer's products (`tcfp_jax.monitor.Reading`). `moved`
and `edq` describe the weight's update (`tcfp_jax.monitor.Quality`). `stale` is the
share of second moments that did not change. Layers that run as one stack have lists
with one entry per layer.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tcfp_jax import monitor
from tcfp_jax.inference import folders

from ..extras import require

# For each weight: a reading for each operand, and numbers of the update.
Report = dict[str, dict[str, Any]]


def merged_report(
    readings: Any,
    qualities: Mapping[str, monitor.Quality],
    stale: Mapping[str, jax.Array],
) -> Report:
    """Return one entry for each weight that a product reads."""
    report: Report = {
        path: {name: reading._asdict() for name, reading in of.items()}
        for path, of in readings.items()
    }
    for path, of in report.items():
        if path in qualities:
            of |= qualities[path]._asdict()
        if path in stale:
            of["stale"] = stale[path]
    return report


def written(report: Any) -> Any:
    """Return a report as JSON stores it: None for a value that is not finite.

    >>> written({"w": {"x": {"snr": jnp.asarray([1.5, jnp.nan])}}})
    {'w': {'x': {'snr': [1.5, None]}}}
    """
    if isinstance(report, Mapping):
        return {name: written(part) for name, part in report.items()}
    values = np.asarray(report, np.float64)
    if values.ndim:
        return [written(value) for value in values]
    # Six digits are enough to read, and keep the file small.
    return float(f"{float(values):.6g}") if math.isfinite(float(values)) else None


def read_reports(metrics: Path) -> dict[int, Any]:
    """Return the reports in a file of metrics, by step."""
    return {
        entry["step"]: entry["monitor"]
        for entry in read_metrics(metrics)
        if "monitor" in entry
    }


def read_metrics(metrics: Path) -> list[dict[str, Any]]:
    """Return the entries in a file of metrics."""
    with folders.opened(metrics.parent, metrics.name) as file:
        return list(map(json.loads, file))


def scalars(report: Any) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a written report by name, without None; layers of a stack
    are numbered.

    >>> list(scalars({"layers/up": {"x": {"snr": [1.5, None]}, "moved": 0.5}}))
    [('layers/up/x/snr/0', 1.5), ('layers/up/moved', 0.5)]
    """
    parts: Iterable[tuple[Any, Any]] = ()
    if isinstance(report, Mapping):
        parts = report.items()
    elif isinstance(report, list):
        parts = enumerate(report)
    elif report is not None:
        yield "", report
    for name, part in parts:
        for below, value in scalars(part):
            yield f"{name}/{below}".removesuffix("/"), value


class Board:
    """TensorBoard's file of a run, with losses and reports; without a folder it writes
    nothing.

    Args:
      folder: Folder of event files, or None.
      metrics: File of the finished steps. They are written anew, because a killed run
        lost the steps that its writer held back, and wrote steps that are repeated now.
        TensorBoard hides the earlier files.

    Raises:
      ImportError: tensorboardX is not installed.
    """

    def __init__(self, folder: Path | None, metrics: Path | None = None) -> None:
        self._writer: Any = None
        if folder is None:
            return
        self._writer = _writer_class()(str(folder), purge_step=1)
        if metrics is not None and metrics.exists():
            for entry in read_metrics(metrics):
                loss = math.nan if entry["loss"] is None else entry["loss"]
                rewards = {
                    name: np.array([value])
                    for name, value in entry.items()
                    if name.startswith("rewards/") and value is not None
                }
                losses = np.array([loss])
                self.add(entry["step"], losses, entry.get("monitor"), rewards)

    def add(
        self,
        first_step: int,
        losses: np.ndarray,
        report: Any = None,
        rewards: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Write the losses and rewards of steps from this one on, and the written
        report of the last.
        """
        if self._writer is None:
            return
        for name, values in {"loss": losses, **(rewards or {})}.items():
            for i, value in enumerate(values):
                self._writer.add_scalar(name, float(value), first_step + i)
        for name, value in scalars(report):
            self._writer.add_scalar(name, value, first_step + len(losses) - 1)

    def close(self) -> None:
        """Flush and close the file."""
        if self._writer is not None:
            self._writer.close()


def check_board() -> None:
    """Raise if TensorBoard's files cannot be written.

    Raises:
      ImportError: tensorboardX is not installed.
    """
    _writer_class()


def _writer_class() -> Any:
    require("monitor", "tensorboardX")
    from tensorboardX import SummaryWriter

    return SummaryWriter
