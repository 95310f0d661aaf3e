"""The families of models that `models.train` trains: named sizes, and how a size becomes something that learns.

A `Learner` is a model and what the optimizer must know of its weights. A GPT is written with this project's layers, so
its recipe is all there is to know. A Llama is written in plain Flax and converted, so its weights are found in it:

    model   = convert_to_tcfp(Llama(config), recipe, tokens)
    weights = find_weights(model)                 for error_feedback(weights) and store(params, weights)

Where the tokens of a step are given, both are plain Flax, and those layers are converted that measured times say to be
faster than BF16 (`include="measured"`).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from models import ComputeDtype, gpt, llama
from models.gpt import GPT, GPTConfig
from models.llama import Llama, LlamaConfig
from tcfp_jax.conversion import convert_to_tcfp, find_weights
from tcfp_jax.conversion.policy import Include
from tcfp_jax.recipes import Recipe
from tcfp_jax.weights.layout import Layout, Weight

ModelConfig = GPTConfig | LlamaConfig
# A recipe was asked for, so it is every layer's at any size, as in a GPT; a head is left to BF16.
INCLUDE: tuple[Include, ...] = ("linear", "small")
# A GPT's lookup is a product with one-hot rows, and as exact as a lookup.
RULES = {"^embedding": None}


Ends = tuple[int, int, Recipe]


class Learner(NamedTuple):
    """A model that maps tokens to logits, and its weights as `error_feedback` and `store` take them."""

    model: nn.Module
    weights: Recipe | Mapping[str, Weight]


@dataclass(frozen=True)
class Family:
    """Models of one kind.

    Attributes:
      config: the class of its sizes.
      sizes: by name.
      tokens: what its models can read: "bytes" alone, or "ids" up to their vocabulary, of which bytes are some.
      plain: the model in plain Flax, of a size and a dtype.
      learner: makes one of a size, a recipe and a dtype, with every layer as the recipe says, but for the ends: two
        numbers and a recipe, which so many of the first and of the last blocks have; None of none.
    """

    config: type[Any]
    sizes: Mapping[str, Any]
    tokens: Literal["bytes", "ids"]
    plain: Callable[[Any, ComputeDtype], nn.Module]
    learner: Callable[[Any, Recipe, ComputeDtype, Ends | None], Learner]


def _gpt(config: GPTConfig, recipe: Recipe, dtype: ComputeDtype, ends: Ends | None) -> Learner:
    model = GPT(config, recipe=recipe, dtype=dtype, ends=ends)
    if ends is None:
        return Learner(model, recipe)
    kernel = Layout((0,), (1,))
    return Learner(model, {
        f"block_{layer}/{name}/kernel": Weight(gpt.recipe_of(layer, config.layers, recipe, ends), kernel)
        for layer in range(config.layers)
        for name in gpt.DENSE
    })  # fmt: skip


def _plain_gpt(config: GPTConfig, dtype: ComputeDtype) -> nn.Module:
    return GPT(config, recipe=None, dtype=dtype)


def _plain_llama(config: LlamaConfig, dtype: ComputeDtype) -> nn.Module:
    return Llama(config, dtype=dtype)


def _llama(config: LlamaConfig, recipe: Recipe, dtype: ComputeDtype, ends: Ends | None) -> Learner:
    tokens = jax.ShapeDtypeStruct((1, config.context), jnp.int32)
    plain, rules = _plain_llama(config, dtype), None
    if ends is not None:
        plain, rules = Llama(config, dtype=dtype, ends=ends[:2]), {"^(first|last)_layers/": ends[2]}
    model = convert_to_tcfp(plain, recipe, tokens, include=INCLUDE, rules=rules)
    return Learner(model, find_weights(model))


FAMILIES = {
    "gpt": Family(GPTConfig, gpt.MODELS, "bytes", _plain_gpt, _gpt),
    "llama": Family(LlamaConfig, llama.LLAMAS, "ids", _plain_llama, _llama),
}


def model_names() -> list[str]:
    """The names of all sizes.

    >>> model_names()[0], model_names()[-1]
    ('tiny', 'llama-8b')
    """
    return [name for family in FAMILIES.values() for name in family.sizes]


def family_of(config: ModelConfig) -> str:
    """The name of the family of a size.

    >>> family_of(model_config("llama-8b"))
    'llama'
    """
    return next(name for name, family in FAMILIES.items() if isinstance(config, family.config))


def model_config(model: str | ModelConfig, vocabulary: int | None = None) -> ModelConfig:
    """The size of a named model, or the size that it is given, with rows for so many ids of tokens at least.

    Raises:
      ValueError: an unknown name, or ids for a model that reads bytes.

    >>> model_config("gpt2").layers
    12
    >>> model_config("llama-tiny", 1000).vocabulary, model_config("llama-124m", 1000).vocabulary
    (1000, 50304)
    """
    if isinstance(model, str):
        if model not in model_names():
            raise ValueError(
                f"model {model!r} is unknown; use one of {model_names()} or build a GPTConfig or a LlamaConfig"
            )
        return model_config(next(f.sizes[model] for f in FAMILIES.values() if model in f.sizes), vocabulary)
    if vocabulary is None:
        return model
    if FAMILIES[family_of(model)].tokens == "bytes":
        able = [name for family in FAMILIES.values() if family.tokens == "ids" for name in family.sizes]
        raise ValueError(f"vocabulary={vocabulary} with a model that reads bytes alone; use one of {able}")
    return dataclasses.replace(model, vocabulary=max(model.vocabulary, vocabulary))


@functools.lru_cache(maxsize=16)
def learner(
    config: ModelConfig,
    recipe: Recipe,
    dtype: ComputeDtype,
    tokens: tuple[int, int] | None = None,
    ends: Ends | None = None,
) -> Learner:
    """The model of a size, and its weights.

    Args:
      tokens: batch and positions of a step, to convert what pays there, as `convert_to_tcfp` with "measured" finds it;
        None converts every layer but a Llama's head.
      ends: as of `Family.learner`, without tokens.

    Raises:
      ValueError: nothing is to be converted, and not because measured times say so.
    """
    family = FAMILIES[family_of(config)]
    if tokens is None:
        return family.learner(config, recipe, dtype, ends)
    shape = jax.ShapeDtypeStruct(tokens, jnp.int32)
    model = convert_to_tcfp(family.plain(config, dtype), recipe, shape, include="measured", rules=RULES)
    return Learner(model, find_weights(model))
