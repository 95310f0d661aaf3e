"""The harness of all benchmarks: command, header with the origin of numbers, JSON on
disk, and tables.

A benchmark is a module of this package with

    NAME                       name of the module and of its JSON
    Config, Row                frozen dataclasses: settings of a run, and one result
    add_options(parser)        adds its own options of the command line, if it has any
    configure(options)         returns the Config of a command line
    measure(config)            returns rows, each verified before it is timed
    show(rows)                 prints them, if all their fields as columns do not serve
    table(result)              returns the Markdown of docs/measurements.md, from the JSON
    json_name(options)         returns the name of its JSON, if options choose one
    joined(config, rows)       returns the rows to write, if other processes may have added some to the file
    SMOKE_OPTIONS              options of a smoke run that the command line does not name

and `main` runs it. JSON lies at `benchmarks/results/<device>/<name>.json`, where
`<device>` is a slug of JAX's name of the chip, as {"benchmark", "header", "config",
"rows"}. A smoke run never writes there.
"""

import argparse
import contextlib
import datetime
import fcntl
import functools
import hashlib
import importlib
import json
import math
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from benchmarks.options import chosen_of as chosen_of
from benchmarks.options import counted
from benchmarks.options import positive as positive
from benchmarks.origins import release_of
from benchmarks.timing import compile_quickly, take_memory_as_needed

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
LIBRARIES = ("pallas_kernels", "tcfp_jax")
NO_FP8 = (
    "\na CPU has no FP8 units and multiplies in float32: ratios here mean nothing."
    " --smoke shows that it runs"
)
AGE = "; the library has changed since"


@dataclass(frozen=True)
class Header:
    """Machine and versions of a measurement.

    Attributes:
      device: JAX's name of the chip.
      platform: "cpu" or "gpu".
      jax, python: Versions.
      commit: Commit of the repository, with "+" if the libraries differ from it; None
        outside a repository.
      library: First digits of a sha256 over the libraries' Python files and
        `tuned.json`.
      date: Day of the run, UTC.
      xla_flags: XLA_FLAGS of the run; "" is XLA's defaults. Older files lack it.
    """

    device: str
    platform: str
    jax: str
    python: str
    commit: str | None
    library: str
    date: str
    xla_flags: str


def make_header() -> Header:
    """Return the header of this process."""
    device = jax.devices()[0]
    return Header(
        device=device.device_kind,
        platform=device.platform,
        jax=jax.__version__,
        python=platform.python_version(),
        commit=_commit(),
        library=library_digest(),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        xla_flags=os.environ.get("XLA_FLAGS", "").strip(),
    )


def _commit() -> str | None:
    try:
        ask = functools.partial(
            subprocess.run,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
        commit = ask(["git", "rev-parse", "--short", "HEAD"]).stdout.strip()
        changed = ask(
            ["git", "status", "--porcelain", "--untracked-files=no", "--", *LIBRARIES]
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("+" if changed else "")


def library_digest(root: Path = ROOT) -> str:
    """Return first digits of a sha256 over the libraries' Python files and
    `tuned.json`.
    """
    digest = hashlib.sha256()
    for path in sorted(path for name in LIBRARIES for path in (root / name).rglob("*")):
        if path.suffix == ".py" or path.name == "tuned.json":
            digest.update(
                path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes()
            )
    return digest.hexdigest()[:12]


@functools.cache
def origin_of_row() -> dict[str, Any]:
    """Return the library and the device of a row, which may stand next to rows of other
    runs.
    """
    return {"library": library_digest(), "device": jax.devices()[0].device_kind}


# The command
# --------------------------------------------------------------------------------------

Refusals = Callable[[], contextlib.AbstractContextManager[object]]


def main(
    name: str,
    arguments: list[str] | None = None,
    refusals: Refusals = contextlib.nullcontext,
) -> list[Any]:
    """Run `python -m benchmarks.<name>` and return its rows; JSON is written after
    every row.

    If a module has `beside(options)`, the benchmarks that it returns run in turn with
    the same options. `check_options` and `configure` run within the context of
    `refusals`.
    """
    benchmark = importlib.import_module(f"benchmarks.{name}")
    options = parse(benchmark, arguments)
    if hasattr(benchmark, "check_options"):
        with refusals():
            benchmark.check_options(options)
    header = make_header()
    place = (
        f"{header.device}, jax {header.jax}, Python {header.python}, commit"
        f" {header.commit or 'unknown'}, library "
    )
    warning = NO_FP8 if header.platform == "cpu" else ""
    print(
        f"benchmarks.{name} on {place}{header.library}, {header.date}{warning}",
        flush=True,
    )
    rows: list[Any] = []
    for chosen in (
        benchmark.beside(options) if hasattr(benchmark, "beside") else (name,)
    ):
        module = importlib.import_module(f"benchmarks.{chosen}")
        with counted() as count:
            with refusals():
                options.path = result_path(
                    getattr(module, "json_name", lambda _: chosen)(options), options
                )
                config = module.configure(options)
            rows += (found := _run(module, header, config, options.path, count))
        getattr(module, "show", print_rows)(found)
        if options.path is not None:
            print(f"written: {options.path}")
    return rows


def parse(benchmark: Any, arguments: list[str] | None) -> argparse.Namespace:
    """Return the options of a benchmark's command line."""
    name, description = benchmark.NAME, benchmark.__doc__.split("\n\n")[0]
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}", description=description
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help=f"write benchmarks/results/<device>/{name}.json",
    )
    parser.add_argument(
        "--smoke",
        action="store_true",
        help=(
            "tiny sizes, few steps and one seed, in about ten seconds: its numbers mean"
            " nothing"
        ),
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=None,
        help="folder instead of benchmarks/results; implies --json",
    )
    if hasattr(benchmark, "add_options"):
        benchmark.add_options(parser)
    options = parser.parse_args(arguments)
    if options.smoke:
        for name, value in getattr(benchmark, "SMOKE_OPTIONS", {}).items():
            setattr(options, name, getattr(options, name) or value)
    return options


