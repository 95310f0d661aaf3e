"""FP4 codes chosen with care: exhaustive scales, and GPTQ."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from numpy.testing import assert_allclose, assert_array_equal

from pallas_kernels.operands import Fp4, Operand, Row
from tcfp_jax.conversion.transform import transform
from tcfp_jax.formats import exact_share
from tcfp_jax.inference import (
    gptq,
    hessians,
    search_scales,
)
from tcfp_jax.inference.choosing import _table
from tcfp_jax.inference.shared_scales import check_rule
from tcfp_jax.weights.fp4_packing import quantize_fp4
from tests.fp4_choices import (
    INCLUDE,
    RNG,
    H,
    K,
    N,
    W,
    X,
    as_bytes,
    compensated,
    error,
    gptq_by_definition,
    loss,
    nearest,
    nearest_number,
    quick,
    searched,
)
from tests.helpers import parametrize, refused, slow_except

# The scales of blocks
# --------------------------------------------------------------------------------------


@slow_except("nvfp4-square", "mxfp4-vector")
@parametrize(
    "format, tile", [("nvfp4", "vector"), ("nvfp4", "square"), ("mxfp4", "vector")]
)
def test_a_search_is_never_worse_than_a_rule(format, tile):
    rules = (
        ("amax", "four_over_six", "fold_exact")
        if (format, tile) == ("nvfp4", "vector")
        else ("amax",)
    )
    for w in (W, W * jnp.exp(2 * W / 0.02)):  # normal, and heavy tails
        found = error(searched(w, Fp4(format, tile)), w)
        for rule in rules:
            # Stretched to w's length, a result has 1 / (1 - e) times its relative error
            # e.
            assert found <= error(nearest(w, Fp4(format, tile, rule)), w) * 1.02


def test_a_search_finds_the_best_of_all_scales_without_shrinking():
    """The host tries every byte of E4M3 in float64, also outside of the window."""
    found = searched(W)
    w = np.asarray(W, np.float64)
    table = np.arange(1, 127, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float64)
    blocks = np.pad(w, ((0, 0), (0, -K % 16))).reshape(N, -1, 16)
    least = []
    for largest in (256, 288, 320, 352, 384, 416, 448):
        factors = (table * np.abs(w).max() / (6 * largest))[:, None, None, None]
        errors = np.square(nearest_number(blocks / factors) * factors - blocks).sum(
            axis=-1
        )
        least.append(errors.min(axis=0).sum())
    part = min(least) / np.square(w).sum()
    assert_allclose(error(found) / np.square(w).sum(), part / (1 - part), rtol=1e-3)
    assert_allclose(
        np.sum(np.asarray(found.dequantize(), np.float64) * w),
        np.square(w).sum(),
        rtol=1e-6,
    )


@slow_except("search")
@parametrize("scales", ["rule", "search"])
def test_fold_exact_scales_follow_their_rule_for_any_weight(scales):
    """Operands that name the rule keep to it, because FP8 products rely on it."""
    hard = np.array(W)
    hard[0] = 0
    hard[1] = 1e-30
    hard[2, 3] = 1e4
    hard[5:9] = hard[5:9] * 1e-3
    scaling = Fp4(rule="fold_exact")
    for w in (W, jnp.asarray(hard)):
        for made in (compensated(w, H, scaling, scales=scales), searched(w, scaling)):
            assert made.scaling == scaling
            assert exact_share(made.scale) == 1
            check_rule("w", made, "")


def test_a_rule_is_checked_scale_by_scale():
    """`exact_share` of each scale with 384, the rule's largest, is the oracle."""
    every = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn)[:127]
    beside = jnp.stack([jnp.full(127, 384, jnp.float8_e4m3fn), every], axis=1)
    held = np.asarray(quick(jax.vmap(exact_share))(beside)) == 1
    held[every == 448] = False  # with it 384 would have another factor
    assert held[np.isin(every, _table(Fp4(rule="fold_exact")))].all()
    assert 30 < held.sum() < 50

    def of(scale):
        return Operand(
            jnp.zeros((1, 8 * scale.size), jnp.uint8),
            scale[None],
            scaling=Fp4(rule="fold_exact"),
        )

    check_rule(
        "w", of(np.append(every[held], np.float32(np.nan).astype(every.dtype))), ""
    )
    with refused(rf"w has .* but only {held.mean():.1%} of its scales .* repair"):
        check_rule("w", of(every), "repair")
    with refused(r"but only 0\.0% of its scales"):
        check_rule("w", of(every[~held]), "repair")
    # traced, as a template is made
    jax.eval_shape(lambda scale: check_rule("w", of(scale), ""), every)


