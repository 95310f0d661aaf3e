"""Measured times: `tuned.json`, by device, op, variant and shape.

`python -m benchmarks.gemm --tune` times every backend and tile config on its device and
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

PATH = Path(__file__).with_name("tuned.json")
# How far a measurement counts, in octaves, summed over the axes of a shape.
_NEAR = 2.0
# Devices by parts of their names. An H100 has the multiprocessors and tensor cores of
# an H200, and slower memory.
_ALIKE = {"NVIDIA H200": ("H100", "H200", "H800", "GH200")}


class Key(NamedTuple):
    """Name of a call in `tuned.json`: its op, its variant such as "dual fast bfloat16",
    and its shape.
    """

    op: str
    variant: str
    shape: tuple[int, ...]


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

    shape: tuple[int, ...]
    variant: str
    backend: str
    milliseconds: Mapping[str, float]
    configs: Mapping[str, Mapping[str, Any]]

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))


class _Tuned(dict[str, dict[str, tuple[Entry, ...]]]):
    """Entries by device kind and op; compared by identity, so that it can be part of
    the key of a traced function.
    """

    __eq__ = object.__eq__
    __ne__ = object.__ne__
    __hash__ = object.__hash__  # type: ignore[assignment]


@functools.lru_cache(maxsize=1)
def load() -> _Tuned:
    """Return the entries of `tuned.json` by device kind and op."""
    content = json.loads(PATH.read_text(encoding="utf-8"))
    return _Tuned(
        {
            device: {
                op: tuple(Entry(**entry) for entry in entries)
                for op, entries in ops.items()
            }
            for device, ops in content.items()
        }
    )


def find(device: str, key: Key, backend: str) -> Entry | None:
    """Return the measurement of a backend on a device nearest to the shape of `key`, or
    None.
    """
    return _find(device, key, backend)[1]


def _find(device: str, key: Key, backend: str) -> tuple[str, Entry | None]:
    """Return the device of a measurement, and the measurement."""
    for name in (device, _alike(device)):
        if entries := _entries(name, key, backend):
            return name, min(
                entries, key=lambda entry: _distance(entry.shape, key.shape)
            )
    return device, None


def _alike(device: str) -> str:
    return next(
        (
            other
            for other, names in _ALIKE.items()
            if any(name in device for name in names)
        ),
        device,
    )


def timed_device(device: str) -> str:
    """Return the device whose times are estimates for this one: itself if BF16 was
    timed on it, else one like it.
    """
    return device if "dot_general" in load().get(device, {}) else _alike(device)


def _entries(device: str, key: Key, backend: str) -> list[Entry]:
    entries = load().get(device, {}).get(key.op, ())
    return [
        entry
        for entry in entries
        if entry.variant == key.variant and backend in entry.milliseconds
    ]


def is_near(entry: Entry, key: Key) -> bool:
    """Return whether the shape of a measurement is within two octaves of one."""
    return _distance(entry.shape, key.shape) < _NEAR


def _apart(a: tuple[int, ...], b: tuple[int, ...]) -> float:
    # A pass over a matrix takes as long as one over its transpose.
    return (
        _distance(tuple(sorted(a)), tuple(sorted(b)))
        if len(a) == 2
        else _distance(a, b)
    )


def _distance(a: tuple[int, ...], b: tuple[int, ...]) -> float:
    return sum(abs(math.log2(max(1, x) / max(1, y))) for x, y in zip(a, b, strict=True))


def decline(
    device: str, key: Key | None, backend: str, able: Collection[str] | None = None
) -> str | None:
    """Return the reason why a backend is not the first choice on a device, or None if
    it was measured to be fastest.

    Backends that are not among those `able` to run the call do not count; None counts
    all.
    """
    timed, entry = (device, None) if key is None else _find(device, key, backend)
    if key is None or entry is None:
        call = "this" if key is None else f"{key.op} ({key.variant})"
        return f"{call} was not timed on {device}; run python -m benchmarks.gemm --tune"
    fastest = entry.backend
    if able is not None and fastest not in able:
        fastest = min(
            (name for name in entry.milliseconds if name in able),
            key=entry.milliseconds.__getitem__,
        )
    if fastest == backend:
        return None
    times = ", ".join(
        f"{name} {value:.4g} ms" for name, value in sorted(entry.milliseconds.items())
    )
    where = "" if timed == device else f" on {timed}"
    return (
        f"{fastest} was fastest at {'x'.join(map(str, entry.shape))}{where} ({times})"
    )


def is_timed(device: str) -> bool:
    """Return whether BF16 products were timed on a device, so that other estimates have
    a comparison.
    """
    return "dot_general" in load().get(timed_device(device), {})


def estimate(device: str, key: Key, backend: str) -> float | None:
    """Return the milliseconds that a call takes on a device, or None if no shape near
    it was measured.

    The rate, which is the product of the sizes over the time, is interpolated over the
    measurements within two octaves:

        log rate = sum_i log rate_i / d_i^2  /  sum_i 1 / d_i^2,   d = sum over axes of |log2 of the sizes' ratio|

    The estimate is exact at a measured shape, and elsewhere between the slowest and the
    fastest of its neighbours. The order of two axes does not count.
    """
    near = [
        (_apart(entry.shape, key.shape), entry)
        for entry in _entries(timed_device(device), key, backend)
    ]
    near = [(distance, entry) for distance, entry in near if distance <= _NEAR]
    if not near or 0 in key.shape:
        return None
    nearest, entry = min(near, key=lambda pair: pair[0])
    if nearest == 0:
        return entry.milliseconds[backend]
    weights = [distance**-2 for distance, _ in near]
    rates = [
        math.log(math.prod(entry.shape) / entry.milliseconds[backend])
        for _, entry in near
    ]
    log_rate = sum(w * rate for w, rate in zip(weights, rates, strict=True)) / sum(
        weights
    )
    return math.prod(key.shape) / math.exp(log_rate)
