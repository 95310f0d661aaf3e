"""Llama-3-8B on one GPU: a first training run of twenty steps on real text, with stored
weights and in BF16.

    python -m benchmarks.large --json
    python -m benchmarks.large --json --bf16-layers 8        if BF16's state does not fit at full depth
    python -m benchmarks.large --json --model llama-1b --recipes stored,tensorwise
    python -m benchmarks.large --json --layers 8 --steps 300 --recipes bf16        curves, one candidate in a call:
    python -m benchmarks.large --json --layers 8 --steps 300 --resume              it keeps BF16's row

"stored" has `W_hi + W_lo` as its only weights, and 8-bit moments; "bf16" has float32
masters and `optax.adamw`, and so have other recipes, with error feedback. Every recipe
takes the head, too. Each runs in a process of its own with all of the GPU's memory,
from the same initial weights on the same windows of installed Python sources, as ids of
`models.tokens.OWN`. The learning rate grows from zero. Losses must fall, and the first
losses agree, before steps are timed. With remat="auto" each keeps as much for its
backward pass as fits. Speeds are per layer, because BF16 may have fewer layers.
"""

import argparse
import dataclasses
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import fitting, llama, timing
from benchmarks.harness import Benchmark
from benchmarks.llama import BASELINE, CANDIDATES, PEAK_TFLOPS, STORED
from benchmarks.options import chosen_of, positive
from benchmarks.records import Result, rows_to_resume
from benchmarks.shapes import quick
from benchmarks.tables import markdown_table, print_rows
from models.huggingface.tokenizer import read_tokenizer
from models.nets.shapes import LlamaConfig, Loop
from models.nets.sizes import LLAMAS, MOES
from models.tokens import OWN
from models.training.text import load_installed
from models.training.tokenized import tokenized

NAME = "large"
TEXT = "Python files of site-packages and of the standard library"
# Steps before the timing; of a longer run the last steps, and the largest rate
SHORT, LAST, PEAK = 20, 30, 1e-4
# Largest relative difference of two first losses, which are both near the logarithm of
# the vocabulary, of models with the same layers and with others.
FIRST_LOSS, OTHER_DEPTH = 0.01, 0.04


@dataclass(frozen=True)
class Config:
    """Settings of a run.

    Attributes:
      model: Size of the model.
      layers: (name, layers) of each candidate in order; the first is BF16.
      tokens: Sequences, and tokens in each.
      text_bytes: Size of the text.
      steps: Steps with a loss before the timed ones. The rate rises all the time of a
        short run; of a longer one it rises for a fifth, and falls as a cosine.
      resume: JSON whose rows are kept.
      rounds, calls: Repetitions of the timing.
    """

    model: LlamaConfig
    layers: tuple[tuple[str, int], ...]
    tokens: tuple[int, int]
    text_bytes: int = 2**25
    steps: int = SHORT
    rounds: int = 2
    calls: int = 2
    resume: str | None = None

    @property
    def settings(self) -> dict[str, object]:
        """Everything that rows of one table share."""
        shared = {**dataclasses.asdict(self), "tokens": [*self.tokens]}
        return {
            name: value
            for name, value in shared.items()
            if name not in ("layers", "resume")
        }

    @property
    def schedule(self) -> optax.Schedule:
        """The learning rate; a first update of full size would raise the loss of a
        model this wide to 27.
        """
        if self.steps <= SHORT:
            return optax.linear_schedule(0.0, 4e-5, self.steps)
        return optax.warmup_cosine_decay_schedule(
            0.0, PEAK, self.steps // 5, self.steps
        )


@dataclass(frozen=True)
class Run(timing.Timing):
    """Measurements of one candidate in its process.

    Attributes:
      remat: Values that a block keeps for its backward pass.
      compile_seconds: Seconds of tracing, lowering and compiling the first step.
      arena_bytes: Temporary memory of the program, besides arguments and results.
      step_bytes: Arguments, results and arena.
      peak_bytes: Peak of the allocator; None if none is reported.
      losses: Losses of the first steps, in nats per token.
      text: The text they were trained on.
    """

    remat: str
    compile_seconds: float
    arena_bytes: int
    step_bytes: int
    peak_bytes: int | None
    losses: tuple[float, ...]
    text: str


@dataclass(frozen=True)
class Row(Run):
    """One candidate.

    Attributes:
      recipe, layers, tokens: The candidate, its layers, and the tokens of a step.
      tokens_per_second, model_tflops, mfu: Rates of the median, as in
        `benchmarks.llama`.
      layer_speed_over_bf16: Tokens a second times layers, divided by BF16's.
    """

    recipe: str
    layers: int
    tokens: int
    tokens_per_second: float
    model_tflops: float
    mfu: float
    layer_speed_over_bf16: float


