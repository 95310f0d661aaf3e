"""Held-out loss of runs that end with other products than they were trained with.

    python -m benchmarks.finish --json --resume --budget-seconds 560
    python -m benchmarks.finish --json --resume --endings nvfp4,nvfp4_tensorwise

All runs of a seed begin with the same steps in BF16, at a constant rate after a
warm-up. From this state each base goes on with its own products, and its rate falls
linearly to zero. Each ending goes on from a state of its base. All have the same
batches, so that the noise of a difference is that of pairs. Without the common steps it
would be about ten times as large, because runs that differ from the first step on reach
the same losses at other times.

Calls follow each other on one machine: states that are there are read, and a run that
the budget stopped goes on from its checkpoint. JSON is written after each ending, and
`--resume` keeps its rows. Processes that share file and folder share the seeds.
"""

import argparse
import math
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import finish_tables as tables
from benchmarks import forks
from benchmarks.convergence import size_of
from benchmarks.endings import ENDINGS, as_begun
from benchmarks.forks import Config
from benchmarks.harness import Benchmark, add_resume, chosen_of, positive
from benchmarks.records import (
    ROOT,
    library_digest,
    origin_of_row,
    rows_of,
    rows_to_resume,
)
from benchmarks.texts import corpus_of, on_device
from benchmarks.variants import BASELINE, VARIANTS, Variant
from models.huggingface.tokenizer import read_tokenizer
from models.nets.shapes import LlamaConfig
from models.tokens import OWN
from models.train import cache_programs
from models.training.batches import check_corpus
from models.training.evaluation import evaluate
from models.training.state import TrainState
from models.training.steps import batch_key, init
from models.training.text import Corpus

Row = tables.Row
THREADS = 6  # that compile


def last_steps(config: Config, name: str) -> int:
    """Return the number of steps of an ending.

    Raises:
      ValueError: it begins within a dispatch.
    """
    steps, rest = divmod(config.steps * ENDINGS[name].percent, 100)
    if rest or steps % config.steps_per_call:
        raise ValueError(
            f"--steps {config.steps}: {ENDINGS[name].percent} % of them, for {name},"
            f" are no multiple of {config.steps_per_call}; use a multiple of"
            f" {20 * config.steps_per_call}"
        )
    return steps


@dataclass
class _Progress:
    """The deadline, and what was not done."""

    deadline: float
    longest: float = 0.0
    left: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def check(self) -> None:
        """Raise `TimeoutError` if another ending would probably be too late."""
        if time.perf_counter() + self.longest > self.deadline:
            raise TimeoutError("not begun")


def compile_steps(config: Config, names: Iterable[str], text: jax.Array) -> None:
    """Compile the steps of endings in threads; the cache of programs keeps them.

    All are compiled before one runs, because cuDNN sometimes fails if another thread
    compiles while it captures a graph. A step that failed here compiles again where it
    is used, and reports its error.
    """
    run = forks.train_config(config, VARIANTS[BASELINE])
    key = batch_key(run)

    def compiled(base: Variant, variant: Variant) -> None:
        first = jax.eval_shape(lambda: init(run))
        state = jax.eval_shape(forks.starting(config, base), first, key)
        step: Any = forks.steps_of(config, variant)
        step.lower(state, text, key).compile()

    starts: dict[Variant, Variant] = {}
    for name in names:
        ending = ENDINGS[name]
        base = VARIANTS[ending.base]
        last = ending.variant if ending.stored_as else base
        starts.setdefault(forks.stepping(base), base)
        starts.setdefault(forks.stepping(ending.variant), last)
    with ThreadPoolExecutor(THREADS) as threads:
        wait([threads.submit(compiled, starts[step], step) for step in starts])


