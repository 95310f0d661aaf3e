"""Grouped products, of layers with a mixture of experts, in BF16 and FP8.

    python -m benchmarks.grouped --json
    python -m benchmarks.grouped --shapes "olmoe w13,olmoe w2"

* *forward*, *dgrad*, *wgrad* are one product each, of operands that were quantized
  beforehand: the tensor cores' time.
* *layer* is the forward and backward pass of one grouped product of stored weights,
  with the quantization of x and of the result's gradient. *layer, weights too* also
  quantizes float weights, as a step next to float32 masters does.

`bf16` is `recipe("bf16")`, which multiplies by the same kernel if there is one. Sizes
of groups are a random draw in which the largest is about three times the mean. Before
it is timed, each product is compared with float64 for these sizes, and for sizes that
are 0, 1 and add up to less than the rows.
"""

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks import timing
from benchmarks.harness import Benchmark, chosen_of
from benchmarks.products import BF16_SUM_BOUND
from benchmarks.records import Result, markdown_table, shown
from benchmarks.train_step import compare_outputs
from benchmarks.variants import BASELINE
from pallas_kernels.grouped_matmul.api import grouped_matmul, grouped_weight_gradient
from pallas_kernels.matmul.api import SUM_BOUND
from pallas_kernels.operands import Operand
from tcfp_jax.products import grouped_matmul as layer
from tcfp_jax.products.fp8_weights import quantize_operand
from tcfp_jax.recipes import Recipe, recipe
from tcfp_jax.weights.quantization import quantize_weight
from tcfp_jax.weights.stored import Stored

Part = Literal["forward", "dgrad", "wgrad", "layer", "layer, weights too"]
PARTS: tuple[Part, ...] = get_args(Part)
RECIPES = {
    BASELINE: recipe(BASELINE),
    "tcfp12_single": recipe("tcfp12_single"),
    "tcfp12_single_128": recipe("tcfp12_single", block=128),
    # no product reads a transposed weight
    "tcfp12_single_both": recipe("tcfp12_single", copies="both"),
}
USUAL = "tcfp12_single"
# Of a layer against BF16's; a wrong scale or a wrong expert gives less than 6
LEAST_SNR_DB = 20.0


@dataclass(frozen=True)
class Shape:
    """`x[m, k]` times one `w[k, n]` of `experts`."""

    m: int
    k: int
    n: int
    experts: int

    def __str__(self) -> str:
        return f"{self.m} x {self.k} x {self.n}, {self.experts}"


# 16,384 tokens of Mixtral, 8,192 of the others, each in several rows. "w13" is gate and
# up together, "w2" is down.
SHAPES = {
    "mixtral up": Shape(16384, 4096, 14336, 8),
    "qwen3-30b up": Shape(65536, 2048, 768, 128),
    "qwen3-30b down": Shape(65536, 768, 2048, 128),
    "olmoe up": Shape(65536, 2048, 1024, 64),
    "deepseek-v3 up": Shape(65536, 7168, 2048, 32),
    "olmoe w13": Shape(131072, 2048, 2048, 64),
    "olmoe w2": Shape(131072, 1024, 2048, 64),
}
SMOKE = {"smoke": Shape(96, 32, 48, 4)}


@dataclass(frozen=True)
class Config(timing.Repetitions):
    """Settings of a run."""

    shapes: dict[str, Shape]
    recipes: tuple[str, ...] = (BASELINE, USUAL)


@dataclass(frozen=True)
class Row(timing.Timing):
    """One part at one shape by one recipe.

    `tflops` counts 2 m k n of each product, of three in a layer. `checked` is the
    largest error of a product over its bound, or the lowest SNR of a layer against
    BF16's, in dB.
    """

    shape: str
    size: str
    part: Part
    recipe: str
    tflops: float
    speed_over_bf16: float
    checked: float | None


class Operands(NamedTuple):
    """Arrays of a shape as one recipe reads them, and stored weights.

    x, the result's gradient and weights have one array for each product.
    """

    x: tuple[Any, Any]
    g: tuple[Any, Any]
    forward: Any
    dgrad: Any
    stored: Stored | None


def draw(shape: Shape) -> tuple[Array, Array, Array]:
    """Return BF16 x `[m, k]`, the result's gradient `[m, n]`, and weights `[e, k, n]`.

    Weights have a deviation of 0.02.
    """
    x_key, g_key, key = jax.random.split(jax.random.key(0), 3)
    weights = jax.lax.map(
        lambda key: 0.02 * _normal(key, shape.k, shape.n),
        jax.random.split(key, shape.experts),
    )
    x = _normal(x_key, shape.m, shape.k)
    return x, _normal(g_key, shape.m, shape.n), weights


