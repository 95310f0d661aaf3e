"""Train a language model on text next to BF16, from the same initial weights and batches.

    python -m models.train                                    # a GPT, stored weights, two CPU cores: three minutes
    python -m models.train --model llama-tiny                 # a Llama, which is plain Flax and converted
    python -m models.train --model small --recipe tcfp12_fast --out runs/small
    python -m models.train --weights float                    # float32 weights, and quantized copies for the products
    python -m models.train --model llama-124m --data ids.npy --vocabulary 50257
    python -m models.train --start base.npz                    # start from a file that --export wrote
    python -m models.train --monitor 50                       # measure how operands are rounded, by layer and step
    python -m models.train --out runs/small --resume          # after any interruption, bit for bit (a Llama on CPUs)
    python -m models.train --model llama-1b --mesh fsdp=8     # all GPUs of a machine
    srun python -m models.train --model llama-8b --batch 64 --mesh data=2,fsdp=8,tensor=4 --out /shared/run

A mesh has the axes of `models.meshes`: `data` splits batches, `fsdp` batches and weights, `tensor` heads and
hidden values. Several processes run the same command, started by SLURM or Open MPI, or anywhere with `--coordinator
host:port --processes N --process I`. All of them see the folder of the run; the first one writes and prints. A run may
be resumed on any mesh of any number of processes. One process at a time writes the folder; a second one is refused.

Without `--data` the text is the source of Python's standard library, as bytes. The command writes `config.json`,
`metrics.jsonl`, `checkpoints/`, `loss.png` and `summary.json` into the folder of the run, and with --monitor
`monitor.png`. The BF16 run is in `compare_bf16/` below it. The command prints the held-out loss and perplexity of both
and their ratio. Call `run` for the same without a command line, and without files unless you ask for them.
"""

import argparse
import dataclasses
import functools
import itertools
import math
import shlex
import sys
from pathlib import Path
from typing import Any, get_args

import jax
from jax.sharding import Mesh

from models.checkpoint import METRICS_FILE, check_export, holds_run, read_config
from models.families import model_names
from models.intact import write_json
from models.meshes import AXES, make_mesh, parse_mesh
from models.monitoring import read_reports
from models.plotting import plot_losses, plot_reports
from models.processes import HEARTBEAT_TIMEOUT, end_after, is_first, of_first, start, together
from models.running import BAD_STEPS, RunResult, corpus_of, export_run, keep_programs, run
from models.settings import Included, Moments, TrainConfig, Weights, preset
from models.training import (
    TrainState,
    batch_key,
    count_parameters,
    evaluate,
    init,
    make_optimizer,
    make_train_step,
)
from tcfp_jax.recipes import NAMES

__all__ = [
    "RunResult",
    "TrainConfig",
    "TrainState",
    "batch_key",
    "corpus_of",
    "evaluate",
    "export_run",
    "init",
    "keep_programs",
    "make_optimizer",
    "make_train_step",
    "preset",
    "run",
]

RUNS, BASELINE_FOLDER = Path("runs"), "compare_bf16"


