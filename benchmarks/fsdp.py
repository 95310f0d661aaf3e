"""Training steps on several GPUs that split batch and weights (FSDP), next to BF16.

    python -m benchmarks.fsdp --json
    python -m benchmarks.fsdp --json --parts mlp --recipes tensorwise,stored
    python -m benchmarks.fsdp --json --parts llama --model llama-8b --alone stored

* *mlp* is d -> d_ff -> d of `benchmarks.train_step`; *llama* is a whole step as in
  `benchmarks.llama`; *olmoe* is one of four layers of OLMoE-1B-7B, whose experts are
  split, so that no weight of theirs travels; all with AdamW. Every GPU has as many
  tokens as one GPU alone, so `over_one_gpu` is at best the number of GPUs. `--alone`
  says which candidates run on one GPU, for a model whose others do not fit there.
* Every matrix is split along one axis, the same in every recipe: the first one in the
  MLP, and as in `models.train --mesh` in the Llama. `tcfp_jax.sharding.state_shardings`
  places the state. XLA gathers a weight before it is read and scatters the sums of its
  gradients. Gradients travel in float32, unless a name says otherwise; "stored" has
  bfloat16. "stored update=backward" is `tcfp_jax.train_step`.

Times are wall clock, over steps that depend on each other, because kernels of several
GPUs and communication overlap. Candidates of the MLP are timed in turn, after their
gradients are compared with BF16's on the same GPUs. Every other candidate has a process
of its own with all memory, and its first loss is compared with BF16's. `--resume` keeps
the rows of the JSON file, so that a long run can be cut into slices.
"""

import argparse
import dataclasses
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from benchmarks import timing
from benchmarks.fsdp_steps import (
    INSIDE,
    NARROW,
    PARTS,
    RECIPES,
    Config,
    Part,
    make_training,
    placed,
    size_of,
)
from benchmarks.harness import Benchmark, add_resume, chosen_of
from benchmarks.llama import add_sizes, sized
from benchmarks.llama_steps import STORED, quick
from benchmarks.products import GemmShape
from benchmarks.records import Result, cells, rows_of, rows_to_resume
from benchmarks.train_step import check_outputs, compare_outputs
from benchmarks.variants import BASELINE
from models.nets.meshes import AXES
from models.nets.sizes import LLAMAS, MOES

SMOKE_OPTIONS = {"recipes": STORED, "parts": "mlp"}
LEAST_SNR_DB = 5.0  # as of the steps of `benchmarks.llama`
NONE = "none"


@dataclass(frozen=True)
class Run(timing.Timing):
    """Measurements of one candidate on some devices.

    Attributes:
      compile_seconds: Seconds of tracing, lowering and compiling.
      arena_bytes: Temporary memory of a device, besides arguments and results.
      state_bytes: Parameters and optimizer state on the first device.
      peak_bytes: Peak of the first device's allocator; None if none is reported, or
        several candidates share a process.
      loss: The first loss, in nats per token; None of an MLP.
      remat: Values that a block keeps for its backward pass; None of an MLP.
    """

    compile_seconds: float
    arena_bytes: int
    state_bytes: int
    peak_bytes: int | None = None
    loss: float | None = None
    remat: str | None = None


@dataclass(frozen=True, kw_only=True)
class Row(Run):
    """One candidate on some devices.

    Attributes:
      part, recipe, devices, tokens: The candidate, and the tokens of all devices in a
        step.
      tokens_per_second: Rate of the median.
      speed_over_bf16: BF16's median divided by this one, on as many devices; None if
        BF16 did not run there.
      over_one_gpu: Tokens a second, divided by the same candidate's on one device; None
        if it did not run there.
      worst_snr_db: Lowest SNR of loss and gradients against BF16's; None for BF16.
    """

    part: Part
    recipe: str
    devices: int
    tokens: int
    tokens_per_second: float
    speed_over_bf16: float | None
    over_one_gpu: float | None
    worst_snr_db: float | None


# Measuring
# --------------------------------------------------------------------------------------


def measure(config: Config) -> Iterator[Row]:
    """Measure every part on every number of devices.

    Raises:
      ArithmeticError: gradients or the first loss are wrong.
    """
    # An MLP is measured again, because its gradients are compared in one process.
    kept = rows_of(Row, rows_to_resume(config.resume, config.settings))
    rows = [row for row in kept if row.part != "mlp"]
    yield from rows
    for part in config.parts:
        before = [row for row in rows if row.part == part]
        measure_part = _in_turn if part == "mlp" else _one_by_one
        for devices in config.devices:
            for row in measure_part(part, config, devices, before):
                before.append(row)
                yield row


