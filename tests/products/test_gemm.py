"""`matmul`: values and gradients against float64 within bounds computed from the data,
under every transformation. `test_derivatives.py` has what cannot be differentiated.
"""

import itertools
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.export import deserialize, export, symbolic_shape
from jax.sharding import AxisType

import tcfp_jax
from pallas_kernels.matmul.api import matmul
from pallas_kernels.scaling import AMAX_NAME
from tcfp_jax.products import fp8_weights
from tcfp_jax.products.annotations import ACTIVATION_NAME, WEIGHT_NAME
from tcfp_jax.products.fp8_weights import Asked
from tcfp_jax.products.matmul import product
from tcfp_jax.weights.quantization import quantize_weight
from tests.helpers import (
    assert_near,
    mesh_of,
    normal,
    parametrize,
    putting,
    refused,
    same_bits,
    slow_except,
    value_and_gradients,
)

RECIPES = {
    "bf16": tcfp_jax.recipe("bf16"),
    "tcfp12": tcfp_jax.recipe("tcfp12"),
    "tcfp12_fast": tcfp_jax.recipe("tcfp12_fast"),
    "five_fp8": tcfp_jax.recipe("tcfp12", wgrad="full"),
    "tensorwise": tcfp_jax.recipe("tensorwise"),
    "float32_scale": tcfp_jax.recipe("tensorwise", scale="float32"),
    "e5m2_gradients": tcfp_jax.recipe("tcfp12_fast", gradient="float8_e5m2"),
    "bf16_forward": tcfp_jax.recipe("tcfp12", forward="bf16"),
    "bf16_dgrad": tcfp_jax.recipe("tcfp12_fast", dgrad="bf16", wgrad="bf16"),
    "weights_only": tcfp_jax.recipe(
        "tcfp12", forward="bf16", dgrad="bf16", wgrad="bf16"
    ),
}
EPS = 2.0**-23  # of float32
M = 24
K = 32
N = 16
X = normal(0, (M, K))
W = normal(1, (K, N)) * 0.1
G = normal(2, (M, N))
every_recipe = parametrize("name", RECIPES)
# One recipe of each form of program; the others differ in a field that values and
# gradients show.
every_kind = parametrize("name", ["bf16", "tcfp12", "tcfp12_fast", "float32_scale"])
kinds_of_axes = parametrize(
    "axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"]
)

# One program each, where every operation would be one; each compiled once for all
# tests.
quantize = jax.jit(tcfp_jax.quantize, static_argnames=("dtype", "scale"))
store = jax.jit(quantize_weight, static_argnames=("recipe", "copies"))
dequantize = jax.jit(lambda stored, *dtype: stored.dequantize(*dtype), static_argnums=1)


def operand(x, dtype, recipe):
    """The values that a product sees for x, in float64."""
    if dtype == "bfloat16":
        return np.float64(x.astype(jnp.bfloat16))
    return np.float64(dequantize(quantize(x, dtype, scale=recipe.scaling.scale)))


def weight(w, recipe, product):
    """The values of the weight that a product sees, `[k, n]`, in float64."""
    if recipe.weight is None:
        return operand(w, "bfloat16", recipe)
    stored, _ = store(w, recipe)
    if getattr(recipe.weight, product) == "hi":
        stored = stored.drop_residual()
    in_bf16 = getattr(recipe, product) == "bf16"
    return np.float64(dequantize(stored, jnp.bfloat16 if in_bf16 else jnp.float32))


def activation(x, recipe):
    """The values of x in the forward product."""
    in_bf16 = recipe.forward == "bf16"
    return operand(x, "bfloat16" if in_bf16 else recipe.activation, recipe)


def assert_product(got, a, b, eps=EPS):
    """|got - a @ b| <= 4 eps sqrt(k) (|a| @ |b|): float32 accumulation of k addends,
    rounded once.
    """
    bound = 4 * np.sqrt(a.shape[1]) * eps * (np.abs(a) @ np.abs(b)) + 1e-30
    assert np.all(np.abs(np.float64(got) - a @ b) <= bound)


