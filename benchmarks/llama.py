"""A converted Llama: blocks and whole training steps by recipe, with the time of each
kind of kernel.

    python -m benchmarks.llama --json
    python -m benchmarks.llama --json --parts block --recipes "tensorwise,tcfp12_single" --layers 1
    python -m benchmarks.llama --json --parts step --model llama-124m --include measured

* *block* is blocks of Llama-3-8B: the output, and the gradients of the input and of
  every weight. Quantized weights are arguments; only *step* includes their
  quantization, once a step.
* *step* is a whole training step: loss, gradients, clipping and AdamW, with
  `error_feedback` at the end. Rows named "stored" train without float weights. Steps
  are timed by the wall clock.

With remat="auto", the usual value of large models, each step keeps as much as fits next
to the states of the others.

With `--include measured`, only layers that measured times say gain take the recipe;
stored weights are those of all layers. With `--include measured,head` the head takes
it, too, and stored weights are those of layers that take it. Both parts run on random
data, after output, loss and gradients were compared with BF16's. The model is plain
Flax, converted by `convert_to_tcfp`. `flax Fp8DirectDotGeneralOp` is Flax's own FP8
with delayed scales, and `qwix` is Google's, if it is installed.
"""

import argparse
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import tcfp_jax
from benchmarks import breakdown, fitting, peers, timing
from benchmarks.breakdown import KINDS
from benchmarks.fitting import BASELINE, STORED
from benchmarks.harness import Benchmark
from benchmarks.options import chosen_of
from benchmarks.peers import PEERS
from benchmarks.records import Result
from benchmarks.tables import markdown_table, print_rows
from benchmarks.train_step import check_outputs
from benchmarks.variants import EMULATED
from models.nets.families import EXACT, TABLES, learner, plain_model
from models.nets.llama import Block
from models.nets.positions import rotations
from models.nets.shapes import GPTConfig, LlamaConfig, Loop, ModelConfig, MoeConfig
from models.nets.sizes import LLAMAS, model_config, model_names
from tcfp_jax.conversion import convert_to_tcfp, find_weights

NAME = "llama"
Part = Literal["block", "step"]
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
# Candidates of a part take turns, so all their states are in memory: 15 to 25 GB each
# for llama-1b.
USUAL: dict[Part, tuple[str, ...]] = CANDIDATES | {
    "step": (BASELINE, "tensorwise", "tcfp12_fast", "rowwise", STORED)
}
# Two blocks keep 13 dB or more. The gradients of a first layer pass the whole model:
# 8.4 dB after 16 blocks. A wrong scale or operand gives less than 3, and with four-bit
# operands, which keep less, below 0.
LEAST_SNR_DB: dict[str, float] = {"block": 11.0, "step": 5.0} | dict.fromkeys(
    EMULATED, 0.0
)
INCLUDES = ("linear", "measured", "measured,head")
SMOKE_OPTIONS = {"recipes": "tensorwise", "parts": "block"}
# Dense BF16 peak of an H100 or H200: the denominator of MFU for every dtype of
# operands.
PEAK_TFLOPS = 989.0


@dataclass(frozen=True)
class Config:
    """Settings of a run: sizes of each part, and repetitions."""

    block: LlamaConfig
    step: ModelConfig
    block_tokens: tuple[int, int]
    step_tokens: tuple[int, int]
    recipes: dict[Part, tuple[str, ...]]
    parts: tuple[Part, ...] = PARTS
    rounds: int = 5
    calls: int = 3
    include: tuple[Any, ...] = ("linear",)  # argument of `convert_to_tcfp`


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
    kinds: dict[breakdown.Kind, float] | None


class Blocks(nn.Module):
    """Blocks of a Llama in sequence, `[batch, positions, width]` to the same."""

    config: LlamaConfig
    dot_general_cls: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply the blocks."""
        rotation = rotations(x.shape[1], self.config.head_size, self.config.rope_theta)
        for i in range(self.config.layers):
            x, _ = Block(
                self.config, "bfloat16", self.dot_general_cls, name=f"block_{i}"
            )(x, rotation)
        return x


class _Candidate(NamedTuple):
    function: Any
    args: tuple[Any, ...]
    compiled: Any
    compile_seconds: float
    outputs: Callable[[], Any]


def operations(config: ModelConfig, tokens: tuple[int, int], part: Part) -> float:
    """Return additions and multiplications of both passes: products, and half of
    attention's scores.

    >>> small = LlamaConfig(layers=1, width=4, heads=2, kv_heads=1, hidden=8, context=8)
    >>> operations(small, (1, 8), "block") == 3 * 2 * 8 * (4 * 4 + 2 * 4 * 2 + 4 * 4 + 3 * 4 * 8) + 3 * 2 * 8 * 8 * 4
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


