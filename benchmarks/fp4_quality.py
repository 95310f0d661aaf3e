"""Held-out perplexity of a GPT with FP4 kernels, by the method that chose codes and
scales after training.

    python -m benchmarks.fp4_quality --json
    python -m benchmarks.fp4_quality --layers 4 --width 256 --steps 300          # minutes on a CPU

A GPT trains in BF16 by `models.train`, on the source of every installed package. Then
each row replaces all kernels of its blocks by their FP4 values and evaluates in BF16,
which equals products of 4-bit weights and 16-bit activations; embeddings, norms and the
head stay. GPTQ reads Hessians of one calibration pass over the training text.

    gap closed = 1 - (perplexity - BF16's) / (nearest's - BF16's)           nearest of the same format

The direction of an error decides its cost in first order, which is luck for one model.
So each row is also evaluated with the mirrored error, W - (Q - W). The mean of both has
only the curvature, which a method can lower.
"""

import argparse
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import common
from benchmarks.common import Result, markdown_table
from models.families import FAMILIES, RULES
from models.gpt import GPTConfig
from models.settings import TrainConfig
from models.text import Corpus, load_installed
from models.train import keep_programs
from models.training import TrainState, batch_key, evaluate, init, make_train_step
from pallas_kernels.operands import Fp4, Operand
from tcfp_jax import paths
from tcfp_jax.conversion.transform import transform
from tcfp_jax.inference import gptq, hessians, search_scales
from tcfp_jax.weights.fp4_packing import quantize_fp4

NAME = "fp4_quality"
BASELINE = "bf16"
# The recipe changes neither the products of the float model nor their inputs.
_ANY_RECIPE = "tensorwise"
Method = Callable[[jax.Array, jax.Array], Operand]


def _nearest(scaling: Fp4) -> Method:
    return lambda w, hessian: quantize_fp4(w, scaling)


def _searched(scaling: Fp4) -> Method:
    return lambda w, hessian: search_scales(w, scaling)


def _compensated(scaling: Fp4, scales: Any = "rule") -> Method:
    return lambda w, hessian: gptq(w, hessian, scaling, scales=scales)


_FOUR_OVER_SIX, _FOLD_EXACT, _SQUARES = (
    Fp4(rule="four_over_six"),
    Fp4(rule="fold_exact"),
    Fp4(tile="square"),
)
# name: (name in the table, method)
METHODS: dict[str, tuple[str, Method]] = {
    "nearest": ("NVFP4, nearest, amax / 6", _nearest(Fp4())),
    "four_over_six": ("NVFP4, amax / 6 or amax / 4", _nearest(_FOUR_OVER_SIX)),
    "fold_exact": (
        "NVFP4, scales whose products are E4M3 numbers",
        _nearest(_FOLD_EXACT),
    ),
    "search": ("**NVFP4, exhaustive search of the scales**", _searched(Fp4())),
    "search_fold_exact": (
        "the same, scales whose products are E4M3 numbers",
        _searched(_FOLD_EXACT),
    ),
    "search_by_inputs": (
        "the same as the search, weighted by the inputs' squares",
        lambda w, hessian: search_scales(w, importance=jnp.diagonal(hessian)),
    ),
    "gptq": ("GPTQ, amax / 6", _compensated(Fp4())),
    "gptq_four_over_six": (
        "**GPTQ, amax / 6 or amax / 4**",
        _compensated(_FOUR_OVER_SIX),
    ),
    "gptq_fold_exact": (
        "GPTQ, scales whose products are E4M3 numbers",
        _compensated(_FOLD_EXACT),
    ),
    "gptq_search": (
        "**GPTQ, exhaustive search of the scales**",
        _compensated(Fp4(), "search"),
    ),
    "squares": ("NVFP4 of 16 x 16 squares, nearest", _nearest(_SQUARES)),
    "gptq_squares_search": (
        "the same, GPTQ with a search",
        _compensated(_SQUARES, "search"),
    ),
    "mxfp4": ("MXFP4, nearest, OCP's rule", _nearest(Fp4("mxfp4"))),
    "mxfp4_search": ("MXFP4, exhaustive search of the scales", _searched(Fp4("mxfp4"))),
    "mxfp4_gptq_search": (
        "MXFP4, GPTQ with a search",
        _compensated(Fp4("mxfp4"), "search"),
    ),
}
# Each other method takes a minute of compilation.
DEFAULT = (
    "nearest",
    "four_over_six",
    "fold_exact",
    "search",
    "gptq",
    "gptq_four_over_six",
    "gptq_search",
    "mxfp4",
    "mxfp4_search",
)
SMOKE_OPTIONS = {"methods": "nearest"}


