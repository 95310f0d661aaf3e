"""Folders of other engines that are refused, and several files of one model."""

import json
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import tcfp_jax
from pallas_kernels.operands import Block, Fp4, Operand, Row
from tcfp_jax.inference import safetensors
from tcfp_jax.inference.compressed_tensors import load_compressed, save_compressed
from tcfp_jax.weights.stored import Stored
from tests.exports import (
    E4M3,
    NAME,
    change,
    codes,
    dequantized,
    matrix,
    quick,
    saved,
)
from tests.helpers import parametrize, refused, same_bits

# Flax's norms promote bfloat16
pytestmark = pytest.mark.usefixtures("standard_promotion")
W = {f"{NAME}.weight": lambda: codes(32, 64)}


@parametrize(
    "tensors, options, error, message",
    [
        ({"a.weight": lambda: matrix()}, {}, ValueError, "none of .* is quantized"),
        ({"a": lambda: codes(4, 32)}, {}, ValueError, "does not end in .weight"),
        ({"a.weight": lambda: codes(1, 4, 32)}, {}, ValueError, "is a stack"),
        ({"a.weight": lambda: codes(4, 24)}, {}, ValueError, "k=24.*blocks of 16"),
        (
            {"a.weight": lambda: codes(4, 48, scaling=Fp4("mxfp4"))},
            {},
            ValueError,
            "k=48.*blocks of 32",
        ),
        (
            {"a.weight": lambda: Stored(codes(4, 16), None, padding=1)},
            {},
            ValueError,
            "k=15.*blocks of 16",
        ),
        (
            {"a.weight": lambda: codes(4, 16), "a.weight_scale": matrix},
            {},
            ValueError,
            "_scale is among .*drop",
        ),
        (
            {
                "a.weight": lambda: replace(
                    codes(4, 16), scale=np.full((4, 1), np.nan, E4M3)
                )
            },
            {},
            ValueError,
            "NaN|finite",
        ),
        (
            {
                "a.weight": lambda: Operand(
                    jnp.ones((4, 32), jnp.float8_e5m2), jnp.float32(1)
                )
            },
            {},
            TypeError,
            "float8_e5m2.*float8_e4m3fn",
        ),
        (
            {
                "a.weight": lambda: Operand(
                    np.ones((4, 32), E4M3),
                    np.ones((4, 1), np.uint8),
                    scaling=Block(32, "vector"),
                )
            },
            {},
            TypeError,
            "square",
        ),
        (W, {"ignore": [NAME]}, ValueError, "which is quantized"),
        (W, {"activations": "float8"}, ValueError, "FP8 weights"),
        (W, {"activations": "int8"}, ValueError, "unknown"),
    ],
)
def test_what_cannot_be_written_is_refused(tmp_path, tensors, options, error, message):
    with refused(message, error):
        save_compressed(
            tmp_path, {name: made() for name, made in tensors.items()}, **options
        )
    assert not list(tmp_path.iterdir())


