"""First compile of a training step of other packages' models, over that of the float model.

    python -m benchmarks.wild [--only WORD ...]

One line of JSON per subject and one for all: seconds of tracing, lowering and compiling, float and converted, with
programs compiled as users compile them and no cache. Seconds depend on the machine and on what else it does; the
quotient of two compilations that follow each other less so.
"""

import argparse
import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import optax

import tcfp_jax
from tests.wild.low import convert, step_of
from tests.wild.made import Made, Subject, pure
from tests.wild.subjects import SUBJECTS


def seconds_to_compile(step: Callable[..., Any], *arguments: Any) -> float:
    """Seconds until a jitted function that was never called has a program."""
    jax.clear_caches()
    start = time.perf_counter()
    step.lower(*arguments).compile()  # type: ignore[attr-defined]
    return time.perf_counter() - start


def compare(subject: Subject, made: Made) -> dict[str, Any]:
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
    return dict(subject=subject.name, float_s=round(in_float, 2), low_s=round(in_low, 2),
                quotient=round(in_low / in_float, 2))  # fmt: skip


def main() -> None:
    """Print one line per subject, then the median and the worst."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], help="words, one of which a subject's name must hold")
    options = parser.parse_args()
    quotients: dict[str, float] = {}
    for subject in SUBJECTS:
        if options.only and not any(word in subject.name for word in options.only):
            continue
        if not all(importlib.util.find_spec(package) for package in subject.packages):
            print(json.dumps(dict(subject=subject.name, skipped="not installed")), flush=True)
            continue
        made = subject.make()
        with made.context():
            line = compare(subject, made)
        quotients[subject.name] = line["quotient"]
        print(json.dumps(line), flush=True)
    worst = max(quotients, key=lambda name: quotients[name])
    summary = dict(subjects=len(quotients), median=statistics.median(quotients.values()), worst=quotients[worst],
                   worst_subject=worst)  # fmt: skip
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
