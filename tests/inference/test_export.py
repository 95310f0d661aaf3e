"""Weights in folders that other engines read, byte by byte and without torch."""

import json
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import tcfp_jax
from pallas_kernels.operands import Block, Fp4, Row, Tensor
from tcfp_jax.formats import exact_share
from tcfp_jax.inference import safetensors
from tcfp_jax.inference.compressed_tensors import load_compressed, save_compressed
from tcfp_jax.inference.file_weights import _divisor_of
from tcfp_jax.inference.shared_scales import quantize_together
from tcfp_jax.weights.fp4_packing import quantize_fp4
from tcfp_jax.weights.quantization import quantize_weight
from tests.exports import (
    E2M1,
    E4M3,
    NAME,
    change,
    codes,
    dequantized,
    matrix,
    quantized,
    quick,
    same_file,
    saved,
)
from tests.helpers import parametrize, refused, same_bits

# Flax's norms promote bfloat16
pytestmark = pytest.mark.usefixtures("standard_promotion")


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


@parametrize("scaling", FP4 + FP8, ids=str)
def test_a_weight_is_written_by_the_format_and_read_back(tmp_path, scaling):
    operand = quantize_together({"w": matrix()}, scaling)["w"]
    entries = saved(tmp_path, operand)
    wanted = np.asarray(dequantized(operand))
    # number * (scale / global) and number * (scale * outer): the two roundings of an
    # outer and of its inverse.
    assert_allclose(decoded(entries), wanted, rtol=2**-22)
    if operand.outer is None or float(operand.outer) == 1:
        assert_array_equal(decoded(entries), wanted)
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
    assert_allclose(np.asarray(dequantized(back)).T, wanted, rtol=2**-22)
    group = config["quantization_config"]["config_groups"]["group_0"]
    assert group["targets"] == ["Linear"]
    assert group["weights"]["num_bits"] == (4 if isinstance(scaling, Fp4) else 8)
    again = tmp_path / "again"
    save_compressed(again, {f"{NAME}.weight": back})
    assert same_file(again, tmp_path)


def test_of_split_weights_the_larger_half_is_written(tmp_path):
    stored = quick(lambda w: quantize_weight(w, tcfp_jax.recipe("tcfp12"))[0])(
        matrix().T
    )
    assert stored.has_residual
    forward = stored.for_forward("hi")
    assert_array_equal(decoded(saved(tmp_path, stored)), dequantized(forward))
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["format"] == "float-quantized"
    assert config["config_groups"]["group_0"]["input_activations"] is None
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
    assert_array_equal(np.concatenate(joined), whole)
    assert len({float(w.outer) for w in together.values()}) == 1
    for alone, stack in zip(joined, stacked, strict=True):
        assert_array_equal(stack[0], alone)
    assert scales[0] == scales[1] == largest.scale
    names = {name: f"model.layers.0.self_attn.{name}_proj.weight" for name in parts}
    save_compressed(tmp_path, {names[name]: w for name, w in together.items()})
    apart = {}
    for i, (name, w) in enumerate(together.items()):
        apart[names[name]] = replace(w, outer=w.outer * 2**i)
    with refused(r"has outer=\S+ and \S+ \S+, but .* quantize_together"):
        save_compressed(tmp_path, apart)
    save_compressed(tmp_path, apart, fused=())
    with refused(r"as .*nvfp4.* as float, but engines"):
        save_compressed(
            tmp_path, {names["q"]: apart[names["q"]], names["k"]: parts["k"]}
        )
    with refused("differ in n alone"):
        quantize_together({"q": parts["q"], "k": matrix(16, 16)}, Fp4())
    with refused("across two of them"):
        quantize_together({"q": matrix(8, 32), "k": matrix(16, 32)}, Fp4(tile="square"))


def inverted(arrays):
    for name in arrays:
        if name.endswith("global_scale"):
            arrays[name] = np.float32(1) / arrays[name]


