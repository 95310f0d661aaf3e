"""Folders that other engines read, byte by byte and without torch."""

import dataclasses
import functools
import json
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors as peer

import tcfp_jax
from models.huggingface import (
    FUSED,
    from_huggingface,
    llama_config,
    llama_dict,
    to_huggingface,
)
from models.llama import Llama, LlamaConfig
from pallas_kernels.operands import Block, Fp4, Operand, Row, Tensor
from tcfp_jax import paths
from tcfp_jax.conversion import convert_to_tcfp, find_weights
from tcfp_jax.formats import exact_share, quantize_nvfp4
from tcfp_jax.inference import choose_codes, quantize_params, safetensors
from tcfp_jax.inference.compressed_tensors import load_compressed, save_compressed
from tcfp_jax.inference.file_weights import _divisor_of
from tcfp_jax.inference.shared_scales import quantize_together
from tcfp_jax.weights.fp4_packing import quantize_fp4
from tcfp_jax.weights.quantization import quantize_weight
from tcfp_jax.weights.stored import Stored
from tests.formats_oracles import QUICK
from tests.helpers import same_bits, variables_of

# Flax's norms promote bfloat16
pytestmark = pytest.mark.usefixtures("standard_promotion")
E4M3 = ml_dtypes.float8_e4m3fn
E2M1 = np.array(
    [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32
)
CONFIG = LlamaConfig(
    layers=2, width=64, heads=2, kv_heads=1, hidden=96, context=16, head="untied"
)
NAME = "model.layers.0.mlp.down_proj"
TOKENS = np.arange(8)[None] * 31 % 256


def matrix(n=32, k=64, seed=0, amax=None):
    w = np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32)
    return jnp.asarray(w if amax is None else w * np.float32(amax / abs(w).max()))


# A program for each scaling, where every operation would be one.
quick = functools.partial(jax.jit, compiler_options=QUICK)
dequantized = quick(lambda operand: operand.dequantize())
quantized = quick(quantize_fp4, static_argnums=1)


