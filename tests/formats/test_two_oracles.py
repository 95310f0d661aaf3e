"""The quantizers of training and the casts of the format library share no code: each is
the other's oracle.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import tcfp_jax
from tcfp_jax import formats
from tests.formats_oracles import same
from tests.helpers import parametrize, slow_except

DTYPES = {"float8_e4m3fn": "e4m3fn", "float8_e5m2": "e5m2"}
TINY = np.finfo(np.float32).tiny
every_dtype = parametrize("dtype", DTYPES)


@partial(jax.jit, static_argnames=("dtype", "block", "tile", "scale"))
def quantized(x, dtype, block=None, tile="vector", scale="pow2"):
    return tcfp_jax.quantize(x, dtype, block=block, tile=tile, scale=scale).dequantize()


def datatype_of(dtype, block=None, tile="vector"):
    """The datatype of `tcfp_jax.quantize`: scales that cover the largest value."""
    tiles = "" if block is None else f"_t{block}" * (2 if tile == "square" else 1)
    return formats.datatype(DTYPES[dtype], f"e8m0{tiles}_ceil")


def matrices(shape, block):
    """Yield (name, matrix): magnitudes of the whole range that both define equally, and
    edges of the formats.
    """
    random = np.random.default_rng(block)

    def scaled(values, low, high, sizes=shape):
        return np.ldexp(values, random.integers(low, high, sizes)).astype(np.float32)

    def normal():
        return random.standard_normal(shape).astype(np.float32)

    yield "normal", normal()
    yield "a binade to a row", scaled(normal(), -100, 120, (shape[0], 1))
    yield "a binade to a value", scaled(normal(), -30, 30)
    zeros = normal()
    zeros[: shape[0] // 2] = 0.0
    zeros[::3] = -0.0
    yield "zeros", zeros
    halves = random.integers(-897, 898, shape) / 2
    yield "integers, halves and ties", halves.astype(np.float32)
    # The value from which on a scale doubles, its neighbours, and quotients that round
    # up to the next binade.
    edges = scaled(np.float32(1.75), -3, 3)
    up = np.nextafter(edges, np.float32(np.inf))
    down = np.nextafter(edges, np.float32(0))
    yield "edges of a scale", np.choose(random.integers(0, 3, shape), [edges, up, down])
    signs = random.choice(np.float32([-1, 1]), shape)
    yield "the smallest values", scaled(1 + random.random(shape), -126, -110) * signs
    huge = scaled(1 + random.random(shape) * 0.7499, 127, 128)
    yield "the largest values", huge * signs


@slow_except("float8_e4m3fn-32-square", "float8_e5m2-32-square")
@parametrize("tile", ["vector", "square"])
@parametrize("block", [32, 64, 128])
@every_dtype
def test_blocks_are_the_cast_bit_for_bit(dtype, block, tile):
    # whole tiles, and ragged ones on both axes
    for shape in ((2 * block, 256), (block + 5, 2 * block + 31)):
        for what, x in matrices(shape, block):
            expected = formats.cast(x, datatype_of(dtype, block, tile))
            assert same(quantized(x, dtype, block, tile), expected), (what, shape)


@every_dtype
def test_one_scale_for_a_tensor_is_the_cast_bit_for_bit(dtype):
    for what, x in matrices((48, 67), 32):
        for array in (x, x.reshape(-1)[:1], x.reshape(3, 16, 67)):
            expected = formats.cast(array, datatype_of(dtype))
            assert same(quantized(array, dtype), expected), (what, array.shape)


@parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_inputs_are_the_cast_too(dtype):
    x = jax.random.normal(jax.random.key(0), (64, 100)).astype(dtype)
    expected = formats.cast(x.astype(jnp.float32), datatype_of("float8_e4m3fn", 32))
    assert same(quantized(x, "float8_e4m3fn", 32), expected)


@slow_except("float8_e4m3fn")
@every_dtype
def test_float_scales_agree_but_for_rounded_reciprocals(dtype):
    """Training multiplies by a float32 `largest / amax` and keeps its reciprocal; casts
    round the exact quotient.
    """
    made = formats.datatype(DTYPES[dtype], "float32")
    for what, x in matrices((48, 67), 32):
        if what not in ("normal", "zeros", "a binade to a value"):
            continue
        stored = tcfp_jax.quantize(jnp.asarray(x), dtype, scale="float32")
        scale = np.asarray(formats.pack(x, made).scales).view(np.float32)[0]
        assert abs(float(stored.scale) / scale - 1) <= 1.01 * 2.0**-22, what
        got = np.float64(stored.dequantize()) / float(stored.scale)
        cast = np.float64(formats.cast(x, made)) / scale
        differ = np.abs(got - cast) > 1e-6 * np.abs(cast)
        # Another neighbour is chosen only where the quotient lies halfway between the
        # two, to float32's precision.
        middle = ((got + cast) / 2)[differ]
        quotient = (x.astype(np.float64) / scale)[differ]
        assert np.all(np.abs(quotient - middle) <= 2.0**-21 * np.abs(middle)), what


def packed(x):
    return tcfp_jax.quantize_tcfp12(x).dequantize()


@slow_except("quantize")
@parametrize(
    "training, made",
    [
        (lambda x: quantized(x, "float8_e4m3fn", 32), datatype_of("float8_e4m3fn", 32)),
        (packed, formats.tcfp12),
    ],
    ids=["quantize", "tcfp12"],
)
def test_where_the_two_differ_by_design(training, made):
    """docs/formats.md lists these: NaN and inf, float32 subnormals, scales whose
    largest value leaves float32.
    """
    x = jnp.ones((1, 64))
    for bad, alone in ((jnp.nan, jnp.nan), (jnp.inf, 1.75), (-jnp.inf, -1.75)):
        loud = training(x.at[0, 3].set(bad))
        assert jnp.isnan(loud[0, :32]).all()
        assert same(loud[0, 32:], x[0, 32:])
        assert same(formats.cast(x.at[0, 3].set(bad), made), x.at[0, 3].set(alone))
    subnormal = jnp.full((1, 32), TINY / 4)
    assert same(formats.cast(subnormal, made), subnormal)
    assert not np.asarray(training(subnormal)).any()


def test_scales_that_leave_float32_differ_by_design():
    largest = jnp.full((1, 32), np.finfo(np.float32).max)
    assert same(quantized(largest, "float8_e4m3fn", 32), largest)
    cast = formats.cast(largest, datatype_of("float8_e4m3fn", 32))
    assert same(cast, jnp.full((1, 32), 1.75 * 2.0**127))
