"""`losses.cross_entropy` against float64, within computed bounds, with every option."""

import functools
import math
import operator
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.extend import core
from jax.sharding import PartitionSpec as P

import tcfp_jax
from tcfp_jax.losses import chunks, cross_entropy
from tcfp_jax.products.fp8_weights import quantize_operand
from tcfp_jax.weights.quantization import quantize_weight
from tests.helpers import (
    assert_close,
    decibels,
    drawn,
    float64_of,
    mesh_of,
    parametrize,
    refusals,
    refused,
    slow_except,
)
from tests.loss_cases import (
    IGNORED,
    TARGETS,
    WEIGHTS,
    K,
    T,
    V,
    W,
    X,
    mean_of,
    run,
)

OPTIONS = {
    "plain": {},
    "weights": dict(weights=WEIGHTS),
    "ignored": dict(ignore=-100, weights=WEIGHTS),
    "smoothing": dict(label_smoothing=0.1),
    "z_loss": dict(z_loss=0.01),
    "soft_cap": dict(soft_cap=2.0),
}
OPTIONS["all"] = functools.reduce(operator.or_, OPTIONS.values())
SINGLE = "tcfp12_single"


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


# Values and gradients
# --------------------------------------------------------------------------------------
def exact(logits, targets, weights=None, ignore=-1, soft_cap=None, **options):
    """(loss, gradient of logits) in float64, by optax and automatic differentiation."""

    def mean(logits):
        if soft_cap is not None:
            logits = soft_cap * jnp.tanh(logits / soft_cap)
        labels = jax.nn.one_hot(targets, logits.shape[-1], dtype=jnp.float64)
        labels = optax.smooth_labels(labels, options.get("label_smoothing", 0.0))
        squares = jax.nn.logsumexp(logits, -1) ** 2
        found = optax.softmax_cross_entropy(logits, labels)
        found = found + options.get("z_loss", 0.0) * squares
        shares = jnp.ones(found.shape) if weights is None else weights
        shares = jnp.where(targets == ignore, 0.0, jnp.asarray(shares, jnp.float64))
        return jnp.sum(found * shares) / jnp.sum(shares)

    with jax.enable_x64(True):
        found = jax.value_and_grad(mean)(jnp.asarray(logits, jnp.float64))
        return jax.tree.map(np.asarray, found)


def dequantized(recipe):
    """The head in float64 as the gradient of x reads it."""
    return np.asarray(quantize_weight(W, recipe)[0].dequantize(), np.float64)


def operands(recipe):
    """x and w in float64 as the products see them."""
    if recipe.stored is None:
        return (np.asarray(a.astype(jnp.bfloat16), np.float64) for a in (X, W))
    rows = quantize_operand(X, recipe.activation, recipe).rows
    return float64_of(rows), dequantized(recipe)


@slow_except(
    "bf16-all",
    "tensorwise-plain",
    "tensorwise-ignored",
    "tensorwise-smoothing",
    "tensorwise-z_loss",
    "tensorwise-soft_cap",
)
@parametrize("options", OPTIONS.values(), ids=OPTIONS)
@parametrize("name", ["bf16", "tensorwise", "rowwise"])
def test_value_and_gradients_are_those_of_float64(name, options):
    recipe = tcfp_jax.recipe(name)
    targets = IGNORED if "ignore" in options else TARGETS
    (mean, _), (dx, dw) = run(X, W, targets, recipe=name, chunk=8, **options)
    x, w = operands(recipe)
    if name == "rowwise":  # the forward product and wgrad have scales of their own
        w = float64_of(quantize_weight(W, recipe)[0].for_forward()).T
    logits = x @ w
    wanted, g = exact(logits, targets, **options)
    # float32 sums of K values, then of V.
    of_sums = (K + 8) * np.max(np.abs(x) @ np.abs(w))
    of_logits = 2.0**-24 * (of_sums + 8 * np.max(np.abs(logits)))
    of_squares = 1 + 20 * options.get("z_loss", 0)
    bound = 2 * of_logits * of_squares + V * 2.0**-24 * wanted
    assert abs(float(mean) - wanted) <= bound
    # A gradient of logits differs by its rounding, and by a few errors of the logits
    # times its token's share.
    shares = np.asarray(WEIGHTS if "weights" in options else np.ones(T))
    shares = np.where(np.asarray(targets) == -100, 0, shares)
    shares = (shares / shares.sum())[:, None]
    rounding = np.abs(g) * 2.0**-8
    of_x = 0.0
    if name != "bf16":
        scale = 2 * shares.max() * of_squares / float(jnp.finfo(jnp.float8_e5m2).max)
        # Of E5M2: half of the spacing between neighbours over the smaller one, and the
        # smallest positive value.
        rounding = 2.0**-3 * np.abs(g) + 2.0**-16 * scale / 2
        of_x = 2.0**-4 * np.abs(x).T @ np.abs(g)
    rounding = rounding + 4 * of_logits * shares
    if name == "rowwise":
        w = dequantized(recipe)
        # Chunks have scales of their own, so the bound has the rounding of x
        x = np.asarray(X, np.float64)
        of_x = 2.0**-4 * np.abs(x).T @ np.abs(g)
    of_dw = np.abs(x).T @ rounding + of_x
    assert np.all(np.abs(dx - g @ w.T) <= rounding @ np.abs(w).T + 2.0**-20)
    assert np.all(np.abs(dw - x.T @ g) <= of_dw + 2.0**-20)


