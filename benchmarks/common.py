"""What every benchmark shares: options, a header that says where numbers come from, timers, and JSON on disk.

    benchmarks/results/<device>/<name>.json      {"benchmark", "header", "config", "rows"}

`<device>` is a slug of JAX's name for the chip. A smoke run never writes there.
"""

import argparse
import dataclasses
import datetime
import functools
import hashlib
import json
import math
import platform
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SOURCES = ("pallas_kernels", "tcfp_jax", "models", "benchmarks")

Timer = Literal["CUPTI kernel time", "wall clock"]


@dataclass(frozen=True)
class Header:
    """Where and with what numbers were measured.

    Attributes:
      device: JAX's name of the chip.
      platform: "cpu" or "gpu".
      jax, python: versions.
      commit: of the repository, "+" if files differ from it; None outside a repository.
      sources: first digits of a sha256 over the Python files of the project, which needs no repository.
      date: day of the run, UTC.
    """

    device: str
    platform: str
    jax: str
    python: str
    commit: str | None
    sources: str
    date: str


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call: median and extremes over samples, and what measured them."""

    median_ms: float
    min_ms: float
    max_ms: float
    samples: int
    timer: Timer


# Options, header and files --------------------------------------------------------------------------------------------


def make_parser(name: str, description: str) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has: --json, --smoke and --out."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description.split("\n\n")[0])
    parser.add_argument("--json", action="store_true", help=f"write benchmarks/results/<device>/{name}.json")
    parser.add_argument(
        "--smoke", action="store_true", help="tiny sizes, to see that it works; its numbers mean nothing"
    )
    parser.add_argument("--out", type=Path, default=None, help="folder instead of benchmarks/results; implies --json")
    return parser


def device_slug() -> str:
    """JAX's name of the default device as a folder name.

    >>> re.fullmatch("[a-z0-9-]+", device_slug()) is not None
    True
    """
    return re.sub(r"[^a-z0-9]+", "-", jax.devices()[0].device_kind.lower()).strip("-")


def result_path(name: str, options: argparse.Namespace) -> Path | None:
    """Where the rows of a run go: None without --json; for a smoke run --out or a temporary folder.

    Raises:
      ValueError: a smoke run would overwrite committed numbers.
    """
    if options.out is not None:
        if options.smoke and options.out.resolve() == RESULTS:
            raise ValueError(
                f"--smoke with --out {options.out} would overwrite committed numbers; choose another folder"
            )
        folder = options.out
    elif options.smoke:
        folder = Path(tempfile.mkdtemp(prefix="benchmark-smoke-"))
    elif options.json:
        folder = RESULTS
    else:
        return None
    return folder / device_slug() / f"{name}.json"


def make_header() -> Header:
    """The header of this process."""
    device = jax.devices()[0]
    return Header(
        device=device.device_kind, platform=device.platform, jax=jax.__version__, python=platform.python_version(),
        commit=_commit(), sources=_source_digest(), date=datetime.datetime.now(datetime.UTC).date().isoformat(),
    )  # fmt: skip


def print_header(name: str, header: Header) -> None:
    """One line on standard output."""
    print(
        f"benchmarks.{name} on {header.device}, jax {header.jax}, Python {header.python}, "
        f"commit {header.commit or 'unknown'}, sources {header.sources}, {header.date}",
        flush=True,
    )


def write_result(path: Path | None, name: str, header: Header, config: Any, rows: Sequence[Any]) -> None:
    """Write dataclasses as JSON, in one step; nothing where `path` is None. Infinities and NaN become null."""
    if path is None:
        return
    content = {
        "benchmark": name,
        "header": dataclasses.asdict(header),
        "config": dataclasses.asdict(config),
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(_finite(content), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    partial.replace(path)


def announce(path: Path | None) -> None:
    """Say where the rows are."""
    if path is not None:
        print(f"written: {path}")


def print_table(titles: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Columns, the first one left-aligned."""
    cells = [list(titles)] + [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(titles))]
    for row in cells:
        print("  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))))


def _finite(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _finite(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_finite(value) for value in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree


def _commit() -> str | None:
    try:
        ask = functools.partial(subprocess.run, cwd=ROOT, capture_output=True, text=True, timeout=10, check=True)
        commit = ask(["git", "rev-parse", "--short", "HEAD"]).stdout.strip()
        changed = ask(["git", "status", "--porcelain", "--untracked-files=no", "--", *SOURCES]).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("+" if changed else "")


def _source_digest() -> str:
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


# Time -----------------------------------------------------------------------------------------------------------------


def time_jitted(function: Callable[..., Any], *args: Any, rounds: int = 5, calls: int = 5) -> Timing:
    """Time one call of a jitted function; see `time_interleaved`."""
    return time_interleaved({"": (function, args)}, rounds=rounds, calls=calls)[""]


def time_interleaved(
    candidates: Mapping[str, tuple[Callable[..., Any], tuple[Any, ...]]], *, rounds: int = 5, calls: int = 5
) -> dict[str, Timing]:
    """Time candidates in turn, so that a chip that warms up or slows down does so for all of them.

    Each is warmed up first. On a GPU, CUPTI gives the sum of the kernels' own times for every call; where it does not
    work, the wall clock around the calls of a round gives their mean. All candidates of one call of this function are
    measured by the same timer, which `Timing.timer` states.

    Args:
      candidates: name to (jitted function, arguments).
      rounds: how often every candidate has its turn.
      calls: in one turn, queued one after the other.
    """
    for function, args in candidates.values():
        jax.block_until_ready(function(*args))
    timer: Timer = "wall clock"
    samples = _sample(candidates, _kernel_times, rounds, calls) if jax.default_backend() == "gpu" else None
    if samples is not None:
        timer = "CUPTI kernel time"
    else:
        samples = _sample(candidates, _wall_times, rounds, calls)
        assert samples is not None  # the wall clock always works
    return {
        name: Timing(statistics.median(values), min(values), max(values), len(values), timer)
        for name, values in samples.items()
    }


def time_on_host(
    candidates: Mapping[str, tuple[Callable[..., Any], tuple[Any, ...]]], *, rounds: int = 5, calls: int = 1
) -> dict[str, Timing]:
    """Time candidates that run on the CPU in turn, by the wall clock, whatever JAX's default device; each warmed up.

    They need not be JAX's: a function that returns something else is done when it returns.
    """
    for function, args in candidates.values():
        jax.block_until_ready(function(*args))
    samples = _sample(candidates, _wall_times, rounds, calls)
    assert samples is not None  # the wall clock always works
    return {
        name: Timing(statistics.median(values), min(values), max(values), len(values), "wall clock")
        for name, values in samples.items()
    }


class Threaded:
    """A step `(state, *inputs) -> (state, result)` with its state, which it donates: a call is the next step.

    `trace` and `lower` make it a `jax.stages.Wrapped`: CUPTI's profiler would jit anything else, and lose the state.
    """

    def __init__(self, jitted: Any, compiled: Any, state: Any, *inputs: jax.Array) -> None:
        self.compiled, self.state, self.inputs = compiled, state, inputs
        self.trace, self.lower = jitted.trace, jitted.lower

    def __call__(self) -> Any:
        """Run a step; its result."""
        self.state, result = self.compiled(self.state, *self.inputs)
        return result


def threaded(step: Callable[..., tuple[Any, Any]], state: Any, *inputs: jax.Array) -> Threaded:
    """`step`, jitted and compiled, with a copy of `state` that it may donate."""
    jitted = jax.jit(step, donate_argnums=0)
    return Threaded(jitted, jitted.lower(state, *inputs).compile(), jax.tree.map(jnp.copy, state), *inputs)


def _sample(
    candidates: Mapping[str, tuple[Callable[..., Any], tuple[Any, ...]]],
    measure: Callable[[Callable[..., Any], tuple[Any, ...], int], list[float] | None],
    rounds: int,
    calls: int,
) -> dict[str, list[float]] | None:
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, (function, args) in candidates.items():
            times = measure(function, args, calls)
            if times is None:
                return None
            samples[name] += times
    return samples


def _kernel_times(function: Callable[..., Any], args: tuple[Any, ...], calls: int) -> list[float] | None:
    """CUPTI's kernel milliseconds of each call, or None where this jax or machine has no CUPTI."""
    try:
        from jax.experimental.mosaic.gpu import profiler
    except ImportError:
        return None
    try:
        _, times = profiler.measure(function, aggregate=True, iterations=max(2, calls))(*args)
    except RuntimeError as error:
        print(f"CUPTI gives no times ({error}); using the wall clock", flush=True)
        return None
    return None if times is None else [float(t) for t in times]


def _wall_times(function: Callable[..., Any], args: tuple[Any, ...], calls: int) -> list[float]:
    started = time.perf_counter()
    # Calls are queued in order, so the last result is ready when all are.
    for _ in range(calls):
        out = function(*args)
    jax.block_until_ready(out)
    return [(time.perf_counter() - started) * 1e3 / calls]


# Numbers --------------------------------------------------------------------------------------------------------------


def compare(reference: Any, value: Any) -> tuple[float, float]:
    """(signal-to-noise ratio in dB, mean squared error) of a value, on the host in float64.

    `SNR = 10 log10(sum x^2 / sum (x - y)^2)`; inf where the two are equal.

    >>> snr_db, mean_squared_error = compare(np.array([3.0, 4.0]), np.array([3.0, 4.5]))
    >>> round(snr_db, 3), mean_squared_error
    (20.0, 0.125)
    """
    wide = np.asarray(reference).astype(np.float64).reshape(-1)
    difference = np.asarray(value).astype(np.float64).reshape(-1) - wide
    noise, signal = float(np.vdot(difference, difference)), float(np.vdot(wide, wide))
    return math.inf if noise == 0 else 10 * math.log10(signal / noise), noise / wide.size


def default_dtype() -> Any:
    """bfloat16 on accelerators, float32 on CPUs."""
    return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
