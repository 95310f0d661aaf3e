"""Hadamard rotations: an orthonormal mix of neighbours, which spreads outliers before a
cast and can be undone.

`rotate` defines them. `rotate_arrays` computes the same sums in the same order, with
one array for each value.
"""

import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from tcfp_jax.formats.float_bits import TINY


def rotate(
    x: ArrayLike,
    size: int = 16,
    *,
    signs: ArrayLike | None = None,
    dim: int = -1,
    direction: Literal["forward", "inverse"] = "forward",
) -> jax.Array:
    """Multiply every `size` values along `dim` by a Hadamard matrix over sqrt(size),
    optionally with random signs.

        forward: y = (x * signs) H / sqrt(size)        inverse: x = (y H / sqrt(size)) * signs

    H is Sylvester's matrix, symmetric, with entries 1 and -1. If both operands of a
    product are rotated along the contraction, the product does not change: NVFP4
    training rotates both operands of weight gradients.

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
      ValueError: a size that is no power of two or does not divide the axis, signs of
        another shape, another direction.

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
    if not isinstance(direction, str) or direction not in ("forward", "inverse"):
        raise ValueError(
            f'direction={direction!r} is unknown; use "forward" or "inverse"'
        )
    if not isinstance(size, int | np.integer) or size not in [
        1 << power for power in range(1, 11)
    ]:
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
    groups = (
        _hadamard(groups * flips, size)
        if direction == "forward"
        else _hadamard(groups, size) * flips
    )
    return jnp.moveaxis(_flushed(groups).reshape(rows.shape), -1, dim).astype(
        array.dtype
    )


def check_axis(dim: object, shape: tuple[int, ...], name: str = "dim") -> None:
    """Raise a ValueError unless `dim` is an axis of an array of this shape, negative or
    not.
    """
    if not shape:
        raise ValueError(
            f"{name}={dim!r} of a number, which has no axis; pass an array"
        )
    if not isinstance(dim, int | np.integer) or not -len(shape) <= dim < len(shape):
        raise ValueError(
            f"{name}={dim!r} is not an axis of shape {shape}; use one from"
            f" {-len(shape)} to {len(shape) - 1}"
        )


def checked_signs(signs: ArrayLike, size: int) -> jax.Array:
    """Return `signs` in float32; a ValueError unless they are `size` of 1 and -1, as
    far as they are not traced.
    """
    flips = jnp.asarray(signs)
    if flips.shape != (size,):
        raise ValueError(
            f"signs have shape {flips.shape}; give {size} of them, each 1 or -1"
        )
    if not isinstance(flips, jax.core.Tracer) and not bool(
        jnp.all(jnp.abs(flips) == 1)
    ):
        raise ValueError(
            "signs hold something else than 1 and -1; use jax.random.rademacher(key,"
            " (size,))"
        )
    return flips.astype(jnp.float32)


def _flushed(x: jax.Array) -> jax.Array:
    # Values have a gradient, which the bits of `float_bits.flushed` have not.
    return jnp.where(jnp.abs(x) < jnp.float32(TINY), jnp.float32(0), x)


def rotate_arrays(
    values: list[jax.Array],
    signs: list[jax.Array],
    flush: Callable[[jax.Array], jax.Array] = _flushed,
) -> list[jax.Array]:
    """Return the bits of `rotate` for values in float32 arrays of their own; a kernel
    passes its own `flush`.
    """
    values, half = (
        [flush(value) * sign for value, sign in zip(values, signs, strict=True)],
        1,
    )
    while half < len(values):
        values = [
            values[i ^ half] - v if i & half else v + values[i ^ half]
            for i, v in enumerate(values)
        ]
        half *= 2
    return [flush(value * jnp.float32(1 / math.sqrt(len(values)))) for value in values]


def _hadamard(x: jax.Array, size: int) -> jax.Array:
    """Compute butterflies along the last axis: log2(size) sums and differences in a
    fixed order, then the norm.
    """
    half = 1
    while half < size:
        pairs = x.reshape(*x.shape[:-1], size // (2 * half), 2, half)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = jnp.stack([a + b, a - b], axis=-2).reshape(x.shape)
        half *= 2
    return x * jnp.float32(1 / math.sqrt(size))
