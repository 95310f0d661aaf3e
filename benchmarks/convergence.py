"""Held-out loss of recipes and their variants against BF16, paired by seed: same initial weights, same batches.

    python -m benchmarks.convergence --json --seeds 3 --budget-seconds 500
    python -m benchmarks.convergence --json --resume --recipes bf16,tcfp12 --seeds 8

The perplexity ratio of a run is `exp(held-out loss - BF16's held-out loss of the same seed)`. Single runs prove
nothing: `bf16_rerun` is BF16 again with its initial weights perturbed by one part in a million, which shows how far
rounding alone moves a run (without the perturbation a run repeats bit for bit). JSON is written after every run, and
`--resume` keeps its rows.
"""

import dataclasses
import json
import math
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from benchmarks import digits
from benchmarks.common import announce, make_header, make_parser, print_header, print_table, result_path, write_result
from models.gpt import MODELS, GPTConfig
from models.train import RunResult, TrainConfig, corpus_of, preset
from models.train import run as train
from tcfp_jax.recipes import Recipe, recipe

NAME = "convergence"
Task = Literal["gpt", "digits"]
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
    "tcfp12_no_feedback": recipe("tcfp12", error_feedback=False),
    "tcfp12_srr": recipe("tcfp12", residual="stochastic", error_feedback=False),
    "tcfp12_gradients_e5m2": recipe("tcfp12", gradient_dtype="float8_e5m2"),
    "tcfp12_gradients_e4m3": recipe("tcfp12", gradient_dtype="float8_e4m3fn"),
    "tcfp12_wgrad_fp8": recipe("tcfp12", wgrad="fp8"),
    "tcfp12_wgrad_bf16": recipe("tcfp12", wgrad="bf16"),
    "tcfp12_fast_no_feedback": recipe("tcfp12_fast", error_feedback=False),
    "tcfp12_fast_gradients_e5m2": recipe("tcfp12_fast", gradient_dtype="float8_e5m2"),
    "tcfp12_fast_gradients_e4m3": recipe("tcfp12_fast", gradient_dtype="float8_e4m3fn"),
    "tensorwise_gradients_e4m3": recipe("tensorwise", gradient_dtype="float8_e4m3fn"),
}
for _base in ("tcfp12", "tcfp12_fast"):
    for _kind in ("fast", "full"):
        VARIANTS[f"{_base}_{_kind}_accumulation"] = recipe(
            _base, forward_accumulation=_kind, dgrad_accumulation=_kind, wgrad_accumulation=_kind
        )
DEFAULT_RECIPES = (BASELINE, RERUN, "tcfp12", "tcfp12_fast", "tensorwise", "tcfp12_no_feedback", "tcfp12_srr")


@dataclass(frozen=True)
class Config:
    """What a run was asked for; runs of other settings are not comparable, so `--resume` refuses them.

    Attributes:
      model, steps: of the GPT task.
      learning_rate, final_fraction: its peak, and the part of it where the schedule ends.
      heldout_windows: windows of its evaluation.
      digits_steps: of the digits task.
      rerun_jitter: relative deviation of the perturbation of `bf16_rerun`.
      text: first digits of the digest of the GPT's text, which is this machine's standard library.
      jax: version.
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


@dataclass(frozen=True)
class Row:
    """One run.

    Attributes:
      train_loss: mean over the last tenth of the steps, nats; per byte for the GPT.
      heldout_loss, heldout_perplexity: nats and its exponential, with the products of training.
      heldout_loss_bf16: of the same trained parameters with BF16 products.
      accuracy: of the digits task.
      curve: training loss, averaged over fiftieths of the run.
      sources: digest of the project's Python files at that run, see `benchmarks.common.Header`.
      recipe: every field of it.
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
    sources: str
    curve: list[float]
    recipe: dict[str, Any]


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


