"""`grouped_matmul`: values and gradients against float64 loops over the groups, stored
weights, state and bad input.
"""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tcfp_jax
from pallas_kernels.operands import Operand
from tcfp_jax import monitor
from tcfp_jax.products import grouped_matmul
from tcfp_jax.products.fp8_weights import quantize_operand
from tcfp_jax.weights.layout import Layout, Weight
from tcfp_jax.weights.quantization import quantize_weight
from tests import grouped
from tests.helpers import float64_of, mesh_of, store_at_once

M, K, N, E = 37, 24, 20, 4
SIZES = jnp.array([9, 0, 17, 5])
RNG = np.random.default_rng(0)
X = jnp.asarray(
    RNG.standard_normal((M, K)) * np.exp(RNG.standard_normal((M, 1))), jnp.float32
)
W = jnp.asarray(
    RNG.standard_normal((E, K, N)) * np.array([0.1, 1.0, 3.0, 0.01])[:, None, None],
    jnp.float32,
)
G = jnp.asarray(RNG.standard_normal((M, N)), jnp.float32)
RECIPES = [
    "bf16",
    "tensorwise",
    "tcfp12",
    "tcfp12_fast",
    "tcfp12_single",
    "rowwise",
    "blockwise",
    "tcfp12_blockwise",
]
ROUNDING = 2.0**-19  # of sums in float32, per unit of sums of magnitudes
rows_by_groups = lambda x, w: grouped.by_groups(x, w.swapaxes(1, 2), SIZES)
within_groups = lambda x, g: grouped.within_groups(x.T, g.T, SIZES)
operand_of = jax.jit(quantize_operand, static_argnums=(1, 2))
stored_of = jax.jit(
    jax.vmap(lambda w, recipe: quantize_weight(w, recipe)[0], (0, None)),
    static_argnums=1,
)


@functools.partial(jax.jit, static_argnames="recipe")
def results(x, w, sizes, recipe, quantized=None):
    y, back = jax.vjp(
        lambda x, w: grouped_matmul(x, w, sizes, recipe=recipe, quantized=quantized),
        x,
        w,
    )
    return y, *back(G)


def as_read(recipe):
    """X, W and G in float64 as forward, dgrad and wgrad read them."""
    narrow = lambda x: np.asarray(x.astype(jnp.bfloat16), np.float64)
    of_x, of_g = (
        operand_of(X, recipe.activation, recipe),
        operand_of(G, recipe.gradient, recipe),
    )
    rows = lambda how, made, x: narrow(x) if how == "bf16" else float64_of(made.rows)
    columns = lambda made, x: (
        narrow(x) if recipe.wgrad == "bf16" else float64_of(made.columns).T
    )
    w = w_back = narrow(W)
    if recipe.stored is not None:
        stored = stored_of(W, recipe)
        w = float64_of(stored.for_forward(recipe.stored.forward)).swapaxes(1, 2)
        w_back = float64_of(stored.for_dgrad(recipe.stored.dgrad))
    forward, dgrad = rows(recipe.forward, of_x, X), rows(recipe.dgrad, of_g, G)
    return forward, w, dgrad, w_back.swapaxes(1, 2), columns(of_x, X), columns(of_g, G)


@pytest.mark.slow_except("bf16", "tcfp12_fast", "tcfp12_blockwise")
@pytest.mark.parametrize("name", RECIPES)
def test_values_and_gradients_are_those_of_the_rounded_operands(name):
    recipe = tcfp_jax.recipe(name)
    x, w, g, w_back, x_columns, g_columns = as_read(recipe)
    pairs = [
        (rows_by_groups, x, w),
        (rows_by_groups, g, w_back),
        (within_groups, x_columns, g_columns),
    ]
    for found, (by_groups, a, b) in zip(
        results(X, W, SIZES, recipe), pairs, strict=True
    ):
        assert found.dtype == jnp.float32
        bound = ROUNDING * by_groups(np.abs(a), np.abs(b))
        assert np.all(np.abs(np.asarray(found, np.float64) - by_groups(a, b)) <= bound)
        assert np.any(np.asarray(found))


@pytest.mark.parametrize("name", ["bf16", "tcfp12_fast"])
def test_sizes_that_are_no_sizes_make_nan(name):
    for sizes in ([30, 0, 7, 1], [-1, 9, 9, 9]):
        assert all(
            np.isnan(one).all()
            for one in results(X, W, jnp.array(sizes), tcfp_jax.recipe(name))
        )


