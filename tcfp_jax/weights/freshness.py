"""A check that a stored weight still belongs to its parameter, by a sample of the parameter's values.

Stored weights live in the optimizer's state, apart from the parameters. After parameters were averaged (EMA), restored
or edited, layers would silently multiply by their old values. So `error_feedback` keeps 16 values of each parameter, 64
bytes per matrix, and `current` compares them with the parameter that a layer holds.

The sample detects changes of a whole weight: an optimizer's step, an average, another checkpoint, a factor. It may miss
a change of a few values, such as one row of a table.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_kernels.specs import entries_of, sharding_of
from tcfp_jax.weights.stored import Stored

SIZE = 16  # values in a sample
# Multiples of these numbers spread evenly over the unit square (the R2 sequence of the plastic number).
_STEPS = (0.7548776662466927, 0.5698402909980532)


def sample_of(w: jax.Array) -> jax.Array:
    """Return 16 values of each matrix of `w` `[..., k, n]`, float32 `[..., 16]`; their places depend on k and n alone.

    Half of the places are the transposes of the other half, so a matrix and its transpose have the same sample in two
    orders. The sample is NaN, which means "not known" and fits every weight, for a matrix without values and inside
    `shard_map`, where a device sees a part of the weight with other places.

    >>> sample_of(jnp.ones((3, 8, 4))).shape
    (3, 16)
    """
    if _in_shard_map(w) or 0 in w.shape[-2:]:
        return jnp.full((*w.shape[:-2], SIZE), jnp.nan, jnp.float32)
    return _sample(w)


def current(stored: Stored, w: jax.Array) -> Stored:
    """Return the stored weight without its sample, if it was made of this parameter.

    With concrete arrays another parameter raises. A traced program cannot raise, so it makes the scales NaN, and every
    product with them; this costs reading 16 values. A sharded parameter is not gathered: its devices add up 64 bytes.
    Inside `shard_map` nothing is compared, because a device sees only its part.

    Args:
      stored: a weight from `layer_state`. Without a sample it is returned unchanged.
      w: the parameter as the same matrix `[..., k, n]` (its `Layout.matrix`), before any `swap`. It gets no gradient.

    Raises:
      ValueError: the parameter has another shape, or, with concrete arrays, other values.
    """
    sample = stored.sample
    if sample is None:
        return stored
    if not stored.holds(w.shape):
        raise ValueError(
            f"the stored weight is {list(stored.shape)}, but its parameter is the matrix {list(w.shape)}; "
            "pass the layer_state of the optimizer that owns these parameters"
        )
    checked = dataclasses.replace(stored, sample=None)
    if _in_shard_map(w) or 0 in w.shape[-2:]:
        return checked
    w, sample = lax.stop_gradient((w, sample))
    same = _agrees(w, sample)
    if any(isinstance(value, jax.core.Tracer) for value in (w, same, *jax.tree.leaves(checked))):
        return checked.poisoned_unless(same)
    if not bool(jnp.all(same)):
        raise ValueError(
            f"the stored weight {list(stored.shape)} was made of other parameters than those passed: "
            f"{_differ(w, sample)}; pass layer_state of the optimizer that owns these parameters, or none: without it "
            "weights are quantized on the fly"
        )
    return checked


def _places(k: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows and columns of the values in the sample of a matrix `[k, n]`."""
    first, second = (np.modf(np.arange(1, SIZE // 2 + 1) * step)[0] for step in _STEPS)
    of_rows, of_columns = np.concatenate([first, second]), np.concatenate([second, first])
    return (of_rows * k).astype(np.int32), (of_columns * n).astype(np.int32)


def _in_shard_map(w: jax.Array) -> bool:
    """Return whether `w` is, or may be, one device's part of a weight."""
    kind = jax.typeof(w)
    mesh = getattr(getattr(kind, "sharding", None), "mesh", None)
    return bool(getattr(kind, "vma", None)) or AxisType.Manual in getattr(mesh, "axis_types", ())


@jax.jit
def _sample(w: jax.Array) -> jax.Array:
    # A gather of single values: a partitioned program reads them on their devices and adds up 16 numbers.
    taken = w.at[(..., *_places(*w.shape[-2:]))]
    return taken.get(mode="promise_in_bounds", out_sharding=_of_stack(w)).astype(jnp.float32)


def _of_stack(w: jax.Array) -> NamedSharding | None:
    """Return the sharding of a sample of `w` under explicit axes: split as its stack, with the 16 values whole."""
    sharding = sharding_of(w)
    stack = entries_of(w)[: w.ndim - 2]
    return None if sharding is None else NamedSharding(sharding.mesh, PartitionSpec(*stack, None))


@jax.jit
def _agrees(w: jax.Array, sample: jax.Array) -> jax.Array:
    """Return whether each matrix of `w` `[..., k, n]` has this sample `[..., 16]`; bool `[...]`.

    A training step computes `params + updates` twice, in the optimizer's transformation and in the caller, and a
    compiler may round the two differently. With a fused multiply-add a value differs in the last bits of the larger
    term, and rounded to 16 bits it may be the neighbour of the other.
    """
    found = _sample(w)
    sharding = _of_stack(w)
    if sharding is not None:
        sample = jax.sharding.reshard(sample, sharding)
    largest = jnp.max(jnp.where(jnp.isfinite(sample), jnp.abs(sample), 0), axis=-1, keepdims=True)
    tolerance = 8 * float(jnp.finfo(jnp.float32).eps) * largest
    if jnp.finfo(w.dtype).bits < 32:
        tolerance = tolerance + 2 * float(jnp.finfo(w.dtype).eps) * jnp.abs(sample)
    # NaN in a sample means "not known", or the weight's own scale is NaN.
    close = (jnp.abs(found - sample) <= tolerance) | (found == sample) | jnp.isnan(sample)
    return jnp.all(close, axis=-1)


def _differ(w: jax.Array, sample: jax.Array) -> str:
    """Return a message about the values that differ most."""
    found, kept = (np.asarray(values).reshape(-1) for values in (_sample(w), sample))
    i = int(np.argmax(np.where(np.isnan(kept), 0, np.nan_to_num(np.abs(found - kept), nan=math.inf))))
    return f"a value of it was {kept[i]:.9g} and is {found[i]:.9g}"
