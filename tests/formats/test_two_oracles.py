"""The quantizers of training and the casts of the format library share no code: each is
the other's oracle.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tcfp_jax
from tcfp_jax import formats
from tests.formats_oracles import same

DTYPES = {"float8_e4m3fn": "e4m3fn", "float8_e5m2": "e5m2"}
TINY = np.finfo(np.float32).tiny
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


@functools.partial(jax.jit, static_argnames=("dtype", "block", "tile", "scale"))
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
    normal = lambda: random.standard_normal(shape).astype(np.float32)
    rows = lambda low, high: np.ldexp(
        normal(), random.integers(low, high, (shape[0], 1))
    ).astype(np.float32)
    yield "normal", normal()
    yield "a binade to a row", rows(-100, 120)
    yield (
        "a binade to a value",
        np.ldexp(normal(), random.integers(-30, 30, shape)).astype(np.float32),
    )
    zeros = normal()
    zeros[: shape[0] // 2] = 0.0
    zeros[::3] = -0.0
    yield "zeros", zeros
    yield (
        "integers, halves and ties",
        (random.integers(-897, 898, shape) / 2).astype(np.float32),
    )
    # The value from which on a scale doubles, its neighbours, and quotients that round
    # up to the next binade.
    edges = np.ldexp(np.float32(1.75), random.integers(-3, 3, shape)).astype(np.float32)
    up, down = (np.nextafter(edges, np.float32(limit)) for limit in (np.inf, 0))
    yield (
        "edges of a scale",
        np.choose(random.integers(0, 3, shape), [edges, up, down]).astype(np.float32),
    )
    small = np.ldexp(
        1 + random.random(shape), random.integers(-126, -110, shape)
    ).astype(np.float32)
    yield (
        "the smallest normal values",
        small * random.choice([-1, 1], shape).astype(np.float32),
    )
    huge = np.ldexp(1 + random.random(shape) * 0.7499, 127).astype(np.float32)
    yield "the largest values", huge * random.choice([-1, 1], shape).astype(np.float32)


@pytest.mark.slow_except("float8_e4m3fn-32-square", "float8_e5m2-32-square")
@pytest.mark.parametrize("tile", ["vector", "square"])
@pytest.mark.parametrize("block", [32, 64, 128])
@every_dtype
def test_blocks_are_the_cast_bit_for_bit(dtype, block, tile):
    # whole tiles, and ragged ones on both axes
    for shape in ((2 * block, 256), (block + 5, 2 * block + 31)):
        for what, x in matrices(shape, block):
            expected = formats.cast(jnp.asarray(x), datatype_of(dtype, block, tile))
            assert same(quantized(jnp.asarray(x), dtype, block, tile), expected), (
                what,
                shape,
            )


@every_dtype
def test_one_scale_for_a_tensor_is_the_cast_bit_for_bit(dtype):
    for what, x in matrices((48, 67), 32):
        for array in (x, x.reshape(-1)[:1], x.reshape(3, 16, 67)):
            expected = formats.cast(jnp.asarray(array), datatype_of(dtype))
            assert same(quantized(jnp.asarray(array), dtype), expected), (
                what,
                array.shape,
            )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_inputs_are_the_cast_too(dtype):
    x = jax.random.normal(jax.random.key(0), (64, 100)).astype(dtype)
    expected = formats.cast(x.astype(jnp.float32), datatype_of("float8_e4m3fn", 32))
    assert same(quantized(x, "float8_e4m3fn", 32), expected)


@pytest.mark.slow_except("float8_e4m3fn")
@every_dtype
def test_float_scales_agree_but_for_the_rounding_of_reciprocals(dtype):
    """Training multiplies by a float32 `largest / amax` and keeps its reciprocal; casts
    round the exact quotient.
    """
    made = formats.datatype(DTYPES[dtype], "float32")
    for what, x in [
        m
        for m in matrices((48, 67), 32)
        if m[0] in ("normal", "zeros", "a binade to a value")
    ]:
        stored = tcfp_jax.quantize(jnp.asarray(x), dtype, scale="float32")
        scale = np.asarray(formats.pack(jnp.asarray(x), made).scales).view(np.float32)[
            0
        ]
        assert abs(float(stored.scale) / scale - 1) <= 1.01 * 2.0**-22, what
        quotient = x.astype(np.float64) / scale
        got = np.asarray(stored.dequantize(), np.float64) / float(stored.scale)
        cast = np.asarray(formats.cast(jnp.asarray(x), made), np.float64) / scale
        differ = np.abs(got - cast) > 1e-6 * np.abs(cast)
        # Another neighbour is chosen only where the quotient lies halfway between the
        # two, to float32's precision.
        middle = (got + cast) / 2
        assert np.all(
            np.abs(quotient - middle)[differ] <= 2.0**-21 * np.abs(middle[differ])
        ), what


def test_where_the_two_differ_by_design():
    """docs/formats.md lists these: NaN and inf, float32 subnormals, scales whose
    largest value leaves float32.
    """
    made = datatype_of("float8_e4m3fn", 32)
    x = jnp.ones((1, 64))
    for bad, alone in ((jnp.nan, jnp.nan), (jnp.inf, 1.75), (-jnp.inf, -1.75)):
        loud, quiet = (
            quantized(x.at[0, 3].set(bad), "float8_e4m3fn", 32),
            formats.cast(x.at[0, 3].set(bad), made),
        )
        assert jnp.isnan(loud[0, :32]).all() and jnp.isfinite(loud[0, 32:]).all()
        assert same(quiet, x.at[0, 3].set(alone))
    subnormal = jnp.full((1, 32), TINY / 4)
    with jax.numpy_dtype_promotion("standard"):
        bits = np.asarray(formats.cast(subnormal, made)).view(np.uint32)
    assert np.array_equal(bits, np.asarray(subnormal).view(np.uint32))
    assert not np.asarray(quantized(subnormal, "float8_e4m3fn", 32)).any()
    largest = jnp.full((1, 32), np.finfo(np.float32).max)
    assert jnp.isinf(quantized(largest, "float8_e4m3fn", 32)).all()
    assert same(formats.cast(largest, made), jnp.full((1, 32), 1.75 * 2.0**127))
