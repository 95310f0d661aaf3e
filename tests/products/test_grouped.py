"""`grouped_matmul`: values and gradients against float64 loops over the groups, stored
weights, state and bad input.
"""

import contextlib
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_array_equal

import tcfp_jax
from pallas_kernels.operands import Operand
from tcfp_jax import monitor
from tcfp_jax.products import grouped_matmul
from tcfp_jax.products.fp8_weights import quantize_operand
from tcfp_jax.weights.layout import Layout, Weight
from tcfp_jax.weights.quantization import quantize_weight
from tests import grouped
from tests.fp4_cases import rounded
from tests.helpers import (
    assert_near,
    float64_of,
    mesh_of,
    parametrize,
    putting,
    refused,
    slow_except,
    store_at_once,
    value_and_gradients,
)

M = 37
K = 24
N = 20
E = 4
SIZES = jnp.array([9, 0, 17, 5])
RNG = np.random.default_rng(0)
X = jnp.float32(RNG.standard_normal((M, K)) * np.exp(RNG.standard_normal((M, 1))))
OF_EXPERTS = np.array([0.1, 1.0, 3.0, 0.01])[:, None, None]
W = jnp.float32(RNG.standard_normal((E, K, N)) * OF_EXPERTS)
G = jnp.float32(RNG.standard_normal((M, N)))
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
operand_of = jax.jit(quantize_operand, static_argnums=(1, 2))


@partial(jax.jit, static_argnums=1)
def stored_of(w, recipe):
    return jax.vmap(lambda w: quantize_weight(w, recipe)[0])(w)


def rows_by_groups(x, w):
    return grouped.by_groups(x, w.swapaxes(1, 2), SIZES)


def within_groups(x, g):
    return grouped.within_groups(x.T, g.T, SIZES)


@partial(jax.jit, static_argnames="recipe")
def results(x, w, sizes, recipe, quantized=None, g=G):
    product = partial(grouped_matmul, group_sizes=sizes)
    return value_and_gradients(product, x, w, g, recipe=recipe, quantized=quantized)


def as_read(recipe):
    """X, W and G in float64 as forward, dgrad and wgrad read them."""
    of_x = operand_of(X, recipe.activation, recipe)
    of_g = operand_of(G, recipe.gradient, recipe)

    def rows(how, made, x):
        return rounded(x) if how == "bf16" else float64_of(made.rows)

    def columns(made, x):
        return rounded(x) if recipe.wgrad == "bf16" else float64_of(made.columns).T

    w = rounded(W)
    w_back = w
    if recipe.stored is not None:
        stored = stored_of(W, recipe)
        w = float64_of(stored.for_forward(recipe.stored.forward)).swapaxes(1, 2)
        w_back = float64_of(stored.for_dgrad(recipe.stored.dgrad))
    forward = rows(recipe.forward, of_x, X)
    dgrad = rows(recipe.dgrad, of_g, G)
    wgrad = (columns(of_x, X), columns(of_g, G))
    return (forward, w), (dgrad, w_back.swapaxes(1, 2)), wgrad


@slow_except("bf16", "tcfp12_fast", "tcfp12_blockwise")
@parametrize("name", RECIPES)
def test_values_and_gradients_are_of_the_rounded_operands(name):
    recipe = tcfp_jax.recipe(name)
    oracles = (rows_by_groups, rows_by_groups, within_groups)
    found = results(X, W, SIZES, recipe)
    for got, oracle, (a, b) in zip(found, oracles, as_read(recipe), strict=True):
        assert got.dtype == jnp.float32
        bound = ROUNDING * oracle(np.abs(a), np.abs(b))
        assert np.all(np.abs(np.float64(got) - oracle(a, b)) <= bound)
        assert np.any(np.asarray(got))


@parametrize("sizes", [[30, 0, 7, 1], [-1, 9, 9, 9]])
@parametrize("name", ["bf16", "tcfp12_fast"])
def test_sizes_that_are_no_sizes_make_nan(name, sizes):
    for one in results(X, W, jnp.array(sizes), tcfp_jax.recipe(name)):
        assert np.isnan(one).all()


INSIDE = int(SIZES.sum())


def with_rows_behind(x, filler):
    return x.at[INSIDE:].set(filler)


@slow_except("bf16", "tensorwise", "blockwise")
@parametrize("name", RECIPES)
def test_rows_behind_the_last_group_count_for_nothing(name):
    recipe = tcfp_jax.recipe(name)
    of_zeros = with_rows_behind(X, 0), with_rows_behind(G, 0)
    want = results(of_zeros[0], W, SIZES, recipe, g=of_zeros[1])
    for filler in (1e6, jnp.nan, jnp.inf):
        x = with_rows_behind(X, filler)
        found = results(x, W, SIZES, recipe, g=with_rows_behind(G, filler))
        jax.tree.map(assert_array_equal, found, want)
        assert not np.any(found[1][INSIDE:])


