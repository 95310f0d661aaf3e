"""Products with FP4 weights next to BF16's, with cold weights.

    python -m benchmarks.fp4 --json
    python -m benchmarks.fp4 --json --cases activations

They have few rows as in decoding, many rows, or are input gradients. A call multiplies
copies of x by copies of the weight. The weights together take more than `COLD_BYTES`,
several times the L2 cache of an H200, so that every product reads its weight from
memory; the BF16 baseline does the same. Times are per product. "W4A16" multiplies codes
times scales by BF16 activations, exactly. "W4A8" multiplies by E4M3 activations with a
scale for each row. With the rule "fold_exact" it runs on FP8 tensor cores, by XLA,
which unpacks the weight, or by the kernel that decodes it in registers. "W4A4"
multiplies by NVFP4 activations, which are exact in BF16. X is quantized within the
time, once for each product. Every product is checked against the float64 product of
dequantized weights before it is timed.
"""

import argparse
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks import timing
from benchmarks.harness import Benchmark
from benchmarks.products import snr_db
from benchmarks.records import Result, cells
from benchmarks.variants import BASELINE
from pallas_kernels.dispatch import Backend, recording
from pallas_kernels.fp4_matmul.api import fp4_matmul
from pallas_kernels.operands import Fp4
from tcfp_jax import products, recipe
from tcfp_jax.weights.fp4_packing import quantize_fp4
from tcfp_jax.weights.stored import bytes_of

COLD_BYTES = 240_000_000
# An E4M3 activation with a scale for each row keeps about 31 dB of x, and NVFP4 20.
LEAST_SNR_DB = {"W4A16": 50.0, "W4A8": 28.0, "W4A4": 18.0}
CHECKED_ROWS = 64
Part = Literal["decode", "prefill", "dgrad"]


@dataclass(frozen=True)
class Config(timing.Repetitions):
    """Settings of a run.

    Attributes:
      cases: (part, (k, n) of the weight, each m) in turn.
    """

    cases: tuple[tuple[Part, tuple[int, int], tuple[int, ...]], ...]
    cold_bytes: int = COLD_BYTES


@dataclass(frozen=True)
class Row(timing.Timing):
    """One product.

    Attributes:
      part, m, k, n: the product and its sizes; `dgrad` contracts n.
      kind: "bf16", or how weights and activations are rounded, and the format.
      backend: the backend that ran.
      speed_over_bf16: BF16's median over this one.
      weight_bits: bits a value of the weight's arrays.
      terabytes_per_second: rate at which the weight's bytes are read.
      copies: weights that a call reads in turn.
      snr_db: against the float64 product of the dequantized weight; None for BF16.
      pearson: correlation with the float64 product of x and the weight before any of
        them is quantized; None for BF16.
    """

    part: Part
    kind: str
    m: int
    k: int
    n: int
    backend: str
    speed_over_bf16: float
    weight_bits: float
    terabytes_per_second: float
    copies: int
    snr_db: float | None = None
    pearson: float | None = None


@dataclass(frozen=True)
class Kind:
    """Formats of a weight and activations, and the backend that multiplies them.

    Attributes:
      scaling, activation: options of the product.
      backend: None lets dispatch choose.
    """

    scaling: Fp4
    activation: Any = "bfloat16"
    backend: Backend | None = None

    def runs(self, part: Part, m: int) -> bool:
        """Return whether it is measured if its backend can run.

        XLA's E4M3 product is for many rows, and x in NVFP4 for the forward product.
        """
        if part == "dgrad":
            is_fp4 = self.activation == "float4_e2m1fn"
            return self.scaling.format == "nvfp4" and not is_fp4
        return self.backend != "xla" or m >= 256


KINDS: dict[str, Kind] = {
    "W4A16 nvfp4": Kind(Fp4()),
    "W4A16 mxfp4": Kind(Fp4("mxfp4")),
    "W4A8 nvfp4 fold-exact": Kind(Fp4(rule="fold_exact"), "float8_e4m3fn", "xla"),
    "W4A8 nvfp4 fold-exact, kernel": Kind(
        Fp4(rule="fold_exact"), "float8_e4m3fn", "mosaic"
    ),
    "W4A4 nvfp4": Kind(Fp4(), "float4_e2m1fn"),
}


