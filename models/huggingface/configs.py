"""`config.json` of Transformers' Llama, Qwen2, Qwen3, Gemma, Gemma 2 and Gemma 3
(text), as a `LlamaConfig`.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.nets.shapes import LlamaConfig
from tcfp_jax.inference import folders, safetensors

_NUMBERS: dict[str, Any] = {
    **dict.fromkeys(
        (
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "max_position_embeddings",
            "vocab_size",
        ),
        int,
    ),
    "rms_norm_eps": int | float,
    "rope_theta": int | float,
}
_GEMMA = dict(activation="gelu", norm_offset=1.0)
# Fields of each kind of model that are alike in all its sizes.
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": dict(bias="qkv"),
    "qwen3": dict(qk_norm="heads"),
    "gemma": _GEMMA,
    "gemma2": _GEMMA | dict(post_norms="on"),
    "gemma3_text": _GEMMA | dict(post_norms="on", qk_norm="heads"),
}
# Values that Transformers takes if a file lacks them.
_ABSENT: dict[str, dict[str, Any]] = {
    "qwen3": dict(head_dim=128),
    "gemma": dict(head_dim=256),
    "gemma2": dict(
        head_dim=256,
        query_pre_attn_scalar=256,
        sliding_window=4096,
        final_logit_softcapping=30.0,
        attn_logit_softcapping=50.0,
    ),
    "gemma3_text": dict(
        head_dim=256,
        query_pre_attn_scalar=256,
        sliding_window=4096,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        sliding_window_pattern=6,
    ),
}
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu"}


def llama_dict(config: LlamaConfig, dtype: str = "bfloat16") -> dict[str, Any]:
    """Return the `config.json` of Transformers' LlamaForCausalLM for a size.

    Raises:
      ValueError: the size has an option of another kind of model, whose own
        `config.json` should be copied.

    >>> from models.nets.sizes import LLAMAS
    >>> llama_dict(LLAMAS["llama-tiny"])["intermediate_size"]
    384
    """
    written = dict(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        hidden_act="silu",
        attention_bias=False,
        mlp_bias=False,
        attention_dropout=0.0,
        hidden_size=config.width,
        intermediate_size=config.hidden,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_size,
        vocab_size=config.vocabulary,
        max_position_embeddings=config.context,
        rms_norm_eps=config.norm_eps,
        rope_theta=config.rope_theta,
        rope_scaling=_stretch(config),
        tie_word_embeddings=config.head == "tied",
        torch_dtype=dtype,
    )
    running = {name: getattr(config, name) for name in ("attention", "remat", "loop")}
    found = dataclasses.replace(llama_config(written), **running)
    if dataclasses.replace(config, head_dim=None) != dataclasses.replace(
        found, head_dim=None
    ):
        raise ValueError(
            f"{config} is not a Llama: copy the config.json of the folder that the"
            " model comes from"
        )
    return written


def _stretch(config: LlamaConfig) -> dict[str, Any] | None:
    if config.rope_original is None:
        return (
            None
            if config.rope_factor == 1
            else dict(rope_type="linear", factor=config.rope_factor)
        )
    return dict(
        rope_type="llama3",
        factor=config.rope_factor,
        low_freq_factor=config.rope_low,
        high_freq_factor=config.rope_high,
        original_max_position_embeddings=config.rope_original,
    )


def llama_config(found: Mapping[str, Any]) -> LlamaConfig:
    """Return the size that a `config.json` describes.

    Raises:
      ValueError: it describes a model that is unknown here, no whole one, or one with
        an option that `models.nets.llama` does not have.

    >>> from models.nets.sizes import LLAMAS
    >>> llama_config(llama_dict(LLAMAS["llama-tiny"])) == LLAMAS["llama-tiny"]
    True
    """
    kind = (
        found.get("model_type") if isinstance(found, Mapping) else type(found).__name__
    )
    if not isinstance(found, Mapping) or kind not in KINDS:
        raise ValueError(
            f"model_type={kind!r} is not one of {list(KINDS)}, the models that are"
            " known here"
        )
    held = {
        **dict.fromkeys(_NUMBERS),
        **_ABSENT.get(str(kind), {}),
        **{n: v for n, v in found.items() if v is not None},
    }
    rope, local = _ropes(found)
    held["num_key_value_heads"] = (
        held["num_key_value_heads"] or held["num_attention_heads"]
    )
    held["rope_theta"] = rope.get("rope_theta") or held["rope_theta"] or 10_000.0
    for name, number in _NUMBERS.items():  # the file may be someone else's
        if not isinstance(held[name], number) or held[name] <= 0:
            raise ValueError(
                f"{name}={held[name]!r} is not a positive number; copy the model's"
                " config.json"
            )
    heads, width = held["num_attention_heads"], held["hidden_size"]
    fixed = KINDS[str(kind)]
    _check_options(held, fixed.get("activation", "silu"))
    head_dim = held.get("head_dim") or width // heads
    gemma = "norm_offset" in fixed
    config = LlamaConfig(
        layers=held["num_hidden_layers"],
        width=width,
        heads=heads,
        hidden=held["intermediate_size"],
        kv_heads=held["num_key_value_heads"],
        context=held["max_position_embeddings"],
        vocabulary=held["vocab_size"],
        head="tied" if held.get("tie_word_embeddings", gemma) else "untied",
        rope_theta=float(held["rope_theta"]),
        norm_eps=held["rms_norm_eps"],
        head_dim=None if head_dim * heads == width else head_dim,
        embedding_scale=width**0.5 if gemma else 1.0,
        **fixed,
        **_stretched(rope),
    )
    return (
        config
        if kind not in ("gemma2", "gemma3_text")
        else _with_windows(config, held, local)
    )


def _ropes(found: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (rotations of all layers, those of layers with a window), as either
    generation of files writes them.
    """
    ropes = [found.get(name) or {} for name in ("rope_scaling", "rope_parameters")]
    if not all(isinstance(one, Mapping) for one in ropes):
        raise ValueError(
            f"rope_scaling and rope_parameters are {ropes}, not objects; copy the"
            " model's config.json"
        )
    if "full_attention" in ropes[1]:  # Transformers 5, models with windows
        return {**ropes[0], **ropes[1]["full_attention"]}, dict(
            ropes[1].get("sliding_attention") or {}
        )
    return {**ropes[0], **ropes[1]}, {}


