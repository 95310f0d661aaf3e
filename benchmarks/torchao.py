"""torchao's FP8 training in PyTorch, next to jitted JAX BF16 on the same card: an MLP,
and blocks of Llama-3-8B.

    python -m benchmarks.torchao --json         # needs a GPU, and torch, torchao and transformers

The MLP is that of `benchmarks.train_step`, the blocks are those of `benchmarks.llama`,
here by Transformers. A call is forward and backward pass and returns gradients of input
and weights. PyTorch has BF16 weights, which torchao quantizes within the call, compiled
by `torch.compile`; JAX's BF16 has float32 weights. Each library has a process of its
own.
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

from benchmarks import llama, timing, train_step
from benchmarks.harness import Benchmark
from benchmarks.records import Result
from benchmarks.shapes import MIDDLE, SMOKE_SHAPES, GemmShape
from benchmarks.tables import markdown_table, times
from benchmarks.variants import BASELINE
from models.nets.shapes import LlamaConfig
from models.nets.sizes import LLAMAS
from tcfp_jax.recipes import recipe

NAME = "torchao"
Part = Literal["mlp", "blocks"]
PARTS: tuple[Part, ...] = get_args(Part)
PYTORCH = "PyTorch bf16"
# Names of torchao's; the last has BF16 weight gradients
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
NEEDED = ("torch", "torchao", "transformers")


@dataclass(frozen=True)
class Config:
    """Settings of a run; `emulate` computes FP8 in float32, for CPUs."""

    shape: GemmShape = MIDDLE
    size: LlamaConfig = dataclasses.replace(LLAMAS["llama-8b"], layers=2, remat="none")
    tokens: tuple[int, int] = (2, 4096)
    emulate: bool = False
    rounds: int = 5
    calls: int = 5


@dataclass(frozen=True)
class Row(timing.Timing):
    """One candidate in one part; `worst_snr_db` is of all results against PyTorch's
    BF16, None for BF16.
    """

    part: Part
    candidate: str
    speed_over_bf16: float
    worst_snr_db: float | None


def measure_jax(part: Part, config: Config) -> timing.Timing:
    """Return the time of jitted JAX BF16."""
    blocks = llama.Config(config.size, config.size, config.tokens, config.tokens, {})
    made: Any = llama.make_block(blocks, BASELINE) if part == "blocks" else None
    made = made or train_step.make_gradients(config.shape, recipe(BASELINE))
    call = {BASELINE: (made.function, made.args)}
    return timing.time_by_wall_clock(call, rounds=config.rounds, calls=config.calls)[
        BASELINE
    ]


def measure_torch(
    part: Part, config: Config
) -> dict[str, tuple[timing.Timing, float | None]]:
    """Return time and worst SNR of PyTorch's candidates.

    Raises:
      ArithmeticError: a result in FP8 is not that of BF16.
    """
    import torch
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(0)
    device, wait = (
        ("cpu", lambda: None) if config.emulate else ("cuda", torch.cuda.synchronize)
    )
    linear, shape = functools.partial(torch.nn.Linear, bias=False), config.shape
    plain: Any = torch.nn.Sequential(
        linear(shape.k, shape.n), torch.nn.ReLU(), linear(shape.n, shape.k)
    )
    x = torch.randn(shape.m, shape.k)
    if part == "blocks":
        plain, x = _blocks(config.size, config.tokens)
    plain, x = (
        plain.to(device, torch.bfloat16),
        x.to(device, torch.bfloat16).requires_grad_(),
    )
    gradient = torch.randn_like(x)
    calls: dict[str, Callable[[], Any]] = {}

    def passes(model: Any, wanted: list[Any]) -> tuple[Any, ...]:
        y = model(x)
        return y, *torch.autograd.grad(y, wanted, gradient)

    for name in (PYTORCH, *RECIPES):
        model = copy.deepcopy(plain)
        if name != PYTORCH:
            # a frozen dataclass
            chosen: Any = Float8LinearConfig.from_recipe_name(name)
            object.__setattr__(chosen, "emulate", config.emulate)
            model = convert_to_float8_training(model, config=chosen)
        compiled = model if config.emulate else torch.compile(model)
        calls[name] = functools.partial(passes, compiled, [x, *model.parameters()])
    expected = calls[PYTORCH]()
    worst = {
        name: None if name == PYTORCH else _worst(name, expected, calls[name]())
        for name in calls
    }
    del expected

    def turn(call: Callable[[], Any]) -> None:
        for _ in range(config.calls):
            call()
        wait()

    turns = {name: (functools.partial(turn, call), ()) for name, call in calls.items()}
    taken = timing.time_by_wall_clock(turns, rounds=config.rounds)
    of_call = lambda t: dataclasses.replace(
        t, **{k: v / config.calls for k, v in vars(t).items() if k[-3:] == "_ms"}
    )
    return {name: (of_call(t), worst[name]) for name, t in taken.items()}


def _blocks(size: LlamaConfig, tokens: tuple[int, int]) -> tuple[Any, Any]:
    """Return Transformers' blocks, with one more norm at the end, which `LlamaModel`
    has.
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
    pairs = (
        (a.detach().float(), b.detach().float())
        for a, b in zip(expected, got, strict=True)
    )
    found = min(
        float(10 * (a.square().sum() / (b - a).square().sum()).log10())
        for a, b in pairs
    )
    if not found >= train_step.LEAST_SNR_DB:
        raise ArithmeticError(
            f"{name}: results have {found:.1f} dB against BF16's and must have"
            f" {train_step.LEAST_SNR_DB}"
        )
    return found


