"""NVFP4 as numbers: the bits of the cast in every mode, of the kernel, and of parts of
a mesh; rotations.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.counter import bits_of, keys
from pallas_kernels.hopper.plan import SMALLEST_JAX
from tcfp_jax import formats
from tcfp_jax.formats import nvfp4_arrays, nvfp4_kernel
from tcfp_jax.formats.float_bits import to_bits
from tcfp_jax.formats.nvfp4_registers import SIDE, Kind
from tcfp_jax.formats.quantization import quantize
from tcfp_jax.formats.rounding import Modes
from tests import compile_for_h200 as h200
from tests.compile_for_h200 import compile_for, h200s, on
from tests.formats_oracles import QUICK, same
from tests.helpers import parametrize, refused, slow, slow_except

KEY = keys(7)
SIGNS = np.where(np.arange(16) % 3, 1.0, -1.0).astype(np.float32)
# The axis of blocks, random bits and signs: all that training uses, and blocks down the
# first axis that are not rotated.
CASES = {
    "last": (-1, None, None),
    "last, stochastic": (-1, KEY, None),
    "first": (0, None, None),
    "rotated": (0, None, SIGNS),
    "rotated, stochastic": (0, KEY, SIGNS),
}
DATATYPES = {
    -1: formats.nvfp4,
    0: formats.datatype("e2m1f", "e4m3fn_t16d0_float32"),
    None: formats.nvfp4s,
}
ENGINES = ["triton"]
if jax.__version_info__[:2] >= SMALLEST_JAX:
    ENGINES.append("mosaic")
quantize_values = jax.jit(
    nvfp4_arrays.quantize_values,
    static_argnums=1,
    static_argnames="backend",
    compiler_options=QUICK,
)


def awkward(dtype, shape=(64, 64), exponents=(-14, 3)):
    """Return rows of many magnitudes, and tiles with zeros, NaN, infinities, an outlier
    and negligible values.
    """
    random = np.random.default_rng(0)
    powers = random.integers(*exponents, (shape[0], 1))
    x = np.ldexp(random.standard_normal(shape), powers).astype(np.float32)
    x[0] = 0
    x[1, 3] = np.nan
    x[2, 5] = np.inf
    x[3, 7] = 1e4
    x[4, :16] = -0.0
    x[5, 1] = -np.inf
    x[6, :16] = 1e-39
    x[7, :16] = 1e-30
    x[8, :16] = 1e-12
    x[9, ::16] = -np.nan
    # Exact ties: integers and halves of the scale 1 of their tile, under an outer scale
    # of 1.
    ties = x[shape[0] // 2 :]
    ties[:] = random.integers(-12, 13, ties.shape) / np.float32(2)
    ties[:, ::16] = 6
    ties[-1, -1] = 2688
    return jnp.asarray(x).astype(dtype)


def cast(x, axis, key):
    """Return (values, outer) of the definition."""
    drawn = None
    if key is not None:  # a block's values follow each other
        blocks = (-1, SIDE, x.shape[1]) if axis == 0 else (*x.shape, 1)
        drawn = bits_of(x.reshape(blocks).shape, *key, fastest=1).reshape(x.shape)
    modes = Modes("even" if key is None else "stochastic")
    parts = quantize(to_bits(x), DATATYPES[axis], modes, drawn)
    layout = DATATYPES[axis].layout(x.shape)
    return layout.join(parts.value * parts.scale), parts.outer


@slow_except("-1-keys0", "None-keys2")
@parametrize(("axis", "keys"), [(-1, (None, KEY)), (0, (None, KEY)), (None, (None,))])
def test_numbers_are_the_values_of_the_cast(axis, keys):
    def both(x):
        made = [nvfp4_arrays.quantize_values(x, axis, key) for key in keys]
        return made, [cast(x, axis, key) for key in keys]

    run = jax.jit(both, compiler_options=QUICK)
    for exponents in ((-2, 3), (-14, 3), (-40, 40)):
        x = awkward("float32", (32, 64), exponents)
        # A cast saturates infinities.
        made, wanted = run(jnp.where(jnp.isinf(x), 1e4, x))
        for found, (values, outer) in zip(made, wanted, strict=True):
            assert found.values.dtype == jnp.bfloat16
            assert float(found.outer) == float(outer)
            assert same(found.values, values), exponents


@slow_except("rotated, stochastic")
@parametrize("name", CASES)
def test_the_kernel_has_the_bits_of_xla(name):
    x = awkward("float32", (32, 128), (-20, 20))
    wanted = quantize_values(x, *CASES[name], backend="xla")
    for backend in ENGINES:
        got = quantize_values(x, *CASES[name], backend=backend)
        assert float(got.outer) == float(wanted.outer)
        assert same(got.values, wanted.values), backend


REFUSED = [
    ((64, 64), "float32", None, "squares have no kernel"),
    ((64, 40), "float32", -1, "not whole tiles of 16 in groups"),
    ((8, 64), "bfloat16", -1, "in groups of 128"),
    ((64, 64), "bfloat16", 0, "in groups of 128"),
    ((2, 64, 128), "float32", 1, "blocks within an axis"),
    ((64, 64), "float16", -1, "float16, not bfloat16"),
]


@parametrize(("shape", "dtype", "axis", "why"), REFUSED)
def test_the_kernel_says_what_it_cannot_take(shape, dtype, axis, why):
    with refused(why, NotImplementedError):
        nvfp4_arrays.quantize_values(jnp.zeros(shape, dtype), axis, backend="triton")


@parametrize("axes", [("a", None), pytest.param((None, "a"), marks=slow)])
def test_parts_of_a_mesh_have_the_bits_of_the_whole(axes):
    """The kernel runs in one case; in the other, parts have too few columns for it."""
    x = awkward("float32", (32, 128))
    mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))

    def place(*spec):
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))

    parts = jax.device_put(x, place(*axes))
    key = jax.device_put(KEY, place())
    got = quantize_values(parts, 0, key, backend="triton")
    assert got.values.sharding.is_equivalent_to(place(*axes), 2)
    assert same(got.values, quantize_values(x, 0, KEY).values)


@parametrize(
    ("starts", "own", "wanted"),
    [
        ([32, 0], (32, 4), 128 + np.arange(128)),
        ([0, 2], (64, 2), 4 * np.arange(64)[:, None] + [2, 3]),
    ],
)
def test_a_device_knows_where_its_part_begins(starts, own, wanted):
    job = nvfp4_kernel.Job(Kind(-1, True, False), (64, 4), None)
    block = jnp.arange(128, dtype=jnp.uint32)
    first = nvfp4_kernel.first_values(job, own, block, jnp.asarray(starts, jnp.uint32))
    assert np.array_equal(first, 16 * wanted.reshape(-1))


@pytest.mark.skipif(
    h200.missing() is not None and not h200.expected(), reason=str(h200.missing())
)
@parametrize(
    ("backend", "target"), [(None, "__gpu$xla.gpu.triton"), ("mosaic", "mosaic_gpu_v2")]
)
def test_on_an_h200_numbers_are_written_once(backend, target):
    """One kernel runs, and no other array of the size of x exists."""
    mesh = h200s(1)
    x = on(mesh, (4096, 1024), jnp.bfloat16)
    words = on(mesh, (2,), jnp.uint32)
    turn = on(mesh, (16,), jnp.float32)
    run = functools.partial(nvfp4_arrays.quantize_values, backend=backend)

    def rotated(x, words, turn):
        return run(x, 0, (words[0], words[1]), turn)

    for function, arguments in (
        (lambda x: run(x, -1), (x,)),
        (rotated, (x, words, turn)),
    ):
        compiled = compile_for(mesh, function, *arguments)
        assert compiled.targets == [target]
        assert compiled.temporary_bytes <= 1 << 16


@parametrize("value", [jnp.nan, jnp.inf, 1e38, 1e-39, 0.0])
def test_bad_input_is_loud_in_its_block_alone(value):
    x = jnp.ones((2, 32)).at[0, 3].set(value)
    got = np.asarray(quantize_values(x, -1).dequantize())
    assert np.isnan(got[0, :16]).all() == (not np.isfinite(value))
    assert np.isfinite(got[:, 16:]).all()
    np.testing.assert_allclose(got[1], 1 if value != 1e38 else 0, atol=1e-6)


def test_zeros_are_zeros():
    assert not np.asarray(quantize_values(jnp.zeros((2, 32)), -1).dequantize()).any()


@parametrize("dtype", ["float32", "bfloat16"])
def test_rotations_are_the_format_librarys(dtype):
    x = jax.random.normal(jax.random.key(0), (32, 128)).astype(dtype)

    def both(x):
        seen = nvfp4_arrays.observe(x, 0, signs=jnp.asarray(SIGNS))
        wide = x.astype(jnp.float32)
        return seen.exact, formats.rotate(wide, 16, signs=SIGNS, dim=0)

    assert same(*jax.jit(both, compiler_options=QUICK)(x))
