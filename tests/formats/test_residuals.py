"""Residuals, the search for their scale, and TCFP-12: one format behind
`formats.tcfp12` and `quantize_tcfp12`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose

import tcfp_jax
from tcfp_jax import formats
from tcfp_jax.formats import float_bits
from tests.formats_oracles import (
    QUICK,
    assert_unbiased,
    packed_and_cast,
    quick,
    same,
    same_bits,
)
from tests.helpers import normal, parametrize, slow_except

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
    binades = np.linspace(-120, 124, shape[0]).astype(int)[:, None]
    x = np.ldexp(x, binades).astype(np.float32)
    some = x[::5].shape
    x[::5] = np.ldexp(random.integers(-15, 16, some), random.integers(0, 5, some))
    some = x[1::7].shape
    x[1::7] = np.ldexp(random.standard_normal(some), random.integers(-60, 60, some))
    x[::11] = 0.0
    x[3, 1::2] = -0.0
    return jnp.asarray(x)


def packed_of(x, **options):
    def pack(x):
        return tcfp_jax.quantize_tcfp12(x, **options)

    return jax.jit(pack, compiler_options=QUICK)(x)


def test_tcfp12_of_the_catalog_is_the_packed_format():
    assert tcfp12() == formats.tcfp12
    assert formats.tcfp12.bits_per_value((8, 320)) == 12.5


@slow_except("32-linear")
@parametrize("block, residual", [(32, "linear"), (64, "nf4")])
def test_cast_pack_and_quantize_tcfp12_agree_bit_for_bit(block, residual):
    made = tcfp12(block, residual)
    usual = normal(1, (123, 2 * block))
    ragged = every_magnitude((24, 300))[None]
    for x in (every_magnitude((123, 2 * block)), ragged, usual):
        theirs = packed_of(x, block=block, residual=residual)
        packed, unpacked, cast = packed_and_cast(x, made)
        assert same_bits(cast, theirs.dequantize())
        assert same_bits(unpacked, cast)
        assert packed.nbytes == x.size + -(-x.size // 2) + 2 * packed.scales.size
    # Without blocks of zeros and ragged ones, the bytes are the same, too.
    rest = packed.residual
    mine = (packed.values, packed.scales, rest.values, rest.scales)
    others = (theirs.values, theirs.scale, theirs.codes, theirs.residual_scale)
    for one, other in zip(mine, others, strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@slow_except("bfloat16")
@parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_inputs_agree_too(dtype):
    x = normal(0, (8, 100)).astype(dtype)
    assert same_bits(quick(x, formats.tcfp12), packed_of(x).dequantize(dtype))


def test_residuals_keep_finite_values_finite_and_small_ones():
    largest = jnp.full((1, 32), np.finfo(np.float32).max)
    got = np.asarray(quick(largest, formats.tcfp12))
    assert np.all(np.isfinite(got))
    assert np.all(got >= 1.99 * 2.0**127)
    # In units of the tile's scale, the remainder of the smallest normal numbers is not
    # subnormal.
    small = np.ldexp(1 + np.arange(32) / 32, -126).astype(np.float32)[None]
    error = np.float64(quick(small, formats.tcfp12)) - small
    assert np.abs(error).max() <= 2.0 ** (-126 - 8)
    subnormal = np.zeros((1, 32), np.uint32)
    subnormal[0, :3] = 3 << 12, 1 << 15, 1
    got = np.asarray(quick(subnormal.view(np.float32), formats.tcfp12)).view(np.uint32)
    assert got[0, :3].tolist() == [3 << 12, 1 << 15, 0]


def test_residuals_of_other_datatypes():
    x = normal(0, (32, 64))
    rest = formats.datatype("e2m1f", "e8m0_t16")
    rounded = quick(x, formats.datatype("int8", "float16_t0"))
    both = quick(x, formats.datatype("int8", "float16_t0", residual=rest))
    assert same(both, rounded + quick(x - rounded, rest))
    bare = formats.datatype("bfloat16", residual=formats.datatype("bfloat16"))
    assert float(jnp.max(jnp.abs(quick(x, bare) - x) / jnp.abs(x))) <= 2.0**-16
    rest = formats.datatype("int4", "float16_t16")
    squares = formats.datatype("e4m3fn", "e8m0_t32_t32", residual=rest)
    packed, unpacked, cast = packed_and_cast(x, squares)
    assert same_bits(unpacked, cast)
    assert packed.nbytes * 8 == squares.bits_per_value(x.shape) * x.size


def test_stochastic_residuals_are_unbiased():
    x = normal(0, (2, 64))

    def draw(key):
        return formats.cast(x, formats.tcfp12, roundmode="stochastic", key=key)

    assert_unbiased(draw, x)


# The scale with the smaller squared error
# -----------------------------------------------------------------------------


def rounded_at(blocks, line, exponent):
    """Round `blocks / 2**exponent` to the nearest value of `line`, in float64 (without
    a rule for ties).
    """
    scaled = np.ldexp(blocks.astype(np.float64), -exponent)
    return np.ldexp(line[np.abs(scaled[..., None] - line).argmin(-1)], exponent)


@slow_except("mxfp4e2")
@parametrize("name", ["mxfp4e2", "mxint4", "mxfp8e4"])
def test_mse_takes_the_better_of_two_scales(name):
    made = getattr(formats, name)
    spec = made.number
    random = np.random.default_rng(5)
    x = random.standard_t(3, (600, 32)).astype(np.float32)
    x = np.ldexp(x, random.integers(-90, 90, (600, 1))).astype(np.float32)
    line = np.array(spec.number_line()) * (spec.maxfloat / spec.max)
    amax = np.abs(x.astype(np.float64)).max(-1, keepdims=True)
    covering = np.frexp(amax)[1] - 1 - spec.emax
    covering = covering + (np.ldexp(amax, -covering) > spec.maxfloat)

    def error(y):
        return (np.ldexp(x.astype(np.float64) - y, -covering) ** 2).sum(-1)

    wide = rounded_at(x, line, covering)
    narrow = error(rounded_at(x, line, covering - 1))
    ceil = np.float64(quick(x, made, scalemode="ceil"))
    assert np.array_equal(ceil, wide)
    got = error(np.float64(quick(x, made, scalemode="mse")))
    assert_allclose(got, np.minimum(error(wide), narrow), rtol=0.02)
    assert got.sum() <= 1.001 * error(ceil).sum()
    # To a float, half the scale gives nothing but range at the other end
    if name != "mxfp8e4":
        assert 0.05 < (narrow < 0.98 * error(wide)).mean() < 0.95


def noises(x, made):
    """The squared errors of the scale modes "mse" and "ceil"."""
    return [
        float(jnp.sum((x - quick(x, made, scalemode=mode)) ** 2))
        for mode in ("mse", "ceil")
    ]


@parametrize("largest, name", [(2.02, "int8_e"), (2.0001, "int16_e")])
def test_mse_counts_small_errors_of_large_tiles(largest, name):
    """A sum of squares in 31 bits leaves steps that are larger than every error, so
    that no scale is better.
    """
    x = jnp.clip(normal(0, (1024, 1024)), -2, 2)
    mse, ceil = noises(x.at[0, 0].set(largest), formats.CATALOG[name])
    assert mse < 0.5 * ceil


@parametrize("count", [3, 300, 2**23])
def test_sums_of_squares_are_exact(count):
    x = np.random.default_rng(0).integers(-46340, 46341, count, np.int32)
    high, low = jax.jit(lambda x: float_bits.sum_squares(x, (0,), 46340))(x)
    total = (high.item() << (24 if count < 2**23 else 28)) + low.item()
    assert total == np.sum(x.astype(np.int64) ** 2)


def test_mse_searches_no_tile_of_zeros_and_no_stochastic_one():
    pack = jax.jit(
        lambda x: formats.pack(x, formats.mxint4, scalemode="mse"),
        compiler_options=QUICK,
    )
    assert not np.asarray(pack(jnp.zeros((2, 32))).scales).any()
    tiny = np.zeros((1, 32), np.uint32)
    tiny[0, 0] = 1
    assert pack(tiny.view(np.float32)).scales.tolist() == [1]
    x = normal(0, (64, 64))
    for equal, modes in (
        (True, dict(roundmode="stochastic", key=jax.random.key(1))),
        (False, {}),
    ):
        mse = quick(x, formats.mxint4, scalemode="mse", **modes)
        ceil = quick(x, formats.mxint4, scalemode="ceil", **modes)
        assert same(mse, ceil) == equal


@parametrize("name", ["mx6", "icb44fi3_e32s8"])
def test_mse_with_subtiles_and_tables(name):
    x = normal(0, (64, 64))
    made = getattr(formats, name)
    _, unpacked, cast = packed_and_cast(x, made, scalemode="mse")
    mse, ceil = noises(x, made)
    assert same_bits(unpacked, cast)
    assert mse <= 1.001 * ceil
