"""Models that other people wrote, tiny and with random weights: Hugging Face's Flax Llama, BERT and GPT-2."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tcfp_jax.conversion.convert import convert_to_tcfp, find_weights, survey
from tcfp_jax.optim.feedback import error_feedback, layer_state
from tests.helpers import same_bits, variables_of

os.environ["HF_HUB_OFFLINE"] = "1"
pytest.importorskip("transformers", reason="transformers is not installed; it is part of the test extra")
ALL = ("linear", "small", "head")
TOKENS = jnp.arange(8).reshape(2, 4) + 1
SIZES = dict(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)


def llama():
    from transformers import FlaxLlamaForCausalLM, LlamaConfig

    config = LlamaConfig(**SIZES, max_position_embeddings=16)
    return FlaxLlamaForCausalLM(config, _do_init=False).module


def bert():
    from transformers import BertConfig, FlaxBertForMaskedLM

    return FlaxBertForMaskedLM(BertConfig(**SIZES, max_position_embeddings=16), _do_init=False).module


def gpt2():
    from transformers import FlaxGPT2LMHeadModel, GPT2Config

    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    return FlaxGPT2LMHeadModel(config, _do_init=False).module


MASK, POSITIONS = jnp.ones_like(TOKENS), jnp.broadcast_to(jnp.arange(4), (2, 4))
# The model, its inputs, its products (per layer 7, 6 and 4; then heads), and which of the two is traced first.
MODELS = {
    "llama": (llama, (TOKENS, MASK, POSITIONS), 7 + 1, "base"),
    "bert": (bert, (TOKENS, MASK, jnp.zeros_like(TOKENS), POSITIONS, None), 6 + 2, "converted"),
    "gpt2": (gpt2, (TOKENS, MASK, POSITIONS), 4 + 1, "converted"),
}


@pytest.mark.slow_except("gpt2")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", MODELS)
def test_model_converts_and_trains(name):
    build, inputs, products, first = MODELS[name]
    with jax.numpy_dtype_promotion("standard"):
        base = build()
        variables = variables_of(base, *inputs)
        converted = convert_to_tcfp(base, "tcfp12_fast", *inputs, include=ALL, strict=True)
        report = survey(converted)
        assert len(report.converted) == products and isinstance(converted, type(base))
        weights = find_weights(converted)
        assert len(weights) == products  # a tied head's weight is the table
        tx = error_feedback(weights)

        def forward():
            return jax.jit(lambda variables: base.apply(variables, *inputs)[0])(variables)

        @jax.jit
        def train(params):
            state = layer_state(tx.init(params))
            apply = lambda p: converted.apply({"params": p, "tcfp": state}, *inputs)[0]
            gradients = jax.grad(lambda p: jnp.mean(apply(p).astype(jnp.float32) ** 2))(params)
            return apply(params), gradients

        calls = {"base": forward, "converted": lambda: train(variables["params"])}
        results = {key: calls[key]() for key in sorted(calls, key=lambda key: key != first)}
        assert all(bool(np.isfinite(leaf).all()) for leaf in jax.tree.leaves(results))
        assert not same_bits(results["base"], results["converted"][0]) and same_bits(forward(), results["base"])
        shapes = jax.eval_shape(converted.init, jax.random.key(0), *inputs)
        assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, variables)  # checkpoints are interchangeable


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
def test_default_leaves_the_tied_head():
    with jax.numpy_dtype_promotion("standard"):
        report = survey(convert_to_tcfp(bert(), "tcfp12", *MODELS["bert"][1], include=("linear", "small")))
    reasons = {record.path: record.choice.reason for record in report.skipped}
    assert "output head" in reasons["bert/embeddings/word_embeddings"]
