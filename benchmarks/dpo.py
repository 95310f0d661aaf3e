"""Direct preference optimization on one GPU: time, memory and margins next to BF16.

    python -m benchmarks.dpo --json
    python -m benchmarks.dpo --json --model llama-124m

The chosen answer goes on with the source file of its prompt, and the rejected one has
the same tokens in random order. Each pair is seen once, so rewards are of pairs that
the model does not know. Each candidate runs in a process of its own, from the same
random weights on the same pairs. "bf16" has float32 masters with `optax.adamw` and a
reference in BF16. "stored" has `W_hi + W_lo` alone with 8-bit moments, and a reference
in FP8. Before steps are timed, the first loss must be log 2, and margins must grow.
"""

import argparse
import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import timing
from benchmarks.harness import Benchmark, positive
from benchmarks.records import Result, cells
from benchmarks.texts import corpus_for
from benchmarks.variants import BASELINE
from models.nets.sizes import LLAMAS
from models.training.dpo import REWARDS, told
from models.training.examples import COUNTED, DOCUMENTS, TOKENS
from models.training.forms import Float, Stored
from models.training.preferences import Preferences
from models.training.settings import TrainConfig
from models.training.steps import batch_key, init, make_train_step
from tcfp_jax.remat import step_bytes
from tcfp_jax.weights.stored import bytes_of

STORED = "stored"
FORMS: dict[str, dict[str, Any]] = {
    BASELINE: dict(recipe="bf16", weights=Float()),
    STORED: dict(recipe="tcfp12_single", weights=Stored("8bit")),
}
LAST = 5  # steps of a reported reward


@dataclass(frozen=True)
class Config(timing.Repetitions):
    """Settings of a run.

    Attributes:
      model: Size of the model.
      pairs: Pairs in a step.
      sequence: Tokens of a prompt with its answer.
      prompt: Tokens of the prompt.
      steps: Steps before the timed ones.
      rate: The largest learning rate.
      beta: As in `Preferences`.
      text_bytes: Size of the text.
      remat: Values that each block keeps for its backward pass.
    """

    model: str
    pairs: int
    sequence: int
    prompt: int
    steps: int
    rate: float
    beta: float = 0.1
    text_bytes: int = 2**22
    remat: str = "products"


@dataclass(frozen=True)
class Run(timing.Timing):
    """Measurements of one candidate in its process.

    Attributes:
      state_bytes, reference_bytes: Arrays between two steps, and the part of the frozen
        reference.
      step_bytes: Arguments, results and arena of the compiled step.
      peak_bytes: Peak of the allocator; None if none is reported.
      compile_seconds: Seconds of tracing, lowering and compiling the step.
      losses: Loss of each step before the timed ones.
      rewards: Means of `models.training.dpo.REWARDS` over the last `LAST` of them.
    """

    state_bytes: int
    reference_bytes: int
    step_bytes: int
    peak_bytes: int | None
    compile_seconds: float
    losses: tuple[float, ...]
    rewards: dict[str, float]


@dataclass(frozen=True)
class Row(Run):
    """One candidate, its tokens in a second, and its speedup over BF16."""

    recipe: str
    tokens_per_second: float
    speedup_over_bf16: float


def measure(config: Config) -> Iterator[Row]:
    """Measure the candidates in sequence.

    Raises:
      ArithmeticError: a first loss is not log 2, or margins do not grow.
    """
    baseline = None
    tokens = 2 * config.pairs * config.sequence
    for name in FORMS:
        run = timing.measure_in_own_process(train, config, name)
        _check(name, run)
        baseline = baseline or run.median_ms
        yield Row(
            **vars(run),
            recipe=name,
            tokens_per_second=tokens / run.median_ms * 1e3,
            speedup_over_bf16=baseline / run.median_ms,
        )


def _check(name: str, run: Run) -> None:
    margin = run.rewards["rewards/margins"]
    same = math.isclose(run.losses[0], math.log(2), rel_tol=1e-3)
    if not same or not margin > 0:
        raise ArithmeticError(
            f"{name}: the first loss is {run.losses[0]} instead of log 2, or the last"
            f" margin {margin} is not positive; nothing is timed of it"
        )


