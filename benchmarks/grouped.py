"""Grouped products, of layers with a mixture of experts: BF16 and FP8 by the same door,
alone and with quantization.

    python -m benchmarks.grouped --json
    python -m benchmarks.grouped --shapes "olmoe w13,olmoe w2" --parts layer

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
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import timing
from benchmarks.harness import Benchmark
from benchmarks.options import chosen_of
from benchmarks.products import BF16_SUM_BOUND
from benchmarks.records import Result
from benchmarks.tables import markdown_table
from benchmarks.train_step import check_outputs
from pallas_kernels.grouped_matmul.api import grouped_matmul, grouped_weight_gradient
from pallas_kernels.matmul.api import SUM_BOUND
from pallas_kernels.operands import Accumulation, Block, Operand
from tcfp_jax.products import grouped_matmul as layer
from tcfp_jax.products.fp8_weights import quantize_operand
from tcfp_jax.recipes import Recipe, recipe
from tcfp_jax.weights.quantization import quantize_weight
from tcfp_jax.weights.stored import Stored

NAME = "grouped"
Part = Literal["forward", "dgrad", "wgrad", "layer", "layer, weights too"]
PARTS: tuple[Part, ...] = get_args(Part)
BASELINE = "bf16"
RECIPES = {name: recipe(name) for name in (BASELINE, "tcfp12_single", "rowwise")}
RECIPES["tcfp12_single_128"] = recipe("tcfp12_single", block=128)
# no product reads a transposed weight
RECIPES["tcfp12_single_both"] = recipe("tcfp12_single", copies="both")
USUAL = (BASELINE, "tcfp12_single")
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
class Config:
    """Settings of a run."""

    shapes: dict[str, Shape]
    parts: tuple[Part, ...] = PARTS
    recipes: tuple[str, ...] = USUAL
    accumulation: Accumulation = "fast"
    rounds: int = 5
    calls: int = 5
    seed: int = 0


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
    """Arrays of a shape: x, weights and the result's gradient as one recipe reads them,
    and stored weights.
    """

    x: tuple[Any, Any]
    g: tuple[Any, Any]
    forward: Any
    dgrad: Any
    stored: Stored | None


def draw(shape: Shape, seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return BF16 x `[m, k]`, the result's gradient `[m, n]`, and weights `[e, k, n]`
    of deviation 0.02.
    """
    keys = jax.random.split(jax.random.key(seed), 3)
    normal = lambda key, *shape: jax.random.normal(key, shape).astype(jnp.bfloat16)
    weights = jax.lax.map(
        lambda key: 0.02 * normal(key, shape.k, shape.n),
        jax.random.split(keys[2], shape.experts),
    )
    return normal(keys[0], shape.m, shape.k), normal(keys[1], shape.m, shape.n), weights


def group_sizes(
    shape: Shape, kind: Literal["drawn", "odd"], seed: int = 0
) -> np.ndarray:
    """Return sizes of groups: a random draw that adds up to m, or one with sizes of 0
    and 1 that adds up to less.

    >>> sizes = group_sizes(Shape(100, 8, 8, 6), "odd")
    >>> sizes[:2].tolist(), int(sizes.min()), 80 < int(sizes.sum()) < 100
    ([0, 1], 0, True)
    """
    parts = np.random.default_rng(seed).dirichlet(np.full(shape.experts, 4.0))
    sizes = np.floor(parts * (shape.m if kind == "drawn" else 0.95 * shape.m)).astype(
        np.int32
    )
    if kind == "drawn":
        sizes[np.argmin(sizes)] += shape.m - sizes.sum()
        return sizes
    sizes[-1] += sizes[0] + sizes[1] - 1
    sizes[:2] = 0, 1
    return sizes


@functools.partial(jax.jit, static_argnums=0)
def read(how: Recipe, x: jax.Array, g: jax.Array, w: jax.Array) -> Operands:
    """Return the operands as a recipe reads them."""
    if how.stored is None:
        return Operands((x, x.T), (g, g.T), w.swapaxes(1, 2), w, None)
    pair = lambda value, dtype: (lambda made: (made.rows, made.columns))(
        quantize_operand(value, dtype, how)
    )
    one = lambda w: quantize_weight(w, how, copies=how.copies)[0]
    stored = jax.lax.map(one, w)
    halves = how.stored
    return Operands(
        pair(x, how.activation),
        pair(g, how.gradient),
        stored.for_forward(halves.forward),
        stored.for_dgrad(halves.dgrad),
        stored,
    )


