"""The other side of `models.huggingface.limits`: a process that runs jobs with limits.

A job is one JSON message, and so is its answer. The process ends with the pipe, or by
the signal of a limit.
"""

import json
import multiprocessing.connection
import resource
import signal
import sys
from typing import Any, TypeAlias

import jinja2
import tokenizers

from . import templates

Job: TypeAlias = dict[str, Any]
MODELS: dict[str, tokenizers.Tokenizer] = {}


def _render(job: Job) -> Job:
    return dict(found=[_rendered(job, one) for one in job["variables"]])


def _rendered(job: Job, variables: Job) -> Job:
    try:
        text, spans = templates.render(job["template"], variables, job["date"])
    except Exception as error:
        return dict(error=_reason(error))
    return dict(text=text, spans=spans)


def _load(job: Job) -> Job:
    model = tokenizers.Tokenizer.from_str(job["content"])
    model.encode_special_tokens = job["splits"]
    MODELS[job["model"]] = model
    return {}


def _encode(job: Job) -> Job:
    model = MODELS[job["model"]]
    found = model.encode_batch_fast(job["texts"], add_special_tokens=job["marked"])
    return dict(ids=[one.ids for one in found])


def _encode_with_offsets(job: Job) -> Job:
    found = MODELS[job["model"]].encode(job["text"], add_special_tokens=False)
    return dict(ids=found.ids, offsets=found.offsets)


def _decode(job: Job) -> Job:
    model = MODELS[job["model"]]
    return dict(text=model.decode(job["ids"], skip_special_tokens=False))


_DO = {
    "render": _render,
    "load": _load,
    "encode": _encode,
    "encode with offsets": _encode_with_offsets,
    "decode": _decode,
}


def _reason(error: BaseException) -> str:
    """Return an error as one line that a terminal can show."""
    text = str(error)
    if isinstance(error, MemoryError | RecursionError):
        text = f"it needs too much memory ({type(error).__name__})"
    elif not isinstance(error, jinja2.TemplateError | ValueError):
        text = f"{type(error).__name__}: {text}"
    return "".join(one if one.isprintable() else " " for one in text[:500])


def serve(pipe: multiprocessing.connection.Connection) -> None:
    """Run jobs until the pipe is closed."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    while True:
        try:
            job = json.loads(pipe.recv_bytes())
        except EOFError:
            return
        most = job["bytes"] if hard == resource.RLIM_INFINITY else hard
        resource.setrlimit(resource.RLIMIT_DATA, (min(job["bytes"], most), hard))
        # Its signal ends the process, in native code, too
        signal.setitimer(signal.ITIMER_PROF, job["seconds"])
        try:
            answer = _DO[job["do"]](job)
        except BaseException as error:  # tokenizers' panics are no exceptions
            answer = dict(error=_reason(error))
        signal.setitimer(signal.ITIMER_PROF, 0)
        pipe.send_bytes(json.dumps(answer).encode())


if __name__ == "__main__":
    serve(multiprocessing.connection.Connection(int(sys.argv[1])))
