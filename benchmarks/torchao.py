"""torchao's FP8 training in PyTorch, next to jitted JAX BF16 on the same card.

    python -m benchmarks.torchao --json

It needs a GPU, and torch, torchao and transformers. It measures an MLP, and blocks of
Llama-3-8B. The MLP is that of `benchmarks.train_step`, the blocks are those of
`benchmarks.llama`, here by Transformers. A call is forward and backward pass and
returns gradients of input and weights. PyTorch has BF16 weights, which torchao
quantizes within the call, compiled by `torch.compile`; JAX's BF16 has float32 weights.
Each library has a process of its own.
"""

import argparse
import copy
import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax

from benchmarks import llama_steps, timing, train_step
from benchmarks.harness import Benchmark
from benchmarks.products import MIDDLE, SMOKE_SHAPES, GemmShape
from benchmarks.records import Result, markdown_table, shown, times
from benchmarks.variants import BASELINE
from models.nets.shapes import LlamaConfig
from models.nets.sizes import LLAMAS
from tcfp_jax.recipes import recipe

Part = Literal["mlp", "blocks"]
PARTS: tuple[Part, ...] = get_args(Part)
PYTORCH = "PyTorch bf16"
# Names of torchao's; the last has BF16 weight gradients
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
NEEDED = ("torch", "torchao", "transformers")


@dataclass(frozen=True)
class Config(timing.Repetitions):
    """Settings of a run; `emulate` computes FP8 in float32, for CPUs."""

    shape: GemmShape = MIDDLE
    size: LlamaConfig = dataclasses.replace(LLAMAS["llama-8b"], layers=2, remat="none")
    tokens: tuple[int, int] = (2, 4096)
    emulate: bool = False


@dataclass(frozen=True)
class Row(timing.Timing):
    """One candidate in one part.

    `worst_snr_db` is of all results against PyTorch's BF16, None for BF16.
    """

    part: Part
    candidate: str
    speed_over_bf16: float
    worst_snr_db: float | None


def measure_jax(part: Part, config: Config) -> timing.Timing:
    """Return the time of jitted JAX BF16."""
    if part == "blocks":
        size = config.size
        blocks = llama_steps.Config(size, size, config.tokens, config.tokens, {})
        made: Any = llama_steps.make_block(blocks, BASELINE)
    else:
        made = train_step.make_gradients(config.shape, recipe(BASELINE))
    return config.by_wall_clock({BASELINE: (made.function, made.args)})[BASELINE]


def measure_torch(
    part: Part, config: Config
) -> dict[str, tuple[timing.Timing, float | None]]:
    """Return time and worst SNR of PyTorch's candidates.

    Raises:
      ArithmeticError: a result in FP8 is not that of BF16.
    """
    import torch

    torch.manual_seed(0)
    device = "cpu" if config.emulate else "cuda"
    made = _mlp(config.shape) if part == "mlp" else _blocks(config.size, config.tokens)
    plain = made[0].to(device, torch.bfloat16)
    x = made[1].to(device, torch.bfloat16).requires_grad_()
    gradient = torch.randn_like(x)

    def passes(model: Any, wanted: list[Any]) -> tuple[Any, ...]:
        y = model(x)
        return y, *torch.autograd.grad(y, wanted, gradient)

    def turn(call: Callable[[], Any]) -> None:
        for _ in range(config.calls):
            call()
        if not config.emulate:
            torch.cuda.synchronize()

    turns: dict[str, Any] = {}
    worst: dict[str, float | None] = {PYTORCH: None}
    expected = None
    for name in (PYTORCH, *RECIPES):
        model = _in_fp8(copy.deepcopy(plain), name, config.emulate)
        compiled = model if config.emulate else torch.compile(model)
        call = functools.partial(passes, compiled, [x, *model.parameters()])
        turns[name] = functools.partial(turn, call), ()
        got = call()
        if expected is None:
            expected = got
        else:
            worst[name] = _worst(name, expected, got)
    del expected, got
    taken = timing.time_by_wall_clock(turns, config.rounds, 1)
    return {name: (_per_call(t, config), worst[name]) for name, t in taken.items()}


def _in_fp8(model: Any, name: str, emulate: bool) -> Any:
    """Return a model as torchao converts it; PyTorch's own is unchanged."""
    if name == PYTORCH:
        return model
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    chosen: Any = Float8LinearConfig.from_recipe_name(name)
    object.__setattr__(chosen, "emulate", emulate)  # a frozen dataclass
    return convert_to_float8_training(model, config=chosen)


