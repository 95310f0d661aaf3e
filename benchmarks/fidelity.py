"""Gradients of every recipe against float32's, at a trained checkpoint: of each product alone, and of the whole model.

    python -m benchmarks.fidelity --json --model llama-124m --base-steps 1000
    python -m benchmarks.fidelity --json --model gpt2 --start base.npz --data novels/

The reference is the same model in float32 with products of the highest precision. A product "alone" gets the inputs x,
the weight and the gradient g of its result as the reference has them, so that its three results (forward, dgrad, wgrad)
have its own error and nobody else's. The "whole" gradient is that of a training step, with products as the recipe and
activations as `dtype` say, so that errors add up through the model.

    SNR = 10 log10(sum r^2 / sum (v - r)^2)      cosine = sum r v / sqrt(sum r^2 sum v^2)      r: the reference

A run follows the mean of many gradients. A mean takes away what is random in their errors, as it does with the noise of
batches, and keeps what is common to all: so the SNR of the mean of some batches is shown, and the share of the error's
energy that they have in common. Recipes that draw random bits draw others for each batch. A base trains in BF16 first,
or is read from what `models.train --export` wrote.
"""

import argparse
import dataclasses
import functools
import math
import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import common
from benchmarks.common import Result, markdown_table
from benchmarks.gradients import (
    Agreement,
    Programs,
    Reference,
    compare_alone,
    compare_whole,
    compiled,
    place_of,
    refer,
)
from benchmarks.variants import BASELINE, GROUPS, VARIANTS, Variant, chosen_of
from models import ComputeDtype
from models.families import ModelConfig, model_names
from models.llama import LlamaConfig
from models.running import checked_corpus
from models.settings import TrainConfig, preset
from models.train import corpus_of, keep_programs
from models.training import batch_key, init, make_train_step, read_start, windows
from tcfp_jax.recipes import NAMES

NAME = "fidelity"
Product = Literal["forward", "dgrad", "wgrad"]
PRODUCTS: tuple[Product, ...] = ("forward", "dgrad", "wgrad")
# Of the ways that learning is compared by, those that make one step's gradient what it is.
WAYS = {name: v for name, v in VARIANTS.items() if v == Variant(v.recipe, v.weights, v.moments)}
USUAL = (*NAMES, "tensorwise_e4m3", "stored", "stored_e5m2", "stored_dual_forward")


@dataclass(frozen=True)
class Config:
    """Settings of a run.

    Attributes:
      model: a name of `models.families`, or a size.
      base_steps: in BF16, at the model's own rate; none with `start`, unless asked for.
      start: float parameters as `models.train --export` writes them, or None for random ones.
      batch, sequence: of the base, and of the batches whose gradients are compared.
      batches: how many of these.
      alone: windows of the first of them whose operands are captured for products alone.
      dtype: of activations.
      ways: of `WAYS`.
      data: as of `models.train`.
    """

    model: str | ModelConfig = "llama-124m"
    base_steps: int = 1000
    start: str | None = None
    batch: int = 16
    sequence: int = 1024
    batches: int = 4
    alone: int = 8
    dtype: ComputeDtype = "bfloat16"
    ways: tuple[str, ...] = USUAL
    data: tuple[str, ...] = ()
    seed: int = 0


