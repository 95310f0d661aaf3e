"""The head with its loss, looked-up rows and copies in FP8 on a GPU: against float64,
the reference and each other.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

import tcfp_jax
from pallas_kernels.quantize.computed import quantize_computed
from tcfp_jax.losses import cross_entropy
from tcfp_jax.remat import checkpoint_in_fp8
from tcfp_jax.weights.quantization import quantize_weight
from tests.helpers import normal, parametrize

pytestmark = pytest.mark.gpu
TOKENS, WIDTH = 640, 512  # two and a half chunks of 256
# Relative errors of gradients: random errors of operands in E4M3 and E5M2 are 3 and 6 %
# in the mean.
LEAST = {"bf16": 6e-3, "tensorwise": 0.1, "rowwise": 0.1, "tcfp12_single": 0.1}


def exponential(x, places):
    # below 448
    return (jnp.exp2(0.5 * x.astype(jnp.float32) - jnp.where(places < 384, 1.0, 0.0)),)


@parametrize("backend", ["triton", "mosaic"])
@parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2], ids=["e4m3", "e5m2"])
def test_computed_values_are_the_references_but_for_the_last_bit_of_an_exponential(
    dtype, backend
):
    x = (3 * normal(0, (512, 768))).astype(jnp.bfloat16).at[7, 9].set(jnp.nan)
    call = partial(
        quantize_computed, exponential, dtype=dtype, columns=(jnp.arange(768),)
    )
    kernel, reference = (
        jax.jit(partial(call, backend=name))(x) for name in (backend, "xla")
    )
    for got, want in zip(kernel, reference, strict=True):
        got = np.float64(got)
        want = np.float64(want)
        assert np.array_equal(np.isnan(got), np.isnan(want))
        assert np.isnan(want).sum() == 1
        there = ~np.isnan(want)
        assert (got == want)[there].mean() > 0.999
        assert (np.abs(got - want) <= 2.0**-2 * np.abs(want) + 2.0**-9)[there].all()
    assert np.array_equal(
        np.float64(kernel[0]), np.float64(kernel[1]).T, equal_nan=True
    )


@parametrize("vocabulary", [1024, 1000])  # tiles divide the first only
@parametrize("recipe", LEAST)
def test_the_loss_of_a_head_is_that_of_float64(recipe, vocabulary):
    keys = jax.random.split(jax.random.key(1), 3)
    x = jax.random.normal(keys[0], (TOKENS, WIDTH)).astype(jnp.bfloat16)
    w = jax.random.normal(keys[1], (WIDTH, vocabulary)) * 0.05
    targets = jax.random.randint(keys[2], (TOKENS,), 0, 1000)

    def loss(x, w):
        return cross_entropy(x, w, targets, recipe=recipe, chunk=256, z_loss=1e-3)[0]

    value, gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(x, w)
    wide_x = np.float64(x)
    wide_w = np.float64(w)
    logits = wide_x @ wide_w
    total = np.log(np.exp(logits).sum(-1))
    wanted = (total - logits[np.arange(TOKENS), targets] + 1e-3 * total**2).mean()
    slope = np.exp(logits - total[:, None]) * (1 + 2e-3 * total[:, None])
    slope[np.arange(TOKENS), targets] -= 1
    assert abs(float(value) - wanted) < 5e-3 * wanted
    for got, want in zip(
        gradients, (slope @ wide_w.T / TOKENS, wide_x.T @ slope / TOKENS), strict=True
    ):
        assert np.linalg.norm(np.float64(got) - want) <= LEAST[recipe] * np.linalg.norm(
            want
        )


def test_rows_of_a_stored_table_are_its_dequantized_rows():
    table = normal(2, (1024, 256)) * 0.02
    stored = quantize_weight(table, tcfp_jax.recipe("tcfp12_single"))[0]
    ids = jax.random.randint(jax.random.key(3), (4, 33), 0, 1024)
    rows = jax.jit(lambda stored, ids: tcfp_jax.lookup(stored, ids))(stored, ids)
    assert np.array_equal(
        np.asarray(rows),
        np.asarray(jax.jit(lambda s: s.dequantize())(stored))[np.asarray(ids)],
    )


def test_a_copy_in_fp8_leaves_the_forward_pass_exact():
    x = normal(4, (256, 512))
    policy = jax.checkpoint_policies.save_only_these_names("x")
    cube = jax.checkpoint(lambda x: checkpoint_in_fp8(2 * x, "x") ** 3, policy=policy)

    def loss(f):
        return jax.jit(jax.value_and_grad(lambda x: (f(x) ** 2).sum()))

    (value, copied) = loss(cube)(x)
    (wanted, exact) = loss(lambda x: (2 * x) ** 3)(x)
    assert_allclose(value, wanted, rtol=1e-5)  # XLA may add in another order
    error = np.linalg.norm(np.float64(copied) - np.float64(exact)) / np.linalg.norm(
        np.float64(exact)
    )
    assert 0.0 < error < 0.2  # E4M3's half spacing, 2**-4, to the fifth power


@parametrize("recipe", ["tensorwise", "rowwise", "tcfp12_fast"])
def test_small_probabilities_count_beside_the_target(recipe):
    """Rows of W with much in common: half of 16384 equal probabilities would be lost in
    a short accumulator.
    """
    keys = jax.random.split(jax.random.key(2))
    targets = jnp.arange(TOKENS)
    x = (0.01 * jax.random.normal(keys[0], (TOKENS, WIDTH))).astype(jnp.bfloat16)
    w = 0.2 + 0.05 * jax.random.normal(keys[1], (WIDTH, 16384))
    dx = jax.jit(jax.grad(lambda x: cross_entropy(x, w, targets, recipe=recipe)[0]))(x)
    slope = np.float64(jax.nn.softmax(x.astype(jnp.float32) @ w)) - np.eye(
        TOKENS, 16384
    )
    want = slope @ np.float64(w).T / TOKENS
    assert np.linalg.norm(np.float64(dx) - want) <= 0.3 * np.linalg.norm(want)
