"""Bad input: a clear error or a loud NaN, never a clean number."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.testing import assert_allclose

import tcfp_jax
from tcfp_jax.linen import TCFPDense
from tests.helpers import normal, parametrize, refused, slow_except

X = normal(0, (8, 32))
W = normal(1, (32, 16)) * 0.1
G = normal(2, (8, 16))
QUANTIZING = ("tcfp12", "tcfp12_fast", "tensorwise")
RECIPES = ("bf16", *QUANTIZING)


@functools.partial(jax.jit, static_argnums=0)
def run(recipe, x=X, w=W, g=G):
    y, vjp = jax.vjp(lambda x, w: tcfp_jax.matmul(x, w, recipe=recipe), x, w)
    return (y, *vjp(g.astype(y.dtype)))


@parametrize("recipe", RECIPES)
@parametrize("shape", [(0, 32), (2, 0, 32)], ids=str)
def test_empty_batch(recipe, shape):
    y, dx, dw = run(recipe, x=jnp.zeros(shape), g=jnp.zeros((*shape[:-1], 16)))
    assert y.shape == (*shape[:-1], 16)
    assert dx.shape == shape
    assert jnp.array_equal(dw, jnp.zeros_like(W))


def rounding_bound(recipe, product, a, b):
    """Return a bound of a product's error: half a unit in the last place per operand.

    An FP8 value of a tensor whose scale is a power of two is off by at most |v|
    2**-(mantissa + 1), or by half of the smallest step (2**-10 of E4M3's units) where
    it is tiny; the sum by what float32 leaves of it.
    """
    how = getattr(recipe, product)
    formats = {
        "forward": (recipe.activation, "w"),
        "dgrad": (recipe.gradient, "w"),
        "wgrad": (recipe.activation, recipe.gradient),
    }

    def off(v, dtype):
        v = np.abs(np.asarray(v, np.float64))
        if how == "bf16":
            return v * 2.0**-8
        if dtype == "w":
            halves = 2 if getattr(recipe.weight, product) == "hi+lo" else 1
            return np.maximum(v * 2.0 ** (-4 * halves), v.max() * 2.0**-17)
        mantissa = {"float8_e4m3fn": 3, "float8_e5m2": 2}[dtype]
        return np.maximum(v * 2.0 ** -(mantissa + 1), v.max() * 2.0**-17)

    of_a, of_b = (
        off(v, dtype) for v, dtype in zip((a, b), formats[product], strict=True)
    )
    a, b = (np.abs(np.asarray(v, np.float64)) for v in (a, b))
    return of_a @ b + a @ of_b + of_a @ of_b + 2.0**-20 * (a @ b)


@slow_except("3-5-7-bf16", "3-5-7-tcfp12", "1-1-1-tcfp12_fast", "9-100-33-tensorwise")
@parametrize("recipe", RECIPES)
@parametrize("m, k, n", [(3, 5, 7), (1, 1, 1), (9, 100, 33)], ids=str)
def test_sizes_that_are_no_multiples_of_16(recipe, m, k, n):
    x, w, g = (normal(i, shape) for i, shape in enumerate([(m, k), (k, n), (m, n)]))
    y, dx, dw = run(recipe, x, w, g)
    recipe = tcfp_jax.recipe(recipe)
    for got, product, a, b in (
        (y, "forward", x, w),
        (dx, "dgrad", g, w.T),
        (dw, "wgrad", x.T, g),
    ):
        assert got.shape == (a.shape[0], b.shape[1])
        assert np.all(np.abs(got - a @ b) <= rounding_bound(recipe, product, a, b))


@parametrize(
    "dtype", [jnp.int32, jnp.uint8, jnp.bool_, jnp.complex64], ids=lambda d: d.__name__
)
def test_integers_and_complex_numbers_raise(dtype):
    bad = jnp.ones((8, 32), dtype)
    calls = {
        "x": lambda: tcfp_jax.matmul(bad, W, recipe="tcfp12"),
        "w": lambda: tcfp_jax.matmul(X, jnp.ones((32, 16), dtype), recipe="tcfp12"),
        "quantize": lambda: tcfp_jax.quantize(bad),
        "split": lambda: tcfp_jax.split(bad),
    }
    if dtype == jnp.complex64:  # integers are promoted, as by Flax's own layers
        calls |= {"layer": lambda: TCFPDense(4).init(jax.random.key(0), bad)}
    for call in calls.values():
        with refused(r"astype\(jnp.float32\)", TypeError):
            call()


def test_float8_operands_raise():
    with refused(r"x is a list, .*jnp\.asarray\(x\)", TypeError):
        tcfp_jax.matmul([[1.0] * 32], W, recipe="tcfp12")
    with refused("quantizes by itself", TypeError):
        tcfp_jax.matmul(X.astype(jnp.float8_e4m3fn), W, recipe="tcfp12")


@parametrize(
    "w, stored, message",
    [
        (W.T, None, r"x\[8, 32\] @ w\[16, 32\]"),
        (jnp.ones((2, 32, 16)), None, r"not \[k, n\]"),
        (None, None, "pass one of them"),
        (W, (32, 8), "quantized has"),
    ],
)
def test_shapes_that_do_not_fit_raise_with_both(w, stored, message):
    quantized = None if stored is None else tcfp_jax.split(jnp.ones(stored))
    with refused(message):
        tcfp_jax.matmul(X, w, recipe="tcfp12", quantized=quantized)


def test_a_form_of_blocks_without_blocks_raises():
    for call in (
        lambda: tcfp_jax.split(W, tile="vector"),
        lambda: tcfp_jax.quantize(W, tile="square"),
    ):
        with refused("block=None; pass block=32"):
            call()


def test_state_of_another_recipe_raises():
    with refused("same recipe"):
        tcfp_jax.matmul(X, W, recipe="tcfp12", quantized=tcfp_jax.quantize(W))
    # a product of vectors reads both
    with refused("in one orientation; build"):
        tcfp_jax.matmul(X, W, recipe="mxfp8", quantized=tcfp_jax.quantize(W, block=32))
    with refused("dequantize it"):
        tcfp_jax.matmul(X, W, recipe="bf16", quantized=tcfp_jax.quantize(W))
    with refused("or use recipe.NAME, .* multiplies both halves in BF16"):
        tcfp_jax.matmul(X, W, recipe="bf16", quantized=tcfp_jax.split(W))
    with refused("pass one of them"):
        tcfp_jax.matmul(
            X, tcfp_jax.split(W), recipe="tcfp12", quantized=tcfp_jax.split(W)
        )


@parametrize("recipe", QUANTIZING)
@parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf], ids=str)
@parametrize("where", ["x", "w", "g"])
def test_non_finite_values_stay_loud(recipe, bad, where):
    arguments = {"x": X, "w": W, "g": G}
    arguments[where] = arguments[where].at[3, 5].set(bad)
    y, dx, dw = run(recipe, **arguments)
    poisoned = {"x": (y, dw), "w": (y, dx), "g": (dx, dw)}[where]
    for result in poisoned:
        # A BF16 product: inf stays inf, in the row or column of the bad token
        if result is dw and recipe == "tcfp12":
            assert not jnp.isfinite(result).all()
        else:
            assert jnp.isnan(result).all()


def test_non_finite_values_in_quantize_and_split():
    for bad in (jnp.nan, jnp.inf, -jnp.inf):
        x = X.at[0, 0].set(bad)
        for stored in (
            tcfp_jax.quantize(x),
            tcfp_jax.quantize(x, scale="float32"),
            tcfp_jax.split(x),
        ):
            assert jnp.isnan(stored.dequantize()).all()
        stale = tcfp_jax.split(x, amax=4.0).dequantize()
        assert jnp.isnan(stale[0, 0])
        assert jnp.isfinite(stale).sum() == x.size - 1


def test_apply_if_finite_recovers_the_state():
    params = {"kernel": W}
    tx = optax.apply_if_finite(
        optax.chain(optax.sgd(0.1), tcfp_jax.error_feedback("tcfp12")), 5
    )
    state = tx.init(params)
    good = {"kernel": jnp.ones_like(W)}
    _, state = tx.update(good, state, params)
    before = tcfp_jax.layer_state(state)["kernel"].dequantize()
    updates, after = tx.update(
        {"kernel": good["kernel"].at[0, 0].set(jnp.nan)}, state, params
    )
    assert jnp.array_equal(updates["kernel"], jnp.zeros_like(W))
    assert jnp.array_equal(tcfp_jax.layer_state(after)["kernel"].dequantize(), before)
    _, recovered = tx.update(good, after, params)
    assert jnp.isfinite(tcfp_jax.layer_state(recovered)["kernel"].dequantize()).all()


@parametrize("recipe", QUANTIZING)
def test_zero_amax(recipe):
    for x, w in ((jnp.zeros_like(X), W), (X, jnp.zeros_like(W))):
        y, dx, dw = run(recipe, x, w)
        assert jnp.array_equal(y, jnp.zeros_like(y))
        assert jnp.isfinite(dx).all()
        assert jnp.isfinite(dw).all()


@parametrize("recipe", QUANTIZING)
@parametrize("size", [1e-45, 1e-40, 1e-38, 1e-30, 1e30, 3e38], ids=str)
def test_extreme_magnitudes(recipe, size):
    x = jnp.where(X > 0, jnp.float32(size), -jnp.float32(size))
    stored = tcfp_jax.split(x)
    assert jnp.isfinite(stored.dequantize()).all()
    assert jnp.isfinite(tcfp_jax.quantize(x).dequantize()).all()
    if size > 2e-38:
        assert_allclose(stored.dequantize(), x, rtol=2.0**-7)
    y = tcfp_jax.matmul(x, W * 1e-3, recipe=recipe)
    assert not jnp.isnan(y).any()


@parametrize("recipe", RECIPES)
def test_float16(recipe):
    results = run(recipe, X.astype(jnp.float16), W.astype(jnp.float16))
    assert all(
        result.dtype == jnp.float16 and jnp.isfinite(result).all() for result in results
    )


@slow_except("bf16", "tcfp12_fast")
@parametrize("recipe", RECIPES)
def test_float64(recipe):
    with jax.enable_x64(True):
        results = run(recipe, X.astype(jnp.float64), W.astype(jnp.float64))
        for result, single in zip(results, run(recipe), strict=True):
            assert result.dtype == jnp.float64
            assert_allclose(result, single, rtol=1e-5, atol=1e-5)
        # Beyond float32 is beyond the arithmetic: it overflows to inf and from there to
        # NaN.
        assert jnp.isnan(
            tcfp_jax.quantize(X.astype(jnp.float64) * 1e300).dequantize()
        ).all()


@parametrize(
    "call",
    [
        tcfp_jax.quantize,
        tcfp_jax.split,
        tcfp_jax.quantize_tcfp12,
        tcfp_jax.fake_quantize,
        lambda w: tcfp_jax.store({"kernel": w}, "tcfp12_single", key=jax.random.key(0)),
    ],
    ids=["quantize", "split", "quantize_tcfp12", "fake_quantize", "store"],
)
def test_finite_weights_are_no_nan_for_jax_debug_nans(call):
    """Outside jit the option reads every result, also one that a choice drops."""
    with jax.debug_nans(True):
        jax.block_until_ready(call(W))
        with refused("nan", FloatingPointError):
            jax.block_until_ready(call(W.at[1, 2].set(jnp.inf)))