def codes(*shape, scaling=Fp4()):
    """An operand of zeros, which nothing computes."""
    scale = np.ones(scaling.scale_shape(shape), scaling.scale_dtype)
    outer = np.float32(0.5) if scaling.has_outer else None
    return Operand(
        np.zeros((*shape[:-1], shape[-1] // 2), np.uint8),
        scale,
        scaling=scaling,
        outer=outer,
    )


def blank(n):
    return Stored(codes(n, 64), None)


def saved(folder, operand, **options):
    save_compressed(folder, {f"{NAME}.weight": operand}, **options)
    return peer.deserialize((folder / "model.safetensors").read_bytes())


def decoded(entries):
    """Decode a weight by the format's description: an oracle of reader and writer."""
    held = {name.removeprefix(f"{NAME}.weight"): entry for name, entry in entries}

    def numbers(e, dtype):
        return np.frombuffer(e["data"], dtype).reshape(e["shape"]).astype(np.float32)

    scale = held["_scale"]
    if "_packed" not in held:
        values = numbers(held[""], E4M3)
        scales = numbers(scale, np.float32)
        for axis, count in enumerate(scales.shape):
            if scales.ndim == 2 and count > 1:
                side = -(-values.shape[axis] // count)
                scales = np.repeat(scales, side, axis)
        return values * scales
    packed = held["_packed"]
    packed = np.frombuffer(packed["data"], np.uint8).reshape(packed["shape"])
    values = np.empty((packed.shape[0], 2 * packed.shape[1]), np.float32)
    values[:, ::2] = E2M1[packed & 15]
    values[:, 1::2] = E2M1[packed >> 4]
    if "_global_scale" in held:
        assert (scale["dtype"], held["_global_scale"]["shape"]) == ("F8_E4M3", [1])
        scales = numbers(scale, E4M3) / numbers(held["_global_scale"], np.float32)
    else:
        assert scale["dtype"] == "U8"
        scales = np.exp2(numbers(scale, np.uint8) - 127)
    return values * np.repeat(scales, values.shape[1] // scales.shape[1], 1)


FP4 = [Fp4(), Fp4(tile="square"), Fp4(rule="one_level"), Fp4("mxfp4")]
FP8 = [Tensor(), Tensor("float32"), Row(), Block(32)]


@pytest.mark.parametrize("scaling", FP4 + FP8, ids=str)
def test_a_weight_is_written_by_the_format_and_read_back(tmp_path, scaling):
    operand = quantize_together({"w": matrix()}, scaling)["w"]
    entries = saved(tmp_path, operand)
    wanted = np.asarray(dequantized(operand))
    # number * (scale / global) and number * (scale * outer): the two roundings of an
    # outer and of its inverse.
    np.testing.assert_allclose(decoded(entries), wanted, rtol=2**-22)
    if operand.outer is None or float(operand.outer) == 1:
        np.testing.assert_array_equal(decoded(entries), wanted)
    assert (
        dict(entries)[f"{NAME}.weight_scale"]["dtype"]
        == {"nvfp4": "F8_E4M3", "mxfp4": "U8", None: "F32"}[
            getattr(scaling, "format", None)
        ]
    )
    tensors, config = load_compressed(tmp_path)
    back = tensors[f"{NAME}.weight"]
    assert back.shape == operand.shape[::-1]
    if getattr(scaling, "tile", "") == "square" and isinstance(scaling, Fp4):
        scaling = Fp4(scaling.format)  # a file has a scale for each vector
    assert back.scaling == scaling
    np.testing.assert_allclose(np.asarray(dequantized(back)).T, wanted, rtol=2**-22)
    group = config["quantization_config"]["config_groups"]["group_0"]
    assert group["targets"] == ["Linear"] and group["weights"]["num_bits"] == (
        4 if isinstance(scaling, Fp4) else 8
    )
    again = tmp_path / "again"
    save_compressed(again, {f"{NAME}.weight": back})
    assert same_file(again, tmp_path)


def test_of_split_weights_the_larger_half_is_written(tmp_path):
    stored = quick(lambda w: quantize_weight(w, tcfp_jax.recipe("tcfp12"))[0])(
        matrix().T
    )
    assert stored.has_residual
    forward = stored.for_forward("hi")
    np.testing.assert_array_equal(
        decoded(saved(tmp_path, stored)), dequantized(forward)
    )
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert (
        config["format"] == "float-quantized"
        and config["config_groups"]["group_0"]["input_activations"] is None
    )
    saved(tmp_path, stored, activations="float8")
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert (
        config["config_groups"]["group_0"]["input_activations"]["strategy"] == "token"
    )


def test_weights_that_are_multiplied_as_one_share_one_scale(tmp_path):
    parts = {
        "q": matrix(32, 32, 0),
        "k": matrix(16, 32, 1) * 10.0,
        "v": matrix(16, 32, 2) * 100.0,
    }

    @quick
    def all_of(parts):
        whole = quantize_fp4(jnp.concatenate(list(parts.values())), Fp4())
        stacks = {name: jnp.stack([w, 2 * w]) for name, w in parts.items()}
        eight = quantize_together(parts, Tensor())
        together = quantize_together(parts, Fp4())
        of_stacks = quantize_together(stacks, Fp4())
        return (
            together,
            whole.dequantize(),
            [one.dequantize() for one in together.values()],
            [one.dequantize() for one in of_stacks.values()],
            [one.scale for one in eight.values()],
            tcfp_jax.quantize(parts["v"]),
        )

    together, whole, joined, stacked, scales, largest = all_of(parts)
    np.testing.assert_array_equal(np.concatenate(joined), whole)
    assert len({float(w.outer) for w in together.values()}) == 1
    for alone, stack in zip(joined, stacked, strict=True):
        np.testing.assert_array_equal(stack[0], alone)
    assert scales[0] == scales[1] == largest.scale
    names = {name: f"model.layers.0.self_attn.{name}_proj.weight" for name in parts}
    save_compressed(tmp_path, {names[name]: w for name, w in together.items()})
    apart = {}
    for i, (name, w) in enumerate(together.items()):
        apart[names[name]] = dataclasses.replace(w, outer=w.outer * 2**i)
    with pytest.raises(
        ValueError, match=r"has outer=\S+ and \S+ \S+, but .* quantize_together"
    ):
        save_compressed(tmp_path, apart)
    save_compressed(tmp_path, apart, fused=())
    with pytest.raises(ValueError, match=r"as .*nvfp4.* as float, but engines"):
        save_compressed(
            tmp_path, {names["q"]: apart[names["q"]], names["k"]: parts["k"]}
        )
    with pytest.raises(ValueError, match="differ in n alone"):
        quantize_together({"q": parts["q"], "k": matrix(16, 16)}, Fp4())
    with pytest.raises(ValueError, match="across two of them"):
        quantize_together({"q": matrix(8, 32), "k": matrix(16, 32)}, Fp4(tile="square"))


def same_file(folder, other):
    """Equal but for the order of the metadata, which the package leaves open."""
    (arrays, metadata), (others, noted) = (
        safetensors._of_file(one / "model.safetensors") for one in (folder, other)
    )
    return (
        same_bits(arrays, others) and list(arrays) == list(others) and metadata == noted
    )


def change(folder, changed):
    """The file again, with other arrays."""
    arrays, metadata = safetensors._of_file(folder / "model.safetensors")
    arrays = {name: np.array(array) for name, array in arrays.items()}
    changed(arrays)
    safetensors.write(folder / "model.safetensors", arrays, metadata)


def inverted(arrays):
    for name in arrays:
        if name.endswith("global_scale"):
            arrays[name] = np.float32(1) / arrays[name]


@pytest.mark.parametrize(
    ("amax", "rule"),
    [(0.02, "amax"), (1.0, "amax"), (109.0, "amax"), (36.0, "fold_exact")],
)
def test_an_inverted_global_scale_is_detected(tmp_path, amax, rule):
    operand = quantized(matrix(amax=amax), Fp4(rule=rule))
    saved(tmp_path, operand)
    change(tmp_path, inverted)
    with pytest.raises(
        ValueError,
        match=r"largest value is 6 \* \d+ / .*beyond 65504.*inverted.*multiplier",
    ):
        load_compressed(tmp_path)
    back = load_compressed(tmp_path, global_scale="multiplier")[0][f"{NAME}.weight"]
    np.testing.assert_allclose(
        np.asarray(dequantized(back)).T, np.asarray(dequantized(operand)), rtol=2**-22
    )
    change(tmp_path, inverted)
    with pytest.raises(ValueError, match=r"inverted.*global_scale=\"divisor\""):
        load_compressed(tmp_path, global_scale="multiplier")
    load_compressed(tmp_path)


@pytest.mark.parametrize("amax", [1e-20, 1e-3, 5e3, 65e3])
def test_right_global_scales_are_never_taken_for_inverted(tmp_path, amax):
    operand = quantized(matrix(amax=amax))
    saved(tmp_path, operand)
    found = load_compressed(tmp_path)[0][f"{NAME}.weight"].forward
    assert same_bits((found.values, found.scale), (operand.values, operand.scale))


def test_most_weights_decide_and_the_writer_knows_its_reader(tmp_path):
    big = quantized(matrix(amax=1e6))
    with pytest.raises(ValueError, match="inverted"):
        saved(tmp_path, big)
    three = {
        f"{NAME}.weight": big,
        **{f"layer.{i}.weight": quantized(matrix(seed=i)) for i in (1, 2)},
    }
    save_compressed(tmp_path, three)
    load_compressed(tmp_path)
    change(tmp_path, inverted)
    with pytest.raises(ValueError, match=r"2 of 3 weights"):
        load_compressed(tmp_path)


def test_zeros_go_out_and_come_back(tmp_path):
    """The `outer` of zeros has no reciprocal, but any other has the same values."""
    zeros = quantized(np.where(np.arange(64) < 2, -np.zeros((32, 64), np.float32), 0))
    # as an engine's file may have it
    zeros = dataclasses.replace(zeros, outer=jnp.float32(0.5))
    entries = saved(tmp_path, zeros)
    assert not decoded(entries).any() and np.signbit(decoded(entries)[:, :2]).all()
    assert (
        np.frombuffer(dict(entries)[f"{NAME}.weight_global_scale"]["data"], np.float32)
        == 1
    )
    back = load_compressed(tmp_path)[0][f"{NAME}.weight"]
    assert not np.asarray(dequantized(back)).any() and float(back.forward.outer) == 1
    # NaN stays NaN.
    with pytest.raises(ValueError, match=r"has outer=nan"):
        saved(tmp_path, dataclasses.replace(zeros, outer=jnp.float32(np.nan)))


def test_zeros_take_the_global_scale_of_their_family(tmp_path):
    q = quantized(matrix())
    zeros = quantized(jnp.zeros((32, 64)))
    names = [f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv"]
    for parts in (
        [q, zeros, zeros],
        [zeros, q, dataclasses.replace(zeros, outer=jnp.float32(1))],
        [zeros] * 3,
    ):
        save_compressed(tmp_path, dict(zip(names, parts, strict=True)))
        found = load_compressed(tmp_path)[0]
        wanted = (
            np.float32(1)
            if parts[1] is parts[0]
            else np.float32(1) / _divisor_of("q", np.float32(q.outer))
        )
        assert {float(found[name].forward.outer) for name in names} == {wanted}
        for name, part in zip(names, parts, strict=True):
            np.testing.assert_allclose(
                dequantized(found[name]).T, dequantized(part), rtol=2**-22
            )
    with pytest.raises(
        ValueError, match=r"multiply .* as one matrix with one global scale"
    ):
        save_compressed(
            tmp_path, dict(zip(names, [q, zeros, quantized(2 * matrix())], strict=True))
        )


def test_every_weight_of_a_file_has_its_own_rule(tmp_path):
    """Products are FP8 by the rule "fold_exact", so no weight may lose or gain it."""
    scalings = {
        "a.weight": Fp4(rule="fold_exact"),
        "b.weight": Fp4(),
        "c.weight": Fp4(rule="one_level"),
    }
    scalings["d.weight"] = Fp4("mxfp4")
    tensors = {
        name: codes(32, 64, scaling=scaling) for name, scaling in scalings.items()
    }
    tensors["a.weight"] = quantized(matrix(), Fp4(rule="fold_exact"))
    save_compressed(tmp_path, tensors)
    found, _ = load_compressed(tmp_path)
    assert {name: found[name].scaling for name in scalings} == scalings
    assert exact_share(found["a.weight"].forward.scale) == 1
    # Files of before have one rule for all of their weights, or none.
    arrays, _ = safetensors._of_file(tmp_path / "model.safetensors")
    ours = {
        name: np.array(array) for name, array in arrays.items() if name.startswith("a.")
    }
    for metadata, rule in (
        ({"tcfp_jax.fp4_rule": "fold_exact"}, "fold_exact"),
        ({}, "amax"),
    ):
        safetensors.write(tmp_path / "model.safetensors", ours, metadata)
        assert load_compressed(tmp_path)[0]["a.weight"].scaling == Fp4(rule=rule)


def test_a_rule_that_the_scales_do_not_follow_is_refused(tmp_path):
    wrong = dataclasses.replace(quantized(matrix()), scaling=Fp4(rule="fold_exact"))
    with pytest.raises(
        ValueError,
        match=r"rule='fold_exact'\), but only \d\d\.\d% of its scales are of that rule",
    ):
        saved(tmp_path, wrong)
    saved(tmp_path, quantized(matrix()))
    arrays, _ = safetensors._of_file(tmp_path / "model.safetensors")
    claimed = {name: np.array(array) for name, array in arrays.items()}
    safetensors.write(
        tmp_path / "model.safetensors", claimed, {"tcfp_jax.fp4_rule": "fold_exact"}
    )
    with pytest.raises(
        ValueError,
        match=r"are of that rule.*drop tcfp_jax.fp4_rule from the file's metadata",
    ):
        load_compressed(tmp_path)


@pytest.mark.parametrize("scaling", [Fp4(tile="square"), Block(32, "square")], ids=str)
def test_the_last_square_of_a_family_may_be_short(scaling, tmp_path):
    gate = matrix(n=32)
    up = matrix(n=24, seed=1)
    both = quantize_together({"gate_proj": gate, "up_proj": up}, scaling)
    for name, w in (("gate_proj", gate), ("up_proj", up)):
        assert both[name].shape == w.shape
        error = np.linalg.norm(both[name].dequantize() - w) / np.linalg.norm(w)
        assert error < (0.04 if isinstance(scaling, Block) else 0.15)
    save_compressed(tmp_path, {f"{name}.weight": one for name, one in both.items()})
    back = load_compressed(tmp_path)[0]
    for name, one in both.items():
        np.testing.assert_allclose(
            dequantized(back[f"{name}.weight"]).T, one.dequantize(), rtol=1e-6
        )


def test_the_divisor_gives_the_outer_back():
    kept = 0
    for outer in (
        np.random.default_rng(0).uniform(2**-16, 2**-8, 300).astype(np.float32)
    ):
        back = np.float32(1) / _divisor_of("w", outer)
        assert abs(back / outer - 1) <= 2**-23
        kept += back == outer
    assert kept > 200  # no float32 has the reciprocal of the others
    for outer in (0.0, np.inf, 1e-45):
        with pytest.raises(ValueError, match="positive and finite"):
            _divisor_of("w", np.float32(outer))


W = {f"{NAME}.weight": lambda: codes(32, 64)}


@pytest.mark.parametrize(
    ("tensors", "options", "error", "message"),
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
                "a.weight": lambda: dataclasses.replace(
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
        (W, dict(ignore=[NAME]), ValueError, "which is quantized"),
        (W, dict(activations="float8"), ValueError, "FP8 weights"),
        (W, dict(activations="int8"), ValueError, "unknown"),
    ],
)
def test_what_cannot_be_written_is_refused(tmp_path, tensors, options, error, message):
    with pytest.raises(error, match=message):
        save_compressed(
            tmp_path, {name: made() for name, made in tensors.items()}, **options
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(quant_method="gptq"), "gptq"),
        (dict(config_groups={"g": {"format": "pack-quantized"}}), "pack-quantized"),
        (dict(transform_config={"config_groups": {"u": {}}}), "rotated"),
        (dict(sparsity_config={"format": "sparse-24-bitmask"}), "sparse"),
    ],
)
def test_a_config_that_cannot_be_read_is_refused(tmp_path, changes, message):
    saved(tmp_path, codes(32, 64))
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= changes
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        load_compressed(tmp_path)


def put(part, array):
    """Function that sets a part of the weight."""
    return lambda arrays: arrays.update({f"{NAME}.weight{part}": array})


@pytest.mark.parametrize(
    ("changed", "message"),
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
    with pytest.raises(ValueError, match=message):
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
    assert found["format"] == "mixed-precision" and found["ignore"] == ["lm_head", "c"]
    groups = [
        (group["format"], group["targets"]) for group in found["config_groups"].values()
    ]
    assert groups == [("nvfp4-pack-quantized", ["a"]), ("float-quantized", ["b"])]
    whole, _ = load_compressed(tmp_path)
    arrays, _ = safetensors._of_file(tmp_path / "model.safetensors")
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
        json.dumps(dict(weight_map=files))
    )
    parts, _ = load_compressed(tmp_path)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), whole, parts))
    with pytest.raises(ValueError, match="unknown"):
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
    found, metadata = safetensors._of_file(tmp_path / "file")
    assert same_bits(found, arrays) and metadata == {"format": "pt"}
    assert {name: array.dtype for name, array in found.items()} == {
        name: array.dtype for name, array in arrays.items()
    }
    with pytest.raises(ValueError, match="complex64"):
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
    zeros = dataclasses.replace(
        weight, scale=np.repeat(weight.scale, 32), scaling=Row()
    )
    save_compressed(tmp_path, {"a.weight": zeros})
    change(tmp_path, lambda arrays: arrays["a.weight_scale"].__setitem__(0, 0))
    assert same_bits(
        dequantized(load_compressed(tmp_path)[0]["a.weight"]).T, dequantized(zeros)
    )
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    with pytest.raises(ImportError, match=r'pip install "tcfp_jax\[export\]"'):
        load_compressed(tmp_path)


