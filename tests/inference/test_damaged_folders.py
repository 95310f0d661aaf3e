"""Folders that are damaged, contradict themselves or reach outside are refused."""

import json
import os
import resource
import subprocess
import sys
import tempfile
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
DTYPES = {
    "float32": "F32",
    "uint8": "U8",
    "float8_e4m3fn": "F8_E4M3",
    "bfloat16": "BF16",
    "int64": "I64",
}
GROUPS = {
    "group_0": {"format": "nvfp4-pack-quantized"},
    "group_1": {"format": "float-quantized"},
}
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "mixed-precision",
    "config_groups": GROUPS,
}
E4M3 = ml_dtypes.float8_e4m3fn
TENSORS = {
    "a.weight": np.ones((4, 32), E4M3),
    "a.weight_scale": np.ones(1, np.float32),
    "b.weight_packed": np.full((4, 16), 0x21, np.uint8),
    "b.weight_scale": np.ones((4, 2), E4M3),
    "b.weight_global_scale": np.ones(1, np.float32),
    "c.weight_packed": np.full((4, 16), 0x21, np.uint8),
    "c.weight_scale": np.full((4, 1), 127, np.uint8),
    "norm.weight": np.ones(4, ml_dtypes.bfloat16),
}
NORM = "norm.weight"


def entry(start, end, dtype="U8", shape=None):
    return {
        "dtype": dtype,
        "shape": [end - start] if shape is None else shape,
        "data_offsets": [start, end],
    }


