"""FP4 weights in products: exact against float64, both gradients, odd sizes, bytes."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from numpy.testing import assert_allclose, assert_array_equal

import tcfp_jax
from tcfp_jax import recipe
from tcfp_jax.products import fp4_linear, fp4_matmul, pack_fp4
from tcfp_jax.products.einsum import contract
from tcfp_jax.weights.layout import Weight
from tcfp_jax.weights.stored import Stored
from tests.equations import parse
from tests.fp4_cases import lost, rounded, values_of
from tests.fp4_products import (
    BOTH,
    IN_E4M3,
    RECIPES,
    K,
    N,
    W,
    X,
    drawn,
    in_nvfp4,
    multiply,
    packed_by,
    quick,
)
from tests.helpers import (
    assert_near,
    parametrize,
    refused,
    same_bits,
    slow_except,
    with_pull,
)


@slow_except("nvfp4", "mxfp4")
@parametrize("name", ["nvfp4", "mxfp4", "squares"])
def test_products_and_gradients_are_of_the_dequantized_weight(name):
    chosen = RECIPES[name]
    packed = packed_by(W, chosen)
    exact = values_of(packed.forward).T

    @quick
    def run(x, w, packed):
        y, pull = with_pull(fp4_matmul, x, w, recipe=chosen)
        g = jnp.cos(y)
        again, pull_x = jax.vjp(lambda x: fp4_matmul(x, packed), x)
        return (y, *pull(g)), (again, *pull_x(g)), packed.dequantize(), g

    (y, dx, dw), (again, dx_of_codes), dequantized, g = run(X, W, packed)
    assert_allclose(dequantized, exact, rtol=1e-6)
    x = rounded(X)
    g = rounded(g)
    straight_through = np.einsum("abk,abn->kn", x, g)
    assert_near((y, dx, dw), (x @ exact, g @ exact.T, straight_through), 2e-5)
    assert same_bits(again, y)
    assert_near(dx_of_codes, dx, 1e-5)


def test_the_one_level_rule_is_the_seeds():
    """Scales are amax / 6 rounded to E4M3, values x / scale rounded to E2M1; nothing
    scales the scales.
    """
    codes = packed_by(W, RECIPES["one_level"]).forward
    blocks = np.float32(W.T).reshape(N, -1, 16)
    scale = np.abs(blocks).max(-1) / np.float32(6)
    scale = jnp.asarray(scale).astype(jnp.float8_e4m3fn)
    assert same_bits(codes.scale, scale)
    assert float(codes.outer) == 1.0
    wide = np.float32(scale)[..., None]
    values = np.clip(blocks / wide, -6, 6).astype(ml_dtypes.float4_e2m1fn)
    found = codes.dequantize().reshape(N, -1, 16)
    assert_array_equal(found, np.float32(values) * wide)


@parametrize("name, k, n", [("nvfp4", 33, 5), ("mxfp4", 9, 3), ("squares", 1, 1)])
def test_any_size_without_padding_at_the_caller(name, k, n):
    x = drawn(4, k)
    w = drawn(k, n, seed=2)

    @quick
    def run(x, w):
        packed = pack_fp4(w, RECIPES[name])
        y, pull = with_pull(fp4_matmul, x, w, recipe=RECIPES[name])
        again, pull_x = jax.vjp(lambda x: fp4_matmul(x, packed), x)
        g = jnp.ones_like(y)
        return (y, *pull(g)), [again, *pull_x(g)], packed, packed.dequantize()

    (y, dx, dw), of_codes, packed, dequantized = run(x, w)
    exact = values_of(packed.forward).T[:k]
    assert_allclose(dequantized, exact, rtol=1e-6)
    assert packed.shape == dw.shape == (k, n)
    assert same_bits(of_codes, [y, dx])
    gradient = np.broadcast_to(exact.sum(1), (4, k))
    assert_near((y, dx), (rounded(x) @ exact, gradient), 2e-5)


def packed_shape(k, n):
    return jax.eval_shape(pack_fp4, jax.ShapeDtypeStruct((k, n), jnp.float32))


def test_packed_codes_know_an_odd_k():
    """Whichever way the codes lie, and in a stack."""
    packed = packed_shape(33, 5)
    assert packed.forward.shape == (5, 34)
    assert packed.holds((33, 5))
    stacked = jax.eval_shape(
        lambda p: jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), p), packed
    )
    shapes = [(33, 5), (5, 33), (2, 33, 5)]
    for one, shape in zip((packed, packed.swap(), stacked), shapes, strict=True):
        values = jax.eval_shape(lambda one: one.dequantize(), one)
        scales = jax.eval_shape(lambda one: one.scale_of_values(), one)
        assert values.shape == scales.shape == one.shape == shape
    even = packed_shape(34, 8)
    assert even.holds((34, 8))
    assert not even.holds((32, 8))


def test_a_layer_knows_the_codes_whose_padding_a_file_lost():
    lost = Stored.of(packed_shape(33, 5).forward)
    assert lost.shape == (34, 5)
    assert lost.holds((33, 5))
    assert lost.holds((34, 5))
    assert not lost.holds((32, 5))
    with refused("pad x with one zero"):
        jax.eval_shape(fp4_matmul, jnp.ones((4, 33)), lost)


@parametrize("m, k, n", [(0, 3, 4), (4, 0, 4), (4, 3, 0)])
@parametrize("name", ["nvfp4", "mxfp8", "nvfp4_training"])
def test_axes_without_values_give_zeros(name, m, k, n):
    """As tensors with one FP8 scale do, also for gradients."""
    x = jnp.ones((2, m, k))
    w = jnp.ones((k, n))
    chosen = recipe(name)
    key = jax.random.key(0)
    y, pull = with_pull(tcfp_jax.matmul, x, w, recipe=chosen, key=key)
    zeros = np.zeros((2, m, n)), np.zeros(x.shape), np.zeros(w.shape)
    jax.tree.map(assert_array_equal, (y, *pull(y)), zeros)
    if name in RECIPES and w.size == 0:
        packed = pack_fp4(w, chosen)
        assert packed.shape == packed.dequantize().shape == w.shape
        in_e4m3 = recipe(name, activation="float8_e4m3fn")
        y, pull = jax.vjp(lambda x: fp4_matmul(x, packed, recipe=in_e4m3), x)
        jax.tree.map(assert_array_equal, (y, *pull(y)), zeros[:2])


def test_activations_of_eight_bits_and_fp8_gradients():
    exact = rounded(X) @ values_of(packed_by(W, RECIPES["nvfp4"]).forward).T
    errors = np.abs(multiply(X, W, recipe=IN_E4M3) - exact)
    assert 1e-4 < errors.max() / np.abs(exact).max() < 0.05

    def loss(x, w, how):
        return jnp.sum(jnp.sin(fp4_matmul(x, w, recipe=how)))

    gradients = quick(jax.grad(loss, (0, 1)), static_argnums=2)
    eight = gradients(X, W, recipe("nvfp4", dgrad="full", wgrad="full"))
    for a, b in zip(eight, gradients(X, W, "nvfp4"), strict=True):
        assert 1e-4 < np.abs(a - b).max() / np.abs(b).max() < 0.06


@slow_except("33-bfloat16")
@parametrize("k, dtype", [(K, "float32"), (33, "bfloat16"), (6, "float32")])
def test_both_operands_in_nvfp4_are_multiplied_exactly(k, dtype):
    x = 30 * drawn(2, 3, k).astype(dtype)
    w = drawn(k, N, seed=1)

    @quick
    def run(x, w):
        y, pull = with_pull(fp4_matmul, x, w, recipe=BOTH)
        packed = pack_fp4(w)
        again = fp4_matmul(x, packed, recipe=BOTH)
        return (y, *pull(jnp.ones_like(y))), packed.forward, again

    (y, dx, dw), codes, again = run(x, w)
    exact = values_of(codes).T[:k]
    read = in_nvfp4(x)
    assert y.dtype == x.dtype
    assert same_bits(again, y)
    assert 0.02 < lost(x, read) < 0.15
    # At most 64 addends in float32, two outer scales and the dtype of the result.
    of_result = 2.0**-8 if dtype == "bfloat16" else 0.0
    bound = (np.abs(read) @ np.abs(exact)) * (66 * 2.0**-24 + of_result)
    assert (np.abs(np.float64(y) - read @ exact) <= bound).all()
    # Straight through: dx reads the weight's codes and dw the x that was not rounded,
    # as with BF16 activations.
    of_x = np.broadcast_to(exact.sum(1), x.shape)
    assert_allclose(np.float64(dx), of_x, rtol=max(of_result, 1e-6), atol=2e-5)
    of_w = np.broadcast_to(rounded(x).sum((0, 1))[:, None], w.shape)
    assert_allclose(dw, of_w, rtol=1e-5, atol=1e-4)


def test_a_bad_value_of_x_in_nvfp4_makes_its_row_nan():
    x = X.at[0, 0, 3].set(jnp.nan).at[0, 1, 5].set(jnp.inf).at[1].set(0)
    y = np.asarray(multiply(x, W, recipe=BOTH))
    assert np.isnan(y[0, :2]).all()
    assert np.isfinite(y[0, 2]).all()
    assert (y[1] == 0).all()


def test_linear_and_vmap():
    bias = drawn(N, seed=3)
    plain = multiply(X[0], W)
    assert same_bits(quick(fp4_linear)(X[0], W, bias), plain + bias)
    assert jax.eval_shape(fp4_linear, X[0, 0], W, bias).shape == (N,)
    many = quick(jax.vmap(fp4_matmul))(X, jnp.stack([W, 2 * W]))
    assert_allclose(many[0], plain, rtol=1e-6)
    assert jax.eval_shape(fp4_matmul, X.astype(jnp.bfloat16), W).dtype == jnp.bfloat16


@parametrize(
    "name, bits",
    [("nvfp4", 4.5), ("mxfp4", 4.25), ("squares", 4.03125), ("one_level", 4.5)],
)
def test_bits_of_the_tree(name, bits):
    k, n = 256, 128
    scaling = RECIPES[name].scaling
    w = jnp.zeros((k, n))
    leaf = jax.eval_shape(lambda: pack_fp4(w, RECIPES[name]))
    held = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(leaf))
    assert leaf.nbytes == held
    outer = 4 if scaling.has_outer else 0
    assert (held - outer) * 8 / w.size == scaling.bits((n, k)) == bits


@parametrize("name", ["nvfp4", "mxfp4"])
def test_bad_values_stay_in_their_block(name):
    """A block of zeros, a tiny value alone, an outlier, NaN and infinities, each in a
    column of its own.
    """
    w = np.array(W)
    block = RECIPES[name].scaling.block
    w[:block, [0, 1]] = 0
    w[5, 1:6] = 1e-30, 1e4, np.nan, np.inf, -np.inf
    found = np.asarray(packed_by(jnp.asarray(w), RECIPES[name]).dequantize())
    assert (found[:block, 0] == 0).all()
    assert np.abs(found[5, 1]) < 1e-3
    assert np.abs(found[5, 2] - 1e4) < 2e3
    assert np.isnan(found[:block, 3:6]).all()
    assert np.isfinite(np.delete(found, [3, 4, 5], 1)).all()
    y = np.asarray(multiply(X, jnp.asarray(w), recipe=RECIPES[name]))
    assert np.isnan(y[..., 3:6]).all()
    assert np.isfinite(np.delete(y, [3, 4, 5], -1)).all()


@slow_except("mxfp4")
@parametrize("name", ["nvfp4", "mxfp4"])
def test_a_scale_that_is_nan_loses_nothing(name):
    packed = packed_by(W, RECIPES[name])
    scale = np.array(packed.forward.scale)
    scale.view(np.uint8)[5, 0] = 255
    codes = dataclasses.replace(packed.forward, scale=jnp.asarray(scale))
    broken = Stored.of(codes)

    @quick
    def run(x, broken):
        y, pull = jax.vjp(lambda x: fp4_matmul(x, broken), x)
        return y, pull(jnp.ones_like(y))[0]

    y, dx = run(X, broken)
    lost = np.isnan(y)
    assert lost[..., 5].all()
    assert not np.delete(lost, 5, -1).any()
    block = packed.scaling.block
    assert np.isnan(dx[..., :block]).all()
    assert not np.isnan(dx[..., block:]).any()


@slow_except("{}", "{'rule': 'four_over_six'}")
@parametrize(
    "options",
    [{}, {"tile": "square"}, {"rule": "four_over_six"}, {"rule": "one_level"}],
    ids=str,
)
def test_zeros_have_an_outer_scale_of_one(options):
    """Files hold its reciprocal."""
    packed = pack_fp4(jnp.zeros((32, 16)), recipe("nvfp4", **options))
    assert float(packed.forward.outer) == 1
    assert not packed.dequantize().any()


def test_a_contraction_reads_codes_as_a_product_does():
    """Codes lie `[n, k]`, also where the two are equally long."""
    x = drawn(3, 32)
    codes = pack_fp4(drawn(32, 32, seed=1)).forward
    given = dict(recipe=recipe("nvfp4"), quantized=codes, shape=(32, 32))
    found = contract(parse("bk,kn->bn", 2), x, None, **given)
    assert jnp.array_equal(found, tcfp_jax.matmul(x, codes, recipe="nvfp4"))


# Error feedback
# --------------------------------------------------------------------------------------


@parametrize("layout, k", [("...k,kn->...n", 33), ("...k,nk->...n", 33)])
def test_error_feedback_packs_along_what_is_contracted(layout, k):
    """A table `[n, k]` of a head is packed along k, too, and the rounding error is fed
    back.
    """
    contraction = parse(layout, 2)
    transposed = contraction.layout.transposed
    params = {"kernel": W[:k].T if transposed else W[:k]}
    how = recipe("nvfp4", remainder="feedback")
    weights = {"kernel": Weight(how, contraction.layout)}
    tx = tcfp_jax.error_feedback(weights, error_dtype="float8_e5m2")
    zeros = jax.tree.map(jnp.zeros_like, params)
    _, state = quick(tx.update)(zeros, quick(tx.init)(params), params)
    stored = tcfp_jax.layer_state(state)["kernel"]
    codes = stored.backward if transposed else stored.forward
    assert codes.shape == (N, k + k % 2)
    assert state.scaled_errors["kernel"].shape == params["kernel"].shape
    x = X[0, :, :k]

    @quick
    def run(x, kernel, stored):
        given = dict(recipe=how, quantized=stored)
        without = contract(contraction, x, None, shape=kernel.shape, **given)
        return contract(contraction, x, kernel, **given), without

    y, without = run(x, params["kernel"], stored)
    assert_near(y, rounded(x) @ values_of(codes).T[:k], 2e-5)
    assert same_bits(without, y)


def test_error_feedback_brings_the_mean_to_the_weight():
    tx = tcfp_jax.error_feedback(recipe("nvfp4", remainder="feedback"))
    params = {"kernel": W}
    state = quick(tx.init)(params)
    step = quick(tx.update)
    total = 0
    for _ in range(16):
        total = total + tcfp_jax.layer_state(state)["kernel"].dequantize()
        state = step({"kernel": jnp.zeros_like(W)}, state, params)[1]
    once = np.abs(packed_by(W, RECIPES["nvfp4"]).dequantize() - W).mean()
    assert np.abs(total / 16 - W).mean() < once / 4


@parametrize("exponent, ends_in_inf", [(100, False), (120, True)])
def test_nvfp4_multiplies_sums_by_its_outer_scale_at_the_end(exponent, ends_in_inf):
    x = jnp.full((1, 32), 2.0**exponent)
    w = jnp.full((32, 16), 2.0**-20)
    y = fp4_matmul(x, w)
    exact = 32 * 2.0 ** (exponent - 20)
    assert_allclose(y, np.inf if ends_in_inf else exact, rtol=1e-3)