def test_stored_weights_multiply_alike_and_take_gradients():
    recipe = tcfp_jax.recipe("tcfp12_single")
    y, dx, dw = results(X, W, SIZES, recipe)
    again = results(X, W, SIZES, recipe, stored_of(W, recipe))
    for one, other in zip((y, dx, dw), again, strict=True):
        np.testing.assert_array_equal(one, other)
    weight = Weight(recipe, Layout((1,), (2,), (0,)))
    params = store_at_once({"w": W}, {"w": weight}, key=jax.random.key(1))
    loss = lambda p: jnp.sum(grouped_matmul(X, p["w"], SIZES, recipe=recipe) * G)
    gradient = jax.jit(tcfp_jax.grad(loss))(params)["w"]
    # The gradient does not read the weight, so it has the same bits.
    np.testing.assert_array_equal(gradient, dw)
    with pytest.raises(TypeError, match=re.escape("tcfp_jax.value_and_grad")):
        jax.grad(
            lambda w: jnp.sum(grouped_matmul(X, w, SIZES, recipe=recipe)),
            allow_int=True,
        )(params["w"])


def test_a_transposed_parameter_and_the_result_of_split():
    weight = Weight(tcfp_jax.recipe("tcfp12_fast"), Layout((2,), (1,), (0,)))
    params = store_at_once(
        {"w": W.swapaxes(1, 2)}, {"w": weight}, key=jax.random.key(1)
    )
    multiply = jax.jit(lambda w: grouped_matmul(X, w, SIZES, recipe="tcfp12_fast"))
    got, want = multiply(params["w"]), multiply(jax.jit(jax.vmap(tcfp_jax.split))(W))
    # rounded stochastically
    assert np.linalg.norm(got - want) <= 2**-7 * np.linalg.norm(want)
    with pytest.raises(ValueError, match="needs its own"):
        grouped_matmul(X, tcfp_jax.split(W), SIZES, recipe="tcfp12_fast")


def test_vmap_is_a_loop():
    for recipe, axes in (("tcfp12_fast", (0, None, 0)), ("bf16", (None, 0, None))):
        one = lambda x, w, sizes, recipe=recipe: grouped_matmul(
            x, w, sizes, recipe=recipe
        )
        given = [
            jnp.stack([a, a[::-1]]) if axis == 0 else a
            for a, axis in zip((X, W, SIZES), axes, strict=True)
        ]
        got = jax.vmap(one, axes)(*given)
        for i in range(2):
            own = [
                a[i] if axis == 0 else a for a, axis in zip(given, axes, strict=True)
            ]
            np.testing.assert_array_equal(got[i], one(*own))


def test_experts_over_devices():
    """Each device multiplies its own experts' rows; the gradient of a replicated x is
    summed over devices.
    """
    mesh = jax.make_mesh((2,), ("e",), axis_types=(AxisType.Auto,))
    sizes, x = SIZES.reshape(2, 2), jnp.stack([X[:20], X[:20]])
    local = lambda x, w, sizes: grouped_matmul(x[0], w, sizes, recipe="bf16")[None]
    for spec, x_in in ((P("e"), x), (P(), x[:1])):
        mapped = jax.shard_map(
            local, mesh=mesh, in_specs=(spec, P("e"), P("e")), out_specs=P("e")
        )
        loss = lambda x, w, mapped=mapped: jnp.sum(
            mapped(x, w, jnp.array([9, 3, 17, 0])) ** 2
        )
        value, (dx, dw) = jax.jit(jax.value_and_grad(loss, (0, 1)))(x_in, W)
        plain = lambda x, w: sum(
            jnp.sum(
                grouped_matmul(x[i % len(x)], w[2 * i : 2 * i + 2], s, recipe="bf16")
                ** 2
            )
            for i, s in enumerate((jnp.array([9, 3]), jnp.array([17, 0])))
        )
        wanted, gradients = jax.value_and_grad(plain, (0, 1))(x_in, W)
        np.testing.assert_allclose(value, wanted, rtol=1e-5)
        for one, other in zip((dx, dw), gradients, strict=True):
            np.testing.assert_allclose(
                one, other, rtol=1e-4, atol=1e-4 * float(jnp.abs(other).max())
            )
    assert sizes.sum() <= M