def measure(config: Config) -> Iterator[Row]:
    """Measure the candidates in sequence; raise `ArithmeticError` if losses do not fall
    or differ at the start.
    """
    found = (
        []
        if config.resume is None
        else rows_to_resume(Path(config.resume), config.settings)
    )
    known = [
        {field.name: row[field.name] for field in dataclasses.fields(Row)}
        for row in found
    ]
    rows = [Row(**{**row, "losses": tuple(row["losses"])}) for row in known]
    yield from rows
    for name, layers in config.layers:
        if name in {row.recipe for row in rows}:
            continue
        call = (config, name, layers)
        run = (
            timing.measure_alone(train, [call], "whole")[0]
            if timing.has_peaks()
            else train(*call)
        )
        alike = FIRST_LOSS if layers == config.layers[0][1] else OTHER_DEPTH
        check_losses(
            name, run.losses, rows[0].losses[0] if rows else run.losses[0], alike
        )
        if rows and run.text != rows[0].text:
            raise ValueError(
                f"{name} learned from {run.text}, but BF16 from {rows[0].text}; run"
                " both on one machine"
            )
        seconds, count = run.median_ms / 1e3, math.prod(config.tokens)
        size = dataclasses.replace(config.model, layers=layers)
        tflops = llama.operations(size, config.tokens, "step") / seconds / 1e12
        speed = rows[0].layers / rows[0].median_ms * 1e3 if rows else layers / seconds
        row = Row(
            **dataclasses.asdict(run),
            recipe=name,
            layers=layers,
            tokens=count,
            tokens_per_second=count / seconds,
            model_tflops=tflops,
            mfu=tflops / PEAK_TFLOPS,
            layer_speed_over_bf16=layers / seconds / speed,
        )
        rows.append(row)
        yield row


def train(config: Config, name: str, layers: int) -> Run:
    """Train, then time further steps."""
    size = dataclasses.replace(config.model, layers=layers)
    settings: Any = llama.Config(
        size,
        size,
        config.tokens,
        config.tokens,
        {},
        include=("linear", "small", "head"),
    )
    make = functools.partial(llama.make_training, rate=config.schedule)
    settings, done = fitting.settled(settings, name, make)
    (step, compile_seconds), losses = make(settings, name).compile(done=done), []
    text, tokenizer = load_installed(byte_limit=config.text_bytes), read_tokenizer(OWN)
    if size.vocabulary >= tokenizer.size:  # the smallest models read bytes
        text = tokenized(text, tokenizer)
    for windows in draw_windows(config, text.train):
        step.inputs = (windows,)
        losses.append(step())
    timed = timing.time_by_wall_clock(
        {name: (step, ())}, rounds=config.rounds, calls=config.calls
    )[name]
    memory = step.compiled.memory_analysis()
    held = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
    )
    arena, words = (
        memory.temp_size_in_bytes,
        f"{len(text.train) / 1e6:.1f} million tokens, digest {text.digest[:12]}",
    )
    return Run(
        **dataclasses.asdict(timed),
        remat=settings.step.remat,
        compile_seconds=compile_seconds,
        arena_bytes=arena,
        step_bytes=held + arena,
        peak_bytes=timing.peak_bytes(),
        losses=tuple(map(float, losses)),
        text=f"{TEXT} ({words})",
    )


def draw_windows(config: Config, text: np.ndarray) -> Iterator[jax.Array]:
    """Yield int32 `[batch, positions + 1]` of the text for each step, the same for
    every candidate.
    """
    rng, (batch, positions) = np.random.default_rng(0), config.tokens
    for _ in range(config.steps):
        begins = rng.integers(0, len(text) - positions, batch)
        yield jnp.asarray(text[begins[:, None] + np.arange(positions + 1)], jnp.int32)