@dataclass(frozen=True)
class Config:
    """Settings of a run.

    Attributes:
      model: Layers, width, heads, context and attention.
      steps, batch, sequence, learning_rate: Settings of the training in BF16.
      seeds: One model per seed.
      calibration_windows: Windows of the training text of `sequence` tokens, for the
        Hessians.
      heldout_windows: Windows of the evaluation.
      text_bytes: Largest size of the text.
      methods: Methods that are measured next to BF16.
      text, text_read: First digits of the text's digest, and its size in bytes.
    """

    model: GPTConfig
    steps: int = 1200
    batch: int = 64
    sequence: int = 512
    learning_rate: float = 1e-3
    seeds: tuple[int, ...] = (0,)
    calibration_windows: int = 128
    heldout_windows: int = 1024
    text_bytes: int = 200_000_000
    methods: tuple[str, ...] = DEFAULT
    text: str = ""
    text_read: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Row:
    """One way to quantize the kernels of one model.

    Attributes:
      bits: Bits of a weight, codes and scales; 16 for BF16.
      weight_db, output_db: Signal over noise of all kernels, and of their products with
        the calibration's inputs; None for BF16.
      heldout_loss, perplexity: Nats per byte, and exp of it.
      gap_closed: Part of nearest's gap of the same format; None for BF16, or if nearest
        was not measured.
      mirrored_loss: Held-out loss with the mirrored error.
      curvature_closed: The same part, of the mean perplexity of both errors.
      seconds: Seconds to quantize all kernels, compilation included.
    """

    name: str
    seed: int
    bits: float
    weight_db: float | None
    output_db: float | None
    heldout_loss: float
    perplexity: float
    gap_closed: float | None
    mirrored_loss: float
    curvature_closed: float | None
    seconds: float


def train_config(config: Config, seed: int = 0) -> TrainConfig:
    """Return the run of `models.train`."""
    return TrainConfig(
        model=config.model,
        recipe="bf16",
        steps=config.steps,
        seed=seed,
        batch=config.batch,
        sequence=config.sequence,
        learning_rate=config.learning_rate,
        steps_per_call=min(100, config.steps),
        heldout_windows=config.heldout_windows,
        corpus_bytes=config.text_bytes,
    )


def train(config: Config, seed: int, corpus: Corpus) -> TrainState:
    """Return the state after the last step."""
    run, text, started = (
        train_config(config, seed),
        jnp.asarray(corpus.train),
        time.perf_counter(),
    )
    losses: Any = None
    state, done = init(run), 0
    while done < config.steps:
        count = min(run.steps_per_call, config.steps - done)
        state, losses = make_train_step(run, count)(state, text, batch_key(run))
        done += count
    print(
        f"trained {sum(leaf.size for leaf in jax.tree.leaves(state.params)):,}"
        f" parameters to {np.mean(losses):.4f} nats in"
        f" {time.perf_counter() - started:.1f} s",
        flush=True,
    )
    return state


def calibrate(config: Config, params: Any, corpus: Corpus) -> dict[str, jax.Array]:
    """Return the Hessian of every kernel of the blocks, by path."""
    run = train_config(config)
    model = FAMILIES["gpt"].plain(config.model, run.compute_dtype)
    call = lambda params, tokens: model.apply({"params": params}, tokens)
    low = transform(call, _ANY_RECIPE, include=("linear", "small"), rules=RULES)
    starts = np.linspace(
        0, len(corpus.train) - config.sequence, config.calibration_windows
    ).astype(np.int64)
    windows = np.stack(
        [corpus.train[start : start + config.sequence] for start in starts]
    ).astype(np.int32)
    size = math.gcd(config.calibration_windows, config.batch)
    return hessians(
        low,
        params,
        (jnp.asarray(windows[i : i + size]) for i in range(0, len(windows), size)),
    )


@jax.jit
def _dequantized(operand: Operand) -> jax.Array:
    return operand.dequantize()


