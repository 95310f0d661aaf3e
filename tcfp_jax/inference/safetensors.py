"""Files of named tensors as other engines read them: eight bytes of length, a header in JSON, the tensors' bytes.

    write("model.safetensors", {"model.norm.weight": jnp.ones(4)})
    tensors, metadata = read("model.safetensors")

The format is small enough to be written here, and saves a dependency: the numpy interface of the `safetensors` package
knows neither bfloat16 nor FP8. Source: the format's description in huggingface/safetensors.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

_DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2, "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
    "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}
_LENGTH = 8  # bytes of the header's length, little endian
_METADATA = "__metadata__"


def write(
    path: str | os.PathLike, tensors: Mapping[str, jax.Array | np.ndarray], metadata: Mapping[str, str] | None = None
) -> None:
    """Write arrays by name, whole or not at all: the file takes its name when it is complete.

    Args:
      path: the file.
      tensors: JAX or NumPy arrays, which are fetched one by one.
      metadata: strings by name.

    Raises:
      ValueError: the format does not have the dtype of an array.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write(f"{folder}/a.safetensors", {"a": np.arange(3, dtype=np.uint8)})
    ...     read(f"{folder}/a.safetensors")[0]["a"].tolist()
    [0, 1, 2]
    """
    entries: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    # Wide values first, so that each tensor starts at a multiple of its values' size.
    order = sorted(tensors, key=lambda name: (-np.dtype(tensors[name].dtype).itemsize, name))
    start = 0
    for name in order:
        dtype, shape = np.dtype(tensors[name].dtype), tuple(tensors[name].shape)
        if dtype not in _NAMES:
            raise ValueError(f"{name} is {dtype}, which safetensors files do not hold; use one of {list(_NAMES)}")
        end = start + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [start, end]}
        start = end
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % _LENGTH)
    partial = Path(f"{os.fspath(path)}.partial")
    with partial.open("wb") as file:
        file.write(len(header).to_bytes(_LENGTH, "little") + header)
        for name in order:
            array = np.ascontiguousarray(np.asarray(tensors[name]))
            file.write(array.reshape(-1).view(np.uint8).data)
    partial.replace(path)


def read(path: str | os.PathLike) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Return (arrays by name, metadata) of a file; the arrays are read from disk when they are used.

    Raises:
      ValueError: the file is not a safetensors file, is cut short, or has a dtype that is unknown here.
    """
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(_LENGTH), "little")
        if not 2 <= length <= size - _LENGTH:
            raise ValueError(f"{path} says that its header has {length} bytes, but it has {size}; copy the file again")
        header = json.loads(file.read(length))
    start = _LENGTH + length
    metadata = header.pop(_METADATA, {})
    ends = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if start + ends != size:
        raise ValueError(f"{path} should have {start + ends} bytes, but it has {size}; copy the file again")
    held = np.memmap(path, np.uint8, "r", start) if ends else np.zeros(0, np.uint8)
    tensors = {}
    for name, entry in header.items():
        if entry["dtype"] not in _DTYPES:
            raise ValueError(f"{name} of {path} is {entry['dtype']}, which is none of {list(_DTYPES)}")
        first, last = entry["data_offsets"]
        tensors[name] = np.asarray(held[first:last]).view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors, metadata
