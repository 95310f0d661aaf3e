"""Models of Transformers compute the same here; logits of `transformers.json` were
recorded from its torch models.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from models.huggingface.configs import llama_config, llama_dict
from models.huggingface.tensors import from_huggingface, to_huggingface
from models.nets.llama import Llama
from tests.helpers import parametrize, refused, slow
from tests.models.record_transformers import CASES, EVERY, FILE, TOKENS, weights_of

pytestmark = pytest.mark.usefixtures("standard_promotion")
RECORDED = json.loads(FILE.read_text())


def read(case):
    """Return (config, tensors by torch's names, parameters) of a recorded model."""
    recorded = RECORDED[case]
    config = llama_config(recorded["config"])
    tensors = weights_of(recorded["shapes"])
    # as old files have it
    computed = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4)}
    return config, tensors, from_huggingface(tensors | computed, config)["params"]


@parametrize("case", CASES)
def test_logits_are_those_of_transformers(case):
    config, tensors, params = read(case)
    logits = jax.jit(Llama(config, "float32").apply)(
        {"params": params}, jnp.asarray(TOKENS)
    )
    expected = np.asarray(RECORDED[case]["logits"])
    assert expected.std() > 0.3
    np.testing.assert_allclose(logits[..., ::EVERY], expected, atol=1e-4)
    back = to_huggingface(params, config, dtype=jnp.float32)
    assert sorted(back) == sorted(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_allclose(back[name], tensor, atol=1e-6, err_msg=name)


@parametrize("case", [pytest.param("llama 3.1, tied", marks=slow), "gemma3_text"])
def test_documents_of_a_row_do_not_see_each_other(case):
    """A row of two documents has the logits, and the losses, of each alone."""
    config, _, params = read(case)
    apply = jax.jit(
        Llama(dataclasses.replace(config, attention="products"), "float32").apply
    )
    tokens = jnp.asarray(TOKENS[:1])
    documents = jnp.asarray([[3] * 7 + [1] * 5])
    targets = jnp.full((1, 12), -100).at[0, 9].set(5)
    variables = {"params": params}
    together = apply(variables, tokens, None, documents)
    losses = apply(variables, tokens, targets, documents)
    second = apply(variables, tokens[:, 7:])
    np.testing.assert_allclose(
        together[:, :7], apply(variables, tokens[:, :7]), atol=1e-5
    )
    np.testing.assert_allclose(together[:, 7:], second, atol=1e-5)
    assert abs(apply(variables, tokens)[:, 7:] - second).max() > 0.01
    assert np.flatnonzero(losses).tolist() == [9]
    assert float(losses[0, 9]) == pytest.approx(
        float(jax.nn.logsumexp(second[0, 2]) - second[0, 2, 5]), abs=1e-4
    )


def test_a_llama_is_described_and_others_copy_their_config():
    stretched = llama_config(RECORDED["llama 3.1, tied"]["config"])
    assert stretched.rope_original == 16
    assert llama_config(llama_dict(stretched)) == stretched
    for case in ("qwen3", "gemma"):
        with refused(r"copy the config\.json"):
            llama_dict(llama_config(RECORDED[case]["config"]))


@parametrize(
    ("case", "changes", "message"),
    [
        ("llama", dict(model_type="gpt2"), "'gpt2' is not one of"),
        ("llama", dict(rope_scaling=dict(rope_type="yarn")), "rope_type='yarn'"),
        (
            "llama",
            dict(rope_scaling=dict(rope_type="llama3", factor=8.0)),
            "low_freq_factor=None",
        ),
        ("qwen2", dict(use_sliding_window=True), "use_sliding_window=True"),
        ("gemma", dict(hidden_activation="silu"), "hidden_act='silu'.*'gelu'"),
        (
            "gemma3_text",
            dict(layer_types=["full_attention"] * 2 + ["sliding_attention"]),
            "do not repeat",
        ),
    ],
)
def test_models_that_compute_otherwise_are_refused(case, changes, message):
    with refused(message):
        llama_config(RECORDED[case]["config"] | changes)


@parametrize(
    ("dtype", "message"),
    [
        (np.int32, "is int32, which is none of the floats"),
        (ml_dtypes.float8_e4m3fn, "is float8_e4m3fn, which is none of the floats"),
    ],
)
def test_weights_that_are_no_floats_are_not_read_as_floats(dtype, message):
    recorded = RECORDED["llama"]
    arrays = weights_of(recorded["shapes"])
    name = "model.layers.0.mlp.up_proj.weight"
    arrays[name] = arrays[name].astype(dtype)
    with refused(f"{name} {message}"):
        from_huggingface(arrays, llama_config(recorded["config"]))
