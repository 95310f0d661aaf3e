"""`losses.cross_entropy` against float64, within computed bounds, with every option and
transformation.
"""

import functools
import math
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.extend import core
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tcfp_jax
from tcfp_jax import losses
from tcfp_jax.losses import cross_entropy
from tcfp_jax.weights.quantization import quantize_weight
from tests.helpers import decibels, float64_of, mesh_of

T, K, V = 21, 32, 50
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.standard_normal((T, K)), jnp.float32)
W = jnp.asarray(RNG.standard_normal((K, V)) * 0.3, jnp.float32)
TARGETS = jnp.asarray(RNG.integers(0, V, T))
WEIGHTS = jnp.asarray(RNG.uniform(0.5, 2, T), jnp.float32)
IGNORED = TARGETS.at[2].set(-100).at[20].set(-100)
OPTIONS = {
    "plain": {},
    "weights": dict(weights=WEIGHTS),
    "ignored": dict(ignore=-100, weights=WEIGHTS),
    "smoothing": dict(label_smoothing=0.1),
    "z_loss": dict(z_loss=0.01),
    "soft_cap": dict(soft_cap=2.0),
    "all": dict(
        ignore=-100, weights=WEIGHTS, label_smoothing=0.1, z_loss=0.01, soft_cap=2.0
    ),
}


def equations(f, *args):
    """All equations of a traced function, of its loops too."""

    def inside(jaxpr):
        for eqn in jaxpr.eqns:
            yield eqn
            for body in core.jaxprs_in_params(eqn.params):
                yield from inside(body)

    return inside(jax.make_jaxpr(f)(*args).jaxpr)


def count_products(f, *args):
    return [eqn.primitive.name for eqn in equations(f, *args)].count("dot_general")


@functools.partial(
    jax.jit,
    static_argnames=(
        "recipe",
        "ignore",
        "label_smoothing",
        "z_loss",
        "soft_cap",
        "chunk",
    ),
)
def run(x, w, targets, **options):
    return jax.value_and_grad(
        lambda x, w: cross_entropy(x, w, targets, **options), (0, 1), has_aux=True
    )(x, w)


def exact(
    logits,
    targets,
    *,
    weights=None,
    ignore=None,
    label_smoothing=0.0,
    z_loss=0.0,
    soft_cap=None,
):
    """(loss, gradient of logits) in float64, by optax and automatic differentiation."""

    def mean(logits):
        capped = logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)
        one_hot = jax.nn.one_hot(targets, V, dtype=jnp.float64)
        labels = (
            optax.smooth_labels(one_hot, label_smoothing)
            if label_smoothing
            else one_hot
        )
        found = (
            optax.softmax_cross_entropy(capped, labels)
            + z_loss * jax.nn.logsumexp(capped, -1) ** 2
        )
        shares = jnp.ones(T) if weights is None else jnp.asarray(weights, jnp.float64)
        shares = shares if ignore is None else jnp.where(targets == ignore, 0, shares)
        return jnp.sum(found * shares) / jnp.sum(shares)

    with jax.enable_x64(True):
        found = jax.value_and_grad(mean)(jnp.asarray(logits, jnp.float64))
        return jax.tree.map(np.asarray, found)


def operands(recipe, x, w):
    """x and w in float64 as the products see them."""
    if recipe.stored is None:
        return (np.asarray(a.astype(jnp.bfloat16), np.float64) for a in (x, w))
    rows = tcfp_jax.products.fp8_weights.quantize_operand(
        x, recipe.activation, recipe
    ).rows
    return float64_of(rows), np.asarray(
        quantize_weight(w, recipe)[0].dequantize(), np.float64
    )