def _stretched(rope: Mapping[str, Any]) -> dict[str, Any]:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return {}
    names = dict(factor="rope_factor")
    if kind == "llama3":
        names |= dict(low_freq_factor="rope_low", high_freq_factor="rope_high")
        names |= dict(original_max_position_embeddings="rope_original")
    elif kind != "linear":
        raise ValueError(
            f"rope_type={kind!r}, but models.nets.llama computes 'default', 'linear'"
            " and 'llama3' alone; take another model"
        )
    for name in names:
        if not isinstance(rope.get(name), int | float) or rope[name] <= 0:
            raise ValueError(
                f"{name}={rope.get(name)!r} of {kind!r} rotations is not a positive"
                " number; copy the file"
            )
    return {
        ours: rope[name] if ours == "rope_original" else float(rope[name])
        for name, ours in names.items()
    }


def _check_options(held: Mapping[str, Any], activation: str) -> None:
    """Raise `ValueError` if the model computes anything that `models.nets.llama` does
    not.
    """
    # Gemma's first files name the exact GELU, and Transformers computes the other.
    named = str(held.get("hidden_activation") or held.get("hidden_act") or activation)
    if _ACTIVATIONS.get(named, named) != activation:
        raise ValueError(
            f"hidden_act={named!r}, but models.nets.llama computes {activation!r}"
            " alone;"
            " take another model"
        )
    for name in (
        "attention_bias",
        "mlp_bias",
        "use_sliding_window",
        "use_bidirectional_attention",
    ):
        if held.get(name):
            raise ValueError(
                f"{name}={held[name]!r}, but models.nets.llama computes False alone;"
                " take"
                " another model"
            )


def _with_windows(
    config: LlamaConfig, held: Mapping[str, Any], local: Mapping[str, Any]
) -> LlamaConfig:
    """Return a Gemma 2 or 3 with its windows, caps and scale."""
    gemma3 = config.qk_norm == "heads"
    kinds = held.get("layer_types")
    every = int(
        held.get("sliding_window_pattern") or held.get("_sliding_window_pattern") or 2
    )
    if kinds:
        every = (
            list(kinds).index("full_attention")
            if "full_attention" in kinds
            else config.layers
        ) + 1
        expected = [
            "sliding_attention" if i % every else "full_attention"
            for i in range(1, config.layers + 1)
        ]
        if list(kinds) != expected:
            raise ValueError(
                f"layer_types={kinds} do not repeat, and windows do here; take another"
                " model"
            )
    scale = held["query_pre_attn_scalar"] ** -0.5
    return dataclasses.replace(
        config,
        window=held["sliding_window"],
        global_every=every,
        attention_scale=None if scale == config.head_size**-0.5 else scale,
        attention_cap=held.get("attn_logit_softcapping"),
        logit_cap=held.get("final_logit_softcapping"),
        local_theta=(
            float(local.get("rope_theta") or held["rope_local_base_freq"])
            if gemma3
            else None
        ),
    )


def is_folder(path: str | Path) -> bool:
    """Return whether a path is a folder of a model."""
    return (Path(path) / safetensors.CONFIG).is_file()


def read_shape(folder: Path) -> LlamaConfig:
    """Return the shape of the model in a folder.

    Raises:
      ValueError: `config.json` is damaged, or describes a model that is unknown here.
    """
    return llama_config(folders.read_object(folder, safetensors.CONFIG))
