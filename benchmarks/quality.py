"""Precision of each format on four distributions.

    python -m benchmarks.quality --json

The signal-to-noise ratio is `10 log10(sum x^2 / sum (x - Q(x))^2)`, in float64 on the
host. Four more questions have rows: the output of a product (the activation limits it,
not the residual weight), error feedback of a weight that stands still, and of one that
moves for 3000 steps, and one channel a thousand times as large as the others, with one
scale or one per block.
"""

import argparse
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from benchmarks.harness import Benchmark
from benchmarks.products import compare
from benchmarks.records import Result, cells, markdown_table, shown
from pallas_kernels.operands import BLOCK_SIZES
from tcfp_jax import dequantize_tcfp12, matmul, quantize, quantize_tcfp12, split
from tcfp_jax.recipes import recipe
from tcfp_jax.weights.quantization import quantize_weight

OUTLIER_FACTOR = 1000.0
DISTRIBUTIONS = ("gaussian", "uniform", "heavy-tailed", "outlier-ridden")


@dataclass(frozen=True)
class Config:
    """Sizes of a run.

    Attributes:
      size: Formats are measured on `[size, size]`.
      tokens: Products are measured on activations `[tokens, size]`.
      moving_size: Error feedback is measured on `[moving_size, moving_size]`.
      still_steps, moving_steps: Optimizer steps of the two questions about error
        feedback.
      move: Standard deviation of a step of the moving weight, whose first value has
        deviation 1.
      reported_steps: Steps of the moving weight in the table of formats.
      blocks: Sizes of blocks, measured next to one scale per tensor.
    """

    size: int = 4096
    tokens: int = 256
    moving_size: int = 512
    still_steps: int = 200
    moving_steps: int = 3000
    reported_steps: tuple[int, ...] = (1, 100, 1000)
    move: float = 1e-3
    blocks: tuple[int, ...] = BLOCK_SIZES[::-1]
    seed: int = 0


@dataclass(frozen=True)
class Row:
    """One answer.

    Attributes:
      question: "format" rows compare tensors, "output" rows products, the others error
        feedback.
      snr_db, mse: Precision of the values; `mse` is in units of the data, whose
        distributions differ in size.
      bits: Stored bits per value, scales included.
      ratio: RMS error of the mean over all steps of a "still weight", divided by that
        of one step.
    """

    question: Literal[
        "format", "output", "still weight", "moving weight", "outlier channel"
    ]
    name: str
    distribution: str
    snr_db: float
    mse: float
    bits: float | None = None
    ratio: float | None = None


def draw(distribution: str, shape: tuple[int, ...], seed: int) -> Array:
    """Return random float32 values of a named distribution.

    "gaussian": N(0, 1). "uniform": on [-1, 1). "heavy-tailed": Student's t with 3
    degrees of freedom. "outlier-ridden": N(0, 1) with one value in a thousand a hundred
    times larger.
    """
    key, other = jax.random.split(jax.random.fold_in(jax.random.key(seed), 7))
    if distribution == "gaussian":
        return jax.random.normal(key, shape)
    if distribution == "uniform":
        return jax.random.uniform(key, shape, minval=-1.0, maxval=1.0)
    if distribution == "heavy-tailed":
        # t = z / sqrt(chi2_3 / 3). Three normals replace jax.random.t, whose gamma
        # sampler loops for seconds.
        chi_square = jnp.sum(jax.random.normal(other, (3, *shape)) ** 2, axis=0)
        return jax.random.normal(key, shape) / jnp.sqrt(chi_square / 3)
    outliers = jax.random.bernoulli(other, 1e-3, shape)
    return jax.random.normal(key, shape) * jnp.where(outliers, 100.0, 1.0)


# Formats
# --------------------------------------------------------------------------------------


def _stochastic_split(x: Array) -> Any:
    return split(x, key=jax.random.key(1))


_dequantize = operator.methodcaller("dequantize")
_nf4 = partial(quantize_tcfp12, residual="nf4")
# name: (store, restore), compiled separately, so that no compiler cancels the rounding
# between them.
FORMATS: dict[str, tuple[Callable[[Array], Any], Callable[[Any], Array]]] = {
    "BF16": (jnp.bfloat16, jnp.float32),
    "E4M3": (quantize, _dequantize),
    "E5M2": (partial(quantize, dtype=jnp.float8_e5m2), _dequantize),
    "TCFP-12 linear": (quantize_tcfp12, dequantize_tcfp12),
    "TCFP-12 NF4": (_nf4, dequantize_tcfp12),
    "TCFP-12 NF4 sigma": (partial(_nf4, scale="sigma"), dequantize_tcfp12),
    "hi+lo": (split, _dequantize),
    "hi+lo, stochastic lo": (_stochastic_split, _dequantize),
}


