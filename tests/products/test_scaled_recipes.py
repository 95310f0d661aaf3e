"""Recipes with more scales than one a tensor, and the one that splits x: values,
gradients, state, bad input.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tcfp_jax
from pallas_kernels.operands import Block, Row, Tensor
from pallas_kernels.quantize.api import quantize
from tcfp_jax.linen import TCFPDense
from tcfp_jax.products.fp8_weights import quantize_operand
from tcfp_jax.weights.quantization import quantize_weight

RECIPES = {
    "blockwise": tcfp_jax.recipe("blockwise", block=32),
    "tcfp12_blockwise": tcfp_jax.recipe("tcfp12_blockwise", block=32),
    "mxfp8": tcfp_jax.recipe("mxfp8"),
    "rowwise": tcfp_jax.recipe("rowwise"),
    "rowwise_float32": tcfp_jax.recipe(
        "rowwise", scale="float32", gradient="float8_e5m2", wgrad="bf16"
    ),
}
M, K, N = 40, 64, 48  # a ragged block in each
KEYS, RNG = jax.random.split(jax.random.key(0), 3), np.random.default_rng(0)
# Rows and columns of other sizes, which one scale a tensor would serve badly.
X = jnp.asarray(
    RNG.standard_normal((M, K)) * np.exp(2 * RNG.standard_normal((M, 1))), jnp.float32
)
W = jnp.asarray(RNG.standard_normal((K, N)) * 0.1, jnp.float32)
G = jnp.asarray(
    RNG.standard_normal((M, N)) * np.exp2(np.linspace(-12.0, 12.0, N)), jnp.float32
)


def every_recipe(test):
    return pytest.mark.parametrize("name", RECIPES)(test)


def snr_db(got, exact):
    got, exact = (np.asarray(v, np.float64) for v in (got, exact))
    return 10 * np.log10(np.sum(exact**2) / np.sum((got - exact) ** 2))


def round_to(values, dtype):
    """Values as NumPy's float8 has them, in float64."""
    return np.asarray(jnp.asarray(values, jnp.float32).astype(dtype), np.float64)


