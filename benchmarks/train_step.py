"""Time of a training step of an MLP per recipe, next to BF16 in the same run: its
gradients, and an optimizer step.

    python -m benchmarks.train_step --json
    python -m benchmarks.train_step --parts mlp --shapes 8192x1024x4096,16384x8192x28672 --recipes tcfp12_fast

A shape is tokens x d x d_ff. Activations are bfloat16, parameters float32. Parts:
- "mlp": d -> d_ff -> d with relu between, no bias: output, and gradients of input and
  weights for a given gradient of the output. (It returns the output, because XLA would
  drop an unused product, and not time it.)
- "optimizer step": loss, gradients of the weights, AdamW and `error_feedback`; each
  donates its state to the next one. Only this part includes the quantization of
  weights, once a step. "stored" is `tcfp12_single` with `W_hi + W_lo` as the only copy
  of a weight and 8-bit moments in `tcfp_jax.optim.adamw`. "both" keeps W_hi in both
  orientations, and "bfloat16" has weight gradients in bfloat16.

Outputs are compared with BF16's before the timing. The ratio is BF16's median divided
by the recipe's.
"""

import argparse
import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

import tcfp_jax
from benchmarks import timing
from benchmarks.harness import Benchmark
from benchmarks.options import chosen_of
from benchmarks.records import Result
from benchmarks.shapes import MIDDLE, GemmShape, parse_shapes
from benchmarks.tables import markdown_table, times
from models.nets.mlp import MLP
from models.training.settings import Moments, Weights
from models.training.state import float_parameters
from pallas_kernels.dispatch import Backend
from tcfp_jax.recipes import Recipe, recipe

NAME = "train_step"
Part = Literal["mlp", "optimizer step"]
PARTS: tuple[Part, ...] = get_args(Part)
BASELINE, OPTIMIZER = "bf16", PARTS[-1]
VARIANTS = {
    name: recipe(name) for name in (BASELINE, "tensorwise", "tcfp12", "tcfp12_fast")
}


@dataclass(frozen=True)
class Kept:
    """State of an optimizer step: float weights, or stored weights with moments and
    gradients of a dtype.
    """

    weights: Weights = "float"
    moments: Moments = "float32"
    gradient_dtype: Literal["float32", "bfloat16"] = "float32"


# Variants that differ only in the optimizer's state.
KEPT = {
    "stored": Kept("stored", moments="8bit"),
    "stored both": Kept("stored", moments="8bit"),
    "stored bfloat16": Kept("stored", moments="8bit", gradient_dtype="bfloat16"),
    "stored both bfloat16": Kept("stored", moments="8bit", gradient_dtype="bfloat16"),
}
USUAL = tuple(VARIANTS) + tuple(KEPT)
VARIANTS |= {
    name: recipe("tcfp12_single", copies="both" if "both" in name else "one")
    for name in KEPT
}
VARIANTS |= {
    name: recipe(name)
    for name in ("tcfp12_single", "blockwise", "tcfp12_blockwise", "mxfp8", "rowwise")
}
SMOKE_OPTIONS = {"recipes": "stored", "parts": "mlp,optimizer step"}
CPU_SHAPES, SMOKE_SHAPE = (GemmShape(256, 128, 512),), "64x32x64"
# E5M2 rounds Gaussian values at 25 dB, and a step chains a few such products. Rounding
# moves values across relu's kink, where their gradients change completely: 14 dB are
# left. A wrong scale or operand gives less than 7.
LEAST_SNR_DB = 11.0


@dataclass(frozen=True)
class Config:
    """Settings of a run; m, k and n of a shape are tokens, d and d_ff."""

    shapes: tuple[GemmShape, ...]
    recipes: tuple[str, ...] = USUAL
    parts: tuple[Part, ...] = PARTS
    backend: Backend | None = None
    rounds: int = 5
    calls: int = 5
    seed: int = 0


