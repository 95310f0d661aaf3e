"""Held-out loss of recipes and their variants against BF16, paired by seed: same initial weights, same batches.

    python -m benchmarks.convergence --json --seeds 3 --budget-seconds 500
    python -m benchmarks.convergence --json --resume --recipes bf16,tcfp12 --seeds 8

The perplexity ratio of a run is `exp(held-out loss - BF16's held-out loss of the same seed)`. Single runs prove
nothing: `bf16_rerun` is BF16 again with its initial weights perturbed by one part in a million, which shows how far
rounding alone moves a run (without the perturbation a run repeats bit for bit). JSON is written after every run, and
`--resume` keeps its rows.
"""

import argparse
import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from benchmarks import common, digits
from benchmarks.common import Result, markdown_table
from models.gpt import MODELS, GPTConfig
from models.train import RunResult, TrainConfig, corpus_of, preset
from models.train import run as train
from tcfp_jax.recipes import Recipe, recipe

NAME = "convergence"
Task = Literal["gpt", "digits"]
Run = tuple[Task, str, int]  # task, name of the variant, seed
TASKS: tuple[Task, ...] = ("gpt", "digits")
BASELINE, RERUN = "bf16", "bf16_rerun"
RERUN_JITTER = 1e-6
CURVE_POINTS = 50

VARIANTS: dict[str, Recipe] = {
    BASELINE: recipe("bf16"),
    RERUN: recipe("bf16"),
    "tcfp12": recipe("tcfp12"),
    "tcfp12_fast": recipe("tcfp12_fast"),
    "tensorwise": recipe("tensorwise"),
    "tcfp12_no_feedback": recipe("tcfp12", remainder="dropped"),
    "tcfp12_srr": recipe("tcfp12", remainder="stochastic"),
    "tcfp12_gradients_e5m2": recipe("tcfp12", gradient="float8_e5m2"),
    "tcfp12_gradients_e4m3": recipe("tcfp12", gradient="float8_e4m3fn"),
    "tcfp12_wgrad_fp8": recipe("tcfp12", wgrad="full"),
    "tcfp12_wgrad_bf16": recipe("tcfp12", wgrad="bf16"),
    "tcfp12_fast_no_feedback": recipe("tcfp12_fast", remainder="dropped"),
    "tcfp12_fast_gradients_e5m2": recipe("tcfp12_fast", gradient="float8_e5m2"),
    "tcfp12_fast_gradients_e4m3": recipe("tcfp12_fast", gradient="float8_e4m3fn"),
    "tensorwise_gradients_e4m3": recipe("tensorwise", gradient="float8_e4m3fn"),
}
for _base in ("tcfp12", "tcfp12_fast"):
    for _kind in ("fast", "full"):
        _in_fp8 = [how for how in ("forward", "dgrad", "wgrad") if getattr(recipe(_base), how) != "bf16"]
        VARIANTS[f"{_base}_{_kind}_accumulation"] = recipe(_base, **dict.fromkeys(_in_fp8, _kind))
DEFAULT_RECIPES = (BASELINE, RERUN, "tcfp12", "tcfp12_fast", "tensorwise", "tcfp12_no_feedback", "tcfp12_srr")