def test_the_monitor_ignores_rows_behind_the_last_group():
    def readings(filler):
        def loss(p):
            x = with_rows_behind(X, filler)
            y = grouped_matmul(x, p["w"], SIZES, recipe="tensorwise")
            return jnp.sum(y * with_rows_behind(G, filler))

        return jax.jit(monitor.value_and_grad(loss))({"w": W})[1]["w"]

    # Zeros are the only rows that no reading of magnitudes sees.
    jax.tree.map(assert_array_equal, readings(1e6), readings(0))


@parametrize("bad", [jnp.nan, jnp.inf])
@parametrize("name", ["bf16", "tensorwise", "rowwise", "blockwise"])
def test_a_weight_that_is_not_finite_is_that_of_its_own_rows(name, bad):
    sizes = jnp.array([9, 0, 17, 11])
    group = np.repeat(np.arange(E), sizes)
    for expert in range(E):
        w = W.at[expert, 0, 0].set(bad)
        y, dx, _ = results(X, w, sizes, tcfp_jax.recipe(name))
        for got in (y, dx):
            has_bad = ~np.isfinite(got).all(axis=1)
            assert_array_equal(has_bad, group == expert)


@parametrize("dtype, first", [("int64", 2**32), ("int64", -(2**32)), ("uint64", 2**63)])
def test_sizes_that_only_64_bits_hold_make_nan(dtype, first):
    with jax.enable_x64(True):
        sizes = jnp.asarray(np.array([first, 9, 9, 9], dtype))
        y = jax.jit(partial(grouped_matmul, recipe="bf16"))(X, W, sizes)
    assert np.isnan(y).all()


def parameter(w, name, layout):
    weight = Weight(tcfp_jax.recipe(name), Layout(*layout))
    return store_at_once({"w": w}, {"w": weight}, key=jax.random.key(1))


def test_stored_weights_multiply_alike_and_take_gradients():
    recipe = tcfp_jax.recipe("tcfp12_single")
    fresh = results(X, W, SIZES, recipe)
    again = results(X, W, SIZES, recipe, stored_of(W, recipe))
    jax.tree.map(assert_array_equal, again, fresh)
    params = parameter(W, "tcfp12_single", [(1,), (2,), (0,)])

    def loss(p):
        return jnp.sum(grouped_matmul(X, p["w"], SIZES, recipe=recipe) * G)

    # The gradient does not read the weight, so it has the same bits.
    assert_array_equal(jax.jit(tcfp_jax.grad(loss))(params)["w"], fresh[2])
    with refused(re.escape("tcfp_jax.value_and_grad"), TypeError):
        jax.grad(loss, allow_int=True)(params)


def test_a_transposed_parameter_and_the_result_of_split():
    w = parameter(W.swapaxes(1, 2), "tcfp12_fast", [(2,), (1,), (0,)])["w"]
    fast = partial(grouped_matmul, recipe="tcfp12_fast")
    got = jax.jit(fast)(X, w, SIZES)
    want = jax.jit(fast)(X, jax.vmap(tcfp_jax.split)(W), SIZES)
    # rounded stochastically
    assert np.linalg.norm(got - want) <= 2**-7 * np.linalg.norm(want)


@parametrize("recipe, axes", [("tcfp12_fast", (0, None, 0)), ("bf16", (None, 0, None))])
def test_vmap_is_a_loop(recipe, axes):
    one = partial(grouped_matmul, recipe=recipe)
    given = [X, W, SIZES]
    stacked = [i for i, axis in enumerate(axes) if axis == 0]
    other = list(given)
    for i in stacked:
        other[i] = given[i][::-1]
    both = list(given)
    for i in stacked:
        both[i] = jnp.stack([given[i], other[i]])
    got = jax.vmap(one, axes)(*both)
    assert_array_equal(got, [one(*given), one(*other)])


@parametrize("replicated", [False, True])
def test_experts_over_devices(replicated):
    """Each device multiplies its own experts' rows; the gradient of a replicated x is
    summed over devices.
    """
    few = X[None, :20]
    x = few if replicated else jnp.concatenate([few, few])
    sizes = jnp.array([9, 3, 17, 0])
    of_experts = P("e")
    of_x = P() if replicated else of_experts
    multiply = partial(grouped_matmul, recipe="bf16")
    mapped = jax.shard_map(
        lambda x, w, sizes: multiply(x[0], w, sizes)[None],
        mesh=mesh_of(2, names=("e",)),
        in_specs=(of_x, of_experts, of_experts),
        out_specs=of_experts,
    )

    def loss(x, w):
        return jnp.sum(mapped(x, w, sizes) ** 2)

    def plain(x, w):
        first = multiply(x[0], w[:2], sizes[:2])
        last = multiply(x[-1], w[2:], sizes[2:])
        return jnp.sum(first**2) + jnp.sum(last**2)

    value, found = jax.jit(jax.value_and_grad(loss, (0, 1)))(x, W)
    wanted, gradients = jax.value_and_grad(plain, (0, 1))(x, W)
    assert_near(value, wanted, 1e-5 * wanted)
    for got, exact in zip(found, gradients, strict=True):
        assert_near(got, exact, 1e-4 * float(jnp.abs(exact).max()))


