"""What rows of `benchmarks.convergence` say: ratios to BF16 from one start, noise floors, late switches, a plot."""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from benchmarks.common import Result, markdown_table
from benchmarks.fork_training import TASKS, Task
from benchmarks.variants import BASELINE, OTHER_BATCHES, RERUN, VARIANTS

Key = TypeVar("Key")  # a base or a seed

CURVE_POINTS = 50
_LOSSES = ("train_loss", "heldout_loss", "heldout_loss_bf16")
# What files of earlier versions call these.
_RENAMED = {
    "tensorwise_gradients_e4m3": "tensorwise_e4m3", "tcfp12_gradients_e5m2": "tcfp12_e5m2",
    "tcfp12_fast_gradients_e5m2": "tcfp12_fast_e5m2", "tcfp12_full_accumulation": "tcfp12_accumulation_full",
    "tcfp12_fast_full_accumulation": "tcfp12_fast_accumulation_full",
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One run.

    Attributes:
      task: "text", or "digits", images that an MLP of float weights learns.
      base: first digits of a digest of the base's losses, or "seed-0" of runs from scratch: those of one base compare.
      train_loss: mean over the last tenth of the steps, nats; per byte of text.
      heldout_loss, heldout_loss_bf16: nats, with the products of training, and with BF16 products of the same weights.
      accuracy: of the digits.
      bytes_per_weight: state of the kernels over their number, counted leaf by leaf.
      worst_leaf, worst_leaf_db: the stored kernel with the most noise at the start, and its signal-to-noise ratio; None
        where weights are float.
      milliseconds: of a step, by the wall clock; None where a part of the run was another process's.
      seconds: all of it, in this process.
      curve: training loss, averaged over fiftieths of the run.
      variant: the Python expression of it; of older files the recipe.
      library: digest of the libraries; None in older files.
      device: JAX's name of the chip; None in older files, whose header has it.
    """

    task: Task
    name: str
    seed: int
    base: str
    train_loss: float
    heldout_loss: float
    heldout_loss_bf16: float
    accuracy: float | None
    bytes_per_weight: float | None
    worst_leaf: str | None
    worst_leaf_db: float | None
    milliseconds: float | None
    seconds: float
    curve: list[float]
    variant: str
    library: str | None
    device: str | None = None


def curve(losses: Any) -> list[float]:
    """Averages of fiftieths.

    >>> curve([1.0, 2.0])
    [1.0, 2.0]
    """
    return [float(part.mean()) for part in np.array_split(losses, min(CURVE_POINTS, len(losses)))]


def read_row(row: dict[str, Any]) -> Row:
    """A row of JSON, which holds losses that were not finite as null; of earlier versions, too."""
    names = [field.name for field in dataclasses.fields(Row)]
    unknown = dict.fromkeys(names) | {
        "task": "text", "base": f"seed-{row['seed']}", "curve": [], "variant": str(row.get("recipe"))
    }  # fmt: skip
    found: dict[str, Any] = {**unknown, **{name: row[name] for name in names if name in row}}
    found["task"] = "text" if found["task"] == "gpt" else found["task"]
    found["name"] = _RENAMED.get(found["name"], found["name"])
    return Row(**{**found, **{name: math.nan for name in _LOSSES if found[name] is None}})


def rows_of(result: Result) -> list[Row]:
    """The rows of a JSON whose variants are known."""
    return [row for row in map(read_row, result.rows) if row.name in VARIANTS]


def of_today(rows: Sequence[Any], variants: Mapping[str, Any]) -> list[Any]:
    """The rows of variants that are still the same, to resume from; the others are named, as the file loses them."""
    kept = [row for row in rows if row.name in variants and row.variant == repr(variants[row.name])]
    if gone := dict.fromkeys(row.name for row in rows if row not in kept):
        print(f"--resume drops {len(rows) - len(kept)} rows of variants that are others now: {', '.join(gone)}")
    return kept


# Summaries ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """Perplexity ratios to `baselines` of one variant on one task, over the `pairs` of runs from the same base.

    `mean_ratio_bf16` has the variant's weights evaluated with BF16 products; `milliseconds` are of `timed_on(rows)`.
    """

    task: Task
    name: str
    pairs: int
    bytes_per_weight: float | None
    mean_ratio: float
    min_ratio: float
    max_ratio: float
    standard_error: float
    mean_ratio_bf16: float
    mean_heldout_loss: float
    milliseconds: float | None


def perplexity_ratio(loss: float, baseline: float) -> float:
    """`exp(loss - baseline)`; inf where one of them is not finite: a run that diverged must not look good.

    >>> perplexity_ratio(1.0, 1.0), perplexity_ratio(math.nan, 1.0)
    (1.0, inf)
    """
    return math.exp(loss - baseline) if math.isfinite(loss) and math.isfinite(baseline) else math.inf


def baselines(rows: list[Row], task: Task, name: str) -> dict[str, float]:
    """The held-out loss of BF16 by base, to which a variant is compared."""
    run_again = (BASELINE, RERUN)
    own, again = ({r.base: r.heldout_loss for r in rows if (r.task, r.name) == (task, bf16)} for bf16 in run_again)
    return compared_with(name, own, again)


def compared_with(name: str, own: Mapping[Key, float], again: Mapping[Key, float]) -> dict[Key, float]:
    """The losses that a variant is compared with, of BF16's `own` run and of its rerun.

    It is the mean of both, where there is a rerun: chance in a single baseline would move every variant of its base or
    seed alike. These two are compared with BF16's run alone.
    """
    if name in (BASELINE, RERUN):
        return dict(own)
    found = {key: (loss + again.get(key, loss)) / 2 for key, loss in own.items()}
    return {key: mean if math.isfinite(mean) else own[key] for key, mean in found.items()}


def ratios(rows: list[Row], task: Task, name: str) -> dict[str, float]:
    """The ratio of a variant by base, where the baseline was run, too."""
    baseline = baselines(rows, task, name)
    chosen = [row for row in rows if (row.task, row.name) == (task, name) and row.base in baseline]
    return {row.base: perplexity_ratio(row.heldout_loss, baseline[row.base]) for row in chosen}


def timed_on(rows: list[Row]) -> str | None:
    """The device of most of BF16's rows, which times of steps are of: those of two devices are not compared."""
    return statistics.mode([row.device for row in rows if row.name == BASELINE] or [None])


def summarize(rows: list[Row]) -> list[Summary]:
    """Of every variant that shares a base with the baseline, in the order of `VARIANTS`."""
    found, device = [], timed_on(rows)
    for task in TASKS:
        for name in VARIANTS:
            baseline = baselines(rows, task, name)
            paired = [row for row in rows if (row.task, row.name) == (task, name) and row.base in baseline]
            if not paired:
                continue
            values = list(ratios(rows, task, name).values())
            in_bf16 = [perplexity_ratio(row.heldout_loss_bf16, baseline[row.base]) for row in paired]
            times = [row.milliseconds for row in paired if row.milliseconds is not None and row.device == device]
            found.append(
                Summary(
                    task=task, name=name, pairs=len(paired), bytes_per_weight=paired[0].bytes_per_weight,
                    mean_ratio=statistics.fmean(values), min_ratio=min(values), max_ratio=max(values),
                    standard_error=standard_error(values), mean_ratio_bf16=statistics.fmean(in_bf16),
                    mean_heldout_loss=statistics.fmean(row.heldout_loss for row in paired),
                    milliseconds=min(times) if times else None,
                )
            )  # fmt: skip
    return found


def standard_error(values: list[float]) -> float:
    """The standard error of the mean; NaN of two values, which may agree by chance, or of one that is not finite."""
    if len(values) < 3 or not all(map(math.isfinite, values)):
        return math.nan
    return statistics.stdev(values) / math.sqrt(len(values))


def noise_floor(rows: list[Row], name: str = RERUN) -> float:
    """How far from 1 the ratios of BF16's own other run are at most; 0 where there is none."""
    return max((abs(value - 1) for value in ratios(rows, "text", name).values()), default=0.0)


@dataclass(frozen=True)
class Late:
    """What another recipe at the end of a run brings, over the bases that have both.

    Attributes:
      name, plain: the variant with it, and the one without.
      part: of the run.
      gap, gap_error, left, left_error: mean of the ratio less 1, without and with it, and their standard errors.
      closed: `(gap - left) / gap`; NaN where the gap is no larger than the noise floor.
      longer: mean of the time of a step over that without it, less 1; None where no base has both times.
    """

    name: str
    plain: str
    part: float
    gap: float
    gap_error: float
    left: float
    left_error: float
    closed: float
    longer: float | None


def late_switches(rows: list[Row]) -> list[Late]:
    """Of every variant with a `finish` that was run beside the same one without."""
    floor, found = noise_floor(rows), []
    times = {(row.name, row.base): row.milliseconds for row in rows if row.task == "text" and row.milliseconds}
    for name, variant in VARIANTS.items():
        if variant.finish is None:
            continue
        plain = next(other for other, one in VARIANTS.items() if one == variant.without_finish)
        before, after = ratios(rows, "text", plain), ratios(rows, "text", name)
        both = [base for base in after if base in before]
        if not both:
            continue
        without, with_it = [before[base] - 1 for base in both], [after[base] - 1 for base in both]
        gap, left = statistics.fmean(without), statistics.fmean(with_it)
        # Bases may be of several machines and libraries, whose times do not compare.
        timed = [times[name, b] / times[plain, b] for b in both if {(name, b), (plain, b)} <= times.keys()]
        found.append(
            Late(
                name, plain, variant.finish[0], gap, standard_error(without), left, standard_error(with_it),
                closed=(gap - left) / gap if floor < gap < math.inf else math.nan,
                longer=statistics.fmean(timed) - 1 if timed else None,
            )
        )  # fmt: skip
    return found


# Pages ----------------------------------------------------------------------------------------------------------------


def ratios_of(result: Result) -> dict[str, str]:
    """The ratio on text of every variant and its standard error, as tables show them."""
    return {s.name: _ratio_cell(s) for s in summarize(rows_of(result)) if s.task == "text"}


def table(result: Result) -> str:
    """A line a variant; columns of which nothing is known are left out. Then what late switches close, if any."""
    rows = rows_of(result)
    found = {(s.task, s.name): s for s in summarize(rows)}
    titles = [
        "variant", "bytes a weight", "held-out perplexity over BF16's", "range, runs", "evaluated in BF16", "ms",
        "MLP on digits",
    ]  # fmt: skip
    names = [name for name in VARIANTS if any((task, name) in found for task in TASKS)]
    lines = [_line(name, found.get(("text", name)), found.get(("digits", name))) for name in names]
    shown = [i for i in range(len(titles)) if any(line[i] != "–" for line in lines)]
    parts = [markdown_table([titles[i] for i in shown], [[line[i] for i in shown] for line in lines])]
    parts.append(" ".join([*_described(result.config, rows), *_floors(rows)]))
    if late := late_switches(rows):
        cells = [
            [
                f"`{each.name}`", f"{each.part:.0%}", _gap(each.gap, each.gap_error), _gap(each.left, each.left_error),
                f"{each.closed:.0%}" if math.isfinite(each.closed) else "within noise",
                "–" if each.longer is None else f"{each.longer:+.1%}",
            ] for each in late
        ]  # fmt: skip
        columns = ["late switch", "of the steps", "gap without", "gap with it", "closed", "time of a step"]
        parts.append(markdown_table(columns, cells))
    return "\n\n".join(parts)


def _line(name: str, text: Summary | None, digits: Summary | None) -> list[str]:
    number = lambda value, digits: "–" if value is None else f"{value:.{digits}f}"
    cells = ["–"] * 5
    if text is not None:
        spread = f"{text.min_ratio:.4f} to {text.max_ratio:.4f}, {text.pairs}"
        in_bf16 = f"{text.mean_ratio_bf16:.4f}" if math.isfinite(text.mean_ratio_bf16) else "–"
        cells = [
            number(text.bytes_per_weight, 2), _ratio_cell(text), spread, in_bf16, number(text.milliseconds, 1)
        ]  # fmt: skip
    meaning = VARIANTS[name].meaning
    return [f"`{name}`: {meaning}", *cells, "–" if digits is None else f"{_ratio_cell(digits)}, {digits.pairs}"]


def _ratio_cell(summary: Summary) -> str:
    if summary.name == BASELINE:
        return "1"
    if not math.isfinite(summary.mean_ratio):
        return "diverged"
    error = f" ± {summary.standard_error:.4f}" if math.isfinite(summary.standard_error) else ""
    return f"{summary.mean_ratio:.4f}{error}"


def _gap(mean: float, error: float) -> str:
    return f"{mean:.4f}" + (f" ± {error:.4f}" if math.isfinite(error) else "")


def _described(config: dict[str, Any], rows: list[Row]) -> list[str]:
    """Sentences of what was run, from the settings of any version."""
    model, steps = config["model"], config.get("fork_steps", config.get("steps"))
    model = model if isinstance(model, str) else f"{model['layers']}x{model['width']}"
    losses = [row.heldout_loss for row in rows if (row.task, row.name) == ("text", BASELINE)]
    found = []
    if losses:
        size = f"{config['batch']} × {config['sequence']} bytes" if "batch" in config else ""
        read = _text_of(config)
        rate = f"{config['learning_rate']:g}" if config.get("learning_rate") else "its own"
        if config.get("base_steps"):
            way = f"{config['base_steps']} steps in BF16 at a rate of {rate}, then {steps} to zero"
        else:
            last = config.get("final_fraction", 0.0)
            way = (
                f"{steps} steps from scratch, the rate up to {rate} and down to {f'{last:g} of it' if last else 'zero'}"
            )
        found.append(f"Model `{model}`{', ' if size else ''}{size}{' a step' if size else ''}{read}: {way}.")
        if "batch" in config:
            tokens = (config.get("base_steps", 0) + steps) * config["batch"] * config["sequence"]
            of_each = f", {tokens / config['parameters']:.1f} a parameter" if config.get("parameters") else ""
            found.append(f"That is {tokens / 1e6:,.1f} million bytes{of_each}.")
        found.append(f"BF16's runs end at {statistics.fmean(losses):.4f} nats (mean).")
    if any(row.task == "digits" for row in rows):
        found.append(f"The MLP has {config['digits_steps']} steps of digits.")
    if len({row.device for row in rows}) > 1:
        found.append(f"Times are those of one {timed_on(rows)}.")
    task = "text" if losses else "digits"
    bases, again = ({row.base for row in rows if (row.task, row.name) == (task, n)} for n in (BASELINE, RERUN))
    if both := len(bases & again):
        some = (
            ""
            if both == len(bases)
            else f", or BF16's run alone where there is none ({len(bases) - both} of {len(bases)}),"
        )
        found.append(f"The mean of BF16's run and its rerun{some} is what the others are compared with.")
    return [*found, "Ratios are means ± standard error over bases or seeds."]


def _text_of(config: dict[str, Any]) -> str:
    """What was read, how much of it, and its digest, which says whether another machine has the same."""
    if "text_read" not in config:
        return ""
    named = ", ".join(config.get("data") or ()) or "the Python sources of every installed package and of Python"
    return f" of {named} ({config['text_read'] / 1e6:,.0f} MB, digest {config['text']})"


def _floors(rows: list[Row]) -> list[str]:
    """A sentence of the noise of BF16's own other runs."""
    said = [
        f"`{name}` within {noise_floor(rows, name):.4f}"
        for name in (RERUN, OTHER_BATCHES)
        if ratios(rows, "text", name)
    ]
    return [f"Noise floors, of single runs: {', '.join(said)} of 1."] if said else []


def plot(figure: Any, result: Result) -> None:
    """A panel a task, a line of dots a variant: one dot a pair of runs, a bar at the mean."""
    rows = rows_of(result)
    finite = [s for s in summarize(rows) if s.name != BASELINE and math.isfinite(s.mean_ratio)]
    tasks = [task for task in TASKS if any(s.task == task for s in finite)]
    names = [name for name in VARIANTS if any(s.name == name for s in finite)]
    figure.set_size_inches(4.2 + 3.4 * len(tasks), 1.4 + 0.36 * len(names))
    panels = figure.subplots(1, len(tasks), sharey=True, squeeze=False)[0] if tasks else []
    for axes, task in zip(panels, tasks, strict=True):
        for i, name in enumerate(names):
            values = [value for value in ratios(rows, task, name).values() if math.isfinite(value)]
            color = "C7" if name in (RERUN, OTHER_BATCHES) else "C0"
            axes.plot(values, np.full(len(values), i), "o", color=color, alpha=0.5, markersize=4)
            if values:
                axes.plot([statistics.fmean(values)], [i], "|", color=color, markersize=14, markeredgewidth=2)
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.set_yticks(range(len(names)), names, fontsize=9)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.tick_params(axis="x", labelsize=8)
        axes.locator_params(axis="x", nbins=6)
        axes.set_title({"text": "real text", "digits": "MLP on digits"}[task], fontsize=10)
        axes.grid(axis="x", alpha=0.3)
    figure.suptitle("Held-out perplexity over that of BF16 from the same start; the bar is the mean", fontsize=10)
