"""How the W4A8 kernel reads few rows of x and a weight, side by side: what `pallas_kernels.fp4_matmul` chooses among.

    python -m benchmarks.fp4_sizes --json

The rows are rounded by a kernel before, or by every block for itself; steps of k are copied one by one, or two abreast.
Ways that add in the same order must give the same bits before they are timed, and others the same but for that. Weights
are cold, and times a product's, as in `benchmarks.fp4`: sums of kernels' own times, without what passes between two
kernels. The kernel is PTX, so this needs an H100 or H200.
"""

import argparse
import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import common, fp4, timing
from benchmarks.common import Result, markdown_table
from pallas_kernels.fp4_matmul import mosaic
from pallas_kernels.fp4_matmul.reference import Options
from pallas_kernels.fp4_matmul.sizes import Config as Sizes
from pallas_kernels.operands import Fp4
from tcfp_jax.weights.fp4_packing import quantize_fp4

NAME = "fp4_sizes"
SCALING = Fp4(rule="fold_exact")
OPTIONS = Options(jnp.dtype(jnp.bfloat16), "float8_e4m3fn")
BEFORE, BY_BLOCKS = "a kernel before", "every block"
# Sums of about 14 bits, in another order.
LEAST_AGREEMENT_DB = 40.0


@dataclass(frozen=True)
class Config:
    """Settings of a run.

    Attributes:
      cases: ((k, n) of the weight, each m) in turn.
    """

    cases: tuple[tuple[tuple[int, int], tuple[int, ...]], ...]
    cold_bytes: int = fp4.COLD_BYTES
    rounds: int = 4
    calls: int = 6


@dataclass(frozen=True)
class Row(timing.Timing):
    """One way to read the operands; `chosen` is the one that a product takes, and BF16 has no `sizes`."""

    m: int
    k: int
    n: int
    way: str
    sizes: str
    chosen: bool
    speed_over_bf16: float


def ways(m: int, k: int, n: int) -> dict[str, Sizes]:
    """Sizes of the kernel by the way that it reads its operands: those that it takes."""
    copied, itself = _copied(m, k, n), chosen(m, k, n)
    found = {BEFORE: copied} | ({BY_BLOCKS: itself} if itself.x == "rounded" else {})
    if copied.abreast == 1:
        return found
    # As wide a part of a row's scales in a copy; 128 bytes are the widest.
    one = lambda how: dataclasses.replace(how, abreast=1, scale_steps=min(4, how.scale_steps * how.abreast))
    abreast = {f"{name}, {copied.abreast} abreast": how for name, how in found.items()}
    return {name: one(how) for name, how in found.items()} | abreast


def chosen(m: int, k: int, n: int) -> Sizes:
    """The sizes of a product of so many rows in bfloat16."""
    return mosaic.rounding(_copied(m, k, n), OPTIONS, jax.ShapeDtypeStruct((m, k), jnp.bfloat16), n)


def _copied(m: int, k: int, n: int) -> Sizes:
    found = mosaic.choose(OPTIONS, SCALING, m, k, n)
    if found is None:
        raise ValueError(f"m={m}, k={k}, n={n}: the kernel has no sizes for such a product; choose another")
    return found


def measure(config: Config) -> Iterator[Row]:
    """Check and time every way of every case."""
    if jax.default_backend() != "gpu":
        raise ValueError("benchmarks.fp4_sizes times a kernel of an H100 or H200; run it on one")
    quantize = jax.jit(functools.partial(quantize_fp4, scaling=SCALING))
    for (k, n), rows in config.cases:
        first = jax.random.normal(jax.random.key(0), (n, k), jnp.bfloat16)
        wide, packed = (fp4.cold_copies(w, config.cold_bytes) for w in (first, quantize(first)))
        for m in rows:
            yield from _timed((m, k, n), wide, packed, config)


