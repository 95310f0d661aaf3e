"""Held-out loss of ways to train against BF16, as forks of one BF16 run or as pairs of
runs from scratch.

    python -m benchmarks.convergence --protocol fork --json --model llama-124m --variants default,storage
    python -m benchmarks.convergence --protocol fork --json --budget-seconds 500 --resume     # until nothing is left
    python -m benchmarks.convergence --protocol scratch --json                  # a small GPT
    python -m benchmarks.convergence --protocol scratch --json --variants flags # the PyTorch original's comparison

fork: a base trains in BF16 with float32 weights and AdamW, at a constant rate after a
warm-up. Each fork continues from its weights and moments with the same batches, and a
rate that falls linearly to zero. scratch: runs of one seed have the same initial
weights and batches. The ratio of a run is `exp(held-out loss - BF16's)`, of the same
base or seed; if BF16 ran again, as `bf16_rerun`, the mean of both is the baseline.
Forks have about a tenth of the noise of runs from scratch. `bf16_rerun`, from weights
perturbed by 1e-6, and `bf16_other_batches` show the noise that is left.

The text is the source of every installed package and of Python's library, or `--data`.
JSON is written after every run, and `--resume` keeps its rows. Bases are kept in a
folder, because cuDNN's attention repeats no run bit for bit; a base that is gone is
trained again, together with BF16's fork.
"""

import argparse
import dataclasses
import functools
import math
import re
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
from flax import linen as nn

from benchmarks.convergence_tables import Row, ratios_of, read_row, summarize, table
from benchmarks.forks import (
    Base,
    Config,
    Tokens,
    advance,
    claimed,
    curve_of,
    folder_of,
    last_tenth,
    start_fork,
    train_base,
    train_config,
    whole_run,
)
from benchmarks.harness import Benchmark
from benchmarks.memory import bytes_of_kernels
from benchmarks.options import positive
from benchmarks.records import ROOT, origin_of_row, rows_to_resume
from benchmarks.tables import print_rows
from benchmarks.variants import (
    BASELINE,
    GROUPS,
    RERUN,
    VARIANTS,
    chosen_of,
    fake_quantized,
)
from models.huggingface.tokenizer import read_tokenizer
from models.nets.shapes import GPTConfig, LlamaConfig, ModelConfig
from models.nets.sizes import LLAMAS, model_config, model_names
from models.tokens import OWN
from models.train import keep_programs
from models.training.batches import check_corpus
from models.training.data import IDS_SUFFIX, load_data
from models.training.settings import preset
from models.training.steps import count_parameters, evaluate
from models.training.text import Corpus, bits_per_byte, load_installed
from models.training.tokenized import tokenized

__all__ = ["Config", "Row", "ratios_of", "summarize", "table"]

NAME = "convergence"
PROTOCOLS = ("fork", "scratch")
# options of which a default is a choice
SETTINGS = ("batch", "warmup_steps", "learning_rate", "base_steps", "steps")
_USUAL_MODEL = {"fork": "12x768", "scratch": "small"}
_USUAL_STEPS = {"fork": Config.steps, "scratch": 1000}


def measure_text(
    config: Config, name: str, base: Base, corpus: Corpus, deadline: float = math.inf
) -> Row:
    """Train a variant from a base to a rate of zero, and evaluate it. Runs from scratch
    leave checkpoints.
    """
    started, variant = time.perf_counter(), VARIANTS[name]
    # It leaves all layers but those of fake quantization alone
    with nn.intercept_methods(fake_quantized):
        state = start_fork(config, variant, base.state, jax.random.key(base.seed))
        size = bytes_of_kernels(state)
        text = _on_device(config.data, config.text_bytes, config.tokens)
        run, heldout = (
            train_config(config, variant, base.seed),
            jnp.asarray(corpus.heldout),
        )
        kept = dataclasses.replace(
            config, bases=None if config.base_steps else config.bases
        )
        with folder_of(
            kept, run, corpus.digest, f"run-{name}-{base.seed}-{config.steps}"
        ) as folder:
            state, losses, milliseconds = advance(
                config, variant, base.seed, state, text, config.steps, folder, deadline
            )
        trained, in_bf16 = (
            evaluate(run, state, heldout, products) for products in ("trained", "bf16")
        )
    return Row(
        name=name,
        seed=base.seed,
        base=base.name,
        train_loss=last_tenth(losses),
        heldout_loss=trained,
        heldout_loss_bf16=in_bf16,
        bytes_per_weight=size,
        milliseconds=milliseconds,
        seconds=time.perf_counter() - started,
        curve=() if config.base_steps else curve_of(losses),
        **origin_of_row(),
    )


