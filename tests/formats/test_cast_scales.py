"""Casts under scales against integer arithmetic in NumPy, which shares nothing with
them.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from tcfp_jax import formats
from tcfp_jax.formats import cast, datatype
from tests.formats_oracles import (
    jitted,
    mx_oracle,
    packed_and_cast,
    quick,
    random_blocks,
    same,
    same_bits,
)
from tests.helpers import normal, parametrize, slow_except

MX = ("mxfp8e5", "mxfp8e4", "mxfp6e3", "mxfp6e2", "mxfp4e2")

# Scaled by powers of two
# --------------------------------------------------------------------------------------


def test_stochastic_rounding_is_biased_only_where_it_saturates():
    x = jnp.zeros((4096, 32)).at[:, 0].set(7.9).at[:, 1].set(5.5)
    options = dict(roundmode="stochastic", key=jax.random.key(1))
    saturating = cast(x, formats.mxfp4e2, scalemode="max", **options).mean(axis=0)
    covering = cast(x, formats.mxfp4e2, scalemode="ceil", **options).mean(axis=0)
    assert saturating[0] == 6
    assert abs(covering[0] - 7.9) < 0.05
    assert abs(saturating[1] - 5.5) < 0.05
    assert abs(covering[1] - 5.5) < 0.05
    inside = jax.grad(lambda x: cast(x, formats.mxfp4e2).sum())(x)
    assert np.all(np.asarray(inside) == 1)  # also for values that saturate


@slow_except("mxfp6e2")
@parametrize("name", MX)
def test_mx_blocks_are_those_of_exact_arithmetic(name):
    blocks = random_blocks(100_000)  # for each of five formats: 500,000 in all
    made = getattr(formats, name)
    assert same(jitted(jnp.asarray(blocks), made), mx_oracle(blocks, made.number.name))


@parametrize("scalemode", ["midmax", "ceil"])
@parametrize("name", ["mxfp8e4", "mxfp4e2"])
def test_scale_modes(name, scalemode):
    blocks = random_blocks(4_000)
    made = getattr(formats, name)
    got = cast(jnp.asarray(blocks), made, scalemode=scalemode)
    assert same(got, mx_oracle(blocks, made.number.name, scalemode))
    if scalemode == "midmax":
        assert same(cast(jnp.asarray(blocks), made, scalemode="auto"), got)
    edges = np.zeros((1, 32), np.float32)
    edges[0, 0] = np.nextafter(np.float32(made.number.max), np.float32(1e9))
    got = cast(jnp.asarray(edges), made, scalemode=scalemode)
    assert float(got[0, 0]) == made.number.max


def test_largest_and_smallest_scales():
    huge = jnp.full((1, 32), np.finfo(np.float32).max)
    for scalemode in ("max", "midmax", "ceil"):
        got = np.asarray(quick(huge, formats.mxfp8e4, scalemode=scalemode))
        assert np.all(got == np.float32(1.75 * 2.0**127))
    tiny = np.zeros((1, 32), np.uint32)
    # The smallest scale times e5m2's smallest value is 2**-143
    tiny[0, :3] = 64, 128, 192
    got = quick(jnp.asarray(tiny.view(np.float32)), formats.mxfp8e5)
    assert np.array_equal(np.asarray(got).view(np.uint32), tiny)
    assert not np.asarray(quick(jnp.zeros((2, 40)), formats.mxfp4e2)).any()


def test_narrow_scales_are_clipped_to_their_range():
    made = datatype("e2m1f", "e3m0_t32")  # 2**-3 to 2**3
    x = jnp.zeros((3, 32)).at[:, 0].set(jnp.array([1000.0, 6.0, 0.01]))
    assert quick(x, made)[:, 0].tolist() == [48.0, 6.0, 0.0]


@slow_except("e4m0b120")
@parametrize("scale", ["e4m0b120", "e2m0b127_t32", "e5m0b127_t32"])
def test_values_far_above_a_narrow_scale_saturate(scale):
    x = jnp.array([[1.0, -1e10, 1e30, -3e38] * 8])
    for code in ("e4m3fn", "e5m2", "e2m1f", "int8", "nf4"):
        made = datatype(code, scale)
        largest = np.float32(made.number.maxfloat * 2.0**made.scale.number.emax)
        _, unpacked, got = packed_and_cast(x, made)
        assert np.asarray(got)[0, :4].tolist() == [largest, -largest] * 2
        assert same_bits(unpacked, got)
    alone = datatype("e4m3fn", scale)
    whole = datatype("e4m3fn", scale, residual=datatype("linear4", scale))
    assert np.all(np.abs(np.asarray(quick(x, whole) / quick(x, alone))) >= 1)


def test_integers_in_fixed_point():
    x = normal(0, (64, 64))
    assert same(quick(x, formats.mxint8), quick(x, formats.e1m6b1_e32))
    assert same(quick(x, formats.mxint4), quick(x, formats.e1m2b1_e32))


def test_subtile_offsets_add_a_bit():
    x = np.zeros((1, 16), np.float32)
    # Mx6 has int5: steps of 1/8, half of that in a subtile below 1/2 ... 1
    x[0, :4] = 1.0, 0.3, 0.25 + 2**-8, 0.01
    got = np.asarray(quick(jnp.asarray(x), formats.mx6))[0]
    assert got[:4].tolist() == [1.0, 0.25, 0.25, 0.0]
    x = jnp.asarray([[1.0, 0.3] + [0.3125, 0.01] * 7])
    assert quick(x, formats.mx6)[0, 2] == 0.3125


def test_subtile_offsets_count_from_the_scale_that_is_stored():
    largest = 2.0 ** (7 + 2) * 1.5  # e2m1 under the largest scale of e4m0
    x = jnp.array([[1e6] * 8 + [0.9 * largest] * 8 + [largest / 4] * 16])
    got = np.asarray(quick(x, datatype("e2m1f", "e4m0_t32s8o1")))[0]
    assert got[::8].tolist() == [largest, largest, largest / 4, largest / 4]


# Scaled by floats
# --------------------------------------------------------------------------------------


def float_scale_oracle(x, largest, scale_dtype):
    """Return (scales, x / scale in float64) by rows; a scale is a correctly rounded
    float32 quotient, rounded again.
    """
    amax = np.abs(x).max(-1, keepdims=True)
    quotient = (amax / np.float32(largest)).astype(np.float32)
    scale = quotient.astype(scale_dtype).astype(np.float32)
    return scale, divided(x, scale)


def divided(x, scale):
    """x / scale in float64, and 0 where the scale is 0."""
    wide = x.astype(np.float64)
    return np.divide(wide, scale, where=scale > 0, out=np.zeros(x.shape))


@parametrize(
    "letter, dtype",
    [("F", np.float32), ("f", np.float16), ("b", ml_dtypes.bfloat16)],
)
def test_int8_with_float_scales(letter, dtype):
    x = np.random.default_rng(1).standard_normal((512, 64)).astype(np.float32)
    x[0] = 0
    scale, scaled = float_scale_oracle(x, 127, dtype)
    codes = np.clip(np.round(scaled), -127, 127).astype(np.float32)
    expected = (codes * scale).astype(np.float32)
    assert same(cast(jnp.asarray(x), getattr(formats, f"int8_{letter}c")), expected + 0)


@parametrize("name", ["uint8_ffc", "uint8_fic", "uint4_FFc", "uint4_Fic", "uint8_bbc"])
def test_unsigned_integers_with_zero_points(name):
    made = getattr(formats, name)
    scale_dtype = made.scale.number.dtype
    x = np.random.default_rng(2).standard_normal((256, 64)).astype(np.float32)
    x += np.float32(0.5)
    x[0] = 0
    x[1] = np.abs(x[1])
    x[2] = -np.abs(x[2])
    low = np.minimum(x.min(-1, keepdims=True), 0)
    high = np.maximum(x.max(-1, keepdims=True), 0)
    largest = np.float32(made.number.max)
    scale = ((high - low) / largest).astype(scale_dtype).astype(np.float32)
    if made.scale.zero.is_integer:
        zero = np.clip(np.round(divided(-low, scale)), 0, largest)
        codes = np.clip(np.round(divided(x, scale)) + zero, 0, largest)
        expected = (codes - zero).astype(np.float32) * scale
        assert not np.any(expected[x == 0])
    else:
        zero = (-low).astype(made.scale.zero.dtype).astype(np.float32)
        moved = x + zero
        codes = np.clip(np.round(divided(moved, scale)), 0, largest)
        codes = np.where(moved < 0, 0, codes)
        expected = (codes.astype(np.float32) * scale) - zero
    assert same(cast(jnp.asarray(x), made), expected + 0)


def test_nf4_takes_the_nearest_entry():
    x = np.random.default_rng(4).standard_normal((64, 64)).astype(np.float32)
    table = np.array(formats.nf4.number.tables[0])
    amax = np.abs(x).max(-1, keepdims=True)
    nearest = table[np.abs((x / amax)[..., None] - table).argmin(-1)].astype(np.float32)
    assert same(cast(jnp.asarray(x), formats.nf4), nearest * amax)


def test_codebooks_select_the_best_table():
    x = normal(0, (32, 64))
    made = formats.icb44fi3_e32s8
    got = np.asarray(quick(x, made)).reshape(32, 8, 8)
    amax = np.abs(np.asarray(x)).reshape(32, 2, 32).max(-1)
    scale = np.exp2(np.floor(np.log2(amax)) - 4).repeat(4, -1)[..., None]
    scaled = np.asarray(x).reshape(32, 8, 8) / scale
    clipped = np.clip(scaled, -28, 28)
    errors = []
    for table in np.array(made.number.tables):
        nearest = np.abs(scaled[..., None] - table).argmin(-1)
        errors.append(((clipped - table[nearest]) ** 2).sum(-1))
    best = np.min(errors, 0)
    mine = ((clipped - got / scale) ** 2).sum(-1)
    assert np.all(mine <= best + 1e-2)
    assert np.mean(mine <= best + 1e-5) > 0.98
