"""Time of a training step that is observed (`models.train --monitor`), beside one that is not.

    python -m benchmarks.monitoring --json
    python -m benchmarks.monitoring --json --models gpt2,llama-124m --every 10

Both steps run in turn, on one state each. `overhead` is what observing one step of `every` adds to the run. The first
figure of the issue, 0 with readings off, is a test: the compiled step is the same text (`tests/monitor`).
"""

import argparse
import dataclasses
import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import common, timing
from benchmarks.common import Result, markdown_table
from models.families import model_names
from models.monitoring import make_monitored_step
from models.settings import TrainConfig, preset
from models.training import batch_key, init, make_train_step

NAME = "monitoring"
_TEXT_BYTES = 1 << 20
WAYS: dict[str, dict[str, Any]] = {
    "tensorwise": dict(recipe="tensorwise"),
    "stored": dict(recipe="tcfp12_single", weights="stored", moments="8bit"),
}


@dataclass(frozen=True)
class Config:
    """Settings of a run; `every` is how often a step is observed."""

    models: tuple[str, ...] = ("gpt2", "llama-124m")
    ways: tuple[str, ...] = tuple(WAYS)
    batch: int = 16
    sequence: int = 1024
    every: int = 10
    rounds: int = 5
    calls: int = 5


SMOKE = Config(("tiny",), ("stored",), batch=2, sequence=32, rounds=2, calls=1)


@dataclass(frozen=True)
class Row(timing.Timing):
    """One kind of step; `over_plain` is its time over that of the plain step, `overhead` of one observed in `every`."""

    model: str
    way: str
    step: str
    over_plain: float
    overhead: float


def add_options(parser: argparse.ArgumentParser) -> None:
    """The models, and how often."""
    parser.add_argument("--models", default=None, help=f"some of {', '.join(model_names())}")
    parser.add_argument(
        "--every", type=common.positive, default=Config.every, help="steps, of which one is observed (default: 10)"
    )


def configure(options: argparse.Namespace) -> Config:
    """The settings of a command line."""
    config = Config() if jax.default_backend() == "gpu" and not options.smoke else SMOKE
    if options.models:
        config = dataclasses.replace(config, models=common.chosen_of("models", options.models, model_names()))
    return dataclasses.replace(config, every=options.every)


def measure(config: Config) -> Iterator[Row]:
    """Compile every step, several at once, because that takes longest, and time those of each model and way in turn."""
    lowered = {(model, way): _lowered(config, model, way) for model in config.models for way in config.ways}
    with ThreadPoolExecutor(8) as pool:
        compiling = {
            case: {name: pool.submit(program.compile) for name, (_, program) in steps.items()}
            for case, steps in lowered.items()
        }
        for (model, way), steps in lowered.items():
            compiled = {name: found.result() for name, found in compiling.pop((model, way)).items()}
            yield from _measure(config, model, way, {name: (steps[name][0], compiled[name]) for name in steps})


def _run_of(config: Config, model: str, way: str) -> TrainConfig:
    return preset(model, **WAYS[way], batch=config.batch, sequence=config.sequence, steps_per_call=1)


def _lowered(config: Config, model: str, way: str) -> dict[str, tuple[Any, Any]]:
    """The plain and the observed step, jitted and lowered."""
    run = _run_of(config, model, way)
    observed = make_monitored_step(run)

    def watched(state: Any, text: jax.Array, key: jax.Array) -> Any:
        state, losses, report = observed(state, text, key)
        return state, (losses, report)

    steps: Any = {"plain": make_train_step(run), "observed": jax.jit(watched, donate_argnums=0)}
    given = jax.eval_shape(lambda: init(run)), jax.ShapeDtypeStruct((_TEXT_BYTES,), jnp.uint8), batch_key(run)
    return {name: (step, step.lower(*given)) for name, step in steps.items()}


def _measure(config: Config, model: str, way: str, steps: dict[str, tuple[Any, Any]]) -> Iterator[Row]:
    run = _run_of(config, model, way)
    text = jax.random.randint(jax.random.key(0), (_TEXT_BYTES,), 0, 256).astype(jnp.uint8)
    ready = {name: timing.Threaded(*step, init(run), text, batch_key(run)) for name, step in steps.items()}
    timed = timing.time_interleaved(
        {name: (step, ()) for name, step in ready.items()}, rounds=config.rounds, calls=config.calls
    )
    for name, found in timed.items():
        ratio = found.median_ms / timed["plain"].median_ms
        fields = dataclasses.asdict(found)
        yield Row(**fields, model=model, way=way, step=name, over_plain=ratio, overhead=(ratio - 1) / config.every)


def show(rows: list[Row]) -> None:
    """Print the rows."""
    common.print_rows(rows, "model", "way", "step", "median_ms", "min_ms", "max_ms", "over_plain", "overhead", "timer")


def table(result: Result) -> str:
    """A line a step."""
    lines = [
        [r["model"], r["way"], r["step"], f"{r['median_ms']:.2f} ms", f"{r['over_plain']:.3f}", f"{r['overhead']:.2%}"]
        for r in result.rows
    ]
    titles = ["model", "recipe", "step", "time", "over plain", f"one in {result.config['every']}"]
    return f"{markdown_table(titles, lines)}\n\nA training step, {result.rows[0]['timer']}."


main = functools.partial(common.main, NAME)

if __name__ == "__main__":
    common.command(NAME)
