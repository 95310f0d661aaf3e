"""Float parameters from which a run starts, as `python -m models.train --export` writes them."""

import zipfile
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tcfp_jax.paths import path_names


def read_parameters(path: Path, shapes: Any) -> Any:
    """Return the float parameters in an `.npz` that `export` wrote, as a tree of these shapes.

    Raises:
      FileNotFoundError: the file does not exist.
      ValueError: the file is of another kind, or of another model; the message names the first parameter that differs.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no such file {path} with parameters to start from; correct the path")
    try:
        file = np.load(path, allow_pickle=False)
        if not isinstance(file, np.lib.npyio.NpzFile):
            raise ValueError(f"it holds one array {list(file.shape)}")
        with file:
            arrays = {name: np.asarray(file[name]) for name in file.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(
            f"{path} is not an .npz of arrays by name ({error}); write one with python -m models.train --export"
        ) from error
    treedef: Any
    leaves, treedef = jax.tree_util.tree_flatten_with_path(shapes)
    wanted = {"/".join(path_names(place)): leaf for place, leaf in leaves}
    for name, leaf in wanted.items():
        found = arrays.get(name)
        if found is None or found.shape != tuple(leaf.shape):
            there = "no such array" if found is None else f"shape {list(found.shape)}"
            raise _another(path, f"{name!r} has shape {list(leaf.shape)} in this one, and {there} in the file")
        if found.dtype.kind != "f" or not np.isfinite(found).all():
            raise ValueError(
                f"{path} has {name!r} with values that are not finite floats; start from a sound checkpoint"
            )
    unknown = sorted(set(arrays) - set(wanted))
    if unknown:
        raise _another(path, f"{unknown[0]!r} is in the file and not in this one")
    return treedef.unflatten([arrays[name].astype(leaf.dtype) for name, leaf in wanted.items()])


def _another(path: Path, how: str) -> ValueError:
    return ValueError(
        f"{path} holds the parameters of another model: {how}; start from a checkpoint of this model, or name the one "
        "that it was written of"
    )
