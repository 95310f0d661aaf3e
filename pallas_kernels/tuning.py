"""What was measured to be fastest: `tuned.json`, by device, op, variant and shape.

`python -m benchmarks.gemm --tune` times every backend and tile config on the device it runs on and writes the winners;
nothing else writes the file. `backend=None` asks here: an implementation that lost near a shape declines, and so does
a kernel that nobody has timed on this device. A chip with the multiprocessors of one that was timed has its times until
it has its own (`timed_device`).

Shapes are compared by the logarithms of their sizes; for a shape that was not measured, what was fastest at the nearest
one that was is the guess. An entry need not have every backend: it says nothing of one that it does not name.

The same times say what a call takes: `estimate` interpolates between them. For that there are entries of what has no
kernel of this project, BF16 products ("dot_general") among them.
"""

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pallas_kernels.dispatch import Backend, Key, device_kind

PATH = Path(__file__).with_name("tuned.json")
# How far a measurement counts, in octaves, summed over the axes of a shape.
NEAR = 2.0
# Devices by what their names contain: the H200's multiprocessors and tensor cores beside slower memory.
_ALIKE = {"NVIDIA H200": ("H100", "H200", "H800", "GH200")}


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


def find(key: Key, backend: Backend) -> Entry | None:
    """The measurement nearest to the shape of `key` in which `backend` took part, on the device in use, or None."""
    return min(_entries(key, backend), key=lambda entry: _distance(entry.shape, key.shape), default=None)


def timed_device() -> str:
    """The device whose times count here: the one in use, or one like it where that was not timed."""
    kind = device_kind()
    if kind in load():
        return kind
    return next((other for other, names in _ALIKE.items() if any(name in kind for name in names)), kind)


def _entries(key: Key, backend: Backend) -> list[Entry]:
    entries = load().get(timed_device(), {}).get(key.op, ())
    return [entry for entry in entries if entry.variant == key.variant and backend in entry.milliseconds]


def _apart(a: tuple[int, ...], b: tuple[int, ...]) -> float:
    """The distance for `estimate`: one pass over a matrix takes what one over its transpose does."""
    return _distance(tuple(sorted(a)), tuple(sorted(b))) if len(a) == 2 else _distance(a, b)


def _distance(a: tuple[int, ...], b: tuple[int, ...]) -> float:
    return sum(abs(math.log2(max(1, x) / max(1, y))) for x, y in zip(a, b, strict=True))


def decline(backend: Backend, key: Key | None) -> str | None:
    """Why `backend` is not the first choice here, or None where it was measured to be the fastest."""
    entry = None if key is None else find(key, backend)
    if key is None or entry is None:
        what = "this" if key is None else f"{key.op} ({key.variant})"
        return f"{what} was not timed on {device_kind()}; run python -m benchmarks.gemm --tune"
    if entry.backend == backend:
        return None
    times = ", ".join(f"{name} {value:.4g} ms" for name, value in sorted(entry.milliseconds.items()))
    where = "" if timed_device() == device_kind() else f" on {timed_device()}"
    return f"{entry.backend} was fastest at {written(entry.shape)}{where} ({times})"


def is_timed() -> bool:
    """Whether BF16's products were timed on `timed_device`, to which `estimate` of others can be compared."""
    return "dot_general" in load().get(timed_device(), {})


def estimate(key: Key, backend: Backend) -> float | None:
    """Milliseconds of a call by `backend` on `timed_device`; None where nothing near its shape was measured.

    What is interpolated is the rate, the product of the sizes over the time:

        log rate = sum_i log rate_i / d_i^2  /  sum_i 1 / d_i^2,   d = sum over axes of |log2 of the sizes' ratio|

    over the measurements within `NEAR`. It is exact where it was measured, and elsewhere between the slowest and the
    fastest of them. Of two axes the order does not count.
    """
    near = [(_apart(entry.shape, key.shape), entry) for entry in _entries(key, backend)]
    near = [(distance, entry) for distance, entry in near if distance <= NEAR]
    if not near or 0 in key.shape:
        return None
    nearest, entry = min(near, key=lambda pair: pair[0])
    if nearest == 0:
        return entry.milliseconds[backend]
    weights = [distance**-2 for distance, _ in near]
    rates = [math.log(math.prod(entry.shape) / entry.milliseconds[backend]) for _, entry in near]
    log_rate = sum(w * rate for w, rate in zip(weights, rates, strict=True)) / sum(weights)
    return math.prod(key.shape) / math.exp(log_rate)


def written(shape: tuple[int, ...]) -> str:
    """A shape in a message.

    >>> written((8192, 4096))
    '8192x4096'
    """
    return "x".join(map(str, shape))
