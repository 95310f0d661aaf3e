"""The PyTorch original's own comparison on its TinyGPT, in this library's words: 4 layers of width 256, 1000 steps.

    python -m benchmarks.original --json --seeds 8 --budget-seconds 550
    python -m benchmarks.original --json --seeds 8 --resume --budget-seconds 550      # until nothing is left undone

BF16, TCFP-12 with each flag of the original's layers (`Recipe.from_flags`), its block sizes, plain FP8, and fake
quantization: weights and activations rounded to FP8, with a scale a tensor, and multiplied in BF16, gradients not
rounded at all. Each run is paired with BF16's of the same seed; `models.train.run` trains all of them on real text.
The flags `use_fused_kernel` and `use_cuda_ext` choose kernels and not numbers, so they have no rows.
"""

import argparse
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from benchmarks import common, pairs
from benchmarks.common import Result
from benchmarks.fork_runs import last_tenth
from benchmarks.pairs import Row
from benchmarks.variants import BASELINE, RERUN, RERUN_JITTER
from models.gpt import GPTConfig
from models.settings import TrainConfig, preset
from models.train import corpus_of, keep_programs, run
from models.training import batch_key, init, lower_evaluation, make_train_step
from tcfp_jax import formats
from tcfp_jax.linen import TCFPDense
from tcfp_jax.recipes import Recipe, recipe

NAME = "original"
FAKE, PLAIN = "fake_quantization", {"fp8", "fp8_e4m3"}
# BF16's numbers, and another recipe: by it `fake_quantized` knows its layers, and JAX their programs.
FAKE_RECIPE = recipe("bf16", backend="xla")
FP8 = formats.datatype("e4m3fn", "e8m0")
_flags = Recipe.from_flags
VARIANTS: dict[str, Recipe] = {
    BASELINE: recipe("bf16"),
    RERUN: recipe("bf16"),
    "tcfp12": _flags(),
    "no_error_feedback": _flags(error_feedback=False),
    "srr": _flags(error_feedback=False, srr=True),
    "abd": _flags(abd=True),
    "hp_grad_weight": _flags(hp_grad_weight=True),
    "abd_hp_grad_weight": _flags(abd=True, hp_grad_weight=True),
    "delayed_scaling": _flags(delayed_scaling=True),
    "no_tensor_cores": _flags(use_tensor_cores=False),
    **{f"block_{size}": _flags(scale_block_size=size) for size in (128, 64, 32)},
    "fp8": recipe("tensorwise"),
    "fp8_e4m3": recipe("tensorwise", gradient="float8_e4m3fn"),
    FAKE: FAKE_RECIPE,
}
MEANINGS = {
    BASELINE: "BF16",
    RERUN: f"BF16, weights perturbed by {RERUN_JITTER:g}",
    "tcfp12": "**TCFP-12**, the flags as the original has them",
    "no_error_feedback": "TCFP-12, `error_feedback=False`",
    "srr": "TCFP-12, `srr=True` in the place of error feedback",
    "abd": "TCFP-12, `abd=True`",
    "hp_grad_weight": "TCFP-12, `hp_grad_weight=True`",
    "abd_hp_grad_weight": "TCFP-12, `abd=True, hp_grad_weight=True`",
    "delayed_scaling": "TCFP-12, `delayed_scaling=True`",
    "no_tensor_cores": "TCFP-12, `use_tensor_cores=False`: weights alone are rounded",
    **{f"block_{size}": f"TCFP-12, `scale_block_size={size}`" for size in (128, 64, 32)},
    "fp8": "plain FP8: `tensorwise`, E5M2 gradients",
    "fp8_e4m3": "plain FP8, E4M3 gradients",
    FAKE: "fake quantization: E4M3 weights and activations, BF16 products",
}
WHY = (
    "Plain FP8 does not diverge here: scales of tensors are found anew at every use, so that casts clip nothing, "
    "products of the backward pass add in float32, and the parameters that the optimizer updates are float32. A step "
    "loses the rounding of its operands and nothing of its update."
)


@dataclass(frozen=True, kw_only=True)
class Config(pairs.Config):
    """Settings of a run.

    Attributes:
      model, steps: of `models.train`, at the model's own rate.
      heldout_windows: of the evaluation.
      text: first digits of the text's digest, which is this machine's standard library.
      overrides: other fields of `TrainConfig`, of a smoke run.
    """

    model: str = "small"
    steps: int = 1000
    heldout_windows: int = 1024
    text: str = ""
    jax: str = jax.__version__
    overrides: dict[str, Any] = dataclasses.field(default_factory=dict, compare=False)


