"""`contract`: einsums of a kernel of any shape as products of the matrix that it is, stored or not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tcfp_jax
from tcfp_jax.linen import TCFPEmbed
from tcfp_jax.products.contraction import axes_product, contract, matrix_product, parse
from tcfp_jax.recipes import NAMES
from tcfp_jax.weights.layout import Layout, Weight
from tcfp_jax.weights.quantization import quantize_weight

pytestmark = pytest.mark.usefixtures("quick_compiles")
QUANTIZED = sorted(set(NAMES) - {"bf16"})


def close(found, expected, tolerance):
    """The same shapes, and values that differ by less than this part of the largest."""
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * float(jnp.abs(b).max()))


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@pytest.mark.parametrize(
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
    x, kernel = normal(*x_shape), normal(*shape, seed=1)
    contraction = parse(equation, x.ndim)
    result = jax.eval_shape(lambda: jnp.einsum(equation, x, kernel)).shape
    g = normal(*result, seed=2)

    @jax.jit
    def both(x, kernel):
        product = jax.vjp(lambda x, w: contract(contraction, x, w, recipe=tcfp_jax.recipe("bf16")), x, kernel)
        plain = jax.vjp(lambda x, w: jnp.einsum(equation, x, w), x, kernel)
        return (product[0], product[1](g)), (plain[0], plain[1](g))

    close(*both(x, kernel), 0.02)  # BF16 rounds each factor by up to 0.4 %
    sizes = contraction.kernel_sizes(shape)
    assert all(size in (None, wanted) for size, wanted in zip(sizes, result, strict=True))
    assert np.prod([result[i] for i, size in enumerate(sizes) if size is None]) == contraction.tokens(x.shape)


def test_layers_describe_what_an_equation_would():
    assert matrix_product(4) == parse("...k,kn->...n", 4)
    assert matrix_product(1, transposed=True) == parse("k,nk->n", 1)
    assert axes_product(4, (2, 3), (), 2) == parse("abhd,hdmn->abmn", 4)
    assert axes_product(4, (1, 3), (0,), 1) == parse("btek,btkn->ben", 4)


@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("shape", [(48, 80), (2, 48, 80)], ids=str)
def test_a_stored_kernel_is_read_transposed_with_every_recipe(recipe, shape):
    """A kernel `[n, k]` is stored as it is; its product and its gradient are those of `matmul` with `w.T`."""
    recipe = tcfp_jax.recipe(recipe)
    x, w = normal(*shape[:-2], 16, 80), normal(*shape, seed=1)
    contraction = parse("...k,nk->...n" if len(shape) == 2 else "etk,enk->etn", x.ndim)
    assert contraction.layout.transposed
    by_hand = lambda x, w: tcfp_jax.matmul(x, w.T, recipe=recipe)
    quantize = lambda w: quantize_weight(w, recipe)[0]
    for _ in shape[:-2]:
        by_hand, quantize = jax.vmap(by_hand), jax.vmap(quantize)

    @jax.jit
    def both(x, w):
        stored = quantize(w)
        read = lambda x: contract(contraction, x, None, recipe=recipe, quantized=stored, shape=w.shape)
        (y, back), (wanted, wanted_back) = jax.vjp(read, x), jax.vjp(lambda x: by_hand(x, w), x)
        return (y, back(y)), (wanted, wanted_back(y))

    close(*both(x, w), 1e-6)  # the same FP8 operands; only the order of sums may differ


@pytest.mark.parametrize("recipe", ["tcfp12", "blockwise", "tcfp12_blockwise"])
def test_one_copy_serves_both_products_of_a_transposed_kernel(recipe):
    recipe = tcfp_jax.recipe(recipe)
    x, w = normal(16, 80), normal(48, 80, seed=1)

    @jax.jit
    def both(x, w):
        results = []
        for copies in ("one", "both"):
            stored = quantize_weight(w, recipe, copies=copies)[0]
            read = lambda x, stored=stored: contract(
                matrix_product(2, transposed=True), x, None, recipe=recipe, quantized=stored, shape=w.shape
            )
            y, back = jax.vjp(read, x)
            results.append((y, back(y)))
        return results

    close(*both(x, w), 1e-6)


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8", "rowwise", "tcfp12_blockwise"])
def test_a_tied_head_reads_the_state_of_the_embedding(recipe):
    table, query = normal(48, 32), normal(4, 32, seed=1)
    layer, weight = TCFPEmbed(48, 32, recipe=recipe), Weight(tcfp_jax.recipe(recipe), Layout((1,), (0,)))

    @jax.jit
    def results(params, doubled):
        state = tcfp_jax.layer_state(tcfp_jax.error_feedback({"embedding": weight}).init(doubled))
        attend = lambda variables: layer.apply(variables, query, method="attend")
        return attend({"params": params, "tcfp": state}), attend({"params": doubled})

    close(*results({"embedding": table}, {"embedding": 2 * table}), 1e-6)


def test_bad_input():
    x, w = jnp.ones((2, 3)), jnp.ones((4, 5))
    bf16 = tcfp_jax.recipe("bf16")
    with pytest.raises(ValueError, match=r"axis 1 of x\[2, 3\] does not fit axis 0 of kernel\[4, 5\]"):
        contract(matrix_product(2), x, w, recipe=bf16)
    with pytest.raises(ValueError, match="do not fit a product of 3 and 2 axes"):
        contract(matrix_product(3), x, w, recipe=bf16)
    with pytest.raises(ValueError, match="scalar"):
        matrix_product(0)
    with pytest.raises(ValueError, match="write it out"):
        parse("bk,kn", 2)
    with pytest.raises(ValueError, match="has 2 letters for x, but x has 3 axes"):
        parse("bk,kn->bn", 3)
    for equation in ("bk,kk->b", "bk,bn->bkn", "bk,kn->n", "b...k,k...n->bn"):
        with pytest.raises(NotImplementedError, match="keep the"):
            parse(equation, 2)
    recipe = tcfp_jax.recipe("tensorwise")
    for shape in ((4, 3), (2, 4, 3)):  # the transpose, and a stack of such
        stored = jax.eval_shape(lambda shape=shape: quantize_weight(jnp.ones(shape), recipe)[0])
        with pytest.raises(ValueError, match=r"the stored weight is .*find_weights"):
            contract(matrix_product(2), x, jnp.ones((3, 4)), recipe=recipe, quantized=stored)
    stack, stored = jnp.ones((2, 3, 4)), jax.eval_shape(lambda: quantize_weight(jnp.ones((2, 3, 4)), recipe)[0])
    with pytest.raises(ValueError, match="on its own for each of the stack"):
        contract(parse("etk,ekn->etn", 3), jnp.ones((2, 1, 3)), stack, recipe=recipe, quantized=stored)
