"""Every named recipe under JAX's transformations, against a loop of single calls."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp

import tcfp_jax
from tcfp_jax.recipes import NAMES
from tests.helpers import (
    assert_near,
    normal,
    parametrize,
    slow_except,
    value_and_gradients,
)

SHAPES = {"x": (6, 32), "w": (32, 16), "g": (6, 16)}


@slow_except(
    "tcfp12_fast-w-float32", "mxfp8-w-float32", "tcfp12-x-float32", "nvfp4-g-float32"
)
@parametrize(
    "recipe, mapped, dtype",
    [
        *((name, "w", "float32") for name in NAMES),
        *itertools.product(("tcfp12", "nvfp4"), "xg", ["float32"]),
        *itertools.product(["nvfp4_training"], "xwg", ["bfloat16"]),
    ],
)
def test_vmap_over_one_operand_is_a_loop(recipe, mapped, dtype):
    """Of weight gradients, too, whose other operand all elements share."""
    alone = {name: normal(5, shape).astype(dtype) for name, shape in SHAPES.items()}
    stack = jnp.stack([alone[mapped], 8 * alone[mapped][::-1]])
    product = partial(tcfp_jax.matmul, recipe=recipe, key=jax.random.key(6))
    passes = partial(value_and_gradients, product)
    axes = [0 if name == mapped else None for name in SHAPES]
    given = (alone | {mapped: stack}).values()
    together = jax.jit(jax.vmap(passes, axes))(*given)
    one = jax.jit(passes)
    for i, element in enumerate(stack):
        expected = one(*(alone | {mapped: element}).values())
        for got, want in zip(together, expected, strict=True):
            # Float32 sums in another order, rounded to the dtype.
            bound = 2 * float(jnp.finfo(dtype).eps) * float(jnp.max(jnp.abs(want)))
            assert_near(jnp.float32(got[i]), jnp.float32(want), bound)