@pytest.fixture(scope="module")
def llama():
    return variables_of(Llama(CONFIG, "float32"), jnp.zeros((1, 4), jnp.int32))[
        "params"
    ]


@pytest.fixture(scope="module")
def served_llama():
    """(a Llama that multiplies in FP4, its weights)."""
    with jax.numpy_dtype_promotion("standard"):
        model = convert_to_tcfp(
            Llama(CONFIG), "nvfp4", TOKENS, include=("linear", "small")
        )
        return model, find_weights(model)


@pytest.fixture(scope="module")
def exported(llama):
    with jax.numpy_dtype_promotion("standard"):
        return to_huggingface(llama, CONFIG, Fp4(), jnp.float32)


def test_a_llama_goes_out_and_comes_back(tmp_path, llama, exported):
    tensors = dict(exported)
    assert "lm_head.weight" in tensors and len(tensors) == 3 + 2 * 9
    save_compressed(tmp_path, tensors, config=llama_dict(CONFIG))
    found, config = load_compressed(tmp_path)
    found["lm_head.weight"] = blank(256)
    head = from_huggingface(found, CONFIG)
    assert (
        head["tcfp"]["head"]["kernel"].shape == (64, 256)
        and head["params"]["head"] == {}
    )
    assert to_huggingface(head, CONFIG)["lm_head.weight"].shape == (256, 64)
    found, config = load_compressed(tmp_path)
    assert llama_config(config) == CONFIG
    variables = from_huggingface(found, CONFIG)
    assert sorted(variables["tcfp"]["layers"]) == [
        "down",
        "gate",
        "key",
        "output",
        "query",
        "up",
        "value",
    ]
    np.testing.assert_array_equal(
        variables["params"]["head"]["kernel"], llama["head"]["kernel"]
    )
    up = variables["tcfp"]["layers"]["up"]["kernel"]
    assert up.shape == (2, 64, 96)
    # Served weights are written as they came; they are quantized already, so `scaling`
    # is refused.
    again = to_huggingface(variables, CONFIG, dtype=jnp.float32)
    save_compressed(tmp_path / "again", again, config=llama_dict(CONFIG))
    assert same_file(tmp_path / "again", tmp_path)
    with pytest.raises(ValueError, match="quantized already"):
        to_huggingface(variables, CONFIG, Fp4())
    plain = to_huggingface(llama, CONFIG, dtype=jnp.float32)
    # activations stay float here
    plain["model.layers.0.mlp.up_proj.input_global_scale"] = jnp.ones(1)
    floats = from_huggingface(plain, CONFIG)["params"]
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), floats, llama))


