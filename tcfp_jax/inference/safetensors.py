"""Folders of other engines: `config.json` and safetensors files, maybe with an index.

The `safetensors` package checks each header and writes files. It refuses offsets that
overlap, leave holes or end outside of the file, and sizes that are negative or
overflow. The index and repeated names are checked here.
"""

import math
import os
from collections.abc import Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from types import ModuleType
from typing import Literal, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np
from jax import Array

from tcfp_jax.inference import folders
from tcfp_jax.inference.folders import LARGEST_TEXT, Json

Arrays: TypeAlias = dict[str, np.ndarray]  # by name
FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
NVFP4 = "nvfp4-pack-quantized"
MXFP4 = "mxfp4-pack-quantized"
FLOAT8 = "float-quantized"
COPY = "copy all files"  # the repair if a file is damaged
_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
_LENGTH = 8  # bytes of the header's length, little endian


class _Place(NamedTuple):
    """Place of an array in a file of a folder.

    Attributes:
      file: name of the file.
      state: identity, size and time of the file when its header was read.
      begin: first byte of the array.
      dtype, shape: of the array.
    """

    file: str
    state: tuple[int, ...]
    begin: int
    dtype: str
    shape: tuple[int, ...]


class Held(Mapping[str, np.ndarray]):
    """Arrays of a folder by name, each read when it is used.

    They are not mapped: a process dies without a word (SIGBUS) if it uses a mapped file
    that has become shorter.
    """

    def __init__(self, folder: Path, places: Mapping[str, _Place]) -> None:
        self._folder = folder
        self.places = dict(places)

    def __getitem__(self, name: str) -> np.ndarray:
        place = self.places[name]
        dtype = np.dtype(_DTYPES[place.dtype])
        held = np.empty(math.prod(place.shape) * dtype.itemsize, np.uint8)
        path = self._folder / place.file
        with folders.opened(self._folder, place.file) as file:
            file.seek(place.begin)
            count = file.readinto(held.data)
            if count < held.size or _state_of(file) != place.state:
                raise ValueError(
                    f"{path} has changed while it was read; load the folder again"
                )
        try:
            return held.view(dtype).reshape(place.shape)
        # More axes than NumPy has, or zero values of sizes beyond any
        except ValueError as error:
            raise ValueError(
                f"{path} has a tensor that no array holds: {error}; copy the file again"
            ) from error

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)

    def __contains__(self, name: object) -> bool:
        return name in self.places

    def described(self, name: str) -> tuple[tuple[int, ...], np.dtype]:
        """Return shape and dtype of an array, which is not read."""
        place = self.places[name]
        return place.shape, np.dtype(_DTYPES[place.dtype])

    def pop(self, name: str) -> np.ndarray:
        """Return an array, and leave it out from now on."""
        array = self[name]
        del self.places[name]
        return array


def write(
    path: Path,
    tensors: Mapping[str, np.ndarray | Array],
    metadata: Mapping[str, str],
) -> None:
    """Write arrays by name, whole or not at all.

    The file takes its name when it is complete.

    Raises:
      ImportError: the `safetensors` package is missing.
      OSError: the file cannot be written, such as on a full disk.
      ValueError: the format does not have the dtype of an array.
    """
    known = [np.dtype(dtype) for dtype in _DTYPES.values()]
    for name, array in tensors.items():
        if array.dtype not in known:
            raise ValueError(
                f"{name} is {array.dtype}, which files here do not hold; use one of"
                f" {list(_DTYPES)}"
            )
    package = _package()
    arrays = {name: np.asarray(array, order="C") for name, array in tensors.items()}
    with folders.replacing(path.parent, path.name) as file:
        try:
            package.numpy.save_file(arrays, file.name, dict(metadata))
        except package.SafetensorError as error:
            raise OSError(f"{path} cannot be written: {error}") from error


def check_target(folder: Path) -> None:
    """Raise a `ValueError` if a folder has weights that a new `model.safetensors` would
    lie next to: engines load all files of a folder.
    """
    names = {path.name for path in folder.glob("*.safetensors")} - {FILE}
    if names:
        raise ValueError(
            f"{folder} holds another model ({min(names)}), which engines would load"
            " together with the new one; choose an empty folder"
        )