def framed(header, data=b"", length=None):
    """A file of this header, of JSON or already text."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def packed(tensors, metadata=None):
    header = {} if metadata is None else {"__metadata__": metadata}
    data = b""
    for name, array in tensors.items():
        end = len(data) + array.nbytes
        header[name] = entry(
            len(data), end, DTYPES[str(array.dtype)], list(array.shape)
        )
        data += array.tobytes()
    return framed(header, data)


def folder_of(path, weights=None, config=None, index=None, **files):
    """Write a folder whose parts are right but for those given."""
    for name, content in {
        "model.safetensors": (
            packed(TENSORS) if weights is None and index is None else weights
        ),
        "config.json": (
            {"quantization_config": QUANTIZATION} if config is None else config
        ),
        "model.safetensors.index.json": (
            index
            if index is None or isinstance(index, bytes)
            else {"weight_map": index}
        ),
        **files,
    }.items():
        if content is not None:
            (path / name).write_bytes(
                content if isinstance(content, bytes) else json.dumps(content).encode()
            )


def changed(**arrays):
    """The right tensors but for some; None takes one away."""
    made = TENSORS | {name.replace("__", "."): array for name, array in arrays.items()}
    return {
        "weights": packed(
            {name: array for name, array in made.items() if array is not None}
        )
    }


def scales(*numbers, dtype=np.float32):
    return changed(a__weight_scale=np.array(numbers, dtype))


def config(**parts):
    return {"config": {"quantization_config": QUANTIZATION | parts}}


def tensors(data=None, **entries):
    """A file with a header of these entries."""
    return {"weights": framed(entries, DATA if data is None else data)}


def index(name):
    """An index that says where the norm is."""
    return {"index": {NORM: name}}


ONE = packed({NORM: TENSORS[NORM]})
DATA = bytes(64)
SHARDS = {
    "one.safetensors": ONE,
    "two.safetensors": packed({"x": np.ones(2, np.uint8)}),
}
TWICE = (
    b'{"x":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]},'
    b'"x":{"dtype":"U8","shape":[64],"data_offsets":[0,64]}}'
)
DEEP = b"[" * 100_000 + b"]" * 100_000
# A file of eight megabytes whose 225 tensors claim 1.8 gigabytes.
SPREAD = framed({f"t{i}": entry(0, 8 << 20) for i in range(225)}, bytes(8 << 20))
FOLDERS = {
    # headers
    "tensors overlap": tensors(x=entry(0, 40), y=entry(24, 64)),
    "tensors are the same bytes": {"weights": SPREAD},
    "a hole between tensors": tensors(x=entry(0, 16), y=entry(32, 64)),
    "a hole at the start": tensors(x=entry(32, 64)),
    "bytes behind the last tensor": tensors(x=entry(0, 32)),
    "an offset before the first byte": tensors(x=entry(-1, 63)),
    "offsets backward": tensors(x=entry(64, 0, shape=[0])),
    "an offset behind the end": tensors(x=entry(0, 65)),
    "a negative size": tensors(x=entry(0, 64, shape=[-64])),
    "two negative sizes": tensors(x=entry(0, 64, shape=[-8, -8])),
    "sizes that overflow": tensors(x=entry(0, 64, shape=[2**63, 2])),
    "sizes that no array has": tensors(x=entry(0, 0, shape=[0, 2**62, 8]), data=b""),
    "too many axes": tensors(x=entry(0, 1, shape=[1] * 100), data=b"1"),
    "a size of another number of bytes": tensors(x=entry(0, 64, shape=[63])),
    "a size that is a fraction": tensors(x=entry(0, 64, shape=[64.0])),
    "a tensor twice": {"weights": framed(TWICE % (64, 64), DATA)},
    "a tensor twice, one of them wrong": {"weights": framed(TWICE % (9, 9), DATA)},
    "no offsets": tensors(x={"dtype": "U8", "shape": [64]}),
    "an unknown dtype": tensors(x=entry(0, 64, "U9")),
    "a dtype that NumPy lacks": tensors(x=entry(0, 64, "F4", [128])),
    "a header that is a list": {"weights": framed([1])},
    "a header that is deep": {"weights": framed(DEEP)},
    "a header that is cut": {"weights": framed(b'{"x":')},
    "a header that is not text": {"weights": framed(b'{"\xff":1}')},
    "a header longer than the file": {
        "weights": framed({"x": entry(0, 64)}, DATA, length=2**40)
    },
    "a header of all lengths": {"weights": b"\xff" * 64},
    "metadata of numbers": tensors(__metadata__={"a": 1}, x=entry(0, 64)),
    "an empty file": {"weights": b""},
    "a file that is cut": {"weights": ONE[:-1]},
    "a file that is too long": {"weights": ONE + b"0"},
    # the index
    "an index that names a parent": index("../outside.safetensors"),
    "an index with an absolute path": index("/tmp/outside.safetensors"),
    "an index that names a folder": index("."),
    "an index with an empty name": index(""),
    "an index with a zero byte": index("a\0b"),
    "an index with a long name": index("a" * 5000),
    "an index of a link to the outside": index("link.safetensors"),
    "an index of a link in a circle": index("circle.safetensors"),
    "an index of a pipe": index("pipe.safetensors"),
    "a tensor in two shards": dict(
        index={NORM: "one.safetensors", "x": "two.safetensors"},
        **SHARDS
        | {"two.safetensors": packed({NORM: TENSORS[NORM], "x": np.ones(2, np.uint8)})},
    ),
    "a tensor in another shard": dict(
        index={NORM: "two.safetensors", "x": "one.safetensors"}, **SHARDS
    ),
    "a tensor that its shard lacks": dict(
        index={NORM: "one.safetensors", "y": "one.safetensors"}, **SHARDS
    ),
    "a tensor twice in the index": dict(
        index=b'{"weight_map":{"x":"one","x":"two.safetensors"}}', **SHARDS
    ),
    "an index beside another model": dict(
        index={NORM: "one.safetensors"}, weights=packed(TENSORS), **SHARDS
    ),
    "an index that is a list": {"index": b"[]"},
    "an index without a map": {"index": b"{}"},
    "an index of numbers": index(3),
    "an empty index": {"index": {}},
    "an index that is deep": {"index": DEEP},
    "an index that is not JSON": {"index": b"{"},
    # the config
    "a config that is a list": {"config": []},
    "a config that is cut": {"config": b"{"},
    "a config that is deep": {"config": DEEP},
    "a config that is not text": {"config": b"\xff\xfe\xff"},
    "a config without quantization": {"config": {}},
    "a quantization_config that is a list": {"config": {"quantization_config": []}},
    "config_groups that are a list": config(config_groups=[1]),
    "config_groups of numbers": config(config_groups={"a": 1}),
    "a format that is a list": config(config_groups={"a": {"format": ["x"]}}),
    "a transform_config that is a list": config(transform_config=[1]),
    "a sparsity_config that is a word": config(sparsity_config="x"),
    # scales
    "a scale of 0": scales(0.0),
    "a subnormal scale": scales(1e-40),
    "a scale of 3e38": scales(3e38),
    "a negative scale": scales(-1.0),
    "a scale of NaN": scales(np.nan),
    "an infinite scale of a row": scales([1.0], [1.0], [np.inf], [1.0]),
    "a scale of integers": scales(120, dtype=np.uint8),
    "a scale of 0 in a row": scales([1.0], [1.0], [0.0], [1.0]),
    "a tiny scale of a square": changed(
        a__weight=np.ones((32, 32), E4M3),
        a__weight_scale=np.full((1, 1), 2**-130.0, np.float32),
    ),
    "a subnormal global scale": changed(
        b__weight_global_scale=np.full(1, 1e-40, np.float32)
    ),
    "a global scale of 3e38": changed(
        b__weight_global_scale=np.full(1, 3e38, np.float32)
    ),
    "a global scale beyond the values": changed(
        b__weight_global_scale=np.full(1, 2e-38, np.float32)
    ),
    "an E8M0 scale of 2**-127": changed(c__weight_scale=np.zeros((4, 1), np.uint8)),
    "an E8M0 scale of 2**127": changed(c__weight_scale=np.full((4, 1), 254, np.uint8)),
    "codes that are a vector": changed(b__weight_packed=np.zeros(16, np.uint8)),
    "codes that are a number": changed(b__weight_packed=np.array(1, np.uint8)),
    "FP8 that is a vector": changed(a__weight=np.ones(4, E4M3)),
    "a rule that is not JSON": {"weights": packed(TENSORS, {"tcfp_jax.fp4_rule": "{"})},
    "a rule that is a list": {
        "weights": packed(TENSORS, {"tcfp_jax.fp4_rule": '{"b.weight": ["amax"]}'})
    },
    "a rule that nobody knows": {
        "weights": packed(TENSORS, {"tcfp_jax.fp4_rule": "best"})
    },
}


def load_all(out):
    """Load each folder; write what came of it, and how much memory that took."""
    from tcfp_jax.inference.compressed_tensors import load_compressed

    results = {}
    with tempfile.TemporaryDirectory() as root:
        Path(root, "outside.safetensors").write_bytes(ONE)
        for number, (name, parts) in enumerate({"right": {}, **FOLDERS}.items()):
            folder = Path(root, str(number))
            folder.mkdir()
            (folder / "link.safetensors").symlink_to(Path(root, "outside.safetensors"))
            (folder / "circle.safetensors").symlink_to(folder / "circle.safetensors")
            os.mkfifo(folder / "pipe.safetensors")
            folder_of(folder, **parts)
            if number == 1:  # imports and the first arrays of JAX are there
                before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                tracemalloc.start()
            try:
                results[name] = f"loaded {sorted(load_compressed(folder)[0])}"
            except Exception as error:
                results[name] = f"{type(error).__name__}: {error}"
    traced = tracemalloc.get_traced_memory()[1]
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    Path(out).write_text(
        json.dumps({"results": results, "traced": traced, "grown": grown})
    )


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    out = tmp_path_factory.mktemp("damaged") / "out.json"
    script = (
        "from tests.inference.test_damaged_folders import load_all;"
        f" load_all({str(out)!r})"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT, timeout=120)
    return json.loads(out.read_text())


def test_damaged_folders_raise_the_documented_error(loaded):
    results = loaded["results"]
    assert (
        results.pop("right")
        == "loaded ['a.weight', 'b.weight', 'c.weight', 'norm.weight']"
    )
    assert set(results) == set(FOLDERS)
    assert len(FOLDERS) >= 80
    wrong = {
        name: found
        for name, found in results.items()
        if not found.startswith("ValueError: ")
    }
    assert not wrong


def test_no_damaged_folder_takes_a_hundred_megabytes(loaded):
    assert loaded["traced"] < 100e6
    assert loaded["grown"] < 100e6
