"""A training run from its config to its result: in memory, or in a folder from which it
continues after a kill.
"""

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from tcfp_jax.weights.stored import bytes_of

from ..huggingface.folders import Form
from ..nets.meshes import everywhere, make_mesh
from .checkpoint import METRICS_FILE, Resume, RunDirectory, check_new
from .corpora import checked_corpus, corpus_of
from .deciding import before_steps, decided
from .described import describe, flatten, holds_run, read_config, recorded
from .evaluation import evaluated
from .exporting import Export
from .fitting import fitted
from .forms import Update
from .monitoring import Board, check_board
from .processes import check_same, is_first, together, whole
from .progress import bar_of, repeated, shown
from .recording import Records
from .room import Files, check_room, file_of, files_of, sized
from .samples import check_prompt, resume_samples, sample
from .settings import BAD_STEPS, TrainConfig
from .state import TrainState
from .steps import (
    batch_key,
    check_placement,
    init,
    make_monitored_step,
    make_train_step,
    read_start,
    state_shapes,
)
from .text import bits_per_byte

Progress = Literal["none", "bar"]
BOARD = "tensorboard"  # name of its folder within the folder of a run


@dataclass(frozen=True)
class RunResult:
    """Losses and speed of a run.

    Attributes:
      train_loss: Nats per token of every step, or losses of pairs, float64 `[steps]`; a
        resumed run has those from the first step on.
      heldout_loss: Nats per token over the held-out windows, or the mean loss of
        held-out pairs, after the last step.
      heldout_perplexity: `exp(heldout_loss)`, per token; NaN of pairs.
      bytes_per_token: Bytes of held-out text for each token, by which losses become
        bits per byte; None if unknown.
      heldout_loss_bf16: Held-out loss of the same trained parameters with BF16
        products; NaN of pairs, whose reference has the products of training.
      remat: Values that each block kept for its backward pass, as in `LlamaConfig`;
        None in other models.
      update: When weights were updated, as in `Stored`; "auto" is decided.
      tokens_per_second: Tokens that this process trained on in a second, without the
        calls that compile a program, checkpoints and samples; NaN without other calls.
      state_bytes: Size of the parameters and of the optimizer's state, which are on the
        devices between two steps.
      peak_bytes: Most bytes that this process had on its first device at once; None if
        the device does not say.
      skipped_steps: Steps that left a stored weight unchanged because of a gradient
        that is not finite, all of the run; None of other weights.
      reports: Reports of the steps that this process observed (`config.monitor`), by
        step, in the form of `models.training.monitoring.written`.
      heldout_rewards: Means of `models.training.dpo.REWARDS`; empty without pairs.
    """

    train_loss: np.ndarray
    heldout_loss: float
    heldout_perplexity: float
    heldout_loss_bf16: float
    tokens_per_second: float
    state_bytes: int
    peak_bytes: int | None = None
    skipped_steps: int | None = None
    remat: str | None = None
    update: Update = "behind"
    reports: dict[int, Any] = field(default_factory=dict)
    bytes_per_token: float | None = None
    heldout_rewards: dict[str, float] = field(default_factory=dict)

    @property
    def heldout_bits_per_byte(self) -> float | None:
        """The held-out loss in bits per byte of text, which does not depend on the
        tokenizer.
        """
        return bits_per_byte(self.heldout_loss, self.bytes_per_token)


@dataclass(frozen=True)
class Outputs:
    """Files that a run writes if they are asked for.

    Attributes:
      tensorboard: "on" writes losses and reports into `tensorboard/` of the run's
        folder, too, which needs tensorboardX.
      export: File or folder that gets the trained weights at the end; None writes none.
    """

    tensorboard: Literal["off", "on"] = "off"
    export: Export | None = None


