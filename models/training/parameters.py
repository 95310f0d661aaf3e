"""Files of float parameters: a run starts from them, and `--export` writes them."""

import contextlib
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tcfp_jax.inference import folders
from tcfp_jax.paths import leaves

from ..huggingface.folders import check_place, open_folder
from ..nets.shapes import LlamaConfig, ModelConfig
from .processes import is_first


def on_host(path: Path, shapes: Any, size: ModelConfig) -> Any:
    """Return the float parameters in a file or in a folder of Hugging Face, whose
    matrices are read when they are used (`models.huggingface.held`).

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the model is a GPT, and the path is a folder; or as `read_parameters`
        and `models.huggingface.folders.open_folder`.
    """
    if not path.is_dir():
        return read_parameters(path, shapes)
    if not isinstance(size, LlamaConfig):
        raise ValueError(
            f"{path} is a folder, which only Llamas start from; name an .npz that"
            f" --export wrote, or train the folder's own model with --model {path}"
        )
    return open_folder(path, shapes, size)


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
    wanted = leaves(shapes)
    with _reading(path):
        file = zipfile.ZipFile(path)
    with file:
        with _reading(path):
            members = {
                member.removesuffix(".npy"): member for member in file.namelist()
            }
            headers = {name: _header(file, member) for name, member in members.items()}
        _check_shapes(path, headers, wanted)
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
    structure: Any = jax.tree.structure(shapes)
    return structure.unflatten(
        arrays[name].astype(leaf.dtype) for name, leaf in wanted.items()
    )


def export(path: Path, params: Any) -> None:
    """Write float32 parameters as an `.npz` of arrays with names such as
    "block_0/qkv/kernel".

    The first process writes. Parameters that are computed when they are read
    (`models.training.exporting.Trained`) are on the host one after another. The folder
    is created if it is missing.

    Raises:
      ValueError: the path does not end in ".npz", or no file can be written there.
    """
    check_export(path)
    if is_first():
        path.parent.mkdir(parents=True, exist_ok=True)
        with folders.replacing(path.parent, path.name) as file:
            np.savez(file, **leaves(params))


def check_export(path: Path) -> None:
    """Raise `ValueError` if `export` cannot write to a path; nothing is created."""
    if path.suffix != ".npz":  # NumPy would append it silently
        raise ValueError(
            f"{path} must hold NumPy arrays by name; choose a name that ends in .npz"
        )
    if path.is_dir():
        raise ValueError(
            f"{path} must be a file of NumPy arrays, but is a folder; choose another"
            " name"
        )
    check_place(path)


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
        if np.lib.format.read_magic(opened) == (1, 0):
            shape, _, dtype = np.lib.format.read_array_header_1_0(opened)
        else:
            shape, _, dtype = np.lib.format.read_array_header_2_0(opened)
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
    unknown = sorted(set(found) - set(wanted))
    if unknown:
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
