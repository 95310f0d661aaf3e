"""Bytes of training state, leaf by leaf, and the device's peak while it trains; then arithmetic for larger models.

    python -m benchmarks.memory --json

State is what outlives a step: float32 parameters, Adam's two moments, the quantized weights and the error buffers. It
is counted from the leaves of the real train state. The peak is the allocator's own figure for a process that does
nothing but train one setting for a few steps, compilation's own trials included; CPUs report none. "arithmetic" rows
multiply bytes per weight by a model's size: no such model was run.
"""

import argparse
import dataclasses
import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from benchmarks.common import (
    ROOT,
    announce,
    make_header,
    make_parser,
    print_header,
    print_table,
    result_path,
    write_result,
)
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


_STOCHASTIC = recipe("tcfp12", residual="stochastic", error_feedback=False)
SETTINGS = (
    Setting("BF16", recipe("bf16")),
    Setting("tcfp12, error float32", recipe("tcfp12")),
    Setting("tcfp12, error bfloat16", recipe("tcfp12"), "bfloat16"),
    Setting("tcfp12, error float8_e5m2", recipe("tcfp12"), "float8_e5m2"),
    Setting("tcfp12, stochastic lo, no error buffer", _STOCHASTIC),
    Setting(
        "tcfp12, stochastic lo, one orientation", dataclasses.replace(_STOCHASTIC, weight_copies="one")
    ),
)  # fmt: skip
BILLIONS = (1, 7, 13, 30, 70)


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


def measure_peak(setting: Setting, config: Config) -> tuple[Row, int | None]:
    """Train a few steps in this process: (the bytes of the real state, the allocator's peak)."""
    run = train_config(setting, config)
    state, text, key = init(run), jnp.asarray(corpus_of(run).train), batch_key(run)
    row = count_state(setting, config, state)
    step = make_train_step(run, 1)
    for _ in range(config.steps):
        state, losses = step(state, text, key)
    if not bool(jnp.all(jnp.isfinite(losses))):
        raise ArithmeticError(f"{setting.name}: the loss is {losses}, so its memory means nothing")
    statistics = jax.local_devices()[0].memory_stats() or {}
    return row, statistics.get("peak_bytes_in_use")


def _peaks_in_children(config: Config) -> dict[str, tuple[Row, int | None]]:
    """Each setting in a process of its own, side by side: a peak belongs to a process and never falls."""
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [sys.executable, "-m", "benchmarks.memory", "--child-config", json.dumps(dataclasses.asdict(config))]
    children = {
        setting.name: subprocess.Popen(
            [*command, "--child", setting.name], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
        )
        for setting in SETTINGS
    }
    found = {}
    for name, child in children.items():
        output, _ = child.communicate()
        if child.returncode:
            raise RuntimeError(f"the process that measures {name!r} exited with status {child.returncode}")
        answer = json.loads(output.strip().splitlines()[-1])
        found[name] = (Row(**answer["row"]), answer["peak"])
    return found


def measure(config: Config) -> list[Row]:
    """Measured rows, then arithmetic.

    Raises:
      ArithmeticError: a state that exists has other bytes than its shapes say.
    """
    rows = [count_state(setting, config) for setting in SETTINGS]
    if jax.local_devices()[0].memory_stats() is not None:
        found = _peaks_in_children(config)
        for i, row in enumerate(rows):
            real, peak = found[row.name]
            if real != row:
                raise ArithmeticError(
                    f"{row.name}: the state has {real.state_bytes} bytes, its shapes {row.state_bytes}"
                )
            rows[i] = dataclasses.replace(row, peak_bytes=peak)
    else:
        real, _ = measure_peak(SETTINGS[1], config)
        if real != rows[1]:
            raise ArithmeticError(f"the state has {real.state_bytes} bytes, its shapes {rows[1].state_bytes}")
    return rows + [compute_row(row, billions) for row in rows for billions in BILLIONS]


def compute_row(measured: Row, billions: int) -> Row:
    """Arithmetic: the state of a model of so many billions of weights, if every parameter were a dense kernel."""
    count = billions * 10**9
    dense = measured.bytes_per_weight - 12  # float32 parameters and two float32 moments
    error = measured.errors_bytes / max(1, measured.weights_bytes + measured.errors_bytes) * dense
    parts = (4 * count, 8 * count, round((dense - error) * count), round(error * count), 0)
    return Row("arithmetic", measured.name, count, *parts, sum(parts), measured.bytes_per_weight)


def main(arguments: list[str] | None = None) -> list[Row]:
    """Run the command and return its rows."""
    parser = make_parser(NAME, __doc__)
    parser.add_argument("--model", choices=list(MODELS), default=None, help="(default: gpt2, on CPUs tiny)")
    parser.add_argument("--child", choices=[setting.name for setting in SETTINGS], help=argparse.SUPPRESS)
    parser.add_argument("--child-config", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child is not None:
        return _answer(options)
    model = options.model or ("tiny" if jax.default_backend() == "cpu" else "gpt2")
    base = preset(model)
    config = Config(model, base.batch, base.sequence)
    if options.smoke:
        config = Config("tiny", 2, 16, steps=1)
    header, path = make_header(), result_path(NAME, options)
    print_header(NAME, header)
    rows = measure(config)
    _print(rows, config)
    write_result(path, NAME, header, config, rows)
    announce(path)
    return rows


def _answer(options: argparse.Namespace) -> list[Row]:
    """What a child process measures, as the last line of its output."""
    setting = next(setting for setting in SETTINGS if setting.name == options.child)
    row, peak = measure_peak(setting, Config(**json.loads(options.child_config)))
    print(json.dumps({"row": dataclasses.asdict(row), "peak": peak}))
    return [row]


def _print(rows: list[Row], config: Config) -> None:
    measured = [row for row in rows if row.kind == "measured"]
    size = f"{measured[0].parameters:,} parameters"
    print(f"measured: {config.model}, {size}, {config.batch} x {config.sequence} bytes a step")
    print_table(
        ["MB", *PARTS, "state", "B/weight", "peak"],
        [
            (r.name, *(f"{getattr(r, part + '_bytes') / 1e6:.1f}" for part in PARTS), f"{r.state_bytes / 1e6:.1f}",
             f"{r.bytes_per_weight:.1f}", "-" if r.peak_bytes is None else f"{r.peak_bytes / 1e6:.0f}")
            for r in measured
        ],
    )  # fmt: skip
    print("arithmetic, not measured: GB of state")
    arithmetic = [row for row in rows if row.kind == "arithmetic"]
    sizes = {row.name: [x.state_bytes / 1e9 for x in arithmetic if x.name == row.name] for row in measured}
    print_table(
        ["weights", *(f"{billions}B" for billions in BILLIONS)],
        [(name, *(f"{size:.0f}" for size in values)) for name, values in sizes.items()],
    )


if __name__ == "__main__":
    # Before the first use of a device: the children need the memory that this process would otherwise reserve.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    main(sys.argv[1:])
