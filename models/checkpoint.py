"""The folder of one training run: its settings, its losses, and states to continue from.

    DIR/config.json      the whole `TrainConfig` and the digest of its text, written before the first step
    DIR/metrics.jsonl    {"step": s, "loss": nats per token}, one line per step; an observed step has a "monitor"
    DIR/checkpoints/     orbax checkpoints, each renamed into place when complete; the newest two are kept

A run may be killed between any two instructions. The order of writes makes that harmless: metrics up to step s are on
disk before checkpoint s starts. On resuming, the file is cut back to the newest complete checkpoint, and the run
repeats the lost steps bit for bit. `metrics.jsonl` holds no times, so the files of a killed and an uninterrupted run
are equal.

A checkpoint does not depend on the mesh that wrote it: each process writes its part, and any mesh of any number of
processes reads its own. The first process writes the other files.
"""

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import orbax.checkpoint as ocp

import tcfp_jax
from models.families import FAMILIES, family_of
from models.processes import is_first, together, whole
from models.settings import TrainConfig
from models.training import TrainState, float_parameters
from pallas_kernels.operands import Block, Fp4, Row, Tensor
from tcfp_jax.paths import path_names
from tcfp_jax.recipes import Dual, Fp4Training, Recipe, Single

Resume = Literal["never", "allowed"]

CONFIG_FILE, METRICS_FILE, CHECKPOINTS = "config.json", "metrics.jsonl", "checkpoints"
KEPT_CHECKPOINTS = 2
_KINDS: dict[str, Any] = {kind.__name__: kind for kind in (Dual, Single, Tensor, Row, Block, Fp4, Fp4Training)}