def test_the_monitor_reads_its_operands():
    loss = lambda p: jnp.sum(grouped_matmul(X, p["w"], SIZES, recipe="tensorwise") * G)
    _, readings = jax.jit(monitor.value_and_grad(loss))({"w": W})
    assert set(readings["w"]) == {"x", "w", "g"}
    assert (
        float(readings["w"]["w"].amax) == float(jnp.abs(W).max())
        and 25 < float(readings["w"]["w"].snr) < 40
    )


def test_nothing_to_multiply():
    assert not grouped_matmul(X[:, :0], W[:, :0], SIZES, recipe="tcfp12").any()
    assert grouped_matmul(X[:0], W, jnp.zeros(E, int), recipe="tcfp12").shape == (0, N)


BAD = {
    "FP4": (
        dict(recipe="nvfp4_training"),
        NotImplementedError,
        "nvfp4_training has no grouped product",
    ),
    "wire": (
        dict(recipe=tcfp_jax.recipe("tensorwise", wire="bfloat16")),
        NotImplementedError,
        "over a wire",
    ),
    "k": (dict(x=X[:, :5]), ValueError, r"x\[37, 5\] and w\[4, 24, 20\]"),
    "tokens of two axes": (dict(x=X[None]), ValueError, "merge the tokens"),
    "one weight": (dict(w=W[0]), ValueError, "one weight"),
    "no weight": (dict(w=None), ValueError, "no weight"),
    "sum": (
        dict(group_sizes=jnp.array([9, 9, 9, 11])),
        ValueError,
        "the sum 38, but x has 37 rows",
    ),
    "negative": (
        dict(group_sizes=jnp.array([9, -9, 9, 9])),
        ValueError,
        "zero or more",
    ),
    "float sizes": (dict(group_sizes=jnp.ones(4)), TypeError, "integers"),
    "fewer sizes": (
        dict(group_sizes=jnp.array([9, 9])),
        ValueError,
        "each of 4 groups",
    ),
    "integers": (dict(x=jnp.ones((M, K), int)), TypeError, "real floats"),
    "8 bits": (dict(w=W.astype(jnp.float8_e4m3fn)), TypeError, "quantizes by itself"),
    "twice": (
        dict(w=Operand(W.astype(jnp.float8_e4m3fn), jnp.ones(E)), quantized=W),
        ValueError,
        "pass one of them",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    change, error, message = BAD[name]
    options = dict(x=X, w=W, group_sizes=SIZES, recipe="tcfp12_fast") | change
    with pytest.raises(error, match=message):
        grouped_matmul(**options)


def test_derivatives_that_do_not_exist():
    loss = lambda x: jnp.sum(grouped_matmul(x, W, SIZES, recipe="tensorwise") ** 2)
    with pytest.raises(TypeError, match="second derivative"):
        jax.grad(lambda x: jnp.sum(jax.grad(loss)(x)))(X)
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Explicit,))
    with (
        jax.set_mesh(mesh),
        pytest.raises(NotImplementedError, match=re.escape("inside jax.shard_map")),
    ):
        loss(X)


@pytest.mark.parametrize(
    "in_use", (True, False), ids=("mesh in use", "mesh of the arrays")
)
def test_explicit_axes(in_use):
    mesh = mesh_of(2, 4, axis_type=AxisType.Explicit)
    put = lambda x, *axes: jax.device_put(x, NamedSharding(mesh, P(*axes)))
    given = put(X), put(W, None, None, "b"), put(SIZES)
    multiply = functools.partial(grouped_matmul, recipe="rowwise")
    with jax.set_mesh(mesh) if in_use else contextlib.nullcontext():
        for call in (multiply, jax.jit(multiply)):
            with pytest.raises(
                NotImplementedError, match=re.escape("inside jax.shard_map")
            ):
                call(*given)
        split = dict(in_specs=(P(), P(None, None, "b"), P()), out_specs=P(None, "b"))
        got = jax.jit(jax.shard_map(multiply, mesh=mesh, **split))(*given)
    assert jax.typeof(got).sharding.spec == P(None, "b")
    np.testing.assert_array_equal(
        np.asarray(got), np.asarray(jax.jit(multiply)(X, W, SIZES))
    )
