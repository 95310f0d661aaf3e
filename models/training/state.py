"""State of a run: parameters, and the optimizer with its state."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

import tcfp_jax
from tcfp_jax import optim
from tcfp_jax.recipes import Recipe
from tcfp_jax.weights.layout import Weight
from tcfp_jax.weights.parameter import is_quantized

from ..nets.adapters import adapting, has_adapters, merged
from ..nets.meshes import OnMesh
from .forms import Adapters, Float, Stored
from .settings import TrainConfig

# Streams drawn from the seed. The numbers are arbitrary and fixed: changing one changes
# every run.
WEIGHTS, BATCHES, ROUNDING, JITTER, MOMENTS, PRODUCTS = range(6)
B1 = 0.9  # decay of AdamW's moments
B2 = 0.95


class TrainState(NamedTuple):
    """Everything that a checkpoint holds.

    Parameters are float32 or stored. Next to float parameters, the optimizer's state
    holds the quantized weights. The step is the next one.
    """

    params: Any
    opt_state: Any
    step: jax.Array


class PairState(NamedTuple):
    """A `TrainState` of pairs of answers with a copy of the first parameters.

    Adapters need none, because the weights next to them do not change.

    Attributes:
      reference: Variables of the model, in FP8 if the products are
        (`models.training.dpo.reference_of`).
    """

    params: Any
    opt_state: Any
    step: jax.Array
    reference: Any


def optimizer_of(
    config: TrainConfig,
    weights: Recipe | Mapping[str, Weight],
    seed_key: jax.Array,
    schedule: optax.Schedule | None = None,
) -> optax.GradientTransformation:
    """Return clipped AdamW for the form of the weights.

    For float weights it is a chain, whose last state holds the quantized weights.

    Args:
      config: The run.
      weights: The model's, as `error_feedback` takes them.
      seed_key: Key of the run's seed.
      schedule: Learning rate. None warms up over a tenth of the steps and falls as a
        cosine over the others.
    """
    if schedule is None:
        schedule = optax.warmup_cosine_decay_schedule(
            init_value=0.0,
            peak_value=config.learning_rate,
            warmup_steps=max(1, config.steps // 10),
            decay_steps=max(2, config.steps),
            end_value=config.learning_rate * config.final_fraction,
        )
    options: Any = dict(
        learning_rate=schedule,
        b1=B1,
        b2=B2,
        weight_decay=config.weight_decay,
        mask=_is_matrix,
    )
    match config.weights:
        case Stored(moments, _):
            draws = moments != "float32"
            return optim.adamw(
                **options,
                moments=moments,
                max_norm=config.clip_norm,
                key=jax.random.fold_in(seed_key, MOMENTS) if draws else None,
            )
        case Adapters():
            clip = optax.clip_by_global_norm(config.clip_norm)
            return adapting(optax.chain(clip, optax.adamw(**options)))
        case Float(error_dtype):
            recipe = tcfp_jax.recipe(config.recipe)
            rounding = jax.random.fold_in(seed_key, ROUNDING)
            return optax.chain(
                optax.clip_by_global_norm(config.clip_norm),
                optax.adamw(**options),
                tcfp_jax.error_feedback(
                    weights,
                    key=rounding if recipe.stochastic else None,
                    error_dtype=error_dtype if recipe.feedback else "float32",
                ),
            )


def stored_state(
    start: Any,
    weights: Recipe | Mapping[str, Weight],
    rounding: jax.Array,
    state_of: Callable[[Any], Any],
    places: Any,
    mesh: Mesh | None,
) -> Any:
    """Return the first state with stored weights that are made of floats on the host,
    layer by layer.

    Args:
      start: The floats, of which each leaf may read files.
      weights: The model's, as `tcfp_jax.store` takes them.
      rounding: Key of stochastic rounding.
      state_of: Function of the parameters that returns the state.
      places: Shardings of the state; None leaves them to JAX.
      mesh: The mesh of the shardings.
    """
    params = tcfp_jax.store(
        start,
        weights,
        key=rounding,
        gradient_dtype=jnp.bfloat16,
        shardings=None if places is None else places.params,
    )

    def others(params: Any) -> Any:
        return state_of(params)._replace(params=None)

    rest = None if places is None else places._replace(params=None)
    state = OnMesh(jax.jit(others, out_shardings=rest), mesh)(params)
    return state._replace(params=params)


def _is_matrix(params: Any) -> Any:
    return jax.tree.map(
        lambda leaf: is_quantized(leaf) or leaf.ndim >= 2, params, is_leaf=is_quantized
    )


def float_parameters(params: Any, quantized: Any = None) -> Any:
    """Return float32 parameters in Flax's own tree, all at once, for BF16 products.

    Adapters are merged with the `quantized` weights of `layer_state`. Use
    `models.training.exporting` for files instead, which needs no room for all floats.
    """
    if has_adapters(params):
        return _merged(params, quantized)
    stored = any(map(is_quantized, jax.tree.leaves(params, is_leaf=is_quantized)))
    return _dequantize(params) if stored else params


_dequantize = jax.jit(tcfp_jax.dequantize)
_merged = jax.jit(merged)


def jittered(params: Any, key: jax.Array, size: float) -> Any:
    """Return float parameters times `1 + size * normal`; stored ones are unchanged.

    Use this to see how far differences of rounding grow.
    """
    treedef: Any
    leaves, treedef = jax.tree.flatten(params, is_leaf=is_quantized)

    def moved(leaf: Any, key: jax.Array) -> Any:
        if is_quantized(leaf):
            return leaf
        return leaf * (1 + size * jax.random.normal(key, leaf.shape, leaf.dtype))

    return treedef.unflatten(map(moved, leaves, jax.random.split(key, len(leaves))))


def product_key(
    config: TrainConfig, state: TrainState, key: jax.Array
) -> jax.Array | None:
    """Return the key of the random bits in the products of the next step.

    None means that the recipe draws none.
    """
    if not tcfp_jax.recipe(config.products or config.recipe).draws:
        return None
    return jax.random.fold_in(jax.random.fold_in(key, state.step), PRODUCTS)
