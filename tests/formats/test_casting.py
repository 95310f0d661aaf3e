"""Casts of numbers against ml_dtypes, which shares nothing with them; shapes, special
values, transformations and refusals. `test_cast_scales.py` has the scales.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels import dispatch
from tcfp_jax import formats
from tcfp_jax.formats import cast, casting, codebook, datatype, number, pack, unpack
from tcfp_jax.formats.cast_kernel import Cast
from tcfp_jax.formats.rounding import Modes
from tests.formats_oracles import (
    EVERY_BFLOAT16,
    FLOATS,
    QUICK,
    awkward_inputs,
    jitted,
    packed_and_cast,
    quick,
    random_blocks,
    same,
    same_bits,
)
from tests.helpers import normal, parametrize, refused, slow_except


def ml_dtypes_cast(x, name, saturate):
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    limit = float(ml_dtypes.finfo(dtype).max)
    with np.errstate(all="ignore"):
        clipped = np.clip(x, -limit, limit) if saturate else x
        out = clipped.astype(dtype).astype(np.float32)
    return np.where(np.isnan(x), np.float32(np.nan), out)


@parametrize("saturate", [True, False], ids=["saturating", "native"])
@parametrize("name", FLOATS)
def test_every_dtype_of_ml_dtypes(name, saturate):
    x = awkward_inputs(name)
    expected = ml_dtypes_cast(x, name, saturate)
    if name == "float8_e8m0fnu":
        # ml_dtypes rounds values between its two smallest values up, not to the nearer
        # one: docs/formats.md.
        between = (x > 2.0**-127) & (x < 1.5 * 2.0**-127)
        assert np.all(expected[between] == 2.0**-126)
        expected[between] = 2.0**-127
        is_large = x > 2.0**127
        is_kept = saturate | (x[is_large] < 1.5 * 2.0**127)
        expected[is_large] = np.where(is_kept, np.float32(2.0**127), np.nan)
    got = np.asarray(jitted(jnp.asarray(x), datatype(name), saturate=saturate))
    assert same(got, expected), x[got != expected][:8]


@parametrize("name", FLOATS)
def test_values_of_a_number_come_back(name):
    line = np.array(number(name).number_line(), np.float32)
    line = line[line > 0] if number(name).kind == "exponent" else line
    for roundmode in ("even", "nearest", "zero"):
        assert same(quick(line, datatype(name), roundmode=roundmode), line)


@slow_except("float16")
@parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_input_dtypes(dtype):
    wide = normal(0, (8, 64)).astype(dtype)
    for name in ("mxfp8e4", "int8_f"):
        got = quick(wide, getattr(formats, name))
        assert got.dtype == wide.dtype
        exact = quick(wide.astype(jnp.float32), getattr(formats, name))
        if dtype != "float8_e4m3fn":
            rounded = exact.astype(dtype)
            assert same(got.astype(jnp.float32), rounded.astype(jnp.float32))


def test_every_bfloat16_input_with_subnormals_through_bfloat16():
    got = jitted(jnp.asarray(EVERY_BFLOAT16), datatype("bfloat16"))
    finite = np.isfinite(EVERY_BFLOAT16.astype(np.float32))
    bits = np.asarray(got).view(np.uint16)
    assert np.array_equal(bits[finite], EVERY_BFLOAT16.view(np.uint16)[finite])


def between(x, spec):
    """Return (the largest value of a number <= x, the smallest >= x), in float64."""
    line = np.array(spec.number_line(), np.float64)
    at = np.clip(np.searchsorted(line, x, side="left"), 0, len(line) - 1)
    above = line[at]
    return np.where(above > x, line[np.maximum(at - 1, 0)], above), above


@slow_except("e4m3fn", "int5")
@parametrize(
    "code", ["e2m1f", "e4m3fn", "e5m2", "int5", "uint4", "e3m4b4inuz", "e5m2b120"]
)
def test_round_modes(code):
    spec = number(code)
    line = np.array(spec.number_line(), np.float64)
    x = np.concatenate([line, (line[1:] + line[:-1]) / 2, line * 0.999, line * 1.001])
    x = x[(np.abs(x) <= spec.max) & (x >= spec.min)].astype(np.float32)
    lower, upper = between(x.astype(np.float64), spec)
    away = np.where(x > 0, upper, lower)
    toward_zero = np.where(x > 0, lower, upper)
    middle = (lower + upper) / 2
    nearest = np.where(x > middle, upper, lower)
    nearest = np.where(x == middle, away, nearest)
    for roundmode, expected in (("zero", toward_zero), ("nearest", nearest)):
        got = jitted(jnp.asarray(x), datatype(code), roundmode=roundmode)
        assert same(got + 0, (expected + 0).astype(np.float32))
    even = np.float64(jitted(jnp.asarray(x), datatype(code)))
    assert np.array_equal(even[x != middle], nearest[x != middle])
    ties = (x == middle) & (lower < upper)
    steps = np.searchsorted(np.unique(np.abs(line)), np.abs(even[ties]))
    assert np.all(steps % 2 == 0)


CODES = [
    *("e2m1f", "int4", "uint4", "e3m0f", "e2m2f", "e3m2f", "e2m3f", "int6"),
    *("e3m3fnuz", "e4m3fn", "e5m2", "e3m4", "e4m3b8fnuz", "e5m2b16fnuz"),
    *("int8", "uint8"),
]


@slow_except("e2m2f", "e3m3fnuz")
@parametrize("code", CODES)
def test_stochastic_rounding_is_unbiased(code):
    """Within 5 standard errors at each of 2,000 points, and within 4 in the mean of a
    format's points.
    """
    spec = number(code)
    draws = 1024
    geometric = np.geomspace(spec.smallest_subnormal / 8, spec.max, 61)
    points = np.concatenate([geometric, np.linspace(0, spec.max, 61)])
    if spec.signed:
        points *= (-1.0) ** np.arange(122)
    x = np.clip(points, spec.min, spec.max).astype(np.float32)
    # A point next to a value is rounded away from it too rarely for normal statistics,
    # so it moves to a quarter.
    lower, upper = between(x.astype(np.float64), spec)
    step = upper - lower
    part = np.divide(x - lower, step, where=step > 0, out=np.zeros(122))
    rare = (np.minimum(part, 1 - part) < 20 / draws) & (step > 0)
    x = np.where(rare, lower + step / 4, x).astype(np.float32)
    wide = jnp.broadcast_to(jnp.asarray(x), (draws, x.size))
    key = jax.random.key(CODES.index(code))
    drawn = quick(wide, datatype(code), roundmode="stochastic", key=key)
    got = np.float64(drawn)
    assert np.all((got == lower) | (got == upper))
    bias = got.mean(0) - x
    error = np.sqrt((x - lower) * (upper - x) / draws)
    assert np.all(np.abs(bias) <= 5 * error)
    # The errors of all points, each in units of its standard error, sum to a variable
    # of variance `free.sum()`.
    free = error > 0
    assert abs(np.sum(bias[free] / error[free])) <= 4 * np.sqrt(free.sum())


# Shapes, special values, transforms
# -----------------------------------------------------------------------------------


@parametrize("name, shape", [("uint4_ff32", (3, 33)), ("mx6", (2, 50, 3))])
def test_any_axis_and_ragged_sizes(name, shape):
    made = getattr(formats, name)
    size = made.scale.tiles[0].size
    axis = int(np.argmax(shape))
    turned = datatype(made.number, _turn(made, axis - len(shape)))
    x = normal(0, shape)
    got = quick(x, turned)
    rows = jnp.moveaxis(x, axis, -1)
    length = rows.shape[-1]
    short = [(0, 0)] * (rows.ndim - 1) + [(0, -length % size)]
    expected = quick(jnp.pad(rows, short), made)[..., :length]
    assert same(got, jnp.moveaxis(expected, -1, axis))


def _turn(made, dim):
    """Return the code of a scale with its tile along another axis."""
    found = []
    for part in made.scale.name.split("_"):
        found.append(f"{part}d{dim}" if part.startswith("t") else part)
    return "_".join(found)


def test_two_dimensional_tiles_and_channels():
    x = normal(0, (40, 50))
    got = np.asarray(quick(x, datatype("e4m3fn", "e8m0_t16_t32")))
    one = quick(x[16:32, 32:].reshape(1, -1), datatype("e4m3fn", "e8m0_t0"))
    assert same(got[16:32, 32:], one.reshape(16, 18))
    channel = quick(x, datatype("int8", "float32_t0d0"))
    assert same(channel, quick(x.T, formats.int8_Fc).T)
    whole = quick(x, datatype("int8", "float32_t0d0_t0d1"))
    assert same(whole, quick(x, formats.int8_F))


SPECIAL = jnp.array([jnp.nan, jnp.inf, -jnp.inf, 3.0])


def test_nan_and_inf_do_not_decide_a_scale():
    x = jnp.zeros((1, 32)).at[0, :4].set(SPECIAL)
    # only 3.0 decides the scale: 2**(1 - 15)
    e5m2 = np.asarray(quick(x, formats.mxfp8e5))[0]
    assert np.isnan(e5m2[0])
    assert e5m2[1:4].tolist() == [3.5, -3.5, 3.0]
    assert not e5m2[4:].any()
    native = np.asarray(quick(x, formats.mxfp8e5, saturate=False))[0]
    assert native[1:4].tolist() == [np.inf, -np.inf, 3.0]
    assert np.isnan(quick(x, formats.mxfp8e4, saturate=False)[0, :3]).all()


@parametrize(
    "code, scale",
    [("e5m2", "float32"), ("binary8p3", "float16_t32"), ("e4m3", "e8m0")],
)
def test_inf_stays_inf_among_any_values(code, scale):
    x = jnp.zeros((1, 32)).at[0, :4].set(SPECIAL)
    # A tile without other values has the scale 0.
    others = (0.0, 1.0, 1e-42, 1e4)
    tiles = jnp.stack([jnp.where(jnp.isinf(x), x, other) for other in others])
    made = datatype(code, scale)

    def one(tile):
        _, unpacked, got = packed_and_cast(tile, made, saturate=False)
        return unpacked, got

    unpacked, got = map(np.asarray, jax.vmap(one)(tiles))
    assert (got[:, 0, 1] == np.inf).all()
    assert (got[:, 0, 2] == -np.inf).all()
    assert np.isfinite(got[:, 0, 3:]).all()
    assert same_bits(unpacked, got)


@parametrize("name", ["mxfp4e2", "nvfp4", "int8_f", "uint8_ff", "icb44fi3_e32"])
def test_nan_spreads_over_its_tile_without_a_code(name):
    made = getattr(formats, name)
    x = jnp.ones((1, 128)).at[0, :32].set(0).at[0, :4].set(SPECIAL)
    got = np.asarray(quick(x, made))[0]
    size = made.scale.tiles[0].size if made.scale.tiles else 128
    assert np.isnan(got[:size]).all()
    assert np.isfinite(got[size:]).all()
    clean = np.asarray(quick(x.at[0, 0].set(0.0), made))[0]
    assert np.isfinite(clean).all()
    assert clean[1] > 2
    assert clean[2] <= -2.5 or name.startswith("uint")


@parametrize("tables", ["nf4", "linear4", [-1.0, 0.25, 0.5, 1.0]])
def test_nan_stays_nan_in_codebooks_without_a_scale(tables):
    made = datatype(codebook(tables))
    x = jnp.array([jnp.nan, 1.0, -jnp.nan, jnp.inf])
    for roundmode in ("even", "nearest", "zero"):
        got = np.asarray(quick(x, made, roundmode=roundmode))
        assert np.isnan(got[[0, 2]]).all()
        assert got[1] == 1
        assert got[3] == made.number.max
    with refused("no code"):
        pack(x, made)
    nearest = min(made.number.number_line(), key=abs)
    packed = jax.jit(lambda x: pack(x, made))(x)
    assert unpack(packed)[:3].tolist() == [nearest, 1.0, nearest]


def test_signs_of_zero():
    small = jnp.array([-0.0, -1e-9, 1e-9])
    kept = [1, 1, 0]
    lost = [0, 0, 0]
    expected = {"e4m3fn": kept, "e2m1f": kept, "e4m3b8fnuz": lost, "int8": lost}
    for code, signs in expected.items():
        assert np.signbit(quick(small, datatype(code))).tolist() == signs


@slow_except("uint4_fi32")
@parametrize("name", ["mxfp4e2", "uint4_fi32"])
def test_jit_vmap_and_gradient(name):
    made = getattr(formats, name)
    x = normal(0, (3, 4, 64))
    one = cast(x, made)
    assert same(jitted(x, made), one)
    of_rows = jax.vmap(lambda row: cast(row, made))
    assert same(jax.jit(of_rows, compiler_options=QUICK)(x), one)

    def gradient(x, g):
        return jax.vjp(lambda x: cast(x, made), x)[1](g)[0]

    g = normal(1, x.shape)
    assert same(jax.jit(gradient, compiler_options=QUICK)(x, g), g)
    stochastic = {"roundmode": "stochastic", "key": jax.random.key(2)}
    drawn = quick(x, made, **stochastic)
    assert same(drawn, cast(x, made, **stochastic))
    assert not same(drawn, one)
    other = quick(x, made, roundmode="stochastic", key=jax.random.key(3))
    assert not same(drawn, other)
    assert cast(x[:0], made).shape == (0, 4, 64)


def test_op_by_op_is_the_same():
    x = jnp.asarray(random_blocks(1000)[:4])
    compiled = cast(x, formats.mxfp8e4)
    with jax.disable_jit():
        assert same(cast(x, formats.mxfp8e4), compiled)


SHORT_TILE = "a tile of 32 is longer than its axis of 31 values"
BOTH_TILES = datatype("e4m3fn", "e8m0_t16d0_t16d-1")


@parametrize(
    "change, error, why",
    [
        ({"x": jnp.zeros((2, 32), jnp.int32)}, TypeError, "real floats"),
        ({"datatype": 4}, TypeError, "DataType"),
        ({"roundmode": "up"}, ValueError, "roundmode"),
        ({"roundmode": "away"}, ValueError, 'ties away from zero are "nearest"'),
        ({"scalemode": "amax"}, ValueError, "scalemode"),
        ({"roundmode": "stochastic"}, ValueError, "needs key"),
        ({"key": jax.random.key(0)}, ValueError, "drop key"),
        ({"x": jnp.zeros((2, 31))}, ValueError, SHORT_TILE),
        ({"x": jnp.zeros((31, 2)), "axis": 0}, ValueError, "axis of 31 values"),
        ({"x": jnp.float32(0)}, ValueError, "not in shape"),
        ({"datatype": "int8_f", "scalemode": "midmax"}, ValueError, "powers of two"),
        ({"datatype": "tcfp12", "scalemode": "ceil"}, ValueError, "their own mode"),
        ({"datatype": BOTH_TILES, "x": jnp.zeros(32)}, ValueError, "both tiles"),
        ({"saturate": 1}, ValueError, "saturate"),
    ],
)
def test_bad_input_raises(change, error, why):
    arguments = {"x": jnp.zeros((2, 32)), "datatype": formats.mxfp4e2} | change
    with refused(why, error):
        cast(**arguments)


def test_explain_shows_the_kernels_of_a_cast(monkeypatch):
    for module in (dispatch, casting):
        monkeypatch.setattr(module, "device_kind", lambda: "NVIDIA A100")
    options = Cast(formats.mxfp8e4, Modes())
    x = jnp.ones((128, 64))
    table = casting.IMPLEMENTATIONS
    triton, _, xla = dispatch.judge(table, None, options, x, None)
    assert triton.reason is None or "no Pallas-Triton" in triton.reason
    assert "comes first" in xla.reason
    verdicts = dispatch.judge(table, None, Cast(formats.e4m3fn, Modes()), x, None)
    assert "e4m3fn has no power-of-two scales" in verdicts[0].reason
    assert verdicts[-1].reason is None
    with dispatch.recording() as calls:
        jax.eval_shape(lambda x: cast(x, formats.mxfp8e4), x)
    (call,) = calls
    assert call.op == "cast"
    assert call.operands == "float32[128, 64]"
