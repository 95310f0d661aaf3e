"""Held-out loss of ways to train a GPT against BF16, each continuing one BF16 run: forks of a base.

    python -m benchmarks.forks --json --seeds 3 --budget-seconds 550
    python -m benchmarks.forks --json --seeds 3 --resume --budget-seconds 550      # until nothing is left undone

A base trains in BF16 with float32 weights and AdamW, at a constant rate after a warm-up. Each fork continues from its
weights and float32 moments with the same batches, and a rate that falls linearly to zero; a fork with stored weights
stores these, and rounds these moments once. The ratio of a fork is `exp(held-out loss - that of BF16's fork)`, of the
same base. This has a hundred times less noise than training from scratch, and `bf16_rerun`, BF16's fork with weights
perturbed by one part in a million, shows what is left of it.

The text is the source of every installed package and of Python's library, so machines with other packages train on
another text. JSON is written after every fork, and `--resume` keeps its rows. Bases are kept in a folder, because
cuDNN's attention repeats no run bit for bit: forks are compared where their base is the same, and a base that is gone
is trained again, with BF16's fork. All programs are compiled first, several at once, and kept beside the bases.
"""

import argparse
import dataclasses
import functools
import math
import statistics
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import common
from benchmarks.common import Result, markdown_table
from benchmarks.convergence import RERUN_JITTER, perplexity_ratio
from benchmarks.fork_training import (
    BASELINE,
    FP4,
    RERUN,
    VARIANTS,
    Base,
    Config,
    advance,
    compile_forks,
    last_tenth,
    start_fork,
    train_base,
    train_config,
)
from benchmarks.memory import bytes_of_kernels
from models.gpt import GPTConfig
from models.text import Corpus, load_installed
from models.train import keep_programs
from models.training import evaluate

NAME = "forks"
RECOMMENDED = "stored_bfloat16_gradients"  # as the guide and `models.train` store weights

MEANINGS = {
    BASELINE: "BF16, float32 weights and AdamW",
    RERUN: f"the same, weights perturbed by {RERUN_JITTER:g}",
    "tensorwise": "`tensorwise`, float32 weights, E5M2 gradients",
    "tensorwise_e4m3": "the same with E4M3 gradients",
    "tcfp12_fast": "`tcfp12_fast`, float32 weights, error feedback",
    "stored": "**stored: hi + lo alone, products by hi, E4M3 gradients, 8-bit moments**",
    "stored_e5m2": "stored, E5M2 gradients",
    "stored_bfloat16_moments": "stored, bfloat16 moments",
    "stored_float32_moments": "stored, float32 moments",
    "stored_dual_forward": "stored, forward by hi + lo",
    "stored_feedback": "stored with an FP8 error in the place of random bits",
    "stored_eco": "stored, float32 moments, ECO",
    "stored_bfloat16_gradients": "stored, weights' gradients in bfloat16",
    "stored_blocks": "stored, scales of squares of 128",
    "nvfp4_nearest": "control: `nvfp4_training` with gradients rounded to nearest",
    "nvfp4_stochastic_activations": "control: `nvfp4_training` with activations rounded stochastically",
    "nvfp4_training": "`nvfp4_training`, all products of NVFP4 operands, emulated",
    "nvfp4_training_four_over_six": "`nvfp4_training_four_over_six`",
    "nvfp4_training_fold_exact": "`nvfp4_training_fold_exact`, its products in FP8",
    "quartet2": "`quartet2`",
    "quartet2_bf16_finish": "`quartet2`, forward in BF16 in the last steps",
    "quartet2_last_block_bf16": "`quartet2`, the last block in BF16",
}


@dataclass(frozen=True)
class Row:
    """One fork.

    Attributes:
      base: first digits of a digest of the base's losses: forks of one base are compared.
      train_loss: mean over the last tenth of the fork's steps, nats per byte.
      heldout_loss, heldout_loss_bf16: nats per byte, with the products of training, and with BF16 products of the same
        weights.
      bytes_per_weight: state of the kernels over their number, counted leaf by leaf.
      worst_leaf, worst_leaf_db: the stored kernel with the most noise at the fork, and its signal-to-noise ratio; None
        where weights are float.
      milliseconds: of a step, by the wall clock.
      seconds: all of it.
      variant: the Python expression of it.
      library: digest of the libraries.
    """

    name: str
    seed: int
    base: str
    train_loss: float
    heldout_loss: float
    heldout_loss_bf16: float
    bytes_per_weight: float
    worst_leaf: str | None
    worst_leaf_db: float | None
    milliseconds: float
    seconds: float
    variant: str
    library: str


