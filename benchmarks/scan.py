"""Layers under `nn.scan` against the same layers unrolled: seconds to compile and milliseconds of a training step.

    python -m benchmarks.scan --json

A Transformer of Flax's own layers is converted, not written for this project: attention, an MLP and norms a block,
the blocks either one by one or under `nn.scan`, with the same parameters. A step is the loss, its gradients, SGD and
`error_feedback`. Before anything is timed, the loss of both forms and the gradient of every parameter must agree.
"""

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import tcfp_jax
from benchmarks import common, timing
from benchmarks.common import Result, markdown_table
from benchmarks.train_step import LEAST_SNR_DB
from tcfp_jax.conversion.convert import convert_to_tcfp, find_weights

NAME = "scan"
Form = Literal["unrolled", "scan"]
RECIPES = ("bf16", "tcfp12_fast")
HEAD = 64


@dataclass(frozen=True)
class Config:
    """Sizes of a run."""

    layers: int
    width: int
    batch: int
    sequence: int
    rounds: int
    calls: int


@dataclass(frozen=True)
class Row(timing.Timing):
    """One form of the model under one recipe.

    Attributes:
      form, recipe: "unrolled" or "scan"; "bf16" is Flax's own model, not converted.
      trace_seconds, compile_seconds: from Python to StableHLO, and from there to a program.
      worst_snr_db: of loss and gradients against those of the unrolled form; None for that form itself.
    """

    form: Form
    recipe: str
    trace_seconds: float
    compile_seconds: float
    worst_snr_db: float | None


