"""Memory rate of virtual casts beside a copy of the same array, and casts on the CPU beside eager PyTorch.

    python -m benchmarks.casts --json

Bytes are those that must be read and written once. A copy is `x + 1`, which XLA cannot leave out. Every cast is
compared with the packed round trip, bit for bit, before it is timed, and mxfp8e4 with ml_dtypes.

Where torch is installed, the CPU of the machine casts to mxfp8e4, too: by `formats.cast`, and by microxcaling's
operations in eager PyTorch (`eager_torch.py`), both on all cores and on the same values, with equal results.
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

from benchmarks import common, eager_torch, timing
from benchmarks.common import Result, markdown_table, times
from benchmarks.timing import Timing
from tcfp_jax import formats

NAME = "casts"
DATATYPES = ("mxfp8e4", "mxfp4e2", "nvfp4", "e4m3fn")
COPY = "copy"
EAGER = "mxfp8e4, eager PyTorch"


@dataclass(frozen=True)
class Config:
    """Settings of a run: the array, its dtype, how often to time, and the array on the CPU beside PyTorch."""

    shape: tuple[int, int] = (8192, 8192)
    dtype: str = "bfloat16"
    rounds: int = 5
    calls: int = 5
    host_shape: tuple[int, int] = (4096, 4096)
    host_calls: int = 1


SMOKE = Config(shape=(64, 256), rounds=2, calls=1, host_shape=(64, 256))


@dataclass(frozen=True)
class Row(Timing):
    """One cast; `over_copy` is the copy's time over its own, `over_eager` that of eager PyTorch on the same CPU."""

    name: str
    where: str
    shape: str
    dtype: str
    megabytes: float
    terabytes_per_second: float
    over_copy: float | None
    over_eager: float | None


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
    """Check, then time the copy and every cast in turn; then those on the CPU.

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
    taken = timing.time_interleaved(timed, rounds=config.rounds, calls=config.calls)
    rows = [make_row(name, jax.default_backend(), x, t, copy=taken[COPY]) for name, t in taken.items()]
    return rows + measure_host(config)


def measure_host(config: Config) -> list[Row]:
    """Check, then time mxfp8e4 on the CPU by `formats.cast` and by eager PyTorch; no rows without torch.

    Raises:
      ArithmeticError: the two differ; nothing is timed then.
    """
    if (reason := eager_torch.missing()) is not None:
        print(f"no comparison with eager PyTorch: {reason}")
        return []
    import torch

    made = formats.mxfp8e4
    number = made.number
    assert isinstance(number, formats.NumberSpec)
    x = jax.device_put(np.random.default_rng(0).standard_normal(config.host_shape, np.float32), jax.devices("cpu")[0])
    # bfloat16's values without -0: just below a power of two eager log2 is off by one, and it loses the sign of -0.
    narrow = x.astype(jnp.bfloat16) + jnp.zeros((), jnp.bfloat16)
    x = narrow.astype(jnp.float32)
    tensor = torch.from_numpy(np.array(x))
    eager = functools.partial(
        eager_torch.cast_mx, ebits=number.ebits, mbits=number.mbits, emax=number.emax, largest=number.max
    )
    function = jax.jit(functools.partial(formats.cast, datatype=made, roundmode="nearest"))
    check("mxfp8e4 on the CPU", function(x), eager(tensor).numpy())
    plain = jax.jit(functools.partial(formats.cast, datatype=made))
    timed: dict[str, tuple[Any, tuple[Any, ...]]] = {
        EAGER: (eager, (tensor,)), "mxfp8e4": (plain, (narrow,)), "mxfp8e4 of float32": (plain, (x,)),
        "mxfp8e4 of float32, ties away": (function, (x,)),
    }  # fmt: skip
    taken = timing.time_by_wall_clock(timed, rounds=config.rounds, calls=config.host_calls)
    where = f"cpu, {torch.get_num_threads()} threads in PyTorch {torch.__version__}"
    arrays = {name: narrow if name == "mxfp8e4" else x for name in timed}
    return [make_row(name, where, arrays[name], t, eager=taken[EAGER]) for name, t in taken.items()]


def make_row(
    name: str, where: str, x: jax.Array, t: Timing, *, copy: Timing | None = None, eager: Timing | None = None
) -> Row:
    """A row of an array that is read and written once."""
    moved = 2 * x.size * x.dtype.itemsize
    return Row(
        **dataclasses.asdict(t), name=name, where=where, shape="x".join(map(str, x.shape)), dtype=str(x.dtype),
        megabytes=moved / 1e6, terabytes_per_second=moved / (t.median_ms * 1e-3) / 1e12,
        over_copy=None if copy is None else copy.median_ms / t.median_ms,
        over_eager=None if eager is None else eager.median_ms / t.median_ms,
    )  # fmt: skip


def configure(options: argparse.Namespace) -> Config:
    """The settings of a command line."""
    return SMOKE if options.smoke else Config()


def show(rows: list[Row]) -> None:
    """Print the rows."""
    columns = ("name", "where", "shape", "dtype", "median_ms", "min_ms", "max_ms", "terabytes_per_second")
    common.print_rows(rows, *columns, "over_copy", "over_eager", "timer")


def table(result: Result) -> str:
    """A line a cast."""
    ratio = lambda value: "–" if value is None else f"{value:.2f}"
    lines = [
        [r["name"], r["where"], f"{times(r['shape'])} {r['dtype']}", f"{r['median_ms']:.3f} ms", ratio(r["over_copy"]),
         ratio(r["over_eager"])]
        for r in result.rows
    ]  # fmt: skip
    return markdown_table(["cast", "where", "of", "time", "speed over a copy", "speed over eager PyTorch"], lines)


main = functools.partial(common.main, NAME)

if __name__ == "__main__":
    common.command(NAME)
