"""Memory rate of quantizers by backend, and of the casts of the format library.

    python -m benchmarks.quantizers --json

A rate is the bytes that must be read and written once, divided by the kernels' time.
"apply" is given the amax, as with delayed scaling, and makes one pass. "whole" finds
the amax first, which reads the input once more. Its rate counts that reading, except
with scales of rows alone or of blocks, where a program can hold what has one scale.
Every result is compared with the reference bit for bit before it is timed, after a copy
of a matrix in bfloat16. An error is donated to the new one, as in a training step.

A cast (`formats.cast`) has XLA alone. It must equal the packed round trip bit for bit,
and mxfp8e4 must equal ml_dtypes' cast.
"""

import argparse
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import Array

from benchmarks import gemm, products, timing
from benchmarks.harness import Benchmark
from benchmarks.records import Result, markdown_table, shown, times
from pallas_kernels import counter, operands
from pallas_kernels.dispatch import Backend
from pallas_kernels.hopper import plan
from pallas_kernels.quantize.api import dual_quantize, quantize
from tcfp_jax import formats
from tcfp_jax.formats.nvfp4_arrays import Nvfp4Values, quantize_values
from tcfp_jax.formats.nvfp4_registers import KeyWords

COPY = "copy of a matrix in bfloat16"
CHECKED = 64  # rows of a cast
Amax = Literal["apply", "whole"]


