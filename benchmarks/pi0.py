"""Training of all of pi-0 on one GPU: time and memory of each way.

    python -m benchmarks.pi0 --json
    python -m benchmarks.pi0 --json --ways stored,late --batch 4

The model and its steps are those of `examples.pi0`, with random weights and data. Each
way runs in a process of its own, with all of the GPU's memory, from the same first
weights on the same batches. First losses must agree with those of "float", and losses
must fall.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import jax

from benchmarks import timing
from benchmarks.harness import Benchmark, chosen_of, positive
from benchmarks.large import check_losses
from benchmarks.records import Result, cells
from examples import pi0


@dataclass(frozen=True)
class Config:
    """Settings of a run.

    Attributes:
      sizes: Sizes of the model.
      ways: Names of `examples.pi0.WAYS`.
      batch: Examples in a step.
      steps: Steps to train; speeds are their median.
      rate: The learning rate.
    """

    sizes: pi0.Config
    ways: tuple[str, ...]
    batch: int
    steps: int
    rate: float


@dataclass(frozen=True)
class Row:
    """One way to train.

    Attributes:
      way: Its name.
      parameters: Weights of the model.
      state_bytes: Everything between two steps.
      step_bytes: Arguments, results and arena of the compiled step.
      peak_bytes: Peak of the allocator; None if none is reported.
      examples_per_second: Rate of the median step.
      tokens_per_second: The same in tokens of images, prompt, state and actions.
      losses: Loss of each step.
    """

    way: str
    parameters: int
    state_bytes: int
    step_bytes: int
    peak_bytes: int | None
    examples_per_second: float
    tokens_per_second: float
    losses: tuple[float, ...]


def measure(config: Config) -> Iterator[Row]:
    """Measure the ways in sequence.

    Raises:
      ArithmeticError: losses do not fall, or first losses differ.
    """
    first = None
    for way in config.ways:
        row = timing.measure_in_own_process(train, config, way)
        first = row.losses[0] if first is None else first
        check_losses(way, row.losses, first, alike=0.05)
        yield row


def train(config: Config, way: str) -> Row:
    """Train in one way."""
    sizes = config.sizes
    found = pi0.measure(sizes, way, config.batch, config.steps, config.rate)
    del found["device"]
    losses = tuple(found.pop("losses"))
    tokens = found["examples_per_second"] * tokens_of(sizes)
    return Row(way=way, **found, losses=losses, tokens_per_second=tokens)


def tokens_of(sizes: pi0.Config) -> int:
    """Return the tokens of an example: images, prompt, state and actions.

    >>> tokens_of(pi0.Config())
    867
    """
    images = sizes.cameras * (sizes.pixels // sizes.patch) ** 2
    return images + sizes.prompt + 1 + sizes.horizon


# The command and its table
# --------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add ways and sizes."""
    parser.add_argument("--ways", help=f"of {', '.join(pi0.WAYS)} (default: all)")
    parser.add_argument(
        "--batch", type=positive, default=8, help="examples of a step on a GPU"
    )
    parser.add_argument("--steps", type=positive, default=20, help="(default: 20)")


def configure(options: argparse.Namespace) -> Config:
    """Return the settings of a command line."""
    ways = chosen_of("ways", options.ways, tuple(pi0.WAYS))
    if jax.default_backend() == "gpu" and not options.smoke:
        return Config(pi0.Config(), ways, options.batch, options.steps, 1e-4)
    return Config(pi0.TINY, ways, 16, 12, 3e-3)


def table(result: Result) -> str:
    """Return the page's table, one line per way."""
    columns = {
        "`--step`": "`{way}`",
        "state, GB": "{state_gigabytes:.1f}",
        "peak, GB": "{peak_gigabytes:.1f}",
        "examples per second": "{examples_per_second:.1f}",
        "tokens per second": "{tokens_per_second:,.0f}",
        "loss": "{first:.3f} → {last:.3f}",
    }
    rows = []
    for row in result.rows:
        losses = row["losses"]
        rows.append({**row, "first": losses[0], "last": losses[-1]})
    config = result.config
    return (
        f"{cells(rows, columns)}\n\n{config['batch']} examples per step, losses of the"
        f" first and of step {config['steps']}. State is all that outlives a step, and"
        " peak is of the allocator."
    )


BENCHMARK = Benchmark("pi0", __doc__, configure, measure, table, options=add_options)

if __name__ == "__main__":
    BENCHMARK.command()
