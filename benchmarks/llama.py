"""A converted Llama: blocks and whole training steps by recipe, and kinds of kernels.

    python -m benchmarks.llama --json
    python -m benchmarks.llama --json --parts block --recipes "tensorwise,tcfp12_single"
    python -m benchmarks.llama --json --parts step --model llama-124m --include measured

* *block* is blocks of Llama-3-8B: the output, and the gradients of the input and of
  every weight. Quantized weights are arguments; only *step* includes their
  quantization, once a step.
* *step* is a whole training step: loss, gradients, clipping and AdamW, with
  `error_feedback` at the end. Rows named "stored" train without float weights.

The clock is the wall clock; times by kind of kernel explain it.

With remat="auto", the usual value of large models, each step keeps as much as fits next
to the states of the others.

With `--include measured`, only layers that measured times say gain take the recipe;
stored weights are those of all layers. With `--include measured,head` the head takes
it, too, and stored weights are those of layers that take it. Both parts run on random
data, after output, loss and gradients were compared with BF16's. The model is plain
Flax, converted by `convert_to_tcfp`. Blocks of other libraries, if they are installed,
are those of `benchmarks.peer_models`.
"""

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, get_args

import jax

from benchmarks import timing
from benchmarks.harness import Benchmark, chosen_of
from benchmarks.llama_steps import (
    STORED,
    Candidate,
    Config,
    Part,
    make_block,
    make_step,
    next_to_each_other,
)
from benchmarks.peer_models import PEERS, is_installed
from benchmarks.records import Result, cells
from benchmarks.train_step import compare_outputs
from benchmarks.variants import BASELINE, EMULATED
from models.nets.shapes import GPTConfig, Loop, ModelConfig
from models.nets.sizes import LLAMAS, model_config, model_names

PARTS: tuple[Part, ...] = get_args(Part)
RECIPES = (
    BASELINE,
    "tensorwise",
    "tcfp12_single",
    "tcfp12_fast",
    "rowwise",
    "blockwise",
    "tcfp12",
)
CANDIDATES: dict[Part, tuple[str, ...]] = {
    "block": (*RECIPES, *PEERS),
    "step": (*RECIPES, STORED, *EMULATED),
}
EVERY = tuple(dict.fromkeys(CANDIDATES["block"] + CANDIDATES["step"]))
# Candidates of a part take turns, so all their states are in memory: 15 to 25 GB each
# for llama-1b.
USUAL: dict[Part, tuple[str, ...]] = CANDIDATES | {
    "step": (BASELINE, "tensorwise", "tcfp12_fast", "rowwise", STORED)
}
# Two blocks keep 13 dB or more. The gradients of a first layer pass the whole model:
# 8.4 dB after 16 blocks. A wrong scale or operand gives less than 3, and with four-bit
# operands, which keep less, below 0.
LEAST_SNR_DB: dict[Part, float] = {"block": 11.0, "step": 5.0}
INCLUDES = ("linear", "measured", "measured,head")
# Dense BF16 peak of an H100 or H200: the denominator of MFU for every dtype of
# operands.
PEAK_TFLOPS = 989.0


@dataclass(frozen=True)
class Row(timing.Timing):
    """One candidate in one part.

    Attributes:
      part, recipe, tokens: The part, the candidate, and the tokens of a call.
      tokens_per_second, model_tflops, mfu: Rates of the median. Model FLOPs are three
        times the forward pass's products and causal attention; `mfu` is their rate over
        an H200's BF16 peak.
      speed_over_bf16: BF16's median divided by this one.
      remat: Values that a block keeps for its backward pass.
      worst_snr_db: Lowest SNR of output (or loss) and gradients against BF16's; None
        for BF16.
      compile_seconds: Seconds of tracing, lowering and compiling.
      arena_bytes: Temporary memory of the program, besides arguments and results.
      kinds: Milliseconds by kind of kernel; None without CUPTI.
    """

    part: Part
    recipe: str
    tokens: int
    tokens_per_second: float
    model_tflops: float
    mfu: float
    speed_over_bf16: float
    remat: str
    worst_snr_db: float | None
    compile_seconds: float
    arena_bytes: int
    kinds: dict[timing.Kind, float] | None


def operations(config: ModelConfig, tokens: tuple[int, int], part: Part) -> float:
    """Return additions and multiplications of products, and half of the scores.

    >>> from models.nets.shapes import LlamaConfig
    >>> small = LlamaConfig(layers=1, width=4, heads=2, kv_heads=1, hidden=8, context=8)
    >>> weights = 4 * 4 + 2 * 4 * 2 + 4 * 4 + 3 * 4 * 8
    >>> scores = 8 * 8 * 4
    >>> operations(small, (1, 8), "block") == 3 * 2 * (8 * weights + scores)
    True
    """
    batch, positions = tokens
    # two products of scores, half of each
    attention = 2 * batch * positions**2 * config.heads * config.head_size
    forward = config.layers * (
        2 * batch * positions * config.width * config.columns + attention
    )
    if part == "step":
        forward += 2 * batch * positions * config.width * config.vocabulary
    return 3.0 * forward


MAKE: dict[Part, Callable[..., Candidate]] = {"block": make_block, "step": make_step}


def measure(config: Config) -> Iterator[Row]:
    """Check and time all candidates of every part in turn.

    Raises:
      ArithmeticError: an output is wrong.
    """
    for part in config.parts:
        yield from _measure_part(part, config)