@pytest.mark.slow_except(
    "bf16-all",
    "tensorwise-plain",
    "tensorwise-ignored",
    "tensorwise-smoothing",
    "tensorwise-z_loss",
    "tensorwise-soft_cap",
)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", ["bf16", "tensorwise", "rowwise"])
def test_value_and_gradients_are_those_of_float64(name, options):
    recipe = tcfp_jax.recipe(name)
    targets = IGNORED if "ignore" in options else TARGETS
    (mean, _), (dx, dw) = run(X, W, targets, recipe=name, chunk=8, **options)
    x, w = operands(recipe, X, W)
    if name == "rowwise":  # the forward product and wgrad have scales of their own
        w = float64_of(quantize_weight(W, recipe)[0].for_forward()).T
    logits = x @ w
    wanted, g = exact(logits, targets, **options)
    # float32 sums of K values, then of V.
    of_logits = (K + 8) * 2.0**-24 * np.max(
        np.abs(x) @ np.abs(w)
    ) + 8 * 2.0**-24 * np.max(np.abs(logits))
    assert (
        abs(float(mean) - wanted)
        <= 2 * of_logits * (1 + 2 * options.get("z_loss", 0) * 10)
        + V * 2.0**-24 * wanted
    )
    # A gradient of logits differs by its rounding, and by a few errors of the logits
    # times its token's share.
    shares = np.asarray(WEIGHTS if "weights" in options else np.ones(T))
    shares = np.where(np.asarray(targets) == -100, 0, shares)
    shares = (shares / shares.sum())[:, None]
    rounding = np.abs(g) * 2.0**-8
    if name != "bf16":
        scale = (
            2
            * shares.max()
            * (1 + 2 * options.get("z_loss", 0) * 10)
            / float(jnp.finfo(jnp.float8_e5m2).max)
        )
        # Of E5M2: half of the spacing between neighbours over the smaller one, and the
        # smallest positive value.
        rounding = 2.0**-3 * np.abs(g) + 2.0**-16 * scale / 2
    rounding = rounding + 4 * of_logits * shares
    if name == "rowwise":
        w = np.asarray(quantize_weight(W, recipe)[0].dequantize(), np.float64)
        # Chunks have scales of their own, so the bound has the rounding of x
        x = np.asarray(X, np.float64)
    wgrad = np.abs(x).T @ rounding + (
        2.0**-4 * np.abs(x).T @ np.abs(g) if name != "bf16" else 0
    )
    assert np.all(np.abs(dx - g @ w.T) <= rounding @ np.abs(w).T + 2.0**-20)
    assert np.all(np.abs(dw - x.T @ g) <= wgrad + 2.0**-20)


@pytest.mark.slow_except("8-blockwise", "1-bf16")
@pytest.mark.parametrize(
    "recipe", ["bf16", "tensorwise", "tcfp12_single", "blockwise", "nvfp4"]
)
@pytest.mark.parametrize("chunk", [T, 8, 1])
def test_chunks_change_nothing_but_the_scale_of_x(recipe, chunk):
    x = jnp.clip(X, -1, 1).at[:, 0].set(1.0)  # every chunk has the same largest value
    (whole, all_losses), wanted = run(x, W, TARGETS, recipe=recipe)
    (mean, by_token), found = run(x, W, TARGETS, recipe=recipe, chunk=chunk)
    np.testing.assert_allclose(mean, whole, rtol=1e-6)
    np.testing.assert_allclose(by_token, all_losses, rtol=1e-6)
    blocks = recipe == "blockwise"  # columns have a scale for each chunk
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(
            a, b, rtol=0, atol=(0.05 if blocks else 1e-5) * float(jnp.abs(b).max())
        )


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "tcfp12_fast"])
def test_the_sum_over_the_ids_is_accumulated_fully(recipe):
    gradient = jax.grad(lambda x: cross_entropy(x, W, TARGETS, recipe=recipe)[0])
    on_gpu = [
        eqn
        for eqn in equations(gradient, X)
        if isinstance(eqn.params.get("precision"), lax.DotAlgorithm)
    ]
    over = lambda eqn: eqn.invars[0].aval.shape[
        eqn.params["dimension_numbers"][0][0][0]
    ]
    sums = {
        (over(eqn), eqn.params["precision"].allow_imprecise_accumulation)
        for eqn in on_gpu
    }
    assert sums == {(K, True), (V, False)}


