"""Bases and forks as they run: compiled several at once, stopped at a budget, and continued from a folder."""

import dataclasses
import functools
import hashlib
import math
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.fork_training import Config, last_phase, start_fork, steps_of, train_config
from benchmarks.timing import compile_at_once
from benchmarks.variants import BASELINE, VARIANTS, Variant
from models.checkpoint import RunDirectory, holds_run
from models.phases import phase_at, switched
from models.settings import TrainConfig
from models.training import TrainState, batch_key, init, lower_evaluation

_OTHER = 1_000_003  # added to a seed for other batches
_SAVE_SECONDS = 120.0  # what a run may lose that is killed


class OutOfTimeError(Exception):
    """A run stopped at its budget, and lies in the folder of bases."""


@dataclass(frozen=True)
class Base:
    """Where runs start: its seed, the digest of its losses, or "seed-0" of one without steps, and its state."""

    seed: int
    name: str
    state: TrainState


def compile_forks(config: Config, names: Sequence[str], text_bytes: int, heldout_bytes: int) -> None:
    """Compile the programs of base and runs, several at once; what calls them later finds them compiled."""
    base = jax.eval_shape(lambda: init(train_config(config, VARIANTS[BASELINE])))
    text, key = jax.ShapeDtypeStruct((text_bytes,), jnp.uint8), jax.random.key(0)
    one_at_a_time = threading.Lock()  # Python traces in one thread anyway; XLA compiles in several
    begun: set[Any] = set()

    def lowered(name: str) -> list[Any]:
        variant = VARIANTS[name]
        run, start = train_config(config, variant), start_fork(config, variant)
        state, _ = jax.eval_shape(start, base, key)
        before, last = phase_at(run, config.base_steps), last_phase(config, variant)
        ended = jax.eval_shape(functools.partial(switched, before, last), state)
        wanted: dict[Any, Any] = {
            start: lambda: start.lower(base, key),
            **{
                (phase, variant.remainder, variant.gradient_dtype): functools.partial(
                    steps_of(config, phase, variant.remainder).lower, found, text, batch_key(run)
                )
                for phase, found in ((before, state), (last, ended))
            },
            (last, variant.remainder, "evaluation"): lambda: lower_evaluation(last, ended, heldout_bytes),
        }
        missing = [lower for program, lower in wanted.items() if program not in begun]
        begun.update(wanted)
        return [lower() for lower in missing]

    def compile_one(name: str) -> None:
        with one_at_a_time:
            programs = lowered(name)
        for program in programs:
            program.compile()

    compile_at_once(compile_one, names)


def kept_base(config: Config, seed: int, digest: str) -> "Kept":
    """Where the base of a seed lies."""
    run = train_config(config, VARIANTS[BASELINE], seed)
    alone = dataclasses.replace(run, steps=config.base_steps)
    return Kept(config, alone, digest, f"base-{seed}-{config.warmup_steps}-{config.base_steps}")


def check_bases(config: Config, digest: str) -> None:
    """Look at the bases of all seeds that are kept, before anything is compiled.

    Raises:
      ValueError: one is of another model or text; the message names every difference.
    """
    for seed in config.seeds:
        _ = kept_base(config, seed, digest).newest


def train_base(config: Config, seed: int, text: jax.Array, digest: str, deadline: float = math.inf) -> Base:
    """The base of a seed: from its folder, or trained, and kept there; or without a step.

    Raises:
      OutOfTimeError: the deadline, by `time.perf_counter`, came first; what was trained is kept.
      ValueError: the folder holds a base of another model or text.
    """
    variant, started = VARIANTS[BASELINE], time.perf_counter()
    state = init(train_config(config, variant, seed))
    if not config.base_steps:
        return Base(seed, f"seed-{seed}", state)
    kept = kept_base(config, seed, digest)
    state, losses, _ = advance(config, variant, seed, state, text, kept, deadline, until="base")
    kept.save(state, losses)
    name = hashlib.sha256(np.asarray(losses, np.float64).tobytes()).hexdigest()[:12]
    print(
        f"base {name}, seed {seed}: training loss {last_tenth(losses):.4f}, {time.perf_counter() - started:.1f} s",
        flush=True,
    )
    return Base(seed, name, state)


