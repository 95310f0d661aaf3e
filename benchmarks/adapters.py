"""Adapters next to the frozen weights of Llama-3-70B on one GPU: speed and memory.

    python -m benchmarks.adapters --json
    python -m benchmarks.adapters --json --model llama-8b --bf16-layers 32

Random weights are drawn and quantized on the device, one matrix of a layer at a time,
by the functions that read a folder. "nvfp4" decodes them to BF16, and "nvfp4 in E4M3"
to E4M3, to which its activations and gradients are rounded, too. "bf16" has BF16
weights, of few layers, because all of them do not fit. Each candidate runs in a process
of its own, with all of the GPU's memory. Its losses on one batch must fall before steps
are timed. Speeds are per layer, and the head counts with them.
"""

import argparse
import dataclasses
import functools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import timing
from benchmarks.harness import Benchmark, chosen_of, positive
from benchmarks.llama import add_sizes, sized
from benchmarks.llama_steps import quick
from benchmarks.records import Result, cells
from benchmarks.texts import corpus_for
from benchmarks.variants import BASELINE
from models.nets.adapters import is_adapter
from models.nets.families import in_e4m3
from models.nets.llama import INITIAL_DEVIATION
from models.nets.shapes import LlamaConfig
from models.nets.sizes import LLAMAS
from models.training import steps
from models.training.forms import Adapters
from models.training.settings import TrainConfig
from tcfp_jax import layer_state
from tcfp_jax.paths import path_names
from tcfp_jax.recipes import Recipe, recipe
from tcfp_jax.remat import step_bytes
from tcfp_jax.weights.layerwise import Index
from tcfp_jax.weights.stored import bytes_of

IN_E4M3 = "nvfp4 in E4M3"
RECIPES: dict[str, Recipe] = {
    BASELINE: recipe(BASELINE),
    "nvfp4": recipe("nvfp4"),
    IN_E4M3: in_e4m3("nvfp4"),
}


@dataclass(frozen=True)
class Config(timing.Repetitions):
    """Settings of a run.

    Attributes:
      model: Size of the model.
      layers: (name, layers) of each candidate in order; the first is BF16.
      tokens: Sequences, and tokens in each.
      rank: Rank of the adapters.
      steps: Steps with a loss before the timed ones, all on one batch.
      rate: The learning rate.
    """

    model: LlamaConfig
    layers: tuple[tuple[str, int], ...]
    tokens: tuple[int, int]
    rank: int = 16
    steps: int = 8
    rate: float = 5e-5


@dataclass(frozen=True)
class Run(timing.Timing):
    """Measurements of one candidate in its process.

    Attributes:
      base_bytes: Frozen matrices of the layers.
      state_bytes: Everything between two steps.
      step_bytes: Arguments, results and arena of the compiled step.
      peak_bytes: Peak of the allocator; None if none is reported.
      loading_seconds: Seconds of drawing and quantizing the weights.
      compile_seconds: Seconds of tracing, lowering and compiling the step.
      losses: Losses of the first steps, in nats per token.
    """

    base_bytes: int
    state_bytes: int
    step_bytes: int
    peak_bytes: int | None
    loading_seconds: float
    compile_seconds: float
    losses: tuple[float, ...]


@dataclass(frozen=True)
class Row(Run):
    """One candidate.

    Attributes:
      recipe, layers: The candidate, and its layers.
      base_bits: Bits of each frozen weight.
      tokens_per_second: Rate of the median.
      layer_speed_over_bf16: Layers per second, divided by BF16's.
    """

    recipe: str
    layers: int
    base_bits: float
    tokens_per_second: float
    layer_speed_over_bf16: float


def measure(config: Config) -> Iterator[Row]:
    """Measure the candidates in sequence.

    Raises:
      ArithmeticError: losses do not fall.
    """
    baseline = None
    for name, layers in config.layers:
        run = timing.measure_in_own_process(train, config, name, layers)
        if not run.losses[-1] < run.losses[0]:
            raise ArithmeticError(
                f"{name}: the losses {run.losses} do not fall; nothing is timed of such"
                " a step"
            )
        speed = layers / run.median_ms
        baseline = baseline or speed
        weights = layers * config.model.width * config.model.columns
        yield Row(
            **vars(run),
            recipe=name,
            layers=layers,
            base_bits=8 * run.base_bytes / weights,
            tokens_per_second=math.prod(config.tokens) / run.median_ms * 1e3,
            layer_speed_over_bf16=speed / baseline,
        )


def train(config: Config, name: str, layers: int) -> Run:
    """Train, then time further steps."""
    run = run_of(config, name, layers)
    key = steps.batch_key(run)
    window = jnp.asarray(read_window(run))
    started = time.perf_counter()
    compiled = steps.lowered_step(run, None, window).compile()
    compile_seconds = time.perf_counter() - started
    started = time.perf_counter()
    state = jax.block_until_ready(steps.init(run, start=drawn(run)))
    loading_seconds = time.perf_counter() - started
    jitted = steps.make_train_step(run)
    state_bytes = bytes_of(state)
    base_bytes = bytes_of_base(state)
    step = timing.Threaded(jitted, compiled, state, window, key)
    del state
    losses = [float(step()[0]) for _ in range(config.steps)]
    timed = config.by_wall_clock({name: (step, ())})[name]
    return Run(
        **vars(timed),
        base_bytes=base_bytes,
        state_bytes=state_bytes,
        step_bytes=step_bytes(compiled),
        peak_bytes=timing.peak_bytes(),
        loading_seconds=loading_seconds,
        compile_seconds=compile_seconds,
        losses=tuple(losses),
    )


