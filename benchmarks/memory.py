"""Bytes of training state, and the peak of the allocator while a model trains.

    python -m benchmarks.memory --json
    python -m benchmarks.memory --json --model llama-8b

The first trains a wide GPT, with peaks on a GPU. The second counts from shapes; nothing
is trained.

State is everything that outlives a step: parameters, Adam's moments, quantized weights
next to float parameters, and error buffers. The peak is the allocator's own number in a
process that trains one setting for a few steps. It includes the compiler's trials, and
CPUs report none. The default model is wide and its batch small, so that weights
dominate.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

import tcfp_jax
from benchmarks import timing
from benchmarks.harness import Benchmark
from benchmarks.records import Result, cells
from models.nets.shapes import GPTConfig
from models.nets.sizes import model_names
from models.train import batch_key, corpus_of, init, make_train_step
from models.training.forms import ErrorDtype, MomentFormat, Weights, trained_form
from models.training.settings import Data, TrainConfig, preset
from models.training.state import TrainState
from tcfp_jax.recipes import Recipe, recipe
from tcfp_jax.weights.stored import bytes_of

PARTS = ("parameters", "moments", "weights", "errors", "other")


@dataclass(frozen=True)
class Setting:
    """A named way to train."""

    name: str
    recipe: Recipe
    error_dtype: ErrorDtype = "float32"
    weights: Weights = "float"
    moments: MomentFormat = "float32"


STORED = "tcfp12_single, stored"
_STOCHASTIC = recipe("tcfp12", remainder="stochastic")
SETTINGS = (
    Setting("BF16", recipe("bf16")),
    Setting("tcfp12, error float32", recipe("tcfp12")),
    Setting("tcfp12, error bfloat16", recipe("tcfp12"), "bfloat16"),
    Setting("tcfp12, error float8_e5m2", recipe("tcfp12"), "float8_e5m2"),
    Setting("tcfp12, stochastic lo, no error buffer", _STOCHASTIC),
    Setting(
        "tcfp12, stochastic lo, one orientation",
        replace(_STOCHASTIC, copies="one"),
    ),
    Setting(
        "stored, 8-bit moments",
        recipe("tcfp12_single"),
        weights="stored",
        moments="8bit",
    ),
    Setting(
        "stored, 8-bit moments, both orientations",
        recipe("tcfp12_single", copies="both"),
        weights="stored",
        moments="8bit",
    ),
    Setting("stored, float32 moments", recipe("tcfp12_single"), weights="stored"),
)
# Settings whose peak is measured. Each needs a process of its own, which mostly
# compiles.
TRAINED = (
    "BF16",
    "tcfp12, error float32",
    "stored, 8-bit moments",
    "stored, 8-bit moments, both orientations",
)
# Settings of README's table, for whole models that are counted and not trained.
CHOOSABLE = (
    *(
        Setting(name, recipe(name))
        for name in ("bf16", "tensorwise", "rowwise", "tcfp12_fast")
    ),
    Setting(STORED, recipe("tcfp12_single"), weights="stored", moments="8bit"),
)
WIDE = GPTConfig(layers=3, width=2048, heads=16, context=256)


@dataclass(frozen=True)
class Config:
    """Model, batch, and steps before the peak is read.

    A model of zero steps is counted and not trained.
    """

    model: str | GPTConfig
    batch: int
    sequence: int
    steps: int = 3


@dataclass(frozen=True)
class Row:
    """Bytes of one setting.

    Attributes:
      parameters: Number of parameters of the model. parameters_bytes, moments_bytes,
      weights_bytes, errors_bytes, other_bytes: Parts of the state; `weights` are the
      quantized weights next to float parameters.
      state_bytes: Their sum.
      bytes_per_weight: State of the dense kernels divided by their number. It leaves
        out embeddings and norms, so a whole model needs more:
        `state_bytes / parameters`.
      peak_bytes: Peak of the allocator during training; None if the device reports none
        or nothing was trained.
    """

    name: str
    parameters: int
    parameters_bytes: int
    moments_bytes: int
    weights_bytes: int
    errors_bytes: int
    other_bytes: int
    state_bytes: int
    bytes_per_weight: float
    peak_bytes: int | None = None


def train_config(setting: Setting, config: Config) -> TrainConfig:
    """Return the training run of a setting."""
    base = preset(config.model if isinstance(config.model, str) else "tiny")
    return replace(
        base,
        model=config.model,
        recipe=setting.recipe,
        weights=trained_form(setting.weights, setting.moments, setting.error_dtype),
        batch=config.batch,
        sequence=config.sequence,
        steps=max(config.steps, 2),
        steps_per_call=1,
        data=Data(corpus_bytes=2**20),
    )


def count_state(
    setting: Setting, config: Config, state: TrainState | None = None
) -> Row:
    """Count the bytes of a train state by part, or of its shapes without a state.

    Raises:
      ArithmeticError: the parts do not add up to the whole.
    """
    if state is None:
        state = jax.eval_shape(lambda: init(train_config(setting, config)))
    parts = _parts(state)
    total = sum(parts.values())
    if total != bytes_of(state):
        raise ArithmeticError(
            f"the parts of the state have {total} bytes, and the state has others"
        )
    floats = jax.eval_shape(tcfp_jax.dequantize, state.params)
    parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(floats))
    sizes = {f"{part}_bytes": size for part, size in parts.items()}
    return Row(
        setting.name,
        parameters,
        **sizes,
        state_bytes=total,
        bytes_per_weight=bytes_of_kernels(state),
        peak_bytes=None,
    )


def bytes_of_kernels(state: TrainState) -> float:
    """Return the bytes per weight of the dense kernels, with all that is theirs."""
    floats = jax.eval_shape(tcfp_jax.dequantize, state.params)
    named = jax.tree_util.tree_leaves_with_path(floats)
    weights = sum(math.prod(leaf.shape) for path, leaf in named if _is_of_kernel(path))
    return sum(_parts(state, of=_is_of_kernel).values()) / weights


def _parts(
    state: TrainState, of: Callable[[Any], bool] = lambda path: True
) -> dict[str, int]:
    """Return the bytes of the leaves whose path is chosen, in the order of `PARTS`."""
    parts = dict.fromkeys(PARTS, 0)
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if of(path):
            parts[_part_of(jax.tree_util.keystr(path))] += bytes_of(leaf)
    return parts


def _is_of_kernel(path: Any) -> bool:
    return "'kernel'" in jax.tree_util.keystr(path)


def _part_of(path: str) -> str:
    """Return the part of a train state that a key path belongs to."""
    if path.startswith(".params"):
        return "parameters"
    fields = {
        ".mu": "moments",
        ".nu": "moments",
        ".weights": "weights",
        ".errors": "errors",
        ".scaled_errors": "errors",
    }
    for field, part in fields.items():
        if field in path:
            return part
    return "other"


def measure_peak(name: str, config: Config) -> tuple[Row, int | None]:
    """Train a few steps; return the bytes of the state and the allocator's peak."""
    (setting,) = (setting for setting in SETTINGS if setting.name == name)
    run = train_config(setting, config)
    state = init(run)
    text = jnp.asarray(corpus_of(run).train)
    key = batch_key(run)
    row = count_state(setting, config, state)
    step = make_train_step(run, 1)
    for _ in range(config.steps):
        state, losses = step(state, text, key)
    if not bool(jnp.all(jnp.isfinite(losses))):
        raise ArithmeticError(
            f"{name}: the loss is {losses}, so its memory means nothing"
        )
    return row, timing.peak_bytes()


