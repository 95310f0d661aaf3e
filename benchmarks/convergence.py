"""Held-out loss of ways to train against BF16, in forks or in runs from scratch.

    python -m benchmarks.convergence --protocol fork --json --model llama-124m
    python -m benchmarks.convergence --protocol fork --json --resume
    python -m benchmarks.convergence --protocol scratch --json
    python -m benchmarks.convergence --protocol scratch --json --variants flags
    python -m benchmarks.convergence --protocol fork --json --variants clipping

The second goes on where the last call stopped, for example by its `--budget-seconds`.
The third trains a small GPT, and the fourth is the PyTorch original's comparison. The
last is a study: forks of stored weights, compared with exact clipping.

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
import itertools
import math
import re
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
from flax import linen as nn

from benchmarks.convergence_tables import (
    USUAL_MODEL,
    Row,
    json_name,
    read_row,
    table,
)
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
    study_of,
    train_base,
    train_config,
    whole_run,
)
from benchmarks.harness import Benchmark, add_resume, positive
from benchmarks.memory import bytes_of_kernels
from benchmarks.records import ROOT, origin_of_row, rows_to_resume
from benchmarks.texts import corpus_of, on_device
from benchmarks.variants import (
    BASELINE,
    GROUPS,
    STUDIES,
    VARIANTS,
    chosen_of,
    fake_quantized,
)
from models.huggingface.tokenizer import read_tokenizer
from models.nets.shapes import GPTConfig, LlamaConfig, ModelConfig
from models.nets.sizes import LLAMAS, model_config, model_names
from models.tokens import OWN
from models.train import cache_programs
from models.training.batches import check_corpus
from models.training.data import IDS_SUFFIX
from models.training.evaluation import evaluate
from models.training.settings import preset
from models.training.steps import count_parameters
from models.training.text import Corpus


def measure_text(
    config: Config, name: str, base: Base, corpus: Corpus, deadline: float = math.inf
) -> Row:
    """Train a variant from a base to a rate of zero, and evaluate it. Runs from scratch
    leave checkpoints.
    """
    started = time.perf_counter()
    variant = VARIANTS[name]
    # It leaves all layers but those of fake quantization alone
    with nn.intercept_methods(fake_quantized):
        state = start_fork(config, variant, base.state, jax.random.key(base.seed))
        size = bytes_of_kernels(state)
        text = on_device(config.data, config.text_bytes, config.tokens)
        run = train_config(config, variant, base.seed)
        heldout = jnp.asarray(corpus.heldout)
        kept = config
        if config.base_steps:
            kept = replace(config, bases=None)
        folder_name = f"run-{name}-{base.seed}-{config.steps}"
        with folder_of(kept, run, corpus.digest, folder_name) as folder:
            state, losses, milliseconds = advance(
                config, variant, base.seed, state, text, config.steps, folder, deadline
            )
        trained = evaluate(run, state, heldout, "trained")
        in_bf16 = evaluate(run, state, heldout, "bf16")
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


@dataclass
class _Budget:
    """The time that is left, and the runs that it did not allow or that failed."""

    deadline: float
    longest: float = 0.0
    left: int = 0
    failed: list[str] = field(default_factory=list)

    def is_spent(self) -> bool:
        return time.perf_counter() + self.longest > self.deadline


def measure(config: Config) -> Iterator[Row]:
    """Yield the rows that are kept, then the wanted ones that they lack.

    Bases follow each other until the budget is spent. Processes that share a file and a
    folder of bases share the runs, each of which one of them does.

    Raises:
      RuntimeError: a run failed; the others were done first.
    """
    budget = _Budget(time.perf_counter() + config.budget_seconds)
    yield from rows_there(config)
    corpus = corpus_of(config.data, config.text_bytes, config.tokens)
    together = [config.variants]
    if not config.base_steps:
        together = [(name,) for name in config.variants]
    # Seeds outermost, so that the finished seeds are complete pairs when the budget
    # stops the rest.
    for seed, names in itertools.product(config.seeds, together):
        claim = f"{seed}-{'forks' if config.base_steps else names[0]}"
        with claimed(config, claim) as mine:
            yield from _of_seed(config, seed, names, corpus, budget, mine)
    if budget.left:
        print(
            f"budget of {config.budget_seconds:g} s: {budget.left} runs left undone;"
            " --resume does them"
        )
    if budget.failed:
        raise RuntimeError(
            f"{len(budget.failed)} runs failed, see above: {', '.join(budget.failed)}"
        )


def _of_seed(
    config: Config,
    seed: int,
    names: Sequence[str],
    corpus: Corpus,
    budget: _Budget,
    mine: bool,
) -> Iterator[Row]:
    """Yield the rows of a seed that the file lacks, unless another process does."""
    kept = rows_there(config)
    done = {(row.name, row.seed) for row in kept}
    wanted = [name for name in names if (name, seed) not in done]
    if not mine or not wanted or budget.is_spent():
        budget.left += len(wanted)
        return
    text = on_device(config.data, config.text_bytes, config.tokens)
    study = study_of(config)
    base = train_base(config, seed, text, corpus.digest, VARIANTS[study.baseline])
    if config.base_steps:
        # A base that was trained again needs the baseline of its own, and its noise
        # floor.
        again = [study.baseline]
        if study.rerun in {*config.variants, *(row.name for row in kept)}:
            again.append(study.rerun)
        there = {*wanted, *(row.name for row in kept if row.base == base.name)}
        wanted[:0] = [name for name in again if name not in there]
    for name in wanted:
        try:
            if budget.is_spent():
                raise TimeoutError("not begun")
            row = measure_text(config, name, base, corpus, budget.deadline)
        except TimeoutError as error:
            print(f"{name}, seed {seed}: {error}", flush=True)
            budget.left += 1
        except Exception:
            traceback.print_exc()
            budget.failed.append(f"{name} of seed {seed}")
        else:
            # A run from scratch stops at the deadline and goes on later, so any time
            # that is left serves.
            if config.base_steps:
                budget.longest = max(budget.longest, row.seconds)
            print(
                f"{name}, seed {seed}: held-out {row.heldout_loss:.5f} nats,"
                f" {row.seconds:.1f} s",
                flush=True,
            )
            yield row


def joined(config: Config, rows: list[Row]) -> list[Row]:
    """Return the rows of the file of a run that is resumed, then new ones.

    Other processes may have added rows to the file.
    """
    there = rows_there(config)
    known = {(row.name, row.seed, row.base) for row in there}
    return there + [row for row in rows if (row.name, row.seed, row.base) not in known]


def rows_there(config: Config) -> list[Row]:
    """Return the rows of the file of a run that is resumed, with the same settings.

    There are none without such a file.

    Raises:
      ValueError: the file is of other settings.
    """
    return [*map(read_row, rows_to_resume(config.resume, config.settings))]


# The command
# --------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add protocol, variants, seeds, sizes, and the budget."""
    add = parser.add_argument
    add(
        "--protocol",
        choices=tuple(USUAL_MODEL),
        required=True,
        help="forks of a BF16 run, or runs from scratch",
    )
    add(
        "--variants",
        help=f"groups of {', '.join(GROUPS)}, and names of {', '.join(VARIANTS)};"
        f" {BASELINE} is always one (default: default, or whole of a Llama from"
        f" scratch); or one study of {', '.join(STUDIES)}",
    )
    add(
        "--model",
        help=f"of {', '.join(model_names())}, or 12x768, 12 layers of width 768 in"
        " heads of 64: a GPT, of ids a Llama (default:"
        f" {USUAL_MODEL['fork']} to fork, {USUAL_MODEL['scratch']} from scratch)",
    )
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
        type=positive,
        default=3,
        help="how many bases, or pairs of runs (default: 3)",
    )
    add(
        "--steps",
        type=positive,
        help="of a fork, or of a run (default: 300 or 1000)",
    )
    add("--base-steps", type=positive, help="of a base (default: 1000)")
    add(
        "--budget-seconds",
        type=float,
        default=math.inf,
        help="start no run that may end after this",
    )
    add_resume(parser)
    add(
        "--bases",
        type=Path,
        help="folder of bases (default: one of the model in runs/convergence)",
    )