_OVERRIDES: dict[str, dict[str, tuple[type, str]]] = {
    "training": {
        "steps": (int, "optimizer steps"),
        "batch": (int, "windows per step"),
        "sequence": (int, "tokens predicted per window"),
        "learning_rate": (float, "peak learning rate"),
        "final_fraction": (float, "part of the peak learning rate at which its cosine ends (default: 0)"),
        "weight_decay": (float, "of AdamW"),
        "seed": (int, "seed of initial weights, batches and stochastic rounding (default: 0)"),
    },
    "precision": {
        "error_dtype": (str, "of error-feedback buffers: float32 (default), bfloat16 or float8_e5m2"),
        "dtype": (str, "of activations: auto (default; bfloat16, on CPUs float32), float32 or bfloat16"),
        "monitor": (int, "steps between two observed ones, which measure rounding and updates (default: never)"),
    },
    "speed and memory": {
        "remat": (
            str,
            "values that a Llama keeps for its backward pass: none, products, block, names joined by +, or auto, as "
            "many as fit (default: the model's)",
        ),
        "steps_per_call": (int, "steps in one dispatch (default: 10)"),
    },
    "model and text": {
        "heldout_windows": (int, "windows of the held-out evaluation"),
        "corpus_bytes": (int, "at most this much text (default: 16 MiB of the standard library, all of --data)"),
    },
}
_EXAMPLES = """examples:
  python -m models.train --data novels/ notes.txt --steps 1000
      a small GPT with stored weights on your text, next to BF16
  python -m models.train --model llama-1b --recipe tensorwise --mesh fsdp=8 --compare none --out runs/1b
      a Llama with float32 weights on eight GPUs; after any interruption add --resume
"""


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit status: 0, 1 if the loss stays infinite or NaN, 2 for a request that cannot
    be met, 130 after an interruption.
    """
    options = _parser().parse_args(arguments)
    out: Path | None = None
    # Options that are not settings of the run, such as --mesh, are in no folder, so the user must repeat them.
    given = sys.argv[1:] if arguments is None else list(arguments)
    missing = lambda: [*(() if options.resume else ("--resume",)), *(() if options.out else ("--out", str(out)))]
    again = lambda: f"continue with: {shlex.join(['python', '-m', 'models.train', *given, *missing()])}"
    try:
        start(
            options.coordinator, options.processes, options.process,
            heartbeat_timeout_seconds=options.heartbeat_timeout,
        )  # fmt: skip
        out = folder = Path(of_first(lambda: str(_choose_folder(options))))
        _report(together(lambda: _choose_config(options, folder)), options, folder)
    except (ValueError, FileExistsError, FileNotFoundError, NotImplementedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except FloatingPointError as error:  # in all processes, because all have the same losses
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (Exception, KeyboardInterrupt) as error:
        if jax.process_count() > 1:
            end_after(error, f"the last whole checkpoint is kept; {again()}, in every process")
        if not isinstance(error, KeyboardInterrupt):
            raise
        print(f"\ninterrupted; {again()}", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m models.train", description=__doc__.split("\n\n")[0], argument_default=argparse.SUPPRESS,
        epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    named: dict[str, Any] = {}
    for name in ("model and text", "precision", "training", "folder", "speed and memory", "machines"):
        named[name] = parser.add_argument_group(name)
    model, precision, machines = named["model and text"], named["precision"], named["machines"]
    model.add_argument("--model", choices=model_names(), help="size (default: tiny)")
    model.add_argument(
        "--data", nargs="+", metavar="PATH",
        help="files and folders of UTF-8 text, read as bytes, or one .npy of token ids (default: the standard library)",
    )  # fmt: skip
    model.add_argument("--vocabulary", type=int, help="number of token ids")
    model.add_argument(
        "--start", metavar="NPZ", help="float parameters of this model to start from, as --export writes them"
    )
    precision.add_argument(
        "--weights", choices=get_args(Weights),
        help="W_hi + W_lo alone (default), or float32 parameters next to quantized weights (default with --recipe)",
    )  # fmt: skip
    names = ", ".join(NAMES)
    precision.add_argument(
        "--recipe", metavar="NAME", help=f"{names} (default: tcfp12_single; of float weights tcfp12)"
    )
    precision.add_argument(
        "--include", choices=get_args(Included),
        help="layers with the recipe: every one (default), or those measured to be faster than BF16",
    )  # fmt: skip
    precision.add_argument(
        "--moments",
        choices=get_args(Moments),
        help="AdamW's moments of stored weights (default: 8bit; float weights have float32)",
    )
    precision.add_argument(
        "--compare", choices=["bf16", "none"], help="baseline to train too (default: bf16; none with --recipe bf16)"
    )
    for group, options in _OVERRIDES.items():
        for name, (kind, text) in options.items():
            named[group].add_argument("--" + name.replace("_", "-"), type=kind, help=text)
    named["speed and memory"].add_argument(
        "--memory", type=float, default=None, metavar="GB",
        help="of a device that a step may need, for --remat auto (default: 95 %% of what JAX may allocate)",
    )  # fmt: skip
    _add_folder(named["folder"])
    _add_machines(machines)
    return parser


def _add_folder(group: argparse._ArgumentGroup) -> None:
    """Add options of the run's folder and of what is written there."""
    group.add_argument("--out", type=Path, default=None, help="folder of the run (default: a new one under runs/)")
    group.add_argument(
        "--resume", action="store_true", default=False,
        help="continue the run in --out, or the newest under runs/; other settings are the run's own",
    )  # fmt: skip
    group.add_argument("--checkpoint-every", type=int, default=None, help="steps (default: about a tenth of the run)")
    group.add_argument("--export", type=Path, default=None, help="write the trained weights here, float32, .npz")
    group.add_argument(
        "--tensorboard", action="store_const", const="on", default="off",
        help="write losses and readings of --monitor for TensorBoard, too (needs pip install -e '.[monitor]')",
    )  # fmt: skip
    group.add_argument(
        "--bad-steps", type=int, default=BAD_STEPS, metavar="N",
        help=f"steps in a row without a finite loss after which the run stops (default: {BAD_STEPS})",
    )  # fmt: skip


