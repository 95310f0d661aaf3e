"""Continuation of prompts with a cache of keys and values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from models.nets.attention import CACHE
from models.nets.families import plain_model
from models.nets.shapes import GPTConfig, LlamaConfig, MoeConfig
from models.training.sampling import continued, prompt_ids
from tests.helpers import parametrize, refused, slow_except

pytestmark = pytest.mark.usefixtures("standard_promotion")
SIZES = dict(layers=2, width=32, heads=4, context=64)
LLAMA = dict(**SIZES, kv_heads=2, hidden=48)
GEMMA = dict(
    window=5,
    local_theta=100.0,
    attention_cap=2.0,
    logit_cap=4.0,
    post_norms="on",
    activation="gelu",
    embedding_scale=5.0,
)
MODELS = {
    "gpt": GPTConfig(**SIZES),
    "llama": LlamaConfig(**LLAMA, attention="xla"),
    "qwen3": LlamaConfig(**LLAMA, bias="qkv", qk_norm="heads", head_dim=16),
    "gemma": LlamaConfig(**LLAMA, **GEMMA),
    "moe": MoeConfig(**LLAMA, experts=4, chosen=2),
}
TOKENS = np.random.default_rng(0).integers(0, 256, (1, 24), np.int32)
PROMPT = 10


@slow_except("gpt", "gemma")
@parametrize("name", MODELS)
def test_logits_are_equal_with_and_without_a_cache(name):
    model = plain_model(MODELS[name], "float32")
    params = jax.jit(model.init)(jax.random.key(0), TOKENS)["params"]
    # Large enough that attention is far from uniform
    variables = {"params": jax.tree.map(lambda leaf: 3 * leaf, params)}
    exact = jax.jit(model.apply)(variables, TOKENS)

    @jax.jit
    def rest(variables, tokens):
        _, held = model.apply(variables, tokens[:, :PROMPT], start=0, mutable=[CACHE])

        def one(cache, place):
            token = jax.lax.dynamic_slice_in_dim(tokens, place, 1, axis=1)
            logits, held = model.apply(
                {**variables, CACHE: cache}, token, start=place, mutable=[CACHE]
            )
            return held[CACHE], logits[:, 0]

        cache = jax.tree.map(room, held[CACHE])
        return jax.lax.scan(one, cache, jnp.arange(PROMPT, tokens.shape[1]))[1]

    found = jnp.moveaxis(rest(variables, TOKENS), 0, 1)
    largest = float(jnp.abs(exact).max())
    assert largest > 0.5
    # Nine float32 sums in a row of at most 128 terms each, in another order
    assert_allclose(found, exact[:, PROMPT:], atol=9 * 128 * 2**-24 * largest)


def room(leaf):
    """Room for the other tokens, with values that no token may see."""
    widths = [(0, 0)] * leaf.ndim
    widths[-3] = (0, TOKENS.shape[1] - PROMPT)
    return jnp.pad(leaf, widths, constant_values=1e3)


def test_a_prompt_continues_as_without_a_cache():
    model = plain_model(MODELS["gpt"], "float32")
    params = jax.jit(model.init)(jax.random.key(1), TOKENS)["params"]
    variables = {"params": jax.tree.map(lambda leaf: 3 * leaf, params)}
    context = MODELS["gpt"].context
    # The context ends the text behind the twelfth token
    prompt = "a prompt of bytes".ljust(context - 12, ".")
    found = continued(model, variables, prompt, context=context)
    ids = list(prompt.encode())
    apply = jax.jit(model.apply)
    for _ in range(12):
        tokens = np.zeros((1, context), np.int32)
        tokens[0, : len(ids)] = ids
        ids.append(int(jnp.argmax(apply(variables, tokens)[0, len(ids) - 1])))
    assert found.text == bytes(ids[len(prompt) :]).decode("utf-8", "replace")
    assert len(set(ids[len(prompt) :])) > 2
    assert found.tokens_per_second > 0


@parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt of a sample has 0 tokens, .* write some text"),
        (64 * "a", "has 64 tokens, and the model reads 1 to 63 .* shorten the prompt"),
    ],
    ids=["empty", "long"],
)
def test_a_prompt_without_room_raises(prompt, message):
    with refused(message):
        prompt_ids(prompt, 64)
