"""Whole runs from scratch, paired by seed: done in turn within a budget, and compared with the baseline of their seed.

A run and its baseline have the same initial weights and batches. Their ratio is `exp(loss - loss of the baseline)` of
held-out cross-entropies. `bf16_rerun` is BF16 from weights that are perturbed by one part in a million, which shows how
far rounding alone moves a run; the mean of both is the baseline of the others. Rows are kept by a benchmark's JSON, and
`--resume` does the runs that it lacks.
"""

import argparse
import dataclasses
import math
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import common
from benchmarks.common import Result, markdown_table
from benchmarks.convergence_tables import compared_with, of_today, perplexity_ratio, standard_error
from benchmarks.timing import compile_at_once
from benchmarks.variants import BASELINE, RERUN

MEANS = "Means over seeds ± standard error, compared with the mean of BF16's run and its rerun of that seed."
LOSSES = ("train_loss", "heldout_loss", "heldout_loss_bf16")


@dataclass(frozen=True)
class Row:
    """One run.

    Attributes:
      train_loss: nats, mean over the last tenth of the steps.
      heldout_loss, heldout_loss_bf16: nats, with the products of training, and with BF16 products of the same weights.
      accuracy: of a task that has one, with the products of training.
      seconds: all of it, compilation included.
      variant: the Python expression of it: rows of another one are not kept.
      library: digest of the libraries.
      device: JAX's name of the chip; None in older files, whose header has it.
    """

    name: str
    seed: int
    train_loss: float
    heldout_loss: float
    heldout_loss_bf16: float
    accuracy: float | None
    seconds: float
    variant: str
    library: str
    device: str | None = None


@dataclass(frozen=True)
class Wanted:
    """Runs: each of these names with each seed; none is started that may end after the budget.

    `resume` is the JSON whose rows are kept.
    """

    names: tuple[str, ...] = (BASELINE,)
    seeds: tuple[int, ...] = (0,)
    budget_seconds: float = math.inf
    resume: str | None = None


