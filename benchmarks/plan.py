"""A plan past one host, on paper: steps of Llamas on 8 to 512 GPUs, from counted bytes and one GPU's measured rates.

    python -m benchmarks.plan --json

Nothing here was run: every number is arithmetic. Bytes are counted from shapes (`jax.eval_shape` of the model, of its
stored weights and of its optimizer's state), rates of products are those of `benchmarks.llama` on one H200, and the
speeds of links and memory are published. The formulas are in the functions below, and on the page:

    compute   = layers (forward + again + backward) + head + optimizer
    gather    = max(bytes (g - 1)/g / NVLink, bytes (h - 1)/h / between hosts)     g GPUs on h hosts; a scatter alike
    exposed   = what a layer's gathers and scatters last longer than its computing, first gather and last scatter
"""

import argparse
import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from benchmarks import common, large, llama
from benchmarks.common import Result, markdown_table, read_result
from benchmarks.counted import BASELINE, BF16_BYTES, RECIPES, WAYS, Counted, count
from models.llama import LLAMAS, LlamaConfig
from models.losses import TOKENS_AT_ONCE

NAME = "plan"
Layout = Literal["all", "host"]
MODELS = {
    "llama-8b": LLAMAS["llama-8b"],
    "llama-70b": dataclasses.replace(
        LLAMAS["llama-8b"], layers=80, width=8192, heads=64, kv_heads=8, hidden=28_672
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """A host and its GPUs, published: bytes a second of a GPU's NVLink each way and of its memory, bytes of memory."""

    gpus: int = 8
    nvlink: float = 450e9
    memory_speed: float = 4.8e12
    memory: float = 141e9


@dataclass(frozen=True)
class Config:
    """Settings of the plan.

    Attributes:
      models: sizes by name.
      tokens: sequences of a GPU, and tokens in each.
      gpus, between: how many GPUs, and GB/s between hosts: what one host receives.
      machine: what is published of it.
      rates: FLOP/s of products and all that is between them, by way: measured.
      source: where the rates come from.
      checks: (way, seconds by this arithmetic, seconds measured) of a step on one GPU.
    """

    models: dict[str, LlamaConfig]
    tokens: tuple[int, int]
    gpus: tuple[int, ...]
    between: tuple[float, ...]
    machine: Machine
    rates: dict[str, float]
    source: str
    checks: tuple[tuple[str, float, float], ...]


@dataclass(frozen=True)
class Row:
    """One way to train a model on some GPUs, with the faster layout of those that fit, else the smaller one.

    Attributes:
      model, way, gpus, between: what.
      layout: weights and state are split over "all" GPUs, or over those of a "host", and hosts have equal ones.
      memory_gb: of a GPU.
      fits: whether it has so much.
      compute_ms: computing alone.
      wire_ms: gathers and scatters alone: exposed where nothing overlaps.
      exposed_ms: what is left of them where they overlap with computing.
      step_ms: compute and exposed.
      speed_over_bf16: BF16's step over this one; None where BF16 does not fit.
    """

    model: str
    way: str
    gpus: int
    between: float
    layout: Layout
    memory_gb: float
    fits: bool
    compute_ms: float
    wire_ms: float
    exposed_ms: float
    step_ms: float
    speed_over_bf16: float | None


# The arithmetic -------------------------------------------------------------------------------------------------------


class Computing(NamedTuple):
    """Seconds of one GPU: a layer's forward pass, its backward pass that multiplies forward again, all the rest."""

    forward: float
    backward: float
    rest: float

    def step(self, layers: int) -> float:
        """Of a step."""
        return layers * (self.forward + self.backward) + self.rest


def computing(config: Config, model: LlamaConfig, way: str, counted: Counted, shards: int) -> Computing:
    """What a step computes: operations over measured rates; the head in BF16, and memory's share of an optimizer.

    forward = operations(layer) / 3 / rate, backward = 3 forward, head = 4/3 operations(head) / BF16's rate,
    optimizer = (2 state + gradients) / shards / memory's speed
    """
    part = llama.operations(model, config.tokens, "block")
    head = llama.operations(model, config.tokens, "step") - part
    forward = part / model.layers / 3 / config.rates[way]
    gradients = BF16_BYTES * (counted.weights + counted.shared_weights)
    optimizer = (2 * counted.state + gradients) / shards / config.machine.memory_speed
    return Computing(forward, 3 * forward, head * 4 / 3 / config.rates[BASELINE] + optimizer)


def gather_seconds(size: float, gpus: int, between: float, machine: Machine) -> float:
    """A gather of `size` bytes to each GPU, or a reduce-scatter: the slower of NVLink and the links between hosts.

    Each GPU receives what it does not have, `(g - 1)/g`, and each host once what its GPUs do not have, `(h - 1)/h`.

    >>> machine = Machine(gpus=2, nvlink=4.0)
    >>> [gather_seconds(8.0, gpus, between, machine) for gpus, between in ((2, 1e9), (4, 1e9), (4, 2e-9))]
    [1.0, 1.5, 2.0]
    """
    hosts = max(1, gpus // machine.gpus)
    return max(size * (gpus - 1) / gpus / machine.nvlink, size * (hosts - 1) / hosts / (between * 1e9))


def sum_seconds(size: float, hosts: int, between: float) -> float:
    """The sum over hosts of `size` bytes that each has once, by reduce-scatter and gather: 2 size (h - 1)/h / between.

    >>> sum_seconds(8e9, 4, 1.0)
    12.0
    """
    return 2 * size * (hosts - 1) / hosts / (between * 1e9)


def wire_seconds(
    model: LlamaConfig, counted: Counted, computed: Computing, gather: Any, last: Any
) -> tuple[float, float]:
    """(of all gathers and sums of a step, what is exposed where they overlap with computing).

    Args:
      model, counted, computed: as above.
      gather: seconds of gathering, or of scattering, so many bytes.
      last: seconds of summing so many bytes over hosts; zero where nothing is left to sum.

    While a layer computes, the weights of the next one travel, and the gradients of the one before. What a layer's
    communication lasts longer than its computing is exposed, and so are the first gather and the last scatter.
    """
    layers, gradient = model.layers, BF16_BYTES * counted.weights / model.layers
    in_forward, in_backward = gather(counted.forward / layers), gather(counted.backward / layers)
    out = gather(gradient)
    summed = last(gradient)
    # Embedding and head: gathered in both passes, their gradients handed out once.
    shared = 3 * gather(counted.shared) + last(counted.shared)
    every = layers * (in_forward + in_backward + out + summed) + shared
    # Within a host and between hosts are different wires, which are busy at a time.
    backward = max(in_backward + out, summed)
    late = max(0.0, in_forward - computed.forward) + max(0.0, backward - computed.backward)
    return every, min(every, layers * late + in_forward + out + summed + max(0.0, shared - computed.rest))


def memory_bytes(config: Config, model: LlamaConfig, counted: Counted, shards: int) -> float:
    """Of a GPU: its share of state and gradients, gathered weights, inputs of blocks, one block's activations, logits.

    (state + 2 weights) / shards + (2 forward + 2 weights) / layers + shared + sequences (kept + block) + 6 logits
    """
    gradients = BF16_BYTES * (counted.weights + counted.shared_weights)
    gathered = (2 * counted.forward + BF16_BYTES * counted.weights) / model.layers + counted.shared
    logits = (4 + BF16_BYTES) * TOKENS_AT_ONCE * model.vocabulary
    return (counted.state + gradients) / shards + gathered + config.tokens[0] * (counted.kept + counted.block) + logits


def plan_one(config: Config, name: str, way: str, counted: Counted, gpus: int, between: float, layout: Layout) -> Row:
    """A row of one layout, without BF16 beside it."""
    model, machine = config.models[name], config.machine
    shards, hosts = (gpus, 1) if layout == "all" else (machine.gpus, gpus // machine.gpus)
    computed = computing(config, model, way, counted, shards)
    gather = functools.partial(gather_seconds, gpus=shards, between=between, machine=machine)
    last = functools.partial(sum_seconds, hosts=hosts, between=between)
    wire, exposed = wire_seconds(model, counted, computed, gather, last)
    compute, memory = computed.step(model.layers), memory_bytes(config, model, counted, shards)
    return Row(
        model=name, way=way, gpus=gpus, between=between, layout=layout, memory_gb=memory / 1e9,
        fits=memory <= machine.memory, compute_ms=compute * 1e3, wire_ms=wire * 1e3, exposed_ms=exposed * 1e3,
        step_ms=(compute + exposed) * 1e3, speed_over_bf16=None,
    )  # fmt: skip


def measure(config: Config) -> Iterator[Row]:
    """Every row; nothing is timed."""
    for name, model in config.models.items():
        counted = {way: count(model, way, config.tokens[1]) for way in WAYS}
        for gpus in config.gpus:
            for between in config.between if gpus > config.machine.gpus else config.between[:1]:
                baseline = None
                for way in WAYS:
                    layouts: tuple[Layout, ...] = ("all",) if gpus <= config.machine.gpus else ("all", "host")
                    rows = [plan_one(config, name, way, counted[way], gpus, between, layout) for layout in layouts]
                    chosen = min([row for row in rows if row.fits] or rows[:1], key=lambda row: row.step_ms)
                    baseline = chosen if way == BASELINE else baseline
                    faster = baseline.step_ms / chosen.step_ms if baseline and baseline.fits else None
                    yield dataclasses.replace(chosen, speed_over_bf16=faster)


# The command and its table --------------------------------------------------------------------------------------------


def rates_of(result: Result) -> dict[str, float]:
    """FLOP/s of blocks by way, forward and backward pass, as `benchmarks.llama` measured them.

    Raises:
      ValueError: a way was not measured.
    """
    found = {row["recipe"]: row["model_tflops"] * 1e12 for row in result.rows if row["part"] == "block"}
    if lacking := [recipe for recipe in RECIPES.values() if recipe not in found]:
        raise ValueError(f"benchmarks.llama has no blocks of {lacking}; measure them with --parts block")
    return {way: found[recipe] for way, recipe in RECIPES.items()}


def checks_of(config: Config, result: Result | None) -> tuple[tuple[str, float, float], ...]:
    """(way, seconds by the arithmetic, seconds measured) of the steps that `benchmarks.large` measured on one GPU."""
    if result is None:
        return ()
    found = []
    for row in result.rows:
        model = dataclasses.replace(MODELS["llama-8b"], layers=row["layers"])
        own = dataclasses.replace(config, tokens=tuple(result.config["tokens"]))
        counted = count(model, row["recipe"], own.tokens[1])
        computed = computing(own, model, row["recipe"], counted, 1).step(model.layers)
        found.append((row["recipe"], computed, row["median_ms"] / 1e3))
    return tuple(found)


def configure(options: argparse.Namespace) -> Config:
    """The settings of the page; a smoke run has one small model and made-up rates.

    Raises:
      FileNotFoundError: `benchmarks.llama` has no results.
    """
    if options.smoke:
        rates = {way: 1e12 * (1 + place) for place, way in enumerate(WAYS)}
        models = {"llama-tiny": LLAMAS["llama-tiny"]}
        return Config(models, (2, 64), (8, 16), (50.0, 400.0), Machine(), rates, "made up", ())
    blocks = read_result(llama.NAME)
    if blocks is None:
        raise FileNotFoundError("no results of benchmarks.llama to take rates from; run it with --json on a GPU")
    source = f"`benchmarks.llama`, {blocks.origin.removesuffix(common.AGE)}"
    config = Config(MODELS, (2, 4096), (8, 64, 512), (50.0, 400.0), Machine(), rates_of(blocks), source, ())
    return dataclasses.replace(config, checks=checks_of(config, read_result(large.NAME)))


def show(rows: list[Row]) -> None:
    """Print the rows."""
    columns = ("model", "way", "gpus", "between", "layout", "memory_gb", "compute_ms", "wire_ms", "exposed_ms")
    common.print_rows(rows, *columns, "step_ms", "speed_over_bf16")


def table(result: Result) -> str:
    """A table a model, a line for GPUs, link and way; and what the arithmetic says of steps that were measured."""
    titles = ["GPUs, GB/s between hosts", "way", "layout", "GB a GPU", "computing, ms", "communication, ms",
              "exposed, ms", "step without overlap, ms", "step, ms", "over BF16"]  # fmt: skip
    texts = []
    for model in result.distinct("model"):
        lines = []
        for row in (row for row in result.rows if row["model"] == model):
            between = f"{row['between']:.0f}" if row["gpus"] > result.config["machine"]["gpus"] else "one host"
            head = [f"{row['gpus']}, {between}", f"`{row['way']}`", row["layout"], f"{row['memory_gb']:.0f}"]
            times = [row["compute_ms"], row["wire_ms"], row["exposed_ms"], row["compute_ms"] + row["wire_ms"]]
            cells = [f"{time:,.0f}" for time in (*times, row["step_ms"])]
            faster = "–" if row["speed_over_bf16"] is None else f"**{row['speed_over_bf16']:.2f}**"
            lines.append([*head, *([*cells, faster] if row["fits"] else ["does not fit", *["–"] * 5])])
        texts.append(f"### {model} (arithmetic)\n\n{markdown_table(titles, lines)}")
    tokens, rates = result.config["tokens"], result.config["rates"]
    speeds = ", ".join(f"`{way}` {rate / 1e12:,.0f}" for way, rate in rates.items())
    texts.append(
        f"Every number above is arithmetic. {tokens[0]} × {tokens[1]} tokens a GPU. Measured rates of blocks, in "
        f"TFLOP/s: {speeds} ({result.config['source']})."
    )
    if result.config["checks"]:
        say = "`{}` {:.2f} s ({:.2f} s were measured)".format
        said = ", ".join(say(*check) for check in result.config["checks"])
        texts.append(f"The same arithmetic of `llama-8b` on one GPU, four sequences a step: {said}.")
    return "\n\n".join(texts)


main = functools.partial(common.main, NAME)

if __name__ == "__main__":
    common.command(NAME)
