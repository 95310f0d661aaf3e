"""Training steps on several GPUs that split batch and weights (FSDP), next to BF16 and
next to one GPU.

    python -m benchmarks.fsdp --json
    python -m benchmarks.fsdp --json --parts mlp --recipes "tensorwise,stored" --devices 4

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

from benchmarks import llama, timing, train_step
from benchmarks.harness import Benchmark
from benchmarks.options import chosen_of
from benchmarks.records import Result
from benchmarks.shapes import GemmShape, quick
from benchmarks.tables import markdown_table
from benchmarks.train_step import check_outputs
from models.nets.meshes import AXES, BATCH, parameter_shardings
from models.nets.shapes import LlamaConfig, MoeConfig
from models.nets.sizes import LLAMAS, MOES
from tcfp_jax.recipes import recipe
from tcfp_jax.sharding import state_shardings

NAME = "fsdp"
Part = Literal["mlp", "llama", "olmoe"]
PARTS: tuple[Part, ...] = get_args(Part)
BASELINE, STORED, AXIS = "bf16", "stored", "fsdp"
SMOKE_OPTIONS = {"recipes": STORED, "parts": "mlp"}
NARROW = " wire=bfloat16"
RECIPES = (
    BASELINE,
    "tensorwise",
    "tensorwise" + NARROW,
    "tcfp12_fast",
    "tcfp12_fast" + NARROW,
    STORED,
)


@dataclass(frozen=True)
class Config:
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
    rounds: int = 5
    calls: int = 6


@dataclass(frozen=True)
class Row(timing.Timing):
    """One candidate on some devices.

    Attributes:
      part, recipe, devices, tokens: The candidate, and the tokens of all devices in a
        step.
      tokens_per_second: Rate of the median.
      speed_over_bf16: BF16's median divided by this one, on as many devices.
      over_one_gpu: Tokens a second, divided by the same candidate's on one device; None
        if that did not run.
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
    """Return (the step of a candidate with the same number of tokens on every device,
    its tokens).
    """
    if part != "mlp":
        tokens = (devices * config.llama_tokens[0], config.llama_tokens[1])
        size = config.llama if part == "llama" else config.olmoe
        few = llama.Config(size, size, tokens, tokens, {}, include=("linear", "small"))
        return llama.make_training(few, name), math.prod(tokens)
    shape = dataclasses.replace(config.mlp, m=devices * config.mlp.m)
    kept = train_step.Kept("stored", moments="8bit", gradient_dtype="bfloat16")
    chosen = recipe("tcfp12_single" if name == STORED else name.removesuffix(NARROW))
    chosen = recipe(chosen, wire="bfloat16") if name.endswith(NARROW) else chosen
    return (
        train_step.make_training(
            shape, chosen, kept if name == STORED else train_step.Kept()
        ),
        shape.m,
    )


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
                base = alone.get(row.recipe.removesuffix(NARROW))
                over = None if base is None else row.tokens_per_second / base
                yield dataclasses.replace(row, over_one_gpu=over)