def in_numpy(x, dtype, recipe, axis, square=False):
    """What a product that contracts `axis` sees of x: the definition, by NumPy, in
    float64.
    """
    x = np.asarray(x, np.float64)
    largest = float(jnp.finfo(dtype).max)
    if isinstance(recipe.scaling, Row):
        amax = np.max(np.abs(x), axis=axis, keepdims=True)
    else:
        b = recipe.scaling.size
        sizes = [-(-size // b) for size in x.shape]
        tall = np.pad(
            x,
            [(0, count * b - size) for count, size in zip(sizes, x.shape, strict=True)],
        )
        blocks = np.abs(tall).reshape(sizes[0], b, sizes[1], b)
        if square:
            amax = np.max(blocks, axis=(1, 3))[:, None, :, None]
        else:
            amax = np.max(blocks, axis=3 if axis == 1 else 1, keepdims=True)
        amax = np.broadcast_to(amax, blocks.shape).reshape(tall.shape)[
            : x.shape[0], : x.shape[1]
        ]
    if recipe.scaling.scale == "float32":
        multiplier = (largest / np.maximum(amax, 1e-12)).astype(np.float32)
        scale = (np.float32(1) / multiplier).astype(np.float64)
        return round_to((x.astype(np.float32) * multiplier), dtype) * scale
    scale = np.exp2(np.ceil(np.log2(amax / largest)))
    return round_to(x / scale, dtype) * scale


def assert_product(got, a, b):
    """|got - a @ b| <= 4 eps sqrt(k) (|a| @ |b|), and the rounding of the scales and of
    the output.
    """
    bound = (4 * np.sqrt(a.shape[1]) + 4) * 2.0**-23 * (np.abs(a) @ np.abs(b)) + 1e-30
    assert np.all(np.abs(np.asarray(got, np.float64) - a @ b) <= bound)


@functools.cache
def results(name, **options):
    return jax.jit(functools.partial(value_and_gradients, RECIPES[name]))(X, W, G)


def assert_close(got, expected):
    """The same but for the order of float32 sums."""
    np.testing.assert_allclose(
        got, expected, rtol=1e-5, atol=1e-6 * float(jnp.max(jnp.abs(expected)))
    )


def value_and_gradients(recipe, x, w, g, **options):
    y, vjp = jax.vjp(lambda x, w: tcfp_jax.matmul(x, w, recipe=recipe, **options), x, w)
    return (y, *vjp(g))


@pytest.mark.slow_except("tcfp12_blockwise", "rowwise")
@every_recipe
def test_products_are_those_of_operands_quantized_along_what_is_summed(name):
    recipe, (y, dx, dw) = RECIPES[name], results(name)
    square = isinstance(recipe.scaling, Block) and recipe.scaling.tile == "square"
    forward, backward = recipe.activation, recipe.gradient

    def weight(axis):
        first = in_numpy(W, "float8_e4m3fn", recipe, axis, square)
        if recipe.mode is tcfp_jax.TCFPMode.FP8:
            return first
        # The residual is rounded under the scale of the first: its unit in the last
        # place is 2**-4 or less of it.
        stored, _ = quantize_weight(W, recipe)
        both = np.asarray(stored.dequantize(), np.float64)
        assert (
            np.max(np.abs(both - np.asarray(W)))
            < np.max(np.abs(first - np.asarray(W))) / 8
        )
        return both

    assert_product(y, in_numpy(X, forward, recipe, 1), weight(0))
    assert_product(dx, in_numpy(G, backward, recipe, 1), weight(1).T)
    if recipe.wgrad != "bf16":
        assert_product(
            dw, in_numpy(X, forward, recipe, 0).T, in_numpy(G, backward, recipe, 0)
        )


@pytest.mark.slow_except("mxfp8")
@every_recipe
def test_stored_weights_and_leading_axes_give_the_same(name):
    recipe, fresh = RECIPES[name], results(name)
    stored, _ = quantize_weight(W, recipe)
    run = jax.jit(functools.partial(value_and_gradients, recipe))
    y, dx, dw = run(X.reshape(2, 4, 5, K), W, G.reshape(2, 4, 5, N), quantized=stored)
    # Quantized alike; XLA may sum a product of another shape in another order.
    for got, expected in (
        (y.reshape(M, N), fresh[0]),
        (dx.reshape(M, K), fresh[1]),
        (dw, fresh[2]),
    ):
        assert_close(got, expected)
    assert_close(
        jax.jit(lambda x: tcfp_jax.matmul(x, stored, recipe=recipe))(X), fresh[0]
    )


@pytest.mark.slow_except("tcfp12_blockwise-auto", "rowwise-explicit")
@pytest.mark.parametrize(
    "axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"]
)
@pytest.mark.parametrize("name", ["tcfp12_blockwise", "rowwise"])
def test_meshes_give_the_result_of_one_device(name, axis_type):
    if jax.device_count() < 4:
        pytest.skip(f"needs 4 devices, this process has {jax.device_count()}")
    mesh = jax.make_mesh(
        (2, 2),
        ("data", "model"),
        axis_types=(axis_type,) * 2,
        devices=jax.devices()[:4],
    )
    with jax.set_mesh(mesh):
        place = lambda a, *spec: jax.device_put(a, NamedSharding(mesh, P(*spec)))
        arguments = (
            place(X, "data", None),
            place(W, None, "model"),
            place(G, "data", "model"),
        )
        run = jax.jit(functools.partial(value_and_gradients, RECIPES[name]))
        got = run(*arguments)
    for a, b in zip(got, results(name), strict=True):
        assert_close(a, b)


@pytest.mark.slow_except("tcfp12_blockwise")
@pytest.mark.parametrize("name", ["tcfp12_blockwise", "mxfp8", "rowwise"])
def test_optimizer_steps_of_a_layer(name):
    recipe = RECIPES[name]
    layer = TCFPDense(N, recipe=recipe)
    params = layer.init(KEYS[0], X)["params"]
    tx = optax.chain(optax.sgd(1e-3), tcfp_jax.error_feedback(recipe))

    @jax.jit
    def step(params, state):
        apply = lambda p: layer.apply(
            {"params": p, "tcfp": tcfp_jax.layer_state(state)}, X
        )
        loss, grads = jax.value_and_grad(lambda p: jnp.mean(apply(p) ** 2))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state, losses = tx.init(params), []
    for _ in range(3):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    assert losses[2] < losses[1] < losses[0]
    stored = tcfp_jax.layer_state(state)["kernel"]
    assert snr_db(stored.dequantize(), params["kernel"]) > (
        55 if recipe.feedback else 28
    )


def test_error_feedback_in_blocks_finds_the_weight_in_the_long_run():
    tx = tcfp_jax.error_feedback(RECIPES["tcfp12_blockwise"])
    params, nothing = {"kernel": W}, {"kernel": jnp.zeros_like(W)}
    first = tx.init(params)

    def step(state, _):
        return (
            tx.update(nothing, state, params)[1],
            tcfp_jax.layer_state(state)["kernel"].dequantize(),
        )

    _, seen = jax.jit(lambda s: jax.lax.scan(step, s, None, length=64))(first)
    alone, mean = seen[0] - W, jnp.mean(seen, axis=0) - W
    assert float(jnp.linalg.norm(mean)) < float(jnp.linalg.norm(alone)) / 20


@pytest.mark.optimized
def test_float32_scales_are_nanochats_rule_bit_for_bit():
    draw = np.random.default_rng(0)
    sizes = [
        *np.exp2(draw.uniform(-100, 100, 40)),
        0.0,
        1e-12,
        9.9999996e-13,
        1.0000001e-12,
        1e-30,
        448.0,
        3e38,
    ]
    for dtype, largest in (("float8_e4m3fn", 448.0), ("float8_e5m2", 57344.0)):
        quantize = jax.jit(
            functools.partial(tcfp_jax.quantize, dtype=dtype, scale="float32")
        )
        for size in sizes:
            x = (draw.uniform(-1, 1, 64) * size).astype(np.float32)
            x[0] = size
            amax = np.max(np.abs(x)).astype(np.float64)
            scale = np.float32(largest / np.maximum(amax, 1e-12))
            got = quantize(x)
            assert np.asarray(got.scale) == np.float32(1) / scale
            # Subnormal float32 is zero here, and beyond the range a product is clipped,
            # as by nanochat's clamp.
            flushed = np.where(np.abs(x) < np.finfo(np.float32).tiny, 0, x)
            exact = np.clip(flushed * scale, -largest, largest)
            assert np.array_equal(
                np.asarray(got.values).view(np.uint8) & 0x7F,
                np.asarray(jnp.asarray(exact).astype(dtype)).view(np.uint8) & 0x7F,
            )


def test_tensorwise_accumulates_as_nanochat_does():
    recipe = tcfp_jax.recipe("tensorwise", scale="float32")
    formats = (recipe.activation, recipe.weight.dtype, recipe.gradient)
    assert formats == (
        "float8_e4m3fn",
        "float8_e4m3fn",
        "float8_e5m2",
    ) and recipe.scaling == Tensor("float32")
    assert (recipe.forward, recipe.dgrad, recipe.wgrad) == ("fast", "full", "full")


def test_one_large_channel_costs_the_others_nothing_in_blocks():
    """A channel of x a thousand times as large: what the products of the other channels
    lose.
    """
    x = jax.random.normal(KEYS[0], (64, 256)).at[:, 7].mul(1000.0)
    others = np.delete(np.arange(256), 7)
    whole, blocks = tcfp_jax.split(x), tcfp_jax.split(x, block=32, tile="vector")
    assert snr_db(blocks.dequantize()[:, 32:], x[:, 32:]) > 60
    assert snr_db(blocks.dequantize()[:, others], x[:, others]) > snr_db(
        whole.dequantize()[:, others], x[:, others]
    )


def test_nothing_is_written_that_the_backward_pass_does_not_read():
    def shapes(wgrad):
        recipe = tcfp_jax.recipe("blockwise", block=32, wgrad=wgrad)
        program = jax.make_jaxpr(
            lambda x, w: jax.vjp(lambda x: tcfp_jax.matmul(x, w, recipe=recipe), x)[1]
        )(X, W)
        text = str(program)
        return f"f8_e4m3fn[{K},{M}]" in text or f"float8_e4m3fn[{K},{M}]" in text

    assert shapes("full") and not shapes("bf16")
    # In bytes: a value and a 32nd of a scale once, or in both directions (with 40 rows,
    # two scales a column).
    written = {}
    for wgrad in ("bf16", "full"):
        recipe = tcfp_jax.recipe("blockwise", block=32, wgrad=wgrad)
        parts = jax.eval_shape(
            functools.partial(quantize_operand, dtype="float8_e4m3fn", recipe=recipe), X
        )
        written[wgrad] = sum(
            part.size * part.dtype.itemsize for part in jax.tree.leaves(parts)
        )
    assert written == {
        "bf16": M * K + M * K // 32,
        "full": 2 * M * K + M * K // 32 + 2 * K,
    }


@pytest.mark.parametrize(
    "call, words",
    [
        (
            lambda: tcfp_jax.quantize(X, block=48),
            "block=48 is not supported; use one of",
        ),
        (
            lambda: tcfp_jax.quantize(X, block=32, axis=2),
            r"axis=2 is out of range for x\[40, 64\]",
        ),
        (
            lambda: tcfp_jax.quantize(X, block=32, axis=0, tile="square"),
            "squares have no direction",
        ),
        (
            lambda: tcfp_jax.quantize(X, block=32, scale="float32"),
            "scale='float32' with block=32",
        ),
        (lambda: tcfp_jax.quantize(X, axis=0), "block=None"),
        (lambda: tcfp_jax.split(W, block=32, amax=1.0), "amax= scales a whole tensor"),
        (
            lambda: quantize(X, jnp.float8_e4m3fn, Row("pow3")),
            "scale='pow3' is unknown",
        ),
        (lambda: quantize(X[0, 0], jnp.float8_e4m3fn, Row()), "no rows"),
        (
            lambda: tcfp_jax.matmul(
                X,
                W,
                recipe="mxfp8",
                quantized=quantize_weight(W, RECIPES["blockwise"])[0],
            ),
            r"tile='vector'\) in both .*, but quantized is a .* tile='square'\)",
        ),
        (
            lambda: tcfp_jax.matmul(
                X, W, recipe="blockwise", quantized=tcfp_jax.quantize(W)
            ),
            (
                r"one FP8 tensor with Block\(size=128, tile='square'\) in both .*, but"
                r" quantized is a .* Tensor"
            ),
        ),
    ],
    ids=range(10),
)
def test_bad_input(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize("name", ["blockwise", "rowwise"])
def test_a_nan_stays_in_what_it_shares_a_scale_with(name):
    y = tcfp_jax.matmul(X.at[3, 40].set(jnp.nan), W, recipe=RECIPES[name])
    assert jnp.all(jnp.isnan(y[3]))
    assert_close(jnp.delete(y, 3, axis=0), jnp.delete(results(name)[0], 3, axis=0))


def test_blocks_of_a_public_array():
    square, turned = (
        tcfp_jax.quantize(W, block=32, tile="square"),
        tcfp_jax.quantize(W.T, block=32, tile="square"),
    )
    assert jnp.array_equal(
        square.dequantize().T, turned.dequantize()
    ) and square.shape == (K, N)
    along_first = tcfp_jax.quantize(W, block=32, axis=0)
    assert along_first.shape == (N, K)
    assert jnp.array_equal(
        along_first.dequantize(), tcfp_jax.quantize(W.T, block=32).dequantize()
    )
    assert snr_db(tcfp_jax.split(W, block=32).dequantize(), W) > 60


@pytest.mark.slow_except("float-33")
@pytest.mark.parametrize("k", [1, 8, 20, 32, 33])
@pytest.mark.parametrize("held", ["float", "stored"])
def test_mx_of_few_inputs(k, held):
    """Fewer inputs than a block has, or no multiple of it: values, both gradients, and
    the optimizer's weight.
    """
    x, w, g = X[:, :k], W[:k], jax.random.normal(KEYS[2], (M, N))
    tx = tcfp_jax.error_feedback("mxfp8")
    stored = (
        tcfp_jax.layer_state(tx.init({"kernel": w}))["kernel"]
        if held == "stored"
        else None
    )

    @jax.jit
    def step(x, w):
        y, back = jax.vjp(
            lambda x, w: tcfp_jax.matmul(x, w, recipe="mxfp8", quantized=stored), x, w
        )
        return (y, *back(g))

    for found, (a, b) in zip(step(x, w), ((x, w), (g, w.T), (x.T, g)), strict=True):
        # two roundings of 1/16
        assert jnp.all(
            jnp.abs(found - a @ b) <= 0.14 * (jnp.abs(a) @ jnp.abs(b)) + 1e-6
        )
