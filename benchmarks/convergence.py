"""Held-out loss of ways to train against BF16, as forks of one BF16 run or as pairs of runs from scratch.

    python -m benchmarks.convergence --protocol fork --json --budget-seconds 500
    python -m benchmarks.convergence --protocol fork --json --budget-seconds 500 --resume     # until none is left
    python -m benchmarks.convergence --protocol fork --json --model llama-124m --variants default,storage
    python -m benchmarks.convergence --protocol scratch --json                                # a small GPT, and digits
    python -m benchmarks.convergence --protocol scratch --json --model 8x512 --steps 16000 --variants tensorwise

fork: a base trains in BF16 with float32 weights and AdamW, at a constant rate after a warm-up. Each fork continues from
its weights and float32 moments with the same batches, and a rate that falls linearly to zero; a fork with stored
weights stores these, and rounds these moments once. scratch: runs of one seed have the same initial weights and
batches, and a rate that falls to zero. The ratio of a run is `exp(held-out loss - that of BF16's run)`, from the same
base, or of the same seed; where BF16 ran again, as `bf16_rerun`, the mean of both. Forks have about a tenth of the
noise; `bf16_rerun`, BF16 with weights perturbed by one part in a million, and `bf16_other_batches` show what is left.

The text is the source of every installed package and of Python's library, so machines with other packages train on
another text, or that of `--data`. JSON is written after every run, and `--resume` keeps its rows. Bases are kept in a
folder, because cuDNN's attention repeats no run bit for bit: forks are compared where their base is the same, and a
base that is gone is trained again, with BF16's fork. A run that the budget stops is kept there, too, and continued. All
programs are compiled first, several at once, and kept beside the bases.
"""

import argparse
import dataclasses
import functools
import math
import re
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp

from benchmarks import common, digits
from benchmarks.convergence_tables import (
    Row,
    curve,
    late_switches,
    of_today,
    plot,
    ratios_of,
    read_row,
    summarize,
    table,
)
from benchmarks.fork_runs import (
    Base,
    OutOfTimeError,
    advance,
    check_bases,
    compile_forks,
    kept_run,
    last_tenth,
    train_base,
)
from benchmarks.fork_training import TASKS, Config, last_phase, start_fork, train_config
from benchmarks.memory import bytes_of_kernels
from benchmarks.variants import BASELINE, GROUPS, RERUN, VARIANTS, chosen_of
from models.data import load_data
from models.families import ModelConfig, model_config, model_names
from models.gpt import GPTConfig
from models.settings import TrainConfig, preset
from models.text import Corpus, load_installed
from models.train import keep_programs
from models.training import check_corpus, count_parameters, evaluate

__all__ = ["Config", "Row", "plot", "ratios_of", "summarize", "table"]

NAME = "convergence"
PROTOCOLS = ("fork", "scratch")
_USUAL_MODEL = {"fork": "12x768", "scratch": "small"}
_USUAL_STEPS = {"fork": Config.steps, "scratch": 1000}


def measure_text(
    config: Config, name: str, base: Base, corpus: Corpus, text: jax.Array, deadline: float = math.inf
) -> Row:
    """Train a variant from a base to a rate of zero, and evaluate.

    Raises:
      OutOfTimeError: the deadline came first; what was trained is kept.
    """
    started, variant = time.perf_counter(), VARIANTS[name]
    kept = kept_run(config, name, base, corpus.digest)
    state, noise = start_fork(config, variant)(base.state, jax.random.key(base.seed))
    bytes_per_weight = bytes_of_kernels(state)
    state, losses, milliseconds = advance(config, variant, base.seed, state, text, kept, deadline)
    run, heldout = last_phase(config, variant, base.seed), jnp.asarray(corpus.heldout)
    trained, in_bf16 = (evaluate(run, state, heldout, products) for products in ("trained", "bf16"))
    kept.remove()
    worst = max(noise, key=lambda path: float(noise[path])) if noise else None
    return Row(
        task="text", name=name, seed=base.seed, base=base.name, train_loss=last_tenth(losses), heldout_loss=trained,
        heldout_loss_bf16=in_bf16, accuracy=None, bytes_per_weight=bytes_per_weight, worst_leaf=worst,
        worst_leaf_db=None if worst is None else -10 * math.log10(float(noise[worst])),
        milliseconds=milliseconds if math.isfinite(milliseconds) else None, seconds=time.perf_counter() - started,
        curve=curve(losses), variant=repr(variant), **common.origin_of_row(),
    )  # fmt: skip