@dataclass(frozen=True)
class Row(timing.Timing):
    """One recipe in one part at one shape, "tokens x d x d_ff".

    `compile_seconds` includes tracing. XLA tries a product's algorithms once in a
    process, so later recipes compile faster. `worst_snr_db` is of all outputs against
    BF16's, None for BF16.
    """

    part: Part
    shape: str
    recipe: str
    compile_seconds: float
    speed_over_bf16: float
    worst_snr_db: float | None


class _Candidate(NamedTuple):
    function: Callable[..., Any]
    args: tuple[Any, ...]
    compile_seconds: float
    outputs: Callable[[], Any]  # values to compare with BF16's


def make_model(shape: GemmShape, chosen: Recipe) -> MLP:
    """Return the MLP of a shape."""
    return MLP(
        features=(shape.n, shape.k), recipe=chosen, use_bias=False, activation="relu"
    )


def draw(shape: GemmShape, key: jax.Array) -> tuple[Any, jax.Array, jax.Array]:
    """Return parameters, the same for every recipe, and bfloat16 input and gradient (or
    target) of the output.
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


def make_gradients(shape: GemmShape, chosen: Recipe, seed: int = 0) -> _Candidate:
    """Return the forward and backward pass of the MLP; quantized weights are
    arguments.
    """
    model = make_model(shape, chosen)

    def step(params: Any, quantized: Any, x: jax.Array, g: jax.Array) -> dict[str, Any]:
        y, pull = jax.vjp(
            lambda p, x: model.apply({"params": p, "tcfp": quantized}, x), params, x
        )
        dparams, dx = pull(g)
        return {"y": y, "dx": dx, "dparams": dparams}

    @jax.jit
    def prepare(key: jax.Array) -> tuple[Any, ...]:
        params, x, g = draw(shape, key)
        return (
            params,
            tcfp_jax.layer_state(tcfp_jax.error_feedback(chosen).init(params)),
            x,
            g,
        )

    args = prepare(jax.random.key(seed))
    compiled, seconds = timing.compile_timed(jax.jit(step), *args)
    return _Candidate(compiled, args, seconds, lambda: compiled(*args))


def make_optimizer(chosen: Recipe, kept: Kept) -> optax.GradientTransformation:
    """Return AdamW with `error_feedback` at the end, or AdamW of stored weights."""
    if kept.weights == "stored":
        key = None if kept.moments == "float32" else jax.random.key(0)
        return tcfp_jax.optim.adamw(1e-4, moments=kept.moments, key=key)
    return optax.chain(optax.adamw(1e-4), tcfp_jax.error_feedback(chosen))


def make_training(shape: GemmShape, chosen: Recipe, kept: Kept) -> timing.Training:
    """Return loss, gradients of the MLP's weights, AdamW and `error_feedback`, before
    they are compiled.
    """
    model, optimizer = make_model(shape, chosen), make_optimizer(chosen, kept)

    @tcfp_jax.value_and_grad
    def gradients(
        params: Any, opt_state: Any, x: jax.Array, target: jax.Array
    ) -> jax.Array:
        y: Any = model.apply(
            {"params": params, "tcfp": tcfp_jax.layer_state(opt_state)}, x
        )
        return jnp.mean(jnp.square(y.astype(jnp.float32) - target.astype(jnp.float32)))

    def step(state: Any, x: jax.Array, target: jax.Array) -> tuple[Any, jax.Array]:
        loss, dparams = gradients(*state, x, target)
        updates, opt_state = optimizer.update(dparams, state[1], state[0])
        return (tcfp_jax.apply_updates(state[0], updates), opt_state), loss

    def init(key: jax.Array) -> tuple[Any, jax.Array, jax.Array]:
        params, x, target = draw(shape, key)
        if kept.weights == "stored":
            floats = lambda: draw(shape, key)[0]
            params = tcfp_jax.store(
                floats, chosen, key=key, gradient_dtype=kept.gradient_dtype
            )
        return state_of(params), x, target

    def state_of(params: Any) -> Any:
        return params, optimizer.init(params)

    return timing.Training(init, step, gradients, state_of)


def make_optimizer_step(
    shape: GemmShape, chosen: Recipe, seed: int = 0, kept: Kept | None = None
) -> _Candidate:
    """Return the compiled optimizer step as a candidate."""
    training = make_training(shape, chosen, kept or Kept())
    threaded, seconds = training.compile(seed)

    def outputs() -> dict[str, Any]:
        # Adam's first update is little more than the gradient's sign, so gradients are
        # compared, not updates.
        _, dparams = jax.jit(training.gradients)(*threaded.state, *threaded.inputs)
        return {
            "loss": threaded(),
            "dparams": dparams,
            "params": float_parameters(threaded.state[0]),
        }

    return _Candidate(threaded, (), seconds, outputs)


@jax.jit
def _ratio(reference: jax.Array, value: jax.Array) -> jax.Array:
    # On the device, because outputs take up to a gigabyte; divided by the largest value
    # against underflow.
    wide = reference.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide))
    return jnp.sum(jnp.square(wide / largest)) / jnp.sum(
        jnp.square((value.astype(jnp.float32) - wide) / largest)
    )


def check_outputs(
    name: str, reference: Any, outputs: Any, *, least: float = LEAST_SNR_DB
) -> float:
    """Return the lowest dB of an output against BF16's; raise `ArithmeticError` below
    `least` or if not finite.
    """
    worst = math.inf
    values = jax.tree_util.tree_leaves_with_path(outputs)
    for (path, value), expected in zip(values, jax.tree.leaves(reference), strict=True):
        output, ratio = (
            jax.tree_util.keystr(path, simple=True, separator="/"),
            float(_ratio(expected, value)),
        )
        snr_db = 10 * math.log10(ratio) if ratio > 0 else -math.inf
        if not (snr_db >= least and jnp.all(jnp.isfinite(value))):
            raise ArithmeticError(
                f"{name}: {output} has {snr_db:.1f} dB against BF16's and must be"
                f" finite with {least} dB or more; the step is wrong, so it is not"
                " timed: compare its products with backend='xla'"
            )
        worst = min(worst, snr_db)
    return worst


def measure_part(part: Part, shape: GemmShape, config: Config) -> list[Row]:
    """Check and time every recipe in one part at one shape; raise `ArithmeticError` if
    an output is wrong.
    """
    made, worst, reference = {}, {}, None
    for name in config.recipes:
        if name in KEPT and part != OPTIMIZER:
            continue
        at = (shape, _recipe(name, config.backend), config.seed)
        if part == OPTIMIZER:
            made[name] = make_optimizer_step(*at, KEPT.get(name))
        else:
            made[name] = make_gradients(*at)
        outputs = made[name].outputs()
        reference = outputs if reference is None else reference
        worst[name] = check_outputs(name, reference, outputs)
    del outputs, reference
    candidates = {name: (c.function, c.args) for name, c in made.items()}
    timed = timing.time_interleaved(
        candidates, rounds=config.rounds, calls=config.calls
    )
    for name, c in made.items():
        if part == OPTIMIZER and not math.isfinite(loss := float(c.function())):
            raise ArithmeticError(
                f"{name}: the loss is {loss} after the timed steps, so their time means"
                " nothing"
            )
    return [
        Row(
            **dataclasses.asdict(timed[name]),
            part=part,
            shape=str(shape),
            recipe=name,
            speed_over_bf16=timed[BASELINE].median_ms / timed[name].median_ms,
            compile_seconds=c.compile_seconds,
            worst_snr_db=None if name == BASELINE else worst[name],
        )
        for name, c in made.items()
    ]


def measure(config: Config) -> Iterator[Row]:
    """Measure every part at every shape."""
    for part in config.parts:
        for shape in config.shapes:
            yield from measure_part(part, shape, config)


def _recipe(name: str, backend: Backend | None) -> Recipe:
    """Return the recipe of a name, with the backend of the command line if the op has
    it.
    """
    return recipe(
        VARIANTS[name],
        backend=backend,
        quantize_backend=None if backend == "mosaic" else backend,
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add recipes, shapes, parts, and the backend of every op."""
    parser.add_argument(
        "--recipes",
        help=(
            f"all, or of {', '.join(VARIANTS)} (default: {', '.join(USUAL)}); bf16"
            " always runs"
        ),
    )
    parser.add_argument(
        "--shapes", help="TOKENSxDxD_FF,... (default on a GPU: 8192x4096x16384)"
    )
    parser.add_argument("--parts", help=f"PART,... (default: {','.join(PARTS)})")
    parser.add_argument(
        "--backend",
        choices=get_args(Backend),
        help="of every op (default: the recipe's choice)",
    )


