"""The dtype in which partial sums cross devices, and the dtype in which they are added.

A gradient of N values is summed over d devices and shared out. Each device sends the
bytes below; `p_i` is the partial sum of device i:

    "float32"          4 N (d - 1) / d    sum_i p_i, float32
    "bfloat16"         2 N (d - 1) / d    added in bfloat16: every addition rounds
    "bfloat16_parts"   2 N (d - 1) / d    sum_i bfloat16(p_i), added in float32

The error of the last one is at most 2**-8 sum_i |p_i|. It is an all-to-all and a sum on
each device. If every device keeps the whole sum, it is then gathered in bfloat16. None
takes the dtype of the result: a bfloat16 gradient is added in bfloat16, as JAX adds its
own. Sums in FP8 are not offered, because NCCL would add three bits of mantissa to three
bits.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.checks import check_choice
from pallas_kernels.specs import Axes, Shape

Wire = Literal["float32", "bfloat16", "bfloat16_parts"]


class Scatter(NamedTuple):
    """An axis of a result that is handed out over the mesh axes of its partial sums.

    Attributes:
      axes: names of the mesh axes.
      dimension: index of the axis of the result, in `shape`.
      shape: shape to which the result must be reshaped first if it has more axes than
        the matrix, else None.
    """

    axes: Axes
    dimension: int
    shape: Shape | None = None


def check_wire(wire: str | None) -> None:
    """Raise a ValueError unless `wire` is one of the choices, or None."""
    if "float8" in str(wire):
        raise ValueError(
            f"wire={wire!r} would add gradients in FP8, three bits of mantissa at most,"
            ' and lose all but the largest partial sums; use wire="bfloat16_parts",'
            " which sends two bytes per value and adds in float32"
        )
    if wire is not None:
        check_choice("wire", wire, get_args(Wire), ", or None")


def reduced(
    partial: Array,
    scattered: Sequence[Scatter],
    summed_over: Sequence[str],
    wire: Wire | None,
) -> Array:
    """Add the partial sums of devices over mesh axes.

    Args:
      partial: this device's sums, float32, or in the result's dtype with `wire=None`.
      scattered: dimensions along which the sum is handed out.
      summed_over: mesh axes over which every device keeps the whole sum.
      wire: dtype that is sent; None is the dtype of `partial`.
    """
    for axes, dimension, shape in scattered:
        if shape is not None:
            partial = partial.reshape(shape)
        partial = _handed_out(partial, axes, dimension, wire)
    return _everywhere(partial, tuple(summed_over), wire) if summed_over else partial


def _handed_out(
    partial: Array,
    axes: Axes,
    dimension: int,
    wire: Wire | None,
) -> Array:
    """Return this device's part of the sum, cut along a dimension."""
    if wire is not None and wire != "float32":
        partial = partial.astype(jnp.bfloat16)
    if wire != "bfloat16_parts":
        return lax.psum_scatter(partial, axes, scatter_dimension=dimension, tiled=True)
    parts = lax.all_to_all(partial, axes, dimension, dimension, tiled=True)
    devices = lax.axis_size(axes)
    shape = list(parts.shape)
    shape[dimension : dimension + 1] = [devices, shape[dimension] // devices]
    return jnp.sum(parts.reshape(shape).astype(jnp.float32), axis=dimension)


def _everywhere(partial: Array, axes: Axes, wire: Wire | None) -> Array:
    """Return the whole sum on every device."""
    if wire == "bfloat16":
        return lax.psum(partial.astype(jnp.bfloat16), axes)
    if wire != "bfloat16_parts":
        return lax.psum(partial, axes)
    devices = math.prod(lax.axis_size(axis) for axis in axes)
    for dimension, size in enumerate(partial.shape):
        if size % devices == 0:
            own = _handed_out(partial, axes, dimension, wire).astype(jnp.bfloat16)
            return lax.all_gather(own, axes, axis=dimension, tiled=True)
    parts = lax.all_gather(partial.astype(jnp.bfloat16), axes)
    return jnp.sum(parts.astype(jnp.float32), axis=0)
