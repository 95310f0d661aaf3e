"""Direct preference optimization: the loss of pairs of answers against a frozen
reference.

    logits = log p(chosen) - log p(rejected)
             - (log r(chosen) - log r(rejected))    p of the policy, r of the reference
    loss   = -(1 - label_smoothing) log sigmoid(beta logits)
             - label_smoothing log sigmoid(-beta logits)

The log probability of an answer is the sum over its tokens. Sources: Rafailov et al.
2023, "Direct Preference Optimization"; Mitchell 2023, "A note on DPO with noisy
preferences"; TRL's `DPOTrainer`, loss_type="sigmoid".

The reference has the first parameters of the policy, as its products read them: `W_hi`
in FP8, one byte per weight. It is a part of the state. Adapters need none, because the
frozen weights next to them are the reference.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.typing import DTypeLike

from pallas_kernels.operands import Scaling
from tcfp_jax import layer_state, paths
from tcfp_jax.recipes import Dual, Halves, Recipe
from tcfp_jax.weights.parameter import Parameter
from tcfp_jax.weights.stored import Stored

from ..nets.adapters import SUFFIX
from ..nets.losses import IGNORED
from .examples import COUNTED, TOKENS
from .preferences import Preferences
from .state import PairState, TrainState

# Numbers of a step next to its loss, with the names of TRL.
REWARDS = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "rewards/margins",
)
TABLE = "embedding"  # rows of it are read from both halves


def dpo_losses(
    policy: jax.Array, reference: jax.Array, preferences: Preferences
) -> jax.Array:
    """Return the losses of pairs, `[pairs]`, from log probabilities of (chosen,
    rejected), `[pairs, 2]`.

    >>> same = jnp.zeros((1, 2))
    >>> dpo_losses(same, same, Preferences()).tolist() == [jnp.log(2.0)]
    True
    """
    chosen, rejected = (policy - reference).T
    logits = preferences.beta * (chosen - rejected)
    share = preferences.label_smoothing
    return -jax.nn.log_sigmoid(logits) * (1 - share) - (
        jax.nn.log_sigmoid(-logits) * share
    )


def told(found: jax.Array) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return the losses of steps and their rewards by name, from the result of steps;
    steps of other data have none.

    >>> losses, rewards = told(jnp.ones((2, 5)))
    >>> losses.shape, list(rewards)[0]
    ((2,), 'rewards/chosen')
    """
    values = np.asarray(found, np.float64)
    if values.ndim == 1:
        return values, {}
    losses, *rewards = values.T
    return losses, dict(zip(REWARDS, rewards, strict=True))


def shown_rewards(rewards: Mapping[str, np.ndarray]) -> str:
    """Return the means of rewards over steps for a line of progress; nothing of other
    data.
    """
    if not rewards:
        return ""
    accuracy = rewards["rewards/accuracies"].mean()
    margin = rewards["rewards/margins"].mean()
    return f", accuracy {accuracy:.0%}, margin {margin:.3f}"


def numbers_of(
    policy: jax.Array, reference: jax.Array, preferences: Preferences
) -> jax.Array:
    """Return the loss and `REWARDS` of pairs, `[pairs, 5]`, from log probabilities as
    in `dpo_losses`.

    A reward is `beta (log p - log r)` of an answer. An accuracy is 1 if the chosen
    answer has the larger one, else 0.
    """
    chosen, rejected = preferences.beta * (policy - reference).T
    columns = [
        dpo_losses(policy, reference, preferences),
        chosen,
        rejected,
        (chosen > rejected).astype(chosen.dtype),
        chosen - rejected,
    ]
    return jnp.stack(columns, axis=-1)