def configure(options: argparse.Namespace) -> Config:
    """Return the settings of a command line; raise `ValueError` for an unknown recipe,
    part or shape.
    """
    default = (MIDDLE,) if jax.default_backend() == "gpu" else CPU_SHAPES
    shapes = (
        parse_shapes(options.shapes or (SMOKE_SHAPE if options.smoke else None))
        or default
    )
    asked = {None: USUAL, "all": tuple(VARIANTS)}.get(options.recipes)
    recipes = dict.fromkeys(
        (
            BASELINE,
            *(asked or chosen_of("recipes", options.recipes, tuple(VARIANTS))),
        )
    )
    parts = chosen_of("parts", options.parts, PARTS)
    config = Config(shapes, tuple(recipes), parts, options.backend)
    return dataclasses.replace(config, rounds=2, calls=2) if options.smoke else config


def table(result: Result) -> str:
    """Return the page's table: one line per part and shape, or per recipe if there is
    one shape.
    """
    if len(result.distinct("shape")) == 1:
        return _table_of_recipes(result)
    names = [name for name in result.distinct("recipe") if name != BASELINE]
    rows, lines = result.by("part", "shape", "recipe"), []
    for part, shape in result.distinct("part", "shape"):
        line = [
            f"{part}, {times(shape)}",
            f"{rows[part, shape, BASELINE]['median_ms']:.3f} ms",
        ]
        found = [rows.get((part, shape, name)) for name in names]
        lines.append(
            [
                *line,
                *(
                    "–" if row is None else f"**{row['speed_over_bf16']:.2f}**"
                    for row in found
                ),
            ]
        )
    slowest = max(row["compile_seconds"] for row in result.rows)
    return (
        f"{markdown_table(['tokens × d × d_ff', 'BF16', *(f'`{name}`' for name in names)], lines)}\n\nThe"
        f" first column is BF16's time ({result.rows[0]['timer']}), the others the"
        " speed over it in the same run. No first compilation took longer than"
        f" {slowest:.0f} s."
    )