def multiplied(name):
    return partial(tcfp_jax.matmul, recipe=name)


def run(name, x=X, w=W, g=G, **options):
    product = multiplied(RECIPES[name])
    return value_and_gradients(product, x, w, g, **options)


@cache
def jitted(name):
    """`run` as one program for each shape, that tests share."""
    return jax.jit(partial(run, name))


@slow_except("bf16", "tcfp12", "five_fp8", "tensorwise", "bf16_forward", "bf16_dgrad")
@every_recipe
def test_products_and_gradients_are_straight_through(name):
    recipe = RECIPES[name]
    y, dx, dw = jitted(name)(X, W, G)
    assert y.dtype == X.dtype
    assert_product(y, activation(X, recipe), weight(W, recipe, "forward"))
    in_bf16 = recipe.dgrad == "bf16"
    g = operand(G, "bfloat16" if in_bf16 else recipe.gradient, recipe)
    assert_product(dx, g, weight(W, recipe, "dgrad").T)
    if recipe.wgrad == "bf16":
        x = operand(X, "bfloat16", recipe)
        g = operand(G, "bfloat16", recipe)
    else:
        x = operand(X, recipe.activation, recipe)
    assert_product(dw, x.T, g)


def test_abd_leaves_the_forward_product_bit_identical():
    full = tcfp_jax.recipe("tcfp12", dgrad_weight="hi+lo")
    abd = tcfp_jax.recipe("tcfp12", dgrad_weight="hi")
    assert same_bits(multiplied(full)(X, W), multiplied(abd)(X, W))


def assert_nearly_equal(got, expected):
    """Up to the order of float32 sums: of two jitted programs with the same operands,
    jax 0.12 makes other loops.
    """
    for a, b in zip(got, expected, strict=True):
        assert_near(a, b, 16 * EPS * float(jnp.abs(b).max()))


@slow_except("tcfp12", "tcfp12_fast", "bf16_dgrad")
@parametrize("name", [name for name in RECIPES if name != "bf16"])
def test_stored_weights_give_the_result_of_fresh_ones(name):
    recipe = RECIPES[name]
    y, dx, dw = jitted(name)(X, W, G)
    one, _ = store(W, recipe, copies="one")
    assert_nearly_equal(jitted(name)(X, W, G, quantized=one), (y, dx, dw))
    both, _ = store(W, recipe, copies="both")
    again, pull = jax.vjp(jax.jit(lambda x: multiplied(recipe)(x, both)), X)
    assert_nearly_equal((again, *pull(G)), (y, dx))


def test_both_halves_in_bf16_give_the_product_of_their_floats():
    served = tcfp_jax.recipe(
        "tcfp12_single", forward="bf16", wgrad="bf16", forward_weight="hi+lo"
    )
    halves = tcfp_jax.split(W)
    in_bf16 = tcfp_jax.matmul(X, halves, recipe=served)
    of_floats = tcfp_jax.matmul(X, halves.dequantize(), recipe="bf16")
    assert same_bits(in_bf16, of_floats)
    assert not same_bits(in_bf16, tcfp_jax.matmul(X, W, recipe="bf16"))


@slow_except("bfloat16-tcfp12_fast", "float16-float32_scale", "bfloat16-bf16")
@every_kind
@parametrize("dtype", ["bfloat16", "float16"])
def test_dtypes_in_are_dtypes_out(name, dtype):
    x = X.astype(dtype)
    y, dx, dw = jitted(name)(x, W, G)
    assert (y.dtype, dx.dtype, dw.dtype) == (dtype, dtype, jnp.float32)
    eps = float(jnp.finfo(dtype).eps)
    recipe = RECIPES[name]
    assert_product(y, activation(x, recipe), weight(W, recipe, "forward"), eps)


