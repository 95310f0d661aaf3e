"""A folder that one run writes at a time, and files that are read only if they have not
changed.
"""

import fcntl
import hashlib
import json
import os
import socket
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO

import jax

import tcfp_jax
from models.training.processes import gather, is_first, of_first

LOCK_FILE = "lock"
DIGESTS_FILE = "digests.json"
VERSION_FILE = "versions.json"


def lock(folder: Path) -> TextIO:
    """Return the open lock file of a folder; the lock ends when it is closed or its
    process dies.

    Raises:
      ValueError: another process, or another run of this one, holds the lock.
    """
    file = (folder / LOCK_FILE).open("a+", encoding="utf-8", errors="replace")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        holder = file.read(200).strip() or "another process"
        file.close()
        raise ValueError(
            f"{holder} writes {folder}; wait until it ends, or choose another folder"
        ) from error
    except OSError as error:  # some network file systems have no locks
        warnings.warn(
            f"{folder} cannot be locked ({error}); start no second run in it",
            stacklevel=2,
        )
    file.truncate(0)
    file.write(f"process {os.getpid()} of {socket.gethostname()}\n")
    file.flush()
    return file


def write_digests(folder: Path) -> None:
    """Write the library's version, and the BLAKE2 digest of every file below a folder,
    into it.

    All processes call this together. Files, not arrays: so a damaged index is seen too,
    and any mesh can check what another one wrote.
    """
    if is_first():
        write_json(
            folder / VERSION_FILE,
            {"tcfp_jax": tcfp_jax.__version__, "jax": jax.__version__},
        )
    found = _digests(folder, json.loads(of_first(lambda: json.dumps(_names(folder)))))
    if is_first():
        write_json(folder / DIGESTS_FILE, found)


def check_digests(folder: Path) -> bool:
    """Return whether the files of a folder have digests, after a comparison; all
    processes call this together.

    Raises:
      ValueError: a file is missing or has changed, or the digests cannot be read.
    """
    if not json.loads(of_first(lambda: json.dumps((folder / DIGESTS_FILE).exists()))):
        return False
    try:
        wanted = json.loads(
            of_first(lambda: (folder / DIGESTS_FILE).read_text(encoding="utf-8"))
        )
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{DIGESTS_FILE} is not JSON") from error
    if not isinstance(wanted, dict) or not wanted:
        raise ValueError(f"{DIGESTS_FILE} names no files")
    found = _digests(folder, sorted(wanted))
    for name, digest in wanted.items():
        if found[name] != digest:
            raise ValueError(
                f"{name} is missing"
                if found[name] is None
                else f"{name} has changed since it was written"
            )
    return True


def versions(folder: Path) -> str:
    """Return the versions that wrote a folder, and those that read it, for messages."""
    try:
        written = json.loads((folder / VERSION_FILE).read_text(encoding="utf-8"))
        found = ", ".join(f"{name} {written[name]}" for name in ("tcfp_jax", "jax"))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        found = "unknown versions"
    return (
        f"{found} wrote it, tcfp_jax {tcfp_jax.__version__}, jax {jax.__version__}"
        " read it"
    )


def _names(folder: Path) -> list[str]:
    return sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file()
    )


def _digests(folder: Path, names: Sequence[str]) -> dict[str, str | None]:
    """Return the digests of files, None for one that cannot be read; each process reads
    its share.
    """
    own = names[jax.process_index() :: jax.process_count()]
    with ThreadPoolExecutor() as pool:  # hashlib lets other threads run
        digests = pool.map(_digest, [folder / name for name in own])
    found: dict[str, str | None] = {}
    for text in gather(json.dumps(dict(zip(own, digests, strict=True)))):
        found |= json.loads(text)
    return found


def _digest(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
            return digest.hexdigest()
    except (OSError, ValueError):  # ValueError: a damaged name with a zero byte
        return None


def write_json(path: Path, content: Any) -> None:
    """Write `content` so that a reader sees the old file or the new one, never a
    part.
    """
    replace_file(path, json.dumps(content, indent=2) + "\n")


def replace_file(path: Path, text: str) -> None:
    """Replace a text file in one step."""
    temporary = path.with_name(path.name + ".partial")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