def _table_of_recipes(result: Result) -> str:
    """Return the table of a run at one shape: one line per recipe, two columns per
    part.
    """
    rows, parts = result.by("part", "recipe"), result.distinct("part")
    titles = [times(result.rows[0]["shape"])]
    for part in parts:
        titles += [part, "over BF16"]
    lines = []
    for name in (name for name in result.distinct("recipe") if name in VARIANTS):
        found = [rows[part, name] for part in parts if (part, name) in rows]
        # Variants of the optimizer have only its part, the last one.
        cells = ["–", "–"] * (len(parts) - len(found))
        cells += [
            cell
            for row in found
            for cell in (
                f"{row['median_ms']:.3f} ms",
                f"**{row['speed_over_bf16']:.2f}**",
            )
        ]
        snr_db = found[0]["worst_snr_db"]
        lines.append([f"`{name}`", *cells, "–" if snr_db is None else f"{snr_db:.1f}"])
    return (
        f"{markdown_table([*titles, 'dB'], lines)}\n\nAll rows are of one run"
        f" ({result.rows[0]['timer']}). dB is the lowest signal-to-noise ratio of an"
        " output or gradient against BF16's."
    )


BENCHMARK = Benchmark(
    NAME,
    __doc__,
    configure,
    measure,
    table,
    options=add_options,
    smoke=SMOKE_OPTIONS,
)

if __name__ == "__main__":
    BENCHMARK.command()