@pytest.mark.optimized
@pytest.mark.slow_except("tensorwise")
@pytest.mark.parametrize("recipe", ["bf16", "tensorwise"])
def test_logits_of_all_tokens_never_exist(recipe):
    tokens, vocabulary = 64, 48
    x, w = jnp.ones((tokens, 8)), jnp.ones((8, vocabulary))
    loss = lambda x, w, chunk: cross_entropy(
        x, w, jnp.zeros(tokens, int), recipe=recipe, chunk=chunk
    )[0]
    for chunk, there in ((16, False), (tokens, True)):
        step = jax.value_and_grad(functools.partial(loss, chunk=chunk), (0, 1))
        sizes = [
            math.prod(var.aval.shape)
            for eqn in equations(step, x, w)
            for var in eqn.outvars
        ]
        assert (max(sizes) >= tokens * vocabulary) == there
        program = jax.jit(step).lower(x, w).compile().as_text()
        shapes = re.findall(r"\b(?:f32|bf16|f8\w+|s32|pred)\[([\d,]+)\]", program)
        assert (
            max(math.prod(map(int, shape.split(","))) for shape in shapes)
            >= tokens * vocabulary
        ) == there


def test_a_mean_of_the_losses_has_the_gradient_of_the_mean():
    of_mean = run(X, W, TARGETS, recipe="bf16")[1]
    for options, reduce in (
        ({}, lambda losses: losses.mean()),
        (
            dict(weights=WEIGHTS),
            lambda losses: jnp.sum(losses * WEIGHTS) / jnp.sum(WEIGHTS),
        ),
    ):
        found = jax.jit(
            jax.grad(
                lambda x, w: 2 * reduce(cross_entropy(x, w, TARGETS, **options)[1]),
                (0, 1),
            )
        )(X, W)
        wanted = run(X, W, TARGETS, recipe="bf16", **options)[1] if options else of_mean
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, 2 * b, rtol=1e-5, atol=1e-7),
            found,
            wanted,
        )
    # Tokens that are ignored have no loss, and may have any cotangent.
    found = jax.grad(lambda x: cross_entropy(x, W, IGNORED, ignore=-100)[1].sum() / 19)(
        X
    )
    np.testing.assert_allclose(
        found,
        run(X, W, IGNORED, recipe="bf16", ignore=-100)[1][0],
        rtol=1e-5,
        atol=1e-7,
    )


@pytest.mark.parametrize(
    "reduce", [lambda x: x[0], lambda x: jnp.sum(x**2), lambda x: x[0] - x[1]]
)
def test_another_function_of_the_losses_has_no_gradient(reduce):
    """It raises; a compiled program can only give NaN."""
    gradient = jax.grad(lambda x, w: reduce(cross_entropy(x, w, TARGETS)[1]), (0, 1))
    with pytest.raises(ValueError, match="differentiate the mean"):
        gradient(X, W)
    dx, dw = jax.jit(gradient)(X, W)
    assert jnp.isnan(dx).all() and jnp.isnan(dw).all()


def test_a_token_of_little_weight_has_a_scale_of_its_own_in_rows():
    weights = jnp.ones(T).at[3].set(1e-5).at[4].set(-1.0)
    exact = run(X, W, TARGETS, recipe="bf16", weights=weights)[1][0]
    for recipe, least in (("rowwise", 19.0), ("tensorwise", 0.0)):
        dx = run(X, W, TARGETS, recipe=recipe, weights=weights)[1][0]
        assert decibels(exact, dx) > 22 and decibels(exact[3], dx[3]) > least


@pytest.mark.parametrize("recipe", ["tcfp12_single", "tensorwise", "rowwise"])
def test_rare_ids_are_pushed_down(recipe):
    # each other id has 8e-7
    x, w = jnp.ones((T, K)), jnp.full((K, V), -14.0 / K).at[:, 0].set(0.0)
    (_, _), (_, dw) = run(x, w, jnp.zeros(T, jnp.int32), recipe=recipe)
    np.testing.assert_allclose(dw[:, 1:], np.exp(-14.0), rtol=0.2)