def last_tenth(losses: list[float]) -> float:
    """The mean loss of the last tenth of the steps."""
    return float(np.mean(losses[-max(1, len(losses) // 10) :]))


class Kept:
    """The folder of one base or run in that of bases, where it lies when its time is over; of no bases, nowhere.

    Args:
      run: how it trains.
      digest: of the text.
      folder: the name of it.
    """

    def __init__(self, config: Config, run: TrainConfig, digest: str, folder: str) -> None:
        self.path = None if config.bases is None else Path(config.bases) / folder
        self._run, self._digest, self._written = run, digest, 0

    def _open(self) -> RunDirectory:
        assert self.path is not None
        return RunDirectory(self.path, self._run, self._digest, resume="allowed", option="--bases")

    @property
    def newest(self) -> int:
        """How many steps are kept.

        Raises:
          ValueError: they are of another run.
        """
        if self.path is None or not holds_run(self.path):
            return 0
        with self._open() as directory:
            return directory.newest_step

    def restore(self, state: TrainState) -> tuple[TrainState, list[float]]:
        """What is kept, as `state` is, and its losses; `state` and none where nothing is."""
        if not self.newest:
            return state, []
        with self._open() as directory:
            state, losses = directory.restore(state)
        self._written = len(losses)
        # Restored arrays are bound to their device, for which programs would be compiled anew.
        return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), state), losses

    def save(self, state: TrainState, losses: list[float]) -> None:
        """Keep a state after these losses, the first of them of its own first step."""
        if self.path is not None and len(losses) > self._written:
            with self._open() as directory:
                directory.append(self._written + 1, np.asarray(losses[self._written :]))
                directory.save(state, len(losses))
            self._written = len(losses)

    def remove(self) -> None:
        """Keep nothing any more."""
        if self.path is not None and self.path.exists():
            # Renamed first: of a folder that was deleted in part, by a process that is killed, no run could begin.
            gone = self.path.with_name(f"removed-{self.path.name}")
            shutil.rmtree(gone, ignore_errors=True)
            shutil.rmtree(self.path.rename(gone), ignore_errors=True)


def kept_run(config: Config, name: str, base: Base, digest: str) -> Kept:
    """Where a run of a variant lies that its budget stops: it is the variant's of today, of this base."""
    own = hashlib.sha256(repr((config.settings, VARIANTS[name], base.name)).encode()).hexdigest()[:12]
    return Kept(config, train_config(config, VARIANTS[name], base.seed), digest, f"stopped-{name}-{base.seed}-{own}")


def advance(
    config: Config, variant: Variant, seed: int, state: TrainState, text: jax.Array, kept: Kept,
    deadline: float = math.inf, until: Literal["base", "end"] = "end",
) -> tuple[TrainState, list[float], float]:  # fmt: skip
    """Train a base, or a run to its end, from what is kept of it.

    Returns:
      (state, losses of its steps, milliseconds of a step), the time without the first call of each program; NaN where
      a program was not called.

    Raises:
      OutOfTimeError: the deadline came first.
    """
    run = train_config(config, variant)  # without its seed, which the compiled functions need not know
    begin, end = (0, config.base_steps) if until == "base" else (config.base_steps, run.steps)
    key = batch_key(dataclasses.replace(run, seed=seed + _OTHER * (variant.batches == "other")))
    phase = phase_at(run, begin)
    if (later := phase_at(run, begin + max(0, kept.newest - 1))) != phase:
        phase, state = later, switched(phase, later, state)
    state, losses = kept.restore(state)
    saved, times = time.perf_counter(), dict[TrainConfig, list[float]]()
    for step in range(begin + len(losses), end, config.steps_per_call):
        now = time.perf_counter()
        if kept.path is not None and (now > deadline or now - saved > _SAVE_SECONDS):
            kept.save(state, losses)
            saved = time.perf_counter()
            if now > deadline:
                raise OutOfTimeError(f"stopped after {step - begin} of {end - begin} steps; --resume continues it")
        if (later := phase_at(run, step)) != phase:
            phase, state = later, switched(phase, later, state)
        jax.block_until_ready(state)
        now = time.perf_counter()
        state, values = steps_of(config, phase, variant.remainder)(state, text, key)
        losses += np.asarray(values, np.float64).tolist()
        times.setdefault(phase, []).append(time.perf_counter() - now)
    calls = [phase_at(run, step) for step in range(begin, end, config.steps_per_call)]
    seconds = [float(np.mean(times[each][1:] or times[each])) if each in times else math.nan for each in calls]
    return state, losses, float(np.mean(seconds)) * 1e3 / config.steps_per_call