def measure(config: Config) -> Iterator[Row]:
    """Check and time every product of every part."""
    for part, (k, n), rows in config.cases:
        weights = _weights(part, (k, n), rows, config)
        # Every m is checked with these gigabytes.
        wide = functools.cache(partial(_dequantized, weights))
        for m in rows:
            yield from _products(part, (m, k, n), weights, wide, config)


def _weights(
    part: Part, shape: tuple[int, int], rows: tuple[int, ...], config: Config
) -> dict[str, list[Any]]:
    """Return copies of a weight in BF16 and in each format that is multiplied."""
    k, n = shape
    first = jax.random.normal(jax.random.key(0), (n, k), jnp.bfloat16)
    found = {BASELINE: cold_copies(first, config.cold_bytes)}

    @functools.cache
    def packed(scaling: Fp4) -> list[Any]:
        pack = jax.jit(partial(quantize_fp4, scaling=scaling))
        return cold_copies(pack(first), config.cold_bytes)

    for name, kind in KINDS.items():
        if any(kind.runs(part, m) for m in rows):
            found[name] = packed(kind.scaling)
    return found


def cold_copies(w: Any, cold_bytes: int) -> list[Any]:
    """Return the weight and copies of it, together at least `cold_bytes`."""
    more = math.ceil(cold_bytes / bytes_of(w)) - 1
    return [w, *(jax.tree.map(jnp.copy, w) for _ in range(more))]


def _dequantized(weights: dict[str, list[Any]], name: str) -> np.ndarray:
    w = weights[name][0]
    return np.asarray(w if name == BASELINE else w.dequantize(), np.float64)


def _multiply(part: Part, name: str, x: Array, w: Any) -> Array:
    if name == BASELINE:
        return x @ (w if part == "dgrad" else w.T)
    kind = KINDS[name]
    if kind.activation == "float4_e2m1fn":
        both = recipe("nvfp4", scaling=kind.scaling, activation=kind.activation)
        return products.fp4_matmul(x, w, recipe=both)
    return fp4_matmul(
        x,
        w,
        contracts="n" if part == "dgrad" else "k",
        activation=kind.activation,
        backend=kind.backend,
    )


def _by_each(
    part: Part, name: str, activations: list[Array], copies: list[Any]
) -> list[Array]:
    # XLA would quantize one x once for all of them.
    pairs = zip(activations, copies, strict=True)
    return [_multiply(part, name, x, w) for x, w in pairs]


def _products(
    part: Part,
    sizes: tuple[int, int, int],
    weights: dict[str, list[Any]],
    wide: Callable[[str], np.ndarray],
    config: Config,
) -> Iterator[Row]:
    m, k, n = sizes
    contracted = n if part == "dgrad" else k
    x = jax.random.normal(jax.random.key(1), (m, contracted), jnp.bfloat16)
    exact = _in_float64(x, wide(BASELINE), part)
    checked: dict[str, Any] = {BASELINE: {"backend": "xla"}}
    candidates: Any = {}
    for name, copies in weights.items():
        if name != BASELINE and not KINDS[name].runs(part, m):
            continue
        call = jax.jit(partial(_by_each, part, name))
        arguments = ([jnp.copy(x) for _ in copies], copies)
        if name != BASELINE:
            backend = _backend_of(part, name, x, copies[0])
            if backend is None:
                continue
            y = call(*arguments)[-1][:CHECKED_ROWS].astype(jnp.float32)
            snr = _snr(name, y, _in_float64(x, wide(name), part))
            pearson = float(np.corrcoef(exact.ravel(), y.ravel())[0, 1])
            checked[name] = dict(backend=backend, snr_db=snr, pearson=pearson)
        candidates[name] = call, arguments
    timed = config.interleaved(candidates)
    bf16 = timed[BASELINE].median_ms / len(weights[BASELINE])
    for name, taken in timed.items():
        count = len(weights[name])
        milliseconds = taken.median_ms / count
        nbytes = bytes_of(weights[name][0])
        yield Row(
            median_ms=milliseconds,
            min_ms=taken.min_ms / count,
            max_ms=taken.max_ms / count,
            samples=taken.samples,
            timer=taken.timer,
            part=part,
            kind=name,
            m=m,
            k=k,
            n=n,
            speed_over_bf16=bf16 / milliseconds,
            weight_bits=8 * nbytes / (n * k),
            terabytes_per_second=nbytes / milliseconds / 1e9,
            copies=count,
            **checked[name],
        )


