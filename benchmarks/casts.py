"""Memory rate of `formats.cast` next to a copy of the same array, which is as fast as a
cast can be.

    python -m benchmarks.casts --json

The copy is `x + 1`, because XLA removes a plain copy. Before a cast is timed, it must
equal the packed round trip bit for bit, and mxfp8e4 must equal ml_dtypes' cast.
"""

import argparse
import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from benchmarks import timing
from benchmarks.harness import Benchmark
from benchmarks.records import Result
from benchmarks.tables import markdown_table, times
from benchmarks.timing import Timing
from tcfp_jax import formats

NAME = "casts"
DATATYPES = ("mxfp8e4", "mxfp4e2", "nvfp4", "e4m3fn")
COPY = "copy"


@dataclass(frozen=True)
class Config:
    """Array, dtype, and repetitions of a run."""

    shape: tuple[int, int] = (8192, 8192)
    dtype: str = "bfloat16"
    rounds: int = 5
    calls: int = 5


SMOKE = Config(shape=(64, 256), rounds=2, calls=1)


@dataclass(frozen=True)
class Row(Timing):
    """One cast; `over_copy` is the copy's time divided by the cast's."""

    name: str
    shape: str
    dtype: str
    megabytes: float
    terabytes_per_second: float
    over_copy: float


def check(name: str, got: jax.Array, expected: jax.Array) -> None:
    """Equal bit for bit.

    Raises:
      ArithmeticError: they differ.
    """
    if not np.array_equal(
        np.asarray(got, np.float32).view(np.uint32),
        np.asarray(expected, np.float32).view(np.uint32),
    ):
        raise ArithmeticError(
            f"{name}: the cast differs from what it is checked against; it is wrong, so"
            " it is not timed"
        )


def reference_mxfp8e4(x: np.ndarray) -> np.ndarray:
    """OCP's rule in NumPy with ml_dtypes' cast, for arrays of normal values.

    >>> reference_mxfp8e4(np.array([[500.0] + [1.0] * 31], np.float32))[0, 0]
    np.float32(448.0)
    """
    blocks = x.astype(np.float32).reshape(-1, 32)
    scale = np.ldexp(
        np.float32(1), np.frexp(np.abs(blocks).max(-1, keepdims=True))[1] - 1 - 8
    )
    values = (
        np.clip(blocks / scale, -448, 448)
        .astype(ml_dtypes.float8_e4m3fn)
        .astype(np.float32)
    )
    return (values * scale).reshape(x.shape)


def measure(config: Config) -> list[Row]:
    """Check every cast, then time the copy and the casts in turn.

    Raises:
      ArithmeticError: a cast is wrong; nothing is timed then.
    """
    x = jax.random.normal(jax.random.key(0), config.shape, jnp.float32).astype(
        config.dtype
    )
    timed: dict[str, tuple[Any, tuple[Any, ...]]] = {
        COPY: (jax.jit(lambda x: x + jnp.ones((), x.dtype)), (x,))
    }
    sample = x[:64]
    for name in DATATYPES:
        made = getattr(formats, name)
        function = jax.jit(functools.partial(formats.cast, datatype=made))
        check(name, function(sample), formats.unpack(formats.pack(sample, made)))
        if name == "mxfp8e4":
            check(
                name,
                function(sample),
                jnp.asarray(reference_mxfp8e4(np.asarray(sample))),
            )
        timed[name] = (function, (x,))
    taken = timing.time_interleaved(timed, rounds=config.rounds, calls=config.calls)
    return [make_row(name, x, t, copy=taken[COPY]) for name, t in taken.items()]


def make_row(name: str, x: jax.Array, t: Timing, copy: Timing) -> Row:
    """Return the row of a cast, which reads and writes its array once."""
    moved = 2 * x.size * x.dtype.itemsize
    return Row(
        **dataclasses.asdict(t),
        name=name,
        shape="x".join(map(str, x.shape)),
        dtype=str(x.dtype),
        megabytes=moved / 1e6,
        terabytes_per_second=moved / (t.median_ms * 1e-3) / 1e12,
        over_copy=copy.median_ms / t.median_ms,
    )


def configure(options: argparse.Namespace) -> Config:
    """The settings of a command line."""
    return SMOKE if options.smoke else Config()


def table(result: Result) -> str:
    """Return the page's table, one line per cast."""
    lines = [
        [
            row["name"],
            f"{times(row['shape'])} {row['dtype']}",
            f"{row['median_ms']:.3f} ms",
            f"{row['over_copy']:.2f}",
        ]
        for row in result.rows
        if row["over_copy"] is not None
    ]
    return markdown_table(["cast", "of", "time", "speed over a copy"], lines)


BENCHMARK = Benchmark(
    NAME,
    __doc__,
    configure,
    measure,
    table,
)

if __name__ == "__main__":
    BENCHMARK.command()