def length(found, wanted):
    """Return the length of a gradient along float64's."""
    wanted = np.asarray(wanted)
    return np.vdot(wanted, np.asarray(found, np.float64)) / np.vdot(wanted, wanted)


MANY = 252  # whose inverse E5M2 rounds up by 8 %
COUNTED = jnp.arange(MANY) < 228  # down by 11 %
ALIKE = {
    "plain": {},
    "masked": dict(weights=COUNTED),
    "ignored": dict(ignore=0),
    "two weights": dict(weights=jnp.where(COUNTED, 0.7, 1.0)),
    "signs": dict(weights=jnp.where(COUNTED, 0.7, -0.3)),
    "smoothing": dict(label_smoothing=0.1),
    "z_loss": dict(z_loss=0.02),
    "chunks": dict(chunk=84),
    "all": dict(
        weights=jnp.where(COUNTED, 0.7, 0.0),
        label_smoothing=0.3,
        z_loss=0.02,
        soft_cap=5.0,
    ),
}
SCALED = {
    "float32": tcfp_jax.recipe("tensorwise", scale="float32"),
    "E4M3": tcfp_jax.recipe("nvfp4", activation="float8_e4m3fn", dgrad="full"),
}


@slow_except(
    "tensorwise-plain",
    "tensorwise-two weights",
    "tensorwise-all",
    "rowwise-signs",
    "blockwise-smoothing",
    "tcfp12-masked",
    "float32-z_loss",
)
@parametrize("options", ALIKE.values(), ids=ALIKE)
@parametrize(
    "recipe", ["bf16", "tensorwise", "rowwise", "blockwise", "tcfp12", *SCALED]
)
def test_gradients_that_are_alike_for_all_tokens_keep_their_length(recipe, options):
    """Their roundings would all have one direction, and would not average out."""
    x = drawn(MANY, K)
    w = drawn(K, 256, seed=1) * 0.02
    targets = jnp.asarray(np.random.default_rng(3).integers(0, 256, MANY))
    recipe = SCALED.get(recipe, recipe)
    _, found = run(x, w, targets, recipe=recipe, **options)
    wide_x = np.float64(x)
    wide_w = np.float64(w)
    _, g = exact(wide_x @ wide_w, targets, **options)
    assert length(found[0], g @ wide_w.T) == pytest.approx(1, abs=0.01)
    assert length(found[1], wide_x.T @ g) == pytest.approx(1, abs=0.01)


@parametrize("recipe", ["bf16", "tensorwise", "rowwise"])
def test_gradients_beyond_one_keep_their_size(recipe):
    """Slopes of the z-loss are 9 times the softmax here, and one weight is negative."""
    w = W * 3
    options = dict(z_loss=0.5, weights=WEIGHTS.at[1].set(-1.5))
    _, found = run(X, w, TARGETS, recipe=recipe, **options)
    wide_x = np.float64(X)
    wide_w = np.float64(w)
    _, g = exact(wide_x @ wide_w, TARGETS, **options)
    least = 40 if recipe == "bf16" else 20
    assert decibels(g @ wide_w.T, found[0]) > least
    assert decibels(wide_x.T @ g, found[1]) > least


