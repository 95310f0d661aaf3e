"""FP4 weights in products: exact against float64, both gradients, odd sizes, bad input,
bytes, meshes.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tcfp_jax
from pallas_kernels.fp4 import E2M1
from pallas_kernels.fp4_matmul.reference import quantize_rows
from pallas_kernels.operands import Fp4
from tcfp_jax import optim, recipe
from tcfp_jax.products import fp4_linear, fp4_matmul, pack_fp4
from tcfp_jax.products.einsum import contract
from tcfp_jax.sharding import state_shardings
from tcfp_jax.weights.fp4_packing import quantize_fp4
from tcfp_jax.weights.layout import Weight
from tcfp_jax.weights.stored import Stored
from tests.equations import parse
from tests.formats_oracles import QUICK
from tests.helpers import mesh_of, same_bits

ONE_LEVEL = recipe("nvfp4", rule="one_level")
SQUARES = recipe("nvfp4", tile="square")
RECIPES = {
    "nvfp4": recipe("nvfp4"),
    "mxfp4": recipe("mxfp4"),
    "one_level": ONE_LEVEL,
    "squares": SQUARES,
}
IN_E4M3 = recipe("nvfp4", activation="float8_e4m3fn")
BOTH = recipe("nvfp4", activation="float4_e2m1fn")
K, N = 64, 32


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


X, W = normal(2, 3, K), normal(K, N, seed=1)
# A program for each recipe and shape, where every operation would be one.
quick = functools.partial(jax.jit, compiler_options=QUICK)
packed_by = quick(pack_fp4, static_argnums=1)
multiply = quick(fp4_matmul, static_argnames="recipe")


def float64_of(operand):
    """Return the values of packed codes `[n, k]`, by NumPy alone."""
    values = np.asarray(operand.values)
    numbers = np.asarray(E2M1, np.float64)[
        np.stack([values & 15, values >> 4], -1).reshape(operand.shape)
    ]
    n, k = operand.shape
    scale = np.repeat(
        np.asarray(operand.scale.astype(jnp.float32), np.float64),
        operand.scaling.block,
        -1,
    )[:, :k]
    if operand.scaling.tile == "square":
        scale = np.repeat(scale, operand.scaling.block, 0)[:n]
    return numbers * scale * (1.0 if operand.outer is None else float(operand.outer))


def rounded(x):
    return np.asarray(jnp.asarray(x).astype(jnp.bfloat16), np.float64)


def in_e4m3(x):
    return np.asarray(quick(lambda x: quantize_rows(x).dequantize())(x), np.float64)


def in_nvfp4(x):
    """X `[..., k]` as the format library casts a matrix of its rows to NVFP4, in
    float64.
    """
    rows = jnp.asarray(x).reshape(-1, x.shape[-1])
    rows = jnp.pad(rows, ((0, 0), (0, rows.shape[-1] % 2)))
    return float64_of(quick(quantize_fp4)(rows))[:, : x.shape[-1]].reshape(x.shape)


# Against float64
# --------------------------------------------------------------------------------------


@pytest.mark.slow_except("nvfp4", "mxfp4")
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "squares"])
def test_products_and_gradients_are_those_of_the_dequantized_weight(name):
    chosen = RECIPES[name]
    packed = packed_by(W, chosen)
    exact = float64_of(packed.forward).T

    @quick
    def both(x, w):
        y, pull = jax.vjp(lambda x, w: fp4_matmul(x, w, recipe=chosen), x, w)
        return y, pull(jnp.cos(y))

    @quick
    def of_codes(x, packed, y):
        again, pull = jax.vjp(lambda x: fp4_matmul(x, packed), x)
        return again, pull(jnp.cos(y))[0], packed.dequantize()

    y, (dx, dw) = both(X, W)
    again, pulled, dequantized = of_codes(X, packed, y)
    np.testing.assert_allclose(dequantized, exact, rtol=1e-6)
    g = rounded(jnp.cos(y))
    np.testing.assert_allclose(y, rounded(X) @ exact, rtol=0, atol=2e-5)
    np.testing.assert_allclose(dx, g @ exact.T, rtol=0, atol=2e-5)
    # straight through
    np.testing.assert_allclose(
        dw, np.einsum("abk,abn->kn", rounded(X), g), rtol=0, atol=2e-5
    )
    assert same_bits(again, y)
    np.testing.assert_allclose(pulled, dx, rtol=0, atol=1e-5)


def test_the_one_level_rule_is_the_seeds():
    """Scales are amax / 6 rounded to E4M3, values x / scale rounded to E2M1; nothing
    scales the scales.
    """
    codes = packed_by(W, ONE_LEVEL).forward
    blocks = np.asarray(W.T, np.float32).reshape(N, -1, 16)
    scale = jnp.asarray(np.abs(blocks).max(-1) / np.float32(6)).astype(
        jnp.float8_e4m3fn
    )
    assert same_bits(codes.scale, scale) and float(codes.outer) == 1.0
    wide = np.asarray(scale.astype(jnp.float32))[..., None]
    values = (
        np.clip(blocks / wide, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    )
    np.testing.assert_array_equal(codes.dequantize().reshape(N, -1, 16), values * wide)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("nvfp4", (33, 5)), ("mxfp4", (9, 3)), ("squares", (1, 1))],
    ids=str,
)
def test_any_size_without_padding_at_the_caller(name, shape):
    k, n = shape
    x, w = normal(4, k), normal(k, n, seed=2)

    @quick
    def run(x, w):
        y, pull = jax.vjp(lambda x, w: fp4_matmul(x, w, recipe=RECIPES[name]), x, w)
        packed = pack_fp4(w, RECIPES[name])
        again, pull_x = jax.vjp(lambda x: fp4_matmul(x, packed), x)
        return (
            y,
            *pull(jnp.ones_like(y)),
            packed,
            packed.dequantize(),
            again,
            *pull_x(jnp.ones_like(y)),
        )

    y, dx, dw, packed, dequantized, *of_codes = run(x, w)
    exact = float64_of(packed.forward).T[:k]
    np.testing.assert_allclose(dequantized, exact, rtol=1e-6)
    assert packed.shape == (k, n) and same_bits(of_codes, [y, dx])
    np.testing.assert_allclose(y, rounded(x) @ exact, rtol=0, atol=2e-5)
    np.testing.assert_allclose(
        dx, np.broadcast_to(exact.sum(1), (4, k)), rtol=0, atol=2e-5
    )
    assert dw.shape == (k, n)


def test_packed_codes_know_an_odd_k():
    """Whichever way the codes lie, and in a stack."""
    packed = jax.eval_shape(pack_fp4, jax.ShapeDtypeStruct((33, 5), jnp.float32))
    assert (
        packed.forward.shape == (5, 34)
        and packed.shape == (33, 5)
        and packed.holds((33, 5))
    )
    turned = packed.swap()
    stacked = jax.eval_shape(
        lambda p: jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), p), packed
    )
    assert turned.shape == (5, 33) and stacked.shape == (2, 33, 5)
    for one in (packed, turned, stacked):
        values, scales = jax.eval_shape(
            lambda one: (one.dequantize(), one.scale_of_values()), one
        )
        assert values.shape == scales.shape == one.shape
    with pytest.raises(
        ValueError,
        match=re.escape("x[4, 34] @ w[33, 5]: the last axis of x must equal"),
    ):
        jax.eval_shape(fp4_matmul, jnp.ones((4, 34)), packed)
    assert pack_fp4(jnp.ones((33, 8))).holds((33, 8)) and not pack_fp4(
        jnp.ones((33, 8))
    ).holds((32, 8))


def test_codes_whose_padding_a_checkpoint_lost_are_told_apart_by_their_layer():
    lost = Stored.of(
        jax.eval_shape(pack_fp4, jax.ShapeDtypeStruct((33, 5), jnp.float32)).forward
    )
    assert (
        lost.shape == (34, 5)
        and lost.holds((33, 5))
        and lost.holds((34, 5))
        and not lost.holds((32, 5))
    )
    with pytest.raises(ValueError, match="pad x with one zero"):
        jax.eval_shape(fp4_matmul, jnp.ones((4, 33)), lost)


@pytest.mark.parametrize("shape", [(0, 3, 4), (4, 0, 4), (4, 3, 0)], ids=str)
@pytest.mark.parametrize("name", ["nvfp4", "mxfp8", "nvfp4_training"])
def test_axes_without_values_give_zeros(name, shape):
    """As tensors with one FP8 scale do: results and gradients of the right shapes,
    nothing but zeros.
    """
    m, k, n = shape
    chosen, x, w = recipe(name), jnp.ones((2, m, k)), jnp.ones((k, n))
    y, pull = jax.vjp(
        lambda x, w: tcfp_jax.matmul(x, w, recipe=chosen, key=jax.random.key(0)), x, w
    )
    for found, wanted in zip(
        (y, *pull(jnp.ones_like(y))), ((2, m, n), x.shape, w.shape), strict=True
    ):
        np.testing.assert_array_equal(found, np.zeros(wanted))
    if name in RECIPES and w.size == 0:
        packed = pack_fp4(w, chosen)
        assert packed.shape == packed.dequantize().shape == w.shape
        y, pull = jax.vjp(
            lambda x: fp4_matmul(
                x, packed, recipe=recipe(name, activation="float8_e4m3fn")
            ),
            x,
        )
        np.testing.assert_array_equal(y, np.zeros((2, m, n)))
        np.testing.assert_array_equal(pull(y)[0], np.zeros(x.shape))


def test_activations_of_eight_bits_and_fp8_gradients():
    exact = rounded(X) @ float64_of(packed_by(W, RECIPES["nvfp4"]).forward).T
    largest = np.abs(exact).max()
    errors = np.abs(multiply(X, W, recipe=IN_E4M3) - exact)
    assert 1e-4 * largest < errors.max() < 0.05 * largest
    eight = recipe("nvfp4", dgrad="full", wgrad="full")
    loss = lambda x, w, how: jnp.sum(jnp.sin(fp4_matmul(x, w, recipe=how)))
    both = quick(
        lambda x, w: [jax.grad(loss, (0, 1))(x, w, how) for how in (eight, "nvfp4")]
    )
    for a, b in zip(*both(X, W), strict=True):
        assert 1e-4 < np.abs(a - b).max() / np.abs(b).max() < 0.06


@pytest.mark.slow_except("33-bfloat16")
@pytest.mark.parametrize(
    ("k", "dtype"), [(K, "float32"), (33, "bfloat16"), (6, "float32")]
)
def test_both_operands_in_nvfp4_are_multiplied_exactly(k, dtype):
    x, w = 30 * normal(2, 3, k).astype(dtype), normal(k, N, seed=1)

    @quick
    def run(x, w):
        y, pull = jax.vjp(lambda x, w: fp4_matmul(x, w, recipe=BOTH), x, w)
        packed = pack_fp4(w)
        again = fp4_matmul(x, packed, recipe=BOTH)
        return y, *pull(jnp.ones_like(y)), packed.forward, again

    y, dx, dw, codes, again = run(x, w)
    exact, read = float64_of(codes).T[:k], in_nvfp4(x)
    assert y.dtype == x.dtype and same_bits(again, y)
    assert (
        0.02
        < np.linalg.norm(read - np.asarray(x, np.float64)) / np.linalg.norm(read)
        < 0.15
    )
    # At most 64 addends in float32, two outer scales and the dtype of the result.
    bound = (np.abs(read) @ np.abs(exact)) * (
        66 * 2.0**-24 + (2.0**-8 if dtype == "bfloat16" else 0)
    )
    assert (np.abs(np.asarray(y, np.float64) - read @ exact) <= bound).all()
    # Straight through: dx reads the weight's codes and dw the x that was not rounded,
    # as with BF16 activations.
    wide = 2.0**-8 if dtype == "bfloat16" else 1e-6
    np.testing.assert_allclose(
        dx.astype(jnp.float32),
        np.broadcast_to(exact.sum(1), x.shape),
        rtol=wide,
        atol=2e-5,
    )
    np.testing.assert_allclose(
        dw,
        np.einsum("abk,abn->kn", rounded(x), np.ones((2, 3, N))),
        rtol=1e-5,
        atol=1e-4,
    )


def test_a_bad_value_of_x_in_nvfp4_makes_its_row_nan():
    x = X.at[0, 0, 3].set(jnp.nan).at[0, 1, 5].set(jnp.inf).at[1].set(0)
    y = np.asarray(multiply(x, W, recipe=BOTH))
    assert np.isnan(y[0, :2]).all() and np.isfinite(y[0, 2]).all() and (y[1] == 0).all()


def test_linear_and_vmap():
    bias = normal(N, seed=3)
    y, plain = quick(fp4_linear)(X[0], W, bias), multiply(X[0], W)
    assert same_bits(y, plain + bias)
    assert jax.eval_shape(fp4_linear, X[0, 0], W, bias).shape == (N,)
    many = quick(jax.vmap(fp4_matmul))(X, jnp.stack([W, 2 * W]))
    np.testing.assert_allclose(many[0], plain, rtol=1e-6)
    assert jax.eval_shape(fp4_matmul, X.astype(jnp.bfloat16), W).dtype == jnp.bfloat16
    with pytest.raises(ValueError, match=re.escape("bias has shape [3]")):
        fp4_linear(X, W, jnp.ones(3))


# Bytes
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "bits"),
    [("nvfp4", 4.5), ("mxfp4", 4.25), ("squares", 4.03125), ("one_level", 4.5)],
)
def test_bits_of_the_tree(name, bits):
    k, n = 256, 128
    leaf = jax.eval_shape(
        lambda w: pack_fp4(w, RECIPES[name]), jax.ShapeDtypeStruct((k, n), jnp.float32)
    )
    held = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(leaf))
    outer = 4 if RECIPES[name].scaling.has_outer else 0
    assert (held - outer) * 8 / (k * n) == RECIPES[name].scaling.bits(
        (n, k)
    ) == bits and leaf.nbytes == held


# Bad input
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_bad_values_stay_in_their_block(name):
    """A block of zeros, a tiny value alone, an outlier, NaN and infinities, each in a
    column of its own.
    """
    w = np.asarray(W).copy()
    block = RECIPES[name].scaling.block
    w[:block, [0, 1]] = 0
    w[5, 1:6] = 1e-30, 1e4, np.nan, np.inf, -np.inf
    found = np.asarray(packed_by(jnp.asarray(w), RECIPES[name]).dequantize())
    assert (
        (found[:block, 0] == 0).all()
        and np.abs(found[5, 1]) < 1e-3
        and np.abs(found[5, 2] - 1e4) < 2e3
    )
    assert (
        np.isnan(found[:block, 3:6]).all()
        and np.isfinite(np.delete(found, [3, 4, 5], 1)).all()
    )
    y = np.asarray(multiply(X, jnp.asarray(w), recipe=RECIPES[name]))
    assert (
        np.isnan(y[..., 3:6]).all() and np.isfinite(np.delete(y, [3, 4, 5], -1)).all()
    )


@pytest.mark.slow_except("mxfp4")
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_a_scale_that_is_nan_loses_nothing(name):
    packed = packed_by(W, RECIPES[name])
    code = (
        jax.lax.bitcast_convert_type(packed.forward.scale, jnp.uint8).at[5, 0].set(255)
    )
    scale = jax.lax.bitcast_convert_type(code, packed.forward.scale.dtype)
    broken = Stored.of(
        jax.tree.map(
            lambda leaf: scale if leaf is packed.forward.scale else leaf, packed.forward
        )
    )

    @quick
    def run(x, broken):
        y, pull = jax.vjp(lambda x: fp4_matmul(x, broken), x)
        return y, pull(jnp.ones_like(y))[0]

    y, dx = run(X, broken)
    lost = np.isnan(y)
    assert lost[..., 5].all() and not np.delete(lost, 5, -1).any()
    block = packed.scaling.block
    assert np.isnan(dx[..., :block]).all() and not np.isnan(dx[..., block:]).any()


def test_packed_codes_have_no_gradient():
    packed = packed_by(W, RECIPES["nvfp4"])
    loss = lambda w: jnp.sum(fp4_matmul(X, w))
    for differentiate in (
        lambda w: jax.vjp(loss, w),
        jax.grad(loss, allow_int=True),
        tcfp_jax.grad(loss),
    ):
        with pytest.raises(TypeError, match=r'LoRA.*recipe\("nvfp4"\)'):
            differentiate(packed)
    with pytest.raises(TypeError):  # jax's own: bytes
        jax.grad(loss)(packed)
    with pytest.raises(ValueError, match="too coarse to be a parameter"):
        optim.store({"kernel": W}, "nvfp4", key=jax.random.key(0))


def test_what_reads_packed_codes_as_floats_is_told_how_to_get_these():
    packed = packed_by(W, RECIPES["nvfp4"])
    with pytest.raises(TypeError, match=r"weight\.dequantize\(\)"):
        X @ packed
    with pytest.raises(TypeError, match=r"weight\.dequantize\(\).*LoRA"):
        tcfp_jax.dequantize({"kernel": packed})


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            lambda: fp4_matmul(X[..., :62], pack_fp4(W)),
            ValueError,
            "the last axis of x must equal",
        ),
        (
            lambda: fp4_matmul(X, W, recipe="tensorwise"),
            ValueError,
            'recipe "tensorwise" stores weight=Single(',
        ),
        (
            lambda: fp4_matmul(X, W, recipe="bf16"),
            ValueError,
            'recipe "bf16" stores weights as floats',
        ),
        (
            lambda: fp4_matmul(X, W, recipe="nvfp4_training"),
            ValueError,
            "tcfp_jax.matmul(x, w, recipe=..., key=key)",
        ),
        (
            lambda: pack_fp4(W, "nvfp4_training"),
            ValueError,
            'recipe "nvfp4_training" packs no weight',
        ),
        (
            lambda: optim.store({"kernel": W}, "nvfp4_training"),
            ValueError,
            'recipe "nvfp4_training" stores nothing',
        ),
        (
            lambda: fp4_matmul(X, pack_fp4(W), recipe=SQUARES),
            ValueError,
            'use recipe("nvfp4", tile="vector")',
        ),
        (
            lambda: fp4_matmul(X, pack_fp4(W), recipe="mxfp4"),
            ValueError,
            "packed FP4 codes with Fp4(format='nvfp4'",
        ),
        (
            lambda: recipe("nvfp4", activation="float8"),
            ValueError,
            "activation='float8' is unknown",
        ),
        (
            lambda: fp4_matmul(X, W.astype(jnp.int32)),
            TypeError,
            "w has dtype int32, but only real floats are",
        ),
        (lambda: pack_fp4(X), ValueError, "is not a matrix [k, n]"),
        (
            lambda: fp4_matmul(X, pack_fp4(W.T).swap()),
            ValueError,
            "packed along n, but products read them along k",
        ),
        (
            lambda: fp4_linear(X, W, jnp.ones(N, jnp.complex64)),
            TypeError,
            "bias has dtype complex64",
        ),
        (
            lambda: tcfp_jax.matmul(X, pack_fp4(W), recipe="tensorwise"),
            ValueError,
            "packed FP4 codes",
        ),
    ],
)
def test_what_does_not_fit_says_so(call, error, words):
    with pytest.raises(error, match=re.escape(words)):
        call()


# Recipes
# --------------------------------------------------------------------------------------


def test_recipes():
    assert (
        recipe(BOTH, activation="bfloat16")
        == recipe("nvfp4", forward="bf16")
        == RECIPES["nvfp4"]
    )
    assert (IN_E4M3.forward, IN_E4M3.activation) == ("full", "float8_e4m3fn")
    assert (recipe("nvfp4").mode, recipe("mxfp4").scaling) == (
        tcfp_jax.TCFPMode.FP4,
        Fp4("mxfp4"),
    )
    assert recipe("nvfp4", tile="square", rule="four_over_six").scaling == Fp4(
        "nvfp4", "square", "four_over_six"
    )


@pytest.mark.parametrize(
    ("name", "overrides", "words"),
    [
        ("nvfp4", dict(weight_dtype="float8_e4m3fn"), "belong together"),
        ("tensorwise", dict(weight_dtype="float4_e2m1fn"), "belong together"),
        ("tcfp12", dict(scaling=Fp4()), "belong together"),
        ("nvfp4", dict(dgrad="fast"), 'use "full"'),
        (
            "nvfp4",
            dict(forward="full", activation="float8_e5m2"),
            'use activation="float8_e4m3fn"',
        ),
        ("mxfp4", dict(activation="float4_e2m1fn"), "in the forward product alone"),
        (
            "nvfp4",
            dict(activation="float4_e2m1fn", wgrad="full"),
            "in the forward product alone",
        ),
        (
            "nvfp4",
            dict(activation="float4_e2m1fn", forward="bf16"),
            "in the forward product alone",
        ),
        ("tcfp12", dict(activation="float4_e2m1fn"), "in the forward product alone"),
        (
            "nvfp4",
            dict(dgrad="full", gradient="float8_e5m2"),
            'use gradient="float8_e4m3fn"',
        ),
        ("nvfp4", dict(block=32), "blocks of nvfp4 hold 16"),
        ("nvfp4", dict(scale="pow2"), "its scales are its own"),
        ("nvfp4", dict(rule="best"), "rule='best' is not a rule of nvfp4"),
        ("mxfp4", dict(rule="one_level"), "is not a rule of mxfp4"),
        ("tensorwise", dict(rule="amax"), "rules choose the scales of FP4 weights"),
        ("nvfp4", dict(amax="delayed"), 'use amax="fresh"'),
    ],
)
def test_contradictions_say_how_to_repair_them(name, overrides, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        recipe(name, **overrides)


# The optimizer's state and other shapes
# -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "k"), [("...k,kn->...n", 33), ("...k,nk->...n", 33)]
)
def test_error_feedback_packs_along_what_is_contracted(layout, k):
    """A table `[n, k]` of a head is packed along k, too, and the rounding error is fed
    back.
    """
    contraction = parse(layout, 2)
    kernel = W[:k].T if contraction.layout.transposed else W[:k]
    how = recipe("nvfp4", remainder="feedback")
    tx = tcfp_jax.error_feedback(
        {"kernel": Weight(how, contraction.layout)}, error_dtype="float8_e5m2"
    )
    state = quick(tx.init)({"kernel": kernel})
    _, state = quick(tx.update)(
        {"kernel": jnp.zeros_like(kernel)}, state, {"kernel": kernel}
    )
    stored = tcfp_jax.layer_state(state)["kernel"]
    codes = stored.backward if contraction.layout.transposed else stored.forward
    assert (
        codes.shape == (N, k + k % 2)
        and state.scaled_errors["kernel"].shape == kernel.shape
    )
    x = X[0, :, :k]

    @quick
    def run(x, kernel, stored):
        product = functools.partial(
            contract, contraction, x, recipe=how, quantized=stored
        )
        return product(kernel), product(None, shape=kernel.shape)

    y, without = run(x, kernel, stored)
    np.testing.assert_allclose(
        y, rounded(x) @ float64_of(codes).T[:k], rtol=0, atol=2e-5
    )
    assert same_bits(without, y)


def test_error_feedback_brings_the_mean_to_the_weight():
    tx = tcfp_jax.error_feedback(recipe("nvfp4", remainder="feedback"))
    params = {"kernel": W}
    state, total, step = quick(tx.init)(params), 0, quick(tx.update)
    for _ in range(16):
        total = total + tcfp_jax.layer_state(state)["kernel"].dequantize()
        state = step({"kernel": jnp.zeros_like(W)}, state, params)[1]
    once = np.abs(packed_by(W, RECIPES["nvfp4"]).dequantize() - W).mean()
    assert np.abs(total / 16 - W).mean() < once / 4


# Meshes
# --------------------------------------------------------------------------------------


def placed_codes(recipe, shape, spec):
    """The first half of a weight of `error_feedback`, as shardings."""
    mesh = AbstractMesh((2, 2), ("fsdp", "tensor"))
    params = {"kernel": jax.ShapeDtypeStruct(shape, jnp.float32)}
    place = {"kernel": NamedSharding(mesh, spec)}
    found = state_shardings(place, params, tcfp_jax.error_feedback(recipe).init)
    return found.weights["kernel"].forward


def test_a_state_of_codes_lies_as_its_kernel_does():
    found = placed_codes("nvfp4", (K, N), P("fsdp", "tensor"))
    assert found.values.spec == found.scale.spec == P("tensor", "fsdp")
    assert found.outer.spec == P()
    odd = placed_codes("nvfp4", (33, N), P(None, "tensor"))
    assert odd.values.spec == P("tensor")


@pytest.mark.parametrize(
    ("recipe", "shape", "spec", "message"),
    [
        ("mxfp4", (32, N), P("fsdp"), "32 values along axis 1 of [32, 32]"),
        (SQUARES, (K, 16), P(None, "tensor"), "16 values along axis 0 of [16, 64]"),
    ],
    ids=["mxfp4", "squares"],
)
def test_a_mesh_cuts_no_block_of_codes(recipe, shape, spec, message):
    message = f"kernel: blocks of {message} are cut"
    with pytest.raises(ValueError, match=re.escape(message)):
        placed_codes(recipe, shape, spec)


@pytest.fixture(scope="module")
def stepped():
    """(a transformation, its first state, a step, x, the step on one device)."""
    tx = tcfp_jax.error_feedback("nvfp4")

    def step(params, state, x):
        stored = tcfp_jax.layer_state(state)["kernel"]
        loss = lambda p, x: jnp.sum(
            jnp.sin(tcfp_jax.matmul(x, p["kernel"], recipe="nvfp4", quantized=stored))
        )
        dw, dx = jax.grad(loss, (0, 1))(params, x)
        updates = jax.tree.map(lambda g: -0.1 * g, dw)
        return dx, *tx.update(updates, state, params)

    x, state = X.reshape(-1, K)[:4], quick(tx.init)({"kernel": W})
    return tx, state, step, x, quick(step)({"kernel": W}, state, x)


@pytest.mark.slow_except("explicit")
@pytest.mark.parametrize(
    "kind", [AxisType.Auto, AxisType.Explicit], ids=["automatic", "explicit"]
)
def test_a_step_on_fsdp_and_tensor_axes_has_the_bits_of_one_device(kind, stepped):
    mesh = mesh_of(2, 2, names=("fsdp", "tensor"), axis_type=kind)
    tx, state, step, x, alone = stepped
    with jax.set_mesh(mesh):
        where = NamedSharding(mesh, P("fsdp", "tensor"))
        params = {"kernel": jax.device_put(W, where)}
        places = state_shardings({"kernel": where}, {"kernel": W}, tx.init)
        state = jax.device_put(state, places)
        split = quick(step)(
            params, state, jax.device_put(x, NamedSharding(mesh, P("fsdp")))
        )
    np.testing.assert_allclose(split[0], alone[0], rtol=0, atol=1e-5)
    np.testing.assert_allclose(
        split[1]["kernel"], alone[1]["kernel"], rtol=0, atol=1e-5
    )
    found, expected = (
        tcfp_jax.layer_state(made[2])["kernel"].forward for made in (split, alone)
    )
    np.testing.assert_allclose(
        found.dequantize(), expected.dequantize(), rtol=0, atol=0.6
    )
    assert np.mean(np.asarray(found.values) == np.asarray(expected.values)) > 0.98


@pytest.mark.slow_except("mxfp4-64-bfloat16-False")
@pytest.mark.parametrize(
    ("name", "k", "activation", "whole"),
    [
        ("nvfp4", 64, "bfloat16", False),
        ("mxfp4", 128, "bfloat16", False),
        ("mxfp4", 64, "bfloat16", False),
        ("nvfp4", 128, "bfloat16", True),
        ("nvfp4", 128, "float8_e4m3fn", True),
        ("nvfp4", 128, "float4_e2m1fn", True),
    ],
)
def test_devices_that_have_parts_of_blocks_bring_the_contraction_together(
    name, k, activation, whole
):
    """Eight devices have parts of k; only where those are whole blocks does each
    multiply its own.
    """
    mesh, x, w = (
        mesh_of(8, axis_type=AxisType.Explicit),
        normal(4, k),
        normal(k, N, seed=1),
    )
    put = lambda array, *spec: jax.device_put(array, NamedSharding(mesh, P(*spec)))

    @quick
    def run(x, w, packed):
        chosen = recipe(name, activation=activation)
        multiply = lambda x, w: fp4_matmul(x, w, recipe=chosen, out_sharding=P())
        y, pull = jax.vjp(multiply, x, w)
        return y, multiply(x, packed), *pull(jnp.ones_like(y))

    with jax.set_mesh(mesh):
        codes = packed_by(put(w, "a"), RECIPES[name]).forward
        assert (
            codes.values.sharding.spec[1]
            == codes.scale.sharding.spec[1]
            == ("a" if whole else None)
        )
        # Codes that someone else sharded may be cut where scales cannot.
        cut = Stored.of(dataclasses.replace(codes, values=put(codes.values, None, "a")))
        split = run(put(x, None, "a"), put(w, "a"), cut)
    exact, ones = float64_of(codes).T, np.ones((4, N))
    assert np.linalg.norm(exact - w) < 0.15 * np.linalg.norm(w)
    read = {"bfloat16": rounded, "float8_e4m3fn": in_e4m3, "float4_e2m1fn": in_nvfp4}[
        activation
    ](x)
    for got, wanted in zip(
        split,
        (read @ exact, read @ exact, ones @ exact.T, rounded(x).T @ ones),
        strict=True,
    ):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-5)


@pytest.mark.slow_except("nvfp4")
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_types_say_the_mesh_where_none_is_set(name):
    mesh, x = mesh_of(2, 2, axis_type=AxisType.Explicit), normal(4, K)
    put = lambda array, *spec: jax.device_put(array, NamedSharding(mesh, P(*spec)))
    w = put(W, None, "b")
    y, codes = (
        multiply(put(x, "a"), w, recipe=name),
        packed_by(w, RECIPES[name]).forward,
    )
    assert jax.typeof(y).sharding.spec == P("a", "b")
    assert codes.values.sharding.spec == codes.scale.sharding.spec == P("b", None)
    np.testing.assert_allclose(y, rounded(x) @ float64_of(codes).T, rtol=0, atol=2e-5)


@pytest.mark.slow_except("{}", "{'rule': 'four_over_six'}")
@pytest.mark.parametrize(
    "options",
    [{}, {"tile": "square"}, {"rule": "four_over_six"}, {"rule": "one_level"}],
    ids=str,
)
def test_zeros_have_an_outer_scale_of_one(options):
    """Files hold its reciprocal."""
    packed = pack_fp4(jnp.zeros((32, 16)), recipe("nvfp4", **options))
    assert float(packed.forward.outer) == 1 and not packed.dequantize().any()


def test_a_contraction_reads_an_operand_of_codes_as_a_product_does():
    """Codes lie `[n, k]`, also where the two are equally long."""
    x, w = normal(3, 32), normal(32, 32, seed=1)
    codes = pack_fp4(w).forward
    found = contract(
        parse("bk,kn->bn", 2),
        x,
        None,
        recipe=recipe("nvfp4"),
        quantized=codes,
        shape=(32, 32),
    )
    assert jnp.array_equal(found, tcfp_jax.matmul(x, codes, recipe="nvfp4"))