def test_the_monitor_reads_its_operands():
    def loss(p):
        return jnp.sum(grouped_matmul(X, p["w"], SIZES, recipe="tensorwise") * G)

    _, readings = jax.jit(monitor.value_and_grad(loss))({"w": W})
    of_w = readings["w"]
    assert set(of_w) == {"x", "w", "g"}
    assert float(of_w["w"].amax) == float(jnp.abs(W).max())
    assert 25 < float(of_w["w"].snr) < 40


@parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_nothing_to_multiply(dtype):
    x = X.astype(dtype)
    y = grouped_matmul(x[:, :0], W[:, :0], SIZES, recipe="tcfp12")
    assert (y.shape, y.dtype) == ((M, N), dtype)
    assert not y.any()
    of_no_rows = grouped_matmul(x[:0], W, jnp.zeros(E, int), recipe="tcfp12")
    assert (of_no_rows.shape, of_no_rows.dtype) == ((0, N), dtype)


CODES = W.astype(jnp.float8_e4m3fn)
WIRE = tcfp_jax.recipe("tensorwise", wire="bfloat16")


def sizes(*given):
    return dict(group_sizes=jnp.array(given))


def long_sizes(*given):
    return dict(group_sizes=np.array(given))


@parametrize(
    "change, error, message",
    [
        (dict(recipe="nvfp4_training"), NotImplementedError, "has no grouped product"),
        (dict(recipe=WIRE), NotImplementedError, "over a wire"),
        (dict(x=X[:, :5]), ValueError, r"x\[37, 5\] and w\[4, 24, 20\]"),
        (dict(x=X[None]), ValueError, "merge the tokens"),
        (dict(w=W[0]), ValueError, "one weight"),
        (dict(w=None), ValueError, "no weight"),
        (sizes(9, 9, 9, 11), ValueError, "the sum 38, but x has 37 rows"),
        (sizes(9, -9, 9, 9), ValueError, "zero or more"),
        (long_sizes(2**32 + 9, 0, 9, 9), ValueError, "the sum 4294967323"),
        (long_sizes(2**62, 2**62, 2**62, 2**62), ValueError, "but x has 37 rows"),
        (sizes(1.0, 1.0, 1.0, 1.0), TypeError, "integers"),
        (sizes(9, 9), ValueError, "each of 4 groups"),
        (dict(x=jnp.ones((M, K), int)), TypeError, "real floats"),
        (dict(w=CODES), TypeError, "quantizes by itself"),
        (dict(w=Operand(CODES, jnp.ones(E)), quantized=W), ValueError, "one of them"),
        (dict(w=tcfp_jax.split(W)), ValueError, "needs its own"),
    ],
)
def test_bad_input(change, error, message):
    options = dict(x=X, w=W, group_sizes=SIZES, recipe="tcfp12_fast") | change
    with refused(message, error):
        grouped_matmul(**options)


IN_SHARD_MAP = re.escape("inside jax.shard_map")


def test_a_second_derivative_raises():
    def loss(x):
        return jnp.sum(grouped_matmul(x, W, SIZES, recipe="tensorwise") ** 2)

    with refused("second derivative", TypeError):
        jax.grad(lambda x: jnp.sum(jax.grad(loss)(x)))(X)
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh), refused(IN_SHARD_MAP, NotImplementedError):
        loss(X)


@parametrize("in_use", [True, False], ids=["mesh in use", "mesh of the arrays"])
def test_explicit_axes(in_use):
    mesh = mesh_of(2, 4, axis_type=AxisType.Explicit)
    put = putting(mesh)
    given = (put(X), put(W, None, None, "b"), put(SIZES))
    multiply = partial(grouped_matmul, recipe="rowwise")
    with jax.set_mesh(mesh) if in_use else contextlib.nullcontext():
        for call in (multiply, jax.jit(multiply)):
            with refused(IN_SHARD_MAP, NotImplementedError):
                call(*given)
        split = dict(in_specs=(P(), P(None, None, "b"), P()), out_specs=P(None, "b"))
        got = jax.jit(jax.shard_map(multiply, mesh=mesh, **split))(*given)
    assert jax.typeof(got).sharding.spec == P(None, "b")
    assert_array_equal(got, jax.jit(multiply)(X, W, SIZES))
