"""Files in folders of models, runs and exports, which another program may have written.

Every file of such a folder is opened here, for reading and for writing. A link that
leads out of the folder, a device and a pipe are refused by name. So a folder that was
downloaded can neither read nor change another file of this machine.
"""

import collections
import contextlib
import json
import os
import stat
from collections.abc import Iterator, Sequence
from io import BufferedRandom, BufferedReader, BufferedWriter
from pathlib import Path
from typing import Any, TypeAlias

Json: TypeAlias = Any  # an object of a JSON file
# A config, an index or a header has about 100 bytes for each tensor, so a larger text
# does not describe a model.
LARGEST_TEXT = 32 << 20


def within(folder: Path, name: str) -> Path:
    """Return the path of a file of a folder, after its links are followed.

    An index could name any file of this machine, and so could a link in an archive. In
    the cache of Hugging Face `models--x/snapshots/revision` holds links into
    `models--x/blobs`.

    Raises:
      ValueError: it lies outside of the folder, or no file can have the name.
    """
    homes = [folder.resolve()]
    if homes[0].parent.name == "snapshots":
        homes.append(homes[0].parents[1] / "blobs")
    try:
        found = (folder / name).resolve()
    # a name too long, links in a circle, a zero byte
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"{name[:80]!r} is no file of {folder}: {error}; copy the folder's own"
        ) from error
    if not any(found.is_relative_to(home) for home in homes):
        raise ValueError(
            f"{name[:80]!r} lies outside of {folder}, which it should be part of; copy"
            " it into it, or delete the link"
        )
    return found


def opened(folder: Path, name: str) -> BufferedReader:
    """Return a file of a folder, open for reading.

    Raises:
      FileNotFoundError: it is missing.
      ValueError: it lies outside of the folder, is a device, a pipe or a folder, or
        cannot be read.
    """
    path = folder / name
    found = within(folder, name)
    try:
        if stat.S_ISREG(found.lstat().st_mode):
            return found.open("rb")
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{path} is missing; copy all files of the folder"
        ) from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error})") from error
    raise ValueError(f"{path} is not a file; copy the folder's own")


def read_bytes(folder: Path, name: str, most: int = LARGEST_TEXT) -> bytes:
    """Return the content of a file of a folder.

    Raises:
      FileNotFoundError: it is missing.
      ValueError: as `opened`, or it has more bytes than `most`.
    """
    with opened(folder, name) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(
            f"{folder / name} has more than {most:,} bytes; copy the folder's own"
        )
    return content


def read_object(folder: Path, name: str) -> Json:
    """Return the object of a JSON file of a folder.

    Raises:
      FileNotFoundError: it is missing.
      ValueError: as `read_bytes`, or it is not JSON, holds no object, or an object
        names an entry twice.
    """
    path = folder / name
    try:
        found = parsed(read_bytes(folder, name))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(
            f"{path} is not JSON ({error}); copy the folder's own"
        ) from error
    if not isinstance(found, dict):
        raise ValueError(
            f"{path} holds a {type(found).__name__} instead of an object; copy the"
            " folder's own"
        )
    return found


def parsed(text: bytes) -> Json:
    """Return the value of a JSON text, whose objects name no entry twice."""
    return json.loads(text, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Json]]) -> Json:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = collections.Counter(name for name, _ in pairs)
        twice = names.most_common(1)[0][0]
        raise json.JSONDecodeError(f"{twice!r} is there twice", "", 0)
    return found


@contextlib.contextmanager
def replacing(folder: Path, name: str) -> Iterator[BufferedWriter]:
    """Yield a new file, which replaces that of a folder when it is complete.

    A reader sees the old file or the new one, never a part. A link of this name is
    replaced, and not followed.
    """
    partial = folder / f"{name}.partial"
    partial.unlink(missing_ok=True)  # of a process that was killed, or a link
    try:
        with partial.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(folder / name)
    except BaseException:
        partial.unlink(missing_ok=True)  # it may fill a disk
        raise


def replace_text(folder: Path, name: str, text: str) -> None:
    """Replace a text file of a folder in one step."""
    with replacing(folder, name) as file:
        file.write(text.encode())


def extended(folder: Path, name: str) -> BufferedRandom:
    """Return a file of a folder, open for reading and at its end for writing.

    Raises:
      OSError: it cannot be written.
      ValueError: it is a link, a device or a pipe. Or it has a second name, which may
        belong to another program.
    """
    path = folder / name
    if os.path.lexists(path):
        status = path.lstat()
        is_own = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
        if not is_own and not path.is_dir():
            raise ValueError(
                f"{path} is a link, a device or a pipe instead of the folder's own"
                " file; delete it"
            )
    return path.open("a+b")


def check_links(folder: Path, names: Sequence[str]) -> None:
    """Raise a `ValueError` that names the first entry of a folder, or below it, by
    which programs would reach beyond the folder.

    Use this before a library opens files of the folder itself. Only the named entries
    and all below them are checked.
    """
    root = folder.resolve()
    left = [root / name for name in names]
    seen: set[Path] = set()
    while left:
        path = left.pop()
        if path in seen or not os.path.lexists(path):
            continue
        seen.add(path)
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            left.append(within(folder, os.path.relpath(path, root)))
        elif stat.S_ISDIR(mode):
            left += path.iterdir()
        elif not stat.S_ISREG(mode):
            raise ValueError(f"{path} is a device or a pipe; delete it")