def _names(part: Part, config: Config, devices: int) -> list[str]:
    """Return the candidates of a part on some devices."""
    is_reference = devices == 1 < max(config.devices)
    names = config.alone if is_reference else config.recipes
    if part == "mlp":
        names = tuple(name for name in names if not name.endswith(INSIDE))
    if devices == 1:
        names = tuple(name for name in names if not name.endswith(NARROW))
    return list(names)


def _in_turn(
    part: Part, config: Config, devices: int, before: list[Row]
) -> Iterator[Row]:
    """Measure the candidates of a part in turn in this process."""
    mesh = _mesh(devices)
    made = {}
    outputs = {}
    with jax.set_mesh(mesh):
        for name in _names(part, config, devices):
            training = make_training(part, name, config, devices)
            made[name] = _compiled(part, training, config, mesh)
            outputs[name] = functools.partial(_gradients, training, made[name][0])
        worst = compare_outputs(outputs, LEAST_SNR_DB)
        timed = config.by_wall_clock(
            {name: (step, ()) for name, (step, _) in made.items()}
        )
    rows = list(before)
    for name, (step, seconds) in made.items():
        run = Run(**vars(timed[name]), **_memory(step), compile_seconds=seconds)
        rows.append(_row(part, name, config, devices, run, worst[name], rows))
        yield rows[-1]


def _one_by_one(
    part: Part, config: Config, devices: int, before: list[Row]
) -> Iterator[Row]:
    """Measure each candidate of a part in a process of its own.

    A router chooses other experts for some tokens in FP8, so that gradients are not
    alike; those of a Llama are compared by `benchmarks.llama`.
    """
    rows = list(before)
    for name in _names(part, config, devices):
        here = {row.recipe: row for row in rows if row.devices == devices}
        if name in here:
            continue
        run = timing.measure_in_own_process(measure_one, part, config, devices, name)
        worst = None
        if name != BASELINE:
            # Without BF16 the loss has to be finite.
            reference = here.get(BASELINE, run).loss
            worst = check_outputs(name, reference, run.loss, LEAST_SNR_DB)
        rows.append(_row(part, name, config, devices, run, worst, rows))
        yield rows[-1]


def measure_one(part: Part, config: Config, devices: int, name: str) -> Run:
    """Return the run of one candidate, for a process of its own."""
    mesh = _mesh(devices)
    with jax.set_mesh(mesh):
        training = make_training(part, name, config, devices)
        step, seconds = _compiled(part, training, config, mesh)
        loss = float(step())
        timed = config.by_wall_clock({name: (step, ())})[name]
    return Run(
        **vars(timed),
        **_memory(step),
        compile_seconds=seconds,
        peak_bytes=timing.peak_bytes(),
        loss=loss,
        remat=size_of(part, name, config).remat,
    )


def _mesh(devices: int) -> Mesh:
    return jax.make_mesh(
        (1, devices, 1),
        AXES,
        axis_types=(AxisType.Auto,) * 3,
        devices=jax.devices()[:devices],
    )


def _compiled(
    part: Part, training: timing.Training, config: Config, mesh: Mesh
) -> tuple[timing.Threaded, float]:
    """Return (the compiled step with its state, seconds of compiling)."""
    bf16 = make_training(part, BASELINE, config, mesh.size)
    (floats, _), *_ = jax.eval_shape(bf16.init, jax.random.key(0))
    return training.compile(
        place=functools.partial(placed, mesh, floats, training.state_of)
    )


def _memory(step: timing.Threaded) -> dict[str, Any]:
    parts = [leaf.addressable_shards[0].data for leaf in jax.tree.leaves(step.state)]
    return {
        "arena_bytes": step.compiled.memory_analysis().temp_size_in_bytes,
        "state_bytes": sum(part.nbytes for part in parts),
    }


def _row(
    part: Part,
    name: str,
    config: Config,
    devices: int,
    run: Run,
    worst: float | None,
    before: list[Row],
) -> Row:
    """Return the row of a run, next to the rows of its part before it."""
    own = config.mlp.m if part == "mlp" else math.prod(config.llama_tokens)
    tokens = devices * own
    rate = tokens / run.median_ms * 1e3
    over = None
    speed = None
    if devices == 1:
        over = 1.0
    if name == BASELINE:
        speed = 1.0
    for row in before:
        if row.devices == 1 and row.recipe == name.removesuffix(NARROW):
            over = rate / row.tokens_per_second
        if row.devices == devices and row.recipe == BASELINE:
            speed = row.median_ms / run.median_ms
    return Row(
        **vars(run),
        part=part,
        recipe=name,
        devices=devices,
        tokens=tokens,
        tokens_per_second=rate,
        speed_over_bf16=speed,
        over_one_gpu=over,
        worst_snr_db=worst,
    )


