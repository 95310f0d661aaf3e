"""Sparsity, m of every n values: `sparse` keeps the largest ones."""

import numbers

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from tcfp_jax.formats.float_bits import magnitude_of, to_bits
from tcfp_jax.formats.rotation import check_axis


def sparse(x: ArrayLike, n: int, m: int, dim: int = -1) -> Array:
    """Set all but the m largest magnitudes of every n values along `dim` to zero.

    Ties keep the lower index. Use this for the m of n sparsity of tensor cores, such as
    2 of 4; `pack(x, datatype, sparsity=(n, m))` stores the kept values alone.

    Args:
      x: real floats of any shape.
      n: the number of values of a group, a divisor of the axis.
      m: the number of values to keep, 1 to n - 1.
      dim: the axis, negative or not.

    Returns:
      The shape and dtype of `x`; values keep their signs. NaN counts as the largest.
        Only kept values have a gradient.

    Raises:
      TypeError: `x` is not real floating point.
      ValueError: n does not divide the axis, m is not between 1 and n - 1, or the axis
        does not exist.

    Source: TensorCast (AMD), `sparse`, whose result loses the signs.

    >>> sparse(jnp.array([1.0, -3.0, 2.0, -2.0]), 4, 2).tolist()
    [0.0, -3.0, 2.0, 0.0]
    """
    array = jnp.asarray(x)
    return jnp.where(kept_by(array, n, m, dim), array, 0)


def kept_by(x: Array, n: int, m: int, dim: int = -1) -> Array:
    """Return where `sparse` keeps a value, with its arguments and errors."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(
            f"x is {x.dtype}; sparsity takes real floats, such as x.astype(float32)"
        )
    check_axis(dim, x.shape)
    if not (_is_count(n) and _is_count(m) and 1 <= m < n):
        raise ValueError(
            f"m={m!r} of n={n!r}: keep at least one and fewer than all; use n=4, m=2"
        )
    if x.shape[dim] % n:
        raise ValueError(
            f"n={n} does not divide axis {dim} of shape {x.shape}; pad it to a multiple"
        )
    rows = jnp.moveaxis(jax.lax.stop_gradient(x), dim, -1)
    # As integers: XLA:CPU compares subnormals as zeros.
    magnitude = magnitude_of(to_bits(rows)).reshape(*rows.shape[:-1], -1, n)
    order = jnp.argsort(-magnitude, axis=-1, stable=True)
    rank = jnp.argsort(order, axis=-1, stable=True)
    return jnp.moveaxis((rank < m).reshape(rows.shape), -1, dim)


def _is_count(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def compress(codes: Array, kept: Array, n: int, m: int) -> Array:
    """Return the m kept codes of every n, in their order, `[groups, m]`."""
    dropped = ~kept.reshape(-1, n)
    order = jnp.argsort(dropped, axis=-1, stable=True)[:, :m]
    return jnp.take_along_axis(codes.reshape(-1, n), order, axis=-1)


def expand(codes: Array, kept: Array) -> Array:
    """Return the codes that `compress` was given, with 0 for dropped ones.

    `codes` are `[groups, m]`, and `kept` is True for kept values, `[groups, n]`.
    """
    place = jnp.cumsum(kept.astype(jnp.int32), axis=-1) - 1
    place = jnp.clip(place, 0, codes.shape[-1] - 1)
    spread = jnp.take_along_axis(codes, place, axis=-1)
    return jnp.where(kept, spread, jnp.uint32(0))