def test_served_variables_go_out_if_families_share_a_scale(
    tmp_path, llama, served_llama
):
    """One call makes them so, and the error names that call."""
    names = ("query", "key", "value")
    weights = {
        path: weight
        for path, weight in served_llama[1].items()
        if path.split("/")[1] in names
    }

    def layers(variables):
        return {n: variables["tcfp"]["layers"][n]["kernel"].forward for n in names}

    served, apart = (
        quantize_params(llama, weights, fused=fused) for fused in (FUSED[:1], ())
    )
    floats = {n: jnp.swapaxes(llama["layers"][n]["kernel"], -1, -2) for n in names}
    amax = jnp.max(jnp.stack([jnp.abs(w).max((1, 2)) for w in floats.values()]), 0)
    expected = quick(
        lambda tree: jax.tree.map(
            jax.vmap(lambda w, top: quantize_nvfp4(w, amax=top)),
            tree,
            dict.fromkeys(names, amax),
        )
    )(floats)
    for name, one in layers(served).items():
        assert same_bits(tuple(expected[name]), (one.values, one.scale, one.outer))
    save_compressed(tmp_path / "served", to_huggingface(served, CONFIG))
    with pytest.raises(
        ValueError,
        match=(
            r"has outer=.* name your layers in fused= of quantize_params and"
            r" choose_code"
        ),
    ):
        save_compressed(tmp_path / "apart", to_huggingface(apart, CONFIG))

    asked = []

    def choose(path, w):
        asked.append((path, w.shape))
        made = jax.tree.map(
            lambda leaf: np.stack([leaf] * 2), blank(w.shape[-2]).forward
        )
        return dataclasses.replace(made, outer=np.float32([0.5, 0.25]))

    chosen = choose_codes(apart, llama, weights, choose, fused=[names])
    assert asked == [("layers/key/kernel", (2, 128, 64))]
    assert [one.values.shape for one in layers(chosen).values()] == [
        (2, 64, 32),
        (2, 32, 32),
        (2, 32, 32),
    ]
    save_compressed(tmp_path / "chosen", to_huggingface(chosen, CONFIG))
    with pytest.raises(
        ValueError, match=r"fused has \('q', 'k'\), but the FP4 weights are"
    ):
        quantize_params(llama, weights, fused=[("q", "k")])