@dataclass
class Trained:
    """A base of a seed: states at the steps where its endings begin.

    Attributes:
      config: the settings.
      base: name of the variant that trains it.
      begun: the steps that all bases of the seed have in common.
      corpus: the text.
      states: the state at each step behind the common ones.
    """

    config: Config
    base: str
    begun: forks.Base
    corpus: Corpus
    states: dict[int, TrainState] = field(default_factory=dict)

    def train(self, names: Iterable[str], deadline: float) -> None:
        """Train to the first step of each ending.

        Raises:
          TimeoutError: the deadline has passed; the folder holds a checkpoint.
        """
        config = self.config
        variant = VARIANTS[self.base]
        seed = self.begun.seed
        text = text_of(config)
        own = forks.train_config(config, variant, seed)
        state = forks.start_fork(
            config, variant, self.begun.state, jax.random.key(seed)
        )
        begin = 0
        for end in sorted({config.steps - last_steps(config, name) for name in names}):
            name = f"{self.base}-{seed}-{config.base_steps}-{config.steps}-{end}"
            with forks.folder_of(config, own, self.corpus.digest, name) as kept:
                state, _, _ = forks.advance(
                    config, variant, seed, state, text, end - begin, kept, deadline
                )
            self.states[end] = jax.tree.map(jnp.copy, state)
            begin = end

    def end(self, name: str, deadline: float) -> Row:
        """Return the row of an ending.

        Raises:
          TimeoutError: the deadline has passed.
        """
        started = time.perf_counter()
        ending = ENDINGS[name]
        config = self.config
        steps = last_steps(config, name)
        variant = ending.variant
        seed = self.begun.seed
        base = self.states[config.steps - steps]
        if ending.stored_as is None:
            state = jax.tree.map(jnp.copy, base)
        else:
            state = forks.start_fork(config, variant, base, jax.random.key(seed))
        state, losses, milliseconds = forks.advance(
            config, variant, seed, state, text_of(config), steps, deadline=deadline
        )
        own = forks.train_config(config, variant, seed)
        heldout = jnp.asarray(self.corpus.heldout)
        return Row(
            name=name,
            seed=seed,
            base=self.begun.name,
            train_loss=forks.last_tenth(losses),
            heldout_loss=evaluate(own, state, heldout, "trained"),
            heldout_loss_bf16=evaluate(own, state, heldout, "bf16"),
            milliseconds=milliseconds,
            seconds=time.perf_counter() - started,
            **origin_of_row(),
        )


def text_of(config: Config) -> jax.Array:
    """Return the training text on the device."""
    return on_device(config.data, config.text_bytes, config.tokens)


def measure(config: Config) -> Iterator[Row]:
    """Yield the rows that are kept, then the wanted ones that they lack.

    Raises:
      RuntimeError: an ending failed; the others were done first.
    """
    progress = _Progress(time.perf_counter() + config.budget_seconds)
    yield from rows_there(config)
    wanted = [name for seed in config.seeds for name in _wanted(config, seed)]
    # A CPU has no time to spare.
    if wanted and jax.default_backend() != "cpu":
        compile_steps(config, [BASELINE, *wanted], text_of(config))
    for seed in config.seeds:
        with forks.claimed(config, f"seed-{seed}") as mine:
            if mine:
                yield from _of_seed(config, seed, progress)
    if progress.left:
        print(
            f"budget of {config.budget_seconds:g} s: {', '.join(progress.left)} left"
            " undone; --resume does them"
        )
    if progress.failed:
        raise RuntimeError(
            f"{len(progress.failed)} endings failed, see above:"
            f" {', '.join(progress.failed)}"
        )


def _wanted(config: Config, seed: int) -> list[str]:
    """Return the endings of a seed that the file lacks."""
    done = {row.name for row in rows_there(config) if row.seed == seed}
    return [name for name in config.variants if name not in done]


def _of_seed(config: Config, seed: int, progress: _Progress) -> Iterator[Row]:
    """Yield the rows of a seed that the file lacks."""
    wanted = _wanted(config, seed)
    if not wanted:
        return
    corpus = corpus_of(config.data, config.text_bytes, config.tokens)
    text = text_of(config)
    baseline = VARIANTS[BASELINE]
    try:
        progress.check()
        begun = forks.train_base(
            config, seed, text, corpus.digest, baseline, progress.deadline
        )
    except TimeoutError as error:
        print(f"seed {seed}: {error}", flush=True)
        progress.left += [f"{name} of seed {seed}" for name in wanted]
        return
    # Runs that begin otherwise are compared with runs of their own.
    start = (begun.name, library_digest())
    there = {row.name for row in rows_there(config) if row.start == start}
    compared = [BASELINE, *(as_begun(ENDINGS[name].base) for name in wanted)]
    again = [name for name in compared if name not in there]
    names = dict.fromkeys([*again, *wanted])
    for base in dict.fromkeys(ENDINGS[name].base for name in names):
        trained = Trained(config, base, begun, corpus)
        of_base = [name for name in names if ENDINGS[name].base == base]
        yield from _of_base(trained, of_base, progress)


