"""Llama-3-8B on one GPU: a first training run of twenty steps on real text, with stored weights and in BF16.

    python -m benchmarks.large --json
    python -m benchmarks.large --json --bf16-layers 8        if BF16's state does not fit at full depth
    python -m benchmarks.large --json --model llama-1b --recipes stored,tensorwise

"stored" has `W_hi + W_lo` as its only weights, and 8-bit moments; "bf16" has float32 masters and `optax.adamw`, and so
have other recipes, with error feedback. Every recipe takes the head, too. Each
runs in a process of its own with all of the GPU's memory, from the same initial weights on the same windows of
installed Python sources, as bytes. The learning rate grows from zero. Losses must fall, and the first losses agree,
before steps are timed. With remat="auto" each keeps as much for its backward pass as fits. Speeds are per layer,
because BF16 may have fewer layers.
"""

import argparse
import dataclasses
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import common, fitting, llama, timing
from benchmarks.common import Result, markdown_table
from benchmarks.llama import BASELINE, CANDIDATES, PEAK_TFLOPS, STORED
from models.llama import LLAMAS, LlamaConfig, Loop
from models.moe import MOES
from models.text import load_installed

NAME = "large"
TEXT = "Python files of site-packages and of the standard library, as bytes"
# Largest relative difference of two first losses, which are both near the logarithm of the vocabulary, of models with
# the same layers and with others.
FIRST_LOSS, OTHER_DEPTH = 0.01, 0.04


@dataclass(frozen=True)
class Config:
    """Settings of a run.

    Attributes:
      model: Size of the model.
      layers: (name, layers) of each candidate in order; the first is BF16.
      tokens: Sequences, and tokens in each.
      text_bytes: Size of the text.
      steps: Steps with a loss before the timed ones.
      rounds, calls: Repetitions of the timing.
    """

    model: LlamaConfig
    layers: tuple[tuple[str, int], ...]
    tokens: tuple[int, int]
    text_bytes: int = 2**24
    steps: int = 20
    rounds: int = 2
    calls: int = 2


@dataclass(frozen=True)
class Row(timing.Timing):
    """One candidate.

    Attributes:
      recipe, layers, tokens: The candidate, its layers, and the tokens of a step.
      tokens_per_second, model_tflops, mfu: Rates of the median, as in `benchmarks.llama`.
      layer_speed_over_bf16: Tokens a second times layers, divided by BF16's.
      remat: Values that a block keeps for its backward pass.
      compile_seconds: Seconds of tracing, lowering and compiling the first step.
      arena_bytes: Temporary memory of the program, besides arguments and results.
      step_bytes: Arguments, results and arena.
      peak_bytes: Peak of the allocator; None if none is reported.
      losses: Losses of the first steps, in nats per byte.
      text: The text they were trained on.
    """

    recipe: str
    layers: int
    tokens: int
    tokens_per_second: float
    model_tflops: float
    mfu: float
    layer_speed_over_bf16: float
    remat: str
    compile_seconds: float
    arena_bytes: int
    step_bytes: int
    peak_bytes: int | None
    losses: tuple[float, ...]
    text: str


class Run(NamedTuple):
    """Measurements of one candidate in its process."""

    timed: timing.Timing
    remat: str
    compile_seconds: float
    arena_bytes: int
    step_bytes: int
    peak_bytes: int | None
    losses: tuple[float, ...]


def measure(config: Config) -> Iterator[Row]:
    """Measure the candidates in sequence; raise `ArithmeticError` if losses do not fall or differ at the start."""
    first: Run | None = None
    speed = 1.0
    for name, layers in config.layers:
        call = (config, name, layers)
        run = timing.measure_alone(train, [call], "whole")[0] if timing.has_peaks() else train(*call)
        alike = FIRST_LOSS if layers == config.layers[0][1] else OTHER_DEPTH
        check_losses(name, run.losses, first.losses[0] if first else run.losses[0], alike)
        seconds, count = run.timed.median_ms / 1e3, math.prod(config.tokens)
        size = dataclasses.replace(config.model, layers=layers)
        tflops = llama.operations(size, config.tokens, "step") / seconds / 1e12
        if first is None:
            first, speed = run, layers / seconds
        yield Row(
            **dataclasses.asdict(run.timed), recipe=name, layers=layers, tokens=count,
            tokens_per_second=count / seconds, model_tflops=tflops, mfu=tflops / PEAK_TFLOPS,
            layer_speed_over_bf16=layers / seconds / speed, remat=run.remat, compile_seconds=run.compile_seconds,
            arena_bytes=run.arena_bytes, step_bytes=run.step_bytes, peak_bytes=run.peak_bytes, losses=run.losses,
            text=TEXT,
        )  # fmt: skip


def train(config: Config, name: str, layers: int) -> Run:
    """Train twenty steps, then time further ones."""
    size = dataclasses.replace(config.model, layers=layers)
    settings: Any = llama.Config(size, size, config.tokens, config.tokens, {}, include=("linear", "small", "head"))
    # A first update of full size would raise the loss of a model this wide to 27.
    make = functools.partial(llama.make_training, rate=optax.linear_schedule(0.0, 4e-5, config.steps))
    settings, done = fitting.settled(settings, name, make)
    (step, compile_seconds), losses = make(settings, name).compile(done=done), []
    for windows in draw_windows(config):
        step.inputs = (windows,)
        losses.append(step())
    timed = timing.time_by_wall_clock({name: (step, ())}, rounds=config.rounds, calls=config.calls)[name]
    memory = step.compiled.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return Run(
        timed, settings.step.remat, compile_seconds, memory.temp_size_in_bytes, held + memory.temp_size_in_bytes,
        timing.peak_bytes(), tuple(map(float, losses)),
    )  # fmt: skip


