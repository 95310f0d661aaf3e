"""Time of a training step of an MLP per recipe, next to BF16 in the same run.

    python -m benchmarks.train_step --json
    python -m benchmarks.train_step --parts mlp --shapes 8192x1024x4096 --recipes stored

A shape is tokens x d x d_ff. Activations are bfloat16, parameters float32. Parts:
- "mlp": d -> d_ff -> d with relu between, no bias: output, and gradients of input and
  weights for a given gradient of the output. (It returns the output, because XLA would
  drop an unused product, and not time it.)
- "optimizer step": loss, gradients of the weights, AdamW and `error_feedback`; each
  donates its state to the next one. Only this part includes the quantization of
  weights, once a step. "stored" is `tcfp12_single` with `W_hi + W_lo` as the only copy
  of a weight and 8-bit moments in `tcfp_jax.optim.adamw`. "both" keeps W_hi in both
  orientations, and "bfloat16" has weight gradients in bfloat16. "tcfp12 stochastic"
  rounds W_lo at random and keeps no error.

Outputs are compared with BF16's before the timing. The ratio is BF16's median divided
by the recipe's.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jax import Array

import tcfp_jax
from benchmarks import timing
from benchmarks.harness import Benchmark, chosen_of
from benchmarks.products import MIDDLE, GemmShape
from benchmarks.records import Result, markdown_table, shown, times
from benchmarks.variants import BASELINE
from models.nets.mlp import MLP
from models.training.forms import MomentFormat, Weights
from models.training.state import float_parameters
from tcfp_jax.recipes import Recipe, recipe
from tcfp_jax.remat import step_bytes
from tcfp_jax.weights.stored import bytes_of

Part = Literal["mlp", "optimizer step"]
PARTS: tuple[Part, ...] = get_args(Part)
OPTIMIZER = PARTS[-1]


@dataclass(frozen=True)
class Kept:
    """Dtypes of an optimizer step: of weights, of moments and of gradients."""

    weights: Weights = "float"
    moments: MomentFormat = "float32"
    gradient_dtype: Literal["float32", "bfloat16"] = "float32"


# Variants that differ only in the optimizer's state.
KEPT = {
    "stored": Kept("stored", "8bit"),
    "stored both": Kept("stored", "8bit"),
    "stored bfloat16": Kept("stored", "8bit", "bfloat16"),
    "stored both bfloat16": Kept("stored", "8bit", "bfloat16"),
}
USUAL = (BASELINE, "tensorwise", "tcfp12", "tcfp12_fast", *KEPT)
STOCHASTIC = "tcfp12 stochastic"
OTHERS = (
    "tcfp12_single",
    "blockwise",
    "tcfp12_blockwise",
    "mxfp8",
    "rowwise",
    STOCHASTIC,
)


def _recipe_of(name: str) -> Recipe:
    if name in KEPT:
        return recipe("tcfp12_single", copies="both" if "both" in name else "one")
    if name == STOCHASTIC:
        return recipe("tcfp12", remainder="stochastic")
    return recipe(name)


VARIANTS = {name: _recipe_of(name) for name in (*USUAL, *OTHERS)}
# E5M2 rounds Gaussian values at 25 dB, and a step chains a few such products. Rounding
# moves values across relu's kink, where their gradients change completely: 14 dB are
# left. A wrong scale or operand gives less than 7.
LEAST_SNR_DB = 11.0


@dataclass(frozen=True)
class Config(timing.Repetitions):
    """Settings of a run; m, k and n of a shape are tokens, d and d_ff."""

    shapes: tuple[GemmShape, ...]
    recipes: tuple[str, ...] = USUAL
    parts: tuple[Part, ...] = PARTS


@dataclass(frozen=True)
class Row(timing.Timing):
    """One recipe in one part at one shape, "tokens x d x d_ff".

    `compile_seconds` includes tracing. XLA tries a product's algorithms once in a
    process, so later recipes compile faster. `worst_snr_db` is of all outputs against
    BF16's, None for BF16. `state_bytes` are those that outlive an optimizer step, and
    `step_bytes` those that the compiled program needs with its arguments.
    """

    part: Part
    shape: str
    recipe: str
    compile_seconds: float
    speed_over_bf16: float
    worst_snr_db: float | None
    state_bytes: int | None = None
    step_bytes: int | None = None


class Candidate(NamedTuple):
    """A compiled call, and the function of the values to compare."""

    function: Any
    args: tuple[Any, ...]
    compiled: Any
    compile_seconds: float
    outputs: Callable[[], Any]


def make_model(shape: GemmShape, chosen: Recipe) -> MLP:
    """Return the MLP of a shape."""
    return MLP(
        features=(shape.n, shape.k), recipe=chosen, use_bias=False, activation="relu"
    )


def draw(shape: GemmShape, key: Array) -> tuple[Any, Array, Array]:
    """Return parameters, and bfloat16 input and gradient (or target) of the output.

    The parameters are the same for every recipe.
    """
    # BF16's model has the same parameters, and quantizes nothing for tracing. The rest
    # is drawn in float32, because JAX's bfloat16 normals have 128 values, whose
    # rounding errors do not average out over tokens.
    sizes = (shape.m, shape.k)
    x, g = (
        jax.random.normal(jax.random.fold_in(key, i), sizes).astype(jnp.bfloat16)
        for i in range(2)
    )
    return make_model(shape, VARIANTS[BASELINE]).init(key, x)["params"], x, g


def both_passes(model: Any) -> Callable[..., dict[str, Any]]:
    """Return `(params, state, x, g) -> {y, dx, dparams}` of a Linen model."""

    def passes(params: Any, state: Any, x: Array, g: Array) -> dict[str, Any]:
        y, pull = jax.vjp(
            lambda p, x: model.apply({"params": p, **state}, x), params, x
        )
        dparams, dx = pull(g)
        return {"y": y, "dx": dx, "dparams": dparams}

    return passes


def make_gradients(shape: GemmShape, chosen: Recipe) -> Candidate:
    """Return both passes of the MLP; quantized weights are arguments."""

    @jax.jit
    def prepare(key: Array) -> tuple[Any, ...]:
        params, x, g = draw(shape, key)
        quantized = _error_feedback(chosen).init(params)
        return params, {"tcfp": tcfp_jax.layer_state(quantized)}, x, g

    args = prepare(jax.random.key(0))
    passes = jax.jit(both_passes(make_model(shape, chosen)))
    compiled, seconds = timing.compile_timed(passes, *args)
    return Candidate(compiled, args, compiled, seconds, partial(compiled, *args))


def _error_feedback(chosen: Recipe) -> optax.GradientTransformation:
    key = jax.random.key(0) if chosen.stochastic else None
    return tcfp_jax.error_feedback(chosen, key=key)


def make_optimizer(chosen: Recipe, kept: Kept) -> optax.GradientTransformation:
    """Return AdamW with `error_feedback` at the end, or AdamW of stored weights."""
    if kept.weights == "stored":
        key = jax.random.key(0)
        return tcfp_jax.optim.adamw(1e-4, moments=kept.moments, key=key)
    return optax.chain(optax.adamw(1e-4), _error_feedback(chosen))


def make_training(shape: GemmShape, chosen: Recipe, kept: Kept) -> timing.Training:
    """Return loss, gradients, AdamW and `error_feedback`, before they are compiled."""
    model = make_model(shape, chosen)
    optimizer = make_optimizer(chosen, kept)

    @tcfp_jax.value_and_grad
    def gradients(params: Any, opt_state: Any, x: Array, target: Array) -> Array:
        quantized = tcfp_jax.layer_state(opt_state)
        y: Any = model.apply({"params": params, "tcfp": quantized}, x)
        return jnp.mean(jnp.square(y.astype(jnp.float32) - target.astype(jnp.float32)))

    def drawn(key: Array) -> tuple[Any, Array, Array]:
        params, x, target = draw(shape, key)
        if kept.weights == "stored":
            params = tcfp_jax.store(
                lambda: draw(shape, key)[0],
                chosen,
                key=key,
                gradient_dtype=kept.gradient_dtype,
            )
        return params, x, target

    return timing.training_of(gradients, optimizer, drawn)


def make_optimizer_step(
    shape: GemmShape, chosen: Recipe, kept: Kept | None = None
) -> Candidate:
    """Return the compiled optimizer step as a candidate."""
    training = make_training(shape, chosen, kept or Kept())
    threaded, seconds = training.compile()

    def outputs() -> dict[str, Any]:
        # Adam's first update is little more than the gradient's sign, so gradients are
        # compared, not updates.
        _, dparams = jax.jit(training.gradients)(*threaded.state, *threaded.inputs)
        loss = threaded()
        params = float_parameters(threaded.state[0])
        return {"loss": loss, "dparams": dparams, "params": params}

    return Candidate(threaded, (), threaded.compiled, seconds, outputs)


@jax.jit
def _ratio(reference: Array, value: Array) -> Array:
    # On the device, because outputs take up to a gigabyte; divided by the largest value
    # against underflow.
    wide = reference.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide))
    error = (value.astype(jnp.float32) - wide) / largest
    return jnp.sum(jnp.square(wide / largest)) / jnp.sum(jnp.square(error))


def check_outputs(
    name: str, reference: Any, outputs: Any, least: float = LEAST_SNR_DB
) -> float:
    """Return the lowest dB of an output against BF16's.

    Raises:
      ArithmeticError: it is below `least`, or an output is not finite.
    """
    worst = math.inf
    values = jax.tree_util.tree_leaves_with_path(outputs)
    for (path, value), expected in zip(values, jax.tree.leaves(reference), strict=True):
        ratio = float(_ratio(expected, value))
        snr_db = 10 * math.log10(ratio) if ratio > 0 else -math.inf
        if not (snr_db >= least and jnp.all(jnp.isfinite(value))):
            output = jax.tree_util.keystr(path, simple=True, separator="/")
            raise ArithmeticError(
                f"{name}: {output} has {snr_db:.1f} dB against BF16's and must be"
                f" finite with {least} dB or more; the step is wrong, so it is not"
                " timed: compare its products with backend='xla'"
            )
        worst = min(worst, snr_db)
    return worst


def compare_outputs(
    calls: Mapping[str, Callable[[], Any]],
    least: float = LEAST_SNR_DB,
    others: Mapping[str, float] | None = None,
) -> dict[str, float | None]:
    """Return `check_outputs` of candidates against the first one; None of itself.

    Args:
      calls: Functions of the outputs by name.
      least: Smallest SNR in dB.
      others: Smallest SNR of some names.
    """
    worst: dict[str, float | None] = {}
    reference: Any = None
    for name, call in calls.items():
        outputs = call()
        if reference is None:
            reference = outputs
            worst[name] = None
        else:
            own = (others or {}).get(name, least)
            worst[name] = check_outputs(name, reference, outputs, own)
    return worst


def measure(config: Config) -> Iterator[Row]:
    """Measure every part at every shape."""
    for part in config.parts:
        for shape in config.shapes:
            yield from measure_part(part, shape, config)


def measure_part(part: Part, shape: GemmShape, config: Config) -> Iterator[Row]:
    """Check and time every recipe in one part at one shape.

    Raises:
      ArithmeticError: an output is wrong.
    """
    made: dict[str, Candidate] = {}
    is_step = part == OPTIMIZER
    for name in config.recipes:
        if is_step:
            made[name] = make_optimizer_step(shape, VARIANTS[name], KEPT.get(name))
        elif name not in KEPT:
            made[name] = make_gradients(shape, VARIANTS[name])
    worst = compare_outputs({name: one.outputs for name, one in made.items()})
    timed = config.interleaved({name: one[:2] for name, one in made.items()})
    for name, one in made.items():
        if is_step and not math.isfinite(one.function()):
            raise ArithmeticError(
                f"{name}: the loss is not finite after the timed steps, so their time"
                " means nothing"
            )
        yield Row(
            **vars(timed[name]),
            part=part,
            shape=str(shape),
            recipe=name,
            speed_over_bf16=timed[BASELINE].median_ms / timed[name].median_ms,
            compile_seconds=one.compile_seconds,
            worst_snr_db=worst[name],
            state_bytes=bytes_of(one.function.state) if is_step else None,
            step_bytes=step_bytes(one.compiled),
        )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add recipes, shapes and parts."""
    parser.add_argument(
        "--recipes",
        help=f"of {', '.join(VARIANTS)} (default: {', '.join(USUAL)}), and bf16",
    )
    parser.add_argument(
        "--shapes", help="TOKENSxDxD_FF,... (default on a GPU: 8192x4096x16384)"
    )
    parser.add_argument("--parts", help=f"PART,... (default: {','.join(PARTS)})")