@dataclass(frozen=True)
class Row(timing.Timing):
    """One quantizer or cast at one size.

    `megabytes` are those that it must move, and `over_copy` is its rate divided by a
    copy's.
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
    return partial(
        quantize, dtype=jnp.float8_e4m3fn, scaling=scaling, orientation=orientation
    )


def _split_by_bits(w: Array, bits: Array, **how: Any) -> Any:
    return dual_quantize(w, bits=bits, orientation="both", **how)


def _in_nvfp4(
    key: KeyWords | None, x: Array, amax: None, backend: Backend
) -> Nvfp4Values:
    return quantize_values(x, -1, key, backend=backend)


_BLOCK = operands.Block(128, "vector")
_SPLIT = partial(products.split, orientation="both")
_OF_X = (jnp.bfloat16,)
_OF_W = (jnp.float32,)
# name: (the call, the dtypes of its arguments)
QUANTIZERS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "x, both orientations": (_in_fp8("both"), _OF_X),
    "w = hi + lo, both orientations": (_SPLIT, _OF_W),
    "w = hi + lo with error, both orientations": (_SPLIT, 2 * _OF_W),
    "w = hi + stochastic lo, both orientations": (
        _split_by_bits,
        (jnp.float32, jnp.uint32),
    ),
    "x with a scale a row, rows alone": (_in_fp8("rows", operands.Row()), _OF_X),
    "x with a scale a row, both orientations": (
        _in_fp8("both", operands.Row()),
        _OF_X,
    ),
    "x with a float32 scale a row, both orientations": (
        _in_fp8("both", operands.Row("float32")),
        _OF_X,
    ),
    "x in blocks of 1 x 128, rows alone": (_in_fp8("rows", _BLOCK), _OF_X),
    "x in blocks of 1 x 128, both orientations": (_in_fp8("both", _BLOCK), _OF_X),
    "x in NVFP4": (partial(_in_nvfp4, None), _OF_X),
    "x in NVFP4, stochastic": (partial(_in_nvfp4, counter.keys(1)), _OF_X),
}
CASTS = {
    f"cast to {name}": getattr(formats, name)
    for name in ("mxfp8e4", "mxfp4e2", "nvfp4", "e4m3fn")
}
# Scales of rows, blocks and numbers in NVFP4 cannot be given.
_WITHOUT_AMAX = re.compile("a row|1 x|NVFP4")
CASES: tuple[tuple[str, Amax], ...] = tuple(
    (name, amax)
    for name in QUANTIZERS
    for amax in get_args(Amax)
    if amax == "whole" or not _WITHOUT_AMAX.search(name)
)
# One of each kind: a scale a tensor and a row, an error that is donated, random bits.
SMOKE: tuple[tuple[str, Amax], ...] = (
    ("x, both orientations", "apply"),
    ("w = hi + lo with error, both orientations", "whole"),
    ("x with a float32 scale a row, both orientations", "whole"),
    ("x in NVFP4, stochastic", "whole"),
)


@dataclass(frozen=True)
class Config(timing.Repetitions):
    """Sizes of the matrices, backends, and the quantizers with the ways to run them."""

    shapes: tuple[tuple[int, int], ...]
    backends: tuple[Backend, ...]
    cases: tuple[tuple[str, Amax], ...] = CASES


def configure(options: argparse.Namespace) -> Config:
    """Return the sizes of the weights of `benchmarks.gemm`."""
    on_gpu = jax.default_backend() == "gpu"
    shapes = dict.fromkeys((shape.k, shape.n) for shape in gemm.shapes_here(options))
    backends: tuple[Backend, ...] = ("xla",)
    # A CPU interprets the kernels: a smoke run checks them, but their time means
    # nothing.
    if on_gpu or options.smoke:
        backends += ("triton",)
    if on_gpu and plan.reject(jnp.bfloat16) is None:
        backends += ("mosaic",)
    if options.smoke:
        return Config(tuple(shapes), backends, SMOKE, rounds=2, calls=2)
    return Config(tuple(shapes), backends)


def measure(config: Config) -> Iterator[Row]:
    """Compare and time every quantizer and every cast.

    Raises:
      ArithmeticError: a result differs from the reference, so nothing is timed.
    """
    for shape in config.shapes:
        (x,) = products.draw(shape, _OF_X)
        copied = config.interleaved({COPY: (jax.jit(_copy), (x,))})
        moved = 2 * x.nbytes
        rate = moved / copied[COPY].median_ms
        row = partial(_row, "x".join(map(str, shape)), rate)
        yield row(copied[COPY], COPY, "apply", "xla", moved)
        for name, amax in config.cases:
            arguments = products.draw(shape, QUANTIZERS[name][1])
            yield from _quantized(name, amax, arguments, config, row)
        casts: Any = {name: (_checked_cast(name, x), (x,)) for name in CASTS}
        for name, taken in config.interleaved(casts).items():
            yield row(taken, name, "whole", "xla", moved)


def _copy(x: Array) -> Array:
    """Change one bit of each value, because XLA removes a plain copy."""
    return (x.view(jnp.uint16) ^ jnp.uint16(1)).view(x.dtype)


def _row(
    shape: str,
    copy_rate: float,
    taken: timing.Timing,
    name: str,
    amax: Amax,
    backend: Backend,
    moved: int,
) -> Row:
    rate = moved / taken.median_ms
    return Row(
        **vars(taken),
        shape=shape,
        name=name,
        amax=amax,
        backend=backend,
        megabytes=moved / 1e6,
        terabytes_per_second=rate / 1e9,
        over_copy=rate / copy_rate,
    )


def _quantized(
    name: str,
    amax: Amax,
    arguments: tuple[Array, ...],
    config: Config,
    row: Callable[..., Row],
) -> Iterator[Row]:
    given = jnp.float32(4.0) if amax == "apply" else None
    call = partial(QUANTIZERS[name][0], amax=given)
    timed: dict[Any, Any] = {}
    expected = None
    for backend in config.backends:
        function = jax.jit(partial(call, backend=backend))
        got = function(*arguments)
        expected = got if expected is None else expected
        check(f"{name}, {backend}", got, expected)
        donates = "error" in name
        timed[backend] = (
            products.donating(function, *arguments)
            if donates
            else (function, arguments)
        )
    moved = sum(leaf.nbytes for leaf in jax.tree.leaves((arguments, expected)))
    if amax == "whole" and not re.search("rows alone|1 x", name):
        # The amax does not read the bits of a stochastic lo.
        moved += sum(a.nbytes for a in arguments if a.dtype != jnp.uint32)
    taken = config.interleaved(timed)
    for backend in config.backends:
        yield row(taken[backend], name, amax, backend, moved)


def check(name: str, got: Any, expected: Any) -> None:
    """Raise `ArithmeticError` unless both have the same bits."""
    if not products.same_bits(got, expected):
        raise ArithmeticError(
            f"{name}: differs from the reference; it is wrong, so it is not timed"
        )


def _checked_cast(name: str, x: Array) -> Callable[..., Any]:
    """Return a cast that gives the right bits for some rows of x."""
    datatype = CASTS[name]
    cast = jax.jit(partial(formats.cast, datatype=datatype))
    some = x[:CHECKED]
    got = cast(some).astype(jnp.float32)
    stored = formats.unpack(formats.pack(some, datatype))
    check(name, got, stored.astype(jnp.float32))
    if name == "cast to mxfp8e4":
        check(name, got, jnp.asarray(reference_mxfp8e4(np.asarray(some))))
    return cast


def reference_mxfp8e4(x: np.ndarray) -> np.ndarray:
    """OCP's rule in NumPy with ml_dtypes' cast, for arrays of normal values.

    >>> reference_mxfp8e4(np.array([[500.0] + [1.0] * 31], np.float32))[0, 0]
    np.float32(448.0)
    """
    blocks = x.astype(np.float32).reshape(-1, 32)
    exponents = np.frexp(np.abs(blocks).max(-1, keepdims=True))[1]
    scale = np.ldexp(np.float32(1), exponents - 1 - 8)
    clipped = np.clip(blocks / scale, -448, 448)
    values = clipped.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return (values * scale).reshape(x.shape)


def table(result: Result) -> str:
    """Return the page's table: a line per quantizer and backend, a column per size."""
    shapes = result.distinct("shape")
    rows = result.by("name", "backend", "amax", "shape")
    lines = []
    for name, backend in result.distinct("name", "backend"):
        line = [f"{name}, `{backend}`"]
        for shape in shapes:
            rates = [
                shown(
                    rows.get((name, backend, amax, shape)), "{terabytes_per_second:.2f}"
                )
                for amax in get_args(Amax)
            ]
            line.append(" · ".join(rates))
        lines.append(line)
    return (
        f"{markdown_table(['TB/s', *map(times, shapes)], lines)}\n\nA cell holds two"
        " rates: with the amax given, and with finding it, whose reading of the input"
        " counts, too. A cast reads and writes its array once."
    )


BENCHMARK = Benchmark("quantizers", __doc__, configure, measure, table)

if __name__ == "__main__":
    BENCHMARK.command()
