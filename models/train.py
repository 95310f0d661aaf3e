r"""Train a language model on text next to BF16, from the same initial weights and
batches.

    python -m models.train  # a GPT, stored weights, two CPU cores: two minutes
    python -m models.train --model llama-tiny
        # a Llama, which is plain Flax and converted
    python -m models.train --model small --recipe tcfp12_fast --out runs/small
    python -m models.train --weights float
        # float32 weights, and quantized copies for the products
    python -m models.train --model llama-124m --data ids.npy --vocabulary 50257
    python -m models.train --start base.npz  # start from a file that --export wrote
    python -m models.train --model FOLDER --data chats.jsonl --out RUN --export NEW \
        --format fp8  # fine-tune
    python -m models.train --model llama-tiny --tokenizer models/python-bpe-32768.json
    python -m models.train --finish bf16:0.1  # the last tenth multiplies in BF16
    python -m models.train --monitor 50
        # measure how operands are rounded, by layer and step
    python -m models.train --out runs/small --resume
        # after any interruption, bit for bit (a Llama on CPUs)
    python -m models.train --model llama-1b --mesh fsdp=8     # all GPUs of a machine
    srun python -m models.train --model llama-8b --batch 64 \
        --mesh data=2,fsdp=8,tensor=4 --out /shared/run

A mesh has the axes of `models.nets.meshes`: `data` splits batches, `fsdp` batches and
weights, `tensor` heads and hidden values. Several processes run the same command,
started by SLURM or Open MPI, or anywhere with `--coordinator host:port --processes N
--process I`. All of them see the folder of the run; the first one writes and prints. A
run may be resumed on any mesh of any number of processes. One process at a time writes
the folder; a second one is refused.

A FOLDER of Hugging Face holds a Llama, Qwen or Gemma, whose weights train without a
float copy, or with `--lora RANK` stay as they are, in FP8 or with `--recipe nvfp4` in
four bits. Its tokenizer reads JSON lines of texts and of conversations
(`models.training.examples`).

Without `--data` the text is the source of Python's standard library, as bytes. The
command writes `config.json`, `metrics.jsonl`, `checkpoints/`, `loss.png` and
`summary.json` into the folder of the run, and with --monitor `monitor.png`. The BF16
run is in `compare_bf16/` below it. The command prints the held-out loss and perplexity
of both and their ratio. Call `run` for the same without a command line, and without
files unless you ask for them.
"""

import argparse
import dataclasses
import functools
import itertools
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from .huggingface.configs import is_folder
from .nets.meshes import make_mesh, parse_mesh
from .nets.sizes import family_of
from .training.checkpoint import METRICS_FILE, Resume, steps_of_checkpoints
from .training.compiled import cache_programs
from .training.described import holds_run, read_config, resumed
from .training.evaluation import evaluate
from .training.examples import COUNTED, DOCUMENTS, in_color
from .training.exporting import Export
from .training.fitting import is_open
from .training.forms import Stored
from .training.intact import write_json
from .training.monitoring import read_reports
from .training.options import command, given_settings, parser_of, with_hyphens
from .training.plotting import plot_losses, plot_reports
from .training.preferences import in_rows
from .training.processes import end_after, is_first, of_first, start, together
from .training.progress import shown
from .training.results import remarks, summary, table
from .training.room import check_room
from .training.running import (
    Outputs,
    RunResult,
    check_options,
    checkpoint_interval,
    corpus_of,
    export_run,
    run,
    written_files,
)
from .training.settings import (
    TrainConfig,
    preset,
    short_name,
)
from .training.state import TrainState
from .training.steps import (
    batch_key,
    count_parameters,
    init,
    make_optimizer,
    make_train_step,
)

__all__ = [
    "RunResult",
    "TrainConfig",
    "TrainState",
    "batch_key",
    "cache_programs",
    "corpus_of",
    "evaluate",
    "export_run",
    "init",
    "make_optimizer",
    "make_train_step",
    "preset",
    "run",
]

RUNS = Path("runs")
BASELINE_FOLDER = "compare_bf16"


def main(arguments: list[str] | None = None) -> int:
    """Run the command, and return its exit status.

    It is 0, 1 if the loss stays infinite or NaN, 2 for a request that cannot be met,
    and 130 after an interruption.
    """
    given = with_hyphens(sys.argv[1:] if arguments is None else arguments)
    options = parser_of(__doc__.split("\n\n")[0]).parse_args(given)
    out: Path | None = None
    try:
        start(
            options.coordinator,
            options.processes,
            options.process,
            heartbeat_timeout_seconds=options.heartbeat_timeout,
        )
        out = folder = Path(of_first(lambda: str(_choose_folder(options))))
        _report(together(lambda: _choose_config(options, folder)), options, folder)
    except (
        ValueError,
        FileExistsError,
        FileNotFoundError,
        ImportError,
        NotImplementedError,
    ) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    # in all processes, because all have the same losses
    except FloatingPointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (Exception, KeyboardInterrupt) as error:
        again = _again(options, out, sys.argv[1:] if arguments is None else arguments)
        if jax.process_count() > 1:
            end_after(error, f"{again}, in every process")
        if isinstance(error, OSError):  # such as a full disk
            print(f"error: {error}; repair that; {again}", file=sys.stderr)
            return 2
        if not isinstance(error, KeyboardInterrupt):
            raise
        print(f"\ninterrupted; {again}", file=sys.stderr)
        return 130
    return 0


