"""A check that a stored weight still belongs to its parameter, by a sample of the
parameter's values.

Stored weights live in the optimizer's state, apart from the parameters. After
parameters were averaged (EMA), restored or edited, layers would silently multiply by
their old values. So `error_feedback` keeps 16 values of each parameter, 64 bytes per
matrix (`sampling`), and `current` compares them with the parameter that a layer holds.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tcfp_jax.weights.sampling import agree, is_part, sample_of
from tcfp_jax.weights.stored import Stored


def current(stored: Stored, w: Array) -> Stored:
    """Return the stored weight without its sample, if it was made of this parameter.

    With concrete arrays another parameter raises. A traced program cannot raise, so it
    makes the scales NaN, and every product with them; this costs reading 16 values. A
    sharded parameter is not gathered: its devices add up 64 bytes. Inside `shard_map`
    nothing is compared, because a device sees only its part.

    Args:
      stored: a weight from `layer_state`. Without a sample it is returned unchanged.
      w: the parameter as the same matrix `[..., k, n]` (its `Layout.matrix`), before
        any `swap`. It gets no gradient.

    Raises:
      ValueError: the parameter has another shape, or, with concrete arrays, other
        values.
    """
    sample = stored.sample
    if sample is None:
        return stored
    if not stored.holds(w.shape):
        raise ValueError(
            f"the stored weight is {list(stored.shape)}, but its parameter is the"
            f" matrix {list(w.shape)}; pass the layer_state of the optimizer that owns"
            " these parameters"
        )
    checked = dataclasses.replace(stored, sample=None)
    if is_part(w):
        return checked
    w, sample = lax.stop_gradient((w, sample))
    same = _agrees(w, sample)
    if any(
        isinstance(value, jax.core.Tracer)
        for value in (w, same, *jax.tree.leaves(checked))
    ):
        return checked.poisoned_unless(same)
    if not bool(jnp.all(same)):
        raise ValueError(
            f"the stored weight {list(stored.shape)} was made of other parameters than"
            f" those passed: {_differ(w, sample)}; pass layer_state of the optimizer"
            " that owns these parameters, or none: without it weights are quantized on"
            " the fly"
        )
    return checked


@jax.jit
def _agrees(w: Array, sample: Array) -> Array:
    """Return whether each matrix of `w` `[..., k, n]` has this sample `[..., 16]`; bool
    `[...]`.

    A training step computes `params + updates` twice, in the optimizer's transformation
    and in the caller, and a compiler may round the two differently. With a fused
    multiply-add a value differs in the last bits of the larger term, and rounded to 16
    bits it may be the neighbour of the other.
    """
    found = sample_of(w)
    largest = jnp.max(
        jnp.where(jnp.isfinite(sample), jnp.abs(sample), 0), axis=-1, keepdims=True
    )
    tolerance = 8 * float(jnp.finfo(jnp.float32).eps) * largest
    if jnp.finfo(w.dtype).bits < 32:
        tolerance = tolerance + 2 * float(jnp.finfo(w.dtype).eps) * jnp.abs(sample)
    return agree(found, sample, tolerance, w)


def _differ(w: Array, sample: Array) -> str:
    """Return a message about the values that differ most."""
    found, kept = (np.asarray(values).reshape(-1) for values in (sample_of(w), sample))
    i = int(
        np.argmax(
            np.where(
                np.isnan(kept), 0, np.nan_to_num(np.abs(found - kept), nan=math.inf)
            )
        )
    )
    return f"a value of it was {kept[i]:.9g} and is {found[i]:.9g}"