def measure_fork(config: Config, name: str, base: Base, corpus: Corpus, text: jax.Array) -> Row:
    """Fork a base, train to a rate of zero, and evaluate."""
    started, variant = time.perf_counter(), VARIANTS[name]
    state, noise = start_fork(config, name)(base.state, jax.random.key(base.seed))
    bytes_per_weight = bytes_of_kernels(state)
    state, losses, milliseconds = advance(config, variant, base.seed, state, text, config.fork_steps)
    run, heldout = train_config(config, variant.finishing, base.seed), jnp.asarray(corpus.heldout)
    trained, in_bf16 = (evaluate(run, state, heldout, products) for products in ("trained", "bf16"))
    worst = max(noise, key=lambda path: float(noise[path])) if noise else None
    return Row(
        name=name, seed=base.seed, base=base.name,
        train_loss=last_tenth(losses), heldout_loss=trained, heldout_loss_bf16=in_bf16,
        bytes_per_weight=bytes_per_weight, worst_leaf=worst,
        worst_leaf_db=None if worst is None else -10 * math.log10(float(noise[worst])),
        milliseconds=milliseconds, seconds=time.perf_counter() - started, variant=repr(variant),
        library=_library(),
    )  # fmt: skip


@functools.cache
def _library() -> str:
    return common.library_digest()


def measure(config: Config) -> Iterator[Row]:
    """The forks that are kept, then the wanted ones that they lack, base after base, until the budget is spent.

    Raises:
      RuntimeError: a fork failed; the others were done first.
    """
    started = time.perf_counter()
    kept = [] if config.resume is None else read_rows(Path(config.resume), config)
    yield from kept
    done = {(row.name, row.seed) for row in kept}
    undone = {seed: [name for name in config.forks if (name, seed) not in done] for seed in config.seeds}
    undone = {seed: names for seed, names in undone.items() if names}
    failed: list[str] = []
    longest = {"base": 0.0, "fork": 0.0}

    def has_time(*steps: str) -> bool:
        return time.perf_counter() - started + sum(longest[step] for step in steps) <= config.budget_seconds

    if undone and has_time("base"):
        corpus = _corpus(config.text_bytes)
        text = jnp.asarray(corpus.train)
        names = [name for name in VARIANTS if name == BASELINE or any(name in wanted for wanted in undone.values())]
        compile_forks(config, names, len(corpus.train), len(corpus.heldout))
        print(f"compiled after {time.perf_counter() - started:.1f} s", flush=True)
    for seed, wanted in undone.items():
        if not has_time("base", "fork"):
            break
        begun = time.perf_counter()
        base = train_base(config, seed, text, corpus.digest)
        longest["base"] = max(longest["base"], time.perf_counter() - begun)
        if BASELINE not in wanted and not any((row.name, row.base) == (BASELINE, base.name) for row in kept):
            wanted.insert(0, BASELINE)  # of a base that was trained again
        while wanted and has_time("fork"):
            row = _attempt(config, wanted.pop(0), base, corpus, text, failed)
            if row is not None:
                longest["fork"] = max(longest["fork"], row.seconds)
                yield row
    if left := [f"{name} of seed {seed}" for seed, wanted in undone.items() for name in wanted]:
        print(f"budget of {config.budget_seconds:g} s: {len(left)} forks left undone: {', '.join(left)}")
    if failed:
        raise RuntimeError(f"{len(failed)} forks failed, see above: {', '.join(failed)}")


def _attempt(config: Config, name: str, base: Base, corpus: Corpus, text: jax.Array, failed: list[str]) -> Row | None:
    """A fork; one that fails is reported and noted, so that the others still run."""
    try:
        row = measure_fork(config, name, base, corpus, text)
    except Exception:
        traceback.print_exc()
        failed.append(f"{name} of seed {base.seed}")
        return None
    print(f"{name}, seed {base.seed}: held-out {row.heldout_loss:.5f}, {row.seconds:.1f} s", flush=True)
    return row


@functools.lru_cache(maxsize=2)
def _corpus(byte_limit: int) -> Corpus:
    return load_installed(byte_limit=byte_limit)


