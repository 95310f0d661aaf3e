"""Real text that every machine has: the source files of Python's own standard library, as bytes.

The split is by file, because windows of one file resemble each other: a held-out loss over windows of training files
would measure memory. Which part a file belongs to is decided by a hash of its relative path alone, so that adding or
removing files moves no other file, and the two parts never share one.

    part(path) = held out   if sha256(path) mod 10 = 0   else training
"""

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

EXCLUDED_FOLDERS = frozenset({"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"})
GENERATED_PREFIX = "_sysconfigdata"  # written at build time, full of the builder's own paths
HELDOUT_PARTS = 10
LARGEST_FILE = 131_072
SEPARATOR = b"\0"  # never in source text, so a model can learn that a file ends


@dataclass(frozen=True)
class Corpus:
    """Bytes to learn from and bytes to be judged on.

    Attributes:
      train, heldout: uint8 `[bytes]`, each file followed by one zero byte.
      train_files, heldout_files: relative POSIX paths, sorted, in the order of their bytes.
    """

    train: np.ndarray
    heldout: np.ndarray
    train_files: tuple[str, ...]
    heldout_files: tuple[str, ...]

    @property
    def digest(self) -> str:
        """sha256 over both parts: two runs with equal digests read the same text."""
        digest = hashlib.sha256(self.train.tobytes())
        digest.update(b"held out")
        digest.update(self.heldout.tobytes())
        return digest.hexdigest()


def load_corpus(root: Path | None = None, *, byte_limit: int = 16 * 2**20) -> Corpus:
    """Read the `**/*.py` files under `root` (None: the standard library), at most about `byte_limit` bytes of them.

    Test folders and installed packages are left out, files are cut after 128 KiB, and where the limit bites the files
    with the smallest hashes stay, so that a smaller corpus is a sample of the larger one rather than its first letters.

    Raises:
      FileNotFoundError: no source file, or one of the two parts is empty.
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
    for name in sorted(source_files(root), key=_hash):
        if total >= byte_limit:
            break
        with (root / name).open("rb") as file:
            chosen[name] = file.read(min(LARGEST_FILE, byte_limit - total)) + SEPARATOR
        total += len(chosen[name])
    train_files = tuple(name for name in sorted(chosen) if not is_heldout(name))
    heldout_files = tuple(name for name in sorted(chosen) if is_heldout(name))
    for part, files in (("training", train_files), ("held-out", heldout_files)):
        if not files:
            raise FileNotFoundError(
                f"{root} gives no {part} file ({len(chosen)} Python files within {byte_limit} bytes); use a Python "
                "that ships its library as .py files, or raise the limit"
            )
    return Corpus(_join(chosen, train_files), _join(chosen, heldout_files), train_files, heldout_files)


def source_files(root: Path) -> list[str]:
    """Relative POSIX paths of the source files under `root`, sorted."""
    names = (path.relative_to(root).as_posix() for path in root.rglob("*.py") if path.is_file())
    return sorted(name for name in names if _is_source(PurePosixPath(name)))


def is_heldout(name: str) -> bool:
    """Whether the file of this relative POSIX path is held out.

    >>> [name for name in ("ast.py", "enum.py", "json/decoder.py", "typing.py") if is_heldout(name)]
    []
    """
    return _hash(name) % HELDOUT_PARTS == 0


def _is_source(path: PurePosixPath) -> bool:
    return not EXCLUDED_FOLDERS.intersection(path.parts[:-1]) and not path.name.startswith(GENERATED_PREFIX)


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:8], "big")


def _join(contents: dict[str, bytes], names: tuple[str, ...]) -> np.ndarray:
    return np.frombuffer(b"".join(contents[name] for name in names), np.uint8)
