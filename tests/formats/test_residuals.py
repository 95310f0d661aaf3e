"""Residuals, the search for their scale, and TCFP-12: one format behind
`formats.tcfp12` and `quantize_tcfp12`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tcfp_jax
from tcfp_jax import formats
from tcfp_jax.formats import float_bits
from tests.formats_oracles import QUICK, packed_and_cast, quick, same, same_bits

BOOKS = {"linear": "linear4", "nf4": "nf4"}


def tcfp12(block=32, residual="linear"):
    """Return the packed format as a datatype made of its parts."""
    rest = formats.datatype(BOOKS[residual], f"e8m0_t{block}_mse")
    return formats.datatype("e4m3fn", f"e8m0_t{block}_ceil", residual=rest)


def every_magnitude(shape):
    """Return rows of all normal binades of float32, rows of zeros, and values exact in
    E4M3 and far below it.
    """
    random = np.random.default_rng(0)
    x = random.standard_normal(shape)
    x = np.sign(x) * np.maximum(np.abs(x), 2.0**-6)
    x = np.ldexp(x, np.linspace(-120, 124, shape[0]).astype(int)[:, None]).astype(
        np.float32
    )
    x[::5] = np.ldexp(
        random.integers(-15, 16, x[::5].shape), random.integers(0, 5, x[::5].shape)
    )
    x[1::7] = np.ldexp(
        random.standard_normal(x[1::7].shape), random.integers(-60, 60, x[1::7].shape)
    )
    x[::11], x[3, 1::2] = 0.0, -0.0
    return jnp.asarray(x)


def packed_of(x, **options):
    return jax.jit(
        lambda x: tcfp_jax.quantize_tcfp12(x, **options), compiler_options=QUICK
    )(x)


def test_tcfp12_of_the_catalog_is_the_packed_format():
    assert (
        tcfp12() == formats.tcfp12 and formats.tcfp12.bits_per_value((8, 320)) == 12.5
    )


@pytest.mark.slow_except("32-linear")
@pytest.mark.parametrize("block, residual", [(32, "linear"), (64, "nf4")])
def test_cast_pack_and_quantize_tcfp12_agree_bit_for_bit(block, residual):
    made = tcfp12(block, residual)
    normal = jax.random.normal(jax.random.key(1), (123, 2 * block))
    for x in (
        every_magnitude((123, 2 * block)),
        every_magnitude((24, 300))[None],
        normal,
    ):
        theirs = packed_of(x, block=block, residual=residual)
        packed, unpacked, cast = packed_and_cast(x, made)
        expected = theirs.dequantize()
        assert same_bits(cast, expected) and same_bits(unpacked, expected)
        assert (
            packed.nbytes
            == sum(-(-bits // 8) for bits in (x.size * 8, x.size * 4))
            + 2 * packed.scales.size
        )
    # Without blocks of zeros and ragged ones, the bytes are the same, too.
    pairs = [(packed.values, theirs.values), (packed.scales, theirs.scale)]
    pairs += [
        (packed.residual.values, theirs.codes),
        (packed.residual.scales, theirs.residual_scale),
    ]
    assert all(
        np.asarray(mine).tobytes() == np.asarray(other).tobytes()
        for mine, other in pairs
    )


@pytest.mark.slow_except("bfloat16")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_inputs_agree_too(dtype):
    x = jax.random.normal(jax.random.key(0), (8, 100)).astype(dtype)
    assert same_bits(quick(x, formats.tcfp12), packed_of(x).dequantize(dtype))


@pytest.mark.slow
def test_where_the_two_differ_by_design():
    """docs/formats.md lists these: NaN and inf, and float32 subnormals."""
    x = jnp.ones((1, 64)).at[0, 4].set(-448.0)
    for bad, alone in ((jnp.nan, jnp.nan), (jnp.inf, 448.0), (-jnp.inf, -448.0)):
        bad_x = x.at[0, 3].set(bad)
        loud = packed_of(bad_x).dequantize()
        assert jnp.isnan(loud[0, :32]).all() and same(loud[0, 32:], x[0, 32:])
        assert same(quick(bad_x, formats.tcfp12), x.at[0, 3].set(alone))
    subnormal = np.zeros((1, 32), np.float32)
    subnormal.view(np.uint32)[0, :3] = 3 << 12, 1 << 15, 1
    got = np.asarray(quick(jnp.asarray(subnormal), formats.tcfp12)).view(np.uint32)[
        0, :3
    ]
    assert got.tolist() == [3 << 12, 1 << 15, 0]
    assert not np.asarray(packed_of(jnp.asarray(subnormal)).dequantize()).any()


def test_a_residual_keeps_what_is_finite_finite_and_loses_no_small_one():
    largest = jnp.full((1, 32), np.finfo(np.float32).max)
    got = np.asarray(quick(largest, formats.tcfp12))
    assert np.all(np.isfinite(got)) and np.all(got >= 1.99 * 2.0**127)
    # In units of the tile's scale, the remainder of the smallest normal numbers is not
    # subnormal.
    small = np.ldexp(1 + np.arange(32) / 32, -126).astype(np.float32)[None]
    error = np.abs(
        np.asarray(quick(jnp.asarray(small), formats.tcfp12), np.float64) - small
    )
    assert error.max() <= 2.0 ** (-126 - 8)


def test_residuals_of_other_datatypes():
    x = jax.random.normal(jax.random.key(0), (32, 64))
    first = formats.datatype("int8", "float16_t0")
    both = formats.datatype(
        "int8", "float16_t0", residual=formats.datatype("e2m1f", "e8m0_t16")
    )
    rounded = quick(x, first)
    assert same(quick(x, both), rounded + quick(x - rounded, both.residual))
    bare = formats.datatype("bfloat16", residual=formats.datatype("bfloat16"))
    assert float(jnp.max(jnp.abs(quick(x, bare) - x) / jnp.abs(x))) <= 2.0**-16
    squares = formats.datatype(
        "e4m3fn", "e8m0_t32_t32", residual=formats.datatype("int4", "float16_t16")
    )
    packed, unpacked, cast = packed_and_cast(x, squares)
    assert (
        same_bits(unpacked, cast)
        and packed.nbytes * 8 == squares.bits_per_value(x.shape) * x.size
    )


def test_stochastic_residuals_are_unbiased():
    x = jax.random.normal(jax.random.key(0), (2, 64))
    draw = lambda key: formats.cast(x, formats.tcfp12, roundmode="stochastic", key=key)
    samples = np.asarray(
        jax.jit(jax.vmap(draw))(jax.random.split(jax.random.key(1), 2000)), np.float64
    )
    error, deviation = samples.mean(0) - np.asarray(x), samples.std(0)
    assert np.all(np.abs(error) <= 5 * deviation / np.sqrt(len(samples)) + 1e-7)


# The scale with the smaller squared error
# -----------------------------------------------------------------------------


def rounded_at(blocks, line, exponent):
    """Round `blocks / 2**exponent` to the nearest value of `line`, in float64 (without
    a rule for ties).
    """
    scaled = np.ldexp(blocks.astype(np.float64), -exponent)
    return np.ldexp(line[np.abs(scaled[..., None] - line).argmin(-1)], exponent)


@pytest.mark.slow_except("mxfp4e2")
@pytest.mark.parametrize("name", ["mxfp4e2", "mxint4", "mxfp8e4"])
def test_mse_takes_the_better_of_two_scales(name):
    made = getattr(formats, name)
    random = np.random.default_rng(5)
    x = random.standard_t(3, (600, 32)).astype(np.float32) * np.ldexp(
        1.0, random.integers(-90, 90, (600, 1))
    )
    x = x.astype(np.float32)
    spec = made.number
    line = np.array(spec.number_line()) * (spec.maxfloat / spec.max)
    amax = np.abs(x.astype(np.float64)).max(-1, keepdims=True)
    covering = np.frexp(amax)[1] - 1 - spec.emax
    covering = covering + (np.ldexp(amax, -covering) > spec.maxfloat)
    wide, narrow = (
        rounded_at(x, line, exponent) for exponent in (covering, covering - 1)
    )
    error = lambda y: (np.ldexp(x.astype(np.float64) - y, -covering) ** 2).sum(-1)
    got = np.asarray(quick(jnp.asarray(x), made, scalemode="mse"), np.float64)
    np.testing.assert_allclose(
        error(got), np.minimum(error(wide), error(narrow)), rtol=0.02
    )
    assert np.array_equal(quick(jnp.asarray(x), made, scalemode="ceil"), wide)
    better = error(narrow) < 0.98 * error(wide)
    # To a float, half the scale gives nothing but range at the other end
    if name != "mxfp8e4":
        assert 0.05 < better.mean() < 0.95
    noise = lambda mode: float(
        error(np.asarray(quick(jnp.asarray(x), made, scalemode=mode), np.float64)).sum()
    )
    assert noise("mse") <= 1.001 * noise("ceil")


def test_mse_counts_the_errors_of_large_tiles_and_long_integers():
    """A sum of squares in 31 bits leaves steps that are larger than every error, so
    that no scale is better.
    """
    for values, name in ((2.02, "int8_e"), (2.0001, "int16_e")):
        x = (
            jnp.clip(jax.random.normal(jax.random.key(0), (1024, 1024)), -2, 2)
            .at[0, 0]
            .set(values)
        )
        noise = lambda mode: float(
            jnp.sum((x - quick(x, formats.CATALOG[name], scalemode=mode)) ** 2)
        )
        assert noise("mse") < 0.5 * noise("ceil")


@pytest.mark.parametrize("count", [3, 300, 2**23])
def test_sums_of_squares_are_exact(count):
    x = np.random.default_rng(0).integers(-46340, 46341, count, np.int32)
    high, low = jax.jit(lambda x: float_bits.sum_squares(x, (0,), 46340))(x)
    assert (high.item() << (24 if count < 2**23 else 28)) + low.item() == int(
        np.sum(x.astype(np.int64) ** 2)
    )


def test_mse_searches_no_tile_of_zeros_and_no_stochastic_one():
    zeros = jax.jit(
        lambda x: formats.pack(x, formats.mxint4, scalemode="mse"),
        compiler_options=QUICK,
    )
    assert not np.asarray(zeros(jnp.zeros((2, 32))).scales).any()
    tiny = np.zeros((1, 32), np.float32)
    tiny.view(np.uint32)[0, 0] = 1
    assert np.asarray(zeros(jnp.asarray(tiny)).scales).tolist() == [1]
    x, key = jax.random.normal(jax.random.key(0), (64, 64)), jax.random.key(1)
    drawn = [
        quick(x, formats.mxint4, roundmode="stochastic", scalemode=mode, key=key)
        for mode in ("mse", "ceil")
    ]
    assert same(*drawn) and not same(
        *(quick(x, formats.mxint4, scalemode=mode) for mode in ("mse", "ceil"))
    )


def test_mse_with_subtiles_and_tables():
    x = jax.random.normal(jax.random.key(0), (64, 64))
    noise = lambda y: float(jnp.sum((y - x) ** 2))
    for name in ("mx6", "icb44fi3_e32s8"):
        made = getattr(formats, name)
        _, unpacked, cast = packed_and_cast(x, made, scalemode="mse")
        assert same_bits(unpacked, cast) and noise(cast) <= 1.001 * noise(
            quick(x, made, scalemode="ceil")
        )