def test_a_folder_serves_in_a_converted_model(tmp_path, llama, exported, served_llama):
    """Products read the codes of the file."""
    save_compressed(tmp_path, exported, config=llama_dict(CONFIG))
    tensors, config = load_compressed(tmp_path)
    tokens, (model, weights) = TOKENS, served_llama
    assert llama_config(config) == CONFIG
    served = from_huggingface(tensors, CONFIG)
    apply = quick(Llama(CONFIG).apply)
    assert set(paths.entries(served["tcfp"])) == set(weights)
    floats = dict(tensors)
    for name, tensor in tensors.items():
        if isinstance(tensor, Stored):
            floats[name] = dequantized(tensor.forward)
    wanted = np.asarray(apply(from_huggingface(floats, CONFIG), tokens))
    # The plain model rounds number * scale * outer to bfloat16 once; W4A16 does not.
    np.testing.assert_allclose(
        np.asarray(quick(model.apply)(served, tokens)), wanted, atol=0.05 * wanted.std()
    )
    low = np.asarray(apply({"params": llama}, tokens))
    assert abs(low - wanted).max() > 0.1 * wanted.std()


def test_what_is_no_llama_is_refused(llama):
    tensors = to_huggingface(llama, CONFIG)
    with pytest.raises(ValueError, match="no tensors of a Llama"):
        from_huggingface(tensors | {"visual.weight": jnp.ones(2)}, CONFIG)
    with pytest.raises(ValueError, match="embedding/embedding is quantized"):
        from_huggingface(tensors | {"model.embed_tokens.weight": blank(32)}, CONFIG)
    with pytest.raises(ValueError, match="up_proj in different ways"):
        from_huggingface(
            tensors | {"model.layers.1.mlp.up_proj.weight": blank(32)}, CONFIG
        )
    missing = {name: t for name, t in tensors.items() if "layers.1.mlp.up" not in name}
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj\.weight is missing"):
        from_huggingface(missing, CONFIG)
    for changes in (
        dict(model_type="gpt2"),
        dict(attention_bias=True),
        dict(rope_scaling=dict(rope_type="yarn")),
    ):
        with pytest.raises(ValueError, match=r"is not one of|computes"):
            llama_config(llama_dict(CONFIG) | changes)
    for name in (
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
        "rms_norm_eps",
        "rope_theta",
    ):
        for value in ([1], "64", -1):
            with pytest.raises(ValueError, match=f"{name}=.*is not a positive number"):
                llama_config(llama_dict(CONFIG) | {name: value})
    with pytest.raises(ValueError, match="hidden_size=None is not a positive number"):
        llama_config(
            {
                name: value
                for name, value in llama_dict(CONFIG).items()
                if name != "hidden_size"
            }
        )
    for found, words in (
        ([], "'list' is not one of"),
        (llama_dict(CONFIG) | {"rope_scaling": [1]}, "not objects"),
    ):
        with pytest.raises(ValueError, match=words):
            llama_config(found)
