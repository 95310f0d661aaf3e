"""Folders of other engines: `config.json`, and one safetensors file, or several and an
index of their tensors.

The `safetensors` package checks each header and writes files. It refuses offsets that
overlap, leave holes or end outside of the file, and sizes that are negative or
overflow. The index and names that are there twice are checked here.
"""

import collections
import itertools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import ml_dtypes
import numpy as np

FILE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
NVFP4, MXFP4, FLOAT8 = "nvfp4-pack-quantized", "mxfp4-pack-quantized", "float-quantized"
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


def write(path: Path, tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
    """Write arrays by name, whole or not at all: the file takes its name when it is
    complete.

    Raises:
      ImportError: the `safetensors` package is missing.
      ValueError: the format does not have the dtype of an array.
    """
    known = [np.dtype(dtype) for dtype in _DTYPES.values()]
    if (
        name := next(
            (name for name, array in tensors.items() if array.dtype not in known), None
        )
    ) is not None:
        raise ValueError(
            f"{name} is {tensors[name].dtype}, which files here do not hold; use one of"
            f" {list(_DTYPES)}"
        )
    partial = path.with_name(f"{path.name}.partial")
    arrays = {name: np.asarray(array, order="C") for name, array in tensors.items()}
    _package().numpy.save_file(arrays, partial, dict(metadata))
    partial.replace(path)


def read(
    folder: Path, form: Literal["compressed", "float"] = "compressed"
) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, dict[str, str]]]:
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
    config, places = _read_json(folder, CONFIG), {}
    if form == "compressed":
        _check_config(folder / CONFIG, config.get("quantization_config"))
    elif config.get("quantization_config"):
        raise ValueError(
            f"{folder / CONFIG} has a quantization_config, but weights must be floats;"
            " take the original"
        )
    if (folder / INDEX).exists():
        places = _read_json(folder, INDEX).get("weight_map")
        if (
            not isinstance(places, dict)
            or not places
            or not all(isinstance(one, str) for one in places.values())
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
    arrays: dict[str, np.ndarray] = {}
    metadata: dict[str, dict[str, str]] = {}
    for file in sorted(set(places.values())) or [FILE]:
        held, noted = _of_file(_inside(folder, file))
        if (
            twice := next(
                (n for n in held if n in arrays or places.get(n, file) != file), None
            )
        ) is not None:
            raise ValueError(
                f"{twice!r} is in {file} and also in another file of {folder}; keep one"
                " of the two"
            )
        if (
            lost := next(
                (n for n, place in places.items() if place == file and n not in held),
                None,
            )
        ) is not None:
            raise ValueError(
                f"{folder / INDEX} says that {lost!r} is in {file}, which lacks it;"
                " copy all files again"
            )
        arrays |= held
        metadata |= dict.fromkeys(held, noted)
    return config, arrays, metadata


def _read_json(folder: Path, name: str) -> Any:
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
    """Raise if the weights cannot be read here that a `quantization_config`
    describes.
    """
    found = found if isinstance(found, dict) else {}
    if (method := found.get("quant_method")) != "compressed-tensors":
        raise ValueError(
            f"{path} has quant_method={method!r}, and this reads 'compressed-tensors'"
            " alone; convert the model with llm-compressor, or load its float weights"
        )
    entries = ("config_groups", "transform_config", "sparsity_config")
    groups, transform, sparsity = (found.get(entry) or {} for entry in entries)
    if not all(
        isinstance(one, dict) for one in (groups, transform, sparsity)
    ) or not all(isinstance(group, dict) for group in groups.values()):
        raise ValueError(
            f"{path} has config_groups, a transform_config or a sparsity_config that"
            " are not objects; copy the model's own"
        )
    known = {NVFP4, MXFP4, FLOAT8, "naive-quantized"}
    if (
        unknown := {
            str(group.get("format") or found.get("format")) for group in groups.values()
        }
        - known
    ):
        raise ValueError(
            f"{path} has the format {min(unknown)!r}; use one of {sorted(known)}"
        )
    for entry, inner in (
        ("transform_config", transform),
        ("sparsity_config", sparsity),
    ):
        if inner.get("config_groups") or inner.get("format", "dense") != "dense":
            raise ValueError(
                f"{path} has a {entry}, weights that are rotated or sparse; save"
                " without"
            )


def _of_file(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Return (arrays by name, metadata) of one file."""
    package = _package()
    with path.open("rb") as raw:
        length = int.from_bytes(raw.read(_LENGTH), "little")
        if length > _LARGEST_TEXT:
            raise ValueError(
                f"{path} says that its header has {length:,} bytes; copy the file again"
            )
        header = raw.read(length)
    try:
        with package.safe_open(path, framework="np") as file:
            noted, names = file.metadata() or {}, file.offset_keys()
            slices = [file.get_slice(name) for name in names]
            forms = [(part.get_dtype(), tuple(part.get_shape())) for part in slices]
        # the package takes the last of equal names
        json.loads(header, object_pairs_hook=_unique)
    except (package.SafetensorError, ValueError) as error:
        raise ValueError(
            f"{path} is not a whole safetensors file: {error}; copy the file again"
        ) from error
    if unknown := next(
        ((name, form[0]) for name, form in zip(names, forms) if form[0] not in _DTYPES),
        None,
    ):
        raise ValueError(
            f"{unknown[0]!r} of {path} is {unknown[1]}, which is none of"
            f" {list(_DTYPES)}"
        )
    # The package's NumPy side lacks FP8. It has checked that tensors follow each other
    # in this order, without holes.
    dtypes = [np.dtype(_DTYPES[dtype]) for dtype, _ in forms]
    sizes = [
        math.prod(shape) * dtype.itemsize for dtype, (_, shape) in zip(dtypes, forms)
    ]
    ends = list(itertools.accumulate(sizes))
    held = (
        np.memmap(path, np.uint8, "r", _LENGTH + length)
        if any(sizes)
        else np.zeros(0, np.uint8)
    )
    parts = zip(names, ends, sizes, dtypes, forms, strict=True)
    try:
        return {
            n: np.asarray(held[end - size : end]).view(d).reshape(s)
            for n, end, size, d, (_, s) in parts
        }, noted
    # More axes than NumPy has, or zero values of sizes beyond any
    except ValueError as error:
        raise ValueError(
            f"{path} has a tensor that no array holds: {error}; copy the file again"
        ) from error


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
    path, home = folder / file, folder.resolve()
    homes = [
        home,
        *([home.parents[1] / "blobs"] if home.parent.name == "snapshots" else []),
    ]
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


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(
            f"{collections.Counter(name for name, _ in pairs).most_common(1)[0][0]!r}"
            " is there twice"
        )
    return found
