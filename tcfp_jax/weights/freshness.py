"""Whether a stored weight still is the parameter beside it: a sample of it travels along and is compared.

Stored weights live in the optimizer's state, parameters live beside it, and nothing ties the two: averaged (EMA),
restored or edited parameters beside an old state would be multiplied by what they were. So `error_feedback` keeps 16
values of each parameter, 64 bytes a matrix, and `current` compares them with the parameter that a layer holds.

The sample sees what changes a weight as a whole: a step of an optimizer, an average, another checkpoint, a factor. It
cannot promise to see a change of a few values that it does not hold, such as one row of a table.
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

SIZE = 16  # values of a sample
# Multiples of these spread evenly over the unit square, whatever their number (the plastic number's R2 sequence).
_STEPS = (0.7548776662466927, 0.5698402909980532)


def sample_of(w: jax.Array) -> jax.Array:
    """16 values of each matrix of `w` `[..., k, n]`, at places that depend on k and n alone; float32 `[..., 16]`.

    Half of the places are the transposes of the other half, so that a matrix and its transpose have one sample in two
    orders. In a `shard_map` each device sees a part of the weight, whose places are others: the sample is then NaN,
    which stands for "not known" and fits every weight. So it is of a matrix without values.

    >>> sample_of(jnp.ones((3, 8, 4))).shape
    (3, 16)
    """
    if _in_shard_map(w) or 0 in w.shape[-2:]:
        return jnp.full((*w.shape[:-2], SIZE), jnp.nan, jnp.float32)
    return _sample(w)


def current(stored: Stored, w: jax.Array) -> Stored:
    """The stored weight, if it was made of this parameter; its sample is gone, for it has served.

    With concrete arrays another parameter raises. In a traced program, where nothing can raise, it makes the scales
    NaN, and every product with them: loud, and as cheap as reading 16 values. A sharded parameter costs one reduction
    of 64 bytes over its devices, and is never gathered. Inside `shard_map` nothing is compared: places count within the
    part that a device holds there, and would be others than those of the whole.

    Args:
      stored: as `layer_state` holds it; without a sample it is returned as it is.
      w: the parameter as the same matrix `[..., k, n]` (`Layout.matrix` of it), before any `swap`. It gets no gradient.

    Raises:
      ValueError: the parameter has another shape, or, with concrete arrays, other values.

    >>> from tcfp_jax.recipes import recipe
    >>> from tcfp_jax.weights.stored import quantize_weight
    >>> w = jnp.ones((4, 4))
    >>> made = dataclasses.replace(quantize_weight(w, recipe("tcfp12"))[0], sample=sample_of(w))
    >>> float(current(made, w).dequantize()[0, 0])
    1.0
    """
    sample = stored.sample
    if sample is None:
        return stored
    if not stored.holds(w.shape):
        raise ValueError(
            f"the stored weight is {list(stored.shape)}, but the parameter beside it is the matrix {list(w.shape)}; "
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


def places(k: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows and columns of a matrix `[k, n]` that its sample holds.

    >>> rows, columns = places(100, 200)
    >>> swapped = places(200, 100)
    >>> bool((np.roll(swapped[1], SIZE // 2) == rows).all() and (np.roll(swapped[0], SIZE // 2) == columns).all())
    True
    """
    first, second = (np.modf(np.arange(1, SIZE // 2 + 1) * step)[0] for step in _STEPS)
    of_rows, of_columns = np.concatenate([first, second]), np.concatenate([second, first])
    return (of_rows * k).astype(np.int32), (of_columns * n).astype(np.int32)


def _in_shard_map(w: jax.Array) -> bool:
    """Whether `w` is, or may be, one device's part of a weight."""
    kind = jax.typeof(w)
    mesh = getattr(getattr(kind, "sharding", None), "mesh", None)
    return bool(getattr(kind, "vma", None)) or AxisType.Manual in getattr(mesh, "axis_types", ())


@jax.jit
def _sample(w: jax.Array) -> jax.Array:
    # Single values are gathered, so a partitioned program reads them where they lie and adds up 16 numbers.
    taken = w.at[(..., *places(*w.shape[-2:]))]
    return taken.get(mode="promise_in_bounds", out_sharding=_of_stack(w)).astype(jnp.float32)


def _of_stack(w: jax.Array) -> NamedSharding | None:
    """Under a mesh with explicit axes, that of a sample of `w`: its stack's, and the sample whole."""
    sharding = sharding_of(w)
    stack = entries_of(w)[: w.ndim - 2]
    return None if sharding is None else NamedSharding(sharding.mesh, PartitionSpec(*stack, None))


@jax.jit
def _agrees(w: jax.Array, sample: jax.Array) -> jax.Array:
    """Whether each matrix of `w` `[..., k, n]` has this sample `[..., 16]`; bool `[...]`.

    `params + updates` is computed twice in a training step, by the optimizer's transformation and by the caller, and a
    compiler may round the two differently: with a fused multiply-add a value differs in the last bits of the larger
    term, and rounded to 16 bits it may come out as the neighbour of the other.
    """
    found = _sample(w)
    sharding = _of_stack(w)
    if sharding is not None:
        sample = jax.sharding.reshard(sample, sharding)
    largest = jnp.max(jnp.where(jnp.isfinite(sample), jnp.abs(sample), 0), axis=-1, keepdims=True)
    tolerance = 8 * float(jnp.finfo(jnp.float32).eps) * largest
    if jnp.finfo(w.dtype).bits < 32:
        tolerance = tolerance + 2 * float(jnp.finfo(w.dtype).eps) * jnp.abs(sample)
    # A NaN in a sample: not known, or of a weight whose scale is NaN by itself.
    close = (jnp.abs(found - sample) <= tolerance) | (found == sample) | jnp.isnan(sample)
    return jnp.all(close, axis=-1)


def _differ(w: jax.Array, sample: jax.Array) -> str:
    """The values that differ most, in words."""
    found, kept = (np.asarray(values).reshape(-1) for values in (_sample(w), sample))
    i = int(np.argmax(np.where(np.isnan(kept), 0, np.nan_to_num(np.abs(found - kept), nan=math.inf))))
    return f"a value of it was {kept[i]:.9g} and is {found[i]:.9g}"
