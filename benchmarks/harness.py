"""The harness of all benchmarks: the command line, and JSON after every row.

A benchmark is a module with a `BENCHMARK`, and `python -m benchmarks.NAME` runs it and
prints the table of its page. Each row is verified before it is timed. A smoke run never
writes among committed numbers.
"""

import argparse
import importlib
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.records import (
    RESULTS,
    Header,
    Result,
    alone,
    device_slug,
    make_header,
    write_result,
)
from benchmarks.timing import compile_quickly, take_memory_as_needed
from models.training.progress import shown

NO_FP8 = (
    "\na CPU has no FP8 units and multiplies in float32: ratios here mean nothing."
    " --smoke shows that it runs"
)


@dataclass(frozen=True)
class Benchmark:
    """One benchmark: its command line, its measurements and its table.

    Attributes:
      name: Name of the module, and of its JSON.
      description: Docstring of the module; its first paragraph is the command's help.
      config: Returns the settings of a command line, a frozen dataclass; raises
        `ValueError` for a request that cannot be met.
      rows: Measures with these settings, and yields frozen dataclasses.
      table: Returns the Markdown of a JSON file.
      options: Adds own options to the command line.
      smoke: Options of a smoke run that the command line does not name.
      file: Returns the name of the JSON, if options choose one.
      joined: Returns the rows to write, if other processes add some to the file.
    """

    name: str
    description: str | None
    config: Callable[[argparse.Namespace], Any]
    rows: Callable[[Any], Iterable[Any]]
    table: Callable[[Result], str]
    options: Callable[[argparse.ArgumentParser], None] | None = None
    smoke: Mapping[str, str] = field(default_factory=dict)
    file: Callable[[argparse.Namespace], str] | None = None
    joined: Callable[[Any, list[Any]], list[Any]] | None = None

    def parse(self, arguments: list[str] | None) -> argparse.Namespace:
        """Return the options of a command line."""
        parser = argparse.ArgumentParser(
            prog=f"python -m benchmarks.{self.name}",
            description=(self.description or "").split("\n\n")[0],
        )
        written = f"write benchmarks/results/<device>/{self.name}.json"
        parser.add_argument("--json", action="store_true", help=written)
        parser.add_argument(
            "--smoke",
            action="store_true",
            help="ten seconds of tiny sizes, whose numbers mean nothing",
        )
        parser.add_argument(
            "--out",
            type=Path,
            default=None,
            help="folder instead of benchmarks/results; implies --json",
        )
        if self.options is not None:
            self.options(parser)
        options = parser.parse_args(arguments)
        if options.smoke:
            for name, value in self.smoke.items():
                setattr(options, name, getattr(options, name) or value)
        return options

    def configured(self, options: argparse.Namespace) -> tuple[Any, Path | None]:
        """Return the settings of a command line, and the path of its JSON."""
        name = self.name if self.file is None else self.file(options)
        path = result_path(name, options)
        if getattr(options, "resume", False):
            options.resume = str(path)
        return self.config(options), path

    def run(self, arguments: list[str] | None = None) -> list[Any]:
        """Run a command line, and return its rows; JSON is written after every row."""
        options = self.parse(arguments)
        return self._measured(*self.configured(options))

    def command(self) -> None:
        """Run the process's command line.

        A request that cannot be met prints one line and exits with status 2.
        """
        take_memory_as_needed()
        if "--smoke" in sys.argv:
            compile_quickly()
        options = self.parse(None)
        try:
            config, path = self.configured(options)
        except (ValueError, FileNotFoundError) as error:
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(2) from error
        self._measured(config, path)

    def _measured(self, config: Any, path: Path | None) -> list[Any]:
        header = make_header()
        print(_title(self.name, header), flush=True)
        print(f"{self.name}: {asdict(config)}", flush=True)
        rows: list[Any] = []
        # The first row may take most of the time.
        with shown(lambda: f"{len(rows)} rows"):
            for row in self.rows(config):
                rows.append(row)
                if path is not None:
                    self._write(path, header, config, rows)
        if rows:
            made = [asdict(row) for row in rows]
            result = Result(self.name, asdict(header), asdict(config), made, "")
            print(self.table(result))
        if path is not None:
            print(f"written: {path}")
        return rows

    def _write(self, path: Path, header: Header, config: Any, rows: list[Any]) -> None:
        with alone(path):
            written = rows if self.joined is None else self.joined(config, rows)
            write_result(path, self.name, header, config, written)


def benchmark(name: str) -> Benchmark:
    """Return the benchmark of a JSON's name, such as "large-1b"."""
    found = importlib.import_module(f"benchmarks.{name.partition('-')[0]}").BENCHMARK
    assert isinstance(found, Benchmark)
    return found


def _title(name: str, header: Header) -> str:
    warning = NO_FP8 if header.platform == "cpu" else ""
    return (
        f"benchmarks.{name} on {header.device}, jax {header.jax}, Python"
        f" {header.python}, commit {header.commit or 'unknown'}, library"
        f" {header.library}, {header.date}{warning}"
    )


def result_path(name: str, options: argparse.Namespace) -> Path | None:
    """Return the path of a run's rows.

    It is None without --json. A smoke run writes to --out, or to a temporary folder.

    Raises:
      ValueError: a smoke run would overwrite committed numbers, or no file can be
        resumed.
    """
    kept = options.out is not None or (options.json and not options.smoke)
    if getattr(options, "resume", False) and not kept:
        needed = "--out" if options.smoke else "--json or --out"
        raise ValueError(f"--resume continues a JSON file, so it needs {needed}")
    if options.smoke and options.out is None:
        options.out = Path(tempfile.mkdtemp(prefix="benchmark-smoke-"))
    if options.smoke and options.out.resolve() == RESULTS:
        raise ValueError(
            f"--smoke with --out {options.out} would overwrite committed numbers;"
            " choose another folder"
        )
    if options.out is None and not options.json:
        return None
    return (options.out or RESULTS) / device_slug() / f"{name}.json"


# Options, and their values
# --------------------------------------------------------------------------------------


def add_resume(parser: argparse.ArgumentParser) -> None:
    """Add `--resume`; the settings hold the path of the JSON then."""
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep the rows of the JSON file and do those it lacks",
    )


def positive(text: str) -> int:
    """Return the value of an option that counts; use it as the type of an argument.

    >>> positive("3")
    3

    Raises:
      ArgumentTypeError: the text is not an integer of at least 1.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"{text} is not an integer of at least 1; give one"
        )
    return int(text)


def chosen_of(option: str, text: str | None, allowed: Sequence[Any]) -> tuple[Any, ...]:
    """Return the names in "NAME,NAME", or all allowed names without a text.

    >>> chosen_of("parts", "layer, dgrad", ["dgrad", "layer"])
    ('layer', 'dgrad')

    Raises:
      ValueError: a name is not allowed.
    """
    names = tuple(map(str.strip, text.split(","))) if text else tuple(allowed)
    unknown = [name for name in names if name not in allowed]
    if unknown:
        raise ValueError(
            f"--{option} has {unknown}, which are unknown; use names of {list(allowed)}"
        )
    return names
