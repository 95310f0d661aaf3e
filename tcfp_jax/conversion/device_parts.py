"""A weight whose parts are gathered inside `jax.shard_map`: its FP8 values travel."""

import dataclasses
from collections.abc import Hashable

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import numerics
from pallas_kernels.operands import Operand, Tensor
from tcfp_jax.recipes import Recipe
from tcfp_jax.weights.layout import Layout
from tcfp_jax.weights.quantization import quantize_weight
from tcfp_jax.weights.stored import Stored

# The axes of a weight that were gathered, each with the mesh axis.
Gathers = tuple[tuple[int, Hashable], ...]


def gathered_weight(
    local: Array, gathers: Gathers, layout: Layout, recipe: Recipe
) -> Stored | None:
    """Return the stored form of a weight, of which each device has a part.

    Its FP8 values are gathered instead of floats. All devices share the scale of the
    whole weight, from one reduction of their amaxes. Returns None if the float weight
    has to travel: with a scale per row or block, or if the parts of an axis are not
    neighbours in the matrix.

    Args:
      local: the device's part.
      gathers: the axes that were gathered.
      layout: the layout of the product that reads the weight.
      recipe: the recipe of that product.
    """
    one_scale = recipe.stored is not None and recipe.scaling == Tensor()
    if not one_scale or recipe.amax != "fresh" or recipe.stochastic or layout.stack:
        return None
    # Parts of the first axis of a side are neighbours along the matrix's axis.
    matrix_axis = {layout.inputs[0]: "k", layout.outputs[0]: "n"}
    if any(axis not in matrix_axis for axis, _ in gathers):
        return None
    matrix = lax.stop_gradient(layout.matrix(local))
    amax = numerics.amax(matrix)
    for _, name in gathers:
        amax = lax.pmax(amax, name)
    stored, _ = quantize_weight(matrix, recipe, amax=amax)

    def whole(values: Array, axes: str) -> Array:
        # Every backend can send bytes, but not every one FP8
        codes = lax.bitcast_convert_type(values, jnp.uint8)
        for atom, name in gathers:
            axis = axes.index(matrix_axis[atom])
            codes = lax.all_gather(codes, name, axis=axis, tiled=True)
        return lax.bitcast_convert_type(codes, values.dtype)

    def operand(one: Operand | None, axes: str) -> Operand | None:
        if one is None:
            return None
        lo = None if one.lo is None else whole(one.lo, axes)
        return dataclasses.replace(one, values=whole(one.values, axes), lo=lo)

    axes = "nk" if layout.transposed else "kn"
    return Stored(operand(stored.forward, axes[::-1]), operand(stored.backward, axes))
