"""Losses and reports of the steps of a run, as they arrive from the device."""

import math
from dataclasses import dataclass, field
from typing import Any

import jax
from tqdm import tqdm

from .checkpoint import RunDirectory
from .dpo import shown_rewards, told
from .monitoring import Board, written
from .progress import Pace
from .settings import TrainConfig
from .text import Corpus, bits_per_byte


@dataclass
class Records:
    """The steps of a run, written to its folder, to TensorBoard and to its bar.

    One call stays `pending`: the host writes its metrics while the device runs the next
    one.

    Attributes:
      config: The run.
      corpus: Its text.
      losses: Losses of all steps, those before a resumed run among them.
      directory: Its folder, or None.
      board: TensorBoard's file.
      bar: The progress bar.
      bad_steps: As in `models.training.running.run`.
      reports: Reports of observed steps.
      pace: Speed of the calls that compiled nothing.
      begin: Number of steps before this process.
      pending: Losses of a call on the device, its report or None, and the tokens that
        count for its speed.
    """

    config: TrainConfig
    corpus: Corpus
    losses: list[float]
    directory: RunDirectory | None
    board: Board
    bar: tqdm
    bad_steps: int
    reports: dict[int, Any] = field(default_factory=dict)
    pace: Pace = field(default_factory=Pace)
    begin: int = field(init=False)
    pending: tuple[jax.Array, Any, int] | None = None

    def __post_init__(self) -> None:
        self.begin = len(self.losses)

    def flush(self) -> None:
        """Wait for the pending call, and write its steps.

        Raises:
          FloatingPointError: the run has diverged.
        """
        if self.pending is None:
            return
        found, report, tokens = self.pending
        self.pending = None
        values, rewards = told(found)
        self.pace.passed(tokens)
        first = len(self.losses) + 1
        if report is not None:
            report = written(jax.device_get(report))
            self.reports[first - 1 + len(values)] = report
        if self.directory is not None:
            self.directory.append(first, values, report, rewards)
        self.board.add(first, values, report, rewards)
        self.losses.extend(values.tolist())
        loss = _shown(values[-1], self.corpus) + shown_rewards(rewards)
        self.bar.set_postfix_str(f"step {len(self.losses)}, loss {loss}", refresh=False)
        self.bar.update(len(values) * self.config.tokens_per_step)
        self.check(self.bad_steps)

    def check(self, bad_steps: int) -> None:
        """Raise `FloatingPointError` if the last losses, all of this process, are not
        finite.
        """
        count = len(self.losses)
        last = self.losses[max(self.begin, count - bad_steps) :]
        if len(last) < bad_steps or any(map(math.isfinite, last)):
            return
        kept = self.directory is not None and self.directory.holds_state
        raise FloatingPointError(
            f"the run has diverged: the losses of steps {count - bad_steps + 1} to"
            f" {count} are not"
            f" finite{'; the checkpoints before them are kept' if kept else ''}; start"
            f" anew with a learning rate below {self.config.learning_rate:g}, or find"
            " the first bad step with --monitor"
        )


def _shown(loss: float, corpus: Corpus) -> str:
    """Return a loss in nats per token, and in bits per byte if the bytes are known."""
    bits = bits_per_byte(loss, corpus.bytes_per_token)
    return f"{loss:.3f}" + ("" if bits is None else f" ({bits:.3f} bits/byte)")
