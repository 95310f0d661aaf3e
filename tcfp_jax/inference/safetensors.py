"""Folders of other engines: `config.json` and safetensors files, maybe with an index.

The `safetensors` package checks each header and writes files. It refuses offsets that
overlap, leave holes or end outside of the file, and sizes that are negative or
overflow. The index and names that are there twice are checked here.
"""

import collections
import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeAlias

import ml_dtypes
import numpy as np
from jax import Array

Json: TypeAlias = Any  # an object of a JSON file
Arrays: TypeAlias = dict[str, np.ndarray]  # by name
_Form: TypeAlias = tuple[str, tuple[int, ...]]  # dtype and shape
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
# An index or a header has about 100 bytes for each tensor, so a larger text does not
# describe a model.
_LARGEST_TEXT = 32 << 20


def write(
    path: Path,
    tensors: Mapping[str, np.ndarray | Array],
    metadata: Mapping[str, str],
) -> None:
    """Write arrays by name, whole or not at all.

    The file takes its name when it is complete.

    Raises:
      ImportError: the `safetensors` package is missing.
      ValueError: the format does not have the dtype of an array.
    """
    known = [np.dtype(dtype) for dtype in _DTYPES.values()]
    for name, array in tensors.items():
        if array.dtype not in known:
            raise ValueError(
                f"{name} is {array.dtype}, which files here do not hold; use one of"
                f" {list(_DTYPES)}"
            )
    partial = path.with_name(f"{path.name}.partial")
    arrays = {name: np.asarray(array, order="C") for name, array in tensors.items()}
    _package().numpy.save_file(arrays, partial, dict(metadata))
    partial.replace(path)


def read(
    folder: Path, form: Literal["compressed", "float"] = "compressed"
) -> tuple[Json, Arrays, dict[str, dict[str, str]]]:
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
    config = _read_json(folder, CONFIG)
    if form == "compressed":
        _check_config(folder / CONFIG, config.get("quantization_config"))
    elif config.get("quantization_config"):
        raise ValueError(
            f"{folder / CONFIG} has a quantization_config, but weights must be floats;"
            " take the original"
        )
    places = _read_index(folder) if (folder / INDEX).exists() else {}
    arrays: Arrays = {}
    metadata: dict[str, dict[str, str]] = {}
    for file in sorted(set(places.values())) or [FILE]:
        held, noted = _of_file(_inside(folder, file))
        for name in held:
            if name in arrays or places.get(name, file) != file:
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
        arrays |= held
        metadata |= dict.fromkeys(held, noted)
    return config, arrays, metadata


def _read_index(folder: Path) -> dict[str, str]:
    """Return the file of each tensor, by its name."""
    places = _read_json(folder, INDEX).get("weight_map")
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


def _read_json(folder: Path, name: str) -> Json:
    """Return the object of a JSON file of a folder."""
    path = _inside(folder, name)
    if path.stat().st_size > _LARGEST_TEXT:
        raise ValueError(
            f"{path} has more than {_LARGEST_TEXT:,} bytes; copy the model's own"
        )
    try:
        found = json.loads(path.read_bytes(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is not valid JSON: {error}; copy the file again"
        ) from error
    if not isinstance(found, dict):
        raise ValueError(
            f"{path} holds a {type(found).__name__} instead of an object; copy the"
            " model's own"
        )
    return found


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


def _of_file(path: Path) -> tuple[Arrays, dict[str, str]]:
    """Return (arrays by name, metadata) of one file."""
    package = _package()
    with path.open("rb") as raw:
        length = int.from_bytes(raw.read(_LENGTH), "little")
        if length > _LARGEST_TEXT:
            raise ValueError(
                f"{path} says that its header has {length:,} bytes; copy the file again"
            )
        header = raw.read(length)
    forms: dict[str, _Form] = {}
    try:
        with package.safe_open(path, framework="np") as file:
            noted = file.metadata() or {}
            for name in file.offset_keys():
                part = file.get_slice(name)
                forms[name] = (part.get_dtype(), tuple(part.get_shape()))
        # the package takes the last of equal names
        json.loads(header, object_pairs_hook=_unique)
    except (package.SafetensorError, ValueError) as error:
        raise ValueError(
            f"{path} is not a whole safetensors file: {error}; copy the file again"
        ) from error
    for name, (dtype, _) in forms.items():
        if dtype not in _DTYPES:
            raise ValueError(
                f"{name!r} of {path} is {dtype}, which is none of {list(_DTYPES)}"
            )
    return _arrays(path, _LENGTH + length, forms), noted


def _arrays(path: Path, start: int, forms: Mapping[str, _Form]) -> Arrays:
    """Return the arrays of a file from `start` on, given their dtypes and shapes.

    The package's NumPy side lacks FP8. It has checked that tensors follow each other in
    this order, without holes.
    """
    sizes = {
        name: math.prod(shape) * np.dtype(_DTYPES[dtype]).itemsize
        for name, (dtype, shape) in forms.items()
    }
    held = np.zeros(0, np.uint8)
    if any(sizes.values()):
        held = np.memmap(path, np.uint8, "r", start)
    arrays = {}
    end = 0
    try:
        for name, (dtype, shape) in forms.items():
            begin = end
            end += sizes[name]
            part = np.asarray(held[begin:end])
            arrays[name] = part.view(_DTYPES[dtype]).reshape(shape)
    # More axes than NumPy has, or zero values of sizes beyond any
    except ValueError as error:
        raise ValueError(
            f"{path} has a tensor that no array holds: {error}; copy the file again"
        ) from error
    return arrays


def _package() -> ModuleType:
    try:
        import safetensors.numpy
    except ImportError as error:
        raise ImportError(
            "the folders of other engines need the safetensors package: pip install"
            ' "tcfp_jax[export]"'
        ) from error
    return safetensors


def _inside(folder: Path, file: str) -> Path:
    """Return the path of a file of a folder.

    An index could name any file of this machine, and so could a link in an archive. In
    the cache of Hugging Face `models--x/snapshots/revision` holds links into
    `models--x/blobs`.
    """
    path = folder / file
    homes = [folder.resolve()]
    if homes[0].parent.name == "snapshots":
        homes.append(homes[0].parents[1] / "blobs")
    outside = ValueError(
        f"{file[:80]!r} lies outside of {folder}, whose model it should be part of;"
        " copy it into it"
    )
    if file != path.name:
        raise outside
    try:
        found = path.resolve(strict=True)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{path} is missing; copy all files of the model"
        ) from error
    # a name too long, links in a circle, a zero byte
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"{file[:80]!r} is no file of {folder}: {error}; copy the model's own files"
        ) from error
    if found.parent not in homes:
        raise outside
    if not found.is_file():
        raise ValueError(f"{path} is not a file; copy the model's own")
    return path


def _unique(pairs: list[tuple[str, Json]]) -> Json:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = collections.Counter(name for name, _ in pairs)
        raise ValueError(f"{names.most_common(1)[0][0]!r} is there twice")
    return found