def make_block(config: Config, name: str, seed: int = 0) -> _Candidate:
    """Return the forward and backward pass of blocks, compiled."""
    (batch, positions), size = config.block_tokens, config.block
    model = peers.quantized(name, functools.partial(Blocks, size))

    def draw(key: jax.Array) -> tuple[Any, jax.Array, jax.Array]:
        keys = jax.random.split(key, 3)
        x, g = (
            jax.random.normal(k, (batch, positions, size.width)).astype(jnp.bfloat16)
            for k in keys[:2]
        )
        return model.init(keys[2], x), x, g

    x = jax.ShapeDtypeStruct((batch, positions, size.width), jnp.bfloat16)
    converted: Any = (
        model
        if name in (BASELINE, *PEERS)
        else convert_to_tcfp(model, name, x, include=config.include)
    )
    feedback = (
        None if converted is model else tcfp_jax.error_feedback(find_weights(converted))
    )

    @jax.jit
    def prepare(key: jax.Array) -> Any:
        variables, x, g = draw(key)
        params = variables.pop("params")
        state = (
            variables
            if feedback is None
            else {"tcfp": tcfp_jax.layer_state(feedback.init(params))}
        )
        return params, state, x, g

    def step(params: Any, state: Any, x: jax.Array, g: jax.Array) -> dict[str, Any]:
        y, pull = jax.vjp(
            lambda p, x: converted.apply({"params": p, **state}, x), params, x
        )
        dparams, dx = pull(g)
        return {"y": y, "dx": dx, "dparams": dparams}

    key = jax.random.key(seed)
    compiled, seconds = timing.compile_timed(
        jax.jit(step), *jax.eval_shape(prepare, key)
    )
    args = prepare(key)
    return _Candidate(compiled, args, compiled, seconds, lambda: compiled(*args))