def _gradients(training: timing.Training, step: timing.Threaded) -> Any:
    """Return the loss and the gradients of the state of a step."""
    return jax.jit(training.gradients)(*step.state, *step.inputs)


# The command and its table
# --------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add parts, recipes, devices and the size of the Llama."""
    parser.add_argument("--parts", help=f"of {','.join(PARTS)} (default: all)")
    parser.add_argument(
        "--recipes",
        help=f"of {','.join(RECIPES)} (default: all); {BASELINE} always runs",
    )
    parser.add_argument(
        "--alone",
        help=f"recipes that run on one device, too, or {NONE} (default: all)",
    )
    parser.add_argument(
        "--devices", type=int, help="how many, beside one alone (default: all)"
    )
    add_sizes(parser, [*LLAMAS])
    parser.add_argument(
        "--float-remat", help="values that blocks keep of recipes with float weights"
    )
    add_resume(parser)


def configure(options: argparse.Namespace) -> Config:
    """Return the settings of a command line.

    Raises:
      ValueError: a name is unknown, or there are not as many devices.
    """
    recipes = BASELINE, *chosen_of("recipes", options.recipes, RECIPES)
    recipes = tuple(dict.fromkeys(recipes))
    alone = recipes
    if options.alone is not None:
        alone = chosen_of("alone", options.alone, (*recipes, NONE))
    here = jax.device_count()
    wanted = options.devices or here
    if not 0 < wanted <= here:
        raise ValueError(
            f"--devices {wanted}, but this machine has {here}; use 1 to {here}"
        )
    shared: dict[str, Any] = {
        "recipes": recipes,
        "alone": tuple(name for name in alone if name != NONE),
        "parts": chosen_of("parts", options.parts, PARTS),
        "devices": tuple(sorted({1, wanted})),
        "float_remat": options.float_remat,
        "resume": options.resume or None,
    }
    if jax.default_backend() == "gpu" and not options.smoke:
        llama = sized(LLAMAS[options.model or "llama-1b"], options)
        # A step of a named model takes a second.
        shared |= {"calls": 6} if options.model is None else {"rounds": 2, "calls": 3}
        # As many layers as BF16's state and the others' leave room for on one GPU.
        olmoe = dataclasses.replace(MOES["olmoe-1b-7b"], layers=4, remat="block")
        mlp = GemmShape(8192, 4096, 16384)
        return Config(mlp, llama, olmoe, (4, 4096), **shared)
    # Blocks of 128 values of the moments, on each of two devices.
    tiny = sized(quick(LLAMAS["llama-tiny"], width=256), options)
    # Experts are stored in stacks of several layers.
    moe = dataclasses.replace(quick(MOES["moe-tiny"], width=256), layers=2, loop="scan")
    mlp = GemmShape(64, 32, 64)
    return Config(mlp, tiny, moe, (2, 32), rounds=1, calls=2, **shared)


def table(result: Result) -> str:
    """Return the page's tables: one per part, one line per candidate."""
    columns = {
        "GPUs": "{devices}",
        "": "`{recipe}`",
        "ms": "{median_ms:.2f}",
        "speedup over BF16": "**{speed_over_bf16:.2f}**",
        "tokens per second per GPU": "{rate:,.0f}",
        "of one GPU's rate": "{share:.2f}",
        "state, GB": "{state_gigabytes:.2f}",
        "arena, GB": "{arena_gigabytes:.2f}",
    }
    texts = []
    for part in result.distinct("part"):
        rows = [_per_gpu(row) for row in result.rows if row["part"] == part]
        said = _described(part, result.config)
        texts.append(f"{said}, with AdamW.\n\n{cells(rows, columns)}\n")
    return (
        "\n".join(texts)
        + "\nTimes are by the wall clock; state and arena are those of one GPU."
    )


def _per_gpu(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with its rate per GPU, and its share of one GPU's rate alone."""
    over = row["over_one_gpu"]
    share = None if over is None else over / row["devices"]
    return {**row, "rate": row["tokens_per_second"] / row["devices"], "share": share}


def json_name(options: argparse.Namespace) -> str:
    """Return the name of a run's JSON, which names the model if it is not the usual
    one.
    """
    return "fsdp" if options.model is None else f"fsdp-{options.model}"


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
    file=json_name,
)

if __name__ == "__main__":
    BENCHMARK.command()
