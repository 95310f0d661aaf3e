"""How the W4A8 kernel gets few rows of x, side by side: what `pallas_kernels.fp4_matmul.mosaic` chooses among.

    python -m benchmarks.fp4_sizes --json

The rows are rounded by a kernel before, by every block for itself, or by the blocks of a cluster for each other. Every
way must give the same bits before it is timed. Weights are cold, and times a product's, as in `benchmarks.fp4`: sums of
kernels' own times, without what passes between two kernels. The kernel is PTX, so this needs an H100 or H200.
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
from pallas_kernels.operands import Fp4
from tcfp_jax.weights.fp4 import quantize_fp4

NAME = "fp4_sizes"
SCALING = Fp4(rule="fold_exact")
OPTIONS = Options(jnp.dtype(jnp.bfloat16), "float8_e4m3fn")
BEFORE = "a kernel before"
MEMBERS = (8, 4, 2)


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
    """One way to get the rows; `chosen` is the one that a product takes, and BF16 has no `sizes`."""

    m: int
    k: int
    n: int
    way: str
    sizes: str
    chosen: bool
    speed_over_bf16: float


def ways(m: int, k: int, n: int) -> dict[str, Any]:
    """Sizes of the kernel by the way that it gets its rows: those that it takes."""
    from pallas_kernels.fp4_matmul import shared

    copied = mosaic.choose(OPTIONS, SCALING, m, k, n)
    found = {BEFORE: copied}
    itself = chosen(m, k, n)
    if itself.x == "rounded":
        found["every block"] = itself
    for members in MEMBERS:
        blocks, rows = n // copied.height * copied.splits, -(-m // 8) * 8
        if blocks % members == 0 and shared.serves(rows, k, members, copied.warpgroups):
            found[f"clusters of {members}"] = dataclasses.replace(copied, x="shared", members=members)
    return found


def chosen(m: int, k: int, n: int) -> Any:
    """The sizes of a product of so many rows in bfloat16."""
    rows = jax.ShapeDtypeStruct((m, k), jnp.bfloat16)
    return mosaic.rounding(mosaic.choose(OPTIONS, SCALING, m, k, n), OPTIONS, rows, n)


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
    results = {name: np.asarray(candidates[name][0](x, packed)[-1]).view(np.uint16) for name in found}
    for name, bits in results.items():
        if (different := int((bits != results[BEFORE]).sum())) > 0:
            raise ArithmeticError(f"m={m}, k={k}, n={n}: {different} results of {name!r} are not those of {BEFORE!r}")
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