def read_rows(path: Path, config: Config) -> list[Row]:
    """Rows of an earlier run with the same settings, of variants that are still the same; none if there is no file.

    Raises:
      ValueError: the file is of other settings.
    """
    rows = map(read_row, common.rows_to_resume(path, config.settings))
    return [row for row in rows if row.name in VARIANTS and row.variant == repr(VARIANTS[row.name])]


def read_row(row: dict[str, Any]) -> Row:
    """A row of JSON, which holds losses that were not finite as null."""
    losses = ("train_loss", "heldout_loss", "heldout_loss_bf16")
    return Row(**{**row, **{name: math.nan for name in losses if row[name] is None}})


# The command and its tables -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """Perplexity ratios to BF16's fork of one variant, over the bases that both have."""

    name: str
    bases: int
    bytes_per_weight: float
    mean_ratio: float
    min_ratio: float
    max_ratio: float
    standard_error: float
    mean_ratio_bf16: float
    milliseconds: float


def summarize(rows: list[Row]) -> list[Summary]:
    """Of every variant that shares a base with the baseline, in the order of `VARIANTS`."""
    baseline = {row.base: row for row in rows if row.name == BASELINE}
    found = []
    for name in VARIANTS:
        paired = [row for row in rows if row.name == name and row.base in baseline]
        if not paired:
            continue
        ratios = [perplexity_ratio(row.heldout_loss, baseline[row.base].heldout_loss) for row in paired]
        in_bf16 = [perplexity_ratio(row.heldout_loss_bf16, baseline[row.base].heldout_loss) for row in paired]
        error = statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else math.nan
        found.append(
            Summary(
                name, len(paired), paired[0].bytes_per_weight, statistics.fmean(ratios), min(ratios), max(ratios),
                error, statistics.fmean(in_bf16), min(row.milliseconds for row in paired),
            )
        )  # fmt: skip
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    """Forks, seeds, sizes, and when to stop."""
    parser.add_argument("--forks", help=f'of {",".join(VARIANTS)}; "fp4" for those of FP4 (default: all others)')
    parser.add_argument("--layers", type=int, default=12, help="of the GPT (default: 12)")
    parser.add_argument("--width", type=int, default=768, help="of the GPT, in heads of 64 (default: 768)")
    parser.add_argument("--seeds", type=int, default=3, help="how many bases (default: 3)")
    parser.add_argument("--first-seed", type=int, default=0, help="(default: 0)")
    for name in ("base_steps", "fork_steps", "steps_per_call"):
        option, default = "--" + name.replace("_", "-"), getattr(Config, name)
        parser.add_argument(option, type=int, default=default, help=f"(default: {default})")
    rate = Config.learning_rate
    parser.add_argument("--learning-rate", type=float, default=rate, help=f"the base's (default: {rate:g})")
    parser.add_argument("--budget-seconds", type=float, default=math.inf, help="start no fork that may end after this")
    parser.add_argument("--resume", action="store_true", help="keep the forks in the JSON file and do those it lacks")
    parser.add_argument(
        "--bases", type=Path, default=None, help="folder of bases and compiled programs (default: runs/forks)"
    )


def configure(options: argparse.Namespace) -> Config:
    """The settings of a command line.

    Raises:
      ValueError: unknown names; no baseline; or nothing to resume.
    """
    if options.resume and options.path is None:
        raise ValueError("--resume continues a JSON file, so it needs --json or --out")
    others = [name for name in VARIANTS if name not in FP4]
    wanted = {None: others, "fp4": [BASELINE, RERUN, *FP4]}.get(options.forks) or options.forks.split(",")
    names = common.chosen_of("forks", ",".join(wanted), tuple(VARIANTS))
    if BASELINE not in names:
        raise ValueError(f"--forks must contain {BASELINE}, to which the others are compared")
    on_gpu = jax.default_backend() == "gpu"
    model = GPTConfig(
        layers=options.layers, width=options.width, heads=options.width // 64, context=1024,
        attention="cudnn" if on_gpu else "products",
    )  # fmt: skip
    config = Config(
        model, learning_rate=options.learning_rate, base_steps=options.base_steps, fork_steps=options.fork_steps,
        steps_per_call=options.steps_per_call,
    )  # fmt: skip
    bases = options.bases or common.ROOT / "runs" / NAME
    if options.smoke:
        layers = 1 + max(sum((VARIANTS[name].ends or (0, 0, ""))[:2]) for name in names)
        model = GPTConfig(layers=layers, width=128, heads=2, context=32, attention=model.attention)
        config = Config(
            model, batch=2, sequence=32, warmup_steps=2, base_steps=4, fork_steps=4, steps_per_call=2,
            heldout_windows=4, text_bytes=1_000_000,
        )  # fmt: skip
        options.seeds, bases = 1, options.bases or options.out / "bases"
    if on_gpu:
        keep_programs(bases)
    corpus = _corpus(config.text_bytes)
    return dataclasses.replace(
        config, text=corpus.digest[:12], text_read=len(corpus.train) + len(corpus.heldout), forks=names,
        seeds=tuple(range(options.first_seed, options.first_seed + options.seeds)), bases=str(bases),
        budget_seconds=options.budget_seconds, resume=str(options.path) if options.resume else None,
    )  # fmt: skip