def _normal(key: Array, *shape: int) -> Array:
    return jax.random.normal(key, shape).astype(jnp.bfloat16)


def group_sizes(shape: Shape, kind: Literal["drawn", "odd"]) -> np.ndarray:
    """Return random sizes of groups: a draw that adds up to m, or an odd one.

    The odd one has sizes of 0 and 1 and adds up to less.

    >>> sizes = group_sizes(Shape(100, 8, 8, 6), "odd")
    >>> sizes[:2].tolist(), int(sizes.min()), 80 < int(sizes.sum()) < 100
    ([0, 1], 0, True)
    """
    parts = np.random.default_rng(0).dirichlet(np.full(shape.experts, 4.0))
    rows = shape.m if kind == "drawn" else 0.95 * shape.m
    sizes = np.floor(parts * rows).astype(np.int32)
    if kind == "drawn":
        sizes[np.argmin(sizes)] += shape.m - sizes.sum()
        return sizes
    sizes[-1] += sizes[0] + sizes[1] - 1
    sizes[:2] = 0, 1
    return sizes


@partial(jax.jit, static_argnums=0)
def read(how: Recipe, x: Array, g: Array, w: Array) -> Operands:
    """Return the operands as a recipe reads them."""
    if how.stored is None:
        return Operands((x, x.T), (g, g.T), w.swapaxes(1, 2), w, None)
    stored = jax.lax.map(lambda w: quantize_weight(w, how, copies=how.copies)[0], w)
    of_x = quantize_operand(x, how.activation, how)
    of_g = quantize_operand(g, how.gradient, how)
    return Operands(
        (of_x.rows, of_x.columns),
        (of_g.rows, of_g.columns),
        stored.for_forward(how.stored.forward),
        stored.for_dgrad(how.stored.dgrad),
        stored,
    )


def product_of(part: Part, held: Operands) -> tuple[Any, tuple[Any, Any]]:
    """Return the jitted product of two operands and the sizes, and the operands."""
    function: Callable[..., Array] = grouped_matmul
    pair = held.g[0], held.dgrad
    if part == "forward":
        pair = held.x[0], held.forward
    elif part == "wgrad":
        function = grouped_weight_gradient
        pair = held.x[1], held.g[1]
    call = partial(function, out_dtype=jnp.bfloat16, accumulation="fast")
    return jax.jit(call), pair


def check(
    part: Part, function: Any, pair: tuple[Any, Any], sizes: np.ndarray, limit: float
) -> float:
    """Return the largest error over its bound, of some values, against float64.

    Raises:
      ArithmeticError: it is above 1, or not a number, or rows behind the last group are
        not zero.
    """
    out = np.asarray(function(*pair, jnp.asarray(sizes)))
    ends = np.cumsum(sizes)
    some = min(48, out.shape[-1])
    columns = np.sort(np.random.default_rng(0).choice(out.shape[-1], some, False))
    worst = 0.0
    # The largest group, the smallest, the second, which may have a single row, and the
    # last one.
    for group in {int(np.argmax(sizes)), int(np.argmin(sizes)), 1, len(sizes) - 1}:
        begin = ends[group] - sizes[group]
        if part == "wgrad":
            rows = np.arange(min(48, out.shape[1]))
            within = slice(begin, ends[group])
            got = out[group][rows]
            a = wide(pair[0], rows)[:, within]
            b = wide(pair[1], columns)[:, within]
        elif sizes[group]:
            few = [begin, ends[group] - 128, ends[group] - 1]
            rows = np.unique(np.maximum(few, begin))
            got = out[rows]
            a = wide(pair[0], rows)
            b = wide(pair[1], columns, group)
        else:
            continue
        exact = a @ b.T
        # the result is BF16
        bound = limit * (np.abs(a) @ np.abs(b).T) + 2.0**-8 * np.abs(exact) + 1e-30
        error = np.abs(got[:, columns].astype(np.float64) - exact)
        worst = max(worst, float(np.max(error / bound)))
    if part != "wgrad" and np.any(out[ends[-1] :].astype(np.float32)):
        worst = math.nan
    if not worst <= 1:
        raise ArithmeticError(
            f"{part}: the error is {worst} of its bound; the product is wrong, so it is"
            " not timed"
        )
    return worst


def wide(
    operand: Operand | Array, rows: np.ndarray, group: int | None = None
) -> np.ndarray:
    """Return some rows of a matrix, or of one of a stack, in float64."""
    whole = operand.dequantize() if isinstance(operand, Operand) else operand
    one = whole if group is None else whole[group]
    return np.asarray(one[rows]).astype(np.float64)