def measure(config: Config) -> Iterator[Row]:
    """Yield the rows that are kept, then the wanted ones that they lack, base after
    base, until the budget is spent.

    Processes that share a file and a folder of bases share the runs, each of which one
    of them does.

    Raises:
      RuntimeError: a run failed; the others were done first.
    """
    deadline, longest = time.perf_counter() + config.budget_seconds, 0.0
    kept = [] if config.resume is None else read_rows(Path(config.resume), config)
    yield from kept
    failed: list[str] = []
    left = 0
    corpus = _corpus(config.data, config.text_bytes, config.tokens)
    # Seeds outermost, so that the finished seeds are complete pairs when the budget
    # stops the rest.
    for seed in config.seeds:
        for names in (
            [config.variants]
            if config.base_steps
            else [(name,) for name in config.variants]
        ):
            with claimed(
                config, f"{seed}-{'forks' if config.base_steps else names[0]}"
            ) as mine:
                if config.resume is not None:
                    kept = read_rows(Path(config.resume), config)
                done = {(row.name, row.seed) for row in kept}
                wanted = [name for name in names if (name, seed) not in done]
                over = lambda: time.perf_counter() + longest > deadline
                if not mine or not wanted or over():
                    left += len(wanted)
                    continue
                text = _on_device(config.data, config.text_bytes, config.tokens)
                base = train_base(config, seed, text, corpus.digest, VARIANTS[BASELINE])
                if config.base_steps:
                    again = [BASELINE] + [RERUN] * (
                        RERUN in config.variants or any(r.name == RERUN for r in kept)
                    )
                    there = {
                        *wanted,
                        *(row.name for row in kept if row.base == base.name),
                    }
                    # A base that was trained again needs the baseline of its own, and
                    # its noise floor.
                    wanted[:0] = [name for name in again if name not in there]
                for name in wanted:
                    try:
                        if over():
                            raise TimeoutError("not begun")
                        row = measure_text(config, name, base, corpus, deadline)
                    except TimeoutError as error:
                        print(f"{name}, seed {seed}: {error}", flush=True)
                        left += 1
                        continue
                    except Exception:
                        traceback.print_exc()
                        failed.append(f"{name} of seed {seed}")
                        continue
                    # A run from scratch stops at the deadline and goes on later, so any
                    # time that is left serves.
                    longest = max(longest, row.seconds) if config.base_steps else 0.0
                    _tell(row, corpus.bytes_per_token)
                    yield row
    if left:
        print(
            f"budget of {config.budget_seconds:g} s: {left} runs left undone; --resume"
            " does them"
        )
    if failed:
        raise RuntimeError(f"{len(failed)} runs failed, see above: {', '.join(failed)}")


def _tell(row: Row, bytes_per_token: float | None) -> None:
    bits = bits_per_byte(row.heldout_loss, bytes_per_token)
    shown = "" if bits is None else f" per token, {bits:.5f} bits per byte"
    speed = "" if row.milliseconds is None else f", {row.milliseconds:.1f} ms a step"
    print(
        f"{row.name}, seed {row.seed}: held-out {row.heldout_loss:.5f} nats{shown},"
        f" {row.seconds:.1f} s{speed}",
        flush=True,
    )


def joined(config: Config, rows: list[Row]) -> list[Row]:
    """Return the rows of the file of a run that is resumed, to which other processes
    may have added, then new ones.
    """
    if config.resume is None:
        return rows
    there = read_rows(Path(config.resume), config)
    known = {(row.name, row.seed, row.base) for row in there}
    return there + [row for row in rows if (row.name, row.seed, row.base) not in known]


