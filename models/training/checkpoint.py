"""The folder of one training run: its settings, its losses, and its checkpoints.

    DIR/config.json
        the whole `TrainConfig`, the digest of its text and the file's own, written
        before the first step
    DIR/metrics.jsonl
        {"step": s, "loss": nats per token}, one line per step; an observed step has a
        "monitor", and one of pairs the rewards of `models.training.dpo`. In bits per
        byte a loss is loss / ln 2 / bytes_per_token of `summary.json`
    DIR/checkpoints/
        orbax checkpoints, each renamed into place when complete; the newest two are
        kept, and one if the disk has no room for a third. Each has the versions that
        wrote it, a digest of the metrics until then, and a digest of every file, which
        is compared before it is read
    DIR/damaged/
        checkpoints whose files changed after they were written; the run continued from
        an older one
    DIR/lock
        locked while a process writes the folder; a dead process holds no lock

A run may be killed between any two instructions. The order of writes makes that
harmless: metrics up to step s are on disk before checkpoint s starts. On resuming, the
file is cut back to the newest whole checkpoint, and the run repeats the lost steps bit
for bit. `metrics.jsonl` holds no times, so the files of a killed and an uninterrupted
run are equal.

The folder may be a stranger's: links out of it, devices and pipes are refused, and
nothing in it is run (SECURITY.md).

A checkpoint does not depend on the mesh that wrote it: each process writes its part,
and any mesh of any number of processes reads its own. The first process writes the
other files.
"""

import contextlib
import logging
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from io import BufferedRandom
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orbax.checkpoint as ocp

from tcfp_jax.inference import folders
from tcfp_jax.weights.stored import bytes_of

from .described import CONFIG_FILE, check_same, describe, holds_run, recorded
from .forms import Update
from .intact import (
    DIGESTS_FILE,
    LOCK_FILE,
    check_digests,
    digest_of,
    digest_of_text,
    is_sealed,
    lock,
    notes_of,
    versions,
    write_digests,
    write_sealed,
)
from .metrics import (
    LARGEST_METRICS,
    METRICS_FILE,
    line_of,
    repaired,
)
from .processes import is_first, of_first, together
from .settings import TrainConfig
from .state import TrainState

Resume = Literal["never", "allowed"]

CHECKPOINTS = "checkpoints"
DAMAGED = "damaged"
METRICS = "metrics"  # name of their digest in the notes of a checkpoint
# All that a run reads and writes in its folder, which may hold other things, too.
ENTRIES = (
    CONFIG_FILE,
    METRICS_FILE,
    CHECKPOINTS,
    DAMAGED,
    LOCK_FILE,
    "compare_bf16",
    "loss.png",
    "monitor.png",
    "samples.jsonl",
    "summary.json",
    "tensorboard",
)
KEPT_CHECKPOINTS = 2


