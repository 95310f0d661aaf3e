"""Train a GPT on the bytes of Python's standard library, beside BF16 from the same initial weights and batches.

    python -m models.train                                    # two CPU cores: under three minutes
    python -m models.train --model small --recipe tcfp12_fast --out runs/small
    python -m models.train --weights stored                   # W_hi + W_lo alone: no float32 weights
    python -m models.train --out runs/small --resume          # after any interruption, bit for bit

It writes `config.json`, `metrics.jsonl`, `checkpoints/`, `loss.png` and `summary.json` into the run's folder, with the
BF16 run in `compare_bf16/` below it, and prints the held-out loss and perplexity (of bytes) of both, and their ratio.
`run` is the same without a command line, and without files unless asked.
"""

import argparse
import dataclasses
import functools
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from models.checkpoint import Resume, RunDirectory, check_export, export, holds_run, read_config, write_json
from models.gpt import MODELS
from models.plotting import plot_losses
from models.settings import Moments, TrainConfig, Weights, preset
from models.text import Corpus, load_corpus
from models.training import (
    TrainState,
    batch_key,
    check_text,
    evaluate,
    init,
    make_optimizer,
    make_train_step,
)

__all__ = [
    "RunResult",
    "TrainConfig",
    "TrainState",
    "batch_key",
    "evaluate",
    "init",
    "make_optimizer",
    "make_train_step",
    "preset",
    "run",
]

Progress = Literal["none", "bar"]
RUNS, BASELINE_FOLDER = Path("runs"), "compare_bf16"


@dataclass(frozen=True)
class RunResult:
    """What a run found.

    Attributes:
      train_loss: nats per byte of every step, float64 `[steps]`; of a resumed run, from the first step on.
      heldout_loss: nats per byte over the held-out windows, after the last step.
      heldout_perplexity: `exp(heldout_loss)`, per byte.
      heldout_loss_bf16: of the same trained parameters with BF16 products.
      tokens_per_second: bytes trained on per second by this process, compilation included; NaN if it had no step to do.
    """

    train_loss: np.ndarray
    heldout_loss: float
    heldout_perplexity: float
    heldout_loss_bf16: float
    tokens_per_second: float


def run(
    config: TrainConfig,
    *,
    out: Path | None = None,
    resume: Resume = "never",
    checkpoint_every: int | None = None,
    progress: Progress = "none",
) -> RunResult:
    """Train from the first step, or from the newest checkpoint in `out`, to the last, and evaluate.

    Args:
      config: the run; equal configs give equal results, bit for bit on one machine.
      out: folder for config, metrics and checkpoints; None keeps everything in memory.
      resume: "never" refuses a folder that holds a run, "allowed" continues it and starts where there is none.
      checkpoint_every: steps, a multiple of `config.steps_per_call`; None is about ten checkpoints a run.
      progress: "bar" draws a progress bar on standard error.

    Raises:
      ValueError: `checkpoint_every` as above; too little text; or the run in `out` is another one.
      FileExistsError: `out` holds a run and `resume` is "never".
    """
    every = _checkpoint_interval(config, checkpoint_every)
    corpus = corpus_of(config)
    check_text("training", corpus.train, config)
    check_text("held-out", corpus.heldout, config)
    if out is None:
        return _train(config, corpus, None, every, progress)
    with RunDirectory(out, config, corpus.digest, resume=resume) as directory:
        return _train(config, corpus, directory, every, progress)


def export_run(out: Path, path: Path) -> None:
    """Write the parameters of the newest checkpoint in `out` in float32, see `models.checkpoint.export`."""
    config = read_config(out)
    with RunDirectory(out, config, corpus_of(config).digest, resume="allowed") as directory:
        export(path, directory.restore(init(config))[0].params)


def corpus_of(config: TrainConfig) -> Corpus:
    """The text of a run; read once per process."""
    return _corpus(config.corpus_bytes)


@functools.lru_cache(maxsize=4)
def _corpus(byte_limit: int) -> Corpus:
    return load_corpus(byte_limit=byte_limit)


def _train(
    config: TrainConfig, corpus: Corpus, directory: RunDirectory | None, every: int, progress: Progress
) -> RunResult:
    state = init(config)
    losses: list[float] = []
    if directory is not None:
        state, losses = directory.restore(state)
    begin, started = len(losses), time.perf_counter()
    text, key = jnp.asarray(corpus.train), batch_key(config)
    with _bar(config, begin, progress) as bar:

        def record(pending: jax.Array) -> None:
            values = np.asarray(pending, np.float64)
            if directory is not None:
                directory.append(len(losses) + 1, values)
            losses.extend(values.tolist())
            bar.set_postfix_str(f"step {len(losses)}, loss {values[-1]:.3f}", refresh=False)
            bar.update(len(values) * config.bytes_per_step)

        # One dispatch ahead: the host writes the metrics of a call while the device runs the next one.
        pending = None
        for step in range(begin, config.steps, config.steps_per_call):
            count = min(config.steps_per_call, config.steps - step)
            state, new = make_train_step(config, count)(state, text, key)
            if pending is not None:
                record(pending)
            pending = new
            if directory is not None and ((step + count) % every == 0 or step + count == config.steps):
                record(pending)
                pending = None
                directory.save(state, step + count)
        if pending is not None:
            record(pending)
    seconds = time.perf_counter() - started
    heldout_text = jnp.asarray(corpus.heldout)
    heldout, in_bf16 = (evaluate(config, state, heldout_text, products) for products in ("trained", "bf16"))
    rate = (config.steps - begin) * config.bytes_per_step / seconds if begin < config.steps else math.nan
    return RunResult(np.asarray(losses), heldout, float(np.exp(np.float64(heldout))), in_bf16, rate)


