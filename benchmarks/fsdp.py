"""Training steps on several GPUs that split batch and weights (FSDP), next to BF16.

    python -m benchmarks.fsdp --json
    python -m benchmarks.fsdp --json --parts mlp --recipes tensorwise,stored

* *mlp* is d -> d_ff -> d of `benchmarks.train_step`; *llama* is a whole step as in
  `benchmarks.llama`; *olmoe* is one of four layers of OLMoE-1B-7B, whose experts are
  split, so that no weight of theirs travels; all with AdamW. Every GPU has as many
  tokens as one GPU alone, so `over_one_gpu` is at best the number of GPUs.
* Every matrix is split along one axis, the same in every recipe: the first one in the
  MLP, and as in `models.train --mesh` in the Llama. `tcfp_jax.sharding.state_shardings`
  places the state. XLA gathers a weight before it is read and scatters the sums of its
  gradients. Gradients travel in float32, unless a name says otherwise; "stored" has
  bfloat16.

Times are wall clock, over steps that depend on each other, because kernels of several
GPUs and communication overlap. Before the timing, gradients are compared with BF16's on
the same GPUs, and the first loss of a Llama on several GPUs.
"""

import argparse
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import llama_steps, timing, train_step
from benchmarks.harness import Benchmark, chosen_of
from benchmarks.llama_steps import STORED, quick
from benchmarks.products import GemmShape
from benchmarks.records import Result, cells
from benchmarks.train_step import Kept, compare_outputs
from benchmarks.variants import BASELINE
from models.nets.meshes import AXES, BATCH, parameter_shardings
from models.nets.shapes import LlamaConfig, MoeConfig
from models.nets.sizes import LLAMAS, MOES
from tcfp_jax.recipes import Recipe, recipe
from tcfp_jax.sharding import state_shardings

Part = Literal["mlp", "llama", "olmoe"]
PARTS: tuple[Part, ...] = get_args(Part)
AXIS = "fsdp"
SMOKE_OPTIONS = {"recipes": STORED, "parts": "mlp"}
NARROW = " wire=bfloat16"
LEAST_SNR_DB = 5.0  # as of the steps of `benchmarks.llama`
RECIPES = (
    BASELINE,
    "tensorwise",
    "tensorwise" + NARROW,
    "tcfp12_fast",
    "tcfp12_fast" + NARROW,
    STORED,
)


@dataclass(frozen=True)
class Config(timing.Repetitions):
    """Settings of a run.

    Attributes:
      mlp: Tokens, d and d_ff of one device.
      llama, olmoe: Sizes of the models.
      llama_tokens: Sequences and positions of one device.
      devices: Numbers of devices; 1 is the comparison.
    """

    mlp: GemmShape
    llama: LlamaConfig
    olmoe: MoeConfig
    llama_tokens: tuple[int, int]
    recipes: tuple[str, ...]
    parts: tuple[Part, ...] = PARTS
    devices: tuple[int, ...] = (1, 2)


@dataclass(frozen=True)
class Row(timing.Timing):
    """One candidate on some devices.

    Attributes:
      part, recipe, devices, tokens: The candidate, and the tokens of all devices in a
        step.
      tokens_per_second: Rate of the median.
      speed_over_bf16: BF16's median divided by this one, on as many devices.
      over_one_gpu: Tokens a second, divided by the same candidate's on one device.
      worst_snr_db: Lowest SNR of loss and gradients against BF16's; None for BF16.
      compile_seconds: Seconds of tracing, lowering and compiling.
      arena_bytes: Temporary memory of a device, besides arguments and results.
      state_bytes: Parameters and optimizer state on the first device.
    """

    part: Part
    recipe: str
    devices: int
    tokens: int
    tokens_per_second: float
    speed_over_bf16: float
    over_one_gpu: float | None
    worst_snr_db: float | None
    compile_seconds: float
    arena_bytes: int
    state_bytes: int


