"""Fine-tuning of all weights of a folder with Qwen3-14B's shapes, on one GPU.

    python -m benchmarks.folder --json
    python -m benchmarks.folder --json --folder /disk/qwen3-14b   # keeps the folder

A folder of random BF16 weights is written, in files of at most 5 GB, unless --folder
has one. A process of its own with all of the GPU's memory then trains it as
`python -m models.train --update backward --remat block --checkpoint-every 0` does: the
weights are read from the files layer by layer, stored as W_hi + W_lo, and updated
inside the backward pass. The text is Python's standard library. Losses must fall, and
no step may be skipped.
"""

import argparse
import dataclasses
import json
import math
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from benchmarks import timing
from benchmarks.harness import Benchmark, positive
from benchmarks.large import check_losses
from benchmarks.records import Result, cells
from models.huggingface.configs import llama_dict, read_shape
from models.huggingface.tensors import PROJECTIONS, vectors
from models.nets.shapes import LlamaConfig
from models.nets.sizes import LLAMAS
from models.tokens import OWN
from models.training.room import Files, check_room, sized
from models.training.running import run
from models.training.settings import preset
from tcfp_jax.inference import safetensors

MODEL = "qwen3-14b"
# Widths that train in seconds on a CPU, and room for the ids of `models.tokens.OWN`
TINY = dataclasses.replace(
    LLAMAS[MODEL],
    layers=2,
    width=128,
    hidden=256,
    heads=2,
    kv_heads=1,
    vocabulary=32_768,
    context=64,
)
LARGEST = 4_900_000_000  # bytes of a file
POOL = 1 << 24  # random numbers, of which every matrix is made


@dataclass(frozen=True)
class Config:
    """Settings of a run.

    Attributes:
      model: Size of the model.
      folder: Its folder; None writes a temporary one.
      steps: Optimizer steps.
      tokens: Sequences of a step, and tokens in each.
      rate: The largest learning rate.
      text_bytes: Size of the text.
    """

    model: LlamaConfig
    folder: str | None
    steps: int
    tokens: tuple[int, int]
    rate: float
    text_bytes: int = 2**22


@dataclass(frozen=True)
class Row:
    """The run.

    Attributes:
      folder_bytes: Bytes of the weights' files.
      write_seconds: Seconds in which they were written; None if they were there.
      seconds: Seconds of the run: reading, storing, compiling, steps and evaluation.
      tokens_per_second: Speed of the steps, without compilation.
      state_bytes: Weights and moments, which outlive a step.
      peak_bytes: Peak of the device's allocator; None if none is reported.
      host_peak_bytes: Largest resident memory of the process.
      skipped_steps: Steps in which a gradient was not finite.
      losses: Losses of all steps, in nats per token.
      heldout_loss: Loss of held-out text after them.
    """

    folder_bytes: int
    write_seconds: float | None
    seconds: float
    tokens_per_second: float
    state_bytes: int
    peak_bytes: int | None
    host_peak_bytes: int
    skipped_steps: int
    losses: tuple[float, ...]
    heldout_loss: float


