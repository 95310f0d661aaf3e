"""ECO: what rounding a stored weight left, injected into its first moment. A fork tries it; the library has it not.

    e = wanted - stored
    m = m + (1 - b1**t) / lr * (1 - 1 / b1) * (sqrt(v / (1 - b2**t)) + eps) * (1 - lr weight_decay) * e

so that the next update returns what this one lost, without a buffer of its own (arXiv 2601.22101, for AdamW). The
factor grows as 1 / lr: below a thousandth of the schedule's peak nothing is injected.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from tcfp_jax.optim import AdamWState
from tcfp_jax.weights.training import is_stored

_SMALLEST_RATE = 1e-3


def eco(
    tx: optax.GradientTransformation,
    schedule: optax.Schedule,
    *,
    peak: float,
    b1: float,
    b2: float,
    weight_decay: float,
    eps: float = 1e-8,
) -> optax.GradientTransformation:
    """`tcfp_jax.optim.adamw` with float32 moments and these settings, and with ECO's injection.

    >>> import tcfp_jax
    >>> params = tcfp_jax.store({"kernel": jnp.full((2, 2), 0.3)}, "tcfp12_single", key=jax.random.key(0))
    >>> plain = tcfp_jax.optim.adamw(1e-3, b2=0.95, moments="float32")
    >>> tx = eco(plain, lambda step: 1e-3, peak=1e-3, b1=0.9, b2=0.95, weight_decay=1e-4)
    >>> gradients = {"kernel": jnp.ones((2, 2))}
    >>> found = [t.update(gradients, t.init(params), params)[1].mu["kernel"] for t in (plain, tx)]
    >>> bool(jnp.all(found[0] == 0.1)), bool(jnp.any(found[1] != 0.1))
    (True, True)
    """

    def update(grads: Any, state: AdamWState, params: Any | None = None) -> tuple[Any, AdamWState]:
        made, after = tx.update(grads, state, params)
        rate, count = jnp.asarray(schedule(state.count), jnp.float32), after.count.astype(jnp.float32)

        def injected(parameter: Any, new: Any, m: jax.Array, v: jax.Array) -> jax.Array:
            if not is_stored(parameter):
                return m
            root = jnp.sqrt(v / (1 - b2**count)) + eps
            before = parameter.dequantize()
            wanted = before - rate * (m / (1 - b1**count) / root + weight_decay * before)
            error = (wanted - new.stored.dequantize()) * (1 - rate * weight_decay)
            factor = (1 - b1**count) / jnp.maximum(rate, 1e-9) * (1 - 1 / b1)
            taken = (rate > _SMALLEST_RATE * peak) & (after.count != state.count)
            return m + jnp.where(taken, factor * root * error, 0)

        treedef: Any
        leaves, treedef = jax.tree.flatten(params, is_leaf=is_stored)
        rest = (treedef.flatten_up_to(tree) for tree in (made, after.mu, after.nu))
        mu = [injected(*parts) for parts in zip(leaves, *rest, strict=True)]
        return made, after._replace(mu=treedef.unflatten(mu))

    return optax.GradientTransformation(tx.init, update)