def show(rows: list[Row]) -> None:
    """Print what the rows say of each variant."""
    columns = ("name", "bases", "mean_ratio", "min_ratio", "max_ratio", "standard_error", "mean_ratio_bf16")
    common.print_rows(summarize(rows), *columns, "bytes_per_weight", "milliseconds")
    for row in rows:
        if row.worst_leaf_db is not None and row.worst_leaf_db < 60:
            print(f"{row.name}, seed {row.seed}: {row.worst_leaf} is stored with {row.worst_leaf_db:.1f} dB")


def table(result: Result) -> str:
    """A line a variant."""
    rows, config = [read_row(row) for row in result.rows if row["name"] in VARIANTS], result.config
    baseline = statistics.fmean(row.heldout_loss for row in rows if row.name == BASELINE)
    lines = [
        [
            MEANINGS[s.name], f"{s.bytes_per_weight:.2f}", _ratio_cell(s),
            f"{s.min_ratio:.4f} to {s.max_ratio:.4f}, {s.bases}", f"{s.mean_ratio_bf16:.4f}", f"{s.milliseconds:.1f}",
        ] for s in summarize(rows)
    ]  # fmt: skip
    titles = ["fork", "bytes a weight", "held-out perplexity over BF16's", "range, bases", "evaluated in BF16", "ms"]
    model = config["model"]
    return (
        f"{markdown_table(titles, lines)}\n\n"
        f"A GPT of {model['layers']} layers of width {model['width']}, {config['batch']} × {config['sequence']} bytes "
        f"a step of {config['text_read'] / 1e6:,.0f} MB of Python sources: {config['base_steps']} steps in BF16 at a "
        f"rate of {config['learning_rate']:g}, then {config['fork_steps']} to zero. BF16's forks end at "
        f"{baseline:.4f} nats (mean). Ratios are means over bases ± standard error; the last column is a step's time."
    )


def ratios_of(result: Result) -> dict[str, str]:
    """The ratio of every variant and its standard error, as tables show them."""
    rows = [read_row(row) for row in result.rows if row["name"] in VARIANTS]
    return {summary.name: _ratio_cell(summary) for summary in summarize(rows)}


def _ratio_cell(summary: Summary) -> str:
    if summary.name == BASELINE:
        return "1"
    if not math.isfinite(summary.mean_ratio):
        return "diverged"
    error = f" ± {summary.standard_error:.4f}" if math.isfinite(summary.standard_error) else ""
    return f"{summary.mean_ratio:.4f}{error}"


def plot(figure: Any, result: Result) -> None:
    """A line of dots a variant: one dot a base, a bar at the mean."""
    rows = [read_row(row) for row in result.rows if row["name"] in VARIANTS]
    names = [s.name for s in summarize(rows) if s.name != BASELINE and math.isfinite(s.mean_ratio)]
    baseline = {row.base: row.heldout_loss for row in rows if row.name == BASELINE}
    figure.set_size_inches(8, 1.4 + 0.36 * len(names))
    axes = figure.subplots()
    for i, name in enumerate(names):
        paired = [row for row in rows if row.name == name and row.base in baseline]
        ratios = np.exp([row.heldout_loss - baseline[row.base] for row in paired])
        axes.plot(ratios, np.full(len(ratios), i), "o", color="C7" if name == RERUN else "C0", alpha=0.5, markersize=4)
        axes.plot([ratios.mean()], [i], "|", color="C7" if name == RERUN else "C0", markersize=14, markeredgewidth=2)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(axis="x", alpha=0.3)
    figure.suptitle("Held-out perplexity over that of BF16's fork of the same base; the bar is the mean", fontsize=10)


main = functools.partial(common.main, NAME)

if __name__ == "__main__":
    common.command(NAME)
