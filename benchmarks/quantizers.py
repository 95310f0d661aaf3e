"""Memory rate of the quantizers: bytes that must be read and written once, over the kernels' time, by every backend.

    python -m benchmarks.quantizers --json

`python -m benchmarks.gemm` runs it, too. "apply" has the scale's amax given, as under delayed scaling: one pass, whose
rate is the kernel's. "whole" finds the amax first, which reads the input once more; its rate counts that reading. Every
result is compared with the reference bit for bit before it is timed. An error is donated to the new one, as a training
step's optimizer state is.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from benchmarks import common, gemm, products, timing
from benchmarks.common import Result, markdown_table, times
from pallas_kernels.dispatch import Backend
from pallas_kernels.dual_quantize.api import dual_quantize
from pallas_kernels.quantize.api import quantize

NAME = "quantizers"
Amax = Literal["apply", "whole"]


@dataclass(frozen=True)
class Config:
    """Settings of a run: sizes of the matrices."""

    shapes: tuple[tuple[int, int], ...]
    backends: tuple[Backend, ...] = ("xla", "triton")
    rounds: int = 5
    calls: int = 5


@dataclass(frozen=True)
class Row(timing.Timing):
    """One quantizer at one size; `megabytes` is what it must move."""

    shape: str
    name: str
    amax: Amax
    backend: Backend
    megabytes: float
    terabytes_per_second: float


# name: (the call, the dtypes of its arguments)
QUANTIZERS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "x, both orientations": (
        lambda x, *, amax, backend: quantize(x, jnp.float8_e4m3fn, amax=amax, orientation="both", backend=backend),
        (jnp.bfloat16,),
    ),
    "w = hi + lo, both orientations": (
        lambda w, *, amax, backend: dual_quantize(w, amax=amax, orientation="both", backend=backend),
        (jnp.float32,),
    ),
    "w = hi + lo with error, both orientations": (
        lambda w, e, *, amax, backend: dual_quantize(w, error=e, amax=amax, orientation="both", backend=backend),
        (jnp.float32, jnp.float32),
    ),
    "w = hi + stochastic lo, both orientations": (
        lambda w, bits, *, amax, backend: dual_quantize(w, bits=bits, amax=amax, orientation="both", backend=backend),
        (jnp.float32, jnp.uint32),
    ),
}
add_options = gemm.add_shape_options


def configure(options: argparse.Namespace) -> Config:
    """The weights' sizes of `benchmarks.gemm`."""
    config = gemm.configure(options)
    shapes = tuple(dict.fromkeys((shape.k, shape.n) for shape in config.shapes))
    # On a CPU the kernels are interpreted: worth a look in a smoke run, not worth a time.
    compiled = jax.default_backend() == "gpu" or options.smoke
    return Config(shapes, ("xla", "triton") if compiled else ("xla",), config.rounds, config.calls)


def measure(config: Config) -> Iterator[Row]:
    """Compare and time every quantizer.

    Raises:
      ArithmeticError: a kernel differs from the reference; nothing is timed then.
    """
    for shape in config.shapes:
        for name, (_, dtypes) in QUANTIZERS.items():
            arguments = products.draw(shape, dtypes)
            for amax in ("apply", "whole"):
                yield from _measure_one(name, amax, arguments, config)


def _measure_one(name: str, amax: Any, arguments: tuple[jax.Array, ...], config: Config) -> Iterator[Row]:
    given = jnp.float32(4.0) if amax == "apply" else None
    call = functools.partial(QUANTIZERS[name][0], amax=given)
    functions = {b: jax.jit(functools.partial(call, backend=b)) for b in config.backends}
    expected = functions["xla"](*arguments)
    for backend in config.backends:
        check(f"{name}, {backend}", functions[backend](*arguments), expected)
    timed: dict[Any, Any] = {b: (f, arguments) for b, f in functions.items()}
    if "error" in name:
        timed = {b: products.donating(f, *arguments) for b, f in functions.items()}
    taken = timing.time_interleaved(timed, rounds=config.rounds, calls=config.calls)
    moved = sum(leaf.nbytes for leaf in jax.tree.leaves((arguments, expected)))
    if amax == "whole":
        # The bits of a stochastic lo have no part in the amax.
        moved += sum(a.nbytes for a in arguments if a.dtype != jnp.uint32)
    for backend in config.backends:
        t = taken[backend]
        yield Row(
            **dataclasses.asdict(t), shape="x".join(map(str, arguments[0].shape)), name=name, amax=amax,
            backend=backend, megabytes=moved / 1e6, terabytes_per_second=moved / (t.median_ms * 1e-3) / 1e12,
        )  # fmt: skip


def check(name: str, got: Any, expected: Any) -> None:
    """Raise an ArithmeticError unless both are the same bits."""
    if not products.same_bits(got, expected):
        raise ArithmeticError(f"{name}: differs from the reference; it is wrong, so it is not timed")


def show(rows: list[Row]) -> None:
    """Print the rows."""
    common.print_rows(rows, "name", "shape", "amax", "backend", "median_ms", "terabytes_per_second", "timer")


def table(result: Result) -> str:
    """A line a quantizer and backend, a column a size."""
    shapes = result.distinct("shape")
    rates = {key: row["terabytes_per_second"] for key, row in result.by("name", "backend", "amax", "shape").items()}
    lines = [
        [f"{name}, {gemm.BACKEND_NAMES[backend]}"]
        + [" · ".join(f"{rates[name, backend, amax, shape]:.2f}" for amax in ("apply", "whole")) for shape in shapes]
        for name, backend in result.distinct("name", "backend")
    ]
    return (
        f"{markdown_table(['TB/s', *map(times, shapes)], lines)}\n\n"
        "A cell holds two rates: with the amax given, and with finding it, whose reading of the input counts, too."
    )


main = functools.partial(common.main, NAME)

if __name__ == "__main__":
    common.command(NAME)
