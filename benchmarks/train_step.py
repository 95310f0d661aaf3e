"""Time of a training step per recipe, beside BF16 in the same run: an MLP, a Transformer block, and an optimizer step.

    python -m benchmarks.train_step --json
    python -m benchmarks.train_step --parts "mlp,optimizer step" --shapes 8192x4096x16384 --recipes tcfp12_fast

A shape is tokens x d x d_ff. Activations are bfloat16, parameters float32.

- "mlp": d -> d_ff -> d with gelu between, no bias. Forward pass, and the gradients of input and weights from a given
  gradient of the output. The output is returned too: its product would be dead code otherwise, and not timed.
- "block": the same for a block of `models.gpt`, with its own d_ff = 4 d, heads of 128 and sequences of 1024.
- "optimizer step": loss, gradients of the MLP's weights, AdamW and `error_feedback`; each step donates its state to the
  next one. Only this part holds what quantizing the weights costs: in the others it is done before, once a step.

Every recipe's outputs are compared with BF16's before anything is timed. The ratio is BF16's median over the recipe's.
The peak is the allocator's own figure of a process that does nothing but optimizer steps of one recipe, compiled while
the device is empty, but with the compiler's own trials; CPUs report none.
"""

import argparse
import dataclasses
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import tcfp_jax
from benchmarks import common
from benchmarks.shapes import H200_SHAPES, GemmShape
from models.gpt import Block, GPTConfig
from models.mlp import MLP
from pallas_kernels.dispatch import Backend
from tcfp_jax.recipe import Recipe, recipe

NAME = "train_step"
Part = Literal["mlp", "block", "optimizer step"]
PARTS: tuple[Part, ...] = get_args(Part)
BASELINE, OPTIMIZER = "bf16", PARTS[2]
VARIANTS = {name: recipe(name) for name in (BASELINE, "tensorwise", "tcfp12")}
VARIANTS |= {"tcfp12 wgrad fp8": recipe("tcfp12", wgrad="fp8"), "tcfp12_fast": recipe("tcfp12_fast")}
CPU_SHAPES, SMOKE_SHAPES = (GemmShape(256, 128, 512),), (GemmShape(64, 32, 64),)
SEQUENCE, HEAD = 1024, 128
# E5M2 rounds Gaussian values at 25 dB, and a block chains a few such products; a wrong scale or operand is below 7.
LEAST_SNR_DB = 15.0


@dataclass(frozen=True)
class Config:
    """Settings of a run. A shape's m, k and n are tokens, d and d_ff."""

    shapes: tuple[GemmShape, ...]
    optimizer_shapes: tuple[GemmShape, ...]
    recipes: tuple[str, ...] = tuple(VARIANTS)
    parts: tuple[Part, ...] = PARTS
    backend: Backend | None = None
    rounds: int = 5
    calls: int = 5
    seed: int = 0


@dataclass(frozen=True)
class Row:
    """One recipe in one part at one shape.

    Attributes:
      shape: "tokens x d x d_ff" of what ran; a block's d_ff is 4 d.
      compile_seconds: tracing and compilation, one recipe after the other in one process: XLA tries a product's
        algorithms once, so a recipe profits from those before it.
      speed_over_bf16: ratio of medians.
      worst_snr_db: smallest of all outputs against BF16's; None for BF16.
      peak_bytes: of optimizer steps in a process of their own; None where not measured.
    """

    part: Part
    shape: str
    recipe: str
    median_ms: float
    min_ms: float
    max_ms: float
    samples: int
    timer: common.Timer
    compile_seconds: float
    speed_over_bf16: float
    worst_snr_db: float | None
    peak_bytes: int | None = None


class Threaded:
    """A step `(state, *inputs) -> (state, loss)` that keeps its state: each call is the next step, and gives its loss.

    Its state is donated. With `trace` and `lower` it is a `jax.stages.Wrapped`, which CUPTI's profiler calls as it is;
    anything else it would jit, and a traced call cannot keep a state.
    """

    def __init__(self, jitted: Any, compiled: Any, state: Any, inputs: tuple[jax.Array, ...]) -> None:
        self.compiled, self.state, self.inputs = compiled, state, inputs
        self.trace, self.lower = jitted.trace, jitted.lower

    def __call__(self) -> jax.Array:
        """Run a step."""
        self.state, loss = self.compiled(self.state, *self.inputs)
        return loss