def make_training(
    part: Part, name: str, config: Config, devices: int
) -> tuple[timing.Training, int]:
    """Return (the step of a candidate, its tokens): as many tokens on every device."""
    if part == "mlp":
        shape = dataclasses.replace(config.mlp, m=devices * config.mlp.m)
        return train_step.make_training(shape, *_mlp_of(name)), shape.m
    sequences, positions = config.llama_tokens
    tokens = devices * sequences, positions
    size = config.llama if part == "llama" else config.olmoe
    few = llama_steps.Config(
        size, size, tokens, tokens, {}, include=("linear", "small")
    )
    return llama_steps.make_training(few, name), math.prod(tokens)


def _mlp_of(name: str) -> tuple[Recipe, Kept]:
    """Return recipe and state of a candidate of the MLP."""
    if name == STORED:
        kept = Kept("stored", moments="8bit", gradient_dtype="bfloat16")
        return recipe("tcfp12_single"), kept
    chosen = recipe(name.removesuffix(NARROW))
    if name.endswith(NARROW):
        chosen = recipe(chosen, wire="bfloat16")
    return chosen, Kept()


def placed(mesh: Mesh, floats: Any, state_of: Callable[[Any], Any], given: Any) -> Any:
    """Return the shardings of `Training.init`: `((params, opt_state), *inputs)`.

    `floats` are BF16's parameters.
    """
    (params, _), *inputs = given
    at = functools.partial(NamedSharding, mesh)
    if "embedding" in floats:
        split = parameter_shardings(floats, mesh)
    else:
        split = jax.tree.map(lambda _: at(P(AXIS)), floats)
    state = state_shardings(split, params, state_of)
    return state, *(at(BATCH) for _ in inputs)


def measure(config: Config) -> Iterator[Row]:
    """Measure every part on every number of devices."""
    for part in config.parts:
        alone: dict[str, float] = {}
        for devices in config.devices:
            for row in measure_part(part, config, devices):
                if devices == 1:
                    alone[row.recipe] = row.tokens_per_second
                base = alone[row.recipe.removesuffix(NARROW)]
                over = row.tokens_per_second / base
                yield dataclasses.replace(row, over_one_gpu=over)


def measure_part(part: Part, config: Config, devices: int) -> Iterator[Row]:
    """Check and time the candidates of a part on some devices.

    Raises:
      ArithmeticError: gradients are wrong.
    """
    mesh = jax.make_mesh(
        (1, devices, 1),
        AXES,
        axis_types=(AxisType.Auto,) * 3,
        devices=jax.devices()[:devices],
    )
    bf16, tokens = make_training(part, BASELINE, config, devices)
    (floats, _), *_ = jax.eval_shape(bf16.init, jax.random.key(0))
    made: dict[str, tuple[timing.Threaded, float]] = {}
    outputs = {}
    with jax.set_mesh(mesh):
        for name in config.recipes:
            if name.endswith(NARROW) and (devices == 1 or part != "mlp"):
                continue
            training, _ = make_training(part, name, config, devices)
            place = functools.partial(placed, mesh, floats, training.state_of)
            made[name] = training.compile(place=place)
            step = made[name][0]
            # A Llama's gradients were compared on one GPU; compiling them again would
            # take as long as the rest. A router chooses other experts for some tokens
            # in FP8, and their gradients are not alike.
            loss_alone = part == "olmoe" or (part == "llama" and devices > 1)
            outputs[name] = (
                step if loss_alone else functools.partial(_gradients, training, step)
            )
        worst = compare_outputs(outputs, LEAST_SNR_DB)
        timed = config.by_wall_clock(
            {name: (step, ()) for name, (step, _) in made.items()}
        )
    for name, (step, seconds) in made.items():
        yield Row(
            **vars(timed[name]),
            part=part,
            recipe=name,
            devices=devices,
            tokens=tokens,
            tokens_per_second=tokens / timed[name].median_ms * 1e3,
            over_one_gpu=None,
            speed_over_bf16=timed[BASELINE].median_ms / timed[name].median_ms,
            worst_snr_db=worst[name],
            compile_seconds=seconds,
            arena_bytes=step.compiled.memory_analysis().temp_size_in_bytes,
            state_bytes=sum(
                leaf.addressable_shards[0].data.nbytes
                for leaf in jax.tree.leaves(step.state)
            ),
        )


