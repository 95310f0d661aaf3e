"""The head with its loss, looked-up rows and copies in FP8 on a GPU: against float64,
the reference and each other.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from numpy.testing import assert_allclose, assert_array_equal

import tcfp_jax
from pallas_kernels.quantize.computed import quantize_computed
from tcfp_jax.losses import cross_entropy
from tcfp_jax.remat import checkpoint_in_fp8
from tcfp_jax.weights.quantization import quantize_weight
from tests.helpers import normal, parametrize

pytestmark = pytest.mark.gpu
TOKENS = 640  # two and a half chunks of 256
WIDTH = 512
# Relative errors of gradients: random errors of operands in E4M3 and E5M2 are 3 and 6 %
# in the mean.
LEAST = {"bf16": 6e-3, "tensorwise": 0.1, "rowwise": 0.1, "tcfp12_single": 0.1}


def exponential(x, places):
    # below 448
    return (jnp.exp2(0.5 * x.astype(jnp.float32) - jnp.where(places < 384, 1.0, 0.0)),)


def assert_within(got, want, bound):
    """Assert a bound of the relative error by its norm."""
    error = np.linalg.norm(np.float64(got) - want)
    assert error <= bound * np.linalg.norm(want)


@parametrize("backend", ["triton", "mosaic"])
@parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2], ids=["e4m3", "e5m2"])
def test_computed_values_may_differ_in_an_exponentials_last_bit(dtype, backend):
    x = (3 * normal(0, (512, 768))).astype(jnp.bfloat16).at[7, 9].set(jnp.nan)
    call = partial(quantize_computed, exponential, columns=(jnp.arange(768),))
    kernel, reference = (
        jax.jit(partial(call, dtype=dtype, backend=name))(x)
        for name in (backend, "xla")
    )
    for got, want in zip(kernel, reference, strict=True):
        got = np.float64(got)
        want = np.float64(want)
        there = ~np.isnan(want)
        assert np.array_equal(~np.isnan(got), there)
        assert there.sum() == want.size - 1
        assert (got == want)[there].mean() > 0.999
        assert (np.abs(got - want) <= 2.0**-2 * np.abs(want) + 2.0**-9)[there].all()
    values, turned = map(np.float64, kernel)
    assert np.array_equal(values, turned.T, equal_nan=True)


@parametrize("vocabulary", [1024, 1000])  # tiles divide the first only
@parametrize("recipe", LEAST)
def test_the_loss_of_a_head_is_that_of_float64(recipe, vocabulary):
    x = normal(1, (TOKENS, WIDTH)).astype(jnp.bfloat16)
    w = normal(2, (WIDTH, vocabulary)) * 0.05
    targets = random.randint(random.key(3), (TOKENS,), 0, 1000)

    def loss(x, w):
        return cross_entropy(x, w, targets, recipe=recipe, chunk=256, z_loss=1e-3)[0]

    value, (dx, dw) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(x, w)
    wide_x = np.float64(x)
    wide_w = np.float64(w)
    logits = wide_x @ wide_w
    total = np.log(np.exp(logits).sum(-1))
    picked = (np.arange(TOKENS), targets)
    wanted = (total - logits[picked] + 1e-3 * total**2).mean()
    slope = np.exp(logits - total[:, None]) * (1 + 2e-3 * total[:, None])
    slope[picked] -= 1
    assert abs(float(value) - wanted) < 5e-3 * wanted
    assert_within(dx, slope @ wide_w.T / TOKENS, LEAST[recipe])
    assert_within(dw, wide_x.T @ slope / TOKENS, LEAST[recipe])


def test_rows_of_a_stored_table_are_its_dequantized_rows():
    recipe = tcfp_jax.recipe("tcfp12_single")
    stored, _ = quantize_weight(normal(2, (1024, 256)) * 0.02, recipe)
    ids = random.randint(random.key(3), (4, 33), 0, 1024)
    rows = jax.jit(tcfp_jax.lookup)(stored, ids)
    assert_array_equal(rows, jax.jit(lambda s: s.dequantize())(stored)[ids])


def test_a_copy_in_fp8_leaves_the_forward_pass_exact():
    policy = jax.checkpoint_policies.save_only_these_names("x")

    @partial(jax.checkpoint, policy=policy)
    def cube(x):
        return checkpoint_in_fp8(2 * x, "x") ** 3

    def loss(cube):
        return jax.jit(jax.value_and_grad(lambda x: (cube(x) ** 2).sum()))

    x = normal(4, (256, 512))
    value, copied = loss(cube)(x)
    wanted, exact = loss(lambda x: (2 * x) ** 3)(x)
    assert_allclose(value, wanted, rtol=1e-5)  # XLA may add in another order
    assert (copied != exact).any()
    # E4M3's half spacing, 2**-4, to the fifth power
    assert_within(copied, np.float64(exact), 0.2)


@parametrize("recipe", ["tensorwise", "rowwise", "tcfp12_fast"])
def test_small_probabilities_count_beside_the_target(recipe):
    """Rows of W with much in common: half of 16384 equal probabilities would be lost in
    a short accumulator.
    """
    targets = jnp.arange(TOKENS)
    x = (0.01 * normal(2, (TOKENS, WIDTH))).astype(jnp.bfloat16)
    w = 0.2 + 0.05 * normal(3, (WIDTH, 16384))
    dx = jax.jit(jax.grad(lambda x: cross_entropy(x, w, targets, recipe=recipe)[0]))(x)
    slope = np.array(jax.nn.softmax(x.astype(jnp.float32) @ w), np.float64)
    slope[targets, targets] -= 1
    assert_within(dx, slope @ np.float64(w).T / TOKENS, 0.3)
