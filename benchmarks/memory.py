"""Bytes of training state, leaf by leaf, and the device's peak while it trains; then arithmetic for larger models.

    python -m benchmarks.memory --json

State is what outlives a step: float32 parameters, Adam's two moments, the quantized weights and the error buffers. It
is counted from the leaves of the real train state. The peak is the allocator's own figure for a process that does
nothing but train one setting for a few steps, compilation's own trials included; CPUs report none. "arithmetic" rows
multiply bytes per weight by a model's size: no such model was run.
"""

import argparse
import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

import tcfp_jax
from benchmarks import common, timing
from benchmarks.common import Result, markdown_table
from benchmarks.shapes import MIDDLE
from models.gpt import MODELS
from models.train import TrainConfig, batch_key, corpus_of, init, make_train_step, preset
from tcfp_jax.recipes import Recipe, recipe

NAME = "memory"
PARTS = ("parameters", "moments", "weights", "errors", "other")
Kind = Literal["measured", "arithmetic"]


@dataclass(frozen=True)
class Setting:
    """A named way to train."""

    name: str
    recipe: Recipe
    error_dtype: Literal["float32", "bfloat16", "float8_e5m2"] = "float32"


_STOCHASTIC = recipe("tcfp12", remainder="stochastic")
SETTINGS = (
    Setting("BF16", recipe("bf16")),
    Setting("tcfp12, error float32", recipe("tcfp12")),
    Setting("tcfp12, error bfloat16", recipe("tcfp12"), "bfloat16"),
    Setting("tcfp12, error float8_e5m2", recipe("tcfp12"), "float8_e5m2"),
    Setting("tcfp12, stochastic lo, no error buffer", _STOCHASTIC),
    Setting(
        "tcfp12, stochastic lo, one orientation", dataclasses.replace(_STOCHASTIC, copies="one")
    ),
)  # fmt: skip
BILLIONS = (1, 7, 13, 30, 70)
WORTH_A_COLUMN = (1, 7, 70)  # of these, in the table


@dataclass(frozen=True)
class Config:
    """Settings of a run: `model` of `models.train`, its batch, and steps before the peak is read."""

    model: str
    batch: int
    sequence: int
    steps: int = 3


@dataclass(frozen=True)
class Row:
    """Bytes of one setting.

    Attributes:
      kind: "measured" of a state that exists, or "arithmetic" for a model that was not run.
      parameters: of the model.
      parameters_bytes, moments_bytes, weights_bytes, errors_bytes, other_bytes: parts of the state. `weights` are the
        quantized weights.
      state_bytes: their sum.
      bytes_per_weight: state of the dense kernels alone, over their number.
      peak_bytes: the allocator's peak during training; None where the device does not report one.
    """

    kind: Kind
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
    """The run of a setting."""
    return preset(
        config.model, recipe=setting.recipe, error_dtype=setting.error_dtype, batch=config.batch,
        sequence=config.sequence, steps=max(config.steps, 2), corpus_bytes=2**20,
    )  # fmt: skip


def count_state(setting: Setting, config: Config, state: Any | None = None) -> Row:
    """Bytes of a train state, by part; of its shapes where no state is given.

    Raises:
      ArithmeticError: the parts do not add up to the whole.
    """
    if state is None:
        state = jax.eval_shape(lambda: init(train_config(setting, config)))
    parts, kernels = dict.fromkeys(PARTS, 0), dict.fromkeys(PARTS, 0)
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    for path, leaf in leaves:
        name, size = jax.tree_util.keystr(path), _bytes(leaf)
        parts[_part_of(name)] += size
        if "'kernel'" in name:
            kernels[_part_of(name)] += size
    total = sum(parts.values())
    if total != sum(_bytes(leaf) for leaf in jax.tree.leaves(state)):
        raise ArithmeticError("the parts of the state do not add up to its bytes")
    parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state.params))
    per_weight = sum(kernels.values()) / (kernels["parameters"] / 4)
    return Row("measured", setting.name, parameters, *_columns(parts), total, per_weight)


def _columns(parts: dict[str, int]) -> tuple[int, int, int, int, int]:
    return parts["parameters"], parts["moments"], parts["weights"], parts["errors"], parts["other"]


def _part_of(path: str) -> str:
    """The part of a train state to which the leaf at a key path belongs, by the field names of its containers."""
    if path.startswith(".params"):
        return "parameters"
    for field, part in ((".mu", "moments"), (".nu", "moments"), (".weights", "weights"), (".errors", "errors")):
        if field in path:
            return part
    return "other"


def _bytes(leaf: Any) -> int:
    return math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize


