"""Named sizes of the networks."""

import dataclasses
from collections import ChainMap
from typing import Any

from .shapes import GPTConfig, LlamaConfig, ModelConfig, MoeConfig

_TINY: dict[str, Any] = dict(layers=2, width=128, heads=4, context=128)
MODELS = {
    "tiny": GPTConfig(**_TINY),
    "small": GPTConfig(layers=4, width=256, heads=8, context=256),
    "gpt2": GPTConfig(layers=12, width=768, heads=12, context=1024, vocabulary=50304),
}

_LLAMA3: dict[str, Any] = dict(
    heads=32,
    kv_heads=8,
    context=8192,
    vocabulary=128_256,
    rope_theta=500_000.0,
    remat="auto",
)
_QWEN3: dict[str, Any] = dict(
    context=40_960,
    vocabulary=151_936,
    head="untied",
    rope_theta=1_000_000.0,
    norm_eps=1e-6,
    remat="auto",
    head_dim=128,
    qk_norm="heads",
)
LLAMAS = {
    "llama-tiny": LlamaConfig(**_TINY, kv_heads=2, hidden=384),
    "llama-124m": LlamaConfig(
        layers=12,
        width=768,
        heads=12,
        kv_heads=12,
        hidden=2048,
        context=1024,
        vocabulary=50304,
    ),
    "llama-1b": LlamaConfig(**_LLAMA3, layers=16, width=2048, hidden=8192),
    "llama-8b": LlamaConfig(
        **_LLAMA3, layers=32, width=4096, hidden=14_336, head="untied"
    ),
    "llama-70b": LlamaConfig(
        **_LLAMA3 | dict(heads=64),
        layers=80,
        width=8192,
        hidden=28_672,
        head="untied",
    ),
    "qwen3-14b": LlamaConfig(
        **_QWEN3, layers=40, width=5120, heads=40, kv_heads=8, hidden=17_408
    ),
    "qwen3-32b": LlamaConfig(
        **_QWEN3, layers=64, width=5120, heads=64, kv_heads=8, hidden=25_600
    ),
}

MOES = {
    "moe-tiny": MoeConfig(
        **_TINY, kv_heads=2, hidden=128, qk_norm="heads", normalized="chosen"
    ),
    "moe-109m": MoeConfig(
        layers=8,
        width=512,
        heads=8,
        kv_heads=8,
        hidden=512,
        context=1024,
        qk_norm="heads",
        experts=16,
        chosen=4,
    ),
    "olmoe-1b-7b": MoeConfig(
        layers=16,
        width=2048,
        heads=16,
        kv_heads=16,
        hidden=1024,
        context=4096,
        vocabulary=50_304,
        head="untied",
        remat="auto",
        qk_norm="all",
        experts=64,
        chosen=8,
    ),
    "qwen3-30b-a3b": MoeConfig(
        **_QWEN3,
        layers=48,
        width=2048,
        heads=32,
        kv_heads=4,
        hidden=768,
        experts=128,
        chosen=8,
        normalized="chosen",
        balance=0.001,
        z_loss=0.0,
    ),
}


FAMILIES: dict[str, type[ModelConfig]] = {
    "gpt": GPTConfig,
    "llama": LlamaConfig,
    "moe": MoeConfig,
}
_SIZES: ChainMap[str, Any] = ChainMap(MOES, LLAMAS, MODELS)


def model_names() -> list[str]:
    """Return the names of all sizes.

    >>> model_names()[0], model_names()[-1]
    ('tiny', 'qwen3-30b-a3b')
    """
    return list(_SIZES)


def family_of(config: ModelConfig) -> str:
    """Return the name of the family of a size.

    >>> family_of(model_config("llama-8b"))
    'llama'
    """
    return next(name for name, kind in FAMILIES.items() if type(config) is kind)


def model_config(
    model: str | ModelConfig, vocabulary: int | None = None
) -> ModelConfig:
    """Return the size of a named model, or a given size.

    The size has at least `vocabulary` rows for token ids.

    Raises:
      ValueError: the name is unknown, or token ids are given to a model that reads
        bytes.

    >>> model_config("gpt2").layers
    12
    >>> model_config("llama-tiny", 1000).vocabulary
    1000
    >>> model_config("llama-124m", 1000).vocabulary
    50304
    """
    size: ModelConfig
    if not isinstance(model, str):
        size = model
    elif model in _SIZES:
        size = _SIZES[model]
    else:
        raise ValueError(
            f"model {model!r} is unknown; use one of {model_names()} or build a"
            " GPTConfig, LlamaConfig or MoeConfig"
        )
    if vocabulary is None:
        return size
    if isinstance(size, GPTConfig):
        able = [name for name in _SIZES if name not in MODELS]
        raise ValueError(
            f"vocabulary={vocabulary} with a model that reads bytes alone; use one of"
            f" {able}"
        )
    return dataclasses.replace(size, vocabulary=max(size.vocabulary, vocabulary))