@slow_except("6-blockwise", "1-bf16")
@parametrize("recipe", ["bf16", "tensorwise", "tcfp12_single", "blockwise", "nvfp4"])
@parametrize("chunk", [T, 6, 1])  # of 6, the last one is filled up
def test_chunks_change_nothing_but_the_scale_of_x(recipe, chunk):
    x = jnp.clip(X, -1, 1).at[:, 0].set(1.0)  # every chunk has the same largest value
    whole, wanted = run(x, W, TARGETS, recipe=recipe)
    in_chunks, found = run(x, W, TARGETS, recipe=recipe, chunk=chunk)
    assert_close(in_chunks, whole, 1e-6)
    # columns have a scale for each chunk
    part = 0.05 if recipe == "blockwise" else 1e-5
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=part * float(jnp.abs(b).max()))


@parametrize("recipe", ["tensorwise", "rowwise", "tcfp12_fast"])
def test_the_sum_over_the_ids_is_accumulated_fully(recipe):
    sums = set()
    for eqn in equations(jax.grad(mean_of(recipe=recipe)), X, W):
        precision = eqn.params.get("precision")
        if isinstance(precision, lax.DotAlgorithm):  # on a GPU
            (contracted, _), _ = eqn.params["dimension_numbers"]
            over = eqn.invars[0].aval.shape[contracted[0]]
            sums.add((over, precision.allow_imprecise_accumulation))
    assert sums == {(K, True), (V, False)}


@pytest.mark.optimized
@slow_except("16-tensorwise")
@parametrize("recipe", ["bf16", "tensorwise"])
@parametrize("chunk", [16, 64])
def test_logits_of_all_tokens_never_exist(recipe, chunk):
    x = jnp.ones((64, 8))
    w = jnp.ones((8, 48))
    loss = mean_of(jnp.zeros(64, int), recipe=recipe, chunk=chunk)
    step = jax.value_and_grad(loss, (0, 1))
    traced = []
    for eqn in equations(step, x, w):
        traced.extend(math.prod(var.aval.shape) for var in eqn.outvars)
    program = jax.jit(step).lower(x, w).compile().as_text()
    shapes = re.findall(r"\b(?:f32|bf16|f8\w+|s32|pred)\[([\d,]+)\]", program)
    compiled = [math.prod(map(int, shape.split(","))) for shape in shapes]
    for sizes in (traced, compiled):
        assert (max(sizes) >= 64 * 48) == (chunk == 64)


# Losses of tokens
# --------------------------------------------------------------------------------------
@parametrize("options", [{}, {"weights": WEIGHTS}], ids=["ones", "weights"])
def test_a_mean_of_the_losses_has_the_gradient_of_the_mean(options):
    shares = options.get("weights", jnp.ones(T))

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1))
    def twice(x, w):
        by_token = cross_entropy(x, w, TARGETS, **options)[1]
        return 2 * jnp.sum(by_token * shares) / jnp.sum(shares)

    wanted = run(X, W, TARGETS, recipe="bf16", **options)[1]
    assert_close(twice(X, W), [2 * gradient for gradient in wanted], 1e-5, 1e-7)


def test_losses_of_ignored_tokens_may_have_any_cotangent():
    def mean(x):
        return cross_entropy(x, W, IGNORED, ignore=-100)[1].sum() / 19

    wanted = run(X, W, IGNORED, recipe="bf16", ignore=-100)[1][0]
    assert_close(jax.grad(mean)(X), wanted, 1e-5, 1e-7)


@parametrize(
    "reduce",
    [
        lambda x: x[0],
        lambda x: jnp.sum(x**2),
        lambda x: x[0] - x[1],
        lambda x: x.sum() + 0.01 * x[3],
    ],
)
def test_another_function_of_the_losses_has_no_gradient(reduce):
    """It raises; a compiled program can only give NaN."""
    gradient = jax.grad(lambda x, w: reduce(cross_entropy(x, w, TARGETS)[1]), (0, 1))
    with refused("differentiate the mean"):
        gradient(X, W)
    for found in jax.jit(gradient)(X, W):
        assert jnp.isnan(found).all()


