"""Perplexity ratios of the rows of `benchmarks.convergence` to BF16 from the same
start: summaries and tables.
"""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import Result, markdown_table
from benchmarks.variants import BASELINE, OTHER_BATCHES, RERUN, VARIANTS
from models.text import HELDOUT_PARTS, bits_per_byte

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
    curve = tuple(math.nan if loss is None else loss for loss in row.get("curve", ()))
    # of older files
    given = {
        name: value for name, value in row.items() if name not in ("task", "accuracy")
    }
    return Row(
        **{
            **given,
            **{name: math.nan for name in _LOSSES if row[name] is None},
            "curve": curve,
        }
    )


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
    """Return `exp(loss - baseline)`; inf if one of them is not finite, so that a run
    that diverged looks bad.

    >>> perplexity_ratio(1.0, 1.0), perplexity_ratio(math.nan, 1.0)
    (1.0, inf)
    """
    return (
        math.exp(loss - baseline)
        if math.isfinite(loss) and math.isfinite(baseline)
        else math.inf
    )


def baselines(rows: list[Row], name: str, of: str = "heldout_loss") -> dict[str, float]:
    """Return the loss by base that a variant is compared with.

    It is the mean of BF16's run and its rerun if there is one, because chance in a
    single baseline would move every variant of its base alike. These two are compared
    with BF16's run alone.
    """
    own, again = (
        {r.base: getattr(r, of) for r in rows if r.name == n} for n in (BASELINE, RERUN)
    )
    if name in (BASELINE, RERUN):
        return own
    found = {base: (loss + again.get(base, loss)) / 2 for base, loss in own.items()}
    return {
        base: mean if math.isfinite(mean) else own[base] for base, mean in found.items()
    }


def ratios(rows: list[Row], name: str) -> dict[str, float]:
    """Return the ratio of a variant by base, for bases with a baseline."""
    baseline = baselines(rows, name)
    chosen = [row for row in rows if row.name == name and row.base in baseline]
    return {
        row.base: perplexity_ratio(row.heldout_loss, baseline[row.base])
        for row in chosen
    }


def timed_on(rows: list[Row]) -> str | None:
    """Return the device of most BF16 rows; times of steps on another device do not
    compare with them.
    """
    return statistics.mode(
        [row.device for row in rows if row.name == BASELINE] or [None]
    )


def summarize(rows: list[Row]) -> list[Summary]:
    """Return a summary of every variant that shares a base with the baseline, in the
    order of `VARIANTS`.
    """
    found, device = [], timed_on(rows)
    for name in VARIANTS:
        baseline = baselines(rows, name)
        paired = [row for row in rows if row.name == name and row.base in baseline]
        if not paired:
            continue
        values = list(ratios(rows, name).values())
        in_bf16 = [
            perplexity_ratio(row.heldout_loss_bf16, baseline[row.base])
            for row in paired
        ]
        of_train = baselines(rows, name, "train_loss")
        in_training = [
            perplexity_ratio(row.train_loss, of_train[row.base]) for row in paired
        ]
        times = [
            row.milliseconds
            for row in paired
            if row.milliseconds is not None and row.device == device
        ]
        found.append(
            Summary(
                name=name,
                pairs=len(paired),
                bytes_per_weight=paired[0].bytes_per_weight,
                mean_ratio=statistics.fmean(values),
                min_ratio=min(values),
                max_ratio=max(values),
                standard_error=standard_error(values),
                mean_ratio_bf16=statistics.fmean(in_bf16),
                mean_ratio_train=statistics.fmean(in_training),
                milliseconds=min(times) if times else None,
            )
        )
    return found


def standard_error(values: list[float]) -> float:
    """Return the standard error of the mean; NaN of two values, which may agree by
    chance, or if one is not finite.
    """
    if len(values) < 3 or not all(map(math.isfinite, values)):
        return math.nan
    return statistics.stdev(values) / math.sqrt(len(values))


def noise_floor(rows: list[Row], name: str = RERUN) -> float:
    """Return the largest distance from 1 of the ratios of BF16's own other run; 0
    without one.
    """
    return max((abs(value - 1) for value in ratios(rows, name).values()), default=0.0)


# Pages
# --------------------------------------------------------------------------------------


def ratios_of(result: Result) -> dict[str, str]:
    """Return the ratio on text, or nats a token of ids, and its standard error by
    variant, as tables show them.
    """
    nats = result.config.get("tokens") == "bpe"
    return {s.name: _ratio_cell(s, nats) for s in summarize(rows_of(result))}


def table(result: Result) -> str:
    """Return the page's table, one line per variant, without columns of which nothing
    is known.
    """
    rows = rows_of(result)
    found = {s.name: s for s in summarize(rows)}
    nats = result.config.get("tokens") == "bpe"
    over = (
        "held-out loss over BF16's, nats a token"
        if nats
        else "held-out perplexity over BF16's"
    )
    titles = [
        "variant",
        "bytes a weight",
        over,
        "range, runs",
        "evaluated in BF16",
        "in training",
        "ms",
    ]
    lines = [
        _line(summary, nats, nats and not result.config.get("base_steps"))
        for summary in found.values()
    ]
    shown = [i for i in range(len(titles)) if any(line[i] != "–" for line in lines)]
    said = [*_described(result.config, rows), *_floors(rows, nats)]
    cells = [[line[i] for i in shown] for line in lines]
    return f"{markdown_table([titles[i] for i in shown], cells)}\n\n{' '.join(said)}"