@parametrize(
    "changes, message",
    [
        ({"quant_method": "gptq"}, "gptq"),
        ({"config_groups": {"g": {"format": "pack-quantized"}}}, "pack-quantized"),
        ({"transform_config": {"config_groups": {"u": {}}}}, "rotated"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse"),
    ],
)
def test_a_config_that_cannot_be_read_is_refused(tmp_path, changes, message):
    saved(tmp_path, codes(32, 64))
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= changes
    path.write_text(json.dumps(config))
    with refused(message):
        load_compressed(tmp_path)


def put(part, array):
    """Function that sets a part of the weight."""
    return lambda arrays: arrays.update({f"{NAME}.weight{part}": array})


@parametrize(
    "changed, message",
    [
        (
            lambda arrays: arrays[f"{NAME}.weight_scale"].view(np.uint8).put(0, 0x7F),
            "0x7f",
        ),
        (put("_zero_point", np.ones((4, 1), np.int8)), "zero points"),
        (
            put("_scale", np.ones((32, 1), E4M3)),
            r"nvfp4 has bytes \[n, k / 2\] with scales float8_e4m3fn\[32, 4\]",
        ),
        *[
            (lambda arrays, part=part: arrays.pop(f"{NAME}.weight_{part}"), message)
            for part, message in (
                ("packed", "neither .* copy all files"),
                ("scale", "weight_scale is missing; copy all files"),
                ("global_scale", "weight_global_scale is missing; copy all files"),
            )
        ],
        *[
            (
                put("_global_scale", np.float32([x])),
                rf"_global_scale is {x} with .*store 1 for",
            )
            for x in (0.0, np.nan, np.inf, -1.0)
        ],
        *[
            (
                put("_global_scale", x),
                rf"global_scale is {held}, but .* one float32 number",
            )
            for x, held in (
                (np.float32([2, 4]), r"float32\[2\]"),
                (np.float32([]), r"float32\[0\]"),
                (np.int32([2]), r"int32\[1\]"),
                (np.array([2], ml_dtypes.bfloat16), r"bfloat16\[1\]"),
                (np.float32([2]).view(np.uint8), r"uint8\[4\]"),
            )
        ],
        *[
            (put(part, np.ones(4, np.float32)), rf"weight{part} comes with the codes")
            for part in ("", "_g_idx", "_scale_2")
        ],
    ],
)
def test_arrays_that_cannot_be_read_are_refused(tmp_path, changed, message):
    saved(tmp_path, codes(32, 64))
    change(tmp_path, changed)
    with refused(message):
        load_compressed(tmp_path)


def test_an_array_may_have_the_name_of_a_module(tmp_path):
    tensors = {
        "a.weight": codes(32, 64),
        "a": matrix(),
        "a.bias": np.ones(32, np.float32),
    }
    save_compressed(tmp_path, tensors)
    assert set(load_compressed(tmp_path)[0]) == set(tensors)


def test_a_model_in_several_files_and_several_formats(tmp_path):
    tensors = {
        "a.weight": codes(32, 64),
        "b.weight": quick(tcfp_jax.quantize)(matrix()),
        "c.weight": matrix(),
    }
    save_compressed(tmp_path, tensors)
    found = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert found["format"] == "mixed-precision"
    assert found["ignore"] == ["lm_head", "c"]
    groups = [
        (group["format"], group["targets"]) for group in found["config_groups"].values()
    ]
    assert groups == [("nvfp4-pack-quantized", ["a"]), ("float-quantized", ["b"])]
    whole, _ = load_compressed(tmp_path)
    arrays, _ = safetensors._of_file(tmp_path, "model.safetensors")
    files = {
        name: f"part-{number % 2}.safetensors"
        for number, name in enumerate(sorted(arrays))
    }
    for file in set(files.values()):
        safetensors.write(
            tmp_path / file,
            {name: array for name, array in arrays.items() if files[name] == file},
            {},
        )
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": files})
    )
    parts, _ = load_compressed(tmp_path)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), whole, parts))
    with refused("unknown"):
        load_compressed(tmp_path, global_scale="inverse")


def test_a_file_holds_every_dtype_that_weights_have(tmp_path):
    arrays = {
        str(np.dtype(dtype)): np.arange(6).astype(dtype).reshape(2, 3)
        for dtype in (
            np.float32,
            np.float16,
            ml_dtypes.bfloat16,
            E4M3,
            np.uint8,
            np.int64,
            bool,
        )
    }
    arrays["empty"] = np.zeros((0, 3), np.float32)
    arrays["scalar"] = np.array(2.0, np.float32)
    safetensors.write(tmp_path / "file", arrays, {"format": "pt"})
    found, metadata = safetensors._of_file(tmp_path, "file")
    assert same_bits(dict(found), arrays)
    assert metadata == {"format": "pt"}
    assert {name: array.dtype for name, array in found.items()} == {
        name: array.dtype for name, array in arrays.items()
    }
    with refused("complex64"):
        safetensors.write(tmp_path / "none", {"a": np.ones(2, np.complex64)}, {})
    assert not (tmp_path / "none").exists()


def test_an_index_of_before_goes_with_the_model_that_it_was_of(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "b.safetensors"}}'
    )
    save_compressed(tmp_path, {"a.weight": codes(32, 64)})
    assert set(load_compressed(tmp_path)[0]) == {"a.weight"}


def test_links_of_a_cache_are_read(tmp_path):
    """Hugging Face keeps files in `blobs`, and links to them in `snapshots`."""
    blobs = tmp_path / "models--x/blobs"
    snapshot = tmp_path / "models--x/snapshots/0"
    save_compressed(blobs, {"a.weight": codes(32, 64)})
    snapshot.mkdir(parents=True)
    for name in ("model.safetensors", "config.json"):
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    assert set(load_compressed(snapshot)[0]) == {"a.weight"}


def test_zeros_with_a_scale_of_0_and_a_missing_package(tmp_path, monkeypatch):
    weight = quick(lambda w: tcfp_jax.quantize(w))(matrix().at[0].set(0))
    zeros = replace(weight, scale=np.repeat(weight.scale, 32), scaling=Row())
    save_compressed(tmp_path, {"a.weight": zeros})
    change(tmp_path, lambda arrays: arrays["a.weight_scale"].__setitem__(0, 0))
    assert same_bits(
        dequantized(load_compressed(tmp_path)[0]["a.weight"]).T, dequantized(zeros)
    )
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    with refused(r'pip install "tcfp_jax\[export\]"', ImportError):
        load_compressed(tmp_path)
