"""Perplexity where a float checkpoint is stored, trained on, and written as floats again.

    python -m benchmarks.finetune --json
    python -m benchmarks.finetune --json --model llama-124m --base-steps 1000 --steps 300

A base trains in BF16 with float32 parameters and is written as `models.train --export` writes it. Each way starts from
that file (`--start`), trains on at a lower rate, and is written as floats again. The held-out perplexity is taken
before and after each of these steps, with the products that the way trains with and in BF16: what storing costs, what
training on gains, and what writing floats costs.
"""

import argparse
import dataclasses
import functools
import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import common
from benchmarks.common import Result, markdown_table
from models.checkpoint import export
from models.families import model_names
from models.running import checked_corpus
from models.settings import TrainConfig, preset
from models.train import corpus_of
from models.training import TrainState, batch_key, evaluate, init, make_train_step

NAME = "finetune"
WAYS: dict[str, dict[str, Any]] = {
    "bf16": dict(recipe="bf16"),
    "tensorwise": dict(recipe="tensorwise"),
    "stored": dict(recipe="tcfp12_single", weights="stored", moments="8bit"),
}


@dataclass(frozen=True)
class Config:
    """Settings of a run: `base_steps` in BF16, then `steps` of each way at `rate` times the base's learning rate."""

    model: str = "gpt2"
    base_steps: int = 1000
    steps: int = 300
    rate: float = 0.3
    batch: int = 16
    sequence: int = 1024
    heldout_windows: int = 256
    ways: tuple[str, ...] = tuple(WAYS)
    data: tuple[str, ...] = ()
    seed: int = 0


SMOKE = Config("tiny", base_steps=20, steps=10, batch=4, sequence=32, heldout_windows=8)


@dataclass(frozen=True)
class Row:
    """One evaluation.

    `stage` is "base" (the file, in BF16), "start" (as the way stores it), "trained" or "written" (as floats, in BF16);
    `ratio` is the perplexity over the base's, and `ratio_bf16` the same with BF16 products.
    """

    way: str
    stage: str
    perplexity: float
    perplexity_bf16: float
    ratio: float
    ratio_bf16: float


def add_options(parser: argparse.ArgumentParser) -> None:
    """The model, the text, the steps and the ways."""
    parser.add_argument("--model", choices=model_names(), help="size (default: gpt2 on a GPU, else tiny)")
    parser.add_argument("--data", nargs="+", default=None, help="as of models.train")
    parser.add_argument("--base-steps", type=int, default=None, help="of the base in BF16")
    parser.add_argument("--steps", type=int, default=None, help="of each way")
    parser.add_argument("--ways", default=None, help=f"some of {', '.join(WAYS)} (default: all)")


def configure(options: argparse.Namespace) -> Config:
    """The settings of a command line.

    Raises:
      ValueError: unknown ways, no steps, or a text that is shorter than a window.
    """
    config = Config() if jax.default_backend() == "gpu" and not options.smoke else SMOKE
    names = ("model", "base_steps", "steps")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    data, ways = tuple(options.data or ()), common.chosen_of("ways", options.ways, tuple(WAYS))
    config = dataclasses.replace(config, **given, data=data, ways=ways)
    checked_corpus(_run(config, config.base_steps, recipe="bf16"))
    _run(config, config.steps)
    return config


def _run(config: Config, steps: int, **own: Any) -> TrainConfig:
    """The run of the base, or of a way."""
    return preset(
        config.model, steps=steps, batch=config.batch, sequence=config.sequence, data=config.data, seed=config.seed,
        heldout_windows=config.heldout_windows, **own,
    )  # fmt: skip


def measure(config: Config) -> Iterator[Row]:
    """The base, and each way before and after it is trained, and written as floats."""
    with tempfile.TemporaryDirectory() as folder:
        base, path = _run(config, config.base_steps, recipe="bf16"), Path(folder) / "base.npz"
        rate = base.learning_rate * config.rate
        state = _trained(base, init(base))
        export(path, state.params)
        reference = _losses(base, state)
        row = functools.partial(_row, reference[1])
        yield row("bf16", "base", reference)
        for way in config.ways:
            own = _run(config, config.steps, **WAYS[way], start=str(path), learning_rate=rate)
            state = init(own)
            yield row(way, "start", _losses(own, state))
            state = _trained(own, state)
            yield row(way, "trained", _losses(own, state))
            written = Path(folder) / f"{way}.npz"
            export(written, state.params)
            again = dataclasses.replace(own.in_bf16, start=str(written))
            yield row(way, "written", _losses(again, init(again)))


def _trained(config: TrainConfig, state: TrainState) -> TrainState:
    text, key = jnp.asarray(corpus_of(config).train), batch_key(config)
    for step in range(0, config.steps, config.steps_per_call):
        count = min(config.steps_per_call, config.steps - step)
        state, _ = make_train_step(config, count)(state, text, key)
    return state


def _losses(config: TrainConfig, state: TrainState) -> tuple[float, float]:
    """Held-out losses with the products of a run, and in BF16."""
    heldout = jnp.asarray(corpus_of(config).heldout)
    return evaluate(config, state, heldout), evaluate(config, state, heldout, "bf16")


def _row(base: float, way: str, stage: str, losses: tuple[float, float]) -> Row:
    own, bf16 = losses
    return Row(way, stage, math.exp(own), math.exp(bf16), math.exp(own - base), math.exp(bf16 - base))


def show(rows: list[Row]) -> None:
    """Print the rows."""
    common.print_rows(rows, "way", "stage", "perplexity", "perplexity_bf16", "ratio", "ratio_bf16")


def table(result: Result) -> str:
    """A line an evaluation."""
    lines = [
        [r["way"], r["stage"], f"{r['perplexity']:.3f}", f"{r['ratio']:.4f}", f"{r['ratio_bf16']:.4f}"]
        for r in result.rows
    ]
    config = result.config
    return (
        f"{markdown_table(['way', 'parameters', 'perplexity', 'over the base', 'in BF16, over the base'], lines)}\n\n"
        f"{config['model']}: a base of {config['base_steps']} steps in BF16, then {config['steps']} steps of each way "
        f"at {config['rate']:g} of its rate."
    )


main = functools.partial(common.main, NAME)

if __name__ == "__main__":
    common.command(NAME)
