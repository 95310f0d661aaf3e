"""Blocks of a tensor that share a scale: vectors of b values along the last axis, or squares of b x b.

Scales are powers of two stored as E8M0, one byte each (OCP Microscaling Formats 1.0, 2023). The last block of an axis
may be short. Squares make a quantized matrix and its transpose the same numbers, so one quantization of a weight serves
the forward product and the input gradient; vectors adapt to single rows and are made anew for each contraction axis.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import numerics

BLOCKS = (32, 64, 128)
Tile = Literal["vector", "square"]
ResidualBlocks = Literal["all", "nonzero"]
SCALE_DTYPE = jnp.float8_e8m0fnu
# E8M0's smallest scale, 2**-127: it says that all of a block's residual is zero.
ZERO_BLOCK = 0


class Blocked(NamedTuple):
    """FP8 values and the E8M0 scales of their blocks."""

    values: jax.Array
    scales: jax.Array


def check_block(block: int, tile: str) -> None:
    """Raise a ValueError unless blocks of this size and form exist."""
    if block not in BLOCKS:
        raise ValueError(f"block={block} is not supported; use one of {list(BLOCKS)}")
    if tile not in ("vector", "square"):
        raise ValueError(f'tile={tile!r} is unknown; use "vector" or "square"')


def reject_explicit(*args: Any, **options: Any) -> str | None:
    """Why blocks cannot be cut here, or None; a `reject` of the references."""
    if jax.sharding.AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
        return "blocks cut and merge axes, which a mesh with explicit axes cannot follow; use AxisType.Auto"
    return None


def scales_shape(shape: tuple[int, ...], block: int, tile: Tile) -> tuple[int, ...]:
    """The shape of the scales of a tensor.

    >>> scales_shape((48, 100), 32, "vector"), scales_shape((48, 100), 32, "square")
    ((48, 4), (2, 4))
    """
    *leading, last = shape
    if tile == "square":
        leading[-1] = -(-leading[-1] // block)
    return (*leading, -(-last // block))


def block_amax(x: jax.Array, block: int, tile: Tile) -> jax.Array:
    """Max |x| of every block, float32; NaN or inf where a block holds one."""
    *leading, last = x.shape
    sides = [(0, -last % block)]
    if tile == "square":
        sides.insert(0, (0, -leading[-1] % block))
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - len(sides)) + sides)
    *leading, last = padded.shape
    if tile == "vector":
        return numerics.amax(padded.reshape(*leading, last // block, block), axis=-1)
    *leading, rows = leading
    return numerics.amax(padded.reshape(*leading, rows // block, block, last // block, block), axis=(-3, -1))


def spread(scales: jax.Array, shape: tuple[int, ...], block: int, tile: Tile) -> jax.Array:
    """The scale of every value of a tensor of this shape."""
    wide = jnp.repeat(scales, block, axis=-1)[..., : shape[-1]]
    return wide if tile == "vector" else jnp.repeat(wide, block, axis=-2)[..., : shape[-2], :]


def find_scales(amax: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """(scales, their inverses) of blocks, float32; NaN where `amax` is not finite."""
    scales = numerics.pow2_scale(amax, dtype)
    return scales, numerics.reciprocal_pow2(scales)
