"""Configs of strangers: every entry that is no such number, text or object is named."""

import itertools
import math

from models.huggingface.configs import KINDS, llama_config
from models.nets.shapes import LlamaConfig
from tests.helpers import parametrize, refused

CONFIG = dict(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    vocab_size=300,
    rms_norm_eps=1e-5,
    head_dim=16,
    rope_theta=1e4,
    tie_word_embeddings=True,
    query_pre_attn_scalar=16,
    sliding_window=16,
    layer_types=["sliding_attention", "full_attention"],
    sliding_window_pattern=2,
    rope_local_base_freq=1e4,
    final_logit_softcapping=30.0,
    attn_logit_softcapping=50.0,
    hidden_activation=None,
    rope_scaling=None,
    rope_parameters=None,
    model_type=None,
    attention_bias=False,
)
LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
VALUES = [
    True,
    0,
    -1,
    0.5,
    math.inf,
    math.nan,
    10**400,
    2**70,
    "16",
    "",
    [],
    [1],
    ["x"],
    {},
    {"full_attention": 5},
    {"full_attention": {"rope_theta": "x"}},
    {"full_attention": {}, "sliding_attention": {"rope_theta": []}},
    {"rope_type": ["linear"]},
    {"rope_theta": 10**400},
    *[
        LLAMA3 | {name: value}
        for name in LLAMA3
        for value in ("x", None, True, math.nan, [], 10**400)
    ],
]


def outcome(config):
    """The shape of a config, or the message of its error."""
    try:
        return llama_config(config)
    except ValueError as error:
        return str(error)


@parametrize("kind", KINDS)
def test_any_value_of_any_entry_is_taken_or_refused_by_name(kind):
    taken = 0
    for name, value in itertools.product(CONFIG, VALUES):
        config = {**CONFIG, "model_type": kind, name: value}
        found = outcome(config)
        if isinstance(found, str):
            assert "=" in found  # the entry and its value
            continue
        taken += 1
        assert isinstance(found, LlamaConfig)
        assert 0 < found.rope_theta < math.inf
        assert 0 < found.norm_eps < math.inf
        assert type(found.layers) is type(found.kv_heads) is int
    assert 0 < taken < 0.4 * len(CONFIG) * len(VALUES)


@parametrize(
    ("kind", "change", "match"),
    [
        ("llama", dict(head_dim="16"), "head_dim='16' is not a positive number"),
        ("llama", dict(head_dim=0), "head_dim=0 is not a positive number"),
        ("llama", dict(num_hidden_layers=True), "num_hidden_layers=True is not"),
        ("llama", dict(num_hidden_layers=10**12), "not a positive number below 2.1"),
        ("llama", dict(rms_norm_eps=math.nan), "rms_norm_eps=nan is not a positive"),
        ("llama", dict(num_key_value_heads=0), "num_key_value_heads=0 is not a pos"),
        ("llama", dict(tie_word_embeddings="false"), "='false' is neither true nor"),
        ("llama", dict(rope_scaling=5), "rope_scaling=5 is not an object"),
        ("llama", dict(rope_scaling=LLAMA3 | dict(factor=True)), "factor=True is not"),
        ("gemma2", dict(query_pre_attn_scalar=-256), "pre_attn_scalar=-256 is not a"),
        ("gemma2", dict(query_pre_attn_scalar=0), "query_pre_attn_scalar=0 is not a"),
        ("gemma2", dict(sliding_window="x"), "sliding_window='x' is not a positive"),
        ("gemma2", dict(layer_types=5), "layer_types=5 is not a list"),
        ("gemma2", dict(layer_types=["full_attention"]), "do not repeat, and windows"),
        ("gemma2", dict(final_logit_softcapping="x"), "softcapping='x' is not a posi"),
        ("gemma2", dict(sliding_window_pattern=0.5), "window_pattern=0.5 is not a p"),
        (
            "gemma3_text",
            dict(rope_parameters=dict(full_attention=5)),
            "full_attention=5 is not an object",
        ),
        (
            "gemma3_text",
            dict(
                rope_parameters=dict(
                    full_attention={}, sliding_attention=dict(rope_theta="x")
                )
            ),
            "rope_theta='x' is not a positive number",
        ),
        (
            "gemma3_text",
            dict(
                rope_parameters=dict(
                    full_attention={},
                    sliding_attention=dict(rope_type="linear", factor=4.0),
                )
            ),
            "rope_type='linear' of sliding_attention",
        ),
        (["llama"], {}, "model_type=.'llama'. is not one of"),
        ("llama", dict(head_dim=[0] * 10**6), "head_dim=.0, 0, .{60,80} is not a pos"),
    ],
)
def test_an_entry_of_another_kind_is_named(kind, change, match):
    with refused(match):
        llama_config({**CONFIG, "model_type": kind, **change})


@parametrize("kind", ["gemma2", "gemma3_text"])
def test_a_cap_that_is_null_caps_nothing(kind):
    entries = {name: None for name in CONFIG if name.endswith("softcapping")}
    found = llama_config({**CONFIG, "model_type": kind, **entries})
    assert (found.attention_cap, found.logit_cap) == (None, None)
    absent = {name: CONFIG[name] for name in CONFIG.keys() - entries}
    found = llama_config({**absent, "model_type": kind})
    usual = (50.0, 30.0) if kind == "gemma2" else (None, None)
    assert (found.attention_cap, found.logit_cap) == usual