def product_of(
    part: Part, config: Config, held: Operands
) -> tuple[Callable[..., jax.Array], tuple[Any, Any]]:
    """Return the jitted product of a part, a function of two operands and the sizes,
    and the operands.
    """
    options: Any = dict(out_dtype=jnp.bfloat16, accumulation=config.accumulation)
    if part == "wgrad":
        return jax.jit(functools.partial(grouped_weight_gradient, **options)), (
            held.x[1],
            held.g[1],
        )
    pair = (held.x[0], held.forward) if part == "forward" else (held.g[0], held.dgrad)
    return jax.jit(functools.partial(grouped_matmul, **options)), pair


def check(
    part: Part,
    function: Any,
    pair: tuple[Any, Any],
    sizes: np.ndarray,
    limit: float,
    seed: int = 0,
) -> float:
    """Return the largest error over its bound, on some rows and columns, against
    float64.

    Raises:
      ArithmeticError: it is above 1, or not a number, or rows behind the last group are
        not zero.
    """
    out, random = (
        np.asarray(function(*pair, jnp.asarray(sizes))),
        np.random.default_rng(seed),
    )
    ends = np.cumsum(sizes)
    begins = ends - sizes
    worst, columns = (
        0.0,
        np.sort(random.choice(out.shape[-1], min(48, out.shape[-1]), replace=False)),
    )
    # The largest group, the smallest, the second, which may have a single row, and the
    # last one.
    for group in {int(np.argmax(sizes)), int(np.argmin(sizes)), 1, len(sizes) - 1}:
        if part == "wgrad":
            rows, within = (
                np.arange(min(48, out.shape[1])),
                slice(begins[group], ends[group]),
            )
            got, a, b = (
                out[group][rows],
                wide(pair[0], rows)[:, within],
                wide(pair[1], columns)[:, within],
            )
        elif sizes[group]:
            rows = np.unique(
                np.clip(
                    [begins[group], ends[group] - 128, ends[group] - 1],
                    begins[group],
                    None,
                )
            )
            got, a, b = out[rows], wide(pair[0], rows), wide(pair[1], columns, group)
        else:
            continue
        exact = a @ b.T
        # the result is BF16
        bound = limit * (np.abs(a) @ np.abs(b).T) + 2.0**-8 * np.abs(exact) + 1e-30
        worst = max(
            worst,
            float(np.max(np.abs(got[:, columns].astype(np.float64) - exact) / bound)),
        )
    if part != "wgrad" and np.any(out[ends[-1] :].astype(np.float32)):
        worst = math.nan
    if not worst <= 1:
        raise ArithmeticError(
            f"{part}: the error is {worst} of its bound; the product is wrong, so it is"
            " not timed"
        )
    return worst


def wide(
    operand: Operand | jax.Array, rows: np.ndarray, group: int | None = None
) -> np.ndarray:
    """Return some rows of a matrix, or of one of a stack, in float64; the host reads
    the array once.
    """
    take = lambda array: np.asarray(array)[() if group is None else group]
    if not isinstance(operand, Operand):
        return take(operand)[rows].astype(np.float64)
    halves = [half for half in (operand.values, operand.lo) if half is not None]
    scale, scaling = take(operand.scale).astype(np.float64), operand.scaling
    if isinstance(scaling, Block):
        lines = rows // scaling.size if scaling.tile == "square" else rows
        scale = np.repeat(scale[lines], scaling.size, axis=1)[
            :, : operand.values.shape[-1]
        ]
    elif scale.ndim:
        scale = scale[rows, None]
    return sum(take(half)[rows].astype(np.float64) for half in halves) * scale


def layer_of(how: Recipe) -> Callable[..., tuple[jax.Array, ...]]:
    """Return the jitted forward and backward pass
    `(x, w, g, sizes, stored) -> (y, dx, dw)`.
    """

    @jax.jit
    def passes(
        x: jax.Array, w: jax.Array, g: jax.Array, sizes: jax.Array, stored: Any
    ) -> tuple[jax.Array, ...]:
        y, pull = jax.vjp(
            lambda x, w: layer(x, w, sizes, recipe=how, quantized=stored), x, w
        )
        return y, *pull(g)

    return passes