def test_weights_have_a_gradient():
    loss = lambda weights: cross_entropy(X, W, TARGETS, weights=weights)[0]
    found, by_token = jax.grad(loss)(WEIGHTS), cross_entropy(X, W, TARGETS)[1]
    np.testing.assert_allclose(
        found, (by_token - loss(WEIGHTS)) / WEIGHTS.sum(), rtol=1e-4, atol=1e-6
    )
    # A weight of 0 leaves its token out, whose loss is not computed.
    found, masked = (
        jax.jit(jax.grad(loss))(WEIGHTS.at[2].set(0.0)),
        WEIGHTS.at[2].set(1e-20),
    )
    assert found[2] == 0
    np.testing.assert_allclose(
        jnp.delete(found, 2),
        jnp.delete(jax.grad(loss)(masked), 2),
        rtol=1e-4,
        atol=1e-6,
    )


@pytest.mark.slow_except(
    f"{V}-rowwise", "-1-tensorwise", f"{2**31 - 1}-bf16", "-1-blockwise"
)
@pytest.mark.parametrize("recipe", ["bf16", "tensorwise", "rowwise", "blockwise"])
@pytest.mark.parametrize("wrong", [V, -1, 2**31 - 1])
def test_a_target_out_of_range_is_loud(recipe, wrong):
    (mean, by_token), (dx, dw) = run(
        X, W, TARGETS.at[3].set(wrong), recipe=recipe, chunk=8
    )
    assert jnp.isnan(mean) and jnp.isnan(by_token[3]) and jnp.isfinite(by_token[4])
    assert jnp.isnan(dx[3]).all() and jnp.isnan(dw).any()


