"""Held-out evaluation of a run."""

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tcfp_jax.recipes import recipe

from ..nets.families import exact
from ..nets.meshes import OnMesh
from .batches import (
    check_text,
    heldout_offsets,
    heldout_windows,
    window_losses,
    windows_at,
)
from .dpo import (
    REWARDS,
    log_probabilities,
    numbers_of,
    reference_variables,
)
from .forms import Adapters
from .learners import model_of, program, quantized_of, reference_model
from .preferences import Preferences
from .settings import TrainConfig
from .state import PairState, TrainState, float_parameters


class Heldout(NamedTuple):
    """Results on held-out text, as in `models.training.running.RunResult`."""

    loss: float
    perplexity: float
    loss_bf16: float
    rewards: dict[str, float]


def evaluated(
    config: TrainConfig, state: TrainState, heldout: jax.Array, mesh: Mesh | None = None
) -> Heldout:
    """Evaluate a run on its held-out text or pairs."""
    if config.preferences is not None:
        loss, rewards = evaluate_pairs(config, state, heldout, mesh)
        return Heldout(loss, math.nan, math.nan, rewards)
    loss = evaluate(config, state, heldout, "trained", mesh)
    in_bf16 = evaluate(config, state, heldout, "bf16", mesh)
    return Heldout(loss, float(np.exp(np.float64(loss))), in_bf16, {})


def evaluate(
    config: TrainConfig,
    state: TrainState,
    heldout: jax.Array,
    products: Literal["trained", "bf16"] = "trained",
    mesh: Mesh | None = None,
) -> float:
    """Return the mean loss in nats per token over `config.heldout_windows` evenly
    spaced windows of `heldout`.

    With `products="trained"` layers multiply as in training, with the same quantized
    weights. "bf16" multiplies the same weights in BF16, which leaves out the error of
    FP8 products. Losses are float32; they are summed in float32 within a window and in
    float64 over windows.

    Raises:
      ValueError: the text is shorter than one window.
    """
    check_text("held-out", heldout, config)
    offsets = heldout_offsets(config, heldout)
    params = state.params
    quantized = quantized_of(config, state)
    if products == "bf16" and isinstance(config.weights, Adapters):
        # Floats of weights that are frozen in few bits may fit no device.
        plain = dict.fromkeys(("forward", "dgrad", "wgrad"), "bf16")
        config = replace(config, products=recipe(config.recipe, **plain))
    elif products == "bf16" and config.update == "backward":
        # Nor may floats next to a state that leaves no room for all gradients.
        config = replace(config, products=exact(recipe(config.recipe)))
    elif products == "bf16":
        # A separate program dequantizes, so that all kinds of weights share one program
        # of the evaluation.
        config = config.in_bf16
        params = float_parameters(params, quantized)
        quantized = {}
    compiled = _evaluate_function(program(config), mesh)
    found = compiled(params, quantized, jnp.asarray(heldout), offsets)
    windows = np.asarray(found, np.float64).reshape(-1, 2)
    losses, counted = windows[: heldout_windows(config, heldout)].T
    return float(losses.sum() / counted.sum() if heldout.ndim > 1 else losses.mean())


def evaluate_pairs(
    config: TrainConfig,
    state: TrainState | PairState,
    heldout: jax.Array,
    mesh: Mesh | None = None,
) -> tuple[float, dict[str, float]]:
    """Return (mean loss, means of `models.training.dpo.REWARDS`) over at most
    `config.heldout_windows` evenly spaced held-out pairs.
    """
    offsets = heldout_offsets(config, heldout)
    quantized = quantized_of(config, state)
    policy = {"params": state.params, "tcfp": quantized}
    reference = reference_variables(state)
    compiled = _pairs_function(program(config), mesh)
    found = compiled(policy, reference, jnp.asarray(heldout), offsets)
    numbers = np.asarray(found, np.float64).reshape(-1, 1 + len(REWARDS))
    loss, *rewards = numbers[: heldout_windows(config, heldout)].mean(axis=0).tolist()
    return loss, dict(zip(REWARDS, rewards, strict=True))


@functools.lru_cache(maxsize=16)
def _pairs_function(config: TrainConfig, mesh: Mesh | None) -> Any:
    model = model_of(config)
    frozen = reference_model(config)
    preferences = config.preferences or Preferences()

    def numbers(policy: Any, reference: Any, pairs: jax.Array) -> jax.Array:
        of_policy = log_probabilities(model, policy, pairs)
        expected = log_probabilities(frozen, reference, pairs)
        return numbers_of(of_policy, expected, preferences)

    return _by_batches(numbers, config, mesh)


@functools.lru_cache(maxsize=16)
def _evaluate_function(config: TrainConfig, mesh: Mesh | None) -> Any:
    model = model_of(config)

    def losses(params: Any, quantized: Any, windows: jax.Array) -> jax.Array:
        losses, counted = window_losses(model, params, quantized, windows)
        if counted is None:
            found = [losses.mean(axis=-1), jnp.ones(len(losses))]
        else:
            number = counted.sum(axis=-1, dtype=jnp.float32)
            found = [losses.sum(axis=-1), number]
        return jnp.stack(found, axis=-1)

    return _by_batches(losses, config, mesh)


def _by_batches(
    numbers: Callable[..., jax.Array], config: TrainConfig, mesh: Mesh | None
) -> Any:
    """Return the compiled function `(*variables, text, offsets)` of the numbers of
    windows `(*variables, windows)`, for one batch of offsets after the other.
    """

    def run(*operands: Any) -> jax.Array:
        *variables, text, offsets = operands

        def of_batch(offsets: jax.Array) -> jax.Array:
            return numbers(*variables, windows_at(text, offsets, config))

        return jax.lax.map(of_batch, offsets)

    whole = None if mesh is None else NamedSharding(mesh, P())
    return OnMesh(jax.jit(run, out_shardings=whole), mesh)
