"""NVFP4 operands of training: nearest is the format library's rounding, stochastic is unbiased, MS-EDEN over turns."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tcfp_jax import formats
from tcfp_jax.formats.float_bits import to_bits
from tcfp_jax.formats.parts import quantize as parts_of
from tcfp_jax.formats.rounding import Modes
from tcfp_jax.products import fp4_rounding
from tcfp_jax.products.fp4_rounding import BLOCK, signs, stream, words_of

MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E4M3 = np.arange(127, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float32)
along = jax.jit(fp4_rounding.along, static_argnums=(1, 2, 3))
squares = jax.jit(fp4_rounding.squares, static_argnums=1)
PRODUCTS = np.unique(np.outer(MAGNITUDES, E4M3))
WORDS = words_of(jax.random.key(7))


def wild(spread=2.0, shape=(32, 64)):
    """Values of many magnitudes, with ties, a block of zeros, an outlier and a NaN."""
    x = jax.random.normal(jax.random.key(0), shape) * jnp.exp(spread * jax.random.normal(jax.random.key(1), shape))
    x = x.at[5, :32].set(np.arange(32, dtype=np.float32) / 4 - 4).at[5, 0].set(6)
    x = x.at[16:, 48:].set(0).at[4, 5].set(1e4).at[9, 9].set(jnp.nan).at[11, 3].set(1e-39)
    return x


@pytest.mark.parametrize("spread", [0.0, 9.0])
@pytest.mark.parametrize("place", ["last", "first", "squares"])
def test_nearest_is_the_format_librarys_rounding_bit_for_bit(place, spread):
    x = wild(spread)
    datatype = formats.nvfp4s if place == "squares" else formats.nvfp4
    seen = x.T if place == "first" else x
    found = jax.jit(lambda x: parts_of(to_bits(x), datatype, Modes(), None))(seen)
    want = (found.value * found.scale).reshape(seen.shape)
    got = squares(x, "amax") if place == "squares" else along(x, {"last": -1, "first": 0}[place], "amax")
    assert float(got.outer) == float(found.outer)
    np.testing.assert_array_equal(np.asarray(want.T if place == "first" else want), np.asarray(got.values, np.float32))


@pytest.mark.parametrize("rule", ["amax", "four_over_six", "fold_exact"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "eden"])
def test_values_are_codes_times_scales(rule, rounding):
    if rounding == "eden" and rule == "fold_exact":
        return
    values = np.asarray(along(wild(9.0), -1, rule, rounding, stream(WORDS, 1)).values, np.float32)
    assert np.isin(np.abs(values[~np.isnan(values)]), PRODUCTS).all()
    assert np.isnan(values[9, :16]).all() and np.isnan(values).sum() == BLOCK  # no other block
    assert (values[20, 48:] == 0).all()
    if rule == "fold_exact":
        finite = values[~np.isnan(values)]
        np.testing.assert_array_equal(finite.astype(jnp.float8_e4m3fn).astype(np.float32), finite)


def test_every_code_times_every_fold_exact_scale_is_an_e4m3_number():
    scales = [part * 2.0**e for e in range(-5, 7) for part in (1, 1.25, 1.5) if part * 2.0**e <= 64]
    products = np.outer(MAGNITUDES, np.float32(scales))
    np.testing.assert_array_equal(products.astype(jnp.float8_e4m3fn).astype(np.float32), products)
    assert np.isin(scales, E4M3).all()


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf, 1e38, 1e-39, 0.0])
def test_bad_input_is_loud_in_its_block_alone(value):
    x = jnp.ones((2, 32)).at[0, 3].set(value)
    got = np.asarray(along(x, -1, "amax").dequantize())
    assert np.isnan(got[0, :16]).all() == (not np.isfinite(value)) and np.isfinite(got[:, 16:]).all()
    np.testing.assert_allclose(got[1], 1 if value != 1e38 else 0, atol=1e-6)
    assert (np.asarray(along(jnp.zeros((2, 32)), -1, "amax").dequantize()) == 0).all()


def test_four_over_six_takes_the_better_of_two_scales():
    x = jax.random.normal(jax.random.key(3), (64, 64))
    error = lambda rule: np.square(np.asarray(along(x, -1, rule).dequantize() - x)).reshape(64, 4, 16).sum(-1)
    either, six = error("four_over_six"), error("amax")
    assert (either < 0.75 * six).any() and either.sum() < 0.9 * six.sum()
    assert error("fold_exact").sum() < 1.15 * six.sum()


def mean_over_keys(function, count=400):
    """(mean, standard error of it) over random words."""
    words = jax.vmap(words_of)(jax.random.split(jax.random.key(11), count))
    drawn = np.asarray(jax.jit(jax.vmap(function))(words), np.float64)
    assert np.isfinite(drawn).all()
    return drawn.mean(0), drawn.std(0) / np.sqrt(count)


@pytest.mark.parametrize("rule", ["amax", "fold_exact"])
def test_stochastic_rounding_is_unbiased_and_clips_nothing(rule):
    x = jax.random.normal(jax.random.key(5), (8, 32)) * 3
    mean, error = mean_over_keys(lambda words: along(x, -1, rule, "stochastic", stream(words, 2)).dequantize())
    scaled = (mean - np.asarray(x))[error > 0] / error[error > 0]
    assert np.abs(scaled.mean()) < 0.3 and 0.7 < scaled.std() < 1.3  # as of a mean without bias
    # Values that rounding to nearest would scale to more than 6 are unbiased, too.
    largest = np.abs(np.asarray(x)).reshape(8, 2, 16).argmax(-1)
    of_largest = np.take_along_axis((mean - np.asarray(x)).reshape(8, 2, 16), largest[..., None], -1)
    assert np.abs(of_largest).max() < 0.01 * np.abs(np.asarray(x)).max()


def test_eden_is_unbiased_over_rotations_and_has_less_noise():
    x = jax.random.normal(jax.random.key(6), (4, 128)) * jnp.exp(jax.random.normal(jax.random.key(8), (4, 128)))

    def drawn(words, rounding):
        turn = signs(stream(words, 0), 128)
        q = along(x, -1, "amax", rounding, stream(words, 1), turn).dequantize()
        return jax.vmap(lambda row: formats.rotate(row, 128, signs=turn, direction="inverse"))(q)

    errors = {}
    for rounding in ("eden", "stochastic"):
        mean, error = mean_over_keys(functools.partial(drawn, rounding=rounding))
        scaled = (mean - np.asarray(x)) / error
        assert np.abs(scaled.mean()) < 0.3 and 0.7 < scaled.std() < 1.3  # as of a mean without bias
        errors[rounding] = np.square(error).sum()
    assert errors["eden"] < 0.55 * errors["stochastic"]


@pytest.mark.parametrize(
    ("axis", "size", "dtype"), [(0, 16, "float32"), (0, 32, "bfloat16"), (-1, 16, "float32"), (-1, 128, "bfloat16")]
)
def test_rotations_are_the_format_librarys(axis, size, dtype, monkeypatch):
    keep = lambda x, axes, *rest: fp4_rounding.Fp4Values(
        jnp.concatenate(rest[3](x), axis=axes[0]).astype(jnp.float32), jnp.float32(1)
    )
    monkeypatch.setattr(fp4_rounding, "quantize", keep)
    x = jax.random.normal(jax.random.key(0), (32, 128)).astype(dtype)
    turn = signs(stream(WORDS, 0), size)
    want = jax.jit(lambda x, turn: formats.rotate(x.astype(jnp.float32), size, signs=turn, dim=axis))(x, turn)
    got = jax.jit(lambda x: fp4_rounding.along(x, axis, "amax", turn=turn).values)(x)
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_bits_depend_on_key_stream_and_place():
    x = jax.random.normal(jax.random.key(0), (64, 64))
    draw = lambda words, number: np.asarray(
        along(x, -1, "amax", "stochastic", stream(words, number)).values, np.float32
    )
    first = draw(WORDS, 1)
    np.testing.assert_array_equal(first, draw(WORDS, 1))
    assert (first != draw(WORDS, 2)).any() and (first != draw(words_of(jax.random.key(8)), 1)).any()
    np.testing.assert_array_equal(words_of(jax.random.PRNGKey(7)), WORDS)
