"""Both passes of an MLP, by this library's recipes and by other libraries.

    python -m benchmarks.peers --json
    python -m benchmarks.peers --json --recipes "tensorwise,transformer_engine"

The MLP is d -> d_ff -> d with relu between, without bias. Parameters are float32 and
activations bfloat16. A call returns the output, and the gradients of input and weights.
They are compared with BF16's before the timing. The clock is the wall clock. Weights of
recipes are quantized beforehand, once per step; other libraries quantize theirs within
the call (`benchmarks.peer_models`).
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import jax

from benchmarks import timing, train_step
from benchmarks.harness import Benchmark, chosen_of
from benchmarks.peer_models import PEERS, is_installed, make_peer, mlp_of
from benchmarks.products import MIDDLE, GemmShape
from benchmarks.records import Result, cells, times
from benchmarks.variants import BASELINE

NAMES = (BASELINE, "tensorwise", "tcfp12_single", "rowwise", *PEERS)
SMALL = GemmShape(64, 32, 64)


@dataclass(frozen=True)
class Config(timing.Repetitions):
    """Settings of a run; m, k and n of the shape are tokens, d and d_ff."""

    shape: GemmShape
    recipes: tuple[str, ...] = NAMES


@dataclass(frozen=True)
class Row(timing.Timing):
    """One recipe or library.

    Attributes:
      shape: "tokens x d x d_ff".
      recipe: The name.
      speed_over_bf16: BF16's median divided by this one.
      worst_snr_db: Lowest SNR of output and gradients against BF16's; None for BF16.
      compile_seconds: Seconds of tracing, lowering and compiling.
    """

    shape: str
    recipe: str
    speed_over_bf16: float
    worst_snr_db: float | None
    compile_seconds: float


def make(name: str, shape: GemmShape) -> train_step.Candidate:
    """Return both passes of the MLP, compiled."""
    if name in PEERS:
        return make_peer(mlp_of(name, shape), partial(train_step.draw, shape))
    return train_step.make_gradients(shape, train_step.VARIANTS[name])


def measure(config: Config) -> Iterator[Row]:
    """Check and time all candidates in turn.

    Raises:
      ArithmeticError: an output is wrong.
    """
    names = [name for name in config.recipes if is_installed(name)]
    made = {name: make(name, config.shape) for name in names}
    worst = train_step.compare_outputs({n: one.outputs for n, one in made.items()})
    timed = config.by_wall_clock({n: one[:2] for n, one in made.items()})
    for name, one in made.items():
        yield Row(
            **vars(timed[name]),
            shape=str(config.shape),
            recipe=name,
            speed_over_bf16=timed[BASELINE].median_ms / timed[name].median_ms,
            worst_snr_db=worst[name],
            compile_seconds=one.compile_seconds,
        )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add recipes and the shape."""
    parser.add_argument(
        "--recipes", help=f"of {', '.join(NAMES)}; {BASELINE} always runs"
    )
    parser.add_argument(
        "--shape", help=f"TOKENSxDxD_FF (default on a GPU: {MIDDLE}, else {SMALL})"
    )


def configure(options: argparse.Namespace) -> Config:
    """Return the settings of a command line.

    Raises:
      ValueError: a recipe or the shape is unknown.
    """
    on_gpu = jax.default_backend() == "gpu" and not options.smoke
    shape = GemmShape.parse(options.shape or str(MIDDLE if on_gpu else SMALL))
    wanted = BASELINE, *chosen_of("recipes", options.recipes, NAMES)
    recipes = tuple(name for name in NAMES if name in wanted)
    few = {} if on_gpu else {"rounds": 2, "calls": 2}
    return Config(shape, recipes, **few)


def table(result: Result) -> str:
    """Return the page's table: one line per recipe or library."""
    columns = {
        "": "`{recipe}`",
        "ms": "{median_ms:.2f}",
        "speedup over BF16": "**{speed_over_bf16:.2f}**",
        "lowest SNR against BF16, dB": "{worst_snr_db:.1f}",
    }
    (shape,) = result.distinct("shape")
    return (
        f"Forward and backward pass of an MLP, tokens × d × d_ff = {times(shape)},"
        f" wall clock.\n\n{cells(result.rows, columns)}"
    )


BENCHMARK = Benchmark(
    "peers",
    __doc__,
    configure,
    measure,
    table,
    options=add_options,
    smoke={"recipes": "tensorwise"},
)

if __name__ == "__main__":
    BENCHMARK.command()