@functools.lru_cache(maxsize=2)
def _corpus(data: tuple[str, ...], byte_limit: int, tokens: Tokens) -> Corpus:
    if data[:1] and data[0].endswith(IDS_SUFFIX):
        return _encoded(data, byte_limit)
    text = (
        load_data(data, byte_limit=byte_limit)
        if data
        else load_installed(byte_limit=byte_limit)
    )
    return text if tokens == "bytes" else tokenized(text, read_tokenizer(OWN))


def _encoded(data: tuple[str, ...], byte_limit: int) -> Corpus:
    """Return ids that `models.tokens --encode` wrote, with the bytes of some of them
    for each token.
    """
    tokenizer = read_tokenizer(OWN)
    corpus = load_data(data, vocabulary=tokenizer.size, byte_limit=byte_limit)
    some = corpus.heldout[: 2**20].tolist()
    return dataclasses.replace(
        corpus, bytes_per_token=len(tokenizer.decode(some).encode()) / max(1, len(some))
    )


@functools.lru_cache(maxsize=1)
def _on_device(data: tuple[str, ...], byte_limit: int, tokens: Tokens) -> jax.Array:
    return jnp.asarray(_corpus(data, byte_limit, tokens).train)


def read_rows(path: Path, config: Config) -> list[Row]:
    """Return the rows of an earlier run with the same settings; none if there is no
    file.

    Raises:
      ValueError: the file is of other settings.
    """
    return [*map(read_row, rows_to_resume(path, config.settings))]


# The command
# --------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add protocol, variants, seeds, sizes, and the budget."""
    add, count = parser.add_argument, positive
    add(
        "--protocol",
        choices=PROTOCOLS,
        required=True,
        help="forks of a BF16 run, or runs from scratch",
    )
    names = (
        f"groups of {', '.join(GROUPS)}, and names of {', '.join(VARIANTS)}; {BASELINE}"
        " is always one"
    )
    add(
        "--variants",
        default=None,
        help=f"{names} (default: default, or whole of a Llama from scratch)",
    )
    own = (
        f"of {', '.join(model_names())}, or 12x768, 12 layers of width 768 in heads of"
        " 64: a GPT, of ids a Llama"
    )
    usual = f"{_USUAL_MODEL['fork']} to fork, {_USUAL_MODEL['scratch']} from scratch"
    add("--model", default=None, help=f"{own} (default: {usual})")
    add(
        "--data",
        nargs="+",
        default=[],
        metavar="PATH",
        help="text, or one .npy of ids (default: installed Python)",
    )
    add(
        "--tokens",
        choices=get_args(Tokens),
        default="bytes",
        help="bpe: 32768 ids of a Llama (default: bytes)",
    )
    add(
        "--seeds",
        type=count,
        default=3,
        help="how many bases, or pairs of runs (default: 3)",
    )
    add("--first-seed", type=int, default=0, help="(default: 0)")
    add(
        "--steps",
        type=int,
        default=None,
        help="of a fork, or of a run (default: 300 or 1000)",
    )
    add("--base-steps", type=int, default=None, help="before forks (default: 1000)")
    add("--batch", type=int, help="(default: the model's, or `whole_run`'s)")
    add(
        "--warmup-steps",
        type=int,
        help=f"(default: {Config.warmup_steps}, or `whole_run`'s)",
    )
    add(
        "--steps-per-call",
        type=int,
        default=Config.steps_per_call,
        help=f"(default: {Config.steps_per_call})",
    )
    add(
        "--learning-rate",
        type=float,
        default=None,
        help="the peak (default: the model's own, or 6e-4)",
    )
    add(
        "--budget-seconds",
        type=float,
        default=math.inf,
        help="start no run that may end after this",
    )
    add(
        "--resume",
        action="store_true",
        help="keep the rows of the JSON file and do those it lacks",
    )
    folder = (
        "folder of bases and compiled programs (default: one of the model in"
        " runs/convergence)"
    )
    add("--bases", type=Path, default=None, help=folder)


