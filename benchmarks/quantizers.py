"""Memory rate of the quantizers by backend: bytes that must be read and written once,
divided by the kernels' time.

    python -m benchmarks.quantizers --json

"apply" is given the amax, as with delayed
scaling, and makes one pass. "whole" finds the amax first, which reads the input once
more. Its rate counts that reading, except with scales of rows alone or of blocks, where
a program can hold what has one scale. Every result is compared with the reference bit
for bit before it is timed, after a copy of a matrix in bfloat16. An error is donated to
the new one, as in a training step.
"""

import argparse
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from benchmarks import gemm, products, timing
from benchmarks.harness import Benchmark
from benchmarks.records import Result
from benchmarks.tables import markdown_table, times
from pallas_kernels import counter, operands
from pallas_kernels.dispatch import Backend
from pallas_kernels.hopper import plan
from pallas_kernels.quantize.api import dual_quantize, quantize
from tcfp_jax.formats.nvfp4_arrays import Nvfp4Values, quantize_values
from tcfp_jax.formats.nvfp4_registers import KeyWords

NAME = "quantizers"
COPY = "copy of a matrix in bfloat16"
Amax = Literal["apply", "whole"]


@dataclass(frozen=True)
class Row(timing.Timing):
    """One quantizer at one size: `megabytes` that it must move, and its rate over a
    copy's, `over_copy`.
    """

    shape: str
    name: str
    amax: Amax
    backend: Backend
    megabytes: float
    terabytes_per_second: float
    over_copy: float


def _in_fp8(
    orientation: operands.Orientation, scaling: operands.Scaling = operands.Tensor()
) -> Callable[..., Any]:
    return functools.partial(
        quantize, dtype=jnp.float8_e4m3fn, scaling=scaling, orientation=orientation
    )


def _in_nvfp4(
    key: KeyWords | None, x: jax.Array, amax: None, backend: Backend
) -> Nvfp4Values:
    return quantize_values(x, -1, key, backend=backend)


_split = functools.partial(dual_quantize, orientation="both")
# name: (the call, the dtypes of its arguments)
QUANTIZERS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "x, both orientations": (_in_fp8("both"), (jnp.bfloat16,)),
    "w = hi + lo, both orientations": (_split, (jnp.float32,)),
    "w = hi + lo with error, both orientations": (
        lambda w, e, **how: _split(w, error=e, **how),
        (jnp.float32,) * 2,
    ),
    "w = hi + stochastic lo, both orientations": (
        lambda w, bits, **how: _split(w, bits=bits, **how),
        (jnp.float32, jnp.uint32),
    ),
    "x with a scale a row, rows alone": (
        _in_fp8("rows", operands.Row()),
        (jnp.bfloat16,),
    ),
    "x with a scale a row, both orientations": (
        _in_fp8("both", operands.Row()),
        (jnp.bfloat16,),
    ),
    "x with a float32 scale a row, both orientations": (
        _in_fp8("both", operands.Row("float32")),
        (jnp.bfloat16,),
    ),
    "x in blocks of 1 x 128, rows alone": (
        _in_fp8("rows", operands.Block(128, "vector")),
        (jnp.bfloat16,),
    ),
    "x in blocks of 1 x 128, both orientations": (
        _in_fp8("both", operands.Block(128, "vector")),
        (jnp.bfloat16,),
    ),
    "x in NVFP4": (functools.partial(_in_nvfp4, None), (jnp.bfloat16,)),
    "x in NVFP4, stochastic": (
        functools.partial(_in_nvfp4, counter.keys(1)),
        (jnp.bfloat16,),
    ),
}
# Scales of rows, blocks and numbers in NVFP4 cannot be given.
CASES: tuple[tuple[str, Amax], ...] = tuple(
    (name, amax)
    for name in QUANTIZERS
    for amax in get_args(Amax)
    if amax == "whole" or not re.search("a row|1 x|NVFP4", name)
)
# One of each kind: a scale a tensor and a row, an error that is donated, random bits.
SMOKE: tuple[tuple[str, Amax], ...] = (
    ("x, both orientations", "apply"),
    ("w = hi + lo with error, both orientations", "whole"),
    ("x with a float32 scale a row, both orientations", "whole"),
    ("x in NVFP4, stochastic", "whole"),
)
add_options = gemm.add_options


@dataclass(frozen=True)
class Config:
    """Sizes of the matrices, backends, and the quantizers with the ways to run them."""

    shapes: tuple[tuple[int, int], ...]
    backends: tuple[Backend, ...] = ("xla", "triton")
    cases: tuple[tuple[str, Amax], ...] = CASES
    rounds: int = 5
    calls: int = 5


