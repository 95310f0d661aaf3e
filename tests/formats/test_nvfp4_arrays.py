"""NVFP4 in arrays: the bits of packing, and the bits of the kernel in Pallas's
interpreter.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import counter
from pallas_kernels.fp4 import E2M1
from pallas_kernels.hopper.plan import SMALLEST_JAX
from tcfp_jax import formats
from tcfp_jax.formats import nvfp4_kernel, quantize_nvfp4
from tests import compile_for_h200 as h200
from tests.compile_for_h200 import compile_for, h200s, on
from tests.formats_oracles import QUICK, same

SHAPE = (64, 64)
SIGNS = np.where(np.arange(16) % 3, 1.0, -1.0).astype(np.float32)
CASES = [
    ("amax", {}),
    ("four_over_six", {"amax": 3.0}),
    ("fold_exact", {}),
    ("amax", {"signs": SIGNS, "key": counter.keys(7)}),
    ("fold_exact", {"key": counter.keys(7)}),
]


def awkward(dtype, shape=SHAPE, exponents=(-14, 3)):
    """Return rows of many magnitudes, and tiles with zeros, NaN, infinities, an outlier
    and negligible values.
    """
    random = np.random.default_rng(0)
    half, columns = shape[0] // 2, shape[1]
    x = np.ldexp(
        random.standard_normal(shape), random.integers(*exponents, (2 * half, 1))
    ).astype(np.float32)
    x[0], x[1, 3], x[2, 5], x[3, 7], x[4, :16], x[5, 1] = (
        0,
        np.nan,
        np.inf,
        1e4,
        -0.0,
        -np.inf,
    )
    x[6, :16], x[7, :16], x[8, :16], x[9, ::16] = 1e-39, 1e-30, 1e-12, -np.nan
    # Exact ties: integers and halves of the scale 1 of their tile, under an outer scale
    # of 1.
    x[half:] = random.integers(-12, 13, (half, columns)) / np.float32(2)
    x[half:, ::16], x[-1, 63] = 6, 2688
    return jnp.asarray(x).astype(dtype)


def same_codes(got, expected):
    """Return True if all arrays have equal bits."""
    return all(
        np.asarray(a).tobytes() == np.asarray(b).tobytes()
        for a, b in zip(got, expected, strict=True)
    )


# One of each rule, with and without a rotation and random bits.
@pytest.mark.slow_except("amax-signs-key")
@pytest.mark.parametrize(
    ("rule", "options"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (i in (0, 2)))
        for i, case in enumerate(CASES)
    ],
    ids=[f"{rule}-{'-'.join(options)}" for rule, options in CASES],
)
def test_the_kernel_has_the_bits_of_the_definition(rule, options):
    x = awkward("bfloat16" if rule == "four_over_six" else "float32")
    engines = [
        "triton",
        "xla",
        *["mosaic"] * (jax.__version_info__[:2] >= SMALLEST_JAX),
    ]
    run = lambda x: [
        quantize_nvfp4(x, rule=rule, backend=backend, **options) for backend in engines
    ]
    got, expected, *more = jax.jit(run, compiler_options=QUICK)(x)
    assert all(same_codes(found, expected) for found in (got, *more))
    assert (
        got.codes.shape == (64, 32)
        and got.scales.shape == (64, 4)
        and got.outer.shape == ()
    )


@pytest.mark.parametrize(("tile", "shape"), [("vector", (5, 50)), ("square", (40, 36))])
def test_arrays_hold_the_cast(tile, shape):
    x = jnp.asarray(np.random.default_rng(1).standard_normal(shape), jnp.float32)
    datatype = formats.nvfp4 if tile == "vector" else formats.nvfp4s
    both = lambda x: (
        quantize_nvfp4(x, rule="four_over_six", tile=tile),
        formats.cast(x, datatype, scalemode="four_over_six"),
    )
    made, expected = jax.jit(both, compiler_options=QUICK)(x)
    rows = shape[0] if tile == "vector" else -(-shape[0] // 16)
    assert made.codes.shape == (shape[0], shape[1] // 2) and made.scales.shape == (
        rows,
        -(-shape[1] // 16),
    )
    scales = np.repeat(np.asarray(made.scales).astype(np.float32), 16, 1)[:, : shape[1]]
    scales = scales if tile == "vector" else np.repeat(scales, 16, 0)[: shape[0]]
    codes = np.asarray(made.codes)
    nibbles = np.stack([codes & 15, codes >> 4], -1).reshape(shape)
    assert same(E2M1[nibbles] * (scales * np.asarray(made.outer)), expected)


def test_an_amax_that_is_not_finite_is_loud_and_random_bits_are_of_the_index():
    drawn = jax.jit(
        lambda x, key: quantize_nvfp4(x, amax=jnp.inf, key=key), compiler_options=QUICK
    )
    x = awkward("float32")
    assert jnp.isnan(drawn(x, counter.keys(1)).outer)
    drawn = jax.jit(lambda x, key: quantize_nvfp4(x, key=key), compiler_options=QUICK)
    first, second = (drawn(x, counter.keys(seed)).codes for seed in (1, 2))
    assert (first != second).mean() > 0.05
    # A device that holds the lower half knows where it begins: the index of its first
    # tile is 128.
    starts, shapes = jnp.asarray([32, 0], jnp.uint32), ((32, 4), (64, 4))
    places = nvfp4_kernel.first_values(
        jnp.arange(128, dtype=jnp.uint32), [starts], shapes
    )
    assert np.array_equal(places, 16 * (128 + np.arange(128)))
    starts, shapes = jnp.asarray([0, 2], jnp.uint32), ((64, 2), (64, 4))
    places = nvfp4_kernel.first_values(
        jnp.arange(128, dtype=jnp.uint32), [starts], shapes
    )
    assert np.array_equal(
        places.reshape(64, 2), 16 * (4 * np.arange(64)[:, None] + [2, 3])
    )


@pytest.mark.parametrize(
    ("change", "error", "why"),
    [
        ({"x": jnp.zeros((2, 32), jnp.int32)}, TypeError, "real floats"),
        ({"x": jnp.zeros((2, 31))}, ValueError, "pairs"),
        ({"rule": "max"}, ValueError, "rule='max' is unknown"),
        ({"tile": "row"}, ValueError, "tile='row'"),
        ({"tile": "square", "signs": SIGNS}, ValueError, "drop signs="),
        ({"x": jnp.zeros((2, 24)), "signs": SIGNS}, ValueError, "drop signs="),
        ({"x": jnp.zeros((16, 6))}, ValueError, "smaller than one tile of 16"),
        (
            {"x": jnp.zeros(16), "tile": "square"},
            ValueError,
            "smaller than one tile of 16",
        ),
        ({"amax": jnp.ones(2)}, ValueError, r"amax has shape \[2\]"),
        ({"key": jax.random.key(0)}, TypeError, "not two words"),
        (
            {"x": jnp.zeros((64, 40)), "backend": "triton"},
            NotImplementedError,
            "not whole tiles of 16 in groups",
        ),
        (
            {"x": jnp.zeros((8, 64), jnp.bfloat16), "backend": "triton"},
            NotImplementedError,
            "in groups of 128",
        ),
        (
            {"x": jnp.zeros((64, 64), jnp.float16), "backend": "triton"},
            NotImplementedError,
            "float16, not bfloat16",
        ),
        (
            {"tile": "square", "backend": "triton"},
            NotImplementedError,
            "squares have no kernel",
        ),
    ],
)
def test_bad_input_raises(change, error, why):
    with pytest.raises(error, match=why):
        quantize_nvfp4(**({"x": jnp.zeros((16, 32))} | change))


@pytest.mark.skipif(
    h200.missing() is not None and not h200.expected(), reason=str(h200.missing())
)
@pytest.mark.parametrize(
    ("backend", "target"), [(None, "__gpu$xla.gpu.triton"), ("mosaic", "mosaic_gpu_v2")]
)
def test_on_an_h200_it_is_one_kernel(backend, target):
    """It needs no memory of the size of x."""
    mesh = h200s(1)
    x, amax = on(mesh, (4096, 4096), jnp.bfloat16), on(mesh, (), jnp.float32)
    run = functools.partial(quantize_nvfp4, backend=backend)
    compiled = compile_for(
        mesh, lambda x, amax: run(x, rule="fold_exact", amax=amax), x, amax
    )
    assert compiled.targets == [target] and compiled.temporary_bytes <= 4096
    # The largest magnitude of a rotated array is found by a kernel of its own.
    assert compile_for(mesh, lambda x: run(x, signs=SIGNS), x).targets == [target] * 2