def train(config: Config, name: str) -> Run:
    """Train, then time further steps."""
    run = TrainConfig(
        model=dataclasses.replace(LLAMAS[config.model], remat=config.remat),
        steps=config.steps,
        batch=config.pairs,
        sequence=config.sequence,
        learning_rate=config.rate,
        final_fraction=1.0,
        weight_decay=0.0,
        preferences=Preferences(config.beta),
        **FORMS[name],
    )
    text = corpus_for(run.size, config.text_bytes)
    pairs = jnp.asarray(draw_pairs(config, text.train))
    state = init(run)
    key = batch_key(run)
    jitted = make_train_step(run, 1)
    compiled, seconds = timing.compile_timed(jitted, state, pairs, key)
    state_bytes = bytes_of(state)
    reference_bytes = bytes_of(getattr(state, "reference", None))
    step = timing.Threaded(jitted, compiled, state, pairs, key)
    del state
    found = [step() for _ in range(config.steps)]
    losses, rewards = told(jnp.concatenate(found))
    timed = config.by_wall_clock({name: (step, ())})[name]
    return Run(
        **vars(timed),
        state_bytes=state_bytes,
        reference_bytes=reference_bytes,
        step_bytes=step_bytes(compiled),
        peak_bytes=timing.peak_bytes(),
        compile_seconds=seconds,
        losses=tuple(losses.tolist()),
        rewards={each: float(rewards[each][-LAST:].mean()) for each in REWARDS},
    )


def draw_pairs(config: Config, text: np.ndarray) -> np.ndarray:
    """Return int32 `[pairs, 2, 3, sequence + 1]`, as `load_pairs` does, of one epoch.

    The pairs are the same for every candidate.
    """
    rng = np.random.default_rng(0)
    count = config.steps * config.pairs
    length = config.sequence + 1
    begins = rng.integers(0, len(text) - length, count)
    windows = text[begins[:, None] + np.arange(length)]
    made = np.zeros((count, 2, 3, length), np.int32)
    made[:, :, TOKENS] = windows[:, None]
    made[:, 1, TOKENS, config.prompt :] = rng.permuted(
        windows[:, config.prompt :], axis=1
    )
    made[:, :, DOCUMENTS] = 1
    made[:, :, COUNTED, config.prompt :] = 1
    return made


# The command and its table
# --------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the size."""
    parser.add_argument("--model", choices=tuple(LLAMAS), help="(default: llama-1b)")
    parser.add_argument("--steps", type=positive, help="before the timed ones")
    parser.add_argument("--rate", type=float, default=1e-5, help="of learning")


def configure(options: argparse.Namespace) -> Config:
    """Return the settings of a command line."""
    if jax.default_backend() == "gpu" and not options.smoke:
        model = options.model or "llama-1b"
        steps = options.steps or 30
        return Config(model, 8, 1024, 256, steps, options.rate, rounds=2, calls=3)
    model = options.model or "llama-tiny"
    steps = options.steps or 8
    return Config(model, 4, 32, 8, steps, 1e-3, text_bytes=2**16, rounds=1, calls=1)


def table(result: Result) -> str:
    """Return the page's table, one line per candidate."""
    columns = {
        "": "`{recipe}`",
        "ms per step": "{median_ms:,.0f}",
        "tokens per second": "{tokens_per_second:,.0f}",
        "speedup over BF16": "**{speedup_over_bf16:.2f}**",
        "accuracy": "{accuracy:.0%}",
        "margin": "{margin:.2f}",
        "state, GB": "{state_gigabytes:.1f}",
        "of it the reference, GB": "{reference_gigabytes:.1f}",
        "peak, GB": "{peak_gigabytes:.1f}",
    }
    rows = []
    for row in result.rows:
        rewards = row["rewards"]
        means = dict(
            accuracy=rewards["rewards/accuracies"], margin=rewards["rewards/margins"]
        )
        rows.append({**row, **means})
    config = result.config
    return (
        f"{cells(rows, columns)}\n\n`{config['model']}` from random weights,"
        f" {config['pairs']} pairs per step, {config['prompt']} tokens of a prompt and"
        f" {config['sequence'] - config['prompt']} of each answer, beta"
        f" {config['beta']}. Accuracy and margin of the rewards are means of steps"
        f" {config['steps'] - LAST + 1} to {config['steps']}, over pairs that are seen"
        " for the first time. State is all that outlives a step, and peak is of the"
        " allocator."
    )


BENCHMARK = Benchmark("dpo", __doc__, configure, measure, table, options=add_options)

if __name__ == "__main__":
    BENCHMARK.command()
