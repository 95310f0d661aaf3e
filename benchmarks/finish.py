"""Held-out loss of runs that end with other products than they were trained with.

    python -m benchmarks.finish --json --resume --budget-seconds 560
    python -m benchmarks.finish --json --resume --endings nvfp4,nvfp4_tensorwise

A base is trained once to its last part, and its state is kept in a folder. Each ending
goes on from this very state with the same batches and learning rates, so that the
noise of a difference is that of pairs. All runs of a seed have the same initial weights
and batches; their rate falls as a cosine to zero.

Calls follow each other on one machine: a base that is there is read, and a base that
the budget stopped goes on from its checkpoint. JSON is written after each ending, and
`--resume` keeps its rows. Processes that share file and folder share the runs. While a
base trains, threads compile the steps of its endings.
"""

import argparse
import contextlib
import hashlib
import math
import time
import traceback
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import finish_tables as tables
from benchmarks import forks
from benchmarks.convergence import size_of
from benchmarks.endings import ENDINGS, USUAL, as_begun
from benchmarks.forks import Config
from benchmarks.harness import Benchmark, add_resume, chosen_of, positive
from benchmarks.records import ROOT, origin_of_row, rows_of, rows_to_resume
from benchmarks.texts import corpus_of, on_device
from benchmarks.variants import BASELINE, VARIANTS
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


class Trained:
    """The base of a seed: states at the steps where its endings begin.

    Attributes:
      config: the settings.
      variant: the way to train it.
      seed: its seed.
      corpus: the text.
      name: digest of its first losses; endings of one base compare.
      states: the state at each step.
    """

    def __init__(self, config: Config, base: str, seed: int, corpus: Corpus) -> None:
        self.config = config
        self.base = base
        self.variant = VARIANTS[base]
        self.seed = seed
        self.corpus = corpus
        self.name = ""
        self.states: dict[int, TrainState] = {}

    @property
    def text(self) -> jax.Array:
        """The training text on the device."""
        config = self.config
        return on_device(config.data, config.text_bytes, config.tokens)

    def train(self, names: Iterable[str], deadline: float) -> None:
        """Train to the first step of each ending.

        Raises:
          TimeoutError: the deadline has passed; the folder holds a checkpoint.
        """
        config = self.config
        own = forks.train_config(config, self.variant, self.seed)
        state = init(own)
        begin = 0
        for end in sorted({config.steps - last_steps(config, name) for name in names}):
            folder_name = f"{self.base}-{self.seed}-{config.steps}-{end}"
            with forks.folder_of(config, own, self.corpus.digest, folder_name) as kept:
                state, losses, _ = forks.advance(
                    config,
                    self.variant,
                    self.seed,
                    state,
                    self.text,
                    end - begin,
                    kept,
                    deadline,
                )
            if not self.name:
                digest = hashlib.sha256(np.asarray(losses, np.float64).tobytes())
                self.name = digest.hexdigest()[:12]
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
        base = self.states[config.steps - steps]
        if ending.stored_as is None:
            state = jax.tree.map(jnp.copy, base)
        else:
            state = forks.start_fork(config, variant, base, jax.random.key(self.seed))
        state, losses, milliseconds = forks.advance(
            config, variant, self.seed, state, self.text, steps, None, deadline
        )
        own = forks.train_config(config, variant, self.seed)
        heldout = jnp.asarray(self.corpus.heldout)
        return Row(
            name=name,
            seed=self.seed,
            base=self.name,
            train_loss=forks.last_tenth(losses),
            heldout_loss=evaluate(own, state, heldout, "trained"),
            heldout_loss_bf16=evaluate(own, state, heldout, "bf16"),
            milliseconds=milliseconds,
            seconds=time.perf_counter() - started,
            **origin_of_row(),
        )


