"""Bytes of training state, leaf by leaf, and the device's peak while it trains; then arithmetic for larger models.

    python -m benchmarks.memory --json

State is what outlives a step: parameters, float32 or stored, Adam's two moments, the quantized weights beside float
parameters and the error buffers. It is counted from the leaves of the real train state. The peak is the allocator's own
figure for a process that does nothing but train one setting for a few steps, compilation's own trials included; CPUs
report none, and not every setting is trained. The model is wide and its batch small, so that the peak is that of the
weights: state, gradients, and what the optimizer needs. "arithmetic" rows multiply bytes per weight by a model's size:
no such model was run.
"""

import argparse
import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

import tcfp_jax
from benchmarks import common, timing
from benchmarks.common import Result, markdown_table
from benchmarks.shapes import MIDDLE
from models.gpt import MODELS, GPTConfig
from models.settings import Moments, TrainConfig, Weights, preset
from models.train import batch_key, corpus_of, init, make_train_step
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
    weights: Weights = "float"
    moments: Moments = "float32"


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
    Setting("stored, 8-bit moments", recipe("tcfp12_single"), weights="stored", moments="8bit"),
    Setting(
        "stored, 8-bit moments, both orientations", recipe("tcfp12_single", copies="both"), weights="stored",
        moments="8bit",
    ),
    Setting("stored, float32 moments", recipe("tcfp12_single"), weights="stored"),
)  # fmt: skip
# Trained, one process each and all at once: what compiling costs is what this benchmark takes.
TRAINED = ("BF16", "tcfp12, error float32", "stored, 8-bit moments", "stored, 8-bit moments, both orientations")
WIDE = GPTConfig(layers=3, width=2048, heads=16, context=256)
BILLIONS = (1, 7, 13, 30, 70)
WORTH_A_COLUMN = (1, 7, 70)  # of these, in the table


@dataclass(frozen=True)
class Config:
    """Settings of a run: a model by its name in `models.gpt` or its sizes, its batch, and steps before the peak."""

    model: str | GPTConfig
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
        quantized weights beside float parameters.
      state_bytes: their sum.
      bytes_per_weight: state of the dense kernels alone, over their number.
      peak_bytes: the allocator's peak during training; None where the device reports none, or the setting is counted
        only.
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
    name = config.model if isinstance(config.model, str) else "tiny"
    overrides: dict[str, Any] = dict(
        recipe=setting.recipe, error_dtype=setting.error_dtype, weights=setting.weights, moments=setting.moments,
        batch=config.batch, sequence=config.sequence, steps=max(config.steps, 2), corpus_bytes=2**20,
    )  # fmt: skip
    return dataclasses.replace(preset(name), model=config.model, **overrides)


def count_state(setting: Setting, config: Config, state: Any | None = None) -> Row:
    """Bytes of a train state, by part; of its shapes where no state is given.

    Raises:
      ArithmeticError: the parts do not add up to the whole.
    """
    if state is None:
        state = shapes_of(setting, config)
    parts = _parts(state)
    total = sum(parts.values())
    if total != sum(_bytes(leaf) for leaf in jax.tree.leaves(state)):
        raise ArithmeticError("the parts of the state do not add up to its bytes")
    floats = jax.eval_shape(tcfp_jax.dequantize, state.params)
    parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(floats))
    return Row("measured", setting.name, parameters, *_columns(parts), total, bytes_of_kernels(state))


def shapes_of(setting: Setting, config: Config) -> Any:
    """The shapes of a train state."""
    return jax.eval_shape(lambda: init(train_config(setting, config)))


def bytes_of_kernels(state: Any) -> float:
    """Bytes a weight of the dense kernels in a train state: the kernels themselves and all that belongs to them."""
    return sum(parts_of_kernels(state).values())


def parts_of_kernels(state: Any) -> dict[str, float]:
    """The same by part."""
    floats = jax.eval_shape(tcfp_jax.dequantize, state.params)
    named = jax.tree_util.tree_flatten_with_path(floats)[0]
    weights = sum(math.prod(leaf.shape) for path, leaf in named if _is_of_kernel(path))
    return {part: size / weights for part, size in _parts(state, of=_is_of_kernel).items()}


def _parts(state: Any, of: Callable[[Any], bool] = lambda path: True) -> dict[str, int]:
    """Bytes of the leaves whose path is chosen, in the order of `PARTS`."""
    parts = dict.fromkeys(PARTS, 0)
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        if of(path):
            parts[_part_of(jax.tree_util.keystr(path))] += _bytes(leaf)
    return parts


