"""`config.json` of Transformers' Llama, Qwen2, Qwen3, Gemma, Gemma 2 and Gemma 3
(text), as a `LlamaConfig`.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tcfp_jax.inference import folders, safetensors

from ..nets.shapes import LlamaConfig
from ..nets.sizes import model_names

_NUMBERS: dict[str, Any] = {
    "hidden_size": int,
    "intermediate_size": int,
    "num_hidden_layers": int,
    "num_attention_heads": int,
    "num_key_value_heads": int,
    "max_position_embeddings": int,
    "vocab_size": int,
    "rms_norm_eps": float,
    "rope_theta": float,
}
# Numbers that a file need not have, of all models and of those with windows.
_OPTIONAL: dict[str, Any] = {"head_dim": int}
_OF_WINDOWS: dict[str, Any] = {
    "query_pre_attn_scalar": float,
    "sliding_window": int,
    "sliding_window_pattern": int,
    "_sliding_window_pattern": int,
    "rope_local_base_freq": float,
    "attn_logit_softcapping": float,
    "final_logit_softcapping": float,
}
# Entries of those whose null means none, and not the value of a file that lacks it.
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_LARGEST = {int: 2**31, float: 1e30}
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
    if not isinstance(found, Mapping) or str(kind) not in KINDS:
        raise ValueError(
            f"model_type={kind!r} is not one of {list(KINDS)}, the models that are"
            " known here"
        )
    held = {
        **dict.fromkeys(_NUMBERS),
        **_ABSENT.get(str(kind), {}),
        **{n: v for n, v in found.items() if v is not None or n in _CAPS},
    }
    rope, local = _ropes(found)
    if held["num_key_value_heads"] is None:
        held["num_key_value_heads"] = held["num_attention_heads"]
    thetas = (rope.get("rope_theta"), held["rope_theta"], 10_000.0)
    held["rope_theta"] = next(theta for theta in thetas if theta is not None)
    for name, number in _NUMBERS.items():  # the file may be someone else's
        _check_number(name, held[name], number)
    _check_optional(held, _OPTIONAL)
    if not isinstance(held.get("tie_word_embeddings", False), bool):
        raise ValueError(
            f"tie_word_embeddings={held['tie_word_embeddings']!r:.80} is neither true"
            " nor false; copy the model's config.json"
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


def _check_number(name: str, value: object, kind: type) -> None:
    """Raise `ValueError` unless a value is a positive number that a model can have."""
    kinds = int if kind is int else int | float
    is_number = isinstance(value, kinds) and not isinstance(value, bool)
    if not is_number or not 0 < value < _LARGEST[kind]:  # type: ignore[operator]
        raise ValueError(
            f"{name}={value!r:.80} is not a positive number below {_LARGEST[kind]:g};"
            " copy the model's config.json"
        )


def _check_optional(held: Mapping[str, Any], kinds: Mapping[str, type]) -> None:
    for name, kind in kinds.items():
        if held.get(name) is not None:
            _check_number(name, held[name], kind)


def _ropes(found: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (rotations of all layers, those of layers with a window), as either
    generation of files writes them.
    """
    every = _object(found, "rope_scaling")
    newer = _object(found, "rope_parameters")
    if "full_attention" in newer:  # Transformers 5, models with windows
        full = _object(newer, "full_attention")
        return {**every, **full}, _object(newer, "sliding_attention")
    return {**every, **newer}, {}


def _object(found: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return an entry that is an object, empty if it is missing."""
    entry = found.get(name)
    if entry is None:
        return {}
    if not isinstance(entry, Mapping):
        raise ValueError(
            f"{name}={entry!r:.80} is not an object; copy the model's config.json"
        )
    return dict(entry)


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
        _check_number(name, rope.get(name), float)
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
    _check_optional(held, _OF_WINDOWS)
    _check_optional(local, {"rope_theta": float})
    if _stretched(local):
        raise ValueError(
            f"rope_type={local.get('rope_type')!r} of sliding_attention, but"
            " models.nets.llama computes 'default' alone in a window; take another"
            " model"
        )
    kinds = held.get("layer_types")
    if not isinstance(kinds or [], list):
        raise ValueError(
            f"layer_types={kinds!r:.80} is not a list; copy the model's config.json"
        )
    every = int(
        held.get("sliding_window_pattern") or held.get("_sliding_window_pattern") or 2
    )
    if kinds:
        every = (
            kinds.index("full_attention")
            if "full_attention" in kinds
            else config.layers
        ) + 1
        expected = [
            "sliding_attention" if i % every else "full_attention"
            for i in range(1, len(kinds) + 1)
        ]
        if len(kinds) != config.layers or kinds != expected:
            raise ValueError(
                f"layer_types={kinds!r:.80} do not repeat, and windows do here; take"
                " another model"
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


def check_is_folder(path: str) -> None:
    """Raise `FileNotFoundError` if a path is not a folder of a model; the message says
    why.
    """
    found = Path(path)
    if is_folder(found):
        return
    if found.is_dir():
        lacks = "is empty" if not any(found.iterdir()) else "has no config.json"
        raise FileNotFoundError(
            f"the folder {path} {lacks}; copy all files of the model: config.json,"
            " *.safetensors and tokenizer.json"
        )
    if found.exists():
        raise FileNotFoundError(f"{path} is a file; name the folder of the model")
    raise FileNotFoundError(
        f"model {path!r} is unknown: there is no such folder (looked from {Path.cwd()})"
        f" and no size of this name; correct the path, or use one of {model_names()}"
    )


def read_shape(folder: Path) -> LlamaConfig:
    """Return the shape of the model in a folder.

    Raises:
      ValueError: `config.json` is damaged, or describes a model that is unknown here.
    """
    return llama_config(folders.read_object(folder, safetensors.CONFIG))
