"""A training run from its config to its result: in memory, or in a folder from which it
continues after a kill.
"""

import dataclasses
import functools
import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

import tcfp_jax

from ..huggingface.configs import is_folder
from ..huggingface.folders import Form, check_folder, write_folder
from ..nets.adapters import changes_of
from ..nets.meshes import everywhere, make_mesh
from ..nets.shapes import LlamaConfig
from .batches import check_corpus
from .checkpoint import (
    METRICS_FILE,
    Resume,
    RunDirectory,
    describe,
    holds_run,
    read_config,
)
from .data import Data, load_data
from .deciding import before_steps, decided
from .described import flatten
from .dpo import shown_rewards, told
from .evaluation import evaluated
from .examples import load_examples
from .fitting import fitted
from .forms import Update
from .learners import model_of, quantized_of
from .monitoring import Board, check_board, written
from .parameters import export
from .preferences import load_pairs
from .processes import check_same, is_first, together, whole
from .progress import bar_of, repeated, shown
from .sampling import continued
from .settings import BAD_STEPS, TrainConfig
from .state import TrainState, float_parameters
from .steps import (
    batch_key,
    check_placement,
    init,
    make_monitored_step,
    make_train_step,
    read_start,
    state_shapes,
)
from .text import Corpus, bits_per_byte, load_corpus
from .tokenized import tokenized

Progress = Literal["none", "bar"]
SAMPLES_FILE = "samples.jsonl"
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
        products; NaN of pairs, whose reference has the products of training, and with
        update="backward", because they need a float copy.
      remat: Values that each block kept for its backward pass, as in `LlamaConfig`;
        None in other models.
      update: When weights were updated, as in `Stored`; "auto" is decided.
      tokens_per_second: Tokens that this process trained on in a second, compilation
        included; NaN without a step.
      state_bytes: Size of the parameters and of the optimizer's state, which are on the
        devices between two steps.
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