def _measure_part(part: Part, config: Config) -> Iterator[Row]:
    names = [name for name in config.recipes[part] if is_installed(name)]
    configs = dict.fromkeys(names, config)
    size: ModelConfig = config.block
    tokens = config.block_tokens
    if part == "step":
        configs = next_to_each_other(config, names)
        size = config.step
        tokens = config.step_tokens
    made = {name: MAKE[part](configs[name], name) for name in names}
    outputs = {name: one.outputs for name, one in made.items()}
    worst = compare_outputs(outputs, LEAST_SNR_DB[part], dict.fromkeys(EMULATED, 0.0))
    # The sum of kernels' times misses up to 20 ms of a step in command buffers, and the
    # host's work in calls of other libraries.
    timed = config.by_wall_clock({name: one[:2] for name, one in made.items()})
    for name, one in made.items():
        seconds = timed[name].median_ms / 1e3
        tflops = operations(size, tokens, part) / seconds / 1e12
        kept = configs[name].step if part == "step" else config.block
        yield Row(
            **vars(timed[name]),
            part=part,
            recipe=name,
            tokens=math.prod(tokens),
            tokens_per_second=math.prod(tokens) / seconds,
            model_tflops=tflops,
            mfu=tflops / PEAK_TFLOPS,
            speed_over_bf16=timed[BASELINE].median_ms / timed[name].median_ms,
            worst_snr_db=worst[name],
            remat=getattr(kept, "remat", "none"),
            compile_seconds=one.compile_seconds,
            arena_bytes=one.compiled.memory_analysis().temp_size_in_bytes,
            kinds=timing.profile(one.function, one.args, one.compiled.as_text()),
        )


# The command and its table
# --------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add parts, recipes and sizes."""
    parser.add_argument("--parts", help=f"of {','.join(PARTS)} (default: both)")
    parser.add_argument(
        "--recipes", help=f"of {', '.join(EVERY)}; {BASELINE} always runs"
    )
    add_sizes(parser, model_names())
    parser.add_argument(
        "--include", choices=INCLUDES, help="layers that recipes convert"
    )


def add_sizes(parser: argparse.ArgumentParser, models: list[str]) -> None:
    """Add the model of a whole step, its loop, and the values that its blocks keep."""
    parser.add_argument("--model", choices=models, help="of a whole step")
    parser.add_argument("--remat", help="values that blocks keep")
    parser.add_argument("--loop", choices=get_args(Loop), help="over the blocks")


def sized(size: Any, options: argparse.Namespace, *names: str) -> Any:
    """Return the sizes of a model with those that the command line names."""
    given = {name: getattr(options, name) for name in ("remat", "loop", *names)}
    chosen = {name: value for name, value in given.items() if value}
    return replace(size, **chosen)


def configure(options: argparse.Namespace) -> Config:
    """Return the settings of a command line.

    Raises:
      ValueError: a recipe or part is unknown.
    """
    wanted = BASELINE, *chosen_of("recipes", options.recipes, EVERY)
    known = USUAL
    if options.recipes:
        known = CANDIDATES
    recipes: dict[Part, tuple[str, ...]] = {}
    for part in PARTS:
        recipes[part] = tuple(name for name in known[part] if name in wanted)
    on_gpu = jax.default_backend() == "gpu" and not options.smoke
    usual = "llama-1b" if on_gpu else "llama-tiny"
    step = sized(model_config(options.model or usual), options)
    more: dict[str, Any] = {"calls": 3}
    if on_gpu:
        block = replace(LLAMAS["llama-8b"], layers=2, remat="none")
        tokens = 2, 4096
        context = min(4096, step.context)
        step_tokens = max(1, 16384 // context), context
        if isinstance(step, GPTConfig):
            step = replace(step, attention="cudnn")
    else:
        block = replace(LLAMAS["llama-tiny"], layers=1, remat="none")
        tokens = step_tokens = 2, 32
        more = {"rounds": 2, "calls": 2, "include": ("linear", "small")}
    if options.include:
        more["include"] = tuple(options.include.split(","))
    parts = chosen_of("parts", options.parts, PARTS)
    return Config(block, step, tokens, step_tokens, recipes, parts, **more)


def table(result: Result) -> str:
    """Return the page's tables: one per part, one line per candidate."""
    columns: dict[str, str] = {
        "": "`{recipe}`",
        "ms": "{median_ms:.2f}",
        "speedup over BF16": "**{speed_over_bf16:.2f}**",
        "tokens per second": "{tokens_per_second:,.0f}",
        "MFU of BF16 · FP8": "{mfu:.0%} · {mfu_of_fp8:.0%}",
        **{kind: f"{{{kind}:.2f}}" for kind in timing.KINDS},
        "arena, GB": "{arena_gigabytes:.2f}",
    }
    said = {"block": "Forward and backward pass", "step": "Training step"}
    texts = []
    for part in result.distinct("part"):
        rows = []
        for row in result.rows:
            if row["part"] == part:
                kinds = row["kinds"] or {}
                rows.append({**row, **kinds, "mfu_of_fp8": row["mfu"] / 2})
        size = result.config[part]
        tokens = " × ".join(map(str, result.config[f"{part}_tokens"]))
        # a GPT's is four times its width
        hidden = f", hidden {size['hidden']}" if "hidden" in size else ""
        texts.append(
            f"{said[part]}: {size['layers']} blocks of width {size['width']}{hidden},"
            f" {tokens} tokens, {rows[0]['timer']}.\n"
        )
        texts.append(f"{cells(rows, columns)}\n")
    return (
        "\n".join(texts)
        + "\nColumns between MFU and arena are milliseconds by kind of kernel. MFU is"
        " model FLOP/s divided by the dense peaks of an H100 or H200: 989 TFLOP/s in"
        " BF16, 1,979 in FP8."
    )


BENCHMARK = Benchmark(
    "llama",
    __doc__,
    configure,
    measure,
    table,
    options=add_options,
    smoke={"recipes": "tensorwise", "parts": "block"},
)

if __name__ == "__main__":
    BENCHMARK.command()