def check_losses(
    name: str, losses: tuple[float, ...], first: float, alike: float = FIRST_LOSS
) -> None:
    """Raise `ArithmeticError` unless losses are finite, begin near `first` and fall.

    >>> check_losses("stored", (5.5, 5.4, 5.0, 4.8), 5.52)
    """
    quarter = max(1, len(losses) // 4)
    begin, end = np.mean(losses[:quarter]), np.mean(losses[-quarter:])
    if not np.all(np.isfinite(losses)) or not end < begin:
        raise ArithmeticError(
            f"{name}: the losses {losses} do not fall; nothing is timed of such a step"
        )
    if not math.isclose(losses[0], first, rel_tol=alike):
        raise ArithmeticError(
            f"{name}: the first loss is {losses[0]}, BF16's {first}, of the same"
            " weights and windows"
        )


# The command and its table
# --------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add sizes."""
    parser.add_argument(
        "--model", choices=[*LLAMAS, *MOES], help="(default: llama-8b on a GPU)"
    )
    parser.add_argument(
        "--recipes",
        default=STORED,
        help=f"next to {BASELINE}, or it alone (default: {STORED})",
    )
    parser.add_argument(
        "--steps",
        type=positive,
        help=f"before the timed ones (default: {SHORT})",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep the rows of the JSON file, run those it lacks",
    )
    parser.add_argument(
        "--sequences", type=int, default=4, help="of 4096 tokens on a GPU (default: 4)"
    )
    parser.add_argument("--layers", type=int, help="of the model (default: all)")
    parser.add_argument("--bf16-layers", type=int, help="(default: as many)")
    parser.add_argument(
        "--remat",
        help="values that blocks keep (default: the model's, auto for llama-8b)",
    )
    parser.add_argument(
        "--loop", choices=get_args(Loop), help="over the blocks (default: scan)"
    )


def configure(options: argparse.Namespace) -> Config:
    """Return the settings of a command line; raise `ValueError` if BF16 has more layers
    than the model.
    """
    on_gpu = jax.default_backend() == "gpu" and not options.smoke
    model = (LLAMAS | MOES)[options.model or ("llama-8b" if on_gpu else "llama-tiny")]
    if options.smoke and options.model is None:
        model = quick(model)
    model = dataclasses.replace(
        model,
        **{n: v for n in ("layers", "remat", "loop") if (v := getattr(options, n))},
    )
    baseline = model.layers if options.bf16_layers is None else options.bf16_layers
    if not 0 < baseline <= model.layers:
        raise ValueError(
            f"--bf16-layers {baseline} of a model with {model.layers} layers; use 1 to"
            f" {model.layers}"
        )
    names = chosen_of("recipes", options.recipes, CANDIDATES["step"])
    layers = (
        (BASELINE, baseline),
        *((name, model.layers) for name in names if name != BASELINE),
    )
    more: Any = dict(steps=options.steps or (2 if options.smoke else SHORT))
    more["resume"] = str(options.path) if options.resume else None
    if not on_gpu:
        return Config(
            model, layers, (1, 32), text_bytes=2**18, rounds=1, calls=1, **more
        )
    return Config(model, layers, (options.sequences, min(4096, model.context)), **more)


def json_name(options: argparse.Namespace) -> str:
    """Return the name of a run's JSON: "large", or "large-curves" of a long one."""
    return f"{NAME}-curves" if (options.steps or SHORT) > SHORT else NAME


def show(rows: list[Row]) -> None:
    """Print the rows and their losses."""
    columns = (
        "recipe",
        "layers",
        "median_ms",
        "tokens_per_second",
        "layer_speed_over_bf16",
        "mfu",
        "remat",
    )
    print_rows(
        rows,
        *columns,
        "compile_seconds",
        "arena_bytes",
        "step_bytes",
        "peak_bytes",
        "timer",
    )
    for row in rows:
        print(f"{row.recipe}: " + " ".join(f"{loss:.3f}" for loss in row.losses))


def table(result: Result) -> str:
    """Return the page's table, one line per candidate; of a long run its losses, of a
    short one its speed.
    """
    lines, long = [], result.config["steps"] > SHORT
    for row in result.rows:
        peak = "–" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e9:.1f}"
        cells = [f"`{row['recipe']}`", str(row["layers"]), f"{row['median_ms']:,.0f}"]
        if long:
            cells += [
                f"{np.mean(row['losses'][-LAST:]):.4f}",
                "–" if row is result.rows[0] else _over(result, row),
            ]
        else:
            cells += [
                f"{row['tokens_per_second']:,.0f}",
                f"**{row['layer_speed_over_bf16']:.2f}**",
                f"{row['mfu']:.0%}",
                f"{row['step_bytes'] / 1e9:.1f}",
                peak,
                f"{row['compile_seconds']:.0f}",
            ]
        lines.append(cells)
    titles = [
        "",
        "layers",
        "ms a step",
        "tokens a second",
        "per layer over BF16",
        "MFU",
        "step, GB",
        "peak, GB",
    ]
    titles = (
        [*titles[:3], "loss", "over BF16's, nats a token"]
        if long
        else [*titles, "compiling, s"]
    )
    size, (batch, positions) = result.config["model"], result.config["tokens"]
    kind = f"mixture of {size['experts']} experts" if "experts" in size else "Llama"
    text = (
        f"{markdown_table(titles, lines)}\n\nA {kind} of width {size['width']}, hidden"
        f" {size['hidden']}, a vocabulary of {size['vocabulary']}, {batch} ×"
        f" {positions} tokens a step. "
    )
    if not long:
        return (
            f"{text}Step is what the compiled step needs, with its state; peak is the"
            " allocator's."
        )
    return (
        f"{text}{result.config['steps']} steps of {result.rows[0]['text']}, with the"
        f" same batches and clipping, a rate that rises for a fifth of them to {PEAK:g}"
        f" and falls as a cosine to zero. A loss is the mean of the last {LAST} steps,"
        " in nats per token, and its difference has the standard error of these steps."
    )


def _over(result: Result, row: dict[str, Any]) -> str:
    """Return the mean difference of the last losses of a row from the first row's, with
    its standard error.
    """
    gaps = np.subtract(row["losses"][-LAST:], result.rows[0]["losses"][-LAST:])
    return f"**{gaps.mean():+.4f}** ± {gaps.std(ddof=1) / math.sqrt(len(gaps)):.4f}"


BENCHMARK = Benchmark(
    NAME,
    __doc__,
    configure,
    measure,
    table,
    options=add_options,
    file=json_name,
    show=show,
)

if __name__ == "__main__":
    BENCHMARK.command()