class RunDirectory:
    """The folder of one run; use it as a context manager.

    Args:
      path: The folder, created if it is missing.
      config: Settings of the run; `dtype="auto"` is stored as the dtype on this machine.
      corpus_digest: `models.text.Corpus.digest`.
      resume: "never" refuses a folder that holds a run; "allowed" continues the run, or starts one.
      option: Option of the command line that chooses another folder, for messages.

    Raises:
      FileExistsError: the folder holds a run and `resume` is "never", or it holds parts of a run without its config.
      ValueError: the run in it differs from `config` or its text; the message names every difference.
    """

    def __init__(
        self, path: Path, config: TrainConfig, corpus_digest: str, *, resume: Resume, option: str = "--out"
    ) -> None:
        self.path = Path(path).absolute()
        wanted = describe(config, corpus_digest)
        # All processes look before the first one writes, and wait until it has written.
        together(lambda: self._look(wanted, resume, option))
        together(lambda: self._begin(wanted, option))
        self._manager = ocp.CheckpointManager(
            self.path / CHECKPOINTS,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=KEPT_CHECKPOINTS, cleanup_tmp_directories=True, enable_async_checkpointing=False
            ),
        )

    def _look(self, wanted: dict[str, Any], resume: Resume, option: str) -> None:
        if not holds_run(self.path):
            _check_unused(self.path, option)
        elif resume == "never":
            recipe = _stored(self.path)["config"]["recipe"]
            raise FileExistsError(
                f"{self.path} holds a run (recipe {recipe!r}); continue it with --resume, or choose another {option}"
            )
        else:
            _check_same(self.path, _stored(self.path), wanted, option)

    def _begin(self, wanted: dict[str, Any], option: str) -> None:
        if is_first() and not holds_run(self.path):
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                write_json(self.path / CONFIG_FILE, wanted)
            except OSError as error:
                raise ValueError(
                    f"{self.path} cannot hold a run, as nothing can be written there ({error}); choose another {option}"
                ) from error

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, *exception: object) -> None:
        self._manager.close()

    @property
    def newest_step(self) -> int:
        """Number of steps before the newest complete checkpoint; 0 if there is none."""
        return self._manager.latest_step() or 0

    @property
    def holds_state(self) -> bool:
        """If there is a complete checkpoint; a run that started from parameters has one of step 0."""
        return self._manager.latest_step() is not None

    def restore(self, initial: TrainState) -> tuple[TrainState, list[float]]:
        """Return the newest complete state and the losses before it, or `initial` and `[]` if there is none.

        The arrays are placed as in `initial`, whatever mesh wrote the checkpoint. If there is a checkpoint, the
        shapes of a state are enough (`models.training.state_shapes`). This cuts `metrics.jsonl` back to that step.

        Raises:
          ValueError: the checkpoint cannot be read, or the metrics of a step before it are missing.
        """
        newest = self._manager.latest_step()
        state = initial
        if newest is not None:
            try:
                state = self._manager.restore(newest, args=ocp.args.StandardRestore(initial))
            except (ValueError, OSError, KeyError) as error:
                raise ValueError(self._damaged(newest, error)) from error
        return state, together(lambda: self._cut_metrics(0 if newest is None else newest))

    def append(self, first_step: int, losses: np.ndarray, report: Any = None) -> None:
        """Append the losses of steps `first_step`, `first_step + 1`, ... (counted from 1) to the metrics.

        `report` belongs to the last of them (`models.monitoring.written`), or is None.
        """
        if not is_first():
            return
        reports = [None] * (len(losses) - 1) + [report]
        lines = (_metrics_line(first_step + i, float(losses[i]), reports[i]) for i in range(len(losses)))
        with (self.path / METRICS_FILE).open("a", encoding="utf-8") as file:
            file.write("".join(lines))
            file.flush()
            os.fsync(file.fileno())

    def save(self, state: TrainState, step: int) -> None:
        """Write the checkpoint after `step` steps unless it exists; return when it is complete."""
        if self._manager.latest_step() != step:
            self._manager.save(step, args=ocp.args.StandardSave(state))

    def _damaged(self, step: int, error: Exception) -> str:
        """Return the message on a checkpoint that has a name but lost files on disk."""
        before = [other for other in self._manager.all_steps() if other < step]
        repair = f"remove that folder to continue from step {max(before)}" if before else "start in another folder"
        # Only the first line, because tensorstore appends pages of its own settings.
        cause = str(error).partition(" [")[0].partition("\n")[0]
        return f"{self.path / CHECKPOINTS / str(step)} is not a readable checkpoint of this run ({cause}); {repair}"

    def _cut_metrics(self, steps: int) -> list[float]:
        path = self.path / METRICS_FILE
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        kept = lines[:steps]
        try:
            entries = [json.loads(line) for line in kept]
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path} has a line that is not JSON ({error}); restore the file or start in another folder"
            ) from error
        if [entry["step"] for entry in entries] != list(range(1, steps + 1)):
            raise ValueError(
                f"{path} does not hold steps 1 to {steps} of the checkpoint, one line each; restore the file or start "
                "in another folder"
            )
        if is_first():  # the other processes read the same steps before and after
            replace_file(path, "".join(kept))
        return [math.nan if entry["loss"] is None else entry["loss"] for entry in entries]


def holds_run(path: Path) -> bool:
    """Return whether a run was started in `path`."""
    return (path / CONFIG_FILE).is_file()


def read_config(path: Path) -> TrainConfig:
    """Return the configuration of the run in `path`."""
    content = _stored(path)
    fields = {**content["config"], "data": tuple(content["config"]["data"])}
    if isinstance(fields["model"], dict):
        fields["model"] = FAMILIES[content["family"]].config(**fields["model"])
    fields["recipe"] = _read_recipe(fields["recipe"])
    return TrainConfig(**fields)


def _read_recipe(described: Any) -> Any:
    """Return the recipe, or its name, that a folder describes."""
    if not isinstance(described, dict):
        return described
    parts = {name: _KINDS[part.pop("kind")](**part) for name, part in _nested(described)}
    return Recipe(**{**described, **parts})


def write_json(path: Path, content: Any) -> None:
    """Write `content` so that a reader sees the old file or the new one, never a part."""
    replace_file(path, json.dumps(content, indent=2) + "\n")


def replace_file(path: Path, text: str) -> None:
    """Replace a text file in one step."""
    temporary = path.with_name(path.name + ".partial")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _metrics_line(step: int, loss: float, report: Any = None) -> str:
    # JSON has no NaN, so null marks a run that diverged.
    entry = {"step": step, "loss": loss if math.isfinite(loss) else None}
    return json.dumps(entry if report is None else {**entry, "monitor": report}) + "\n"