def passes(
    how: Recipe, x: Array, w: Array, g: Array, sizes: Array, stored: Any
) -> tuple[Array, ...]:
    """Return `(y, dx, dw)` of both passes of a layer."""
    product = partial(layer, group_sizes=sizes, recipe=how, quantized=stored)
    y, pull = jax.vjp(product, x, w)
    return y, *pull(g)


def measure(config: Config) -> Iterator[Row]:
    """Check and time every part at every shape, with all recipes in turn."""
    for name, shape in config.shapes.items():
        drawn = jax.jit(draw, static_argnums=0)(shape)
        held = {kind: read(RECIPES[kind], *drawn) for kind in config.recipes}
        for part in PARTS:
            operations = 2 * shape.m * shape.k * shape.n
            if part.startswith("layer"):
                operations *= 3
                candidates, checked = _layers(part, shape, drawn, held)
            else:
                candidates, checked = _products(part, shape, held)
            timed = config.interleaved(candidates)
            for kind, one in timed.items():
                yield Row(
                    **vars(one),
                    shape=name,
                    size=str(shape),
                    part=part,
                    recipe=kind,
                    tflops=operations / one.median_ms / 1e9,
                    checked=checked[kind],
                    speed_over_bf16=timed[BASELINE].median_ms / one.median_ms,
                )


Made = tuple[dict[str, Any], dict[str, float | None]]


def _products(part: Part, shape: Shape, held: dict[str, Operands]) -> Made:
    """Return the checked products of a part, and their errors over their bounds."""
    candidates: dict[str, Any] = {}
    checked: dict[str, float | None] = {}
    drawn = group_sizes(shape, "drawn")
    for kind, operands in held.items():
        function, pair = product_of(part, operands)
        limit = BF16_SUM_BOUND if kind == BASELINE else max(SUM_BOUND.values())
        odd = check(part, function, pair, group_sizes(shape, "odd"), limit)
        checked[kind] = max(odd, check(part, function, pair, drawn, limit))
        candidates[kind] = function, (*pair, jnp.asarray(drawn))
    return candidates, checked


def _layers(
    part: Part, shape: Shape, drawn: tuple[Array, ...], held: dict[str, Operands]
) -> Made:
    """Return the checked layers, and their lowest SNR against BF16's."""
    x, g, w = drawn
    sizes = jnp.asarray(group_sizes(shape, "drawn"))
    candidates: dict[str, Any] = {}
    calls = {}
    for kind, operands in held.items():
        stored = operands.stored if part == "layer" else None
        call = jax.jit(partial(passes, RECIPES[kind]))
        args = x, w, g, sizes, stored
        candidates[kind] = call, args
        calls[kind] = partial(call, *args)
    return candidates, compare_outputs(calls, LEAST_SNR_DB)


# The command and its table
# --------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add shapes and recipes."""
    parser.add_argument(
        "--shapes", help=f"of {', '.join(SHAPES)} (default: all on a GPU)"
    )
    parser.add_argument(
        "--recipes",
        help=f"of {', '.join(RECIPES)} (default: {USUAL}); {BASELINE} always runs",
    )


def configure(options: argparse.Namespace) -> Config:
    """Return the settings of a command line; raise `ValueError` for an unknown name."""
    wanted = chosen_of("recipes", options.recipes or USUAL, tuple(RECIPES))
    recipes = tuple(name for name in RECIPES if name in (BASELINE, *wanted))
    if options.smoke or jax.default_backend() != "gpu":
        return Config(SMOKE, recipes, rounds=2, calls=2)
    names = chosen_of("shapes", options.shapes, tuple(SHAPES))
    return Config({name: SHAPES[name] for name in names}, recipes)


def table(result: Result) -> str:
    """Return the page's table, one line per shape and recipe."""
    found = result.by("shape", "part", "recipe")
    lines = []
    for shape, size, kind in result.distinct("shape", "size", "recipe"):
        form = "{tflops:,.0f} · **{speed_over_bf16:.2f}**"
        if kind == BASELINE:
            form = "{tflops:,.0f}"
        cells = [shown(found.get((shape, part, kind)), form) for part in PARTS]
        lines.append([f"{shape}, {size}", f"`{kind}`", *cells])
    titles = ["rows × k × n, experts", "recipe", *PARTS]
    return (
        f"{markdown_table(titles, lines)}\n\nTFLOP/s, and the speedup over BF16 by the"
        " same door. A layer is three products with the quantization of x and of the"
        " result's gradient."
    )


BENCHMARK = Benchmark(
    "grouped", __doc__, configure, measure, table, options=add_options
)

if __name__ == "__main__":
    BENCHMARK.command()
