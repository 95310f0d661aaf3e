"""Several processes that train together: how they start, how they agree, and how they
end if one is lost.

    srun python -m models.train --mesh fsdp=16  SLURM, found by `jax.distributed`
    mpirun python -m models.train --mesh fsdp=16  Open MPI, likewise
    python -m models.train --coordinator host:1234 --processes 2 --process 0
        anywhere, once for each process

All of them run the same command. An error that only one process finds, such as a
missing file, ends all of them before the first step, with a message that names the
process. All see the folder of the run. The first process writes config, metrics and
results into it; all write checkpoints.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

T = TypeVar("T")
HEARTBEAT_TIMEOUT = 100  # seconds, JAX's default
# Variables by which `jax.distributed` knows a launcher, and the variable with its
# number of processes.
_LAUNCHERS = {
    "SLURM": (
        (
            "SLURM_JOB_ID",
            "SLURM_STEP_NODELIST",
            "SLURM_NTASKS",
            "SLURM_PROCID",
            "SLURM_LOCALID",
        ),
        "SLURM_NTASKS",
    ),
    "Open MPI": (("OMPI_MCA_orte_hnp_uri",), "OMPI_COMM_WORLD_SIZE"),
}


def start(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    heartbeat_timeout_seconds: int = HEARTBEAT_TIMEOUT,
) -> None:
    """Connect this process with the others, before JAX asks for devices; a single
    process does nothing.

    Args:
      coordinator_address: Host and port of the first process; None with SLURM and Open
        MPI, which know it.
      num_processes: Number of processes; None likewise.
      process_id: Index of this process, from 0; None likewise.
      heartbeat_timeout_seconds: Silence after which a process is lost, and the others
        end.

    Raises:
      ValueError: some of the three are given without the others and outside of SLURM
        and Open MPI, a number is out of its range, or Open MPI does not name its first
        process.
    """
    given = {
        "--coordinator": coordinator_address,
        "--processes": num_processes,
        "--process": process_id,
    }
    missing = [name for name, value in given.items() if value is None]
    launcher = _launcher()
    if len(missing) == len(given) and launcher is None:
        if int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1")) > 1:
            raise ValueError(
                f"Open MPI started {os.environ['OMPI_COMM_WORLD_SIZE']} processes, but"
                " says nothing of where the first one is (since its version 5); give"
                " --coordinator host:port --processes N --process I"
            )
        return
    if missing and launcher is None:
        raise ValueError(
            f"{', '.join(name for name in given if name not in missing)} without"
            f" {', '.join(missing)}, and neither SLURM nor Open MPI started this"
            " process; give all of --coordinator host:port --processes N --process I"
        )
    if (
        coordinator_address is not None
        and not coordinator_address.rpartition(":")[2].isdigit()
    ):
        raise ValueError(
            f"--coordinator {coordinator_address} has no port; write host:port, such as"
            " node0:1234"
        )
    if num_processes is not None and num_processes < 1:
        raise ValueError(f"--processes {num_processes} must be at least 1")
    if None not in (process_id, num_processes) and not 0 <= int(process_id or 0) < int(
        num_processes or 0
    ):
        raise ValueError(
            f"--process {process_id} of --processes {num_processes}; they count from 0"
            " to N - 1"
        )
    jax.distributed.initialize(
        coordinator_address,
        num_processes,
        process_id,
        heartbeat_timeout_seconds=heartbeat_timeout_seconds,
    )


def _launcher() -> str | None:
    """Return the launcher that started several processes, including this one."""
    for name, (variables, count) in _LAUNCHERS.items():
        if (
            all(variable in os.environ for variable in variables)
            and int(os.environ.get(count, "1")) > 1
        ):
            return name
    return None


def is_first() -> bool:
    """Return whether this process writes and prints for all."""
    return jax.process_index() == 0


def gather(text: str) -> list[str]:
    """Return the texts of all processes, in each of them."""
    if jax.process_count() == 1:
        return [text]
    content = np.frombuffer(text.encode(), np.uint8)
    sizes = np.asarray(
        multihost_utils.process_allgather(np.int32(len(content)))
    ).reshape(-1)
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: len(content)] = content
    rows = np.asarray(multihost_utils.process_allgather(padded)).reshape(len(sizes), -1)
    return [bytes(row[:size]).decode() for row, size in zip(rows, sizes, strict=True)]


def together(act: Callable[[], T]) -> T:
    """Return the result of `act`, after it has returned in every process.

    Raises:
      ValueError: it failed in another process; the message names the first such process
        and its error.
      Exception: `act` raised it here.
    """
    if jax.process_count() == 1:
        return act()
    try:
        value, error = act(), None
    except Exception as raised:
        value, error = None, raised
    found = gather("" if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for process, message in enumerate(found):
        if message:
            raise ValueError(
                f"process {process} of {len(found)} cannot go on: {message}"
            )
    return value  # type: ignore[return-value]  # no error, so it is the result of `act`


def of_first(find: Callable[[], str]) -> str:
    """Return the text of the first process, in every process."""
    return gather(together(lambda: find() if is_first() else ""))[0]


def check_same(settings: Mapping[str, Any]) -> None:
    """Raise `ValueError` in every process if their settings differ; the message names
    the differences.
    """
    texts = gather(json.dumps(settings, default=str, sort_keys=True))
    first = json.loads(texts[0])
    for process, text in enumerate(texts):
        other = json.loads(text)
        names = [
            name for name in {**first, **other} if first.get(name) != other.get(name)
        ]
        if names:
            found = ", ".join(
                f"{name}={first.get(name)!r} in process 0 but {other.get(name)!r} in"
                f" process {process}"
                for name in names
            )
            raise ValueError(
                f"processes were started with different settings: {found}; start all"
                " with the same"
            )


def whole(array: jax.Array) -> np.ndarray:
    """Return an array that is on devices of several processes, in each of them; all
    call this together.
    """
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def end_after(error: BaseException, advice: str) -> NoReturn:
    """End this process at once with status 1, because an error keeps the others from
    continuing.

    JAX would wait for all processes at the end, and the others would wait for this one.
    """
    cause = type(error).__name__
    if isinstance(error, OSError):  # such as a full disk, which a sentence explains
        cause = str(error)
    else:
        traceback.print_exception(error)
    print(
        f"error: process {jax.process_index()} of {jax.process_count()} cannot go on"
        f" ({cause}), as it failed itself or another process was lost;"
        f" {advice}",
        file=sys.stderr,
    )
    sys.stderr.flush()
    sys.stdout.flush()
    os._exit(1)
