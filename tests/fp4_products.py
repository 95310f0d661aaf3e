"""Recipes, operands and exact values of products with FP4 weights."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from tcfp_jax import recipe
from tcfp_jax.products import fp4_matmul, pack_fp4
from tcfp_jax.weights.fp4_packing import quantize_fp4
from tests.formats_oracles import QUICK
from tests.fp4_cases import values_of

SQUARES = recipe("nvfp4", tile="square")
RECIPES = {
    "nvfp4": recipe("nvfp4"),
    "mxfp4": recipe("mxfp4"),
    "one_level": recipe("nvfp4", rule="one_level"),
    "squares": SQUARES,
}
IN_E4M3 = recipe("nvfp4", activation="float8_e4m3fn")
BOTH = recipe("nvfp4", activation="float4_e2m1fn")
K, N = 64, 32


def drawn(*shape, seed=0):
    return jnp.float32(np.random.default_rng(seed).standard_normal(shape))


X = drawn(2, 3, K)
W = drawn(K, N, seed=1)
# A program for each recipe and shape, where every operation would be one.
quick = partial(jax.jit, compiler_options=QUICK)
packed_by = quick(pack_fp4, static_argnums=1)
multiply = quick(fp4_matmul, static_argnames="recipe")


def in_nvfp4(x):
    """X as the format library casts its rows to NVFP4, in float64."""
    k = x.shape[-1]
    rows = x.reshape(-1, k)
    rows = jnp.pad(rows, ((0, 0), (0, k % 2)))
    return values_of(quick(quantize_fp4)(rows))[:, :k].reshape(x.shape)
