"""A sample of a weight: 16 values of each matrix, 64 bytes, which show that an array is
another than before.

A sample detects changes of a whole weight: an optimizer's step, an average, another
checkpoint, a factor. It may miss a change of a few values, such as one row of a table.
Two users compare samples: `freshness` for weights that an optimizer keeps next to float
parameters, and `training` for weights that are the parameters.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_kernels.operands import Operand, Tensor
from pallas_kernels.specs import entries_of, sharding_of

SIZE = 16  # values in a sample
# Multiples of these numbers spread evenly over the unit square (the R2 sequence of the
# plastic number).
_STEPS = (0.7548776662466927, 0.5698402909980532)


def sample_of(w: Array) -> Array:
    """Return 16 values of each matrix of `w` `[..., k, n]`, float32 `[..., 16]`; their
    places depend on k and n alone.

    Half of the places are the transposes of the other half, so a matrix and its
    transpose have the same sample in two orders. The sample is NaN, which means "not
    known" and fits every weight, for a matrix without values and inside `shard_map`,
    where a device sees a part of the weight with other places.

    >>> sample_of(jnp.ones((3, 8, 4))).shape
    (3, 16)
    """
    return _unknown(w) if is_part(w) else _sample(w)


def sample_of_codes(rows: Operand) -> Array:
    """Return the sample of the values of two halves `[..., k, n]`.

    A value is a product of codes and scale. Arithmetic on a tree changes the sample as
    it changes a value, and codes and scale each: their product is then another one.

    >>> from tcfp_jax.weights.quantization import split
    >>> w = jnp.full((4, 4), 0.5)
    >>> bool((sample_of_codes(split(w)) == sample_of(w)).all())
    True
    """
    return _unknown(rows.values) if is_part(rows.values) else _sample_of_codes(rows)


def sample_of_transpose(sample: Array | None) -> Array | None:
    """Return the sample of the transposed matrix: its two halves change places."""
    if sample is None:
        return None
    return jnp.roll(sample, sample.shape[-1] // 2, axis=-1)


def agree(found: Array, sample: Array, tolerance: Array, w: Array) -> Array:
    """Return whether two samples of `w` `[..., k, n]` agree; bool `[...]`. NaN in
    either agrees with everything.
    """
    sharding = _of_stack(w)
    if sharding is not None:
        tolerance = jax.sharding.reshard(
            jnp.broadcast_to(tolerance, sample.shape), sharding
        )
        sample = jax.sharding.reshard(sample, sharding)
    close = (
        (jnp.abs(found - sample) <= tolerance) | (found == sample) | jnp.isnan(sample)
    )
    return jnp.all(close, axis=-1)


def is_part(w: Array) -> bool:
    """Return whether `w` has no values, or is, or may be, one device's part of a
    weight.
    """
    kind = jax.typeof(w)
    mesh = getattr(getattr(kind, "sharding", None), "mesh", None)
    return (
        0 in w.shape[-2:]
        or bool(getattr(kind, "vma", None))
        or AxisType.Manual in getattr(mesh, "axis_types", ())
    )


def _unknown(w: Array) -> Array:
    return jnp.full((*w.shape[:-2], SIZE), jnp.nan, jnp.float32)


@jax.jit
def _sample(w: Array) -> Array:
    return _taken(w).astype(jnp.float32)


@jax.jit
def _sample_of_codes(rows: Operand) -> Array:
    def numbers(codes: Array) -> Array:
        # As bytes, which devices of a mesh can add up. Without the barrier XLA (jaxlib
        # 0.10 to 0.12) takes the bytes of a constant stack in another order.
        as_bytes = _taken(lax.bitcast_convert_type(codes, jnp.uint8))
        as_bytes = lax.optimization_barrier(as_bytes)
        return lax.bitcast_convert_type(as_bytes, codes.dtype).astype(jnp.float32)

    scale = rows.scale[..., None]
    if rows.scaling != Tensor():
        scale = _taken(jnp.broadcast_to(rows.scale_of_values(), rows.values.shape))
    # hi + lo has 18 bits, and the scale is a power of two: nothing is rounded.
    return (numbers(rows.values) + numbers(rows.residual)) * scale


def _taken(w: Array) -> Array:
    # A gather of single values: a partitioned program reads them on their devices and
    # adds up 16 numbers.
    taken = w.at[(..., *_places(*w.shape[-2:]))]
    return taken.get(mode="promise_in_bounds", out_sharding=_of_stack(w))


def _places(k: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows and columns of the values in the sample of a matrix `[k, n]`."""
    count = np.arange(1, SIZE // 2 + 1)
    first, second = (np.modf(count * step)[0] for step in _STEPS)
    rows = np.concatenate([first, second]) * k
    columns = np.concatenate([second, first]) * n
    return rows.astype(np.int32), columns.astype(np.int32)


def _of_stack(w: Array) -> NamedSharding | None:
    """Return the sharding of a sample of `w` under explicit axes.

    It is split as the stack, and the 16 values are whole.
    """
    sharding = sharding_of(w)
    if sharding is None:
        return None
    stack = entries_of(w)[: w.ndim - 2]
    return NamedSharding(sharding.mesh, PartitionSpec(*stack, None))