def json_name(options: argparse.Namespace) -> str:
    """Return the name of a run's JSON: "convergence", with "fork", the flags or another
    model behind it.

    >>> chosen = dict(protocol="fork", model="llama-124m", smoke=False, variants="default")
    >>> json_name(argparse.Namespace(**chosen, tokens="bpe"))
    'convergence-fork-bpe-llama-124m'
    """
    parts = (
        [NAME]
        + ["fork"] * (options.protocol == "fork")
        + ["flags"] * (options.variants == "flags")
    )
    parts += ["bpe"] * (options.tokens == "bpe")
    other = (
        options.model not in (None, _USUAL_MODEL[options.protocol])
        and not options.smoke
    )
    return "-".join(parts + [str(options.model)] * other)


def command_of(name: str, data: Sequence[str] = ()) -> str:
    """Return the command that writes a JSON of this name and text, the reverse of
    `json_name`.

    >>> command_of("convergence-fork-llama-124m")
    'python -m benchmarks.convergence --protocol fork --model llama-124m --json'
    >>> command_of("convergence-flags")
    'python -m benchmarks.convergence --protocol scratch --variants flags --json'
    """
    rest = name.removeprefix(NAME).removeprefix("-")
    protocol = "fork" if rest.split("-")[0] == "fork" else "scratch"
    rest = rest.removeprefix("fork").removeprefix("-")
    flags = "--variants flags " if rest.split("-")[0] == "flags" else ""
    rest = rest.removeprefix("flags").removeprefix("-")
    flags += "--tokens bpe " if rest.split("-")[0] == "bpe" else ""
    model = rest.removeprefix("bpe").removeprefix("-")
    flags += f"--data {' '.join(Path(path).name for path in data)} " if data else ""
    return (
        f"python -m benchmarks.{NAME} --protocol {protocol}"
        f" {f'--model {model} ' if model else ''}{flags}--json"
    )


def size_of(model: str, tokens: Tokens = "bytes") -> ModelConfig:
    """Return the sizes of a model by its name, or by layers and width, with cuDNN's
    attention if the device has it.

    Raises:
      ValueError: the name is neither.

    >>> size_of("2x128").heads, size_of("2x128", "bpe").hidden
    (2, 384)
    """
    own = re.fullmatch(r"(\d+)x(\d+)", model)
    if own:
        layers, width = int(own[1]), int(own[2])
        if width % 64:
            raise ValueError(
                f"--model {model}: heads have 64 values, but width {width} is not a"
                " multiple; change it"
            )
        size: ModelConfig = GPTConfig(
            layers=layers, width=width, heads=width // 64, context=1024
        )
        if tokens == "bpe":  # about the hidden size of Llamas, in whole tiles
            heads, hidden = width // 64, 128 * math.ceil(8 * width / 3 / 128)
            size = LlamaConfig(
                layers, width, heads=heads, kv_heads=heads, hidden=hidden, context=1024
            )
    elif model in model_names():
        size = model_config(model)
    else:
        raise ValueError(
            f"--model {model} is unknown; use one of {model_names()}, or layers and"
            " width, as 12x768"
        )
    on_gpu = (
        jax.default_backend() == "gpu"
        and isinstance(size, GPTConfig)
        and size.context >= 1024
    )
    return dataclasses.replace(size, attention="cudnn") if on_gpu else size


def with_tokens(size: ModelConfig, tokens: Tokens) -> ModelConfig:
    """Return a size with as many rows as its tokens need: those of a table for 50304
    ids are a third of llama-124m.
    """
    return (
        size
        if tokens == "bytes"
        else dataclasses.replace(size, vocabulary=read_tokenizer(OWN).size)
    )