@slow_except("bf16", "tcfp12_fast")
@every_kind
def test_leading_axes(name):
    flat = jitted(name)(X, W, G)
    y, dx, dw = jitted(name)(X.reshape(2, 3, 4, K), W, G.reshape(2, 3, 4, N))
    assert same_bits((y.reshape(M, N), dx.reshape(M, K)), flat[:2])
    assert_near(dw, flat[2], 1e-5)
    product = multiplied(RECIPES[name])
    assert same_bits(product(X[0], W), product(X[:1], W)[0])


@slow_except("bf16", "tcfp12_fast")
@every_kind
def test_jit_scan_and_remat_change_no_bit(name):
    expected = run(name)
    _, scanned = lax.scan(lambda c, _: (c, run(name)), 0, None, length=2)
    remat = jax.checkpoint(multiplied(RECIPES[name]))
    # Products may be summed in another order when they are fused differently;
    # quantization may not change.
    assert_near(jitted(name)(X, W, G), expected, 1e-5)
    assert_near([stack[1] for stack in scanned], list(expected), 1e-5)
    assert_near(value_and_gradients(remat, X, W, G), expected, 1e-5)


def test_remat_policy_by_name_keeps_the_quantized_operands():
    def roundings(policy):
        """round_to's integer rounding appears once per quantization."""
        product = jax.checkpoint(multiplied("tcfp12_fast"), policy=policy)
        program = jax.make_jaxpr(partial(value_and_gradients, product))(X, W, G)
        return str(program).count("round[")

    policies = jax.checkpoint_policies
    kept = policies.save_only_these_names(WEIGHT_NAME, ACTIVATION_NAME)
    assert roundings(kept) < roundings(policies.nothing_saveable)


def test_remat_policy_by_name_looks_for_no_maximum_again():
    policy = jax.checkpoint_policies.save_only_these_names(AMAX_NAME)

    def block(x, w):
        return multiplied("tcfp12_single")(jnp.tanh(x), w)

    def run(block):
        return partial(value_and_gradients, block)

    kept = run(jax.checkpoint(block, policy=policy))
    again = run(jax.checkpoint(block))

    def maxima(step):
        return str(jax.make_jaxpr(step)(X, W, G)).count(f"name={AMAX_NAME}")

    # x, w and g; without the policy x and w once more.
    assert (maxima(kept), maxima(again)) == (3, 5)
    for found, wanted in zip(kept(X, W, G), again(X, W, G), strict=True):
        assert same_bits(found, wanted)


def exported(function, *arguments, platform="cpu"):
    return export(jax.jit(function), platforms=[platform])(*arguments)


@every_kind
def test_export_roundtrip(name):
    product = multiplied(RECIPES[name])
    here = deserialize(exported(product, X, W).serialize())
    assert_near(here.call(X, W), jax.jit(product)(X, W), 1e-5)
    text = exported(product, X, W, platform="cuda").mlir_module()
    assert ("f8E4M3FN>, tensor" in text) == (RECIPES[name].forward != "bf16")


(ROWS,) = symbolic_shape("rows")


def any_rows(columns):
    return jax.ShapeDtypeStruct((ROWS, columns), jnp.float32)


@parametrize("name", ["tensorwise", "tcfp12_fast"])
def test_export_leaves_the_number_of_rows_open(name):
    product = multiplied(name)
    here = exported(product, any_rows(K), W)
    for few in (X[:1], X[:3]):
        assert_near(here.call(few, W), jax.jit(product)(few, W), 1e-5)
    # There may be one row, of which XLA's FP8 products on a GPU want more.
    text = exported(product, any_rows(K), W, platform="cuda").mlir_module()
    assert "stablehlo.dynamic_pad" in text or "stablehlo.pad" in text


@slow_except("bf16", "tcfp12_blockwise")
@parametrize(
    "name", ["bf16", "tcfp12", "nvfp4", "blockwise", "tcfp12_blockwise", "mxfp8"]
)
def test_gradients_are_exported_with_the_number_of_rows_open(name):
    @jax.jit
    def gradients(x, g):
        return jax.vjp(multiplied(name), x, W)[1](g)

    open_rows = exported(gradients, any_rows(K), any_rows(N))
    few = (X[:3], G[:3])
    for got, expected in zip(open_rows.call(*few), gradients(*few), strict=True):
        assert_near(got, expected, 1e-5 * float(jnp.abs(expected).max()))