def export(path: Path, params: Any) -> None:
    """Write float32 parameters as an `.npz` of arrays with names such as "block_0/qkv/kernel".

    All processes call it, and the first one writes. The folder is created if it is missing.

    Raises:
      ValueError: the path does not end in ".npz", or no file can be written there.
    """
    check_export(path)
    leaves, _ = jax.tree_util.tree_flatten_with_path(float_parameters(params))
    temporary = path.with_name(f"partial-{path.name}")
    arrays: dict[str, Any] = {"/".join(path_names(place)): whole(leaf) for place, leaf in leaves}
    if is_first():
        np.savez(temporary, **arrays)
        temporary.replace(path)


def check_export(path: Path) -> None:
    """Create the folder of this path, and raise `ValueError` if `export` cannot write to it."""
    if path.suffix != ".npz":  # NumPy would append it silently
        raise ValueError(f"{path} must hold NumPy arrays by name; choose a name that ends in .npz")
    if path.is_dir():
        raise ValueError(f"{path} must be a file of NumPy arrays, but is a folder; choose another name")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{path} cannot be written, as its folder cannot be made ({error}); choose another") from error


def _stored(path: Path) -> dict[str, Any]:
    """Return the description of the run in a folder.

    Raises:
      ValueError: it is not JSON.
    """
    try:
        return json.loads((path / CONFIG_FILE).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path / CONFIG_FILE} describes no run, as it is not JSON ({error}); restore it or start in another folder"
        ) from error


def describe(config: TrainConfig, corpus_digest: str) -> dict[str, Any]:
    """Return the settings that must be equal to continue a run, with names and the values behind them."""
    fields = dataclasses.asdict(dataclasses.replace(config, dtype=config.compute_dtype))
    if isinstance(config.recipe, Recipe):
        fields["recipe"] = _describe_recipe(config.recipe)
    return {
        "config": fields,
        "family": family_of(config.size),
        "model": dataclasses.asdict(config.size),
        "recipe": _describe_recipe(tcfp_jax.recipe(config.recipe)),
        "text": corpus_digest,
        "device": jax.default_backend(),
    }


def _describe_recipe(recipe: Recipe) -> dict[str, Any]:
    """Return the fields of a recipe with the class of each nested value: Tensor and Row have the same fields."""
    fields = dataclasses.asdict(recipe)
    for name, part in _nested(fields):
        part["kind"] = type(getattr(recipe, name)).__name__
    return fields


def _nested(fields: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(name, part) for name, part in fields.items() if isinstance(part, dict)]


def _check_same(path: Path, stored: dict[str, Any], wanted: dict[str, Any], option: str) -> None:
    old, new = flatten(stored), flatten(json.loads(json.dumps(wanted)))
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    # The name of a text does not matter if its digest is the same.
    if "text" not in names:
        names = [name for name in names if name != "config.data"]
    # A different name explains every difference behind it.
    for part in ("model", "recipe"):
        if f"config.{part}" in names:
            names = [name for name in names if not name.startswith(f"{part}.")]
    # A model without a name has its sizes in the config already.
    names = [name for name in names if f"config.{name}" not in names]
    if "config.model" in names:
        names = [name for name in names if name != "family"]
    if names:
        differences = ", ".join(
            f"{name.removeprefix('config.')}={old.get(name)!r} in the folder but {new.get(name)!r} now"
            for name in names
        )
        repair = f"resume with the same settings or choose another {option}"
        if "config.weights" in names:
            repair += _CONVERSIONS[new["config.weights"]]
        raise ValueError(f"{path} holds another run: {differences}; {repair}")


# Advice: how to convert parameters to the kind that was asked for.
_CONVERSIONS = {
    "stored": " (tcfp_jax.store(params, recipe, key=key) makes stored parameters of float ones)",
    "float": " (tcfp_jax.dequantize(params) makes float parameters of stored ones)",
}


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested dicts under names such as "config.model".

    >>> flatten({"config": {"model": "tiny"}, "text": 1})
    {'config.model': 'tiny', 'text': 1}
    """
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def _check_unused(path: Path, option: str) -> None:
    if path.exists() and not path.is_dir():
        raise FileExistsError(f"{path} is a file, not a folder; choose another {option}")
    for name in (METRICS_FILE, CHECKPOINTS):
        if (path / name).exists():
            raise FileExistsError(
                f"{path / name} belongs to no run that {CONFIG_FILE} describes; choose another {option}"
            )