def _of_base(
    trained: Trained, names: Sequence[str], progress: _Progress
) -> Iterator[Row]:
    """Yield the rows of a base's endings."""
    seed = trained.begun.seed
    try:
        progress.check()
        trained.train(names, progress.deadline)
    except TimeoutError as error:
        print(f"base {trained.base}, seed {seed}: {error}", flush=True)
        progress.left += [f"{name} of seed {seed}" for name in names]
        return
    for name in names:
        try:
            progress.check()
            row = trained.end(name, progress.deadline)
        except TimeoutError:
            progress.left.append(f"{name} of seed {seed}")
        except Exception:
            traceback.print_exc()
            progress.failed.append(f"{name} of seed {seed}")
        else:
            progress.longest = max(progress.longest, row.seconds)
            print(
                f"{name}, seed {seed}: held-out {row.heldout_loss:.5f} nats,"
                f" {row.seconds:.1f} s",
                flush=True,
            )
            yield row


def rows_there(config: Config) -> list[Row]:
    """Return the rows of the file of a run that is resumed, with the same settings.

    Raises:
      ValueError: the file is of other settings.
    """
    return rows_of(Row, rows_to_resume(config.resume, config.settings))


def joined(config: Config, rows: list[Row]) -> list[Row]:
    """Return the rows of the file of a run that is resumed, then new ones."""
    there = rows_there(config)
    known = {(row.name, row.seed, row.start) for row in there}
    return there + [row for row in rows if (row.name, row.seed, row.start) not in known]


# The command
# --------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add endings, seeds, sizes, and the budget."""
    add = parser.add_argument
    add("--endings", help=f"of {', '.join(ENDINGS)} (default: all)")
    add("--model", default="4x256", help="a Llama of ids (default: 4x256)")
    add("--base-steps", type=positive, default=800, help="in common (default: 800)")
    add("--steps", type=positive, default=800, help="behind them (default: 800)")
    add("--data", nargs="+", default=[], metavar="PATH", help="as in convergence")
    add("--seeds", type=positive, default=3, help="how many of each (default: 3)")
    add("--first-seed", type=int, default=0, help="the first of them (default: 0)")
    add("--budget-seconds", type=float, default=math.inf, help="of this call")
    add_resume(parser)
    add("--bases", type=Path, help="folder of bases (default: runs/finish/MODEL)")


def configure(options: argparse.Namespace) -> Config:
    """Return the settings of a command line.

    Raises:
      ValueError: a name is unknown, or an ending has no whole dispatches.
    """
    names = chosen_of("endings", options.endings, tuple(ENDINGS))
    config = SMOKE if options.smoke else _asked(options)
    for name in names:
        last_steps(config, name)
    folder = ROOT / "runs" / "finish"
    if options.smoke and options.out is not None:
        folder = options.out / "bases"
    if jax.default_backend() == "gpu":
        cache_programs()
    corpus = corpus_of(tuple(options.data), config.text_bytes, config.tokens)
    check_corpus(corpus, forks.train_config(config, VARIANTS[BASELINE]))
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    return replace(
        config,
        text=corpus.digest[:12],
        tokens_read=len(corpus.train),
        data=tuple(options.data),
        variants=names,
        seeds=(0,) if options.smoke else tuple(seeds),
        bases=str(options.bases or folder / options.model),
        budget_seconds=options.budget_seconds,
        resume=options.resume or None,
    )


def _asked(options: argparse.Namespace) -> Config:
    size = size_of(options.model, "bpe")
    if not isinstance(size, LlamaConfig):
        raise ValueError(f"--model {options.model} reads bytes; use 4x256 or a Llama")
    size = replace(size, vocabulary=read_tokenizer(OWN).size)
    return Config(
        options.model,
        size,
        learning_rate=forks.whole_run(size)["learning_rate"],
        warmup_steps=options.base_steps // 4,
        base_steps=options.base_steps,
        steps=options.steps,
        text_bytes=2**40 if options.data else Config.text_bytes,
        tokens="bpe",
    )


SMOKE = Config(
    "1x32",
    LlamaConfig(layers=1, width=32, heads=2, kv_heads=2, hidden=48, context=16),
    batch=2,
    sequence=16,
    warmup_steps=2,
    base_steps=4,
    steps=20,
    steps_per_call=1,
    heldout_windows=4,
    text_bytes=1_000_000,
)

BENCHMARK = Benchmark(
    "finish",
    __doc__,
    configure,
    measure,
    tables.table,
    options=add_options,
    joined=joined,
)

if __name__ == "__main__":
    BENCHMARK.command()
