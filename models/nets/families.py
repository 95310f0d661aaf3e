"""Families of models that `models.train` trains: named sizes, and the model and weights
of a size.

A `Learner` is a model and the weights that the optimizer must know. A GPT is written
with this project's layers, so its recipe is enough. A Llama is written in plain Flax
and converted, so its weights are found in it:

    model   = convert_to_tcfp(Llama(config), recipe, tokens)
    weights = find_weights(model)                 for error_feedback(weights) and store(params, weights)

With the tokens of a step, both are plain Flax, and only layers are converted that
measured times say are faster than BF16 (`include="measured"`).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from models import ComputeDtype
from models.nets import gpt, llama
from models.nets.gpt import GPT, GPTConfig
from models.nets.keeping import Copies
from models.nets.llama import Llama, LlamaConfig
from models.nets.moe import MOES, Moe, MoeConfig
from tcfp_jax.conversion import convert_to_tcfp, find_weights
from tcfp_jax.conversion.policy import Include
from tcfp_jax.recipes import Recipe
from tcfp_jax.weights.layout import Weight

ModelConfig = GPTConfig | LlamaConfig
Tables = Literal["float", "stored"]
# The caller chose a recipe, so every layer takes it at any size, as in a GPT; a head
# stays in BF16.
INCLUDE: tuple[Include, ...] = ("linear", "small")
# Where weights have no float copy, tables have none either, and the head multiplies by
# the stored one.
TABLES: tuple[Include, ...] = ("head", "embed")
# A GPT looks tokens up by a product with one-hot rows, which must stay exact.
RULES = {"^embedding": None}
# A router computes in float32: its choices are not continuous. Adapters are too thin to
# gain.
EXACT = {"router": None, "_adapter": None}


def copies_of(recipe: Recipe) -> Copies:
    """Return the form in which a Llama may keep gate and up: FP8 if the weight
    gradients read FP8 activations.
    """
    return "exact" if recipe.wgrad == "bf16" else "fp8"


class Learner(NamedTuple):
    """A model that maps tokens to logits, and its weights as `error_feedback` and
    `store` take them.
    """

    model: nn.Module
    weights: Recipe | Mapping[str, Weight]


@dataclass(frozen=True)
class Family:
    """Models of one kind.

    Attributes:
      config: Class of its sizes.
      sizes: Sizes by name.
      tokens: Tokens that its models can read: "bytes" alone, or "ids" up to their
        vocabulary, which include bytes.
      plain: Function that makes the model in plain Flax of a size and a dtype.
      learner: Function that makes the learner of a size, a recipe for every layer, a
        dtype, and the kind of tables.
    """

    config: type[Any]
    sizes: Mapping[str, Any]
    tokens: Literal["bytes", "ids"]
    plain: Callable[[Any, ComputeDtype], nn.Module]
    learner: Callable[[Any, Recipe, ComputeDtype, Tables], Learner]


def _gpt(
    config: GPTConfig, recipe: Recipe, dtype: ComputeDtype, tables: Tables
) -> Learner:
    return Learner(GPT(config, recipe=recipe, dtype=dtype), recipe)


def _plain_gpt(config: GPTConfig, dtype: ComputeDtype) -> nn.Module:
    return GPT(config, recipe=None, dtype=dtype)


def _plain_llama(config: LlamaConfig, dtype: ComputeDtype) -> nn.Module:
    return (
        Moe(config, dtype=dtype)
        if isinstance(config, MoeConfig)
        else Llama(config, dtype=dtype)
    )


def _llama(
    config: LlamaConfig, recipe: Recipe, dtype: ComputeDtype, tables: Tables
) -> Learner:
    tokens = jax.ShapeDtypeStruct((1, config.context), jnp.int32)
    include = (*INCLUDE, *TABLES) if tables == "stored" else INCLUDE
    model = convert_to_tcfp(
        _plain_llama(config, dtype), recipe, tokens, include=include, rules=EXACT
    )
    return Learner(model, find_weights(model))


FAMILIES = {
    "gpt": Family(GPTConfig, gpt.MODELS, "bytes", _plain_gpt, _gpt),
    "llama": Family(LlamaConfig, llama.LLAMAS, "ids", _plain_llama, _llama),
    "moe": Family(MoeConfig, MOES, "ids", _plain_llama, _llama),
}


def model_names() -> list[str]:
    """Return the names of all sizes.

    >>> model_names()[0], model_names()[-1]
    ('tiny', 'qwen3-30b-a3b')
    """
    return [name for family in FAMILIES.values() for name in family.sizes]


def family_of(config: ModelConfig) -> str:
    """Return the name of the family of a size.

    >>> family_of(model_config("llama-8b"))
    'llama'
    """
    return next(
        name for name, family in FAMILIES.items() if type(config) is family.config
    )


def model_config(
    model: str | ModelConfig, vocabulary: int | None = None
) -> ModelConfig:
    """Return the size of a named model, or a given size, with at least `vocabulary`
    rows for token ids.

    Raises:
      ValueError: the name is unknown, or token ids are given to a model that reads
        bytes.

    >>> model_config("gpt2").layers
    12
    >>> model_config("llama-tiny", 1000).vocabulary, model_config("llama-124m", 1000).vocabulary
    (1000, 50304)
    """
    if isinstance(model, str):
        if model not in model_names():
            raise ValueError(
                f"model {model!r} is unknown; use one of {model_names()} or build a"
                " GPTConfig, LlamaConfig or MoeConfig"
            )
        return model_config(
            next(f.sizes[model] for f in FAMILIES.values() if model in f.sizes),
            vocabulary,
        )
    if vocabulary is None:
        return model
    if FAMILIES[family_of(model)].tokens == "bytes":
        able = [
            name
            for family in FAMILIES.values()
            if family.tokens == "ids"
            for name in family.sizes
        ]
        raise ValueError(
            f"vocabulary={vocabulary} with a model that reads bytes alone; use one of"
            f" {able}"
        )
    return dataclasses.replace(model, vocabulary=max(model.vocabulary, vocabulary))


@functools.lru_cache(maxsize=16)
def learner(
    config: ModelConfig,
    recipe: Recipe,
    dtype: ComputeDtype,
    tokens: tuple[int, int] | None = None,
    tables: Tables = "float",
) -> Learner:
    """Return the model of a size, and its weights.

    Args:
      config: The size.
      recipe: Recipe of the layers.
      dtype: Dtype of activations.
      tokens: Batch and positions of a step, to convert only layers that gain there
        (`include="measured"`); None converts every layer except a Llama's head.
      tables: "stored" makes a Llama's embedding and head weights like others: they are
        stored with the rest, and the head's product takes the recipe.

    Raises:
      ValueError: no layer can be converted, for another reason than measured times.
    """
    family = FAMILIES[family_of(config)]
    if tokens is None:
        return family.learner(config, recipe, dtype, tables)
    shape, stores = (
        jax.ShapeDtypeStruct(tokens, jnp.int32),
        tables == "stored" and isinstance(config, LlamaConfig),
    )
    include = ("measured", *TABLES) if stores else ("measured",)
    model = convert_to_tcfp(
        family.plain(config, dtype),
        recipe,
        shape,
        include=include,
        rules=EXACT | ({} if stores else RULES),
    )
    return Learner(model, find_weights(model))