@pytest.mark.slow_except("nan-tensorwise", "inf-bf16")
@pytest.mark.parametrize("recipe", ["bf16", "tensorwise"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_stays_nan_unless_its_token_is_ignored(recipe, value):
    x = X.at[2].set(value)
    (mean, _), (dx, dw) = run(x, W, TARGETS, recipe=recipe, ignore=-100, chunk=8)
    assert jnp.isnan(mean) and jnp.isnan(dx[2]).all() and jnp.isnan(dw).any()
    hidden, plain = (
        run(x, W, IGNORED, recipe=recipe, ignore=-100, chunk=8) for x in (x, X)
    )
    jax.tree.map(np.testing.assert_array_equal, hidden, plain)
    assert not hidden[1][0][2].any() and not hidden[0][1][2]
    masked = run(
        x, W, TARGETS.at[2].set(V), recipe=recipe, weights=IGNORED != -100, chunk=8
    )
    jax.tree.map(np.testing.assert_array_equal, masked, plain)


def test_a_mean_over_no_tokens_is_nan():
    (mean, by_token), (dx, dw) = run(X, W, jnp.full(T, -1), recipe="bf16", ignore=-1)
    assert (
        jnp.isnan(mean)
        and jnp.isnan(by_token).all()
        and jnp.isnan(dx).all()
        and jnp.isnan(dw).all()
    )
    mean, by_token = cross_entropy(X[:0], W, TARGETS[:0], recipe="tensorwise")
    assert jnp.isnan(mean) and by_token.shape == (0,)
    assert (
        jax.grad(lambda w: cross_entropy(X[:0], w, TARGETS[:0])[0])(W).shape == W.shape
    )


@pytest.mark.slow_except("float16")
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_narrow_activations_keep_their_dtype(dtype):
    x, w = X.astype(dtype), W.astype(dtype)
    (mean, _), (dx, dw) = run(x, w, TARGETS, recipe="bf16")
    wide = run(x.astype(jnp.float32), w.astype(jnp.float32), TARGETS, recipe="bf16")
    assert mean.dtype == jnp.float32 and dx.dtype == dw.dtype == dtype
    for a, b in zip((mean, dx, dw), (wide[0][0], *wide[1]), strict=True):
        np.testing.assert_allclose(
            a.astype(jnp.float32), b, rtol=0.02, atol=0.02 * float(jnp.abs(b).max())
        )
    # A loss scale reaches a gradient before it is rounded to float16.
    if dtype == jnp.float16:
        small = lambda x, s: (
            s * cross_entropy(x, w, TARGETS, weights=jnp.ones(T).at[0].set(1e-9))[0]
        )
        assert jnp.any(jax.grad(small)(x, 1e4)[0] != 0) and not jnp.any(
            jax.grad(small)(x, 1.0)[0] != 0
        )


def test_more_axes_of_tokens_are_tokens():
    shape = (3, 7)
    (mean, _), (dx, dw) = run(X, W, TARGETS, recipe="tensorwise")
    (other, by_token2), (dx2, dw2) = run(
        X.reshape(*shape, K), W, TARGETS.reshape(shape), recipe="tensorwise"
    )
    assert mean == other and dx2.shape == (*shape, K) and by_token2.shape == shape
    np.testing.assert_array_equal(dx2.reshape(T, K), dx)
    np.testing.assert_array_equal(dw2, dw)
    one, of_one = cross_entropy(X[0], W, TARGETS[0])  # a single token without an axis
    np.testing.assert_allclose(one, cross_entropy(X, W, TARGETS)[1][0], rtol=1e-6)
    assert of_one.shape == ()


@pytest.mark.slow_except("tensorwise")
@pytest.mark.parametrize("recipe", ["bf16", "tensorwise"])
def test_transformations(recipe):
    loss = lambda x, w, t: cross_entropy(x, w, t, recipe=recipe, chunk=4)[0]
    gradients = jax.jit(jax.value_and_grad(loss, (0, 1)))
    xs, ts, ws = (
        X[:18].reshape(3, 6, K),
        TARGETS[:18].reshape(3, 6),
        jnp.stack([W, 2 * W, -W]),
    )
    one_by_one = [gradients(xs[i], ws[i], ts[i]) for i in range(3)]
    wanted = jax.tree.map(lambda *leaves: jnp.stack(leaves), *one_by_one)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, jax.vmap(gradients)(xs, ws, ts), wanted)
    jax.tree.map(close, lax.map(lambda args: gradients(*args), (xs, ws, ts)), wanted)
    again = jax.jit(jax.value_and_grad(jax.checkpoint(loss), (0, 1)))
    jax.tree.map(close, again(xs[0], ws[0], ts[0]), one_by_one[0])

    def summed(xs, w):  # the gradient of a scan over batches
        return lax.scan(
            lambda total, args: (total + loss(args[0], w, args[1]), None), 0.0, (xs, ts)
        )[0]

    dxs, dw = jax.jit(jax.grad(summed, (0, 1)))(xs, W)
    alone = [gradients(xs[i], W, ts[i])[1] for i in range(3)]
    close(dxs, jnp.stack([dx for dx, _ in alone]))
    close(dw, sum(dw for _, dw in alone))


def test_a_frozen_operand_costs_no_product():
    loss = lambda x, w: cross_entropy(x, w, TARGETS, recipe="tcfp12_single")[0]
    both, of_x = (
        count_products(jax.grad(loss, (0, 1)), X, W),
        count_products(jax.grad(loss), X, W),
    )
    assert count_products(loss, X, W) < of_x < both
    np.testing.assert_array_equal(jax.grad(loss)(X, W), jax.grad(loss, (0, 1))(X, W)[0])
    stored = quantize_weight(W, tcfp_jax.recipe("tcfp12_single"))[0]
    np.testing.assert_allclose(
        jax.grad(loss)(X, stored), jax.grad(loss)(X, W), rtol=1e-5, atol=1e-7
    )


@pytest.mark.slow_except("table")  # which is a kernel that is swapped
@pytest.mark.parametrize("form", ["kernel", "table"])
def test_a_stored_weight_takes_its_gradient(form):
    recipe = tcfp_jax.recipe("tcfp12_single")
    floats = {"kernel": W if form == "kernel" else W.T}
    params = tcfp_jax.store(floats, recipe, key=jax.random.key(0))
    kernel = (
        (lambda p: p["kernel"]) if form == "kernel" else (lambda p: p["kernel"].swap())
    )
    loss = lambda p, x: cross_entropy(x, kernel(p), TARGETS, recipe=recipe)[0]
    value, found = jax.jit(tcfp_jax.value_and_grad(loss))(params, X)
    matrix = params["kernel"].stored.drop_residual().dequantize()  # products read W_hi
    (wanted, _), (_, dw) = run(
        X, matrix if form == "kernel" else matrix.T, TARGETS, recipe="tcfp12_single"
    )
    assert found["kernel"].shape == floats["kernel"].shape
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    np.testing.assert_allclose(
        found["kernel"],
        dw if form == "kernel" else dw.T,
        rtol=0,
        atol=2e-3 * float(jnp.abs(dw).max()),
    )


@pytest.mark.slow_except("both-tensorwise")
@pytest.mark.parametrize("name", ["bf16", "tensorwise"])
@pytest.mark.parametrize("split", ["tokens", "vocabulary", "both"])
def test_devices_share_tokens_and_vocabulary(name, split):
    mesh = mesh_of(4, 2)
    x, w, targets = (
        jnp.tile(X[:16], (2, 1)).reshape(8, 4, K),
        W[:, :48],
        (TARGETS[:16] % 48),
    )
    targets = jnp.tile(targets, 2).reshape(8, 4)
    loss = lambda x, w, t: cross_entropy(x, w, t, recipe=name, chunk=16)
    step = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    wanted = step(x, w, targets)
    of_x = P("a") if split != "vocabulary" else P()
    of_w = P(None, "b") if split != "tokens" else P()
    place = lambda array, spec: jax.device_put(array, NamedSharding(mesh, spec))
    with jax.set_mesh(mesh):
        found = step(place(x, of_x), place(w, of_w), place(targets, of_x))
    # Orders of float32 sums differ, and a gradient on the edge between two codes may
    # take the other one.
    atol = 1e-6 if name == "bf16" else 2.0**-4 / 32
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            a, b, rtol=1e-5, atol=atol * float(jnp.abs(b).max())
        ),
        found,
        wanted,
    )


