"""Llama-3-8B on one GPU: a first training run of twenty steps on real text.

    python -m benchmarks.large --json
    python -m benchmarks.large --json --bf16-layers 8   # if BF16 does not fit
    python -m benchmarks.large --json --model llama-1b --recipes stored,tensorwise
    python -m benchmarks.large --json --layers 8 --steps 300 --recipes bf16
    python -m benchmarks.large --json --layers 8 --steps 300 --resume
    python -m benchmarks.large --json --model llama-1b --steps 1000 --batch 2

The last three make curves, one candidate in a call with `--recipes bf16` and then
`--resume`, which keeps BF16's row.

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
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import llama_steps, timing
from benchmarks.harness import Benchmark, add_resume, chosen_of, positive
from benchmarks.llama import (
    CANDIDATES,
    PEAK_TFLOPS,
    add_sizes,
    operations,
    sized,
)
from benchmarks.llama_steps import STORED, Update, quick
from benchmarks.records import Result, cells, rows_of, rows_to_resume
from benchmarks.texts import corpus_for
from benchmarks.variants import BASELINE
from models.nets.shapes import LlamaConfig
from models.nets.sizes import LLAMAS, MOES
from tcfp_jax.remat import step_bytes

TEXT = "Python files of site-packages and of the standard library"
# Steps before the timing; of a longer run the last steps, and the largest rate
SHORT, LAST, PEAK = 20, 30, 1e-4
RATE = 4e-5  # the largest of a short run
# Largest relative difference of two first losses, which are both near the logarithm of
# the vocabulary, of models with the same layers and with others.
FIRST_LOSS, OTHER_DEPTH = 0.01, 0.04


@dataclass(frozen=True)
class Config(timing.Repetitions):
    """Settings of a run.

    Attributes:
      model: Size of the model.
      layers: (name, layers) of each candidate in order; the first is BF16.
      tokens: Sequences, and tokens in each.
      text_bytes: Size of the text.
      steps: Steps with a loss before the timed ones. The rate rises all the time of a
        short run; of a longer one it rises for a fifth, and falls as a cosine.
      resume: JSON whose rows are kept.
      update: Where stored weights are updated, behind the backward pass or in it.
      rate: The largest learning rate of a short run.
    """

    model: LlamaConfig
    layers: tuple[tuple[str, int], ...]
    tokens: tuple[int, int]
    text_bytes: int = 2**25
    steps: int = SHORT
    resume: str | None = None
    update: Update = "behind"
    rate: float = RATE

    @property
    def settings(self) -> dict[str, object]:
        """Everything that rows of one table share."""
        shared = dataclasses.asdict(self)
        del shared["layers"], shared["resume"]
        return shared

    @property
    def schedule(self) -> optax.Schedule:
        """The learning rate.

        A first update of full size would raise the loss of a model this wide to 27.
        """
        if self.steps <= SHORT:
            return optax.linear_schedule(0.0, self.rate, self.steps)
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
    """Measure the candidates in sequence.

    Raises:
      ArithmeticError: losses do not fall, or differ at the start.
    """
    rows = rows_of(Row, rows_to_resume(config.resume, config.settings))
    yield from rows
    done = {row.recipe for row in rows}
    for name, layers in config.layers:
        if name in done:
            continue
        run = timing.measure_in_own_process(train, config, name, layers)
        rows.append(_row(config, name, layers, run, rows[0] if rows else None))
        yield rows[-1]


def _row(config: Config, name: str, layers: int, run: Run, bf16: Row | None) -> Row:
    """Return the row of a run, checked against BF16's; None if this is BF16."""
    first = run.losses[0] if bf16 is None else bf16.losses[0]
    alike = FIRST_LOSS if layers == config.layers[0][1] else OTHER_DEPTH
    check_losses(name, run.losses, first, alike)
    if bf16 is not None and run.text != bf16.text:
        raise ValueError(
            f"{name} learned from {run.text}, but BF16 from {bf16.text}; run both on"
            " one machine"
        )
    seconds = run.median_ms / 1e3
    count = math.prod(config.tokens)
    size = dataclasses.replace(config.model, layers=layers)
    tflops = operations(size, config.tokens, "step") / seconds / 1e12
    speed = layers / run.median_ms
    return Row(
        **vars(run),
        recipe=name,
        layers=layers,
        tokens=count,
        tokens_per_second=count / seconds,
        model_tflops=tflops,
        mfu=tflops / PEAK_TFLOPS,
        layer_speed_over_bf16=speed * bf16.median_ms / bf16.layers if bf16 else 1.0,
    )


def train(config: Config, name: str, layers: int) -> Run:
    """Train, then time further steps."""
    size = dataclasses.replace(config.model, layers=layers)
    settings, done = llama_steps.settled(
        llama_steps.Config(
            size,
            size,
            config.tokens,
            config.tokens,
            {},
            include=("linear", "small", "head"),
            update=config.update,
        ),
        name,
        config.schedule,
    )
    training = llama_steps.make_training(settings, name, config.schedule)
    step, compile_seconds = training.compile(done=done)
    text = corpus_for(size, config.text_bytes)
    losses = []
    for windows in draw_windows(config, text.train):
        step.inputs = (windows,)
        losses.append(step())
    timed = config.by_wall_clock({name: (step, ())})[name]
    words = f"{len(text.train) / 1e6:.1f} million tokens, digest {text.digest[:12]}"
    kept: Any = settings.step
    return Run(
        **vars(timed),
        remat=kept.remat,
        compile_seconds=compile_seconds,
        arena_bytes=step.compiled.memory_analysis().temp_size_in_bytes,
        step_bytes=step_bytes(step.compiled),
        peak_bytes=timing.peak_bytes(),
        losses=tuple(map(float, losses)),
        text=f"{TEXT} ({words})",
    )


