"""Time of one product: BF16, one FP8 product, and the two of a residual weight, by every backend, in one run.

    python -m benchmarks.gemm --json     # products, those with more scales than one a tensor, then quantizers
    python -m benchmarks.gemm --tune     # times tile sizes, writes pallas_kernels/tuned.json (benchmarks.tune)

Operands are quantized beforehand: this is the tensor cores' time, not a layer's. Every product is compared with float64
before anything is timed. The ratio is BF16's median over the product's, both from this run.
"""

import dataclasses
import functools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import quantizers, scaled_products, tune
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
from benchmarks.shapes import CPU_SHAPES, H200_SHAPES, MIDDLE, SMOKE_SHAPES, GemmShape, dot_bf16, random_operands
from pallas_kernels.dispatch import Backend
from pallas_kernels.dual_quantize.api import dual_quantize
from pallas_kernels.matmul.api import SUM_BOUND, matmul
from pallas_kernels.quantize.api import quantize

NAME, SCALED = "gemm", "gemm_scales"
Kind = str  # "bf16", "fp8 single", "fp8 dual", and those of scaled_products.py
Accumulation = Literal["fast", "full"]

# Per unit of |x| @ |w|, as SUM_BOUND of FP8 products is. Rounding of outputs to bfloat16 (twice in a dual product of
# XLA's) is added per element.
BF16_SUM_BOUND = 2.0**-16
OUTPUT_BOUND = 2.0**-7
# Dense tensor-core rates, NVIDIA's data sheets.
PEAK_TFLOPS = {name: {"bf16": 989.5, "fp8": 1979.0} for name in ("NVIDIA H100 80GB HBM3", "NVIDIA H200")}


@dataclass(frozen=True)
class Config:
    """Settings of a run."""

    shapes: tuple[GemmShape, ...]
    backends: tuple[Backend, ...] = ("xla",)
    rounds: int = 5
    calls: int = 5
    checked_rows: int = 64
    seed: int = 0


@dataclass(frozen=True)
class Row:
    """One product at one shape.

    `tflops` counts 2 m k n for each FP8 or BF16 product, so twice that for a dual one; `part_of_peak` is the part of
    the device's published dense rate for the format, None where it is not known; `speed_over_bf16` is the ratio of
    medians; `bound_used` is the largest error over its bound.
    """

    shape: str
    kind: Kind
    accumulation: Accumulation
    backend: Backend
    median_ms: float
    min_ms: float
    max_ms: float
    samples: int
    timer: Timer
    tflops: float
    part_of_peak: float | None
    speed_over_bf16: float
    bound_used: float


@dataclass(frozen=True)
class _Product:
    kind: Kind
    accumulation: Accumulation
    function: Callable[..., jax.Array]
    args: tuple[Any, ...]
    values: Callable[[], tuple[jax.Array, ...]]  # float32 x and halves of W that the operands stand for
    gemms: int
    sum_bound: float  # per unit of |x| @ |w|
    backend: Backend = "xla"

    @property
    def name(self) -> str:
        return f"{self.kind} {self.accumulation} {self.backend}"


def measure(config: Config, scales: Literal["one", "more"] = "one") -> list[Row]:
    """Check and time every product at every shape, of operands with one scale or with more.

    Raises:
      ArithmeticError: a product misses its bound; nothing is timed then.
    """
    rows = []
    for shape in config.shapes:
        products = (_products if scales == "one" else _scaled_products)(shape, config)
        used = {product.name: check_product(product, config) for product in products}
        times = time_interleaved(
            {p.name: (p.function, p.args) for p in products}, rounds=config.rounds, calls=config.calls
        )
        baseline = times[products[0].name].median_ms
        for p in products:
            t = times[p.name]
            tflops, peak = p.gemms * shape.operations / (t.median_ms * 1e-3) / 1e12, _peak(p.kind)
            rows.append(
                Row(
                    shape=str(shape),
                    kind=p.kind,
                    accumulation=p.accumulation,
                    backend=p.backend,
                    **dataclasses.asdict(t),
                    tflops=tflops,
                    part_of_peak=None if peak is None else tflops / peak,
                    speed_over_bf16=baseline / t.median_ms,
                    bound_used=used[p.name],
                )
            )
    return rows


def _products(shape: GemmShape, config: Config) -> list[_Product]:
    x, w = random_operands(shape, config.seed)
    x_q = jax.jit(functools.partial(quantize, dtype=jnp.float8_e4m3fn))(x)
    w_q = jax.jit(dual_quantize)(w)
    # Powers of two, exact in bfloat16, which lets cuBLASLt apply them.
    scale = (x_q.scale * w_q.scale).astype(jnp.bfloat16)
    products = [_baseline(x, w.astype(jnp.bfloat16))]
    for backend in config.backends:
        found: list[_Product] = []
        for accumulation in ("fast", "full"):
            multiply = functools.partial(matmul, accumulation=accumulation, backend=backend)
            single = jax.jit(lambda x, w, s, f=multiply: f(x, w, scale=s))
            dual = jax.jit(lambda x, w, w_lo, s, f=multiply: f(x, w, w_lo, scale=s))
            for kind, call, halves in (("fp8 single", single, (w_q.hi,)), ("fp8 dual", dual, (w_q.hi, w_q.lo))):
                values = functools.partial(_values, x_q.values, halves, scale)
                bound, args = SUM_BOUND[backend, accumulation], (x_q.values, *halves, scale)
                found.append(_Product(kind, accumulation, call, args, values, len(halves), bound, backend))
        products += _possible(shape, found)
    return products