def fake_quantized(
    next_function: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext
) -> Any:
    """An interceptor of `nn.intercept_methods`: `y = Q(x) Q(W) + b`, with the gradient as if Q were the identity.

    It concerns layers of `FAKE_RECIPE` alone. Q rounds to E4M3 with the power of two that clips nothing.
    """
    layer = context.module
    if not (isinstance(layer, TCFPDense) and layer.recipe == FAKE_RECIPE and context.method_name == "__call__"):
        return next_function(*args, **kwargs)
    params, (x,) = layer.variables["params"], args
    q = functools.partial(formats.cast, datatype=FP8, scalemode="ceil")
    y = jnp.matmul(q(x), q(params["kernel"]).astype(x.dtype))
    return y + params["bias"].astype(x.dtype)


def train_config(config: Config, name: str, seed: int) -> TrainConfig:
    """The run of a variant."""
    base = preset(config.model, steps=config.steps, heldout_windows=config.heldout_windows)
    jitter = RERUN_JITTER if name == RERUN else 0.0
    own: Any = dict(recipe=VARIANTS[name], seed=seed, initial_jitter=jitter)
    return dataclasses.replace(base, **config.overrides, **own)


def measure_one(config: Config, name: str, seed: int) -> Row:
    """Train and evaluate one variant."""
    started = time.perf_counter()
    with nn.intercept_methods(fake_quantized):
        found = run(train_config(config, name, seed))
    return Row(
        name, seed, last_tenth(list(found.train_loss)), found.heldout_loss, found.heldout_loss_bf16, None,
        time.perf_counter() - started, repr(VARIANTS[name]), **common.origin_of_row(),
    )  # fmt: skip


def compile_one(config: Config, name: str) -> None:
    """Compile the programs of a variant: its steps, its evaluation, and what makes its state."""
    wanted = train_config(config, name, 0)
    corpus = corpus_of(wanted)
    text = jax.ShapeDtypeStruct(corpus.train.shape, corpus.train.dtype)
    steps: Any = make_train_step(wanted)
    with nn.intercept_methods(fake_quantized):
        state = init(wanted)
        steps.lower(state, text, batch_key(wanted)).compile()
        lower_evaluation(wanted, state, len(corpus.heldout)).compile()


def measure(config: Config) -> Iterator[Row]:
    """The runs that are kept, then the wanted ones."""
    return pairs.runs(config, VARIANTS, functools.partial(measure_one, config), functools.partial(compile_one, config))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Variants, seeds, steps, and when to stop."""
    pairs.add_options(parser, VARIANTS, seeds=5)
    parser.add_argument("--steps", type=int, default=Config.steps, help=f"(default: {Config.steps})")


def configure(options: argparse.Namespace) -> Config:
    """The settings of a command line.

    Raises:
      ValueError: as of `pairs.wanted_of`.
    """
    config = Config(steps=options.steps)
    if options.smoke:
        options.seeds, options.variants = 1, options.variants or ",".join((BASELINE, "tcfp12", FAKE))
        micro = GPTConfig(layers=1, width=32, heads=2, context=32)
        overrides = {"model": micro, "batch": 2, "sequence": 32, "corpus_bytes": 1_000_000, "steps_per_call": 2}
        config = Config(model="tiny", steps=4, heldout_windows=8, overrides=overrides)
    if jax.default_backend() == "gpu":  # most of a first run is compilation
        keep_programs(common.ROOT / "runs" / NAME)
    wanted = pairs.wanted_of(options, VARIANTS)
    text = corpus_of(train_config(config, BASELINE, 0)).digest[:12]
    return dataclasses.replace(config, text=text, wanted=wanted)


def show(rows: list[Row]) -> None:
    """Print what the rows say of each variant."""
    pairs.show(rows, tuple(VARIANTS))


def table(result: Result) -> str:
    """A line a variant; why plain FP8 does not diverge, where it does not."""
    found, config = pairs.summaries(result, tuple(VARIANTS)), result.config
    trained = {s.name for s in found if math.isfinite(s.mean_ratio)}
    return (
        f"{pairs.table(found, MEANINGS, 'held-out perplexity over BF16')}\n\n"
        f"GPT `{config['model']}`, {config['steps']} steps. {pairs.MEANS}" + (f" {WHY}" if trained >= PLAIN else "")
    )


def plot(figure: Any, result: Result) -> None:
    """A line of dots a variant."""
    title = "Held-out perplexity over that of BF16 with the same seed; the bar is the mean"
    pairs.plot(figure, result, tuple(VARIANTS), title)


main = functools.partial(common.main, NAME)

if __name__ == "__main__":
    common.command(NAME)