def _backend_of(part: Part, name: str, x: Array, w: Any) -> Backend | None:
    """Return the backend that multiplies; None if the named one cannot."""
    with recording() as calls:
        jax.eval_shape(partial(_multiply, part, name), x, w)
    (product,) = (call for call in calls if call.op == "fp4_matmul")
    return None if product.chosen is None else product.chosen.backend


def _in_float64(x: Array, w: np.ndarray, part: Part) -> np.ndarray:
    """Return some rows of the product of arrays in float64."""
    some = np.asarray(x[:CHECKED_ROWS], np.float64)
    return np.asarray(some @ (w if part == "dgrad" else w.T))


def _snr(name: str, y: Array, expected: np.ndarray) -> float:
    """Return the SNR of some rows; raise `ArithmeticError` if it is too low."""
    snr = snr_db(expected, y)
    least = LEAST_SNR_DB[name.split()[0]]
    if snr < least:
        raise ArithmeticError(
            f"{name}: {snr:.1f} dB, less than {least} dB; nothing is timed"
        )
    return snr


# The command and its table
# --------------------------------------------------------------------------------------


LARGE = (8192, 28672)
CASES: dict[str, Any] = {
    "usual": (
        ("decode", LARGE, (1, 16, 64, 128, 256)),
        ("decode", (28672, 8192), (16,)),
        ("decode", (8192, 8192), (1, 16)),
        ("decode", (4096, 14336), (16,)),
        ("prefill", LARGE, (512, 2048)),
        ("dgrad", LARGE, (4096,)),
    ),
    "activations": (
        # 2944 is not a multiple of 256, which the kernels need.
        ("prefill", (2944, 2944), (16, 256, 2048)),
        ("prefill", (4096, 14336), (16, 256, 2048)),
    ),
    "tiny": (
        ("decode", (64, 32), (2,)),
        ("prefill", (64, 32), (8,)),
        ("dgrad", (64, 32), (8,)),
    ),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the cases."""
    parser.add_argument("--cases", choices=CASES, default="usual", help="on a GPU")


def configure(options: argparse.Namespace) -> Config:
    """Return the shapes that were asked for on a GPU, and tiny ones elsewhere."""
    if jax.default_backend() == "gpu" and not options.smoke:
        return Config(CASES[options.cases], rounds=3, calls=4)
    return Config(CASES["tiny"], cold_bytes=10_000, rounds=1, calls=2)


def table(result: Result) -> str:
    """Return a table with a line for each product."""
    columns = {
        "": "{part}",
        "rows": "{m}",
        "k × n": "{k} × {n}",
        "weight and activations": "{kind}",
        "by": "`{backend}`",
        "µs": "{microseconds:.1f}",
        "speedup over BF16": "**{speed_over_bf16:.2f}**",
        "TB/s of weights": "{terabytes_per_second:.2f}",
        "bits per weight": "{weight_bits:.2f}",
        "dB": "{snr_db:.0f}",
    }
    if any("pearson" in row for row in result.rows):  # older files lack it
        columns["Pearson"] = "{pearson:.4f}"
    rows = [{**row, "microseconds": 1e3 * row["median_ms"]} for row in result.rows]
    return cells(rows, columns)


BENCHMARK = Benchmark("fp4", __doc__, configure, measure, table, options=add_options)

if __name__ == "__main__":
    BENCHMARK.command()
