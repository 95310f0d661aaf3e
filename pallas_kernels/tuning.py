"""Measured times: `tuned.json`, by device, op, variant and shape.

`python -m benchmarks.tune` times every backend and tile config on its device and
writes the winners; nothing else writes the file. `dispatch` asks here for
`backend=None`: an implementation declines if it lost near a shape, and a kernel also if
it was never timed on this device. A variant that was not timed on a device takes the
times of a device with the same multiprocessors.

Shapes are compared by the logarithms of their sizes, and the winner of the nearest
measured shape is the guess for the others. An entry need not have every backend: it
says nothing about a backend that it does not name.

`estimate` interpolates between the same times. For this the file also has times of ops
without a kernel of this project, such as BF16 products ("dot_general"). Estimates are
compared, so all are of one device (`timed_device`).
"""

import functools
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pallas_kernels.specs import Shape

PATH = Path(__file__).with_name("tuned.json")
# How far a measurement counts, in octaves, summed over the axes of a shape.
_NEAR = 2.0
# Devices by parts of their names. An H100 has the multiprocessors and tensor cores of
# an H200, and slower memory.
_ALIKE = {"NVIDIA H200": ("H100", "H200", "H800", "GH200")}


class Key(NamedTuple):
    """Name of a call in `tuned.json`; a variant is such as "dual fast bfloat16"."""

    op: str
    variant: str
    shape: Shape


@dataclass(frozen=True)
class Entry:
    """The fastest way to run one variant of an op at one shape.

    Attributes:
      shape: sizes of the op.
      variant: as in `Key`.
      backend: the winner.
      milliseconds: the best time of each backend.
      configs: fields of the best config of each backend that has configs.
    """

    shape: Shape
    variant: str
    backend: str
    milliseconds: Mapping[str, float]
    configs: Mapping[str, Mapping[str, Any]]

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))

    def is_near(self, key: Key) -> bool:
        """Return whether its shape is within two octaves of another."""
        return _distance(self.shape, key.shape) < _NEAR


class _Tuned(dict[str, dict[str, tuple[Entry, ...]]]):
    """Entries by device kind and op.

    They are compared by identity, so that they can be part of the key of a traced
    function.
    """

    __eq__ = object.__eq__
    __ne__ = object.__ne__
    __hash__ = object.__hash__  # type: ignore[assignment]


@functools.lru_cache(maxsize=1)
def load() -> _Tuned:
    """Return the entries of `tuned.json` by device kind and op."""
    content = json.loads(PATH.read_text(encoding="utf-8"))
    found = _Tuned()
    for device, ops in content.items():
        found[device] = {}
        for op, entries in ops.items():
            found[device][op] = tuple(Entry(**entry) for entry in entries)
    return found


def find(device: str, key: Key, backend: str) -> Entry | None:
    """Return the measurement of a backend on a device nearest to a shape, or None."""
    return _find(device, key, backend)[1]


def _find(device: str, key: Key, backend: str) -> tuple[str, Entry | None]:
    """Return the device of a measurement, and the measurement."""
    for name in (device, _alike(device)):
        entries = _entries(name, key, backend)
        if entries:
            nearest = min(entries, key=lambda entry: _distance(entry.shape, key.shape))
            return name, nearest
    return device, None


def _alike(device: str) -> str:
    """Return a timed device with the same multiprocessors, or the device itself."""
    for other, names in _ALIKE.items():
        if any(name in device for name in names):
            return other
    return device


def timed_device(device: str) -> str:
    """Return the device whose times are estimates for this one.

    It is the device itself if BF16 was timed on it, else one like it.
    """
    return device if "dot_general" in load().get(device, {}) else _alike(device)


def _entries(device: str, key: Key, backend: str) -> list[Entry]:
    entries = load().get(device, {}).get(key.op, ())
    return [
        entry
        for entry in entries
        if entry.variant == key.variant and backend in entry.milliseconds
    ]


def _apart(a: Shape, b: Shape) -> float:
    # A pass over a matrix takes as long as one over its transpose.
    if len(a) == 2:
        return _distance(tuple(sorted(a)), tuple(sorted(b)))
    return _distance(a, b)


def _distance(a: Shape, b: Shape) -> float:
    ratios = [max(1, x) / max(1, y) for x, y in zip(a, b, strict=True)]
    return sum(abs(math.log2(ratio)) for ratio in ratios)


def decline(
    device: str,
    key: Key | None,
    backend: str,
    able: Collection[str] | None = None,
) -> str | None:
    """Return the reason why a backend is not the first choice on a device, or None.

    There is no reason if it was measured to be fastest. Backends that are not among
    those `able` to run the call do not count; None counts all.
    """
    advice = f"was not timed on {device}; run python -m benchmarks.tune"
    if key is None:
        return f"this {advice}"
    timed, entry = _find(device, key, backend)
    if entry is None:
        return f"{key.op} ({key.variant}) {advice}"
    fastest = entry.backend
    milliseconds = entry.milliseconds
    if able is not None and fastest not in able:
        ran = [name for name in milliseconds if name in able]
        fastest = min(ran, key=milliseconds.__getitem__)
    if fastest == backend:
        return None
    times = [f"{name} {milliseconds[name]:.4g} ms" for name in sorted(milliseconds)]
    where = "" if timed == device else f" on {timed}"
    shape = "x".join(map(str, entry.shape))
    return f"{fastest} was fastest at {shape}{where} ({', '.join(times)})"


def is_timed(device: str) -> bool:
    """Return whether BF16 was timed on a device, so that estimates can be compared."""
    return "dot_general" in load().get(timed_device(device), {})


def estimate(device: str, key: Key, backend: str) -> float | None:
    """Return the milliseconds of a call on a device, or None if none is near.

    The rate, which is the product of the sizes over the time, is interpolated over the
    measurements within two octaves:

        log rate = sum_i log rate_i / d_i^2  /  sum_i 1 / d_i^2
        d_i      = sum over axes of |log2 of the ratio of sizes|

    The estimate is exact at a measured shape, and elsewhere between the slowest and the
    fastest of its neighbours. The order of two axes does not count.
    """
    if 0 in key.shape:
        return None
    total = 0.0
    weights = 0.0
    for entry in _entries(timed_device(device), key, backend):
        distance = _apart(entry.shape, key.shape)
        milliseconds = entry.milliseconds[backend]
        if distance == 0:
            return milliseconds
        if distance <= _NEAR:
            total += math.log(math.prod(entry.shape) / milliseconds) / distance**2
            weights += 1 / distance**2
    if not weights:
        return None
    return math.prod(key.shape) / math.exp(total / weights)
