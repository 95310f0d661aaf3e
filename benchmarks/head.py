"""Time and memory of a head with its loss, forward and backward: `losses.cross_entropy`
against logits that are kept.

    python -m benchmarks.head --json

"bf16, logits kept" is JAX alone: a BF16 product, a softmax cross entropy in float32,
and autodiff. The other rows are `tcfp_jax.losses.cross_entropy` with a recipe, whose
weights are quantized beforehand, as an optimizer leaves them. Each returns the loss and
the gradients of x (bfloat16) and of the table (float32). First they are compared with
float32 on fewer tokens and ids.
"""

import argparse
import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import tcfp_jax
from benchmarks import timing
from benchmarks.harness import Benchmark
from benchmarks.records import Result
from benchmarks.tables import markdown_table
from tcfp_jax.losses import Loss, loss_of
from tcfp_jax.weights.quantization import quantize_weight

NAME = "head"
KEPT = "bf16, logits kept"
RECIPES = ("bf16", "tensorwise", "tcfp12_single", "rowwise")
# Operands of eight bits leave 23 dB and more of a gradient; a wrong scale or operand
# gives less than 3.
LEAST_SNR_DB = {KEPT: 35.0, "bf16": 35.0} | dict.fromkeys(RECIPES[1:], 20.0)
Heads = dict[str, tuple[Any, tuple[Any, ...]]]  # name: (jitted function, arguments)


@dataclass(frozen=True)
class Config:
    """Settings of a run; `checked` are the sizes of the comparison."""

    sizes: tuple[int, int, int] = (16384, 2048, 128_256)  # tokens, width, ids
    checked: tuple[int, int, int] = (2048, 512, 8192)
    rounds: int = 5
    calls: int = 3


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
    (tokens, width, ids), keys = sizes, jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (tokens, width)).astype(jnp.bfloat16)
    return (
        x,
        jax.random.normal(keys[1], (width, ids)) * 0.02,
        jax.random.randint(keys[2], (tokens,), 0, ids),
    )


def kept(x: jax.Array, w: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the mean loss as JAX computes it, with logits in the dtype of x."""
    logits = (x @ w.astype(x.dtype)).astype(jnp.float32)
    picked = jnp.sum(
        jnp.where(jnp.arange(w.shape[1]) == targets[:, None], logits, 0.0), axis=-1
    )
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def heads(sizes: tuple[int, int, int]) -> Heads:
    """Return the jitted functions that return (loss, gradients), with their
    arguments.
    """
    x, w, targets = draw(sizes)
    found: Heads = {
        KEPT: (jax.jit(jax.value_and_grad(kept, argnums=(0, 1))), (x, w, targets))
    }
    for name in RECIPES:
        recipe = tcfp_jax.recipe(name)
        stored = (
            None
            if recipe.stored is None
            else jax.jit(lambda w, recipe=recipe: quantize_weight(w, recipe)[0])(w)
        )

        def loss(
            x: jax.Array, w: jax.Array, targets: jax.Array, stored: Any, asked: Loss
        ) -> jax.Array:
            shares = jnp.full(targets.shape, 1 / targets.size, jnp.float32)
            return loss_of(asked, x, w, stored, targets, shares)[0]

        call = jax.jit(
            jax.value_and_grad(
                functools.partial(loss, asked=Loss(recipe)), argnums=(0, 1)
            )
        )
        found[name] = call, (x, w, targets, stored)
    return found


def check(sizes: tuple[int, int, int]) -> dict[str, float]:
    """Return the lower SNR of both gradients of every head against float32.

    Raises:
      ArithmeticError: one is below `LEAST_SNR_DB`, or a loss is off by a hundredth.
    """
    x, w, targets = draw(sizes)
    with jax.default_matmul_precision("highest"):
        value, exact = jax.jit(jax.value_and_grad(kept, argnums=(0, 1)))(
            x.astype(jnp.float32), w, targets
        )
    worst = {}
    for name, (function, args) in heads(sizes).items():
        loss, gradients = function(*args)
        errors = [
            (g.astype(jnp.float32) - e, e)
            for g, e in zip(gradients, exact, strict=True)
        ]
        worst[name] = min(
            float(20 * jnp.log10(jnp.linalg.norm(e) / jnp.linalg.norm(d)))
            for d, e in errors
        )
        if not worst[name] >= LEAST_SNR_DB[name] or not abs(float(loss - value)) < 0.01:
            raise ArithmeticError(
                f"{name}: {worst[name]:.1f} dB, loss {loss} for {value}; nothing is"
                " timed of it"
            )
    return worst


def measure(config: Config) -> list[Row]:
    """Check and time every head."""
    worst, found = check(config.checked), heads(config.sizes)
    arenas = {
        n: f.lower(*args).compile().memory_analysis().temp_size_in_bytes
        for n, (f, args) in found.items()
    }
    timed = timing.time_by_wall_clock(found, rounds=config.rounds, calls=config.calls)
    return [
        Row(
            **dataclasses.asdict(timed[name]),
            head=name,
            sizes=config.sizes,
            worst_snr_db=worst[name],
            speed_over_bf16=timed[KEPT].median_ms / timed[name].median_ms,
            arena_bytes=arenas[name],
        )
        for name in found
    ]


def configure(options: argparse.Namespace) -> Config:
    """Return the settings of a command line."""
    return Config() if jax.default_backend() == "gpu" and not options.smoke else SMOKE


def table(result: Result) -> str:
    """Return the page's table, one line per head."""
    lines = [
        [
            f"`{r['head']}`" if r["head"] != KEPT else KEPT,
            f"{r['median_ms']:.1f}",
            f"**{r['speed_over_bf16']:.2f}**",
            f"{r['arena_bytes'] / 1e9:.1f}",
            f"{r['worst_snr_db']:.1f}",
        ]
        for r in result.rows
    ]
    tokens, width, ids = result.rows[0]["sizes"]
    titles = ["", "ms", "speed over BF16", "arena, GB", "worst gradient, dB"]
    return (
        f"{markdown_table(titles, lines)}\n\nLoss and gradients of {tokens} tokens of"
        f" width {width} with {ids} ids, by the wall clock. Decibels are of fewer"
        " tokens and ids, against float32."
    )


BENCHMARK = Benchmark(
    NAME,
    __doc__,
    configure,
    measure,
    table,
)

if __name__ == "__main__":
    BENCHMARK.command()