def run_of(config: Config, name: str, layers: int) -> TrainConfig:
    """Return the run of a candidate."""
    batch, sequence = config.tokens
    return TrainConfig(
        model=dataclasses.replace(config.model, layers=layers),
        recipe=RECIPES[name],
        weights=Adapters(config.rank),
        start="random weights",
        steps=config.steps,
        steps_per_call=1,
        batch=batch,
        sequence=sequence,
        learning_rate=config.rate,
        final_fraction=1.0,
        weight_decay=0.0,
    )


def read_window(run: TrainConfig) -> np.ndarray:
    """Return the one window of tokens on which every step trains."""
    return corpus_for(run.size, 2**20).train[: run.sequence + 1]


# Random weights
# --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drawn:
    """A stack of matrices `[layers, k, n]` of normal values, each drawn on the device
    when it is read.

    Attributes:
      shape: shape of the stack.
      number: different for each stack.
      dtype: dtype of the parameter; values are BF16, as in the files of a Llama.
    """

    shape: tuple[int, ...]
    number: int
    dtype: np.dtype = np.dtype(np.float32)

    def __getitem__(self, index: Index) -> jax.Array:
        """Return a layer, or the whole stack (`...`)."""
        shape = self.shape if index is Ellipsis else self.shape[1:]
        place = 0 if index is Ellipsis else index
        key = jax.random.fold_in(jax.random.key(self.number), place)
        return normal(shape, key)


@functools.partial(jax.jit, static_argnums=0)
def normal(shape: tuple[int, ...], key: jax.Array) -> jax.Array:
    """Return BF16 values with the deviation of a Llama's first weights."""
    return INITIAL_DEVIATION * jax.random.normal(key, shape, jnp.bfloat16)


def drawn(run: TrainConfig) -> Any:
    """Return random parameters of a model without adapters, as a folder has them."""

    def of(number: int, path: Any, leaf: jax.ShapeDtypeStruct) -> Any:
        stacked = path_names(path)[0] == "layers"
        if leaf.ndim < 2 + stacked:  # norms
            return jnp.ones(leaf.shape, leaf.dtype)
        found = Drawn(leaf.shape, number)
        return found if stacked else found[...]

    shapes = steps.start_shapes(run)
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    found = [of(number, *leaf) for number, leaf in enumerate(leaves)]
    return jax.tree.unflatten(jax.tree.structure(shapes), found)


def bytes_of_base(state: Any) -> int:
    """Return the bytes of the frozen matrices of the layers."""
    floats = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.params["layers"]):
        if leaf.ndim > 2 and not is_adapter(path):  # others are norms
            floats.append(leaf)
    return bytes_of(floats) + bytes_of(layer_state(state.opt_state))


# The command and its table
# --------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add sizes."""
    add_sizes(parser, [*LLAMAS])
    parser.add_argument(
        "--recipes",
        help=f"next to {BASELINE}, or it alone (default: {','.join(RECIPES)})",
    )
    parser.add_argument(
        "--rank", type=positive, default=16, help="of the adapters (default: 16)"
    )
    parser.add_argument("--layers", type=positive, help="of the model (default: all)")
    parser.add_argument("--bf16-layers", type=positive, help="(default: as many)")


def configure(options: argparse.Namespace) -> Config:
    """Return the settings of a command line."""
    on_gpu = jax.default_backend() == "gpu" and not options.smoke
    model = LLAMAS[options.model or ("llama-70b" if on_gpu else "llama-tiny")]
    if options.smoke and options.model is None:
        model = quick(model)
    model = sized(model, options, "layers")
    names = chosen_of("recipes", options.recipes, tuple(RECIPES))
    layers = {BASELINE: options.bf16_layers or model.layers}
    for name in names:
        layers.setdefault(name, model.layers)
    return Config(
        model,
        tuple(layers.items()),
        (1, 4096) if on_gpu else (1, 32),
        options.rank,
        rate=5e-5 if on_gpu else 1e-2,
        rounds=2,
        calls=2 if on_gpu else 1,
    )


def table(result: Result) -> str:
    """Return the page's table, one line per candidate."""
    columns = {
        "": "`{recipe}`",
        "layers": "{layers}",
        "bits per frozen weight": "{base_bits:.3g}",
        "ms per step": "{median_ms:,.0f}",
        "tokens per second": "{tokens_per_second:,.0f}",
        "speedup per layer over BF16": "**{layer_speed_over_bf16:.2f}**",
        "state, GB": "{state_gigabytes:.1f}",
        "peak, GB": "{peak_gigabytes:.1f}",
        "loading, s": "{loading_seconds:.0f}",
    }
    size = result.config["model"]
    batch, positions = result.config["tokens"]
    return (
        f"{cells(result.rows, columns)}\n\nAdapters of rank {result.config['rank']}"
        f" next to random frozen weights of a Llama of width {size['width']}, hidden"
        f" {size['hidden']}, a vocabulary of {size['vocabulary']}, {batch} ×"
        f" {positions} tokens per step; blocks keep {size['remat']}. `{IN_E4M3}` rounds"
        " activations and gradients to E4M3 by rows. State is all that outlives a step,"
        " peak is of the allocator, and loading is the time to draw and quantize the"
        " weights layer by layer."
    )


BENCHMARK = Benchmark(
    "adapters", __doc__, configure, measure, table, options=add_options
)

if __name__ == "__main__":
    BENCHMARK.command()