def draw_windows(config: Config) -> Iterator[jax.Array]:
    """Yield int32 `[batch, positions + 1]` of the text for each step, the same for every candidate."""
    text = load_installed(byte_limit=config.text_bytes).train
    rng, (batch, positions) = np.random.default_rng(0), config.tokens
    for _ in range(config.steps):
        begins = rng.integers(0, len(text) - positions, batch)
        yield jnp.asarray(text[begins[:, None] + np.arange(positions + 1)], jnp.int32)


def check_losses(name: str, losses: tuple[float, ...], first: float, alike: float = FIRST_LOSS) -> None:
    """Raise `ArithmeticError` unless losses are finite, begin near `first` and fall.

    >>> check_losses("stored", (5.5, 5.4, 5.0, 4.8), 5.52)
    """
    quarter = max(1, len(losses) // 4)
    begin, end = np.mean(losses[:quarter]), np.mean(losses[-quarter:])
    if not np.all(np.isfinite(losses)) or not end < begin:
        raise ArithmeticError(f"{name}: the losses {losses} do not fall; nothing is timed of such a step")
    if not math.isclose(losses[0], first, rel_tol=alike):
        raise ArithmeticError(f"{name}: the first loss is {losses[0]}, BF16's {first}, of the same weights and windows")


# The command and its table --------------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add sizes."""
    parser.add_argument("--model", choices=[*LLAMAS, *MOES], help="(default: llama-8b on a GPU)")
    parser.add_argument("--recipes", default=STORED, help=f"next to {BASELINE} (default: {STORED})")
    parser.add_argument("--sequences", type=int, default=4, help="of 4096 tokens on a GPU (default: 4)")
    parser.add_argument("--layers", type=int, help="of the model (default: all)")
    parser.add_argument("--bf16-layers", type=int, help="(default: as many)")
    parser.add_argument("--remat", help="values that blocks keep (default: the model's, auto for llama-8b)")
    parser.add_argument("--loop", choices=get_args(Loop), default="scan", help="over the blocks (default: scan)")


def configure(options: argparse.Namespace) -> Config:
    """Return the settings of a command line; raise `ValueError` if BF16 has more layers than the model."""
    on_gpu = jax.default_backend() == "gpu" and not options.smoke
    model = (LLAMAS | MOES)[options.model or ("llama-8b" if on_gpu else "llama-tiny")]
    model = dataclasses.replace(
        model, layers=options.layers or model.layers, remat=options.remat or model.remat, loop=options.loop
    )
    baseline = model.layers if options.bf16_layers is None else options.bf16_layers
    if not 0 < baseline <= model.layers:
        raise ValueError(f"--bf16-layers {baseline} of a model with {model.layers} layers; use 1 to {model.layers}")
    names = common.chosen_of("recipes", options.recipes, [name for name in CANDIDATES["step"] if name != BASELINE])
    layers = ((BASELINE, baseline), *((name, model.layers) for name in names))
    if not on_gpu:
        return Config(model, layers, (2, 64), text_bytes=2**18, rounds=1, calls=1)
    return Config(model, layers, (options.sequences, min(4096, model.context)))


def show(rows: list[Row]) -> None:
    """Print the rows and their losses."""
    columns = ("recipe", "layers", "median_ms", "tokens_per_second", "layer_speed_over_bf16", "mfu", "remat")
    common.print_rows(rows, *columns, "compile_seconds", "arena_bytes", "step_bytes", "peak_bytes", "timer")
    for row in rows:
        print(f"{row.recipe}: " + " ".join(f"{loss:.3f}" for loss in row.losses))


def table(result: Result) -> str:
    """Return the page's table, one line per candidate."""
    lines = []
    for row in result.rows:
        peak = "–" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e9:.1f}"
        lines.append(
            [
                f"`{row['recipe']}`", str(row["layers"]), f"{row['median_ms']:,.0f}",
                f"{row['tokens_per_second']:,.0f}", f"**{row['layer_speed_over_bf16']:.2f}**", f"{row['mfu']:.0%}",
                f"{row['step_bytes'] / 1e9:.1f}", peak, f"{row['compile_seconds']:.0f}",
                f"{row['losses'][0]:.2f} → {row['losses'][-1]:.2f}",
            ]
        )  # fmt: skip
    titles = [
        "", "layers", "ms a step", "tokens a second", "per layer over BF16", "MFU", "step, GB", "peak, GB",
        "compiling, s", "loss",
    ]  # fmt: skip
    size, (batch, positions) = result.config["model"], result.config["tokens"]
    kind = f"mixture of {size['experts']} experts" if "experts" in size else "Llama"
    return (
        f"{markdown_table(titles, lines)}\n\nA {kind} of width {size['width']}, hidden {size['hidden']}, a vocabulary "
        f"of {size['vocabulary']}, {batch} × {positions} tokens a step. Step is what the compiled step needs, with its "
        f"state; peak is the allocator's. The losses are those of the first {result.config['steps']} steps, in nats "
        f"per byte, of {result.rows[0]['text']}."
    )


main = functools.partial(common.main, NAME)

if __name__ == "__main__":
    common.command(NAME)
