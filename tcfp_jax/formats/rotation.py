"""Hadamard rotations: an orthonormal mix of neighbours that can be undone.

A rotation spreads outliers before a cast. `rotate` defines it. `rotate_arrays` computes
the same sums in the same order, with one array for each value.
"""

import math
from collections.abc import Callable
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from pallas_kernels.checks import check_choice
from tcfp_jax.formats.float_bits import TINY

Direction = Literal["forward", "inverse"]
_SIZES = tuple(1 << power for power in range(1, 11))


def rotate(
    x: ArrayLike,
    size: int = 16,
    *,
    signs: ArrayLike | None = None,
    dim: int = -1,
    direction: Direction = "forward",
) -> Array:
    """Multiply every `size` values along `dim` by a Hadamard matrix over sqrt(size).

        forward: y = (x * signs) H / sqrt(size)
        inverse: x = (y H / sqrt(size)) * signs

    H is Sylvester's matrix, symmetric, with entries 1 and -1. If both operands of a
    product are rotated along the contraction, the product does not change: NVFP4
    training rotates both operands of weight gradients.

    Use this before a cast to few bits if single values are much larger than their
    neighbours, and choose random `signs` if they may be alike.

    Args:
      x: real floats of any shape; arithmetic is float32, where subnormal numbers count
        as zero.
      size: a power of two from 2 to 1024 that divides the axis. For powers of four, 1 /
        sqrt(size) is exact.
      signs: `[size]` of 1 and -1, or None for all ones.
      dim: the axis, negative or not.
      direction: "inverse" undoes "forward".

    Returns:
      The shape and dtype of `x`.

    Raises:
      TypeError: `x` is not real floating point.
      ValueError: a size that is not a power of two or does not divide the axis, signs
        of another shape, another direction.

    Source: Ashkboos et al. 2024, "QuaRot"; NVIDIA 2025, "Pretraining Large Language
    Models with NVFP4", section 4.2.

    >>> rotate(jnp.array([4.0, 0.0, 0.0, 0.0]), 4).tolist()
    [2.0, 2.0, 2.0, 2.0]
    """
    array = jnp.asarray(x)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(
            f"x is {array.dtype}; rotations take real floats, such as x.astype(float32)"
        )
    check_choice("direction", direction, get_args(Direction))
    if not isinstance(size, int | np.integer) or size not in _SIZES:
        raise ValueError(f"size={size!r} is not a power of two from 2 to 1024; use 16")
    check_axis(dim, array.shape)
    if array.shape[dim] % size:
        raise ValueError(
            f"size={size} does not divide axis {dim} of shape {array.shape}; use a"
            " smaller power of two"
        )
    rows = jnp.moveaxis(array.astype(jnp.float32), dim, -1)
    flips = jnp.ones(size, jnp.float32) if signs is None else checked_signs(signs, size)
    groups = _flushed(rows.reshape(*rows.shape[:-1], -1, size))
    if direction == "forward":
        groups = _hadamard(groups * flips, size)
    else:
        groups = _hadamard(groups, size) * flips
    rotated = _flushed(groups).reshape(rows.shape)
    return jnp.moveaxis(rotated, -1, dim).astype(array.dtype)


def check_axis(dim: object, shape: tuple[int, ...], name: str = "dim") -> None:
    """Raise a ValueError unless `dim`, negative or not, is an axis of this shape."""
    if not shape:
        raise ValueError(
            f"{name}={dim!r} of a number, which has no axis; pass an array"
        )
    if not isinstance(dim, int | np.integer) or not -len(shape) <= dim < len(shape):
        raise ValueError(
            f"{name}={dim!r} is not an axis of shape {shape}; use one from"
            f" {-len(shape)} to {len(shape) - 1}"
        )


def checked_signs(signs: ArrayLike, size: int) -> Array:
    """Return `signs` in float32.

    Raises:
      ValueError: they are not `size` of 1 and -1, as far as they are not traced.
    """
    flips = jnp.asarray(signs)
    if flips.shape != (size,):
        raise ValueError(
            f"signs have shape {flips.shape}; give {size} of them, each 1 or -1"
        )
    known = not isinstance(flips, jax.core.Tracer)
    if known and not bool(jnp.all(jnp.abs(flips) == 1)):
        raise ValueError(
            "signs hold something else than 1 and -1; use jax.random.rademacher(key,"
            " (size,))"
        )
    return flips.astype(jnp.float32)


def _flushed(x: Array) -> Array:
    # Values have a gradient, which the bits of `float_bits.flushed` have not.
    return jnp.where(jnp.abs(x) < jnp.float32(TINY), jnp.float32(0), x)


def rotate_arrays(
    values: list[Array],
    signs: list[Array],
    flush: Callable[[Array], Array] = _flushed,
) -> list[Array]:
    """Return the bits of `rotate` for values in float32 arrays of their own.

    A kernel passes its own `flush`.
    """
    mixed = []
    for value, sign in zip(values, signs, strict=True):
        mixed.append(flush(value) * sign)
    half = 1
    while half < len(mixed):
        mixed = _butterflies(mixed, half)
        half *= 2
    norm = jnp.float32(1 / math.sqrt(len(mixed)))
    return [flush(value * norm) for value in mixed]


def _butterflies(values: list[Array], half: int) -> list[Array]:
    """Return the sums and differences of values that are `half` apart."""
    mixed = []
    for i, value in enumerate(values):
        other = values[i ^ half]
        mixed.append(other - value if i & half else value + other)
    return mixed


def _hadamard(x: Array, size: int) -> Array:
    """Compute butterflies along the last axis in a fixed order, then the norm."""
    half = 1
    while half < size:
        pairs = x.reshape(*x.shape[:-1], size // (2 * half), 2, half)
        a = pairs[..., 0, :]
        b = pairs[..., 1, :]
        x = jnp.stack([a + b, a - b], axis=-2).reshape(x.shape)
        half *= 2
    return x * jnp.float32(1 / math.sqrt(size))