def test_importance_moves_the_error_to_where_it_matters():
    weighted = searched(W, importance=jnp.diagonal(H))
    assert loss(weighted, np.diag(np.diagonal(H))) < loss(
        searched(W), np.diag(np.diagonal(H))
    )
    assert error(weighted) >= error(searched(W))


@parametrize(
    "choose",
    [searched, lambda w: compensated(w, jnp.eye(w.shape[-1]))],
    ids=["search", "gptq"],
)
def test_hard_blocks(choose):
    """Zeros, tiny values, an outlier, and NaN, which stays within its block."""
    w = np.array(W)
    w[0] = 0
    w[1] = 1e-30
    w[2, 3] = 1e4
    w[3, 5] = np.nan
    w[4, 20] = np.inf
    made = np.asarray(choose(jnp.asarray(w)).dequantize())
    assert np.isnan(made[3, :16]).all()
    assert np.isnan(made[4, 16:32]).all()
    assert np.isnan(made).sum() == 32
    assert not made[0].any()
    assert abs(made[1]).max() < 1e-5
    assert made[2, 3] == pytest.approx(1e4, rel=0.1)
    assert np.isfinite(made[5:]).all()


# GPTQ
# --------------------------------------------------------------------------------------


def test_gptq_is_the_published_algorithm():
    outer = float(jnp.abs(W).max()) / (6 * 448)

    def scale(block):
        wanted = (np.abs(block).max(axis=1) / (6 * outer)).astype(np.float32)
        return wanted.astype(jnp.float8_e4m3fn).astype(np.float64) * outer

    expected = gptq_by_definition(W, H, scale)
    made = np.asarray(compensated(W, H).dequantize())
    close = np.isclose(made, expected, rtol=1e-5, atol=1e-7)
    # Float32 may decide a near tie otherwise, and later columns follow it
    assert close.mean() > 0.97, close.mean()
    wrong = expected - np.asarray(W, np.float64)
    assert loss(compensated(W, H), H) == pytest.approx(
        np.trace(wrong @ np.asarray(H, np.float64) @ wrong.T), rel=0.05
    )


@slow_except(
    "Fp4(format='nvfp4', tile='vector', rule='amax')",
    "Fp4(format='nvfp4', tile='square', rule='amax')",
)
@parametrize(
    "scaling",
    [Fp4(), Fp4(tile="square"), Fp4("mxfp4"), Fp4(rule="four_over_six")],
    ids=str,
)
def test_gptq_halves_the_loss_of_nearest_and_a_search_more(scaling):
    found = loss(compensated(W, H, scaling), H)
    assert found < 0.5 * loss(nearest(W, scaling), H)
    assert scaling != Fp4() or loss(compensated(W, H, scales="search"), H) < found


@slow_except("scaling2-search")
@parametrize("scales", ["rule", "search"])
@parametrize(
    "scaling",
    [Fp4(rule="four_over_six"), Fp4(rule="fold_exact", tile="square"), Fp4("mxfp4")],
)
def test_units_of_weights_and_of_inputs_do_not_matter(scaling, scales):
    wanted = compensated(W, H, scaling, scales=scales)
    found = searched(W, scaling, importance=jnp.diagonal(H))
    for power in (120, 90, 60, -60, -90):
        large = W * 2.0**power
        assert np.array_equal(
            compensated(large, H, scaling, scales=scales).values, wanted.values
        )
        assert np.array_equal(
            searched(large, scaling, importance=jnp.diagonal(H)).values, found.values
        )
    for power in (115, -115):
        others = H * 2.0**power
        assert np.array_equal(
            compensated(W, others, scaling, scales=scales).values, wanted.values
        )
        assert np.array_equal(
            searched(W, scaling, importance=jnp.diagonal(others)).values, found.values
        )
    nothing = searched(W, scaling, importance=jnp.zeros(K))
    assert np.array_equal(nothing.values, searched(W, scaling).values)


@parametrize(
    "choose", [searched, lambda w, scaling: compensated(w, H, scaling, scales="search")]
)
def test_tiles_far_apart_are_searched_alike(choose):
    far = jnp.concatenate([W[:16], W[16:] * 2.0**-90])  # scales of their own, in MXFP4
    apart = jnp.concatenate(
        [choose(W[:16], Fp4("mxfp4")).values, choose(W[16:], Fp4("mxfp4")).values]
    )
    assert np.array_equal(choose(far, Fp4("mxfp4")).values, apart)


@parametrize("choose", [searched, lambda w, scaling: compensated(w, H, scaling)])
def test_the_smallest_weights_are_no_zeros(choose):
    # 6 * 448 scales of that would be a subnormal float32
    tiny = W * (1e-35 / jnp.abs(W).max())
    assert error(choose(tiny, Fp4()), tiny) < 0.03 * np.sum(
        np.square(tiny, dtype=np.float64)
    )


