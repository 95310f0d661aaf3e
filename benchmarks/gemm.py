"""Time of one product: BF16, one FP8 product, and the two FP8 products of a residual weight, in one run.

    python -m benchmarks.gemm --json

Operands are quantized beforehand: this is the tensor cores' time, not a layer's. Every product is compared with float64
before anything is timed. The ratio is BF16's median over the product's, both from this run.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.common import (
    Timer,
    announce,
    make_header,
    make_parser,
    print_header,
    print_table,
    result_path,
    time_interleaved,
    write_result,
)
from benchmarks.shapes import CPU_SHAPES, H200_SHAPES, SMOKE_SHAPES, GemmShape, random_operands
from pallas_kernels.dispatch import Backend
from pallas_kernels.dual_quantize.api import dual_quantize
from pallas_kernels.matmul.api import matmul
from pallas_kernels.quantize.api import quantize

NAME = "gemm"
Kind = Literal["bf16", "fp8 single", "fp8 dual"]
Accumulation = Literal["fast", "full"]

# A tensor core's FP8 accumulator keeps about 14 bits of each addend and truncates: with fast accumulation the error
# grows with k, with full accumulation it does not. BF16 products accumulate in float32. All are bounds per unit of
# |x| @ |w|. Rounding of outputs to bfloat16 (twice in a dual product) is added per element.
SUM_BOUND = {"bf16": 2.0**-16, "fast": 2.0**-11, "full": 2.0**-13}
OUTPUT_BOUND = 2.0**-7


@dataclass(frozen=True)
class Config:
    """Settings of a run."""

    shapes: tuple[GemmShape, ...]
    backend: Backend = "xla"
    rounds: int = 5
    calls: int = 5
    checked_rows: int = 64
    seed: int = 0


@dataclass(frozen=True)
class Row:
    """One product at one shape.

    `tflops` counts 2 m k n for each FP8 or BF16 product, so twice that for a dual one; `speed_over_bf16` is the ratio
    of medians; `bound_used` is the largest error over its bound.
    """

    shape: str
    kind: Kind
    accumulation: Accumulation
    median_ms: float
    min_ms: float
    max_ms: float
    samples: int
    timer: Timer
    tflops: float
    speed_over_bf16: float
    bound_used: float


@dataclass(frozen=True)
class _Product:
    kind: Kind
    accumulation: Accumulation
    function: Callable[..., jax.Array]
    args: tuple[Any, ...]
    halves: tuple[jax.Array, ...]  # of the weight, for the check
    scale: float

    @property
    def name(self) -> str:
        return f"{self.kind} {self.accumulation}"


def measure(config: Config) -> list[Row]:
    """Check and time every product at every shape.

    Raises:
      ArithmeticError: a product misses its bound; nothing is timed then.
    """
    rows = []
    for shape in config.shapes:
        products = _products(shape, config)
        used = {product.name: check_product(product, config) for product in products}
        times = time_interleaved(
            {p.name: (p.function, p.args) for p in products}, rounds=config.rounds, calls=config.calls
        )
        baseline = times[products[0].name].median_ms
        for p in products:
            t, count = times[p.name], len(p.halves)
            rows.append(
                Row(
                    shape=str(shape),
                    kind=p.kind,
                    accumulation=p.accumulation,
                    **dataclasses.asdict(t),
                    tflops=count * shape.operations / (t.median_ms * 1e-3) / 1e12,
                    speed_over_bf16=baseline / t.median_ms,
                    bound_used=used[p.name],
                )
            )
    return rows


def _products(shape: GemmShape, config: Config) -> list[_Product]:
    x, w = random_operands(shape, config.seed)
    w_bf16 = w.astype(jnp.bfloat16)
    x_q = jax.jit(functools.partial(quantize, dtype=jnp.float8_e4m3fn))(x)
    w_q = jax.jit(dual_quantize)(w)
    # Powers of two, exact in bfloat16, which lets cuBLASLt apply them.
    scale = (x_q.scale * w_q.scale).astype(jnp.bfloat16)
    products = [_Product("bf16", "full", jax.jit(_dot_bf16), (x, w_bf16), (w_bf16,), 1.0)]
    for accumulation in ("fast", "full"):
        multiply = functools.partial(matmul, accumulation=accumulation, backend=config.backend)
        single = jax.jit(lambda x, w, s, f=multiply: f(x, w, scale=s))
        dual = jax.jit(lambda x, w, w_lo, s, f=multiply: f(x, w, w_lo, scale=s))
        args = (x_q.values, w_q.hi, w_q.lo, scale)
        products.append(
            _Product("fp8 single", accumulation, single, (args[0], args[1], scale), (w_q.hi,), float(scale))
        )
        products.append(_Product("fp8 dual", accumulation, dual, args, (w_q.hi, w_q.lo), float(scale)))
    return products


def _dot_bf16(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16)


def check_product(product: _Product, config: Config) -> float:
    """Largest error over its bound, on randomly chosen rows and columns, against float64.

    Raises:
      ArithmeticError: it is above 1, or not a number.
    """
    out = product.function(*product.args)
    random = np.random.default_rng(config.seed)
    rows, columns = (
        jnp.asarray(random.choice(size, min(size, config.checked_rows), replace=False)) for size in out.shape
    )
    x = np.asarray(product.args[0][rows]).astype(np.float64)
    halves = [np.asarray(half[columns]).astype(np.float64) for half in product.halves]
    parts = [x @ half.T * product.scale for half in halves]
    exact = sum(parts)
    magnitude = np.abs(x) @ np.abs(sum(halves)).T * product.scale
    bound = SUM_BOUND[
        product.accumulation if product.halves[0].dtype.itemsize == 1 else "bf16"
    ] * magnitude + OUTPUT_BOUND * sum(np.abs(part) for part in parts)
    got = np.asarray(out[rows[:, None], columns[None, :]]).astype(np.float64)
    used = float(np.max(np.abs(got - exact) / bound))
    if not used <= 1:
        raise ArithmeticError(
            f"{product.name}: the error is {used} of its bound; the product is wrong, so it is not timed"
        )
    return used


def main(arguments: list[str] | None = None) -> list[Row]:
    """Run the command and return its rows."""
    parser = make_parser(NAME, __doc__)
    parser.add_argument("--shapes", default=None, help="MxKxN,MxKxN,... (default: three of a Transformer's on a GPU)")
    parser.add_argument("--backend", default="xla", choices=["xla", "triton", "mosaic"], help="of the FP8 products")
    options = parser.parse_args(arguments)
    if options.shapes is not None:
        shapes = tuple(GemmShape.parse(text) for text in options.shapes.split(","))
    else:
        shapes = H200_SHAPES if jax.default_backend() == "gpu" else CPU_SHAPES
    config = Config(shapes=shapes, backend=options.backend)
    if options.smoke:
        config = Config(shapes=SMOKE_SHAPES, backend=options.backend, rounds=2, calls=2)
    header, path = make_header(), result_path(NAME, options)
    print_header(NAME, header)
    if header.platform == "cpu":
        print("a CPU has no FP8 units: it multiplies the same numbers in float32, so ratios here mean nothing")
    rows = measure(config)
    print_table(
        ["m x k x n", "product", "accumulation", "median ms", "min..max", "TFLOP/s", "BF16 / this"],
        [
            (r.shape, r.kind, r.accumulation, f"{r.median_ms:.4f}", f"{r.min_ms:.4f}..{r.max_ms:.4f}",
             f"{r.tflops:.4g}", f"{r.speed_over_bf16:.3f}")
            for r in rows
        ],
    )  # fmt: skip
    print(f"timer: {rows[0].timer}")
    write_result(path, NAME, header, config, rows)
    announce(path)
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