def measure(config: Config) -> Iterator[Row]:
    """Yield the rows that are kept, then the wanted ones that they lack.

    Raises:
      RuntimeError: an ending failed; the others were done first.
    """
    progress = _Progress(time.perf_counter() + config.budget_seconds)
    yield from rows_there(config)
    corpus = corpus_of(config.data, config.text_bytes, config.tokens)
    bases = dict.fromkeys(ENDINGS[name].base for name in config.variants)
    for seed in config.seeds:
        for base in bases:
            with forks.claimed(config, f"{seed}-{base}") as mine:
                if mine:
                    yield from _of_base(config, base, seed, corpus, progress)
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


def _of_base(
    config: Config, base: str, seed: int, corpus: Corpus, progress: _Progress
) -> Iterator[Row]:
    """Yield the rows of a seed's base that the file lacks."""
    kept = rows_there(config)
    done = {row.name for row in kept if row.seed == seed}
    of_base = [name for name in config.variants if ENDINGS[name].base == base]
    wanted = [name for name in of_base if name not in done]
    if not wanted:
        return
    trained = Trained(config, base, seed, corpus)
    try:
        progress.check()
        # A CPU has no time to spare.
        on_gpu = jax.default_backend() != "cpu"
        with compiled_ahead(trained, wanted if on_gpu else ()):
            trained.train({*wanted, as_begun(base)}, progress.deadline)
    except TimeoutError as error:
        print(f"base {base}, seed {seed}: {error}", flush=True)
        progress.left += [f"{name} of seed {seed}" for name in wanted]
        return
    # A base that was trained again is compared with itself.
    there = {row.name for row in kept if row.base == trained.name}
    first = as_begun(base)
    if first not in {*wanted, *there}:
        wanted.insert(0, first)
    for name in wanted:
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


@contextlib.contextmanager
def compiled_ahead(trained: Trained, names: Iterable[str]) -> Iterator[list[Future]]:
    """Compile the steps of endings in threads while the base trains.

    An ending whose program is not there compiles it itself, and reports its errors.
    """
    config = trained.config
    own = forks.train_config(config, trained.variant, trained.seed)
    state = jax.eval_shape(lambda: init(own))
    text = trained.text
    key = batch_key(own)

    def compiled(step: Any) -> None:
        step.lower(state, text, key).compile()

    endings = [ENDINGS[name] for name in names]
    steps = [
        forks.steps_of(config, ending.variant)
        for ending in endings
        if ending.stored_as is None
    ]
    threads = ThreadPoolExecutor(2)
    started = [threads.submit(compiled, step) for step in steps]
    try:
        yield started
    except TimeoutError:
        threads.shutdown(wait=False, cancel_futures=True)
        raise
    threads.shutdown()


def rows_there(config: Config) -> list[Row]:
    """Return the rows of the file of a run that is resumed, with the same settings.

    Raises:
      ValueError: the file is of other settings.
    """
    return rows_of(Row, rows_to_resume(config.resume, config.settings))


def joined(config: Config, rows: list[Row]) -> list[Row]:
    """Return the rows of the file of a run that is resumed, then new ones."""
    there = rows_there(config)
    known = {(row.name, row.seed, row.base) for row in there}
    return there + [row for row in rows if (row.name, row.seed, row.base) not in known]


# The command
# --------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add endings, seeds, sizes, and the budget."""
    add = parser.add_argument
    add("--endings", help=f"of {', '.join(ENDINGS)} (default: {','.join(USUAL)})")
    add("--model", default="6x640", help="a Llama of ids (default: 6x640)")
    add("--steps", type=positive, default=1000, help="of a whole run (default: 1000)")
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
    names = USUAL
    if options.endings:
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
        raise ValueError(f"--model {options.model} reads bytes; use 6x640 or a Llama")
    size = replace(size, vocabulary=read_tokenizer(OWN).size)
    usual = forks.whole_run(size)
    return Config(
        options.model,
        size,
        tokens="bpe",
        text_bytes=2**40 if options.data else Config.text_bytes,
        base_steps=0,
        steps_per_call=10,
        **{**usual, "steps": options.steps, "warmup_steps": options.steps // 10},
    )


SMOKE = Config(
    "1x32",
    LlamaConfig(layers=1, width=32, heads=2, kv_heads=2, hidden=48, context=16),
    batch=2,
    sequence=16,
    warmup_steps=2,
    base_steps=0,
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
