"""Float parameters from which a run starts, as `python -m models.train --export` writes
them.
"""

import contextlib
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tcfp_jax.paths import path_names


def read_parameters(path: Path, shapes: Any) -> Any:
    """Return the float parameters in an `.npz` that `export` wrote, as a tree of these
    shapes.

    Shapes are compared before any array is read: a small compressed file may say that
    it holds gigabytes.

    Raises:
      FileNotFoundError: the file does not exist.
      ValueError: the file is of another kind, or of another model; the message names
        the first parameter that differs.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no such file {path} with parameters to start from; correct the"
            " path"
        )
    treedef: Any
    leaves, treedef = jax.tree_util.tree_flatten_with_path(shapes)
    wanted = {"/".join(path_names(place)): leaf for place, leaf in leaves}
    with _reading(path):
        file = zipfile.ZipFile(path)
    with file:
        with _reading(path):
            members = {
                member.removesuffix(".npy"): member for member in file.namelist()
            }
            found = {name: _header(file, member) for name, member in members.items()}
        _check_shapes(path, found, wanted)
        with _reading(path):
            arrays = {
                name: np.lib.format.read_array(
                    file.open(members[name]), allow_pickle=False
                )
                for name in wanted
            }
    for name, array in arrays.items():
        if not np.isfinite(array).all():
            raise _not_floats(path, name)
    return treedef.unflatten(
        [arrays[name].astype(leaf.dtype) for name, leaf in wanted.items()]
    )


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (
        ValueError,
        TypeError,
        SyntaxError,
        OSError,
        EOFError,
        RuntimeError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise ValueError(
            f"{path} is not an .npz of arrays by name ({error}); write one with python"
            " -m models.train --export"
        ) from error


def _header(file: zipfile.ZipFile, member: str) -> tuple[tuple[int, ...], np.dtype]:
    """Return shape and dtype of an array in the archive."""
    with file.open(member) as opened:
        first = np.lib.format.read_magic(opened) == (1, 0)
        read = (
            np.lib.format.read_array_header_1_0
            if first
            else np.lib.format.read_array_header_2_0
        )
        shape, _, dtype = read(opened)
    return shape, dtype


def _check_shapes(
    path: Path,
    found: Mapping[str, tuple[tuple[int, ...], np.dtype]],
    wanted: Mapping[str, Any],
) -> None:
    for name, leaf in wanted.items():
        shape, dtype = found.get(name, (None, None))
        if shape != tuple(leaf.shape):
            there = "no such array" if shape is None else f"shape {list(shape)}"
            raise _another(
                path,
                f"{name!r} has shape {list(leaf.shape)} in this one, and {there} in the"
                " file",
            )
        if dtype is None or dtype.kind != "f":
            raise _not_floats(path, name)
    if unknown := sorted(set(found) - set(wanted)):
        raise _another(path, f"{unknown[0]!r} is in the file and not in this one")


def _not_floats(path: Path, name: str) -> ValueError:
    return ValueError(
        f"{path} has {name!r} with values that are not finite floats; start from a"
        " sound checkpoint"
    )


def _another(path: Path, how: str) -> ValueError:
    return ValueError(
        f"{path} holds the parameters of another model: {how}; start from a checkpoint"
        " of this model, or name the one that it was written of"
    )