RULES = {
    "amax": Fp4(),
    "mxfp4": Fp4("mxfp4"),
    "squares": Fp4(tile="square"),
    "four": Fp4(rule="four_over_six"),
    "folds": Fp4(rule="fold_exact"),
}


@slow_except("mxfp4", "squares", "folds")
@parametrize("scaling", RULES.values(), ids=RULES)
def test_without_correlations_gptq_is_nearest(scaling):
    # a power of two, at the border of MX's scales
    w = W.at[0, :16].set(0).at[0, 3].set(0.0625)
    made = compensated(w, 7 * jnp.eye(K), scaling)
    expected = nearest(w, scaling)
    for each in zip(as_bytes(made), as_bytes(expected), strict=True):
        assert_array_equal(*each)
    assert (made.outer is None) == (expected.outer is None)
    assert made.outer is None or made.outer == expected.outer


def test_columns_without_inputs_are_worth_something():
    seen = jnp.where(jnp.arange(K) < 16, 1.0, 0.0)
    made = search_scales(W, importance=seen).dequantize()
    assert np.sum(np.square(made - W)[:, 16:]) < 0.03 * np.sum(np.square(W)[:, 16:])


def test_a_stack_is_its_matrices():
    stack = jnp.stack([W, 3 * W])
    moments = jnp.stack([H, jnp.eye(K)])
    for made, expected in (
        (
            compensated(stack, moments),
            [compensated(W, H), compensated(3 * W, jnp.eye(K))],
        ),
        (searched(stack), [searched(W), searched(3 * W)]),
    ):
        assert made.shape == (2, N, K)
        assert made.outer.shape == (2,)
        assert_allclose(
            made.dequantize(),
            jnp.stack([one.dequantize() for one in expected]),
            rtol=1e-6,
        )


def test_a_hessian_that_is_not_finite_is_loud():
    assert jnp.isnan(compensated(W, H.at[0, 0].set(jnp.nan)).dequantize()).all()
    # a layer that no input reached
    assert jnp.isfinite(compensated(W, jnp.zeros((K, K))).dequantize()).all()


@parametrize(
    "call, kind, message",
    [
        (lambda: search_scales(W[:, :39]), ValueError, "k=39 .* is odd"),
        (lambda: search_scales(W[0]), ValueError, "not a matrix"),
        (lambda: search_scales(W.astype(jnp.int32)), TypeError, "int32"),
        (
            lambda: search_scales(W, "nvfp4"),
            TypeError,
            r"scaling='nvfp4' is not FP4; use Fp4",
        ),
        (lambda: gptq(W, H, Row()), TypeError, "is not FP4; use Fp4"),
        (
            lambda: search_scales(W, importance=jnp.ones(3)),
            ValueError,
            r"importance\[3\] does not fit",
        ),
        (lambda: gptq(W, H[:3]), ValueError, r"hessian\[3, 40\] does not fit"),
        (lambda: gptq(W, H, damping=0.0), ValueError, "damping=0.0 must be positive"),
        (lambda: gptq(W, H, scales="best"), ValueError, "scales='best' is unknown"),
        (lambda: hessians(nn.Dense(4), {}, []), TypeError, "neither from transform"),
        (
            lambda: hessians(
                transform(
                    lambda w, x: jnp.sum(x * w[0]), "tensorwise", include=INCLUDE
                ),
                W,
                [X],
            ),
            ValueError,
            "has no converted weight",
        ),
    ],
)
def test_what_cannot_be_done_says_why(call, kind, message):
    with refused(message, kind):
        call()


@parametrize("scaling", [Fp4(), Fp4("mxfp4"), Fp4(tile="square")], ids=str)
@parametrize("shape", [(0, 16), (4, 0)])
def test_matrices_without_values(shape, scaling):
    found = [
        search_scales(jnp.zeros(shape), scaling),
        gptq(jnp.zeros(shape), jnp.eye(shape[1]), scaling),
    ]
    wanted = quantize_fp4(jnp.zeros(shape), scaling)
    assert [jax.tree.map(jnp.shape, one) for one in found] == [
        jax.tree.map(jnp.shape, wanted)
    ] * 2


def test_a_search_keeps_the_length_where_inputs_are_large():
    """Its product with the weight is the weight's with itself, by importance."""
    importance = jnp.asarray(RNG.uniform(0, 1, K) ** 8, jnp.float32)
    found = np.asarray(searched(W, importance=importance).dequantize(), np.float64)
    weights = np.asarray(importance, np.float64)
    weights = weights + 0.01 * weights.mean()
    w = np.asarray(W, np.float64)
    assert np.sum(found * w * weights) == pytest.approx(
        np.sum(w * w * weights), rel=1e-5
    )
    assert np.sum(found * w) != pytest.approx(np.sum(w * w), rel=1e-4)
