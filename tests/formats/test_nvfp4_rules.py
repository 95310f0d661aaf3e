"""The rules by which tiles of NVFP4 find scales: amax / 6, four over six, fold-exact,
and one level alone.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tcfp_jax import formats
from tcfp_jax.formats import datatype, exact_share
from tcfp_jax.formats.rounding import Modes
from tests.formats_oracles import QUICK, packed_and_cast, quick, same, same_bits
from tests.helpers import parametrize, refused, slow_except

RULES = ("max", "four_over_six", "fold_exact")
CODES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
EVERY_SCALE = (
    np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
)
# Mantissas of 1, 1.25 and 1.5 in the twelve binades that one factor brings into E4M3's
# range, and 0.
FOLDED = EVERY_SCALE[np.isin(np.frexp(EVERY_SCALE)[0] * 2, (0, 1, 1.25, 1.5))]
FOLDED = FOLDED[(FOLDED == 0) | (FOLDED >= 2.0**-3)]
every_rule = parametrize("rule", RULES)
# The shape of every array except squares, so that each rule compiles once
SHAPE = (128, 64)


def normal(shape=SHAPE):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def cast(x, rule):
    """Return (the packed array, the cast), and check that unpacking gives the cast."""
    packed, unpacked, found = packed_and_cast(
        jnp.asarray(x), formats.nvfp4, scalemode=rule
    )
    assert same_bits(unpacked, found)
    return packed, found


def noise(x, got):
    """Return the signal-to-noise ratio in dB."""
    x = np.asarray(x, np.float64)
    got = np.asarray(got, np.float64)
    return 10 * np.log10(np.sum(x**2) / np.sum((x - got) ** 2))


def scales_of(packed):
    return np.asarray(packed.scales).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def oracle(x, rule):
    """Compute the rules in float64, with NVFP4's float32 products; candidates never tie
    here.
    """
    blocks = np.asarray(x, np.float32).reshape(-1, 16)
    outer = np.float32(
        np.abs(blocks).max() / np.float32(6 * (448 if rule == "max" else 256))
    )
    amax = np.abs(blocks).max(-1, keepdims=True).astype(np.float64)
    if rule == "fold_exact":
        first = np.searchsorted(FOLDED, amax / np.float32(outer * np.float32(6.375)))
        candidates = [FOLDED[np.minimum(first + i, len(FOLDED) - 1)] for i in range(3)]
    else:
        candidates = []
        for top in (6, 4) if rule == "four_over_six" else (6,):
            quotient = amax / np.float32(outer * np.float32(top))
            scale = quotient.astype(ml_dtypes.float8_e4m3fn)
            candidates.append(scale.astype(np.float32))
    found = None
    least = None
    for scale in candidates:
        factor = (scale * outer).astype(np.float32)
        rounded = (
            np.clip(blocks.astype(np.float64) / factor, -6, 6)
            .astype(ml_dtypes.float4_e2m1fn)
            .astype(np.float32)
        )
        values = rounded * factor
        inverse = np.float32(1) / factor
        steps = np.rint(
            (np.abs(blocks) * inverse).astype(np.float32) * np.float32(256)
        ) - 256 * np.abs(rounded)
        error = (
            np.sum(steps**2, -1, keepdims=True).astype(np.float32) * (scale * scale)
        ).astype(np.float32)
        if found is None:
            found = values
            least = error
        found = np.where(error < least, values, found)
        least = np.minimum(error, least)
    return found.reshape(x.shape)


@slow_except("fold_exact")
@every_rule
def test_tiles_take_the_better_candidate(rule):
    x = normal()
    x[1] = np.ldexp(x[1], -8)
    for spread in (1.0, 1e-30, 1e30) if rule == "max" else (1.0,):
        assert same(
            cast(x * np.float32(spread), rule)[1], oracle(x * np.float32(spread), rule)
        )


def test_what_the_rules_are_worth():
    x = normal()
    decibels = {rule: noise(x, cast(x, rule)[1]) for rule in RULES}
    assert decibels["max"] == pytest.approx(20.4, abs=0.15)
    assert decibels["fold_exact"] == pytest.approx(20.8, abs=0.15)
    assert decibels["four_over_six"] == pytest.approx(21.2, abs=0.15)


def in_e4m3(products):
    return products.astype(ml_dtypes.float8_e4m3fn).astype(np.float32) == products


def test_folded_scales_times_codes_are_numbers_of_e4m3():
    """Check every folded scale with every code, and `exact_share` for all other
    scales.
    """
    assert len(FOLDED) == 37
    assert FOLDED[-1] == 384
    assert in_e4m3(FOLDED[:, None] / 8 * CODES).all()
    small = EVERY_SCALE[EVERY_SCALE < 64]
    # Next to a scale in the binade of 32, exponents do not shift.
    pairs = jnp.asarray(
        np.stack([np.full_like(small, 32), small], -1), jnp.float8_e4m3fn
    )
    shares = jax.jit(jax.vmap(exact_share), compiler_options=QUICK)(pairs)
    assert np.array_equal(shares == 1, in_e4m3(small[:, None] * CODES).all(-1))
    assert np.isin(shares, (0.5, 1)).all()


def test_folded_scales_have_three_mantissas_and_are_exact():
    x = normal()
    share = jax.jit(exact_share, compiler_options=QUICK)
    scales = {rule: scales_of(cast(x, rule)[0]) for rule in RULES}
    assert np.isin(scales["fold_exact"], FOLDED).all()
    assert len(np.unique(scales["fold_exact"])) > 6
    # Rows far below the largest one have the least of them, so that these are exact,
    # too.
    low = np.concatenate([x[:64], np.ldexp(x[64:], -14)])
    low = scales_of(cast(low, "fold_exact")[0])
    bad = np.tile(np.float32([1, np.nan, 0, 384]), scales["max"].size // 4)
    shares = [
        float(share(jnp.asarray(s, jnp.float8_e4m3fn)))
        for s in (scales["fold_exact"], scales["max"], low, bad)
    ]
    assert shares == [1, pytest.approx(0.4, abs=0.1), 1, 0.75]
    assert 0.4 < (low == 2.0**-3).mean() < 0.5


@every_rule
def test_nothing_is_clipped_by_more_than_amax_over_6_may_clip(rule):
    x = np.random.default_rng(2).uniform(0.2, 6, SHAPE).astype(np.float32)
    packed, _ = cast(x, rule)
    outer = np.asarray(packed.outer).view(np.float32)
    assert np.max(x.reshape(-1, 16).max(-1) / (scales_of(packed) * outer)) <= 6.375 * (
        1 + 1e-6
    )


@slow_except("max")
@every_rule
def test_square_tiles_and_their_transpose_agree(rule):
    w = jnp.asarray(normal((48, 48)))
    found = quick(w, formats.nvfp4s, scalemode=rule)
    assert same(found.T, quick(w.T, formats.nvfp4s, scalemode=rule))
    assert noise(w, found) > 18.5
    assert same(found, quick(w, formats.nvfp4s)) == (rule == "max")
    vectors = quick(w, formats.nvfp4, scalemode=rule)
    assert not same(vectors.T, quick(w.T, formats.nvfp4, scalemode=rule))


@slow_except("nvfp4-four_over_six", "nvfp4s-fold_exact")
@parametrize(
    ("name", "rule"),
    [
        *(("nvfp4", rule) for rule in RULES),
        ("nvfp4s", "fold_exact"),
        ("nvfp4_one_level", "max"),
    ],
)
def test_stochastic_rounding_never_clips_and_has_no_bias(name, rule):
    # The largest value of a tile would be clipped where its scale is rounded down.
    x = np.random.default_rng(3).uniform(0.5, 6, (32, 32)).astype(np.float32)
    count = 512
    made = getattr(formats, name)

    def one(key):
        return formats.cast(x, made, roundmode="stochastic", key=key, scalemode=rule)

    drawn = jax.jit(jax.vmap(one), compiler_options=QUICK)(
        jax.random.split(jax.random.key(4), count)
    )
    errors = np.asarray(drawn, np.float64).mean(0) - x
    # A step is at most twice a scale, of which the largest is 4/3 of 6/6.
    deviation = 4 / 3 / np.sqrt(count)
    assert np.abs(errors).max() < 5 * deviation
    assert abs(errors.mean()) < 5 * deviation / np.sqrt(x.size)
    tops = x == x.reshape(32, 2, 16).max(-1).repeat(16, -1).reshape(32, 32)
    assert abs(errors[tops].mean()) < 5 * deviation / np.sqrt(tops.sum())


@every_rule
def test_tiles_that_are_hard(rule):
    x = normal()
    x[0, :16] = 0.0
    x[1, :16] = 1e-20
    x[2, 3] = np.nan
    x[3, 5] = np.inf
    x[4, 7] = 1e4
    x[5, :16] = 1e-42
    packed, got = cast(x, rule)
    got = np.asarray(got)
    scales = scales_of(packed).reshape(128, 4)
    assert not got[0, :16].any()
    assert scales[0, 0] == 0
    assert scales[5, 0] == 0
    assert not got[1, :16].any()
    assert scales[1, 0] == (2.0**-3 if rule == "fold_exact" else 2.0**-9)
    assert np.isnan(got[2, :16]).all()
    assert np.isfinite(got[2, 16:]).all()
    assert np.isfinite(got[3]).all()
    assert got[3, 5] == got[3, :16].max()
    assert got[4, 7] == pytest.approx(1e4, rel=0.07)
    assert np.isfinite(got[4]).all()
    assert not np.asarray(cast(np.zeros_like(x), rule)[1]).any()
    assert np.isfinite(cast(np.full_like(x, 2.0**-126), rule)[1]).all()


def test_one_level_and_where_its_scale_ends():
    made = formats.nvfp4_one_level
    assert made == datatype("e2m1f", "e4m3fn_t16")
    assert made.bits_per_value() == 4.5
    x = np.zeros(SHAPE, np.float32)
    x[:6] = np.float32([3.0, 6 * 448.0, 1e4, 6 * 2.0**-9, 2.0**-10, 1e-6])[:, None]
    x[6:] = normal()[6:]
    packed, unpacked, cast = packed_and_cast(jnp.asarray(x), made)
    # The largest scale saturates; the smallest is kept, until every value rounds to
    # zero below it.
    assert scales_of(packed)[:24:4].tolist() == [
        0.5,
        448.0,
        448.0,
        2.0**-9,
        2.0**-9,
        2.0**-9,
    ]
    assert cast[:6, 0].tolist() == [3.0, 2688.0, 2688.0, 6 * 2.0**-9, 2.0**-10, 0.0]
    assert same_bits(unpacked, cast)
    assert noise(x[6:], cast[6:]) == pytest.approx(20.4, abs=0.15)


@parametrize("name", ["mxfp4e2", "int8_f", "e4m3fn", "nvf4", "nvfp4_one_level"])
def test_rules_of_two_levels_are_refused_elsewhere(name):
    with refused(r"below a scale of the tensor, which .* does not have; use nvfp4"):
        formats.cast(
            jnp.ones((1, 32)), getattr(formats, name), scalemode="four_over_six"
        )


def test_a_rule_concerns_the_scales_that_it_is_for():
    assert (
        Modes(scalemode="four_over_six").of_scale(formats.nvfp4.scale)
        == "four_over_six"
    )
    assert Modes(scalemode="four_over_six").of_scale(formats.mxfp4e2.scale) == "max"
    assert Modes(scalemode="ceil").of_scale(formats.nvfp4.scale) == "max"
    assert Modes(scalemode="ceil").of_scale(formats.mxfp4e2.scale) == "ceil"
