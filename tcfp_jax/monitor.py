"""Whether updates arrive: what rounding made of them, for each stored weight, on request.

A learning rate far below the grid of a weight moves few of its entries a step, and with rounding that drops remainders
none at all; nothing else in a run shows it. `tcfp_jax.optim.adamw(quality="on")` keeps the same numbers in its state.
"""

from typing import Any

import jax.numpy as jnp

from tcfp_jax.optim.steps import Quality, quality_of
from tcfp_jax.paths import leaves
from tcfp_jax.weights.stored import Stored
from tcfp_jax.weights.training import is_stored, training_of

__all__ = ["Quality", "update_quality"]


def update_quality(before: Any, after: Any, updates: Any) -> dict[str, Quality]:
    """What became of the updates in each stored weight, by path: which share of it moved, and its effective descent.

    Args:
      before: the parameters.
      after: the parameters after `tcfp_jax.apply_updates`.
      updates: what was to be added, floats.

    Raises:
      ValueError: there is no float update of a stored weight.

    >>> import jax
    >>> from tcfp_jax.optim.stored import apply_updates, store
    >>> params = store({"kernel": jnp.full((2, 2), 0.5)}, "tcfp12_single", key=jax.random.key(0))
    >>> updates = {"kernel": jnp.full((2, 2), 0.25)}
    >>> found = update_quality(params, apply_updates(params, updates), updates)["kernel"]
    >>> float(found.moved), float(found.edq)
    (1.0, 1.0)
    """
    old, new, wanted = leaves(before, is_stored), leaves(after, is_stored), leaves(updates)
    found = {}
    for path, weight in old.items():
        if not isinstance(weight, Stored):
            continue
        if path not in new or path not in wanted:
            raise ValueError(
                f"there is no float update of {path!r}: pass the parameters before and after a step, and the updates "
                'of an optax transformation; tcfp_jax.optim.adamw writes weights and has quality="on" for these numbers'
            )
        layout = training_of(weight).weight.layout.stacked(wanted[path].ndim)
        found[path] = quality_of(weight, new[path], layout.matrix(wanted[path]).astype(jnp.float32))
    return found