class RunDirectory:
    """The folder of one run; use it as a context manager.

    Args:
      path: The folder, created if it is missing.
      config: Settings of the run; `dtype="auto"` is stored as the dtype on this
        machine.
      corpus_digest: `models.training.text.Corpus.digest`.
      resume: "never" refuses a folder that holds a run; "allowed" continues the run, or
        starts one.
      option: Option of the command line that chooses another folder, for messages.
      device: Kind of device that trains the run, as `describe` names it; None is this
        machine's. Weights can be read on another one.

    Raises:
      FileExistsError: the folder holds a run and `resume` is "never", or it holds parts
        of a run without its config.
      ValueError: the run in it differs from `config` or its text, and the message names
        every difference; another process writes the folder; or it cannot be written.
    """

    def __init__(
        self,
        path: Path,
        config: TrainConfig,
        corpus_digest: str,
        *,
        resume: Resume,
        option: str = "--out",
        device: str | None = None,
    ) -> None:
        self.path = Path(path).absolute()
        self._steps = config.steps
        wanted = describe(config, corpus_digest)
        if device is not None:
            wanted["device"] = device
        self._lock: BufferedRandom | None = None
        self._is_new = False
        # All processes look before the first one writes, and wait until it has written.
        together(lambda: self._look(wanted, resume, option))
        together(lambda: self._begin(wanted, resume, option))
        kept = ocp.CheckpointManagerOptions(
            max_to_keep=KEPT_CHECKPOINTS,
            cleanup_tmp_directories=True,
            enable_async_checkpointing=False,
        )
        folder = self.path / CHECKPOINTS
        try:
            with _without_tracebacks():
                self._manager = ocp.CheckpointManager(folder, options=kept)
        # Orbax raises bare exceptions for files that it cannot read
        except Exception as error:
            self._unlock()
            raise ValueError(
                f"{folder} cannot be read ({_first_line(error)}); repair it, or choose"
                f" another {option}"
            ) from error

    def _look(self, wanted: dict[str, Any], resume: Resume, option: str) -> None:
        folders.check_links(self.path, ENTRIES)
        if resume == "never" or not holds_run(self.path):
            check_new(self.path, option)
        else:
            check_same(self.path, recorded(self.path), wanted, option)

    def _begin(self, wanted: dict[str, Any], resume: Resume, option: str) -> None:
        if not is_first():
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = lock(self.path)
            # Again: another process may have begun a run in between
            self._look(wanted, resume, option)
            if not holds_run(self.path):
                write_sealed(self.path / CONFIG_FILE, wanted)
                self._is_new = True
                return
            if not is_sealed(self.path, CONFIG_FILE):
                print(
                    f"{self.path / CONFIG_FILE} has no digest, so damage to it may go"
                    " unseen",
                    file=sys.stderr,
                )
            self._follow_update(wanted["config"]["update"])
        except BaseException as error:
            self._unlock()
            if not isinstance(error, OSError) or isinstance(error, FileExistsError):
                raise
            raise ValueError(
                f"{self.path} cannot hold a run, as nothing can be written there"
                f" ({error}); choose another {option}"
            ) from error

    def _follow_update(self, update: Update) -> None:
        """Note that the run goes on with another `update` than it had until here."""
        content = recorded(self.path)
        before = content["config"].get("update", "behind")
        if update == before:
            return
        content["config"]["update"] = update
        write_sealed(self.path / CONFIG_FILE, content)
        print(
            f"{self.path} had update={before!r} and goes on with {update!r}, which"
            " clips gradients in another way",
            file=sys.stderr,
        )

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, kind: type[BaseException] | None, *others: object) -> None:
        self._manager.close()
        if kind is not None and self._is_new and is_first():
            self._leave_nothing()
        self._unlock()

    def _leave_nothing(self) -> None:
        """Remove the folder of a run that this process began and that ended before its
        first step, so that the same command may run again with other settings.
        """
        metrics = self.path / METRICS_FILE
        if self.holds_state or (metrics.exists() and metrics.stat().st_size):
            return
        for name in (CONFIG_FILE, LOCK_FILE, METRICS_FILE):
            (self.path / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # other files are in them
            (self.path / CHECKPOINTS).rmdir()
            self.path.rmdir()

    @property
    def holds_state(self) -> bool:
        """If there is a complete checkpoint; there is none before the first steps."""
        return self._manager.latest_step() is not None

    def restore(self, initial: TrainState) -> tuple[TrainState, list[float]]:
        """Return the newest whole state and the losses before it, or `initial` and `[]`
        if there is no checkpoint.

        The arrays are placed as in `initial`, whatever mesh wrote the checkpoint. If
        there is a checkpoint, the shapes of a state are enough
        (`models.training.steps.state_shapes`). This cuts `metrics.jsonl` back to that
        step, and moves newer checkpoints that are damaged out of the way; both are said
        on standard error.

        Raises:
          ValueError: no checkpoint is whole, or this run cannot read one that is.
        """
        damaged: dict[int, str] = {}
        state = initial
        step = 0
        for newest in sorted(self._manager.all_steps(), reverse=True):
            found = self._read(newest, initial, damaged)
            if found is not None:
                state = found
                step = newest
                break
        if damaged and state is initial:
            causes = ", ".join(f"{step} ({cause})" for step, cause in damaged.items())
            raise ValueError(
                f"{self.path / CHECKPOINTS} has no whole checkpoint: {causes}; copy one"
                " back, remove that folder to begin at step 0, or start in another"
                " folder"
            )
        together(lambda: self._set_aside(damaged, step))
        if damaged:
            self._manager.reload()
        return state, together(lambda: self._repair_metrics(step))

    def _read(
        self, step: int, initial: TrainState, damaged: dict[int, str]
    ) -> TrainState | None:
        """Return the state of a checkpoint, or None after a note in `damaged`."""
        path = self._checkpoint(step)
        verified = False
        try:
            if step > self._steps:
                raise ValueError(f"the run ends at step {self._steps}")
            verified = check_digests(path)
            args = ocp.args.StandardRestore(initial)
            with _without_tracebacks():
                state: TrainState = self._manager.restore(step, args=args)
        # Tensorstore raises bare exceptions for files that it cannot read
        except Exception as error:
            damaged[step] = _first_line(error)
            if verified:
                raise ValueError(
                    f"{path} has not changed, but does not hold a state of this run"
                    f" ({damaged[step]}; {versions(path)}); resume with the versions"
                    " that wrote it, or start in another folder"
                ) from error
            return None
        if not verified and is_first():
            print(
                f"checkpoint {step} has no {DIGESTS_FILE}, so damage to it may go"
                " unseen",
                file=sys.stderr,
            )
        return state

    def _checkpoint(self, step: int) -> Path:
        return self.path / CHECKPOINTS / str(step)

    def _set_aside(self, damaged: dict[int, str], step: int) -> None:
        if not is_first():
            return
        for other, cause in damaged.items():
            target = self.path / DAMAGED / str(other)
            try:
                target.parent.mkdir(exist_ok=True)
                shutil.rmtree(target, ignore_errors=True)
                self._checkpoint(other).rename(target)
            except OSError as error:
                raise ValueError(
                    f"{self._checkpoint(other)} is damaged ({cause}) and cannot be"
                    " moved away"
                ) from error
            print(
                f"checkpoint {other} is damaged ({cause}): moved to {target}, going on"
                f" from {step}",
                file=sys.stderr,
            )

    def append(
        self,
        first_step: int,
        losses: np.ndarray,
        report: Any = None,
        rewards: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Append the losses of steps `first_step`, `first_step + 1`, ... (counted from
        1) to the metrics, with the rewards of each.

        `report` belongs to the last of them (`models.training.monitoring.written`), or
        is None.
        """
        if not is_first():
            return
        lines = []
        for place, loss in enumerate(losses):
            own = {name: values[place] for name, values in (rewards or {}).items()}
            last = report if place == len(losses) - 1 else None
            lines.append(line_of(first_step + place, loss, last, own))
        self.extend(METRICS_FILE, "".join(lines))

    def extend(self, name: str, text: str) -> None:
        """Append to a text file of the folder; return when it is on disk."""
        with folders.extended(self.path, name) as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())

    def save(self, state: TrainState, step: int) -> int:
        """Write the checkpoint after `step` steps unless it exists; return the bytes of
        its files when it is complete.

        Raises:
          OSError: it cannot be written, such as on a full disk; those before it stay.
        """
        if self._manager.latest_step() == step:
            return 0
        self._make_room(bytes_of(state))
        try:
            with _without_tracebacks():
                self._manager.save(step, args=ocp.args.StandardSave(state))
            metrics = digest_of(self.path, METRICS_FILE)
            return write_digests(self._checkpoint(step), {METRICS: metrics})
        # Tensorstore raises bare exceptions for files that it cannot write
        except Exception as error:
            cause = _first_line(error).rpartition(": ")[2]
            raise OSError(
                f"{self._checkpoint(step)} cannot be written ({cause})"
            ) from error

    def _make_room(self, size: int) -> None:
        """Delete the oldest of several checkpoints if the disk has no room for another:
        orbax deletes it only after it has written the new one.
        """
        steps = sorted(self._manager.all_steps())
        if len(steps) < KEPT_CHECKPOINTS:
            return
        free = of_first(lambda: str(shutil.disk_usage(self.path).free))
        if int(free) < size:
            self._manager.delete(steps[0])

    def _repair_metrics(self, steps: int) -> list[float]:
        """Cut the metrics to one line a step; a step without a sound line gets the loss
        null.
        """
        path = self.path / METRICS_FILE
        try:
            text = ""
            if path.exists():
                content = folders.read_bytes(self.path, METRICS_FILE, LARGEST_METRICS)
                text = content.decode(errors="replace")
            kept, losses, lost = repaired(text, steps)
            if is_first():  # the other processes read the same steps before and after
                self._tell_changes(text, kept, steps, lost)
                folders.replace_text(self.path, METRICS_FILE, kept)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{path} cannot be read and written ({error}); repair that, or copy the"
                " folder"
            ) from error
        return losses

    def _tell_changes(self, text: str, kept: str, steps: int, lost: int) -> None:
        """Say that the metrics are not those that the checkpoint of a step saw."""
        path = self.path / METRICS_FILE
        if not text.startswith(kept):
            print(
                f"{path} is repaired: one line for each of {steps} steps, {lost}"
                " unknown",
                file=sys.stderr,
            )
        noted = notes_of(self._checkpoint(steps)).get(METRICS)
        if noted not in (None, digest_of_text(kept)):
            print(
                f"{path} has changed since checkpoint {steps} was written, so its"
                " losses may be wrong",
                file=sys.stderr,
            )


@contextlib.contextmanager
def _without_tracebacks() -> Iterator[None]:
    """Keep orbax from printing the errors that it raises."""
    logger = logging.getLogger("absl")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


def _first_line(error: Exception) -> str:
    """Return the message of an error without pages of tensorstore's own settings."""
    return str(error).partition(" [")[0].partition("\n")[0]


def steps_of_checkpoints(path: Path) -> list[int]:
    """Return the steps of the checkpoints in the folder of a run, in order."""
    names = [found.name for found in (path / CHECKPOINTS).glob("*")]
    return sorted(int(name) for name in names if name.isdecimal())


def check_new(path: Path, option: str = "--out") -> None:
    """Raise `FileExistsError` if a folder holds a run or parts of one."""
    if path.exists() and not path.is_dir():
        raise FileExistsError(
            f"{path} is a file, not a folder; choose another {option}"
        )
    if holds_run(path):
        recipe = recorded(path)["config"]["recipe"]
        raise FileExistsError(
            f"{path} holds a run (recipe {recipe!r}); continue it with"
            f" --resume, or choose another {option}"
        )
    for name in (METRICS_FILE, CHECKPOINTS):
        if (path / name).exists():
            raise FileExistsError(
                f"{path / name} belongs to no run that {CONFIG_FILE} describes; choose"
                f" another {option}"
            )