@jax.jit
def _noise(w: jax.Array, stood_for: jax.Array, hessian: jax.Array) -> jax.Array:
    """Return (signal, noise) of a kernel, and of its products with the inputs of a
    Hessian.
    """
    made = lambda w: jnp.sum(jnp.matmul(w, hessian, precision="highest") * w)
    error = stood_for - w
    return jnp.stack([jnp.sum(w * w), jnp.sum(error * error), made(w), made(error)])


def quantized(
    method: Method, params: Any, moments: Mapping[str, jax.Array]
) -> tuple[Any, float, tuple[float, float]]:
    """Return (parameters with FP4 values as kernels, bits a weight, both
    signal-to-noise ratios).
    """
    params, leaves = jax.tree.map(lambda leaf: leaf, params), paths.leaves(params)
    size = values = 0
    noise = np.zeros(4)
    for path, hessian in moments.items():
        w = leaves[path].T  # [n, k]
        operand = method(w, hessian)
        stood_for = _dequantized(operand)
        if not bool(jnp.isfinite(stood_for).all()):
            raise ValueError(f"the operand of {path} is not finite")
        noise += np.asarray(_noise(w, stood_for, hessian), np.float64)
        size, values = size + 8 * operand.nbytes, values + w.size
        paths.put(params, path.split("/"), stood_for.T)
    weights, outputs = (10 * math.log10(noise[i] / noise[i + 1]) for i in (0, 2))
    return params, size / values, (weights, outputs)


def measure(config: Config) -> Iterator[Row]:
    """Measure BF16, then each method on the same trained weights, for every seed."""
    corpus = load_installed(byte_limit=config.text_bytes)
    for seed in config.seeds:
        state = train(config, seed, corpus)
        started = time.perf_counter()
        moments = jax.block_until_ready(calibrate(config, state.params, corpus))
        print(
            f"calibrated {len(moments)} kernels in"
            f" {time.perf_counter() - started:.1f} s",
            flush=True,
        )
        yield from _measure_methods(
            config, seed, state, moments, jnp.asarray(corpus.heldout)
        )


def _measure_methods(
    config: Config,
    seed: int,
    state: TrainState,
    moments: Mapping[str, jax.Array],
    heldout: jax.Array,
) -> Iterator[Row]:
    loss = lambda params: evaluate(
        train_config(config, seed), state._replace(params=params), heldout
    )
    base = loss(state.params)
    yield Row(
        BASELINE, seed, 16.0, None, None, base, math.exp(base), None, base, None, 0.0
    )
    gaps: dict[str, float] = {}
    curved: dict[str, float] = {}
    for name in config.methods:
        started = time.perf_counter()
        params, bits, (weight_db, output_db) = quantized(
            METHODS[name][1], state.params, moments
        )
        seconds, found = time.perf_counter() - started, loss(params)
        mirrored = loss(
            jax.tree.map(lambda w, stood_for: 2 * w - stood_for, state.params, params)
        )
        gaps[name] = math.exp(found) - math.exp(base)
        curved[name] = (math.exp(found) + math.exp(mirrored)) / 2 - math.exp(base)
        print(
            f"{name}, seed {seed}: held-out {found:.5f}, mirrored {mirrored:.5f},"
            f" {seconds:.1f} s",
            flush=True,
        )
        yield Row(
            name,
            seed,
            bits,
            weight_db,
            output_db,
            found,
            math.exp(found),
            _closed(name, gaps),
            mirrored,
            _closed(name, curved),
            seconds,
        )


def _closed(name: str, gaps: Mapping[str, float]) -> float | None:
    """Return the part of nearest's gap of the same format that a method closes; None if
    nearest has none.
    """
    nearest = gaps.get("mxfp4" if name.startswith("mxfp4") else "nearest", 0.0)
    return 1 - gaps[name] / nearest if nearest > 0 else None


# The command and its table
# --------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add methods, the model's size, and its training."""
    parser.add_argument(
        "--methods", help=f"of {','.join(METHODS)} (default: {','.join(DEFAULT)})"
    )
    for name, default in dict(layers=8, width=512, heads=8).items():
        parser.add_argument(
            f"--{name}",
            type=int,
            default=default,
            help=f"of the model (default: {default})",
        )
    parser.add_argument(
        "--seeds", type=common.positive, default=1, help="how many models (default: 1)"
    )
    for name in (
        "steps",
        "batch",
        "sequence",
        "calibration_windows",
        "heldout_windows",
        "text_bytes",
    ):
        default = getattr(Config, name)
        parser.add_argument(
            "--" + name.replace("_", "-"),
            type=int,
            default=default,
            help=f"(default: {default})",
        )
    rate = Config.learning_rate
    parser.add_argument(
        "--learning-rate",
        type=float,
        default=rate,
        help=f"the peak (default: {rate:g})",
    )


