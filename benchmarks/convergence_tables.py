"""Perplexity ratios of `benchmarks.convergence` to BF16, or to the baseline of a study:
summaries and tables.
"""

import argparse
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.records import Result, markdown_table
from benchmarks.variants import OF_BF16, STUDIES, VARIANTS, Study

_LOSSES = ("train_loss", "heldout_loss", "heldout_loss_bf16")


@dataclass(frozen=True)
class Row:
    """One run.

    Attributes:
      base: First digits of a digest of the base's losses, or "seed-0" from scratch;
        runs of one base compare.
      train_loss: Mean over the last tenth of the steps, in nats; of text per token.
      heldout_loss, heldout_loss_bf16: Nats with the products of training, and with BF16
        products of the same weights.
      bytes_per_weight: State of the kernels divided by their number.
      milliseconds: Wall clock of a step.
      seconds: Duration of the whole run.
      library: Digest of the libraries; None in older files.
      device: JAX's name of the chip; None in older files, whose header has it.
      curve: Of a run from scratch, the mean training loss of each hundredth of its
        steps.
    """

    name: str
    seed: int
    base: str
    train_loss: float
    heldout_loss: float
    heldout_loss_bf16: float
    bytes_per_weight: float | None
    milliseconds: float | None
    seconds: float
    library: str | None
    device: str | None = None
    curve: tuple[float, ...] = ()


def read_row(row: Mapping[str, Any]) -> Row:
    """Return the row of JSON, which has null for a loss that is not finite."""
    given = dict(row)
    for name in ("task", "accuracy"):  # of older files
        given.pop(name, None)
    for name in _LOSSES:
        given[name] = _loss(row[name])
    given["curve"] = tuple(map(_loss, row.get("curve", ())))
    return Row(**given)


def _loss(value: float | None) -> float:
    return math.nan if value is None else value


def rows_of(result: Result) -> list[Row]:
    """Return the rows of a result whose variants are known."""
    return [row for row in map(read_row, result.rows) if row.name in VARIANTS]