def measure_digits(config: Config, name: str, seed: int) -> Row:
    """Train the MLP of digits, and evaluate."""
    started, variant = time.perf_counter(), VARIANTS[name]
    got = digits.run(
        digits.DigitsConfig(
            variant.recipe, steps=config.digits_steps, seed=seed, initial_jitter=variant.perturbation
        )
    )  # fmt: skip
    return Row(
        task="digits", name=name, seed=seed, base=f"seed-{seed}", train_loss=last_tenth(got.train_loss.tolist()),
        heldout_loss=got.heldout_loss, heldout_loss_bf16=got.heldout_loss_bf16, accuracy=got.heldout_accuracy,
        bytes_per_weight=None, worst_leaf=None, worst_leaf_db=None, milliseconds=None,
        seconds=time.perf_counter() - started, curve=curve(got.train_loss), variant=repr(variant),
        **common.origin_of_row(),
    )  # fmt: skip


def measure(config: Config) -> Iterator[Row]:
    """The rows that are kept, then the wanted runs that they lack, base after base, until the budget is spent.

    Raises:
      RuntimeError: a run failed; the others were done first.
    """
    started = time.perf_counter()
    deadline = started + config.budget_seconds
    kept = [] if config.resume is None else read_rows(Path(config.resume), config)
    yield from kept
    done = {(row.task, row.name, row.seed) for row in kept}
    # Seeds outermost, so that whatever the budget stops, the finished seeds are complete pairs.
    undone = [
        (task, seed, [name for name in config.variants if _has(task, name) and (task, name, seed) not in done])
        for seed in config.seeds
        for task in config.tasks
    ]
    failed: list[str] = []
    corpus = _corpus(config.data, config.text_bytes)
    names = [name for name in VARIANTS if any(task == "text" and name in wanted for task, _, wanted in undone)]
    if names and time.perf_counter() < deadline:
        compile_forks(config, list(dict.fromkeys((BASELINE, *names))), len(corpus.train), len(corpus.heldout))
        print(f"compiled after {time.perf_counter() - started:.1f} s", flush=True)
    try:
        for task, seed, wanted in undone:
            if not wanted or time.perf_counter() > deadline:
                continue
            base = None
            if task == "text":
                base = train_base(config, seed, _on_device(config.data, config.text_bytes), corpus.digest, deadline)
                again = [BASELINE] + [RERUN] * (RERUN in config.variants or any(r.name == RERUN for r in kept))
                there = {*wanted, *(row.name for row in kept if row.base == base.name)}
                # Of a base that was trained again: what others are compared with, and its noise floor.
                wanted[:0] = [name for name in again if name not in there]
            while wanted and time.perf_counter() < deadline:
                row = _attempt(config, wanted[0], seed, base, corpus, deadline, failed)
                wanted.pop(0)
                if row is not None:
                    yield row
    except OutOfTimeError as stopped:
        print(f"out of time: {stopped}", flush=True)
    if left := [f"{name} of seed {seed}" for task, seed, wanted in undone for name in wanted]:
        print(f"budget of {config.budget_seconds:g} s: {len(left)} runs left undone: {', '.join(left)}")
    if failed:
        raise RuntimeError(f"{len(failed)} runs failed, see above: {', '.join(failed)}")


def _has(task: str, name: str) -> bool:
    """Whether a task has a variant: digits have those of float weights that are a recipe and nothing else."""
    return task == "text" or VARIANTS[name].trains_digits


def _attempt(
    config: Config, name: str, seed: int, base: Base | None, corpus: Corpus, deadline: float, failed: list[str]
) -> Row | None:
    """A run; one that fails is reported and noted, so that the others still run."""
    try:
        if base is None:
            row = measure_digits(config, name, seed)
        else:
            row = measure_text(config, name, base, corpus, _on_device(config.data, config.text_bytes), deadline)
    except OutOfTimeError as stopped:
        raise OutOfTimeError(f"{name}, seed {seed}: {stopped}") from stopped
    except Exception:
        traceback.print_exc()
        failed.append(f"{name} of seed {seed}")
        return None
    print(f"{row.task}, {name}, seed {seed}: held-out {row.heldout_loss:.5f}, {row.seconds:.1f} s", flush=True)
    return row


@functools.lru_cache(maxsize=2)
def _corpus(data: tuple[str, ...], byte_limit: int) -> Corpus:
    return load_data(data, byte_limit=byte_limit) if data else load_installed(byte_limit=byte_limit)


