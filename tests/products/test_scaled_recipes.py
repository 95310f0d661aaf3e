"""Recipes with more scales than one a tensor, and the one that splits x: values,
gradients, state, bad input.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from numpy.testing import assert_allclose

import tcfp_jax
from pallas_kernels.operands import Block, Row, Tensor
from pallas_kernels.quantize.api import quantize
from tcfp_jax.linen import TCFPDense
from tcfp_jax.products.fp8_weights import quantize_operand
from tcfp_jax.weights.quantization import quantize_weight
from tests.helpers import (
    decibels,
    mesh_of,
    normal,
    parametrize,
    putting,
    refused,
    same_bits,
    slow_except,
    value_and_gradients,
)

in_rows = partial(tcfp_jax.recipe, "rowwise")
RECIPES = {
    "blockwise": tcfp_jax.recipe("blockwise", block=32),
    "tcfp12_blockwise": tcfp_jax.recipe("tcfp12_blockwise", block=32),
    "mxfp8": tcfp_jax.recipe("mxfp8"),
    "rowwise": in_rows(),
    "rowwise_float32": in_rows(scale="float32", gradient="float8_e5m2", wgrad="bf16"),
}
M = 40  # a ragged block in each
K = 64
N = 48
RNG = np.random.default_rng(0)
# Rows and columns of other sizes, which one scale a tensor would serve badly.
OF_ROWS = np.exp(2 * RNG.standard_normal((M, 1)))
X = jnp.float32(RNG.standard_normal((M, K)) * OF_ROWS)
W = jnp.float32(RNG.standard_normal((K, N)) * 0.1)
G = jnp.float32(RNG.standard_normal((M, N)) * np.exp2(np.linspace(-12.0, 12.0, N)))
every_recipe = parametrize("name", RECIPES)


def round_to(values, dtype):
    """Values as NumPy's float8 has them, in float64."""
    return np.float64(jnp.float32(values).astype(dtype))


