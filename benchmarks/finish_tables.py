"""Tables of `benchmarks.finish`: differences of pairs, with their standard errors."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.convergence_tables import standard_error
from benchmarks.endings import ENDINGS, as_begun
from benchmarks.records import Result, markdown_table
from benchmarks.variants import BASELINE


@dataclass(frozen=True)
class Row:
    """One ending.

    Attributes:
      base: First digits of a digest of the losses before bases differ.
      train_loss: Mean over the last tenth of the steps, in nats per token.
      heldout_loss, heldout_loss_bf16: Nats per token with the products of the ending,
        and with BF16 products of the same weights.
      milliseconds: Wall clock of a step.
      seconds: Duration of the ending.
      library: Digest of the libraries.
      device: JAX's name of the chip.
    """

    name: str
    seed: int
    base: str
    train_loss: float
    heldout_loss: float
    heldout_loss_bf16: float
    milliseconds: float
    seconds: float
    library: str
    device: str

    @property
    def start(self) -> tuple[str, str]:
        """The common steps, and the library that goes on; runs compare if it is equal.

        Another library trains a base anew, and rounds otherwise on the way.
        """
        return self.base, self.library


def differences(
    rows: Sequence[Row], name: str, other: str, of: str = "heldout_loss"
) -> list[float]:
    """Return how much the losses of an ending are above those of another one, by seed.

    Runs of a seed that was trained again count once, by their mean: they have weights
    and batches in common.

    Args:
      rows: Rows of all endings.
      name: The ending.
      other: The other ending, whose loss is with its own products.
      of: The loss of the ending.
    """
    losses = {row.start: row.heldout_loss for row in rows if row.name == other}
    found: dict[int, list[float]] = {}
    for row in rows:
        if row.name == name and row.start in losses:
            above = getattr(row, of) - losses[row.start]
            found.setdefault(row.seed, []).append(above)
    return [statistics.fmean(of_seed) for of_seed in found.values()]


def table(result: Result) -> str:
    """Return the page's table: one line per ending."""
    rows = [Row(**row) for row in result.rows]
    titles = [
        "run and its end",
        "last part",
        "loss above BF16's, nats per token",
        "evaluated in BF16",
        "change by the end",
        "pairs",
        "step's time over the base's",
    ]
    names = [name for name in ENDINGS if any(row.name == name for row in rows)]
    lines = [_line(rows, name) for name in names]
    return f"{markdown_table(titles, lines)}\n\n{_described(result, rows)}"


def _line(rows: Sequence[Row], name: str) -> list[str]:
    ending = ENDINGS[name]
    begun = as_begun(ending.base)
    changes = differences(rows, name, begun)
    return [
        f"`{name}`: {ending.meaning}",
        f"{ending.percent} %",
        _mean(differences(rows, name, BASELINE)),
        _mean(differences(rows, name, BASELINE, "heldout_loss_bf16")),
        "–" if name == begun else _mean(changes),
        str(len(changes)),
        _time(rows, name, begun),
    ]


def _mean(found: list[float]) -> str:
    """Return a mean with its standard error, which needs three values."""
    if not found:
        return "–"
    mean = f"{statistics.fmean(found):+.4f}"
    error = standard_error(found)
    return mean if math.isnan(error) else f"{mean} ± {error:.4f}"


def _time(rows: Sequence[Row], name: str, begun: str) -> str:
    """Return how long steps take, compared on one device."""
    times: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        times.setdefault(row.device, {}).setdefault(row.name, []).append(
            row.milliseconds
        )
    ratios = [
        min(of_device[name]) / min(of_device[begun])
        for of_device in times.values()
        if name in of_device and begun in of_device
    ]
    return f"{statistics.fmean(ratios):.2f}" if ratios else "–"


def _described(result: Result, rows: Sequence[Row]) -> str:
    run = result.config
    losses = [row.heldout_loss for row in rows if row.name == BASELINE]
    tokens = run["batch"] * run["sequence"]
    together = (run["base_steps"] + run["steps"]) * tokens / 1e6
    begun = (
        f"{run['base_steps']} steps in BF16 at a constant rate, then {run['steps']}"
        " with the products of the line, to a rate of zero"
    )
    paired = (
        "All differences are of pairs that went on from one state with the same"
        " batches: above BF16's after the common steps, and by the end after the base."
        " ± is the standard error of the mean. Runs that differ from the first step on"
        " would be compared with ten times this error."
    )
    said = [
        f"Model `{run['model']}`: {begun}. A step has {run['batch']} ×"
        f" {run['sequence']} tokens, a run {together:.0f} million."
    ]
    if losses:
        said.append(f"BF16's runs end at {statistics.fmean(losses):.4f} nats (mean).")
    said.append(paired)
    return " ".join(said)
