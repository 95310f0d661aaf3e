"""Whether updates arrive: what rounding made of them, for each stored weight, on request.

A learning rate far below the grid of a weight moves few of its entries a step, and with rounding that drops remainders
none at all; nothing else in a run shows it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tcfp_jax.paths import leaves
from tcfp_jax.weights.stored import Stored
from tcfp_jax.weights.training import is_stored, kernel_of


class Arrived(NamedTuple):
    """What rounding made of the update of one weight.

    Attributes:
      moved: the share of its entries whose value changed.
      quality: `<applied, wanted> / |wanted|^2`, the effective descent quality (EDQ) of Collage (Yu et al. 2024): 1
        where the update arrives as a whole, or on the average; 0 where it is lost, and of an update of zeros.
    """

    moved: jax.Array
    quality: jax.Array


def arrived(before: Any, after: Any, updates: Any) -> dict[str, Arrived]:
    """What of the updates arrived in each stored weight, by path.

    Args:
      before: the parameters.
      after: the parameters after `tcfp_jax.apply_updates`.
      updates: what was to be added, floats.

    Raises:
      ValueError: the trees differ, or an update is a weight already; `tcfp_jax.optim.adamw(monitor="updates")` keeps
        these numbers in its state.

    >>> from tcfp_jax.optim.stored import apply_updates, store
    >>> params = store({"kernel": jnp.full((2, 2), 0.5)}, "tcfp12_single", key=jax.random.key(0))
    >>> updates = {"kernel": jnp.full((2, 2), 0.25)}
    >>> found = arrived(params, apply_updates(params, updates), updates)["kernel"]
    >>> float(found.moved), float(found.quality)
    (1.0, 1.0)
    """
    old, new, wanted = leaves(before, is_stored), leaves(after, is_stored), leaves(updates)
    weights = {path: weight for path, weight in old.items() if isinstance(weight, Stored)}
    missing = sorted(path for path in weights if path not in new or path not in wanted)
    if missing:
        raise ValueError(
            f"there is no float update of {missing[0]!r}: pass parameters before and after a step, and the updates that "
            "an optax transformation made; tcfp_jax.optim.adamw writes weights, and has monitor= for these numbers"
        )
    return {path: of_weight(weight, new[path], wanted[path]) for path, weight in weights.items()}


def of_weight(before: Stored, after: Stored, wanted: jax.Array) -> Arrived:
    """The same of one weight and a float32 update of the kernel's shape."""
    applied = kernel_of(after, jnp.float32) - kernel_of(before, jnp.float32)
    square = jnp.sum(wanted.astype(jnp.float32) ** 2)
    quality = jnp.sum(applied * wanted.astype(jnp.float32)) / jnp.where(square == 0, 1.0, square)
    return Arrived(jnp.mean(applied != 0), quality)