def configure(options: argparse.Namespace) -> Config:
    """Return the settings of a command line.

    Raises:
      ValueError: a recipe, part or shape is unknown.
    """
    usual = str(MIDDLE) if jax.default_backend() == "gpu" else "256x128x512"
    asked = options.shapes or ("64x32x64" if options.smoke else usual)
    shapes = tuple(map(GemmShape.parse, asked.split(",")))
    wanted = options.recipes or ",".join(USUAL)
    recipes = BASELINE, *chosen_of("recipes", wanted, tuple(VARIANTS))
    few = {"rounds": 2, "calls": 2} if options.smoke else {}
    return Config(
        shapes,
        tuple(dict.fromkeys(recipes)),
        chosen_of("parts", options.parts, PARTS),
        **few,
    )


def table(result: Result) -> str:
    """Return the page's table: one line per recipe, a column per part and shape."""
    rows = result.by("part", "shape", "recipe")
    places = result.distinct("part", "shape")
    lines = []
    for name in result.distinct("recipe"):
        form = "{median_ms:.3f} ms · **{speed_over_bf16:.2f}**"
        if name == BASELINE:
            form = "{median_ms:.3f} ms"
        cells = [shown(rows.get((*place, name)), form) for place in places]
        lines.append([f"`{name}`", *cells])
    titles = ["tokens × d × d_ff"]
    titles += [f"{part}, {times(shape)}" for part, shape in places]
    slowest = max(row["compile_seconds"] for row in result.rows)
    return (
        f"{markdown_table(titles, lines)}\n\nA cell holds the time"
        f" ({result.rows[0]['timer']}) and **the speedup over BF16 in the same run**."
        f" No first compilation took longer than {slowest:.0f} s."
    )


BENCHMARK = Benchmark(
    "train_step",
    __doc__,
    configure,
    measure,
    table,
    options=add_options,
    smoke={"recipes": "stored", "parts": "mlp,optimizer step"},
)

if __name__ == "__main__":
    BENCHMARK.command()
