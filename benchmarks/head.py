"""Time and memory of a head with its loss, forward and backward.

    python -m benchmarks.head --json

It compares `losses.cross_entropy` with logits that are kept.

"bf16, logits kept" is JAX alone: a BF16 product, a softmax cross entropy in float32,
and autodiff. The other rows are `tcfp_jax.losses.cross_entropy` with a recipe, whose
weights are quantized beforehand, as an optimizer leaves them. Each returns the loss and
the gradients of x (bfloat16) and of the table (float32). First they are compared with
float32 on fewer tokens and ids.
"""

import argparse
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import tcfp_jax
from benchmarks import timing
from benchmarks.harness import Benchmark
from benchmarks.records import Result, cells
from tcfp_jax.losses import Loss, loss_of
from tcfp_jax.recipes import Recipe
from tcfp_jax.weights.quantization import quantize_weight

KEPT = "bf16, logits kept"
RECIPES = ("bf16", "tensorwise", "tcfp12_single", "rowwise")
# Operands of eight bits leave 23 dB and more of a gradient; a wrong scale or operand
# gives less than 3.
LEAST_SNR_DB = {KEPT: 35.0, "bf16": 35.0} | dict.fromkeys(RECIPES[1:], 22.0)
Heads = dict[str, tuple[Any, tuple[Any, ...]]]  # name: (jitted function, arguments)


@dataclass(frozen=True)
class Config(timing.Repetitions):
    """Settings of a run; `checked` are the sizes of the comparison."""

    sizes: tuple[int, int, int] = (16384, 2048, 128_256)  # tokens, width, ids
    # E5M2 rounds a 1792nd by 9 %.
    checked: tuple[int, int, int] = (1792, 512, 8192)


SMOKE = Config((64, 32, 256), (64, 32, 256), rounds=2, calls=1)


@dataclass(frozen=True)
class Row(timing.Timing):
    """One way to compute it.

    `speed_over_bf16` is over the first row, `worst_snr_db` the lower one of both
    gradients against float32, and `arena_bytes` the temporary memory of the program.
    """

    head: str
    sizes: tuple[int, int, int]
    speed_over_bf16: float
    worst_snr_db: float
    arena_bytes: int


def draw(sizes: tuple[int, int, int]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return activations, a table and targets."""
    tokens, width, ids = sizes
    x_key, w_key, key = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(x_key, (tokens, width)).astype(jnp.bfloat16)
    w = jax.random.normal(w_key, (width, ids)) * 0.02
    return x, w, jax.random.randint(key, (tokens,), 0, ids)


def kept(x: jax.Array, w: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the mean loss as JAX computes it, with logits in the dtype of x."""
    logits = (x @ w.astype(x.dtype)).astype(jnp.float32)
    chosen = jnp.arange(w.shape[1]) == targets[:, None]
    picked = jnp.sum(jnp.where(chosen, logits, 0.0), axis=-1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


_with_gradients = functools.partial(jax.value_and_grad, argnums=(0, 1))


def heads(sizes: tuple[int, int, int]) -> Heads:
    """Return the jitted functions of (loss, gradients), with their arguments."""
    x, w, targets = draw(sizes)
    found: Heads = {KEPT: (jax.jit(_with_gradients(kept)), (x, w, targets))}
    for name in RECIPES:
        recipe = tcfp_jax.recipe(name)
        stored = None
        if recipe.stored is not None:
            stored = jax.jit(functools.partial(_quantized, recipe))(w)
        loss = functools.partial(_loss, Loss(recipe))
        found[name] = jax.jit(_with_gradients(loss)), (x, w, targets, stored)
    return found


def _quantized(recipe: Recipe, w: jax.Array) -> Any:
    return quantize_weight(w, recipe)[0]


def _loss(
    asked: Loss, x: jax.Array, w: jax.Array, targets: jax.Array, stored: Any
) -> jax.Array:
    shares = jnp.full(targets.shape, 1 / targets.size, jnp.float32)
    return loss_of(asked, x, w, stored, targets, shares)[0]


def check(sizes: tuple[int, int, int]) -> dict[str, float]:
    """Return the lower SNR of both gradients of every head against float32.

    Raises:
      ArithmeticError: one is below `LEAST_SNR_DB`, or a loss is off by a hundredth.
    """
    x, w, targets = draw(sizes)
    with jax.default_matmul_precision("highest"):
        exact = jax.jit(_with_gradients(kept))(x.astype(jnp.float32), w, targets)
    worst = {}
    for name, (function, args) in heads(sizes).items():
        loss, gradients = function(*args)
        worst[name] = min(map(_snr_db, exact[1], gradients))
        if not worst[name] >= LEAST_SNR_DB[name] or not abs(loss - exact[0]) < 0.01:
            raise ArithmeticError(
                f"{name}: {worst[name]:.1f} dB, loss {loss} for {exact[0]}; nothing is"
                " timed of it"
            )
    return worst


def _snr_db(exact: jax.Array, got: jax.Array) -> float:
    error = jnp.linalg.norm(got.astype(jnp.float32) - exact)
    return float(20 * jnp.log10(jnp.linalg.norm(exact) / error))


def measure(config: Config) -> Iterator[Row]:
    """Check and time every head."""
    worst = check(config.checked)
    found = heads(config.sizes)
    timed = config.by_wall_clock(found)
    for name, (function, args) in found.items():
        compiled = function.lower(*args).compile()
        yield Row(
            **vars(timed[name]),
            head=name,
            sizes=config.sizes,
            worst_snr_db=worst[name],
            speed_over_bf16=timed[KEPT].median_ms / timed[name].median_ms,
            arena_bytes=compiled.memory_analysis().temp_size_in_bytes,
        )


def configure(options: argparse.Namespace) -> Config:
    """Return the settings of a command line."""
    if jax.default_backend() == "gpu" and not options.smoke:
        return Config(calls=3)
    return SMOKE


def table(result: Result) -> str:
    """Return the page's table, one line per head."""
    columns = {
        "": "`{head}`",
        "ms": "{median_ms:.1f}",
        "speedup over BF16": "**{speed_over_bf16:.2f}**",
        "arena, GB": "{arena_gigabytes:.1f}",
        "worst gradient, dB": "{worst_snr_db:.1f}",
    }
    tokens, width, ids = result.rows[0]["sizes"]
    return (
        f"{cells(result.rows, columns)}\n\nLoss and gradients of {tokens} tokens of"
        f" width {width} with {ids} ids, by the wall clock. Decibels are of fewer"
        " tokens and ids, against float32."
    )


BENCHMARK = Benchmark("head", __doc__, configure, measure, table)

if __name__ == "__main__":
    BENCHMARK.command()