class Block(nn.Module):
    """Attention and an MLP of four times the width, each behind a norm and beside a residual."""

    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, _: Any = None) -> tuple[jax.Array, None]:
        """`x` `[batch, sequence, width]` to the same, and nothing to stack."""
        width, norm = x.shape[-1], nn.LayerNorm(dtype=self.dtype, name="norm")
        attention = nn.MultiHeadDotProductAttention(max(1, width // HEAD), dtype=self.dtype, name="attention")
        x = x + attention(norm(x))
        hidden = nn.gelu(nn.Dense(4 * width, dtype=self.dtype, name="up")(x))
        return x + nn.Dense(width, dtype=self.dtype, name="down")(hidden), None


class Layers(nn.Module):
    """`layers` blocks."""

    layers: int
    form: Form
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """`x` `[batch, sequence, width]` to the same."""
        if self.form == "scan":
            axes: Any = dict(variable_axes={"params": 0}, split_rngs={"params": True}, length=self.layers)
            return nn.scan(Block, **axes)(self.dtype, name="blocks")(x, None)[0]
        for layer in range(self.layers):
            x, _ = Block(self.dtype, name=f"block_{layer}")(x)
        return x


@dataclass(frozen=True)
class _Candidate:
    step: Callable[..., Any]
    args: tuple[Any, ...]
    trace_seconds: float
    compile_seconds: float


def stacked(params: Any, layers: int) -> Any:
    """Parameters of the unrolled form as those of the scanned one."""
    return {"blocks": jax.tree.map(lambda *leaves: jnp.stack(leaves), *(params[f"block_{i}"] for i in range(layers)))}


def make_step(form: Form, name: str, config: Config, params: Any, x: jax.Array) -> _Candidate:
    """A compiled step `(params, state, x) -> (loss, gradients, params, state)`, and how long that took."""
    model: Any = Layers(config.layers, form, common.default_dtype())
    optimizer: optax.GradientTransformation = optax.sgd(1e-3)
    if name != "bf16":
        model = convert_to_tcfp(model, name, x, include=("linear", "small"))
        optimizer = optax.chain(optimizer, tcfp_jax.error_feedback(find_weights(model)))

    def step(params: Any, state: Any, x: jax.Array) -> tuple[jax.Array, Any, Any, Any]:
        def loss(params: Any) -> jax.Array:
            y = model.apply({"params": params, "tcfp": tcfp_jax.layer_state(state)}, x)
            return jnp.mean(jnp.square(y.astype(jnp.float32)))

        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradients, state, params)
        return value, gradients, optax.apply_updates(params, updates), state

    state = jax.jit(optimizer.init)(params)
    started = time.perf_counter()
    lowered = jax.jit(step).lower(params, state, x)
    traced = time.perf_counter()
    compiled = lowered.compile()
    return _Candidate(compiled, (params, state, x), traced - started, time.perf_counter() - traced)


def check(name: str, expected: Any, outputs: Any) -> float:
    """Smallest dB of loss and gradients against the unrolled form's.

    Both run the same products; what differs is XLA's fusion, and with it last bits of bfloat16, which move values to a
    neighbour in FP8. The bound is that of training steps: a wrong scale or operand is below it.

    Raises:
      ArithmeticError: below `LEAST_SNR_DB`.
    """
    leaves = zip(jax.tree.leaves(expected), jax.tree.leaves(outputs), strict=True)
    worst = min(common.compare(reference, value)[0] for reference, value in leaves)
    if not worst >= LEAST_SNR_DB:
        raise ArithmeticError(f"{name}: scan has {worst:.1f} dB against the unrolled model, below {LEAST_SNR_DB}")
    return worst


def measure(config: Config) -> Iterator[Row]:
    """Check and time both forms under every recipe."""
    dtype = common.default_dtype()
    x = jax.random.normal(jax.random.key(0), (config.batch, config.sequence, config.width)).astype(dtype)
    unrolled = jax.jit(Layers(config.layers, "unrolled", dtype).init)(jax.random.key(1), x)["params"]
    params = {"unrolled": unrolled, "scan": stacked(unrolled, config.layers)}
    for name in RECIPES:
        made = {form: make_step(form, name, config, params[form], x) for form in get_args(Form)}
        (loss, gradients, *_), (found, scanned, *_) = (made[form].step(*made[form].args) for form in get_args(Form))
        # The gradient of attention's key biases is zero but for rounding: softmax does not see them.
        drop = lambda tree: {**tree, "blocks": {**tree["blocks"], "attention": _without_key_bias(tree)}}
        snr_db = check(name, (loss, drop(stacked(gradients, config.layers))), (found, drop(scanned)))
        candidates = {form: (made[form].step, made[form].args) for form in made}
        timed = timing.time_interleaved(candidates, rounds=config.rounds, calls=config.calls)
        for form, candidate in made.items():
            yield Row(
                **dataclasses.asdict(timed[form]), form=form, recipe=name, trace_seconds=candidate.trace_seconds,
                compile_seconds=candidate.compile_seconds, worst_snr_db=snr_db if form == "scan" else None,
            )  # fmt: skip


def _without_key_bias(tree: Any) -> dict[str, Any]:
    attention = tree["blocks"]["attention"]
    return {**attention, "key": {"kernel": attention["key"]["kernel"]}}


def configure(options: argparse.Namespace) -> Config:
    """Sizes for the device, or tiny ones."""
    if options.smoke:
        return Config(layers=2, width=32, batch=1, sequence=8, rounds=1, calls=1)
    if jax.default_backend() == "cpu":
        return Config(layers=12, width=128, batch=2, sequence=64, rounds=5, calls=2)
    return Config(layers=12, width=1024, batch=8, sequence=1024, rounds=5, calls=5)


def show(rows: list[Row]) -> None:
    """Print the rows."""
    columns = ("recipe", "form", "trace_seconds", "compile_seconds", "median_ms", "min_ms", "max_ms", "worst_snr_db")
    common.print_rows(rows, *columns, "timer")


def table(result: Result) -> str:
    """A line a recipe and form."""
    rows, lines = result.by("recipe", "form"), []
    for (name, form), row in rows.items():
        other = rows[name, "unrolled"]
        compiled, unrolled = (r["trace_seconds"] + r["compile_seconds"] for r in (row, other))
        numbers = [f"{compiled:.1f} s", f"{row['median_ms']:.2f} ms"]
        ratios = [f"{compiled / unrolled:.2f}", f"{row['median_ms'] / other['median_ms']:.2f}"]
        lines.append([f"`{name}`", form, *numbers, *ratios])
    c = result.config
    titles = ["recipe", "layers", "trace and compile", "step", "compile / unrolled", "step / unrolled"]
    cpu = " A CPU multiplies FP8 values in float32: its steps say nothing of a GPU's."
    return (
        f"{markdown_table(titles, lines)}\n\n"
        f"{c['layers']} Transformer blocks of width {c['width']}, {c['batch']} × {c['sequence']} tokens "
        f"({result.rows[0]['timer']}).{cpu if result.header['platform'] == 'cpu' else ''}"
    )


main = functools.partial(common.main, NAME)

if __name__ == "__main__":
    common.command(NAME)
