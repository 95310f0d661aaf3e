"""Tokenizers and chat templates of downloaded models run in a process with limits.

A template may loop, a normalizer of a tokenizer may double a text forty times, and
native code obeys no exception. So both run in a process of their own, which the system
stops after some seconds of computing, and which gets no more than some memory.
"""

import atexit
import functools
import hashlib
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import tokenizers

# Limits of a job, and their growth per byte of its text. Tokenizers encode a megabyte
# in a second, and take a hundred bytes for each byte of text.
SECONDS = 5.0
SECONDS_PER_BYTE = 1e-5
BYTES = 2**31
BYTES_PER_BYTE = 128

Job: TypeAlias = dict[str, Any]


class Encoded(NamedTuple):
    """Ids of a text, int32 `[tokens]`, and where each begins and ends in it, int64."""

    ids: np.ndarray
    begins: np.ndarray
    ends: np.ndarray


class Rendering(NamedTuple):
    """A conversation as text, and where tags of answers begin and end in it; or why the
    template refuses it.
    """

    text: str = ""
    spans: Sequence[tuple[int, int]] = ()
    error: str | None = None

    def checked(self) -> str:
        """Return the text.

        Raises:
          ValueError: there is none.
        """
        if self.error is not None:
            raise ValueError(
                f"the chat template refuses the conversation: {self.error}"
            )
        return self.text


class _Process:
    """A process that runs jobs one after another, and starts anew after it was stopped.

    Attributes:
      loaded: Names of the tokenizers that it holds.
    """

    def __init__(self) -> None:
        self.loaded: set[str] = set()
        self._lock = threading.RLock()
        self._child: subprocess.Popen[bytes] | None = None
        self._pipe: multiprocessing.connection.Connection | None = None
        atexit.register(self.close)

    def run(self, job: Job) -> Job:
        """Return the answer to a job.

        Raises:
          ValueError: it fails, or reaches a limit.
        """
        content = json.dumps(job).encode()
        seconds = SECONDS + SECONDS_PER_BYTE * len(content)
        most = BYTES + BYTES_PER_BYTE * len(content)
        limits = json.dumps(dict(seconds=seconds, bytes=most)).encode()
        with self._lock:
            pipe = self._started()
            try:
                pipe.send_bytes(content[:-1] + b", " + limits[1:])
                answer: Job = json.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                raise ValueError(self._end(seconds, most)) from None
            # The other process belongs to nobody's job
            except BaseException:
                self.close()
                raise
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer

    def of_model(self, job: Job, model: tokenizers.Tokenizer) -> Job:
        """Return the answer to a job of a tokenizer."""
        name, content = _definition(model)
        # Its JSON leaves this out
        splits = model.encode_special_tokens
        name += str(splits)
        with self._lock:
            if name not in self.loaded:
                self.run(dict(do="load", model=name, content=content, splits=splits))
                self.loaded.add(name)
            return self.run({**job, "model": name})

    def close(self) -> None:
        """End the process."""
        if self._child is not None and self._pipe is not None:
            self._pipe.close()
            self._child.kill()
            self._child.wait()
        self._child = None
        self._pipe = None
        self.loaded.clear()

    def _started(self) -> multiprocessing.connection.Connection:
        if self._pipe is not None:
            return self._pipe
        ours, theirs = multiprocessing.Pipe()
        # -P: a module of the folder in which a command starts may be a stranger's
        command = [sys.executable, "-P", "-m", f"{__package__}.served"]
        with theirs:
            self._child = subprocess.Popen(
                [*command, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # an interruption is ours alone
            )
        self._pipe = ours
        return ours

    def _end(self, seconds: float, most: int) -> str:
        """Return why the process has ended."""
        assert self._child is not None
        status = self._child.wait()
        self.close()
        if status == -signal.SIGPROF:
            return f"it was stopped after {seconds:.3g} seconds of computing"
        return (
            f"its process ended with status {status}, as when it needs more than"
            f" {most / 2**30:.3g} GiB of memory"
        )


_PROCESS = _Process()


def rendered(
    template: str, variables: Sequence[Job], date: str | None
) -> list[Rendering]:
    """Return `models.huggingface.templates.render` of several variables.

    Raises:
      ValueError: the template reaches a limit.
    """
    job = dict(do="render", template=template, variables=list(variables), date=date)
    return [Rendering(**one) for one in _PROCESS.run(job)["found"]]


def encoded(
    model: tokenizers.Tokenizer, texts: Sequence[str], marked: bool = False
) -> list[np.ndarray]:
    """Return the ids of texts, uint32; `marked` with those that the tokenizer puts
    before and after each.

    Raises:
      ValueError: the tokenizer fails, or reaches a limit.
    """
    job = dict(do="encode", texts=list(texts), marked=marked)
    found = _PROCESS.of_model(job, model)["ids"]
    return [np.asarray(ids, np.uint32) for ids in found]


def encoded_with_offsets(model: tokenizers.Tokenizer, text: str) -> Encoded:
    """Return the ids of a text and their places in it.

    Raises:
      ValueError: the tokenizer fails, or reaches a limit.
    """
    found = _PROCESS.of_model(dict(do="encode with offsets", text=text), model)
    offsets = np.asarray(found["offsets"], np.int64).reshape(-1, 2)
    return Encoded(np.asarray(found["ids"], np.int32), *offsets.T)


def decoded(model: tokenizers.Tokenizer, ids: Sequence[int]) -> str:
    """Return the text of ids, special ones included.

    Raises:
      ValueError: the tokenizer fails, or reaches a limit.
    """
    job = dict(do="decode", ids=[int(one) for one in ids])
    return str(_PROCESS.of_model(job, model)["text"])


@functools.lru_cache(maxsize=8)
def _definition(model: tokenizers.Tokenizer) -> tuple[str, str]:
    content = model.to_str()
    return hashlib.sha256(content.encode()).hexdigest(), content