@functools.lru_cache(maxsize=1)
def _on_device(data: tuple[str, ...], byte_limit: int) -> jax.Array:
    return jnp.asarray(_corpus(data, byte_limit).train)


def read_rows(path: Path, config: Config) -> list[Row]:
    """Rows of an earlier run with the same settings, of variants that are still the same; none if there is no file.

    Raises:
      ValueError: the file is of other settings.
    """
    return of_today([*map(read_row, common.rows_to_resume(path, config.settings))], VARIANTS)


# The command ----------------------------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """Protocol, variants, seeds, sizes, and when to stop."""
    parser.add_argument(
        "--protocol", choices=PROTOCOLS, required=True, help="forks of a BF16 run, or runs from scratch"
    )
    parser.add_argument(
        "--variants", default="default",
        help=f"groups of {', '.join(GROUPS)}, and names of {', '.join(VARIANTS)}; {BASELINE} is always one",
    )  # fmt: skip
    parser.add_argument(
        "--model", default=None,
        help=f"of {', '.join(model_names())}, or 12x768, a GPT of 12 layers of width 768 in heads of 64 (default: "
        f"{_USUAL_MODEL['fork']} to fork, {_USUAL_MODEL['scratch']} from scratch)",
    )  # fmt: skip
    parser.add_argument(
        "--data", nargs="+", default=[], metavar="PATH", help="text (default: installed Python sources)"
    )
    parser.add_argument(
        "--tasks", default=None, help="text, digits or both (default: both of the small GPT, else text)"
    )
    parser.add_argument(
        "--seeds", type=common.positive, default=3, help="how many bases, or pairs of runs (default: 3)"
    )
    parser.add_argument("--first-seed", type=int, default=0, help="(default: 0)")
    parser.add_argument("--steps", type=int, default=None, help="of a fork, or of a run (default: 300 or 1000)")
    parser.add_argument("--base-steps", type=int, default=None, help="before forks (default: 1000)")
    for name in ("batch", "warmup_steps", "steps_per_call", "digits_steps"):
        option, default = "--" + name.replace("_", "-"), getattr(Config, name)
        parser.add_argument(option, type=int, default=default, help=f"(default: {default})")
    parser.add_argument(
        "--learning-rate", type=float, default=None, help="the peak (default: the model's own, or 6e-4)"
    )
    parser.add_argument(
        "--budget-seconds", type=float, default=math.inf,
        help="stop then, and keep what was begun; all programs are compiled before, which this cannot stop",
    )  # fmt: skip
    parser.add_argument("--resume", action="store_true", help="keep the rows of the JSON file and do those it lacks")
    parser.add_argument(
        "--bases", type=Path, default=None,
        help="folder of bases, stopped runs and compiled programs (default: one of the model in runs/convergence)",
    )  # fmt: skip


def json_name(options: argparse.Namespace) -> str:
    """The name of a run's JSON: "convergence", "convergence-fork", or behind either another model's.

    >>> json_name(argparse.Namespace(protocol="fork", model="llama-124m", smoke=False))
    'convergence-fork-llama-124m'
    """
    parts = [NAME] + ["fork"] * (options.protocol == "fork")
    other = options.model not in (None, _USUAL_MODEL[options.protocol]) and not options.smoke
    return "-".join(parts + [str(options.model)] * other)


def command_of(name: str) -> str:
    """The command that writes a JSON of this name, the reverse of `json_name`.

    >>> command_of("convergence-fork-llama-124m")
    'python -m benchmarks.convergence --protocol fork --model llama-124m --json'
    """
    rest = name.removeprefix(NAME).removeprefix("-")
    protocol = "fork" if rest.split("-")[0] == "fork" else "scratch"
    model = rest.removeprefix("fork").removeprefix("-")
    return f"python -m benchmarks.{NAME} --protocol {protocol} {f'--model {model} ' if model else ''}--json"


