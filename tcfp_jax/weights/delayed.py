"""Delayed scaling of weights (PDDS): the scale of a step comes from amax values that earlier steps saw.

The state is one float32 scalar per weight: an exponential moving average of max |W| that rises at once and falls
slowly, `amax_t = max(max |W_t|, decay * amax_{t-1} + (1 - decay) * max |W_t|)`. Quantization at step t uses
`amax_{t-1}`, so its one pass over W needs no reduction before it; max |W_t| is a by-product of that pass.

This is safe because `W_lo` reaches twice as far as `W_hi` with the shared scale: a weight may double between two steps
without loss, and one step later the scale fits again. A plain moving average (decay 0.999) takes hundreds of steps to
follow a growing weight, and clips all the while.
"""

import jax
import jax.numpy as jnp

DECAY = 0.999


def next_amax(carried: jax.Array, seen: jax.Array, *, decay: float = DECAY) -> jax.Array:
    """Return the amax of the next step, from the carried one and the one just seen (float32 scalars).

    NaN and inf pass through, so that a broken weight stays visible.

    >>> float(next_amax(jnp.float32(1.0), jnp.float32(3.0))), float(next_amax(jnp.float32(1.0), jnp.float32(0.0)))
    (3.0, 0.9990000128746033)
    """
    return jnp.maximum(seen, decay * carried + (1 - decay) * seen)
