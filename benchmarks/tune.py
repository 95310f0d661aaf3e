"""Time backends and tile sizes on this device, and write `pallas_kernels/tuned.json`.

    python -m benchmarks.tune
    python -m benchmarks.tune --only quantize --budget-seconds 500

`benchmarks.tune_cases` has the shapes. Each candidate is compared with XLA's result
before it is timed. The file is written after every entry, and entries of other devices
stay.

`--cases grid` times the table that `convert_to_tcfp(include="measured")` interpolates:
products and quantizers of layers from small models up, BF16's products, and kernels
with the tile sizes that they run with now.
"""

import argparse
import dataclasses
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, get_args

import jax

from benchmarks import tune_cases
from benchmarks.products import donating
from benchmarks.timing import Repetitions, Timing, take_memory_as_needed
from benchmarks.tune_cases import Case
from pallas_kernels import tuning
from pallas_kernels.dispatch import device_kind
from pallas_kernels.tuning import Entry

Cases = Literal["all", "missing", "grid"]


def run(
    budget_seconds: float = math.inf, only: str = "", cases: Cases = "all"
) -> list[Entry]:
    """Time every case whose "op variant" contains `only`, and write its entry.

    "missing" cases are those of all widths that `tuned.json` lacks; "grid" is that of
    layers.
    """
    started = time.perf_counter()
    entries: list[Entry] = []
    wanted = _wanted(only, cases)
    # Cases that are compiled at once
    together = 1
    if cases == "grid":
        together = 16
    elif only.startswith("grouped"):
        together = 4
    while chunk := list(itertools.islice(wanted, together)):
        if time.perf_counter() - started > budget_seconds:
            print(f"budget of {budget_seconds:g} s: stopped before {_name(chunk[0])}")
            break
        if len(chunk) > 1:
            _compile(chunk)
        for case in chunk:
            entry = time_case(case)
            times = dict(entry.milliseconds)
            print(f"{_name(case)}: {entry.backend}, {times}", flush=True)
            write(case.key.op, entry)
            entries.append(entry)
    return entries


def _wanted(only: str, cases: Cases) -> Iterator[Case]:
    entries = tuning.load().get(device_kind(), {})
    for case in _listed(only, cases):
        op, variant, shape = case.key
        known = [(entry.variant, entry.shape) for entry in entries.get(op, ())]
        is_timed = cases == "missing" and (variant, shape) in known
        if only in f"{op} {variant}" and not is_timed:
            yield case


def _listed(only: str, cases: Cases) -> Iterator[Case]:
    if cases == "grid":
        yield from tune_cases.grid()
        return
    yield from tune_cases.of_experts()
    if not only.startswith("grouped"):  # other cases take seconds to list
        yield from tune_cases.quantizers()
        yield from tune_cases.products()


def _name(case: Case) -> str:
    return f"{case.key.op} {case.key.variant} at {case.key.shape}"


def _compile(cases: list[Case]) -> None:
    """Compile the programs of all cases at once; JAX keeps them."""
    with ThreadPoolExecutor() as pool:
        for case in cases:
            shapes = jax.eval_shape(case.draw)
            for _, function, _ in case.candidates:
                pool.submit(_compiled, function, shapes)


def _compiled(function: Any, arguments: tuple[Any, ...]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = function.lower(*arguments).compile()
    return compiled


def time_case(case: Case) -> Entry:
    """Return the entry of a case: compile, compare with XLA, and time all in turn."""
    arguments = case.draw()
    # Most of a kernel's compilation is ptxas, a process of its own
    with ThreadPoolExecutor() as pool:
        functions = [function for _, function, _ in case.candidates]
        repeated = itertools.repeat(arguments)
        compiled = list(pool.map(_compiled, functions, repeated))
    expected = compiled[0](*arguments)
    if case.check is not None:
        case.check(compiled[0], arguments)
    first = case.candidates[0][0]
    for (backend, _, config), call in zip(case.candidates, compiled, strict=True):
        if call is compiled[0]:
            continue
        if not case.agree(arguments, backend, call(*arguments), expected):
            raise ArithmeticError(
                f"{backend} {config} at {case.key.shape} ({case.key.variant}) differs"
                f" from {first}; it is not timed"
            )
    named: dict[str, Any] = {}
    for i, function in enumerate(functions):
        donates = case.memory == "donates"
        named[str(i)] = (
            donating(function, *arguments) if donates else (function, arguments)
        )
    times = list(Repetitions(rounds=3, calls=4).interleaved(named).values())
    entry = _entry(case, times)
    if first != "xla":
        rule = times[0].median_ms
        best = min(entry.milliseconds.values())
        print(
            f"the rule takes {rule:.4f} ms, {best:.4f} is {rule / best - 1:.1%} faster:"
            f" {entry.configs}",
            flush=True,
        )
    return entry


def _entry(case: Case, times: list[Timing]) -> Entry:
    """Return the best time and config of every backend."""
    milliseconds: dict[str, float] = {}
    configs: dict[str, dict[str, Any]] = {}
    for (backend, _, config), taken in zip(case.candidates, times, strict=True):
        if taken.median_ms < milliseconds.get(backend, math.inf):
            milliseconds[backend] = round(taken.median_ms, 5)
            if config is not None:
                configs[backend] = dataclasses.asdict(config)
    winner = min(milliseconds, key=milliseconds.__getitem__)
    return Entry(case.key.shape, case.key.variant, winner, milliseconds, configs)


def write(op: str, entry: Entry) -> None:
    """Write one entry into `tuned.json`; it replaces one of its shape and variant."""
    content = json.loads(tuning.PATH.read_text(encoding="utf-8"))
    of_device = content.setdefault(device_kind(), {})
    kept = [
        old
        for old in of_device.get(op, [])
        if (tuple(old["shape"]), old["variant"]) != (entry.shape, entry.variant)
    ]
    of_device[op] = [*kept, dataclasses.asdict(entry)]
    tuning.PATH.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    tuning.load.cache_clear()


def main(arguments: list[str] | None = None) -> list[Entry]:
    """Run the command, and return the times."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tune", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument(
        "--only", default="", help="cases whose op and variant contain this text"
    )
    parser.add_argument(
        "--cases",
        choices=get_args(Cases),
        default="all",
        help="those not yet timed, or those that include='measured' reads",
    )
    parser.add_argument(
        "--budget-seconds",
        type=float,
        default=math.inf,
        help="start nothing after this",
    )
    options = parser.parse_args(arguments)
    return run(options.budget_seconds, options.only, options.cases)


if __name__ == "__main__":
    take_memory_as_needed()
    main()