def size_of(model: str) -> ModelConfig:
    """The sizes of a model by its name, or by layers and width, with attention as fast as the device has it.

    Raises:
      ValueError: neither.

    >>> size_of("2x128").heads
    2
    """
    own = re.fullmatch(r"(\d+)x(\d+)", model)
    if own:
        layers, width = int(own[1]), int(own[2])
        if width % 64:
            raise ValueError(f"--model {model}: heads have 64 values, and {width} is no multiple; choose another width")
        size: ModelConfig = GPTConfig(layers=layers, width=width, heads=width // 64, context=1024)
    elif model in model_names():
        size = model_config(model)
    else:
        raise ValueError(f"--model {model} is unknown; use one of {model_names()}, or layers and width, as 12x768")
    on_gpu = jax.default_backend() == "gpu" and isinstance(size, GPTConfig) and size.context >= 1024
    return dataclasses.replace(size, attention="cudnn") if on_gpu else size


def configure(options: argparse.Namespace) -> Config:
    """The settings of a command line.

    Raises:
      ValueError: unknown names; a variant that the model or the steps do not have; a text shorter than a window;
        base steps of runs from scratch; or kept bases of another model or text.
    """
    names, forks = chosen_of(options.variants), options.protocol == "fork"
    if options.base_steps is not None and (options.base_steps > 0) != forks:
        raise ValueError(
            f"--base-steps {options.base_steps} with --protocol {options.protocol}: forks have a base of one step or "
            "more, and runs from scratch none; leave it, or choose the other protocol"
        )
    model = options.model or _USUAL_MODEL[options.protocol]
    config = _smoke(names, forks) if options.smoke else _asked(options, model, forks)
    usual = "text" if forks or model != _USUAL_MODEL["scratch"] else "text,digits"
    tasks = common.chosen_of("tasks", options.tasks or usual, TASKS)
    if forks and "digits" in tasks:
        raise ValueError(
            f"--tasks {options.tasks} with --protocol fork: digits are learned from scratch alone; drop them"
        )
    bases = options.bases or common.ROOT / "runs" / NAME / model
    if options.smoke:
        options.seeds, bases = 1, options.bases or options.out / "bases"
    if jax.default_backend() == "gpu":
        keep_programs(bases)
    runs = [_run_of(config, name) for name in names]
    corpus = _corpus(tuple(options.data), config.text_bytes)
    check_corpus(corpus, runs[0])
    config = dataclasses.replace(
        config, text=corpus.digest[:12], text_read=len(corpus.train) + len(corpus.heldout), data=tuple(options.data),
        parameters=count_parameters(runs[0]), variants=names, tasks=tasks,
        seeds=tuple(range(options.first_seed, options.first_seed + options.seeds)),
        bases=str(bases), budget_seconds=options.budget_seconds, resume=str(options.path) if options.resume else None,
    )  # fmt: skip
    if forks:
        check_bases(config, corpus.digest)
    return config


def _run_of(config: Config, name: str) -> TrainConfig:
    try:
        return train_config(config, VARIANTS[name])
    except ValueError as error:
        raise ValueError(f"--variants {name}: {error}") from error


def _asked(options: argparse.Namespace, model: str, forks: bool) -> Config:
    size = size_of(model)
    rate = preset(model).learning_rate if model in model_names() else Config.learning_rate
    given = lambda name, usual: usual if getattr(options, name) is None else getattr(options, name)
    return Config(
        model, size, batch=options.batch, sequence=min(Config.sequence, size.context),
        learning_rate=given("learning_rate", rate), warmup_steps=options.warmup_steps,
        base_steps=given("base_steps", Config.base_steps if forks else 0),
        steps=given("steps", _USUAL_STEPS[options.protocol]), steps_per_call=options.steps_per_call,
        digits_steps=options.digits_steps,
    )  # fmt: skip


def _smoke(names: tuple[str, ...], forks: bool) -> Config:
    layers = 1 + max(sum((VARIANTS[name].ends or (0, 0, ""))[:2]) for name in names)
    return Config(
        f"{layers}x128", GPTConfig(layers=layers, width=128, heads=2, context=32), batch=2, sequence=32, warmup_steps=2,
        base_steps=4 if forks else 0, steps=10, steps_per_call=1, heldout_windows=4, digits_steps=20,
        text_bytes=1_000_000,
    )  # fmt: skip


def show(rows: list[Row]) -> None:
    """Print what the rows say of each variant."""
    columns = ("name", "task", "pairs", "mean_ratio", "min_ratio", "max_ratio", "standard_error", "mean_ratio_bf16")
    common.print_rows(summarize(rows), *columns, "bytes_per_weight", "milliseconds")
    if late := late_switches(rows):
        common.print_rows(late, "name", "part", "gap", "left", "closed", "longer")
    for row in rows:
        if row.worst_leaf_db is not None and row.worst_leaf_db < 60:
            print(f"{row.name}, seed {row.seed}: {row.worst_leaf} is stored with {row.worst_leaf_db:.1f} dB")


main = functools.partial(common.main, NAME)

if __name__ == "__main__":
    common.command(NAME)