def measure(config: Config) -> Iterator[Row]:
    """Write the folder if it is missing, and train it.

    Raises:
      ArithmeticError: losses do not fall, or a step was skipped.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary if config.folder is None else config.folder)
        written = None
        if not (folder / safetensors.CONFIG).exists():
            started = time.perf_counter()
            write(folder, config.model)
            written = time.perf_counter() - started
            print(f"{folder} written after {written:.0f} s", flush=True)
        row = timing.measure_in_own_process(train, config, folder, written)
    print(f"losses {[round(loss, 3) for loss in row.losses]}", flush=True)
    if row.skipped_steps:
        raise ArithmeticError(f"{row.skipped_steps} steps were skipped")
    check_losses("stored", row.losses, row.losses[0])
    yield row


def train(config: Config, folder: Path, write_seconds: float | None) -> Row:
    """Train a folder as the command does."""
    batch, sequence = config.tokens
    settings = preset(
        str(folder),
        steps=config.steps,
        steps_per_call=1,
        batch=batch,
        sequence=sequence,
        learning_rate=config.rate,
        heldout_windows=batch,
        remat="block",
        update="backward",
        corpus_bytes=config.text_bytes,
    )
    started = time.perf_counter()
    result = run(settings, progress="bar")
    seconds = time.perf_counter() - started
    assert result.skipped_steps is not None  # stored weights count them
    return Row(
        folder_bytes=sum(path.stat().st_size for path in folder.glob("*.safetensors")),
        write_seconds=write_seconds,
        seconds=seconds,
        tokens_per_second=result.tokens_per_second,
        state_bytes=result.state_bytes,
        peak_bytes=timing.peak_bytes(),
        host_peak_bytes=1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        skipped_steps=result.skipped_steps,
        losses=tuple(map(float, result.train_loss)),
        heldout_loss=result.heldout_loss,
    )


# The folder
# --------------------------------------------------------------------------------------

Shape = tuple[int, ...]


def shapes_of(config: LlamaConfig) -> Iterator[tuple[str, Shape]]:
    """Yield names and shapes of the tensors of a folder."""
    width = config.width
    hidden = config.hidden
    queries = config.heads * config.head_size
    keys = config.kv_heads * config.head_size
    matrices = {
        "query": (queries, width),
        "key": (keys, width),
        "value": (keys, width),
        "output": (width, queries),
        "gate": (hidden, width),
        "up": (hidden, width),
        "down": (width, hidden),
    }
    yield "model.embed_tokens.weight", (config.vocabulary, width)
    for layer in range(config.layers):
        for ours, theirs in PROJECTIONS.items():
            yield f"model.layers.{layer}.{theirs}.weight", matrices[ours]
        for (ours, _), theirs in vectors(config).items():
            of_heads = ours in ("query_norm", "key_norm")
            size = config.head_size if of_heads else width
            yield f"model.layers.{layer}.{theirs}", (size,)
    yield "model.norm.weight", (width,)
    yield "lm_head.weight", (config.vocabulary, width)


def in_files(config: LlamaConfig) -> list[dict[str, Shape]]:
    """Return the tensors of each file."""
    files: list[dict[str, Shape]] = [{}]
    filled = 0
    for name, shape in shapes_of(config):
        needed = 2 * math.prod(shape)
        if filled + needed > LARGEST:
            files.append({})
            filled = 0
        files[-1][name] = shape
        filled += needed
    return files


def write(folder: Path, config: LlamaConfig) -> None:
    """Write a folder of random weights in BF16.

    Raises:
      ValueError: the disk has no room for it.
    """
    size = sum(2 * math.prod(shape) for _, shape in shapes_of(config))
    check_room([Files(folder, size, "the weights")])
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    once = (0.02 * rng.standard_normal(POOL)).astype(ml_dtypes.bfloat16)
    pool = np.concatenate([once, once])

    def drawn(shape: Shape, seed: int) -> np.ndarray:
        if len(shape) == 1:
            return np.ones(shape, pool.dtype)
        begin = 7919 * seed % POOL
        return np.resize(pool[begin : begin + POOL], shape)

    files = in_files(config)
    names = [
        f"model-{number + 1:05}-of-{len(files):05}.safetensors"
        for number in range(len(files))
    ]

    def write_file(number: int) -> None:
        tensors = {}
        for place, (name, shape) in enumerate(files[number].items()):
            tensors[name] = drawn(shape, 100 * number + place)
        # Without a wait for the disk, from whose cache the run reads
        save_file(tensors, folder / names[number], {"format": "pt"})

    # Each holds two copies of its file.
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(write_file, range(len(files))))
    places: dict[str, str] = {}
    for name, tensors in zip(names, files, strict=True):
        places |= dict.fromkeys(tensors, name)
    index = dict(metadata={}, weight_map=places)
    (folder / safetensors.INDEX).write_text(json.dumps(index))
    shutil.copy(OWN, folder / "tokenizer.json")
    described = llama_dict(dataclasses.replace(config, qk_norm="none"))
    described |= dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3")
    # Last, because a folder with it is complete
    (folder / safetensors.CONFIG).write_text(json.dumps(described))
    assert read_shape(folder).qk_norm == config.qk_norm


# The command and its table
# --------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the folder and sizes."""
    parser.add_argument(
        "--folder", type=Path, help="of the weights (default: a temporary one)"
    )
    parser.add_argument("--steps", type=positive, help="(default: 100)")
    parser.add_argument(
        "--batch", type=positive, default=2, help="sequences of a step on a GPU"
    )
    parser.add_argument("--rate", type=float, default=1e-5, help="of learning")


def configure(options: argparse.Namespace) -> Config:
    """Return the settings of a command line."""
    folder = None if options.folder is None else str(options.folder)
    if jax.default_backend() == "gpu" and not options.smoke:
        tokens = (options.batch, 4096)
        steps = options.steps or 100
        return Config(LLAMAS[MODEL], folder, steps, tokens, options.rate)
    steps = options.steps or 4
    return Config(TINY, folder, steps, (2, 32), 1e-3, text_bytes=2**18)


def table(result: Result) -> str:
    """Return the page's table."""
    columns = {
        "tokens per second": "**{tokens_per_second:,.0f}**",
        "first loss": "{first:.3f}",
        "last loss": "{last:.3f}",
        "skipped steps": "{skipped_steps}",
        "state, GB": "{state_gigabytes:.1f}",
        "peak of the GPU, GB": "{peak_gigabytes:.1f}",
        "peak of the host, GB": "{host_peak_gigabytes:.1f}",
        "other seconds": "{other:.0f}",
    }
    config = result.config
    batch, sequence = config["tokens"]
    rows = []
    for row in result.rows:
        training = config["steps"] * batch * sequence / row["tokens_per_second"]
        tenth = max(1, len(row["losses"]) // 10)
        means = dict(
            first=np.mean(row["losses"][:tenth]),
            last=np.mean(row["losses"][-tenth:]),
            other=row["seconds"] - training,
        )
        rows.append({**row, **means})
    size = sized(result.rows[0]["folder_bytes"])
    return (
        f"{cells(rows, columns)}\n\nAll weights of a folder of {size} with"
        f" Qwen3-14B's shapes and random values, {config['steps']} steps of {batch} ×"
        f" {sequence} tokens of Python's standard library, weights updated inside the"
        " backward pass. Losses are means of a tenth of the steps, in nats per token."
        " Other seconds are those of reading, compiling and evaluating."
    )


BENCHMARK = Benchmark("folder", __doc__, configure, measure, table, options=add_options)

if __name__ == "__main__":
    BENCHMARK.command()