def test_fp4_training_is_exported_with_the_number_of_rows_open():
    @jax.jit
    def gradients(x, g, key):
        product = partial(tcfp_jax.matmul, recipe="nvfp4_training", key=key)
        return jax.vjp(product, x, W)[1](g)

    key = jax.random.key(0)
    open_rows = exported(gradients, any_rows(K), any_rows(N), key)
    few = (X[:3], G[:3], key)
    for got, expected in zip(open_rows.call(*few), gradients(*few), strict=True):
        assert_near(got, expected, 1e-5 * float(jnp.abs(expected).max()))


@slow_except("auto-tcfp12_fast", "explicit-tcfp12_fast", "explicit-bf16")
@every_kind
@kinds_of_axes
def test_meshes_give_the_result_of_one_device(name, axis_type):
    x = X.reshape(4, 6, K)
    g = G.reshape(4, 6, N)
    expected = jitted(name)(x, W, g)
    mesh = mesh_of(2, 2, names=("data", "model"), axis_type=axis_type)
    put = putting(mesh)
    x = put(x, "data", None, None)
    w = put(W, None, "model")
    with jax.set_mesh(mesh):
        got = jax.jit(partial(run, name))(x, w, put(g, "data", None, "model"))
    assert got[1].sharding.is_equivalent_to(x.sharding, 3)
    assert got[2].sharding.is_equivalent_to(w.sharding, 2)
    assert_near(got, expected, 1e-5)


def test_backward_keeps_the_activation_in_one_byte():
    def kept(name):
        pull = jax.eval_shape(lambda x, w: jax.vjp(multiplied(name), x, w)[1], X, W)
        return [(a.shape, a.dtype) for a in jax.tree.leaves(pull) if a.size > 1]

    fast = kept("tcfp12_fast")
    assert ((K, M), jnp.float8_e4m3fn) in fast
    assert ((M, K), jnp.bfloat16) not in fast
    assert jnp.float32 not in [dtype for _, dtype in fast]
    assert ((M, K), jnp.bfloat16) in kept("tcfp12")


def test_stochastic_residual_needs_a_key_and_repeats_with_it():
    product = multiplied(tcfp_jax.recipe("tcfp12", remainder="stochastic"))
    with refused("needs key="):
        product(X, W)
    one = product(X, W, key=jax.random.key(1))
    assert same_bits(one, product(X, W, key=jax.random.key(1)))
    assert not same_bits(one, product(X, W, key=jax.random.key(2)))


@parametrize("name", ["tcfp12_fast", "nvfp4"])
def test_a_vector_is_a_matrix_of_one_row(name):
    def loss(x, w):
        return jnp.sum(jnp.sin(multiplied(name)(x, w)))

    gradients = jax.jit(jax.grad(loss, (0, 1)))
    dx, dw = gradients(X[:1], W)
    assert same_bits(gradients(X[0], W), (dx[0], dw))


def test_each_product_adds_as_its_field_of_the_recipe_says(monkeypatch):
    """A CPU adds in float32 whatever is asked, so what is asked is looked at."""
    asked = []

    def multiply(*operands, accumulation, **options):
        asked.append(accumulation)
        return matmul(*operands, accumulation=accumulation, **options)

    monkeypatch.setattr(fp8_weights, "multiply_fp8", multiply)
    for forward, dgrad, wgrad in itertools.product(("fast", "full"), repeat=3):
        hows = dict(forward=forward, dgrad=dgrad, wgrad=wgrad)
        how = Asked(tcfp_jax.recipe("tensorwise", **hows))

        def gradients(x, w, how=how):
            return jax.vjp(lambda x, w: product(how, x, w, None, None), x, w)[1](G)

        asked.clear()
        jax.eval_shape(gradients, X, W)
        assert asked == [forward, dgrad, wgrad]
