"""Memory rate of the quantizers: bytes that must be read and written once, over the kernels' time, by every backend.

Run by `python -m benchmarks.gemm`. "apply" has the scale's amax given, as under delayed scaling: one pass, whose rate
is the kernel's. "whole" finds the amax first, which reads the input once more; its rate counts that reading. Every
result is compared with the reference bit for bit before it is timed. An error is donated to the new one, as a training
step's optimizer state is.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import (
    Timer,
    announce,
    make_header,
    print_table,
    result_path,
    threaded,
    time_interleaved,
    write_result,
)
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
class Row:
    """One quantizer at one size; `megabytes` is what it must move."""

    shape: str
    name: str
    amax: Amax
    backend: Backend
    median_ms: float
    min_ms: float
    max_ms: float
    samples: int
    timer: Timer
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


def keep_error(split: Callable[..., Any]) -> Callable[..., tuple[jax.Array, Any]]:
    """`split(w, error)` as a step whose state is the error."""

    def step(error: jax.Array, w: jax.Array) -> tuple[jax.Array, Any]:
        parts = split(w, error)
        return parts.error, parts._replace(error=None)

    return step


def measure(config: Config) -> list[Row]:
    """Compare and time every quantizer.

    Raises:
      ArithmeticError: a kernel differs from the reference; nothing is timed then.
    """
    rows = []
    for shape in config.shapes:
        for name, (call, dtypes) in QUANTIZERS.items():
            arguments = _draw(shape, dtypes)
            amaxes: dict[Amax, Any] = {"apply": jnp.float32(4.0), "whole": None}
            for kind, amax in amaxes.items():
                functions = {b: jax.jit(functools.partial(call, amax=amax, backend=b)) for b in config.backends}
                expected = functions["xla"](*arguments)
                for backend in config.backends:
                    _check(f"{name}, {backend}", functions[backend](*arguments), expected)
                timed: dict[str, tuple[Any, tuple[Any, ...]]] = {b: (f, arguments) for b, f in functions.items()}
                if "error" in name:
                    w, error = arguments
                    timed = {b: (threaded(keep_error(f), error, w), ()) for b, f in functions.items()}
                times = time_interleaved(timed, rounds=config.rounds, calls=config.calls)
                moved = sum(leaf.nbytes for leaf in jax.tree.leaves((arguments, expected)))
                if kind == "whole":
                    # The bits of a stochastic lo have no part in the amax.
                    moved += sum(a.nbytes for a in arguments if a.dtype != jnp.uint32)
                for backend in config.backends:
                    t = times[backend]
                    rate = moved / (t.median_ms * 1e-3) / 1e12
                    size = f"{shape[0]}x{shape[1]}"
                    rows.append(Row(size, name, kind, backend, **dataclasses.asdict(t), megabytes=moved / 1e6,
                                    terabytes_per_second=rate))  # fmt: skip
    return rows


def _draw(shape: tuple[int, int], dtypes: tuple[Any, ...]) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(0), len(dtypes))
    draws = []
    for i, (key, dtype) in enumerate(zip(keys, dtypes, strict=True)):
        if dtype == jnp.uint32:
            draws.append(jax.random.bits(key, shape))
        else:
            draws.append((jax.random.normal(key, shape) * (1e-3 if i else 1.0)).astype(dtype))
    return tuple(draws)


def same_bits(got: Any, expected: Any) -> bool:
    """Whether two trees of arrays are equal bit for bit, compared on the device: fetching them would take longer."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        as_bits = jnp.dtype(f"uint{8 * a.dtype.itemsize}")
        bits_a, bits_b = (jax.lax.bitcast_convert_type(v, as_bits) for v in (a, b))
        if not np.asarray(jnp.array_equal(bits_a, bits_b)):
            return False
    return True


def _check(name: str, got: Any, expected: Any) -> None:
    if not same_bits(got, expected):
        raise ArithmeticError(f"{name}: differs from the reference; it is wrong, so it is not timed")


def report(options: argparse.Namespace, gemm_config: Any) -> list[Row]:
    """Measure at the weights' sizes of a run of `benchmarks.gemm`, print, and write beside its results."""
    shapes = tuple(dict.fromkeys((shape.k, shape.n) for shape in gemm_config.shapes))
    # On a CPU the kernels are interpreted: worth a look in a smoke run, not worth a time.
    compiled = jax.default_backend() == "gpu" or options.smoke
    backends: tuple[Backend, ...] = ("xla", "triton") if compiled else ("xla",)
    config = Config(shapes, backends, gemm_config.rounds, gemm_config.calls)
    rows = measure(config)
    print_table(
        ["quantizer", "k x n", "amax", "backend", "median ms", "TB/s"],
        [(r.name, r.shape, r.amax, r.backend, f"{r.median_ms:.4f}", f"{r.terabytes_per_second:.3f}") for r in rows],
    )
    path = result_path(NAME, options)
    write_result(path, NAME, make_header(), config, rows)
    announce(path)
    return rows
