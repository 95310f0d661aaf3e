"""A whole Llama in a folder that other engines read."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from models.huggingface.configs import llama_config, llama_dict
from models.huggingface.tensors import FUSED, from_huggingface, to_huggingface
from models.nets.llama import Llama
from pallas_kernels.operands import Fp4
from tcfp_jax import paths
from tcfp_jax.conversion import convert_to_tcfp, find_weights
from tcfp_jax.formats import quantize_nvfp4
from tcfp_jax.inference import choose_codes, quantize_params
from tcfp_jax.inference.compressed_tensors import load_compressed, save_compressed
from tcfp_jax.weights.stored import Stored
from tests.exports import (
    CONFIG,
    TOKENS,
    blank,
    dequantized,
    quick,
    same_file,
)
from tests.helpers import refused, same_bits, variables_of

# Flax's norms promote bfloat16
pytestmark = pytest.mark.usefixtures("standard_promotion")


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
    assert "lm_head.weight" in tensors
    assert len(tensors) == 3 + 2 * 9
    save_compressed(tmp_path, tensors, config=llama_dict(CONFIG))
    found, config = load_compressed(tmp_path)
    found["lm_head.weight"] = blank(256)
    head = from_huggingface(found, CONFIG)
    assert head["tcfp"]["head"]["kernel"].shape == (64, 256)
    assert head["params"]["head"] == {}
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
    assert_array_equal(variables["params"]["head"]["kernel"], llama["head"]["kernel"])
    up = variables["tcfp"]["layers"]["up"]["kernel"]
    assert up.shape == (2, 64, 96)
    # Served weights are written as they came; they are quantized already, so `scaling`
    # is refused.
    again = to_huggingface(variables, CONFIG, dtype=jnp.float32)
    save_compressed(tmp_path / "again", again, config=llama_dict(CONFIG))
    assert same_file(tmp_path / "again", tmp_path)
    with refused("quantized already"):
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
    with refused(
        r"has outer=.* name your layers in fused= of quantize_params and"
        r" choose_code"
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
    with refused(r"fused has \('q', 'k'\), but the FP4 weights are"):
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
    assert_allclose(
        np.asarray(quick(model.apply)(served, tokens)), wanted, atol=0.05 * wanted.std()
    )
    low = np.asarray(apply({"params": llama}, tokens))
    assert abs(low - wanted).max() > 0.1 * wanted.std()


def test_what_is_no_llama_is_refused(llama):
    tensors = to_huggingface(llama, CONFIG)
    with refused("no tensors of a Llama"):
        from_huggingface(tensors | {"visual.weight": jnp.ones(2)}, CONFIG)
    with refused("embedding/embedding is quantized"):
        from_huggingface(tensors | {"model.embed_tokens.weight": blank(32)}, CONFIG)
    with refused("up_proj in different ways"):
        from_huggingface(
            tensors | {"model.layers.1.mlp.up_proj.weight": blank(32)}, CONFIG
        )
    missing = {name: t for name, t in tensors.items() if "layers.1.mlp.up" not in name}
    with refused(r"layers\.1\.mlp\.up_proj\.weight is missing"):
        from_huggingface(missing, CONFIG)
    for changes in (
        {"model_type": "gpt2"},
        {"attention_bias": True},
        {"rope_scaling": {"rope_type": "yarn"}},
    ):
        with refused(r"is not one of|computes"):
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
            with refused(f"{name}=.*is not a positive number"):
                llama_config(llama_dict(CONFIG) | {name: value})
    with refused("hidden_size=None is not a positive number"):
        llama_config(
            {
                name: value
                for name, value in llama_dict(CONFIG).items()
                if name != "hidden_size"
            }
        )
    for found, words in (
        ([], "'list' is not one of"),
        (llama_dict(CONFIG) | {"rope_scaling": [1]}, "is not an object"),
    ):
        with refused(words):
            llama_config(found)
