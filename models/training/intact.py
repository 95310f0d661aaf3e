"""A folder that one run writes at a time, and files that are read only if they have not
changed.
"""

import fcntl
import functools
import hashlib
import json
import os
import socket
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BufferedRandom
from pathlib import Path
from typing import Any

import jax

import tcfp_jax
from tcfp_jax.inference import folders

from .processes import gather, is_first, of_first

LOCK_FILE = "lock"
DIGESTS_FILE = "digests.json"
VERSION_FILE = "versions.json"
SEAL = "digest"


def lock(folder: Path) -> BufferedRandom:
    """Return the open lock file of a folder; the lock ends when it is closed or its
    process dies.

    Raises:
      ValueError: another process, or another run of this one, holds the lock; or it is
        a link.
    """
    file = folders.extended(folder, LOCK_FILE)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        holder = file.read(200).decode(errors="replace").strip() or "another process"
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
    file.write(f"process {os.getpid()} of {socket.gethostname()}\n".encode())
    file.flush()
    return file


def write_digests(folder: Path, noted: Mapping[str, str | None]) -> int:
    """Write the library's version with further notes, and the BLAKE2 digest of every
    file below a folder, into it; return the bytes of these files.

    All processes call this together. Files, not arrays: so a damaged index is seen too,
    and any mesh can check what another one wrote.
    """
    if is_first():
        of_now = {"tcfp_jax": tcfp_jax.__version__, "jax": jax.__version__}
        write_json(folder / VERSION_FILE, {**of_now, **noted})
    names = json.loads(of_first(lambda: json.dumps(_names(folder))))
    found = _digests(folder, names)
    if is_first():
        write_json(folder / DIGESTS_FILE, found)
    return sum((folder / name).stat().st_size for name in names)


def check_digests(folder: Path) -> bool:
    """Return whether the files of a folder have digests, after a comparison; all
    processes call this together.

    Raises:
      ValueError: a file is missing or has changed, or the digests cannot be read.
    """
    if not json.loads(of_first(lambda: json.dumps((folder / DIGESTS_FILE).exists()))):
        return False
    wanted = json.loads(
        of_first(lambda: json.dumps(folders.read_object(folder, DIGESTS_FILE)))
    )
    if not wanted:
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
    written = notes_of(folder)
    found = "unknown versions"
    if {"tcfp_jax", "jax"} <= written.keys():
        found = f"tcfp_jax {written['tcfp_jax']}, jax {written['jax']}"
    return (
        f"{found} wrote it, tcfp_jax {tcfp_jax.__version__}, jax {jax.__version__}"
        " read it"
    )


def notes_of(folder: Path) -> Mapping[str, Any]:
    """Return the notes of `write_digests`, empty if they are lost."""
    try:
        found: dict[str, Any] = folders.read_object(folder, VERSION_FILE)
    except (FileNotFoundError, ValueError):
        return {}
    return found


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
        digests = pool.map(functools.partial(digest_of, folder), own)
    found: dict[str, str | None] = {}
    for text in gather(json.dumps(dict(zip(own, digests, strict=True)))):
        found |= json.loads(text)
    return found


def digest_of(folder: Path, name: str) -> str | None:
    """Return the digest of a file of a folder, None if it cannot be read."""
    try:
        with folders.opened(folder, name) as file:
            return hashlib.file_digest(file, _hash).hexdigest()
    except (OSError, ValueError):
        return None


def digest_of_text(text: str) -> str:
    """Return the digest that `digest_of` finds for a file of this text."""
    digest = _hash()
    digest.update(text.encode())
    return digest.hexdigest()


def _hash() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=16)


def write_json(path: Path, content: Any) -> None:
    """Write `content` so that a reader sees the old file or the new one, never a
    part.
    """
    folders.replace_text(path.parent, path.name, json.dumps(content, indent=2) + "\n")


def write_sealed(path: Path, content: Mapping[str, Any]) -> None:
    """Write an object as `write_json`, with the digest of its content."""
    write_json(path, {**content, SEAL: _seal(content)})


def read_sealed(folder: Path, name: str) -> dict[str, Any]:
    """Return an object that `write_sealed` wrote.

    Raises:
      FileNotFoundError: the file is missing.
      ValueError: it is not JSON, or has changed since it was written.
    """
    found: dict[str, Any] = folders.read_object(folder, name)
    seal = found.pop(SEAL, None)  # an older version wrote none
    if seal not in (None, _seal(found)):
        raise ValueError(f"{name} has changed since it was written")
    return found


def is_sealed(folder: Path, name: str) -> bool:
    """Return whether a file has the digest of `write_sealed`."""
    return SEAL in folders.read_object(folder, name)


def _seal(content: Mapping[str, Any]) -> str:
    return digest_of_text(json.dumps(content, sort_keys=True))