def test_inside_shard_map_it_is_the_loss_of_the_devices_own_tokens():
    mesh, x, targets = mesh_of(2), X[:20], TARGETS[:20]

    def local(x, w, t):
        return lax.pmean(cross_entropy(x, w, t, chunk=4)[0], "a")

    everywhere = jax.shard_map(
        local, mesh=mesh, in_specs=(P("a"), P(), P("a")), out_specs=P()
    )
    found = jax.jit(jax.value_and_grad(everywhere, (0, 1)))(x, W, targets)
    wanted = jax.jit(
        jax.value_and_grad(lambda x, w: cross_entropy(x, w, targets)[0], (0, 1))
    )(x, W)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-4),
        found,
        wanted,
    )


def test_a_second_derivative_raises_where_rounding_would_make_it_zero():
    penalty = lambda x, recipe: jnp.sum(
        jax.grad(lambda x: cross_entropy(x, W, TARGETS, recipe=recipe)[0])(x) ** 2
    )
    with pytest.raises(TypeError, match="second derivative"):
        jax.grad(penalty)(X, "tensorwise")
    assert jnp.any(jax.grad(penalty)(X, "bf16") != 0)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (dict(targets=jnp.zeros(T)), TypeError, "targets have dtype float32"),
        (
            dict(targets=TARGETS[:5]),
            ValueError,
            r"targets\[5\] of x\[21, 32\]: each token has one; pass \[21\]",
        ),
        (dict(weights=jnp.ones(3)), ValueError, r"weights\[3\] of x\[21, 32\]"),
        (
            dict(weights=jnp.ones(T, jnp.complex64)),
            TypeError,
            "weights have dtype complex64",
        ),
        (dict(ignore="0"), TypeError, "ignore='0' is no target"),
        (dict(x=X.tolist()), TypeError, "x is a list"),
        (dict(kernel=W.T), ValueError, r"the last axis of x must equal the first of w"),
        (dict(kernel=W.astype(jnp.int32)), TypeError, "w has dtype int32"),
        (
            dict(label_smoothing=1.0),
            ValueError,
            "label_smoothing=1.0 must be from 0 to below 1",
        ),
        (dict(z_loss=-1.0), ValueError, "z_loss=-1.0 must be 0 or more"),
        (dict(soft_cap=0.0), ValueError, "soft_cap=0.0 must be positive"),
        (dict(chunk=0), ValueError, "chunk=0 must be positive"),
        (dict(recipe="fp8"), ValueError, "recipe 'fp8' is unknown"),
        (dict(recipe="nvfp4_training"), NotImplementedError, "a head in emulated FP4"),
    ],
)
def test_bad_input(change, error, match):
    arguments = dict(x=X, kernel=W, targets=TARGETS) | change
    with pytest.raises(error, match=match):
        cross_entropy(
            arguments.pop("x"),
            arguments.pop("kernel"),
            arguments.pop("targets"),
            **arguments,
        )


