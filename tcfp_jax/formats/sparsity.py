"""Structured sparsity: keep the m largest of every n values."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from tcfp_jax.formats import float_bits


def sparse(x: ArrayLike, n: int, m: int, dim: int = -1) -> jax.Array:
    """Set all but the m largest magnitudes of every n values along `dim` to zero; ties keep the lower index.

    Args:
      x: real floats of any shape.
      n: the number of values of a group, a divisor of the axis.
      m: the number of values to keep, 1 to n - 1.
      dim: the axis, negative or not.

    Returns:
      The shape and dtype of `x`; kept values keep their signs. NaN counts as the largest magnitude. Only kept values
      have a gradient.

    Raises:
      TypeError: `x` is not real floating point.
      ValueError: n does not divide the axis, m is not between 1 and n - 1, or the axis does not exist.

    Source: TensorCast (AMD), `sparse`, whose result loses the signs.

    >>> sparse(jnp.array([1.0, -3.0, 2.0, -2.0]), 4, 2).tolist()
    [0.0, -3.0, 2.0, 0.0]
    """
    array = jnp.asarray(x)
    return jnp.where(largest_mask(array, n, m, dim), array, jnp.zeros_like(array))


def largest_mask(x: jax.Array, n: int, m: int, dim: int) -> jax.Array:
    """Return where `sparse` keeps a value: m of every n.

    >>> largest_mask(jnp.ones(4), 4, 2, -1).tolist()
    [True, True, False, False]
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"x is {x.dtype}; sparsity takes real floats, such as x.astype(float32)")
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"dim={dim} is not an axis of shape {x.shape}; use one from {-x.ndim} to {x.ndim - 1}")
    if not 1 <= m < n:
        raise ValueError(f"m={m} of n={n}: keep at least one and fewer than all; use n=4, m=2")
    if x.shape[dim] % n:
        raise ValueError(f"n={n} does not divide axis {dim} of shape {x.shape}; pad it to a multiple")
    rows = jnp.moveaxis(jax.lax.stop_gradient(x), dim, -1)
    # As integers: XLA:CPU compares subnormals as zeros.
    magnitude = (float_bits.to_bits(rows) & 0x7FFFFFFF).reshape(*rows.shape[:-1], -1, n)
    order = jnp.argsort(-magnitude, axis=-1, stable=True)
    rank = jnp.argsort(order, axis=-1, stable=True)
    return jnp.moveaxis((rank < m).reshape(rows.shape), -1, dim)