def run(
    config: TrainConfig,
    *,
    out: Path | None = None,
    resume: Resume = "never",
    checkpoint_every: int | None = None,
    progress: Progress = "none",
    mesh: Mesh | None = None,
    outputs: Outputs = Outputs(),
    bad_steps: int = BAD_STEPS,
    memory: int | None = None,
) -> RunResult:
    """Train from the first step, or from the newest checkpoint in `out`, to the last,
    and evaluate.

    Args:
      config: The run. Equal configs give equal results, bit for bit on one machine and
        mesh.
      out: Folder for config, metrics and checkpoints; None keeps everything in memory.
      resume: "never" refuses a folder that holds a run; "allowed" continues the run, or
        starts one.
      checkpoint_every: Steps between checkpoints, a multiple of
        `config.steps_per_call`. None writes about ten, the last one after the last
        step; 0 writes none, and a run that is killed begins anew.
      progress: "bar" draws a progress bar on standard error, in the first process.
      mesh: Mesh of `models.nets.meshes.make_mesh`. None is one device, or `fsdp` over
        all devices of several processes. The mesh is not part of the run: a run
        continues from the same bits on another mesh.
      bad_steps: Steps in a row without a finite loss after which the run stops. No
        checkpoint is written after such a step, so the last good one stays.
      memory: Bytes of a device that a step may need, for remat="auto" and
        update="auto"; None is 95 % of those that JAX may allocate.
      outputs: Other files to write.

    Raises:
      ImportError: TensorBoard's files are asked for without tensorboardX.
      ValueError: `checkpoint_every` does not fit, or TensorBoard has no folder. The
        text is too short or not readable, or the model cannot continue the prompt of
        `config.sample`. `out` holds another run, or another process writes it. The mesh
        does not divide what it splits, or processes have different settings.
        `config.start` is a checkpoint of another model. A disk has no room for what is
        written, or the weights cannot be written to `outputs.export`.
      FloatingPointError: the loss was not finite in `bad_steps` steps in a row, or at
        the end.
      FileExistsError: `out` holds a run and `resume` is "never".
      FileNotFoundError: `config.data` or `config.start` does not exist, or the data
        holds no text.
      OSError: `out` cannot be written, such as on a full disk; whole checkpoints stay.
    """
    every = together(
        lambda: check_options(config, out, resume, checkpoint_every, outputs, bad_steps)
    )
    mesh = _mesh_of_processes(mesh)
    # Before the folder exists, so that a refusal leaves none.
    check_placement(config, mesh)
    corpus = together(lambda: checked_corpus(config))
    together(lambda: check_prompt(config))
    starts = config.start is not None and not (out is not None and holds_run(out))
    if starts:
        together(lambda: read_start(config))
    settings = dict(
        out=out,
        resume=resume,
        checkpoint_every=every,
        bad_steps=bad_steps,
        mesh=mesh and dict(mesh.shape),
        jax=jax.__version__,
    )
    check_same({**settings, **flatten(describe(config, corpus.digest))})
    together(lambda: check_room(written_files(config, out, every, outputs)))
    telling = progress == "bar" and is_first()
    config = decided(config, corpus.train, out, mesh, memory, telling)
    first = None
    if starts:
        # Read before the folder exists: with the right checkpoint it would be the
        # folder of another run.
        with shown(lambda: f"reading {config.start}", telling):
            first = init(config, mesh)
    if out is None:
        result, state = _train(
            config, first, None, every, bad_steps, progress, mesh, memory=memory
        )
    else:
        board = out / BOARD if outputs.tensorboard == "on" and is_first() else None
        with RunDirectory(out, config, corpus.digest, resume=resume) as directory:
            result, state = _train(
                config,
                first,
                directory,
                every,
                bad_steps,
                progress,
                mesh,
                board,
                memory,
            )
    export = outputs.export
    if export is not None:
        with shown(lambda: f"writing {export.path}", telling):
            export.write(config, state)
    return result


def check_options(
    config: TrainConfig,
    out: Path | None,
    resume: Resume,
    checkpoint_every: int | None,
    outputs: Outputs,
    bad_steps: int,
) -> int:
    """Return the steps between checkpoints, after checks of options of `run` that need
    no text.

    Raises:
      FileExistsError, ImportError, ValueError: as `run`.
    """
    every = checkpoint_interval(config, checkpoint_every)
    if bad_steps < 1:
        raise ValueError(
            f"bad_steps={bad_steps} must be at least 1; a large number never stops"
            " a run"
        )
    if outputs.export is not None:
        outputs.export.check(config)
    if outputs.tensorboard == "on":
        if out is None:
            raise ValueError(
                'tensorboard="on" without out: its files lie in the folder of the run;'
                " name one"
            )
        check_board()
    if out is not None and resume == "never":
        check_new(out)
    return every


def written_files(
    config: TrainConfig,
    out: Path | None,
    every: int,
    outputs: Outputs,
) -> list[Files]:
    """Return the large files that a run will write."""
    found: list[Files] = []
    if out is not None:
        found += files_of(config, out, every)
    if outputs.export is not None:
        found.append(file_of(config, outputs.export))
    return found


def export_run(
    out: Path, path: Path, mesh: Mesh | None = None, form: Form = "bf16"
) -> None:
    """Write the parameters of the newest checkpoint in `out`, on any kind of device.

    Args:
      out: Folder of the run.
      path, form: As in `Export`.
      mesh: As in `run`.

    Raises:
      ValueError: the run has no checkpoint, or the weights cannot be written there.
    """
    config = read_config(out)
    target = Export(path, form)
    target.check(config)
    mesh = _mesh_of_processes(mesh)
    digest = corpus_of(config).digest
    device = recorded(out).get("device")
    with RunDirectory(
        out, config, digest, resume="allowed", device=device
    ) as directory:
        if not directory.holds_state:
            raise ValueError(
                f"{out} has no checkpoint with weights to export; train it first"
            )
        state, _ = directory.restore(state_shapes(config, mesh))
    target.write(config, state)


def _mesh_of_processes(mesh: Mesh | None) -> Mesh | None:
    """Return the mesh; None is `fsdp` over all devices if there are several
    processes.
    """
    if mesh is None and jax.process_count() > 1:
        return make_mesh({"fsdp": jax.device_count()})
    return mesh