def _columns(parts: dict[str, int]) -> tuple[int, int, int, int, int]:
    return parts["parameters"], parts["moments"], parts["weights"], parts["errors"], parts["other"]


def _is_of_kernel(path: Any) -> bool:
    return "'kernel'" in jax.tree_util.keystr(path)


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


def bytes_per_weight(chosen: Recipe, *, stored: bool = False) -> float:
    """Bytes of state a weight under AdamW, from shapes alone; of one layer of 4096 x 16384.

    Weights are float32 with what `error_feedback` keeps, or stored with moments in 8 bits.

    >>> round(bytes_per_weight(recipe("bf16")), 3), round(bytes_per_weight(recipe("tcfp12_single"), stored=True), 3)
    (12.0, 4.016)
    """
    key = jax.random.key(0)
    floats = optax.chain(optax.adamw(1e-4), tcfp_jax.error_feedback(chosen))
    optimizer = tcfp_jax.optim.adamw(1e-4, moments="8bit", key=key) if stored else floats

    def init() -> Any:
        params: Any = {"layer": {"kernel": jnp.zeros((MIDDLE.k, MIDDLE.n))}}
        params = tcfp_jax.store(params, chosen, key=key) if stored else params
        return params, optimizer.init(params)

    return sum(map(_bytes, jax.tree.leaves(jax.eval_shape(init)))) / (MIDDLE.k * MIDDLE.n)


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
    """Rows that were counted, with the peaks of those that were trained, then arithmetic.

    Raises:
      ArithmeticError: a state that exists has other bytes than its shapes say.
    """
    shapes = {setting.name: shapes_of(setting, config) for setting in SETTINGS}
    rows = {setting.name: count_state(setting, config, shapes[setting.name]) for setting in SETTINGS}
    # Without peaks two will do, a state of either kind.
    names = TRAINED if timing.has_peaks() else TRAINED[1:3]
    calls = [(name, config) for name in names]
    found = timing.measure_alone(measure_peak, calls) if timing.has_peaks() else [measure_peak(*call) for call in calls]
    for name, (real, peak) in zip(names, found, strict=True):
        if real != rows[name]:
            raise ArithmeticError(
                f"{name}: the state has {real.state_bytes} bytes, its shapes {rows[name].state_bytes}"
            )
        rows[name] = dataclasses.replace(real, peak_bytes=peak)
    computed = [compute_row(name, parts_of_kernels(shapes[name]), b) for name in rows for b in BILLIONS]
    return [*rows.values(), *computed]


def compute_row(name: str, parts: dict[str, float], billions: int) -> Row:
    """Arithmetic: the state of a model of so many billions of weights, if every parameter were a dense kernel."""
    count = billions * 10**9
    sizes = {part: round(size * count) for part, size in parts.items()}
    return Row("arithmetic", name, count, *_columns(sizes), sum(sizes.values()), sum(parts.values()))


def add_options(parser: argparse.ArgumentParser) -> None:
    """The model that is trained."""
    wide = f"{WIDE.layers} layers of width {WIDE.width}, on CPUs tiny"
    parser.add_argument("--model", choices=list(MODELS), default=None, help=f"(default: {wide})")


def configure(options: argparse.Namespace) -> Config:
    """The settings of a command line."""
    if options.smoke:
        return Config("tiny", 2, 16, steps=1)
    if options.model is None and jax.default_backend() != "cpu":
        return Config(WIDE, batch=4, sequence=WIDE.context)
    base = preset(options.model or "tiny")
    return Config(options.model or "tiny", base.batch, base.sequence)


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
        cells = [f"{row['bytes_per_weight']:.4g}", f"{row['state_bytes'] / 1e6:,.0f}", peak]
        lines.append([row["name"], *cells, *(f"{size:,.0f}" for size in sizes)])
    titles = ["", "bytes a weight", "state, MB", "peak, MB", *(f"{b}B: GB, arithmetic" for b in WORTH_A_COLUMN)]
    config, parameters, model = result.config, result.rows[0]["parameters"] / 1e6, result.config["model"]
    named = f"`{model}`" if isinstance(model, str) else f"a GPT of {model['layers']} layers of width {model['width']}"
    return (
        f"{markdown_table(titles, lines)}\n\n"
        f"Measured while training {named} ({parameters:.4g}M parameters, {config['batch']} × "
        f"{config['sequence']} bytes a step). The columns marked arithmetic multiply bytes a weight by a model's size; "
        "no such model was run."
    )


main = functools.partial(common.main, NAME)

if __name__ == "__main__":
    common.command(NAME)