def measure_one(
    task: Task, name: str, seed: int, config: Config, *, overrides: dict[str, Any] | None = None, sources: str = ""
) -> Row:
    """Train and evaluate one variant; `overrides` are fields of `models.train.TrainConfig`."""
    started, chosen = time.perf_counter(), VARIANTS[name]
    got: digits.DigitsResult | RunResult
    jitter = config.rerun_jitter if name == RERUN else 0.0
    if task == "digits":
        got = digits.run(digits.DigitsConfig(chosen, steps=config.digits_steps, seed=seed, initial_jitter=jitter))
        accuracy: float | None = got.heldout_accuracy
    else:
        run = _train_config(config, overrides)
        got, accuracy = train(dataclasses.replace(run, recipe=chosen, seed=seed, initial_jitter=jitter)), None
    losses, heldout = got.train_loss, got.heldout_loss
    last = losses[-max(1, len(losses) // 10) :]
    return Row(
        task=task,
        name=name,
        seed=seed,
        train_loss=float(np.mean(last)),
        heldout_loss=heldout,
        heldout_perplexity=math.exp(heldout) if heldout < 700 else math.inf,
        heldout_loss_bf16=got.heldout_loss_bf16,
        accuracy=accuracy,
        seconds=time.perf_counter() - started,
        sources=sources,
        curve=[float(part.mean()) for part in np.array_split(losses, min(CURVE_POINTS, len(losses)))],
        recipe=dataclasses.asdict(chosen),
    )


def _train_config(config: Config, overrides: dict[str, Any] | None) -> TrainConfig:
    base = preset(
        config.model, steps=config.steps, heldout_windows=config.heldout_windows,
        learning_rate=config.learning_rate, final_fraction=config.final_fraction,
    )  # fmt: skip
    return dataclasses.replace(base, **(overrides or {}))


def summarize(rows: list[Row]) -> list[Summary]:
    """Paired ratios of every variant that shares a seed with the baseline, in the order of `VARIANTS`.

    `mean_ratio_bf16` has the variant's parameters evaluated with BF16 products.
    """
    baseline = {(row.task, row.seed): row.heldout_loss for row in rows if row.name == BASELINE}
    summaries = []
    for task in TASKS:
        for name in VARIANTS:
            paired = [r for r in rows if (r.task, r.name) == (task, name) and (r.task, r.seed) in baseline]
            if not paired:
                continue
            ratios = [_ratio(row.heldout_loss, baseline[row.task, row.seed]) for row in paired]
            error = statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else math.nan
            summaries.append(
                Summary(
                    task=task,
                    name=name,
                    seeds=len(ratios),
                    mean_ratio=statistics.fmean(ratios),
                    min_ratio=min(ratios),
                    max_ratio=max(ratios),
                    standard_error=error,
                    mean_ratio_bf16=statistics.fmean(
                        _ratio(row.heldout_loss_bf16, baseline[row.task, row.seed]) for row in paired
                    ),
                    mean_heldout_loss=statistics.fmean(row.heldout_loss for row in paired),
                    mean_train_loss=statistics.fmean(row.train_loss for row in paired),
                )
            )
    return summaries


def _ratio(loss: float, baseline: float) -> float:
    # A run that diverged has no finite loss; its ratio must not look like a good one.
    return math.exp(loss - baseline) if math.isfinite(loss) and math.isfinite(baseline) else math.inf


def read_rows(path: Path, config: Config) -> list[Row]:
    """Rows of an earlier run with the same settings; none if there is no file.

    Raises:
      ValueError: the file is of other settings.
    """
    if not path.exists():
        return []
    content = json.loads(path.read_text(encoding="utf-8"))
    if content["config"] != dataclasses.asdict(config):
        raise ValueError(f"{path} has settings {content['config']}, not {dataclasses.asdict(config)}; drop --resume")
    rows = [Row(**{**row, **diverged(row)}) for row in content["rows"]]
    return [row for row in rows if row.name in VARIANTS and row.recipe == dataclasses.asdict(VARIANTS[row.name])]


def diverged(row: dict[str, Any]) -> dict[str, float]:
    """The losses that JSON holds as null because they were not finite."""
    losses = ("train_loss", "heldout_loss", "heldout_perplexity", "heldout_loss_bf16")
    return {name: math.nan for name in losses if row[name] is None}


def main(arguments: list[str] | None = None) -> list[Row]:
    """Run the command and return its rows."""
    options = _parse(arguments)
    usual = preset(options.model)
    config = Config(
        model=options.model,
        steps=options.steps,
        learning_rate=usual.learning_rate if options.learning_rate is None else options.learning_rate,
        final_fraction=usual.final_fraction if options.final_fraction is None else options.final_fraction,
        digits_steps=options.digits_steps,
    )
    overrides: dict[str, Any] = {}
    if options.smoke:
        config = Config(model="tiny", steps=4, heldout_windows=8, digits_steps=20)
        micro = GPTConfig(layers=1, width=32, heads=2, context=32)
        overrides = {"model": micro, "batch": 2, "sequence": 32, "corpus_bytes": 1_000_000, "steps_per_call": 2}
        options.seeds, options.recipes = 1, (BASELINE, "tcfp12")
    config = dataclasses.replace(config, text=corpus_of(_train_config(config, overrides)).digest[:12])
    header, path = make_header(), result_path(NAME, options)
    if options.resume and path is None:
        raise SystemExit("--resume continues a JSON file, so it needs --json or --out")
    print_header(NAME, header)
    rows = read_rows(path, config) if options.resume and path is not None else []
    done = {(row.task, row.name, row.seed) for row in rows}
    # Seeds outermost, so that whatever the budget stops, the finished seeds are complete pairs.
    wanted = [
        (task, name, seed)
        for seed in range(options.first_seed, options.first_seed + options.seeds)
        for task in options.tasks
        for name in options.recipes
        if (task, name, seed) not in done
    ]
    started, longest = time.perf_counter(), 0.0
    for index, (task, name, seed) in enumerate(wanted):
        if time.perf_counter() - started + longest > options.budget_seconds:
            print(f"budget of {options.budget_seconds:g} s: {len(wanted) - index} of {len(wanted)} runs left undone")
            break
        rows.append(measure_one(task, name, seed, config, overrides=overrides, sources=header.sources))
        longest = max(longest, rows[-1].seconds)
        print(f"{task} {name} seed {seed}: held-out {rows[-1].heldout_loss:.4f}, {rows[-1].seconds:.1f} s", flush=True)
        write_result(path, NAME, header, config, rows)
    _print(rows)
    announce(path)
    return rows


def _parse(arguments: list[str] | None) -> Any:
    parser = make_parser(NAME, __doc__)
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
    options = parser.parse_args(arguments)
    for field, known in (("recipes", VARIANTS), ("tasks", TASKS)):
        names = tuple(getattr(options, field).split(","))
        unknown = [name for name in names if name not in known]
        if unknown:
            parser.error(f"--{field}: unknown {', '.join(unknown)}; use some of {', '.join(known)}")
        setattr(options, field, names)
    if BASELINE not in options.recipes and not options.resume:
        parser.error(
            f"--recipes must contain {BASELINE}, to which the others are compared, or --resume a file that does"
        )
    return options


def _print(rows: list[Row]) -> None:
    print_table(
        ["perplexity / BF16", "task", "seeds", "mean", "min..max", "standard error", "in BF16", "loss", "training"],
        [
            (s.name, s.task, s.seeds, f"{s.mean_ratio:.4f}", f"{s.min_ratio:.4f}..{s.max_ratio:.4f}",
             f"{s.standard_error:.4f}", f"{s.mean_ratio_bf16:.4f}", f"{s.mean_heldout_loss:.4f}",
             f"{s.mean_train_loss:.4f}")
            for s in summarize(rows)
        ],
    )  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