def _again(options: argparse.Namespace, out: Path | None, given: list[str]) -> str:
    """Return the advice that continues a run which has ended too early."""
    # Options that are not settings of the run, such as --mesh, are in no folder, so the
    # user must repeat them.
    words = [*command(), *given]
    if not options.resume:
        words.append("--resume")
    if not options.out and out is not None:
        words += ["--out", str(out)]
    kept = "there is no checkpoint yet; begin anew with"
    if out is not None and steps_of_checkpoints(out):
        kept = "the last whole checkpoint is kept; continue with"
    return f"{kept}: {shlex.join(words)}"


def _choose_folder(options: argparse.Namespace) -> Path:
    if options.out is not None:
        return options.out
    if options.resume:
        started = sorted(
            RUNS.glob("*/config.json"), key=lambda path: path.stat().st_mtime
        )
        if not started:
            raise FileNotFoundError(
                f"--resume without --out found no run under {RUNS}/; name its folder"
                " with --out"
            )
        return started[-1].parent
    config = _new_config(options)
    name = f"{Path(_name(config)).name}-{short_name(config.recipe)}"
    if isinstance(config.weights, Stored):
        name += "-stored"
    folders = (RUNS / f"{name}-{i}" for i in itertools.count())
    return next(folder for folder in folders if not folder.exists())


def _new_config(options: argparse.Namespace) -> TrainConfig:
    model = getattr(options, "model", "tiny")
    config = preset(model, **given_settings(options))
    if _folder_of(config) is not None and not config.data.paths:
        raise ValueError(
            f"--model {model} without --data: name the text to train on, such as --data"
            " chats.jsonl"
        )
    return config


def _choose_config(options: argparse.Namespace, out: Path) -> TrainConfig:
    if not (options.resume and holds_run(out)):
        return _new_config(options)
    given = given_settings(options)
    config = read_config(out)
    if hasattr(options, "model"):
        folder = _folder_of(config)
        if not is_folder(options.model):
            given["model"] = options.model
        elif folder is None or not Path(folder).samefile(options.model):
            given["start"] = options.model
    return resumed(config, given)


def _report(config: TrainConfig, options: argparse.Namespace, out: Path) -> None:
    """Train, compare, print and write the results."""
    alone = config.recipe == "bf16" or _folder_of(config) is not None
    compare = getattr(options, "compare", "none" if alone else "bf16")
    outputs = Outputs(options.tensorboard, _export_of(options))
    mesh = None if options.mesh is None else make_mesh(parse_mesh(options.mesh))
    _check_memory(options, config)
    baseline_config = None
    if compare == "bf16":
        baseline_config = dataclasses.replace(config.in_bf16, monitor=0)
        together(lambda: _check_disks(options, out, outputs, config, baseline_config))
    if is_first() and options.resume and not steps_of_checkpoints(out):
        what = "checkpoint" if holds_run(out) else "run"
        print(f"no {what} in {out} to resume: starting at step 0")
    if jax.default_backend() != "cpu":
        cache_programs()
    resume: Resume = "allowed" if options.resume else "never"
    every = options.checkpoint_every
    together(
        lambda: check_options(config, out, resume, every, outputs, options.bad_steps)
    )
    train = functools.partial(
        run,
        resume=resume,
        checkpoint_every=every,
        progress="bar",
        mesh=mesh,
        bad_steps=options.bad_steps,
        memory=None if options.memory is None else int(options.memory * 1e9),
    )
    with shown(lambda: "reading the text", is_first()):
        heading = _heading(config, out, mesh) if is_first() else ""
    if is_first():
        print(heading, flush=True)
        if options.show_example:
            print(_example(config), flush=True)
    name = short_name(config.recipe)
    result = train(config, out=out, outputs=outputs)
    baseline = None
    curves = {name: result.train_loss}
    if baseline_config is not None:
        board = Outputs(options.tensorboard)
        baseline = train(baseline_config, out=out / BASELINE_FOLDER, outputs=board)
        curves["bf16 (baseline)"] = baseline.train_loss
    if not is_first():
        return
    write_json(out / "summary.json", summary(config, result, baseline))
    print(table(name, result, baseline))
    print(*remarks(result), sep="", end="")
    if options.export is not None:
        print(f"exported: {options.export}")
    written = ["summary.json"]
    try:
        plot_losses(
            out / "loss.png",
            curves,
            title=f"{_name(config)}, seed {config.seed}: {_source(config)}",
        )
        written.append("loss.png")
        if config.monitor:
            plot_reports(
                out / "monitor.png",
                read_reports(out / METRICS_FILE),
                title=f"{_name(config)}: {name}",
            )
            written.append("monitor.png")
    except ImportError as error:  # after hours of training
        print(
            f"no plot: {error}; the numbers are in metrics.jsonl, and --resume draws"
            " them"
        )
    print("written:", ", ".join(str(out / each) for each in written))


