"""Real text that every machine has, as bytes: the source files of Python's standard
library and of packages.

The split is by file, because windows of one file resemble each other: a held-out loss
on windows of training files would measure memory. A hash of the relative path alone
decides the part of a file. So adding or removing a file moves no other file, and the
two parts never share one.

    part(path) = held out   if sha256(path) mod 10 = 0   else training
"""

import functools
import hashlib
import math
import os
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

EXCLUDED_FOLDERS = frozenset(
    {"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"}
)
# Written at build time, full of the builder's own paths
GENERATED_PREFIX = "_sysconfigdata"
HELDOUT_PARTS = 10
LARGEST_FILE = 131_072
LARGEST_INSTALLED = 2**20  # longer files are generated
SHORTEST_INSTALLED = 200
SEPARATOR = b"\0"  # never in source text, so a model can learn that a file ends


@dataclass(frozen=True)
class Corpus:
    """Tokens to learn from and tokens to evaluate on.

    Attributes:
      train, heldout: uint8 `[bytes]`, each file followed by one zero byte; integers
        `[tokens]`; or rows of documents (`models.training.examples.load_examples`) or
        of pairs (`models.training.preferences.load_pairs`).
      train_files, heldout_files: Relative POSIX paths in the order of their bytes.
        `models.training.data.load_data` cuts one file at the border, which is in both.
      bytes_per_token: Bytes of held-out text for each token that counts; None if they
        are unknown.
      notes: Sentences about documents that were left out.
    """

    train: np.ndarray
    heldout: np.ndarray
    train_files: tuple[str, ...]
    heldout_files: tuple[str, ...]
    bytes_per_token: float | None = 1.0
    notes: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """sha256 over both parts: two runs with equal digests read the same text."""
        digest = hashlib.sha256(self.train.data)
        digest.update(b"held out")
        digest.update(self.heldout.data)
        return digest.hexdigest()


def bits_per_byte(nats_per_token: float, bytes_per_token: float | None) -> float | None:
    """Return a loss in bits per byte of text; None if the bytes are unknown.

    >>> bits_per_byte(math.log(16), 4.0)
    1.0
    """
    if bytes_per_token is None:
        return None
    return nats_per_token / math.log(2) / bytes_per_token


def load_corpus(root: Path | None = None, *, byte_limit: int = 16 * 2**20) -> Corpus:
    """Read the `**/*.py` files under `root` (None: the standard library), at most about
    `byte_limit` bytes.

    Test folders and installed packages are left out, and files are cut after 128 KiB.
    If the limit is reached, the files with the smallest hashes stay, so that a smaller
    corpus is a sample of the larger one.

    Raises:
      FileNotFoundError: there is no source file, or one of the two parts is empty.
      ValueError: `byte_limit` is not positive.

    >>> corpus = load_corpus(byte_limit=200_000)
    >>> set(corpus.train_files) & set(corpus.heldout_files)
    set()
    """
    if byte_limit <= 0:
        raise ValueError(f"byte_limit={byte_limit} must be positive")
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else Path(root)
    chosen: dict[str, bytes] = {}
    total = 0
    for name in sorted(source_files(root), key=stable_hash):
        if total >= byte_limit:
            break
        with (root / name).open("rb") as file:
            chosen[name] = file.read(min(LARGEST_FILE, byte_limit - total)) + SEPARATOR
        total += len(chosen[name])
    return _split(chosen, str(root), byte_limit)


@functools.lru_cache(maxsize=2)
def load_installed(
    roots: tuple[Path, ...] | None = None, *, byte_limit: int = 200_000_000
) -> Corpus:
    """Read the Python files of all installed packages and of the standard library:
    hundreds of megabytes.

    A text that several packages ship is read once, so that no copy of a training file
    is held out. Files below 200 bytes are left out, and files are cut after 1 MiB. The
    limit works as in `load_corpus`. Names begin with the last folder of their root.

    Args:
      roots: Folders; None for this Python's `site-packages` and standard library.
      byte_limit: Largest size in bytes, about.

    Raises:
      FileNotFoundError: one of the two parts is empty.
    """
    if roots is None:
        paths = sysconfig.get_paths()
        roots = (Path(paths["purelib"]), Path(paths["stdlib"]))
    found: dict[str, Path] = {}
    for root in roots:
        for folder, folders, files in os.walk(root):
            # One root may lie within another.
            folders[:] = [
                name
                for name in folders
                if name != "__pycache__" and Path(folder, name) not in roots
            ]
            for name in files:
                path = Path(folder, name)
                if path.suffix == ".py":
                    found[f"{root.name}/{path.relative_to(root).as_posix()}"] = path
    chosen: dict[str, bytes] = {}
    seen: set[bytes] = set()
    total = 0
    names = sorted(found, key=stable_hash)
    with ThreadPoolExecutor(16) as pool:
        for begin in range(0, len(names), 1024):
            if total >= byte_limit:
                break
            part = names[begin : begin + 1024]
            texts = pool.map(_read, [found[name] for name in part])
            for name, text in zip(part, texts, strict=True):
                digest = hashlib.sha256(text).digest()
                short = len(text) < SHORTEST_INSTALLED
                if total >= byte_limit or short or digest in seen:
                    continue
                seen.add(digest)
                chosen[name] = text[: byte_limit - total] + SEPARATOR
                total += len(chosen[name])
    return _split(chosen, ", ".join(map(str, roots)), byte_limit)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(LARGEST_INSTALLED)
    except OSError:  # a dangling link, or no permission
        return b""


def _split(chosen: dict[str, bytes], where: str, byte_limit: int) -> Corpus:
    train_files = tuple(name for name in sorted(chosen) if not is_heldout(name))
    heldout_files = tuple(name for name in sorted(chosen) if is_heldout(name))
    for part, files in (("training", train_files), ("held-out", heldout_files)):
        if not files:
            raise FileNotFoundError(
                f"{where} gives no {part} file ({len(chosen)} Python files within"
                f" {byte_limit} bytes); use a Python that ships its library as .py"
                " files, or raise the limit"
            )
    return Corpus(
        _join(chosen, train_files),
        _join(chosen, heldout_files),
        train_files,
        heldout_files,
    )


def source_files(root: Path) -> list[str]:
    """Return the relative POSIX paths of the source files under `root`, sorted."""
    names = (
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if path.is_file()
    )
    return sorted(name for name in names if _is_source(PurePosixPath(name)))


def is_heldout(name: str) -> bool:
    """Return whether the file of this relative POSIX path is held out.

    >>> names = ("ast.py", "enum.py", "json/decoder.py", "typing.py")
    >>> [name for name in names if is_heldout(name)]
    []
    """
    return stable_hash(name) % HELDOUT_PARTS == 0


def _is_source(path: PurePosixPath) -> bool:
    return not EXCLUDED_FOLDERS.intersection(
        path.parts[:-1]
    ) and not path.name.startswith(GENERATED_PREFIX)


def stable_hash(name: str) -> int:
    """Return 64 bits of the sha256 of a name; in this order neighbours have nothing in
    common.
    """
    return int.from_bytes(
        hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:8], "big"
    )


def _join(contents: dict[str, bytes], names: tuple[str, ...]) -> np.ndarray:
    return np.frombuffer(b"".join(contents[name] for name in names), np.uint8)