def configure(options: argparse.Namespace) -> Config:
    """Return the sizes of the weights of `benchmarks.gemm`."""
    config = gemm.configure(options)
    shapes = tuple(dict.fromkeys((shape.k, shape.n) for shape in config.shapes))
    # A CPU interprets the kernels: a smoke run checks them, but their time means
    # nothing.
    compiled = jax.default_backend() == "gpu" or options.smoke
    backends: tuple[Backend, ...] = ("xla", "triton") if compiled else ("xla",)
    if jax.default_backend() == "gpu" and plan.reject(jnp.bfloat16) is None:
        backends += ("mosaic",)
    return Config(
        shapes, backends, SMOKE if options.smoke else CASES, config.rounds, config.calls
    )


def measure(config: Config) -> Iterator[Row]:
    """Compare and time every quantizer.

    Raises:
      ArithmeticError: a kernel differs from the reference, so nothing is timed.
    """
    for shape in config.shapes:
        (x,) = products.draw(shape, (jnp.bfloat16,))
        copied = timing.time_interleaved(
            {COPY: (jax.jit(_copy), (x,))}, rounds=config.rounds, calls=config.calls
        )
        copy = _row(copied[COPY], COPY, "apply", "xla", shape, 2 * x.nbytes)
        yield copy
        for name, amax in config.cases:
            arguments = products.draw(shape, QUANTIZERS[name][1])
            yield from _measure_one(
                name, amax, arguments, config, copy.terabytes_per_second
            )


def _copy(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(
        jax.lax.bitcast_convert_type(x, jnp.uint16) ^ jnp.uint16(1), x.dtype
    )


def _row(
    taken: timing.Timing,
    name: str,
    amax: Amax,
    backend: Backend,
    shape: tuple[int, ...],
    moved: int,
    copy_rate: float | None = None,
) -> Row:
    rate = moved / (taken.median_ms * 1e-3) / 1e12
    return Row(
        **dataclasses.asdict(taken),
        shape="x".join(map(str, shape)),
        name=name,
        amax=amax,
        backend=backend,
        megabytes=moved / 1e6,
        terabytes_per_second=rate,
        over_copy=rate / (copy_rate or rate),
    )


def _measure_one(
    name: str,
    amax: Amax,
    arguments: tuple[jax.Array, ...],
    config: Config,
    copy_rate: float,
) -> Iterator[Row]:
    given = jnp.float32(4.0) if amax == "apply" else None
    call = functools.partial(QUANTIZERS[name][0], amax=given)
    functions = {
        b: jax.jit(functools.partial(call, backend=b)) for b in config.backends
    }
    expected = functions["xla"](*arguments)
    for backend in config.backends:
        check(f"{name}, {backend}", functions[backend](*arguments), expected)
    timed: dict[Any, Any] = {b: (f, arguments) for b, f in functions.items()}
    if "error" in name:
        timed = {b: products.donating(f, *arguments) for b, f in functions.items()}
    taken = timing.time_interleaved(timed, rounds=config.rounds, calls=config.calls)
    moved = sum(leaf.nbytes for leaf in jax.tree.leaves((arguments, expected)))
    if amax == "whole" and not re.search("rows alone|1 x", name):
        # The amax does not read the bits of a stochastic lo.
        moved += sum(a.nbytes for a in arguments if a.dtype != jnp.uint32)
    for backend in config.backends:
        yield _row(
            taken[backend], name, amax, backend, arguments[0].shape, moved, copy_rate
        )


def check(name: str, got: Any, expected: Any) -> None:
    """Raise `ArithmeticError` unless both have the same bits."""
    if not products.same_bits(got, expected):
        raise ArithmeticError(
            f"{name}: differs from the reference; it is wrong, so it is not timed"
        )


def table(result: Result) -> str:
    """Return the page's table: one line per quantizer and backend, one column per
    size.
    """
    shapes = result.distinct("shape")
    rows = result.by("name", "backend", "amax", "shape")
    rate: Any = lambda *key: (
        f"{rows[key]['terabytes_per_second']:.2f}" if key in rows else "–"
    )
    lines = [
        [f"{name}, {gemm.BACKEND_NAMES[backend]}"]
        + [
            " · ".join(rate(name, backend, amax, shape) for amax in ("apply", "whole"))
            for shape in shapes
        ]
        for name, backend in result.distinct("name", "backend")
        if name in (COPY, *QUANTIZERS)
    ]
    return (
        f"{markdown_table(['TB/s', *map(times, shapes)], lines)}\n\nA cell holds two"
        " rates: with the amax given, and with finding it, whose reading of the input"
        " counts, too."
    )


BENCHMARK = Benchmark(
    NAME,
    __doc__,
    configure,
    measure,
    table,
    options=add_options,
)

if __name__ == "__main__":
    BENCHMARK.command()
