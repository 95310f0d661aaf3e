"""JSON of benchmarks: machine and versions, settings, and rows; and their tables.

A file lies at `benchmarks/results/<device>/<name>.json`, where `<device>` is a slug of
JAX's name of the chip, as {"benchmark", "header", "config", "rows"}.
"""

import contextlib
import datetime
import fcntl
import functools
import hashlib
import json
import math
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import jax

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
LIBRARIES = ("pallas_kernels", "tcfp_jax")
AGE = "; the library has changed since"
_Row = TypeVar("_Row")


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
    status = ("status", "--porcelain", "--untracked-files=no", "--", *LIBRARIES)
    try:
        commit = _git("rev-parse", "--short", "HEAD").strip()
        changed = _git(*status)
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("+" if changed else "")


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=10,
        check=True,
    ).stdout


def library_digest(root: Path = ROOT) -> str:
    """Return first digits of a sha256 over the libraries' code and `tuned.json`."""
    digest = hashlib.sha256()
    paths: list[Path] = []
    for name in LIBRARIES:
        paths += (root / name).rglob("*")
    for path in sorted(paths):
        if path.suffix == ".py" or path.name == "tuned.json":
            name = path.relative_to(root).as_posix()
            digest.update(name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


@functools.cache
def origin_of_row() -> dict[str, str]:
    """Return library and device of a row, which may stand next to other runs' rows."""
    return {"library": library_digest(), "device": jax.devices()[0].device_kind}


# Reading
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
    def card(self) -> str:
        """The short name of the card.

        >>> Result("", {"device": "NVIDIA H100 80GB HBM3"}, {}, [], "").card
        'H100'
        """
        return self.header["device"].removeprefix("NVIDIA ").split()[0]

    @property
    def origin(self) -> str:
        """Machine and commit of the numbers, and a remark if the library has changed.

        The header is of the last run; rows that `--resume` kept may be of other
        libraries and devices.
        """
        header = self.header
        devices = dict.fromkeys(
            row.get("device") or header["device"] for row in self.rows
        )
        found = (row.get("library") for row in self.rows)
        libraries = list(dict.fromkeys(filter(None, found))) or [header["library"]]
        commit = f"commit {header['commit'] or 'unknown'}"
        if len(libraries) > 1:
            commit = f"last {commit}"
            source = f"rows of libraries {', '.join(libraries)}"
        else:
            source = f"library {header['library']}"
        parts = [" and ".join(devices or [header["device"]]), f"jax {header['jax']}"]
        if header.get("xla_flags"):
            parts.append(f"`XLA_FLAGS={header['xla_flags']}`")
        age = "" if libraries == [library_digest()] else AGE
        return ", ".join([*parts, commit, source, header["date"]]) + age

    def distinct(self, *fields: str) -> list[Any]:
        """Return the values of one or several fields, in the order of the rows."""
        return list(self.by(*fields))

    def by(self, *fields: str) -> dict[Any, dict[str, Any]]:
        """Return the rows by the values of one or several fields."""
        if len(fields) == 1:
            return {row[fields[0]]: row for row in self.rows}
        return {tuple(row[field] for field in fields): row for row in self.rows}


def read_result(name: str, results: Path = RESULTS) -> Result | None:
    """Return the JSON of a benchmark, from an accelerator if there is one."""
    paths = sorted(
        results.glob(f"*/{name}.json"),
        key=lambda path: (path.parent.name == "cpu", path.parent.name),
    )
    if not paths:
        return None
    data = paths[0].read_bytes()
    content = json.loads(data)
    digest = hashlib.sha256(data).hexdigest()[:16]
    return Result(name, content["header"], content["config"], content["rows"], digest)


def rows_to_resume(
    path: str | None, settings: dict[str, object]
) -> list[dict[str, Any]]:
    """Return the rows of an earlier run with the same settings, each with its device.

    There are none without a path or a file.

    Raises:
      ValueError: the file is of other settings; the message names the differences.
    """
    if path is None or not Path(path).exists():
        return []
    content = json.loads(Path(path).read_text(encoding="utf-8"))
    found = _leaves({name: content["config"].get(name) for name in settings})
    wanted = _leaves(_finite(settings))
    differences = [
        f"{name}={found.get(name)!r} in the file but {wanted.get(name)!r} now"
        for name in {**wanted, **found}
        if found.get(name) != wanted.get(name)
    ]
    if differences:
        raise ValueError(
            f"{path} has rows of other settings: {', '.join(differences)}; ask for the"
            " same, choose another --out, or drop --resume, which overwrites its"
            f" {len(content['rows'])} rows"
        )
    device = content["header"]["device"]
    return [{**row, "device": row.get("device") or device} for row in content["rows"]]


def _leaves(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the leaves of nested dicts under names such as "size.layers"."""
    leaves = jax.tree_util.tree_leaves_with_path(
        settings, is_leaf=lambda node: not isinstance(node, dict)
    )
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in leaves
    }


def rows_of(kind: type[_Row], rows: Iterable[Mapping[str, Any]]) -> list[_Row]:
    """Return rows of JSON as dataclasses, without fields that these lack."""
    names = vars(kind)["__dataclass_fields__"]
    found = []
    for row in rows:
        known = {}
        for name in names:
            value = row[name]
            known[name] = tuple(value) if isinstance(value, list) else value
        found.append(kind(**known))
    return found


# Writing
# --------------------------------------------------------------------------------------


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Hold the folder of a file, so that processes write it one after another."""
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


def write_result(
    path: Path, name: str, header: Header, config: Any, rows: Sequence[Any]
) -> None:
    """Write dataclasses as JSON in one step. Infinities and NaN become null."""
    content = {
        "benchmark": name,
        "header": asdict(header),
        "config": asdict(config),
        "rows": [asdict(row) for row in rows],
    }
    partial = path.with_name(path.name + ".partial")
    text = json.dumps(_finite(content), indent=1, allow_nan=False) + "\n"
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def _finite(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _finite(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_finite(value) for value in tree]
    if isinstance(tree, float) and not math.isfinite(tree):
        return None
    return tree


# Markdown
# --------------------------------------------------------------------------------------


def markdown_table(
    titles: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    last: Literal["left", "right"] = "right",
) -> str:
    """Return a Markdown table with a left-aligned first column.

    `last="left"` is for a last column of text.

    >>> print(markdown_table(["a", "b"], [["1", "2"]]))
    | a | b |
    |---|--:|
    | 1 | 2 |
    """
    lines = ["| " + " | ".join(line) + " |" for line in (titles, *rows)]
    end = {"left": "---|", "right": "--:|"}[last]
    rule = "|---|" + "--:|" * (len(titles) - 2) + end * (len(titles) > 1)
    return "\n".join([lines[0], rule, *lines[1:]])


def shown(row: Mapping[str, Any] | None, form: str) -> str:
    """Return a field of a row by a format, or a dash if there is none.

    A field that ends with "_bytes" can be shown in gigabytes, too.

    >>> shown({"ms": 1.25}, "**{ms:.1f}**"), shown({"ms": None}, "{ms:.1f}")
    ('**1.2**', '–')
    """
    try:
        return form.format_map(_with_gigabytes(row or {}))
    except (KeyError, TypeError):  # None has no format such as ".1f"
        return "–"


def cells(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """Return a Markdown table of rows: formats of their cells by the column's title.

    >>> print(cells([{"arena_bytes": 3e9}], {"arena, GB": "{arena_gigabytes:.1f}"}))
    | arena, GB |
    |---|
    | 3.0 |
    """
    lines = []
    for row in rows:
        lines.append([shown(row, form) for form in columns.values()])
    return markdown_table(list(columns), lines)


def _with_gigabytes(row: Mapping[str, Any]) -> dict[str, Any]:
    more = dict(row)
    for name, value in row.items():
        if name.endswith("_bytes") and value is not None:
            more[name.removesuffix("bytes") + "gigabytes"] = value / 1e9
    return more


def times(shape: str) -> str:
    """Return a shape for readers.

    >>> times("8x16x32")
    '8 × 16 × 32'
    """
    return shape.replace("x", " × ")