def pair_loss(
    model: nn.Module, reference_model: nn.Module, preferences: Preferences
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Return the function `(params, quantized, pairs, key, reference)` to (loss, means
    of the loss and of `REWARDS`), to be differentiated.

    The pairs are int32 `[pairs, 2, 3, length]`
    (`models.training.preferences.load_pairs`). A pair without a token that counts is
    padding. The reference has the variables of its model.
    """

    def loss_of(
        params: Any, quantized: Any, pairs: jax.Array, key: Any, reference: Any
    ) -> tuple[jax.Array, jax.Array]:
        expected = log_probabilities(reference_model, reference, pairs)
        inputs, targets, counted = _split(pairs)
        present = counted.any(axis=-1).reshape(-1, 2).any(axis=-1)

        def objective(losses: jax.Array) -> tuple[jax.Array, jax.Array]:
            found = numbers_of(_sums(losses), expected, preferences)
            found = jnp.where(present[:, None], found, 0.0)
            means = found.sum(axis=0) / present.sum()
            return means[0], means

        result: Any = model.apply(
            {"params": params, "tcfp": quantized},
            inputs,
            jnp.where(counted, targets, IGNORED),
            objective=objective,
            rngs=None if key is None else {"tcfp": key},
        )
        return result

    return loss_of


def log_probabilities(model: nn.Module, variables: Any, pairs: jax.Array) -> jax.Array:
    """Return the log probabilities of the answers, float32 `[pairs, 2]`, for logs."""
    inputs, targets, counted = _split(pairs)
    losses: Any = model.apply(variables, inputs, targets)
    return _sums(jnp.where(counted, losses, 0.0))


def _split(pairs: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return inputs, targets, and which of these count, `[2 pairs, positions]`."""
    rows = pairs.reshape(-1, *pairs.shape[2:])
    return rows[:, TOKENS, :-1], rows[:, TOKENS, 1:], rows[:, COUNTED, 1:] > 0


def _sums(losses: jax.Array) -> jax.Array:
    """Return log probabilities `[pairs, 2]` of losses that are 0 where nothing
    counts.
    """
    return -losses.sum(axis=-1).reshape(-1, 2)


def reference_of(
    params: Any, quantized: Any, recipe: Recipe, dtype: DTypeLike
) -> dict[str, Any]:
    """Return the variables of a frozen copy of a model: weights as products read them,
    and float matrices in the dtype of activations.

    Args:
      params: Parameters, stored or float.
      quantized: The quantized weights next to float parameters (`layer_state`).
      recipe: Recipe of products with float parameters.
      dtype: Dtype of activations.
    """
    weights = paths.entries(quantized)
    rest: dict[str, Any] = {}
    frozen: dict[str, Any] = {}
    for path, leaf in paths.entries(params).items():
        names = path.split("/")
        weight = weights.get(path)
        own = recipe
        if isinstance(leaf, Parameter):
            weight = leaf.read()
            own = leaf.described.weight.recipe
        if weight is None:
            paths.put(rest, names, leaf.astype(dtype) if leaf.ndim > 1 else leaf)
            continue
        if paths.find(rest, names[:-1]) is None:
            paths.put(rest, names[:-1], {})  # Flax finds a layer by its parameters
        halves: Halves = own.weight.forward if isinstance(own.weight, Dual) else "hi"
        if names[-1] == TABLE:
            halves = "hi+lo"
        paths.put(frozen, names, _frozen(weight, halves, own.scaling))
    return {"params": rest, "tcfp": frozen}


def _frozen(weight: Stored, halves: Halves, scaling: Scaling) -> Stored:
    """Return a weight without the operands that a forward product does not read."""
    weight = replace(weight, sample=None)
    # Without square scales products take a weight in both orientations alone.
    if halves == "hi+lo" or not scaling.serves_both:
        return weight
    name = "backward" if weight.forward is None else "forward"
    operand = replace(getattr(weight, name), lo=None, lo_scale=None)
    return replace(weight, **{"forward": None, "backward": None, name: operand})


def reference_variables(state: TrainState | PairState) -> Any:
    """Return the variables of the reference of pairs, which `reference_model` takes.

    Next to adapters they are the frozen weights.
    """
    if isinstance(state, PairState):
        return state.reference
    quantized = layer_state(state.opt_state)
    return {"params": without_adapters(state.params), "tcfp": quantized}


def without_adapters(params: Any) -> Any:
    """Return the parameters of the model that adapters adapt."""
    kept = {}
    for name, child in params.items():
        if not name.endswith(SUFFIX):
            is_layer = isinstance(child, Mapping)
            kept[name] = without_adapters(child) if is_layer else child
    return kept