def _add_machines(group: argparse._ArgumentGroup) -> None:
    """Add options that belong to the machines and not to the run."""
    group.add_argument(
        "--mesh", type=str, default=None, metavar="AXIS=SIZE,...",
        help=f"of all devices, axes {', '.join(AXES)} (default: one device; of several processes fsdp over all)",
    )  # fmt: skip
    group.add_argument("--coordinator", default=None, metavar="HOST:PORT", help="address of the first process")
    group.add_argument("--processes", type=int, default=None, help="number of processes that train together")
    group.add_argument("--process", type=int, default=None, help="index of this process, from 0")
    group.add_argument(
        "--heartbeat-timeout", type=int, default=HEARTBEAT_TIMEOUT, metavar="SECONDS",
        help=f"silence after which a process is lost, and the others end (default: {HEARTBEAT_TIMEOUT})",
    )  # fmt: skip


def _choose_folder(options: argparse.Namespace) -> Path:
    if options.out is not None:
        return options.out
    if options.resume:
        started = sorted(RUNS.glob("*/config.json"), key=lambda path: path.stat().st_mtime)
        if not started:
            raise FileNotFoundError(f"--resume without --out found no run under {RUNS}/; name its folder with --out")
        return started[-1].parent
    config = preset(getattr(options, "model", "tiny"), **_given(options))
    name = f"{config.model}-{config.recipe}{'-stored' * (config.weights == 'stored')}"
    return next(path for path in (RUNS / f"{name}-{i}" for i in range(sys.maxsize)) if not path.exists())


def _choose_config(options: argparse.Namespace, out: Path) -> TrainConfig:
    given = _given(options)
    if not (options.resume and holds_run(out)):
        return preset(getattr(options, "model", "tiny"), **given)
    if hasattr(options, "model"):
        given["model"] = options.model
    return dataclasses.replace(read_config(out), **given)


