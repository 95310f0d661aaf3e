"""Room on disks for the files of a run, which is checked before it trains."""

import math
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tcfp_jax.weights.stored import bytes_of

from ..huggingface.folders import existing
from .checkpoint import KEPT_CHECKPOINTS, steps_of_checkpoints
from .exporting import Export
from .settings import TrainConfig
from .steps import count_parameters, state_shapes


class Files(NamedTuple):
    """Files that a run will write.

    Attributes:
      path: Their folder, or the file.
      size: Their bytes.
      described: Their names, for messages.
    """

    path: Path
    size: int
    described: str


def sized(count: float) -> str:
    """Return a number of bytes for readers.

    >>> sized(57_100_000_000)
    '57.1 GB'
    """
    unit = "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if count < 1000:
            break
        count /= 1000
        unit = larger
    return f"{count:.3g} {unit}"


def state_bytes(config: TrainConfig) -> int:
    """Return the bytes of a run's state. A checkpoint has at most as many."""
    if config.update == "auto":
        config = config.updated("behind")
    return bytes_of(state_shapes(config))


def files_of(config: TrainConfig, out: Path, every: int) -> Iterator[Files]:
    """Yield the checkpoints that a run will write in its folder, besides those there.

    `RunDirectory.save` deletes the oldest one first if there is no room for another.
    """
    there = steps_of_checkpoints(out)
    left = config.steps - max(there, default=0)
    if every == 0 or left <= 0:
        return
    more = min(math.ceil(left / every), KEPT_CHECKPOINTS - len(there))
    size = state_bytes(config)
    if more > 0:
        named = f"{more} checkpoint{'s' * (more > 1)} of {sized(size)}"
        yield Files(out, more * size, named)


def file_of(config: TrainConfig, export: Export) -> Files:
    """Return the weights that a run exports."""
    size = int(export.weight_bytes * count_parameters(config))
    return Files(export.path, size, f"weights of {sized(size)}")


def check_room(files: Sequence[Files]) -> None:
    """Raise `ValueError` if a disk has less room than the files that go there."""
    disks: dict[int, list[Files]] = {}
    for one in files:
        disks.setdefault(existing(one.path).stat().st_dev, []).append(one)
    for own in disks.values():
        free = shutil.disk_usage(existing(own[0].path)).free
        needed = sum(one.size for one in own)
        if needed > free:
            listed = ", ".join(f"{one.described} in {one.path}" for one in own)
            raise ValueError(
                f"the disk has {sized(free)} free, but the run will write"
                f" {sized(needed)} ({listed}); make room, choose another disk, or write"
                " no checkpoints (--checkpoint-every 0)"
            )
