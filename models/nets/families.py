"""Learners: a network, and its weights as the optimizer must know them.

A GPT is written with this project's layers, so its recipe is enough. A Llama is written
in plain Flax and converted, so its weights are found in it:

    model   = convert_to_tcfp(Llama(config), recipe, tokens)
    weights = find_weights(model)
        for error_feedback(weights) and store(params, weights)

If the caller gives the tokens of a step, both are plain Flax, and a layer is converted
only if it was measured to be faster than BF16 (`include="measured"`).
"""

import functools
from collections.abc import Mapping
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from tcfp_jax.conversion import convert_to_tcfp, find_weights
from tcfp_jax.conversion.policy import Include
from tcfp_jax.recipes import Recipe
from tcfp_jax.recipes import recipe as named_recipe
from tcfp_jax.weights.layout import Weight

from .gpt import GPT
from .llama import Llama
from .moe import Moe
from .shapes import ComputeDtype, Copies, GPTConfig, ModelConfig, MoeConfig

Tables = Literal["float", "stored", "exact"]
# Every layer takes the recipe that the caller chose, at any size; the head stays in
# BF16.
INCLUDE: tuple[Include, ...] = ("linear", "small")
# Where weights have no float copy, tables have none either, and the head multiplies by
# the stored one.
TABLES: tuple[Include, ...] = ("head", "embed")
# A GPT looks tokens up by a product with one-hot rows, which must stay exact.
RULES = {"^embedding": None}
# A router computes in float32: its choices are not continuous. Adapters are too thin to
# gain.
EXACT = {"router": None, "_adapter": None}
# The parameters that a head multiplies; a tied one multiplies the embedding.
HEADS = "^(embedding|head)"


def copies_of(recipe: Recipe) -> Copies:
    """Return the form in which a Llama may keep gate and up: FP8 if the weight
    gradients read FP8 activations.
    """
    return "exact" if recipe.wgrad == "bf16" else "fp8"


def exact(recipe: Recipe) -> Recipe:
    """Return the recipe that multiplies the same stored weights in BF16.

    >>> exact(named_recipe("tcfp12_single")).forward
    'bf16'
    """
    return named_recipe(
        recipe,
        forward="bf16",
        dgrad="bf16",
        wgrad="bf16",
        forward_weight="hi+lo",
        dgrad_weight="hi+lo",
    )


def in_e4m3(recipe: str | Recipe) -> Recipe:
    """Return the recipe of weights in four bits whose activations and gradients are
    E4M3 with a scale for each row, for FP8 tensor cores.

    Codes times scales are E4M3 numbers by its rule of scales, which only NVFP4 has.

    >>> in_e4m3("nvfp4").dgrad
    'full'
    """
    return named_recipe(
        recipe, activation="float8_e4m3fn", dgrad="full", rule="fold_exact"
    )


class Learner(NamedTuple):
    """A model that maps tokens to logits, and its weights as `error_feedback` and
    `store` take them.
    """

    model: nn.Module
    weights: Recipe | Mapping[str, Weight]


def plain_model(config: ModelConfig, dtype: ComputeDtype) -> nn.Module:
    """Return the network of a size in plain Flax."""
    if isinstance(config, GPTConfig):
        return GPT(config, recipe=None, dtype=dtype)
    if isinstance(config, MoeConfig):
        return Moe(config, dtype=dtype)
    return Llama(config, dtype=dtype)


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
        stored with the rest, and the head's product takes the recipe. "exact" stores
        them, too, and the head multiplies them in BF16.

    Raises:
      ValueError: no layer can be converted, for another reason than measured times.
    """
    if isinstance(config, GPTConfig) and tokens is None:
        return Learner(GPT(config, recipe=recipe, dtype=dtype), recipe)
    stores = tables != "float" and not isinstance(config, GPTConfig)
    include: tuple[Include, ...] = INCLUDE if tokens is None else ("measured",)
    rules: dict[str, Recipe | None] = {**EXACT}
    if not stores and tokens is not None:
        rules |= RULES
    if stores and tables == "exact":
        rules[HEADS] = exact(recipe)
    model = convert_to_tcfp(
        plain_model(config, dtype),
        recipe,
        jax.ShapeDtypeStruct(tokens or (1, config.context), jnp.int32),
        include=(*include, *TABLES) if stores else include,
        rules=rules,
    )
    return Learner(model, find_weights(model))