def _run(
    benchmark: Any,
    header: Header,
    config: Any,
    path: Path | None,
    count: Callable[[int], None],
) -> list[Any]:
    rows: list[Any] = []
    print(f"{benchmark.NAME}: {asdict(config)}", flush=True)
    for row in benchmark.measure(config):
        rows.append(row)
        with contextlib.nullcontext() if path is None else _alone(path):
            joined = (
                benchmark.joined(config, rows) if hasattr(benchmark, "joined") else rows
            )
            write_result(path, benchmark.NAME, header, config, joined)
        count(len(rows))
    return rows


def command(name: str) -> None:
    """Run a benchmark as a program; a request that cannot be met prints one line and
    exits with status 2.
    """
    take_memory_as_needed()
    if "--smoke" in sys.argv:
        compile_quickly()
    main(name, refusals=_in_one_line)


@contextlib.contextmanager
def _in_one_line() -> Iterator[None]:
    try:
        yield
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error


# Results
# --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """One JSON file and its digest."""

    name: str
    header: dict[str, Any]
    config: dict[str, Any]
    rows: list[dict[str, Any]]
    digest: str

    @property
    def origin(self) -> str:
        """Machine and commit of the numbers, with a remark if the library has changed
        since.
        """
        h = self.header
        commit = f"commit {h['commit']}" if h["commit"] else "commit unknown"
        # The header is of the last run; rows that `--resume` kept may be of other
        # libraries and devices.
        devices = [
            *dict.fromkeys(row.get("device") or h["device"] for row in self.rows)
        ] or [h["device"]]
        libraries = [
            *dict.fromkeys(row["library"] for row in self.rows if row.get("library"))
        ] or [h.get("library")]
        # Older files have a digest of all sources, benchmarks included.
        source = (
            f"library {h['library']}" if "library" in h else f"sources {h['sources']}"
        )
        if len(libraries) > 1:
            commit, source = (
                f"last {commit}",
                f"rows of libraries {', '.join(libraries)}",
            )
        age = "" if libraries == [library_digest()] else AGE
        flags = h.get("xla_flags")
        where = f"{' and '.join(devices)}, jax {h['jax']}" + (
            f", `XLA_FLAGS={flags}`" if flags else ""
        )
        return f"{where}, {commit}, {source}, {h['date']}, {release_of(h['date'])}{age}"

    def distinct(self, *fields: str) -> list[Any]:
        """Return the values of one or several fields, in the order of the rows."""
        one = len(fields) == 1
        return list(
            dict.fromkeys(
                row[fields[0]] if one else tuple(row[f] for f in fields)
                for row in self.rows
            )
        )

    def by(self, *fields: str) -> dict[Any, dict[str, Any]]:
        """Return the rows by the values of one or several fields."""
        return {
            row[fields[0]] if len(fields) == 1 else tuple(row[f] for f in fields): row
            for row in self.rows
        }


def read_result(name: str, results: Path = RESULTS) -> Result | None:
    """Return the JSON of a benchmark, from an accelerator if there is one."""
    paths = sorted(
        results.glob(f"*/{name}.json"),
        key=lambda path: (path.parent.name == "cpu", path.parent.name),
    )
    if not paths:
        return None
    data = paths[0].read_bytes()
    content, digest = json.loads(data), hashlib.sha256(data).hexdigest()[:16]
    return Result(name, content["header"], content["config"], content["rows"], digest)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold the folder of a file, so that processes that add rows to it write one after
    another.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def device_slug() -> str:
    """Return JAX's name of the default device as a folder name.

    >>> re.fullmatch("[a-z0-9-]+", device_slug()) is not None
    True
    """
    return re.sub(r"[^a-z0-9]+", "-", jax.devices()[0].device_kind.lower()).strip("-")


