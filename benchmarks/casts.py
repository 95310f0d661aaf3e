"""Memory rate of virtual casts beside a copy of the same array, measured in the same run.

    python -m benchmarks.casts --json

Bytes are those that must be read and written once. A copy is `x + 1`, which XLA cannot leave out. Every cast is
compared with the packed round trip, bit for bit, before it is timed, and mxfp8e4 with ml_dtypes.
"""

import argparse
import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from benchmarks.common import (
    Timer,
    announce,
    make_header,
    make_parser,
    print_header,
    print_table,
    result_path,
    time_interleaved,
    write_result,
)
from tcfp_jax import formats

NAME = "casts"
DATATYPES = ("mxfp8e4", "mxfp4e2", "nvfp4", "e4m3fn")
COPY = "copy"


@dataclass(frozen=True)
class Config:
    """Settings of a run: the array, its dtype, and how often to time."""

    shape: tuple[int, int] = (8192, 8192)
    dtype: str = "bfloat16"
    rounds: int = 5
    calls: int = 5


SMOKE = Config(shape=(64, 256), rounds=2, calls=1)


@dataclass(frozen=True)
class Row:
    """One cast; `over_copy` is the copy's time over its own."""

    name: str
    shape: str
    dtype: str
    median_ms: float
    min_ms: float
    max_ms: float
    samples: int
    timer: Timer
    megabytes: float
    terabytes_per_second: float
    over_copy: float


def check(name: str, got: jax.Array, expected: jax.Array) -> None:
    """Equal bit for bit.

    Raises:
      ArithmeticError: they differ.
    """
    if not np.array_equal(
        np.asarray(got, np.float32).view(np.uint32), np.asarray(expected, np.float32).view(np.uint32)
    ):
        raise ArithmeticError(
            f"{name}: the cast differs from what it is checked against; it is wrong, so it is not timed"
        )


def reference_mxfp8e4(x: np.ndarray) -> np.ndarray:
    """OCP's rule in NumPy with ml_dtypes' cast, for arrays of normal values.

    >>> reference_mxfp8e4(np.array([[500.0] + [1.0] * 31], np.float32))[0, 0]
    np.float32(448.0)
    """
    blocks = x.astype(np.float32).reshape(-1, 32)
    scale = np.ldexp(np.float32(1), np.frexp(np.abs(blocks).max(-1, keepdims=True))[1] - 1 - 8)
    values = np.clip(blocks / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return (values * scale).reshape(x.shape)


def measure(config: Config) -> list[Row]:
    """Check, then time the copy and every cast in turn.

    Raises:
      ArithmeticError: a cast is wrong; nothing is timed then.
    """
    x = jax.random.normal(jax.random.key(0), config.shape, jnp.float32).astype(config.dtype)
    timed: dict[str, tuple[Any, tuple[Any, ...]]] = {COPY: (jax.jit(lambda x: x + jnp.ones((), x.dtype)), (x,))}
    sample = x[:64]
    for name in DATATYPES:
        made = getattr(formats, name)
        function = jax.jit(functools.partial(formats.cast, datatype=made))
        check(name, function(sample), formats.unpack(formats.pack(sample, made)))
        if name == "mxfp8e4":
            check(name, function(sample), jnp.asarray(reference_mxfp8e4(np.asarray(sample))))
        timed[name] = (function, (x,))
    times = time_interleaved(timed, rounds=config.rounds, calls=config.calls)
    moved = 2 * math.prod(config.shape) * x.dtype.itemsize
    rows = []
    for name, t in times.items():
        rate = moved / (t.median_ms * 1e-3) / 1e12
        ratio = times[COPY].median_ms / t.median_ms
        shape = "x".join(map(str, config.shape))
        rows.append(Row(name, shape, config.dtype, **dataclasses.asdict(t), megabytes=moved / 1e6,
                        terabytes_per_second=rate, over_copy=ratio))  # fmt: skip
    return rows


def main(arguments: list[str] | None = None) -> list[Row]:
    """Run the command; returns its rows."""
    parser: argparse.ArgumentParser = make_parser(NAME, __doc__)
    options = parser.parse_args(arguments)
    config, header = SMOKE if options.smoke else Config(), make_header()
    print_header(NAME, header)
    rows = measure(config)
    print_table(
        ["cast", "shape", "dtype", "median ms", "min", "max", "TB/s", "copy's time / its own"],
        [(r.name, r.shape, r.dtype, f"{r.median_ms:.4f}", f"{r.min_ms:.4f}", f"{r.max_ms:.4f}",
          f"{r.terabytes_per_second:.4f}", f"{r.over_copy:.3f}") for r in rows],
    )  # fmt: skip
    print(f"timer: {rows[0].timer}")
    path = result_path(NAME, options)
    write_result(path, NAME, header, config, rows)
    announce(path)
    return rows


if __name__ == "__main__":
    main()
