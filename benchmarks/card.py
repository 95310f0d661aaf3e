"""Every JSON of the pages that a card writes, in slices: one command for each.

    python -m benchmarks.card --json
    python -m benchmarks.card --json --seconds 540
    python -m benchmarks.card --json --share 1/2
    python -m benchmarks.card --only llama-1b,head --out FOLDER

The first runs what is missing or of another library. The second starts nothing that
would end later; call it again. The third is every second run, for one of two GPUs.

A run is a process of its own, which checks before it times. XLA has its defaults or the
flags of `RUNS`, never those of the environment. Its JSON replaces the committed one
when it has ended well. Learning takes hours and is `benchmarks.convergence`'s, with
slices of its own.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import chosen_of
from benchmarks.records import RESULTS, ROOT, library_digest
from models.training.flags import OF_LOOPS
from models.training.progress import shown


@dataclass(frozen=True)
class Run:
    """Arguments of a benchmark, its seconds on an H100, its GPUs, and flags of XLA."""

    arguments: str
    seconds: int
    gpus: int = 1
    flags: str = ""


# As docs/sharding.md says: a reduce-scatter stays in its round of a loop, where
# computation hides it.
_OF_SEVERAL = "--xla_gpu_enable_pipelined_reduce_scatter=false"

# The stacks of a scan begin without zeros, and are copied beside other work.
_OF_LOOPS = " ".join(f"--{name}=true" for name in OF_LOOPS)


# By the name of the JSON. What a page needs most comes first.
RUNS = {
    "large": Run("large --model llama-8b --bf16-layers 8", 170),
    "large-8-layers": Run(
        "large --model llama-8b --layers 8 --recipes stored,tensorwise,rowwise", 190
    ),
    "large-curves": Run("large --model llama-8b --layers 8 --steps 300", 310),
    "large-curves-llama-1b": Run("large --model llama-1b --steps 1000 --batch 2", 380),
    "large-1b": Run(
        "large --model llama-1b --recipes stored,tensorwise,rowwise,tcfp12_fast", 230
    ),
    "large-olmoe": Run("large --model olmoe-1b-7b --bf16-layers 8", 120),
    "large-backward-qwen3-14b-block": Run(
        "large --model qwen3-14b --remat block --update backward --bf16-layers 4"
        " --rate 1e-5",
        150,
        flags=_OF_LOOPS,
    ),
    "large-backward-llama-8b-block": Run(
        "large --model llama-8b --remat block --update backward --bf16-layers 8",
        125,
        flags=_OF_LOOPS,
    ),
    # As many values as fit the card are kept, which compiles up to four steps.
    "large-backward-llama-8b": Run(
        "large --model llama-8b --update backward --bf16-layers 4",
        205,
        flags=_OF_LOOPS,
    ),
    # One recipe next to BF16: the states of more leave no memory for a step.
    "llama-1b": Run("llama --parts step --recipes stored", 95, flags=_OF_LOOPS),
    "llama-1b-unrolled": Run(
        "llama --parts step --recipes stored --remat products --loop unrolled", 190
    ),
    "head": Run("head", 50),
    # Blocks of Flax and qwix compile for 4 minutes; `peers` has their MLP.
    "llama": Run(
        "llama --parts block --recipes tensorwise,tcfp12_single,tcfp12_fast,rowwise,"
        "blockwise,tcfp12,transformer_engine,transformer_engine_delayed",
        160,
    ),
    "peers": Run("peers", 205),
    "llama-124m": Run(
        "llama --parts step --model llama-124m --include measured,head --recipes"
        " tensorwise,stored",
        60,
    ),
    "llama-124m-fp4": Run(
        "llama --parts step --model llama-124m --recipes nvfp4_training", 60
    ),
    "fsdp": Run("fsdp --parts mlp", 120, gpus=2, flags=_OF_SEVERAL),
    "fsdp-llama": Run(
        "fsdp --parts llama --recipes tensorwise,stored", 200, gpus=2, flags=_OF_SEVERAL
    ),
    # BF16 has no room on one GPU.
    "fsdp-llama-8b": Run(
        "fsdp --parts llama --model llama-8b --recipes 'stored,stored update=backward'"
        " --alone 'stored update=backward' --remat attended+gate_fp8+up_fp8"
        " --float-remat attended",
        200,
        gpus=2,
        flags=f"{_OF_SEVERAL} {_OF_LOOPS}",
    ),
    "fsdp-olmoe": Run(
        "fsdp --parts olmoe --recipes stored", 170, gpus=2, flags=_OF_SEVERAL
    ),
    "memory": Run("memory", 90),
    "memory-llama-1b": Run("memory --model llama-1b", 20),
    "memory-llama-8b": Run("memory --model llama-8b", 20),
    "train_step": Run(
        "train_step --shapes 8192x1024x4096,8192x4096x16384,16384x8192x28672 --parts"
        " mlp --recipes tensorwise,tcfp12_single,rowwise,tcfp12,tcfp12_fast",
        165,
    ),
    "train_step-recipes": Run(
        "train_step --shapes 8192x4096x16384 --parts 'mlp,optimizer step' --recipes"
        " 'tensorwise,tcfp12,tcfp12_fast,blockwise,tcfp12_blockwise,mxfp8,rowwise,"
        "stored,stored both,stored bfloat16,stored both bfloat16'",
        250,
    ),
    "train_step-original": Run(
        "train_step --shapes 8192x1024x4096,8192x2048x8192,8192x4096x16384"
        " --parts 'optimizer step'"
        " --recipes 'tcfp12,tcfp12 stochastic,stored'",
        125,
    ),
    "gemm": Run("gemm", 45),
    "grouped": Run(
        "grouped --shapes 'olmoe w13,olmoe w2' --recipes"
        " tcfp12_single,tcfp12_single_both",
        180,
    ),
    "grouped-up": Run("grouped --shapes 'qwen3-30b up,qwen3-30b down,olmoe up'", 160),
    "grouped-large": Run("grouped --shapes 'mixtral up,deepseek-v3 up'", 155),
    "grouped-blocks": Run(
        "grouped --shapes 'mixtral up,olmoe w13' --recipes tcfp12_single_128", 125
    ),
    "quantizers": Run("quantizers", 200),
    "adamw": Run("adamw", 20),
    "dpo": Run("dpo", 100),
    # Of the layers in BF16 24 fit next to the state of their adapters.
    "adapters": Run(
        "adapters --model llama-70b --remat attended+key+value+gate_fp8"
        " --bf16-layers 24",
        185,
    ),
    "pi0": Run("pi0", 255),
    # It writes 30 GB into the temporary folder.
    "folder": Run("folder", 270),
    # States stay in `runs`, so that `benchmarks.finish --resume` goes on in slices.
    "finish": Run("finish", 470),
    "fp4": Run("fp4", 140),
    "fp4-activations": Run("fp4 --cases activations", 80),
}


def wanted(
    results: Path, only: str | None, share: tuple[int, int], gpus: int
) -> list[str]:
    """Return the names of this share of the runs.

    They are those of `only`, or all whose JSON is of another library.

    >>> wanted(Path("/nowhere"), "head,gemm,adamw", (1, 2), 1)
    ['head', 'adamw']
    """
    names = list(chosen_of("only", only, tuple(RUNS)))
    if only is None:
        names = [name for name in names if not is_current(results / f"{name}.json")]
    names = [name for name in names if RUNS[name].gpus <= gpus]
    return names[share[0] - 1 :: share[1]]


def is_current(path: Path) -> bool:
    """Return whether there is a JSON, and its last run was of this library."""
    if not path.exists():
        return False
    return bool(
        json.loads(path.read_text(encoding="utf-8"))["header"].get("library")
        == library_digest()
    )


def make(name: str, results: Path) -> bool:
    """Run one benchmark, and put its JSON in its place if it has ended well."""
    module, *arguments = shlex.split(RUNS[name].arguments)
    limit = 2 * RUNS[name].seconds
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [
                    *(sys.executable, "-m", f"benchmarks.{module}"),
                    *(*arguments, "--out", folder),
                ],
                cwd=ROOT,
                env=os.environ | {"XLA_FLAGS": RUNS[name].flags},
                capture_output=True,
                text=True,
                timeout=limit,
            )
        except subprocess.TimeoutExpired:
            print(
                f"{name}: stopped after {limit} s, twice what it should take; correct"
                " `RUNS`",
                flush=True,
            )
            return False
        written = [*Path(folder).glob("*/*.json")]
        if done.returncode or len(written) != 1:
            print("\n".join((done.stdout + done.stderr).splitlines()[-12:]), flush=True)
            return False
        results.mkdir(parents=True, exist_ok=True)
        shutil.move(written[0], results / f"{name}.json")
    return True


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return 1 if a benchmark failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.card", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument(
        "--json", action="store_true", help="write benchmarks/results/<device>"
    )
    parser.add_argument("--out", type=Path, help="folder instead of benchmarks/results")
    parser.add_argument(
        "--only", help=f"of {', '.join(RUNS)}, also if they are of this library"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=float("inf"),
        help="start nothing that would end later",
    )
    parser.add_argument(
        "--share", default="1/1", help="I/N: every N-th run, from the I-th"
    )
    options = parser.parse_args(arguments)
    if not (options.json or options.out):
        parser.error("choose --json or --out FOLDER")
    first, _, of = options.share.partition("/")
    if not (first.isdecimal() and of.isdecimal() and 1 <= int(first) <= int(of)):
        parser.error(
            f"--share {options.share} is not I/N with 1 <= I <= N, such as 1/2"
        )
    device, gpus = _device()
    results = (options.out or RESULTS) / device
    started = time.monotonic()
    failed = False
    for name in wanted(results, options.only, (int(first), int(of)), gpus):
        spent = time.monotonic() - started
        if spent + RUNS[name].seconds > options.seconds:
            print(
                f"{name}: left for another call, {spent:.0f} of {options.seconds:.0f} s"
                " are over",
                flush=True,
            )
            continue
        with shown(lambda: name):
            ended = "written" if make(name, results) else "FAILED"
        failed = failed or ended == "FAILED"
        print(f"{name}: {ended} after {time.monotonic() - started - spent:.0f} s")
    return 1 if failed else 0


def _device() -> tuple[str, int]:
    """Return the folder of the card and the number of cards.

    They come from a process that ends and frees the cards' memory.
    """
    code = (
        "import jax; from benchmarks.records import device_slug;"
        " print(device_slug(), jax.device_count())"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    slug, count = found.stdout.split()[-2:]
    return slug, int(count)


if __name__ == "__main__":
    sys.exit(main())