def read(
    folder: Path, form: Literal["compressed", "float"] = "compressed"
) -> tuple[Json, Held, dict[str, dict[str, str]]]:
    """Return (config, arrays by name, metadata of its file by name) of a folder.

    Its weights are in the compressed-tensors format, or all are floats. Arrays are read
    from disk when they are used.

    Raises:
      FileNotFoundError: a file is missing.
      ImportError: the `safetensors` package is missing.
      ValueError: a file, the index or the config is damaged, they contradict each
        other, a file lies outside of the folder, or weights are stored in a way that is
        not read here.
    """
    config = folders.read_object(folder, CONFIG)
    if form == "compressed":
        _check_config(folder / CONFIG, config.get("quantization_config"))
    elif config.get("quantization_config"):
        raise ValueError(
            f"{folder / CONFIG} has a quantization_config, but weights must be floats;"
            " take the original"
        )
    places = _read_index(folder) if (folder / INDEX).exists() else {}
    found: dict[str, _Place] = {}
    metadata: dict[str, dict[str, str]] = {}
    for file in sorted(set(places.values())) or [FILE]:
        held, noted = _of_file(folder, file)
        for name in held:
            if name in found or places.get(name, file) != file:
                raise ValueError(
                    f"{name!r} is in {file} and also in another file of {folder}; keep"
                    " one of the two"
                )
        for name, place in places.items():
            if place == file and name not in held:
                raise ValueError(
                    f"{folder / INDEX} says that {name!r} is in {file}, which lacks it;"
                    " copy all files again"
                )
        found |= held.places
        metadata |= dict.fromkeys(held, noted)
    return config, Held(folder, found), metadata


def _read_index(folder: Path) -> dict[str, str]:
    """Return the file of each tensor, by its name."""
    places = folders.read_object(folder, INDEX).get("weight_map")
    if (
        not isinstance(places, dict)
        or not places
        or not all(isinstance(file, str) for file in places.values())
    ):
        raise ValueError(
            f"{folder / INDEX} has no weight_map of tensors and files; copy the"
            " model's own index"
        )
    if (folder / FILE).exists() and FILE not in places.values():
        raise ValueError(
            f"{folder} has {FILE} and {INDEX} without it, which are two models;"
            " delete one of them"
        )
    return places


def _check_config(path: Path, found: object) -> None:
    """Raise a ValueError if a `quantization_config` describes another format."""
    config = found if isinstance(found, dict) else {}
    method = config.get("quant_method")
    if method != "compressed-tensors":
        raise ValueError(
            f"{path} has quant_method={method!r}, and this reads 'compressed-tensors'"
            " alone; convert the model with llm-compressor, or load its float weights"
        )
    names = ("config_groups", "transform_config", "sparsity_config")
    entries = {name: config.get(name) or {} for name in names}
    groups = entries["config_groups"]
    objects = [*entries.values()]
    if isinstance(groups, dict):
        objects += groups.values()
    if not all(isinstance(one, dict) for one in objects):
        raise ValueError(
            f"{path} has config_groups, a transform_config or a sparsity_config that"
            " are not objects; copy the model's own"
        )
    formats = {
        str(group.get("format") or config.get("format")) for group in groups.values()
    }
    known = {NVFP4, MXFP4, FLOAT8, "naive-quantized"}
    unknown = formats - known
    if unknown:
        raise ValueError(
            f"{path} has the format {min(unknown)!r}; use one of {sorted(known)}"
        )
    for name in ("transform_config", "sparsity_config"):
        inner = entries[name]
        if inner.get("config_groups") or inner.get("format", "dense") != "dense":
            raise ValueError(
                f"{path} has a {name}, weights that are rotated or sparse; save without"
            )


def _of_file(folder: Path, name: str) -> tuple[Held, dict[str, str]]:
    """Return (arrays by name, metadata) of one file."""
    package = _package()
    path = folder / name
    with folders.opened(folder, name) as raw:
        state = _state_of(raw)
        length = int.from_bytes(raw.read(_LENGTH), "little")
        if length > LARGEST_TEXT:
            raise ValueError(
                f"{path} says that its header has {length:,} bytes; copy the file again"
            )
        header = raw.read(length)
    places: dict[str, _Place] = {}
    # The package has checked that tensors follow each other in this order, without
    # holes.
    begin = _LENGTH + length
    try:
        with package.safe_open(path, framework="np") as file:
            noted = file.metadata() or {}
            for tensor in file.offset_keys():
                part = file.get_slice(tensor)
                dtype = part.get_dtype()
                if dtype not in _DTYPES:
                    raise ValueError(f"{tensor!r} is {dtype}, not of {list(_DTYPES)}")
                shape = tuple(part.get_shape())
                places[tensor] = _Place(name, state, begin, dtype, shape)
                begin += math.prod(shape) * np.dtype(_DTYPES[dtype]).itemsize
        # the package takes the last of equal names
        folders.parsed(header)
    except (package.SafetensorError, ValueError, OSError) as error:
        raise ValueError(
            f"{path} is not a whole safetensors file: {error}; copy the file again"
        ) from error
    return Held(folder, places), noted


def _state_of(file: BufferedReader) -> tuple[int, ...]:
    status = os.fstat(file.fileno())
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _package() -> ModuleType:
    try:
        import safetensors.numpy
    except ImportError as error:
        raise ImportError(
            "the folders of other engines need the safetensors package: pip install"
            ' "tcfp_jax[export]"'
        ) from error
    return safetensors