def measure_formats(config: Config) -> Iterator[Row]:
    """Measure every format on every distribution."""
    for distribution in DISTRIBUTIONS:
        x = draw(distribution, (config.size, config.size), config.seed)
        host = np.asarray(x)
        for name, (store, restore) in FORMATS.items():
            stored = jax.block_until_ready(jax.jit(store)(x))
            precision = compare(host, jax.jit(restore)(stored))
            size = sum(leaf.nbytes for leaf in jax.tree.leaves(stored))
            yield Row("format", name, distribution, *precision, bits=8 * size / x.size)


# Error feedback
# --------------------------------------------------------------------------------------


def _feed_back(w: Array, error: Array) -> tuple[Array, Array | None]:
    """Return (the quantized weight, its error) by `tcfp_jax.error_feedback`'s rule."""
    stored, left = quantize_weight(w, recipe("tcfp12"), error=error, copies="one")
    return stored.dequantize(), left


@partial(jax.jit, static_argnames="steps")
def move_weight(
    w: Array, error: Array, key: Array, size: float, *, steps: int
) -> tuple[Any, Any, Any]:
    """Return (w, error, quantized w) after a random walk with error feedback."""

    def step(carry: Any, t: Array) -> tuple[Any, None]:
        w, error, _ = carry
        w = w + size * jax.random.normal(jax.random.fold_in(key, t), w.shape)
        value, error = _feed_back(w, error)
        return (w, error, value), None

    return lax.scan(step, (w, error, jnp.zeros_like(w)), jnp.arange(steps))[0]


def measure_moving(config: Config, distribution: str) -> Iterator[Row]:
    """Measure single steps of a moving weight with error feedback.

    Theory puts them 3 dB below one split's.
    """
    shape = (config.moving_size, config.moving_size)
    w = draw(distribution, shape, config.seed)
    key = jax.random.key(config.seed + 1)
    error = jnp.zeros(shape)
    done = 0
    for step in (*config.reported_steps, config.moving_steps):
        of_step = jax.random.fold_in(key, step)
        w, error, value = move_weight(w, error, of_step, config.move, steps=step - done)
        done = step
        name = f"hi+lo, error feedback, step {step}"
        precision = compare(w, value)
        if step in config.reported_steps:
            yield Row("format", name, distribution, *precision, bits=48.0)
        elif distribution == "gaussian":
            yield Row("moving weight", name, distribution, *precision)


@partial(jax.jit, static_argnames="steps")
def _mean_of_still(w: Array, *, steps: int) -> tuple[Array, Array]:
    def step(carry: Any, _: None) -> tuple[Any, None]:
        error, total = carry
        value, error = _feed_back(w, error)
        return (error, total + (value - w)), None

    first, _ = _feed_back(w, jnp.zeros_like(w))
    (_, total), _ = lax.scan(step, (jnp.zeros_like(w), jnp.zeros_like(w)), length=steps)
    return first, total / steps


def measure_still(config: Config) -> list[Row]:
    """Measure the mean of a still weight's quantizations.

    Theory says that its error falls like 1/steps.
    """
    w = draw("gaussian", (config.moving_size, config.moving_size), config.seed)
    first, mean_error = _mean_of_still(w, steps=config.still_steps)
    mean = np.asarray(w, np.float64) + np.asarray(mean_error, np.float64)
    snr, mse = compare(w, mean)
    _, mse_of_one = compare(w, first)
    name = f"hi+lo, error feedback, mean of {config.still_steps} steps"
    return [
        Row("still weight", name, "gaussian", snr, mse, ratio=(mse / mse_of_one) ** 0.5)
    ]


# Products
# --------------------------------------------------------------------------------------


def measure_outputs(config: Config) -> list[Row]:
    """Measure float32 `x @ w` against float64, for each pair of operand formats."""
    x = draw("gaussian", (config.tokens, config.size), config.seed + 2)
    w = draw("gaussian", (config.size, config.size), config.seed + 3)
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)

    def product(name: str, x: Array) -> Array:
        return jax.jit(partial(matmul, recipe=name))(x, w)

    # A quantized activation times an unquantized weight: both fit in BF16, whose
    # products are exact in float32.
    x_e4m3 = jax.jit(_dequantize)(jax.jit(quantize)(x))
    pairs = {
        "E4M3 x hi+lo": product("tcfp12", x),
        "E4M3 x E4M3": product("tensorwise", x),
        "E4M3 x BF16": product("bf16", x_e4m3),
        "BF16 x BF16": product("bf16", x),
    }
    return [
        Row("output", name, "gaussian", *compare(exact, out))
        for name, out in pairs.items()
    ]


