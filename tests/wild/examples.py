"""Subjects of Flax's own examples, copied unchanged into `flax_examples`: lm1b,
seq2seq.
"""

import jax
import jax.numpy as jnp

from tests.wild.made import VOCABULARY, WIDTH, Made, linen_made, subject, tokens

SIZES = dict(
    vocab_size=VOCABULARY,
    output_vocab_size=VOCABULARY,
    emb_dim=WIDTH,
    num_heads=2,
    num_layers=2,
    qkv_dim=WIDTH,
    mlp_dim=64,
    max_len=16,
)


@subject("flax lm1b", "linen", (13, 13), rate=1e-3)
def lm1b() -> Made:
    from tests.wild.flax_examples import lm1b

    return linen_made(
        lm1b.TransformerLM(lm1b.TransformerConfig(**SIZES, deterministic=True)),
        tokens(),
    )


@subject("flax lm1b, tied, called by keyword", "linen", (13, 13))
def lm1b_tied() -> Made:
    from tests.wild.flax_examples import lm1b

    config = lm1b.TransformerConfig(
        **SIZES, deterministic=True, logits_via_embedding=True
    )
    return linen_made(lm1b.TransformerLM(config), options=dict(inputs=tokens()))


@subject("flax seq2seq, LSTMs", "linen", (17, 17), rate=1e-2)
def seq2seq() -> Made:
    from tests.wild.flax_examples import seq2seq

    model = seq2seq.Seq2seq(
        teacher_force=True, hidden_size=WIDTH, vocab_size=VOCABULARY, eos_id=0
    )
    given = jax.nn.one_hot(tokens(), VOCABULARY, dtype=jnp.float32)
    return linen_made(
        model,
        given,
        given,
        apply_options=dict(rngs={"lstm": jax.random.key(3)}),
        select=lambda output: output[0],
    )