def _export_of(options: argparse.Namespace) -> Export | None:
    """Return the file or folder of --export.

    Raises:
      ValueError: --format is given without a folder.
    """
    path = options.export
    target = None if path is None else Export(path, options.format or "bf16")
    if options.format is not None and (target is None or not target.is_folder):
        raise ValueError(
            f"--format {options.format} is for the weights of a folder, and --export"
            f" {'is missing' if path is None else f'names {path}'}; add --export"
            " FOLDER, or leave --format"
        )
    return target


def _check_disks(
    options: argparse.Namespace,
    out: Path,
    outputs: Outputs,
    config: TrainConfig,
    baseline: TrainConfig,
) -> None:
    """Raise `ValueError` if disks have no room for both runs; each checks itself."""
    every = checkpoint_interval(config, options.checkpoint_every)
    files = written_files(config, out, every, outputs)
    files += written_files(baseline, out / BASELINE_FOLDER, every, Outputs())
    check_room(files)


def _check_memory(options: argparse.Namespace, config: TrainConfig) -> None:
    """Raise `ValueError` if --memory is no size, or nothing is chosen by bytes."""
    if options.memory is None:
        return
    if not 0 < options.memory < math.inf:
        raise ValueError(
            f"--memory {options.memory:g} is no size; give a positive, finite number of"
            " GB, or leave it for what JAX may allocate"
        )
    # A run that is resumed has chosen.
    if options.resume:
        return
    if config.update != "auto" and not is_open(config.size):
        raise ValueError(
            f"--memory {options.memory:g} with update={config.update!r} and"
            f" remat={getattr(config.size, 'remat', None)!r}: nothing is chosen by"
            " bytes; add --update auto or --remat auto, or leave --memory"
        )


def _heading(config: TrainConfig, out: Path, mesh: Mesh | None) -> str:
    corpus = corpus_of(config)
    device = jax.devices()[0].device_kind
    if mesh is not None:
        split = [f"{name}={size}" for name, size in mesh.shape.items() if size > 1]
        device = (
            f"{mesh.size} x {device} ({', '.join(split) or 'whole'}) in"
            f" {jax.process_count()} process(es)"
        )
    return (
        f"{_name(config)}: {count_parameters(config):,} parameters, {config.steps}"
        f" steps of {_batch(config)} tokens, {_counted(corpus.train)}"
        " count in the loss, activations in"
        f" {config.compute_dtype}, on {device}\ntext: {_source(config)}:"
        f" {len(corpus.train):,} to train in {_files(corpus.train_files)},"
        f" {len(corpus.heldout):,} held out in {_files(corpus.heldout_files)}"
        "\n" + "\n".join([*corpus.notes, f"folder: {out}"])
    )


def _files(names: Sequence[str]) -> str:
    return f"{len(names)} file{'s' * (len(names) != 1)}"


def _batch(config: TrainConfig) -> str:
    """Describe the rows of a step."""
    if config.preferences is None:
        return f"{config.batch} x {config.sequence}"
    return f"{config.batch} pairs of 2 x {config.sequence}"


def _counted(text: np.ndarray) -> str:
    """Describe how many tokens of a text the loss counts."""
    if text.ndim == 1:
        return "all"
    rows = in_rows(text)
    tokens = int((rows[:, DOCUMENTS] > 0).sum())
    counted = int(rows[:, COUNTED].sum())
    return f"{counted:,} of {tokens:,} ({counted / tokens:.0%})"


def _example(config: TrainConfig) -> str:
    """Return a document of the text in color."""
    tokenizer = config.data.read_tokenizer()
    if tokenizer is None or not config.data.packs:
        raise ValueError(
            "--show-example is for documents, such as chats.jsonl; of other text every"
            " token counts, so leave it"
        )
    text = corpus_of(config).train
    rows = in_rows(text[:1])
    return "\n".join(in_color(row[None], tokenizer) for row in rows)


def _name(config: TrainConfig) -> str:
    """Return the name of the model, for people."""
    folder = _folder_of(config)
    if folder is not None:
        return folder
    return config.model if isinstance(config.model, str) else family_of(config.model)


def _folder_of(config: TrainConfig) -> str | None:
    if config.start is not None and is_folder(config.start):
        return config.start
    return None


def _source(config: TrainConfig) -> str:
    """Describe the text of a run."""
    data = config.data
    names = ", ".join(data.paths) if data.paths else "Python's standard library"
    if config.preferences is not None:
        return f"pairs of {names}"
    if data.packs:
        return f"rows of documents of {names}"
    return f"{'bytes' if data.vocabulary is None else 'token ids'} of {names}"


if __name__ == "__main__":
    sys.exit(main())