@parametrize(
    "amax, rule",
    [(0.02, "amax"), (1.0, "amax"), (109.0, "amax"), (36.0, "fold_exact")],
)
def test_an_inverted_global_scale_is_detected(tmp_path, amax, rule):
    operand = quantized(matrix(amax=amax), Fp4(rule=rule))
    saved(tmp_path, operand)
    change(tmp_path, inverted)
    with refused(r"largest value is 6 \* \d+ / .*beyond 65504.*inverted.*multiplier"):
        load_compressed(tmp_path)
    back = load_compressed(tmp_path, global_scale="multiplier")[0][f"{NAME}.weight"]
    assert_allclose(
        np.asarray(dequantized(back)).T, np.asarray(dequantized(operand)), rtol=2**-22
    )
    change(tmp_path, inverted)
    with refused(r"inverted.*global_scale=\"divisor\""):
        load_compressed(tmp_path, global_scale="multiplier")
    load_compressed(tmp_path)


@parametrize("amax", [1e-20, 1e-3, 5e3, 65e3])
def test_right_global_scales_are_never_taken_for_inverted(tmp_path, amax):
    operand = quantized(matrix(amax=amax))
    saved(tmp_path, operand)
    found = load_compressed(tmp_path)[0][f"{NAME}.weight"].forward
    assert same_bits((found.values, found.scale), (operand.values, operand.scale))


def test_most_weights_decide_and_the_writer_knows_its_reader(tmp_path):
    big = quantized(matrix(amax=1e6))
    with refused("inverted"):
        saved(tmp_path, big)
    three = {
        f"{NAME}.weight": big,
        **{f"layer.{i}.weight": quantized(matrix(seed=i)) for i in (1, 2)},
    }
    save_compressed(tmp_path, three)
    load_compressed(tmp_path)
    change(tmp_path, inverted)
    with refused(r"2 of 3 weights"):
        load_compressed(tmp_path)


def test_zeros_go_out_and_come_back(tmp_path):
    """The `outer` of zeros has no reciprocal, but any other has the same values."""
    zeros = quantized(np.where(np.arange(64) < 2, -np.zeros((32, 64), np.float32), 0))
    # as an engine's file may have it
    zeros = replace(zeros, outer=jnp.float32(0.5))
    entries = saved(tmp_path, zeros)
    assert not decoded(entries).any()
    assert np.signbit(decoded(entries)[:, :2]).all()
    assert (
        np.frombuffer(dict(entries)[f"{NAME}.weight_global_scale"]["data"], np.float32)
        == 1
    )
    back = load_compressed(tmp_path)[0][f"{NAME}.weight"]
    assert not np.asarray(dequantized(back)).any()
    assert float(back.forward.outer) == 1
    # NaN stays NaN.
    with refused(r"has outer=nan"):
        saved(tmp_path, replace(zeros, outer=jnp.float32(np.nan)))


def test_zeros_take_the_global_scale_of_their_family(tmp_path):
    q = quantized(matrix())
    zeros = quantized(jnp.zeros((32, 64)))
    names = [f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv"]
    for parts in (
        [q, zeros, zeros],
        [zeros, q, replace(zeros, outer=jnp.float32(1))],
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
            assert_allclose(dequantized(found[name]).T, dequantized(part), rtol=2**-22)
    with refused(r"multiply .* as one matrix with one global scale"):
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
    arrays, _ = safetensors._of_file(tmp_path, "model.safetensors")
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
    wrong = replace(quantized(matrix()), scaling=Fp4(rule="fold_exact"))
    with refused(r"'fold_exact'\), but only \d\d\.\d% of its scales are of that rule"):
        saved(tmp_path, wrong)
    saved(tmp_path, quantized(matrix()))
    arrays, _ = safetensors._of_file(tmp_path, "model.safetensors")
    claimed = {name: np.array(array) for name, array in arrays.items()}
    safetensors.write(
        tmp_path / "model.safetensors", claimed, {"tcfp_jax.fp4_rule": "fold_exact"}
    )
    with refused(r"are of that rule.*drop tcfp_jax.fp4_rule from the file's metadata"):
        load_compressed(tmp_path)


@parametrize("scaling", [Fp4(tile="square"), Block(32, "square")], ids=str)
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
        assert_allclose(
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
        with refused("positive and finite"):
            _divisor_of("w", np.float32(outer))