def measure(config: Config) -> Iterator[Row]:
    """Check and time every part at every shape, with all recipes in turn."""
    for name, shape in config.shapes.items():
        drawn = jax.jit(draw, static_argnums=(0, 1))(shape, config.seed)
        held = {kind: read(RECIPES[kind], *drawn) for kind in config.recipes}
        for part in config.parts:
            candidates, checked = (
                make_layers if part.startswith("layer") else make_products
            )(part, config, shape, drawn, held)
            timed = timing.time_interleaved(
                candidates, rounds=config.rounds, calls=config.calls
            )
            operations = (
                2 * shape.m * shape.k * shape.n * (3 if part.startswith("layer") else 1)
            )
            for kind, one in timed.items():
                yield Row(
                    **dataclasses.asdict(one),
                    shape=name,
                    size=str(shape),
                    part=part,
                    recipe=kind,
                    tflops=operations / one.median_ms / 1e9,
                    checked=checked[kind],
                    speed_over_bf16=timed[BASELINE].median_ms / one.median_ms,
                )


Arrays = tuple[jax.Array, jax.Array, jax.Array]
Made = tuple[dict[str, Any], dict[str, float | None]]


def make_products(
    part: Part, config: Config, shape: Shape, drawn: Arrays, held: dict[str, Operands]
) -> Made:
    """Return the checked products of a part, with their arguments, and their errors
    over their bounds.
    """
    candidates: dict[str, Any] = {}
    checked: dict[str, float | None] = {}
    for kind in config.recipes:
        function, pair = product_of(part, config, held[kind])
        limit = BF16_SUM_BOUND if kind == BASELINE else max(SUM_BOUND.values())
        sizes = {
            case: group_sizes(shape, case, config.seed) for case in ("odd", "drawn")
        }
        checked[kind] = max(
            check(part, function, pair, one, limit) for one in sizes.values()
        )
        candidates[kind] = function, (*pair, jnp.asarray(sizes["drawn"]))
    return candidates, checked


def make_layers(
    part: Part, config: Config, shape: Shape, drawn: Arrays, held: dict[str, Operands]
) -> Made:
    """Return the checked layers, with their arguments, and their lowest SNR against
    BF16's.
    """
    (x, g, w), sizes = drawn, jnp.asarray(group_sizes(shape, "drawn", config.seed))
    candidates: dict[str, Any] = {}
    checked: dict[str, float | None] = {}
    reference = None
    for kind in config.recipes:
        passes, args = (
            layer_of(RECIPES[kind]),
            (x, w, g, sizes, held[kind].stored if part == "layer" else None),
        )
        outputs = passes(*args)
        checked[kind] = (
            None
            if reference is None
            else check_outputs(kind, reference, outputs, least=LEAST_SNR_DB)
        )
        reference = outputs if reference is None else reference
        candidates[kind] = passes, args
    return candidates, checked


# The command and its table
# --------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add shapes, parts and recipes."""
    parser.add_argument(
        "--shapes", help=f"of {', '.join(SHAPES)} (default: all on a GPU)"
    )
    parser.add_argument("--parts", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument(
        "--recipes",
        help=f"of {', '.join(RECIPES)} (default: {USUAL[1]}); {BASELINE} always runs",
    )
    parser.add_argument(
        "--accumulation",
        choices=get_args(Accumulation),
        default="fast",
        help="(default: fast)",
    )


def configure(options: argparse.Namespace) -> Config:
    """Return the settings of a command line; raise `ValueError` for an unknown name."""
    parts = chosen_of("parts", options.parts, PARTS)
    wanted = chosen_of("recipes", options.recipes or ",".join(USUAL), tuple(RECIPES))
    recipes = tuple(name for name in RECIPES if name in (BASELINE, *wanted))
    if options.smoke or jax.default_backend() != "gpu":
        return Config(SMOKE, parts, recipes, options.accumulation, rounds=2, calls=2)
    shapes = {
        name: SHAPES[name]
        for name in chosen_of("shapes", options.shapes, tuple(SHAPES))
    }
    return Config(shapes, parts, recipes, options.accumulation)


def table(result: Result) -> str:
    """Return the page's table, one line per shape and recipe."""
    lines, found = [], result.by("shape", "part", "recipe")
    for shape, size, kind in result.distinct("shape", "size", "recipe"):
        cells = []
        for part in PARTS:
            row = found.get((shape, part, kind))
            rate = "–" if row is None else f"{row['tflops']:,.0f}"
            cells.append(
                rate
                if kind == BASELINE or row is None
                else f"{rate} · **{row['speed_over_bf16']:.2f}**"
            )
        lines.append([f"{shape}, {size}", f"`{kind}`", *cells])
    titles = ["rows × k × n, experts", "recipe", *PARTS]
    return (
        f"{markdown_table(titles, lines)}\n\nTFLOP/s, and the speed over BF16 by the"
        " same door. A layer is three products with the quantization of x and of the"
        " result's gradient."
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