def _checkpoint_interval(config: TrainConfig, every: int | None) -> int:
    call = config.steps_per_call
    if every is None:
        return call * max(1, round(config.steps / (10 * call)))
    if every < 1 or every % call:
        nearest = call * max(1, round(every / call))
        raise ValueError(f"checkpoint_every={every} is not a multiple of steps_per_call={call}; use {nearest}")
    return every


def _bar(config: TrainConfig, begin: int, progress: Progress) -> tqdm:
    name = config.recipe if isinstance(config.recipe, str) else "custom recipe"
    return tqdm(
        total=config.steps * config.bytes_per_step, initial=begin * config.bytes_per_step, desc=name, unit="tok",
        unit_scale=True, disable=progress == "none", mininterval=0.5 if sys.stderr.isatty() else 10.0,
        bar_format="{desc}: {percentage:3.0f}%|{bar:24}| {postfix}, {rate_fmt}, {remaining} left",
    )  # fmt: skip


# The command line -----------------------------------------------------------------------------------------------------

_OVERRIDES = {
    "steps": (int, "optimizer steps"),
    "seed": (int, "of initial weights, batches and stochastic rounding (default: 0)"),
    "batch": (int, "windows per step"),
    "sequence": (int, "bytes predicted per window"),
    "learning_rate": (float, "peak learning rate"),
    "final_fraction": (float, "of the peak learning rate, where its cosine ends (default: 0)"),
    "weight_decay": (float, "AdamW's"),
    "dtype": (str, "of activations: auto (default; bfloat16, on CPUs float32), float32 or bfloat16"),
    "error_dtype": (str, "of error-feedback buffers: float32 (default), bfloat16 or float8_e5m2"),
    "steps_per_call": (int, "steps in one dispatch (default: 10)"),
    "heldout_windows": (int, "windows of the held-out evaluation"),
    "corpus_bytes": (int, "at most this much text"),
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit status: 0, 2 for a request that cannot be met, 130 after an interruption."""
    options = _parser().parse_args(arguments)
    out: Path | None = None
    try:
        out = _choose_folder(options)
        _report(_choose_config(options, out), options, out)
    except (ValueError, FileExistsError, FileNotFoundError, NotImplementedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\ninterrupted; continue with: python -m models.train --resume --out {out}", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m models.train", description=__doc__.split("\n\n")[0], argument_default=argparse.SUPPRESS
    )
    parser.add_argument("--model", choices=list(MODELS), help="size (default: tiny)")
    parser.add_argument(
        "--recipe", help="bf16, tcfp12 (default), tcfp12_fast, tensorwise or tcfp12_single (default of stored weights)"
    )
    parser.add_argument(
        "--weights", choices=get_args(Weights),
        help="float32 parameters beside what the recipe stores (default), or W_hi + W_lo alone",
    )  # fmt: skip
    parser.add_argument(
        "--moments", choices=get_args(Moments), help="AdamW's, of stored weights (default: 8bit; of others float32)"
    )
    parser.add_argument(
        "--compare", choices=["bf16", "none"], help="baseline to train too (default: bf16; none with --recipe bf16)"
    )
    for name, (kind, text) in _OVERRIDES.items():
        parser.add_argument("--" + name.replace("_", "-"), type=kind, help=text)
    parser.add_argument("--export", type=Path, default=None, help="write the trained weights here, float32, .npz")
    parser.add_argument("--checkpoint-every", type=int, default=None, help="steps (default: about a tenth of the run)")
    parser.add_argument("--out", type=Path, default=None, help="folder of the run (default: a new one under runs/)")
    parser.add_argument(
        "--resume", action="store_true", default=False,
        help="continue the run in --out, or the newest under runs/; settings not given are the run's own",
    )  # fmt: skip
    return parser


def _choose_folder(options: argparse.Namespace) -> Path:
    if options.out is not None:
        return options.out
    if options.resume:
        started = sorted(RUNS.glob("*/config.json"), key=lambda path: path.stat().st_mtime)
        if not started:
            raise FileNotFoundError(f"--resume without --out found no run under {RUNS}/; name its folder with --out")
        return started[-1].parent
    stored = getattr(options, "weights", "float") == "stored"
    name = f"{getattr(options, 'model', 'tiny')}-{getattr(options, 'recipe', 'tcfp12_single' if stored else 'tcfp12')}"
    name += "-stored" * stored
    return next(path for path in (RUNS / f"{name}-{i}" for i in range(sys.maxsize)) if not path.exists())


def _choose_config(options: argparse.Namespace, out: Path) -> TrainConfig:
    given = _given(options)
    if not (options.resume and holds_run(out)):
        return preset(getattr(options, "model", "tiny"), **given)
    if hasattr(options, "model"):
        given["model"] = options.model
    return dataclasses.replace(read_config(out), **given)


def _given(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of `TrainConfig` that the command line names, but for the model."""
    names = ("recipe", "weights", "moments", *_OVERRIDES)
    return {name: getattr(options, name) for name in names if hasattr(options, name)}


def _report(config: TrainConfig, options: argparse.Namespace, out: Path) -> None:
    """Train, compare, print and write the results."""
    compare = getattr(options, "compare", "none" if config.recipe == "bf16" else "bf16")
    if options.export is not None:
        check_export(options.export)
    if options.resume and not holds_run(out):
        print(f"no run in {out} to resume: starting at step 0")
    if jax.default_backend() != "cpu":
        keep_programs(out)
    train = functools.partial(
        run, resume="allowed" if options.resume else "never", checkpoint_every=options.checkpoint_every, progress="bar"
    )
    print(_heading(config, out), flush=True)
    name = str(config.recipe)
    result, baseline = train(config, out=out), None
    curves = {name: result.train_loss}
    if compare == "bf16":
        baseline = train(config.in_bf16, out=out / BASELINE_FOLDER)
        curves["bf16 (baseline)"] = baseline.train_loss
    title = f"{config.model}, seed {config.seed}: bytes of Python's standard library"
    plot_losses(out / "loss.png", curves, title=title)
    write_json(out / "summary.json", _summary(config, result, baseline))
    print(_table(name, result, baseline))
    if options.export is not None:
        export_run(out, options.export)
        print(f"exported: {options.export}")
    print(f"written: {out / 'loss.png'}, {out / 'summary.json'}")


def keep_programs(out: Path) -> None:
    """Keep compiled programs in a folder, and load those that are there.

    On GPUs compilation times candidate kernels and takes the fastest, so two processes may multiply with different
    ones, and differ in the last bit. A resumed run loads the programs of the process that began it instead.
    """
    jax.config.update("jax_compilation_cache_dir", str(out.absolute() / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _heading(config: TrainConfig, out: Path) -> str:
    corpus = corpus_of(config)
    size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(jax.eval_shape(lambda: init(config)).params))
    return (
        f"{config.model}: {size:,} parameters, {config.steps} steps of {config.batch} x {config.sequence} bytes, "
        f"activations in {config.compute_dtype}, on {jax.devices()[0].device_kind}\n"
        f"text: {len(corpus.train):,} training bytes in {len(corpus.train_files)} files, "
        f"{len(corpus.heldout):,} held-out bytes in {len(corpus.heldout_files)} files\nfolder: {out}"
    )


def _summary(config: TrainConfig, result: RunResult, baseline: RunResult | None) -> dict[str, Any]:
    summary: dict[str, Any] = {"config": dataclasses.asdict(config), "run": _numbers(result)}
    if baseline is not None:
        ratio = result.heldout_perplexity / baseline.heldout_perplexity
        summary |= {"baseline_bf16": _numbers(baseline), "perplexity_ratio": _finite(ratio)}
    return summary


def _numbers(result: RunResult) -> dict[str, float | None]:
    return {
        "heldout_loss": _finite(result.heldout_loss),
        "heldout_perplexity": _finite(result.heldout_perplexity),
        "heldout_loss_bf16": _finite(result.heldout_loss_bf16),
        "last_train_loss": _finite(float(result.train_loss[-1])),
        "tokens_per_second": _finite(result.tokens_per_second),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no NaN


def _table(name: str, result: RunResult, baseline: RunResult | None) -> str:
    rows = [(name, result)] + ([("bf16 (baseline)", baseline)] if baseline else [])
    lines = ["", f"{'per byte':20}{'held-out loss':>15}{'perplexity':>13}{'tokens/s':>11}"]
    for row, numbers in rows:
        rate = f"{numbers.tokens_per_second:,.0f}" if math.isfinite(numbers.tokens_per_second) else "-"
        lines.append(f"{row:20}{numbers.heldout_loss:15.4f}{numbers.heldout_perplexity:13.4f}{rate:>11}")
    if baseline:
        ratio = result.heldout_perplexity / baseline.heldout_perplexity
        lines.append(f"perplexity ratio {name} / bf16: {ratio:.4f}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