def _per_call(turn: timing.Timing, config: Config) -> timing.Timing:
    return dataclasses.replace(
        turn,
        median_ms=turn.median_ms / config.calls,
        min_ms=turn.min_ms / config.calls,
        max_ms=turn.max_ms / config.calls,
    )


def _mlp(shape: GemmShape) -> tuple[Any, Any]:
    """Return PyTorch's MLP and its input."""
    import torch

    linear = functools.partial(torch.nn.Linear, bias=False)
    layers = linear(shape.k, shape.n), torch.nn.ReLU(), linear(shape.n, shape.k)
    return torch.nn.Sequential(*layers), torch.randn(shape.m, shape.k)


def _blocks(size: LlamaConfig, tokens: tuple[int, int]) -> tuple[Any, Any]:
    """Return Transformers' blocks and their input.

    They have one more norm at the end, which `LlamaModel` has.
    """
    import torch
    import transformers

    class Hidden(transformers.LlamaModel):
        def forward(self, x: Any) -> Any:
            return super().forward(inputs_embeds=x, use_cache=False).last_hidden_state

    settings = transformers.LlamaConfig(
        vocab_size=8,
        hidden_size=size.width,
        intermediate_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=tokens[1],
        rope_theta=size.rope_theta,
        attn_implementation="sdpa",
    )
    model = Hidden(settings)
    del model.embed_tokens  # its parameter would have no gradient
    return model, torch.randn(*tokens, size.width)


def _worst(name: str, expected: tuple[Any, ...], got: tuple[Any, ...]) -> float:
    found = min(map(_snr_db, expected, got))
    if not found >= train_step.LEAST_SNR_DB:
        raise ArithmeticError(
            f"{name}: results have {found:.1f} dB against BF16's and must have"
            f" {train_step.LEAST_SNR_DB}"
        )
    return found


def _snr_db(expected: Any, got: Any) -> float:
    wide = expected.detach().float()
    error = got.detach().float() - wide
    return float(10 * (wide.square().sum() / error.square().sum()).log10())


def measure(config: Config) -> Iterator[Row]:
    """Measure both parts; the memory of a process is free when the next begins."""
    for part in PARTS:
        (ours,) = timing.measure_alone(measure_jax, [(part, config)])
        (theirs,) = timing.measure_alone(measure_torch, [(part, config)])
        for name, (timed, worst) in {f"JAX {BASELINE}": (ours, None), **theirs}.items():
            yield Row(
                **vars(timed),
                part=part,
                candidate=f"torchao {name}" if name in RECIPES else name,
                speed_over_bf16=ours.median_ms / timed.median_ms,
                worst_snr_db=worst,
            )


def _check(options: argparse.Namespace) -> None:
    """Raise `ValueError` if a package is missing, or there is no GPU."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"benchmarks.torchao needs {', '.join(missing)}; run `pip install"
            f" {' '.join(missing)}`"
        )
    if not options.smoke and jax.default_backend() != "gpu":
        raise ValueError(
            f"benchmarks.torchao needs a GPU, not {jax.default_backend()}; use --smoke"
            " to try the command"
        )


def configure(options: argparse.Namespace) -> Config:
    """Return the settings of a command line."""
    _check(options)
    if options.smoke:
        tiny = SMOKE_SHAPES[0], LLAMAS["llama-tiny"], (1, 32)
        return Config(*tiny, emulate=True, rounds=1, calls=1)
    return Config()


def table(result: Result) -> str:
    """Return the page's table: one line per candidate."""
    rows = result.by("part", "candidate")
    titles = [""]
    for part in PARTS:
        titles += [f"{part}, ms", "speedup over JAX BF16", "dB"]
    lines = []
    for name in result.distinct("candidate"):
        line = [name]
        for part in PARTS:
            for form in (
                "{median_ms:.2f}",
                "**{speed_over_bf16:.2f}**",
                "{worst_snr_db:.1f}",
            ):
                line.append(shown(rows[part, name], form))
        lines.append(line)
    shape = GemmShape(**result.config["shape"])
    tokens = " × ".join(map(str, result.config["tokens"]))
    return (
        f"{markdown_table(titles, lines)}\n\nThe MLP is {times(str(shape))}, the"
        f" blocks are {result.config['size']['layers']} of Llama-3-8B's width, {tokens}"
        " tokens. dB is the lowest signal-to-noise ratio of a result against PyTorch's"
        " BF16. Times are by the wall clock."
    )


BENCHMARK = Benchmark("torchao", __doc__, configure, measure, table)

if __name__ == "__main__":
    BENCHMARK.command()
