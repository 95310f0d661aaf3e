"""First compile of a training step of other packages' models, over that of the float model.

    python -m benchmarks.wild [--only WORD ...] [--json]

One line of JSON per subject and one for all: seconds of tracing, lowering and compiling, float and converted, with
programs compiled as users compile them and no cache. Quotients are of the processor's seconds, of all threads: what
else the machine does changes those of the clock, and its load is recorded. With --json the rows are written beside
those of the other benchmarks, after every subject.
"""

import argparse
import importlib.util
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import jax
import optax

import tcfp_jax
from benchmarks.common import RESULTS, device_slug, make_header, write_result
from tests.wild.low import convert, step_of
from tests.wild.made import Made, Subject, pure
from tests.wild.subjects import SUBJECTS


@dataclass(frozen=True)
class Row:
    """One subject: seconds of the clock and of the processor, float and low; `quotient` is of the processor's."""

    subject: str
    float_s: float
    low_s: float
    float_processor_s: float
    low_processor_s: float
    quotient: float
    load: float


@dataclass(frozen=True)
class Config:
    """Which subjects: words, one of which each name holds; all without a word."""

    only: tuple[str, ...]


def seconds_to_compile(step: Callable[..., Any], *arguments: Any) -> tuple[float, float]:
    """(the clock's, the processor's) seconds until a jitted function that was never called has a program."""
    jax.clear_caches()
    start, begin = time.perf_counter(), time.process_time()
    step.lower(*arguments).compile()  # type: ignore[attr-defined]
    return time.perf_counter() - start, time.process_time() - begin


def compare(subject: Subject, made: Made) -> Row:
    """Seconds of both models of one subject."""
    fn, params, inputs = pure(made, subject.kind)
    optimizer = optax.adamw(subject.rate)
    state = jax.eval_shape(optimizer.init, params)
    in_float = seconds_to_compile(step_of(subject, lambda params, _: fn(params, *inputs), optimizer), params, state)
    low = convert(subject, made)
    chained = optax.chain(optimizer, tcfp_jax.error_feedback(low.weights))
    call = lambda params, state: low.call(params, tcfp_jax.layer_state(state), *inputs)
    state = jax.eval_shape(chained.init, params)
    in_low = seconds_to_compile(step_of(subject, call, chained), params, state)
    clock, processor = ((round(a, 2), round(b, 2)) for a, b in zip(in_float, in_low, strict=True))
    quotient = round(in_low[1] / in_float[1], 2)
    return Row(subject.name, *clock, *processor, quotient, round(os.getloadavg()[0], 1))


def main() -> None:
    """Print one line per subject, then the median and the worst."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], help="words, one of which a subject's name must hold")
    parser.add_argument("--json", action="store_true", help="write benchmarks/results/<device>/wild.json")
    options = parser.parse_args()
    path = RESULTS / device_slug() / "wild.json" if options.json else None
    header, rows = make_header(), list[Row]()
    for subject in SUBJECTS:
        if options.only and not any(word in subject.name for word in options.only):
            continue
        if not all(importlib.util.find_spec(package) for package in subject.packages):
            print(json.dumps(dict(subject=subject.name, skipped="not installed")), flush=True)
            continue
        made = subject.make()
        with made.context():
            rows.append(compare(subject, made))
        print(json.dumps(asdict(rows[-1])), flush=True)
        write_result(path, "wild", header, Config(tuple(options.only)), rows)
    worst = max(rows, key=lambda row: row.quotient)
    summary = dict(subjects=len(rows), median=statistics.median(row.quotient for row in rows), worst=worst.quotient,
                   worst_subject=worst.subject)  # fmt: skip
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