def configure(options: argparse.Namespace) -> Config:
    """Return the settings of a command line.

    Raises:
      ValueError: a method is unknown.
    """
    methods = common.chosen_of(
        "methods", options.methods or ",".join(DEFAULT), tuple(METHODS)
    )
    attention: Any = "cudnn" if jax.default_backend() == "gpu" else "products"
    names = (
        "steps",
        "batch",
        "sequence",
        "calibration_windows",
        "heldout_windows",
        "text_bytes",
    )
    chosen = {name: getattr(options, name) for name in (*names, "learning_rate")}
    model = GPTConfig(
        options.layers,
        options.width,
        options.heads,
        context=options.sequence,
        attention=attention,
    )
    if options.smoke:
        # cuDNN needs heads of 64.
        model = GPTConfig(layers=1, width=64, heads=1, context=32, attention=attention)
        chosen |= dict(
            steps=5,
            batch=4,
            sequence=32,
            calibration_windows=2,
            heldout_windows=8,
            text_bytes=200_000,
        )
    if jax.default_backend() == "gpu":  # most of a first run is compilation
        keep_programs(common.ROOT / "runs" / NAME)
    corpus = load_installed(byte_limit=int(chosen["text_bytes"]))
    config = Config(
        model,
        seeds=tuple(range(options.seeds)),
        methods=methods,
        text=corpus.digest[:12],
        **chosen,
    )
    return dataclasses.replace(
        config, text_read=len(corpus.train) + len(corpus.heldout)
    )


def table(result: Result) -> str:
    """Return the page's table: one line per method, means over the models."""
    number = lambda value, text: "–" if value is None else format(value, text)
    found = {
        name: [row for row in result.rows if row["name"] == name]
        for name in result.distinct("name")
    }
    mean = lambda name, column: statistics.fmean(row[column] for row in found[name])
    base = mean(BASELINE, "perplexity")
    gaps = {name: mean(name, "perplexity") - base for name in found if name != BASELINE}
    both = {
        name: (
            statistics.fmean(
                (row["perplexity"] + math.exp(row["mirrored_loss"])) / 2
                for row in found[name]
            )
            - base
        )
        for name in gaps
    }
    noise = lambda name, column: (
        "–" if name == BASELINE else f"{mean(name, column):.1f}"
    )
    closed = lambda name, gaps: (
        number(_closed(name, gaps), ".0%") if name in gaps else "–"
    )
    names = {BASELINE: "BF16"} | {
        name: meaning for name, (meaning, _) in METHODS.items()
    }
    lines = [
        [
            names[name],
            f"{mean(name, 'bits'):.2f}",
            noise(name, "weight_db"),
            noise(name, "output_db"),
            f"{mean(name, 'heldout_loss'):.5f}",
            f"{mean(name, 'perplexity'):.4f}",
            closed(name, gaps),
            closed(name, both),
        ]
        for name in found
    ]
    titles = [
        "kernels",
        "bits",
        "weights, dB",
        "outputs, dB",
        "held-out nats",
        "perplexity",
        "gap closed",
    ]
    titles += ["with both signs of the error"]
    config = result.config
    model = config["model"]
    return (
        f"{markdown_table(titles, lines)}\n\nA GPT of {model['layers']} layers of width"
        f" {model['width']}, {config['steps']} steps of {config['batch']} ×"
        f" {config['sequence']} bytes in BF16, of {config['text_read'] / 1e6:,.0f} MB"
        f" of Python sources; {config['calibration_windows']} windows of the training"
        f" text calibrate, {config['heldout_windows']} held-out ones judge;"
        f" {len(config['seeds'])} model(s), means. The gap is that of nearest's"
        " perplexity over BF16's, of the same format; the last column takes the mean"
        " of what an error and its mirror image cost, which leaves out where it"
        " happens to point. Kernels of 16 × 16 squares are compared with nearest"
        " vectors."
    )


if __name__ == "__main__":
    common.command(NAME)
