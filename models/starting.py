"""Parameters from which a run starts: a float checkpoint, as `python -m models.train --export` writes it."""

import zipfile
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tcfp_jax.paths import path_names


def read_parameters(path: Path, shapes: Any) -> Any:
    """The float parameters in an `.npz` of arrays named as "block_0/qkv/kernel", in the tree of these shapes.

    Args:
      path: of the file.
      shapes: the parameters of the model that is to start from them, or their shapes.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is no such file, or its parameters are those of another model; the message names the first that
        differs.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is to hold the parameters to start from, and there is no such file")
    try:
        file = np.load(path, allow_pickle=False)
        if not isinstance(file, np.lib.npyio.NpzFile):
            raise ValueError(f"it holds one array {list(file.shape)}")
        with file:
            arrays = {name: np.asarray(file[name]) for name in file.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(
            f"{path} is no .npz of arrays by name ({error}); write one with python -m models.train --export"
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
                f"{path} has {name!r} with values that are no finite floats; start from a sound checkpoint"
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