# Summaries
# --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """Perplexity ratios of one variant, over the `pairs` of runs from the same base.

    `mean_ratio_bf16` is of the same weights with BF16 products, `mean_ratio_train` of
    the losses of the last tenth of the steps; `milliseconds` are those on
    `timed_on(rows)`.
    """

    name: str
    pairs: int
    bytes_per_weight: float | None
    mean_ratio: float
    min_ratio: float
    max_ratio: float
    standard_error: float
    mean_ratio_bf16: float
    mean_ratio_train: float
    milliseconds: float | None


def perplexity_ratio(loss: float, baseline: float) -> float:
    """Return `exp(loss - baseline)`; inf if one of them is not finite.

    >>> perplexity_ratio(1.0, 1.0), perplexity_ratio(math.nan, 1.0)
    (1.0, inf)
    """
    if not (math.isfinite(loss) and math.isfinite(baseline)):
        return math.inf
    return math.exp(loss - baseline)


def study_of(result: Result) -> Study:
    """Return the comparison that a result is of."""
    study = result.config.get("study")
    return STUDIES[study] if study else OF_BF16


def baselines(
    rows: list[Row], name: str, of: str, study: Study = OF_BF16
) -> dict[str, float]:
    """Return the loss by base that a variant is compared with.

    It is the mean of the baseline's run and its rerun if there is one, because chance
    in a single baseline would move every variant of its base alike. These two are
    compared with the baseline's run alone.
    """
    own = {row.base: getattr(row, of) for row in rows if row.name == study.baseline}
    again = {row.base: getattr(row, of) for row in rows if row.name == study.rerun}
    if name in (study.baseline, study.rerun):
        return own
    found = dict(own)
    for base, loss in own.items():
        mean = (loss + again.get(base, loss)) / 2
        if math.isfinite(mean):
            found[base] = mean
    return found


def ratios(
    rows: list[Row],
    name: str,
    of: str = "heldout_loss",
    over: str | None = None,
    study: Study = OF_BF16,
) -> dict[str, float]:
    """Return the ratio of a variant by base, for bases with a baseline.

    `of` and `over` are the losses of the variant and of the baseline.
    """
    baseline = baselines(rows, name, over or of, study)
    chosen = [row for row in rows if row.name == name and row.base in baseline]
    return {
        row.base: perplexity_ratio(getattr(row, of), baseline[row.base])
        for row in chosen
    }


def timed_on(rows: list[Row], study: Study = OF_BF16) -> str | None:
    """Return the device of most rows of the baseline; other devices' times do not
    compare.
    """
    found = [row.device for row in rows if row.name == study.baseline]
    return statistics.mode(found or [None])


def summarize(rows: list[Row], study: Study = OF_BF16) -> list[Summary]:
    """Return a summary of every variant that shares a base with the baseline."""
    names = VARIANTS if study == OF_BF16 else study.names
    found = (_summary(rows, name, study) for name in names)
    return [summary for summary in found if summary is not None]


def _summary(rows: list[Row], name: str, study: Study) -> Summary | None:
    found = ratios(rows, name, study=study)
    if not found:
        return None
    held = list(found.values())
    # Products in BF16 are those of BF16's own training alone.
    over = "heldout_loss" if study == OF_BF16 else None
    in_bf16 = ratios(rows, name, "heldout_loss_bf16", over, study)
    in_training = ratios(rows, name, "train_loss", study=study)
    paired = [row for row in rows if row.name == name and row.base in found]
    device = timed_on(rows, study)
    times = [
        row.milliseconds
        for row in paired
        if row.milliseconds is not None and row.device == device
    ]
    return Summary(
        name=name,
        pairs=len(paired),
        bytes_per_weight=paired[0].bytes_per_weight,
        mean_ratio=statistics.fmean(held),
        min_ratio=min(held),
        max_ratio=max(held),
        standard_error=standard_error(held),
        mean_ratio_bf16=statistics.fmean(in_bf16.values()),
        mean_ratio_train=statistics.fmean(in_training.values()),
        milliseconds=min(times, default=None),
    )


def standard_error(values: list[float]) -> float:
    """Return the standard error of the mean.

    It is NaN of two values, which may agree by chance, or if one is not finite.
    """
    if len(values) < 3 or not all(map(math.isfinite, values)):
        return math.nan
    return statistics.stdev(values) / math.sqrt(len(values))


# Pages
# --------------------------------------------------------------------------------------


def ratios_of(result: Result) -> dict[str, str]:
    """Return the ratio on text, or nats per token of ids, with its standard error."""
    show = _scale_of(result)
    study = study_of(result)
    found = summarize(rows_of(result), study)
    return {one.name: _ratio(one, show, study) for one in found}


def table(result: Result) -> str:
    """Return the page's table: one line per variant."""
    rows = rows_of(result)
    show = _scale_of(result)
    titles = [
        "variant",
        "bytes per weight",
        f"held-out {show.quantity}",
        "range, runs",
        "evaluated in BF16",
        "in training",
        "ms",
    ]
    study = study_of(result)
    lines = [_line(summary, show, study) for summary in summarize(rows, study)]
    return f"{markdown_table(titles, lines)}\n\n{_described(result, rows)}"


@dataclass(frozen=True)
class _Scale:
    """How a ratio of perplexities is shown: itself, or its logarithm in nats."""

    quantity: str
    in_nats: bool

    def __call__(self, ratio: float) -> str:
        if not math.isfinite(ratio):
            return "–"
        return f"{math.log(ratio):+.4f}" if self.in_nats else f"{ratio:.4f}"


def _scale_of(result: Result) -> _Scale:
    of = study_of(result).possessive
    if result.config.get("tokens") == "bpe":
        return _Scale(f"loss above {of}, nats per token", in_nats=True)
    return _Scale(f"perplexity divided by {of}", in_nats=False)


