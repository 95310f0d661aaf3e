"""Progress of commands that print nothing for a while: a line that says what they do,
and for how many seconds.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator


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
