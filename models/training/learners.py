"""The model of a run, and its weights as the optimizer must know them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flax import linen as nn

import tcfp_jax
from tcfp_jax.weights.layout import Weight

from ..nets.families import Learner, Tables, learner
from .finish import same_form
from .forms import Adapters, Float, Stored
from .settings import Data, TrainConfig
from .state import PairState, TrainState


def program(config: TrainConfig) -> TrainConfig:
    """Return the config that the compiled functions depend on, so that runs with other
    data share them.
    """
    return replace(
        config,
        model=config.size,
        recipe=tcfp_jax.recipe(config.recipe),
        dtype=config.compute_dtype,
        seed=0,
        heldout_windows=1,
        steps_per_call=1,
        data=Data(),
        monitor=0,
        start="" if isinstance(config.weights, Adapters) else None,
        remat=None,
        sample=None,
        finish=None,
    )


def learner_of(config: TrainConfig) -> Learner:
    """Return the model of the products, and the weights of the state."""
    tokens = (config.rows, config.sequence) if config.include == "measured" else None
    tables: Tables = "float"
    if isinstance(config.weights, Stored) and config.include != "layers":
        tables = "exact" if config.include == "bf16_head" else "stored"
    size = config.size
    dtype = config.compute_dtype
    kept = learner(size, tcfp_jax.recipe(config.recipe), dtype, tokens, tables)
    if config.products is None:
        return kept
    last = learner(size, config.products, dtype, tokens, tables)
    return Learner(last.model, kept.weights)


def model_of(config: TrainConfig) -> nn.Module:
    """Return the model that a run trains; configs of one program share it."""
    return learner_of(program(config)).model


def reference_model(config: TrainConfig) -> nn.Module:
    """Return the model of the reference of pairs: the policy's, without adapters."""
    if isinstance(config.weights, Adapters):
        config = replace(config, weights=Float())
    # The reference is quantized once, for the products of the recipe.
    return learner_of(program(replace(config, products=None))).model


def reading(config: TrainConfig) -> TrainConfig:
    """Return the run whose state has quantized weights as the products read them: this
    one, or one of the last products' recipe, if this state has none of their form.
    """
    products = config.products
    if products is None or isinstance(config.weights, Stored):
        return config
    if same_form(tcfp_jax.recipe(config.recipe), products):
        return config
    return replace(config, recipe=products, products=None)


def layouts(config: TrainConfig) -> Mapping[str, Weight] | None:
    """Return the contracted axes of each weight by path; None if all kernels are
    `[..., k, n]`.
    """
    weights = learner_of(reading(config)).weights
    return weights if isinstance(weights, Mapping) else None


def quantized_of(config: TrainConfig, state: TrainState | PairState) -> dict[str, Any]:
    """Return the quantized weights that layers read next to float parameters."""
    own = reading(config)
    if own is config:
        return tcfp_jax.layer_state(state.opt_state)
    # They are made at each step.
    weights = learner_of(own).weights
    return tcfp_jax.layer_state(tcfp_jax.error_feedback(weights).init(state.params))