def measure_part(part: Part, config: Config, devices: int) -> list[Row]:
    """Check and time the candidates of a part on some devices; raise `ArithmeticError`
    if gradients are wrong.
    """
    mesh = jax.make_mesh(
        (1, devices, 1),
        AXES,
        axis_types=(AxisType.Auto,) * 3,
        devices=jax.devices()[:devices],
    )
    made: dict[str, tuple[timing.Threaded, float, int]] = {}
    worst: dict[str, float | None] = {}
    reference = None
    (floats, _), *_ = jax.eval_shape(
        make_training(part, BASELINE, config, devices)[0].init, jax.random.key(0)
    )
    with jax.set_mesh(mesh):
        for name in config.recipes:
            if name.endswith(NARROW) and (devices == 1 or part != "mlp"):
                continue
            training, tokens = make_training(part, name, config, devices)
            step, seconds = training.compile(
                place=functools.partial(placed, mesh, floats, training.state_of)
            )
            made[name] = step, seconds, tokens
            if part == "olmoe" or (part == "llama" and devices > 1):
                # A Llama's gradients were compared on one GPU; compiling them again
                # would take as long as the rest. A router chooses other experts for
                # some tokens in FP8, and their gradients are not alike.
                outputs: dict[str, Any] = {"loss": step()}
            else:
                outputs = dict(
                    zip(
                        ("loss", "gradients"),
                        jax.jit(training.gradients)(*step.state, *step.inputs),
                        strict=True,
                    )
                )
            least = llama.LEAST_SNR_DB["step"]
            worst[name] = (
                None
                if reference is None
                else check_outputs(name, reference, outputs, least=least)
            )
            reference = outputs if reference is None else reference
        del outputs, reference
        candidates: Any = {name: (step, ()) for name, (step, _, _) in made.items()}
        timed = timing.time_by_wall_clock(
            candidates, rounds=config.rounds, calls=config.calls
        )
    return [
        Row(
            **dataclasses.asdict(timed[name]),
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
        for name, (step, seconds, tokens) in made.items()
    ]


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
    """Return the settings of a command line; raise `ValueError` for unknown names, or
    too many devices.
    """
    recipes = tuple(
        dict.fromkeys((BASELINE, *chosen_of("recipes", options.recipes, RECIPES)))
    )
    parts = chosen_of("parts", options.parts, PARTS)
    here = jax.device_count()
    wanted = options.devices or here
    if not 0 < wanted <= here:
        raise ValueError(
            f"--devices {wanted}, but this machine has {here}; use 1 to {here}"
        )
    devices = tuple(sorted({1, wanted}))
    if jax.default_backend() == "gpu" and not options.smoke:
        # As many layers as BF16's state and the others' leave room for on one GPU.
        olmoe = dataclasses.replace(MOES["olmoe-1b-7b"], layers=4, remat="block")
        return Config(
            GemmShape(8192, 4096, 16384),
            LLAMAS["llama-1b"],
            olmoe,
            (4, 4096),
            recipes,
            parts,
            devices,
        )
    # Blocks of 128 values of the moments, on each of two devices.
    tiny, moe = (
        quick(dataclasses.replace(size, width=256))
        for size in (LLAMAS["llama-tiny"], MOES["moe-tiny"])
    )
    return Config(
        GemmShape(64, 32, 64),
        tiny,
        moe,
        (2, 32),
        recipes,
        parts,
        devices,
        rounds=1,
        calls=2,
    )


def table(result: Result) -> str:
    """Return the page's tables: one per part, one line per candidate."""
    texts = []
    for part in result.distinct("part"):
        lines = []
        for row in (row for row in result.rows if row["part"] == part):
            over = "–" if row["over_one_gpu"] is None else f"{row['over_one_gpu']:.2f}"
            lines.append(
                [
                    str(row["devices"]),
                    f"`{row['recipe']}`",
                    f"{row['median_ms']:.2f}",
                    f"**{row['speed_over_bf16']:.2f}**",
                    f"{row['tokens_per_second'] / 1e3:,.0f}k",
                    over,
                    f"{row['state_bytes'] / 1e9:.2f}",
                    f"{row['arena_bytes'] / 1e9:.2f}",
                ]
            )
        titles = [
            "GPUs",
            "",
            "ms",
            "speed over BF16",
            "tokens a second",
            "over one GPU",
            "state, GB",
            "arena, GB",
        ]
        mlp, size = (
            result.config["mlp"],
            result.config[part if part == "olmoe" else "llama"],
        )
        kind = "A Llama" if part == "llama" else "OLMoE-1B-7B"
        tokens = " × ".join(map(str, result.config["llama_tokens"]))
        what = (
            f"An MLP of {mlp['k']} → {mlp['n']} → {mlp['k']}, {mlp['m']} tokens a GPU"
            if part == "mlp"
            else (
                f"{kind} of {size['layers']} layers of width {size['width']}, {tokens}"
                " tokens a GPU"
            )
        )
        texts.append(f"{what}, with AdamW.\n\n{markdown_table(titles, lines)}\n")
    return (
        "\n".join(texts)
        + "\nTimes are by the wall clock; state and arena are those of one GPU."
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