def test_explicit_axes_are_refused():
    mesh = mesh_of(2, axis_type=AxisType.Explicit)
    x = jax.device_put(X[:20], NamedSharding(mesh, P("a")))
    with jax.set_mesh(mesh), pytest.raises(NotImplementedError, match="explicit axes"):
        cross_entropy(x, W, TARGETS[:20])


def test_targets_of_64_bits_do_not_wrap():
    with jax.enable_x64(True):
        wrapped = jnp.asarray(np.asarray(TARGETS, np.int64)).at[0].add(2**32)
        assert wrapped.dtype == jnp.int64 and jnp.isnan(cross_entropy(X, W, wrapped)[0])
        assert jnp.isfinite(cross_entropy(X, W, wrapped.at[0].add(-(2**32)))[0])


def test_one_chunk_of_tokens_for_each_device_is_the_default(monkeypatch):
    monkeypatch.setattr(losses, "TOKENS_AT_ONCE", 1)
    found = equations(lambda x: cross_entropy(x, W, TARGETS)[0], X)
    assert [eqn.params["length"] for eqn in found if eqn.primitive.name == "scan"] == [
        -(-T // jax.device_count())
    ]
    inside = jax.shard_map(  # where a device has its own tokens
        lambda x, t: cross_entropy(x, W, t)[0][None],
        mesh=mesh_of(2),
        in_specs=(P("a"), P("a")),
        out_specs=P("a"),
    )
    found = equations(inside, X[:20], TARGETS[:20])
    assert [eqn.params["length"] for eqn in found if eqn.primitive.name == "scan"] == [
        10
    ]


def test_the_number_of_tokens_may_stay_open_in_an_export():
    (tokens,) = jax.export.symbolic_shape("tokens")
    step = jax.jit(
        jax.value_and_grad(lambda x, t: cross_entropy(x, W, t, recipe="tensorwise")[0])
    )
    shapes = (
        jax.ShapeDtypeStruct((tokens, K), jnp.float32),
        jax.ShapeDtypeStruct((tokens,), jnp.int32),
    )
    found, wanted = jax.export.export(step)(*shapes).call(X, TARGETS), step(X, TARGETS)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, wanted
    )


@pytest.mark.slow_except("tensorwise")
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_the_kernel_that_computes_and_quantizes_gradients_agrees_with_the_reference(
    recipe,
):
    keys = jax.random.split(jax.random.key(5), 3)
    x, w = (
        jax.random.normal(keys[0], (32, 16), jnp.bfloat16),
        jax.random.normal(keys[1], (16, 64)),
    )
    targets = jax.random.randint(keys[2], (32,), 0, 64).at[3].set(-100)

    def gradients(backend):
        asked = tcfp_jax.recipe(recipe, quantize_backend=backend)
        loss = lambda x, w: cross_entropy(
            x, w, targets, recipe=asked, ignore=-100, z_loss=1e-3, soft_cap=20.0
        )[0]
        return jax.jit(jax.grad(loss, argnums=(0, 1)))(x, w)

    for got, want in zip(gradients("triton"), gradients("xla"), strict=True):
        got, want = np.float64(got), np.float64(want)
        # A few values of FP8 may be neighbours, because exponentials differ in a bit.
        assert np.linalg.norm(got - want) <= 2e-3 * np.linalg.norm(want)