CPU = Config("llama-tiny", base_steps=300, sequence=128)
# One shape of matrices, so that a product is compiled once.
SMOKE = Config(
    LlamaConfig(layers=2, width=128, heads=2, kv_heads=2, hidden=128, context=32), base_steps=20, batch=4, sequence=32,
    batches=2, alone=4, ways=("bf16", "tensorwise", "tcfp12", "stored"),
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A way to train, against the reference.

    Attributes:
      loss: what it adds to the mean loss of the batches, nats.
      snr_db, cosine: of the whole gradient, over all batches and parameters.
      mean_snr_db: of the mean of the batches' whole gradients.
      common: the share of the error's energy that is the same in every batch.
      whole: of each matrix's part of the whole gradient, over all batches: (SNR, cosine) by kind and layer, "qkv 3".
      alone: of forward, dgrad and wgrad of each product alone, in this order.
      seconds: of its measurement, compilation not included.
      way: the Python expression of it.
    """

    name: str
    loss: float
    snr_db: float
    cosine: float
    mean_snr_db: float
    common: float
    whole: dict[str, Agreement]
    alone: dict[str, tuple[Agreement, ...]]
    seconds: float
    way: str


# Measuring ------------------------------------------------------------------------------------------------------------


def measure(config: Config) -> Iterator[Row]:
    """The base, the reference, and each way against it.

    Raises:
      RuntimeError: a way failed; the others were done first.
    """
    reference = refer(_run(config), *_base(config), config.alone)
    runs: dict[str, TrainConfig] = {name: _run(config, name) for name in config.ways}
    failed: list[str] = []
    with ThreadPoolExecutor(max(1, min(8, (os.cpu_count() or 1) // 2))) as pool:
        programs = {name: _attempt(failed, name, compiled, run, reference, pool) for name, run in runs.items()}
        for name, run in runs.items():
            if programs[name] is not None:
                row = _attempt(failed, name, _measured, run, name, reference, programs.pop(name))
                yield from (row,) if row is not None else ()
    if failed:
        raise RuntimeError(f"{len(failed)} ways failed, see above: {', '.join(failed)}")


def _attempt(failed: list[str], name: str, function: Callable[..., Any], *args: Any) -> Any:
    """The result; or None of a way that fails, which is reported and noted, so that the others are still compared."""
    try:
        return function(*args)
    except Exception:
        traceback.print_exc()
        failed.append(name)
        return None


def _run(config: Config, way: str = BASELINE, start: str | None = None) -> TrainConfig:
    model: Any = config.model
    variant = WAYS[way]
    return preset(
        model, recipe=variant.recipe, weights=variant.weights, moments=variant.moments, start=start,
        steps=max(1, config.base_steps), batch=config.batch, sequence=config.sequence, dtype=config.dtype,
        data=config.data, seed=config.seed,
    )  # fmt: skip


def _base(config: Config) -> tuple[Any, tuple[jax.Array, ...]]:
    """(trained parameters, the batches that would come next)."""
    run = _run(config, start=config.start)
    text, key, state, losses = jnp.asarray(corpus_of(run).train), batch_key(run), init(run), None
    for step in range(0, config.base_steps, run.steps_per_call):
        state, found = make_train_step(run, min(run.steps_per_call, config.base_steps - step))(state, text, key)
        losses = np.asarray(found)
    loss = "" if losses is None else f", training loss {losses.mean():.4f} nats"
    print(f"base: {config.base_steps} steps in BF16{loss}", flush=True)
    later = [state._replace(step=state.step + i) for i in range(config.batches)]
    take = jax.jit(functools.partial(windows, run))
    return state.params, tuple(take(state, text, key) for state in later)


def _measured(run: TrainConfig, name: str, reference: Reference, programs: Programs) -> Row:
    key, started = jax.random.fold_in(jax.random.key(run.seed), 1), time.perf_counter()
    whole, alone = compare_whole(run, reference, programs, key), compare_alone(reference, programs, key)
    snr_db, cosine = whole.gradient
    print(f"{name}: whole gradient {snr_db:.1f} dB", flush=True)
    return Row(
        name, whole.loss, snr_db, cosine, whole.mean[0], whole.common, whole.matrices, alone,
        time.perf_counter() - started, repr(WAYS[name]),
    )  # fmt: skip


# The command and its tables -------------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """The model, its checkpoint, and the ways."""
    parser.add_argument("--model", choices=model_names(), help="size (default: llama-124m on a GPU, else llama-tiny)")
    parser.add_argument("--base-steps", type=int, help="of the base in BF16 (default: 1000 on a GPU; 0 with --start)")
    parser.add_argument("--start", metavar="NPZ", help="float parameters of the model, as models.train --export writes")
    parser.add_argument("--data", nargs="+", default=None, help="as of models.train")
    parser.add_argument("--batches", type=int, help=f"whose gradients are compared (default: {Config.batches})")
    parser.add_argument("--variants", help=f"groups of {', '.join(GROUPS)} or names (default: the named recipes)")


def configure(options: argparse.Namespace) -> Config:
    """The settings of a command line.

    Raises:
      ValueError: unknown variants, or such without a gradient of their own, no batch, negative steps, a text that is
        shorter than a window, or a checkpoint of another model.
      FileNotFoundError: there is no such text or checkpoint.
    """
    on_gpu = jax.default_backend() == "gpu"
    config = SMOKE if options.smoke else Config() if on_gpu else CPU
    if options.start is not None:
        config = dataclasses.replace(config, start=options.start, base_steps=0)
    names = ("model", "base_steps", "batches")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    config = dataclasses.replace(config, **given, data=tuple(options.data or ()))
    if options.variants:
        config = dataclasses.replace(config, ways=_ways(options.variants))
    if config.batches < 1 or config.base_steps < 0:
        raise ValueError(
            f"--batches {config.batches} and --base-steps {config.base_steps}: gradients need a batch, and a base has "
            "no negative number of steps; raise them"
        )
    checked_corpus(_run(config))
    if config.start is not None:
        read_start(_run(config, start=config.start))  # what is no checkpoint of this model is refused here
    if on_gpu:
        keep_programs(common.ROOT / "runs" / NAME)
    return config


def _ways(text: str) -> tuple[str, ...]:
    names = chosen_of(text)
    if others := [name for name in names if name not in WAYS]:
        raise ValueError(
            f"--variants has {others}, whose single gradients are those of another one: they differ in what stays from "
            f"step to step, or in some steps or blocks; use names of {list(WAYS)}"
        )
    return names


def show(rows: list[Row]) -> None:
    """Print a line a way."""
    titles = ["way", "loss", "whole, dB", "cosine", "mean, dB", "in common", "worst matrix", *PRODUCTS]
    common.print_table(titles, [_line(dataclasses.asdict(row)) for row in rows])


def _line(row: Mapping[str, Any]) -> list[str]:
    worst = min(row["whole"], key=lambda name: _known(row["whole"][name][0]))
    medians = [_median(row, product) for product in PRODUCTS]
    numbers = {"loss": "+.5f", "snr_db": ".1f", "cosine": ".5f", "mean_snr_db": ".1f", "common": ".0%"}
    return [
        f"`{row['name']}`", *(_cell(row[name], spec) for name, spec in numbers.items()),
        f"{_cell(row['whole'][worst][0], '.1f')} ({worst})", *(_cell(value, ".1f") for value in medians),
    ]  # fmt: skip


def _cell(value: float | None, spec: str) -> str:
    return "–" if math.isnan(_known(value)) else format(value, spec)


def _known(value: float | None) -> float:
    """JSON has null for what is not finite."""
    return math.nan if value is None else value


def _median(row: Mapping[str, Any], product: Product, kind: str | None = None) -> float:
    found = [of[PRODUCTS.index(product)][0] for name, of in row["alone"].items() if kind in (None, place_of(name)[1])]
    return statistics.median(map(_known, found))


def table(result: Result) -> str:
    """A line a way: the whole gradient, and products alone; then the products by kind of matrix."""
    config, rows = result.config, result.rows
    kinds = list(dict.fromkeys(place_of(name)[1] for name in rows[0]["alone"]))
    titles = ["", "loss, nats", "whole gradient, dB", "cosine", f"mean of {config['batches']}, dB"]
    titles += ["error in common", "worst matrix, dB"]
    by_kind = [
        [f"`{row['name']}`", *(" · ".join(f"{_median(row, p, kind):.1f}" for p in PRODUCTS) for kind in kinds)]
        for row in rows
    ]
    base = f"read from {config['start']} and " if config["start"] else ""
    model = f"`{config['model']}`" if isinstance(config["model"], str) else f"{config['model']['layers']} layers"
    return (
        f"{markdown_table([*titles, *PRODUCTS], list(map(_line, rows)))}\n\n"
        f"{model}, {base}trained for {config['base_steps']} steps of {config['batch']} × {config['sequence']} tokens "
        f"in BF16, with {config['dtype']} activations. The loss is what the recipe adds to that of float32. The whole "
        f"gradient is compared over {config['batches']} batches, and then the mean of theirs; the error in common is "
        "the share of the error's energy that is the same in every batch. The last three columns are medians over all "
        "matrices, each product alone; here by kind of matrix, forward · dgrad · wgrad, in dB:\n\n"
        f"{markdown_table(['', *kinds], by_kind)}"
    )


def plot(figure: Any, result: Result) -> None:
    """Heat maps over layers and ways: the whole gradient, and each product alone; medians over kinds of matrices."""
    names = [row["name"] for row in result.rows]
    layers = sorted({place_of(name)[0] for name in result.rows[0]["alone"]})
    titles = ("whole gradient", *(f"{product} alone" for product in PRODUCTS))
    figure.set_size_inches(4 + 0.9 * len(layers), 1.5 + 0.5 * len(names))
    for axes, title in zip(figure.subplots(2, 2, sharex=True, sharey=True).flat, titles, strict=True):
        values = np.array([[_middle(row, layer, title) for layer in layers] for row in result.rows], np.float64)
        image = axes.pcolormesh([*range(len(layers) + 1)], [*range(len(names) + 1)], values, cmap="viridis")
        figure.colorbar(image, ax=axes).ax.tick_params(labelsize=7)
        axes.set_yticks([i + 0.5 for i in range(len(names))], names, fontsize=7)
        axes.set_xticks([i + 0.5 for i in range(len(layers))], [str(layer) for layer in layers], fontsize=7)
        axes.set_title(f"{title}, dB", fontsize=9)
        axes.set_ylim(len(names), 0)
    figure.supxlabel("layer", fontsize=9)


def _middle(row: Mapping[str, Any], layer: int, title: str) -> float:
    """The median over the matrices of a layer of what a panel shows."""
    product = title.split()[0]
    of = {
        name: row["alone"][name][PRODUCTS.index(product)] if product in PRODUCTS else row["whole"][name]
        for name in row["alone"]
        if place_of(name)[0] == layer
    }
    return statistics.median(_known(snr_db) for snr_db, _ in of.values())


main = functools.partial(common.main, NAME)

if __name__ == "__main__":
    common.command(NAME)
