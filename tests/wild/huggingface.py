"""Subjects of the package transformers, the last release with Flax models: their Linen
modules (`.module`).
"""

import functools
from typing import Any

import jax.numpy as jnp

from tests.wild.made import (
    BATCH,
    LENGTH,
    VOCABULARY,
    WIDTH,
    Made,
    floats,
    linen_made,
    subject,
    tokens,
)

POSITIONS = jnp.broadcast_to(jnp.arange(LENGTH), (BATCH, LENGTH))
ONES = jnp.ones((BATCH, LENGTH), jnp.int32)


def first(output):
    return output[0]


# transformers cuts its table of rotations at the number of positions: 32, twice the
# width of a head, at least.
TEXT = dict(
    vocab_size=VOCABULARY,
    hidden_size=WIDTH,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    max_position_embeddings=32,
)
SEEN = dict(
    image_size=8,
    patch_size=4,
    num_channels=3,
    hidden_size=WIDTH,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
)


def decoder(name: str, config: Any, dtype: Any = jnp.float32) -> Made:
    """A decoder of transformers by the names of its classes."""
    import transformers

    made = getattr(transformers, f"Flax{name}ForCausalLM")(
        config, dtype=dtype, _do_init=False
    )
    return linen_made(made.module, tokens(), ONES, POSITIONS, select=first)


@subject("transformers llama", "linen", (15, 15), "transformers", rate=1e-3)
def llama() -> Made:
    from transformers import LlamaConfig

    return decoder("Llama", LlamaConfig(**TEXT))


def mistral(dtype: Any = jnp.float32) -> Made:
    from transformers import MistralConfig

    return decoder("Mistral", MistralConfig(**TEXT, num_key_value_heads=1), dtype)


for suffix, dtype in (("", jnp.float32), (", bf16", jnp.bfloat16)):
    subject(
        "transformers mistral" + suffix, "linen", (15, 15), "transformers", rate=1e-3
    )(functools.partial(mistral, dtype))


@subject("transformers gemma", "linen", (15, 15), "transformers", rate=2e-4)
def transformers_gemma() -> Made:
    from transformers import GemmaConfig

    return decoder("Gemma", GemmaConfig(**TEXT, num_key_value_heads=1, head_dim=16))


@subject("transformers gpt2", "linen", (9, 9), "transformers")
def gpt2() -> Made:
    from transformers import FlaxGPT2LMHeadModel, GPT2Config

    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=WIDTH, n_layer=2, n_head=2
    )
    model = FlaxGPT2LMHeadModel(config, _do_init=False)
    return linen_made(model.module, tokens(), ONES, POSITIONS, select=first)


@subject("transformers bert", "linen", (14, 14), "transformers", rate=1e-3)
def bert() -> Made:
    from transformers import BertConfig, FlaxBertForMaskedLM

    model = FlaxBertForMaskedLM(BertConfig(**TEXT), _do_init=False)
    return linen_made(
        model.module, tokens(), ONES, ONES - 1, POSITIONS, None, select=first
    )


@subject("transformers bart", "linen", (17, 17), "transformers")
def bart() -> Made:
    from transformers import BartConfig, FlaxBartForConditionalGeneration

    config = BartConfig(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=16,
    )
    model = FlaxBartForConditionalGeneration(config, _do_init=False)
    return linen_made(
        model.module, tokens(), ONES, tokens(), ONES, POSITIONS, POSITIONS, select=first
    )


@subject("transformers vit", "linen", (13, 14), "transformers", rate=1e-3)
def vit() -> Made:
    from transformers import FlaxViTForImageClassification, ViTConfig

    model = FlaxViTForImageClassification(
        ViTConfig(**SEEN, num_labels=8), _do_init=False
    )
    return linen_made(model.module, floats(8, 8, 8, 3), select=first)


@subject("transformers clip", "linen", (14, 15), "transformers", target="square")
def clip() -> Made:
    from transformers import CLIPConfig, FlaxCLIPModel

    sizes = dict(num_hidden_layers=1, intermediate_size=64)
    config = CLIPConfig(
        text_config=dict(TEXT, **sizes),
        vision_config=dict(SEEN, **sizes),
        projection_dim=16,
    )
    model = FlaxCLIPModel(config, _do_init=False)

    def embeddings(output):
        return jnp.concatenate([output.text_embeds, output.image_embeds])

    inputs = (tokens(), floats(BATCH, 8, 8, 3), ONES, POSITIONS)
    return linen_made(model.module, *inputs, select=embeddings)


@subject("transformers whisper", "linen", (17, 19), "transformers")
def whisper() -> Made:
    from transformers import FlaxWhisperForConditionalGeneration, WhisperConfig

    config = WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=8,
        d_model=WIDTH,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_source_positions=8,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = FlaxWhisperForConditionalGeneration(config, _do_init=False)
    return linen_made(
        model.module, floats(BATCH, 8, 16), tokens(), ONES, POSITIONS, select=first
    )