def result_path(name: str, options: argparse.Namespace) -> Path | None:
    """Return the path of a run's rows: None without --json; for a smoke run --out or a
    temporary folder.

    Raises:
      ValueError: a smoke run would overwrite committed numbers, or no file can be
        resumed.
    """
    if (
        getattr(options, "resume", False)
        and options.out is None
        and (options.smoke or not options.json)
    ):
        needed = "--out" if options.smoke else "--json or --out"
        raise ValueError(f"--resume continues a JSON file, so it needs {needed}")
    if options.smoke and options.out is not None and options.out.resolve() == RESULTS:
        raise ValueError(
            f"--smoke with --out {options.out} would overwrite committed numbers;"
            " choose another folder"
        )
    if options.smoke and options.out is None:
        options.out = Path(tempfile.mkdtemp(prefix="benchmark-smoke-"))
    if options.out is None and not options.json:
        return None
    return (options.out or RESULTS) / device_slug() / f"{name}.json"


def write_result(
    path: Path | None, name: str, header: Header, config: Any, rows: Sequence[Any]
) -> None:
    """Write dataclasses as JSON in one step, unless `path` is None. Infinities and NaN
    become null.
    """
    if path is None:
        return
    content = {
        "benchmark": name,
        "header": asdict(header),
        "config": asdict(config),
        "rows": [*map(asdict, rows)],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(
        json.dumps(_finite(content), indent=1, allow_nan=False) + "\n", encoding="utf-8"
    )
    partial.replace(path)


def rows_to_resume(path: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of an earlier run with the same settings, each with its device;
    none without a file.

    Raises:
      ValueError: the file is of other settings; the message names the differences.
    """
    if not path.exists():
        return []
    content = json.loads(path.read_text(encoding="utf-8"))
    found = _leaves({name: content["config"].get(name) for name in settings})
    wanted = _leaves(settings)
    differences = ", ".join(
        f"{name}={found.get(name)!r} in the file but {wanted.get(name)!r} now"
        for name in {**wanted, **found}
        if found.get(name) != wanted.get(name)
    )
    if differences:
        raise ValueError(
            f"{path} has rows of other settings: {differences}; ask for the same,"
            " choose another --out, or drop --resume, which overwrites its"
            f" {len(content['rows'])} rows"
        )
    return [
        {**row, "device": row.get("device") or content["header"]["device"]}
        for row in content["rows"]
    ]


def _leaves(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the leaves of nested dicts under names such as "size.layers"."""
    leaves = jax.tree_util.tree_leaves_with_path(
        settings, is_leaf=lambda node: not isinstance(node, dict)
    )
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in leaves
    }


def _finite(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _finite(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_finite(value) for value in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree


# Tables
# --------------------------------------------------------------------------------------


def print_rows(rows: Sequence[Any], *columns: str) -> None:
    """Print fields of dataclasses as columns, without a choice all that have a value;
    floats have four digits.
    """
    if not columns and rows:
        # before the fields of a timing, which it inherits
        own = type(rows[0]).__annotations__
        plain = lambda value: (
            value is not None and not isinstance(value, list | tuple | dict)
        )
        names = sorted(
            (field.name for field in fields(rows[0])), key=lambda name: name not in own
        )
        columns = tuple(
            name for name in names if any(plain(getattr(row, name)) for row in rows)
        )
    cells: Iterator[list[str]] = (
        [_cell(getattr(row, column)) for column in columns] for row in rows
    )
    print_table(columns, list(cells))


def _cell(value: Any) -> str:
    return (
        "-"
        if value is None
        else f"{value:.4g}"
        if isinstance(value, float)
        else str(value)
    )


def print_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns, the first one left-aligned."""
    cells = [titles, *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(titles))]
    for row in cells:
        print(
            "  ".join(
                c.rjust(w) if i else c.ljust(w)
                for i, (c, w) in enumerate(zip(row, widths, strict=True))
            )
        )


def markdown_table(
    titles: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    last: Literal["left", "right"] = "right",
) -> str:
    """Return a Markdown table with a left-aligned first column; `last="left"` is for a
    last column of text.

    >>> print(markdown_table(["a", "b"], [["1", "2"]]))
    | a | b |
    |---|--:|
    | 1 | 2 |
    """
    text = ["| " + " | ".join(line) + " |" for line in (titles, *rows)]
    rule = (
        "|---|" + "--:|" * (len(titles) - 2) + {"left": "---|", "right": "--:|"}[last]
    )
    return "\n".join([text[0], rule, *text[1:]])


def times(shape: str) -> str:
    """Return a shape for readers.

    >>> times("8x16x32")
    '8 × 16 × 32'
    """
    return shape.replace("x", " × ")


# Numbers
# --------------------------------------------------------------------------------------


def compare(reference: Any, value: Any) -> tuple[float, float]:
    """Return (signal-to-noise ratio in dB, mean squared error) of a value, computed on
    the host in float64.

    `SNR = 10 log10(sum x^2 / sum (x - y)^2)`; inf if the two are equal.

    >>> snr_db, mean_squared_error = compare(np.array([3.0, 4.0]), np.array([3.0, 4.5]))
    >>> round(snr_db, 3), mean_squared_error
    (20.0, 0.125)
    """
    wide = np.asarray(reference).astype(np.float64).reshape(-1)
    difference = np.asarray(value).astype(np.float64).reshape(-1) - wide
    noise, signal = float(np.vdot(difference, difference)), float(np.vdot(wide, wide))
    return (
        math.inf if noise == 0 else 10 * math.log10(signal / noise)
    ), noise / wide.size