@dataclass(frozen=True, kw_only=True)
class Config:
    """What every benchmark of pairs is asked for; its own fields are those that numbers depend on."""

    wanted: Wanted = field(default=Wanted(), compare=False)

    @property
    def settings(self) -> dict[str, Any]:
        """What the numbers of a run depend on: `--resume` refuses a file of others."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.compare}


@dataclass(frozen=True)
class Summary:
    """Ratios to the baseline of one variant, over the seeds that both have run; and means of its own."""

    name: str
    seeds: int
    mean_ratio: float
    standard_error: float
    min_ratio: float
    max_ratio: float
    mean_ratio_bf16: float
    mean_loss: float
    mean_accuracy: float | None


# Runs -----------------------------------------------------------------------------------------------------------------


def runs(
    config: Config,
    variants: Mapping[str, Any],
    measure_one: Callable[[str, int], Row],
    compile_one: Callable[[str], object],
) -> Iterator[Row]:
    """The rows that are kept, then the wanted ones that they lack, seed after seed, until the budget is spent.

    Their programs are compiled before, several at once, because small runs take less time than one of them.

    Raises:
      RuntimeError: a variant failed; it was not tried with another seed, and the others were done first.
    """
    wanted, started, longest = config.wanted, time.perf_counter(), 0.0
    failed: set[str] = set()
    kept = [] if wanted.resume is None else read_rows(Path(wanted.resume), config.settings, variants)
    yield from kept
    done = {(row.name, row.seed) for row in kept}
    # Seeds outermost, so that whatever the budget stops, the finished seeds are complete pairs.
    left = [(name, seed) for seed in wanted.seeds for name in wanted.names if (name, seed) not in done]
    if started + wanted.budget_seconds > time.perf_counter():
        compile_at_once(compile_one, list(dict.fromkeys(name for name, _ in left)))
        print(f"compiled after {time.perf_counter() - started:.1f} s", flush=True)
    for number, (name, seed) in enumerate(left):
        if time.perf_counter() - started + longest > wanted.budget_seconds:
            print(f"budget of {wanted.budget_seconds:g} s: {len(left) - number} of {len(left)} runs left undone")
            break
        if name in failed:
            continue
        try:
            row = measure_one(name, seed)
        except Exception:
            traceback.print_exc()
            failed.add(name)
            continue
        longest = max(longest, row.seconds)
        accuracy = "" if row.accuracy is None else f", accuracy {row.accuracy:.4f}"
        print(f"{name}, seed {seed}: held-out {row.heldout_loss:.5f}{accuracy}, {row.seconds:.1f} s", flush=True)
        yield row
    if failed:
        raise RuntimeError(f"{len(failed)} variants failed, see above: {', '.join(sorted(failed))}")


def read_rows(path: Path, settings: dict[str, Any], variants: Mapping[str, Any]) -> list[Row]:
    """Rows of an earlier run with the same settings, of variants that are still the same; none if there is no file.

    Raises:
      ValueError: the file is of other settings.
    """
    return of_today([*map(read_row, common.rows_to_resume(path, settings))], variants)


def read_row(row: Mapping[str, Any]) -> Row:
    """A row of JSON, which holds losses that were not finite as null."""
    return Row(**{**row, **{name: math.nan for name in LOSSES if row[name] is None}})


def summarize(rows: Sequence[Row], names: Sequence[str]) -> list[Summary]:
    """Of every name that shares a seed with the baseline, in the order of the names."""
    found = []
    for name in names:
        paired, baseline = _paired(rows, name)
        if not paired:
            continue
        ratios = [perplexity_ratio(row.heldout_loss, baseline[row.seed]) for row in paired]
        in_bf16 = [perplexity_ratio(row.heldout_loss_bf16, baseline[row.seed]) for row in paired]
        error = standard_error(ratios)
        accuracies = [row.accuracy for row in paired if row.accuracy is not None]
        found.append(
            Summary(
                name, len(paired), statistics.fmean(ratios), error, min(ratios), max(ratios), statistics.fmean(in_bf16),
                statistics.fmean(row.heldout_loss for row in paired),
                statistics.fmean(accuracies) if accuracies else None,
            )
        )  # fmt: skip
    return found


def _paired(rows: Sequence[Row], name: str) -> tuple[list[Row], dict[int, float]]:
    """The runs of a variant whose seed has a baseline, and the loss of BF16 by seed that they are compared with."""
    own, again = ({row.seed: row.heldout_loss for row in rows if row.name == bf16} for bf16 in (BASELINE, RERUN))
    return [row for row in rows if row.name == name and row.seed in own], compared_with(name, own, again)


# The command and its tables -------------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser, variants: Mapping[str, Any], seeds: int) -> None:
    """Variants, seeds, and when to stop."""
    parser.add_argument("--variants", help=f"of {', '.join(variants)} (default: all)")
    parser.add_argument("--seeds", type=common.positive, default=seeds, help=f"how many (default: {seeds})")
    parser.add_argument("--first-seed", type=int, default=0, help="(default: 0)")
    parser.add_argument("--budget-seconds", type=float, default=math.inf, help="start no run that may end after this")
    parser.add_argument("--resume", action="store_true", help="keep the runs in the JSON file and do those it lacks")


def wanted_of(options: argparse.Namespace, variants: Mapping[str, Any]) -> Wanted:
    """The runs that a command line asks for.

    Raises:
      ValueError: unknown names, or no baseline.
    """
    names = common.chosen_of("variants", options.variants, tuple(variants))
    if BASELINE not in names and not options.resume:
        raise ValueError(f"--variants must contain {BASELINE}, to which the others are compared, or --resume a file")
    seeds = tuple(range(options.first_seed, options.first_seed + options.seeds))
    return Wanted(names, seeds, options.budget_seconds, str(options.path) if options.resume else None)


def show(rows: Sequence[Row], names: Sequence[str]) -> None:
    """Print what the rows say of each variant."""
    columns = [field.name for field in dataclasses.fields(Summary)]
    common.print_rows(summarize(rows, names), *columns)


def summaries(result: Result, names: Sequence[str]) -> list[Summary]:
    """What a JSON says of each variant."""
    return summarize([read_row(row) for row in result.rows if row["name"] in names], names)


def table(found: Sequence[Summary], meanings: Mapping[str, str], title: str) -> str:
    """A line a variant, with accuracies where the task has them."""
    accuracies = [] if found[0].mean_accuracy is None else ["accuracy"]
    lines = [
        [
            meanings[s.name], "1" if s.name == BASELINE else _ratio(s), f"{s.min_ratio:.4f} to {s.max_ratio:.4f}",
            f"{s.mean_ratio_bf16:.4f}", f"{s.mean_loss:.4f}", *(f"{s.mean_accuracy:.2%}" for _ in accuracies),
            str(s.seeds),
        ] for s in found
    ]  # fmt: skip
    titles = ["", title, "range", "evaluated in BF16", "held-out nats", *accuracies, "seeds"]
    return markdown_table(titles, lines)


def _ratio(summary: Summary) -> str:
    if not math.isfinite(summary.mean_ratio):
        return "diverged"
    error = f" ± {summary.standard_error:.4f}" if math.isfinite(summary.standard_error) else ""
    return f"{summary.mean_ratio:.4f}{error}"


def plot(figure: Any, result: Result, names: Sequence[str], title: str) -> None:
    """A line of dots a variant: one dot a seed, a bar at the mean."""
    rows = [read_row(row) for row in result.rows if row["name"] in names]
    shown = [s.name for s in summarize(rows, names) if s.name != BASELINE and math.isfinite(s.mean_ratio)]
    figure.set_size_inches(8, 1.4 + 0.36 * len(shown))
    axes = figure.subplots()
    for i, name in enumerate(shown):
        paired, baseline = _paired(rows, name)
        ratios = np.exp([row.heldout_loss - baseline[row.seed] for row in paired])
        color = "C7" if name == RERUN else "C0"
        axes.plot(ratios, np.full(len(ratios), i), "o", color=color, alpha=0.5, markersize=4)
        axes.plot([ratios.mean()], [i], "|", color=color, markersize=14, markeredgewidth=2)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(shown)), shown, fontsize=9)
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.grid(axis="x", alpha=0.3)
    figure.suptitle(title, fontsize=10)