def largest_of_blocks(x, size, axis, square):
    """The largest magnitude of the block of each value."""
    rows, columns = (-(-length // size) for length in x.shape)
    tall = np.zeros((rows * size, columns * size))
    tall[: x.shape[0], : x.shape[1]] = np.abs(x)
    blocks = tall.reshape(rows, size, columns, size)
    along = (1, 3) if square else 2 * axis + 1
    amax = np.broadcast_to(np.max(blocks, along, keepdims=True), blocks.shape)
    return amax.reshape(tall.shape)[: x.shape[0], : x.shape[1]]


def in_numpy(x, dtype, recipe, axis, square=False):
    """The values that a product that contracts `axis` reads of x: the definition, by
    NumPy, in float64.
    """
    x = np.float64(x)
    largest = float(jnp.finfo(dtype).max)
    if isinstance(recipe.scaling, Row):
        amax = np.max(np.abs(x), axis=axis, keepdims=True)
    else:
        amax = largest_of_blocks(x, recipe.scaling.size, axis, square)
    if recipe.scaling.scale == "float32":
        multiplier = np.float32(largest / np.maximum(amax, 1e-12))
        scale = np.float64(np.float32(1) / multiplier)
        return round_to(np.float32(x) * multiplier, dtype) * scale
    scale = np.exp2(np.ceil(np.log2(amax / largest)))
    return round_to(x / scale, dtype) * scale


def assert_product(got, a, b):
    """|got - a @ b| <= 4 eps sqrt(k) (|a| @ |b|), and the rounding of the scales and of
    the output.
    """
    bound = (4 * np.sqrt(a.shape[1]) + 4) * 2.0**-23 * (np.abs(a) @ np.abs(b)) + 1e-30
    assert np.all(np.abs(np.float64(got) - a @ b) <= bound)


def run(name, x, w, g, **options):
    product = partial(tcfp_jax.matmul, recipe=RECIPES[name])
    return value_and_gradients(product, x, w, g, **options)


@cache
def results(name):
    return jax.jit(partial(run, name))(X, W, G)


def assert_close(got, expected):
    """The same but for the order of float32 sums."""
    for a, b in zip(got, expected, strict=True):
        assert_allclose(a, b, rtol=1e-5, atol=1e-6 * float(jnp.max(jnp.abs(b))))


@slow_except("tcfp12_blockwise", "rowwise")
@every_recipe
def test_operands_are_quantized_along_what_is_summed(name):
    recipe = RECIPES[name]
    y, dx, dw = results(name)
    square = isinstance(recipe.scaling, Block) and recipe.scaling.tile == "square"

    def weight(axis):
        first = in_numpy(W, "float8_e4m3fn", recipe, axis, square)
        if recipe.mode is tcfp_jax.TCFPMode.FP8:
            return first
        # The residual is rounded under the scale of the first: its unit in the last
        # place is 2**-4 or less of it.
        stored, _ = quantize_weight(W, recipe)
        both = np.float64(stored.dequantize())
        assert np.max(np.abs(both - W)) < np.max(np.abs(first - W)) / 8
        return both

    def of_x(axis):
        return in_numpy(X, recipe.activation, recipe, axis)

    def of_g(axis):
        return in_numpy(G, recipe.gradient, recipe, axis)

    assert_product(y, of_x(1), weight(0))
    assert_product(dx, of_g(1), weight(1).T)
    if recipe.wgrad != "bf16":
        assert_product(dw, of_x(0).T, of_g(0))


@slow_except("mxfp8")
@every_recipe
def test_stored_weights_and_leading_axes_give_the_same(name):
    recipe = RECIPES[name]
    fresh = results(name)
    stored, _ = quantize_weight(W, recipe)
    x = X.reshape(2, 4, 5, K)
    given = (x, W, G.reshape(2, 4, 5, N))
    y, dx, dw = jax.jit(partial(run, name))(*given, quantized=stored)
    # Quantized alike; XLA may sum a product of another shape in another order.
    assert_close((y.reshape(M, N), dx.reshape(M, K), dw), fresh)
    alone = jax.jit(lambda x: tcfp_jax.matmul(x, stored, recipe=recipe))(X)
    assert_close([alone], fresh[:1])


@slow_except("tcfp12_blockwise-auto", "rowwise-explicit")
@parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@parametrize("name", ["tcfp12_blockwise", "rowwise"])
def test_meshes_give_the_result_of_one_device(name, axis_type):
    mesh = mesh_of(2, 2, axis_type=axis_type)
    put = putting(mesh)
    arguments = (put(X, "a", None), put(W, None, "b"), put(G, "a", "b"))
    with jax.set_mesh(mesh):
        got = jax.jit(partial(run, name))(*arguments)
    assert_close(got, results(name))


@slow_except("tcfp12_blockwise")
@parametrize("name", ["tcfp12_blockwise", "mxfp8", "rowwise"])
def test_optimizer_steps_of_a_layer(name):
    recipe = RECIPES[name]
    layer = TCFPDense(N, recipe=recipe)
    params = layer.init(jax.random.key(0), X)["params"]
    tx = optax.chain(optax.sgd(1e-3), tcfp_jax.error_feedback(recipe))

    @jax.jit
    def step(params, state):
        def loss(params):
            variables = {"params": params, "tcfp": tcfp_jax.layer_state(state)}
            return jnp.mean(layer.apply(variables, X) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    state = tx.init(params)
    losses = []
    for _ in range(3):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    assert losses[2] < losses[1] < losses[0]
    stored = tcfp_jax.layer_state(state)["kernel"]
    least = 55 if recipe.feedback else 28
    assert decibels(params["kernel"], stored.dequantize()) > least


def test_error_feedback_in_blocks_finds_the_weight():
    tx = tcfp_jax.error_feedback(RECIPES["tcfp12_blockwise"])
    params = {"kernel": W}
    nothing = {"kernel": jnp.zeros_like(W)}

    def step(state, _):
        seen = tcfp_jax.layer_state(state)["kernel"].dequantize()
        return tx.update(nothing, state, params)[1], seen

    _, seen = jax.jit(lambda s: jax.lax.scan(step, s, None, 64))(tx.init(params))
    alone = float(jnp.linalg.norm(seen[0] - W))
    assert float(jnp.linalg.norm(jnp.mean(seen, axis=0) - W)) < alone / 20


SIZES = [0.0, 1e-12, 9.9999996e-13, 1.0000001e-12, 1e-30, 448.0, 3e38]


@pytest.mark.optimized
@parametrize("dtype, largest", [("float8_e4m3fn", 448.0), ("float8_e5m2", 57344.0)])
def test_float32_scales_are_nanochats_rule_bit_for_bit(dtype, largest):
    draw = np.random.default_rng(0)
    quantize = jax.jit(partial(tcfp_jax.quantize, dtype=dtype, scale="float32"))
    for size in [*np.exp2(draw.uniform(-100, 100, 40)), *SIZES]:
        x = np.float32(draw.uniform(-1, 1, 64) * size)
        x[0] = size
        amax = np.float64(np.max(np.abs(x)))
        scale = np.float32(largest / np.maximum(amax, 1e-12))
        got = quantize(x)
        assert np.asarray(got.scale) == np.float32(1) / scale
        # Subnormal float32 is zero here, and beyond the range a product is clipped, as
        # by nanochat's clamp.
        flushed = np.where(np.abs(x) < np.finfo(np.float32).tiny, 0, x)
        exact = jnp.asarray(np.clip(flushed * scale, -largest, largest)).astype(dtype)
        codes, expected = (np.asarray(v).view(np.uint8) for v in (got.values, exact))
        assert np.array_equal(codes & 0x7F, expected & 0x7F)


def test_tensorwise_accumulates_as_nanochat_does():
    recipe = tcfp_jax.recipe("tensorwise", scale="float32")
    assert recipe.activation == recipe.weight.dtype == "float8_e4m3fn"
    assert recipe.gradient == "float8_e5m2"
    assert recipe.scaling == Tensor("float32")
    assert (recipe.forward, recipe.dgrad, recipe.wgrad) == ("fast", "full", "full")


def test_in_blocks_one_large_channel_costs_the_others_nothing():
    """A channel of x a thousand times as large: what the products of the other channels
    lose.
    """
    x = normal(0, (64, 256)).at[:, 7].mul(1000.0)

    def left(columns, **options):
        found = tcfp_jax.split(x, **options).dequantize()
        return decibels(x[:, columns], found[:, columns])

    others = np.delete(np.arange(256), 7)
    in_blocks = partial(left, block=32, tile="vector")
    assert in_blocks(slice(32, None)) > 60
    assert in_blocks(others) > left(others)


# In bytes: a value and a 32nd of a scale once, or in both directions (with 40 rows, two
# scales a column).
ONCE = M * K + M * K // 32


@parametrize("wgrad, written", [("bf16", ONCE), ("full", ONCE + M * K + 2 * K)])
def test_only_what_the_backward_pass_reads_is_written(wgrad, written):
    recipe = tcfp_jax.recipe("blockwise", block=32, wgrad=wgrad)

    def pull(x, w):
        return jax.vjp(lambda x: tcfp_jax.matmul(x, w, recipe=recipe), x)[1]

    program = str(jax.make_jaxpr(pull)(X, W))
    assert (f"8_e4m3fn[{K},{M}]" in program) == (wgrad == "full")
    quantized = partial(quantize_operand, dtype="float8_e4m3fn", recipe=recipe)
    parts = jax.tree.leaves(jax.eval_shape(quantized, X))
    assert sum(part.size * part.dtype.itemsize for part in parts) == written


in_blocks = partial(tcfp_jax.quantize, X, block=32)
in_e4m3 = partial(quantize, dtype=jnp.float8_e4m3fn)
ONE_TENSOR = (
    r"one FP8 tensor with Block\(size=128, tile='square'\) in both .*, but"
    r" quantized is a .* Tensor"
)


def in_vectors():
    stored, _ = quantize_weight(W, RECIPES["blockwise"])
    return tcfp_jax.matmul(X, W, recipe="mxfp8", quantized=stored)


def in_squares():
    return tcfp_jax.matmul(X, W, recipe="blockwise", quantized=tcfp_jax.quantize(W))


@parametrize(
    "call, words",
    [
        (partial(in_blocks, block=48), "block=48 is not supported; use one of"),
        (partial(in_blocks, axis=2), r"axis=2 is out of range for x\[40, 64\]"),
        (partial(in_blocks, axis=0, tile="square"), "squares have no direction"),
        (partial(in_blocks, scale="float32"), "scale='float32' with block=32"),
        (partial(in_blocks, block=None, axis=0), "block=None"),
        (partial(tcfp_jax.split, W, block=32, amax=1.0), "amax= scales a whole tensor"),
        (partial(Row, "pow3"), "scale='pow3' is unknown"),
        (partial(in_e4m3, X[0, 0], scaling=Row()), "no rows"),
        (
            in_vectors,
            r"tile='vector'\) in both .*, but quantized is a .* tile='square'\)",
        ),
        (in_squares, ONE_TENSOR),
    ],
    ids=range(10),
)
def test_bad_input(call, words):
    with refused(words):
        call()


ENDS = ["bf16", "tensorwise", "rowwise", "blockwise", "nvfp4_training"]


@parametrize("name", ENDS)
@parametrize("of_x, of_w", [(115, -20), (-20, 115), (100, 0)])
def test_large_operands_have_the_product_of_small_ones(name, of_x, of_w):
    small = tcfp_jax.matmul(X, W, recipe=name)
    # X has values of more than 2**11.
    large = tcfp_jax.matmul(X * 2.0**of_x, W * 2.0**of_w, recipe=name)
    assert_allclose(large, small * 2.0 ** (of_x + of_w), rtol=0.03, atol=0)


@parametrize("name", ["tensorwise", "tcfp12"])
def test_one_scale_needs_a_product_of_magnitudes_of_2_to_the_minus_108(name):
    def product(exponent):
        one = jnp.full((32, 32), 2.0**exponent)
        return np.unique(tcfp_jax.matmul(one, one, recipe=name))

    assert_allclose(product(-54), 32 * 2.0**-108)
    assert product(-60) == 0


@parametrize("name", ["blockwise", "rowwise"])
def test_a_nan_stays_in_what_it_shares_a_scale_with(name):
    y = tcfp_jax.matmul(X.at[3, 40].set(jnp.nan), W, recipe=RECIPES[name])
    assert jnp.all(jnp.isnan(y[3]))
    others = np.delete(np.arange(M), 3)
    assert_close([y[others]], [results(name)[0][others]])


def test_blocks_of_a_public_array():
    in_blocks = partial(tcfp_jax.quantize, block=32)
    square = in_blocks(W, tile="square")
    assert square.shape == (K, N)
    turned = in_blocks(W.T, tile="square")
    assert same_bits(square.dequantize().T, turned.dequantize())
    along_first = in_blocks(W, axis=0)
    assert along_first.shape == (N, K)
    assert same_bits(along_first.dequantize(), in_blocks(W.T).dequantize())
    assert decibels(W, tcfp_jax.split(W, block=32).dequantize()) > 60


@slow_except("float-33")
@parametrize("k", [1, 8, 20, 32, 33])
@parametrize("held", ["float", "stored"])
def test_mx_of_few_inputs(k, held):
    """Fewer inputs than a block has, or no multiple of it: values, both gradients, and
    the optimizer's weight.
    """
    x = X[:, :k]
    w = W[:k]
    g = normal(2, (M, N))
    state = tcfp_jax.error_feedback("mxfp8").init({"kernel": w})
    stored = tcfp_jax.layer_state(state)["kernel"] if held == "stored" else None
    found = jax.jit(partial(run, "mxfp8"))(x, w, g, quantized=stored)
    for product, (a, b) in zip(found, ((x, w), (g, w.T), (x.T, g)), strict=True):
        # two roundings of 1/16
        bound = 0.14 * (jnp.abs(a) @ jnp.abs(b)) + 1e-6
        assert jnp.all(jnp.abs(product - a @ b) <= bound)
