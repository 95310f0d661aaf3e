"""The folder of one training run: what it is, what it has seen, and states to continue from.

    DIR/config.json      the whole `TrainConfig` and the digest of its text, written before the first step
    DIR/metrics.jsonl    {"step": s, "loss": nats per token}, a line a step; "monitor" where it was observed
    DIR/checkpoints/     orbax checkpoints, each renamed into place when complete, the newest two kept

A run may be killed between any two instructions. The order of writes makes that harmless: metrics up to step s are on
disk before checkpoint s starts, so on resuming the file is cut back to the newest complete checkpoint, from which the
run repeats the steps that were lost, bit for bit. Nothing of times is in `metrics.jsonl`, so that even
the files of a killed and of an uninterrupted run are equal.

A checkpoint says nothing of the mesh and the processes that wrote it: each process writes its part, and any mesh of any
number of processes reads what it needs, bit for bit. The first process writes the other files.
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
    """Opens `path` for one run; use it as a context manager.

    Args:
      path: folder, created if missing.
      config: of the run; `dtype="auto"` is stored as what it stands for here.
      corpus_digest: `models.text.Corpus.digest`.
      resume: "never" refuses a folder that holds a run, "allowed" continues it and starts where there is none.
      option: of the command line, which chooses another folder.

    Raises:
      FileExistsError: the folder holds a run and `resume` is "never", or it holds parts of a run without its config.
      ValueError: the run in it differs from `config` or its text; the message names every difference.
    """

    def __init__(
        self, path: Path, config: TrainConfig, corpus_digest: str, *, resume: Resume, option: str = "--out"
    ) -> None:
        self.path = Path(path).absolute()
        wanted = describe(config, corpus_digest)
        # Nobody writes before all have looked, and nobody goes on before it is written.
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
        """The steps before the newest complete checkpoint; 0 where there is none."""
        return self._manager.latest_step() or 0

    @property
    def holds_state(self) -> bool:
        """Whether there is a complete checkpoint; of a run that started from parameters it may be that of step 0."""
        return self._manager.latest_step() is not None

    def restore(self, initial: TrainState) -> tuple[TrainState, list[float]]:
        """The newest complete state and the losses of the steps before it; `initial` and `[]` if there is none.

        Its arrays lie as those of `initial`, whatever the mesh of the run that wrote them; where there is a checkpoint
        the shapes of a state will do (`models.training.state_shapes`). Cuts `metrics.jsonl` back to that step.

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
        """Add the losses of steps `first_step`, `first_step + 1`, ... (counted from 1) to the metrics.

        `report` is what the last of them says of its numerics (`models.monitoring.written`), or None.
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
        """Write a checkpoint after `step` steps; a no-op if that one exists. Returns when it is complete."""
        if self._manager.latest_step() != step:
            self._manager.save(step, args=ocp.args.StandardSave(state))

    def _damaged(self, step: int, error: Exception) -> str:
        """What to say of a checkpoint that is complete by its name, and cannot be read: a disk lost part of it."""
        before = [other for other in self._manager.all_steps() if other < step]
        repair = f"remove that folder to continue from step {max(before)}" if before else "start in another folder"
        # The first line: tensorstore appends pages of its own settings.
        cause = str(error).partition(" [")[0].partition("\n")[0]
        return (
            f"{self.path / CHECKPOINTS / str(step)} is no checkpoint of this run that can be read ({cause}); {repair}"
        )

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
        if is_first():  # the others find the same steps before and after
            replace_file(path, "".join(kept))
        return [math.nan if entry["loss"] is None else entry["loss"] for entry in entries]


def holds_run(path: Path) -> bool:
    """Whether a run was started in `path`."""
    return (path / CONFIG_FILE).is_file()


def read_config(path: Path) -> TrainConfig:
    """The configuration of the run in `path`."""
    content = _stored(path)
    fields = {**content["config"], "data": tuple(content["config"]["data"])}
    if isinstance(fields["model"], dict):
        fields["model"] = FAMILIES[content["family"]].config(**fields["model"])
    fields["recipe"] = _read_recipe(fields["recipe"])
    return TrainConfig(**fields)


def _read_recipe(described: Any) -> Any:
    """A recipe, or the name of one, from how a folder describes it."""
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
    # JSON has no NaN; null says that the run diverged.
    entry = {"step": step, "loss": loss if math.isfinite(loss) else None}
    return json.dumps(entry if report is None else {**entry, "monitor": report}) + "\n"


def export(path: Path, params: Any) -> None:
    """Write float32 parameters, stored ones dequantized, as an `.npz` of arrays named as "block_0/qkv/kernel".

    All processes call it, and the first one writes, into a folder that it makes where there is none.

    Raises:
      ValueError: the path does not end in ".npz", or no file can be there.
    """
    check_export(path)
    leaves, _ = jax.tree_util.tree_flatten_with_path(float_parameters(params))
    temporary = path.with_name(f"partial-{path.name}")
    arrays: dict[str, Any] = {"/".join(path_names(place)): whole(leaf) for place, leaf in leaves}
    if is_first():
        np.savez(temporary, **arrays)
        temporary.replace(path)


def check_export(path: Path) -> None:
    """Make the folder of this path, and raise `ValueError` where `export` cannot write to it."""
    if path.suffix != ".npz":  # NumPy would append it
        raise ValueError(f"{path} is to hold NumPy arrays by name; choose a name that ends in .npz")
    if path.is_dir():
        raise ValueError(f"{path} is to be a file of NumPy arrays, and is a folder; choose another name")
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
    """What must be equal for a run to be continued; names are stored with what they stand for today."""
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
    """The fields of a recipe, and of the values in it, which say what they are: Tensor and Row have the same fields."""
    fields = dataclasses.asdict(recipe)
    for name, part in _nested(fields):
        part["kind"] = type(getattr(recipe, name)).__name__
    return fields


def _nested(fields: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(name, part) for name, part in fields.items() if isinstance(part, dict)]


def _check_same(path: Path, stored: dict[str, Any], wanted: dict[str, Any], option: str) -> None:
    old, new = flatten(stored), flatten(json.loads(json.dumps(wanted)))
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    # What a text is called does not matter where it is the same.
    if "text" not in names:
        names = [name for name in names if name != "config.data"]
    # A different name explains the differences of what it stands for.
    for part in ("model", "recipe"):
        if f"config.{part}" in names:
            names = [name for name in names if not name.startswith(f"{part}.")]
    # Of a model without a name the sizes are those of the config.
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


# How parameters of one kind become those of the kind that was asked for.
_CONVERSIONS = {
    "stored": " (tcfp_jax.store(params, recipe, key=key) makes stored parameters of float ones)",
    "float": " (tcfp_jax.dequantize(params) makes float parameters of stored ones)",
}


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves of nested dicts, named as "config.model".

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
