"""Progress of commands that print nothing for a while: a line that says what they do,
and for how many seconds; and the bar of a run.
"""

import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator

from tqdm import tqdm

from .settings import TrainConfig, short_name


@contextlib.contextmanager
def repeated(action: Callable[[], object]) -> Iterator[None]:
    """Run an action in a thread while the context lasts: each second on a terminal,
    elsewhere every ten seconds.
    """
    ended = threading.Event()
    seconds = 1.0 if sys.stderr.isatty() else 10.0

    def run() -> None:
        while not ended.wait(seconds):
            action()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextlib.contextmanager
def shown(text: Callable[[], str], on: bool = True) -> Iterator[None]:
    """Show a text and the seconds of the context: in one line of a terminal that is
    erased, elsewhere in new lines.
    """
    started = time.monotonic()
    before, after = ("\r", "\r\033[K") if sys.stderr.isatty() else ("", "")

    def show() -> None:
        line = f"{before}{text()}, {time.monotonic() - started:.0f} s"
        print(line, end="" if before else "\n", file=sys.stderr, flush=True)

    if on:
        show()
    try:
        with repeated(show) if on else contextlib.nullcontext():
            yield
    finally:
        print(after if on else "", end="", file=sys.stderr, flush=True)


class Pace:
    """Speed of the calls of a run that compiled nothing."""

    def __init__(self) -> None:
        self._tokens = 0
        self._seconds = 0.0
        self.resume()

    def resume(self) -> None:
        """Measure from now on, after a checkpoint or anything else."""
        self._since = time.perf_counter()

    def passed(self, tokens: int) -> None:
        """Count a call that has ended; 0 tokens leave out one that compiled."""
        now = time.perf_counter()
        if tokens:
            self._tokens += tokens
            self._seconds += now - self._since
        self._since = now

    @property
    def tokens_per_second(self) -> float:
        """Their tokens in a second; NaN before the first of these calls."""
        return self._tokens / self._seconds if self._tokens else math.nan


class Lines:
    """Standard error for a bar that no terminal shows: a line for each change."""

    def write(self, text: str) -> None:
        """Write a line, without the characters that erase one."""
        line = text.strip()
        if line:
            print(line, file=sys.stderr)

    def flush(self) -> None:
        """Flush standard error."""
        sys.stderr.flush()


def bar_of(config: TrainConfig, begin: int, on: bool) -> tqdm:
    """Return the progress bar of a run that goes on after some steps."""
    terminal = sys.stderr.isatty()
    return tqdm(
        file=sys.stderr if terminal else Lines(),
        total=config.steps * config.tokens_per_step,
        initial=begin * config.tokens_per_step,
        desc=short_name(config.recipe),
        unit="tok",
        unit_scale=True,
        disable=not on,
        mininterval=0.5 if terminal else 10.0,
        bar_format=(
            # A postfix brings its own comma
            "{desc}: {percentage:3.0f}%|{bar:24}| {rate_fmt}{postfix}, {elapsed} gone,"
            " {remaining} left"
        ),
    )