def size_of(model: str, tokens: Tokens = "bytes") -> ModelConfig:
    """Return the sizes of a model by its name, or by layers and width.

    A GPT has cuDNN's attention if the device has it.

    Raises:
      ValueError: the name is neither.

    >>> size_of("2x128").heads, size_of("2x128", "bpe").hidden
    (2, 384)
    """
    size = model_config(model) if model in model_names() else _own(model, tokens)
    if jax.default_backend() != "gpu":
        return size
    if not isinstance(size, GPTConfig) or size.context < 1024:
        return size
    return replace(size, attention="cudnn")


def _own(model: str, tokens: Tokens) -> ModelConfig:
    found = re.fullmatch(r"(\d+)x(\d+)", model)
    if found is None:
        raise ValueError(
            f"--model {model} is unknown; use one of {model_names()}, or layers and"
            " width, as 12x768"
        )
    layers = int(found[1])
    width = int(found[2])
    heads = width // 64
    if width % 64:
        raise ValueError(
            f"--model {model}: heads have 64 values, but width {width} is not a"
            " multiple; change it"
        )
    if tokens == "bytes":
        return GPTConfig(layers=layers, width=width, heads=heads, context=1024)
    # About the hidden size of Llamas, in whole tiles
    hidden = 128 * math.ceil(8 * width / 3 / 128)
    return LlamaConfig(
        layers, width, heads=heads, kv_heads=heads, hidden=hidden, context=1024
    )