def _restored(
    directory: RunDirectory | None,
    config: TrainConfig,
    mesh: Mesh | None,
    first: TrainState | None = None,
) -> tuple[TrainState, list[float]]:
    """Return the state to continue from and the losses before it: the newest
    checkpoint's, or the initial ones, which `first` may have already.
    """
    if directory is not None and directory.holds_state:
        # A checkpoint needs shapes alone: a model that just fits would not fit twice.
        return directory.restore(state_shapes(config, mesh))
    state = init(config, mesh) if first is None else first
    return (state, []) if directory is None else directory.restore(state)


def _train(
    config: TrainConfig,
    first: TrainState | None,
    directory: RunDirectory | None,
    every: int,
    bad_steps: int,
    progress: Progress,
    mesh: Mesh | None,
    board_folder: Path | None = None,
    memory: int | None = None,
) -> tuple[RunResult, TrainState]:
    """Return the result and the last state."""
    corpus = corpus_of(config)
    telling = progress == "bar" and is_first()
    with shown(lambda: "preparing the first step", telling):
        state, losses = _restored(directory, config, mesh, first)
        metrics = None if directory is None else directory.path / METRICS_FILE
        board = Board(board_folder, metrics)
        begin = len(losses)
        text = everywhere(corpus.train, mesh)
        key = batch_key(config)
        # Lowered for the arrays of the first call, which then finds the compiled step.
        count = min(config.steps_per_call, max(1, config.steps - begin))

        def lower(one: TrainConfig) -> jax.stages.Lowered:
            step: Any = make_train_step(one, count, mesh)
            return step.lower(state, text, key)

        ending = config.ending
        config, line = fitted(config, lower, memory)
        last = config
        if config.finish is not None:
            last, _ = fitted(ending, lower, memory)
    if telling:
        print(*before_steps(config, line), sep="\n", flush=True)
    if directory is not None:
        now = config if begin <= config.switch else last
        resume_samples(now, state, begin, directory)
    with bar_of(config, begin, telling) as bar, repeated(bar.refresh):
        if begin < config.steps:
            bar.set_postfix_str("compiling the step", refresh=False)
        records = Records(config, corpus, losses, directory, board, bar, bad_steps)
        compiled = set()
        for step in range(begin, config.steps, config.steps_per_call):
            count = min(config.steps_per_call, config.steps - step)
            after = step + count
            now = config if step < config.switch else last
            observes = config.monitor > 0 and after % config.monitor == 0
            make: Any = make_monitored_step if observes else make_train_step
            call = make(now, count, mesh)
            tokens = count * config.tokens_per_step
            if call not in compiled:
                compiled.add(call)
                tokens = 0
                records.flush()  # before the host compiles
            state, found, *report = call(state, text, key)
            records.flush()
            records.pending = (found, report[0] if report else None, tokens)
            ends = after == config.steps
            if directory is None or not (ends or (every and after % every == 0)):
                continue
            records.flush()
            # Else it would replace one from before the run diverged
            if math.isfinite(losses[-1]):
                if every:
                    _save(directory, state, after, telling)
                sample(now, state, after, directory)
            records.pace.resume()
        records.flush()
        records.check(1)
    board.close()
    with shown(lambda: "evaluating on held-out text", telling):
        return _result(last, state, records, mesh), state


def _save(directory: RunDirectory, state: TrainState, step: int, telling: bool) -> None:
    """Write a checkpoint, and print its bytes and seconds."""
    started = time.perf_counter()
    size = directory.save(state, step)
    seconds = time.perf_counter() - started
    if telling and size:
        tqdm.write(f"checkpoint {step}: {sized(size)} in {seconds:.1f} s")


def _result(
    config: TrainConfig, state: TrainState, records: Records, mesh: Mesh | None
) -> RunResult:
    """Evaluate a run that has ended."""
    corpus = records.corpus
    heldout = evaluated(config, state, everywhere(corpus.heldout, mesh), mesh)
    statistics = jax.local_devices()[0].memory_stats() or {}
    skipped = getattr(state.opt_state, "skipped", None)
    return RunResult(
        train_loss=np.asarray(records.losses),
        heldout_loss=heldout.loss,
        heldout_perplexity=heldout.perplexity,
        heldout_loss_bf16=heldout.loss_bf16,
        tokens_per_second=records.pace.tokens_per_second,
        state_bytes=bytes_of(state),
        peak_bytes=statistics.get("peak_bytes_in_use"),
        skipped_steps=None if skipped is None else int(whole(skipped)),
        remat=getattr(config.size, "remat", None),
        update=config.update,
        reports=records.reports,
        bytes_per_token=corpus.bytes_per_token,
        heldout_rewards=heldout.rewards,
    )


def checkpoint_interval(config: TrainConfig, every: int | None) -> int:
    """Return the steps between checkpoints of `run(..., checkpoint_every=every)`."""
    call = config.steps_per_call
    if every == 0:
        return 0
    if every is None:
        return call * max(1, round(config.steps / (10 * call)))
    if every < 1 or every % call:
        nearest = call * max(1, round(every / call))
        raise ValueError(
            f"checkpoint_every={every} is not a multiple of steps_per_call={call}; use"
            f" {nearest}, or 0 for no checkpoints"
        )
    return every