@dataclass(frozen=True)
class Config:
    """What a run was asked for; runs of other `settings` are not comparable, so `--resume` refuses them.

    Attributes:
      model, steps: of the GPT task.
      learning_rate, final_fraction: its peak, and the part of it where the schedule ends.
      heldout_windows: windows of its evaluation.
      digits_steps: of the digits task.
      rerun_jitter: relative deviation of the perturbation of `bf16_rerun`.
      text: first digits of the digest of the GPT's text, which is this machine's standard library.
      jax: version.
      overrides: other fields of `models.train.TrainConfig`, of a smoke run.
      runs, budget_seconds: what is wanted, and when no run starts any more.
      resume: the JSON whose runs are kept.
    """

    model: str = "small"
    steps: int = 1000
    learning_rate: float = preset("small").learning_rate
    final_fraction: float = preset("small").final_fraction
    heldout_windows: int = 1024
    digits_steps: int = 400
    rerun_jitter: float = RERUN_JITTER
    text: str = ""
    jax: str = jax.__version__
    overrides: dict[str, Any] = field(default_factory=dict, compare=False)
    runs: tuple[Run, ...] = field(default=(), compare=False)
    budget_seconds: float = field(default=math.inf, compare=False)
    resume: str | None = field(default=None, compare=False)

    @property
    def settings(self) -> dict[str, Any]:
        """What the numbers of a run depend on."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.compare}


@dataclass(frozen=True)
class Row:
    """One run.

    Attributes:
      train_loss: mean over the last tenth of the steps, nats; per byte for the GPT.
      heldout_loss, heldout_perplexity: nats and its exponential, with the products of training.
      heldout_loss_bf16: of the same trained parameters with BF16 products.
      accuracy: of the digits task.
      curve: training loss, averaged over fiftieths of the run.
      recipe: the Python expression of it; older files have its fields.
      library: digest of the libraries at that run, see `benchmarks.common.Header`; None in older files.
    """

    task: Task
    name: str
    seed: int
    train_loss: float
    heldout_loss: float
    heldout_perplexity: float
    heldout_loss_bf16: float
    accuracy: float | None
    seconds: float
    curve: list[float]
    recipe: str | dict[str, Any]
    library: str | None = None


@dataclass(frozen=True)
class Summary:
    """Perplexity ratios to BF16 of one variant on one task, over the seeds that both have run."""

    task: Task
    name: str
    seeds: int
    mean_ratio: float
    min_ratio: float
    max_ratio: float
    standard_error: float
    mean_ratio_bf16: float
    mean_heldout_loss: float
    mean_train_loss: float


def measure_one(task: Task, name: str, seed: int, config: Config) -> Row:
    """Train and evaluate one variant."""
    started, chosen = time.perf_counter(), VARIANTS[name]
    got: digits.DigitsResult | RunResult
    jitter = config.rerun_jitter if name == RERUN else 0.0
    if task == "digits":
        got = digits.run(digits.DigitsConfig(chosen, steps=config.digits_steps, seed=seed, initial_jitter=jitter))
        accuracy: float | None = got.heldout_accuracy
    else:
        run = dataclasses.replace(_train_config(config), recipe=chosen, seed=seed, initial_jitter=jitter)
        got, accuracy = train(run), None
    losses, heldout = got.train_loss, got.heldout_loss
    return Row(
        task=task,
        name=name,
        seed=seed,
        train_loss=float(np.mean(losses[-max(1, len(losses) // 10) :])),
        heldout_loss=heldout,
        heldout_perplexity=math.exp(heldout) if heldout < 700 else math.inf,
        heldout_loss_bf16=got.heldout_loss_bf16,
        accuracy=accuracy,
        seconds=time.perf_counter() - started,
        curve=[float(part.mean()) for part in np.array_split(losses, min(CURVE_POINTS, len(losses)))],
        recipe=repr(chosen),
        library=_library(),
    )


@functools.cache
def _library() -> str:
    return common.library_digest()


def measure(config: Config) -> Iterator[Row]:
    """The runs that are kept, then the wanted ones that they lack, until the budget is spent."""
    kept = [] if config.resume is None else read_rows(Path(config.resume), config)
    yield from kept
    done = {(row.task, row.name, row.seed) for row in kept}
    wanted = [run for run in config.runs if run not in done]
    started, longest = time.perf_counter(), 0.0
    for index, run in enumerate(wanted):
        if time.perf_counter() - started + longest > config.budget_seconds:
            print(f"budget of {config.budget_seconds:g} s: {len(wanted) - index} of {len(wanted)} runs left undone")
            break
        row = measure_one(*run, config)
        longest = max(longest, row.seconds)
        print(f"{run[0]} {run[1]} seed {run[2]}: held-out {row.heldout_loss:.4f}, {row.seconds:.1f} s", flush=True)
        yield row


def _train_config(config: Config) -> TrainConfig:
    base = preset(
        config.model, steps=config.steps, heldout_windows=config.heldout_windows,
        learning_rate=config.learning_rate, final_fraction=config.final_fraction,
    )  # fmt: skip
    return dataclasses.replace(base, **config.overrides)


def summarize(rows: list[Row]) -> list[Summary]:
    """Paired ratios of every variant that shares a seed with the baseline, in the order of `VARIANTS`.

    `mean_ratio_bf16` has the variant's parameters evaluated with BF16 products.
    """
    baseline = {(row.task, row.seed): row.heldout_loss for row in rows if row.name == BASELINE}
    found = []
    for task in TASKS:
        for name in VARIANTS:
            paired = [r for r in rows if (r.task, r.name) == (task, name) and (r.task, r.seed) in baseline]
            if not paired:
                continue
            ratios = [perplexity_ratio(row.heldout_loss, baseline[row.task, row.seed]) for row in paired]
            in_bf16 = [perplexity_ratio(row.heldout_loss_bf16, baseline[row.task, row.seed]) for row in paired]
            error = statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else math.nan
            found.append(
                Summary(
                    task=task, name=name, seeds=len(ratios), mean_ratio=statistics.fmean(ratios),
                    min_ratio=min(ratios), max_ratio=max(ratios), standard_error=error,
                    mean_ratio_bf16=statistics.fmean(in_bf16),
                    mean_heldout_loss=statistics.fmean(row.heldout_loss for row in paired),
                    mean_train_loss=statistics.fmean(row.train_loss for row in paired),
                )
            )  # fmt: skip
    return found


def perplexity_ratio(loss: float, baseline: float) -> float:
    """`exp(loss - baseline)`; inf where one of them is not finite: a run that diverged must not look good.

    >>> perplexity_ratio(1.0, 1.0), perplexity_ratio(math.nan, 1.0)
    (1.0, inf)
    """
    return math.exp(loss - baseline) if math.isfinite(loss) and math.isfinite(baseline) else math.inf


def read_rows(path: Path, config: Config) -> list[Row]:
    """Rows of an earlier run with the same settings, of recipes that are still the same; none if there is no file.

    Raises:
      ValueError: the file is of other settings.
    """
    rows = map(read_row, common.rows_to_resume(path, config.settings))
    return [row for row in rows if row.name in VARIANTS and row.recipe == repr(VARIANTS[row.name])]


def read_row(row: dict[str, Any]) -> Row:
    """A row of JSON, which holds losses that were not finite as null; fields that rows no longer have are dropped."""
    losses = ("train_loss", "heldout_loss", "heldout_perplexity", "heldout_loss_bf16")
    diverged = {name: math.nan for name in losses if row[name] is None}
    known = {field.name for field in dataclasses.fields(Row)}
    return Row(**{**{name: value for name, value in row.items() if name in known}, **diverged})


def add_options(parser: argparse.ArgumentParser) -> None:
    """Variants, tasks, seeds, sizes, and when to stop."""
    parser.add_argument("--recipes", default=",".join(DEFAULT_RECIPES), help=f"of {', '.join(VARIANTS)}")
    parser.add_argument("--tasks", default="gpt,digits", help="gpt, digits or both (default)")
    parser.add_argument("--seeds", type=int, default=3, help="how many (default: 3)")
    parser.add_argument("--first-seed", type=int, default=0, help="(default: 0)")
    parser.add_argument("--steps", type=int, default=Config.steps, help=f"of the GPT (default: {Config.steps})")
    parser.add_argument("--learning-rate", type=float, default=None, help="of the GPT (default: the model's own)")
    parser.add_argument("--final-fraction", type=float, default=None, help="of it, at the last step")
    parser.add_argument("--digits-steps", type=int, default=Config.digits_steps, help="of the MLP")
    parser.add_argument("--model", choices=list(MODELS), default=Config.model, help=f"(default: {Config.model})")
    parser.add_argument("--budget-seconds", type=float, default=math.inf, help="start no run that may end after this")
    parser.add_argument("--resume", action="store_true", help="keep the runs in the JSON file and do those it lacks")


def configure(options: argparse.Namespace) -> Config:
    """The settings of a command line.

    Raises:
      ValueError: unknown names; no baseline; or nothing to resume.
    """
    if options.resume and options.path is None:
        raise ValueError("--resume continues a JSON file, so it needs --json or --out")
    names = common.chosen_of("recipes", options.recipes, tuple(VARIANTS))
    tasks = common.chosen_of("tasks", options.tasks, TASKS)
    if options.smoke:
        names, options.seeds, micro = (BASELINE, "tcfp12"), 1, GPTConfig(layers=1, width=32, heads=2, context=32)
        overrides = {"model": micro, "batch": 2, "sequence": 32, "corpus_bytes": 1_000_000, "steps_per_call": 2}
        config = Config(model="tiny", steps=4, heldout_windows=8, digits_steps=20, overrides=overrides)
    else:
        usual, given = preset(options.model), ("learning_rate", "final_fraction")
        rates = {n: getattr(usual if getattr(options, n) is None else options, n) for n in given}
        config = Config(model=options.model, steps=options.steps, digits_steps=options.digits_steps, **rates)
    if BASELINE not in names and not options.resume:
        raise ValueError(f"--recipes must contain {BASELINE}, to which the others are compared, or --resume a file")
    # Seeds outermost, so that whatever the budget stops, the finished seeds are complete pairs.
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    runs = tuple((task, name, seed) for seed in seeds for task in tasks for name in names)
    return dataclasses.replace(
        config, text=corpus_of(_train_config(config)).digest[:12], runs=runs, budget_seconds=options.budget_seconds,
        resume=str(options.path) if options.resume else None,
    )  # fmt: skip


def show(rows: list[Row]) -> None:
    """Print what the rows say of each variant."""
    columns = ("name", "task", "seeds", "mean_ratio", "min_ratio", "max_ratio", "standard_error", "mean_ratio_bf16")
    common.print_rows(summarize(rows), *columns, "mean_heldout_loss", "mean_train_loss")


def summaries(result: Result) -> dict[tuple[str, str], Summary]:
    """What a JSON says of each task and variant."""
    rows = [read_row(row) for row in result.rows if row["name"] in VARIANTS]
    return {(s.task, s.name): s for s in summarize(rows)}


def table(result: Result) -> str:
    """A line a variant, a column a task."""
    found, config = summaries(result), result.config
    tasks = [task for task in TASKS if any(key[0] == task for key in found)]
    names = [name for name in VARIANTS if any((task, name) in found for task in tasks)]
    lines = [[f"`{name}`", *(_cell(found.get((task, name))) for task in tasks)] for name in names]
    last = config["learning_rate"] * config["final_fraction"]
    titles = {
        "gpt": f"GPT `{config['model']}`, {config['steps']} steps, rate {config['learning_rate']:g} to {last:g}",
        "digits": f"MLP, {config['digits_steps']} steps of digits",
    }
    return (
        f"{markdown_table(['held-out perplexity over BF16', *(titles[task] for task in tasks)], lines)}\n\n"
        f"`{RERUN}` is BF16 with its initial weights perturbed by {config['rerun_jitter']:g}."
    )


def _cell(summary: Summary | None) -> str:
    if summary is None:
        return "–"
    if not math.isfinite(summary.mean_ratio):
        return f"diverged ({summary.seeds})"
    if summary.name == BASELINE:
        return f"1 ({summary.mean_heldout_loss:.4f} nats, {summary.seeds})"
    spread = f"{summary.min_ratio:.4f} to {summary.max_ratio:.4f}, {summary.seeds}"
    return f"{ratio_of(summary)} ({spread}); {summary.mean_ratio_bf16:.4f}"


def ratio_of(summary: Summary) -> str:
    """The mean and its standard error."""
    return f"{summary.mean_ratio:.4f} ± {summary.standard_error:.4f}"


def plot(figure: Any, result: Result) -> None:
    """A panel a task, a line of dots a variant: one dot a seed, a bar at the mean."""
    rows, found = [read_row(row) for row in result.rows if row["name"] in VARIANTS], summaries(result)
    tasks = list(dict.fromkeys(task for task, _ in found))
    names = [name for name in VARIANTS if name != BASELINE and any((task, name) in found for task in tasks)]
    baseline = {(row.task, row.seed): row.heldout_loss for row in rows if row.name == BASELINE}
    figure.set_size_inches(4.2 + 3.4 * len(tasks), 1.4 + 0.36 * len(names))
    for axes, task in zip(np.atleast_1d(figure.subplots(1, len(tasks), sharey=True)), tasks, strict=True):
        for i, name in enumerate(names):
            paired = [row for row in rows if (row.task, row.name) == (task, name) and (task, row.seed) in baseline]
            ratios = np.exp([row.heldout_loss - baseline[row.task, row.seed] for row in paired])
            color = "C7" if name == RERUN else "C0"
            axes.plot(ratios, np.full(len(ratios), i), "o", color=color, alpha=0.5, markersize=4)
            if len(ratios):
                axes.plot([ratios.mean()], [i], "|", color=color, markersize=14, markeredgewidth=2)
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.set_yticks(range(len(names)), names, fontsize=9)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.tick_params(axis="x", labelsize=8)
        axes.locator_params(axis="x", nbins=6)
        axes.set_title({"gpt": "GPT on real text", "digits": "MLP on digits"}[task], fontsize=10)
        axes.grid(axis="x", alpha=0.3)
    figure.suptitle("Held-out perplexity over that of BF16 with the same seed; the bar is the mean", fontsize=10)


main = functools.partial(common.main, NAME)

if __name__ == "__main__":
    common.command(NAME)
