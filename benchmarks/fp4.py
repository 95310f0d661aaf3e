"""Products with FP4 weights next to BF16's, with cold weights.

    python -m benchmarks.fp4 --json

They have few rows as in decoding, many rows, or are input gradients. A call multiplies
x by copies of the weight in turn. Together they take more than `COLD_BYTES`, several
times the L2 cache of an H200, so that every product reads its weight from memory; the
BF16 baseline does the same. Times are per product. "W4A16" multiplies codes times
scales by BF16 activations, exactly. "W4A8" multiplies by E4M3 activations with a scale
for each row, which is found within the time. With the rule "fold_exact" it runs on FP8
tensor cores, by XLA, which unpacks the weight, or by the kernel that decodes it in
registers. Every product is checked against the float64 product of dequantized operands
before it is timed.
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
from benchmarks.products import compare
from benchmarks.records import Result, cells
from benchmarks.variants import BASELINE
from pallas_kernels.dispatch import Backend
from pallas_kernels.fp4_matmul.api import fp4_matmul
from pallas_kernels.fp4_matmul.mosaic import limits
from pallas_kernels.operands import Fp4
from tcfp_jax.weights.fp4_packing import quantize_fp4

COLD_BYTES = 240_000_000
# An E4M3 activation with a scale for each row keeps about 31 dB of x.
LEAST_SNR_DB = {"W4A16": 50.0, "W4A8": 28.0}
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
      snr_db: against the float64 product of the dequantized weight; None for BF16.
      copies: weights that a call reads in turn.
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
    snr_db: float | None
    copies: int


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
        """Return whether it is measured.

        XLA's E4M3 product is for many rows, and a named kernel for rows that it takes.
        """
        if self.backend == "mosaic":
            return self.decodes(part, m)
        if part == "dgrad":
            return self.scaling.format == "nvfp4"
        return self.activation == "bfloat16" or m > 256

    def ran(self, part: Part, m: int) -> Backend:
        """Return the backend that multiplies."""
        return self.backend or ("mosaic" if self.decodes(part, m) else "xla")

    def decodes(self, part: Part, m: int) -> bool:
        """Return whether the Hopper kernel takes m rows."""
        if part == "dgrad" or jax.default_backend() != "gpu":
            return False
        most = limits(self.activation).most_rows
        return most is None or m <= most


KINDS: dict[str, Kind] = {
    "W4A16 nvfp4": Kind(Fp4()),
    "W4A16 mxfp4": Kind(Fp4("mxfp4")),
    "W4A8 nvfp4 fold-exact": Kind(Fp4(rule="fold_exact"), "float8_e4m3fn", "xla"),
    "W4A8 nvfp4 fold-exact, kernel": Kind(
        Fp4(rule="fold_exact"), "float8_e4m3fn", "mosaic"
    ),
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
    more = math.ceil(cold_bytes / _bytes(w)) - 1
    return [w, *(jax.tree.map(jnp.copy, w) for _ in range(more))]


def _bytes(w: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(w))


def _dequantized(weights: dict[str, list[Any]], name: str) -> np.ndarray:
    return np.asarray(weights[name][0].dequantize(), np.float64)


def _multiply(part: Part, name: str, x: Array, w: Any) -> Array:
    if name == BASELINE:
        return x @ (w if part == "dgrad" else w.T)
    kind = KINDS[name]
    return fp4_matmul(
        x,
        w,
        contracts="n" if part == "dgrad" else "k",
        activation=kind.activation,
        backend=kind.backend,
    )


def _by_each(part: Part, name: str, x: Array, copies: list[Any]) -> list[Array]:
    return [_multiply(part, name, x, w) for w in copies]


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
    snr: dict[str, float | None] = {BASELINE: None}
    candidates: Any = {}
    for name, copies in weights.items():
        if name != BASELINE and not KINDS[name].runs(part, m):
            continue
        call = jax.jit(partial(_by_each, part, name))
        candidates[name] = call, (x, copies)
        if name != BASELINE:
            snr[name] = _checked(name, call(x, copies)[-1], x, wide(name), part)
    timed = config.interleaved(candidates)
    bf16 = timed[BASELINE].median_ms / len(weights[BASELINE])
    for name, taken in timed.items():
        count = len(weights[name])
        milliseconds = taken.median_ms / count
        nbytes = _bytes(weights[name][0])
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
            backend="xla" if name == BASELINE else KINDS[name].ran(part, m),
            speed_over_bf16=bf16 / milliseconds,
            weight_bits=8 * nbytes / (n * k),
            terabytes_per_second=nbytes / milliseconds / 1e9,
            snr_db=snr[name],
            copies=count,
        )


def _checked(name: str, y: Array, x: Array, w: np.ndarray, part: Part) -> float:
    """Return the SNR of some rows; raise `ArithmeticError` if it is too low."""
    some = np.asarray(x[:CHECKED_ROWS], np.float64)
    snr, _ = compare(some @ (w if part == "dgrad" else w.T), y[:CHECKED_ROWS])
    least = LEAST_SNR_DB[name.split()[0]]
    if snr < least:
        raise ArithmeticError(
            f"{name}: {snr:.1f} dB, less than {least} dB; nothing is timed"
        )
    return snr


# The command and its table
# --------------------------------------------------------------------------------------


def configure(options: argparse.Namespace) -> Config:
    """Return the shapes of a Llama on a GPU, and tiny ones elsewhere."""
    if jax.default_backend() == "gpu" and not options.smoke:
        large = (8192, 28672)
        return Config(
            (
                ("decode", large, (1, 16, 64, 128, 256)),
                ("decode", (28672, 8192), (16,)),
                ("decode", (8192, 8192), (1, 16)),
                ("decode", (4096, 14336), (16,)),
                ("prefill", large, (512, 2048)),
                ("dgrad", large, (4096,)),
            ),
            rounds=3,
            calls=4,
        )
    tiny = (64, 32)
    cases: Any = (
        ("decode", tiny, (2,)),
        ("prefill", tiny, (8,)),
        ("dgrad", tiny, (8,)),
    )
    return Config(cases, cold_bytes=10_000, rounds=1, calls=2)


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
    rows = [{**row, "microseconds": 1e3 * row["median_ms"]} for row in result.rows]
    return cells(rows, columns)


BENCHMARK = Benchmark("fp4", __doc__, configure, measure, table)

if __name__ == "__main__":
    BENCHMARK.command()