def bytes_per_weight(chosen: Recipe) -> float:
    """Bytes of state a weight under AdamW and a float32 master, from shapes alone; of one layer of 4096 x 16384.

    >>> round(bytes_per_weight(recipe("bf16")), 3)
    12.0
    """
    params = {"layer": {"kernel": jax.ShapeDtypeStruct((MIDDLE.k, MIDDLE.n), jnp.float32)}}
    optimizer = optax.chain(optax.adamw(1e-4), tcfp_jax.error_feedback(chosen))
    state = jax.eval_shape(optimizer.init, params)
    return sum(map(_bytes, jax.tree.leaves((params, state)))) / (MIDDLE.k * MIDDLE.n)


def measure_peak(name: str, config: Config) -> tuple[Row, int | None]:
    """Train a few steps in this process: (the bytes of the real state, the allocator's peak)."""
    setting = next(setting for setting in SETTINGS if setting.name == name)
    run = train_config(setting, config)
    state, text, key = init(run), jnp.asarray(corpus_of(run).train), batch_key(run)
    row = count_state(setting, config, state)
    step = make_train_step(run, 1)
    for _ in range(config.steps):
        state, losses = step(state, text, key)
    if not bool(jnp.all(jnp.isfinite(losses))):
        raise ArithmeticError(f"{name}: the loss is {losses}, so its memory means nothing")
    return row, timing.peak_bytes()


def measure(config: Config) -> list[Row]:
    """Measured rows, then arithmetic.

    Raises:
      ArithmeticError: a state that exists has other bytes than its shapes say.
    """
    rows = [count_state(setting, config) for setting in SETTINGS]
    if timing.has_peaks():
        found = timing.measure_alone(measure_peak, [(row.name, config) for row in rows])
    else:
        found = [measure_peak(row.name, config) if row is rows[1] else (row, None) for row in rows]
    for row, (real, _) in zip(rows, found, strict=True):
        if real != row:
            raise ArithmeticError(f"{row.name}: the state has {real.state_bytes} bytes, its shapes {row.state_bytes}")
    rows = [dataclasses.replace(row, peak_bytes=peak) for row, (_, peak) in zip(rows, found, strict=True)]
    return rows + [compute_row(row, billions) for row in rows for billions in BILLIONS]


def compute_row(measured: Row, billions: int) -> Row:
    """Arithmetic: the state of a model of so many billions of weights, if every parameter were a dense kernel."""
    count = billions * 10**9
    dense = measured.bytes_per_weight - 12  # float32 parameters and two float32 moments
    error = measured.errors_bytes / max(1, measured.weights_bytes + measured.errors_bytes) * dense
    parts = (4 * count, 8 * count, round((dense - error) * count), round(error * count), 0)
    return Row("arithmetic", measured.name, count, *parts, sum(parts), measured.bytes_per_weight)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The model that is trained."""
    parser.add_argument("--model", choices=list(MODELS), default=None, help="(default: gpt2, on CPUs tiny)")


def configure(options: argparse.Namespace) -> Config:
    """The settings of a command line."""
    if options.smoke:
        return Config("tiny", 2, 16, steps=1)
    model = options.model or ("tiny" if jax.default_backend() == "cpu" else "gpt2")
    base = preset(model)
    return Config(model, base.batch, base.sequence)


def show(rows: list[Row]) -> None:
    """Print what was measured."""
    measured = [row for row in rows if row.kind == "measured"]
    columns = ("name", "parameters", *(f"{part}_bytes" for part in PARTS), "state_bytes", "bytes_per_weight")
    common.print_rows(measured, *columns, "peak_bytes")


def table(result: Result) -> str:
    """A line a way to train."""
    rows = result.by("kind", "name", "parameters")
    lines = []
    for row in (row for row in result.rows if row["kind"] == "measured"):
        peak = "–" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:,.0f}"
        sizes = [rows["arithmetic", row["name"], b * 10**9]["state_bytes"] / 1e9 for b in WORTH_A_COLUMN]
        cells = [f"{row['bytes_per_weight']:.0f}", f"{row['state_bytes'] / 1e6:,.0f}", peak]
        lines.append([row["name"], *cells, *(f"{size:,.0f}" for size in sizes)])
    titles = ["", "bytes a weight", "state, MB", "peak, MB", *(f"{b}B: GB, arithmetic" for b in WORTH_A_COLUMN)]
    config, parameters = result.config, result.rows[0]["parameters"] / 1e6
    return (
        f"{markdown_table(titles, lines)}\n\n"
        f"Measured while training `{config['model']}` ({parameters:.4g}M parameters, {config['batch']} × "
        f"{config['sequence']} bytes a step). The columns marked arithmetic multiply bytes a weight by a model's size; "
        "no such model was run."
    )


main = functools.partial(common.main, NAME)

if __name__ == "__main__":
    common.command(NAME)
