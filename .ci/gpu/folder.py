"""Fine-tune all weights of a folder with Qwen3-14B's shapes, on one 80 GB GPU.

    python .ci/gpu/folder.py FOLDER write
    python .ci/gpu/folder.py FOLDER load
    python .ci/gpu/folder.py FOLDER train --steps 100 --batch 2 --data FILES

`write` makes a folder of random weights in files of at most 5 GB. The others print
seconds, and peak bytes of the host and of the device. `train` writes no checkpoint,
whose 57 GB would not fit on that machine's disk next to the folder, and prints the
losses. `--size tiny` runs on a CPU.
"""

import argparse
import json
import math
import resource
import shutil
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from models.training.running import run  # noqa: E402
from models.training.settings import preset  # noqa: E402
from models.training.steps import init  # noqa: E402

HEAD = 128
LARGEST = 4_900_000_000  # bytes of a file
POOL = 1 << 24  # random numbers, of which every matrix is made
CONFIG = dict(
    architectures=["Qwen3ForCausalLM"],
    model_type="qwen3",
    attention_bias=False,
    head_dim=HEAD,
    hidden_act="silu",
    max_position_embeddings=40960,
    rms_norm_eps=1e-6,
    rope_theta=1000000.0,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
)
SIZES = {
    "14b": dict(
        num_hidden_layers=40,
        hidden_size=5120,
        intermediate_size=17408,
        num_attention_heads=40,
        num_key_value_heads=8,
        vocab_size=151936,
    ),
    "tiny": dict(
        num_hidden_layers=3,
        hidden_size=256,
        intermediate_size=512,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=32768,
    ),
}
Shapes = list[tuple[str, tuple[int, ...]]]


def shapes_of(size: dict[str, int]) -> Iterator[tuple[str, tuple[int, ...]]]:
    width = size["hidden_size"]
    hidden = size["intermediate_size"]
    queries = size["num_attention_heads"] * HEAD
    keys = size["num_key_value_heads"] * HEAD
    yield "model.embed_tokens.weight", (size["vocab_size"], width)
    for layer in range(size["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        yield at + "self_attn.q_proj.weight", (queries, width)
        yield at + "self_attn.k_proj.weight", (keys, width)
        yield at + "self_attn.v_proj.weight", (keys, width)
        yield at + "self_attn.o_proj.weight", (width, queries)
        yield at + "self_attn.q_norm.weight", (HEAD,)
        yield at + "self_attn.k_norm.weight", (HEAD,)
        yield at + "mlp.gate_proj.weight", (hidden, width)
        yield at + "mlp.up_proj.weight", (hidden, width)
        yield at + "mlp.down_proj.weight", (width, hidden)
        yield at + "input_layernorm.weight", (width,)
        yield at + "post_attention_layernorm.weight", (width,)
    yield "model.norm.weight", (width,)
    yield "lm_head.weight", (size["vocab_size"], width)


def in_files(size: dict[str, int]) -> list[Shapes]:
    """Return the tensors of each file."""
    files: list[Shapes] = [[]]
    filled = 0
    for name, shape in shapes_of(size):
        needed = 2 * math.prod(shape)
        if filled + needed > LARGEST:
            files.append([])
            filled = 0
        files[-1].append((name, shape))
        filled += needed
    return files


def drawn(shape: tuple[int, ...], pool: np.ndarray, seed: int) -> np.ndarray:
    if len(shape) == 1:
        return np.ones(shape, pool.dtype)
    begin = seed % POOL
    return np.resize(pool[begin : begin + POOL], shape)


def write(folder: Path, size: dict[str, int]) -> None:
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    once = (0.02 * rng.standard_normal(POOL)).astype(ml_dtypes.bfloat16)
    pool = np.concatenate([once, once])
    files = in_files(size)
    places = {}

    def write_file(number: int) -> None:
        name = f"model-{number + 1:05}-of-{len(files):05}.safetensors"
        tensors = {}
        for place, (tensor, shape) in enumerate(files[number]):
            tensors[tensor] = drawn(shape, pool, 7919 * (100 * number + place))
            places[tensor] = name
        save_file(tensors, folder / name, metadata={"format": "pt"})

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(write_file, range(len(files))))
    index = json.dumps(dict(metadata={}, weight_map=places))
    (folder / "model.safetensors.index.json").write_text(index)
    (folder / "config.json").write_text(json.dumps(CONFIG | size))
    shutil.copy(ROOT / "models/python-bpe-32768.json", folder / "tokenizer.json")


def say(what: str, begun: float) -> None:
    statistics = jax.local_devices()[0].memory_stats() or {}
    device = statistics.get("peak_bytes_in_use", 0)
    host = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(
        f"{what} after {time.time() - begun:.1f} s: host peak {host / 1e9:.2f} GB,"
        f" device peak {device / 1e9:.2f} GB",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("what", choices=["write", "load", "train"])
    parser.add_argument("--size", default="14b", choices=sorted(SIZES))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--rate", type=float, default=1e-5)
    parser.add_argument("--data", nargs="+", default=[])
    options = parser.parse_args()
    begun = time.time()
    if options.what == "write":
        write(options.folder, SIZES[options.size])
        print(f"written after {time.time() - begun:.1f} s")
        return
    config = preset(
        str(options.folder),
        steps=options.steps,
        steps_per_call=1,
        batch=options.batch,
        sequence=options.sequence,
        learning_rate=options.rate,
        heldout_windows=options.batch,
        remat="block",
        update="backward",
        data=tuple(options.data),
    )
    if options.what == "load":
        jax.block_until_ready(init(config))
        say("loaded", begun)
        return
    result = run(config, progress="bar")
    say("trained", begun)
    print("losses", [round(float(loss), 3) for loss in result.train_loss])
    print(f"{result.tokens_per_second:.0f} tokens per second, with compilation")


if __name__ == "__main__":
    main()