def measure(config: Config) -> Iterator[Row]:
    """Measure both parts; the memory of a process is free when the next begins."""
    for part in PARTS:
        (ours,) = timing.measure_alone(measure_jax, [(part, config)])
        (theirs,) = timing.measure_alone(measure_torch, [(part, config)])
        for name, (timed, worst) in {f"JAX {BASELINE}": (ours, None), **theirs}.items():
            shown, speed = (
                f"torchao {name}" if name in RECIPES else name,
                ours.median_ms / timed.median_ms,
            )
            yield Row(
                **vars(timed),
                part=part,
                candidate=shown,
                speed_over_bf16=speed,
                worst_snr_db=worst,
            )


def _check(options: argparse.Namespace) -> None:
    """Raise `ValueError` if a package is missing, or there is no GPU."""
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
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
        return Config(SMOKE_SHAPES[0], LLAMAS["llama-tiny"], (1, 32), True, 1, 1)
    return Config()


def table(result: Result) -> str:
    """Return the page's table: one line per candidate."""
    rows, lines = result.by("part", "candidate"), []
    for name in result.distinct("candidate"):
        line = [name]
        for part in PARTS:
            row = rows[part, name]
            snr_db = (
                "–" if row["worst_snr_db"] is None else f"{row['worst_snr_db']:.1f}"
            )
            line += [
                f"{row['median_ms']:.2f}",
                f"**{row['speed_over_bf16']:.2f}**",
                snr_db,
            ]
        lines.append(line)
    titles = [
        "",
        *(title for part in PARTS for title in (f"{part}, ms", "over JAX BF16", "dB")),
    ]
    shape, tokens = (
        GemmShape(**result.config["shape"]),
        " × ".join(map(str, result.config["tokens"])),
    )
    return (
        f"{markdown_table(titles, lines)}\n\nThe MLP is {times(str(shape))}, the"
        f" blocks are {result.config['size']['layers']} of Llama-3-8B's width, {tokens}"
        " tokens. dB is the lowest signal-to-noise ratio of a result against PyTorch's"
        " BF16. Times are by the wall clock."
    )


BENCHMARK = Benchmark(
    NAME,
    __doc__,
    configure,
    measure,
    table,
)

if __name__ == "__main__":
    BENCHMARK.command()