@dataclass(frozen=True)
class _Candidate:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    compile_seconds: float
    outputs: Callable[[], Any]  # what is compared with BF16's


# What is timed --------------------------------------------------------------------------------------------------------


def make_model(part: Part, shape: GemmShape, chosen: Recipe) -> nn.Module:
    """The model of a part."""
    if part == "block":
        size = GPTConfig(layers=1, width=shape.k, heads=max(1, shape.k // HEAD), context=min(shape.m, SEQUENCE))
        return Block(size, chosen, "bfloat16")
    return MLP(features=(shape.n, shape.k), recipe=chosen, use_bias=False)


def draw(part: Part, shape: GemmShape, seed: int) -> tuple[jax.Array, jax.Array]:
    """Gaussian input of a part and gradient of (or target for) its output, both bfloat16.

    Raises:
      ValueError: a block's tokens are no whole number of sequences.
    """
    sequence = min(shape.m, SEQUENCE)
    if part == "block" and shape.m % sequence:
        raise ValueError(f"shape {shape}: {shape.m} tokens are no multiple of sequence {sequence}; change the tokens")
    sizes = (shape.m // sequence, sequence, shape.k) if part == "block" else (shape.m, shape.k)
    # Drawn in float32: JAX's bfloat16 normals have 128 values, whose rounding errors do not average out over tokens.
    return tuple(jax.random.normal(key, sizes).astype(jnp.bfloat16) for key in jax.random.split(jax.random.key(seed)))  # type: ignore[return-value]


def _init(part: Part, shape: GemmShape, key: jax.Array) -> Any:
    # The same for every recipe. BF16's model, so that nothing is quantized for tracing.
    x, _ = draw(part, shape, 0)
    return make_model(part, shape, VARIANTS[BASELINE]).init(key, x)["params"]


def _compile(jitted: Any, *args: Any) -> tuple[Any, float]:
    started = time.perf_counter()
    compiled = jitted.lower(*args).compile()
    return compiled, time.perf_counter() - started


def make_gradients(part: Part, shape: GemmShape, chosen: Recipe, seed: int = 0) -> _Candidate:
    """Forward and backward pass of the MLP or the block; quantized weights are arguments."""
    model = make_model(part, shape, chosen)

    def step(params: Any, quantized: Any, x: jax.Array, g: jax.Array) -> dict[str, Any]:
        y, pull = jax.vjp(lambda p, x: model.apply({"params": p, "tcfp": quantized}, x), params, x)
        dparams, dx = pull(g)
        return {"y": y, "dx": dx, "dparams": dparams}

    @jax.jit
    def prepare(key: jax.Array) -> tuple[Any, Any]:
        params = _init(part, shape, key)
        return params, tcfp_jax.layer_state(tcfp_jax.error_feedback(chosen).init(params))

    args = (*prepare(jax.random.key(seed)), *draw(part, shape, seed))
    compiled, seconds = _compile(jax.jit(step), *args)
    return _Candidate(compiled, args, seconds, lambda: compiled(*args))


def make_optimizer_step(shape: GemmShape, chosen: Recipe, seed: int = 0) -> _Candidate:
    """Loss, gradients of the MLP's weights, AdamW and `error_feedback`; compiled before the state exists."""
    model = make_model(OPTIMIZER, shape, chosen)
    optimizer = optax.chain(optax.adamw(1e-4), tcfp_jax.error_feedback(chosen))

    def loss_of(params: Any, quantized: Any, x: jax.Array, target: jax.Array) -> jax.Array:
        y: Any = model.apply({"params": params, "tcfp": quantized}, x)
        return jnp.mean(jnp.square(y.astype(jnp.float32) - target.astype(jnp.float32)))

    def gradients(state: Any, x: jax.Array, target: jax.Array) -> tuple[jax.Array, Any]:
        return jax.value_and_grad(loss_of)(state[0], tcfp_jax.layer_state(state[1]), x, target)

    def step(state: Any, x: jax.Array, target: jax.Array) -> tuple[Any, jax.Array]:
        loss, dparams = gradients(state, x, target)
        updates, opt_state = optimizer.update(dparams, state[1], state[0])
        return (optax.apply_updates(state[0], updates), opt_state), loss

    def init(key: jax.Array) -> Any:
        params = _init(OPTIMIZER, shape, key)
        return params, optimizer.init(params)

    def outputs() -> dict[str, Any]:
        # Adam's first update is little more than the gradient's sign, so gradients are compared, not updates.
        _, dparams = jax.jit(gradients)(threaded.state, *threaded.inputs)
        return {"loss": threaded(), "dparams": dparams, "params": threaded.state[0]}

    key, jitted = jax.random.key(seed), jax.jit(step, donate_argnums=0)
    shapes = jax.eval_shape(lambda: (init(key), *draw(OPTIMIZER, shape, seed)))
    compiled, seconds = _compile(jitted, *shapes)
    threaded = Threaded(jitted, compiled, jax.jit(init)(key), draw(OPTIMIZER, shape, seed))
    return _Candidate(threaded, (), seconds, outputs)


# Check, time and peak -------------------------------------------------------------------------------------------------


@jax.jit
def _ratio(reference: jax.Array, value: jax.Array) -> jax.Array:
    # On the device, because outputs have up to a gigabyte; over the largest value, so that no square underflows.
    wide = reference.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide))
    noise = jnp.sum(jnp.square((value.astype(jnp.float32) - wide) / largest))
    return jnp.sum(jnp.square(wide / largest)) / noise


def check_outputs(name: str, reference: Any, outputs: Any) -> float:
    """Smallest signal-to-noise ratio, in dB, of any output against BF16's; inf where all are equal.

    Raises:
      ArithmeticError: an output is below 15 dB or not finite.
    """
    worst = math.inf
    values = jax.tree_util.tree_leaves_with_path(outputs)
    for (path, value), expected in zip(values, jax.tree.leaves(reference), strict=True):
        output, ratio = jax.tree_util.keystr(path, simple=True, separator="/"), float(_ratio(expected, value))
        snr_db = 10 * math.log10(ratio) if ratio > 0 else -math.inf
        if not (snr_db >= LEAST_SNR_DB and jnp.all(jnp.isfinite(value))):
            raise ArithmeticError(
                f"{name}: {output} has {snr_db:.1f} dB against BF16's and must be finite with {LEAST_SNR_DB} dB or "
                "more; the step is wrong, so it is not timed: compare its products with backend='xla'"
            )
        worst = min(worst, snr_db)
    return worst


def measure_part(part: Part, shape: GemmShape, config: Config) -> list[Row]:
    """Check and time every recipe in one part at one shape.

    Raises:
      ArithmeticError: an output misses its bound, and nothing is timed then; or the optimizer's steps diverged.
    """
    made, worst, reference = {}, {}, None
    for name in config.recipes:
        chosen = recipe(VARIANTS[name], backend=config.backend)
        at = (shape, chosen, config.seed)
        made[name] = make_optimizer_step(*at) if part == OPTIMIZER else make_gradients(part, *at)
        outputs = made[name].outputs()
        reference = outputs if reference is None else reference
        worst[name] = check_outputs(name, reference, outputs)
    del outputs, reference
    candidates = {name: (c.function, c.args) for name, c in made.items()}
    times = common.time_interleaved(candidates, rounds=config.rounds, calls=config.calls)
    for name, c in made.items():
        if part == OPTIMIZER and not math.isfinite(loss := float(c.function())):
            raise ArithmeticError(f"{name}: the loss is {loss} after the timed steps, so their time means nothing")
    ran = GemmShape(shape.m, shape.k, 4 * shape.k) if part == "block" else shape
    return [
        Row(
            part=part, shape=str(ran), recipe=name, **dataclasses.asdict(times[name]),
            compile_seconds=c.compile_seconds, speed_over_bf16=times[BASELINE].median_ms / times[name].median_ms,
            worst_snr_db=None if name == BASELINE else worst[name],
        )
        for name, c in made.items()
    ]  # fmt: skip


def measure(config: Config, save: Callable[[list[Row]], None] = lambda rows: None) -> list[Row]:
    """Every part at every shape; `save` gets all rows so far after each."""
    rows: list[Row] = []
    for part in config.parts:
        for shape in config.optimizer_shapes if part == OPTIMIZER else config.shapes:
            found = measure_part(part, shape, config)
            if part == OPTIMIZER and jax.local_devices()[0].memory_stats() is not None:
                peaks = [_peak_in_child(row.recipe, shape, config.backend) for row in found]
                found = [dataclasses.replace(row, peak_bytes=peak) for row, peak in zip(found, peaks, strict=True)]
            rows += found
            save(rows)
    return rows


def _peak_in_child(name: str, shape: GemmShape, backend: Backend | None) -> int | None:
    """In a process of its own: a peak belongs to a process and never falls."""
    command = [sys.executable, "-m", f"benchmarks.{NAME}", "--child", name, "--shapes", str(shape)]
    child = subprocess.run(
        command if backend is None else [*command, "--backend", backend], cwd=common.ROOT, text=True,
        env={**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, stdout=subprocess.PIPE,
    )  # fmt: skip
    if child.returncode:
        raise RuntimeError(f"the process that measures {name!r} exited with status {child.returncode}; see its error")
    return json.loads(child.stdout.strip().splitlines()[-1])


def measure_peak(name: str, shape: GemmShape, backend: Backend | None) -> int | None:
    """The allocator's peak of this process after three optimizer steps; None where the device reports none."""
    step = make_optimizer_step(shape, recipe(VARIANTS[name], backend=backend)).function
    if not all(math.isfinite(step()) for _ in range(3)):
        raise ArithmeticError(f"{name}: the loss is not finite, so its memory means nothing")
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


# Command --------------------------------------------------------------------------------------------------------------


def read_config(options: argparse.Namespace) -> Config:
    """The settings of a command line.

    Raises:
      ValueError: an unknown recipe or part, or a malformed shape.
    """
    shapes = SMOKE_SHAPES if options.smoke else H200_SHAPES if jax.default_backend() == "gpu" else CPU_SHAPES
    optimizer_shapes = tuple(shape for shape in shapes if shape.k == 4096) or shapes
    if options.shapes is not None:
        shapes = optimizer_shapes = tuple(GemmShape.parse(text) for text in options.shapes.split(","))
    others = [name for name in _chosen("recipes", options.recipes, tuple(VARIANTS)) if name != BASELINE]
    parts = _chosen("parts", options.parts, PARTS)
    config = Config(shapes, optimizer_shapes, (BASELINE, *others), parts, options.backend)
    return dataclasses.replace(config, rounds=2, calls=2) if options.smoke else config


def _chosen(option: str, text: str | None, allowed: tuple[Any, ...]) -> tuple[Any, ...]:
    names = allowed if text is None else tuple(name.strip() for name in text.split(","))
    if unknown := [name for name in names if name not in allowed]:
        raise ValueError(f"--{option} has {unknown}, which are unknown; use names of {list(allowed)}")
    return names


def main(arguments: list[str] | None = None) -> list[Row]:
    """Run the command and return its rows."""
    parser = common.make_parser(NAME, __doc__)
    parser.add_argument("--recipes", help=f"comma-separated (default: {', '.join(VARIANTS)}); BF16 always runs")
    parser.add_argument("--shapes", help="TOKENSxDxD_FF,... (default: three of a Transformer's on a GPU)")
    parser.add_argument("--parts", help=f"comma-separated (default: {', '.join(PARTS)})")
    parser.add_argument("--backend", choices=get_args(Backend), help="of every op (default: the recipe's choice)")
    parser.add_argument("--child", choices=list(VARIANTS), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        config = read_config(options)
    except ValueError as error:
        parser.error(str(error))
    if options.child is not None:
        print(json.dumps(measure_peak(options.child, config.shapes[0], config.backend)))
        return []
    header, path = common.make_header(), common.result_path(NAME, options)
    common.print_header(NAME, header)
    if header.platform == "cpu":
        print("a CPU has no FP8 units: it multiplies the same numbers in float32, so ratios here mean nothing")
    rows = measure(config, lambda rows: common.write_result(path, NAME, header, config, rows))
    _print(rows)
    common.announce(path)
    return rows


def _print(rows: list[Row]) -> None:
    common.print_table(
        ["part", "tokens x d x d_ff", "recipe", "median ms", "min..max", "BF16 / this", "dB", "compile s", "peak MB"],
        [
            (r.part, r.shape, r.recipe, f"{r.median_ms:.4f}", f"{r.min_ms:.4f}..{r.max_ms:.4f}",
             f"{r.speed_over_bf16:.3f}", "-" if r.worst_snr_db is None else f"{r.worst_snr_db:.1f}",
             f"{r.compile_seconds:.1f}", "-" if r.peak_bytes is None else f"{r.peak_bytes / 1e6:.0f}")
            for r in rows
        ],
    )  # fmt: skip
    print(f"timers: {', '.join(sorted({row.timer for row in rows}))}")


if __name__ == "__main__":
    # Before the first use of a device: the children need the memory that this process would otherwise reserve.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    main(sys.argv[1:])