def test_a_token_of_little_weight_has_a_scale_of_its_own_in_rows():
    weights = jnp.ones(T).at[3].set(1e-5).at[4].set(-1.0)

    def dx(recipe):
        return run(X, W, TARGETS, recipe=recipe, weights=weights)[1][0]

    wanted = dx("bf16")
    for recipe, least in (("rowwise", 19.0), ("tensorwise", 0.0)):
        found = dx(recipe)
        assert decibels(wanted, found) > 22
        assert decibels(wanted[3], found[3]) > least


@parametrize("recipe", ["tcfp12_single", "tensorwise", "rowwise"])
def test_rare_ids_are_pushed_down(recipe):
    # each other id has 8e-7
    w = jnp.full((K, V), -14.0 / K).at[:, 0].set(0.0)
    _, (_, dw) = run(jnp.ones((T, K)), w, jnp.zeros(T, jnp.int32), recipe=recipe)
    np.testing.assert_allclose(dw[:, 1:], np.exp(-14.0), rtol=0.2)


def test_weights_have_a_gradient():
    def loss(weights):
        return 2 * cross_entropy(X, W, TARGETS, weights=weights)[0]

    gradient = jax.jit(jax.grad(loss))
    by_token = cross_entropy(X, W, TARGETS)[1]
    wanted = (2 * by_token - loss(WEIGHTS)) / WEIGHTS.sum()
    assert_close(gradient(WEIGHTS), wanted, 1e-4, 1e-6)
    # A weight of 0 leaves its token out, whose loss is not computed.
    found = gradient(WEIGHTS.at[2].set(0.0))
    wanted = gradient(WEIGHTS.at[2].set(1e-20))
    assert found[2] == 0
    assert_close(jnp.delete(found, 2), jnp.delete(wanted, 2), 1e-4, 1e-6)


# Values that are not numbers, and targets out of range
# --------------------------------------------------------------------------------------
def all_nan(tree):
    return all(jnp.isnan(leaf).all() for leaf in jax.tree.leaves(tree))


@slow_except(f"{V}-rowwise", "-1-tensorwise", f"{2**31 - 1}-bf16", "-1-blockwise")
@parametrize("recipe", ["bf16", "tensorwise", "rowwise", "blockwise"])
@parametrize("wrong", [V, -1, 2**31 - 1])
def test_a_target_out_of_range_is_loud(recipe, wrong):
    targets = TARGETS.at[3].set(wrong)
    (mean, by_token), (dx, dw) = run(X, W, targets, recipe=recipe, chunk=8)
    assert all_nan((mean, by_token[3], dx[3]))
    assert jnp.isfinite(by_token[4])
    assert jnp.isnan(dw).any()


@slow_except("nan-tensorwise", "inf-bf16")
@parametrize("recipe", ["bf16", "tensorwise"])
@parametrize("value", [np.nan, np.inf])
def test_nan_stays_nan_unless_its_token_is_ignored(recipe, value):
    loss = functools.partial(run, recipe=recipe, chunk=8)
    x = X.at[2].set(value)
    (mean, _), (dx, dw) = loss(x, W, TARGETS, ignore=-100)
    assert all_nan((mean, dx[2]))
    assert jnp.isnan(dw).any()
    plain = loss(X, W, IGNORED, ignore=-100)
    hidden = loss(x, W, IGNORED, ignore=-100)
    masked = loss(x, W, TARGETS.at[2].set(V), weights=IGNORED != -100)
    assert_close(hidden, plain, 0)
    assert_close(masked, plain, 0)
    (_, by_token), (dx, _) = hidden
    assert not dx[2].any()
    assert not by_token[2]


def test_a_mean_over_no_tokens_is_nan():
    nobody = jnp.full(T, -1)
    (mean, by_token), gradients = run(X, W, nobody, recipe="tensorwise", ignore=-1)
    assert all_nan((mean, gradients))
    assert not by_token.any()
    mean, by_token = cross_entropy(X[:0], W, TARGETS[:0], recipe="tensorwise")
    assert jnp.isnan(mean)
    assert by_token.shape == (0,)
    assert jax.grad(mean_of(TARGETS[:0]), 1)(X[:0], W).shape == W.shape


