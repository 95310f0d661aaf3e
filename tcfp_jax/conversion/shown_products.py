"""Products of an equation whose operand is a `Shown`: by a kernel, as a grouped
product, or as a head with its loss.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.operands import Quantized
from pallas_kernels.specs import (
    entries,
    regrouped,
    split_entries,
    ungrouped,
    with_entries,
)
from tcfp_jax.conversion.device_parts import gathered_weight
from tcfp_jax.conversion.factors import GROUPED, MATRIX, Factors, factors, factors_of
from tcfp_jax.conversion.shown import Parts, Shown
from tcfp_jax.conversion.views import Equation, View
from tcfp_jax.losses import Loss, loss_of
from tcfp_jax.products.einsum import contract, matrix_product
from tcfp_jax.products.grouped import grouped_matmul
from tcfp_jax.recipes import Recipe
from tcfp_jax.weights.layout import Layout
from tcfp_jax.weights.stored import Stored


def multiply(
    eqn: Equation,
    inputs: Sequence[Any],
    recipe: Recipe,
    *,
    x_quantized: Quantized | None = None,
    drawn: Array | None = None,
) -> Array:
    """Return the product of an equation, computed as the recipe says."""
    side = 0 if isinstance(inputs[0], Shown) else 1
    weight = inputs[side]
    x = inputs[1 - side]
    out = eqn.outvars[0].aval
    view: View = weight.view
    found, kernel, stored = _taken(weight, factors_of(eqn, side, view), recipe)
    layout = found.contraction.layout
    key = _key_of(recipe, stored, drawn)
    # X[..., k] by the kernel as a matrix, whatever the kernel's own axes are
    if x_quantized is not None:
        return contract(
            matrix_product(x.ndim, transposed=layout.transposed),
            x,
            None if kernel is None else layout.matrix(kernel),
            recipe=recipe,
            quantized=stored,
            key=key,
            shape=None if stored is None else stored.shape,
            x_quantized=x_quantized,
        )
    # A product rounds its result to the dtype of x, so x is cast to a dtype that the
    # program asks for beyond it.
    with jax.numpy_dtype_promotion("standard"):
        x = x.astype(jnp.promote_types(x.dtype, out.dtype))
    if eqn.primitive.name == GROUPED:
        sizes = inputs[2]
        matrix, stored = _as_experts(layout, kernel, stored, sizes.shape[0])
        y = grouped_matmul(x, matrix, sizes, recipe=recipe, quantized=stored, key=key)
        return y.astype(out.dtype)
    if found.x_groups:
        x = ungrouped(x, found.x_groups)
    asked = eqn.params.get("out_sharding")
    if asked is not None and found.out_groups:
        spec = split_entries(asked, entries(asked, out.ndim), found.out_groups)
        asked = with_entries(asked, spec)
    y = contract(
        found.contraction,
        x,
        kernel,
        recipe=recipe,
        quantized=stored,
        key=key,
        shape=view.sizes,
        out_sharding=asked,
    )
    if found.out_groups:
        y = regrouped(y, found.out_groups)
    return y.astype(out.dtype)


def multiply_head(
    eqn: Equation, inputs: Sequence[Any], recipe: Recipe, options: Loss
) -> list[Array]:
    """Return (mean, losses) of a `losses.cross_entropy` with these options.

    Its product is computed as the recipe says.
    """
    x, weight, targets, shares = inputs
    shapes = [tuple(var.aval.shape) for var in eqn.invars[:2]]
    product = factors(MATRIX, shapes, 1, weight.view)
    found, kernel, stored = _taken(weight, product, recipe)
    matrix, stored = found.contraction.layout.untransposed(kernel, stored)
    asked = dataclasses.replace(options, recipe=recipe)
    key = _key_of(recipe, stored)
    return list(loss_of(asked, x, matrix, stored, targets, shares, key))


def _as_experts(
    layout: Layout, kernel: Array | None, stored: Stored | None, count: int
) -> Parts:
    """Return the weights of a grouped product as `[e, k, n]`, floats and stored."""
    matrix, stored = layout.untransposed(kernel, stored)
    # An axis of one expert has no atom, and a reshape may have cut the axis of several.
    if stored is not None:
        leading = len(stored.stack)
        stored = jax.tree.map(
            lambda leaf: leaf.reshape(count, *leaf.shape[leading:]), stored
        )
    if matrix is not None:
        matrix = matrix.reshape(count, *matrix.shape[-2:])
    return matrix, stored


def _taken(
    weight: Shown, found: Factors | str, recipe: Recipe
) -> tuple[Factors, Array | None, Stored | None]:
    """Return a product over the weight's axes, the weight's floats and stored form."""
    assert isinstance(found, Factors), "the census plans no other product"
    # The stored form serves the product that it was made for; another product of the
    # weight quantizes it here.
    how = weight.weight
    fits = how is not None and (how.recipe, how.layout) == (recipe, found.layout)
    if fits and weight.stored is not None:
        return found, weight.slot(), weight.values()
    stored = None
    if weight.local is not None:
        layout = found.contraction.layout
        stored = gathered_weight(weight.local, weight.gathers, layout, recipe)
    return found, weight.numbers(), stored


def _key_of(
    recipe: Recipe, stored: Stored | None, drawn: Array | None = None
) -> Array | None:
    """Return the key of the random bits of a product, or None.

    A weight is rounded stochastically at its product only in evaluation, whose calls
    repeat.
    """
    if stored is None and recipe.stochastic:
        return jax.random.key(0)
    return drawn if recipe.draws else None