def _gradients(training: timing.Training, step: timing.Threaded) -> Any:
    """Return the loss and the gradients of the state of a step."""
    return jax.jit(training.gradients)(*step.state, *step.inputs)


# The command and its table
# --------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add parts, recipes and devices."""
    parser.add_argument("--parts", help=f"of {','.join(PARTS)} (default: all)")
    parser.add_argument(
        "--recipes",
        help=f"of {','.join(RECIPES)} (default: all); {BASELINE} always runs",
    )
    parser.add_argument(
        "--devices", type=int, help="how many, beside one alone (default: all)"
    )


def configure(options: argparse.Namespace) -> Config:
    """Return the settings of a command line.

    Raises:
      ValueError: a name is unknown, or there are not as many devices.
    """
    recipes = BASELINE, *chosen_of("recipes", options.recipes, RECIPES)
    here = jax.device_count()
    wanted = options.devices or here
    if not 0 < wanted <= here:
        raise ValueError(
            f"--devices {wanted}, but this machine has {here}; use 1 to {here}"
        )
    shared: dict[str, Any] = {
        "recipes": tuple(dict.fromkeys(recipes)),
        "parts": chosen_of("parts", options.parts, PARTS),
        "devices": tuple(sorted({1, wanted})),
    }
    if jax.default_backend() == "gpu" and not options.smoke:
        # As many layers as BF16's state and the others' leave room for on one GPU.
        olmoe = dataclasses.replace(MOES["olmoe-1b-7b"], layers=4, remat="block")
        mlp = GemmShape(8192, 4096, 16384)
        return Config(mlp, LLAMAS["llama-1b"], olmoe, (4, 4096), calls=6, **shared)
    # Blocks of 128 values of the moments, on each of two devices.
    tiny = quick(LLAMAS["llama-tiny"], width=256)
    moe = quick(MOES["moe-tiny"], width=256)
    mlp = GemmShape(64, 32, 64)
    return Config(mlp, tiny, moe, (2, 32), rounds=1, calls=2, **shared)


def table(result: Result) -> str:
    """Return the page's tables: one per part, one line per candidate."""
    columns = {
        "GPUs": "{devices}",
        "": "`{recipe}`",
        "ms": "{median_ms:.2f}",
        "speedup over BF16": "**{speed_over_bf16:.2f}**",
        "tokens per second": "{tokens_per_second:,.0f}",
        "times one GPU": "{over_one_gpu:.2f}",
        "state, GB": "{state_gigabytes:.2f}",
        "arena, GB": "{arena_gigabytes:.2f}",
    }
    texts = []
    for part in result.distinct("part"):
        rows = [row for row in result.rows if row["part"] == part]
        said = _described(part, result.config)
        texts.append(f"{said}, with AdamW.\n\n{cells(rows, columns)}\n")
    return (
        "\n".join(texts)
        + "\nTimes are by the wall clock; state and arena are those of one GPU."
    )


def _described(part: Part, config: dict[str, Any]) -> str:
    if part == "mlp":
        mlp = config["mlp"]
        return (
            f"An MLP of {mlp['k']} → {mlp['n']} → {mlp['k']}, {mlp['m']} tokens per GPU"
        )
    kind = {"llama": "A Llama", "olmoe": "OLMoE-1B-7B"}[part]
    size = config[part]
    tokens = " × ".join(map(str, config["llama_tokens"]))
    return (
        f"{kind} of {size['layers']} layers of width {size['width']}, {tokens} tokens"
        " per GPU"
    )


BENCHMARK = Benchmark(
    "fsdp",
    __doc__,
    configure,
    measure,
    table,
    options=add_options,
    smoke=SMOKE_OPTIONS,
)

if __name__ == "__main__":
    BENCHMARK.command()