@parametrize("of", [0, 1])
def test_losses_of_ignored_tokens_alone_have_a_gradient_of_zero(of):
    def loss(x, w, weights):
        return cross_entropy(x, w, TARGETS, weights=weights)[1].mean()

    args = X, W, jnp.zeros(T)
    assert loss(*args) == 0
    assert_close(jax.grad(loss, of)(*args), jnp.zeros_like(args[of]), 0)


@parametrize("scale", [1e-30, 1e30, 1e38, -3e38])
def test_any_scale_of_the_weights_gives_the_same_mean(scale):
    def loss(x, w, factor):
        return cross_entropy(x, w, TARGETS, weights=factor * (WEIGHTS / 2))

    step = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    assert_close(step(X, W, scale), step(X, W, 1.0), 1e-5, 1e-6)


@parametrize("z_loss", [0.0, 1e-4])
def test_huge_logits_have_finite_losses(z_loss):
    x = X.astype(jnp.float32) * 1e19
    logits = np.float64(x.astype(jnp.bfloat16)) @ np.float64(W.astype(jnp.bfloat16))
    wanted, _ = exact(logits, TARGETS, z_loss=z_loss)
    found, (dx, dw) = run(x, W, TARGETS, recipe="bf16", z_loss=z_loss)
    assert_close(found[0], wanted, 1e-5)
    assert jnp.isfinite(dx).all()
    assert jnp.isfinite(dw).all()


def test_targets_of_64_bits_do_not_wrap():
    with jax.enable_x64(True):
        targets = jnp.asarray(np.asarray(TARGETS, np.int64))
        wrapped = targets.at[0].add(2**32)
        assert wrapped.dtype == jnp.int64
        assert jnp.isnan(mean_of(wrapped)(X, W))
        assert jnp.isfinite(mean_of(targets)(X, W))


# Dtypes, shapes and stored weights
# --------------------------------------------------------------------------------------
@slow_except("float16")
@parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_narrow_activations_keep_their_dtype(dtype):
    x = X.astype(dtype)
    w = W.astype(dtype)
    (mean, _), gradients = run(x, w, TARGETS, recipe="bf16")
    wide = (x.astype(jnp.float32), w.astype(jnp.float32))
    (wanted, _), exact = run(*wide, TARGETS, recipe="bf16")
    assert mean.dtype == jnp.float32
    assert {gradient.dtype for gradient in gradients} == {jnp.dtype(dtype)}
    for a, b in zip((mean, *gradients), (wanted, *exact), strict=True):
        atol = 0.02 * float(jnp.abs(b).max())
        np.testing.assert_allclose(a.astype(jnp.float32), b, rtol=0.02, atol=atol)


@parametrize("scale, arrives", [(1e4, True), (1.0, False)])
def test_a_loss_scale_reaches_a_gradient_before_it_is_float16(scale, arrives):
    loss = mean_of(weights=jnp.ones(T).at[0].set(1e-9))
    gradient = jax.grad(lambda x: scale * loss(x, W.astype(jnp.float16)))
    assert jnp.any(gradient(X.astype(jnp.float16))[0] != 0) == arrives


def test_more_axes_of_tokens_are_tokens():
    one_axis = run(X, W, TARGETS, recipe="tensorwise")
    x = X.reshape(3, 7, K)
    (mean, by_token), (dx, dw) = run(x, W, TARGETS.reshape(3, 7), recipe="tensorwise")
    assert by_token.shape == (3, 7)
    assert dx.shape == (3, 7, K)
    found = (mean, by_token.reshape(T)), (dx.reshape(T, K), dw)
    assert_close(found, one_axis, 0)
    one, of_one = cross_entropy(X[0], W, TARGETS[0])  # a single token without an axis
    assert_close(one, cross_entropy(X, W, TARGETS)[1][0], 1e-6)
    assert of_one.shape == ()