def _line(summary: Summary, show: _Scale, study: Study) -> list[str]:
    spread = f"{show(summary.min_ratio)} to {show(summary.max_ratio)}"
    return [
        f"`{summary.name}`: {VARIANTS[summary.name].meaning}",
        _number(summary.bytes_per_weight, 2),
        _ratio(summary, show, study),
        f"{spread}, {summary.pairs}",
        show(summary.mean_ratio_bf16),
        show(summary.mean_ratio_train),
        _number(summary.milliseconds, 1),
    ]


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _ratio(summary: Summary, show: _Scale, study: Study) -> str:
    if summary.name == study.baseline:
        return "0" if show.in_nats else "1"
    if not math.isfinite(summary.mean_ratio):
        return "diverged"
    if not math.isfinite(summary.standard_error):
        return show(summary.mean_ratio)
    error = summary.standard_error
    if show.in_nats:
        error /= summary.mean_ratio  # of the ratio's logarithm
    return f"{show(summary.mean_ratio)} ± {error:.4f}"


def _described(result: Result, rows: list[Row]) -> str:
    """Return sentences on the run; files of older versions lack some settings."""
    config = result.config
    study = study_of(result)
    losses = [row.heldout_loss for row in rows if row.name == study.baseline]
    said = [f"Model `{config['model']}`: {_protocol(config, study)}."]
    if "batch" in config:
        said.append(f"A step has {config['batch']} × {config['sequence']} tokens.")
    if "text_read" in config:
        size = f"{config['text_read'] / 1e6:,.0f} MB"
        said.append(f"The text has {size} (digest {config['text']}).")
    if losses:
        mean = f"{statistics.fmean(losses):.4f}"
        whose = study.possessive[0].upper() + study.possessive[1:]
        said.append(f"{whose} runs end at {mean} nats (mean).")
    if any(row.name == study.rerun for row in rows):
        reruns = ratios(rows, study.rerun, study=study).values()
        noise = max((abs(ratio - 1) for ratio in reruns), default=0.0)
        said.append(
            f"Other variants are compared with the mean of {study.possessive} run and"
            f" its rerun, which differ by up to {noise:.4f}."
        )
    return " ".join([*said, "± is a standard error over bases or seeds."])


def _protocol(config: dict[str, Any], study: Study) -> str:
    if config.get("base_steps"):
        way = "in BF16" if study == OF_BF16 else f"of `{study.baseline}`"
        return (
            f"{config['base_steps']} steps {way} at a constant rate, then"
            f" {config['steps']} to a rate of zero"
        )
    return f"{config['steps']} steps from scratch, to a rate of zero"


# Names of files
# --------------------------------------------------------------------------------------

_OWN_FILE = ("flags", *STUDIES)
USUAL_MODEL = {"fork": "12x768", "scratch": "small"}


def json_name(options: argparse.Namespace) -> str:
    """Return the name of a run's JSON: "convergence", with its parts behind it.

    The parts are "fork", the flags or a study, "bpe", and a model that is not the usual
    one.

    >>> chosen = dict(protocol="fork", model="llama-124m", smoke=False, variants=None)
    >>> json_name(argparse.Namespace(**chosen, tokens="bpe"))
    'convergence-fork-bpe-llama-124m'
    """
    parts = ["convergence"]
    if options.protocol == "fork":
        parts.append("fork")
    if options.variants in _OWN_FILE:
        parts.append(options.variants)
    if options.tokens == "bpe":
        parts.append("bpe")
    usual = (None, USUAL_MODEL[options.protocol])
    if options.model not in usual and not options.smoke:
        parts.append(options.model)
    return "-".join(parts)


def command_of(name: str, data: Sequence[str] = ()) -> str:
    """Return the command that writes a JSON of this name and text.

    >>> command_of("convergence-fork-llama-124m")
    'python -m benchmarks.convergence --protocol fork --model llama-124m --json'
    >>> command_of("convergence-flags")
    'python -m benchmarks.convergence --protocol scratch --variants flags --json'
    """
    _, *parts = name.split("-")
    protocol = "fork" if "fork" in parts else "scratch"
    words = ["python -m benchmarks.convergence --protocol", protocol]
    known = ("fork", "bpe", *_OWN_FILE)
    model = "-".join(part for part in parts if part not in known)
    if model:
        words += ["--model", model]
    words += [f"--variants {part}" for part in parts if part in _OWN_FILE]
    if "bpe" in parts:
        words.append("--tokens bpe")
    if data:
        words += ["--data", *(Path(path).name for path in data)]
    return " ".join([*words, "--json"])