def measure_outlier_channel(config: Config) -> Iterator[Row]:
    """Measure all channels except one that is a thousand times as large.

    Blocks run along the channels.
    """
    x = draw("gaussian", (config.tokens, config.size), config.seed + 4)
    outlier = config.size // 3
    x = x.at[:, outlier].mul(OUTLIER_FACTOR)
    others = np.delete(np.asarray(x), outlier, axis=1)
    forms: dict[str, dict[str, Any]] = {"one scale": {}}
    for tile in ("vector", "square"):
        for block in config.blocks:
            forms[f"{tile}s of {block}"] = {"block": block, "tile": tile}
    stores: dict[str, Callable[..., Any]] = {"E4M3": quantize, "hi+lo": split}
    for name, store in stores.items():
        for form, options in forms.items():
            stored = jax.jit(partial(store, **options))(x)
            value = np.asarray(jax.jit(_dequantize)(stored))
            precision = compare(others, np.delete(value, outlier, axis=1))
            yield Row("outlier channel", f"{name}, {form}", "gaussian", *precision)


EXPECTED_DB = {"BF16": 55.6, "E4M3": 31.5, "E5M2": 25.5, "hi+lo": 64.0}


def check(rows: list[Row]) -> None:
    """Compare formats with theory on N(0, 1), before anything is written.

    Raises:
      ArithmeticError: a format is far from its precision: the residual is gone, or a
        cast is wrong.
    """
    for row in rows:
        expected = EXPECTED_DB.get(row.name)
        if row.distribution != "gaussian" or expected is None:
            continue
        if not abs(row.snr_db - expected) < 1.5:
            raise ArithmeticError(
                f"{row.name} has {row.snr_db:.1f} dB on N(0, 1), not about {expected}"
            )


def measure(config: Config) -> Iterator[Row]:
    """Measure all questions."""
    formats = list(measure_formats(config))
    check(formats)
    yield from formats
    for distribution in DISTRIBUTIONS:
        yield from measure_moving(config, distribution)
    yield from measure_outputs(config)
    yield from measure_still(config)
    yield from measure_outlier_channel(config)


def configure(options: argparse.Namespace) -> Config:
    """Return the settings of a command line."""
    if options.smoke:
        return Config(
            size=128,
            tokens=32,
            moving_size=128,
            still_steps=200,
            moving_steps=20,
            reported_steps=(10,),
            blocks=(32,),
        )
    # Thousands of steps take a GPU seconds, but a CPU minutes.
    on_cpu = jax.default_backend() == "cpu"
    return Config(moving_size=512 if on_cpu else Config.size)


def table(result: Result) -> str:
    """Return the page's tables: formats, products, a channel, and error feedback."""
    rows = result.by("question", "name", "distribution")
    lines = []
    for row in result.rows:
        if row["question"] == "format" and row["distribution"] == DISTRIBUTIONS[0]:
            found = [rows["format", row["name"], of] for of in DISTRIBUTIONS]
            line = [row["name"], shown(row, "{bits:.4g}")]
            lines.append(line + [shown(one, "{snr_db:.1f}") for one in found])
    questions = {row["question"]: row for row in result.rows}
    config = result.config
    single = rows["output", "E4M3 x E4M3", "gaussian"]["snr_db"]
    residual = rows["output", "E4M3 x hi+lo", "gaussian"]["snr_db"]
    bf16 = rows["output", "BF16 x BF16", "gaussian"]["snr_db"]
    titles = ["SNR in dB", "bits per value", *DISTRIBUTIONS]
    return (
        f"{markdown_table(titles, lines)}\n\nTensors have {config['size']}² values,"
        f" those of error feedback {config['moving_size']}²; the bits of error feedback"
        " include a float32 error buffer. Scales are per tensor, except TCFP-12's, so"
        " larger outliers cost more."
        f"\n\n{_list('output', 'activation × weight', result)}\n\nSo against a single"
        f" FP8 weight the residual buys {residual - single:.1f} dB of output, and"
        f" {bf16 - residual:.1f} dB are missing to BF16's: the activation limits it."
        f"\n\n{_list('outlier channel', 'stored as', result)}\n\nThe mean of"
        f" {config['still_steps']} steps of a weight that stands still is off by"
        f" {questions['still weight']['ratio']:.4f} of one step's RMS error; step"
        f" {config['moving_steps']} of a weight that moves has"
        f" {questions['moving weight']['snr_db']:.1f} dB."
    )


def _list(question: str, title: str, result: Result) -> str:
    rows = [row for row in result.rows if row["question"] == question]
    return cells(rows, {title: "{name}", "SNR in dB": "{snr_db:.1f}"})


BENCHMARK = Benchmark("quality", __doc__, configure, measure, table)

if __name__ == "__main__":
    BENCHMARK.command()
