"""NVFP4 as numbers: the bits of the cast in every mode, of the kernel, and of parts of
a mesh; rotations.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.counter import bits_of, keys
from pallas_kernels.hopper.plan import SMALLEST_JAX
from tcfp_jax import formats
from tcfp_jax.formats import nvfp4_arrays
from tcfp_jax.formats.float_bits import to_bits
from tcfp_jax.formats.nvfp4_registers import SIDE
from tcfp_jax.formats.quantization import quantize
from tcfp_jax.formats.rounding import Modes
from tests import compile_for_h200 as h200
from tests.compile_for_h200 import compile_for, h200s, on
from tests.formats_oracles import QUICK, same

KEY = keys(7)
SIGNS = np.where(np.arange(16) % 3, 1.0, -1.0).astype(np.float32)
DATATYPES = {
    "last": formats.nvfp4,
    "first": formats.datatype("e2m1f", "e4m3fn_t16d0_float32"),
    "squares": formats.nvfp4s,
}
quantize_values = jax.jit(
    nvfp4_arrays.quantize_values,
    static_argnums=1,
    static_argnames="backend",
    compiler_options=QUICK,
)


def wild(spread, shape=(32, 64)):
    """Return values of many magnitudes, with ties, a block of zeros, an outlier and a
    NaN.
    """
    random = np.random.default_rng(0)
    x = np.float32(
        random.standard_normal(shape) * np.exp(spread * random.standard_normal(shape))
    )
    x[5, :32], x[5, 0] = np.arange(32) / 4 - 4, 6
    x[16:, 48:], x[4, 5], x[9, 9], x[11, 3] = 0, 1e4, np.nan, 1e-39
    return jnp.asarray(x)


def both(x, place, key):
    """Return (values, outer) of numbers and of the cast."""
    drawn = None
    if key is not None:  # a block's values follow each other
        whole = (-1, SIDE, x.shape[1]) if place == "first" else (*x.shape, 1)
        drawn = bits_of(x.reshape(whole).shape, *key, fastest=1).reshape(x.shape)
    parts = quantize(
        to_bits(x),
        DATATYPES[place],
        Modes("even" if drawn is None else "stochastic"),
        drawn,
    )
    values = DATATYPES[place].layout(x.shape).join(parts.value * parts.scale)
    axis = {"last": -1, "first": 0}.get(place)
    return nvfp4_arrays.quantize_values(x, axis, key), (values, parts.outer)


@pytest.mark.slow_except("last-keys0", "squares-keys2")
@pytest.mark.parametrize(
    ("place", "keys"),
    [("last", (None, KEY)), ("first", (None, KEY)), ("squares", (None,))],
)
def test_numbers_are_the_values_of_the_cast_bit_for_bit(place, keys):
    run = jax.jit(
        lambda x: [both(x, place, key) for key in keys], compiler_options=QUICK
    )
    for spread in (0.0, 2.0, 9.0):
        for found, (values, outer) in run(wild(spread)):
            assert found.values.dtype == jnp.bfloat16 and float(found.outer) == float(
                outer
            )
            assert same(found.values, values), spread


@pytest.mark.slow_except("first, rotated-stochastic")
@pytest.mark.parametrize("key", [None, KEY], ids=["nearest", "stochastic"])
@pytest.mark.parametrize(
    ("axis", "signs"), [(-1, None), (0, SIGNS)], ids=["last", "first, rotated"]
)
def test_the_kernel_has_the_bits_of_xla(axis, signs, key):
    x = wild(9.0 if key is None else 2.0, (32, 128)).at[20, 70].set(jnp.inf)
    wanted = quantize_values(x, axis, key, signs)
    for backend in ["triton", *["mosaic"] * (jax.__version_info__[:2] >= SMALLEST_JAX)]:
        got = quantize_values(x, axis, key, signs, backend=backend)
        assert same(got.values, wanted.values) and float(got.outer) == float(
            wanted.outer
        )


@pytest.mark.parametrize(
    "axes", [("a", None), pytest.param((None, "a"), marks=pytest.mark.slow)]
)
def test_parts_of_a_mesh_have_the_bits_of_the_whole(axes):
    """The kernel runs in one case; in the other, parts have too few columns for it."""
    x, mesh = (
        wild(2.0, (32, 128)),
        jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,)),
    )
    place = lambda *spec: jax.sharding.NamedSharding(
        mesh, jax.sharding.PartitionSpec(*spec)
    )
    got = quantize_values(
        jax.device_put(x, place(*axes)),
        0,
        jax.device_put(KEY, place()),
        backend="triton",
    )
    assert got.values.sharding.is_equivalent_to(place(*axes), 2)
    assert same(got.values, quantize_values(x, 0, KEY).values)


@pytest.mark.skipif(
    h200.missing() is not None and not h200.expected(), reason=str(h200.missing())
)
@pytest.mark.parametrize(
    ("backend", "target"), [(None, "__gpu$xla.gpu.triton"), ("mosaic", "mosaic_gpu_v2")]
)
def test_on_an_h200_rotated_values_are_written_once(backend, target):
    """Two kernels run, one of them for the maximum, and no float32 array of the size of
    x exists.
    """
    mesh = h200s(1)
    x, key, turn = (
        on(mesh, *of)
        for of in (
            ((4096, 1024), jnp.bfloat16),
            ((2,), jnp.uint32),
            ((16,), jnp.float32),
        )
    )
    run = lambda x, key, turn: nvfp4_arrays.quantize_values(
        x, 0, (key[0], key[1]), turn, backend=backend
    )
    compiled = compile_for(mesh, run, x, key, turn)
    assert compiled.targets == [target] * 2 and compiled.temporary_bytes <= 1 << 16


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf, 1e38, 1e-39, 0.0])
def test_bad_input_is_loud_in_its_block_alone(value):
    x = jnp.ones((2, 32)).at[0, 3].set(value)
    got = np.asarray(quantize_values(x, -1).dequantize())
    assert (
        np.isnan(got[0, :16]).all() == (not np.isfinite(value))
        and np.isfinite(got[:, 16:]).all()
    )
    np.testing.assert_allclose(got[1], 1 if value != 1e38 else 0, atol=1e-6)
    assert (np.asarray(quantize_values(jnp.zeros((2, 32)), -1).dequantize()) == 0).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rotations_are_the_format_librarys(dtype):
    x = jax.random.normal(jax.random.key(0), (32, 128)).astype(dtype)
    run = lambda x: (
        nvfp4_arrays.observe(x, 0, signs=jnp.asarray(SIGNS)).exact,
        formats.rotate(x.astype(jnp.float32), 16, signs=SIGNS, dim=0),
    )
    assert same(*jax.jit(run, compiler_options=QUICK)(x))
