"""Conversions of `losses.cross_entropy`: the head and its loss are a product like
others.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import tcfp_jax
from tcfp_jax import transform
from tcfp_jax.conversion import find_weights
from tcfp_jax.losses import cross_entropy
from tcfp_jax.weights.parameter import is_quantized
from tests.helpers import parametrize, slow_except, store_at_once

K, V = 32, 48
RNG = np.random.default_rng(0)
TABLE, HIDDEN, HEAD = (
    jnp.asarray(RNG.standard_normal(s) / 6, jnp.float32)
    for s in ((V, K), (K, K), (K, V))
)
PARAMS = {"table": TABLE, "hidden": HIDDEN, "head": HEAD}
IDS = jnp.asarray(RNG.integers(0, V, (2, 9)))
WITH_HEAD = ("linear", "small", "head")


def hidden(params, ids):
    return jnp.tanh(params["table"][ids] @ params["hidden"])


def model(form, **options):
    """A model whose loss reads the head in a form: its own matrix, the table, or in a
    loop, a jit, a checkpoint.
    """

    def loss(params, ids):
        w = params["table"].T if form == "tied" else params["head"]

        def of(x, w, ids):
            return cross_entropy(x, w, ids, **options)[0]

        if form == "jit":
            of = jax.jit(of)
        if form == "checkpoint":
            of = jax.checkpoint(of)
        if form == "scan":

            def step(total, one):
                return (total + of(one[0], w, one[1]) / len(ids), None)

            return jax.lax.scan(step, jnp.float32(0), (hidden(params, ids), ids))[0]
        return of(hidden(params, ids), w, ids)

    return loss


def records(converted):
    report = converted.examine(PARAMS, IDS).report
    return {
        record.product.path: record for record in (*report.converted, *report.skipped)
    }


@parametrize("form", ["tied", "untied"])
def test_the_head_is_a_product_of_the_report(form):
    path = "table" if form == "tied" else "head"
    left = records(transform(model(form), "tensorwise", include=("linear", "small")))[
        path
    ]
    assert left.recipe is None
    assert left.reason.startswith("output head; include=")
    found = records(transform(model(form), "tensorwise", include=WITH_HEAD))[path]
    assert found.recipe == tcfp_jax.recipe("tensorwise")
    assert found.stored
    assert found.product.primitive == "cross_entropy"
    assert (found.product.k, found.product.n, found.product.rows) == (
        K,
        V,
        IDS.size,
    )
    assert found.product.head
    assert found.product.layout.transposed == (form == "tied")
    ruled = records(
        transform(
            model(form),
            "tensorwise",
            rules={path: "rowwise"},
            include=("linear", "small"),
        )
    )[path]
    assert ruled.recipe == tcfp_jax.recipe("rowwise")


@slow_except("tied")
@parametrize("form", ["tied", "untied", "jit", "scan", "checkpoint"])
def test_a_converted_head_is_the_operation_by_its_recipe(form):
    path = "table" if form == "tied" else "head"
    by_rule = transform(
        model(form, z_loss=0.01),
        "tensorwise",
        rules={"hidden": None},
        include=WITH_HEAD,
    )
    by_hand = model(form, z_loss=0.01, recipe="tensorwise")
    found, wanted = (
        jax.jit(jax.value_and_grad(f))(PARAMS, IDS) for f in (by_rule, by_hand)
    )
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-6)
    for name in {path, "hidden"}:
        assert np.allclose(found[1][name], wanted[1][name], rtol=1e-5, atol=1e-7)


@slow_except("tied")
@parametrize("form", ["tied", "untied"])
def test_a_stored_head_is_multiplied_and_takes_its_gradient(form):
    path = "table" if form == "tied" else "head"
    converted = transform(
        model(form),
        "tcfp12_single",
        rules={"hidden": None},
        include=(*WITH_HEAD, "embed"),
    )
    weights = find_weights(converted, PARAMS, IDS)
    params = store_at_once(PARAMS, weights, key=jax.random.key(0))
    assert is_quantized(params[path])
    value, gradients = jax.jit(tcfp_jax.value_and_grad(converted))(params, IDS)
    floats = tcfp_jax.dequantize(params)
    # The same head by hand, of W_hi, and rows of hi + lo.
    hi = params[path].stored.drop_residual().dequantize()

    def by_hand(head):
        return cross_entropy(
            hidden(floats, IDS),
            head.T if form == "tied" else head,
            IDS,
            recipe="tcfp12_single",
        )[0]

    wanted, of_head = jax.jit(jax.value_and_grad(by_hand))(hi)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    assert gradients[path].shape == PARAMS[path].shape
    if form == "untied":
        np.testing.assert_allclose(
            gradients[path], of_head, rtol=0, atol=1e-2 * float(jnp.abs(of_head).max())
        )


def test_heads_that_no_recipe_can_change_say_so():
    def batched(p, ids):
        return jax.vmap(lambda x, t: cross_entropy(x, p["head"], t)[0])(
            hidden(p, ids), ids
        )

    assert (
        records(transform(batched, "tensorwise", include=WITH_HEAD))["head"].reason
        == "inside custom_vjp_call"
    )

    def merged(p, ids):
        return cross_entropy(hidden(p, ids), p["head"].reshape(K, V), ids)[0]

    split = {**PARAMS, "head": HEAD.reshape(K, 2, V // 2)}
    report = (
        transform(merged, "tensorwise", include=WITH_HEAD).examine(split, IDS).report
    )
    assert [r.reason for r in report.skipped] == ["its table has merged axes"]
    emulated = records(transform(model("untied"), "nvfp4_training", include=WITH_HEAD))[
        "head"
    ]
    assert emulated.recipe is None
    assert emulated.reason == "nvfp4_training has no head with its loss"


@parametrize("by_hand", ["optax", "log_softmax"])
def test_a_softmax_by_hand_is_told_of_the_operation(by_hand):
    def loss(params, ids):
        logits = hidden(params, ids) @ params["head"]
        if by_hand == "optax":
            return optax.softmax_cross_entropy_with_integer_labels(logits, ids).mean()
        return -jnp.take_along_axis(
            jax.nn.log_softmax(logits), ids[..., None], -1
        ).mean()

    line = (
        "a softmax follows head: losses.cross_entropy saves its logits, 0.00173 MB in"
        " BF16"
    )
    assert line in str(
        transform(loss, "tensorwise", include=WITH_HEAD).examine(PARAMS, IDS).report
    )

    def other(params, ids):
        return jnp.sum(hidden(params, ids) @ params["head"])

    for silent in (other, model("untied")):
        assert "softmax" not in str(
            transform(silent, "tensorwise", include=WITH_HEAD)
            .examine(PARAMS, IDS)
            .report
        )


def test_a_table_of_two_heads_adds_their_gradients():
    def loss(params, ids):
        x = hidden(params, ids)

        def of(x, ids):
            return cross_entropy(x, params["head"], ids)[0]

        return of(x[:, :-1], ids[:, 1:]) + 0.5 * of(x[:, :-2], ids[:, 2:])

    converted = transform(
        loss, "tcfp12_single", rules={"hidden": None}, include=WITH_HEAD
    )
    assert [
        record.product.path
        for record in converted.examine(PARAMS, IDS).report.converted
    ] == ["head", "head"]
    weights = find_weights(converted, PARAMS, IDS)
    params = store_at_once(PARAMS, weights, key=jax.random.key(0))
    found = jax.jit(tcfp_jax.grad(converted))(params, IDS)["head"]
    wanted = jax.jit(jax.grad(loss))(
        {**PARAMS, "head": params["head"].dequantize()}, IDS
    )["head"]
    assert float(jnp.linalg.norm(found - wanted)) < 0.1 * float(jnp.linalg.norm(wanted))
