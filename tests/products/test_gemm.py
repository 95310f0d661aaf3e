"""`matmul`: values and gradients against float64 within bounds computed from the data,
under every transformation.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tcfp_jax
import tcfp_jax.recipes
from pallas_kernels.matmul.api import matmul
from tcfp_jax.products import fp8_weights
from tcfp_jax.products.annotations import ACTIVATION_NAME, WEIGHT_NAME
from tcfp_jax.products.fp8_weights import Asked
from tcfp_jax.products.matmul import product
from tcfp_jax.weights.quantization import quantize_weight
from tests.helpers import mesh_of, same_bits

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
    "weights_only": tcfp_jax.Recipe.from_flags(use_tensor_cores=False),
}
FLOAT32_EPS = 2.0**-23
KEYLESS = [name for name in tcfp_jax.recipes.NAMES if not tcfp_jax.recipe(name).draws]

M, K, N = 24, 32, 16


@pytest.fixture(scope="module")
def data():
    kx, kw, kg = jax.random.split(jax.random.key(0), 3)
    return (
        jax.random.normal(kx, (M, K)),
        jax.random.normal(kw, (K, N)) * 0.1,
        jax.random.normal(kg, (M, N)),
    )


def every_recipe(test):
    return pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())(test)


def every_kind(test):
    """One recipe of each form of program; the others differ in a field that values and
    gradients show.
    """
    kinds = ("bf16", "tcfp12", "tcfp12_fast", "float32_scale")
    return pytest.mark.parametrize(
        "recipe", [RECIPES[name] for name in kinds], ids=kinds
    )(test)


# One program each, where every operation would be one; each compiled once for all
# tests.
quantize = jax.jit(tcfp_jax.quantize, static_argnames=("dtype", "scale"))
store = jax.jit(quantize_weight, static_argnames=("recipe", "copies"))
dequantize = jax.jit(lambda stored, *dtype: stored.dequantize(*dtype), static_argnums=1)


def operand(x, dtype, recipe):
    """The values that a product sees for x, in float64."""
    if dtype == "bfloat16":
        return np.asarray(x.astype(jnp.bfloat16), np.float64)
    return np.asarray(
        dequantize(quantize(x, dtype, scale=recipe.scaling.scale)), np.float64
    )


def weight(w, recipe, product):
    """The values of the weight that a product sees, `[k, n]`, in float64."""
    if recipe.weight is None:
        return operand(w, "bfloat16", recipe)
    stored, _ = store(w, recipe)
    if getattr(recipe.weight, product) == "hi":
        stored = stored.drop_residual()
    dtype = jnp.bfloat16 if getattr(recipe, product) == "bf16" else jnp.float32
    return np.asarray(dequantize(stored, dtype), np.float64)


def activation(recipe):
    """The format of x in the forward product."""
    return "bfloat16" if recipe.forward == "bf16" else recipe.activation


def assert_product(got, a, b, eps=FLOAT32_EPS):
    """|got - a @ b| <= 4 eps sqrt(k) (|a| @ |b|): float32 accumulation of k addends,
    rounded once.
    """
    bound = 4 * np.sqrt(a.shape[1]) * eps * (np.abs(a) @ np.abs(b)) + 1e-30
    assert np.all(np.abs(np.asarray(got, np.float64) - a @ b) <= bound)


def value_and_gradients(recipe, x, w, g, **options):
    y, vjp = jax.vjp(lambda x, w: tcfp_jax.matmul(x, w, recipe=recipe, **options), x, w)
    return (y, *vjp(g.astype(y.dtype)))


@functools.cache
def jitted(recipe):
    """`value_and_gradients` as one program for each shape, that tests share."""
    return jax.jit(functools.partial(value_and_gradients, recipe))


@pytest.mark.slow_except(
    "bf16", "tcfp12", "five_fp8", "tensorwise", "bf16_forward", "bf16_dgrad"
)
@every_recipe
def test_products_and_gradients_are_those_of_the_straight_through_reference(
    recipe, data
):
    x, w, g = data
    y, dx, dw = jitted(recipe)(x, w, g)
    assert y.dtype == x.dtype
    assert_product(
        y, operand(x, activation(recipe), recipe), weight(w, recipe, "forward")
    )
    g_q = operand(g, "bfloat16" if recipe.dgrad == "bf16" else recipe.gradient, recipe)
    assert_product(dx, g_q, weight(w, recipe, "dgrad").T)
    if recipe.wgrad == "bf16":
        assert_product(
            dw, operand(x, "bfloat16", recipe).T, operand(g, "bfloat16", recipe)
        )
    else:
        assert_product(dw, operand(x, recipe.activation, recipe).T, g_q)


def test_abd_leaves_the_forward_product_bit_identical(data):
    x, w, _ = data
    full, abd = (
        tcfp_jax.recipe("tcfp12", dgrad_weight=form) for form in ("hi+lo", "hi")
    )
    assert jnp.array_equal(
        tcfp_jax.matmul(x, w, recipe=full), tcfp_jax.matmul(x, w, recipe=abd)
    )


@pytest.mark.slow_except("tcfp12", "tcfp12_fast", "bf16_dgrad")
@every_recipe
def test_stored_weights_give_the_result_of_fresh_ones(recipe, data):
    x, w, g = data
    if recipe.mode is tcfp_jax.TCFPMode.BF16:
        pytest.skip("a BF16 recipe stores no weights")
    fresh = jitted(recipe)(x, w, g)
    one, both = (store(w, recipe, copies=copies)[0] for copies in ("one", "both"))
    for a, b in zip(jitted(recipe)(x, w, g, quantized=one), fresh, strict=True):
        nearly_equal(a, b)
    y, vjp = jax.vjp(jax.jit(lambda x: tcfp_jax.matmul(x, both, recipe=recipe)), x)
    nearly_equal(y, fresh[0])
    nearly_equal(vjp(g)[0], fresh[1])


def nearly_equal(a, b):
    """Up to the order of float32 sums: of two jitted programs with the same operands,
    jax 0.12 makes other loops.
    """
    np.testing.assert_allclose(
        a, b, rtol=0, atol=16 * FLOAT32_EPS * float(jnp.abs(b).max())
    )


@pytest.mark.slow_except(
    "bfloat16-tcfp12_fast", "float16-float32_scale", "bfloat16-bf16"
)
@every_kind
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=lambda d: d.__name__)
def test_dtypes_in_are_dtypes_out(recipe, dtype, data):
    x, w, g = data
    y, dx, dw = jitted(recipe)(x.astype(dtype), w, g)
    assert (y.dtype, dx.dtype, dw.dtype) == (dtype, dtype, jnp.float32)
    a = operand(x.astype(dtype), activation(recipe), recipe)
    assert_product(
        y,
        a,
        weight(w, recipe, "forward"),
        eps=max(float(jnp.finfo(dtype).eps), FLOAT32_EPS),
    )


@pytest.mark.slow_except("bf16", "tcfp12_fast")
@every_kind
def test_leading_axes(recipe, data):
    x, w, g = data
    flat = jitted(recipe)(x, w, g)
    y, dx, dw = jitted(recipe)(x.reshape(2, 3, 4, K), w, g.reshape(2, 3, 4, N))
    assert jnp.array_equal(y.reshape(M, N), flat[0]) and jnp.array_equal(
        dx.reshape(M, K), flat[1]
    )
    np.testing.assert_allclose(dw, flat[2], rtol=0, atol=1e-5)
    vector = tcfp_jax.matmul(x[0], w, recipe=recipe)
    assert vector.shape == (N,) and jnp.array_equal(
        vector, tcfp_jax.matmul(x[:1], w, recipe=recipe)[0]
    )


@pytest.mark.slow_except("bf16", "tcfp12_fast")
@every_kind
def test_jit_scan_and_remat_change_no_bit(recipe, data):
    x, w, g = data
    run = functools.partial(value_and_gradients, recipe)
    expected = run(x, w, g)
    in_one = jitted(recipe)(x, w, g)
    scanned = lax.scan(lambda c, _: (c, run(x, w, g)), 0, None, length=2)[1]
    product = jax.checkpoint(functools.partial(tcfp_jax.matmul, recipe=recipe))
    y, vjp = jax.vjp(product, x, w)
    for a, b, c, d in zip(expected, in_one, scanned, (y, *vjp(g)), strict=True):
        # Products may be summed in another order when they are fused differently;
        # quantization may not change.
        for other in (b, c[1], d):
            np.testing.assert_allclose(a, other, rtol=0, atol=1e-5)


def test_remat_policy_by_name_keeps_the_quantized_operands(data):
    x, w, g = data

    def backward_program(policy):
        product = jax.checkpoint(
            functools.partial(tcfp_jax.matmul, recipe="tcfp12_fast"), policy=policy
        )
        return str(jax.make_jaxpr(lambda x, w: jax.vjp(product, x, w)[1](g))(x, w))

    policies = jax.checkpoint_policies
    kept = backward_program(
        policies.save_only_these_names(WEIGHT_NAME, ACTIVATION_NAME)
    )
    dropped = backward_program(policies.nothing_saveable)
    # round_to's integer rounding appears once per quantization of the weight: again
    # where nothing was saved.
    assert kept.count("round[") < dropped.count("round[")


@every_kind
def test_export_roundtrip(recipe, data):
    x, w, _ = data
    product = jax.jit(functools.partial(tcfp_jax.matmul, recipe=recipe))
    exported = jax.export.deserialize(
        jax.export.export(product, platforms=["cpu"])(x, w).serialize()
    )
    np.testing.assert_allclose(exported.call(x, w), product(x, w), rtol=0, atol=1e-5)
    for_gpu = jax.export.export(product, platforms=["cuda"])(x, w)
    assert ("f8E4M3FN>, tensor" in for_gpu.mlir_module()) == (recipe.forward != "bf16")


@pytest.mark.parametrize("name", ["tensorwise", "tcfp12_fast"])
def test_export_leaves_the_number_of_rows_open(name, data):
    x, w, _ = data
    product = jax.jit(functools.partial(tcfp_jax.matmul, recipe=name))
    (rows,) = jax.export.symbolic_shape("rows")
    here, for_gpu = (
        jax.export.export(product, platforms=[name])(
            jax.ShapeDtypeStruct((rows, K), x.dtype), w
        )
        for name in ("cpu", "cuda")
    )
    for few in (1, 3):
        np.testing.assert_allclose(
            here.call(x[:few], w), product(x[:few], w), rtol=0, atol=1e-5
        )
    # There may be one row, of which XLA's FP8 products on a GPU want more.
    assert (
        "stablehlo.dynamic_pad" in for_gpu.mlir_module()
        or "stablehlo.pad" in for_gpu.mlir_module()
    )


@pytest.mark.slow_except("bf16", "tcfp12_blockwise")
@pytest.mark.parametrize(
    "name", ["bf16", "tcfp12", "nvfp4", "blockwise", "tcfp12_blockwise", "mxfp8"]
)
def test_gradients_are_exported_with_the_number_of_rows_open(name, data):
    x, w, g = data
    (rows,) = jax.export.symbolic_shape("rows")

    @jax.jit
    def gradients(x, g):
        return jax.vjp(functools.partial(tcfp_jax.matmul, recipe=name), x, w)[1](g)

    of = lambda array: jax.ShapeDtypeStruct((rows, array.shape[1]), array.dtype)
    exported = jax.export.export(gradients)(of(x), of(g))
    few = x[:3], g[:3]
    for got, expected in zip(exported.call(*few), gradients(*few), strict=True):
        np.testing.assert_allclose(
            got, expected, rtol=0, atol=1e-5 * float(jnp.abs(expected).max())
        )


@pytest.mark.slow_except("auto-tcfp12_fast", "explicit-tcfp12_fast", "explicit-bf16")
@every_kind
@pytest.mark.parametrize(
    "axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"]
)
def test_meshes_give_the_result_of_one_device(recipe, axis_type, data):
    if jax.device_count() < 4:
        pytest.skip(f"needs 4 devices, this process has {jax.device_count()}")
    x, w, g = data
    expected = jitted(recipe)(x.reshape(4, 6, K), w, g.reshape(4, 6, N))
    mesh = jax.make_mesh(
        (2, 2),
        ("data", "model"),
        axis_types=(axis_type,) * 2,
        devices=jax.devices()[:4],
    )
    with jax.set_mesh(mesh):
        place = lambda a, *spec: jax.device_put(a, NamedSharding(mesh, P(*spec)))
        arguments = (
            place(x.reshape(4, 6, K), "data", None, None),
            place(w, None, "model"),
            place(g.reshape(4, 6, N), "data", None, "model"),
        )
        got = jax.jit(functools.partial(value_and_gradients, recipe))(*arguments)
        assert got[1].sharding.is_equivalent_to(arguments[0].sharding, 3)
        assert got[2].sharding.is_equivalent_to(arguments[1].sharding, 2)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


def test_backward_keeps_the_activation_in_one_byte(data):
    x, w, _ = data
    kept = {
        name: jax.eval_shape(
            lambda x, w, r=r: jax.vjp(
                functools.partial(tcfp_jax.matmul, recipe=r), x, w
            )[1],
            x,
            w,
        )
        for name, r in RECIPES.items()
    }
    has = lambda name, shape, dtype: any(
        a.shape == shape and a.dtype == dtype for a in jax.tree.leaves(kept[name])
    )
    assert has("tcfp12_fast", (K, M), jnp.float8_e4m3fn) and not has(
        "tcfp12_fast", (M, K), jnp.bfloat16
    )
    assert has("tcfp12", (M, K), jnp.bfloat16)
    assert not any(
        a.dtype == jnp.float32 and a.size > 1
        for a in jax.tree.leaves(kept["tcfp12_fast"])
    )


def test_stochastic_residual_needs_a_key_and_repeats_with_it(data):
    x, w, _ = data
    recipe = tcfp_jax.recipe("tcfp12", remainder="stochastic")
    with pytest.raises(ValueError, match="needs key="):
        tcfp_jax.matmul(x, w, recipe=recipe)
    one, again, other = (
        tcfp_jax.matmul(x, w, recipe=recipe, key=jax.random.key(i)) for i in (1, 1, 2)
    )
    assert jnp.array_equal(one, again) and not jnp.array_equal(one, other)


@pytest.mark.parametrize("where", ["argument", "w"])
@pytest.mark.parametrize("transform", ["plain", "jit", "remat", "scan", "vmap"])
def test_a_gradient_of_a_stored_weight_raises(where, transform, data):
    x, w, _ = data
    recipe = tcfp_jax.recipe("tcfp12_fast")
    stored, _ = quantize_weight(w, recipe)

    def product(stored):
        if where == "w":
            return jnp.sum(tcfp_jax.matmul(x, stored, recipe=recipe))
        return jnp.sum(tcfp_jax.matmul(x, w, recipe=recipe, quantized=stored))

    stack = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), stored)
    loss, argument = {
        "plain": (product, stored),
        "jit": (jax.jit(product), stored),
        "remat": (jax.checkpoint(product), stored),
        "scan": (
            lambda s: lax.scan(lambda c, s: (c + product(s), None), jnp.float32(0), s)[
                0
            ],
            stack,
        ),
        "vmap": (lambda s: jnp.sum(jax.vmap(product)(s)), stack),
    }[transform]
    with pytest.raises(TypeError, match="gradient with respect to a stored weight"):
        jax.grad(loss)(argument)


def test_gradients_beside_a_stored_weight_go_through_scan_and_remat(data):
    """A stored weight that is not differentiated is a constant, however it gets
    there.
    """
    x, w, _ = data
    recipe = tcfp_jax.recipe("tcfp12_fast")
    stored, _ = quantize_weight(w, recipe)
    stack = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), stored)

    def loss(x, ws):
        layer = jax.checkpoint(
            lambda total, one: (
                total
                + jnp.sum(tcfp_jax.matmul(x, one[0], recipe=recipe, quantized=one[1])),
                None,
            )
        )
        return lax.scan(layer, jnp.float32(0), (ws, stack))[0]

    dx, dws = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, jnp.stack([w, w]))
    _, dx_one, dw_one = value_and_gradients(
        recipe, x, w, jnp.ones((M, N)), quantized=stored
    )
    np.testing.assert_allclose(dx, 2 * dx_one, rtol=1e-5)
    np.testing.assert_allclose(dws[0], dw_one, rtol=1e-5)


@pytest.mark.parametrize("name", ["tcfp12_fast", "nvfp4"])
def test_a_vector_is_a_matrix_of_one_row(name, data):
    x, w, _ = data
    gradients = jax.jit(
        jax.grad(
            lambda x, w: jnp.sum(jnp.sin(tcfp_jax.matmul(x, w, recipe=name))), (0, 1)
        )
    )
    (dx, dw), (row, of_row) = gradients(x[0], w), gradients(x[:1], w)
    assert same_bits((dx, dw), (row[0], of_row))


@pytest.mark.slow_except("float-tcfp12_fast", "stored-nvfp4")
@pytest.mark.parametrize("name", KEYLESS)
@pytest.mark.parametrize("held", ["float", "stored"])
def test_gradients_of_a_replicated_weight_in_shard_map(name, held, data):
    """Devices scale their own tokens: with the same largest value everywhere, as
    without shard_map.
    """
    mesh, (x, w, _), recipe = mesh_of(4), data, tcfp_jax.recipe(name)
    if held == "stored" and recipe.weight is None:
        pytest.skip("a BF16 recipe stores no weights")
    stored = None if held == "float" else quantize_weight(w, recipe)[0]
    gradients = jax.grad(
        lambda x, w, stored: jnp.sum(
            tcfp_jax.matmul(x, w, recipe=recipe, quantized=stored) ** 2
        ),
        (0, 1),
    )
    x = (
        jnp.concatenate([x[:6]] * 4)
        * jnp.repeat(jnp.float32([1, -1, 1, -1]), 6)[:, None]
    )
    everywhere = jax.shard_map(
        gradients, mesh=mesh, in_specs=(P("a"), P(), P()), out_specs=(P("a"), P())
    )
    for a, b in zip(
        jax.jit(everywhere)(x, w, stored), jax.jit(gradients)(x, w, stored), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * float(jnp.abs(b).max()))


def _second(recipe, outer, inner):
    """The gradient, with respect to one operand, of a penalty on the gradient with
    respect to an operand.
    """
    operands = jnp.ones((4, 16)), jnp.ones((16, 8))
    key = jax.random.key(0) if recipe == "nvfp4_training" else None
    loss = lambda x, w: jnp.sum(tcfp_jax.matmul(x, w, recipe=recipe, key=key))
    penalty = lambda *operands: jnp.sum(jax.grad(loss, inner)(*operands) ** 2)
    return jax.eval_shape(jax.jit(jax.grad(penalty, outer)), *operands), jax.eval_shape(
        jax.grad(loss), *operands
    )


@pytest.mark.parametrize("recipe", ["tcfp12", "blockwise", "nvfp4", "nvfp4_training"])
@pytest.mark.parametrize("outer, inner", [(1, 0), (0, 1)], ids=str)
def test_a_second_derivative_raises_where_rounding_would_make_it_zero(
    recipe, outer, inner
):
    """Gradient penalties and Hessians were zero in silence; the codes of "nvfp4" are
    constants of exact products.
    """
    if recipe == "nvfp4" and outer == 0:
        _second(recipe, outer, inner)
        return
    with pytest.raises(TypeError, match="second derivative"):
        _second(recipe, outer, inner)
    jax.eval_shape(
        jax.grad(
            lambda x: jnp.sum(tcfp_jax.matmul(x, jnp.ones((16, 8)), recipe="tcfp12"))
        ),
        jnp.ones((4, 16)),
    )
    _second("bf16", outer, inner)


def test_forward_mode_says_to_use_reverse_mode(data):
    x, w, _ = data
    product = functools.partial(tcfp_jax.matmul, w=w, recipe="tcfp12")
    with pytest.raises(
        TypeError,
        match=r"forward-mode differentiation .* use jax\.grad, jax\.vjp or jax\.jacrev",
    ):
        jax.jvp(product, (x,), (x,))
    with pytest.raises(TypeError, match="forward-mode"):  # JAX's own message
        jax.jvp(jax.jit(product), (x,), (x,))


SMALL = [
    jax.random.normal(jax.random.key(i), shape)
    for i, shape in enumerate([(2, 4, 16), (16, 8), (3, 16, 8)])
]
STACKED = {"x": ([0, None], [0, 1]), "w": ([None, 0], [0, 2]), "both": ([0, 0], [0, 2])}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "wrap",
    [lambda f: f, jax.jit, jax.checkpoint, jax.vmap],
    ids=["none", "jit", "remat", "vmap"],
)
def test_bf16_has_derivatives_in_forward_mode(wrap, dtype):
    x, w = SMALL[0].astype(dtype), jnp.stack([SMALL[1], 2 * SMALL[1]]).astype(dtype)
    w = w if wrap is jax.vmap else w[0]
    product = wrap(functools.partial(tcfp_jax.matmul, recipe="bf16"))
    y, tangent = jax.jvp(product, (x, w), (2 * x, -w))
    assert tangent.dtype == y.dtype == dtype
    # Factors that are powers of two round nothing: the tangent is 2 y - y.
    np.testing.assert_array_equal(y, product(x, w))
    np.testing.assert_allclose(
        *(v.astype(jnp.float32) for v in (tangent, y)), rtol=2e-2, atol=2e-2
    )
    only_x = jax.jvp(functools.partial(product, x), (w,), (4 * w,))[1]
    np.testing.assert_array_equal(only_x, 4 * y)


def test_a_hessian_in_bf16_is_the_same_in_every_mode():
    x, w = SMALL[0][0, :, :3], SMALL[1][:3, :2]

    def loss(w):
        step = lambda x, _: (
            jnp.tanh(
                tcfp_jax.matmul(
                    tcfp_jax.matmul(x, w, recipe="bf16"), w.T, recipe="bf16"
                )
            ),
            None,
        )
        return jnp.sum(jax.lax.scan(step, x, length=2)[0])

    wanted = jax.jit(jax.jacrev(jax.jacrev(loss)))(w)
    for outer, inner in (
        (jax.jacfwd, jax.jacrev),
        (jax.jacfwd, jax.jacfwd),
        (jax.jacrev, jax.jacfwd),
    ):
        np.testing.assert_allclose(
            jax.jit(outer(inner(loss)))(w),
            wanted,
            rtol=0,
            atol=2e-2 * float(jnp.max(jnp.abs(wanted))),
        )


@pytest.mark.parametrize("place", STACKED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_in_bf16_are_products_of_bf16_operands(place, dtype):
    """Also under vmap, whose shared operand has the sum; in the dtype of the operand,
    from float32 sums.
    """
    in_axes, chosen = STACKED[place]
    x, w = (SMALL[i].astype(dtype) for i in chosen)
    x = jnp.stack([x, x[::-1], -x]) if place != "w" else x
    product = jax.vmap(functools.partial(tcfp_jax.matmul, recipe="bf16"), in_axes)
    y, vjp = jax.vjp(product, x, w)
    g = jnp.cos(y.astype(jnp.float32)).astype(y.dtype)
    short = lambda a: np.asarray(a.astype(jnp.bfloat16), np.float64)
    dx = (
        np.einsum("sbmn,...kn->sbmk", short(g), short(w))
        if place == "x"
        else np.einsum("sbmn,skn->sbmk", short(g), short(w))
    )
    dw = (
        np.einsum("bmk,sbmn->skn", short(x), short(g))
        if place == "w"
        else np.einsum("sbmk,sbmn->skn", short(x), short(g))
    )
    wanted = dx.sum(0) if place == "w" else dx, dw.sum(0) if place == "x" else dw
    tolerance = 4 * float(jnp.finfo(dtype).eps)
    for got, exact, like in zip(vjp(g), wanted, (x, w), strict=True):
        assert got.dtype == like.dtype
        np.testing.assert_allclose(
            got.astype(jnp.float32),
            exact,
            rtol=tolerance,
            atol=tolerance * np.abs(exact).max(),
        )


def test_each_product_adds_as_its_field_of_the_recipe_says(data, monkeypatch):
    """A CPU adds in float32 whatever is asked, so what is asked is looked at."""
    asked = []

    def multiply(*operands, accumulation, **options):
        asked.append(accumulation)
        return matmul(*operands, accumulation=accumulation, **options)

    monkeypatch.setattr(fp8_weights, "multiply_fp8", multiply)
    x, w, g = data
    for hows in itertools.product(("fast", "full"), repeat=3):
        recipe = tcfp_jax.recipe(
            "tensorwise", **dict(zip(("forward", "dgrad", "wgrad"), hows, strict=True))
        )
        run = lambda x, w, recipe=recipe: product(Asked(recipe), x, w, None, None)
        asked.clear()
        jax.eval_shape(lambda x, w, run=run: jax.vjp(run, x, w)[1](g), x, w)
        assert tuple(asked) == hows
