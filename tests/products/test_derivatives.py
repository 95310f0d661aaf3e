"""Derivatives of `matmul`: those that do not exist raise, those in BF16 are exact."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_allclose, assert_array_equal

import tcfp_jax
from tcfp_jax import formats, recipes
from tcfp_jax.weights.quantization import quantize_weight
from tests.fp4_cases import rounded
from tests.helpers import (
    assert_near,
    mesh_of,
    normal,
    parametrize,
    refused,
    slow_except,
    stacked,
    value_and_gradients,
)

M = 24
X = normal(0, (M, 32))
W = normal(1, (32, 16)) * 0.1
FAST = tcfp_jax.recipe("tcfp12_fast")
STORED = jax.jit(lambda w: quantize_weight(w, FAST)[0])(W)
STACK = jax.jit(stacked)([STORED, STORED])
KEYLESS = [name for name in recipes.NAMES if not tcfp_jax.recipe(name).draws]
in_bf16 = partial(tcfp_jax.matmul, recipe="bf16")


def sum_of_product(*operands, recipe=FAST, **options):
    return jnp.sum(tcfp_jax.matmul(*operands, recipe=recipe, **options))


def scanned(loss):
    def step(total, stored):
        return total + loss(stored), None

    return lambda stack: lax.scan(step, jnp.float32(0), stack)[0]


def mapped(loss):
    return lambda stack: jnp.sum(jax.vmap(loss)(stack))


AROUND = {
    "plain": (lambda loss: loss, STORED),
    "jit": (jax.jit, STORED),
    "remat": (jax.checkpoint, STORED),
    "scan": (scanned, STACK),
    "vmap": (mapped, STACK),
}


OF_CODES = {
    "quantize": lambda x: tcfp_jax.quantize(x).dequantize(),
    "quantize, E5M2": lambda x: tcfp_jax.quantize(x, jnp.float8_e5m2).dequantize(),
    "quantize, blocks": lambda x: tcfp_jax.quantize(x, block=32).dequantize(),
    "split": lambda x: tcfp_jax.split(x).dequantize(),
    "split, error": lambda x: tcfp_jax.split(X, error=x).dequantize(),
    "quantize_tcfp12": lambda x: tcfp_jax.quantize_tcfp12(x).dequantize(),
    "pack": lambda x: formats.unpack(formats.pack(x, "mxfp8e4")),
    "quantize_nvfp4": lambda x: formats.quantize_nvfp4(x).outer * x,
}
IN_FP8 = [name for name in OF_CODES if name.startswith(("quantize,", "split"))]


@parametrize("name", OF_CODES)
@parametrize("around", [lambda f: f, jax.jit, jax.checkpoint], ids=["", "jit", "remat"])
def test_codes_have_no_gradient(name, around):
    rounded = around(OF_CODES[name])
    with refused(r"fake_quantize or formats\.cast", TypeError):
        jax.grad(lambda x: jnp.mean(rounded(x)))(X)


@parametrize("name", IN_FP8)
def test_fp8_values_may_be_read_behind_a_stopped_gradient(name):
    def straight(x):
        return x + lax.stop_gradient(OF_CODES[name](x) - x)

    def loss(x):
        return jnp.mean(straight(x) * X)

    assert_near(jax.grad(loss)(X), X / X.size, 1e-9)
    tangent = jax.jvp(OF_CODES[name], (X,), (X,))[1]
    assert jnp.isnan(tangent).all()


@parametrize("where", ["argument", "w"])
@parametrize("around", AROUND)
def test_a_gradient_of_a_stored_weight_raises(where, around):
    transform, argument = AROUND[around]

    def loss(stored):
        if where == "w":
            return sum_of_product(X, stored)
        return sum_of_product(X, W, quantized=stored)

    with refused("gradient with respect to a stored weight", TypeError):
        jax.grad(transform(loss))(argument)


def test_gradients_beside_a_stored_weight_cross_scan_and_remat():
    """A stored weight that is not differentiated is a constant, however it gets
    there.
    """

    def loss(x, ws):
        @jax.checkpoint
        def layer(total, one):
            w, stored = one
            return total + sum_of_product(x, w, quantized=stored), None

        return lax.scan(layer, jnp.float32(0), (ws, STACK))[0]

    dx, dws = jax.jit(jax.grad(loss, (0, 1)))(X, jnp.stack([W, W]))
    one_dx, one_dw = jax.grad(partial(sum_of_product, quantized=STORED), (0, 1))(X, W)
    assert_allclose(dx, 2 * one_dx, rtol=1e-5)
    assert_allclose(dws[0], one_dw, rtol=1e-5)


@slow_except("float-tcfp12_fast", "stored-nvfp4")
@parametrize("name", KEYLESS)
@parametrize("held", ["float", "stored"])
def test_gradients_of_a_replicated_weight_in_shard_map(name, held):
    """Devices scale their own tokens: with the same largest value everywhere, as
    without shard_map.
    """
    mesh = mesh_of(4)
    recipe = tcfp_jax.recipe(name)
    if held == "stored" and recipe.weight is None:
        pytest.skip("a BF16 recipe stores no weights")
    stored = None if held == "float" else quantize_weight(W, recipe)[0]

    def loss(x, w, stored):
        return jnp.sum(tcfp_jax.matmul(x, w, recipe=recipe, quantized=stored) ** 2)

    gradients = jax.grad(loss, (0, 1))
    x = jnp.concatenate([X[:6], -X[:6], X[:6], -X[:6]])
    everywhere = jax.shard_map(
        gradients, mesh=mesh, in_specs=(P("a"), P(), P()), out_specs=(P("a"), P())
    )
    expected = jax.jit(gradients)(x, W, stored)
    for a, b in zip(jax.jit(everywhere)(x, W, stored), expected, strict=True):
        assert_near(a, b, 1e-5 * float(jnp.abs(b).max()))


def second(recipe, outer, inner):
    """The gradient, with respect to one operand, of a penalty on the gradient with
    respect to an operand.
    """
    operands = (jnp.ones((4, 16)), jnp.ones((16, 8)))
    key = jax.random.key(0) if recipe == "nvfp4_training" else None
    loss = partial(sum_of_product, recipe=recipe, key=key)

    def penalty(*operands):
        return jnp.sum(jax.grad(loss, inner)(*operands) ** 2)

    jax.eval_shape(jax.grad(loss), *operands)
    return jax.eval_shape(jax.jit(jax.grad(penalty, outer)), *operands)


@parametrize("recipe", ["tcfp12", "blockwise", "nvfp4", "nvfp4_training", "bf16"])
@parametrize("outer, inner", [(1, 0), (0, 1)], ids=str)
def test_second_derivatives_raise_where_rounding_makes_them_zero(recipe, outer, inner):
    """Gradient penalties and Hessians were zero in silence; the codes of "nvfp4" are
    constants of exact products.
    """
    if recipe == "bf16" or (recipe == "nvfp4" and outer == 0):
        second(recipe, outer, inner)
        return
    with refused("second derivative", TypeError):
        second(recipe, outer, inner)


def test_forward_mode_says_to_use_reverse_mode():
    product = partial(tcfp_jax.matmul, w=W, recipe="tcfp12")
    use = r"forward-mode differentiation .* use jax\.grad, jax\.vjp or jax\.jacrev"
    with refused(use, TypeError):
        jax.jvp(product, (X,), (X,))
    converted = tcfp_jax.transform(
        lambda params: X @ params["w"], "tensorwise", include=("linear", "small")
    )
    with refused(use, TypeError):
        jax.jvp(converted, ({"w": W},), ({"w": W},))
    with refused("forward-mode", TypeError):  # JAX's own message
        jax.jvp(jax.jit(product), (X,), (X,))


# In BF16
# --------------------------------------------------------------------------------------

SMALL_X = normal(0, (2, 4, 16))
SMALL_W = normal(1, (16, 8))
STACKED_W = normal(2, (3, 16, 8))


@parametrize("dtype", ["float32", "bfloat16"])
@parametrize("wrap", [partial, jax.jit, jax.checkpoint, jax.vmap])
def test_bf16_has_derivatives_in_forward_mode(wrap, dtype):
    x = SMALL_X.astype(dtype)
    w = SMALL_W.astype(dtype)
    w = jnp.stack([w, 2 * w]) if wrap is jax.vmap else w
    product = wrap(in_bf16)
    y, tangent = jax.jvp(product, (x, w), (2 * x, -w))
    assert tangent.dtype == y.dtype == dtype
    # Factors that are powers of two round nothing: the tangent is 2 y - y.
    assert_array_equal(y, product(x, w))
    assert_allclose(np.float32(tangent), np.float32(y), rtol=2e-2, atol=2e-2)
    only_w = jax.jvp(partial(product, x), (w,), (4 * w,))[1]
    assert_array_equal(only_w, 4 * y)


def test_a_hessian_in_bf16_is_the_same_in_every_mode():
    def loss(w):
        def step(x, _):
            return jnp.tanh(in_bf16(in_bf16(x, w), w.T)), None

        return jnp.sum(lax.scan(step, SMALL_X[0, :, :3], length=2)[0])

    w = SMALL_W[:3, :2]
    wanted = jax.jit(jax.jacrev(jax.jacrev(loss)))(w)
    atol = 2e-2 * float(jnp.max(jnp.abs(wanted)))
    modes = [(jax.jacfwd, jax.jacrev), (jax.jacfwd, jax.jacfwd)]
    for outer, inner in [*modes, (jax.jacrev, jax.jacfwd)]:
        assert_near(jax.jit(outer(inner(loss)))(w), wanted, atol)


@parametrize("stacked", ["x", "w", "both"])
@parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_in_bf16_are_products_of_bf16_operands(stacked, dtype):
    """Also under vmap, whose shared operand has the sum; in the dtype of the operand,
    from float32 sums.
    """
    x = SMALL_X.astype(dtype)
    x = jnp.stack([x, x[::-1], -x]) if stacked != "w" else x
    w = (STACKED_W if stacked != "x" else SMALL_W).astype(dtype)
    in_axes = {"x": (0, None), "w": (None, 0), "both": (0, 0)}[stacked]
    product = jax.vmap(in_bf16, in_axes)
    g = jnp.cos(jnp.float32(product(x, w)))
    _, *found = value_and_gradients(product, x, w, g)
    g = rounded(g.astype(dtype))
    of_x = "sbmk" if stacked != "w" else "bmk"
    of_w = "skn" if stacked != "x" else "kn"
    dx = np.einsum(f"sbmn,{of_w}->{of_x}", g, rounded(w))
    dw = np.einsum(f"{of_x},sbmn->{of_w}", rounded(x), g)
    tolerance = 4 * float(jnp.finfo(dtype).eps)
    for got, exact in zip(found, (dx, dw), strict=True):
        assert got.dtype == dtype
        atol = tolerance * np.abs(exact).max()
        assert_allclose(np.float32(got), exact, rtol=tolerance, atol=atol)