def configure(options: argparse.Namespace) -> Config:
    """Return the settings of a command line.

    Raises:
      ValueError: a name is unknown, the text is shorter than a window, or runs from
        scratch have base steps.
    """
    names, forks = (
        chosen_of(options.variants or ("stored" if options.smoke else "default")),
        options.protocol == "fork",
    )
    if options.base_steps is not None and (options.base_steps > 0) != forks:
        raise ValueError(
            f"--base-steps {options.base_steps} with --protocol {options.protocol}:"
            " forks have a base of one step or more, and runs from scratch none; leave"
            " it, or choose the other protocol"
        )
    model = options.model or _USUAL_MODEL[options.protocol]
    size = size_of(model, options.tokens)
    if options.tokens == "bytes" and (
        ids := [path for path in options.data if path.endswith(IDS_SUFFIX)]
    ):
        raise ValueError(
            f"--data {ids[0]} holds ids, but --tokens is bytes; add --tokens bpe"
        )
    if options.tokens == "bpe" and not isinstance(size, LlamaConfig):
        raise ValueError(
            f"--tokens bpe with --model {model}, which reads bytes; use one of"
            f" {list(LLAMAS)} or 6x640"
        )
    if not isinstance(size, GPTConfig) and set(names) & {"fake_quantization"}:
        raise ValueError(
            f"--variants fake_quantization of --model {model}, which has no TCFPDense;"
            " use a GPT"
        )
    bases = options.bases or ROOT / "runs" / NAME / model
    if options.smoke:
        options.seeds, bases = 1, options.bases or options.out / "bases"
        config = Config(
            "1x128",
            GPTConfig(layers=1, width=128, heads=2, context=32),
            batch=2,
            sequence=32,
            warmup_steps=2,
            base_steps=4 if forks else 0,
            steps=10,
            steps_per_call=1,
            heldout_windows=4,
            text_bytes=1_000_000,
        )
    else:
        usual = preset(model) if model in model_names() else Config
        steps, base_steps = (
            _USUAL_STEPS[options.protocol],
            Config.base_steps if forks else 0,
        )
        own: dict[str, Any] = dict(
            batch=usual.batch,
            learning_rate=usual.learning_rate,
            base_steps=base_steps,
            steps=steps,
        )
        if isinstance(size, LlamaConfig) and options.tokens == "bpe" and not forks:
            own |= whole_run(size, options.steps_per_call)
            names = chosen_of(options.variants or "whole")
        given = {
            name: getattr(options, name)
            for name in SETTINGS
            if getattr(options, name) is not None
        }
        config = Config(
            model,
            with_tokens(size, options.tokens),
            sequence=min(Config.sequence, size.context),
            text_bytes=2**40 if options.data else Config.text_bytes,
            steps_per_call=options.steps_per_call,
            **{**own, **given},
        )
    if jax.default_backend() == "gpu":
        keep_programs(bases)
    run = train_config(config, VARIANTS[BASELINE])
    corpus = _corpus(tuple(options.data), config.text_bytes, options.tokens)
    check_corpus(corpus, run)
    read = (len(corpus.train) + len(corpus.heldout)) * (corpus.bytes_per_token or 1.0)
    return dataclasses.replace(
        config,
        text=corpus.digest[:12],
        text_read=round(read),
        tokens_read=len(corpus.train),
        data=tuple(options.data),
        tokens=options.tokens,
        bytes_per_token=corpus.bytes_per_token,
        parameters=count_parameters(run),
        variants=names,
        seeds=tuple(range(options.first_seed, options.first_seed + options.seeds)),
        bases=str(bases),
        budget_seconds=options.budget_seconds,
        resume=str(options.path) if options.resume else None,
    )


def show(rows: list[Row]) -> None:
    """Print a summary of each variant."""
    columns = (
        "name",
        "pairs",
        "mean_ratio",
        "min_ratio",
        "max_ratio",
        "standard_error",
        "mean_ratio_bf16",
    )
    print_rows(summarize(rows), *columns, "bytes_per_weight", "milliseconds")


BENCHMARK = Benchmark(
    NAME,
    __doc__,
    configure,
    measure,
    table,
    options=add_options,
    file=json_name,
    joined=joined,
    show=show,
)

if __name__ == "__main__":
    BENCHMARK.command()
