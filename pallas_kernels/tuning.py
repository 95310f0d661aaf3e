"""What was measured to be fastest: `tuned.json`, by device, op, variant and shape.

`python -m benchmarks.gemm --tune` times every backend and tile config on the device it runs on and writes the winners;
nothing else writes the file. `backend=None` asks here: an implementation that lost near a shape declines, and so does
a kernel that nobody has timed on this device.

Shapes are compared by the logarithms of their sizes; for a shape that was not measured, what was fastest at the nearest
one that was is the guess.
"""

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pallas_kernels.dispatch import Backend, device_kind

PATH = Path(__file__).with_name("tuned.json")


@dataclass(frozen=True)
class Entry:
    """The fastest way of one variant of an op at one shape.

    Attributes:
      variant: what decides speed beside the shape, such as "dual fast bfloat16".
      backend: the winner.
      milliseconds: of every backend at its best.
      configs: the fields of the best config of each backend that has any.
    """

    shape: tuple[int, ...]
    variant: str
    backend: Backend
    milliseconds: Mapping[str, float]
    configs: Mapping[str, Mapping[str, Any]]

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))


class Tuned(dict[str, dict[str, tuple[Entry, ...]]]):
    """Entries by device kind and op; compared by identity, so that it can be part of the key of a traced function."""

    __eq__ = object.__eq__
    __ne__ = object.__ne__
    __hash__ = object.__hash__  # type: ignore[assignment]


@functools.lru_cache(maxsize=1)
def load() -> Tuned:
    """Entries by device kind and op, as `tuned.json` has them."""
    content = json.loads(PATH.read_text(encoding="utf-8"))
    return Tuned(
        {
            device: {op: tuple(Entry(**entry) for entry in entries) for op, entries in ops.items()}
            for device, ops in content.items()
        }
    )


def find(op: str, variant: str, shape: tuple[int, ...]) -> Entry | None:
    """The measurement of this variant nearest to `shape` on the device in use, or None."""
    entries = [e for e in load().get(device_kind(), {}).get(op, ()) if e.variant == variant]
    return min(entries, key=lambda entry: _distance(entry.shape, shape), default=None)


def _distance(a: tuple[int, ...], b: tuple[int, ...]) -> float:
    return sum(abs(math.log2(x / max(1, y))) for x, y in zip(a, b, strict=True))


def decline(op: str, backend: Backend, variant: str, shape: tuple[int, ...]) -> str | None:
    """Why `backend` is not the first choice here, or None where it was measured to be the fastest."""
    entry = find(op, variant, shape)
    if entry is None:
        return f"{op} ({variant}) was not timed on {device_kind()}; run python -m benchmarks.gemm --tune"
    if entry.backend == backend:
        return None
    times = ", ".join(f"{name} {value:.4g} ms" for name, value in sorted(entry.milliseconds.items()))
    at = "x".join(map(str, entry.shape))
    return f"{entry.backend} was fastest at {at} ({times})"