def draw_windows(config: Config, text: np.ndarray) -> Iterator[jax.Array]:
    """Yield int32 `[batch, positions + 1]` of the text for each step.

    They are the same for every candidate.
    """
    rng = np.random.default_rng(0)
    batch, positions = config.tokens
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
    add_sizes(parser, [*LLAMAS, *MOES])
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
    add_resume(parser)
    parser.add_argument(
        "--update",
        choices=get_args(Update),
        default="behind",
        help="stored weights behind the backward pass, or layer by layer in it",
    )
    parser.add_argument(
        "--rate",
        type=float,
        default=RATE,
        help=f"the largest learning rate of a short run (default: {RATE})",
    )
    parser.add_argument(
        "--batch", type=positive, default=4, help="sequences of a step on a GPU"
    )
    parser.add_argument("--layers", type=int, help="of the model (default: all)")
    parser.add_argument("--bf16-layers", type=int, help="(default: as many)")


def configure(options: argparse.Namespace) -> Config:
    """Return the settings of a command line.

    Raises:
      ValueError: BF16 has more layers than the model.
    """
    on_gpu = jax.default_backend() == "gpu" and not options.smoke
    model = (LLAMAS | MOES)[options.model or ("llama-8b" if on_gpu else "llama-tiny")]
    if options.smoke and options.model is None:
        model = quick(model)
    model = sized(model, options, "layers")
    baseline = model.layers if options.bf16_layers is None else options.bf16_layers
    if not 0 < baseline <= model.layers:
        raise ValueError(
            f"--bf16-layers {baseline} of a model with {model.layers} layers; use 1 to"
            f" {model.layers}"
        )
    names = chosen_of("recipes", options.recipes, CANDIDATES["step"])
    layers = {BASELINE: baseline}
    for name in names:
        layers.setdefault(name, model.layers)
    return Config(
        model,
        tuple(layers.items()),
        (options.batch, min(4096, model.context)) if on_gpu else (1, 32),
        text_bytes=2**25 if on_gpu else 2**18,
        steps=options.steps or (2 if options.smoke else SHORT),
        rounds=2 if on_gpu else 1,
        calls=2 if on_gpu else 1,
        resume=options.resume or None,
        update=options.update,
        rate=options.rate,
    )


def json_name(options: argparse.Namespace) -> str:
    """Return the name of a run's JSON.

    It is "large", or "large-curves" of a long run with its model. It names the model
    and the values that blocks keep if layers are updated in the backward pass.
    """
    parts = ["large"]
    if (options.steps or SHORT) > SHORT:
        parts += ["curves", options.model]
    if options.update != "behind":
        parts += ["backward", options.model, options.remat]
    return "-".join(filter(None, parts))


def table(result: Result) -> str:
    """Return the page's table, one line per candidate.

    A long run shows its losses, a short one its speed.
    """
    long = result.config["steps"] > SHORT
    columns = {
        "": "`{recipe}`",
        "layers": "{layers}",
        "ms per step": "{median_ms:,.0f}",
    }
    rows = result.rows
    if long:
        columns |= {"loss": "{loss:.4f}", "above BF16, nats per token": "{above}"}
        rows = [_with_losses(row, result.rows[0]) for row in rows]
    else:
        columns |= {
            "tokens per second": "{tokens_per_second:,.0f}",
            "speedup per layer over BF16": "**{layer_speed_over_bf16:.2f}**",
            "MFU": "{mfu:.0%}",
            "step, GB": "{step_gigabytes:.1f}",
            "peak, GB": "{peak_gigabytes:.1f}",
            "compiling, s": "{compile_seconds:.0f}",
        }
    size = result.config["model"]
    batch, positions = result.config["tokens"]
    kind = f"mixture of {size['experts']} experts" if "experts" in size else "Llama"
    text = (
        f"{cells(rows, columns)}\n\nA {kind} of width {size['width']}, hidden"
        f" {size['hidden']}, a vocabulary of {size['vocabulary']}, {batch} ×"
        f" {positions} tokens per step. "
    )
    if not long:
        return (
            f"{text}Step is the memory of the compiled step, with its state; peak is"
            " the allocator's."
        )
    return (
        f"{text}{result.config['steps']} steps of {result.rows[0]['text']}, with the"
        f" same batches and clipping, a rate that rises for a fifth of them to {PEAK:g}"
        f" and falls as a cosine to zero. A loss is the mean of the last {LAST} steps,"
        " in nats per token, and its difference has the standard error of these steps."
    )


def _with_losses(row: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
    """Return a row with its last loss, and how far it is above the first row's."""
    losses = row["losses"][-LAST:]
    gaps = np.subtract(losses, first["losses"][-LAST:])
    error = gaps.std(ddof=1) / math.sqrt(len(gaps))
    above = "–" if row is first else f"**{gaps.mean():+.4f}** ± {error:.4f}"
    return row | {"loss": np.mean(losses), "above": above}


BENCHMARK = Benchmark(
    "large",
    __doc__,
    configure,
    measure,
    table,
    options=add_options,
    file=json_name,
)

if __name__ == "__main__":
    BENCHMARK.command()