def _given(options: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of `TrainConfig` that the command line names, without the model."""
    names = (
        "recipe",
        "start",
        "include",
        "weights",
        "moments",
        "data",
        "vocabulary",
        *itertools.chain(*_OVERRIDES.values()),
    )
    given = {name: getattr(options, name) for name in names if hasattr(options, name)}
    return {**given, "data": tuple(given["data"])} if "data" in given else given


def _report(config: TrainConfig, options: argparse.Namespace, out: Path) -> None:
    """Train, compare, print and write the results."""
    compare = getattr(options, "compare", "none" if config.recipe == "bf16" else "bf16")
    if options.export is not None:
        check_export(options.export)
    mesh = None if options.mesh is None else make_mesh(parse_mesh(options.mesh))
    if is_first() and options.resume and not holds_run(out):
        print(f"no run in {out} to resume: starting at step 0")
    if jax.default_backend() != "cpu":
        keep_programs(out)
    train = functools.partial(
        run, resume="allowed" if options.resume else "never", checkpoint_every=options.checkpoint_every,
        progress="bar", mesh=mesh, tensorboard=options.tensorboard, bad_steps=options.bad_steps,
        memory=None if options.memory is None else int(options.memory * 1e9),
    )  # fmt: skip
    if is_first():
        print(_heading(config, out, mesh), flush=True)
    name = str(config.recipe)
    result, baseline = train(config, out=out), None
    curves = {name: result.train_loss}
    if compare == "bf16":
        baseline = train(dataclasses.replace(config.in_bf16, monitor=0), out=out / BASELINE_FOLDER)
        curves["bf16 (baseline)"] = baseline.train_loss
    if options.export is not None:
        export_run(out, options.export, mesh)
    if not is_first():
        return
    pictures = ["loss.png"]
    plot_losses(out / "loss.png", curves, title=f"{config.model}, seed {config.seed}: {_source(config)}")
    if config.monitor:
        pictures.append("monitor.png")
        plot_reports(out / "monitor.png", read_reports(out / METRICS_FILE), title=f"{config.model}: {name}")
    write_json(out / "summary.json", _summary(config, result, baseline))
    print(_table(name, result, baseline))
    if options.export is not None:
        print(f"exported: {options.export}")
    print("written:", ", ".join(str(out / each) for each in (*pictures, "summary.json")))


def _heading(config: TrainConfig, out: Path, mesh: Mesh | None) -> str:
    corpus = corpus_of(config)
    device = jax.devices()[0].device_kind
    if mesh is not None:
        axes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items() if size > 1)
        device = f"{mesh.size} x {device} ({axes or 'whole'}) in {jax.process_count()} process(es)"
    return (
        f"{config.model}: {count_parameters(config):,} parameters, {config.steps} steps of {config.batch} x "
        f"{config.sequence} tokens, activations in {config.compute_dtype}, on {device}\n"
        f"text: {_source(config)}: {len(corpus.train):,} to train in {len(corpus.train_files)} files, "
        f"{len(corpus.heldout):,} held out in {len(corpus.heldout_files)} files\nfolder: {out}"
    )


def _source(config: TrainConfig) -> str:
    """Describe the text of a run."""
    names = ", ".join(config.data) if config.data else "Python's standard library"
    return f"{'bytes' if config.vocabulary is None else 'token ids'} of {names}"


def _summary(config: TrainConfig, result: RunResult, baseline: RunResult | None) -> dict[str, Any]:
    summary: dict[str, Any] = {"config": dataclasses.asdict(config), "run": _numbers(result)}
    if baseline is not None:
        ratio = result.heldout_perplexity / baseline.heldout_perplexity
        summary |= {"baseline_bf16": _numbers(baseline), "perplexity_ratio": _finite(ratio)}
    return summary


def _numbers(result: RunResult) -> dict[str, float | str | None]:
    return {
        "heldout_loss": _finite(result.heldout_loss),
        "heldout_perplexity": _finite(result.heldout_perplexity),
        "heldout_loss_bf16": _finite(result.heldout_loss_bf16),
        "last_train_loss": _finite(float(result.train_loss[-1])),
        "tokens_per_second": _finite(result.tokens_per_second),
        "remat": result.remat,
        "state_bytes": result.state_bytes,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no NaN


def _table(name: str, result: RunResult, baseline: RunResult | None) -> str:
    rows = [(name, result)] + ([("bf16 (baseline)", baseline)] if baseline else [])
    lines = ["", f"{'per token':20}{'held-out loss':>15}{'perplexity':>13}{'tokens/s':>11}{'MB of state':>14}"]
    for row, numbers in rows:
        rate = f"{numbers.tokens_per_second:,.0f}" if math.isfinite(numbers.tokens_per_second) else "-"
        losses = f"{numbers.heldout_loss:15.4f}{numbers.heldout_perplexity:13.4f}"
        lines.append(f"{row:20}{losses}{rate:>11}{numbers.state_bytes / 1e6:14.1f}")
    if baseline:
        ratio = result.heldout_perplexity / baseline.heldout_perplexity
        lines.append(f"perplexity ratio {name} / bf16: {ratio:.4f}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