def run(
    config: TrainConfig,
    *,
    out: Path | None = None,
    resume: Resume = "never",
    checkpoint_every: int | None = None,
    progress: Progress = "none",
    mesh: Mesh | None = None,
    tensorboard: Literal["off", "on"] = "off",
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
        `config.steps_per_call`; None writes about ten.
      progress: "bar" draws a progress bar on standard error, in the first process.
      mesh: Mesh of `models.nets.meshes.make_mesh`. None is one device, or `fsdp` over
        all devices of several processes. The mesh is not part of the run: a run
        continues from the same bits on another mesh.
      bad_steps: Steps in a row without a finite loss after which the run stops. No
        checkpoint is written after such a step, so the last good one stays.
      memory: Bytes of a device that a step may need, for remat="auto" and
        update="auto"; None is 95 % of those that JAX may allocate.
      tensorboard: "on" writes losses and reports into `out / "tensorboard"`, too, which
        needs tensorboardX.

    Raises:
      ImportError: TensorBoard's files are asked for without tensorboardX.
      ValueError: `checkpoint_every` does not fit; TensorBoard has no folder; the
        text is too short or not readable; `out` holds another run, or another process
        writes it; the mesh does not divide what it splits; processes have different
        settings; or `config.start` is a checkpoint of another model.
      FloatingPointError: the loss was not finite in `bad_steps` steps in a row, or at
        the end.
      FileExistsError: `out` holds a run and `resume` is "never".
      FileNotFoundError: `config.data` or `config.start` does not exist, or the data
        holds no text.
      OSError: `out` cannot be written, such as on a full disk; whole checkpoints stay.
    """
    every = _checkpoint_interval(config, checkpoint_every)
    if bad_steps < 1:
        raise ValueError(
            f"bad_steps={bad_steps} must be at least 1; a large number never stops"
            " a run"
        )
    mesh = _mesh_of_processes(mesh)
    # Before the folder exists, so that a refusal leaves none.
    check_placement(config, mesh)
    corpus = together(lambda: checked_corpus(config))
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
    if tensorboard == "on":
        if out is None:
            raise ValueError(
                'tensorboard="on" without out: its files lie in the folder of the run;'
                " name one"
            )
        check_board()
    telling = progress == "bar" and is_first()
    config = decided(config, corpus.train, out, mesh, memory, telling)
    first = None
    if starts:
        # Read before the folder exists: with the right checkpoint it would be the
        # folder of another run.
        with shown(lambda: f"reading {config.start}", telling):
            first = init(config, mesh)
    if out is None:
        return _train(
            config, first, None, every, bad_steps, progress, mesh, memory=memory
        )
    board = out / BOARD if tensorboard == "on" and is_first() else None
    with RunDirectory(out, config, corpus.digest, resume=resume) as directory:
        return _train(
            config, first, directory, every, bad_steps, progress, mesh, board, memory
        )


def export_run(
    out: Path, path: Path, mesh: Mesh | None = None, form: Form = "bf16"
) -> None:
    """Write the parameters of the newest checkpoint in `out`.

    Args:
      out: Folder of the run.
      path: An `.npz`, which gets float32 (`models.training.parameters.export`), or a
        folder (`models.huggingface.folders.write_folder`).
      mesh: As in `run`.
      form: Form of the weights in a folder.
    """
    config = read_config(out)
    mesh = _mesh_of_processes(mesh)
    digest = corpus_of(config).digest
    with RunDirectory(out, config, digest, resume="allowed") as directory:
        state, _ = _restored(directory, config, mesh)
    params = float_parameters(state.params, tcfp_jax.layer_state(state.opt_state))
    if path.suffix == ".npz":
        export(path, params)
        return
    size = config.size
    check_folder(path, size, config.start, config.data.tokenizer)
    params = jax.tree.map(whole, params)
    if is_first() and isinstance(size, LlamaConfig):
        source = None
        if config.start is not None and is_folder(config.start):
            source = Path(config.start)
        shape = dataclasses.replace(size, lora=0)
        tokenizer = config.data.tokenizer
        changes = changes_of(state.params)
        write_folder(path, params, shape, form, source, tokenizer, changes)


def _mesh_of_processes(mesh: Mesh | None) -> Mesh | None:
    """Return the mesh; None is `fsdp` over all devices if there are several
    processes.
    """
    if mesh is None and jax.process_count() > 1:
        return make_mesh({"fsdp": jax.device_count()})
    return mesh


def corpus_of(config: TrainConfig) -> Corpus:
    """Return the text of a run, which is read once per process."""
    packed = config.sequence if config.data.packs else None
    return _corpus(config.data, packed, config.preferences is not None)


def checked_corpus(config: TrainConfig) -> Corpus:
    """Return the text of a run, after a check that both parts hold a window.

    Raises:
      ValueError: a part does not; the message says how to repair it.
    """
    corpus = corpus_of(config)
    check_corpus(corpus, config)
    return corpus


@functools.lru_cache(maxsize=4)
def _corpus(data: Data, packed: int | None, holds_pairs: bool) -> Corpus:
    """Return a text; `packed` is the length of rows of documents or of pairs."""
    limit = data.corpus_bytes
    tokenizer = data.read_tokenizer()
    if tokenizer is None:
        if not data.paths:
            return load_corpus(byte_limit=limit)
        return load_data(data.paths, vocabulary=data.vocabulary, byte_limit=limit)
    if packed is not None:
        reader = load_pairs if holds_pairs else load_examples
        return reader(data.paths, tokenizer, packed)
    if data.paths:
        text = load_data(data.paths, byte_limit=limit)
    else:
        text = load_corpus(byte_limit=limit)
    return tokenized(text, tokenizer)


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
) -> RunResult:
    corpus = corpus_of(config)
    telling = progress == "bar" and is_first()
    with shown(lambda: "preparing the first step", telling):
        state, losses = _restored(directory, config, mesh, first)
        starts = config.start is not None
        if directory is not None and starts and not directory.holds_state:
            # From here on the file of `start` may move or change
            directory.save(state, 0)
        metrics = None if directory is None else directory.path / METRICS_FILE
        board = Board(board_folder, metrics)
        begin = len(losses)
        started = time.perf_counter()
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
    reports: dict[int, Any] = {}
    with bar_of(config, begin, telling) as bar, repeated(bar.refresh):

        def record(found: jax.Array, new_report: Any) -> None:
            values, rewards = told(found)
            report = None
            if new_report is not None:
                report = written(jax.device_get(new_report))
                reports[len(losses) + len(values)] = report
            if directory is not None:
                directory.append(len(losses) + 1, values, report, rewards)
            board.add(len(losses) + 1, values, report, rewards)
            losses.extend(values.tolist())
            loss = _shown(values[-1], corpus) + shown_rewards(rewards)
            bar.set_postfix_str(f"step {len(losses)}, loss {loss}", refresh=False)
            bar.update(len(values) * config.tokens_per_step)
            _check_losses(losses, begin, bad_steps, config, directory)

        # One dispatch ahead: the host writes the metrics of a call while the device
        # runs the next one.
        pending: tuple[jax.Array, Any] | None = None
        for step in range(begin, config.steps, config.steps_per_call):
            count = min(config.steps_per_call, config.steps - step)
            after = step + count
            report = None
            now = config if step < config.switch else last
            if config.monitor and after % config.monitor == 0:
                observed = make_monitored_step(now, count, mesh)
                state, found, report = observed(state, text, key)
            else:
                state, found = make_train_step(now, count, mesh)(state, text, key)
            if pending is not None:
                record(*pending)
            pending = (found, report)
            if directory is None or (after % every and after != config.steps):
                continue
            record(*pending)
            pending = None
            # Else it would replace one from before the run diverged
            if math.isfinite(losses[-1]):
                directory.save(state, after)
                _sample(now, state, after, directory)
        if pending is not None:
            record(*pending)
        _check_losses(losses, begin, 1, config, directory)
    board.close()
    seconds = time.perf_counter() - started
    with shown(lambda: "evaluating on held-out text", telling):
        return _result(last, corpus, state, losses, begin, seconds, reports, mesh)


def _result(
    config: TrainConfig,
    corpus: Corpus,
    state: TrainState,
    losses: list[float],
    begin: int,
    seconds: float,
    reports: dict[int, Any],
    mesh: Mesh | None,
) -> RunResult:
    """Evaluate a run that has ended."""
    heldout = evaluated(config, state, everywhere(corpus.heldout, mesh), mesh)
    rate = math.nan
    if begin < config.steps:
        rate = (config.steps - begin) * config.tokens_per_step / seconds
    arrays = jax.tree.leaves(state)
    return RunResult(
        train_loss=np.asarray(losses),
        heldout_loss=heldout.loss,
        heldout_perplexity=heldout.perplexity,
        heldout_loss_bf16=heldout.loss_bf16,
        tokens_per_second=rate,
        state_bytes=sum(leaf.nbytes for leaf in arrays),
        remat=getattr(config.size, "remat", None),
        update=config.update,
        reports=reports,
        bytes_per_token=corpus.bytes_per_token,
        heldout_rewards=heldout.rewards,
    )


def _shown(loss: float, corpus: Corpus) -> str:
    """Return a loss in nats per token, and in bits per byte if the bytes are known."""
    bits = bits_per_byte(loss, corpus.bytes_per_token)
    return f"{loss:.3f}" + ("" if bits is None else f" ({bits:.3f} bits/byte)")


def _sample(
    config: TrainConfig, state: TrainState, step: int, directory: RunDirectory
) -> None:
    """Continue the prompt of the run, print the text, and append it to the folder."""
    if config.sample is None:
        return
    text, rate = continued(
        model_of(config),
        {"params": state.params, "tcfp": quantized_of(config, state)},
        config.sample,
        context=config.size.context,
        tokenizer=config.data.read_tokenizer(),
    )
    if is_first():
        tqdm.write(f"step {step}: {config.sample!r} -> {text!r} ({rate:,.0f} tokens/s)")
        entry = dict(step=step, prompt=config.sample, text=text, tokens_per_second=rate)
        directory.extend(SAMPLES_FILE, json.dumps(entry) + "\n")


def _check_losses(
    losses: list[float],
    begin: int,
    bad_steps: int,
    config: TrainConfig,
    directory: RunDirectory | None,
) -> None:
    """Raise `FloatingPointError` if the last `bad_steps` losses, all after step
    `begin`, are not finite.
    """
    last = losses[max(begin, len(losses) - bad_steps) :]
    if len(last) < bad_steps or any(map(math.isfinite, last)):
        return
    kept = directory is not None and directory.holds_state
    raise FloatingPointError(
        f"the run has diverged: the losses of steps {len(losses) - bad_steps + 1} to"
        f" {len(losses)} are not"
        f" finite{'; the checkpoints before them are kept' if kept else ''}; start anew"
        f" with a learning rate below {config.learning_rate:g}, or find the first bad"
        " step with --monitor"
    )


def _checkpoint_interval(config: TrainConfig, every: int | None) -> int:
    call = config.steps_per_call
    if every is None:
        return call * max(1, round(config.steps / (10 * call)))
    if every < 1 or every % call:
        nearest = call * max(1, round(every / call))
        raise ValueError(
            f"checkpoint_every={every} is not a multiple of steps_per_call={call}; use"
            f" {nearest}"
        )
    return every