def _line(text: Summary, nats: bool, whole: bool) -> list[str]:
    number = lambda value, digits: "–" if value is None else f"{value:.{digits}f}"
    spread = (
        f"{_shown(text.min_ratio, nats)} to {_shown(text.max_ratio, nats)},"
        f" {text.pairs}"
    )
    shown = lambda ratio: _shown(ratio, nats) if math.isfinite(ratio) else "–"
    return [
        f"`{text.name}`: {VARIANTS[text.name].meaning}",
        number(text.bytes_per_weight, 2),
        _ratio_cell(text, nats),
        spread,
        shown(text.mean_ratio_bf16),
        shown(text.mean_ratio_train) if whole else "–",
        number(text.milliseconds, 1),
    ]


def _ratio_cell(summary: Summary, nats: bool = False) -> str:
    if summary.name == BASELINE:
        return "0" if nats else "1"
    if not math.isfinite(summary.mean_ratio):
        return "diverged"
    # The error of a logarithm near zero is that of its number.
    error = (
        f" ± {summary.standard_error:.4f}"
        if math.isfinite(summary.standard_error)
        else ""
    )
    return f"{_shown(summary.mean_ratio, nats)}{error}"


def _shown(ratio: float, nats: bool) -> str:
    return f"{math.log(ratio):+.4f}" if nats else f"{ratio:.4f}"


def _described(config: dict[str, Any], rows: list[Row]) -> list[str]:
    """Return sentences on what was run; files of older versions lack some of the
    settings.
    """
    losses = [row.heldout_loss for row in rows if row.name == BASELINE]
    found = []
    if losses:
        unit = "tokens" if config.get("tokens") == "bpe" else "bytes"
        size = (
            f", {config['batch']} × {config['sequence']} {unit} a step"
            if "batch" in config
            else ""
        )
        if config.get("base_steps"):
            rate = config["learning_rate"]
            way = (
                f"{config['base_steps']} steps in BF16 at a rate of {rate:g}, then"
                f" {config['steps']} to zero"
            )
        else:
            rate = (
                f"{config['learning_rate']:g}"
                if config.get("learning_rate")
                else "its peak"
            )
            way = (
                f"{config['steps']} steps from scratch, the rate up to {rate} and down"
                " to zero"
            )
        found.append(f"Model `{config['model']}`{size}{_text_of(config)}: {way}.")
        if "batch" in config:
            tokens = (
                (config.get("base_steps", 0) + config["steps"])
                * config["batch"]
                * config["sequence"]
            )
            of_each = (
                f", {tokens / config['parameters']:.1f} a parameter"
                if config.get("parameters")
                else ""
            )
            found.append(
                f"That is {tokens / 1e6:,.1f} million"
                f" {unit}{of_each}{_passes(config, tokens)}."
            )
        mean = statistics.fmean(losses)
        bits = (
            bits_per_byte(mean, config["bytes_per_token"])
            if config.get("tokens") == "bpe"
            else None
        )
        unit = "" if bits is None else f" per token of 32,768, {bits:.4f} bits per byte"
        found.append(f"BF16's runs end at {mean:.4f} nats{unit} (mean).")
    if len({row.device for row in rows}) > 1:
        found.append(f"Times are those of one {timed_on(rows)}.")
    bases, again = (
        {row.base for row in rows if row.name == n} for n in (BASELINE, RERUN)
    )
    if both := len(bases & again):
        alone = len(bases) - both
        some = (
            f", or BF16's run alone if there is none ({alone} of {len(bases)}),"
            if alone
            else ""
        )
        found.append(
            "The other variants are compared with the mean of BF16's run and its"
            f" rerun{some}.".replace(",.", ".")
        )
    kind = "Differences" if config.get("tokens") == "bpe" else "Ratios"
    return [*found, f"{kind} are means ± standard error over bases or seeds."]


def _passes(config: dict[str, Any], tokens: int) -> str:
    """Say how often a run on ids read its text, of which a tenth is held out."""
    if config.get("tokens") != "bpe":
        return ""
    # Older files do not count tokens.
    text = (
        config.get("tokens_read")
        or config["text_read"] * (1 - 1 / HELDOUT_PARTS) / config["bytes_per_token"]
    )
    return f" and {tokens / text:.1f} passes over the text"


def _text_of(config: dict[str, Any]) -> str:
    """Describe the text, its size, and its digest, by which another machine can tell if
    it has the same.
    """
    if "text_read" not in config:
        return ""
    data = ", ".join(Path(path).name for path in config.get("data") or ())
    named = data or "the Python sources of every installed package and of Python"
    return f" of {named} ({config['text_read'] / 1e6:,.0f} MB, digest {config['text']})"


def _floors(rows: list[Row], nats: bool) -> list[str]:
    """Return a sentence on the noise of BF16's own other runs."""
    said = [
        f"`{name}` within {noise_floor(rows, name):.4f}"
        for name in (RERUN, OTHER_BATCHES)
        if ratios(rows, name)
    ]
    of = "nats of BF16" if nats else "of 1"
    return [f"Noise floors, of single runs: {', '.join(said)} {of}."] if said else []