def _scaled_products(shape: GemmShape, config: Config) -> list[_Product]:
    """BF16, and operands with more scales than one a tensor."""
    x, w = random_operands(shape, config.seed)
    products = [_baseline(x, w.astype(jnp.bfloat16))]
    # Block products add float32 sums of blocks; the reference multiplies in BF16.
    for scaled in scaled_products.block_products(shape, config.backends, config.seed):
        bound = BF16_SUM_BOUND if scaled.backend == "xla" else SUM_BOUND[scaled.backend, "full"]
        products += _possible(shape, [_scaled(scaled, "full", bound)])
    for scaled in scaled_products.other_products(shape, config.backends, config.seed):
        # What a residual activation leaves out, x_lo w_lo, is below 2**-8 of both.
        bound = SUM_BOUND[scaled.backend, "fast"] + (2.0**-8 if scaled.gemms == 3 else 0)
        products += _possible(shape, [_scaled(scaled, "fast", bound)])
    return products


def _baseline(x: jax.Array, w: jax.Array) -> _Product:
    values = lambda: (x.astype(jnp.float32), w.astype(jnp.float32))
    return _Product("bf16", "full", jax.jit(dot_bf16), (x, w), values, 1, BF16_SUM_BOUND)


def _scaled(scaled: scaled_products.Scaled, accumulation: Accumulation, bound: float) -> _Product:
    return _Product(
        scaled.kind, accumulation, scaled.function, scaled.args, scaled.values, scaled.gemms, bound, scaled.backend
    )


def _possible(shape: GemmShape, found: list[_Product]) -> list[_Product]:
    """Those products if the backend has them, else none, and why."""
    try:
        for product in found:
            jax.eval_shape(product.function, *product.args)
    except NotImplementedError as reason:
        print(f"{shape}: {reason}")
        return []
    return found


def _values(x: jax.Array, halves: tuple[jax.Array, ...], scale: jax.Array) -> tuple[jax.Array, ...]:
    return (x.astype(jnp.float32), *(half.astype(jnp.float32) * scale.astype(jnp.float32) for half in halves))


def _peak(kind: Kind) -> float | None:
    rates = PEAK_TFLOPS.get(jax.devices()[0].device_kind)
    return None if rates is None else rates["bf16" if kind == "bf16" else "fp8"]


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
    wide_x, *wide_w = product.values()
    x = np.asarray(wide_x[rows]).astype(np.float64)
    halves = [np.asarray(half[columns]).astype(np.float64) for half in wide_w]
    parts = [x @ half.T for half in halves]
    exact = sum(parts)
    magnitude = np.abs(x) @ np.abs(sum(halves)).T
    bound = product.sum_bound * magnitude + OUTPUT_BOUND * sum(np.abs(part) for part in parts)
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
    parser.add_argument("--backends", default=None, help="of the FP8 products (default: xla, on a GPU xla,mosaic)")
    parser.add_argument(
        "--measure", default="products,scales,quantizers", help="of these (default: all); scales: products with more"
    )
    parser.add_argument("--tune", action="store_true", help="time tile sizes, write pallas_kernels/tuned.json and stop")
    parser.add_argument("--only", default="", help="of --tune: cases whose op and variant contain this text")
    parser.add_argument("--cases", choices=["all", "missing"], default="all", help="of --tune: those not yet timed")
    parser.add_argument("--budget-seconds", type=float, default=math.inf, help="of --tune: start nothing after this")
    options = parser.parse_args(arguments)
    if options.tune:
        tune.run(options.budget_seconds, options.only, options.cases)
        return []
    on_gpu = jax.default_backend() == "gpu"
    backends = tuple((options.backends or ("xla,mosaic" if on_gpu else "xla")).split(","))
    if options.shapes is not None:
        shapes = tuple(GemmShape.parse(text) for text in options.shapes.split(","))
    else:
        shapes = H200_SHAPES if on_gpu else CPU_SHAPES
    config = Config(shapes=shapes, backends=backends)
    if options.smoke:
        config = Config(shapes=SMOKE_SHAPES, backends=backends, rounds=2, calls=2)
    header, path = make_header(), result_path(NAME, options)
    print_header(NAME, header)
    if header.platform == "cpu":
        print("a CPU has no FP8 units: it multiplies the same numbers in float32, so ratios here mean nothing")
    chosen = options.measure.split(",")
    rows: list[Row] = []
    if "products" in chosen:
        rows = measure(config)
        _show(rows)
        write_result(path, NAME, header, config, rows)
        announce(path)
    if "scales" in chosen:
        at = dataclasses.replace(config, shapes=(MIDDLE,) if shapes is H200_SHAPES else config.shapes)
        scaled, path = measure(at, "more"), result_path(SCALED, options)
        _show(scaled)
        write_result(path, SCALED, header, at, scaled)
        announce(path)
        rows += scaled
    if "quantizers" in chosen:
        quantizers.report(options, config)
    return rows


def _show(rows: list[Row]) -> None:
    print_table(
        ["m x k x n", "product", "accumulation", "backend", "median ms", "min..max", "TFLOP/s", "BF16 / this"],
        [
            (r.shape, r.kind, r.accumulation, r.backend, f"{r.median_ms:.4f}", f"{r.min_ms:.4f}..{r.max_ms:.4f}",
             f"{r.tflops:.4g}", f"{r.speed_over_bf16:.3f}")
            for r in rows
        ],
    )  # fmt: skip
    print(f"timer: {rows[0].timer}")


if __name__ == "__main__":
    main(sys.argv[1:])
