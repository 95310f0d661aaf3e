"""`contract`: products of a kernel of any shape as products of a matrix."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import random
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tcfp_jax
from pallas_kernels.quantize.api import quantize
from pallas_kernels.specs import split_entries
from tcfp_jax.linen import TCFPDense, TCFPEmbed
from tcfp_jax.products.einsum import contract, matrix_product
from tcfp_jax.recipes import NAMES
from tcfp_jax.weights.layout import Layout, Weight
from tcfp_jax.weights.quantization import quantize_weight
from tcfp_jax.weights.stored import Stored
from tests.equations import parse
from tests.helpers import (
    assert_near,
    drawn,
    mesh_of,
    parametrize,
    refused,
    slow_except,
    unwatched,
)

QUANTIZED = sorted(name for name in NAMES if tcfp_jax.recipe(name).stored is not None)


def assert_alike(found, expected, tolerance):
    """The same shapes, and values that differ by less than this part of the largest."""
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_near(a, b, tolerance * float(jnp.abs(b).max()))


@slow_except("...k,nk->...n-x_shape1-shape1", "bek,nke->bne-x_shape5-shape5")
@parametrize(
    "equation, x_shape, shape",
    [
        ("...k,kn->...n", (2, 3, 4), (4, 5)),
        ("...k,nk->...n", (2, 3, 4), (5, 4)),
        ("bthd,hdn->btn", (2, 3, 4, 5), (4, 5, 6)),
        ("bkt,khd->hbtd", (2, 4, 3), (4, 5, 6)),
        ("ebk,ekn->ben", (3, 2, 4), (3, 4, 5)),
        ("bek,nke->bne", (2, 3, 4), (5, 4, 3)),
        ("bfek,kefn->fnbe", (2, 5, 3, 4), (4, 3, 5, 6)),
    ],
)
def test_the_product_is_the_einsum(equation, x_shape, shape):
    x = drawn(*x_shape)
    kernel = drawn(*shape, seed=1)
    contraction = parse(equation, x.ndim)
    result = jax.eval_shape(lambda: jnp.einsum(equation, x, kernel)).shape
    g = drawn(*result, seed=2)

    @jax.jit
    def both(x, kernel):
        product = jax.vjp(
            lambda x, w: contract(contraction, x, w, recipe=tcfp_jax.recipe("bf16")),
            x,
            kernel,
        )
        plain = jax.vjp(lambda x, w: jnp.einsum(equation, x, w), x, kernel)
        return (product[0], product[1](g)), (plain[0], plain[1](g))

    assert_alike(*both(x, kernel), 0.02)  # BF16 rounds each factor by up to 0.4 %


@slow_except("(2, 48, 80)-tcfp12_blockwise", "(2, 48, 80)-tensorwise")
@parametrize("recipe", QUANTIZED)
@parametrize("shape", [(48, 80), (2, 48, 80)], ids=str)
def test_a_stored_kernel_is_read_transposed_with_every_recipe(recipe, shape):
    """A kernel `[n, k]` is stored as it is, and multiplied as `matmul` does `w.T`."""
    recipe = tcfp_jax.recipe(recipe)
    x = drawn(*shape[:-2], 16, 80)
    w = drawn(*shape, seed=1)
    contraction = parse("...k,nk->...n" if len(shape) == 2 else "etk,enk->etn", x.ndim)
    assert contraction.layout.transposed

    def by_hand(x, w):
        return tcfp_jax.matmul(x, w.T, recipe=recipe)

    def quantize(w):
        return quantize_weight(w, recipe, contracts="last")[0]

    for _ in shape[:-2]:
        by_hand = jax.vmap(by_hand)
        quantize = jax.vmap(quantize)

    @jax.jit
    def both(x, w):
        stored = quantize(w)

        def read(x):
            return contract(
                contraction, x, None, recipe=recipe, quantized=stored, shape=w.shape
            )

        y, back = jax.vjp(read, x)
        wanted, wanted_back = jax.vjp(lambda x: by_hand(x, w), x)
        return (y, back(y)), (wanted, wanted_back(y))

    assert_alike(
        *both(x, w), 1e-6
    )  # the same FP8 operands; only the order of sums may differ


@slow_except("tcfp12_blockwise")
@parametrize("recipe", ["tcfp12", "blockwise", "tcfp12_blockwise"])
def test_one_copy_serves_both_products_of_a_transposed_kernel(recipe):
    recipe = tcfp_jax.recipe(recipe)
    x = drawn(16, 80)
    w = drawn(48, 80, seed=1)

    @jax.jit
    def both(x, w):
        results = []
        for copies in ("one", "both"):
            stored = quantize_weight(w, recipe, copies=copies)[0]

            def read(x, stored=stored):
                return contract(
                    matrix_product(2, transposed=True),
                    x,
                    None,
                    recipe=recipe,
                    quantized=stored,
                    shape=w.shape,
                )

            y, back = jax.vjp(read, x)
            results.append((y, back(y)))
        return results

    assert_alike(*both(x, w), 1e-6)


@slow_except("mxfp8", "tcfp12_blockwise")
@parametrize("recipe", ["blockwise", "mxfp8", "rowwise", "tcfp12_blockwise"])
def test_a_tied_head_reads_the_state_of_the_embedding(recipe):
    table = drawn(48, 32)
    query = drawn(4, 32, seed=1)
    layer = TCFPEmbed(48, 32, recipe=recipe)
    weight = Weight(tcfp_jax.recipe(recipe), Layout((1,), (0,)))

    @jax.jit
    def results(params, doubled):
        state = unwatched(
            tcfp_jax.layer_state(
                tcfp_jax.error_feedback({"embedding": weight}).init(doubled)
            )
        )

        def attend(variables):
            return layer.apply(variables, query, method="attend")

        return attend({"params": params, "tcfp": state}), attend({"params": doubled})

    assert_alike(*results({"embedding": table}, {"embedding": 2 * table}), 1e-6)


# What is split: x, the kernel, and what is asked of the result; a group's later axis is
# split in the second and fourth.
EXPLICIT = {
    "heads": ("bte,ehd->bthd", (4, 6, 32), (32, 4, 16), P("a"), P(None, "b"), None),
    "inside of heads": (
        "bte,ehd->bhtd",
        (4, 6, 32),
        (32, 4, 16),
        P("a"),
        P("a", None, "b"),
        P("a", None, None, "b"),
    ),
    "heads in front": (
        "bte,ehd->hbtd",
        (4, 6, 32),
        (32, 4, 16),
        P("a"),
        P(None, "b"),
        P("b", "a"),
    ),
    "summed over heads": (
        "bthd,hdn->btn",
        (4, 6, 4, 8),
        (4, 8, 32),
        P("a", None, "b"),
        P("b"),
        P("a"),
    ),
    "summed inside of heads": (
        "bthd,hdn->btn",
        (4, 6, 4, 8),
        (4, 8, 32),
        P("a", None, None, "b"),
        P(None, "b", "a"),
        P("a"),
    ),
    "transposed, tokens split twice": (
        "...k,nk->...n",
        (4, 6, 32),
        (48, 32),
        P("a", "b"),
        P(None, "a"),
        P("a"),
    ),
    "a stack": (
        "ebk,ekn->ebn",
        (4, 8, 32),
        (4, 32, 48),
        P("a"),
        P("a", None, "b"),
        None,
    ),
    "a stack, moved": (
        "ebk,ekn->ben",
        (4, 8, 32),
        (4, 32, 48),
        P("a", "b"),
        P(),
        P(None, "a", "b"),
    ),
    "a vector": ("k,kn->n", (32,), (32, 48), P(), P(None, "b"), P("b")),
}


@slow_except("summed over heads-tcfp12_fast", "transposed, tokens split twice-rowwise")
@parametrize("recipe", ["bf16", "tcfp12_fast", "rowwise"])
@parametrize("case", EXPLICIT)
def test_kernels_of_any_shape_follow_explicit_axes(case, recipe):
    equation, x_shape, shape, x_spec, spec, out = EXPLICIT[case]
    x = drawn(*x_shape)
    kernel = drawn(*shape, seed=1)
    contraction = parse(equation, len(x_shape))

    def step(x, kernel, out=None):
        def run(x, w):
            return contract(
                contraction, x, w, recipe=tcfp_jax.recipe(recipe), out_sharding=out
            )

        y, back = jax.vjp(run, x, kernel)
        return (y, *back(jnp.sin(y)))

    expected = jax.jit(step)(x, kernel)
    with jax.set_mesh(mesh_of(2, 2, axis_type=AxisType.Explicit)):
        placed = jax.device_put(x, x_spec), jax.device_put(kernel, spec)
        found = jax.jit(lambda x, w: step(x, w, out))(*placed)
        for a, b in zip(found[1:], placed, strict=True):
            assert a.sharding.is_equivalent_to(b.sharding, b.ndim)
        if out is not None:
            assert tuple(found[0].sharding.spec) == tuple(out) + (None,) * (
                found[0].ndim - len(out)
            )
    assert_alike(found, expected, 1e-4)


@parametrize("name", ["tcfp12", "nvfp4_training"])
def test_matrices_of_a_stack_have_random_bits_of_their_own(name):
    """The residuals of the weights, or the gradients of FP4 training."""
    recipe = tcfp_jax.recipe(
        name, **({"remainder": "stochastic"} if name == "tcfp12" else {})
    )
    x, kernel = (
        jnp.broadcast_to(drawn(*shape, seed=i), (2, *shape))
        for i, shape in enumerate([(8, 32), (32, 4)])
    )

    def product(x):
        return contract(
            parse("ebk,ekn->ebn", 3), x, kernel, recipe=recipe, key=random.key(0)
        )

    found = (
        product(x)
        if name == "tcfp12"
        else jax.grad(lambda x: jnp.sin(product(x)).sum())(x)
    )
    assert (found[0] != found[1]).any()
    assert_alike(found[0], found[1], 0.5)


def test_an_axis_is_split_where_the_devices_share_it_evenly():
    sharding = NamedSharding(mesh_of(2, 2, axis_type=AxisType.Explicit), P("a", "b"))
    assert split_entries(sharding, ("a", "b"), [[2, 6], [1, 4]]) == (
        "a",
        None,
        None,
        "b",
    )
    assert split_entries(sharding, ("a", ("a", "b")), [[3, 4], [6, 2]]) == (
        None,
        None,
        None,
        None,
    )


def test_an_out_sharding_of_too_many_axes_raises():
    with refused("describes 3 axes, but the array has 2"):
        contract(
            matrix_product(2),
            jnp.ones((2, 3)),
            jnp.ones((3, 4)),
            recipe=tcfp_jax.recipe("bf16"),
            out_sharding=P(None, None, "a"),
        )


@jax.numpy_dtype_promotion("standard")
@parametrize("dtype", ["uint8", "int32", "bool"])
@parametrize("param_dtype", ["float32", "bfloat16"])
def test_integers_are_promoted_as_flax_does(dtype, param_dtype):
    x = jnp.asarray(np.arange(24).reshape(4, 6) % 7, dtype)
    plain = nn.Dense(5, param_dtype=param_dtype)
    variables = plain.init(random.key(0), x)
    wanted = plain.apply(variables, x)
    layer = TCFPDense(5, recipe="bf16", param_dtype=param_dtype)
    found = layer.apply(variables, x)
    assert found.dtype == wanted.dtype
    assert_near(np.float32(found), np.float32(wanted), 0.05)


def test_features_may_be_numbers_of_numpy():
    x = jnp.ones((2, 8))
    shapes = jax.eval_shape(TCFPDense(np.int64(3)).init, random.key(0), x)
    assert shapes["params"]["bias"].shape == (3,)


@parametrize(
    "ndim, message",
    [
        (2, r"axis 1 of x\[2, 3\] does not fit axis 0 of kernel\[4, 5\]"),
        (3, "do not fit a product of 3 and 2 axes"),
        (0, "scalar"),
    ],
)
def test_operands_that_do_not_fit_raise(ndim, message):
    bf16 = tcfp_jax.recipe("bf16")
    with refused(message):
        contract(matrix_product(ndim), jnp.ones((2, 3)), jnp.ones((4, 5)), recipe=bf16)


@parametrize(
    "equation, x, kernel, stored, message",
    [
        ("bk,kn->bn", (2, 3), (3, 4), (4, 3), "the stored weight is .*find_weights"),
        ("bk,kn->bn", (2, 3), (3, 4), (2, 4, 3), "the stored weight is .*find_weights"),
        ("etk,ekn->etn", (2, 1, 3), (2, 3, 4), (2, 3, 4), "on its own for each of the"),
    ],
    ids=["transpose", "stack", "stack as one"],
)
def test_stored_weights_that_do_not_fit_raise(equation, x, kernel, stored, message):
    recipe = tcfp_jax.recipe("tensorwise")
    weight, _ = quantize_weight(jnp.ones(stored), recipe)
    if message.startswith("on its own"):
        weight = Stored.of(quantize(jnp.ones(stored), jnp.float8_e4m3fn).rows)
    contraction = parse(equation, len(x))
    with refused(message):
        contract(
            contraction,
            jnp.ones(x),
            jnp.ones(kernel),
            recipe=recipe,
            quantized=weight,
        )