def make_training(
    config: Config, name: str, rate: float | optax.Schedule = 1e-4
) -> timing.Training:
    """Return a whole training step before it is compiled; `rate` is AdamW's."""
    (batch, positions), size = config.step_tokens, config.step
    model = plain_model(size, "bfloat16")
    # XLA multiplies every row by every expert, so the baseline of experts is the
    # recipe, whose products are grouped.
    plain = name == BASELINE and not isinstance(size, MoeConfig)
    converted, weights = (model, None) if plain else _converted_step(config, name)
    optimizer = _optimizer(name, weights, rate)

    @tcfp_jax.value_and_grad
    def gradients(params: Any, opt_state: Any, tokens: jax.Array) -> jax.Array:
        state = {} if weights is None else {"tcfp": tcfp_jax.layer_state(opt_state)}
        rngs = {"tcfp": jax.random.key(0)} if name in EMULATED else None
        losses: Any = converted.apply(
            {"params": params, **state}, tokens[:, :-1], tokens[:, 1:], rngs=rngs
        )
        return losses.mean()

    def step(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        loss, dparams = gradients(*state, tokens)
        with jax.named_scope("optimizer"):
            updates, opt_state = optimizer.update(dparams, state[1], state[0])
            return (tcfp_jax.apply_updates(state[0], updates), opt_state), loss

    def init(key: jax.Array) -> tuple[Any, jax.Array]:
        floats = lambda: model.init(key, jnp.zeros((1, 8), jnp.int32))["params"]
        params: Any = None
        if name == STORED:
            params = tcfp_jax.store(
                floats, weights or {}, key=key, gradient_dtype=jnp.bfloat16
            )
        else:
            params = floats()
        tokens = jax.random.randint(key, (batch, positions + 1), 0, size.vocabulary)
        return state_of(params), tokens

    def state_of(params: Any) -> Any:
        return params, optimizer.init(params)

    return timing.Training(init, step, gradients, state_of)


def make_step(config: Config, name: str, seed: int = 0) -> _Candidate:
    """Return a whole training step, compiled, which donates its state."""
    training = make_training(config, name)
    threaded, seconds = training.compile(seed)

    def outputs() -> dict[str, Any]:
        loss, dparams = jax.jit(training.gradients)(*threaded.state, *threaded.inputs)
        return {"loss": loss, "dparams": dparams}

    return _Candidate(threaded, (), threaded.compiled, seconds, outputs)


def _converted_step(config: Config, name: str) -> tuple[Any, Any]:
    """Return (the model of the whole step, its weights)."""
    recipe = tcfp_jax.recipe(fitting.RECIPE_OF.get(name, name))
    include, everywhere = config.include, name == STORED or name in EMULATED
    # no layer of its shape was measured
    rules: Any = {"^(embedding|head)/": recipe} if "head" in include else {}
    if "measured" in include and not rules:
        if not everywhere:
            return learner(config.step, recipe, "bfloat16", config.step_tokens)
        include = ("linear", "small")
    if name in EMULATED:  # which gains nowhere
        include = ("linear", "small")
    if isinstance(config.step, GPTConfig):
        return learner(config.step, recipe, "bfloat16")
    if name == STORED:
        include = (*include, *TABLES)
    shape = jax.ShapeDtypeStruct(config.step_tokens, jnp.int32)
    plain = plain_model(config.step, "bfloat16")
    model = convert_to_tcfp(plain, recipe, shape, include=include, rules=EXACT | rules)
    return model, find_weights(model) or None


def _optimizer(
    name: str, weights: Any, rate: float | optax.Schedule
) -> optax.GradientTransformation:
    """Return clipping and AdamW, as a user writes them for each kind of weights."""
    if name == STORED:
        return tcfp_jax.optim.adamw(
            rate, moments="8bit", max_norm=1.0, key=jax.random.key(0)
        )
    parts = [optax.clip_by_global_norm(1.0), optax.adamw(rate)]
    return optax.chain(
        *parts, *([] if weights is None else [tcfp_jax.error_feedback(weights)])
    )


MAKE: dict[Part, Callable[..., _Candidate]] = {"block": make_block, "step": make_step}


def measure(config: Config) -> Iterator[Row]:
    """Measure every part, with all candidates in turn."""
    for part in config.parts:
        yield from measure_part(part, config)


def measure_part(part: Part, config: Config) -> list[Row]:
    """Check and time the candidates of one part; raise `ArithmeticError` if an output
    is wrong.
    """
    names = [name for name in config.recipes[part] if peers.is_installed(name)]
    made: dict[str, _Candidate] = {}
    configs = (
        fitting.next_to_each_other(config, names, make_training)
        if part == "step"
        else dict.fromkeys(names, config)
    )
    worst: dict[str, float | None] = {}
    reference = None
    for name in names:
        made[name] = MAKE[part](configs[name], name)
        outputs = made[name].outputs()
        least = LEAST_SNR_DB.get(name, LEAST_SNR_DB[part])
        worst[name] = (
            None
            if reference is None
            else check_outputs(name, reference, outputs, least=least)
        )
        reference = outputs if reference is None else reference
    del outputs, reference
    candidates: Any = {name: (c.function, c.args) for name, c in made.items()}
    # A step runs in command buffers, where the sum of its kernels' times misses up to
    # 20 ms.
    time = timing.time_by_wall_clock if part == "step" else timing.time_interleaved
    timed = time(candidates, rounds=config.rounds, calls=config.calls)
    size, tokens = (
        (config.block, config.block_tokens)
        if part == "block"
        else (config.step, config.step_tokens)
    )
    rows = []
    for name, c in made.items():
        seconds, count = timed[name].median_ms / 1e3, math.prod(tokens)
        tflops = operations(size, tokens, part) / seconds / 1e12
        rows.append(
            Row(
                **dataclasses.asdict(timed[name]),
                part=part,
                recipe=name,
                tokens=count,
                tokens_per_second=count / seconds,
                model_tflops=tflops,
                mfu=tflops / PEAK_TFLOPS,
                speed_over_bf16=timed[BASELINE].median_ms / timed[name].median_ms,
                worst_snr_db=worst[name],
                remat=getattr(
                    configs[name].step if part == "step" else config.block,
                    "remat",
                    "none",
                ),
                compile_seconds=c.compile_seconds,
                arena_bytes=c.compiled.memory_analysis().temp_size_in_bytes,
                kinds=breakdown.profile(c.function, c.args, c.compiled.as_text()),
            )
        )
    return rows


# The command and its table
# --------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add parts, recipes and sizes."""
    every = dict.fromkeys(name for part in PARTS for name in CANDIDATES[part])
    parser.add_argument("--parts", help=f"of {','.join(PARTS)} (default: both)")
    parser.add_argument(
        "--recipes", help=f"of {', '.join(every)}; {BASELINE} always runs"
    )
    parser.add_argument(
        "--model",
        choices=model_names(),
        help="of the whole step (default: llama-1b on a GPU)",
    )
    parser.add_argument(
        "--remat",
        help=(
            "values that blocks of a Llama keep in the whole step (default: the"
            " model's)"
        ),
    )
    parser.add_argument(
        "--loop",
        choices=get_args(Loop),
        help="over the blocks of the whole step (default: scan)",
    )
    parser.add_argument(
        "--layers", type=int, default=None, help="blocks of the part block (default: 2)"
    )
    parser.add_argument(
        "--include", choices=INCLUDES, help="what recipes convert (default: linear)"
    )


def configure(options: argparse.Namespace) -> Config:
    """Return the settings of a command line; raise `ValueError` for an unknown recipe
    or part.
    """
    every = tuple(dict.fromkeys(name for part in PARTS for name in CANDIDATES[part]))
    wanted = (BASELINE, *chosen_of("recipes", options.recipes, every))
    known = CANDIDATES if options.recipes else USUAL
    recipes = {
        part: tuple(name for name in known[part] if name in wanted) for part in PARTS
    }
    parts = chosen_of("parts", options.parts, PARTS)
    on_gpu = jax.default_backend() == "gpu" and not options.smoke
    model = options.model or ("llama-1b" if on_gpu else "llama-tiny")
    block = LLAMAS["llama-8b" if on_gpu else "llama-tiny"]
    block = dataclasses.replace(
        block, layers=options.layers or (2 if on_gpu else 1), remat="none"
    )
    step: Any = model_config(model)
    step = dataclasses.replace(
        step, **{n: v for n in ("remat", "loop") if (v := getattr(options, n))}
    )
    if isinstance(step, GPTConfig) and on_gpu:
        step = dataclasses.replace(step, attention="cudnn")
    tokens = (2, 4096) if on_gpu else (2, 32)
    step_tokens = (
        (max(1, 16384 // min(4096, step.context)), min(4096, step.context))
        if on_gpu
        else (2, 32)
    )
    few: Any = {} if on_gpu else dict(rounds=2, calls=2, include=("linear", "small"))
    if options.include:
        few["include"] = tuple(options.include.split(","))
    return Config(block, step, tokens, step_tokens, recipes, parts, **few)


def show(rows: list[Row]) -> None:
    """Print the rows and their time by kind of kernel."""
    columns = (
        "part",
        "recipe",
        "remat",
        "median_ms",
        "speed_over_bf16",
        "tokens_per_second",
        "model_tflops",
        "mfu",
    )
    print_rows(
        rows, *columns, "worst_snr_db", "compile_seconds", "arena_bytes", "timer"
    )
    for row in rows:
        if row.kinds is not None:
            sums = ", ".join(
                f"{kind} {milliseconds:.2f}" for kind, milliseconds in row.kinds.items()
            )
            print(f"{row.part}, {row.recipe}: {sums}")


def table(result: Result) -> str:
    """Return the page's tables: one per part, one line per candidate."""
    texts = []
    for part in result.distinct("part"):
        lines = []
        known = {name for names in CANDIDATES.values() for name in names}
        for row in (
            row for row in result.rows if row["part"] == part and row["recipe"] in known
        ):
            measured = row["kinds"] or {}
            kinds = [
                f"{measured[kind]:.2f}" if kind in measured else "–" for kind in KINDS
            ]
            lines.append(
                [
                    f"`{row['recipe']}`",
                    f"{row['median_ms']:.2f}",
                    f"**{row['speed_over_bf16']:.2f}**",
                    f"{row['tokens_per_second'] / 1e3:,.0f}k",
                    f"{row['mfu']:.0%} · {row['mfu'] / 2:.0%}",
                    *kinds,
                    f"{row['arena_bytes'] / 1e9:.2f}",
                ]
            )
        titles = [
            "",
            "ms",
            "speed over BF16",
            "tokens a second",
            "MFU of BF16 · FP8",
            *KINDS,
            "arena, GB",
        ]
        size = result.config[part]
        tokens = " × ".join(map(str, result.config[f"{part}_tokens"]))
        # a GPT's is four times its width
        hidden = f", hidden {size['hidden']}" if "hidden" in size else ""
        what = (
            f"{size['layers']} blocks of width {size['width']}{hidden}, {tokens} tokens"
        )
        texts.append(
            f"{'Forward and backward pass' if part == 'block' else 'Training step'}:"
            f" {what}.\n"
        )
        texts.append(f"{markdown_table(titles, lines)}\n")
    return (
        "\n".join(texts)
        + "\nColumns between MFU and arena are milliseconds by kind of kernel. MFU is"
        " model FLOP/s over the dense peaks of an H100 or H200: 989 TFLOP/s in BF16,"
        " 1,979 in FP8."
    )


BENCHMARK = Benchmark(
    NAME,
    __doc__,
    configure,
    measure,
    table,
    options=add_options,
    smoke=SMOKE_OPTIONS,
    show=show,
)

if __name__ == "__main__":
    BENCHMARK.command()
