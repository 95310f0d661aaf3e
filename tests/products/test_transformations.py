"""Every named recipe under JAX's transformations, against a loop of single calls."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tcfp_jax
from tcfp_jax.recipes import NAMES

SHAPES = {"x": (6, 32), "w": (32, 16), "g": (6, 16)}


def operands(dtype):
    keys = jax.random.split(jax.random.key(5), 3)
    return {
        name: jax.random.normal(key, SHAPES[name]).astype(dtype)
        for name, key in zip(SHAPES, keys, strict=True)
    }


@pytest.mark.slow_except(
    "tcfp12_fast-w-float32", "mxfp8-w-float32", "tcfp12-x-float32", "nvfp4-g-float32"
)
@pytest.mark.parametrize(
    "recipe, mapped, dtype",
    [
        *((name, "w", "float32") for name in NAMES),
        *itertools.product(("tcfp12", "nvfp4"), "xg", ["float32"]),
        *itertools.product(["nvfp4_training"], "xwg", ["bfloat16"]),
    ],
)
def test_vmap_over_one_operand_is_a_loop(recipe, mapped, dtype):
    """Of weight gradients, too, whose other operand all elements share."""
    alone = operands(dtype)
    stack = jnp.stack([alone[mapped], 8 * alone[mapped][::-1]])

    def passes(x, w, g):
        y, vjp = jax.vjp(
            functools.partial(tcfp_jax.matmul, recipe=recipe, key=jax.random.key(6)),
            x,
            w,
        )
        return y, *vjp(g)

    together = jax.jit(
        jax.vmap(passes, [0 if name == mapped else None for name in SHAPES])
    )(*(alone | {mapped: stack}).values())
    one = jax.jit(passes)
    for i, element in enumerate(stack):
        for got, expected in zip(
            together, one(*(alone | {mapped: element}).values()), strict=True
        ):
            # Float32 sums in another order, rounded to the dtype.
            bound = 2 * float(jnp.finfo(dtype).eps) * float(jnp.max(jnp.abs(expected)))
            np.testing.assert_allclose(
                *(np.asarray(v, np.float32) for v in (got[i], expected)),
                rtol=0,
                atol=bound,
            )