def _check(options: argparse.Namespace, model: str, names: Sequence[str]) -> None:
    """Raise `ValueError` if model, text and variants do not belong together."""
    size = size_of(model, options.tokens)
    ids = [path for path in options.data if path.endswith(IDS_SUFFIX)]
    if options.tokens == "bytes" and ids:
        raise ValueError(
            f"--data {ids[0]} holds ids, but --tokens is bytes; add --tokens bpe"
        )
    if options.tokens == "bpe" and not isinstance(size, LlamaConfig):
        raise ValueError(
            f"--tokens bpe with --model {model}, which reads bytes; use one of"
            f" {list(LLAMAS)} or 6x640"
        )
    if options.protocol == "scratch" and options.variants in STUDIES:
        raise ValueError(
            f"--variants {options.variants} with --protocol scratch: a study compares"
            " forks; use --protocol fork"
        )
    if not isinstance(size, GPTConfig) and "fake_quantization" in names:
        raise ValueError(
            f"--variants fake_quantization of --model {model}, which has no TCFPDense;"
            " use a GPT"
        )


def _smoke(forks: bool) -> Config:
    return Config(
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


def _asked(options: argparse.Namespace, model: str) -> Config:
    """Return the settings of a run that is not a smoke run."""
    forks = options.protocol == "fork"
    size = size_of(model, options.tokens)
    usual: Any = preset(model) if model in model_names() else Config
    own: dict[str, Any] = {
        "batch": usual.batch,
        "learning_rate": usual.learning_rate,
        "steps": Config.steps if forks else 1000,
    }
    if isinstance(size, LlamaConfig) and options.tokens == "bpe" and not forks:
        own |= whole_run(size)
    if options.steps:
        own["steps"] = options.steps
    if options.tokens == "bpe":
        # A table for 50304 ids is a third of llama-124m
        size = replace(size, vocabulary=read_tokenizer(OWN).size)
    return Config(
        model,
        size,
        sequence=min(Config.sequence, size.context),
        text_bytes=2**40 if options.data else Config.text_bytes,
        base_steps=(options.base_steps or Config.base_steps) if forks else 0,
        **own,
    )


def configure(options: argparse.Namespace) -> Config:
    """Return the settings of a command line.

    Raises:
      ValueError: a name is unknown, or the text is shorter than a window.
    """
    forks = options.protocol == "fork"
    model = options.model or USUAL_MODEL[options.protocol]
    usual = "default"
    if options.smoke:
        usual = "stored"
    elif options.tokens == "bpe" and not forks:
        usual = "whole"
    chosen = options.variants or usual
    study = chosen if chosen in STUDIES else ""
    names = STUDIES[study].names if study else chosen_of(chosen)
    _check(options, model, names)
    config = _smoke(forks) if options.smoke else _asked(options, model)
    usual_bases = ROOT / "runs" / "convergence" / f"{model}{study and f'-{study}'}"
    if options.smoke:
        usual_bases = options.out / "bases"
    bases = options.bases or usual_bases
    if jax.default_backend() == "gpu":
        cache_programs()
    run = train_config(config, VARIANTS[BASELINE])
    corpus = corpus_of(tuple(options.data), config.text_bytes, options.tokens)
    check_corpus(corpus, run)
    read = (len(corpus.train) + len(corpus.heldout)) * (corpus.bytes_per_token or 1.0)
    return replace(
        config,
        text=corpus.digest[:12],
        text_read=round(read),
        tokens_read=len(corpus.train),
        data=tuple(options.data),
        tokens=options.tokens,
        bytes_per_token=corpus.bytes_per_token,
        parameters=count_parameters(run),
        variants=names,
        study=study,
        seeds=(0,) if options.smoke else tuple(range(options.seeds)),
        bases=str(bases),
        budget_seconds=options.budget_seconds,
        resume=options.resume or None,
    )


BENCHMARK = Benchmark(
    "convergence",
    __doc__,
    configure,
    measure,
    table,
    options=add_options,
    file=json_name,
    joined=joined,
)

if __name__ == "__main__":
    BENCHMARK.command()