def test_a_frozen_operand_costs_no_product():
    loss = mean_of(recipe=SINGLE)
    of_both = jax.grad(loss, (0, 1))
    of_x = jax.grad(loss)
    counts = [count_products(f, X, W) for f in (loss, of_x, of_both)]
    assert counts[0] < counts[1] < counts[2]
    np.testing.assert_array_equal(of_x(X, W), of_both(X, W)[0])
    stored = quantize_weight(W, tcfp_jax.recipe(SINGLE))[0]
    assert_close(of_x(X, stored), of_x(X, W), 1e-5, 1e-7)


@slow_except("table")  # which is a kernel that is swapped
@parametrize("form", ["kernel", "table"])
def test_a_stored_weight_takes_its_gradient(form):
    def turn(weight):
        if form == "kernel":
            return weight
        return weight.T if isinstance(weight, jax.Array) else weight.swap()

    def loss(params, x):
        return mean_of(recipe=SINGLE)(x, turn(params["kernel"]))

    params = tcfp_jax.store({"kernel": turn(W)}, SINGLE, key=jax.random.key(0))
    value, found = jax.jit(tcfp_jax.value_and_grad(loss))(params, X)
    matrix = params["kernel"].stored.drop_residual().dequantize()  # products read W_hi
    (wanted, _), (_, dw) = run(X, turn(matrix), TARGETS, recipe=SINGLE)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    atol = 2e-3 * float(jnp.abs(dw).max())
    np.testing.assert_allclose(found["kernel"], turn(dw), rtol=0, atol=atol)


# Chunks and mistakes
# --------------------------------------------------------------------------------------
def lengths_of_scans(f, *args):
    found = equations(f, *args)
    return [eqn.params["length"] for eqn in found if eqn.primitive.name == "scan"]


def test_one_chunk_of_tokens_for_each_device_is_the_default(monkeypatch):
    monkeypatch.setattr(chunks, "TOKENS_AT_ONCE", 1)
    assert lengths_of_scans(mean_of(), X, W) == [-(-T // jax.device_count())]
    inside = jax.shard_map(  # where a device has its own tokens
        lambda x, t: cross_entropy(x, W, t)[0][None],
        mesh=mesh_of(2),
        in_specs=(P("a"), P("a")),
        out_specs=P("a"),
    )
    assert lengths_of_scans(inside, X[:20], TARGETS[:20]) == [10]


def test_a_second_derivative_of_rounding_raises():
    def penalty(x, recipe):
        return jnp.sum(jax.grad(mean_of(recipe=recipe))(x, W) ** 2)

    with refused("second derivative", TypeError):
        jax.grad(penalty)(X, "tensorwise")
    assert jnp.any(jax.grad(penalty)(X, "bf16") != 0)


def call(x=X, kernel=W, targets=TARGETS, **options):
    cross_entropy(x, kernel, targets, **options)


test_bad_input = refusals(
    {
        TypeError: {
            "targets have dtype float32": lambda: call(targets=jnp.zeros(T)),
            "weights have dtype complex64": (
                lambda: call(weights=jnp.ones(T, jnp.complex64))
            ),
            "ignore='0' is no target": lambda: call(ignore="0"),
            "x is a list": lambda: call(x=X.tolist()),
            "w has dtype int32": lambda: call(kernel=W.astype(jnp.int32)),
        },
        ValueError: {
            r"targets\[5\] of x\[21, 32\]: each token has one; pass \[21\]": (
                lambda: call(targets=TARGETS[:5])
            ),
            r"weights\[3\] of x\[21, 32\]": lambda: call(weights=jnp.ones(3)),
            "the last axis of x must equal the first of w": lambda: call(kernel=W.T),
            "label_smoothing=1.0 must be from 0 to below 1": (
                lambda: call(label_smoothing=1.0)
            ),
            "z_loss=-1.0 must be 0 or more": lambda: call(z_loss=-1.0),
            "soft_cap=0.0 must be positive": lambda: call(soft_cap=0.0),
            "chunk=0 must be positive": lambda: call(chunk=0),
            "recipe 'fp8' is unknown": lambda: call(recipe="fp8"),
        },
        NotImplementedError: {
            "a head in emulated FP4": lambda: call(recipe="nvfp4_training"),
        },
    }
)