def measure(config: Config) -> list[Row]:
    """Count every setting, and measure the peaks of those in `TRAINED`.

    Raises:
      ArithmeticError: a real state has other bytes than its shapes say.
    """
    if not config.steps:
        return [count_state(setting, config) for setting in CHOOSABLE]
    rows = {setting.name: count_state(setting, config) for setting in SETTINGS}
    # Without peaks, one state of stored weights is enough of a check.
    names: Sequence[str] = TRAINED[2:3]
    if timing.has_peaks():
        names = TRAINED
        calls = [(name, config) for name in names]
        found = timing.measure_alone(measure_peak, calls)
    else:
        found = [measure_peak(name, config) for name in names]
    for name, (real, peak) in zip(names, found, strict=True):
        if real != rows[name]:
            raise ArithmeticError(
                f"{name}: the state has {real.state_bytes} bytes, but its shapes have"
                f" {rows[name].state_bytes}"
            )
        rows[name] = replace(real, peak_bytes=peak)
    return [*rows.values()]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the model."""
    wide = f"a GPT of {WIDE.layers} layers of width {WIDE.width}; on a CPU tiny"
    parser.add_argument(
        "--model",
        choices=model_names(),
        help=f"to count without training (default: train {wide})",
    )


def json_name(options: argparse.Namespace) -> str:
    """Return "memory", with the name of the model behind it if one was asked for."""
    return f"memory-{options.model}" if options.model else "memory"


def configure(options: argparse.Namespace) -> Config:
    """Return the settings of a command line."""
    if options.model:
        base = preset(options.model)
        return Config(options.model, base.batch, base.sequence, steps=0)
    if options.smoke:
        return Config(
            GPTConfig(layers=1, width=128, heads=4, context=16), 2, 16, steps=1
        )
    if jax.default_backend() == "gpu":
        return Config(WIDE, batch=4, sequence=WIDE.context)
    return Config("tiny", preset("tiny").batch, preset("tiny").sequence)


def table(result: Result) -> str:
    """Return the page's table, one line per setting."""
    columns = {
        "": "{name}",
        "bytes per weight of the kernels": "{bytes_per_weight:.4g}",
        "bytes per weight of the model": "{of_model:.3g}",
        "state, GB": "{state_gigabytes:.2f}",
        "peak, GB": "{peak_gigabytes:.2f}",
    }
    rows = []
    for row in result.rows:
        rows.append({**row, "of_model": row["state_bytes"] / row["parameters"]})
    config = result.config
    model = config["model"]
    named = f"`{model}`"
    if not isinstance(model, str):
        named = f"a GPT of {model['layers']} layers of width {model['width']}"
    millions = f"{rows[0]['parameters'] / 1e6:,.0f}M parameters"
    way = f"Counted from the shapes of {named} ({millions}); nothing was trained."
    if config["steps"]:
        way = (
            f"Measured while training {named} ({millions}, {config['batch']} ×"
            f" {config['sequence']} bytes per step)."
        )
    return f"{cells(rows, columns)}\n\n{way}"


BENCHMARK = Benchmark(
    "memory",
    __doc__,
    configure,
    measure,
    table,
    options=add_options,
    file=json_name,
)

if __name__ == "__main__":
    BENCHMARK.command()