def _timed(sizes: tuple[int, int, int], wide: list[Any], packed: list[Any], config: Config) -> list[Row]:
    m, k, n = sizes
    x = jax.random.normal(jax.random.key(1), (m, k), jnp.bfloat16)
    each = lambda multiply, x, copies: [multiply(x, w) for w in copies]
    product = lambda how: functools.partial(mosaic.fp4_matmul, OPTIONS, config=how)
    candidates: Any = {fp4.BASELINE: (jax.jit(functools.partial(each, lambda x, w: x @ w.T)), (x, wide))}
    found = ways(*sizes)
    candidates |= {name: (jax.jit(functools.partial(each, product(how))), (x, packed)) for name, how in found.items()}
    _check(sizes, found, {name: np.asarray(candidates[name][0](x, packed)[-1]) for name in found})
    timed = timing.time_interleaved(candidates, rounds=config.rounds, calls=config.calls)
    per_product = lambda name: timed[name].median_ms / len(wide if name == fp4.BASELINE else packed)
    rows = []
    for name, times in timed.items():
        count = len(wide if name == fp4.BASELINE else packed)
        one = {field: getattr(times, field) / count for field in ("median_ms", "min_ms", "max_ms")}
        how = found.get(name)
        rows.append(
            Row(
                **{**asdict(times), **one}, m=m, k=k, n=n, way=name, sizes="" if how is None else str(how),
                chosen=how == chosen(*sizes), speed_over_bf16=per_product(fp4.BASELINE) / one["median_ms"],
            )
        )  # fmt: skip
    return rows


def _check(sizes: tuple[int, int, int], found: dict[str, Sizes], results: dict[str, np.ndarray]) -> None:
    """Compare every way with the first one that adds in its order, and those with each other.

    Raises:
      ArithmeticError: they differ by more than that.
    """
    m, k, n = sizes
    firsts: dict[int, str] = {}
    for name, how in found.items():
        first = firsts.setdefault(how.abreast, name)
        if different := int((results[name].view(np.uint16) != results[first].view(np.uint16)).sum()):
            raise ArithmeticError(f"m={m}, k={k}, n={n}: {different} results of {name!r} are not those of {first!r}")
    for name in firsts.values():
        agreement = common.compare(results[BEFORE], results[name])[0]
        if agreement < LEAST_AGREEMENT_DB:
            raise ArithmeticError(f"m={m}, k={k}, n={n}: {name!r} is {agreement:.1f} dB from {BEFORE!r}")


# The command and its table --------------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """None."""


def configure(options: argparse.Namespace) -> Config:
    """Weights of a Llama, and rows of x as they are decoded."""
    large = (8192, 28672)
    if options.smoke:
        return Config(((large, (16,)),), rounds=1, calls=2)
    return Config(
        ((large, (1, 4, 8, 16, 32, 64)), ((4096, 14336), (1, 4, 16)), ((8192, 8192), (1, 16)), ((28672, 8192), (16,)))
    )


def show(rows: list[Row]) -> None:
    """Print the rows."""
    common.print_rows(rows, "m", "k", "n", "way", "median_ms", "speed_over_bf16", "chosen")


def table(result: Result) -> str:
    """A line a product, a column a way, in microseconds; the chosen one in bold."""
    names = list(dict.fromkeys(row["way"] for row in result.rows))
    cases = list(dict.fromkeys((row["m"], row["k"], row["n"]) for row in result.rows))
    found = {(row["m"], row["k"], row["n"], row["way"]): row for row in result.rows}

    def cell(row: Any) -> str:
        if row is None:
            return "–"
        text = f"{row['median_ms'] * 1e3:.1f}"
        text = text if row["way"] == fp4.BASELINE else f"{text}, {row['speed_over_bf16']:.2f}"
        return f"**{text}**" if row["chosen"] else text

    lines = [[str(m), f"{k} × {n}", *(cell(found.get((m, k, n, name))) for name in names)] for m, k, n in cases]
    return markdown_table(["rows", "k × n", *(f"{name}, µs" for name in names)], lines)


main = functools.partial(common.main, NAME)

if __name__ == "__main__":
    common.command(NAME)
